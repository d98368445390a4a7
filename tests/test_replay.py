"""Steps that are started again without being traced: the same bits as traced ones, and never an old program for new
facts."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

from train.common import device
from train.common.accumulate import gradient_buffers
from train.common.xla import replay
from train.common.xla.compiled import CompiledStep, GraphReport


@pytest.fixture(scope="module")
def mesh():
    return device.setup(seed=0, precision="float32")


@pytest.fixture(scope="module")
def lenient(mesh):
    """Where every call is traced."""
    return dataclasses.replace(mesh, strict=False)


@pytest.fixture(autouse=True)
def fresh_report():
    device.reset_graph_report()


def upload(mesh, tensor):
    tensor = tensor.to(mesh.device)
    device.annotate(tensor, mesh.spmd, ("data",) + (None,) * (tensor.dim() - 1))
    return tensor


def batches(mesh, count: int, size: int = 8):
    torch.manual_seed(1)
    made = [upload(mesh, torch.randn(size, 6)) for _ in range(count)]
    torch_xla.sync()
    return made


class Net(nn.Module):
    """Has what a trained model has: tied weights, dropout, batch norm, whose buffers change."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.25)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        hidden = self.dropout(torch.relu(self.norm(self.inner(x))))
        return F.linear(hidden, self.inner.weight.t(), self.bias)


def sgd(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=1e-2, foreach=False)


def make(mesh, optimizer=sgd):
    torch.manual_seed(0)
    model = device.to_device(Net(), mesh)
    made = optimizer(model.parameters())
    device.init_optimizer_state(made, mesh)
    return model, made


def train_step(model, optimizer, x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), "mean": x.mean()}


def run(mesh, inputs, optimizer=sgd, step_fn=train_step, each=lambda *_: None, max_graphs: int = 1):
    """(losses, state, report) after a step on each input; `each` is called before it."""
    device.reset_graph_report()
    model, made = make(mesh, optimizer)
    device.seed_step(7, 0)
    step, losses = device.compiled(step_fn, mesh, max_graphs), []
    for number, x in enumerate(inputs):
        each(number, model, made)
        losses.append(step(model, made, x)["loss"])
    state = [tensor.cpu() for tensor in model.state_dict().values()]
    state += [tensor.cpu() for one in made.state.values() for tensor in one.values()]
    return device.fetch(losses), state, device.graph_report()


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("seeded", [True, False])
def test_repeated_steps_are_traced_ones_bit_for_bit(mesh, lenient, optimizer, seeded):
    """Dropout's numbers, batch norm's buffers and a learning rate that changes, through 0 and 1, too."""

    def each(number, model, made):
        device.set_lr(made, [0.1, 0.0, 0.05, 1.0, 0.2, 1e-9, 0.3][number])
        if seeded or number == 0:
            device.seed_step(3, number)

    inputs = batches(mesh, 7)
    traced, repeated = run(lenient, inputs, optimizer, each=each), run(mesh, inputs, optimizer, each=each)
    same(traced, repeated)
    assert (traced[2]["traced"], traced[2]["repeated"]) == (7, 0)
    assert (repeated[2]["traced"], repeated[2]["repeated"]) == (2, 5)
    assert repeated[2]["recompilations"] == repeated[2]["not_repeatable"] == []


def test_each_shape_is_a_program_of_its_own(mesh, lenient):
    short, long = batches(mesh, 4), batches(mesh, 4, 16)
    inputs = [x for pair in zip(short, long, strict=True) for x in pair]
    traced, repeated = run(lenient, inputs, max_graphs=2), run(mesh, inputs, max_graphs=2)
    same(traced, repeated)
    assert (repeated[2]["traced"], repeated[2]["repeated"]) == (4, 4)


def test_learning_rates_of_groups_are_their_own(mesh, lenient):
    def each(number, model, made):
        made.param_groups[0]["lr"], made.param_groups[1]["lr"] = 0.1 / (number + 1), 0.02 * (number + 2)

    inputs = batches(mesh, 5)
    same(run(lenient, inputs, each=each), run(mesh, inputs, each=each))


def test_sums_of_gradients_are_kept_between_steps(mesh, lenient):
    def accumulate(model, totals, x):
        loss = model(x).square().mean()
        loss.backward()
        totals["loss"] += loss.detach()

    def update(model, optimizer, totals):
        optimizer.step()
        result = {"loss": totals["loss"].clone()}
        for tensor in (totals["loss"], *(p.grad for p in model.parameters())):
            tensor.zero_()
        return result

    found = []
    for each in (lenient, mesh):
        device.reset_graph_report()
        model, made = make(each)
        totals = gradient_buffers(model, ["loss"], each)
        gradient_fn, update_fn = device.compiled(accumulate, each), device.compiled(update, each)
        losses = []
        device.seed_step(7, 0)
        for number, x in enumerate(batches(each, 9)):
            gradient_fn(model, totals, x)
            if number % 3 == 2:
                losses.append(update_fn(model, made, totals)["loss"])
        found.append((device.fetch(losses), [p.detach().cpu() for p in model.parameters()]))
    same(*found)
    assert device.graph_report()["repeated"] == 8 and device.graph_report()["not_repeatable"] == []


def test_what_others_hold_of_a_parameter_stays_true(mesh):
    """A detached view and a state_dict see the update."""
    (model, made), inputs = make(mesh), batches(mesh, 4)
    step = device.compiled(train_step, mesh)
    for x in inputs[:3]:
        step(model, made, x)
    view, state, before = model.bias.detach(), model.state_dict(), model.bias.detach().cpu()
    step(model, made, inputs[3])
    assert device.graph_report()["repeated"] == 2
    after = model.bias.detach().cpu()
    assert not torch.equal(after, before)
    assert torch.equal(view.cpu(), after) and torch.equal(state["bias"].cpu(), after)


def test_what_is_loaded_between_two_steps_is_used(mesh):
    """load_state_dict of a model copies in place; that of an optimizer makes new tensors."""
    inputs = batches(mesh, 8)
    model, made = make(mesh)
    step = device.compiled(train_step, mesh)
    for x in inputs[:3]:
        step(model, made, x)
    weights = {key: tensor.cpu() for key, tensor in model.state_dict().items()}
    moments = [{k: v.cpu() for k, v in one.items()} for one in made.state.values()]
    expected = device.fetch([step(model, made, x)["loss"] for x in inputs[3:]])

    traced = device.graph_report()["traced"]
    for tensor, saved in zip(model.state_dict().values(), weights.values(), strict=True):
        tensor.copy_(saved)
        device.replicate(tensor, mesh)
    for parameter, saved in zip(list(made.state), moments, strict=True):
        made.state[parameter] = {k: v.to(mesh.device) for k, v in saved.items()}
        for tensor in made.state[parameter].values():
            device.replicate(tensor, mesh)
    device.seed_step(0, 0)
    found = device.fetch([step(model.eval().train(), made, x)["loss"] for x in inputs[3:]])
    assert len(set(expected)) == 5 and device.graph_report()["traced"] == traced
    # Dropout's numbers differ.
    assert found == pytest.approx(expected, rel=0.5) and found[0] != expected[-1]


def test_buffers_are_donated(mesh):
    """Otherwise a step needs the memory of its state twice."""

    def aliases():
        return met.metric_data("InputOutputAliasCount")[-1][-1][1]

    inputs, (model, made) = batches(mesh, 2), make(mesh)

    def scaled_step(model, optimizer, x):
        return train_step(model, optimizer, x * 1.0625)  # a graph that no other test has compiled

    device.compiled(scaled_step, mesh)(model, made, inputs[0])
    state = len(list(model.parameters())) * 2 + len(list(model.buffers()))
    assert aliases() == state


# ---- what cannot be repeated is traced -------------------------------------------------------------------------------


def reason_and_numbers(mesh, lenient, step_fn, inputs, optimizer=sgd):
    traced, repeated = (run(each, inputs, optimizer, step_fn()) for each in (lenient, mesh))
    same(traced, repeated)
    (reason,) = repeated[2]["not_repeatable"]
    assert repeated[2]["traced"] == len(inputs) and repeated[2]["recompilations"] == []
    return reason


def changes_another(mesh):
    factor = upload(mesh, torch.full((8, 6), 0.5))
    torch_xla.sync()

    def step(model, made, x):
        result = train_step(model, made, x * factor)
        factor.mul_(1.5)
        return result

    return step


OTHERS = "it changes or keeps 1 tensors that are neither among its arguments nor among its results"


def test_a_step_that_changes_another_tensor_is_traced(mesh, lenient, capsys):
    reason = reason_and_numbers(mesh, lenient, lambda: changes_another(mesh), batches(mesh, 4), adamw)
    assert reason == f"step is traced in every call: {OTHERS}"
    assert capsys.readouterr().out.count(f"note: step is traced in every call: {OTHERS}\n") == 1


def test_but_not_with_a_learning_rate_in_python(mesh):
    """It was traced with another one, and that change cannot be taken back."""
    with pytest.raises(device.GraphError, match=f"a Python number: {OTHERS}; pass what holds them to it"):
        run(mesh, batches(mesh, 1), sgd, changes_another(mesh))
    torch_xla._XLAC._clear_pending_irs(str(mesh.device))


def test_a_constant_of_a_closure_is_named(mesh, lenient):
    def make_step():
        factor = upload(mesh, torch.full((8, 6), 0.5))
        torch_xla.sync()
        return lambda model, made, x: train_step(model, made, x * factor)

    reason = reason_and_numbers(mesh, lenient, make_step, batches(mesh, 3))
    assert reason.endswith("it reads a tensor [8, 6] that is not among its arguments: pass it, or its module")


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_number_that_changes_from_call_to_call_is_seen_in_the_second(mesh, lenient, optimizer):
    def make_step():
        def step(model, made, x):
            noise = torch.tensor([0.25 if mesh_calls[0] else 0.5] * 6).to(x.device)
            return train_step(model, made, x + noise)

        return step

    mesh_calls = [0]

    def each(number, model, made):
        mesh_calls[0] = number % 2

    inputs = batches(mesh, 5)
    traced, repeated = (run(m, inputs, optimizer, make_step(), each=each) for m in (lenient, mesh))
    same(traced, repeated)
    assert repeated[2]["not_repeatable"] == [
        "step is traced in every call: a number or tensor that it makes differs from call to call"
    ]


def test_a_result_with_a_gradient_function_is_named(mesh):
    step = device.compiled(lambda model, x: model(x), mesh)
    model, _ = make(mesh)
    x = batches(mesh, 1)[0]
    for _ in range(3):
        assert step(model, x).requires_grad
    assert device.graph_report()["not_repeatable"][0].endswith("a gradient function (.detach() it)")


def test_a_python_value_that_changes_later_is_found(mesh):
    """Until then the program of before runs, as under jax.jit; the contract says so."""
    factor = [1.5]
    step = CompiledStep(lambda x: {"sum": (x * factor[0]).sum()}, True, GraphReport(), check_every=4)
    x = batches(mesh, 1)[0]
    for _ in range(3):
        step(x)
    factor[0] = 2.5
    with pytest.raises(device.GraphError, match="a number or tensor that it makes differs.*4 calls before"):
        for _ in range(3):
            step(x)


@pytest.mark.parametrize("change", ["freeze", "evaluate", "decay"])
def test_other_facts_are_another_program(mesh, change):
    (model, made), x = make(mesh), batches(mesh, 1)[0]
    step = device.compiled(train_step, mesh)
    for _ in range(3):
        step(model, made, x)
    if change == "freeze":
        model.inner.bias.requires_grad_(False)
    elif change == "evaluate":
        model.dropout.eval()
    else:
        made.param_groups[1]["weight_decay"] = 0.0
    with pytest.raises(device.GraphError, match="compiled again for known input shapes"):
        step(model, made, x)


def test_another_model_of_the_same_shape_is_its_own(mesh):
    x = batches(mesh, 1)[0]
    step = device.compiled(lambda model, x: {"out": model(x).detach()}, mesh)
    models = [device.to_device(nn.Linear(6, 2), mesh) for _ in range(2)]
    for _ in range(3):
        for model in models:
            expected = F.linear(x.cpu(), model.weight.detach().cpu(), model.bias.detach().cpu())
            torch.testing.assert_close(step(model, x)["out"].cpu(), expected)
    assert device.graph_report()["recompilations"] == []


def test_one_tensor_in_two_places_and_two_tensors_are_not_the_same_call(mesh):
    step = device.compiled(lambda x, y: {"out": x * 2 + y}, mesh)
    a, b = batches(mesh, 2)
    for x, y in ((a, b), (b, a), (a, b), (b, b)):
        if x is y:
            with pytest.raises(device.GraphError, match="compiled again"):
                step(x, y)
        else:
            torch.testing.assert_close(step(x, y)["out"].cpu(), x.cpu() * 2 + y.cpu())


def test_arguments_are_looked_up_in_every_call(mesh):
    """A batch is another object each time; what comes back may be an argument itself."""
    step = device.compiled(lambda batch: {"double": batch["x"] * 2, "same": batch["x"]}, mesh)
    for x in batches(mesh, 4):
        found = step({"x": x})
        assert found["same"] is x or torch.equal(found["same"].cpu(), x.cpu())
        assert torch.equal(found["double"].cpu(), x.cpu() * 2)
    assert device.graph_report()["repeated"] == 2


def test_facts_are_compared_by_value_and_objects_by_identity():
    config = object()
    one, other = replay.Arguments(({"a": 1}, config)), replay.Arguments(({"a": 1}, config))
    assert one.facts == other.facts
    assert one.facts != replay.Arguments(({"a": 2}, config)).facts
    assert one.facts != replay.Arguments(({"a": 1}, object())).facts
