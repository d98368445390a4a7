"""data/batching.py: every example once, in few shapes, with little padding."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

from data.batching import PADDING, Buckets, Shuffled
from data.packing import pack, propose_shapes
from errors import InputError


def sentences(size: int, seed: int = 0) -> np.ndarray:
    """Returns lengths [size, 2] as of sentence pairs: two thirds of them have 7 to 33 tokens, both
    sides much alike."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(np.log(15), 0.8, size))
    target = source * np.exp(rng.normal(0, 0.2, size))
    lengths = np.rint(np.stack([source, target], axis=1))
    return np.clip(lengths, 2, 200).astype(np.int32)


def examples_of(epoch) -> np.ndarray:
    """Returns all indices in an epoch, without the padding."""
    indices = np.concatenate([np.ravel(indices) for indices, _ in epoch])
    return indices[indices != PADDING]


def as_lists(epoch) -> list:
    """Returns an epoch's batches in a form that == compares."""
    return [(indices.tolist(), lengths) for indices, lengths in epoch]


SHAPES = [(8, 64, 64), (16, 32, 32), (4, 128, 100), (32, 16, 16)]
LENGTHS = sentences(1000)
PLANS = {
    "buckets": lambda: Buckets(LENGTHS, SHAPES),
    "packed": lambda: pack(LENGTHS, SHAPES[0]),
    "shuffled": lambda: Shuffled(LENGTHS[:, 0], 16, (16, 64, 200)),
    "grouped": lambda: Shuffled(LENGTHS[:, 0], 16, (16, 64, 200), grouped=True),
}
every_plan = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)


@every_plan
def test_each_epoch_has_every_example_that_fits_once(make):
    plan = make()
    longest = np.max([shape[1:] for shape in plan.shapes], axis=0)
    fits = (LENGTHS[:, : len(longest)] <= longest).all(axis=1)
    if len(longest) > 1:
        assert 0 < plan.dropped == (~fits).sum()

    for indices, _ in plan.epoch(None):
        assert indices.dtype == np.int64
    for seed in (None, (7, 0), (7, 1)):
        rng = None if seed is None else np.random.default_rng(seed)
        epoch = as_lists(plan.epoch(rng))
        assert len(epoch) == len(plan)
        assert sorted(examples_of(epoch)) == np.flatnonzero(fits).tolist()
        shapes = {(len(indices), *lengths) for indices, lengths in epoch}
        assert shapes <= {*plan.shapes}


@every_plan
def test_the_order_of_an_epoch_depends_on_the_generator_alone(make):
    plan = make()
    in_order = as_lists(plan.epoch(None))
    first = as_lists(plan.epoch(np.random.default_rng((7, 0))))
    second = as_lists(plan.epoch(np.random.default_rng((7, 1))))

    assert sorted(map(str, first)) != sorted(map(str, second))
    assert as_lists(plan.epoch(None)) == in_order != first

    without_epochs_before = make().epoch(np.random.default_rng((7, 0)))
    assert as_lists(without_epochs_before) == first


@every_plan
def test_batches_of_an_epoch_are_read_by_position(make):
    plan = make()
    first = as_lists(plan.epoch(np.random.default_rng((7, 0))))
    epoch = make().epoch(np.random.default_rng((7, 0)))

    last = len(epoch) - 1
    chosen = [epoch[last], epoch[0], epoch[3], epoch[-1]]
    assert as_lists(chosen) == [first[-1], first[0], first[3], first[-1]]
    with pytest.raises(IndexError):
        epoch[len(epoch)]


@pytest.mark.parametrize("name", ["buckets", "shuffled", "grouped"])  # not packed: it has one shape
def test_the_order_of_the_shapes_is_permuted_too(name):
    plan = PLANS[name]()
    assert len(plan.shapes) > 1

    lengths = [lengths for _, lengths in as_lists(plan.epoch(np.random.default_rng((7, 0))))]
    changes = sum(one != other for one, other in itertools.pairwise(lengths))
    assert changes > len(plan) / 4


class HandMade(NamedTuple):
    """An epoch of buckets that was worked out by hand."""

    lengths: list
    shapes: list[tuple[int, ...]]
    epoch: list  # without a generator: (indices, lengths) of each batch
    padding: float


EQUAL = [[10, 10], [20, 10], [10, 20]]
HAND_MADE = {
    # Without a generator buckets are in order of length, and the last batch is filled with -1. Two
    # batches of 3 x 4 and one of 2 x 9 are 42 positions; the tokens are 3 + 8 + 2 + 4 + 9 + 1 = 27.
    "in order of length": HandMade(
        lengths=[3, 8, 2, 4, 9, 99, 1],
        shapes=[(2, 9), (3, 4)],
        epoch=[([1, 4], (9,)), ([6, 2, 0], (4,)), ([3, -1, -1], (4,))],
        padding=15 / 42,
    ),
    # A column of lengths is a list of them. Shapes of as many positions each, the long one first:
    # the rows decide.
    "a column": HandMade(
        lengths=[[3], [10]],
        shapes=[(2, 16), (4, 8)],
        epoch=[([1, -1], (16,)), ([0, -1, -1, -1], (8,))],
        padding=1 - 13 / 64,
    ),
    "a shape that holds nothing has no batches": HandMade(
        lengths=[5, 6, 7],
        shapes=[(2, 8), (2, 4), (2, 100)],
        epoch=[([0, 1], (8,)), ([2, -1], (8,))],
        padding=14 / 32,
    ),
    "the first of equally long shapes, a long target": HandMade(
        lengths=EQUAL,
        shapes=[(1, 10, 20), (1, 20, 10)],
        epoch=[([0], (10, 20)), ([2], (10, 20)), ([1], (20, 10))],
        padding=10 / 90,
    ),
    "the first of equally long shapes, a long source": HandMade(
        lengths=EQUAL,
        shapes=[(1, 20, 10), (1, 10, 20)],
        epoch=[([0], (20, 10)), ([1], (20, 10)), ([2], (10, 20))],
        padding=10 / 90,
    ),
    # 2 x (4 + 6) positions; the example that is dropped has no share.
    "a dropped example": HandMade(
        lengths=[[3, 5], [5, 5]],
        shapes=[(2, 4, 6)],
        epoch=[([0, -1], (4, 6))],
        padding=12 / 20,
    ),
}


@pytest.mark.parametrize("expected", HAND_MADE.values(), ids=HAND_MADE)
def test_buckets_are_what_a_hand_makes(expected):
    plan = Buckets(np.array(expected.lengths, np.uint8), expected.shapes)

    assert as_lists(plan.epoch(None)) == expected.epoch
    assert plan.dropped == len(expected.lengths) - len(examples_of(plan.epoch(None)))
    assert plan.shapes == expected.shapes
    assert plan.padding == pytest.approx(expected.padding)


@pytest.mark.parametrize("longest", [(64, 64), (32, 100), (128, 128)])
def test_packed_rows_are_nearly_full(longest):
    lengths = sentences(20_000)
    lengths = lengths[(lengths <= longest).all(axis=1)]
    plan = pack(lengths, (8, *longest))
    assert len(plan) == math.ceil(plan.rows / 8)

    tokens = 0
    for indices, _ in plan.epoch(None):
        assert indices.shape == (8, plan.most)
        is_example = indices != PADDING
        changes = np.diff(is_example.astype(int), axis=1)
        assert (changes <= 0).all(), "padding comes after a row's examples"
        tokens_of_rows = (lengths[indices] * is_example[..., None]).sum(axis=1)
        assert (tokens_of_rows <= longest).all()
        tokens += tokens_of_rows.sum()

    positions = len(plan) * 8 * sum(longest)
    assert plan.padding == pytest.approx(1 - tokens / positions)
    fewest_rows = (lengths.sum(axis=0) / longest).max()
    assert plan.rows < 1.03 * fewest_rows
    if longest[0] == longest[1]:
        buckets = Buckets(lengths, propose_shapes(lengths, 8 * longest[0], 4))
        assert plan.padding < 0.06
        assert plan.padding < buckets.padding / 4


def test_small_packings_are_what_a_hand_makes():
    plan = pack([6, 4, 5, 5, 10, 11], (2, 10))

    rows = set()
    for indices, _ in plan.epoch(None):
        for row in indices.tolist():
            rows.add(frozenset(row) - {PADDING})
    assert rows == set(map(frozenset, ({0, 1}, {2, 3}, {4}, set())))
    assert plan.rows == 3
    assert plan.most == 2
    assert plan.dropped == 1
    assert len(plan) == 2
    assert plan.padding == pytest.approx(1 - 30 / 40)


def test_both_sides_decide_what_fits_into_a_row():
    lengths = [[2, 9], [2, 9], [2, 9]]  # no two of these fit together
    assert pack(lengths, (1, 10, 10)).rows == 3


def test_epochs_keep_the_packed_rows_and_the_seed_decides_them():
    lengths = sentences(3000)

    def rows(seed, rng):
        plan = pack(lengths, (8, 64, 64), seed=seed)
        of_batches = [indices for indices, _ in plan.epoch(rng)]
        return sorted(map(tuple, np.concatenate(of_batches)))

    assert rows(0, None) == rows(0, np.random.default_rng(5)) == rows(0, None) != rows(1, None)


def shortest_that_holds(tokens: int, lengths: list[int]) -> int:
    return min(length for length in lengths if length >= tokens)


def count_positions(lengths: np.ndarray, row_lengths: list[int]) -> int:
    """Returns the positions for tokens, when each example has a row of the shortest length that
    holds it."""
    return sum(shortest_that_holds(tokens, row_lengths) for tokens in lengths.tolist())


@pytest.mark.parametrize("max_shapes", [1, 2, 3, 4, 20])
def test_proposed_shapes_are_the_best_of_all(max_shapes):
    for seed in range(5):
        lengths = sentences(300, seed)[:, 0].clip(max=80)
        shapes = propose_shapes(lengths, 1024, max_shapes, multiple_of_batch=4)

        assert len(shapes) <= max_shapes
        for size, length in shapes:
            assert size % 4 == 0
            assert length % 8 == 0
            assert size * length <= 1024 < (size + 4) * length

        top = math.ceil(int(lengths.max()) / 8) * 8
        best = math.inf
        for number in range(min(max_shapes, 10)):
            for others in itertools.combinations(range(8, top, 8), number):
                best = min(best, count_positions(lengths, [*others, top]))
        assert count_positions(lengths, [length for _, length in shapes]) == best
        assert Buckets(lengths, shapes).dropped == 0


def test_proposed_shapes_of_two_sides_hold_the_longer_one():
    lengths = sentences(500)
    shapes = propose_shapes(lengths, 4096, 3)

    assert len(shapes) == 3
    for _, source, target in shapes:
        assert source == target
    of_longer_side = propose_shapes(lengths.max(axis=1), 4096, 3)
    assert [shape[1:2] for shape in shapes] == [shape[1:] for shape in of_longer_side]
    assert Buckets(lengths, shapes).dropped == 0


def test_no_shape_is_proposed_that_no_example_needs():
    shapes = propose_shapes([8, 8, 16], 64, 5, multiple_of_batch=1)
    assert shapes == [(8, 8), (4, 16)]


@pytest.mark.parametrize(
    "lengths, tokens_per_batch, max_shapes, options, message",
    [
        (
            [3, 30],
            255,
            2,
            {},
            "tokens_per_batch is 255, but 8 examples of the greatest length, 30, take 256",
        ),
        ([3], 64, 0, {}, "max_shapes is 0; expected 1 or more"),
        ([3], 0, 1, {}, "tokens_per_batch is 0; expected 1 or more"),
        ([3], 64, 1, {"multiple_of_length": -8}, "multiple_of_length is -8"),
        ([], 64, 1, {}, "there are no examples"),
    ],
)
def test_bad_numbers_for_a_proposal_are_named(
    lengths, tokens_per_batch, max_shapes, options, message
):
    with pytest.raises(InputError, match=message):
        propose_shapes(lengths, tokens_per_batch, max_shapes, **options)


@pytest.mark.parametrize(
    "lengths, shapes, message",
    [
        ([[5, 5]], [], "no shapes are given; expected one or more, such as 256x64x64"),
        ([5], [(8, 16), (8, 0)], "shape 8x0 has the number 0; expected 1 or more"),
        ([[5, 5]], [(8, 16)], "shape 8x16 has 2 numbers; expected batchxlength_1xlength_2"),
        (
            [30, 20],
            [(8, 16), (8, 8)],
            "none of the 2 examples fits into 8x16, 8x8; .* has length 20",
        ),
        ([[9, 30]], [(8, 16, 16)], "none of the 1 examples fits into 8x16x16; .* has length 9x30"),
        ([], [(8, 16)], "there are no examples"),
        ([[5, 5], [6, 0]], [(8, 16, 16)], "example 1 has length 0; expected 1 or more tokens"),
    ],
)
def test_bad_input_is_named(lengths, shapes, message):
    with pytest.raises(InputError, match=message):
        Buckets(lengths, shapes)
    if len(shapes) == 1:
        with pytest.raises(InputError, match=message):
            pack(lengths, shapes[0])


def planned_epoch(plan: Shuffled, lengths: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Returns the lengths of the examples of each batch, and the length of its rows."""
    batches = []
    for indices, (row_length,) in plan.epoch(np.random.default_rng(0)):
        batches.append((lengths[indices[indices != PADDING]], row_length))
    return batches


@pytest.mark.parametrize("grouped", [False, True])
def test_shuffled_batches_have_the_shortest_length(grouped):
    lengths = np.random.default_rng(3).integers(3, 100, 1000)
    plan = Shuffled(lengths, 16, (32, 64, 128), grouped)
    batches = planned_epoch(plan, lengths)

    assert len(plan) == 63
    assert plan.shapes == [(16, 32), (16, 64), (16, 128)]
    for example_lengths, row_length in batches:
        assert row_length == shortest_that_holds(example_lengths.max(), [32, 64, 128])

    # Neighbours in a sorted group are alike; examples drawn at random are not.
    difference = np.mean([np.ptp(example_lengths) for example_lengths, _ in batches])
    if grouped:
        assert difference < 8
    else:
        assert difference > 60

    positions = sum(16 * row_length for _, row_length in batches)
    assert plan.padding == pytest.approx(1 - lengths.sum() / positions)


def test_a_shuffled_plan_refuses_examples_that_are_too_long():
    lengths = np.random.default_rng(3).integers(3, 100, 1000)
    with pytest.raises(InputError, match="99 tokens; the longest batches have 64"):
        Shuffled(lengths, 16, (32, 64))
