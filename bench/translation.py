"""Speed of the Transformer on this CPU: training and beam search, against fairseq.

ours      train.transformer's step, in length buckets and packed, and train.translate's beam search:
          compiled for one XLA CPU device, or on plain PyTorch (--device cpu)
fairseq   its Trainer on its own batches (sorted by length, at most --batch-tokens, padding counted)
          and its SequenceGenerator
how       the same folder, sizes, dictionary, tokens per batch, float32, the same cores. One process
          per side, of which one works at a time: blocks of updates, or of whole validation splits,
          in rotating order; ratios within a round
units     target tokens a second, without padding; sentences a second. Both sides search with the
          same weights, those of --model-dir
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

from bench.transformer_fairseq import FAIRSEQ, FAST_RANDOM, fairseq, flags_of
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
    batch_tokens: int = 4096  # tokens per batch on either side, padding counted
    length: int = 64  # tokens of a packed row
    beam: int = 4  # hypotheses per sentence
    length_penalty: float = 0.6  # exponent of a hypothesis' length
    search_tokens: int = 16_384  # tokens per batch of our search, hypotheses and padding counted
    sentences: int = 128  # sentences per batch of fairseq's search
    threads: int = 2  # cores of each side
    block: int = 8  # updates between two readings of the clock
    rounds: int = 7  # counted blocks of each contender
    out: str = "runs/bench/translation.json"  # where the figures go


class Worker:
    """fairseq in a process of its own, which sleeps between commands."""

    def __init__(self, options: Options, data: str):
        recipe = Recipe(
            data=options.data,
            arch=options.arch,
            batch_tokens=options.batch_tokens,
            length=options.length,
        )
        # Its trainer saves nothing in this folder.
        _, *training = fairseq(recipe, "/nonexistent", seed=0, data=data)
        search = {
            "beam": options.beam,
            "length-penalty": options.length_penalty,
            "sentences": options.sentences,
            "max-len-a": translate.MAX_LENGTH_A,
            "max-len-b": translate.MAX_LENGTH_B,
        }
        if options.model_dir:
            search["model-dir"] = options.model_dir
        worker = Path(__file__).parent / "fairseq/worker.py"
        command = [str(FAIRSEQ / "python"), str(worker), *training, *flags_of(search)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
        )

    def __call__(self, command: str) -> dict:
        """Sends a command and waits for its answer. Raises InputError if the process has ended."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise InputError("fairseq's process has ended; its message is above")
        return json.loads(line)


@dataclass(frozen=True)
class Trained:
    """What a side has done in a block of updates."""

    seconds: float
    tokens: int  # of the target, without padding


@dataclass(frozen=True)
class Translated:
    """What a side has made of the validation split."""

    seconds: float
    text: list[str]


def training(config: transformer.Config, mesh: device.Mesh) -> Callable[[int], Trained]:
    """Returns a function that makes n updates. Every shape is compiled beforehand."""
    data = transformer.open_data(config)
    pairs = data.train
    plan = translate.training_plan(pairs, config)
    state = transformer.build(config, data, mesh)
    state.model.train()
    step = device.compiled(transformer.train_step, mesh, len(plan.shapes))
    loader = loading.parallel_loader(pairs, plan, mesh, train=True, start=0, stop=10**6, workers=0)
    device.set_lr(state.optimizer, 1e-4)

    def run(updates: int) -> Trained:
        batches = []
        started = time.perf_counter()
        for _ in range(updates):
            batch = next(loader)
            batches.append(batch)
            metrics = step(state, batch, config, mesh)
        device.fetch([metrics["loss"]])
        seconds = time.perf_counter() - started
        tokens = sum(int((batch["target"].cpu() != wmt.PAD).sum()) for batch in batches)
        return Trained(seconds, tokens)

    if mesh.compiles:
        compiled = set()
        with loading.parallel_loader(pairs, plan, mesh, train=False) as one_epoch:
            for batch in one_epoch:
                shape = batch["source"].shape
                if shape not in compiled:
                    compiled.add(shape)
                    step(state, batch, config, mesh)
    return run


def searching(options: Options, mesh: device.Mesh) -> Callable[[], Translated]:
    """Returns a function that translates the validation split; it has done so once."""
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

    def run() -> Translated:
        started = time.perf_counter()
        text = translator(pairs)
        return Translated(time.perf_counter() - started, text)

    run()
    return run


def table(title: str, rates: dict[str, list[float]], unit: str, reference: str) -> None:
    """Prints medians and, round by round, the ratio to the reference."""
    print(f"\n| {title} | {unit}, median (min to max) | / {reference}'s |\n|---|---|---|")
    for name, values in rates.items():
        rate = f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
        ratio = "1"
        if name != reference:
            ratios = [its / other for its, other in zip(values, rates[reference], strict=True)]
            median = statistics.median(ratios)
            ratio = f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {rate} | {ratio} |")


def compare_training(
    options: Options, mesh: device.Mesh, fairseq_worker: Worker
) -> dict[str, list[float]]:
    """Returns target tokens a second of each side in each round."""
    buckets = replace(
        transformer.Config(),
        data=options.data,
        arch=options.arch,
        batch_tokens=options.batch_tokens,
        pack=False,
        precision="float32",
        workers=0,
    )
    packed = replace(buckets, pack=True, lengths=(options.length,))

    def train_fairseq(updates: int) -> Trained:
        answer = fairseq_worker(f"train {updates}")
        return Trained(answer["seconds"], answer["tokens"])

    sides = {
        "ours, length buckets": training(buckets, mesh),
        "ours, packed": training(packed, mesh),
        "fairseq": train_fairseq,
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1, options.rounds):  # the first is a warm-up
        first = number % len(names)
        for name in names[first:] + names[:first]:
            trained = sides[name](options.block)
            if number >= 0:
                rates[name].append(trained.tokens / trained.seconds)
    return rates


def compare_search(options: Options, mesh: device.Mesh, fairseq_worker: Worker) -> dict:
    """Times the search of both sides, prints a table and how far their translations agree.

    Returns:
        {"search": sentences a second by side and round, "same": share of equal translations,
        "bleu": by side}.
    """
    from sacrebleu.metrics import BLEU

    valid = wmt.open_pairs(options.data, "valid")

    def search_fairseq() -> Translated:
        answer = fairseq_worker("translate")
        text = [valid.decode(tokens) for tokens in answer["hypotheses"]]
        return Translated(answer["seconds"], text)

    sides = {"ours": searching(options, mesh), "fairseq": search_fairseq}
    fairseq_worker("translate")  # a warm-up
    rates: dict[str, list[float]] = {"ours": [], "fairseq": []}
    text: dict[str, list[str]] = {}
    for number in range(max(options.rounds // 2, 3)):
        for name in ("ours", "fairseq") if number % 2 else ("fairseq", "ours"):
            translated = sides[name]()
            text[name] = translated.text
            rates[name].append(len(valid) / translated.seconds)
    table(f"beam search, beam {options.beam}", rates, "sentences/s", "fairseq")

    pairs = zip(text["ours"], text["fairseq"], strict=True)
    same = statistics.fmean(ours == theirs for ours, theirs in pairs)
    bleu = {}
    for name, lines in text.items():
        bleu[name] = BLEU().corpus_score(lines, [valid.references()]).score
    scores = ", ".join(f"{name} {score:.2f}" for name, score in bleu.items())
    print(f"\n{same:.1%} of the translations are the same; BLEU {scores}")
    return {"search": rates, "same": same, "bleu": bleu}


def main(options: Options) -> None:
    """Measures, prints two tables and writes the figures."""
    if not (FAIRSEQ / "python").exists():
        raise InputError("fairseq is not installed; `make fairseq` makes its environment")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["CPU_NUM_DEVICES"] = "1"
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["XLA_RNG_BIT_GENERATOR"] = FAST_RANDOM
    torch.set_num_threads(options.threads)
    mesh = device.setup(0, "float32", kind=options.device)
    folder = wmt.open_pairs(options.data, "valid").folder
    fairseq_worker = Worker(options, str(folder))

    figures: dict = {"options": vars(options)}
    if options.training:
        rates = compare_training(options, mesh, fairseq_worker)
        figures["training"] = rates
        table("training", rates, "target tokens/s", "fairseq")
    if options.model_dir:
        figures |= compare_search(options, mesh, fairseq_worker)
    fairseq_worker.process.kill()
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
