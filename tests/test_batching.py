"""data/batching.py: every example once, in few shapes, with little padding."""

import itertools

import numpy as np
import pytest

from data.batching import PADDING, Buckets, Shuffled
from data.packing import pack, propose_shapes
from errors import InputError


def sentences(size: int, seed: int = 0) -> np.ndarray:
    """[size, 2] lengths as of sentence pairs: two thirds of them 7 to 33 tokens, both sides much alike."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(np.log(15), 0.8, size))
    return np.clip(np.rint(np.stack([source, source * np.exp(rng.normal(0, 0.2, size))], 1)), 2, 200).astype(np.int32)


def examples_of(epoch) -> np.ndarray:
    """All indices in an epoch, without the padding."""
    indices = np.concatenate([np.ravel(indices) for indices, _ in epoch])
    return indices[indices != PADDING]


def as_lists(epoch) -> list:
    return [(indices.tolist(), lengths) for indices, lengths in epoch]


SHAPES = [(8, 64, 64), (16, 32, 32), (4, 128, 100), (32, 16, 16)]


LENGTHS = sentences(1000)
PLANS = {
    "buckets": lambda: Buckets(LENGTHS, SHAPES),
    "packed": lambda: pack(LENGTHS, SHAPES[0]),
    "shuffled": lambda: Shuffled(LENGTHS[:, 0], 16, (16, 64, 200)),
    "grouped": lambda: Shuffled(LENGTHS[:, 0], 16, (16, 64, 200), grouped=True),
}


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_an_epoch_has_every_example_that_fits_once_in_an_order_of_the_generator_alone(make):
    plan = make()
    longest = np.max([shape[1:] for shape in plan.shapes], axis=0)
    fits = (LENGTHS[:, : len(longest)] <= longest).all(axis=1)
    assert len(longest) == 1 or 0 < plan.dropped == (~fits).sum()
    assert all(indices.dtype == np.int64 for indices, _ in plan.epoch(None))
    in_order, first, second = (
        as_lists(plan.epoch(seed and np.random.default_rng(seed))) for seed in (None, (7, 0), (7, 1))
    )
    for epoch in (in_order, first, second):
        assert len(epoch) == len(plan) and sorted(examples_of(epoch)) == np.flatnonzero(fits).tolist()
        assert {(len(indices), *lengths) for indices, lengths in epoch} <= {*plan.shapes}
    assert sorted(map(str, first)) != sorted(map(str, second)) and as_lists(plan.epoch(None)) == in_order != first
    epoch = make().epoch(np.random.default_rng((7, 0)))  # without the epochs before
    assert as_lists(epoch) == first
    assert as_lists([epoch[position] for position in (len(epoch) - 1, 0, 3, -1)]) == [first[i] for i in (-1, 0, 3, -1)]
    with pytest.raises(IndexError):
        epoch[len(epoch)]
    changes = sum(one != other for (_, one), (_, other) in itertools.pairwise(first))
    assert len(plan.shapes) == 1 or changes > len(plan) / 4, "the order of the shapes is permuted, too"


EQUAL = [[10, 10], [20, 10], [10, 20]]


@pytest.mark.parametrize(
    "lengths, shapes, expected, padding",
    [
        # Without a generator buckets are in order of length, and the last batch is filled with -1. Two batches of 3 x 4
        # and one of 2 x 9 are 42 places; the tokens are 3 + 8 + 2 + 4 + 9 + 1 = 27.
        ([3, 8, 2, 4, 9, 99, 1], [(2, 9), (3, 4)], [([1, 4], (9,)), ([6, 2, 0], (4,)), ([3, -1, -1], (4,))], 15 / 42),
        # A column of lengths is a list of them. Shapes of as many places each, the long one first: the rows decide.
        ([[3], [10]], [(2, 16), (4, 8)], [([1, -1], (16,)), ([0, -1, -1, -1], (8,))], 1 - 13 / 64),
        # A shape that holds nothing has no batches.
        ([5, 6, 7], [(2, 8), (2, 4), (2, 100)], [([0, 1], (8,)), ([2, -1], (8,))], 14 / 32),
        # The first of equally long shapes is taken.
        (EQUAL, [(1, 10, 20), (1, 20, 10)], [([0], (10, 20)), ([2], (10, 20)), ([1], (20, 10))], 10 / 90),
        (EQUAL, [(1, 20, 10), (1, 10, 20)], [([0], (20, 10)), ([1], (20, 10)), ([2], (10, 20))], 10 / 90),
        # 2 x (4 + 6) places; the example that is dropped has no share.
        ([[3, 5], [5, 5]], [(2, 4, 6)], [([0, -1], (4, 6))], 12 / 20),
    ],
)
def test_buckets_are_what_a_hand_makes(lengths, shapes, expected, padding):
    plan = Buckets(np.array(lengths, np.uint8), shapes)
    assert as_lists(plan.epoch(None)) == expected
    assert plan.dropped == len(lengths) - len(examples_of(plan.epoch(None))) and plan.shapes == shapes
    assert plan.padding == pytest.approx(padding)


@pytest.mark.parametrize("longest", [(64, 64), (32, 100), (128, 128)])
def test_packed_rows_are_nearly_full(longest):
    lengths = sentences(20_000)
    lengths = lengths[(lengths <= longest).all(axis=1)]
    plan, tokens = pack(lengths, (8, *longest)), 0
    assert len(plan) == -(-plan.rows // 8)
    for indices, _ in plan.epoch(None):
        assert indices.shape == (8, plan.most)
        taken = indices != PADDING
        assert (np.diff(taken.astype(int), axis=1) <= 0).all(), "padding comes after a row's examples"
        of_rows = (lengths[indices] * taken[..., None]).sum(axis=1)
        assert (of_rows <= longest).all()
        tokens += of_rows.sum()
    assert plan.padding == pytest.approx(1 - tokens / (len(plan) * 8 * sum(longest)))
    assert plan.rows < 1.03 * (lengths.sum(axis=0) / longest).max()  # as few as possible
    if longest[0] == longest[1]:
        assert plan.padding < 0.06
        assert plan.padding < Buckets(lengths, propose_shapes(lengths, 8 * longest[0], 4)).padding / 4


def test_small_packings_are_what_a_hand_makes():
    plan = pack([6, 4, 5, 5, 10, 11], (2, 10))
    rows = {frozenset(row) - {PADDING} for rows, _ in plan.epoch(None) for row in rows.tolist()}
    assert rows == set(map(frozenset, ({0, 1}, {2, 3}, {4}, set())))
    assert (plan.rows, plan.most, plan.dropped, len(plan)) == (3, 2, 1, 2)
    assert plan.padding == pytest.approx(1 - 30 / 40)
    # The other side decides as well: no two of these fit together.
    assert pack([[2, 9], [2, 9], [2, 9]], (1, 10, 10)).rows == 3


def test_epochs_keep_the_rows_and_the_seed_decides_them():
    lengths = sentences(3000)

    def rows(seed, rng):
        return sorted(map(tuple, np.concatenate([r for r, _ in pack(lengths, (8, 64, 64), seed=seed).epoch(rng)])))

    assert rows(0, None) == rows(0, np.random.default_rng(5)) == rows(0, None) != rows(1, None)


def places(lengths: np.ndarray, shapes) -> int:
    """Of all rows, when each example has a row of the shortest shape that holds it."""
    longest = sorted(shape[1] for shape in shapes)
    return sum(min(length for length in longest if length >= example) for example in lengths.tolist())


@pytest.mark.parametrize("max_shapes", [1, 2, 3, 4, 20])
def test_proposed_shapes_are_the_best_of_all(max_shapes):
    for seed in range(5):
        lengths = sentences(300, seed)[:, 0].clip(max=80)
        shapes = propose_shapes(lengths, 1024, max_shapes, multiple_of_batch=4)
        assert len(shapes) <= max_shapes
        assert all(size % 4 == 0 and length % 8 == 0 for size, length in shapes)
        assert all(size * length <= 1024 < (size + 4) * length for size, length in shapes)
        top = -(-int(lengths.max()) // 8) * 8
        choices = [few for k in range(min(max_shapes, 10)) for few in itertools.combinations(range(8, top, 8), k)]
        best = min(places(lengths, [(1, length) for length in (*choice, top)]) for choice in choices)
        assert places(lengths, shapes) == best
        assert Buckets(lengths, shapes).dropped == 0


def test_proposed_shapes_of_two_sides_hold_the_longer_one():
    lengths = sentences(500)
    shapes = propose_shapes(lengths, 4096, 3)
    assert len(shapes) == 3 and all(source == target for _, source, target in shapes)
    assert [shape[1:2] for shape in shapes] == [shape[1:] for shape in propose_shapes(lengths.max(axis=1), 4096, 3)]
    assert Buckets(lengths, shapes).dropped == 0


def test_no_shape_is_proposed_that_no_example_needs_and_bad_numbers_are_named():
    assert propose_shapes([8, 8, 16], 64, 5, multiple_of_batch=1) == [(8, 8), (4, 16)]
    for arguments, options, message in (
        (([3, 30], 255, 2), {}, "tokens_per_batch is 255, but 8 examples of the greatest length, 30, take 256"),
        (([3], 64, 0), {}, "max_shapes is 0; expected 1 or more"),
        (([3], 0, 1), {}, "tokens_per_batch is 0; expected 1 or more"),
        (([3], 64, 1), {"multiple_of_length": -8}, "multiple_of_length is -8"),
        (([], 64, 1), {}, "there are no examples"),
    ):
        with pytest.raises(InputError, match=message):
            propose_shapes(*arguments, **options)


@pytest.mark.parametrize(
    "lengths, shapes, message",
    [
        ([[5, 5]], [], "no shapes are given; expected one or more, such as 256x64x64"),
        ([5], [(8, 16), (8, 0)], "shape 8x0 has the number 0; expected 1 or more"),
        ([[5, 5]], [(8, 16)], "shape 8x16 has 2 numbers; expected batchxlength_1xlength_2"),
        ([30, 20], [(8, 16), (8, 8)], "none of the 2 examples fits into 8x16, 8x8; .* has length 20"),
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


@pytest.mark.parametrize("grouped", [False, True])
def test_shuffled_batches_have_the_shortest_length_that_holds_them(grouped):
    lengths = np.random.default_rng(3).integers(3, 100, 1000)
    plan = Shuffled(lengths, 16, (32, 64, 128), grouped)
    assert len(plan) == 63 and plan.shapes == [(16, 32), (16, 64), (16, 128)]
    batches = [
        (lengths[indices[indices != PADDING]], size) for indices, (size,) in plan.epoch(np.random.default_rng(0))
    ]
    for of_batch, size in batches:
        assert size == min(each for each in (32, 64, 128) if each >= of_batch.max())
    # Neighbours in a sorted group are alike; examples drawn at random are not.
    spread = np.mean([np.ptp(of_batch) for of_batch, _ in batches])
    assert spread < 8 if grouped else spread > 60
    assert plan.padding == pytest.approx(1 - lengths.sum() / sum(16 * size for _, size in batches))
    with pytest.raises(InputError, match="99 tokens; the longest batches have 64"):
        Shuffled(lengths, 16, (32, 64))
