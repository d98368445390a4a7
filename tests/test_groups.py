"""train/common/sharding/groups.py beside NumPy, on 1 to 16 devices; the examples of docs/groups.md."""

import functools
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import environment

from errors import InputError
from models import layers, resnet
from train.common import device
from train.common.mesh import Layout
from train.common.sharding import arranged, groups

ROOT = Path(__file__).parent.parent
CPU = device.Mesh(torch.device("cpu"), None, 1, 0, 1, "CPU", "float32", True)
SIZES = {1: {"data": 1}, 2: {"data": 2}, 4: {"data": 2, "model": 2}, 8: {"data": 2, "x": 2, "y": 2}, 16: {"data": 16}}


def summed(parts):  # [devices of a group, rows, columns], as all below
    return np.broadcast_to(parts.sum(0), parts.shape)


def gathered(parts):
    return np.broadcast_to(np.concatenate(parts), (len(parts), parts.shape[0] * parts.shape[1], parts.shape[2]))


def scattered(parts):
    return parts.sum(0).reshape(len(parts), -1, parts.shape[2])


def exchanged(parts):
    return parts.reshape(len(parts), len(parts), -1, parts.shape[2]).swapaxes(0, 1).reshape(parts.shape)


# What NumPy makes of the parts of a group, and of the gradients of the result.
EXPECTED = {
    "group_sum": (summed, summed),
    "group_mean": (lambda parts: summed(parts) / len(parts), lambda parts: summed(parts) / len(parts)),
    "all_gather": (gathered, scattered),
    "reduce_scatter": (scattered, gathered),
    "all_to_all": (exchanged, exchanged),
}


def of_groups(function, parts, sizes, axis):
    """Applies a function of EXPECTED to each group along an axis of parts [devices, …]; returns its rows in order."""
    shaped = np.moveaxis(parts.reshape(*sizes.values(), *parts.shape[1:]), list(sizes).index(axis), len(sizes) - 1)
    found = np.stack([function(group) for group in shaped.reshape(-1, sizes[axis], *parts.shape[1:])])
    found = found.reshape(*shaped.shape[: len(sizes)], *found.shape[2:])
    return np.moveaxis(found, len(sizes) - 1, list(sizes).index(axis)).reshape(-1, parts.shape[2])


def compare(mesh, sizes: dict[str, int]) -> None:
    """Asserts that every function and its gradient, all in one program, are NumPy's: of integers, so to the bit."""
    named, rng, wanted, inputs = groups.axes(mesh, **sizes), np.random.default_rng(0), {}, {}
    spec = (tuple(sizes), None)
    for key in itertools.product(EXPECTED, sizes):
        (forward, backward), axis = EXPECTED[key[0]], key[1]
        x = rng.integers(-9, 9, (mesh.num_devices, 2 * sizes[axis], 3)).astype(np.float32)
        result = of_groups(forward, x, sizes, axis)
        gradient = rng.integers(-9, 9, result.shape).astype(np.float32)
        back = of_groups(backward, gradient.reshape(mesh.num_devices, -1, 3), sizes, axis)
        inputs[key] = [device.upload(torch.from_numpy(each.reshape(-1, 3)), mesh) for each in (x, gradient)]
        wanted[key] = result, back

    def step(inputs):
        found = {}
        for (name, axis), (x, gradient) in inputs.items():
            function = functools.partial(getattr(groups, name), mesh=named, axis=axis)
            x = x.detach().requires_grad_()
            y = groups.per_device(function, named, [spec], spec)(x)
            found[name, axis] = y.detach(), *torch.autograd.grad(y, x, gradient)
        return found

    found = device.compiled(step, mesh)(inputs)
    for key in wanted:
        for one, other in zip(found[key], wanted[key], strict=True):
            np.testing.assert_array_equal(one.cpu().numpy(), other, str(key))


def test_every_function_and_its_gradient_is_numpys(mesh):
    started = []
    for devices in SIZES.keys() - {mesh.num_devices}:
        code = f"import test_groups as t; t.compare(t.device.setup(0, 'float32'), t.SIZES[{devices}])"
        variables = environment(devices, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
        started.append(subprocess.Popen([sys.executable, "-c", code], env=variables, stderr=subprocess.PIPE, text=True))
    compare(mesh, SIZES[4])
    for process in started:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error


def test_a_whole_result_and_its_gradients_are_those_of_one_device(mesh):
    def norms(x, weight):
        return groups.group_sum((x @ weight).square().sum(0), named, "data")

    named, x = groups.axes(mesh), torch.arange(24.0).reshape(8, 3) / 24
    function = groups.per_device(norms, named, [("data", None), (None, None)], (None,))
    expected = results(lambda x, weight: (x @ weight).square().sum(0), x, torch.eye(3))
    torch.testing.assert_close(on_devices(mesh, function, x, torch.eye(3)), expected)


def test_plain_pytorch_is_one_device():
    named, x = groups.axes(CPU, data=1, model=1), torch.randn(4, 3)
    for name in EXPECTED:
        function = functools.partial(getattr(groups, name), mesh=named, axis="model")
        assert torch.equal(groups.per_device(function, named, [(None, None)], (None, None))(x), x)


def examples() -> dict:
    """Returns what the code of docs/groups.md defines."""
    names: dict = {}
    for block in re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / "docs/groups.md").read_text(), re.M):
        if "    def " in block:
            exec(textwrap.dedent(block), names)
    return names


def results(function, *inputs) -> list[torch.Tensor]:
    """Returns what a function gives, and the gradients of the sum of its squares, on the host."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x for x in inputs if x.requires_grad])]


def on_devices(mesh, function, *inputs) -> list[torch.Tensor]:
    """Returns `results` of a compiled step that has been repeated."""
    inputs = [x.to(mesh.device) for x in inputs]
    for x in inputs:
        device.replicate(x, mesh)
    step = device.compiled(lambda *inputs: results(function, *inputs), mesh)
    return [x.cpu() for x in [step(*inputs) for _ in range(3)][-1]]


def test_batch_norm_over_groups_of_chips_is_that_of_the_script(mesh):
    norm, named = examples()["batch_norm"], groups.axes(mesh, group=2, chip=2)
    inputs = torch.randn(8, 3, 4, 4) * 2 + 1, torch.randn(3), torch.randn(3)
    found = on_devices(mesh, lambda *inputs: norm(*inputs, named), *inputs)
    expected = results(lambda *inputs: resnet.batch_statistics_norm(*inputs, 1e-5, groups=2)[0], *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sampled_softmax_is_that_of_the_words_that_were_drawn(mesh):
    softmax = examples()["sampled_softmax"]
    hidden, weight, labels = torch.randn(8, 5), torch.randn(12, 5), torch.randint(12, (8,))
    drawn = torch.tensor([0, 2, 1, 0, 2, 0, 0, 1])  # two of each device's three words
    words = drawn + torch.tensor([0, 0, 3, 3, 6, 6, 9, 9])
    labels[:2] = words[1]  # right and drawn

    def whole(hidden, labels, weight, words):
        right = (hidden * weight[labels]).sum(1, keepdim=True)
        wrong = torch.where(words == labels[:, None], -torch.inf, hidden @ weight[words].T)
        return (torch.cat([right, wrong], 1).logsumexp(1, keepdim=True) - right)[:, 0]

    found = on_devices(mesh, lambda *inputs: softmax(*inputs, groups.axes(mesh)), hidden, labels, weight, drawn)
    expected = results(whole, hidden, labels, weight, words)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    on_cpu = results(lambda *inputs: softmax(*inputs, groups.axes(CPU)), hidden, labels, weight, words)
    torch.testing.assert_close(on_cpu, expected)


RANDOM = [torch.rand_like, layers.Dropout(), torch.Tensor.bernoulli_, F.gumbel_softmax, torch.nn.Dropout()]
RANDOM += [lambda x: x + torch.rand(3).to(x.device)]


def absolute(mesh):
    return torch.abs, mesh, [("data", None)], ("data", None)


def test_what_does_not_fit_the_devices_is_refused(mesh):
    named, x = groups.axes(arranged(mesh, Layout("data=2,model=2"))), torch.ones(6, 3).to(mesh.device)
    assert named.sizes == {"data": 2, "model": 2} and groups.axes(mesh).sizes == {"data": 4}
    weight = torch.ones(3).to(mesh.device).requires_grad_()
    before = groups.per_device(torch.mul, named, [(None, None), (None,)], (None, None))(x, weight)

    def in_region(function):
        return groups.per_device(function, named, [(None, None)], (None, None))(x)

    for refused, pattern in (
        (lambda: groups.axes(mesh, group=3, chip=2), "group=3, chip=2; .*multiply to the 4 devices"),
        (lambda: groups.group_sum(x, named, "rows"), "'rows'.*data, model"),
        (lambda: groups.all_gather(x, named, "data"), "outside of a per-device region"),
        (lambda: groups.all_to_all(x, named, "data"), "outside of a per-device region"),
        (lambda: in_region(lambda x: groups.all_to_all(x[:5], named, "data")), r"\[5, 3\].*multiple of 2, the devices"),
        (lambda: groups.per_device(None, named, [(("data", "model"), None)], ())(x), r"\[6, 3\].*equal parts"),
        (lambda: groups.per_device(None, named, [("rows", None)], ())(x), r"\('rows', None\)"),
        (lambda: groups.axes(mesh, group=2.0, chip=2), "group=2.0, chip=2"),
        (lambda: in_region(lambda x: groups.all_to_all(x.sum(), named, "data")), r"a part is \[\]"),
        (lambda: in_region(lambda x: x * weight.exp()), "gradient is used .*no argument"),
        (lambda: in_region(lambda x: x * before), "gradient is used .*no argument"),
        (lambda: groups.per_device(None, named, [("data", "data")], ())(x), "axis once"),
        (lambda: groups.per_device(torch.sum, named, [(None, None)], (None,))(x), r"result \[\].*\(None,\)"),
        (lambda: groups.per_device(None, named, [(None, None)], ())(x, x), "2 arguments and 1 spec"),
        (lambda: groups.per_device(None, named, [("data", *[None] * 4)], ())(x[..., None, None, None]), "reshape"),
        (lambda: groups.per_device(lambda x: [x], named, [(None, None)], [()] * 2)(x), "1 results and 2 specs"),
        (lambda: groups.per_device(torch.abs, named, [(None, None)], ("rows", None))(x), r"result.*\('rows', None\)"),
        (lambda: groups.per_device(torch.abs, named, [(None, None)], ("data", "data"))(x), "result.*axis once"),
        (lambda: groups.per_device(lambda x: x[..., *(None,) * 4], named, [(None, None)], (None,) * 6)(x), "reshape"),
        (lambda: groups.per_device(torch.add, named, [(None, None), ()], (None, None))(x, 1.0), "arguments is a float"),
        (lambda: groups.per_device(torch.abs, named, [["data", None]], ("data", None))(x), "and a tuple"),
        (lambda: groups.per_device(torch.abs, named, [(None, None)], [(None, None)])(x), "returns a tuple"),
        (lambda: groups.per_device(lambda x: (x,), named, [(None, None)], (None, None))(x), "returns a tensor"),
        (lambda: groups.per_device(groups.per_device(*absolute(named)), *absolute(named)[1:])(x), "in another one"),
        *[(lambda f=f: groups.per_device(f, *absolute(named)[1:])(x), "random numbers .*outside") for f in RANDOM],
    ):
        with pytest.raises(InputError, match=pattern):
            refused()
    y = groups.per_device(torch.square, named, [(None, None)], (None, None))(x.requires_grad_())
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (x.sum() + first.sum()).backward()
    for same in (layers.Dropout().eval(), torch.nn.Dropout(0.0), functools.partial(F.dropout, training=False)):
        assert torch.equal(groups.per_device(same, *absolute(named)[1:])(x).cpu(), x.cpu())


def test_a_mask_of_dropout_that_is_drawn_outside_is_another_for_each_device(mesh):
    named, x = groups.axes(mesh), torch.ones(8, 64).to(mesh.device)
    rows = [("data", None)] * 2
    dropped = groups.per_device(torch.mul, named, rows, rows[0])(x, layers.kept(x.shape, 0.5, x.device).float())
    masks = dropped.cpu().chunk(4)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))
