"""Writes tests/seqeval.json: tags at random, and what seqeval 1.2.2 makes of them.

    pip install seqeval==1.2.2 into another environment, with scikit-learn; in it
    python tests/seqeval_reference.py

seqeval is no requirement of the project: its last release is of 2020. A line of the file is a case:
the sentences of both sides, their tags separated by blanks, and the metrics.
"""

import json
import random
import warnings
from pathlib import Path

CASES = 300
FILE = Path(__file__).with_name("seqeval.json")
TYPES = ("PER", "LOC", "geo-loc")
# Prefixes that a case draws from. The first is that of IOB1 and IOB2, broken in every way.
SCHEMES = ("BI", "BIES", "I", "B")


def sentence(rng: random.Random, scheme: str, words: int) -> list[str]:
    """Draws the tags of a sentence."""
    tags = []
    for _ in range(words):
        if rng.random() < 0.35:
            tags.append("O")
        else:
            tags.append(f"{rng.choice(scheme)}-{rng.choice(TYPES)}")
    return tags


def changed(rng: random.Random, scheme: str, tags: list[str]) -> list[str]:
    """Returns tags of which some are drawn again."""
    others = sentence(rng, scheme, len(tags))
    return [old if rng.random() < 0.75 else new for old, new in zip(tags, others, strict=True)]


def case(number: int) -> dict:
    """Returns a case: its tags, and seqeval's metrics of them."""
    from seqeval import metrics

    rng = random.Random(number)
    scheme = SCHEMES[number % len(SCHEMES)]
    gold = [sentence(rng, scheme, rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
    predicted = [changed(rng, scheme, tags) for tags in gold]
    report = metrics.classification_report(gold, predicted, output_dict=True)
    by_type = {}
    for kind in TYPES:
        if kind in report:
            row = report[kind]
            by_type[kind] = [float(row[name]) for name in ("precision", "recall", "f1-score")]
            by_type[kind].append(int(row["support"]))
    return {
        "gold": [" ".join(tags) for tags in gold],
        "predicted": [" ".join(tags) for tags in predicted],
        "precision": float(metrics.precision_score(gold, predicted)),
        "recall": float(metrics.recall_score(gold, predicted)),
        "f1": float(metrics.f1_score(gold, predicted)),
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "by_type": by_type,
    }


def main() -> None:
    """Writes the file."""
    warnings.simplefilter("ignore")
    lines = [json.dumps(case(number)) for number in range(CASES)]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
