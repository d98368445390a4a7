"""The command line of a script: presets and flags from its Config, one sentence for what the user can fix."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import tyro

from errors import InputError

# What makes a preset a trial: it needs no files, no TPU and no second core.
TRIAL = {"data": "synthetic", "precision": "float32", "workers": 0}


def run(main: Callable[[Any], Any], presets: dict[str, tuple[str, Any]]) -> None:
    """Runs `main(config)` for `python -m train.<script> PRESET [--flag value …]`; --help shows every field.

    An InputError ends the process with one line, `error: …`, and exit code 2; any other exception keeps its traceback.

    Args:
        presets: name -> (one line about it, Config); flags override the preset's fields.
    """
    config = tyro.extras.overridable_config_cli(presets)
    try:
        main(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def at_least(config: Any, low: float, *fields: str) -> None:
    """Raises an InputError that names the first of the config's fields whose value is below `low`, or is NaN."""
    _check(config, fields, lambda value: value >= low, f"at least {low}")


def above(config: Any, low: float, *fields: str) -> None:
    """Raises an InputError that names the first of the config's fields whose value is not above `low`."""
    _check(config, fields, lambda value: value > low, f"above {low}")


def below_one(config: Any, *fields: str) -> None:
    """Raises an InputError that names the first of the config's fields whose value is not in [0, 1)."""
    _check(config, fields, lambda value: 0 <= value < 1, "at least 0 and below 1")


def _check(config: Any, fields: Iterable[str], fits: Callable[[Any], bool], expected: str) -> None:
    for field in fields:
        if not fits(getattr(config, field)):
            raise InputError(f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be {expected}")


def need_data(config: Any, what: str) -> None:
    """Raises an InputError that says what to give where config.data is empty."""
    if not config.data:
        raise InputError(f"--data is missing: give {what}; `--data synthetic` is a trial")
