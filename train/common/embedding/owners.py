"""Which device owns an array row, when rows are spread over the devices of a group.

plan.py says what the kinds of rows are.

Of as many consecutive array rows as there are owners, each owner has one, all as the same device
row. A hash of the device row rotates them, so that neither a table that is sorted by frequency nor
ids with a common divisor load one owner:

    device row           0   1   2   3
    array row, owner 0   0   4  11  15
               owner 1   1   5   8  12
               owner 2   2   6   9  13
               owner 3   3   7  10  14
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.common.hashing import divide, hash32


def owner_of(array_rows: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Returns the owner of each array row, and the device row that it is there."""
    device_row, number = divide(array_rows, owners)
    owner = number + _rotation(device_row, owners)
    return torch.where(owner >= owners, owner - owners, owner), device_row


def array_row_of(owner: Tensor | int, device_rows: Tensor, owners: int) -> Tensor:
    """Returns the array row of each of an owner's device rows; the inverse of `owner_of`."""
    number = owner - _rotation(device_rows, owners)
    return device_rows * owners + torch.where(number < 0, number + owners, number)


def _rotation(device_rows: Tensor, owners: int) -> Tensor:
    """Returns by how many owners the array rows of each device row are moved on."""
    return divide(hash32(device_rows) & 0xFFFF, owners)[1]


@dataclass(frozen=True)
class TableRun:
    """Tells which rows of a table a run of rows has.

    An owner has some of the table's rows, in rising order. A run has those of them from the `first`
    on, without a gap; how many is no part of it. With one owner, row i of the run is table row
    first + i. With several, it is the owner's device row table_start + first + i, which
    `array_row_of` turns into an array row.

    Attributes:
        first: the run's first row, counted among the rows of this table that the owner has.
        owners: devices over which the table is spread; 1: it is not spread.
        owner: the one that holds the run.
        table_start: the first device row of the table, the same on each owner. It decides how the
            hash spreads the table.
    """

    first: int
    owners: int = 1
    owner: int = 0
    table_start: int = 0

    @classmethod
    def of_piece(cls, key: str) -> "TableRun":
        """Returns the run of a piece of a checkpoint, given the piece's name.

        Args:
            key: "<table>/<weight or state>/<run>/<first column>", see pieces.py.
        Raises:
            ValueError: the run is not made of numbers.
        """
        run = key.split("/")[2]
        numbers = [int(number) for number in run.split(".")]
        return cls(*numbers)

    def __str__(self) -> str:
        """Returns the run as the name of a piece has it."""
        if self.owners == 1:
            return str(self.first)
        return f"{self.first}.{self.owners}.{self.owner}.{self.table_start}"

    def table_rows(self, begin: int, end: int) -> Tensor:
        """Returns which table rows the rows `begin` to `end` - 1 of the run are, int32.

        They increase.
        """
        device_rows = torch.arange(begin, end, dtype=torch.int32) + (self.table_start + self.first)
        array_rows = array_row_of(self.owner, device_rows, self.owners)
        return array_rows - self.table_start * self.owners

    def find(self, table_rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Finds table rows [n] in a run of `count` rows.

        Returns:
            The indices in [n] of those that are in the run, and the index in the run of each.
        """
        owner, device_row = owner_of(table_rows + self.table_start * self.owners, self.owners)
        index_in_run = device_row - (self.table_start + self.first)
        is_found = (owner == self.owner) & (index_in_run >= 0) & (index_in_run < count)
        found = torch.nonzero(is_found)[:, 0]
        return found, index_in_run[found]

    def may_share(self, count: int, other: "TableRun", other_count: int) -> bool:
        """Returns False where this run of `count` rows and the other one have no row in common.

        True may be wrong, where the two are spread differently.
        """
        is_spread_alike = (self.owners, self.table_start) == (other.owners, other.table_start)
        if not is_spread_alike:
            return True
        begins_before_other_ends = self.first < other.first + other_count
        ends_after_other_begins = other.first < self.first + count
        has_same_owner = self.owner == other.owner
        return has_same_owner and begins_before_other_ends and ends_after_other_begins
