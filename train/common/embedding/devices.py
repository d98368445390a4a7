"""The devices that share embedding tables, and what the plans ask of them.

    TableDevices     the interface
    OneDevice        one device of plain PyTorch: a part is the whole, so nothing moves
    ProcessDevices   one device in each of several processes (process_devices.py)
    XlaDevices       the devices of an XLA mesh (xla_devices.py)

bags.py chooses between the two.

The devices form groups. Each group has a copy of the tables, and each of its devices holds one part
of every tensor that is cut: a shard, along dimension 0.

A region is code in which a tensor is the part that each device holds: torch_xla's manual sharding,
JAX's shard_map. `enter` begins one, `leave` ends it. The collectives below are for tensors in a
region; `shard` is for those outside.

Outside of a region a tensor is whole on one device and on an XLA mesh. With several processes it is
the local part there, too: a process has its rows of a batch, and its part of a table. What must
know the difference asks `local_rows`, `count_of_batch` and `gradient_of_batch`.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.common.mesh import Mesh

# For each dimension of a tensor the axis or axes that cut it, or None.
Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class LocalPart:
    """Which part of a tensor a device of this host holds.

    Attributes:
        copy: index of the copy that it belongs to; copy 0 is the one that is saved.
        index: which of the equal parts it is, along dimension 0; 0 of a tensor that is not cut.
    """

    copy: int
    index: int


class TableDevices(abc.ABC):
    """The devices of a mesh as groups, each of which shares a copy of the tables.

    The axes here are those of the tables' own mesh. They have nothing to do with a script's --mesh,
    whose "data" is the axis that cuts a state (sharding/layout.py).

    Attributes:
        mesh: the mesh of the script.
        group_size: devices of a group, and so parts of a tensor that is cut.
        copies: groups.
        axis: the axis over which tables are cut: along it are the devices of a group.
        batch_axes: the axes over which a batch is cut: all.
        copies_axis: the axis along which each device has another copy of the same part; None where
            all devices share one copy.
    """

    axis = "model"

    def __init__(self, mesh: Mesh, group_size: int):
        self.mesh = mesh
        self.group_size = group_size
        self.copies = mesh.num_devices // group_size
        if self.copies == 1:
            self.batch_axes = "model"
            self.copies_axis = None
        else:
            self.batch_axes = ("data", "model")
            self.copies_axis = "data"

    # ---- what a process has outside of a region

    def local_rows(self, rows: int, spec: Spec) -> range:
        """Returns which rows of a tensor this process has, of so many over the devices of a
        group."""
        return range(rows)

    def count_of_batch(self, count: int) -> int:
        """Returns a count over the whole batch, given that over the rows that this process has."""
        return count

    def gradient_of_batch(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the mean loss of the whole batch, given that of the mean loss of
        the rows that this process has."""
        return gradient

    # ---- outside of a region

    def replicated(self, tensor: Tensor) -> Tensor:
        """Copies a host's tensor to every device."""
        tensor = tensor.to(self.mesh.device)
        self.annotate_replicated(tensor)
        return tensor

    def device_indices(self) -> Tensor:
        """Returns a tensor [group_size] of which each device of a group holds its own index."""
        local = self.local_rows(self.group_size, (self.axis,))
        indices = torch.arange(local.start, local.stop, dtype=torch.int32).to(self.mesh.device)
        self.annotate(indices, (self.axis,))
        return indices

    @abc.abstractmethod
    def annotate(self, tensor: Tensor, spec: Spec) -> None:
        """Annotates a tensor on the device as cut by `spec`."""

    @abc.abstractmethod
    def annotate_replicated(self, tensor: Tensor) -> None:
        """Annotates a tensor on the device as one that every device holds whole."""

    @abc.abstractmethod
    def shard(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Returns a tensor outside of a region as cut by `spec`.

        Args:
            tensor: has rows for each device, as a batch: dimension 0 is cut over `batch_axes`.
            spec: has `batch_axes` for dimension 0, or None: then it is gathered.
        """

    # ---- regions

    @abc.abstractmethod
    def enter(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Begins a region: returns the part of a sharded tensor that each device has."""

    @abc.abstractmethod
    def leave(self, tensor: Tensor, spec: Spec, shape: Sequence[int]) -> Tensor:
        """Ends a region: returns the whole tensor of `shape` that the devices' parts make up."""

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the parts of all devices, on each of them."""

    @abc.abstractmethod
    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends tensor[i] of [group_size, …] to device i of the group.

        Returns what the group's devices have sent to this one, in their order: [group_size, …].
        """

    @abc.abstractmethod
    def gather_copies(self, tensor: Tensor) -> Tensor:
        """Concatenates the tensors [n, …] of the devices that hold copies of the same rows."""

    # ---- checkpoints

    @abc.abstractmethod
    def local_parts(self, tensor: Tensor, spec: Spec) -> list[LocalPart]:
        """Returns which part of a tensor each device of this host holds, device by device.

        Args:
            spec: how the tensor is cut.
        """

    @abc.abstractmethod
    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        """Copies the parts of this host's devices to the host, in the order of `local_parts`."""

    @abc.abstractmethod
    def load_parts(self, tensor: Tensor, parts: list[Tensor], indices: Tensor) -> None:
        """Fills a tensor that is cut over the devices.

        Args:
            parts: those of this host's devices, in the order of `local_parts`.
            indices: a tensor of `device_indices`, whose parts lie on the devices that `parts` are
                for.
        """


class OneDevice(TableDevices):
    """One device of plain PyTorch."""

    def annotate(self, tensor: Tensor, spec: Spec) -> None:
        pass

    def annotate_replicated(self, tensor: Tensor) -> None:
        pass

    def shard(self, tensor: Tensor, spec: Spec) -> Tensor:
        return tensor

    def enter(self, tensor: Tensor, spec: Spec) -> Tensor:
        return tensor

    def leave(self, tensor: Tensor, spec: Spec, shape: Sequence[int]) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_copies(self, tensor: Tensor) -> Tensor:
        return tensor

    def local_parts(self, tensor: Tensor, spec: Spec) -> list[LocalPart]:
        return [LocalPart(copy=0, index=0)]

    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=True)]

    def load_parts(self, tensor: Tensor, parts: list[Tensor], indices: Tensor) -> None:
        tensor.copy_(parts[0])
