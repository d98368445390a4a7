"""Tables leave and enter the devices in pieces, whatever their plan; storage.py writes the pieces
into checkpoints.

A piece has the name "<table>/<weight or state>/<run>/<first column>" and the shape [rows, columns],
or [rows] where a state has a number per row. <run> says which of the table's rows these are
(owners.TableRun). It is `<first>` or `<first>.<owners>.<owner>.<table start>`:

    0            the table's rows from row 0 on, in order
    0.4.2.310    the rows that owner 2 of 4 has, from its first one on. On each owner the table
                 begins at device row 310

plan.py says what the kinds of rows are.

Pieces that are written here have all columns. Older checkpoints, of plans that were removed, may
have pieces with some of the columns, or with a run that begins anywhere in the table: any pieces
that make up a table are read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.embedding.owners import TableRun
from train.common.embedding.plan import TableArray
from train.common.embedding.rows import by_row
from train.common.embedding.tables import Table

STEP = "step"  # the piece that counts the updates
CHUNK = 1 << 20  # rows that are found and copied at once

Shapes = Mapping[str, Sequence[int]]  # of the pieces of all hosts, by name


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a checkpoint holds: the weight of an array, or a state of its optimizer."""

    array: TableArray
    name: str  # "weight", or the name of the state
    tensor: Tensor
    shape_per_device: list[int]  # of what one device holds: [lines, width], or [rows]


@dataclass(frozen=True)
class Piece:
    """Which rows and columns of a table a piece of a checkpoint has.

    Attributes:
        key: the piece's name.
        run: which rows of the table.
        rows: how many.
        first_column: the first of its columns, among those of the table.
        columns: how many; 1 where a state has a number per row.
    """

    key: str
    run: TableRun
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Target:
    """The rows of one table that a device holds, to be filled from pieces.

    Attributes:
        values: [rows, columns], a view of the device's part of the tensor; one column where a state
            has a number per row.
        run: which rows of the table these are.
    """

    values: Tensor
    run: TableRun


def whole_weight(table_name: str) -> str:
    """Returns the name of a piece that is the whole weight of a table: its rows in order from the
    first, all columns."""
    return f"{table_name}/weight/{TableRun(first=0)}/0"


# ---- to a checkpoint -----------------------------------------------------------------------------


def copy_pieces(embeddings: Any) -> dict[str, Tensor]:
    """Copies this host's share of tables and optimizer state to its memory, piece by piece.

    No table is put together anywhere. The pieces of all hosts cover each table once. The main
    process has the count of updates, too.

    Raises:
        InputError: there were ids without a slot, so these are not the numbers to keep.
    """
    embeddings.check()
    device.wait_for_steps()
    pieces = {}
    for saved in _saved_tensors(embeddings):
        local_parts = embeddings.devices.local_parts(saved.tensor, saved.array.spec)
        # Copies, as that of `step_count` is: they are written while training goes on.
        values = embeddings.devices.read_parts(saved.tensor)
        for value, part in zip(values, local_parts, strict=True):
            if part.copy != 0:  # another device has the same part, and saves it
                continue
            rows = by_row(value, saved.array.dim)
            for index, table_index in enumerate(saved.array.table_indices):
                held = saved.array.held_rows(index, part.index)
                if held.count:
                    table = embeddings.tables[table_index]
                    pieces[f"{table.name}/{saved.name}/{held.run}/0"] = held.select(rows)
    if embeddings.mesh.main_process:
        pieces[STEP] = embeddings.step_count.to("cpu", copy=True)
    return pieces


def _saved_tensors(embeddings: Any) -> list[SavedTensor]:
    """Returns everything that a checkpoint holds, except the count of updates."""
    found = []
    for array in embeddings.arrays:
        shapes = array.shapes_per_device()
        for (name, tensor), shape in zip(array.tensors(), shapes, strict=True):
            found.append(SavedTensor(array, name, tensor, shape))
    return found


# ---- from a checkpoint ---------------------------------------------------------------------------


def load_pieces(embeddings: Any, shapes: Shapes, read: Callable[[str], Tensor]) -> None:
    """Fills the tables and their optimizer state from pieces that any plan on any devices has made.

    Args:
        shapes: of all pieces.
        read: returns a piece; called once for each that this host needs.
    Raises:
        InputError: the pieces are not those of these tables and this optimizer.
    """
    keys_of = _group_keys(embeddings, shapes)
    device.wait_for_steps()
    for saved in _saved_tensors(embeddings):
        array = saved.array
        part_indices = array.parts_to_fill(saved.tensor)
        parts = [torch.zeros(saved.shape_per_device) for _ in part_indices]
        for index, table_index in enumerate(array.table_indices):
            table = embeddings.tables[table_index]
            has_one_number_per_row = saved.tensor.dim() == 1
            whole = [table.rows] if has_one_number_per_row else [table.rows, array.dim]
            keys = keys_of[f"{table.name}/{saved.name}"]
            pieces = [_piece(key, shapes[key], whole, array.dim) for key in keys]
            _fill(_targets(array, index, parts, part_indices), pieces, table, read)
        array.fill(saved.tensor, parts)
    embeddings.step_count.copy_(read(STEP))
    embeddings.devices.annotate_replicated(embeddings.step_count)


def _targets(
    array: TableArray, index: int, parts: list[Tensor], part_indices: list[int]
) -> list[Target]:
    """Returns the rows of the array's `index`-th table in each of these parts of a tensor."""
    targets = []
    for part, part_index in zip(parts, part_indices, strict=True):
        held = array.held_rows(index, part_index)
        rows = held.select(by_row(part, array.dim))
        values = rows[:, None] if rows.dim() == 1 else rows
        targets.append(Target(values, held.run))
    return targets


def _group_keys(embeddings: Any, shapes: Shapes) -> dict[str, list[str]]:
    """Returns the names of the pieces by "<table>/<weight or state>".

    Raises:
        InputError: these are not the tables and states of the embeddings.
    """
    expected = set()
    for table in embeddings.tables:
        for name in ("weight", *embeddings.optimizer.states):
            expected.add(f"{table.name}/{name}")

    found: dict[str, list[str]] = {}
    for key in shapes:
        if key != STEP:
            table_and_name = key.rsplit("/", 2)[0]  # without the run and the first column
            found.setdefault(table_and_name, []).append(key)

    if expected != found.keys() or STEP not in shapes:
        differing = sorted(expected ^ found.keys())
        first = ", ".join(differing[:3]) or STEP
        raise InputError(f"its tables or optimizer differ from these in {first}")
    return found


def _piece(key: str, shape: Sequence[int], whole: list[int], dim: int) -> Piece:
    """Returns a piece of a checkpoint, given its name and shape.

    Args:
        whole: the shape of all of the table's weight or state, [rows, dim] or [rows].
    Raises:
        InputError: it is no part of the whole.
    """
    run = TableRun.of_piece(key)
    first_column = int(key.rsplit("/", 1)[1])
    rows, *rest = shape
    columns = rest[0] if rest else 1

    # The last row of the run has the largest table row: they increase.
    last_table_row = int(run.table_rows(begin=rows - 1, end=rows))
    is_outside = last_table_row >= whole[0] or first_column + columns > dim
    if is_outside or len(shape) != len(whole):
        raise InputError(f"its {key} has the shape {list(shape)}, which is no part of {whole}")
    return Piece(key, run, rows, first_column, columns)


def _fill(
    targets: Sequence[Target],
    pieces: Sequence[Piece],
    table: Table,
    read: Callable[[str], Tensor],
) -> None:
    """Copies the pieces of one table into what the devices of this host hold of it.

    Raises:
        InputError: the pieces have fewer or more numbers for these devices than the devices hold. A
            gap and an overlap of the same size are not noticed.
    """
    filled = 0
    for piece in pieces:
        filled += _fill_from(piece, targets, read)
    if filled != sum(target.values.numel() for target in targets):
        raise InputError(f"its pieces of table {table.name!r} do not make up {table.rows} rows")


def _fill_from(piece: Piece, targets: Sequence[Target], read: Callable[[str], Tensor]) -> int:
    """Copies a piece into the targets, and returns how many numbers it has copied.

    It reads the piece once, and only if a target has a row of it.
    """
    values = None
    filled = 0
    for target in targets:
        target_rows = len(target.values)
        if not target.run.may_share(target_rows, piece.run, piece.rows):
            continue

        end_column = piece.first_column + piece.columns
        values_of_columns = target.values[:, piece.first_column : end_column]
        for begin in range(0, piece.rows, CHUNK):
            table_rows = piece.run.table_rows(begin, min(begin + CHUNK, piece.rows))
            in_chunk, in_target = target.run.find(table_rows, target_rows)
            if len(in_chunk) == 0:
                continue
            if values is None:
                values = read(piece.key).reshape(piece.rows, piece.columns)
            values_of_columns[in_target] = values[begin : begin + CHUNK][in_chunk]
            filled += len(in_chunk) * piece.columns
    return filled
