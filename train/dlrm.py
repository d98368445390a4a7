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
result    the published recipes: not run yet; tiny and small real data: README
"""

import json
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data import criteo
from errors import InputError
from models.dlrm import DLRM
from train.common import checkpoint, cli, device, embedding, files, loading
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder that `make data` made, torchrec's day_0_dense.npy …, a MovieLens folder, or "synthetic"
    hash_rows: int = 0  # of each table, where ids are hashes (torchrec's one-hot arrays); 0: 40,000,000, MLPerf's
    dim: int = 16  # columns of every embedding table
    bottom: tuple[int, ...] = (512, 256, 64, 16)  # layers over the dense features; the last is dim
    top: tuple[int, ...] = (512, 256, 1)  # layers over the interactions
    interaction: Literal["dot", "dcn"] = "dot"  # dot products of all pairs, or the low-rank cross network of DCN-v2
    cross: tuple[int, int] = (3, 512)  # layers and rank of the cross network
    plan: Literal["auto", "row", "table", "column", "data"] = "auto"  # where tables lie, see train/common/embedding
    model_devices: int = 0  # devices that share one copy of the tables; 0: all
    epochs: int = 1  # passes over the training data; click logs overfit in the second
    batch_size: int = 128  # examples a step, over all devices
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = "sgd"  # of tables; the network's is its kin
    lr: float = 0.1  # peak learning rate, of tables and network
    warmup_steps: int = 0  # linear from 0; constant after it
    shuffle: Literal["examples", "batches"] = "examples"  # what an epoch permutes; batches: files are read in sequence
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of the network; tables and parameters are float32
    seed: int = 0  # of the initial weights and the order of the data
    workers: int = -1  # processes a host that read batches; -1: one a core, 0: none
    log_every: int = 100  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations; 0: at the end of each epoch
    save_every: int = 10_000  # steps between checkpoints; there is one at each evaluation, too
    keep: int = 2  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run


MLPERF_V1 = Config(
    dim=128,
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
    data="synthetic",
    bottom=(32, 16),
    top=(64, 32, 1),
    batch_size=256,
    optimizer="lazy_adam",
    lr=0.02,
    precision="float32",
    workers=0,
    log_every=32,
    save_every=128,
)
SYNTHETIC_ROWS = (20, 50, 100, 400, 6_000, 6_000, 8_000, 30_000)  # large enough that "auto" uses three of the plans
SYNTHETIC_LOOKUPS = (1, 1, 1, 3, 1, 1, 1, 1)
SYNTHETIC_TRAIN, SYNTHETIC_EVAL = 65_536, 8_192

# What a run may change when it is resumed: none of these touches a number. Tables restore under any plan.
FREE = ("plan", "model_devices", "workers", "log_every", "save_every", "keep", "strict")
EVAL_BATCH = 16_384  # examples a step of evaluation, over all devices; facebookresearch/dlrm's, fewer for a small set
ADAGRAD_EPS = 1e-8  # of MLPerf v2's reference, and of fbgemm
TABLE_KEY = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"  # torchrec's name of a table


def learning_rate(config: Config, step: int) -> float:
    """Of step 0, 1, …: linear warm-up, then constant."""
    return config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def validate(config: Config) -> None:
    """Refuses values outside their range before anything is made."""
    at_least = {1: "dim epochs batch_size log_every save_every keep", -1: "workers"}
    at_least[0] = "lr hash_rows model_devices warmup_steps eval_every seed"
    for low, fields in at_least.items():
        for field in fields.split():
            if not getattr(config, field) >= low:
                raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be at least {low}")
    for field in ("bottom", "top", "cross"):
        if not getattr(config, field) or min(getattr(config, field)) < 1:
            raise InputError(f"--{field} is {getattr(config, field)}; it needs sizes of at least 1")
    if config.bottom[-1] != config.dim:
        raise InputError(f"--bottom ends with {config.bottom[-1]}; it must end with --dim, {config.dim}")
    if config.top[-1] != 1 or len(config.top) < 2:
        raise InputError(f"--top is {config.top}; it must be two sizes or more and end with 1, the logit of a click")


def open_data(config: Config):
    """(training set, evaluation set), see data/criteo.py."""
    if not config.data:
        raise InputError("--data is missing: give a folder of prepared clicks; `--data synthetic` is a trial")
    if config.data == "synthetic":
        sizes = {"train": SYNTHETIC_TRAIN, "eval": SYNTHETIC_EVAL}
        shape = {"table_rows": SYNTHETIC_ROWS, "lookups": SYNTHETIC_LOOKUPS}
        return [criteo.SyntheticClicks(split, size, config.seed, **shape) for split, size in sizes.items()]
    return [criteo.open_clicks(config.data, split, config.hash_rows or None) for split in ("train", "eval")]


def table_list(config: Config, dataset) -> list[embedding.Table]:
    """One table a categorical feature of the data set."""
    features = zip(dataset.features, dataset.table_rows, dataset.lookups, strict=True)
    return [embedding.Table(name, rows, lookups, plan=config.plan) for name, rows, lookups in features]


def collate(every_table: list[embedding.Table], batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Checks the ids on the host, where that costs nothing: on a device a wrong one would train another row."""
    embedding.check_ids(batch["ids"], every_table, batch.get("present"))
    return loading.as_tensors(batch)


def build(config: Config, dataset, mesh: device.Mesh):
    """(network, embeddings, optimizer of the network) on the device, with the optimizers' states in being."""
    every_table = table_list(config, dataset)
    update = embedding.OPTIMIZERS[config.optimizer]
    update = update(eps=ADAGRAD_EPS) if config.optimizer == "adagrad" else update()
    embeddings = embedding.ShardedEmbeddingBags(
        every_table, config.dim, mesh, update, config.lr, config.seed, config.model_devices
    )
    model = DLRM(
        dataset.num_dense, len(every_table), config.dim, config.bottom, config.top, config.interaction, *config.cross
    )
    device.to_device(model, mesh)
    parameters = list(model.parameters())
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, config.lr, foreach=False)
    elif config.optimizer == "lazy_adam":
        optimizer = torch.optim.Adam(parameters, config.lr, foreach=False)
    else:
        optimizer = torch.optim.Adagrad(parameters, config.lr, eps=ADAGRAD_EPS, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return model, embeddings, optimizer


def train_step(model, embeddings, optimizer, batch: dict[str, Tensor], mesh) -> dict[str, Tensor]:
    """One update on batch["dense"] [B, num_dense], "ids" [B, lookups] and "label" [B]; returns the mean loss."""
    embedded = embeddings(batch["ids"], batch.get("present"))
    with mesh.autocast():
        logits = model(batch["dense"], embedded)
    # The mean outside: inside, torch_xla counts the labels of all devices, a collective before the backward pass.
    loss = F.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none").mean()
    loss.backward()
    optimizer.step()
    embeddings.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach()}


def eval_step(model, embeddings, batch: dict[str, Tensor], mesh) -> Tensor:
    """(logit, label, mask) of each example, [B, 3], on every device and so on every host."""
    with torch.no_grad(), mesh.autocast():
        logits = model(batch["dense"], embeddings(batch["ids"], batch.get("present")))
    scores = torch.stack([logits, batch["label"], batch["mask"]], 1)
    device.replicate(scores, mesh)
    return scores


def click_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """AUC (exact), log loss in nats, and normalised entropy: log loss divided by that of always predicting the mean
    click rate (He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 2.1)."""
    from sklearn.metrics import roc_auc_score  # a second to import

    rate = labels.mean()
    if not 0 < rate < 1:
        raise InputError(f"all {len(labels)} labels of the evaluation split are {labels[0]:.0f}: there is no AUC")
    if not np.isfinite(logits).all():
        raise InputError("a logit is not finite: training diverged; use a smaller --lr or more --warmup-steps")
    logits = logits.astype(np.float64)
    # log(1 + exp(x)) - y x, without overflow.
    loss = float((np.logaddexp(0, logits) - labels * logits).mean())
    entropy = -float(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return {"auc": float(roc_auc_score(labels, logits)), "loss": loss, "ne": loss / entropy}


def evaluate(step, model, embeddings, dataset, config: Config, mesh) -> dict[str, float]:
    """AUC, loss and normalised entropy over every example of `dataset` once; `step` is the compiled eval_step."""
    model.eval()
    batch_size = -(-min(EVAL_BATCH, len(dataset)) // mesh.num_devices) * mesh.num_devices
    with loading.parallel_loader(
        dataset,
        batch_size,
        mesh,
        train=False,
        collate=partial(collate, table_list(config, dataset)),
        workers=config.workers,
    ) as loader:
        scores = {str(number): step(model, embeddings, batch, mesh) for number, batch in enumerate(loader)}
    model.train()
    logits, labels, mask = torch.cat(list(checkpoint.to_host(scores).values())).numpy().T
    return click_metrics(logits[mask > 0], labels[mask > 0])


def export(folder: str, model: DLRM, checkpoints, step: int, config: Config, dataset) -> None:
    """Writes weights under torchrec's names: model.safetensors without the tables, and a file a table, which is the
    only place where a table is whole. `load_state_dict` of torchrec's DLRM takes them together."""
    config_names = ("dim", "bottom", "top", "interaction", "cross")
    metadata = {name: json.dumps(getattr(config, name)) for name in config_names}
    metadata |= {"features": json.dumps(dataset.features), "rows": json.dumps(dataset.table_rows)}
    network = checkpoint.to_host({name: value.detach() for name, value in model.state_dict().items()})
    files.save_weights(f"{folder}/model.safetensors", network, metadata)
    for name in dataset.features:
        table = embedding.read_table(checkpoints.folder(step), name)
        files.save_weights(f"{folder}/tables/{name}.safetensors", {TABLE_KEY.format(name): table}, {})


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports; returns the final metrics: auc, loss and ne of the evaluation split."""
    validate(config)
    mesh = device.setup(config.seed, config.precision, config.strict)
    train_set, eval_set = open_data(config)
    batch_size = config.batch_size
    per_epoch = loading.steps_per_epoch(train_set, batch_size, mesh)
    total = config.epochs * per_epoch
    eval_every = config.eval_every or per_epoch
    trial = config.data == "synthetic"
    headline = f"dlrm on {config.data}: {len(train_set):,} examples, {len(train_set.features)} tables of "
    headline += f"{sum(train_set.table_rows):,} rows, {config.epochs} epoch(s) of {per_epoch:,} steps of {batch_size} "
    headline += f"on {mesh.num_devices} {mesh.kind} device(s)"
    run = Run(
        config,
        default_name=f"dlrm-{'synthetic' if trial else 'clicks'}",
        headline=headline + ("; this is a trial, for real training see --help" if trial else ""),
        devices={"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count},
        main_process=mesh.main_process,
        free=FREE,
        total_steps=total,
    )
    run.check_hosts(mesh)
    if run.finished:
        run.print_summary()
        return run.summary["metrics"]

    model, embeddings, optimizer = build(config, train_set, mesh)
    checkpoints = checkpoint.Checkpointer(
        f"{run.path}/checkpoints", config.keep, mesh.main_process, embedding.TableStorage(embeddings)
    )
    start = checkpoints.restore(model, optimizer, mesh)
    device.same_on_all_hosts(mesh, "the step to resume from", start)
    device.same_on_all_hosts(mesh, "the number of training examples", len(train_set))
    if run.resumed:
        run.resume_at(start)
    run.message("tables: " + ", ".join(f"{n} {plan}" for plan, n in embeddings.plan.counts().items()))
    step_fn, eval_fn = device.compiled(train_step, mesh), device.compiled(eval_step, mesh)
    model.train()
    metrics: dict[str, float] = {}
    loader = loading.parallel_loader(
        train_set,
        batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total,
        shuffle=config.shuffle,
        collate=partial(collate, table_list(config, train_set)),
        workers=config.workers,
    )
    with device.stop_requested(mesh, every=100) as stopped, closing(run), checkpoints, loader:
        for step, batch in enumerate(loader, start + 1):
            lr = learning_rate(config, step - 1)
            device.set_lr(optimizer, lr)
            device.set_lr(embeddings, lr)
            step_metrics = step_fn(model, embeddings, optimizer, batch, mesh)
            if step == 1 or step % config.log_every == 0 or step == total:
                run.log(step, examples=step * batch_size, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            stop = stopped() and step < total
            evaluates = step % eval_every == 0 or step == total
            if evaluates:
                with run.pause():
                    metrics = evaluate(eval_fn, model, embeddings, eval_set, config, mesh)
                run.evaluation(step, **metrics)
            # After the evaluation, so that a run resumed from this checkpoint has its figures.
            if evaluates or stop or step % config.save_every == 0:
                with run.pause():
                    run.upload()  # so that what a resumed run keeps is there before its checkpoint is
                    checkpoints.save(step, model, optimizer)
            checkpoints.raise_failure()
            if stop:
                checkpoints.wait()
                run.message(f"stopped by a signal at step {step}: saved; the same command goes on from here")
                raise SystemExit(143)
        checkpoints.wait()
        if not metrics:  # killed after the last step, before the export
            metrics = evaluate(eval_fn, model, embeddings, eval_set, config, mesh)
        if trial:
            run.message(f"a perfect model would reach an AUC of {eval_set.perfect_auc():.4f} on this synthetic data")
        if mesh.main_process:
            export(f"{run.path}/export", model, checkpoints, total, config, train_set)
        run.finish(metrics, device.graph_report())
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
