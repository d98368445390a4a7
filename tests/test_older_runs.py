"""Unfinished runs that older versions left load and resume: tests/older_runs.tar.xz, made by
tests/older_runs.py."""

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
    """Returns the config with which the older version ran; fields that it did not have are the
    defaults."""
    stored = json.loads((run / "config.json").read_text())["config"]
    values = {}
    for field in fields(script.Config):
        if field.name not in stored:
            continue
        value = stored[field.name]
        if isinstance(value, list):
            value = tuple(value)
        elif field.name == "layout":
            value = Layout(**value)
        values[field.name] = value
    values["runs"] = str(run.parent)
    values["name"] = run.name
    return script.Config(**values)


NAMES = ["dlrm", "glue", "pretrain"]
for slow in ("resnet50", "transformer"):
    NAMES.append(pytest.param(slow, marks=pytest.mark.slow))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_an_older_version_resumes_and_ends(name, unpacked, monkeypatch, capsys):
    run = unpacked / name
    step = older_runs.KEPT[name]
    script = TRIALS[name].script
    saved = safetensors.torch.load_file(run / f"checkpoints/step_{step:08d}/state.safetensors")
    before = [record for record in records(run) if record["step"] <= step]
    if name == "dlrm":
        for constant, value in older_runs.DLRM.items():
            monkeypatch.setattr(script, constant, value)

    resume = Run.resume
    different = []  # what a resume did not restore, of each

    def compare(self, model, optimizer, **options):
        start = resume(self, model, optimizer, **options)
        state = checkpoint.to_host(checkpoint.named_state(model, optimizer))
        different.append([key for key in saved if not torch.equal(state[key], saved[key])])
        assert start == step
        assert not self.evaluation_due
        return start

    monkeypatch.setattr(Run, "resume", compare)
    metrics = script.main(config_of(script, run))

    assert different == [[]]
    assert f"resuming after step {step}\n" in capsys.readouterr().out
    assert records(run)[: len(before)] == before
    assert len(records(run)) > len(before)
    assert json.loads((run / "summary.json").read_text())["metrics"] == metrics


def test_tables_of_an_older_version_load(unpacked):
    step = older_runs.KEPT["dlrm"]
    table = read_table(str(unpacked / f"dlrm/checkpoints/step_{step:08d}"), "C1")

    assert table.shape == (older_runs.DLRM["SYNTHETIC_ROWS"][0], 4)
    assert table.isfinite().all()
    assert table.std() > 0
