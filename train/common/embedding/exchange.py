"""Plan "exchange": a device asks the owners of its ids for their rows, so that the work of a device
in a step does not grow with the number of devices.

    lookup   1. sort the ids of a device by owner and device row; equal ones are asked for once
             2. put the distinct ones into slots [owners, capacity]; all-to-all
             3. the owner looks up what it is asked for; all-to-all back
             4. each id takes the row of its slot
    update   5. add up the gradients of equal ids in their slot; all-to-all
             6. the owner adds up what several devices have sent for a row
             7. it updates at most a planned number of rows

Every device of a group is an owner. Shapes are static, so capacities are planned: for ids that are
all distinct and fall on owners at random (`owner_of`), from the tail of the Poisson distribution.
An id that finds no slot reads zeros and is not trained. It is counted, and `check_load` ends the
run before anything is saved: a run is exact, or it stops.

plan.py says what array rows and device rows are, owners.py which device has which array row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import InputError
from train.common.embedding.devices import TableDevices
from train.common.embedding.owners import TableRun, array_row_of, owner_of
from train.common.embedding.plan import HeldRows, SlotLoad, TableArray
from train.common.embedding.rows import LAST, gradient_of_ids, pool, sum_equal_rows, take_rows
from train.common.hashing import divide

# Probability per step that some capacity is too small: 1e-6 in an epoch of 10 million steps.
OVERFLOW_PROBABILITY = 1e-13


@dataclass(frozen=True)
class Route:
    """What the update needs of a lookup, on each device.

    Attributes:
        asked: [owners * capacity] the device rows of this device that others have asked for. An
            empty slot has the value `device_rows`.
        slots: [batch, columns] the slot of each id. An id without one has owners * capacity.
        load: of the slots of this lookup.
    """

    asked: Tensor
    slots: Tensor
    load: SlotLoad


@dataclass(frozen=True)
class SortedIds:
    """The ids of a device in the order of their keys, by owner and then by device row.

    All tensors are [n].

    Attributes:
        key: owner * (device_rows + 1) + device row; LAST for an id that is not there.
        order: the permutation: the i-th key is that of the order[i]-th id.
        is_first: whether the key is the first one of its value.
        owner: at least the number of owners for an id that is not there.
    """

    key: Tensor
    order: Tensor
    is_first: Tensor
    owner: Tensor


class Exchanged(TableArray):
    """Tables whose rows are spread over all devices."""

    name = "exchange"
    may_drop = True

    @property
    def spec(self) -> tuple[str, None]:
        return self.devices.axis, None

    # ---- where rows lie

    @classmethod
    def rows_per_device(cls, rows: int, devices: int) -> float:
        return rows / devices

    def _lay_out(self) -> tuple[list[int], int]:
        # A table begins with the same device row on every owner: its first array row is a multiple
        # of their number.
        device_row = 0
        start = []
        for rows in self.sizes:
            start.append(device_row * self.group_size)
            device_row += math.ceil(rows / self.group_size)
        return start, device_row

    def _array_rows(self, tensor_rows: Tensor) -> Tensor:
        owner, device_row = divide(tensor_rows, self.device_rows)
        return array_row_of(owner, device_row, self.group_size)

    def held_rows(self, index: int, part: int) -> HeldRows:
        table_start = self.start[index] // self.group_size
        run = TableRun(first=0, owners=self.group_size, owner=part, table_start=table_start)

        # Where the owners do not divide the rows, only some owners have one row more.
        count = self.sizes[index] // self.group_size
        next_table_row = int(run.table_rows(count, count + 1))
        if next_table_row < self.sizes[index]:
            count += 1
        return HeldRows(run, first_device_row=table_start, count=count)

    def parts_to_fill(self, tensor: Tensor) -> list[int]:
        return [part.index for part in self.devices.local_parts(tensor, self.spec)]

    def fill(self, tensor: Tensor, parts: list[Tensor]) -> None:
        self.devices.load_parts(tensor, parts, self.device_indices)

    # ---- lookup

    def lookup(self, array_rows: Tensor) -> tuple[Tensor, Route]:
        """Looks up and adds up the rows of each bag, see TableArray; returns the route beside the
        sums."""
        by_batch = (self.devices.batch_axes, None)
        own_rows = self.devices.enter(self.devices.shard(array_rows, by_batch), by_batch)
        capacity = self._slots_per_owner(own_rows.numel())
        to_ask, slots, load = self._assign_slots(own_rows.reshape(-1), capacity)

        asked = self.devices.all_to_all(to_ask)
        weight = self.devices.enter(self.weight, self.spec)
        # Empty slots read row 0. Nothing uses what they read, since no id has an empty slot.
        safe_rows = _with_row_0(asked, no_row=self.device_rows)
        for_others = take_rows(weight, safe_rows.reshape(-1), self.dim)
        for_others = for_others.reshape(self.group_size, capacity, self.dim)
        found = self.devices.all_to_all(for_others)

        slots = slots.reshape(own_rows.shape)
        has_slot = slots < self.group_size * capacity
        pooled = pool(found.reshape(-1, self.dim), slots, has_slot, self.lookups, self.dim)
        shape = (array_rows.shape[0], len(self.table_indices), self.dim)
        pooled = self.devices.leave(pooled, (*by_batch, None), shape)
        return pooled, Route(asked.reshape(-1), slots, load)

    def slot_loads(self, kept: Route) -> list[SlotLoad]:
        return [kept.load]

    @property
    def _keys_per_owner(self) -> int:
        """The keys of an owner: one for each device row, and one after them, for empty slots."""
        return self.device_rows + 1

    def _slots_per_owner(self, ids: int) -> int:
        """Returns the capacity: the slots that a device with so many ids has at each owner."""
        pairs = self.devices.mesh.num_devices * self.group_size
        most = min(ids, self.used_rows)
        pair_room, _ = self.room
        return planned_capacity(ids / self.group_size, pairs, pair_room, most)

    def _assign_slots(self, array_rows: Tensor, capacity: int) -> tuple[Tensor, Tensor, SlotLoad]:
        """Gives each distinct row that this device's ids name a slot at its owner.

        Args:
            array_rows: [n], -1 for an id that is not there.
            capacity: slots at each owner.
        Returns:
            The device rows to ask each owner for [owners, capacity], with `device_rows` in empty
            slots; the slot of each id [n], owners * capacity for an id without one; the load of the
            slots.
        """
        ids = self._sort_ids(array_rows)
        owners = torch.arange(self.group_size, dtype=torch.int32, device=array_rows.device)

        # [n, owners], one-hot. The compiler fuses it into the sums below and never stores it. A TPU
        # would take longer for a gather, `rows_before[ids.owner]`.
        is_owner = ids.owner[:, None] == owners

        # For each owner: the number of its distinct rows, and of those of the owners before it.
        distinct = (is_owner & ids.is_first[:, None]).sum(0, dtype=torch.int32)
        rows_before = torch.cumsum(distinct, 0, dtype=torch.int32) - distinct

        # For each id: the index of its row among all distinct rows, and among those of its owner.
        row_index = torch.cumsum(ids.is_first, 0, dtype=torch.int32) - 1
        before_own_owner = torch.where(is_owner, rows_before, torch.zeros_like(rows_before))
        slot_at_owner = row_index - before_own_owner.sum(1, dtype=torch.int32)

        has_slot = (ids.key != LAST) & (slot_at_owner < capacity)
        no_slot = torch.full_like(ids.key, self.group_size * capacity)
        slots = torch.where(has_slot, ids.owner * capacity + slot_at_owner, no_slot)
        slots = _unsort(slots, ids.order, largest=self.group_size * capacity)

        to_ask = self._rows_to_ask(ids.key, ids.is_first & has_slot, owners, distinct, capacity)
        dropped = (distinct - capacity).clamp(min=0).sum(dtype=torch.int32)[None].float()
        fullest = distinct.amax(0, keepdim=True) / capacity
        return to_ask, slots, SlotLoad(dropped, fullest, torch.zeros_like(dropped))

    def _sort_ids(self, array_rows: Tensor) -> SortedIds:
        """Sorts array rows [n], -1 for an id that is not there, by owner and then by device row."""
        owner, device_row = owner_of(array_rows.clamp(min=0), self.group_size)
        no_key = torch.full_like(array_rows, LAST)
        key = torch.where(array_rows >= 0, owner * self._keys_per_owner + device_row, no_key)
        key, order = torch.sort(key)
        key_before = torch.cat([torch.full_like(key[:1], -1), key[:-1]])
        is_first = (key != key_before) & (key != LAST)
        sorted_owner = divide(key, self._keys_per_owner)[0]
        return SortedIds(key, order, is_first, sorted_owner)

    def _rows_to_ask(
        self,
        key: Tensor,
        asks: Tensor,
        owners: Tensor,
        distinct: Tensor,
        capacity: int,
    ) -> Tensor:
        """Returns the device rows to ask each owner for, [owners, capacity]; `device_rows` in empty
        slots.

        One sort puts every key into its slot. To fill the empty slots, each owner has one key more,
        after those of its device rows and before the next owner's, which is added once for each of
        its empty slots. Two owners with 2 slots each and 3 device rows, so with keys 0 to 3 and 4
        to 7, of which 3 and 7 are for empty slots:

            keys to ask for             1, 4, 6
            with those of empty slots   1, 4, 6, 3
            sorted                      1, 3 | 4, 6
            as device rows              1, 3 | 0, 2     3 is an empty slot

        Args:
            key: [n], of the ids.
            asks: [n], whether it is a key to ask for.
            owners: [owners], their indices.
            distinct: [owners], the rows of each, those without a slot included.
        """
        first_key = (owners * self._keys_per_owner)[:, None]
        no_key = torch.full_like(key, LAST)  # sorted behind all slots
        slot = torch.arange(capacity, dtype=torch.int32, device=key.device)
        is_empty = slot >= distinct[:, None]
        of_empty_slots = torch.where(is_empty, first_key + self.device_rows, no_key[:1])

        keys = torch.cat([torch.where(asks, key, no_key), of_empty_slots.reshape(-1)])
        in_slots = torch.sort(keys)[0][: self.group_size * capacity]
        return in_slots.reshape(self.group_size, capacity) - first_key

    # ---- update

    def update(
        self,
        kept_by_pass: Sequence[Route],
        grads: Sequence[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> list[SlotLoad]:
        sent_rows = []
        sent_gradients = []
        for route, gradient in zip(kept_by_pass, grads, strict=True):
            sent_rows.append(route.asked)
            sent_gradients.append(self._send_gradient(route, gradient))
        rows = self.devices.gather_copies(torch.cat(sent_rows))
        g = self.devices.gather_copies(torch.cat(sent_gradients))

        # A row that is updated in a TPU's memory costs ten times what a row of this list does, and
        # most of the list is empty slots. So the list is cut to a planned number of rows, but only
        # after equal rows are added up: a frequent id comes from all devices, to one owner.
        rows, g = sum_equal_rows(rows, g, self.device_rows)
        capacity = self._updates_per_device(kept_by_pass, rows.numel())
        distinct = (rows < self.device_rows).sum(dtype=torch.int32)[None].float()
        # The distinct rows are first. Those beyond the capacity are counted as dropped below.
        rows = rows[:capacity]
        g = g[:capacity]
        touched = (rows < self.device_rows)[:, None].float()
        self._update_rows(_with_row_0(rows, no_row=self.device_rows), g, touched, lr, step)

        dropped = (distinct - capacity).clamp(min=0)
        of_update = SlotLoad(dropped, torch.zeros_like(distinct), distinct / capacity)
        return [*(route.load for route in kept_by_pass), of_update]

    def _updates_per_device(self, kept_by_pass: Sequence[Route], received: int) -> int:
        """Returns the capacity: how many rows a device updates in a step.

        A group's devices spread their ids over as many owners, those of the group. So on average an
        owner gets as many ids from its group as one device has, and again as many from each other
        group, in which it has a copy.

        Args:
            received: rows that a device is sent.
        """
        ids = sum(route.slots.numel() for route in kept_by_pass) * self.devices.copies
        most = min(received, self.used_rows)
        _, update_room = self.room
        return planned_capacity(ids, self.group_size, update_room, most)

    def _send_gradient(self, route: Route, gradient: Tensor) -> Tensor:
        """Sends the gradient of pooled rows [batch, tables, dim] to the owners, equal ids added up.

        Returns:
            What this device gets for the rows that others have asked it for, [owners * capacity,
            dim].
        """
        by_batch = (self.devices.batch_axes, None, None)
        own = self.devices.enter(self.devices.shard(gradient, by_batch), by_batch)
        of_ids = gradient_of_ids(own, self.lookups).reshape(-1, self.dim)

        slot_count = route.asked.numel()  # owners * capacity
        slots = route.slots.reshape(-1)
        has_slot = (slots < slot_count)[:, None]
        of_ids = torch.where(has_slot, of_ids, torch.zeros((), device=of_ids.device))
        sums = torch.zeros(slot_count, self.dim, device=of_ids.device)
        sums = sums.index_add_(0, _with_row_0(slots, no_row=slot_count), of_ids)
        received = self.devices.all_to_all(sums.reshape(self.group_size, -1, self.dim))
        return received.reshape(slot_count, self.dim)


def _with_row_0(rows: Tensor, no_row: int) -> Tensor:
    """Returns rows with 0 in place of `no_row`, which is larger than any row, to use as indices.

    The caller does not use what is read there, and adds 0 there.
    """
    return torch.where(rows < no_row, rows, torch.zeros_like(rows))


def _unsort(values: Tensor, order: Tensor, largest: int) -> Tensor:
    """Returns values [n] in the order that they had before a sort.

    Args:
        values: each 0 to `largest`.
        order: the permutation of the sort.
    """
    bits = largest.bit_length()
    if bits + values.numel().bit_length() > 31:
        return values[torch.sort(order)[1]]

    # A TPU sorts (order, value), both in one number, in a fifth of the time of a gather.
    together = (order.int() << bits) | values
    return torch.sort(together)[0] & ((1 << bits) - 1)


# ---- capacities ----------------------------------------------------------------------------------


def planned_capacity(mean: float, events: int, room: float, most: int) -> int:
    """Returns a capacity for a demand that is Poisson-distributed, a multiple of 8 unless it is
    `most`.

    Args:
        mean: of the demand.
        events: how many such demands a step has. That one of them exceeds its capacity has a
            probability below OVERFLOW_PROBABILITY.
        room: a factor on the capacity.
        most: the demand is never larger than this.
    """
    capacity = math.ceil(mean)
    while capacity < most and _log_tail(mean, capacity) > math.log(OVERFLOW_PROBABILITY / events):
        capacity += 1
    in_eights = math.ceil(math.ceil(capacity * room) / 8) * 8
    return min(most, in_eights)


def _log_tail(mean: float, capacity: int) -> float:
    """Returns the logarithm of an upper bound of P(Poisson(mean) > capacity), where capacity >=
    mean.

    With k = capacity + 1, each probability from P(k) on is at most mean / (k + 1) times the one
    before it. So they are less than a geometric series: P(k) / (1 - mean / (k + 1)).
    """
    k = capacity + 1
    log_probability = k * math.log(mean) - mean - math.lgamma(k + 1)
    return log_probability - math.log1p(-mean / (k + 1))


# ---- load ----------------------------------------------------------------------------------------


def add_load(total: Tensor, loads: Sequence[SlotLoad], devices: TableDevices) -> dict[str, Tensor]:
    """Adds the loads of a step to those of all steps, on all devices.

    With as few operations as possible: the smallest takes a TPU 2,000 cycles.

    Args:
        total: [3], changed in place: the sum of what was dropped, and the largest "pair" and
            "update" of a SlotLoad.
    Returns:
        The metrics of the step, see ShardedEmbeddingBags.step.
    """
    own = []
    for load in loads:
        own += [load.dropped, load.pair, load.update]
    own = torch.cat(own)

    by_device = (devices.batch_axes, None)
    of_all = devices.leave(own[None], by_device, (devices.mesh.num_devices, len(own)))
    of_all = devices.shard(of_all, (None, None)).reshape(-1, 3)
    sums = of_all.sum(0)
    largest = of_all.amax(0)
    dropped = total[:1] + sums[:1]
    total.copy_(torch.cat([dropped, torch.maximum(total, largest)[1:]]))

    dropped_so_far = total[0] + 0  # a new tensor, since the next step changes `total`
    return {"dropped": dropped_so_far, "pair_load": largest[1], "update_load": largest[2]}


def check_load(load: Sequence[float], room: tuple[float, float]) -> None:
    """Raises InputError where ids were dropped; says which capacity was too small, and what would
    do.

    Args:
        load: the `total` of `add_load`.
        room: the capacity factors of the run.
    """
    dropped, pair_load, update_load = load
    if not dropped:
        return

    pair_room, update_room = room
    if pair_load > 1:
        pair_room = _enough_room(pair_room, pair_load)
    if update_load > 1:
        update_room = _enough_room(update_room, update_load)
    if pair_load > 1:
        # Ids without a slot have sent no gradient, so `update_load` is lower than it will be with
        # enough slots. A factor of 1 is planned for the updates of all ids.
        update_room = max(update_room, 1.0)
    raise InputError(
        f"{dropped:,.0f} ids found no slot in the exchange of embeddings: the fullest pair of "
        f"devices needed {pair_load:.2f} times its slots, the fullest device {update_load:.2f} "
        f"times its updates; give --exchange-room {pair_room:g} {update_room:g} or more "
        f"instead of {room[0]:g} {room[1]:g}, and the same command resumes from the last "
        "checkpoint, before which nothing was dropped"
    )


def _enough_room(factor: float, load: float) -> float:
    """Returns a capacity factor with which a load would be less than 1: a tenth more than needed,
    rounded up to a multiple of 0.1."""
    tenths = 11 * factor * load  # 1.1 times what was needed, in tenths
    return math.ceil(tenths) / 10
