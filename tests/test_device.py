"""train/common/device.py on XLA's CPU backend with four virtual devices: eager PyTorch on the CPU is the reference."""

import dataclasses
import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import timm.optim
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import nn

from errors import InputError
from train.common import device


@pytest.fixture(autouse=True)
def fresh_report():
    torch_xla.sync()
    device.reset_graph_report()


@pytest.fixture
def lenient(mesh) -> device.Mesh:
    return dataclasses.replace(mesh, strict=False)


class Tied(nn.Module):
    """Logits from the embedding that they are read with; its bias starts at zero, where a step of 1e-30 would show."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.head.bias)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 0.98), foreach=False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=1e-2, foreach=False)


def lars(parameters):
    return timm.optim.Lars(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)


def lamb(parameters):
    return timm.optim.Lamb(parameters, lr=0.1, weight_decay=1e-2, bias_correction=False, foreach=False)


OPTIMIZERS = [sgd, adam, adamw, lars, lamb]


def make(optimizer, seed: int = 0):
    """A model and its optimizer on the CPU, and a batch of 8."""
    torch.manual_seed(seed)
    model = Tied()
    return model, optimizer(model.parameters()), torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,))


def on_mesh(mesh, optimizer, seed: int = 0):
    """The same on the device, ready for the compiled step."""
    model, _, x, y = make(optimizer, seed)
    device.to_device(model, mesh)
    made = optimizer(model.parameters())
    device.init_optimizer_state(made, mesh)
    return model, made, x.to(mesh.device), y.to(mesh.device)


def host(tensors) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def graphs_of(call) -> int:
    """Graphs that a call compiles, pending operations of the test apart."""
    torch_xla.sync()
    before = device.compilations()
    call()
    torch_xla.sync()
    return device.compilations() - before


# ---- set-up ----------------------------------------------------------------------------------------------------------


def test_mesh_has_all_devices(mesh):
    assert mesh.num_devices == 4 and mesh.spmd.mesh_shape == (4,) and mesh.spmd.axis_names == ("data",)
    assert (mesh.process_index, mesh.process_count, mesh.main_process, mesh.kind) == (0, 1, True, "CPU")


def test_setup_seeds_every_generator():
    draws = []
    for _ in range(2):
        device.setup(7, "float32")
        draws.append([torch.rand(3).tolist(), np.random.rand(3).tolist(), torch.rand(3, device="xla").tolist()])
    assert draws[0] == draws[1]


def test_unknown_precision_is_an_input_error():
    with pytest.raises(InputError, match="precision is 'float16'; it must be one of bfloat16, float32"):
        device.setup(0, "float16")


@pytest.mark.parametrize("precision, kind", [("bfloat16", "bf16"), ("float32", "f32")])
def test_autocast_decides_the_type_of_matrix_products(mesh, precision, kind):
    model = device.to_device(nn.Linear(8, 4), mesh)
    x = torch.ones(8, 8).to(mesh.device)
    with dataclasses.replace(mesh, precision=precision).autocast():
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])
    products = [line for line in hlo.splitlines() if " dot(" in line]
    assert products and all(f"= {kind}[8,4]" in line for line in products)
    assert model.weight.dtype == torch.float32


# ---- moving a model --------------------------------------------------------------------------------------------------


def test_to_device_keeps_parameter_objects_and_ties(mesh):
    model, optimizer, _, _ = make(sgd)
    before = list(model.parameters())
    assert device.to_device(model, mesh) is model
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert model.head.weight is model.embedding.weight and model.head.weight.device.type == "xla"
    # An optimizer made before the move still holds the model's parameters.
    assert all(held is own for held, own in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_plain_to_unties_parameters(mesh):
    """The trap that to_device is there for; if this fails, torch_xla has mended it."""
    model = Tied().to(mesh.device)
    assert model.head.weight is not model.embedding.weight


def test_moved_tensors_are_annotated_as_replicated(mesh):
    model = device.to_device(nn.BatchNorm1d(4), mesh)
    for tensor in [*model.parameters(), *model.buffers()]:
        assert torch_xla._XLAC._get_xla_sharding_spec(tensor) == "{replicated}"


def test_step_on_a_tied_model_equals_the_cpu(mesh):
    expected, optimizer, x, y = make(sgd)
    train_step(expected, optimizer, x, y)
    model, optimizer, x, y = on_mesh(mesh, sgd)
    device.compiled(train_step, mesh)(model, optimizer, x, y)
    for ours, theirs in zip(host(model.parameters()), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def test_sharded_batch_gives_the_gradient_of_the_whole_batch(mesh):
    expected, _, x, y = make(sgd)
    F.cross_entropy(expected(x), y).backward()
    model, _, _, _ = on_mesh(mesh, sgd)
    spec = xs.ShardingSpec(mesh.spmd, ("data",))
    x, y = (xm.send_cpu_data_to_device(tensor, mesh.device, spec)[0] for tensor in (x, y))
    assert "devices=[4]" in torch_xla._XLAC._get_xla_sharding_spec(x)

    def gradients(model, x, y):
        F.cross_entropy(model(x), y).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    found = device.compiled(gradients, mesh)(model, x, y)
    for ours, theirs in zip(host(found), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_has_the_names_and_shapes_of_a_real_step(mesh, optimizer):
    expected_model, expected, x, y = make(optimizer)
    train_step(expected_model, expected, x, y)
    model, made, _, _ = on_mesh(mesh, optimizer)
    assert len(made.state) == len(expected.state) == 2
    for parameter, reference in zip(model.parameters(), expected_model.parameters(), strict=True):
        ours, theirs = made.state[parameter], expected.state[reference]
        assert [(name, value.shape) for name, value in ours.items()] == [(k, v.shape) for k, v in theirs.items()]
        assert all(not value.cpu().any() for value in ours.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_compilation_and_the_losses_of_eager_pytorch(mesh, optimizer):
    model, made, x, y = make(optimizer)
    expected = [train_step(model, made, x, y).item() for _ in range(4)]
    model, made, x, y = on_mesh(mesh, optimizer)
    step, losses = device.compiled(train_step, mesh), []
    torch_xla.sync()
    reads = device.host_reads()
    # The first call may find its graph compiled by a test before; the later calls must compile nothing (strict).
    assert graphs_of(lambda: losses.append(step(model, made, x, y))) <= 1
    assert graphs_of(lambda: losses.extend(step(model, made, x, y) for _ in range(3))) == 0
    assert device.host_reads() == reads, "a step read a device value back"
    assert device.fetch(losses) == pytest.approx(expected, rel=2e-5)
    report = device.graph_report()
    assert report["recompilations"] == report["fallbacks"] == []


def test_step_without_optimizer_state_is_stopped_in_the_second_call(mesh):
    model, _, x, y = on_mesh(mesh, sgd)
    # Another momentum than elsewhere, so that no other test has compiled these graphs.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True, foreach=False)
    step = device.compiled(train_step, mesh)
    step(model, optimizer, x, y)
    with pytest.raises(device.GraphError, match=r"train_step was compiled again.*init_optimizer_state"):
        step(model, optimizer, x, y)


def test_optimizers_whose_first_step_differs_are_refused(mesh):
    parameters = list(device.to_device(nn.Linear(2, 2), mesh).parameters())
    with pytest.raises(RuntimeError, match="use dampening=0"):
        device.init_optimizer_state(torch.optim.SGD(parameters, momentum=0.9, dampening=0.5), mesh)
    with pytest.raises(RuntimeError, match="use bias_correction=False"):
        device.init_optimizer_state(timm.optim.Lamb(parameters, foreach=False), mesh)
    with pytest.raises(RuntimeError, match="Rprop starts its state 'step_size' at 0"):
        device.init_optimizer_state(torch.optim.Rprop(parameters), mesh)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_special_learning_rates_do_not_recompile_and_are_exact(mesh, optimizer):
    model, made, x, y = on_mesh(mesh, optimizer)
    reference, expected, cpu_x, cpu_y = make(optimizer)
    step = device.compiled(train_step, mesh)
    for lr in (0.1, 0.0, 0.1, 1.0, 1e-9, 0.0, 1.0):
        before = host(model.parameters())
        device.set_lr(made, lr)
        for group in expected.param_groups:
            group["lr"] = lr
        step(model, made, x, y)  # strict: raises when it compiles again
        train_step(reference, expected, cpu_x, cpu_y)
        after = host(model.parameters())
        if lr == 0.0:
            # A weight keeps every bit; what was exactly zero may take 1e-30.
            assert all(torch.allclose(a, b, rtol=0, atol=1e-28) for a, b in zip(before, after, strict=True))
            assert torch.equal(before[0], after[0])
        for ours, theirs in zip(after, reference.parameters(), strict=True):
            # Adam divides by the root of what may be near 0: its last digits are the order of a sum.
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4)
    assert device.graph_report()["recompilations"] == []


def test_a_learning_rate_of_zero_leaves_a_parameter_without_gradient_whole(mesh):
    """Capturable Adam divides by the learning rate: 0 / 0 where the second moment is 0."""
    model = device.to_device(nn.Linear(3, 2), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    weight = host(model.parameters())[0]
    device.set_lr(optimizer, 0.0)

    def step(model, optimizer, x):
        (model(x) * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    device.compiled(step, mesh)(model, optimizer, torch.ones(4, 3).to(mesh.device))
    assert torch.equal(host(model.parameters())[0], weight)


def test_a_learning_rate_of_one_subtracts_the_gradient_bit_for_bit(mesh):
    model = device.to_device(nn.Linear(1, 64, bias=False), mesh)
    weight = host(model.parameters())[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    device.set_lr(optimizer, 1.0)
    gradient = torch.randn(64, 1)

    def step(model, optimizer, gradient):
        model.weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    device.compiled(step, mesh)(model, optimizer, gradient.to(mesh.device))
    assert torch.equal(host(model.parameters())[0], weight - gradient)


def test_a_learning_rate_of_exactly_zero_recompiles_where_every_call_is_traced(mesh, lenient):
    """The trap that set_lr is there for; if this fails, torch_xla has mended it."""
    for each, compiled_again in ((lenient, 1), (mesh, 0)):  # a repeated step has the rate as an input
        device.reset_graph_report()
        model, optimizer, x, y = on_mesh(mesh, sgd)
        step = device.compiled(train_step, each)
        for _ in range(2):
            step(model, optimizer, x, y)
        before = host(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.0
        step(model, optimizer, x, y)
        assert len(device.graph_report()["recompilations"]) == compiled_again
        assert all(torch.equal(a, b) for a, b in zip(before, host(model.parameters()), strict=True))


@pytest.mark.parametrize("optimizer", [adam, adamw])
def test_adam_is_compiled_once_however_many_steps(mesh, optimizer):
    """As Python floats, beta2 = 0.98 makes the bias correction exactly 1 in float32 after 823 steps, and a learning
    rate near 0 makes 1 - lr * weight_decay so: either is another graph, in the middle of a run."""
    model, made, x, y = on_mesh(mesh, optimizer)
    step = device.compiled(train_step, mesh)
    step(model, made, x, y)
    for state in made.state.values():
        state["step"].copy_(torch.tensor(800.0))
        device.replicate(state["step"], mesh)
    for lr in np.linspace(1e-3, 1e-8, 40):
        device.set_lr(made, float(lr))
        step(model, made, x, y)
    for state in made.state.values():
        assert state["step"].item() == 840
        state["step"].copy_(torch.tensor(100_000.0))
        device.replicate(state["step"], mesh)
    for _ in range(2):
        step(model, made, x, y)
    assert device.graph_report()["recompilations"] == []


# ---- the contract of a step ------------------------------------------------------------------------------------------


def test_changed_input_shape_is_stopped_before_it_compiles(mesh):
    step = device.compiled(lambda batch: batch["image"] * 1.7 + batch["label"][:, None], mesh)
    label, other = torch.ones(4).to(mesh.device), torch.ones(6).to(mesh.device)
    images = [torch.ones(4, 3).to(mesh.device), torch.ones(6, 3).to(mesh.device)]
    step({"image": images[0], "label": label})

    def changed():
        message = r"\['image'\] is \(\(6, 3\), 'float32'\), compiled for \(\(4, 3\), 'float32'\)"
        with pytest.raises(device.GraphError, match=message) as raised:
            step({"image": images[1], "label": other})
        assert "['label'] is ((6,), 'float32'), compiled for ((4,), 'float32')" in str(raised.value)

    assert graphs_of(changed) == 0
    assert step({"image": images[0], "label": label}).shape == (4, 3)  # the step is still good


def test_changed_type_mode_and_missing_input_are_named(mesh):
    model = device.to_device(nn.Linear(3, 2), mesh)
    step = device.compiled(lambda model, batch: model(batch["x"].float()), mesh)
    x = torch.ones(4, 3).to(mesh.device)
    step(model, {"x": x, "mask": x})
    with pytest.raises(device.GraphError, match=r"\['x'\] is .*'int32'\), compiled for .*'float32'\)"):
        step(model, {"x": torch.ones(4, 3, dtype=torch.int32).to(mesh.device), "mask": x})
    with pytest.raises(device.GraphError, match=r"argument 0 is evaluation, compiled for training"):
        step(model.eval(), {"x": x, "mask": x})
    with pytest.raises(device.GraphError, match=r"an input is missing: argument 1\['mask'\]"):
        step(model.train(), {"x": x})


def test_max_graphs_allows_that_many_shapes(mesh):
    step = device.compiled(lambda x: x * 1.9, mesh, max_graphs=2)
    shapes = [torch.ones(size, 2).to(mesh.device) for size in (4, 5, 6)]
    assert graphs_of(lambda: [step(shapes[i]) for i in (0, 1, 0, 1, 1)]) == 2
    with pytest.raises(device.GraphError, match=r"\(\(6, 2\), 'float32'\)"):
        step(shapes[2])


def test_lenient_mesh_warns_reports_and_goes_on(lenient, capsys):
    step = device.compiled(lambda x: x * 2.1, lenient)
    for size in (4, 5, 5):
        assert step(torch.ones(size).to(lenient.device)).shape == (size,)
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1 and "((5,), 'float32'), compiled for ((4,), 'float32')" in printed
    assert len(device.graph_report()["recompilations"]) == 1
    device.reset_graph_report()
    assert device.graph_report()["recompilations"] == []


def test_changed_python_number_is_named(mesh):
    def scaled(x, factor):
        return x * factor

    step, x = device.compiled(scaled, mesh), torch.ones(5).to(mesh.device)
    for factor in (0.3, 0.7):  # a float is an input of the graph
        step(x, factor)
    with pytest.raises(device.GraphError, match=r"the Python number argument 1 from 0.3 to 0.0 changed"):
        step(x, 0.0)  # but this one is a constant in it


def test_python_branch_that_changes_the_graph_is_reported(mesh):
    flags = iter([False, True])
    step = device.compiled(lambda x: x.sin() * 2.3 if next(flags) else x.cos() * 2.3, mesh)
    x = torch.ones(5).to(mesh.device)
    step(x)
    with pytest.raises(device.GraphError, match="a Python value or branch inside it changed"):
        step(x)


def test_reading_a_value_in_a_step_is_stopped(mesh):
    def peeks(x):
        return x if x.sum().item() > 0 else -x

    def branches(x):
        return x if x.any() else -x

    x = torch.ones(5).to(mesh.device)
    for step_fn in (peeks, branches):
        message = rf"{step_fn.__name__} reads a device value before its end \(.item\(\)"
        with pytest.raises(device.GraphError, match=message):
            device.compiled(step_fn, mesh)(x)
    # Nothing of it is left behind.
    good = device.compiled(lambda x: x * 2.7, mesh)
    assert device.fetch([good(x).sum()]) == pytest.approx([13.5])
    assert device.fetch([good(x).sum()]) == pytest.approx([13.5])


def test_an_error_of_the_step_itself_is_passed_on(mesh):
    def wrong(x):
        return x @ torch.ones(3, 3, device=x.device)

    with pytest.raises(RuntimeError) as raised:
        device.compiled(wrong, mesh)(torch.ones(2, 2).to(mesh.device))
    assert not isinstance(raised.value, device.GraphError)
    assert device.fetch([torch.ones(3).to(mesh.device).sum()]) == [3.0]  # execution is allowed again


def bag_step(bag, ids):
    return bag(ids)


def test_operation_on_the_host_is_named(mesh):
    bag = device.to_device(nn.EmbeddingBag(5, 4, mode="sum"), mesh)
    ids = torch.ones(8, 2, dtype=torch.long).to(mesh.device)
    for _ in range(2):  # the second time too, though torch_xla's list of fall-backs has it already
        device.reset_graph_report()
        with pytest.raises(device.GraphError, match="bag_step runs aten::_embedding_bag on the host"):
            device.compiled(bag_step, mesh)(bag, ids)
        assert device.graph_report()["fallbacks"] == ["aten::_embedding_bag"]


def test_operation_on_the_host_is_reported_by_a_lenient_mesh(lenient, capsys):
    bag = device.to_device(nn.EmbeddingBag(5, 4, mode="sum"), lenient)
    ids = torch.ones(8, 2, dtype=torch.long).to(lenient.device)
    step = device.compiled(bag_step, lenient)
    for _ in range(2):
        pooled = step(bag, ids)
    torch.testing.assert_close(pooled.cpu(), 2 * bag.weight[1].detach().cpu().expand(8, 4))
    assert device.graph_report()["fallbacks"] == ["aten::_embedding_bag"]
    assert capsys.readouterr().out.count("warning: bag_step runs aten::_embedding_bag on the host") == 1


def test_a_sum_of_embeddings_does_not_fall_back(mesh):
    table, ids = device.to_device(nn.Embedding(5, 4), mesh), torch.ones(8, 2, dtype=torch.long).to(mesh.device)
    device.compiled(lambda table, ids: table(ids).sum(1), mesh)(table, ids)
    assert device.graph_report()["fallbacks"] == []


def test_operations_outside_of_the_step_that_compile_each_time_are_stopped(mesh):
    step, x, strays = device.compiled(lambda x: x * 3.1, mesh), torch.ones(4).to(mesh.device), []

    def train():
        for size in range(1, 9):
            strays.append(torch.ones(size, 3, 5).to(mesh.device).atan())  # no other test's graph
            step(x)

    with pytest.raises(device.GraphError, match="operations outside of <lambda> .* before three calls in a row"):
        train()
    # What comes before the first call (preparing a model) is not counted.
    assert len(strays) == 4


def test_operations_outside_of_the_step_with_one_shape_are_fine(mesh):
    step, x = device.compiled(lambda x: x * 3.7, mesh), torch.ones(4).to(mesh.device)
    total = torch.zeros(()).to(mesh.device)
    for _ in range(6):
        total = total + step(x).sum()
    assert device.fetch([total]) == pytest.approx([6 * 4 * 3.7])


def test_gradients_left_alive_are_stopped_in_the_second_call(mesh):
    """They are outputs of the first call and inputs of the second: two graphs."""

    def leaky(model, x):
        loss = (model(x) * 4.1).mean()
        loss.backward()
        return loss.detach()

    model, x = device.to_device(nn.Linear(4, 3), mesh), torch.ones(8, 4).to(mesh.device)
    step = device.compiled(leaky, mesh)
    step(model, x)
    with pytest.raises(device.GraphError, match="left gradients alive"):
        step(model, x)


def test_compile_time_and_graphs_are_counted(mesh):
    step, x = device.compiled(lambda x: x * 4.3 - 1, mesh), torch.ones(3).to(mesh.device)
    torch_xla.sync()
    before = device.graph_report()["graphs"]
    for _ in range(3):
        step(x)
    first = device.graph_report()
    assert first["graphs"] == before + 1 and first["compile_seconds"] > 0
    assert (first["traced"], first["repeated"]) == (2, 1)
    step(x)
    assert device.graph_report() == first | {"repeated": 2}


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_dropout_depends_on_seed_and_step_alone(mesh):
    dropout, x = nn.Dropout(0.5), torch.ones(64).to(mesh.device)
    step = device.compiled(lambda dropout, x: dropout(x * 5.1), mesh)

    def draw(seed, number):
        device.seed_step(seed, number)
        return step(dropout, x).cpu()

    first = {key: draw(*key) for key in [(0, 1), (0, 2), (1, 1)]}
    graphs = device.compilations()
    torch.rand(5, device="xla").cpu()  # other draws in between
    torch.rand(5)
    after_other = device.compilations()
    assert all(torch.equal(draw(*key), first[key]) for key in [(1, 1), (0, 2), (0, 1)])
    assert device.compilations() == after_other >= graphs
    masks = [tuple((mask > 0).tolist()) for mask in first.values()]
    assert len(set(masks)) == 3


def test_two_dropouts_of_a_step_draw_different_masks(mesh):
    step = device.compiled(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), mesh)
    device.seed_step(0, 3)
    one, other = step(torch.ones(64).to(mesh.device))
    assert not torch.equal(one.cpu(), other.cpu())


# ---- reading, hosts, signals -----------------------------------------------------------------------------------------


def test_fetch_is_one_transfer(mesh):
    x = torch.arange(6.0).to(mesh.device)
    values = [x.sum(), x.max(), x.mean(), x.min()]
    reads = device.host_reads()
    assert device.fetch(values) == [15.0, 5.0, 2.5, 0.0]
    assert device.host_reads() == reads + 1
    assert device.fetch(iter([x[1]])) == [1.0]


def four_hosts(mesh, monkeypatch, numbers: list[int]) -> device.Mesh:
    """The mesh as the first of four hosts with a device each has it; what it uploads comes with that of the others."""
    upload = xm.send_cpu_data_to_device

    def of_all(local, target, sharding):
        assert local.tolist() == numbers[:1] and sharding.minibatch
        return upload(torch.tensor(numbers, dtype=local.dtype), target, sharding)

    monkeypatch.setattr(device.xm, "send_cpu_data_to_device", of_all)
    return dataclasses.replace(mesh, process_count=4)


@pytest.mark.parametrize(
    "numbers", [[3, 1, 4, 1], [4_195_197_692, 1, 2**40, 2**53 - 2**43], [-7, 0, 0, 0], [2**31 + 1, 2**31, 2**31, 2**31]]
)
def test_a_number_is_compared_over_hosts(mesh, monkeypatch, numbers):
    """The days of Criteo Terabyte are 4.2 billion examples."""
    four = four_hosts(mesh, monkeypatch, numbers)
    assert device.over_hosts(four, numbers[0]) == (min(numbers), max(numbers), sum(numbers))


def test_a_host_with_two_devices_counts_once(mesh, monkeypatch):
    upload = xm.send_cpu_data_to_device

    def of_both(local, target, sharding):
        assert local.tolist() == [7, 7]
        return upload(torch.tensor([7, 7, 5, 5]), target, sharding)

    monkeypatch.setattr(device.xm, "send_cpu_data_to_device", of_both)
    assert device.over_hosts(dataclasses.replace(mesh, process_count=2), 7) == (5, 7, 12)


def test_one_host_compares_nothing(mesh):
    reads = device.host_reads()
    assert device.over_hosts(mesh, 2**60) == (2**60,) * 3
    device.same_on_all_hosts(mesh, "the step", 300)
    assert device.host_reads() == reads


def test_same_on_all_hosts_passes_for_one_value(mesh, monkeypatch):
    device.same_on_all_hosts(four_hosts(mesh, monkeypatch, [300] * 4), "the step", 300)


@pytest.mark.parametrize("steps", [[300, 300, 200, 300], [300, 300, 300, 310]])
def test_same_on_all_hosts_names_what_differs(mesh, monkeypatch, steps):
    expected = f"the hosts disagree about the step: from {min(steps)} to {max(steps)}"
    with pytest.raises(InputError, match=expected):
        device.same_on_all_hosts(four_hosts(mesh, monkeypatch, steps), "the step", 300)


def test_the_places_of_a_hosts_devices_are_checked_on_the_device(mesh):
    device._check_places(mesh)
    assert device._places() == (0, 1, 2, 3), "torch_xla names them in the order in which it fills them"
    with pytest.raises(RuntimeError, match="fills other rows"):
        device._check_places(dataclasses.replace(mesh, places=(0, 2, 1, 3)))


def test_the_rows_of_a_host_follow_its_devices(mesh):
    host = dataclasses.replace(mesh, num_devices=8, process_index=1, process_count=4)
    assert host.rows(16).tolist() == [4, 5, 6, 7]
    assert dataclasses.replace(host, places=(6, 1)).rows(16).tolist() == [12, 13, 2, 3]
    assert mesh.rows(12).tolist() == list(range(12))


def test_signals_set_a_flag_and_their_handlers_come_back(mesh):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        with device.stop_requested(mesh) as stopped:
            assert not stopped()
            os.kill(os.getpid(), number)
            assert stopped()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(ZeroDivisionError), device.stop_requested(mesh):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_ctrl_c_interrupts_at_once(mesh):
    with pytest.raises(KeyboardInterrupt), device.stop_requested(mesh) as stopped:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)


def test_hosts_agree_about_signals_in_some_calls_only(mesh, monkeypatch):
    compared = []

    def over_hosts(mesh, value):
        compared.append(value)
        return device.OverHosts(0, value, value)

    monkeypatch.setattr(device, "over_hosts", over_hosts)
    with device.stop_requested(dataclasses.replace(mesh, process_count=2), every=3) as stopped:
        assert [stopped() for _ in range(4)] == [False] * 4 and compared == [0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert [stopped() for _ in range(2)] == [False, True] and compared == [0, 1]


def test_only_the_common_module_imports_torch_xla():
    """The move to TorchTPU must touch these files alone (the tests look inside, so they are apart)."""
    root = Path(device.__file__).parents[2]
    users = [path for folder in ("train", "models", "data") for path in (root / folder).rglob("*.py")]
    users = [path.relative_to(root) for path in users if "import torch_xla" in path.read_text()]
    assert users and all(path.parent == Path("train/common") for path in users)


# ---- loops on the device ---------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Reads its tied matrix twice, so that a loop with its weights untied or out of date would show."""

    def __init__(self):
        super().__init__()
        self.tied = Tied()
        self.register_buffer("shift", torch.randn(6) / 10)

    def forward(self, x):
        return torch.tanh(self.tied.head(x + self.shift) @ self.tied.embedding.weight / 2)


def round_of(model, state, reads):
    """One round: it ends when `limit` rounds are over; of rows whose limit is lower the state stays."""
    going = (state["time"] < reads["limit"])[:, None]
    new = {"x": torch.where(going, model(state["x"]) + reads["add"], state["x"]), "time": state["time"] + 1}
    return {"running": (new["time"] < reads["limit"]).any(), **new}


def python_loop(model, state, reads):
    while bool(state["running"]):
        state = round_of(model, state, reads)
    return state


def loop_input(mesh, limits, width: int = 6):
    """(state, what its rounds read) of 8 rows on the CPU, and the same sharded over the devices."""
    torch.manual_seed(3)
    state = {"running": torch.tensor(True), "x": torch.randn(8, width), "time": torch.tensor(0, dtype=torch.int32)}
    reads = {"add": torch.randn(8, width) / 5, "limit": torch.tensor(limits, dtype=torch.int32)}

    def upload(tensor):
        if not tensor.dim():
            return tensor.to(mesh.device)
        rows = xs.ShardingSpec(mesh.spmd, ("data",) + (None,) * (tensor.dim() - 1))
        return xm.send_cpu_data_to_device(tensor, mesh.device, rows)[0]

    on_device = [{name: upload(tensor) for name, tensor in each.items()} for each in (state, reads)]
    return (state, reads), tuple(on_device)


def looping(mesh, model):
    """The compiled loop on a model that is on the device; its `rounds` are those that Python has traced."""

    def body(state, reads):
        run_loop.rounds += 1
        return round_of(model, state, reads)

    loop = device.WhileLoop(body, model)

    def run_loop(state, reads):
        with torch.no_grad():
            return loop(state, reads)

    run_loop.rounds = 0
    compiled = device.compiled(run_loop, mesh)
    compiled.traced = lambda: run_loop.rounds
    return compiled


def chain(mesh, optimizer=sgd):
    """A model on the CPU, and the same with its optimizer on the device."""
    torch.manual_seed(0)
    reference = Chain()
    torch.manual_seed(0)
    model = device.to_device(Chain(), mesh)
    made = optimizer(model.parameters())
    device.init_optimizer_state(made, mesh)
    return (reference, optimizer(reference.parameters())), (model, made)


def test_a_loop_on_sharded_state_gives_the_numbers_of_a_python_loop(mesh):
    (reference, _), (model, _) = chain(mesh)
    run_loop = looping(mesh, model)
    torch_xla.sync()
    # Three lengths of the same loop: it ends when the device says so, and the program is one.
    for number, limits in enumerate(([3] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [1] * 8)):
        on_cpu, on_device = loop_input(mesh, limits)
        assert "devices=[4" in torch_xla._XLAC._get_xla_sharding_spec(on_device[0]["x"])
        with torch.no_grad():
            expected = python_loop(reference, *on_cpu)
        reads, found = device.host_reads(), {}
        graphs = graphs_of(lambda found=found, given=on_device: found.update(run_loop(*given)))
        assert graphs <= (number == 0) and device.host_reads() == reads
        assert found["time"].item() == expected["time"].item() == max(limits)
        assert not found["running"].item()
        torch.testing.assert_close(found["x"].cpu(), expected["x"])
    assert run_loop.traced() == 1


def test_a_loop_that_is_not_to_run_returns_its_state(mesh):
    _, (model, _) = chain(mesh)
    (state, _), (on_device, reads) = loop_input(mesh, [4] * 8)
    on_device["running"] = torch.tensor(False).to(mesh.device)
    found = looping(mesh, model)(on_device, reads)
    assert torch.equal(found["x"].cpu(), state["x"]) and found["time"].item() == 0


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_loop_between_train_steps_has_the_weights_of_the_moment_and_compiles_nothing_again(mesh, optimizer):
    (reference, expected_optimizer), (model, made) = chain(mesh, optimizer)

    def mean_step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    run_loop, step = looping(mesh, model), device.compiled(mean_step, mesh)
    on_cpu, _ = loop_input(mesh, [1, 2, 3, 4, 5, 6, 7, 8])
    results = []
    for number in range(4):
        # New tensors each time, as a loader's are.
        _, (state, reads) = loop_input(mesh, [1, 2, 3, 4, 5, 6, 7, 8])
        mean_step(reference, expected_optimizer, on_cpu[0]["x"])
        with torch.no_grad():
            expected = python_loop(reference, *on_cpu)["x"]
        found = {}

        def train_and_loop(state=state, reads=reads, found=found):
            step(model, made, state["x"])
            found.update(run_loop(state, reads))

        assert graphs_of(train_and_loop) <= (2 if number == 0 else 0)
        torch.testing.assert_close(found["x"].cpu(), expected, rtol=1e-4, atol=1e-4)
        results.append(expected)
    assert all((a - b).abs().max() > 0.01 for a, b in itertools.pairwise(results))  # the weights do move
    assert model.tied.head.weight is model.tied.embedding.weight
    assert {id(p) for p in model.parameters()} == {id(p) for p in made.param_groups[0]["params"]}
    assert device.graph_report()["recompilations"] == []


def test_a_loop_follows_the_mode_and_the_precision(mesh):
    model = device.to_device(nn.BatchNorm1d(6), mesh)
    with torch.no_grad():
        model.running_mean.fill_(1.0)
        device.replicate(model.running_mean, mesh)

    def body(state, reads):
        x = F.batch_norm(state["x"], model.running_mean, model.running_var) if not model.training else -state["x"]
        dtype = torch.float32 if torch.is_autocast_enabled("xla") else torch.float16
        return {"running": state["running"] & False, "x": x, "rounded": (reads["add"] / 3).to(dtype).float()}

    loop = device.WhileLoop(body, model)

    def run_loop(model, state, reads, half):
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=not half):
            return loop({**state, "rounded": reads["add"]}, reads)

    step = device.compiled(run_loop, mesh, 4)
    for training in (False, True):
        for half in (False, True):
            (state, reads), (on_device, on_device_reads) = loop_input(mesh, [1] * 8)
            del on_device["time"]
            found = step(model.train(training), on_device, on_device_reads, half)
            expected = -state["x"] if training else (state["x"] - 1) / (1 + model.eps) ** 0.5
            torch.testing.assert_close(found["x"].cpu(), expected)
            error = (found["rounded"].cpu() - reads["add"] / 3).abs().max()
            assert (error > 1e-6) == half


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda new: {**new, "x": new["x"][:, :4]}, r"\(8, 6\).* became .*\(8, 4\)"),
        (lambda new: {**new, "time": new["time"].float()}, r"torch.int32.* became .*torch.float32"),
        (lambda new: {**new, "more": new["x"]}, r"'more': None.* became .*\(8, 6\)"),
        (lambda new: {name: new[name] for name in ("running", "x")}, r"'time': .* became \{'time': None\}"),
    ],
    ids=["shape", "type", "one more", "one less"],
)
def test_a_loop_whose_body_changes_its_state_is_refused(mesh, change, words):
    _, (model, _) = chain(mesh)
    loop = device.WhileLoop(lambda state, reads: change(round_of(model, state, reads)), model)
    _, on_device = loop_input(mesh, [2] * 8)
    weight = model.tied.embedding.weight
    with pytest.raises(ValueError, match=f"must keep names, shapes and types: .*{words}"):
        loop(*on_device)
    assert model.tied.embedding.weight is weight is model.tied.head.weight  # the stand-ins are gone


# ---- gradients of several batches ------------------------------------------------------------------------------------


def test_gradients_of_several_batches_add_up_in_their_buffers(mesh):
    expected, expected_optimizer, _, _ = make(sgd)
    model, made, _, _ = on_mesh(mesh, sgd)
    totals = device.gradient_buffers(model, ("loss", "tokens"), mesh)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert {name: total.item() for name, total in totals.items()} == {"loss": 0.0, "tokens": 0.0}
    assert all(not gradient.cpu().any() for gradient in gradients)

    def add_step(model, x, y, totals):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        totals["loss"].add_(loss.detach())
        totals["tokens"].add_(y.shape[0])

    def apply_step(model, optimizer, totals):
        for parameter in model.parameters():
            parameter.grad.div_(totals["tokens"])
        optimizer.step()
        mean = totals["loss"] / totals["tokens"]
        for tensor in [*totals.values(), *(parameter.grad for parameter in model.parameters())]:
            tensor.zero_()
        return mean

    add, apply = device.compiled(add_step, mesh), device.compiled(apply_step, mesh)
    for update in range(3):
        torch.manual_seed(update)
        x, y = torch.randint(0, 11, (24,)), torch.randint(0, 11, (24,))
        loss = train_step(expected, expected_optimizer, x, y)
        for part in range(3):
            rows = slice(8 * part, 8 * part + 8)
            add(model, x[rows].to(mesh.device), y[rows].to(mesh.device), totals)
        assert device.fetch([apply(model, made, totals)]) == pytest.approx([loss.item()], rel=1e-5)
        for ours, theirs in zip(host(model.parameters()), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch_xla._XLAC._get_xla_sharding_spec(gradient) == "{replicated}" for gradient in gradients)
    assert device.graph_report()["recompilations"] == []
