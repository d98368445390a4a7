"""The programs that an acceptance starts: their log, their reports, their time limits, their end.

A child runs in a session of its own, so that Ctrl-C reaches us alone, and we end what we have
started: see `Here` and `Tpu`, which also know how a run is started, asked to stop and ended in each
place.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "report "  # train/common/watch/report.py
TAIL = 20  # lines that a page shows of a failed child
KEPT_LINES = 10 * TAIL
LOOK = 0.2  # seconds between two looks
# What make hands to a make that it starts, and what it was given: neither is meant for the runs.
OF_MAKE = (
    "MAKEFLAGS",
    "MFLAGS",
    "MAKEOVERRIDES",
    "MAKELEVEL",
    "TPU",
    "ZONE",
    "PROJECT",
    "ARGS",
    "RUNS",
    "OUT",
    "RUN",
)
INTERRUPTED = threading.Event()


class Interrupted(Exception):
    """Ctrl-C, or SIGTERM: everything that was started is to end."""


def catch_signals() -> None:
    """Lets Ctrl-C, SIGTERM and SIGHUP end the acceptance at the next look, and not in the middle of
    a line."""

    def interrupt(*_: object) -> None:
        INTERRUPTED.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def environment(recorded: Path) -> dict[str, str]:
    """Returns the environment of a child.

    Args:
        recorded: where `make train` and `make compile` write the exit code of the program that they
            start; make's own is 2 for any failure.
    """
    found = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    found["LC_ALL"] = "C.UTF-8"
    found["PYTHONUNBUFFERED"] = "1"
    found["XLA_ZOO_EXIT_CODE"] = str(recorded)
    return found


def read_report(line: str) -> tuple[dict, str]:
    """Returns the report in a line, {} if there is none, and the rest of the line.

    In the log of a worker two programs write: what one says may get between a line of the other and
    its end.
    """
    before, mark, after = line.partition(f"{MARK}{{")
    if mark:
        content = "{" + after
        with contextlib.suppress(ValueError):
            event, end = json.JSONDecoder().raw_decode(content)
            if "event" in event:
                return event, before + content[end:]
    return {}, line


@dataclass(frozen=True)
class Limits:
    """How long a child may take, in seconds."""

    whole: float  # from its start to its end; 0: no limit
    silent: float  # from its report of a start on, without a line; 0: no limit
    ending: float  # from being asked to stop to its end


@dataclass
class Child:
    """A program that was started.

    Attributes:
        command: as a person can repeat it.
        log: the file of what it printed.
        events: its reports.
        lines: the last ones that it printed, without reports.
        hung: which time limit it exceeded; "": none.
        began, heard: when it was started, and when it printed its last line (monotonic).
        compiling: what it compiles, "train_step with libtpu 0.0.21"; "": nothing.
        recorded: the exit code of the program that make has started, once the child is closed.
    """

    command: list[str]
    log: Path
    process: Any = None
    events: list[dict] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    hung: str = ""
    began: float = 0.0
    heard: float = 0.0
    compiling: str = ""
    recorded: int | None = None

    def start(self, folder: Path) -> None:
        """Starts the program in a folder."""
        self.began = time.monotonic()
        self.heard = self.began
        self._queue: queue.Queue[str] = queue.Queue()
        self._file = self.log.open("a", errors="replace")
        self._file.write(f"$ {self.shown()}\n")
        self._recorded = self.log.with_suffix(".exit-code").absolute()
        self._recorded.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            self.command,
            cwd=folder,
            env=environment(self._recorded),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = []
        for stream in (self.process.stdout, self.process.stderr):
            reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def shown(self) -> str:
        """Returns the command as a person can repeat it."""
        return shlex.join(self.command)

    def _read(self, stream: Any) -> None:
        """Passes the lines of a stream on; stdout and stderr apart, so that no line of one is cut
        by the other."""
        for line in stream:
            self._queue.put(line)

    def _take(self, seconds: float) -> None:
        """Takes what was printed meanwhile; waits for it at most so long."""
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._queue.get(timeout=seconds)
                seconds = 0.0
                self._hear(line)

    def _hear(self, line: str) -> None:
        """Writes a line to the log, and reads what it says."""
        self.heard = time.monotonic()
        self._file.write(line)
        self._file.flush()
        event, line = read_report(line.rstrip("\n"))
        if event:
            self.events.append(event)
            if not line:
                return
        self.lines.append(line)
        del self.lines[:-KEPT_LINES]

        found = re.search(r"compil(ing|ed) (\w+) (?:with|in) (.*)", line)
        if found:
            begins = found[1] == "ing"
            self.compiling = f"{found[2]} with {found[3]}" if begins else ""

    def follow(self, limits: Limits, until: Callable[[], bool] | None = None) -> bool:
        """Waits for the end of the child, or until a condition holds. Returns whether it does.

        A child that exceeds a limit is `hung`; whoever started it ends it. Raises Interrupted after
        Ctrl-C.
        """
        while True:
            if INTERRUPTED.is_set():
                raise Interrupted
            over = self.process.poll() is not None
            if over:
                for reader in self._readers:
                    reader.join(2)  # a process that it leaves behind may hold the stream open
            self._take(0.0 if over else LOOK)
            if until is not None and until():
                return True
            if over:
                return False
            self.hung = self._over_limit(limits)
            if self.hung:
                return False

    def _over_limit(self, limits: Limits) -> str:
        """Returns which time limit is exceeded, "" if none is."""
        now = time.monotonic()
        if limits.whole and now - self.began > limits.whole:
            limit = f"{limits.whole:.0f} s, the limit of --limit"
            return f"it was not over after {limit}; it was {self.place()}"

        may_be_silent = not limits.silent or self.compiling or not self.event("start")
        if not may_be_silent and now - self.heard > limits.silent:
            limit = f"{limits.silent:.0f} s, the limit of --silent"
            return f"it printed nothing for {limit}; it was {self.place()}"
        return ""

    def place(self) -> str:
        """Returns how far the child has come, in words."""
        if self.compiling:
            return f"compiling {self.compiling}"
        if not self.event("start"):
            return "before its first step"
        records = self.records()
        return f"after step {records[-1]['step']}" if records else "in its first steps"

    def event(self, name: str) -> dict:
        """Returns the last report of this name, {} without one."""
        for event in reversed(self.events):
            if event["event"] == name:
                return event
        return {}

    def records(self) -> list[dict]:
        """Returns the lines of metrics that it has reported."""
        return [event for event in self.events if event["event"] == "line"]

    def text(self) -> str:
        """Returns its last lines, without reports."""
        return "\n".join(self.lines)

    def close(self) -> None:
        """Takes the last lines, and closes the log."""
        self._take(0.0)
        self._file.close()
        if self._recorded.exists():
            with contextlib.suppress(ValueError):
                self.recorded = int(self._recorded.read_text())
            self._recorded.unlink()

    def code(self) -> int:
        """Returns the exit code of the program that make, or the launcher, has started."""
        status = self.process.returncode
        if status is None or self.hung:
            return 137  # it was killed for its time limit
        if self.recorded is not None:
            return self.recorded
        return 128 - status if status < 0 else status


def kill_group(child: Child, number: int) -> None:
    """Sends a signal to all processes of the child's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


def group_lives(child: Child) -> bool:
    """Returns whether a process of the child's group is left; one that has ended and waits for make
    is none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group …; the name itself may contain ")".
            after_name = path.read_text().rpartition(")")[2]
            state, _, group = after_name.split()[:3]
            if int(group) == child.process.pid and state not in "ZX":
                return True
    return False


def end_group(child: Child) -> None:
    """Ends whatever is left of a child on this machine."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not group_lives(child):
            break
        kill_group(child, number)
        wait_for(lambda: not group_lives(child), 10)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(5)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until a condition holds. Returns whether it does, at the latest after some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK / 4)
    return True


class Here:
    """Runs of `make train` on this machine."""

    name = "this machine"

    def __init__(self, folder: Path, python: str):
        self.folder = folder
        self.python = python

    def train(self, run: str, words: str, flags: str) -> list[str]:
        """Returns the command that trains."""
        python = [f"PYTHON={self.python}"] if self.python else []
        return ["make", "train", *python, *shlex.split(words), f"NAME={run}", f"ARGS={flags}"]

    def stop(self, child: Child, run: str, log: Path, limits: Limits) -> str:
        """Asks a run to save and stop. Returns what went wrong, "" if nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.event("start")["pid"], signal.SIGTERM)
        return ""

    def left(self, child: Child) -> bool:
        """Returns whether something of a run may be left."""
        return group_lives(child)

    def end(self, child: Child, run: str, log: Path, limits: Limits) -> str:
        """Ends whatever is left of a run. Returns what may still run, "" if nothing."""
        end_group(child)
        return f"processes of group {child.process.pid}" if group_lives(child) else ""


class Tpu:
    """Runs on the workers of a TPU, by the launcher's command line."""

    def __init__(self, folder: Path, tpu: str, zone: str, project: str, launch_args: str):
        self.folder = folder
        self.name = tpu
        self.launch_args = launch_args
        self.location = ["--tpu", tpu]
        if zone:
            self.location += ["--zone", zone]
        if project:
            self.location += ["--project", project]

    def launch(self, verb: str, run: str, *more: str) -> list[str]:
        """Returns a command of the launcher."""
        flags = [*self.location, *shlex.split(self.launch_args), "--run", run]
        return ["python3", "-m", "tpu.launch", verb, *flags, *more]

    def train(self, run: str, words: str, flags: str) -> list[str]:
        """Returns the command that trains."""
        return self.launch("train", run, "--", *shlex.split(words), f"ARGS={flags}")

    def stop(self, child: Child, run: str, log: Path, limits: Limits) -> str:
        """Asks a run to save and stop. Returns what went wrong, "" if nothing."""
        asked = Child(self.launch("stop", run), log)
        asked.start(self.folder)
        try:
            asked.follow(limits)
        finally:
            kill_group(asked, signal.SIGKILL)
            asked.process.wait()
            asked.close()
        if asked.hung:
            return f"stop: {asked.hung}"
        if asked.process.returncode:
            return f"stop ended with {asked.process.returncode}: {last_line(asked.lines)}"
        return ""

    def left(self, child: Child) -> bool:
        """Returns whether something of a run may be left: the launcher has not seen its end."""
        code = child.process.poll()
        return code is None or code < 0 or code in (1, 130)

    def end(self, child: Child, run: str, log: Path, limits: Limits) -> str:
        """Ends whatever is left of a run. Returns what may still run, "" if nothing.

        Ctrl-C lets the launcher stop what it has begun, also a run that is only about to start;
        stop makes sure.
        """
        if child.process.poll() is None:
            kill_group(child, signal.SIGINT)
            wait_for(lambda: child.process.poll() is not None, limits.ending)
        kill_group(child, signal.SIGKILL)
        child.process.wait()

        asked = Child(self.launch("stop", run), log)
        asked.start(self.folder)
        wait_for(lambda: asked.process.poll() is not None, limits.ending)
        kill_group(asked, signal.SIGKILL)
        asked.process.wait()
        asked.close()
        # It refuses to stop another run than ours, which is none of ours to end.
        if asked.process.returncode and "does not run there" not in asked.text():
            look = shlex.join(self.launch("status", run))
            return f"{run}: {last_line(asked.lines)}; look: {look}"
        return ""


def say(text: str) -> None:
    """Prints a line. Whoever reads it may have left: what runs is ended all the same."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def last_line(lines: list[str]) -> str:
    """Returns the last line that is not empty."""
    for line in reversed(lines):
        if line.strip():
            return line.strip()
    return "it said nothing"
