"""From a network's outputs to answers: the names of classes, probabilities, numbers.

to_answers = of_objective("classes", ("cat", "dog"), top=5)
to_answers(logits)  # [{"label": "dog", "probability": 0.9, "top": [{"label": "dog", …}, …]}, …]
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from train.prediction.pieces import ToAnswers

LIKELY = 0.5  # a label with at least this probability is given, in multilabel


def of_objective(objective: str, names: Sequence[str], top: int) -> ToAnswers:
    """Returns what makes answers of logits [n, names].

    Args:
        objective: "classes", "multilabel" or "regression".
        names: of the outputs.
        top: most classes of an answer.
    """
    if objective == "multilabel":
        return partial(labels, names=names)
    if objective == "regression":
        return partial(scores, names=names)
    return partial(classes, names=names, top=top)


def classes(logits: np.ndarray, names: Sequence[str], top: int) -> list[dict]:
    """Returns the class of each row, its probability, and the `top` most probable classes.

    Of classes that are as probable the first one counts.
    """
    shares = softmax(logits)
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    found = []
    for row, indices in zip(shares, order.tolist(), strict=True):
        best = []
        for index in indices:
            best.append({"label": names[index], "probability": float(row[index])})
        found.append({**best[0], "top": best})
    return found


def labels(logits: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Returns the labels of each row whose probability is at least LIKELY, and the probability of
    every label."""
    found = []
    for row in sigmoid(logits).tolist():
        probabilities = dict(zip(names, row, strict=True))
        likely = [name for name, share in probabilities.items() if share >= LIKELY]
        found.append({"labels": likely, "probabilities": probabilities})
    return found


def scores(logits: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Returns the number of each row; of several numbers a dict by name."""
    found = []
    for row in logits.tolist():
        if len(names) == 1:
            found.append({"score": row[0]})
        else:
            found.append({"scores": dict(zip(names, row, strict=True))})
    return found


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the share of each class, float64 [n, classes]."""
    logits = logits.astype(np.float64)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities, float64 of the same shape, without overflow."""
    logits = logits.astype(np.float64)
    small = np.exp(-np.abs(logits))  # at most 1
    return np.where(logits >= 0, 1, small) / (1 + small)
