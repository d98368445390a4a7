"""train/common/embedding: every plan and optimizer against torch on the CPU, on 1, 4, 6 and 8 devices.

Tolerance. Both sides compute in float32 (epsilon 1.2e-7), but add the gradients of equal rows, and the loss, in another
order: a few roundings of numbers of at most 1, some steps long. Where the optimizer divides by a root of few squared
gradients, their relative error passes on to the weight undamped, times the learning rate. 2e-6 is above what that
gives, and a thousandth of what a wrong or lost gradient does: rows move by 0.005 to 0.2.
"""

import copy
import dataclasses
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import scipy.stats
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from checkpoints import damage, flip
from helpers import DUMP, environment, equal, largest_dump, on_mesh, read_program, update
from torch import nn, optim

from bench import embedding as bench
from bench.embedding import squared_error
from errors import InputError
from models.hashing import hash32
from tpu.compiler import hlo
from train.common import device
from train.common.checkpoint import Checkpointer
from train.common.embedding import OPTIMIZERS, ShardedEmbeddingBags, Table, TableStorage, exchange, hashing, storage
from train.common.embedding import pieces as pieces_of
from train.common.embedding import tables as emb
from train.common.xla import backend as xla

ROOT = Path(__file__).parents[1]
TOLERANCE = 2e-6
DIM, BATCH = 16, 48
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
MIXED = ("exchange", "data", "row", "table", "column", "table", "exchange")
CUT = ("exchange", "row", "table", "column", "data")
LR = {"sgd": 0.05, "rowwise_adagrad": 0.05, "adagrad": 0.05, "lazy_adam": 0.02}
RATES = (1, 0, 0.5, 1)  # of each step, times LR
SEED = 3_000_000_000  # no int32
DUMPING = 8  # devices of the process that writes its programs


def with_plan(plan: str, tables=TABLES):
    plans = MIXED if plan == "mixed" else [plan] * len(tables)
    return [dataclasses.replace(table, plan=own) for table, own in zip(tables, plans, strict=True)]


def make(mesh, plan="mixed", optimizer="sgd", model_devices=0, seed=0, tables=TABLES, dim=DIM):
    made, lr = OPTIMIZERS[optimizer](), LR[optimizer]
    return ShardedEmbeddingBags(with_plan(plan, tables), dim, mesh, made, lr, seed, model_devices)


def put(mesh, batch):
    """As the loader uploads a batch: sharded over the first dimension."""
    return {key: device.upload(value, mesh) for key, value in batch.items()}


def host_batch(step: int, tables=TABLES, ragged: bool = True, ids: tuple[str, ...] = ("power law",)):
    """Ids by a power law, so that they come again within and across examples; one for all; with a common divisor."""
    generator, kind = torch.Generator().manual_seed(step), ids[step % len(ids)]

    def draw(table):
        random = torch.rand(BATCH, table.lookups, generator=generator)
        if kind == "one":
            return torch.full(random.shape, table.rows // 2, dtype=torch.int32)
        if kind == "eighth":
            return ((random * table.rows / 8).floor() * 8).int()
        return ((table.rows + 1) ** random - 1).int()

    batch = {"ids": torch.cat([draw(table) for table in tables], 1)}
    if ragged:
        bags = torch.rand(BATCH, len(tables), generator=generator) < 0.85
        bags = bags.repeat_interleave(torch.tensor([table.lookups for table in tables]), 1)
        batch["present"] = (bags & (torch.rand(batch["ids"].shape, generator=generator) < 0.7)).float()
    batch["y"] = torch.rand(BATCH, len(tables), DIM, generator=generator)
    return batch


def whole(pieces, tables=TABLES) -> dict[tuple[str, str], torch.Tensor]:
    """(table, weight or state) -> all of it, put together from pieces that must not overlap or leave gaps."""
    found = {}
    for key, piece in pieces.items():
        if key == "step":
            continue
        name, kind, _, column = key.split("/")
        rows = next(table.rows for table in tables if table.name == name)
        shape = (rows, DIM) if piece.dim() == 2 else (rows,)
        array = found.setdefault((name, kind), torch.full(shape, float("nan")))
        part = (pieces_of.Rows.of_piece(key).numbers(0, piece.shape[0]),)
        part += (slice(int(column), int(column) + piece.shape[1]),) if piece.dim() == 2 else ()
        assert array[part].shape == piece.shape and array[part].isnan().all()
        array[part] = piece
    assert not any(array.isnan().any() for array in found.values())
    return found


# ---- the reference: torch on the CPU ---------------------------------------------------------------------------------
def torchrecs(weights, lr):
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    return RowWiseAdagrad(weights, lr, eps=emb.RowWiseAdagrad.eps)


REFERENCES = {"sgd": optim.SGD, "adagrad": optim.Adagrad, "lazy_adam": optim.SparseAdam, "rowwise_adagrad": torchrecs}


def reference_pooled(weights, batch, tables=TABLES, sparse=False):
    """nn.EmbeddingBag's function on bags without their absent ids."""
    present = batch.get("present", torch.ones(batch["ids"].shape))
    widths, pooled = [table.lookups for table in tables], []
    parts = zip(torch.split(batch["ids"].long(), widths, 1), torch.split(present, widths, 1), strict=True)
    for (ids, here), table, weight in zip(parts, tables, weights, strict=True):
        offsets = F.pad((here > 0).sum(1).cumsum(0)[:-1], (1, 0))
        pooled.append(F.embedding_bag(ids[here > 0], weight, offsets, mode=table.pooling, sparse=sparse))
    return torch.stack(pooled, 1)


def pooled(embeddings, batch):
    return embeddings(batch["ids"], batch.get("present"))


def in_two_passes(embeddings, batch):
    halves = [{name: value[first : first + BATCH // 2] for name, value in batch.items()} for first in (0, BATCH // 2)]
    return torch.cat([pooled(embeddings, half) for half in halves])


def as_vocabulary(embeddings, batch):
    """One id per bag, as in a language model: a row for every place of a sequence; here their mean."""
    return embeddings(batch["ids"].reshape(-1, 1)).reshape(BATCH, -1, 1, DIM).mean(1)


def train_step(embeddings, batch, forward):
    loss = squared_error(forward(embeddings, batch), batch["y"])
    loss.backward()
    embeddings.step()
    return loss.detach()


def expected_initial(number: int, rows: int) -> torch.Tensor:
    """The initial weights of a table, which depend on the seed alone."""
    salt = int(np.random.SeedSequence((SEED, number)).generate_state(1)[0].astype(np.int32))
    row = hash32(torch.arange(rows, dtype=torch.int32) ^ salt)[:, None]
    bits = hash32(row + torch.arange(DIM, dtype=torch.int32) * 0x01000193)
    return ((bits >> 8 & 0xFFFFFF).float() * 2.0**-23 - 1) * rows**-0.5


def in_lines(mesh):
    """A mesh that says that it is a TPU's: tables have rows side by side in lines of 128."""
    return dataclasses.replace(mesh, kind="TPU v4")


def assert_parity(mesh, plan, optimizer, model_devices=0, tables=TABLES, forward=pooled, evaluates=False, **ids):
    """Trains on the mesh and on the CPU from the same weights, asserts that both have the same; returns the embeddings.
    A step that is compiled again, or falls back to the host, raises.

    Args:
        evaluates: an evaluation comes before each update, which leaves nothing to update.
        ids: options of host_batch.
    """
    own = [dataclasses.replace(table, lookups=1) for table in tables] if forward is as_vocabulary else tables
    embeddings = make(mesh, plan, optimizer, model_devices, SEED, own)
    weights = [nn.Parameter(expected_initial(number, table.rows)) for number, table in enumerate(tables)]
    before, near = whole(embeddings.pieces(), tables), partial(torch.testing.assert_close, rtol=0, atol=TOLERANCE)
    for table, weight in zip(tables, weights, strict=True):
        assert torch.equal(before[table.name, "weight"], weight), f"initial weights of {table.name}"
    reference = REFERENCES[optimizer](weights, lr=LR[optimizer])
    step, evaluation = device.compiled(train_step, mesh), device.compiled(torch.no_grad()(pooled), mesh)
    losses, expected = [], []
    for number, rate in enumerate(RATES):
        device.set_lr(embeddings, rate * LR[optimizer])
        reference.param_groups[0]["lr"] = rate * LR[optimizer]
        batch = host_batch(number, tables, **ids)
        uploaded = put(mesh, batch)
        if evaluates:
            near(evaluation(embeddings, uploaded).cpu(), reference_pooled(weights, batch, tables).detach())
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
            near(after[table.name, kind], reference.state[weight][kind].reshape(after[table.name, kind].shape))
        moved = (weight.data - before[table.name, "weight"]).abs().max()
        assert moved > 0.005, f"{table.name} did not learn: this comparison shows nothing"
    return embeddings


# ---- parity ----------------------------------------------------------------------------------------------------------
ONE_HOT = [dataclasses.replace(table, lookups=1) for table in TABLES]
VOCABULARY = {"tables": [Table("words", 60, 5, "mean")], "ragged": False, "forward": as_vocabulary}
# "mixed" has all plans. Each of them alone, and a 2-D mesh without lines: see OTHER_COMBINATIONS.
WAYS = {
    "ragged bags": ("mixed", "sgd", {}),
    "bags always full": ("mixed", "adagrad", {"ragged": False}),
    "one id per bag": ("mixed", "rowwise_adagrad", {"ragged": False, "tables": ONE_HOT}),
    "two passes and an evaluation": ("mixed", "lazy_adam", {"forward": in_two_passes, "evaluates": True}),
    "any ids": ("exchange", "sgd", {"ids": ("one", "eighth")}),
    "in lines": ("mixed", "rowwise_adagrad", {}),
    "in lines, 2-D mesh": ("mixed", "lazy_adam", {"model_devices": 2}),
    "nn.Embedding, exchange": ("exchange", "lazy_adam", VOCABULARY),
    "nn.Embedding, auto": ("auto", "sgd", VOCABULARY),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_torch_on_four_devices(mesh, way):
    plan, optimizer, options = WAYS[way]
    packed = way.startswith("in lines")
    embeddings = assert_parity(in_lines(mesh) if packed else mesh, plan, optimizer, **options)
    assert plan != "mixed" or set(embeddings.plan.plans) == set(emb.PLANS)
    lanes, parts = 128 // DIM, options.get("model_devices", 4)
    packs = {array.weight.shape[1] // DIM for array in embeddings.arrays}
    assert packs == ({lanes, lanes * parts} if packed else {1})  # the latter: by columns


def test_arrays_of_one_size_can_live_at_the_same_time(mesh):
    """The second is padded, and rows that it has only for that are in use: its state must have them, too."""
    tables = [Table("only", 64, 4)]
    first = make(mesh, "row", "sgd", tables=tables)
    second = assert_parity(mesh, "row", "rowwise_adagrad", tables=tables)
    assert second.arrays[0].rows > first.arrays[0].rows


# ---- plan exchange: who owns a row, and how many rows there is room for ----------------------------------------------
NUMBERS = np.concatenate([np.arange(3000), 2**24 + np.arange(-9, 9), 2**31 - 300 + np.arange(290)])


@pytest.mark.parametrize("parts", [1, 6, 256])
def test_every_row_has_one_owner_and_one_place(mesh, parts):
    on_device = torch.tensor(NUMBERS, dtype=torch.int32).to(mesh.device)
    owner, local = hashing.owner_of(on_device, parts)
    assert torch.equal(hashing.row_of(owner, local, parts).cpu(), on_device.cpu())
    owner, local = owner.cpu().numpy(), local.cpu().numpy()
    assert np.array_equal(local, NUMBERS // parts) and owner.min() == 0 and owner.max() == parts - 1
    blocks = owner[: 3000 - 3000 % parts].reshape(-1, parts)
    assert np.array_equal(np.sort(blocks, 1), np.broadcast_to(np.arange(parts), blocks.shape))  # each has as many
    if parts > 1:  # rows with a common divisor are shared out, too
        counts = np.bincount(owner[:3000:parts], minlength=parts)
        assert counts.max() < 3000 / parts**2 + 6 * (3000 / parts**2) ** 0.5 + 3


def test_integers_that_float32_has_not_are_exact(mesh):
    """torch_xla divides int32 in float32."""
    on_device = torch.tensor(NUMBERS, dtype=torch.int32).to(mesh.device)
    for by in (1, 3, 5000, 2**27 + 1):
        quotient, rest = (part.cpu().numpy() for part in hashing.divide(on_device, by))
        assert np.array_equal(quotient, NUMBERS // by) and np.array_equal(rest, NUMBERS % by)
    line, own = emb._place(on_device, 128, 16)
    assert np.array_equal(line.cpu().numpy(), NUMBERS // 8)
    assert np.array_equal(own.cpu().int().argmax(1).numpy(), NUMBERS % 8 * 16)
    # Dropout has the same hash: train/common and models/ each have a copy, since neither imports the other.
    assert torch.equal(hashing.hash32(on_device), hash32(on_device))


def test_there_is_room_for_all_ids_of_ten_million_steps():
    for mean, events in ((0.4, 65_536), (54, 65_536), (512, 64), (4096, 8)):
        capacity = exchange.planned(mean, events, 1.0, 10**9)
        assert 1e7 * events * scipy.stats.poisson.sf(capacity, mean) < 1e-6
        assert 1e7 * events * scipy.stats.poisson.sf(0.9 * capacity - 9, mean) > 1e-6, "more than is needed"
        assert exchange.planned(mean, events, 1.0, 17) <= 17 <= exchange.planned(mean, events, 1e3, 10**9)


def loaded_step(embeddings, batch):
    found = pooled(embeddings, batch)
    squared_error(found, batch["y"]).backward()
    return {"pooled": found.detach() + 0, **embeddings.step()}


OVERFLOWS = {
    "pair": ((0.3, 1.0), r"the fullest pair .* had 1\.[1-9].* give --exchange-room 0\.\d 1 or more instead of 0.3 1"),
    "owner": ((1.0, 0.2), r"the fullest device 1\.[1-9].* give --exchange-room 1 0\.\d or more instead of 1 0.2"),
}


@pytest.mark.parametrize("where", OVERFLOWS)
def test_ids_without_a_place_stop_the_run_before_anything_is_saved(mesh, tmp_path, where):
    """What has a place is right. In the second step all ids have one; what was dropped before stays counted."""
    (room, message), tables = OVERFLOWS[where], with_plan("exchange", [Table("one", 5000), Table("other", 700)])
    ids = torch.randperm(700)[: 2 * BATCH].reshape(BATCH, 2).int()
    batch = host_batch(0, tables, ragged=False) | {"ids": ids}
    bags = partial(ShardedEmbeddingBags, tables, DIM, mesh, emb.SGD(), 0.1, 0)
    few, enough, evaluated = bags(room=room), bags(room=(1.0, 1.0)), bags(room=room)
    results, changed = [], []
    for embeddings in (few, enough):
        before, step = embeddings.arrays[0].weight.cpu(), device.compiled(loaded_step, mesh)
        results.append(step(embeddings, put(mesh, batch)))
        changed.append((embeddings.arrays[0].weight.cpu() != before).any(1).sum().item())
        step(embeddings, put(mesh, batch | {"ids": ids * 0}))
    found, expected = results
    lost, dropped = (found["pooled"] == 0).all(-1), found["dropped"].item()
    assert torch.equal(found["pooled"][~lost], expected["pooled"][~lost])
    assert lost.sum().item() == (dropped if where == "pair" else 0)
    assert changed == [2 * BATCH - dropped, 2 * BATCH] and few.load[0].item() == dropped > 0
    fill = bench.exchange_fill((ids + torch.tensor([0, 5000])).int().reshape(4, -1))
    assert expected["dropped"].item() == 0 and max(fill.pair, fill.update) <= 1
    assert [expected["pair_load"].item(), expected["update_load"].item()] == pytest.approx([fill.pair, fill.update])
    with torch.no_grad():
        evaluated(put(mesh, batch)["ids"])
    torch_xla.sync()
    stops = [few.check, lambda: few.check(found["dropped"]), lambda: save(str(tmp_path), few, mesh, 1)]
    for stop in stops + [evaluated.check] * (where == "pair"):
        with pytest.raises(InputError, match=message):
            stop()
    assert Checkpointer(str(tmp_path)).complete_steps() == []
    save(str(tmp_path), enough, mesh, 1)


# ---- other numbers of devices, and what is compiled ------------------------------------------------------------------
BIG = (Table("one", 30_000), Table("other", 18_000), Table("tags", 9_000, 3, "mean"), Table("shop", 12, 2), TABLES[4])
DUMPED = dict(exchange="lazy_adam", row="rowwise_adagrad", table="adagrad", column="lazy_adam", data="adagrad")
OTHER_COMBINATIONS = {
    1: [("mixed", "lazy_adam")],
    6: [("exchange", "lazy_adam"), ("exchange", "adagrad", 3)],
    8: [("mixed", "rowwise_adagrad", 4)],
}
PLANS_ON = {1: ("mixed",), 6: ("row", "exchange"), 8: ("mixed",)}


def dump_modules(mesh, folder: str) -> dict:
    """Asserts parity for each of DUMPED. Returns the programs of the initial weights and of the train step, and the
    elements of a device's part of an array."""
    found, seen = {}, set()
    for plan, optimizer in DUMPED.items():
        make(mesh, plan, optimizer, seed=SEED, tables=BIG)
        xm.wait_device_ops()
        initial = largest_dump(folder, seen)
        array = assert_parity(mesh, plan, optimizer, tables=BIG).arrays[0]
        found[plan] = str(initial), str(largest_dump(folder, seen)), array.local_rows * array.local_dim
    return found


def on_devices(place: str, folder: str) -> dict:
    """Runs in a process of its own: parity, and both ways of a checkpoint (see test_… below)."""
    mesh, restored = device.setup(0, "float32"), {}
    modules = dump_modules(mesh, folder) if mesh.num_devices == DUMPING else {}
    for combination in OTHER_COMBINATIONS[mesh.num_devices]:
        embeddings = assert_parity(mesh, *combination)
        assert mesh.num_devices > 1 or set(embeddings.plan.plans) == {"data"}
    for plan in PLANS_ON[mesh.num_devices]:
        embeddings = make(mesh, plan, "lazy_adam")
        assert restore(place, embeddings, mesh) == 3
        restored[plan] = [state_sums(embeddings), embeddings.step_count.item()]
    save(f"{place}-{mesh.num_devices}", embeddings, mesh, 7)
    losses = train_both(mesh, device.compiled(step_of_both, mesh), embeddings, *dense(mesh), 3, 5)
    return {"restored": restored, "losses": losses, "modules": modules}


def start(place: str, folder: str, devices: int) -> subprocess.Popen:
    """Starts `on_devices` of this file; its last line of output is JSON."""
    code = f"import json, test_embedding as t; print(json.dumps(t.on_devices({place!r}, {folder!r})))"
    variables = environment(devices, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    if devices == DUMPING:
        variables["XLA_FLAGS"] = DUMP.format(folder)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=variables, **pipes)


def answer(process: subprocess.Popen) -> dict:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def state_sums(embeddings) -> dict[str, int]:
    return {f"{name}/{kind}": zlib.crc32(array.numpy()) for (name, kind), array in whole(embeddings.pieces()).items()}


@pytest.fixture(scope="module")
def other_devices(mesh, tmp_path_factory) -> dict:
    """What `on_devices` gives with other numbers of devices, on a checkpoint that 4 have made."""
    place, folder = (str(tmp_path_factory.mktemp("devices") / name) for name in ("checkpoints", "modules"))
    embeddings, model, optimizer = make(mesh, "mixed", "lazy_adam"), *dense(mesh)
    step = device.compiled(step_of_both, mesh)
    train_both(mesh, step, embeddings, model, optimizer, 0, 3)
    save(place, embeddings, mesh, 3)
    found = {"place": place, "expected": [state_sums(embeddings), embeddings.step_count.item()]}
    found["losses"] = train_both(mesh, step, embeddings, *dense(mesh), 3, 5)
    processes = {devices: start(place, folder, devices) for devices in PLANS_ON}
    return found | {devices: answer(process) for devices, process in processes.items()}


def elements(shape: hlo.Shape) -> int:
    """Returns the elements of the largest array of a shape."""
    return max(map(elements, shape.elements), default=math.prod(shape.dimensions))


def instructions(module: hlo.Module) -> list[hlo.Instruction]:
    return [instruction for each in module.computations.values() for instruction in each.instructions]


@pytest.mark.parametrize("plan", DUMPED)
def test_nothing_in_the_step_is_as_large_as_a_table_but_the_update_in_place(other_devices, plan):
    initial, module, part = other_devices[DUMPING]["modules"][plan]
    initial, module = read_program(initial), read_program(module)
    arrays = 1 + list(OPTIMIZERS[DUMPED[plan]].states.values()).count("full")

    def large(shapes: list[hlo.Shape]) -> list[str]:
        return sorted(shape.text for shape in shapes if elements(shape) >= part // 2)

    named = ("parameter", "bitcast", "get-tuple-element", "tuple")  # no memory of their own
    big = [one for one in instructions(module) if elements(one.shape) >= part // 2 and one.opcode not in named]
    operations, names = Counter(one.opcode for one in big), [f"{one.name} {one.shape}" for one in big]
    # No copy, all-gather, all-reduce, broadcast (a dense gradient), add or sort of that size.
    assert operations.keys() <= {"scatter", "fusion", "call"} and operations["scatter"] == arrays, names
    # Weight and states come in and go out in the same memory, and have sizes of their own.
    inputs, outputs = [one.shape for one in module.parameters], module.entry.root.shape.elements
    in_place = [outputs[o] for o, i in module.input_output_alias if inputs[i].text == outputs[o].text]
    assert len(large(inputs)) == len(set(large(inputs))) == arrays
    assert large(in_place) == large(inputs) == large(outputs)
    # Each device makes its own part of the initial weights.
    assert part <= max(elements(one.shape) for one in instructions(initial)) < 1.01 * part, "more was made"
    everything = sum(table.rows for table in BIG) * DIM
    expected = {"table": 30_000 * DIM, "data": everything}.get(plan, everything / DUMPING)
    assert part == pytest.approx(expected, rel=0.05)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def dense(mesh, seed: int = 0):
    """The part of a model that is no table."""
    torch.manual_seed(seed)
    return on_mesh(mesh, nn.Linear(DIM, 1), partial(optim.SGD, lr=0.05, momentum=0.9, foreach=False))


def step_of_both(embeddings, model, optimizer, batch):
    embedded = embeddings(batch["ids"], batch["present"])
    loss = update(squared_error(embedded * model(embedded), batch["y"]), optimizer)
    embeddings.step()
    return loss


def train_both(mesh, step, embeddings, model, optimizer, first: int, stop: int) -> list[float]:
    losses = [step(embeddings, model, optimizer, put(mesh, host_batch(number))) for number in range(first, stop)]
    return device.fetch(losses)


def filled(mesh, optimizer="adagrad", value: float = 1.0):
    """Embeddings whose arrays hold numbers of their own, as after some training, without a step to compile."""
    embeddings = make(mesh, "mixed", optimizer)
    for array in embeddings.arrays:
        for tensor, spec in zip([array.weight, *array.states], [array.spec, *array.state_specs], strict=True):
            tensor.copy_(value + torch.arange(tensor.numel()).reshape(tensor.shape) * 1e-3)
            xs.mark_sharding(tensor, embeddings.sharding.spmd, spec)
    embeddings.step_count.copy_(torch.tensor(1000 * value))
    embeddings.sharding.annotate_replicated(embeddings.step_count)
    torch_xla.sync()
    return embeddings


def save(place: str, embeddings, mesh, step: int) -> None:
    with Checkpointer(place, tables=TableStorage(embeddings)) as checkpoints:
        checkpoints.save(step, *dense(mesh))


def restore(place: str, embeddings, mesh, rest=None) -> int:
    return Checkpointer(place, tables=TableStorage(embeddings)).restore(*(rest or dense(mesh)), mesh)


def test_a_checkpoint_of_one_plan_is_restored_under_every_other(mesh, tmp_path):
    optimizer = "rowwise_adagrad"  # whose state has a number per row
    layouts = [*((plan, 0, mesh) for plan in CUT), ("mixed", 0, in_lines(mesh)), ("mixed", 2, mesh)]
    saved, before = filled(mesh, optimizer), f"{tmp_path}/first"
    expected, kinds = whole(saved.pieces()), {"weight", *OPTIMIZERS[optimizer].states}
    assert expected.keys() == {(table.name, kind) for table in TABLES for kind in kinds}
    save(before, saved, mesh, 7)
    for table in TABLES:
        read = storage.read_table(f"{before}/step_00000007", table.name)
        assert torch.equal(read, expected[table.name, "weight"])
    for plan, model_devices, one in layouts:  # a chain: what one layout restores, the next restores from it
        other, rest = make(one, plan, optimizer, model_devices, seed=1), dense(mesh, seed=1)
        assert not equal(whole(other.pieces()), expected)
        assert restore(before, other, mesh, rest) == 7 and other.step_count.item() == 1000
        assert equal(whole(other.pieces()), expected), (plan, model_devices)
        assert torch.equal(rest[0].weight.cpu(), dense(mesh)[0].weight.cpu())
        before = f"{tmp_path}/{plan}-{model_devices}"
        save(before, other, mesh, 7)


def test_a_checkpoint_is_restored_on_other_devices_and_back(mesh, other_devices):
    for devices, plans in PLANS_ON.items():
        assert other_devices[devices]["restored"] == {plan: other_devices["expected"] for plan in plans}
        back = make(mesh, "exchange", "lazy_adam", seed=9)
        assert restore(f"{other_devices['place']}-{devices}", back, mesh) == 7
        assert [state_sums(back), back.step_count.item()] == other_devices["expected"]
        assert other_devices[devices]["losses"] == pytest.approx(other_devices["losses"], rel=TOLERANCE)


def test_training_goes_on_bit_for_bit_and_nothing_is_compiled_again(mesh, tmp_path):
    def build(seed):
        return make(mesh, "mixed", "rowwise_adagrad", 2, seed), *dense(mesh, seed)

    place, step = str(tmp_path), device.compiled(step_of_both, mesh)
    gc.collect()  # of arrays of earlier tests, which have taken sizes
    run = build(0)
    train_both(mesh, step, *run, 0, 3)
    saved = whole(run[0].pieces())
    with Checkpointer(place, tables=TableStorage(run[0])) as checkpoints:
        checkpoints.save(3, *run[1:])
        expected = train_both(mesh, step, *run, 3, 6)  # while it is written
    after = whole(run[0].pieces())
    assert not equal(saved, after)
    for fresh in (False, True):
        if fresh:  # as a new process would have it: with the sizes of arrays that the first one had
            del run, checkpoints
            gc.collect()
            run = build(1)
        assert restore(place, run[0], mesh, run[1:]) == 3
        assert equal(whole(run[0].pieces()), saved)
        torch_xla.sync()
        graphs = xla.compilations()
        assert train_both(mesh, step, *run, 3, 6) == expected
        assert xla.compilations() == graphs
        assert equal(whole(run[0].pieces()), after)


def test_no_host_holds_a_table_that_is_cut(mesh, tmp_path):
    for plan, parts in (("row", 4), ("column", 2)):
        embeddings = make(mesh, plan, "lazy_adam", parts)
        part = 4 * DIM * (sum(table.rows for table in TABLES) / parts + 64)  # of one device, with rows that pad it
        pieces = embeddings.pieces()
        assert all(piece.untyped_storage().nbytes() <= part for piece in pieces.values())  # nor a view of more
    save(str(tmp_path), embeddings, mesh, 1)
    stored = safetensors.torch.load_file(tmp_path / "step_00000001" / "tables-00000.safetensors")
    assert equal(stored, embeddings.pieces()), "other programs can read it"


PIECES, MARK = "tables-00000.safetensors", "tables-00000.json"
TEARS = {
    "short": (PIECES, lambda content: content[:-3]),
    "another number": (PIECES, lambda content: flip(content, -500)),
    "another name": (PIECES, lambda content: flip(content, content.index(b"user/weight"))),
    "another key of a shape": (PIECES, lambda content: flip(content, content.index(b'"shape"') + 1)),
    "another shape": (PIECES, lambda content: flip(content, content.index(b'"shape": [') + 10)),
    "another length of the header": (PIECES, lambda content: flip(content, 5)),
    "no pieces": (PIECES, None),
    "no mark": (MARK, None),
    "an empty mark": (MARK, lambda content: b""),
    "a mark of another kind": (MARK, lambda content: b"[1]"),
}


@pytest.fixture(scope="module")
def two_checkpoints(mesh, tmp_path_factory):
    """Of steps 10 and 20, plans "mixed": (their folder, what is in the first, what to restore them into)."""
    folder = tmp_path_factory.mktemp("two")
    embeddings = filled(mesh, value=1.0)
    save(str(folder), embeddings, mesh, 10)
    save(str(folder), filled(mesh, value=2.0), mesh, 20)
    return folder, whole(embeddings.pieces()), (make(mesh, "row", "adagrad"), *dense(mesh))


@pytest.mark.parametrize("tear", TEARS)
def test_damaged_tables_are_skipped_with_a_warning(mesh, tmp_path, two_checkpoints, tear, capsys):
    folder, expected, (embeddings, *rest) = two_checkpoints
    place = str(tmp_path / "checkpoints")
    shutil.copytree(folder, place)
    damage(place, 20, *TEARS[tear])
    assert restore(place, embeddings, mesh, rest) == 10
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and f"warning: skipping the torn checkpoint {place}/step_00000020" in warning
    assert equal(whole(embeddings.pieces()), expected) and embeddings.step_count.item() == 1000

    # Nothing else to go back to: half of its numbers may be in the tables.
    shutil.rmtree(f"{place}/step_00000010")
    with pytest.raises(InputError, match=f"no checkpoint in {place} has whole tables"):
        restore(place, embeddings, mesh, rest)


OTHER_TABLES = {
    "more": ((*TABLES, Table("place", 9)), "adagrad", "place/"),
    "less rows": ((dataclasses.replace(TABLES[0], rows=990), *TABLES[1:]), "adagrad", r"user/weight/.*\[990, 16\]"),
    "more rows": ((dataclasses.replace(TABLES[0], rows=1010), *TABLES[1:]), "adagrad", "'user' do not make up 1010"),
    "less state": (TABLES, "sgd", "/sum"),
    "other state": (TABLES, "lazy_adam", "/exp_avg"),
    "state of another shape": (TABLES, "rowwise_adagrad", r"/sum/.* no part of \[1000\]"),
    "another width": (TABLES, "adagrad", r"\[\d+, 16\], which is no part of \[1000, 8\]"),
}


@pytest.mark.parametrize("change", OTHER_TABLES)
def test_a_checkpoint_of_other_tables_or_another_optimizer_is_refused(mesh, two_checkpoints, change):
    (folder, *_), (tables, optimizer, message) = two_checkpoints, OTHER_TABLES[change]
    other = make(mesh, "row", optimizer, tables=tables, dim=8 if change == "another width" else DIM)
    with pytest.raises(InputError, match=message) as raised:
        restore(str(folder), other, mesh)
    said = str(raised.value)
    assert f"the checkpoint {folder}/step_00000020 is of another model" in said and "\n" not in said


def test_a_checkpoint_with_or_without_tables_is_refused(mesh, tmp_path, two_checkpoints):
    folder, _, (embeddings, *_) = two_checkpoints
    with pytest.raises(InputError, match="step_00000020 .*it has embedding tables, this model has none"):
        Checkpointer(str(folder)).restore(*dense(mesh), mesh)
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(8, *dense(mesh))
    with pytest.raises(InputError, match="its tables or optimizer differ from these in day/sum"):
        restore(str(tmp_path), embeddings, mesh)


@pytest.mark.parametrize("call", ["_read_piece", "size", "glob"])
def test_a_store_that_fails_while_tables_are_read_says_so(mesh, tmp_path, two_checkpoints, monkeypatch, call):
    folder, _, (embeddings, *rest) = two_checkpoints
    place = str(tmp_path / "checkpoints")
    shutil.copytree(folder, place)
    if call == "glob":  # by which the marks of a torn one are found
        damage(place, 20, *TEARS["short"])
    checkpoints = Checkpointer(place, tables=TableStorage(embeddings))
    http_error = type("HttpError", (Exception,), {})  # as gcsfs has it: no OSError
    owner = storage if call == "_read_piece" else type(checkpoints._fs)
    monkeypatch.setattr(owner, call, Mock(side_effect=http_error("503")))
    with pytest.raises(InputError, match=r"^cannot read the checkpoints in .*/step_00000020: HttpError: 503; resume"):
        checkpoints.restore(*rest, mesh)


# ---- checkpoints of several hosts ------------------------------------------------------------------------------------
def on_host(host: int, place: str, embeddings) -> Checkpointer:
    """Checkpoints of one of two hosts, which has its own place in the mesh, and its own share of the pieces."""
    twin = copy.copy(embeddings)
    twin.mesh = dataclasses.replace(embeddings.mesh, process_index=host, process_count=2)
    twin.pieces = lambda: {k: v for n, (k, v) in enumerate(sorted(embeddings.pieces().items())) if n % 2 == host}
    return Checkpointer(place, main_process=host == 0, tables=TableStorage(twin))


@pytest.mark.parametrize(("place", "whole_once"), [("memory", False), ("disk", True)], indirect=["place"])
def test_the_marks_of_an_earlier_attempt_do_not_count(mesh, place, monkeypatch, capsys, whole_once):
    """The second host wrote its part, and the main process was killed; or all was written, and a file of tables is
    damaged. In the next attempt the main process comes first, and the second host never."""
    embeddings = filled(mesh)
    save(place, embeddings, mesh, 10)
    hosts = [on_host(host, place, embeddings) for host in ((0, 1) if whole_once else (1,))]
    for host in hosts:
        host.save(20, *dense(mesh))
    for host in hosts:
        host.wait()
    if whole_once:
        damage(place, 20, *TEARS["another number"])
    monkeypatch.setattr(storage, "HOSTS_SECONDS", 0)
    main = on_host(0, place, embeddings)
    assert main.restore(*dense(mesh), mesh) == 10
    main.save(20, *dense(mesh))
    message = "host 1 and 0 more have not written their tables to .*checkpoints/.*step_00000020 in 0 .*--runs gs://"
    with pytest.raises(InputError, match=message):
        main.wait()
    assert whole_once or main.complete_steps() == [10]
    assert restore(place, make(mesh, "row", "adagrad"), mesh) == 10


# ---- plans -----------------------------------------------------------------------------------------------------------
UNLIMITED = 1e15


def automatic(rows, devices=4, dim=64, optimizer=None, device_bytes=UNLIMITED, lookups=None, tpu=False):
    tables = [Table(f"t{t}", size, n) for t, (size, n) in enumerate(zip(rows, lookups or [1] * len(rows), strict=True))]
    return emb.place_tables(tables, dim, devices, optimizer or emb.SGD(), device_bytes, tpu)


def test_small_tables_are_copied_and_a_huge_one_is_cut():
    assert automatic([10, 4096, 4097, 10_000_000]).plans == ("data", "data", "table", "row")  # 1 MiB: 4096 rows of 64
    assert automatic([10, 4096, 4097, 10_000_000], tpu=True).plans == ("data", "data", "exchange", "exchange")
    assert set(automatic([10, 10_000_000], devices=1, tpu=True).plans) == {"data"}
    # State counts.
    assert automatic([4096, 100_000], optimizer=emb.Adagrad()).plans[0] != "data"
    # Columns, where each device has whole lanes of them.
    assert automatic([10_000_000], dim=4 * emb.LANES).plans == ("column",)
    assert automatic([10_000_000], dim=4 * emb.LANES - 4).plans == ("row",)
    assert automatic([10_000_000], dim=4 * emb.LANES, devices=8).plans == ("row",)


def test_whole_tables_are_balanced_by_lookups_as_well_as_rows():
    rows, lookups = [50_000] * 8 + [20_000] * 8, [1] * 8 + [20] * 8
    plan = automatic(rows, lookups=lookups)
    assert set(plan.plans) == {"table"}
    for amounts in (rows, lookups):
        of_device = [sum(n for n, owner in zip(amounts, plan.owners, strict=True) if owner == d) for d in range(4)]
        assert max(of_device) <= 1.2 * sum(amounts) / 4, of_device
    # By rows alone, the last three would be together: 30 of 40 lookups.
    plan = automatic([40_000, 20_000, 10_000, 10_000], devices=2, lookups=[10] * 4)
    assert sorted(plan.owners) == [0, 0, 1, 1]


def test_tables_are_cut_when_whole_ones_do_not_fit():
    rows, unit = [100_000] * 5, 100_000 * 4 * 64
    assert automatic(rows).plans == ("table",) * 5  # one device has two
    tight = automatic(rows, device_bytes=1.3 * unit)
    assert sorted(tight.plans) == ["row"] + ["table"] * 4 and len(set(tight.owners[t] for t in range(1, 5))) == 4
    # With unequal ones, the largest are cut.
    plans = automatic([90_000, 100_000, 100_000, 80_000, 95_000], device_bytes=1.25 * unit).plans
    cut = [t for t, plan in enumerate(plans) if plan == "row"]
    assert cut and cut[0] in (1, 2)


@pytest.mark.parametrize("optimizer", [optimizer() for optimizer in OPTIMIZERS.values()])
def test_tables_that_are_too_large_are_refused_with_what_would_fit(optimizer):
    rows = [4_000_000, 1_000_000, 3_000_000, 50]
    device_bytes = 0.3 * sum(rows) * emb.row_bytes(64, optimizer) / 4 * 2
    with pytest.raises(InputError) as raised:
        automatic(rows, optimizer=optimizer, device_bytes=device_bytes)
    message = str(raised.value)
    assert "\n" not in message and "'t0': 4,000,000 rows" in message and "of 4 device(s)" in message
    assert f"{emb.row_bytes(64, optimizer):,} bytes" in message and f"{device_bytes / 2**30:.3g} GiB" in message
    assert ("RowWiseAdagrad" in message) == (optimizer in (emb.Adagrad(), emb.LazyAdam()))
    # What it says is true: one more device than the rounded number may be needed for the copied table.
    devices, percent = int(re.search(r"(\d+) devices", message)[1]), int(re.search(r"(\d+) %", message)[1])
    automatic(rows, devices=devices + 1, optimizer=optimizer, device_bytes=device_bytes)
    automatic([size * percent // 100 for size in rows], optimizer=optimizer, device_bytes=device_bytes)
    with pytest.raises(InputError):
        automatic(rows, devices=devices - 1, optimizer=optimizer, device_bytes=device_bytes)


def test_the_memory_of_a_device_is_known_or_asked_for(mesh):
    assert emb.device_bytes_for_tables(dataclasses.replace(mesh, kind="TPU v5 lite")) == emb.TABLE_SHARE * 15.75 * 2**30
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert emb.device_bytes_for_tables(mesh) == pytest.approx(emb.TABLE_SHARE * machine / 4)
    with pytest.raises(InputError, match="the memory of a 'TPU v99' is not known: give device_bytes"):
        emb.device_bytes_for_tables(dataclasses.replace(mesh, kind="TPU v99"))


# ---- bad input -------------------------------------------------------------------------------------------------------
FEW = (Table("user", 10), Table("tags", 5, 3), Table("hour", 4))


@pytest.mark.parametrize(
    "example, column, value, table, rows",
    [(2, 0, 10, "user", 10), (0, 1, 5, "tags", 5), (5, 3, 2**31 - 1, "tags", 5), (1, 4, -1, "hour", 4)],
)
def test_ids_outside_of_their_table_or_of_another_width_are_refused(example, column, value, table, rows):
    ids, present = np.tile(np.array([9, 4, 0, 4, 3], np.int32), (6, 1)), np.ones((6, 5), np.float32)
    emb.check_ids(ids, FEW)
    ids[example, column] = value
    message = rf"id {value} of table '{table}' \(example {example} of the batch\) is outside of its {rows} rows"
    for there in ((), (present,)):
        with pytest.raises(InputError, match=message):
            emb.check_ids(ids, FEW, *there)
    present[example, column] = 0  # what stands in the padding is of no account
    emb.check_ids(ids, FEW, present)
    for shape in ((6, 4), (6, 6), (30,), (2, 3, 5)):
        with pytest.raises(InputError, match=r"it must be \[examples, 5\], the sum of lookups"):
            emb.check_ids(np.zeros(shape, np.int32), FEW)


BAD = {
    "there are no tables": ([], {}),
    "table 'a' has 0 rows": ([Table("a", 0)], {}),
    "table 'a' has 5 rows, 0 lookups": ([Table("a", 5, 0)], {}),
    "the name 'a' of a table is not its own": ([Table("a", 5), Table("b", 5), Table("a", 6)], {}),
    "the name 'a/b' of a table is not its own, or has a slash": ([Table("a/b", 5)], {}),
    "table 'a' has the plan 'rows'; it is auto or exchange, row, table,": ([Table("a", 5, plan="rows")], {}),
    "table 'a' has the pooling 'max'; it is sum or mean": ([Table("a", 5, pooling="max")], {}),
    "table 'b': 6 columns do not divide by 4 devices": ([Table("a", 5), Table("b", 5, plan="column")], {"dim": 6}),
    "model_devices is 3; it must divide the 4 devices": ([Table("a", 5)], {"model_devices": 3}),
    "the tables need 0.00149 GiB on each of 4 device(s)": ([Table("a", 100_000)], {"device_bytes": 1e6}),
    "tables of plan 'row' have 3,000,000,000 rows together": ([Table("a", 3 * 10**9)], {"device_bytes": UNLIMITED}),
}


@pytest.mark.parametrize("message", BAD)
def test_impossible_tables_are_refused(mesh, message):
    tables, options = BAD[message]
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        ShardedEmbeddingBags(tables, mesh=mesh, optimizer=emb.SGD(), lr=0.1, seed=0, **{"dim": DIM} | options)


# ---- rows side by side in lines of 128, as on a TPU ------------------------------------------------------------------
@pytest.mark.parametrize("dim", [1, 24, 200])
def test_rows_of_any_width_are_found_in_their_lines(mesh, dim):
    pack = emb.rows_in_a_line(dim, 128)
    assert pack * dim <= max(128, dim) < 2 * pack * dim or pack == 1
    lines, delta = torch.randn(40, pack * dim), torch.randn(50, dim)
    rows = torch.randint(0, 40 * pack, (50,), dtype=torch.int32)
    on_device = [tensor.to(mesh.device) for tensor in (lines, rows, delta)]
    assert torch.equal(emb.take_rows(*on_device[:2], dim).cpu(), lines.reshape(-1, dim)[rows])
    added = emb.add_rows(*on_device).cpu()
    expected = lines.reshape(-1, dim).index_add(0, rows, delta)
    torch.testing.assert_close(added.reshape(-1, dim), expected, rtol=0, atol=1e-6)
