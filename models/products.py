"""`torch.einsum` of two operands, for hardware whose own products of float32 numbers are not float32."""

import math

import torch
from torch import Tensor

NATIVE_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here, and its own kernels are the fastest


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Returns `torch.einsum(equation, a, b)`, for float32 as exactly as PyTorch is asked to multiply.

    A TPU multiplies float32 in one pass of bfloat16 unless each product asks for more, and torch_xla 2.9 does not ask
    in einsum. Where `torch.backends.cuda.matmul.fp32_precision` is "ieee" this is a `torch.bmm`, which does. That may
    cost copies; so bfloat16, and float32 that may be fast, keep einsum, the form that the TPU's compiler lays out best.

    Args:
        equation: such as "bqhd,bkhd->bhqk": each index is in two of the three terms, or in all.
    """
    exact = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "ieee"
    if not exact or a.device.type in NATIVE_DEVICES:
        return torch.einsum(equation, a, b)
    terms, result = equation.split("->")
    left, right = terms.split(",")
    sizes = dict(zip(left + right, [*a.shape, *b.shape], strict=True))
    batch, rows = [i for i in left if i in right and i in result], [i for i in left if i not in right]
    summed, columns = [i for i in left if i not in result], [i for i in right if i not in left]

    def flat(x: Tensor, term: str, *groups: list[str]) -> Tensor:
        places = [term.index(i) for group in groups for i in group]
        return x.permute(places).reshape([math.prod(sizes[i] for i in group) for group in groups])

    product = torch.bmm(flat(a, left, batch, rows, summed), flat(b, right, batch, summed, columns))
    order = [*batch, *rows, *columns]
    return product.reshape([sizes[i] for i in order]).permute([order.index(i) for i in result])
