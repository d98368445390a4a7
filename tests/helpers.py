"""Helpers for tests of the scripts: they read a run's folder, start a script as its users do, stop
it at a batch."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from data import glue
from tpu.compiler import hlo
from tpu.compiler.hlo_pb2 import HloModuleProtoWithConfig
from train.common import cli, device
from train.common.mesh import Mesh
from train.common.run import Run

# A device

ONE_CPU = Mesh(
    device=torch.device("cpu"),
    spmd=None,
    num_devices=1,
    process_index=0,
    process_count=1,
    kind="CPU",
    precision="float32",
    strict=True,
)


# Code of a page


def page_code(page: str, heading: str, **replaced: str) -> str:
    """Returns the Python code below a heading of a page of docs/, with each word replaced by
    another."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]

    lines = []
    for line in section.splitlines():
        if line.startswith("    ") or not line:
            lines.append(line)
    code = textwrap.dedent("\n".join(lines))

    for old, new in replaced.items():
        assert old in code, old
        code = code.replace(old, new)
    return code


# A run's folder


def records(path) -> list[dict]:
    """Returns the lines of metrics.jsonl without their timings."""
    made = []
    with open(f"{path}/metrics.jsonl") as lines:
        for line in lines:
            record = json.loads(line)
            record["timing"] = None
            made.append(record)
    return made


def losses(path) -> list[float]:
    """Returns the training losses of metrics.jsonl."""
    return [record["loss"] for record in records(path) if "loss" in record]


def summary(path) -> dict:
    """Returns summary.json: the final metrics, and the report on graphs."""
    return json.loads(Path(path, "summary.json").read_text())


def assert_graph_contract(path, graphs: int | None = None) -> None:
    """Asserts that the run's steps never recompiled or fell back to the host, within a budget of
    `graphs`."""
    report = summary(path)["report"]
    assert report["recompilations"] == report["fallbacks"] == []
    assert graphs is None or report["graphs"] <= graphs, report


def exported(path) -> dict[str, torch.Tensor]:
    """Returns all weights of the run's export, of the tables too, by name."""
    export = Path(path, "export")
    if (export / "model.pt").exists():
        return torch.load(export / "model.pt", weights_only=False)["model"]

    weights = safetensors.torch.load_file(export / "model.safetensors")
    if (export / "tables").exists():
        for table in (export / "tables").iterdir():
            weights |= safetensors.torch.load_file(table)
    return weights


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Returns whether both have the same names and the same values, bit for bit."""
    if one.keys() != other.keys():
        return False
    return all(torch.equal(one[name], other[name]) for name in one)


def within(metrics: dict[str, float], ranges: dict[str, tuple[float, float]]) -> bool:
    """Returns whether each metric that has a range lies in it."""
    return all(low <= metrics[name] <= high for name, (low, high) in ranges.items())


# Compiled programs

# XLA's flags, with which a process writes its programs into a folder for `largest_dump`.
DUMP = "--xla_dump_to={} --xla_dump_hlo_as_proto --xla_dump_hlo_module_re=SyncTensors.*"


def largest_dump(folder, seen: set[Path] | None = None) -> Path:
    """Returns the largest optimised program's file in a folder but for those in `seen`, which then
    has them all."""
    found = set(Path(folder).glob("*cpu_after_optimizations.hlo.pb"))
    new = found - (seen or set())
    if seen is not None:
        seen |= new
    return max(new, key=lambda path: path.stat().st_size)


def read_program(path) -> hlo.Module:
    """Reads a dumped program."""
    content = Path(path).read_bytes()
    # An HloProto begins as this message does.
    return hlo.parse(HloModuleProtoWithConfig.FromString(content).hlo_module)


# Scripts in processes of their own

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
        complete = "{path}/checkpoints/step_{saved:08d}/COMPLETE"
        while {saved} and not os.path.exists(complete):  # another thread writes it
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


@dataclass(frozen=True)
class Stop:
    """A signal that a process gets when it logs `step`, once the checkpoint of step `saved`
    exists."""

    step: int
    saved: int = 0
    number: int = signal.SIGKILL


def flags(config: Any, preset: Any) -> list[str]:
    """Returns the flags that turn `preset` into `config`."""
    made = []
    for field in fields(config):
        name = field.name.replace("_", "-")
        value = getattr(config, field.name)
        preset_value = getattr(preset, field.name)
        if value == preset_value:
            continue

        if is_dataclass(value):
            made += flags(value, preset_value)
        elif isinstance(value, bool):
            made.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            made += [f"--{name}", *map(str, value)]
        else:
            made += [f"--{name}", str(value)]
    return made


def environment(devices: int = 4, **variables: str) -> dict[str, str]:
    """Returns the environment of a process with so many devices."""
    return {**os.environ, "CPU_NUM_DEVICES": str(devices), **variables}


def environment_of_plain_pytorch(**variables: str) -> dict[str, str]:
    """Returns the environment of a process with --device cpu. With transformers it would import
    torch_xla where that is installed, for nothing and for two seconds."""
    return environment(1, USE_TORCH_XLA="0", **variables)


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
        program = ["-c", before + STOPPED.format(script=name, path=path, **asdict(stop))]
    elif before:
        program = ["-c", before + PLAIN.format(script=name)]
    else:
        program = ["-m", script.__name__]
    workers = "1" if stop else "0"
    arguments = ["tiny", *flags(config, script.TINY), "--workers", workers]

    process = subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    return process.returncode, process.stdout


# Scripts in this process

# Where `stop_at` acts: functions whose second argument counts steps or batches.
LOG = (Run, "log")
SEED = (device, "seed_step")


def crash() -> None:
    """Ends the run by an exception."""
    raise ZeroDivisionError


def terminate() -> None:
    """Sends this process SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at(
    number: int,
    act: Callable[[], None],
    main: Callable,
    config: Any,
    of: tuple[Any, str] = LOG,
) -> None:
    """Trains until `act`, crash or terminate, ends the run at a step that it logs (LOG), or before
    a batch (SEED)."""
    owner, name = of
    function = getattr(owner, name)

    def act_there(first: Any, at: int, **values: Any) -> None:
        if at == number:
            act()
        function(first, at, **values)

    ending = ZeroDivisionError if act is crash else SystemExit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, act_there)
        with pytest.raises(ending) as stopped:
            main(config)
    assert act is crash or stopped.value.code == 143


def command(
    arguments: str | Sequence[Any], main: Callable, presets: dict, capsys
) -> tuple[int, str, str]:
    """Runs a script's command line that ends by itself: (exit code, standard output, standard
    error)."""
    if isinstance(arguments, str):
        words = shlex.split(arguments)
    else:
        words = [str(argument) for argument in arguments]
    capsys.readouterr()  # what a test has printed before, such as transformers' bars
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", ["script.py", *words])
        cli.run(main, presets)
    return stopped.value.code, *capsys.readouterr()


def assert_refused(
    arguments: str | Sequence[Any], pattern: str, script: ModuleType, capsys, presets=None
) -> None:
    """Asserts that a command line ends in one sentence that `pattern` finds, exit code 2 and no
    traceback."""
    code, _, error = command(arguments, script.main, presets or script.PRESETS, capsys)
    assert code == 2, error
    assert error.startswith("error: "), error
    assert len(error.splitlines()) == 1, error
    assert "Traceback" not in error, error
    assert re.search(pattern, error), f"{pattern} is not in: {error}"


def fewer_sentences(monkeypatch, sizes: tuple[int, int]) -> None:
    """Gives the tasks of GLUE so many examples for training and for evaluation."""
    read = glue.read
    training_size, evaluation_size = sizes

    def read_some(data, task, split, seed=0):
        examples = read(data, task, split, seed)
        size = training_size if split == "train" else evaluation_size
        return replace(
            examples,
            first=examples.first[:size],
            second=examples.second and examples.second[:size],
            labels=examples.labels[:size],
        )

    monkeypatch.setattr(glue, "read", read_some)


# Models


class Net(nn.Module):
    """Has what a trained model has: tied weights, dropout, batch norm, whose buffers change."""

    def __init__(self, dropout: float = 0.25):
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.norm(self.inner(x))))
        return F.linear(hidden, self.inner.weight.t(), self.bias)


def on_mesh(
    mesh: device.Mesh, model: nn.Module, optimizer: Callable
) -> tuple[nn.Module, torch.optim.Optimizer]:
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
