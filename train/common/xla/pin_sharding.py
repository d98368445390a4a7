"""Pins the sharding of tensors in the middle of a step, so that XLA's partitioner cannot choose it.

sharding/placement.py says what is pinned, and why everything must be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor, nn

from train.common.xla.regions import two_steps

_XLAC = torch_xla._XLAC

BATCH = ("copies", "data")  # the axes of sharding/layout.py over which a batch is split


def pin(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> Tensor:
    """Returns the same values as a new tensor, which is split as `spec` says."""
    is_annotated = bool(_XLAC._get_xla_sharding_spec(tensor))
    # One that is annotated, such as a batch, refuses another annotation.
    tensor = _recomputed(tensor) if is_annotated else tensor.clone()
    _XLAC._xla_mark_sharding(tensor, spmd.get_op_sharding(spec))
    return tensor


def pin_replicated(tensor: Tensor) -> Tensor:
    """Returns the same values as a new tensor, which every device holds whole."""
    tensor = _recomputed(tensor)
    replicated = _XLAC.OpSharding([], [], [], xs.ShardingType.REPLICATED)
    _XLAC._xla_mark_sharding(tensor, replicated)
    return tensor


def _recomputed(tensor: Tensor) -> Tensor:
    """Returns the same values as the result of a computation, without the tensor's annotation."""
    if tensor.is_floating_point():
        return tensor * 1
    return tensor + 0


def gather(tensor: Tensor) -> Tensor:
    """Returns a computed tensor whole on every device, after running the program that gathers it.

    A tensor that is not split is returned as it is. torch_xla gathers a split tensor when it is
    read, too, but compiles the program for each tensor and each time.
    """
    is_split = "devices=" in _XLAC._get_xla_sharding_spec(tensor)
    if not is_split:
        return tensor

    tensor = pin_replicated(tensor)
    _XLAC._xla_sync_multi([tensor], devices=[], wait=True, sync_xla_data=False)
    # One such program after the other: of several at once, XLA's CPU backend may leave a device of
    # one without a thread. The other devices wait for it for 10 seconds, then the process ends. On
    # a pod a host that keeps nothing, and so reads nothing, would start all of them at once.
    xm.wait_device_ops()
    return tensor


class PinBoth(torch.autograd.Function):
    """Pins the sharding of a tensor and of its gradient."""

    @staticmethod
    def forward(ctx, tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> Tensor:
        ctx.spmd = spmd
        ctx.spec = spec
        return pin(tensor, spmd, spec)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return pin(gradient, ctx.spmd, ctx.spec), None, None


def constrain_on(spmd: xs.Mesh) -> Callable[..., Tensor]:
    """Returns the function `constrain(x, *axes)` that a module calls to pin x.

    `axes` are those that split each dimension of x, or None. "data" among them stands for all axes
    over which a batch is split.
    """

    def constrain(tensor: Tensor, *axes: str | None) -> Tensor:
        spec = tuple(BATCH if axis == "data" else axis for axis in axes)
        return PinBoth.apply(tensor, spmd, spec)

    return constrain


def pin_gradient(parameter: nn.Parameter, spmd: xs.Mesh, spec: tuple, summed: bool) -> None:
    """Splits the gradient of a parameter as `spec` says, as soon as it is summed over the devices.

    Over "data" it is split in `two_steps`: by a pin on a mesh whose "data" has the devices of the
    first step only, and then by one on the whole mesh.

    Args:
        summed: the gradient comes summed and split already (head.py), so one step is enough.
    """
    sizes = spmd.shape()
    meshes = [spmd]
    first, second = two_steps(sizes["data"])
    if second > 1 and "data" in spec and not summed:
        names = ("copies", "data", "rest of data", "model")
        shape = (sizes["copies"], first, second, sizes["model"])
        first_step = xs.Mesh(spmd.device_ids, shape, names)
        meshes = [first_step, spmd]

    def hook(gradient: Tensor) -> Tensor:
        for mesh in meshes:
            gradient = pin(gradient, mesh, spec)
        return gradient

    parameter.register_hook(hook)


@dataclass(frozen=True)
class BatchSplit:
    """How the activations of a module are split over the devices, except their last dimension."""

    spmd: xs.Mesh
    dimension: int  # that of the examples: 0 for [B, T, …], 1 for [T, B, …]
    devices: int  # over which the examples are split

    def spec(self, tensor: Tensor, last: str | None) -> tuple:
        """Returns the axes that split an activation; `last` is that of its last dimension."""
        # Embeddings of positions have one row for all examples, which cannot be split.
        is_divisible = tensor.shape[self.dimension] % self.devices == 0
        is_last = self.dimension == tensor.dim() - 1
        spec = [None] * tensor.dim()
        if is_divisible and not is_last:
            spec[self.dimension] = BATCH
        spec[-1] = last
        return tuple(spec)


def pin_input(module: nn.Module, split: BatchSplit, last: str | None) -> None:
    """Pins a module's first input and its gradient; `last` is the axis of the last dimension."""

    def hook(_: nn.Module, args: tuple) -> tuple[Any, ...]:
        first = args[0]
        pinned = PinBoth.apply(first, split.spmd, split.spec(first, last))
        # Wherever the first input is given again: in self-attention it is the keys' input, too.
        return tuple(pinned if argument is first else argument for argument in args)

    module.register_forward_pre_hook(hook)


def pin_output(module: nn.Module, split: BatchSplit, last: str | None) -> None:
    """Pins a module's result and its gradient; `last` is the axis of the last dimension."""

    def hook(_: nn.Module, args: tuple, result: Tensor) -> Tensor:
        return PinBoth.apply(result, split.spmd, split.spec(result, last))

    module.register_forward_hook(hook)


def look_up_batch_first(embedding: nn.Embedding) -> None:
    """Makes an embedding look up time-major ids [T, B] as [B, T], and return [T, B, …].

    A device has some examples of each time step. Of T * B ids they are not consecutive, so each
    device would look up the ids of all; of B * T ids they are.
    """

    def to_batch_first(_: nn.Module, args: tuple) -> Tensor:
        return args[0].transpose(0, 1)

    def to_time_major(_: nn.Module, args: tuple, result: Tensor) -> Tensor:
        return result.transpose(0, 1)

    embedding.register_forward_pre_hook(to_batch_first)
    embedding.register_forward_hook(to_time_major)
