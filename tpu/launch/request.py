"""What the user asks of a run: the arguments of `make train` on the workers, and the run's variables.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import os
import re
import shlex

from errors import InputError

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


def read_words(words: list[str], run: str) -> tuple[list[str], str]:
    """Returns the arguments of `make train` on the workers, without NAME=, and the run's name ("": none was given).

    Values arrive as they are: make would expand a `$`, so it is doubled. InputError: a word is not NAME=value.
    """
    kept = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{word} after -- is not an argument of make train; write NAME=value")
        if name in ("TPU", "ZONE", "PROJECT", "ENV", "RUN", "RETRIES"):
            raise InputError(f"{name}= is for this machine, not for the workers; give --{name.lower()}")
        if name == "NAME":
            if run and value and run != value:
                raise InputError(f"the run has two names, RUN={run} and NAME={value}; give one")
            run = run or value
        elif value:
            kept.append(f"{name}={value}".replace("$", "$$"))
    if run and not re.fullmatch(r"\w[\w.-]*", run, re.ASCII):
        raise InputError(f"RUN={run} is not the name of one folder; use letters, digits, points, hyphens, underscores")
    return kept, run


def runs_folder(words: list[str]) -> str:
    """Returns the folder where `make train` with these arguments puts its runs: --runs in ARGS, "" if there is none."""
    arguments = next((word[5:] for word in words if word.startswith("ARGS=")), "")
    try:
        parts = shlex.split(arguments)
    except ValueError:  # the shell on the worker will say so
        parts = arguments.split()
    folder = ""
    for part, value in zip(parts, [*parts[1:], ""]):  # noqa: B905 - strict= needs Python 3.10
        name, equals, own = part.partition("=")
        if name == "--runs":
            folder = own if equals else value
    return folder.rstrip("/").replace("$$", "$")  # see read_words


def read_environment(assignments: str, names: list[str]) -> dict[str, str]:
    """Returns the run's variables: those of ENV="A=b C='d e'", and the secrets that are set here.

    InputError: ENV is not a list of assignments; a secret named by --secret is not set here.
    """
    try:
        parts = shlex.split(assignments)
    except ValueError as error:
        raise InputError(f"ENV={assignments} cannot be read ({error}); write ENV=\"A=b C='d e'\"") from None
    environment = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    for name in names:
        if name not in os.environ:
            raise InputError(f"--secret {name}: this variable is not set here; export it first")
        environment[name] = os.environ[name]
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{part} in ENV is not an assignment; write ENV=\"A=b C='d e'\"")
        environment[name] = value
    return environment
