"""DLRM on click logs: embedding tables sharded over all devices, dot interaction or DCN-v2.

paper     Naumov et al. 2019, "Deep Learning Recommendation Model" (arXiv:1906.00091);
          Wang et al. 2020, DCN-v2 (arXiv:2008.13535)
recipes   clicks     for a log of your own: Adagrad 0.02, batch 128, small layers, one epoch
          kaggle     facebookresearch/dlrm bench/dlrm_s_criteo_kaggle.sh: SGD 0.1, batch 128,
                     one epoch
          mlperf_v1  facebookresearch/dlrm bench/run_and_time.sh: SGD 1.0, batch 2,048, tables of at
                     most 40M rows; target AUC 0.8025 on day 23 of Criteo Terabyte
          mlperf_v2  mlcommons/training recommendation_v2/torchrec_dlrm: DCN-v2, multi-hot,
                     Adagrad 0.005, batch 65,536; target AUC 0.80275
data      Criteo's click logs, prepared by `make data DATASET=criteo DATA=…` (for mlperf_v2 with
          ARGS="--form mlperf_v2"), or in torchrec's arrays; a log of your own, prepared by
          `make data DATASET=clicks DATA=…`; MovieLens
run       python -m train.dlrm tiny                          synthetic data: half a minute on two
                                                             CPU cores
          python -m train.dlrm kaggle --data /data/kaggle    on a TPU VM; with --data the preset may
                                                             be left out: kaggle, or clicks where
                                                             the log is your own
result    the published recipes: not run yet; tiny and small real data: docs/results.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.dlrm tiny")

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import optional
from data import criteo, splits
from data.remote import local_copy
from errors import InputError
from models.dlrm import DLRM
from train.common import checkpoint, cli, device, embedding, files, loading, many_steps
from train.common.benchmark import Benchmark
from train.common.embedding import pieces
from train.common.evaluation import FinishedRun, resolve_config
from train.common.mesh import Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder or URL of `make data`, torchrec or MovieLens; or "synthetic"
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train or valid; "": as in training
    hash_rows: int = 0  # rows per table of torchrec's one-hot ids, at most; 0: 40,000,000
    multi_hot: bool = False  # Criteo's ids become MLPerf v2's bags, 1 to 100 ids per feature
    bottom: tuple[int, ...] = (512, 256, 64, 16)  # MLP over dense features; last: embedding size
    top: tuple[int, ...] = (512, 256, 1)  # MLP over the interactions; its output is the logit
    interaction: Literal["dot", "dcn"] = "dot"  # products of all pairs, or DCN-v2's cross network
    cross: tuple[int, int] = (3, 512)  # layers and rank of the cross network
    plan: Literal["auto", "exchange", "data"] = "auto"  # by a table's size, or sharded, or copied
    model_devices: int = 0  # devices that share one copy of the tables; 0: all, or a slice's
    exchange_room: tuple[float, float] = (1.0, 1.0)  # exchange: room for ids and for updated rows
    epochs: int = 1  # passes over the training data; click logs overfit in the second
    batch_size: int = 128  # examples per step, over all devices
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad", "lazy_adam"] = "sgd"  # of the tables
    lr: float = 0.1  # peak learning rate, of tables and network
    warmup_steps: int = 0  # linear from 0; constant after it
    shuffle: Literal["examples", "batches"] = "examples"  # batches: files are read in sequence
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # of the network
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    seed: int = 0  # of the initial weights and the order of the data
    steps_a_call: int = 1  # steps per compiled program, where one is shorter than a launch
    workers: int = -1  # processes per host that read batches; -1: one per core, 0: none
    log_every: int = 100  # steps between lines of metrics
    eval_every: int = 0  # steps between evaluations; 0: at the end of each epoch
    save_every: int = 10_000  # steps between checkpoints; there is one at each evaluation, too
    keep: int = 2  # checkpoints that stay
    best: str = ""  # exports the best checkpoint by auc, -loss, …; "": the last
    patience: int = 0  # evaluations without a better --best that end the training; 0: none do
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md

    @property
    def dim(self) -> int:
        """Columns of every table."""
        return self.bottom[-1]


# For some thousands of rows and more: with kaggle's recipe MovieLens' AUC stays 0.1 below.
CLICKS = Config(bottom=(64, 16), top=(64, 32, 1), optimizer="adagrad", lr=0.02)
MLPERF_V1 = Config(
    bottom=(512, 256, 128),
    top=(1024, 1024, 512, 256, 1),
    batch_size=2048,
    lr=1.0,
    eval_every=102_400,
    shuffle="batches",
)
MLPERF_V2 = replace(
    MLPERF_V1,
    interaction="dcn",
    multi_hot=True,
    batch_size=65_536,
    optimizer="adagrad",
    lr=0.005,
    eval_every=3_200,
    save_every=3_200,
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
# Rows of the tables of synthetic data. With --plan auto four of them are copied and four sharded.
SYNTHETIC_ROWS = (20, 50, 100, 400, 6_000, 6_000, 8_000, 30_000)
SYNTHETIC_LOOKUPS = (1, 1, 1, 3, 1, 1, 1, 1)
SYNTHETIC_TRAIN = 65_536  # examples
SYNTHETIC_EVAL = 8_192

# Fields that config.json of an old run may have, and Config has no more: dim is a property now.
REMOVED_FIELDS = ("dim",)
# Fields that a resumed run may change: these do not change the trained weights. Tables restore
# under any plan.
MAY_CHANGE = ("plan", "model_devices", "exchange_room", "steps_a_call", *REMOVED_FIELDS)
MAY_CHANGE += ("workers", "log_every", "save_every", "keep", "strict", "safe_forms")
# It changes the data, which a run records by itself: by them runs are told apart, older ones too,
# which have no such field.
MAY_CHANGE += ("multi_hot",)
# Flags that may be given with --evaluate; all others are the run's. They change no number beyond
# rounding.
EVALUATE_FLAGS = ("plan", "model_devices", "exchange_room")
# Examples per evaluation step, over all devices: facebookresearch/dlrm's, fewer for a small set.
EVAL_BATCH = 16_384
METRICS = ("auc", "loss", "ne")  # of an evaluation
ADAGRAD_EPS = 1e-8  # of MLPerf v2's reference, and of fbgemm
# torchrec's name of a table.
TABLE_KEY = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"


class Data(NamedTuple):
    """What a run reads."""

    train: criteo.ClickLog | None  # None: a finished run is evaluated
    eval: criteo.ClickLog


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    embeddings: embedding.ShardedEmbeddingBags  # with an optimizer of their own
    optimizer: torch.optim.Optimizer | None  # of the network; None: nothing is trained


def learning_rate(config: Config, step: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then constant."""
    if step < config.warmup_steps:
        share = (step + 1) / config.warmup_steps
        return config.lr * share
    return config.lr


def validate(config: Config) -> Config:
    """Returns the config; raises InputError where a value is outside its range."""
    cli.at_least(config, 1, "epochs", "batch_size", "steps_a_call")
    cli.at_least(config, 1, "log_every", "save_every", "keep")
    cli.at_least(config, 0, "lr", "hash_rows", "model_devices", "patience")
    cli.at_least(config, 0, "warmup_steps", "eval_every", "seed")
    cli.at_least(config, -1, "workers")
    for field in ("bottom", "top", "cross"):
        sizes = getattr(config, field)
        if not sizes or min(sizes) < 1:
            raise InputError(f"--{field} is {sizes}; it needs sizes of at least 1")

    if not all(0 < factor < math.inf for factor in config.exchange_room):
        raise InputError(
            f"--exchange-room is {config.exchange_room}; "
            "give two factors above 0; 1 is enough for most data"
        )
    if config.top[-1] != 1 or len(config.top) < 2:
        raise InputError(
            f"--top is {config.top}; "
            "it must be two sizes or more and end with 1, the logit of a click"
        )
    cli.need_data(config, "a folder of prepared clicks")
    return config


def open_data(config: Config) -> Data:
    """Opens the training and the evaluation clicks."""
    if config.data == "synthetic":
        return Data(
            train=_synthetic(config, "train", SYNTHETIC_TRAIN),
            eval=_synthetic(config, "eval", SYNTHETIC_EVAL),
        )
    hash_rows = config.hash_rows or None
    return Data(
        train=criteo.open_clicks(config.data, "train", hash_rows, config.multi_hot),
        eval=criteo.open_clicks(config.data, "eval", hash_rows, config.multi_hot),
    )


def _synthetic(config: Config, split: str, count: int) -> criteo.SyntheticClicks:
    return criteo.SyntheticClicks(
        split, count, config.seed, table_rows=SYNTHETIC_ROWS, lookups=SYNTHETIC_LOOKUPS
    )


def table_list(config: Config, dataset: criteo.ClickLog) -> list[embedding.Table]:
    """Returns one table per categorical feature of the data set."""
    features = zip(dataset.features, dataset.table_rows, dataset.lookups, strict=True)
    return [
        embedding.Table(name, rows, lookups, plan=config.plan) for name, rows, lookups in features
    ]


def collate(tables: list[embedding.Table], examples: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns a batch of examples as tensors.

    The host checks that all ids are within the tables: on a device a wrong id would train another
    row.
    """
    embedding.check_ids(examples["ids"], tables, examples.get("present"))
    return loading.as_tensors(examples)


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Makes network, embeddings and optimizers on the device.

    The optimizers' states exist from the start: made in the first step, they would make the second
    step another graph.
    """
    tables = table_list(config, data.train)
    options = {"eps": ADAGRAD_EPS} if config.optimizer == "adagrad" else {}
    table_optimizer = embedding.OPTIMIZERS[config.optimizer](**options)
    embeddings = embedding.ShardedEmbeddingBags(
        tables,
        config.dim,
        mesh,
        table_optimizer,
        config.lr,
        config.seed,
        model_devices=config.model_devices,
        room=config.exchange_room,
    )

    model = make_network(describe(config, data.train))
    model = device.to_device(model, mesh)
    optimizer = network_optimizer(config, model)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, embeddings, optimizer)


@dataclass(frozen=True)
class Description:
    """What network and tables a model has; an export's metadata."""

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: str
    cross: tuple[int, int]
    features: tuple[str, ...]  # the names of the tables
    rows: tuple[int, ...]  # of each table
    num_dense: int


def describe(config: Config, clicks: criteo.ClickLog) -> Description:
    """Returns the description of a model for these clicks."""
    return Description(
        dim=config.dim,
        bottom=config.bottom,
        top=config.top,
        interaction=config.interaction,
        cross=config.cross,
        features=tuple(clicks.features),
        rows=tuple(clicks.table_rows),
        num_dense=clicks.num_dense,
    )


def make_network(description: Description) -> DLRM:
    """Makes the network, without the tables, on the host."""
    cross_layers, cross_rank = description.cross
    return DLRM(
        num_dense=description.num_dense,
        num_tables=len(description.features),
        dim=description.dim,
        bottom=description.bottom,
        top=description.top,
        interaction=description.interaction,
        cross_layers=cross_layers,
        cross_rank=cross_rank,
    )


def network_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the network that belongs to the tables' --optimizer."""
    # device.set_lr sets the rate before each step. XLA has no foreach kernels.
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), config.lr, foreach=False)
    if config.optimizer == "lazy_adam":
        return torch.optim.Adam(model.parameters(), config.lr, foreach=False)
    # Of adagrad and of rowwise_adagrad, which only tables have.
    return torch.optim.Adagrad(model.parameters(), config.lr, eps=ADAGRAD_EPS, foreach=False)


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch.

    Args:
        batch: "dense" [B, num_dense], "ids" [B, lookups of all tables] and "label" [B]; only where
            examples have different numbers of ids also "present", shaped as "ids": 1 where there is
            an id, else 0.

    Returns:
        "loss", the mean; and where tables are sharded (plan exchange) how full the slots of their
        exchange were, see `ShardedEmbeddingBags.step`. "dropped" above 0 is an error.
    """
    embedded = state.embeddings(batch["ids"], batch.get("present"))
    with mesh.autocast():
        logits = state.model(batch["dense"], embedded)

    # Not reduction="mean": for that torch_xla counts the labels of all devices, a collective before
    # the backward pass.
    losses = F.binary_cross_entropy_with_logits(logits, batch["label"], reduction="none")
    loss = losses.mean()
    loss.backward()

    # The network and the tables each have gradients of their own.
    state.optimizer.step()
    load = state.embeddings.step()
    state.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **load}


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh) -> Tensor:
    """Returns (logit, label, mask) of each example of the whole batch, [B, 3]: every host can read
    all of them."""
    with torch.no_grad():
        embedded = state.embeddings(batch["ids"], batch.get("present"))
        with mesh.autocast():
            logits = state.model(batch["dense"], embedded)
    scores = torch.stack([logits, batch["label"], batch["mask"]], 1)
    return device.whole_batch(scores, mesh)


def eval_batch_size(clicks: criteo.ClickLog, mesh: Mesh) -> int:
    """Returns how many examples, over all devices, an evaluation step takes."""
    examples = min(EVAL_BATCH, len(clicks))
    return math.ceil(examples / mesh.num_devices) * mesh.num_devices


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last clicks that are evaluated, and labels until both kinds are seen,
    without which there is no AUC; raises InputError where an evaluation would."""
    clicks = data.eval
    batches = loading.first_and_last(
        clicks,
        eval_batch_size(clicks, mesh),
        mesh,
        collate=partial(collate, table_list(config, clicks)),
    )
    seen = set()
    for batch in batches:
        labels = batch["label"][batch["mask"] > 0]
        seen |= set(labels.unique().tolist())

    first = 0
    while len(seen) < 2 and first < len(clicks):
        rows = np.arange(first, min(first + EVAL_BATCH, len(clicks)))
        labels = clicks.batch(rows)["label"]
        seen |= set(np.unique(labels).tolist())
        first += EVAL_BATCH

    if len(seen) < 2:
        raise InputError(
            f"all {len(clicks)} labels of the evaluation split of {config.data} "
            f"are {min(seen):.0f}: there is no AUC; "
            "give a split with clicks, 1, and without, 0"
        )


def evaluate(
    eval_fn: Callable, state: State, clicks: loading.Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns AUC, loss and normalized entropy over every example once.

    Args:
        eval_fn: the compiled eval_step.
    """
    state.model.eval()
    loader = loading.parallel_loader(
        clicks,
        eval_batch_size(clicks, mesh),
        mesh,
        train=False,
        collate=partial(collate, table_list(config, clicks)),
        workers=config.workers,
    )
    with loader:
        scores_of_batches = [eval_fn(state, batch, config, mesh) for batch in loader]
    state.embeddings.check()  # raises where an id found no slot in the exchange
    state.model.train()

    scores = torch.cat(device.read(scores_of_batches)).numpy()
    logits, labels, mask = scores.T
    is_example = mask > 0
    return criteo.click_metrics(logits[is_example], labels[is_example])


def export(
    folder: str, state: State, data: Data, config: Config, mesh: Mesh, checkpoint_folder: str
) -> None:
    """Writes what torchrec's DLRM loads: model.safetensors without the tables, and a file per
    table, out of the state's checkpoint, the only place where a table is whole. For a log of the
    user's own the maps from values to ids come along, in the folder clicks."""
    if not mesh.main_process:
        return

    metadata = {}
    for name, value in asdict(describe(config, data.train)).items():
        metadata[name] = json.dumps(value)
    metadata["precision"] = json.dumps(config.precision)  # of the evaluation, so of make predict
    network = checkpoint.to_host(state.model.state_dict())
    files.save_weights(f"{folder}/model.safetensors", network, metadata)

    for name in data.train.features:
        table = embedding.read_table(checkpoint_folder, name)
        path = f"{folder}/tables/{name}.safetensors"
        files.save_weights(path, {TABLE_KEY.format(name): table}, {})
    if data.train.columns_folder is not None:
        files.copy_folder(data.train.columns_folder, f"{folder}/clicks")


class Export(NamedTuple):
    """What a run has exported, without the tables."""

    folder: str
    weights: dict[str, Tensor]  # of the network
    description: Description


def read_export(folder: str) -> Export:
    """Reads an export in a local folder; raises InputError where it is not whole."""
    weights, metadata = files.load_with_metadata(f"{folder}/model.safetensors")
    values = {}
    for field in fields(Description):
        value = json.loads(metadata[field.name])
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return Export(folder, weights, Description(**values))


def restore(
    export: Export,
    tables: list[embedding.Table],
    mesh: Mesh,
    model_devices: int = 0,
    exchange_room: tuple[float, float] = (1.0, 1.0),
) -> State:
    """Returns the network and the tables of an export on the devices, without optimizers.

    Args:
        tables: of the export's features, in their order.
        model_devices, exchange_room: see Config.
    """
    model = make_network(export.description)
    model.load_state_dict(export.weights)
    model = device.to_device(model, mesh).eval()

    dim = export.description.dim
    embeddings = embedding.ShardedEmbeddingBags(
        tables,
        dim,
        mesh,
        embedding.SGD(),  # it has no state, and nothing is trained
        lr=0.0,
        seed=0,  # of initial weights, which those of the export replace
        model_devices=model_devices,
        room=exchange_room,
    )
    # Each table is one piece, as if a checkpoint had it.
    shapes = {pieces.STEP: ()}
    for table in tables:
        shapes[pieces.whole_weight(table.name)] = (table.rows, dim)
    embeddings.load_pieces(shapes, partial(_read_exported, export.folder))
    return State(model, embeddings, optimizer=None)


def _read_exported(folder: str, key: str) -> Tensor:
    """Returns a table of an export, or the count of updates, by the name of its piece."""
    if key == pieces.STEP:
        return torch.zeros(())
    name = key.partition("/")[0]
    return files.load_weights(f"{folder}/tables/{name}.safetensors")[TABLE_KEY.format(name)]


def open_evaluation(config: Config, export: Export) -> criteo.ClickLog:
    """Opens the clicks of --split, or a table of the user's own clicks.

    Raises:
        InputError: they cannot be read; or their ids are not those of the export.
    """
    split = splits.wanted(config.split, known=("train", "valid"))
    # As data/criteo.py names the splits: what is "valid" to the user is "eval" there.
    opened_split = "train" if split == "train" else "eval"
    if config.data == "synthetic":
        size = SYNTHETIC_TRAIN if split == "train" else SYNTHETIC_EVAL
        return _synthetic(config, opened_split, size)

    trained_maps = Path(export.folder, "clicks")
    if criteo.TABLE.search(config.data) and trained_maps.is_dir():
        if split:
            raise InputError(
                f"{config.data} is one table, all rows of which are evaluated; leave out --split"
            )
        path = Path(local_copy(config.data, "*")).expanduser()
        if not path.is_file():
            raise InputError(f"there is no file {config.data}; give a CSV or parquet file")
        own_clicks = optional.load("own_clicks")
        return own_clicks.EncodedClicks(path, own_clicks.Columns.load(trained_maps))

    hash_rows = config.hash_rows or None
    log = criteo.open_clicks(config.data, opened_split, hash_rows, config.multi_hot)
    check_ids_of(log, export, config)
    return log


def check_ids_of(log: criteo.ClickLog, export: Export, config: Config) -> None:
    """Raises InputError where the ids of clicks mean other values than those of an export."""
    trained = export.description
    if tuple(log.features) != trained.features:
        raise InputError(
            f"{config.data} has the features {', '.join(log.features)}; "
            f"{config.evaluate} was trained with {', '.join(trained.features)}"
        )
    for name, rows, trained_rows in zip(log.features, log.table_rows, trained.rows, strict=True):
        if rows != trained_rows:
            raise InputError(
                f"{config.data} has {rows:,} ids for {name}; {config.evaluate} was trained with "
                f"{trained_rows:,}, so that they mean other values; "
                "give clicks of the same preparation"
            )
    if log.num_dense != trained.num_dense:
        raise InputError(
            f"{config.data} has {log.num_dense} dense features; "
            f"{config.evaluate} was trained with {trained.num_dense}"
        )
    if log.columns_folder is not None:
        check_maps(log.columns_folder, export, config)


def check_maps(columns_folder: Path, export: Export, config: Config) -> None:
    """Raises InputError where the maps from values to ids are not those of an export."""
    trained_maps = Path(export.folder, "clicks")
    if _content(trained_maps) == _content(columns_folder):
        return

    # Files that differ may still have the same maps.
    own_clicks = optional.load("own_clicks")
    trained = own_clicks.Columns.load(trained_maps)
    other = own_clicks.other_maps(trained, own_clicks.Columns.load(columns_folder))
    if other:
        raise InputError(
            f"{config.data} has other maps than {config.evaluate}: {other}; "
            "give the table itself (CSV or parquet), which the run's own maps encode"
        )


def _content(folder: Path) -> dict[str, bytes]:
    """Returns the content of the files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    export = read_export(run.local_export())
    log = open_evaluation(config, export)
    check_evaluation(Data(train=None, eval=log), config, mesh)
    run.announce(mesh, config.data, f"{len(log):,} examples", log)

    tables = table_list(config, log)
    state = restore(export, tables, mesh, config.model_devices, config.exchange_room)
    eval_fn = device.compiled(eval_step, mesh)
    metrics = evaluate(eval_fn, state, log, config, mesh)
    return run.record(config, mesh, len(log), metrics)


def benchmark(config: Config, data: Data, steps_per_epoch: int) -> Benchmark | None:
    """Returns what --log mlperf says of a run: MLPerf Training's DLRM-DCNv2, or None."""
    if config.interaction != "dcn":
        return None
    hyperparameters = {
        "seed": config.seed,
        "gradient_accumulation_steps": 1,
        "opt_name": config.optimizer,
        "opt_base_learning_rate": config.lr,
        "opt_weight_decay": 0.0,
        "opt_learning_rate_warmup_steps": config.warmup_steps,
        "opt_learning_rate_decay_start_step": 0,
        "opt_learning_rate_decay_steps": 0,
    }
    if config.optimizer == "adagrad":
        hyperparameters |= {
            "opt_adagrad_epsilon": ADAGRAD_EPS,
            "opt_adagrad_initial_accumulator_value": 0.0,
            "opt_adagrad_learning_rate_decay": 0.0,
        }
    return Benchmark(
        name="dlrm_dcnv2",
        metric="auc",
        target=0.80275,
        train_samples=len(data.train),
        eval_samples=len(data.eval),
        batch_size=config.batch_size,
        samples_per_epoch=steps_per_epoch * config.batch_size,
        hyperparameters=hyperparameters,
    )


def headline(config: Config, data: Data, steps_per_epoch: int) -> str:
    """Returns what a run says first."""
    sources = splits.said(data.train, data.eval)
    return (
        f"dlrm on {config.data}: {len(data.train):,} examples, "
        f"{len(data.train.features)} tables of {sum(data.train.table_rows):,} rows, "
        f"{config.epochs} epoch(s) of {steps_per_epoch:,} steps of {config.batch_size}{sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports, or evaluates a finished run; returns the final metrics: auc,
    loss and ne of the evaluation split."""
    config = validate(resolve_config(config, EVALUATE_FLAGS, REMOVED_FIELDS))
    mesh = device.setup(
        config.seed, config.precision, config.strict, config.device, safe_forms=config.safe_forms
    )
    if config.evaluate:
        return evaluate_run(config, mesh)

    # ---- the data --------------------------------------------------------------------------------
    data = open_data(config)
    steps_per_epoch = loading.steps_per_epoch(data.train, config.batch_size, mesh)
    total_steps = config.epochs * steps_per_epoch
    check_evaluation(data, config, mesh)

    # ---- the run's folder ------------------------------------------------------------------------
    kind = "synthetic" if config.data == "synthetic" else "clicks"
    run = Run(
        config,
        mesh,
        name=f"dlrm-{kind}",
        headline=headline(config, data, steps_per_epoch),
        may_differ=MAY_CHANGE,
        sources=splits.sources_of(*data),
        older_sources=splits.sources_of(*data, of="older_source"),
        total_steps=total_steps,
        metrics=METRICS,
        benchmark=benchmark(config, data, steps_per_epoch),
    )
    if run.finished:
        return run.print_summary()

    # ---- the model and its steps -----------------------------------------------------------------
    state = build(config, data, mesh)
    start = run.resume(
        state.model,
        state.optimizer,
        examples=len(data.train),
        keep=config.keep,
        tables=embedding.TableStorage(state.embeddings),
    )
    by_plan = state.embeddings.tables_by_plan()
    run.message("tables: " + ", ".join(f"{count} {plan}" for plan, count in by_plan.items()))
    train_fn = many_steps.compiled(train_step, mesh, config.steps_a_call)
    eval_fn = device.compiled(eval_step, mesh)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    # ---- the loop --------------------------------------------------------------------------------
    loader = loading.parallel_loader(
        data.train,
        config.batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total_steps,
        shuffle=config.shuffle,
        collate=partial(collate, table_list(config, data.train)),
        workers=config.workers,
    )
    eval_every = config.eval_every or steps_per_epoch
    # All hosts of a pod agree on a stop signal, about every hundred steps: they are short.
    stop_every = math.ceil(100 / config.steps_a_call)  # in calls
    batches = []  # one for each step of the next call
    with run.training(loader, stop_every=stop_every):
        metrics = {}  # of the last evaluation in this start
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, batch in enumerate(run.batches(loader), start + 1):
            batches.append(batch)
            # A call has one learning rate, so in the warm-up each step is a call of its own.
            if not many_steps.ends_call(
                step, config.steps_a_call, total_steps, single_steps=config.warmup_steps
            ):
                continue

            lr = learning_rate(config, step - 1)
            device.set_lr(state.optimizer, lr)
            device.set_lr(state.embeddings, lr)
            step_metrics = train_fn(state, batches, config, mesh)
            steps_of_call = len(batches)
            batches = []

            # The first of the training, not of a resumed start: it is logged, as step 1 is in the
            # other scripts.
            is_first_call = step == steps_of_call
            is_due = partial(many_steps.is_due, step=step, steps=steps_of_call)
            if is_first_call or is_due(config.log_every) or step == total_steps:
                run.log(
                    step,
                    examples=step * config.batch_size,
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
                # Ids without a slot in the exchange are an error. Their count is read after the
                # next step, with the metrics of this line.
                dropped = step_metrics.get("dropped")  # None: no table is sharded
                device.after_next_step(partial(state.embeddings.check, dropped))
            evaluates = is_due(eval_every) or step == total_steps
            run.checkpoint(step, due=is_due(config.save_every), evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)

        # ---- the end -----------------------------------------------------------------------------
        run.checkpoints.wait()
        metrics = run.load_best() or metrics  # with --best: of the state that it has loaded
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        if config.data == "synthetic":
            run.message(
                f"a perfect model would reach an AUC of {data.eval.perfect_auc():.4f} "
                "on this synthetic data"
            )
        exported = run.checkpoints.folder(run.saved_step)  # the last one, or the best
        export(f"{run.path}/export", state, data, config, mesh, exported)
        run.finish(metrics)
    return metrics


PRESETS = {
    "kaggle": ("Criteo Kaggle; needs --data and an accelerator", Config()),
    "clicks": ("a log of your own, from `make data DATASET=clicks`; needs --data", CLICKS),
    "mlperf_v1": (
        "Criteo Terabyte, one-hot, 40M rows at most a table; needs --data and accelerators",
        MLPERF_V1,
    ),
    "terabyte": ("the same as mlperf_v1", MLPERF_V1),
    "mlperf_v2": ("Criteo Terabyte, multi-hot, DCN-v2; needs --data and accelerators", MLPERF_V2),
    "tiny": ("small tables and synthetic clicks: half a minute on a CPU", TINY),
}


def preset_of(data: str) -> str:
    """Returns the preset for --data where none is given."""
    return "clicks" if criteo.is_own_log(data) else "kaggle"


if __name__ == "__main__":
    cli.run(main, PRESETS, preset_of)
