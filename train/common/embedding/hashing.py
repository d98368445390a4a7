"""Random-looking integers from positions, in plain operations: the same on every device and however a tensor is cut.

A copy of models/hashing.py, since train/common does not import models; a test compares the two.
"""

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
