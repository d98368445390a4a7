"""Own text: `train.glue --text` against transformers' Trainer on the same CSV files.

rows      of a task of GLUE, written as train.csv and validation.csv with the names of the classes
ours      python -m train.glue full --data FOLDER --text … --label label; the command is printed
trainer   what transformers' run_classification.py does: `datasets` reads the files, the classes are
          the sorted names in training, Trainer fine-tunes, batches are padded to their longest
both      one core each, side by side; for each seed the same initial weights, head included (a new
          encoder of --size with a vocabulary learnt from the training text, written as a
          checkpoint; or --checkpoint with a new head); the same batch size, epochs, AdamW,
          schedule, clipping, greatest length and dropout; float32. The order of the data and
          dropout masks differ: compare means and spread
measured  accuracy and macro F1 on the validation file after the last step
run       pip install accelerate
          python -m bench.own_text --data /data/glue
"""

import csv
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import torch
import transformers
import tyro
from transformers import AutoTokenizer

from bench.glue_trainer import CLIP, prepare_environment, quiet, spread, trainer_of
from bench.transformer_fairseq import flags_of
from data import glue, vocabulary
from errors import InputError
from models import classification, encoder_files, encoders

METRICS = ("accuracy", "f1_macro", "loss")
# Tasks with classes; a regression has no names to find.
TASKS = tuple(name for name, task in glue.TASKS.items() if task.labels)


@dataclass(frozen=True)
class Options:
    data: str  # folder of GLUE's files
    task: Literal[TASKS] = "sst2"  # whose rows are written as CSV
    train_rows: int = 4000  # the first of the training split
    validation_rows: int = 1000  # the first of the validation split
    checkpoint: str = ""  # hub id or folder; "": new weights
    kind: Literal[vocabulary.KINDS] = "bert"  # architecture of new weights
    size: Literal[tuple(encoders.SIZES)] = "tiny"  # of new weights, see models/encoders
    vocabulary: int = 8000  # tokens of new weights
    lengths: tuple[int, ...] = (32, 64)  # our shapes; both sides cut at the last
    batch_size: int = 32  # examples per step
    epochs: float = 3  # passes over the training rows
    lr: float = 1e-3  # peak learning rate
    warmup: float = 0.1  # share of the steps in which it rises
    weight_decay: float = 0.01  # of AdamW
    device: Literal["xla", "cpu"] = "xla"  # of our side; cpu: plain PyTorch
    seeds: str = "0,1,2"  # one run of each side for every seed
    out: str = "runs/bench/own_text.json"  # where the figures go


def write_rows(options: Options, folder: str) -> None:
    """Writes train.csv and validation.csv with the columns of the task and "label"."""
    task = glue.TASKS[options.task]
    sizes = {"train": options.train_rows, task.evaluation[0]: options.validation_rows}
    for split, size in sizes.items():
        examples = glue.read(options.data, options.task, split)
        columns = [examples.first]
        if examples.second is not None:
            columns.append(examples.second)
        names = [task.labels[label] for label in examples.labels]
        rows = list(zip(*columns, names, strict=True))
        name = "train" if split == "train" else "validation"
        with open(f"{folder}/{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*task.columns, "label"])
            writer.writerows(rows[:size])


def prepare(options: Options, data: str, seed: int, folder: str) -> None:
    """Writes the classifier that both sides start from: configuration, tokenizer, weights."""
    source = None
    if options.checkpoint:
        opened = encoder_files.open_checkpoint(options.checkpoint, "auto")
        settings = opened.config
        tokenizer = opened.tokenizer
        source = opened.source
    else:
        with open(f"{data}/train.csv", newline="") as file:
            rows = list(csv.reader(file))[1:]
        text = []
        for *columns, _ in rows:
            text += columns
        tokenizer = vocabulary.learn(text, options.kind, options.vocabulary)
        settings = encoders.new_configuration(
            options.kind, options.size, tokenizer, options.lengths[-1]
        )

    labels = sorted(glue.TASKS[options.task].labels)
    transformers.set_seed(seed)  # of the head, or of all weights
    model = classification.classifier(settings, labels, source).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(options: Options, data: str, start: str, seed: int, folder: str) -> list[str]:
    """Returns the command of our side; the run is written to the "ours" of `folder`."""
    values = {
        "model": "auto",
        "data": data,
        "label": "label",
        "checkpoint": start,
        "batch-size": options.batch_size,
        "epochs": options.epochs,
        "lr": options.lr,
        "warmup": options.warmup,
        "weight-decay": options.weight_decay,
        "clip": CLIP,
        "best": "",  # the last weights, as Trainer's
        "precision": "float32",
        "device": options.device,
        "seed": seed,
        "workers": 0,
        "eval-every": 10**9,  # after the last step only
        "runs": folder,
        "name": "ours",
    }
    command = [sys.executable, "-m", "train.glue", "full"]
    command += ["--text", *glue.TASKS[options.task].columns]
    command += ["--lengths", *map(str, options.lengths)]
    return command + flags_of(values)


def theirs(
    options: Options, data: str, start: str, seed: int, folder: str, core: int
) -> dict[str, float]:
    """Trains with Trainer, in this process; returns the metrics, named as train.glue's."""
    from sklearn import metrics

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    quiet()
    files = {name: f"{data}/{name}.csv" for name in ("train", "validation")}
    raw = datasets.load_dataset("csv", data_files=files, cache_dir=f"{folder}/cache")
    names = sorted(set(raw["train"]["label"]))  # as run_classification.py finds them
    tokenizer = AutoTokenizer.from_pretrained(start)

    def tokenize(rows) -> dict:
        texts = [rows[column] for column in glue.TASKS[options.task].columns]
        encoded = tokenizer(*texts, truncation=True, max_length=options.lengths[-1])
        return {**encoded, "labels": [names.index(label) for label in rows["label"]]}

    tokenized = raw.map(tokenize, batched=True, remove_columns=raw["train"].column_names)

    def compute(prediction) -> dict[str, float]:
        found = np.asarray(prediction.predictions).argmax(1)
        return {
            "accuracy": metrics.accuracy_score(prediction.label_ids, found),
            "f1_macro": metrics.f1_score(prediction.label_ids, found, average="macro"),
        }

    trainer = trainer_of(options, start, tokenized, compute, seed, folder)
    trainer.train()
    evaluated = trainer.evaluate(tokenized["validation"])
    return {name: evaluated[f"eval_{name}"] for name in METRICS}


def run(options: Options, data: str, seed: int) -> dict[str, dict[str, float]]:
    """Runs both sides with one seed, each on a core of its own: {"ours" and "trainer": metrics}."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        start = f"{folder}/start"
        prepare(options, data, seed, start)
        command = ours(options, data, start, seed, folder)
        print(shlex.join(command), flush=True)
        log = Path(folder, "ours.log")
        with open(log, "w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]}),
            )
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                arguments = [options, data, start, seed, f"{folder}/trainer", cores[-1]]
                of_trainer = pool.submit(theirs, *arguments).result()
            if process.wait() != 0:
                last_lines = log.read_text().splitlines()[-15:]
                raise InputError("train.glue failed:\n" + "\n".join(last_lines))
        finally:
            process.kill()
        lines = log.read_text().splitlines()
        print(next(line for line in lines if " examples (" in line), flush=True)
        of_ours = json.loads(Path(folder, "ours/summary.json").read_text())["metrics"]
    return {"ours": of_ours, "trainer": of_trainer}


def standard_error(ours: list[float], theirs: list[float]) -> float:
    """Returns the standard error of the difference of two means."""
    if len(ours) < 2:
        return float("nan")
    variance = statistics.variance(ours) + statistics.variance(theirs)
    return (variance / len(ours)) ** 0.5


def main(options: Options) -> None:
    """Runs both sides for every seed, prints a table and writes the figures."""
    prepare_environment(threads=1)
    quiet()

    results: dict[str, list[dict[str, float]]] = {"ours": [], "trainer": []}
    with tempfile.TemporaryDirectory() as data:
        write_rows(options, data)
        for seed in map(int, options.seeds.split(",")):
            for side, metrics in run(options, data, seed).items():
                results[side].append(metrics)
                figures = ", ".join(f"{name} {metrics[name]:.4f}" for name in METRICS)
                print(f"seed {seed} {side}: {figures}", flush=True)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    record = {"options": asdict(options), "results": results}
    Path(options.out).write_text(json.dumps(record, indent=1))

    print(
        f"\n| {options.task}, mean ± sd (each seed) | ours | Trainer | difference, standard error |"
    )
    print("|---|---|---|---|")
    for name in METRICS:
        our_values = [metrics[name] for metrics in results["ours"]]
        their_values = [metrics[name] for metrics in results["trainer"]]
        difference = statistics.fmean(our_values) - statistics.fmean(their_values)
        error = standard_error(our_values, their_values)
        sides = f"{spread(our_values)} | {spread(their_values)}"
        print(f"| {name} | {sides} | {difference:+.4f}, {error:.4f} |")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
