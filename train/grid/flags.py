"""The flags of a script, read from its text: a machine that only starts runs can neither import it
nor, with the python3 of a Mac, parse it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import optional
from errors import InputError

TRAIN = Path(__file__).parents[1]
# Script -> its task of make's TASK=, of those whose task has no other script.
TASK_OF_SCRIPT = {
    module.removeprefix("train."): task for task, module in optional.SCRIPTS_OF_TASKS.items()
}
OF_ENCODERS = ("glue", *TASK_OF_SCRIPT)  # whose --model is MODEL= of make
SCRIPTS = ("resnet50", "dlrm", "transformer", *OF_ENCODERS)

# What a flag takes.
SWITCH = "nothing"
NUMBER = "a number"
TEXT = "a text"
SEVERAL = "several values"

NUMBERS = {"int", "float", "None"}


@dataclass(frozen=True)
class Flags:
    """The command line of a script.

    Attributes:
        script: its name in train/.
        presets: their names.
        kinds: what each flag takes, by its name without the dashes before it: "batch-size".
    """

    script: str
    presets: tuple[str, ...]
    kinds: dict[str, str]

    def name_of(self, flag: str) -> str:
        """Returns the name of a flag as it was given, such as --batch_size; of a switch without
        "no-".

        Raises InputError for one that the script does not have.
        """
        name = flag[2:].replace("_", "-")
        if name in self.kinds:
            return name
        positive = name[len("no-") :]
        if name.startswith("no-") and self.kinds.get(positive) == SWITCH:
            return positive
        near = difflib.get_close_matches(name, self.kinds, 1)
        nearest = f" (is it --{near[0]}?)" if near else ""
        raise InputError(
            f"{flag} is no flag of train.{self.script}{nearest}; "
            f"python -m train.{self.script} {self.presets[0]} --help shows all"
        )


def read_flags(script: str) -> Flags:
    """Returns the flags of a script, and those of what watches every run.

    Raises InputError for a script that is not known.
    """
    if script not in SCRIPTS:
        raise InputError(f"{script} is no script of train/; give one of: {', '.join(SCRIPTS)}")

    text = (TRAIN / f"{script}.py").read_text(encoding="utf-8")
    kinds = _kinds_of("Config", text)
    for path in sorted((TRAIN / "common/watch").glob("*.py")):
        kinds.update(_kinds_of("Flags", path.read_text(encoding="utf-8")))
    return Flags(script, _presets(text), kinds)


def _kinds_of(name: str, text: str) -> dict[str, str]:
    """Returns what each flag of a dataclass takes, those of the dataclasses in it among them; {}
    where the text does not define it."""
    kinds = {}
    for field, annotation in re.findall(r"^    (\w+): (.+)", _class(name, text), re.MULTILINE):
        type_name = annotation.partition(" = ")[0]
        nested = _kinds_in_common(type_name)
        if nested:
            kinds.update(nested)
        else:
            kinds[field.replace("_", "-")] = _kind(type_name)
    return kinds


def _class(name: str, text: str) -> str:
    """Returns the lines of a class; "" where it is not there."""
    found = re.search(rf"^class {name}\b.*\n((?:(?: .*)?\n)*)", text, re.MULTILINE)
    return found[1] if found else ""


def _kinds_in_common(name: str) -> dict[str, str]:
    """Returns what each flag takes of a dataclass in train/common, such as Layout; {} where none
    has this name."""
    if not re.fullmatch(r"[A-Z]\w*", name):
        return {}
    for path in sorted((TRAIN / "common").glob("*.py")):
        kinds = _kinds_of(name, path.read_text(encoding="utf-8"))
        if kinds:
            return kinds
    return {}


def _kind(type_name: str) -> str:
    """Returns what a flag takes whose field has this type."""
    if type_name.startswith("tuple["):
        return SEVERAL
    if type_name == "bool":
        return SWITCH
    if set(re.findall(r"\w+", type_name)) <= NUMBERS:
        return NUMBER
    return TEXT


def _presets(text: str) -> tuple[str, ...]:
    """Returns the names of a script's presets."""
    table = re.search(r"^PRESETS = \{\n((?: .*\n)*)\}", text, re.MULTILINE)
    return tuple(re.findall(r'^    "(\w+)":', table[1], re.MULTILINE))
