"""Which device owns an array row when rows are spread over `parts` devices. plan.py says what the
kinds of rows are.

Of every `parts` consecutive array rows each owner has one, all as the same device row. A hash of
the device row rotates them, so that neither a table that is sorted by frequency nor ids with a
common divisor load one owner:

    device row           0   1   2   3
    array row, owner 0   0   4  11  15
               owner 1   1   5   8  12
               owner 2   2   6   9  13
               owner 3   3   7  10  14
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.common.embedding.hashing import divide, hash32


def owner_of(array_rows: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Returns the owner of each array row, and the device row that it is there."""
    device_row, number = divide(array_rows, parts)
    owner = number + _rotation(device_row, parts)
    return torch.where(owner >= parts, owner - parts, owner), device_row


def array_row_of(owner: Tensor | int, device_rows: Tensor, parts: int) -> Tensor:
    """Returns the array row of each of an owner's device rows; the inverse of `owner_of`."""
    number = owner - _rotation(device_rows, parts)
    return device_rows * parts + torch.where(number < 0, number + parts, number)


def _rotation(device_rows: Tensor, parts: int) -> Tensor:
    return divide(hash32(device_rows) & 0xFFFF, parts)[1]


@dataclass(frozen=True)
class Rows:
    """A run of one table's rows, as a device holds them one after the other: which table rows are
    they?

    Where all are in their order (parts 1), the i-th of the run is the table row first + i. Where
    they are spread over owners, it is the owner's device row table_start + first + i, which
    `array_row_of` turns into an array row. The run's length is not part of it.

    Attributes:
        first: where the run begins: the table row, or the device row counted from the table's first
            one.
        parts: owners over which rows are spread; 1: none.
        owner: the one that holds the run.
        table_start: the table's first device row, on each owner; it decides how the hash spreads
            the table.
    """

    first: int
    parts: int = 1
    owner: int = 0
    table_start: int = 0

    @classmethod
    def of_piece(cls, key: str) -> "Rows":
        """Returns the run of a piece of a checkpoint, see pieces.py; raises ValueError where its
        name does not tell."""
        run = key.split("/")[2]
        numbers = [int(number) for number in run.split(".")]
        return cls(*numbers)

    def __str__(self) -> str:
        """Returns the run as the name of a piece has it."""
        if self.parts == 1:
            return str(self.first)
        return f"{self.first}.{self.parts}.{self.owner}.{self.table_start}"

    def table_rows(self, begin: int, end: int) -> Tensor:
        """Returns the table rows of the run's `begin`-th to `end`-th row, int32."""
        device_rows = torch.arange(begin, end, dtype=torch.int32) + (self.table_start + self.first)
        array_rows = array_row_of(self.owner, device_rows, self.parts)
        return array_rows - self.table_start * self.parts

    def find(self, table_rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns which of these table rows [n] are in the run of `count` rows, as places in [n];
        and where in the run each of them is."""
        owner, device_row = owner_of(table_rows + self.table_start * self.parts, self.parts)
        place = device_row - (self.table_start + self.first)
        found = (owner == self.owner) & (place >= 0) & (place < count)
        here = torch.nonzero(found)[:, 0]
        return here, place[here]

    def may_share(self, count: int, other: "Rows", other_count: int) -> bool:
        """Returns False where this run of `count` rows and the other one certainly have none in
        common."""
        if (self.parts, self.table_start) != (other.parts, other.table_start):
            return True
        same_owner = self.owner == other.owner
        overlap = self.first < other.first + other_count and other.first < self.first + count
        return same_owner and overlap
