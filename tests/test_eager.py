"""The five scripts on plain PyTorch (train/common/eager.py), in processes where torch_xla cannot be imported: they
learn, resume exactly, and have XLA's losses. On a GPU: `make test DEVICE=cuda ARGS=tests/test_eager.py`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eager_runs import without_dropout
from helpers import environment, equal, exported, losses, records, summary
from test_scripts import within
from trials import TRIALS

from errors import InputError
from models import encoders
from train.common import device, eager

ROOT = Path(__file__).parent.parent
# The sums of a float32 matrix product are taken in another order: 1e-7 in a loss. The steps before it move the weights
# by as little, but where Adam or a batch norm over few values divides by a number near 0.
ROUNDING = 2e-5


def run(name: str, folder, *runs: str, code: int = 0) -> dict[str, dict[str, float]]:
    """Runs tests/eager_runs.py; returns each run's final metrics."""
    command = [sys.executable, ROOT / "tests/eager_runs.py", name, folder, *runs]
    variables = environment(1, PYTHONPATH=str(ROOT))
    process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert process.returncode == code, process.stdout + process.stderr
    return {} if code else json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow  # the numbers below stay with XLA's, which learn
@pytest.mark.parametrize("name", TRIALS)
def test_without_torch_xla_a_trial_learns(name, tmp_path):
    trial, found = TRIALS[name], run(name, tmp_path, "learns", "still")
    assert within(found["learns"], trial.learned) and within(found["still"], trial.untrained), found


# Two stand for all: one with tables, one without; the others in `make test-all`.
MARKED = [name if name == "dlrm" else pytest.param(name, marks=pytest.mark.slow) for name in TRIALS]


@pytest.mark.parametrize("name", MARKED)
def test_without_torch_xla_it_resumes_exactly_and_stays_with_xlas_losses(name, run_of, tmp_path, monkeypatch):
    trial, dropout = TRIALS[name], name in ("glue", "pretrain")
    run(name, tmp_path, "stopped by a crash", "stopped by kill", code=-9)
    plain = ["no dropout"] if dropout else []
    found = run(name, tmp_path, "stopped by terminate", "stopped", "short", *plain, "alike")
    stopped, short = tmp_path / "stopped/run", tmp_path / "short/run"
    assert len(json.load(open(stopped / "config.json"))["starts"]) == 4
    assert records(stopped) == records(short) and found["stopped"] == found["short"]
    assert equal(exported(stopped), exported(short))
    assert summary(short)["report"] == {}

    if dropout:
        monkeypatch.setattr(encoders, "configuration", encoders.configuration)
        without_dropout(encoders)
        metrics = trial.script.main(replace(trial.short, runs=str(tmp_path), name="xla"))
        folder = tmp_path / "xla"
    else:
        folder, metrics, _ = run_of(name, "alike" if trial.alike else "short")
    ours, xlas = losses(tmp_path / "alike/run"), losses(folder)
    assert len(ours) == len(xlas) and ours[:5] == pytest.approx(xlas[:5], rel=ROUNDING), (ours[:5], xlas[:5])
    if max(trial.close) == len(ours):  # as close to the end
        assert found["alike"] == pytest.approx(metrics, rel=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "precision", "devices", "processes", "sentence"),
    [
        ("cpu", "float32", 4, 1, "CPU_NUM_DEVICES is 4.*--device cpu runs on one device: unset it.*--device xla"),
        ("cuda", "float32", 1, 2, "WORLD_SIZE is 2.*--device cuda.*--device xla"),
        ("cuda", "float32", 1, 1, "--device is cuda, but PyTorch finds no GPU here.*use cpu or xla"),
        ("tpu", "float32", 4, 1, "device is 'tpu'; it must be one of xla, cpu, cuda"),
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


def test_what_waits_for_a_step_is_called_once_the_next_one_has_run(monkeypatch):
    monkeypatch.setattr(device, "_backend", eager)
    called = []
    step = device.compiled(lambda x: called.append("step") or x + 1, None)
    device.after_next_step(lambda: called.append("read"))
    assert step(torch.ones(2)).tolist() == [2, 2] and called == ["step", "read"]
    device.after_next_step(lambda: called.append("flushed"))
    device.run_pending()
    step(torch.ones(2))
    assert called == ["step", "read", "flushed", "step"]
