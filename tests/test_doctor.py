"""tpu/doctor.py: each check in its ok and its fix state, over fake commands on PATH and a fake / of files."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpu import doctor

ROOT = Path(__file__).parent.parent
PINS = {
    "requirements.txt": "torch==2.9.0 # a\ntorch_xla==2.9.0 # b\ntorchvision==0.24.0 # c\nnumpy==2.4.6 # d\n",
    "requirements-torchrec.txt": "torchrec==1.4.0 # e\n",
    "requirements-tpu.txt": "libtpu==0.0.21 # f\n",
}


class Here:
    """Commands on PATH, a project with an environment, which is the current folder, and a root folder."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.project, self.root = folder / "bin", folder / "project", folder / "root"
        for path in (self.bin, self.project / ".venv/bin", self.root / "proc", self.root / "dev/shm"):
            path.mkdir(parents=True)
        for name in ("sh", "cat", "sleep"):
            (self.bin / name).symlink_to(shutil.which(name))
        for name, text in PINS.items():
            (self.project / name).write_text(text)
            os.utime(self.project / name, (1, 1))
        (self.project / ".venv/.installed").touch()
        self.python = self.project / ".venv/bin/python"
        self.command(self.python, "")
        self.installed("torch-2.9.0+cu128 torch-xla-2.9.0 torchvision-0.24.0 numpy-2.4.6 torchrec-1.4.0")

    def command(self, name: str | Path, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def installed(self, packages: str) -> None:
        site = self.project / ".venv/lib/python3.11/site-packages"
        shutil.rmtree(site, ignore_errors=True)
        for package in packages.split():
            name, _, version = package.rpartition("-")
            (site / f"{name}-{version}.dist-info").mkdir(parents=True)
            (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def chips(self, *names: str) -> list[str]:
        for name in names:
            (self.root / "dev" / name).parent.mkdir(exist_ok=True)
            (self.root / "dev" / name).touch()
        return [f"/dev/{name}" for name in names]

    def meminfo(self, gigabytes: float) -> None:
        available = int(gigabytes * 1e9 / 1024)
        (self.root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available} kB\n")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Here:
    here = Here(tmp_path)
    monkeypatch.setenv("PATH", str(here.bin))
    monkeypatch.setattr(doctor, "ROOT", here.root)
    monkeypatch.chdir(here.project)
    return here


def set_free(monkeypatch, gigabytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=gigabytes * 1e9))


@pytest.mark.parametrize(
    "script, about",
    [
        ("echo CPython 3.11.7", "CPython 3.11.7"),
        ("echo CPython 3.12.1", "CPython 3.12.1: CPython 3.11 with venv and ensurepip is needed"),
        ("echo PyPy 3.11.7", "PyPy 3.11.7: CPython 3.11 with"),
        ("echo \"No module named 'ensurepip'\" >&2; exit 1", "No module named 'ensurepip': CPython 3.11 with"),
        (f'exec {sys.executable} "$@"', f"CPython {sys.version.split()[0]}"),
        ("exit 1", "no message: CPython 3.11 with"),
    ],
)
def test_the_interpreter(here, script, about):
    here.command("python3.11", script)
    line, _ = doctor.check_programs("python3.11", "none")
    good = ": CPython 3.11 with" not in about
    assert line.startswith(f"{'ok ' if good else 'fix'}   Python: python3.11: {about}")
    assert good or "apt-get install -y python3.11 python3.11-venv" in line


def test_the_launchers_programs(here):
    for name in ("git", "ssh"):
        here.command(name, "")
    for lack in ("fix", "none"):
        first, second = doctor.check_programs("x", lack)
        assert first.startswith("fix   Python: x: x: No such file or directory")
        assert second.startswith(f"{lack:<4}  for TPU=: no scp: install git and")
    here.command("scp", "")
    assert list(doctor.check_programs("x", "fix"))[1] == "ok    for TPU=: git, ssh, scp"


def test_a_command_that_hangs_is_given_up(here):
    """Also when its child, as gcloud's Python, holds the output open."""
    here.command("gcloud", "sleep 9; exit 0")
    begun = time.monotonic()
    assert doctor.run("gcloud", seconds=0.3) == (False, "gcloud did not answer in 0 s")
    assert time.monotonic() - begun < 5


def test_an_environment_as_pinned(here):
    complete = "ok    installation: complete"
    assert list(doctor.check_environment([])) == ["ok    packages: all 5 as pinned", complete]
    (missing, *_) = doctor.check_environment(["/dev/accel0"])
    assert missing == "fix   packages: libtpu missing (pinned: 0.0.21): touch requirements.txt && make install"
    os.utime(here.project / "requirements-tpu.txt")
    os.utime(here.project / ".venv/.installed", (9, 9))
    *_, last = doctor.check_environment([])
    assert last == "fix   installation: cut off, or older than requirements-tpu.txt: make install"
    (here.project / ".venv/.installed").unlink()
    *_, last = doctor.check_environment([])
    assert last.startswith("fix   installation: cut off")


@pytest.mark.parametrize(
    "changed, text, remedy",
    [
        ("torch-2.8.0", "torch 2.8.0 (pinned: 2.9.0)", "make clean, then make install"),
        ("torch_xla-", "torch_xla missing (pinned: 2.9.0)", "make clean, then make install"),
        ("torchvision-0.23.0", "torchvision 0.23.0 (pinned: 0.24.0)", "make clean, then make install"),
        ("torchrec-", "torchrec missing (pinned: 1.4.0)", "touch requirements.txt && make install"),
    ],
)
def test_packages_that_do_not_fit(here, changed, text, remedy):
    versions = {"torch": "2.9.0", "torch_xla": "2.9.0", "torchvision": "0.24.0", "torchrec": "1.4.0", "numpy": "1.26.4"}
    name, _, version = changed.partition("-")
    versions[name] = version
    here.installed(" ".join(f"{name}-{version}" for name, version in versions.items() if version))
    line, _ = doctor.check_environment([])
    assert line.startswith("fix   packages: ") and text in line and "numpy 1.26.4 (pinned: 2.4.6)" in line
    assert line.endswith(f": {remedy}") and line.count("pinned") == 2


def test_no_environment_and_a_broken_one(here):
    here.command(here.python, "echo 'no module named encodings' >&2; exit 1")
    (line,) = doctor.check_environment([])
    assert line == "fix   environment: no module named encodings: make clean, then make install"
    here.python.unlink()
    (line,) = doctor.check_environment([])
    assert line.startswith("none  environment: .venv/bin/python: No such file") and "make install" in line


def devices(chips: list[str], wanted: bool = False, asked: bool = False) -> list[str]:
    return list(doctor.check_devices(chips, wanted, asked))


def test_no_chip_is_an_error_only_when_it_is_wanted(here):
    (line,) = devices([])
    assert line.startswith("none  TPU: ")
    (line,) = devices([], wanted=True)
    assert line.startswith("fix   TPU: TPU=local")
    here.command(here.python, "echo warning; echo '1 devices, CPU'")
    assert devices([], asked=True)[1] == "ok    torch_xla: 1 devices, CPU"


def test_chips_are_counted_and_opened(here, monkeypatch):
    here.command(here.python, "echo '4 devices, TPU'")
    chips = here.chips("accel0", "accel1", "vfio/0")
    for user, unseen in ((0, ""), (1, " that you may see; sudo lsof -w /dev/accel* /dev/vfio/* shows all")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert devices(chips) == [
            f"ok    TPU: 3 chips (/dev/accel0, /dev/accel1, /dev/vfio/0), held by no process{unseen}",
            "ok    torch_xla: 4 devices, TPU",
        ]


def test_who_holds_a_chip_is_named_and_torch_xla_left_alone(here):
    here.command(here.python, "touch asked")
    for pid, opened in ((41, "/dev/null"), (42, "/dev/vfio/0")):
        (here.root / f"proc/{pid}/fd").mkdir(parents=True)
        (here.root / f"proc/{pid}/fd/3").symlink_to(opened)
    (line,) = devices(here.chips("vfio/0"), asked=True)
    assert line.startswith("fix   TPU: 1 chips (/dev/vfio/0), held by process 42: a second run cannot start")
    assert "make stop TPU=" in line and "kill 42" in line and not (here.project / "asked").exists()


def test_chips_that_torch_xla_does_not_see(here, monkeypatch):
    monkeypatch.setattr(doctor, "DEVICE_SECONDS", 1)
    several = "a slice of several hosts answers only when all of them ask at once"
    for script, text in (
        ("sleep 5", f"did not answer in 1 s: {several}"),
        ("echo 'RuntimeError: no chip' >&2; exit 1", f"RuntimeError: no chip: {several}"),
        ("echo '1 devices, CPU'", "1 devices, CPU: unset PJRT_DEVICE"),
    ):
        here.command(here.python, script)
        line = devices(here.chips("accel0"))[-1]
        assert line.startswith("fix   torch_xla: ") and text in line


def test_memory(here, monkeypatch):
    here.meminfo(8.2)
    set_free(monkeypatch, 4.1)
    assert doctor.check_memory(8).startswith("ok    memory: 8.2 GB available, 4.1 GB in /dev/shm; a recipe takes 2 GB")
    assert 'give ARGS="--workers 8"; in Docker --shm-size' in doctor.check_memory(9)
    set_free(monkeypatch, 2.4)
    assert doctor.check_memory(8).startswith("fix ") and 'ARGS="--workers 4"' in doctor.check_memory(8)
    # A container's limit counts.
    here.meminfo(100)
    group = here.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000000000\n")
    for limit, available in (("4000000000\n", "3.0"), ("max\n", "100.0")):
        (group / "memory.max").write_text(limit)
        assert f"memory: {available} GB available" in doctor.check_memory(1)
    here.meminfo(1.5)
    assert "end other programs, even a trial does not fit" in doctor.check_memory(1)
    here.meminfo(9)
    (here.root / "dev/shm").rmdir()
    assert doctor.check_memory(2).startswith("fix ") and 'ARGS="--workers 0"' in doctor.check_memory(2)


def test_disk_is_added_up_for_folders_that_share_one(here, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def check(runs: str, gigabytes: float) -> str:
        set_free(monkeypatch, gigabytes)
        (line,) = doctor.check_disk(runs)
        return line

    assert check("runs", 6.5).startswith("ok    disk: 6.5 GB free, 6 GB needed (temporary files 1 GB")
    assert check("runs", 5.5).startswith("fix ") and check("gs://bucket/runs", 1.5).startswith("ok ")
    (here.project / ".venv/.installed").unlink()
    assert "fix   disk: 20.0 GB free, 21 GB needed (environment 8 GB" in check("runs", 20)
    assert check("runs", 21).startswith("ok ")


GCLOUD = """
case "$*" in
"config list "*) echo '{{"core": {{{core}}}, "compute": {{{zone}}}}}';;
"compute tpus tpu-vm describe my-tpu "*) echo '{{"state": "{state}", "networkEndpoints": [{{}}]}}';;
*) echo "unexpected: $*" >&2; exit 2;;
esac
"""


def test_gcloud_and_the_state_of_a_tpu_vm(here):
    def check(tpu: str, place: tuple[str, str] = ("", ""), **values: str) -> list[str]:
        core = '"account": "me@x.org", "project": "mine"'
        usual = {"core": core, "zone": '"zone": "us-east5-b"', "state": "READY"}
        here.command("gcloud", GCLOUD.format(**usual | values))
        return list(doctor.check_tpu(tpu, *place, ""))

    assert next(doctor.check_tpu("my-tpu", "", "", "")).startswith(
        "fix   gcloud: TPU=name needs it: gcloud: No such file"
    )
    assert next(doctor.check_tpu("", "", "", "")).startswith("none  gcloud: TPU=name needs it")
    there = "ok    gcloud: account me@x.org, project mine, zone us-east5-b"
    assert check("") == [there]
    assert check("my-tpu") == [there, "ok    TPU VM: my-tpu: TYPE, READY, 1 worker"]
    assert "fix   TPU VM: my-tpu: TYPE, PREEMPTED" in check("my-tpu", state="PREEMPTED")[1]
    assert "recreate it: gcloud compute tpus tpu-vm delete" in check("my-tpu", state="PREEMPTED")[1]
    (line,) = check("my-tpu", core="", zone="")  # and the TPU VM is not asked for, for the same reason
    assert line.startswith("fix   gcloud: account None, project None, zone None: gcloud auth login; give PROJECT= and")
    assert check("", zone="")[0].startswith("none  gcloud: account me@x.org, project mine, zone None")
    assert (
        check("my-tpu", ("a", "b"), core='"account": "me"', zone="")[0] == "ok    gcloud: account me, project b, zone a"
    )
    here.command("gcloud", "echo 'ERROR: no python' >&2; exit 1")
    assert next(doctor.check_tpu("my-tpu", "", "", "")).startswith("fix   gcloud: TPU=name needs it: ERROR: no python")
    problem = "echo 'ERROR: There was a problem connecting' >&2; exit 1"
    lines = check("my-tpu", state=f"'; {problem}; : '")
    assert "fix   TPU VM: TPU=my-tpu: Google's API cannot be reached" in lines[1]


def test_plain_hosts_are_logged_in_to(here):
    here.command(
        "ssh",
        'case "$*" in *" a "*) echo Python 3.10.12; exit;; *" b "*) echo "b: Permission denied (publickey)." >&2;;'
        ' *) echo "ssh: connect to host c port 22: Connection refused" >&2;; esac; exit 255',
    )
    lines = list(doctor.check_tpu("ssh:a,b,c", "", "", ""))
    assert lines[0] == "ok    worker 0: a: Python 3.10.12"
    assert lines[1].startswith("fix   worker 1: ") and "does not accept your ssh key" in lines[1]
    assert lines[2].startswith("fix   worker 2: c: ssh: connect to host c port 22: Connection refused")


def test_data(here, tmp_path, monkeypatch):
    folder = tmp_path / "it's data"
    folder.mkdir()
    assert doctor.check_data(str(folder), False).startswith(f"fix   data: {folder} is empty")
    (folder / "file").touch()
    assert doctor.check_data(str(folder), False) == f"ok    data: {folder} can be read"
    missing = doctor.check_data(f"{folder}/missing", False)
    assert missing.startswith("fix ") and "No such file or directory: give the right path" in missing
    url = doctor.check_data("gs://bucket/data", True)
    assert url.startswith("fix ") and "gcloud storage cp -r" in url and "gcsfuse" in url and "every worker" in url
    assert doctor.check_data("/data", True).startswith("none  data: /data: read on the workers")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    closed = doctor.check_data(str(folder), False)
    assert closed.startswith("fix ") and "Permission denied" in closed and "chmod -R u+rX" in closed
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for remote in (False, True):
        if remote:  # the folder is here, not on the workers
            (here.project / "nyu-mll/glue").mkdir(parents=True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        line = doctor.check_data("nyu-mll/glue", remote)
        assert line.startswith("none ") and f"kept in {tmp_path / 'hub'}" in line and "export HF_TOKEN=" in line
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        line = doctor.check_data("nyu-mll/glue", remote)
        assert line.startswith("ok ") and line.endswith("HF_TOKEN is set")


def test_runs(here):
    before = sorted(here.project.rglob("*"))
    assert doctor.check_runs("runs", False) == "ok    runs: runs can be written"
    assert sorted(here.project.rglob("*")) == before
    (here.project / "runs").touch()
    assert doctor.check_runs("runs", False).startswith("fix   runs: runs: Not a directory: ")
    assert doctor.check_runs("/proc/x", False).startswith("fix   runs: /proc: ")
    assert doctor.check_runs("runs", True).startswith("none  runs: runs is on the TPU and goes with it")


def test_runs_in_a_bucket_are_tried_by_the_environments_fsspec(here):
    here.command(here.python, f'exec {sys.executable} "$@"')
    url = "memory://bucket/runs"
    assert doctor.check_runs(url, False) == f"ok    runs: {url}: can be written and read"
    assert doctor.check_runs(url, True).endswith("their service account decides")
    here.command(here.python, "echo 'OSError: Forbidden' >&2; exit 1")
    line = doctor.check_runs("gs://bucket/runs", False)
    assert line.startswith("fix   runs: gs://bucket/runs: OSError: Forbidden") and "application-default login" in line
    here.python.unlink()
    assert doctor.check_runs("gs://bucket/runs", False).startswith("none  runs: ")


def test_it_goes_through_without_an_environment_and_says_so_by_its_exit_code(here):
    for name in ("tpu/doctor.py", "tpu/launch/hosts.py", "errors.py"):
        (here.project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, here.project / name)
    shutil.rmtree(here.project / ".venv")
    here.command("python3.11", "echo CPython 3.11.7")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", "-S", str(here.project / "tpu/doctor.py"), *arguments]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)

    result = run("--python", "python3.11", "--runs", "file:///proc/none", "--data", "tpu")
    assert result.returncode == 1 and not result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("fix   runs: /proc: ") and lines[-2] == "ok    data: tpu can be read"
    assert "none  environment: .venv/bin/python" in result.stdout
    assert all(line[:6] in ("ok    ", "none  ", "fix   ") for line in lines)
    result = run("--tpu", "My_Tpu")
    assert result.returncode == 1 and "fix   TPU VM: TPU=My_Tpu is not the name of a TPU VM" in result.stdout


def test_examine_finds_the_chips_and_tells_local_from_remote(here):
    here.meminfo(99)
    here.chips("accel0", "accel_x", "vfio/7", "vfio/vfio")
    here.command(here.python, "echo '2 devices, TPU'")
    empty = dict.fromkeys(("tpu", "zone", "project", "ssh_config", "data", "devices"), "")
    options = argparse.Namespace(**empty, python="none", runs="runs")
    lines = list(doctor.examine(options))
    assert any("TPU: 2 chips (/dev/accel0, /dev/vfio/7)" in line for line in lines)
    assert "ok    runs: runs can be written" in lines and any(
        line.startswith("none  for TPU=: no git") for line in lines
    )
    options.tpu = "my-tpu"
    lines = list(doctor.examine(options))
    assert any(line.startswith("fix   for TPU=: no git") for line in lines) and lines[-1].startswith("none  runs: ")
    assert not any(line.startswith(("fix   disk", "ok    disk")) and "runs" in line for line in lines)
