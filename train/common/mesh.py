"""What a run's devices are, and what a user may ask of them.

Everything in train/common may import this file. It imports nothing of the project.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import tyro

DEVICES = ("xla", "cpu", "cuda", "tpu")  # tpu: TorchTPU, which has never been run here
# fast_float32: float32, with matrix products in the hardware's own precision (TF32, bfloat16).
PRECISIONS = ("bfloat16", "float32", "fast_float32")

# What is split over the axis "data": nothing; the optimizer's state and the gradients (between
# processes of plain PyTorch the state only); or also the weights (FSDP).
ShardState = Literal["none", "optimizer", "full"]


class GraphError(RuntimeError):
    """A compiled step broke its contract: it recompiled after warm-up, or left the device in the
    middle."""


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)  # --mesh, not --layout.mesh
@dataclass(frozen=True)
class Layout:
    """Flags that change memory and speed, but no number beyond rounding: a resumed run may have
    others."""

    mesh: str = ""  # devices by axis, such as data=4,model=2: model cuts layers; "": no model axis
    shard_state: ShardState = "none"  # data splits the optimizer's state; full: the weights, too
    remat: bool = False  # keeps only each layer's input; the backward pass computes the rest again


WHOLE = Layout()  # on every device


def processes_of_machine() -> int:
    """Returns how many processes of the run share this machine: those that torchrun has started on
    it, else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


@dataclass(frozen=True)
class Mesh:
    """All devices of the run, and this host's place among them."""

    device: torch.device  # holds every tensor; on XLA a virtual one, for all devices
    # torch_xla's mesh (of its SPMD mode), with the axis "data" or those of a Layout; None in plain
    # PyTorch.
    spmd: Any
    num_devices: int  # of all hosts
    # A host is a process: of a pod, one of each machine; in plain PyTorch, one of each device.
    process_index: int  # of this host
    process_count: int  # hosts
    kind: str  # hardware, such as "TPU v5 lite" or "CPU"
    precision: str  # what `autocast` computes in, one of PRECISIONS
    strict: bool  # a recompilation after warm-up or a host fall-back is an error, not a warning
    # Numbers of this host's devices, in the order in which torch_xla uploads to them. (): every
    # host has the same number of devices, and they are numbered host by host.
    local_devices: tuple[int, ...] = ()
    # Whether steps avoid the operations that libtpu compiles only with flags, see docs/tpu.md.
    safe_forms: bool = False
    # How many slices the devices make up, which are joined by the data-centre network only. Devices
    # are numbered slice by slice.
    slices: int = 1
    # How a model's layers are split over the devices: a LayerSharding of train/common/sharding.
    # None: a run without a Layout, where every device has the whole model.
    layers: Any = None

    @property
    def main_process(self) -> bool:
        """True on the one host that prints and writes."""
        return self.process_index == 0

    @property
    def devices_per_slice(self) -> int:
        """Devices that reach each other without the data-centre network."""
        return self.num_devices // self.slices

    @property
    def compiles(self) -> bool:
        """True on XLA, where a step is one compiled program; False in plain PyTorch, which runs one
        operation after the other."""
        return self.spmd is not None

    @property
    def parts(self) -> int:
        """How many processes compute a loss each, of their own rows of a batch. 1 on XLA, on pods
        too, where the tensors of a step are those of the whole batch."""
        return 1 if self.compiles else self.process_count

    @property
    def shapes_may_vary(self) -> bool:
        """True where a batch of another shape costs nothing. Where steps are compiled, each shape
        is a program of its own; and TorchTPU compiles each operation for each shape."""
        return not self.compiles and self.device.type != "tpu"

    def rows(self, batch_size: int) -> np.ndarray:
        """Returns the rows of a batch that this host loads, in the order in which it uploads them.

        torch_xla gives the i-th of equal parts to the i-th of the host's devices. On a 4x4 slice
        devices are numbered row by row, and a host has a square, such as 0, 1, 4 and 5.
        """
        devices = list(self.local_devices)
        if not devices:
            per_host = self.num_devices // self.process_count
            first = self.process_index * per_host
            devices = list(range(first, first + per_host))
        rows_by_device = np.arange(batch_size).reshape(self.num_devices, -1)
        return rows_by_device[devices].ravel()

    def autocast(self) -> torch.autocast:
        """Returns a context for the forward pass. Parameters, gradients and optimizer state stay
        float32."""
        # Not torch_xla 2.9's, which crashes on the CPU backend. "xla" also for the meta tensors of
        # tpu/compiler/staging.py.
        kind = "xla" if self.compiles else self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")
