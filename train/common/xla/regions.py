"""Per-device regions of an XLA mesh with named axes, and the collectives inside them; see sharding/groups.py.

Of torch_xla 2.9's own collectives all-reduce and reduce-scatter of `_XLAC._xla_spmd_*` are right in a region
(xm.all_reduce silently is not). The others are a step out of it: what the devices have becomes one tensor with a
dimension for each of them, and the partitioner cuts it along another dimension.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

from errors import InputError

MANUAL = torch_xla._XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)
MOST_DIMENSIONS = 5  # of a tile assignment; of one with more torch_xla 2.9 makes one that is wrong


def two_steps(devices: int) -> tuple[int, int]:
    """Returns the devices of the first and of the second of two reduce-scatters that do the work of one, where a slice
    may be square: of one among all chips of v5e:4x4 libtpu makes an all-reduce, which sends twice as much."""
    side = math.isqrt(devices)
    return (side, side) if side >= 4 and side * side == devices else (devices, 1)


class Regions:
    """The regions of the devices that `sizes` arranges, {axis: devices}."""

    inside = False

    def __init__(self, sizes: dict[str, int]):
        self.sizes, self.ids = sizes, np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        self.spmd = xs.Mesh(self.ids.reshape(-1), self.ids.shape, tuple(sizes))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Holds what runs in a region; raises InputError for another region in it, which would end the process, and for
        random numbers, of which every device would get the same."""
        if Regions.inside:
            raise InputError("a per-device region in another one: call it outside, and pass what it returns")
        device = str(torch_xla.device())
        before = torch_xla._XLAC._xla_get_rng_seed(device), torch.get_rng_state()
        Regions.inside = True
        try:
            yield
        finally:
            Regions.inside = False
        if torch_xla._XLAC._xla_get_rng_seed(device) != before[0] or not torch.equal(torch.get_rng_state(), before[1]):
            drawn = "random numbers in a per-device region would be the same on every device"
            raise InputError(f"{drawn}: draw them outside and pass them, cut as the tensor that they are for")

    def count(self, axes: Iterable[str | None]) -> int:
        """Returns the devices of a group along several axes."""
        return math.prod(self.sizes[axis] for axis in axes if axis)

    def unused(self, spec: tuple) -> tuple[str, ...]:
        """Returns the axes that cut no dimension."""
        return tuple(axis for axis in self.sizes if not any(axis in _axes(cut) for cut in spec))

    def enter(self, x: Tensor, spec: tuple) -> Tensor:
        """Returns every device's part of a whole tensor; raises InputError where the parts would not be equal."""
        self._check(x, spec, "a tensor")
        if any(n % self.count(_axes(cut)) for n, cut in zip(x.shape, spec, strict=True)):
            raise InputError(f"a tensor {list(x.shape)} does not divide into equal parts by {spec} of {self.sizes}")
        x = x * 1 if x.is_floating_point() else x | False  # what has an annotation, such as a batch, refuses another
        torch_xla._XLAC._xla_mark_sharding(x, self.spmd.get_op_sharding(spec))
        return torch_xla._XLAC._spmd_full_to_shard_shape(x)

    def _check(self, x: Tensor, spec: tuple, what: str) -> None:
        named = [axis for cut in spec for axis in _axes(cut) if axis]
        if len(spec) != x.dim() or not self.sizes.keys() >= set(named) or len(set(named)) < len(named):
            give = f"give an axis of {self.sizes}, or None, for each dimension, an axis once"
            raise InputError(f"{what} {list(x.shape)} cannot be cut by {spec}: {give}")
        if x.dim() + (self.count(self.unused(spec)) > 1) > MOST_DIMENSIONS:
            raise InputError(f"{what} {list(x.shape)} has too many dimensions to be cut by {spec}: reshape it")

    def leave(self, x: Tensor, spec: tuple) -> Tensor:
        """Returns the whole tensor that the devices' parts make up."""
        self._check(x, spec, "a device's result")
        shape = [n * self.count(_axes(cut)) for n, cut in zip(x.shape, spec, strict=True)]
        x = x.clone()
        torch_xla._XLAC._mark_manual_sharding(x, MANUAL)
        return torch_xla._XLAC._spmd_shard_to_full_shape(x, self.spmd.get_op_sharding(spec), shape, x.dtype)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        if self.count(axes) == 1:
            return x
        return torch_xla._XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, x, 1.0, self._groups(axes))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        first, second = two_steps(self.sizes[axis])
        groups = np.array(self._groups((axis,))).reshape(-1, first, second)
        for step in (groups.swapaxes(1, 2).reshape(-1, first), groups.reshape(-1, second)):
            if (devices := step.shape[1]) > 1:
                x = torch_xla._XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, x, 1.0, 0, devices, step.tolist())
        return x

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        around = self._around(axis)
        whole = around.leave(x.reshape(1, 1, 1, -1), ("before", "axis", "after", None))
        return around.enter(whole, ("before", None, "after", None)).reshape(-1, *x.shape[1:])

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        around = self._around(axis)
        whole = around.leave(x.reshape(1, 1, 1, self.sizes[axis], -1), ("before", "axis", "after", None, None))
        return around.enter(whole, ("before", None, "after", "axis", None)).reshape(x.shape)

    def _around(self, axis: str) -> "Regions":
        """Returns the same devices with three axes."""
        names = list(self.sizes)
        place = names.index(axis)
        before, after = self.count(names[:place]), self.count(names[place + 1 :])
        return Regions({"before": before, "axis": self.sizes[axis], "after": after})

    def _groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Returns the numbers of the devices of each group along `axes`."""
        places = [list(self.sizes).index(axis) for axis in axes]
        return np.moveaxis(self.ids, places, range(-len(axes), 0)).reshape(-1, self.count(axes)).tolist()


def _axes(cut: str | tuple[str, ...] | None) -> tuple[str | None, ...]:
    return cut if isinstance(cut, tuple) else (cut,)
