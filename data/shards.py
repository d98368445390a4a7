"""Labelled images in shards: large parquet files and an index, in a folder or in a bucket.

A bucket is any URL of fsspec, such as gs://….

    data/prepare/images.py  writes them: `make data DATASET=images`
    shards.json             the index, the only file that opening reads: names, rows, bytes and
                            SHA-256 of the shards

`datasets` reads the folder, too.

An epoch reads each shard once and in one go, see `Shards.order`. Shards in a bucket are downloaded
whole, ahead of the batches that need them, by threads of the main process into a folder that the
processes of a host share. There they stay, as far as the disk has room: a second epoch, or run,
finds them.
"""

import bisect
import collections
import contextlib
import dataclasses
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
LANES = 16  # shards that a batch draws from; so many hosts of a pod can share the downloads
AHEAD = 8  # shards that are fetched before a batch needs them, at the same time
LEFT_FREE = 4 << 30  # bytes of the disk that the cache does not take
REMEDY = "make room, or set DATA_CACHE_DIR to a folder of another disk"
OPEN = 2 * LANES  # files that a process holds open


@dataclasses.dataclass(frozen=True)
class OpenShard:
    """A shard's file, and where its row groups end."""

    file: pq.ParquetFile
    ends: list[int]  # the number of the row after each group's last


@dataclasses.dataclass(frozen=True)
class WaitingBatch:
    """A batch whose shards are being fetched."""

    key: tuple  # an epoch, and the indices of the batch's rows, -1 at padded places
    new_shards: int  # of which this batch is the first to need them

    @property
    def rows(self) -> int:
        """Rows of the batch, padded ones included."""
        return len(self.key[1])


class Shards(Images):
    """One split of a folder of shards, at a path or a URL."""

    def __init__(self, data: str, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        data = data.removeprefix("file://")
        self.folder = data.rstrip("/")
        self._cache = Cache(data) if "://" in data else None

        if self._cache:
            content = self._cache.read_index()
        else:
            content = (Path(data).expanduser() / INDEX).read_bytes()
        index = read_index(content, f"{self.folder}/{INDEX}")
        self.classes = index["classes"]
        set_source(self, index, evaluation=split == "eval")

        self._shards = index["splits"][SPLITS[split]]
        self._rows = np.array([shard["rows"] for shard in self._shards])
        self._ends = np.cumsum(self._rows)
        # By number; those that were not read for longest come first.
        self._open: collections.OrderedDict[int, OpenShard] = collections.OrderedDict()

        if self._cache:
            sizes = sorted((shard["bytes"] for shard in self._shards), reverse=True)
            most_at_once = sum(sizes[: LANES + AHEAD])  # a batch's shards, and those fetched ahead
            self._cache.need(most_at_once)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises InputError for a shard that is missing or has another size than in the index."""
        if self._cache:
            sizes = self._cache.sizes()
            if sizes is None:
                return
        else:
            sizes = {}
            for path in Path(self.folder).expanduser().glob("*.parquet"):
                if path.exists():
                    sizes[path.name] = path.stat().st_size

        remedy = "copy it again, or prepare the folder again"
        for shard in self._shards:
            path = f"{self.folder}/{shard['name']}"
            if shard["name"] not in sizes:
                raise InputError(f"{path} is missing; {remedy}")
            size = sizes[shard["name"]]
            if size is not None and size != shard["bytes"]:
                raise InputError(
                    f"{path} has {size} bytes; {INDEX} says {shard['bytes']}; {remedy}"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": collections.OrderedDict()}  # files stay with their process

    def order(self, seed: int, epoch: int, batch_size: int) -> np.ndarray:
        """Returns the indices of the epoch's full batches, one after the other.

        The shards are permuted, then the rows of each. The sequence is cut into LANES equal lanes,
        and every batch has an equal share of each lane, its first images from the first. So a batch
        mixes images from all over the data, few shards are open at a time, and a host of a pod,
        which loads a slice of each batch, reads shards of its own.
        """
        rng = np.random.default_rng((seed, epoch))
        starts = self._ends - self._rows
        sequence = []
        for shard in rng.permutation(len(self._rows)):
            sequence.append(starts[shard] + rng.permutation(self._rows[shard]))
        sequence = np.concatenate(sequence)

        steps = len(sequence) // batch_size
        lanes = math.gcd(batch_size, LANES)
        full_batches = sequence[: steps * batch_size]
        by_lane = full_batches.reshape(lanes, steps, batch_size // lanes)
        return by_lane.swapaxes(0, 1).reshape(-1)

    def ahead(self, keys: Iterable[tuple]) -> Iterator[tuple]:
        """Yields keys of batches, (epoch, indices), as they are.

        Meanwhile the shards of the next batches are fetched.
        """
        if self._cache is None:
            yield from keys
            return

        keys = iter(keys)
        # All rows of the shards of one batch: what is fetched further ahead would only wait.
        most_rows = LANES * self._rows.max()
        waiting: collections.deque[WaitingBatch] = collections.deque()
        shards_ahead = 0
        rows_ahead = 0
        previous = set()  # the shards of the batch before
        with fetching(self._fetch) as fetch:
            while True:
                while shards_ahead < AHEAD and rows_ahead < most_rows:
                    key = next(keys, None)
                    if key is None:
                        break
                    shards = self._shards_of(key[1])
                    new = sorted(shards - previous)
                    previous = shards
                    for number in new:
                        fetch(number)
                    batch = WaitingBatch(key, len(new))
                    waiting.append(batch)
                    shards_ahead += batch.new_shards
                    rows_ahead += batch.rows
                if not waiting:
                    return
                batch = waiting.popleft()
                shards_ahead -= batch.new_shards
                rows_ahead -= batch.rows
                yield batch.key

    def _shards_of(self, indices: np.ndarray) -> set[int]:
        """Returns the numbers of the shards that have these rows; -1 is no row."""
        numbers = np.searchsorted(self._ends, indices[indices >= 0], "right")
        return set(np.unique(numbers).tolist())

    def _fetch(self, number: int, ended: threading.Event) -> None:
        self._cache.fetch(self._shards[number], ended)

    def _read(self, index: int) -> tuple[bytes, int, str]:
        number = int(np.searchsorted(self._ends, index, "right"))
        row = int(index - (self._ends[number] - self._rows[number]))
        found = self._read_row(number, row)
        image = found["image"]
        label = found["label"]
        name = f"{self.folder}/{self._shards[number]['name']}"
        if label not in range(len(self.classes)):
            raise InputError(
                f"{name} has the label {label} in row {row}; "
                f"{INDEX} has {len(self.classes)} classes"
            )
        return image["bytes"] or b"", label, f"row {row} of {name} ({image['path']})"

    def _read_row(self, number: int, row: int) -> dict:
        """Returns a row of a shard; raises InputError where the file is broken.

        A broken copy of a shard in a bucket was whole when it came: this disk has spoilt it, and it
        is fetched once more.
        """
        try:
            return self._row(number, row)
        except _Broken as error:
            self._open.pop(number, None)
            if self._cache is None:
                raise InputError(
                    f"{error}; copy the shard again, or prepare the folder again"
                ) from error
            self._cache.remove(self._shards[number])
            try:
                return self._row(number, row)
            except _Broken as again:
                raise InputError(f"{again}; prepare the images again") from again

    def _row(self, number: int, row: int) -> dict:
        """Returns a row of a shard; raises _Broken where the file is not what the index says."""
        shard = self._shards[number]
        name = f"{self.folder}/{shard['name']}"
        try:
            opened = self._opened(number)
            ends = opened.ends
            if ends[-1:] != [shard["rows"]]:
                rows = ends[-1] if ends else 0
                raise _Broken(f"{name} has {rows} rows; {INDEX} says {shard['rows']}")
            group = bisect.bisect_right(ends, row)
            columns = ["image", "label"]
            table = opened.file.read_row_group(group, columns=columns, use_threads=False)
            start = ends[group - 1] if group else 0
            return table.slice(row - start, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise _Broken(f"{name} is broken: {reason}") from error

    def _opened(self, number: int) -> OpenShard:
        """Returns a shard that is open; the one that was not read for longest may be closed."""
        if number not in self._open:
            file = self._open_file(self._shards[number])
            groups = range(file.num_row_groups)
            rows = [file.metadata.row_group(group).num_rows for group in groups]
            self._open[number] = OpenShard(file, list(itertools.accumulate(rows)))
            if len(self._open) > OPEN:
                _, oldest = self._open.popitem(last=False)
                oldest.file.close()
        self._open.move_to_end(number)
        return self._open[number]

    def _open_file(self, shard: dict) -> pq.ParquetFile:
        """Opens a shard's file, after a download where it is in a bucket."""
        # No memory map: a file that shrinks, or a file system that fails, would kill the process
        # without a word.
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
        fits = _fits(index)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{name} is no index of shards: {error!r}; write it with make data DATASET=images"
        ) from error
    if not fits:
        raise InputError(
            f"{name} is no index of shards of this version; write it with make data DATASET=images"
        )
    return index


def _fits(index: dict) -> bool:
    """Returns whether an index is of this version, and whole.

    Raises KeyError or TypeError where it is no index at all.
    """
    shards_of_splits = [index["splits"][split] for split in SPLITS.values()]
    fits = all(shards_of_splits) and index["format"] == 1
    classes = index["classes"]
    fits &= bool(classes) and all(isinstance(name, str) for name in classes)
    for shard in itertools.chain(*shards_of_splits):
        is_named = re.fullmatch(r"\w[\w.-]*", shard["name"]) is not None
        fits &= is_named and len(shard["sha256"]) == 64
        for key in ("rows", "bytes"):
            fits &= isinstance(shard[key], int) and shard[key] > 0
    return fits


@contextlib.contextmanager
def fetching(
    fetch: Callable[[int, threading.Event], object],
) -> Iterator[Callable[[int], None]]:
    """Gives a function of a shard's number that has one of AHEAD threads call fetch(number, ended).

    What fails is left to the process that needs the shard. `ended` is set at the end of the block.
    """
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    ended = threading.Event()

    def work() -> None:
        while True:
            number = waiting.get()
            if number is None or ended.is_set():
                return
            with contextlib.suppress(Exception):
                fetch(number, ended)

    for _ in range(AHEAD):
        # A daemon: no exit waits for a download.
        threading.Thread(target=work, name="shards", daemon=True).start()
    try:
        yield waiting.put
    finally:
        ended.set()
        for _ in range(AHEAD):
            waiting.put(None)


class Cache:
    """Copies of the shards at a URL, in a folder of this host that its processes and runs share.

    The folder bears the name of the index' checksum: other shards under the same names have another
    folder. What was not used for longest is removed where the disk has less than LEFT_FREE bytes
    left.

    Attributes:
        root: the folder of all data sets.
        folder: that of this one, once the index is read.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.root = cache_folder(url).parent / "shards"
        self.folder = self.root

    def read_index(self) -> bytes:
        """Returns the content of the index, which chooses the folder. Raises InputError."""
        fs, path = open_store(self.url)
        url = f"{self.url}/{INDEX}"
        try:
            content = retried(url, threading.Event(), fs.cat_file, f"{path}/{INDEX}")
        except InputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise InputError(
                f"{error}; from a bucket images come as shards: make data DATASET=images"
            ) from error

        self.folder = self.root / hashlib.sha256(content).hexdigest()[:16]
        with self._writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return content

    def sizes(self) -> dict[str, int | None] | None:
        """Returns the bytes of the files at the URL by name, None where the store does not say.

        Returns None in place of all where the store does not list them (http, no right to): then
        `fetch` is the first to miss one.
        """
        if self.url.startswith("http"):
            return None
        fs, path = open_store(self.url)
        fs.invalidate_cache()
        try:
            files = retried(self.url, threading.Event(), fs.ls, path, detail=True)
        except InputError:
            return None
        sizes = {}
        for file in files:
            _, _, name = file["name"].rpartition("/")
            sizes[name] = file.get("size")
        return sizes

    def need(self, size: int) -> None:
        """Raises InputError where the disk has no room for `size` bytes of shards.

        The shards that are in the cache count as room.
        """
        available = shutil.disk_usage(self.folder).free
        for _, path in self._oldest():
            available += path.stat().st_size
        needed = size + LEFT_FREE
        if available < needed:
            raise InputError(
                f"{self.root}, the copy of {self.url}, "
                f"is on a disk with {available / 1e9:.1f} GB for it; "
                f"expected {needed / 1e9:.1f}, of which {LEFT_FREE / 1e9:.1f} stay free; {REMEDY}"
            )

    def fetch(self, shard: dict, ended: threading.Event | None = None) -> Path:
        """Returns the local file of a shard, after a download where it is not there.

        Args:
            ended: stops the attempts to get it.

        Raises InputError.
        """
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
        """Downloads a shard, whole or not at all. Raises InputError."""
        partial = Path(f"{path}.partial")
        url = f"{self.url}/{shard['name']}"
        try:
            retried(url, ended, self._attempt, shard, partial)
            os.replace(partial, path)
        except InputError as error:
            if not isinstance(error.__cause__, _Broken):
                raise
            raise InputError(f"{error.__cause__}; copy the shard to the bucket again") from error
        finally:
            partial.unlink(missing_ok=True)

    def _attempt(self, shard: dict, partial: Path) -> None:
        """Downloads a shard once; raises _Broken for one that is not what the index says."""
        fs, root = open_store(self.url)
        try:
            fs.get_file(f"{root}/{shard['name']}", str(partial))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # No attempt makes room.
            raise InputError(f"{partial} cannot be written: {error.strerror}; {REMEDY}") from error

        url = f"{self.url}/{shard['name']}"
        size = partial.stat().st_size
        if size != shard["bytes"]:
            raise _Broken(f"{url} has {size} bytes; {INDEX} says {shard['bytes']}")
        with open(partial, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        if found != shard["sha256"]:
            raise _Broken(
                f"{url} has the SHA-256 {found[:8]}…; {INDEX} says {shard['sha256'][:8]}…"
            )

    def _make_room(self, size: int) -> None:
        """Removes the copies that were not used for longest, until `size` bytes fit."""
        lacking = size + LEFT_FREE - shutil.disk_usage(self.folder).free
        if lacking <= 0:
            return
        for _, path in self._oldest():
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
        """Turns the errors of the local disk into an InputError that names `path`."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror or error}; {REMEDY}"
            ) from error
