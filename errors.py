"""The one exception that is the user's to fix, and what a copy of a script may lack."""

import importlib.util
from types import ModuleType


class InputError(ValueError):
    """Reports something the user gave that cannot be used: a path, a file, a flag.

    The message names the value, what was expected and what to do. The command line prints it as one line, without a
    traceback; every other exception is a bug and keeps its traceback.
    """


def optional_module(name: str, needed_by: str, option: str) -> ModuleType:
    """Imports a module that only some copies of a script have, for what it is `needed_by`; raises InputError, with the
    option of `make copy` that brings it, where it is not there."""
    if importlib.util.find_spec(name) is None:
        raise InputError(f"{needed_by} needs {name}, not in this copy: make copy … {option} brings it to a new one")
    return importlib.import_module(name)
