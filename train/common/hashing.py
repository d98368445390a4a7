"""Random-looking integers from positions, in plain operations.

They are the same on every device and however a tensor is cut. `hash32` is a copy of
models/hashing.py's, since train/common does not import models; a test compares the two.
"""

import torch
from torch import Tensor


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int32 logically.

    torch_xla 2.9 computes >> as a division, which rounds a negative number towards 0. So the sign
    bit is shifted apart from the others.
    """
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).int() << (31 - bits))


def hash32(x: Tensor) -> Tensor:
    """Permutes the 32-bit integers in a way that looks random.

    It is "lowbias32" (C. Wellons, nullprogram.com 2018), on int32, whose products wrap around.
    """
    x = x ^ shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ shift_right(x, 16)


def divide(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Returns quotient and remainder of int32 x >= 0, exactly.

    torch_xla 2.9 divides int32 in float32. So the first quotient is only near, what it leaves is
    divided once more, and the last error, of one at most, is corrected.
    """
    if by == 1:
        return x, torch.zeros_like(x)

    quotient = (x.float() / by).int()
    left = x - quotient * by
    quotient = quotient + torch.floor(left.float() / by).int()
    left = x - quotient * by
    quotient = quotient + (left >= by).int() - (left < 0).int()
    return quotient, x - quotient * by
