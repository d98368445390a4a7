"""Steps that are started again without being traced: the same bits as traced ones, and never an old program for new
facts."""

import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.debug.metrics as met
from helpers import Net, on_mesh, update
from torch import nn
from torch_xla.utils.checkpoint import checkpoint

from train.common import device
from train.common.xla import replay, staging

SET_SEED = torch_xla._XLAC._xla_set_rng_seed


def batches(mesh, count: int, size: int = 8):
    torch.manual_seed(1)
    made = [torch.randn(size, 6).to(mesh.device) for _ in range(count)]
    for tensor in made:
        device.annotate(tensor, mesh.spmd, ("data", None))
    torch_xla.sync()
    return made


def sgd(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)


adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=1e-2, foreach=False)


def make(mesh, optimizer=sgd):
    torch.manual_seed(0)
    return on_mesh(mesh, Net(), optimizer)


def train_step(model, optimizer, x):
    return {"loss": update(F.mse_loss(model(x), x), optimizer), "mean": x.mean()}


def traced_and_repeated(mesh, inputs, optimizer, step_of, each=lambda *_: None, max_graphs: int = 1) -> dict:
    """Checks that the losses and the state of steps on `inputs` are the same bits where every call is traced, and
    returns the report of the other run; `each` is called before each step."""
    found = []
    for one in (dataclasses.replace(mesh, strict=False), mesh):
        device.graph_report(reset=True)
        model, made = make(one, optimizer)
        device.seed_step(7, 0)
        step, losses = device.compiled(step_of(), one, max_graphs), []
        for number, x in enumerate(inputs):
            each(number, made)
            losses.append(step(model, made, x)["loss"])
        state = [*model.state_dict().values(), *(tensor for each in made.state.values() for tensor in each.values())]
        found.append((device.fetch(losses), [tensor.cpu() for tensor in state], device.graph_report()))
    (losses, state, traced), (other_losses, other_state, repeated) = found
    assert losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(state, other_state, strict=True))
    assert (traced["traced"], traced["repeated"]) == (len(inputs), 0)
    assert repeated["traced"] + repeated["repeated"] == len(inputs) and repeated["recompilations"] == []
    return repeated


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("seeded", [True, False])
def test_repeated_steps_are_traced_ones_bit_for_bit(mesh, optimizer, seeded):
    """Dropout's numbers, batch norm's buffers, a program for each of two shapes, and learning rates that change,
    through 0 and 1, too, and differ between groups."""

    def each(number, made):
        device.set_lr(made, [0.1, 0.0, 0.05, 1.0, 0.2, 1e-9, 0.3, 0.1, 0.02][number])
        if optimizer is sgd:
            made.param_groups[1]["lr"] *= 0.7 + number / 10
        if seeded or number == 0:
            device.seed_step(3, number)

    short, long = batches(mesh, 5), batches(mesh, 4, 16)
    inputs = [short[0], *(x for pair in zip(long, short[1:], strict=True) for x in pair)]
    report = traced_and_repeated(mesh, inputs, optimizer, lambda: train_step, each, 2)
    assert (report["traced"], report["repeated"]) == (4, 5)


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


def test_buffers_are_donated(mesh):
    """Otherwise a step needs the memory of its state twice."""
    inputs, (model, made) = batches(mesh, 2), make(mesh)

    def scaled_step(model, optimizer, x):
        return train_step(model, optimizer, x * 1.0625)  # a graph that no other test has compiled

    device.compiled(scaled_step, mesh)(model, made, inputs[0])
    state = len(list(model.parameters())) * 2 + len(list(model.buffers()))
    assert met.metric_data("InputOutputAliasCount")[-1][-1][1] == state


def changes_another(mesh):
    (factor,) = batches(mesh, 1)

    def step(model, made, x):
        result = train_step(model, made, x * factor)
        factor.mul_(1.5)
        return result

    return step


def reads_another(mesh):
    (factor,) = batches(mesh, 1)
    return lambda model, made, x: train_step(model, made, x * factor)


def makes_another_number(mesh):
    numbers = iter([0.25, 1.25])
    return lambda model, made, x: train_step(model, made, x + torch.tensor([next(numbers)] * 6).to(x.device))


def returns_a_gradient_function(mesh):
    return lambda model, made, x: train_step(model, made, x) | {"out": model(x)}


def recomputes(mesh):
    """Trains wrongly if it is repeated: the seed that dropout draws from is set to a number of the host."""
    return lambda model, made, x: train_step(lambda x: checkpoint(model, x + 0 * model.bias), made, x)


def leaves_gradients(mesh):
    return lambda model, made, x: F.mse_loss(model(x), x).backward()


def counts(mesh):
    def step(model, made, x):
        made.param_groups[0]["weight_decay"] += 0.1
        return train_step(model, made, x)

    return step


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("step_of", "reason"),
    [
        (changes_another, "changes or keeps 1 tensors that are neither among its arguments nor among its results"),
        (reads_another, r"reads a tensor \[8, 6\] that is not among its arguments: pass it, or its module"),
        (makes_another_number, "a number or tensor that it makes differs from call to call"),
        (returns_a_gradient_function, r"returns a tensor with a gradient function \(.detach\(\) it\)"),
        (recomputes, "sets the random state, as torch_xla.utils.checkpoint does.*keeps dropout's masks or seeds"),
        (leaves_gradients, "leaves gradients, makes state, or changes a Python value among its arguments"),
        (counts, "changes a Python value among its arguments"),
    ],
)
def test_what_cannot_be_repeated_is_refused(mesh, step_of, optimizer, reason):
    (model, made), (x,) = make(mesh, optimizer), batches(mesh, 1)
    step = device.compiled(step_of(mesh), mesh)
    with pytest.raises(device.GraphError, match=f"cannot be repeated: .*{reason}.*or use --no-strict"):
        for _ in range(2):
            step(model, made, x)
    torch_xla._XLAC._clear_pending_irs(str(mesh.device))
    assert torch_xla._XLAC._xla_set_rng_seed is SET_SEED


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
    def constants(x, y):  # equal ones, too
        return {"out": torch.where(x == x, x * 2 + y, torch.nan)}

    step = device.compiled(constants, mesh)
    a, b = batches(mesh, 2)
    for x, y in ((a, b), (b, a), (a, b)):
        torch.testing.assert_close(step(x, y)["out"].cpu(), x.cpu() * 2 + y.cpu())
    with pytest.raises(device.GraphError, match="compiled again"):
        step(b, b)


def test_arguments_are_looked_up_in_every_call(mesh):
    """A batch is another object each time; what comes back may be an argument itself, or a view."""
    step = device.compiled(
        lambda batch: {"double": batch["x"] * 2, "same": batch["x"], "column": (batch["x"] * 3)[:, 1]}, mesh
    )
    for x in batches(mesh, 4):
        found = step({"x": x})
        assert list(found) == ["double", "same", "column"] and torch.equal(found["same"].cpu(), x.cpu())
        assert torch.equal(found["double"].cpu(), x.cpu() * 2)
        assert torch.equal(found["column"].cpu(), x.cpu()[:, 1] * 3)
    assert found["same"] is x and device.graph_report()["repeated"] == 2


def test_facts_are_compared_by_value_and_objects_by_identity():
    def facts(*args):
        arguments = replay.Arguments(args)
        return arguments.inputs, arguments.facts

    config = object()
    assert facts({"a": 1}, config, None) == facts({"a": 1}, config, None)
    for other in (facts({"a": 2}, config, None), facts({"a": 1}, object(), None), facts({"a": 1}, config, config)):
        assert facts({"a": 1}, config, None) != other
    gone, other = facts(nn.Identity()), facts(nn.Identity())
    assert gone != other  # a dead object equals none


class State(NamedTuple):
    """What a script's step works on."""

    model: nn.Module
    batches: list


def test_staging_names_a_tensor_by_the_fields_that_lead_to_it():
    state = State(nn.Linear(2, 1), [torch.zeros(1)])
    names = [name for name, _ in staging._named({"state": state, "x": torch.zeros(1)})]
    assert names == ["state.model.weight", "state.model.bias", "state.batches.0", "x"]
