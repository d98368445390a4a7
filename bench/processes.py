"""A step in several processes beside DistributedDataParallel by hand: a small BERT on the CPU.

    python -m bench.processes                       two processes; the median of the ratios
    python -m bench.processes --processes 4 --rounds 12
    python -m bench.processes --shares 1            ours with --shard-state optimizer

Both sides have transformers' model, the same batch and optimizer, float32, no dropout, in the same
processes; they differ in who averages the gradients. A round is some steps of the one and as many
of the other, whose order alternates. Ours also counts the examples of all processes, by which its
loss is divided; the other side, as is usual, divides by those of each process.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig

from train.common import device
from train.common.mesh import Layout

CLASSES = 2
VOCABULARY = 2000


class Options(NamedTuple):
    """What the command line says."""

    processes: int
    layers: int
    width: int
    rows: int  # of all processes
    length: int  # tokens of a row
    steps: int  # of each side in a round
    rounds: int
    shares: int  # 1: our side shares out the optimizer's state


def make_model(options: Options) -> nn.Module:
    """Returns a BERT without dropout, the same in all processes."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        intermediate_size=4 * options.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return AutoModelForSequenceClassification.from_config(config)


def make_batch(options: Options, index: int) -> dict[str, Tensor]:
    """Returns the rows of a process."""
    generator = torch.Generator().manual_seed(index)
    rows = options.rows // options.processes
    shape = (rows, options.length)
    return {
        "input_ids": torch.randint(5, VOCABULARY, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
        "mask": torch.ones(rows),
    }


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    mean_count: Callable[[Tensor], Tensor],
) -> Callable[[], None]:
    """Returns a step on a model whose backward pass averages gradients.

    Args:
        mean_count: returns what the sum of the losses is divided by, of a process's examples.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def step() -> None:
        losses = F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")
        loss = losses.sum() / mean_count(batch["mask"].sum())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Returns how long steps take."""
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - started


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns how much of an optimizer's state this process has."""
    total = 0
    for values in optimizer.state.values():
        for value in values.values():
            if not value.is_meta:
                total += value.nbytes
    return total


def compare(options: Options) -> None:
    """Runs both sides in this process, one of all; the first one prints."""
    layout = Layout(shard_state="optimizer" if options.shares else "none")
    mesh = device.setup(0, "float32", kind="cpu", layout=layout)
    batch = make_batch(options, mesh.process_index)
    ours = device.to_device(make_model(options), mesh)
    theirs = nn.parallel.DistributedDataParallel(make_model(options))
    our_optimizer = torch.optim.AdamW(ours.parameters(), 1e-4, fused=True)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), 1e-4, fused=True)
    device.init_optimizer_state(our_optimizer, mesh)
    of_all = device.over_hosts(mesh, state_bytes(our_optimizer))
    if mesh.main_process:
        low = of_all.low / 2**20
        high = of_all.high / 2**20
        weights = sum(parameter.nbytes for parameter in ours.parameters()) / 2**20
        print(
            f"MiB of a process: parameters {weights:.2f}, as much of gradients, "
            f"the optimizer's state {low:.2f} to {high:.2f}",
            flush=True,
        )
    sides = {
        "ours": make_step(ours, our_optimizer, batch, device.mean_over_processes),
        "DDP": make_step(theirs, their_optimizer, batch, lambda count: count),
    }
    for step in sides.values():
        seconds(step, 2)

    ratios = []
    for number in range(options.rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        taken = {}
        for name in names:
            device.wait_for_hosts(mesh)
            taken[name] = seconds(sides[name], options.steps)
        ratios.append(taken["ours"] / taken["DDP"])
        if mesh.main_process:
            each = ", ".join(f"{name} {1000 * taken[name] / options.steps:.0f}" for name in sides)
            print(f"ms a step: {each}; ratio {ratios[-1]:.3f}", flush=True)

    if mesh.main_process:
        low, high = min(ratios), max(ratios)
        median = statistics.median(ratios)
        print(
            f"{options.processes} processes: ours / DDP {median:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


def main() -> None:
    """Starts the processes; each comes here again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    defaults = Options(2, layers=4, width=256, rows=32, length=64, steps=5, rounds=8, shares=0)
    for name, value in defaults._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = Options(**vars(parser.parse_args()))

    if "RANK" in os.environ:
        compare(options)
        return
    command = [sys.executable, "-m", "train.common.start_processes", str(options.processes)]
    environment = os.environ | {"CPU_NUM_DEVICES": "1"}
    subprocess.run([*command, "bench.processes", *sys.argv[1:]], env=environment, check=True)


if __name__ == "__main__":
    main()
