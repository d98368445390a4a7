"""Several examples in one row, and the shapes of batches that suit a data set.

batching.py says what a plan and a shape are.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

# How much it counts against an example that it leaves unequal shares of a row's sides. Measured on
# pairs of sentences in rows of 64 to 256 positions: 0 needs 1 to 3% more rows, 1 up to 1% more.
BALANCE = 0.3


class Packed(Plan):
    """Rows of several examples each, made by `pack`.

    Attributes:
        shapes: the one shape (batch, length_1, …, length_k); its batch counts rows.
        dropped: how many examples are longer than a row, and are in no batch.
        padding: share of an epoch's token positions, 0 to 1, that hold no token.
        rows: rows in an epoch.
        most: most examples in a row.
    """

    def __init__(
        self, shape: Shape, examples: np.ndarray, counts: np.ndarray, dropped: int, tokens: int
    ):
        """Keeps rows that are packed already.

        Args:
            examples: the indices of all rows, one row after the other.
            counts: how many examples each row has.
            tokens: in all rows together.
        """
        self.shapes = [shape]
        self.dropped = dropped
        self.rows = len(counts)
        self.most = int(counts.max())
        self._examples = examples
        self._counts = counts
        # Where each row begins in `examples`.
        self._firsts = (np.cumsum(counts, dtype=np.int64) - counts).astype(examples.dtype)
        batch, *lengths = shape
        self.padding = 1 - tokens / (len(self) * batch * sum(lengths))

    def __len__(self) -> int:
        return -(-self.rows // self.shapes[0][0])

    def epoch(self, rng: np.random.Generator | None) -> Sequence[tuple[np.ndarray, Shape]]:
        """Returns (int64 [batch, most], lengths) of each batch, made when it is asked for.

        Rows are permuted, or in order without `rng`. A row's examples come first, then -1.
        """
        batch, *lengths = self.shapes[0]
        order = np.arange(self.rows, dtype=self._examples.dtype)
        if rng is not None:
            rng.shuffle(order)

        def make_batch(number: int) -> tuple[np.ndarray, Shape]:
            rows = order[number * batch : (number + 1) * batch]
            columns = np.arange(self.most)
            taken = columns < self._counts[rows, None]
            sources = self._firsts[rows, None] + columns
            indices = np.full((batch, self.most), PADDING, np.int64)
            indices[: len(rows)][taken] = self._examples[sources[taken]]
            return indices, tuple(lengths)

        return Epoch(np.arange(len(self)), make_batch)


def pack(lengths: np.ndarray, shape: Shape, seed: int = 0) -> Packed:
    """Puts several examples into each row, so that no side of a row overflows.

    The packing depends on the arguments alone; epochs permute its rows. It works on the counts of
    examples of equal lengths, so its time grows with length_1 x … x length_k more than with the
    examples. Memory is about 25 bytes per example at its peak, later 4, and 8 per row. After Krell
    et al. 2021, "Efficient Sequence Packing without Cross-contamination",
    https://arxiv.org/abs/2107.02027, here with a fit on every side.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        shape: (batch, length_1, …, length_k); the batch counts rows.
        seed: decides which of the examples of equal lengths share a row with which.
    Raises:
        InputError: as `Buckets`.
    """
    lengths = checked_lengths(lengths)
    (shape,) = checked_shapes([shape], sides=lengths.shape[1])
    longest = shape[1:]
    fits = fit_mask(lengths, longest)
    kept = np.flatnonzero(fits).astype(index_type(lengths))
    if not len(kept):
        raise nothing_fits(lengths, [shape])
    np.random.default_rng(seed).shuffle(kept)

    # A kind is all examples of the same lengths, numbered by them. Its examples follow each other.
    grid = tuple(length + 1 for length in longest)
    kinds = _kinds(lengths[kept], grid)
    counts = np.bincount(kinds, minlength=int(np.prod(grid)))
    examples = kept[np.argsort(kinds, kind="stable")]
    next_of_kind = np.cumsum(counts) - counts  # where the first unused example of each kind is

    packed = np.empty_like(examples)
    row_counts = []
    filled = 0
    for filling in _fillings(counts.reshape(grid), longest):
        block = np.empty((filling.rows, len(filling.examples)), examples.dtype)
        row_kinds = np.ravel_multi_index(tuple(np.transpose(filling.examples)), grid)
        for column, kind in enumerate(row_kinds.tolist()):
            first = next_of_kind[kind]
            block[:, column] = examples[first : first + filling.rows]
            next_of_kind[kind] += filling.rows
        packed[filled : filled + block.size] = block.ravel()
        filled += block.size
        row_counts.append(np.full(filling.rows, len(filling.examples), np.int32))

    return Packed(
        shape,
        packed,
        np.concatenate(row_counts),
        dropped=len(lengths) - len(kept),
        tokens=count_tokens(lengths, fits),
    )


def _kinds(lengths: np.ndarray, grid: Shape) -> np.ndarray:
    """Returns [n] unsigned integers that are equal for examples of equal lengths, below prod(grid).

    They have the smallest type there is: 16 bits are sorted by radix, in linear time.
    """
    sides = tuple(lengths[:, side] for side in range(len(grid)))
    kinds = np.ravel_multi_index(sides, grid)
    return kinds.astype(np.min_scalar_type(int(np.prod(grid)) - 1))


@dataclass(frozen=True)
class _Filling:
    """The lengths of a row's examples, and how many rows have examples of these lengths."""

    examples: list[Shape]
    rows: int


def _fillings(counts: np.ndarray, longest: Shape) -> Iterator[_Filling]:
    """Yields what rows are filled with, until all examples are in rows.

    A row takes the example that leaves the smallest rest, again and again until nothing fits, and
    is then repeated as often as the counts allow: many times at first, once towards the end.

    Args:
        counts: [length_1 + 1, …, length_k + 1], examples of these lengths.
        longest: (length_1, …, length_k) of a row.
    """
    unused = _Unused(counts, longest)
    # The lengths that rows begin with, the best first. Those after it bound what can follow it.
    firsts = unused.best_first()
    upper_bounds = np.maximum.accumulate(firsts[::-1])[::-1]
    for first, upper_bound in zip(firsts.tolist(), upper_bounds.tolist(), strict=True):
        first = tuple(first)
        while unused.counts[first]:
            examples = _fill_row(unused, first, upper_bound)
            uses = collections.Counter(examples)
            repeats = min(int(unused.counts[kind]) // number for kind, number in uses.items())
            for kind, number in uses.items():
                unused.take(kind, repeats * number)
            yield _Filling(examples, rows=1 + repeats)


def _fill_row(unused: "_Unused", first: Shape, upper_bound: Sequence[int]) -> list[Shape]:
    """Takes the examples of one row, the first of which is given, and returns their lengths."""
    examples = []
    rest = unused.longest
    kind = first
    while kind is not None:
        examples.append(kind)
        unused.take(kind, 1)
        rest = tuple(free - length for free, length in zip(rest, kind, strict=True))
        kind = unused.best(rest, upper_bound)
    return examples


class _Unused:
    """The examples that are in no row yet, by their lengths.

    Attributes:
        counts: [length_1 + 1, …, length_k + 1], examples of these lengths.
        longest: (length_1, …, length_k) of a row.
    """

    def __init__(self, counts: np.ndarray, longest: Shape):
        self.counts = counts.copy()
        self.longest = longest
        # Along each side, ready to be broadcast: the share of a row that a length takes.
        self._shares = []
        for lengths, most in zip(np.ogrid[*map(slice, counts.shape)], longest, strict=True):
            self._shares.append(np.array(lengths) / most)
        # The sum of the shares of all sides; 0 where no example is left.
        self._sizes = np.where(counts > 0, sum(self._shares), 0)

    def take(self, kind: Shape, number: int) -> None:
        """Removes examples of the lengths `kind`."""
        self.counts[kind] -= number
        if self.counts[kind] == 0:
            self._sizes[kind] = 0

    def best_first(self) -> np.ndarray:
        """Returns, as [kinds, k], the lengths that examples have, best for an empty row first."""
        scores = self._scores(self.longest, self.longest)
        order = np.argsort(-scores, axis=None, kind="stable")
        order = order[: np.count_nonzero(self.counts)]  # the others score -inf
        return np.stack(np.unravel_index(order, self.counts.shape), axis=1)

    def best(self, rest: Shape, upper_bound: Sequence[int]) -> Shape | None:
        """Returns the lengths that fill the `rest` of a row best; None if nothing fits.

        `upper_bound`: no example that is left is longer on any side.
        """
        scores = self._scores(rest, tuple(map(min, rest, upper_bound)))
        found = np.unravel_index(scores.argmax(), scores.shape)
        if scores[found] == -np.inf:
            return None
        return tuple(int(length) for length in found)

    def _scores(self, rest: Shape, most: Shape) -> np.ndarray:
        """Returns how well examples fill `rest`, for lengths up to `most`; -inf where none is left.

        The score is the share of a row that an example takes, less for one that leaves unequal
        shares of its sides.
        """
        within = tuple(slice(length + 1) for length in most)
        sizes = self._sizes[within]
        left = []  # the share of a row that stays free, along each side
        for free, length, share in zip(rest, self.longest, self._shares, strict=True):
            left.append(free / length - share[within])
        unequal = functools.reduce(np.maximum, left) - functools.reduce(np.minimum, left)
        return np.where(sizes > 0, sizes - BALANCE * unequal, -np.inf)


def propose_shapes(
    lengths: np.ndarray,
    tokens_per_batch: int,
    max_shapes: int,
    *,
    multiple_of_batch: int = 8,
    multiple_of_length: int = 8,
) -> list[Shape]:
    """Finds at most `max_shapes` shapes that hold every example with the least padding.

    Returns them, the shortest first. They are exact (dynamic programming over all lengths), but for
    the last batch of each shape, which is not counted. Examples with k sides get k equal lengths,
    so what counts is their longest side. One very long example makes a shape of its own worth
    having: leave out such examples first, as in `lengths[lengths <= 256]`.

    Args:
        lengths: tokens of each example, integers [n] or [n, k].
        tokens_per_batch: most token positions of a batch on one side, batch x length.
        multiple_of_batch: each batch is a multiple of it; give a multiple of the number of devices.
        multiple_of_length: each length is a multiple of it.
    Raises:
        InputError: no examples, or one without tokens; numbers that are not positive;
            `tokens_per_batch` too small for the longest example.
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

    # Lengths as multiples: 1, 2, …; only those that occur can be the length of a best shape.
    round_up = np.int64(multiple_of_length - 1)
    counts = np.bincount((lengths.max(axis=1) + round_up) // multiple_of_length)
    multiples = np.flatnonzero(counts)
    candidates = multiples * multiple_of_length
    # How many examples are no longer than the first 0, 1, … candidates.
    examples_upto = np.concatenate([[0], np.cumsum(counts[multiples])])

    least = candidates[-1] * multiple_of_batch
    if least > tokens_per_batch:
        raise InputError(
            f"tokens_per_batch is {tokens_per_batch}, but {multiple_of_batch} examples of the "
            f"greatest length, {lengths.max()}, take {least} places; use more, or leave out long "
            "examples"
        )

    shapes = []
    sides = lengths.shape[1]
    end = len(candidates)
    for begins in reversed(_cheapest(examples_upto, candidates, max_shapes)):
        length = int(candidates[end - 1])
        batch = tokens_per_batch // length // multiple_of_batch * multiple_of_batch
        shapes.append((batch, *(length,) * sides))
        end = int(begins[end])
    return shapes[::-1]


def _cheapest(
    examples_upto: np.ndarray, candidates: np.ndarray, max_shapes: int
) -> list[np.ndarray]:
    """Finds the shapes with the fewest token positions, for every number of candidates.

    Returns a list, for 1, 2, … shapes: [j] is the number of candidates before the last of the best
    shapes for the first j candidates.

    Args:
        candidates: lengths, rising.
        examples_upto: how many examples are no longer than the first 0, 1, … candidates.
    """
    # positions[j]: the fewest for the first j candidates, in as many shapes as are chosen so far.
    positions = np.where(examples_upto == 0, 0.0, np.inf)
    choices = []
    for _ in range(min(max_shapes, len(candidates))):
        begins = np.zeros(len(examples_upto), np.int64)
        fewest = np.full(len(examples_upto), np.inf)
        for j in range(1, len(examples_upto)):
            examples = examples_upto[j] - examples_upto[:j]  # in a shape that begins at 0, 1, …
            costs = positions[:j] + examples * candidates[j - 1]
            begins[j] = costs.argmin()
            fewest[j] = costs[begins[j]]
        positions = fewest
        choices.append(begins)
    return choices
