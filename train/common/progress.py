"""What a person who waits is told: how long a training will still take, and that a step is being
compiled."""

import collections
import contextlib
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# ---- how long a training will still take ---------------------------------------------------------
RECENT = 10  # lines whose speed counts


class _Line(NamedTuple):
    """How far the training had got at a line of metrics."""

    step: int
    seconds: float  # of training, without pauses


@dataclass
class _Pauses:
    """The pauses of one kind, such as evaluations."""

    seconds: float = 0.0  # of all, without compilations
    step: int = 0  # that the last one followed


class Remaining:
    """Estimates how long a training will still take, by what this start of it has seen.

    The speed is the median over the recent lines: a step that compiles, or a laptop that sleeps,
    does not count. Each kind of pause is taken to come again as often as it has come so far, the
    last one after the last step. What has not come yet, such as the first evaluation, is not known.

    Args:
        start: the step that this start resumes from.
        compile_seconds: returns how long this process has compiled so far. A pause compiles once,
            and is shorter from then on.
        may_end_early: the estimate is an upper bound.

    Attributes:
        step: that the pauses from now on follow.
    """

    def __init__(
        self,
        total_steps: int,
        start: int = 0,
        compile_seconds: Callable[[], float] = lambda: 0.0,
        may_end_early: bool = False,
    ):
        self.step = start
        self._total = total_steps
        self._start = start
        self._compile_seconds = compile_seconds
        self._words = "at most" if may_end_early else "about"
        self._lines: collections.deque[_Line] = collections.deque(maxlen=RECENT + 1)
        self._pauses: dict[str, _Pauses] = {}
        self._in_pause = False

    def line(self, step: int, seconds: float) -> None:
        """Notes that the training has taken so many seconds up to a step, without pauses."""
        if self._lines:
            last = self._lines[-1]
            # Lines that were read together have one time: the later one counts.
            if step <= last.step or seconds <= last.seconds:
                self._lines.pop()
        self._lines.append(_Line(step, seconds))

    @contextlib.contextmanager
    def pausing(self, of: str) -> Iterator[None]:
        """Notes how long a pause takes. One inside of another belongs to that."""
        if self._in_pause:
            yield
            return
        self._in_pause = True
        began = time.monotonic()
        compiled = self._compile_seconds()
        try:
            yield
        finally:
            self._in_pause = False
            compiling = self._compile_seconds() - compiled
            self._note_pause(of, max(0.0, time.monotonic() - began - compiling))

    def _note_pause(self, of: str, seconds: float) -> None:
        if self.step <= self._start:
            return  # what a resumed run has to make up for comes once
        pauses = self._pauses.setdefault(of, _Pauses())
        pauses.seconds += seconds
        pauses.step = self.step

    def seconds(self, step: int) -> float | None:
        """Returns the estimate after a step; None where it is not known yet."""
        speeds = []  # seconds per step
        for before, after in itertools.pairwise(self._lines):
            speeds.append((after.seconds - before.seconds) / (after.step - before.step))
        if not speeds:
            return None

        left = statistics.median(speeds) * (self._total - step)
        for pauses in self._pauses.values():
            per_step = pauses.seconds / (pauses.step - self._start)
            left += per_step * (self._total - pauses.step)
        return left

    def text(self, step: int) -> str:
        """Returns "about 3 min left"; "" where it is not known, and after the last step."""
        seconds = self.seconds(step)
        if seconds is None or step >= self._total:
            return ""
        return f"{self._words} {rounded(seconds)} left"


def rounded(seconds: float) -> str:
    """Returns 8 s, 40 s, 3 min, 2 h 10 min or 3 d 4 h: no more exact than an estimate is."""
    if seconds < 9.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 57.5:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{max(1, minutes)} min"
    hours, tens = divmod(round(seconds / 600), 6)  # tens of minutes
    if hours < 24:
        return f"{hours} h {10 * tens:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


# ---- that a step is being compiled ---------------------------------------------------------------
LOOK_EVERY = 1.0  # seconds
FIRST_LINE = 20.0  # seconds of compilation before the first line; the next come at twice as many
# XLA complains about a compilation of two minutes, on the standard error, in words that read like
# an error (xla/service/slow_operation_alarm.cc). This is said just before.
BEFORE_ALARM = 115.0  # seconds
ABOUT_ALARM = (
    'note: XLA says "Very slow compile?" of whatever takes two minutes; that is no error, and '
    "nothing needs to be done: docs/profiling.md"
)

# Shows a notice in place, on a terminal; "" ends it. None: there is no such place.
Show = Callable[[str], None]
_show: Show | None = None


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Inside, notices of compilations change in place, where `show` shows them. It is called from
    other threads."""
    global _show
    before = _show
    _show = show
    try:
        yield
    finally:
        _show = before


@contextlib.contextmanager
def telling(step_name: str) -> Iterator[None]:
    """Inside, tells that a step, such as train_step, is being compiled, and how long already.

    Without a place on a terminal these are lines on the standard error, for what takes long.
    """
    over = threading.Event()
    told = threading.Thread(target=_tell, args=(step_name, over), name="compiling", daemon=True)
    told.start()
    try:
        yield
    finally:
        over.set()
        told.join()


def _tell(step_name: str, over: threading.Event) -> None:
    """Tells of a compilation until it is over."""
    began = time.monotonic()
    next_line = FIRST_LINE
    alarm_is_near = False
    show = None  # where it was shown last
    while not over.wait(LOOK_EVERY):
        seconds = time.monotonic() - began
        notice = f"compiling the {step_name.replace('_', ' ')}, {seconds:.0f} s so far"
        show = _show
        if show is not None:
            show(notice)
        elif seconds >= next_line:
            next_line *= 2
            _print(notice)
        if seconds >= BEFORE_ALARM and not alarm_is_near:
            alarm_is_near = True
            _print(ABOUT_ALARM)
    if show is not None:
        show("")


def _print(line: str) -> None:
    # One write: no other thread's words get between the line and its end.
    print(f"{line}\n", end="", file=sys.stderr, flush=True)
