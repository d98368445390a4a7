"""Time that the host of a TPU spends on a train step, beside what the chip needs for it.

torch_xla runs a step's Python and looks up its graph in every call; the chip waits if that takes
longer than the step before. `device.compiled` starts the program at once instead
(train/common/xla/replay.py).

    steps    the published networks, of the scripts and the usual ones (bench/stock.py), on one XLA
             CPU device; the batch is tiny, since a step's size changes nothing here
    traced   a call with --no-strict, which traces every time and then starts the program; the
             device is idle
    repeated the same call of a strict run, from its third on; in turn with the traced one
    looped   a repeated call of LOOPED steps in one program (--steps-a-call), a step of it; DLRM
             alone has that
    time     of the processor for the calling thread: not what it waits for, nor the step itself
    chip     libtpu's estimate for one v5e, of results/stock.json (research/tpu_cycles.py), at that
             table's batch
    run      python -m research.host_time
             python -m research.host_time --only bert --rounds 31
"""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from torch import Tensor

from bench import usual_step
from tpu.compiler import compile as compiling
from tpu.compiler import results
from train import dlrm
from train.common import device

FLOAT = usual_step.FLOAT
LOOPED = 8


@dataclass(frozen=True)
class Step:
    """A script's step, and its row in research/results/stock.json."""

    job: compiling.Job
    row: str


def pretraining(model: str, row: str) -> Step:
    """Returns an encoder's step."""
    job = compiling.Job(model, "full", task="pretrain", flags=FLOAT, batch=1)
    return Step(job, f"{row} pretraining, 512 tokens")


def of_script(model: str, preset: str, flags: tuple[str, ...], batch: int, row: str) -> Step:
    """Returns the step of a script that has no tasks."""
    job = compiling.Job(model, preset, task="", flags=(*FLOAT, *flags), batch=batch)
    return Step(job, row)


STEPS = {
    "ResNet-50": of_script(
        "resnet50",
        "full",
        flags=("--norm-groups", "1", "--image-size", "32"),
        batch=2,
        row="ResNet-50, 224 px",
    ),
    "BERT-base pretraining": pretraining("bert", "BERT-base"),
    "DistilBERT pretraining": pretraining("distilbert", "DistilBERT"),
    "XLNet-base pretraining": pretraining("xlnet", "XLNet-base"),
    "Transformer base": of_script(
        "transformer",
        "tpu",
        flags=("--lengths", "16"),
        batch=2,
        row="Transformer base, 64 tokens",
    ),
    "DLRM, Kaggle": of_script(
        "dlrm",
        "kaggle",
        flags=("--hash-rows", "2000"),
        batch=16,
        row="Kaggle, 1 chip, up to 10.1M",
    ),
}


@dataclass(frozen=True)
class Options:
    only: str = ""  # part of the name of a step
    rounds: int = 15  # counted calls of each kind
    out: str = "runs/research/host_time.json"  # where the figures go


def call_ms(start: Callable[[], Tensor]) -> float:
    """Returns the milliseconds that this thread computes in one call; waits for the device."""
    started = time.thread_time()
    loss = start()
    elapsed = 1000 * (time.thread_time() - started)
    device.fetch([loss])
    return elapsed


def measure(job: compiling.Job, rounds: int, mesh: device.Mesh) -> dict[str, list[float]]:
    """Returns the milliseconds of each call.

    The kinds are "usual, traced", "traced", "repeated" and, for DLRM, a step's share of "looped".
    """
    lenient = replace(mesh, strict=False)
    kinds = {
        "usual, traced": (True, lenient),
        "traced": (False, lenient),
        "repeated": (False, mesh),
    }
    times: dict[str, list[float]] = {}
    # Two networks at a time are enough for the memory.
    for pair in (("usual, traced",), ("traced", "repeated")):
        starts = {}
        for kind in pair:
            usual, its_mesh = kinds[kind]
            starts[kind] = usual_step.make(job, usual, its_mesh)
            times[kind] = []
        for _ in range(4):
            for start in starts.values():
                call_ms(start)
        for _ in range(rounds):
            for kind, start in starts.items():
                times[kind].append(call_ms(start))
        del starts, start
        gc.collect()

    if job.script is dlrm:
        looped = replace(job, flags=(*job.flags, "--steps-a-call", str(LOOPED)))
        start = usual_step.make(looped, False, mesh)
        for _ in range(4):
            call_ms(start)
        times["looped"] = [call_ms(start) / LOOPED for _ in range(rounds)]
    return times


def main(options: Options) -> None:
    """Measures, prints the table and writes --out."""
    os.environ["CPU_NUM_DEVICES"] = "1"
    os.environ.setdefault("XLA_RNG_BIT_GENERATOR", "three_fry")
    mesh = device.setup(seed=0, precision="float32")
    stock = results.load(results.FOLDER / "stock.json")

    record = {}
    head = [
        "step",
        "usual, traced, ms",
        "ours, traced",
        "ours, repeated",
        "ours, looped",
        "the step on a v5e",
    ]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, step in STEPS.items():
        if options.only.lower() not in name.lower():
            continue
        times = measure(step.job, options.rounds, mesh)
        chip = 1000 * stock[step.row]["ours"]["estimated_seconds"]
        medians = []
        for kind in ("usual, traced", "traced", "repeated", "looped"):
            medians.append(f"{statistics.median(times[kind]):.2f}" if kind in times else "")
        print(f"| {name} | {' | '.join(medians)} | {chip:.1f} |", flush=True)
        record[name] = {"ms": times, "v5e_ms": chip}

    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"options": vars(options), "steps": record}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
