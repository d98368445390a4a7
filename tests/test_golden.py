"""What old runs and users' commands rely on: the flags of all presets with their defaults, names and shapes of the
tensors of a checkpoint, the files of a run, the learning rates of a short one. A new flag may come; nothing else may
change unnoticed.

After a change that is meant, write golden.json again: WRITE_GOLDEN=1 pytest tests/test_golden.py
"""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors
from helpers import records
from trials import TRIALS

GOLDEN = Path(__file__).parent / "golden.json"


def presets(script) -> dict[str, dict]:
    """Returns the fields of each preset as JSON has them."""
    return json.loads(json.dumps({preset: asdict(config) for preset, (_, config) in script.PRESETS.items()}))


def tensors(folder: Path) -> dict[str, str]:
    """Returns the names and shapes of all tensors of a checkpoint, from the headers of its files. The pieces of a table
    count together: where it is cut depends on what else the process holds."""
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            for key in opened.offset_keys():
                name, pieces = re.subn(r"/[\d.]+/\d+$", "", key)
                shape = opened.get_slice(key).get_shape()
                rows = found[name][0] if pieces and name in found else 0
                found[name] = [rows + shape[0], *shape[1:]] if pieces else shape
    return {name: "x".join(map(str, shape)) for name, shape in found.items()}


def files(folder: Path) -> list[str]:
    """Returns the files of a run, without the numbers that depend on its length and on the clock."""
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    return sorted({re.sub(r"(step_|tfevents)[\w.-]*", r"\1*", name) for name in names})


# What takes half a minute of a core is slow.
SLOW = ("transformer", "resnet50")
MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TRIALS]


@pytest.mark.parametrize("name", MARKED)
def test_flags_checkpoints_and_run_folders_stay(name, run_of):
    folder, trial = Path(run_of(name, "short")[0]), TRIALS[name]
    checkpoint = tensors(folder / "checkpoints" / f"step_{trial.checkpoints[-1]:08d}")
    rates = [line["lr"] for line in records(folder) if "lr" in line]
    now = {"presets": presets(trial.script), "checkpoint": checkpoint, "files": files(folder), "rates": rates}
    now = {f"{name} {part}": value for part, value in now.items()}
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("WRITE_GOLDEN"):
        made = [f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in (golden | now).items()]
        GOLDEN.write_text("{\n" + ",\n".join(sorted(made)) + "\n}\n")
    else:
        for preset, flags in golden[f"{name} presets"].items():
            found = now[f"{name} presets"][preset]
            assert flags.items() <= found.items(), preset
            added = found.keys() - flags.keys() - set(trial.script.MAY_CHANGE)
            defaults = asdict(trial.script.Config())  # what an old run is taken to have had
            assert all(found[key] == defaults[key] for key in added), f"an old run of {preset} has another {added}"
        assert now[f"{name} checkpoint"] == golden[f"{name} checkpoint"]
        assert now[f"{name} files"] == golden[f"{name} files"]
        assert rates == pytest.approx(golden[f"{name} rates"], rel=1e-9)
