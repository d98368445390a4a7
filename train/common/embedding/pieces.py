"""Tables leave and enter the devices in pieces, whatever their plan; storage.py writes the pieces
into checkpoints.

A piece has the name "<table>/<weight or state>/<rows>/<first column>" and the shape [rows,
columns], or [rows] where a state has a number per row. <rows> is a run of the table's rows
(owners.Rows): `0` from table row 0 in order, or `0.4.2.310` as owner 2 of 4 holds them. plan.py
says what the kinds of rows are.

Pieces that are written here have all columns. Those of plans that were removed may have some, and
runs that begin anywhere in a table: any pieces that make up a table are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.embedding.owners import Rows
from train.common.embedding.plan import Plan
from train.common.embedding.tables import Table

STEP = "step"  # the piece that counts the updates
CHUNK = 1 << 20  # rows that are found and copied at once

Shapes = Mapping[str, Sequence[int]]  # of the pieces of all hosts, by name


@dataclass(frozen=True)
class Target:
    """The rows of one table that a device holds, to be filled from pieces: a view [rows, dim], or
    [rows]."""

    view: Tensor
    rows: Rows


# ---- to a checkpoint -----------------------------------------------------------------------------


def copy_pieces(embeddings: Any) -> dict[str, Tensor]:
    """Copies this host's share of tables and optimizer state to its memory; no table is put
    together anywhere.

    The pieces of all hosts cover each table once. The main process has the count of updates, too.

    Raises:
        InputError: there were ids without a slot, so these are not the numbers to keep.
    """
    embeddings.check()
    pieces = {}
    for plan, name, tensor in _saved_tensors(embeddings):
        local_parts = embeddings.devices.local_parts(tensor)
        for data, part in zip(embeddings.devices.read_parts(tensor), local_parts, strict=True):
            if part.copy != 0:
                continue
            rows = _by_row(data, plan.dim)
            for number, table in enumerate(plan.numbers):
                held = plan.held_rows(number, part.number)
                if held.count:
                    key = f"{embeddings.tables[table].name}/{name}/{held.rows}/0"
                    pieces[key] = rows[held.first : held.first + held.count]
    if embeddings.mesh.main_process:
        pieces[STEP] = embeddings.step_count.to("cpu", copy=True)  # written while training goes on
    return pieces


def _saved_tensors(embeddings: Any) -> Iterator[tuple[Plan, str, Tensor]]:
    """Yields (plan, "weight" or the name of a state, tensor) of everything that a checkpoint
    holds."""
    device.wait_for_steps()
    for plan in embeddings.arrays:
        for name, tensor in plan.tensors():
            yield plan, name, tensor


def _by_row(lines: Tensor, dim: int) -> Tensor:
    """Returns lines [lines, pack * dim] as device rows [rows, dim]; a number per row [rows] as it
    is."""
    if lines.dim() == 1:
        return lines
    return lines.reshape(-1, dim)


# ---- from a checkpoint ---------------------------------------------------------------------------


def load_pieces(embeddings: Any, shapes: Shapes, read: Callable[[str], Tensor]) -> None:
    """Fills the tables and their optimizer state from pieces that any plan on any devices has made.

    Args:
        read: returns a piece; called once for each that this host needs.
    Raises:
        InputError: the pieces are not those of these tables and this optimizer.
    """
    pieces = _sorted_out(embeddings, shapes)
    for plan, name, tensor in _saved_tensors(embeddings):
        lines = _lines_of_a_device(plan, tensor)
        part_numbers = plan.parts_to_fill(tensor)
        parts = [torch.zeros(lines) for _ in part_numbers]
        for number, table in enumerate(plan.numbers):
            targets = []
            for part, part_number in zip(parts, part_numbers, strict=True):
                held = plan.held_rows(number, part_number)
                view = _by_row(part, plan.dim)[held.first : held.first + held.count]
                targets.append(Target(view, held.rows))
            of_table = embeddings.tables[table]
            _fill(targets, of_table, plan.dim, pieces[f"{of_table.name}/{name}"], shapes, read)
        plan.fill(tensor, parts)
    embeddings.step_count.copy_(read(STEP))
    embeddings.devices.annotate_replicated(embeddings.step_count)


def _sorted_out(embeddings: Any, shapes: Shapes) -> dict[str, list[str]]:
    """Returns the names of the pieces by "<table>/<weight or state>"; raises InputError where these
    are not the tables and states of the embeddings."""
    expected = set()
    for table in embeddings.tables:
        for name in ("weight", *embeddings.optimizer.states):
            expected.add(f"{table.name}/{name}")
    found: dict[str, list[str]] = {}
    for key in shapes:
        if key != STEP:
            table_and_name = key.rsplit("/", 2)[0]
            found.setdefault(table_and_name, []).append(key)
    if expected != found.keys() or STEP not in shapes:
        differing = sorted(expected ^ found.keys())
        first = ", ".join(differing[:3]) or STEP
        raise InputError(f"its tables or optimizer differ from these in {first}")
    return found


def _lines_of_a_device(plan: Plan, tensor: Tensor) -> list[int]:
    """Returns the shape of what one device holds of an array or a state."""
    is_cut = plan.spec[0] is not None
    lines = tensor.shape[0] // (plan.parts if is_cut else 1)
    return [lines, *tensor.shape[1:]]


def _fill(
    targets: Sequence[Target],
    table: Table,
    dim: int,
    pieces: Sequence[str],
    shapes: Shapes,
    read: Callable[[str], Tensor],
) -> None:
    """Copies the pieces of one table into what the devices of this host hold of it; raises
    InputError where a piece is no part of the table, or the pieces leave a gap."""
    dimensions = targets[0].view.dim()
    filled = 0
    for key in pieces:
        shape = shapes[key]
        source = Rows.of_piece(key)
        first_column = int(key.rsplit("/", 1)[1])
        rows, columns = (*shape, 1)[:2]
        last_row = int(source.table_rows(rows - 1, rows))
        if last_row >= table.rows or first_column + columns > dim or len(shape) != dimensions:
            whole = [table.rows, dim][:dimensions]
            raise InputError(f"its {key} has the shape {list(shape)}, which is no part of {whole}")

        piece = None
        for target in targets:
            target_rows = len(target.view)
            if not target.rows.may_share(target_rows, source, rows):
                continue
            by_column = target.view if dimensions == 2 else target.view[:, None]
            own_columns = by_column[:, first_column : first_column + columns]
            for begin in range(0, rows, CHUNK):
                table_rows = source.table_rows(begin, min(begin + CHUNK, rows))
                in_piece, in_target = target.rows.find(table_rows, target_rows)
                if len(in_piece) == 0:
                    continue
                if piece is None:
                    piece = read(key).reshape(rows, columns)
                own_columns[in_target] = piece[begin : begin + CHUNK][in_piece]
                filled += len(in_piece) * columns
    if filled != sum(target.view.numel() for target in targets):
        raise InputError(f"its pieces of table {table.name!r} do not make up {table.rows} rows")
