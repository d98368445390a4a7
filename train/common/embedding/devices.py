"""The devices that share embedding tables, and what the plans ask of them.

    TableDevices   what is asked
    OneDevice      one device of plain PyTorch: a part is the whole, so nothing moves
    XlaDevices     the devices of an XLA mesh (xla_devices.py)

A region is code in which a tensor is the part that each device holds: `enter` begins one, `leave`
ends it. The collectives below are for tensors in a region; `shard` is for those outside.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.common.mesh import Mesh

# The axis, or axes, that cut each dimension of a tensor; None: none.
Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class LocalPart:
    """Which part of a tensor a device of this host holds.

    Attributes:
        copy: the number of the copy that it belongs to; copy 0 is the one that is saved.
        number: which of the equal parts it is, along dimension 0; 0 of a tensor that is not cut.
    """

    copy: int
    number: int


class TableDevices(abc.ABC):
    """The devices of a mesh as groups that share the tables: each group has a copy, its devices
    hold parts of it.

    Attributes:
        mesh: the mesh of the script.
        parts: devices of a group.
        copies: groups.
        axis: the axis of the mesh over which tables are cut.
        batch_axes: the axes over which a batch is cut.
        copies_axis: the axis over which tables are copied; None where all devices share one copy.
    """

    axis = "model"

    def __init__(self, mesh: Mesh, parts: int):
        self.mesh = mesh
        self.parts = parts
        self.copies = mesh.num_devices // parts
        if self.copies == 1:
            self.batch_axes = "model"
            self.copies_axis = None
        else:
            self.batch_axes = ("data", "model")
            self.copies_axis = "data"

    # ---- whole tensors

    def replicated(self, tensor: Tensor) -> Tensor:
        """Copies a host's tensor to every device."""
        tensor = tensor.to(self.mesh.device)
        self.annotate_replicated(tensor)
        return tensor

    def device_numbers(self) -> Tensor:
        """Returns a tensor [parts] of which each device of a group holds its own number."""
        numbers = torch.arange(self.parts, dtype=torch.int32).to(self.mesh.device)
        self.annotate(numbers, (self.axis,))
        return numbers

    @abc.abstractmethod
    def annotate(self, tensor: Tensor, spec: Spec) -> None:
        """Annotates a tensor on the device as cut by `spec`."""

    @abc.abstractmethod
    def annotate_replicated(self, tensor: Tensor) -> None:
        """Annotates a tensor on the device as one that every device holds whole."""

    @abc.abstractmethod
    def shard(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Reshards a tensor outside of a region: an all-gather, an all-to-all or a local slice."""

    # ---- regions

    @abc.abstractmethod
    def enter(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Begins a region: returns the part of a sharded tensor that each device has."""

    @abc.abstractmethod
    def leave(self, tensor: Tensor, spec: Spec, shape: Sequence[int]) -> Tensor:
        """Ends a region: returns the tensor of `shape` that the devices' parts make up."""

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Adds up the parts of all devices."""

    @abc.abstractmethod
    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends part i of [parts, ...] to device i of the group; returns what its devices have
        sent, in their order."""

    @abc.abstractmethod
    def gather_copies(self, tensor: Tensor) -> Tensor:
        """Puts the parts [n, ...] of the devices that hold copies of the same rows behind each
        other."""

    # ---- checkpoints

    @abc.abstractmethod
    def local_parts(self, tensor: Tensor) -> list[LocalPart]:
        """Returns which part of a tensor each device of this host holds."""

    @abc.abstractmethod
    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        """Copies what each device of this host holds of a tensor to the host, in the order of
        `local_parts`."""

    @abc.abstractmethod
    def load_parts(self, tensor: Tensor, parts: list[Tensor], numbers: Tensor) -> None:
        """Fills a tensor that is cut over the devices with the parts of this host's; `numbers` is
        of `device_numbers`, and tells which devices these are."""


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

    def local_parts(self, tensor: Tensor) -> list[LocalPart]:
        return [LocalPart(copy=0, number=0)]

    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=True)]

    def load_parts(self, tensor: Tensor, parts: list[Tensor], numbers: Tensor) -> None:
        tensor.copy_(parts[0])
