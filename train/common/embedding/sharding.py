"""How embedding arrays are cut over the devices, and the per-device regions in which they are read and written.

Inside a region a tensor is the part that each device holds, and only the collectives below are right (xm.all_reduce
silently is not).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

from errors import InputError
from train.common.device import Mesh, annotate

MANUAL = torch_xla._XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)


class Sharding:
    """The devices of a mesh as groups that share the tables: each group has a copy, its devices hold parts of it.

    Attributes:
        mesh: the mesh of the script.
        parts: devices of a group.
        groups: numbers of the devices of each group.
        spmd: torch_xla's mesh, "model" over all devices, or "data" x "model".
        axis: the axis over which tables are cut.
        batch_axes: the axes over which a batch is cut.
        copies_axis: the axis over which tables are copied; None when all devices share one copy.
    """

    def __init__(self, mesh: Mesh, parts: int):
        devices = mesh.num_devices
        if parts < 1 or devices % parts:
            raise InputError(f"model_devices is {parts}; it must divide the {devices} devices")
        self.mesh, self.parts, self.axis = mesh, parts, "model"
        ids = np.arange(devices)
        if parts == devices:
            self.spmd, self.batch_axes, self.copies_axis = xs.Mesh(ids, (devices,), ("model",)), "model", None
        else:
            # The same devices in the same order: a batch that the loader has sharded over "data" is one over both.
            self.spmd = xs.Mesh(ids, (devices // parts, parts), ("data", "model"))
            self.batch_axes, self.copies_axis = ("data", "model"), "data"
        self.groups = ids.reshape(-1, parts).tolist()
        self._shardings: dict[tuple, Any] = {}  # partition spec -> what torch_xla makes of it

    def replicated(self, tensor: Tensor) -> Tensor:
        """Copies a host's tensor to every device."""
        tensor = tensor.to(self.mesh.device)
        self.annotate_replicated(tensor)
        return tensor

    def annotate_replicated(self, tensor: Tensor) -> None:
        """Marks a tensor on the device as one that every device has whole."""
        annotate(tensor, self.mesh.spmd, (None,) * tensor.dim())

    def _op_sharding(self, spec: tuple) -> Any:
        if spec not in self._shardings:
            self._shardings[spec] = self.spmd.get_op_sharding(spec)
        return self._shardings[spec]

    def _mark(self, tensor: Tensor, spec: tuple) -> None:
        """Does what xs.mark_sharding does, without its search for two packages, a third of a step's tracing."""
        torch_xla._XLAC._xla_mark_sharding(tensor, self._op_sharding(spec))

    def shard(self, tensor: Tensor, spec: tuple) -> Tensor:
        """Reshards a tensor outside of a region: an all-gather, an all-to-all or a local slice."""
        tensor = tensor * 1 if tensor.is_floating_point() else tensor + 0
        self._mark(tensor, spec)
        return tensor

    def by_device(self, tensor: Tensor) -> Tensor:
        """Reshards [devices, batch, ...] from the batch to the devices (all-to-all) and the copies' batches."""
        rest = (None,) * (tensor.dim() - 2)
        tensor = self.shard(tensor, (None, self.batch_axes, *rest))
        return self.shard(tensor, (self.axis, self.copies_axis, *rest))

    def enter(self, tensor: Tensor, spec: tuple) -> Tensor:
        """Starts a region: returns the part of a sharded tensor that each device has."""
        self._mark(tensor, spec)
        return torch_xla._XLAC._spmd_full_to_shard_shape(tensor)

    def leave(self, tensor: Tensor, spec: tuple, shape: Sequence[int]) -> Tensor:
        """Ends a region: returns the tensor of `shape` that the devices' parts make up."""
        torch_xla._XLAC._mark_manual_sharding(tensor, MANUAL)
        return torch_xla._XLAC._spmd_shard_to_full_shape(tensor, self._op_sharding(spec), tuple(shape), tensor.dtype)

    def all_reduce(self, tensor: Tensor, groups: list[list[int]]) -> Tensor:
        """Adds up the devices' parts within each group."""
        return torch_xla._XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, tensor, 1.0, groups)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Adds up the parts over the model axis and cuts the sum along dimension 0."""
        return torch_xla._XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, tensor, 1.0, 0, self.parts, self.groups)
