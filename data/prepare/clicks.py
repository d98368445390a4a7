"""Turns a user's own click log, CSV or parquet files, into arrays, once before training.

    make data DATASET=clicks DATA=log.csv ARGS="--label clicked --dense price --categorical user"
    python -m data.prepare.clicks --data log.csv --label clicked --categorical user,item --time ts

Training maps the arrays into memory, see ClickLog in data/criteo.py. What the columns become says
data/clicks.py: the figures and vocabularies are those of the training rows alone. The layout of the
folder is in docs/data.md, "The layout of prepared clicks".
"""

import csv
import dataclasses
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data import clicks, splits
from data.clicks import BadRow, Malformed, Names, Notes
from data.prepare import pipeline
from data.prepare.files import create_array, read_json, whole, write_json, write_rows
from data.prepare.pipeline import Preparation, expect
from data.prepare.sources import files_in, folder_of
from errors import InputError

EVAL_SHARE = 0.1
PATTERNS = ("*.csv", "*.tsv", "*.txt", "*.csv.gz", "*.tsv.gz", "*.txt.gz", "*.parquet", "*.pq")
EXPECTED = "expected a CSV file (plain or .gz), a parquet file, or a folder of them"
# Rows of a chunk, which becomes one file: what a worker holds in memory.
CHUNK_ROWS = 1 << 18
HEAD_ROWS = 100  # of each file, which are looked at before the others
LEFT_OUT = b"left_out"  # the metadata of a chunk with the rows that it does not have
MERGED_AT_LEAST = 1 << 20  # values counted in chunks before they are merged into the vocabulary
# What to do about a row that cannot be used.
REMEDY = "fix or remove it, or leave out a share of such rows with --bad-rows 0.001"
# A feature's name is that of a file and of a table in the export.
FEATURE = re.compile(r"[^./\\\x00-\x1f]{1,100}")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares your own click log for training: CSV with a header, or parquet, to arrays.

    The same command resumes a killed one. The result depends neither on that nor on --workers.
    Names of columns are separated by commas; one with a comma stands in quotes ("a, b",c).
    """

    data: str  # CSV file (comma, semicolon or tab; plain or .gz), parquet file, or folder of them
    out: str = ""  # folder of the arrays; default: a folder `prepared` beside the files
    label: str = ""  # column with 1 (or true) for a click, 0 (or false) for none
    dense: str = ""  # columns of numbers; they are standardised, a missing one becomes 0, the mean
    log: str = ""  # columns of counts; log(x + 1), then as --dense
    categorical: str = ""  # columns of categories, one value each
    multi: str = ""  # columns with several values in a row, cut at --separator, or lists of parquet
    separator: str = "|"  # between the values of a --multi column
    most: int = (
        16  # values of a --multi column that a row keeps: the most frequent; the rest is cut
    )
    threshold: int = 1  # values seen fewer times in training rows share the id 0; 1 keeps all
    max_rows: int = 0  # most rows of a table: the most frequent values, others share id 0; 0: all
    bad_rows: float = 0.0  # share of rows that may be left out as they cannot be used, as 0.001
    time: str = ""  # column of times, numbers or ISO dates; the last rows by it are for evaluation
    eval_share: float = EVAL_SHARE  # of the rows for evaluation, where no file says its split
    workers: int = os.cpu_count() or 1  # processes; one parses a file, others other files


# The command


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes a click log as the arrays that ClickLog reads; the arguments are those of Flags.

    There are three passes: parse chunks of rows, each to a file of its own; measure the numbers and
    count the categories of the training rows; write the arrays
    {train,eval}_{dense,sparse,labels,present}.npy. Then come prepared.json and, last of all, the
    empty file COMPLETE.

    Memory per worker: a chunk of CHUNK_ROWS rows, a block of 16 MB of text (for parquet a batch of
    as many rows), and about four times the vocabulary of one column while counting, that of all
    while writing. With --time also 8 bytes per row of all files. Disk: about the text of the named
    columns in the folder `parts`, until the end.

    Returns: the contents of prepared.json: flags, sources, features, table_rows, rows, clicks, …
    Raises InputError: there are no such files or columns, a value cannot be used, or `out` holds
        something that was prepared differently.
    """
    data = Path(data).expanduser()
    if not data.exists():
        raise InputError(f"there is no file or folder {data}; {EXPECTED}")
    flags = Flags(str(data), str(out), workers=workers, **flags)
    names = _check_flags(flags)
    found = find_sources(data, flags)
    job = _open_preparation(flags, found)
    report = job.finished_report()
    if report:
        if "malformed" in report:  # which older versions did not leave out
            _check_bad(report["malformed"], flags.bad_rows)
        return report
    kind = _check_heads(found, names, flags.bad_rows)

    chunk_rows = job.begin_with_piece_size("chunk_rows", CHUNK_ROWS)
    files = _parse_all(job, found, names, kind, chunk_rows, flags.bad_rows)
    bad = _bad_rows(files)
    _check_bad(bad, flags.bad_rows)
    parsed = [file.chunks for file in files]
    split = _split(found, parsed, flags, kind)
    print(splits.sentence(split.read_from), flush=True)

    folder = job.out / "columns"
    folder.mkdir(exist_ok=True)
    figures = _measure_all(job, flags, names, folder, split.chunks)
    notes = _write_all(job, folder, split.chunks)
    columns = clicks.Columns.load(folder)
    figures |= {
        "features": list(columns.features),
        "lookups": list(columns.lookups),
        "table_rows": list(columns.table_rows),
        "dense": list(names.numbers),
        "bags": list(names.multi),
        "rows": {name: split.rows(name) for name in ("train", "eval")},
        "clicks": split.clicks,
        "notes": {name: of_split.counts() for name, of_split in notes.items()},
        "malformed": bad,
        "read_from": split.read_from,
    }
    return job.finish(figures)


def _check_flags(flags: Flags) -> Names:
    """Returns the columns that the flags name; raises InputError for a value that cannot be."""
    if not flags.label:
        raise InputError("--label is missing; name the column of clicks, as in --label clicked")
    names = Names(
        dense=_named("dense", flags.dense),
        log=_named("log", flags.log),
        categorical=_named("categorical", flags.categorical),
        multi=_named("multi", flags.multi),
        separator=flags.separator,
        label=flags.label,
        time=flags.time,
    )
    if not names.features:
        raise InputError(
            "--categorical and --multi are missing; name a column of categories at least, "
            "as in --categorical user,item"
        )
    twice = [name for name, count in Counter(names.all).items() if count > 1]
    if twice:
        raise InputError(f"the column {twice[0]} is named twice; name it in one of the flags, once")
    for name in names.features:
        if not FEATURE.fullmatch(name):
            raise InputError(
                f"the column {name!r} cannot be a feature: its name becomes that of a file and of "
                "a table, so it has up to 100 letters, without . / and \\; rename it in the header"
            )
    expect(flags, "separator", flags.separator != "", "a text such as |")
    expect(flags, "most", flags.most >= 1, "at least 1")
    expect(flags, "threshold", flags.threshold >= 1, "1 (keeps every value) or more")
    fits = flags.max_rows == 0 or 2 <= flags.max_rows < 2**31
    expect(flags, "max_rows", fits, "0 (no limit), or 2 to 2147483647")
    expect(flags, "bad_rows", 0 <= flags.bad_rows < 1, "a share from 0 to below 1, such as 0.001")
    expect(flags, "eval_share", 0 < flags.eval_share < 1, "a share between 0 and 1, such as 0.1")
    return names


def _named(flag: str, text: str) -> tuple[str, ...]:
    """Returns the columns that a flag names."""
    if not text:
        return ()
    names = next(csv.reader([text], skipinitialspace=True))
    if "" in names:
        raise InputError(f"--{flag} is {text!r}; expected names of columns with commas between")
    return tuple(names)


def _open_preparation(flags: Flags, found: "Sources") -> Preparation:
    """Returns the preparation of these files, not yet begun."""
    folder = folder_of(flags.data)
    files = files_in(folder, found.train, split="train" if found.evaluation else "")
    files += files_in(folder, found.evaluation, split="eval")
    return Preparation(
        flags,
        files,
        not_planned=("bad_rows",),
        report="prepared.json",
        complete="COMPLETE",
        version=1,
        added_flags={"max_rows": 0},
    )


def _summary(report: dict) -> None:
    """Prints the sizes of the result, and what became of values."""
    rows = report["rows"]
    clicked = report["clicks"]
    print(
        f"{rows['train']:,} training rows with {clicked['train']:,} clicks and "
        f"{rows['eval']:,} evaluation rows with {clicked['eval']:,}; "
        f"{len(report['dense'])} numbers; {sum(report['table_rows']):,} table rows: "
        + ", ".join(map(_feature_summary, *_features(report)))
    )
    if not report["dense"]:
        print("no --dense and no --log: the one dense feature is a constant 0")
    for name in report["constant"]:
        print(f"{name} has no two values in the training rows, and becomes 0")
    bad = report.get("malformed")
    if bad and bad["count"]:
        print(
            f"{bad['count']:,} rows of {bad['rows']:,} were left out, as they cannot be used; "
            f"the first: {bad['first']}"
        )
    for split, title in (("train", "training"), ("eval", "evaluation")):
        notes = Notes()
        notes.add(report["notes"][split])
        if notes.sentence():
            print(f"{title} rows: {notes.sentence()}")
    print("to train on it: make train MODEL=dlrm PRESET=clicks DATA=…, with this folder")


def _features(report: dict) -> tuple[list, ...]:
    """Returns the features, their table rows, lookups and numbers of different values."""
    return (
        report["features"],
        report["table_rows"],
        report["lookups"],
        report["values_seen"],
    )


def _feature_summary(name: str, rows: int, lookups: int, seen: int) -> str:
    """Returns a feature's table in words."""
    rare = f" of {seen:,} values" if seen > rows - 1 else ""
    bag = f" (bags of up to {lookups})" if lookups > 1 else ""
    return f"{name} {rows:,}{rare}{bag}"


# Finding the files


@dataclasses.dataclass
class Sources:
    """A user's files by what they are for."""

    train: list[Path]
    evaluation: list[Path]  # empty: the last rows of the training files
    left_out: list[str]

    @property
    def paths(self) -> list[Path]:
        """All files that are read, in their order."""
        return self.train + self.evaluation


def find_sources(data: Path, flags: Flags) -> Sources:
    """Returns the files with training rows and with evaluation rows, by their names.

    See data/splits.py for the names. Files are in the order of their names, numbers in these
    counting as numbers. Raises InputError.
    """
    if data.is_file():
        return Sources([data], [], [])

    paths = []
    twins = []
    for path in splits.below(data, *PATTERNS):
        plain = path.with_suffix("")
        is_twin = path.suffix.lower() == ".gz" and plain.is_file()
        (twins if is_twin else paths).append(path)
    paths.sort(key=lambda path: _natural(str(path.relative_to(data))))
    files = splits.sort_files(paths, data)
    if not files.train:
        found = ", ".join(sorted(path.name for path in data.iterdir())[:10]) or "nothing"
        raise InputError(f"{data} has no training rows; {EXPECTED}; found {found}")
    if files.valid and flags.time:
        raise InputError(
            f"{data} has {splits.shown(path.name for path in files.valid)} for evaluation, "
            f"and --time {flags.time} would choose rows for it; leave out one of them"
        )
    if files.valid and flags.eval_share != EVAL_SHARE:
        raise InputError(
            f"{data} has {splits.shown(path.name for path in files.valid)} for evaluation, "
            f"and --eval-share {flags.eval_share} would choose rows for it; leave out one of them"
        )
    left_out = [str(path.relative_to(data)) for path in files.left_out + twins]
    return Sources(files.train, files.valid, left_out)


def _natural(name: str) -> list:
    """Returns a key that sorts day_2 before day_10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if part.isdigit() else part for part in parts]


def _check_heads(found: Sources, names: Names, bad_rows: float) -> str:
    """Reads the first rows of each file; returns the kind of times, "" without --time.

    Raises InputError: a file has no such columns or no rows, too many of its first rows cannot be
    used, or files have times of different kinds.
    """
    kinds = {}
    for path in found.paths:
        skipped: list[Malformed] = []
        tables = _read(path, names, HEAD_ROWS, bad_rows, skipped)
        head = next(tables, None)
        if head is None and skipped:
            raise InputError(f"{path} has no row that can be used; {_sentence(path, skipped[0])}")
        if head is None:
            raise InputError(f"{path} has a header and no rows; expected at least one row")
        kind = _head_kind(path, head, names, bad_rows)
        good = _parse(path, head, names, kind, bad_rows, 0, skipped)
        rows = _row_in_file(head.num_rows - 1, skipped) + 1
        bad = _first_bad(good, [malformed for malformed in skipped if malformed.row < rows])
        if good.num_rows < rows / 2:
            raise InputError(
                f"{rows - good.num_rows} of the first {rows} rows of {path} cannot be used, the "
                f"first is {_sentence(path, bad)}; does the table have other columns?"
            )
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise InputError(
            f"the time {names.time} is {one} in {first} and {other} in {second}; "
            "write all of them in one way"
        )
    return next(iter(kinds))


def _head_kind(path: Path, head: pa.Table, names: Names, bad_rows: float) -> str:
    """Returns the kind of times of a file's first rows, of the first that has one."""
    if not names.time:
        return ""
    last = head.num_rows - 1 if bad_rows else 0
    for row in range(head.num_rows):
        try:
            return clicks.time_kind(head[names.time].slice(row), names.time)
        except BadRow as error:
            if row >= last:
                raise InputError(f"{path} row {row + 1}: {error.why}") from error
    raise AssertionError("the last row returns or raises")


# Parsing


def _read(
    path: Path, names: Names, rows: int, bad_rows: float, skipped: list[Malformed]
) -> Iterator[pa.Table]:
    """Yields a file's rows in tables, as `clicks.read_tables` does.

    Args:
        skipped: gets the malformed rows, where some may be left out.
    """
    return clicks.read_tables(path, names.all, rows, skipped if bad_rows else None, REMEDY)


def _typed(table: pa.Table, names: Names, kind: str) -> pa.Table:
    """Returns rows by their types: the inputs as `clicks.typed` does, the label, and the time.

    Categories have a dictionary. Raises BadRow.
    """
    parsed = clicks.typed(table, names)
    for position, name in enumerate(parsed.column_names):
        if name in names.categorical:
            parsed = parsed.set_column(position, name, parsed[name].dictionary_encode())
    label = clicks.labels(table[names.label], names.label)
    parsed = parsed.append_column(names.label, pa.array(label))
    if names.time:
        times = clicks.times(table[names.time], names.time, kind)
        parsed = parsed.append_column(names.time, pa.array(times))
    return parsed


def _parse(
    path: Path,
    table: pa.Table,
    names: Names,
    kind: str,
    bad_rows: float,
    first: int,
    skipped: list[Malformed],
) -> pa.Table:
    """Returns rows by their types, without those that cannot be used, which its metadata count.

    Args:
        first: the number of the table's first row among those of the file that are not malformed.
        skipped: the malformed rows of the file.
    Raises:
        InputError: there is such a row, and none may be left out.
    """
    bad: list[BadRow] = []
    if bad_rows:
        _find_bad(table, names, kind, 0, bad)
        is_good = np.ones(table.num_rows, bool)
        is_good[[error.row for error in bad]] = False
        table = table.filter(pa.array(is_good))
    try:
        parsed = _typed(table, names, kind)
    except BadRow as error:
        raise InputError(f"{path} row {first + error.row + 1}: {error.why}; {REMEDY}") from error

    left_out = {"count": len(bad)}
    if bad:
        left_out["row"] = _row_in_file(first + bad[0].row, skipped)
        left_out["why"] = bad[0].why
    return parsed.replace_schema_metadata({LEFT_OUT: json.dumps(left_out)})


def _find_bad(table: pa.Table, names: Names, kind: str, first: int, bad: list[BadRow]) -> None:
    """Appends the rows that cannot be used. It halves the table, until a part has none or is one
    row: most parts have none.

    Args:
        first: the number of the table's first row.
    """
    try:
        _typed(table, names, kind)
    except BadRow as error:
        if table.num_rows == 1:
            bad.append(BadRow(first, error.why))
            return
        middle = table.num_rows // 2
        _find_bad(table.slice(0, middle), names, kind, first, bad)
        _find_bad(table.slice(middle), names, kind, first + middle, bad)


def _row_in_file(row: int, skipped: list[Malformed]) -> int:
    """Returns the number in the file, from 0, of a row among those that are not malformed."""
    for malformed in skipped:
        if malformed.row > row:
            break
        row += 1
    return row


def _left_out(chunk: pa.Table) -> dict:
    """Returns how many rows `_parse` has left out as their "count", and the first's row and why."""
    metadata = chunk.schema.metadata or {}
    return json.loads(metadata.get(LEFT_OUT, b'{"count": 0}'))  # an older version left out none


def _first_bad(chunk: pa.Table, skipped: list[Malformed]) -> Malformed | None:
    """Returns the first row that is left out, of a chunk or as malformed; None if there is none."""
    found = skipped[:1]
    left_out = _left_out(chunk)
    if left_out["count"]:
        found.append(Malformed(left_out["row"], left_out["why"]))
    return min(found, key=lambda bad: bad.row, default=None)


def _sentence(path: Path, bad: Malformed | None) -> str:
    """Returns a row that cannot be used in words; "" for None."""
    return f"{path} row {bad.row + 1}: {bad.why}" if bad else ""


def _parse_file(
    path: Path,
    names: Names,
    kind: str,
    chunk_rows: int,
    bad_rows: float,
    parts: Path,
    source: int,
    count: Path,
) -> None:
    """Parses a file into as many chunks as it needs, then writes their rows to `count`.

    Chunks that are already there are only read over. One that has fewer rows than the file gives it
    is of a reading that an error has ended, such as a row with too few columns: it is parsed again.

    Args:
        bad_rows: 0: the first row that cannot be used is an error; else all of them are left out.
        parts: folder of the chunks.
        source: number of the file among all files.
        count: file for the number of rows of each chunk, and for those that are left out.
    """
    counted = []
    left_out = 0
    first_bad = None
    parsed_rows = 0
    skipped: list[Malformed] = []
    tables = _read(path, names, chunk_rows, bad_rows, skipped)
    for table in tables:
        chunk = _chunk_path(parts, source, len(counted))
        if not _has_rows(chunk, table.num_rows):
            parsed = _parse(path, table, names, kind, bad_rows, parsed_rows, skipped)
            with whole(chunk) as file, pa.ipc.new_file(file, parsed.schema) as writer:
                writer.write_table(parsed.combine_chunks())
        written = Parsed(chunk, rows=0).read()
        first_bad = first_bad or _first_bad(written, [])
        left_out += _left_out(written)["count"]
        parsed_rows += table.num_rows
        counted.append(written.num_rows)

    for bad in skipped[:1]:
        if first_bad is None or bad.row < first_bad.row:
            first_bad = bad
    bad = {
        "rows": parsed_rows + len(skipped),
        "count": left_out + len(skipped),
        "first": _sentence(path, first_bad),
    }
    write_json(count, {"rows": counted, "bad": bad})


def _has_rows(chunk: Path, rows: int) -> bool:
    """Returns whether a chunk is there and was made from so many rows, those left out included."""
    if not chunk.exists():
        return False
    written = Parsed(chunk, rows=0).read()
    return written.num_rows + _left_out(written)["count"] == rows


def _chunk_path(parts: Path, source: int, number: int) -> Path:
    """Returns the path of a chunk of the file with the number `source`."""
    return parts / f"{source:04d}-{number:06d}.arrow"


@dataclasses.dataclass(frozen=True)
class ParsedFile:
    """The chunks of a file, and what was left out of it: `rows`, `count` and `first`."""

    chunks: list["Parsed"]
    bad: dict


def _parse_all(
    job: Preparation, found: Sources, names: Names, kind: str, chunk_rows: int, bad_rows: float
) -> list[ParsedFile]:
    """Parses what is not parsed yet; returns the chunks of each file, in its order."""
    counts = []
    tasks = []
    for number, path in enumerate(found.paths):
        counts.append(job.parts / f"{number:04d}.json")
        tasks.append((path, names, kind, chunk_rows, bad_rows, job.parts, number, counts[-1]))
    job.run(_parse_file, tasks, "parsing")

    parsed = []
    for number, count in enumerate(counts):
        content = read_json(count)
        chunks = []
        for chunk, rows in enumerate(content["rows"]):
            chunks.append(Parsed(_chunk_path(job.parts, number, chunk), rows))
        none = {"rows": sum(content["rows"]), "count": 0, "first": ""}  # as in an older version
        parsed.append(ParsedFile(chunks, content.get("bad", none)))
    return parsed


def _bad_rows(parsed: list[ParsedFile]) -> dict:
    """Returns the number of all `rows`, the `count` of those left out, and the `first` of these."""
    firsts = [file.bad["first"] for file in parsed if file.bad["first"]]
    return {
        "rows": sum(file.bad["rows"] for file in parsed),
        "count": sum(file.bad["count"] for file in parsed),
        "first": firsts[0] if firsts else "",
    }


def _check_bad(bad: dict, bad_rows: float) -> None:
    """Raises InputError if more rows cannot be used than may be left out."""
    if bad["count"] > bad_rows * bad["rows"]:
        raise InputError(
            f"{bad['count']} of {bad['rows']} rows cannot be used, more than the share {bad_rows} "
            f"that may be left out; fix them or raise --bad-rows. The first is {bad['first']}"
        )


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A file of parsed rows."""

    path: Path
    rows: int

    def read(self) -> pa.Table:
        """Maps the rows into memory."""
        with pa.memory_map(str(self.path)) as file:
            return pa.ipc.open_file(file).read_all()


# The split


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A file of parsed rows, and where its rows go."""

    parsed: Parsed
    train_rows: int  # without a cut these come first
    train_first: int  # their first row in the training arrays
    eval_first: int
    cut: int | float | None = None  # rows from this time on are for evaluation
    time: str = ""  # the column

    def read(self) -> tuple[pa.Table, np.ndarray]:
        """Returns the rows, and which of them are for training, bool [n]."""
        table = self.parsed.read()
        if self.cut is None:
            return table, np.arange(table.num_rows) < self.train_rows
        return table, table[self.time].to_numpy() < self.cut

    def training(self, name: str) -> pa.Array:
        """Returns a column of the training rows."""
        table, is_train = self.read()
        column = table[name].combine_chunks()
        return column.filter(pa.array(is_train))


@dataclasses.dataclass
class Split:
    """Which rows are for training and which for evaluation."""

    chunks: list[Chunk]
    clicks: dict[str, int]  # by split
    read_from: dict[str, str]

    def rows(self, split: str) -> int:
        """Returns the rows of a split, train or eval."""
        if split == "train":
            return sum(chunk.train_rows for chunk in self.chunks)
        return sum(chunk.parsed.rows - chunk.train_rows for chunk in self.chunks)


def _split(found: Sources, parsed: list[list[Parsed]], flags: Flags, kind: str) -> Split:
    """Returns the split that the files, the time or the order of the rows give.

    Raises InputError: no rows are left for a split, or it has no clicks, or only clicks.
    """
    every = [chunk for of_file in parsed for chunk in of_file]
    cut = None
    if found.evaluation:
        train = sum(chunk.rows for of_file in parsed[: len(found.train)] for chunk in of_file)
        read_from = _read_from_files(found)
    elif flags.time:
        train = None
        cut = _time_to_cut(every, flags, found.paths)
        read_from = _read_from_times(found, flags, kind, cut)
    else:
        train = _rows_to_train(every, flags, found.paths)
        read_from = _read_from_order(found, flags)

    chunks = []
    clicked = {"train": 0, "eval": 0}
    train_first = 0
    eval_first = 0
    for chunk in every:
        train_rows = 0 if cut is not None else min(chunk.rows, max(0, train - train_first))
        placed = Chunk(chunk, train_rows, train_first, eval_first, cut, flags.time)
        table, is_train = placed.read()
        placed = dataclasses.replace(placed, train_rows=int(is_train.sum()))
        chunks.append(placed)
        train_first += placed.train_rows
        eval_first += chunk.rows - placed.train_rows
        label = table[flags.label].to_numpy()
        clicked["train"] += int(label[is_train].sum())
        clicked["eval"] += int(label[~is_train].sum())

    split = Split(chunks, clicked, read_from)
    _check_clicks(split, flags)
    return split


def _check_clicks(split: Split, flags: Flags) -> None:
    """Raises InputError for a split without clicks, or with clicks only."""
    for name, title in (("train", "training"), ("eval", "evaluation")):
        rows = split.rows(name)
        found = split.clicks[name]
        if 0 < found < rows:
            continue
        which = "no click" if not found else "nothing but clicks"
        raise InputError(
            f"the {rows} rows for {title} have {which} in {flags.label}, so nothing can be learnt "
            "or measured on them; give rows with 1 and with 0, or another --eval-share or --time"
        )


def _rows_to_train(chunks: list[Parsed], flags: Flags, paths: list[Path]) -> int:
    """Returns how many rows come before the last ones, which are for evaluation."""
    rows = sum(chunk.rows for chunk in chunks)
    evaluated = round(rows * flags.eval_share)
    if not 0 < evaluated < rows:
        raise InputError(
            f"{splits.shown(paths)} has {rows} rows, of which --eval-share {flags.eval_share} "
            f"leaves {rows - evaluated} for training and {evaluated} for evaluation; give more rows"
        )
    return rows - evaluated


def _time_to_cut(chunks: list[Parsed], flags: Flags, paths: list[Path]) -> int | float:
    """Returns the time from which on rows are for evaluation.

    Rows of one time stay together: of the two cuts beside the row that --eval-share names, the one
    nearer to that share counts, and of two that are as near the one with more rows.
    """
    times = np.concatenate([chunk.read()[flags.time].to_numpy() for chunk in chunks])
    wanted = max(1, round(len(times) * flags.eval_share))
    place = len(times) - wanted
    times.partition(place)
    time = times[place]

    rows_from = {time: int((times >= time).sum())}
    later = times[times > time]
    if len(later):
        rows_from[later.min()] = len(later)
    distances = {}
    for cut, rows in rows_from.items():
        if rows < len(times):
            distances[cut] = abs(rows - wanted)
    if not distances:
        raise InputError(
            f"all {len(times)} rows of {splits.shown(paths)} have the same {flags.time}; "
            "name another column with --time, or leave it out"
        )
    return min(distances, key=distances.get).item()


def _read_from_files(found: Sources) -> dict[str, str]:
    """Returns what the report says where files say their split."""
    train = splits.shown(path.name for path in found.train)
    evaluation = splits.shown(path.name for path in found.evaluation)
    return splits.read_from(train, evaluation, found.left_out)


def _read_from_times(found: Sources, flags: Flags, kind: str, cut: int | float) -> dict[str, str]:
    """Returns what the report says where a time says the split."""
    files = splits.shown(path.name for path in found.train)
    at = str(cut)
    if kind != "a number":
        at = str(np.datetime64(cut, "ns")).replace("T", " ").removesuffix(".000000000")
    return splits.read_from(
        f"{files} before {flags.time} {at}",
        f"{files} from {flags.time} {at} on",
        found.left_out,
    )


def _read_from_order(found: Sources, flags: Flags) -> dict[str, str]:
    """Returns what the report says where the last rows are for evaluation."""
    files = splits.shown(path.name for path in found.train)
    share = f"the last {100 * flags.eval_share:g} % of the rows"
    return splits.read_from(
        f"{files} but {share}", f"{share} of {files}, in their order", found.left_out
    )


# Measuring and counting


def _measure_all(
    job: Preparation, flags: Flags, names: Names, folder: Path, chunks: list[Chunk]
) -> dict:
    """Measures numbers and counts categories of the training rows, and writes columns.json.

    Returns: figures for the report.
    """
    measured = [job.parts / f"number_{number}.json" for number in range(len(names.numbers))]
    vocabularies = [clicks.vocabulary_path(folder, name) for name in names.features]
    tasks = []
    for name, path in zip(names.numbers, measured, strict=True):
        tasks.append((_measure, name, chunks, name in names.log, path))
    for name, path in zip(names.features, vocabularies, strict=True):
        tasks.append((_count, name, chunks, flags.threshold, flags.max_rows, path))
    job.run(_call, tasks, "measuring columns")

    dense = []
    constant = []
    for name, path in zip(names.numbers, measured, strict=True):
        figures = read_json(path)
        if not figures["deviation"]:
            constant.append(name)
        dense.append(clicks.Dense(name, name in names.log, **figures))
    lookups = []
    seen = []
    for name, path in zip(names.features, vocabularies, strict=True):
        figures = clicks.read_figures(path)
        seen.append(figures["seen"])
        longest = min(flags.most, max(1, figures["longest"]))
        lookups.append(longest if name in names.multi else 1)
    if not (folder / "columns.json").exists():
        clicks.save_description(folder, names, dense, lookups)
    return {"values_seen": seen, "constant": constant}


def _call(function: Callable, *arguments) -> None:
    """Calls one of the two functions below, so that their tasks are one pass."""
    function(*arguments)


def _measure(name: str, chunks: list[Chunk], log: bool, path: Path) -> None:
    """Writes the mean and the deviation of a number in the training rows to a file."""
    count = 0
    mean = 0.0
    squares = 0.0  # sum of the squared distances from the mean
    least = math.inf
    most = -math.inf
    for chunk in chunks:
        numbers = chunk.training(name).to_numpy()
        numbers = numbers[~np.isnan(numbers)]
        if log:
            numbers = np.log1p(numbers)
        if not len(numbers):
            continue
        # Chan et al. 1979: the figures of both parts give those of the whole.
        mean_of_chunk = numbers.mean()
        distance = mean_of_chunk - mean
        total = count + len(numbers)
        squares += ((numbers - mean_of_chunk) ** 2).sum()
        squares += distance**2 * count * len(numbers) / total
        mean += distance * len(numbers) / total
        count = total
        least = min(least, numbers.min())
        most = max(most, numbers.max())

    deviation = 0.0
    if least < most:
        deviation = math.sqrt(squares / count)
    write_json(path, {"mean": float(mean), "deviation": deviation})


def _count(name: str, chunks: list[Chunk], threshold: int, max_rows: int, path: Path) -> None:
    """Counts a feature's values in the training rows, and saves its vocabulary.

    Values come by falling count, of equal counts the smaller one by its bytes first. Those with a
    smaller count than `threshold` are left out, and so are the last ones where the table, with its
    row for UNKNOWN, would have more than `max_rows`.
    """
    tally = _merge([])
    longest = 1
    waiting = []
    waiting_values = 0
    for chunk in chunks:
        values = chunk.training(name)
        if pa.types.is_list(values.type):
            longest = max(longest, pc.max(values.value_lengths()).as_py() or 0)
            values = values.flatten()
        of_chunk = _tally(values)
        waiting.append(of_chunk)
        waiting_values += of_chunk.num_rows
        if waiting_values >= max(tally.num_rows, MERGED_AT_LEAST):
            tally = _merge([tally, *waiting])
            waiting = []
            waiting_values = 0
    tally = _merge([tally, *waiting])

    frequent = tally.filter(pc.greater_equal(tally["count"], threshold))
    frequent = frequent.sort_by([("count", "descending"), ("value", "ascending")])
    if max_rows:
        frequent = frequent.slice(0, max_rows - 1)
    clicks.save_vocabulary(path, frequent, {"seen": tally.num_rows, "longest": longest})


def _tally(values: pa.Array) -> pa.Table:
    """Returns how often each value occurs, as a table of value and count."""
    counts = pc.value_counts(values)
    value = counts.field("values")
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode()
    return pa.table({"value": value.cast(pa.string()), "count": counts.field("counts")})


def _merge(tallies: list[pa.Table]) -> pa.Table:
    """Returns the sum of several tallies."""
    if not tallies:
        return pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
    together = pa.concat_tables(tallies).group_by("value").aggregate([("count", "sum")])
    return pa.table({"value": together["value"], "count": together["count_sum"]})


# Writing


def _write_all(job: Preparation, folder: Path, chunks: list[Chunk]) -> dict[str, Notes]:
    """Creates the arrays of both splits, and writes the rows of all chunks into them.

    Returns: what became of the values of each split.
    """
    created = job.parts / "created"
    columns = clicks.Columns.load(folder)
    train_rows = sum(chunk.train_rows for chunk in chunks)
    eval_rows = sum(chunk.parsed.rows for chunk in chunks) - train_rows
    if not created.exists():
        for split, rows in {"train": train_rows, "eval": eval_rows}.items():
            width = sum(columns.lookups)
            create_array(job.out / f"{split}_dense.npy", np.float32, (rows, columns.num_dense))
            create_array(job.out / f"{split}_sparse.npy", np.int32, (rows, width))
            create_array(job.out / f"{split}_labels.npy", np.uint8, (rows,))
            if columns.has_bags:
                create_array(job.out / f"{split}_present.npy", np.uint8, (rows, width))
        created.touch()

    stamp = (folder / "columns.json").stat().st_mtime_ns
    written = [chunk.parsed.path.with_suffix(".written") for chunk in chunks]
    tasks = []
    for chunk, path in zip(chunks, written, strict=True):
        tasks.append((chunk, folder, stamp, job.out, path))
    job.run(_write, tasks, "writing arrays")

    notes = {"train": Notes(), "eval": Notes()}
    for path in written:
        for split, counts in read_json(path).items():
            notes[split].add(counts)
    return notes


@functools.lru_cache(maxsize=1)
def _columns(folder: Path, stamp: int) -> clicks.Columns:
    """Returns the columns of a folder, which a worker reads once.

    Args:
        stamp: when they were written: another preparation may have used the folder before.
    """
    return clicks.Columns.load(folder)


def _write(chunk: Chunk, folder: Path, stamp: int, out: Path, written: Path) -> None:
    """Writes the rows of a chunk into the arrays; then what became of values to `written`."""
    columns = _columns(folder, stamp)
    table, is_train = chunk.read()
    label = table[columns.names.label].to_numpy()
    firsts = {"train": chunk.train_first, "eval": chunk.eval_first}
    counts = {}
    for split, rows in {"train": is_train, "eval": ~is_train}.items():
        notes = Notes()
        encoded = columns.encode_typed(table.filter(pa.array(rows)).combine_chunks(), notes)
        arrays = {"dense": encoded["dense"], "sparse": encoded["ids"], "labels": label[rows]}
        if columns.has_bags:
            arrays["present"] = encoded["present"]
        for name, array in arrays.items():
            write_rows(out / f"{split}_{name}.npy", firsts[split], array)
        counts[split] = notes.counts()
    write_json(written, counts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
