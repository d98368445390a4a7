"""Collectives over groups of devices, for layers of your own: docs/groups.md.

In a per-device region a tensor is the shard that each device has. `per_device` makes a region of a
function, as jax.shard_map does. In it the devices along an axis of the mesh share what they have,
by `group_sum` and the others. Gradients are those of the whole computation, as on one device. On
plain PyTorch there is one device: a shard is the whole tensor, and nothing below changes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common.mesh import Mesh

# For each dimension of a tensor the axis or axes that split it, or None.
Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Axes:
    """The devices of a mesh along named axes. Consecutive devices differ along the last axis."""

    sizes: dict[str, int]
    regions: Any  # a Regions of train/common/xla/regions.py; None on plain PyTorch

    def size(self, axis: str) -> int:
        """Returns the devices along an axis; raises InputError where there is no such axis."""
        if axis not in self.sizes:
            known = ", ".join(self.sizes)
            raise InputError(f"axis {axis!r} is not of this mesh; give one of {known}")
        return self.sizes[axis]


def axes(mesh: Mesh, **sizes: int) -> Axes:
    """Returns the devices of a mesh by axis, such as axes(mesh, group=2, chip=4).

    Without sizes the axes are those of `--mesh`, or all devices as "data".

    Raises:
        InputError: the sizes do not multiply to the number of devices; or there are several
            processes of plain PyTorch.
    """
    if mesh.parts > 1:
        raise InputError(
            f"groups of devices are within one process, and there are {mesh.parts}: "
            "start one, or use --device xla"
        )
    if not sizes:
        sizes = _own_sizes(mesh)

    # bool is an int, but no size.
    are_positive = all(type(size) is int and size > 0 for size in sizes.values())
    if not are_positive or math.prod(sizes.values()) != mesh.num_devices:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"the axes are {given}; their sizes must multiply to the {mesh.num_devices} devices"
        )

    if not mesh.compiles:
        return Axes(sizes, None)
    from train.common.xla.regions import Regions

    return Axes(sizes, Regions(sizes))


def _own_sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the devices by axis of `--mesh`, without "copies" where that has one device."""
    all_sizes = mesh.layers.axes if mesh.layers else {"data": mesh.num_devices}
    sizes = {}
    for axis, size in all_sizes.items():
        if size > 1 or axis != "copies":
            sizes[axis] = size
    return sizes


class LinearMap(torch.autograd.Function):
    """Applies a linear function to a tensor, and the function's transpose to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, function: Callable, transposed: Callable) -> Tensor:
        ctx.transposed = transposed
        return function(x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative would be wrong, in silence
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradient), None, None


class Entered(LinearMap):
    """Makes shards of a whole tensor."""


class Left(LinearMap):
    """Makes a whole tensor of shards."""


def _check(what: str, tensors: Sequence[Any], specs: Sequence[Spec]) -> None:
    """Raises InputError where there is not a tensor for each spec, or a spec is no tuple."""
    if len(tensors) != len(specs):
        raise InputError(
            f"the function has {len(tensors)} {what} and {len(specs)} specs: give one for each"
        )

    for tensor, spec in zip(tensors, specs, strict=True):
        if not torch.is_tensor(tensor) or not isinstance(spec, tuple):
            kind = type(tensor).__name__
            raise InputError(
                f"one of the {what} is a {kind}, its spec {spec!r}: give a tensor, and a tuple"
            )


def _check_sources(results: Sequence[Tensor]) -> None:
    """Raises InputError where the gradient of results reaches a whole tensor that is no argument.

    Such a gradient would end the process.
    """
    if _reach_outside(results):
        raise InputError(
            "a tensor with a gradient is used in a per-device region, but is no argument: pass it"
        )


def _reach_outside(results: Sequence[Tensor]) -> bool:
    """Returns whether the graph of results goes back to a whole tensor other than by `Entered`."""
    for result in results:
        if result.requires_grad and result.grad_fn is None:
            return True  # the result is itself such a tensor

    # Autograd's names of their nodes.
    entered = f"{Entered.__name__}Backward"
    left = f"{Left.__name__}Backward"
    to_visit = [result.grad_fn for result in results]
    seen = {None}  # nothing is before an operation's input without a gradient
    while to_visit:
        node = to_visit.pop()
        if node in seen or node.name() == entered:
            continue

        is_leaf = hasattr(node, "variable")
        makes_whole = node.name() == left
        if is_leaf or makes_whole:
            return True
        seen.add(node)
        for previous, _ in node.next_functions:
            to_visit.append(previous)
    return False


def per_device(
    function: Callable, mesh: Axes, inputs: Sequence[Spec], results: Spec | list[Spec]
) -> Callable:
    """Returns a function of whole tensors that runs `function` on each device's shards of them.

    Args:
        inputs: how each argument is split; along an axis that splits no dimension, all devices have
            the same.
        results: how the result is split, or a list for a `function` that returns a tuple. Along an
            axis that splits no dimension the devices' results must be the same, as after a
            `group_sum`.
    Raises:
        InputError: by the returned function, where tensors and specs do not match, or `function`
            uses a tensor with a gradient that is no argument.
    """
    regions = mesh.regions
    if regions is None:
        return function
    returns_tuple = isinstance(results, list)
    specs = results if returns_tuple else [results]

    def call(*args: Tensor) -> Any:
        _check("arguments", args, inputs)
        with regions.entered():
            shards = [_enter(x, regions, spec) for x, spec in zip(args, inputs, strict=True)]
            found = function(*shards)

        if isinstance(found, tuple | list) != returns_tuple:
            raise InputError(
                "a list of specs is for a function that returns a tuple, "
                "a tuple for one that returns a tensor"
            )
        if not returns_tuple:
            found = (found,)
        _check("results", found, specs)
        _check_sources(found)

        wholes = [_leave(x, regions, spec) for x, spec in zip(found, specs, strict=True)]
        return tuple(wholes) if returns_tuple else wholes[0]

    return call


def _enter(x: Tensor, regions: Any, spec: Spec) -> Tensor:
    """Returns each device's shard of a whole tensor; its gradient is whole again."""

    def enter(whole: Tensor) -> Tensor:
        return regions.enter(whole, spec)

    def leave_summed(gradient: Tensor) -> Tensor:
        # Each of the devices with the same shard has a part of its gradient.
        summed = regions.all_reduce(gradient, regions.unused(spec))
        return regions.leave(summed, spec)

    return Entered.apply(x, enter, leave_summed)


def _leave(x: Tensor, regions: Any, spec: Spec) -> Tensor:
    """Returns the whole tensor of the devices' shards; its gradient is split again."""
    copies = regions.count(regions.unused(spec))

    def leave(shard: Tensor) -> Tensor:
        return regions.leave(shard, spec)

    def enter_share(gradient: Tensor) -> Tensor:
        # Devices with the same shard share its gradient, since `_enter` sums theirs.
        return regions.enter(gradient, spec) / copies

    return Left.apply(x, leave, enter_share)


def group_sum(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the sum of the shards of the devices along `axis`, to each of them."""
    if _devices(mesh, axis) == 1:
        return x

    def all_reduce(x: Tensor) -> Tensor:
        return mesh.regions.all_reduce(x, (axis,))

    return LinearMap.apply(x, all_reduce, all_reduce)


def group_mean(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the mean of the shards of the devices along `axis`, to each of them."""
    return group_sum(x, mesh, axis) / mesh.size(axis)


def all_gather(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Returns the shards [n, …] along `axis` one after the other, [devices * n, …], to each."""
    if _devices(mesh, axis) == 1:
        return x
    return LinearMap.apply(x, *_gather_and_scatter(mesh, axis))


def reduce_scatter(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Sums [devices * n, …] along `axis`; its i-th device gets the i-th [n, …] of the sum."""
    if _divided(x, mesh, axis) == 1:
        return x
    gather, scatter = _gather_and_scatter(mesh, axis)
    return LinearMap.apply(x, scatter, gather)


def _gather_and_scatter(mesh: Axes, axis: str) -> tuple[Callable, Callable]:
    """Returns all-gather and reduce-scatter along `axis`, each the transpose of the other."""

    def gather(x: Tensor) -> Tensor:
        return mesh.regions.all_gather(x, axis)

    def scatter(x: Tensor) -> Tensor:
        return mesh.regions.reduce_scatter(x, axis)

    return gather, scatter


def all_to_all(x: Tensor, mesh: Axes, axis: str) -> Tensor:
    """Sends the i-th [n, …] of x [devices * n, …] to the i-th device along `axis`.

    Returns what the devices sent to this one, in their order: [devices * n, …].
    """
    if _divided(x, mesh, axis) == 1:
        return x

    def exchange(x: Tensor) -> Tensor:
        return mesh.regions.all_to_all(x, axis)

    return LinearMap.apply(x, exchange, exchange)


def _devices(mesh: Axes, axis: str) -> int:
    """Returns the number of devices along an axis; raises InputError outside of a region.

    Outside of it tensors are whole, and a sum would add the whole tensor once per device. A
    region's backward pass runs after the region, and is allowed.
    """
    devices = mesh.size(axis)
    in_backward = torch._C._current_graph_task_id() != -1
    if mesh.regions is not None and not (mesh.regions.inside or in_backward):
        raise InputError(
            "outside of a per-device region a tensor is whole: "
            "call this in a function of per_device"
        )
    return devices


def _divided(x: Tensor, mesh: Axes, axis: str) -> int:
    """Returns the number of devices along an axis.

    Raises InputError outside of a region, and where they do not divide the rows of x.
    """
    devices = _devices(mesh, axis)
    if x.dim() == 0 or x.shape[0] % devices:
        raise InputError(
            f"a part is {list(x.shape)}; "
            f"its first dimension must be a multiple of {devices}, the devices along {axis}"
        )
    return devices
