"""How an optimizer updates rows of a table: its states, and the rule of one step.

`update` is per-device code, see plan.py. Its arguments: `rows` [n], distinct device rows, or None
for every row in order; `g` [n, dim], the sum of each row's gradients; `touched` [n, 1], 0 where no
example had the row; `lr` and the 1-based `step`, tensors without dimensions. It returns the new
weight, and the new states.

`states` names an optimizer's states: "full" has the shape of the weight, "row" has one number per
row.
"""

from dataclasses import dataclass
from typing import ClassVar

from train.common.embedding.rows import add_rows, take_rows


@dataclass(frozen=True)
class SGD:
    """w -= lr g (torch.optim.SGD without momentum)."""

    states: ClassVar[dict[str, str]] = {}

    def update(self, weight, states, rows, g, touched, lr, step):
        return add_rows(weight, rows, -lr * g), ()


@dataclass(frozen=True)
class RowWiseAdagrad:
    """s += mean(g^2) over the columns, w -= lr g / (sqrt(s) + eps): fbgemm's EXACT_ROWWISE_ADAGRAD,
    the rule of facebookresearch/dlrm optim/rwsadagrad.py. One number of state per row."""

    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"sum": "row"}

    def update(self, weight, states, rows, g, touched, lr, step):
        dim = g.shape[1]
        mean_square = (g * g).sum(1) / dim
        total = add_rows(states[0], rows, mean_square)
        size = -lr / (take_rows(total, rows, dim).sqrt() + self.eps)
        return add_rows(weight, rows, g * size[:, None]), (total,)


@dataclass(frozen=True)
class Adagrad:
    """s += g^2, w -= lr g / (sqrt(s) + eps): torch.optim.Adagrad on sparse gradients, fbgemm's
    EXACT_ADAGRAD (Duchi et al. 2011)."""

    eps: float = 1e-10
    states: ClassVar[dict[str, str]] = {"sum": "full"}

    def update(self, weight, states, rows, g, touched, lr, step):
        total = add_rows(states[0], rows, g * g)
        root = take_rows(total, rows, g.shape[1]).sqrt()
        return add_rows(weight, rows, -lr * g / (root + self.eps)), (total,)


@dataclass(frozen=True)
class LazyAdam:
    """Adam on the rows of the step only, bias corrected by the count of all steps:
    torch.optim.SparseAdam."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: ClassVar[dict[str, str]] = {"exp_avg": "full", "exp_avg_sq": "full"}

    def update(self, weight, states, rows, g, touched, lr, step):
        beta1, beta2 = self.betas
        dim = g.shape[1]
        first_change = (g - take_rows(states[0], rows, dim)) * ((1 - beta1) * touched)
        second_change = (g * g - take_rows(states[1], rows, dim)) * ((1 - beta2) * touched)
        first = add_rows(states[0], rows, first_change)
        second = add_rows(states[1], rows, second_change)

        size = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
        root = take_rows(second, rows, dim).sqrt()
        delta = -size * touched * take_rows(first, rows, dim) / (root + self.eps)
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
