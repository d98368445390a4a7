"""What a device does with rows of an array: take, pool, add up, write. plan.py says what device
rows and lines are.

An array holds `pack` rows of a table side by side in each of its lines, so that a line fills the
lanes of a TPU: an array [rows, 16] would be padded to eight times its size, or copied from a layout
of columns to one of rows and back in every step. Elsewhere than on a TPU a line is one row.
"""

import torch
from torch import Tensor

IN_PLACE_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here
# Of a TPU's vector unit: an array with fewer columns takes as much memory as one of 128.
LANES = 128
LAST = 2**31 - 1  # the largest int32: as a key of a sort it comes after all rows


def rows_in_a_line(dim: int, lanes: int) -> int:
    """Returns the largest power of two of rows of `dim` columns that fit into so many lanes."""
    return 1 << max(0, (lanes // dim).bit_length() - 1)


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

    line, own = line_and_columns(rows, array.shape[1], dim)
    zero = torch.zeros((), device=array.device)
    return _fold(torch.where(own, array[line], zero), dim)


def add_rows(array: Tensor, rows: Tensor | None, delta: Tensor) -> Tensor:
    """Returns the array with delta [n, dim] (or [n]) added at these device rows.

    Where PyTorch runs operation by operation the result is the array itself, changed in place,
    since a copy of a table would cost more than the step.
    """
    if rows is None:
        return array + delta
    if array.device.type in IN_PLACE_DEVICES:
        return array.index_add_(0, rows, delta)
    one_row_a_line = array.dim() == 1 or array.shape[1] == delta.shape[1]
    if one_row_a_line:
        return array.index_add(0, rows, delta)

    line, own = line_and_columns(rows, array.shape[1], delta.shape[1])
    repeated = delta.repeat(1, array.shape[1] // delta.shape[1])
    return array.index_add(0, line, torch.where(own, repeated, torch.zeros_like(repeated)))


def line_and_columns(rows: Tensor, width: int, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the line [n] of each device row, and which of its columns are the row's, [n, width]
    bool."""
    # A power of two: torch_xla 2.9 divides int32 in float32, which is wrong from 2**24 on.
    pack = width // dim
    column = torch.arange(width, dtype=rows.dtype, device=rows.device)
    row_in_line = torch.div(column, dim, rounding_mode="trunc")
    own = (rows & (pack - 1))[:, None] == row_in_line[None]
    return rows >> (pack.bit_length() - 1), own


def _fold(lines: Tensor, dim: int) -> Tensor:
    """Turns lines [n, pack * dim], 0 outside of one row, into that row [n, dim], by adding halves
    again and again."""
    while lines.shape[-1] > dim:
        half = lines.shape[-1] // 2
        lines = lines[..., :half] + lines[..., half:]
    return lines


# ---- bags ----------------------------------------------------------------------------------------


def pool(weight: Tensor, rows: Tensor, here: Tensor, lookups: list[int], dim: int) -> Tensor:
    """Adds up the rows of each bag.

    Args:
        weight: an array, as `take_rows` has it.
        rows: [batch, sum of lookups] device rows; the tables' columns side by side.
        here: [batch, sum of lookups] bool; False: zeros in place of the row.
        lookups: the columns of each table.
    Returns:
        [batch, tables, dim].
    """
    safe = torch.where(here, rows, torch.zeros_like(rows))
    found = take_rows(weight, safe.reshape(-1), dim).reshape(*rows.shape, dim)
    found = torch.where(here[..., None], found, torch.zeros_like(found))
    if max(lookups) == 1:
        return found

    sums = [bag.sum(1) for bag in torch.split(found, lookups, dim=1)]
    return torch.stack(sums, 1)


def gradient_of_ids(gradient: Tensor, lookups: list[int]) -> Tensor:
    """Turns the gradient of pooled rows [batch, tables, dim] into that of each id [batch, sum of
    lookups, dim]."""
    if max(lookups) == 1:
        return gradient

    parts = []
    for table, count in enumerate(lookups):
        of_table = gradient[:, table : table + 1]
        parts.append(of_table.expand(-1, count, -1))
    return torch.cat(parts, 1)


def sum_equal_rows(rows: Tensor, g: Tensor, unused: int) -> tuple[Tensor, Tensor]:
    """Adds up the gradients of equal rows, in static shapes.

    The distinct rows come out of a second sort: scattering numbers one by one is quadratic in n
    with the TPU's compiler (57 of the 58 million cycles of a step that looks up 53,000 ids; libtpu
    0.0.51's estimate).

    Args:
        rows: [n] device rows, with repetitions.
        g: [n, dim] the gradient of each.
        unused: stands for a row where there are fewer distinct ones than n.
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
    return torch.where(distinct == last, torch.full_like(distinct, unused), distinct), sums
