"""DLRM on a click log: `train.dlrm` against torchrec's DLRM on the CPU, trained by the same recipe.

ours      python -m train.dlrm tiny …, the command that is printed
torchrec  its EmbeddingBagCollection and DLRM or DLRM_DCN, float32, with the initial distributions of ours: tables
          uniform within rows^-0.5, the network's as in models/dlrm.py
both      torch's (and torchrec's) optimizers, the same epochs, batches, learning rate and order of the data: seed
          and epoch give the permutation, and the remainder of an epoch is left out. The initial weights are other
          ones: compare medians, not seeds
measured  AUC and log loss of the whole evaluation split (scikit-learn) after each epoch; the table has the last
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


@dataclass(frozen=True)
class Options:
    data: str  # what `train.dlrm --data` takes: a folder of prepared clicks, MovieLens, or "synthetic"
    epochs: int = 1  # passes over the training data
    batch_size: int = 128  # examples a step
    lr: float = 0.1  # peak learning rate, of tables and network
    warmup_steps: int = 0  # linear from 0; constant after it
    bottom: str = "512,256,64,16"  # layers over the dense features; the last is a table's columns
    top: str = "512,256,1"  # layers over the interactions
    interaction: Literal["dot", "dcn"] = "dot"  # torchrec's DLRM or DLRM_DCN
    cross: str = "3,512"  # layers and rank of the cross net of "dcn"
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = (
        "sgd"  # of tables; the network's is its kin
    )
    plan: Literal["auto", "exchange", "row", "table", "column", "data"] = "auto"  # of our tables
    seeds: str = "0,1,2"  # one run of each side for every seed
    ours: bool = True  # --no-ours: torchrec alone
    out: str = "runs/bench/dlrm_torchrec.json"  # where the figures go


def integers(option: str, text: str) -> tuple[int, ...]:
    """(512, 256) of "512,256". Raises InputError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--{option} is {text!r}; expected whole numbers with commas, such as 512,256"
        ) from None


def build(config: Config, dataset) -> nn.Module:
    """torchrec's model with initial weights from the seed."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models import dlrm

    torch.manual_seed(config.seed)
    names = [f"t_{feature}" for feature in dataset.features]
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=config.dim, num_embeddings=rows, feature_names=[feature]
        )
        for name, rows, feature in zip(names, dataset.table_rows, dataset.features, strict=True)
    ]
    bags = EmbeddingBagCollection(tables=tables)
    for name, rows in zip(names, dataset.table_rows, strict=True):
        nn.init.uniform_(bags.embedding_bags[name].weight, -(rows**-0.5), rows**-0.5)
        # Row-wise Adagrad takes dense gradients only; the others would pass over the whole table for the same numbers.
        bags.embedding_bags[name].sparse = config.optimizer != "rowwise_adagrad"
    sizes = [dataset.num_dense, list(config.bottom), list(config.top)]
    model = (
        dlrm.DLRM(bags, *sizes)
        if config.interaction == "dot"
        else dlrm.DLRM_DCN(bags, *sizes, *config.cross)
    )
    initial = DLRM(
        dataset.num_dense,
        len(names),
        config.dim,
        config.bottom,
        config.top,
        config.interaction,
        *config.cross,
    )
    model.load_state_dict({**model.state_dict(), **initial.state_dict()})
    return model


def optimizers(model: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """One for the tables and one for the network."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables = list(model.sparse_arch.parameters())
    network = [
        *model.dense_arch.parameters(),
        *model.inter_arch.parameters(),
        *model.over_arch.parameters(),
    ]
    if config.optimizer == "sgd":
        return [torch.optim.SGD(parameters, config.lr) for parameters in (tables, network)]
    if config.optimizer == "lazy_adam":
        return [torch.optim.SparseAdam(tables, config.lr), torch.optim.Adam(network, config.lr)]
    kind = RowWiseAdagrad if config.optimizer == "rowwise_adagrad" else torch.optim.Adagrad
    return [
        kind(tables, config.lr, eps=ADAGRAD_EPS),
        torch.optim.Adagrad(network, config.lr, eps=ADAGRAD_EPS),
    ]


def keyed(batch: dict[str, np.ndarray], dataset):
    """The ids of a batch as torchrec wants them: feature after feature, each example's real ids."""
    from torchrec import KeyedJaggedTensor

    last = np.cumsum(dataset.lookups)
    present = batch.get("present", np.ones(batch["ids"].shape, np.float32)) > 0
    values, lengths = [], []
    for columns in np.split(np.arange(last[-1]), last[:-1]):
        values.append(batch["ids"][:, columns][present[:, columns]])
        lengths.append(present[:, columns].sum(1))
    values, lengths = (
        torch.from_numpy(np.concatenate(parts).astype(np.int64)) for parts in (values, lengths)
    )
    return KeyedJaggedTensor(keys=list(dataset.features), values=values, lengths=lengths)


def evaluate(model: nn.Module, dataset, batch_size: int = 16_384) -> dict[str, float]:
    """AUC and log loss (nats) over every example of `dataset`."""
    from sklearn.metrics import log_loss, roc_auc_score

    scores, labels = [], []
    with torch.no_grad():
        for first in range(0, len(dataset), batch_size):
            batch = dataset.batch(np.arange(first, min(first + batch_size, len(dataset))))
            logits = model(torch.from_numpy(batch["dense"]), keyed(batch, dataset)).squeeze(-1)
            scores.append(torch.sigmoid(logits.double()).numpy())
            labels.append(batch["label"])
    scores, labels = np.concatenate(scores), np.concatenate(labels)
    return {"auc": float(roc_auc_score(labels, scores)), "loss": float(log_loss(labels, scores))}


def train(config: Config) -> dict:
    """Trains with one seed; returns the figures of each epoch and the seconds of training."""
    from torchrec.datasets.utils import Batch
    from torchrec.models.dlrm import DLRMTrain

    train_set, eval_set = open_data(config)
    per_epoch = len(train_set) // config.batch_size
    model = DLRMTrain(build(config, train_set))
    both = optimizers(model.model, config)
    epochs, step, seconds = [], 0, 0.0
    for epoch in range(config.epochs):
        started, losses = time.perf_counter(), []
        order = np.random.default_rng((config.seed, epoch)).permutation(len(train_set))
        for indices in np.split(order[: per_epoch * config.batch_size], per_epoch):
            batch = train_set.batch(indices)
            for optimizer in both:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, step)
            dense, labels = torch.from_numpy(batch["dense"]), torch.from_numpy(batch["label"])
            loss, _ = model(Batch(dense, keyed(batch, train_set), labels))
            loss.backward()
            for optimizer in both:
                optimizer.step()
            losses.append(loss.item())
            step += 1
        seconds += time.perf_counter() - started
        epochs.append(
            {
                "epoch": epoch + 1,
                "training_loss": statistics.fmean(losses),
                **evaluate(model.model, eval_set),
            }
        )
        figures = ", ".join(
            f"{name} {value:.4f}" for name, value in epochs[-1].items() if name != "epoch"
        )
        print(f"torchrec, seed {config.seed}: epoch {epoch + 1}, {figures}", flush=True)
    return {"seed": config.seed, "steps": step, "seconds": seconds, "epochs": epochs}


def train_ours(config: Config) -> dict:
    """The same by `train.dlrm`, in a process of its own."""
    fields = (
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
    flags = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in fields]
    for name in ("bottom", "top", "cross"):
        flags += [f"--{name}", *map(str, getattr(config, name))]
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable,
            "-m",
            "train.dlrm",
            "tiny",
            *flags,
            "--runs",
            runs,
            "--name",
            "run",
        ]
        print("$", shlex.join(["python", *command[1:-4]]), flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [
            json.loads(line) for line in Path(runs, "run/metrics.jsonl").read_text().splitlines()
        ]
        summary = json.loads(Path(runs, "run/summary.json").read_text())
    epochs = [
        {"auc": line["eval/auc"], "loss": line["eval/loss"]} for line in lines if "eval/auc" in line
    ]
    aucs = ", ".join(f"{epoch['auc']:.4f}" for epoch in epochs)
    print(f"ours, seed {config.seed}: AUC after each epoch {aucs}", flush=True)
    return {"seed": config.seed, "seconds": summary["training_seconds"], "epochs": epochs}


def table(runs: list[dict]) -> str:
    """Markdown: AUC and log loss after the last epoch, and seconds of training, of each seed; median, min and max."""
    lines = ["| seed | AUC | log loss | seconds |", "|---|---|---|---|"]
    figures = [
        (run["epochs"][-1]["auc"], run["epochs"][-1]["loss"], run["seconds"]) for run in runs
    ]
    rows = [(str(run["seed"]), *values) for run, values in zip(runs, figures, strict=True)]
    for name, function in {"median": statistics.median, "min": min, "max": max}.items():
        rows.append((name, *(function(column) for column in zip(*figures, strict=True))))
    lines += [
        f"| {name} | {auc:.4f} | {loss:.4f} | {seconds:.1f} |" for name, auc, loss, seconds in rows
    ]
    return "\n".join(lines)


def main(options: Options) -> dict[str, list[dict]]:
    """Runs all seeds, prints the tables and writes --out; returns the figures of each run of each side."""
    sizes = {name: integers(name, getattr(options, name)) for name in ("bottom", "top", "cross")}
    shared = (
        "data",
        "epochs",
        "batch_size",
        "lr",
        "warmup_steps",
        "interaction",
        "optimizer",
        "plan",
    )
    runs: dict[str, list[dict]] = {"torchrec": []} | ({"ours": []} if options.ours else {})
    for seed in integers("seeds", options.seeds):
        config = Config(**{name: getattr(options, name) for name in shared}, **sizes, seed=seed)
        config = validate(config)
        if options.ours:
            runs["ours"].append(train_ours(config))
        runs["torchrec"].append(train(config))
    for name, of_side in runs.items():
        print(f"\n{name}\n\n{table(of_side)}")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    Path(options.out).write_text(json.dumps({"options": vars(options), **runs}, indent=2) + "\n")
    return runs


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
