"""DLRM on a click log: `train.dlrm` against torchrec's DLRM on the CPU, trained by the same recipe.

ours      python -m train.dlrm tiny …, the command that is printed
torchrec  its EmbeddingBagCollection and DLRM or DLRM_DCN, float32, with the initial distributions
          of ours: tables uniform within rows^-0.5, the network's as in models/dlrm.py
both      torch's (and torchrec's) optimizers, the same epochs, batches, learning rate and order of
          the data: seed and epoch give the permutation, and the remainder of an epoch is left out.
          The initial weights are other ones: compare medians, not seeds
measured  AUC and log loss of the whole evaluation split (scikit-learn) after each epoch; the table
          has the last
run       python -m bench.dlrm_torchrec --data FOLDER --epochs 3 --batch-size 128 --lr 0.1
          --bottom 512,256,64,16 --top 512,256,1 --optimizer sgd --seeds 0,1,2
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn

from errors import InputError
from models.dlrm import DLRM
from train.dlrm import ADAGRAD_EPS, Config, learning_rate, open_data, validate

# Flags with one value that our command takes from the configuration.
SHARED = (
    "data",
    "epochs",
    "batch_size",
    "lr",
    "warmup_steps",
    "interaction",
    "optimizer",
    "plan",
    "seed",
)


@dataclass(frozen=True)
class Options:
    data: str  # what `train.dlrm --data` takes: a folder of prepared clicks, MovieLens, "synthetic"
    epochs: int = 1  # passes over the training data
    batch_size: int = 128  # examples per step
    lr: float = 0.1  # peak learning rate, of tables and network
    warmup_steps: int = 0  # linear from 0; constant after it
    bottom: str = "512,256,64,16"  # layers over the dense features; the last is a table's columns
    top: str = "512,256,1"  # layers over the interactions
    interaction: Literal["dot", "dcn"] = "dot"  # torchrec's DLRM or DLRM_DCN
    cross: str = "3,512"  # layers and rank of the cross net of "dcn"
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = "sgd"  # of the tables
    plan: Literal["auto", "exchange", "data"] = "auto"  # of our tables
    seeds: str = "0,1,2"  # one run of each side for every seed
    ours: bool = True  # --no-ours: torchrec alone
    out: str = "runs/bench/dlrm_torchrec.json"  # where the figures go


def integers(option: str, text: str) -> tuple[int, ...]:
    """Returns (512, 256) for "512,256". Raises InputError."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InputError(
            f"--{option} is {text!r}; expected whole numbers with commas, such as 512,256"
        ) from None


def build(config: Config, dataset) -> nn.Module:
    """Returns torchrec's model with initial weights from the seed."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models import dlrm

    torch.manual_seed(config.seed)
    names = [f"t_{feature}" for feature in dataset.features]
    tables = []
    for name, rows, feature in zip(names, dataset.table_rows, dataset.features, strict=True):
        table = EmbeddingBagConfig(
            name=name, embedding_dim=config.dim, num_embeddings=rows, feature_names=[feature]
        )
        tables.append(table)
    bags = EmbeddingBagCollection(tables=tables)
    for name, rows in zip(names, dataset.table_rows, strict=True):
        bag = bags.embedding_bags[name]
        bound = rows**-0.5
        nn.init.uniform_(bag.weight, -bound, bound)
        # Row-wise Adagrad takes dense gradients only. With the other rules they would give the same
        # numbers, but each step would pass over the whole table.
        bag.sparse = config.optimizer != "rowwise_adagrad"

    sizes = [dataset.num_dense, list(config.bottom), list(config.top)]
    if config.interaction == "dot":
        model = dlrm.DLRM(bags, *sizes)
    else:
        model = dlrm.DLRM_DCN(bags, *sizes, *config.cross)
    network = DLRM(
        dataset.num_dense,
        len(names),
        config.dim,
        config.bottom,
        config.top,
        config.interaction,
        *config.cross,
    )
    model.load_state_dict({**model.state_dict(), **network.state_dict()})
    return model


def optimizers(model: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """Returns one for the tables and one for the network."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables = list(model.sparse_arch.parameters())
    network = [
        *model.dense_arch.parameters(),
        *model.inter_arch.parameters(),
        *model.over_arch.parameters(),
    ]
    if config.optimizer == "sgd":
        return [torch.optim.SGD(tables, config.lr), torch.optim.SGD(network, config.lr)]
    if config.optimizer == "lazy_adam":
        return [torch.optim.SparseAdam(tables, config.lr), torch.optim.Adam(network, config.lr)]

    adagrad = torch.optim.Adagrad
    of_tables = RowWiseAdagrad if config.optimizer == "rowwise_adagrad" else adagrad
    return [
        of_tables(tables, config.lr, eps=ADAGRAD_EPS),
        adagrad(network, config.lr, eps=ADAGRAD_EPS),
    ]


def keyed(batch: dict[str, np.ndarray], dataset):
    """Returns the ids of a batch as torchrec wants them.

    They stand feature after feature, and in each example after example, without the padding.
    """
    from torchrec import KeyedJaggedTensor

    ids = batch["ids"]
    present = batch.get("present", np.ones(ids.shape, np.float32)) > 0
    ends = np.cumsum(dataset.lookups)
    values = []
    lengths = []
    for columns in np.split(np.arange(ends[-1]), ends[:-1]):
        values.append(ids[:, columns][present[:, columns]])
        lengths.append(present[:, columns].sum(1))

    return KeyedJaggedTensor(
        keys=list(dataset.features),
        values=torch.from_numpy(np.concatenate(values).astype(np.int64)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int64)),
    )


def evaluate(model: nn.Module, dataset, batch_size: int = 16_384) -> dict[str, float]:
    """Returns "auc" and "loss", the log loss (nats), over every example of `dataset`."""
    from sklearn.metrics import log_loss, roc_auc_score

    scores = []
    labels = []
    with torch.no_grad():
        for first in range(0, len(dataset), batch_size):
            batch = dataset.batch(np.arange(first, min(first + batch_size, len(dataset))))
            dense = torch.from_numpy(batch["dense"])
            logits = model(dense, keyed(batch, dataset)).squeeze(-1)
            scores.append(torch.sigmoid(logits.double()).numpy())
            labels.append(batch["label"])
    scores = np.concatenate(scores)
    labels = np.concatenate(labels)
    return {"auc": float(roc_auc_score(labels, scores)), "loss": float(log_loss(labels, scores))}


def train(config: Config) -> dict:
    """Trains torchrec's model with one seed.

    Returns:
        {"seed", "steps", "seconds": of training, "epochs": the figures of each}.
    """
    from torchrec.datasets.utils import Batch
    from torchrec.models.dlrm import DLRMTrain

    train_set, eval_set = open_data(config)
    per_epoch = len(train_set) // config.batch_size
    model = DLRMTrain(build(config, train_set))
    both = optimizers(model.model, config)
    epochs = []
    step = 0
    seconds = 0.0
    for epoch in range(config.epochs):
        started = time.perf_counter()
        losses = []
        order = np.random.default_rng((config.seed, epoch)).permutation(len(train_set))
        for indices in np.split(order[: per_epoch * config.batch_size], per_epoch):
            batch = train_set.batch(indices)
            for optimizer in both:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, step)

            dense = torch.from_numpy(batch["dense"])
            labels = torch.from_numpy(batch["label"])
            loss, _ = model(Batch(dense, keyed(batch, train_set), labels))
            loss.backward()
            for optimizer in both:
                optimizer.step()
            losses.append(loss.item())
            step += 1
        seconds += time.perf_counter() - started

        figures = {"training_loss": statistics.fmean(losses), **evaluate(model.model, eval_set)}
        epochs.append({"epoch": epoch + 1, **figures})
        printed = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(f"torchrec, seed {config.seed}: epoch {epoch + 1}, {printed}", flush=True)
    return {"seed": config.seed, "steps": step, "seconds": seconds, "epochs": epochs}


def train_ours(config: Config) -> dict:
    """Trains with one seed by `train.dlrm`, in a process of its own.

    Returns:
        {"seed", "seconds": of training, "epochs": "auc" and "loss" of each}.
    """
    flags = []
    for name in SHARED:
        flags.append(f"--{name.replace('_', '-')}={getattr(config, name)}")
    for name in ("bottom", "top", "cross"):
        flags += [f"--{name}", *map(str, getattr(config, name))]

    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "train.dlrm", "tiny", *flags]
        print("$", shlex.join(["python", *command[1:]]), flush=True)
        command += ["--runs", runs, "--name", "run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        metrics = Path(runs, "run/metrics.jsonl").read_text().splitlines()
        summary = json.loads(Path(runs, "run/summary.json").read_text())

    epochs = []
    for line in map(json.loads, metrics):
        if "eval/auc" in line:
            epochs.append({"auc": line["eval/auc"], "loss": line["eval/loss"]})
    aucs = ", ".join(f"{epoch['auc']:.4f}" for epoch in epochs)
    print(f"ours, seed {config.seed}: AUC after each epoch {aucs}", flush=True)
    return {"seed": config.seed, "seconds": summary["training_seconds"], "epochs": epochs}


def table(runs: list[dict]) -> str:
    """Returns Markdown: AUC and log loss after the last epoch, and seconds of training.

    It has a row for each seed, and their median, min and max.
    """
    lines = ["| seed | AUC | log loss | seconds |", "|---|---|---|---|"]
    aucs = [run["epochs"][-1]["auc"] for run in runs]
    losses = [run["epochs"][-1]["loss"] for run in runs]
    durations = [run["seconds"] for run in runs]

    def add(name: str | int, auc: float, loss: float, seconds: float) -> None:
        lines.append(f"| {name} | {auc:.4f} | {loss:.4f} | {seconds:.1f} |")

    for run, *figures in zip(runs, aucs, losses, durations, strict=True):
        add(run["seed"], *figures)
    summaries: dict[str, Callable] = {"median": statistics.median, "min": min, "max": max}
    for name, summary in summaries.items():
        add(name, summary(aucs), summary(losses), summary(durations))
    return "\n".join(lines)


def main(options: Options) -> dict[str, list[dict]]:
    """Runs all seeds, prints the tables and writes --out.

    Returns:
        The figures of each run of each side.
    """
    runs: dict[str, list[dict]] = {"torchrec": []}
    if options.ours:
        runs["ours"] = []
    for seed in integers("seeds", options.seeds):
        config = Config(
            data=options.data,
            epochs=options.epochs,
            batch_size=options.batch_size,
            lr=options.lr,
            warmup_steps=options.warmup_steps,
            interaction=options.interaction,
            optimizer=options.optimizer,
            plan=options.plan,
            bottom=integers("bottom", options.bottom),
            top=integers("top", options.top),
            cross=integers("cross", options.cross),
            seed=seed,
        )
        config = validate(config)
        if options.ours:
            runs["ours"].append(train_ours(config))
        runs["torchrec"].append(train(config))

    for name, of_side in runs.items():
        print(f"\n{name}\n\n{table(of_side)}")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    record = {"options": vars(options), **runs}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    return runs


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
