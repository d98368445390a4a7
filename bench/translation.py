"""Speed of the Transformer on this CPU: training and beam search, against fairseq.

ours      train.transformer's step, in length buckets and packed, and train.translate's beam search: compiled for one
          XLA CPU device, or on plain PyTorch (--device cpu)
fairseq   its Trainer on its own batches (sorted by length, at most --batch-tokens places) and its SequenceGenerator
how       the same folder, sizes, dictionary, places a batch, float32, the same cores. One process a side, of which one
          works at a time: blocks of updates, or of whole validation splits, in rotating order; ratios within a round
units     target tokens a second, without padding; sentences a second. Both sides search with the same weights, those
          of --model-dir
run       make fairseq
          python -m bench.translation --data FOLDER --model-dir runs/<name>/export --device cpu

Run it on a machine that does nothing else.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench.transformer_fairseq import FAIRSEQ, FAST_RANDOM, fairseq
from bench.transformer_fairseq import Options as Recipe
from data import wmt
from errors import InputError
from train import transformer, translate
from train.common import device, loading


@dataclass(frozen=True)
class Options:
    data: str  # folder that `make data DATASET=wmt18` made
    model_dir: str = ""  # export whose weights both sides search with; "": no search
    device: Literal["xla", "cpu"] = "xla"  # of our side
    training: bool = True  # --no-training: the search alone
    arch: str = "transformer_small"  # sizes of the training, see models/transformer.py
    batch_tokens: int = 4096  # places a batch on either side
    length: int = 64  # places of a packed row
    beam: int = 4  # hypotheses a sentence
    length_penalty: float = 0.6  # exponent of a hypothesis' length
    search_tokens: int = 16_384  # places of a batch of our search, hypotheses counted
    sentences: int = 128  # sentences of a batch of fairseq's search
    threads: int = 2  # cores of each side
    block: int = 8  # updates between two readings of the clock
    rounds: int = 7  # counted blocks of each contender
    out: str = "runs/bench/translation.json"  # where the figures go


class Worker:
    """fairseq in a process of its own, which sleeps between commands."""

    def __init__(self, options: Options, data: str):
        recipe = Recipe(
            options.data, options.arch, batch_tokens=options.batch_tokens, length=options.length
        )
        flags = fairseq(recipe, "/nonexistent", 0, data)[1:]  # its trainer saves nothing here
        search = {
            "beam": options.beam,
            "length-penalty": options.length_penalty,
            "sentences": options.sentences,
        }
        search |= {"max-len-a": translate.MAX_LENGTH_A, "max-len-b": translate.MAX_LENGTH_B}
        search |= {"model-dir": options.model_dir} if options.model_dir else {}
        command = [
            str(FAIRSEQ / "python"),
            str(Path(__file__).parent / "fairseq/worker.py"),
            *flags,
        ]
        command += [str(part) for flag, value in search.items() for part in (f"--{flag}", value)]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def __call__(self, command: str) -> dict:
        """Sends a command and waits for its answer. Raises InputError if the process has ended."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise InputError("fairseq's process has ended; its message is above")
        return json.loads(line)


def training(config: transformer.Config, mesh: device.Mesh) -> Callable[[int], tuple[float, int]]:
    """A function that makes n updates: (seconds, real target tokens). Every shape is compiled beforehand."""
    data = transformer.open_data(config)
    pairs, plan = data.train, translate.training_plan(data.train, config)
    state = transformer.build(config, data, mesh)
    state.model.train()
    step = device.compiled(transformer.train_step, mesh, len(plan.shapes))
    loader = loading.parallel_loader(pairs, plan, mesh, train=True, start=0, stop=10**6, workers=0)
    device.set_lr(state.optimizer, 1e-4)

    def run(updates: int) -> tuple[float, int]:
        batches, started = [], time.perf_counter()
        for _ in range(updates):
            batches.append(next(loader))
            metrics = step(state, batches[-1], config, mesh)
        device.fetch([metrics["loss"]])
        seconds = time.perf_counter() - started
        return seconds, sum(int((batch["target"].cpu() != wmt.PAD).sum()) for batch in batches)

    if not mesh.compiles:
        return run
    # Compiles every shape.
    seen = set()
    with loading.parallel_loader(pairs, plan, mesh, train=False) as every:
        for batch in every:
            if batch["source"].shape not in seen:
                seen.add(batch["source"].shape)
                step(state, batch, config, mesh)
    return run


def searching(options: Options, mesh: device.Mesh) -> Callable[[], tuple[float, list[str]]]:
    """A function that translates the validation split: (seconds, text)."""
    model, _ = translate.load(options.model_dir, mesh)
    pairs = wmt.open_pairs(options.data, "valid")
    config = translate.Config(
        lengths=(16, 24, 32),
        batch_tokens=options.search_tokens,
        beam=options.beam,
        length_penalty=options.length_penalty,
        precision="float32",
    )
    translator = translate.Translator(model, mesh, config)

    def run() -> tuple[float, list[str]]:
        started = time.perf_counter()
        text = translator(pairs)
        return time.perf_counter() - started, text

    run()
    return run


def table(title: str, rates: dict[str, list[float]], unit: str, reference: str) -> None:
    """Prints medians and, round by round, the ratio to the reference."""
    print(f"\n| {title} | {unit}, median (min to max) | / {reference}'s |\n|---|---|---|")
    for name, values in rates.items():
        ratios = sorted(a / b for a, b in zip(values, rates[reference], strict=True))
        ratio = (
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            if name != reference
            else "1"
        )
        print(
            f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f}) | {ratio} |"
        )


def compare_training(options: Options, mesh: device.Mesh, other: Worker) -> dict[str, list[float]]:
    """Target tokens a second of each side in each round."""
    config = replace(
        transformer.Config(),
        data=options.data,
        arch=options.arch,
        batch_tokens=options.batch_tokens,
        pack=False,
        precision="float32",
        workers=0,
    )
    sides = {"ours, length buckets": training(config, mesh)}
    sides["ours, packed"] = training(replace(config, pack=True, lengths=(options.length,)), mesh)
    rates: dict[str, list[float]] = {name: [] for name in [*sides, "fairseq"]}
    for number in range(-1, options.rounds):  # the first is a warm-up
        names = list(rates)
        for name in names[number % 3 :] + names[: number % 3]:
            if name == "fairseq":
                answer = other(f"train {options.block}")
                seconds, tokens = answer["seconds"], answer["tokens"]
            else:
                seconds, tokens = sides[name](options.block)
            if number >= 0:
                rates[name].append(tokens / seconds)
    return rates


def main(options: Options) -> None:
    """Measures, prints two tables and writes the figures."""
    from sacrebleu.metrics import BLEU

    if not (FAIRSEQ / "python").exists():
        raise InputError("fairseq is not installed; `make fairseq` makes its environment")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ |= {
        "CPU_NUM_DEVICES": "1",
        "PJRT_DEVICE": "CPU",
        "XLA_RNG_BIT_GENERATOR": FAST_RANDOM,
    }
    torch.set_num_threads(options.threads)
    mesh = device.setup(0, "float32", kind=options.device)
    valid = wmt.open_pairs(options.data, "valid")
    other = Worker(options, str(valid.folder))
    figures: dict = {"options": vars(options)}
    if options.training:
        rates = figures["training"] = compare_training(options, mesh, other)
        table("training", rates, "target tokens/s", "fairseq")

    if options.model_dir:
        search = searching(options, mesh)
        other("translate")
        rates = {"ours": [], "fairseq": []}
        text: dict[str, list[str]] = {}
        for number in range(max(options.rounds // 2, 3)):
            for name in ("ours", "fairseq") if number % 2 else ("fairseq", "ours"):
                if name == "ours":
                    seconds, text[name] = search()
                else:
                    answer = other("translate")
                    seconds = answer["seconds"]
                    text[name] = [valid.decode(tokens) for tokens in answer["hypotheses"]]
                rates[name].append(len(valid) / seconds)
        figures["search"] = rates
        table(f"beam search, beam {options.beam}", rates, "sentences/s", "fairseq")
        same = statistics.fmean(ours == theirs for ours, theirs in zip(*text.values(), strict=True))
        bleu = {
            name: BLEU().corpus_score(lines, [valid.references()]).score
            for name, lines in text.items()
        }
        figures |= {"same": same, "bleu": bleu}
        print(
            f"\n{same:.1%} of the translations are the same; BLEU "
            + ", ".join(f"{n} {b:.2f}" for n, b in bleu.items())
        )
    other.process.kill()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
