"""Finds answers by the logits of their first and last tokens, and scores them as SQuAD does.

    found = search(context, windows, limits, may_be_none=True)     # of one question
    found.answer.text, found.null_difference
    score(questions, found_of_questions, may_be_none=True)         # {"exact_match": …, "f1": …, …}

The search is that of transformers 4's run_qa (examples/pytorch/question-answering/utils_qa.py),
which is BERT's without the rule of maximal context (Devlin et al. 2019, sections 4.2 and 4.3). The
metrics are those of SQuAD's own evaluate-v1.1.py and evaluate-v2.0.py, divided by 100.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.squad import Question, Questions, Windows

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = set(string.punctuation)


@dataclass(frozen=True)
class SearchLimits:
    """How answers are searched for.

    Attributes:
        n_best: candidates that are kept, and start and end tokens of a window that make them.
        max_answer: tokens of the longest answer.
        null_threshold: a question has no answer where the null score, which is the sum of the
            logits of <cls>, exceeds the best answer's score by more than this.
    """

    n_best: int = 20
    max_answer: int = 30
    null_threshold: float = 0.0


@dataclass(frozen=True)
class WindowLogits:
    """What a model says of a window.

    Attributes:
        start, end: float32 [T], logits of the answer's first and last token.
        offsets: int [T, 2], from and to which character of the context each token is; -1 for tokens
            that are not of the context.
        cls: place of the <cls> token, whose logits are those of no answer.
    """

    start: np.ndarray
    end: np.ndarray
    offsets: np.ndarray
    cls: int


@dataclass(frozen=True)
class Candidate:
    """A piece of the context that may be the answer, or that there is none.

    Attributes:
        text: "" for no answer.
        start, end: its characters in the context; 0 for no answer.
        logit: the sum of its first and last tokens' logits, float32.
        score: the product of their probabilities among the tokens of the context and <cls> in its
            window: what the question-answering pipeline of transformers 4 calls so.
        probability: among the n best candidates, by a softmax of `logit`.
    """

    text: str
    start: int
    end: int
    logit: np.float32
    score: float
    probability: float = 0.0

    @property
    def is_null(self) -> bool:
        return self.start == self.end == 0


NOTHING = Candidate(text="", start=0, end=0, logit=np.float32(0), score=0.0)


@dataclass(frozen=True)
class Found:
    """What was found for a question.

    Attributes:
        answer: the one that counts; that there is none, if its score says so.
        best: the best candidate with a text; NOTHING where there is none.
        null_difference: null score minus the score of `best`; 0 where there must be an answer.
        candidates: the best first; no answer is among them where there may be none.
    """

    answer: Candidate
    best: Candidate
    null_difference: float
    candidates: list[Candidate]


def search(
    context: str, windows: Iterable[WindowLogits], limits: SearchLimits, may_be_none: bool
) -> Found:
    """Returns the best answers to a question.

    Args:
        context: of the question.
        windows: all of its windows. Its null score is the lowest of theirs: an answer is there if
            any window has one.
        may_be_none: the question may have no answer, as in SQuAD 2.0.
    """
    candidates = []
    null = None
    for window in windows:
        candidates += _candidates(context, window, limits)
        logit = window.start[window.cls] + window.end[window.cls]
        if null is None or logit < null.logit:
            score = float(_probabilities(window)[:, window.cls].prod())
            null = replace(NOTHING, logit=logit, score=score)
    if may_be_none:
        candidates.append(null)

    candidates.sort(key=lambda candidate: candidate.logit, reverse=True)
    del candidates[limits.n_best :]
    if may_be_none and not any(candidate.is_null for candidate in candidates):
        candidates.append(null)
    candidates = _with_probabilities(candidates)

    # run_qa answers "empty" where no token of the context was among the best.
    best = next((candidate for candidate in candidates if candidate.text), NOTHING)
    if not may_be_none:
        return Found(best, best, 0.0, candidates)
    difference = float(null.logit - best.logit)
    is_null = difference > limits.null_threshold or not best.text
    null = next(candidate for candidate in candidates if candidate.is_null)
    return Found(null if is_null else best, best, difference, candidates)


def _candidates(context: str, window: WindowLogits, limits: SearchLimits) -> list[Candidate]:
    """Returns the best of the pairs of a window's best first and last tokens that are an answer,
    the best first."""
    starts = np.argsort(window.start)[::-1][: limits.n_best]
    ends = np.argsort(window.end)[::-1][: limits.n_best]
    of_context = window.offsets[:, 0] >= 0
    length = ends[None, :] - starts[:, None] + 1
    fits = (length >= 1) & (length <= limits.max_answer)
    fits &= of_context[starts][:, None] & of_context[ends][None, :]

    rows, columns = np.nonzero(fits)
    starts = starts[rows]
    ends = ends[columns]
    logits = window.start[starts] + window.end[ends]
    order = np.argsort(-logits, kind="stable")[: limits.n_best]
    probabilities = _probabilities(window)

    found = []
    for start, end, logit in zip(starts[order], ends[order], logits[order], strict=True):
        first = int(window.offsets[start, 0])
        last = int(window.offsets[end, 1])
        score = float(probabilities[0, start] * probabilities[1, end])
        found.append(Candidate(context[first:last], first, last, logit, score))
    return found


def _probabilities(window: WindowLogits) -> np.ndarray:
    """Returns the probabilities of first and last tokens, float64 [2, T]: 0 where a token is
    neither of the context nor <cls>."""
    counts = window.offsets[:, 0] >= 0
    counts[window.cls] = True
    logits = np.stack([window.start, window.end]).astype(np.float64)
    highest = logits[:, counts].max(1, keepdims=True)
    exponents = np.where(counts, np.exp(np.minimum(logits - highest, 0.0)), 0.0)
    return exponents / exponents.sum(1, keepdims=True)


def _with_probabilities(candidates: list[Candidate]) -> list[Candidate]:
    """Returns candidates with their probabilities among each other."""
    if not candidates:
        return []
    logits = np.array([candidate.logit for candidate in candidates])
    exponents = np.exp(logits - logits.max())
    shares = exponents / exponents.sum()
    found = []
    for candidate, share in zip(candidates, shares.tolist(), strict=True):
        found.append(replace(candidate, probability=share))
    return found


def search_all(
    questions: Questions,
    windows: Windows,
    logits: np.ndarray,
    limits: SearchLimits,
    may_be_none: bool,
) -> list[Found]:
    """Returns what is found for each question.

    Args:
        windows: of the questions, with their offsets.
        logits: float32 [windows, 2, T], of first and last tokens.
    """
    found = []
    for row, indices in zip(questions.rows, windows.of_questions(), strict=True):
        of_question = []
        for index in indices:
            start, end = logits[index]
            of_question.append(WindowLogits(start, end, windows.offsets(index), windows.cls(index)))
        found.append(search(row.context, of_question, limits, may_be_none))
    return found


# ---- metrics -------------------------------------------------------------------------------------


def normalized(text: str) -> str:
    """Returns an answer as it is compared: in lower case, without punctuation and articles, and
    with single spaces."""
    letters = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", letters).split())


def exact_match(answer: str, truth: str) -> float:
    """Returns 1 where two answers are the same once they are normalized, else 0."""
    return float(normalized(answer) == normalized(truth))


def f1(answer: str, truth: str, may_be_none: bool) -> float:
    """Returns the F1 of the words that two normalized answers have in common.

    Of two answers without words that of SQuAD 2.0 is 1, and that of 1.1 is 0.
    """
    words = normalized(answer).split()
    true_words = normalized(truth).split()
    if may_be_none and not (words and true_words):
        return float(words == true_words)
    common = sum((Counter(words) & Counter(true_words)).values())
    if common == 0:
        return 0.0
    precision = common / len(words)
    recall = common / len(true_words)
    return 2 * precision * recall / (precision + recall)


def truths_of(row: Question, may_be_none: bool) -> list[str]:
    """Returns the answers that are right; [""] where a question has none."""
    truths = list(row.answers)
    if may_be_none:
        truths = [truth for truth in truths if normalized(truth)]
    return truths or [""]


def metric_names(may_be_none: bool) -> list[str]:
    """Returns the names of what `score` returns, in its order, where all kinds of questions are
    there."""
    names = ["exact_match", "f1"]
    if may_be_none:
        names += ["has_answer_exact_match", "has_answer_f1", "no_answer_accuracy"]
        for name in ("exact_match", "f1"):
            names += [f"best_{name}", f"best_{name}_threshold"]
    return names


def score(questions: Questions, found: Sequence[Found], may_be_none: bool) -> dict[str, float]:
    """Computes SQuAD's metrics, each at most 1.

    Args:
        found: of each question.
        may_be_none: by the rules of version 2.0.
    Returns:
        "exact_match" and "f1", each the highest of a question's true answers; in 2.0 besides
            "has_answer_exact_match", "has_answer_f1" and "no_answer_accuracy", over the questions
            with and without an answer, 0 where there are none; and "best_exact_match", "best_f1"
            with the --null-threshold, "best_…_threshold", that would give them on these questions.
    """
    scores = {"exact_match": [], "f1": []}  # of the best candidate with a text
    has_answer = []
    for row, one in zip(questions.rows, found, strict=True):
        truths = truths_of(row, may_be_none)
        text = one.best.text
        scores["exact_match"].append(max(exact_match(text, truth) for truth in truths))
        scores["f1"].append(max(f1(text, truth, may_be_none) for truth in truths))
        has_answer.append(bool(row.answers))
    if not may_be_none:
        return {name: float(np.mean(values)) for name, values in scores.items()}

    has_answer = np.array(has_answer)
    differences = np.array([one.null_difference for one in found])
    is_null = np.array([one.answer.is_null for one in found])
    metrics = {}
    counted = {}
    for name, values in scores.items():
        counted[name] = np.where(is_null, ~has_answer, values)
        metrics[name] = float(counted[name].mean())
    metrics["has_answer_exact_match"] = _mean(counted["exact_match"][has_answer])
    metrics["has_answer_f1"] = _mean(counted["f1"][has_answer])
    metrics["no_answer_accuracy"] = _mean(counted["f1"][~has_answer])
    has_text = np.array([bool(one.best.text) for one in found])
    for name, values in scores.items():
        best, threshold = _best_threshold(np.array(values), differences, has_answer, has_text)
        metrics[f"best_{name}"] = best
        metrics[f"best_{name}_threshold"] = threshold
    return metrics


def _mean(values: np.ndarray) -> float:
    """Returns the mean of values; 0 where there are none."""
    return float(values.mean()) if values.size else 0.0


def _best_threshold(
    scores: np.ndarray, differences: np.ndarray, has_answer: np.ndarray, has_text: np.ndarray
) -> tuple[float, float]:
    """Returns the highest mean score that a threshold gives, and the threshold.

    As find_best_thresh of evaluate-v2.0.py: first no question is answered, then one after the
    other is, in the order of their null differences.

    Args:
        scores: [n], of the best candidates with a text; the other arrays are [n], too.
    """
    order = np.argsort(differences, kind="stable")
    gains = np.where(has_answer, scores, np.where(has_text, -1.0, 0.0))[order]
    unanswerable = np.count_nonzero(~has_answer)
    sums = unanswerable + np.cumsum(gains)
    best = int(sums.argmax())
    if sums[best] <= unanswerable:
        return unanswerable / len(scores), 0.0
    return float(sums[best] / len(scores)), float(differences[order[best]])
