"""Plan "exchange": a device asks the owners of its ids for their rows, so that a step does not grow with the devices.

    lookup   1. sort the ids of a device by owner and row; equal ones are asked for once
             2. put the distinct ones into places [owners, capacity]; all-to-all
             3. the owner looks up what it is asked for; all-to-all back; each id takes the row of its place
    update   4. add up the gradients of equal ids in their place; all-to-all
             5. the owner adds up what several devices have sent for a row, and updates at most a planned number of rows

Shapes are static, so capacities are planned: for ids that are all distinct and fall on owners at random (`owner_of`),
from the tail of the Poisson distribution. An id that finds no place reads zeros and is not trained. It is counted, and
`check_load` ends the run before anything is saved: a run is exact, or it stops.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from errors import InputError
from train.common.embedding import regions
from train.common.embedding.arrays import TableArray
from train.common.embedding.hashing import divide, owner_of
from train.common.embedding.one_device import OneDevice
from train.common.embedding.tables import Optimizer, take_rows

NOTHING = 2**31 - 1  # a key after all others
# Probability that some capacity of a step is too small; 10 million steps make an epoch, which then has 1e-6.
OVERFLOW = 1e-13


class Load(NamedTuple):
    """How full the places of a lookup or an update were, [1] on each device: ids without a place; the fullest owner's
    share of the places for this device's ids, and this device's share of the rows that it may update; 0: not known."""

    dropped: Tensor
    pair: Tensor
    update: Tensor


class Route(NamedTuple):
    """What the update needs of a lookup, on each device.

    Attributes:
        asked: [owners * capacity] rows of this device that others have asked for; `local_rows`: an empty place.
        places: [batch, columns] the place of each id; owners * capacity: it has none.
        load: of this lookup.
    """

    asked: Tensor
    places: Tensor
    load: Load


def lookup(array: TableArray, rows: Tensor) -> tuple[Tensor, Route]:
    """Looks up and adds up the rows of each bag; returns [batch, tables of the array, dim], sharded by the batch, and
    what `update` needs."""
    sharding, parts, by_batch = array.sharding, array.parts, (array.sharding.batch_axes, None)
    own = sharding.enter(sharding.shard(rows, by_batch), by_batch)
    most = min(own.numel(), array.used_rows)
    capacity = planned(own.numel() / parts, sharding.mesh.num_devices * parts, array.room[0], most)
    asked, places, load = _places(array, own.reshape(-1), capacity)
    asked = sharding.all_to_all(asked)
    weight = sharding.enter(array.weight, array.spec)
    found = take_rows(weight, _used(asked, array.local_rows).reshape(-1), array.dim)
    found = sharding.all_to_all(found.reshape(parts, capacity, array.dim)).reshape(-1, array.dim)
    places = places.reshape(own.shape)
    pooled = regions.pool(found, places, places < parts * capacity, array.lookups, array.dim)
    pooled = sharding.leave(pooled, (*by_batch, None), (rows.shape[0], len(array.tables), array.dim))
    return pooled, Route(asked.reshape(-1), places, load)


def update(
    array: TableArray, routes: Sequence[Route], grads: list[Tensor], optimizer: Optimizer, lr: Tensor, step: Tensor
) -> list[Load]:
    """Updates the rows of several lookups at once, each row once; returns the loads.

    Args:
        grads: the gradient of each lookup's pooled rows, [batch, tables of the array, dim].
        step: 1-based number of this update.
    """
    sharding = array.sharding
    sent = [_gradients(array, route, grad) for route, grad in zip(routes, grads, strict=True)]
    rows, g = (sharding.gather_copies(torch.cat(tensors)) for tensors in zip(*sent, strict=True))
    # A row in the memory of a TPU costs ten times what one of this list does, and most of the list is empty places. The
    # list cannot be cut before equal rows are added up: a frequent id comes from all devices, and to one owner.
    rows, g = regions.sum_equal_rows(rows, g, array.local_rows)
    ids = sum(route.places.numel() for route in routes) * (sharding.mesh.num_devices // array.parts)
    capacity = planned(ids, array.parts, array.room[1], min(rows.numel(), array.used_rows))
    distinct = (rows < array.local_rows).sum(dtype=torch.int32)[None].float()
    rows, g = rows[:capacity], g[:capacity]
    touched = (rows < array.local_rows)[:, None].float()
    regions.write(array, _used(rows, array.local_rows), g, touched, optimizer, lr, step)
    own = Load((distinct - capacity).clamp(min=0), torch.zeros_like(distinct), distinct / capacity)
    return [*(route.load for route in routes), own]


def _places(array: TableArray, rows: Tensor, capacity: int) -> tuple[Tensor, Tensor, Load]:
    """Distributes the rows [n] of a device's ids, -1 for none, over places.

    Returns:
        The rows to ask each owner for [owners, capacity], local_rows in empty places; the place of each id [n]; how
        full the places are.
    """
    n, parts, size = rows.numel(), array.parts, array.local_rows + 1
    numbers = torch.arange(parts, dtype=torch.int32, device=rows.device)
    owner, local = owner_of(rows.clamp(min=0), parts)
    keys, order = torch.sort(torch.where(rows >= 0, owner * size + local, torch.full_like(rows, NOTHING)))
    first = (keys != torch.cat([torch.full_like(keys[:1], -1), keys[:-1]])) & (keys != NOTHING)
    owner = divide(keys, size)[0]  # at least `parts` where there is none
    mine = owner[:, None] == numbers  # [n, owners], which the compiler never writes; reading at indices is slower
    distinct = (mine & first[:, None]).sum(0, dtype=torch.int32)
    before = torch.cumsum(distinct, 0, dtype=torch.int32) - distinct
    before = torch.where(mine, before, torch.zeros_like(before)).sum(1, dtype=torch.int32)
    in_line = torch.cumsum(first, 0, dtype=torch.int32) - 1 - before
    fits = (keys != NOTHING) & (in_line < capacity)
    places = torch.where(fits, owner * capacity + in_line, torch.full_like(keys, parts * capacity))
    # Each owner's line is filled up with keys that come after its own, and a sort puts all where they belong.
    begin, nothing = (numbers * size)[:, None], torch.full_like(keys, NOTHING)
    empty = torch.arange(capacity, dtype=torch.int32, device=rows.device) >= distinct[:, None]
    filling = torch.where(empty, begin + array.local_rows, nothing[:1])
    asked = torch.sort(torch.cat([torch.where(first & fits, keys, nothing), filling.reshape(-1)]))[0]
    asked = asked[: parts * capacity].reshape(parts, capacity) - begin
    dropped = (distinct - capacity).clamp(min=0).sum(dtype=torch.int32)[None].float()
    load = Load(dropped, distinct.amax(0, keepdim=True) / capacity, torch.zeros_like(dropped))
    return asked, _unsort(places, order, parts * capacity, n), load


def _unsort(values: Tensor, order: Tensor, largest: int, n: int) -> Tensor:
    """Returns values [n] in the order that they had before a sort whose permutation is `order`."""
    bits = largest.bit_length()
    if bits + n.bit_length() > 31:
        return values[torch.sort(order)[1]]
    return torch.sort((order.int() << bits) | values)[0] & ((1 << bits) - 1)  # a fifth of reading at indices, on a TPU


def _gradients(array: TableArray, route: Route, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what an owner is sent for one lookup: (its rows [n], gradients [n, dim])."""
    sharding, spec = array.sharding, (array.sharding.batch_axes, None, None)
    grad = regions.by_column(sharding.enter(sharding.shard(grad, spec), spec), array.lookups)
    size, places = route.asked.numel(), route.places.reshape(-1)
    here = (places < size)[:, None]
    grad = torch.where(here, grad.reshape(-1, array.dim), torch.zeros((), device=grad.device))
    sums = torch.zeros(size, array.dim, device=grad.device).index_add_(0, _used(places, size), grad)
    return route.asked, sharding.all_to_all(sums.reshape(array.parts, -1, array.dim)).reshape(size, array.dim)


def _used(rows: Tensor, unused: int) -> Tensor:
    """Replaces rows that are `unused` by row 0."""
    return torch.where(rows < unused, rows, torch.zeros_like(rows))


# ---- capacities ------------------------------------------------------------------------------------------------------


def planned(mean: float, events: int, room: float, most: int) -> int:
    """Returns a capacity for a Poisson number of this mean.

    Args:
        events: how many such numbers a step has; that one of them is larger has a probability below OVERFLOW.
        room: a factor on the capacity.
        most: the number is never larger than this.
    """
    capacity = math.ceil(mean)
    while capacity < most and _log_tail(mean, capacity) > math.log(OVERFLOW / events):
        capacity += 1
    return min(most, -(-math.ceil(capacity * room) // 8) * 8)


def _log_tail(mean: float, capacity: int) -> float:
    """Returns the logarithm of an upper bound of P(Poisson(mean) > capacity), where capacity >= mean."""
    k = capacity + 1  # its probability, times a geometric series for those after it
    return k * math.log(mean) - mean - math.lgamma(k + 1) - math.log1p(-mean / (k + 1))


def add_load(total: Tensor, loads: Sequence[Load], sharding: OneDevice) -> dict[str, Tensor]:
    """Adds the loads of a step to the `total` [3] of all steps, on all devices; returns the metrics of the step, see
    ShardedEmbeddingBags.step. As few operations as possible: the smallest takes a TPU 2,000 cycles."""
    numbers, spec = torch.cat([number for load in loads for number in load]), (sharding.batch_axes, None)
    every = sharding.leave(numbers[None], spec, (sharding.mesh.num_devices, len(numbers)))
    every = sharding.shard(every, (None, None)).reshape(-1, 3)
    dropped, fullest = every.sum(0), every.amax(0)
    total.copy_(torch.cat([total[:1] + dropped[:1], torch.maximum(total, fullest)[1:]]))
    return {"dropped": total[0] + 0, "pair_load": fullest[1], "update_load": fullest[2]}


def check_load(load: Sequence[float], room: tuple[float, float]) -> None:
    """Raises InputError where ids were dropped; says which capacity was too small, and what would do."""
    dropped, *shares = load
    if dropped:
        needed = [r if share <= 1 else math.ceil(11 * r * share) / 10 for r, share in zip(room, shares, strict=True)]
        if shares[0] > 1:  # an id without a place is not among the updates, so their share is too low
            needed[1] = max(needed[1], 1.0)
        raise InputError(
            f"{dropped:,.0f} ids found no place in the exchange of embeddings: the fullest pair of devices had "
            f"{shares[0]:.2f} of the ids that there is room for, the fullest device {shares[1]:.2f} of the updates; "
            f"give --exchange-room {needed[0]:g} {needed[1]:g} or more instead of {room[0]:g} {room[1]:g}, and the "
            "same command resumes from the last checkpoint, before which nothing was dropped"
        )
