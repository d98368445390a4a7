"""Labels of own examples: what is found, encoded, held out and scored."""

import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics

from data import targets
from errors import InputError

CLASSES = targets.Target("classes", ("a", "b", "c"))
TAGS = targets.Target("multilabel", ("a", "b", "c"))
NUMBER = targets.Target("regression", ("price",))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["2", "10", "1"], ("1", "2", "10")),
        (["2", "10", "x"], ("10", "2", "x")),
        ([5.0, 1.0, 1.5], ("1", "1.5", "5")),
        ([3, 1], ("1", "3")),
        ([True, False], ("false", "true")),
        ([" good", "bad "], ("bad", "good")),
    ],
)
def test_classes_are_named_by_their_values(values, names):
    assert targets.find(values).names == names


def test_labels_are_cut_at_the_separator():
    values = ["red| big", "", "red", "small||"]
    target = targets.find(values, "multilabel", "|")
    assert target == targets.Target("multilabel", ("big", "red", "small"))
    encoded = targets.encode(values, target, "|")
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_labels_may_be_lists():
    values = [["b", "a"], [], ("b",), [2]]
    target = targets.find(values, "multilabel")
    assert target.names == ("2", "a", "b")
    encoded = targets.encode(values, target)
    assert encoded.tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


def test_a_regression_has_numbers_and_its_column():
    target = targets.find(["1.5", 2, 3.0], "regression", column="price")
    assert target == NUMBER
    encoded = targets.encode(["1.5", 2, 3.0], target)
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [1.5, 2, 3]


def test_classes_are_encoded_as_numbers():
    encoded = targets.encode(["c", "a", "c"], CLASSES)
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [2, 0, 2]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["a", ""], {}, "x.csv, row 2 has no label"),
        ([1.0, float("nan")], {}, "x.csv, row 2 has no label"),
        (["a", None], {}, "x.csv, row 2 has no label"),
        (["a", "a"], {}, "one class in stars, 'a'"),
        ([["a"], ["b"]], {}, "--objective multilabel"),
        (["1", "1.0", "2"], {}, "the classes 1, 1.0 in stars, which are the same number"),
        (list(range(51)), {}, "51 different numbers in stars.*--objective regression"),
        ([*range(51), "N/A"], {}, "51 different numbers.*regression .after .* rows with N/A"),
        (["5", "5.0", "unknown"], {}, "the classes 5, 5.0 in stars, which are the same number"),
        (["a", "b"], {"objective": "ranking"}, "objective is 'ranking'; expected one of classes"),
        (["a", "b"], {"objective": "multilabel"}, "x.csv, row 1 .*--separator"),
        ([1, 2], {"objective": "multilabel"}, "x.csv, row 1 has 1 as its labels"),
        ([["a"], None], {"objective": "multilabel"}, "row 2 has no label.*an empty list"),
        ([["a", ""]], {"objective": "multilabel"}, "row 1 has an empty label"),
        ([[], []], {"objective": "multilabel"}, "no label in any row of stars"),
        ([1, "many"], {"objective": "regression"}, "x.csv, row 2 has the label 'many'"),
        ([1, "inf"], {"objective": "regression"}, "x.csv, row 2 has the label 'inf'"),
        ([1, "1e39"], {"objective": "regression"}, "x.csv, row 2 .*1e39.*float32 cannot hold"),
        ([1, True], {"objective": "regression"}, "x.csv, row 2 has the label True"),
        ([2, 2.0], {"objective": "regression"}, "one value as stars, 2, in all 2 rows"),
        ([], {}, "x.csv has no examples"),
    ],
)
def test_what_cannot_be_learnt_is_refused(values, options, message):
    with pytest.raises(InputError, match=message):
        targets.find(values, where="x.csv", column="stars", **options)


def test_fifty_numbers_and_more_texts_are_classes():
    assert len(targets.find(list(range(50))).names) == 50
    assert len(targets.find([f"intent {number}" for number in range(150)]).names) == 150


def test_a_class_that_training_lacks_is_refused():
    with pytest.raises(InputError, match="dev.csv, row 2 has the class 'd'.*it has a, b, c"):
        targets.encode(["a", "d"], CLASSES, where="dev.csv")
    with pytest.raises(InputError, match="dev.csv line 3 has the label 'd'"):
        targets.encode([[], ["d"]], TAGS, where=lambda row: f"dev.csv line {row + 2}")


def test_long_lists_of_names_are_cut_in_messages():
    assert targets.listed(("a", "b")) == "a, b"
    many = [str(number) for number in range(12)]
    assert targets.listed(many) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … (12 in all)"


# Held-out examples


def texts(number):
    return [f"sentence {index}" for index in range(number)]


def test_a_tenth_of_each_class_is_held_out():
    encoded = np.array([0] * 100 + [1] * 50 + [2] * 20)
    held = targets.held_out(texts(170), encoded, CLASSES)
    assert held.dtype == bool
    assert np.bincount(encoded[held]).tolist() == [10, 5, 2]


def test_the_split_does_not_depend_on_the_order():
    rng = np.random.default_rng(0)
    order = rng.permutation(300)
    keys = texts(300)
    shuffled_keys = [keys[index] for index in order]
    tags = (rng.random((300, 3)) < 0.3).astype(np.float32)
    cases = [
        (rng.integers(3, size=300), CLASSES),
        (tags, TAGS),
        (rng.random(300).astype(np.float32), NUMBER),
    ]
    for encoded, target in cases:
        held = targets.held_out(keys, encoded, target)
        shuffled = targets.held_out(shuffled_keys, encoded[order], target)
        assert 25 <= held.sum() <= 35
        np.testing.assert_array_equal(shuffled, held[order])


def test_the_split_is_that_of_the_hash():
    # Written down: another release must not split a user's rows in another way.
    held = targets.held_out(texts(30), np.zeros(30, np.float32), NUMBER)
    assert np.flatnonzero(held).tolist() == [10, 14, 17]


def test_two_examples_of_a_class_are_on_both_sides():
    encoded = np.array([0] * 40 + [1, 1, 2])
    held = targets.held_out(texts(43), encoded, CLASSES)
    assert np.bincount(encoded[held], minlength=3).tolist() == [4, 1, 0]
    assert targets.only_in_training(held, encoded, CLASSES) == ("c",)


def test_equal_keys_of_a_class_are_on_one_side():
    keys = [f"sentence {index // 3}" for index in range(90)]
    encoded = np.zeros(90, np.int64)
    held = targets.held_out(keys, encoded, CLASSES)
    assert held.sum() == 9
    sides = held.reshape(30, 3)
    assert (sides.all(1) | ~sides.any(1)).all()


def test_a_frequent_sentence_is_not_held_out():
    keys = ["same"] * 90 + texts(10)
    held = targets.held_out(keys, np.zeros(100, np.int64), CLASSES)
    assert not held[:90].any()
    assert held.sum() == 10
    few = targets.held_out(["same"] * 90 + ["other"], np.zeros(91, np.int64), CLASSES)
    assert np.flatnonzero(few).tolist() == [90]


def test_rare_labels_are_on_both_sides():
    rng = np.random.default_rng(1)
    tags = np.zeros((400, 3), np.float32)
    tags[:, 0] = rng.random(400) < 0.5
    tags[[3, 70], 1] = 1  # a label of two examples
    tags[5, 2] = 1  # and one of a single example
    held = targets.held_out(texts(400), tags, TAGS)
    assert tags[held, 1].sum() == 1
    assert tags[~held, 1].sum() == 1
    assert targets.only_in_training(held, tags, TAGS) == ("c",)
    assert 35 <= held.sum() <= 45


def test_different_sets_of_labels_are_held_out_too():
    # Each example has a set of labels of its own.
    tags = np.array([[number >> bit & 1 for bit in range(8)] for number in range(256)], np.float32)
    target = targets.Target("multilabel", tuple("abcdefgh"))
    held = targets.held_out(texts(256), tags, target)
    assert held.sum() == 26
    assert tags[held].any(0).all()
    assert tags[~held].any(0).all()


def test_classes_of_one_example_cannot_be_split():
    with pytest.raises(InputError, match="3 examples cannot be split"):
        targets.held_out(texts(3), np.arange(3), CLASSES)


# Metrics


def test_scores_of_classes_are_those_of_scikit_learn():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(50, 3)).astype(np.float32)
    labels = rng.integers(3, size=50)
    predictions = logits.argmax(1)
    scores = targets.score(CLASSES, logits, labels)
    assert tuple(scores) == CLASSES.metrics
    assert scores["accuracy"] == np.mean(predictions == labels)
    assert scores["f1_macro"] == metrics.f1_score(labels, predictions, average="macro")


def test_scores_of_labels_are_those_of_scikit_learn():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(50, 3)).astype(np.float32)
    labels = (rng.random((50, 3)) < 0.4).astype(np.float32)
    labels[:, 1] = 0  # does not occur
    probabilities = special.expit(logits)
    predictions = probabilities > 0.5
    scores = targets.score(TAGS, logits, labels)
    assert tuple(scores) == TAGS.metrics
    assert scores["f1_micro"] == metrics.f1_score(labels, predictions, average="micro")
    macro = metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert scores["f1_macro"] == macro
    precisions = []
    for label in (0, 2):
        precision = metrics.average_precision_score(labels[:, label], probabilities[:, label])
        precisions.append(precision)
    assert scores["average_precision"] == pytest.approx(np.mean(precisions))


def test_a_single_label_is_scored_as_one_and_not_as_two_classes():
    one = targets.Target("multilabel", ("urgent",))
    labels = np.array([[1], [1], [0], [0]], np.float32)
    never = targets.score(one, np.full((4, 1), -1, np.float32), labels)
    once = targets.score(one, np.array([[1], [-1], [1], [-1]], np.float32), labels)
    assert never["f1_micro"] == never["f1_macro"] == 0
    assert once["f1_micro"] == once["f1_macro"] == metrics.f1_score([1, 1, 0, 0], [1, 0, 1, 0])


def test_labels_that_are_not_there_do_not_lower_the_score():
    labels = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    scores = targets.score(TAGS, 2 * labels - 1, labels)
    assert scores == {"f1_micro": 1.0, "f1_macro": 1.0, "average_precision": 1.0}


def test_scores_of_numbers_are_those_of_scipy():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(50, 1))
    labels = logits[:, 0] + rng.normal(size=50)
    scores = targets.score(NUMBER, logits, labels)
    assert tuple(scores) == NUMBER.metrics
    assert scores["pearson"] == pytest.approx(stats.pearsonr(logits[:, 0], labels)[0])
    assert scores["spearman"] == pytest.approx(stats.spearmanr(logits[:, 0], labels)[0])
    assert scores["mse"] == pytest.approx(np.mean((logits[:, 0] - labels) ** 2))
    constant = targets.score(NUMBER, np.ones((50, 1)), labels)
    assert constant["pearson"] == constant["spearman"] == 0


def test_scores_of_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="expected one row or more of 3 outputs"):
        targets.score(CLASSES, np.zeros((4, 2)), np.zeros(4, int))
    with pytest.raises(ValueError, match="expected one row or more of 3 outputs"):
        targets.score(TAGS, np.zeros((4, 3)), np.zeros(4))
    with pytest.raises(ValueError, match="no example has a label"):
        targets.score(TAGS, np.zeros((4, 3)), np.zeros((4, 3)))


@pytest.mark.parametrize("objective", ["classes", "multilabel"])
def test_an_object_is_no_label(objective):
    """Its text would be the name of a class."""
    value = {"v": "good"}
    values = [[value], ["bad"]] if objective == "multilabel" else [value, "bad"]
    with pytest.raises(InputError, match="row 1 has {'v': 'good'} as a label; expected a text"):
        targets.find(values, objective)


@pytest.mark.filterwarnings("error")
def test_a_number_that_float32_cannot_hold_warns_of_nothing():
    with pytest.raises(InputError, match="row 2 has the label '1e300', which float32 cannot hold"):
        targets.find(["1", "1e300"], "regression")


def test_numbers_that_are_all_different_get_the_advice():
    """Fewer than MOST_NUMBERS, so that they are not refused as classes."""
    target = targets.find(["1.5", "2.5", "4"])
    encoded = targets.encode(["1.5", "2.5", "4"], target)
    with pytest.raises(InputError, match="where the labels are a quantity, --objective regression"):
        targets.held_out(["a", "b", "c"], encoded, target)
