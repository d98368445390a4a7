"""Which plan each table takes, and whether the tables fit the memory of a device."""

import math
import os
from collections.abc import Sequence

import torch

from errors import InputError
from train.common.embedding.copied import Copied
from train.common.embedding.exchange import Exchanged
from train.common.embedding.optimizers import Optimizer, row_bytes
from train.common.embedding.plan import TableArray
from train.common.embedding.tables import Table
from train.common.mesh import Mesh, processes_of_machine

# The class of each plan, in the order of a model's arrays.
ARRAYS: dict[str, type[TableArray]] = {Exchanged.name: Exchanged, Copied.name: Copied}
# `auto` copies a table (with its optimizer state) to every device up to this size: adding up its
# whole gradient over the devices then moves fewer bytes than sending every example's.
COPIED_BYTES = 1 << 20
# GiB of one device that a program can use, by libtpu 0.0.21 (TPU7x: 0.0.51). GENERATIONS of
# tpu/compiler/libtpu.py has the same limits in bytes.
USABLE_GIB = {
    "TPU v2": 7.48,
    "TPU v3": 15.48,
    "TPU v4": 30.75,
    "TPU v5 lite": 15.75,
    "TPU v5": 95.73,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,
}
# The share of it for tables and their optimizer state; the rest is for the batch and the network.
TABLE_SHARE = 0.75


def choose_plans(
    tables: Sequence[Table], dim: int, devices: int, optimizer: Optimizer, device_bytes: float
) -> tuple[str, ...]:
    """Returns the name of each table's plan.

    "auto" copies tables up to COPIED_BYTES and exchanges larger ones. On one device there is
    nothing to distribute, so all are copied there.

    Args:
        devices: how many share a copy of the tables.
        device_bytes: memory of each for tables and their optimizer state.
    Raises:
        InputError: the tables do not fit; says what would.
    """
    size = row_bytes(dim, optimizer)
    plans = []
    for table in tables:
        if devices == 1:
            plan = Copied.name
        elif table.plan != "auto":
            plan = table.plan
        elif table.rows * size <= COPIED_BYTES:
            plan = Copied.name
        else:
            plan = Exchanged.name
        plans.append(plan)

    rows = 0
    for table, plan in zip(tables, plans, strict=True):
        rows += ARRAYS[plan].rows_per_device(table.rows, devices)
    needed = size * rows
    if needed > device_bytes:
        message = _what_would_fit(tables, plans, devices, optimizer, size, needed, device_bytes)
        raise InputError(message)
    return tuple(plans)


def devices_of_a_copy(
    tables: Sequence[Table], dim: int, mesh: Mesh, optimizer: Optimizer, device_bytes: float
) -> int:
    """Returns how many devices share a copy of the tables where none are given: all.

    On two slices those of one, if the tables fit: a slice then sends the gradients of its rows to
    the other, which is less than what an exchange over both sends there. On more slices it would be
    more (docs/embeddings.md).

    Args:
        device_bytes: memory of each for tables and their optimizer state.
    """
    if mesh.slices != 2:
        return mesh.num_devices
    try:
        choose_plans(tables, dim, mesh.devices_per_slice, optimizer, device_bytes)
    except InputError:
        return mesh.num_devices
    return mesh.devices_per_slice


def _what_would_fit(
    tables: Sequence[Table],
    plans: Sequence[str],
    devices: int,
    optimizer: Optimizer,
    size: int,
    needed: float,
    device_bytes: float,
) -> str:
    """Returns how much memory the tables need, how much there is, and what would fit.

    Args:
        size: bytes of a row.
        needed: bytes on each device.
    """
    copied = 0
    shared = 0
    for table, plan in zip(tables, plans, strict=True):
        if plan == Copied.name:
            copied += size * table.rows
        else:
            shared += size * table.rows
    largest = max(tables, key=lambda table: table.rows)

    remedies = []
    if shared and copied < device_bytes:
        remedies.append(f"{math.ceil(shared / (device_bytes - copied))} devices")
    remedies.append(f"{int(device_bytes / needed * 100)} % of the rows")
    if copied >= device_bytes:
        remedies.append("plans that share tables out instead of copying them")
    if "full" in optimizer.states.values():
        remedies.append("an optimizer with less state (RowWiseAdagrad, SGD)")
    return (
        f"the tables need {needed / 2**30:.3g} GiB on each of {devices} device(s); "
        f"{device_bytes / 2**30:.3g} GiB are there for them (the largest is {largest.name!r}: "
        f"{largest.rows:,} rows of {size:,} bytes, optimizer state included). "
        f"What would fit: {', or '.join(remedies)}"
    )


def device_bytes_for_tables(mesh: Mesh) -> float:
    """Returns the bytes that one device has for tables: TABLE_SHARE of its memory.

    On CPUs the devices of a host share the machine's memory.

    Raises:
        InputError: the memory of this kind of device is not known.
    """
    if mesh.kind in USABLE_GIB:
        return TABLE_SHARE * USABLE_GIB[mesh.kind] * 2**30
    if mesh.device.type == "cuda":
        return TABLE_SHARE * torch.cuda.mem_get_info()[1]
    if mesh.kind != "CPU":
        raise InputError(f"the memory of a {mesh.kind!r} is not known: give device_bytes")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices_here = mesh.num_devices // mesh.process_count * processes_of_machine()
    return TABLE_SHARE * machine / devices_here
