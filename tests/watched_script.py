"""A small script that trains and can hang, whose runs tests/test_watch.py watches."""

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import torch
from helpers import update
from torch import nn

from train.common import device
from train.common.loading import parallel_loader
from train.common.run import Run

STEPS = 12


@dataclass(frozen=True)
class Config:
    """What the script takes."""

    data: str = "synthetic"
    device: str = "xla"
    hang: str = ""  # for ever: "loader", "step", or "lock" for a step that keeps Python's lock
    workers: int = 0
    runs: str = "runs"
    name: str = "run"


PRESETS = {"tiny": ("small", Config()), "other": ("the same", Config())}


class Numbers:
    """Random examples."""

    def __init__(self, hang: str):
        self.hang = hang

    def __len__(self) -> int:
        return 8 * STEPS

    def example(self, index: int, rng: np.random.Generator) -> dict:
        if self.hang == "loader" and index == 31:  # of the tenth batch
            time.sleep(3600)
        return {"x": rng.random(4, dtype=np.float32)}


def train_step(model, optimizer, batch):
    return {"loss": update(model(batch["x"]).square().mean(), optimizer)}


def main(config: Config) -> None:
    mesh = device.setup(0, "float32", True, config.device)
    run = Run(config, mesh, name="run", headline="numbers", total_steps=STEPS, may_differ=("hang",))
    model = device.to_device(nn.Linear(4, 1), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    start = run.resume(model, optimizer, examples=8 * STEPS, keep=2)
    step_fn = device.compiled(train_step, mesh)

    loader = parallel_loader(
        Numbers(config.hang),
        8,
        mesh,
        train=True,
        start=start,
        stop=STEPS,
        workers=config.workers,
    )
    with run.training(loader):
        for step, batch in enumerate(loader, start + 1):
            metrics = step_fn(model, optimizer, batch)
            if step == 9 and config.hang == "lock":
                time.sleep(1)  # the watchdog learns that steps are short
                ctypes.PyDLL(None).sleep(3600)
            if step == 9 and config.hang == "step":
                time.sleep(3600)
            run.log(step, **metrics)
            run.checkpoint(step, due=step % 4 == 0)
        with run.pause():
            time.sleep(0.01)
        run.finish({})
