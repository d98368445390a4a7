"""train/common/sharding/groups.py on 1 to 16 devices; the examples of docs/groups.md."""

import functools
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import group_functions
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
WHOLE = (None, None)  # the spec of a matrix that every device has
ROWS = ("data", None)


def results(function, *inputs) -> list[torch.Tensor]:
    """Returns what a function gives, and the gradients of the sum of its squares, on the host."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*leaves)
    trained = [x for x in leaves if x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), trained)]


def on_devices(mesh, function, *inputs) -> list[torch.Tensor]:
    """Returns `results` of a compiled step that has been repeated."""
    uploaded = [x.to(mesh.device) for x in inputs]
    for x in uploaded:
        device.replicate(x, mesh)
    step = device.compiled(lambda *inputs: results(function, *inputs), mesh)
    for _ in range(3):
        found = step(*uploaded)
    return [x.cpu() for x in found]


# The functions


def test_every_function_and_its_gradient_is_numpys(mesh):
    group_functions.compare(mesh, group_functions.SIZES[mesh.num_devices])


@pytest.mark.slow
@pytest.mark.parametrize("devices", (1, 2, 8, 16))
def test_every_function_is_numpys_on_other_devices(devices):
    process = subprocess.run(
        [sys.executable, str(ROOT / "tests/group_functions.py"), str(devices)],
        env=environment(devices, PYTHONPATH=f"{ROOT}:{ROOT}/tests"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr


def test_a_whole_result_and_its_gradients_are_one_devices(mesh):
    named = groups.axes(mesh)
    x = torch.arange(24.0).reshape(8, 3) / 24
    weight = torch.eye(3)

    def norms(x, weight):
        return (x @ weight).square().sum(0)

    def summed_norms(x, weight):
        return groups.group_sum(norms(x, weight), named, "data")

    function = groups.per_device(summed_norms, named, [ROWS, WHOLE], (None,))
    expected = results(norms, x, weight)
    torch.testing.assert_close(on_devices(mesh, function, x, weight), expected)


@pytest.mark.parametrize("name", group_functions.EXPECTED)
def test_plain_pytorch_is_one_device(name):
    named = groups.axes(CPU, data=1, model=1)
    x = torch.randn(4, 3)
    function = functools.partial(getattr(groups, name), mesh=named, axis="model")
    assert torch.equal(groups.per_device(function, named, [WHOLE], WHOLE)(x), x)


# The examples of docs/groups.md


def examples() -> dict:
    """Returns what the code of docs/groups.md defines."""
    page = (ROOT / "docs/groups.md").read_text()
    names: dict = {}
    for block in re.findall(r"(?:^(?:    .*)?\n)+", page, re.M):
        if "    def " in block:
            exec(textwrap.dedent(block), names)
    return names


def test_batch_norm_over_groups_of_chips_is_the_scripts(mesh):
    norm = examples()["batch_norm"]
    named = groups.axes(mesh, group=2, chip=2)
    x = torch.randn(8, 3, 4, 4) * 2 + 1
    inputs = [x, torch.randn(3), torch.randn(3)]

    def norm_of_the_script(x, weight, bias):
        return resnet.batch_statistics_norm(x, weight, bias, 1e-5, groups=2)[0]

    found = on_devices(mesh, lambda *inputs: norm(*inputs, named), *inputs)
    expected = results(norm_of_the_script, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sampled_softmax_is_that_of_the_drawn_words(mesh):
    softmax = examples()["sampled_softmax"]
    hidden = torch.randn(8, 5)
    weight = torch.randn(12, 5)
    labels = torch.randint(12, (8,))
    drawn = torch.tensor([0, 2, 1, 0, 2, 0, 0, 1])  # two of each device's three words
    words = drawn + torch.tensor([0, 0, 3, 3, 6, 6, 9, 9])
    labels[:2] = words[1]  # right and drawn

    def on(mesh):
        return lambda *inputs: softmax(*inputs, groups.axes(mesh))

    def whole(hidden, labels, weight, words):
        right = (hidden * weight[labels]).sum(1, keepdim=True)
        wrong = torch.where(words == labels[:, None], -torch.inf, hidden @ weight[words].T)
        return (torch.cat([right, wrong], 1).logsumexp(1, keepdim=True) - right)[:, 0]

    expected = results(whole, hidden, labels, weight, words)
    found = on_devices(mesh, on(mesh), hidden, labels, weight, drawn)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    on_cpu = results(on(CPU), hidden, labels, weight, words)
    torch.testing.assert_close(on_cpu, expected)


# What is refused


@pytest.fixture
def two_by_two(mesh) -> groups.Axes:
    return groups.axes(arranged(mesh, Layout("data=2,model=2")))


@pytest.fixture
def x(mesh) -> torch.Tensor:
    return torch.ones(6, 3).to(mesh.device)


def test_axes_are_those_of_the_layout_or_one_of_all_devices(mesh, two_by_two):
    assert two_by_two.sizes == {"data": 2, "model": 2}
    assert groups.axes(mesh).sizes == {"data": 4}


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ({"group": 3, "chip": 2}, "group=3, chip=2; .*multiply to the 4 devices"),
        ({"group": 2.0, "chip": 2}, "group=2.0, chip=2"),
    ],
)
def test_axes_that_do_not_fit_the_devices_are_refused(sizes, pattern, mesh):
    with pytest.raises(InputError, match=pattern):
        groups.axes(mesh, **sizes)


@pytest.mark.parametrize(
    ("name", "axis", "pattern"),
    [
        ("group_sum", "rows", "'rows'.*data, model"),
        ("all_gather", "data", "outside of a per-device region"),
        ("all_to_all", "data", "outside of a per-device region"),
    ],
)
def test_a_function_is_refused_outside_of_a_region(name, axis, pattern, x, two_by_two):
    with pytest.raises(InputError, match=pattern):
        getattr(groups, name)(x, two_by_two, axis)


@pytest.mark.parametrize(
    ("part", "pattern"),
    [
        (lambda x: x[:5], r"\[5, 3\].*multiple of 2, the devices"),
        (lambda x: x.sum(), r"a part is \[\]"),
    ],
    ids=["five rows", "scalar"],
)
def test_parts_that_the_devices_do_not_divide_are_refused(part, pattern, x, two_by_two):
    def exchange(x):
        return groups.all_to_all(part(x), two_by_two, "data")

    with pytest.raises(InputError, match=pattern):
        groups.per_device(exchange, two_by_two, [WHOLE], WHOLE)(x)


@pytest.mark.parametrize(
    ("arguments", "spec", "pattern"),
    [
        (lambda x: (x,), (("data", "model"), None), r"\[6, 3\].*equal parts"),
        (lambda x: (x,), ("rows", None), r"\('rows', None\)"),
        (lambda x: (x,), ("data", "data"), "axis once"),
        (lambda x: (x, x), WHOLE, "2 arguments and 1 spec"),
        (lambda x: (x[..., None, None, None],), ("data", *[None] * 4), "reshape"),
    ],
    ids=["parts", "axis", "twice", "number", "dimensions"],
)
def test_arguments_that_do_not_fit_are_refused(arguments, spec, pattern, x, two_by_two):
    with pytest.raises(InputError, match=pattern):
        groups.per_device(None, two_by_two, [spec], ())(*arguments(x))


def test_an_argument_that_is_no_tensor_is_refused(x, two_by_two):
    add = groups.per_device(torch.add, two_by_two, [WHOLE, ()], WHOLE)
    with pytest.raises(InputError, match="arguments is a float"):
        add(x, 1.0)


@pytest.mark.parametrize(
    ("function", "result", "pattern"),
    [
        (torch.sum, (None,), r"result \[\].*\(None,\)"),
        (lambda x: [x], [(), ()], "1 results and 2 specs"),
        (torch.abs, ("rows", None), r"result.*\('rows', None\)"),
        (torch.abs, ("data", "data"), "result.*axis once"),
        (lambda x: x[..., None, None, None, None], (None,) * 6, "reshape"),
        (torch.abs, [WHOLE], "returns a tuple"),
        (lambda x: (x,), WHOLE, "returns a tensor"),
    ],
    ids=["shape", "number", "axis", "twice", "dimensions", "no tuple", "no tensor"],
)
def test_a_result_that_does_not_fit_is_refused(function, result, pattern, x, two_by_two):
    with pytest.raises(InputError, match=pattern):
        groups.per_device(function, two_by_two, [WHOLE], result)(x)


def test_a_spec_that_is_no_tuple_is_refused(x, two_by_two):
    with pytest.raises(InputError, match="and a tuple"):
        groups.per_device(torch.abs, two_by_two, [["data", None]], ROWS)(x)


def test_a_gradient_that_would_be_lost_is_refused(mesh, x, two_by_two):
    """Of a tensor that the function does not get as an argument."""
    weight = torch.ones(3).to(mesh.device).requires_grad_()
    before = groups.per_device(torch.mul, two_by_two, [WHOLE, (None,)], WHOLE)(x, weight)
    for function in (lambda x: x * weight.exp(), lambda x: x * before):
        with pytest.raises(InputError, match="gradient is used .*no argument"):
            groups.per_device(function, two_by_two, [WHOLE], WHOLE)(x)


def test_a_region_in_another_one_is_refused(x, two_by_two):
    inner = groups.per_device(torch.abs, two_by_two, [ROWS], ROWS)
    with pytest.raises(InputError, match="in another one"):
        groups.per_device(inner, two_by_two, [ROWS], ROWS)(x)


@pytest.mark.parametrize(
    "function",
    [
        torch.rand_like,
        layers.Dropout(),
        torch.Tensor.bernoulli_,
        F.gumbel_softmax,
        torch.nn.Dropout(),
        lambda x: x + torch.rand(3).to(x.device),
    ],
    ids=["rand_like", "layers.Dropout", "bernoulli_", "gumbel_softmax", "nn.Dropout", "rand"],
)
def test_random_numbers_in_a_region_are_refused(function, x, two_by_two):
    with pytest.raises(InputError, match="random numbers .*outside"):
        groups.per_device(function, two_by_two, [ROWS], ROWS)(x)


@pytest.mark.parametrize(
    "same",
    [
        layers.Dropout().eval(),
        torch.nn.Dropout(0.0),
        functools.partial(F.dropout, training=False),
    ],
    ids=["layers.Dropout", "nn.Dropout", "dropout"],
)
def test_a_dropout_that_draws_nothing_is_let_through(same, x, two_by_two):
    found = groups.per_device(same, two_by_two, [ROWS], ROWS)(x)
    assert torch.equal(found.cpu(), x.cpu())


def test_a_second_derivative_is_refused(x, two_by_two):
    square = groups.per_device(torch.square, two_by_two, [WHOLE], WHOLE)
    y = square(x.requires_grad_())
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (x.sum() + first.sum()).backward()


def test_a_dropout_mask_drawn_outside_differs_by_device(mesh):
    named = groups.axes(mesh)
    x = torch.ones(8, 64).to(mesh.device)
    mask = layers.kept(x.shape, 0.5, x.device).float()

    dropped = groups.per_device(torch.mul, named, [ROWS, ROWS], ROWS)(x, mask)

    parts = dropped.cpu().chunk(4)
    for one, other in itertools.combinations(parts, 2):
        assert not torch.equal(one, other)
