"""Tables leave and enter the devices in pieces, whatever their plan; storage.py writes the pieces into checkpoints.

A piece has the name "<table>/<weight or state>/<first row>/<first column>" and the shape [rows, columns], or [rows]
where a state has a number per row. Its rows are those of the table, not of its place on the devices.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.embedding.arrays import TableArray
from train.common.embedding.tables import Table

STEP = "step"  # the piece that counts the updates


def _stored(embeddings: Any) -> Iterator[tuple[TableArray, str, Tensor]]:
    """Yields (array, "weight" or the name of a state, tensor) of everything that a checkpoint holds."""
    device.wait_for_steps()
    for array in embeddings.arrays:
        names = ["weight", *embeddings.optimizer.states]
        for name, tensor in zip(names, [array.weight, *array.states], strict=True):
            yield array, name, tensor


def copy_pieces(embeddings: Any) -> dict[str, Tensor]:
    """Copies this host's share of tables and optimizer state to its memory; no table is put together anywhere.

    The pieces of all hosts cover each table once. The main process has the count of updates, too.
    """
    pieces = {}
    for array, name, tensor in _stored(embeddings):
        places = embeddings.sharding.places(tensor)
        for data, (replica, indices) in zip(embeddings.sharding.parts_of(tensor), places, strict=True):
            if replica != 0:
                continue
            first, last, column = _bounds(array, indices, tensor)
            if tensor.dim() == 2:
                data = data.reshape(-1, array.local_dim)
            for start, t in zip(array.start, array.tables, strict=True):
                a, b = max(first, start), min(last, start + embeddings.tables[t].rows)
                if a < b:
                    key = f"{embeddings.tables[t].name}/{name}/{a - start}/{column}"
                    pieces[key] = data[a - first : b - first]
    if embeddings.mesh.main_process:
        pieces[STEP] = embeddings.step_count.to("cpu", copy=True)  # written while training goes on
    return pieces


def load_pieces(embeddings: Any, shapes: dict[str, Sequence[int]], read: Callable[[str], Tensor]) -> None:
    """Fills the tables and their optimizer state from pieces that any plan on any devices has made.

    Args:
        shapes: of every piece of all hosts, by name.
        read: returns a piece; called once for each that this host needs.
    Raises:
        InputError: the pieces are not those of these tables and this optimizer.
    """
    expected = {f"{t.name}/{name}" for t in embeddings.tables for name in ("weight", *embeddings.optimizer.states)}
    found: dict[str, list[tuple[int, int, str]]] = {}
    for key in shapes:
        if key != STEP:
            kind, row, column = key.rsplit("/", 2)
            found.setdefault(kind, []).append((int(row), int(column), key))
    if expected != found.keys() or STEP not in shapes:
        differing = sorted(expected ^ found.keys())
        raise InputError(f"its tables or optimizer differ from these in {', '.join(differing[:3]) or STEP}")
    for array, name, tensor in _stored(embeddings):
        places = embeddings.sharding.places(tensor)
        bounds = [_bounds(array, indices, tensor) for _, indices in places]
        copied = places[0][1] is Ellipsis
        if copied:
            bounds = bounds[:1]
        local_shape = torch.Size([tensor.shape[0] // (array.parts if array.spec[0] else 1)])
        if tensor.dim() == 2:
            local_shape += (array.pack * array.local_dim,)
        rows_shape = (-1, array.local_dim) if tensor.dim() == 2 else (-1,)
        shards = [torch.zeros(local_shape).reshape(rows_shape) for _ in bounds]
        for start, t in zip(array.start, array.tables, strict=True):
            pieces = found[f"{embeddings.tables[t].name}/{name}"]
            _fill(shards, bounds, start, embeddings.tables[t], array.dim, pieces, shapes, read)
        shards = [shard.reshape(local_shape) for shard in shards]
        if copied:
            tensor.copy_(shards[0])
            array.sharding.annotate_replicated(tensor)
        else:
            embeddings.sharding.load_parts(tensor, shards, embeddings.arrays[0].device_index)
    embeddings.step_count.copy_(read(STEP))
    embeddings.sharding.annotate_replicated(embeddings.step_count)


def _fill(shards, bounds, start: int, table: Table, dim: int, pieces, shapes, read) -> None:
    """Copies the pieces of one table, which starts at row `start` of its array, into the devices' parts."""
    filled = 0
    for row, column, key in pieces:
        rows, columns = (*shapes[key], 1)[:2]
        if row + rows > table.rows or column + columns > dim or len(shapes[key]) != shards[0].dim():
            size = [table.rows, dim][: shards[0].dim()]
            raise InputError(f"its {key} has the shape {list(shapes[key])}, which is no part of {size}")
        piece = None
        for shard, (first, last, first_column) in zip(shards, bounds, strict=True):
            a, b = max(first, start + row), min(last, start + row + rows)
            shard_columns = 1 if shard.dim() == 1 else shard.shape[1]
            c, d = max(first_column, column), min(first_column + shard_columns, column + columns)
            if a < b and c < d:
                piece = read(key) if piece is None else piece
                source, target = piece[a - start - row : b - start - row], shard[a - first : b - first]
                if shard.dim() == 2:
                    source = source[:, c - column : d - column]
                    target = target[:, c - first_column : d - first_column]
                target.copy_(source)
                filled += target.numel()
    spans = [max(0, min(last, start + table.rows) - max(first, start)) for first, last, _ in bounds]
    if filled != sum(spans) * shards[0][:1].numel():
        raise InputError(f"its pieces of table {table.name!r} do not make up {table.rows} rows")


def _bounds(array: TableArray, indices: Any, tensor: Tensor) -> tuple[int, int, int]:
    """Returns (first row, end of rows, first column) of a device's part, in rows of the array's weight: a state has
    more of them on each device."""
    if indices is Ellipsis:
        return 0, array.local_rows, 0
    first, last, column = indices[0].start, indices[0].stop, 0
    if tensor.dim() == 2:
        column = indices[1].start // array.pack
    if array.spec[0]:
        return first // (last - first) * array.local_rows, (first // (last - first) + 1) * array.local_rows, column
    return 0, array.local_rows, column
