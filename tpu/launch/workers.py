"""The workers of one TPU: commands for them over ssh and gcloud, tried again until they are
answered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InputError
from tpu.launch import hosts
from tpu.launch.messages import explain_ssh

MARK = b"@xla-zoo "  # see tpu/launch/worker.py
PROGRAM = Path(__file__).with_name("worker.py").read_bytes()
# What a worker's python3 is told: the program comes first on standard input. When a connection
# breaks, gcloud runs the command again with what is left of its input; that is another program, and
# does nothing.
DIGEST = hashlib.sha256(PROGRAM).hexdigest()
READ_PROGRAM = (
    f"import hashlib, sys; program = sys.stdin.buffer.read({len(PROGRAM)}); "
    f"hashlib.sha256(program).hexdigest() == '{DIGEST}'"
    " and exec(compile(program, 'worker.py', 'exec'))"
)
AT_ONCE = 16  # connections that are being made for a start
CERTAIN = 3  # answers "there is no such TPU" before it is believed in the middle of a run
BLOCK = 1 << 16  # bytes that are sent at a time
MOST_NAMED = 5  # workers that are named in a line
PRINTING = threading.Lock()

# Times, in seconds.
SILENCE = 60  # without a sign of life, which comes every 5 s; then a connection is given up
SHORTEST_PAUSE = 0.25  # between two attempts
LONGEST_PAUSE = 15
REMIND = 60  # after which it is said again that a worker cannot be reached
PROGRESS_EVERY = 10  # between two lines that say what is being waited for


def say(*lines: str) -> None:
    """Prints the launcher's own lines to standard error; standard output is the log of worker 0, as
    it is."""
    with PRINTING, contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        for line in lines:
            print(f"[launch] {line}", file=sys.stderr, flush=True)


class WorkerLost(Exception):
    """A worker that could not be reached for --lost-after seconds."""


class TpuGone(Exception):
    """A TPU that cannot be used any more; the message says why and what to do."""


def refuse_gone(machine: hosts.Machine) -> hosts.Machine:
    """Returns it, unless no worker of it can be reached any more: TpuGone."""
    if machine.state in ("gone", "absent"):
        raise TpuGone(machine.problem)
    return machine


def kill(process: subprocess.Popen) -> None:
    """Kills a process and its children: gcloud and its ssh."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def names(workers: Iterable[int]) -> str:
    """Returns workers in a sentence: "worker 3", "workers 0, 1, 2, 3, 4 and 11 others"."""
    workers = sorted(workers)
    noun = "workers" if len(workers) > 1 else "worker"
    shown = ", ".join(str(worker) for worker in workers[:MOST_NAMED])
    others = len(workers) - MOST_NAMED
    if others <= 0:
        return f"{noun} {shown}"
    return f"{noun} {shown} and {others} other{'s' if others > 1 else ''}"


# ---- calls in threads of their own -------------------------------------------------------------


@dataclass
class Outcome:
    """What a call in another thread has returned or raised."""

    worker: int
    result: Any = None
    error: BaseException | None = None


def parallel(
    function: Callable[[int], Any],
    workers: Iterable[int],
    doing: str = "",
    at_once: int = AT_ONCE,
    done: dict[int, Any] | None = None,
    progress: Callable[[], str] = lambda: "",
) -> dict[int, Any]:
    """Calls a function for each worker, some at a time. Raises the first exception at once; Ctrl-C
    interrupts it.

    Args:
        doing: what is being done, which is said every 10 s with the workers that have not answered.
        at_once: how many at a time; 0: all.
        done: gets the results as they come, so that an interrupted caller has those that are there.
        progress: what else is said every 10 s.
    """
    workers = list(workers)
    outcomes: queue.Queue[Outcome] = queue.Queue()
    turns = threading.Semaphore(at_once or len(workers) or 1)

    def work(worker: int) -> None:
        with turns:
            try:
                outcomes.put(Outcome(worker, result=function(worker)))
            except BaseException as error:
                outcomes.put(Outcome(worker, error=error))

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()

    results = {} if done is None else done
    begun = time.monotonic()
    while len(results) < len(workers):
        try:
            outcome = outcomes.get(timeout=PROGRESS_EVERY)
        except queue.Empty:
            if doing:
                left = names(set(workers) - set(results))
                say(f"{doing}: {left}, {time.monotonic() - begun:.0f} s{progress()}")
            continue
        if outcome.error is not None:
            raise outcome.error
        results[outcome.worker] = outcome.result
    return results


def patient(function: Callable[[], Any], doing: str) -> Any:
    """Calls a function, and says every 10 s what is being waited for. Ctrl-C interrupts it."""
    outcomes: queue.Queue[Outcome] = queue.Queue()

    def work() -> None:
        try:
            outcomes.put(Outcome(0, result=function()))
        except BaseException as error:
            outcomes.put(Outcome(0, error=error))

    threading.Thread(target=work, daemon=True).start()
    begun = time.monotonic()
    while True:
        try:
            outcome = outcomes.get(timeout=PROGRESS_EVERY)
        except queue.Empty:
            say(f"{doing}, {time.monotonic() - begun:.0f} s")
            continue
        if outcome.error is not None:
            raise outcome.error
        return outcome.result


class Trouble:
    """The time since something was heard, for `patiently`."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.said = ""  # the last trouble that was said
        self.said_at = 0.0
        self.pause = SHORTEST_PAUSE

    def heard(self) -> bool:
        """Counts the time anew. Returns whether there had been trouble."""
        trouble = bool(self.said)
        self.since = time.monotonic()
        self.said = ""
        self.said_at = 0.0
        self.pause = SHORTEST_PAUSE
        return trouble

    def wait(self, error: hosts.Transient) -> None:
        """Says what the trouble is, when it is another one or a minute has passed. Then waits until
        the next attempt."""
        now = time.monotonic()
        if str(error) != self.said or now > self.said_at + REMIND:
            say(f"{error}; trying again")
            self.said = str(error)
            self.said_at = now
        time.sleep(self.pause)
        self.pause = min(2 * self.pause, LONGEST_PAUSE)


# ---- answers of a worker -----------------------------------------------------------------------


def read_answer(line: bytes) -> dict[str, Any] | None:
    """Returns the answer in a line, None if it is another line, or one that a dropped connection
    has cut off."""
    if line.startswith(MARK + b"{"):
        with contextlib.suppress(ValueError):
            return json.loads(line[len(MARK) :])
    return None


def listen(process: subprocess.Popen, hear: Callable[[dict], None]) -> tuple[dict[str, Any], bool]:
    """Passes a worker's answers to `hear`, until its standard output ends or it is silent.

    Returns the last answer if it has a `state`, else {}; and whether it was silent.
    """
    answer = {}
    rest = b""
    while True:
        readable, _, _ = select.select([process.stdout], [], [], SILENCE)
        if not readable:
            return answer, True
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return answer, False

        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            found = read_answer(line)
            if found is not None:
                answer = found if "state" in found else {}
                hear(found)


class Workers:
    """All workers of a TPU. lost_after: seconds after which one that is never reached is given
    up."""

    def __init__(self, host: hosts.TpuVm | hosts.SshHosts, lost_after: float) -> None:
        self.host = host
        self.lost_after = lost_after
        self.count = 0
        self.live: set[subprocess.Popen] = set()  # ssh and gcloud under way
        self.sent: dict[int, int] = {}  # bytes of input that a worker's connection has taken

        # For `check`.
        self.asking = threading.Lock()
        self.asked = 0.0  # when the cloud was asked last
        self.absent = 0  # answers "there is no such TPU", one after the other
        self.refused = 0  # answers that it is not ours to ask about, one after the other

    def label(self, worker: int) -> str:
        """Returns the name of a worker in a sentence."""
        if isinstance(self.host, hosts.SshHosts):
            return f"worker {worker} ({self.host.hosts[worker]})"
        return f"worker {worker}"

    def patiently(self, ask: Callable[[Callable[[], bool]], Any], forever: bool = False) -> Any:
        """Returns the answer of `ask`, which is tried with growing pauses as long as it raises
        Transient.

        It gets a function that counts the time anew, and returns whether there had been trouble.
        InputError, TpuGone: another attempt is useless. WorkerLost: none has worked for
        `lost_after` seconds; with `forever` never.
        """
        trouble = Trouble()
        while True:
            try:
                return ask(trouble.heard)
            except hosts.Transient as error:
                lost = time.monotonic() > trouble.since + self.lost_after
                if lost and not forever:
                    raise WorkerLost(str(error)) from None
                trouble.wait(error)

    def describe(self) -> hosts.Machine:
        """Returns what the TPU is, see `patiently`. TpuGone: no worker of it can be reached any
        more."""

        def describe_patiently() -> hosts.Machine:
            return self.patiently(lambda heard: self.host.describe())

        machine = patient(describe_patiently, f"asking about {self.host.name}")
        self.count = machine.workers
        return refuse_gone(machine)

    def check(self) -> None:
        """Raises TpuGone if the TPU is gone; asks the cloud at most every 15 s, and passes when it
        does not answer.

        That there is none of this name, or that it is not ours to ask about, is believed the third
        time: the API says so of a TPU that is there, now and then, and what runs on it would be
        left alone.
        """
        with self.asking:
            if time.monotonic() < self.asked + LONGEST_PAUSE:
                return
            self.asked = time.monotonic()
            try:
                machine = self.host.describe()
            except hosts.Transient:
                return
            except InputError:
                self.refused += 1
                if self.refused >= CERTAIN:
                    raise
                return

            self.refused = 0
            if machine.state == "absent":
                self.absent += 1
                if self.absent < CERTAIN:
                    return
            else:
                self.absent = 0
            refuse_gone(machine)

    def connect(
        self, worker: int, command: list[str], data: bytes, hear: Callable[[dict], None]
    ) -> tuple[dict[str, Any], str]:
        """Runs a command until it ends, or is silent. Ctrl-C does not reach it: it has a session of
        its own.

        Returns the last answer if it has a `state`, else {}: the connection broke; and the end of
        standard error.
        """
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            self.live.add(process)
            feed = threading.Thread(target=self.feed, args=(worker, process, data), daemon=True)
            feed.start()
            try:
                answer, silent = listen(process, hear)
                if silent:
                    errors.write(f"nothing heard for {SILENCE:.0f} s\n".encode())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                kill(process)
                process.wait()
                process.stdout.close()
                self.live.discard(process)
            errors.seek(0)
            return answer, errors.read()[-8192:].decode(errors="replace")

    def feed(self, worker: int, process: subprocess.Popen, data: bytes) -> None:
        """Writes the worker's program and its input, without another copy of them."""
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(PROGRAM)
            view = memoryview(data)
            for at in range(0, len(view), BLOCK):
                self.sent[worker] = at
                process.stdin.write(view[at : at + BLOCK])
            self.sent[worker] = len(view)

    def abort(self) -> None:
        """Kills all ssh and gcloud under way."""
        for process in list(self.live):
            kill(process)

    def call(
        self,
        worker: int,
        action: str,
        data: bytes = b"",
        hear: Callable[[dict], dict] = lambda answer: {},
        forever: bool = False,
        **arguments: object,
    ) -> dict[str, Any]:
        """Runs an action of tpu/launch/worker.py on a worker until it answers, see `patiently`.

        data: its input. hear: gets all that it says; what it returns is the arguments of the next
        attempt.
        """
        label = self.label(worker)
        noted = set()

        def attempt(heard: Callable[[], bool]) -> dict[str, Any]:
            def take(answer: dict) -> None:
                if heard():
                    say(f"{label}: connected again")
                note = answer.get("note", "")
                if note and note not in noted:
                    noted.add(note)
                    say(f"{label}: {note}")
                arguments.update(hear(answer))

            folder = self.host.folder(worker)
            program = ["python3", "-uc", READ_PROGRAM]
            words = [*program, action, folder, json.dumps(arguments)]
            command = self.host.ssh(worker, shlex.join(words))
            answer, errors = self.connect(worker, command, data, take)
            if answer.get("state") == "failed":
                raise InputError(f"{label}: {answer['message']}")
            if answer:
                return answer

            if "Traceback" in errors and "worker.py" in errors:
                raise RuntimeError(f"tpu/launch/worker.py on {label}:\n{errors}")
            final, why = explain_ssh(errors, label)
            if final:
                raise InputError(why)
            self.check()
            raise hosts.Transient(f"{label} cannot be reached: {why}")

        return self.patiently(attempt, forever)
