"""Texts to predict: lines, or columns of a CSV, TSV, JSON lines or parquet file, read as they are
needed.

    for row in rows("new.csv", ("question", "answer")):
        row.texts                # ("How …?", "By …")
        row.where, row.error     # "new.csv line 7", "its answer is empty"

What a file may be is what data/own_text.py trains on. But a row that cannot be used has an error,
and does not end the file.
"""

import csv
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import fsspec

from data import csv_text
from errors import InputError

STANDARD_INPUT = "-"
TABLE = re.compile(r"\.(csv|tsv|jsonl|ndjson|json|parquet)(\.gz)?$", re.IGNORECASE)
TABLES = ".csv, .tsv, .jsonl or .parquet"
SHOWN = 60  # characters of a value in a message
PARQUET_ROWS = 1024  # read at a time
LOOKED_AT = 100  # lines of a JSON file, for the names of its columns


@dataclass(frozen=True)
class Row:
    """The texts of a row.

    Attributes:
        texts: one, or two of a pair; what the row has of them, where there is an error.
        where: the file, and the line or the row, both counted from 1.
        error: why it cannot be used; "": it can.
        words: of a text that is a list of words in the file; (): it is none.
    """

    texts: tuple[str, ...]
    where: str
    error: str = ""
    words: tuple[str, ...] = ()


# Makes a row of values, the names of their columns, and where they stand.
MakeRow = Callable[[Sequence[Any], Sequence[str], str], Row]


def is_table(data: str) -> bool:
    """Tells whether a file has columns, by the end of its name."""
    return TABLE.search(data) is not None


def lines(data: str) -> Iterator[Row]:
    """Returns the lines of a file, or of the standard input for "-", as rows of one text.

    Raises:
        InputError: the file cannot be opened; or, with a row, be read on.
    """
    if data == STANDARD_INPUT:
        return _numbered(sys.stdin.buffer, "the standard input")
    return _numbered(_opened(data), data)


def rows(data: str, columns: Sequence[str], make_row: MakeRow | None = None) -> Iterator[Row]:
    """Returns the rows of a file with columns, see `is_table`.

    Args:
        data: a path or URL.
        columns: the names of those with the texts.
        make_row: makes a row of the values of these columns, and of where they stand; of JSON and
            parquet alone, since all of CSV is text. None: each value is a text.
    Raises:
        InputError: the file cannot be opened, lacks a column, or has it twice; no column is named;
            or, with a row, where it is so damaged that the next row is not known.
    """
    kind = TABLE.search(data)[1].lower()
    if kind in ("csv", "tsv"):
        return _separated(data, columns)
    make_row = make_row or text_row
    if kind == "parquet":
        return _parquet(data, columns, make_row)
    return _json_lines(data, columns, make_row)


def chunks(found: Iterable[Any], sizes: Iterable[int]) -> Iterator[list[Any]]:
    """Yields rows in lists of these sizes; the last one may be shorter.

    Raises what reading a row raises, after the rows before it.
    """
    found = iter(found)
    for size in sizes:
        chunk = []
        failure = None
        try:
            for row in itertools.islice(found, size):
                chunk.append(row)
        except InputError as error:
            failure = error

        if chunk:
            yield chunk
        if failure is not None:
            raise failure
        if not chunk:
            return


def _opened(data: str) -> IO[bytes]:
    """Returns an open file, unpacked if it is .gz; raises InputError where it cannot be opened."""
    try:
        return fsspec.open(data, "rb", compression="infer").open()
    except FileNotFoundError:
        raise InputError(f"there is no file {data}; give a file of texts") from None
    except IsADirectoryError:
        raise InputError(f"{data} is a folder; give a file of it") from None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"{data} cannot be read: {error}") from error


def _check_columns(data: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raises InputError where a table with columns of these names has not those that are needed."""
    has = f"it has the columns {', '.join(names) or 'none'}"
    if not columns:
        raise InputError(
            f"which column of {data} has the text is not known; {has}: "
            "name one by --text, or two of pairs"
        )
    needed = "the two of a pair" if len(columns) == 2 else "that of the text"
    for name in columns:
        count = list(names).count(name)
        if count == 0:
            raise InputError(f"{data} has no column {name}; {has}: name {needed} by --text")
        if count > 1:
            raise InputError(f"{data} has {count} columns {name}; rename all but one")


def text_row(values: Sequence[Any], columns: Sequence[str], where: str) -> Row:
    """Returns a row of these values, with an error where one is no text."""
    texts = tuple("" if value is None else str(value) for value in values)
    for number, value in enumerate(values):
        name = columns[number] if columns else "text"
        if not isinstance(value, str) and value is not None:
            return Row(texts, where, f"its {name} is {str(value)[:SHOWN]}, which is no text")
        if value is None or not value.strip():
            return Row(texts, where, f"its {name} is empty")
        # Half of a pair that JSON has escaped, or a byte that could not be decoded.
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            return Row(texts, where, f"its {name} is not UTF-8")
    return Row(texts, where)


def _lines(file: IO[bytes], data: str) -> Iterator[str]:
    """Yields the lines of a file, without the \\n at their ends; bytes that are not UTF-8 as
    surrogates.

    Only \\n ends a line: texts have other characters that Python takes for line ends.
    """
    number = 0
    try:
        for line in file:
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")  # Windows' editors begin with this mark
            number += 1
            yield line.removesuffix(b"\n").decode("utf-8", "surrogateescape")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{data} cannot be read after line {number}: {error}") from error


def _numbered(file: IO[bytes], data: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, data), 1):
        yield text_row([line.removesuffix("\r")], (), f"{data} line {number}")


# Tables


def _separated(data: str, columns: Sequence[str]) -> Iterator[Row]:
    """Opens a CSV or TSV file, whose first line names its columns."""
    csv.field_size_limit(sys.maxsize)  # by default 131,072 characters
    # With their ends, \n or \r\n, which a field in quotes keeps, as in training.
    content = (f"{line}\n" for line in _lines(_opened(data), data))
    skipped = 0
    header_line = ""
    for header_line in content:
        if header_line.strip():
            break
        skipped += 1

    separator = _find_separator(header_line, columns, data)
    names = _header(header_line, separator, data)
    _check_columns(data, columns, names)
    reader = csv.reader(content, delimiter=separator, strict=True)
    return _fields(reader, data, names, columns, lines_before=skipped + 1)


def _header(line: str, separator: str, data: str) -> list[str]:
    """Returns the names in the first line of a CSV file."""
    return [name.strip() for name in csv_text.header(line, separator, data)]


def _find_separator(line: str, columns: Sequence[str], data: str) -> str:
    """Returns the sign under which a header has all columns, else the one that makes most."""
    headers = {}
    for separator in csv_text.SEPARATORS:
        headers[separator] = _header(line, separator, data)
    for separator, names in headers.items():
        if columns and all(name in names for name in columns):
            return separator
    return max(headers, key=lambda separator: len(headers[separator]))


def _fields(
    reader: Any, data: str, names: Sequence[str], columns: Sequence[str], lines_before: int
) -> Iterator[Row]:
    """Yields the rows of a csv reader behind the header; empty lines are none."""
    places = [names.index(name) for name in columns]
    while True:
        where = f"{data} line {lines_before + reader.line_num + 1}"
        fields = csv_text.next_row(reader, where)
        if fields is None:
            return
        if not fields:
            continue
        if len(fields) == len(names):
            yield text_row([fields[place] for place in places], columns, where)
        else:
            error = f"it has {len(fields)} fields, and the header {len(names)}"
            yield Row(tuple(fields), where, error)


def _json_lines(data: str, columns: Sequence[str], make_row: MakeRow) -> Iterator[Row]:
    """Opens a file with a JSON object a line. One of the first has all columns: single lines may be
    broken."""
    content = _lines(_opened(data), data)
    ahead = chunks(content, [LOOKED_AT])
    first = next(ahead, [])
    objects = [values for values in map(_parsed, first) if isinstance(values, dict)]
    has_all = any(set(columns) <= values.keys() for values in objects)
    if not columns or (objects and not has_all):
        names = list(objects[0]) if objects else []
        _check_columns(data, columns, names)  # raises InputError
    failure = itertools.chain.from_iterable(ahead)  # of reading the first lines, after them
    return _objects(itertools.chain(first, failure, content), data, columns, make_row)


def _objects(
    content: Iterator[str], data: str, columns: Sequence[str], make_row: MakeRow
) -> Iterator[Row]:
    """Yields the rows of lines of JSON; empty lines are none."""
    for number, line in enumerate(content, 1):
        where = f"{data} line {number}"
        values = _parsed(line)
        if isinstance(values, dict):
            yield make_row([values.get(name) for name in columns], columns, where)
        elif line.strip():
            yield Row((line,), where, "it is no JSON object; expected one a line")


def _parsed(line: str) -> Any:
    """Returns the content of a line of JSON; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # of ten thousand brackets
        return None


def _parquet(data: str, columns: Sequence[str], make_row: MakeRow) -> Iterator[Row]:
    """Opens a parquet file."""
    import pyarrow as pa  # lines of text do not need it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(_opened(data))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{data} cannot be read as parquet: {error}") from error
    _check_columns(data, columns, table.schema_arrow.names)

    def read() -> Iterator[Row]:
        number = 0
        try:
            for batch in table.iter_batches(PARQUET_ROWS, columns=list(columns)):
                by_column = [batch.column(name).to_pylist() for name in columns]
                for values in zip(*by_column, strict=True):
                    number += 1
                    yield make_row(values, columns, f"{data} row {number}")
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{data} is damaged after row {number}: {error}") from error

    return read()
