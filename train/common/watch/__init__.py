"""What watches a run: flags that every script has, that change no number, and that it does not
name.

    profile.py   --profile 20:25     a trace of these steps, for TensorBoard
    stall.py     --stall-after 20    ends a run that hangs, with the stacks of all threads
    goodput.py   --price 1.20        where the time of all starts went, what it cost, and MFU
    bar.py                           the bar of a run on a terminal
    curves.py                        the picture of a run
    board.py                         settings and picture for TensorBoard
    mlperf.py    --log mlperf        the log of MLPerf Training's benchmarks
    tracker.py   --tracker wandb     the same and all numbers for Weights & Biases
    card.py                          the model card of an export in transformers' format
    report.py    --report            start, metrics and result as lines of JSON, for `make accept`

A copy of a script (`make copy`) goes without it; the folder, or any of its files beside this one
(board.py and card.py need curves.py, goodput.py _flops.py), brings the flags back.

A watcher's module has `Flags`, a frozen dataclass with a default for each, and `watcher(flags)`,
which checks them and returns what makes a `hooks.Watcher` of a Run, or None where none is wanted.
It may have `listener(flags)`, too, which returns a `hooks.Listener`, or None. Its name is in ORDER,
below.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

from tyro.conf import OmitArgPrefixes

from train.common import hooks

# Watchers are made, entered and notified in this order. They are left in the opposite order.
#   bar before all others     it is left last: what they print stands above it
#   curves before tracker     tracker's `summary` sends the picture that curves has just drawn
#   board before goodput      what board writes before the first step counts as the run's start
#   goodput before report     report's `step` may kill the process: the clock is written by then
#   profile before report     so is the trace
#   stall before tracker      tracker is left first, and waits for its server: stall watches that
#   report before tracker     report is left after it, and lists the files that tracker has written
ORDER = (
    "bar",
    "board",
    "card",
    "curves",
    "goodput",
    "mlperf",
    "profile",
    "report",
    "stall",
    "tracker",
)
_HERE = {module.name for module in pkgutil.iter_modules(__path__)}  # a copy may lack some
MODULES = {name: importlib.import_module(f"{__name__}.{name}") for name in ORDER if name in _HERE}

Presets = dict[str, tuple[str, Any]]


def watched(main: Callable[[Any], Any], presets: Presets) -> tuple[Callable[[Any], Any], Presets]:
    """Returns a `main` that watches every Run that trains in it, and its presets: those of the
    script, with the flags of all watchers beside those of its Config."""
    script_config = type(next(iter(presets.values()))[1])
    fields = [("config", OmitArgPrefixes[script_config])]
    for name, module in MODULES.items():
        fields.append((name, OmitArgPrefixes[module.Flags], module.Flags()))
    given_type = make_dataclass("Given", fields, frozen=True)

    def watched_main(given: Any) -> Any:
        makers = []
        listeners = []
        for name, module in MODULES.items():
            flags = getattr(given, name)
            make = module.watcher(flags)
            if make is not None:
                makers.append(make)
            if hasattr(module, "listener"):
                listen = module.listener(flags)
                if listen is not None:
                    listeners.append(listen)
        with hooks.made_by(makers, listeners):
            return main(given.config)

    watched_presets = {}
    for name, (text, config) in presets.items():
        watched_presets[name] = (text, given_type(config))
    return watched_main, watched_presets
