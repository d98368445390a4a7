"""What keeps a run alive on the libtpu of a TPU VM: the flags that it gets, and forms that compile without them.

That the programs compile with it, and what becomes of one without the flag, is in tests/test_compile.py.
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
TRACE = """*** SIGSEGV STACK OVERFLOW (see go/cppstackoverflow) received by PID 7036 (TID 7137) on cpu 0; ***
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
    monkeypatch.setattr(backend, "_asked", set())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")


def attended(dtype: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of attention without dropout."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 8, 8, generator=generator).requires_grad_()
    values = torch.randn(2, 8, 3, 4, generator=generator).to(dtype).requires_grad_()
    mask = torch.zeros(2, 1, 1, 8)
    mask[0, ..., 5:] = layers.MASKED

    mixed = layers.AttentionCore.apply(scores, values, mask, 0.0)
    return [mixed, *torch.autograd.grad(mixed.float().square().sum(), [scores, values])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_safe_forms_compute_the_same_bits(dtype):
    usual = attended(dtype)
    layers.use_forms(clamp_weights=False)
    for one, other in zip(usual, attended(dtype), strict=True):
        assert torch.equal(one, other)


def test_safe_forms_put_nothing_between_softmax_and_cast(mesh):
    def operations() -> str:
        scores, values = torch.ones(1, 1, 8, 8).to(mesh.device), torch.ones(1, 8, 1, 4).to(mesh.device, torch.bfloat16)
        mixed = layers.AttentionCore.apply(scores, values, torch.zeros(1, 1, 1, 8).to(mesh.device), 0.0)
        return torch_xla._XLAC._get_xla_tensors_text([mixed])

    usual = operations().count("aten::clamp")
    layers.use_forms(clamp_weights=False)
    assert operations().count("aten::clamp") == usual - 1


@pytest.mark.parametrize(
    "safe_forms, expected",
    [(False, [backend.STACK, *backend.FUSIONS.split()]), (True, backend.SHALLOW_FUSIONS.split())],
)
def test_safe_forms_ask_for_no_stack_and_no_deep_fusion(safe_forms, expected, no_flags):
    backend.ask_for_forms(0, safe_forms)
    assert sorted(os.environ["LIBTPU_INIT_ARGS"].split()) == sorted(expected)


def test_what_an_earlier_set_up_has_asked_for_is_not_the_users(no_flags):
    backend.ask_for_forms(0, safe_forms=False)
    backend.ask_for_forms(0, safe_forms=True)
    assert sorted(os.environ["LIBTPU_INIT_ARGS"].split()) == sorted(backend.SHALLOW_FUSIONS.split())


@pytest.mark.parametrize(
    "given", ["--fibers_default_thread_stack_size_x=1", "--xla_dump_to=/tmp/fibers_default_thread_stack_size/a"]
)
def test_a_flag_that_only_looks_like_ours_does_not_keep_ours_out(given, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    backend.ask_for_forms(0, safe_forms=False)
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [given, backend.STACK, *backend.FUSIONS.split()]


def test_a_stack_that_the_user_gives_stays(monkeypatch):
    given = "--fibers_default_thread_stack_size=1000000"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    backend.ask_for_forms(0, safe_forms=False)
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [given, *backend.FUSIONS.split()]


@pytest.mark.parametrize("flag", [backend.STACK, backend.DEEP_FUSION])
def test_the_users_own_flag_stays_with_safe_forms(flag, no_flags, monkeypatch):
    """With `--remat` these forms are not enough: there is no remedy but the flag (docs/tpu.md)."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flag)
    for safe_forms in (True, False, True):
        backend.ask_for_forms(0, safe_forms)
        assert flag in os.environ["LIBTPU_INIT_ARGS"].split()


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
    arguments = [
        *words.split(),
        *([] if "--" in words.split() else ["--"]),
        *(["--safe-forms"] if safe_forms == "flag" else []),
    ]
    _, job = compiling.parse(arguments)
    config = job.config(1)

    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", "1" if safe_forms == "variable" else "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    compiling.ask_compiler(job, job.script)
    compiled_with = os.environ["LIBTPU_INIT_ARGS"].split()
    assert (backend.STACK in compiled_with) == (safe_forms == "")

    def stop() -> None:
        raise Asked

    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.setattr(backend.xr, "device_type", stop)
    with pytest.raises(Asked):
        job.script.main(replace(config, data="nowhere"))
    assert sorted(os.environ["LIBTPU_INIT_ARGS"].split()) == sorted(compiled_with)


def test_a_cut_state_keeps_its_reduce_scatters_in_safe_forms(no_flags):
    _, job = compiling.parse(["bert", "--task", "mrpc", "--", "--shard-state", "full", "--safe-forms"])
    compiling.ask_compiler(job, job.script)
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [*backend.SHALLOW_FUSIONS.split(), *REDUCE_SCATTERS.split()]


@pytest.mark.parametrize("script", [transformer, glue, pretrain], ids=lambda script: script.__name__)
@pytest.mark.parametrize("safe_forms", [False, True])
def test_build_chooses_the_forms_that_the_mesh_asks_for(script, safe_forms, mesh):
    config = script.validate(script.TINY)
    data = script.open_data(config)
    layers.use_forms(clamp_weights=safe_forms)
    script.build(config, data, replace(mesh, safe_forms=safe_forms))
    assert layers.FORMS.clamp_weights is not safe_forms


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_resumed_run_may_have_other_forms(script):
    assert "safe_forms" in script.MAY_CHANGE and script.Config().safe_forms is False


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_safe_forms(value, expected, mesh, monkeypatch):
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", value)
    assert device.setup(0, "float32").safe_forms is expected


@pytest.mark.parametrize("value", ["yes", "false", "2"])
def test_another_word_in_the_environment_is_refused(value, monkeypatch):
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", value)
    with pytest.raises(InputError, match=f"XLA_ZOO_SAFE_FORMS is '{value}'; set it to 1"):
        device.setup(0, "float32")


# ---- a log that is not mute ------------------------------------------------------------------------------------------


def test_a_run_on_a_tpu_says_before_it_compiles_with_which_libtpu_flags_and_forms(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=b")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/opt/libtpu.so")
    usual = backend.about_compiler(safe_forms=False)
    assert "libtpu at /opt/libtpu.so compiles" in usual and "LIBTPU_INIT_ARGS='--a=b'" in usual
    assert "the usual forms" in usual and "add --safe-forms" in usual
    safe = backend.about_compiler(safe_forms=True)
    assert "in safe forms" in safe and "add --safe-forms" not in safe


def test_a_run_on_a_tpu_says_so_before_libtpu_is_loaded_and_may_die_of_a_flag(no_flags, monkeypatch, capsys):
    def load() -> None:
        raise Asked

    monkeypatch.setattr(backend.xr, "device_type", lambda: "TPU")
    monkeypatch.setattr(backend, "set_products", lambda _: None)
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
    assert "warning: libtpu was loaded before device.setup" in said(True, False)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert "warning" not in said(False, False)
    assert "warning" not in said(True, False)
    late = said(True, True)
    assert f"libtpu was loaded earlier in this process, and keeps LIBTPU_INIT_ARGS='{backend.STACK}" in late


def test_the_version_that_compiles_is_that_of_the_package_unless_another_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "libtpu-9.8.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert backend.compiler() == "libtpu 9.8.7"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu/libtpu.so"))  # as torch_xla sets it
    assert backend.compiler() == "libtpu 9.8.7"
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/elsewhere/libtpu.so")
    assert backend.compiler() == "libtpu at /elsewhere/libtpu.so"


def test_each_new_program_is_named_before_it_is_compiled(mesh, capsys):
    def doubling_step(x):
        assert "compiling doubling_step with libtpu 9" in capsys.readouterr().err, "before the compiler may die"
        return x * 2.5

    step = backend.CompiledStep(doubling_step, False, backend.GraphReport(), 2, compiler="libtpu 9")
    step(torch.ones(2, 1234).to(mesh.device))
    assert "compiled doubling_step in " in capsys.readouterr().err

    silent = backend.CompiledStep(lambda x: x * 3.5, False, backend.GraphReport(), 2)
    silent(torch.ones(2, 1235).to(mesh.device))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("end, code", [(TRACE, 1), ("", 139), ("", 135), ("", 132)])
def test_the_launcher_says_what_to_do_when_the_compiler_has_died(end, code):
    (said,) = messages.explain_log(f"compiling eval_step with libtpu 0.0.21\n{end}\n", code)
    assert "--safe-forms" in said and 'ENV="XLA_ZOO_SAFE_FORMS=1"' in said


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
    (said,) = messages.explain_log("ERROR: Unknown command line flag 'fibers_default_thread_stack_size'\n")
    assert "does not know a flag of LIBTPU_INIT_ARGS" in said and "--safe-forms" in said


# ---- a compiler that dies, in `make compile` -------------------------------------------------------------------------


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
    with pytest.raises(apart.CompilerDied, match=r"died while it compiled \(SIGSEGV, stack overflow\)") as caught:
        apart.compile(b"", "v5e:1x1", "fast", library)
    assert apart.last_words(caught.value).startswith("*** SIGSEGV STACK OVERFLOW")
    assert "@ 0x" not in apart.last_words(caught.value)


@pytest.mark.parametrize(
    "script, how",
    [("kill -KILL $$", "SIGKILL"), ("kill -ABRT $$", "SIGABRT"), ("exit 1", "exit code 1"), ("exit 0", "exit code 0")],
)
def test_a_process_without_an_answer_has_died(script, how, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(apart.CompilerDied) as caught:
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")
    assert caught.value.how == how


def test_what_died_names_the_step_and_what_to_leave_out():
    job = compiling.Job("bert", "full", "pretrain", ("--size", "mini", "--remat"), 8, "train")
    said = compiling.what_died(apart.CompilerDied("0.0.21", "SIGSEGV", TRACE), job, "v5e:1x1", False)
    assert (
        "libtpu 0.0.21 died while it compiled (SIGSEGV): bert pretrain full --size mini --remat, program train" in said
    )
    assert "for v5e:1x1" in said and "--safe-forms" in said and "leave --remat out" in said
    assert f"LIBTPU_VERSION={libtpu.NEWEST}" in said
    safe = compiling.what_died(apart.CompilerDied("0.0.21", "SIGSEGV", ""), job, "v5e:1x1", True)
    assert "add --safe-forms" not in safe and "leave --remat out" in safe


@pytest.mark.parametrize(
    "how, output, advice",
    [
        ("SIGKILL", "", "killed from outside, most likely for memory"),
        ("exit code 1", "ERROR: Unknown command line flag 'xla_foo'", "does not know a flag of it"),
    ],
)
def test_another_death_has_another_remedy(how, output, advice):
    job = compiling.Job("bert", "full", "mrpc", (), 8, "train")
    said = compiling.what_died(apart.CompilerDied("0.0.21", how, output), job, "v5e:1x1", False)
    assert advice in said and "--safe-forms" not in said


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Has compile.main come as far as the compiler, and that one be `compile_step`, of the caller."""
    topology = MagicMock()
    topology.__enter__.return_value.name = "v5e:1x1"
    monkeypatch.setattr(compiling, "open_topology", lambda _: topology)
    monkeypatch.setattr(compiling.staging, "setup", MagicMock())
    monkeypatch.setattr(compiling.libtpu, "version", lambda: "0.0.21")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    return ["dlrm", "--json", str(tmp_path / "report.json"), "--effort", "fast"]


def test_a_compiler_that_dies_in_the_search_for_a_batch_is_a_sentence_too(no_compiler, monkeypatch):
    def dies(*_):
        raise apart.CompilerDied("0.0.21", "SIGSEGV", TRACE)

    def too_large(*_):
        raise libtpu.OutOfMemory("v5e:1x1", 2**35, 2**34, [], "")

    monkeypatch.setattr(compiling, "compile_step", too_large)
    monkeypatch.setattr(compiling, "search", dies)
    with pytest.raises(compiling.DeadCompiler, match="libtpu 0.0.21 died while it compiled"):
        compiling.main(no_compiler)


def test_a_report_says_that_it_is_of_safe_forms_and_published_figures_are_of_none(no_compiler, monkeypatch, capsys):
    monkeypatch.setenv("XLA_ZOO_SAFE_FORMS", "1")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    monkeypatch.setattr(compiling, "compile_or_search", lambda *_: ({}, b""))
    assert compiling.main(no_compiler)["safe_forms"] is True and "forms        safe" in capsys.readouterr().out
    assert not {"LIBTPU_INIT_ARGS", "XLA_ZOO_SAFE_FORMS"} & set(pages.environment_of_figures())
    monkeypatch.delenv("XLA_ZOO_SAFE_FORMS")
    assert "safe_forms" not in compiling.main(no_compiler)


def test_a_step_that_the_compiler_refuses_is_a_sentence_and_not_the_exit_code_of_one_that_does_not_fit(
    no_compiler, monkeypatch
):
    def refuses(*_):
        raise libtpu.CompilerError(12, "routing limitations.\n\t\n\nError encountered while compiling %start.1 = …")

    monkeypatch.setattr(compiling, "compile_step", refuses)
    with pytest.raises(InputError, match="libtpu 0.0.21 refuses to compile dlrm kaggle, program train") as caught:
        compiling.main(no_compiler)
    said = str(caught.value)
    assert "UNIMPLEMENTED: routing limitations." in said and f"LIBTPU_VERSION={libtpu.NEWEST}" in said
    assert "\n" not in said and "%start" not in said


@pytest.mark.parametrize(
    "error, said",
    [
        (libtpu.OutOfMemory("v5e:1x1", 2**35, 2**34, [], ""), "by libtpu 0.0.51, asked for by --besides, out of mem"),
        (libtpu.CompilerError(12, "no"), "libtpu 0.0.51 refuses to compile dlrm kaggle"),
    ],
    ids=["memory", "refusal"],
)
def test_what_another_version_makes_of_the_step_is_not_taken_for_the_reports(error, said, monkeypatch):
    def compiles(_module, _topology, _effort, library):
        if library == "other":
            raise error
        return MagicMock()

    monkeypatch.setattr(compiling, "stage", lambda *_: (MagicMock(examples=8), MagicMock(kept=0)))
    monkeypatch.setattr(compiling.apart, "compile", compiles)
    monkeypatch.setattr(compiling.hlo, "fingerprint", lambda _: "")
    monkeypatch.setattr(compiling.report, "figures", lambda *_: {"memory": {"needed": 1}, "kept_bytes": 0})
    monkeypatch.setattr(compiling.libtpu, "version", lambda: "0.0.21")
    monkeypatch.setattr(compiling.libtpu, "find", lambda: "own")
    monkeypatch.setattr(compiling.libtpu, "installed", lambda _: "other")
    topology = MagicMock(generation="v5e", num_devices=1, hbm_bytes=2)
    topology.name = "v5e:1x1"
    with pytest.raises(InputError, match=said) as caught:
        compiling.compile_step(
            compiling.Job("dlrm", "kaggle", "", (), 8), topology, None, "fast", dlrm, besides="0.0.51"
        )
    assert not isinstance(caught.value, libtpu.OutOfMemory), "else a smaller batch is looked for"


def test_a_temporary_folder_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setattr(apart.tempfile, "tempdir", "/proc")
    with pytest.raises(InputError, match="cannot write to /proc: .*set TMPDIR to another folder"):
        apart.compile(b"", "v5e:1x1", "fast", "libtpu.so")


def full(*_):
    raise OSError(28, "No space left on device")  # as from a file's write: without a name


@pytest.mark.parametrize("part", [apart.OPTIMIZED, apart.ANSWER])
def test_a_disk_that_is_full_when_the_program_is_compiled_is_no_death_of_the_compiler(part, tmp_path, monkeypatch):
    """In both processes."""
    topology = MagicMock()
    monkeypatch.setattr(apart.libtpu, "Topology", topology)
    program = topology.return_value.__enter__.return_value.compile.return_value.__enter__.return_value
    program.optimized, program.memory, program.cost = b"", libtpu.Memory(*[0] * 6, False), libtpu.Cost(0, 0, 0)
    (tmp_path / apart.REQUEST).write_text('{"topology": "v5e:1x1", "effort": "fast"}')
    (tmp_path / apart.MODULE).write_bytes(b"")
    monkeypatch.setattr(apart.sys, "argv", ["apart", str(tmp_path)])
    monkeypatch.setattr(apart.resource, "setrlimit", MagicMock())
    monkeypatch.setattr(apart.ctypes, "CDLL", MagicMock())
    monkeypatch.setattr(apart.Path, "write_bytes" if part == apart.OPTIMIZED else "write_text", full)
    with pytest.raises(SystemExit) as ended:
        apart.main()
    monkeypatch.undo()

    stand_in(tmp_path, monkeypatch, f"echo 'No space left on device' >&2; exit {ended.value.code}")
    with pytest.raises(InputError, match="cannot write to .*: No space left on device; make room, or set TMPDIR"):
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")


def test_what_a_dead_compiler_has_written_for_itself_goes_with_it(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"touch $TMPDIR/log; echo $TMPDIR >{tmp_path}/where; kill -SEGV $$")
    with pytest.raises(apart.CompilerDied):
        apart.compile(b"", "v5e:1x1", "fast", tmp_path / "libtpu.so")
    where = (tmp_path / "where").read_text().strip()
    assert "compile-" in where and not os.path.exists(where)


def test_a_report_for_which_there_is_no_room_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    compiling.write(str(path), b"an hour's")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(compiling.Path, "write_bytes", lambda path, _: path.write_text("half a ") and full())
    with pytest.raises(InputError, match="cannot write .*report.json: No space left on device"):
        compiling.write(str(path), b"half a report")
    assert path.read_text() == "an hour's" and os.listdir(tmp_path) == ["report.json"]
    monkeypatch.undo()
    compiling.write("/dev/null", b"no regular file")
    assert not os.path.isfile("/dev/null")


def test_errors_of_the_process_that_compiles_arrive_as_they_are():
    shortage = libtpu.Allocation(8, "f32[2]", "step/y", "a.py:3", (("step/y", "a.py:3"),))
    fields = {
        "bytes": 8,
        "shape": "f32[2]",
        "op_name": "step/y",
        "source": "a.py:3",
        "candidates": [["step/y", "a.py:3"]],
    }
    about = {"topology": "v5e:1x1", "needed": 5, "capacity": 3, "report": "words"}
    error = apart._error({"kind": "out of memory", "allocations": [fields], **about})
    assert isinstance(error, libtpu.OutOfMemory) and (error.needed, error.capacity) == (5, 3)
    assert error.allocations == [shortage] and error.report == "words"
    refused = apart._error({"kind": "compiler error", "code": 3, "text": "no"})
    assert isinstance(refused, libtpu.CompilerError) and refused.status == "INVALID_ARGUMENT"


def test_a_signals_name_is_told():
    assert apart.how_it_ended(-signal.SIGSEGV, "") == "SIGSEGV"


def test_the_versions_are_those_that_the_requirements_pin():
    pins = []
    for name in ("requirements-tpu.txt", "requirements-compile.txt"):
        lines = (compiling.staging.ROOT / name).read_text().splitlines()
        pins += [line.split("==")[1].split()[0] for line in lines if line.startswith("libtpu==")]
    assert pins == list(libtpu.VERSIONS)
