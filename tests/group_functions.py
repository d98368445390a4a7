"""The functions of train/common/sharding/groups.py beside NumPy's, on so many devices.

    python tests/group_functions.py 8

`parts` is what the devices of a group hold: [devices, rows, columns].
"""

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from train.common import device
from train.common.mesh import Mesh
from train.common.sharding import groups

SIZES = {  # of the axes of a mesh, by the number of its devices
    1: {"data": 1},
    2: {"data": 2},
    4: {"data": 2, "model": 2},
    8: {"data": 2, "x": 2, "y": 2},
    16: {"data": 16},
}


def summed(parts):
    return np.broadcast_to(parts.sum(0), parts.shape)


def averaged(parts):
    return summed(parts) / len(parts)


def gathered(parts):
    devices, rows, columns = parts.shape
    return np.broadcast_to(np.concatenate(parts), (devices, devices * rows, columns))


def scattered(parts):
    devices, _, columns = parts.shape
    return parts.sum(0).reshape(devices, -1, columns)


def exchanged(parts):
    devices, _, columns = parts.shape
    blocks = parts.reshape(devices, devices, -1, columns)
    return blocks.swapaxes(0, 1).reshape(parts.shape)


@dataclass(frozen=True)
class Expected:
    """What NumPy makes of the parts of a group."""

    forward: Callable
    backward: Callable  # of the gradients of the result


EXPECTED = {
    "group_sum": Expected(summed, backward=summed),
    "group_mean": Expected(averaged, backward=averaged),
    "all_gather": Expected(gathered, backward=scattered),
    "reduce_scatter": Expected(scattered, backward=gathered),
    "all_to_all": Expected(exchanged, backward=exchanged),
}


def of_groups(function: Callable, parts: np.ndarray, sizes: dict[str, int], axis: str):
    """Applies a function of EXPECTED to each group along an axis.

    Args:
        parts: of all devices, [devices, rows, columns].

    Returns:
        the rows of all results in the order of the devices.
    """
    position = list(sizes).index(axis)
    last = len(sizes) - 1
    by_axes = parts.reshape(*sizes.values(), *parts.shape[1:])
    by_axes = np.moveaxis(by_axes, position, last)

    results = []
    for group in by_axes.reshape(-1, sizes[axis], *parts.shape[1:]):
        results.append(function(group))

    found = np.stack(results)
    found = found.reshape(*by_axes.shape[: len(sizes)], *found.shape[2:])
    return np.moveaxis(found, last, position).reshape(-1, parts.shape[2])


@dataclass(frozen=True)
class Case:
    """A function over an axis: what it is given, and what it is to return."""

    x: np.ndarray
    gradient: np.ndarray  # of the result
    result: np.ndarray
    x_gradient: np.ndarray


def make_case(expected: Expected, sizes: dict[str, int], axis: str, devices: int, rng) -> Case:
    """Draws integers, whose sums are exact."""
    x = rng.integers(-9, 9, (devices, 2 * sizes[axis], 3)).astype(np.float32)
    result = of_groups(expected.forward, x, sizes, axis)
    gradient = rng.integers(-9, 9, result.shape).astype(np.float32)
    by_device = gradient.reshape(devices, -1, 3)
    x_gradient = of_groups(expected.backward, by_device, sizes, axis)
    return Case(x.reshape(-1, 3), gradient, result, x_gradient)


def compare(mesh: Mesh, sizes: dict[str, int]) -> None:
    """Asserts that every function and its gradient, all in one program, are NumPy's to the bit."""
    named = groups.axes(mesh, **sizes)
    rng = np.random.default_rng(0)
    spec = (tuple(sizes), None)

    cases = {}
    inputs = {}
    for name, axis in itertools.product(EXPECTED, sizes):
        case = make_case(EXPECTED[name], sizes, axis, mesh.num_devices, rng)
        cases[name, axis] = case
        inputs[name, axis] = [
            device.upload(torch.from_numpy(each), mesh) for each in (case.x, case.gradient)
        ]

    def step(inputs):
        found = {}
        for (name, axis), (x, gradient) in inputs.items():
            function = functools.partial(getattr(groups, name), mesh=named, axis=axis)
            x = x.detach().requires_grad_()
            y = groups.per_device(function, named, [spec], spec)(x)
            found[name, axis] = y.detach(), *torch.autograd.grad(y, x, gradient)
        return found

    found = device.compiled(step, mesh)(inputs)

    for key, case in cases.items():
        result, x_gradient = found[key]
        np.testing.assert_array_equal(result.cpu().numpy(), case.result, str(key))
        np.testing.assert_array_equal(x_gradient.cpu().numpy(), case.x_gradient, str(key))


def main() -> None:
    devices = int(sys.argv[1])  # as CPU_NUM_DEVICES says
    compare(device.setup(0, "float32"), SIZES[devices])


if __name__ == "__main__":
    main()
