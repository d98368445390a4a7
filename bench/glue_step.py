"""Speed of fine-tuning on a GLUE task on this CPU: `train.glue` against transformers' Trainer.

ours      train.glue's step with its loader, with batches drawn at random and with
          --group-by-length: compiled for one XLA CPU device, where batches are padded to one of
          --lengths, or on plain PyTorch (--device cpu)
trainer   transformers.Trainer as it is (fused AdamW, its own loop and loader), three times: every
          example padded to the greatest length, as run_glue does by default (pad_to_max_length);
          padded to the longest of its batch by DataCollatorWithPadding; the same with batches of
          like length (train_sampling_strategy="group_by_length")
how       the same initial weights, examples, tokenizer, batch size, dropout (attention's included),
          AdamW, gradient clipping, greatest length; float32; the same cores. One process per side,
          of which one works at a time: blocks of steps in rotating order; ratios within a round,
          and of all rounds together
clock     the wall's; with --threads 1 the process's CPU time, which other work on the machine does
          not stretch
units     training examples a second; real tokens a second, special tokens counted, padding not
random    dropout on XLA: XLA_RNG_BIT_GENERATOR=three_fry (torch_xla's default on a CPU draws 20
          times slower; a TPU has a generator of its own)
run       pip install accelerate
          python -m bench.glue_step --data FOLDER --task mrpc
          python -m bench.glue_step --data FOLDER --task mrpc --device cpu --checkpoint FOLDER

Run it on a machine that does nothing else. All sides meet the lengths at random, but Trainer's
grouped one from long to short within 50 batches: let --rounds x --block be a whole epoch, and
compare all rounds together.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch
import tyro

from bench import glue_trainer
from data import glue, vocabulary
from errors import InputError
from models import encoders


@dataclass(frozen=True)
class TrainerSide:
    """How one of Trainer's sides makes batches."""

    padding: str | bool  # of the tokenizer; False leaves it to the batch
    grouped: bool  # whether a batch has examples of like length


TRAINERS = {
    "Trainer, padded to the greatest length": TrainerSide(padding="max_length", grouped=False),
    "Trainer, padded to the batch's longest": TrainerSide(padding=False, grouped=False),
    "Trainer, batches grouped by length": TrainerSide(padding=False, grouped=True),
}
OURS = {"ours": False, "ours, --group-by-length": True}  # name: whether batches are grouped
SEED = 0
STEPS = 10**6  # of a training that does not end by itself


@dataclass(frozen=True)
class Options:
    data: str  # folder of TSV files, hub id or folder of `datasets`
    task: Literal[tuple(glue.TASKS)] = "mrpc"  # of GLUE
    checkpoint: str = ""  # hub id, or folder with configuration and tokenizer
    kind: Literal[vocabulary.KINDS] = "bert"  # architecture without --checkpoint
    size: Literal[tuple(encoders.SIZES)] = "mini"  # without --checkpoint, see models/encoders
    vocabulary: int = 8000  # tokens learnt from the training text without --checkpoint
    device: Literal["xla", "cpu"] = "xla"  # of our sides
    lengths: tuple[int, ...] = (32, 64, 128)  # of our batches on XLA; all sides cut at the last
    batch_size: int = 32  # examples per step
    threads: int = 2  # cores of each side
    block: int = 16  # steps between two readings of the clock
    rounds: int = 8  # counted blocks of each side
    only_grouped: bool = False  # leave out the sides whose batches are drawn at random
    out: str = "runs/bench/glue_step.json"  # where the figures go

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds from an arbitrary start."""
        return time.process_time if self.threads == 1 else time.perf_counter


@dataclass
class Block:
    """What a side has done in a block of steps."""

    seconds: float = 0.0
    examples: int = 0
    tokens: int = 0  # without padding
    places: int = 0  # with padding

    def __add__(self, other: "Block") -> "Block":
        return Block(
            seconds=self.seconds + other.seconds,
            examples=self.examples + other.examples,
            tokens=self.tokens + other.tokens,
            places=self.places + other.places,
        )


def ours(options: Options, start: str, grouped: bool, mesh) -> Callable[[int], Block]:
    """Returns a function that makes n steps. On XLA every shape is compiled beforehand.

    Args:
        start: the folder with the classifier to start from.
        grouped: whether batches have examples of like length.
    """
    # Not above: the other sides' processes import this file, and have no use for XLA.
    from train import glue as script
    from train.common import device, loading

    config = replace(
        script.Config(),
        model="auto",
        task=options.task,
        data=options.data,
        checkpoint=start,
        lengths=options.lengths,
        group_by_length=grouped,
        batch_size=options.batch_size,
        precision="float32",
        workers=0,
    )
    config = script.validate(config)
    data = script.open_data(config)
    train_set = data.train
    plan = script.batch_plan(config, train_set, mesh, train=True)
    state = script.build(config, data, mesh)
    state.model.train()
    step_fn = device.compiled(script.train_step, mesh, len(plan.shapes))

    # No learning: the weights stay sound however many steps are made.
    device.set_lr(state.optimizer, 0.0)
    if options.device == "xla":
        compiled = set()
        with loading.parallel_loader(train_set, plan, mesh, train=False) as loader:
            for batch in loader:
                shape = batch["input_ids"].shape
                if shape not in compiled:
                    compiled.add(shape)
                    step_fn(state, batch, config, mesh)

    loader = loading.parallel_loader(train_set, plan, mesh, train=True, seed=SEED, stop=STEPS)
    clock = options.clock
    steps_made = 0

    def run(steps: int) -> Block:
        nonlocal steps_made
        batches = []
        started = clock()
        for _ in range(steps):
            steps_made += 1
            batch = next(loader)
            batches.append(batch)
            device.seed_step(SEED, steps_made)
            device.set_lr(state.optimizer, script.learning_rate(config, steps_made, STEPS))
            metrics = step_fn(state, batch, config, mesh)
        device.fetch([metrics["loss"]])
        block = Block(seconds=clock() - started)

        for batch in batches:
            block.examples += int(batch["mask"].cpu().sum())
            block.tokens += int(batch["attention_mask"].cpu().sum())
            block.places += batch["input_ids"].numel()
        return block

    return run


def serve(
    options: Options, recipe: glue_trainer.Options, start: str, name: str, pipe: Connection
) -> None:
    """Trains with Trainer in a process of its own, a block at a time.

    Receives from `pipe` how many steps to make, and answers with a Block; None ends it.
    """
    from transformers import TrainerCallback

    torch.set_num_threads(options.threads)
    clock = options.clock
    block = Block()
    steps_left = 0
    started = 0.0

    class Clock(TrainerCallback):
        """Holds the training between blocks."""

        def on_train_begin(self, args, state, control, **_):
            wait(control)

        def on_step_end(self, args, state, control, **_):
            nonlocal steps_left
            steps_left -= 1
            if steps_left == 0:
                block.seconds = clock() - started
                pipe.send(block)
                wait(control)

    def wait(control) -> None:
        nonlocal block, steps_left, started
        command = pipe.recv()
        if command is None:
            control.should_training_stop = True
            return
        block = Block()
        steps_left = command
        started = clock()

    def count(_, args, inputs) -> None:
        block.examples += len(inputs["input_ids"])
        block.tokens += int(inputs["attention_mask"].sum())
        block.places += inputs["input_ids"].numel()

    side = TRAINERS[name]
    settings = {"max_steps": STEPS}
    if side.grouped:
        settings["train_sampling_strategy"] = "group_by_length"
    with tempfile.TemporaryDirectory() as folder:
        trainer = glue_trainer.make_trainer(
            recipe, options.data, start, SEED, folder, side.padding, **settings
        )
        trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.add_callback(Clock())
        trainer.train()


class Worker:
    """A process that serves."""

    def __init__(self, *args):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(*args, other), daemon=True)
        self.process.start()
        other.close()

    def __call__(self, steps: int) -> Block:
        """Makes steps. Raises InputError if the process has ended."""
        try:
            self.pipe.send(steps)
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise InputError("Trainer's process has ended; its message is above") from error


def table(rounds: dict[str, list[Block]]) -> None:
    """Prints rates, and ours as a multiple of each other side's in real tokens a second.

    The multiples are of all rounds together.
    """
    totals = {name: sum(blocks, Block()) for name, blocks in rounds.items()}
    token_rates = {name: total.tokens / total.seconds for name, total in totals.items()}
    ours = [name for name in OURS if name in rounds]

    ratios = " | ".join(f"{name} / this" for name in ours)
    print(f"\n| | real tokens/s | examples/s, median round (min to max) | padding | {ratios} |")
    print(f"|{'---|' * (4 + len(ours))}")
    for name, blocks in rounds.items():
        total = totals[name]
        examples = sorted(block.examples / block.seconds for block in blocks)
        median = statistics.median(examples)
        row = [
            name,
            f"{token_rates[name]:,.0f}",
            f"{median:,.0f} ({examples[0]:,.0f} to {examples[-1]:,.0f})",
            f"{1 - total.tokens / total.places:.0%}",
        ]
        for our in ours:
            row.append(f"{token_rates[our] / token_rates[name]:.2f}")
        print(f"| {' | '.join(row)} |")


def recipe_of(options: Options) -> glue_trainer.Options:
    """Returns the options of bench.glue_trainer, with the values of those that are shared."""
    shared = {}
    for name, value in asdict(options).items():
        if name in glue_trainer.Options.__dataclass_fields__:
            shared[name] = value
    return glue_trainer.Options(**shared)


def measure(options: Options) -> dict[str, list[Block]]:
    """Times blocks of each side, in rotating order; returns those of the counted rounds."""
    recipe = recipe_of(options)
    with tempfile.TemporaryDirectory() as start:
        glue_trainer.prepare(recipe, options.data, SEED, start)
        from train.common import device

        mesh = device.setup(SEED, "float32", kind=options.device)
        torch.set_num_threads(options.threads)
        sides: dict[str, Callable[[int], Block]] = {}
        for name, grouped in OURS.items():
            if grouped or not options.only_grouped:
                sides[name] = ours(options, start, grouped, mesh)
        for name, side in TRAINERS.items():
            if side.grouped or not options.only_grouped:
                sides[name] = Worker(options, recipe, start, name)

        rounds: dict[str, list[Block]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(-1, options.rounds):  # the first is a warm-up
            first = number % len(names)
            for name in names[first:] + names[:first]:
                block = sides[name](options.block)
                if number >= 0:
                    rounds[name].append(block)
            latest = {}
            for name, blocks in rounds.items():
                if blocks:
                    latest[name] = f"{blocks[-1].seconds:.1f} s"
            print(f"round {number + 1} of {options.rounds}: {latest or 'warm-up'}", flush=True)

        for side in sides.values():
            if isinstance(side, Worker):
                side.process.kill()
    return rounds


def main(options: Options) -> None:
    """Measures, prints a table and writes the figures."""
    glue_trainer.prepare_environment(options.threads)
    glue_trainer.quiet()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: options.threads])

    rounds = measure(options)
    table(rounds)

    figures = {}
    for name, blocks in rounds.items():
        figures[name] = [vars(block) for block in blocks]
    record = {"options": asdict(options), "rounds": figures}
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
