"""The command line of a script: presets and flags from its Config, and one sentence for what the
user can fix."""

import contextlib
import difflib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import tyro
from tyro import _errors as tyro_errors  # private, hence tyro's exact version in requirements.txt

import optional
from errors import InputError, LostProcess
from train.common import interrupt

# What makes a preset a trial: it needs no files, no TPU and no second core.
TRIAL = {"data": "synthetic", "precision": "float32", "workers": 0}


# Values that flags of earlier versions took, and what is said of them.
_PLAN_REMOVED = "was removed: use --plan auto, exchange or data, which also restore its checkpoints"
REMOVED = {
    ("--plan", "row"): _PLAN_REMOVED,
    ("--plan", "table"): _PLAN_REMOVED,
    ("--plan", "column"): _PLAN_REMOVED,
}

STDOUT = 1  # file descriptor
FIRST_PRINTS = 10  # seconds that other processes leave the first one to print an error
# Seconds in which the process that was lost comes to its own end, and its exit code is the first.
LOST_LINGERS = 3
READER_LEFT = (
    "error: ended, since the program that read the output has ended, such as head in `| head`; "
    "the same command resumes an unfinished run; `> log` needs no reader"
)

# The flags of the command line whose `main` runs, as names of fields; None: Python has called it.
_given: frozenset[str] | None = None


def run(
    main: Callable[[Any], Any],
    presets: dict[str, tuple[str, Any]],
    preset_of: Callable[[str], str] | None = None,
) -> None:
    """Runs `main(config)` for `python -m train.<script> PRESET [--flag value …]`; PRESET --help
    shows every field.

    An InputError ends the process with one line, `error: …`, and exit code 2; so does Ctrl-C before
    the training, with 130 and at the latest two seconds later, and a reader of the output that has
    left, with 141. Any other exception keeps its traceback. Where train/common/watch is, its flags
    are there, too.

    Args:
        presets: name -> (one line about it, Config).
        preset_of: returns the preset for the value of --data, where the command line has none.
    """
    prog = f"python -m {_module(main)}"
    if optional.is_here("watch"):
        main, presets = optional.load("watch").watched(main, presets)
    try:
        with interrupt.ended():
            arguments = sys.argv[1:]
            if preset_of is not None and arguments and arguments[0].startswith("--"):
                arguments = _with_preset(presets, prog, arguments, preset_of)
            config = parse(presets, prog, arguments)
            with _giving(sys.argv[1:]):
                main(config)
    except InputError as error:
        _leave_to_the_first()
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except LostProcess as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        time.sleep(LOST_LINGERS)
        sys.exit(1)
    except KeyboardInterrupt:
        print(interrupt.ENDED, file=sys.stderr, flush=True)
        sys.exit(interrupt.CODE)
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # What is flushed at the end of the process goes nowhere, and fails no more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        print(READER_LEFT, file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGPIPE)


def _leave_to_the_first() -> None:
    """Gives the first process of several the time to print the same error alone: when it has ended,
    torchrun ends the others."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        time.sleep(FIRST_PRINTS)


def _reader_has_left() -> bool:
    """Returns whether the standard output is a pipe that nobody reads any more."""
    output = select.poll()
    output.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


@contextlib.contextmanager
def _giving(arguments: list[str]) -> Iterator[None]:
    """Makes the flags of a command line those of `given`."""
    global _given
    names = set()
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            names.add(name.removeprefix("no_"))
    _given = frozenset(names)
    try:
        yield
    finally:
        _given = None


def given(config: Any) -> frozenset[str]:
    """Returns the names of the fields that the user has given.

    On a command line these are its flags, those of watchers too. Where Python calls the script,
    they are the fields of its Config that differ from their defaults.
    """
    if _given is not None:
        return _given
    defaults = flat(type(config)())
    return frozenset(name for name, value in flat(config).items() if value != defaults[name])


def flat(config: Any) -> dict[str, Any]:
    """Returns the values of a dataclass's fields by name, those of the dataclasses in it among
    them, as their flags are."""
    values = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            values |= flat(value)
        else:
            values[field.name] = value
    return values


def _with_preset(
    presets: dict[str, tuple[str, Any]],
    prog: str,
    arguments: list[str],
    preset_of: Callable[[str], str],
) -> list[str]:
    """Returns a command line without a preset with the one that its --data needs, and says which;
    one that cannot be used stays as it is."""
    anyone = next(iter(presets))
    try:
        data = flat(parse(presets, prog, [anyone, *arguments]))["data"]
    except InputError:
        if any(argument in presets for argument in arguments):  # it is there, but not the first
            return arguments
        raise
    preset = preset_of(data)
    if data:
        print(f"preset {preset}, chosen by what {data} holds", flush=True)
    return [preset, *arguments]


def _module(main: Callable) -> str:
    """Returns the module that `python -m` runs, in which `main` is."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if main.__module__ == "__main__" and spec else main.__module__


def parse(
    presets: dict[str, tuple[str, Any]], prog: str, arguments: list[str] | None = None
) -> Any:
    """Returns the Config of a command line, by default this process's; raises InputError, with one
    sentence, where it cannot be used. `prog`: how the program is started."""

    if arguments is None:
        arguments = sys.argv[1:]
    arguments = _joined(arguments)

    def refuse(event: tyro_errors.ParseErrorEvent) -> None:
        raise InputError(_sentence(event, presets, prog, arguments))

    with tyro_errors.on_parse_error(refuse):
        return tyro.extras.overridable_config_cli(presets, prog=prog, args=arguments)


def _joined(arguments: list[str]) -> list[str]:
    """Returns arguments with `--best=-loss` for `--best -loss`: a word that begins with one minus
    is a value, which tyro would take for a flag."""
    joined = []
    for argument in arguments:
        is_value = re.match(r"-[a-zA-Z]\w", argument)
        if is_value and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _sentence(
    event: Any, presets: dict[str, tuple[str, Any]], prog: str, arguments: list[str]
) -> str:
    """Returns what is wrong with a command line, and the nearest that is right."""
    preset = arguments[0] if arguments and arguments[0] in presets else None
    if preset is None:
        given = f", not {arguments[0]}{_nearest(arguments[0], presets)}" if arguments else ""
        return (
            f"the preset comes first{given}: {prog} PRESET [--flag value …]; "
            f"PRESET is one of: {', '.join(presets)}"
        )

    helped = f"{prog} {preset} --help shows all flags"
    if isinstance(event, tyro_errors.UnrecognizedArgs):
        unknown = event.tokens[0]
        nearest = _nearest(unknown.partition("=")[0], _flags(presets[preset][1]))
        return f"{unknown} is no flag{nearest}; {helped}"
    if isinstance(event, tyro_errors.InvalidChoice):
        removed = REMOVED.get((_flag(event.argument), event.value))
        if removed:
            return f"{_flag(event.argument)} {event.value} {removed}"
        return (
            f"{_flag(event.argument)} is {event.value}{_nearest(event.value, event.choices)}; "
            f"it must be one of: {', '.join(event.choices)}"
        )
    if isinstance(event, tyro_errors.InstantiationFailure) and event.argument is not None:
        expected = event.argument.lowered.metavar
        reason = " ".join(event.message.split())
        return f"{_flag(event.argument)} cannot be used: {reason}; expected {expected}; {helped}"
    if isinstance(event, tyro_errors.BadValue):
        return f"{_flag(event.argument)} needs {event.argument.lowered.metavar}; {helped}"
    return f"the command line cannot be used: {' '.join(arguments)}; {helped}"


def _nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question after the most similar of the known words; "" if none is similar."""
    plain = {one.strip("-").replace("-", ""): one for one in known}
    found = difflib.get_close_matches(word.strip("-").replace("-", "").replace("_", ""), plain, 1)
    return f" (is it {plain[found[0]]}?)" if found else ""


def _flag(argument: Any) -> str:
    return argument.lowered.name_or_flags[-1]


def _flags(config: Any) -> list[str]:
    """Returns the flags of a dataclass's fields, those of the dataclasses in it among them."""
    flags = []
    for field in fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if is_dataclass(value):
            flags += _flags(value)
        else:
            flags += [f"--{name}", f"--no-{name}"] if isinstance(value, bool) else [f"--{name}"]
    return flags


def at_least(
    config: Any, low: float, *fields: str, above: bool = False, below: float | None = None
) -> None:
    """Raises an InputError that names the first of the config's fields whose value is below `low`
    (or equal, where it must be `above`), not `below` the other bound, or NaN. None, a value that a
    script chooses later, passes."""
    upper_bound = f" and below {below}" if below else ""
    expected = f"{'above' if above else 'at least'} {low}{upper_bound}"
    for field in fields:
        value = getattr(config, field)
        if value is None:
            continue
        if not value >= low or (above and value == low) or (below and value >= below):
            raise InputError(f"--{field.replace('_', '-')} is {value}; it must be {expected}")


def need_data(config: Any, what: str) -> None:
    """Raises an InputError that says what to give where config.data is empty."""
    if not config.data:
        raise InputError(f"--data is missing: give {what}; `--data synthetic` is a trial")
