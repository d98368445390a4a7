"""Compiles each function of train/common/sharding/groups.py and its gradient for eight chips.

Prints as JSON, by function, the (kind, bytes, devices of a group) of each collective of its
program. It runs in a process of its own, for tests/test_compile.py: the tests' process has devices
already.
"""

import json
from collections.abc import Callable

import torch

from tpu.compiler import analysis, hlo, libtpu, staging
from train.common.sharding import groups

DEVICES = 8
SHAPE = (DEVICES * 1024, 256)  # of the input, over all devices
NAMES = ("group_sum", "group_mean", "all_gather", "reduce_scatter", "all_to_all")


def step_of(name: str, mesh: groups.Axes) -> Callable:
    """Returns a step that applies a function over the axis "data" and takes its gradient."""
    spec = (("data", "model"), None)

    def squared(x):
        return getattr(groups, name)(x * x, mesh, "data")

    def step(batch):
        x = batch["x"].detach().requires_grad_()
        y = groups.per_device(squared, mesh, [spec], spec)(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)

    return step


def main() -> None:
    devices = staging.setup(DEVICES, "TPU v5 lite", "float32")
    mesh = groups.axes(devices, data=4, model=2)
    found = {}
    for name in NAMES:
        inputs = staging.inputs({"x": (SHAPE, torch.float32)}, devices)
        staged = staging.stage(step_of(name, mesh), inputs)
        shardings = {}
        for number, sharding in staged.shardings.items():
            shardings[number] = hlo.op_sharding(*sharding)
        module = hlo.with_parameter_shardings(staged.module, shardings)

        with (
            libtpu.Topology("v5e:2x4") as topology,
            topology.compile(module, "fast") as program,
        ):
            collectives = analysis.collectives(hlo.parse(program.optimized))
        found[name] = [[one.kind, one.bytes * one.times, one.group_size] for one in collectives]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
