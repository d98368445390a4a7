"""Batches of examples of unequal length, in a few fixed shapes: on XLA each shape is one compiled program.

    plan = Buckets(lengths, [(512, 32), (256, 64)])     # each example in the smallest shape that holds it
    plan = packing.pack(lengths, (256, 64))             # or several examples in one row

A shape is (batch, length_1, …, length_k): examples of all hosts together, and the places for tokens on each of the k
sides of an example (a sentence has one, a pair of sentences two). A plan goes to `parallel_loader` in place of a batch
size; see `Plan`. The index -1 means that there is no example: in rows of the last batch of a shape, or after the last
example of a packed row.
"""

import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from errors import InputError

PADDING = -1  # the index of a place without an example

Shape = tuple[int, ...]


class Plan:
    """A way to cut each epoch into `len(plan)` batches of a few fixed shapes.

    Attributes:
        shapes: (batch, length_1, …, length_k) of all batches there are.
    """

    shapes: list[Shape]

    def __len__(self) -> int:
        raise NotImplementedError

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns the batches in an order that depends on `rng` alone, or for None in that of an evaluation."""
        raise NotImplementedError

    def steps(self, seed: int | None, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, Shape]]:
        """Yields (epoch, indices, lengths) of each step; epochs are permuted by (seed, epoch), or not without a seed.

        Indices are int64 [batch] or [batch, most examples in a row], -1 where there is no example.
        """
        shapes = {tuple(shape) for shape in self.shapes}
        of_epoch, batches = -1, ()
        for step in range(start, stop):
            epoch, position = divmod(step, len(self))
            if epoch != of_epoch:
                batches = ()  # the permutation of a large plan: not two at once
                of_epoch, batches = epoch, self.epoch(None if seed is None else np.random.default_rng((seed, epoch)))
                if len(batches) != len(self):
                    raise ValueError(f"epoch {epoch} of the plan has {len(batches)} batches, not {len(self)}")
            indices, lengths = batches[position]
            if (len(indices), *lengths) not in shapes:
                raise ValueError(f"the plan made a batch of shape {(len(indices), *lengths)}, not one of {shapes}")
            yield epoch, indices, tuple(lengths)


class Buckets(Plan):
    """Puts each example into the shape with the shortest rows (sum of the lengths; ties by order) that holds it.

    Memory is 4 bytes an example, and as much again for an epoch in use.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        shapes: (batch, length_1, …, length_k) each.
    Attributes:
        shapes: as given.
        dropped: examples that fit no shape, and are in no batch.
        padding: share of the token places of an epoch, 0 to 1, that hold no token.
    Raises:
        InputError: no shapes, or one that is not positive or not of k lengths; no examples, one without tokens, none
            that fits.
    """

    def __init__(self, lengths: np.ndarray, shapes: Sequence[Shape]):
        self._lengths = lengths = checked_lengths(lengths)
        self.shapes = checked_shapes(shapes, lengths.shape[1])
        bucket = np.full(len(lengths), -1, np.int16)
        # The longest rows first, so that the shortest that holds an example is the last to claim it.
        for number in sorted(range(len(self.shapes)), key=lambda i: (sum(self.shapes[i][1:]), i), reverse=True):
            bucket[fit_mask(lengths, self.shapes[number][1:])] = number
        self._members = [
            np.flatnonzero(bucket == number).astype(index_type(lengths)) for number in range(len(self.shapes))
        ]
        kept = sum(len(members) for members in self._members)
        if not kept:
            raise nothing_fits(lengths, self.shapes)
        # The batches of a bucket, the last of which may not be full; and where they end among those of all buckets.
        self._batches = [
            -(-len(members) // shape[0]) for members, shape in zip(self._members, self.shapes, strict=True)
        ]
        self._ends = np.cumsum(self._batches)
        self.dropped = len(lengths) - kept
        places = sum(
            batches * shape[0] * sum(shape[1:]) for batches, shape in zip(self._batches, self.shapes, strict=True)
        )
        self.padding = 1 - count_tokens(lengths, bucket >= 0) / places

    def __len__(self) -> int:
        return int(self._ends[-1])

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch], lengths) of each batch: examples permuted within their bucket, then all batches.

        Without `rng` they come bucket by bucket, and within a bucket by length: translation runs until the last
        sentence of a batch is finished, so it wants sentences of like length. Batches are made when asked for.
        """
        order = np.arange(len(self))
        if rng is None:
            members = [indices[self._lengths[indices].sum(1).argsort(kind="stable")] for indices in self._members]
        else:
            members, order = [rng.permutation(indices) for indices in self._members], rng.permutation(order)

        def batch(number: int) -> tuple[np.ndarray, Shape]:
            bucket = int(np.searchsorted(self._ends, number, side="right"))
            rows, *longest = self.shapes[bucket]
            first = (number - int(self._ends[bucket]) + self._batches[bucket]) * rows
            part = members[bucket][first : first + rows]
            indices = np.full(rows, PADDING, np.int64)
            indices[: len(part)] = part
            return indices, tuple(longest)

        return Epoch(order, batch)


class Shuffled(Plan):
    """Draws batches at random, each in the shortest length that holds its longest example.

    An update of like lengths (`Buckets`, or `grouped`) has less padding, but is a worse sample: docs/results.md.

    Args:
        lengths: tokens of each example, integers [n], at most the last of `sizes`.
        batch: examples in a batch.
        sizes: the lengths of batches, rising.
        grouped: sort each GROUP batches of an epoch by length (`group_by_length` of transformers 4's Trainer).
    Attributes:
        shapes: (batch, length) for each of `sizes`.
        padding: share of the token places of one epoch, 0 to 1, that hold no token.
    """

    GROUP = 50  # batches, as in transformers

    def __init__(self, lengths: np.ndarray, batch: int, sizes: Sequence[int], grouped: bool = False):
        self._lengths, self._batch, self._grouped = checked_lengths(lengths)[:, 0], batch, grouped
        self.shapes = checked_shapes([(batch, size) for size in sizes], 1)
        self._sizes = np.array(sizes)
        if self._lengths.max() > self._sizes[-1]:
            raise InputError(f"an example has {self._lengths.max()} tokens; the longest batches have {self._sizes[-1]}")
        places = sum(batch * longest for _, (longest,) in self.epoch(np.random.default_rng(0)))
        self.padding = 1 - int(self._lengths.sum(dtype=np.int64)) / places

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._batch)

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch], (length,)) of each batch; -1 after the last example."""
        order = np.arange(len(self._lengths)) if rng is None else rng.permutation(len(self._lengths))
        if self._grouped:
            size = self.GROUP * self._batch
            groups = [order[first : first + size] for first in range(0, len(order), size)]
            order = np.concatenate([group[self._lengths[group].argsort(kind="stable")] for group in groups])
        numbers = np.arange(len(self))
        if self._grouped and rng is not None:
            numbers = rng.permutation(numbers)

        def batch(number: int) -> tuple[np.ndarray, Shape]:
            part = order[number * self._batch : (number + 1) * self._batch]
            indices = np.full(self._batch, PADDING, np.int64)
            indices[: len(part)] = part
            return indices, (int(self._sizes[np.searchsorted(self._sizes, self._lengths[part].max())]),)

        return Epoch(numbers, batch)


class Epoch(Sequence):
    """Batches that are made when they are asked for; `batch` makes one of the numbers in `order`."""

    def __init__(self, order: np.ndarray, batch: Callable[[int], tuple[np.ndarray, Shape]]):
        self._order, self._batch = order, batch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> tuple[np.ndarray, Shape]:
        return self._batch(int(self._order[position]))


def checked_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns lengths as [n, k]; raises InputError where there are none, or one is below 1."""
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        raise InputError("there are no examples to make batches of")
    if lengths.ndim not in (1, 2) or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths are {lengths.dtype} {list(lengths.shape)}; expected integers [n] or [n, k]")
    if lengths.dtype.kind == "u":
        lengths = lengths.astype(np.int64)  # they are subtracted
    lengths = lengths.reshape(len(lengths), -1)
    if lengths.min() < 1:
        example, side = np.unravel_index(lengths.argmin(), lengths.shape)
        raise InputError(f"example {example} has length {lengths[example, side]}; expected 1 or more tokens")
    return lengths


def checked_shapes(shapes: Sequence[Shape], sides: int) -> list[Shape]:
    """Returns shapes as tuples; raises InputError where one is not (batch, a length for each side)."""
    shapes = [tuple(map(operator.index, shape)) for shape in shapes]
    if not shapes:
        raise InputError(f"no shapes are given; expected one or more, such as {_written((256, *(64,) * sides))}")
    for shape in shapes:
        if len(shape) != 1 + sides:
            form = "x".join(["batch", *(f"length_{side + 1}" for side in range(sides))])
            raise InputError(f"shape {_written(shape)} has {len(shape)} numbers; expected {form}")
        if min(shape) < 1:
            raise InputError(f"shape {_written(shape)} has the number {min(shape)}; expected 1 or more")
    return shapes


def nothing_fits(lengths: np.ndarray, shapes: list[Shape]) -> InputError:
    """Returns the error for shapes that are too short for every example."""
    shortest = _written(lengths[lengths.max(axis=1).argmin()])
    return InputError(
        f"none of the {len(lengths)} examples fits into {', '.join(map(_written, shapes))}; use longer shapes (an "
        f"example with the shortest longest side has length {shortest})"
    )


def _written(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def fit_mask(lengths: np.ndarray, longest: Sequence[int]) -> np.ndarray:
    """Returns, as bool [n], whether an example is on every side at most as long as `longest`."""
    fits = lengths[:, 0] <= longest[0]
    for side in range(1, len(longest)):
        fits &= lengths[:, side] <= longest[side]
    return fits


def count_tokens(lengths: np.ndarray, which: np.ndarray) -> int:
    """Counts the tokens of the examples that `which`, bool [n], is true for."""
    return sum(int(lengths[:, side].sum(dtype=np.int64, where=which)) for side in range(lengths.shape[1]))


def index_type(lengths: np.ndarray) -> type:
    """Returns the smallest type that numbers so many examples."""
    return np.int32 if len(lengths) < 2**31 else np.int64
