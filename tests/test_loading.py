"""train/common/loading.py with worker processes, on four virtual devices."""

import functools
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections import UserDict

import numpy as np
import pytest
import torch
import torch_xla

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


# ---- data sets -------------------------------------------------------------------------------------------------------
class Numbers:
    """Examples that say which they are, and one draw of their generator; every third is of a file that was skipped. The
    `calls` of this process are counted."""

    def __init__(self, size: int, broken: str = ""):
        self.size, self.broken, self.calls = size, broken, []

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict:
        self.calls.append(index)
        if self.broken and index == 17:
            decode_the_broken_one(self.broken)
        return {"index": np.int64(index), "draw": rng.random(), "skipped": index % 3 == 0}


def decode_the_broken_one(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    local = type("Local", (InputError,), {})("picture 17 cannot be decoded; remove it")
    errors = {"input": local, "stop": StopIteration, "group": ExceptionGroup("two", [OSError(), OSError()])}
    raise (errors | {"raise": KeyError("no picture 17"), "made": type("Slow", (OSError,), {})("slow down")})[how]


class Pictures(Numbers):
    """Tensors of several ranks and types, large enough that the upload of a batch takes a while."""

    def example(self, index, rng):
        image = np.full((3, 128, 128), index, np.uint8)
        return {"index": np.int64(index), "row": np.full(3, index, np.float32), "image": image}


class Slow(Numbers):
    def example(self, index, rng):
        time.sleep(0.01)
        return super().example(index, rng)


class Rows(Numbers):
    """Rows of a table, read together."""

    def batch(self, indices):
        self.calls += indices.tolist()
        table = np.arange(3 * self.size, dtype=np.float32).reshape(-1, 3)
        return {"row": table[indices], "index": np.asarray(indices)}


class Sentences(Numbers):
    """Sentence i is 1 to 20 tokens, all of them i."""

    def __init__(self, size: int):
        super().__init__(size)
        self.lengths = np.random.default_rng(0).integers(1, 21, size)

    def batch(self, indices, lengths):
        self.calls += indices.tolist()
        places = np.arange(*lengths)
        tokens = np.where(places < self.lengths[indices][..., None], indices[..., None], PADDING)
        return {"tokens": tokens.astype(np.int32), "index": indices}


class Unsent(Buckets):
    """Is not sent to workers."""

    def __reduce__(self):
        raise AssertionError("the plan was sent to a worker")


SHAPES = [(8, 10), (24, 20), (32, 4)]
SENTENCES = Sentences(27)
PLAN, PACKED = Unsent(SENTENCES.lengths, SHAPES), pack(SENTENCES.lengths, (8, 24))
# Data sets, their batches and how these are shuffled; each has three batches in an epoch of training.
KINDS = {
    "examples": (Numbers(27), 8, {}),
    "rows": (Rows(27), 8, {}),
    "rows in blocks": (Rows(27), 8, {"shuffle": "batches"}),
    "plan": (SENTENCES, PLAN, {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def take(loader) -> list[dict[str, np.ndarray]]:
    with loader:
        return [{key: value.cpu().numpy() for key, value in batch.items()} for batch in loader]


def train_batches(kind, mesh, **options) -> list[dict[str, np.ndarray]]:
    """Returns the batches of ten steps; the data set's calls are those that made them."""
    dataset, batch_size, shuffle = KINDS[kind]
    dataset.calls.clear()
    return take(parallel_loader(dataset, batch_size, mesh, train=True, **{"seed": 3, "stop": 10} | shuffle | options))


def equal(batches, others) -> bool:
    return len(batches) == len(others) and all(
        batch.keys() == other.keys() and all(np.array_equal(batch[key], other[key]) for key in batch)
        for batch, other in zip(batches, others, strict=True)
    )


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def uninterrupted(mesh):
    """The batches of ten steps, over three ends of an epoch: uninterrupted("plan")."""
    return functools.cache(lambda kind: train_batches(kind, mesh))


def test_each_epoch_is_another_permutation_with_other_draws(mesh, uninterrupted):
    batches = uninterrupted("examples")
    epochs = [np.concatenate([batch["index"] for batch in batches[i : i + 3]]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 24 and set(epoch) <= set(range(27)) and list(epoch) != sorted(epoch)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # What is left out differs too, so that every example has its turn.
    assert len({frozenset(range(27)) - frozenset(epoch) for epoch in epochs}) > 1
    draws = set(np.concatenate([batch["draw"] for batch in batches]))
    assert len(draws) == 80
    other = train_batches("examples", mesh, seed=4)
    assert not any(np.array_equal(one["index"], two["index"]) for one, two in zip(other, batches, strict=True))
    assert not set(np.concatenate([batch["draw"] for batch in other])) & draws


def test_a_data_set_with_batch_has_the_order_of_one_with_example(uninterrupted):
    batches = uninterrupted("rows")
    assert [b["index"].tolist() for b in batches] == [b["index"].tolist() for b in uninterrupted("examples")]
    assert all(np.array_equal(b["row"], np.stack([3.0 * b["index"] + i for i in range(3)], 1)) for b in batches)


def test_shuffled_batches_keep_their_rows_together_and_epochs_differ(mesh, uninterrupted):
    batches = [batch["index"].tolist() for batch in uninterrupted("rows in blocks")]
    assert all(batch == list(range(batch[0], batch[0] + 8)) and batch[0] % 8 == 0 for batch in batches)
    assert all(sorted(batch[0] for batch in batches[i : i + 3]) == [0, 8, 16] for i in (0, 3, 6))
    assert len({tuple(batch[0] for batch in batches[i : i + 3]) for i in (0, 3, 6)}) > 1
    seeds = [train_batches("rows in blocks", mesh, seed=seed, stop=1) for seed in range(8)]
    assert len({batch["index"][0] for (batch,) in seeds}) > 1


def test_a_plan_gives_its_batches_epoch_by_epoch(mesh, uninterrupted):
    epochs = [PLAN.epoch(np.random.default_rng((3, epoch))) for epoch in range(4)]
    batches = uninterrupted("plan")
    for batch, (indices, lengths) in zip(batches, list(itertools.chain(*epochs))[:10], strict=True):
        assert np.array_equal(batch["index"], indices)
        assert np.array_equal(batch["tokens"], SENTENCES.batch(indices, lengths)["tokens"])
        assert batch["tokens"].shape == (len(indices), *lengths)
        assert batch["mask"].tolist() == (indices != PADDING).tolist()
    assert any(0 < batch["mask"].mean() < 1 for batch in batches), "no batch was padded: the test has to see some"
    assert not equal(train_batches("plan", mesh, seed=4), batches)
    with pytest.raises(ValueError, match="a plan has an order of its own"):
        train_batches("plan", mesh, shuffle="batches")


@pytest.mark.parametrize("workers, start", [(0, 1), (0, 3), (0, 4), (0, 10), (2, 4)])
@every_kind
def test_neither_workers_nor_the_start_change_order_or_content(mesh, uninterrupted, kind, workers, start):
    expected = uninterrupted(kind)[start:]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert equal(train_batches(kind, mesh, start=start, workers=workers), expected)
    made = 0 if workers else sum(len(batch["index"]) for batch in expected)
    assert len(KINDS[kind][0].calls) == made, "batches of the steps before the start were made"
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


@every_kind
def test_a_start_far_ahead_costs_nothing(mesh, kind):
    far = 3 * 10**6 + 1
    batches = train_batches(kind, mesh, start=far, stop=far + 2)
    assert len(batches) == 2 and len(KINDS[kind][0].calls) == sum(len(batch["index"]) for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_part_of_a_batch_has_the_counts_of_all_its_parts(mesh, workers):
    def count(part):
        return {"total": 2 * part["index"] + 1, "rows": torch.ones(len(part["index"]))}

    parts = train_batches("examples", mesh, start=1, split=2, workers=workers)
    counted = train_batches("examples", mesh, start=1, split=2, workers=workers, count=count)
    assert len(parts) == 18
    for number, part in enumerate(parts):
        first = number // 2 * 2
        part["total"] = 2 * (parts[first]["index"] + parts[first + 1]["index"]) + 2
        part["rows"] = np.full(4, 2, np.float32)
    assert equal(counted, parts)


def test_parts_are_read_one_by_one_except_for_those_of_the_first_batch(mesh, monkeypatch):
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    monkeypatch.setattr(loading, "AHEAD", 1)
    dataset, read = Numbers(64), []
    options = {"split": 4, "stop": 3, "count": lambda part: {"rows": torch.ones(len(part["index"]))}}
    with parallel_loader(dataset, 16, mesh, train=True, **options) as loader:
        for _ in range(12):
            loader._ahead[0].result()
            read.append(len(dataset.calls) // 4)
            loader._ahead.popleft()
            loader._ahead.append(loader._thread.submit(loader._load))
        with pytest.raises(StopIteration):
            next(loader)
    assert read == [4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_lie_in_parts_on_the_devices_and_do_not_change_any_more(mesh, workers):
    """Tensors of every rank: a ShardingSpec fits one only, and MpDeviceLoader silently replicates those of another.
    They must not share memory with what a worker makes later."""
    with parallel_loader(Pictures(200), 8, mesh, train=True, stop=25, workers=workers) as loader:
        batches = list(loader)
    specs = {"index": "{devices=[4]0,1,2,3", "row": "{devices=[4,1]0,1,2,3", "image": "{devices=[4,1,1,1]0,1,2,3"}
    for batch, (_, indices) in zip(batches, training_keys(Pictures(200), 8, 0, 0, 25), strict=True):
        for key, expected in specs.items():
            assert torch_xla._XLAC._get_xla_sharding_spec(batch[key]).startswith(expected), key
        assert batch["index"].cpu().tolist() == indices.tolist()
        numbers = torch.tensor(indices)[:, None]
        assert torch.equal(batch["row"].cpu(), numbers.expand(8, 3).float())
        assert torch.equal(batch["image"].cpu(), numbers[..., None, None].expand(8, 3, 128, 128).byte())


def test_a_worker_uses_its_memory_in_turns_and_sends_it_where_it_grew(monkeypatch):
    worker, parent = (BatchMaker(SENTENCES, 0, False, loading.as_tensors) for _ in range(2))
    keys = [(0, *key) for epoch in range(40) for key in PLAN.epoch(np.random.default_rng(epoch))]
    made, held, grown = [worker[key] for key in keys], [], 0
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: type("Worker", (), {"id": 3}))
    for number, key in enumerate(keys):
        sent = worker[key]
        held.append(parent.opened(sent))
        grown += sent.memory is not None
        start = max(0, number - PREFETCH)
        assert equal(made[start : number + 1], held[start:]), number
    assert 1 <= grown <= len(SHAPES)


def odd(examples):
    image = torch.arange(len(examples) * 12.0).view(-1, 3, 2, 2).requires_grad_()
    return UserDict(image=image.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collate_returns_arrives_the_same_with_workers_and_without(mesh, monkeypatch, workers):
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    with parallel_loader(Numbers(8), 8, mesh, train=False, collate=odd, workers=workers) as loader:
        image = next(loader)["image"]
        assert image.is_contiguous() and not image.requires_grad and image.flatten().tolist() == list(range(96))


# ---- evaluation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, workers", [(1, 0), (8, 0), (27, 0), (9, 2)])
@pytest.mark.parametrize("kind", [Numbers, Rows])
def test_evaluation_has_every_example_once_in_order(mesh, kind, size, workers):
    batches = take(parallel_loader(kind(size), 8, mesh, train=False, workers=workers))
    assert [batch["index"].shape for batch in batches] == -(-size // 8) * [(8,)]  # one graph
    indices, mask = (np.concatenate([batch[key] for batch in batches]) for key in ("index", "mask"))
    assert mask.dtype == np.float32 and mask.tolist() == [1.0] * size + [0.0] * (len(indices) - size)
    assert indices[:size].tolist() == list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, PACKED], ids=["buckets", "packed"])
def test_an_evaluation_by_a_plan_has_every_example_once(mesh, plan, workers):
    batches = take(parallel_loader(SENTENCES, plan, mesh, train=False, workers=workers))
    assert len(batches) == len(plan) == loading.steps_per_epoch(SENTENCES, plan, mesh)
    indices, mask = (np.concatenate([batch[key].reshape(-1) for batch in batches]) for key in ("index", "mask"))
    assert sorted(indices[mask > 0].tolist()) == list(range(27)) and set(indices[mask == 0].tolist()) == {PADDING}
    assert all(batch["mask"].shape == batch["index"].shape for batch in batches)
    assert plan is PLAN or {batch["mask"].shape for batch in batches} == {(8, plan.most)}


# ---- errors ----------------------------------------------------------------------------------------------------------
def assert_gone(threads: set, processes: set) -> None:
    """A queue's thread ends a moment after the process that it feeds."""
    deadline = time.perf_counter() + 5
    while left := {one for one in processes if one.is_alive()} | set(threading.enumerate()) - threads:
        assert time.perf_counter() < deadline, left
        time.sleep(0.01)


SHORT = "batch['index'] has shape [7]; its first dimension must be the 8 examples that this host loads"
# How example 17 fails, or else the collate; the error, and what its text and traceback have.
ERRORS = {
    "example": ("raise", loading.as_tensors, KeyError, ("no picture 17", "decode_the_broken_one")),
    "input": ("input", loading.as_tensors, InputError, ("picture 17 cannot be decoded; remove it",)),
    "StopIteration": ("stop", loading.as_tensors, RuntimeError, ("StopIteration",)),
    "made": ("made", loading.as_tensors, RuntimeError, ("Slow: slow down",)),  # its class cannot be pickled
    "group": ("group", loading.as_tensors, RuntimeError, ("ExceptionGroup: two (2 sub-exceptions)",)),
    "short": ("", lambda examples: loading.as_tensors(examples[1:]), ValueError, (SHORT,)),
    "scalar": ("", lambda examples: {"total": torch.zeros(())}, ValueError, ("batch['total'] has shape []",)),
}
WORKED = ("example", "input", "StopIteration", "made", "group")


@pytest.mark.parametrize("what, workers", [*((what, 0) for what in ERRORS), *((what, 2) for what in WORKED)])
def test_an_error_stops_the_loop_with_its_own_words_and_leaves_nothing(mesh, what, workers):
    how, collate, kind, texts = ERRORS[what]
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    with parallel_loader(Numbers(32, how), 8, mesh, train=False, workers=workers, collate=collate) as loader:
        processes = set(multiprocessing.active_children()) - children
        assert len(processes) == workers
        for _ in range(2 if how else 0):
            next(loader)
        for _ in range(2):  # and again, instead of waiting forever
            with pytest.raises(kind) as error:
                next(loader)
    assert type(error.value) is kind
    words = str(error.value) + "".join(entry.name for entry in traceback.extract_tb(error.value.__traceback__))
    assert all(text in words for text in texts)
    assert kind is not InputError or (str(error.value),) == texts, "a user gets more than the sentence"
    assert_gone(threads, processes)  # while somebody still holds the error and its traceback


class Bad(Numbers):
    """Example 17 has a row that is not finite."""

    def example(self, index, rng):
        row = np.full(3, index, np.float32)
        row[2] = -np.inf if index == 17 else 0
        return {"row": row, "label": np.float32(index)}


class BadRows(Rows):
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
def test_input_that_is_not_finite_is_named_and_not_called_divergence(mesh, dataset, found, workers, train):
    with pytest.raises(InputError, match=re.escape(f"{found}; expected finite numbers: fix or remove that example")):
        take(parallel_loader(dataset, 8, mesh, train=train, stop=4, workers=workers))


def test_an_error_of_the_upload_is_raised(mesh, monkeypatch):
    monkeypatch.setattr(loading.device, "upload", lambda *_: 1 / 0)
    with parallel_loader(Numbers(32), 8, mesh, train=False) as loader, pytest.raises(ZeroDivisionError):
        next(loader)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_killed_worker_ends_the_run(mesh, how):
    started, message = time.perf_counter(), r"DataLoader worker \(pid.*\) exited unexpectedly"
    with pytest.raises(RuntimeError, match=message):
        take(parallel_loader(Numbers(32, how), 8, mesh, train=False, workers=1))
    assert time.perf_counter() - started < 15


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "dataset, batch_size, message",
    [
        (Numbers(32), 10, "batch_size is 10, which does not divide by the 4 devices; the nearest that does is 8"),
        (Numbers(32), 1, "the nearest that does is 4"),
        (SENTENCES, Buckets(SENTENCES.lengths, [(8, 10), (11, 20)]), "shape 11x20 is 11, .* nearest that does is 12"),
        (Numbers(0), 8, "the data set is empty"),
    ],
)
def test_what_cannot_be_loaded_is_refused(mesh, dataset, batch_size, message, train):
    with pytest.raises(InputError, match=message):
        parallel_loader(dataset, batch_size, mesh, train=train, stop=1)


# ---- counting, waiting, closing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers, size, skipped", [(0, 1, 1), (1, 10, 4)])
def test_skipped_files_are_counted_on_the_host(mesh, workers, size, skipped):
    """Padding, which repeats the first example of its part (a broken one where there is 1), does not count."""
    with parallel_loader(Numbers(size), 8, mesh, train=False, workers=workers) as loader:
        assert all("skipped" not in batch for batch in loader) and loader.skipped == skipped


def test_input_wait_is_the_share_of_time_spent_waiting(mesh):
    with parallel_loader(Slow(400), 8, mesh, train=True, stop=20) as loader:
        for _ in range(6):
            next(loader)
        assert loader.input_wait() > 0.8  # the loop does nothing but wait
        time.sleep(0.05)
        assert loader.input_wait() < 0.01  # since the last call only
    with parallel_loader(Numbers(400), 8, mesh, train=True, stop=40) as loader:
        next(loader)
        loader.input_wait()
        for _ in range(6):
            time.sleep(0.05)
            next(loader)
        assert loader.input_wait() < 0.2


@pytest.mark.parametrize("workers", [0, 2])
def test_close_in_the_middle_is_quick_and_leaves_nothing(mesh, workers):
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    loader = parallel_loader(Slow(64), 8, mesh, train=True, stop=10**9, workers=workers)
    next(loader)
    processes = set(multiprocessing.active_children()) - children
    assert len(processes) == workers
    started = time.perf_counter()
    for _ in range(2):  # twice is fine
        loader.__exit__()
    assert time.perf_counter() - started < 3
    assert_gone(threads, processes)


def test_batches_are_uploaded_ahead_of_the_loop_but_not_far(mesh):
    dataset = Numbers(800)
    with parallel_loader(dataset, 8, mesh, train=True, stop=100) as loader:
        next(loader)
        deadline = time.perf_counter() + 5
        while len(dataset.calls) < 8 * (1 + loading.AHEAD) and time.perf_counter() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(dataset.calls) == 8 * (1 + loading.AHEAD)  # the one that is taken, and these


def test_workers_start_from_a_clean_process_one_per_core(mesh, monkeypatch):
    """A fork of this process would copy the locks of XLA's threads, held as they are."""
    assert worker_context(Numbers(1)).get_start_method() == "forkserver"
    monkeypatch.setattr("train.common.batches.DataLoader", lambda examples, **options: options)
    cores = len(os.sched_getaffinity(0))
    examples = BatchMaker(Numbers(1), 0, masked=False, collate=loading.as_tensors)
    assert [data_loader(examples, [], workers)["num_workers"] for workers in (-1, 3)] == [cores, 3]


def signalled_worker() -> None:
    start_worker(0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # still here: the main process wants batches until it has saved


def test_a_worker_survives_sigterm_but_does_not_keep_the_run_from_ending():
    started = time.monotonic()
    worker = worker_context(Numbers(1)).Process(target=signalled_worker)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0 and time.monotonic() - started > 0.5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_update_has_its_micro_batches_in_order_and_numbered(mesh, workers):
    whole = train_batches("examples", mesh, start=2, stop=5, split=2)
    options = {"start": 2, "stop": 5, "split": 2, "update_every": 2, "workers": workers}
    with parallel_loader(KINDS["examples"][0], 8, mesh, train=True, seed=3, **options) as loader:
        updates = []
        for update in loader:
            updates.append((update.first, [batch["index"].cpu().tolist() for batch in update]))
            assert update.left == 0
    assert [first for first, _ in updates] == [5, 7, 9]
    expected = [batch["index"].tolist() for batch in whole]
    assert [each for _, batches in updates for each in batches] == expected


def test_an_update_that_is_not_taken_whole_is_an_error(mesh):
    with parallel_loader(Numbers(64), 8, mesh, train=True, stop=4, split=2, update_every=2) as loader:
        next(next(loader))
        with pytest.raises(RuntimeError, match="1 micro-batches of the update before this one were not taken"):
            next(loader)
