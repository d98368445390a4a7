"""What is known of each run of a grid, and the files that say it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from errors import InputError
from train.grid.axes import Grid, Planned, as_flags

# How far a run has come.
NEW = "new"
UNFINISHED = "unfinished"
RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
STATES = (FINISHED, RUNNING, UNFINISHED, FAILED, NEW)

FILE = "grid.json"
PAGE = "grid.md"
LOGS = "logs"


@dataclass
class Record:
    """What is known of a run.

    Attributes:
        name, values, flags: as in Planned.
        folder: of the run, or its URL.
        state: how far it has come.
        why: why it is not finished, in a sentence; "": nothing is known.
        exit_code: of its start by this command; None: there was none.
        place: the TPU that it was started on; "": this machine, or none yet.
        command: that starts it, as a person can repeat it.
        metrics: the final ones of a finished run.
        seconds: of all its starts together.
        devices, version: what it ran on last, and of which version of the project; None: it does
            not say it.
    """

    name: str
    values: dict[str, str]
    flags: list[str]
    folder: str
    state: str = NEW
    why: str = ""
    exit_code: int | None = None
    place: str = ""
    command: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    seconds: float | None = None
    devices: dict[str, Any] | None = None
    version: str | None = None

    def finish(self, summary: dict[str, Any]) -> None:
        """Takes what summary.json says of a finished run."""
        self.state = FINISHED
        self.why = ""
        self.metrics = summary["metrics"]
        self.seconds = summary["elapsed_seconds"]
        self.devices = summary.get("devices")  # older runs do not say it
        self.version = summary.get("version")

    def shown(self) -> str:
        """Returns the values of the axes, in words."""
        return as_flags(self.values)


def record_of(grid: Grid, run: Planned) -> Record:
    """Returns what is known of a run that was only planned."""
    return Record(run.name, run.values, run.flags, f"{grid.runs_root}/{run.name}")


class GridFolder:
    """The folder of the grid's own files, which one process at a time has.

    Attributes:
        earlier: what grid.json said when it was opened; {}: there was none.
    Raises:
        InputError: it cannot be used, or another grid, or a run, has it.
    """

    def __init__(self, grid: Grid):
        self.path = grid.folder
        if (self.path / "config.json").exists():
            raise InputError(f"{self.path} is the folder of a run; give the grid another NAME")
        try:
            (self.path / LOGS).mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a")  # kept open
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; use another folder with --runs"
            ) from None
        try:
            # The kernel drops it with the process, even after kill -9.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{self.path} is the folder of a grid that runs now; wait for its end, or give "
                "another NAME"
            ) from None

        self.earlier = self._read()
        axes = sorted(self.earlier.get("axes", grid.axes))
        if axes != sorted(grid.axes):
            raise InputError(
                f"{self.path} has a grid of {', '.join(axes)}, and this one is of "
                f"{', '.join(sorted(grid.axes))}; give it another NAME"
            )

    def _read(self) -> dict[str, Any]:
        """Returns what grid.json says; {} where it is not there."""
        path = self.path / FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {path}: {error}; remove it, it is written again from the runs"
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
            raise InputError(f"{path} is no grid's; remove it, or give another NAME")
        return content

    def log(self, record: Record) -> Path:
        """Returns the file of what a run prints."""
        return self.path / LOGS / f"{record.name}.log"

    def write(self, content: dict[str, Any], page: str) -> None:
        """Writes grid.json and grid.md, each whole or not at all."""
        self._write(FILE, json.dumps(content, indent=1) + "\n")
        self._write(PAGE, page)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        aside = self.path / f".{name}.new"
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise InputError(
                f"cannot write {path}: {error.strerror}; make room or access, and repeat the "
                "command: finished runs are not trained again"
            ) from None


def contents(grid: Grid, records: list[Record]) -> dict[str, Any]:
    """Returns what grid.json says of the grid and of its runs."""
    return {
        "name": grid.name,
        "script": grid.script,
        "preset": grid.preset,
        "fixed": grid.fixed,
        "axes": grid.axes,
        "runs": [asdict(record) for record in records],
    }
