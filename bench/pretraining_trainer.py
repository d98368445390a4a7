"""Masked-word pretraining: `train.pretrain` against transformers' Trainer on this CPU, one recipe.

ours      python -m train.pretrain full …, the command that is printed
trainer   transformers.Trainer with DataCollatorForLanguageModeling(mlm_probability=0.15) and a data
          set that reads the same rows, <cls> tokens <sep>; its own defaults where the recipe says
          nothing (fused AdamW, batches padded to their longest row, the language-model head on
          every position of a row)
model     a new BERT of --size
both      one core each, side by side; for each seed the same initial weights, which either side
          draws by `from_config` after torch.manual_seed; the same configuration with its dropout,
          batch size, number of updates, AdamW (betas, eps, no decay of biases and norms), linear
          schedule with warm-up, gradient clipping; float32. The order of the rows, masks and
          dropout differ, and Trainer's learning rate is one update behind: compare means and spread
measured  loss (nats) and accuracy of the masked tokens of the validation rows, of the weights that
          either side saved every --eval-every updates: by one function, on the CPU, with
          train.pretrain's masks, as many times anew as --draws says. Rows/s of the updates after
          the first, which compiles, without evaluation and saving; the sides run at the same time
          and share the machine's memory: the ratio is not of interleaved runs
random    numbers of dropout: XLA_RNG_BIT_GENERATOR=three_fry on our side, as
          bench/transformer_fairseq.py says
run       pip install accelerate
          make data DATASET=text DATA=TEXT OUT=FOLDER \\
              ARGS="--kind bert --length 128 --vocab-size 4000"
          python -m bench.pretraining_trainer --data FOLDER --size tiny --lr 3e-3 --updates 400
"""

import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.torch
import torch
import tyro
from transformers import AutoModelForMaskedLM, PreTrainedModel

from bench.glue_trainer import prepare_environment, quiet, spread
from bench.transformer_fairseq import flags_of
from data import pretraining, text
from data.pretraining import MaskedText
from errors import InputError
from models import encoders, objectives

SIDES = ("ours", "trainer")


@dataclass(frozen=True)
class Options:
    data: str  # folder that `make data DATASET=text` made with --kind bert
    size: Literal[tuple(encoders.SIZES)] = "mini"  # layers and width, see models/encoders
    updates: int = 400  # of the weights
    batch_size: int = 32  # rows per update
    lr: float = 1e-3  # peak learning rate; it falls linearly to 0
    warmup_updates: int = 40  # in which it rises
    eval_every: int = 50  # updates between the points of the curve
    draws: int = 4  # masks that each validation row is evaluated with
    seeds: str = "0,1,2"  # one run of each side for every seed
    out: str = "runs/bench/pretraining_trainer.json"  # where the figures go
    picture: str = ""  # PNG with the learning curves; "": none


class TrainerRows(torch.utils.data.Dataset):
    """The rows of a prepared folder as Trainer's collator wants them.

    A row is a list of ids, and a list that says which of them are special tokens.
    """

    def __init__(self, rows: text.Text):
        tokenizer = rows.tokenizer
        self.rows = rows
        self.cls = tokenizer.cls_token_id
        self.sep = tokenizer.sep_token_id
        self.special = np.zeros(len(tokenizer), np.int64)
        self.special[tokenizer.all_special_ids] = 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens, _ = self.rows.row(index)
        ids = np.concatenate([[self.cls], tokens, [self.sep]]).astype(np.int64)
        return {"input_ids": ids.tolist(), "special_tokens_mask": self.special[ids].tolist()}


def new_model(size: str, rows: text.Text) -> PreTrainedModel:
    """Makes the model that `train.pretrain --size` makes."""
    settings = encoders.new_configuration("bert", size, rows.tokenizer, rows.length)
    return AutoModelForMaskedLM.from_config(settings, dtype=torch.float32)


def ours(options: Options, seed: int, folder: str) -> list[str]:
    """Returns the command of our side; the run is written to `folder`/ours."""
    values = {
        "model": "bert",
        "size": options.size,
        "data": options.data,
        "batch-size": options.batch_size,
        "steps": options.updates,
        "lr": options.lr,
        "warmup-steps": options.warmup_updates,
        "precision": "float32",
        "seed": seed,
        "workers": 0,
        "log-every": options.eval_every,
        "eval-every": options.eval_every,
        "keep": options.updates,
        "runs": folder,
        "name": "ours",
    }
    return [sys.executable, "-m", "train.pretrain", "full", *flags_of(values)]


def trainer_settings(options: Options) -> dict[str, float]:
    """Returns the recipe as TrainingArguments."""
    # Here, so that Trainer's process does without torch_xla.
    from train.pretrain import ADAM_EPS

    recipe = encoders.by_name("bert").pretraining
    return {
        "max_steps": options.updates,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.lr,
        "warmup_steps": options.warmup_updates,
        "weight_decay": recipe.weight_decay,
        "adam_beta2": recipe.beta2,
        "adam_epsilon": ADAM_EPS,
        "max_grad_norm": recipe.clip,
        "save_steps": options.eval_every,
    }


def train_trainer(
    options: Options, settings: dict[str, float], seed: int, folder: str, core: int
) -> None:
    """Trains with Trainer, in this process and on one core.

    Writes checkpoints to `folder`, and rows/s to `folder`/rate.json.
    """
    from transformers import (
        DataCollatorForLanguageModeling,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Clock(TrainerCallback):
        """Collects the seconds of each update, with its input and without saving."""

        def __init__(self):
            self.seconds = []
            self.before = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.before)
            self.before = time.perf_counter()

        def on_save(self, *_, **__):
            self.before = time.perf_counter()

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    quiet()

    rows = text.open_text(options.data, "train")
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "seed": seed,
        "lr_scheduler_type": "linear",
        "dataloader_drop_last": True,  # as ours; a batch of a few rows would count as a whole one
        "dataloader_pin_memory": False,
        "save_strategy": "steps",
        "save_only_model": True,
        "logging_steps": options.eval_every,
        "report_to": "none",
        "disable_tqdm": True,
    }
    set_seed(seed)
    clock = Clock()
    trainer = Trainer(
        new_model(options.size, rows),
        TrainingArguments(**arguments, **settings),
        train_dataset=TrainerRows(rows),
        data_collator=DataCollatorForLanguageModeling(rows.tokenizer, mlm_probability=0.15),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    after_the_first = clock.seconds[1:]
    rate = options.batch_size * len(after_the_first) / sum(after_the_first)
    Path(folder, "rate.json").write_text(json.dumps(rate))


def saved(folder: str, rows: text.Text, size: str) -> dict[str, dict[int, PreTrainedModel]]:
    """Returns the models that both sides saved, by side and number of updates.

    Ours come from checkpoints, but the last one comes from the export.
    """
    ours: dict[int, PreTrainedModel] = {}
    for path in sorted(Path(folder, "ours/checkpoints").glob("step_*/state.safetensors")):
        weights = safetensors.torch.load_file(path)
        model = new_model(size, rows)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.data.copy_(weights[f"model.{name}"])
        updates = int(path.parent.name.removeprefix("step_"))
        ours[updates] = model
    ours[max(ours)] = AutoModelForMaskedLM.from_pretrained(f"{folder}/ours/export")

    trainer: dict[int, PreTrainedModel] = {}
    for path in Path(folder, "trainer").glob("checkpoint-*"):
        updates = int(path.name.removeprefix("checkpoint-"))
        trainer[updates] = AutoModelForMaskedLM.from_pretrained(path)
    return {"ours": ours, "trainer": trainer}


def evaluate(
    model: PreTrainedModel, rows: MaskedText, batch_size: int, draws: int
) -> dict[str, float]:
    """Returns "loss" (nats) and "accuracy", means over the predicted tokens."""
    model.eval()
    totals: dict[str, float] = {}
    for draw in range(draws):
        for first in range(0, len(rows), batch_size):
            indices = range(first, min(first + batch_size, len(rows)))
            # Draw s has the masks of train.pretrain's own evaluation with --seed s.
            examples = []
            for index in indices:
                examples.append(rows.example(index, np.random.default_rng((draw, 0, index))))
            batch = {}
            for name in examples[0]:
                batch[name] = torch.from_numpy(np.stack([example[name] for example in examples]))
            batch["mask"] = torch.ones(len(examples))
            with torch.inference_mode():
                sums = objectives.scores(model, batch)
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
    return {name: totals[name] / totals["predicted"] for name in ("loss", "accuracy")}


def wait(
    ours: subprocess.Popen, trainer: multiprocessing.process.BaseProcess, log: Path
) -> dict[str, float]:
    """Waits for both sides; returns the seconds until each was done.

    Raises:
        InputError: as soon as one fails.
    """
    began = time.perf_counter()
    seconds = {}
    while len(seconds) < len(SIDES):
        time.sleep(0.1)
        codes = {"ours": ours.poll(), "trainer": trainer.exitcode}
        if codes["ours"]:
            last_lines = log.read_text().splitlines()[-15:]
            raise InputError("train.pretrain failed:\n" + "\n".join(last_lines))
        if codes["trainer"]:
            raise InputError(
                f"Trainer failed with exit code {codes['trainer']}; its error is above"
            )
        for side, code in codes.items():
            if code == 0 and side not in seconds:
                seconds[side] = time.perf_counter() - began
    return seconds


def our_rate(folder: str, batch_size: int) -> float:
    """Returns rows/s between the first update and the last, from the run's record."""
    of_training = []
    for text_line in Path(folder, "ours/metrics.jsonl").read_text().splitlines():
        line = json.loads(text_line)
        if "loss" in line:  # otherwise of an evaluation
            of_training.append(line)
    first = of_training[0]
    last = of_training[-1]
    seconds = last["timing"]["training"] - first["timing"]["training"]
    return batch_size * (last["step"] - first["step"]) / seconds


def run(
    options: Options, settings: dict[str, float], seed: int, valid: MaskedText
) -> dict[str, dict]:
    """Runs both sides with one seed.

    Returns:
        By side {"curve": [[updates, loss, accuracy]], "rate": rows/s, "seconds"}.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        command = ours(options, seed, folder)
        log = Path(folder, "ours.log")
        print(shlex.join(command), flush=True)
        with open(log, "w") as file:
            ours_process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]}),
            )
        arguments = (options, settings, seed, f"{folder}/trainer", cores[-1])
        spawn = multiprocessing.get_context("spawn")
        trainer = spawn.Process(target=train_trainer, args=arguments)
        trainer.start()
        try:
            seconds = wait(ours_process, trainer, log)
        finally:
            ours_process.kill()
            trainer.kill()
            ours_process.wait()
            trainer.join()

        rates = {
            "ours": our_rate(folder, options.batch_size),
            "trainer": json.loads(Path(folder, "trainer/rate.json").read_text()),
        }
        result = {}
        for side, models in saved(folder, valid.text, options.size).items():
            curve = []
            for updates in sorted(models):
                score = evaluate(models[updates], valid, options.batch_size, options.draws)
                curve.append([updates, score["loss"], score["accuracy"]])
            result[side] = {"curve": curve, "rate": rates[side], "seconds": seconds[side]}

    of_ours, of_trainer = ([point[0] for point in result[side]["curve"]] for side in SIDES)
    if of_ours != of_trainer:
        raise RuntimeError(
            f"the sides saved after different numbers of updates: {of_ours} and {of_trainer}"
        )
    return result


def row(label: str, values: dict[str, list[float]], form: str, ratio: bool = False) -> str:
    """Returns a row of the table.

    Args:
        values: of each side, one per run.
        form: of a value.
        ratio: the last column has ours divided by Trainer's; otherwise ours minus Trainer's.
    """
    compared = []
    for our, their in zip(values["ours"], values["trainer"], strict=True):
        compared.append(our / their if ratio else our - their)

    value_form = f"{{:{form}}}"
    compared_form = "{:.2f}x" if ratio else f"{{:+{form}}}"
    cells = [label]
    cells += [spread(values[side], value_form.format) for side in SIDES]
    cells.append(spread(compared, compared_form.format))
    return f"| {' | '.join(cells)} |"


def table(results: dict[str, list[dict]]) -> str:
    """Returns Markdown: mean ± standard deviation over the seeds."""
    lines = [
        "| mean ± sd (each seed) | ours | Trainer | difference or ratio |",
        "|---|---|---|---|",
    ]
    for number, (updates, *_) in enumerate(results["ours"][0]["curve"]):
        losses = {}
        for side, runs in results.items():
            losses[side] = [result["curve"][number][1] for result in runs]
        lines.append(row(f"loss after {updates} updates", losses, ".3f"))

    accuracies = {}
    seconds = {}
    rates = {}
    for side, runs in results.items():
        accuracies[side] = [result["curve"][-1][2] for result in runs]
        seconds[side] = [result["seconds"] for result in runs]
        rates[side] = [result["rate"] for result in runs]
    lines.append(row("accuracy after the last", accuracies, ".4f"))
    lines.append(row("whole command, s", seconds, ".0f"))
    lines.append(row("rows/s (not interleaved)", rates, ".1f", ratio=True))
    return "\n".join(lines)


def draw(results: dict[str, list[dict]], path: str) -> None:
    """Draws the loss on the validation rows against updates, one line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="validation loss of masked tokens, nats")
    for (name, runs), colour in zip(results.items(), ("tab:blue", "tab:orange"), strict=True):
        for number, result in enumerate(runs):
            updates, losses, _ = zip(*result["curve"], strict=True)
            label = name if number == 0 else None  # one entry per side in the legend
            axes.plot(updates, losses, color=colour, alpha=0.8, label=label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def main(options: Options) -> None:
    """Runs both sides for every seed, prints a table and writes the figures."""
    prepare_environment(threads=1)
    quiet()

    for name in ("updates", "batch_size", "eval_every", "draws"):
        value = getattr(options, name)
        if value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.updates < 2:
        raise InputError("--updates is 1; it must be at least 2, since the first is not timed")

    masks = ("bert", 0, False, False, (0, 0))  # as train/pretrain.py has them by default
    train = pretraining.open_rows(options.data, "train", *masks)
    valid = pretraining.open_rows(options.data, "valid", *masks)
    print(f"{len(train):,} rows of {train.length} tokens, {len(valid)} for validation", flush=True)

    settings = trainer_settings(options)
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    for seed in map(int, options.seeds.split(",")):
        for side, result in run(options, settings, seed, valid).items():
            results[side].append(result)
            _, loss, accuracy = result["curve"][-1]
            print(
                f"seed {seed} {side}: loss {loss:.3f}, accuracy {accuracy:.4f}, "
                f"{result['rate']:.1f} rows/s, {result['seconds']:.0f} s",
                flush=True,
            )
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        record = {"options": asdict(options), "results": results}
        Path(options.out).write_text(json.dumps(record, indent=1))
    print("\n" + table(results))
    if options.picture:
        draw(results, options.picture)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
