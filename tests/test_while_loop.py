"""Loops on the device (train/common/xla/while_loop.py) beside the same loop in Python on the CPU."""

import copy
import gc
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
from train.common.xla import replay
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


def test_a_loop_on_sharded_state_gives_the_numbers_of_a_python_loop_before_and_between_train_steps(mesh):
    """Of any length, since it ends when the device says so, and with the weights of the moment; the program is one."""
    adam = partial(torch.optim.Adam, lr=0.03, betas=(0.9, 0.98), foreach=False)
    reference = Chain()
    model, made = on_mesh(mesh, copy.deepcopy(reference), adam)
    rounds = []

    def body(state, reads):
        rounds.append(1)  # Python traces one round
        return round_of(model, state, reads)

    loop = WhileLoop(body, model)
    run_loop = device.compiled(torch.no_grad()(lambda model, state, reads: loop(state, reads)), mesh)

    def assert_same(limits, **tolerance):
        on_cpu, on_device = loop_input(mesh, limits)  # new tensors each time, as a loader's are
        assert "devices=[4" in torch_xla._XLAC._get_xla_sharding_spec(on_device[0]["x"])
        expected, reads = python_loop(reference, *on_cpu), xla.host_reads()
        found = run_loop(model, *on_device)
        assert xla.host_reads() == reads
        assert found["time"].item() == expected["time"].item() == max(limits)
        assert not found["running"].item()
        torch.testing.assert_close(found["x"].cpu(), expected["x"], **tolerance)
        return expected["x"]

    def mean_step(model, optimizer, x):
        return update(model(x).square().mean(), optimizer)

    torch_xla.sync()
    graphs = xla.compilations()
    for limits in ([3] * 8, LIMITS, [1] * 8):
        assert_same(limits)
    assert xla.compilations() - graphs <= 1
    step, expected_optimizer, results = device.compiled(mean_step, mesh), adam(reference.parameters()), []
    for _ in range(4):
        x = torch.randn(8, 6)
        mean_step(reference, expected_optimizer, x)
        step(model, made, device.upload(x, mesh))
        results.append(assert_same(LIMITS, rtol=1e-4, atol=1e-4))
    assert xla.compilations() - graphs <= 2 and len(rounds) == 1
    assert all((a - b).abs().max() > 0.01 for a, b in itertools.pairwise(results))  # the weights do move
    assert model.head.weight is model.embedding.weight
    assert {id(p) for p in model.parameters()} == {id(p) for p in made.param_groups[0]["params"]}
    (state, _), (on_device, reads) = loop_input(mesh, [4] * 8)
    on_device["running"] = torch.tensor(False).to(mesh.device)  # a loop that is not to run returns its state
    found = run_loop(model, on_device, reads)
    assert torch.equal(found["x"].cpu(), state["x"]) and found["time"].item() == 0


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

    step = device.compiled(run_loop, mesh, 3)
    for training, half in ((False, False), (True, False), (True, True)):
        (state, reads), (on_device, on_device_reads) = loop_input(mesh, [1] * 8)
        del on_device["time"]
        found = step(model.train(training), on_device, on_device_reads, half)
        expected = -state["x"] if training else (state["x"] - 1) / (1 + model.eps) ** 0.5
        torch.testing.assert_close(found["x"].cpu(), expected)
        error = (found["rounded"].cpu() - reads["add"] / 3).abs().max()
        assert (error > 1e-6) == half


CHANGES = {
    "shape and type": (
        lambda new: new | {"x": new["x"][:, :4], "time": new["time"].float()},
        r"\{'time': .*torch.int32.*'x': \(\(8, 6\).* became .*'time': .*torch.float32.*'x': \(\(8, 4\)",
    ),
    "names": (
        lambda new: {"running": new["running"], "more": new["x"], "x": new["x"]},
        r"\{'more': None, 'time': .* became \{'more': \(\(8, 6\).*, 'time': None\}",
    ),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_loop_whose_body_changes_its_state_is_refused(mesh, change, words):
    model = device.to_device(Chain(), mesh)
    loop = WhileLoop(lambda state, reads: change(round_of(model, state, reads)), model)
    _, on_device = loop_input(mesh, [2] * 8)
    weight = model.embedding.weight
    with pytest.raises(ValueError, match=f"must keep names, shapes and types: {words}"):
        loop(*on_device)
    assert model.embedding.weight is weight is model.head.weight  # the stand-ins are gone


def test_no_tensor_gets_the_handle_of_a_loops_constant(mesh):
    """A strict step would take it for one. torch_xla itself keeps the newest 128 numbers of Python only."""
    constants, x = set(replay.loop_constants), torch.zeros((), device=mesh.device)
    for number in range(12 * 150):
        x = x * (1 + number * 1e-5)
        if number % 150 == 149:
            torch_xla.sync()
            gc.collect()
            others = [torch.randn(8, 6).to(mesh.device) for _ in range(300)]
            for other in others:
                device.annotate(other, mesh.spmd, ("data", None))
            torch_xla.sync()
            assert constants and constants.isdisjoint(torch_xla._XLAC._get_tensors_handle(others))
