"""train/common/embedding on 1, 6 and 8 devices, in processes of their own: parity, checkpoints,
what is compiled."""

import functools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch_xla.core.xla_model as xm
from embedding_helpers import (
    DIM,
    SEED,
    TABLES,
    TOLERANCE,
    assert_parity,
    dense,
    make,
    restore,
    save,
    state_sums,
    step_of_both,
    train_both,
)
from helpers import DUMP, environment, largest_dump, read_program

from tpu.compiler import hlo
from train.common import device
from train.common.embedding import OPTIMIZERS, Table

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Combination:
    """What is compared with torch on the CPU."""

    plan: str
    optimizer: str
    model_devices: int = 0  # that share a copy; 0: all


# By the number of devices.
OTHER_COMBINATIONS = {
    1: [Combination("mixed", "lazy_adam")],
    6: [
        Combination("exchange", "lazy_adam"),
        Combination("exchange", "adagrad", 3),
        Combination("data", "adagrad", 3),
    ],
    8: [Combination("mixed", "rowwise_adagrad", 4)],
}
# Plans under which a checkpoint of 4 devices is restored, by the number of devices.
RESTORED = {
    1: ("mixed",),
    6: ("data", "exchange"),
    8: ("mixed",),
}
DUMPING = 8  # devices of the process that writes its programs
DUMPED = {"exchange": "lazy_adam", "data": "adagrad"}
BIG = (
    Table("one", 30_000),
    Table("other", 18_000),
    Table("tags", 9_000, 3, "mean"),
    Table("shop", 12, 2),
    TABLES[4],
)


# In a process of its own


def dump_programs(mesh, folder: str) -> dict[str, dict[str, Any]]:
    """Asserts parity for each of DUMPED. Returns the files of the programs of the initial weights
    and of the train step, and the elements of a device's part of an array."""
    found = {}
    seen = set()
    for plan, optimizer in DUMPED.items():
        make(mesh, plan, optimizer, seed=SEED, tables=BIG)
        xm.wait_device_ops()
        initial = largest_dump(folder, seen)

        embeddings = assert_parity(mesh, plan, optimizer, tables=BIG)
        array = embeddings.arrays[0]
        step = largest_dump(folder, seen)

        found[plan] = {
            "initial": str(initial),
            "step": str(step),
            "part": array.device_rows * array.dim,
        }
    return found


def on_devices(place: str, folder: str) -> dict[str, Any]:
    """Asserts parity, restores a checkpoint of other devices and saves one; returns what the tests
    compare."""
    mesh = device.setup(0, "float32")
    programs = {}
    if mesh.num_devices == DUMPING:
        programs = dump_programs(mesh, folder)

    for case in OTHER_COMBINATIONS[mesh.num_devices]:
        embeddings = assert_parity(mesh, case.plan, case.optimizer, case.model_devices)
        if mesh.num_devices == 1:
            assert set(embeddings.plans) == {"data"}

    restored = {}
    for plan in RESTORED[mesh.num_devices]:
        embeddings = make(mesh, plan, "lazy_adam")
        assert restore(place, embeddings, mesh) == 3
        restored[plan] = [state_sums(embeddings), embeddings.step_count.item()]
    save(f"{place}-{mesh.num_devices}", embeddings, mesh, 7)

    step = device.compiled(step_of_both, mesh)
    losses = train_both(mesh, step, embeddings, *dense(mesh), 3, 5)
    return {"restored": restored, "losses": losses, "programs": programs}


# In the tests' process

# The program of such a process.
PROGRAM = """
import json
import test_embedding_devices
found = test_embedding_devices.on_devices({place!r}, {folder!r})
print(json.dumps(found))
"""


def start(place: str, folder: str, devices: int) -> subprocess.Popen:
    """Starts `on_devices` of this file; its last line of output is JSON."""
    variables = environment(devices, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    if devices == DUMPING:
        variables["XLA_FLAGS"] = DUMP.format(folder)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(place=place, folder=folder)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen) -> dict[str, Any]:
    """Waits for a process of `start`; returns what its `on_devices` returned."""
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


@dataclass
class Runs:
    """A checkpoint that four devices have made, and what other numbers of devices make of it.

    Attributes:
        place: of the checkpoint; f"{place}-{devices}": of theirs.
        expected: checksums of its tables, and the count of updates.
        losses: of the steps after it, on four devices.
        on: on(devices) is what `on_devices` returned there, in a process that runs once.
    """

    place: str
    expected: list
    losses: list[float]
    on: Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(mesh, tmp_path_factory) -> Runs:
    place = str(tmp_path_factory.mktemp("devices") / "checkpoints")
    folder = str(tmp_path_factory.mktemp("devices") / "programs")
    embeddings = make(mesh, "mixed", "lazy_adam")
    model, optimizer = dense(mesh)
    step = device.compiled(step_of_both, mesh)
    train_both(mesh, step, embeddings, model, optimizer, 0, 3)
    save(place, embeddings, mesh, 3)
    expected = [state_sums(embeddings), embeddings.step_count.item()]
    losses = train_both(mesh, step, embeddings, *dense(mesh), 3, 5)

    @functools.cache
    def on(devices: int) -> dict[str, Any]:
        return answer(start(place, folder, devices))

    return Runs(place, expected, losses, on)


# The most devices stand for the others, on which compiling takes as long.
every_other = pytest.mark.parametrize(
    "devices",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow), DUMPING],
)


@every_other
def test_a_checkpoint_is_restored_on_other_devices(runs, devices):
    assert runs.on(devices)["restored"] == dict.fromkeys(RESTORED[devices], runs.expected)


@every_other
def test_training_continues_alike_on_other_devices(runs, devices):
    assert runs.on(devices)["losses"] == pytest.approx(runs.losses, rel=TOLERANCE)


@every_other
def test_a_checkpoint_comes_back_from_other_devices(mesh, runs, devices):
    runs.on(devices)  # has saved it
    back = make(mesh, "exchange", "lazy_adam", seed=9)
    assert restore(f"{runs.place}-{devices}", back, mesh) == 7
    assert [state_sums(back), back.step_count.item()] == runs.expected


# Programs

every_plan = pytest.mark.parametrize("plan", DUMPED)


def elements(shape: hlo.Shape) -> int:
    """Returns the elements of the largest array of a shape."""
    return max(map(elements, shape.elements), default=math.prod(shape.dimensions))


def instructions(program: hlo.Module) -> list[hlo.Instruction]:
    found = []
    for computation in program.computations.values():
        found += computation.instructions
    return found


def arrays_of(plan: str) -> int:
    """Returns how many arrays are as large as the tables: the weight and the full states."""
    return 1 + list(OPTIMIZERS[DUMPED[plan]].states.values()).count("full")


@every_plan
def test_only_the_update_in_place_is_as_large_as_a_table(runs, plan):
    """No copy, all-gather, all-reduce, broadcast (a dense gradient), add or sort has that size."""
    found = runs.on(DUMPING)["programs"][plan]
    without_memory = ("parameter", "bitcast", "get-tuple-element", "tuple")  # of their own
    large = []
    for one in instructions(read_program(found["step"])):
        if one.opcode not in without_memory and elements(one.shape) >= found["part"] // 2:
            large.append(one)

    operations = Counter(one.opcode for one in large)
    names = [f"{one.name} {one.shape}" for one in large]
    assert operations.keys() <= {"scatter", "fusion", "call"}, names
    assert operations["scatter"] == arrays_of(plan), names


@every_plan
def test_tables_come_in_and_go_out_in_the_same_memory(runs, plan):
    """They have sizes of their own."""
    found = runs.on(DUMPING)["programs"][plan]
    program = read_program(found["step"])
    inputs = [one.shape for one in program.parameters]
    outputs = program.entry.root.shape.elements

    in_place = []
    for output, source in program.input_output_alias:
        if inputs[source].text == outputs[output].text:
            in_place.append(outputs[output])

    def large(shapes: list[hlo.Shape]) -> list[str]:
        return sorted(shape.text for shape in shapes if elements(shape) >= found["part"] // 2)

    assert len(large(inputs)) == len(set(large(inputs))) == arrays_of(plan)
    assert large(in_place) == large(inputs) == large(outputs)


@every_plan
def test_each_device_makes_its_own_part_of_the_weights(runs, plan):
    found = runs.on(DUMPING)["programs"][plan]
    part = found["part"]
    initial = read_program(found["initial"])
    largest = max(elements(one.shape) for one in instructions(initial))
    assert part <= largest < 1.01 * part, "more was made"

    everything = sum(table.rows for table in BIG) * DIM
    expected = everything if plan == "data" else everything / DUMPING
    assert part == pytest.approx(expected, rel=0.05)
