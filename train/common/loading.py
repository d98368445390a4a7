"""Parallel loading: worker processes make examples, a background thread uploads batches, sharded
over the mesh.

    worker processes       ->  upload thread  ->  two batches on the  ->  training loop
    (decode, augment, collate)                    device

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
from train.common.batches import BatchMaker, BatchPlan, Dataset, as_tensors
from train.common.mesh import Mesh

# Batches uploaded or under way: two are ready for the loop; more would only hold device memory.
AHEAD = 3
# A batch size that is chosen for a small data set makes at least so many updates per epoch, if any
# batch size does.
UPDATES_PER_EPOCH = 20


def _is_plan(batch_size: int | BatchPlan) -> bool:
    """Returns whether a `batch_size` is a plan, see `parallel_loader`, and not a number."""
    return hasattr(batch_size, "shapes")


def steps_per_epoch(
    dataset: Dataset,
    batch_size: int | BatchPlan,
    mesh: Mesh,
    train: bool = True,
    micro_batches: int = 1,
    hint: str = "",
) -> int:
    """Returns the batches in an epoch, in training those that are full.

    Args:
        batch_size: examples, or a plan, see `parallel_loader`.
        micro_batches: into which each batch is cut.
        hint: ends the message about a data set that is smaller than a batch: "; " and what else the
            user can do.

    Raises:
        InputError: the micro-batches or the devices do not divide a batch; the data set is empty,
            or smaller than a batch.
    """
    if _is_plan(batch_size):
        for shape in batch_size.shapes:
            name = f"the batch of shape {'x'.join(map(str, shape))}"
            _check_divides(name, shape[0], micro_batches, mesh)
    else:
        _check_divides("batch_size", batch_size, micro_batches, mesh)

    examples = len(dataset)
    if examples == 0:
        raise InputError("the data set is empty")
    if _is_plan(batch_size):
        return len(batch_size)
    if not train:
        return math.ceil(examples / batch_size)
    if examples < batch_size:
        divisor = micro_batches * mesh.num_devices
        raise InputError(_too_few(examples, batch_size, divisor, hint))
    return examples // batch_size


def _too_few(examples: int, batch_size: int, divisor: int, hint: str) -> str:
    """Returns the sentence about a data set that is smaller than a batch, with batches that fit.

    These are the largest, which makes one update per epoch, and a smaller one: `divisor`, doubled
    as long as an epoch keeps UPDATES_PER_EPOCH updates. Both are multiples of `divisor`.
    """
    sentence = f"batch_size is {batch_size}, but the data set has {examples} examples"
    largest = examples // divisor * divisor
    if largest == 0:
        return f"{sentence}; a batch has at least {divisor}, on these devices: add examples"

    smaller = divisor
    while examples // (2 * smaller) >= UPDATES_PER_EPOCH:
        smaller *= 2
    fits = f"--batch-size {largest} makes one update per epoch"
    if smaller < largest:
        fits += f", --batch-size {smaller} makes {examples // smaller}"
    return f"{sentence}: {fits}{hint}"


def _check_divides(name: str, examples: int, micro_batches: int, mesh: Mesh) -> None:
    """Raises InputError where a batch does not divide into its micro-batches, and each of these by
    the devices.

    Args:
        name: of the batch, in the message.
    """
    divisor = micro_batches * mesh.num_devices
    if examples % divisor == 0:
        return

    required = f"the {mesh.num_devices} devices"
    if micro_batches > 1:
        required = (
            f"{micro_batches} micro-batches (--update-every) x {mesh.num_devices} devices "
            f"= {divisor}"
        )
    nearest = max(1, round(examples / divisor)) * divisor
    raise InputError(
        f"{name} is {examples}, which is not a multiple of {required}; "
        f"the nearest multiple is {nearest}"
    )


class Loader(AbstractContextManager, Iterator):
    """Iterates over device batches: dicts of tensors [batch, ...], sharded over the mesh by their
    first dimension; or, see `parallel_loader`, over the `MicroBatches` of updates.

    Use it as a context manager: it owns a thread and worker processes. `skipped` is the sum of the
    examples' "skipped" entries so far: files that a data set could not read and replaced.

    Args:
        data_loader: makes host batches, or micro-batches, in order; its data set is a BatchMaker.
        update_every: micro-batches of an update; None: it yields single batches.
        first: number of the first micro-batch, counted from 1 since the training began.
        micro_batches: into which each batch is cut. With `counts_per_row` all of them get the
            counts of their batch.
        counts_per_row: see `parallel_loader`.
    """

    def __init__(
        self,
        data_loader: DataLoader,
        mesh: Mesh,
        update_every: int | None = None,
        first: int = 1,
        micro_batches: int = 1,
        counts_per_row: Callable | None = None,
    ):
        self.skipped = 0
        self._mesh = mesh
        self._maker = data_loader.dataset
        self._update_every = update_every
        self._first = first
        self._update: MicroBatches | None = None  # the last that was yielded
        self._micro_batches = micro_batches
        self._counts_per_row = counts_per_row
        self._incomplete: list[dict[str, Tensor]] = []  # the micro-batches read of the next batch
        self._counted = collections.deque()  # micro-batches that have the counts of their batch
        self._waited = 0.0  # seconds
        self._since = time.perf_counter()
        # Starts the workers. Not in the upload thread: the main thread's signal handler notices
        # their death.
        self._host_batches = iter(data_loader)
        self._thread = ThreadPoolExecutor(1, "upload")
        self._uploads = collections.deque(self._thread.submit(self._load) for _ in range(AHEAD))

    def __exit__(self, *_) -> None:
        """Stops the thread and the worker processes."""
        self._thread.shutdown(cancel_futures=True)
        self._host_batches = None  # a DataLoader's workers end when its iterator does
        self._maker = None  # it holds the memory that the workers shared

    def __next__(self) -> "dict[str, Tensor] | MicroBatches":
        if self._update_every is None:
            return self.take()
        if self._update is not None and self._update.left:
            raise RuntimeError(
                f"{self._update.left} micro-batches of the update before this one were not taken"
            )
        self._update = MicroBatches(self, self._first, self._update_every)
        self._first += self._update_every
        return self._update

    def take(self) -> dict[str, Tensor]:
        """Returns the next single batch, or micro-batch, on the device.

        Raises what loading raised; StopIteration at the end. The loop waits for input here and
        nowhere else. Watchers get the waits of all loaders; `input_wait` tells those of this one.
        """
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
        # Not popped before: an error, or the end, stays there, and every later call raises it, too.
        batch = self._uploads[0].result()
        self._waited += time.perf_counter() - started
        self._uploads.popleft()
        self._uploads.append(self._thread.submit(self._load))
        return batch

    def input_wait(self) -> float:
        """Returns the share of the time since the last call (0 to 1) in which the loop waited for a
        batch."""
        now = time.perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited = 0.0
        self._since = now
        return min(share, 1.0)

    def _load(self) -> dict[str, Tensor]:
        try:
            batch = self._next() if self._counts_per_row is None else self._next_counted()
            return self._upload(batch)
        except BaseException as error:  # whatever it is, the training loop must see it
            # The error must not keep the DataLoader's iterator alive, and with it the worker
            # processes.
            traceback.clear_frames(error.__traceback__)
            error = self._explained(error)
            self._host_batches = iter(())
            raise error

    def _next(self) -> dict[str, Tensor]:
        """Returns the next batch, or micro-batch, in host memory.

        Its memory is a worker's, see `BatchMaker.opened`: it stays as it is while that worker makes
        its next PREFETCH batches, and the one after these overwrites it.
        """
        batch = self._maker.opened(next(self._host_batches))
        if "skipped" in batch:
            self.skipped += int(batch.pop("skipped").sum())
        return batch

    def _next_counted(self) -> dict[str, Tensor]:
        """Returns the next micro-batch with the counts of its batch, which are known when all
        micro-batches of the batch have been read.

        The first call reads a whole batch. Each later call reads one micro-batch and returns one,
        so that nobody waits for a whole batch again. With batches of three micro-batches, a b c and
        d e f:

            call      1      2  3  4  5
            reads     a b c  d  e  f  g
            returns   a      b  c  d  e
        """
        if self._counted:
            self._read_one()  # ahead
        while not self._counted:
            self._read_one()  # until a batch is complete
        return self._counted.popleft()

    def _read_one(self) -> None:
        """Reads a micro-batch; when it is the last one of its batch, gives the batch's counts to
        all micro-batches of the batch."""
        try:
            micro_batch = self._next()
        except StopIteration:
            if self._counted:
                return  # nothing is left to read ahead, but not all has been returned yet
            raise
        # Copies, since the worker writes its memory again.
        copies = {name: tensor.clone() for name, tensor in micro_batch.items()}
        self._incomplete.append(copies)
        if len(self._incomplete) < self._micro_batches:
            return

        counts = [self._counts_per_row(micro_batch) for micro_batch in self._incomplete]
        for name in counts[0]:
            # [n], not a number: it is sharded like the rows, so that its `.sum()` on the device
            # adds up those of all hosts.
            total = torch.stack([each[name] for each in counts]).sum(0)
            for micro_batch in self._incomplete:
                micro_batch[name] = total
        self._counted.extend(self._incomplete)
        self._incomplete = []

    def _explained(self, error: BaseException) -> BaseException:
        """Returns the error to raise: where the connection broke since a worker died, one that says
        so; else the error itself."""
        if not isinstance(error, ConnectionError | EOFError):
            return error
        for worker in getattr(self._host_batches, "_workers", ()):
            worker.join(timeout=1)
            if not worker.is_alive():
                dead = RuntimeError(
                    f"DataLoader worker (pid {worker.pid}) exited unexpectedly: "
                    "out of memory, or killed"
                )
                return dead.with_traceback(error.__traceback__)
        return error

    def _upload(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Uploads a batch's tensors to the mesh; a profile shows it as a span."""
        with hooks.span(hooks.UPLOAD):
            return {key: device.upload(tensor, self._mesh) for key, tensor in batch.items()}


class MicroBatches(Iterator):
    """The micro-batches of one update, on the device.

    Each is taken from the loader when it is asked for, so that the device's memory holds no more
    than AHEAD of them beside the one in use.

    Attributes:
        first: the number of its first micro-batch, counted from 1 since the training began, also
            in a resumed run. A micro-batch's number seeds what is random in its step (dropout).
        left: how many are not taken yet.
    """

    def __init__(self, loader: Loader, first: int, count: int):
        self.first = first
        self.left = count
        self._loader = loader
        # Taken here: at the end of the data this raises StopIteration, so that the loader yields no
        # empty update.
        self._taken = loader.take()

    def __next__(self) -> dict[str, Tensor]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        if self._taken is not None:
            batch = self._taken
            self._taken = None
            return batch
        try:
            return self._loader.take()
        except StopIteration:
            # It would end the loop over this update like a whole one.
            raise RuntimeError(
                f"the data end within an update: {self.left + 1} of its micro-batches are missing; "
                "give a start and a stop that make up whole updates"
            ) from None


def parallel_loader(
    dataset: Dataset,
    batch_size: int | BatchPlan,
    mesh: Mesh,
    *,
    train: bool,
    seed: int = 0,
    start: int = 0,
    stop: int | None = None,
    micro_batches: int = 1,
    update_every: int | None = None,
    counts_per_row: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    shuffle: Literal["examples", "batches"] = "examples",
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> Loader:
    """Loads `dataset` in batches onto the mesh.

    Training: the batches `start`, …, `stop` - 1, counted from 0 since the training began; `stop`
    must be given. They are whole batches, not their micro-batches. Each epoch is a new permutation;
    what does not fill a batch at its end is left out.

    Evaluation: every example once, in order, whatever `start` and `stop` are. The last batch is
    padded, and `batch["mask"]` [batch_size] float32 is 1 for examples and 0 for padding.

    The generator that `dataset.example` gets depends on (seed, epoch, index) alone, so the numbers
    depend neither on `workers` nor on hosts or resumes. An exception anywhere in loading is raised
    by the next `next(loader)`.

    Args:
        batch_size: examples (of all hosts together) in a batch; or a plan, which has `shapes`, a
            length and `steps(seed, start, stop)`, an order of its own, and a mask in training too.
        micro_batches: of equal size, into which each batch is cut; they come one after the other.
        update_every: of training, micro-batches that make an update: the loader then yields
            `MicroBatches`. None: it yields single batches. With micro_batches=k and update_every=k
            each batch is cut in k, which make one update. With micro_batches=1 and update_every=k
            an update takes k whole batches, such as those of a plan: update u, counted from 0,
            takes those from start = u * k on. All micro-batches from `start` to `stop` must make up
            whole updates.
        counts_per_row: counts something in each of the n rows of a micro-batch, such as tokens;
            returns the counts [n] by name. The loader adds up the [n] of a batch's micro-batches,
            entry by entry, and each of these micro-batches gets the sums [n] under the same names.
            The `.sum()` of them on the device is the count of the whole batch of all hosts, which
            is so known before its first micro-batch is trained on.
        shuffle: what an epoch permutes. "batches" keeps neighbours together: billions of rows are
            then read in sequence, and the permutation itself stays small. Not for a data set that
            has its own `order`.
        collate: makes a dict of tensors [n, ...] from n examples or from the result of `batch`, in
            a worker process.
        workers: processes on this host; 0 loads in the upload thread, -1 takes one per core.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train, micro_batches)
    is_plan = _is_plan(batch_size)
    if is_plan and (shuffle != "examples" or not hasattr(dataset, "batch")):
        raise ValueError(
            "a plan has an order of its own, and needs a data set with `batch(indices, lengths)`"
        )
    if shuffle == "batches" and hasattr(dataset, "order"):
        raise ValueError(
            f"the data set {type(dataset).__name__} has an order of its own: "
            "leave shuffle='batches' out"
        )

    if not train:
        keys = _evaluation_keys(dataset, batch_size, 0, per_epoch)
    elif is_plan:
        keys = batch_size.steps(seed, start, stop)
    else:
        keys = batches.training_keys(dataset, batch_size, seed, start, stop, shuffle)

    keys = _micro_batch_keys(keys, micro_batches, mesh)
    if hasattr(dataset, "ahead"):
        keys = dataset.ahead(keys)
    maker = BatchMaker(dataset, seed, masked=not train, collate=collate)
    return Loader(
        batches.data_loader(maker, keys, workers),
        mesh,
        update_every,
        first=start * micro_batches + 1,
        micro_batches=micro_batches,
        counts_per_row=counts_per_row,
    )


def first_and_last(
    dataset: Dataset,
    batch_size: int | BatchPlan,
    mesh: Mesh,
    *,
    seed: int = 0,
    micro_batches: int = 1,
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> list[dict[str, Tensor]]:
    """Returns this host's rows of the first and of the last batch of an evaluation, in host memory,
    each cut into its micro-batches.

    Call it before step 1, with the arguments of the evaluation's `parallel_loader`: what cannot be
    read or collated then costs a sentence, and no training.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train=False, micro_batches=micro_batches)
    keys = []
    for number in sorted({0, per_epoch - 1}):  # one, where the first batch is the last
        batch = _evaluation_keys(dataset, batch_size, number, number + 1)
        keys += _micro_batch_keys(batch, micro_batches, mesh)
    if hasattr(dataset, "ahead"):
        keys = dataset.ahead(keys)

    maker = BatchMaker(dataset, seed, masked=True, collate=collate)
    found = []
    for made in batches.data_loader(maker, keys, workers):
        batch = maker.opened(made)
        # Copies, since the worker writes its memory again.
        copies = {key: tensor.clone() for key, tensor in batch.items()}
        found.append(copies)
    return found


def _evaluation_keys(
    dataset: Dataset, batch_size: int | BatchPlan, start: int, stop: int
) -> Iterator[tuple]:
    """Yields the keys of an evaluation's batches from `start` to `stop`."""
    if _is_plan(batch_size):
        return batch_size.steps(None, start, stop)
    return batches.evaluation_keys(len(dataset), batch_size, start, stop)


def _micro_batch_keys(keys: Iterator[tuple], micro_batches: int, mesh: Mesh) -> Iterator[tuple]:
    """Yields the keys of the micro-batches that these batches are cut into, each with the indices
    that this host loads, in the order in which it uploads them.

    A key is (epoch, indices), see batches.py, and of a plan also the lengths.
    """
    for epoch, indices, *lengths in keys:
        for micro_batch in np.split(indices, micro_batches):
            own_rows = mesh.rows(len(micro_batch))
            yield epoch, micro_batch[own_rows], *lengths
