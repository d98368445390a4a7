"""Steps that are started again without being traced: the same bits as traced ones, and never an old program for new
facts."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.debug.metrics as met
from helpers import Net, on_mesh, update
from torch import nn
from torch_xla.utils.checkpoint import checkpoint

from train.common import device
from train.common.mesh import GraphError
from train.common.xla import replay

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


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_repeated_steps_are_traced_ones_bit_for_bit(mesh, optimizer):
    """Dropout's numbers, from a seed and after it; batch norm's buffers; a program for each of two shapes; and learning
    rates that change, through 0 and 1, too, and differ between groups."""
    short, long = batches(mesh, 5), batches(mesh, 4, 16)
    inputs = [short[0], *(x for pair in zip(long, short[1:], strict=True) for x in pair)]
    found = []
    for strict in (False, True):  # a step that is not strict is traced in every call
        device.graph_report(reset=True)
        model, made = make(mesh, optimizer)
        step, losses = device.compiled(train_step, dataclasses.replace(mesh, strict=strict), 2), []
        for number, x in enumerate(inputs):
            device.set_lr(made, [0.1, 0.0, 0.05, 1.0, 0.2, 1e-9, 0.3, 0.1, 0.02][number])
            if optimizer is sgd:
                made.param_groups[1]["lr"] *= 0.7 + number / 10
            if number in (0, 6):
                device.seed_step(3, number)
            losses.append(step(model, made, x)["loss"])
        state = [*model.state_dict().values(), *(tensor for each in made.state.values() for tensor in each.values())]
        found.append((device.fetch(losses), [tensor.cpu() for tensor in state], device.graph_report()))
    (losses, state, traced), (other_losses, other_state, repeated) = found
    assert losses == other_losses and all(map(torch.equal, state, other_state))
    assert [(report["traced"], report["repeated"]) for report in (traced, repeated)] == [(9, 0), (4, 5)]
    assert repeated["recompilations"] == []


def test_buffers_are_donated_and_what_others_hold_of_a_parameter_stays_true(mesh):
    """Without donors a step needs the memory of its state twice. A detached view and a state_dict see the update."""
    (model, made), inputs = make(mesh), batches(mesh, 4)

    def scaled_step(model, optimizer, x):
        return train_step(model, optimizer, x * 1.0625)  # a graph that no other test has compiled

    step = device.compiled(scaled_step, mesh)
    step(model, made, inputs[0])
    state = len(list(model.parameters())) * 2 + len(list(model.buffers()))
    assert met.metric_data("InputOutputAliasCount")[-1][-1][1] == state
    for x in inputs[1:3]:
        step(model, made, x)
    view, state, before = model.bias.detach(), model.state_dict(), model.bias.detach().cpu()
    step(model, made, inputs[3])
    assert device.graph_report()["repeated"] == 2
    after = model.bias.detach().cpu()
    assert not torch.equal(after, before)
    assert torch.equal(view.cpu(), after) and torch.equal(state["bias"].cpu(), after)


NUMBERS = itertools.count()
# Steps that cannot be repeated, and why. `other` is a tensor that is not among the arguments.
UNREPEATABLE = {
    "changes another": (
        lambda other, model, made, x: train_step(model, made, x * other.mul_(1.5)),
        "changes or keeps 1 tensors that are neither among its arguments nor among its results",
    ),
    "reads another": (
        lambda other, model, made, x: train_step(model, made, x * other),
        r"reads a tensor \[8, 6\] that is not among its arguments: pass it, or its module",
    ),
    "makes another number": (
        lambda other, model, made, x: train_step(model, made, x + torch.tensor([next(NUMBERS)] * 6).to(x.device)),
        "a number or tensor that it makes differs from call to call",
    ),
    "returns a gradient function": (
        lambda other, model, made, x: train_step(model, made, x) | {"out": model(x)},
        r"returns a tensor with a gradient function \(.detach\(\) it\)",
    ),
    "leaves gradients": (
        lambda other, model, made, x: F.mse_loss(model(x), x).backward(),
        "leaves gradients, makes state, or changes a Python value among its arguments",
    ),
    # It would train wrongly: the seed that dropout draws from is set to a number of the host.
    "recomputes": (
        lambda other, model, made, x: train_step(lambda x: checkpoint(model, x + 0 * model.bias), made, x),
        "sets the random state, as torch_xla.utils.checkpoint does.*keeps dropout's masks or seeds",
    ),
}


@pytest.mark.parametrize(("step_fn", "reason"), UNREPEATABLE.values(), ids=UNREPEATABLE)
def test_what_cannot_be_repeated_is_refused(mesh, step_fn, reason):
    (model, made), (x, other) = make(mesh), batches(mesh, 2)
    step = device.compiled(partial(step_fn, other), mesh)
    with pytest.raises(GraphError, match=f"cannot be repeated: .*{reason}.*or use --no-strict"):
        for _ in range(2):
            step(model, made, x)
    torch_xla._XLAC._clear_pending_irs(str(mesh.device))
    assert torch_xla._XLAC._xla_set_rng_seed is SET_SEED


def test_other_facts_are_another_program(mesh):
    (model, made), (x,) = make(mesh), batches(mesh, 1)
    step = device.compiled(train_step, mesh)

    def assert_other_program():
        with pytest.raises(GraphError, match="compiled again for known input shapes"):
            step(model, made, x)
        step(model, made, x)  # confirms that program: from now on it starts without a trace

    for _ in range(3):
        step(model, made, x)
    model.inner.bias.requires_grad_(False)
    assert_other_program()
    model.dropout.eval()
    assert_other_program()
    made.param_groups[1]["weight_decay"] = 0.0
    assert_other_program()


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
    with pytest.raises(GraphError, match="compiled again"):
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
        return arguments.signature, arguments.guards

    config = object()
    assert facts({"a": 1}, config, None) == facts({"a": 1}, config, None)
    for other in (facts({"a": 2}, config, None), facts({"a": 1}, object(), None), facts({"a": 1}, config, config)):
        assert facts({"a": 1}, config, None) != other
    gone, other = facts(nn.Identity()), facts(nn.Identity())
    assert gone != other  # a dead object equals none
