"""tpu/sky.yaml: its keys, and what its `run` does."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TASK = ROOT / "tpu/sky.yaml"
# Documented in https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
KEYS = {
    "name",
    "workdir",
    "num_nodes",
    "resources",
    "envs",
    "secrets",
    "file_mounts",
    "setup",
    "run",
}
KEYS_OF_RESOURCES = {
    "infra",
    "accelerators",
    "accelerator_args",
    "use_spot",
    "job_recovery",
    "labels",
}
KEYS_OF_MOUNTS = {"name", "source", "store", "mode"}
# What a user gives.
VALUES = {
    "NAME": "one",
    "TASK": "mrpc",
    "PRESET": "tiny",
    "DATA": "/data/it's a folder",
    "ARGS": "--lr 1",
    "BUCKET": "gs://my-bucket",
}


@pytest.fixture
def task() -> dict:
    return yaml.safe_load(TASK.read_text())


def test_its_keys_are_documented_ones(task):
    assert set(task) <= KEYS
    assert set(task["resources"]) <= KEYS_OF_RESOURCES
    for mount in task["file_mounts"].values():
        assert set(mount) <= KEYS_OF_MOUNTS
        assert mount["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")


def test_it_recovers_a_spot_tpu_but_no_input_to_fix(task):
    resources = task["resources"]
    assert resources["accelerators"].startswith("tpu-")
    assert resources["use_spot"] is True
    assert set(resources["accelerator_args"]) == {"runtime_version"}

    recovery = resources["job_recovery"]
    assert set(recovery) == {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    assert recovery["max_restarts_on_errors"] == 0
    assert 2 not in recovery["recover_on_exit_codes"]
    assert recovery["strategy"] in ("FAILOVER", "EAGER_NEXT_REGION")


def test_its_variables_are_those_of_make_train(task):
    environment = task["envs"]
    assert set(environment) == {"MODEL", *VALUES}
    assert task["secrets"] == {"HF_TOKEN": ""}

    # null = sky refuses to start without it; without a name a recovered job would begin a new run.
    must_be_given = {name for name, value in environment.items() if value is None}
    assert must_be_given == {"BUCKET", "NAME"}


def test_its_run_is_make_train_with_runs_in_the_bucket(task):
    dry = task["run"].replace(".venv/bin/python -m tpu.entry", "make -n train")
    assert dry != task["run"]

    environment = {"PATH": os.environ["PATH"], **task["envs"], **VALUES}
    result = subprocess.run(
        ["bash", "-c", dry], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr

    lines = result.stdout.replace("\\\n", "").splitlines()
    command = next(line for line in lines if "-m train.glue tiny" in line)
    assert "--model bert" in command
    assert "--task mrpc" in command
    assert command.endswith("--runs gs://my-bucket/runs --lr 1")


def test_its_setup_is_make_install(task):
    assert task["setup"] == "make install GET_PYTHON=1"
