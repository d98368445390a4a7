"""Copies data from a bucket to the local disk: from any URL of fsspec, such as gs:// or http://.

    folder = local_copy("gs://bucket/glue", "*.tsv")
    # ~/.cache/xla-zoo-data/<hash of the URL>/<hash>/glue

<hash of the URL>/files has each file under a hash of its path, size and etag, whole or not there.
Beside it is a folder of hard links for each state of the bucket that was copied: so the files of a
run do not change while it reads them. Beside the links .tags.json has the etags or times of the
files. The file `url` names the URL.
"""

import collections
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import posixpath
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from errors import InputError

# Requests at a time, and bytes of each: they hide each other's latency, in 256 MB of memory.
AHEAD = 32
BLOCK = 8 << 20
# Seconds before each retry of a request to http. gs:// and others retry by themselves: their
# requests are retried once here.
PAUSES = (0.5, 1, 2, 4, 8)
# The names that stores have for the state of a file; the first one that is there counts.
TAGS = (
    "etag",
    "ETag",
    "generation",
    "md5Hash",
    "blob_id",
    "mtime",
    "LastModified",
    "Last-Modified",
    "created",
)
QUIET = (AbstractFileSystem.find, AsyncFileSystem._find)  # they leave out what they cannot list
# Patterns for a prepared folder: without the files of its passes, but with the one that says that
# its upload did not end.
FINISHED = ("!*parts/*", "*parts/unfinished")
STATE_TAGS = ".tags.json"  # of a state of a bucket, the tags of its files by their paths


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file in a store."""

    name: str  # in the store
    size: int  # bytes
    tag: str  # etag or time: changes with the content; "" where the store has none


def open_store(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URL and the path in it. Raises InputError."""
    # gcsfs prints the traceback of what it raises.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    try:
        return fsspec.core.url_to_fs(url.rstrip("/"))
    except Exception as error:  # every store has exceptions of its own
        what = "cannot be opened"
        if isinstance(error, ImportError):
            what = "needs a package that is not installed"
        raise InputError(
            f"{url} {what}: {error}; expected a URL such as gs://bucket/folder"
        ) from error


def retried(url: str, stop: threading.Event, call: Callable, *arguments, **options):
    """Returns what a function of a store returns; calls it again where the network fails.

    Args:
        url: for messages; "http" at its beginning means more retries.
        stop: ends the retries.

    Raises InputError: the last error, or one that no retry would cure.
    """
    pauses = PAUSES if url.startswith("http") else PAUSES[:1]
    for pause in (*pauses, None):
        try:
            return call(*arguments, **options)
        except InputError:
            raise
        except Exception as error:
            _raise_if_final(url, error, is_last=pause is None)
            if stop.wait(pause):
                raise


def _raise_if_final(url: str, error: Exception, is_last: bool) -> None:
    """Raises InputError for the last error of a store, and for one that no retry would cure."""
    # fsspec's HTTP raises FileNotFoundError from every error.
    cause = error
    if isinstance(error, FileNotFoundError) and error.__cause__:
        cause = error.__cause__
    status = str(getattr(cause, "status", None) or getattr(cause, "code", ""))
    reason = " ".join(str(cause).split()) or repr(cause)
    what = f"{url}: {reason}"

    if isinstance(cause, FileNotFoundError) or status == "404":
        raise InputError(f"there is no {url}; is the name right, and may you read it?") from error
    is_forbidden = status in ("401", "403") or "Forbidden" in what
    if isinstance(cause, PermissionError) or is_forbidden:
        raise InputError(
            f"{what}; gcloud auth application-default login, or ask for access"
        ) from error
    is_refused = status[:1] == "4" and status not in ("408", "429")  # timeout, too many requests
    if is_last or is_refused:
        raise InputError(f"{what}; give the same command again, it resumes") from error


# Listing


def find_files(url: str, *patterns: str) -> dict[str, Stored]:
    """Returns the files below a URL by their paths there; a file at the URL by its own name.

    Args:
        patterns: of fnmatch, for paths in small letters. The last that fits decides; one with "!"
            in front leaves out.

    Raises InputError if there is none.
    """
    fs, root = open_store(url)
    found = _list(url, fs, root)
    files = {}
    for name, about in sorted(found.items()):
        is_listing = name == root and about.get("mimetype") == "text/html"  # of an empty folder
        if about["type"] != "file" or is_listing:
            continue
        path = _path_below(root, name)
        if root.startswith("http"):
            path = unquote(path)
        if about["size"] is None or posixpath.normpath(f"/{path}") != f"/{path}":
            raise InputError(
                f"{name} has no size, or a name that is no path; expected files below {url}"
            )
        if _is_wanted(path, patterns or ("*",)):
            files[path] = Stored(name, about["size"], _tag(about))

    if not files:
        listed = []
        for name, about in found.items():
            if about["type"] == "file":
                listed.append(_path_below(root, name))
        _raise_nothing(url, patterns, listed)
    return files


def _list(url: str, fs: AbstractFileSystem, root: str) -> dict[str, dict]:
    """Returns what a store says of each file below `root`, by its name in the store."""
    stop = threading.Event()
    is_http = root.startswith("http")
    fs.invalidate_cache()
    options = {}
    if getattr(type(fs), "_find", type(fs).find) in QUIET:
        options["on_error"] = "raise"
    found = retried(url, stop, fs.find, root, detail=True, **options) or {root: {}}

    for name in list(found):
        is_folder = name[-1] == "/"  # the placeholder of a folder
        is_sorting = is_http and "?" in name  # a link that sorts a web server's listing
        if name != root and (is_folder or is_sorting):
            del found[name]

    # HTTP lists names without sizes.
    def ask(name: str) -> dict:
        return retried(fs.unstrip_protocol(name), stop, fs.info, name)

    without_size = [name for name, listed in found.items() if listed.get("size") is None]
    with ThreadPoolExecutor(AHEAD) as pool:
        for name, about in zip(without_size, pool.map(ask, without_size), strict=True):
            found[name] = about
    return found


def _path_below(root: str, name: str) -> str:
    """Returns the path of a file below `root`; that of `root` itself is its last part."""
    return name[len(root) :].strip("/") or _last(root)


def _is_wanted(path: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether the last pattern that fits a path has no "!" in front."""
    wanted = False
    for pattern in patterns:
        if fnmatchcase(path.lower(), pattern.lstrip("!")):
            wanted = pattern[0] != "!"
    return wanted


def _tag(about: dict) -> str:
    """Returns what a store says of a file's state, "" where it says nothing."""
    for tag in TAGS:
        if about.get(tag):
            return str(about[tag])
    return ""


def _raise_nothing(url: str, patterns: tuple[str, ...], listed: list[str]) -> None:
    """Raises InputError for a URL without a file that is needed; `listed` are the files it has."""
    expected = []
    for pattern in patterns:
        if pattern[0] != "!" and pattern not in FINISHED:
            expected.append(pattern)
    hint = ""
    if expected and "*" not in expected:
        hint = "; text is prepared first, see make data"
    raise InputError(
        f"{url} has no file that is needed; expected {', '.join(expected) or 'any'}, "
        f"found {', '.join(listed[:10]) or 'nothing'}{hint}"
    )


# Copying


def cache_folder(url: str) -> Path:
    """Returns the local folder for the files of a URL; it may not exist yet."""
    base = os.environ.get("DATA_CACHE_DIR")
    if not base:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        base = f"{caches}/xla-zoo-data"
    return Path(base).expanduser() / _hash(url.rstrip("/"))


@functools.cache  # a run reads one state of the bucket
def local_copy(url: str, *patterns: str) -> str:
    """Returns a local path to the folder or file at a URL, and a path without "://" as it is.

    Copies what is new or has changed: in one process of this host, while others wait. Resumes a
    copy that was killed.

    Args:
        patterns: the files that are needed, see `find_files`.

    Raises InputError: nothing is there, no access, the network keeps failing, the disk is full.
    """
    if "://" not in url:
        return url
    fs, root = open_store(url)
    if isinstance(fs, LocalFileSystem):
        return root
    cache = cache_folder(url)
    try:
        (cache / "files").mkdir(parents=True, exist_ok=True)
        with open(cache / "url", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"another process copies {url}; waiting for it",
                    file=sys.stderr,
                    flush=True,
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write(f"{url}\n")
            return _update(url, root, cache, patterns)
    except OSError as error:
        raise InputError(
            f"{cache} cannot be written: {error.strerror or error}; "
            "make room or access, or set DATA_CACHE_DIR to a folder of another disk"
        ) from error


def _update(url: str, root: str, cache: Path, patterns: tuple[str, ...]) -> str:
    """Copies what is new or has changed into a cache; returns the path of the folder or file.

    Args:
        root: the path of the URL in its store.
    """
    files = find_files(url, *patterns)
    blobs = {}  # path below the URL -> file in the cache
    missing = {}  # file that is not in the cache -> what is stored
    for path, stored in files.items():
        blob = cache / "files" / _hash(path, stored.name, stored.size, stored.tag)
        blobs[path] = blob
        if not blob.exists():
            missing[blob] = stored
    if missing:
        _copy(url, missing)
        if find_files(url, *patterns) != files:
            raise InputError(f"{url} changed while it was copied; give the same command again")

    # A folder of hard links for this state of the bucket.
    state = _hash(*sorted(map(str, blobs.values())))
    top = cache / state / _last(root)
    for path, blob in blobs.items():
        is_at_url = files[path].name == root
        link = top if is_at_url else top / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.link(blob, link)
    _write_tags(cache / state / STATE_TAGS, files)
    return str(top)


def _write_tags(path: Path, files: dict[str, Stored]) -> None:
    """Writes the tags of a state's files, whole or not at all; they never change."""
    if path.exists():
        return
    tags = {name: stored.tag for name, stored in files.items()}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(tags))
    os.replace(partial, path)


def stored_tag(path: str | Path) -> str:
    """Returns what its store says of the state of a file that `local_copy` has copied, an etag or a
    time; "" for any other file, and where the store says nothing."""
    caches = cache_folder("").parent
    inside = str(path).removeprefix(f"{caches}/")
    if inside == str(path):
        return ""
    url, _, rest = inside.partition("/")
    state, _, rest = rest.partition("/")
    top, _, below = rest.partition("/")
    tags = caches / url / state / STATE_TAGS
    return _read_tags(tags).get(below or top, "") if tags.is_file() else ""


@functools.lru_cache(maxsize=4)
def _read_tags(path: Path) -> dict[str, str]:
    return json.loads(path.read_text())


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of a file that is copied by one request."""

    blob: Path  # the file in the cache
    stored: Stored
    start: int  # bytes
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the file ends with this range."""
        return self.stop == self.stored.size


def _copy(url: str, missing: dict[Path, Stored]) -> None:
    """Copies files into the cache, many ranges at once.

    The ranges are written in order: so a file's .part is its beginning, and a killed copy resumes.

    Args:
        missing: path in the cache -> the file in the store.
    """
    fs, _ = open_store(url)
    copied = {}  # bytes that a killed copy has left
    needed = 0
    for blob, stored in missing.items():
        part = _part(blob)
        copied[blob] = part.stat().st_size if part.exists() else 0
        needed += stored.size - copied[blob]
    cache = next(iter(missing)).parent.parent
    _check_room(url, cache, needed)
    print(
        f"copying {url} to {cache}: {len(missing)} files, {needed:,} bytes",
        file=sys.stderr,
        flush=True,
    )

    ranges = _ranges(missing, copied)
    with tqdm(total=needed, unit="B", unit_scale=True, disable=None) as bar:
        for written in _copy_ranges(fs, ranges):
            bar.update(written)


def _check_room(url: str, cache: Path, needed: int) -> None:
    """Raises InputError if the disk of the cache has no room for so many bytes."""
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise InputError(
            f"{url} needs {needed:,} bytes on the disk of {cache}, and {free:,} are free; "
            "make room, or set DATA_CACHE_DIR to a folder of another disk"
        )


def _copy_ranges(fs: AbstractFileSystem, ranges: Iterator[Range]) -> Iterator[int]:
    """Fetches AHEAD ranges at a time and writes them in order; yields the bytes of each."""
    waiting: collections.deque[tuple[Range, Future]] = collections.deque()
    stop = threading.Event()
    with ThreadPoolExecutor(AHEAD) as pool:
        try:
            while True:
                while len(waiting) < AHEAD:
                    wanted = next(ranges, None)
                    if wanted is None:
                        break
                    name = fs.unstrip_protocol(wanted.stored.name)
                    future = pool.submit(retried, name, stop, _fetch, fs, wanted)
                    waiting.append((wanted, future))
                if not waiting:
                    return
                fetched, future = waiting.popleft()
                yield _append(fetched, future.result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _part(blob: Path) -> Path:
    """Returns the file that has the beginning of a blob until it is whole."""
    return blob.with_suffix(".part")


def _ranges(missing: dict[Path, Stored], copied: dict[Path, int]) -> Iterator[Range]:
    """Yields what is still to be copied of each file.

    A file of which nothing is missing has one empty range: with it, it gets its name.
    """
    for blob, stored in missing.items():
        end = max(stored.size, copied[blob] + 1)
        for start in range(copied[blob], end, BLOCK):
            yield Range(blob, stored, start, min(start + BLOCK, stored.size))


def _fetch(fs: AbstractFileSystem, wanted: Range) -> bytes:
    """Returns the bytes of a range; raises OSError where there are fewer or more."""
    size = wanted.stop - wanted.start
    if not size:
        return b""
    name = wanted.stored.name
    if size == wanted.stored.size:
        data = fs.cat_file(name)
    else:
        data = fs.cat_file(name, wanted.start, wanted.stop)
    if len(data) == wanted.stored.size > size:
        raise InputError(
            f"{fs.unstrip_protocol(name)} comes whole where a part was asked for; "
            "use a server that answers range requests, or copy the data by hand"
        )
    if len(data) != size:
        raise OSError(f"{len(data)} bytes came, expected {size}")
    return data


def _append(fetched: Range, data: bytes) -> int:
    """Appends a range to its file, and gives the file its name once it is whole; returns bytes."""
    part = _part(fetched.blob)
    with open(part, "ab") as file:
        written = file.write(data)
        if fetched.is_last:
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, fetched.blob)
    return written


def _last(path: str) -> str:
    """Returns the last part of a path or a URL, without what follows a "?"."""
    path = path.partition("?")[0].rstrip("/")
    return path.rpartition("/")[2]


def _hash(*parts: object) -> str:
    """Returns a short hash of the texts of these objects."""
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
