"""What a script itself says of the runs of a grid, before the first of them starts.

    python -m train.grid.check <question >answer

question: {"script": "glue", "look": true, "runs": [["tiny", "--lr", "2e-5", "--name", "x"], …]}
answer:   the last line: a JSON list, a dict for each run: {"error": "--lr is -1; …"}, or
          {"state": "new"}, or unfinished, or finished

Each run's command line is read, its values checked by the script's `validate` and by what watches
it, and its folder, if `look`, compared with it as its start will do. It needs the environment.
"""

import importlib
import json
import sys
from typing import Any

import optional
from errors import InputError
from train.common import cli
from train.common.run_folder import RunFolder
from train.grid.records import FINISHED, NEW, UNFINISHED

# What a script chooses after `validate` where it is empty: the teacher of a trial.
CHOSEN_LATER = ("teacher",)


def main() -> None:
    """Answers the question on the standard input."""
    question = json.load(sys.stdin)
    script = importlib.import_module(f"train.{question['script']}")
    answers = []
    for arguments in question["runs"]:
        try:
            config = read(script, arguments)
            state = state_of(script, config) if question["look"] else NEW
            answers.append({"state": state})
        except InputError as error:
            answers.append({"error": str(error)})
    print(json.dumps(answers), flush=True)


def read(script: Any, arguments: list[str]) -> Any:
    """Returns the validated Config of a command line; InputError where it cannot be used."""
    validate = script.validate
    presets = script.PRESETS
    if optional.is_here("watch"):
        validate, presets = optional.load("watch").watched(validate, presets)
    return validate(cli.parse(presets, f"python -m {script.__name__}", arguments))


def state_of(script: Any, config: Any) -> str:
    """Returns how far a run has come; InputError where its folder has a run of other values."""
    may_differ = [*script.MAY_CHANGE]
    for name, value in cli.flat(config).items():
        if value is None or (name in CHOSEN_LATER and not value):
            may_differ.append(name)
    required = getattr(script, "REQUIRED", ())

    folder = RunFolder(config, "", may_differ, required)
    if folder.summary is not None:
        return FINISHED
    return NEW if folder.stored is None else UNFINISHED


if __name__ == "__main__":
    main()
