"""The scripts in several real processes of plain PyTorch, with gloo's collectives
(tests/process_runs.py): the losses of one process, an exact resume, and an end of all together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import pytest
import safetensors.torch
from helpers import (
    environment,
    environment_of_plain_pytorch,
    equal,
    exported,
    fewer_sentences,
    losses,
    records,
)
from timm.optim import Lamb
from torch import nn

from errors import InputError
from train import glue
from train.common import checkpoint, device, processes
from train.common.mesh import Layout
from train.common.sharding.shares import StateShares

ROOT = Path(__file__).parent.parent
# Runs tests/process_runs.py as if these were not installed.
WITHOUT_XLA = """
import sys
sys.modules["torch_xla"] = sys.modules["libtpu"] = None
import process_runs
process_runs.main(sys.argv[1], sys.argv[2:])
"""
# Sums are taken in another order: 1e-7 in a loss. Updates make more of it, most of them Adam's and
# batch norm's, which divide by numbers near 0.
ROUNDING = 2e-5
ROUNDING_OF = {"resnet50": 1e-4, "resnet50-one-group": 1e-4}
FEW = ("glue", "resnet50")
ALL = (
    *FEW,
    "glue-accumulated",
    "resnet50-one-group",
    "squad",
    "tagging",
    "tagging-accumulated",
    "pretrain",
    "pretrain-accumulated",
    "distilbert",
    "transformer",
    "transformer-accumulated",
)
SHARED = ("glue", "resnet50", "pretrain-lamb", "transformer")  # also with --shard-state optimizer


class Runs:
    """What tests/process_runs.py has left of its groups of runs."""

    def __init__(self, folder: Path, *groups: str):
        self.folder = folder
        places = f"{ROOT}:{ROOT / 'tests'}"
        variables = environment(1, PYTHONPATH=places, OMP_NUM_THREADS="1")
        command = [sys.executable, "-c", WITHOUT_XLA, folder, *groups]
        self.result = subprocess.run(command, env=variables, capture_output=True, timeout=1200)
        assert self.result.returncode == 0, self.result.stderr.decode() + self.printed(2)

    def printed(self, count: int) -> str:
        """Returns what the processes of groups of this size have printed."""
        path = self.folder / f"{count}.log"
        return path.read_text() if path.exists() else ""

    def found(self, run: str, count: int = 2) -> list[Any]:
        """Returns what each of `count` processes has found, see tests/process_runs.py."""
        paths = [self.folder / f"{run}-{count}-{index}" for index in range(count)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def losses(self, run: str, count: int) -> list[float]:
        """Returns the training losses of a run on `count` processes."""
        return losses(self.folder / str(count) / run)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Runs:
    """Some runs on one and on two processes."""
    return Runs(
        tmp_path_factory.mktemp("processes"),
        f"1 {' '.join(FEW)}",
        f"2 ddp {' '.join(FEW)} stop resume refuse glue-shares share",
        "2 die",
    )


def assert_same_losses(runs: Runs, run: str, count: int) -> None:
    """Asserts that a run on `count` processes has the losses and metrics of that on one."""
    rounding = ROUNDING_OF.get(run, ROUNDING)
    alone = runs.losses(run, 1)
    assert len(alone) >= 4
    assert max(alone) - min(alone) > 100 * rounding
    assert runs.losses(run, count) == pytest.approx(alone, rel=rounding)

    (expected,) = runs.found(run, 1)
    metrics = runs.found(run, count)
    assert len(metrics) == count
    assert all(each == metrics[0] for each in metrics)
    assert metrics[0] == pytest.approx(expected, rel=10 * rounding)


@pytest.mark.parametrize("run", FEW)
def test_two_processes_have_the_losses_of_one(run, few):
    """An epoch of glue ends with a batch whose examples are all of the first process."""
    assert_same_losses(few, run, 2)


def test_gradients_are_those_of_distributed_data_parallel(few):
    first, second = few.found("ddp")
    for found in (first, second):
        assert found["equal"]  # of a shared weight, in many buckets
        assert found["unused"]  # it has no gradient, and would decay with zeros
        assert found["names"]  # of the state
        # Sums of more processes are rounded by their place in a bucket, which must be the same in
        # the first step and in later ones, else a resume is not exact.
        assert found["buckets"][0] == found["buckets"][1]


def test_gradients_of_micro_batches_are_averaged_once(few):
    (first, first_mean), (second, second_mean) = (
        found["accumulated"] for found in few.found("ddp")
    )
    assert first != second
    assert first_mean == second_mean


def test_running_statistics_are_the_mean_of_all_processes(few):
    first, second = few.found("ddp")
    assert first["norm"] == second["norm"]
    assert first["own norm"] != second["own norm"]
    means = [(a + b) / 2 for a, b in zip(first["own norm"], second["own norm"], strict=True)]
    assert first["norm"] == pytest.approx(means, abs=1e-7)


def assert_same_files(runs: Runs, run: str, count: int) -> None:
    """Asserts that a run whose processes share the optimizer's state leaves what it does without,
    to the bit: losses, metrics, checkpoints and the export."""
    alone = runs.folder / f"{count}/{run}"
    shared = runs.folder / f"{count}/{run}-shares"
    assert records(shared) == records(alone)
    assert runs.found(f"{run}-shares", count) == runs.found(run, count)
    config = json.loads((shared / "config.json").read_text())["config"]
    assert config["layout"]["shard_state"] == "optimizer"

    saved = sorted(alone.glob(f"checkpoints/*/{checkpoint.STATE}"))
    assert saved
    for path in saved:
        assert path.read_bytes() == (shared / path.relative_to(alone)).read_bytes()
    assert equal(exported(shared), exported(alone))


def test_shares_of_a_state_change_no_bit(few):
    assert_same_files(few, "glue", 2)


def test_a_process_has_the_state_of_its_share_only(few):
    first, second = few.found("share")
    assert first == {"here": ["0.weight"], "bytes": 256, "gradients": True}
    others = ["0.bias", "1.weight", "1.bias"]
    assert second == {"here": others, "bytes": 104, "gradients": True}


def test_each_process_draws_its_own_numbers(few):
    first, second = few.found("ddp")
    assert first["drawn"] != second["drawn"]


def test_a_signal_to_one_process_stops_all_in_one_step(few):
    assert few.found("stop") == [143, 143]
    assert "stopped by a signal at step 10: saved" in few.printed(2)

    stopped = few.folder / "stopped/glue"
    straight = few.folder / "2/glue"
    assert len(json.loads((stopped / "config.json").read_text())["starts"]) == 2
    assert records(stopped) == records(straight)
    assert equal(exported(stopped), exported(straight))


def test_a_process_that_dies_ends_the_others_in_a_sentence(few):
    assert few.found("die") == [1]  # the other one has been killed
    lines = few.printed(2).splitlines()
    (said,) = [line for line in lines if line.startswith("error:")]
    assert "another one of the run, which has ended or does not answer" in said
    assert lines[-1] == said  # and no traceback


def test_what_processes_cannot_have_is_refused_by_all(few):
    first, second = few.found("refuse")
    assert first == second
    assert "--shard-state is full, but with --device cpu each process" in first["layout"]
    assert "--norm-groups is 3; it must be 1 or a multiple of 2 devices" in first["groups"]
    assert "micro-batches of 6, 3 in each of 2 processes; --augmentation strong" in first["pairs"]
    assert "does not divide into 2 --norm-groups of at least 2 images" in first["one image"]


# ---- without processes ---------------------------------------------------------------------------
def test_half_of_torchruns_variables_are_refused(monkeypatch):
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert processes.place() == (0, 1, 0)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    missing = "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set: .*torchrun"
    with pytest.raises(InputError, match=f"WORLD_SIZE is 2, and {missing}"):
        processes.place()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is two; it must be a number of at least 1"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE is -2; it must be a number of at least 1"),
        ("RANK", "2", "RANK is 2; it must be a number of at least 0 and below 2"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is -1; it must be a number of at least 0 and below 2"),
        ("MASTER_PORT", "http", "MASTER_PORT is http; it must be a number of at least 1 and"),
    ],
)
def test_a_place_that_is_none_is_refused(name, value, said, monkeypatch):
    """torch would wait half an hour for a process of another number, or end in a traceback."""
    values = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    for each, its in {**values, "MASTER_PORT": "1", name: value}.items():
        monkeypatch.setenv(each, its)
    with pytest.raises(InputError, match=said):
        processes.place()


def test_a_port_that_is_taken_is_refused_in_a_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"MASTER_PORT {port} is taken by another program"):
            processes.join("cpu")


def test_a_process_that_waits_for_others_says_so(monkeypatch, capfd):
    """gloo prints a line for each process, which would be between those of the run."""

    def connect_late(*_, **__):
        time.sleep(0.5)
        os.write(1, b"[Gloo] Rank 1 is connected")

    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "7"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    monkeypatch.setattr(processes.dist, "init_process_group", connect_late)
    monkeypatch.setattr(processes.atexit, "register", lambda _: None)
    processes.join("cpu")
    print("trained")

    out, err = capfd.readouterr()
    assert "process 1 of 2 waits at here:7: others have not come yet" in err
    assert "[Gloo]" in err
    assert out == "trained\n"


@pytest.mark.parametrize("closed", [[1], [0, 1], [1, 2]])
def test_processes_meet_where_the_output_is_closed(closed, monkeypatch, capfd):
    """As by `>&-`, where Python has no sys.stdout, and the next file that is opened is number 1."""

    def print_as_gloo(_index):
        for descriptor in closed:
            os.close(descriptor)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            with processes._output_to_error():
                os.write(1, b"[Gloo] Rank 0 is connected")
        assert min(os.pipe()) > 2

    assert forks.run(1, print_as_gloo) == [0]
    assert ("[Gloo]" in capfd.readouterr().err) is (2 not in closed)


def test_an_optimizer_that_clips_is_refused_with_shares():
    """Each process would clip by the norm of its own parameters' gradients."""
    shares = StateShares(Layout(shard_state="optimizer"), {}, None)
    optimizer = Lamb(nn.Linear(2, 2).parameters(), max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="Lamb clips gradients .* max_grad_norm=None"):
        shares.keep_placements(optimizer, None)


def test_fewer_gpus_than_processes_are_refused(monkeypatch):
    values = {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in {**values, "CPU_NUM_DEVICES": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(device, "_backend", None)
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="there are 2 GPUs here, too few for 4 processes"):
        device.setup(0, "float32", kind="cuda")


# ---- slow ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Runs:
    """All runs on one, two and four processes."""
    runs = " ".join(ALL)
    shared = " ".join(f"{run}-shares" for run in SHARED)
    groups = [f"1 {runs}"]
    for count in (2, 4):
        groups.append(f"{count} {runs} pretrain-lamb {shared}")
    return Runs(tmp_path_factory.mktemp("all"), *groups)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("run", ALL)
def test_every_script_has_the_losses_of_one_process(run, count, many):
    assert_same_losses(many, run, count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("run", SHARED)
def test_shares_change_no_bit_of_any_optimizer(run, count, many):
    assert_same_files(many, run, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [("2 stop-shares", "1 resume"), ("1 stop", "2 resume-shares")]
)
def test_a_shared_state_goes_to_one_process_and_back(first, then, tmp_path):
    runs = Runs(tmp_path, "1 glue", first, then)
    stopped = tmp_path / "stopped/glue"
    assert len(json.loads((stopped / "config.json").read_text())["starts"]) == 2
    assert losses(stopped) == pytest.approx(runs.losses("glue", 1), rel=ROUNDING)
    assert len(losses(stopped)) == 12


@pytest.mark.slow
def test_a_shared_state_resumes_to_the_bit(tmp_path):
    runs = Runs(tmp_path, "2 glue stop-shares resume-shares")
    assert runs.found("stop-shares") == [143, 143]
    stopped = tmp_path / "stopped/glue"
    straight = tmp_path / "2/glue"
    assert records(stopped) == records(straight)
    assert equal(exported(stopped), exported(straight))


@pytest.mark.slow
def test_a_run_of_four_processes_resumes_on_one(tmp_path):
    runs = Runs(tmp_path, "1 glue", "4 stop", "1 resume")
    assert runs.found("stop", 4) == [143] * 4

    resumed = losses(tmp_path / "stopped/glue")
    assert resumed == pytest.approx(runs.losses("glue", 1), rel=ROUNDING)
    assert len(resumed) == 12


@pytest.mark.slow
def test_a_checkpoint_goes_to_xla_and_back_unchanged(few, mesh, tmp_path, monkeypatch):
    """The state of two processes, loaded into a model on XLA and saved from there."""
    fewer_sentences(monkeypatch, (80, 80))  # the words that are learnt
    config = replace(glue.TINY, lengths=(32,))
    data = glue.open_data(glue.validate(config))
    state = glue.build(glue.validate(config), data, mesh)
    saved = few.folder / "2/glue/checkpoints"
    step = checkpoint.Checkpointer(str(saved), keep=1).restore(state.model, state.optimizer, mesh)
    assert step == 12

    with checkpoint.Checkpointer(str(tmp_path), keep=1) as again:
        again.save(step, state.model, state.optimizer)
        again.wait()
    name = f"step_{step:08d}/{checkpoint.STATE}"
    before = safetensors.torch.load_file(saved / name)
    after = safetensors.torch.load_file(tmp_path / name)
    assert equal(before, after)


# As its users start it. The first process prints.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_torchrun_trains_and_a_signal_to_it_is_answered(tmp_path):
    script = ("-m", "train.glue", "tiny", "--device", "cpu", "--log-every", "1")
    script += ("--runs", str(tmp_path), "--name", "run")
    command = [sys.executable, *TORCHRUN, *script]
    variables = environment_of_plain_pytorch()
    process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step     3/"):
            process.send_signal(signal.SIGTERM)
        if "stopped by a signal" in line:
            break
    process.communicate(timeout=120)
    assert "stopped by a signal at step 10: saved" in line
    assert Path(tmp_path, "run/checkpoints/step_00000010/COMPLETE").exists()
