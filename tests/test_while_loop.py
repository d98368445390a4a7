"""Loops on the device (train/common/xla/while_loop.py) beside the same loop in Python on the CPU."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from helpers import on_mesh, update
from torch import nn

from train.common import device
from train.common.xla import backend as xla
from train.common.xla.while_loop import WhileLoop

LIMITS = [1, 2, 3, 4, 5, 6, 7, 8]


class Chain(nn.Module):
    """Reads its tied matrix twice, so that a loop with its weights untied or out of date would show."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(6) / 10)

    def forward(self, x):
        return torch.tanh(self.head(x + self.shift) @ self.embedding.weight / 2)


def round_of(model, state, reads):
    """One round: the loop ends when `limit` rounds are over; rows whose limit is lower keep their state."""
    going = (state["time"] < reads["limit"])[:, None]
    new = {"x": torch.where(going, model(state["x"]) + reads["add"], state["x"]), "time": state["time"] + 1}
    return {"running": (new["time"] < reads["limit"]).any(), **new}


@torch.no_grad()
def python_loop(model, state, reads):
    while bool(state["running"]):
        state = round_of(model, state, reads)
    return state


def loop_input(mesh, limits):
    """(state, what its rounds read) of 8 rows on the CPU, and the same sharded over the devices."""
    torch.manual_seed(3)
    state = {"running": torch.tensor(True), "x": torch.randn(8, 6), "time": torch.tensor(0, dtype=torch.int32)}
    reads = {"add": torch.randn(8, 6) / 5, "limit": torch.tensor(limits, dtype=torch.int32)}

    def upload(tensor):
        return device.upload(tensor, mesh) if tensor.dim() else tensor.to(mesh.device)

    on_device = [{name: upload(tensor) for name, tensor in each.items()} for each in (state, reads)]
    return (state, reads), tuple(on_device)


def looping(mesh, model):
    """The compiled loop on a model that is on the device, and a list that grows when Python traces a round."""
    rounds = []

    def body(state, reads):
        rounds.append(1)
        return round_of(model, state, reads)

    loop = WhileLoop(body, model)
    step = device.compiled(torch.no_grad()(lambda model, state, reads: loop(state, reads)), mesh)
    return partial(step, model), rounds


def chain(mesh, optimizer):
    """A model and its optimizer on the CPU, and the same on the device."""
    torch.manual_seed(0)
    reference = Chain()
    return (reference, optimizer(reference.parameters())), on_mesh(mesh, copy.deepcopy(reference), optimizer)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=False)
adam = partial(torch.optim.Adam, lr=0.03, betas=(0.9, 0.98), foreach=False)


def test_a_loop_on_sharded_state_gives_the_numbers_of_a_python_loop(mesh):
    (reference, _), (model, _) = chain(mesh, sgd)
    run_loop, rounds = looping(mesh, model)
    torch_xla.sync()
    # Three lengths of the same loop: it ends when the device says so, and the program is one.
    for number, limits in enumerate(([3] * 8, LIMITS, [1] * 8)):
        on_cpu, on_device = loop_input(mesh, limits)
        assert "devices=[4" in torch_xla._XLAC._get_xla_sharding_spec(on_device[0]["x"])
        expected = python_loop(reference, *on_cpu)
        reads, graphs = xla.host_reads(), xla.compilations()
        found = run_loop(*on_device)
        assert xla.compilations() - graphs <= (number == 0) and xla.host_reads() == reads
        assert found["time"].item() == expected["time"].item() == max(limits)
        assert not found["running"].item()
        torch.testing.assert_close(found["x"].cpu(), expected["x"])
    assert len(rounds) == 1
    (state, _), (on_device, reads) = loop_input(mesh, [4] * 8)
    on_device["running"] = torch.tensor(False).to(mesh.device)  # a loop that is not to run returns its state
    found = run_loop(on_device, reads)
    assert torch.equal(found["x"].cpu(), state["x"]) and found["time"].item() == 0


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_loop_between_train_steps_has_the_weights_of_the_moment_and_compiles_nothing_again(mesh, optimizer):
    (reference, expected_optimizer), (model, made) = chain(mesh, optimizer)

    def mean_step(model, optimizer, x):
        return update(model(x).square().mean(), optimizer)

    (run_loop, _), step = looping(mesh, model), device.compiled(mean_step, mesh)
    results = []
    for number in range(4):
        on_cpu, (state, reads) = loop_input(mesh, LIMITS)  # new tensors each time, as a loader's are
        mean_step(reference, expected_optimizer, on_cpu[0]["x"])
        results.append(python_loop(reference, *on_cpu)["x"])
        torch_xla.sync()
        graphs = xla.compilations()
        step(model, made, state["x"])
        found = run_loop(state, reads)
        assert xla.compilations() - graphs <= (2 if number == 0 else 0)
        torch.testing.assert_close(found["x"].cpu(), results[-1], rtol=1e-4, atol=1e-4)
    assert all((a - b).abs().max() > 0.01 for a, b in itertools.pairwise(results))  # the weights do move
    assert model.head.weight is model.embedding.weight
    assert {id(p) for p in model.parameters()} == {id(p) for p in made.param_groups[0]["params"]}


def test_a_loop_follows_the_mode_and_the_precision(mesh):
    model = device.to_device(nn.BatchNorm1d(6), mesh)
    with torch.no_grad():
        model.running_mean.fill_(1.0)
        device.replicate(model.running_mean, mesh)

    def body(state, reads):
        x = F.batch_norm(state["x"], model.running_mean, model.running_var) if not model.training else -state["x"]
        dtype = torch.float32 if torch.is_autocast_enabled("xla") else torch.float16
        return {"running": state["running"] & False, "x": x, "rounded": (reads["add"] / 3).to(dtype).float()}

    loop = WhileLoop(body, model)

    def run_loop(model, state, reads, half):
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=not half):
            return loop({**state, "rounded": reads["add"]}, reads)

    step = device.compiled(run_loop, mesh, 4)
    for training, half in itertools.product((False, True), repeat=2):
        (state, reads), (on_device, on_device_reads) = loop_input(mesh, [1] * 8)
        del on_device["time"]
        found = step(model.train(training), on_device, on_device_reads, half)
        expected = -state["x"] if training else (state["x"] - 1) / (1 + model.eps) ** 0.5
        torch.testing.assert_close(found["x"].cpu(), expected)
        error = (found["rounded"].cpu() - reads["add"] / 3).abs().max()
        assert (error > 1e-6) == half


CHANGES = {
    r"\(8, 6\).* became .*\(8, 4\)": lambda new: {**new, "x": new["x"][:, :4]},
    r"torch.int32.* became .*torch.float32": lambda new: {**new, "time": new["time"].float()},
    r"'more': None.* became .*\(8, 6\)": lambda new: {**new, "more": new["x"]},
    r"'time': .* became \{'time': None\}": lambda new: {name: new[name] for name in ("running", "x")},
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_loop_whose_body_changes_its_state_is_refused(mesh, words):
    _, (model, _) = chain(mesh, sgd)
    loop = WhileLoop(lambda state, reads: CHANGES[words](round_of(model, state, reads)), model)
    _, on_device = loop_input(mesh, [2] * 8)
    weight = model.embedding.weight
    with pytest.raises(ValueError, match=f"must keep names, shapes and types: .*{words}"):
        loop(*on_device)
    assert model.embedding.weight is weight is model.head.weight  # the stand-ins are gone
