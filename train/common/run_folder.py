"""The folder of a run, local or at a URL: its name, its lock, config.json, and files that are whole or not there."""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import itertools
import json
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

PACKAGES = ("torch", "torch_xla", "torchvision", "libtpu", "numpy", "timm", "datasets", "transformers", "safetensors")
_LOCKS: dict[str, contextlib.ExitStack] = {}  # this process's last one of each folder


class RunFolder:
    """The folder of a run below `runs`, a root folder or fsspec URL, and the files in it.

    The arguments are those of `Run`. `path` is the folder or URL, `local` where `write` writes: for a URL a temporary
    folder, which `upload` copies. `stored` and `summary` are its config.json and summary.json, or None; `reason` says
    why a number was added to the name. Raises InputError where the folder cannot be used.
    """

    def __init__(self, config: Any, default_name: str, free: Iterable[str] = (), required: Iterable[str] = ()):
        if not config.runs:
            raise InputError("--runs is empty; give the folder or URL of all runs, such as runs")
        self.root = os.path.expanduser(config.runs.removeprefix("file://")).rstrip("/") or "/"
        self.remote = "://" in self.root
        self.local, self._lock, self.uploaded, self.last_step = None, contextlib.ExitStack(), False, 0
        try:
            self.files = fsspec.core.url_to_fs(self.root)[0]
        except (ImportError, ValueError) as error:
            raise InputError(f"cannot use --runs {config.runs}: {error}") from error
        self.files.invalidate_cache()
        self.config, defaults = (json.loads(to_json(dataclasses.asdict(each))) for each in (config, type(config)()))
        defaults = {field: value for field, value in defaults.items() if field not in required}
        self._choose(config.name, default_name, defaults, {"runs", "name", *free})

    def _choose(self, given: str, default_name: str, defaults: dict[str, Any], free: set[str]) -> None:
        """Finds the run's name and reads what its folder has."""
        if "/" in given or given in (".", ".."):
            raise InputError(f"--name {given} is not the name of one folder; use --runs for the root folder")
        self.reason = ""
        for number in itertools.count(1):
            self.name = given or (default_name if number == 1 else f"{default_name}-{number}")
            self.path = os.path.join(self.root, self.name)
            self.stored, self.summary = self._read_json("config.json", "config"), None
            changed = {}
            if self.stored is not None:
                self.summary = self._read_json("summary.json", "metrics")
                old, new = defaults | self.stored["config"], self.config
                both = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in new | old if key not in free}
                changed = {key: f"{key} was {was}, now {now}" for key, (was, now) in both.items() if was != now}
            if given and changed:
                values = ", ".join(changed.values())
                older = "; it is of an older version" if "was absent" in values else ""
                remedy = "use another --name or the old values"
                raise InputError(f"{self.path} was started with other values ({values}){older}; {remedy}")
            if given or not (changed or self.summary):
                return
            why = f"was trained with another {', '.join(changed)}" if changed else "is finished"
            self.reason = f" ({self.name} {why})"

    def open(self, devices: dict[str, Any]) -> None:
        """Creates and locks the folder, and adds this start to its config.json."""
        self.local = self.path
        with self.writing(""):
            if self.remote:
                self.local = tempfile.mkdtemp(prefix=f"{self.name}-")
            else:
                os.makedirs(self.local, exist_ok=True)
                self._take_lock()
        stored = {"config": self.config, "starts": []} | (self.stored or {})
        stored["starts"] = [*stored["starts"], _start_record(devices)]
        self.write("config.json", to_json(stored, indent=2))
        self.upload()

    def _take_lock(self) -> None:
        _LOCKS.get(self.local, self._lock).close()  # of a failed start, which a notebook's last traceback keeps
        _LOCKS[self.local] = self._lock
        lock = self._lock.enter_context(open(os.path.join(self.local, ".lock"), "a+"))  # noqa: SIM115 - kept open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it, even after kill -9
        except BlockingIOError as error:
            lock.seek(0)
            raise InputError(f"{self.path} is being trained by process {lock.read()}; use another --name") from error
        lock.truncate(0)
        print(os.getpid(), end="", file=lock, flush=True)

    def fingerprint(self) -> int:
        """Returns a number for config.json as this host sees it, and for whether the run is finished."""
        with contextlib.suppress(InputError):  # a host that failed here alone would leave the others waiting
            return 2 * zlib.crc32(self.read("config.json") or b"") + (self.summary is not None)
        return -1

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file of the run, None where there is none."""
        try:
            return self.files.cat_file(f"{self.path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot read {self.path}/{name}: {error}") from error

    def _read_json(self, name: str, key: str) -> dict[str, Any] | None:
        content = self.read(name)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            parsed = None if content is None else json.loads(content)
            if parsed is None or isinstance(parsed[key], dict):
                return parsed
        damaged = f"{self.path}/{name} is damaged"
        raise InputError(f"{damaged}; remove {self.path} to start again, or use another --name")

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[str]:
        """Yields the local path of a file to write; an OSError becomes an InputError that says what to do."""
        path = os.path.join(self.local, name).rstrip("/")
        try:
            yield path
        except OSError as error:
            again = "make room or access; the same command then resumes from the newest complete checkpoint, if any"
            advice = again if self.last_step else "use another folder with --runs"
            raise InputError(f"cannot write {path}: {error.strerror or error}; {advice}") from error

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all."""
        with self.writing(name) as path:
            write_synced(fsspec.filesystem("file"), path, [content])

    def upload(self) -> None:
        """Copies all files to a remote run's URL, whole (object stores cannot append), summary.json last."""
        if not self.remote or self.local is None:
            return
        self.uploaded = False
        try:
            files = [os.path.join(folder, file) for folder, _, names in os.walk(self.local) for file in names]
            for file in sorted(files, key=lambda file: file.endswith("summary.json")):
                self.files.put_file(file, f"{self.path}/{os.path.relpath(file, self.local)}")
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot write to {self.path}: {error}; the files are in {self.local}") from error
        self.uploaded = True

    def release(self) -> None:
        """Unlocks the folder; removes the local copy of a remote run that is uploaded."""
        self._lock.close()
        if self.uploaded:
            shutil.rmtree(self.local, ignore_errors=True)


def to_json(content: Any, indent: int | None = None) -> bytes:
    """Returns JSON without NaN and infinity; what JSON does not know becomes its string."""
    return json.dumps(content, indent=indent, allow_nan=False, default=str).encode()


def now() -> str:
    """Returns the local time with its zone, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _start_record(devices: dict[str, Any]) -> dict[str, Any]:
    """Returns what config.json keeps of each start; git is null where this file is in no git repository."""

    def ask_git(*arguments: str) -> str:
        command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git = {"commit": ask_git("rev-parse", "HEAD"), "dirty": bool(ask_git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        git = None
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"time": now(), "command": shlex.join(sys.orig_argv), "devices": devices, "versions": versions, "git": git}
