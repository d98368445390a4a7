"""DLRM on click logs: embedding tables sharded over all devices, dot interaction or DCN-v2.

paper     Naumov et al. 2019, "Deep Learning Recommendation Model" (arXiv:1906.00091); Wang et al. 2020, DCN-v2
          (arXiv:2008.13535)
recipes   kaggle     facebookresearch/dlrm bench/dlrm_s_criteo_kaggle.sh: SGD 0.1, batch 128, one epoch
          mlperf_v1  facebookresearch/dlrm bench/run_and_time.sh: SGD 1.0, batch 2,048, tables of at most 40M rows;
                     target AUC 0.8025 on day 23 of Criteo Terabyte
          mlperf_v2  mlcommons/training recommendation_v2/torchrec_dlrm: DCN-v2, multi-hot, Adagrad 0.005, batch 65,536;
                     target AUC 0.80275
data      Criteo's click logs, prepared by `make data DATASET=criteo DATA=…`, or in torchrec's arrays; MovieLens
run       python -m train.dlrm tiny                              half a minute on two CPU cores, synthetic data
          python -m train.dlrm kaggle --data /data/kaggle        on a TPU VM
result    the published recipes: not run yet; tiny and small real data: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path, from which the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.dlrm tiny")

import json
import math
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data import criteo, splits
from errors import InputError
from models.dlrm import DLRM
from train.common import checkpoint, cli, device, embedding, files, loading, many_steps
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder or URL: from `make data`, torchrec's day_0_dense.npy …, MovieLens'; or "synthetic"
    hash_rows: int = 0  # of each table, where ids are hashes (torchrec's one-hot arrays); 0: 40,000,000, MLPerf's
    bottom: tuple[int, ...] = (512, 256, 64, 16)  # layers over the dense features; the last is a table's columns
    top: tuple[int, ...] = (512, 256, 1)  # layers over the interactions
    interaction: Literal["dot", "dcn"] = "dot"  # dot products of all pairs, or the low-rank cross network of DCN-v2
    cross: tuple[int, int] = (3, 512)  # layers and rank of the cross network
    plan: Literal["auto", "exchange", "data"] = "auto"  # of tables: spread or copied, see docs/embeddings.md
    model_devices: int = 0  # devices that share one copy of the tables; 0: all
    exchange_room: tuple[float, float] = (1.0, 1.0)  # factors on plan exchange's places for ids, and for updated rows
    epochs: int = 1  # passes over the training data; click logs overfit in the second
    batch_size: int = 128  # examples a step, over all devices
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = "sgd"  # of tables; the network's is its kin
    lr: float = 0.1  # peak learning rate, of tables and network
    warmup_steps: int = 0  # linear from 0; constant after it
    shuffle: Literal["examples", "batches"] = "examples"  # what an epoch permutes; batches: files are read in sequence
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # of the network, see train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA's CPU backend; cpu, cuda: PyTorch on one device
    seed: int = 0  # of the initial weights and the order of the data
    steps_a_call: int = 1  # steps in one program, where a step is shorter than its start; see docs/embeddings.md
    workers: int = -1  # processes a host that read batches; -1: one a core, 0: none
    log_every: int = 100  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations; 0: at the end of each epoch
    save_every: int = 10_000  # steps between checkpoints; there is one at each evaluation, too
    keep: int = 2  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes on the usual ones: docs/tpu.md

    @property
    def dim(self) -> int:
        return self.bottom[-1]


MLPERF_V1 = Config(
    bottom=(512, 256, 128),
    top=(1024, 1024, 512, 256, 1),
    batch_size=2048,
    lr=1.0,
    eval_every=102_400,
    shuffle="batches",
)
MLPERF_V2 = replace(
    MLPERF_V1, interaction="dcn", batch_size=65_536, optimizer="adagrad", lr=0.005, eval_every=3_200, save_every=3_200
)
TINY = Config(
    **cli.TRIAL,
    bottom=(32, 16),
    top=(64, 32, 1),
    batch_size=256,
    optimizer="lazy_adam",
    lr=0.02,
    log_every=32,
    save_every=128,
)
SYNTHETIC_ROWS = (20, 50, 100, 400, 6_000, 6_000, 8_000, 30_000)  # of these "auto" copies four, exchanges four
SYNTHETIC_LOOKUPS = (1, 1, 1, 3, 1, 1, 1, 1)
SYNTHETIC_TRAIN, SYNTHETIC_EVAL = 65_536, 8_192

# Fields that a resumed run may change: none touches a number. Tables restore under any plan. Old runs have dim, too.
FREE = ("plan", "model_devices", "exchange_room", "dim", "steps_a_call")
FREE += ("workers", "log_every", "save_every", "keep", "strict", "safe_forms")
EVAL_BATCH = 16_384  # examples per evaluation step, over all devices; facebookresearch/dlrm's, fewer for a small set
ADAGRAD_EPS = 1e-8  # of MLPerf v2's reference, and of fbgemm
TABLE_KEY = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"  # torchrec's name of a table

Data = namedtuple("Data", "train eval")  # what a run reads: clicks of data/criteo.py
State = namedtuple("State", "model embeddings optimizer")  # what a step works on; the optimizer is the network's


def learning_rate(config: Config, step: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then constant."""
    return config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def validate(config: Config) -> Config:
    """Returns the config; refuses values outside their range."""
    cli.at_least(config, 1, "epochs", "batch_size", "steps_a_call", "log_every", "save_every", "keep")
    cli.at_least(config, 0, "lr", "hash_rows", "model_devices", "warmup_steps", "eval_every", "seed")
    cli.at_least(config, -1, "workers")
    for field in ("bottom", "top", "cross"):
        if not getattr(config, field) or min(getattr(config, field)) < 1:
            raise InputError(f"--{field} is {getattr(config, field)}; it needs sizes of at least 1")
    if not all(0 < room < float("inf") for room in config.exchange_room):
        raise InputError(f"--exchange-room is {config.exchange_room}; both are factors above 0, 1 is enough for most")
    if config.top[-1] != 1 or len(config.top) < 2:
        raise InputError(f"--top is {config.top}; it must be two sizes or more and end with 1, the logit of a click")
    cli.need_data(config, "a folder of prepared clicks")
    return config


def open_data(config: Config) -> Data:
    """Opens the training and the evaluation clicks."""
    if config.data == "synthetic":
        sizes = {"train": SYNTHETIC_TRAIN, "eval": SYNTHETIC_EVAL}
        shape = {"table_rows": SYNTHETIC_ROWS, "lookups": SYNTHETIC_LOOKUPS}
        return Data(*(criteo.SyntheticClicks(split, n, config.seed, **shape) for split, n in sizes.items()))
    return Data(*(criteo.open_clicks(config.data, split, config.hash_rows or None) for split in ("train", "eval")))


def table_list(config: Config, dataset) -> list[embedding.Table]:
    """Returns one table per categorical feature of the data set."""
    features = zip(dataset.features, dataset.table_rows, dataset.lookups, strict=True)
    return [embedding.Table(name, rows, lookups, plan=config.plan) for name, rows, lookups in features]


def collate(every_table: list[embedding.Table], batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Checks the ids on the host, where that costs nothing: on a device a wrong one would train another row."""
    embedding.check_ids(batch["ids"], every_table, batch.get("present"))
    return loading.as_tensors(batch)


def build(config: Config, data: Data, mesh: device.Mesh) -> State:
    """Makes network, embeddings and optimizers on the device; the optimizers' states exist from the start."""
    every_table = table_list(config, data.train)
    update = embedding.OPTIMIZERS[config.optimizer]
    update = update(eps=ADAGRAD_EPS) if config.optimizer == "adagrad" else update()
    options = config.lr, config.seed, config.model_devices, config.exchange_room
    embeddings = embedding.ShardedEmbeddingBags(every_table, config.dim, mesh, update, *options)
    sizes = config.dim, config.bottom, config.top, config.interaction, *config.cross
    model = device.to_device(DLRM(data.train.num_dense, len(every_table), *sizes), mesh)
    adagrad = partial(torch.optim.Adagrad, eps=ADAGRAD_EPS)
    kin = {"sgd": torch.optim.SGD, "lazy_adam": torch.optim.Adam}.get(config.optimizer, adagrad)
    optimizer = kin(model.parameters(), config.lr, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, embeddings, optimizer)


def train_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
    """Updates once on batch["dense"] [B, num_dense], "ids" [B, lookups] and "label" [B]; returns the metrics."""
    embedded = state.embeddings(batch["ids"], batch.get("present"))
    with mesh.autocast():
        logits = state.model(batch["dense"], embedded)
    # The mean outside: inside, torch_xla counts the labels of all devices, a collective before the backward pass.
    loss = F.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none").mean()
    loss.backward()
    state.optimizer.step()
    load = state.embeddings.step()
    state.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **load}


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> Tensor:
    """Returns (logit, label, mask) of each example, [B, 3], on every device and so on every host."""
    with torch.no_grad(), mesh.autocast():
        logits = state.model(batch["dense"], state.embeddings(batch["ids"], batch.get("present")))
    scores = torch.stack([logits, batch["label"], batch["mask"]], 1)
    device.replicate(scores, mesh)
    return scores


def eval_options(config: Config, clicks: loading.Dataset, mesh: device.Mesh) -> dict[str, Any]:
    """Returns how clicks are loaded for an evaluation: arguments of the loader."""
    batch_size = math.ceil(min(EVAL_BATCH, len(clicks)) / mesh.num_devices) * mesh.num_devices
    return {"batch_size": batch_size, "collate": partial(collate, table_list(config, clicks))}


def check_evaluation(data: Data, config: Config, mesh: device.Mesh) -> None:
    """Reads the first and the last clicks that are evaluated, and labels until there are both, without which there is
    no AUC; raises InputError where an evaluation would."""
    clicks = data.eval
    batches = loading.first_and_last(clicks, mesh=mesh, **eval_options(config, clicks, mesh))
    seen = {float(label) for batch in batches for label in batch["label"][batch["mask"] > 0].unique()}
    for first in range(0, len(clicks), EVAL_BATCH):
        if len(seen) > 1:
            return
        rows = np.arange(first, min(first + EVAL_BATCH, len(clicks)))
        seen |= {float(label) for label in np.unique(clicks.batch(rows)["label"])}
    if len(seen) < 2:
        only = f"all {len(clicks)} labels of the evaluation split of {config.data} are {min(seen):.0f}: there is no AUC"
        raise InputError(f"{only}; give a split with clicks, 1, and without, 0")


def evaluate(step, state: State, clicks: loading.Dataset, config: Config, mesh: device.Mesh) -> dict[str, float]:
    """Returns AUC, loss and normalised entropy over every example once; `step` is the compiled eval_step."""
    state.model.eval()
    options = eval_options(config, clicks, mesh)
    with loading.parallel_loader(clicks, mesh=mesh, train=False, workers=config.workers, **options) as loader:
        scores = {str(number): step(state, batch, config, mesh) for number, batch in enumerate(loader)}
    state.embeddings.check()
    state.model.train()
    logits, labels, mask = torch.cat(list(checkpoint.to_host(scores).values())).numpy().T
    return criteo.click_metrics(logits[mask > 0], labels[mask > 0])


def export(folder: str, state: State, data: Data, config: Config, checkpoint_folder: str) -> None:
    """Writes what torchrec's DLRM loads: model.safetensors without the tables, and a file per table, out of the newest
    checkpoint, the only place where a table is whole."""
    metadata = {name: json.dumps(getattr(config, name)) for name in ("dim", "bottom", "top", "interaction", "cross")}
    metadata |= {"features": json.dumps(data.train.features), "rows": json.dumps(data.train.table_rows)}
    metadata["num_dense"] = json.dumps(data.train.num_dense)
    network = checkpoint.to_host(state.model.state_dict())
    files.save_weights(f"{folder}/model.safetensors", network, metadata)
    for name in data.train.features:
        table = embedding.read_table(checkpoint_folder, name)
        files.save_weights(f"{folder}/tables/{name}.safetensors", {TABLE_KEY.format(name): table}, {})


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports; returns the final metrics: auc, loss and ne of the evaluation split."""
    config = validate(config)
    mesh = device.setup(config.seed, config.precision, config.strict, config.device, safe_forms=config.safe_forms)
    data = open_data(config)
    per_epoch = loading.steps_per_epoch(data.train, config.batch_size, mesh)
    total = config.epochs * per_epoch
    name = f"dlrm-{'synthetic' if config.data == 'synthetic' else 'clicks'}"
    size = f"{len(data.train):,} examples, {len(data.train.features)} tables of {sum(data.train.table_rows):,} rows"
    headline = f"dlrm on {config.data}: {size}, {config.epochs} epoch(s) of {per_epoch:,} steps of {config.batch_size}"
    headline += splits.said(*data)
    check_evaluation(data, config, mesh)
    run = Run(config, mesh, name=name, headline=headline, free=FREE, total_steps=total)
    if run.finished:
        return run.print_summary()

    state = build(config, data, mesh)
    sizes = {"examples": len(data.train), "keep": config.keep}
    start = run.resume(state.model, state.optimizer, tables=embedding.TableStorage(state.embeddings), **sizes)
    by_plan = state.embeddings.tables_by_plan()
    run.message("tables: " + ", ".join(f"{count} {plan}" for plan, count in by_plan.items()))
    train = many_steps.compiled(train_step, mesh, config.steps_a_call)
    eval_fn = device.compiled(eval_step, mesh)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    loader = loading.parallel_loader(
        data.train,
        config.batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total,
        shuffle=config.shuffle,
        collate=partial(collate, table_list(config, data.train)),
        workers=config.workers,
    )
    batches = []  # of the updates that the next call makes
    with run.training(loader, stop_every=math.ceil(100 / config.steps_a_call)):
        metrics = evaluation(start) if run.evaluation_due else {}  # its checkpoint is there, the run ended in it
        for step, batch in enumerate(loader, start + 1):
            batches.append(batch)
            if not many_steps.ends_call(step, config.steps_a_call, total, alone=config.warmup_steps):
                continue

            lr = learning_rate(config, step - 1)
            device.set_lr(state.optimizer, lr)
            device.set_lr(state.embeddings, lr)
            step_metrics = train(state, batches, config, mesh)
            due = partial(many_steps.is_due, step=step, updates=len(batches))
            if step == len(batches) or due(config.log_every) or step == total:
                run.log(step, examples=step * config.batch_size, input_wait=loader.input_wait(), lr=lr, **step_metrics)
                device.after_next_step(partial(state.embeddings.check, step_metrics.get("dropped")))
            batches = []
            evaluates = due(config.eval_every or per_epoch) or step == total
            run.checkpoint(step, due=due(config.save_every), evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)
        run.checkpoints.wait()
        if not metrics:  # killed after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        if config.data == "synthetic":
            run.message(f"a perfect model would reach an AUC of {data.eval.perfect_auc():.4f} on this synthetic data")
        if mesh.main_process:
            export(f"{run.path}/export", state, data, config, run.checkpoints.folder(total))
        run.finish(metrics)
    return metrics


PRESETS = {
    "kaggle": ("Criteo Kaggle; needs --data and an accelerator", Config()),
    "mlperf_v1": ("Criteo Terabyte, one-hot, 40M rows at most a table; needs --data and accelerators", MLPERF_V1),
    "terabyte": ("the same as mlperf_v1", MLPERF_V1),
    "mlperf_v2": ("Criteo Terabyte, multi-hot, DCN-v2; needs --data and accelerators", MLPERF_V2),
    "tiny": ("small tables and synthetic clicks: half a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
