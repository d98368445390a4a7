"""Parallel loading: worker processes make examples, a background thread uploads batches, sharded over the mesh.

    worker processes (decode, augment, collate)  ->  upload thread  ->  queue of 2 device batches  ->  the training loop

torch_xla's own MpDeviceLoader is not used: it ends an epoch early, without a word, when the loader raises, and its
`input_sharding` silently replicates every tensor whose rank is not the one of the spec (torch_xla 2.9.0).
"""

import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch.utils.data import DataLoader

from errors import InputError
from train.common.device import Mesh

Example = dict[str, Any]
PREFETCH = 2  # batches that a worker makes ahead
DEVICE_BATCHES = 2  # uploaded ahead of the loop: one in use, one ready; more would only hold device memory


class Dataset(Protocol):
    """What data/ offers: a size, and examples that depend only on the index and the generator.

    A data set without augmentation may have `batch(indices) -> dict of arrays [len(indices), ...]` instead of
    `example`: rows of memory-mapped arrays are read hundreds of times faster together than one by one. Loaded by a
    plan, it has `batch(indices, shape)`; see `Plan`.
    """

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator) -> Example: ...


class Plan(Protocol):
    """Cuts an epoch into batches of a few fixed shapes; data/batching.py has some.

    A batch is (indices, lengths): int64 [batch] or [batch, most examples in a row], -1 where there is no example, and
    the rest of a shape (batch, *lengths). The data set's `batch(indices, lengths)` gets the rows of one host, -1
    included, and returns a dict of arrays [rows, ...].

    Attributes:
        shapes: (batch, *lengths) of all batches there are; batches are those of all hosts together.
    """

    shapes: Sequence[tuple[int, ...]]

    def __len__(self) -> int:
        """Batches an epoch, in every epoch."""
        ...

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, tuple[int, ...]]]:
        """The batches in an order that depends on `rng` alone; for None, in the order of an evaluation."""
        ...


def stack(examples: list[Example]) -> dict[str, Tensor]:
    """The default collate: each entry of equal shape becomes a tensor [batch, ...]."""
    return {key: torch.from_numpy(np.stack([example[key] for example in examples])) for key in examples[0]}


def as_tensors(batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The default collate of data sets that have `batch`."""
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in batch.items()}


def steps_per_epoch(dataset: Dataset, batch_size: int | Plan, mesh: Mesh) -> int:
    """Full batches in an epoch of training; what is left over differs from epoch to epoch. Or a plan's batches.

    Raises:
        InputError: a batch does not divide by the devices; the data set is smaller than one, the plan has none.
    """
    _check_sizes(batch_size, mesh)
    if planned(batch_size):
        if len(batch_size) == 0:
            raise InputError("the plan has no batches; its data set must have examples that fit its shapes")
        return len(batch_size)
    if len(dataset) < batch_size:
        raise InputError(
            f"batch_size is {batch_size}, but the data set has {len(dataset)} examples; use a smaller batch"
        )
    return len(dataset) // batch_size


class Loader:
    """Iterator over device batches: dicts of tensors [batch, ...], sharded over the mesh by their first dimension.

    Use it as a context manager (or call `close`): it owns a thread and worker processes.

    Attributes:
        skipped: sum of the examples' "skipped" entries so far (files that a data set could not read and replaced); this
            entry stays on the host.
    """

    def __init__(self, batches: DataLoader, mesh: Mesh, local_batch: int | None):
        """`local_batch`: rows of each batch on this host; None: as many as its mask has, which `_Examples` made."""
        self.skipped = 0
        self._mesh = mesh
        self._local_batch = local_batch
        self._shardings: dict[int, xs.ShardingSpec] = {}
        self._queue: queue.Queue = queue.Queue(maxsize=DEVICE_BATCHES)
        self._closed = threading.Event()
        self._waited = 0.0
        self._since = time.perf_counter()
        # Made here, not in the thread: worker processes start now, and their death is noticed by the main thread's
        # signal.
        self._batches = iter(batches)
        self._thread = threading.Thread(target=self._upload_all, name="upload", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        started = time.perf_counter()
        item = self._queue.get()
        self._waited += time.perf_counter() - started
        if isinstance(item, BaseException):
            # Put back, so that every later call ends too instead of waiting for a thread that has gone.
            self._queue.put(item)
            if isinstance(item, StopIteration):
                raise StopIteration
            raise item
        return item

    def input_wait(self) -> float:
        """Share of the time since the last call (0 to 1) that the loop stood waiting for a batch."""
        now = time.perf_counter()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited, self._since = 0.0, now
        return min(share, 1.0)

    def close(self) -> None:
        """Stops the thread and the worker processes."""
        self._closed.set()
        self._thread.join()
        # What ends a DataLoader's workers is the end of its iterator.
        self._batches = None

    def _upload_all(self) -> None:
        try:
            for batch in self._batches:
                if isinstance(batch, InputError):
                    raise batch
                self.skipped += int(batch.pop("skipped", torch.zeros(())).sum())
                self._put(self._upload(batch))
                if self._closed.is_set():
                    return
            self._put(StopIteration())
        except BaseException as error:  # whatever it is, the training loop must see it
            # The error must not keep the DataLoader's iterator alive, and with it the worker processes.
            traceback.clear_frames(error.__traceback__)
            self._put(self._explained(error))

    def _explained(self, error: BaseException) -> BaseException:
        """A worker that dies with batches on their way shows as a broken connection only; says what happened."""
        if isinstance(error, ConnectionError | EOFError):
            for worker in getattr(self._batches, "_workers", ()):
                worker.join(timeout=1)
                if not worker.is_alive():
                    died = RuntimeError(
                        f"DataLoader worker (pid {worker.pid}) exited unexpectedly: out of memory, or killed"
                    )
                    died.__cause__ = error
                    return died
        return error

    def _put(self, item: Any) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _upload(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        on_device = {}
        rows = len(batch["mask"]) if self._local_batch is None else self._local_batch
        for key, tensor in batch.items():
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                raise ValueError(
                    f"batch[{key!r}] has shape {list(tensor.shape)}; its first dimension must be the "
                    f"{rows} examples that this host loads, since batches are sharded by it"
                )
            # A spec fits tensors of one rank only.
            if tensor.dim() not in self._shardings:
                spec = ("data",) + (None,) * (tensor.dim() - 1)
                self._shardings[tensor.dim()] = xs.ShardingSpec(
                    self._mesh.spmd, spec, minibatch=self._mesh.process_count > 1
                )
            on_device[key] = xm.send_cpu_data_to_device(tensor, self._mesh.device, self._shardings[tensor.dim()])[0]
        return on_device


def parallel_loader(
    dataset: Dataset,
    batch_size: int | Plan,
    mesh: Mesh,
    *,
    train: bool,
    seed: int = 0,
    start: int = 0,
    stop: int | None = None,
    shuffle: Literal["examples", "batches"] = "examples",
    collate: Callable[[Any], dict[str, Tensor]] | None = None,
    workers: int = 0,
) -> Loader:
    """Loads `dataset` in batches of `batch_size` examples (of all hosts together) onto the mesh.

    Training: steps `start` to `stop`, over as many epochs as it takes; each epoch is a new permutation, its remainder
    that does not fill a batch is left out. Evaluation: every example once, in order; the last batch is padded, and
    `batch["mask"]` [batch_size] float32 is 1 for examples and 0 for padding.

    With a plan in place of the batch size, an epoch is the plan's batches, in an order that depends on (seed, epoch)
    alone; an evaluation has every example that the plan holds. `dataset.batch(indices, lengths)` makes them. Training
    has `batch["mask"]` as well, since batches may be padded there, too; with several examples a row it is
    [batch, most]. Workers are sent indices, never the plan.

    The generator that `dataset.example` gets depends on (seed, epoch, index) alone, so the numbers do not depend on
    `workers`, on the number of hosts, or on where a run was resumed; starting at step n reads nothing of the steps
    before. Every host of a pod gets the same number of steps. An exception anywhere in loading is raised by the next
    `next(loader)`, a worker's with the worker's own traceback.

    Args:
        batch_size: examples (of all hosts together) in a batch; or a `Plan`.
        shuffle: what an epoch permutes. "batches" keeps neighbours together: billions of rows are then read in
            sequence, and the permutation itself stays small. A plan has an order of its own.
        collate: makes a dict of tensors [n, ...], in a worker process: from a list of n examples, or from what the data
            set's `batch` returns.
        workers: processes on this host; 0 loads in the upload thread, -1 takes one a core.
    Raises:
        InputError: a batch size that does not divide by the devices, an empty data set, one smaller than a batch.
    """
    _check_sizes(batch_size, mesh)
    if len(dataset) == 0:
        raise InputError("the data set is empty")
    if train and stop is None:
        raise ValueError("training needs `stop`, the number of steps")
    if planned(batch_size):
        if not batched(dataset):
            raise ValueError("a plan needs a data set that has `batch(indices, lengths)`")
        if shuffle != "examples":
            raise ValueError(f"shuffle is {shuffle!r}, but a plan has an order of its own")
        per_epoch, local_batch = steps_per_epoch(dataset, batch_size, mesh), None
        keys = _PlanKeys(batch_size, mesh, *((seed, start, stop) if train else (None, 0, per_epoch)))
    else:
        local_batch = batch_size // mesh.process_count
        host = mesh.rows(batch_size)
        if train:
            per_epoch = steps_per_epoch(dataset, batch_size, mesh)
            keys = _TrainingKeys(len(dataset), batch_size, per_epoch, seed, start, stop, host, shuffle)
        else:
            keys = _EvaluationKeys(len(dataset), batch_size, host)
    if workers < 0:
        workers = len(os.sched_getaffinity(0))
    options: dict[str, Any] = {}
    if workers > 0:
        options = {
            "multiprocessing_context": _worker_context(dataset),
            "prefetch_factor": PREFETCH,
            "worker_init_fn": _start_worker,
        }
    batches = DataLoader(
        _Examples(dataset, seed, masked=not train, collate=collate or (as_tensors if batched(dataset) else stack)),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=_identity,
        generator=torch.Generator(),  # it would draw a number from the global one otherwise
        **options,
    )
    return Loader(batches, mesh, local_batch)


PADDING = -1  # the index of a padded example


Keys = tuple[int, np.ndarray] | tuple[int, np.ndarray, tuple[int, ...]]  # epoch, indices; a plan's lengths


class _TrainingKeys:
    """This host's keys of each step; `host` are its rows of a batch."""

    def __init__(self, size, batch_size, per_epoch, seed, start, stop, host: np.ndarray, shuffle: str = "examples"):
        self.size, self.batch_size, self.per_epoch, self.seed = size, batch_size, per_epoch, seed
        self.start, self.stop, self.host, self.shuffle = start, stop, host, shuffle

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    def __iter__(self) -> Iterator[Keys]:
        permuted_epoch, order = -1, np.empty(0, np.int64)
        for step in range(self.start, self.stop):
            epoch, batch = divmod(step, self.per_epoch)
            if epoch != permuted_epoch:
                size = self.size if self.shuffle == "examples" else self.per_epoch
                permuted_epoch, order = epoch, np.random.default_rng((self.seed, epoch)).permutation(size)
            if self.shuffle == "examples":
                indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            else:
                indices = order[batch] * self.batch_size + np.arange(self.batch_size)
            yield epoch, indices[self.host]


class _EvaluationKeys:
    """This host's keys of each batch of one ordered pass, padded to whole batches."""

    def __init__(self, size: int, batch_size: int, host: np.ndarray):
        self.size, self.batch_size, self.host = size, batch_size, host

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[Keys]:
        for first in range(0, self.size, self.batch_size):
            indices = np.arange(first, first + self.batch_size)[self.host]
            yield 0, np.where(indices < self.size, indices, PADDING)


class _PlanKeys:
    """This host's keys of each step of a plan; without a seed, in order."""

    def __init__(self, plan: Plan, mesh: Mesh, seed: int | None, start: int, stop: int):
        self.plan, self.seed, self.start, self.stop = plan, seed, start, stop
        self.mesh = mesh

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    def __iter__(self) -> Iterator[Keys]:
        shapes = {tuple(shape) for shape in self.plan.shapes}
        of_epoch, batches = -1, ()
        for step in range(self.start, self.stop):
            epoch, position = divmod(step, len(self.plan))
            if epoch != of_epoch:
                batches = ()  # a large plan's permutation: not two at once
                of_epoch = epoch
                batches = self.plan.epoch(None if self.seed is None else np.random.default_rng((self.seed, epoch)))
                if len(batches) != len(self.plan):
                    raise ValueError(f"epoch {epoch} of the plan has {len(batches)} batches, not {len(self.plan)}")
            indices, lengths = batches[position]
            if (len(indices), *lengths) not in shapes:
                raise ValueError(f"the plan made a batch of shape {(len(indices), *lengths)}, not one of {shapes}")
            yield epoch, indices[self.mesh.rows(len(indices))], tuple(lengths)


def planned(batch_size: int | Plan) -> bool:
    """Whether it is a plan."""
    return hasattr(batch_size, "epoch")


def _check_sizes(batch_size: int | Plan, mesh: Mesh) -> None:
    """Refuses batches that cannot be shared out evenly among all devices."""
    sizes = {"batch_size": batch_size}
    if planned(batch_size):
        sizes = {f"the batch of shape {'x'.join(map(str, shape))}": shape[0] for shape in batch_size.shapes}
    for name, size in sizes.items():
        if size % mesh.num_devices:
            raise InputError(
                f"{name} is {size}, which does not divide by the {mesh.num_devices} devices; the nearest "
                f"that does is {max(1, round(size / mesh.num_devices)) * mesh.num_devices}"
            )


def batched(dataset: Dataset) -> bool:
    """Whether its examples are made together."""
    return hasattr(dataset, "batch")


class _Examples:
    """What a worker process holds: makes a collated batch from its keys."""

    def __init__(self, dataset: Dataset, seed: int, masked: bool, collate: Callable):
        self.dataset, self.seed, self.masked, self.collate = dataset, seed, masked, collate
        self.shared: dict[tuple, Tensor] = {}
        self.batches = 0

    def __getitems__(self, keys: Keys) -> dict[str, Tensor] | InputError:
        try:
            return self._share(self._batch(keys))
        except InputError as error:
            # DataLoader would wrap it into a worker's traceback; the user needs only the sentence.
            return error
        except StopIteration as error:
            raise RuntimeError(
                "the data set or collate raised StopIteration, which would end the epoch in silence"
            ) from error

    def _share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies a worker's batch into shared memory that it uses in turns.

        Fresh shared memory for each batch costs about as much as decoding it (page faults in two processes: 130 of 510
        us for an image of 224 x 224). A worker has at most PREFETCH batches under way, and the upload thread has let go
        of one when it takes the next, so PREFETCH + 1 turns never meet.
        """
        if torch.utils.data.get_worker_info() is None:
            return batch
        self.batches += 1
        turn = self.batches % (PREFETCH + 1)
        for key, tensor in batch.items():
            place = (turn, key, tensor.shape, tensor.dtype)
            if place not in self.shared:
                self.shared[place] = torch.empty_like(tensor).share_memory_()
            batch[key] = self.shared[place].copy_(tensor)
        return batch

    def _batch(self, keys: Keys) -> dict[str, Tensor]:
        epoch, indices, *shape = keys
        if shape:
            batch = self.collate(self.dataset.batch(indices, *shape))
            # The upload thread relies on its length.
            return batch | {"mask": torch.from_numpy((indices != PADDING).astype(np.float32))}
        if batched(self.dataset):
            batch = self.collate(self.dataset.batch(np.maximum(indices, 0)))
        else:
            batch = self.collate(self._examples(epoch, indices.tolist()))
        if self.masked:
            batch["mask"] = torch.from_numpy((indices != PADDING).astype(np.float32))
            if "skipped" in batch:
                batch["skipped"] = batch["skipped"] * batch["mask"].to(batch["skipped"].dtype)
        return batch

    def _examples(self, epoch: int, indices: list[int]) -> list[Example]:
        examples: list[Example] = []
        for index in indices:
            if index == PADDING and examples:
                examples.append(examples[0])
            else:  # a host whose whole share is padding still needs an example of the right shapes
                index = max(index, 0)
                examples.append(self.dataset.example(index, np.random.default_rng((self.seed, epoch, index))))
        return examples


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched for garbage again and again
    # Ctrl-C, and the SIGTERM of a VM that is shut down, reach every process. The main one decides what follows, and it
    # needs batches until it has saved; a worker that outlives it by a minute ends by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: threading.Timer(60, os._exit, (1,)).start())


def _worker_context(dataset: Dataset) -> multiprocessing.context.BaseContext:
    """Workers are forked from a clean server process that has imported what they need, never from this one: its XLA
    client has threads, and a fork that copies a lock held by one of them hangs."""
    context = multiprocessing.get_context("forkserver")
    packages = {__name__.split(".")[0], type(dataset).__module__.split(".")[0]}
    # Each worker runs the imports of the main script; what the server has loaded costs it nothing.
    loaded = [name for name in sys.modules if name.split(".")[0] in packages - {"__main__"}]
    context.set_forkserver_preload(loaded)
    return context
