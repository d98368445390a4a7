"""Tables leave and enter the devices in pieces, whatever their plan; storage.py writes the pieces into checkpoints.

A piece has the name "<table>/<weight or state>/<rows>/<first column>" and the shape [rows, columns], or [rows] where a
state has a number per row. Its rows are those of the table, not of its place on the devices: `Rows` says which.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from errors import InputError
from train.common import device
from train.common.embedding.arrays import TableArray
from train.common.embedding.hashing import owner_of, row_of
from train.common.embedding.tables import Table

STEP = "step"  # the piece that counts the updates
CHUNK = 1 << 20  # rows that are found and copied at once


class Rows(NamedTuple):
    """Rows of a table that lie one after the other, in a piece or on a device.

    Attributes:
        first: the first one; where rows are spread over owners, among those of this owner.
        parts, owner: over how many owners, and which one this is (hashing.py); 1, 0: all rows are here in their order.
        offset: the table's place on the owner, in its rows, which decides how they are spread.
    """

    first: int
    parts: int = 1
    owner: int = 0
    offset: int = 0

    @classmethod
    def of_piece(cls, key: str) -> "Rows":
        """Returns the rows of a piece; raises ValueError where the name does not tell them."""
        return cls(*(int(number) for number in key.split("/")[2].split(".")))

    def __str__(self) -> str:
        return str(self.first) if self.parts == 1 else ".".join(map(str, self))

    def numbers(self, start: int, stop: int) -> Tensor:
        """Returns which rows of the table the `start`-th to `stop`-th of these are, int32."""
        local = torch.arange(start, stop, dtype=torch.int32) + (self.offset + self.first)
        return row_of(self.owner, local, self.parts) - self.offset * self.parts

    def places(self, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns (where in `numbers` the rows of the table are that are among these `count`, which of these they
        are)."""
        owner, local = owner_of(numbers + self.offset * self.parts, self.parts)
        place = local - (self.offset + self.first)
        here = torch.nonzero((owner == self.owner) & (place >= 0) & (place < count))[:, 0]
        return here, place[here]

    def may_share(self, count: int, other: "Rows", others: int) -> bool:
        """Returns False where these `count` rows and the others have none in common for certain."""
        if (self.parts, self.offset) != (other.parts, other.offset):
            return True
        return self.owner == other.owner and self.first < other.first + others and other.first < self.first + count


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

    Raises:
        InputError: there were ids without a place (plan "exchange"), so these are not the numbers to keep.
    """
    embeddings.check()
    pieces = {}
    for array, name, tensor in _stored(embeddings):
        places = embeddings.sharding.places(tensor)
        for data, (replica, indices) in zip(embeddings.sharding.parts_of(tensor), places, strict=True):
            if replica != 0:
                continue
            first, last, column = _bounds(array, indices, tensor)
            if tensor.dim() == 2:
                data = data.reshape(-1, array.local_dim)
            for number, t in enumerate(array.tables):
                held, place, count = _held(array, number, first, last)
                if count:
                    pieces[f"{embeddings.tables[t].name}/{name}/{held}/{column}"] = data[place : place + count]
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
    found: dict[str, list[str]] = {}
    for key in shapes:
        if key != STEP:
            found.setdefault(key.rsplit("/", 2)[0], []).append(key)
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
        for number, t in enumerate(array.tables):
            targets = []
            for shard, (first, last, column) in zip(shards, bounds, strict=True):
                held, place, count = _held(array, number, first, last)
                targets.append((shard[place : place + count], held, column))
            _fill(targets, embeddings.tables[t], array.dim, found[f"{embeddings.tables[t].name}/{name}"], shapes, read)
        shards = [shard.reshape(local_shape) for shard in shards]
        if copied:
            tensor.copy_(shards[0])
            array.sharding.annotate_replicated(tensor)
        else:
            embeddings.sharding.load_parts(tensor, shards, embeddings.arrays[0].device_index)
    embeddings.step_count.copy_(read(STEP))
    embeddings.sharding.annotate_replicated(embeddings.step_count)


def _fill(targets: list[tuple[Tensor, Rows, int]], table: Table, dim: int, pieces: list[str], shapes, read) -> None:
    """Copies the pieces of one table into what the devices hold of it: (rows [n, columns] or [n], which of the table
    these are, their first column)."""
    filled = 0
    for key in pieces:
        rows, columns = (*shapes[key], 1)[:2]
        source, column = Rows.of_piece(key), int(key.rsplit("/", 1)[1])
        last = int(source.numbers(rows - 1, rows))
        if last >= table.rows or column + columns > dim or len(shapes[key]) != targets[0][0].dim():
            size = [table.rows, dim][: targets[0][0].dim()]
            raise InputError(f"its {key} has the shape {list(shapes[key])}, which is no part of {size}")
        piece = None
        for target, held, first_column in targets:
            target = target if target.dim() == 2 else target[:, None]
            c, d = max(first_column, column), min(first_column + target.shape[1], column + columns)
            if c >= d or not held.may_share(len(target), source, rows):
                continue
            for a in range(0, rows, CHUNK):
                here, places = held.places(source.numbers(a, min(a + CHUNK, rows)), len(target))
                if len(here):
                    piece = read(key).reshape(rows, columns) if piece is None else piece
                    found = piece[a : a + CHUNK, c - column : d - column][here]
                    target[places, c - first_column : d - first_column] = found
                    filled += found.numel()
    if filled != sum(target.numel() for target, _, _ in targets):
        raise InputError(f"its pieces of table {table.name!r} do not make up {table.rows} rows")


def _held(array: TableArray, number: int, first: int, last: int) -> tuple[Rows, int, int]:
    """Returns which rows of its table with this number a device holds that has the rows from `first` to `last` of the
    array; where they start on the device; how many they are."""
    start, size = array.start[number], array.sizes[number]
    if array.plan == "exchange":
        held = Rows(0, array.parts, first // array.local_rows, start // array.parts)
        count = size // array.parts  # and in the last of `parts` rows, which may not all be there
        return held, held.offset, count + int(held.numbers(count, count + 1) < size)
    a, b = max(first, start), min(last, start + size)
    return Rows(a - start), max(a - first, 0), max(b - a, 0)


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
