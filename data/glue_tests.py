"""GLUE's test sets, and the files of predictions that the benchmark's server takes.

    sets = read("/data/glue", "mnli")      # of MNLI-m.tsv, MNLI-mm.tsv and AX.tsv
    content(sets[0], predictions)          # a header line, and a line for each example

The lines are "index" and "prediction", separated by a tab. MNLI, QNLI, RTE and the diagnostic set
AX have the names of their classes, other tasks their numbers, STS-B a score from 0 to 5 with three
decimals. Names of files, header and labels are those of the benchmark's authors:
github.com/nyu-mll/jiant, jiant/scripts/benchmarks/benchmark_submission_formatter.py, and the
write_preds of its first version, src/evaluate.py, which clips scores and writes them by %.3f. That
the server's sample is alike (gluebenchmark.com/assets/CBOW.zip) was not tried.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import glue
from data.glue import Task
from data.sentences import call_datasets
from errors import InputError

AX = "ax"  # the diagnostic set, which a model of MNLI predicts

# By task and split: the file of the submission, and the examples of the test set.
_FILES = {
    ("cola", "test"): ("CoLA.tsv", 1_063),
    ("sst2", "test"): ("SST-2.tsv", 1_821),
    ("mrpc", "test"): ("MRPC.tsv", 1_725),
    ("stsb", "test"): ("STS-B.tsv", 1_379),
    ("qqp", "test"): ("QQP.tsv", 390_965),
    ("mnli", "test_matched"): ("MNLI-m.tsv", 9_796),
    ("mnli", "test_mismatched"): ("MNLI-mm.tsv", 9_847),
    ("mnli", AX): ("AX.tsv", 1_104),
    ("qnli", "test"): ("QNLI.tsv", 5_463),
    ("rte", "test"): ("RTE.tsv", 3_000),
    ("wnli", "test"): ("WNLI.tsv", 146),
}
_WRITES_NAMES = ("mnli", "qnli", "rte")
_INDEX_COLUMNS = ("index", "id")  # QQP's is named id
# Where the diagnostic set lies beside GLUE's own files; the second one in MNLI's folder.
_DIAGNOSTIC = ("diagnostic/diagnostic.tsv", "MNLI/diagnostic.tsv", "diagnostic.tsv", "AX.tsv")


@dataclass(frozen=True)
class TestSet:
    """The examples of a test set.

    Attributes:
        task: of GLUE.
        file: name of the file for the server.
        expected: how many examples the server expects.
        source: what was read, for messages.
        indices: of the examples, as the file of the test set has them, else from 0.
        first, second: sentences; second is None where an example is a single one.
    """

    task: Task
    file: str
    expected: int
    source: str
    indices: list[str]
    first: list[str]
    second: list[str] | None

    def __len__(self) -> int:
        return len(self.first)


def read(data: str, task: str) -> list[TestSet]:
    """Reads the test sets of a task: one, or MNLI's two and, where it is there, the diagnostic set.

    Args:
        data: as in glue.read, without "synthetic".
        task: a key of glue.TASKS.
    Raises:
        InputError: an unknown task, no such data, or a file that is not GLUE's, with the line.
    """
    chosen = glue.find_task(task)
    folder = glue.local_folder(data, chosen)
    found = []
    for of_task, split in _FILES:
        if of_task != task:
            continue
        if folder.is_dir():
            read_set = _of_folder(folder, chosen, split)
        else:
            read_set = _of_hub(data, chosen, split)
        if read_set is not None:
            found.append(read_set)
    return found


def content(test_set: TestSet, predictions: Sequence[float]) -> str:
    """Returns the content of the file for the server.

    Args:
        predictions: numbers of classes, in the order of the task's labels, or scores.
    Raises:
        ValueError: there are not as many as examples.
    """
    lines = ["index\tprediction"]
    for index, prediction in zip(test_set.indices, predictions, strict=True):
        lines.append(f"{index}\t{_written(test_set.task, prediction)}")
    return "\n".join(lines) + "\n"


def _written(task: Task, prediction: float) -> str:
    """Returns a prediction as the server takes it."""
    if not task.labels:
        lowest, highest = glue.SCORES
        return f"{np.clip(prediction, lowest, highest):.3f}"
    number = int(prediction)
    return task.labels[number] if task.name in _WRITES_NAMES else str(number)


def _of_folder(folder: Path, task: Task, split: str) -> TestSet | None:
    """Reads a test set from a folder; None for a diagnostic set that is not there."""
    rows = _find_table(folder, task, split)
    if rows is not None:
        return _of_rows(rows, f"{folder}, split {split}", task, split)

    names = _DIAGNOSTIC
    if split != AX:
        names = (f"{task.folder}/{split}.tsv", f"{split}.tsv")
    for name in names:
        path = folder / name
        if path.is_file():
            glue.refuse_another_task(path.parent, task)
            return _of_tsv(path, task, split)
    if split == AX:
        return None
    raise InputError(
        f"{folder} has no {names[0]} and no parquet files of the split {split}; "
        f"expected GLUE's {names[0]}"
    )


def _find_table(folder: Path, task: Task, split: str) -> "datasets.Dataset | None":  # noqa: F821
    """Opens a test set that is a table; None where there is none."""
    candidates = [folder / task.name, folder / task.folder, folder]
    if split == AX:
        candidates = [folder / "ax", folder / "AX"]
        split = "test"
    for candidate in candidates:
        failed = f"{candidate} cannot be read by datasets"
        if (candidate / "dataset_dict.json").exists():
            saved = call_datasets(failed, "load_from_disk", str(candidate))
            if split in saved:
                glue.refuse_another_task(candidate, task)
                return saved[split]

        for pattern in (f"{split}*.parquet", f"data/{split}*.parquet", f"{split}/*.parquet"):
            # Of a shard only its number may follow: test_matched is not test.
            own_name = re.compile(rf"{split}(-\d.*)?\.parquet")
            paths = []
            for path in sorted(candidate.glob(pattern)):
                if pattern.startswith(f"{split}/") or own_name.fullmatch(path.name):
                    paths.append(str(path))
            if paths:
                glue.refuse_another_task(candidate, task)
                return call_datasets(
                    failed, "load_dataset", "parquet", data_files={split: paths}, split=split
                )
    return None


def _of_hub(data: str, task: Task, split: str) -> TestSet:
    """Reads a test set of a data set on the hub, whose id is `data`."""
    configuration = task.name
    if split == AX:
        configuration = AX
    rows = call_datasets(
        f"{data} is neither a folder nor a data set of the hub with {configuration}",
        "load_dataset",
        data,
        configuration,
        split="test" if split == AX else split,
    )
    return _of_rows(rows, f"{data}, {configuration}, split {split}", task, split)


def _of_rows(rows: "datasets.Dataset", where: str, task: Task, split: str) -> TestSet:  # noqa: F821
    """Returns the rows of a data set as a test set."""
    missing = [name for name in task.columns if name not in rows.column_names]
    if missing:
        raise InputError(
            f"{where} has the columns {', '.join(rows.column_names)}; "
            f"expected {', '.join(missing)} for {task.name}"
        )
    columns = [list(rows[name]) for name in task.columns]
    for name, sentences in zip(task.columns, columns, strict=True):
        glue.check_sentences(sentences, name, where, task)
    indices = range(len(rows))
    if "idx" in rows.column_names:
        indices = rows["idx"]
    return _test_set([str(index) for index in indices], columns, where, task, split)


def _of_tsv(path: Path, task: Task, split: str) -> TestSet:
    """Reads one of GLUE's own files."""
    lines = glue.read_lines(path)
    header = lines[0].split("\t") if lines else []
    missing = [name for name in task.own_columns if name not in header]
    if missing:
        raise InputError(
            f"{path} line 1 has the columns {', '.join(header) or 'nothing'}; "
            f"expected {', '.join(missing)} among them, separated by tabs"
        )
    places = [header.index(name) for name in task.own_columns]
    index_places = [header.index(name) for name in _INDEX_COLUMNS if name in header]

    indices = []
    columns = [[] for _ in places]
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        where = f"{path} line {number}"
        if len(fields) != len(header):
            raise InputError(
                f"{where} has {len(fields)} fields, separated by tabs; "
                f"expected {len(header)}: {', '.join(header)}"
            )
        indices.append(fields[index_places[0]] if index_places else str(number - 2))
        for column, name, place in zip(columns, task.own_columns, places, strict=True):
            if not fields[place].strip() and task.name != "qqp":
                raise InputError(f"{where} has an empty {name}; expected a sentence")
            column.append(fields[place])
    return _test_set(indices, columns, str(path), task, split)


def _test_set(
    indices: list[str], columns: list[list[str]], where: str, task: Task, split: str
) -> TestSet:
    """Returns a test set; raises InputError where it has no examples, or an index twice."""
    if not indices:
        raise InputError(f"{where} has no examples")
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise InputError(f"{where} has the index {twice} twice; the server takes each once")
    file, expected = _FILES[task.name, split]
    second = columns[1] if len(columns) > 1 else None
    return TestSet(task, file, expected, where, indices, columns[0], second)
