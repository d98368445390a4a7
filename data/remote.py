"""Brings data from a bucket to the local disk: any URL of fsspec, such as gs://, s3://, hf://, http://.

    folder = local_copy("gs://bucket/glue", "*.tsv")    # ~/.cache/xla-zoo-data/<hash of the URL>/<hash>/glue

<hash of the URL>/files has each file under a hash of its path, size and etag, whole or not there. Beside it is a folder
of hard links for each state of the bucket that was copied, so that what a run reads never changes under it; the file
`url` names the URL.
"""

import collections
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import posixpath
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from errors import InputError

AHEAD, BLOCK = 32, 8 << 20  # requests under way, and bytes of each: they hide each other's latency, in 256 MB of memory
PAUSES = (0.5, 1, 2, 4, 8)  # seconds before a request is tried again; gs:// and others do so by themselves: once more
TAGS = ("etag", "ETag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "Last-Modified", "created")
QUIET = AbstractFileSystem.find, AsyncFileSystem._find  # they leave out what they cannot list
FINISHED = ("!*parts/*", "*parts/unfinished")  # patterns: of a preparation not its parts, but that it did not end


def open_store(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URL and the path in it. Raises InputError."""
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # it prints the traceback of what it raises
    try:
        return fsspec.core.url_to_fs(url.rstrip("/"))
    except Exception as error:  # every store has exceptions of its own
        what = "needs a package that is not installed" if isinstance(error, ImportError) else "cannot be opened"
        raise InputError(f"{url} {what}: {error}; expected a URL such as gs://bucket/folder") from error


def retried(url: str, stop: threading.Event, call: Callable, *arguments, **options):
    """Calls a function of a store, again where the network fails, until `stop`; raises the last error as InputError."""
    for pause in (*(PAUSES if url.startswith("http") else PAUSES[:1]), None):
        try:
            return call(*arguments, **options)
        except InputError:
            raise
        except Exception as error:
            # fsspec's HTTP turns every error into FileNotFoundError.
            cause = error.__cause__ if error.__cause__ and isinstance(error, FileNotFoundError) else error
            status = str(getattr(cause, "status", None) or getattr(cause, "code", ""))
            what = f"{url}: {' '.join(str(cause).split()) or repr(cause)}"
            if isinstance(cause, FileNotFoundError) or status == "404":
                raise InputError(f"there is no {url}; is the name right, and may you read it?") from error
            if isinstance(cause, PermissionError) or status in ("401", "403") or "Forbidden" in what:
                raise InputError(f"{what}; gcloud auth application-default login, or ask for access") from error
            if pause is None or (status[:1] == "4" and status not in ("408", "429")):
                raise InputError(f"{what}; give the same command again, it resumes") from error
            if stop.wait(pause):
                raise


def find_files(url: str, *patterns: str) -> dict[str, tuple[str, int, str]]:
    """Returns {path below the URL: (name in the store, bytes, etag or time)}; of a file {its own name: …}.

    Args:
        patterns: of fnmatch, for paths in small letters; the last that fits decides, one with "!" in front leaves out.
    """
    (fs, root), stop = open_store(url), threading.Event()
    http = root.startswith("http")
    fs.invalidate_cache()
    options = {"on_error": "raise"} if getattr(type(fs), "_find", type(fs).find) in QUIET else {}
    found = retried(url, stop, fs.find, root, detail=True, **options) or {root: {}}
    for name in [*found]:
        if name != root and (name[-1] == "/" or (http and "?" in name)):
            del found[name]  # the placeholder of a folder; a link that sorts a web server's listing
    bare = [name for name, one in found.items() if one.get("size") is None]  # as HTTP lists them
    with ThreadPoolExecutor(AHEAD) as pool:
        known = pool.map(lambda name: retried(fs.unstrip_protocol(name), stop, fs.info, name), bare)
        found |= zip(bare, known, strict=True)
    files = {}
    for name, about in sorted(found.items()):
        if about["type"] != "file" or (name == root and about.get("mimetype") == "text/html"):  # of an empty folder
            continue
        path = name[len(root) :].strip("/") or _last(root)
        path = unquote(path) if http else path
        if about["size"] is None or posixpath.normpath(f"/{path}") != f"/{path}":
            raise InputError(f"{name} has no size, or a name that is no path; expected files below {url}")
        fits = [pattern for pattern in patterns or "*" if fnmatchcase(path.lower(), pattern.lstrip("!"))]
        if fits and fits[-1][0] != "!":
            files[path] = name, about["size"], next((str(about[tag]) for tag in TAGS if about.get(tag)), "")
    if not files:
        expected = [pattern for pattern in patterns if pattern[0] != "!" and pattern not in FINISHED]
        listed = [name[len(root) :].strip("/") or _last(root) for name, one in found.items() if one["type"] == "file"]
        what = f"expected {', '.join(expected) or 'any'}, found {', '.join(listed[:10]) or 'nothing'}"
        hint = "; text is prepared first, see make data" if expected and "*" not in expected else ""
        raise InputError(f"{url} has no file that is needed; {what}{hint}")
    return files


def cache_folder(url: str) -> Path:
    """Returns the local folder for what belongs to a URL; it may not be there yet."""
    base = os.environ.get("DATA_CACHE_DIR") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/xla-zoo-data"
    return Path(base).expanduser() / _hash(url.rstrip("/"))


@functools.cache  # a run reads one state of the bucket
def local_copy(url: str, *patterns: str) -> str:
    """Returns a local path to the folder or file at a URL, and a path without "://" as it is.

    Copies what is new or has changed, see `find_files`: in one process of this host, while others wait; resumes a
    killed copy. Raises InputError: nothing is there, no access, the network keeps failing, the disk is too small.
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
                print(f"another process copies {url}; waiting for it", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write(f"{url}\n")
            files = find_files(url, *patterns)
            blobs = {path: cache / "files" / _hash(path, *about) for path, about in files.items()}
            if missing := {blob: files[path] for path, blob in blobs.items() if not blob.exists()}:
                _copy(url, missing)
                if find_files(url, *patterns) != files:
                    raise InputError(f"{url} changed while it was copied; give the same command again")
            top = cache / _hash(*sorted(map(str, blobs.values()))) / _last(root)
            for path, blob in blobs.items():
                place = top if files[path][0] == root else top / path
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    os.link(blob, place)
            return str(top)
    except OSError as error:
        what = f"{cache} cannot be written: {error.strerror or error}"
        raise InputError(f"{what}; make room or access, or set DATA_CACHE_DIR to a folder of another disk") from error


def _copy(url: str, missing: dict[Path, tuple[str, int, str]]) -> None:
    """Copies files to these places: many ranges at once, which are written in order, so that a file's part is its
    beginning, and a killed copy resumes there."""
    fs, stop = open_store(url)[0], threading.Event()
    parts = {blob: blob.with_suffix(".part") for blob in missing}
    have = {blob: part.stat().st_size if part.exists() else 0 for blob, part in parts.items()}
    need, cache = sum(size - have[blob] for blob, (_, size, _) in missing.items()), next(iter(parts)).parent.parent
    if need > (free := shutil.disk_usage(cache).free):
        what = f"{url} needs {need:,} bytes on the disk of {cache}, and {free:,} are free"
        raise InputError(f"{what}; make room, or set DATA_CACHE_DIR to a folder of another disk")
    print(f"copying {url} to {cache}: {len(missing)} files, {need:,} bytes", file=sys.stderr, flush=True)

    def fetch(name: str, size: int, start: int, stop_at: int) -> bytes:
        if start == stop_at:
            return b""
        data = fs.cat_file(name) if stop_at - start == size else fs.cat_file(name, start, stop_at)
        if len(data) == size > stop_at - start:
            what = f"{fs.unstrip_protocol(name)} comes whole where a part was asked for"
            raise InputError(f"{what}; use a server that answers range requests, or copy the data by hand")
        if len(data) != stop_at - start:
            raise OSError(f"{len(data)} bytes came, expected {stop_at - start}")
        return data

    ranges = (
        (blob, name, size, start, min(start + BLOCK, size))
        for blob, (name, size, _) in missing.items()
        for start in range(have[blob], max(size, have[blob] + 1), BLOCK)
    )
    waiting = collections.deque()
    with ThreadPoolExecutor(AHEAD) as pool, tqdm(total=need, unit="B", unit_scale=True, disable=None) as bar:
        try:
            while True:
                for blob, name, *span in itertools.islice(ranges, AHEAD - len(waiting)):
                    waiting.append(
                        (blob, *span, pool.submit(retried, fs.unstrip_protocol(name), stop, fetch, name, *span))
                    )
                if not waiting:
                    return
                blob, size, _, end, future = waiting.popleft()
                with open(parts[blob], "ab") as file:
                    bar.update(file.write(future.result()))
                    if end == size:
                        file.flush()
                        os.fsync(file.fileno())
                        os.replace(parts[blob], blob)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _last(path: str) -> str:
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:20]
