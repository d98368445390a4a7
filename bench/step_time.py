"""Time of one training step on this CPU: our compiled step, torch.compile, and eager PyTorch.

    ours, compiled   train.resnet50's build and train_step through train.common.device.compiled, on
                     one XLA CPU device
    ours, eager      the same model and train_step in eager PyTorch (batch norm takes its native
                     kernels there)
    eager            torchvision's model, the same train_step
    torch.compile    torchvision's model with torch.compile (inductor), the same train_step

    how              float32, one batch of synthetic images, the same initial weights, batch-norm
                     statistics of the whole batch, all cores for each. Time: one process, blocks of
                     steps in rotating order, ratios within a round. First step (with compilation,
                     nothing cached), peak memory: a process for each
    run              python -m bench.step_time
                     python -m bench.step_time --model resnet50 --image-size 64 --batch-size 16 \\
                         --block 2

The first losses of all four must agree, or it stops. Run it on a machine that does nothing else.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from bench.resnet50_eager import eager_model
from data.imagenet import IMAGENET_MEAN, IMAGENET_STD, SyntheticImages
from models.resnet import Normalize, resnet
from train.common import device, loading
from train.resnet50 import TINY, Config, Data, State, build, train_step

CONTENDERS = ("ours, compiled", "ours, eager", "eager", "torch.compile")
CLASSES = 10


@dataclass(frozen=True)
class Options:
    model: Literal["resnet50", "resnet101", "resnet152", "resnet_tiny"] = "resnet_tiny"  # network
    image_size: int = 32  # pixels, square
    batch_size: int = 64  # examples per step
    block: int = 10  # steps between two readings of the clock
    rounds: int = 15  # counted blocks of each contender
    only: Literal["", *CONTENDERS] = ""  # just its first step and memory
    out: str = "runs/bench/step_time.json"  # where the figures go


def make(contender: str, options: Options, mesh: device.Mesh) -> Callable[[int], float]:
    """Returns a function that runs n training steps, waits for them, and returns the last loss."""
    size = options.image_size
    batch_size = options.batch_size
    config = replace(
        TINY, model=options.model, image_size=size, batch_size=batch_size, norm_groups=1
    )
    data = SyntheticImages(batch_size, size, CLASSES, seed=0, split="eval")
    # The seed of all weights: build() makes the same resnet(...) first.
    torch.manual_seed(1)
    if contender == "ours, compiled":
        state = build(config, Data(data, data), mesh)
        # A batch that is not sharded as the loader does it would make the first step another graph.
        with loading.parallel_loader(data, batch_size, mesh, train=False) as loader:
            batch = next(loader)
        step = device.compiled(train_step, mesh)
    else:
        batch = loading.as_tensors([data.example(index, None) for index in range(batch_size)])
        state = eager_state(contender, config)
        step = train_step
    state.model.train()
    device.set_lr(state.optimizer, 0.01)
    return lambda steps: run_steps(steps, step, state, batch, config, mesh)


def eager_state(contender: str, config: Config) -> State:
    """Returns the state of a contender without XLA, with SGD."""
    model: nn.Module = resnet(config.model, CLASSES)
    if contender != "ours, eager":
        weights = model.state_dict()
        model = eager_model(config.model, CLASSES)
        model.load_state_dict(weights)

    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if contender == "torch.compile":
        model = torch.compile(model)
    return State(model, Normalize(IMAGENET_MEAN, IMAGENET_STD), optimizer)


def run_steps(
    steps: int,
    step: Callable,
    state: State,
    batch: dict[str, Tensor],
    config: Config,
    mesh: device.Mesh,
) -> float:
    """Runs the steps and returns the last loss.

    Each step needs the one before, so reading the last loss waits for all of them.
    """
    for _ in range(steps):
        metrics = step(state, batch, config, mesh)
    loss = metrics["loss"]
    if loss.device.type == "cpu":
        return loss.item()
    return device.fetch([loss])[0]


def peak_mb() -> float:
    """Returns the peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def first_step(contender: str, options: Options) -> dict[str, float]:
    """Measures, in a fresh process, the seconds of the first step, its loss and peak memory.

    Memory is that before the model was made, and that after 5 steps.
    """
    mesh = device.setup(seed=0, precision="float32")
    before = peak_mb()
    run = make(contender, options, mesh)
    started = time.perf_counter()
    loss = run(1)
    seconds = time.perf_counter() - started
    run(4)
    return {
        "first_step_seconds": seconds,
        "start_mb": before,
        "peak_mb": peak_mb(),
        "first_loss": loss,
    }


def first_step_in_a_process(contender: str, options: Options) -> dict[str, float]:
    """Runs `first_step` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-step-time-") as folder:
        out = os.path.join(folder, "out.json")
        command = [sys.executable, "-m", "bench.step_time"]
        command += ["--model", options.model, "--image-size", str(options.image_size)]
        command += ["--batch-size", str(options.batch_size), "--only", contender, "--out", out]
        # An empty cache: otherwise inductor would read what it compiled in an earlier run.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor")}
        subprocess.run(command, check=True, env=environment)
        return json.loads(Path(out).read_text())


def check_losses(runs: dict[str, Callable[[int], float]]) -> None:
    """Runs three steps of each contender. Raises RuntimeError where the losses disagree."""
    losses = {contender: [run(1) for _ in range(3)] for contender, run in runs.items()}
    expected = losses["eager"]
    for contender, values in losses.items():
        if any(abs(its - wanted) > 1e-3 for its, wanted in zip(values, expected, strict=True)):
            raise RuntimeError(
                f"{contender} computes other losses than eager PyTorch: {values}, {expected}"
            )


def step_times(options: Options) -> dict[str, list[float]]:
    """Returns milliseconds a step of each contender in each round, all in this process."""
    # Before any backward pass on the CPU, which would break XLA's.
    mesh = device.setup(seed=0, precision="float32")
    runs = {contender: make(contender, options, mesh) for contender in CONTENDERS}
    check_losses(runs)

    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for number in range(options.rounds + 1):  # the first is a warm-up
        first = number % len(CONTENDERS)
        for contender in CONTENDERS[first:] + CONTENDERS[:first]:
            runs[contender](1)  # the threads of the contender before come to rest
            started = time.perf_counter()
            runs[contender](options.block)
            seconds = time.perf_counter() - started
            if number > 0:
                times[contender].append(1000 * seconds / options.block)
    return times


def table(times: dict[str, list[float]], starts: dict[str, dict[str, float]]) -> str:
    """Returns Markdown."""
    lines = [
        "| | ms a step, median (min to max) | time / eager's "
        "| first step, s | peak MB | of it before the model |",
        "|---|---|---|---|---|---|",
    ]
    for contender, values in times.items():
        ratios = [own / eager for own, eager in zip(values, times["eager"], strict=True)]
        start = starts[contender]
        lines.append(
            f"| {contender} | {statistics.median(values):.1f} "
            f"({min(values):.1f} to {max(values):.1f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {start['first_step_seconds']:.1f} | {start['peak_mb']:.0f} "
            f"| {start['start_mb']:.0f} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    """Measures, prints the table and writes --out."""
    os.environ["CPU_NUM_DEVICES"] = "1"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    if options.only:
        start = first_step(options.only, options)
        print(
            f"{options.only}: first step {start['first_step_seconds']:.1f} s, "
            f"peak memory {start['peak_mb']:.0f} MB"
        )
        Path(options.out).write_text(json.dumps(start) + "\n")
        return

    starts = {contender: first_step_in_a_process(contender, options) for contender in CONTENDERS}
    times = step_times(options)
    sizes = f"batch {options.batch_size}, {options.image_size} px"
    print(f"\n{options.model}, {sizes}, {torch.get_num_threads()} threads\n")
    print(table(times, starts))
    record = {"options": vars(options), "starts": starts, "step_ms": times}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
