"""The command line of a script: presets and flags from its Config, one sentence for what the user can fix."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from errors import InputError

# What makes a preset a trial: it needs no files, no TPU and no second core.
TRIAL = {"data": "synthetic", "precision": "float32", "workers": 0}


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)  # --mesh, not --layout.mesh
@dataclass(frozen=True)
class Layout:
    """Flags that change memory and speed, but no number beyond rounding: a resumed run may have others."""

    mesh: str = ""  # devices by axis, such as data=4,model=2: model cuts the layers themselves; "": none for model
    shard_state: Literal["none", "optimizer", "full"] = "none"  # cut over data: optimizer's state; full: weights too
    remat: bool = False  # keeps of each layer its input only and computes it again in the backward pass


WHOLE = Layout()  # on every device


def run(main: Callable[[Any], Any], presets: dict[str, tuple[str, Any]]) -> None:
    """Runs `main(config)` for `python -m train.<script> PRESET [--flag value …]`; PRESET --help shows every field.

    `presets`: name -> (one line about it, Config). An InputError ends the process with one line, `error: …`, and exit
    code 2; any other exception keeps its traceback. Where train/common/watch is, its flags are there, too.
    """
    if importlib.util.find_spec("train.common.watch"):
        main, presets = importlib.import_module("train.common.watch").watched(main, presets)
    config = tyro.extras.overridable_config_cli(presets)
    try:
        main(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def at_least(config: Any, low: float, *fields: str, above: bool = False, below: float | None = None) -> None:
    """Raises an InputError that names the first of the config's fields whose value is below `low` (or equal, where it
    must be `above`), not `below` the other bound, or NaN."""
    expected = f"{'above' if above else 'at least'} {low}" + (f" and below {below}" if below else "")
    for field in fields:
        value = getattr(config, field)
        if not value >= low or (above and value == low) or (below and value >= below):
            raise InputError(f"--{field.replace('_', '-')} is {value}; it must be {expected}")


def need_data(config: Any, what: str) -> None:
    """Raises an InputError that says what to give where config.data is empty."""
    if not config.data:
        raise InputError(f"--data is missing: give {what}; `--data synthetic` is a trial")
