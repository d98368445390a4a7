"""Time of the scripts' train steps beside the usual ones of bench/stock.py, on this CPU or GPU.

What is fast on a TPU must not be slow there.

    xla      both steps compiled for one XLA CPU device
    cpu      both steps on plain PyTorch, where our layers take its own kernels; fused optimizers on
             both sides
    cuda     the same on a GPU: the scripts' own networks, bfloat16, text of 512 tokens
    how      on a CPU float32, small networks; random batches of the shapes that the scripts have,
             dropout on; blocks of steps, ours and the usual one in turn, in one process; ratios
             within a round
    random   numbers of dropout on XLA: XLA_RNG_BIT_GENERATOR=three_fry for both sides (torch_xla's
             default on a CPU draws 20 times slower)
    run      python -m bench.usual_step
             python -m bench.usual_step --device cpu --only bert --rounds 15
             python -m bench.usual_step --device cuda --rounds 7 --seconds 0.7

Run it on a machine that does nothing else.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from bench import stock
from errors import InputError
from tpu.compiler import compile as compiling
from tpu.compiler import steps
from tpu.compiler.libtpu import GIB
from train import dlrm, glue, pretrain
from train.common import device, sharding
from train.common.mesh import WHOLE

TEXT_TOKENS = {"xla": 128, "cpu": 128, "cuda": 512}
FLOAT = ("--precision", "float32")
SIDES = ("ours", "usual")
WORDS = 1000  # of random text
SPECIAL_WORDS = 10  # the first of them, which random text leaves out
CLASSES = {"next_sentence": 2, "label": 10}  # of labels that are no words, by their name


def _job(model: str, preset: str, batch: int, *flags: str) -> compiling.Job:
    return compiling.Job(model, preset, task="", flags=flags, batch=batch)


def _pretraining(model: str, batch: int, *flags: str) -> compiling.Job:
    return compiling.Job(model, "full", task="pretrain", flags=flags, batch=batch)


_SMALL_IMAGES = (*FLOAT, "--norm-groups", "1", "--image-size", "64")
_SMALL_ENCODER = (*FLOAT, "--size", "mini")
_SMALL_TRANSFORMER = ("--arch", "transformer_small", "--dropout", "0.1", "--lengths", "32")
JOBS = {
    "ResNet": _job("resnet50", "tiny", 32, *_SMALL_IMAGES),
    "BERT pretraining": _pretraining("bert", 8, *_SMALL_ENCODER),
    "RoBERTa pretraining": _pretraining("roberta", 8, *_SMALL_ENCODER),
    "DistilBERT pretraining": _pretraining("distilbert", 8, *_SMALL_ENCODER),
    "XLNet pretraining": _pretraining("xlnet", 8, *_SMALL_ENCODER),
    "Transformer": _job("transformer", "tiny", 32, *FLOAT, *_SMALL_TRANSFORMER),
    "DLRM": _job("dlrm", "kaggle", 512, *FLOAT, "--hash-rows", "20000"),
}
GPU_JOBS = {
    "ResNet-50": _job("resnet50", "full", 256, "--norm-groups", "1"),
    "BERT GLUE": compiling.Job("bert", "full", task="mrpc", flags=(), batch=32),
    "BERT pretraining": _pretraining("bert", 32),
    "RoBERTa pretraining": _pretraining("roberta", 32),
    "DistilBERT pretraining": _pretraining("distilbert", 32),
    "XLNet pretraining": _pretraining("xlnet", 32),
    "Transformer": _job("transformer", "base", 128),
    "DLRM": _job("dlrm", "kaggle", 2048, "--hash-rows", "1000000"),
    "BERT-large": _pretraining("bert", 32, "--size", "large"),
    "BERT-large, --remat": _pretraining("bert", 32, "--size", "large", "--remat"),
    "XLNet-large": _pretraining("xlnet", 16, "--size", "large"),
    "RoBERTa-1.3b, --remat": _pretraining("roberta", 32, "--size", "1.3b", "--remat"),
}


@dataclass(frozen=True)
class Options:
    device: Literal["xla", "cpu", "cuda"] = "xla"  # of both sides
    only: str = ""  # part of the name of a model
    rounds: int = 11  # counted blocks of each side
    seconds: float = 1.5  # about as long as a block takes
    out: str = "runs/bench/usual_step.json"  # where the figures go


def values(
    name: str, shape: torch.Size, dtype: torch.dtype, job: compiling.Job, tokens: int
) -> Tensor:
    """Returns random numbers that an entry of a batch may have."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if name == "token_type_ids":
        return torch.full(shape, 0, dtype=dtype)
    if name in ("attention_mask", "weights", "mask"):
        return torch.full(shape, 1, dtype=dtype)
    if dtype.is_floating_point:
        if name == "label":
            return torch.randint(0, 2, shape).to(dtype)
        return torch.randn(shape, dtype=dtype)
    if job.script is dlrm:
        most = job.config(1).hash_rows
        ids = []
        for rows in steps.KAGGLE_ROWS:
            ids.append(torch.randint(0, min(rows, most), shape[:1], dtype=dtype))
        return torch.stack(ids, 1)
    if name == "order":
        return torch.stack([torch.randperm(shape[1]) for _ in range(shape[0])]).to(dtype)
    if name == "positions":
        drawn = [torch.randperm(tokens)[: shape[1]] for _ in range(shape[0])]
        return torch.stack(drawn).to(dtype)
    if name in CLASSES:
        return torch.randint(0, CLASSES[name], shape, dtype=dtype)
    if name == "labels" and job.script is glue:
        return torch.randint(0, 2, shape, dtype=dtype)
    return torch.randint(SPECIAL_WORDS, WORDS, shape, dtype=dtype)


def make(job: compiling.Job, usual: bool, mesh: device.Mesh) -> Callable[[], Tensor]:
    """Returns a function that starts a step and returns its loss."""
    torch.manual_seed(0)
    layout = getattr(job.config(1), "layout", WHOLE)
    if usual:
        script = stock.FUNCTIONS[job.script]
    else:
        script = job.script
        mesh = sharding.arranged(mesh, layout)
    tokens = TEXT_TOKENS[mesh.device.type]
    options = {"tokens": tokens} if job.script is pretrain else {}
    step = compiling.MAKERS[job.script](job.config(1), mesh, script, **options)
    state, batches = step.arguments[:2]
    if usual and layout.remat:
        state.model.gradient_checkpointing_enable()

    for batch in batches if isinstance(batches, tuple) else [batches]:
        for name, tensor in batch.items():
            drawn = values(name, tensor.shape, tensor.dtype, job, tokens)
            batch[name] = drawn.to(mesh.device)
            by_examples = ("data",) + (None,) * (tensor.dim() - 1)
            device.annotate(batch[name], mesh.spmd, by_examples)
    device.set_lr(state.optimizer, 1e-3)
    function = device.compiled(step.function, mesh)
    return lambda: function(*step.arguments)["loss"]


def waiting(start: Callable[[], Tensor]) -> Callable[[int], None]:
    """Returns a function that runs n steps and waits for them."""

    def run(count: int) -> None:
        # Each step needs the one before, so reading the last loss waits for all of them.
        for _ in range(count):
            loss = start()
        if loss.device.type == "cpu":
            number = loss.item()
        else:
            number = device.fetch([loss])[0]
        assert number > 0

    return run


@dataclass(frozen=True)
class Measured:
    """The figures of a job, by side."""

    milliseconds: dict[str, list[float]]  # a step, in each round
    gib: dict[str, float]  # memory that it needs, of a GPU


def measure(job: compiling.Job, options: Options, mesh: device.Mesh) -> Measured:
    """Times blocks of steps of both sides in turn."""
    runs = {}
    block_steps = {}
    memory = {}
    for side in SIDES:
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        run = waiting(make(job, side == "usual", mesh))
        runs[side] = run
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        run(3)

        started = time.perf_counter()
        run(3)
        a_step = (time.perf_counter() - started) / 3
        block_steps[side] = max(1, round(options.seconds / a_step))
        memory[side] = (torch.cuda.max_memory_allocated() - before) / GIB

    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in sorted(SIDES, reverse=number % 2 == 1):
            started = time.perf_counter()
            runs[side](block_steps[side])
            seconds = time.perf_counter() - started
            times[side].append(1000 * seconds / block_steps[side])
    return Measured(times, memory)


def row(name: str, device_kind: str, measured: Measured) -> str:
    """Returns a job's row of the table."""
    ours = measured.milliseconds["ours"]
    usual = measured.milliseconds["usual"]
    ratios = [own / other for own, other in zip(ours, usual, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    cells = [
        name,
        device_kind,
        f"{statistics.median(ours):.1f}",
        f"{statistics.median(usual):.1f}",
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
    ]
    for gib in measured.gib.values():
        cells.append(f"{gib:.2f}" if device_kind == "cuda" else "")
    return f"| {' | '.join(cells)} |"


def main(options: Options) -> None:
    """Measures, prints the table and writes --out."""
    os.environ["CPU_NUM_DEVICES"] = "1"
    os.environ.setdefault("XLA_RNG_BIT_GENERATOR", "three_fry")
    gpu = options.device == "cuda"
    known = GPU_JOBS if gpu else JOBS
    jobs = {name: job for name, job in known.items() if options.only.lower() in name.lower()}
    if not jobs:
        raise InputError(f"--only is {options.only!r}, but the steps are: {', '.join(known)}")
    if options.rounds < 2:
        raise InputError(f"--rounds is {options.rounds}; a spread needs at least 2")
    path = Path(options.out)
    if path.is_dir():
        raise InputError(f"--out is {path}, a folder; give a file")

    mesh = device.setup(seed=0, precision="bfloat16" if gpu else "float32", kind=options.device)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record: dict[str, dict] = {}
    print(
        "| step | | ours, ms | usual, ms | ours / usual, median (quarter to three quarters) "
        "| ours, GiB | usual |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, job in jobs.items():
        measured = measure(job, options, mesh)
        record[name] = {**measured.milliseconds, "gib": measured.gib}
        print(row(name, options.device, measured), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"options": vars(options), "step_ms": record}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
