"""The bar at the bottom of a terminal: how far the training is, how long it will still take, what
it waits for.

     47%|███████████████▌                 | 120/256  about 20 s left

It is there only where the standard output is a terminal, and the main process's; a file, a pipe
(`| tee log`), a notebook or a pod gets none of it. What is printed meanwhile stands above the bar
in whole lines. tqdm draws it, so TQDM_DISABLE=1 in the environment leaves it out.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from train.common import progress
from train.common.hooks import Watcher

FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}"
DRAW_EVERY = 0.5  # seconds
NARROWEST = 40  # columns; a terminal of none, which containers have, has no size that is known
ERASE = "\x1b[K"  # the line from here on, in a terminal's language
PAUSES = {"checkpoints": "checkpoint"}  # what the bar calls a pause, where that is another word


@dataclass(frozen=True)
class Flags:
    """None: it is there on a terminal."""


def watcher(flags: Flags) -> Callable[[Any], Watcher] | None:
    """Returns what makes the bar of a Run; None where there is no terminal."""
    if not on_terminal():
        return None
    return lambda run: Bar(run) if run.mesh.main_process else Watcher()


def on_terminal() -> bool:
    """Returns whether the standard output is a terminal on which a line can change in place."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
        return sys.stdout.isatty() and columns >= NARROWEST
    except (AttributeError, OSError, ValueError):  # none, or closed, or no file
        return False


class Line(tqdm):
    """A bar that leaves the cursor at its beginning: what others write to the terminal, such as
    XLA's C++, replaces it rather than to follow it."""

    monitor_interval = 0  # no thread that draws it once more where the training stands still

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """Returns what replaces the line on the terminal."""

        def show(text: str) -> None:
            if in_foreground(file):
                file.write(f"\r{ERASE}{text}\r")
                file.flush()

        return show


def in_foreground(file: TextIO) -> bool:
    """Returns whether this process may draw on its terminal: after Ctrl-Z and `bg`, or with `&`, a
    shell's prompt is there."""
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not the terminal that controls this process, or it is gone
        return True


class Above(DummyTqdmFile):
    """A stream to the terminal whose lines appear above the bar, each whole."""

    # tqdm clears the bars whose file is that of the text, or which are both among sys.stdout and
    # sys.stderr: these are of this class now.
    def __eq__(self, other: object) -> bool:
        return self._wrapped == getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


class Bar(Watcher):
    """The bar of one run."""

    def __init__(self, run: Any):
        self._run = run
        self._state = ""  # what the training does or will take
        self._ending = contextlib.ExitStack()
        self._line = Line(
            total=run.total_steps,
            initial=run.start,
            file=sys.stdout,
            leave=False,
            mininterval=DRAW_EVERY,
            miniters=1,  # a step after quick ones may be slow: each looks at the clock
            dynamic_ncols=True,
            bar_format=FORMAT,
        )

    def __enter__(self) -> "Bar":
        if not self._line.disable:
            enter = self._ending.enter_context
            enter(contextlib.redirect_stdout(Above(sys.stdout)))
            if sys.stderr is not None and sys.stderr.isatty():
                enter(contextlib.redirect_stderr(Above(sys.stderr)))
            enter(progress.shown_by(self._show_notice))
        # Before the others: a stream may have the beginning of a line left to write.
        self._ending.callback(self._line.close)
        return self

    def __exit__(self, *_: Any) -> None:
        self._ending.close()

    def step(self, number: int) -> None:
        self._line.update(number - self._line.n)

    def pause(self, of: str) -> None:
        self._show(PAUSES.get(of, of))

    def resume(self) -> None:
        self._show(self._run.remaining.text(self._line.n))

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        if not any(key.startswith("eval/") for key in values):
            self._show(self._run.remaining.text(step))

    def _show(self, state: str) -> None:
        self._state = state
        self._line.set_description_str(state)

    def _show_notice(self, notice: str) -> None:
        """Shows what a thread tells of a compilation, or again the state of the training."""
        self._line.set_description_str(notice or self._state)
