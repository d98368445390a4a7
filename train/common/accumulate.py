"""The train step of a loop: one update from the micro-batches that the loader yields for it.

    # An update has one micro-batch, or it has several:
    train_fn = accumulate.SeededStep(train_step, mesh)
    train_fn = accumulate.AccumulatedStep(forward, update, state, ("loss", "accuracy"), mesh)

    metrics = train_fn(state, micro_batches, config, mesh)

Gradient accumulation is for updates whose examples do not fit into the memory together. The numbers
are those of all examples in one batch, within rounding; batch norm's are those of its
micro-batches. Where a loss is a mean over tokens, or over anything of which micro-batches have
unequal numbers, `forward` does not divide it by the count of its own micro-batch:

* One loss, over tokens for example: `forward` returns the sum of the loss and, under the name that
  `per` gives, its count of tokens. The update divides by the tokens of all its micro-batches
  together.
* Several losses, each over something else: `forward` divides each by its count of the whole update,
  which each micro-batch comes with, see `counts_per_row` of `loading.parallel_loader`.

Both steps draw what is random in a micro-batch (dropout) by config.seed and its number, so that a
resumed run draws the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.common import device
from train.common.loading import MicroBatches
from train.common.mesh import Mesh


class SeededStep:
    """`train_step(state, batch, config, mesh)`, compiled, for updates of one micro-batch.

    Args:
        max_graphs: how many shapes batches may have, each of which is compiled.
    """

    def __init__(self, train_step: Callable, mesh: Mesh, max_graphs: int = 1):
        self._train_step = device.compiled(train_step, mesh, max_graphs)

    def __call__(
        self, state: Any, micro_batches: MicroBatches, config: Any, mesh: Mesh
    ) -> dict[str, Tensor]:
        """Returns the metrics of the update.

        Raises ValueError where it has several micro-batches.
        """
        (batch,) = micro_batches
        device.seed_step(config.seed, micro_batches.first)
        return self._train_step(state, batch, config, mesh)


class AccumulatedStep:
    """`forward` and its backward pass on every micro-batch; after the last one `update`, with the
    mean of their gradients.

    Args:
        forward: called as (state, batch, config, mesh); returns scalars, "loss" among them: sums,
            or means over equally many examples in each micro-batch.
        update: called as (state, config); updates the parameters from their `grad` and returns
            further metrics.
        state: what both work on, with its `model`.
        means: names of forward's scalars; the step returns their means over an update.
        per: the scalar that counts what the sums are over, such as "tokens"; "" where forward
            returns means, each of which counts the same. An update has config.update_every of
            these; the loader must have that as its `update_every`, too.
        max_graphs: how many shapes micro-batches may have, each of which is compiled.
    """

    def __init__(
        self,
        forward: Callable,
        update: Callable,
        state: Any,
        means: Sequence[str],
        mesh: Mesh,
        per: str = "",
        max_graphs: int = 1,
    ):
        self._forward = forward
        self._update = update
        self._per = per
        self._gradient_step = device.compiled(gradient_step, mesh, max_graphs)
        self._update_step = device.compiled(update_step, mesh)
        total_names = [*means, per] if per else [*means]
        self._totals = allocate_gradients_and_totals(state.model, total_names, mesh)

    def __call__(
        self, state: Any, micro_batches: MicroBatches, config: Any, mesh: Mesh
    ) -> dict[str, Tensor]:
        """Returns the metrics of the update.

        Raises ValueError where it has another number of micro-batches than config.update_every, by
        which `update_step` divides.
        """
        if not self._per and micro_batches.left != config.update_every:
            raise ValueError(
                f"the loader yields {micro_batches.left} micro-batches an update, and "
                f"config.update_every is {config.update_every}; give both the same number"
            )
        for number, micro_batch in enumerate(micro_batches, micro_batches.first):
            device.seed_step(config.seed, number)
            with device.accumulating(micro_batches.left > 0):
                self._gradient_step(self._forward, state, micro_batch, self._totals, config, mesh)
        return self._update_step(self._update, state, self._totals, config, self._per)


def gradient_step(
    forward: Callable,
    state: Any,
    batch: dict[str, Tensor],
    totals: dict[str, Tensor],
    config: Any,
    mesh: Mesh,
) -> None:
    """Adds the gradients of a micro-batch to the parameters' `grad`, and its scalars to `totals`:
    both stay on the device."""
    found = forward(state, batch, config, mesh)
    found["loss"].backward()
    for name, total in totals.items():
        total.add_(found[name].detach())


def update_step(
    update: Callable, state: Any, totals: dict[str, Tensor], config: Any, per: str
) -> dict[str, Tensor]:
    """Updates once from the mean of the gradients; returns the means of the totals.

    It sets gradients and totals to zero.
    """
    count = device.mean_over_processes(totals[per]) if per else config.update_every
    gradients = []
    for parameter in state.model.parameters():
        # What is not trained, such as sinusoidal positions, has no gradient. With zeros it would
        # decay.
        if parameter.grad is not None:
            parameter.grad.div_(count)
            gradients.append(parameter.grad)

    means = {name: total / count for name, total in totals.items() if name != per}
    means |= update(state, config)
    for tensor in [*totals.values(), *gradients]:
        tensor.zero_()
    return means


def allocate_gradients_and_totals(
    model: nn.Module, total_names: Sequence[str], mesh: Mesh
) -> dict[str, Tensor]:
    """Allocates what micro-batches add to, all zero, on the device: sets the `grad` of every
    parameter that is trained, and returns totals with these names.

    Change both in place, in compiled steps.
    """
    totals = {name: torch.zeros(()).to(mesh.device) for name in total_names}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(mesh.device)
            device.annotate_placement(parameter.grad, mesh, of=parameter)
    for total in totals.values():
        device.replicate(total, mesh)
    return totals
