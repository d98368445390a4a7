"""Predicts GLUE's test sets by an export of train/glue.py, into the files that the benchmark's
server takes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data import glue, glue_tests
from data.text_rows import Row
from errors import InputError
from models import heads
from train.common import files
from train.common.mesh import Mesh
from train.prediction import sentences
from train.prediction.pieces import in_order

VMEM_KIB = sentences.VMEM_KIB


def open_model(folder: str, config: Any) -> "Submission":
    """Opens an export on the host, and the test sets of --task.

    Raises:
        InputError: a flag is missing; the model is another task's; or see glue_tests.read.
    """
    if not config.out:
        raise InputError("--out is missing: give a folder for the files of the submission")
    if not config.data:
        raise InputError("--data is missing: give GLUE's folder, or nyu-mll/glue")
    return Submission(folder, config)


def exported_precision(folder: str) -> str:
    """Returns the precision of the run's evaluation; "" where the export does not say it."""
    return sentences.exported_precision(folder)


class Submission:
    """A model of a task, and the task's test sets."""

    def __init__(self, folder: str, config: Any):
        self.config = config
        task = glue.find_task(config.task)
        stated = heads.parse_labels(config.labels, task.labels) if config.labels else ()
        _check_pairs(folder, config, task)
        self.sets = glue_tests.read(config.data, task.name)
        rows = itertools.chain.from_iterable(map(_rows, self.sets))
        self._model = sentences.Sentences(folder, config, rows, task.labels, stated)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        found = list(self._model.notes)
        for test_set in self.sets:
            if len(test_set) != test_set.expected:
                found.append(
                    f"{test_set.file} has {len(test_set):,} predictions, of all examples of "
                    f"{test_set.source}; the server expects {test_set.expected:,}"
                )
        files_written = [test_set.file for test_set in self.sets]
        if self.config.task == "mnli" and "AX.tsv" not in files_written:
            found.append(
                f"{self.config.data} has no diagnostic set (diagnostic/diagnostic.tsv), "
                "so AX.tsv is not written, which the server needs, too"
            )
        return found

    def write(self, mesh: Mesh) -> int:
        """Predicts, and writes all files into the folder --out; returns how many predictions."""
        pieces = self._model.pieces(mesh)
        answers = in_order(pieces, _numbers, skip_broken=False, advice="")
        contents = {}
        for test_set in self.sets:
            own = itertools.islice(answers, len(test_set))
            numbers = [answer["number"] for answer in own]
            contents[test_set.file] = glue_tests.content(test_set, numbers)

        def save(local: str) -> None:
            for name, content in contents.items():
                Path(local, name).write_text(content, encoding="utf-8")

        files.write_folder(self.config.out, save)
        return sum(map(len, self.sets))


def _check_pairs(folder: str, config: Any, task: glue.Task) -> None:
    """Raises InputError where a model takes pairs and the task has none, or the other way round."""
    trained = sentences.read_trained(folder)
    if trained.text and len(trained.text) != len(task.columns):
        raise InputError(
            f"--task {task.name} has {sentences.described(task.columns)}, and {config.model_dir} "
            f"was trained on {sentences.described(trained.text)}; give an export of that task"
        )


def _rows(test_set: glue_tests.TestSet) -> Iterator[Row]:
    """Yields the examples of a test set as texts to predict."""
    columns = [test_set.first]
    if test_set.second is not None:
        columns.append(test_set.second)
    for index, texts in zip(test_set.indices, zip(*columns, strict=True), strict=True):
        yield Row(texts, f"{test_set.source}, index {index}")


def _numbers(logits: np.ndarray) -> list[dict]:
    """Returns the number of each row's class, or the score of a regression."""
    numbers = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return [{"number": number} for number in numbers.tolist()]
