"""The contract of a compiled step (train/common/xla/backend.py), each on a step of one line."""

import itertools
import threading
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


# ---- states ----------------------------------------------------------------------------------------------------------
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

    step, report = make(peeks, strict=False, max_graphs=2)
    for size, sign in ((3, 1), (3, -1), (4, 1), (3, -1)):
        assert step(ones(size) * sign).cpu().tolist() == [1] * size
    assert signs == [True, False] * 2 and (report.traced, report.repeated) == (4, 0)
    assert capsys.readouterr().out.count("note: peeks is traced in every call: --no-strict lets it read values") == 1


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


# ---- what breaks the contract ----------------------------------------------------------------------------------------
class Batch(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def labelled(batch):
    return batch["image"] * 1.7 + batch["label"][:, None]


def in_mode(model, batch):
    return model(batch["x"].float()).detach()


def branches():
    flags = iter([False, True, False])
    return lambda x: x.sin() if next(flags) else x.cos()


# A step, calls of which the last one breaks the contract, and what is said of it.
BROKEN = {
    "shape": lambda x, model: (
        labelled,
        [({"image": x, "label": ones(4)},), ({"image": ones(6, 3), "label": ones(6)},)],
        r"\['image'\] is \(\(6, 3\), 'float32'\), compiled for \(\(4, \d+\), 'float32'\); argument 0"
        r"\['label'\] is \(\(6,\), 'float32'\), compiled for \(\(4,\), 'float32'\)",
    ),
    "type": lambda x, model: (
        in_mode,
        [(model, {"x": x}), (model, {"x": ones(*x.shape, dtype=torch.int32)})],
        r"\['x'\] is .*'int32'\), compiled for .*'float32'\)",
    ),
    "mode": lambda x, model: (
        lambda model, x: model[0](x).detach(),
        [(nn.ModuleList([model]), x), (nn.ModuleList([model]).eval(), x)],
        "argument 0 is evaluation, compiled for training",
    ),
    "missing": lambda x, model: (
        in_mode,
        [(model, {"x": x, "mask": x}), (model, {"x": x})],
        r"an input is missing: argument 1\['mask'\]",
    ),
    "third shape": lambda x, model: (
        lambda x: x * 1.9,
        [(ones(4, 2),), (ones(5, 2),), (ones(4, 2),), (ones(6, 2),)],
        r"argument 0 is \(\(6, 2\), 'float32'\)",
    ),
    "field": lambda x, model: (
        lambda batch: batch.image * batch.label,
        [(Batch(x, ones(1)),), (Batch(x, ones(4, 1)),)],
        r"argument 0.label is \(\(4, 1\), 'float32'\), compiled for \(\(1,\), 'float32'\)",
    ),
    "number": lambda x, model: (
        lambda x, factor: x * factor,
        [(x, 0.3), (x, 0.3), (x, 0.7)],
        "argument 1 is 0.7, compiled for 0.3 .give a changing number as a tensor on the device",
    ),
    "branch": lambda x, model: (branches(), [(x,), (x,)], "a Python value or branch inside it changed"),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", BROKEN)
def test_what_recompiles_stops_a_strict_step_and_is_a_warning_otherwise(mesh, capsys, case, strict):
    width = next(WIDTHS)
    step_fn, (*good, last), match = BROKEN[case](ones(4, width), device.to_device(nn.Linear(width, 2), mesh))
    step, report = make(step_fn, strict, max_graphs=2 if case == "third shape" else 1)
    for args in good:
        step(*args)
    torch_xla.sync()
    assert report.recompilations == []
    graphs = compilations()
    if strict:
        with pytest.raises(GraphError, match=f"{match}.*; --no-strict makes this a warning"):
            step(*last)
        assert compilations() - graphs <= (case == "branch")
    else:
        step(*last)
        assert f"warning: {report.recompilations[0]}\n" in capsys.readouterr().out
    (sentence,) = report.recompilations
    assert step.name in sentence
    step(*good[0])  # the step is still good


@pytest.mark.parametrize("step_fn", [lambda x: x if x.sum().item() > 0 else -x, lambda x: x if x.any() else -x])
def test_reading_a_value_in_a_step_is_stopped(step_fn):
    x = ones(5)
    with pytest.raises(GraphError, match=r"<lambda> reads a device value before its end \(.item\(\).*return it"):
        make(step_fn)[0](x)
    good, _ = make(lambda x: x * 2.7)  # nothing of it is left behind
    assert device.fetch([good(x).sum()]) == device.fetch([good(x).sum()]) == pytest.approx([13.5])


def test_a_backward_pass_leaves_nothing_to_another_thread():
    threads = []

    def step(x):
        x = x.detach().requires_grad_()
        x.register_hook(lambda _: threads.append(threading.get_ident()))
        return torch.autograd.grad(x.square().sum(), x)[0]

    make(step)[0](ones(2, next(WIDTHS)))
    assert threads == [threading.get_ident()]


def test_an_error_of_the_step_itself_is_passed_on():
    with pytest.raises(RuntimeError) as raised:
        make(lambda x: x @ ones(3, 3))[0](ones(2, 2))
    assert not isinstance(raised.value, GraphError)
    assert device.fetch([ones(3).sum()]) == [3.0]  # execution is allowed again


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
    step, report = make(lambda table, ids: table(ids).sum(1).detach())  # what to write instead
    step(device.to_device(nn.Embedding(5, 4), mesh), ids)
    assert report.fallbacks == []


def test_operations_outside_of_the_step_that_compile_each_time_are_stopped():
    step, report = make(lambda x: x * 3.1)
    x, strays = ones(4), []
    with pytest.raises(GraphError, match="operations outside of <lambda> .* before three calls in a row: move them"):
        for size in range(1, 9):
            strays.append(ones(size, 3, 5).atan())  # no other test's graph
            step(x)
    # What comes before the first call (preparing a model) is not counted.
    assert len(strays) == 4 and len(report.recompilations) == 1


def test_operations_outside_of_the_step_with_one_shape_are_fine():
    (step, report), x, total = make(lambda x: x * 3.7), ones(4), ones(1).sum() * 0
    for _ in range(6):
        total = total + step(x).sum()
    assert device.fetch([total]) == pytest.approx([6 * 4 * 3.7]) and report.recompilations == []
