"""Batches of examples of unequal length, in a few fixed shapes: on XLA each shape is one compiled program.

    plan = Buckets(lengths, [(512, 32), (256, 64)])     # each example in the smallest shape that holds it
    plan = pack(lengths, (256, 64))                     # or several examples in one row

A shape is (batch, length_1, …, length_k): examples of all hosts together, and the places for tokens on each of the k
sides of an example (a sentence has one, a pair of sentences two). A plan goes to `parallel_loader` in place of a batch
size; see `Plan`. The index -1 means that there is no example: in rows of the last batch of a shape, or after the last
example of a packed row.
"""

import collections
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from errors import InputError

PADDING = -1  # the index of a place without an example
# The weight of a rest that is not the same share of all sides of a packed row. Measured on pairs of sentences in rows
# of 64 to 256 places: 0 needs 1 to 3% more rows, 1 up to 1% more.
BALANCE = 0.3

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
        self._lengths = lengths = _checked_lengths(lengths)
        self.shapes = _checked_shapes(shapes, lengths.shape[1])
        bucket = np.full(len(lengths), -1, np.int16)
        # The longest rows first, so that the shortest that holds an example is the last to claim it.
        for number in sorted(range(len(self.shapes)), key=lambda i: (sum(self.shapes[i][1:]), i), reverse=True):
            bucket[_fits(lengths, self.shapes[number][1:])] = number
        self._members = [
            np.flatnonzero(bucket == number).astype(_index_type(lengths)) for number in range(len(self.shapes))
        ]
        kept = sum(len(members) for members in self._members)
        if not kept:
            raise _nothing_fits(lengths, self.shapes)
        # The batches of a bucket, the last of which may not be full; and where they end among those of all buckets.
        self._batches = [
            -(-len(members) // shape[0]) for members, shape in zip(self._members, self.shapes, strict=True)
        ]
        self._ends = np.cumsum(self._batches)
        self.dropped = len(lengths) - kept
        places = sum(
            batches * shape[0] * sum(shape[1:]) for batches, shape in zip(self._batches, self.shapes, strict=True)
        )
        self.padding = 1 - _tokens(lengths, bucket >= 0) / places

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

        return _Epoch(order, batch)


class Packed(Plan):
    """Rows of several examples each, made by `pack`.

    Attributes:
        shapes: the one shape (batch, length_1, …, length_k); its batch counts rows.
        dropped: examples that are longer than a row, and are in no batch.
        padding: share of the token places of an epoch, 0 to 1, that hold no token.
        rows: rows in an epoch.
        most: most examples in a row.
    """

    def __init__(self, shape: Shape, examples: np.ndarray, counts: np.ndarray, dropped: int, tokens: int):
        """`examples`: the indices of all rows, one row after the other; `counts`: how many each row has."""
        self.shapes, self.dropped, self.rows, self.most = [shape], dropped, len(counts), int(counts.max())
        self._examples, self._counts = examples, counts
        self._firsts = (np.cumsum(counts, dtype=np.int64) - counts).astype(examples.dtype)
        self.padding = 1 - tokens / (len(self) * shape[0] * sum(shape[1:]))

    def __len__(self) -> int:
        return -(-self.rows // self.shapes[0][0])

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch, most], lengths) of each batch; rows are permuted, or in order without `rng`.

        A row's examples come first, then -1. Batches are made when asked for.
        """
        size, *longest = self.shapes[0]
        order = np.arange(self.rows, dtype=self._examples.dtype)
        if rng is not None:
            rng.shuffle(order)

        def batch(number: int) -> tuple[np.ndarray, Shape]:
            rows = order[number * size : (number + 1) * size]
            places = np.arange(self.most)
            taken = places < self._counts[rows, None]
            indices = np.full((size, self.most), PADDING, np.int64)
            indices[: len(rows)][taken] = self._examples[(self._firsts[rows, None] + places)[taken]]
            return indices, tuple(longest)

        return _Epoch(np.arange(len(self)), batch)


def pack(lengths: np.ndarray, shape: Shape, seed: int = 0) -> Packed:
    """Puts several examples into each row, so that on no side a row has more tokens than places.

    The packing is a function of the arguments; epochs permute its rows. It works on the counts of examples of equal
    lengths, so its time grows with length_1 x … x length_k more than with the examples. Memory is about 25 bytes per
    example at its peak, later 4, and 8 per row. After Krell et al. 2021, "Efficient Sequence Packing without
    Cross-contamination", https://arxiv.org/abs/2107.02027, here with a fit on every side.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        shape: (batch, length_1, …, length_k); the batch counts rows.
        seed: decides which of the examples of equal lengths share a row with which.
    Raises:
        InputError: as `Buckets`.
    """
    lengths = _checked_lengths(lengths)
    (shape,) = _checked_shapes([shape], lengths.shape[1])
    longest = shape[1:]
    fits = _fits(lengths, longest)
    tokens = _tokens(lengths, fits)
    kept = np.flatnonzero(fits).astype(_index_type(lengths))
    if not len(kept):
        raise _nothing_fits(lengths, [shape])
    np.random.default_rng(seed).shuffle(kept)

    # A kind is all examples of the same lengths: examples[ends[kind] - counts[kind] : ends[kind]].
    grid = tuple(length + 1 for length in longest)
    kinds = np.ravel_multi_index(tuple(lengths[kept, side] for side in range(len(grid))), grid)
    kinds = kinds.astype(np.min_scalar_type(int(np.prod(grid)) - 1))  # 16 bits are sorted by radix, in linear time
    counts = np.bincount(kinds, minlength=int(np.prod(grid)))
    examples = kept[np.argsort(kinds, kind="stable")]
    following = np.cumsum(counts) - counts

    packed, row_counts = np.empty_like(examples), []
    place = 0
    for row, times in _fillings(counts.reshape(grid), longest):
        block = np.empty((times, len(row)), examples.dtype)
        for column, kind in enumerate(np.ravel_multi_index(tuple(np.transpose(row)), grid).tolist()):
            block[:, column] = examples[following[kind] : following[kind] + times]
            following[kind] += times
        packed[place : place + block.size] = block.ravel()
        place += block.size
        row_counts.append(np.full(times, len(row), np.int32))
    return Packed(shape, packed, np.concatenate(row_counts), len(lengths) - len(kept), tokens)


def _fillings(counts: np.ndarray, longest: Shape) -> Iterator[tuple[list[Shape], int]]:
    """Yields (lengths of one row's examples, how many rows have these), until all of `counts` are in rows.

    A row takes what leaves the smallest rest, again and again until nothing fits, and is then repeated as often as the
    counts allow: at the beginning many times, towards the end once.

    Args:
        counts: [length_1 + 1, …, length_k + 1], examples of each kind.
    """
    counts = counts.copy()
    # Along each side, ready to be broadcast: the share of a row that a length takes.
    shares = [np.array(side) / most for side, most in zip(np.ogrid[*map(slice, counts.shape)], longest, strict=True)]
    sizes = np.where(counts > 0, sum(shares), 0)  # 0 where no example is left

    def scores(rest: Shape, among: Shape) -> np.ndarray:
        """Returns how well each kind, up to the lengths `among`, fills `rest`; -inf where no example is left."""
        within = tuple(slice(length + 1) for length in among)
        unused = [places / most - share[within] for places, most, share in zip(rest, longest, shares, strict=True)]
        unequal = functools.reduce(np.maximum, unused) - functools.reduce(np.minimum, unused)
        return np.where(sizes[within] > 0, sizes[within] - BALANCE * unequal, -np.inf)

    def take(kind: Shape, number: int) -> None:
        counts[kind] -= number
        if counts[kind] == 0:
            sizes[kind] = 0

    # The kinds that a row begins with, the best first; and the greatest lengths of each and those after it.
    best_first = np.argsort(-scores(longest, longest), axis=None, kind="stable")[: np.count_nonzero(counts)]
    kinds = np.stack(np.unravel_index(best_first, counts.shape), axis=1)
    greatest = np.maximum.accumulate(kinds[::-1])[::-1]
    for first, among in zip(map(tuple, kinds.tolist()), map(tuple, greatest.tolist()), strict=True):
        while counts[first]:
            kind, row, rest = first, [], longest
            while kind is not None:
                row.append(kind)
                take(kind, 1)
                rest = tuple(places - length for places, length in zip(rest, kind, strict=True))
                score = scores(rest, tuple(map(min, rest, among)))
                found = np.unravel_index(score.argmax(), score.shape)
                kind = tuple(map(int, found)) if score[found] > -np.inf else None
            uses = collections.Counter(row)
            again = min(int(counts[kind]) // number for kind, number in uses.items())
            for kind, number in uses.items():
                take(kind, again * number)
            yield row, 1 + again


def propose_shapes(
    lengths: np.ndarray,
    tokens_per_batch: int,
    max_shapes: int,
    *,
    multiple_of_batch: int = 8,
    multiple_of_length: int = 8,
) -> list[Shape]:
    """Finds the at most `max_shapes` shapes that hold every example with the fewest places; the shortest first.

    Exact (dynamic programming over all lengths), but for the last batch of each shape, which is not counted. Examples
    with k sides get k equal lengths, so what counts is their longest side. One very long example makes a shape of its
    own worth having: leave out such examples first, as in `lengths[lengths <= 256]`.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        tokens_per_batch: most places of a batch on one side, batch x length.
        multiple_of_batch: each batch is a multiple of it; give a multiple of the number of devices.
        multiple_of_length: each length is a multiple of it.
    Raises:
        InputError: no examples, or one without tokens; numbers that are not positive; `tokens_per_batch` too small for
            the longest example.
    """
    numbers = {
        "tokens_per_batch": tokens_per_batch,
        "max_shapes": max_shapes,
        "multiple_of_batch": multiple_of_batch,
        "multiple_of_length": multiple_of_length,
    }
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} is {number}; expected 1 or more")
    lengths = _checked_lengths(lengths)
    sides = lengths.shape[1]
    # Lengths as multiples: 1, 2, …; only those that occur can be the length of a best shape.
    counts = np.bincount((lengths.max(axis=1) + np.int64(multiple_of_length - 1)) // multiple_of_length)
    candidates = np.flatnonzero(counts)
    upto = np.concatenate([[0], np.cumsum(counts[candidates])])  # examples of the first 0, 1, … candidates
    candidates = candidates * multiple_of_length
    if candidates[-1] * multiple_of_batch > tokens_per_batch:
        raise InputError(
            f"tokens_per_batch is {tokens_per_batch}, but {multiple_of_batch} examples of the greatest length, "
            f"{lengths.max()}, take {candidates[-1] * multiple_of_batch} places; use more, or leave out long examples"
        )
    shapes = []
    end = len(candidates)
    for choice in reversed(_cheapest(upto, candidates, max_shapes)):
        length = int(candidates[end - 1])
        batch = tokens_per_batch // length // multiple_of_batch * multiple_of_batch
        shapes.append((batch, *(length,) * sides))
        end = int(choice[end])
    return shapes[::-1]


def _cheapest(upto: np.ndarray, candidates: np.ndarray, max_shapes: int) -> list[np.ndarray]:
    """Returns, for 1, 2, … shapes, where the last of the best shapes for the first j candidates begins.

    `upto`: examples of the first 0, 1, … candidates, which are lengths.
    """
    # places[j]: fewest for the first j candidates in the shapes so far; the last of those shapes begins at choice[j].
    places = np.where(upto == 0, 0.0, np.inf)
    choices = []
    for _ in range(min(max_shapes, len(candidates))):
        choice = np.zeros(len(upto), np.int64)
        fewest = np.full(len(upto), np.inf)
        for j in range(1, len(upto)):
            costs = places[:j] + (upto[j] - upto[:j]) * candidates[j - 1]
            choice[j] = costs.argmin()
            fewest[j] = costs[choice[j]]
        places = fewest
        choices.append(choice)
    return choices


class _Epoch(Sequence):
    """Batches that are made when they are asked for."""

    def __init__(self, order: np.ndarray, batch: Callable[[int], tuple[np.ndarray, Shape]]):
        self._order, self._batch = order, batch

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> tuple[np.ndarray, Shape]:
        return self._batch(int(self._order[position]))


def _checked_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns them as [n, k]."""
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


def _checked_shapes(shapes: Sequence[Shape], sides: int) -> list[Shape]:
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


def _nothing_fits(lengths: np.ndarray, shapes: list[Shape]) -> InputError:
    shortest = _written(lengths[lengths.max(axis=1).argmin()])
    return InputError(
        f"none of the {len(lengths)} examples fits into {', '.join(map(_written, shapes))}; use longer shapes (an "
        f"example with the shortest longest side has length {shortest})"
    )


def _written(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _fits(lengths: np.ndarray, longest: Sequence[int]) -> np.ndarray:
    """Returns, as bool [n], whether an example is on every side at most as long as `longest`."""
    fits = lengths[:, 0] <= longest[0]
    for side in range(1, len(longest)):
        fits &= lengths[:, side] <= longest[side]
    return fits


def _tokens(lengths: np.ndarray, which: np.ndarray) -> int:
    """Counts the tokens of the examples that `which`, bool [n], is true for."""
    return sum(int(lengths[:, side].sum(dtype=np.int64, where=which)) for side in range(lengths.shape[1]))


def _index_type(lengths: np.ndarray) -> type:
    return np.int32 if len(lengths) < 2**31 else np.int64
