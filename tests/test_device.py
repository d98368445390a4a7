"""train/common/device.py on XLA's CPU backend with four virtual devices: eager PyTorch on the CPU
is the reference."""

import copy
import dataclasses
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import timm.optim
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import on_mesh, update
from torch import nn

from errors import InputError
from train.common import device
from train.common.xla import backend as xla


@pytest.fixture(autouse=True)
def nothing_pending():
    torch_xla.sync()


class Tied(nn.Module):
    """Computes logits with the embedding that the ids are read with; its bias starts at zero, where
    a step of 1e-30 would show."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.head.bias)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def train_step(model, optimizer, x, y):
    return update(F.cross_entropy(model(x), y), optimizer)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)
adam = partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.98), foreach=False)
adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=1e-2, foreach=False)
lars = partial(timm.optim.Lars, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)
lamb = partial(timm.optim.Lamb, lr=0.1, weight_decay=1e-2, bias_correction=False, foreach=False)


def host(tensors) -> list[torch.Tensor]:
    """Returns copies on the host."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


# The model on the device


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_not_called_divergence(mesh, value):
    model = Tied()
    with torch.no_grad():
        model.head.bias[3] = value
    message = "the weight head.bias is not finite before the first step; .* damaged, give"
    with pytest.raises(InputError, match=message):
        device.to_device(model, mesh)


@pytest.mark.parametrize("precision, kind", [("bfloat16", "bf16"), ("float32", "f32")])
def test_autocast_decides_the_type_of_matrix_products(mesh, precision, kind):
    model = device.to_device(nn.Linear(8, 4), mesh)
    x = torch.ones(8, 8).to(mesh.device)

    with dataclasses.replace(mesh, precision=precision).autocast():
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])

    products = [line for line in hlo.splitlines() if " dot(" in line]
    assert products
    assert all(f"= {kind}[8,4]" in line for line in products)
    assert model.weight.dtype == torch.float32


def test_to_device_keeps_parameter_objects_and_ties(mesh):
    model = Tied()
    before = list(model.parameters())
    optimizer = sgd(model.parameters())

    assert device.to_device(model, mesh) is model

    assert model.head.weight is model.embedding.weight
    assert model.head.weight.device.type == "xla"
    # An optimizer made before the move still holds the model's parameters.
    in_optimizer = optimizer.param_groups[0]["params"]
    for new, old, held in zip(model.parameters(), before, in_optimizer, strict=True):
        assert new is old is held


def test_to_device_annotates_all_tensors_as_replicated(mesh):
    moved = device.to_device(nn.BatchNorm1d(4), mesh)
    tensors = [*moved.parameters(), *moved.buffers()]
    shardings = map(torch_xla._XLAC._get_xla_sharding_spec, tensors)
    assert set(shardings) == {"{replicated}"}


# Optimizers

REFUSED = {
    "use dampening=0": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "use bias_correction=False": partial(timm.optim.Lamb, foreach=False),
    "Rprop starts its state 'step_size' at 0": torch.optim.Rprop,
}


@pytest.mark.parametrize("message", REFUSED)
def test_optimizers_whose_first_step_differs_are_refused(mesh, message):
    with pytest.raises(RuntimeError, match=message):
        on_mesh(mesh, nn.Linear(2, 2), REFUSED[message])


CASES = {optimizer.func.__name__: (optimizer, True) for optimizer in (sgd, adam, adamw, lars, lamb)}
# Where every call is traced, 0.0 and 1.0 would be constants of the graph.
CASES["SGD, not strict"] = (sgd, False)
CASES["AdamW, not strict"] = (adamw, False)


def state_shapes(states) -> list[list[tuple[str, torch.Size]]]:
    """Returns the names and shapes of each parameter's state."""
    shapes = []
    for state in states:
        shapes.append([(name, value.shape) for name, value in state.items()])
    return shapes


def assert_unmoved(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Asserts that a weight keeps every bit; what was exactly zero may take 1e-30."""
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-28)
    assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(("optimizer", "strict"), CASES.values(), ids=CASES)
def test_steps_at_any_rate_are_eager_pytorchs_in_one_graph(mesh, optimizer, strict):
    reference = Tied()
    cpu_x, cpu_y = torch.randint(0, 11, (2, 8))
    expected = optimizer(reference.parameters())
    model, made = on_mesh(mesh, copy.deepcopy(reference), optimizer)
    x = cpu_x.to(mesh.device)
    y = cpu_y.to(mesh.device)
    step = device.compiled(train_step, dataclasses.replace(mesh, strict=strict))

    # The state has its shapes before the first step, and is zero.
    shapes = state_shapes(made.state[parameter] for parameter in model.parameters())
    for state in made.state.values():
        for value in state.values():
            assert not value.cpu().any()

    torch_xla.sync()
    graphs = xla.compilations()
    for lr in (0.1, 0.0, 0.1, 1.0, 1e-9, 0.0, 1.0):
        before = host(model.parameters())
        device.set_lr(made, lr)
        for group in expected.param_groups:
            group["lr"] = lr

        reads = xla.host_reads()
        loss = step(model, made, x, y)
        assert xla.host_reads() == reads, "a step read a device value back"

        expected_loss = train_step(reference, expected, cpu_x, cpu_y)
        assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-5)
        after = host(model.parameters())
        if lr == 0.0:
            assert_unmoved(before, after)
        for ours, theirs in zip(after, reference.parameters(), strict=True):
            # Adam divides by the root of what may be near 0: its last digits are the order of a
            # sum.
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4)

    assert shapes == state_shapes(expected.state.values())
    # The first call may find its graph compiled by a test before.
    assert xla.compilations() <= graphs + 1
    report = device.graph_report()
    assert report["recompilations"] == report["fallbacks"] == []


@pytest.mark.parametrize("lr", [1e38, float("nan")])
def test_a_learning_rate_beyond_float32_is_a_sentence(lr):
    """On the CPU Adam would end with: value cannot be converted to type float without overflow."""
    made = torch.optim.Adam(nn.Linear(1, 1).parameters())
    message = "learning rate of this step is (1e.38|nan); .* lower --lr"
    with pytest.raises(InputError, match=message):
        device.set_lr(made, lr)


@pytest.mark.parametrize(
    "optimizer, lr, gradient",
    [
        (torch.optim.Adam, 0.0, torch.zeros(64, 1)),
        (torch.optim.SGD, 1.0, torch.randn(64, 1)),
    ],
)
def test_special_learning_rates_are_exact(mesh, optimizer, lr, gradient):
    """Capturable Adam divides by the learning rate: 0 / 0 where the second moment is 0. And a rate
    of 1 subtracts the gradient bit for bit."""
    model, made = on_mesh(mesh, nn.Linear(1, 64, bias=False), partial(optimizer, foreach=False))
    (weight,) = host(model.parameters())
    device.set_lr(made, lr)

    def step(model, optimizer, gradient):
        model.weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    device.compiled(step, mesh)(model, made, gradient.to(mesh.device))
    (moved,) = host(model.parameters())
    assert torch.equal(moved, weight - gradient)


# Random numbers, values that the host reads


def test_dropout_depends_on_seed_and_step_alone(mesh):
    dropout = nn.Dropout(0.5)
    x = torch.ones(64).to(mesh.device)
    step = device.compiled(lambda dropout, x: (dropout(x * 5.1), dropout(x * 5.1)), mesh)

    def draw(seed, number):
        device.seed_step(seed, number)
        return torch.stack([mask.cpu() for mask in step(dropout, x)])

    first = {key: draw(*key) for key in [(0, 1), (0, 2), (1, 1)]}
    torch.rand(5, device="xla").cpu()  # other draws in between
    torch.rand(5)
    graphs = xla.compilations()
    for key in [(1, 1), (0, 2), (0, 1)]:
        assert torch.equal(draw(*key), first[key])
    assert xla.compilations() == graphs

    masks = set()
    for both in first.values():
        for mask in both:
            masks.add(tuple((mask > 0).tolist()))
    assert len(masks) == 6  # two dropouts of a step draw different masks


def test_fetch_is_one_transfer(mesh):
    x = torch.arange(6.0).to(mesh.device)
    values = [x.sum(), x.max(), x.mean(), x.min()]
    reads = xla.host_reads()
    assert device.fetch(values) == [15.0, 5.0, 2.5, 0.0]
    assert xla.host_reads() == reads + 1
    assert device.fetch(iter([x[1]])) == [1.0]


# Several hosts


def of_hosts(mesh, monkeypatch, numbers: list[int], devices: int = 1) -> device.Mesh:
    """Returns the mesh as the first of several hosts sees it; what it uploads, a row per device,
    comes with that of the others."""
    upload = xm.send_cpu_data_to_device

    def upload_of_all(local, target, sharding):
        assert local.tolist() == numbers[:1] * devices
        assert sharding.minibatch
        rows = torch.tensor(numbers, dtype=local.dtype).repeat_interleave(devices)
        return upload(rows, target, sharding)

    monkeypatch.setattr(xm, "send_cpu_data_to_device", upload_of_all)
    return dataclasses.replace(mesh, process_count=len(numbers))


# The days of Criteo Terabyte are 4.2 billion examples.
LARGE = [4_195_197_692, 1, 2**40, 2**53 - 2**43]
ODD = [2**31 + 1, 2**31, 2**31, 2**31]


@pytest.mark.parametrize("numbers", [[3, 1, 4, 1], LARGE, [-7, 0, 0, 0], [300] * 4, ODD, [7, 5]])
def test_a_number_is_compared_over_hosts(mesh, monkeypatch, numbers):
    devices = 4 // len(numbers)  # a host with two counts once
    hosts = of_hosts(mesh, monkeypatch, numbers, devices)
    low = min(numbers)
    high = max(numbers)

    assert device.over_hosts(hosts, numbers[0]) == (low, high, sum(numbers))

    outcome = nullcontext()
    if low < high:
        message = f"disagree about the step: from {low} to {high}; .* the same files"
        outcome = pytest.raises(InputError, match=message)
    with outcome:
        device.same_on_all_hosts(hosts, "the step", numbers[0])


def test_one_host_compares_nothing(mesh):
    reads = xla.host_reads()
    assert device.over_hosts(mesh, 2**60) == (2**60,) * 3
    assert xla.host_reads() == reads


def test_the_order_of_a_hosts_devices_is_checked_on_the_device(mesh):
    xla._check_places(mesh)
    named = [f"CPU:{number}" for number in range(4)]
    order = torch_xla._XLAC._xla_get_runtime_devices()
    assert order == named, "in the order in which it fills them"
    with pytest.raises(RuntimeError, match="fills other rows"):
        xla._check_places(dataclasses.replace(mesh, local_devices=(0, 2, 1, 3)))


# Signals

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def handlers() -> list[Callable | int | None]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_a_flag_and_its_handler_comes_back(mesh, number):
    before = handlers()
    with device.stop_requested(mesh) as stopped:
        assert not stopped()
        os.kill(os.getpid(), number)
        assert stopped()
    assert handlers() == before


def test_a_second_interrupt_ends_the_process_at_once(mesh):
    before = handlers()
    with pytest.raises(KeyboardInterrupt), device.stop_requested(mesh) as stopped:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped()
    assert handlers() == before


def test_hosts_agree_about_signals_in_some_calls_only(mesh, monkeypatch):
    compared = []

    def over_hosts(mesh, value):
        compared.append(value)
        return device.OverHosts(0, value, value)

    monkeypatch.setattr(device, "over_hosts", over_hosts)
    hosts = dataclasses.replace(mesh, process_count=2)
    with device.stop_requested(hosts, every=3) as stopped:
        assert [stopped() for _ in range(4)] == [False] * 4
        assert compared == [0]

        os.kill(os.getpid(), signal.SIGTERM)
        assert [stopped() for _ in range(2)] == [False, True]
        assert compared == [0, 1]


# Several slices


@pytest.mark.parametrize(
    ("indices", "slices"),  # of the devices, as the runtime of several slices gives them
    [([], 1), ([0, 0, 0, 0], 1), ([0, 0, 1, 1], 2), ([0, 1, 2, 3], 4), ([2, 2, 0, 0], 2)],
)
def test_slices_are_counted_by_what_the_runtime_says(indices, slices, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")  # libtpu reads it, and what it says counts
    attributes = [{"device_kind": "TPU v6 lite"} for _ in range(4)]
    for device_attributes, index in zip(attributes, indices, strict=False):
        device_attributes["slice_index"] = index
    assert xla.count_slices(attributes) == slices


@pytest.mark.parametrize("indices", [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0]])
def test_devices_that_are_not_numbered_slice_by_slice_stop_a_run(indices):
    with pytest.raises(RuntimeError, match="not numbered slice by slice"):
        xla.count_slices([{"slice_index": index} for index in indices])


def test_what_the_runtime_says_is_in_the_order_of_the_mesh(monkeypatch):
    names = [{"name": f"TPU:{number}"} for number in (10, 0, 2, 1)]
    monkeypatch.setattr(xla.xr, "global_runtime_device_attributes", lambda: names)
    found = [attributes["name"] for attributes in xla._device_attributes()]
    assert found == ["TPU:0", "TPU:1", "TPU:2", "TPU:10"]


def test_cpu_devices_pretend_to_be_slices(monkeypatch):
    assert device.setup(0).slices == 1
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    mesh = device.setup(0)
    assert mesh.slices == 2
    assert mesh.devices_per_slice == 2

    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "")  # as unset
    assert device.setup(0).slices == 1

    for wrong in ("3", "0", "-1", "two", "٢"):
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", wrong)
        with pytest.raises(InputError, match=f"MEGASCALE_NUM_SLICES is {wrong}.* 4 devices"):
            device.setup(0)
