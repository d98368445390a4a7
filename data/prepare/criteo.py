"""Turns the text of Criteo's Kaggle and Terabyte click logs into arrays, once before training.

    make data DATASET=criteo DATA=RAW OUT=DIR
    python -m data.prepare.criteo --data RAW [--out DIR] [--threshold 10]

Training maps the arrays into memory, see ClickLog in data/criteo.py.

A line of the text is a label, 13 integers and 26 categories of 32 bits in hexadecimal, separated by
tabs. An empty field is a missing value.

The integers become log(x + 1), missing and negative ones 0, as in
https://github.com/facebookresearch/dlrm.

The categories become rows of embedding tables: 0 where the value is missing, 1 where it is rare or
not seen in training, and from 2 on by falling count in the training rows. Of equal counts the
smaller value comes first.

With --form mlperf_v2 both are those of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2/
torchrec_dlrm/scripts/process_Criteo_1TB_Click_Logs_dataset.sh, which calls torchrec):

    integers    log(x + 3), missing ones 0, ones below -2 as -2 (torchrec 0.3.2, tsv_to_npys)
    categories  numbered from 2 on as they first appear in all files, those of evaluation too; a
                missing one is the value 0; then the remainder by the rows of MLPerf's tables
                (sparse_to_contiguous without a threshold)

and the tables of multi-hot ids (data/multi_hot.py) are written beside them. The order of the rows
stays that of the text: training shuffles. torchrec shuffles the training days on disk, through
float32, which rounds ids above 16,777,216; these here are exact.
"""

import codecs
import dataclasses
import gzip
import os
import re
import zlib
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data import splits
from data.criteo import MLPERF_MAX_ROWS, NUM_DENSE, map_npz, text_files
from data.leftovers import is_leftover
from data.multi_hot import MultiHot, mlperf_rows
from data.prepare import pipeline
from data.prepare.files import create_array, read_json, write_json, write_rows
from data.prepare.pipeline import Preparation, expect, save_arrays
from data.prepare.sources import files_in, folder_of
from errors import InputError

NUM_SPARSE = 26
COLUMNS = 1 + NUM_DENSE + NUM_SPARSE

# Rows of an embedding table. The vocabulary begins with FIRST.
MISSING = 0
RARE = 1
FIRST = 2

DAYS = [f"day_{day}" for day in range(24)]

Form = Literal["own", "mlperf_v2"]

# Text of a chunk, which becomes one file: the most work that a kill costs, and what a worker holds
# in memory.
CHUNK_BYTES = 64 << 20
# Text of a block, which is parsed at once. Larger ones leave the processor's caches and are 3 times
# slower.
BLOCK_BYTES = 4 << 20
MAX_LINE = 1 << 20  # bytes; a file with a longer line is no table
MERGED_AT_LEAST = 1 << 20  # values counted in chunks before they are merged into the vocabulary

TEXT = re.compile(r"\.txt(\.gz)?$", re.IGNORECASE)  # how the names of text files end
INTEGER = "^-?[0-9]{1,18}$"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares Criteo's text for training: parses it, counts the categories, writes arrays.

    The same command resumes a killed one. The result depends neither on that nor on --workers.
    """

    data: (
        str  # folder with train.txt (and val.txt or test.txt) or day_0, …, plain or .gz; or a file
    )
    out: str = ""  # folder of the arrays; default: a folder `prepared` beside the text
    threshold: int = 1  # values seen fewer times in training rows share the id 1; 1 keeps all
    max_rows: int = MLPERF_MAX_ROWS  # most rows of a table, rare values share them; 0: no limit
    hash_rows: int = 0  # rows of every table; an id is a value's remainder, no vocabulary; 0: off
    form: Form = "own"  # mlperf_v2: values as its reference has them, for training of that preset
    bad_rows: float = 0.0001  # share of malformed lines that may be left out; more are an error
    workers: int = os.cpu_count() or 1  # processes


# Parsing


def malformed(line: bytes) -> str | None:
    """Returns why a line (without its end) is not a row of Criteo, or None if it is one.

    This function defines which lines `parse` leaves out.
    """
    try:
        line.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    if b"\r" in line:
        return "it has a carriage return in its middle"

    fields = line.split(b"\t")
    if len(fields) == COLUMNS - 1:
        return (
            f"it has {COLUMNS - 1} columns instead of {COLUMNS}: "
            "is the label missing, as in Kaggle's test.txt?"
        )
    if len(fields) != COLUMNS:
        return f"it has {len(fields)} columns instead of {COLUMNS}"

    if fields[0] not in (b"0", b"1"):
        return f"its label is {_shown(fields[0])}, expected 0 or 1"

    first_category = 1 + NUM_DENSE
    for number, field in enumerate(fields[1:first_category], start=2):
        if field and not re.fullmatch(rb"-?[0-9]{1,18}", field):
            return f"column {number} is {_shown(field)}, expected an integer"
    for number, field in enumerate(fields[first_category:], start=first_category + 1):
        if field and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
            return f"column {number} is {_shown(field)}, expected up to 8 hexadecimal digits"
    return None


def _shown(field: bytes) -> str:
    """Returns a field as a message shows it: quoted, and cut after 20 characters."""
    text = field.decode(errors="replace")
    if len(text) > 20:
        text = text[:20] + "…"
    return repr(text)


@dataclasses.dataclass
class Rows:
    """Parsed lines: the n good ones as arrays, and how many others there are."""

    dense: np.ndarray  # float32 [n, 13], logarithms
    label: np.ndarray  # uint8 [n]
    sparse: np.ndarray  # uint32 [26, n]: a feature's values lie together, for counting
    missing: np.ndarray  # uint32 [n], bit t: feature t is missing
    lines: int = 0  # good and bad
    bad: int = 0
    first_bad: int = -1  # line, from 0; -1: there is none
    why: str = ""  # the first bad line is bad


def parse(text: bytes, form: Form = "own") -> Rows:
    """Parses whole lines, all columns at once.

    Leaves out exactly the lines for which `malformed` gives a reason.
    """
    text = text.replace(b"\r\n", b"\n")
    if text and not text.endswith(b"\n"):
        text += b"\n"

    # Lines with another number of columns would stop pyarrow, so they are taken out before.
    characters = np.frombuffer(text, np.uint8)
    line_ends = np.flatnonzero(characters == ord("\n"))
    good = _is_readable(text, characters, line_ends)
    readable = np.flatnonzero(good)
    if len(readable) < len(line_ends):
        line_sizes = np.diff(line_ends, prepend=-1)
        characters = characters[np.repeat(good, line_sizes)]
    table = _read_table(characters, len(readable))

    label, bad_label = _parse_labels(table[0])
    dense, bad_integer = _parse_integers(table[1 : 1 + NUM_DENSE], form)
    sparse, missing, bad_category = _parse_categories(table[1 + NUM_DENSE :])

    bad = bad_label | bad_integer | bad_category
    good[readable[bad]] = False
    if bad.any():
        label = label[~bad]
        dense = dense[~bad]
        sparse = sparse[:, ~bad]
        missing = missing[~bad]
    rows = Rows(dense, label, sparse, missing, lines=len(good))
    if not good.all():
        rows.bad = int((~good).sum())
        rows.first_bad = int(np.argmin(good))
        line = text.split(b"\n", rows.first_bad + 1)[rows.first_bad]
        rows.why = malformed(line)
        assert rows.why, "the fast parser refused a good line"
    return rows


def _is_readable(text: bytes, characters: np.ndarray, line_ends: np.ndarray) -> np.ndarray:
    """Returns bool [lines]: whether pyarrow reads a line as one row of 40 columns.

    Args:
        characters: uint8, those of `text`.
        line_ends: their positions of "\\n".
    """
    tabs = np.flatnonzero(characters == ord("\t"))
    tabs_before = np.searchsorted(tabs, line_ends)
    readable = np.diff(tabs_before, prepend=0) == COLUMNS - 1
    if text.startswith(codecs.BOM_UTF8):  # pyarrow would skip it, but the label has it
        readable[0] = False
    if b"\r" in text:  # a line end to pyarrow
        returns = np.flatnonzero(characters == ord("\r"))
        readable[np.searchsorted(line_ends, returns)] = False
    return readable


def _read_table(characters: np.ndarray, rows: int) -> list[pa.Array]:
    """Returns the 40 columns of lines with 39 tabs each, as strings; empty fields are null."""
    if not rows:
        return [pa.array([], pa.string())] * COLUMNS
    names = [str(column) for column in range(COLUMNS)]
    read_options = csv.ReadOptions(
        use_threads=False,
        block_size=len(characters) + 1,
        column_names=names,
    )
    parse_options = csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
    convert_options = csv.ConvertOptions(
        check_utf8=False,
        column_types=dict.fromkeys(names, pa.string()),
        strings_can_be_null=True,
        null_values=[""],
    )
    table = csv.read_csv(
        pa.BufferReader(pa.py_buffer(characters)),
        read_options=read_options,
        parse_options=parse_options,
        convert_options=convert_options,
    )
    assert table.num_rows == rows
    return [column.chunk(0) for column in table.columns]


def _parse_labels(strings: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels, uint8 [n], and which of them are malformed, bool [n]."""
    fits = pc.match_substring_regex(strings, "^[01]$").fill_null(False)
    is_one = pc.equal(strings, "1").fill_null(False)
    label = is_one.to_numpy(zero_copy_only=False).astype(np.uint8)
    return label, ~fits.to_numpy(zero_copy_only=False)


def _parse_integers(columns: list[pa.Array], form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Returns logarithms of the integers, float32 [n, 13], and the malformed rows, bool [n]."""
    rows = len(columns[0])
    dense = np.zeros((rows, NUM_DENSE), np.float32)
    bad = np.zeros(rows, bool)
    for column, strings in enumerate(columns):
        fits = pc.match_substring_regex(strings, INTEGER).fill_null(True)
        if not pc.all(fits, min_count=0).as_py():
            bad |= ~fits.to_numpy(zero_copy_only=False)
            strings = pc.if_else(fits, strings, None)
        integers = strings.cast(pa.int64()).fill_null(0).to_numpy()
        if form == "mlperf_v2":
            integers = np.maximum(integers, -2) + 3  # before it is rounded to float32
        dense[:, column] = integers
    if form == "mlperf_v2":
        return np.log(dense), bad
    return np.log(np.maximum(dense, 0) + 1), bad


def _parse_categories(columns: list[pa.Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `sparse` and `missing` as Rows has them, and which rows are malformed, bool [n]."""
    rows = len(columns[0])
    sparse = np.zeros((NUM_SPARSE, rows), np.uint32)
    missing = np.zeros(rows, np.uint32)
    bad = np.zeros(rows, bool)
    for feature, strings in enumerate(columns):
        is_there = strings.is_valid().to_numpy(zero_copy_only=False)
        values, strange = _hexadecimal(strings, is_there)
        sparse[feature, is_there] = values
        bad[np.flatnonzero(is_there)[strange]] = True
        missing |= (~is_there).astype(np.uint32) << np.uint32(feature)
    return sparse, missing, bad


def _hexadecimal(strings: pa.Array, is_there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parses strings as hexadecimal numbers.

    Args:
        is_there: bool [n], which of the strings are not null; m of them are parsed.

    Returns: the numbers, uint32 [m]; and bool [m], which strings are not 1 to 8 hexadecimal digits.
        The number of such a string means nothing.
    """
    _, offsets, characters = strings.buffers()
    offsets = np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4)
    characters = np.frombuffer(characters or b"", np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)[is_there]
    strange = lengths > 8
    is_digit = _IS_HEXADECIMAL[characters]

    # Criteo's own files: the digits of all values lie side by side.
    if (lengths == 8).all() and is_digit.all():
        return np.frombuffer(unhexlify(characters), ">u4"), strange

    # Shorter values are copied to the right of 8 zeros.
    count = len(lengths)
    starts = np.cumsum(lengths) - lengths
    strange[np.searchsorted(starts, np.flatnonzero(~is_digit), side="right") - 1] = True
    shifts = 8 * np.arange(1, count + 1) - lengths - starts
    right_aligned = np.arange(len(characters)) + np.repeat(shifts, lengths)
    kept = np.repeat(~strange, lengths)
    padded = np.full((count, 8), ord("0"), np.uint8)
    padded.reshape(-1)[right_aligned[kept]] = characters[kept]
    return np.frombuffer(unhexlify(padded), ">u4"), strange


_IS_HEXADECIMAL = np.isin(np.arange(256), list(b"0123456789abcdefABCDEF"))


# Reading in chunks


def _blocks(file: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    """Yields blocks of whole lines, about BLOCK_BYTES, until at least `size` bytes are read."""
    while size > 0:
        text = file.read(min(size, BLOCK_BYTES))
        if not text:
            return
        if not text.endswith(b"\n"):
            text += _read_line(file, name)
        size -= len(text)
        yield text


def _read_line(file: BinaryIO, name: str) -> bytes:
    """Returns the rest of a line; raises InputError where it is longer than a line of a table."""
    line = file.readline(MAX_LINE)
    if len(line) == MAX_LINE:
        raise InputError(
            f"{name} has a line of more than {MAX_LINE} bytes; it is not Criteo's text"
        )
    return line


def _save_chunk(blocks: Iterator[bytes], path: Path, form: Form = "own") -> None:
    """Parses the blocks of a chunk into one .npz file."""
    parsed = []
    lines = 0
    bad = 0
    first_bad = -1  # line of the chunk, from 0; -1: there is none
    why = ""
    for block in blocks:
        rows = parse(block, form)
        if rows.bad and first_bad < 0:
            first_bad = lines + rows.first_bad
            why = rows.why
        lines += rows.lines
        bad += rows.bad
        parsed.append(rows)
    if not parsed:  # the chunk lies within one long line, which belongs to an earlier chunk
        parsed = [parse(b"")]

    save_arrays(
        path,
        dense=np.concatenate([rows.dense for rows in parsed]),
        label=np.concatenate([rows.label for rows in parsed]),
        sparse=np.concatenate([rows.sparse for rows in parsed], axis=1),
        missing=np.concatenate([rows.missing for rows in parsed]),
        lines=lines,
        bad=bad,
        first_bad=first_bad,
        why=why,
    )


def _parse_range(path: Path, start: int, stop: int, form: Form, chunk: Path) -> None:
    """Parses the lines that begin in bytes [start, stop) of a plain file, into the file `chunk`."""
    with open(path, "rb") as file:
        if start > 0:
            # Skips the rest of the line before; only its "\n" if a line begins at `start`.
            file.seek(start - 1)
            _read_line(file, str(path))
        blocks = _blocks(file, stop - file.tell(), str(path))
        _save_chunk(blocks, chunk, form)


def _parse_gz(
    path: Path, parts: Path, source: int, chunk_bytes: int, form: Form, count: Path
) -> None:
    """Parses a .gz file into as many chunks as it needs, then writes their number to `count`.

    Chunks that are already there are only decompressed.

    Args:
        parts: folder of the chunks.
        source: number of the file among all text files.
        count: file for the number of chunks.
    """
    number = 0
    with pipeline.reading_gz(path), gzip.open(path, "rb") as file:
        while file.peek(1):
            blocks = _blocks(file, chunk_bytes, str(path))
            chunk = _chunk_path(parts, source, number)
            if chunk.exists():
                for _ in blocks:
                    pass
            else:
                _save_chunk(blocks, chunk, form)
            number += 1
    write_json(count, {"chunks": number})


def _chunk_path(parts: Path, source: int, number: int) -> Path:
    """Returns the path of a chunk of the text file with the number `source`."""
    return parts / f"{source:02d}-{number:06d}.npz"


# Counting and writing


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A file of parsed rows."""

    path: Path
    offset: int  # of its first row among the rows of all chunks


@dataclasses.dataclass(frozen=True)
class Tally:
    """How often each of n different values was seen."""

    values: np.ndarray  # uint32 [n], rising
    counts: np.ndarray  # int64 [n]
    firsts: np.ndarray | None = None  # int64 [n], the first row of each; None: not asked for


def _count(
    feature: int, chunks: list[Chunk], boundary: int, threshold: int, max_rows: int, path: Path
) -> None:
    """Counts a feature's values in the rows before `boundary`, and saves its vocabulary by value.

    Args:
        chunks: those that begin before `boundary`.
        threshold: values with a smaller count are left out: they are RARE.
        max_rows: of the table. Values beyond it share the rows of more frequent ones.
    """
    tally = _count_values(feature, chunks, boundary)
    frequent = tally.counts >= threshold
    values = tally.values[frequent]
    counts = tally.counts[frequent]

    rows = FIRST + len(values)
    by_falling_count = np.lexsort((values, -counts))
    ids = np.empty(len(values), np.int64)
    ids[by_falling_count] = np.arange(FIRST, rows)
    if max_rows and rows > max_rows:
        ids = FIRST + (ids - FIRST) % (max_rows - FIRST)  # MISSING and RARE keep their own rows
        rows = max_rows
    save_arrays(path, values=values, ids=ids.astype(np.int32), rows=rows, seen=len(tally.values))


def _number(feature: int, chunks: list[Chunk], total: int, rows: int, path: Path) -> None:
    """Numbers a feature's values as MLPerf's reference does, and saves its vocabulary by value.

    Args:
        chunks: all of them.
        total: rows of all chunks.
        rows: of the table.
    """
    tally = _count_values(feature, chunks, total, by_appearance=True)
    ids = np.empty(len(tally.values), np.int64)
    by_appearance = np.argsort(tally.firsts)
    ids[by_appearance] = np.arange(FIRST, FIRST + len(ids))
    ids = (ids % rows).astype(np.int32)
    save_arrays(path, values=tally.values, ids=ids, rows=rows, seen=len(tally.values))


def _count_values(
    feature: int, chunks: list[Chunk], boundary: int, by_appearance: bool = False
) -> Tally:
    """Returns how often each value of a feature occurs in the rows before `boundary`.

    Chunks are merged when they hold as many values as the tally so far. So memory is bounded by
    about four vocabularies, and the time is that of sorting all rows once, whatever the number of
    chunks.

    Args:
        by_appearance: the tally has `firsts`, too, and a missing value counts as 0; otherwise it
            does not count.
    """
    tally = Tally(np.empty(0, np.uint32), np.empty(0, np.int64))
    if by_appearance:
        tally = dataclasses.replace(tally, firsts=np.empty(0, np.int64))
    waiting = []
    waiting_values = 0
    for chunk in chunks:
        rows = boundary - chunk.offset  # more than it has, for all chunks but the last
        arrays = map_npz(chunk.path)
        seen = arrays["sparse"][feature, :rows]  # 0 where a value is missing
        if by_appearance:
            values, firsts, counts = np.unique(seen, return_index=True, return_counts=True)
            of_chunk = Tally(values, counts, chunk.offset + firsts)
        else:
            is_missing = (arrays["missing"][:rows] >> np.uint32(feature)) & 1
            values, counts = np.unique(seen[is_missing == 0], return_counts=True)
            of_chunk = Tally(values, counts)
        waiting.append(of_chunk)
        waiting_values += len(of_chunk.values)
        if waiting_values >= max(len(tally.values), MERGED_AT_LEAST):
            tally = _merge([tally, *waiting])
            waiting = []
            waiting_values = 0
    if waiting:
        tally = _merge([tally, *waiting])
    return tally


def _merge(tallies: list[Tally]) -> Tally:
    """Returns the sum of several tallies, which are in the order of their rows."""
    values = np.concatenate([tally.values for tally in tallies])
    counts = np.concatenate([tally.counts for tally in tallies])
    first_rows = None
    if tallies[0].firsts is not None:
        first_rows = np.concatenate([tally.firsts for tally in tallies])
    if not len(values):
        return Tally(values, counts, first_rows)

    order = np.argsort(values, kind="stable")  # the earlier tally's first, of equal values
    values = values[order]
    counts = counts[order]
    # Where a value differs from the one before it; the first one from any other value.
    other_than_first = values[:1] ^ 1
    starts = np.flatnonzero(np.diff(values, prepend=other_than_first))
    if first_rows is not None:
        first_rows = first_rows[order][starts]
    return Tally(values[starts], np.add.reduceat(counts, starts), first_rows)


def _write(chunk: Chunk, boundary: int, flags: Flags, out: Path, written: Path) -> None:
    """Writes the rows of a chunk into the arrays, ids for values; then creates the file `written`.

    The rows before `boundary` are for training, the others for evaluation.
    """
    parsed = map_npz(chunk.path)
    ids = _ids(parsed, flags, out)
    arrays = {"dense": parsed["dense"], "sparse": ids, "labels": parsed["label"]}
    train_rows = int(np.clip(boundary - chunk.offset, 0, len(ids)))
    first_eval_row = chunk.offset + train_rows - boundary
    for name, array in arrays.items():
        write_rows(out / f"train_{name}.npy", chunk.offset, array[:train_rows])
        write_rows(out / f"eval_{name}.npy", first_eval_row, array[train_rows:])
    written.touch()


def _ids(parsed: dict[str, np.ndarray], flags: Flags, out: Path) -> np.ndarray:
    """Returns the table rows of a chunk's categories, int32 [n, 26]."""
    ids = np.empty((len(parsed["label"]), NUM_SPARSE), np.int32)
    for feature, values in enumerate(parsed["sparse"]):
        if flags.hash_rows:
            column = 1 + values % np.uint32(flags.hash_rows - 1)
        else:
            column = _look_up(values, map_npz(_vocabulary_path(out, feature)))
        if flags.form == "own":
            is_missing = (parsed["missing"] >> np.uint32(feature)) & 1
            column = np.where(is_missing, MISSING, column)
        ids[:, feature] = column
    return ids


def _look_up(values: np.ndarray, vocabulary: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the ids of these values, RARE for those that the vocabulary lacks."""
    known = vocabulary["values"]
    if not len(known):
        return np.full(len(values), RARE)
    nearest = np.searchsorted(known, values).clip(max=len(known) - 1)
    return np.where(known[nearest] == values, vocabulary["ids"][nearest], RARE)


def _vocabulary_path(out: Path, feature: int) -> Path:
    """Returns the path of a feature's vocabulary; Criteo calls its features C1 to C26."""
    return out / f"vocabulary_C{feature + 1}.npz"


# Finding the text


@dataclasses.dataclass
class Texts:
    """Text files by what they are for."""

    train: list[Path]
    evaluation: list[Path]  # empty: the last seventh of the training rows
    left_out: list[str]

    def read_from(self) -> dict[str, str]:
        """Returns what the report says of where the rows are from."""
        train = splits.shown(path.name for path in self.train)
        evaluation = f"the last seventh of {train}"
        if self.evaluation:
            evaluation = self.evaluation[0].name
        else:
            train = f"{train} but its last seventh"
        return splits.read_from(train, evaluation, self.left_out)


def find_sources(data: str | Path) -> Texts:
    """Returns the text files with training rows and with evaluation rows, by their names.

    See data/splits.py for the names. Without a file for validation, test text is for evaluation
    where it has labels, as that of Kaggle has not; else the last day, or the last seventh of the
    only training file. Raises InputError.
    """
    data = Path(data).expanduser()
    if not data.exists():
        raise InputError(
            f"there is no file or folder {data}; "
            "expected a folder with train.txt or day_0 to day_23"
        )
    folder = data.parent if data.is_file() else data
    texts = _texts_in(folder)
    days = text_files(folder, DAYS)

    if data.is_file():
        train = [data]
        texts = {name: path for name, path in texts.items() if path != data}
    else:
        train = _train_files(data, texts, days)
    if not train:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise InputError(
            f"{data} has neither train.txt nor day_0 to day_23 (plain or .gz); found {found}"
        )

    evaluation = []
    name = splits.named(texts, "valid", str(folder))
    if not name:
        name = splits.named(_labelled_tests(texts), "test", str(folder))
    if name:
        evaluation = [texts[name]]
    elif len(train) > 1:
        evaluation = [train.pop()]

    left_out = []
    if data.is_dir():  # of a file, the user has named what is read
        left_out = _left_out(folder, [*texts.values(), *days], read=[*train, *evaluation])
    return Texts(train, evaluation, left_out)


def _texts_in(folder: Path) -> dict[str, Path]:
    """Returns a folder's text files by their names without .txt and .gz; plain rather than .gz."""
    # Compressed files come first, so that a plain one replaces its compressed twin.
    texts = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix.lower() != ".gz"):
        ending = TEXT.search(path.name)
        if ending and path.is_file() and not path.name.startswith("."):
            texts[path.name[: ending.start()]] = path
    return texts


def _train_files(data: Path, texts: dict[str, Path], days: list[Path]) -> list[Path]:
    """Returns the training text or the days, none if there are neither; InputError for both."""
    name = splits.named(texts, "train", str(data))
    if not name:
        return list(days)
    train = texts[name]
    if days:
        raise InputError(
            f"{data} has {train.name} as well as {days[0].name}; move one to another folder"
        )
    return [train]


def _labelled_tests(texts: dict[str, Path]) -> dict[str, Path]:
    """Returns the texts whose names say test and most of whose first lines are rows with labels."""
    labelled = {}
    for name, path in texts.items():
        if splits.split_of(name) != "test":
            continue
        lines = _first_lines(path, 100)
        good = sum(malformed(_without_end(line)) is None for line in lines)
        if good > len(lines) / 2:
            labelled[name] = path
    return labelled


def _left_out(folder: Path, candidates: list[Path], read: list[Path]) -> list[str]:
    """Returns the names of the `candidates` that are not read, and of other files that say a split.

    The latter are not read for their ending or their number: val.csv, val/, day_24.
    """
    left_out = [path for path in candidates if path not in read]

    ignored = {*read, *left_out}
    for path in (*read, *left_out):
        ignored.add(path.with_name(f"{path.name}.gz"))  # not read beside a plain one
    for path in sorted(folder.iterdir()):
        if path in ignored or path.name.startswith(".") or is_leftover(path.name):
            continue
        says_split = splits.says_split(Path(path.name)) or path.name.startswith("day_")
        if says_split and not splits.made_by_make(path):
            left_out.append(path)
    return [path.name for path in left_out]


def _check_head(path: Path, bad_rows: float) -> None:
    """Raises InputError for a file of another kind: empty, no labels, other separators."""
    lines = _first_lines(path, 100)
    if not lines:
        raise InputError(
            f"{path} is empty; "
            f"expected lines of {COLUMNS} columns: label, 13 integers, 26 categories"
        )

    bad = 0
    first = ""
    for number, line in enumerate(lines, start=1):
        why = malformed(_without_end(line))
        if why:
            bad += 1
            first = first or f"line {number}: {why}"
    if bad > max(bad_rows, 0.5) * len(lines):
        raise InputError(
            f"{path} is not Criteo's text: {bad} of its first {len(lines)} lines are malformed, "
            f"the first is {first}"
        )


def _without_end(line: bytes) -> bytes:
    """Returns a line without its \\n or \\r\\n."""
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _first_lines(path: Path, most: int) -> list[bytes]:
    """Returns the first lines of a plain or .gz file, at most `most`."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    lines = []
    try:
        with open_file(path, "rb") as file:
            while len(lines) < most:
                line = _read_line(file, str(path))
                if not line:
                    break
                lines.append(line)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {why}") from error
    return lines


# The command


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes Criteo's text as the arrays that ClickLog reads; the arguments are those of Flags.

    There are three passes: parse chunks of text, each to a file of its own; count the values of
    each category and save them as vocabulary_C1.npz … (values, ids); write the arrays
    {train,eval}_{dense,sparse,labels}.npy. Then come prepared.json and, last of all, the empty file
    COMPLETE.

    Memory: about 0.3 GB per worker, and four times the vocabulary of one feature while counting.
    Disk: 160 bytes per row, and the same again in the folder `parts` until the end.

    Returns: the contents of prepared.json: flags, sources, table_rows, rows, malformed, …
    Raises InputError: there are no such files, there are too many malformed lines, or `out` holds
        something that was prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    _check_flags(flags)
    found = find_sources(data)
    print(splits.sentence(found.read_from()), flush=True)
    texts = found.train + found.evaluation
    job = _open_preparation(flags, found)
    report = job.finished_report()
    if report:
        _check_malformed(report["malformed"], flags.bad_rows)
        return report
    for path in texts:
        _check_head(path, flags.bad_rows)

    chunk_bytes = job.begin_with_piece_size("chunk_bytes", CHUNK_BYTES)
    parsed = _parse_all(job, texts, chunk_bytes, flags.form)
    malformed_rows = _malformed_rows(texts, parsed)
    _check_malformed(malformed_rows, flags.bad_rows)
    chunks, rows = _number_rows(texts, parsed, malformed_rows["first"])

    total = sum(rows)
    boundary = total - total // 7
    if found.evaluation:
        boundary = sum(rows[: len(found.train)])
    if boundary == total:
        raise InputError(
            f"{texts[0]} has {total} rows; expected at least 7, of which the last is for evaluation"
        )

    tables = _count_all(job, flags, chunks, boundary, total)
    _write_all(job, flags, chunks, boundary, total)
    if flags.form == "mlperf_v2":
        MultiHot(job.out, tables.rows)  # training would write its tables otherwise
    figures = {
        "form": flags.form,
        "table_rows": tables.rows,
        "rows": {"train": boundary, "eval": total - boundary},
        "malformed": malformed_rows,
        "values_seen": tables.values_seen,
        "read_from": found.read_from(),
    }
    return job.finish(figures)


def _check_flags(flags: Flags) -> None:
    """Raises InputError for a flag's value that cannot be."""
    expect(flags, "threshold", flags.threshold >= 1, "1 (keeps every value) or more")
    for name in ("max_rows", "hash_rows"):
        rows = getattr(flags, name)
        expect(flags, name, rows == 0 or 3 <= rows < 2**31, "0, or 3 to 2147483647")
    if flags.hash_rows and flags.threshold > 1:
        raise InputError(
            f"--threshold {flags.threshold} needs a vocabulary, "
            f"and --hash-rows {flags.hash_rows} makes none; drop one of them"
        )
    if flags.form == "mlperf_v2" and (flags.hash_rows or flags.threshold > 1):
        raise InputError(
            "--form mlperf_v2 keeps every value and numbers them: drop --hash-rows and --threshold"
        )
    expect(flags, "bad_rows", 0 <= flags.bad_rows < 1, "a share from 0 to below 1, such as 0.0001")


def _open_preparation(flags: Flags, found: Texts) -> Preparation:
    """Returns the preparation of these files, not yet begun."""
    folder = folder_of(flags.data)
    files = files_in(folder, found.train, "train")
    files += files_in(folder, found.evaluation, "eval")
    return Preparation(
        flags,
        files,
        not_planned=("bad_rows",),
        report="prepared.json",
        complete="COMPLETE",
        version=1,
        added_flags={"form": "own"},
    )


def _parse_all(
    job: Preparation, texts: list[Path], chunk_bytes: int, form: Form
) -> list[list[Path]]:
    """Parses what is not parsed yet; returns the chunks of each text, in its order."""
    # How many chunks a .gz file becomes is known when it is parsed, and noted in a file.
    counts = {}
    tasks = []
    for number, path in enumerate(texts):
        if path.suffix.lower() == ".gz":
            counts[number] = job.parts / f"{number:02d}.json"
            tasks.append((path, job.parts, number, chunk_bytes, form, counts[number]))
    job.run(_parse_gz, tasks, "parsing")

    chunks = []
    tasks = []
    for number, path in enumerate(texts):
        starts = range(0, path.stat().st_size, chunk_bytes)
        count = len(starts)
        if number in counts:
            count = read_json(counts[number])["chunks"]
        of_text = [_chunk_path(job.parts, number, chunk) for chunk in range(count)]
        chunks.append(of_text)
        if number not in counts:
            for start, chunk in zip(starts, of_text, strict=True):
                tasks.append((path, start, start + chunk_bytes, form, chunk))
    job.run(_parse_range, tasks, "parsing")
    return chunks


def _malformed_rows(texts: list[Path], parsed: list[list[Path]]) -> dict:
    """Returns the number of `lines`, the `count` of malformed ones, and the `first` of these.

    The first is named by its file, its line and the reason; "" if there is none.
    """
    total = 0
    bad = 0
    first = ""
    for text, of_text in zip(texts, parsed, strict=True):
        lines = 0
        for path in of_text:
            chunk = map_npz(path)
            if chunk["bad"] and not first:
                first = f"{text} line {lines + chunk['first_bad'] + 1}: {chunk['why']}"
            lines += int(chunk["lines"])
            bad += int(chunk["bad"])
        total += lines
    return {"lines": total, "count": bad, "first": first}


def _check_malformed(rows: dict, bad_rows: float) -> None:
    """Raises InputError if more lines are malformed than may be left out."""
    if rows["count"] > bad_rows * rows["lines"]:
        raise InputError(
            f"{rows['count']} of {rows['lines']} lines are malformed, more than the share "
            f"{bad_rows} that may be left out; fix them or raise --bad-rows. "
            f"The first is {rows['first']}"
        )


def _number_rows(
    texts: list[Path], parsed: list[list[Path]], first_malformed: str
) -> tuple[list[Chunk], list[int]]:
    """Returns all chunks, and the number of rows of each text; InputError if a text has none."""
    chunks = []
    rows = []
    offset = 0
    for text, of_text in zip(texts, parsed, strict=True):
        first = offset
        for path in of_text:
            chunks.append(Chunk(path, offset))
            offset += len(map_npz(path)["label"])
        if offset == first:
            raise InputError(f"{text} has no row that can be used; {first_malformed}")
        rows.append(offset - first)
    return chunks, rows


@dataclasses.dataclass(frozen=True)
class Tables:
    """The embedding tables of the features."""

    rows: list[int]
    values_seen: list[int] | None  # different values in the training rows; None with --hash-rows


def _count_all(
    job: Preparation, flags: Flags, chunks: list[Chunk], boundary: int, total: int
) -> Tables:
    """Counts the categories of the training rows, which come before `boundary`; or numbers those of
    all rows, of which there are `total`, with --form mlperf_v2."""
    if flags.hash_rows:
        return Tables(rows=[flags.hash_rows] * NUM_SPARSE, values_seen=None)

    paths = [_vocabulary_path(job.out, feature) for feature in range(NUM_SPARSE)]
    tasks = []
    if flags.form == "mlperf_v2":
        rows = mlperf_rows(flags.max_rows or None)
        for feature, path in enumerate(paths):
            tasks.append((feature, chunks, total, rows[feature], path))
        job.run(_number, tasks, "numbering categories")
    else:
        train_chunks = [chunk for chunk in chunks if chunk.offset < boundary]
        for feature, path in enumerate(paths):
            tasks.append((feature, train_chunks, boundary, flags.threshold, flags.max_rows, path))
        job.run(_count, tasks, "counting categories")

    rows = []
    values_seen = []
    for path in paths:
        vocabulary = map_npz(path)
        rows.append(int(vocabulary["rows"]))
        values_seen.append(int(vocabulary["seen"]))
    return Tables(rows, values_seen)


def _write_all(
    job: Preparation, flags: Flags, chunks: list[Chunk], boundary: int, total: int
) -> None:
    """Creates the arrays of both splits, and writes the rows of all chunks into them."""
    created = job.parts / "created"
    if not created.exists():
        for split, rows in {"train": boundary, "eval": total - boundary}.items():
            create_array(job.out / f"{split}_dense.npy", np.float32, (rows, NUM_DENSE))
            create_array(job.out / f"{split}_sparse.npy", np.int32, (rows, NUM_SPARSE))
            create_array(job.out / f"{split}_labels.npy", np.uint8, (rows,))
        created.touch()

    tasks = []
    for chunk in chunks:
        written = chunk.path.with_suffix(".written")
        tasks.append((chunk, boundary, flags, job.out, written))
    job.run(_write, tasks, "writing arrays")


def _summary(report: dict) -> None:
    """Prints what was left out, and the sizes of the result."""
    rows = report["rows"]
    bad = report["malformed"]
    tables = report["table_rows"]
    if bad["count"]:
        print(
            f"{bad['count']} malformed lines of {bad['lines']} were left out, "
            f"the first: {bad['first']}"
        )
    print(
        f"{rows['train']} training and {rows['eval']} evaluation rows; "
        f"{sum(tables)} table rows: {tables}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
