"""Loops on the device (train/common/xla/while_loop.py) beside the same loops in Python."""

import copy
import gc
import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from helpers import on_mesh, update
from torch import Tensor, nn

from train.common import device
from train.common.xla import backend as xla
from train.common.xla import replay
from train.common.xla.while_loop import WhileLoop

ROWS = 8
LIMITS = [1, 2, 3, 4, 5, 6, 7, 8]  # rounds of each row
ADAM = partial(torch.optim.Adam, lr=0.03, betas=(0.9, 0.98), foreach=False)


class Chain(nn.Module):
    """Reads its tied matrix twice: a loop with its weights untied or out of date would show."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(6) / 10)

    def forward(self, x):
        return torch.tanh(self.head(x + self.shift) @ self.embedding.weight / 2)


def round_of(model, state, reads):
    """Computes one round; rows whose limit is lower keep their state.

    The loop ends when `limit` rounds are over.
    """
    runs = state["time"] < reads["limit"]
    moved = model(state["x"]) + reads["add"]
    time = state["time"] + 1
    return {
        "running": (time < reads["limit"]).any(),
        "x": torch.where(runs[:, None], moved, state["x"]),
        "time": time,
    }


@torch.no_grad()
def python_loop(model, state, reads):
    while bool(state["running"]):
        state = round_of(model, state, reads)
    return state


@dataclass
class LoopInput:
    """What a loop of 8 rows begins with, and what its rounds read."""

    state: dict[str, Tensor]
    reads: dict[str, Tensor]


def loop_input(mesh, limits: list[int]) -> tuple[LoopInput, LoopInput]:
    """Returns the same input on the CPU, and sharded over the devices."""
    torch.manual_seed(3)
    state = {
        "running": torch.tensor(True),
        "x": torch.randn(ROWS, 6),
        "time": torch.tensor(0, dtype=torch.int32),
    }
    reads = {
        "add": torch.randn(ROWS, 6) / 5,
        "limit": torch.tensor(limits, dtype=torch.int32),
    }

    def upload(tensor: Tensor) -> Tensor:
        if tensor.dim():
            return device.upload(tensor, mesh)
        return tensor.to(mesh.device)

    on_device = LoopInput(
        state={name: upload(tensor) for name, tensor in state.items()},
        reads={name: upload(tensor) for name, tensor in reads.items()},
    )
    return LoopInput(state, reads), on_device


def mean_step(model, optimizer, x):
    return update(model(x).square().mean(), optimizer)


class Peers:
    """A model with a loop on the devices, and its copy with a loop in Python."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.reference = Chain()
        self.model, self.optimizer = on_mesh(mesh, copy.deepcopy(self.reference), ADAM)
        self.reference_optimizer = ADAM(self.reference.parameters())
        self.rounds_traced = 0
        loop = WhileLoop(self.traced_round, self.model)

        @torch.no_grad()
        def run_loop(model, state, reads):
            return loop(state, reads)

        self.run_loop = device.compiled(run_loop, mesh)
        self.train_step = device.compiled(mean_step, mesh)

    def traced_round(self, state, reads):
        self.rounds_traced += 1
        return round_of(self.model, state, reads)

    def train(self, x: Tensor) -> None:
        """Takes a step of training on both."""
        mean_step(self.reference, self.reference_optimizer, x)
        self.train_step(self.model, self.optimizer, device.upload(x, self.mesh))

    def assert_same(self, limits: list[int], **tolerance) -> Tensor:
        """Asserts that both loops give the same state, and that nothing is read from the device.

        Returns:
            the last x.
        """
        # New tensors each time, as a loader's are.
        on_cpu, on_device = loop_input(self.mesh, limits)
        spec = torch_xla._XLAC._get_xla_sharding_spec(on_device.state["x"])
        assert "devices=[4" in spec
        expected = python_loop(self.reference, on_cpu.state, on_cpu.reads)

        reads = xla.host_reads()
        found = self.run_loop(self.model, on_device.state, on_device.reads)
        assert xla.host_reads() == reads

        assert found["time"].item() == max(limits)
        assert expected["time"].item() == max(limits)
        assert not found["running"].item()
        torch.testing.assert_close(found["x"].cpu(), expected["x"], **tolerance)
        return expected["x"]


@pytest.fixture
def peers(mesh) -> Peers:
    return Peers(mesh)


def test_a_loop_of_any_length_is_one_program(peers):
    """It ends when the device says so."""
    torch_xla.sync()
    graphs = xla.compilations()
    for limits in ([3] * ROWS, LIMITS, [1] * ROWS):
        peers.assert_same(limits)
    assert xla.compilations() - graphs <= 1
    assert peers.rounds_traced == 1  # Python traces one round


def test_a_loop_between_train_steps_has_the_newest_weights(peers):
    torch_xla.sync()
    graphs = xla.compilations()
    peers.assert_same(LIMITS)
    results = []
    for _ in range(4):
        peers.train(torch.randn(ROWS, 6))
        results.append(peers.assert_same(LIMITS, rtol=1e-4, atol=1e-4))

    assert xla.compilations() - graphs <= 2
    assert peers.rounds_traced == 1
    for before, after in itertools.pairwise(results):
        assert (before - after).abs().max() > 0.01  # the weights do move
    assert peers.model.head.weight is peers.model.embedding.weight
    trained = peers.optimizer.param_groups[0]["params"]
    assert {id(p) for p in peers.model.parameters()} == {id(p) for p in trained}


def test_a_loop_that_is_not_to_run_returns_its_state(peers, mesh):
    on_cpu, on_device = loop_input(mesh, [4] * ROWS)
    on_device.state["running"] = torch.tensor(False).to(mesh.device)

    found = peers.run_loop(peers.model, on_device.state, on_device.reads)

    assert torch.equal(found["x"].cpu(), on_cpu.state["x"])
    assert found["time"].item() == 0


def test_a_loop_follows_the_mode_and_the_precision(mesh):
    model = device.to_device(nn.BatchNorm1d(6), mesh)
    with torch.no_grad():
        model.running_mean.fill_(1.0)
        device.replicate(model.running_mean, mesh)

    def body(state, reads):
        if model.training:
            x = -state["x"]
        else:
            x = F.batch_norm(state["x"], model.running_mean, model.running_var)
        dtype = torch.float32 if torch.is_autocast_enabled("xla") else torch.float16
        return {
            "running": state["running"] & False,
            "x": x,
            "rounded": (reads["add"] / 3).to(dtype).float(),
        }

    loop = WhileLoop(body, model)

    def run_loop(model, state, reads, half):
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=not half):
            return loop({**state, "rounded": reads["add"]}, reads)

    step = device.compiled(run_loop, mesh, 3)
    for training, half in ((False, False), (True, False), (True, True)):
        on_cpu, on_device = loop_input(mesh, [1] * ROWS)
        del on_device.state["time"]

        found = step(model.train(training), on_device.state, on_device.reads, half)

        x = on_cpu.state["x"]
        expected = -x if training else (x - 1) / (1 + model.eps) ** 0.5
        torch.testing.assert_close(found["x"].cpu(), expected)
        error = (found["rounded"].cpu() - on_cpu.reads["add"] / 3).abs().max()
        assert (error > 1e-6) == half


def other_shape_and_type(new):
    return new | {"x": new["x"][:, :4], "time": new["time"].float()}


def other_names(new):
    return {"running": new["running"], "more": new["x"], "x": new["x"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_shape_and_type,
            r"\{'time': .*torch.int32.*'x': \(\(8, 6\).* became "
            r".*'time': .*torch.float32.*'x': \(\(8, 4\)",
        ),
        (
            other_names,
            r"\{'more': None, 'time': .* became \{'more': \(\(8, 6\).*, 'time': None\}",
        ),
    ],
    ids=["shape and type", "names"],
)
def test_a_loop_whose_body_changes_its_state_is_refused(mesh, change, message):
    model = device.to_device(Chain(), mesh)
    loop = WhileLoop(lambda state, reads: change(round_of(model, state, reads)), model)
    _, on_device = loop_input(mesh, [2] * ROWS)
    weight = model.embedding.weight

    with pytest.raises(ValueError, match=f"must keep names, shapes and types: {message}"):
        loop(on_device.state, on_device.reads)

    # The stand-ins are gone.
    assert model.embedding.weight is weight
    assert model.head.weight is weight


@pytest.mark.slow
def test_no_tensor_gets_the_handle_of_a_loops_constant(peers, mesh):
    """A strict step would take it for one.

    torch_xla itself keeps the newest 128 numbers of Python only.
    """
    peers.assert_same(LIMITS)
    constants = set(replay.loop_constants)
    assert constants

    x = torch.zeros((), device=mesh.device)
    for number in range(12 * 150):
        x = x * (1 + number * 1e-5)
        if number % 150 == 149:
            torch_xla.sync()
            gc.collect()
            others = [torch.randn(8, 6).to(mesh.device) for _ in range(300)]
            for other in others:
                device.annotate(other, mesh.spmd, ("data", None))
            torch_xla.sync()
            assert constants.isdisjoint(torch_xla._XLAC._get_tensors_handle(others))
