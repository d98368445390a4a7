"""Steps that are started again without being traced: the same bits as traced ones, and never an old
program for new facts."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """Returns so many batches [size, 6] on the devices, the same in each call."""
    torch.manual_seed(1)
    made = [torch.randn(size, 6).to(mesh.device) for _ in range(count)]
    for tensor in made:
        device.annotate(tensor, mesh.spmd, ("data", None))
    torch_xla.sync()
    return made


def sgd(parameters):
    """Returns SGD with two groups."""
    parameters = list(parameters)
    groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)


adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=1e-2, foreach=False)


def make(mesh, optimizer=sgd):
    """Returns a model and its optimizer, the same in each call."""
    torch.manual_seed(0)
    return on_mesh(mesh, Net(), optimizer)


def train_step(model, optimizer, x):
    return {"loss": update(F.mse_loss(model(x), x), optimizer), "mean": x.mean()}


@dataclass
class Trained:
    """What a training gave."""

    losses: list[float]
    tensors: list[torch.Tensor]  # of model and optimizer, on the host
    report: dict[str, Any]  # on graphs


RATES = [0.1, 0.0, 0.05, 1.0, 0.2, 1e-9, 0.3, 0.1, 0.02]  # through 0 and 1, too


def trained(mesh, optimizer, inputs: list[torch.Tensor], strict: bool) -> Trained:
    """Trains a step per input; each group of SGD has its own rate, and seeds are set twice."""
    device.graph_report(reset=True)
    model, made = make(mesh, optimizer)
    step = device.compiled(train_step, dataclasses.replace(mesh, strict=strict), 2)

    losses = []
    for number, x in enumerate(inputs):
        device.set_lr(made, RATES[number])
        if optimizer is sgd:
            made.param_groups[1]["lr"] *= 0.7 + number / 10
        if number in (0, 6):
            device.seed_step(3, number)
        losses.append(step(model, made, x)["loss"])

    tensors = list(model.state_dict().values())
    for of_parameter in made.state.values():
        tensors += of_parameter.values()
    losses = device.fetch(losses)
    tensors = [tensor.cpu() for tensor in tensors]
    return Trained(losses, tensors, device.graph_report())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_repeated_steps_are_traced_ones_bit_for_bit(mesh, optimizer):
    """Dropout's numbers, from a seed and after it; batch norm's buffers; a program for each of two
    shapes; and learning rates that change and differ between groups."""
    short = batches(mesh, 5)
    long = batches(mesh, 4, 16)
    inputs = [short[0]]
    for long_one, short_one in zip(long, short[1:], strict=True):
        inputs += [long_one, short_one]

    traced = trained(mesh, optimizer, inputs, strict=False)  # then each call is traced
    repeated = trained(mesh, optimizer, inputs, strict=True)

    assert traced.losses == repeated.losses
    assert all(map(torch.equal, traced.tensors, repeated.tensors))
    assert traced.report["traced"] == 9
    assert traced.report["repeated"] == 0
    assert repeated.report["traced"] == 4
    assert repeated.report["repeated"] == 5
    assert repeated.report["recompilations"] == []


def test_buffers_are_donated_and_views_of_a_parameter_stay_true(mesh):
    """Without donors a step needs the memory of its state twice. A detached view and a state_dict
    see the update."""
    model, made = make(mesh)
    inputs = batches(mesh, 4)

    def scaled_step(model, optimizer, x):
        return train_step(model, optimizer, x * 1.0625)  # a graph that no other test has compiled

    step = device.compiled(scaled_step, mesh)
    step(model, made, inputs[0])
    donated = met.metric_data("InputOutputAliasCount")[-1][-1][1]
    assert donated == len(list(model.parameters())) * 2 + len(list(model.buffers()))

    for x in inputs[1:3]:
        step(model, made, x)
    view = model.bias.detach()
    state = model.state_dict()
    before = model.bias.detach().cpu()
    step(model, made, inputs[3])

    assert device.graph_report()["repeated"] == 2
    after = model.bias.detach().cpu()
    assert not torch.equal(after, before)
    assert torch.equal(view.cpu(), after)
    assert torch.equal(state["bias"].cpu(), after)


# Steps that cannot be repeated. `other` is a tensor that is not among the arguments.

COUNTER = itertools.count()


def changes_another(other, model, made, x):
    return train_step(model, made, x * other.mul_(1.5))


def reads_another(other, model, made, x):
    return train_step(model, made, x * other)


def makes_another_number(other, model, made, x):
    number = torch.tensor([next(COUNTER)] * 6)
    return train_step(model, made, x + number.to(x.device))


def returns_a_gradient_function(other, model, made, x):
    metrics = train_step(model, made, x)
    return metrics | {"out": model(x)}


def leaves_gradients(other, model, made, x):
    F.mse_loss(model(x), x).backward()


def recomputes(other, model, made, x):
    def recomputed(x):
        return checkpoint(model, x + 0 * model.bias)

    return train_step(recomputed, made, x)


@dataclass(frozen=True)
class Unrepeatable:
    """A step that is refused, and the reason that is given."""

    step_fn: Callable
    reason: str


UNREPEATABLE = {
    "changes another": Unrepeatable(
        changes_another,
        "changes or keeps 1 tensors that are neither among its arguments nor among its results",
    ),
    "reads another": Unrepeatable(
        reads_another,
        r"reads a tensor \[8, 6\] that is not among its arguments: pass it, or its module",
    ),
    "makes another number": Unrepeatable(
        makes_another_number,
        "a number or tensor that it makes differs from call to call",
    ),
    "returns a gradient function": Unrepeatable(
        returns_a_gradient_function,
        r"returns a tensor with a gradient function \(.detach\(\) it\)",
    ),
    "leaves gradients": Unrepeatable(
        leaves_gradients,
        "leaves gradients, makes state, or changes a Python value among its arguments",
    ),
    # It would train wrongly: the seed that dropout draws from is set to a number of the host.
    "recomputes": Unrepeatable(
        recomputes,
        "sets the random state, as torch_xla.utils.checkpoint does.*keeps dropout's masks or seeds",
    ),
}


@pytest.mark.parametrize("case", UNREPEATABLE.values(), ids=UNREPEATABLE)
def test_what_cannot_be_repeated_is_refused(mesh, case):
    model, made = make(mesh)
    x, other = batches(mesh, 2)
    step = device.compiled(partial(case.step_fn, other), mesh)

    message = f"cannot be repeated: .*{case.reason}.*or use --no-strict"
    with pytest.raises(GraphError, match=message):
        for _ in range(2):
            step(model, made, x)

    torch_xla._XLAC._clear_pending_irs(str(mesh.device))
    assert torch_xla._XLAC._xla_set_rng_seed is SET_SEED


# Which program a call starts


def test_other_facts_are_another_program(mesh):
    model, made = make(mesh)
    (x,) = batches(mesh, 1)
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
            weight = model.weight.detach().cpu()
            bias = model.bias.detach().cpu()
            expected = F.linear(x.cpu(), weight, bias)
            torch.testing.assert_close(step(model, x)["out"].cpu(), expected)
    assert device.graph_report()["recompilations"] == []


def test_a_tensor_given_twice_is_another_call_than_two_tensors(mesh):
    def constants(x, y):  # equal ones, too
        return {"out": torch.where(x == x, x * 2 + y, torch.nan)}

    step = device.compiled(constants, mesh)
    a, b = batches(mesh, 2)
    for x, y in ((a, b), (b, a), (a, b)):
        expected = x.cpu() * 2 + y.cpu()
        torch.testing.assert_close(step(x, y)["out"].cpu(), expected)
    with pytest.raises(GraphError, match="compiled again"):
        step(b, b)


def test_arguments_are_looked_up_in_every_call(mesh):
    """A batch is another object each time; what comes back may be an argument itself, or a view."""

    def step_fn(batch):
        x = batch["x"]
        return {"double": x * 2, "same": x, "column": (x * 3)[:, 1]}

    step = device.compiled(step_fn, mesh)
    for x in batches(mesh, 4):
        found = step({"x": x})
        assert list(found) == ["double", "same", "column"]
        assert torch.equal(found["same"].cpu(), x.cpu())
        assert torch.equal(found["double"].cpu(), x.cpu() * 2)
        assert torch.equal(found["column"].cpu(), x.cpu()[:, 1] * 3)
    assert found["same"] is x
    assert device.graph_report()["repeated"] == 2


def facts(*args):
    arguments = replay.Arguments(args)
    return arguments.signature, arguments.guards


def test_facts_are_compared_by_value_and_objects_by_identity():
    config = object()
    expected = facts({"a": 1}, config, None)

    assert facts({"a": 1}, config, None) == expected
    assert facts({"a": 2}, config, None) != expected
    assert facts({"a": 1}, object(), None) != expected
    assert facts({"a": 1}, config, config) != expected


def test_a_dead_object_equals_no_other():
    gone = facts(nn.Identity())
    other = facts(nn.Identity())
    assert gone != other
