"""Gradients that several batches add up before an update, where one batch of all their examples does not fit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.common import device


class AccumulatedStep:
    """`update_step` after every `every`-th batch, on the gradients and sums that `gradient_step` has added up.

    Args:
        gradient_step: called as (state, batch, totals, config, mesh); adds to the parameters' `grad` and to `totals`.
        update_step: called as (state, totals, config); returns the metrics, and ends with `reset`.
        state: what the steps work on, with its `model`.
        sums: names of the totals.
        max_graphs: shapes of batches.
    """

    def __init__(
        self,
        gradient_step: Callable,
        update_step: Callable,
        state: Any,
        sums: Sequence[str],
        every: int,
        mesh: device.Mesh,
        max_graphs: int = 1,
    ):
        self._gradient_step = device.compiled(gradient_step, mesh, max_graphs)
        self._update_step = device.compiled(update_step, mesh)
        self._totals = gradient_buffers(state.model, sums, mesh)
        self._every, self._batches = every, 0

    def __call__(
        self, state: Any, batch: dict[str, Tensor], config: Any, mesh: device.Mesh
    ) -> dict[str, Tensor] | None:
        """Returns the metrics of an update, None where more batches are to come before it."""
        self._gradient_step(state, batch, self._totals, config, mesh)
        self._batches += 1
        return None if self._batches % self._every else self._update_step(state, self._totals, config)


def gradient_buffers(model: nn.Module, sums: Sequence[str], mesh: device.Mesh) -> dict[str, Tensor]:
    """Makes every parameter's `grad` a tensor of zeros on the device, and returns zeros of the given names. Change both
    in place, in compiled steps."""
    totals = {name: torch.zeros(()).to(mesh.device) for name in sums}
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(mesh.device)
        device.replicate(parameter.grad, mesh, parameter)
    for total in totals.values():
        device.replicate(total, mesh)
    return totals


def reset(model: nn.Module, totals: dict[str, Tensor]) -> None:
    """Sets gradients and totals to zero, in place; part of a compiled step."""
    for tensor in [*totals.values(), *(parameter.grad for parameter in model.parameters())]:
        tensor.zero_()
