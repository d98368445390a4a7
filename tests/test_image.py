"""Dockerfile, tpu/entry.py, tpu/jobset.yaml: exit codes, layers, JobSet's schema, and a real image without Docker."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch_bed import wait

from tpu.launch.keeper import STOPPED
from train.common.watch.stall import EXIT_CODE as HUNG

ROOT, INPUT = Path(__file__).parent.parent, 2
# Without what the make that runs these tests says to others.
BARE = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")}
SAVES = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print("saved"), sys.exit(143)))
print("step", flush=True)
time.sleep(9)
"""
LACKING = [name for name in ("buildah", "mmdebstrap", "unshare", "pkill") if not shutil.which(name)]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or bool(LACKING), reason=f"needs root, and on Debian apt-get install {LACKING}")
def test_an_image_is_built_trains_and_stops_as_process_1(tmp_path):
    """A quarter of an hour, 25 GB of disk, a Debian mirror and a package index. BUILDAH_ARGS: see tests/image.sh."""
    assert subprocess.run(["bash", ROOT / "tests/image.sh", tmp_path, ROOT]).returncode == 0


def test_dependencies_have_a_layer_of_their_own_and_only_what_is_listed_goes_in():
    recipe = (ROOT / "Dockerfile").read_text()
    order = [
        "COPY Makefile req",
        "COPY tpu/libpython.py",
        "make install .venv/.wandb",
        "COPY . .",
        "touch .venv/.installed .venv/.wandb",
        "USER ${RUN_AS}",
        '"tpu.entry"]',
    ]
    assert sorted(order, key=recipe.index) == order and "ARG RUN_AS=zoo\n" in recipe
    listed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert listed[0] == "*" and listed[-2:] == ["**/.*", "**/__pycache__"] and not any("!." in line for line in listed)


@pytest.mark.parametrize(
    ("arguments", "libtpu"),
    [
        ({"LIBTPU": "yes"}, "-r requirements-tpu.txt"),
        ({"LIBTPU": "yes", "LIBTPU_VERSION": "0.0.51"}, "libtpu==0.0.51"),
        ({"LIBTPU": ""}, ""),
    ],
)
def test_the_layer_of_the_dependencies_has_what_make_install_needs_and_the_libtpu_of_the_build(
    arguments, libtpu, tmp_path
):
    recipe = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    instructions = [line.split(maxsplit=1) for line in recipe.splitlines() if line and line[0] != "#"]
    install = next(number for number, (_, rest) in enumerate(instructions) if "make install" in rest)
    for word, rest in instructions[:install]:
        if word == "COPY":
            *files, to = rest.split()
            (tmp_path / to).mkdir(exist_ok=True)
            for file in files:
                shutil.copy(ROOT / file, tmp_path / to)
    # The base has the library of its python3.11.
    assert subprocess.run([sys.executable, "-m", "tpu.libpython"], cwd=tmp_path).returncode == 0
    dry = 'make() { command make -n "$@"; }; ' + instructions[install][1]
    shown = subprocess.run(["sh", "-c", dry], cwd=tmp_path, env=BARE | arguments, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    commands = shown.stdout.replace("\\\n", "").splitlines()
    wanted = [line.partition("--quiet")[2].strip() for line in commands if "pip install" in line]
    assert [words for words in wanted if "tpu" in words] == [libtpu] * bool(libtpu)
    assert ".venv/bin/python -m tpu.libpython install" in commands


def test_the_entry_ends_as_the_trainer_does(tmp_path):
    """137: killed, while a process that it has started, in a session of its own, holds its standard error open. 143: by
    SIGTERM, saved."""
    (tmp_path / "saves.py").write_text(SAVES)
    program = f"sh {ROOT}/tpu/exit_code.sh "
    ends = {137: "sh -c 'setsid sleep 60 & kill -9 $$$$'", STOPPED: f"{sys.executable} saves.py"}
    command, environment = [sys.executable, "-m", "tpu.entry", "MODEL=a b"], BARE | {"PYTHONPATH": str(ROOT)}
    for code in (0, INPUT, HUNG, 137, STOPPED):
        end = ends.get(code, f"sh -c 'exit {code}'")
        (tmp_path / "Makefile").write_text(f"train:\n\t@echo $(MODEL) >&2; {program}{end}\n")
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            streams = {"stdout": stdout, "stderr": stderr}
            entry = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
        if code == STOPPED:
            wait(lambda: out.read_text() == "step\n")  # noqa: B023 - it is called at once
            entry.terminate()
        assert entry.wait(timeout=30) == code
        assert err.read_text().startswith("a b\n") and ("saved\n" in out.read_text()) == (code == STOPPED)
    early = "import os, subprocess as s; from tpu import entry; start = s.Popen; "  # SIGTERM as make starts
    early += "s.Popen = lambda *a, **k: (start(*a, **k), os.kill(os.getpid(), 15))[0]; raise SystemExit(entry.main())"
    command = [sys.executable, "-c", early]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=8).returncode == STOPPED


def strict(schema: object) -> None:
    """Makes a schema refuse the keys that it does not know, as kubectl does."""
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        strict(value)
    if isinstance(schema, dict) and "properties" in schema:
        schema.setdefault("additionalProperties", False)


def test_the_jobset_is_one_slice_that_resumes_and_satisfies_the_schema():
    """JOBSET_CRD: the path of jobset.x-k8s.io_jobsets.yaml, out of kubernetes-sigs/jobset."""
    jobset = yaml.safe_load((ROOT / "tpu/jobset.yaml").read_text())
    (slices,) = jobset["spec"]["replicatedJobs"]
    job, pod = slices["template"]["spec"], slices["template"]["spec"]["template"]["spec"]
    (container,), (rule,) = pod["containers"], job["podFailurePolicy"]["rules"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert job["parallelism"] == job["completions"] == chips / container["resources"]["limits"]["google.com/tpu"]
    ends = {"containerName": container["name"], "operator": "In", "values": [INPUT]}
    assert rule == {"action": "FailJob", "onExitCodes": ends} and job["backoffLimit"] == 0 == slices["replicas"] - 1
    assert "command" not in container and f"NAME={jobset['metadata']['name']}" in container["args"]
    command = ["make", "-n", "train", *container["args"]]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=BARE)
    line = " ".join(dry.stdout.replace("\\\n", "").split())
    assert line.endswith('--task mrpc --data "$DATA" --name "$NAME" --runs gs://my-bucket/runs'), dry.stderr
    if "JOBSET_CRD" not in os.environ:
        pytest.skip("all but the schema was checked; that needs JOBSET_CRD=path of jobset.x-k8s.io_jobsets.yaml")
    jsonschema = pytest.importorskip("jsonschema")
    (version,) = yaml.safe_load(Path(os.environ["JOBSET_CRD"]).read_text())["spec"]["versions"]
    strict(schema := version["schema"]["openAPIV3Schema"])  # leaves metadata, which has no properties there, as it is
    errors = jsonschema.Draft202012Validator(schema).iter_errors(jobset)
    assert not [(error.json_path, error.message) for error in errors]
