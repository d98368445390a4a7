"""Time of the scripts' train steps beside the usual ones of bench/stock.py, on this CPU or GPU: what is fast on a TPU
must not be slow there.

    xla      both steps compiled for one XLA CPU device
    cpu      both steps on plain PyTorch, where our layers take its own kernels; fused optimizers on both sides
    cuda     the same on a GPU: the scripts' own networks, bfloat16, text of 512 tokens
    how      on a CPU float32, small networks; random batches of the shapes that the scripts have, dropout on; blocks of
             steps, ours and the usual one in turn, in one process; ratios within a round
    random   numbers of dropout on XLA: XLA_RNG_BIT_GENERATOR=three_fry for both sides (torch_xla's default on a CPU
             draws 20 times slower)
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
JOBS = {
    "ResNet": compiling.Job(
        "resnet50", "tiny", "", (*FLOAT, "--norm-groups", "1", "--image-size", "64"), 32
    ),
    "BERT pretraining": compiling.Job("bert", "full", "pretrain", (*FLOAT, "--size", "mini"), 8),
    "RoBERTa pretraining": compiling.Job(
        "roberta", "full", "pretrain", (*FLOAT, "--size", "mini"), 8
    ),
    "DistilBERT pretraining": compiling.Job(
        "distilbert", "full", "pretrain", (*FLOAT, "--size", "mini"), 8
    ),
    "XLNet pretraining": compiling.Job("xlnet", "full", "pretrain", (*FLOAT, "--size", "mini"), 8),
    "Transformer": compiling.Job(
        "transformer",
        "tiny",
        "",
        (*FLOAT, "--arch", "transformer_small", "--dropout", "0.1", "--lengths", "32"),
        32,
    ),
    "DLRM": compiling.Job("dlrm", "kaggle", "", (*FLOAT, "--hash-rows", "20000"), 512),
}
GPU_JOBS = {
    "ResNet-50": compiling.Job("resnet50", "full", "", ("--norm-groups", "1"), 256),
    "BERT GLUE": compiling.Job("bert", "full", "mrpc", (), 32),
    "BERT pretraining": compiling.Job("bert", "full", "pretrain", (), 32),
    "RoBERTa pretraining": compiling.Job("roberta", "full", "pretrain", (), 32),
    "DistilBERT pretraining": compiling.Job("distilbert", "full", "pretrain", (), 32),
    "XLNet pretraining": compiling.Job("xlnet", "full", "pretrain", (), 32),
    "Transformer": compiling.Job("transformer", "base", "", (), 128),
    "DLRM": compiling.Job("dlrm", "kaggle", "", ("--hash-rows", "1000000"), 2048),
    "BERT-large": compiling.Job("bert", "full", "pretrain", ("--size", "large"), 32),
    "BERT-large, --remat": compiling.Job(
        "bert", "full", "pretrain", ("--size", "large", "--remat"), 32
    ),
    "XLNet-large": compiling.Job("xlnet", "full", "pretrain", ("--size", "large"), 16),
    "RoBERTa-1.3b, --remat": compiling.Job(
        "roberta", "full", "pretrain", ("--size", "1.3b", "--remat"), 32
    ),
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
    """Random numbers that an entry of a batch may have."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if name in ("attention_mask", "weights", "mask", "token_type_ids"):
        return torch.full(shape, 0 if name == "token_type_ids" else 1, dtype=dtype)
    if dtype.is_floating_point:
        return (
            torch.randint(0, 2, shape).to(dtype)
            if name == "label"
            else torch.randn(shape, dtype=dtype)
        )
    if job.script is dlrm:
        rows = [min(count, job.config(1).hash_rows) for count in steps.KAGGLE_ROWS]
        return torch.stack([torch.randint(0, count, shape[:1], dtype=dtype) for count in rows], 1)
    if name == "order":
        return torch.stack([torch.randperm(shape[1]) for _ in range(shape[0])]).to(dtype)
    if name == "positions":
        return torch.stack([torch.randperm(tokens)[: shape[1]] for _ in range(shape[0])]).to(dtype)
    most = {"next_sentence": 2, "label": 10, "labels": 2 if job.script is glue else 1000}.get(
        name, 1000
    )
    return torch.randint(0 if most < 1000 else 10, most, shape, dtype=dtype)


def make(job: compiling.Job, usual: bool, mesh: device.Mesh) -> Callable[[], Tensor]:
    """A function that starts a step and returns its loss."""
    torch.manual_seed(0)
    layout = getattr(job.config(1), "layout", WHOLE)
    script, mesh = (
        (stock.FUNCTIONS[job.script], mesh)
        if usual
        else (job.script, sharding.arranged(mesh, layout))
    )
    tokens = TEXT_TOKENS[mesh.device.type]
    options = {"tokens": tokens} if job.script is pretrain else {}
    step = compiling.MAKERS[job.script](job.config(1), mesh, script, **options)
    state, batches = step.arguments[:2]
    if usual and layout.remat:
        state.model.gradient_checkpointing_enable()
    for batch in batches if isinstance(batches, tuple) else [batches]:
        for name, tensor in batch.items():
            batch[name] = values(name, tensor.shape, tensor.dtype, job, tokens).to(mesh.device)
            device.annotate(batch[name], mesh.spmd, ("data",) + (None,) * (tensor.dim() - 1))
    device.set_lr(state.optimizer, 1e-3)
    function = device.compiled(step.function, mesh)
    return lambda: function(*step.arguments)["loss"]


def waiting(start: Callable[[], Tensor]) -> Callable[[int], None]:
    """A function that runs n steps and waits for them."""

    def run(count: int) -> None:
        # Each step needs the one before, so reading the last loss waits for all of them.
        for _ in range(count):
            loss = start()
        assert (loss.item() if loss.device.type == "cpu" else device.fetch([loss])[0]) > 0

    return run


def measure(
    job: compiling.Job, options: Options, mesh: device.Mesh
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds a step of "ours" and "usual" in each round; GiB that each needs, of a GPU."""
    runs, blocks, memory = {}, {}, {}
    for name in ("ours", "usual"):
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        run = runs[name] = waiting(make(job, name == "usual", mesh))
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        run(3)
        started = time.perf_counter()
        run(3)
        blocks[name] = max(1, round(3 * options.seconds / (time.perf_counter() - started)))
        memory[name] = (torch.cuda.max_memory_allocated() - before) / GIB
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            started = time.perf_counter()
            runs[name](blocks[name])
            times[name].append(1000 * (time.perf_counter() - started) / blocks[name])
    return times, memory


def main(options: Options) -> None:
    """Measures, prints the table and writes --out."""
    os.environ["CPU_NUM_DEVICES"] = "1"
    os.environ.setdefault("XLA_RNG_BIT_GENERATOR", "three_fry")
    gpu = options.device == "cuda"
    every = GPU_JOBS if gpu else JOBS
    jobs = {name: job for name, job in every.items() if options.only.lower() in name.lower()}
    if not jobs:
        raise InputError(f"--only is {options.only!r}, but the steps are: {', '.join(every)}")
    if options.rounds < 2:
        raise InputError(f"--rounds is {options.rounds}; a spread needs at least 2")
    path = Path(options.out)
    if path.is_dir():
        raise InputError(f"--out is {path}, a folder; give a file")
    mesh = device.setup(seed=0, precision="bfloat16" if gpu else "float32", kind=options.device)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record: dict[str, dict] = {}
    print(
        "| step | | ours, ms | usual, ms | ours / usual, median (quarter to three quarters) | ours, GiB | usual |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, job in jobs.items():
        times, memory = measure(job, options, mesh)
        record[name] = times | {"gib": memory}
        ratios = [own / other for own, other in zip(times["ours"], times["usual"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ours, usual = (statistics.median(times[side]) for side in ("ours", "usual"))
        print(
            f"| {name} | {options.device} | {ours:.1f} | {usual:.1f} "
            f"| {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) "
            f"| {' | '.join(f'{gib:.2f}' if gpu else '' for gib in memory.values())} |",
            flush=True,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"options": vars(options), "step_ms": record}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
