"""The workers of one TPU: commands for them over ssh and gcloud, tried again until they are answered."""

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
from pathlib import Path
from typing import Any

from errors import InputError
from tpu.launch import hosts
from tpu.launch.messages import explain_ssh

MARK = b"@xla-zoo "  # see tpu/launch/worker.py
PROGRAM = Path(__file__).with_name("worker.py").read_bytes()
# What a worker's python3 is told: the program comes first on standard input. When a connection breaks, gcloud runs the
# command again with what is left of its input; that is another program, and does nothing.
DIGEST = hashlib.sha256(PROGRAM).hexdigest()
READ_PROGRAM = (
    f"import hashlib, sys; program = sys.stdin.buffer.read({len(PROGRAM)}); "
    f"hashlib.sha256(program).hexdigest() == '{DIGEST}' and exec(compile(program, 'worker.py', 'exec'))"
)
AT_ONCE = 16  # connections that are being made
SILENCE = 60  # seconds without a sign of life, which comes every 5 s, after which a connection is given up
LONGEST_PAUSE = 15  # seconds between two attempts
REMIND = 60  # seconds after which it is said again that a worker cannot be reached
PRINTING = threading.Lock()


def say(*lines: str) -> None:
    """Prints the launcher's own lines to standard error; standard output is the log of worker 0, as it is."""
    with PRINTING:
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


def parallel(function: Callable[[int], Any], workers: Iterable[int]) -> dict[int, Any]:
    """Calls a function for each worker, 16 at a time. Raises the first exception at once; Ctrl-C interrupts it."""
    workers = list(workers)
    done: queue.Queue = queue.Queue()
    places = threading.Semaphore(AT_ONCE)

    def work(worker: int) -> None:
        with places:
            try:
                done.put((worker, function(worker), None))
            except BaseException as error:
                done.put((worker, None, error))

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    results = {}
    for _ in workers:
        worker, results[worker], error = done.get()
        if error is not None:
            raise error
    return results


class Workers:
    """All workers of a TPU. lost_after: seconds after which one that is never reached is given up."""

    def __init__(self, host: hosts.TpuVm | hosts.SshHosts, lost_after: float) -> None:
        self.host, self.lost_after, self.count = host, lost_after, 0
        self.live: set[subprocess.Popen] = set()  # ssh and gcloud under way
        self.asking, self.asked = threading.Lock(), 0.0

    def label(self, worker: int) -> str:
        """Returns the name of a worker in a sentence."""
        host = self.host
        return f"worker {worker} ({host.hosts[worker]})" if isinstance(host, hosts.SshHosts) else f"worker {worker}"

    def patiently(self, ask: Callable[[Callable[[], bool]], Any], forever: bool = False) -> Any:
        """Returns the answer of `ask`, which is tried with growing pauses as long as it raises Transient.

        It gets a function that counts the time anew, and returns whether there had been trouble. InputError, TpuGone:
        another attempt is useless. WorkerLost: none has worked for `lost_after` seconds; with `forever` never.
        """
        since, said, pause = time.monotonic(), ("", 0.0), 0.25

        def heard() -> bool:
            nonlocal since, said, pause
            trouble, since, said, pause = bool(said[0]), time.monotonic(), ("", 0.0), 0.25
            return trouble

        while True:
            try:
                return ask(heard)
            except hosts.Transient as error:
                now = time.monotonic()
                if now > since + self.lost_after and not forever:
                    raise WorkerLost(str(error)) from None
                if str(error) != said[0] or now > said[1] + REMIND:
                    say(f"{error}; trying again")
                    said = (str(error), now)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def describe(self) -> hosts.Machine:
        """Returns what the TPU is, see `patiently`. TpuGone: no worker of it can be reached any more."""
        machine = self.patiently(lambda heard: self.host.describe())
        self.count = machine.workers
        return refuse_gone(machine)

    def check(self) -> None:
        """Raises TpuGone if the TPU is gone; asks the cloud at most every 15 s, and passes when it does not answer."""
        with self.asking:
            if time.monotonic() > self.asked + LONGEST_PAUSE:
                self.asked = time.monotonic()
                with contextlib.suppress(hosts.Transient):
                    refuse_gone(self.host.describe())

    def connect(self, command: list[str], data: bytes, hear: Callable[[dict], None]) -> tuple[dict[str, Any], str]:
        """Runs a command until it ends, or is silent. Ctrl-C does not reach it: it has a session of its own.

        Returns the last answer if it has a `state`, else {}: the connection broke; and the end of standard error.
        """
        with tempfile.TemporaryFile() as errors:
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            process = subprocess.Popen(command, **streams, start_new_session=True)
            self.live.add(process)

            def feed() -> None:
                with contextlib.suppress(OSError), process.stdin:
                    process.stdin.write(data)

            threading.Thread(target=feed, daemon=True).start()
            answer, rest, chunk = {}, b"", b"-"
            try:
                while chunk and select.select([process.stdout], [], [], SILENCE)[0]:
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        with contextlib.suppress(ValueError):  # cut off by a dropped connection
                            if line.startswith(MARK + b"{"):
                                found = json.loads(line[len(MARK) :])
                                answer = found if "state" in found else {}
                                hear(found)
                if chunk:
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

        data: its input. hear: gets all that it says; what it returns is the arguments of the next attempt.
        """
        label = self.label(worker)

        def attempt(heard: Callable[[], bool]) -> dict[str, Any]:
            def take(answer: dict) -> None:
                if heard():
                    say(f"{label}: connected again")
                arguments.update(hear(answer))

            words = ["python3", "-uc", READ_PROGRAM, action, str(worker), json.dumps(arguments)]
            answer, errors = self.connect(self.host.ssh(worker, shlex.join(words)), PROGRAM + data, take)
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
