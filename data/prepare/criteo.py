"""Prepares Criteo's Kaggle and Terabyte click logs, once before training: text files to arrays.

    python -m data.prepare.criteo --data RAW [--out DIR] [--threshold 10]  (make data DATASET=criteo DATA=RAW OUT=DIR)

The arrays are memory-mapped in training, by ClickLog in data/criteo.py.

A line of the text is a label, 13 integers and 26 categories of 32 bits in hexadecimal, separated by tabs; a field may
be empty, which means missing. The integers become log(x + 1), missing and negative ones 0, as in
https://github.com/facebookresearch/dlrm. The categories become rows of embedding tables: 0 where the value is missing,
1 where it is rare (or never seen in training), and from 2 on by falling count in the training rows (of equal counts the
smaller value first).
"""

import codecs
import dataclasses
import gzip
import os
import re
import shutil
import sys
import zlib
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data.criteo import MLPERF_MAX_ROWS, NUM_DENSE, _text_files, map_npz
from data.prepare.pipeline import read_json, run, whole, write_json
from errors import InputError

NUM_SPARSE = 26
COLUMNS = 1 + NUM_DENSE + NUM_SPARSE
MISSING, RARE, FIRST = 0, 1, 2  # ids; the vocabulary begins with FIRST

EVAL_FILES = ("dev.txt", "valid.txt", "eval.txt")
CHUNK_BYTES = 64 << 20  # text of one parsed file: what a kill costs at most, and what a worker holds
PIECE_BYTES = 4 << 20  # text parsed at once; larger pieces leave the processor's caches and are 3 times slower
MAX_LINE = 1 << 20  # bytes of a line that say that the file is no table

INTEGER = "^-?[0-9]{1,18}$"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prepares Criteo's text files for training: parses them, counts their categories, writes arrays.

    The same command again goes on where a killed one stopped. The result depends neither on that nor on --workers.
    """

    data: str  # folder with train.txt or day_0, day_1, … (each plain or .gz), or one such file
    out: str = ""  # folder of the arrays; default: a folder `prepared` beside the text
    threshold: int = 1  # values seen fewer times than this in training rows share the id 1; 1 keeps all of them
    max_rows: int = MLPERF_MAX_ROWS  # larger tables are cut to this many rows, the rarest values folded in; 0: never
    hash_rows: int = 0  # no vocabulary: all tables have this many rows, an id is the remainder of its value; 0: off
    bad_rows: float = 0.0001  # share of malformed lines that is left out in good faith; more is an error
    workers: int = os.cpu_count() or 1  # processes


# Parsing


def malformed(line: bytes) -> str | None:
    """Why a line (without its end) is not a row of Criteo, or None. The definition that the fast parser keeps to."""
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
    """Parsed lines: n good rows, and what is known of the others."""

    dense: np.ndarray  # float32 [n, 13], log(x + 1)
    label: np.ndarray  # uint8 [n]
    sparse: np.ndarray  # uint32 [26, n]: a feature's values lie together, for counting
    missing: np.ndarray  # uint32 [n], bit t: feature t is missing
    lines: int = 0  # good and bad
    bad: int = 0
    first_bad: int = -1  # line, from 0, or -1
    why: str = ""


def parse(text: bytes) -> Rows:
    """Whole lines of text to Rows, all columns at once; a line is left out exactly if `malformed` says so."""
    text = text.replace(b"\r\n", b"\n")
    if text and not text.endswith(b"\n"):
        text += b"\n"
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    tabs = np.flatnonzero(data == ord("\t"))
    good = np.diff(np.searchsorted(tabs, ends), prepend=0) == COLUMNS - 1
    if text.startswith(codecs.BOM_UTF8):  # which pyarrow would pass over
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
    """The 40 columns of bytes that have 39 tabs in every line, as strings; empty fields are null."""
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
    """The strings that are there as uint32 [m], and bool [m]: not 1 to 8 hexadecimal digits (the value is then 0)."""
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
    """Whole lines of about PIECE_BYTES, until `size` bytes or more are read: the line that is begun belongs to it."""
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
    """Parses the pieces into one .npz file, which is there whole or not at all."""
    parts, lines, bad, first_bad, why = [], 0, 0, -1, ""
    for piece in pieces:
        rows = parse(piece)
        if rows.bad and first_bad < 0:
            first_bad, why = lines + rows.first_bad, rows.why
        lines, bad = lines + rows.lines, bad + rows.bad
        parts.append(rows)
    parts = parts or [parse(b"")]  # one line may cover the whole range of a chunk
    with whole(path) as file:
        np.savez(
            file,
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
            _read_line(file, str(path))  # the rest of the line before; just its end, if a line begins at start
        _save_chunk(_pieces(file, stop - file.tell(), str(path)), chunk)


def _parse_gz(path: Path, parts: Path, source: int, chunk_bytes: int, count: Path) -> None:
    """Parses a gz file into as many chunks as it needs, and says how many in the file `count`, last of all.

    Chunks that are finished are only decompressed.
    """
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            while file.peek(1):
                pieces = _pieces(file, chunk_bytes, str(path))
                chunk = _chunk_path(parts, source, number)
                if chunk.exists():
                    for _ in pieces:
                        pass
                else:
                    _save_chunk(pieces, chunk)
                number += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be decompressed: {error}; fetch it again") from error
    write_json(count, {"chunks": number})


def _chunk_path(parts: Path, source: int, number: int) -> Path:
    return parts / f"{source:02d}-{number:06d}.npz"


# Counting and writing


def _count(feature: int, chunks: list[tuple[Path, int]], threshold: int, max_rows: int, path: Path) -> None:
    """Counts a feature's values in the first rows of each chunk and saves its vocabulary, sorted by value.

    Chunks are merged whenever as much has come as is there: memory is bounded by about four vocabularies, and the time
    is that of sorting all rows once, whatever the number of chunks.
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
    with whole(path) as file:
        np.savez(file, values=values, ids=ids.astype(np.int32), rows=rows, seen=seen)


def _write(chunk: Path, offset: int, boundary: int, out: Path, hash_rows: int, mark: Path) -> None:
    """Turns a chunk's values into ids and writes its rows, which begin with row `offset` of all, into the arrays."""
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


def find_sources(data: str | Path) -> tuple[list[Path], list[Path]]:
    """The text files with training rows and those with evaluation rows.

    No evaluation files: the evaluation rows are the last seventh of the only training file. Raises InputError.
    """
    data = Path(data).expanduser()
    if data.is_file():
        folder, train = data.parent, [data]
    elif data.is_dir():
        folder = data
        train = _text_files(folder, ("train.txt",))[:1]
        days = _text_files(folder, [f"day_{day}" for day in range(24)])
        if train and days:
            raise InputError(f"{data} has {train[0].name} as well as {days[0].name}; keep them in folders of their own")
        train = train or days
    else:
        raise InputError(f"there is no file or folder {data}; expected a folder with train.txt or day_0 to day_23")
    if not train:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise InputError(f"{data} has neither train.txt nor day_0 to day_23 (plain or .gz); found {found}")
    evaluation = [path for path in _text_files(folder, EVAL_FILES) if path not in train][:1]
    if not evaluation and len(train) > 1:
        train, evaluation = train[:-1], train[-1:]
    return train, evaluation


def _check_head(path: Path, bad_rows: float) -> None:
    """Stops at once on a file of another kind: empty, without labels, with other separators."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
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


def prepare(
    data: str | Path,
    out: str | Path = "",
    threshold: int = 1,
    max_rows: int = MLPERF_MAX_ROWS,
    hash_rows: int = 0,
    bad_rows: float = 0.0001,
    workers: int = 1,
) -> dict:
    """Criteo's text files to the arrays that ClickLog reads; the arguments are those of Flags.

    Three passes: parse chunks of text, each to a file of its own; count the values of each category; write the arrays
    {train,eval}_{dense,sparse,labels}.npy, vocabulary_C1.npz … (values, ids), prepared.json, and last of all the empty
    file COMPLETE. Each pass goes on where it was killed. Memory: about 0.3 GB a worker, and in counting four times the
    vocabulary of one feature. Disk: 160 bytes a row, and the same again in the folder `parts` until it is done. Files
    are known by their names and sizes: after a change that keeps the size, delete `out`.

    Returns: the contents of prepared.json: table_rows, rows, malformed, values_seen, flags, sources.
    Raises InputError: no such files, too many malformed lines, or `out` holds something prepared differently.
    """
    _check_flags(threshold, max_rows, hash_rows, bad_rows, workers)
    train, evaluation = find_sources(data)
    texts = train + evaluation
    out = Path(out).expanduser() if out else train[0].parent / "prepared"
    flags = {"threshold": threshold, "max_rows": max_rows, "hash_rows": hash_rows}
    sources = [{"name": path.name, "bytes": path.stat().st_size, "split": "train"} for path in train]
    sources += [{"name": path.name, "bytes": path.stat().st_size, "split": "eval"} for path in evaluation]
    plan = {"format": 1, "flags": flags, "sources": sources}

    parts = out / "parts"
    if (out / "COMPLETE").exists():
        prepared = read_json(out / "prepared.json")
        _check_plan(plan, prepared, out)
        _check_malformed(prepared["malformed"], bad_rows)
        shutil.rmtree(parts, ignore_errors=True)
        rows = prepared["rows"]
        print(f"{out} is already prepared: {rows['train']} training and {rows['eval']} evaluation rows", flush=True)
        return prepared
    for path in texts:
        _check_head(path, bad_rows)
    try:
        parts.mkdir(parents=True, exist_ok=True)
        if (parts / "plan.json").exists():
            _check_plan(plan, read_json(parts / "plan.json"), out)
            print(f"going on with the unfinished preparation in {out}", flush=True)
        else:
            write_json(parts / "plan.json", plan | {"chunk_bytes": CHUNK_BYTES})
    except OSError as error:
        raise InputError(
            f"{error.filename} cannot be written: {error.strerror}; choose another folder with --out"
        ) from error

    # Chunks are cut where the first call cut them.
    chunk_bytes = read_json(parts / "plan.json")["chunk_bytes"]
    chunks = _parse_all(texts, parts, chunk_bytes, workers)
    infos = [[_chunk_info(chunk) for chunk in of_source] for of_source in chunks]
    malformed_rows = _malformed_rows(texts, infos)
    _check_malformed(malformed_rows, bad_rows)

    rows = [sum(info["rows"] for info in of_source) for of_source in infos]
    for path, number in zip(texts, rows, strict=True):
        if not number:
            raise InputError(f"{path} has no row that can be used; {malformed_rows['first']}")
    total, boundary = sum(rows), sum(rows[: len(train)])
    if not evaluation:
        boundary = total - total // 7
    if boundary == total:
        raise InputError(f"{train[0]} has {total} rows; expected at least 7, of which the last is for evaluation")
    chunks = [chunk for of_source in chunks for chunk in of_source]
    sizes = [info["rows"] for of_source in infos for info in of_source]
    offsets = [0, *np.cumsum(sizes).tolist()][:-1]

    if hash_rows:
        table_rows, seen = [hash_rows] * NUM_SPARSE, None
    else:
        of_training = [(chunk, boundary - at) for chunk, at in zip(chunks, offsets, strict=True) if at < boundary]
        tasks = [(t, of_training, threshold, max_rows, _vocabulary_path(out, t)) for t in range(NUM_SPARSE)]
        run(_count, tasks, workers, "counting categories")
        vocabularies = [map_npz(_vocabulary_path(out, feature)) for feature in range(NUM_SPARSE)]
        table_rows, seen = ([int(v[key]) for v in vocabularies] for key in ("rows", "seen"))

    if not (parts / "created").exists():
        for split, number in (("train", boundary), ("eval", total - boundary)):
            for name, dtype, shape in (
                ("dense", np.float32, (number, NUM_DENSE)),
                ("sparse", np.int32, (number, NUM_SPARSE)),
                ("labels", np.uint8, (number,)),
            ):
                np.lib.format.open_memmap(out / f"{split}_{name}.npy", "w+", dtype, shape)
        (parts / "created").touch()
    marks = [chunk.with_suffix(".written") for chunk in chunks]
    tasks = [(c, at, boundary, out, hash_rows, mark) for c, at, mark in zip(chunks, offsets, marks, strict=True)]
    run(_write, tasks, workers, "writing arrays")

    prepared = plan | {
        "table_rows": table_rows,
        "rows": {"train": boundary, "eval": total - boundary},
        "malformed": malformed_rows,
        "values_seen": seen,
    }
    for partial in out.glob("*.partial"):  # of a call that was killed
        partial.unlink()
    write_json(out / "prepared.json", prepared)
    (out / "COMPLETE").touch()
    shutil.rmtree(parts)
    return prepared


def _check_flags(threshold: int, max_rows: int, hash_rows: int, bad_rows: float, workers: int) -> None:
    if threshold < 1:
        raise InputError(f"threshold {threshold} is out of range; expected 1 (keep every value) or more")
    for name, value in (("max_rows", max_rows), ("hash_rows", hash_rows)):
        if value and not 3 <= value < 2**31:
            raise InputError(f"{name} {value} is out of range; expected 0, or 3 to 2147483647")
    if hash_rows and threshold > 1:
        raise InputError(f"threshold {threshold} needs a vocabulary, and hash_rows {hash_rows} makes none; drop one")
    if not 0 <= bad_rows < 1:
        raise InputError(f"bad_rows {bad_rows} is out of range; expected a share, such as 0.0001")
    if workers < 1:
        raise InputError(f"workers {workers} is out of range; expected 1 or more")


def _check_plan(plan: dict, found: dict, out: Path) -> None:
    for what, now, before in (
        *((f"flag {key}", plan["flags"][key], found["flags"][key]) for key in plan["flags"]),
        ("source files", plan["sources"], found["sources"]),
    ):
        if now != before:
            if what == "source files":
                now, before = (", ".join(f"{s['name']} ({s['bytes']} bytes)" for s in files) for files in (now, before))
            raise InputError(
                f"{out} was prepared with other {what}: {before}, now {now}; choose another folder or delete this one"
            )


def _parse_all(sources: list[Path], parts: Path, chunk_bytes: int, workers: int) -> list[list[Path]]:
    """Parses what is not parsed yet; the chunks of each source, in its order."""
    counts = {number: parts / f"{number:02d}.json" for number, path in enumerate(sources) if path.suffix == ".gz"}
    zipped = [(sources[number], parts, number, chunk_bytes, count) for number, count in counts.items()]
    run(_parse_gz, zipped, workers, "parsing")
    plain, chunks = [], []
    for number, path in enumerate(sources):
        if number in counts:
            chunks.append([_chunk_path(parts, number, chunk) for chunk in range(read_json(counts[number])["chunks"])])
        else:
            starts = range(0, path.stat().st_size, chunk_bytes)
            chunks.append([_chunk_path(parts, number, chunk) for chunk in range(len(starts))])
            plain += [(path, start, start + chunk_bytes, c) for start, c in zip(starts, chunks[-1], strict=True)]
    run(_parse_range, plain, workers, "parsing")
    return chunks


def _chunk_info(chunk: Path) -> dict:
    arrays = map_npz(chunk)
    info = {key: arrays[key].item() for key in ("lines", "bad", "first_bad", "why")}
    return info | {"rows": len(arrays["label"])}


def _malformed_rows(sources: list[Path], infos: list[list[dict]]) -> dict:
    """How many lines there are, how many of them are malformed, and the first of these with file and line."""
    lines = bad = 0
    first = ""
    for path, of_source in zip(sources, infos, strict=True):
        line = 0
        for info in of_source:
            if info["bad"] and not first:
                first = f"{path} line {line + info['first_bad'] + 1}: {info['why']}"
            line += info["lines"]
            bad += info["bad"]
        lines += line
    return {"lines": lines, "count": bad, "first": first}


def _check_malformed(rows: dict, bad_rows: float) -> None:
    if rows["count"] > bad_rows * rows["lines"]:
        raise InputError(
            f"{rows['count']} of {rows['lines']} lines are malformed, more than the share of {bad_rows} that is left "
            f"out in good faith; mend them or raise --bad-rows. The first is {rows['first']}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: prepares, and says what came of it; an InputError becomes one line and exit code 2."""
    import tyro

    flags = tyro.cli(Flags, args=arguments)
    try:
        prepared = prepare(**dataclasses.asdict(flags))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    rows, bad, tables = prepared["rows"], prepared["malformed"], prepared["table_rows"]
    if bad["count"]:
        print(f"{bad['count']} malformed lines of {bad['lines']} were left out, the first: {bad['first']}")
    print(f"{rows['train']} training and {rows['eval']} evaluation rows; {sum(tables)} table rows: {tables}")


if __name__ == "__main__":
    main()
