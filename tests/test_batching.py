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
    indices = np.concatenate([indices.reshape(-1) for indices, _ in epoch])
    return indices[indices != PADDING]


def as_lists(epoch) -> list:
    return [(indices.tolist(), lengths) for indices, lengths in epoch]


SHAPES = [(8, 64, 64), (16, 32, 32), (4, 128, 100), (32, 16, 16)]


@pytest.mark.parametrize("seed", [None, 0])
def test_an_epoch_has_every_example_that_fits_once_in_the_smallest_shape_that_holds_it(seed):
    lengths = sentences(1000)
    plan = Buckets(lengths, SHAPES)
    epoch = plan.epoch(None if seed is None else np.random.default_rng(seed))
    fits = (lengths <= (128, 100)).all(axis=1)
    assert 0 < plan.dropped == (~fits).sum()
    assert sorted(examples_of(epoch)) == np.flatnonzero(fits).tolist()
    assert len(plan) == len(epoch) == len(list(epoch))
    for indices, longest in epoch:
        assert indices.dtype == np.int64 and (len(indices), *longest) in SHAPES
        of_batch = lengths[indices[indices != PADDING]]
        assert (of_batch <= longest).all()
        smaller = [shape[1:] for shape in SHAPES if sum(shape[1:]) < sum(longest)]
        assert not any((of_batch <= shape).all(axis=1).any() for shape in smaller)


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
        ([[4, 6], [4, 6]], [(2, 4, 6)], [([0, 1], (4, 6))], 0),
    ],
)
def test_buckets_are_what_a_hand_makes(lengths, shapes, expected, padding):
    plan = Buckets(np.array(lengths, np.uint8), shapes)
    assert as_lists(plan.epoch(None)) == expected
    assert plan.dropped == len(lengths) - len(examples_of(plan.epoch(None))) and plan.shapes == shapes
    assert plan.padding == pytest.approx(padding)


@pytest.mark.parametrize(("make", "shapes"), [(Buckets, SHAPES), (pack, SHAPES[0])], ids=["buckets", "packed"])
def test_epochs_are_permutations_that_depend_on_the_generator_alone(make, shapes):
    plan = make(sentences(1000), shapes)
    first, second = (as_lists(plan.epoch(np.random.default_rng((7, epoch)))) for epoch in (0, 1))
    assert len(first) == len(second) == len(plan)
    assert first != second and sorted(map(str, first)) != sorted(map(str, second))
    again = make(sentences(1000), shapes).epoch(np.random.default_rng((7, 0)))  # without the epochs before
    assert as_lists(again) == first
    assert as_lists(plan.epoch(None)) == as_lists(plan.epoch(None)) != first
    epoch = plan.epoch(np.random.default_rng((7, 0)))
    assert as_lists([epoch[position] for position in (len(epoch) - 1, 0, 3, -1)]) == [first[i] for i in (-1, 0, 3, -1)]
    with pytest.raises(IndexError):
        epoch[len(epoch)]
    shapes = [longest for _, longest in first]
    changes = sum(one != other for one, other in itertools.pairwise(shapes))
    assert len(set(shapes)) == 1 or changes > len(plan) / 4, "the order of the shapes is permuted, too"


@pytest.mark.parametrize("longest", [(64, 64), (32, 100), (200, 200)])
def test_packed_rows_hold_every_example_once_and_none_too_many(longest):
    lengths = sentences(2000)
    plan = pack(lengths, (8, *longest))
    fits = (lengths <= longest).all(axis=1)
    assert plan.dropped == (~fits).sum()
    for epoch in (plan.epoch(None), plan.epoch(np.random.default_rng(0))):
        assert len(epoch) == len(plan) == -(-plan.rows // 8)
        assert sorted(examples_of(epoch)) == np.flatnonzero(fits).tolist()
        tokens = 0
        for indices, shape in epoch:
            assert indices.shape == (8, plan.most) and indices.dtype == np.int64 and shape == longest
            taken = indices != PADDING
            assert (np.diff(taken.astype(int), axis=1) <= 0).all(), "padding comes after a row's examples"
            of_rows = (lengths[indices] * taken[..., None]).sum(axis=1)
            assert (of_rows <= longest).all()
            tokens += of_rows.sum()
        assert plan.padding == pytest.approx(1 - tokens / (len(plan) * 8 * sum(longest)))


@pytest.mark.parametrize("longest", [(64, 64), (128, 128)])
def test_packing_is_close_to_what_is_possible(longest):
    lengths = sentences(20_000)
    lengths = lengths[(lengths <= longest).all(axis=1)]
    plan = pack(lengths, (8, *longest))
    assert plan.rows < 1.03 * (lengths.sum(axis=0) / longest).max()
    assert plan.padding < 0.06
    buckets = Buckets(lengths, propose_shapes(lengths, 8 * longest[0], 4))
    assert plan.padding < buckets.padding / 4


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
    proposed = [propose_shapes(lengths, 1024, count, multiple_of_batch=4) for count in (1, 2, 4)]
    paddings = [Buckets(lengths, shapes).padding for shapes in proposed]
    assert paddings == sorted(paddings, reverse=True) and paddings[2] < 0.6 * paddings[0]


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
        ([5], [], "no shapes are given; expected one or more, such as 256x64"),
        ([[5, 5]], [], "such as 256x64x64"),
        ([5], [(8, 16), (8, 0)], "shape 8x0 has the number 0; expected 1 or more"),
        ([5], [(-8, 16)], "shape -8x16 has the number -8"),
        ([[5, 5]], [(8, 16)], "shape 8x16 has 2 numbers; expected batchxlength_1xlength_2"),
        ([30, 20], [(8, 16), (8, 8)], "none of the 2 examples fits into 8x16, 8x8; .* has length 20"),
        ([[9, 30]], [(8, 16, 16)], "none of the 1 examples fits into 8x16x16; .* has length 9x30"),
        ([], [(8, 16)], "there are no examples"),
        (np.empty((0, 2), np.int32), [(8, 16, 16)], "there are no examples"),
        ([5, 0], [(8, 16)], "example 1 has length 0; expected 1 or more tokens"),
        ([[5, 5], [6, -7]], [(8, 16, 16)], "example 1 has length -7"),
    ],
)
def test_bad_input_is_named(lengths, shapes, message):
    with pytest.raises(InputError, match=message):
        Buckets(lengths, shapes)
    if len(shapes) == 1:
        with pytest.raises(InputError, match=message):
            pack(lengths, shapes[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_shuffled_batches_have_every_example_once_in_the_shortest_length_that_holds_them(grouped):
    lengths = np.random.default_rng(3).integers(3, 100, 1000)
    plan = Shuffled(lengths, 16, (32, 64, 128), grouped)
    assert len(plan) == 63 and plan.shapes == [(16, 32), (16, 64), (16, 128)]
    epochs = [[plan.epoch(np.random.default_rng(seed))[i] for i in range(63)] for seed in (1, 1, 2)]
    for epoch in epochs:
        indices = np.concatenate([part for part, _ in epoch])
        assert sorted(indices[indices != PADDING].tolist()) == list(range(1000)) and (indices == PADDING).sum() == 8
        for part, (size,) in epoch:
            assert size == min(each for each in (32, 64, 128) if each >= lengths[part[part >= 0]].max())
    first, again, other = ([part.tolist() for part, _ in epoch] for epoch in epochs)
    assert first == again != other
    # Neighbours in a sorted group are alike; examples drawn at random are not.
    spreads = [np.ptp(lengths[part[part >= 0]]) for part, _ in epochs[0]]
    assert (np.mean(spreads) < 8) == grouped and (np.mean(spreads) > 60) != grouped
    places = sum(16 * size for _, (size,) in plan.epoch(np.random.default_rng(0)))
    assert plan.padding == pytest.approx(1 - lengths.sum() / places)
    with pytest.raises(InputError, match="99 tokens; the longest batches have 64"):
        Shuffled(lengths, 16, (32, 64))
