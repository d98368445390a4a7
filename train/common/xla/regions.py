"""Per-device regions of an XLA mesh with named axes, and the collectives inside them.

A region is code in which a tensor is the shard that each device has: torch_xla's manual sharding,
JAX's shard_map. Layers use it by sharding/groups.py.

Of torch_xla 2.9's own collectives, all-reduce and reduce-scatter of `_XLAC._xla_spmd_*` are right
in a region (xm.all_reduce silently is not). The others step out of it: what the devices have
becomes one tensor with a dimension for each axis, and the partitioner splits it along another
dimension.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

from errors import InputError

_XLAC = torch_xla._XLAC

MANUAL = _XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)
MOST_DIMENSIONS = 5  # of a tile assignment; torch_xla 2.9 makes a wrong one of more

Axis = str | tuple[str, ...] | None  # what splits one dimension of a tensor


def two_steps(devices: int) -> tuple[int, int]:
    """Returns how many devices each of two reduce-scatters has, instead of one over `devices`.

    libtpu makes an all-reduce, which sends twice as much, of one reduce-scatter among all chips of
    a square slice such as v5e:4x4. Where the devices cannot be such a slice, the second
    reduce-scatter is over one device, so there is none.
    """
    side = math.isqrt(devices)
    is_square = side * side == devices
    if is_square and side >= 4:
        return side, side
    return devices, 1


class Regions:
    """The per-device regions of the devices that `sizes` arranges by axis, as {axis: devices}."""

    inside = False  # of a region, anywhere in this process

    def __init__(self, sizes: dict[str, int]):
        shape = tuple(sizes.values())
        self.sizes = sizes
        self.ids = np.arange(math.prod(shape)).reshape(shape)
        self.spmd = xs.Mesh(self.ids.reshape(-1), self.ids.shape, tuple(sizes))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the code inside of it a region.

        Raises:
            InputError: it is inside of another region, which would end the process; or random
                numbers were drawn, of which every device would get the same.
        """
        if Regions.inside:
            raise InputError(
                "a per-device region in another one: call it outside, and pass what it returns"
            )

        device_seed, host_state = _random_state()
        Regions.inside = True
        try:
            yield
        finally:
            Regions.inside = False

        new_device_seed, new_host_state = _random_state()
        if new_device_seed != device_seed or not torch.equal(new_host_state, host_state):
            raise InputError(
                "random numbers in a per-device region would be the same on every device: "
                "draw them outside and pass them, cut as the tensor that they are for"
            )

    def count(self, axes: Iterable[str | None]) -> int:
        """Returns how many devices a group along several axes has; None counts as one."""
        return math.prod(self.sizes[axis] for axis in axes if axis)

    def unused(self, spec: tuple[Axis, ...]) -> tuple[str, ...]:
        """Returns the axes that split no dimension."""
        used = _flat_axes(spec)
        return tuple(axis for axis in self.sizes if axis not in used)

    def enter(self, x: Tensor, spec: tuple[Axis, ...]) -> Tensor:
        """Returns each device's shard of a whole tensor; InputError if shards would be unequal."""
        self._check(x, spec, "a tensor")
        for size, axis in zip(x.shape, spec, strict=True):
            if size % self.count(_as_tuple(axis)):
                shape = list(x.shape)
                raise InputError(
                    f"a tensor {shape} does not divide into equal parts by {spec} of {self.sizes}"
                )

        # A new tensor, since one that is annotated, such as a batch, refuses another annotation.
        # `| False` takes integers and bools, and keeps their type.
        x = x * 1 if x.is_floating_point() else x | False
        _XLAC._xla_mark_sharding(x, self.spmd.get_op_sharding(spec))
        return _XLAC._spmd_full_to_shard_shape(x)

    def leave(self, x: Tensor, spec: tuple[Axis, ...]) -> Tensor:
        """Returns the whole tensor that the devices' shards make up."""
        self._check(x, spec, "a device's result")
        whole_shape = []
        for size, axis in zip(x.shape, spec, strict=True):
            whole_shape.append(size * self.count(_as_tuple(axis)))

        x = x.clone()
        _XLAC._mark_manual_sharding(x, MANUAL)
        sharding = self.spmd.get_op_sharding(spec)
        return _XLAC._spmd_shard_to_full_shape(x, sharding, whole_shape, x.dtype)

    def _check(self, x: Tensor, spec: tuple[Axis, ...], what: str) -> None:
        """Raises InputError where a tensor cannot be split by `spec`."""
        named = _flat_axes(spec)
        unknown = set(named) - self.sizes.keys()
        has_repeated = len(set(named)) < len(named)
        if len(spec) != x.dim() or unknown or has_repeated:
            raise InputError(
                f"{what} {list(x.shape)} cannot be cut by {spec}: "
                f"give an axis of {self.sizes}, or None, for each dimension, an axis once"
            )

        # Devices with the same shard take one more dimension of the tile assignment.
        has_copies = self.count(self.unused(spec)) > 1
        if x.dim() + has_copies > MOST_DIMENSIONS:
            raise InputError(
                f"{what} {list(x.shape)} has too many dimensions to be cut by {spec}: reshape it"
            )

    def all_reduce(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Returns the sum of x over each group of devices along `axes`, on each of them."""
        if self.count(axes) == 1:
            return x
        return _XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, x, 1.0, self._groups(axes))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Sums [devices * n, …] along `axis`; its i-th device gets the i-th [n, …] of the sum."""
        first, second = two_steps(self.sizes[axis])  # devices of each of two reduce-scatters
        groups = np.array(self._groups((axis,))).reshape(-1, first, second)

        # Device [i, j] of a group: the first step is among those with the same j and leaves it the
        # i-th of `first` blocks; the second, among those with the same i, the j-th part of that.
        first_groups = groups.swapaxes(1, 2).reshape(-1, first)
        second_groups = groups.reshape(-1, second)
        for step_groups in (first_groups, second_groups):
            devices = step_groups.shape[1]
            if devices > 1:
                ids = step_groups.tolist()
                x = _XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, x, 1.0, 0, devices, ids)
        return x

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """Returns the shards [n, …] along `axis`, concatenated to [devices * n, …], on each."""
        around = self._around(axis)
        whole = around.leave(x.reshape(1, 1, 1, -1), ("before", "axis", "after", None))
        gathered = around.enter(whole, ("before", None, "after", None))
        return gathered.reshape(-1, *x.shape[1:])

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """Sends the i-th [n, …] of x [devices * n, …] to the i-th device along `axis`."""
        around = self._around(axis)
        by_receiver = x.reshape(1, 1, 1, self.sizes[axis], -1)
        whole = around.leave(by_receiver, ("before", "axis", "after", None, None))
        by_sender = around.enter(whole, ("before", None, "after", "axis", None))
        return by_sender.reshape(x.shape)

    def _around(self, axis: str) -> "Regions":
        """Returns the same devices with three axes: those before `axis`, `axis`, those after it."""
        names = list(self.sizes)
        index = names.index(axis)
        before = self.count(names[:index])
        after = self.count(names[index + 1 :])
        return Regions({"before": before, "axis": self.sizes[axis], "after": after})

    def _groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Returns the ids of the devices of each group along `axes`."""
        names = list(self.sizes)
        dimensions = [names.index(axis) for axis in axes]
        last = range(-len(axes), 0)
        by_group = np.moveaxis(self.ids, dimensions, last).reshape(-1, self.count(axes))
        return by_group.tolist()


def _random_state() -> tuple[Any, Tensor]:
    """Returns the device's random seed and the state of the host's generator."""
    device_seed = _XLAC._xla_get_rng_seed(str(torch_xla.device()))
    return device_seed, torch.get_rng_state()


def _as_tuple(axis: Axis) -> tuple[str | None, ...]:
    """Returns the axes that split one dimension."""
    return axis if isinstance(axis, tuple) else (axis,)


def _flat_axes(spec: tuple[Axis, ...]) -> list[str]:
    """Returns the axes that split any dimension, in order."""
    found = []
    for axis in spec:
        found += [name for name in _as_tuple(axis) if name]
    return found
