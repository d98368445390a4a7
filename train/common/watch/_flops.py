"""Counts the flops of the programs that compiled steps start, for the MFU of goodput.py, by tpu/compiler."""

import contextlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from train.common.mesh import Mesh

# tpu/libtpu's name of a generation, where it is not the device's own.
GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


class Flops(contextlib.AbstractContextManager):
    """Counts, while `counts` is True, in the programs that start inside of it.

    A program's flops are those of its matmuls and convolutions, two per multiply-add, for all devices together, before
    the compiler changes it: model flops, and what --remat computes again. `done` becomes None where they are not known:
    on plain PyTorch, in a copy without tpu/, for a loop over steps (--steps-a-call) and without strict steps.
    """

    def __init__(self, mesh: Mesh):
        known = mesh.compiles and mesh.strict and importlib.util.find_spec("tpu")
        self.done: int | None = 0 if known else None
        self.counts = False
        self._devices = mesh.num_devices
        self._programs: dict[bytes, int | None] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "Flops":
        if self.done is not None:
            from train.common.xla import replay

            self._patch(replay._XLAC, "_get_graph_hash", self._hashed)
            self._patch(replay.Program, "start", self._started)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    def _patch(self, owner: Any, name: str, wrap: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, wrap(original, owner))
        self._patches.callback(setattr, owner, name, original)

    def _hashed(self, original: Any, xla: Any) -> Any:
        def get_graph_hash(tensors: Any) -> bytes:
            graph = original(tensors)
            if graph not in self._programs:
                self._programs[graph] = None
                with contextlib.suppress(Exception):  # a figure that cannot be had must not end a run
                    self._programs[graph] = count(xla._get_xla_tensors_hlo_proto(tensors), self._devices)
            return graph

        return get_graph_hash

    def _started(self, original: Any, _: Any) -> Any:
        def start(program: Any, *args: Any) -> Any:
            if self.counts and self.done is not None:
                flops = self._programs.get(program.graph)
                self.done = None if flops is None else self.done + flops
            return original(program, *args)

        return start


def count(module: bytes, devices: int) -> int | None:
    """Returns the flops of a serialized HloModuleProto on all devices together, or None where a product is in a loop of
    unknown length, or too involved to count."""
    from tpu.compiler import analysis, hlo

    parsed = hlo.parse(module)

    def multiplies(names: Iterable[str]) -> bool:
        inside = [each for name in names for each in parsed.computations[name].instructions]
        return any(each.opcode in ("dot", "convolution") or multiplies(each.called) for each in inside)

    every = [each for computation in parsed.computations.values() for each in computation.instructions]
    unknown = any(each.opcode == "while" and not each.trip_count and multiplies(each.called) for each in every)
    flops = analysis.product_flops(parsed, devices)
    return None if unknown or None in flops else sum(flops)


def peak(mesh: Mesh) -> float | None:
    """Returns the flops a second of all devices, in bfloat16, as Google documents them; None for a CPU."""
    if not mesh.kind.startswith("TPU"):
        return None
    from tpu.compiler.libtpu import GENERATIONS as known

    generation = known.get(GENERATIONS.get(mesh.kind, mesh.kind.removeprefix("TPU ")))
    return generation and generation.peak_flops * mesh.num_devices
