"""Counts the flops of the programs that compiled steps start, for the MFU of goodput.py."""

import contextlib
from collections.abc import Callable, Iterable

import optional
from train.common.mesh import Mesh

# tpu/libtpu's name of a generation, where it is not the device's own.
GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


class Flops:
    """Counts the flops of the programs that start.

    A program's flops are those of its matmuls and convolutions, two per multiply-add, for all
    devices together, before the compiler changes it: model flops, and what --remat computes again.
    Plain PyTorch and steps that are not strict start no programs. `done` becomes None where the
    flops are not known: in a copy without tpu/, and for a loop over steps (--steps-a-call).
    """

    def __init__(self, mesh: Mesh):
        self.done: int | None = 0 if optional.is_here("compiler") else None
        self._devices = mesh.num_devices
        self._programs: dict[bytes, int | None] = {}

    def traced(self, graph: bytes, module: Callable[[], bytes]) -> None:
        """Counts the flops of a program that is new; see hooks.Watcher."""
        if self.done is None or graph in self._programs:
            return
        self._programs[graph] = None
        with contextlib.suppress(Exception):  # a figure that cannot be had must not end a run
            self._programs[graph] = count(module(), self._devices)

    def started(self, graph: bytes) -> None:
        """Adds the flops of a program."""
        if self.done is None:
            return
        flops = self._programs.get(graph)
        self.done = None if flops is None else self.done + flops


def count(module: bytes, devices: int) -> int | None:
    """Returns the flops of a serialized HloModuleProto on all devices together, or None where a
    product is in a loop of unknown length, or too involved to count."""
    from tpu.compiler import analysis, hlo

    parsed = hlo.parse(module)

    def has_products(computations: Iterable[str]) -> bool:
        for name in computations:
            for instruction in parsed.computations[name].instructions:
                if instruction.opcode in ("dot", "convolution"):
                    return True
                if has_products(instruction.called):
                    return True
        return False

    for computation in parsed.computations.values():
        for instruction in computation.instructions:
            endless = instruction.opcode == "while" and not instruction.trip_count
            if endless and has_products(instruction.called):
                return None
    flops = analysis.product_flops(parsed, devices)
    return None if None in flops else sum(flops)


def peak(mesh: Mesh) -> float | None:
    """Returns the flops per second of all devices, in bfloat16, as Google documents them; None for
    a CPU."""
    if not mesh.kind.startswith("TPU"):
        return None
    from tpu.compiler.libtpu import GENERATIONS as known

    generation = known.get(GENERATIONS.get(mesh.kind, mesh.kind.removeprefix("TPU ")))
    return generation and generation.peak_flops * mesh.num_devices
