"""Embedding tables in several processes of plain PyTorch (embedding/process_devices.py) against
those on one device: look-ups, losses, updates, checkpoints.

embedding_processes.py is what the processes do.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from embedding_helpers import (
    EXCHANGED,
    SHORTAGES,
    TOLERANCE,
    different_ids,
    filled,
    host_batch,
    loaded_step,
    make,
    put,
    restore,
    save,
    whole,
    with_room,
)
from embedding_processes import CASES, GROUPS, STEPS
from helpers import environment, equal, exported, losses, records

from bench import embedding as bench
from errors import InputError
from train.common import device

TESTS = Path(__file__).parent
slow = pytest.mark.slow
every_count = pytest.mark.parametrize("count", [2, pytest.param(4, marks=slow)])


@pytest.fixture(scope="module")
def do(tmp_path_factory):
    """Does jobs of embedding_processes.py, each once: do("2:train") returns their folder."""
    folder = tmp_path_factory.mktemp("processes")
    done = set()

    def start(*jobs: str) -> Path:
        waiting = [job for job in jobs if job not in done]
        if waiting:
            command = [sys.executable, "embedding_processes.py", str(folder), *waiting]
            variables = environment(1, PYTHONPATH=str(TESTS.parent))
            subprocess.run(command, cwd=TESTS, env=variables, check=True, timeout=600)
            done.update(waiting)
        return folder

    return start


@pytest.fixture(scope="module")
def found(do):
    """Returns what each of so many processes has found: found("exchange, SGD", 2)."""

    def read(name: str, count: int) -> list[dict]:
        folder = do("1:train", f"{count}:train")
        return [torch.load(folder / f"{name}-{count}-{number}.pt") for number in range(count)]

    return read


# Relative, too: the "one" id of all examples has sums of squares above 1.
near = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def all_pieces(processes: list[dict], when: str) -> dict:
    """Returns the tables and states that the pieces of all processes make up."""
    pieces = {}
    for process in processes:
        assert not pieces.keys() & process[when].keys()
        pieces |= process[when]
    return whole(pieces)


def assert_alike(found, name: str, count: int) -> None:
    """Asserts that so many processes have trained a case as one device has."""
    processes = found(name, count)
    (alone,) = found(name, 1)

    before = all_pieces(processes, "before")
    assert equal(before, all_pieces([alone], "before"))

    for step, expected in enumerate(alone["pooled"]):
        near(torch.cat([process["pooled"][step] for process in processes]), expected)
        losses = [process["losses"][step] for process in processes]
        assert sum(losses) / count == pytest.approx(alone["losses"][step], rel=TOLERANCE)

    after = all_pieces(processes, "after")
    expected = all_pieces([alone], "after")
    assert after.keys() == expected.keys()
    for key, value in expected.items():
        near(after[key], value)
        moved = (value - before[key]).abs().max()
        assert moved > 1e-4, f"{key} did not learn: this comparison shows nothing"


# Training


@every_count
@pytest.mark.parametrize("name", CASES)
def test_processes_train_tables_as_one_device_does(found, name, count):
    assert_alike(found, name, count)


@slow
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_processes_train_as_one_device_does(found, name):
    assert_alike(found, name, 4)


def assert_copies_are_equal(found, name: str, count: int, copies: int) -> None:
    parts = {}
    for process in found(name, count):
        for key, (index, tensor) in process["parts"].items():
            parts.setdefault((*key, index), []).append(tensor)
    assert parts
    for same in parts.values():
        assert len(same) == copies
        assert all(torch.equal(tensor, same[0]) for tensor in same)


@every_count
def test_copies_of_a_table_stay_equal_to_the_bit(found, count):
    assert_copies_are_equal(found, "copied, lazy Adam", count, copies=count)


@slow
def test_copies_of_groups_stay_equal_to_the_bit(found):
    assert_copies_are_equal(found, "groups, lazy Adam", 4, copies=2)


@every_count
def test_a_process_holds_its_part_of_the_tables_only(found, count):
    (alone,) = found("exchange, Adagrad", 1)
    _, whole_weight = alone["parts"]["data", "weight"]
    for process in found("exchange, Adagrad", count):
        for name in ("weight", "sum"):
            _, part = process["parts"]["exchange", name]
            rows = len(part) * count
            assert len(whole_weight) <= rows < len(whole_weight) + 8 * count


# Ids without a slot


def room_of(load: dict) -> dict:
    return {key: load[key].item() for key in ("dropped", "pair_load", "update_load")}


@every_count
def test_loads_of_processes_are_those_computed_on_the_host(found, count):
    torch.manual_seed(0)
    array_rows = (different_ids() + torch.tensor([0, 5000])).int()
    fill = bench.exchange_fill(array_rows.reshape(count, -1))
    for process in found("enough", count):
        load = room_of(process)
        assert load["dropped"] == 0
        assert load["pair_load"] == pytest.approx(fill.pair)
        assert load["update_load"] == pytest.approx(fill.update)
        assert process["error"] == ""


@every_count
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_every_process_stops_where_ids_find_no_slot(found, shortage, count):
    processes = found(shortage, count)
    load = room_of(processes[0])
    needed = load["pair_load"] if shortage == "pair" else load["update_load"]
    assert load["dropped"] > 0
    assert needed > 1.1
    for process in processes:
        assert room_of(process) == load
        error = process["error"]
        assert error.startswith(f"{load['dropped']:.0f} ids found no slot in the exchange")
        assert f" {needed:.2f} times its {'slots' if shortage == 'pair' else 'updates'}" in error


@slow
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_processes_say_what_xlas_devices_say(found, mesh, shortage):
    torch.manual_seed(0)
    batch = host_batch(0, EXCHANGED, ragged=False) | {"ids": different_ids()}
    embeddings = with_room(mesh, SHORTAGES[shortage].room)
    device.compiled(loaded_step, mesh)(embeddings, put(mesh, batch))
    with pytest.raises(InputError) as error:
        embeddings.check()
    assert found(shortage, 4)[0]["error"] == str(error.value)


# Checkpoints


@pytest.fixture(scope="module")
def saved(do, mesh):
    """The tables that a checkpoint of XLA's four devices has, "xla" in the folder of the jobs."""
    embeddings = filled(mesh, "rowwise_adagrad")
    save(f"{do()}/xla", embeddings, mesh, 7)
    return whole(embeddings.pieces())


def assert_restores(mesh, place: Path, expected: dict) -> None:
    """Asserts that XLA's four devices restore these tables."""
    embeddings = make(mesh, "mixed", "rowwise_adagrad", seed=1)
    assert restore(str(place), embeddings, mesh) == 7
    assert embeddings.step_count.item() == 1000
    assert equal(whole(embeddings.pieces()), expected)


def test_checkpoints_pass_from_xla_to_processes_and_back(do, mesh, saved):
    folder = do("2:restore:xla:two", "1:restore:two:one", "2:restore:one:two again")
    assert_restores(mesh, folder / "two again", saved)  # the last one of the chain
    files = {path.name for path in (folder / "two/step_00000007").glob("tables-*.safetensors")}
    assert files == {"tables-00000.safetensors", "tables-00001.safetensors"}


@slow
def test_checkpoints_pass_from_two_processes_to_four(do, mesh, saved):
    folder = do("2:restore:xla:two", "4:restore:two:four", "2:restore:four:half")
    do("1:restore:four:quarter", "4:restore:xla:pod")
    for name in ("four", "half", "quarter", "pod"):
        assert_restores(mesh, folder / name, saved)


# DLRM


@pytest.fixture(scope="module")
def dlrm(do):
    """Returns the folder of a run, and the metrics of its processes: "one", on one process; "two",
    on two; "resumed", on two that crash and resume."""
    folder = do("1:dlrm:one", "2:dlrm:two", "2:stop:resumed", "2:dlrm:resumed")

    def read(name: str, count: int) -> tuple[Path, list[dict]]:
        metrics = [torch.load(folder / f"{name}-{count}-{number}.pt") for number in range(count)]
        return folder / "runs" / name, metrics

    return read


# Of a loss after some updates of Adam, which divides by numbers near 0.
ROUNDING = 2e-5


def assert_run_alike(found: tuple[Path, list[dict]], expected: tuple[Path, list[dict]]) -> None:
    folder, metrics = found
    expected_folder, (expected_metrics,) = expected
    of_steps = losses(expected_folder)
    assert len(of_steps) == STEPS
    assert max(of_steps) - min(of_steps) > 0.05
    assert losses(folder) == pytest.approx(of_steps, rel=ROUNDING)
    for of_process in metrics:
        assert of_process == pytest.approx(expected_metrics, rel=ROUNDING)

    weights = exported(folder)
    expected_weights = exported(expected_folder)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2e-5)


def test_dlrm_on_two_processes_trains_as_on_one(dlrm):
    assert_run_alike(dlrm("two", 2), dlrm("one", 1))


def test_dlrm_on_two_processes_resumes_exactly(dlrm):
    folder, metrics = dlrm("resumed", 2)
    straight, expected = dlrm("two", 2)
    assert len(json.loads((folder / "config.json").read_text())["starts"]) == 2
    assert records(folder) == records(straight)
    assert metrics == expected
    assert equal(exported(folder), exported(straight))


@slow
def test_dlrm_of_two_processes_resumes_on_one(do, dlrm):
    do("2:stop:fewer", "1:dlrm:fewer")
    assert_run_alike(dlrm("fewer", 1), dlrm("one", 1))
