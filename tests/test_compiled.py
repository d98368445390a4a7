"""The contract of a compiled step (train/common/xla/backend.py), each on a step of one line."""

import itertools
import threading
from contextlib import nullcontext
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


def test_a_step_is_traced_confirmed_and_repeated_for_each_set_of_shapes():
    step, report = make(lambda x: x * 1.5, max_graphs=2)
    width = next(WIDTHS)
    one, other, graphs = ones(4, width), ones(5, width), compilations()
    found = []
    for x in (one, one, other, one, other, other):
        assert step(x).shape == x.shape
        found.append((confirmed(step), report.traced, report.repeated))
    seen = [[False], [True], [True, False], [True, False], [True, True], [True, True]]
    assert found == list(zip(seen, (1, 2, 3, 3, 4, 4), (0, 0, 0, 1, 1, 2), strict=True))
    assert compilations() == graphs + 2 and report.compile_seconds > 0
    expected = {"recompilations": [], "fallbacks": [], "traced": 4, "repeated": 2}
    summary = report.summary(reset=True)
    assert {name: summary[name] for name in expected} == expected and summary["graphs"] == compilations()
    assert report.summary() == GraphReport().summary() | {"host_reads": summary["host_reads"]}


def test_a_step_that_is_not_strict_is_traced_in_every_call_and_says_so_once(capsys):
    """What it reads in its middle would not be read again."""
    signs = []

    def peeks(x):
        signs.append(x.sum().item() > 0)
        return x if signs[-1] else -x

    step, report = make(peeks, strict=False)
    for size, sign in ((3, 1), (3, -1), (4, 1), (3, -1)):
        assert step(ones(size) * sign).cpu().tolist() == [1] * size
    assert signs == [True, False] * 2 and (report.traced, report.repeated) == (4, 0)
    out = capsys.readouterr().out
    assert out.count("note: peeks is traced in every call: --no-strict lets it read values") == 1
    assert out.count("warning: peeks would be compiled again: argument 0 is ((4,), 'float32'), compiled for ((3,)") == 1


def test_a_python_value_that_changes_later_is_found():
    """Until then the program of before runs, as under jax.jit; the contract says so."""
    factor, x = [1.5], ones(8)
    step, report = make(lambda x: (x * factor[0]).sum(), check_every=4)
    for _ in range(3):
        step(x)
    factor[0] = 2.5
    assert step(x).item() == 12 and (report.traced, report.repeated) == (2, 2)
    with pytest.raises(GraphError, match="call 5 of <lambda> cannot .* a number or tensor that it makes differs"):
        step(x)


class Batch(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@pytest.fixture(scope="module")
def known(mesh):
    """A step that knows calls of 4 rows and 0.3, and of 5 rows and 0.5; its report; and what makes calls."""
    width = next(WIDTHS)
    model, other = (device.to_device(nn.Linear(width, 2), mesh) for _ in range(2))

    def scaled(model, batch, more, factor):
        return model(batch.image.float()).detach() * factor + batch.label[:, None]

    def call(rows=4, factor=0.3, dtype=torch.float32, names=("mask",), training=True):
        batch = Batch(ones(rows, width, dtype=dtype), ones(rows))
        return model if training else other.eval(), batch, {name: ones(rows) for name in names}, factor

    step, report = make(scaled, max_graphs=2)
    for args in (call(), call(5, 0.5)):
        step(*args)
    assert report.recompilations == []
    return step, report, call


# Changes of a known call, and what is said of them beside the known call that is most like it.
UNKNOWN = {
    "shapes": (
        {"rows": 6, "factor": 0.5},
        r"argument 1.image is \(\(6, (\d+)\), 'float32'\), compiled for \(\(5, \1\), 'float32'\); "
        r"argument 1.label is \(\(6,\), 'float32'\), compiled for \(\(5,\), 'float32'\); argument 2\['mask'\] is",
    ),
    "type": ({"dtype": torch.int32}, r"argument 1.image is .*'int32'\), compiled for .*'float32'\)"),
    "mode": ({"training": False}, "argument 0 is evaluation, compiled for training"),
    "missing": ({"names": ()}, r"an input is missing: argument 2\['mask'\]"),
    "number": ({"factor": 0.7}, "argument 3 is 0.7, compiled for 0.3 .give a changing number as a tensor"),
}


@pytest.mark.parametrize(("changes", "pattern"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_call_that_is_not_known_stops_a_strict_step_and_says_what_differs(known, changes, pattern):
    (step, report, call), graphs = known, compilations()
    with pytest.raises(GraphError, match=f"scaled would be compiled again: {pattern}.*; --no-strict") as raised:
        step(*call(**changes))
    assert compilations() == graphs and report.recompilations[-1] in str(raised.value)
    step(*call())  # the step is still good


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_another_graph_for_a_known_call_stops_a_strict_step_and_is_a_warning_otherwise(capsys, strict):
    flags, x = iter([False, True, False]), ones(4, next(WIDTHS))
    step, report = make(lambda x: x.sin() if next(flags) else x.cos(), strict)
    step(x)
    stopped = pytest.raises(GraphError, match="a Python value or branch inside it changed.*; --no-strict makes this a")
    with stopped if strict else nullcontext():
        step(x)
    (sentence,) = report.recompilations
    assert "<lambda> was compiled again" in sentence
    assert (f"warning: {sentence}\n" in capsys.readouterr().out) != strict
    step(x)  # the step is still good


def test_reading_a_value_in_a_step_is_stopped_and_an_error_of_its_own_passed_on():
    x = ones(5)
    with pytest.raises(GraphError, match=r"<lambda> reads a device value before its end \(.item\(\).*return it"):
        make(lambda x: x if x.any() else -x)[0](x)
    with pytest.raises(RuntimeError) as raised:
        make(lambda x: x @ ones(3, 3))[0](x)
    assert not isinstance(raised.value, GraphError)
    good, _ = make(lambda x: x * 2.7)  # nothing of either is left behind
    assert device.fetch([good(x).sum()]) == device.fetch([good(x).sum()]) == pytest.approx([13.5])


def test_a_backward_pass_leaves_nothing_to_another_thread():
    threads = []

    def step(x):
        x = x.detach().requires_grad_()
        x.register_hook(lambda _: threads.append(threading.get_ident()))
        return torch.autograd.grad(x.square().sum(), x)[0]

    make(step)[0](ones(2, next(WIDTHS)))
    assert threads == [threading.get_ident()]


def bag_step(bag, ids):
    return bag(ids)


def test_an_operation_on_the_host_is_named(mesh, capsys):
    bag = device.to_device(nn.EmbeddingBag(5, 4, mode="sum"), mesh)
    ids = ones(8, 2, dtype=torch.long)
    step, report = make(bag_step)
    for count in (1, 2):  # the second time too, though it is known already
        with pytest.raises(GraphError, match="bag_step runs aten::_embedding_bag on the host.*: replace it"):
            step(bag, ids)
        assert report.fallbacks == ["aten::_embedding_bag"] * count
    step, report = make(bag_step, strict=False)
    for _ in range(2):
        pooled = step(bag, ids)
    torch.testing.assert_close(pooled.cpu(), 2 * bag.weight[1].detach().cpu().expand(8, 4))
    assert report.fallbacks == ["aten::_embedding_bag"]
    assert capsys.readouterr().out.count("warning: bag_step runs aten::_embedding_bag on the host") == 1


def test_operations_outside_of_the_step_are_stopped_where_they_compile_each_time():
    step, report = make(lambda x: x * 3.1)
    x, strays = ones(4), []
    with pytest.raises(GraphError, match="operations outside of <lambda> .* before three calls in a row: move them"):
        for size in range(1, 9):
            strays.append(ones(size, 3, 5).atan())  # no other test's graph
            step(x)
    # What comes before the first call (preparing a model) is not counted.
    assert len(strays) == 4 and len(report.recompilations) == 1
    total = ones(1).sum() * 0
    for _ in range(6):  # those of one shape compile once
        total = total + step(x).sum()
    assert device.fetch([total]) == pytest.approx([6 * 4 * 3.1]) and len(report.recompilations) == 1
