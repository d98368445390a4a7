"""Several examples in one row, and the shapes of batches that suit a data set; see batching.py for what a plan is."""

import collections
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from data.batching import (
    PADDING,
    Epoch,
    Plan,
    Shape,
    checked_lengths,
    checked_shapes,
    count_tokens,
    fit_mask,
    index_type,
    nothing_fits,
)
from errors import InputError

# The weight of a rest that is not the same share of all sides of a packed row. Measured on pairs of sentences in rows
# of 64 to 256 places: 0 needs 1 to 3% more rows, 1 up to 1% more.
BALANCE = 0.3


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

        return Epoch(np.arange(len(self)), batch)


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
    lengths = checked_lengths(lengths)
    (shape,) = checked_shapes([shape], lengths.shape[1])
    longest = shape[1:]
    fits = fit_mask(lengths, longest)
    tokens = count_tokens(lengths, fits)
    kept = np.flatnonzero(fits).astype(index_type(lengths))
    if not len(kept):
        raise nothing_fits(lengths, [shape])
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
    lengths = checked_lengths(lengths)
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
