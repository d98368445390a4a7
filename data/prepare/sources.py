"""What a preparation reads, as its plan and its report note it, and what has changed since.

A file is noted by its name relative to --data, its size in bytes, and one mark of its content:

    sha256    where all files together have at most CHECKSUM_BYTES: a copy is the same file
    tag       of a larger file at a URL: what its store says of its state, an etag or a time
    mtime_ns  of another larger file: when it was last changed; a copy needs cp -p, or it is another

A split of a data set of `datasets`, and a folder of many images, are noted by their rows and one
mark of all files: sha256; `stamps`, a hash of the sizes and times of large ones; or, on the hub,
the `fingerprint` that `datasets` gives.

Plans of older versions have names without folders, and sizes, and no marks.
"""

import dataclasses
import datetime
import functools
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath

from data import splits
from data.remote import stored_tag
from errors import InputError

CHECKSUM_BYTES = 256 << 20  # half a second to two seconds
MARKS = ("sha256", "tag", "mtime_ns", "stamps", "fingerprint")
SHOWN = 5  # sources, or changes, in a message


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file that a preparation reads."""

    path: Path
    name: str  # relative to the folder of the data
    split: str = ""  # where the preparation says one


def files_in(folder: Path, paths: Iterable[Path], split: str = "") -> list[SourceFile]:
    """Returns files by their names relative to the folder that they are in."""
    return [SourceFile(path, str(path.relative_to(folder)), split) for path in paths]


def folder_of(data: str | Path) -> Path:
    """Returns the folder that names are relative to: `data`, or that of the file `data`."""
    path = Path(data).expanduser()
    return path if path.is_dir() else path.parent


# Noting


def note_files(files: Sequence[SourceFile]) -> list[dict]:
    """Returns what a plan notes of files. Raises InputError for one that cannot be read."""
    noted = []
    total_bytes = 0
    for file in files:
        stat = _stat(file.path)
        source = {"name": file.name, "bytes": stat.st_size}
        if file.split:
            source["split"] = file.split
        total_bytes += stat.st_size
        noted.append(source)

    for file, source in zip(files, noted, strict=True):
        if total_bytes <= CHECKSUM_BYTES:
            source["sha256"] = _checksum(file.path)
        else:
            source |= _stamp(file.path)
    return noted


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _checksum(path: str | Path) -> str:
    """Returns the SHA-256 of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> dict:
    """Returns the mark of a large file: what its store says of it, else its time of change."""
    tag = stored_tag(path)
    if tag:
        return {"tag": tag}
    return {"mtime_ns": _stat(path).st_mtime_ns}


def note_many(count: int, path_of: Callable[[int], str | Path]) -> dict:
    """Returns one mark of many files in their order, which their names alone must not tell.

    A file that cannot be read is left to the one who reads it, whose message says more.

    Args:
        path_of: returns the path of the file with a number from 0 to count - 1.
    """
    total_bytes = 0
    stamps = hashlib.sha256()
    for number in range(count):
        path = path_of(number)
        try:
            stat = os.stat(path)
        except OSError:
            stamps.update(b"none\n")
            continue
        stamp = stored_tag(path) or stat.st_mtime_ns
        total_bytes += stat.st_size
        stamps.update(f"{stat.st_size} {stamp}\n".encode())

    if total_bytes > CHECKSUM_BYTES:
        return {"bytes": total_bytes, "stamps": stamps.hexdigest()}
    content = hashlib.sha256()
    for number in range(count):
        path = path_of(number)
        content.update(_checksum(path).encode() if os.path.exists(path) else b"none")
    return {"bytes": total_bytes, "sha256": content.hexdigest()}


def note_rows(data: str, rows, suffix: str = "") -> dict:
    """Returns what a plan notes of a split of a data set of `datasets`: with the mark of all files
    of a local folder, or the fingerprint of one on the hub.

    Args:
        rows: the datasets.Dataset.
        suffix: of its name in the plan.
    """
    folder = Path(data).expanduser()
    if not folder.is_dir():
        return {
            "name": f"{data}{suffix}",
            "rows": len(rows),
            "fingerprint": rows._fingerprint,
        }
    paths = splits.below(folder, "*.parquet", "*.arrow")
    noted = {"name": f"{folder.absolute().name}{suffix}", "rows": len(rows)}
    return noted | note_many(len(paths), paths.__getitem__)


# Comparing


def changes(before: list[dict], now: list[dict]) -> list[str]:
    """Returns what differs between the sources of two plans, a text each; [] where nothing does."""
    if not _has_marks(before):
        if _without_marks(before) == _without_marks(now):
            return []
        return [f"{described(before)} then, {described(now)} now"]

    then = {_key(source): source for source in before}
    by_key = {_key(source): source for source in now}
    found = []
    for key, source in then.items():
        if key not in by_key:
            found.append(f"{_source_and_size(source)} is no longer read")
    for key, source in by_key.items():
        if key not in then:
            found.append(f"{_source_and_size(source)} is new")
        else:
            change = _change(then[key], source)
            if change:
                found.append(change)
    if not found and list(then) != list(by_key):
        found.append(f"the order was {described(before)}, now {described(now)}")
    return found


def all_compared(before: list[dict], now: list[dict]) -> bool:
    """Returns whether the contents of all sources could be compared, and not only their sizes."""
    for source, other in zip(before, now, strict=True):
        if not any(mark in source and mark in other for mark in MARKS):
            return False
    return True


def shown(texts: Sequence[str]) -> str:
    """Returns the first changes, and how many more there are."""
    listed = "; ".join(texts[:SHOWN])
    if len(texts) > SHOWN:
        listed += f"; and {len(texts) - SHOWN} more"
    return listed


def described(sources: list[dict]) -> str:
    """Returns the names and sizes of the first sources, and how many more there are."""
    names = [_source_and_size(source) for source in sources[:SHOWN]]
    listed = ", ".join(names)
    if len(sources) > SHOWN:
        listed += f" and {len(sources) - SHOWN} more"
    return listed


def _source_and_size(source: dict) -> str:
    size = f"{source['rows']} rows" if "rows" in source else f"{source['bytes']} bytes"
    of_split = f" of {source['split']}" if "split" in source else ""
    return f"{source['name']} ({size}{of_split})"


def _has_marks(sources: list[dict]) -> bool:
    return any(mark in source for source in sources for mark in MARKS)


def _without_marks(sources: list[dict]) -> list[tuple]:
    """Returns what plans of older versions have: names without folders, and sizes."""
    known = []
    for source in sources:
        size = source.get("rows", source.get("bytes"))
        known.append((PurePath(source["name"]).name, size, source.get("split")))
    return known


def _key(source: dict) -> tuple[str, str]:
    return source["name"], source.get("split", "")


def _change(before: dict, now: dict) -> str:
    """Returns how a source of one name differs, "" where it does not."""
    name = now["name"]
    for what in ("bytes", "rows"):
        if before.get(what) != now.get(what):
            return f"{name} had {before.get(what)} {what}, now {now.get(what)}"
    for mark in MARKS:
        if mark in before and mark in now:
            if before[mark] == now[mark]:
                return ""
            return _CHANGED[mark](name, before[mark], now[mark])
    return ""


def _changed_time(name: str, before: int, now: int) -> str:
    again = f"touch -d @{before // 10**9}.{before % 10**9:09d} {shlex.quote(name)}"
    return (
        f"{name} was last changed at {_time(now)}, and what was prepared at {_time(before)} "
        f"(if it is only a copy of that, give it its time again: {again})"
    )


def _time(nanoseconds: int) -> str:
    """Returns a time as people write it, in the zone of this machine."""
    seconds = nanoseconds / 10**9
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "microseconds")


def _changed(what: str, name: str, before: object, now: object) -> str:
    return f"{name} has {what}"


_CHANGED: dict[str, Callable] = {
    "sha256": functools.partial(_changed, "other content of the same size"),
    "tag": functools.partial(_changed, "another etag or time in its store"),
    "mtime_ns": _changed_time,
    "stamps": functools.partial(
        _changed, "files with other sizes or times of change (of mere copies cp -a keeps the times)"
    ),
    "fingerprint": functools.partial(_changed, "another fingerprint of datasets: other files"),
}
