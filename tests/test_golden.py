"""What old runs and users' commands rely on.

These are the flags of all presets with their defaults, names and shapes of the tensors of a
checkpoint, the files of a run, the learning rates of a short one. A new flag may come; nothing else
may change unnoticed.

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
SLOW = ("transformer", "resnet50")  # half a minute of a core


def presets(script) -> dict[str, dict]:
    """Returns the fields of each preset as JSON has them."""
    fields = {}
    for preset, (_, config) in script.PRESETS.items():
        fields[preset] = asdict(config)
    return json.loads(json.dumps(fields))


def tensors(folder: Path) -> dict[str, str]:
    """Returns the names and shapes of all tensors of a checkpoint, from the headers of its files.

    The pieces of a table count together: where it is cut depends on what else the process holds.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            for key in opened.offset_keys():
                shape = list(opened.get_slice(key).get_shape())
                name = re.sub(r"/[\d.]+/\d+$", "", key)
                is_piece = name != key
                if is_piece and name in shapes:
                    shapes[name][0] += shape[0]
                else:
                    shapes[name] = shape
    return {name: "x".join(map(str, shape)) for name, shape in shapes.items()}


def files(folder: Path) -> list[str]:
    """Returns a run's files without the numbers that depend on its length and on the clock."""
    names = set()
    for file in folder.rglob("*"):
        if file.is_file():
            name = str(file.relative_to(folder))
            names.add(re.sub(r"(step_|tfevents)[\w.-]*", r"\1*", name))
    return sorted(names)


def write(found: dict) -> None:
    """Replaces these entries of golden.json, which has one a line."""
    golden = json.loads(GOLDEN.read_text()) | found
    lines = []
    for key, value in golden.items():
        lines.append(f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}")
    GOLDEN.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n")


def assert_old_presets_stay(script, golden: dict[str, dict], found: dict[str, dict]) -> None:
    """Asserts that no flag is gone or has another default, and that new ones change no old run."""
    # What an old run is taken to have had, as JSON has it.
    defaults = json.loads(json.dumps(asdict(script.Config())))
    for preset, flags in golden.items():
        assert flags.items() <= found[preset].items(), preset
        added = found[preset].keys() - flags.keys() - set(script.MAY_CHANGE)
        for key in added:
            another = f"an old run of {preset} has another {key}"
            assert found[preset][key] == defaults[key], another


MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TRIALS]


@pytest.mark.parametrize("name", MARKED)
def test_flags_checkpoints_and_run_folders_stay(name, run_of):
    folder = Path(run_of(name, "short")[0])
    trial = TRIALS[name]
    checkpoint = folder / "checkpoints" / f"step_{trial.checkpoints[-1]:08d}"
    found = {
        f"{name} presets": presets(trial.script),
        f"{name} checkpoint": tensors(checkpoint),
        f"{name} files": files(folder),
        f"{name} rates": [line["lr"] for line in records(folder) if "lr" in line],
    }
    if os.environ.get("WRITE_GOLDEN"):
        write(found)
        return

    golden = json.loads(GOLDEN.read_text())
    assert_old_presets_stay(trial.script, golden[f"{name} presets"], found[f"{name} presets"])
    assert found[f"{name} checkpoint"] == golden[f"{name} checkpoint"]
    assert found[f"{name} files"] == golden[f"{name} files"]
    assert found[f"{name} rates"] == pytest.approx(golden[f"{name} rates"], rel=1e-9)
