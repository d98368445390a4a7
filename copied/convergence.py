"""How the trial of each script shows that it learns: what tests/trials.py and the test of a copy
assert."""

from dataclasses import dataclass
from typing import Any

from tpu.accept.expected import LEARNED

Ranges = dict[str, tuple[float, float]]  # name of a metric -> its lowest and its highest value


@dataclass(frozen=True)
class Convergence:
    """A training that learns, and one with a learning rate of 0, which does not.

    Attributes:
        learns: the fields of the script's TINY that are changed for the first.
        learned: the ranges of its final metrics.
        still: what is changed besides for the second: weights that do not move are the same after a
            few steps.
        untrained: the ranges of its final metrics, outside of `learned`.
        chance: what `learned` is to be compared with, in words.
    """

    learns: dict[str, Any]
    learned: Ranges
    still: dict[str, Any]
    untrained: Ranges
    chance: str


OF_SCRIPTS = {
    "resnet50": Convergence(
        learns={"eval_every": 8},
        learned=LEARNED["resnet50"],
        still={"epochs": 1, "warmup_epochs": 0.0},
        untrained={"top1": (0.0, 0.3)},
        chance="top1 0.1, top5 0.5, loss 2.3",
    ),
    "dlrm": Convergence(
        learns={"log_every": 16, "save_every": 48},
        learned=LEARNED["dlrm"],
        still={},
        untrained={"auc": (0.4, 0.6)},
        chance="auc 0.5, ne 1",
    ),
    "glue": Convergence(
        learns={"epochs": 1.5, "log_every": 16},
        learned=LEARNED["glue"],
        still={"lengths": (32,), "epochs": 0.1},
        untrained={"accuracy": (0.4, 0.6), "loss": (0.6, 1.0)},
        chance="accuracy 0.5, loss 0.69",
    ),
    "squad": Convergence(
        learns={"epochs": 3, "log_every": 16},
        learned=LEARNED["squad"],
        still={"epochs": 0.1},
        untrained={"f1": (0.0, 0.5), "loss": (2.5, 6.0)},
        chance="f1 0.33, by never giving an answer",
    ),
    "transformer": Convergence(
        learns={
            "batch_tokens": 2048,
            "updates": 260,
            "warmup_updates": 80,
            "eval_every": 1000,
            "save_every": 8,
        },
        learned=LEARNED["transformer"],
        still={"updates": 10},
        untrained={"bleu": (0.0, 1.0), "ppl": (50.0, 1000.0)},
        chance="ppl 6 with the right words in any order",
    ),
    "pretrain": Convergence(
        learns={"steps": 160, "warmup_steps": 40, "eval_every": 1000},
        learned=LEARNED["pretrain"],
        still={"steps": 2},
        untrained={"accuracy": (0.0, 0.1), "loss": (4.5, 10.0)},
        chance="accuracy 0.085, by always naming the commonest token",
    ),
    "tagging": Convergence(
        learns={"epochs": 3, "log_every": 16},
        learned=LEARNED["tagging"],
        still={"epochs": 0.1},
        untrained={"f1": (0.0, 0.3), "loss": (1.5, 3.0)},
        chance="f1 0 by the tag O alone, loss 1.9",
    ),
}

# Of the encoders that have other numbers than BERT.
OF_MODELS: dict[tuple[str, str], Convergence] = {}


def of_model(script: str, model: str) -> Convergence:
    """Returns what the trial of a script reaches.

    Args:
        model: an encoder's name; "": the script has no --model of these.
    """
    return OF_MODELS.get((script, model), OF_SCRIPTS[script])
