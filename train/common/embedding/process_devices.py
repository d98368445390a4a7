"""Several processes, each with one device of plain PyTorch, that share embedding tables; devices.py
says what each method does.

A tensor is always what this process has of it: its rows of a batch, its part of a table. So to
enter and to leave a region changes nothing. The processes are those of processes.py; gloo's
collectives move tensors between CPUs, NCCL's between GPUs.

Every process calls them in the same order, with the same shapes. Each then has the same bits of a
sum, and so of every table that it holds a copy of: both libraries add each part of a tensor up in
one process, and send the sum to the others.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from train.common import processes
from train.common.embedding.devices import LocalPart, OneDevice, Spec
from train.common.mesh import Mesh


class ProcessDevices(OneDevice):
    """The devices of all processes as groups that share the tables.

    Attributes:
        copy: which copy of the tables this process shares.
        index: of this process in its group.
        group: torch.distributed's group of the processes that share this copy.
        copies_group: that of the processes which hold copies of the same rows; only where there are
            several.
    """

    def __init__(self, mesh: Mesh, group_size: int):
        super().__init__(mesh, group_size)
        # Process p is the p % group_size-th of its group, as the devices of XlaDevices are.
        self.copy, self.index = divmod(mesh.process_index, group_size)
        if self.copies == 1:
            self.group = dist.group.WORLD
        else:
            shape = (self.copies, group_size)
            grid = init_device_mesh(mesh.device.type, shape, mesh_dim_names=("data", "model"))
            self.group = grid.get_group("model")
            self.copies_group = grid.get_group("data")

    # ---- what a process has outside of a region

    def local_rows(self, rows: int, spec: Spec) -> range:
        if spec[0] is None:
            return range(rows)
        per_device = rows // self.group_size
        first = self.index * per_device
        return range(first, first + per_device)

    def count_of_batch(self, count: int) -> int:
        return count * self.mesh.num_devices  # the parts of a batch are equal

    def gradient_of_batch(self, gradient: Tensor) -> Tensor:
        # The mean over the batch is the mean of the processes' means.
        return gradient / self.mesh.num_devices

    # ---- collectives

    def shard(self, tensor: Tensor, spec: Spec) -> Tensor:
        if spec[0] is None:
            return processes.gather_rows(tensor)
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        with processes.meeting():
            dist.all_reduce(total)
        return total

    def all_to_all(self, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        with processes.meeting():
            dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received

    def gather_copies(self, tensor: Tensor) -> Tensor:
        if self.copies == 1:
            return tensor
        gathered = tensor.new_empty(self.copies * tensor.shape[0], *tensor.shape[1:])
        with processes.meeting():
            dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.copies_group)
        return gathered

    # ---- checkpoints

    def local_parts(self, tensor: Tensor, spec: Spec) -> list[LocalPart]:
        if spec[0] is None:  # every process has a copy of it
            return [LocalPart(copy=self.mesh.process_index, index=0)]
        return [LocalPart(self.copy, self.index)]
