"""Reads a user's own sentences and labels, by the names of their columns.

    columns = Columns(text=("review",), label="stars")
    opened = open_splits("reviews.csv", columns)          # sentences.Splits: task and examples

Data is one of
    a file: CSV, TSV, JSON lines (each also as .gz), parquet or arrow
    a folder of such files, or of save_to_disk; data/splits.py says which are trained on
    the URL of one of these, such as gs://bucket/reviews.csv, see data/remote.py
    an id on the Hugging Face hub

CSV is UTF-8 with a header line. Commas, semicolons or tabs separate its fields: the sign under
which the header has all columns that are named. Fields in quotes may have line breaks.

Without a validation split a tenth of the rows is held out, see `targets.held_out`.
"""

import bisect
import csv
import dataclasses
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data import csv_text, sentences, splits, targets
from data.remote import local_copy
from errors import InputError

TEXT_KINDS = ("csv", "tsv", "jsonl", "ndjson")  # endings of files; also with .gz
TABLE_KINDS = ("parquet", "arrow")
KIND = re.compile(rf"\.(?:({'|'.join(TEXT_KINDS)})(?:\.gz)?|({'|'.join(TABLE_KINDS)}))$", re.I)
EXPECTED = "expected CSV, TSV or JSON lines (.csv, .tsv, .jsonl, also with .gz), parquet or arrow"

SAVED = "dataset_dict.json"  # in a folder that DatasetDict.save_to_disk has written
SAVED_SPLIT = "state.json"  # in one that Dataset.save_to_disk has written


@dataclass(frozen=True)
class Columns:
    """Where a user's data have text and labels, and what the labels mean.

    Attributes:
        text: columns of the sentences, one or two.
        label: column of the labels.
        objective: one of targets.OBJECTIVES.
        separator: between the labels of a text, in multilabel; "": each label is a list.
    """

    text: tuple[str, ...]
    label: str
    objective: str = "classes"
    separator: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        return (*self.text, self.label)


@dataclass(frozen=True)
class Table:
    """The rows of one file, or of one split of a data set.

    Attributes:
        name: in messages.
        texts: the values of each column of text.
        labels: as the file has them, see targets.py.
        lines: of a text file the first line of each row, counted from 1; else empty.
    """

    name: str
    texts: list[list[str]]
    labels: list[Any] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Returns where a 0-based row stands."""
        if self.lines:
            return f"{self.name} line {self.lines[row]}"
        return f"{self.name}, row {row + 1}"


class Rows:
    """The rows of a split: those of its tables, one after the other.

    Attributes:
        source: what they are read from, for the first line of a run.
        texts: the values of each column of text.
        labels: as the files have them.
    """

    def __init__(self, tables: Sequence[Table], source: str):
        self.source = source
        self.texts = [[] for _ in tables[0].texts]
        self.labels = []
        self._tables = tables
        self._starts = []  # the first row of each table
        for table in tables:
            self._starts.append(len(self.labels))
            self.labels += table.labels
            for column, values in zip(self.texts, table.texts, strict=True):
                column += values

    def place(self, row: int | None) -> str:
        """Returns where a 0-based row stands; None: where all of them do."""
        if row is None:
            names = [table.name for table in self._tables]
            return splits.shown(names)
        number = bisect.bisect_right(self._starts, row) - 1
        return self._tables[number].place(row - self._starts[number])

    def keys(self) -> list[str]:
        """Returns what identifies each row: its text."""
        return ["\t".join(texts) for texts in zip(*self.texts, strict=True)]

    def examples(
        self,
        encoded: np.ndarray,
        source: str,
        chosen: np.ndarray | None = None,
        left_out: Sequence[str] = (),
    ) -> sentences.Examples:
        """Returns the rows as examples.

        Args:
            encoded: their labels, see `targets.encode`.
            source, left_out: of sentences.Examples.
            chosen: bool [n], which rows; None: all.
        """
        indices = np.arange(len(encoded)) if chosen is None else np.flatnonzero(chosen)
        columns = []
        for values in self.texts:
            columns.append([values[index] for index in indices])
        return sentences.Examples(
            first=columns[0],
            second=columns[1] if len(columns) > 1 else None,
            labels=encoded[indices],
            source=source,
            left_out=left_out,
        )


@dataclass(frozen=True)
class Found:
    """What data has.

    Attributes:
        read: reads the rows of a split, by its name: "train", "valid" or "test". Where no name says
            a split, all rows are those of "train".
        left_out: the names of what no training reads.
        is_one: it is a single file or table, so that no name says a split.
    """

    read: dict[str, Callable[[], Rows]]
    left_out: list[str] = field(default_factory=list)
    is_one: bool = False


def open_splits(data: str, columns: Columns) -> sentences.Splits:
    """Reads the rows of a user's data, and finds out what their labels are.

    Args:
        data: see the top of this file.
    Raises:
        InputError: no such data or column; a file that cannot be read, with the line; an empty
            text; labels that `targets` refuses.
    """
    found = find(data, columns)
    train = found.read["train"]()
    separator = columns.separator
    target = targets.find(train.labels, columns.objective, separator, train.place, columns.label)
    encoded = targets.encode(train.labels, target, separator, train.place)

    only_in_training = ()
    if "valid" not in found.read:
        held = targets.held_out(train.keys(), encoded, target)
        only_in_training = targets.only_in_training(held, encoded, target)
        source, evaluated_source = _sources_held_out(train, held, columns)
        evaluated = train.examples(encoded, evaluated_source, chosen=held)
    else:
        held = np.zeros(len(encoded), bool)
        source = train.source
        evaluated = _encoded(found.read["valid"](), target, columns)

    task = _task(data, target, columns, _describe(target, columns, only_in_training))
    trained = train.examples(encoded, source, chosen=~held, left_out=found.left_out)
    return sentences.Splits(task, trained, {"validation": evaluated})


def open_evaluation(
    data: str, columns: Columns, names: Sequence[str], split: str = "", is_own: bool = True
) -> sentences.Splits:
    """Reads the rows on which a finished run is evaluated.

    Args:
        names: of the run's classes or labels; in a regression of its column.
        split: train, valid or test; "": all rows of another file than the run's, else valid.
            Without a validation split, train and valid are what a training would have.
        is_own: the run was trained on this data.
    Returns:
        The examples, by the name of their split: "all", "train", "valid" or "test".
    Raises:
        InputError: as `open_splits`; a class that the run does not have; no such split.
    """
    target = targets.Target(columns.objective, tuple(names))
    task = _task(data, target, columns)
    found = find(data, columns, to_train=False)
    if found.is_one and not (split or is_own):
        rows = found.read["train"]()
        return sentences.Splits(task, None, {"all": _encoded(rows, target, columns)})

    wanted = split or "valid"
    has_valid = "valid" in found.read
    holds_out = "train" in found.read and not has_valid and (split or is_own)
    if wanted in found.read and not (wanted == "train" and holds_out):
        rows = found.read[wanted]()
        return sentences.Splits(task, None, {wanted: _encoded(rows, target, columns)})
    if wanted == "test" or not holds_out:
        raise InputError(_no_split(data, found, wanted))

    rows = found.read["train"]()
    encoded = targets.encode(rows.labels, target, columns.separator, rows.place)
    held = targets.held_out(rows.keys(), encoded, target)
    train_source, valid_source = _sources_held_out(rows, held, columns)
    if wanted == "train":
        examples = rows.examples(encoded, train_source, chosen=~held)
    else:
        examples = rows.examples(encoded, valid_source, chosen=held)
    return sentences.Splits(task, None, {wanted: examples})


def _no_split(data: str, found: Found, split: str) -> str:
    """Returns the sentence on data without a split."""
    if found.is_one:
        return f"{data} is one file, without a {split} split; leave --split {split} out"
    listed = ", ".join(found.read)
    return f"{data} has no {split} split, only {listed}; give --split {next(iter(found.read))}"


def _encoded(rows: Rows, target: targets.Target, columns: Columns) -> sentences.Examples:
    """Returns all rows of a split as examples."""
    labels = targets.encode(rows.labels, target, columns.separator, rows.place)
    return rows.examples(labels, rows.source)


def _task(data: str, target: targets.Target, columns: Columns, found: str = "") -> sentences.Task:
    """Returns what a user's sentences are labelled with; `found` as in sentences.Task."""
    return sentences.Task(
        name=name_of(data),
        objective=target.objective,
        labels=target.names,
        score=partial(targets.score, target),
        metrics=target.metrics,
        found=found,
        columns=dataclasses.asdict(columns),
    )


def _sources_held_out(rows: Rows, held: np.ndarray, columns: Columns) -> tuple[str, str]:
    """Returns what the first line of a run calls the rows to train on, and those held out."""
    train = f"{rows.source} without a tenth"
    return train, f"that tenth, {_how_held_out(held, columns)}"


def _how_held_out(held: np.ndarray, columns: Columns) -> str:
    """Returns in words how many rows are held out, and how they are chosen."""
    strata = "" if columns.objective == "regression" else f"of each {columns.label}, "
    return f"{held.sum():,} rows, {strata}by a hash of the text"


def _describe(target: targets.Target, columns: Columns, only_in_training: Sequence[str]) -> str:
    """Returns what the first line of a run says of the labels."""
    if target.objective == "regression":
        return f"{columns.label} as a number, "
    kind = "classes" if target.objective == "classes" else "labels"
    listed = targets.listed(target.names)
    if only_in_training:
        listed += f"; in training only: {targets.listed(only_in_training)}"
    return f"{len(target.names)} {kind} of {columns.label} ({listed}), "


def name_of(data: str) -> str:
    """Returns the name of data for that of a run: of a file without its ending, of a folder, or of
    a data set without its owner."""
    last = data.partition("?")[0].rstrip("/").rpartition("/")[2]
    if last in ("", ".", "..", "~"):
        last = Path(data).expanduser().resolve().name
    stem = KIND.sub("", last)
    return re.sub(r"[^\w.-]+", "-", stem) or "data"


# Files, folders and data sets


def find(data: str, columns: Columns, to_train: bool = True) -> Found:
    """Finds the splits of a user's data, and reads none; see `open_splits` for arguments and
    errors.

    Args:
        to_train: refuses data without rows to train on.
    """
    endings = [f"*.{kind}" for kind in (*TEXT_KINDS, *TABLE_KINDS)]
    endings += [f"*.{kind}.gz" for kind in TEXT_KINDS]
    saved = [f"*{SAVED}", f"*{SAVED_SPLIT}", "*dataset_info.json"]
    path = Path(local_copy(data, *endings, *saved)).expanduser()

    if path.is_file():
        return Found({"train": partial(_read_one, path, columns)}, is_one=True)
    if not path.is_dir():
        return _find_hub(data, columns, to_train)
    if (path / SAVED).exists() or (path / SAVED_SPLIT).exists():
        what = f"{path} cannot be read by datasets"
        dataset = sentences.call_datasets(what, "load_from_disk", str(path))
        return _of_dataset(dataset, data, columns, to_train)
    return _find_folder(path, endings, columns, to_train)


def _read_one(path: Path, columns: Columns) -> Rows:
    """Reads data that is one file."""
    return Rows([_read_file(path, columns)], path.name)


def _find_folder(folder: Path, endings: Sequence[str], columns: Columns, to_train: bool) -> Found:
    """Finds the files of a folder and its subfolders."""
    paths = splits.below(folder, *endings)
    if not paths:
        names = sorted(path.name for path in folder.iterdir())
        raise InputError(f"{folder} has {splits.shown(names) or 'nothing'}; {EXPECTED}")
    files = splits.sort_files(paths, folder)
    if to_train and not files.train:
        names = [path.relative_to(folder) for path in paths]
        raise InputError(f"{folder} has no file to train on, only {splits.shown(names)}")

    of_split = {"train": files.train, "valid": files.valid, "test": []}
    for path in files.left_out:
        if splits.split_of_path(path.relative_to(folder)) == "test":
            of_split["test"].append(path)
    read = {}
    for split, paths_of_split in of_split.items():
        if paths_of_split:
            read[split] = partial(_read_files, paths_of_split, folder, columns)
    left_out = [str(path.relative_to(folder)) for path in files.left_out]
    return Found(read, left_out)


def _read_files(paths: Sequence[Path], folder: Path, columns: Columns) -> Rows:
    """Reads the files of a split; raises InputError where they are of several kinds."""
    first_of_kind = {}
    for path in paths:
        first_of_kind.setdefault(KIND.search(path.name)[0].lower(), path.relative_to(folder))
    if len(first_of_kind) > 1:
        listed = " and ".join(map(str, first_of_kind.values()))
        raise InputError(
            f"{folder} has {listed} for one split, which may be the same rows twice; "
            "keep files of one kind"
        )
    source = splits.shown(path.relative_to(folder) for path in paths)
    return Rows([_read_file(path, columns) for path in paths], source)


def _find_hub(data: str, columns: Columns, to_train: bool) -> Found:
    """Opens a data set on the hub, whose id is `data`."""
    if data.count("/") != 1 or data.startswith((".", "/", "~")):
        raise InputError(f"there is no file or folder {data}; {EXPECTED}")
    what = f"{data} is neither a file, a folder nor a data set of the hub"
    dataset = sentences.call_datasets(what, "load_dataset", data)
    return _of_dataset(dataset, data, columns, to_train)


def _of_dataset(
    dataset: "datasets.DatasetDict | datasets.Dataset",  # noqa: F821
    where: str,
    columns: Columns,
    to_train: bool,
) -> Found:
    """Finds the splits of a data set.

    A single split is trained on, whatever its name. `where` names the data, for messages.
    """
    found = splits.of_dataset(dataset, where, to_train)
    read = {}
    for split, name in found.names.items():
        read[split] = partial(_read_split, found.tables, name, where, columns)
    return Found(read, found.left_out, found.is_one)


def _read_split(
    dataset: "datasets.DatasetDict",  # noqa: F821
    name: str,
    where: str,
    columns: Columns,
) -> Rows:
    """Reads a split of a data set."""
    table = _read_table(dataset[name], f"{where}, split {name}", columns)
    return Rows([table], f"its split {name}")


def _read_file(path: Path, columns: Columns) -> Table:
    """Reads a file; its ending says what it is."""
    found = KIND.search(path.name)
    if found is None:
        raise InputError(f"{path} has an ending that is not known; {EXPECTED}")
    kind = (found[1] or found[2]).lower()
    if kind in TABLE_KINDS:
        return _read_table(_open_table(path, kind), str(path), columns)

    text = read_text(path)
    table = Table(str(path), [[] for _ in columns.text])
    rows = _csv_rows(text, path, columns) if kind in ("csv", "tsv") else json_rows(text, path)
    for line, row in rows:
        where = f"{path} line {line}"
        if not table.lines:
            _check_columns(row, columns, where)
        for column, values in zip(columns.text, table.texts, strict=True):
            values.append(_checked_text(row.get(column), column, where))
        label = row.get(columns.label)
        for one in label if isinstance(label, list) else [label]:
            if isinstance(one, str):
                sentences.check_unicode(one, columns.label, where)
        table.labels.append(label)
        table.lines.append(line)
    if not table.lines:
        raise InputError(f"{path} has no rows; expected some with {', '.join(columns.needed)}")
    return table


def _open_table(path: Path, kind: str) -> "datasets.Dataset":  # noqa: F821
    """Opens a file of one of TABLE_KINDS."""
    return sentences.call_datasets(
        f"{path} cannot be read by datasets",
        "load_dataset",
        kind,
        data_files={"train": [str(path)]},
        split="train",
    )


def _check_columns(names: Iterable[str], columns: Columns, where: str) -> None:
    """Raises InputError where a column that is needed is not among the names."""
    names = list(names)
    missing = [name for name in columns.needed if name not in names]
    if missing:
        raise InputError(
            f"{where} has the columns {', '.join(names)}; "
            f"there is no {' and no '.join(missing)}, which --text and --label name"
        )


def _checked_text(value: Any, column: str, where: str) -> str:
    """Returns the value of a text column; raises InputError where it has no text."""
    if isinstance(value, str) and value.strip():
        sentences.check_unicode(value, column, where)
        return value
    what = "an empty" if value is None or isinstance(value, str) else f"{value!r} as its"
    raise InputError(f"{where} has {what} {column}; expected text")


def read_text(path: Path) -> str:
    """Returns the text of a file in UTF-8, with or without a byte order mark; unpacks .gz."""
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} line {line} is not UTF-8; convert the file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


# CSV


def _csv_rows(text: str, path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the first line of each row of a CSV file, and its fields by the header's names."""
    separator = _find_separator(text, path, columns)
    rows = _split_rows(text, separator, path)
    _, header = next(rows)
    header = [name.strip() for name in header]
    for name in columns.needed:
        if header.count(name) > 1:
            raise InputError(f"{path} has {header.count(name)} columns {name}; rename them")

    for line, fields in rows:
        if len(fields) != len(header):
            raise InputError(
                f"{path} line {line} has {len(fields)} fields; expected {len(header)}, "
                f"as in the header: {', '.join(header)}"
            )
        yield line, dict(zip(header, fields, strict=True))


def column_names(data: str) -> list[str]:
    """Returns the names of the columns of a user's own local file; [] for data that is none.

    Raises:
        InputError: it cannot be read, or is empty.
    """
    path = Path(data).expanduser()
    found = KIND.search(path.name)
    if found is None or not path.is_file():
        return []
    kind = (found[1] or found[2]).lower()
    if kind in TABLE_KINDS:
        return _open_table(path, kind).column_names

    text = read_text(path)
    if kind not in ("csv", "tsv"):
        for _, row in json_rows(text, path):
            return list(row)
        raise InputError(f"{path} has no rows")
    headers = [_header(text, separator) for separator in csv_text.SEPARATORS]
    most = max(headers, key=len)
    if len(most) < 2:
        raise InputError(
            f"{path} has no header of several columns in its first line, {text[:60]!r}"
        )
    return most


def _header(text: str, separator: str) -> list[str]:
    """Returns the names of the columns of a CSV file under a separator; [] of an empty file."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a long text is no error
    # Not strict: under another sign than the file's, its quotes stand in wrong places.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    header = next(filter(None, reader), [])
    return [name.strip() for name in header]


def _find_separator(text: str, path: Path, columns: Columns) -> str:
    """Returns the sign under which the first line has all columns that are needed."""
    most = []
    for separator in csv_text.SEPARATORS:
        header = _header(text, separator)
        if all(name in header for name in columns.needed):
            return separator
        if len(header) > len(most):
            most = header
    if not most:
        raise InputError(f"{path} is empty; expected a header line and rows")
    if len(most) == 1:
        most = [f"{most[0][:60]!r}, without a comma, semicolon or tab"]
    _check_columns(most, columns, str(path))
    raise AssertionError("a column is missing")


def _split_rows(text: str, separator: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the first line and the fields of each row; empty lines are none.

    Raises InputError for quotes that are not CSV's: read on, they would join or cut rows.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 1
        fields = csv_text.next_row(reader, f"{path} line {line}")
        if fields is None:
            return
        if fields:
            yield line, fields


# JSON lines, and tables of `datasets`


def json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of each line that is not empty, and its JSON object."""
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:  # the latter of ten thousand brackets
            raise InputError(f"{path} line {line} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{path} line {line} is not a JSON object, with names of columns")
        yield line, row


def _read_table(rows: "datasets.Dataset", name: str, columns: Columns) -> Table:  # noqa: F821
    """Returns the rows of a table of `datasets`; classes that have names there go by these."""
    _check_columns(rows.column_names, columns, name)
    texts = []
    for column in columns.text:
        values = []
        for row, value in enumerate(rows[column], start=1):
            values.append(_checked_text(value, column, f"{name}, row {row}"))
        texts.append(values)

    labels = list(rows[columns.label])
    feature = rows.features[columns.label]
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of a list: its values'
    if names is not None:
        labels = [_named(label, names) for label in labels]
    if not labels:
        raise InputError(f"{name} has no rows; expected some with {', '.join(columns.needed)}")
    return Table(name, texts, labels)


def _named(label: Any, names: Sequence[str]) -> Any:
    """Returns the name of a class number, or the names of several; None for a hidden one, -1."""
    if isinstance(label, list):
        return [_named(one, names) for one in label]
    if label is None or label == -1:
        return None
    return names[label]
