"""The folder of a run, local or at a URL: its name, its lock, config.json, and files.

Each file is whole or not there.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec

from errors import InputError
from train.common.files import write_synced

PACKAGES = (
    "torch",
    "torch_xla",
    "torchvision",
    "libtpu",
    "numpy",
    "timm",
    "datasets",
    "transformers",
    "safetensors",
)

# What fields mean that a run of an older version has not stored, where Config's default is another.
OLDER = {"best": "", "patience": 0}

_LOCKS: dict[str, contextlib.ExitStack] = {}  # this process's last lock of each folder


class RunFolder:
    """The folder of a run below `runs`, a root folder or fsspec URL, and the files in it.

    The arguments are those of `Run`; `default_name` is its `name`. Raises InputError where the
    folder cannot be used.

    Attributes:
        root: the root folder or URL.
        name: of the folder below it.
        path: the folder or URL.
        fs: the file system of `path`, of fsspec.
        remote: whether that is a URL.
        local: where `write` writes. For a URL it is a temporary folder, which `upload` copies.
        config: the fields of this start's configuration, as config.json brings them back.
        stored: the content of config.json as it was found, or None.
        sources: what is trained and evaluated on, as config.json has it.
        summary: the content of summary.json as it was found, or None.
        reason: why a number was added to the name, or "".
        uploaded: whether the URL has all files.
        last_step: the last step that is in metrics.jsonl.
    """

    def __init__(
        self,
        config: Any,
        default_name: str,
        may_differ: Iterable[str] = (),
        required: Iterable[str] = (),
        sources: dict[str, str] | None = None,
        older_sources: dict[str, str] | None = None,
    ):
        if not config.runs:
            raise InputError("--runs is empty; give the folder or URL of all runs, such as runs")

        root = os.path.expanduser(config.runs.removeprefix("file://"))
        self.root = root.rstrip("/") or "/"
        self.remote = "://" in self.root
        self.local = None
        self.uploaded = False
        self.last_step = 0
        self._lock = contextlib.ExitStack()
        try:
            self.fs = fsspec.core.url_to_fs(self.root)[0]
        except (ImportError, ValueError) as error:
            raise InputError(f"cannot use --runs {config.runs}: {error}") from error
        self.fs.invalidate_cache()

        self.config = _as_stored(config)
        self.sources = sources or {}
        self._older_sources = older_sources or {}
        defaults = {}
        for field, value in _as_stored(type(config)()).items():
            if field not in required:
                defaults[field] = OLDER.get(field, value)
        self._choose(config.name, default_name, defaults, {"runs", "name", *may_differ})

    def _choose(
        self, given: str, default_name: str, defaults: dict[str, Any], may_differ: set[str]
    ) -> None:
        """Finds the run's name and reads what its folder has.

        A given name is taken, and must be of a run with the same values. Otherwise it is the first
        of name, name-2, name-3, … (with the default name) whose folder is new, or has an unfinished
        run with the same values.

        Args:
            defaults: values of the fields that an older run may not have stored.
            may_differ: fields whose values may differ from those of the stored run.
        """
        if "/" in given or given in (".", ".."):
            raise InputError(
                f"--name {given} is not the name of one folder; use --runs for the root folder"
            )

        self.reason = ""
        for number in itertools.count(1):
            numbered = default_name if number == 1 else f"{default_name}-{number}"
            self.name = given or numbered
            self.path = os.path.join(self.root, self.name)
            self.stored = self._read_json("config.json", "config")
            self.summary = None
            changed = {}
            if self.stored is not None:
                self.summary = self._read_json("summary.json", "metrics")
                changed = self._changed(defaults, may_differ)

            if given and changed:
                self._refuse(changed)
            if given or not (changed or self.summary):
                return
            why = f"was trained with another {', '.join(changed)}" if changed else "is finished"
            self.reason = f" ({self.name} {why})"

    def _changed(self, defaults: dict[str, Any], may_differ: set[str]) -> dict[str, str]:
        """Returns the fields whose value is not the stored run's, and maybe "split of the data",
        each with what has changed."""
        old = defaults | self.stored["config"]
        new = self.config
        changed = {}
        for field in new | old:
            before = old.get(field, "absent")
            after = new.get(field, "absent")
            if field not in may_differ and before != after:
                changed[field] = f"{field} was {_shown(before)}, now {_shown(after)}"

        was = self.stored.get("sources")
        if was is None and self.summary is None:
            was = self._older_sources
        if was and self.sources and was != self.sources:
            changed["split of the data"] = (
                f"trained on {was['train']}, evaluated on {was['evaluation']}; "
                f"now on {self.sources['train']}, and on {self.sources['evaluation']}"
            )
        return changed

    def _refuse(self, changed: dict[str, str]) -> None:
        """Raises InputError: a run of this name was started with other values."""
        values = ", ".join(changed.values())
        # What `_changed` says of a field that the stored run lacks.
        is_older = "was absent" in values
        older = "; it is of an older version" if is_older else ""
        raise InputError(
            f"{self.path} was started with other values ({values}){older}; "
            "use another --name or the old values"
        )

    def open(self, devices: dict[str, Any]) -> None:
        """Creates and locks the folder, and adds this start to its config.json."""
        self.local = self.path
        with self.writing(""):  # an OSError becomes an InputError that names `local`
            if self.remote:
                self.local = tempfile.mkdtemp(prefix=f"{self.name}-")
            else:
                os.makedirs(self.local, exist_ok=True)
                self._take_lock()

        content = {"config": self.config, "sources": self.sources, "starts": []}
        content.update(self.stored or {})
        content["starts"] = [*content["starts"], start_record(devices)]
        self.write("config.json", to_json(content, indent=2))
        self.upload()

    def _take_lock(self) -> None:
        """Locks the folder for this process; InputError where another one has it."""
        # A start that failed may hold the lock: a notebook's last traceback keeps its objects
        # alive.
        earlier_lock = _LOCKS.get(self.local)
        if earlier_lock is not None:
            earlier_lock.close()
        _LOCKS[self.local] = self._lock

        path = os.path.join(self.local, ".lock")
        lock = self._lock.enter_context(open(path, "a+"))  # noqa: SIM115 - kept open
        try:
            # The kernel drops it with the process, even after kill -9.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise InputError(
                f"{self.path} is being trained by process {lock.read()}; use another --name"
            ) from error
        lock.truncate(0)
        print(os.getpid(), end="", file=lock, flush=True)

    def fingerprint(self) -> int:
        """Returns a number for what this host sees: config.json, and whether the run is finished.

        It is -1 where config.json cannot be read: a host that failed here alone would leave the
        others waiting.
        """
        try:
            content = self.read("config.json") or b""
        except InputError:
            return -1
        is_finished = self.summary is not None
        return 2 * zlib.crc32(content) + is_finished

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file of the run, None where there is none."""
        try:
            return self.fs.cat_file(f"{self.path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot read {self.path}/{name}: {error}") from error

    def _read_json(self, name: str, key: str) -> dict[str, Any] | None:
        """Returns the content of a JSON file that has a dict at `key`; None where there is no file.

        Raises:
            InputError: it is something else.
        """
        content = self.read(name)
        if content is None:
            return None

        with contextlib.suppress(ValueError, KeyError, TypeError):
            parsed = json.loads(content)
            if isinstance(parsed[key], dict):
                return parsed
        raise InputError(
            f"{self.path}/{name} is damaged; "
            f"remove {self.path} to start again, or use another --name"
        )

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Yields the local path of a file to write; makes an OSError an InputError with advice."""
        path = os.path.join(self.local, name).rstrip("/")
        try:
            yield path
        except OSError as error:
            advice = "use another folder with --runs"
            if self.last_step:
                advice = (
                    "make room or access; "
                    "the same command then resumes from the newest complete checkpoint, if any"
                )
            reason = error.strerror or error
            raise InputError(f"cannot write {path}: {reason}; {advice}") from error

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all."""
        with self.writing(name) as path:
            write_synced(fsspec.filesystem("file"), path, [content])

    def upload(self) -> None:
        """Copies all files to a remote run's URL, whole: object stores cannot append.

        summary.json comes last, since it says that the run is finished.
        """
        if not self.remote or self.local is None:
            return

        self.uploaded = False
        paths = []
        for folder, _, names in os.walk(self.local):
            paths += [os.path.join(folder, name) for name in names]
        paths.sort(key=_is_summary)
        try:
            for path in paths:
                self.fs.put_file(path, f"{self.path}/{os.path.relpath(path, self.local)}")
        except Exception as error:  # every store has exceptions of its own
            raise InputError(
                f"cannot write to {self.path}: {error}; the files are in {self.local}"
            ) from error
        self.uploaded = True

    def release(self) -> None:
        """Unlocks the folder; removes the local copy of a remote run that is uploaded."""
        self._lock.close()
        if self.uploaded:
            shutil.rmtree(self.local, ignore_errors=True)


def _is_summary(path: str) -> bool:
    return path.endswith("summary.json")


def _shown(value: Any) -> str:
    return str(value) if value != "" else '""'


def _as_stored(config: Any) -> dict[str, Any]:
    """Returns a configuration's fields as config.json brings them back."""
    return json.loads(to_json(_infinity_as_text(dataclasses.asdict(config))))


def _infinity_as_text(value: Any) -> Any:
    """Returns a value with "inf" for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _infinity_as_text(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_infinity_as_text(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def to_json(content: Any, indent: int | None = None) -> bytes:
    """Returns JSON; what JSON does not know becomes its string.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    return json.dumps(content, indent=indent, allow_nan=False, default=str).encode()


def now() -> str:
    """Returns the local time with its zone, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def start_record(devices: dict[str, Any]) -> dict[str, Any]:
    """Returns what config.json keeps of each start: time, command, devices, versions (only of what
    is installed) and the commit."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "time": now(),
        "command": shlex.join(sys.orig_argv),
        "devices": devices,
        "versions": versions,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Returns the commit of this file, and whether tracked files differ; None outside of git."""
    try:
        commit = _ask_git("rev-parse", "HEAD")
        changes = _ask_git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _ask_git(*arguments: str) -> str:
    """Returns what git says of the repository that this file is in."""
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.strip()
