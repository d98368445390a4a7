"""Parallel loading: worker processes make examples, a background thread uploads batches, sharded
over the mesh.

    worker processes (decode, augment, collate)  ->  upload thread  ->  two device batches  ->  the training loop

torch_xla's own MpDeviceLoader is not used: it ends an epoch early, without a word, when the loader
raises, and its `input_sharding` silently replicates every tensor whose rank is not that of the spec
(torch_xla 2.9.0).
"""

import collections
import math
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from errors import InputError
from train.common import batches, device, hooks
from train.common.batches import BatchMaker, Dataset, as_tensors
from train.common.mesh import Mesh

AHEAD = 3  # batches uploaded or under way: two are ready for the loop; more would only hold device memory


def steps_per_epoch(
    dataset: Dataset, batch_size: Any, mesh: Mesh, train: bool = True, micro_batches: int = 1
) -> int:
    """Returns the batches in an epoch, in training those that are full.

    Args:
        batch_size: examples, or a plan, see `parallel_loader`.
        micro_batches: into which each batch is cut.
    Raises:
        InputError: the micro-batches or the devices do not divide a batch; the data set is empty,
            or smaller than a batch.
    """
    is_plan = hasattr(batch_size, "shapes")
    examples = len(dataset)
    unit = micro_batches * mesh.num_devices
    for shape in batch_size.shapes if is_plan else [(batch_size,)]:
        if shape[0] % unit:
            name = f"the batch of shape {'x'.join(map(str, shape))}" if is_plan else "batch_size"
            into = f"into {micro_batches} parts (--update-every) " if micro_batches > 1 else ""
            unfit = f"{name} is {shape[0]}, which does not divide {into}by the {mesh.num_devices} devices"
            nearest = max(1, round(shape[0] / unit)) * unit
            raise InputError(f"{unfit}; the nearest that does is {nearest}")
    if examples == 0:
        raise InputError("the data set is empty")
    if is_plan:
        return len(batch_size)
    if not train:
        return math.ceil(examples / batch_size)
    if examples < batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the data set has {examples} examples; use a smaller batch"
        )
    return examples // batch_size


class Loader(AbstractContextManager, Iterator):
    """Iterates over device batches: dicts of tensors [batch, ...], sharded over the mesh by their
    first dimension; or, see `parallel_loader`, over the `MicroBatches` of updates.

    Use it as a context manager: it owns a thread and worker processes. `skipped` is the sum of the
    examples' "skipped" entries so far: files that a data set could not read and replaced.

    Args:
        made: what its data set, a BatchMaker, makes, in order.
        per_update: micro-batches of an update; None: it yields single batches.
        first: number of the first micro-batch, counted from 1 since the training began.
        split, count: see `parallel_loader`.
    """

    def __init__(
        self,
        made: DataLoader,
        mesh: Mesh,
        per_update: int | None = None,
        first: int = 1,
        split: int = 1,
        count: Callable | None = None,
    ):
        self.skipped = 0
        self._mesh = mesh
        self._maker = made.dataset
        self._per_update = per_update
        self._first = first
        self._update: MicroBatches | None = None  # the last that was yielded
        self._split = split
        self._count = count
        # Micro-batches of a batch of which not all are read.
        self._read: list[dict[str, Tensor]] = []
        self._counted = collections.deque()  # micro-batches that have the counts of their batch
        self._waited = 0.0  # seconds
        self._since = time.perf_counter()
        # Starts the workers. Not in the upload thread: the main thread's signal handler notices
        # their death.
        self._made = iter(made)
        self._thread = ThreadPoolExecutor(1, "upload")
        self._ahead = collections.deque(self._thread.submit(self._load) for _ in range(AHEAD))

    def __exit__(self, *_) -> None:
        """Stops the thread and the worker processes."""
        self._thread.shutdown(cancel_futures=True)
        self._made = None  # a DataLoader's workers end when its iterator does
        self._maker = None

    def __next__(self) -> "dict[str, Tensor] | MicroBatches":
        if self._per_update is None:
            return self.take()
        if self._update is not None and self._update.left:
            left = f"{self._update.left} micro-batches of the update before this one"
            raise RuntimeError(f"{left} were not taken")
        self._update = MicroBatches(self, self._first, self._per_update)
        self._first += self._per_update
        return self._update

    def take(self) -> dict[str, Tensor]:
        """Returns the next single batch, or micro-batch, on the device. Raises what loading raised;
        StopIteration at the end. Nothing else asks for one, so here alone the loop waits."""
        started = time.perf_counter()
        try:
            with hooks.span(hooks.WAIT):
                return self._take()
        finally:
            waited = time.perf_counter() - started
            for watcher in hooks.watchers:
                watcher.waited(waited)

    def _take(self) -> dict[str, Tensor]:
        started = time.perf_counter()
        batch = self._ahead[
            0
        ].result()  # an error, or the end, stays there: every later call raises it, too
        self._waited += time.perf_counter() - started
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(self._load))
        return batch

    def input_wait(self) -> float:
        """Returns the share of the time since the last call (0 to 1) that the loop waited for a batch."""
        now = time.perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited = 0.0
        self._since = now
        return min(share, 1.0)

    def _load(self) -> dict[str, Tensor]:
        try:
            batch = self._next() if self._count is None else self._next_counted()
            return self._upload(batch)
        except BaseException as error:  # whatever it is, the training loop must see it
            # The error must not keep the DataLoader's iterator alive, and with it the worker
            # processes.
            traceback.clear_frames(error.__traceback__)
            error = self._explained(error)
            self._made = iter(())
            raise error

    def _next(self) -> dict[str, Tensor]:
        """Returns the next batch, or micro-batch; its memory is a worker's, and used again for the next but two."""
        batch = self._maker.opened(next(self._made))
        if "skipped" in batch:
            self.skipped += int(batch.pop("skipped").sum())
        return batch

    def _next_counted(self) -> dict[str, Tensor]:
        """Returns the next micro-batch with the counts of its whole batch, so all of that has been
        read.

        Except for the first batch, it reads one micro-batch for each that it returns: nobody waits
        for a whole batch.
        """
        if self._counted:
            self._read_one()
        while not self._counted:
            self._read_one()
        return self._counted.popleft()

    def _read_one(self) -> None:
        """Reads a micro-batch; with the last one of a batch, gives all of them their counts."""
        try:
            micro_batch = self._next()
        except StopIteration:
            if not self._counted:
                raise
            return
        self._read.append({name: tensor.clone() for name, tensor in micro_batch.items()})
        if len(self._read) < self._split:
            return

        counts = [self._count(micro_batch) for micro_batch in self._read]
        for name in counts[0]:
            total = torch.stack([each[name] for each in counts]).sum(0)
            for micro_batch in self._read:
                micro_batch[name] = total
        self._counted.extend(self._read)
        self._read = []

    def _explained(self, error: BaseException) -> BaseException:
        """Returns the error; or, for the broken connection to a worker that died, one that says so."""
        if not isinstance(error, ConnectionError | EOFError):
            return error
        for worker in getattr(self._made, "_workers", ()):
            worker.join(timeout=1)
            if not worker.is_alive():
                died = f"DataLoader worker (pid {worker.pid}) exited unexpectedly: out of memory, or killed"
                return RuntimeError(died).with_traceback(error.__traceback__)
        return error

    def _upload(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with hooks.span(hooks.UPLOAD):
            return {key: device.upload(tensor, self._mesh) for key, tensor in batch.items()}


class MicroBatches(Iterator):
    """The micro-batches of one update, on the device: each is taken from the loader when it is
    asked for, so that no more than AHEAD of them lie there.

    Attributes:
        first: the number of its first micro-batch, counted from 1 since the training began,
            whatever was resumed: what is random in the step of a micro-batch (dropout) is drawn by
            its number.
        left: how many are not taken yet.
    """

    def __init__(self, loader: Loader, first: int, count: int):
        self.first = first
        self.left = count
        self._loader = loader
        self._taken = loader.take()  # already here: at the end of the data there is no update

    def __next__(self) -> dict[str, Tensor]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        batch = self._taken
        if batch is None:
            batch = self._loader.take()
        self._taken = None
        return batch


def parallel_loader(
    dataset: Dataset,
    batch_size: Any,
    mesh: Mesh,
    *,
    train: bool,
    seed: int = 0,
    start: int = 0,
    stop: int | None = None,
    split: int = 1,
    update_every: int | None = None,
    count: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    shuffle: Literal["examples", "batches"] = "examples",
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> Loader:
    """Loads `dataset` in batches onto the mesh.

    Training: batches `start` to `stop`; each epoch is a new permutation, its remainder that does
    not fill a batch is left out. Evaluation: every example once, in order; the last batch is
    padded, and `batch["mask"]` [batch_size] float32 is 1 for examples and 0 for padding.

    The generator that `dataset.example` gets depends on (seed, epoch, index) alone, so the numbers
    depend neither on `workers` nor on hosts or resumes. An exception anywhere in loading is raised
    by the next `next(loader)`.

    Args:
        batch_size: examples (of all hosts together) in a batch; or a plan, which has `shapes`, a
            length and `steps(seed, start, stop)`, an order of its own, and a mask in training too.
        split: micro-batches of equal size that each batch is cut into; they come one after the
            other.
        update_every: of training, micro-batches that make an update: the loader then yields
            `MicroBatches`. None: it yields single batches.
        count: returns numbers [n] of the n rows of a micro-batch, by name. Row by row they are
            added up over those of a batch, and stand in each of them: their sum is known before the
            first one is trained on, on every host.
        shuffle: what an epoch permutes. "batches" keeps neighbours together: billions of rows are
            then read in sequence, and the permutation itself stays small.
        collate: makes a dict of tensors [n, ...] from n examples or from the result of `batch`, in
            a worker process.
        workers: processes on this host; 0 loads in the upload thread, -1 takes one per core.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train, split)
    is_plan = hasattr(batch_size, "shapes")
    if is_plan and (shuffle != "examples" or not hasattr(dataset, "batch")):
        raise ValueError(
            "a plan has an order of its own, and needs a data set that has `batch(indices, lengths)`"
        )

    if not train:
        keys = _evaluation_keys(dataset, batch_size, 0, per_epoch)
    elif is_plan:
        keys = batch_size.steps(seed, start, stop)
    else:
        keys = batches.training_keys(dataset, batch_size, seed, start, stop, shuffle)

    keys = _of_this_host(keys, split, mesh)
    if hasattr(dataset, "ahead"):
        keys = dataset.ahead(keys)
    maker = BatchMaker(dataset, seed, masked=not train, collate=collate)
    made = batches.data_loader(maker, keys, workers)
    return Loader(made, mesh, update_every, start * split + 1, split, count)


def first_and_last(
    dataset: Dataset,
    batch_size: Any,
    mesh: Mesh,
    *,
    seed: int = 0,
    split: int = 1,
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> list[dict[str, Tensor]]:
    """Returns this host's rows of the first and of the last batch of an evaluation, in host memory,
    each in the micro-batches that it is `split` into.

    Call it before step 1, with the arguments of the evaluation's `parallel_loader`: what cannot be
    read or collated then costs a sentence, and no training.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train=False, micro_batches=split)
    keys = []
    for number in sorted({0, per_epoch - 1}):
        batch = _evaluation_keys(dataset, batch_size, number, number + 1)
        keys += _of_this_host(batch, split, mesh)
    if hasattr(dataset, "ahead"):
        keys = dataset.ahead(keys)

    maker = BatchMaker(dataset, seed, masked=True, collate=collate)
    found = []
    for made in batches.data_loader(maker, keys, workers):
        batch = maker.opened(made)
        found.append(
            {key: tensor.clone() for key, tensor in batch.items()}
        )  # a worker's memory is used again
    return found


def _evaluation_keys(dataset: Dataset, batch_size: Any, start: int, stop: int) -> Iterator[tuple]:
    if hasattr(batch_size, "shapes"):
        return batch_size.steps(None, start, stop)
    return batches.evaluation_keys(len(dataset), batch_size, start, stop)


def _of_this_host(keys: Iterator[tuple], split: int, mesh: Mesh) -> Iterator[tuple]:
    """Yields the keys of the micro-batches that these batches are split into, with the rows that this host loads."""
    for epoch, indices, *lengths in keys:
        for part in np.split(indices, split):
            yield epoch, part[mesh.rows(len(part))], *lengths
