"""Finds, encodes, splits and scores the labels of a user's own examples, of any kind of data.

    target = find(labels, "classes", "", "reviews.csv")      # Target("classes", ("1", "2", …))
    encoded = encode(labels, target, "", "reviews.csv")      # int64 [n]
    held = held_out(texts, encoded, target)                  # bool [n]: a tenth, for evaluation
    score(target, logits, encoded[held])                     # {"accuracy": …, "f1_macro": …}

A label is a value as a file has it: text, a number, a truth value, or a list of these. There are
three objectives:

    classes      each example has one of several classes; the default
    multilabel   each example has any number of labels: a list, or text with a separator
    regression   each example has a number
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from errors import InputError

OBJECTIVES = ("classes", "multilabel", "regression")

METRICS = {
    "classes": ("accuracy", "f1_macro"),
    "multilabel": ("f1_micro", "f1_macro", "average_precision"),
    "regression": ("pearson", "spearman", "mse"),
}
MOST_NUMBERS = 50  # different numbers that may be classes; more are a quantity
HELD_OUT = 10  # one in so many examples is held out
LISTED = 10  # names that a message lists
LARGEST = float(np.finfo(np.float32).max)  # as a float, or a comparison would cast and warn

# Where rows stand, for messages: a name, such as the file's, to which the row is added; or a
# function that returns the place of a 0-based row, such as "reviews.csv line 7"; for None, of all.
Where = str | Callable[[int | None], str]


@dataclass(frozen=True)
class Target:
    """What a model learns to tell.

    Attributes:
        objective: one of OBJECTIVES.
        names: of the classes or labels, in the order of the model's outputs; in a regression, of
            the column.
    """

    objective: str
    names: tuple[str, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what `score` returns."""
        return METRICS[self.objective]


# From values to a target


def find(
    values: Sequence[Any],
    objective: str = "classes",
    separator: str = "",
    where: Where = "the labels",
    column: str = "label",
) -> Target:
    """Finds the classes or labels of a training split.

    A class is named by the text of its value, without blanks around it: "positive", "5" for 5 and
    for 5.0, "true" for True. Names are sorted as numbers where all are numbers, else as text.

    Args:
        values: the labels of the training split.
        objective: one of OBJECTIVES.
        separator: between the labels of a text, in multilabel; "": each label is a list.
        where: has these values, for messages.
        column: of the values, for messages and as the name of a regression.
    Raises:
        InputError: an unknown objective; a missing label, with its row; labels of another
            objective; fewer than two classes, no label, or one number only; more than MOST_NUMBERS
            different numbers as classes.
    """
    if objective not in OBJECTIVES:
        raise InputError(f"objective is {objective!r}; expected one of {', '.join(OBJECTIVES)}")
    if not len(values):
        raise InputError(f"{_place(where)} has no examples; expected rows with a {column}")

    if objective == "regression":
        numbers = _numbers(values, where)
        if len(values) > 1 and np.ptp(numbers) == 0:
            raise InputError(
                f"{_place(where)} has one value as {column}, {numbers[0]:g}, in all "
                f"{len(values):,} rows; expected different numbers"
            )
        return Target(objective, (column,))

    names = set()
    for labels in _label_sets(values, objective, separator, where):
        names.update(labels)
    _check_names(names, objective, where, column)
    return Target(objective, _sorted_names(names))


def encode(
    values: Sequence[Any], target: Target, separator: str = "", where: Where = "the labels"
) -> np.ndarray:
    """Encodes labels for a model and `score`.

    Args:
        values: the labels of a split.
        target: of the training split.
        separator, where: as in `find`.
    Returns:
        int64 [n], the numbers of the classes; float32 [n, labels] of 0 and 1 in multilabel;
        float32 [n] in a regression.
    Raises:
        InputError: a missing label, or a class that the training split does not have, with the row.
    """
    if target.objective == "regression":
        return _numbers(values, where)

    index_of = {name: index for index, name in enumerate(target.names)}
    sets = _label_sets(values, target.objective, separator, where)
    indices = []
    for row, labels in enumerate(sets):
        for name in labels:
            if name not in index_of:
                kind = "class" if target.objective == "classes" else "label"
                raise InputError(
                    f"{_place(where, row)} has the {kind} {name!r}, which the training split does "
                    f"not have; it has {listed(target.names)}"
                )
        indices.append([index_of[name] for name in labels])

    if target.objective == "classes":
        return np.array([index for (index,) in indices], np.int64)
    encoded = np.zeros((len(values), len(target.names)), np.float32)
    for row, indices_of_row in enumerate(indices):
        encoded[row, indices_of_row] = 1
    return encoded


def listed(names: Sequence[str]) -> str:
    """Returns the first names as a text, and how many there are where these are not all."""
    text = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        text += f", … ({len(names)} in all)"
    return text


def _place(where: Where, row: int | None = None) -> str:
    """Returns where a 0-based row stands; None: where all rows stand."""
    if callable(where):
        return where(row)
    return where if row is None else f"{where}, row {row + 1}"


def _label_sets(
    values: Sequence[Any], objective: str, separator: str, where: Where
) -> list[list[str]]:
    """Returns the names of each row: one of a class, any number in multilabel."""
    sets = []
    for row, value in enumerate(values):
        if _is_missing(value) and not (objective == "multilabel" and isinstance(value, str)):
            hint = ""
            if objective == "multilabel":
                hint = "; an example without labels has an empty list, or an empty text"
            raise InputError(f"{_place(where, row)} has no label; expected one{hint}")

        if objective == "classes":
            if _is_list(value):
                raise InputError(
                    f"{_place(where, row)} has a list as its label; expected one class, "
                    "or give --objective multilabel"
                )
            _check_no_object(value, where, row)
            sets.append([name_of(value)])
            continue

        parts = _parts(value, separator, where, row)
        for part in parts:
            _check_no_object(part, where, row)
        sets.append([name_of(part) for part in parts])
    return sets


def _check_no_object(value: Any, where: Where, row: int) -> None:
    """Raises InputError where a label is a JSON object, or a list within a list of labels."""
    if isinstance(value, dict) or _is_list(value):
        raise InputError(
            f"{_place(where, row)} has {value!r} as a label; expected a text, a number or a truth "
            "value: write the field that you mean into a column of its own"
        )


def _parts(value: Any, separator: str, where: Where, row: int) -> list[Any]:
    """Returns the labels of an example in multilabel, without empty ones of a text."""
    if isinstance(value, str):
        if not separator:
            raise InputError(
                f"{_place(where, row)} has the text {value!r} as its labels; "
                "give what stands between them by --separator"
            )
        return [part for part in value.split(separator) if part.strip()]

    if not _is_list(value):
        raise InputError(
            f"{_place(where, row)} has {value!r} as its labels; "
            "expected a list, or a text and --separator"
        )
    parts = list(value)
    if any(_is_missing(part) for part in parts):
        raise InputError(f"{_place(where, row)} has an empty label in its list")
    return parts


def _is_list(value: Any) -> bool:
    """Returns whether a value is a list of labels."""
    return isinstance(value, (list, tuple, set, np.ndarray))


def _is_missing(value: Any) -> bool:
    """Returns whether a value is none: null, not a number, or blank text."""
    if value is None:
        return True
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, (float, np.floating)) and math.isnan(value)


def name_of(value: Any) -> str:
    """Returns the name of a class: the text of its value.

    A whole number is written without a point, since a column of numbers with a gap is read as
    floats.
    """
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _number(text: str) -> float | None:
    """Returns the finite number that a text is, else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    # Python also reads 1_000.
    return number if math.isfinite(number) and "_" not in text else None


def _check_names(names: set[str], objective: str, where: Where, column: str) -> None:
    """Raises InputError where these cannot be the classes or labels of a training split."""
    if objective == "multilabel":
        if not names:
            raise InputError(f"{_place(where)} has no label in any row of {column}")
        return

    if len(names) < 2:
        (name,) = names
        raise InputError(
            f"{_place(where)} has one class in {column}, {name!r}, in all its rows; "
            "expected two or more"
        )
    by_number = defaultdict(list)
    for name in sorted(names):
        by_number[_number(name)].append(name)
    texts = by_number.pop(None, [])
    if len(by_number) > MOST_NUMBERS:
        beside = ""
        if texts:
            beside = f" (after you have corrected or removed the rows with {listed(texts)})"
        raise InputError(
            f"{_place(where)} has {len(by_number):,} different numbers in {column}, "
            f"and at most {MOST_NUMBERS} are taken as classes; give --objective regression{beside}"
        )
    for same in by_number.values():
        if len(same) > 1:
            raise InputError(
                f"{_place(where)} has the classes {', '.join(sorted(same))} in {column}, "
                "which are the same number; write them alike"
            )


def _sorted_names(names: set[str]) -> tuple[str, ...]:
    """Returns names in the order of their numbers where all are numbers, else of their text."""
    ordered = sorted(names)
    numbers = [_number(name) for name in ordered]
    if None not in numbers:
        ordered.sort(key=_number)
    return tuple(ordered)


def _numbers(values: Sequence[Any], where: Where) -> np.ndarray:
    """Returns the labels of a regression, float32 [n]; raises InputError for another value."""
    numbers = np.zeros(len(values), np.float32)
    for row, value in enumerate(values):
        if _is_missing(value):
            raise InputError(f"{_place(where, row)} has no label; expected a number")
        number = None
        if not _is_list(value) and not isinstance(value, (bool, np.bool_)):
            number = _number(str(value).strip())
        if number is None:
            raise InputError(
                f"{_place(where, row)} has the label {value!r}; "
                "expected a finite number for --objective regression"
            )
        if abs(number) > LARGEST:
            raise InputError(
                f"{_place(where, row)} has the label {value!r}, which float32 cannot hold; "
                "give the labels in a larger unit"
            )
        numbers[row] = number
    return numbers


# Held-out examples


def held_out(keys: Sequence[str], encoded: np.ndarray, target: Target) -> np.ndarray:
    """Returns which examples are held out of training for evaluation, bool [n]: about a tenth.

    The SHA-256 of its key decides for an example, so the order of the rows does not. Examples of
    the same key and class are on the same side.

        classes      a tenth of each class, at least one; a class whose examples all have one key
                     is in training only, see `only_in_training`
        multilabel   a tenth of each set of labels; the sets of fewer than ten examples together are
                     as one. A label that then is missing from a side gets an example there, where
                     two examples have it; a single one is in training
        regression   a tenth of all

    Args:
        keys: what identifies each example: its text, or its file's name.
        encoded: [n] or [n, labels], see `encode`.
    Raises:
        InputError: nothing can be held out: no class has two different examples.
    """
    strata = _strata(encoded, target)
    groups: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        groups[strata[row], digest].append(row)

    if target.objective == "multilabel":
        strata_of_groups = _join_small_strata(groups)
    else:
        strata_of_groups = {group: group[0] for group in groups}

    members = defaultdict(list)
    for group in sorted(groups, key=lambda group: (group[1], group[0])):
        members[strata_of_groups[group]].append(groups[group])

    held = np.zeros(len(keys), bool)
    for rows_of_groups in members.values():
        for rows in _tenth(rows_of_groups):
            held[rows] = True
    if target.objective == "multilabel":
        _give_labels(held, [rows for stratum in members.values() for rows in stratum], encoded)
    if not held.any():
        advice = "add examples, or give a validation split"
        if target.objective == "classes" and None not in map(_number, target.names):
            advice += ", or, where the labels are a quantity, --objective regression"
        raise InputError(
            f"{len(keys):,} examples cannot be split into training and validation: each has a "
            f"class or a text of its own; {advice}"
        )
    return held


def only_in_training(held: np.ndarray, encoded: np.ndarray, target: Target) -> tuple[str, ...]:
    """Returns the names of the classes or labels that no held-out example has, but others have."""
    if target.objective == "regression":
        return ()
    if target.objective == "classes":
        present = np.zeros((len(encoded), len(target.names)), bool)
        present[np.arange(len(encoded)), encoded] = True
    else:
        present = encoded > 0
    missing = present.any(0) & ~present[held].any(0)
    return tuple(target.names[index] for index in np.flatnonzero(missing))


def _strata(encoded: np.ndarray, target: Target) -> list[int]:
    """Returns the number of each example's stratum: its class, its set of labels, or 0."""
    if target.objective == "classes":
        return encoded.tolist()
    if target.objective == "regression":
        return [0] * len(encoded)
    # As they first occur would depend on the order of the rows; the labels' bits do not.
    powers = [1 << label for label in range(encoded.shape[1])]
    strata = []
    for row in encoded > 0:
        strata.append(sum(powers[label] for label in np.flatnonzero(row)))
    return strata


def _join_small_strata(groups: dict[tuple[int, bytes], list[int]]) -> dict[tuple, int]:
    """Returns the stratum of each group; -1 for those of which fewer than ten examples have it."""
    sizes = defaultdict(int)
    for (stratum, _), rows in groups.items():
        sizes[stratum] += len(rows)
    return {group: group[0] if sizes[group[0]] >= HELD_OUT else -1 for group in groups}


def _tenth(groups: list[list[int]]) -> list[list[int]]:
    """Returns the first groups that together have a tenth of the rows; never all groups.

    At least one group, where there are two: the smallest, where all are larger than a tenth.

    Args:
        groups: the rows of each, in the order of their digests.
    """
    if len(groups) < 2:
        return []
    total = sum(map(len, groups))
    wanted = max(round(total / HELD_OUT), 1)
    chosen = []
    count = 0
    for rows in groups:
        if count + len(rows) <= wanted and len(chosen) < len(groups) - 1:
            chosen.append(rows)
            count += len(rows)
    return chosen or [min(groups, key=len)]


def _give_labels(held: np.ndarray, groups: list[list[int]], encoded: np.ndarray) -> None:
    """Moves groups of examples so that training has each label, and the held-out examples each
    that two groups have, as far as training keeps it.

    Changes `held`. `groups` are in an order that does not depend on that of the rows.
    """
    labels = np.stack([encoded[rows[0]] > 0 for rows in groups])  # [groups, labels]
    is_held = np.array([held[rows[0]] for rows in groups])

    for label in range(labels.shape[1]):
        has_label = np.flatnonzero(labels[:, label])
        if len(has_label) and is_held[has_label].all():
            is_held[has_label[0]] = False

    for label in np.flatnonzero(labels.sum(0) >= 2):
        if labels[is_held, label].any():
            continue
        left = labels[~is_held].sum(0)  # groups in training that have each label
        for group in np.flatnonzero(labels[:, label]):
            if (left[labels[group]] > 1).all():
                is_held[group] = True
                break

    for rows, side in zip(groups, is_held, strict=True):
        held[rows] = side


# Metrics


def score(target: Target, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes the metrics of a target by scikit-learn and SciPy.

    Args:
        logits: [n, classes] or [n, labels], or [n, 1] in a regression.
        labels: [n] or [n, labels], see `encode`.
    Returns:
        classes      "accuracy", and "f1_macro" over the classes that are there or are predicted
        multilabel   "f1_micro" and "f1_macro" of what has a probability above 0.5; and
                     "average_precision", the mean over the labels that are there
        regression   "pearson" and "spearman", 0 where one side is constant; and "mse"
    Raises:
        ValueError: other shapes, no examples, or in multilabel no labels.
    """
    outputs = len(target.names)
    expected = (len(logits), outputs) if target.objective == "multilabel" else (len(logits),)
    if logits.shape != (len(logits), outputs) or labels.shape != expected or not len(labels):
        raise ValueError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}; expected one row or "
            f"more of {outputs} outputs, and as many labels"
        )
    if target.objective == "regression":
        return _score_numbers(logits[:, 0].astype(np.float64), labels.astype(np.float64))

    # Imported here: it takes a second and 60 MB in each worker process, which never scores.
    from sklearn import metrics

    if target.objective == "classes":
        predictions = logits.argmax(1)
        macro = metrics.f1_score(labels, predictions, average="macro", zero_division=0)
        return {
            "accuracy": float(metrics.accuracy_score(labels, predictions)),
            "f1_macro": float(macro),
        }

    present = labels.any(0)
    if not present.any():
        raise ValueError("no example has a label")
    precision = metrics.average_precision_score(
        labels[:, present], logits[:, present].astype(np.float64), average="macro"
    )
    micro, macro = _f1_of_labels(labels > 0, predicted=logits > 0)  # a probability above 0.5
    return {"f1_micro": micro, "f1_macro": macro, "average_precision": float(precision)}


def _f1_of_labels(labels: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    """Computes the F1 of all labels together, and the mean of that of each label.

    A label that is neither there nor predicted has none. These are scikit-learn's "micro" and
    "macro", which take a single label for two classes, and count a label that is absent as 0.

    Args:
        labels, predicted: bool [n, labels].
    """
    right = (labels & predicted).sum(0)
    wrong = (labels ^ predicted).sum(0)
    there = 2 * right + wrong  # 0 where a label is neither there nor predicted
    micro = 2 * right.sum() / there.sum()
    macro = (2 * right[there > 0] / there[there > 0]).mean()
    return float(micro), float(macro)


def _score_numbers(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes a regression's metrics, of float64 [n]."""
    from scipy import stats  # imported here: see score

    if not (np.isfinite(predictions).all() and np.isfinite(labels).all()):
        raise ValueError("predictions or labels are not finite")
    scores = {"pearson": 0.0, "spearman": 0.0}
    if len(labels) > 1 and np.ptp(predictions) > 0 and np.ptp(labels) > 0:
        scores["pearson"] = float(stats.pearsonr(predictions, labels)[0])
        scores["spearman"] = float(stats.spearmanr(predictions, labels)[0])
    scores["mse"] = float(np.mean((predictions - labels) ** 2))
    return scores
