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

from data.batching import Buckets, pack
from errors import InputError
from train.common import loading
from train.common.loading import PADDING, parallel_loader


class Numbers:
    """Examples that say which they are, and one draw of their generator; the `calls` of this process are counted."""

    def __init__(self, size: int):
        self.size, self.calls = size, []

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict:
        self.calls.append(index)
        return {"index": np.int64(index), "draw": np.float32(rng.random())}


class Shapes(Numbers):
    def example(self, index, rng):
        return {
            "label": np.int64(index),
            "row": np.full(3, index, np.float32),
            "image": np.full((3, 2, 2), index, np.uint8),
        }


class Pictures(Numbers):
    """Large enough that the upload of a batch takes a while."""

    def example(self, index, rng):
        return {"image": np.full((3, 128, 128), index, np.int32), "index": np.int64(index)}


class Failing(Numbers):
    """Something happens at one index."""

    def __init__(self, size: int, bad: int, how: str):
        super().__init__(size)
        self.bad, self.how = bad, how

    def example(self, index, rng):
        if index == self.bad:
            decode_the_broken_one(index, self.how)
        return super().example(index, rng)


def decode_the_broken_one(index: int, how: str) -> None:
    if how == "input":
        raise InputError(f"picture {index} cannot be decoded; remove it")
    if how == "stop":
        raise StopIteration
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError(f"no picture {index}")


class Slow(Numbers):
    def example(self, index, rng):
        time.sleep(0.01)
        return super().example(index, rng)


class Skipping(Numbers):
    """Each third file is broken."""

    def example(self, index, rng):
        return {**super().example(index, rng), "skipped": np.int64(index % 3 == 0)}


class RandomState(Numbers):
    """Uses the global generators, which it should not."""

    def example(self, index, rng):
        return {"x": np.float32(np.random.rand() + torch.rand(()).item())}


def train_batches(dataset, mesh, **options) -> list[dict[str, np.ndarray]]:
    options = {"batch_size": 8, "stop": 4} | options
    with parallel_loader(dataset, mesh=mesh, train=True, **options) as loader:
        return [{key: value.cpu().numpy() for key, value in batch.items()} for batch in loader]


def equal(batches, others) -> bool:
    return len(batches) == len(others) and all(
        batch.keys() == other.keys() and all(np.array_equal(batch[key], other[key]) for key in batch)
        for batch, other in zip(batches, others, strict=True)
    )


def host_of(mesh, index: int, count: int):
    return dataclasses.replace(mesh, process_index=index, process_count=count)


# ---- order and content -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(mesh) -> list[dict[str, np.ndarray]]:
    """Ten steps over an epoch's end: 27 examples are 3 batches of 8 an epoch."""
    return train_batches(Numbers(27), mesh, seed=3, stop=10)


def test_each_epoch_is_another_permutation(uninterrupted):
    epochs = [np.concatenate([batch["index"] for batch in uninterrupted[i : i + 3]]) for i in (0, 3, 6)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 24 and set(epoch) <= set(range(27))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(list(epoch) != sorted(epoch) for epoch in epochs)
    # What is left out differs too, so that every example has its turn.
    assert len({frozenset(range(27)) - frozenset(epoch) for epoch in epochs}) > 1


def test_augmentation_differs_between_epochs_and_examples(uninterrupted):
    draws = np.concatenate([batch["draw"] for batch in uninterrupted])
    assert len(set(draws)) == len(draws) == 80


def test_the_seed_decides_order_and_augmentation(mesh, uninterrupted):
    assert equal(train_batches(Numbers(27), mesh, seed=3, stop=4), uninterrupted[:4])
    other = train_batches(Numbers(27), mesh, seed=4, stop=4)
    assert not any(np.array_equal(a["index"], b["index"]) for a, b in zip(other, uninterrupted, strict=False))
    assert not set(np.concatenate([b["draw"] for b in other])) & set(np.concatenate([b["draw"] for b in uninterrupted]))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_order_or_content(mesh, uninterrupted, workers):
    assert equal(train_batches(Numbers(27), mesh, seed=3, stop=10, workers=workers), uninterrupted)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_on_the_device_do_not_change_any_more(mesh, workers):
    """They must not share memory with what a worker makes later."""
    with parallel_loader(Pictures(200), 8, mesh, train=True, stop=25, workers=workers) as loader:
        batches = list(loader)
    expected = list(loading._keys(200, 8, 0, 0, 25, "examples", mesh))
    for batch, keys in zip(batches, expected, strict=True):
        indices = keys[1].tolist()
        assert batch["index"].cpu().tolist() == indices
        assert torch.equal(
            batch["image"].cpu(), torch.tensor(indices, dtype=torch.int32)[:, None, None, None].expand(8, 3, 128, 128)
        )


@pytest.mark.parametrize("start", [1, 3, 4, 9, 10])
def test_start_goes_on_where_an_uninterrupted_run_would_be(mesh, uninterrupted, start):
    dataset = Numbers(27)
    assert equal(train_batches(dataset, mesh, seed=3, start=start, stop=10), uninterrupted[start:])
    assert len(dataset.calls) == 8 * (10 - start), "examples of the steps before the start were made"


def test_start_far_ahead_costs_nothing(mesh):
    dataset = Numbers(27)
    batches = train_batches(dataset, mesh, start=3_000_000, stop=3_000_002)
    assert len(batches) == 2 and len(dataset.calls) == 16


def test_global_generators_are_left_alone(mesh):
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    train_batches(Numbers(27), mesh, workers=0)
    train_batches(Numbers(27), mesh, workers=1)
    assert torch.equal(torch.rand(3), expected[0]) and np.array_equal(np.random.rand(3), expected[1])


# ---- evaluation and hosts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, workers", [(1, 0), (7, 0), (8, 0), (9, 0), (16, 0), (27, 0), (9, 2), (16, 2)])
def test_evaluation_has_every_example_once(mesh, size, workers):
    with parallel_loader(Numbers(size), 8, mesh, train=False, workers=workers) as loader:
        batches = list(loader)
    assert len(batches) == -(-size // 8)
    indices = torch.cat([batch["index"].cpu() for batch in batches])
    mask = torch.cat([batch["mask"].cpu() for batch in batches])
    assert mask.dtype == torch.float32 and mask.tolist() == [1.0] * size + [0.0] * (len(indices) - size)
    assert indices[mask > 0].tolist() == list(range(size))
    assert all(batch["index"].shape == (8,) for batch in batches)  # one graph


def pairs(keys) -> list[list[tuple[int, int]]]:
    """Each batch of one host's keys as (epoch, index) pairs."""
    return [[(epoch, index) for index in indices.tolist()] for epoch, indices in keys]


@pytest.mark.parametrize("train, shuffle", [(False, "examples"), (True, "examples"), (True, "batches")])
@pytest.mark.parametrize("size", [3, 8, 27, 32])
def test_hosts_share_each_batch(mesh, size, train, shuffle):
    span = (0, 2, 11) if train and size >= 8 else (None, 0, -(-size // 8))
    alone, *hosts = (
        pairs(loading._keys(size, 8, *span, shuffle, pod))
        for pod in (mesh, *(host_of(mesh, host, 4) for host in range(4)))
    )
    assert {len(of_host) for of_host in hosts} == {span[2] - span[1]}, "hosts with unequal steps wait forever"
    assert [list(itertools.chain.from_iterable(of_step)) for of_step in zip(*hosts, strict=True)] == alone
    if not train:
        assert [index for batch in alone for _, index in batch if index != PADDING] == list(range(size))


# ---- data sets that are read in batches ------------------------------------------------------------------------------


class Rows:
    """Rows of a table, read together."""

    def __init__(self, size: int):
        self.table = np.arange(3 * size, dtype=np.float32).reshape(size, 3)

    def __len__(self):
        return len(self.table)

    def batch(self, indices):
        return {"row": self.table[indices], "index": np.asarray(indices)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_with_batch_has_the_order_of_one_with_example(mesh, uninterrupted, workers):
    with parallel_loader(Rows(27), 8, mesh, train=True, seed=3, stop=10, workers=workers) as loader:
        batches = [{key: value.cpu() for key, value in batch.items()} for batch in loader]
    assert [b["index"].tolist() for b in batches] == [b["index"].tolist() for b in uninterrupted]
    assert all(torch.equal(b["row"], torch.stack([3.0 * b["index"] + i for i in range(3)], 1)) for b in batches)


def test_an_evaluation_by_batches_has_every_example_once(mesh):
    with parallel_loader(Rows(11), 8, mesh, train=False) as loader:
        batches = [{key: value.cpu() for key, value in batch.items()} for batch in loader]
    indices, mask = (torch.cat([batch[key] for batch in batches]) for key in ("index", "mask"))
    assert mask.tolist() == [1.0] * 11 + [0.0] * 5 and indices[mask > 0].tolist() == list(range(11))


def test_shuffled_batches_keep_their_rows_together_and_epochs_differ(mesh):
    def epochs(seed, start=0):
        options = {"train": True, "seed": seed, "start": start, "stop": 6, "shuffle": "batches"}
        with parallel_loader(Rows(27), 8, mesh, **options) as loader:
            return [batch["index"].cpu().tolist() for batch in loader]

    batches = epochs(1)
    assert all(batch == list(range(batch[0], batch[0] + 8)) and batch[0] % 8 == 0 for batch in batches)
    assert sorted(batch[0] for batch in batches[:3]) == sorted(batch[0] for batch in batches[3:]) == [0, 8, 16]
    assert len({tuple(batch[0] for batch in epochs(seed)) for seed in range(4)}) > 1
    assert epochs(1, start=4) == batches[4:]


def checked(batch):
    if (batch["row"] > 60).any():
        raise InputError("row 20 is too large")
    return loading.as_tensors(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_of_a_batched_data_set_gets_its_arrays(mesh, workers):
    with parallel_loader(Rows(16), 8, mesh, train=False, collate=checked, workers=workers) as loader:
        assert len(list(loader)) == 2
    with (
        parallel_loader(Rows(27), 8, mesh, train=False, collate=checked, workers=workers) as loader,
        pytest.raises(InputError, match="row 20"),
    ):
        list(loader)


@pytest.mark.parametrize("train", [True, False])
def test_a_host_loads_its_part_alone(mesh, monkeypatch, train):
    """Four hosts, one after the other; what each sends to its devices is what one host sends to all of them."""
    sent = {}

    def upload(self, batch):
        sent.setdefault(host, []).append(batch)
        return batch

    monkeypatch.setattr(loading.Loader, "_upload", upload)
    dataset = Numbers(11)
    options = {"train": train} | ({"stop": 3} if train else {})
    for host, pod in [("alone", mesh), *((i, host_of(mesh, i, 4)) for i in range(4))]:
        dataset.calls.clear()
        with parallel_loader(dataset, 8, pod, **options) as loader:
            batches = list(loader)
        assert host == "alone" or all(batch["index"].shape == (2,) for batch in batches)
        assert host == "alone" or len(dataset.calls) <= 2 * len(batches)
    for step, batch in enumerate(sent["alone"]):
        for key in batch:
            parts = torch.cat([sent[host][step][key] for host in range(4)])
            if key != "mask" and not train:  # what stands in the padding is of no account
                mask = batch["mask"] > 0
                assert torch.equal(parts[mask], batch[key][mask])
            else:
                assert torch.equal(parts, batch[key])
    # The last two hosts have nothing but padding in the last batch, and still something of the right shape.
    assert train or [sent[host][1]["mask"].tolist() for host in range(4)] == [[1, 1], [1, 0], [0, 0], [0, 0]]


# ---- plans -----------------------------------------------------------------------------------------------------------


class Sentences:
    """Sentence i is 1 to 20 tokens, all of them i."""

    def __init__(self, size: int):
        self.lengths = np.random.default_rng(0).integers(1, 21, size)
        self.calls = 0

    def __len__(self):
        return len(self.lengths)

    def batch(self, indices, lengths):
        self.calls += 1
        places = np.arange(*lengths)
        tokens = np.where(places < self.lengths[indices][..., None], indices[..., None], PADDING)
        return {"tokens": tokens.astype(np.int32), "index": indices}


PLAN = [(8, 10), (4, 20), (16, 4)]


@pytest.fixture(scope="module")
def plan() -> Buckets:
    return Buckets(Sentences(90).lengths, PLAN)


def planned_batches(dataset, plan, mesh, **options) -> list[dict[str, np.ndarray]]:
    return train_batches(dataset, mesh, **{"batch_size": plan, "seed": 3} | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plan_gives_its_batches_epoch_by_epoch(mesh, plan, workers):
    batches = planned_batches(Sentences(90), plan, mesh, stop=2 * len(plan) + 3, workers=workers)
    epochs = [plan.epoch(np.random.default_rng((3, epoch))) for epoch in range(3)]
    expected = list(itertools.chain(*epochs))[: len(batches)]
    assert len(batches) == 2 * len(plan) + 3
    for batch, (indices, lengths) in zip(batches, expected, strict=True):
        assert np.array_equal(batch["index"], indices)
        assert np.array_equal(batch["tokens"], Sentences(90).batch(indices, lengths)["tokens"])
        assert batch["tokens"].shape == (len(indices), *lengths)
        assert batch["mask"].tolist() == (indices != PADDING).tolist()
    assert any(0 < batch["mask"].mean() < 1 for batch in batches), "no batch was padded: the test has to see some"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plan_goes_on_in_the_middle_of_an_epoch(mesh, plan, workers):
    start, stop = len(plan) + len(plan) // 2, 2 * len(plan) + 2
    whole = planned_batches(Sentences(90), plan, mesh, stop=stop)
    dataset = Sentences(90)
    assert equal(planned_batches(dataset, plan, mesh, start=start, stop=stop, workers=workers), whole[start:])
    assert dataset.calls == (0 if workers else stop - start), "batches of the steps before the start were made"
    assert not equal(planned_batches(dataset, plan, mesh, start=start, stop=stop, seed=4), whole[start:])
    far = 10**6 * len(plan) + 1
    assert len(planned_batches(dataset, plan, mesh, start=far, stop=far + 2)) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_an_evaluation_by_a_plan_has_every_example_once(mesh, plan, packed, workers):
    dataset = Sentences(90)
    if packed:
        plan = pack(dataset.lengths, (8, 24))
    with parallel_loader(dataset, plan, mesh, train=False, workers=workers) as loader:
        batches = list(loader)
    assert len(batches) == len(plan)
    indices, mask = (torch.cat([batch[key].cpu().view(-1) for batch in batches]) for key in ("index", "mask"))
    assert sorted(indices[mask > 0].tolist()) == list(range(90)) and set(indices[mask == 0].tolist()) == {PADDING}
    assert all(batch["mask"].shape == batch["index"].shape for batch in batches)
    assert all(batch["mask"].shape == (8, plan.most) for batch in batches if packed)


@pytest.mark.parametrize("train", [True, False])
def test_a_host_loads_its_part_of_a_planned_batch(mesh, monkeypatch, plan, train):
    sent = {}

    def upload(self, batch):
        sent[host].append(batch)
        return batch

    monkeypatch.setattr(loading.Loader, "_upload", upload)
    options = {"train": train} | ({"start": 2, "stop": 2 * len(plan)} if train else {})
    for host, pod in [("alone", mesh), *((i, host_of(mesh, i, 4)) for i in range(4))]:
        sent[host] = []
        with parallel_loader(Sentences(90), plan, pod, **options) as loader:
            assert len(list(loader)) == (2 * len(plan) - 2 if train else len(plan))
    for step, batch in enumerate(sent["alone"]):
        for key in batch:
            parts = [sent[host][step][key] for host in range(4)]
            assert {len(part) for part in parts} == {len(batch[key]) // 4}
            assert torch.equal(torch.cat(parts), batch[key])


def test_batches_of_every_shape_are_sharded(mesh, plan):
    with parallel_loader(Sentences(90), plan, mesh, train=False) as loader:
        batches = list(loader)
    assert {tuple(batch["tokens"].shape) for batch in batches} == set(PLAN)
    for batch in batches:
        specs = {key: torch_xla._XLAC._get_xla_sharding_spec(tensor) for key, tensor in batch.items()}
        assert specs["tokens"].startswith("{devices=[4,1]0,1,2,3")
        assert specs["index"].startswith("{devices=[4]0,1,2,3") and specs["mask"].startswith("{devices=[4]0,1,2,3")


class StaysHere(Buckets):
    def __reduce__(self):
        raise AssertionError("the plan was sent to a worker")


def test_workers_are_not_sent_the_plan(mesh, plan):
    here = StaysHere(Sentences(90).lengths, PLAN)
    assert equal(
        planned_batches(Sentences(90), here, mesh, workers=1), planned_batches(Sentences(90), plan, mesh, workers=0)
    )


def test_one_permutation_is_in_memory_at_a_time(mesh, plan, monkeypatch):
    alive = []
    real = plan.epoch

    def epoch(rng):
        assert not any(of_epoch() for of_epoch in alive)
        alive.append(weakref.ref(batches := real(rng)))
        return batches

    monkeypatch.setattr(plan, "epoch", epoch)
    planned_batches(Sentences(90), plan, mesh, stop=3 * len(plan))
    assert len(alive) == 3


def test_shared_memory_does_not_grow_with_the_batches(monkeypatch, plan):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    examples = loading._Examples(Sentences(90), 0, masked=False, collate=loading.as_tensors)
    sizes = []
    for epoch in range(12):
        for indices, lengths in plan.epoch(np.random.default_rng(epoch)):
            examples.__getitems__((epoch, indices, lengths))
        sizes.append(len(examples.shared))
    turns = loading.PREFETCH + 1
    assert sizes[-1] <= turns * len(PLAN) * 3  # tokens, index, mask
    assert sizes[-1] == sizes[-4]


def test_a_planned_batch_that_does_not_divide_by_the_devices_is_refused(mesh):
    dataset = Sentences(90)
    for size, nearest in ((10, 8), (11, 12), (1, 4)):
        plan = Buckets(dataset.lengths, [(8, 10), (size, 20)])
        message = (
            f"the batch of shape {size}x20 is {size}, which does not divide by the 4 devices; the nearest that "
            f"does is {nearest}"
        )
        for options in ({"train": False}, {"train": True, "stop": 1}):
            with pytest.raises(InputError, match=message):
                parallel_loader(dataset, plan, mesh, **options)


class BadSentence(Sentences):
    def batch(self, indices, lengths):
        if 41 in indices:
            raise InputError("sentence 41 has an unknown token; remove it")
        return super().batch(indices, lengths)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_input_error_of_a_planned_batch_is_just_its_sentence(mesh, plan, workers):
    before = [41 in indices for indices, _ in plan.epoch(None)].index(True)
    with parallel_loader(BadSentence(90), plan, mesh, train=False, workers=workers) as loader:
        count, error = take_until_error(loader, InputError)
    assert count == before and type(error) is InputError
    assert str(error) == "sentence 41 has an unknown token; remove it"


class WrongRows(Sentences):
    """As many rows as another shape of the plan has."""

    def batch(self, indices, lengths):
        batch = super().batch(indices, lengths)
        return batch | {"extra": np.zeros((8, 3), np.float32)}


@pytest.mark.parametrize("workers", [0, 1])
def test_each_planned_batch_must_have_the_rows_of_its_own_shape(mesh, plan, workers):
    with parallel_loader(WrongRows(90), plan, mesh, train=False, workers=workers) as loader:
        count, error = take_until_error(loader, ValueError)
    assert count == [len(indices) for indices, _ in plan.epoch(None)].index(4)
    assert "batch['extra'] has shape [8, 3]; its first dimension must be the 4 examples" in str(error)


class WrongPlan(Buckets):
    def __init__(self, *arguments, how: str):
        super().__init__(*arguments)
        self.how = how

    def epoch(self, rng):
        batches = list(super().epoch(rng))
        if self.how == "longer":
            return batches + batches[:1]
        return [(indices, (lengths[0] + 1,)) for indices, lengths in batches]


def test_a_plan_that_breaks_its_promise_is_a_bug(mesh):
    for how, message in (
        ("longer", r"epoch 0 of the plan has \d+ batches"),
        ("shape", "made a batch of shape .8, 11."),
    ):
        plan = WrongPlan(Sentences(90).lengths, PLAN, how=how)
        with (
            parallel_loader(Sentences(90), plan, mesh, train=False) as loader,
            pytest.raises(ValueError, match=message),
        ):
            list(loader)


def test_a_plan_needs_a_data_set_of_batches_and_has_its_own_order(mesh, plan):
    with pytest.raises(ValueError, match="a plan .* needs a data set that has `batch"):
        parallel_loader(Numbers(90), plan, mesh, train=False)
    with pytest.raises(ValueError, match="a plan has an order of its own"):
        parallel_loader(Sentences(90), plan, mesh, train=True, stop=1, shuffle="batches")
    with pytest.raises(ValueError, match="needs `stop`"):
        parallel_loader(Sentences(90), plan, mesh, train=True)


def test_steps_of_a_plan_are_its_batches(mesh, plan):
    assert loading.steps_per_epoch(Sentences(90), plan, mesh) == len(plan) == len(plan.epoch(None))
    for options in ({"train": False}, {"train": True, "stop": 1}):
        with pytest.raises(InputError, match="the data set is empty"):
            parallel_loader(Sentences(0), plan, mesh, **options)


# ---- sharding --------------------------------------------------------------------------------------------------------


def test_tensors_of_every_rank_are_sharded_over_the_batch(mesh):
    """A ShardingSpec fits one rank only; MpDeviceLoader silently replicates the tensors of another."""
    with parallel_loader(Shapes(8), 8, mesh, train=False) as loader:
        batch = next(loader)
    specs = {key: torch_xla._XLAC._get_xla_sharding_spec(tensor) for key, tensor in batch.items()}
    assert specs["label"].startswith("{devices=[4]0,1,2,3")
    assert specs["mask"].startswith("{devices=[4]0,1,2,3")
    assert specs["row"].startswith("{devices=[4,1]0,1,2,3")
    assert specs["image"].startswith("{devices=[4,1,1,1]0,1,2,3")
    assert (batch["image"].dtype, batch["image"].shape) == (torch.uint8, (8, 3, 2, 2))
    assert batch["image"].cpu()[:, 0, 0, 0].tolist() == batch["label"].tolist() == list(range(8))


# ---- errors ----------------------------------------------------------------------------------------------------------


def take_until_error(loader, expected: type[BaseException]):
    """(batches before the error, the error); a loader that just ends is the trap."""
    count = 0
    while True:
        try:
            next(loader)
            count += 1
        except StopIteration:
            pytest.fail(f"the loader ended after {count} batches without a word")
        except expected as error:
            return count, error


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_with_its_own_traceback(mesh, workers):
    with parallel_loader(Failing(32, 17, "raise"), 8, mesh, train=False, workers=workers) as loader:
        count, error = take_until_error(loader, KeyError)
        assert count == 2  # the batches before it are whole
        text = str(error) + "".join(entry.name for entry in traceback_of(error))
        assert "decode_the_broken_one" in text and "no picture 17" in text
        with pytest.raises(KeyError):  # and again, instead of waiting forever
            next(loader)


def traceback_of(error: BaseException):
    return traceback.extract_tb(error.__traceback__)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_input_error_is_just_its_sentence(mesh, workers):
    with parallel_loader(Failing(32, 17, "input"), 8, mesh, train=False, workers=workers) as loader:
        count, error = take_until_error(loader, InputError)
    assert count == 2
    assert type(error) is InputError and str(error) == "picture 17 cannot be decoded; remove it"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_a_data_set_does_not_end_the_epoch(mesh, workers):
    with parallel_loader(Failing(32, 17, "stop"), 8, mesh, train=False, workers=workers) as loader:
        take_until_error(loader, RuntimeError)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_killed_worker_ends_the_run(mesh, how):
    started = time.perf_counter()
    with (
        parallel_loader(Failing(32, 17, how), 8, mesh, train=False, workers=1) as loader,
        pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) exited unexpectedly"),
    ):
        list(loader)
    assert time.perf_counter() - started < 15


def bad_collate(examples):
    raise ArithmeticError("in the collate function")


def short_collate(examples):
    return loading.stack(examples[1:])


def scalar_collate(examples):
    return {"total": torch.tensor(float(len(examples)))}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_collate_is_raised(mesh, workers):
    with parallel_loader(Numbers(32), 8, mesh, train=False, workers=workers, collate=bad_collate) as loader:
        count, error = take_until_error(loader, ArithmeticError)
    assert count == 0
    assert "bad_collate" in str(error) + "".join(entry.name for entry in traceback_of(error))


def test_a_batch_of_the_wrong_size_is_named(mesh):
    with parallel_loader(Numbers(32), 8, mesh, train=True, stop=2, collate=short_collate) as loader:
        _, error = take_until_error(loader, ValueError)
    assert "batch['index'] has shape [7]; its first dimension must be the 8 examples" in str(error)
    with parallel_loader(Numbers(32), 8, mesh, train=True, stop=2, collate=scalar_collate) as loader:
        _, error = take_until_error(loader, ValueError)
    assert "batch['total'] has shape []" in str(error)


def test_an_error_of_the_upload_thread_is_raised(mesh, monkeypatch):
    def broken_upload(*_):
        raise MemoryError("the device is full")

    monkeypatch.setattr(loading.xm, "send_cpu_data_to_device", broken_upload)
    with parallel_loader(Numbers(32), 8, mesh, train=False) as loader:
        count, error = take_until_error(loader, MemoryError)
    assert count == 0 and "broken_upload" in [entry.name for entry in traceback_of(error)]


def test_the_end_is_the_end_each_time(mesh):
    with parallel_loader(Numbers(16), 8, mesh, train=False) as loader:
        assert len(list(loader)) == 2
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(loader)


def test_a_batch_that_does_not_divide_by_the_devices_is_refused(mesh):
    for batch_size, nearest in ((10, 8), (11, 12), (1, 4)):
        message = (
            f"batch_size is {batch_size}, which does not divide by the 4 devices; the nearest that does is {nearest}"
        )
        for options in ({"train": False}, {"train": True, "stop": 1}):
            with pytest.raises(InputError, match=message):
                parallel_loader(Numbers(32), batch_size, mesh, **options)


def test_an_empty_or_too_small_data_set_is_refused(mesh):
    for options in ({"train": False}, {"train": True, "stop": 1}):
        with pytest.raises(InputError, match="the data set is empty"):
            parallel_loader(Numbers(0), 8, mesh, **options)
    with pytest.raises(InputError, match="batch_size is 8, but the data set has 7 examples; use a smaller batch"):
        parallel_loader(Numbers(7), 8, mesh, train=True, stop=1)
    assert loading.steps_per_epoch(Numbers(17), 8, mesh) == 2


# ---- counting, waiting, closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_files_are_counted_on_the_host(mesh, workers):
    with parallel_loader(Skipping(10), 8, mesh, train=False, workers=workers) as loader:
        batches = list(loader)
        assert all("skipped" not in batch for batch in batches)
        assert loader.skipped == 4  # 0, 3, 6, 9; the padding, which repeats 8, does not count
    with parallel_loader(Skipping(9), 8, mesh, train=False, workers=workers) as loader:
        assert len(list(loader)) == 2 and loader.skipped == 3
    # The padding repeats the first example of its part, which is a broken one here.
    with parallel_loader(Skipping(1), 8, mesh, train=False, workers=workers) as loader:
        assert len(list(loader)) == 1 and loader.skipped == 1


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


def assert_gone(threads: set, processes: set) -> None:
    """A queue's thread ends a moment after the process that it feeds."""
    deadline = time.perf_counter() + 5
    while time.perf_counter() < deadline and (
        any(process.is_alive() for process in processes) or set(threading.enumerate()) - threads
    ):
        time.sleep(0.01)
    assert not [process for process in processes if process.is_alive()]
    assert not set(threading.enumerate()) - threads


@pytest.mark.parametrize("workers", [0, 2])
def test_close_in_the_middle_is_quick_and_leaves_nothing(mesh, workers):
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    loader = parallel_loader(Slow(64), 8, mesh, train=True, stop=10**9, workers=workers)
    next(loader)
    assert len(multiprocessing.active_children()) == len(children) + workers
    processes = set(multiprocessing.active_children()) - children
    started = time.perf_counter()
    loader.close()
    assert time.perf_counter() - started < 3
    loader.close()  # twice is fine
    assert_gone(threads, processes)


@pytest.mark.parametrize("how", ["raise", "input"])
def test_close_after_an_error_leaves_nothing(mesh, how):
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    with parallel_loader(Failing(64, 9, how), 8, mesh, train=False, workers=2) as loader:
        processes = set(multiprocessing.active_children()) - children
        _, error = take_until_error(loader, (KeyError, InputError))
    assert error is not None  # while somebody still holds the error and its traceback
    assert len(processes) == 2
    assert_gone(threads, processes)


def test_batches_are_uploaded_ahead_of_the_loop_but_not_far(mesh):
    dataset = Numbers(800)
    with parallel_loader(dataset, 8, mesh, train=True, stop=100) as loader:
        next(loader)
        deadline = time.perf_counter() + 5
        while len(dataset.calls) < 8 * (1 + loading.DEVICE_BATCHES) and time.perf_counter() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        # One taken, the queue full, one in the thread's hands.
        assert 8 * (1 + loading.DEVICE_BATCHES) <= len(dataset.calls) <= 8 * (2 + loading.DEVICE_BATCHES)


def test_workers_start_from_a_clean_process(mesh):
    """A fork of this process would copy the locks of XLA's threads, held as they are."""
    assert loading._worker_context(Numbers(1)).get_start_method() == "forkserver"


def test_minus_one_worker_is_one_a_core(mesh, monkeypatch):
    seen = {}
    real = loading.DataLoader

    def spy(*args, num_workers, **options):
        seen["workers"] = num_workers
        return real(*args, num_workers=0, collate_fn=options["collate_fn"], batch_sampler=options["batch_sampler"])

    monkeypatch.setattr(loading, "DataLoader", spy)
    with parallel_loader(Numbers(8), 8, mesh, train=False, workers=-1) as loader:
        list(loader)
    assert seen["workers"] == len(os.sched_getaffinity(0))


def test_training_without_a_last_step_is_a_bug(mesh):
    with pytest.raises(ValueError, match="needs `stop`"):
        parallel_loader(Numbers(8), 8, mesh, train=True)


def test_stack_keeps_types_and_adds_the_batch():
    stacked = loading.stack([Shapes(2).example(index, None) for index in range(2)])
    assert {key: (value.dtype, tuple(value.shape)) for key, value in stacked.items()} == {
        "label": (torch.int64, (2,)),
        "row": (torch.float32, (2, 3)),
        "image": (torch.uint8, (2, 3, 2, 2)),
    }
    assert stacked["label"].tolist() == [0, 1]


def test_an_upload_is_a_copy_so_that_workers_may_use_their_memory_again(mesh):
    host = torch.arange(8 * 3 * 64 * 64, dtype=torch.float32).view(8, 3, 64, 64)
    expected = host.clone()
    with parallel_loader(Numbers(8), 8, mesh, train=False) as loader:
        for _ in range(5):
            uploaded = loader._upload({"image": host})["image"]
            host.fill_(-1)
            assert torch.equal(uploaded.cpu(), expected)
            host.copy_(expected)
