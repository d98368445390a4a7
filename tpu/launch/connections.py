"""Connections to workers: ssh and gcloud processes that are read line by line, ended together, and tried again.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MARK = b"@xla-zoo "  # see tpu/launch/worker.py
AT_ONCE = 16  # connections that are being made
SILENCE = 60  # seconds without a sign of life, which comes every 5 s, after which a connection is given up


class WorkerLost(Exception):
    """A worker that cannot be reached any more."""

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(f"worker {worker} cannot be reached: {why}")


class Aborted(Exception):
    """Raised in connections that were ended on purpose."""


class Patience:
    """Waits longer and longer between attempts; gives a worker up when none has worked for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()
        self.pause = 0.25

    def renew(self) -> None:
        """Starts counting again: the worker was heard, or nobody can say that it is the worker's fault."""
        self.since = time.monotonic()

    def wait(self, worker: int, why: str) -> None:
        """Sleeps until the next attempt. WorkerLost: there is none."""
        if time.monotonic() > self.since + self.seconds:
            raise WorkerLost(worker, why)
        time.sleep(self.pause)
        self.pause = min(2 * self.pause, 15)


@dataclass
class Result:
    """What a finished connection left: the last answer with a `state` ({}: it broke before), and standard error."""

    answer: dict[str, Any]
    errors: str
    code: int


@dataclass
class Connections:
    """The ssh and gcloud processes under way, each in a session of its own: Ctrl-C does not reach them."""

    live: set[subprocess.Popen] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def run(
        self,
        command: list[str],
        data: bytes = b"",
        on_answer: Callable[[dict[str, Any]], None] = lambda answer: None,
        silence: float = SILENCE,
    ) -> Result:
        """Runs a command to its end, or until it was silent for `silence` seconds. Aborted: `abort` was called."""
        with self.guard:
            if self.closed:
                raise Aborted
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            self.live.add(process)
        errors: list[bytes] = []

        def feed() -> None:
            with contextlib.suppress(OSError):
                process.stdin.write(data)
            with contextlib.suppress(OSError):
                process.stdin.close()

        def collect() -> None:
            for line in process.stderr:
                errors[:] = [*errors[-50:], line]

        threads = [threading.Thread(target=work, daemon=True) for work in (feed, collect)]
        for thread in threads:
            thread.start()
        answer: dict[str, Any] = {}
        rest = b""
        try:
            while True:
                if not select.select([process.stdout], [], [], silence)[0]:
                    errors.append(f"nothing heard for {silence:.0f} s\n".encode())
                    kill(process)
                    break
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(MARK):
                        with contextlib.suppress(ValueError):  # cut off by a dropped connection
                            found = json.loads(line[len(MARK) :])
                            answer = found if "state" in found else {}
                            on_answer(found)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            kill(process)
            code = process.wait()
            threads[1].join(2)
            process.stdout.close()
            with self.guard:
                self.live.discard(process)
        if self.closed:
            raise Aborted
        return Result(answer, b"".join(errors).decode(errors="replace"), code)

    def abort(self) -> None:
        """Kills all processes under way, and starts no new one."""
        with self.guard:
            self.closed = True
            for process in self.live:
                kill(process)


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
        worker, result, error = done.get()
        if error is not None:
            raise error
        results[worker] = result
    return results
