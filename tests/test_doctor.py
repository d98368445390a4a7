"""tpu/doctor.py: each check in its ok and its fix state, over fake commands on PATH and a fake / of files."""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpu import doctor
from tpu.launch import hosts

ROOT = Path(__file__).parent.parent
PINS = {
    "requirements.txt": "torch==2.9.0 # a\ntorch_xla==2.9.0 # b\ntorchvision==0.24.0 # c\nnumpy==2.4.6 # d\n",
    "requirements-torchrec.txt": "torchrec==1.4.0 # e\n",
    "requirements-tpu.txt": "libtpu==0.0.21 # f\n",
}
VERSIONS = {
    "torch": "2.9.0+cu128",
    "torch_xla": "2.9.0",
    "torchvision": "0.24.0",
    "numpy": "2.4.6",
    "torchrec": "1.4.0",
    "libtpu": "0.0.21",
}


def states(findings) -> list[str]:
    return [finding.state for finding in findings]


def one(findings) -> str:
    """The only line."""
    (finding,) = findings
    return str(finding)


class Here:
    """Commands, a project with an environment, and a root folder."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.project, self.root = folder / "bin", folder / "project", folder / "root"
        for path in (self.bin, self.project / ".venv/bin", self.root / "proc", self.root / "dev/shm"):
            path.mkdir(parents=True)
        for name, text in PINS.items():
            (self.project / name).write_text(text)
            os.utime(self.project / name, (1, 1))
        (self.project / ".venv/.installed").touch()
        self.environment = doctor.Environment(self.project)
        self.installed(VERSIONS)

    def command(self, name: str, script: str) -> None:
        path = Path(name) if name.startswith("/") else self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def answers(self, name: str, answer: object, code: int = 0) -> None:
        self.command(name, f"cat <<'EOF'\n{json.dumps(answer)}\nEOF\nexit {code}")

    def installed(self, versions: dict[str, str], needs: str = "torch (==2.9.0)", devices: str = "exit 1") -> None:
        """The environment's Python: versions when it is given names of packages, devices else."""
        answer = json.dumps({"versions": versions, "torchvision_needs": [needs]})
        script = f"[ \"$#\" = 2 ] || {{ cat <<'EOF'\n{answer}\nEOF\nexit; }}\n{devices}"
        self.command(str(self.environment.python), script)

    def chips(self, *names: str) -> None:
        for name in names:
            (self.root / "dev" / name).parent.mkdir(exist_ok=True)
            (self.root / "dev" / name).touch()

    def process(self, pid: int, opened: str, *command: str) -> None:
        (self.root / f"proc/{pid}/fd").mkdir(parents=True)
        (self.root / f"proc/{pid}/fd/3").symlink_to(opened)
        (self.root / f"proc/{pid}/cmdline").write_text("\0".join(command) + "\0")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Here:
    here = Here(tmp_path)
    for name in ("sh", "cat", "sleep"):
        (here.bin / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(here.bin))
    return here


# --- programs and environment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "about, line",
    [
        ({}, "ok    Python: python3.11 is CPython 3.11.7, with venv and ensurepip"),
        (
            {"version": "3.12.1", "minor": [3, 12]},
            "fix   Python: python3.11 is CPython 3.12.1, and CPython 3.11 is needed",
        ),
        ({"name": "PyPy"}, "fix   Python: python3.11 is PyPy 3.11.7, and CPython 3.11 is needed"),
        (
            {"missing": ["ensurepip"]},
            "fix   Python: python3.11 is CPython 3.11.7, without ensurepip: install python3.11-venv",
        ),
    ],
)
def test_the_interpreter(here, about, line):
    here.answers("python3.11", {"name": "CPython", "version": "3.11.7", "minor": [3, 11], "missing": []} | about)
    assert one(doctor.check_python("python3.11")).startswith(line)


def test_an_interpreter_that_is_not_there_or_does_not_start(here):
    assert "fix   Python: python3.11: No such file or directory" in one(doctor.check_python("python3.11"))
    here.command("python3.11", "echo 'no libpython' >&2; exit 127")
    assert "does not work (no libpython)" in one(doctor.check_python("python3.11"))


def test_a_real_interpreter_tells_what_it_is():
    finding = one(doctor.check_python(sys.executable))
    assert f"CPython {sys.version.split()[0]}" in finding


def test_git(here):
    assert states(doctor.check_git(True)) == ["fix"] and states(doctor.check_git(False)) == ["none"]
    here.command("git", "echo git version 2.39.5")
    assert one(doctor.check_git(True)) == "ok    git: 2.39.5"


def test_a_command_that_hangs_is_given_up(here):
    """Also when its child, as gcloud's Python, holds the output open."""
    here.command("gcloud", "sleep 9; exit 0")
    begun = time.monotonic()
    assert doctor.run(["gcloud"], 0.3).err == "gcloud did not answer in 0 s" and time.monotonic() - begun < 5


def test_an_environment_as_pinned(here):
    lines = [str(finding) for finding in doctor.check_environment(here.environment)]
    assert lines == [
        "ok    torch: torch 2.9.0, torch_xla 2.9.0, torchvision 0.24.0; they fit each other and are the pinned ones",
        "ok    packages: the other 2 that are pinned are installed in these versions",
        "ok    installation: complete, and newer than the requirements files",
    ]


@pytest.mark.parametrize(
    "changes, needs, text",
    [
        ({"torch_xla": ""}, "torch", "torch_xla missing"),
        ({"torch": "2.8.0"}, "torch (==2.8.0)", "torch_xla 2.9.0 needs torch 2.9.0, and 2.8.0 is installed"),
        ({"torchvision": "0.23.0"}, "torch==2.8.0", "torchvision 0.23.0 needs torch 2.8.0, and 2.9.0 is installed"),
        (
            {"torch": "2.8.0", "torch_xla": "2.8.0", "torchvision": "0.23.0"},
            "torch==2.8.0",
            "torchvision 0.23.0, and torch 2.9.0, torch_xla 2.9.0, torchvision 0.24.0 are pinned",
        ),
        (
            {"numpy": "1.26.4", "torchrec": ""},
            "torch==2.9.0",
            "numpy 1.26.4 (pinned: 2.4.6), torchrec is missing (pinned",
        ),
    ],
)
def test_packages_that_do_not_fit(here, changes, needs, text):
    here.installed(VERSIONS | changes, needs)
    wrong = [str(finding) for finding in doctor.check_environment(here.environment) if finding.state == "fix"]
    assert len(wrong) == 1 and text in wrong[0] and "make install" in wrong[0]


def test_the_stamp_of_the_installation(here):
    os.utime(here.project / "requirements-tpu.txt")
    os.utime(here.project / ".venv/.installed", (9, 9))
    *_, last = doctor.check_environment(here.environment)
    assert str(last) == "fix   installation: requirements-tpu.txt changed after it: make install"
    (here.project / ".venv/.installed").unlink()
    *_, last = doctor.check_environment(here.environment)
    assert last.state == "fix" and "cut off" in last.text


def test_no_environment_and_a_broken_one(here):
    here.command(str(here.environment.python), "echo 'no module named encodings' >&2; exit 1")
    assert "does not work (no module named encodings): make clean" in one(doctor.check_environment(here.environment))
    here.environment.python.unlink()
    assert one(doctor.check_environment(here.environment)).startswith("none  environment: .venv is not there")


# --- devices --------------------------------------------------------------------------------------------------------


def devices(here: Here, wanted: bool = False, ask: bool = False) -> list[str]:
    return [str(finding) for finding in doctor.check_devices(here.root, here.environment, wanted, ask, 1)]


TPUS = 'echo \'{"type": "TPU", "count": 4}\''


def test_no_chip_is_an_error_only_when_it_is_wanted(here):
    assert [line[:4] for line in devices(here)] == ["none"]
    (line,) = devices(here, wanted=True)
    assert line.startswith("fix   TPU: TPU=local")
    here.installed(VERSIONS, devices='echo warning; echo \'{"type": "CPU", "count": 1}\'')
    assert devices(here, ask=True)[1] == "ok    torch_xla: 1 devices, CPU"


def test_chips_are_counted_and_opened(here):
    here.chips("accel0", "accel1", "accel10", "accel_x")
    here.installed(VERSIONS, devices=TPUS)
    assert devices(here) == [
        "ok    TPU: 3 device files of chips (/dev/accel0, /dev/accel1, /dev/accel10)",
        "ok    TPU in use: no process holds it",
        "ok    libtpu: 0.0.21, as pinned",
        "ok    torch_xla: 4 devices, TPU",
    ]


def test_other_cards_in_vfio_are_no_chips(here):
    here.chips("vfio/0", "vfio/1", "vfio/vfio")
    for group, vendor in (("0", "0x1ae0"), ("1", "0x10de")):
        folder = here.root / f"sys/kernel/iommu_groups/{group}/devices/0000:00:05.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
    assert doctor.find_chips(here.root) == ["/dev/vfio/0"]


def test_who_holds_a_chip_is_named_and_torch_xla_left_alone(here):
    here.chips("vfio/0")
    here.process(41, "/dev/null", "sh")
    here.process(42, "/dev/vfio/0", "python", "-m", "train.glue")
    here.installed(VERSIONS, devices=TPUS)
    lines = devices(here)
    assert "fix   TPU in use: process 42 holds it (python -m train.glue)" in lines[1] and "kill 42" in lines[1]
    assert "process 41" not in str(lines) and lines[-1].startswith("none  torch_xla: not asked")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every process")
def test_processes_that_cannot_be_looked_into_are_said(here):
    here.chips("accel0")
    here.process(41, "/dev/accel0", "sh")
    (here.root / "proc/41/fd").chmod(0)
    assert "by no process of yours" in devices(here)[1]


@pytest.mark.parametrize(
    "answer, text",
    [
        ("sleep 5; exit 0", "no devices in 1 s; a slice of several hosts answers only when all of them ask at once"),
        ("echo 'RuntimeError: no chip' >&2; exit 1", "it cannot open the devices (RuntimeError: no chip)"),
        ('echo \'{"type": "CPU", "count": 1}\'', "it uses the CPU and not the TPU"),
    ],
)
def test_chips_that_torch_xla_does_not_see(here, answer, text):
    here.chips("accel0")
    here.installed(VERSIONS, devices=answer)
    line = devices(here)[-1]
    assert line.startswith("fix   torch_xla: ") and text in line


def test_chips_without_libtpu(here):
    here.chips("accel0")
    here.installed(VERSIONS | {"libtpu": ""}, devices=TPUS)
    assert "fix   libtpu: missing, and 0.0.21 is needed" in devices(here)[2]


# --- memory and disk ------------------------------------------------------------------------------------------------


def disk(gigabytes: float):
    return lambda path: argparse.Namespace(free=gigabytes * 1e9)


def meminfo(here: Here, gigabytes: float) -> None:
    (here.root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {int(gigabytes * 1e9 / 1024)} kB\n")


def test_memory(here):
    meminfo(here, 8.2)
    memory, shared = doctor.check_memory(here.root, 8, disk(4.1))
    assert memory.state == shared.state == "ok" and "8.2 GB available; a recipe takes up to 8.0 GB" in memory.text
    memory, shared = doctor.check_memory(here.root, 16, disk(4.1))
    assert memory.state == "fix" and 'ARGS="--workers 8"' in memory.text
    assert shared.state == "fix" and 'ARGS="--workers 8"' in shared.text and "--shm-size" in shared.text
    meminfo(here, 1.5)
    assert "even a trial takes 2 GB" in str(next(doctor.check_memory(here.root, 1, disk(9))))


def test_a_containers_limit_counts(here):
    meminfo(here, 100)
    group = here.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("4000000000\n")
    (group / "memory.current").write_text("1000000000\n")
    assert doctor.available_memory(here.root) == 3e9
    (group / "memory.max").write_text("max\n")
    assert doctor.available_memory(here.root) > 99e9


def test_no_shared_memory(here):
    meminfo(here, 9)
    (here.root / "dev/shm").rmdir()
    *_, shared = doctor.check_memory(here.root, 2)
    assert shared.state == "fix" and "there is no /dev/shm" in shared.text


def test_disk_is_added_up_for_folders_that_share_one(here, tmp_path):
    def check(runs: str, gigabytes: float) -> str:
        return one(doctor.check_disk(here.environment, runs, tmp_path / "cache", tmp_path, disk(gigabytes)))

    assert check("runs", 6.5).startswith("ok    disk: 6.5 GB free; needed 6 GB (temporary files 1 GB")
    assert check("gs://bucket/runs", 1.5).startswith("ok ")
    (here.project / ".venv/.installed").unlink()
    assert "fix   disk: 20 GB free, and 21 GB are needed (environment 8 GB" in check("runs", 20)
    assert check("runs", 21).startswith("ok ")


# --- gcloud and the TPU ---------------------------------------------------------------------------------------------

GCLOUD = """
case "$*" in
"auth list "*) echo {account};;
"config list "*) echo '{{"core": {{{project}}}, "compute": {{{zone}}}}}';;
"compute tpus tpu-vm describe my-tpu "*) echo '{{"state": "{state}", "networkEndpoints": [{{}}]}}';;
*) echo "unexpected: $*" >&2; exit 2;;
esac
"""


def gcloud(here: Here, **values: str) -> None:
    usual = {"account": "me@x.org", "project": '"project": "mine"', "zone": '"zone": "us-east5-b"', "state": "READY"}
    here.command("gcloud", GCLOUD.format(**usual | values))


def test_gcloud(here):
    assert states(doctor.check_gcloud("", "", "")) == ["none"]
    assert "fix   gcloud: not installed" in one(doctor.check_gcloud("my-tpu", "", ""))
    gcloud(here)
    lines = [str(finding) for finding in doctor.check_gcloud("my-tpu", "", "")]
    assert lines == ["ok    gcloud: logged in as me@x.org", "ok    project: mine", "ok    zone: us-east5-b"]
    gcloud(here, account="", project="", zone="")
    lines = [str(finding) for finding in doctor.check_gcloud("my-tpu", "", "")]
    assert "fix   gcloud: not logged in: gcloud auth login" in lines[0]
    assert (
        "give PROJECT=" in lines[1] and "give ZONE=" in lines[2] and states(doctor.check_gcloud("", "", "")) == ["none"]
    )
    assert states(doctor.check_gcloud("my-tpu", "a-zone", "a-project")) == ["fix", "ok", "ok"]
    here.command("gcloud", "echo 'ERROR: no python' >&2; exit 1")
    assert "does not work (ERROR: no python)" in one(doctor.check_gcloud("my-tpu", "", ""))


def test_the_state_of_a_tpu_vm(here):
    host = hosts.TpuVm("my-tpu", "us-east5-b")
    assert "fix   ssh: not installed" in one(doctor.check_tpu(host))
    for name in ("ssh", "scp"):
        here.command(name, "exit 0")
    gcloud(here)
    assert one(doctor.check_tpu(host)) == "ok    TPU VM: my-tpu: TYPE, READY, 1 worker"
    gcloud(here, state="PREEMPTED")
    assert "fix   TPU VM: my-tpu is PREEMPTED" in one(doctor.check_tpu(host))
    here.command("gcloud", "echo 'ERROR: There was a problem connecting' >&2; exit 1")
    assert "fix   TPU VM: TPU=my-tpu: Google's API cannot be reached" in one(doctor.check_tpu(host))


def test_plain_hosts_are_logged_in_to(here):
    here.command("scp", "exit 0")
    here.command(
        "ssh",
        'case "$*" in *" a "*) exit 0;; *" old "*) exit 1;; *" b "*) echo "b: Permission denied (publickey)." >&2;;'
        ' *) echo "ssh: connect to host c port 22: Connection refused" >&2;; esac; exit 255',
    )
    lines = [str(finding) for finding in doctor.check_tpu(hosts.SshHosts("ssh:a,old,b,c", ["a", "old", "b", "c"]))]
    assert [line[:4] for line in lines] == ["ok  ", "fix ", "fix ", "fix "]
    assert "older than 3.8" in lines[1] and "does not accept your ssh key" in lines[2]
    assert "c cannot be reached (ssh: connect to host c port 22: Connection refused)" in lines[3]


# --- data and runs --------------------------------------------------------------------------------------------------


def test_data(here, tmp_path):
    def check(data: str, remote: bool = False) -> str:
        return str(next(doctor.check_data(data, here.environment, remote)))

    folder = tmp_path / "it's data"
    folder.mkdir()
    assert check(str(folder)).endswith("is empty") and check(str(folder)).startswith("fix ")
    (folder / "file").touch()
    assert check(str(folder)) == f"ok    data: {folder} can be read"
    assert check(f"{folder}/missing").startswith("fix ") and "does not exist" in check(f"{folder}/missing")
    assert check("gs://bucket/data").startswith("fix ") and "gcsfuse" in check("gs://bucket/data")
    assert check("/data", remote=True).startswith("none  data: /data is read on the workers")
    assert "taken for the id of a data set on the hub" in check("nyu-mll/glue")


def test_the_hub_is_spoken_of_only_for_its_ids(here, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    lines = [str(finding) for finding in doctor.check_data("nyu-mll/glue", here.environment, False)]
    assert "none  HF_TOKEN: not set" in lines[1] and f"kept in {tmp_path / 'hub'}" in lines[2]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    lines = [str(finding) for finding in doctor.check_data("nyu-mll/glue", here.environment, True)]
    assert lines[0].startswith("ok    HF_TOKEN") and "hf_secret" not in str(lines)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_data_of_somebody_else(here, tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    assert "cannot be read by this user" in one(doctor.check_data(str(tmp_path / "closed"), here.environment, False))


def test_runs(here):
    def check(runs: str, remote: bool = False) -> str:
        return one(doctor.check_runs(runs, here.environment, remote))

    before = sorted(here.project.rglob("*"))
    assert check("runs") == "ok    runs: runs can be written"
    assert sorted(here.project.rglob("*")) == before
    (here.project / "runs").touch()
    assert check("runs").startswith("fix ") and "is a file" in check("runs")
    assert "ok" in check(f"file://{here.project}/x") and check("/proc/x").startswith("fix ")
    assert check("runs", remote=True).startswith("none  runs: runs is on the workers' disks")


def test_runs_in_a_bucket_are_tried_by_the_environments_fsspec(here):
    here.command(str(here.environment.python), f'exec {sys.executable} "$@"')
    assert one(doctor.check_runs("memory://bucket/runs", here.environment, False)).startswith(
        "ok    runs: memory://bucket"
    )
    here.command(str(here.environment.python), "echo 'OSError: Forbidden' >&2; exit 1")
    line = one(doctor.check_runs("gs://bucket/runs", here.environment, False))
    assert line.startswith("fix   runs: gs://bucket/runs: OSError: Forbidden") and "application-default login" in line
    here.environment.python.unlink()
    assert one(doctor.check_runs("gs://bucket/runs", here.environment, False)).startswith("none  runs: ")


# --- the whole ------------------------------------------------------------------------------------------------------


def doctor_of(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-I", "-S", str(project / "tpu/doctor.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_goes_through_without_an_environment_and_says_so_by_its_exit_code(here):
    for name in ("tpu/doctor.py", "tpu/launch/hosts.py", "tpu/__init__.py", "data/__init__.py"):
        (here.project / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, here.project / name)
    shutil.rmtree(here.project / ".venv")
    here.answers("python3.11", {"name": "CPython", "version": "3.11.7", "minor": [3, 11], "missing": []})
    here.command("git", "echo git version 2.39.5")
    result = doctor_of(here.project, "--python", "python3.11", "--runs", "/proc/none")
    lines = result.stdout.splitlines()
    assert result.returncode == 1 and not result.stderr
    assert (
        lines[-1].startswith("fix   runs: ") and "none  environment: .venv is not there; make install" in result.stdout
    )
    assert all(line[:6] in ("ok    ", "none  ", "fix   ") for line in lines)
    result = doctor_of(here.project, "--tpu", "My_Tpu")
    assert result.returncode == 1 and "fix   TPU VM: TPU=My_Tpu is not the name of a TPU VM" in result.stdout


def test_what_is_wrong_with_gcloud_is_said_once(here):
    gcloud(here, account="")
    for name in ("ssh", "scp"):
        here.command(name, "exit 0")
    meminfo(here, 99)
    options = argparse.Namespace(
        python="/none", tpu="my-tpu", zone="", project="", ssh_config="", devices=False, runs="runs", data=""
    )
    lines = [str(finding) for finding in doctor.examine(options, here.project, here.root)]
    assert [line for line in lines if "gcloud auth login" in line] == ["fix   gcloud: not logged in: gcloud auth login"]
    assert not [line for line in lines if "TPU VM" in line]


def test_it_needs_no_newer_python_than_it_says():
    tree = ast.parse((ROOT / "tpu/doctor.py").read_text(), feature_version=(3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} - {"data", "tpu"} <= {
        *sys.stdlib_module_names,
        "__future__",
    }
