"""tpu/sky.yaml: its keys, what its `run` does, and SkyPilot's own parser where `sky` is on PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TASK = ROOT / "tpu/sky.yaml"
VALUES = {"NAME": "one", "TASK": "mrpc", "DATA": "/data/it's a folder", "ARGS": "--lr 1", "BUCKET": "gs://my-bucket"}


def test_its_keys_are_documented_ones_and_its_run_is_make_train_with_runs_in_the_bucket():
    """The keys: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""
    task = yaml.safe_load(TASK.read_text())
    resources, environment = task["resources"], task["envs"]
    assert set(task) <= {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
    assert set(resources) <= {"infra", "accelerators", "accelerator_args", "use_spot", "job_recovery", "labels"}
    assert resources["accelerators"].startswith("tpu-") and resources["use_spot"] is True
    assert set(resources["accelerator_args"]) == {"runtime_version"}
    assert set(resources["job_recovery"]) == {"strategy", "max_restarts_on_errors"}
    assert resources["job_recovery"]["strategy"] in ("FAILOVER", "EAGER_NEXT_REGION")
    for mount in task["file_mounts"].values():
        assert set(mount) <= {"name", "source", "store", "mode"} and mount["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")
    # null = sky refuses to start without it; without a name a recovered job would begin a new run.
    assert {name for name, value in environment.items() if value is None} == {"BUCKET", "NAME"}
    assert set(environment) == {"MODEL", *VALUES} and task["secrets"] == {"HF_TOKEN": ""}
    given = {"PATH": os.environ["PATH"], **environment, **VALUES}
    dry = ["bash", "-c", 'make() { command make -n "$@"; }\n' + task["run"]]
    result = subprocess.run(dry, cwd=ROOT, env=given, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.replace("\\\n", "").splitlines() if "-m train.glue full" in line)
    assert "--model bert" in line and "--task mrpc" in line and line.endswith("--runs gs://my-bucket/runs --lr 1")
    assert subprocess.run(["bash", "-n", "-c", task["setup"]]).returncode == 0
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
"""


def test_skypilots_own_parser_takes_it(tmp_path):
    program = shutil.which("sky")
    if program is None:
        pytest.skip("needs SkyPilot: pip install skypilot[gcp] in an environment of its own, with its bin on PATH")
    python = Path(program).read_text().splitlines()[0].removeprefix("#!").strip()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    for names in (VALUES, ["BUCKET"]):
        command = [python, "-c", PARSE, str(TASK), *(f"{name}={VALUES[name]}" for name in names)]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert (result.returncode == 0) == (names is VALUES) and ("NAME" in result.stderr or names is VALUES)
