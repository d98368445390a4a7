"""train/common/loading.py with worker processes, on four virtual devices."""

import functools
import itertools
import math
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
from loading_helpers import Batches, Numbers, Sentences, equal, take

from data.batching import Buckets
from data.packing import pack
from errors import InputError
from train.common import loading
from train.common.batches import (
    PADDING,
    PREFETCH,
    BatchMaker,
    data_loader,
    start_worker,
    training_keys,
    worker_context,
)
from train.common.loading import parallel_loader

# Data sets


class Broken(Numbers):
    """Fails at example 17, if `how` says how."""

    def __init__(self, size: int, how: str):
        super().__init__(size)
        self.how = how

    def example(self, index: int, rng: np.random.Generator) -> dict:
        if self.how and index == 17:
            decode_the_broken_one(self.how)
        return super().example(index, rng)


def decode_the_broken_one(how: str) -> None:
    """Fails in one of seven ways."""
    match how:
        case "exit":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("no picture 17")
        case "input":
            local = type("Local", (InputError,), {})
            raise local("picture 17 cannot be decoded; remove it")
        case "stop":
            raise StopIteration
        case "made":
            local = type("Slow", (OSError,), {})  # not what this module calls Slow
            raise local("slow down")
        case "group":
            raise ExceptionGroup("two", [OSError(), OSError()])


class Pictures(Numbers):
    """Tensors of several ranks and types, large enough that the upload of a batch takes a while."""

    def example(self, index, rng):
        row = np.full(3, index, np.float32)
        image = np.full((3, 128, 128), index, np.uint8)
        return {"index": np.int64(index), "row": row, "image": image}


class Slow(Numbers):
    """Takes 10 ms per example."""

    def example(self, index, rng):
        time.sleep(0.01)
        return super().example(index, rng)


class Rows(Numbers):
    """Rows of a table, read together."""

    def batch(self, indices):
        self.calls += indices.tolist()
        table = np.arange(3 * self.size, dtype=np.float32).reshape(-1, 3)
        return {"row": table[indices], "index": np.asarray(indices)}


class InOrder(Numbers):
    """Has an order of its own."""

    def order(self, seed, epoch, batch_size):
        full_batches = self.size // batch_size
        return np.arange(full_batches * batch_size)


class Unsent(Buckets):
    """A plan that may not be sent to workers."""

    def __reduce__(self):
        raise AssertionError("the plan was sent to a worker")


@dataclass(frozen=True)
class Kind:
    """A data set, its batches and how these are shuffled."""

    dataset: Numbers
    batch_size: Any  # or a plan
    options: dict[str, str] = field(default_factory=dict)


SHAPES = [(8, 10), (24, 20), (32, 4)]
SENTENCES = Sentences(27)
PLAN = Unsent(SENTENCES.lengths, SHAPES)
PACKED = pack(SENTENCES.lengths, (8, 24))
# Each has three batches in an epoch of training.
KINDS = {
    "examples": Kind(Numbers(27), 8),
    "rows": Kind(Rows(27), 8),
    "rows in blocks": Kind(Rows(27), 8, {"shuffle": "batches"}),
    "plan": Kind(SENTENCES, PLAN),
}
EPOCH_STARTS = (0, 3, 6)  # batches at which the first three epochs begin
every_kind = pytest.mark.parametrize("kind", KINDS)


def train_batches(kind: str, mesh, **options) -> Batches:
    """Returns the batches of ten steps; the data set's calls are those that made them."""
    chosen = KINDS[kind]
    options = {"seed": 3, "stop": 10, **chosen.options, **options}
    chosen.dataset.calls.clear()
    return take(parallel_loader(chosen.dataset, chosen.batch_size, mesh, train=True, **options))


def number_of_examples(batches: Batches) -> int:
    return sum(len(batch["index"]) for batch in batches)


# Training


@pytest.fixture(scope="module")
def uninterrupted(mesh):
    """The batches of ten steps, over three ends of an epoch: uninterrupted("plan")."""
    return functools.cache(lambda kind: train_batches(kind, mesh))


def test_each_epoch_is_another_permutation(uninterrupted):
    batches = uninterrupted("examples")
    everything = frozenset(range(27))

    epochs = []
    for start in EPOCH_STARTS:
        epochs.append(np.concatenate([batch["index"] for batch in batches[start : start + 3]]))

    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 24
        assert set(epoch) <= everything
        assert list(epoch) != sorted(epoch)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # What is left out differs too, so that every example has its turn.
    assert len({everything - frozenset(epoch) for epoch in epochs}) > 1


def test_each_example_of_each_epoch_draws_anew(uninterrupted):
    draws = np.concatenate([batch["draw"] for batch in uninterrupted("examples")])
    assert len(set(draws)) == 80


def test_another_seed_is_another_order_with_other_draws(mesh, uninterrupted):
    batches = uninterrupted("examples")
    others = train_batches("examples", mesh, seed=4)

    for one, two in zip(others, batches, strict=True):
        assert not np.array_equal(one["index"], two["index"])
    draws = set(np.concatenate([batch["draw"] for batch in batches]))
    assert not set(np.concatenate([batch["draw"] for batch in others])) & draws


def test_a_data_set_with_batch_has_the_order_of_one_with_example(uninterrupted):
    batches = uninterrupted("rows")

    order = [batch["index"].tolist() for batch in batches]
    assert order == [batch["index"].tolist() for batch in uninterrupted("examples")]
    for batch in batches:
        first_column = 3.0 * batch["index"]
        expected = np.stack([first_column, first_column + 1, first_column + 2], axis=1)
        assert np.array_equal(batch["row"], expected)


def test_shuffled_batches_keep_their_rows_together(uninterrupted):
    for batch in uninterrupted("rows in blocks"):
        indices = batch["index"].tolist()
        assert indices == list(range(indices[0], indices[0] + 8))
        assert indices[0] % 8 == 0


def test_shuffled_batches_have_another_order_in_each_epoch(uninterrupted):
    first_rows = [batch["index"][0] for batch in uninterrupted("rows in blocks")]
    epochs = [first_rows[start : start + 3] for start in EPOCH_STARTS]

    assert all(sorted(epoch) == [0, 8, 16] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_shuffled_batches_have_another_order_with_another_seed(mesh):
    first_rows = set()
    for seed in range(8):
        (batch,) = train_batches("rows in blocks", mesh, seed=seed, stop=1)
        first_rows.add(batch["index"][0])
    assert len(first_rows) > 1


def test_a_plan_gives_its_batches_epoch_by_epoch(mesh, uninterrupted):
    epochs = [PLAN.epoch(np.random.default_rng((3, epoch))) for epoch in range(4)]
    planned = list(itertools.chain(*epochs))[:10]

    batches = uninterrupted("plan")

    for batch, (indices, lengths) in zip(batches, planned, strict=True):
        assert np.array_equal(batch["index"], indices)
        assert np.array_equal(batch["tokens"], SENTENCES.batch(indices, lengths)["tokens"])
        assert batch["tokens"].shape == (len(indices), *lengths)
        assert batch["mask"].tolist() == (indices != PADDING).tolist()
    is_padded = [0 < batch["mask"].mean() < 1 for batch in batches]
    assert any(is_padded), "no batch was padded: the test has to see some"
    assert not equal(train_batches("plan", mesh, seed=4), batches)


def test_a_plan_cannot_be_shuffled_by_batches(mesh):
    with pytest.raises(ValueError, match="a plan has an order of its own"):
        train_batches("plan", mesh, shuffle="batches")


def test_a_data_set_with_an_order_is_not_shuffled_by_batches(mesh):
    with pytest.raises(ValueError, match="InOrder has an order of its own"):
        parallel_loader(InOrder(27), 8, mesh, train=True, stop=10, shuffle="batches")


@pytest.mark.parametrize("workers, start", [(0, 1), (0, 3), (0, 4), (0, 10), (2, 4)])
@every_kind
def test_neither_workers_nor_the_start_change_a_batch(mesh, uninterrupted, kind, workers, start):
    expected = uninterrupted(kind)[start:]
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].tolist()

    batches = train_batches(kind, mesh, start=start, workers=workers)

    assert equal(batches, expected)
    made_here = 0 if workers else number_of_examples(expected)
    calls = len(KINDS[kind].dataset.calls)
    assert calls == made_here, "batches of the steps before the start were made"
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state


@every_kind
def test_a_start_far_ahead_costs_nothing(mesh, kind):
    far = 3 * 10**6 + 1
    batches = train_batches(kind, mesh, start=far, stop=far + 2)
    assert len(batches) == 2
    assert len(KINDS[kind].dataset.calls) == number_of_examples(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_micro_batch_has_the_counts_of_its_batch(mesh, workers):
    def count(micro_batch):
        index = micro_batch["index"]
        return {"total": 2 * index + 1, "rows": torch.ones(len(index))}

    expected = train_batches("examples", mesh, start=1, micro_batches=2, workers=workers)
    counted = train_batches(
        "examples", mesh, start=1, micro_batches=2, workers=workers, counts_per_row=count
    )

    assert len(expected) == 18
    for number, micro_batch in enumerate(expected):
        first = number // 2 * 2  # of its batch
        both = expected[first]["index"] + expected[first + 1]["index"]
        micro_batch["total"] = 2 * both + 2
        micro_batch["rows"] = np.full(4, 2, np.float32)
    assert equal(counted, expected)


def test_micro_batches_after_the_first_batch_are_read_singly(mesh, monkeypatch):
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    monkeypatch.setattr(loading, "AHEAD", 1)
    dataset = Numbers(64)

    def count(micro_batch):
        return {"rows": torch.ones(len(micro_batch["index"]))}

    read = []  # micro-batches, when each of the twelve is ready
    options = {"train": True, "micro_batches": 4, "stop": 3, "counts_per_row": count}
    with parallel_loader(dataset, 16, mesh, **options) as loader:
        for _ in range(12):
            loader._uploads[0].result()
            read.append(len(dataset.calls) // 4)
            loader._uploads.popleft()
            loader._uploads.append(loader._thread.submit(loader._load))
        with pytest.raises(StopIteration):
            next(loader)
    assert read == [4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_sharded_and_do_not_change_later(mesh, workers):
    """Tensors of every rank: a ShardingSpec fits one only, and MpDeviceLoader silently replicates
    those of another. They must not share memory with what a worker makes later."""
    dataset = Pictures(200)
    with parallel_loader(dataset, 8, mesh, train=True, stop=25, workers=workers) as loader:
        batches = list(loader)

    specs = {
        "index": "{devices=[4]0,1,2,3",
        "row": "{devices=[4,1]0,1,2,3",
        "image": "{devices=[4,1,1,1]0,1,2,3",
    }
    keys = training_keys(dataset, 8, 0, 0, 25)
    for batch, (_, indices) in zip(batches, keys, strict=True):
        for key, expected in specs.items():
            spec = torch_xla._XLAC._get_xla_sharding_spec(batch[key])
            assert spec.startswith(expected), key
        assert batch["index"].cpu().tolist() == indices.tolist()
        column = torch.tensor(indices)[:, None]
        row = column.expand(8, 3).float()
        assert torch.equal(batch["row"].cpu(), row)
        image = column[..., None, None].expand(8, 3, 128, 128).byte()
        assert torch.equal(batch["image"].cpu(), image)


def test_a_worker_reuses_slots_and_sends_memory_if_it_grew(monkeypatch):
    worker = BatchMaker(SENTENCES, 0, False, loading.as_tensors)
    parent = BatchMaker(SENTENCES, 0, False, loading.as_tensors)
    keys = []
    for epoch in range(40):
        for key in PLAN.epoch(np.random.default_rng(epoch)):
            keys.append((0, *key))
    expected = [worker[key] for key in keys]

    worker_info = type("Worker", (), {"id": 3})
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: worker_info)
    opened = []
    grown = 0
    for number, key in enumerate(keys):
        sent = worker[key]
        opened.append(parent.opened(sent))
        if sent.memory is not None:
            grown += 1
        first_held = max(0, number - PREFETCH)  # what a worker made before may be overwritten
        assert equal(expected[first_held : number + 1], opened[first_held:]), number
    assert 1 <= grown <= len(SHAPES)


def odd(examples):
    """Collates into another mapping, with an image that has a gradient and is not contiguous."""
    image = torch.arange(len(examples) * 12.0).view(-1, 3, 2, 2).requires_grad_()
    return UserDict(image=image.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collates_tensors_arrive_contiguous(mesh, monkeypatch, workers):
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    options = {"train": False, "collate": odd, "workers": workers}
    with parallel_loader(Numbers(8), 8, mesh, **options) as loader:
        image = next(loader)["image"]
        assert image.is_contiguous()
        assert not image.requires_grad
        assert image.flatten().tolist() == list(range(96))


# Evaluation


@pytest.mark.parametrize("size, workers", [(1, 0), (8, 0), (27, 0), (9, 2)])
@pytest.mark.parametrize("kind", [Numbers, Rows])
def test_evaluation_has_every_example_once_in_order(mesh, kind, size, workers):
    batches = take(parallel_loader(kind(size), 8, mesh, train=False, workers=workers))

    shapes = [batch["index"].shape for batch in batches]
    assert shapes == math.ceil(size / 8) * [(8,)]  # one graph
    indices = np.concatenate([batch["index"] for batch in batches])
    mask = np.concatenate([batch["mask"] for batch in batches])
    assert mask.dtype == np.float32
    assert mask.tolist() == [1.0] * size + [0.0] * (len(indices) - size)
    assert indices[:size].tolist() == list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, PACKED], ids=["buckets", "packed"])
def test_an_evaluation_by_a_plan_has_every_example_once(mesh, plan, workers):
    batches = take(parallel_loader(SENTENCES, plan, mesh, train=False, workers=workers))

    assert len(batches) == len(plan) == loading.steps_per_epoch(SENTENCES, plan, mesh)
    indices = np.concatenate([batch["index"].reshape(-1) for batch in batches])
    mask = np.concatenate([batch["mask"].reshape(-1) for batch in batches])
    assert sorted(indices[mask > 0].tolist()) == list(range(27))
    assert set(indices[mask == 0].tolist()) == {PADDING}
    assert all(batch["mask"].shape == batch["index"].shape for batch in batches)
    if plan is PACKED:
        assert {batch["mask"].shape for batch in batches} == {(8, plan.most)}


# Errors


@dataclass(frozen=True)
class Leftovers:
    """The threads and child processes of this process before a loader was opened."""

    threads: set
    processes: set

    @classmethod
    def before(cls) -> "Leftovers":
        return cls(set(threading.enumerate()), set(multiprocessing.active_children()))

    def started(self) -> set:
        """Returns the child processes that were started since."""
        return set(multiprocessing.active_children()) - self.processes

    def assert_gone(self, processes: set) -> None:
        """Asserts that these processes and all threads since have ended, or end within 5 seconds:
        a queue's thread ends a moment after the process that it feeds."""
        deadline = time.perf_counter() + 5
        while True:
            alive = {process for process in processes if process.is_alive()}
            left = alive | set(threading.enumerate()) - self.threads
            if not left:
                return
            assert time.perf_counter() < deadline, left
            time.sleep(0.01)


@dataclass(frozen=True)
class Failure:
    """An example 17 or a collate that fails, and what the loop gets."""

    error: type[Exception]
    texts: tuple[str, ...]  # in the error's text, or names in its traceback
    how: str = ""  # example 17 fails; "": it does not
    collate: Callable = loading.as_tensors


def collate_too_few(examples):
    return loading.as_tensors(examples[1:])


def collate_a_scalar(examples):
    return {"total": torch.zeros(())}


TOO_FEW = (
    "batch['index'] has shape [7]; its first dimension must be the 8 examples that this host loads"
)
FAILURES = {
    "example": Failure(KeyError, ("no picture 17", "decode_the_broken_one"), "raise"),
    "input": Failure(InputError, ("picture 17 cannot be decoded; remove it",), "input"),
    "StopIteration": Failure(RuntimeError, ("StopIteration",), "stop"),
    "made": Failure(RuntimeError, ("Slow: slow down",), "made"),  # its class cannot be pickled
    "group": Failure(RuntimeError, ("ExceptionGroup: two (2 sub-exceptions)",), "group"),
    "short": Failure(ValueError, (TOO_FEW,), collate=collate_too_few),
    "scalar": Failure(ValueError, ("batch['total'] has shape []",), collate=collate_a_scalar),
}
IN_WORKERS = ("example", "input", "StopIteration", "made", "group")
FAILURE_CASES = [(name, 0) for name in FAILURES] + [(name, 2) for name in IN_WORKERS]


@pytest.mark.parametrize("name, workers", FAILURE_CASES)
def test_an_error_stops_the_loop_with_its_own_words(mesh, name, workers):
    failure = FAILURES[name]
    before = Leftovers.before()
    options = {"train": False, "workers": workers, "collate": failure.collate}

    with parallel_loader(Broken(32, failure.how), 8, mesh, **options) as loader:
        processes = before.started()
        assert len(processes) == workers
        if failure.how:
            for _ in range(2):  # example 17 is in the third batch
                next(loader)
        for _ in range(2):  # and again, instead of waiting forever
            with pytest.raises(failure.error) as error:
                next(loader)

    assert type(error.value) is failure.error
    names = [entry.name for entry in traceback.extract_tb(error.value.__traceback__)]
    words = str(error.value) + "".join(names)
    assert all(text in words for text in failure.texts)
    if failure.error is InputError:
        assert (str(error.value),) == failure.texts, "a user gets more than the sentence"
    before.assert_gone(processes)  # while somebody still holds the error and its traceback


class Bad(Numbers):
    """Example 17 has a row that is not finite."""

    def example(self, index, rng):
        row = np.full(3, index, np.float32)
        row[2] = -np.inf if index == 17 else 0
        return {"row": row, "label": np.float32(index)}


class BadRows(Rows):
    """Row 17 has a label that is not finite."""

    def batch(self, indices):
        label = np.where(np.asarray(indices) == 17, np.nan, 0).astype(np.float32)
        return {"row": super().batch(indices)["row"], "label": label}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset, found",
    [
        (Bad(32), "example 17 of the Bad has -inf in its 'row' at [2]"),
        (BadRows(32), "of the BadRows has nan in its 'label'"),
    ],
)
def test_input_that_is_not_finite_is_not_called_divergence(mesh, dataset, found, workers, train):
    message = f"{found}; expected finite numbers: fix or remove that example"
    with pytest.raises(InputError, match=re.escape(message)):
        take(parallel_loader(dataset, 8, mesh, train=train, stop=4, workers=workers))


def test_an_error_of_the_upload_is_raised(mesh, monkeypatch):
    monkeypatch.setattr(loading.device, "upload", lambda *_: 1 / 0)
    loader = parallel_loader(Numbers(32), 8, mesh, train=False)
    with loader, pytest.raises(ZeroDivisionError):
        next(loader)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_killed_worker_ends_the_run(mesh, how):
    started = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) exited unexpectedly"):
        take(parallel_loader(Broken(32, how), 8, mesh, train=False, workers=1))
    assert time.perf_counter() - started < 15


INDIVISIBLE_PLAN = Buckets(SENTENCES.lengths, [(8, 10), (11, 20)])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "dataset, batch_size, message",
    [
        (
            Numbers(32),
            10,
            "batch_size is 10, which is not a multiple of the 4 devices; the nearest multiple is 8",
        ),
        (Numbers(32), 1, "the nearest multiple is 4"),
        (SENTENCES, INDIVISIBLE_PLAN, "shape 11x20 is 11, .* nearest multiple is 12"),
        (Numbers(0), 8, "the data set is empty"),
    ],
)
def test_what_cannot_be_loaded_is_refused(mesh, dataset, batch_size, message, train):
    with pytest.raises(InputError, match=message):
        parallel_loader(dataset, batch_size, mesh, train=train, stop=1)


@pytest.mark.parametrize(
    ("examples", "micro_batches", "message"),
    [
        (720, 1, "--batch-size 720 makes one update per epoch, --batch-size 32 makes 22"),
        (723, 3, "--batch-size 720 makes one update per epoch, --batch-size 24 makes 30"),
        (90, 1, "--batch-size 88 makes one update per epoch, --batch-size 4 makes 22"),
        (6, 1, "--batch-size 4 makes one update per epoch; or else"),
        (3, 1, "a batch has at least 4, on these devices: add examples"),
    ],
)
def test_a_batch_larger_than_the_data_gets_batches_that_fit(mesh, examples, micro_batches, message):
    batch_size = 1200
    pattern = f"batch_size is 1200, but the data set has {examples} examples.*{message}"

    with pytest.raises(InputError, match=pattern) as error:
        loading.steps_per_epoch(
            Numbers(examples), batch_size, mesh, micro_batches=micro_batches, hint="; or else"
        )
    assert str(error.value).endswith("; or else") == (examples > 3)

    for size in map(int, re.findall(r"--batch-size (\d+)", str(error.value))):
        loading.steps_per_epoch(Numbers(examples), size, mesh, micro_batches=micro_batches)


# Counting, waiting, closing


@pytest.mark.parametrize("workers, size, skipped", [(0, 1, 1), (1, 10, 4)])
def test_skipped_files_are_counted_on_the_host(mesh, workers, size, skipped):
    """Padding does not count, although it repeats the first example of its batch, which is a
    broken one where there is 1."""
    with parallel_loader(Numbers(size), 8, mesh, train=False, workers=workers) as loader:
        assert all("skipped" not in batch for batch in loader)
        assert loader.skipped == skipped


def test_input_wait_is_near_1_where_the_loop_only_waits(mesh):
    with parallel_loader(Slow(400), 8, mesh, train=True, stop=20) as loader:
        for _ in range(6):
            next(loader)
        assert loader.input_wait() > 0.8

        time.sleep(0.05)
        assert loader.input_wait() < 0.01  # since the last call only


def test_input_wait_is_small_where_the_loop_works(mesh):
    with parallel_loader(Numbers(400), 8, mesh, train=True, stop=40) as loader:
        next(loader)
        loader.input_wait()
        for _ in range(6):
            time.sleep(0.05)
            next(loader)
        assert loader.input_wait() < 0.2


@pytest.mark.parametrize("workers", [0, 2])
def test_close_in_the_middle_is_quick_and_leaves_nothing(mesh, workers):
    before = Leftovers.before()
    loader = parallel_loader(Slow(64), 8, mesh, train=True, stop=10**9, workers=workers)
    next(loader)
    processes = before.started()
    assert len(processes) == workers

    started = time.perf_counter()
    for _ in range(2):  # twice is fine
        loader.__exit__()
    assert time.perf_counter() - started < 3
    before.assert_gone(processes)


def test_batches_are_uploaded_ahead_of_the_loop_but_not_far(mesh):
    dataset = Numbers(800)
    ahead = 8 * (1 + loading.AHEAD)  # examples of the batch that is taken, and of those ahead
    with parallel_loader(dataset, 8, mesh, train=True, stop=100) as loader:
        next(loader)
        deadline = time.perf_counter() + 5
        while len(dataset.calls) < ahead and time.perf_counter() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(dataset.calls) == ahead


def test_workers_start_from_a_clean_process():
    """A fork of this process would copy the locks of XLA's threads, held as they are."""
    assert worker_context(Numbers(1)).get_start_method() == "forkserver"


def test_minus_one_workers_are_one_per_core(monkeypatch):
    monkeypatch.setattr("train.common.batches.DataLoader", lambda examples, **options: options)
    examples = BatchMaker(Numbers(1), 0, masked=False, collate=loading.as_tensors)
    cores = len(os.sched_getaffinity(0))

    assert data_loader(examples, [], workers=-1)["num_workers"] == cores
    assert data_loader(examples, [], workers=3)["num_workers"] == 3


def signalled_worker() -> None:
    start_worker(0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # still here: the main process wants batches until it has saved


def test_a_worker_survives_sigterm_but_ends_with_the_run():
    started = time.monotonic()
    worker = worker_context(Numbers(1)).Process(target=signalled_worker)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert time.monotonic() - started > 0.5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_update_has_its_micro_batches_in_order(mesh, workers):
    expected = []
    for micro_batch in train_batches("examples", mesh, start=2, stop=5, micro_batches=2):
        expected.append(micro_batch["index"].tolist())
    options = {"start": 2, "stop": 5, "micro_batches": 2, "update_every": 2, "workers": workers}
    dataset = KINDS["examples"].dataset

    first_numbers = []
    indices = []
    with parallel_loader(dataset, 8, mesh, train=True, seed=3, **options) as loader:
        for update in loader:
            first_numbers.append(update.first)
            for micro_batch in update:
                indices.append(micro_batch["index"].cpu().tolist())
            assert update.left == 0

    assert first_numbers == [5, 7, 9]
    assert indices == expected


def test_data_that_end_within_an_update_are_an_error(mesh):
    options = {"train": True, "stop": 4, "update_every": 3}
    with parallel_loader(Numbers(16), 4, mesh, **options) as loader:
        assert len(list(next(loader))) == 3
        with pytest.raises(RuntimeError, match="the data end within an update: 2 of its"):
            list(next(loader))


def test_an_update_that_is_not_taken_whole_is_an_error(mesh):
    options = {"train": True, "stop": 4, "micro_batches": 2, "update_every": 2}
    message = "1 micro-batches of the update before this one were not taken"
    with parallel_loader(Numbers(64), 8, mesh, **options) as loader:
        next(next(loader))
        with pytest.raises(RuntimeError, match=message):
            next(loader)
