"""A user's own click log: what its columns are, and the numbers that they become.

    for table in read_tables(Path("log.csv"), ["price", "user", "tags"], rows=65_536):
        batch = Columns.load("runs/<name>/export/clicks").encode(table)

A preparation (data/prepare/clicks.py) finds out the figures and the vocabularies of the training
rows. They lie in the folder `columns` of what it made, and a run's export has them as `clicks`:

    columns.json                  the names of the columns; the mean and the deviation of numbers
    vocabulary_<column>.parquet   value and count: the first value has the id 1, the next one 2, …

A number becomes (x - mean) / deviation, of counts (--log) with x = log(count + 1), and a missing
one 0. A category becomes its id, from 1 on by falling count, and one that is rare or was not seen
in training 0. An empty category is a value like any other. A column with several values becomes a
bag of such ids, which may be empty.
"""

import codecs
import contextlib
import dataclasses
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from data import csv_text
from data.prepare.files import read_json, whole, write_json
from data.prepare.pipeline import reading_gz
from errors import InputError

FORMAT = 1  # of columns.json
UNKNOWN = 0  # the id of a value that is rare, or was not seen in training

PARQUET = (".parquet", ".pq")  # how the names of parquet files end
# Text of a CSV file that is parsed at once. No row may be longer.
BLOCK_BYTES = 16 << 20
MAX_HEADER = 1 << 20  # bytes

LABELS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
NO_NUMBER = ("", "na", "n/a", "nan", "null", "none")  # a missing number, in small letters
ROWS_AT_ONCE = 65_536  # of a file that is read whole
INTEGER = "^[+-]?[0-9]{1,19}$"
LARGEST = float(np.finfo(np.float32).max)

# The kinds of a column of times, and what they are read as; None: whole numbers or others.
TIMES = {
    "a number": None,
    "a date": pa.timestamp("ns"),
    "a date with a time zone": pa.timestamp("ns", "UTC"),
}


class BadRow(InputError):
    """Reports a value that cannot be used.

    Attributes:
        row: its number in the table, from 0.
        why: the sentence without the row.
    """

    def __init__(self, row: int, why: str):
        super().__init__(f"row {row + 1}: {why}")
        self.row = row
        self.why = why

    def __reduce__(self):
        return BadRow, (self.row, self.why)  # as another process raises it


@dataclasses.dataclass(frozen=True)
class Names:
    """The columns of a click log by what they are for. All names differ."""

    dense: tuple[str, ...] = ()  # numbers
    log: tuple[str, ...] = ()  # counts
    categorical: tuple[str, ...] = ()
    multi: tuple[str, ...] = ()  # with several values
    separator: str = "|"  # between the values of one of these, where they are text
    label: str = ""  # and time: only a preparation reads them
    time: str = ""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The dense features."""
        return self.dense + self.log

    @property
    def features(self) -> tuple[str, ...]:
        """The categorical features."""
        return self.categorical + self.multi

    @property
    def inputs(self) -> tuple[str, ...]:
        """What a prediction needs: all but the label and the time."""
        return self.numbers + self.features

    @property
    def all(self) -> tuple[str, ...]:
        """All columns that have a name here."""
        others = tuple(name for name in (self.label, self.time) if name)
        return others + self.inputs


# Reading files


@dataclasses.dataclass(frozen=True)
class Header:
    """The names of a file's columns."""

    names: list[str]
    separator: str = ""  # of a CSV file; "": a parquet file


def read_header(path: Path, columns: Sequence[str]) -> Header:
    """Returns the header of a CSV or parquet file that has these columns.

    The separator of a CSV file is the one under which its first line has all of them.

    Raises InputError: the file is empty or cannot be read, a column is missing or there twice.
    """
    if path.suffix.lower() in PARQUET:
        with _reading_parquet(path):
            header = Header(pq.read_schema(path).names)
    else:
        header = _csv_header(path, columns)

    for name in columns:
        count = header.names.count(name)
        if count == 0:
            _refuse_header(path, header, name)
        if count > 1:
            raise InputError(f"{path} has {count} columns {name}; rename all but one of them")
    return header


def _refuse_header(path: Path, header: Header, name: str) -> NoReturn:
    """Raises InputError for a header without the column `name`."""
    found = ", ".join(header.names).replace("\n", " ")
    advice = "name one of these, or give the file a header"
    if name in [column.strip() for column in header.names]:
        advice = f"remove the spaces around {name}"
    elif any("\n" in column for column in header.names):
        advice = 'is there a quote (") in the header that is not closed?'
    raise InputError(f"{path} has no column {name}; its columns are {_cut(found, 300)}; {advice}")


def _csv_header(path: Path, columns: Sequence[str]) -> Header:
    """Returns the header of a CSV file under the separator that gives most of these columns."""
    with _open_csv(path) as file:
        content = _header_lines(file)
    # UTF-16 and UTF-32 have zero bytes, or begin with a mark.
    if b"\0" in content or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path} is not UTF-8 but UTF-16, or no text; convert the file to UTF-8")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} has a header that is not UTF-8 (byte {error.start}); convert the file to UTF-8"
        ) from error
    if not text:
        raise InputError(f"{path} is empty; expected a header with the names of the columns")

    headers = []
    for separator in csv_text.SEPARATORS:
        names = csv_text.header(text, separator, str(path))
        headers.append(Header(names, separator))
    best = max(headers, key=lambda header: len(set(columns) & set(header.names)))
    if not any(name.strip() for name in best.names):
        line = text.rstrip("\r\n")
        raise InputError(
            f"{path} has no names of columns in its first line, {_cut(line, 80)!r}; "
            "expected a header: remove what stands above it, or write one"
        )
    return best


def _header_lines(file: io.BufferedIOBase) -> bytes:
    """Returns the first line, and more of them where it may have a name in quotes that goes on.

    Empty lines before it count for nothing, as to pyarrow, and so does a byte order mark.
    """
    content = file.readline(MAX_HEADER).removeprefix(codecs.BOM_UTF8)
    while content in (b"\n", b"\r\n"):
        content = file.readline(MAX_HEADER)
    while content.count(b'"') % 2 and len(content) < MAX_HEADER:
        line = file.readline(MAX_HEADER)
        if not line:
            break
        content += line
    return content


@contextlib.contextmanager
def _open_csv(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a CSV file, plain or .gz; raises InputError where it cannot be read."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with reading_gz(path), open_file(path, "rb") as file:
            yield file
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _reading_parquet(path: Path) -> Iterator[None]:
    """Turns the errors of a broken parquet file into an InputError that names it."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read as a parquet file: {reason}") from error


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A row of a CSV file with another number of columns than its header."""

    row: int  # its number in the file, from 0
    why: str


def read_tables(
    path: Path,
    columns: Sequence[str],
    rows: int,
    skipped: list[Malformed] | None = None,
    remedy: str = "fix or remove it",
) -> Iterator[pa.Table]:
    """Yields the rows of a CSV or parquet file in order, in tables of these columns.

    A table has `rows` rows, the last one may have fewer. The columns of a CSV file are text, which
    is checked by `typed`. No more than one table, and two blocks of BLOCK_BYTES, are in memory.

    Args:
        skipped: gets the rows that are left out for their number of columns, in order; some may lie
            behind the table that is yielded. None: the first one is an error.
        remedy: what to do about such a row, for its error.

    Raises InputError, after the rows before: the file cannot be read on, or a row has another
    number of columns.
    """
    header = read_header(path, columns)
    batches = _parquet_batches(path, columns, rows)
    if header.separator:
        batches = _csv_batches(path, columns, header, skipped, remedy)

    waiting = []
    count = 0
    try:
        for batch in batches:
            waiting.append(pa.Table.from_batches([batch]))
            count += batch.num_rows
            while count >= rows:
                table = pa.concat_tables(waiting)
                yield table.slice(0, rows)
                waiting = [table.slice(rows)]
                count -= rows
    except InputError:
        if count:
            yield pa.concat_tables(waiting)
        raise
    if count:
        yield pa.concat_tables(waiting)


def _parquet_batches(path: Path, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a parquet file in batches of at most `rows`."""
    with _reading_parquet(path), pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=rows, columns=list(columns))


def _csv_batches(
    path: Path,
    columns: Sequence[str],
    header: Header,
    skipped: list[Malformed] | None,
    remedy: str,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a CSV file in batches of BLOCK_BYTES of text, each value as its bytes.

    An error comes after the rows before it: pyarrow's own would end its block.
    """
    malformed = []

    def note(row: arrow_csv.InvalidRow) -> str:
        why = f"it has {row.actual_columns} columns instead of {row.expected_columns}: "
        malformed.append(Malformed(row.number - 2, why + repr(_cut(row.text, 80))))
        if skipped is not None:
            skipped.append(malformed[-1])
        return "skip"

    types = dict.fromkeys(header.names, pa.binary())
    count = 0
    last = None  # the last batch, kept back: only the end shows whether its last row is whole
    with _open_csv(path) as file:
        counted = _QuoteCounter(file)
        try:
            for batch in _open_batches(counted, header, types, columns, note):
                end = None  # the number of the row that ends the reading
                if malformed and skipped is None:
                    end = malformed[0].row
                    batch = batch.slice(0, end - count)
                count += batch.num_rows
                if last is not None:
                    yield last
                last = batch
                if count == end:
                    break
        except Exception as error:  # pyarrow's, or that of reading the file
            if last is not None:
                yield last
                last = None
            if not isinstance(error, pa.ArrowException):
                raise
            if not malformed or skipped is not None:
                raise InputError(_why_unreadable(path, error)) from error
    if malformed and skipped is None:
        if last is not None:
            yield last
        first = malformed[0]
        raise InputError(f"{path} row {first.row + 1}: {first.why}; {remedy}")

    is_open = counted.quotes % 2 and _ends_in_quotes(path, header)
    if last is not None:
        yield last.slice(0, last.num_rows - 1) if is_open else last
    if is_open:
        raise InputError(
            f'{path} has a quote (") that is not closed: the last row would go on to the end of '
            "the file; close it, or write a quote within quotes twice"
        )


class _QuoteCounter:
    """Reads a file for pyarrow, and counts the quotes in it."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file
        self.quotes = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self.quotes += content.count(b'"')
        return content


def _open_batches(
    file: Any,
    header: Header,
    types: dict[str, pa.DataType],
    columns: Sequence[str],
    on_malformed: Callable[[arrow_csv.InvalidRow], str],
    names: Sequence[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Opens a CSV file in pyarrow.

    Args:
        names: of the columns, instead of the header, which then is a row.
    """
    read_options = arrow_csv.ReadOptions(
        use_threads=False, block_size=BLOCK_BYTES, column_names=list(names)
    )
    parse_options = arrow_csv.ParseOptions(
        delimiter=header.separator,
        newlines_in_values=True,
        invalid_row_handler=on_malformed,
    )
    convert_options = arrow_csv.ConvertOptions(
        check_utf8=False,
        column_types=types,
        strings_can_be_null=False,
        include_columns=list(columns),
    )
    return arrow_csv.open_csv(file, read_options, parse_options, convert_options)


def _ends_in_quotes(path: Path, header: Header) -> bool:
    """Returns whether the last field of a file has swallowed the rows after it.

    A file with an odd number of quotes may be right: 5" is text where it does not begin a field.
    """
    names = [str(number) for number in range(len(header.names))]
    last = names[-1]
    text = b""
    with _open_csv(path) as file:
        batches = _open_batches(
            file, header, {last: pa.binary()}, [last], lambda row: "skip", names
        )
        for batch in batches:
            if batch.num_rows:
                text = batch.column(0)[-1].as_py()

    swallowed = text.split(b"\n")[1:]
    if not swallowed:
        return False
    is_row = swallowed[0].count(header.separator.encode()) == len(names) - 1
    return text.endswith(b"\n") or is_row


def _why_unreadable(path: Path, error: pa.ArrowException) -> str:
    """Returns the sentence on a CSV file that pyarrow cannot parse."""
    if "straddling" in str(error):
        return (
            f"{path} has a row of more than {BLOCK_BYTES} bytes; "
            'is there a quote (") that is not closed?'
        )
    if "Empty CSV" in str(error):
        return (
            f"{path} has a header and no rows; expected at least one row, "
            'and no quote (") in the header that is not closed'
        )
    reason = str(error).partition("\n")[0]
    return f"{path} cannot be read as CSV: {_cut(reason, 200)}"


def _cut(text: str, most: int) -> str:
    """Returns a text as a message shows it: at most so many letters."""
    return text if len(text) <= most else text[:most] + "…"


# Values of columns


def typed(table: pa.Table, names: Names) -> pa.Table:
    """Returns the inputs of raw rows by their types: a float64 column for each number, NaN where it
    is missing; text for each category, "" where it is missing; a list of such text for each column
    with several values.

    Args:
        table: as `read_tables` gives it, or made from pandas.
    Raises:
        InputError: a column is missing, or of a type that cannot be what it is named for.
        BadRow: a value cannot be used.
    """
    for name in names.inputs:
        if name not in table.column_names:
            found = ", ".join(map(str, table.column_names))
            raise InputError(
                f"there is no column {name} in the table; it has {_cut(found, 300) or 'none'}, "
                f"and needs {', '.join(names.inputs)}"
            )

    columns = {}
    for name in names.dense:
        columns[name] = pa.array(_numbers(table[name], name))
    for name in names.log:
        columns[name] = pa.array(_counts(table[name], name))
    for name in names.categorical:
        columns[name] = _text(table[name], name)
    for name in names.multi:
        columns[name] = _lists(table[name], name, names.separator)
    return pa.table(columns)


def labels(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Returns the labels of a column, uint8 [n] of 0 and 1; raises BadRow for another value."""
    text = pc.utf8_lower(pc.utf8_trim_whitespace(_text(column, name)))
    known = pa.array(list(LABELS))
    index = pc.index_in(text, value_set=known)
    if index.null_count:
        row = _first_null(index)
        raise BadRow(
            row,
            f"the label {name} is {_shown(text, row)}; expected 0 or 1 (or false, true)",
        )
    values = np.array(list(LABELS.values()), np.uint8)
    return values[index.to_numpy()]


def time_kind(column: pa.ChunkedArray, name: str) -> str:
    """Returns which of TIMES a column's first value is; raises BadRow where it is none."""
    first = column.slice(0, 1)
    for kind in TIMES:
        try:
            times(first, name, kind)
        except BadRow:
            continue
        return kind
    raise BadRow(
        0,
        f"the time {name} is {_shown(_text(first, name), 0)}; "
        "expected a number, or a date such as 2026-01-31 or 2026-01-31 23:59:59",
    )


def times(column: pa.ChunkedArray, name: str, kind: str) -> np.ndarray:
    """Returns the times of a column: int64 or, for numbers that are not whole, float64 [n].

    A date becomes nanoseconds since 1970. Raises BadRow where a value is not of this kind.
    """
    column = _plain(column)
    is_date = pa.types.is_date(column.type) or pa.types.is_timestamp(column.type)
    if kind == "a number":
        text = pc.utf8_trim_whitespace(_text(column, name))
        if is_date:
            raise BadRow(0, _no_time(name, text, 0, kind))
        is_whole = pc.match_substring_regex(text, INTEGER)
        if pc.all(is_whole, min_count=0).as_py():
            with contextlib.suppress(pa.ArrowInvalid):  # it may be too large
                return text.cast(pa.int64()).to_numpy()
        found = _cast(text, pa.float64(), lambda row: _no_time(name, text, row, kind)).to_numpy()
        strange = np.flatnonzero(~np.isfinite(found))
        if len(strange):
            raise BadRow(int(strange[0]), _no_time(name, text, int(strange[0]), kind))
        return found

    wanted = TIMES[kind]
    if is_date:
        has_zone = pa.types.is_timestamp(column.type) and column.type.tz is not None
        if has_zone != (wanted.tz is not None) or column.null_count:
            row = _first_null(column) if column.null_count else 0
            raise BadRow(row, _no_time(name, _text(column, name), row, kind))
        values = column
    else:
        values = pc.utf8_trim_whitespace(_text(column, name))
    found = _cast(values, wanted, lambda row: _no_time(name, values, row, kind))
    return found.cast(pa.int64()).to_numpy()


def _no_time(name: str, values: pa.Array, row: int, kind: str) -> str:
    """Returns why a value is no time of this kind."""
    return (
        f"the time {name} is {_shown(values, row)}; expected {kind}, as in the first row: "
        "write all of them in one way"
    )


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Returns the numbers of a column, float64 [n], NaN where they are missing."""
    column = _plain(column)
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_integer(kind):
        column = column.cast(pa.float64(), safe=False)  # from 2**53 on the nearest
    elif not _is_number(kind):
        text = pc.utf8_trim_whitespace(_text(column, name))
        is_missing = pc.is_in(pc.utf8_lower(text), value_set=pa.array(NO_NUMBER))
        column = pc.if_else(is_missing, None, text)

    def why(row: int) -> str:
        return f"the column {name} has {_shown(column, row)}; expected a number such as 3.5"

    numbers = _cast(column, pa.float64(), why).to_numpy(zero_copy_only=False)
    strange = np.flatnonzero(np.abs(numbers) > LARGEST)
    if len(strange):
        row = int(strange[0])
        raise BadRow(row, f"the column {name} has {numbers[row]}; expected finite float32 numbers")
    return numbers


def _counts(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """Returns the numbers of a column of counts, float64 [n], NaN where they are missing."""
    numbers = _numbers(column, name)
    negative = np.flatnonzero(numbers < 0)
    if len(negative):
        row = int(negative[0])
        raise BadRow(
            row,
            f"the column {name} has {numbers[row]:g}; --log is for counts, which are not negative: "
            "name it in --dense",
        )
    return numbers


def _lists(column: pa.ChunkedArray, name: str, separator: str) -> pa.ListArray:
    """Returns the values of each row of a column: the items of a list, or the parts of a text."""
    column = _plain(column)
    if _is_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    else:
        column = pc.split_pattern(_text(column, name), pattern=separator)

    # A missing list has no items, whatever lies below it.
    items = _text(pa.chunked_array([column.flatten()]), name)
    items = pc.utf8_trim_whitespace(items)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    row_of_item = np.repeat(np.arange(len(column)), lengths)

    is_there = pc.not_equal(items, "").to_numpy(zero_copy_only=False)
    kept = np.bincount(row_of_item[is_there], minlength=len(column))
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), items.filter(pa.array(is_there)))


def _text(column: pa.ChunkedArray | pa.Array, name: str) -> pa.StringArray:
    """Returns the values of a column as text, "" where they are missing.

    A whole number is the same text as an integer and as a float: 5.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_null(kind):
        return pa.array([""] * len(column), pa.string())
    if _is_list(kind):
        raise InputError(f"the column {name} has several values in a row; name it in --multi")
    if pa.types.is_nested(kind):
        raise InputError(f"the column {name} is made of {kind}; expected text, numbers or lists")

    if pa.types.is_floating(kind):
        column = _float_text(column.cast(pa.float64()))
    elif not pa.types.is_string(kind):
        row_is_bad = f"the column {name} has text that is not UTF-8; convert the file to UTF-8"
        column = _cast(column, pa.string(), lambda row: row_is_bad)
    return column.fill_null("")


def _float_text(column: pa.DoubleArray) -> pa.StringArray:
    """Returns floats as text, whole ones as integers, NaN as a missing value."""
    numbers = column.fill_null(np.nan).to_numpy(zero_copy_only=False)
    is_whole = (numbers == np.round(numbers)) & (np.abs(numbers) < 2**53)
    integers = pa.array(np.where(is_whole, numbers, 0).astype(np.int64)).cast(pa.string())
    text = pc.if_else(pa.array(is_whole), integers, column.cast(pa.string()))
    return pc.if_else(pa.array(np.isnan(numbers)), None, text)


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column as one array, without a dictionary."""
    column = _one_array(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def _is_number(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _cast(column: pa.Array, kind: pa.DataType, why) -> pa.Array:
    """Returns a column as another type.

    Args:
        why: returns, for the number of the first row that has no such value, what to say of it.
    Raises:
        BadRow: there is such a row.
    """
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass

    # Halves: the first row that cannot be cast is in [first, stop).
    first = 0
    stop = len(column)
    while stop - first > 1:
        middle = (first + stop) // 2
        try:
            column.slice(first, middle - first).cast(kind)
            first = middle
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            stop = middle
    raise BadRow(first, why(first))


def _first_null(column: pa.Array) -> int:
    """Returns the number of the first row without a value."""
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _shown(values: pa.Array, row: int) -> str:
    """Returns a value as a message shows it."""
    value = values[row].as_py()
    return repr(_cut("" if value is None else str(value), 40))


# Encoding


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense feature: what its numbers become."""

    name: str
    log: bool  # of counts: log(x + 1) comes first
    mean: float  # of the training rows
    deviation: float  # 0: they have no two values, and the feature is 0

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the feature of these numbers, float32 [n]; 0 where they are missing."""
        if not self.deviation:
            return np.zeros(len(numbers), np.float32)
        if self.log:
            numbers = np.log1p(numbers)
        standardised = (numbers - self.mean) / self.deviation
        return np.nan_to_num(standardised, nan=0.0).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Category:
    """A categorical feature: the values that have an id."""

    name: str
    values: pa.StringArray  # of the ids 1, 2, …
    lookups: int = 1  # most ids of a row
    several: bool = False  # a bag of up to `lookups` ids

    @property
    def rows(self) -> int:
        """Rows of the feature's table."""
        return len(self.values) + 1

    def look_up(self, values: pa.Array) -> np.ndarray:
        """Returns the ids of values, int32 [n], UNKNOWN for those that have none."""
        if not pa.types.is_dictionary(values.type):
            values = values.dictionary_encode()
        index = pc.index_in(values.dictionary.cast(pa.string()), value_set=self.values)
        ids = index.fill_null(-1).to_numpy().astype(np.int32) + 1
        return ids[values.indices.to_numpy()] if len(ids) else np.zeros(len(values), np.int32)


@dataclasses.dataclass
class Notes:
    """What became of values that training has not seen as they are, counted by column."""

    missing: Counter = dataclasses.field(default_factory=Counter)  # numbers, which become 0
    unknown: Counter = dataclasses.field(default_factory=Counter)  # values with the id UNKNOWN
    cut: Counter = dataclasses.field(default_factory=Counter)  # rows with too many values

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns the counts as a report has them; `add` takes them."""
        return {"missing": {**self.missing}, "unknown": {**self.unknown}, "cut": {**self.cut}}

    def add(self, counts: dict[str, dict[str, int]]) -> None:
        """Adds the counts of other rows."""
        for name, by_column in counts.items():
            getattr(self, name).update(by_column)

    def sentence(self) -> str:
        """Returns what there is to say, or ""."""
        said = []
        if self.missing:
            said.append(f"missing numbers, which become 0 (the mean): {_listed(self.missing)}")
        if self.unknown:
            said.append(
                f"values without an id of their own, which share 0: {_listed(self.unknown)}"
            )
        if self.cut:
            said.append(f"rows cut to the most frequent of their values: {_listed(self.cut)}")
        return "; ".join(said)


def _listed(counts: Counter) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a click log, and what their values become.

    Attributes:
        names: of the columns. `names.inputs` are those that `encode` needs.
    """

    names: Names
    dense: tuple[Dense, ...]
    categories: tuple[Category, ...]

    @staticmethod
    def load(folder: str | Path) -> "Columns":
        """Reads what `save` wrote: the folder `columns` of prepared clicks, or `clicks` of a run's
        export. Raises InputError."""
        folder = Path(folder).expanduser()
        path = folder / "columns.json"
        if not path.exists():
            raise InputError(
                f"there is no {path}; expected the folder clicks of an export, which a run on "
                "clicks of `make data DATASET=clicks` leaves"
            )
        content = read_json(path)
        if content["format"] != FORMAT:
            raise InputError(f"{path} has the format {content['format']}; expected {FORMAT}")

        names = {}
        for name, value in content["names"].items():
            names[name] = tuple(value) if isinstance(value, list) else value
        categories = []
        for feature in content["categories"]:
            path = vocabulary_path(folder, feature["name"])
            with _reading_parquet(path):
                table = pq.read_table(path, columns=["value"])
            values = _one_array(table["value"])
            categories.append(Category(values=values, **feature))
        dense = tuple(Dense(**feature) for feature in content["dense"])
        return Columns(Names(**names), dense, tuple(categories))

    @property
    def num_dense(self) -> int:
        """Dense features of a row; a constant 0 is one where there is no other."""
        return max(1, len(self.dense))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the categorical features."""
        return tuple(category.name for category in self.categories)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each categorical feature's table."""
        return tuple(category.rows for category in self.categories)

    @property
    def lookups(self) -> tuple[int, ...]:
        """Most ids of each categorical feature."""
        return tuple(category.lookups for category in self.categories)

    @property
    def has_bags(self) -> bool:
        """Whether a feature has several values, so that not all ids are there."""
        return any(category.several for category in self.categories)

    def encode(self, table, notes: Notes | None = None) -> dict[str, np.ndarray]:
        """Returns the numbers of raw rows, as ClickLog.batch does, but without "label".

        A call passes over all vocabularies (0.15 s for a million values): give it many rows.

        Args:
            table: a pyarrow.Table or a pandas.DataFrame with the columns `names.inputs`; others are
                passed over. Its values are those of the file: text of CSV is not made numbers
                before (`read_tables`; of pandas `read_csv(…, dtype=str, keep_default_na=False)`).
            notes: gets the counts of what is missing, unknown or cut.

        Returns:
            "dense" float32 [n, num_dense], "ids" int32 [n, sum of lookups], and where features have
            several values "present" float32 [n, sum of lookups].

        Raises:
            InputError: a column is missing or of another type. BadRow: a value cannot be used.
        """
        if not isinstance(table, pa.Table):
            wanted = [name for name in self.names.inputs if name in table.columns]
            table = pa.Table.from_pandas(table[wanted], preserve_index=False)
        return self.encode_typed(typed(table, self.names), notes)

    def encode_typed(self, table: pa.Table, notes: Notes | None = None) -> dict[str, np.ndarray]:
        """Returns the same for what `typed` returns."""
        notes = Notes() if notes is None else notes
        rows = table.num_rows
        dense = np.zeros((rows, self.num_dense), np.float32)
        for number, feature in enumerate(self.dense):
            numbers = table[feature.name].to_numpy()
            missing = int(np.isnan(numbers).sum())
            if missing:
                notes.missing[feature.name] += missing
            dense[:, number] = feature.encode(numbers)

        ids = []
        present = []
        for category in self.categories:
            column = _one_array(table[category.name])
            if category.several:
                bags, there = _encode_bags(category, column, notes)
            else:
                bags = category.look_up(column)[:, None]
                there = np.ones((rows, 1), np.float32)
                _note_unknown(category, bags, notes)
            ids.append(bags)
            present.append(there)

        batch = {"dense": dense, "ids": np.concatenate(ids, axis=1)}
        if self.has_bags:
            batch["present"] = np.concatenate(present, axis=1)
        return batch


def _one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column as one array, with its dictionary if it has one."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column


def _note_unknown(category: Category, ids: np.ndarray, notes: Notes) -> None:
    unknown = int((ids == UNKNOWN).sum())
    if unknown:
        notes.unknown[category.name] += unknown


def _encode_bags(
    category: Category, lists: pa.ListArray, notes: Notes
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the lists, int32 [n, lookups], and which of them are there, float32.

    Of a longer list the most frequent values stay, in their order.
    """
    ids = category.look_up(lists.flatten())
    _note_unknown(category, ids, notes)
    lengths = lists.value_lengths().to_numpy()
    row = np.repeat(np.arange(len(lists)), lengths)
    too_long = int((lengths > category.lookups).sum())
    if too_long:
        notes.cut[category.name] += too_long
        kept = _most_frequent(row, ids, category.lookups)
        row = row[kept]
        ids = ids[kept]

    place = _number_in_row(row)
    bags = np.full((len(lists), category.lookups), UNKNOWN, np.int32)
    there = np.zeros((len(lists), category.lookups), np.float32)
    bags[row, place] = ids
    there[row, place] = 1
    return bags, there


def _most_frequent(row: np.ndarray, ids: np.ndarray, most: int) -> np.ndarray:
    """Returns which ids are among the `most` frequent ones of their row, bool [ids].

    A smaller id is more frequent, and UNKNOWN least of all. Of equal ids the first ones stay.
    """
    rank = np.where(ids == UNKNOWN, np.iinfo(np.int32).max, ids)
    by_rank = np.lexsort((rank, row))  # stable: the row rises anyway
    kept = np.empty(len(ids), bool)
    kept[by_rank] = _number_in_row(row[by_rank]) < most
    return kept


def _number_in_row(row: np.ndarray) -> np.ndarray:
    """Returns the number of each item among those of its row, from 0, int64 [items].

    Args:
        row: of each item, rising.
    """
    first_of_row = np.searchsorted(row, row, side="left")
    return np.arange(len(row)) - first_of_row


def other_maps(own: Columns, other: Columns) -> str:
    """Returns which column becomes other numbers by `other` than by `own`; "" where none does."""
    for kind, ours, theirs in (
        ("dense feature", own.dense, other.dense),
        ("categorical feature", own.categories, other.categories),
    ):
        names = [feature.name for feature in ours]
        other_names = [feature.name for feature in theirs]
        if names != other_names:
            return f"it has the {kind}s {', '.join(other_names)} instead of {', '.join(names)}"
        for feature, other_feature in zip(ours, theirs, strict=True):
            if feature != other_feature:
                what = "mean or deviation" if isinstance(feature, Dense) else "vocabulary"
                return f"the {kind} {feature.name} has another {what}"
    return ""


class EncodedClicks:
    """The rows of a CSV or parquet file as a click log, by the maps of a run: see data/criteo.py
    for the interface.

    All rows are kept in memory as numbers, 4 bytes each.

    Attributes:
        notes: what became of values that the run has not seen, a sentence.
    Raises:
        InputError: the file cannot be read, or lacks a column; a value cannot be used.
    """

    def __init__(self, path: Path, columns: Columns):
        names = columns.names
        self.features = columns.features
        self.table_rows = columns.table_rows
        self.lookups = columns.lookups
        self.num_dense = columns.num_dense
        self.columns_folder = None
        self.source = f"all rows of {path.name}"
        self.left_out: Sequence[str] = ()

        found = Notes()
        batches = []
        first = 1
        for table in read_tables(path, (names.label, *names.inputs), ROWS_AT_ONCE):
            try:
                batch = columns.encode(table, found)
                batch["label"] = labels(table[names.label], names.label).astype(np.float32)
            except BadRow as error:
                raise InputError(f"{path} row {first + error.row}: {error.why}") from error
            batches.append(batch)
            first += table.num_rows
        if not batches:
            raise InputError(f"{path} has no rows; expected some to evaluate on")
        self._arrays = {}
        for key in batches[0]:
            self._arrays[key] = np.concatenate([batch[key] for batch in batches])
        sentence = found.sentence()
        self.notes = [sentence] if sentence else []

    def __len__(self) -> int:
        return len(self._arrays["label"])

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows of these numbers, see data/criteo.py."""
        return {key: values[indices] for key, values in self._arrays.items()}


# Files of the folder


def vocabulary_path(folder: Path, name: str) -> Path:
    """Returns the path of the vocabulary of a column."""
    return folder / f"vocabulary_{name}.parquet"


def save_vocabulary(path: Path, table: pa.Table, figures: dict[str, int]) -> None:
    """Writes a vocabulary, whole or not at all.

    Args:
        table: value and count, in the order of the ids.
        figures: numbers that `read_figures` returns.
    """
    table = table.replace_schema_metadata({"figures": json.dumps(figures)})
    with whole(path) as file:
        pq.write_table(table, file)


def read_figures(path: Path) -> dict[str, int]:
    """Returns the figures of a vocabulary, and how many values it has as "values"."""
    with _reading_parquet(path), pq.ParquetFile(path) as file:
        figures = json.loads(file.schema_arrow.metadata[b"figures"])
        return figures | {"values": file.metadata.num_rows}


def save_description(
    folder: Path, names: Names, dense: Sequence[Dense], lookups: Sequence[int]
) -> None:
    """Writes columns.json, to which the vocabularies belong.

    Args:
        lookups: of each categorical feature.
    """
    categories = []
    for name, most in zip(names.features, lookups, strict=True):
        several = name in names.multi
        categories.append({"name": name, "lookups": int(most), "several": several})
    content = {
        "format": FORMAT,
        "names": dataclasses.asdict(names),
        "dense": [dataclasses.asdict(feature) for feature in dense],
        "categories": categories,
    }
    write_json(folder / "columns.json", content)
