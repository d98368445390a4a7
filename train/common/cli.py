"""The command line of a script: presets and flags from its Config, one sentence for what the user can mend."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from errors import InputError


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
