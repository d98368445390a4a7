"""The scripts on plain PyTorch (train/common/eager.py), in processes where torch_xla cannot be
imported: they learn, resume exactly, and have XLA's losses.

On a GPU: `make test DEVICE=cuda ARGS=tests/test_eager.py`. On the newest torch: `make test-newest`.
Losses of torch 2.9 are written by WRITE_GOLDEN=1 pytest tests/test_eager.py -k written_down.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from eager_runs import without_dropout
from helpers import environment, equal, exported, losses, records, summary, within
from trials import TRIALS

from errors import InputError
from models import encoders
from train.common import device, eager

ROOT = Path(__file__).parent.parent
# The sums of a float32 matrix product are taken in another order: 1e-7 in a loss. The steps before
# it move the weights by as little, but where Adam or a batch norm over few values divides by a
# number near 0.
ROUNDING = 2e-5
GOLDEN = ROOT / "tests/eager_losses.json"  # the first losses of each script on torch 2.9's CPU
# tests/test_dlrm_model.py has the sentence with which DLRM is refused then.
needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="torchrec has no release for this torch"
)
# Its random numbers differ from device to device.
HAVE_DROPOUT = ("glue", "pretrain", "squad", "tagging")


def start_runs(name: str, folder: Path, *runs: str) -> subprocess.CompletedProcess:
    """Starts tests/eager_runs.py, and waits until it has ended."""
    return subprocess.run(
        [sys.executable, ROOT / "tests/eager_runs.py", name, folder, *runs],
        env=environment(1, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=600,
    )


def metrics_of_runs(name: str, folder: Path, *runs: str) -> dict[str, dict[str, float]]:
    """Runs tests/eager_runs.py to its end; returns each run's final metrics."""
    process = start_runs(name, folder, *runs)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


ALL = [pytest.param(name, marks=needs_torchrec) if name == "dlrm" else name for name in TRIALS]


@pytest.mark.slow  # the numbers below stay with XLA's, which learn
@pytest.mark.parametrize("name", ALL)
def test_without_torch_xla_a_trial_learns(name, tmp_path):
    trial = TRIALS[name]
    metrics = metrics_of_runs(name, tmp_path, "learns", "still")
    assert within(metrics["learns"], trial.learned), metrics
    assert within(metrics["still"], trial.untrained), metrics


@dataclass(frozen=True)
class PlainRuns:
    """What tests/eager_runs.py has left of a script's runs."""

    name: str  # of the script
    folder: Path
    metrics: dict[str, dict[str, float]]  # by run


@pytest.fixture(scope="module")
def plain(request, tmp_path_factory) -> PlainRuns:
    """The run "alike"."""
    name = request.param
    folder = tmp_path_factory.mktemp(f"plain_{name}")
    runs = ["no dropout"] if name in HAVE_DROPOUT else []
    return PlainRuns(name, folder, metrics_of_runs(name, folder, *runs, "alike"))


@pytest.fixture
def stopped(tmp_path_factory, name: str) -> PlainRuns:
    """The runs "short"; and "stopped", which a crash, a kill and a SIGTERM have ended before it
    came to its end."""
    folder = tmp_path_factory.mktemp(f"stopped_{name}")
    killed = start_runs(name, folder, "stopped by a crash", "stopped by kill")
    assert killed.returncode == -9, killed.stdout + killed.stderr

    runs = ["stopped by terminate", "stopped", "short"]
    return PlainRuns(name, folder, metrics_of_runs(name, folder, *runs))


# Two stand for all: one with tables, one without; the others in `make test-all`.
MARKED = []
for name in TRIALS:
    mark = needs_torchrec if name == "dlrm" else pytest.mark.slow
    MARKED.append(pytest.param(name, marks=mark))
every_script = pytest.mark.parametrize("plain", MARKED, indirect=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_without_torch_xla_a_run_resumes_exactly(stopped):
    folder = stopped.folder / "stopped/run"
    short = stopped.folder / "short/run"
    stored = json.loads((folder / "config.json").read_text())

    assert len(stored["starts"]) == 4
    assert records(folder) == records(short)
    assert stopped.metrics["stopped"] == stopped.metrics["short"]
    assert equal(exported(folder), exported(short))
    assert summary(short)["report"] == {}


def xla_run(name: str, run_of, tmp_path, monkeypatch) -> tuple[Path | str, dict[str, float]]:
    """Returns the folder and the final metrics of the run on XLA with which others are compared."""
    trial = TRIALS[name]
    if name not in HAVE_DROPOUT:
        folder, metrics, _ = run_of(name, "alike" if trial.alike else "short")
        return folder, metrics

    # `without_dropout` replaces it; after the test it comes back.
    monkeypatch.setattr(encoders, "new_configuration", encoders.new_configuration)
    without_dropout(encoders)
    config = replace(trial.short, runs=str(tmp_path), name="xla")
    metrics = trial.script.main(config)
    return tmp_path / "xla", metrics


@every_script
def test_losses_are_those_of_torch_2_9_written_down(plain):
    found = losses(plain.folder / "alike/run")[:5]
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("WRITE_GOLDEN"):
        golden[plain.name] = found
        GOLDEN.write_text(json.dumps(golden, indent=4, sort_keys=True) + "\n")
        return

    assert found == pytest.approx(golden[plain.name], rel=ROUNDING)


@pytest.mark.xla
@every_script
def test_without_torch_xla_losses_stay_with_xlas(plain, run_of, tmp_path, monkeypatch):
    ours = losses(plain.folder / "alike/run")
    xla_folder, xla_metrics = xla_run(plain.name, run_of, tmp_path, monkeypatch)
    xlas = losses(xla_folder)

    assert len(ours) == len(xlas)
    assert ours[:5] == pytest.approx(xlas[:5], rel=ROUNDING), (ours[:5], xlas[:5])
    if max(TRIALS[plain.name].close) == len(ours):  # as close to the end
        assert plain.metrics["alike"] == pytest.approx(xla_metrics, rel=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "precision", "devices", "processes", "sentence"),
    [
        (
            "cpu",
            "float32",
            4,
            1,
            "CPU_NUM_DEVICES is 4.*--device cpu runs on one device per process: unset it.*--device "
            "xla",
        ),
        ("cuda", "float32", 1, 2, "WORLD_SIZE is 2, and RANK, .*start the processes by torchrun"),
        (
            "cuda",
            "float32",
            1,
            1,
            "--device is cuda, but PyTorch finds no GPU here.*use cpu or xla",
        ),
        ("gpu", "float32", 4, 1, "device is 'gpu'; it must be one of xla, cpu, cuda, tpu"),
        ("cpu", "float16", 1, 1, "precision is 'float16'; it must be one of bfloat16, float32"),
    ],
)
def test_one_device_that_is_there(kind, precision, devices, processes, sentence, monkeypatch):
    monkeypatch.setattr(device, "_backend", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CPU_NUM_DEVICES", str(devices))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(InputError, match=sentence):
        device.setup(0, precision, kind=kind)


def test_what_waits_for_the_next_step_is_called_once(monkeypatch):
    monkeypatch.setattr(device, "_backend", eager)
    called = []

    def step_fn(x):
        called.append("step")
        return x + 1

    step = device.compiled(step_fn, None)
    device.after_next_step(lambda: called.append("read"))
    assert step(torch.ones(2)).tolist() == [2, 2]
    assert called == ["step", "read"]

    device.after_next_step(lambda: called.append("flushed"))
    device.run_pending()
    step(torch.ones(2))
    assert called == ["step", "read", "flushed", "step"]
