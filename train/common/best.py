"""The best checkpoint of a run: --best METRIC, and --patience N.

    criterion = best.criterion("-loss", patience=3, metrics=("accuracy", "loss"))
    criterion.find({100: {"accuracy": 0.7, "loss": 0.5}, 200: {"accuracy": 0.8, "loss": 0.6}})
    # Best(step=100, metrics={"accuracy": 0.7, "loss": 0.5}, evaluations_since=1)

Only the evaluations in metrics.jsonl decide. A resumed run has cut them back to its checkpoint, so
it decides as a run that was never killed.

An evaluation replaces the best one only if it is strictly better: of equal ones the first counts.
So do transformers' Trainer, XLNet's --eval_all_ckpt and the patience of fairseq; fairseq's
checkpoint_best.pt is the last of equal ones. A metric that is not finite is never the best.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from errors import InputError

# The last word of a metric's name, where lower is known to be better.
LOWER_IS_BETTER = ("loss", "ppl", "ne", "mse")


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        step: of the evaluation; 0: none had a finite value.
        metrics: of the evaluation.
        evaluations_since: how many came after it; of step 0, how many there were.
    """

    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluations_since: int = 0


@dataclass(frozen=True)
class Criterion:
    """Which evaluation is the best, and when the training ends without a better one.

    Attributes:
        metric: of the evaluation, with a leading minus where lower is better; "": there is no best
            one.
        patience: evaluations without a better one that end the training; 0: it never ends early.
        metrics: the names of all that the evaluation has.
    """

    metric: str = ""
    patience: int = 0
    metrics: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The metric without its minus."""
        return self.metric.removeprefix("-")

    def find(self, evaluations: Mapping[int, Mapping[str, float | None]]) -> Best:
        """Returns the best of these evaluations, step -> metrics, in the order of their steps. None
        stands for a value that is not finite."""
        sign = -1 if self.metric.startswith("-") else 1
        best = Best()
        highest = float("-inf")
        for step, metrics in evaluations.items():
            value = metrics.get(self.name)
            if value is not None and sign * value > highest:
                highest = sign * value
                best = Best(step, metrics)
            else:
                best = Best(best.step, best.metrics, best.evaluations_since + 1)
        return best

    def ends_training(self, best: Best) -> bool:
        """Returns whether --patience ends the training."""
        return 0 < self.patience <= best.evaluations_since

    def describe(self) -> str:
        """Returns what a run says of it first."""
        end = "lowest" if self.metric.startswith("-") else "highest"
        said = f"the checkpoint with the {end} {self.name} is kept and exported"
        if self.patience:
            said += f"; {self.patience} evaluation(s) without a better one end the training"
        return said


def criterion(metric: str, patience: int, metrics: Sequence[str]) -> Criterion:
    """Returns the criterion of --best and --patience.

    Args:
        metrics: the names of what the evaluation computes.
    Raises:
        InputError: the evaluation has no such metric, or of this one lower is better and the minus
            is missing; or patience is negative, or there is nothing to wait for.
    """
    if patience < 0:
        raise InputError(f"--patience is {patience}; it must be at least 0, which never stops")
    if patience and not metric:
        raise InputError(
            f"--patience is {patience}, and there is no --best; give the metric that is to get "
            f"better, one of {_flags(metrics)}"
        )

    found = Criterion(metric, patience, metrics)
    if not metric:
        return found
    if found.name not in metrics:
        raise InputError(
            f"--best is {metric}{_nearest(found.name, metrics)}; the evaluation has "
            f"{_flags(metrics)}"
        )
    if _flag(metric) != metric:
        raise InputError(f"--best is {metric}, of which lower is better; give --best -{metric}")
    return found


def _flag(name: str) -> str:
    """Returns how --best takes a metric, with a minus where lower is known to be better."""
    last_word = name.rpartition("_")[2]
    return f"-{name}" if last_word in LOWER_IS_BETTER else name


def _flags(metrics: Sequence[str]) -> str:
    return ", ".join(_flag(name) for name in metrics)


def _nearest(name: str, metrics: Sequence[str]) -> str:
    """Returns a question after the metric that is meant; "" where none is similar."""
    similar = difflib.get_close_matches(name, metrics, n=1)
    return f" (is it {_flag(similar[0])}?)" if similar else ""
