"""tpu/compiler/versions.py: its cases, a compiler that dies, the page.

That they compile is seen by `make guards`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tpu.compiler import apart, libtpu, versions
from tpu.compiler import compile as compiling
from train.common.xla import backend

OLD, NEW = libtpu.VERSIONS
CASE = next(case for case in versions.CASES if "evaluate" in case.programs)
LIBTPUS_STACK = 65_536  # bytes


def names() -> list[str]:
    """Returns the names of all programs of all cases."""
    found = []
    for case in versions.CASES:
        found += [case.named(program) for program in case.programs]
    return found


def figures() -> dict[str, dict]:
    return versions.results.load(versions.FIGURES)


# The cases


def test_every_program_has_a_name_of_its_own():
    assert len(names()) == len(set(names()))
    assert len(names()) > 100


def test_all_but_the_longest_have_figures():
    """And no figure is of a case that is gone."""
    assert figures().keys() <= set(names())
    missing = set(names()) - figures().keys()
    assert all(name.startswith("xlnet-large") for name in missing), missing


def test_every_case_is_a_configuration_of_its_script():
    for case in versions.CASES:
        row = case.row
        job = compiling.Job(row.model, row.preset, row.task, row.flags, row.batch)
        assert job.config(8).safe_forms is False, row.name
        assert set(case.programs) <= set(compiling.PROGRAMS)


@pytest.mark.parametrize(
    ("model", "absent"),
    [("resnet50", {"--remat", "--mesh"}), ("transformer", set()), ("bert", set())],
)
def test_every_flag_is_tried_in_every_script_that_has_it(model, absent):
    flags = {"--remat", "--update-every", "--precision", "--shard-state", "--mesh"}
    tried = set()
    for case in versions.CASES:
        if case.row.model == model:
            tried.update(case.row.flags)
    assert flags - tried == absent


def test_a_flag_that_is_given_twice_has_the_last_value():
    first = ("--a", "1", "--precision", "bfloat16")
    second = ("--precision", "float32")
    assert versions._merged(first, second) == ("--a", "1", "--precision", "float32")


# The figures


def test_safe_forms_die_with_remat_only_as_the_page_says():
    died = []
    for name, found in figures().items():
        if "died" in found.get(versions.SAFE, {}):
            died.append(name)
    assert died
    assert all("--remat" in name for name in died), died


def test_the_page_is_what_the_figures_say():
    page = versions.page(figures())
    assert versions.PAGE.read_text() == page, "python -m tpu.compiler.versions --print"


def test_the_default_stack_is_four_times_the_largest_need():
    needs = [found["least_stack"] for found in figures().values()]
    assert None not in needs, "a program that dies with every stack that was tried"
    assert 4 * max(needs) <= versions.DEFAULT_STACK


def test_every_program_that_was_compiled_compiles_on_a_tpu_vm():
    for name, found in figures().items():
        assert "needed" in found[OLD], (name, found[OLD])
        if "--remat" in name:  # of which docs/tpu.md says that safe forms may not be enough
            continue
        if versions.SAFE in found:
            assert "needed" in found[versions.SAFE], (name, found[versions.SAFE])


# A compiler that dies


@dataclass(frozen=True)
class Attempt:
    """A call of the compiler."""

    module: bytes
    version: str
    stack: int  # bytes


@dataclass
class MortalCompiler:
    """Dies of usual forms in the old version on a stack below `enough` bytes."""

    enough: int
    attempts: list[Attempt]

    def compile(self, module, topology, effort, library, variables) -> apart.Compiled:
        flags = {}
        for flag in variables["LIBTPU_INIT_ARGS"].split():
            name, value = flag.split("=")
            flags[name] = value
        name_of_stack, _, _ = backend.STACK.partition("=")
        stack = int(flags.get(name_of_stack, LIBTPUS_STACK))
        version = OLD if OLD in str(library) else NEW
        self.attempts.append(Attempt(module, version, stack))

        if module == b"usual" and version == OLD and stack < self.enough:
            raise apart.CompilerDied(OLD, "SIGSEGV, stack overflow", "")
        memory = SimpleNamespace(needed=2**30)
        return apart.Compiled(memory, None, b"")


def stage(job, mesh, script):
    """Stands in for compile.stage: the module says which forms the job asks for."""
    module = b"safe" if "--safe-forms" in job.flags else b"usual"
    return None, SimpleNamespace(module=module, kept=5)


@pytest.mark.parametrize("enough", [65_536, 98_304])
def test_the_least_stack_is_the_first_that_compiles(enough, monkeypatch):
    """And safe forms are tried, without a flag for the stack, where libtpu's own is too small."""
    compiler = MortalCompiler(enough, [])
    topology = MagicMock(num_devices=1, kind="TPU v5 lite")
    topology.__enter__.return_value = topology
    monkeypatch.setattr(apart, "compile", compiler.compile)
    monkeypatch.setattr(libtpu, "installed", lambda version: version)
    monkeypatch.setattr(libtpu, "Topology", lambda *_: topology)
    mesh = compiling.device.Mesh(*[None] * 8)
    monkeypatch.setattr(versions.staging, "setup", lambda *_: mesh)
    monkeypatch.setattr(compiling, "stage", stage)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of=theshell")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "")

    case = versions.replace(CASE, programs=("evaluate",))
    found = versions.compile_case(case)["evaluate"]

    assert found["least_stack"] == enough
    assert found[OLD] == {"needed": 2**30 + 5}
    assert found[NEW] == {"needed": 2**30 + 5}
    assert compiler.attempts[0] == Attempt(b"usual", NEW, versions.DEFAULT_STACK)
    if enough > LIBTPUS_STACK:
        assert versions.SAFE in found
        assert compiler.attempts[-1] == Attempt(b"safe", OLD, LIBTPUS_STACK)
    else:
        assert versions.SAFE not in found


# The page


def line_of(lines: list[str], program: str) -> str:
    """Returns the only line of a program of CASE."""
    cells = f"| {CASE.row.name} | {program} | {CASE.topology} "
    (line,) = (line for line in lines if cells in line)
    return line


def test_the_page_says_what_was_not_run_and_what_dies():
    found = {
        OLD: {"died": "SIGSEGV, stack overflow"},
        NEW: {"needed": 2**31},
        "least_stack": None,
        versions.SAFE: {"needed": 2**30},
    }
    lines = versions.page({CASE.named("evaluate"): found}).splitlines()

    dead = "| **dies** (SIGSEGV, stack overflow) | 2.00 | 1.00 | more than 256 |"
    assert dead in line_of(lines, "evaluate")
    not_run = "| not run | not run | not run | not run |"
    assert line_of(lines, "train").endswith(not_run)
