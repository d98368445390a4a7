"""How an optimizer updates rows of a table: its states, and the rule of one step.

`update` is per-device code, see plan.py. Its arguments:

    weight    [lines, width], as rows.py has an array
    values    of the states, in the order of `states`
    rows      [n] device rows. Those with touched = 1 are distinct, but for an optimizer without
              states they may repeat; all others are 0, with g = 0. None: every row, in order
    g         [n, dim] the sum of each row's gradients
    touched   [n, 1] 0 where no example had the row, and then g is 0. A rule that changes nothing
              where g is 0 does not need it
    lr, step  learning rate and the 1-based step, tensors without dimensions

It returns the new weight, and the new values of the states. A state is read from the result of the
`add_rows` that updates it: rule 3 of bags.py.

`states` names an optimizer's states, and says of which shape they are: "full" has that of the
weight, "row" has one number per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from train.common.embedding.rows import add_rows, take_rows

Updated = tuple[Tensor, Sequence[Tensor]]  # the weight, and the values of the states


@dataclass(frozen=True)
class SGD:
    """w -= lr g (torch.optim.SGD without momentum)."""

    states: ClassVar[dict[str, str]] = {}

    def update(
        self,
        weight: Tensor,
        values: Sequence[Tensor],
        rows: Tensor | None,
        g: Tensor,
        touched: Tensor,
        lr: Tensor,
        step: Tensor,
    ) -> Updated:
        return add_rows(weight, rows, -lr * g), ()


@dataclass(frozen=True)
class RowWiseAdagrad:
    """s += mean(g^2) over the columns, w -= lr g / (sqrt(s) + eps).

    fbgemm's EXACT_ROWWISE_ADAGRAD, the rule of facebookresearch/dlrm optim/rwsadagrad.py. One
    number of state per row.
    """

    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"sum": "row"}

    def update(
        self,
        weight: Tensor,
        values: Sequence[Tensor],
        rows: Tensor | None,
        g: Tensor,
        touched: Tensor,
        lr: Tensor,
        step: Tensor,
    ) -> Updated:
        dim = g.shape[1]
        mean_square = (g * g).sum(1) / dim
        total = add_rows(values[0], rows, mean_square)
        factor = -lr / (take_rows(total, rows, dim).sqrt() + self.eps)
        return add_rows(weight, rows, g * factor[:, None]), (total,)


@dataclass(frozen=True)
class Adagrad:
    """s += g^2, w -= lr g / (sqrt(s) + eps) (Duchi et al. 2011).

    torch.optim.Adagrad on sparse gradients, fbgemm's EXACT_ADAGRAD.
    """

    eps: float = 1e-10
    states: ClassVar[dict[str, str]] = {"sum": "full"}

    def update(
        self,
        weight: Tensor,
        values: Sequence[Tensor],
        rows: Tensor | None,
        g: Tensor,
        touched: Tensor,
        lr: Tensor,
        step: Tensor,
    ) -> Updated:
        total = add_rows(values[0], rows, g * g)
        root = take_rows(total, rows, g.shape[1]).sqrt()
        return add_rows(weight, rows, -lr * g / (root + self.eps)), (total,)


@dataclass(frozen=True)
class LazyAdam:
    """Adam on the rows of the step only, bias corrected by the count of all steps.

    torch.optim.SparseAdam.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"exp_avg": "full", "exp_avg_sq": "full"}

    def update(
        self,
        weight: Tensor,
        values: Sequence[Tensor],
        rows: Tensor | None,
        g: Tensor,
        touched: Tensor,
        lr: Tensor,
        step: Tensor,
    ) -> Updated:
        beta1, beta2 = self.betas
        dim = g.shape[1]
        # m + (g - m) (1 - beta) is m beta + g (1 - beta).
        first_change = (g - take_rows(values[0], rows, dim)) * ((1 - beta1) * touched)
        second_change = (g * g - take_rows(values[1], rows, dim)) * ((1 - beta2) * touched)
        first = add_rows(values[0], rows, first_change)
        second = add_rows(values[1], rows, second_change)

        rate = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
        root = take_rows(second, rows, dim).sqrt()
        delta = -rate * touched * take_rows(first, rows, dim) / (root + self.eps)
        return add_rows(weight, rows, delta), (first, second)


Optimizer = SGD | RowWiseAdagrad | Adagrad | LazyAdam
OPTIMIZERS = {
    "sgd": SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "lazy_adam": LazyAdam,
}


def row_bytes(dim: int, optimizer: Optimizer) -> int:
    """Returns the bytes of one row of a table with its optimizer state, float32."""
    kinds = list(optimizer.states.values())
    columns = dim * (1 + kinds.count("full")) + kinds.count("row")
    return 4 * columns
