"""Labelled images in shards: large parquet files and an index, in a folder or in a bucket (gs://…, any fsspec URL).

    data/prepare/images.py  writes them: `make data DATASET=images`. `datasets` reads the folder, too.
    shards.json             the index, the only file that opening reads: names, rows, bytes and SHA-256 of the shards

An epoch reads each shard once and in one go, see `Shards.order`. Shards in a bucket are downloaded whole, ahead of the
batches that need them, by threads of the main process into a folder that the processes of a host share. There they
stay, as far as the disk has room: a second epoch, or run, finds them.
"""

import bisect
import collections
import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.imagenet import Images, Split
from data.remote import cache_folder, open_store, retried
from data.splits import set_source
from errors import InputError

INDEX = "shards.json"
SPLITS = {"train": "train", "eval": "val"}
LANES = 16  # shards that a batch draws from; so many hosts of a pod share the downloads out among themselves
AHEAD = 8  # shards that are fetched before a batch needs them, at the same time
LEFT_FREE = 4 << 30  # bytes of the disk that the cache does not take
REMEDY = "make room, or set DATA_CACHE_DIR to a folder of another disk"
OPEN = 2 * LANES  # files that a process holds open


class Shards(Images):
    """One split of a folder of shards, at a path or a URL."""

    def __init__(self, data: str, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        data = data.removeprefix("file://")
        self._cache = Cache(data) if "://" in data else None
        content = self._cache.read_index() if self._cache else (Path(data).expanduser() / INDEX).read_bytes()
        index = read_index(content, f"{data.rstrip('/')}/{INDEX}")
        self.folder, self.classes = data.rstrip("/"), index["classes"]
        set_source(self, index, evaluation=split == "eval")
        self._shards = index["splits"][SPLITS[split]]
        self._rows = np.array([shard["rows"] for shard in self._shards])
        self._ends = np.cumsum(self._rows)
        self._open: collections.OrderedDict[int, tuple[pq.ParquetFile, list[int]]] = collections.OrderedDict()
        if self._cache:
            largest = sorted((shard["bytes"] for shard in self._shards), reverse=True)
            self._cache.need(sum(largest[: LANES + AHEAD]))
            sizes = self._cache.sizes()
        else:
            paths = Path(data).expanduser().glob("*.parquet")
            sizes = {path.name: path.stat().st_size for path in paths if path.exists()}
        for shard in self._shards if sizes is not None else ():
            size = sizes.get(shard["name"], -1)
            if size not in (shard["bytes"], None):
                found = "is missing" if size == -1 else f"has {size} bytes; {INDEX} says {shard['bytes']}"
                raise InputError(f"{self.folder}/{shard['name']} {found}; copy it again, or prepare the folder again")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": collections.OrderedDict()}  # files stay with their process

    def order(self, seed: int, epoch: int, batch_size: int) -> np.ndarray:
        """Returns the indices of the epoch's full batches, one after the other.

        The shards are permuted, then the rows of each; the sequence is cut into LANES equal parts, and every batch has
        an equal share of each part, the first images from the first. So a batch mixes images from all over the data,
        few shards are open at a time, and a host of a pod, which loads a slice of each batch, reads its own shards.
        """
        rng = np.random.default_rng((seed, epoch))
        starts = self._ends - self._rows
        shards = rng.permutation(len(self._rows))
        sequence = np.concatenate([starts[shard] + rng.permutation(self._rows[shard]) for shard in shards])
        steps, lanes = len(sequence) // batch_size, math.gcd(batch_size, LANES)
        parts = sequence[: steps * batch_size].reshape(lanes, steps, batch_size // lanes)
        return parts.swapaxes(0, 1).reshape(-1)

    def ahead(self, keys: Iterable[tuple]) -> Iterator[tuple]:
        """Yields the keys of batches (an epoch, indices) as they are, while the shards of the next ones are fetched."""
        if self._cache is None:
            yield from keys
            return
        keys, last = iter(keys), set()
        waiting: collections.deque[tuple[tuple, int]] = collections.deque()  # and how many shards each is the first in
        shards_ahead = rows_ahead = 0
        with fetching(lambda number, ended: self._cache.fetch(self._shards[number], ended)) as fetch:
            while True:
                # All rows of the shards of one batch: further ahead, what is fetched would only wait on the disk.
                while shards_ahead < AHEAD and rows_ahead < LANES * self._rows.max() and (key := next(keys, None)):
                    shards = set(np.unique(np.searchsorted(self._ends, key[1][key[1] >= 0], "right")).tolist())
                    for number in sorted(shards - last):
                        fetch(number)
                    waiting.append((key, len(shards - last)))
                    shards_ahead, rows_ahead = shards_ahead + waiting[-1][1], rows_ahead + len(key[1])
                    last = shards
                if not waiting:
                    return
                key, new = waiting.popleft()
                shards_ahead, rows_ahead = shards_ahead - new, rows_ahead - len(key[1])
                yield key

    def _read(self, index: int) -> tuple[bytes, int, str]:
        number = int(np.searchsorted(self._ends, index, "right"))
        row = int(index - (self._ends[number] - self._rows[number]))
        try:
            found = self._row(number, row)
        except _Broken as error:
            self._open.pop(number, None)
            if self._cache is None:
                raise InputError(f"{error}; copy the shard again, or prepare the folder again") from error
            self._cache.remove(self._shards[number])  # whole when it came: this disk has spoilt it
            try:
                found = self._row(number, row)
            except _Broken as again:
                raise InputError(f"{again}; prepare the images again") from again
        image, label = found["image"], found["label"]
        name = f"{self.folder}/{self._shards[number]['name']}"
        if label not in range(len(self.classes)):
            raise InputError(f"{name} has the label {label} in row {row}; {INDEX} has {len(self.classes)} classes")
        return image["bytes"] or b"", label, f"row {row} of {name} ({image['path']})"

    def _row(self, number: int, row: int) -> dict:
        """Returns a row of a shard; raises _Broken where the file is not what the index says."""
        shard = self._shards[number]
        name = f"{self.folder}/{shard['name']}"
        try:
            if number not in self._open:
                file = self._opened(shard)
                groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                self._open[number] = file, list(itertools.accumulate(groups))
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)[1][0].close()
            self._open.move_to_end(number)
            file, ends = self._open[number]
            if ends[-1:] != [shard["rows"]]:
                raise _Broken(f"{name} has {ends[-1] if ends else 0} rows; {INDEX} says {shard['rows']}")
            group = bisect.bisect_right(ends, row)
            table = file.read_row_group(group, columns=["image", "label"], use_threads=False)
            return table.slice(row - (ends[group - 1] if group else 0), 1).to_pylist()[0]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise _Broken(f"{name} is broken: {str(error).partition(chr(10))[0]}") from error

    def _opened(self, shard: dict) -> pq.ParquetFile:
        # No memory map: a file that shrinks, or a file system that fails, would kill the process without a word.
        options = {"memory_map": False, "page_checksum_verification": True}
        if self._cache is None:
            return pq.ParquetFile(Path(self.folder).expanduser() / shard["name"], **options)
        while True:
            path = self._cache.fetch(shard)
            with contextlib.suppress(FileNotFoundError):  # removed by another process, for room
                return pq.ParquetFile(path, **options)


class _Broken(Exception):
    """A shard that is not what the index says."""


def read_index(content: bytes, name: str) -> dict:
    """Returns the index in `content`; raises InputError where it is none."""
    try:
        index = json.loads(content)
        shards = [shard for split in SPLITS.values() for shard in index["splits"][split]]
        fits = all(index["splits"][split] for split in SPLITS.values()) and index["format"] == 1
        fits &= bool(index["classes"]) and all(isinstance(label, str) for label in index["classes"])
        for shard in shards:
            fits &= re.fullmatch(r"\w[\w.-]*", shard["name"]) is not None and len(shard["sha256"]) == 64
            fits &= all(isinstance(shard[key], int) and shard[key] > 0 for key in ("rows", "bytes"))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{name} is no index of shards: {error!r}; write it with make data DATASET=images") from error
    if not fits:
        raise InputError(f"{name} is no index of shards of this version; write it with make data DATASET=images")
    return index


@contextlib.contextmanager
def fetching(fetch: Callable[[int, threading.Event], object]) -> Iterator[Callable[[int], None]]:
    """Gives a function that has fetch(number, ended) called by one of AHEAD threads. What fails is left to the process
    that needs it; `ended` is set at the end of the block."""
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    ended = threading.Event()

    def work() -> None:
        while (number := waiting.get()) is not None and not ended.is_set():
            with contextlib.suppress(Exception):
                fetch(number, ended)

    for _ in range(AHEAD):
        threading.Thread(target=work, name="shards", daemon=True).start()  # no exit waits for a download
    try:
        yield waiting.put
    finally:
        ended.set()
        for _ in range(AHEAD):
            waiting.put(None)


class Cache:
    """Copies of the shards at a URL, in a folder of this host that its processes and runs share.

    The folder bears the name of the index' checksum: other shards under the same names have another folder. What was
    not used for longest is removed where the disk has less than LEFT_FREE bytes left.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.root = self.folder = cache_folder(url).parent / "shards"

    def read_index(self) -> bytes:
        """Returns the content of the index, which chooses the folder. Raises InputError."""
        (fs, path), url = open_store(self.url), f"{self.url}/{INDEX}"
        try:
            content = retried(url, threading.Event(), fs.cat_file, f"{path}/{INDEX}")
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise InputError(f"{error}; from a bucket images come as shards: make data DATASET=images") from error
            raise
        self.folder = self.root / hashlib.sha256(content).hexdigest()[:16]
        with self._writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return content

    def sizes(self) -> dict[str, int | None] | None:
        """Returns {name: bytes, or None where the store does not say} of the files at the URL; None in place of all
        where it does not list them (http, no right to): `fetch` then is the first to miss one."""
        if self.url.startswith("http"):
            return None
        fs, path = open_store(self.url)
        fs.invalidate_cache()
        with contextlib.suppress(InputError):
            files = retried(self.url, threading.Event(), fs.ls, path, detail=True)
            return {file["name"].rpartition("/")[2]: file.get("size") for file in files}
        return None

    def need(self, size: int) -> None:
        """Raises InputError where the disk has no room for `size` bytes of shards, those that are there included."""
        free, cached = shutil.disk_usage(self.folder).free, sum(path.stat().st_size for _, path in self._oldest())
        if free + cached < size + LEFT_FREE:
            room, needed = (free + cached) / 1e9, (size + LEFT_FREE) / 1e9
            expected = f"expected {needed:.1f}, of which {LEFT_FREE / 1e9:.1f} stay free"
            what = f"{self.root}, the copy of {self.url}, is on a disk with {room:.1f} GB for it; {expected}"
            raise InputError(f"{what}; {REMEDY}")

    def fetch(self, shard: dict, ended: threading.Event | None = None) -> Path:
        """Returns the local file of a shard, after a download where it is not there; `ended` stops attempts to get it.
        Raises InputError."""
        path = self.folder / shard["name"]
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # used now
            if path.stat().st_size == shard["bytes"]:
                return path
        with self._writing(path), open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, also a killed one
            if not path.exists() or path.stat().st_size != shard["bytes"]:
                self._make_room(shard["bytes"])
                self._download(shard, path, ended or threading.Event())
        return path

    def remove(self, shard: dict) -> None:
        """Removes the copy of a shard."""
        (self.folder / shard["name"]).unlink(missing_ok=True)

    def _download(self, shard: dict, path: Path, ended: threading.Event) -> None:
        fs, root = open_store(self.url)
        url, partial = f"{self.url}/{shard['name']}", Path(f"{path}.partial")

        def attempt() -> None:
            try:
                fs.get_file(f"{root}/{shard['name']}", str(partial))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):  # no attempt makes room
                    raise InputError(f"{partial} cannot be written: {error.strerror}; {REMEDY}") from error
                raise
            size = partial.stat().st_size
            if size != shard["bytes"]:
                raise _Broken(f"{url} has {size} bytes; {INDEX} says {shard['bytes']}")
            with open(partial, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            if found != shard["sha256"]:
                raise _Broken(f"{url} has the SHA-256 {found[:8]}…; {INDEX} says {shard['sha256'][:8]}…")

        try:
            retried(url, ended, attempt)
            os.replace(partial, path)
        except InputError as error:
            if isinstance(error.__cause__, _Broken):
                raise InputError(f"{error.__cause__}; copy the shard to the bucket again") from error
            raise
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        lacking = size + LEFT_FREE - shutil.disk_usage(self.folder).free
        for _, path in self._oldest() if lacking > 0 else ():
            with contextlib.suppress(FileNotFoundError):
                lacking -= path.stat().st_size
                path.unlink()
            if lacking <= 0:
                return

    def _oldest(self) -> list[tuple[float, Path]]:
        """Returns the copies of all data sets with the time of their last use, the oldest first."""
        found = []
        for path in self.root.glob("*/*.parquet"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        return sorted(found)

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}; {REMEDY}") from error
