"""The devices of an XLA mesh that share embedding tables; devices.py says what each method does.

Inside a region only the collectives below are right (xm.all_reduce silently is not).
train/common/xla/regions.py has others, with gradients, for a user's own layers. It copies what
enters and leaves a region. A table must not be copied, so the two share no code.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

from train.common import device
from train.common.embedding.devices import LocalPart, Spec, TableDevices
from train.common.mesh import Mesh

_XLAC = torch_xla._XLAC
MANUAL = _XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)


class XlaDevices(TableDevices):
    """The XLA devices of a mesh as groups that share the tables.

    Attributes:
        spmd: torch_xla's mesh for tables: "model" over all devices, or "data" x "model" where there
            are several copies.
    """

    def __init__(self, mesh: Mesh, group_size: int):
        super().__init__(mesh, group_size)
        ids = np.arange(mesh.num_devices)
        if self.copies_axis is None:
            self.spmd = xs.Mesh(ids, (group_size,), ("model",))
        else:
            # The same devices in the same order as in the script's mesh. So a batch that the loader
            # has cut over all devices is cut over both axes.
            self.spmd = xs.Mesh(ids, (self.copies, group_size), ("data", "model"))
        self._op_shardings: dict[Spec, Any] = {}  # what torch_xla makes of each spec

    def annotate(self, tensor: Tensor, spec: Spec) -> None:
        device.annotate(tensor, self.spmd, spec)

    def annotate_replicated(self, tensor: Tensor) -> None:
        device.annotate(tensor, self.mesh.spmd, (None,) * tensor.dim())

    def shard(self, tensor: Tensor, spec: Spec) -> Tensor:
        copy = _copy_of(tensor)  # a tensor that has a sharding, such as a batch, refuses another
        self._mark(copy, spec)
        return copy

    def enter(self, tensor: Tensor, spec: Spec) -> Tensor:
        self._mark(tensor, spec)
        return _XLAC._spmd_full_to_shard_shape(tensor)

    def leave(self, tensor: Tensor, spec: Spec, shape: Sequence[int]) -> Tensor:
        _XLAC._mark_manual_sharding(tensor, MANUAL)
        sharding = self._op_sharding(spec)
        return _XLAC._spmd_shard_to_full_shape(tensor, sharding, tuple(shape), tensor.dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        # All groups, whose examples differ: the other collectives are those of each group.
        all_devices = list(range(self.mesh.num_devices))
        return _XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, tensor, 1.0, [all_devices])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        # Outside of the region the tensor is [copies, senders, receivers, …]. It leaves cut by
        # senders, the partitioner cuts it by receivers instead, and so it enters again.
        rest = (None,) * (tensor.dim() - 1)
        by_sender = (self.copies_axis, self.axis, None, *rest)
        by_receiver = (self.copies_axis, None, self.axis, *rest)
        shape = (self.copies, self.group_size, *tensor.shape)
        whole = self.leave(tensor[None, None], by_sender, shape)
        received = self.enter(self.shard(whole, by_receiver), by_receiver)
        return received.reshape(tensor.shape)

    def gather_copies(self, tensor: Tensor) -> Tensor:
        if self.copies_axis is None:
            return tensor

        # Outside of the region the tensor is [copies, devices of a group, n, …]. It enters again
        # without being cut by copies.
        rest = (None,) * tensor.dim()
        by_copy = (self.copies_axis, self.axis, *rest)
        on_every_copy = (None, self.axis, *rest)
        shape = (self.copies, self.group_size, *tensor.shape)
        whole = self.leave(tensor[None, None], by_copy, shape)
        gathered = self.enter(self.shard(whole, on_every_copy), on_every_copy)
        return gathered.reshape(-1, *tensor.shape[1:])

    def local_parts(self, tensor: Tensor, spec: Spec) -> list[LocalPart]:
        parts = []  # by the tensor's own sharding, which is `spec`
        for replica, slices in _XLAC._get_local_shard_replica_and_indices([tensor])[0]:
            index = 0
            if slices is not Ellipsis:  # which stands for the whole
                rows = slices[0]
                index = rows.start // (rows.stop - rows.start)
            parts.append(LocalPart(copy=replica, index=index))
        return parts

    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        return [data for data, _ in _XLAC._get_local_shards([tensor])[0]]

    def load_parts(self, tensor: Tensor, parts: list[Tensor], indices: Tensor) -> None:
        # `_get_local_shards` also copies the shards to the host: here one number each, not a table.
        device_names = [name for _, name in _XLAC._get_local_shards([indices])[0]]
        _XLAC._load_local_shards(tensor, parts, device_names)

    def _op_sharding(self, spec: Spec) -> Any:
        if spec not in self._op_shardings:
            self._op_shardings[spec] = self.spmd.get_op_sharding(spec)
        return self._op_shardings[spec]

    def _mark(self, tensor: Tensor, spec: Spec) -> None:
        """Does what xs.mark_sharding does, but without its search for two packages, which takes a
        third of the time to trace a step."""
        _XLAC._xla_mark_sharding(tensor, self._op_sharding(spec))


def _copy_of(tensor: Tensor) -> Tensor:
    """Returns a new tensor with the same values, as the result of a computation."""
    if tensor.is_floating_point():
        return tensor * 1
    return tensor + 0
