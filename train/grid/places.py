"""Where the runs of a grid run, each as a child of this process: on this machine, or on TPUs.

A child has a session of its own, so that Ctrl-C reaches the grid alone, which hands it on once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from train.grid.axes import Grid
from train.grid.flags import OF_ENCODERS, TASK_OF_SCRIPT
from train.grid.records import FAILED, RUNNING, UNFINISHED, Record

SUMMARY = "summary.json"
TAIL = 16 << 10  # bytes of what a child printed last, in which its error is looked for
LONGEST_REASON = 400  # letters
CLOSING = 2  # seconds for a stream to close after its process; what is left behind may hold it
STOPPED = 143  # exit code of a trainer that was asked to stop, and has saved
ENDED = 130  # by Ctrl-C, before the training or by the second one
# What the launcher says after Ctrl-C where the run has ended on all workers, or never began.
NOTHING_RUNS = ("no process of the run is left", "nothing was started")
OUT_OF_MEMORY = r"RESOURCE_EXHAUSTED|Ran out of memory|[Oo]ut of memory|OutOfMemoryError"

_PRINTING = threading.Lock()


def say(text: str) -> None:
    """Prints lines of the grid's own. Whoever reads them may have left: the runs go on."""
    with _PRINTING, contextlib.suppress(OSError):
        print(text, flush=True)


class Child:
    """A run that was started: what it prints goes to the terminal, and into its log.

    Args:
        label: what each of its lines begins with on the terminal; "": it is passed on as it is.
    """

    def __init__(self, command: list[str], log: Path, label: str = ""):
        self.command = command
        self._label = label.encode()
        self.tails = {"stdout": b"", "stderr": b""}
        self.signals = 0  # how many it was sent
        self._log: BinaryIO | None = None
        with contextlib.suppress(OSError):  # a full disk: the run fails by itself, or does not
            self._log = log.open("ab")
            self._log.write(f"$ {shlex.join(command)}\n".encode())
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = []
        for name in self.tails:
            arguments = (name, getattr(self.process, name), getattr(sys, name))
            reader = threading.Thread(target=self._read, args=arguments, daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, stream: BinaryIO, terminal: Any) -> None:
        """Passes on what comes from a stream until it ends."""
        unfinished = b""  # line
        while True:
            content = stream.read1(1 << 16)
            if not content:
                break
            self.tails[name] = (self.tails[name] + content)[-TAIL:]
            self._write(self._log, content)
            if self._label:
                *lines, unfinished = (unfinished + content).split(b"\n")
                content = b"".join(self._label + line + b"\n" for line in lines)
            self._write(getattr(terminal, "buffer", None), content)
        if unfinished:
            self._write(getattr(terminal, "buffer", None), self._label + unfinished + b"\n")

    def _write(self, file: BinaryIO | None, content: bytes) -> None:
        if file is None:
            return
        with _PRINTING, contextlib.suppress(OSError, ValueError):
            file.write(content)
            file.flush()

    def send(self, number: int) -> None:
        """Sends a signal to its process."""
        self.signals += 1
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def wait(self) -> int:
        """Waits for its end; returns its exit code, as a shell has it."""
        status = self.process.wait()
        for reader in self._readers:
            reader.join(CLOSING)
        if status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what a killed run has left behind
            for reader in self._readers:
                reader.join(CLOSING)
        self._write(self._log, b"" if status == 0 else f"[grid] exit code {status}\n".encode())
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
        return 128 - status if status < 0 else status

    def lines(self, *names: str) -> list[str]:
        """Returns the last lines that it printed to these streams."""
        found = []
        for name in names:
            text = self.tails[name].decode(errors="replace").replace("\r", "\n")
            found += [line.strip() for line in text.split("\n") if line.strip()]
        return found


def reason(code: int, lines: list[str]) -> str:
    """Returns why a run failed, in a sentence, from its exit code and its last lines."""
    memory = [line for line in lines if re.search(OUT_OF_MEMORY, line)]
    errors = [line for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    others = [line for line in lines if not re.match(r"make(\[\d+\])?: ", line)]
    if code == 128 + signal.SIGKILL:
        found = "killed from outside by SIGKILL, most likely for want of memory"
    elif memory:
        found = f"out of memory: {memory[-1]}"
    elif errors:
        found = errors[-1][len("error: ") :]
    else:
        found = (raised or others or ["it said nothing"])[-1]
    if len(found) > LONGEST_REASON:
        found = f"{found[:LONGEST_REASON]} …"
    return f"exit code {code}: {found}"


class NoResult(Exception):
    """There is no summary.json that can be read; the message says why."""


@dataclass
class Here:
    """This machine. The runs are processes of the interpreter that the grid has."""

    name: str = ""  # in grid.json
    label: str = ""
    unusable: str = ""  # why it gets no further run

    def command(self, grid: Grid, record: Record) -> list[str]:
        """Returns the command that trains."""
        python = sys.executable
        if python.startswith(f"{Path.cwd()}/"):
            python = os.path.relpath(python)
        words = [python, "-m", f"train.{grid.script}", grid.preset, *record.flags]
        return [*words, "--runs", grid.runs_root, "--name", record.name]

    def signal(self, number: int) -> int:
        """Returns the signal that a run gets where the grid gets this one."""
        # By SIGHUP a trainer would end unsaved.
        return number if number == signal.SIGINT else signal.SIGTERM

    def read_summary(self, record: Record) -> dict[str, Any]:
        """Returns summary.json of a run; NoResult where it cannot be read."""
        path = f"{record.folder}/{SUMMARY}"
        try:
            if "://" in path:
                import fsspec

                with fsspec.open(path, "rb") as file:
                    content = file.read()
            else:
                content = Path(path).expanduser().read_bytes()
        except FileNotFoundError:
            raise NoResult(f"it has no {SUMMARY}") from None
        except Exception as error:  # every store has exceptions of its own
            raise NoResult(f"cannot read {path}: {error}") from None
        return parsed(path, content)

    def note_failure(self, child: Child, code: int, record: Record, stopping: bool) -> None:
        """Notes why a run has ended before its end.

        Args:
            stopping: the grid was asked to stop, and has asked the run.
        """
        why = reason(code, child.lines("stdout", "stderr"))
        record.state = FAILED
        record.why = why
        if stopping or code == STOPPED:
            record.state = UNFINISHED
            record.why = "stopped" if code in (STOPPED, ENDED) else f"stopped; {why}"


@dataclass
class Tpu:
    """A TPU, on which `python3 -m tpu.launch` starts the runs.

    Attributes:
        launch: flags of the launcher besides --tpu and --run.
        make_words: further words of make train there: "PYTHON=…".
        project: of gcloud; "": its own.
    """

    name: str
    launch: list[str] = field(default_factory=list)
    make_words: list[str] = field(default_factory=list)
    project: str = ""
    unusable: str = ""

    @property
    def label(self) -> str:
        """What the lines of its runs begin with."""
        return f"{self.name}| "

    def command(self, grid: Grid, record: Record) -> list[str]:
        """Returns the command that trains, on all its workers."""
        flags = [*record.flags, "--runs", grid.runs_root]
        model = grid.script
        words = []
        if grid.script in OF_ENCODERS:
            model = _taken(flags, "--model") or "bert"
            task = TASK_OF_SCRIPT.get(grid.script) or _taken(flags, "--task")
            if task:
                words.append(f"TASK={task}")
        words = [f"MODEL={model}", *words, f"PRESET={grid.preset}"]
        data = _taken(flags, "--data")
        if data:
            words.append(f"DATA={data}")
        words += [*self.make_words, f"ARGS={shlex.join(flags)}"]
        launch = ["python3", "-m", "tpu.launch", "train", "--tpu", self.name, *self.launch]
        return [*launch, "--run", record.name, "--", *words]

    def signal(self, number: int) -> int:
        """Returns the signal that the launcher gets: Ctrl-C, by which it stops the run on all
        workers. By another it would leave, and the run would go on."""
        return signal.SIGINT

    def read_summary(self, record: Record) -> dict[str, Any]:
        """Returns summary.json of a run in a bucket; NoResult where it cannot be read."""
        path = f"{record.folder}/{SUMMARY}"
        command = ["gcloud", "storage", "cat", path]
        if self.project:
            command += ["--project", self.project]
        try:
            result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise NoResult(f"cannot start gcloud to read {path}: {error.strerror}") from None
        if result.returncode:
            said = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise NoResult(f"cannot read {path}: {said[-1]}")
        return parsed(path, result.stdout)

    def note_failure(self, child: Child, code: int, record: Record, stopping: bool) -> None:
        """Notes why a run has ended before its end; where the TPU is the reason, also that it gets
        no further run. See `Here`."""
        # The run's own words come over standard output, errors of the launcher over the other.
        launcher = [line for line in child.lines("stderr") if line.startswith("error: ")]
        if stopping:
            said = "\n".join(child.lines("stderr"))
            if any(sentence in said for sentence in NOTHING_RUNS):
                record.state = UNFINISHED
                record.why = "stopped"
            else:
                record.state = RUNNING
                record.why = f"it may still run on {self.name}: make status TPU={self.name}"
            return
        if launcher and code:
            self.unusable = launcher[-1][len("error: ") :]
            lost = code == 1  # the connection: the run may go on
            record.state = RUNNING if lost else UNFINISHED
            record.why = f"{self.name}: {self.unusable}"
            return
        if code == STOPPED:
            record.state = UNFINISHED
            record.why = f"stopped, on {self.name}"
            return
        record.state = FAILED
        record.why = reason(code, child.lines("stderr", "stdout"))


def _taken(flags: list[str], flag: str) -> str:
    """Takes a flag and its value out of a command line, and returns the value; "" without it."""
    for number, word in enumerate(flags):
        if word == flag:
            value = flags[number + 1]
            del flags[number : number + 2]
            return value
    return ""


def parsed(path: str, content: bytes) -> dict[str, Any]:
    """Returns the content of a summary.json; NoResult where it is damaged."""
    try:
        summary = json.loads(content)
        if isinstance(summary["metrics"], dict) and "elapsed_seconds" in summary:
            return summary
    except (ValueError, KeyError, TypeError):
        pass
    raise NoResult(f"{path} is damaged: remove the run's folder to train it again")
