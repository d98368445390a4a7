"""A hash of integers in plain operations: equal on every device and for every sharding."""

from torch import Tensor


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int32 to the right, logically: zeros come in from the left.

    torch_xla 2.9 computes >> as a division, which rounds a negative number towards 0. So no
    negative number is shifted: the sign bit goes its own way.
    """
    without_sign = (x & 0x7FFFFFFF) >> bits
    sign = (x < 0).int() << (31 - bits)
    return without_sign | sign


def hash32(x: Tensor) -> Tensor:
    """Applies a permutation of the 32-bit integers that looks random to int32.

    It is "lowbias32" (C. Wellons, nullprogram.com 2018). Products wrap around.
    """
    x = x ^ shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ shift_right(x, 16)
