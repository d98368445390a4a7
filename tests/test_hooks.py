"""The hooks of Run, Loader and the compiled step (train/common/hooks.py): who is notified, and in
which order."""

import ast
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from train.common import device, hooks, watch
from train.common.loading import parallel_loader

WATCH = Path(watch.__file__).parent


class Recorder(hooks.Watcher):
    """Adds to `events` what it is notified of, after its name."""

    def __init__(self, name: str, events: list):
        self.name = name
        self.events = events

    def __enter__(self):
        self.events.append((self.name, "enter"))
        return self

    def __exit__(self, *_):
        self.events.append((self.name, "exit"))

    def waited(self, seconds):
        assert seconds >= 0
        self.events.append((self.name, "waited"))

    def traced(self, graph, module):
        assert b"add" in module()  # the program, as a HloModuleProto
        self.events.append((self.name, "traced", graph))

    def started(self, graph):
        self.events.append((self.name, "started", graph))


class Numbers:
    """Four examples."""

    def __len__(self):
        return 4

    def example(self, index, rng):
        return {"x": np.float32(index)}


def open_loader(mesh):
    return parallel_loader(Numbers(), 4, mesh, train=False)


@pytest.fixture
def events():
    """What two watchers, "a" and then "b", have been notified of inside of `hooks.made_by`."""
    found = []

    def make_a(run):
        return Recorder(f"a of {run}", found)

    def make_b(run):
        return Recorder(f"b of {run}", found)

    with hooks.made_by([make_a, make_b]):
        yield found
    assert hooks.makers == ()


def test_listeners_are_told_what_belongs_to_no_run():
    told = []
    with hooks.made_by([], [lambda event, facts: told.append((event, facts))]):
        hooks.tell("end", count=3)
    hooks.tell("end", count=4)
    assert told == [("end", {"count": 3})]


# Who is notified


def test_watchers_are_left_in_the_opposite_order(events):
    before = hooks.watchers
    with pytest.raises(ValueError, match="of the training"), hooks.watching("run"):
        raise ValueError("of the training")
    assert events == [
        ("a of run", "enter"),
        ("b of run", "enter"),
        ("b of run", "exit"),
        ("a of run", "exit"),
    ]
    assert hooks.watchers is before


def test_a_run_inside_another_has_watchers_of_its_own(events):
    with hooks.watching("teacher") as outer:
        with hooks.watching("student") as inner:
            assert hooks.watchers is inner
        assert hooks.watchers is outer


def test_a_loader_notifies_of_each_wait_of_the_loop(events, mesh):
    with hooks.watching("run") as watchers, open_loader(mesh) as loader:
        events.clear()
        for _ in loader:
            pass

    waits = [event for event in events if event[1] == "waited"]
    one_of_each = [(watcher.name, "waited") for watcher in watchers]
    assert waits == 2 * one_of_each  # a batch, and the end


def test_a_compiled_step_notifies_of_its_traces_and_starts(events, mesh):
    step = device.compiled(lambda model, x: model(x).detach() + 1, mesh)
    model = device.to_device(nn.Linear(2, 2), mesh)
    x = torch.ones(4, 2).to(mesh.device)

    with hooks.watching("run"):
        events.clear()
        for _ in range(3):
            step(model, x)
        of_a = [event[1:] for event in events if event[0] == "a of run"]

    names = [name for name, _ in of_a]
    graphs = {graph for _, graph in of_a}
    assert names == ["traced", "started", "traced", "started", "started"]
    assert len(graphs) == 1


def test_a_tracer_has_the_spans_of_a_step(mesh):
    spans = []

    def tracer(name: str):
        spans.append(name)
        return contextlib.nullcontext()

    step = device.compiled(lambda x: x + 1, mesh)
    with hooks.spans_by(tracer), open_loader(mesh) as loader:
        for batch in loader:
            step(batch["x"])
    assert sorted(set(spans)) == ["start the program", "upload", "wait for a batch"]

    spans.clear()
    step(batch["x"])
    assert spans == []


# The project's watchers


def test_every_watcher_stands_in_the_order():
    files = {path.stem for path in WATCH.glob("*.py") if not path.name.startswith("_")}
    assert files == set(watch.ORDER)
    assert list(watch.MODULES) == list(watch.ORDER)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("curves", "tracker"),  # which sends its picture
        ("board", "goodput"),
        ("goodput", "report"),  # which may kill the process
        ("profile", "report"),
        ("stall", "tracker"),  # which may wait at the end
        ("report", "tracker"),  # whose files it lists
    ],
)
def test_a_watcher_that_needs_another_comes_after_it(first, then):
    assert watch.ORDER.index(first) < watch.ORDER.index(then)


@pytest.mark.parametrize("path", sorted(WATCH.glob("*.py")), ids=lambda path: path.stem)
def test_a_watcher_patches_nobody_and_reads_no_frames(path):
    attributes = set()
    called = set()
    assigned = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute():
                attributes.add(node.attr)
            case ast.Call(func=ast.Name()):
                called.add(node.func.id)
            case ast.Assign():
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        assigned.add(ast.unparse(target))

    assert not attributes & {"f_locals", "f_back", "f_code", "co_qualname"}
    assert "setattr" not in called
    owners = {target.split(".")[0] for target in assigned}
    assert owners <= {"self", "Goodput"}, assigned  # Goodput.counted is its own
