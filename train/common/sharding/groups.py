"""Collectives over groups of devices, for layers of your own: docs/groups.md.

A per-device region is code in which a tensor is the part that each device has. `per_device` makes one of a function; in
it the devices along an axis of the mesh share what they have, by `group_sum` and the others. Gradients are those of the
whole computation, as on one device. Plain PyTorch has one device: a part is the whole, and nothing below changes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common.mesh import Mesh

Spec = tuple[str | tuple[str, ...] | None, ...]  # the axis, or axes, that cut each dimension of a tensor; None: none


@dataclass(frozen=True)
class Axes:
    """The devices of a mesh along named axes; neighbours differ in the last one."""

    sizes: dict[str, int]
    regions: Any  # train/common/xla/regions.py's; None on plain PyTorch

    def size(self, axis: str) -> int:
        """Returns the devices along an axis; raises InputError where there is no such axis."""
        if axis not in self.sizes:
            raise InputError(f"axis {axis!r} is not of this mesh; give one of {', '.join(self.sizes)}")
        return self.sizes[axis]


def axes(mesh: Mesh, **sizes: int) -> Axes:
    """Returns the devices of a mesh by axis, such as axes(mesh, group=2, chip=4); without sizes those of `--mesh`, or
    all as "data".

    Raises:
        InputError: the sizes do not multiply to the number of devices.
    """
    of_mesh = mesh.layers.axes if mesh.layers else {"data": mesh.num_devices}
    sizes = sizes or {axis: size for axis, size in of_mesh.items() if size > 1 or axis != "copies"}
    whole = all(type(size) is int and size > 0 for size in sizes.values())
    if not whole or math.prod(sizes.values()) != mesh.num_devices:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"the axes are {given}; their sizes must multiply to the {mesh.num_devices} devices")
    if not mesh.compiles:
        return Axes(sizes, None)
    from train.common.xla.regions import Regions

    return Axes(sizes, Regions(sizes))


class Linear(torch.autograd.Function):
    """A linear function of a tensor, beside the one that takes its gradient back."""

    @staticmethod
    def forward(ctx, x: Tensor, function: Callable, transposed: Callable) -> Tensor:
        ctx.transposed = transposed
        return function(x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second one would be wrong, in silence
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradient), None, None


class Entered(Linear):
    """Makes parts of a whole tensor."""


class Left(Linear):
    """Makes a whole tensor of parts."""


def _check(what: str, tensors: Sequence[Any], specs: Sequence[Spec]) -> None:
    """Raises InputError where there is not a tensor for each spec, or a spec is no tuple."""
    if len(tensors) != len(specs):
        raise InputError(f"the function has {len(tensors)} {what} and {len(specs)} specs: give one for each")
    for tensor, spec in zip(tensors, specs, strict=True):
        if not torch.is_tensor(tensor) or not isinstance(spec, tuple):
            raise InputError(
                f"one of the {what} is a {type(tensor).__name__}, its spec {spec!r}: give a tensor, and a tuple"
            )


def _check_sources(found: Sequence[Tensor]) -> None:
    """Raises InputError where results have a gradient to a tensor that was whole, which would end the process."""
    seen, ahead = {None}, [x.grad_fn for x in found]
    outside = any(x.requires_grad and x.grad_fn is None for x in found)
    while ahead and not outside:
        node = ahead.pop()
        if node in seen or node.name() == f"{Entered.__name__}Backward":
            continue
        outside = hasattr(node, "variable") or node.name() == f"{Left.__name__}Backward"
        seen.add(node)
        ahead.extend(before for before, _ in node.next_functions)
    if outside:
        raise InputError("a tensor with a gradient is used in a per-device region, but is no argument: pass it")


def per_device(function: Callable, mesh: Axes, inputs: Sequence[Spec], results: Spec | list[Spec]) -> Callable:
    """Returns a function of whole tensors that runs `function` on every device's parts of them, as jax.shard_map does.

    Args:
        inputs: how each argument is cut; along an axis that cuts no dimension, all devices have the same.
        results: how the result is cut, or a list for a `function` that returns a tuple. Along an axis that cuts no
            dimension the devices' results must be the same, as after a `group_sum`.
    """
    on_xla = mesh.regions
    if on_xla is None:
        return function
    specs = results if isinstance(results, list) else [results]

    def entered(x: Tensor, spec: Spec) -> Tensor:
        def summed(gradient: Tensor) -> Tensor:
            return on_xla.leave(on_xla.all_reduce(gradient, on_xla.unused(spec)), spec)

        return Entered.apply(x, lambda x: on_xla.enter(x, spec), summed)

    def left(x: Tensor, spec: Spec) -> Tensor:
        copies = on_xla.count(on_xla.unused(spec))
        return Left.apply(x, lambda x: on_xla.leave(x, spec), lambda g: on_xla.enter(g, spec) / copies)

    def whole(*args: Tensor) -> Any:
        _check("arguments", args, inputs)
        with on_xla.entered():
            found = function(*(entered(x, spec) for x, spec in zip(args, inputs, strict=True)))
        if isinstance(found, tuple | list) != isinstance(results, list):
            raise InputError(
                "a list of specs is for a function that returns a tuple, a tuple for one that returns a tensor"
            )
        found = found if isinstance(results, list) else (found,)
        _check("results", found, specs)
        _check_sources(found)
        wholes = tuple(left(x, spec) for x, spec in zip(found, specs, strict=True))
        return wholes if isinstance(results, list) else wholes[0]

    return whole


def group_sum(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the sum of the parts of the devices along `axis`, to each of them."""
    if _devices(mesh, axis) == 1:
        return x
    return Linear.apply(x, *[lambda x: mesh.regions.all_reduce(x, (axis,))] * 2)


def group_mean(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the mean of the parts of the devices along `axis`, to each of them."""
    return group_sum(x, mesh, axis) / mesh.size(axis)


def all_gather(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the parts [n, …] of the devices along `axis` behind each other, [devices * n, …], to each of them."""
    if _devices(mesh, axis) == 1:
        return x
    return Linear.apply(x, lambda x: mesh.regions.all_gather(x, axis), lambda x: mesh.regions.reduce_scatter(x, axis))


def reduce_scatter(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Adds up the parts [devices * n, …] along `axis`; the i-th of its devices gets the i-th [n, …] of the sum."""
    if _divided(x, mesh, axis) == 1:
        return x
    return Linear.apply(x, lambda x: mesh.regions.reduce_scatter(x, axis), lambda x: mesh.regions.all_gather(x, axis))


def all_to_all(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Sends the i-th [n, …] of [devices * n, …] to the i-th device along `axis`; returns what they sent, in order."""
    if _divided(x, mesh, axis) == 1:
        return x
    return Linear.apply(x, *[lambda x: mesh.regions.all_to_all(x, axis)] * 2)


def _devices(mesh: Axes, axis: str) -> int:
    """Returns the devices along an axis; raises InputError outside of a region, where a sum would be of wholes."""
    devices, backward = mesh.size(axis), torch._C._current_graph_task_id() != -1  # of a region, after it
    if mesh.regions is not None and not (mesh.regions.inside or backward):
        raise InputError("outside of a per-device region a tensor is whole: call this in a function of per_device")
    return devices


def _divided(x: Tensor, mesh: Axes, axis: str) -> int:
    """Returns the devices along an axis; raises InputError where they cannot share the rows of x equally."""
    devices = _devices(mesh, axis)
    if x.dim() == 0 or x.shape[0] % devices:
        rows = f"a multiple of {devices}, the devices along {axis}"
        raise InputError(f"a part is {list(x.shape)}; its first dimension must be {rows}")
    return devices
