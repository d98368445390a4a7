"""Random-looking integers out of places, in plain operations: the same on every device and however a tensor is cut."""

from torch import Tensor


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, of int32. torch_xla 2.9 computes >> as a division, which rounds negatives to 0: none is shifted."""
    return ((x & 0x7FFFFFFF) >> bits) | ((x < 0).int() << (31 - bits))


def hash32(x: Tensor) -> Tensor:
    """A permutation of the 32-bit integers that looks random ("lowbias32", C. Wellons, nullprogram.com 2018), on int32:
    products wrap around."""
    x = x ^ shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ shift_right(x, 15)
    x = x * (0x846CA68B - 2**32)
    return x ^ shift_right(x, 16)
