"""What an embedding table is, where it lies on the devices, and how its rows are updated: no XLA in here."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from errors import InputError
from train.common.mesh import Mesh

PLANS = ("exchange", "row", "table", "column", "data")
# `auto` copies a table (with its optimizer state) to every device up to this size: adding up its whole gradient over
# the devices then moves fewer bytes than sending every example's.
COPIED_BYTES = 1 << 20
LANES = 128  # of a TPU's vector unit: an array [rows, fewer columns] takes as much memory as one of 128 columns
# Memory that a program can use on one device, GiB: the limit that libtpu 0.0.21 (TPU7x: 0.0.51) gives of the device, as
# GENERATIONS of tpu/compiler/libtpu.py has it in bytes.
USABLE_GIB = {"TPU v2": 7.48, "TPU v3": 15.48, "TPU v4": 30.75, "TPU v5 lite": 15.75, "TPU v5": 95.73}
USABLE_GIB |= {"TPU v6 lite": 31.24, "TPU7x": 94.74}
IN_PLACE_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here
TABLE_SHARE = 0.75  # of it, for tables and their optimizer state; the rest is for the batch and the network


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
        name: of its feature; in messages, checkpoints and exports.
        rows: number of embeddings; ids are 0 <= id < rows.
        lookups: ids that an example has at most (1: one-hot, more: multi-hot).
        pooling: how an example's embeddings become one vector; an empty bag gives zeros.
        plan: where it lies, see the top of bags.py.
    """

    name: str
    rows: int
    lookups: int = 1
    pooling: Literal["sum", "mean"] = "sum"
    plan: Literal["auto", "exchange", "row", "table", "column", "data"] = "auto"


def check_tables(tables: Sequence[Table], dim: int, devices: int) -> None:
    """Raises InputError where a table is not possible on that many devices per copy of the tables."""
    names = [table.name for table in tables]
    if not names:
        raise InputError("there are no tables")
    for table in tables:
        if table.rows < 1 or table.lookups < 1:
            raise InputError(f"table {table.name!r} has {table.rows} rows, {table.lookups} lookups; each is at least 1")
        if names.count(table.name) > 1 or "/" in table.name:
            raise InputError(f"the name {table.name!r} of a table is not its own, or has a slash")
        if table.plan not in ("auto", *PLANS):
            raise InputError(f"table {table.name!r} has the plan {table.plan!r}; it is auto or {', '.join(PLANS)}")
        if table.pooling not in ("sum", "mean"):
            raise InputError(f"table {table.name!r} has the pooling {table.pooling!r}; it is sum or mean")
        if table.plan == "column" and dim % devices:
            raise InputError(f"table {table.name!r}: {dim} columns do not divide by {devices} devices")


# ---- rows of an array ------------------------------------------------------------------------------------------------
# An array holds `pack` rows of a table side by side in each of its own, so that it fills the lanes of a TPU: [rows, 16]
# would be padded to eight times its size, or copied from a layout of columns to one of rows and back in every step.


def take_rows(array: Tensor, rows: Tensor | None, dim: int) -> Tensor:
    """Returns rows [n] of an array [lines, pack * dim], as [n, dim]; of [rows], as [n]. None: all, not packed."""
    if rows is None:
        return array
    if array.dim() == 1 or array.shape[1] == dim:
        return array[rows]
    line, own = _place(rows, array.shape[1], dim)
    return _fold(torch.where(own, array[line], torch.zeros((), device=array.device)), dim)


def add_rows(array: Tensor, rows: Tensor | None, delta: Tensor) -> Tensor:
    """Returns the array with delta [n, dim] (or [n]) added at these rows; where PyTorch runs operation by operation, it
    is the array itself, since a copy of a table costs more than the step."""
    if rows is None:
        return array + delta
    if array.device.type in IN_PLACE_DEVICES:
        return array.index_add_(0, rows, delta)
    if array.dim() == 1 or array.shape[1] == delta.shape[1]:
        return array.index_add(0, rows, delta)
    line, own = _place(rows, array.shape[1], delta.shape[1])
    wide = delta.repeat(1, array.shape[1] // delta.shape[1])
    return array.index_add(0, line, torch.where(own, wide, torch.zeros_like(wide)))


def _fold(wide: Tensor, dim: int) -> Tensor:
    """Turns [..., pack * dim], 0 outside of one row, into that row [..., dim] by adding halves again and again."""
    while wide.shape[-1] > dim:
        half = wide.shape[-1] // 2
        wide = wide[..., :half] + wide[..., half:]
    return wide


def rows_in_a_line(dim: int, lanes: int) -> int:
    """Returns the largest power of two of rows of `dim` columns that fit into so many lanes."""
    return 1 << max(0, (lanes // dim).bit_length() - 1)


def _place(rows: Tensor, width: int, dim: int) -> tuple[Tensor, Tensor]:
    """Returns (line [n], whether each of its columns belongs to the row [n, width])."""
    pack = width // dim  # a power of two: torch_xla 2.9 divides int32 in float32, which is wrong from 2**24 on
    column = torch.arange(width, dtype=rows.dtype, device=rows.device)
    own = (rows & (pack - 1))[:, None] == torch.div(column, dim, rounding_mode="trunc")[None]
    return rows >> (pack.bit_length() - 1), own


# ---- optimizers ------------------------------------------------------------------------------------------------------
# `update` is per-device code. rows [n] are distinct, or None for every row in order; g [n, dim] is the summed gradient,
# touched [n, 1] is 0 where no example had the row. It returns the new weight and states.


@dataclass(frozen=True)
class SGD:
    """w -= lr g (torch.optim.SGD without momentum)."""

    states: ClassVar[dict[str, str]] = {}

    def update(self, weight, states, rows, g, touched, lr, step, mean_square):
        return add_rows(weight, rows, -lr * g), ()


@dataclass(frozen=True)
class RowWiseAdagrad:
    """s += mean(g^2) over the columns, w -= lr g / (sqrt(s) + eps): fbgemm's EXACT_ROWWISE_ADAGRAD, the rule of
    facebookresearch/dlrm optim/rwsadagrad.py. One number of state per row."""

    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"sum": "row"}

    def update(self, weight, states, rows, g, touched, lr, step, mean_square):
        total = add_rows(states[0], rows, mean_square(g))
        size = -lr / (take_rows(total, rows, g.shape[1]).sqrt() + self.eps)
        return add_rows(weight, rows, g * size[:, None]), (total,)


@dataclass(frozen=True)
class Adagrad:
    """s += g^2, w -= lr g / (sqrt(s) + eps): torch.optim.Adagrad on sparse gradients, fbgemm's EXACT_ADAGRAD
    (Duchi et al. 2011)."""

    eps: float = 1e-10
    states: ClassVar[dict[str, str]] = {"sum": "full"}

    def update(self, weight, states, rows, g, touched, lr, step, mean_square):
        total = add_rows(states[0], rows, g * g)
        return add_rows(weight, rows, -lr * g / (take_rows(total, rows, g.shape[1]).sqrt() + self.eps)), (total,)


@dataclass(frozen=True)
class LazyAdam:
    """Adam on the rows of the step only, bias corrected by the count of all steps: torch.optim.SparseAdam."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"exp_avg": "full", "exp_avg_sq": "full"}

    def update(self, weight, states, rows, g, touched, lr, step, mean_square):
        (beta1, beta2), dim = self.betas, g.shape[1]
        m = add_rows(states[0], rows, (g - take_rows(states[0], rows, dim)) * ((1 - beta1) * touched))
        v = add_rows(states[1], rows, (g * g - take_rows(states[1], rows, dim)) * ((1 - beta2) * touched))
        size = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
        delta = -size * touched * take_rows(m, rows, dim) / (take_rows(v, rows, dim).sqrt() + self.eps)
        return add_rows(weight, rows, delta), (m, v)


Optimizer = SGD | RowWiseAdagrad | Adagrad | LazyAdam
OPTIMIZERS = {"sgd": SGD, "rowwise_adagrad": RowWiseAdagrad, "adagrad": Adagrad, "lazy_adam": LazyAdam}


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where each table lies: its plan, and for plan "table" the device (of the model axis) that holds it."""

    plans: tuple[str, ...]
    owners: tuple[int, ...]

    def counts(self) -> dict[str, int]:
        """Returns how many tables each plan has."""
        return {plan: self.plans.count(plan) for plan in PLANS if plan in self.plans}


def row_bytes(dim: int, optimizer: Optimizer) -> int:
    """Returns the bytes of one row of a table with its optimizer state, float32."""
    kinds = list(optimizer.states.values())
    return 4 * (dim * (1 + kinds.count("full")) + kinds.count("row"))


def place_tables(
    tables: Sequence[Table], dim: int, devices: int, optimizer: Optimizer, device_bytes: float, tpu: bool = False
) -> Placement:
    """Chooses the plan of every table that says "auto", and the device of every table of plan "table".

    * On one device there is nothing to distribute: all are "data".
    * Up to COPIED_BYTES: "data".
    * On TPUs: "exchange". Elsewhere its sorts take longer than they save, and:
    * A table larger than a device's fair share of the others: "column" if each part has LANES columns, else "row".
    * The rest: "table", the largest first, each to the device where the larger of its shares (of rows, of lookups)
      stays smallest. If that is too much for the fullest device, more of the largest are cut.

    Raises:
        InputError: they do not fit device_bytes on each device; says what would.
    """
    size = row_bytes(dim, optimizer)
    plans = [table.plan if devices > 1 else "data" for table in tables]
    for t, table in enumerate(tables):
        if plans[t] == "auto" and table.rows * size <= COPIED_BYTES:
            plans[t] = "data"
        elif plans[t] == "auto" and tpu:
            plans[t] = "exchange"
    cut = "column" if dim % devices == 0 and dim // devices >= LANES else "row"
    free = sorted((t for t, plan in enumerate(plans) if plan == "auto"), key=lambda t: -tables[t].rows)
    fair_share = sum(tables[t].rows for t in free) / devices
    for number_cut in range(sum(tables[t].rows > fair_share for t in free), len(free) + 1):
        for position, t in enumerate(free):
            plans[t] = cut if position < number_cut else "table"
        owners, most_rows = _assign(tables, [t for t, plan in enumerate(plans) if plan == "table"], devices)
        shares = {"exchange": 1 / devices, "row": 1 / devices, "column": 1 / devices, "data": 1, "table": 0}
        needed = size * (most_rows + sum(table.rows * shares[plan] for table, plan in zip(tables, plans, strict=True)))
        if needed <= device_bytes:
            return Placement(tuple(plans), tuple(owners.get(t, 0) for t in range(len(tables))))

    copied = size * sum(table.rows for table, plan in zip(tables, plans, strict=True) if plan == "data")
    shared = size * sum(table.rows for table in tables) - copied
    largest = max(tables, key=lambda table: table.rows)
    raise InputError(
        f"the tables need {needed / 2**30:.3g} GiB on each of {devices} device(s); {device_bytes / 2**30:.3g} GiB are "
        f"there for them (the largest is {largest.name!r}: {largest.rows:,} rows of {size:,} bytes, optimizer state "
        "included). What would fit: "
        + (f"{math.ceil(shared / (device_bytes - copied))} devices, or " if copied < device_bytes and shared else "")
        + f"{int(device_bytes / needed * 100)} % of the rows"
        + (", or plans that share tables out instead of copying them" if copied >= device_bytes else "")
        + (", or an optimizer with less state (RowWiseAdagrad, SGD)" if "full" in optimizer.states.values() else "")
    )


def _assign(tables: Sequence[Table], owned: list[int], devices: int) -> tuple[dict[int, int], int]:
    """Gives each table of plan "table" a device; returns (table -> device, most rows that one device gets)."""
    rows, lookups = [0] * devices, [0] * devices
    all_rows, all_lookups = (sum(getattr(tables[t], name) for t in owned) for name in ("rows", "lookups"))
    owners = {}
    for t in sorted(owned, key=lambda t: -tables[t].rows / all_rows - tables[t].lookups / all_lookups):
        shares = [
            max((rows[d] + tables[t].rows) / all_rows, (lookups[d] + tables[t].lookups) / all_lookups)
            for d in range(devices)
        ]
        owners[t] = int(np.argmin(shares))
        rows[owners[t]] += tables[t].rows
        lookups[owners[t]] += tables[t].lookups
    return owners, max(rows)


def device_bytes_for_tables(mesh: Mesh) -> float:
    """Returns the bytes that one device has for tables: a share of its memory; on the CPU backend, of the machine's."""
    if mesh.kind in USABLE_GIB:
        return TABLE_SHARE * USABLE_GIB[mesh.kind] * 2**30
    if mesh.device.type == "cuda":
        return TABLE_SHARE * torch.cuda.mem_get_info()[1]
    if mesh.kind != "CPU":
        raise InputError(f"the memory of a {mesh.kind!r} is not known: give device_bytes")
    devices_here = mesh.num_devices // mesh.process_count
    return TABLE_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices_here


def check_ids(ids: np.ndarray, tables: Sequence[Table], present: np.ndarray | None = None) -> None:
    """Refuses ids outside of their table, on the host: on the device they would read and train another row.

    Args:
        ids: [n, sum of lookups] integers.
        present: [n, sum of lookups], 0 where there is no id.
    Raises:
        InputError: an id is outside of its table; names table, id and example.
    """
    width = sum(table.lookups for table in tables)
    if ids.ndim != 2 or ids.shape[1] != width:
        raise InputError(f"ids have the shape {list(ids.shape)}; it must be [examples, {width}], the sum of lookups")
    limits = np.repeat([table.rows for table in tables], [table.lookups for table in tables])
    wrong = (ids < 0) | (ids >= limits)
    if present is not None:
        wrong &= present > 0
    if wrong.any():
        example, column = (int(i) for i in np.argwhere(wrong)[0])
        table = tables[int(np.searchsorted(np.cumsum([t.lookups for t in tables]), column, side="right"))]
        raise InputError(
            f"id {ids[example, column]} of table {table.name!r} (example {example} of the batch) is outside of its "
            f"{table.rows} rows; ids are 0 to {table.rows - 1}: prepare the data for these tables, or make them larger"
        )
