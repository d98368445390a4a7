"""Reads and scores GLUE's nine tasks, and makes synthetic twins of them.

GLUE is Wang et al. 2019, https://arxiv.org/abs/1804.07461.

    opened = open_task("glue_data", "mrpc")            # a task with its examples, see sentences.py
    examples = read("glue_data", "mrpc", "train")      # those of one split: text and labels
    score("mrpc", predictions, labels)                 # {"accuracy": …, "f1": …}

Data is one of
    a folder of GLUE's own files, DATA/MRPC/train.tsv and dev.tsv, or the task's own, DATA/train.tsv
    a folder of parquet or arrow files, or of save_to_disk; with one folder per task or without:
        DATA/mrpc/train-….parquet
    the URL of one of these, such as gs://bucket/glue, see data/remote.py
    an id on the hub, such as nyu-mll/glue
    "synthetic"

Columns, labels, splits and the numbers of the labels are those of nyu-mll/glue. Files and folders
may have any name that data/splits.py knows for a split. The labels of GLUE's test splits are not
public, so a task is evaluated on validation.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data import sentences, splits
from data.remote import local_copy
from data.sentences import Encoded, Examples, call_datasets  # noqa: F401 (Encoded: for callers)
from errors import InputError

# What is said where data are not GLUE's.
OWN_DATA = "for data of your own give its columns by --text and --label"

LABEL_COLUMN = "label"  # on the hub
SCORES = (0.0, 5.0)  # lowest and highest label of STS-B, a regression

# The largest share of QQP's rows that may be broken. Its official train.tsv has line breaks inside
# some questions, about one row in 20,000; jiant, transformers and `datasets` leave such rows out
# as well. More than one in a thousand is a damaged file.
QQP_BROKEN = 1e-3


@dataclass(frozen=True)
class Task:
    """One of GLUE's tasks.

    Attributes:
        name: as in --task and on the hub.
        folder: of GLUE's own files.
        columns: of the sentences, one or two.
        labels: names of the classes, in the order of their numbers; () is a regression.
        metrics: names of what `score` returns.
        evaluation: splits to evaluate on.
        own_columns, own_label: names in the header of GLUE's own files.
    """

    name: str
    folder: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    evaluation: tuple[str, ...] = ("validation",)
    own_columns: tuple[str, ...] = ("sentence1", "sentence2")
    own_label: str = "label"


_ALL_TASKS = (
    Task(
        name="cola",
        folder="CoLA",
        columns=("sentence",),
        labels=("unacceptable", "acceptable"),
        metrics=("mcc", "accuracy"),  # fairseq's and XLNet's recipes choose by the accuracy
        own_columns=("sentence",),
    ),
    Task(
        name="sst2",
        folder="SST-2",
        columns=("sentence",),
        labels=("negative", "positive"),
        own_columns=("sentence",),
    ),
    Task(
        name="mrpc",
        folder="MRPC",
        columns=("sentence1", "sentence2"),
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        own_columns=("#1 String", "#2 String"),
        own_label="Quality",
    ),
    Task(
        name="stsb",
        folder="STS-B",
        columns=("sentence1", "sentence2"),
        labels=(),
        metrics=("pearson", "spearman"),
        own_label="score",
    ),
    Task(
        name="qqp",
        folder="QQP",
        columns=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        own_columns=("question1", "question2"),
        own_label="is_duplicate",
    ),
    Task(
        name="mnli",
        folder="MNLI",
        columns=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        evaluation=("validation_matched", "validation_mismatched"),
        own_label="gold_label",
    ),
    Task(
        name="qnli",
        folder="QNLI",
        columns=("question", "sentence"),
        labels=("entailment", "not_entailment"),
        own_columns=("question", "sentence"),
    ),
    Task(
        name="rte",
        folder="RTE",
        columns=("sentence1", "sentence2"),
        labels=("entailment", "not_entailment"),
    ),
    Task(
        name="wnli",
        folder="WNLI",
        columns=("sentence1", "sentence2"),
        labels=("not_entailment", "entailment"),
    ),
)
TASKS = {task.name: task for task in _ALL_TASKS}

_COLA_HEADER = ["source", "label", "original_label", "sentence"]  # CoLA's file has no header line


def find_task(name: str) -> Task:
    """Returns the task of this name; raises InputError with the known names for another."""
    if name not in TASKS:
        raise InputError(f"task is {name!r}; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def open_task(data: str | Path, task: str, seed: int = 0) -> sentences.Splits:
    """Returns a task with the examples of its splits; arguments and errors are those of `read`."""
    train = read(data, task, "train", seed)
    return replace(open_evaluation(data, task, seed=seed), train=train)


def open_evaluation(
    data: str | Path, task: str, split: str = "", seed: int = 0
) -> sentences.Splits:
    """Returns a task with the examples that are evaluated; arguments and errors as of `read`.

    Args:
        split: train, valid or test (which is refused); "" is valid.
    """
    chosen = find_task(task)
    names = chosen.evaluation if split in ("", "valid") else (split,)
    evaluation = {name: read(data, task, name, seed) for name in names}
    objective = "classes" if chosen.labels else "regression"
    columns = {
        "text": chosen.columns,
        "label": LABEL_COLUMN,
        "objective": objective,
        "separator": "",
    }
    labelled = sentences.Task(
        name=task,
        objective=objective,
        labels=chosen.labels,
        score=partial(score_logits, task),
        metrics=chosen.metrics,
        columns=columns,
    )
    return sentences.Splits(labelled, None, evaluation)


def read(data: str | Path, task: str, split: str, seed: int = 0) -> Examples:
    """Reads the examples of a split, in the order of the file.

    Sentences are taken as they stand: nothing is stripped, and quotes mean nothing (GLUE's files
    have no quoting). QQP's broken rows are left out with a warning, as long as they are at most
    QQP_BROKEN of the file.

    Args:
        data: a folder, a URL, an id on the hub, or "synthetic"; see the top of this file.
        task: a key of TASKS.
        split: "train", or one of the task's evaluation splits.
        seed: of the synthetic examples.
    Raises:
        InputError: an unknown task or split; no such data; a file that is not what GLUE has, with
            the line.
    """
    chosen = find_task(task)
    _check_split(chosen, split)
    if str(data) == "synthetic":
        return _synthetic(chosen, split, seed)

    folder = local_folder(data, chosen)
    if not folder.is_dir():
        return _read_hub(str(data), chosen, split)

    table = _find_table(folder, chosen, split)
    if table is not None:
        examples = _examples_of_rows(table.rows, f"{data}, split {split}", chosen)
        return replace(examples, source=table.source, left_out=table.left_out)

    path, left_out = _find_tsv(folder, chosen, split)
    examples, broken = _read_tsv(path, chosen)
    if broken:
        warnings.warn(
            f"{path}: {len(broken)} broken rows are left out, the first: {broken[0]}",
            stacklevel=2,
        )
    return replace(examples, source=f"{path.parent.name}/{path.name}", left_out=left_out)


def _check_split(task: Task, split: str) -> None:
    """Raises InputError for a split that a task is neither trained nor evaluated on."""
    known = ("train", *task.evaluation)
    if split in known:
        return

    hidden = ""
    if split.startswith("test"):
        hidden = "; the labels of GLUE's test splits are not public"
    raise InputError(
        f"split is {split!r}; expected one of {', '.join(known)} for {task.name}{hidden}"
    )


def local_folder(data: str | Path, task: Task) -> Path:
    """Returns the folder of the data, which may not exist; copies a URL's files to the cache.

    Of a URL the folders of other tasks are not copied.
    """
    not_copied = set()
    for other in TASKS.values():
        if other != task:
            not_copied.add(f"!{other.name.lower()}/*")
            not_copied.add(f"!{other.folder.lower()}/*")

    folder = Path(local_copy(str(data), "*", *sorted(not_copied))).expanduser()
    if folder.is_file():
        raise InputError(
            f"{data} is a file; expected the folder that it is in, or GLUE's folder; {OWN_DATA}"
        )
    return folder


def _choose(
    names: Sequence[str], task: Task, split: str, where: str
) -> tuple[str | None, list[str]]:
    """Returns the name that means a split of a task, or None; and the names of no split of it.

    Args:
        names: of files, of folders, or of the splits of a data set.
        where: what has these names, for messages.
    Raises:
        InputError: two names mean the same split equally well, be it another than `split`.
    """
    name_of = {}
    for known in ("train", *task.evaluation):
        name_of[known] = _find_name(names, known, where)
    left_out = [name for name in names if name not in name_of.values()]
    return name_of[split], sorted(left_out)


def _find_name(names: Sequence[str], split: str, where: str) -> str | None:
    """Returns the name that means "train", "validation", or MNLI's "validation_matched"."""
    kind, _, variant = split.partition("_")
    if variant:
        names = [name for name in names if variant in splits.words(name)]
    return splits.named(names, "train" if kind == "train" else "valid", where)


# GLUE's own files


def _find_tsv(folder: Path, task: Task, split: str) -> tuple[Path, list[str]]:
    """Returns the TSV file of a split, and the names of TSV files beside it that are of no split.

    The task's own folder comes before the folder that has it.
    """
    candidates = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and normalized(path.name) == normalized(task.folder):
            candidates.append(path)
    candidates.append(folder)

    for candidate in candidates:
        stems = [path.stem for path in candidate.glob("[!.]*.tsv") if path.is_file()]
        if stems:
            refuse_another_task(candidate, task)
        stem, left_out = _choose(stems, task, split, str(candidate))
        if stem:
            return candidate / f"{stem}.tsv", [f"{name}.tsv" for name in left_out]

    first = candidates[0]
    name = f"{split.replace('validation', 'dev')}.tsv"
    found = ", ".join(sorted(path.name for path in first.iterdir())[:10]) or "nothing"
    raise InputError(
        f"{first} has no {name} and no parquet files of the split {split}, found {found}; "
        f"expected GLUE's {task.folder}/{name}; {OWN_DATA}"
    )


def refuse_another_task(folder: Path, task: Task) -> None:
    """Raises InputError for a folder that has the name of another task.

    The columns would not show it: those of CoLA and SST-2 are the same.
    """
    tasks = {normalized(one.folder): one.name for one in TASKS.values()}
    other = tasks.get(normalized(folder.resolve().name), task.name)
    if other != task.name:
        raise InputError(
            f"{folder} is the folder of {other}, and the task is {task.name}; give one of both"
        )


def normalized(name: str) -> str:
    """Returns a folder's name without case and hyphens, in which spellings differ: SST-2, sst2."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True)
class _Layout:
    """What the fields of a TSV file's lines are."""

    header: list[str]
    header_lines: int  # 0 in CoLA's file, else 1
    sentence_columns: list[int]
    label_column: int


def _read_tsv(path: Path, task: Task) -> tuple[Examples, list[InputError]]:
    """Reads one of GLUE's own files.

    Returns the examples, and one error for each broken row that is left out: only QQP's file may
    have any, at most QQP_BROKEN of its lines. Raises InputError, with the line, for a row or a
    header that is not GLUE's.
    """
    lines = read_lines(path)
    layout = _find_layout(lines, path, task)
    label_numbers = _label_numbers(task)
    columns = [[] for _ in task.own_columns]
    labels = []
    broken = []
    first = layout.header_lines
    for number, line in enumerate(lines[first:], start=first + 1):
        where = f"{path} line {number}"
        try:
            fields = _split_fields(line, layout, where, is_first_line=number == 1)
            label = _parse_label(fields[layout.label_column], task, label_numbers, where)
        except InputError as error:
            if task.name != "qqp":
                raise
            broken.append(error)
            continue
        for column, place in zip(columns, layout.sentence_columns, strict=True):
            column.append(fields[place])
        labels.append(label)

    if len(broken) > QQP_BROKEN * len(lines):
        raise broken[0]
    if not labels:
        raise InputError(f"{path} has no examples; expected GLUE's {task.folder}/{path.name}")
    return _examples(columns, labels, task, len(broken)), broken


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a UTF-8 file, without empty ones at its end.

    Only \\n ends a line: the sentences have other characters that Python takes for line ends.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # MRPC begins with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error

    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _find_layout(lines: list[str], path: Path, task: Task) -> _Layout:
    """Returns the layout that a file's first line gives; raises InputError for missing columns."""
    if task.name == "cola":
        header = _COLA_HEADER
        header_lines = 0
    else:
        header = lines[0].split("\t") if lines else []
        header_lines = 1

    needed = [*task.own_columns, task.own_label]
    missing = [name for name in needed if name not in header]
    if missing:
        if len(header) == 1 and header[0]:
            _refuse_other_separators(header[0], needed, f"{path} line 1")
        raise InputError(
            f"{path} line 1 has the columns {', '.join(header) or 'nothing'}; "
            f"expected {', '.join(missing)} among them, separated by tabs, "
            f"as in GLUE's {task.folder}; {OWN_DATA}"
        )

    return _Layout(
        header=header,
        header_lines=header_lines,
        sentence_columns=[header.index(name) for name in task.own_columns],
        label_column=header.index(task.own_label),
    )


def _split_fields(line: str, layout: _Layout, where: str, is_first_line: bool) -> list[str]:
    """Returns the fields of an example's line; raises InputError where any are missing or empty."""
    fields = line.split("\t")
    header = layout.header
    if is_first_line and len(fields) == 1:  # in CoLA's file, which has no header to check instead
        _refuse_other_separators(line, header, where)
    if len(fields) != len(header):
        raise InputError(f"{where} has {_describe_fields(fields, layout)}")
    for column in layout.sentence_columns:
        if not fields[column].strip():
            raise InputError(f"{where} has an empty {header[column]}; expected a sentence")
    return fields


def _refuse_other_separators(line: str, columns: Sequence[str], where: str) -> None:
    """Raises InputError for a line without tabs whose fields commas or the like separate."""
    for sign, name in ((",", "commas"), (";", "semicolons"), ("|", "vertical bars")):
        if line.count(sign) >= len(columns) - 1:
            raise InputError(
                f"{where} has no tab, but {name}: {line[:60]!r}; "
                f"expected {', '.join(columns)} separated by tabs; "
                "write it as TSV: separated by tabs, and without quoting"
            )


def _describe_fields(fields: list[str], layout: _Layout) -> str:
    """Returns what is wrong with a line that has more or fewer fields than the header."""
    header = layout.header
    what = f"{len(fields)} fields, separated by tabs; expected {len(header)}: {', '.join(header)}"
    if layout.header_lines == 0:
        what += " (without a header line)"

    for field in fields:
        if field.startswith('"') and field.count('"') % 2 == 1:
            what += (
                ". A field begins with \" and does not end: GLUE's files have no quoting, "
                "so write the file without it (csv.QUOTE_NONE), "
                "and without tabs and line breaks in the sentences"
            )
            break
    return what


def _label_numbers(task: Task) -> dict[str, int]:
    """Returns the number of a class by what may stand for it in a file: its name or its number."""
    numbers = {}
    for number, name in enumerate(task.labels):
        numbers[name] = number
        numbers[str(number)] = number
    return numbers


def _parse_label(text: str, task: Task, numbers: dict[str, int], where: str) -> float:
    """Returns the number of a class, or the score in a regression; raises InputError for neither.

    `numbers` maps a class as the file writes it, in lower case, to its number.
    """
    if task.labels:
        plain = text.strip().lower()
        if plain in numbers:
            return numbers[plain]
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(task.labels))
        raise InputError(f"{where} has the label {text!r}; expected one of {listed}")

    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    lowest, highest = SCORES
    if not lowest <= value <= highest:  # nor is "nan" a score
        raise InputError(
            f"{where} has the score {text!r}; expected a number from {lowest:g} to {highest:g}"
        )
    return value


def _examples(
    columns: list[list[str]], labels: Sequence[float], task: Task, skipped: int = 0
) -> Examples:
    """Returns Examples of one or two columns of sentences and their labels."""
    return Examples(
        first=columns[0],
        second=columns[1] if len(columns) > 1 else None,
        labels=np.array(labels, np.int64 if task.labels else np.float32),
        skipped=skipped,
    )


# `datasets`


def _read_hub(data: str, task: Task, split: str) -> Examples:
    """Reads a split of a data set on the hub, whose id is `data`."""
    if data.count("/") != 1 or data.startswith((".", "/", "~")):
        raise InputError(
            f"there is no folder {data}; expected GLUE's folder, with {task.folder} in it"
        )

    rows = call_datasets(
        f"{data} is neither a folder nor a data set of the hub "
        f"with {task.name} and its split {split} ({OWN_DATA})",
        "load_dataset",
        data,
        task.name,
        split=split,
    )
    examples = _examples_of_rows(rows, f"{data}, split {split}", task)
    return replace(examples, source=f"{data}'s split {split}")


@dataclass(frozen=True)
class _Table:
    """The rows of a split, and where they are from."""

    rows: "datasets.Dataset"  # noqa: F821
    source: str
    left_out: list[str]


def _find_table(folder: Path, task: Task, split: str) -> _Table | None:
    """Opens a split in a folder of save_to_disk, or of parquet or arrow files.

    Returns None if the folder has neither. `datasets` itself would take
    validation_matched-….parquet and validation_mismatched-….parquet for one split.
    """
    for candidate in (folder / task.name, folder / task.folder, folder):
        if (candidate / "state.json").exists():
            raise InputError(
                f"{candidate} is a single split written by save_to_disk; expected a DatasetDict"
            )

        if (candidate / "dataset_dict.json").exists():
            refuse_another_task(candidate, task)
            return _open_saved(candidate, task, split)

        paths, left_out = _find_table_files(candidate, task, split)
        if paths:
            names = [str(path) for path in paths]
            rows = call_datasets(
                f"{candidate} cannot be read by datasets",
                "load_dataset",
                paths[0].suffix[1:],
                data_files={split: names},
                split=split,
            )
            source = splits.shown(path.relative_to(candidate) for path in paths)
            return _Table(rows, source, left_out)
    return None


def _open_saved(folder: Path, task: Task, split: str) -> _Table:
    """Opens a split of a DatasetDict that save_to_disk has written."""
    saved = call_datasets(f"{folder} cannot be read by datasets", "load_from_disk", str(folder))
    name, left_out = _choose(list(saved), task, split, str(folder))
    if not name:
        raise InputError(
            f"{folder} has the splits {', '.join(saved)}; expected {split} for {task.name}"
        )
    return _Table(saved[name], f"its split {name}", [f"its split {other}" for other in left_out])


def _find_table_files(folder: Path, task: Task, split: str) -> tuple[list[Path], list[str]]:
    """Returns a split's parquet or arrow files, and the names of those beside them of no split.

    The first of these forms that is there counts: train.parquet or train-00000-of-00001.parquet,
    then data/train-….parquet, then train/….parquet.
    """
    for suffix in ("parquet", "arrow"):
        for pattern in (f"[!.]*.{suffix}", f"data/[!.]*.{suffix}", f"[!.]*/[!.]*.{suffix}"):
            files: dict[str, list[Path]] = {}
            for path in sorted(folder.glob(pattern)):
                name = path.parent.name if "*/" in pattern else _without_shard_number(path)
                files.setdefault(name, []).append(path)
            if any(splits.says_split(Path(name)) for name in files):
                refuse_another_task(folder, task)

            chosen, unused = _choose(list(files), task, split, str(folder))
            if chosen:
                left_out = []
                for name in unused:
                    left_out += [str(path.relative_to(folder)) for path in files[name]]
                return files[chosen], left_out
    return [], []


def _without_shard_number(path: Path) -> str:
    """Returns a file's name without its suffix; for a shard also without its number."""
    return re.sub(r"-\d+(-of-\d+)?(-[0-9a-f]+)?$", "-of", path.stem)


def _examples_of_rows(rows: "datasets.Dataset", where: str, task: Task) -> Examples:  # noqa: F821
    """Returns the rows of a data set as Examples; raises InputError for rows that are not GLUE's.

    `where` names the data, for messages.
    """
    missing = [name for name in (*task.columns, LABEL_COLUMN) if name not in rows.column_names]
    if missing:
        raise InputError(
            f"{where} has the columns {', '.join(rows.column_names)}; "
            f"expected {', '.join(missing)} for {task.name}; {OWN_DATA}"
        )
    if len(rows) == 0:
        raise InputError(f"{where} has no examples")

    columns = [list(rows[name]) for name in task.columns]
    for name, values in zip(task.columns, columns, strict=True):
        check_sentences(values, name, where, task)

    label_numbers = _numbers_of_feature(rows.features[LABEL_COLUMN], where, task)
    labels = []
    for number, label in enumerate(rows[LABEL_COLUMN]):
        if label is None or label == -1:
            raise InputError(
                f"{where}, row {number} has the label {label}, which stands for a hidden one; "
                "expected a split with labels"
            )
        labels.append(_parse_label(str(label), task, label_numbers, f"{where}, row {number}"))
    return _examples(columns, labels, task)


def check_sentences(sentences: list[Any], column: str, where: str, task: Task) -> None:
    """Raises InputError for a row that has no text."""
    may_be_empty = task.name == "qqp"  # three of its questions are, also on the hub
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or not (may_be_empty or sentence.strip()):
            raise InputError(
                f"{where}, row {number} has {sentence!r} as its {column}; expected a sentence"
            )


def _numbers_of_feature(feature: Any, where: str, task: Task) -> dict[str, int]:
    """Returns the number of a class by what stands for it in a data set's label column.

    A ClassLabel's names decide, since its numbers may be in another order than the task's.
    """
    names = getattr(feature, "names", None)
    if names is None or not task.labels:
        return _label_numbers(task)

    plain = [name.strip().lower() for name in names]
    if sorted(plain) != sorted(task.labels):
        raise InputError(
            f"{where} has the labels {', '.join(names)}; "
            f"expected {', '.join(task.labels)} for {task.name}"
        )
    return {str(number): task.labels.index(name) for number, name in enumerate(plain)}


# Synthetic twins

# Common words, which every tokenizer takes whole, those of pretrained models included.
_WORDS = (
    "the a an this that some small big old new red blue green black white long short and of in on "
    "with near under over from by at very quite then now here there today dog cat horse bird fish "
    "tree house car river"
)
_FILLERS = _WORDS.split()
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_NO_NUMBER = -1


def _synthetic(task: Task, split: str, seed: int) -> Examples:
    """Makes a task of the same type; a small encoder learns it from scratch in some hundred steps.

    Sentences have 4 to 25 words, most of them fewer than 10. The second, third or fourth word is a
    number, one to ten; all other words are drawn independently.

        one sentence            the class says whether the number is above five
        two classes             whether the first sentence's number is the larger; they differ by
                                2 or more
        three classes (MNLI)    likewise entailment and contradiction; neutral: the hypothesis has
                                no number
        regression              2.5 + 2.5 (first - second) / 9

    Swapping the sentences of a pair changes the answer and leaves the words what they are, so a bag
    of words knows nothing (of MNLI, only what is neutral). The number comes early so that its
    position tells models without token types of which sentence it is; anywhere in a sentence, they
    take much longer to learn it.
    """
    size = 2048 if split == "train" else 512
    split_number = ("train", *task.evaluation).index(split)
    task_number = sorted(TASKS).index(task.name)
    rng = np.random.default_rng((seed, split_number, task_number))

    num_classes = max(len(task.labels), 1)
    classes = rng.permutation(np.arange(size) % num_classes)  # equally frequent
    columns: list[list[str]] = [[] for _ in task.columns]
    labels = []
    for class_number in classes.tolist():
        label = class_number
        if len(columns) == 1:
            values = [int(rng.integers(5)) + 5 * class_number]
        elif not task.labels:
            values = rng.integers(len(_NUMBERS), size=2).tolist()
            label = 2.5 + 2.5 * (values[0] - values[1]) / (len(_NUMBERS) - 1)
        else:
            values = _synthetic_pair(task.labels[class_number], rng)
        labels.append(label)
        for column, value in zip(columns, values, strict=True):
            column.append(_synthetic_sentence(value, rng))
    return _examples(columns, labels, task)


def _synthetic_pair(label: str, rng: np.random.Generator) -> list[int]:
    """Draws two indices of _NUMBERS whose order is the answer; neutral: the second is no number."""
    smaller = int(rng.integers(len(_NUMBERS) - 2))
    larger = int(rng.integers(smaller + 2, len(_NUMBERS)))
    if label == "neutral":
        return [int(rng.integers(len(_NUMBERS))), _NO_NUMBER]
    if label in ("entailment", "equivalent", "duplicate"):
        return [larger, smaller]
    return [smaller, larger]


def _synthetic_sentence(value: int, rng: np.random.Generator) -> str:
    """Draws a sentence with the number _NUMBERS[value] in it, or without for _NO_NUMBER."""
    is_short = rng.random() < 0.6
    num_words = int(rng.integers(3, 9) if is_short else rng.integers(9, 25))
    words = [_FILLERS[index] for index in rng.integers(len(_FILLERS), size=num_words)]

    if value == _NO_NUMBER:
        index = int(rng.integers(len(_FILLERS)))
        extra = _FILLERS[index]
    else:
        extra = _NUMBERS[value]
    words.insert(int(rng.integers(1, 4)), extra)

    # XLNet's vocabulary is learnt from what different words have in common: of "dog" and "dog,",
    # that is "dog".
    has_comma = rng.random(num_words) < 0.05
    for index in np.flatnonzero(has_comma).tolist():
        words[index] += ","
    return " ".join(words) + "."


# Metrics


def score(task: str, predictions: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Computes GLUE's metrics of a task, each at most 1.

    Args:
        task: a key of TASKS.
        predictions: [n] class numbers, or scores in a regression.
        labels: [n] likewise.
    Returns:
        "mcc" (Matthews' correlation) and "accuracy" for cola, "accuracy" and "f1" (of class 1) for
        mrpc and qqp, "pearson" and "spearman" for stsb, else "accuracy". Constant predictions have
        a correlation of 0.
    Raises:
        ValueError: the numbers of predictions and labels differ, or there are none.
    """
    metrics = find_task(task).metrics
    predictions = np.asarray(predictions)
    labels = np.asarray(labels)
    if predictions.shape != labels.shape or labels.ndim != 1 or not labels.size:
        raise ValueError(
            f"predictions {list(predictions.shape)} and labels {list(labels.shape)}; "
            "expected as many, one or more"
        )
    return {name: _metric(name, predictions, labels) for name in metrics}


def score_logits(task: str, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes GLUE's metrics of logits [n, classes], or [n, 1] in a regression; see `score`."""
    predictions = logits.argmax(1) if find_task(task).labels else logits[:, 0]
    return score(task, predictions, labels)


def _metric(name: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    """Computes one metric; `name` is one of those in TASKS."""
    if name in ("pearson", "spearman"):
        return _correlation(name, predictions, labels)

    # Imported here: it takes a second and 60 MB in each worker process, which never scores.
    from sklearn import metrics

    if name == "mcc":
        return float(metrics.matthews_corrcoef(labels, predictions))
    if name == "accuracy":
        return float(metrics.accuracy_score(labels, predictions))
    return float(metrics.f1_score(labels, predictions, zero_division=0))


def _correlation(name: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    """Computes the correlation of Pearson or Spearman; 0 where one side is constant."""
    from scipy import stats  # imported here: see _metric

    if not (np.isfinite(predictions).all() and np.isfinite(labels).all()):
        raise ValueError("predictions or labels are not finite")
    # In float64: float32 predictions that hardly differ would have a variance of rounding errors.
    predictions = predictions.astype(np.float64)
    labels = labels.astype(np.float64)
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    correlation = stats.pearsonr if name == "pearson" else stats.spearmanr
    return float(correlation(predictions, labels)[0])
