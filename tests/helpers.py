"""Helpers for tests of the scripts: they read a run's folder, start a script as its users do, stop it at a batch."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from data import glue
from tpu.compiler import hlo
from tpu.compiler.hlo_pb2 import HloModuleProtoWithConfig
from train.common import cli, device
from train.common.run import Run


def page_code(page: str, heading: str, **replaced: str) -> str:
    """Returns the Python code below a heading of a page of docs/, with each word replaced by another."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("    ") or not line]
    code = textwrap.dedent("\n".join(lines))
    for old, new in replaced.items():
        assert old in code, old
        code = code.replace(old, new)
    return code


def records(path) -> list[dict]:
    """Returns the lines of metrics.jsonl without their timings."""
    return [{**json.loads(line), "timing": None} for line in open(f"{path}/metrics.jsonl")]


def losses(path) -> list[float]:
    """Returns the training losses of metrics.jsonl."""
    return [record["loss"] for record in records(path) if "loss" in record]


def summary(path) -> dict:
    """Returns summary.json: the final metrics, and the report on graphs."""
    return json.load(open(f"{path}/summary.json"))


def assert_graph_contract(path, graphs: int | None = None) -> None:
    """Asserts that the run's steps never recompiled or fell back to the host, within a budget of `graphs`."""
    report = summary(path)["report"]
    assert report["recompilations"] == report["fallbacks"] == []
    assert graphs is None or report["graphs"] <= graphs, report


def exported(path) -> dict[str, torch.Tensor]:
    """Returns all weights of the run's export, of the tables too, by name."""
    if os.path.exists(f"{path}/export/model.pt"):
        return torch.load(f"{path}/export/model.pt", weights_only=False)["model"]
    weights = safetensors.torch.load_file(f"{path}/export/model.safetensors")
    for name in os.listdir(f"{path}/export/tables") if os.path.exists(f"{path}/export/tables") else ():
        weights |= safetensors.torch.load_file(f"{path}/export/tables/{name}")
    return weights


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Tells whether both have the same names and the same values, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# XLA's flags, with which a process writes its programs into a folder for `largest_dump`.
DUMP = "--xla_dump_to={} --xla_dump_hlo_as_proto --xla_dump_hlo_module_re=SyncTensors.*"


def largest_dump(folder, seen: set[Path] | None = None) -> Path:
    """Returns the largest optimised program's file in a folder but for those in `seen`, which then has them all."""
    new = set(Path(folder).glob("*cpu_after_optimizations.hlo.pb")) - (seen or set())
    if seen is not None:
        seen |= new
    return max(new, key=lambda path: path.stat().st_size)


def read_program(path) -> hlo.Module:
    content = Path(path).read_bytes()
    return hlo.parse(HloModuleProtoWithConfig.FromString(content).hlo_module)  # an HloProto begins as this message does


# The command line of a script that sends itself and its workers a signal when it logs a step.
STOPPED = """
import os, time
from train import {script} as script
from train.common import cli
from train.common.run import Run

log = Run.log

def log_and_stop(run, step, **values):
    log(run, step, **values)
    if step == {step}:
        while {saved} and not os.path.exists("{path}/checkpoints/step_{saved:08d}/COMPLETE"):  # by another thread
            time.sleep(0.02)
        os.killpg(os.getpgrp(), {number})

Run.log = log_and_stop
cli.run(script.main, script.PRESETS)
"""


# The command line of a script, below what a test has put before it.
PLAIN = """
from train import {script} as script
from train.common import cli

cli.run(script.main, script.PRESETS)
"""


class Stop(NamedTuple):
    """A signal that a process gets when it logs `step`, once the checkpoint of step `saved` exists."""

    step: int
    saved: int = 0
    number: int = signal.SIGKILL


def flags(config: Any, preset: Any) -> list[str]:
    """Returns the flags that turn `preset` into `config`."""
    made = []
    for field in fields(config):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if value == getattr(preset, field.name):
            continue
        if is_dataclass(value):
            made += flags(value, getattr(preset, field.name))
        elif isinstance(value, bool):
            made.append(f"--{name}" if value else f"--no-{name}")
        else:
            made += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return made


def environment(devices: int = 4, **variables: str) -> dict[str, str]:
    """Returns the environment of a process with so many devices."""
    return {**os.environ, "CPU_NUM_DEVICES": str(devices), **variables}


def start(
    script: ModuleType, config: Any, devices: int = 4, stop: Stop | None = None, before: str = ""
) -> tuple[int, str]:
    """Trains in a process of its own, with a worker process if it is stopped: (exit code, output).

    Args:
        before: Python code that the process runs first.
    """
    name = script.__name__.rpartition(".")[2]
    path = f"{config.runs}/{config.name}"
    if stop:
        program = ["-c", before + STOPPED.format(script=name, path=path, **stop._asdict())]
    elif before:
        program = ["-c", before + PLAIN.format(script=name)]
    else:
        program = ["-m", script.__name__]
    process = subprocess.run(
        [sys.executable, *program, "tiny", *flags(config, script.TINY), "--workers", "1" if stop else "0"],
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    return process.returncode, process.stdout


# Where `stop_at` acts: functions whose second argument counts steps or batches.
LOG, SEED = (Run, "log"), (device, "seed_step")


def crash() -> None:
    """Ends the run by an exception."""
    raise ZeroDivisionError


def terminate() -> None:
    """Sends this process SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at(number: int, act: Callable[[], None], main: Callable, config: Any, of: tuple[Any, str] = LOG) -> None:
    """Trains until `act`, crash or terminate, ends the run at a step that it logs (LOG), or before a batch (SEED)."""
    owner, name = of
    function = getattr(owner, name)

    def act_there(first: Any, at: int, **values: Any) -> None:
        if at == number:
            act()
        function(first, at, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, act_there)
        with pytest.raises(ZeroDivisionError if act is crash else SystemExit) as stopped:
            main(config)
    assert act is crash or stopped.value.code == 143


def fewer_sentences(monkeypatch, sizes: tuple[int, int]) -> None:
    """Gives the tasks of GLUE so many examples for training and for evaluation."""
    read = glue.read

    def some(data, task, split, seed=0):
        examples, size = read(data, task, split, seed), sizes[split != "train"]
        second = examples.second and examples.second[:size]
        return replace(examples, first=examples.first[:size], second=second, labels=examples.labels[:size])

    monkeypatch.setattr(glue, "read", some)


class Net(nn.Module):
    """Has what a trained model has: tied weights, dropout, batch norm, whose buffers change."""

    def __init__(self, dropout: float = 0.25):
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.norm(self.inner(x))))
        return F.linear(hidden, self.inner.weight.t(), self.bias)


def on_mesh(mesh: device.Mesh, model: nn.Module, optimizer: Callable) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the model on the devices and its optimizer, ready for a compiled step."""
    device.to_device(model, mesh)
    made = optimizer(model.parameters())
    device.init_optimizer_state(made, mesh)
    return model, made


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Takes a step of training; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def command(arguments: str | Sequence[Any], main: Callable, presets: dict, capsys) -> tuple[int, str, str]:
    """Runs a script's command line that ends by itself: (exit code, standard output, standard error)."""
    words = shlex.split(arguments) if isinstance(arguments, str) else list(map(str, arguments))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", ["script.py", *words])
        cli.run(main, presets)
    return stopped.value.code, *capsys.readouterr()


def assert_refused(arguments: str | Sequence[Any], pattern: str, script: ModuleType, capsys, presets=None) -> None:
    """Asserts that a command line ends in one sentence that `pattern` finds, exit code 2 and no traceback."""
    code, _, error = command(arguments, script.main, presets or script.PRESETS, capsys)
    assert code == 2, error
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    assert re.search(pattern, error), f"{pattern} is not in: {error}"
