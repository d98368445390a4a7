"""Gradients that several batches, or parts of one, add up before an update, where all their examples do not fit.

    step_fn = accumulate.AccumulatedStep(forward, update, state, ("loss", "accuracy"), mesh)
    metrics = step_fn(state, part, config, mesh)  # None until the last of config.update_every parts

The numbers are those of all examples in one batch, within rounding; batch norm's are those of its parts. So a loss is
never a mean over what the parts have unequal numbers of, such as tokens: it is a sum, which `per` counts; or, where the
losses of an update have several counts, each is divided by that of the whole update, see `count` of the loader.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.common import device
from train.common.device import Mesh


class AccumulatedStep:
    """`forward` and its backward pass on every part; after each `config.update_every` of them `update`, with the mean
    of their gradients.

    Args:
        forward: called as (state, batch, config, mesh); returns scalars, "loss" among them: means over as many examples
            in each part, or sums.
        update: called as (state, config); updates the parameters from their `grad` and returns further metrics.
        state: what both work on, with its `model`.
        means: names of forward's scalars whose means over an update are returned.
        per: the scalar that counts what the sums are over, such as "tokens"; "" where forward returns means, each of
            which counts the same.
        max_graphs: shapes of parts.
    """

    def __init__(
        self, forward: Callable, update: Callable, state: Any, means: Sequence[str], mesh: Mesh, per="", max_graphs=1
    ):
        self._forward, self._update, self._per = forward, update, per
        self._gradient_step = device.compiled(gradient_step, mesh, max_graphs)
        self._update_step = device.compiled(update_step, mesh)
        self._totals = gradient_buffers(state.model, [*means, *([per] if per else [])], mesh)
        self._parts = 0

    def __call__(self, state: Any, batch: dict[str, Tensor], config: Any, mesh: Mesh) -> dict[str, Tensor] | None:
        """Returns the metrics of an update, None where more parts are to come before it."""
        self._gradient_step(self._forward, state, batch, self._totals, config, mesh)
        self._parts += 1
        if self._parts % config.update_every:
            return None
        return self._update_step(self._update, state, self._totals, config, self._per)


def gradient_step(
    forward: Callable, state: Any, batch: dict[str, Tensor], totals: dict[str, Tensor], config: Any, mesh: Mesh
) -> None:
    """Adds a part's gradients to the parameters' `grad`, and its scalars to `totals`: both stay on the device."""
    found = forward(state, batch, config, mesh)
    found["loss"].backward()
    for name, total in totals.items():
        total.add_(found[name].detach())


def update_step(update: Callable, state: Any, totals: dict[str, Tensor], config: Any, per: str) -> dict[str, Tensor]:
    """Updates once from the mean of the gradients; returns the means of the totals, and sets all to zero."""
    count = totals[per] if per else config.update_every
    # Sinusoidal positions and others that are not trained have no gradient; with zeros they would decay.
    gradients = [each.grad.div_(count) for each in state.model.parameters() if each.grad is not None]
    means = {name: total / count for name, total in totals.items() if name != per}
    means |= update(state, config)
    for tensor in [*totals.values(), *gradients]:
        tensor.zero_()
    return means


def gradient_buffers(model: nn.Module, sums: Sequence[str], mesh: Mesh) -> dict[str, Tensor]:
    """Makes the `grad` of every parameter that is trained zeros on the device, and returns zeros of the given names.
    Change both in place, in compiled steps."""
    totals = {name: torch.zeros(()).to(mesh.device) for name in sums}
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(mesh.device)
        device.replicate(parameter.grad, mesh, parameter)
    for total in totals.values():
        device.replicate(total, mesh)
    return totals
