"""The devices that share embedding tables, and what regions.py asks of them; here those of one device.

A region is code in which a tensor is the part that each device holds. On one device a part is the whole, so nothing
below moves data; sharding.py has the same for the devices of an XLA mesh.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from errors import InputError
from train.common.device import annotate
from train.common.mesh import Mesh


class OneDevice:
    """The devices of a mesh as groups that share the tables: each group has a copy, its devices hold parts of it.

    Attributes:
        mesh: the mesh of the script.
        spmd: torch_xla's mesh, "model" over all devices, or "data" x "model"; None where there is none.
        parts: devices of a group.
        groups: numbers of the devices of each group.
        axis: the axis over which tables are cut.
        batch_axes: the axes over which a batch is cut.
        copies_axis: the axis over which tables are copied; None when all devices share one copy.
    """

    def __init__(self, mesh: Mesh, parts: int):
        if parts < 1 or mesh.num_devices % parts:
            raise InputError(f"model_devices is {parts}; it must divide the {mesh.num_devices} devices, 0 takes all")
        self.mesh, self.parts, self.axis, self.spmd = mesh, parts, "model", mesh.spmd
        shared = parts == mesh.num_devices
        self.batch_axes, self.copies_axis = ("model", None) if shared else (("data", "model"), "data")
        self.groups = np.arange(mesh.num_devices).reshape(-1, parts).tolist()

    def replicated(self, tensor: Tensor) -> Tensor:
        """Copies a host's tensor to every device."""
        tensor = tensor.to(self.mesh.device)
        self.annotate_replicated(tensor)
        return tensor

    def annotate_replicated(self, tensor: Tensor) -> None:
        """Marks a tensor on the device as one that every device has whole."""
        annotate(tensor, self.mesh.spmd, (None,) * tensor.dim())

    def by_device(self, tensor: Tensor) -> Tensor:
        """Reshards [devices, batch, ...] from the batch to the devices (all-to-all) and the copies' batches."""
        rest = (None,) * (tensor.dim() - 2)
        tensor = self.shard(tensor, (None, self.batch_axes, *rest))
        return self.shard(tensor, (self.axis, self.copies_axis, *rest))

    def shard(self, tensor: Tensor, spec: tuple) -> Tensor:
        """Reshards a tensor outside of a region: an all-gather, an all-to-all or a local slice."""
        return tensor

    def enter(self, tensor: Tensor, spec: tuple) -> Tensor:
        """Starts a region: returns the part of a sharded tensor that each device has."""
        return tensor

    def leave(self, tensor: Tensor, spec: tuple, shape: Sequence[int]) -> Tensor:
        """Ends a region: returns the tensor of `shape` that the devices' parts make up."""
        return tensor

    def all_reduce(self, tensor: Tensor, groups: list[list[int]]) -> Tensor:
        """Adds up the devices' parts within each group."""
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Adds up the parts over the model axis and cuts the sum along dimension 0."""
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends part i of [parts, ...] to device i of the group, and returns what its devices have sent."""
        return tensor

    def gather_copies(self, tensor: Tensor) -> Tensor:
        """Puts the parts [n, ...] of the devices that hold copies of the same rows behind each other."""
        return tensor

    def places(self, tensor: Tensor) -> list[tuple[int, Any]]:
        """Returns for each device of this host the number of its copy and the slices of the tensor that it holds, or
        Ellipsis for the whole."""
        return [(0, Ellipsis)]

    def parts_of(self, tensor: Tensor) -> list[Tensor]:
        """Copies what each device of this host holds of a tensor to the host."""
        return [tensor.detach().to("cpu", copy=True)]
