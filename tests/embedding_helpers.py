"""What the tests of train/common/embedding share: tables, batches, torch's side of a comparison,
checkpoints.

Tolerance. Both sides compute in float32 (epsilon 1.2e-7), but add the gradients of equal rows, and
the loss, in another order: a few roundings of numbers of at most 1, some steps long. Where the
optimizer divides by a root of few squared gradients, their relative error passes on to the weight
undamped, times the learning rate. 2e-6 is above what that gives, and a thousandth of what a wrong
or lost gradient does: rows move by 0.005 to 0.2.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import on_mesh, update
from torch import Tensor, nn, optim

from bench.embedding import squared_error
from models.hashing import hash32
from train.common import device
from train.common.checkpoint import Checkpointer
from train.common.embedding import (
    OPTIMIZERS,
    SGD,
    RowWiseAdagrad,
    ShardedEmbeddingBags,
    Table,
    TableStorage,
)
from train.common.embedding.owners import TableRun
from train.common.mesh import Mesh

TOLERANCE = 2e-6
DIM = 16
BATCH = 48
# One-hot and multi-hot, sum and mean, tables smaller than a batch and one that is larger.
TABLES = (
    Table("user", 1000),
    Table("tags", 37, 3, "mean"),
    Table("item", 20_000),
    Table("shop", 12, 2),
    Table("day", 3),
    Table("words", 700, 4, "mean"),
    Table("hour", 64),
)
MIXED = ("exchange", "data", "exchange", "data", "exchange", "exchange", "data")
LR = {"sgd": 0.05, "rowwise_adagrad": 0.05, "adagrad": 0.05, "lazy_adam": 0.02}
RATES = (1, 0, 0.5, 1)  # of each step, times LR
SEED = 3_000_000_000  # no int32


# Embeddings and batches


def with_plan(plan: str, tables=TABLES) -> list[Table]:
    """Returns the tables with a plan each: all with the same, or MIXED."""
    plans = MIXED if plan == "mixed" else [plan] * len(tables)
    planned = []
    for table, own_plan in zip(tables, plans, strict=True):
        planned.append(dataclasses.replace(table, plan=own_plan))
    return planned


def make(
    mesh,
    plan="mixed",
    optimizer="sgd",
    model_devices=0,
    seed=0,
    tables=TABLES,
    dim=DIM,
) -> ShardedEmbeddingBags:
    """Makes the embeddings of TABLES, or others."""
    return ShardedEmbeddingBags(
        with_plan(plan, tables),
        dim,
        mesh,
        OPTIMIZERS[optimizer](),
        LR[optimizer],
        seed,
        model_devices,
    )


def in_lines(mesh: Mesh) -> Mesh:
    """Returns a mesh that says that it is a TPU's: tables have rows side by side in lines of
    128."""
    return dataclasses.replace(mesh, kind="TPU v4")


def put(mesh, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uploads the rows of a batch that this process loads, as the loader does: sharded over the
    first dimension."""
    uploaded = {}
    for key, value in batch.items():
        uploaded[key] = device.upload(value[mesh.rows(len(value))], mesh)
    return uploaded


def draw_ids(table: Table, kind: str, generator: torch.Generator) -> Tensor:
    """Draws ids [BATCH, lookups]: "power law", so that they come again within and across examples;
    "one" for all; "eighth": with a common divisor."""
    random = torch.rand(BATCH, table.lookups, generator=generator)
    if kind == "one":
        return torch.full(random.shape, table.rows // 2, dtype=torch.int32)
    if kind == "eighth":
        return ((random * table.rows / 8).floor() * 8).int()
    return ((table.rows + 1) ** random - 1).int()


def host_batch(
    step: int, tables=TABLES, ragged: bool = True, ids: tuple[str, ...] = ("power law",)
) -> dict[str, Tensor]:
    """Returns the batch of a step: ids of each kind in turn, present, and targets y [BATCH, tables,
    DIM]."""
    generator = torch.Generator().manual_seed(step)
    kind = ids[step % len(ids)]
    ids_of_tables = [draw_ids(table, kind, generator) for table in tables]
    batch = {"ids": torch.cat(ids_of_tables, 1)}
    if ragged:
        lookups = torch.tensor([table.lookups for table in tables])
        is_bag = torch.rand(BATCH, len(tables), generator=generator) < 0.85
        is_id = torch.rand(batch["ids"].shape, generator=generator) < 0.7
        batch["present"] = (is_bag.repeat_interleave(lookups, 1) & is_id).float()
    batch["y"] = torch.rand(BATCH, len(tables), DIM, generator=generator)
    return batch


def whole(pieces: Mapping[str, Tensor], tables=TABLES) -> dict[tuple[str, str], Tensor]:
    """Returns (table, weight or state) -> all of it, put together from pieces that must not overlap
    or leave gaps."""
    rows_of = {table.name: table.rows for table in tables}
    found = {}
    for key, piece in pieces.items():
        if key == "step":
            continue
        name, kind, _, first_column = key.split("/")
        shape = [rows_of[name]]
        where = [TableRun.of_piece(key).table_rows(0, piece.shape[0])]
        if piece.dim() == 2:
            column = int(first_column)
            shape.append(DIM)
            where.append(slice(column, column + piece.shape[1]))
        where = tuple(where)

        array = found.setdefault((name, kind), torch.full(shape, float("nan")))
        assert array[where].shape == piece.shape
        assert array[where].isnan().all()
        array[where] = piece

    for array in found.values():
        assert not array.isnan().any()
    return found


# Forward passes and steps


def pooled(embeddings, batch):
    return embeddings(batch["ids"], batch.get("present"))


def in_two_passes(embeddings, batch):
    """Pools the halves of a batch one after the other."""
    size = len(batch["ids"]) // 2
    results = []
    for first in (0, size):
        half = {name: value[first : first + size] for name, value in batch.items()}
        results.append(pooled(embeddings, half))
    return torch.cat(results)


def as_vocabulary(embeddings, batch):
    """Reads one id per bag, as a language model does: a row for every position of a sequence.
    Returns the mean of each sequence [BATCH, 1, DIM]."""
    rows = embeddings(batch["ids"].reshape(-1, 1))
    return rows.reshape(BATCH, -1, 1, DIM).mean(1)


def train_step(embeddings, batch, forward):
    loss = squared_error(forward(embeddings, batch), batch["y"])
    loss.backward()
    embeddings.step()
    return loss.detach()


def loaded_step(embeddings, batch):
    """Trains on a batch; returns the pooled rows and the load."""
    result = pooled(embeddings, batch)
    squared_error(result, batch["y"]).backward()
    return {"pooled": result.detach() + 0, **embeddings.step()}


# Too little room for an exchange


@dataclass(frozen=True)
class Shortage:
    """Too little room for ids, and the sentence that says so."""

    room: tuple[float, float]  # at a pair of devices, at an owner
    message: str


SHORTAGES = {
    "pair": Shortage(
        (0.3, 1.0),
        r"the fullest pair .* needed 1\.[1-9].*--exchange-room 0\.\d 1 or more instead of 0.3 1",
    ),
    "owner": Shortage(
        (1.0, 0.2),
        r"the fullest device 1\.[1-9].* give --exchange-room 1 0\.\d or more instead of 1 0.2",
    ),
}
EXCHANGED = with_plan("exchange", [Table("one", 5000), Table("other", 700)])


def with_room(mesh, room: tuple[float, float]) -> ShardedEmbeddingBags:
    """Makes the embeddings of EXCHANGED."""
    return ShardedEmbeddingBags(EXCHANGED, DIM, mesh, SGD(), 0.1, 0, room=room)


def different_ids() -> Tensor:
    """Draws ids [BATCH, 2] of EXCHANGED, each once."""
    return torch.randperm(700)[: 2 * BATCH].reshape(BATCH, 2).int()


# The reference: torch on the CPU


def torchrecs(weights, lr):
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as Theirs

    return Theirs(weights, lr, eps=RowWiseAdagrad.eps)


REFERENCES = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "lazy_adam": optim.SparseAdam,
    "rowwise_adagrad": torchrecs,
}


def reference_pooled(weights, batch, tables=TABLES, sparse=False) -> Tensor:
    """Returns what nn.EmbeddingBag's function makes of bags without their absent ids."""
    present = batch.get("present", torch.ones(batch["ids"].shape))
    widths = [table.lookups for table in tables]
    all_ids = torch.split(batch["ids"].long(), widths, 1)
    all_present = torch.split(present, widths, 1)
    results = []
    for ids, here, table, weight in zip(all_ids, all_present, tables, weights, strict=True):
        is_present = here > 0
        ends = is_present.sum(1).cumsum(0)
        offsets = F.pad(ends[:-1], (1, 0))
        results.append(
            F.embedding_bag(
                ids[is_present],
                weight,
                offsets,
                mode=table.pooling,
                sparse=sparse,
            )
        )
    return torch.stack(results, 1)


def expected_initial(number: int, rows: int) -> Tensor:
    """Returns the initial weights of a table, which depend on the seed alone."""
    (salt,) = np.random.SeedSequence((SEED, number)).generate_state(1)
    row = hash32(torch.arange(rows, dtype=torch.int32) ^ int(salt.astype(np.int32)))
    column = torch.arange(DIM, dtype=torch.int32) * 0x01000193
    bits = hash32(row[:, None] + column)
    uniform = (bits >> 8 & 0xFFFFFF).float() * 2.0**-23 - 1  # in [-1, 1)
    return uniform * rows**-0.5


def assert_parity(
    mesh, plan, optimizer, model_devices=0, tables=TABLES, forward=pooled, evaluates=False, **ids
) -> ShardedEmbeddingBags:
    """Trains on the mesh and on the CPU from the same weights, asserts that both have the same;
    returns the embeddings. A step that is compiled again, or falls back to the host, raises.

    Args:
        evaluates: an evaluation comes before each update, which leaves nothing to update.
        ids: options of host_batch.
    """
    made_tables = tables
    if forward is as_vocabulary:
        made_tables = [dataclasses.replace(table, lookups=1) for table in tables]
    embeddings = make(mesh, plan, optimizer, model_devices, SEED, made_tables)
    weights = []
    for number, table in enumerate(tables):
        weights.append(nn.Parameter(expected_initial(number, table.rows)))
    before = whole(embeddings.pieces(), tables)
    for table, weight in zip(tables, weights, strict=True):
        assert torch.equal(before[table.name, "weight"], weight), f"initial weights of {table.name}"

    near = partial(torch.testing.assert_close, rtol=0, atol=TOLERANCE)
    reference = REFERENCES[optimizer](weights, lr=LR[optimizer])
    step = device.compiled(train_step, mesh)
    evaluation = device.compiled(torch.no_grad()(pooled), mesh)
    losses = []
    expected = []
    for number, rate in enumerate(RATES):
        device.set_lr(embeddings, rate * LR[optimizer])
        reference.param_groups[0]["lr"] = rate * LR[optimizer]
        batch = host_batch(number, tables, **ids)
        uploaded = put(mesh, batch)

        if evaluates:
            evaluated = evaluation(embeddings, uploaded).cpu()
            near(evaluated, reference_pooled(weights, batch, tables).detach())
            with pytest.raises(RuntimeError, match="needs a forward pass and a backward pass"):
                embeddings.step()
        losses.append(step(embeddings, uploaded, forward))

        sparse = optimizer != "rowwise_adagrad"  # which torchrec's does not take
        loss = squared_error(reference_pooled(weights, batch, tables, sparse), batch["y"])
        reference.zero_grad()
        loss.backward()
        reference.step()
        expected.append(loss.item())
    embeddings.check()

    after = whole(embeddings.pieces(), tables)
    assert device.fetch(losses) == pytest.approx(expected, rel=TOLERANCE)
    for table, weight in zip(tables, weights, strict=True):
        near(after[table.name, "weight"], weight.data)
        for kind in OPTIMIZERS[optimizer].states:
            state = after[table.name, kind]
            near(state, reference.state[weight][kind].reshape(state.shape))
        moved = (weight.data - before[table.name, "weight"]).abs().max()
        assert moved > 0.005, f"{table.name} did not learn: this comparison shows nothing"
    return embeddings


# Checkpoints


def dense(mesh, seed: int = 0):
    """Makes the part of a model that is no table, and its optimizer."""
    torch.manual_seed(seed)
    sgd = partial(optim.SGD, lr=0.05, momentum=0.9, foreach=False)
    return on_mesh(mesh, nn.Linear(DIM, 1), sgd)


def step_of_both(embeddings, model, optimizer, batch):
    """Trains the tables and the rest of a model; returns the loss."""
    embedded = embeddings(batch["ids"], batch["present"])
    loss = update(squared_error(embedded * model(embedded), batch["y"]), optimizer)
    embeddings.step()
    return loss


def train_both(
    mesh, step: Callable, embeddings, model, optimizer, first: int, stop: int
) -> list[float]:
    """Trains the steps from `first` to `stop` with a compiled step_of_both; returns the losses."""
    losses = []
    for number in range(first, stop):
        batch = put(mesh, host_batch(number))
        losses.append(step(embeddings, model, optimizer, batch))
    return device.fetch(losses)


def filled(mesh, optimizer="adagrad", value: float = 1.0, plan="mixed") -> ShardedEmbeddingBags:
    """Makes embeddings whose arrays hold numbers of their own, as after some training, without a
    step to compile."""
    embeddings = make(mesh, plan, optimizer)
    for array in embeddings.arrays:
        specs = [array.spec, *array.state_specs]
        for (_, tensor), spec in zip(array.tensors(), specs, strict=True):
            numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
            tensor.copy_(value + numbers * 1e-3)
            embeddings.devices.annotate(tensor, spec)
    embeddings.step_count.copy_(torch.tensor(1000 * value))
    embeddings.devices.annotate_replicated(embeddings.step_count)
    device.run_pending()
    return embeddings


def save(place: str, embeddings, mesh, step: int) -> None:
    """Saves embeddings beside a new dense part."""
    tables = TableStorage(embeddings)
    with Checkpointer(place, main_process=mesh.main_process, tables=tables) as checkpoints:
        checkpoints.save(step, *dense(mesh))


def restore(place: str, embeddings, mesh, rest=None) -> int:
    """Restores embeddings and the dense part, by default a new one; returns the step."""
    model, optimizer = rest or dense(mesh)
    return Checkpointer(place, tables=TableStorage(embeddings)).restore(model, optimizer, mesh)


def state_sums(embeddings) -> dict[str, int]:
    """Returns a checksum of each table and each of its states."""
    sums = {}
    for (name, kind), tensor in whole(embeddings.pieces()).items():
        sums[f"{name}/{kind}"] = zlib.crc32(tensor.numpy())
    return sums
