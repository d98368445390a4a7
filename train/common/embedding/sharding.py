"""How embedding arrays are cut over XLA devices, and the per-device regions in which they are read and written.

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

from train.common.embedding.one_device import OneDevice
from train.common.mesh import Mesh

MANUAL = torch_xla._XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)


class Sharding(OneDevice):
    """The XLA devices of a mesh as groups that share the tables; see OneDevice."""

    def __init__(self, mesh: Mesh, parts: int):
        super().__init__(mesh, parts)
        ids = np.arange(mesh.num_devices)
        if self.copies_axis is None:
            self.spmd = xs.Mesh(ids, (parts,), ("model",))
        else:
            # The same devices in the same order: a batch that the loader has sharded over "data" is one over both.
            self.spmd = xs.Mesh(ids, (mesh.num_devices // parts, parts), ("data", "model"))
        self._shardings: dict[tuple, Any] = {}  # partition spec -> what torch_xla makes of it

    def _op_sharding(self, spec: tuple) -> Any:
        if spec not in self._shardings:
            self._shardings[spec] = self.spmd.get_op_sharding(spec)
        return self._shardings[spec]

    def _mark(self, tensor: Tensor, spec: tuple) -> None:
        """Does what xs.mark_sharding does, without its search for two packages, a third of a step's tracing."""
        torch_xla._XLAC._xla_mark_sharding(tensor, self._op_sharding(spec))

    def shard(self, tensor: Tensor, spec: tuple) -> Tensor:
        tensor = tensor * 1 if tensor.is_floating_point() else tensor + 0
        self._mark(tensor, spec)
        return tensor

    def enter(self, tensor: Tensor, spec: tuple) -> Tensor:
        self._mark(tensor, spec)
        return torch_xla._XLAC._spmd_full_to_shard_shape(tensor)

    def leave(self, tensor: Tensor, spec: tuple, shape: Sequence[int]) -> Tensor:
        torch_xla._XLAC._mark_manual_sharding(tensor, MANUAL)
        return torch_xla._XLAC._spmd_shard_to_full_shape(tensor, self._op_sharding(spec), tuple(shape), tensor.dtype)

    def all_reduce(self, tensor: Tensor, groups: list[list[int]]) -> Tensor:
        return torch_xla._XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, tensor, 1.0, groups)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return torch_xla._XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, tensor, 1.0, 0, self.parts, self.groups)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        groups, rest = len(self.groups), (None,) * (tensor.dim() - 1)
        sent, received = ((self.copies_axis, *axes, *rest) for axes in ((self.axis, None), (None, self.axis)))
        whole = self.leave(tensor[None, None], sent, (groups, self.parts, *tensor.shape))
        return self.enter(self.shard(whole, received), received).reshape(tensor.shape)

    def gather_copies(self, tensor: Tensor) -> Tensor:
        if self.copies_axis is None:
            return tensor
        rest = (None,) * tensor.dim()
        cut, whole = (self.copies_axis, self.axis, *rest), (None, self.axis, *rest)
        every = self.leave(tensor[None, None], cut, (len(self.groups), self.parts, *tensor.shape))
        return self.enter(self.shard(every, whole), whole).reshape(-1, *tensor.shape[1:])

    def places(self, tensor: Tensor) -> list[tuple[int, Any]]:
        return torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]

    def parts_of(self, tensor: Tensor) -> list[Tensor]:
        return [data for data, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]

    def load_parts(self, tensor: Tensor, parts: list[Tensor], device_index: Tensor) -> None:
        """Fills a tensor that is cut over the devices with the parts of this host's; `device_index` is cut likewise."""
        devices = [device for _, device in torch_xla._XLAC._get_local_shards([device_index])[0]]
        torch_xla._XLAC._load_local_shards(tensor, parts, devices)
