"""Turns the text files of Criteo's Kaggle and Terabyte click logs into arrays, once before training.

    python -m data.prepare.criteo --data RAW [--out DIR] [--threshold 10]  (make data DATASET=criteo DATA=RAW OUT=DIR)

Training maps the arrays into memory, see ClickLog in data/criteo.py.

A line of the text is a label, 13 integers and 26 categories of 32 bits in hexadecimal, separated by tabs. An empty
field is a missing value. The integers become log(x + 1), missing and negative ones 0, as in
https://github.com/facebookresearch/dlrm. The categories become rows of embedding tables: 0 where the value is missing,
1 where it is rare (or not seen in training), and from 2 on by falling count in the training rows (of equal counts the
smaller value first).
"""

import codecs
import dataclasses
import gzip
import itertools
import os
import re
import zlib
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data import splits
from data.criteo import MLPERF_MAX_ROWS, NUM_DENSE, map_npz, text_files
from data.leftovers import is_leftover
from data.prepare import pipeline
from data.prepare.files import read_json, write_json
from data.prepare.pipeline import Preparation, expect, save_arrays
from errors import InputError

NUM_SPARSE = 26
COLUMNS = 1 + NUM_DENSE + NUM_SPARSE
MISSING, RARE, FIRST = 0, 1, 2  # ids; the vocabulary begins with FIRST

DAYS = [f"day_{day}" for day in range(24)]
CHUNK_BYTES = 64 << 20  # text of one parsed file: the most that a kill costs, and what a worker holds
PIECE_BYTES = 4 << 20  # text parsed at once; larger pieces leave the processor's caches and are 3 times slower
MAX_LINE = 1 << 20  # bytes; a file with a longer line is no table

TEXT = re.compile(r"\.txt(\.gz)?$", re.IGNORECASE)  # how the names of text files end
INTEGER = "^-?[0-9]{1,18}$"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares Criteo's text files for training: parses them, counts their categories, writes arrays.

    The same command resumes a killed one. The result depends neither on that nor on --workers.
    """

    data: str  # folder with train.txt (and val.txt) or day_0, day_1, … (each plain or .gz), or one such file
    out: str = ""  # folder of the arrays; default: a folder `prepared` beside the text
    threshold: int = 1  # values seen fewer times than this in training rows share the id 1; 1 keeps all of them
    max_rows: int = MLPERF_MAX_ROWS  # larger tables are cut to this many rows, the rarest values folded in; 0: never
    hash_rows: int = 0  # no vocabulary: all tables have this many rows, an id is the remainder of its value; 0: off
    bad_rows: float = 0.0001  # share of malformed lines that may be left out; more are an error
    workers: int = os.cpu_count() or 1  # processes


# Parsing


def malformed(line: bytes) -> str | None:
    """Returns why a line (without its end) is not a row of Criteo, or None. This defines what `parse` leaves out."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    fields = line.split(b"\t")
    if b"\r" in line:
        return "it has a carriage return in its middle"
    if len(fields) == COLUMNS - 1:
        return f"it has {COLUMNS - 1} columns instead of {COLUMNS}: is the label missing, as in Kaggle's test.txt?"
    if len(fields) != COLUMNS:
        return f"it has {len(fields)} columns instead of {COLUMNS}"
    if fields[0] not in (b"0", b"1"):
        return f"its label is {_shown(fields[0])}, expected 0 or 1"
    for number, field in enumerate(fields[1 : 1 + NUM_DENSE], start=2):
        if field and not re.fullmatch(rb"-?[0-9]{1,18}", field):
            return f"column {number} is {_shown(field)}, expected an integer"
    for number, field in enumerate(fields[1 + NUM_DENSE :], start=2 + NUM_DENSE):
        if field and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
            return f"column {number} is {_shown(field)}, expected up to 8 hexadecimal digits"
    return None


def _shown(field: bytes) -> str:
    text = field.decode(errors="replace")
    return repr(text if len(text) <= 20 else text[:20] + "…")


@dataclasses.dataclass
class Rows:
    """Parsed lines: n good rows, and the number of the others and the first of them."""

    dense: np.ndarray  # float32 [n, 13], log(x + 1)
    label: np.ndarray  # uint8 [n]
    sparse: np.ndarray  # uint32 [26, n]: a feature's values lie together, for counting
    missing: np.ndarray  # uint32 [n], bit t: feature t is missing
    lines: int = 0  # good and bad
    bad: int = 0
    first_bad: int = -1  # line, from 0, or -1
    why: str = ""


def parse(text: bytes) -> Rows:
    """Parses whole lines, all columns at once; leaves out exactly the lines that `malformed` gives a reason for."""
    text = text.replace(b"\r\n", b"\n")
    if text and not text.endswith(b"\n"):
        text += b"\n"
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    tabs = np.flatnonzero(data == ord("\t"))
    good = np.diff(np.searchsorted(tabs, ends), prepend=0) == COLUMNS - 1
    if text.startswith(codecs.BOM_UTF8):  # which pyarrow would skip
        good[0] = False
    if b"\r" in text:  # a line end to pyarrow
        good[np.searchsorted(ends, np.flatnonzero(data == ord("\r")))] = False

    kept = np.flatnonzero(good)
    if len(kept) < len(ends):
        data = data[np.repeat(good, np.diff(ends, prepend=-1))]
    table = _read_table(data, len(kept))

    bad = ~pc.match_substring_regex(table[0], "^[01]$").fill_null(False).to_numpy(zero_copy_only=False)
    label = pc.equal(table[0], "1").fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint8)
    dense = np.zeros((len(kept), NUM_DENSE), np.float32)
    for column in range(NUM_DENSE):
        strings = table[1 + column]
        fits = pc.match_substring_regex(strings, INTEGER).fill_null(True)
        if not pc.all(fits, min_count=0).as_py():
            bad |= ~fits.to_numpy(zero_copy_only=False)
            strings = pc.if_else(fits, strings, None)
        dense[:, column] = strings.cast(pa.int64()).fill_null(0).to_numpy()
    dense = np.log(np.maximum(dense, 0) + 1)
    sparse = np.zeros((NUM_SPARSE, len(kept)), np.uint32)
    missing = np.zeros(len(kept), np.uint32)
    for feature in range(NUM_SPARSE):
        strings = table[1 + NUM_DENSE + feature]
        there = strings.is_valid().to_numpy(zero_copy_only=False)
        sparse[feature, there], strange = _hexadecimal(strings, there)
        bad[np.flatnonzero(there)[strange]] = True
        missing |= (~there).astype(np.uint32) << np.uint32(feature)

    good[kept[bad]] = False
    rows = Rows(dense, label, sparse, missing, len(good))
    if bad.any():
        rows.dense, rows.label, rows.sparse, rows.missing = dense[~bad], label[~bad], sparse[:, ~bad], missing[~bad]
    if not good.all():
        rows.bad, rows.first_bad = int((~good).sum()), int(np.argmin(good))
        rows.why = malformed(text.split(b"\n", rows.first_bad + 1)[rows.first_bad])
        assert rows.why, "the fast parser refused a good line"
    return rows


def _read_table(data: np.ndarray, rows: int) -> list[pa.Array]:
    """Returns the 40 columns of lines with 39 tabs each, as strings; empty fields are null."""
    if not rows:
        return [pa.array([], pa.string())] * COLUMNS
    names = [str(column) for column in range(COLUMNS)]
    table = csv.read_csv(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            null_values=[""],
        ),
    )
    assert table.num_rows == rows
    return [column.chunk(0) for column in table.columns]


def _hexadecimal(strings: pa.Array, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the m strings that are `there` as uint32 [m], and bool [m]: not 1 to 8 hexadecimal digits (value 0)."""
    _, offsets, values = strings.buffers()
    offsets = np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4)
    values = np.frombuffer(values or b"", np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)[there]
    strange = lengths > 8
    digits = _IS_HEXADECIMAL[values]
    if (lengths == 8).all() and digits.all():  # Criteo's own files: the digits of all values lie side by side
        return np.frombuffer(unhexlify(values), ">u4"), strange
    starts = np.cumsum(lengths) - lengths
    strange[np.searchsorted(starts, np.flatnonzero(~digits), side="right") - 1] = True
    padded = np.full((len(lengths), 8), ord("0"), np.uint8)
    keep = np.repeat(~strange, lengths)
    right_aligned = np.repeat(8 * np.arange(1, len(lengths) + 1) - lengths - starts, lengths) + np.arange(len(values))
    padded.reshape(-1)[right_aligned[keep]] = values[keep]
    return np.frombuffer(unhexlify(padded), ">u4"), strange


_IS_HEXADECIMAL = np.isin(np.arange(256), list(b"0123456789abcdefABCDEF"))


# Reading in chunks


def _pieces(file: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    """Yields whole lines, about PIECE_BYTES at once, until at least `size` bytes are read."""
    while size > 0:
        text = file.read(min(size, PIECE_BYTES))
        if not text:
            return
        if not text.endswith(b"\n"):
            text += _read_line(file, name)
        size -= len(text)
        yield text


def _read_line(file: BinaryIO, name: str) -> bytes:
    line = file.readline(MAX_LINE)
    if len(line) == MAX_LINE:
        raise InputError(f"{name} has a line of more than {MAX_LINE} bytes; it is not Criteo's text")
    return line


def _save_chunk(pieces: Iterator[bytes], path: Path) -> None:
    """Parses the pieces into one .npz file."""
    parts, lines, bad, first_bad, why = [], 0, 0, -1, ""
    for piece in pieces:
        rows = parse(piece)
        if rows.bad and first_bad < 0:
            first_bad, why = lines + rows.first_bad, rows.why
        lines, bad = lines + rows.lines, bad + rows.bad
        parts.append(rows)
    parts = parts or [parse(b"")]  # one line may cover the whole range of a chunk
    save_arrays(
        path,
        dense=np.concatenate([rows.dense for rows in parts]),
        label=np.concatenate([rows.label for rows in parts]),
        sparse=np.concatenate([rows.sparse for rows in parts], axis=1),
        missing=np.concatenate([rows.missing for rows in parts]),
        lines=lines,
        bad=bad,
        first_bad=first_bad,
        why=why,
    )


def _parse_range(path: Path, start: int, stop: int, chunk: Path) -> None:
    """Parses the lines that begin in bytes [start, stop) of a plain file."""
    with open(path, "rb") as file:
        if start > 0:
            file.seek(start - 1)
            _read_line(file, str(path))  # the rest of the line before; only its end, if a line begins at start
        _save_chunk(_pieces(file, stop - file.tell(), str(path)), chunk)


def _parse_gz(path: Path, parts: Path, source: int, chunk_bytes: int, count: Path) -> None:
    """Parses a gz file into as many chunks as it needs, then writes how many into the file `count`.

    Chunks that are finished are only decompressed.
    """
    number = 0
    with pipeline.reading_gz(path), gzip.open(path, "rb") as file:
        while file.peek(1):
            pieces = _pieces(file, chunk_bytes, str(path))
            chunk = _chunk_path(parts, source, number)
            if chunk.exists():
                for _ in pieces:
                    pass
            else:
                _save_chunk(pieces, chunk)
            number += 1
    write_json(count, {"chunks": number})


def _chunk_path(parts: Path, source: int, number: int) -> Path:
    return parts / f"{source:02d}-{number:06d}.npz"


# Counting and writing


def _count(feature: int, chunks: list[tuple[Path, int]], threshold: int, max_rows: int, path: Path) -> None:
    """Counts a feature's values in the first rows of each chunk and saves its vocabulary, sorted by value.

    Chunks are merged when they hold as many values as the vocabulary so far: memory is bounded by about four
    vocabularies, and the time is that of sorting all rows once, whatever the number of chunks.
    """
    values, counts = np.empty(0, np.uint32), np.empty(0, np.int64)
    pending, waiting = [], 0
    for number, (chunk, rows) in enumerate(chunks):
        arrays = map_npz(chunk)
        there = (arrays["missing"][:rows] >> np.uint32(feature)) & 1 == 0
        pending.append(np.unique(arrays["sparse"][feature, :rows][there], return_counts=True))
        waiting += len(pending[-1][0])
        if waiting >= max(len(values), 1 << 20) or number == len(chunks) - 1:
            values = np.concatenate([values, *(more for more, _ in pending)])
            counts = np.concatenate([counts, *(more for _, more in pending)])
            order = np.argsort(values, kind="stable")
            values, counts = values[order], counts[order]
            first = np.flatnonzero(np.diff(values, prepend=values[:1] ^ 1))
            values, counts = values[first], np.add.reduceat(counts, first) if len(first) else counts
            pending, waiting = [], 0

    seen, frequent = len(values), counts >= threshold
    values, counts = values[frequent], counts[frequent]
    ids = np.empty(len(values), np.int64)
    ids[np.lexsort((values, -counts))] = np.arange(FIRST, FIRST + len(values))
    rows = FIRST + len(values)
    if max_rows and rows > max_rows:
        ids = FIRST + (ids - FIRST) % (max_rows - FIRST)  # missing and rare keep rows of their own
        rows = max_rows
    save_arrays(path, values=values, ids=ids.astype(np.int32), rows=rows, seen=seen)


def _write(chunk: Path, offset: int, boundary: int, out: Path, hash_rows: int, mark: Path) -> None:
    """Turns a chunk's values into ids and writes its rows into the arrays; its first row is row `offset` of all."""
    arrays = map_npz(chunk)
    ids = np.empty((len(arrays["label"]), NUM_SPARSE), np.int32)
    for feature, values in enumerate(arrays["sparse"]):
        if hash_rows:
            column = 1 + values % np.uint32(hash_rows - 1)
        else:
            vocabulary = map_npz(_vocabulary_path(out, feature))
            column = np.full(len(values), RARE)
            if len(vocabulary["values"]):
                places = np.searchsorted(vocabulary["values"], values).clip(max=len(vocabulary["values"]) - 1)
                column = np.where(vocabulary["values"][places] == values, vocabulary["ids"][places], RARE)
        ids[:, feature] = np.where((arrays["missing"] >> np.uint32(feature)) & 1, MISSING, column)

    cut = int(np.clip(boundary - offset, 0, len(ids)))
    for split, rows, at in (("train", slice(0, cut), offset), ("eval", slice(cut, None), offset + cut - boundary)):
        for name, array in (("dense", arrays["dense"]), ("sparse", ids), ("labels", arrays["label"])):
            part = array[rows]
            if len(part):
                file = np.load(out / f"{split}_{name}.npy", mmap_mode="r+")
                file[at : at + len(part)] = part
                file.flush()
    mark.touch()


def _vocabulary_path(out: Path, feature: int) -> Path:
    return out / f"vocabulary_C{feature + 1}.npz"


# The command


@dataclasses.dataclass
class Texts:
    """Text files by what they are for."""

    train: list[Path]
    evaluation: list[Path]  # empty: the last seventh of the training rows
    left_out: list[str]

    def read_from(self) -> dict[str, str]:
        """Returns what the report says of where the rows are from."""
        train = splits.shown(path.name for path in self.train)
        if self.evaluation:
            return splits.read_from(train, self.evaluation[0].name, self.left_out)
        return splits.read_from(f"{train} but its last seventh", f"the last seventh of {train}", self.left_out)


def find_sources(data: str | Path) -> Texts:
    """Returns the text files with training rows and those with evaluation rows, by their names, see data/splits.py.

    Without evaluation files the last day, or the last seventh of the only training file, is for evaluation. Raises
    InputError.
    """
    data = Path(data).expanduser()
    if not data.exists():
        raise InputError(f"there is no file or folder {data}; expected a folder with train.txt or day_0 to day_23")
    folder = data.parent if data.is_file() else data
    texts: dict[str, Path] = {}  # by the name without .txt and .gz; plain rather than .gz
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix.lower() != ".gz"):
        ending = TEXT.search(path.name)
        if ending and path.is_file() and not path.name.startswith("."):
            texts[path.name[: ending.start()]] = path
    days = text_files(folder, DAYS)
    if data.is_file():
        train = [data]
        texts = {name: path for name, path in texts.items() if path != data}
    else:
        name = splits.named(texts, "train", str(data))
        train = [texts[name]] if name else []
        if train and days:
            raise InputError(f"{data} has {train[0].name} as well as {days[0].name}; move one to another folder")
        train = train or days
    if not train:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise InputError(f"{data} has neither train.txt nor day_0 to day_23 (plain or .gz); found {found}")
    name = splits.named(texts, "valid", str(folder))
    evaluation = [texts[name]] if name else []
    if not evaluation and len(train) > 1:
        train, evaluation = train[:-1], train[-1:]
    others = [path for path in (*texts.values(), *days) if path not in (*train, *evaluation)]
    # What is not read for its ending or its number (val.csv, val/, day_24) is named as well.
    known = {*train, *evaluation, *others}
    known |= {path.with_name(f"{path.name}.gz") for path in known}  # plain rather than .gz
    for path in sorted(folder.iterdir()):
        own = path.name.startswith(".") or is_leftover(path.name) or path in known
        says = splits.says_split(Path(path.name)) or path.name.startswith("day_")
        if says and not own and not splits.made_by_make(path):
            others.append(path)
    if data.is_file():
        others = []  # the user has named what is read
    return Texts(train, evaluation, [path.name for path in others])


def _check_head(path: Path, bad_rows: float) -> None:
    """Raises InputError for a file of another kind: empty, without labels, with other separators."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            lines = [line for line in (_read_line(file, str(path)) for _ in range(100)) if line]
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InputError(f"{path} is empty; expected lines of {COLUMNS} columns: label, 13 integers, 26 categories")
    reasons = [malformed(line.removesuffix(b"\n").removesuffix(b"\r")) for line in lines]
    bad = len(lines) - reasons.count(None)
    if bad > max(bad_rows, 0.5) * len(lines):
        first = next(number for number, why in enumerate(reasons) if why)
        raise InputError(
            f"{path} is not Criteo's text: {bad} of its first {len(lines)} lines are malformed, "
            f"the first is line {first + 1}: {reasons[first]}"
        )


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes Criteo's text files as the arrays that ClickLog reads; the arguments are those of Flags.

    Three passes: parse chunks of text, each to a file of its own; count the values of each category; write the arrays
    {train,eval}_{dense,sparse,labels}.npy, vocabulary_C1.npz … (values, ids), prepared.json, and last of all the empty
    file COMPLETE. Memory: about 0.3 GB per worker, and four times the vocabulary of one feature while counting. Disk:
    160 bytes per row, and the same again in the folder `parts` until the end.

    Returns: the contents of prepared.json: table_rows, rows, malformed, values_seen, flags, sources.
    Raises InputError: no such files, too many malformed lines, or `out` holds something prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    _check_flags(flags)
    found = find_sources(data)
    print(splits.sentence(found.read_from()), flush=True)
    train, evaluation = found.train, found.evaluation
    texts = train + evaluation
    sources = [
        {"name": path.name, "bytes": path.stat().st_size, "split": "train" if path in train else "eval"}
        for path in texts
    ]
    job = Preparation(flags, sources, ("bad_rows",), "prepared.json", "COMPLETE", version=1)
    if prepared := job.finished():
        _check_malformed(prepared["malformed"], flags.bad_rows)
        return prepared
    for path in texts:
        _check_head(path, flags.bad_rows)

    chunks = _parse_all(job, texts, job.begin("chunk_bytes", CHUNK_BYTES))
    malformed_rows = _malformed_rows(texts, chunks)
    _check_malformed(malformed_rows, flags.bad_rows)
    rows = [[len(map_npz(chunk)["label"]) for chunk in of_source] for of_source in chunks]
    for path, of_source in zip(texts, rows, strict=True):
        if not sum(of_source):
            raise InputError(f"{path} has no row that can be used; {malformed_rows['first']}")
    *offsets, total = itertools.accumulate(itertools.chain.from_iterable(rows), initial=0)
    boundary = sum(map(sum, rows[: len(train)])) if evaluation else total - total // 7
    if boundary == total:
        raise InputError(f"{train[0]} has {total} rows; expected at least 7, of which the last is for evaluation")

    chunks = list(zip(itertools.chain.from_iterable(chunks), offsets, strict=True))
    table_rows, seen = _count_all(job, flags, chunks, boundary)
    _write_all(job, flags, chunks, boundary, total)
    sizes = {"train": boundary, "eval": total - boundary}
    figures = {"table_rows": table_rows, "rows": sizes, "malformed": malformed_rows, "values_seen": seen}
    return job.finish(figures | {"read_from": found.read_from()})


def _check_flags(flags: Flags) -> None:
    expect(flags, "threshold", flags.threshold >= 1, "1 (keeps every value) or more")
    for name in ("max_rows", "hash_rows"):
        expect(flags, name, getattr(flags, name) == 0 or 3 <= getattr(flags, name) < 2**31, "0, or 3 to 2147483647")
    if flags.hash_rows and flags.threshold > 1:
        what = f"--threshold {flags.threshold} needs a vocabulary, and --hash-rows {flags.hash_rows} makes none"
        raise InputError(f"{what}; drop one of them")
    expect(flags, "bad_rows", 0 <= flags.bad_rows < 1, "a share from 0 to below 1, such as 0.0001")


def _parse_all(job: Preparation, sources: list[Path], chunk_bytes: int) -> list[list[Path]]:
    """Parses what is not parsed yet; returns the chunks of each source, in its order."""
    counts = {}
    for number, path in enumerate(sources):
        if path.suffix.lower() == ".gz":
            counts[number] = job.parts / f"{number:02d}.json"
    packed = [(sources[number], job.parts, number, chunk_bytes, count) for number, count in counts.items()]
    job.run(_parse_gz, packed, "parsing")
    plain, chunks = [], []
    for number, path in enumerate(sources):
        starts = range(0, path.stat().st_size, chunk_bytes)
        count = read_json(counts[number])["chunks"] if number in counts else len(starts)
        chunks.append([_chunk_path(job.parts, number, chunk) for chunk in range(count)])
        if number not in counts:
            plain += [(path, start, start + chunk_bytes, c) for start, c in zip(starts, chunks[-1], strict=True)]
    job.run(_parse_range, plain, "parsing")
    return chunks


def _count_all(job: Preparation, flags: Flags, chunks: list[tuple[Path, int]], boundary: int) -> tuple:
    """Counts the categories of the training rows, which come before `boundary`.

    Returns the rows of each table, and how many values each feature has, None with --hash-rows.
    """
    if flags.hash_rows:
        return [flags.hash_rows] * NUM_SPARSE, None
    train = [(chunk, boundary - offset) for chunk, offset in chunks if offset < boundary]
    paths = [_vocabulary_path(job.out, feature) for feature in range(NUM_SPARSE)]
    tasks = [(feature, train, flags.threshold, flags.max_rows, path) for feature, path in enumerate(paths)]
    job.run(_count, tasks, "counting categories")
    vocabularies = [map_npz(path) for path in paths]
    return tuple([int(vocabulary[key]) for vocabulary in vocabularies] for key in ("rows", "seen"))


def _write_all(job: Preparation, flags: Flags, chunks: list[tuple[Path, int]], boundary: int, total: int) -> None:
    created = job.parts / "created"
    if not created.exists():
        for split, rows in (("train", boundary), ("eval", total - boundary)):
            shapes = {"dense": (rows, NUM_DENSE), "sparse": (rows, NUM_SPARSE), "labels": (rows,)}
            for name, dtype in (("dense", np.float32), ("sparse", np.int32), ("labels", np.uint8)):
                np.lib.format.open_memmap(job.out / f"{split}_{name}.npy", "w+", dtype, shapes[name])
        created.touch()
    tasks = [
        (chunk, offset, boundary, job.out, flags.hash_rows, chunk.with_suffix(".written")) for chunk, offset in chunks
    ]
    job.run(_write, tasks, "writing arrays")


def _malformed_rows(sources: list[Path], chunks: list[list[Path]]) -> dict:
    """Returns the number of lines and of malformed lines, and the first of these with its file, line and reason."""
    lines, bad, first = 0, 0, ""
    for path, of_source in zip(sources, chunks, strict=True):
        before = lines
        for chunk in map(map_npz, of_source):
            if chunk["bad"] and not first:
                first = f"{path} line {lines - before + chunk['first_bad'] + 1}: {chunk['why']}"
            lines, bad = lines + int(chunk["lines"]), bad + int(chunk["bad"])
    return {"lines": lines, "count": bad, "first": first}


def _check_malformed(rows: dict, bad_rows: float) -> None:
    if rows["count"] > bad_rows * rows["lines"]:
        raise InputError(
            f"{rows['count']} of {rows['lines']} lines are malformed, more than the share {bad_rows} that may be left "
            f"out; fix them or raise --bad-rows. The first is {rows['first']}"
        )


def _summary(prepared: dict) -> None:
    rows, bad, tables = prepared["rows"], prepared["malformed"], prepared["table_rows"]
    if bad["count"]:
        print(f"{bad['count']} malformed lines of {bad['lines']} were left out, the first: {bad['first']}")
    print(f"{rows['train']} training and {rows['eval']} evaluation rows; {sum(tables)} table rows: {tables}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
