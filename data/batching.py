"""Batches of examples of unequal length, in a few fixed shapes: on XLA each shape is one program.

    plan = Buckets(lengths, [(512, 32), (256, 64)])   # each example in the smallest shape for it
    plan = packing.pack(lengths, (256, 64))           # or several examples in one row

A shape is (batch, length_1, …, length_k): the examples of all hosts together, and the positions for
tokens on each of the k sides of an example (a sentence has one, a pair of sentences two). A plan
goes to `parallel_loader` in place of a batch size; see `Plan`. The index -1 means that there is no
example: in rows of the last batch of a shape, or after the last example of a packed row.
"""

import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from errors import InputError

PADDING = -1  # stands where there is no example

Shape = tuple[int, ...]


class Plan:
    """How each epoch is cut into `len(plan)` batches of a few fixed shapes.

    Attributes:
        shapes: (batch, length_1, …, length_k) of all batches there are.
    """

    shapes: list[Shape]

    def __len__(self) -> int:
        raise NotImplementedError

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns the batches in an order that depends on `rng` alone; None: an evaluation's."""
        raise NotImplementedError

    def steps(
        self, seed: int | None, start: int, stop: int
    ) -> Iterator[tuple[int, np.ndarray, Shape]]:
        """Yields (epoch, indices, lengths) of each step from `start` to `stop`.

        Epochs are permuted by (seed, epoch), or not at all without a seed. Indices are int64
        [batch] or [batch, most examples in a row], -1 where there is no example.

        Raises ValueError where a plan breaks its own contract: the batches of an epoch are not as
        many as `len(plan)` says, or one has another shape.
        """
        shapes = {tuple(shape) for shape in self.shapes}
        current_epoch = -1
        batches = ()
        for step in range(start, stop):
            epoch, position = divmod(step, len(self))
            if epoch != current_epoch:
                batches = ()  # freed first: the permutation of a large plan is not held twice
                batches = self._permuted(seed, epoch)
                current_epoch = epoch

            indices, lengths = batches[position]
            shape = (len(indices), *lengths)
            if shape not in shapes:
                raise ValueError(f"the plan made a batch of shape {shape}, not one of {shapes}")
            yield epoch, indices, tuple(lengths)

    def _permuted(self, seed: int | None, epoch: int) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns the batches of an epoch, whose order depends on (seed, epoch) alone."""
        rng = None if seed is None else np.random.default_rng((seed, epoch))
        batches = self.epoch(rng)
        if len(batches) != len(self):
            raise ValueError(
                f"epoch {epoch} of the plan has {len(batches)} batches, not {len(self)}"
            )
        return batches


class Buckets(Plan):
    """Puts each example into the shape with the shortest rows that holds it.

    The length of a row is the sum of its sides' lengths; of equal ones the first shape counts.
    Memory is 4 bytes per example, and as much again for an epoch in use.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        shapes: (batch, length_1, …, length_k) each.
    Attributes:
        shapes: as given.
        dropped: how many examples fit no shape, and are in no batch.
        padding: share of an epoch's token positions, 0 to 1, that hold no token.
    Raises:
        InputError: no shapes, or one that is not positive or not of k lengths; no examples, one
            without tokens, none that fits.
    """

    def __init__(self, lengths: np.ndarray, shapes: Sequence[Shape]):
        self._lengths = checked_lengths(lengths)
        self.shapes = checked_shapes(shapes, sides=self._lengths.shape[1])
        bucket_of_example = self._assign()
        self._members = []  # indices of each bucket's examples
        self._batches = []  # how many batches each bucket has; the last one may not be full
        positions = 0  # for tokens, in all batches of an epoch
        for bucket, (rows, *longest) in enumerate(self.shapes):
            members = np.flatnonzero(bucket_of_example == bucket)
            batches = -(-len(members) // rows)
            self._members.append(members.astype(index_type(self._lengths)))
            self._batches.append(batches)
            positions += batches * rows * sum(longest)

        kept = sum(len(members) for members in self._members)
        if not kept:
            raise nothing_fits(self._lengths, self.shapes)
        self._ends = np.cumsum(self._batches)  # of each bucket, in the numbers of all batches
        self.dropped = len(self._lengths) - kept
        tokens = count_tokens(self._lengths, bucket_of_example >= 0)
        self.padding = 1 - tokens / positions

    def _assign(self) -> np.ndarray:
        """Returns int16 [n], the number of each example's shape; -1 where none holds it."""

        def by_row_length(bucket: int) -> tuple[int, int]:
            # The index breaks ties: in reverse order, the first of equal shapes claims last.
            _, *longest = self.shapes[bucket]
            return sum(longest), bucket

        bucket_of_example = np.full(len(self._lengths), -1, np.int16)
        # The longest rows first: the last shape to claim an example is the shortest that holds it.
        for bucket in sorted(range(len(self.shapes)), key=by_row_length, reverse=True):
            _, *longest = self.shapes[bucket]
            fits = fit_mask(self._lengths, longest)
            bucket_of_example[fits] = bucket
        return bucket_of_example

    def __len__(self) -> int:
        return int(self._ends[-1])

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch], lengths) of each batch, made when it is asked for.

        With `rng`, examples are permuted within their bucket, then all batches. Without, they come
        bucket by bucket, and within a bucket by length: translation runs until the last sentence of
        a batch is finished, so it wants sentences of like length.
        """
        if rng is None:
            members = [self._by_length(indices) for indices in self._members]
            order = np.arange(len(self))
        else:
            members = [rng.permutation(indices) for indices in self._members]
            order = rng.permutation(np.arange(len(self)))

        def make_batch(number: int) -> tuple[np.ndarray, Shape]:
            bucket = int(np.searchsorted(self._ends, number, side="right"))
            rows, *longest = self.shapes[bucket]
            first_batch = int(self._ends[bucket]) - self._batches[bucket]
            first = (number - first_batch) * rows
            chosen = members[bucket][first : first + rows]
            return _filled_up(chosen, rows), tuple(longest)

        return Epoch(order, make_batch)

    def _by_length(self, indices: np.ndarray) -> np.ndarray:
        """Returns indices sorted by the tokens of their examples, all sides together."""
        tokens = self._lengths[indices].sum(1)
        return indices[tokens.argsort(kind="stable")]


class Shuffled(Plan):
    """Draws batches at random, each in the shortest length that holds its longest example.

    An update of like lengths (`Buckets`, or `grouped`) has less padding, but is a worse sample:
    docs/results.md.

    Args:
        lengths: tokens of each example, integers [n], at most the last of `sizes`.
        batch: examples per batch.
        sizes: the lengths of batches, rising.
        grouped: sort each GROUP batches of an epoch by length (`group_by_length` of transformers
            4's Trainer).
    Attributes:
        shapes: (batch, length) for each of `sizes`.
        padding: share of one epoch's token positions, 0 to 1, that hold no token.
    """

    GROUP = 50  # batches, as in transformers

    def __init__(
        self, lengths: np.ndarray, batch: int, sizes: Sequence[int], grouped: bool = False
    ):
        self._lengths = checked_lengths(lengths)[:, 0]
        self._batch = batch
        self._grouped = grouped
        self.shapes = checked_shapes([(batch, size) for size in sizes], sides=1)
        self._sizes = np.array(sizes)
        if self._lengths.max() > self._sizes[-1]:
            raise InputError(
                f"an example has {self._lengths.max()} tokens; "
                f"the longest batches have {self._sizes[-1]}"
            )

        positions = 0
        for _, (longest,) in self.epoch(np.random.default_rng(0)):
            positions += batch * longest
        tokens = int(self._lengths.sum(dtype=np.int64))
        self.padding = 1 - tokens / positions

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._batch)

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch], (length,)) of each batch; -1 after the last example."""
        order = np.arange(len(self._lengths))
        if rng is not None:
            order = rng.permutation(len(self._lengths))
        if self._grouped:
            order = self._sort_groups(order)
        numbers = np.arange(len(self))
        if self._grouped and rng is not None:
            numbers = rng.permutation(numbers)

        def make_batch(number: int) -> tuple[np.ndarray, Shape]:
            chosen = order[number * self._batch : (number + 1) * self._batch]
            longest = self._lengths[chosen].max()
            size = self._sizes[np.searchsorted(self._sizes, longest)]
            return _filled_up(chosen, self._batch), (int(size),)

        return Epoch(numbers, make_batch)

    def _sort_groups(self, order: np.ndarray) -> np.ndarray:
        """Returns indices sorted by length within each GROUP batches."""
        size = self.GROUP * self._batch
        groups = []
        for first in range(0, len(order), size):
            group = order[first : first + size]
            groups.append(group[self._lengths[group].argsort(kind="stable")])
        return np.concatenate(groups)


def _filled_up(indices: np.ndarray, rows: int) -> np.ndarray:
    """Returns indices as int64 [rows], with PADDING after the last."""
    filled = np.full(rows, PADDING, np.int64)
    filled[: len(indices)] = indices
    return filled


class Epoch(Sequence):
    """Batches that are made when they are asked for.

    Args:
        order: numbers of the batches, in the order in which they come.
        make_batch: makes the batch of a number.
    """

    def __init__(self, order: np.ndarray, make_batch: Callable[[int], tuple[np.ndarray, Shape]]):
        self._order = order
        self._make_batch = make_batch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> tuple[np.ndarray, Shape]:
        return self._make_batch(int(self._order[position]))


def checked_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns lengths as [n, k]; raises InputError where there are none, or one is below 1."""
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        raise InputError("there are no examples to make batches of")
    if lengths.ndim not in (1, 2) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths are {lengths.dtype} {list(lengths.shape)}; expected integers [n] or [n, k]"
        )
    if lengths.dtype.kind == "u":
        lengths = lengths.astype(np.int64)  # differences of unsigned numbers would wrap around

    lengths = lengths.reshape(len(lengths), -1)
    if lengths.min() < 1:
        example, side = np.unravel_index(lengths.argmin(), lengths.shape)
        raise InputError(
            f"example {example} has length {lengths[example, side]}; expected 1 or more tokens"
        )
    return lengths


def checked_shapes(shapes: Sequence[Shape], sides: int) -> list[Shape]:
    """Returns shapes as tuples; raises InputError where one is not (batch, a length per side)."""
    shapes = [tuple(map(operator.index, shape)) for shape in shapes]
    if not shapes:
        example = _written((256, *(64,) * sides))
        raise InputError(f"no shapes are given; expected one or more, such as {example}")
    for shape in shapes:
        if len(shape) != 1 + sides:
            lengths = [f"length_{side + 1}" for side in range(sides)]
            expected = "x".join(["batch", *lengths])
            raise InputError(
                f"shape {_written(shape)} has {len(shape)} numbers; expected {expected}"
            )
        if min(shape) < 1:
            raise InputError(
                f"shape {_written(shape)} has the number {min(shape)}; expected 1 or more"
            )
    return shapes


def nothing_fits(lengths: np.ndarray, shapes: list[Shape]) -> InputError:
    """Returns the error for shapes that are too short for every example."""
    listed = ", ".join(_written(shape) for shape in shapes)
    shortest = _written(lengths[lengths.max(axis=1).argmin()])
    return InputError(
        f"none of the {len(lengths)} examples fits into {listed}; use longer shapes "
        f"(an example with the shortest longest side has length {shortest})"
    )


def _written(shape: Sequence[int]) -> str:
    """Returns a shape as messages show it: 256x64."""
    return "x".join(str(number) for number in shape)


def fit_mask(lengths: np.ndarray, longest: Sequence[int]) -> np.ndarray:
    """Returns, as bool [n], whether an example is on every side at most as long as `longest`."""
    fits = lengths[:, 0] <= longest[0]
    for side in range(1, len(longest)):
        fits &= lengths[:, side] <= longest[side]
    return fits


def count_tokens(lengths: np.ndarray, which: np.ndarray) -> int:
    """Counts the tokens of the examples for which `which`, bool [n], is true."""
    tokens = 0
    for side in range(lengths.shape[1]):
        tokens += int(lengths[:, side].sum(dtype=np.int64, where=which))
    return tokens


def index_type(lengths: np.ndarray) -> type:
    """Returns the smaller integer type that numbers so many examples."""
    return np.int32 if len(lengths) < 2**31 else np.int64
