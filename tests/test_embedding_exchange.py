"""Plan "exchange" (train/common/embedding/exchange.py): who owns a row, how many slots there are,
what is dropped."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import torch_xla
from embedding_helpers import (
    BATCH,
    EXCHANGED,
    SHORTAGES,
    different_ids,
    host_batch,
    loaded_step,
    put,
    save,
    with_room,
)

from bench import embedding as bench
from errors import InputError
from models.hashing import hash32
from train.common import device, hashing
from train.common.checkpoint import Checkpointer
from train.common.embedding import ShardedEmbeddingBags, exchange, owners
from train.common.embedding.rows import line_and_columns

# Those beyond 2**24 are not all float32s, in which torch_xla divides int32.
NUMBERS = np.concatenate(
    [
        np.arange(3000),
        2**24 + np.arange(-9, 9),
        2**31 - 300 + np.arange(290),
    ]
)


def on_device(mesh) -> torch.Tensor:
    """Returns NUMBERS as int32 on the device."""
    return torch.tensor(NUMBERS, dtype=torch.int32).to(mesh.device)


# Owners

every_count = pytest.mark.parametrize("devices", [1, 6, 256])


@every_count
def test_every_row_has_one_owner_and_one_row_there(mesh, devices):
    array_rows = on_device(mesh)
    owner, device_row = owners.owner_of(array_rows, devices)
    back = owners.array_row_of(owner, device_row, devices)

    assert torch.equal(back.cpu(), array_rows.cpu())
    assert np.array_equal(device_row.cpu().numpy(), NUMBERS // devices)
    assert owner.min().item() == 0
    assert owner.max().item() == devices - 1


@every_count
def test_owners_share_consecutive_rows_equally(mesh, devices):
    owner, _ = owners.owner_of(on_device(mesh), devices)
    whole_blocks = 3000 - 3000 % devices
    blocks = owner.cpu().numpy()[:whole_blocks].reshape(-1, devices)
    expected = np.broadcast_to(np.arange(devices), blocks.shape)
    assert np.array_equal(np.sort(blocks, 1), expected)


@pytest.mark.parametrize("devices", [6, 256])
def test_owners_share_rows_with_a_common_divisor(mesh, devices):
    owner, _ = owners.owner_of(on_device(mesh), devices)
    counts = np.bincount(owner.cpu().numpy()[:3000:devices], minlength=devices)
    mean = 3000 / devices**2
    assert counts.max() < mean + 6 * mean**0.5 + 3


# Integers that float32 does not have


@pytest.mark.parametrize("by", [1, 3, 5000, 2**27 + 1])
def test_division_of_large_integers_is_exact(mesh, by):
    quotient, rest = hashing.divide(on_device(mesh), by)
    assert np.array_equal(quotient.cpu().numpy(), NUMBERS // by)
    assert np.array_equal(rest.cpu().numpy(), NUMBERS % by)


def test_lines_of_large_rows_are_exact(mesh):
    line, own = line_and_columns(on_device(mesh), 128, 16)
    assert np.array_equal(line.cpu().numpy(), NUMBERS // 8)
    assert np.array_equal(own.cpu().int().argmax(1).numpy(), NUMBERS % 8 * 16)


def test_tables_and_dropout_have_the_same_hash(mesh):
    """train/common and models/ each have a copy, since neither imports the other."""
    assert torch.equal(hashing.hash32(on_device(mesh)), hash32(on_device(mesh)))


# Capacities


@pytest.mark.parametrize(("mean", "events"), [(0.4, 65_536), (54, 65_536), (512, 64), (4096, 8)])
def test_there_is_room_for_all_ids_of_ten_million_steps(mean, events):
    def overflows_in_ten_million_steps(capacity: float) -> float:
        return 1e7 * events * scipy.stats.poisson.sf(capacity, mean)

    capacity = exchange.planned_capacity(mean, events, 1.0, 10**9)
    assert overflows_in_ten_million_steps(capacity) < 1e-6
    less = 0.9 * capacity - 9
    assert overflows_in_ten_million_steps(less) > 1e-6, "more than is needed"

    few = exchange.planned_capacity(mean, events, 1.0, 17)
    many = exchange.planned_capacity(mean, events, 1e3, 10**9)
    assert few <= 17 <= many


# Ids without a slot


@dataclass
class Trained:
    """Embeddings after two steps, in the second of which all ids have a slot; of the first step,
    what it returned and the rows that it changed."""

    embeddings: ShardedEmbeddingBags
    first: dict
    changed: int


@dataclass
class Overflow:
    """The same two steps with too little room at the pair of devices or at the owner, and with
    enough."""

    where: str  # a key of SHORTAGES
    message: str
    ids: torch.Tensor
    few: Trained
    enough: Trained


def trained(mesh, room: tuple[float, float], batch: dict) -> Trained:
    embeddings = with_room(mesh, room)
    step = device.compiled(loaded_step, mesh)

    before = embeddings.arrays[0].weight.cpu()
    first = step(embeddings, put(mesh, batch))
    is_changed = (embeddings.arrays[0].weight.cpu() != before).any(1)

    zeros = batch | {"ids": batch["ids"] * 0}
    step(embeddings, put(mesh, zeros))
    return Trained(embeddings, first, is_changed.sum().item())


@pytest.fixture(scope="module", params=SHORTAGES)
def overflow(mesh, request) -> Overflow:
    shortage = SHORTAGES[request.param]
    torch.manual_seed(0)
    ids = different_ids()
    batch = host_batch(0, EXCHANGED, ragged=False) | {"ids": ids}
    few = trained(mesh, shortage.room, batch)
    enough = trained(mesh, (1.0, 1.0), batch)
    return Overflow(request.param, shortage.message, ids, few, enough)


def test_ids_with_a_slot_are_right_beside_dropped_ones(overflow):
    pooled = overflow.few.first["pooled"]
    expected = overflow.enough.first["pooled"]
    is_lost = (pooled == 0).all(-1)
    assert torch.equal(pooled[~is_lost], expected[~is_lost])

    # An owner that drops an update has still sent the row.
    dropped = overflow.few.first["dropped"].item()
    expected_lost = dropped if overflow.where == "pair" else 0
    assert is_lost.sum().item() == expected_lost


def test_rows_of_dropped_ids_are_not_trained(overflow):
    dropped = overflow.few.first["dropped"].item()
    assert dropped > 0
    assert overflow.few.changed == 2 * BATCH - dropped
    assert overflow.enough.changed == 2 * BATCH


def test_what_was_dropped_in_an_earlier_step_stays_counted(overflow):
    assert overflow.few.embeddings.slot_load[0].item() == overflow.few.first["dropped"].item()


def test_loads_are_those_that_are_computed_on_the_host(overflow):
    array_rows = (overflow.ids + torch.tensor([0, 5000])).int()
    fill = bench.exchange_fill(array_rows.reshape(4, -1))
    first = overflow.enough.first

    assert first["dropped"].item() == 0
    assert max(fill.pair, fill.update) <= 1
    assert first["pair_load"].item() == pytest.approx(fill.pair)
    assert first["update_load"].item() == pytest.approx(fill.update)


def test_dropped_ids_stop_a_run_before_anything_is_saved(mesh, tmp_path, overflow):
    embeddings = overflow.few.embeddings
    dropped = overflow.few.first["dropped"]
    stops = [
        embeddings.check,
        partial(embeddings.check, dropped),
        partial(save, str(tmp_path), embeddings, mesh, 1),
    ]
    for stop in stops:
        with pytest.raises(InputError, match=overflow.message):
            stop()
    assert Checkpointer(str(tmp_path)).complete_steps() == []
    save(str(tmp_path), overflow.enough.embeddings, mesh, 1)


def test_ids_that_an_evaluation_drops_stop_the_run(mesh):
    shortage = SHORTAGES["pair"]
    embeddings = with_room(mesh, shortage.room)
    with torch.no_grad():
        embeddings(put(mesh, {"ids": different_ids()})["ids"])
    torch_xla.sync()

    with pytest.raises(InputError, match=shortage.message):
        embeddings.check()
