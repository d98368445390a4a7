"""Random-looking integers from places, in plain operations: equal on every device and for every sharding."""

from torch import Tensor


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int32 logically. torch_xla 2.9 computes >> as a division, which rounds negatives to 0: none is shifted."""
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).int() << (31 - bits))


def hash32(x: Tensor) -> Tensor:
    """Applies a permutation of the 32-bit integers that looks random ("lowbias32", C. Wellons, nullprogram.com 2018) to
    int32; products wrap around."""
    x = x ^ shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ shift_right(x, 16)
