"""Recomputation of a layer in the backward pass (gradient checkpointing) in a replayed step.

torch.utils.checkpoint does not know XLA. torch_xla.utils.checkpoint draws dropout's numbers again
by setting the random state from the host, which a program that is started without a trace would not
do: replay.py refuses it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LEADING = 3  # arguments of `Recompute.forward` before its leaves


class Seeds(TorchFunctionMode):
    """Records the tensors that `torch.rand` returns, or returns the `given` ones again.

    models/layers.py draws a seed for each of its dropouts. A function of RANDOM would draw other
    numbers in the second pass, so it raises RuntimeError.
    """

    RANDOM = (
        torch.nn.functional.dropout,
        torch.dropout,
        torch.bernoulli,
        torch.rand_like,
        torch.randn,
        torch.randint,
    )

    def __init__(self, given: Sequence[Tensor] | None = None):
        super().__init__()
        self.drawn: list[Tensor] = []
        self._given = None if given is None else list(given)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in self.RANDOM:
            raise RuntimeError(
                f"{function.__name__} draws other numbers in a second pass; "
                "use models/layers.py's dropout"
            )

        kwargs = kwargs or {}
        if function is not torch.rand:
            return function(*args, **kwargs)
        if self._given is not None:
            return self._given.pop(0)

        seed = function(*args, **kwargs)
        self.drawn.append(seed)
        return seed


class Recompute(torch.autograd.Function):
    """A function of which only the inputs are kept: the backward pass runs it again, same seeds.

    An optimization barrier is before the second run. Without it the compiler would find that both
    passes compute the same and keep the first one's results, or begin the second before its
    gradient is there.
    """

    @staticmethod
    def forward(
        ctx, function: Callable, structure: pytree.TreeSpec, parameter_count: int, *leaves: Any
    ) -> Any:
        """Returns function(*args, **kwargs).

        Args:
            structure: of (args, kwargs).
            leaves: of (args, kwargs), and then the parameters that the function reads.
            parameter_count: how many of the last leaves are parameters.
        """
        input_count = len(leaves) - parameter_count
        inputs = leaves[:input_count]
        args, kwargs = pytree.tree_unflatten(inputs, structure)
        with Seeds() as seeds:
            result = function(*args, **kwargs)

        ctx.function = function
        ctx.structure = structure
        ctx.parameters = leaves[input_count:]
        # Tensors are kept by save_for_backward below, everything else here.
        ctx.other_inputs = []
        ctx.tensor_indices = []
        for index, leaf in enumerate(inputs):
            if torch.is_tensor(leaf):
                ctx.other_inputs.append(None)
                ctx.tensor_indices.append(index)
            else:
                ctx.other_inputs.append(leaf)

        kind = torch_xla.device().type
        ctx.autocast_enabled = torch.is_autocast_enabled(kind)
        ctx.autocast_dtype = torch.get_autocast_dtype(kind)

        tensors = [inputs[index] for index in ctx.tensor_indices]
        ctx.save_for_backward(*tensors, *seeds.drawn)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        """Computes the function again; returns the gradients of the arguments of `forward`."""
        given = [gradient for gradient in gradients if gradient is not None]
        wanted = []  # indices of the inputs that need a gradient
        for index in ctx.tensor_indices:
            if ctx.needs_input_grad[LEADING + index]:
                wanted.append(index)

        saved = ctx.saved_tensors
        seeds = saved[len(ctx.tensor_indices) :]
        inputs = list(ctx.other_inputs)
        for index, tensor in zip(ctx.tensor_indices, saved, strict=False):  # seeds come after these
            inputs[index] = tensor.detach().clone() if index in wanted else tensor

        # Copies of the gradients pass the barrier, and the backward pass uses the gradients
        # themselves: with those from behind it a bias' gradient would be summed in another order.
        behind_barrier = [inputs[index] for index in wanted]
        behind_barrier += [gradient.clone() for gradient in given]
        torch_xla._XLAC._xla_optimization_barrier_(behind_barrier)
        for index in wanted:
            inputs[index].requires_grad_(True)

        results = _compute_again(ctx, inputs, seeds)
        with_gradient = []
        for result, gradient in zip(results, gradients, strict=True):
            if gradient is not None:
                with_gradient.append(result)
        sources = [inputs[index] for index in wanted]
        for parameter in ctx.parameters:
            if parameter.requires_grad:
                sources.append(parameter)
        found = iter(torch.autograd.grad(with_gradient, sources, given, allow_unused=True))

        of_arguments = [None] * LEADING
        for is_needed in ctx.needs_input_grad[LEADING:]:
            of_arguments.append(next(found) if is_needed else None)
        return tuple(of_arguments)


def _compute_again(ctx: Any, inputs: list[Any], seeds: Sequence[Tensor]) -> tuple:
    """Runs the function a second time, with gradients on; returns its results as a tuple."""
    args, kwargs = pytree.tree_unflatten(inputs, ctx.structure)
    kind = torch_xla.device().type
    autocast = torch.autocast(kind, ctx.autocast_dtype, enabled=ctx.autocast_enabled)
    with torch.enable_grad(), autocast, Seeds(seeds):
        result = ctx.function(*args, **kwargs)
    return result if isinstance(result, tuple) else (result,)


def recomputing_forward(layer: nn.Module) -> Callable:
    """Returns a layer's forward pass that keeps only its inputs for the backward pass."""
    forward = layer.forward
    parameters = list(layer.parameters())

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        leaves, structure = pytree.tree_flatten((args, kwargs))
        return Recompute.apply(forward, structure, len(parameters), *leaves, *parameters)

    return call
