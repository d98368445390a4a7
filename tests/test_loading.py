"""train/common/loading.py with worker processes, on four virtual devices."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import torch
import torch_xla

from data.batching import Buckets
from data.packing import pack
from errors import InputError
from train.common import loading
from train.common.loading import PADDING, parallel_loader


# ---- data sets -------------------------------------------------------------------------------------------------------
class Numbers:
    """Examples that say which they are, and one draw of their generator; the `calls` of this process are counted."""

    def __init__(self, size: int, bad: int = -1, how: str = ""):
        self.size, self.bad, self.how, self.calls = size, bad, how, []

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict:
        self.calls.append(index)
        if index == self.bad:
            decode_the_broken_one(index, self.how)
        return {"index": np.int64(index), "draw": np.float32(rng.random())}


def decode_the_broken_one(index: int, how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    input_error = InputError(f"picture {index} cannot be decoded; remove it")
    raise {"input": input_error, "stop": StopIteration, "raise": KeyError(f"no picture {index}")}[how]


class Pictures(Numbers):
    """Tensors of several ranks and types, large enough that the upload of a batch takes a while."""

    def example(self, index, rng):
        image = np.full((3, 128, 128), index, np.uint8)
        return {"index": np.int64(index), "row": np.full(3, index, np.float32), "image": image}


class Slow(Numbers):
    def example(self, index, rng):
        time.sleep(0.01)
        return super().example(index, rng)


class Skipping(Numbers):
    """Every third file is broken."""

    def example(self, index, rng):
        return {**super().example(index, rng), "skipped": np.int64(index % 3 == 0)}


class Rows(Numbers):
    """Rows of a table, read together."""

    def batch(self, indices):
        self.calls += indices.tolist()
        table = np.arange(3 * self.size, dtype=np.float32).reshape(-1, 3)
        return {"row": table[indices], "index": np.asarray(indices)}


class Sentences(Numbers):
    """Sentence i is 1 to 20 tokens, all of them i. `extra` breaks the promise of as many rows as the shape has."""

    def __init__(self, size: int, bad: int = -2, extra: bool = False):
        super().__init__(size, bad)
        self.lengths, self.extra = np.random.default_rng(0).integers(1, 21, size), extra

    def batch(self, indices, lengths):
        if self.bad in indices:
            raise InputError(f"sentence {self.bad} has an unknown token; remove it")
        self.calls += indices.tolist()
        places = np.arange(*lengths)
        tokens = np.where(places < self.lengths[indices][..., None], indices[..., None], PADDING)
        batch = {"tokens": tokens.astype(np.int32), "index": indices}
        return batch | {"extra": np.zeros((8, 3), np.float32)} if self.extra else batch


SHAPES = [(8, 10), (4, 20), (16, 4)]
PLAN = Buckets(Sentences(90).lengths, SHAPES)
EIGHTS = Buckets(Sentences(90).lengths, [(8, 10), (16, 20)])


class Unsent(Buckets):
    """Is not sent to workers."""

    def __reduce__(self):
        raise AssertionError("the plan was sent to a worker")


def take(loader) -> list[dict[str, np.ndarray]]:
    with loader:
        return [{key: value.cpu().numpy() for key, value in batch.items()} for batch in loader]


def train_batches(dataset, mesh, batch_size=8, stop=4, **options) -> list[dict[str, np.ndarray]]:
    return take(parallel_loader(dataset, batch_size, mesh, train=True, stop=stop, **{"seed": 3} | options))


def equal(batches, others) -> bool:
    return len(batches) == len(others) and all(
        batch.keys() == other.keys() and all(np.array_equal(batch[key], other[key]) for key in batch)
        for batch, other in zip(batches, others, strict=True)
    )


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def uninterrupted(mesh) -> list[dict[str, np.ndarray]]:
    """Ten steps over three ends of an epoch: 27 examples are 3 batches of 8 an epoch."""
    return train_batches(Numbers(27), mesh, stop=10)


def test_each_epoch_is_another_permutation_with_other_draws(mesh, uninterrupted):
    epochs = [np.concatenate([batch["index"] for batch in uninterrupted[i : i + 3]]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 24 and set(epoch) <= set(range(27)) and list(epoch) != sorted(epoch)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # What is left out differs too, so that every example has its turn.
    assert len({frozenset(range(27)) - frozenset(epoch) for epoch in epochs}) > 1
    draws = set(np.concatenate([batch["draw"] for batch in uninterrupted]))
    assert len(draws) == 80
    other = train_batches(Numbers(27), mesh, seed=4)
    assert not any(np.array_equal(a["index"], b["index"]) for a, b in zip(other, uninterrupted, strict=False))
    assert not set(np.concatenate([batch["draw"] for batch in other])) & draws


@pytest.mark.parametrize("workers, start", [(1, 0), (2, 0), (0, 0), (0, 1), (0, 3), (0, 4), (0, 9), (0, 10), (2, 4)])
def test_neither_workers_nor_the_start_change_order_or_content(mesh, uninterrupted, workers, start):
    dataset = Numbers(27)
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    batches = train_batches(dataset, mesh, start=start, stop=10, workers=workers)
    assert equal(batches, uninterrupted[start:])
    assert len(dataset.calls) == (0 if workers else 8 * (10 - start)), "examples before the start were made"
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_on_the_device_do_not_change_any_more(mesh, workers):
    """They must not share memory with what a worker makes later."""
    with parallel_loader(Pictures(200), 8, mesh, train=True, stop=25, workers=workers) as loader:
        batches = list(loader)
    for batch, (_, indices) in zip(batches, loading._batches(200, 8, 0, 0, 25, "examples"), strict=True):
        assert batch["index"].cpu().tolist() == indices.tolist()
        expected = torch.tensor(indices, dtype=torch.uint8)[:, None, None, None]
        assert torch.equal(batch["image"].cpu(), expected.expand(8, 3, 128, 128))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_with_batch_has_the_order_of_one_with_example(mesh, uninterrupted, workers):
    batches = train_batches(Rows(27), mesh, stop=10, workers=workers)
    assert [b["index"].tolist() for b in batches] == [b["index"].tolist() for b in uninterrupted]
    assert all(np.array_equal(b["row"], np.stack([3.0 * b["index"] + i for i in range(3)], 1)) for b in batches)


def test_shuffled_batches_keep_their_rows_together_and_epochs_differ(mesh):
    def epochs(seed, start=0):
        batches = train_batches(Rows(27), mesh, seed=seed, start=start, stop=6, shuffle="batches")
        return [batch["index"].tolist() for batch in batches]

    batches = epochs(1)
    assert all(batch == list(range(batch[0], batch[0] + 8)) and batch[0] % 8 == 0 for batch in batches)
    assert sorted(batch[0] for batch in batches[:3]) == sorted(batch[0] for batch in batches[3:]) == [0, 8, 16]
    assert len({tuple(batch[0] for batch in epochs(seed)) for seed in range(4)}) > 1
    assert epochs(1, start=4) == batches[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plan_gives_its_batches_epoch_by_epoch(mesh, workers):
    stop = 2 * len(PLAN) + 3
    batches = train_batches(Sentences(90), mesh, Unsent(Sentences(90).lengths, SHAPES), stop=stop, workers=workers)
    epochs = [PLAN.epoch(np.random.default_rng((3, epoch))) for epoch in range(3)]
    for batch, (indices, lengths) in zip(batches, list(itertools.chain(*epochs))[:stop], strict=True):
        assert np.array_equal(batch["index"], indices)
        assert np.array_equal(batch["tokens"], Sentences(90).batch(indices, lengths)["tokens"])
        assert batch["tokens"].shape == (len(indices), *lengths)
        assert batch["mask"].tolist() == (indices != PADDING).tolist()
    assert any(0 < batch["mask"].mean() < 1 for batch in batches), "no batch was padded: the test has to see some"
    dataset, start = Sentences(90), len(PLAN) + len(PLAN) // 2
    assert equal(train_batches(dataset, mesh, PLAN, start=start, stop=stop, workers=workers), batches[start:])
    made = 0 if workers else sum(len(batch["index"]) for batch in batches[start:])
    assert len(dataset.calls) == made, "batches of the steps before the start were made"
    assert not equal(train_batches(dataset, mesh, PLAN, start=start, stop=stop, seed=4), batches[start:])


@pytest.mark.parametrize("dataset, batch_size", [(Numbers(27), 8), (Sentences(90), PLAN)], ids=["size", "plan"])
def test_a_start_far_ahead_costs_nothing(mesh, dataset, batch_size):
    far = 10**6 * len(PLAN) + 1
    dataset.calls.clear()
    batches = train_batches(dataset, mesh, batch_size, start=far, stop=far + 2)
    assert len(batches) == 2 and len(dataset.calls) == sum(len(batch["index"]) for batch in batches)


def test_one_permutation_of_a_plan_is_in_memory_at_a_time(mesh, monkeypatch):
    alive, real = [], PLAN.epoch

    def epoch(rng):
        assert not any(of_epoch() for of_epoch in alive)
        alive.append(weakref.ref(batches := real(rng)))
        return batches

    monkeypatch.setattr(PLAN, "epoch", epoch)
    train_batches(Sentences(90), mesh, PLAN, stop=3 * len(PLAN))
    assert len(alive) == 3


def test_shared_memory_does_not_grow_with_the_batches(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    examples = loading._Examples(Sentences(90), 0, masked=False, collate=loading.as_tensors)
    sizes = []
    for epoch in range(12):
        for indices, lengths in PLAN.epoch(np.random.default_rng(epoch)):
            examples[epoch, indices, lengths]
        sizes.append(len(examples.shared))
    assert sizes[-4] == sizes[-1] <= (loading.PREFETCH + 1) * len(SHAPES) * 3  # tokens, index, mask


# ---- evaluation and hosts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, workers", [(1, 0), (7, 0), (8, 0), (9, 0), (16, 0), (27, 0), (9, 2), (16, 2)])
@pytest.mark.parametrize("kind", [Numbers, Rows])
def test_evaluation_has_every_example_once_in_order(mesh, kind, size, workers):
    batches = take(parallel_loader(kind(size), 8, mesh, train=False, workers=workers))
    assert [batch["index"].shape for batch in batches] == -(-size // 8) * [(8,)]  # one graph
    indices, mask = (np.concatenate([batch[key] for batch in batches]) for key in ("index", "mask"))
    assert mask.dtype == np.float32 and mask.tolist() == [1.0] * size + [0.0] * (len(indices) - size)
    assert indices[:size].tolist() == list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [PLAN, pack(Sentences(90).lengths, (8, 24))], ids=["buckets", "packed"])
def test_an_evaluation_by_a_plan_has_every_example_once(mesh, plan, workers):
    batches = take(parallel_loader(Sentences(90), plan, mesh, train=False, workers=workers))
    assert len(batches) == len(plan) == loading.steps_per_epoch(Sentences(90), plan, mesh)
    indices, mask = (np.concatenate([batch[key].reshape(-1) for batch in batches]) for key in ("index", "mask"))
    assert sorted(indices[mask > 0].tolist()) == list(range(90)) and set(indices[mask == 0].tolist()) == {PADDING}
    assert all(batch["mask"].shape == batch["index"].shape for batch in batches)
    assert plan is PLAN or {batch["mask"].shape for batch in batches} == {(8, plan.most)}


KINDS = [(Numbers(11), 8), (Numbers(32), 8), (Rows(27), 8, "batches"), (Rows(19), 8), (Sentences(90), PLAN)]


@pytest.mark.parametrize("dataset, batch_size", [(Numbers(27), 8), (Rows(27), 8), (Sentences(90), EIGHTS)])
def test_the_parts_of_a_batch_are_all_of_it_in_order(mesh, dataset, batch_size):
    for train in ({"train": True, "seed": 3, "start": 2, "stop": 30}, {"train": False}):
        batches, parts = (take(parallel_loader(dataset, batch_size, mesh, parts=n, **train)) for n in (1, 2))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        assert equal([{key: np.concatenate([one[key], two[key]]) for key in one} for one, two in pairs], batches)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dataset, batch_size, shuffle", [(*kind, "examples")[:3] for kind in KINDS])
def test_a_host_loads_its_part_alone(mesh, monkeypatch, dataset, batch_size, shuffle, train):
    """Four hosts, one after the other; what each sends to its devices is what one host sends to all of them."""
    sent = {}
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    options = {"train": True, "start": 2, "stop": 2 * len(PLAN), "shuffle": shuffle} if train else {"train": False}
    for host in ("alone", 0, 1, 2, 3):
        pod = mesh if host == "alone" else dataclasses.replace(mesh, process_index=host, process_count=4)
        dataset.calls.clear()
        with parallel_loader(dataset, batch_size, pod, **options) as loader:
            sent[host] = list(loader)
        rows = sum(len(batch["index"]) for batch in sent[host])
        share = sum(len(batch["index"]) for batch in sent["alone"]) // pod.process_count
        assert len(dataset.calls) <= rows == share
    for step, batch in enumerate(sent["alone"]):
        parts = [sent[host][step] for host in range(4)]
        assert {len(part["index"]) for part in parts} == {len(batch["index"]) // 4}
        # What stands in the padding is of no account, but for the mask.
        real = torch.ones(len(batch["index"]), dtype=torch.bool) if train else batch["mask"] > 0
        assert all(torch.equal(torch.cat([part[key] for part in parts])[real], batch[key][real]) for key in batch)
        assert "mask" not in batch or torch.equal(torch.cat([part["mask"] for part in parts]), batch["mask"])
    if len(dataset) == 11 and not train:  # the last two hosts have nothing but padding in the last batch
        assert [sent[host][1]["mask"].tolist() for host in range(4)] == [[1, 1], [1, 0], [0, 0], [0, 0]]


def test_tensors_of_every_rank_and_shape_are_sharded_over_the_batch(mesh):
    """A ShardingSpec fits one rank only; MpDeviceLoader silently replicates the tensors of another."""
    expected = {1: "{devices=[4]0,1,2,3", 2: "{devices=[4,1]0,1,2,3", 4: "{devices=[4,1,1,1]0,1,2,3"}
    for dataset, batch_size in ((Pictures(8), 8), (Sentences(90), PLAN)):
        with parallel_loader(dataset, batch_size, mesh, train=False) as loader:
            batches = list(loader)
        for tensor in itertools.chain.from_iterable(batch.values() for batch in batches):
            assert torch_xla._XLAC._get_xla_sharding_spec(tensor).startswith(expected[tensor.dim()])
        if batch_size == 8:
            made = {key: (value.dtype, value.shape) for key, value in batches[0].items() if key != "mask"}
            assert made["image"] == (torch.uint8, (8, 3, 128, 128)) and made["row"] == (torch.float32, (8, 3))
            assert batches[0]["image"].cpu()[:, 0, 0, 0].tolist() == batches[0]["index"].tolist() == list(range(8))
    assert {tuple(batch["tokens"].shape) for batch in batches} == set(SHAPES)


# ---- errors ----------------------------------------------------------------------------------------------------------
def bad_collate(examples):
    return 1 / 0


def short_collate(examples):
    return loading.stack(examples[1:])


def scalar_collate(examples):
    return {"total": torch.tensor(float(len(examples)))}


def checked_rows(batch):
    if (batch["row"] > 60).any():
        raise InputError("row 20 is too large")
    return loading.as_tensors(batch)


def assert_gone(threads: set, processes: set) -> None:
    """A queue's thread ends a moment after the process that it feeds."""
    deadline = time.perf_counter() + 5
    while left := {one for one in processes if one.is_alive()} | set(threading.enumerate()) - threads:
        assert time.perf_counter() < deadline, left
        time.sleep(0.01)


IN_ORDER = list(PLAN.epoch(None))
FIRST_OF_4 = [len(indices) for indices, _ in IN_ORDER].index(4)
FIRST_WITH_41 = [41 in indices for indices, _ in IN_ORDER].index(True)
SHORT = "batch['index'] has shape [7]; its first dimension must be the 8 examples that this host loads"
OTHER = "batch['extra'] has shape [8, 3]; its first dimension must be the 4 examples that this host loads"
UNKNOWN = "sentence 41 has an unknown token; remove it"
# What fails, the batches before it, the error, and a part of its text or traceback; InputError is just its sentence.
ERRORS = {
    "an example": (Numbers(32, 17, "raise"), 8, {}, 2, KeyError, "no picture 17"),
    "its traceback": (Numbers(32, 17, "raise"), 8, {}, 2, KeyError, "decode_the_broken_one"),
    "an example's input": (Numbers(32, 17, "input"), 8, {}, 2, InputError, "picture 17 cannot be decoded; remove it"),
    "StopIteration": (Numbers(32, 17, "stop"), 8, {}, 2, RuntimeError, "StopIteration"),
    "collate": (Numbers(32), 8, {"collate": bad_collate}, 0, ZeroDivisionError, "bad_collate"),
    "collate of rows": (Rows(27), 8, {"collate": checked_rows}, 2, InputError, "row 20 is too large"),
    "a short batch": (Numbers(32), 8, {"collate": short_collate}, 0, ValueError, SHORT),
    "a scalar": (Numbers(32), 8, {"collate": scalar_collate}, 0, ValueError, "batch['total'] has shape []"),
    "a sentence": (Sentences(90, 41), PLAN, {}, FIRST_WITH_41, InputError, UNKNOWN),
    "rows of another shape": (Sentences(90, extra=True), PLAN, {}, FIRST_OF_4, ValueError, OTHER),
}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ERRORS)
def test_an_error_stops_the_loop_with_its_own_words_and_leaves_nothing(mesh, what, workers):
    dataset, batch_size, options, before, kind, text = ERRORS[what]
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    with parallel_loader(dataset, batch_size, mesh, train=False, workers=workers, **options) as loader:
        processes = set(multiprocessing.active_children()) - children
        assert len(processes) == workers
        for _ in range(before):
            next(loader)
        for _ in range(2):  # and again, instead of waiting forever
            with pytest.raises(kind) as error:
                next(loader)
    assert type(error.value) is kind
    words = str(error.value) + "".join(entry.name for entry in traceback.extract_tb(error.value.__traceback__))
    assert str(error.value) == text if kind is InputError else text in words
    assert_gone(threads, processes)  # while somebody still holds the error and its traceback


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_killed_worker_ends_the_run(mesh, how):
    started, message = time.perf_counter(), r"DataLoader worker \(pid.*\) exited unexpectedly"
    with pytest.raises(RuntimeError, match=message):
        take(parallel_loader(Numbers(32, 17, how), 8, mesh, train=False, workers=1))
    assert time.perf_counter() - started < 15


def test_an_error_of_the_upload_thread_is_raised(mesh, monkeypatch):
    def broken_upload(*_):
        raise MemoryError("the device is full")

    monkeypatch.setattr(loading.device, "upload", broken_upload)
    with parallel_loader(Numbers(32), 8, mesh, train=False) as loader, pytest.raises(MemoryError) as error:
        next(loader)
    assert "broken_upload" in [entry.name for entry in traceback.extract_tb(error.value.__traceback__)]


@pytest.mark.parametrize(
    "dataset, batch_size, options, kind, message",
    [(Numbers(32), size, {}, InputError, f"batch_size is {size}, which does not divide by the 4 devices; the nearest "
      f"that does is {nearest}") for size, nearest in ((10, 8), (11, 12), (1, 4))]
    + [(Sentences(90), Buckets(Sentences(90).lengths, [(8, 10), (11, 20)]), {}, InputError,
        "the batch of shape 11x20 is 11, which does not divide by the 4 devices; the nearest that does is 12"),
       (Numbers(90), 20, {"parts": 2}, InputError, r"into 2 parts \(--update-every\) by the 4 devices; .* is 16"),
       (Numbers(0), 8, {}, InputError, "the data set is empty"),
       (Sentences(0), PLAN, {}, InputError, "the data set is empty"),
       (Numbers(7), 8, {"train": True}, InputError, "batch_size is 8, but the data set has 7 examples; use a smaller"),
       (Numbers(90), PLAN, {}, ValueError, "a plan .* needs a data set that has `batch"),
       (Sentences(90), PLAN, {"shuffle": "batches"}, ValueError, "a plan has an order of its own")],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused(mesh, dataset, batch_size, options, kind, message):
    for train in (True, False):
        if options.get("train", train) == train:
            with pytest.raises(kind, match=message):
                parallel_loader(dataset, batch_size, mesh, **{"train": train, "stop": 1} | options)


# ---- counting, waiting, closing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers, size, skipped", [(0, 10, 4), (0, 9, 3), (0, 1, 1), (1, 10, 4)])
def test_skipped_files_are_counted_on_the_host(mesh, workers, size, skipped):
    """Padding, which repeats the first example of its part (a broken one where there is 1), does not count."""
    with parallel_loader(Skipping(size), 8, mesh, train=False, workers=workers) as loader:
        assert all("skipped" not in batch for batch in loader)
        assert loader.skipped == skipped


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
    assert loading._worker_context(Numbers(1)).get_start_method() == "forkserver"
    monkeypatch.setattr(loading, "DataLoader", lambda examples, **options: options)
    cores = len(os.sched_getaffinity(0))
    examples = loading._Examples(Numbers(1), 0, masked=False, collate=loading.stack)
    assert [loading.data_loader(examples, [], workers)["num_workers"] for workers in (-1, 3)] == [cores, 3]


def signalled_worker() -> None:
    loading._start_worker(0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # still here: the main process wants batches until it has saved


def test_a_worker_survives_sigterm_but_does_not_keep_the_run_from_ending():
    started = time.monotonic()
    worker = multiprocessing.get_context("spawn").Process(target=signalled_worker)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0 and time.monotonic() - started > 0.5
