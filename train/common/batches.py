"""Batches in host memory: which examples are in each, and the worker processes that make them.

    keys  ->  BatchMaker, in worker processes  ->  tensors by name

A key says which examples make a batch: (epoch, indices), or (epoch, indices, lengths) of a plan.
loading.py uploads the tensors to the devices.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from errors import InputError
from train.common.mesh import processes_of_machine

PADDING = -1  # the index of a padded example
PREFETCH = 2  # batches that a worker makes ahead
ALIGNMENT = 64  # bytes: each tensor starts at a multiple of it in shared memory


class Dataset(Protocol):
    """A size, and examples (numbers, arrays; floats: float32) that depend only on the index and the
    generator.

    These methods are optional:

        batch(indices) -> dict of arrays [len(indices), ...]
            Instead of `example`, where nothing is augmented: rows of memory-mapped arrays are read
            hundreds of times faster together than one by one. Padding has index 0, and is masked.
        batch(indices, lengths) -> the same
            Needed for a plan: the arrays are cut or padded to `lengths`. Padding has the index
            PADDING.
        order(seed, epoch, batch_size) -> indices of the epoch's full batches
            Instead of a permutation, where the data set must be read in sequence, as from shards.
        ahead(keys) -> the same keys
            Yields them while it fetches what the next ones need.
    """

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]: ...


class BatchPlan(Protocol):
    """Batches of several shapes, for examples of unequal length: a Plan of data/batching.py.

    `steps` yields the keys (epoch, indices, lengths) of the batches `start` to `stop`; with the
    seed None, those of the evaluation in order.
    """

    shapes: Sequence[tuple[int, ...]]  # (batch, length_1, …, length_k) of all batches there are

    def __len__(self) -> int: ...  # batches of an epoch

    def steps(self, seed: int | None, start: int, stop: int) -> Iterator[tuple]: ...


# The examples of a batch: one dict for each, or the arrays that `Dataset.batch` returns.
Examples = list[dict[str, Any]] | dict[str, np.ndarray]


def as_tensors(batch: Examples) -> dict[str, Tensor]:
    """Makes tensors [batch, ...] of examples."""
    if isinstance(batch, list):
        batch = {key: np.stack([example[key] for example in batch]) for key in batch[0]}
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in batch.items()}


# ---- which examples ------------------------------------------------------------------------------


def training_keys(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    start: int,
    stop: int,
    shuffle: Literal["examples", "batches"] = "examples",
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the epoch and the indices [batch_size] of each batch from `start` to `stop`.

    Each epoch is a permutation by (seed, epoch), or the data set's own `order`; what does not fill
    a batch at its end is left out. `shuffle`: "batches" permutes whole batches, whose examples stay
    neighbours. `loading.parallel_loader` refuses it for a data set that has its own `order`.
    """
    per_epoch = len(dataset) // batch_size
    own_order = getattr(dataset, "order", None)
    offsets = np.arange(batch_size)
    permuted_epoch = -1
    for step in range(start, stop):
        epoch, batch = divmod(step, per_epoch)
        if epoch != permuted_epoch:
            permuted_epoch = epoch
            if own_order is not None:  # of examples: `shuffle` is "examples" then
                order = own_order(seed, epoch, batch_size)
            elif shuffle == "examples":
                order = np.random.default_rng((seed, epoch)).permutation(len(dataset))
            else:  # of batches
                order = np.random.default_rng((seed, epoch)).permutation(per_epoch)

        if shuffle == "examples":
            yield epoch, order[batch * batch_size + offsets]
        else:
            yield epoch, order[batch] * batch_size + offsets


def evaluation_keys(
    size: int, batch_size: int, start: int, stop: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields epoch 0 and the indices [batch_size] of each batch from `start` to `stop`, in order;
    PADDING after the last of `size` examples."""
    offsets = np.arange(batch_size)
    for step in range(start, stop):
        indices = step * batch_size + offsets
        yield 0, np.where(indices < size, indices, PADDING)


# ---- what workers make of them -------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """Where a tensor of a batch lies in a slot of its worker's memory."""

    start: int  # bytes
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SharedBatch:
    """Where a worker's batch lies in the memory that it shares with the main process."""

    worker: int
    slot: int  # of PREFETCH + 1
    fields: dict[str, Field]
    memory: Tensor | None  # uint8 [slots, bytes]; sent once, when it is new


@dataclass(frozen=True)
class Refused:
    """The sentence of an InputError in a worker. DataLoader would wrap the error itself into a
    traceback."""

    sentence: str


class BatchMaker:
    """Makes collated batches from keys, in worker processes. DataLoader takes it for a data set, of
    which a key is an index.

    Each worker has a copy of it. The one in the main process opens what the others have made, or
    what it has made itself where there are no workers: `opened`.

    Args:
        masked: every batch gets a "mask" [batch] float32, 1 for examples and 0 for padding.
        collate: makes a dict of tensors [n, ...] from n examples or from the result of the data
            set's `batch`.
    """

    def __init__(self, dataset: Dataset, seed: int, masked: bool, collate: Callable):
        self.dataset = dataset
        self.seed = seed
        self.masked = masked
        self.collate = collate
        self._slot = 0  # of this worker, the last that it has filled
        self._memories: dict[int, Tensor] = {}  # by worker: uint8 [PREFETCH + 1, bytes], shared

    def __getitem__(self, key: tuple) -> dict[str, Tensor] | SharedBatch | Refused:
        try:
            return self._share(self._batch(*key))
        except InputError as error:
            return Refused(str(error))
        except Exception as error:
            # A worker sends an error as the name of its class and a text. The main process would
            # wait for ever for a class that is not found by its name, such as those of some cloud
            # clients.
            module = sys.modules.get(type(error).__module__)
            is_found = getattr(module, type(error).__name__, None) is type(error)
            # DataLoader makes the error again from the two. These two classes would lose the text.
            loses_text = isinstance(error, (StopIteration, ExceptionGroup))
            if is_found and not loses_text:
                raise
            raise RuntimeError(
                f"the data set or collate raised {type(error).__name__}: {error}"
            ) from error

    def opened(self, made: dict[str, Tensor] | SharedBatch | Refused) -> dict[str, Tensor]:
        """Returns the tensors of what `__getitem__` has made.

        Those of a worker are views of its shared memory. They stay as they are while it makes its
        next PREFETCH batches; the one after these overwrites them. Raises InputError where the
        batch was refused.
        """
        if isinstance(made, Refused):
            raise InputError(made.sentence)
        if isinstance(made, SharedBatch):
            if made.memory is not None:
                self._memories[made.worker] = made.memory
            return self._views(made)
        return made

    def _share(self, batch: dict[str, Any]) -> dict[str, Tensor] | SharedBatch:
        """Copies a worker's batch, of tensors or of lists of arrays, into its shared memory.

        Sending a tensor would cost 0.3 ms. The worker uses its slots again and again, since new
        shared memory would cost page faults in each batch.

        PREFETCH + 1 slots are enough: at most PREFETCH batches of a worker are under way, and the
        upload thread holds one until it takes the next. So no slot is overwritten while it is read.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is None:  # the same sort of tensors as from a worker
            return {key: tensor.detach().contiguous() for key, tensor in batch.items()}

        fields = {}
        end = 0
        for key, values in batch.items():
            first = torch.as_tensor(values[0])
            size = len(values) * first.nbytes
            fields[key] = Field(end, end + size, first.dtype, (len(values), *first.shape))
            end += math.ceil(size / ALIGNMENT) * ALIGNMENT

        new_memory = None
        if worker.id not in self._memories or end > self._memories[worker.id].shape[1]:
            room = end + end // 4  # more than this batch needs: the next may be larger
            new_memory = torch.empty(PREFETCH + 1, room, dtype=torch.uint8).share_memory_()
            self._memories[worker.id] = new_memory
        self._slot = (self._slot + 1) % (PREFETCH + 1)

        shared = SharedBatch(worker.id, self._slot, fields, new_memory)
        for key, tensor in self._views(shared).items():
            values = batch[key]
            if isinstance(values, Tensor):
                tensor.copy_(values)
            else:
                # "equiv": an example of another type than the first is an error, not converted.
                np.stack(values, out=tensor.numpy(), casting="equiv")
        return shared

    def _views(self, shared: SharedBatch) -> dict[str, Tensor]:
        """Returns the tensors of a batch, as views of its worker's memory."""
        slot = self._memories[shared.worker][shared.slot]

        tensors = {}
        for key, field in shared.fields.items():
            tensors[key] = slot[field.start : field.end].view(field.dtype).view(field.shape)
        return tensors

    def _batch(
        self, epoch: int, indices: np.ndarray, lengths: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Returns the collated batch of a key, by name; only the keys of a plan have lengths.

        In a worker the values of plain training examples are lists of arrays instead of tensors:
        `_share` stacks them in its memory, which saves a copy.
        """
        readable = np.maximum(indices, 0)  # padding has the example 0, and is masked
        if lengths is not None:
            examples = self.dataset.batch(indices, lengths)
        elif hasattr(self.dataset, "batch"):
            examples = self.dataset.batch(readable)
        else:
            examples = self._examples(epoch, readable)
            in_worker = torch.utils.data.get_worker_info() is not None
            if in_worker and self.collate is as_tensors and not self.masked:
                arrays = {}
                for key in examples[0]:
                    arrays[key] = [np.asarray(example[key]) for example in examples]
                self._check_finite(arrays, readable)
                return arrays

        batch = self.collate(examples)
        for key, tensor in batch.items():
            if tensor.shape[:1] != (len(indices),):
                raise ValueError(
                    f"batch[{key!r}] has shape {list(tensor.shape)}; its first dimension must be "
                    f"the {len(indices)} examples that this host loads, since batches are sharded "
                    "by it"
                )
        self._check_finite(batch, readable)

        mask = torch.from_numpy((indices != PADDING).astype(np.float32))
        # Padding has example 0, whose skipped file must be counted once.
        if self.masked and "skipped" in batch:
            batch["skipped"] = batch["skipped"] * mask.to(batch["skipped"].dtype)
        if self.masked or lengths is not None:
            batch = batch | {"mask": mask}
        return batch

    def _examples(self, epoch: int, indices: np.ndarray) -> list[dict[str, Any]]:
        """Returns the examples of a batch. Each draws from a generator of its own, seeded by
        (seed, epoch, index)."""
        # Each example is made once: padding repeats example 0.
        # All generators first: between images their code is not in the processor's cache, and takes
        # 4 times as long.
        generators = {}
        for index in indices.tolist():
            if index not in generators:
                generators[index] = np.random.default_rng((self.seed, epoch, index))
        examples = {}
        for index, generator in generators.items():
            examples[index] = self.dataset.example(index, generator)
        return [examples[index] for index in indices.tolist()]

    def _check_finite(self, batch: dict[str, Any], indices: np.ndarray) -> None:
        """Raises InputError where a float of a batch is not finite.

        Bad input would otherwise be reported as a training that diverged. In a worker the check
        costs no step anything.
        """
        for key, values in batch.items():
            if not isinstance(values, Tensor):  # a list: an array of each example
                if values[0].dtype.kind != "f":
                    continue
                values = torch.from_numpy(np.stack(values))
            if not values.is_floating_point() or torch.isfinite(values).all():
                continue

            example, *position = torch.isfinite(values).logical_not().nonzero()[0].tolist()
            where = f" at {position}" if position else ""
            raise InputError(
                f"example {indices[example]} of the {type(self.dataset).__name__} has "
                f"{values[(example, *position)].item()} in its {key!r}{where}; "
                "expected finite numbers: fix or remove that example"
            )


def data_loader(
    maker: BatchMaker, keys: Iterable[tuple], workers: int, **options: Any
) -> DataLoader:
    """Returns a DataLoader of what `maker` makes of these keys, in order.

    Args:
        workers: processes; 0 makes the batches in this one, -1 takes one per core, or this
            process's share of the cores where torchrun has started several.
    """
    if workers < 0:
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = len(os.sched_getaffinity(0))
        workers = max(cores // processes_of_machine(), 1)
    return DataLoader(
        maker,
        batch_size=None,  # a key makes a batch
        sampler=keys,
        num_workers=workers,
        multiprocessing_context=worker_context(maker.dataset) if workers else None,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=start_worker,
        generator=torch.Generator(),  # else it draws from the global one
        **options,
    )


def start_worker(_: int) -> None:
    """Prepares a worker process: one thread, and an end that leaves the main process time to
    save."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched for garbage again and again
    # Ctrl-C, and the SIGTERM of a VM that is shut down, reach every process. The main process still
    # needs batches until it has saved, so a worker ends a minute after the SIGTERM.
    # A worker also ends with the main process: after a kill -9 nothing else would end it, and the
    # fork server waits for its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))
    threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def worker_context(dataset: Dataset) -> multiprocessing.context.BaseContext:
    """Returns a context that forks workers from a clean process. A fork of this process would hang:
    its XLA threads hold locks."""
    context = multiprocessing.get_context("forkserver")
    packages = {__name__.split(".")[0], type(dataset).__module__.split(".")[0]} - {"__main__"}
    # Each worker runs the imports of the main script; what the server has loaded costs it nothing.
    context.set_forkserver_preload([name for name in sys.modules if name.split(".")[0] in packages])
    return context
