"""GLUE: `train.glue` against transformers' Trainer on this CPU, by the same recipe.

ours      python -m train.glue full …, the command that is printed; a batch has the shortest of
          --lengths that holds its longest example (on plain PyTorch that example's own length)
trainer   transformers.Trainer, its own defaults where the recipe says nothing (fused AdamW, batches
          padded to their longest example by DataCollatorWithPadding)
both      one core each, side by side; for each seed the same initial weights, head included; the
          same examples, tokenizer, batch size, epochs and steps, AdamW (betas 0.9 and 0.999, no
          decay of biases and norms), linear schedule with warm-up, gradient clipping, greatest
          length, dropout of the configuration; float32. Batches are drawn at random, without regard
          to length; --group-by-length draws ours of like lengths. The order of the data and dropout
          masks differ: compare means and spread
measured  the task's metrics on the validation split after the last step
run       pip install accelerate
          python -m bench.glue_trainer --data FOLDER --task mrpc --checkpoint FOLDER
          python -m bench.glue_trainer --data FOLDER --task sst2 --size mini --lr 5e-4 \\
              --train-examples 8000

Without --checkpoint an encoder of --size starts from random weights, with a vocabulary learnt from
the training text.
"""

import importlib.util
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import transformers
import tyro
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from bench.transformer_fairseq import FAST_RANDOM, flags_of
from data import glue, vocabulary
from errors import InputError
from models import classification, encoder_files, encoders

ADAM_EPS = 1e-6  # train.glue's; Trainer's default is 1e-8
CLIP = 1.0  # largest norm of all gradients, Trainer's default; recipes of train.glue have others


@dataclass(frozen=True)
class Options:
    data: str  # folder of TSV files, hub id or folder of `datasets`
    task: Literal[tuple(glue.TASKS)] = "mrpc"  # of GLUE
    checkpoint: str = ""  # hub id, or folder with config, tokenizer; without weights: random
    kind: Literal[vocabulary.KINDS] = "bert"  # architecture without --checkpoint
    size: Literal[tuple(encoders.SIZES)] = "mini"  # without --checkpoint, see models/encoders
    vocabulary: int = 8000  # tokens learnt from the training text without --checkpoint
    train_examples: int = 0  # the first of the training split; 0: all
    lengths: tuple[int, ...] = (32, 64, 128)  # of our batches; both sides cut at the last
    batch_size: int = 32  # examples per step
    epochs: float = 3  # passes over the training examples
    lr: float = 2e-5  # peak learning rate
    warmup: float = 0.1  # share of the steps in which it rises
    weight_decay: float = 0.01  # of AdamW
    device: Literal["xla", "cpu"] = "xla"  # of our side; cpu: plain PyTorch
    group_by_length: bool = False  # on our side: batches of like length
    seeds: str = "0,1,2"  # one run of each side for every seed
    out: str = "runs/bench/glue_trainer.json"  # where the figures go


def prepare(options: Options, data: str, seed: int, folder: str) -> None:
    """Writes the classifier that both sides start from: configuration, tokenizer, weights."""
    given = options.checkpoint
    source = None
    if given:
        checkpoint = encoder_files.open_checkpoint(given, "auto")
        settings = checkpoint.config
        tokenizer = checkpoint.tokenizer
        source = checkpoint.source if has_weights(given) else None
    else:
        examples = glue.read(data, options.task, "train")
        text = [*examples.first, *(examples.second or [])]
        tokenizer = vocabulary.learn(text, options.kind, options.vocabulary)
        settings = encoders.new_configuration(
            options.kind, options.size, tokenizer, options.lengths[-1]
        )

    labels = glue.TASKS[options.task].labels
    transformers.set_seed(seed)  # of the head, or of all weights
    model = classification.classifier(settings, labels, source).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def has_weights(checkpoint: str) -> bool:
    """Tells whether a checkpoint has weights; one of the hub has."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return True
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def first_examples(options: Options, folder: str) -> str:
    """Returns the data that both sides read.

    That is --data, or `folder`, to which it writes as many training examples as asked for.
    """
    if not options.train_examples:
        return options.data

    task = glue.TASKS[options.task]
    for split in ("train", *task.evaluation):
        examples = glue.read(options.data, options.task, split)
        columns = dict(zip(task.columns, (examples.first, examples.second), strict=False))
        columns["label"] = examples.labels.tolist()
        count = options.train_examples if split == "train" else len(examples)
        if count > len(examples):
            raise InputError(f"--train-examples is {count}; the training split has {len(examples)}")
        cut = {name: values[:count] for name, values in columns.items()}
        datasets.Dataset.from_dict(cut).to_parquet(f"{folder}/{task.name}/{split}.parquet")
    return folder


def ours(options: Options, data: str, start: str, seed: int, folder: str) -> list[str]:
    """Returns the command of our side.

    Args:
        start: `prepare`'s folder.
        folder: the run is written to its "ours".
    """
    values = {
        "model": "auto",
        "task": options.task,
        "data": data,
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
    command += ["--lengths", *map(str, options.lengths)]
    if options.group_by_length:
        command.append("--group-by-length")
    return command + flags_of(values)


def make_trainer(
    options: Options,
    data: str,
    start: str,
    seed: int,
    folder: str,
    padding: bool | str = False,
    **settings,
) -> "transformers.Trainer":
    """Returns transformers' Trainer, ready to train; it writes to `folder`.

    Args:
        start: `prepare`'s folder.
        padding: of the tokenizer; "max_length" is run_glue's default, False leaves it to the batch.
        settings: further TrainingArguments.
    """
    quiet()
    tokenizer = AutoTokenizer.from_pretrained(start)
    sets = {}
    for split in ("train", *glue.TASKS[options.task].evaluation):
        examples = glue.read(data, options.task, split)
        columns = tokenizer(
            examples.first,
            examples.second,
            padding=padding,
            truncation="longest_first",
            max_length=options.lengths[-1],
        )
        labels = examples.labels.tolist()
        sets[split] = datasets.Dataset.from_dict({**columns, "labels": labels})

    def metrics(prediction) -> dict[str, float]:
        logits = np.asarray(prediction.predictions)
        is_regression = logits.shape[1] == 1
        found = logits[:, 0] if is_regression else logits.argmax(1)
        return glue.score(options.task, found, prediction.label_ids)

    return trainer_of(options, start, sets, metrics, seed, folder, **settings)


def trainer_of(
    options: Any,
    start: str,
    sets: dict[str, datasets.Dataset],
    metrics: Callable,
    seed: int,
    folder: str,
    **settings,
) -> "transformers.Trainer":
    """Returns transformers' Trainer of a classifier in the folder `start`, ready to train.

    Args:
        options: has batch_size, epochs, lr, warmup and weight_decay.
        sets: tokenized, with "labels"; "train" is trained on, and the others are evaluated.
        metrics: Trainer's compute_metrics.
        settings: further TrainingArguments.
    """
    # Here, where the environment says that they must not look for XLA.
    from transformers import PrinterCallback, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(start)
    sets = dict(sets)
    train_set = sets.pop("train")
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "num_train_epochs": options.epochs,
        "learning_rate": options.lr,
        "warmup_steps": options.warmup,  # below 1 it is a share
        "weight_decay": options.weight_decay,
        "adam_epsilon": ADAM_EPS,
        "max_grad_norm": CLIP,
        "seed": seed,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_steps": 100,
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32),
        TrainingArguments(**(arguments | settings)),
        train_dataset=train_set,
        eval_dataset=sets,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def theirs(
    options: Options, data: str, start: str, seed: int, folder: str, core: int
) -> dict[str, float]:
    """Trains with Trainer, in this process; returns the metrics, named as train.glue's."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    trainer = make_trainer(options, data, start, seed, folder)
    trainer.train()

    metrics = {}
    for split, examples in trainer.eval_dataset.items():
        prefix = "mismatched_" if split.endswith("mismatched") else ""
        found = trainer.evaluate(examples)
        for name in (*glue.TASKS[options.task].metrics, "loss"):
            metrics[prefix + name] = found[f"eval_{name}"]
    return metrics


def quiet() -> None:
    """Turns off progress bars, and the warning that a classifier's head is new."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def prepare_environment(threads: int) -> None:
    """Sets the environment of the processes that this one starts.

    Raises:
        InputError: Trainer cannot run.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise InputError(
            "accelerate is not installed, and transformers' Trainer needs it; "
            "`pip install accelerate`"
        )
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "CPU_NUM_DEVICES": "1",
        "PJRT_DEVICE": "CPU",
        "XLA_RNG_BIT_GENERATOR": FAST_RANDOM,  # as bench/transformer_fairseq.py says
        # Trainer would take XLA's device where torch_xla is installed. Ours does not ask.
        "USE_TORCH_XLA": "0",
    }


def run(options: Options, data: str, seed: int) -> dict[str, dict[str, float]]:
    """Runs both sides with one seed, each on a core of its own.

    Returns:
        {"ours" and "trainer": metrics}.
    """
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
                trained = pool.submit(
                    theirs, options, data, start, seed, f"{folder}/trainer", cores[-1]
                )
                of_trainer = trained.result()
            if process.wait() != 0:
                last_lines = log.read_text().splitlines()[-15:]
                raise InputError("train.glue failed:\n" + "\n".join(last_lines))
        finally:
            process.kill()
        of_ours = json.loads(Path(folder, "ours/summary.json").read_text())["metrics"]
    return {"ours": of_ours, "trainer": of_trainer}


def spread(values: list[float], form: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns mean ± standard deviation, and each value."""
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    each = ", ".join(map(form, values))
    return f"{form(statistics.fmean(values))} ± {form(deviation)} ({each})"


def main(options: Options) -> None:
    """Runs both sides for every seed, prints a table and writes the figures."""
    prepare_environment(threads=1)
    quiet()

    results: dict[str, list[dict[str, float]]] = {"ours": [], "trainer": []}
    with tempfile.TemporaryDirectory() as folder:
        data = first_examples(options, folder)
        for seed in map(int, options.seeds.split(",")):
            for side, metrics in run(options, data, seed).items():
                results[side].append(metrics)
                figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                print(f"seed {seed} {side}: {figures}", flush=True)
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            record = {"options": asdict(options), "results": results}
            Path(options.out).write_text(json.dumps(record, indent=1))

    columns = f"| {options.task}, mean ± sd (each seed) | ours | Trainer | difference |"
    print(f"\n{columns}\n|---|---|---|---|")
    for name in results["ours"][0]:
        our_values = [metrics[name] for metrics in results["ours"]]
        their_values = [metrics[name] for metrics in results["trainer"]]
        differences = [our - their for our, their in zip(our_values, their_values, strict=True)]
        signed = spread(differences, "{:+.4f}".format)
        print(f"| {name} | {spread(our_values)} | {spread(their_values)} | {signed} |")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
