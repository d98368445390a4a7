"""tpu/sky.yaml: its keys, and what its `run` does."""

import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
TASK = ROOT / "tpu/sky.yaml"
VALUES = {"NAME": "one", "TASK": "mrpc", "PRESET": "tiny", "DATA": "/data/it's a folder", "ARGS": "--lr 1"}
VALUES["BUCKET"] = "gs://my-bucket"


def test_its_keys_are_documented_ones_and_its_run_is_make_train_with_runs_in_the_bucket():
    """The keys: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""
    task = yaml.safe_load(TASK.read_text())
    resources, environment = task["resources"], task["envs"]
    assert set(task) <= {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
    assert set(resources) <= {"infra", "accelerators", "accelerator_args", "use_spot", "job_recovery", "labels"}
    assert resources["accelerators"].startswith("tpu-") and resources["use_spot"] is True
    assert set(resources["accelerator_args"]) == {"runtime_version"}
    recovery = resources["job_recovery"]
    assert set(recovery) == {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    assert recovery["max_restarts_on_errors"] == 0 and 2 not in recovery["recover_on_exit_codes"]
    assert resources["job_recovery"]["strategy"] in ("FAILOVER", "EAGER_NEXT_REGION")
    for mount in task["file_mounts"].values():
        assert set(mount) <= {"name", "source", "store", "mode"} and mount["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")
    # null = sky refuses to start without it; without a name a recovered job would begin a new run.
    assert {name for name, value in environment.items() if value is None} == {"BUCKET", "NAME"}
    assert set(environment) == {"MODEL", *VALUES} and task["secrets"] == {"HF_TOKEN": ""}
    given = {"PATH": os.environ["PATH"], **environment, **VALUES}
    shown = task["run"].replace(".venv/bin/python -m tpu.entry", "make -n train")
    assert shown != task["run"]
    dry = ["bash", "-c", shown]
    result = subprocess.run(dry, cwd=ROOT, env=given, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.replace("\\\n", "").splitlines() if "-m train.glue tiny" in line)
    assert "--model bert" in line and "--task mrpc" in line and line.endswith("--runs gs://my-bucket/runs --lr 1")
    assert task["setup"] == "make install GET_PYTHON=1"
