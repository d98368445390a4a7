"""Pictures that a CSV names, with their labels: labels.csv, which data/imagenet.py opens.

    file,label,split
    pictures/1.jpg,cat,train
    pictures/2.jpg,dog,val

The column of files is `file`, `filename` or `file_name`; names are relative to the CSV's folder.
The splits are those of a column `split`, else of the folders in the names (train/1.jpg), else
train/ and val/ have a labels.csv each, else a tenth is held out (data/targets.py).
"""

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from data import csv_text, splits, targets
from errors import InputError

NAME = "labels.csv"
FILE_COLUMNS = ("file", "filename", "file_name")  # file_name is that of datasets' imagefolder
SPLIT_COLUMN = "split"
TRUTHS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


@dataclass(frozen=True)
class Columns:
    """What of a CSV is learned.

    Attributes:
        labels: names of the columns; (): the only one beside those of the file and the split.
        objective: one of data/targets.py.
        separator: between the labels of a text, in multilabel.
    """

    labels: tuple[str, ...] = ()
    objective: str = "classes"
    separator: str = ""

    @property
    def asked_for(self) -> bool:
        """Whether the user gave one of them, so that no class folders are meant."""
        return self != Columns()


@dataclass(frozen=True)
class Tables:
    """Where the CSVs of a data set are.

    Attributes:
        train: the file of the training split, or of all splits.
        evaluation: the file of the evaluation split; "": it has no file of its own.
        left_out: the folders beside them that are not read.
    """

    train: str
    evaluation: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows of a CSV: of all of it, or of a split.

    Attributes:
        path: of the CSV.
        header: names of the columns.
        rows: the cells of each row, as text.
        lines: the number of each row's line in the CSV.
        pictures: the path of each row's file.
    """

    path: str
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]
    pictures: list[str]

    def column(self, name: str) -> list[str]:
        """Returns the cells of a column, without blanks around them."""
        number = self.header.index(name)
        return [row[number].strip() for row in self.rows]

    def where(self, row: int | None) -> str:
        """Returns the place of a 0-based row, for messages; None: of all rows."""
        return self.path if row is None else f"{self.path} line {self.lines[row]}"

    def select(self, wanted: Sequence[bool] | np.ndarray) -> "Table":
        """Returns the rows that are wanted."""
        numbers = np.flatnonzero(wanted)
        return replace(
            self,
            rows=[self.rows[number] for number in numbers],
            lines=[self.lines[number] for number in numbers],
            pictures=[self.pictures[number] for number in numbers],
        )

    @property
    def file_column(self) -> str:
        """The name of the column of files; raises InputError where there is not just one."""
        found = [name for name in FILE_COLUMNS if name in self.header]
        if len(found) == 1:
            return found[0]
        have = f"{len(found)} columns" if found else "no column"
        raise InputError(
            f"{self.path} has {have} of file names; expected one that is called "
            f"{', '.join(FILE_COLUMNS[:-1])} or {FILE_COLUMNS[-1]}, and commas, semicolons or tabs "
            f"between columns; its header is {','.join(self.header)}"
        )

    @property
    def files(self) -> list[str]:
        """The name of each row's file, relative to the folder of the CSV."""
        return self.column(self.file_column)


@dataclass(frozen=True)
class Parts:
    """The rows to train on and those to evaluate on; `evaluation` None: to be held out of `train`.

    The other attributes are what the first line of a run says of them.
    """

    train: Table
    train_source: str
    evaluation: Table | None = None
    evaluation_source: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """The unit of a regression's labels: a model learns z, where the label is mean + deviation z.

    That is their mean and their standard deviation in the training split. A new head starts near 0,
    and with the labels as they are the size of the loss, and so the learning rate that fits, would
    depend on their unit.
    """

    mean: float = 0.0
    deviation: float = 1.0

    def to_units(self, labels: np.ndarray) -> np.ndarray:
        """Returns labels in this unit, float32."""
        return ((labels - self.mean) / self.deviation).astype(np.float32)

    def to_labels(self, units: np.ndarray) -> np.ndarray:
        """Returns labels of what a model predicts, float64."""
        return self.mean + self.deviation * units.astype(np.float64)


@dataclass(frozen=True)
class Labelled:
    """The pictures of one split.

    Attributes:
        paths: of the files.
        labels: see `targets.encode`; those of a regression in the unit of `scale`.
        target: of the training split.
        columns: that the labels are from.
        source, left_out: see data/splits.py.
        notes: what else the user should know.
    """

    paths: list[str]
    labels: np.ndarray
    target: targets.Target
    columns: tuple[str, ...]
    scale: Scale
    source: str
    left_out: list[str]
    notes: list[str]


# ---- files ---------------------------------------------------------------------------------------


def find_tables(data: str) -> Tables | None:
    """Returns the CSVs of a folder, or of a path that is a CSV; None where there is none.

    Raises InputError where it is not clear which of them count.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return Tables(str(path)) if path.suffix.lower() == ".csv" else None
    if not path.is_dir():
        return None

    try:
        folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError as error:
        raise InputError(f"folder {path} cannot be read: {error.strerror}") from error
    folders = [name for name in folders if not name.startswith(".")]
    own = [name for name in folders if (path / name / NAME).is_file()]
    train = splits.named(own, "train", data)
    if (path / NAME).is_file():
        if train is not None:
            raise InputError(f"{data} has {NAME} and {train}/{NAME}; keep one of them")
        return Tables(str(path / NAME))
    if train is None:
        return None

    evaluation = splits.named(folders, "valid", data) or splits.named(folders, "test", data)
    if evaluation is not None and evaluation not in own:
        raise InputError(f"{data} has {train}/{NAME}, but no {evaluation}/{NAME}; add it")
    left_out = tuple(f"{name}/" for name in folders if name not in (train, evaluation))
    table = str(path / evaluation / NAME) if evaluation else ""
    return Tables(str(path / train / NAME), table, left_out)


def open_table(path: str) -> tuple[Table, int]:
    """Reads a CSV and finds its files.

    Returns it, and the number of pictures beside these files that it does not name.

    Raises:
        InputError: it cannot be read, or names a file that is not there, or one twice.
    """
    table = _read(path)
    folders = _Folders(os.path.dirname(path))
    pictures = _find_files(table, folders)
    unnamed = folders.pictures() - set(pictures)
    return replace(table, pictures=pictures), len(unnamed)


def _read(path: str) -> Table:
    """Reads a CSV in UTF-8 with a header, without finding its files."""
    rows = []
    lines = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            separator = _separator(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = tuple(name.strip() for name in next(reader, []))
            for row in reader:
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise InputError(
                        f"{path} line {reader.line_num} has {len(row)} cells; "
                        f"expected the {len(header)} of its header, {','.join(header)}"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 ({error.reason}); save it so") from error
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num} is not CSV: {error}") from error

    if not rows:
        raise InputError(f"{path} has no rows; expected a header and a row for each picture")
    for name, count in Counter(header).items():
        if count > 1:
            raise InputError(f"{path} has {count} columns {name!r}; rename them")
    return Table(path, header, rows, lines, [])


def _separator(header: str) -> str:
    """Returns what stands between the columns of a CSV with this first line: what gives it a column
    of files, else a comma."""
    for separator in csv_text.SEPARATORS:
        names = [name.strip().strip('"') for name in header.split(separator)]
        if any(name in FILE_COLUMNS for name in names):
            return separator
    return ","


class _Folders:
    """The folders in which the files of a CSV lie; each is listed once.

    Args:
        folder: the CSV's, to which the names of files are relative.
    """

    def __init__(self, folder: str):
        self.folder = folder or "."
        self._names: dict[str, dict[str, str]] = {}  # by folder: the form of each name, and it

    def find(self, file: str) -> str | None:
        """Returns the path of a file; None where it is not there."""
        path = os.path.normpath(os.path.join(self.folder, file))
        parent, name = os.path.split(path)
        if parent not in self._names:
            try:
                entries = os.listdir(parent or ".")
            except OSError:
                entries = []
            self._names[parent] = {_form(entry): entry for entry in entries}

        found = self._names[parent].get(_form(name))
        return None if found is None else os.path.join(parent, found)

    def pictures(self) -> set[str]:
        """Returns the paths of all pictures in the folders in which `find` has looked."""
        found = set()
        for parent, names in self._names.items():
            for name in names.values():
                if name.lower().endswith(IMG_EXTENSIONS) and not name.startswith("."):
                    found.add(os.path.join(parent, name))
        return found


def _form(name: str) -> str:
    """Returns what counts in a name: systems differ in its Unicode form."""
    return unicodedata.normalize("NFC", name)


def _find_files(table: Table, folders: _Folders) -> list[str]:
    """Returns the path of each row's file."""
    paths = []
    missing = []
    line_of: dict[str, int] = {}
    for row, file in enumerate(table.files):
        if not file:
            raise InputError(f"{table.where(row)} has no name in {table.file_column}")
        path = folders.find(file)
        if path is None:
            missing.append(row)
            continue
        if path in line_of:
            raise InputError(
                f"{table.where(row)} names {file} again, after line {line_of[path]}; "
                "a picture has one row, with all its labels"
            )
        line_of[path] = table.lines[row]
        paths.append(path)

    if missing:
        files = table.files
        names = splits.shown(files[row] for row in missing)
        first = files[missing[0]]
        remedy = "; write / for \\ between folders" if "\\" in first else ""
        raise InputError(
            f"{table.path} names {len(missing):,} files that are not there, of {len(files):,}: "
            f"{names} (line {table.lines[missing[0]]}); names are relative to {folders.folder}, "
            f"and have their ending, such as .jpg{remedy}"
        )
    return paths


# ---- splits --------------------------------------------------------------------------------------


def _open_parts(tables: Tables) -> Parts:
    """Opens the CSVs and divides their rows into training and evaluation."""
    train, unnamed = open_table(tables.train)
    if tables.evaluation:
        evaluation, more = open_table(tables.evaluation)
        unnamed += more
        parts = Parts(train, _short(tables.train), evaluation, _short(tables.evaluation))
    else:
        parts = _divide(train)

    left_out = parts.left_out + tables.left_out
    if unnamed:
        left_out += (f"{unnamed:,} pictures that {os.path.basename(tables.train)} does not name",)
    return replace(parts, left_out=left_out)


def _short(path: str) -> str:
    """Returns the name of a CSV with that of its folder."""
    return "/".join(Path(path).parts[-2:])


def _divide(table: Table) -> Parts:
    """Divides the rows of a CSV by its column `split`, or by the folders of its files."""
    name = os.path.basename(table.path)
    said = _said_splits(table)
    count = Counter(said)
    if None in count:
        return Parts(table, name)
    if "train" not in count:
        raise InputError(
            f"{table.path} has no row of the split train; its rows say {', '.join(count)}"
        )

    def rows_of(split: str) -> Table:
        return table.select([own == split for own in said])

    parts = Parts(rows_of("train"), f"the split train of {name}")
    if "valid" in count:
        left_out = (f"{count['test']:,} rows of its split test",) if "test" in count else ()
        return replace(
            parts,
            evaluation=rows_of("valid"),
            evaluation_source="its split for validation",
            left_out=left_out,
        )
    if "test" in count:
        return replace(parts, evaluation=rows_of("test"), evaluation_source="its split test")
    return parts


def _said_splits(table: Table) -> list[str | None]:
    """Returns the split of each row, train, valid or test; or None for every row.

    Raises InputError where some rows say one and others do not.
    """
    if SPLIT_COLUMN in table.header:
        said = [splits.split_of(cell) for cell in table.column(SPLIT_COLUMN)]
        place = f"its column {SPLIT_COLUMN}"
        is_unclear = None in said
    else:
        said = [_split_of_folders(file) for file in table.files]
        place = "the folders of its file, as others do"
        is_unclear = None in said and len(set(said)) > 1

    if is_unclear:
        where = table.where(said.index(None))
        raise InputError(f"{where} says no split in {place}; expected train, val or test")
    return said


def _split_of_folders(file: str) -> str | None:
    """Returns the split that the folders of a file say; the file's own name does not count."""
    return splits.split_of_path(PurePath(file).parent / "0")


# ---- labels --------------------------------------------------------------------------------------


def _label_columns(table: Table, columns: Columns) -> tuple[str, ...]:
    """Returns the names of the columns of labels; raises InputError where that is not clear."""
    others = [name for name in table.header if name not in (table.file_column, SPLIT_COLUMN)]
    if not columns.labels:
        if len(others) != 1:
            raise InputError(
                f"{table.path} has the columns {', '.join(table.header)}; "
                "name the one of the labels by --label"
            )
        return tuple(others)

    for name in columns.labels:
        if name not in others:
            raise InputError(
                f"--label {name} is no column of labels in {table.path}; "
                f"expected one of {', '.join(others) or 'none'}"
            )
    if len(columns.labels) > 1 and columns.objective != "multilabel":
        raise InputError(
            f"--label names {len(columns.labels)} columns; --objective {columns.objective} takes "
            "one, and --objective multilabel several, of 0 and 1"
        )
    return columns.labels


def _find_target(table: Table, names: tuple[str, ...], columns: Columns) -> targets.Target:
    """Returns what the labels of the training rows are."""
    if len(names) > 1:
        return targets.Target("multilabel", names)
    values = table.column(names[0])
    return targets.find(values, columns.objective, columns.separator, table.where, names[0])


def _encode(
    table: Table, names: tuple[str, ...], target: targets.Target, columns: Columns
) -> np.ndarray:
    """Returns the labels of all rows, see `targets.encode`."""
    if len(names) > 1:
        return np.stack([_truths(table, name) for name in names], axis=1)
    return targets.encode(table.column(names[0]), target, columns.separator, table.where)


def _truths(table: Table, name: str) -> np.ndarray:
    """Returns a column of 0 and 1, or of false and true, as float32 [n]."""
    truths = np.zeros(len(table.rows), np.float32)
    for row, cell in enumerate(table.column(name)):
        if cell.lower() not in TRUTHS:
            raise InputError(
                f"{table.where(row)} has {cell!r} in {name}; "
                "expected 0 or 1, since --label names several columns"
            )
        truths[row] = TRUTHS[cell.lower()]
    return truths


def _find_scale(labels: np.ndarray, target: targets.Target, where: str) -> Scale:
    """Returns the unit of a regression's labels, by those of the training split."""
    if target.objective != "regression":
        return Scale()
    deviation = float(labels.std(dtype=np.float64))
    if deviation == 0:
        raise InputError(
            f"{where} has one value of {target.names[0]}, {labels[0]:g}, in all rows to train on; "
            "expected different numbers"
        )
    return Scale(float(labels.mean(dtype=np.float64)), deviation)


# ---- a split -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """The rows of a split with their labels."""

    table: Table
    columns: tuple[str, ...]  # of the labels
    labels: np.ndarray
    source: str


def open_split(tables: Tables, split: str, columns: Columns) -> Labelled:
    """Opens the pictures to train on (split "train") or to evaluate on ("eval").

    Raises:
        InputError: a CSV, its files, its columns, its splits or its labels cannot be used.
    """
    parts = _open_parts(tables)
    names = _label_columns(parts.train, columns)
    target = _find_target(parts.train, names, columns)
    labels = _encode(parts.train, names, target, columns)
    train = _Side(parts.train, names, labels, parts.train_source)
    notes = []
    if parts.evaluation is None:
        keys = [_form(os.path.normpath(file)) for file in parts.train.files]
        held = targets.held_out(keys, train.labels, target)
        notes = notes_of_held_out(held, train.labels, target)
        train, evaluation = _divided(train, held)
    else:
        same_columns = replace(columns, labels=names)
        _label_columns(parts.evaluation, same_columns)  # raises where it lacks one
        labels = _encode(parts.evaluation, names, target, columns)
        evaluation = _Side(parts.evaluation, names, labels, parts.evaluation_source)

    scale = _find_scale(train.labels, target, train.table.path)
    side = train if split == "train" else evaluation
    return _labelled(side, target, scale, list(parts.left_out), notes)


def find_evaluated(data: str) -> dict[str, str]:
    """Returns the CSVs that data has for an evaluation: path by split, "" of one for all; {} where
    there is none."""
    path = Path(data).expanduser()
    if path.is_file():
        return {"": str(path)} if path.suffix.lower() == ".csv" else {}
    if not path.is_dir():
        return {}
    if (path / NAME).is_file():
        return {"": str(path / NAME)}

    own = [folder.parent.name for folder in sorted(path.glob(f"[!.]*/{NAME}"))]
    found = {}
    for split in splits.NAMES:
        folder = splits.named(own, split, data)
        if folder is not None:
            found[split] = str(path / folder / NAME)
    return found


def open_evaluation(
    data: str,
    split: str,
    is_own: bool,
    columns: Columns,
    target: targets.Target,
    scale: Scale,
    learned: tuple[str, ...] = (),
) -> Labelled:
    """Opens the pictures of a CSV on which a finished run is evaluated.

    Args:
        data: has a CSV, see `find_evaluated`.
        split: train, valid or test; "": all rows of another CSV than the run's that says no splits,
            else those that a training is evaluated on.
        is_own: the run was trained on this data.
        columns: those of the training, whose labels may be ().
        target, scale: what the run has learned.
        learned: the columns of the labels that it has learned; (): not known.
    Raises:
        InputError: as `open_split`; a column or a class that the run does not have; no such split.
    """
    if target.objective == "regression":
        learned = target.names
    if not columns.labels:
        columns = replace(columns, labels=learned)
    tables = find_evaluated(data)
    trains_alone = list(tables) == ["train"]  # then a training holds a tenth of its rows out
    if trains_alone and not (split or is_own):
        raise InputError(
            f"{data} has no {NAME} of the split valid, only of train; give --split train, or "
            "--split valid for the tenth that a training holds out"
        )
    if "" in tables or trains_alone:
        (path,) = tables.values()
        side, notes = _rows_of_table(path, split, is_own, columns, target)
    else:
        wanted = split or ("valid" if "valid" in tables else "test")
        if wanted not in tables:
            raise InputError(
                f"{data} has no {NAME} of the split {wanted}; it has {', '.join(tables)}"
            )
        table, unnamed = open_table(tables[wanted])
        side = _side(table, columns, target, _short(tables[wanted]))
        notes = [f"{unnamed:,} pictures beside it are not in {side.source}"] if unnamed else []

    return _labelled(side, target, scale, [], notes)


def _labelled(
    side: _Side, target: targets.Target, scale: Scale, left_out: list[str], notes: list[str]
) -> Labelled:
    """Returns the pictures of a side; a regression's labels are in the unit of `scale`."""
    labels = side.labels
    if target.objective == "regression":
        labels = scale.to_units(labels)
    return Labelled(
        paths=side.table.pictures,
        labels=labels,
        target=target,
        columns=side.columns,
        scale=scale,
        source=side.source,
        left_out=left_out,
        notes=notes,
    )


def _rows_of_table(
    path: str, split: str, is_own: bool, columns: Columns, target: targets.Target
) -> tuple[_Side, list[str]]:
    """Returns the rows of one CSV that are evaluated, see `open_evaluation`, and notes."""
    table, unnamed = open_table(path)
    name = os.path.basename(path)
    notes = [f"{unnamed:,} pictures that {name} does not name"] if unnamed else []
    said = _said_splits(table)
    if None in said and not (split or is_own):
        return _side(table, columns, target, f"all of {name}"), notes

    present = set(said)
    wanted = split or ("test" if "test" in present and "valid" not in present else "valid")
    holds_out = "valid" not in present and ("test" not in present or None in present)
    if wanted in present and not (wanted == "train" and holds_out):
        rows = table.select([own == wanted for own in said])
        return _side(rows, columns, target, f"the split {wanted} of {name}"), notes
    if wanted == "test" or not holds_out:
        listed = ", ".join(sorted(own for own in present if own)) or "no splits"
        raise InputError(f"{path} has no row of the split {wanted}; its rows say {listed}")

    side = _side(table, columns, target, name)
    keys = [_form(os.path.normpath(file)) for file in table.files]
    held = targets.held_out(keys, side.labels, target)
    train, evaluation = _divided(side, held)
    return (train if wanted == "train" else evaluation), notes


def _side(table: Table, columns: Columns, target: targets.Target, source: str) -> _Side:
    """Returns rows with their labels, by what a run has learned."""
    for name in columns.labels:
        if name not in table.header:
            raise InputError(
                f"{table.path} has no column {name}, whose labels the run has learned; it has "
                f"{', '.join(table.header)}: rename the column that has them"
            )
    names = _label_columns(table, columns)
    return _Side(table, names, _encode(table, names, target, columns), source)


def _divided(side: _Side, held: np.ndarray) -> tuple[_Side, _Side]:
    """Returns the rows that stay for training, and those that are held out."""
    sources = held_out_sources(side.source, held)
    sides = []
    for taken, source in zip((~held, held), sources, strict=True):
        rows = side.table.select(taken)
        sides.append(_Side(rows, side.columns, side.labels[taken], source))
    train, evaluation = sides
    return train, evaluation


def held_out_sources(source: str, held: np.ndarray) -> tuple[str, str]:
    """Returns how the first line of a run names what is trained on, and what is held out of it.

    Args:
        source: of all pictures.
        held: bool [n], see `targets.held_out`.
    """
    train = f"{(~held).sum():,} of the {len(held):,} pictures of {source}"
    return train, f"the other {held.sum():,}, held out by a hash of their names"


def notes_of_held_out(held: np.ndarray, labels: np.ndarray, target: targets.Target) -> list[str]:
    """Returns a sentence about the classes that no held-out example has, if there are any."""
    names = targets.only_in_training(held, labels, target)
    if not names:
        return []
    return [f"too few examples to be evaluated, in training only: {targets.listed(names)}"]
