"""tpu/compiler/versions.py: its cases, a compiler that dies, the page. That they compile is seen by `make guards`."""

import pytest

from tpu.compiler import apart, libtpu, versions
from tpu.compiler import compile as compiling
from train.common.xla import backend

OLD, NEW = libtpu.VERSIONS
CASE = next(case for case in versions.CASES if "evaluate" in case.programs)


def test_every_program_has_a_name_of_its_own():
    names = [case.named(program) for case in versions.CASES for program in case.programs]
    assert len(names) == len(set(names)) > 100


def test_all_but_the_longest_have_figures():
    """And no figure is of a case that is gone."""
    every = {case.named(program) for case in versions.CASES for program in case.programs}
    figures = set(versions.results.load(versions.FIGURES))
    assert figures <= every
    assert all(name.startswith("xlnet-large") for name in every - figures), every - figures


def test_the_safe_forms_that_die_have_remat_as_the_page_says():
    figures = versions.results.load(versions.FIGURES)
    died = [name for name, found in figures.items() if "died" in found.get(versions.SAFE, {})]
    assert died and all("--remat" in name for name in died), died
    assert versions.PAGE.read_text() == versions.page(figures), "python -m tpu.compiler.versions --print"


def test_every_case_is_a_configuration_of_its_script():
    for case in versions.CASES:
        row = case.row
        config = compiling.Job(row.model, row.preset, row.task, row.flags, row.batch).config(8)
        assert config.safe_forms is False, row.name
        assert set(case.programs) <= set(compiling.PROGRAMS)


def test_every_flag_is_tried_in_every_script_that_has_it():
    flags = ("--remat", "--update-every", "--precision", "--shard-state", "--mesh")
    for model, absent in (("resnet50", {"--remat", "--mesh"}), ("transformer", set()), ("bert", set())):
        tried = {flag for case in versions.CASES if case.row.model == model for flag in case.row.flags}
        assert set(flags) - tried == absent, model


def test_a_flag_that_is_given_twice_has_the_last_value():
    merged = versions._merged(("--a", "1", "--precision", "bfloat16"), ("--precision", "float32"))
    assert merged == ("--a", "1", "--precision", "float32")


def test_the_default_stack_is_four_times_the_largest_need():
    needs = [found["least_stack"] for found in versions.results.load(versions.FIGURES).values()]
    assert None not in needs, "a program that dies with every stack that was tried"
    assert 4 * max(needs) <= versions.DEFAULT_STACK


def test_every_program_that_was_compiled_compiles_on_a_tpu_vm():
    for name, found in versions.results.load(versions.FIGURES).items():
        assert "needed" in found[OLD], (name, found[OLD])
        if versions.SAFE in found and "--remat" not in name:  # of which docs/tpu.md says that they may not be enough
            assert "needed" in found[versions.SAFE], (name, found[versions.SAFE])


@pytest.mark.parametrize("enough", [65_536, 98_304])
def test_the_least_stack_is_the_first_that_the_compiler_survives(enough, monkeypatch):
    """With a compiler that dies below `enough`, and one of the safe forms that has no flag for it."""
    tried = []

    class Memory:
        needed = 2**30

    def compile(module, topology, effort, library, variables):
        flags = dict(flag.split("=") for flag in variables["LIBTPU_INIT_ARGS"].split())
        stack = int(flags.get(backend.STACK.split("=")[0], 65_536))
        tried.append((module, OLD if OLD in str(library) else NEW, stack))
        if module == b"usual" and OLD in str(library) and stack < enough:
            raise apart.CompilerDied(OLD, "SIGSEGV, stack overflow", "")
        return apart.Compiled(Memory, None, b"")

    class Staged:
        kept = 5

        def __init__(self, module):
            self.module = module

    class Topology:
        num_devices, kind = 1, "TPU v5 lite"
        __init__ = __exit__ = lambda *_: None
        __enter__ = lambda self: self  # noqa: E731

    def stage(job, mesh, script):
        return None, Staged(b"safe" if "--safe-forms" in job.flags else b"usual")

    monkeypatch.setattr(apart, "compile", compile)
    monkeypatch.setattr(libtpu, "installed", lambda version: version)
    monkeypatch.setattr(libtpu, "Topology", Topology)
    monkeypatch.setattr(versions.staging, "setup", lambda *_: compiling.device.Mesh(*[None] * 8))
    monkeypatch.setattr(compiling, "stage", stage)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of=theshell")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "")
    found = versions.compile_case(versions.replace(CASE, programs=("evaluate",)))["evaluate"]

    assert found["least_stack"] == enough
    assert found[OLD] == found[NEW] == {"needed": 2**30 + 5}
    assert tried[0] == (b"usual", NEW, versions.DEFAULT_STACK)
    assert (versions.SAFE in found) is (enough > 65_536)
    if enough > 65_536:
        assert tried[-1] == (b"safe", OLD, 65_536)


def test_the_page_says_what_was_not_run_and_what_dies():
    name = CASE.named("evaluate")
    dead = {"died": "SIGSEGV, stack overflow"}
    figures = {name: {OLD: dead, NEW: {"needed": 2**31}, "least_stack": None, versions.SAFE: {"needed": 2**30}}}
    lines = versions.page(figures).splitlines()
    (line,) = (line for line in lines if f"| {CASE.row.name} | evaluate | {CASE.topology} " in line)
    assert "| **dies** (SIGSEGV, stack overflow) | 2.00 | 1.00 | more than 256 |" in line
    (other,) = (line for line in lines if f"| {CASE.row.name} | train | {CASE.topology} " in line)
    assert other.endswith("| not run | not run | not run | not run |")
