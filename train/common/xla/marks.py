"""Annotations of tensors in the middle of a step, for XLA's partitioner; see sharding/placement.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn

from train.common.xla.regions import two_steps

BATCH = ("copies", "data")  # axes of sharding/layout.py


def mark(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> Tensor:
    """Returns the same values as a new tensor, cut as `spec` says."""
    if torch_xla._XLAC._get_xla_sharding_spec(tensor):  # what has an annotation, such as a batch, refuses another
        tensor = tensor * 1 if tensor.is_floating_point() else tensor + 0
    else:
        tensor = tensor.clone()
    torch_xla._XLAC._xla_mark_sharding(tensor, spmd.get_op_sharding(spec))
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the same numbers as a new tensor that every device holds."""
    tensor = tensor * 1 if tensor.is_floating_point() else tensor + 0
    torch_xla._XLAC._xla_mark_sharding(tensor, torch_xla._XLAC.OpSharding([], [], [], xs.ShardingType.REPLICATED))
    return tensor


def computed_whole(tensor: Tensor) -> Tensor:
    """Returns a computed tensor itself, or what a program makes `whole` of one that is cut, and has run. A read of
    one that is cut would do so, too, but compile such a program for each tensor and each time."""
    if "devices=" in torch_xla._XLAC._get_xla_sharding_spec(tensor):
        tensor = whole(tensor)
        torch_xla._XLAC._xla_sync_multi([tensor], devices=[], wait=True, sync_xla_data=False)
        # Of several such programs at once XLA's CPU backend may leave a device of one without a thread: the others wait
        # for it for 10 seconds, and it ends the process. On a pod a host that keeps nothing would have all of them.
        xm.wait_device_ops()
    return tensor


class Mark(torch.autograd.Function):
    """`mark`, of the gradient too."""

    @staticmethod
    def forward(ctx, tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> Tensor:
        ctx.spmd, ctx.spec = spmd, spec
        return mark(tensor, spmd, spec)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return mark(gradient, ctx.spmd, ctx.spec), None, None


def constrain(spmd: xs.Mesh) -> Callable[..., Tensor]:
    """Returns what a module's `constrain(x, *axes)` is on the devices of `spmd`; a batch is cut over "data"."""
    return lambda tensor, *axes: Mark.apply(tensor, spmd, tuple(BATCH if axis == "data" else axis for axis in axes))


def mark_gradient(parameter: nn.Parameter, spmd: xs.Mesh, spec: tuple, summed: bool) -> None:
    """Cuts the gradients of a parameter as `spec` says, as soon as they are summed up; over "data" in `two_steps`, but
    if they come `summed` and cut."""
    sizes, meshes = spmd.shape(), [spmd]
    first, second = two_steps(sizes["data"])
    if second > 1 and "data" in spec and not summed:
        names = ("copies", "data", "rest of data", "model")  # so that "data" cuts over the first step's devices
        meshes.insert(0, xs.Mesh(spmd.device_ids, (sizes["copies"], first, second, sizes["model"]), names))

    def hook(gradient: Tensor) -> Tensor:
        for mesh in meshes:
            gradient = mark(gradient, mesh, spec)
        return gradient

    parameter.register_hook(hook)


def _spec(tensor: Tensor, batch: int, size: int, axis: str | None) -> tuple:
    """Returns the axes of an activation: those of a batch for dimension `batch`, and `axis` for the last."""
    cut = tensor.shape[batch] % size == 0  # embeddings of positions have one row for all
    return (*(BATCH if i == batch and cut else None for i in range(tensor.dim() - 1)), axis)


def mark_input(module: nn.Module, spmd: xs.Mesh, batch: int, size: int, axis: str | None) -> None:
    """Annotates a module's input and its gradient. `batch`: the dimension that is cut into `size` parts; `axis` cuts
    the last one."""

    def hook(_: nn.Module, args: tuple) -> tuple[Any, ...]:
        marked = Mark.apply(args[0], spmd, _spec(args[0], batch, size, axis))
        return tuple(marked if each is args[0] else each for each in args)  # in self-attention the keys' input, too

    module.register_forward_pre_hook(hook)


def mark_result(module: nn.Module, spmd: xs.Mesh, batch: int, size: int, axis: str | None) -> None:
    """Annotates a module's result and its gradient, see `mark_input`."""

    def hook(_: nn.Module, args: tuple, result: Tensor) -> Tensor:
        return Mark.apply(result, spmd, _spec(result, batch, size, axis))

    module.register_forward_hook(hook)


def look_up_by_rows(embedding: nn.Embedding) -> None:
    """Lets an embedding look up time-major ids [T, B] in the order [B, T]. A device that has some rows of each T has no
    part of T * B ids in line, so that each would look up those of all devices."""
    embedding.register_forward_pre_hook(lambda _, args: args[0].transpose(0, 1))
    embedding.register_forward_hook(lambda _, args, result: result.transpose(0, 1))
