"""`torch.einsum` of two operands, for hardware whose own float32 products are not float32."""

import math

import torch
from torch import Tensor

# PyTorch runs operation by operation here, and its own kernels are the fastest.
NATIVE_DEVICES = ("cpu", "cuda")


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Returns `torch.einsum(equation, a, b)`, float32 as exactly as PyTorch is asked to multiply.

    A TPU multiplies float32 in one pass of bfloat16 unless each product asks for more, and
    torch_xla 2.9 does not ask in einsum. It does ask in `torch.bmm`, which is used where
    `torch.backends.cuda.matmul.fp32_precision` is "ieee". That may cost copies. Therefore bfloat16,
    and float32 that may be fast, keep einsum: the form that the TPU's compiler lays out best.

    Args:
        equation: such as "bqhd,bkhd->bhqk": each index is in two of the three terms, or in all.
    """
    exact = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "ieee"
    if exact and a.device.type not in NATIVE_DEVICES:
        return _batched_product(equation, a, b)
    return torch.einsum(equation, a, b)


def _batched_product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Computes an equation of `einsum` as one `torch.bmm`."""
    terms, result = equation.split("->")
    left, right = terms.split(",")
    sizes = dict(zip(left + right, [*a.shape, *b.shape], strict=True))

    # The four kinds of indices.
    batch = [index for index in left if index in right and index in result]
    summed = [index for index in left if index not in result]
    rows = [index for index in left if index not in right]
    columns = [index for index in right if index not in left]

    a = _grouped(a, left, [batch, rows, summed], sizes)
    b = _grouped(b, right, [batch, summed, columns], sizes)
    product = torch.bmm(a, b)

    indices = batch + rows + columns
    product = product.reshape([sizes[index] for index in indices])
    return product.permute([indices.index(index) for index in result])


def _grouped(x: Tensor, term: str, groups: list[list[str]], sizes: dict[str, int]) -> Tensor:
    """Returns x, whose dimensions `term` names, with one dimension per group of them."""
    order = []
    shape = []
    for group in groups:
        order += [term.index(index) for index in group]
        shape.append(math.prod(sizes[index] for index in group))
    return x.permute(order).reshape(shape)
