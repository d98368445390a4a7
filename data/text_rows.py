"""Texts to predict: lines, or columns of a CSV, TSV, JSONL or parquet file, read as they are
needed.

    for row in open_table("new.csv").rows(("question", "answer")):
        row.texts                # ("How …?", "By …")
        row.where, row.error     # "new.csv line 7", "its answer is empty"

A row that cannot be used has an error, and does not end the file.
"""

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import fsspec

from errors import InputError

STANDARD_INPUT = "-"
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SHOWN = 60  # characters of a value in a message
PARQUET_ROWS = 1024  # read at a time


@dataclass(frozen=True)
class Row:
    """The texts of a row.

    Attributes:
        texts: one, or two of a pair; what the row has of them, where there is an error.
        where: the file, and the line or the row, both counted from 1.
        error: why it cannot be used; "": it can.
    """

    texts: tuple[str, ...]
    where: str
    error: str = ""


def is_table(data: str) -> bool:
    """Tells whether a file has columns, by the end of its name."""
    return data.lower().endswith(TABLES)


@dataclass(frozen=True)
class Table:
    """An open file with columns.

    Attributes:
        data: its path or URL.
        names: of its columns; of JSONL, those of its first line.
        read: returns its rows, given the columns' names; once.
    """

    data: str
    names: list[str]
    read: Callable[[Sequence[str]], Iterator[Row]]

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """Returns the rows with the texts of these columns.

        Raises:
            InputError: it lacks a column; with the rows, where it is damaged so that the next row
                is not known.
        """
        missing = [name for name in columns if name not in self.names]
        if missing:
            raise InputError(
                f"{self.data} has no column {', '.join(missing)}; "
                f"it has {', '.join(self.names) or 'none'}: say by --text which have the text"
            )
        for name in columns:
            if self.names.count(name) > 1:
                raise InputError(f"{self.data} has two columns {name}; rename one")
        return self.read(columns)


def open_table(data: str) -> Table:
    """Opens a file with columns, see `is_table`.

    Raises:
        InputError: it cannot be read.
    """
    file = _opened(data)
    ending = data.lower().rpartition(".")[2]
    if ending == "parquet":
        return _parquet(file, data)
    if ending in ("jsonl", "ndjson"):
        return _json_lines(file, data)
    return _separated(file, data, "\t" if ending == "tsv" else ",")


def lines(data: str) -> Iterator[Row]:
    """Returns the lines of a file, or of the standard input for "-", as rows of one text.

    Raises:
        InputError: the file cannot be read.
    """
    if data == STANDARD_INPUT:
        return _numbered(sys.stdin.buffer, "the standard input")
    return _numbered(_opened(data), data)


def _opened(data: str) -> IO[bytes]:
    """Returns an open file; raises InputError where it cannot be opened."""
    try:
        return fsspec.open(data, "rb").open()
    except FileNotFoundError:
        raise InputError(f"there is no file {data}; give a file of texts") from None
    except IsADirectoryError:
        raise InputError(f"{data} is a folder; give a file of it") from None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"{data} cannot be read: {error}") from error


def _row(values: Sequence[Any], columns: Sequence[str], where: str) -> Row:
    """Returns a row of these values, with an error where one is no text."""
    texts = tuple("" if value is None else str(value) for value in values)
    for number, value in enumerate(values):
        name = columns[number] if columns else "text"
        if not isinstance(value, str) and value is not None:
            return Row(texts, where, f"its {name} is {str(value)[:SHOWN]}, which is no text")
        if value is None or not value.strip():
            return Row(texts, where, f"its {name} is empty")
        if not value.isascii() and any("\udc80" <= letter <= "\udcff" for letter in value):
            return Row(texts, where, f"its {name} is not UTF-8")
    return Row(texts, where)


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Yields the lines of a file, without their ends; bytes that are not UTF-8 as surrogates.

    Only \\n ends a line: texts have other characters that Python takes for line ends.
    """
    for number, line in enumerate(file):
        if number == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")  # Windows' editors write a byte order mark
        text = line.decode("utf-8", "surrogateescape")
        yield text.removesuffix("\n").removesuffix("\r")


def _numbered(file: IO[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), 1):
        yield _row([line], (), f"{name} line {number}")


def _separated(file: IO[bytes], data: str, separator: str) -> Table:
    """Opens a CSV or TSV file, whose first line names its columns.

    A field in quotes may have separators and line ends.
    """
    csv.field_size_limit(sys.maxsize)  # by default 131,072 characters
    reader = csv.reader(_with_ends(file), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise InputError(f"{data} line 1 cannot be read as CSV: {error}") from error
    return Table(data, names, partial(_fields, reader, data, names))


def _with_ends(file: IO[bytes]) -> Iterator[str]:
    """Yields lines with their ends, which a field in quotes keeps."""
    for line in _lines(file):
        yield line + "\n"


def _fields(
    reader: Any, data: str, names: Sequence[str], columns: Sequence[str]
) -> Iterator[Row]:
    """Yields the rows of a csv reader behind its header."""
    places = [names.index(name) for name in columns]
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{data} line {reader.line_num} cannot be read as CSV: {error}; "
                'a field with a quote in it stands in quotes, and the quote twice: "5"" wide"'
            ) from error
        where = f"{data} line {reader.line_num}"
        if len(fields) != len(names):
            error = f"it has {len(fields)} fields, and the header {len(names)}"
            yield Row(tuple(fields), where, error)
        else:
            yield _row([fields[place] for place in places], columns, where)


def _json_lines(file: IO[bytes], data: str) -> Table:
    """Opens a file with a JSON object a line."""
    content = _lines(file)
    first = next(content, None)
    names = []
    if first is not None:
        of_first = _parsed(first)
        if not isinstance(of_first, dict):
            raise InputError(f"{data} line 1 is no JSON object; expected one a line")
        names = list(of_first)

    def read(columns: Sequence[str]) -> Iterator[Row]:
        of_file = content if first is None else itertools.chain([first], content)
        for number, line in enumerate(of_file, 1):
            where = f"{data} line {number}"
            values = _parsed(line)
            if isinstance(values, dict):
                yield _row([values.get(name) for name in columns], columns, where)
            else:
                yield Row((line,), where, "it is no JSON object")

    return Table(data, names, read)


def _parsed(line: str) -> Any:
    """Returns the content of a line of JSON; None where it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _parquet(file: IO[bytes], data: str) -> Table:
    """Opens a parquet file."""
    import pyarrow as pa  # lines of text do not need it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{data} cannot be read as parquet: {error}") from error

    def read(columns: Sequence[str]) -> Iterator[Row]:
        number = 0
        try:
            for batch in table.iter_batches(PARQUET_ROWS, columns=list(columns)):
                by_column = [batch.column(name).to_pylist() for name in columns]
                for values in zip(*by_column, strict=True):
                    number += 1
                    yield _row(values, columns, f"{data} row {number}")
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{data} is damaged after row {number}: {error}") from error

    return Table(data, table.schema_arrow.names, read)


def chunks(found: Iterable[Row], sizes: Iterable[int]) -> Iterator[list[Row]]:
    """Yields rows in lists of these sizes; the last one may be shorter."""
    found = iter(found)
    for size in sizes:
        chunk = []
        for row in found:
            chunk.append(row)
            if len(chunk) == size:
                break
        if not chunk:
            return
        yield chunk
