"""Trains small runs in several processes of plain PyTorch, with real collectives.

    process_runs.main(FOLDER, ["COUNT RUN...", "COUNT RUN..."])

Each group of COUNT processes trains its runs one after the other. They are forks of this process,
which has the imports, with the variables that torchrun sets. The metrics of a run, or the exit code
that ended a process, are in FOLDER/RUN-COUNT.json, a list with an entry for each process; what they
print is in FOLDER/COUNT.log. RUN is a name of RUNS, or one of CHECKS.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forks
import torch
import torch.nn.functional as F
from eager_runs import without_dropout
from torch import nn

from data import glue as glue_data
from models import encoders
from train import resnet50
from train.common import cli, device
from train.common.mesh import Layout
from train.common.run import Run

SHORT = {"log_every": 1}
GLUE = {**SHORT, "lengths": (32,), "epochs": 4, "eval_every": 6}
# Each process has its share of the optimizer's state.
SHARES = {"layout": Layout(shard_state="optimizer")}
LAMB = {"optimizer": "lamb", "moments": "bfloat16", "save_every": 4}
RESNET = {**SHORT, "epochs": 1, "warmup_epochs": 0.5, "lr": 0.01}
# Script and changes of its preset tiny. A run of another number of processes has the same.
RUNS = {
    # The last batch of an epoch has 16 examples, all of them of the first of two processes.
    "glue": ("glue", GLUE),
    "glue-accumulated": ("glue", {**GLUE, "update_every": 2}),
    "glue-shares": ("glue", {**GLUE, **SHARES}),
    "resnet50": ("resnet50", {**RESNET, "norm_groups": 4}),
    "resnet50-shares": ("resnet50", {**RESNET, **SHARES, "norm_groups": 4}),
    "resnet50-one-group": ("resnet50", {**RESNET, "norm_groups": 1}),
    "squad": ("squad", {**SHORT, "epochs": 0.1}),
    "tagging": ("tagging", {**SHORT, "epochs": 0.15, "lengths": (32,)}),
    "tagging-accumulated": ("tagging", {**SHORT, "epochs": 0.15, "update_every": 2}),
    "pretrain": ("pretrain", {**SHORT, "steps": 8, "warmup_steps": 4, "eval_every": 4}),
    "pretrain-accumulated": ("pretrain", {**SHORT, "steps": 6, "update_every": 2}),
    "pretrain-lamb": ("pretrain", {**SHORT, **LAMB, "steps": 6, "update_every": 2}),
    "pretrain-lamb-shares": (
        "pretrain",
        {**SHORT, **LAMB, **SHARES, "steps": 6, "update_every": 2},
    ),
    "distilbert": ("pretrain", {**SHORT, "steps": 6, "model": "distilbert"}),
    "transformer": (
        "transformer",
        {**SHORT, "updates": 8, "warmup_updates": 4, "eval_every": 8, "save_every": 4},
    ),
    "transformer-accumulated": (
        "transformer",
        {**SHORT, "updates": 4, "update_every": 2, "eval_every": 4, "save_every": 4},
    ),
    "transformer-shares": (
        "transformer",
        {**SHORT, **SHARES, "updates": 8, "warmup_updates": 4, "eval_every": 8, "save_every": 4},
    ),
}
SENTENCES = 80  # of glue's training: batches of 32, 32 and 16
IMAGES = 256  # of resnet50's


def fewer_examples() -> None:
    """Gives glue few sentences, so that an epoch ends with a batch that is not full; and resnet50
    few images."""
    read = glue_data.read

    def read_some(*arguments):
        examples = read(*arguments)
        return replace(
            examples, first=examples.first[:SENTENCES], labels=examples.labels[:SENTENCES]
        )

    glue_data.read = read_some
    resnet50.SYNTHETIC_TRAIN = IMAGES
    resnet50.SYNTHETIC_EVAL = 100  # the last batch is not full


def rank() -> int:
    """Returns this process's number."""
    return int(os.environ.get("RANK", 0))


def config_of(run: str, folder: str, place: str) -> tuple[Callable, Any]:
    """Returns a script's main, and the config of a run in folder/place."""
    name, changes = RUNS[run]
    script = importlib.import_module(f"train.{name}")
    changes = {**changes, "device": os.environ.get("DEVICE") or "cpu"}
    return script.main, replace(script.TINY, **changes, runs=f"{folder}/{place}", name=run)


# ---- checks in all processes ---------------------------------------------------------------------
class Layers(nn.Module):
    """Has a weight that is used twice, one that is not used, and batch norm."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.shared(torch.tanh(self.shared(x)))))


def compare_with_ddp(folder: str) -> dict[str, Any]:
    """Trains three steps as DistributedDataParallel does and as we do, in small buckets; returns
    whether all gradients are equal, and what is to be known of the model."""
    from train.common import processes

    processes.BUCKET_BYTES = 100
    mesh = device.setup(0, "float32", kind="cpu")
    ours = Layers()
    theirs = Layers()
    theirs.load_state_dict(ours.state_dict())
    ours = device.to_device(ours, mesh)
    wrapped = nn.parallel.DistributedDataParallel(
        theirs, find_unused_parameters=True, broadcast_buffers=False
    )

    generator = torch.Generator().manual_seed(rank())
    are_equal = True
    buckets = []  # of each step
    start = processes.GradientMean._start

    def start_and_note(self, bucket):
        start(self, bucket)
        buckets[-1].append(bucket.values.numel())

    processes.GradientMean._start = start_and_note
    for _ in range(3):
        buckets.append([])
        x = torch.randn(4, 8, generator=generator)
        for model in (ours, wrapped):
            model.zero_grad()
            F.mse_loss(model(x), torch.ones(4, 2)).backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if one.grad is not None:  # DDP gives zeros to what is not used
                are_equal = are_equal and torch.equal(one.grad, other.grad)

    statistics = ours.norm.running_mean.tolist()

    processes.GradientMean._start = start

    # Of two micro-batches the second averages the sum of both.
    gradients = []
    for is_accumulating in (True, False):
        with device.accumulating(is_accumulating):
            ours(x).square().sum().backward()
        gradients.append(ours.last.weight.grad.sum().item())

    device.seed_step(1, 2)
    return {
        "accumulated": gradients,
        "buckets": buckets,
        "equal": are_equal,
        "unused": ours.unused.weight.grad is None,
        "norm": statistics,
        "own norm": theirs.norm.running_mean.tolist(),
        "drawn": torch.rand(1).item(),
        "names": list(ours.state_dict()) == list(theirs.state_dict()),
    }


def share(folder: str) -> dict[str, Any]:
    """Trains two steps with a shared-out state of the optimizer; returns which parameters have
    theirs here, its bytes, and whether all have their gradients after an update."""
    mesh = device.setup(0, "float32", kind="cpu", layout=SHARES["layout"])
    model = device.to_device(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    for _ in range(2):
        model(torch.ones(4, 8) + rank()).square().mean().backward()
        optimizer.step()

    here = []
    state_bytes = 0
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        if not moment.is_meta:
            here.append(name)
            state_bytes += moment.nbytes
    has_gradients = all(parameter.grad is not None for parameter in model.parameters())
    return {"here": here, "bytes": state_bytes, "gradients": has_gradients}


def stop(folder: str) -> None:
    """Trains "glue" until the last process alone gets a SIGTERM."""
    _stop_by(signal.SIGTERM, folder)


def stop_shares(folder: str) -> None:
    """Does so with a shared-out state of the optimizer."""
    _stop_by(signal.SIGTERM, folder, SHARES)


def die(folder: str) -> None:
    """Trains "glue" until the last process is killed."""
    _stop_by(signal.SIGKILL, folder)


def _stop_by(number: int, folder: str, changes: dict[str, Any] | None = None) -> None:
    """Trains "glue" as its command does, until the last process gets a signal in step 5."""
    place = "stopped" if number == signal.SIGTERM else "killed"
    main, config = config_of("glue", folder, place)
    config = replace(config, **(changes or {}))
    log = Run.log
    last = int(os.environ.get("WORLD_SIZE", 1)) - 1

    def log_and_stop(run, step, **values):
        log(run, step, **values)
        if step == 5 and rank() == last:
            os.kill(os.getpid(), number)

    Run.log = log_and_stop
    sys.argv = ["train.glue", "tiny"]
    try:
        cli.run(main, {"tiny": ("", config)})
    finally:
        Run.log = log


def resume(folder: str) -> dict[str, float]:
    """Trains the run to its end that `stop` has left."""
    main, config = config_of("glue", folder, "stopped")
    return main(config)


def resume_shares(folder: str) -> dict[str, float]:
    """Does so with a shared-out state of the optimizer."""
    main, config = config_of("glue", folder, "stopped")
    return main(replace(config, **SHARES))


def refuse(folder: str) -> dict[str, str]:
    """Returns what is said of flags that several processes cannot have."""
    from errors import InputError

    said = {}
    changes_of = {
        "layout": ("glue", {"layout": Layout(shard_state="full")}),
        "groups": ("resnet50", {"norm_groups": 3, "batch_size": 96}),
        "pairs": ("resnet50", {"norm_groups": 2, "batch_size": 6, "augmentation": "strong"}),
        "one image": ("resnet50", {"norm_groups": 0, "batch_size": 2}),
    }
    for what, (run, changes) in changes_of.items():
        main, config = config_of(run, folder, f"refused-{what}")
        try:
            main(replace(config, **changes))
        except InputError as error:
            said[what] = str(error)
    return said


CHECKS = {
    "ddp": compare_with_ddp,
    "share": share,
    "stop": stop,
    "stop-shares": stop_shares,
    "die": die,
    "resume": resume,
    "resume-shares": resume_shares,
    "refuse": refuse,
}


# ---- processes -----------------------------------------------------------------------------------
def train(run: str, folder: str) -> Any:
    """Returns the metrics of a run, or what a check returns; of a process that ends, its code."""
    try:
        if run in CHECKS:
            return CHECKS[run](folder)
        main, config = config_of(run, folder, os.environ.get("WORLD_SIZE", "1"))
        return main(config)
    except SystemExit as ended:
        return ended.code


def be_process(index: int, count: int, folder: str, runs: list[str]) -> None:
    """Trains the runs as one of `count` processes."""
    log = os.open(f"{folder}/{count}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for run in runs:
        found = train(run, folder)
        Path(f"{folder}/{run}-{count}-{index}").write_text(json.dumps(found))


def main(folder: str, groups: list[str]) -> None:
    """Trains the runs of each group; ends with 1 where a process failed that was not to."""
    without_dropout(encoders)
    fewer_examples()
    for run in RUNS:  # so that the forks need not import it
        if any(run in group.split() for group in groups):
            importlib.import_module(f"train.{RUNS[run][0]}")

    failed = False
    for group in groups:
        number, *runs = group.split()
        count = int(number)
        for status in forks.run(count, partial(be_process, count=count, folder=folder, runs=runs)):
            is_killed = os.WIFSIGNALED(status) and "die" in runs
            failed = failed or (status != 0 and not is_killed)
    sys.exit(failed)
