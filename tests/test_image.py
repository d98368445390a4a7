"""Dockerfile and tpu/jobset.yaml: layers, JobSet's schema, and a real image without Docker.

tests/test_entry.py has the image's first process.
"""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
INPUT = 2  # the exit code of an input to fix
# Without what the make that runs these tests says to others.
FROM_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")
BARE = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
PROGRAMS = ("buildah", "mmdebstrap", "unshare", "pkill")
LACKING = [name for name in PROGRAMS if not shutil.which(name)]


def whole_lines(text: str) -> list[str]:
    """Returns the lines, with those that a backslash continues in one."""
    return text.replace("\\\n", "").splitlines()


# ---- the image ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or bool(LACKING),
    reason=f"needs root, and on Debian apt-get install {LACKING}",
)
def test_an_image_is_built_trains_and_stops_as_process_1(tmp_path):
    """A quarter of an hour, 25 GB of disk, a Debian mirror and a package index. BUILDAH_ARGS: see
    tests/image.sh."""
    result = subprocess.run(["bash", ROOT / "tests/image.sh", tmp_path, ROOT])
    assert result.returncode == 0


def test_dependencies_have_a_layer_of_their_own():
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
    assert sorted(order, key=recipe.index) == order
    assert "ARG RUN_AS=zoo\n" in recipe


def test_only_what_is_listed_goes_into_the_image():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line[0] != "#"]
    assert patterns[0] == "*"
    assert patterns[-2:] == ["**/.*", "**/__pycache__"]
    assert not any("!." in pattern for pattern in patterns)


@pytest.mark.parametrize(
    ("arguments", "libtpu"),
    [
        ({"LIBTPU": "yes"}, "-r requirements-tpu.txt"),
        ({"LIBTPU": "yes", "LIBTPU_VERSION": "0.0.51"}, "libtpu==0.0.51"),
        ({"LIBTPU": ""}, ""),
    ],
)
def test_the_dependencies_layer_has_what_make_install_needs(arguments, libtpu, tmp_path):
    """And installs the libtpu of the build."""
    instructions = []
    for line in whole_lines((ROOT / "Dockerfile").read_text()):
        if line and line[0] != "#":
            instructions.append(line.split(maxsplit=1))

    # What stands before the installation is all that it has.
    for word, rest in instructions:
        if "make install" in rest:
            install = rest
            break
        if word == "COPY":
            *files, to = rest.split()
            (tmp_path / to).mkdir(exist_ok=True)
            for file in files:
                shutil.copy(ROOT / file, tmp_path / to)

    # The base has the library of its python3.11.
    libpython = subprocess.run([sys.executable, "-m", "tpu.libpython"], cwd=tmp_path)
    assert libpython.returncode == 0

    dry = 'make() { command make -n "$@"; }; ' + install
    shown = subprocess.run(
        ["sh", "-c", dry], cwd=tmp_path, env=BARE | arguments, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr

    commands = whole_lines(shown.stdout)
    wanted = []
    for command in commands:
        if "pip install" in command:
            packages = command.partition("--quiet")[2].strip()
            if "tpu" in packages:
                wanted.append(packages)
    assert wanted == ([libtpu] if libtpu else [])
    assert ".venv/bin/python -m tpu.libpython install" in commands


# ---- the JobSet --------------------------------------------------------------------------------


@pytest.fixture
def jobset() -> dict:
    return yaml.safe_load((ROOT / "tpu/jobset.yaml").read_text())


def test_the_jobset_is_one_slice_that_resumes(jobset):
    (slices,) = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]

    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    hosts = chips / container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == hosts
    assert job["completions"] == hosts
    assert slices["replicas"] == 1

    ends = {"containerName": container["name"], "operator": "In", "values": [INPUT]}
    assert rule == {"action": "FailJob", "onExitCodes": ends}
    assert job["backoffLimit"] == 0
    # It resumes, since all its attempts have one name.
    assert f"NAME={jobset['metadata']['name']}" in container["args"]

    assert "command" not in container
    command = ["make", "-n", "train", *container["args"]]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=BARE)
    line = " ".join(dry.stdout.replace("\\\n", "").split())
    arguments = '--task mrpc --data "$DATA" --name "$NAME" --runs gs://my-bucket/runs'
    assert line.endswith(arguments), dry.stderr


def test_the_jobset_of_several_slices_joins_them_by_megascale():
    """With the lines that its comments say."""
    text = (ROOT / "tpu/jobset.yaml").read_text()
    text = text.replace("replicas: 1 # slices", "replicas: 2")
    text = re.sub(
        r"(?m)^( +)# (coordinator:|- name: MEGASCALE_|  valueFrom:|    fieldRef:)", r"\1\2", text
    )
    spec = yaml.safe_load(text)["spec"]

    (slices,) = spec["replicatedJobs"]
    assert slices["replicas"] == 2
    assert spec["coordinator"] == {"replicatedJob": slices["name"], "jobIndex": 0, "podIndex": 0}
    (container,) = slices["template"]["spec"]["template"]["spec"]["containers"]
    paths = {}
    for variable in container["env"]:
        if variable["name"].startswith("MEGASCALE_"):
            paths[variable["name"]] = variable["valueFrom"]["fieldRef"]["fieldPath"]
    of_jobset = "metadata.annotations['jobset.sigs.k8s.io/{}']".format
    assert paths == {
        "MEGASCALE_NUM_SLICES": of_jobset("replicatedjob-replicas"),
        "MEGASCALE_SLICE_ID": of_jobset("job-index"),
        "MEGASCALE_COORDINATOR_ADDRESS": of_jobset("coordinator"),
    }


def forbid_unknown_keys(schema: object) -> None:
    """Makes a schema refuse the keys that it does not know, as kubectl does."""
    if isinstance(schema, list):
        for value in schema:
            forbid_unknown_keys(value)
    if isinstance(schema, dict):
        for value in schema.values():
            forbid_unknown_keys(value)
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)


def test_the_jobset_satisfies_the_schema(jobset):
    """JOBSET_CRD: the path of jobset.x-k8s.io_jobsets.yaml, out of kubernetes-sigs/jobset."""
    if "JOBSET_CRD" not in os.environ:
        pytest.skip("needs JOBSET_CRD=path of jobset.x-k8s.io_jobsets.yaml")
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load(Path(os.environ["JOBSET_CRD"]).read_text())
    (version,) = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    # It leaves metadata, which has no properties there, as it is.
    forbid_unknown_keys(schema)

    errors = jsonschema.Draft202012Validator(schema).iter_errors(jobset)
    assert not [(error.json_path, error.message) for error in errors]
