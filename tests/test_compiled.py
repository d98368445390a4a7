"""The contract of a compiled step (train/common/xla/backend.py), each on a step of one line."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch_xla
from torch import nn

from train.common import device
from train.common.xla import backend as xla
from train.common.xla.backend import CompiledStep, GraphError, GraphReport, compilations

WIDTHS = itertools.count(3)  # each makes graphs that no other test has compiled


def make(step_fn, strict: bool = True, **options) -> tuple[CompiledStep, GraphReport]:
    report = GraphReport()
    return CompiledStep(step_fn, strict, report, **options), report


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype).to(xla.torch_xla.device())


def confirmed(step: CompiledStep) -> list[bool]:
    """Returns, for each set of shapes, whether a second trace gave the program of the first."""
    return [calls.confirmed for calls in step._known.values()]


@pytest.fixture(autouse=True)
def nothing_pending(mesh):
    torch_xla.sync()


# Traces


def test_a_step_is_traced_confirmed_and_repeated_for_each_shape():
    step, report = make(lambda x: x * 1.5, max_graphs=2)
    width = next(WIDTHS)
    one = ones(4, width)
    other = ones(5, width)
    graphs = compilations()

    found = []
    for x in (one, one, other, one, other, other):
        assert step(x).shape == x.shape
        found.append((confirmed(step), report.traced, report.repeated))

    assert found == [
        ([False], 1, 0),
        ([True], 2, 0),
        ([True, False], 3, 0),
        ([True, False], 3, 1),
        ([True, True], 4, 1),
        ([True, True], 4, 2),
    ]
    assert compilations() == graphs + 2
    assert report.compile_seconds > 0

    summary = report.summary(reset=True)
    expected = {"recompilations": [], "fallbacks": [], "traced": 4, "repeated": 2}
    assert {name: summary[name] for name in expected} == expected
    assert summary["graphs"] == compilations()
    fresh = GraphReport().summary() | {"host_reads": summary["host_reads"]}
    assert report.summary() == fresh


def test_a_lenient_step_is_traced_in_every_call_and_says_so_once(capsys):
    """What it reads in its middle would not be read again."""
    signs = []

    def peeks(x):
        signs.append(x.sum().item() > 0)
        return x if signs[-1] else -x

    step, report = make(peeks, strict=False)
    for size, sign in ((3, 1), (3, -1), (4, 1), (3, -1)):
        assert step(ones(size) * sign).cpu().tolist() == [1] * size

    assert signs == [True, False] * 2
    assert report.traced == 4
    assert report.repeated == 0
    out = capsys.readouterr().out
    note = "note: peeks is traced in every call: --no-strict lets it read values"
    assert out.count(note) == 1
    warning = "warning: peeks would be compiled again: "
    shapes = "argument 0 is ((4,), 'float32'), compiled for ((3,)"
    assert out.count(warning + shapes) == 1


def test_a_python_value_that_changes_later_is_found():
    """Until then the program of before runs, as under jax.jit; the contract says so."""
    factor = [1.5]
    x = ones(8)
    step, report = make(lambda x: (x * factor[0]).sum(), check_every=4)
    for _ in range(3):
        step(x)

    factor[0] = 2.5
    assert step(x).item() == 12
    assert report.traced == 2
    assert report.repeated == 2
    message = "call 5 of <lambda> cannot .* a number or tensor that it makes differs"
    with pytest.raises(GraphError, match=message):
        step(x)


# Calls that are not known


class Batch(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Known:
    """A step that knows calls of 4 rows and 0.3, and of 5 rows and 0.5."""

    step: CompiledStep
    report: GraphReport
    call: Callable  # makes the arguments of a call


@pytest.fixture(scope="module")
def known(mesh) -> Known:
    width = next(WIDTHS)
    model = device.to_device(nn.Linear(width, 2), mesh)
    other = device.to_device(nn.Linear(width, 2), mesh)

    def scaled(model, batch, more, factor):
        return model(batch.image.float()).detach() * factor + batch.label[:, None]

    def call(rows=4, factor=0.3, dtype=torch.float32, names=("mask",), training=True):
        batch = Batch(ones(rows, width, dtype=dtype), ones(rows))
        more = {name: ones(rows) for name in names}
        return model if training else other.eval(), batch, more, factor

    step, report = make(scaled, max_graphs=2)
    step(*call())
    step(*call(5, 0.5))
    assert report.recompilations == []
    return Known(step, report, call)


# Changes of a known call, and what is said of them beside the known call that is most like it.
UNKNOWN = {
    "shapes": (
        {"rows": 6, "factor": 0.5},
        r"argument 1.image is \(\(6, (\d+)\), 'float32'\), compiled for \(\(5, \1\), 'float32'\); "
        r"argument 1.label is \(\(6,\), 'float32'\), compiled for \(\(5,\), 'float32'\); "
        r"argument 2\['mask'\] is",
    ),
    "type": (
        {"dtype": torch.int32},
        r"argument 1.image is .*'int32'\), compiled for .*'float32'\)",
    ),
    "mode": ({"training": False}, "argument 0 is evaluation, compiled for training"),
    "missing": ({"names": ()}, r"an input is missing: argument 2\['mask'\]"),
    "number": (
        {"factor": 0.7},
        "argument 3 is 0.7, compiled for 0.3 .give a changing number as a tensor",
    ),
}


@pytest.mark.parametrize(("changes", "pattern"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_call_stops_a_strict_step(known, changes, pattern):
    """And what differs is said."""
    graphs = compilations()
    message = f"scaled would be compiled again: {pattern}.*; --no-strict"
    with pytest.raises(GraphError, match=message) as raised:
        known.step(*known.call(**changes))

    assert compilations() == graphs
    assert known.report.recompilations[-1] in str(raised.value)
    known.step(*known.call())  # the step is still good


def changing_step() -> Callable:
    """Returns a step whose second call has another graph."""
    flags = iter([False, True, False])

    def step(x):
        if next(flags):
            return x.sin()
        return x.cos()

    return step


def test_another_graph_for_a_known_call_stops_a_strict_step(capsys):
    x = ones(4, next(WIDTHS))
    step, report = make(changing_step())
    step(x)

    message = "a Python value or branch inside it changed.*; --no-strict makes this a"
    with pytest.raises(GraphError, match=message):
        step(x)

    (sentence,) = report.recompilations
    assert "step was compiled again" in sentence
    assert f"warning: {sentence}\n" not in capsys.readouterr().out
    step(x)  # the step is still good


def test_another_graph_for_a_known_call_warns_in_a_lenient_step(capsys):
    x = ones(4, next(WIDTHS))
    step, report = make(changing_step(), strict=False)
    step(x)
    step(x)

    (sentence,) = report.recompilations
    assert "step was compiled again" in sentence
    assert f"warning: {sentence}\n" in capsys.readouterr().out
    step(x)  # the step is still good


# What a step must not do


def assert_nothing_is_left_behind(x: torch.Tensor) -> None:
    good, _ = make(lambda x: x * 2.7)
    first = device.fetch([good(x).sum()])
    assert first == pytest.approx([13.5])
    assert device.fetch([good(x).sum()]) == first


def test_reading_a_value_in_a_step_is_stopped():
    x = ones(5)
    step, _ = make(lambda x: x if x.any() else -x)
    message = r"<lambda> reads a device value before its end \(.item\(\).*return it"
    with pytest.raises(GraphError, match=message):
        step(x)
    assert_nothing_is_left_behind(x)


def test_an_error_of_a_steps_own_is_passed_on():
    x = ones(5)
    step, _ = make(lambda x: x @ ones(3, 3))
    with pytest.raises(RuntimeError) as raised:
        step(x)
    assert not isinstance(raised.value, GraphError)
    assert_nothing_is_left_behind(x)


def test_a_backward_pass_leaves_nothing_to_another_thread():
    threads = []

    def step_fn(x):
        x = x.detach().requires_grad_()
        x.register_hook(lambda _: threads.append(threading.get_ident()))
        return torch.autograd.grad(x.square().sum(), x)[0]

    step, _ = make(step_fn)
    step(ones(2, next(WIDTHS)))
    assert threads == [threading.get_ident()]


@pytest.fixture
def bag(mesh) -> nn.Module:
    """A module that runs on the host."""
    return device.to_device(nn.EmbeddingBag(5, 4, mode="sum"), mesh)


def bag_step(bag, ids):
    return bag(ids)


def test_an_operation_on_the_host_stops_a_strict_step(bag):
    ids = ones(8, 2, dtype=torch.long)
    step, report = make(bag_step)
    for count in (1, 2):  # the second time too, though it is known already
        message = "bag_step runs aten::_embedding_bag on the host.*: replace it"
        with pytest.raises(GraphError, match=message):
            step(bag, ids)
        assert report.fallbacks == ["aten::_embedding_bag"] * count


def test_an_operation_on_the_host_warns_once_in_a_lenient_step(bag, capsys):
    ids = ones(8, 2, dtype=torch.long)
    step, report = make(bag_step, strict=False)
    for _ in range(2):
        pooled = step(bag, ids)

    expected = 2 * bag.weight[1].detach().cpu().expand(8, 4)
    torch.testing.assert_close(pooled.cpu(), expected)
    assert report.fallbacks == ["aten::_embedding_bag"]
    warning = "warning: bag_step runs aten::_embedding_bag on the host"
    assert capsys.readouterr().out.count(warning) == 1


def test_operations_outside_of_a_step_are_stopped():
    """Where they compile each time."""
    step, report = make(lambda x: x * 3.1)
    x = ones(4)
    strays = []
    message = "operations outside of <lambda> .* before three calls in a row: move them"
    with pytest.raises(GraphError, match=message):
        for size in range(1, 9):
            strays.append(ones(size, 3, 5).atan())  # no other test's graph
            step(x)

    # What comes before the first call (preparing a model) is not counted.
    assert len(strays) == 4
    assert len(report.recompilations) == 1
    total = ones(1).sum() * 0
    for _ in range(6):  # those of one shape compile once
        total = total + step(x).sum()
    assert device.fetch([total]) == pytest.approx([6 * 4 * 3.1])
    assert len(report.recompilations) == 1
