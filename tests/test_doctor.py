"""tpu/doctor.py: each check in its ok and its fix state, over fake commands on PATH and a fake / of files."""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from data import look
from errors import InputError
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


def assert_line(line: str, state: str, *texts: str) -> None:
    """Asserts what a check has found: ok, none or fix, and parts of its sentence."""
    assert line.startswith(f"{state:<6}") and all(text in line for text in texts), line


def set_free(monkeypatch, gigabytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=gigabytes * 1e9))


def test_the_interpreter_and_the_launchers_programs(here):
    needed = ": CPython 3.11, 3.12 or 3.13 with venv, ensurepip and its shared library is needed"
    for script, about in {
        "echo CPython 3.13.0": "CPython 3.13.0",
        f'exec {sys.executable} "$@"': f"CPython {sys.version.split()[0]}",
        "echo CPython 3.10.12": f"CPython 3.10.12{needed}",
        "echo PyPy 3.11.7": f"PyPy 3.11.7{needed}",
        "echo \"No module named 'ensurepip'\" >&2; exit 1": f"No module named 'ensurepip'{needed}",
    }.items():
        here.command("python3.11", script)
        line, *_ = doctor.check_programs("python3.11", "none")
        assert line.startswith(f"{'fix' if needed in about else 'ok '}   Python: python3.11: {about}")
        assert needed not in about or "apt-get install -y python3.11 python3.11-venv libpython3.11" in line
    here.command("git", "")
    for lack in ("fix", "none"):
        first, second = doctor.check_programs("x", lack)
        assert first.startswith("fix   Python: x: x: No such file or directory")
        assert second.startswith(f"{lack:<4}  for TPU=: no ssh: install git and")
    here.command("ssh", "")
    assert list(doctor.check_programs("x", "fix"))[1] == "ok    for TPU=: git, ssh"
    # A command that hangs is given up, also when its child, as gcloud's Python, holds the output open.
    here.command("gcloud", "sleep 9; exit 0")
    begun = time.monotonic()
    assert doctor.run("gcloud", seconds=0.3) == (False, "gcloud did not answer in 0 s")
    assert time.monotonic() - begun < 5


ANEW, AGAIN = "make clean, then make install", "touch requirements.txt && make install"


def test_the_environment_is_as_pinned_and_complete(here):
    def check(*chips: str) -> list[str]:
        return list(doctor.check_environment(list(chips)))

    library = "ok    libpython: .venv/bin/python has it"
    assert check() == ["ok    packages: all 5 as pinned", library, "ok    installation: complete"]
    assert check("/dev/accel0")[0] == f"fix   packages: libtpu missing (pinned: 0.0.21): {AGAIN}"
    for versions, text, remedy in (
        ("torch-2.8.0 torch_xla-2.9.0 torchvision-0.24.0 torchrec-1.4.0", "torch 2.8.0 (pinned: 2.9.0)", ANEW),
        ("torch-2.9.0 torchvision-0.24.0 torchrec-1.4.0", "torch_xla missing (pinned: 2.9.0)", ANEW),
        ("torch-2.9.0 torch_xla-2.9.0 torchvision-0.23.0 torchrec-1.4.0", "torchvision 0.23.0 (pinned: 0.24.0)", ANEW),
        ("torch-2.9.0 torch_xla-2.9.0 torchvision-0.24.0", "torchrec missing (pinned: 1.4.0)", AGAIN),
    ):
        here.installed(f"{versions} numpy-1.26.4")
        line, *_ = check()
        assert_line(line, "fix", "packages: ", text, "numpy 1.26.4 (pinned: 2.4.6)")
        assert line.endswith(f": {remedy}") and line.count("pinned") == 2
    os.utime(here.project / "requirements-tpu.txt")
    os.utime(here.project / ".venv/.installed", (9, 9))
    assert check()[-1] == "fix   installation: cut off, or older than requirements-tpu.txt: make install"
    (here.project / ".venv/.installed").unlink()
    assert_line(check()[-1], "fix", "installation: cut off")
    here.command(here.python, "echo 'no module named encodings' >&2; exit 1")
    assert check() == [f"fix   environment: no module named encodings: {ANEW}"]
    here.python.unlink()
    (line,) = check()
    assert_line(line, "none", "environment: .venv/bin/python: No such file", "make install")


LACKS = "error: torch_xla needs libpython3.11.so.1.0, and python3.11 comes without it: install its package"


def test_the_library_is_loaded_by_the_interpreter_and_by_that_of_the_environment(here):
    """Interpreters are asked by running tpu/libpython.py."""
    for python, check in (
        ("python3.11", lambda: list(doctor.check_programs("python3.11", "none"))[1]),
        (here.python, lambda: list(doctor.check_environment([]))[1]),
    ):
        name = python if python == "python3.11" else ".venv/bin/python"
        here.command(python, f'case "$1" in *libpython.py) exec {sys.executable} "$@";; esac; echo CPython 3.11.7')
        assert check() == f"ok    libpython: {name} has it"
        here.command(python, f'case "$1" in *libpython.py) echo "{LACKS}" >&2; exit 2;; esac; echo CPython 3.11.7')
        assert check() == f"fix   libpython: {LACKS.removeprefix('error: ')}"
        here.command(python, 'case "$1" in *libpython.py) exit 3;; esac; echo CPython 3.11.7')
        assert_line(check(), "fix", "libpython: no message: CPython 3.11, 3.12 or 3.13")


def test_a_libtpu_by_choice_is_accepted_and_never_called_proven(here):
    def check() -> str:
        return next(doctor.check_environment(["/dev/accel0"]))

    others = "torch-2.9.0 torch-xla-2.9.0 torchvision-0.24.0 numpy-2.4.6 torchrec-1.4.0"
    here.installed(f"{others} libtpu-0.0.51")
    assert check() == f"fix   packages: libtpu 0.0.51 (pinned: 0.0.21): {AGAIN}"
    (here.project / ".venv/.libtpu_version").write_text("0.0.51\n")
    chosen = "libtpu 0.0.51 (LIBTPU_VERSION=0.0.51; pinned: 0.0.21)"
    assert check() == f"ok    packages: all 6 as pinned, but {chosen}: not run on a TPU"
    here.installed(f"{others} libtpu-0.0.21")
    assert check() == f"fix   packages: libtpu 0.0.21 (LIBTPU_VERSION=0.0.51; pinned: 0.0.21): {AGAIN}"
    (here.project / ".venv/.libtpu_version").write_text("0.0.21\n")
    assert check() == "ok    packages: all 6 as pinned"


def test_chips_are_counted_and_opened_and_no_chip_is_an_error_only_when_it_is_wanted(here, monkeypatch):
    def check(*chips: str, wanted: bool = False, asked: bool = False) -> list[str]:
        return list(doctor.check_devices(list(chips), wanted, asked))

    for wanted, found in ((False, "none  TPU: "), (True, "fix   TPU: TPU=local")):
        (line,) = check(wanted=wanted)
        assert line.startswith(found)
    here.command(here.python, "echo warning; echo '1 devices, CPU'")
    assert check(asked=True)[1] == "ok    torch_xla: 1 devices, CPU"
    here.command(here.python, "echo '4 devices, TPU'")
    for user, unseen in ((0, ""), (1, " that you may see; sudo lsof -w /dev/accel* /dev/vfio/* shows all")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert check("/dev/accel0", "/dev/vfio/0") == [
            f"ok    TPU: 2 chips (/dev/accel0, /dev/vfio/0), held by no process{unseen}",
            "ok    torch_xla: 4 devices, TPU",
        ]
    # Chips that torch_xla does not see.
    monkeypatch.setattr(doctor, "DEVICE_SECONDS", 0.3)
    several = "a slice of several hosts answers only when all of them ask at once"
    for script, text in (
        ("sleep 5", f"did not answer in 0 s: {several}"),
        ("echo 'RuntimeError: no chip' >&2; exit 1", f"RuntimeError: no chip: {several}"),
        ("echo '1 devices, CPU'", "1 devices, CPU: unset PJRT_DEVICE"),
    ):
        here.command(here.python, script)
        assert_line(check("/dev/accel0")[-1], "fix", "torch_xla: ", text)
    # Who holds a chip is named, and torch_xla left alone.
    here.command(here.python, "touch asked")
    for pid, opened in ((41, "/dev/null"), (42, "/dev/vfio/0")):
        (here.root / f"proc/{pid}/fd").mkdir(parents=True)
        (here.root / f"proc/{pid}/fd/3").symlink_to(opened)
    (line,) = check("/dev/vfio/0", asked=True)
    held = "TPU: 1 chips (/dev/vfio/0), held by process 42: a second run cannot start"
    assert_line(line, "fix", held, "make stop TPU=", "kill 42")
    assert not (here.project / "asked").exists()


def test_memory(here, monkeypatch):
    here.meminfo(8.2)
    set_free(monkeypatch, 4.1)
    assert_line(doctor.check_memory(8), "ok", "8.2 GB available, 4.1 GB in /dev/shm; a recipe takes 2 GB")
    assert_line(doctor.check_memory(9), "fix", 'give ARGS="--workers 8"; in Docker --shm-size')
    set_free(monkeypatch, 2.4)
    assert_line(doctor.check_memory(8), "fix", 'ARGS="--workers 4"')
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
    assert_line(doctor.check_memory(2), "fix", 'ARGS="--workers 0"')


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
"compute tpus tpu-vm describe my-tpu "*) echo '{{"state": "{state}", "networkEndpoints": [{ends}]}}';;
*) echo "unexpected: $*" >&2; exit 2;;
esac
"""


SSH = """case "$*" in
*" a "*ensurepip*) exit 127;;
*" a "*) echo Python 3.10.12; exit;;
*" b "*) echo "b: Permission denied (publickey)." >&2;;
*) echo "ssh: connect to host c port 22: Connection refused" >&2;;
esac
exit 255"""


def test_another_host_is_searched_for_a_python_with_its_library(here):
    """What is sent there is run by its shell."""
    search = ("/bin/sh", "-c", doctor.FIND_PYTHON)
    assert doctor.run(*search) == (False, "no message")
    here.command("python3.11", f'case "$2" in *ensurepip*) exit 0;; esac; echo "{LACKS}" >&2; exit 2')
    assert doctor.run(*search) == (False, LACKS)
    here.command("python3.12", f'exec {sys.executable} "$@"')
    assert doctor.run(*search)[0]


def test_gcloud_the_state_of_a_tpu_vm_and_plain_hosts(here):
    def check(tpu: str, place: tuple[str, str] = ("", ""), **values: str) -> list[str]:
        core = '"account": "me@x.org", "project": "mine"'
        usual = {"core": core, "zone": '"zone": "us-east5-b"', "state": "READY", "ends": "{}"}
        here.command("gcloud", GCLOUD.format(**usual | values))
        return list(doctor.check_tpu(tpu, *place))

    for tpu, state in (("my-tpu", "fix"), ("", "none")):
        assert_line(next(doctor.check_tpu(tpu, "", "")), state, "gcloud: TPU=name needs it: gcloud: No such file")
    there = "ok    gcloud: account me@x.org, project mine, zone us-east5-b"
    assert check("") == [there]
    *found, inside = check("my-tpu")
    assert found == [there, "ok    TPU VM: my-tpu: TYPE, READY, 1 worker"]
    assert_line(inside, "fix", "worker 0: no external address", "--gcloud-flag=--internal-ip")
    lost = check("my-tpu", state="PREEMPTED")[1]
    assert_line(lost, "fix", "TPU VM: my-tpu: TYPE, PREEMPTED", "recreate it: gcloud compute tpus tpu-vm delete")
    (line,) = check("my-tpu", core="", zone="")  # and the TPU VM is not asked for, for the same reason
    assert_line(line, "fix", "gcloud: account None, project None, zone None: gcloud auth login; give PROJECT= and")
    assert_line(check("", zone="")[0], "none", "gcloud: account me@x.org, project mine, zone None")
    given = check("my-tpu", ("a", "b"), core='"account": "me"', zone="")
    assert given[0] == "ok    gcloud: account me, project b, zone a"
    here.command("gcloud", "echo 'ERROR: no python' >&2; exit 1")
    assert_line(next(doctor.check_tpu("my-tpu", "", "")), "fix", "gcloud: TPU=name needs it: ERROR: no python")
    lines = check("my-tpu", state="'; echo 'ERROR: There was a problem connecting' >&2; exit 1; : '")
    assert_line(lines[1], "fix", "TPU VM: TPU=my-tpu: ERROR: There was a problem connecting")
    # Plain hosts are logged in to.
    here.command("ssh", SSH)
    first, python, second, third = doctor.check_tpu("ssh:a,b,c", "", "")
    assert first == "ok    worker 0: a: Python 3.10.12"
    assert_line(python, "fix", "worker 0: a: no Python 3.11 to 3.13 with venv: CPython 3.11, 3.12")
    here.command("ssh", SSH.replace("exit 127", f'echo "{LACKS}" >&2; exit 1'))
    _, python, *_ = doctor.check_tpu("ssh:a,b,c", "", "")
    assert_line(python, "fix", f"worker 0: a: {LACKS.removeprefix('error: ')}: CPython 3.11, 3.12")
    assert_line(second, "fix", "worker 1: ", "does not accept your ssh key")
    assert_line(third, "fix", "worker 2: c: ssh: connect to host c port 22: Connection refused")


def test_a_blocked_port_22_is_found(monkeypatch):
    """A server that is there, one that is not, and a firewall, which drops packets without a word."""

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        if place[0] == "34.0.0.2":
            raise TimeoutError("timed out")
        return real((place[0], open_port if place[0] == "127.0.0.1" else 1), timeout)

    real = socket.create_connection
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        open_port = server.getsockname()[1]
        monkeypatch.setattr(doctor.socket, "create_connection", connect)
        first, second, third = doctor.check_ssh_port(("127.0.0.1", "127.0.0.3", "34.0.0.2"))
    assert first == "ok    worker 0: 127.0.0.1 port 22 is open"
    assert_line(second, "fix", "worker 1: 127.0.0.3 port 22: Connection refused")
    assert_line(third, "fix", "worker 2: 34.0.0.2 port 22: no answer", "must allow tcp:22", "--tunnel-through-iap")


def picture(path: Path, size: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size)).save(path)


def test_data_without_a_split_to_evaluate_on_is_no_data(here, tmp_path):
    here.command(here.python, f'exec {sys.executable} "$@"')
    picture(tmp_path / "images" / "train" / "cat" / "0.jpg")
    found = doctor.check_data(str(tmp_path / "images"), False, "resnet50", "")
    assert_line(found, "fix", "images has no folder to evaluate on; expected one of val, validation, test")


def test_every_image_that_is_evaluated_is_opened(tmp_path):
    for number in range(4):
        for split in ("train", "valid"):
            picture(tmp_path / split / "cat" / f"{number}.jpg")
    assert look.look(str(tmp_path), "resnet50").startswith("4 images of 1 classes")
    path = tmp_path / "valid" / "cat" / "1.jpg"
    path.write_bytes(b"")
    with pytest.raises(InputError, match="1.jpg is broken: the file is empty; replace the file"):
        look.look(str(tmp_path), "resnet50")
    path.unlink()
    path.symlink_to("nowhere.jpg")
    with pytest.raises(InputError, match="1.jpg is a link to nowhere.jpg, which is not there; mend the link"):
        look.look(str(tmp_path), "resnet50")


@pytest.mark.slow  # a process for each
def test_data_is_opened_as_the_script_would(here, tmp_path):
    here.command(here.python, f'exec {sys.executable} "$@"')

    def check(script: str, state: str, *texts: str, data: Path = tmp_path / "images", task: str = "") -> None:
        assert_line(doctor.check_data(str(data), False, script, task), state, f"data: {data}: ", *texts)

    for number in range(3):
        picture(tmp_path / "images" / "train" / "cat" / f"{number}.jpg")
    check("resnet50", "fix", "images has no folder to evaluate on; expected one of val, validation, test")
    for number in range(3):
        picture(tmp_path / "images" / "valid" / "cat" / f"{number}.jpg")
    (tmp_path / "images" / "test").mkdir()
    said = "3 images of 1 classes (trained on train/, evaluated on valid/; left out: test/)"
    check("resnet50", "ok", said)
    check("", "ok", f": resnet50: {said}")
    (tmp_path / "images" / "valid" / "cat" / "1.jpg").write_bytes(b"")
    check("resnet50", "fix", "valid/cat/1.jpg is broken: the file is empty")
    check("dlrm", "fix", "images has none of prepared.json (made by make data)")
    check("pretrain", "fix", "images has no report.json, found test, train, valid")
    check("transformer", "fix", "images has no train.<source>-<target>.<source>.idx")
    bare = tmp_path / "clicks.csv"
    bare.write_text("1,2,3\n")
    check("dlrm", "fix", "clicks.csv is a file; expected a folder", data=bare)
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    (tmp_path / "glue" / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n")
    check("glue", "fix", "RTE has no dev.tsv", data=tmp_path / "glue", task="rte")
    shutil.copy(tmp_path / "glue" / "RTE" / "train.tsv", tmp_path / "glue" / "RTE" / "val.tsv")
    said = "1 examples of rte (trained on RTE/train.tsv, evaluated on RTE/val.tsv)"
    check("glue", "ok", said, data=tmp_path / "glue", task="rte")
    check("glue", "ok", "tasks rte; TASK= chooses one", data=tmp_path / "glue")


def test_data(here, tmp_path, monkeypatch):
    folder = tmp_path / "it's data"
    folder.mkdir()
    assert_line(doctor.check_data(str(folder), False), "fix", f"data: {folder} is empty")
    (folder / "file").touch()
    assert_line(doctor.check_data(f"{folder}/missing", False), "fix", "No such file or directory: give the right path")
    here.python.rename(here.project / "elsewhere")
    assert_line(
        doctor.check_data(str(folder), False), "none", f"data: {folder} can be read; whether a script", "install"
    )
    # A folder is opened, and a bucket is listed, by the environment.
    here.command(here.python, f'exec {sys.executable} "$@"')
    found = doctor.check_data(str(folder), False)
    assert_line(
        found, "fix", f"data: {folder}: none of resnet50, dlrm, transformer, pretrain, glue can open it; MODEL="
    )
    assert_line(doctor.check_data(f"file://{folder}", True), "ok", "1 files, 0.0 GB, can be read; whether the workers")
    url = "memory://bucket/none"
    assert_line(doctor.check_data(url, False), "fix", "there is no memory:///bucket/none; is the name right")
    here.python.unlink()
    assert_line(doctor.check_data(url, False), "none", f"data: {url} cannot be tried without an environment")
    assert_line(doctor.check_data("/data", True), "none", "data: /data: read on the workers")
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert_line(doctor.check_data(str(folder), False), "fix", "Permission denied", "chmod -R u+rX")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for remote in (False, True):
        if remote:  # the folder is here, not on the workers
            (here.project / "nyu-mll/glue").mkdir(parents=True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        line = doctor.check_data("nyu-mll/glue", remote)
        assert_line(line, "none", f"kept in {tmp_path / 'hub'}", "export HF_TOKEN=")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert_line(doctor.check_data("nyu-mll/glue", remote), "ok", "HF_TOKEN is set")


def test_runs(here):
    before = sorted(here.project.rglob("*"))
    assert doctor.check_runs("runs", False) == "ok    runs: runs can be written"
    assert sorted(here.project.rglob("*")) == before
    (here.project / "runs").touch()
    assert_line(doctor.check_runs("runs", False), "fix", "runs: runs: Not a directory: ")
    assert_line(doctor.check_runs("/proc/x", False), "fix", "runs: /proc: ")
    assert_line(doctor.check_runs("runs", True), "none", "runs: runs is on the TPU and goes with it")
    # A bucket is tried by the environment's fsspec.
    here.command(here.python, f'exec {sys.executable} "$@"')
    url = "memory://bucket/runs"
    assert doctor.check_runs(url, False) == f"ok    runs: {url}: can be written and read"
    assert doctor.check_runs(url, True).endswith("their service account decides")
    here.command(here.python, "echo 'OSError: Forbidden' >&2; exit 1")
    url = "gs://bucket/runs"
    assert_line(doctor.check_runs(url, False), "fix", f"runs: {url}: OSError: Forbidden", "application-default login")
    here.python.unlink()
    assert_line(doctor.check_runs(url, False), "none", "runs: ")


def test_it_goes_through_without_an_environment_and_says_so_by_its_exit_code(here):
    tpu = ("doctor.py", "libpython.py", "launch/hosts.py", "launch/messages.py")
    for name in (*(f"tpu/{file}" for file in tpu), "errors.py"):
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
    assert lines[-1].startswith("fix   runs: /proc: ") and lines[-2].startswith("none  data: tpu can be read; whether")
    assert "none  environment: .venv/bin/python" in result.stdout
    assert all(line[:6] in ("ok    ", "none  ", "fix   ") for line in lines)
    result = run("--tpu", "My_Tpu")
    assert result.returncode == 1 and "fix   TPU VM: TPU=My_Tpu is not the name of a TPU VM" in result.stdout


def test_examine_finds_the_chips_and_tells_local_from_remote(here):
    here.meminfo(99)
    (here.root / "dev/vfio").mkdir()
    for name in ("accel0", "accel_x", "vfio/7", "vfio/vfio"):
        (here.root / "dev" / name).touch()
    here.command(here.python, "echo '2 devices, TPU'")
    empty = dict.fromkeys(("tpu", "zone", "project", "data", "script", "task", "devices"), "")
    options = argparse.Namespace(**empty, python="none", runs="runs")
    text = "\n".join(doctor.examine(options))
    assert "TPU: 2 chips (/dev/accel0, /dev/vfio/7)" in text
    assert "\nok    runs: runs can be written" in text and "\nnone  for TPU=: no git" in text
    options.tpu = "my-tpu"
    text = "\n".join(doctor.examine(options))
    assert "\nfix   for TPU=: no git" in text and text.splitlines()[-1].startswith("none  runs: ")
    assert not re.search("^(fix|ok)  .*disk.*runs", text, re.MULTILINE)
