"""--stall-after: ends a run that hangs, with the stacks of all threads, so that it can be started
again.

A lost host, a stuck file system or a deadlock leaves a run silent for hours while it is paid for. A
thread looks for progress: a train step, a call of any compiled step (an evaluation makes many), the
start or end of a pause. Without it for long, every host writes its stacks to
runs/<name>/stacks/host-<index>.txt and to its log, and exits with 75 (EX_TEMPFAIL of sysexits.h):
the launcher's RETRIES starts the run again, from its last checkpoint.

    in training, from the 6th step on    --stall-after times the median step, at least 5 minutes
    before that, after the last step,    an hour: a first batch, an export or a checkpoint in a slow
    and in a pause                       store takes its time
    while a step is compiled             no limit
    while the process is stopped         no limit after Ctrl-Z; 5 minutes more after `kill -STOP` or
                                         `docker pause`
"""

import collections
import faulthandler
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec

from errors import InputError
from train.common import device
from train.common.hooks import Watcher

LEAST = 300.0  # seconds: the least limit in training
ELSEWHERE = 3600.0  # seconds: the limit outside of the training
UNCOUNTED = 86400.0  # seconds: the limit in a pause on plain PyTorch, whose batches nobody counts
KNOWN = 5  # durations that make a median
LINGER = 15.0  # seconds before the exit, in which the other hosts of a pod write their stacks
EXIT_CODE = 75
STDERR = 2  # the file descriptor: sys.stderr may be no file


@dataclass(frozen=True)
class Flags:
    """When a run counts as hanging."""

    stall_after: float = 20.0  # silent median steps (5 minutes or more) that end a run; 0: never


def watcher(flags: Flags) -> Callable[[Any], "Stall"] | None:
    """Returns what makes the watchdog of a Run; None for --stall-after 0.

    Raises InputError where the flag is neither 0 nor at least 1.
    """
    if flags.stall_after != 0 and not flags.stall_after >= 1:
        raise InputError(
            f"--stall-after is {flags.stall_after}; it must be at least 1, or 0 for no watchdog"
        )
    if flags.stall_after == 0:
        return None
    return lambda run: Stall(run, flags.stall_after)


class Stall(Watcher):
    """The watchdog of one run; `run` is a Run, `times` the factor of --stall-after."""

    def __init__(self, run: Any, times: float):
        self._run = run
        self._times = times
        # Of steps without a pause in them.
        self._durations: collections.deque[float] = collections.deque(maxlen=101)
        self._steps = 0
        self._paused = False
        self._whole = False  # the step that runs had no pause so far
        self._step_at = time.monotonic()  # when the last step ended
        self._seen_at = self._step_at  # when there was progress
        self._calls = _calls()
        self._over = threading.Event()
        self._looking = threading.RLock()  # a second Ctrl-Z may come within the first
        self._thread = threading.Thread(target=self._watch, name="stall", daemon=True)

    def __enter__(self) -> "Stall":
        self._arm()
        self._thread.start()
        self._catches = threading.current_thread() is threading.main_thread()
        if self._catches and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._catches and signal.getsignal(signal.SIGTSTP) == self._suspend:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._over.set()
        self._thread.join()  # it must not arm again
        faulthandler.cancel_dump_traceback_later()

    def step(self, number: int) -> None:
        now = time.monotonic()
        if self._whole:
            self._durations.append(now - self._step_at)
        self._step_at = now
        self._seen_at = now
        self._steps = number
        self._whole = True

    def pause(self, of: str) -> None:
        self._seen_at = time.monotonic()
        self._paused = True
        self._whole = False

    def resume(self) -> None:
        self._seen_at = time.monotonic()
        self._paused = False

    def limit(self) -> float:
        """Returns the seconds without progress that are allowed now."""
        counts_calls = self._calls[0] is not None
        if self._paused and not counts_calls:
            return UNCOUNTED
        trained = self._steps >= self._run.total_steps
        if self._paused or trained or len(self._durations) < KNOWN:
            return max(ELSEWHERE, LEAST)
        return max(LEAST, self._times * statistics.median(self._durations))

    def _watch(self) -> None:
        """Looks at the run again and again, until it is over."""
        interval = min(5.0, LEAST / 10)  # seconds between two looks
        before = time.monotonic()
        while not self._over.wait(interval):
            with self._looking:
                # What delayed this look, such as a stop of the process, is no silence of the run.
                # A step may have ended meanwhile: it was not seen later than now.
                now = time.monotonic()
                delay = max(0.0, now - before - interval)
                self._seen_at = min(now, self._seen_at + delay)
                before = now
                self._arm()
                self._look()

    def _suspend(self, *_: Any) -> None:
        """Stops the process, as Ctrl-Z does. faulthandler's clock is off meanwhile: it would end
        the process when that continues."""
        with self._looking:
            faulthandler.cancel_dump_traceback_later()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._seen_at = time.monotonic()
            self._whole = False
            self._arm()

    def _arm(self) -> None:
        # A thread that holds Python's lock for ever stops the watchdog, too; faulthandler's, which
        # needs no lock, then writes the stacks and exits with 1.
        faulthandler.dump_traceback_later(self.limit() + LEAST, exit=True, file=STDERR)

    def _look(self) -> None:
        """Ends the process if it has stalled."""
        calls = _calls()
        if calls != self._calls:
            self._calls = calls
            self._seen_at = time.monotonic()

        silent = time.monotonic() - self._seen_at
        if silent <= self.limit() or self._over.is_set():
            return
        if device.compiling_since() is not None:
            self._seen_at = time.monotonic()  # a compilation is no stall
        else:
            self._end(silent)

    def _end(self, silent: float) -> None:
        """Writes the stacks of all threads to the log and the run's folder, and exits."""
        where = "in a pause (evaluation, checkpoint)" if self._paused else "in training"
        file = f"{self._run.path}/stacks/host-{self._run.mesh.process_index}.txt"
        sentence = (
            f"error: no progress for {silent:.0f} s {where} after step {self._steps} "
            f"(limit {self.limit():.0f} s, --stall-after {self._times:g}): "
            f"the stacks of all threads follow, and are in {file}; "
            "the same command resumes from the last checkpoint"
        )
        stacks = _stacks(sentence)
        deadline = time.monotonic() + LINGER
        # What hangs may be the log, a pipe that nobody reads, or the storage.
        writing = [
            threading.Thread(target=_log, args=(stacks,), daemon=True),
            threading.Thread(target=_write, args=(file, stacks), daemon=True),
        ]
        for thread in writing:
            thread.start()
        for thread in writing:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._run.mesh.process_count > 1:
            time.sleep(max(0.0, deadline - time.monotonic()))
        # The loader's workers: one that hangs would stay for ever.
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(EXIT_CODE)


def _calls() -> tuple:
    """Returns how often compiled steps have been called; plain PyTorch does not count."""
    report = device.graph_report()
    return report.get("traced"), report.get("repeated")


def _stacks(sentence: str) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sentence
    for ident, frame in sys._current_frames().items():
        stacks += f"\n\nthread {names.get(ident, ident)}\n"
        stacks += "".join(traceback.format_stack(frame))
    return stacks


def _log(stacks: str) -> None:
    content = stacks.encode()
    while content:  # a pipe takes a part
        content = content[os.write(STDERR, content) :]


def _write(file: str, stacks: str) -> None:
    try:
        with fsspec.open(file, "w", auto_mkdir=True) as out:
            out.write(stacks)
    except Exception as error:  # every store has exceptions of its own
        _log(f"warning: cannot write {file}: {error}\n")
