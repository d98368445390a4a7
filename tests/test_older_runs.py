"""Unfinished runs that older versions left (tests/older_runs.tar.xz, made by tests/older_runs.py) load and resume."""

import json
import tarfile
from dataclasses import fields
from pathlib import Path

import older_runs
import pytest
import safetensors.torch
import torch
from helpers import records
from trials import TRIALS

from train.common import checkpoint
from train.common.embedding import read_table
from train.common.mesh import Layout
from train.common.run import Run

ARCHIVE = Path(__file__).parent / "older_runs.tar.xz"


@pytest.fixture
def unpacked(tmp_path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def config_of(script, run: Path):
    """Returns the config with which the older version ran; fields that it did not have are the defaults."""
    stored = json.loads((run / "config.json").read_text())["config"]
    stored["layout"] = Layout(**stored["layout"]) if "layout" in stored else None
    known = {field.name for field in fields(script.Config)} & stored.keys()
    values = {name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name] for name in known}
    return script.Config(**values | {"runs": str(run.parent), "name": run.name})


@pytest.mark.parametrize("name", older_runs.KEPT)
def test_a_run_of_an_older_version_resumes_with_its_state_and_ends(name, unpacked, monkeypatch, capsys):
    run, step, script = unpacked / name, older_runs.KEPT[name], TRIALS[name].script
    saved = safetensors.torch.load_file(run / f"checkpoints/step_{step:08d}/state.safetensors")
    before = [record for record in records(run) if record["step"] <= step]
    for constant, value in older_runs.DLRM.items() if name == "dlrm" else ():
        monkeypatch.setattr(script, constant, value)
    resumed, resume = [], Run.resume

    def compared(self, model, optimizer, **options):
        start = resume(self, model, optimizer, **options)
        state = checkpoint.to_host(checkpoint.named_state(model, optimizer))
        resumed.append([key for key, tensor in saved.items() if not torch.equal(state[key], tensor)])
        assert start == step and not self.evaluation_due
        return start

    monkeypatch.setattr(Run, "resume", compared)
    metrics = script.main(config_of(script, run))
    assert resumed == [[]] and f"resuming after step {step}\n" in capsys.readouterr().out
    assert records(run)[: len(before)] == before and len(records(run)) > len(before)
    assert json.loads((run / "summary.json").read_text())["metrics"] == metrics


def test_tables_of_an_older_version_load(unpacked):
    table = read_table(str(unpacked / f"dlrm/checkpoints/step_{older_runs.KEPT['dlrm']:08d}"), "C1")
    assert table.shape == (older_runs.DLRM["SYNTHETIC_ROWS"][0], 4) and table.isfinite().all() and table.std() > 0
