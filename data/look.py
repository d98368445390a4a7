"""Opens data as a training script would, without a model; `make doctor DATA=` asks it before a run.

    python -m data.look DATA [SCRIPT [TASK]]

Prints what the script would train and evaluate on, or ends with the reason why it cannot and code
1. SCRIPT is one of resnet50, dlrm, transformer, glue, pretrain, squad, tagging; without it, the
scripts that can open the data are named.
"""

import sys
import warnings
from collections.abc import Callable

import numpy as np

from data import criteo, glue, imagenet, own_text, splits, squad, tagging, text, wmt
from errors import InputError


def images(data: str, task: str) -> str:
    """Opens images; decodes the first and last of each split, and opens all of the evaluation's."""
    train = imagenet.open_imagenet(data, "train", image_size=8)
    evaluation = imagenet.open_imagenet(data, "eval", image_size=8)
    for dataset in (train, evaluation):
        for index in (0, len(dataset) - 1):
            dataset.example(index, np.random.default_rng(0))

    if isinstance(evaluation, imagenet.ImageFolder | imagenet.ListedImages):
        for index in range(len(evaluation)):
            path = evaluation.path(index)
            if not imagenet.read_file(path, size=1):
                raise InputError(f"{path} is broken: the file is empty; replace the file")
    return f"{len(train):,} images of {len(train.classes)} classes{splits.said(train, evaluation)}"


def clicks(data: str, task: str) -> str:
    """Opens clicks, and reads the first and last of each split."""
    train = criteo.open_clicks(data, "train")
    evaluation = criteo.open_clicks(data, "eval")
    for dataset in (train, evaluation):
        dataset.batch(np.array([0, len(dataset) - 1]))
    return f"{len(train):,} clicks{splits.said(train, evaluation)}"


def pairs(data: str, task: str) -> str:
    """Opens sentence pairs, and reads the first and last of each split."""
    names = ["train", "valid"]
    if wmt.has_split(data, "test"):
        names.append("test")
    opened = [wmt.open_pairs(data, split) for split in names]
    for dataset in opened:
        ends = np.array([0, len(dataset) - 1])
        longest = dataset.lengths[ends].max(0).tolist()
        dataset.batch(ends, tuple(longest))
    return f"{len(opened[0]):,} sentence pairs{splits.said(*opened)}"


def rows(data: str, task: str) -> str:
    """Opens rows of text, their tokenizer, and the first row of each split."""
    train = text.open_text(data, "train")
    valid = text.open_text(data, "valid")
    for dataset in (train, valid):
        dataset.row(0)
    return f"{len(train):,} rows of {len(train.tokenizer):,} tokens{splits.said(train, valid)}"


def sentences(data: str, task: str) -> str:
    """Reads a task of GLUE, or without `task` finds out which tasks there are; or names the columns
    of a file of the user's own."""
    columns = [] if task else own_text.column_names(data)
    if columns:
        return (
            f"sentences of your own, in the columns {splits.shown(columns)}; "
            'the training takes ARGS="--text COLUMN --label COLUMN"'
        )
    if task:
        examples = _read_task(data, task)
        return f"{len(examples[0]):,} examples of {task}{splits.said(*examples)}"

    found = []
    for name in glue.TASKS:
        try:
            _read_task(data, name)
            found.append(name)
        except InputError as error:
            last_error = error
    if not found:
        raise last_error
    return f"tasks {', '.join(found)}; TASK= chooses one"


def questions(data: str, task: str) -> str:
    """Reads questions about texts, and finds their answers in these."""
    opened = squad.open_splits(data, squad.version_of(data))
    (valid,) = opened.eval.values()
    count = f"{len(opened.train):,} questions, {opened.train.unanswerable:,} without an answer"
    return f"{count}{splits.said(opened.train, valid)}"


def _read_task(data: str, task: str) -> list[glue.Examples]:
    """Reads the splits of a task of GLUE, those to train on first."""
    evaluation = glue.find_task(task).evaluation
    return [glue.read(data, task, split) for split in ("train", *evaluation)]


def entities(data: str, task: str) -> str:
    """Reads sentences whose words have tags of entities."""
    opened = tagging.open_splits(data, tagging.Columns())
    types = ", ".join(opened.task.types)
    sources = splits.said(opened.train, *opened.eval.values())
    return f"{len(opened.train):,} sentences with entities of {types}{sources}"


SCRIPTS: dict[str, Callable[[str, str], str]] = {
    "resnet50": images,
    "dlrm": clicks,
    "transformer": pairs,
    "pretrain": rows,
    "glue": sentences,
    "squad": questions,
    "tagging": entities,
}


def look(data: str, script: str = "", task: str = "") -> str:
    """Returns what a script would train on, or without one what each of them would.

    Raises InputError where the script, or none of them, can open the data.
    """
    if script:
        return SCRIPTS[script](data, task)
    found = []
    for name, open_data in SCRIPTS.items():
        try:
            found.append(f"{name}: {open_data(data, task)}")
        except InputError:
            continue
    if not found:
        raise InputError(f"none of {', '.join(SCRIPTS)} can open it; MODEL= and TASK= tell why")
    return "; ".join(found)


def main() -> None:
    """Runs the command line."""
    warnings.simplefilter("ignore")
    try:
        print(look(*sys.argv[1:]))
    except InputError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
