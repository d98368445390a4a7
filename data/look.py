"""Opens data as a training script would, without a model: what `make doctor DATA=` asks before a run.

    python -m data.look DATA [SCRIPT [TASK]]

Prints what the script would train and evaluate on, or ends with the reason why it cannot and code 1. SCRIPT is one of
resnet50, dlrm, transformer, glue, pretrain; without it, the scripts that can open the data are named.
"""

import sys
import warnings
from collections.abc import Callable

import numpy as np

from data import criteo, glue, imagenet, splits, text, wmt
from errors import InputError


def images(data: str, task: str) -> str:
    """Opens images; decodes the first and the last of each split, and opens all files of the evaluation."""
    opened = [imagenet.open_imagenet(data, split, image_size=8) for split in ("train", "eval")]
    for one in opened:
        for index in (0, len(one) - 1):
            one.example(index, np.random.default_rng(0))
    evaluation = opened[1]
    if isinstance(evaluation, imagenet.ImageFolder):
        for index in range(len(evaluation)):
            path = evaluation.path(index)
            if not imagenet.read_file(path, 1):
                raise InputError(f"{path} is broken: the file is empty; replace the file")
    return f"{len(opened[0]):,} images of {len(opened[0].classes)} classes{splits.said(*opened)}"


def clicks(data: str, task: str) -> str:
    """Opens clicks, and reads the first and the last of each split."""
    opened = [criteo.open_clicks(data, split) for split in ("train", "eval")]
    for one in opened:
        one.batch(np.array([0, len(one) - 1]))
    return f"{len(opened[0]):,} clicks{splits.said(*opened)}"


def pairs(data: str, task: str) -> str:
    """Opens sentence pairs, and reads the first and the last of each split."""
    names = ["train", "valid", "test"] if wmt.has_split(data, "test") else ["train", "valid"]
    opened = [wmt.open_pairs(data, split) for split in names]
    for one in opened:
        ends = np.array([0, len(one) - 1])
        one.batch(ends, tuple(one.lengths[ends].max(0).tolist()))
    return f"{len(opened[0]):,} sentence pairs{splits.said(*opened)}"


def rows(data: str, task: str) -> str:
    """Opens rows of text, their tokenizer, and the first row of each split."""
    opened = [text.open_text(data, split) for split in ("train", "valid")]
    for one in opened:
        one.row(0)
    return f"{len(opened[0]):,} rows of {len(opened[0].tokenizer):,} tokens{splits.said(*opened)}"


def sentences(data: str, task: str) -> str:
    """Reads a task of GLUE, or finds out which there are."""
    if task:
        read = [glue.read(data, task, split) for split in ("train", *glue.find_task(task).evaluation)]
        return f"{len(read[0]):,} examples of {task}{splits.said(*read)}"
    found = []
    for name, one in glue.TASKS.items():
        try:
            for split in ("train", *one.evaluation):
                glue.read(data, name, split)
            found.append(name)
        except InputError as error:
            why = error
    if not found:
        raise why
    return f"tasks {', '.join(found)}; TASK= chooses one"


SCRIPTS: dict[str, Callable[[str, str], str]] = {
    "resnet50": images,
    "dlrm": clicks,
    "transformer": pairs,
    "pretrain": rows,
    "glue": sentences,
}


def look(data: str, script: str = "", task: str = "") -> str:
    """Returns what a script would train on, or what each of them would. Raises InputError where none can."""
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
