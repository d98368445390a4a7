"""What keeps a run alive on the libtpu of a TPU VM: the flags that it gets, and forms that compile
without them.

That the programs compile with it, and what becomes of one without the flag, is in
tests/test_compile.py.
"""

import os
import signal
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
import torch_xla

from errors import InputError
from models import layers
from tpu.compiler import apart, libtpu, pages
from tpu.compiler import compile as compiling
from tpu.launch import messages
from train import dlrm, glue, pretrain, resnet50, transformer
from train.common import device
from train.common.sharding.layout import REDUCE_SCATTERS
from train.common.xla import backend

SCRIPTS = (resnet50, transformer, glue, pretrain, dlrm)
# What libtpu 0.0.21 wrote when it died, without most of its stack.
TRACE = """*** SIGSEGV STACK OVERFLOW (see go/cppstackoverflow) received by PID 7036 (TID 7137) \
on cpu 0; ***
PC: @     0x7f2255eac4b4  (unknown)  (unknown)
    @     0x7f225ea9abc5       1904  (unknown)
E1128 13:42:18.946427    7137 process_state.cc:808] RAW: Raising signal 11 with default behavior
"""


@pytest.fixture(autouse=True)
def usual_forms():
    """Leaves the process as it was: the forms are one setting of it."""
    yield
    layers.use_forms(clamp_weights=True)


@pytest.fixture
def no_flags(monkeypatch):
    monkeypatch.setattr(backend, "_added_flags", set())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")


def attended(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the result and the gradients of attention without dropout."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 8, 8, generator=generator).requires_grad_()
    values = torch.randn(2, 8, 3, 4, generator=generator).to(dtype).requires_grad_()
    mask = torch.zeros(2, 1, 1, 8)
    mask[0, ..., 5:] = layers.MASKED

    mixed = layers.AttentionCore.apply(scores, values, mask, 0.0)
    return [mixed, *torch.autograd.grad(mixed.float().square().sum(), [scores, values])]


# The forms, and the flags of libtpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_safe_forms_compute_the_same_bits(dtype):
    usual = attended(dtype)
    layers.use_forms(clamp_weights=False)
    safe = attended(dtype)
    for one, other in zip(usual, safe, strict=True):
        assert torch.equal(one, other)


def test_safe_forms_put_nothing_between_softmax_and_cast(mesh):
    def operations() -> str:
        scores = torch.ones(1, 1, 8, 8).to(mesh.device)
        values = torch.ones(1, 8, 1, 4).to(mesh.device, torch.bfloat16)
        mask = torch.zeros(1, 1, 1, 8).to(mesh.device)
        mixed = layers.AttentionCore.apply(scores, values, mask, 0.0)
        return torch_xla._XLAC._get_xla_tensors_text([mixed])

    usual = operations().count("aten::clamp")
    layers.use_forms(clamp_weights=False)
    assert operations().count("aten::clamp") == usual - 1


def flags_of_libtpu() -> list[str]:
    return os.environ["LIBTPU_INIT_ARGS"].split()


@pytest.mark.parametrize(
    "safe_forms, expected",
    [(False, [backend.STACK, *backend.FUSIONS.split()]), (True, backend.SHALLOW_FUSIONS.split())],
)
def test_safe_forms_ask_for_no_stack_and_no_deep_fusion(safe_forms, expected, no_flags):
    backend.ask_for_forms(0, safe_forms)
    assert sorted(flags_of_libtpu()) == sorted(expected)


def test_flags_of_an_earlier_set_up_are_not_the_users(no_flags):
    backend.ask_for_forms(0, safe_forms=False)
    backend.ask_for_forms(0, safe_forms=True)
    assert sorted(flags_of_libtpu()) == sorted(backend.SHALLOW_FUSIONS.split())


@pytest.mark.parametrize(
    "given",
    [
        "--fibers_default_thread_stack_size_x=1",
        "--xla_dump_to=/tmp/fibers_default_thread_stack_size/a",
    ],
)
def test_a_flag_that_only_looks_like_ours_does_not_keep_ours_out(given, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    backend.ask_for_forms(0, safe_forms=False)
    assert flags_of_libtpu() == [given, backend.STACK, *backend.FUSIONS.split()]


def test_a_stack_that_the_user_gives_stays(monkeypatch):
    given = "--fibers_default_thread_stack_size=1000000"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    backend.ask_for_forms(0, safe_forms=False)
    assert flags_of_libtpu() == [given, *backend.FUSIONS.split()]


@pytest.mark.parametrize("flag", [backend.STACK, backend.DEEP_FUSION])
def test_the_users_own_flag_stays_with_safe_forms(flag, no_flags, monkeypatch):
    """With `--remat` these forms are not enough: there is no remedy but the flag (docs/tpu.md)."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flag)
    for safe_forms in (True, False, True):
        backend.ask_for_forms(0, safe_forms)
        assert flag in flags_of_libtpu()


class Asked(Exception):
    """Ends a set-up as soon as the flags are there."""


@pytest.mark.parametrize("safe_forms", ["", "flag", "variable"])
@pytest.mark.parametrize(
    "words",
    [
        "resnet50",
        "resnet50 -- --shard-state full",
        "transformer base",
        "transformer base -- --remat",
        "bert --task mrpc -- --remat",
        "bert --task pretrain -- --shard-state optimizer --remat",
        "xlnet --task pretrain",
        "dlrm",
    ],
)
def test_make_compile_asks_libtpu_for_what_a_run_asks_for(words, safe_forms, monkeypatch):
    arguments = words.split()
    if "--" not in arguments:
        arguments.append("--")
    if safe_forms == "flag":
        arguments.append("--safe-forms")
    _, job = compiling.parse(arguments)
    config = job.config(1)

    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", "1" if safe_forms == "variable" else "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    compiling.ask_compiler(job, job.script)
    compiled_with = flags_of_libtpu()
    assert (backend.STACK in compiled_with) == (safe_forms == "")

    def stop() -> None:
        raise Asked

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(backend.xr, "device_type", stop)
    with pytest.raises(Asked):
        job.script.main(replace(config, data="nowhere"))
    assert sorted(flags_of_libtpu()) == sorted(compiled_with)


def test_a_cut_state_keeps_its_reduce_scatters_in_safe_forms(no_flags):
    flags = ["--shard-state", "full", "--safe-forms"]
    _, job = compiling.parse(["bert", "--task", "mrpc", "--", *flags])
    compiling.ask_compiler(job, job.script)
    expected = [*backend.SHALLOW_FUSIONS.split(), *REDUCE_SCATTERS.split()]
    assert flags_of_libtpu() == expected


def name_of(script) -> str:
    return script.__name__


@pytest.mark.parametrize("script", [transformer, glue, pretrain], ids=name_of)
@pytest.mark.parametrize("safe_forms", [False, True])
def test_build_chooses_the_forms_that_the_mesh_asks_for(script, safe_forms, mesh):
    config = script.validate(script.TINY)
    data = script.open_data(config)
    layers.use_forms(clamp_weights=safe_forms)
    script.build(config, data, replace(mesh, safe_forms=safe_forms))
    assert layers.FORMS.clamp_weights is not safe_forms


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_resumed_run_may_have_other_forms(script):
    assert "safe_forms" in script.MAY_CHANGE
    assert script.Config().safe_forms is False


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_safe_forms(value, expected, mesh, monkeypatch):
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", value)
    assert device.setup(0, "float32").safe_forms is expected


@pytest.mark.parametrize("value", ["yes", "false", "2"])
def test_another_word_in_the_environment_is_refused(value, monkeypatch):
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", value)
    with pytest.raises(InputError, match=f"XLA_ZOO_SAFE_FORMS is '{value}'; set it to 1"):
        device.setup(0, "float32")


# A log that is not mute


def test_a_run_on_a_tpu_says_with_what_it_compiles(monkeypatch):
    """Before it does: with which libtpu, flags and forms."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=b")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/opt/libtpu.so")
    usual = backend.about_compiler(safe_forms=False)
    assert "libtpu at /opt/libtpu.so compiles" in usual
    assert "LIBTPU_INIT_ARGS='--a=b'" in usual
    assert "the usual forms" in usual
    assert "add --safe-forms" in usual

    safe = backend.about_compiler(safe_forms=True)
    assert "in safe forms" in safe
    assert "add --safe-forms" not in safe


def test_a_run_on_a_tpu_says_so_before_libtpu_is_loaded(no_flags, monkeypatch, capsys):
    """Which may die of a flag."""

    def load() -> None:
        raise Asked

    monkeypatch.setattr(backend.xr, "device_type", lambda: "TPU")
    monkeypatch.setattr(backend, "set_matmul_precision", lambda _: None)
    monkeypatch.setattr(backend.xr, "is_spmd", lambda: True)
    monkeypatch.setattr(backend.xr, "global_runtime_device_count", load)
    with pytest.raises(Asked):
        backend.setup("bfloat16", True, "xla", 0, False)
    assert f"with LIBTPU_INIT_ARGS='{backend.STACK}" in capsys.readouterr().err


def test_a_set_up_whose_flags_come_too_late_is_warned_of(no_flags, monkeypatch, capsys):
    def said(loaded: bool, safe_forms: bool) -> str:
        monkeypatch.setattr(backend.torch_xla._XLAC, "_xla_runtime_is_initialized", lambda: loaded)
        backend.ask_for_forms(0, safe_forms)
        backend.announce_compiler(safe_forms)
        return capsys.readouterr().err

    monkeypatch.setattr(backend, "_loaded_with", None)
    before_any = said(loaded=True, safe_forms=False)
    assert "warning: libtpu was loaded before device.setup" in before_any

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert "warning" not in said(loaded=False, safe_forms=False)
    assert "warning" not in said(loaded=True, safe_forms=False)

    late = said(loaded=True, safe_forms=True)
    keeps = f"keeps LIBTPU_INIT_ARGS='{backend.STACK}"
    assert f"libtpu was loaded earlier in this process, and {keeps}" in late


def test_the_version_that_compiles_is_the_packages(monkeypatch, tmp_path):
    """Unless another is named."""
    folder = tmp_path / "libtpu-9.8.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert backend.libtpu_version() == "libtpu 9.8.7"
    library = tmp_path / "libtpu/libtpu.so"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))  # as torch_xla sets it
    assert backend.libtpu_version() == "libtpu 9.8.7"
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/elsewhere/libtpu.so")
    assert backend.libtpu_version() == "libtpu at /elsewhere/libtpu.so"


def test_each_new_program_is_named_before_it_is_compiled(mesh, capsys):
    def doubling_step(x):
        said = capsys.readouterr().err
        assert "compiling doubling_step with libtpu 9" in said, "before the compiler may die"
        return x * 2.5

    step = backend.CompiledStep(
        doubling_step,
        strict=False,
        report=backend.GraphReport(),
        max_graphs=2,
        compiler="libtpu 9",
    )
    step(torch.ones(2, 1234).to(mesh.device))
    assert "compiled doubling_step in " in capsys.readouterr().err


def test_without_a_compilers_name_programs_compile_in_silence(mesh, capsys):
    silent = backend.CompiledStep(
        lambda x: x * 3.5, strict=False, report=backend.GraphReport(), max_graphs=2
    )
    silent(torch.ones(2, 1235).to(mesh.device))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("end, code", [(TRACE, 1), ("", 139), ("", 135), ("", 132)])
def test_the_launcher_says_what_to_do_when_the_compiler_has_died(end, code):
    (said,) = messages.explain_log(f"compiling eval_step with libtpu 0.0.21\n{end}\n", code)
    assert "--safe-forms" in said
    assert 'ENV="XLA_ZOO_SAFE_FORMS=1"' in said


@pytest.mark.parametrize(
    "end, code",
    [
        ("*** SIGTERM received by PID 77 (TID 77) on cpu 0 from PID 1", 143),
        ("*** SIGABRT received by PID 5", 134),
        ("make: *** [Makefile:2: train] Fehler 139", 13),
    ],
)
def test_the_launcher_takes_no_other_end_for_a_dead_compiler(end, code):
    assert messages.explain_log(f"compiling eval_step with libtpu 0.0.21\n{end}\n", code) == []


def test_the_launcher_explains_a_flag_that_libtpu_does_not_know():
    log = "ERROR: Unknown command line flag 'fibers_default_thread_stack_size'\n"
    (said,) = messages.explain_log(log)
    assert "does not know a flag of LIBTPU_INIT_ARGS" in said
    assert "--safe-forms" in said


# A compiler that dies, in `make compile`


def stand_in(folder, monkeypatch, script: str) -> None:
    """Has the process that compiles be a shell script."""
    python = folder / "python"
    (folder / "trace").write_text(TRACE)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(apart.sys, "executable", str(python))


def test_a_compiler_that_dies_is_an_error_that_says_how(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"cat {tmp_path}/trace >&2; kill -SEGV $$")
    library = tmp_path / "libtpu.so"
    message = r"died while it compiled \(SIGSEGV, stack overflow\)"
    with pytest.raises(apart.CompilerDied, match=message) as caught:
        apart.compile(b"", "v5e:1x1", "fast", library)

    assert apart.last_words(caught.value).startswith("*** SIGSEGV STACK OVERFLOW")
    assert "@ 0x" not in apart.last_words(caught.value)


@pytest.mark.parametrize(
    "script, how",
    [
        ("kill -KILL $$", "SIGKILL"),
        ("kill -ABRT $$", "SIGABRT"),
        ("exit 1", "exit code 1"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_process_without_an_answer_has_died(script, how, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(apart.CompilerDied) as caught:
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")
    assert caught.value.how == how


def test_what_died_names_the_step_and_what_to_leave_out():
    flags = ("--size", "mini", "--remat")
    job = compiling.Job(model="bert", preset="full", task="pretrain", flags=flags, batch=8)
    died = apart.CompilerDied("0.0.21", "SIGSEGV", TRACE)
    said = compiling.what_died(died, job, "v5e:1x1", False)
    step = "bert pretrain full --size mini --remat, program train"
    assert f"libtpu 0.0.21 died while it compiled (SIGSEGV): {step}" in said
    assert "for v5e:1x1" in said
    assert "--safe-forms" in said
    assert "leave --remat out" in said
    assert f"LIBTPU_VERSION={libtpu.NEWEST}" in said

    died = apart.CompilerDied("0.0.21", "SIGSEGV", "")
    safe = compiling.what_died(died, job, "v5e:1x1", True)
    assert "add --safe-forms" not in safe
    assert "leave --remat out" in safe


@pytest.mark.parametrize(
    "how, output, advice",
    [
        ("SIGKILL", "", "killed from outside, most likely for memory"),
        ("exit code 1", "ERROR: Unknown command line flag 'xla_foo'", "does not know a flag of it"),
    ],
)
def test_another_death_has_another_remedy(how, output, advice):
    job = compiling.Job(model="bert", preset="full", task="mrpc", flags=(), batch=8)
    died = apart.CompilerDied("0.0.21", how, output)
    said = compiling.what_died(died, job, "v5e:1x1", False)
    assert advice in said
    assert "--safe-forms" not in said


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Arguments with which compile.main comes as far as `compile_step`, which a test replaces."""
    topology = MagicMock()
    topology.__enter__.return_value.name = "v5e:1x1"
    monkeypatch.setattr(compiling, "open_topology", lambda _: topology)
    monkeypatch.setattr(compiling.staging, "setup", MagicMock())
    monkeypatch.setattr(compiling.libtpu, "version", lambda: "0.0.21")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    return ["dlrm", "--json", str(tmp_path / "report.json"), "--effort", "fast"]


def out_of_memory() -> libtpu.OutOfMemory:
    """Returns what the compiler raises of a step that does not fit."""
    return libtpu.OutOfMemory("v5e:1x1", needed=2**35, capacity=2**34, allocations=[], report="")


def test_a_compiler_that_dies_in_the_search_is_a_sentence_too(no_compiler, monkeypatch):
    """In the search for a batch that fits."""

    def dies(*_):
        raise apart.CompilerDied("0.0.21", "SIGSEGV", TRACE)

    def too_large(*_):
        raise out_of_memory()

    monkeypatch.setattr(compiling, "compile_step", too_large)
    monkeypatch.setattr(compiling, "search", dies)
    with pytest.raises(compiling.DeadCompiler, match="libtpu 0.0.21 died while it compiled"):
        compiling.main(no_compiler)


def test_a_report_says_that_it_is_of_safe_forms(no_compiler, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "compile_or_search", lambda *_: ({}, b""))
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", "1")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    assert compiling.main(no_compiler)["safe_forms"] is True
    assert "forms        safe" in capsys.readouterr().out

    monkeypatch.delenv("XLA_ZOO_SAFE_FORMS")
    assert "safe_forms" not in compiling.main(no_compiler)


def test_published_figures_are_of_usual_forms(no_compiler, monkeypatch):
    """Whatever the environment asks for."""
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", "1")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    environment = pages.environment_of_figures()
    assert "LIBTPU_INIT_ARGS" not in environment
    assert "XLA_ZOO_SAFE_FORMS" not in environment


def test_a_step_that_the_compiler_refuses_is_a_sentence(no_compiler, monkeypatch):
    """And not the exit code of one that does not fit."""
    text = "routing limitations.\n\t\n\nError encountered while compiling %start.1 = …"

    def refuses(*_):
        raise libtpu.CompilerError(12, text)

    monkeypatch.setattr(compiling, "compile_step", refuses)
    message = "libtpu 0.0.21 refuses to compile dlrm kaggle, program train"
    with pytest.raises(InputError, match=message) as caught:
        compiling.main(no_compiler)

    said = str(caught.value)
    assert "UNIMPLEMENTED: routing limitations." in said
    assert f"LIBTPU_VERSION={libtpu.NEWEST}" in said
    assert "\n" not in said
    assert "%start" not in said


@pytest.fixture
def two_versions(monkeypatch) -> None:
    """Has compile_step come as far as the compiler, which a test replaces."""
    staged = MagicMock(kept=0)
    setup = MagicMock(examples=8)
    monkeypatch.setattr(compiling, "stage", lambda *_: (setup, staged))
    monkeypatch.setattr(compiling.hlo, "fingerprint", lambda _: "")
    figures = {"memory": {"needed": 1}, "kept_bytes": 0}
    monkeypatch.setattr(compiling.report, "figures", lambda *_: figures)
    monkeypatch.setattr(compiling.libtpu, "version", lambda: "0.0.21")
    monkeypatch.setattr(compiling.libtpu, "find", lambda: "own")
    monkeypatch.setattr(compiling.libtpu, "installed", lambda _: "other")


@pytest.mark.parametrize(
    "error, said",
    [
        (
            out_of_memory(),
            "by libtpu 0.0.51, asked for by --besides, out of mem",
        ),
        (libtpu.CompilerError(12, "no"), "libtpu 0.0.51 refuses to compile dlrm kaggle"),
    ],
    ids=["memory", "refusal"],
)
def test_an_error_of_the_version_besides_is_not_the_reports(error, said, two_versions, monkeypatch):
    def compiles(_module, _topology, _effort, library):
        if library == "other":
            raise error
        return MagicMock()

    monkeypatch.setattr(compiling.apart, "compile", compiles)
    topology = MagicMock(generation="v5e", num_devices=1, slices=1, hbm_bytes=2)
    topology.name = "v5e:1x1"
    job = compiling.Job(model="dlrm", preset="kaggle", task="", flags=(), batch=8)

    with pytest.raises(InputError, match=said) as caught:
        compiling.compile_step(job, topology, None, "fast", dlrm, besides="0.0.51")

    is_out_of_memory = isinstance(caught.value, libtpu.OutOfMemory)
    assert not is_out_of_memory, "else a smaller batch is looked for"


@pytest.mark.parametrize(
    "effort, figures",
    [("fast", {"needed": 7}), ("full", {"needed": 7, "cycles": 30})],
)
def test_the_version_besides_estimates_cycles_at_full_effort(
    effort, figures, two_versions, monkeypatch
):
    def compiles(_module, _topology, _effort, library):
        needed = 7 if library == "other" else 1
        return MagicMock(optimized=library, memory=MagicMock(needed=needed))

    monkeypatch.setattr(compiling.apart, "compile", compiles)
    monkeypatch.setattr(compiling.hlo, "parse", lambda optimized: optimized)
    cycles = {"own": 20, "other": 30}
    monkeypatch.setattr(
        compiling.analysis, "entry_cycles", lambda module: MagicMock(total=cycles[module])
    )
    topology = MagicMock(generation="v5e", num_devices=1, slices=1, hbm_bytes=2)
    topology.name = "v5e:1x1"
    job = compiling.Job(model="dlrm", preset="kaggle", task="", flags=(), batch=8)

    found, module = compiling.compile_step(job, topology, None, effort, dlrm, besides="0.0.51")

    assert found["besides"] == {"libtpu": "0.0.51", **figures}
    assert module == "own", "the module is that of the version that the report is of"


# Files


def test_a_temporary_folder_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setattr(apart.tempfile, "tempdir", "/proc")
    with pytest.raises(InputError, match="cannot write to /proc: .*set TMPDIR to another folder"):
        apart.compile(b"", "v5e:1x1", "fast", "libtpu.so")


def full(*_):
    raise OSError(28, "No space left on device")  # as from a file's write: without a name


@pytest.fixture
def compiling_process(tmp_path, monkeypatch) -> None:
    """Makes this process the one that compiles, whose request lies in tmp_path."""
    topology = MagicMock()
    compiled = topology.return_value.__enter__.return_value.compile.return_value
    program = compiled.__enter__.return_value
    program.optimized = b""
    program.memory = libtpu.Memory(*[0] * 6, False)
    program.cost = libtpu.Cost(0, 0, 0)
    monkeypatch.setattr(apart.libtpu, "Topology", topology)
    (tmp_path / apart.REQUEST).write_text('{"topology": "v5e:1x1", "effort": "fast"}')
    (tmp_path / apart.MODULE).write_bytes(b"")
    monkeypatch.setattr(apart.sys, "argv", ["apart", str(tmp_path)])
    monkeypatch.setattr(apart.resource, "setrlimit", MagicMock())
    monkeypatch.setattr(apart.ctypes, "CDLL", MagicMock())


@pytest.mark.parametrize(
    ("file", "method"), [(apart.OPTIMIZED, "write_bytes"), (apart.ANSWER, "write_text")]
)
def test_a_full_disk_is_no_death_of_the_compiler(
    file, method, compiling_process, tmp_path, monkeypatch
):
    """Where one of its files is written: in both processes."""
    monkeypatch.setattr(apart.Path, method, full)
    with pytest.raises(SystemExit) as ended:
        apart.main()
    monkeypatch.undo()

    script = f"echo 'No space left on device' >&2; exit {ended.value.code}"
    stand_in(tmp_path, monkeypatch, script)
    message = "cannot write to .*: No space left on device; make room, or set TMPDIR"
    with pytest.raises(InputError, match=message):
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")


def test_files_of_a_dead_compiler_go_with_it(tmp_path, monkeypatch):
    script = f"touch $TMPDIR/log; echo $TMPDIR >{tmp_path}/where; kill -SEGV $$"
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(apart.CompilerDied):
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")
    where = (tmp_path / "where").read_text().strip()
    assert "compile-" in where
    assert not os.path.exists(where)


def test_a_report_without_room_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    compiling.write(str(path), b"an hour's")

    def write_half(path, _) -> None:
        path.write_text("half a ")
        full()

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(compiling.Path, "write_bytes", write_half)
    with pytest.raises(InputError, match="cannot write .*report.json: No space left on device"):
        compiling.write(str(path), b"half a report")

    assert path.read_text() == "an hour's"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_report_may_go_to_what_is_no_regular_file():
    compiling.write("/dev/null", b"no regular file")
    assert not os.path.isfile("/dev/null")


# What the process that compiles answers


def test_out_of_memory_of_a_process_apart_arrives_as_it_is():
    shortage = libtpu.Allocation(8, "f32[2]", "step/y", "a.py:3", (("step/y", "a.py:3"),))
    fields = {
        "bytes": 8,
        "shape": "f32[2]",
        "op_name": "step/y",
        "source": "a.py:3",
        "candidates": [["step/y", "a.py:3"]],
    }
    answer = {
        "kind": "out of memory",
        "allocations": [fields],
        "topology": "v5e:1x1",
        "needed": 5,
        "capacity": 3,
        "report": "words",
    }

    error = apart._error(answer)

    assert isinstance(error, libtpu.OutOfMemory)
    assert error.needed == 5
    assert error.capacity == 3
    assert error.allocations == [shortage]
    assert error.report == "words"


def test_a_refusal_of_a_process_apart_arrives_as_it_is():
    refused = apart._error({"kind": "compiler error", "code": 3, "text": "no"})
    assert isinstance(refused, libtpu.CompilerError)
    assert refused.status == "INVALID_ARGUMENT"


def test_a_process_that_a_signal_ended_is_named_by_it():
    assert apart.how_it_ended(-signal.SIGSEGV, "") == "SIGSEGV"


def test_the_versions_are_those_that_the_requirements_pin():
    pins = []
    for name in ("requirements-tpu.txt", "requirements-compile.txt"):
        for line in (compiling.staging.ROOT / name).read_text().splitlines():
            if line.startswith("libtpu=="):
                pins.append(line.split("==")[1].split()[0])
    assert pins == list(libtpu.VERSIONS)
