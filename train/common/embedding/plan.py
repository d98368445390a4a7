"""The tables of one plan: where their rows lie on the devices, how they are looked up and updated.

All tables of one plan lie in one array, with the states of their optimizer: a `TableArray`. Five
numbers tell where a row is; each has one name, here and in the other files:

    table row     its number within its table, which is what an id is: 0 <= table row < table.rows
    array row     its number among the rows of all tables of the array, over all devices: the first
                  array row of its table (`start`) plus the table row
    device row    its number among the rows that one device holds: 0 <= device row < `device_rows`.
                  A plan says which device has an array row, and as which device row
    tensor row    its number in the array's tensor, which has the rows of one device after the
                  other: device index * `device_rows` + device row
    line          where it is in the tensor. A line holds `pack` device rows side by side (rows.py),
                  so device row r is in line r // pack of its device. The tensor [lines, pack * dim]
                  is the concatenation of the devices' lines

With `model_devices` the devices form groups. Each group has a copy of every table, and what is said
of "all devices" is true of the devices of a group.

Per-device code runs in a region (devices.py): there, a tensor is the part that each device holds.
"""

import abc
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from train.common.embedding.devices import TableDevices
from train.common.embedding.optimizers import Optimizer
from train.common.embedding.owners import TableRun
from train.common.embedding.rows import LANES, LAST, rows_in_a_line
from train.common.embedding.tables import Table
from train.common.hashing import hash32, shift_right

TILE_LINES = 8  # lines of a TPU's tile
COLUMN_FACTOR = 0x01000193  # FNV's 32-bit prime: sets the hashes of neighbouring columns apart

# Bytes per device of all live arrays, each of which has a size of its own.
_live_sizes: set[int] = set()


def _rows_with_own_size(rows: int, bytes_per_row: int, owner: object, pack: int = 1) -> int:
    """Returns how many rows a device allocates for `rows`, so that no live array has as many bytes.

    XLA pairs a program's inputs with its outputs by their size, see rule 4 of bags.py. The size is
    taken until `owner` is deleted.

    Args:
        pack: rows of a line. The result is a multiple of a TPU's tile of lines.
    """
    tile = TILE_LINES * pack
    rows = math.ceil(rows / tile) * tile
    while rows * bytes_per_row in _live_sizes:
        rows += tile
    size = rows * bytes_per_row
    _live_sizes.add(size)
    weakref.finalize(owner, _live_sizes.discard, size)
    return rows


@dataclass(frozen=True)
class SlotLoad:
    """What a lookup or an update asks of the slots of a device, see exchange.py.

    All are [1] on each device. `pair` and `update` are demand / capacity: above 1 some were
    dropped.

    Attributes:
        dropped: how many distinct ids, or rows to update, found no slot.
        pair: of a lookup: the slots that this device's ids need at the owner where they need most,
            divided by the slots that it has at each owner; 0 of an update.
        update: of an update: the rows to update on this device, divided by the rows that a step has
            room for; 0 of a lookup.
    """

    dropped: Tensor
    pair: Tensor
    update: Tensor


@dataclass(frozen=True)
class HeldRows:
    """The rows of one table that a device holds, which are consecutive device rows.

    Attributes:
        run: which of the table's rows they are.
        first_device_row: the first of them.
        count: how many they are.
    """

    run: TableRun
    first_device_row: int
    count: int

    def select(self, device_rows: Tensor) -> Tensor:
        """Returns a view of them, out of all rows of the device."""
        return device_rows[self.first_device_row : self.first_device_row + self.count]


class TableArray(abc.ABC):
    """The tables of one plan in one array, with the states of their optimizer.

    Attributes:
        name: of the plan, as `Table.plan` has it.
        may_drop: whether ids can be left without a slot, so that a run must check the load.
        table_indices: which tables these are, among all tables; they increase.
        sizes: rows of each table.
        lookups: how many columns of ids each table has, see Table.
        column_indices: which columns of ids these are, among the columns of all tables.
        start: the first array row of each table.
        device_rows: rows that a device has memory for.
        used_rows: how many of these can hold a row of a table; the others are never looked up.
        group_size: devices that share a copy of the tables.
        pack: rows in a line.
        width: columns of a line.
        rows: device rows of all devices together, or of one where the array is not cut.
        spec: how the array is cut over the devices.
        weight: the array [lines, width].
        states: those of the optimizer, cut as `state_specs` say.
        offsets: on the devices, for each column of ids the `start` of its table.
        positions: `table_indices` on the devices: bags.py picks the tables' gradients by it.
        device_indices: on each device its index in its group, for `TableDevices.load_parts`.
    """

    name: ClassVar[str]
    may_drop: ClassVar[bool] = False

    def __init__(
        self,
        table_indices: list[int],
        tables: Sequence[Table],
        dim: int,
        devices: TableDevices,
        optimizer: Optimizer,
        room: tuple[float, float] = (1.0, 1.0),
    ):
        """
        Args:
            table_indices: which of all `tables` have this plan.
            room: capacity factors, see ShardedEmbeddingBags.
        Raises:
            InputError: an array row is no int32.
        """
        self.table_indices = table_indices
        self.dim = dim
        self.devices = devices
        self.group_size = devices.group_size
        self.optimizer = optimizer
        self.room = room
        self.sizes = [tables[index].rows for index in table_indices]
        self.lookups = [tables[index].lookups for index in table_indices]
        # One more than tables: where the last one ends.
        first_columns = np.cumsum([0] + [table.lookups for table in tables])
        self.column_indices = []
        for index in table_indices:
            self.column_indices.extend(range(first_columns[index], first_columns[index + 1]))

        on_tpu = devices.mesh.kind.startswith("TPU")
        self.pack = rows_in_a_line(dim, LANES if on_tpu else 1)
        self.width = self.pack * dim
        self.start, self.used_rows = self._lay_out()
        self.device_rows = self._rows_to_allocate(self.used_rows, 4 * dim, self.pack)
        self.rows = self.device_rows * self.part_count
        largest_key = self.rows + self.group_size - 1  # in the sorts of exchange.py
        if largest_key >= LAST:
            raise InputError(
                f"tables of plan {self.name!r} have {self.rows:,} rows together; ids have 32 bits"
            )

        self.state_shapes = []
        self.state_specs = []
        for kind in optimizer.states.values():
            if kind == "full":
                state_rows = self._rows_to_allocate(self.device_rows, 4 * dim, self.pack)
                lines = state_rows * self.part_count // self.pack
                self.state_shapes.append((lines, self.width))
                self.state_specs.append(self.spec)
            else:
                state_rows = self._rows_to_allocate(self.device_rows, 4)
                self.state_shapes.append((state_rows * self.part_count,))
                self.state_specs.append(self.spec[:1])

    def _rows_to_allocate(self, rows: int, bytes_per_row: int, pack: int = 1) -> int:
        """Returns how many rows a device allocates for `rows`, see `_rows_with_own_size`."""
        if not self.devices.mesh.compiles:
            # Processes that share the array have as many each, whatever else is alive in them.
            return rows
        return _rows_with_own_size(rows, bytes_per_row, self, pack)

    # ---- where rows lie: what a plan decides

    @property
    @abc.abstractmethod
    def spec(self) -> tuple[str | None, None]:
        """How the array is cut over the devices."""

    @classmethod
    @abc.abstractmethod
    def rows_per_device(cls, rows: int, devices: int) -> float:
        """Returns how many of a table's rows each of so many devices holds, on average."""

    @abc.abstractmethod
    def _lay_out(self) -> tuple[list[int], int]:
        """Returns the first array row of each table, and the device rows that the fullest device
        uses."""

    @abc.abstractmethod
    def _array_rows(self, tensor_rows: Tensor) -> Tensor:
        """Returns the array row of each row of the array's tensor.

        That of a row which no table has is outside of all tables.

        Args:
            tensor_rows: [rows].
        """

    @abc.abstractmethod
    def held_rows(self, index: int, part: int) -> HeldRows:
        """Returns the rows of one table that a device holds.

        Args:
            index: of the table in the array.
            part: index of the device's part of the array.
        """

    @abc.abstractmethod
    def parts_to_fill(self, tensor: Tensor) -> list[int]:
        """Returns the indices of the parts of a tensor that `fill` needs on this host."""

    @abc.abstractmethod
    def fill(self, tensor: Tensor, parts: list[Tensor]) -> None:
        """Gives a tensor the values of `parts_to_fill`."""

    # ---- a step

    @abc.abstractmethod
    def lookup(self, array_rows: Tensor) -> tuple[Tensor, Any]:
        """Looks up and adds up the rows of each bag.

        Args:
            array_rows: [batch, columns of the array's tables] int32; -1 where a bag has no id.
        Returns:
            The sums [batch, tables of the array, dim], sharded by the batch; what is kept of the
            lookup for `update` and `slot_loads`.
        """

    @abc.abstractmethod
    def update(
        self,
        kept_by_pass: Sequence[Any],
        grads: Sequence[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> list[SlotLoad]:
        """Updates the rows of several lookups at once, each row once.

        Args:
            kept_by_pass: of each forward pass since the last update, what its lookup has returned
                beside its sums.
            grads: the gradient of each lookup's sums, [batch, tables of the array, dim].
            step: 1-based number of this update.
        Returns:
            The loads of the lookups and of the update; [] for a plan without slots.
        """

    def slot_loads(self, kept: Any) -> list[SlotLoad]:
        """Returns the load of a lookup's slots in a list; [] for a plan without slots.

        Args:
            kept: what the lookup has returned beside its sums.
        """
        return []

    # ---- what all plans have

    @property
    def part_count(self) -> int:
        """The parts that the array is cut into; 1 where every device has all of it."""
        is_cut = self.spec[0] is not None
        return self.group_size if is_cut else 1

    def allocate(self, seed: int) -> None:
        """Creates the weight and the states, and `offsets`, `positions` and `device_indices`."""
        offsets = np.repeat(self.start, self.lookups).astype(np.int32)
        self.offsets = self.devices.replicated(torch.from_numpy(offsets))
        self.positions = self.devices.replicated(torch.tensor(self.table_indices))
        self.device_indices = self.devices.device_indices()
        self.weight = self._initial_weight(seed)
        self.states = []
        for shape, spec in zip(self.state_shapes, self.state_specs, strict=True):
            local_shape = (len(self.devices.local_rows(shape[0], spec)), *shape[1:])
            state = torch.zeros(local_shape, device=self.devices.mesh.device)
            self.devices.annotate(state, spec)
            self.states.append(state)

    def _initial_weight(self, seed: int) -> Tensor:
        """Returns the initial weight, of which each device computes its own part.

        Each number is a hash of (seed, table, table row, column), so it does not depend on where
        the row lies.
        """
        device = self.devices.mesh.device
        local = self.devices.local_rows(self.rows, self.spec)
        tensor_row = torch.arange(local.start, local.stop, dtype=torch.int32, device=device)
        array_row = self._array_rows(tensor_row)
        table_row = torch.zeros_like(array_row)
        bound = torch.zeros_like(array_row, dtype=torch.float32)
        salt = torch.zeros_like(array_row)
        for start, rows, index in zip(self.start, self.sizes, self.table_indices, strict=True):
            of_table = (array_row >= start) & (array_row < start + rows)
            generated = np.random.SeedSequence((seed, index)).generate_state(1)
            table_salt = int(generated[0].astype(np.int32))
            table_row = torch.where(of_table, array_row - start, table_row)
            bound = torch.where(of_table, rows**-0.5, bound)
            salt = torch.where(of_table, table_salt, salt)

        column = torch.arange(self.width, dtype=torch.int32, device=device) % self.dim
        row_hash = self._over_lines(hash32(table_row ^ salt))
        bits = hash32(row_hash + (column * COLUMN_FACTOR)[None])
        # 24 bits, the mantissa of float32: -1, ..., 1 - 2**-23, times the bound.
        uniform = shift_right(bits, 8).float() * 2.0**-23 - 1
        weight = uniform * self._over_lines(bound)
        self.devices.annotate(weight, self.spec)
        return weight

    def _over_lines(self, of_rows: Tensor) -> Tensor:
        """Spreads a number per row [rows] over the columns of the lines: [lines, width].

        [rows, 1] where a line is a row.
        """
        if self.pack == 1:
            return of_rows[:, None]
        by_line = of_rows.reshape(-1, self.pack, 1)
        return by_line.expand(-1, -1, self.dim).reshape(-1, self.width)

    def own_columns(self, values: Tensor) -> Tensor:
        """Returns the columns of this array's tables, out of those of all tables.

        Args:
            values: [batch, columns of all tables].
        """
        columns = self.column_indices  # they increase, as `table_indices` do
        if len(columns) == values.shape[1]:
            return values

        # Consecutive columns are cut out together: slices in place of a gather.
        begins = [0]
        for i in range(1, len(columns)):
            if columns[i] != columns[i - 1] + 1:
                begins.append(i)
        runs = []
        for begin, end in itertools.pairwise([*begins, len(columns)]):
            runs.append(values[:, columns[begin] : columns[end - 1] + 1])
        return torch.cat(runs, 1)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns what a checkpoint holds of the array: ("weight" or the name of a state,
        tensor)."""
        names = ["weight", *self.optimizer.states]
        return list(zip(names, [self.weight, *self.states], strict=True))

    def shapes_per_device(self) -> list[list[int]]:
        """Returns the shape of what a device holds of each of `tensors`: [lines, width], or
        [rows]."""
        shapes = []
        for first, *rest in [(self.rows // self.pack, self.width), *self.state_shapes]:
            shapes.append([first // self.part_count, *rest])
        return shapes

    def _update_rows(
        self, rows: Tensor, g: Tensor, touched: Tensor, lr: Tensor, step: Tensor
    ) -> None:
        """Updates device rows of the weight and of the states, in a region.

        Args:
            rows: [n] device rows: distinct where touched is 1, and 0 where it is 0. Without states
                in the optimizer they may repeat.
            g: [n, dim] the gradient of each, 0 where touched is 0.
            touched: [n, 1] float32; 0: the row stays as it is.
        """
        weight, *states = self._enter_tensors()
        weight, states = self.optimizer.update(weight, states, rows, g, touched, lr, step)
        self._leave_tensors([weight, *states])

    def _enter_tensors(self) -> list[Tensor]:
        """Returns each device's part of the weight and of the states; begins a region."""
        parts = []
        specs = [self.spec, *self.state_specs]
        for tensor, spec in zip([self.weight, *self.states], specs, strict=True):
            parts.append(self.devices.enter(tensor, spec))
        return parts

    def _leave_tensors(self, parts: Sequence[Tensor]) -> None:
        """Writes each device's part of the weight and of the states back; ends the region.

        They are copied with `copy_` into the tensors that were entered, which keep their memory
        (bags.py says why).
        """
        specs = [self.spec, *self.state_specs]
        for tensor, part, spec in zip([self.weight, *self.states], parts, specs, strict=True):
            tensor.copy_(self.devices.leave(part, spec, tensor.shape))
