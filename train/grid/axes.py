"""Which flags vary, and the runs that follow from that: all combinations of their values."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from train.grid.flags import NUMBER, SEVERAL, SWITCH, Flags, read_flags

SEED = "seed"
RUNS = "runs"  # where runs go, unless --runs says it
# Flags of a command line that are the grid's: the runs get others, or none.
OWN = ("name", "runs", "metric")
LONGEST_NAME = 100  # letters of a run's name that the launcher takes
LONGEST_VALUE = 40  # letters of a value in a name

EXAMPLE = '--lr 2e-5 3e-5 --seed 0 1 2 (with make: ARGS="--lr 2e-5 3e-5 --seed 0 1 2")'


@dataclass(frozen=True)
class Planned:
    """A run of a grid, as it is to be started.

    Attributes:
        name: of its folder; that of the grid's prefix and the values of all axes.
        values: of the axes, by the names of their flags.
        flags: of the script, without --runs and --name.
    """

    name: str
    values: dict[str, str]
    flags: list[str]


@dataclass(frozen=True)
class Grid:
    """All runs of a command line.

    Attributes:
        script, preset: what each run begins with.
        name: of its folder.
        runs_root: folder or URL that the runs' folders are in.
        folder: of the grid's own files, on this machine.
        axes: the values of each flag that varies; of the seed last.
        fixed: the other flags.
        metric: which the table is about; "": the first of a run. "-loss": lower is better.
        runs: in the order in which they are started.
    """

    script: str
    preset: str
    name: str
    runs_root: str
    folder: Path
    axes: dict[str, list[str]]
    fixed: list[str]
    metric: str
    runs: list[Planned]

    def configuration(self, values: dict[str, str]) -> tuple[str, ...]:
        """Returns the values of all axes but the seed."""
        return tuple(value for axis, value in values.items() if axis != SEED)


def plan(words: list[str]) -> Grid:
    """Returns the grid of a command line SCRIPT PRESET [--flag value …].

    Raises InputError where it has no such flags, or nothing varies.
    """
    flags, preset = _script_and_preset(words)
    given = _given(words[2:], flags)
    own = {name: _own_value(name, given.pop(name, None)) for name in OWN}
    _refuse_evaluation(given)

    axes = {}
    fixed = []
    for name, one in given.items():
        _check_values(name, one, flags)
        varies = flags.kinds[name] not in (SEVERAL, SWITCH) and len(one.values) > 1
        if varies:
            axes[name] = one.values
        else:
            fixed += one.words()
    if not axes:
        raise InputError(
            f"nothing varies: give a flag more than one value, such as {EXAMPLE}; "
            "a flag that takes several values, such as --lengths, is one setting"
        )
    if SEED in axes:
        axes[SEED] = axes.pop(SEED)  # the last

    prefix = own["name"] or _prefix(flags.script, preset, given)
    name = own["name"] or "-".join([prefix, *sorted(axes, key=in_names)])
    _check_name(name)
    root = _root(own["runs"])
    return Grid(
        script=flags.script,
        preset=preset,
        name=name,
        runs_root=f"{root}/{name}",
        folder=_folder(root, name),
        axes=axes,
        fixed=fixed,
        metric=own["metric"],
        runs=_combinations(prefix, axes, fixed, flags),
    )


# ---- the command line ----------------------------------------------------------------------------


@dataclass
class _Given:
    """A flag as it was given: --no-strict, or --lr and its values."""

    flag: str
    values: list[str]

    def words(self) -> list[str]:
        """Returns it as words of a command line."""
        if len(self.values) == 1 and self.values[0].startswith("-"):
            return [f"{self.flag}={self.values[0]}"]
        return [self.flag, *self.values]


def _script_and_preset(words: list[str]) -> tuple[Flags, str]:
    """Returns the flags of the script, and the preset, with which a command line begins."""
    if not words:
        raise InputError("the script is missing; give SCRIPT PRESET and flags, such as glue tiny")
    flags = read_flags(words[0])
    presets = ", ".join(flags.presets)
    if len(words) == 1 or words[1] not in flags.presets:
        found = f", not {words[1]}" if len(words) > 1 else ""
        raise InputError(f"the preset follows the script{found}; PRESET is one of: {presets}")
    return flags, words[1]


def _given(words: list[str], flags: Flags) -> dict[str, _Given]:
    """Returns the flags of a command line by their names. What does not begin with two dashes is a
    value of the flag before it."""
    given = {}
    last = None
    for word in words:
        if not word.startswith("--"):
            if last is None:
                raise InputError(f"{word} is no flag, and follows none")
            last.values.append(word)
            continue

        flag, equals, value = word.partition("=")
        name = flag[2:]
        if name not in OWN:
            name = flags.name_of(flag)
        if name in given:
            raise InputError(
                f"{flag} is given twice; give all its values after one, such as {EXAMPLE}"
            )
        last = _Given(flag, [value] if equals else [])
        given[name] = last
    return given


def _own_value(name: str, given: _Given | None) -> str:
    """Returns the value of a flag of the grid; "" where it is not given."""
    if given is None:
        return ""
    if len(given.values) != 1 or not given.values[0]:
        values = " ".join(given.values) or "empty"
        raise InputError(f"--{name} is {values}; it takes one value")
    return given.values[0]


def _refuse_evaluation(given: dict[str, _Given]) -> None:
    """Raises InputError for flags that train nothing, or that end a run on purpose."""
    for name in ("evaluate", "split"):
        if name in given:
            raise InputError(f"--{name} trains nothing, and a grid trains; leave it out")
    if "kill-at" in given:
        raise InputError("--kill-at ends a run before its end; leave it out of a grid")


def _check_values(name: str, given: _Given, flags: Flags) -> None:
    """Raises InputError where a flag has too few values, or one of them twice."""
    kind = flags.kinds[name]
    if kind == SWITCH:
        if given.values:
            raise InputError(
                f"{given.flag} takes no value, and is followed by {given.values[0]}; "
                "what is on or off cannot vary: make a grid for each"
            )
        return
    if not given.values and kind != SEVERAL:
        raise InputError(f"{given.flag} needs a value")
    for value in given.values:
        if len(value.splitlines()) > 1:
            raise InputError(
                f"{given.flag} is {value!r}, which has a line break; give values of one line, "
                "since the table has a line for each"
            )
    if kind == SEVERAL:
        return

    first_of = {}
    for value in given.values:
        same = canonical(value, kind)
        if same in first_of:
            raise InputError(
                f"{given.flag} has the same value twice: {first_of[same]} and {value}; "
                "it would be one run: leave one out"
            )
        first_of[same] = value


def canonical(value: str, kind: str) -> str:
    """Returns the same text for all ways to write a number, 2e-5 for 0.00002 and 2E-05."""
    if kind != NUMBER:
        return value
    with contextlib.suppress(ValueError):
        return str(int(value))
    with contextlib.suppress(ValueError):
        number = float(value)
        if number.is_integer() and abs(number) < 1e15:
            return str(int(number))
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", repr(number)).replace("e+", "e")
    return value


# ---- names ---------------------------------------------------------------------------------------


def _prefix(script: str, preset: str, given: dict[str, _Given]) -> str:
    """Returns what the names of a grid and its runs begin with: what is trained."""
    words = [script]
    if "model" in given and len(given["model"].values) == 1:
        words = [given["model"].values[0]]
        if script != "glue":
            words.append(script)
    if "task" in given and len(given["task"].values) == 1:
        words.append(given["task"].values[0])
    if preset != "full":
        words.append(preset)
    return _safe("-".join(words))


def _check_name(name: str) -> None:
    """Raises InputError where a name is not that of one folder, or of a run on a TPU."""
    if not re.fullmatch(r"\w[\w.-]{0,59}", name, re.ASCII):
        raise InputError(
            f"the grid's name is {name}; --name (with make: NAME=) takes up to 60 letters, digits "
            "and .-_"
        )


def _root(given: str) -> str:
    """Returns the folder or URL of all runs, as --runs gives it."""
    root = given or RUNS
    if root.startswith("file://"):
        root = root[len("file://") :]
    return os.path.expanduser(root).rstrip("/") or "/"


def _folder(root: str, name: str) -> Path:
    """Returns the folder of the grid's own files: on this machine, where its runs may be in a
    bucket."""
    return Path(RUNS if "://" in root else root, name)


def _combinations(
    prefix: str, axes: dict[str, list[str]], fixed: list[str], flags: Flags
) -> list[Planned]:
    """Returns a run for each combination of the axes' values. All configurations get their first
    seed before one gets the second: what is there so far can be compared."""
    others = [axis for axis in axes if axis != SEED]
    order = [SEED, *others] if SEED in axes else others
    runs = []
    for chosen in itertools.product(*(axes[axis] for axis in order)):
        value_of = dict(zip(order, chosen))  # noqa: B905 - of python3.10 on
        values = {axis: value_of[axis] for axis in axes}
        varied = []
        for axis, value in values.items():
            varied += _Given(f"--{axis}", [value]).words()
        runs.append(Planned(run_name(prefix, values, flags), values, [*fixed, *varied]))

    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two runs would be named {name}; give values that differ more")
    return runs


def as_flags(values: dict[str, str]) -> str:
    """Returns values of axes as a shell takes them: --data 'a b' --seed 0."""
    words = []
    for axis, value in values.items():
        words += [f"--{axis}", value]
    return shlex.join(words)


def in_names(axis: str) -> tuple[bool, str]:
    """Returns what the axes are sorted by in names: the alphabet, and the seed last."""
    return axis == SEED, axis


def run_name(prefix: str, values: dict[str, str], flags: Flags) -> str:
    """Returns the name of a run: the same for the same values, in whatever order and however their
    numbers are written."""
    words = [prefix]
    for axis in sorted(values, key=in_names):
        words += [axis, _safe(canonical(values[axis], flags.kinds[axis]))]
    return _shortened("-".join(words), LONGEST_NAME)


def _safe(value: str) -> str:
    """Returns a value as a part of a file's name. Where that is not all of it, its hash follows."""
    safe = re.sub(r"[^\w.-]+", "-", value, flags=re.ASCII).strip("-.") if value else "empty"
    if value.startswith("-"):
        safe = f"-{safe}"  # a negative number
    if safe == value or value == "":
        return _shortened(safe, LONGEST_VALUE)
    return f"{safe[-LONGEST_VALUE:].strip('-.')}-{_hash(value)}"


def _shortened(name: str, longest: int) -> str:
    """Returns a name that has at most so many letters: of a longer one the beginning and a hash."""
    if len(name) <= longest:
        return name
    digest = _hash(name)
    return f"{name[: longest - len(digest) - 1].rstrip('-.')}-{digest}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
