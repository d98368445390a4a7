"""Recomputation of a layer in the backward pass, in a step that is started again without a trace.

torch.utils.checkpoint does not know XLA, and torch_xla.utils.checkpoint draws dropout's numbers again by setting the
random state from the host, which a repeated program would not do (replay.py refuses it).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Seeds(TorchFunctionMode):
    """Records the tensors that `torch.rand` returns, or returns the `given` ones again: models/layers.py draws a seed
    for each of its dropouts. Any other way to drop would be another mask the second time, so it raises RuntimeError."""

    OTHERS = (torch.nn.functional.dropout, torch.dropout, torch.bernoulli, torch.rand_like, torch.randn, torch.randint)

    def __init__(self, given: Sequence[Tensor] | None = None):
        super().__init__()
        self.drawn: list[Tensor] = []
        self._given = None if given is None else list(given)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in self.OTHERS:
            raise RuntimeError(
                f"{function.__name__} draws other numbers in a second pass; use models/layers.py's dropout"
            )
        if function is not torch.rand:
            return function(*args, **(kwargs or {}))
        if self._given is not None:
            return self._given.pop(0)
        self.drawn.append(function(*args, **(kwargs or {})))
        return self.drawn[-1]


class Recompute(torch.autograd.Function):
    """A function of which the inputs alone are kept; the backward pass runs it again, with the same seeds.

    The optimization barrier keeps the compiler from finding out that both passes compute the same, and from beginning
    the second before its gradient is there.
    """

    @staticmethod
    def forward(ctx, function: Callable, structure: pytree.TreeSpec, parameters: int, *leaves: Any) -> Any:
        """Returns function(*args, **kwargs), which `leaves` but for the last `parameters` and `structure` make up."""
        inputs = leaves[: len(leaves) - parameters]
        args, kwargs = pytree.tree_unflatten(inputs, structure)
        with Seeds() as seeds:
            result = function(*args, **kwargs)
        ctx.function, ctx.structure = function, structure
        ctx.rest = [None if torch.is_tensor(leaf) else leaf for leaf in inputs]
        ctx.places = [place for place, leaf in enumerate(inputs) if torch.is_tensor(leaf)]
        ctx.parameters = leaves[len(inputs) :]
        kind = torch_xla.device().type
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(*[inputs[place] for place in ctx.places], *seeds.drawn)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        saved = ctx.saved_tensors
        inputs, seeds = list(ctx.rest), saved[len(ctx.places) :]
        for place, tensor in zip(ctx.places, saved, strict=False):
            inputs[place] = tensor.detach().clone() if ctx.needs_input_grad[place + 3] else tensor
        wanted = [place for place in ctx.places if ctx.needs_input_grad[place + 3]]
        given = [gradient for gradient in gradients if gradient is not None]
        # Copies of the gradients: from behind the barrier a bias' gradient would be added up in another order.
        torch_xla._XLAC._xla_optimization_barrier_([inputs[place] for place in wanted] + [g.clone() for g in given])
        for place in wanted:
            inputs[place].requires_grad_(True)
        args, kwargs = pytree.tree_unflatten(inputs, ctx.structure)
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(torch_xla.device().type, dtype, enabled=enabled), Seeds(seeds):
            result = ctx.function(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        sources = [inputs[place] for place in wanted] + [each for each in ctx.parameters if each.requires_grad]
        results = [one for one, gradient in zip(results, gradients, strict=True) if gradient is not None]
        found = iter(torch.autograd.grad(results, sources, given, allow_unused=True))
        return (None, None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:]))


def again(layer: nn.Module) -> Callable:
    """Returns the forward pass of a layer that keeps its inputs only."""
    forward = layer.forward
    parameters = list(layer.parameters())

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return Recompute.apply(forward, structure, len(parameters), *leaves, *parameters)

    return call
