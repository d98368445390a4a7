"""One array on the devices for all tables of one plan: which of its rows are whose, and what they start with."""

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from train.common.device import annotate
from train.common.embedding.hashing import divide, hash32, row_of, shift_right
from train.common.embedding.one_device import OneDevice
from train.common.embedding.tables import LANES, Optimizer, Table, rows_in_a_line

_sizes: dict[int, int] = {}  # bytes per device -> how many live arrays have that size: at most one


def _distinct_rows(rows: int, bytes_per_row: int, owner: object, pack: int = 1) -> int:
    """Returns the next multiple of 8 lines (a TPU's tile) of `pack` rows whose size in bytes no live array has."""
    rows = -(-rows // (8 * pack)) * 8 * pack
    while _sizes.get(rows * bytes_per_row):
        rows += 8 * pack
    _sizes[rows * bytes_per_row] = 1
    weakref.finalize(owner, _sizes.pop, rows * bytes_per_row, None)
    return rows


class TableArray:
    """The tables of one plan: one array [rows, dim] on the devices with its optimizer states.

    Attributes:
        tables: their positions among all tables, in the order in which this array pools them.
        start: first row of each table in the array; where its rows are spread over owners (plan "exchange", see
            hashing.py), counted as if they lay in order.
        local_rows: rows that one device holds; of these the fullest device uses `used_rows`.
        pack: how many of them lie side by side in a line of the array, see tables.py.
        spec: how the array is cut, a partition spec.
        weight: the array; states: those of the optimizer, cut as `state_specs` say.
        offsets, positions: `start` of each column of ids, and `tables`, on the devices.
        device_index: the number of each device along the model axis.
    """

    def __init__(
        self,
        plan: str,
        positions: list[int],
        tables: Sequence[Table],
        dim: int,
        owners: Sequence[int],
        sharding: OneDevice,
        optimizer: Optimizer,
        room: tuple[float, float] = (1.0, 1.0),
    ):
        self.plan, self.tables, self.sharding, self.room = plan, positions, sharding, room
        self.parts, self.dim = sharding.parts, dim
        self.sizes = [tables[t].rows for t in positions]
        self.lookups = [tables[t].lookups for t in positions]
        firsts = np.cumsum([0] + [table.lookups for table in tables])
        self.columns = [c for t in positions for c in range(firsts[t], firsts[t + 1])]  # of the ids that come in
        by_row, by_column = plan in ("exchange", "row", "table"), plan == "column"
        self.spec = (sharding.axis if by_row else None, sharding.axis if by_column else None)
        self.local_dim = dim // self.parts if by_column else dim
        self.pack = rows_in_a_line(self.local_dim, LANES if sharding.mesh.kind.startswith("TPU") else 1)
        self.width = self.pack * self.local_dim * (self.parts if by_column else 1)
        self._lay_out(owners)
        copies = self.parts if by_row else 1
        self.rows = self.local_rows * copies
        if self.rows + self.parts >= 2**31:
            raise InputError(f"tables of plan {plan!r} have {self.rows:,} rows together; ids have 32 bits")
        self.state_kinds = list(optimizer.states.values())
        self.state_specs = [self.spec if kind == "full" else (self.spec[0],) for kind in self.state_kinds]
        self.state_rows = [
            copies
            * (
                _distinct_rows(self.local_rows, 4 * self.local_dim, self, self.pack)
                if kind == "full"
                else _distinct_rows(self.local_rows, 4, self)
            )
            for kind in self.state_kinds
        ]

    def _lay_out(self, owners: Sequence[int]) -> None:
        """Gives each table its first row."""
        sizes = self.sizes
        if self.plan == "table":
            own = [[k for k, t in enumerate(self.tables) if owners[t] == d] for d in range(self.parts)]
            own = [sorted(tables, key=lambda k: -self.lookups[k]) for tables in own]
            rows = max(sum(sizes[k] for k in tables) for tables in own)
        elif self.plan == "exchange":
            rows = sum(-(-size // self.parts) for size in sizes)
        else:
            rows = -(-sum(sizes) // self.parts) if self.plan == "row" else sum(sizes)
        self.used_rows = rows
        self.local_rows = _distinct_rows(rows, 4 * self.local_dim, self, self.pack)
        if self.plan == "table":
            self.start = [0] * len(sizes)
            for d, tables in enumerate(own):
                for k, before in zip(tables, np.cumsum([0] + [sizes[k] for k in tables]), strict=False):
                    self.start[k] = d * self.local_rows + int(before)
            self._make_slots(own)
        else:
            unit = self.parts if self.plan == "exchange" else 1  # a table starts at a multiple of it
            self.start = [int(x) for x in np.cumsum([0, *(-(-size // unit) * unit for size in sizes[:-1])])]

    def _make_slots(self, own: list[list[int]]) -> None:
        """Gives every device the same number of places for ids, since one program runs on all of them: slot k of every
        device is as wide as the widest of their k-th tables (which are sorted by width)."""
        slots = max(len(tables) for tables in own)
        self.slots = [max(self.lookups[tables[k]] for tables in own if k < len(tables)) for k in range(slots)]
        first = np.cumsum([0, *self.lookups])
        padding = int(first[-1])  # the column after the last
        places = []
        for tables in own:
            for k, width in enumerate(self.slots):
                columns = list(range(first[tables[k]], first[tables[k] + 1])) if k < len(tables) else []
                places += columns + [padding] * (width - len(columns))
        self.places = torch.tensor(places)
        order = {k: d * slots + slot for d, tables in enumerate(own) for slot, k in enumerate(tables)}
        self.from_slots = torch.tensor([order[k] for k in range(len(self.tables))])
        slot_tables = [(tables[k] if k < len(tables) else 0) for tables in own for k in range(slots)]
        self.to_slots = torch.tensor(slot_tables)

    def allocate(self, seed: int) -> None:
        """Creates the weight, the states and what finds the rows on the devices."""
        sharding, device = self.sharding, self.sharding.mesh.device
        offsets = np.repeat(self.start, self.lookups).astype(np.int32)
        self.offsets = sharding.replicated(torch.from_numpy(offsets))
        self.positions = sharding.replicated(torch.tensor(self.tables))
        self.device_index = torch.arange(self.parts, dtype=torch.int32).to(device)
        annotate(self.device_index, sharding.spmd, (sharding.axis,))
        for name in ("places", "from_slots", "to_slots") if self.plan == "table" else ():
            setattr(self, name, sharding.replicated(getattr(self, name)))
        self.weight = self._initial(seed)
        self.states = []
        for kind, rows, spec in zip(self.state_kinds, self.state_rows, self.state_specs, strict=True):
            shape = (rows // self.pack, self.width) if kind == "full" else (rows,)
            state = torch.zeros(shape, device=device)
            annotate(state, sharding.spmd, spec)
            self.states.append(state)

    def _initial(self, seed: int) -> Tensor:
        """Returns the initial weight; each device computes its own part."""
        device = self.sharding.mesh.device
        row = torch.arange(self.rows, dtype=torch.int32, device=device)
        if self.plan == "exchange":
            row = row_of(*divide(row, self.local_rows), self.parts)
        own_row, bound, salt = torch.zeros_like(row), torch.zeros_like(row, dtype=torch.float32), torch.zeros_like(row)
        for start, rows, t in zip(self.start, self.sizes, self.tables, strict=True):
            inside = (row >= start) & (row < start + rows)
            own_row = torch.where(inside, row - start, own_row)
            bound = torch.where(inside, rows**-0.5, bound)
            salt = torch.where(
                inside, int(np.random.SeedSequence((seed, t)).generate_state(1)[0].astype(np.int32)), salt
            )
        # Each line has `pack` rows; a device's part of its columns has all of them.
        column = torch.arange(self.width, dtype=torch.int32, device=device)
        part = torch.div(column, self.pack * self.local_dim, rounding_mode="trunc")
        column = part * self.local_dim + column % self.local_dim
        bits = hash32(self._by_line(hash32(own_row ^ salt)) + (column * 0x01000193)[None])
        # 24 bits, the mantissa of float32: -1, ..., 1 - 2**-23, times the bound.
        weight = (shift_right(bits, 8).float() * 2.0**-23 - 1) * self._by_line(bound)
        annotate(weight, self.sharding.spmd, self.spec)
        return weight

    def _by_line(self, x: Tensor) -> Tensor:
        """Spreads a number per row [rows] over the lines: [lines, width], or [rows, 1] where a line is a row."""
        if self.pack == 1:
            return x[:, None]
        x = x.reshape(-1, 1, self.pack, 1).expand(-1, self.width // self.pack // self.local_dim, -1, 1)
        return x.expand(-1, -1, -1, self.local_dim).reshape(-1, self.width)

    def own_columns(self, values: Tensor) -> Tensor:
        """Returns the columns of this array's tables, out of all tables'."""
        columns = self.columns
        if len(columns) == values.shape[1]:
            return values
        starts = [0] + [i for i in range(1, len(columns)) if columns[i] != columns[i - 1] + 1] + [len(columns)]
        runs = [(columns[a], columns[b - 1] + 1) for a, b in itertools.pairwise(starts)]
        return torch.cat([values[:, first:end] for first, end in runs], 1)
