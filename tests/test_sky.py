"""tpu/sky.yaml: its keys, what its `run` does, and SkyPilot's own parser where `sky` is on PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TASK = ROOT / "tpu/sky.yaml"

# https://docs.skypilot.co/en/latest/reference/yaml-spec.html, what is of use here.
KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
RESOURCES = {"infra", "accelerators", "accelerator_args", "use_spot", "job_recovery", "disk_size", "any_of", "labels"}
ENVIRONMENT = {
    "BUCKET": "gs://my-bucket",
    "NAME": "one",
    "TASK": "mrpc",
    "DATA": "/data/it's a folder",
    "ARGS": "--lr 1",
}


@pytest.fixture
def task() -> dict:
    return yaml.safe_load(TASK.read_text())


def test_its_keys_are_documented_ones(task):
    assert set(task) <= KEYS and set(task["resources"]) <= RESOURCES
    resources = task["resources"]
    assert resources["accelerators"].startswith("tpu-") and resources["use_spot"] is True
    assert set(resources["accelerator_args"]) == {"runtime_version"}
    assert set(resources["job_recovery"]) == {"strategy", "max_restarts_on_errors"}
    assert resources["job_recovery"]["strategy"] in ("FAILOVER", "EAGER_NEXT_REGION")
    for mount in task["file_mounts"].values():
        assert set(mount) <= {"name", "source", "store", "mode"} and mount["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")


def test_what_it_must_be_told_is_required_and_nothing_secret_is_in_it(task):
    """null = sky refuses to start without it; without a name a recovered job would begin a new run."""
    required = {name for name, value in task["envs"].items() if value is None}
    assert required == {"BUCKET", "NAME"}
    assert set(task["envs"]) == {"MODEL", *ENVIRONMENT}
    assert task["secrets"] == {"HF_TOKEN": ""} and "HF_TOKEN" not in task["envs"]


def test_its_run_is_make_train_with_runs_in_the_bucket(task):
    dry = 'make() { command make -n "$@"; }\n'
    environment = {"PATH": os.environ["PATH"], **{name: value or "" for name, value in task["envs"].items()}}
    environment.update(ENVIRONMENT)
    result = subprocess.run(
        ["bash", "-c", dry + task["run"]], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.replace("\\\n", "").splitlines() if "-m train.glue full" in line)
    assert "--model bert" in line and "--task mrpc" in line and line.endswith("--runs gs://my-bucket/runs --lr 1")
    shell = subprocess.run(["bash", "-n", "-c", task["setup"]], capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    assert task["setup"].splitlines()[-1] == "make install"


PARSE = """
import sys, yaml
import sky
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, [tuple(word.split("=", 1)) for word in sys.argv[2:]])
(resources,) = task.resources
assert resources.use_spot and resources.accelerators == {"tpu-v5litepod-8": 1}, resources
assert resources.accelerator_args == {"runtime_version": "v2-alpha-tpuv5-lite"}, resources
assert list(task.storage_mounts) == ["/data"] and task.storage_mounts["/data"].source == "gs://my-bucket"
assert task.envs["NAME"] == "one" and list(task.secrets) == ["HF_TOKEN"]
print("parsed by", sky.__version__)
"""


def test_skypilots_own_parser_takes_it(tmp_path):
    program = shutil.which("sky")
    if program is None:
        pytest.skip("needs SkyPilot: pip install skypilot[gcp] in an environment of its own, with its bin on PATH")
    python = Path(program).read_text().splitlines()[0].removeprefix("#!").strip()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def parse(*words: str) -> subprocess.CompletedProcess:
        command = [python, "-c", PARSE, str(TASK), *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    result = parse(*(f"{name}={value}" for name, value in ENVIRONMENT.items()))
    assert result.returncode == 0 and "parsed by" in result.stdout, result.stderr
    result = parse("BUCKET=gs://my-bucket")
    assert result.returncode != 0 and "NAME" in result.stderr
