"""What watches a run: flags that every script has, that change no number, and that it does not name.

    profile.py   --profile 20:25     a trace of these steps, for TensorBoard
    stall.py     --stall-after 20    ends a run that hangs, with the stacks of all threads
    goodput.py   --price 1.20        where the time of all starts went, what it cost, and MFU
    curves.py                        the picture of a run
    board.py                         settings and picture for TensorBoard
    tracker.py   --tracker wandb     the same and all numbers for Weights & Biases
    card.py                          the model card of an export in transformers' format
    report.py    --report            start, metrics and result as lines of JSON, which `make accept` reads

A copy of a script (`make copy`) goes without it; the folder, or any of its files beside this one (board.py and card.py
need curves.py, goodput.py _flops.py), brings the flags back.

A watcher is a context manager around the training loop (it is left whatever ends that) with
    step(number)      after each call of the train step, before a checkpoint of it
    pause(of)         where an evaluation or a checkpoint begins: of is "evaluation" or "checkpoints"
    resume()          where it has ended
    line(step, values, timing)   after a line of metrics.jsonl is written: the dicts that it consists of
    summary()         what summary.json gets when the run has finished, as a dict; run.summary has the rest
Its module has `Flags`, a frozen dataclass with a default for each, and `watcher(flags)`, which checks them and returns
what makes a watcher of a Run, or None where none is wanted.
"""

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from typing import Any

from tyro.conf import OmitArgPrefixes

from train.common.run import Run


class Watcher(contextlib.AbstractContextManager):
    """A watcher that does nothing; see above."""

    def __exit__(self, *_: Any) -> None:
        pass

    def step(self, number: int) -> None:
        pass

    def pause(self, of: str) -> None:
        pass

    def resume(self) -> None:
        pass

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        return {}


# After Watcher, which they import.
NAMES = [name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")]
WATCHERS = {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
Presets = dict[str, tuple[str, Any]]


def watched(main: Callable[[Any], Any], presets: Presets) -> tuple[Callable[[Any], Any], Presets]:
    """Returns a `main` that watches every Run that trains in it, and its presets: those of the script, with the flags
    of all watchers beside those of its Config."""
    groups = [(name, OmitArgPrefixes[module.Flags], module.Flags()) for name, module in WATCHERS.items()]
    config = type(next(iter(presets.values()))[1])
    given = make_dataclass("Given", [("config", OmitArgPrefixes[config]), *groups], frozen=True)

    def watched_main(given: Any) -> Any:
        wanted = [module.watcher(getattr(given, name)) for name, module in WATCHERS.items()]
        before, Run.watch = Run.watch, staticmethod(functools.partial(_watching, [make for make in wanted if make]))
        try:
            return main(given.config)
        finally:
            Run.watch = staticmethod(before)

    return watched_main, {name: (text, given(preset)) for name, (text, preset) in presets.items()}


@contextlib.contextmanager
def _watching(makers: list[Callable[[Run], Watcher]], run: Run) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yields a function that tells an event to all watchers of a run, and returns what they return, in one dict."""
    with contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(make(run)) for make in makers]

        def tell(event: str, *facts: Any) -> dict[str, Any]:
            found = [getattr(watcher, event)(*facts) for watcher in watchers]
            return {key: value for each in found if each for key, value in each.items()}

        yield tell
