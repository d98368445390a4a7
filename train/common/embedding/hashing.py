"""Random-looking integers from positions, in plain operations: the same on every device and however a tensor is cut.

`hash32` is a copy of models/hashing.py's, since train/common does not import models; a test compares the two.
"""

import torch
from torch import Tensor


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int32 logically. torch_xla 2.9 computes >> as a division, which rounds a negative towards 0, so none is
    shifted."""
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).int() << (31 - bits))


def hash32(x: Tensor) -> Tensor:
    """Permutes the 32-bit integers in a way that looks random ("lowbias32", C. Wellons, nullprogram.com 2018). Works on
    int32, whose products wrap around."""
    x = x ^ shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ shift_right(x, 16)


# ---- owners of rows, plan "exchange" ---------------------------------------------------------------------------------
# Of every `parts` consecutive rows each owner has one, at the same local row. A hash of the local row rotates them, so
# that neither a table that is sorted by frequency nor ids with a common divisor load one owner.


def owner_of(rows: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Returns the owner of each row, and which of the owner's rows it is."""
    local, number = divide(rows, parts)
    owner = number + _rotation(local, parts)
    return torch.where(owner >= parts, owner - parts, owner), local


def row_of(owner: Tensor | int, local: Tensor, parts: int) -> Tensor:
    """Returns the `local`-th row of an owner; the inverse of `owner_of`."""
    number = owner - _rotation(local, parts)
    return local * parts + torch.where(number < 0, number + parts, number)


def _rotation(local: Tensor, parts: int) -> Tensor:
    return divide(hash32(local) & 0xFFFF, parts)[1]


def divide(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Returns quotient and remainder of int32 x >= 0, exactly: torch_xla 2.9 divides int32 in float32."""
    if by == 1:
        return x, torch.zeros_like(x)
    quotient = (x.float() / by).int()
    quotient = quotient + torch.floor((x - quotient * by).float() / by).int()  # now off by one at most
    rest = x - quotient * by
    quotient = quotient + (rest >= by).int() - (rest < 0).int()
    return quotient, x - quotient * by
