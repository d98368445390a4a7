"""Parallel loading: worker processes make examples, a background thread uploads batches, sharded over the mesh.

    worker processes (decode, augment, collate)  ->  upload thread  ->  two device batches  ->  the training loop

torch_xla's own MpDeviceLoader is not used: it ends an epoch early, without a word, when the loader raises, and its
`input_sharding` silently replicates every tensor whose rank is not that of the spec (torch_xla 2.9.0).
"""

import collections
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from errors import InputError
from train.common import device, hooks
from train.common.device import Mesh

PADDING = -1  # the index of a padded example
PREFETCH = 2  # batches that a worker makes ahead
AHEAD = 3  # batches uploaded or under way: two are ready for the loop; more would only hold device memory


class Dataset(Protocol):
    """A size, and examples (numbers, arrays; floats: float32) that depend only on the index and the generator.

    A data set without augmentation may have `batch(indices) -> dict of arrays [len(indices), ...]` instead of
    `example`: rows of memory-mapped arrays are read hundreds of times faster together than one by one.

    One that is read in sequence may have `order(seed, epoch, batch_size)`, the indices of the epoch's full batches;
    and `ahead(keys)`, which yields its keys, each batch's epoch and indices, while it fetches what the next ones need.
    """

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]: ...


def as_tensors(batch: list[dict[str, Any]] | dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Makes tensors [batch, ...] of a list of examples, or of the arrays that a data set's `batch` returns."""
    if isinstance(batch, list):
        batch = {key: np.stack([example[key] for example in batch]) for key in batch[0]}
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in batch.items()}


def steps_per_epoch(dataset: Dataset, batch_size: Any, mesh: Mesh, train: bool = True, parts: int = 1) -> int:
    """Returns the batches in an epoch, in training those that are full. Raises InputError for one that the parts or the
    devices do not divide, and for an empty data set or one smaller than a batch."""
    planned, examples = hasattr(batch_size, "shapes"), len(dataset)
    for shape in batch_size.shapes if planned else [(batch_size,)]:
        if shape[0] % (parts * mesh.num_devices):
            name = f"the batch of shape {'x'.join(map(str, shape))}" if planned else "batch_size"
            nearest = max(1, round(shape[0] / (parts * mesh.num_devices))) * parts * mesh.num_devices
            into = f"into {parts} parts (--update-every) " if parts > 1 else ""
            unfit = f"{name} is {shape[0]}, which does not divide {into}by the {mesh.num_devices} devices"
            raise InputError(f"{unfit}; the nearest that does is {nearest}")
    if examples == 0:
        raise InputError("the data set is empty")
    if planned:
        return len(batch_size)
    if train and examples < batch_size:
        raise InputError(f"batch_size is {batch_size}, but the data set has {examples} examples; use a smaller batch")
    return examples // batch_size if train else -(-examples // batch_size)


class Loader(AbstractContextManager, Iterator):
    """Iterates over device batches: dicts of tensors [batch, ...], sharded over the mesh by their first dimension.

    Use it as a context manager: it owns a thread and worker processes. `skipped` is the sum of the examples' "skipped"
    entries so far: files that a data set could not read and replaced.
    """

    def __init__(self, batches: DataLoader, mesh: Mesh, parts: int = 1, count: Callable | None = None):
        self._mesh, self._examples = mesh, batches.dataset
        self._parts, self._count = parts, count
        self._read = []  # parts of a batch of which not all are read
        self._counted = collections.deque()  # parts that have the counts of their batch
        self.skipped, self._waited, self._since = 0, 0.0, time.perf_counter()
        # Starts the workers. Not in the upload thread: the main thread's signal handler notices their death.
        self._batches = iter(batches)
        self._thread = ThreadPoolExecutor(1, "upload")
        self._ahead = collections.deque(self._thread.submit(self._load) for _ in range(AHEAD))

    def __exit__(self, *_) -> None:
        """Stops the thread and the worker processes."""
        self._thread.shutdown(cancel_futures=True)
        self._batches = self._examples = None  # a DataLoader's workers end when its iterator does

    def __next__(self) -> dict[str, Tensor]:
        started = time.perf_counter()
        try:
            with hooks.span(hooks.WAIT):
                batch = self._ahead[0].result()  # an error, or the end, stays there: every later call raises it, too
        finally:
            waited = time.perf_counter() - started
            self._waited += waited
            for watcher in hooks.watchers:
                watcher.waited(waited)
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(self._load))
        return batch

    def input_wait(self) -> float:
        """Returns the share of the time since the last call (0 to 1) that the loop waited for a batch."""
        now = time.perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited, self._since = 0.0, now
        return min(share, 1.0)

    def _load(self) -> dict[str, Tensor]:
        try:
            return self._upload(self._next() if self._count is None else self._next_counted())
        except BaseException as error:  # whatever it is, the training loop must see it
            # The error must not keep the DataLoader's iterator alive, and with it the worker processes.
            traceback.clear_frames(error.__traceback__)
            error = self._explained(error)
            self._batches = iter(())
            raise error

    def _next(self) -> dict[str, Tensor]:
        """Returns the next batch, or part of one; its memory is a worker's, and used again for the next but two."""
        batch = next(self._batches)
        if isinstance(batch, InputError):
            raise batch
        batch = batch if isinstance(batch, dict) else self._examples.received(*batch)
        self.skipped += int(batch.pop("skipped", torch.zeros(())).sum())
        return batch

    def _next_counted(self) -> dict[str, Tensor]:
        """Returns the next part of a batch with the counts of the whole batch, so all of its parts have been read.

        Except for the first batch, it reads one part for each that it returns: nobody waits for a whole batch.
        """
        if self._counted:
            self._read_part()
        while not self._counted:
            self._read_part()
        return self._counted.popleft()

    def _read_part(self) -> None:
        """Reads a part; with the last one of a batch, gives all of them their counts."""
        try:
            part = self._next()
        except StopIteration:
            if not self._counted:
                raise
            return
        self._read.append({name: tensor.clone() for name, tensor in part.items()})
        if len(self._read) < self._parts:
            return

        counts = [self._count(part) for part in self._read]
        for name in counts[0]:
            total = torch.stack([each[name] for each in counts]).sum(0)
            for part in self._read:
                part[name] = total
        self._counted.extend(self._read)
        self._read = []

    def _explained(self, error: BaseException) -> BaseException:
        """Returns the error; or, for the broken connection to a worker that died, one that says so."""
        for worker in getattr(self._batches, "_workers", ()) if isinstance(error, ConnectionError | EOFError) else ():
            worker.join(timeout=1)
            if not worker.is_alive():
                died = f"DataLoader worker (pid {worker.pid}) exited unexpectedly: out of memory, or killed"
                return RuntimeError(died).with_traceback(error.__traceback__)
        return error

    def _upload(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with hooks.span(hooks.UPLOAD):
            return {key: device.upload(tensor, self._mesh) for key, tensor in batch.items()}


def parallel_loader(
    dataset: Dataset,
    batch_size: Any,
    mesh: Mesh,
    *,
    train: bool,
    seed: int = 0,
    start: int = 0,
    stop: int | None = None,
    parts: int = 1,
    count: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    shuffle: Literal["examples", "batches"] = "examples",
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> Loader:
    """Loads `dataset` in batches onto the mesh, each in `parts` of equal size, one after the other.

    Training: steps `start` to `stop`; each epoch is a new permutation, its remainder that does not fill a batch is left
    out. Evaluation: every example once, in order; the last batch is padded, and `batch["mask"]` [batch_size] float32 is
    1 for examples and 0 for padding.

    The generator that `dataset.example` gets depends on (seed, epoch, index) alone, so the numbers depend neither on
    `workers` nor on hosts or resumes. An exception anywhere in loading is raised by the next `next(loader)`.

    Args:
        batch_size: examples (of all hosts together) in a batch; or a plan, which has `shapes`, a length and
            `steps(seed, start, stop)`, an order of its own, and a mask in training too.
        start, stop: count batches, whatever their parts.
        count: returns numbers [n] of the n rows of a part, by name. Row by row they are added up over the parts of a
            batch, and stand in each of them: their sum is known before the first part is trained on, on every host.
        shuffle: what an epoch permutes. "batches" keeps neighbours together: billions of rows are then read in
            sequence, and the permutation itself stays small.
        collate: makes a dict of tensors [n, ...] from n examples or from the result of `batch`, in a worker process.
        workers: processes on this host; 0 loads in the upload thread, -1 takes one per core.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train, parts)
    span = (seed, start, stop) if train else (None, 0, per_epoch)
    if not hasattr(batch_size, "shapes"):
        batches = _batches(len(dataset), batch_size, *span, shuffle, getattr(dataset, "order", None))
    elif shuffle != "examples" or not hasattr(dataset, "batch"):
        raise ValueError("a plan has an order of its own, and needs a data set that has `batch(indices, lengths)`")
    else:
        batches = batch_size.steps(*span)
    keys = (
        (epoch, part[mesh.rows(len(part))], *size) for epoch, rows, *size in batches for part in np.split(rows, parts)
    )
    keys = dataset.ahead(keys) if hasattr(dataset, "ahead") else keys
    batches = data_loader(_Examples(dataset, seed, masked=not train, collate=collate), keys, workers)
    return Loader(batches, mesh, parts, count)


def first_and_last(
    dataset: Dataset,
    batch_size: Any,
    mesh: Mesh,
    *,
    seed: int = 0,
    parts: int = 1,
    collate: Callable[[Any], dict[str, Tensor]] = as_tensors,
    workers: int = 0,
) -> list[dict[str, Tensor]]:
    """Returns this host's rows of the first and of the last batch of an evaluation, in host memory, part by part.

    Call it before step 1, with the arguments of the evaluation's `parallel_loader`: what cannot be read or collated
    then costs a sentence, and no training.
    """
    per_epoch = steps_per_epoch(dataset, batch_size, mesh, train=False, parts=parts)
    keys = []
    for number in sorted({0, per_epoch - 1}):
        if hasattr(batch_size, "shapes"):
            batches = batch_size.steps(None, number, number + 1)
        else:
            batches = _batches(len(dataset), batch_size, None, number, number + 1, "examples")
        for epoch, rows, *size in batches:
            keys += [(epoch, part[mesh.rows(len(part))], *size) for part in np.split(rows, parts)]
    keys = dataset.ahead(keys) if hasattr(dataset, "ahead") else keys

    examples, found = _Examples(dataset, seed, masked=True, collate=collate), []
    for batch in data_loader(examples, keys, workers):
        if isinstance(batch, InputError):
            raise batch
        if not isinstance(batch, dict):  # in a worker's memory, which its next batch but two overwrites
            batch = {key: tensor.clone() for key, tensor in examples.received(*batch).items()}
        found.append(batch)
    return found


def data_loader(examples: "_Examples", keys: Iterable, workers: int, **options) -> DataLoader:
    """Returns a DataLoader of the batches of these keys, in host memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has not
    return DataLoader(
        examples,
        batch_size=None,  # a key makes a batch
        sampler=keys,
        num_workers=cores if workers < 0 else workers,
        multiprocessing_context=_worker_context(examples.dataset) if workers else None,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # else it draws from the global one
        **options,
    )


def _batches(size: int, batch_size: int, seed: int | None, start: int, stop: int, shuffle: str, own=None):
    """Yields each step's epoch and indices, in the data set's `own` order if any; without a seed in order, padded."""
    rows = np.arange(batch_size)
    if seed is None:
        for step in range(start, stop):
            indices = step * batch_size + rows
            yield 0, np.where(indices < size, indices, PADDING)
        return
    per_epoch, permuted_epoch = size // batch_size, -1
    for step in range(start, stop):
        epoch, batch = divmod(step, per_epoch)
        if epoch != permuted_epoch:
            generator, permuted_epoch = np.random.default_rng((seed, epoch)), epoch
            permuted = size if shuffle == "examples" else per_epoch
            order = own(seed, epoch, batch_size) if own else generator.permutation(permuted)
        yield epoch, order[batch * batch_size + rows] if shuffle == "examples" else order[batch] * batch_size + rows


class _Examples:
    """Makes collated batches, in a worker process, from their keys: an epoch, indices, and a plan's lengths."""

    def __init__(self, dataset: Dataset, seed: int, masked: bool, collate: Callable):
        self.dataset, self.seed, self.masked, self.collate, self.turn = dataset, seed, masked, collate, 0
        self.memories: dict[int, Tensor] = {}  # by worker: uint8 [PREFETCH + 1, bytes], shared

    def __getitem__(self, key: tuple) -> dict[str, Tensor] | tuple | InputError:
        try:
            return self._share(self._batch(*key))
        except InputError as error:  # DataLoader would wrap it into a traceback; the user needs only the sentence
            return InputError(str(error))
        except Exception as error:
            # A worker sends it by its class's name; one of a cloud's client may have none: a wait forever.
            known = getattr(sys.modules.get(type(error).__module__), type(error).__name__, None) is type(error)
            if not known or isinstance(error, (StopIteration, ExceptionGroup)):  # of which the words would be lost
                raise RuntimeError(f"the data set or collate raised {type(error).__name__}: {error}") from error
            raise

    def _share(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | tuple:
        """Copies a worker's batch, of tensors or lists of arrays, into its shared memory; returns where it lies there,
        and the memory if that is new. Sending a tensor costs 0.3 ms, fresh memory page faults. A worker has at most
        PREFETCH batches under way, and the upload thread lets go of one when it takes the next: turns never meet."""
        if (worker := torch.utils.data.get_worker_info()) is None:
            return {key: tensor.detach().contiguous() for key, tensor in batch.items()}  # as a worker's would be
        places, end = {}, 0
        for key, rows in batch.items():
            row = torch.as_tensor(rows[0])
            places[key] = slice(end, end + len(rows) * row.nbytes), row.dtype, (len(rows), *row.shape)
            end += -(-len(rows) * row.nbytes // 64) * 64  # each starts at a multiple of it
        fits = worker.id in self.memories and end <= self.memories[worker.id].shape[1]
        memory = None if fits else torch.empty(PREFETCH + 1, end + end // 4, dtype=torch.uint8).share_memory_()
        self.turn = (self.turn + 1) % (PREFETCH + 1)
        for key, tensor in self.received(worker.id, self.turn, places, memory).items():
            rows = batch[key]
            tensor.copy_(rows) if isinstance(rows, Tensor) else np.stack(rows, out=tensor.numpy(), casting="equiv")
        return worker.id, self.turn, places, memory

    def received(self, worker: int, turn: int, places: dict[str, tuple], memory: Tensor | None) -> dict[str, Tensor]:
        """Returns the tensors of a batch that a worker has sent: they lie in its memory, until its next turn."""
        if memory is not None:
            self.memories[worker] = memory
        row = self.memories[worker][turn]
        return {key: row[place].view(dtype).view(shape) for key, (place, dtype, shape) in places.items()}

    def _batch(self, epoch: int, indices: np.ndarray, *lengths: tuple[int, ...]) -> dict[str, Tensor]:
        rows = np.maximum(indices, 0)  # something must stand in the padding
        if lengths:
            batch = self.dataset.batch(indices, *lengths)
        elif hasattr(self.dataset, "batch"):
            batch = self.dataset.batch(rows)
        else:
            # All generators first: between images their code is not in the processor's cache, and takes 4 times as long
            made = {row: np.random.default_rng((self.seed, epoch, row)) for row in dict.fromkeys(rows.tolist())}
            made = {row: self.dataset.example(row, rng) for row, rng in made.items()}
            batch = [made[row] for row in rows.tolist()]
            if self.collate is as_tensors and not self.masked and torch.utils.data.get_worker_info():
                arrays = {key: [np.asarray(example[key]) for example in batch] for key in batch[0]}
                self._check_finite(arrays, rows)
                return arrays  # _share stacks them
        batch = self.collate(batch)
        for key, tensor in batch.items():
            if tensor.shape[:1] != (len(indices),):
                own = f"the {len(indices)} examples that this host loads, since batches are sharded by it"
                raise ValueError(f"batch[{key!r}] has shape {list(tensor.shape)}; its first dimension must be {own}")
        self._check_finite(batch, rows)
        mask = torch.from_numpy((indices != PADDING).astype(np.float32))
        if self.masked and "skipped" in batch:
            batch["skipped"] = batch["skipped"] * mask.to(batch["skipped"].dtype)
        return batch | {"mask": mask} if self.masked or lengths else batch

    def _check_finite(self, batch: dict[str, Any], indices: np.ndarray) -> None:
        """Raises InputError where a float of a batch is not finite: the loss would be called divergence. Here, in a
        worker, it costs no step anything."""
        for key, values in batch.items():
            if not isinstance(values, Tensor):  # an array of each example
                if values[0].dtype.kind != "f":
                    continue
                values = torch.from_numpy(np.stack(values))
            if not values.is_floating_point() or torch.isfinite(values).all():
                continue
            place = torch.isfinite(values).logical_not().nonzero()[0].tolist()
            where = f" at {place[1:]}" if place[1:] else ""
            found = f"{values[tuple(place)].item()} in its {key!r}{where}"
            name = f"example {indices[place[0]]} of the {type(self.dataset).__name__}"
            raise InputError(f"{name} has {found}; expected finite numbers: fix or remove that example")


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched for garbage again and again
    # Ctrl-C, and the SIGTERM of a VM that is shut down, reach every process, but the main one needs batches until it
    # has saved: a worker ends a minute later, or with the main one, since after a kill -9 its fork server waits for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))
    threading.Thread(target=lambda: multiprocessing.parent_process().join() or os._exit(1), daemon=True).start()


def _worker_context(dataset: Dataset) -> multiprocessing.context.BaseContext:
    """Returns a context that forks workers from a clean process: this one's XLA threads hold locks, and forks hang."""
    context = multiprocessing.get_context("forkserver")
    packages = {__name__.split(".")[0], type(dataset).__module__.split(".")[0]}
    # Each worker runs the imports of the main script; what the server has loaded costs it nothing.
    context.set_forkserver_preload([name for name in sys.modules if name.split(".")[0] in packages - {"__main__"}])
    return context
