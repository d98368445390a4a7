"""What a device does with rows of an array: take, pool, add up, write. plan.py says what device
rows and lines are.

An array holds `pack` rows of a table side by side in each of its lines, so that a line fills the
lanes of a TPU. An array [rows, 16] would be padded to eight times its size, or copied from a layout
of columns to one of rows and back in every step. Where there is no TPU, a line is one row.
"""

import torch
from torch import Tensor

IN_PLACE_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here
LANES = 128  # of a TPU's vector unit: an array with fewer columns takes as much memory
LAST = 2**31 - 1  # the largest int32: as a key of a sort it comes after all rows


def rows_in_a_line(dim: int, lanes: int) -> int:
    """Returns how many rows of `dim` columns are in a line: the largest power of two of them that
    fits into the lanes, or 1."""
    fitting = lanes // dim
    return 1 << max(0, fitting.bit_length() - 1)


def by_row(lines: Tensor, dim: int) -> Tensor:
    """Returns lines [lines, pack * dim] as device rows [rows, dim]; a number per row [rows] as it
    is."""
    if lines.dim() == 1:
        return lines
    return lines.reshape(-1, dim)


# ---- take and write ------------------------------------------------------------------------------


def take_rows(array: Tensor, rows: Tensor | None, dim: int) -> Tensor:
    """Returns device rows of an array.

    Args:
        array: [lines, pack * dim], or [rows], one number per row.
        rows: [n] device rows; None: all rows, of an array in which a line is a row.
        dim: columns of a row.
    Returns:
        [n, dim], or [n] of one number per row.
    """
    if rows is None:
        return array
    one_row_a_line = array.dim() == 1 or array.shape[1] == dim
    if one_row_a_line:
        return array[rows]

    line, is_own_column = line_and_columns(rows, array.shape[1], dim)
    zero = torch.zeros((), device=array.device)
    return _fold(torch.where(is_own_column, array[line], zero), dim)


def add_rows(array: Tensor, rows: Tensor | None, delta: Tensor) -> Tensor:
    """Returns the array with delta [n, dim] (or [n]) added at these device rows.

    Args:
        array, rows: as `take_rows` has them.
    Returns:
        A new tensor. But where PyTorch runs operation by operation and `rows` are given, it is the
        array itself, changed in place: a copy of a table would cost more than the step.
    """
    if rows is None:
        return array + delta
    if array.device.type in IN_PLACE_DEVICES:  # a line is a row there
        return array.index_add_(0, rows, delta)
    one_row_a_line = array.dim() == 1 or array.shape[1] == delta.shape[1]
    if one_row_a_line:
        return array.index_add(0, rows, delta)

    dim = delta.shape[1]
    line, is_own_column = line_and_columns(rows, array.shape[1], dim)
    repeated = delta.repeat(1, array.shape[1] // dim)
    of_lines = torch.where(is_own_column, repeated, torch.zeros_like(repeated))
    return array.index_add(0, line, of_lines)


def line_and_columns(rows: Tensor, width: int, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the line [n] of each device row, and which of its columns are the row's, [n, width]
    bool."""
    # torch_xla 2.9 divides int32 in float32, which is wrong from 2**24 on. So rows are divided by
    # bits, since pack is a power of two. Columns are few.
    pack = width // dim
    line = rows >> (pack.bit_length() - 1)
    row_in_line = rows & (pack - 1)
    column = torch.arange(width, dtype=rows.dtype, device=rows.device)
    row_of_column = torch.div(column, dim, rounding_mode="trunc")
    return line, row_in_line[:, None] == row_of_column[None]


def _fold(lines: Tensor, dim: int) -> Tensor:
    """Returns the row [n, dim] of each line [n, pack * dim] that is 0 outside of this row.

    It adds the halves of the lines, and so on with the sums.
    """
    while lines.shape[-1] > dim:
        half = lines.shape[-1] // 2
        lines = lines[..., :half] + lines[..., half:]
    return lines


# ---- bags ----------------------------------------------------------------------------------------


def pool(weight: Tensor, rows: Tensor, has_row: Tensor, lookups: list[int], dim: int) -> Tensor:
    """Adds up the rows of each bag.

    Args:
        weight: an array, as `take_rows` has it, or rows [n, dim] that others have sent.
        rows: [batch, sum of lookups] device rows, or indices into n; the tables' columns side by
            side.
        has_row: [batch, sum of lookups] bool; False: zeros in place of the row.
        lookups: how many columns each table has.
    Returns:
        [batch, tables, dim].
    """
    safe = torch.where(has_row, rows, torch.zeros_like(rows))
    found = take_rows(weight, safe.reshape(-1), dim).reshape(*rows.shape, dim)
    found = torch.where(has_row[..., None], found, torch.zeros_like(found))
    if max(lookups) == 1:
        return found

    sums = [bag.sum(1) for bag in torch.split(found, lookups, dim=1)]
    return torch.stack(sums, 1)


def gradient_of_ids(gradient: Tensor, lookups: list[int]) -> Tensor:
    """Turns the gradient of pooled rows [batch, tables, dim] into that of each id [batch, sum of
    lookups, dim]."""
    if max(lookups) == 1:
        return gradient

    by_table = []
    for table, count in enumerate(lookups):
        of_table = gradient[:, table : table + 1]
        by_table.append(of_table.expand(-1, count, -1))
    return torch.cat(by_table, 1)


def sum_equal_rows(rows: Tensor, g: Tensor, unused: int) -> tuple[Tensor, Tensor]:
    """Adds up the gradients of equal rows, in static shapes.

    A second sort moves the distinct rows to the front. Scattering them there one by one would be
    quadratic in n with the TPU's compiler (57 of the 58 million cycles of a step that looks up
    53,000 ids; libtpu 0.0.51's estimate).

    Args:
        rows: [n] device rows, with repetitions.
        g: [n, dim] the gradient of each.
        unused: fills the result where there are fewer than n distinct rows; any number.
    Returns:
        The distinct rows [n], in order, then `unused`; their sums [n, dim], then zeros.
    """
    ordered, permutation = torch.sort(rows)
    first_is_new = torch.ones_like(ordered[:1], dtype=torch.bool)
    is_new = torch.cat([first_is_new, ordered[1:] != ordered[:-1]])
    segment = torch.cumsum(is_new.int(), 0) - 1
    sums = torch.zeros_like(g).index_add_(0, segment, g[permutation])

    last = torch.full_like(ordered, LAST)
    distinct = torch.sort(torch.where(is_new, ordered, last))[0]
    distinct = torch.where(distinct == last, torch.full_like(distinct, unused), distinct)
    return distinct, sums
