"""tpu/doctor.py: each check in its ok and its fix state, over fake commands on PATH and a fake / of
files."""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from PIL import Image

from data import look
from errors import InputError
from tpu import doctor

ROOT = Path(__file__).parent.parent
REQUIREMENTS = """torch==2.9.0 # a
torch_xla==2.9.0 # b
torchvision==0.24.0 # c
numpy==2.4.6 # d
"""
PINS = {
    "requirements.txt": REQUIREMENTS,
    "requirements-torchrec.txt": "torchrec==1.4.0 # e\n",
    "requirements-tpu.txt": "libtpu==0.0.21 # f\n",
}
AS_PINNED = "torch-2.9.0+cu128 torch-xla-2.9.0 torchvision-0.24.0 numpy-2.4.6 torchrec-1.4.0"


class Here:
    """Commands on PATH, a project with an environment, which is the current folder, and a root
    folder."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.project = folder / "project"
        self.root = folder / "root"
        self.stamp = self.project / ".venv/.installed"
        self.python = self.project / ".venv/bin/python"
        for path in (self.bin, self.python.parent, self.root / "proc", self.root / "dev/shm"):
            path.mkdir(parents=True)

        for name in ("sh", "cat", "sleep"):
            (self.bin / name).symlink_to(shutil.which(name))
        for name, text in PINS.items():
            (self.project / name).write_text(text)
            os.utime(self.project / name, (1, 1))
        self.stamp.touch()
        self.command(self.python, "")
        self.installed(AS_PINNED)

    def command(self, name: str | Path, script: str) -> None:
        """Writes a shell script: a command on PATH, or at a path."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def use_real_python(self) -> None:
        """Makes the environment's Python that of these tests."""
        self.command(self.python, f'exec {sys.executable} "$@"')

    def installed(self, packages: str) -> None:
        """Makes these the packages of the environment."""
        site = self.project / ".venv/lib/python3.11/site-packages"
        shutil.rmtree(site, ignore_errors=True)
        for package in packages.split():
            name, _, version = package.rpartition("-")
            folder = site / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def meminfo(self, gigabytes: float) -> None:
        available = int(gigabytes * 1e9 / 1024)
        text = f"MemTotal: 99999999 kB\nMemAvailable: {available} kB\n"
        (self.root / "proc/meminfo").write_text(text)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Here:
    here = Here(tmp_path)
    monkeypatch.setenv("PATH", str(here.bin))
    monkeypatch.setattr(doctor, "ROOT", here.root)
    monkeypatch.chdir(here.project)
    return here


def assert_line(line: str, state: str, *texts: str) -> None:
    """Asserts what a check has found: ok, none or fix, and parts of its sentence."""
    assert line.startswith(f"{state:<6}"), line
    for text in texts:
        assert text in line, line


def set_free(monkeypatch, gigabytes: float) -> None:
    """Makes this much space free on every disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=gigabytes * 1e9))


# ---- programs ------------------------------------------------------------------------------------
NEEDED = "CPython 3.11, 3.12 or 3.13 with venv, ensurepip and its shared library is needed"


@pytest.mark.parametrize(
    ("script", "about"),
    [
        ("echo CPython 3.13.0", "CPython 3.13.0"),
        (f'exec {sys.executable} "$@"', f"CPython {sys.version.split()[0]}"),
    ],
    ids=["newest", "real"],
)
def test_an_interpreter_that_is_usable_is_ok(script, about, here):
    here.command("python3.11", script)
    line, *_ = doctor.check_programs("python3.11", "none")
    assert line.startswith(f"ok    Python: python3.11: {about}")


@pytest.mark.parametrize(
    ("script", "about"),
    [
        ("echo CPython 3.10.12", "CPython 3.10.12"),
        ("echo PyPy 3.11.7", "PyPy 3.11.7"),
        (
            "echo \"No module named 'ensurepip'\" >&2; exit 1",
            "No module named 'ensurepip'",
        ),
    ],
    ids=["old", "PyPy", "no ensurepip"],
)
def test_an_interpreter_that_is_not_usable_is_named(script, about, here):
    here.command("python3.11", script)
    line, *_ = doctor.check_programs("python3.11", "none")
    assert line.startswith(f"fix   Python: python3.11: {about}: {NEEDED}")
    assert "apt-get install -y python3.11 python3.11-venv libpython3.11" in line


@pytest.mark.parametrize("lack", ["fix", "none"])
def test_missing_programs_are_named(lack, here):
    here.command("git", "")
    interpreter, programs = doctor.check_programs("x", lack)
    assert interpreter.startswith("fix   Python: x: x: No such file or directory")
    assert programs.startswith(f"{lack:<4}  for TPU=: no ssh: install git and")


def test_the_launchers_programs_are_ok_where_they_are_there(here):
    here.command("git", "")
    here.command("ssh", "")
    _, programs = doctor.check_programs("x", "fix")
    assert programs == "ok    for TPU=: git, ssh"


def test_a_command_that_hangs_is_given_up(here):
    """Also when its child, as gcloud's Python, holds the output open."""
    here.command("gcloud", "sleep 9; exit 0")
    begun = time.monotonic()
    assert doctor.run("gcloud", seconds=0.3) == (False, "gcloud did not answer in 0 s")
    assert time.monotonic() - begun < 5


# ---- the environment -----------------------------------------------------------------------------
ANEW = "make clean, then make install"
AGAIN = "touch requirements.txt && make install"


def check_environment(*chips: str) -> list[str]:
    return list(doctor.check_environment(list(chips)))


def test_an_environment_as_pinned_is_ok(here):
    packages, library, installation = check_environment()
    assert packages == "ok    packages: all 5 as pinned"
    assert library == "ok    libpython: .venv/bin/python has it"
    assert installation == "ok    installation: complete"


def test_libtpu_is_needed_where_chips_are(here):
    packages, *_ = check_environment("/dev/accel0")
    assert packages == f"fix   packages: libtpu missing (pinned: 0.0.21): {AGAIN}"


@pytest.mark.parametrize(
    ("versions", "text", "remedy"),
    [
        (
            "torch-2.8.0 torch_xla-2.9.0 torchvision-0.24.0 torchrec-1.4.0",
            "torch 2.8.0 (pinned: 2.9.0)",
            ANEW,
        ),
        (
            "torch-2.9.0 torchvision-0.24.0 torchrec-1.4.0",
            "torch_xla missing (pinned: 2.9.0)",
            ANEW,
        ),
        (
            "torch-2.9.0 torch_xla-2.9.0 torchvision-0.23.0 torchrec-1.4.0",
            "torchvision 0.23.0 (pinned: 0.24.0)",
            ANEW,
        ),
        (
            "torch-2.9.0 torch_xla-2.9.0 torchvision-0.24.0",
            "torchrec missing (pinned: 1.4.0)",
            AGAIN,
        ),
    ],
    ids=["torch", "torch_xla", "torchvision", "torchrec"],
)
def test_packages_other_than_pinned_are_named(versions, text, remedy, here):
    here.installed(f"{versions} numpy-1.26.4")
    line, *_ = check_environment()
    assert_line(line, "fix", "packages: ", text, "numpy 1.26.4 (pinned: 2.4.6)")
    assert line.endswith(f": {remedy}")
    assert line.count("pinned") == 2


def test_an_installation_older_than_its_requirements_is_named(here):
    os.utime(here.project / "requirements-tpu.txt")
    os.utime(here.stamp, (9, 9))
    expected = "installation: cut off, or older than requirements-tpu.txt: make install"
    assert check_environment()[-1] == f"fix   {expected}"


def test_an_installation_that_was_cut_off_is_named(here):
    here.stamp.unlink()
    assert_line(check_environment()[-1], "fix", "installation: cut off")


def test_an_environment_whose_python_does_not_start_is_named(here):
    here.command(here.python, "echo 'no module named encodings' >&2; exit 1")
    assert check_environment() == [f"fix   environment: no module named encodings: {ANEW}"]


def test_an_environment_that_is_not_there_is_named(here):
    here.python.unlink()
    (line,) = check_environment()
    assert_line(line, "none", "environment: .venv/bin/python: No such file", "make install")


LACKS = (
    "error: torch_xla needs libpython3.11.so.1.0, and python3.11 comes without it: install its"
    " package"
)


@dataclass
class Asked:
    """An interpreter that is asked for its library by running tpu/libpython.py."""

    here: Here
    python: str | Path
    name: str  # in a line
    check: Callable[[], str]  # returns the line about its library

    def answer(self, script: str) -> None:
        """Makes it answer by a shell script; otherwise it is CPython 3.11.7."""
        libpython = f'case "$1" in *libpython.py) {script};; esac'
        self.here.command(self.python, f"{libpython}; echo CPython 3.11.7")


@pytest.fixture(params=["interpreter", "environment"])
def asked(request, here) -> Asked:
    """The interpreter that an environment is made with, and that of the environment."""

    def of_interpreter() -> str:
        return list(doctor.check_programs("python3.11", "none"))[1]

    def of_environment() -> str:
        return check_environment()[1]

    if request.param == "interpreter":
        return Asked(here, "python3.11", "python3.11", of_interpreter)
    return Asked(here, here.python, ".venv/bin/python", of_environment)


def test_an_interpreter_that_has_its_library_is_ok(asked):
    asked.answer(f'exec {sys.executable} "$@"')
    assert asked.check() == f"ok    libpython: {asked.name} has it"


def test_an_interpreter_without_its_library_is_named(asked):
    asked.answer(f'echo "{LACKS}" >&2; exit 2')
    assert asked.check() == f"fix   libpython: {LACKS.removeprefix('error: ')}"


def test_an_interpreter_that_says_nothing_gets_a_remedy(asked):
    asked.answer("exit 3")
    assert_line(asked.check(), "fix", "libpython: no message: CPython 3.11, 3.12 or 3.13")


OTHER_PACKAGES = "torch-2.9.0 torch-xla-2.9.0 torchvision-0.24.0 numpy-2.4.6 torchrec-1.4.0"


def packages_with_chips() -> str:
    """Returns the line about packages where a chip is."""
    return check_environment("/dev/accel0")[0]


def choose_libtpu(here: Here, version: str) -> None:
    """Makes the environment remember LIBTPU_VERSION=."""
    (here.project / ".venv/.libtpu_version").write_text(f"{version}\n")


def test_another_libtpu_is_named_where_it_was_not_chosen(here):
    here.installed(f"{OTHER_PACKAGES} libtpu-0.0.51")
    expected = f"packages: libtpu 0.0.51 (pinned: 0.0.21): {AGAIN}"
    assert packages_with_chips() == f"fix   {expected}"


def test_a_chosen_libtpu_is_accepted_and_never_called_proven(here):
    here.installed(f"{OTHER_PACKAGES} libtpu-0.0.51")
    choose_libtpu(here, "0.0.51")
    chosen = "libtpu 0.0.51 (LIBTPU_VERSION=0.0.51; pinned: 0.0.21)"
    expected = f"packages: all 6 as pinned, but {chosen}: not run on a TPU"
    assert packages_with_chips() == f"ok    {expected}"


def test_the_pinned_libtpu_is_named_where_another_was_chosen(here):
    here.installed(f"{OTHER_PACKAGES} libtpu-0.0.21")
    choose_libtpu(here, "0.0.51")
    expected = f"libtpu 0.0.21 (LIBTPU_VERSION=0.0.51; pinned: 0.0.21): {AGAIN}"
    assert packages_with_chips() == f"fix   packages: {expected}"


def test_the_pinned_libtpu_is_ok_where_it_was_chosen(here):
    here.installed(f"{OTHER_PACKAGES} libtpu-0.0.21")
    choose_libtpu(here, "0.0.21")
    assert packages_with_chips() == "ok    packages: all 6 as pinned"


# ---- chips ---------------------------------------------------------------------------------------


def check_devices(*chips: str, wanted: bool = False, asked: bool = False) -> list[str]:
    return list(doctor.check_devices(list(chips), wanted, asked))


NO_CHIP = [(False, "none  TPU: "), (True, "fix   TPU: TPU=local")]


@pytest.mark.parametrize(("wanted", "found"), NO_CHIP)
def test_no_chip_is_an_error_only_when_it_is_wanted(wanted, found, here):
    (line,) = check_devices(wanted=wanted)
    assert line.startswith(found)


def test_torch_xla_is_asked_for_devices_without_a_chip(here):
    here.command(here.python, "echo warning; echo '1 devices, CPU'")
    assert check_devices(asked=True)[1] == "ok    torch_xla: 1 devices, CPU"


@pytest.mark.parametrize(
    ("uid", "unseen"),
    [(0, ""), (1, " that you may see; sudo lsof -w /dev/accel* /dev/vfio/* shows all")],
    ids=["root", "user"],
)
def test_chips_are_counted_and_opened(uid, unseen, here, monkeypatch):
    here.command(here.python, "echo '4 devices, TPU'")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert check_devices("/dev/accel0", "/dev/vfio/0") == [
        f"ok    TPU: 2 chips (/dev/accel0, /dev/vfio/0), held by no process{unseen}",
        "ok    torch_xla: 4 devices, TPU",
    ]


ALL_AT_ONCE = "a slice of several hosts answers only when all of them ask at once"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("sleep 5", f"did not answer in 0 s: {ALL_AT_ONCE}"),
        ("echo 'RuntimeError: no chip' >&2; exit 1", f"RuntimeError: no chip: {ALL_AT_ONCE}"),
        ("echo '1 devices, CPU'", "1 devices, CPU: unset PJRT_DEVICE"),
    ],
    ids=["silent", "error", "CPU"],
)
def test_chips_that_torch_xla_does_not_see_are_named(script, text, here, monkeypatch):
    monkeypatch.setattr(doctor, "DEVICE_SECONDS", 0.3)
    here.command(here.python, script)
    assert_line(check_devices("/dev/accel0")[-1], "fix", "torch_xla: ", text)


def test_who_holds_a_chip_is_named_and_torch_xla_left_alone(here):
    here.command(here.python, "touch asked")
    for pid, opened in ((41, "/dev/null"), (42, "/dev/vfio/0")):
        folder = here.root / f"proc/{pid}/fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to(opened)

    (line,) = check_devices("/dev/vfio/0", asked=True)

    held = "TPU: 1 chips (/dev/vfio/0), held by process 42: a second run cannot start"
    assert_line(line, "fix", held, "make stop TPU=", "kill 42")
    assert not (here.project / "asked").exists()


# ---- memory and disk -----------------------------------------------------------------------------
def test_memory_that_is_enough_is_ok(here, monkeypatch):
    here.meminfo(8.2)
    set_free(monkeypatch, 4.1)
    text = "8.2 GB available, 4.1 GB in /dev/shm; a recipe takes 2 GB"
    assert_line(doctor.check_memory(8), "ok", text)


@pytest.mark.parametrize(
    ("cores", "shared", "remedy"),
    [
        (9, 4.1, 'give ARGS="--workers 8"; in Docker --shm-size'),
        (8, 2.4, 'ARGS="--workers 4"'),
    ],
    ids=["memory", "shared memory"],
)
def test_too_little_memory_is_shared_by_fewer_workers(cores, shared, remedy, here, monkeypatch):
    here.meminfo(8.2)
    set_free(monkeypatch, shared)
    assert_line(doctor.check_memory(cores), "fix", remedy)


@pytest.mark.parametrize(
    ("limit", "available"), [("4000000000\n", "3.0"), ("max\n", "100.0")], ids=["limit", "max"]
)
def test_a_containers_limit_of_memory_counts(limit, available, here):
    here.meminfo(100)
    group = here.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000000000\n")
    (group / "memory.max").write_text(limit)
    assert f"memory: {available} GB available" in doctor.check_memory(1)


def test_memory_too_little_for_a_trial_is_named(here):
    here.meminfo(1.5)
    assert "end other programs, even a trial does not fit" in doctor.check_memory(1)


def test_without_shared_memory_there_are_no_workers(here):
    here.meminfo(9)
    (here.root / "dev/shm").rmdir()
    assert_line(doctor.check_memory(2), "fix", 'ARGS="--workers 0"')


@pytest.fixture
def check_disk(here, monkeypatch, tmp_path) -> Callable[[str, float], str]:
    """check_disk("runs", 6.5): the line about the one disk, with this many GB free."""
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def check(runs: str, gigabytes: float) -> str:
        set_free(monkeypatch, gigabytes)
        (line,) = doctor.check_disk(runs)
        return line

    return check


def test_disk_for_runs_and_temporary_files_is_added_up(check_disk):
    enough = "ok    disk: 6.5 GB free, 6 GB needed (temporary files 1 GB"
    assert check_disk("runs", 6.5).startswith(enough)
    assert check_disk("runs", 5.5).startswith("fix ")
    assert check_disk("gs://bucket/runs", 1.5).startswith("ok ")


def test_disk_for_an_installation_is_added_up(check_disk, here):
    here.stamp.unlink()
    too_little = "fix   disk: 20.0 GB free, 21 GB needed (environment 8 GB"
    assert too_little in check_disk("runs", 20)
    assert check_disk("runs", 21).startswith("ok ")


# ---- Pythons of other hosts ----------------------------------------------------------------------
# What is sent there is run by its shell.
FIND_PYTHON = ("/bin/sh", "-c", doctor.FIND_PYTHON)
PYTHON_WITHOUT_LIBRARY = f'case "$2" in *ensurepip*) exit 0;; esac; echo "{LACKS}" >&2; exit 2'


def test_a_host_without_a_python_has_no_message(here):
    assert doctor.run(*FIND_PYTHON) == (False, "no message")


def test_a_host_whose_python_lacks_its_library_says_so(here):
    here.command("python3.11", PYTHON_WITHOUT_LIBRARY)
    assert doctor.run(*FIND_PYTHON) == (False, LACKS)


def test_a_host_is_searched_for_a_python_with_its_library(here):
    here.command("python3.11", PYTHON_WITHOUT_LIBRARY)
    here.command("python3.12", f'exec {sys.executable} "$@"')
    found, _ = doctor.run(*FIND_PYTHON)
    assert found


# ---- TPU VMs -------------------------------------------------------------------------------------
GCLOUD = """
case "$*" in
"config list "*)
    echo '{{"core": {{{core}}}, "compute": {{{zone}}}}}';;
"compute tpus tpu-vm describe my-tpu "*)
    echo '{{"state": "{state}", "networkEndpoints": [{ends}]}}';;
*) echo "unexpected: $*" >&2; exit 2;;
esac
"""
GCLOUD_LINE = "ok    gcloud: account me@x.org, project mine, zone us-east5-b"


def check_tpu(tpu: str, zone: str = "", project: str = "") -> list[str]:
    return list(doctor.check_tpu(tpu, zone, project))


@pytest.fixture
def set_gcloud(here) -> Callable[..., None]:
    """set_gcloud(state="PREEMPTED"): makes gcloud answer so, and otherwise as usual."""
    usual = {
        "core": '"account": "me@x.org", "project": "mine"',
        "zone": '"zone": "us-east5-b"',
        "state": "READY",
        "ends": "{}",
    }

    def set_values(**values: str) -> None:
        here.command("gcloud", GCLOUD.format(**usual | values))

    return set_values


@pytest.mark.parametrize(("tpu", "state"), [("my-tpu", "fix"), ("", "none")])
def test_gcloud_is_needed_only_for_a_tpu(tpu, state, here):
    (line,) = check_tpu(tpu)
    assert_line(line, state, "gcloud: TPU=name needs it: gcloud: No such file")


def test_gclouds_account_project_and_zone_are_named(set_gcloud):
    set_gcloud()
    assert check_tpu("") == [GCLOUD_LINE]


def test_a_tpu_vm_that_is_ready_is_ok_and_its_address_missed(set_gcloud):
    set_gcloud()
    account, machine, worker = check_tpu("my-tpu")
    assert account == GCLOUD_LINE
    assert machine == "ok    TPU VM: my-tpu: TYPE, READY, 1 worker"
    assert_line(worker, "fix", "worker 0: no external address", "--gcloud-flag=--internal-ip")


def test_a_tpu_vm_that_is_preempted_is_to_be_recreated(set_gcloud):
    set_gcloud(state="PREEMPTED")
    machine = check_tpu("my-tpu")[1]
    remedy = "recreate it: gcloud compute tpus tpu-vm delete"
    assert_line(machine, "fix", "TPU VM: my-tpu: TYPE, PREEMPTED", remedy)


def test_without_an_account_the_tpu_vm_is_not_asked_for(set_gcloud):
    set_gcloud(core="", zone="")
    (line,) = check_tpu("my-tpu")
    text = "gcloud: account None, project None, zone None: gcloud auth login; give PROJECT= and"
    assert_line(line, "fix", text)


def test_a_missing_zone_is_no_error_without_a_tpu(set_gcloud):
    set_gcloud(zone="")
    line = check_tpu("")[0]
    assert_line(line, "none", "gcloud: account me@x.org, project mine, zone None")


def test_a_zone_and_a_project_that_are_given_count(set_gcloud):
    set_gcloud(core='"account": "me"', zone="")
    line = check_tpu("my-tpu", zone="a", project="b")[0]
    assert line == "ok    gcloud: account me, project b, zone a"


def test_a_gcloud_that_fails_is_named(here):
    here.command("gcloud", "echo 'ERROR: no python' >&2; exit 1")
    line = check_tpu("my-tpu")[0]
    assert_line(line, "fix", "gcloud: TPU=name needs it: ERROR: no python")


def test_a_tpu_vm_that_cannot_be_described_is_named(set_gcloud):
    problem = "ERROR: There was a problem connecting"
    set_gcloud(state=f"'; echo '{problem}' >&2; exit 1; : '")
    assert_line(check_tpu("my-tpu")[1], "fix", f"TPU VM: TPU=my-tpu: {problem}")


# ---- plain hosts ---------------------------------------------------------------------------------
SSH = """case "$*" in
*" a "*ensurepip*) exit 127;;
*" a "*) echo Python 3.10.12; exit;;
*" b "*) echo "b: Permission denied (publickey)." >&2;;
*) echo "ssh: connect to host c port 22: Connection refused" >&2;;
esac
exit 255"""


def test_plain_hosts_are_logged_in_to(here):
    here.command("ssh", SSH)
    first, python, second, third = check_tpu("ssh:a,b,c")
    assert first == "ok    worker 0: a: Python 3.10.12"
    no_python = "no Python 3.11 to 3.13 with venv: CPython 3.11, 3.12"
    assert_line(python, "fix", f"worker 0: a: {no_python}")
    assert_line(second, "fix", "worker 1: ", "does not accept your ssh key")
    refused = "ssh: connect to host c port 22: Connection refused"
    assert_line(third, "fix", f"worker 2: c: {refused}")


def test_a_plain_host_whose_python_lacks_its_library_is_named(here):
    here.command("ssh", SSH.replace("exit 127", f'echo "{LACKS}" >&2; exit 1'))
    python = check_tpu("ssh:a,b,c")[1]
    lack = LACKS.removeprefix("error: ")
    assert_line(python, "fix", f"worker 0: a: {lack}: CPython 3.11, 3.12")


def test_a_blocked_port_22_is_found(monkeypatch):
    """A server that is there, one that is not, and a firewall, which drops packets without a
    word."""
    real_connect = socket.create_connection

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        host = address[0]
        if host == "34.0.0.2":
            raise TimeoutError("timed out")
        port = open_port if host == "127.0.0.1" else 1
        return real_connect((host, port), timeout)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        open_port = server.getsockname()[1]
        monkeypatch.setattr(doctor.socket, "create_connection", connect)
        first, second, third = doctor.check_ssh_port(("127.0.0.1", "127.0.0.3", "34.0.0.2"))

    assert first == "ok    worker 0: 127.0.0.1 port 22 is open"
    assert_line(second, "fix", "worker 1: 127.0.0.3 port 22: Connection refused")
    no_answer = "worker 2: 34.0.0.2 port 22: no answer"
    assert_line(third, "fix", no_answer, "must allow tcp:22", "--tunnel-through-iap")


# ---- data, opened as the scripts would -----------------------------------------------------------
NO_EVALUATION = "1 examples cannot be split into training and validation"


def write_pictures(folder: Path, count: int) -> None:
    """Writes pictures of one class: 0.jpg, 1.jpg, …"""
    (folder / "cat").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (20, 20)).save(folder / "cat" / f"{number}.jpg")


def test_data_without_a_split_to_evaluate_on_is_no_data(here, tmp_path):
    here.use_real_python()
    write_pictures(tmp_path / "images" / "train", 1)
    line = doctor.check_data(str(tmp_path / "images"), False, "resnet50", "")
    assert_line(line, "fix", NO_EVALUATION)


@pytest.fixture
def evaluated(tmp_path) -> Path:
    """One of four images to evaluate on, in a folder of images in the test's folder."""
    write_pictures(tmp_path / "train", 4)
    write_pictures(tmp_path / "valid", 4)
    return tmp_path / "valid" / "cat" / "1.jpg"


def test_images_that_can_be_opened_are_counted(evaluated, tmp_path):
    assert look.look(str(tmp_path), "resnet50").startswith("4 images of 1 classes")


def test_every_image_that_is_evaluated_is_opened(evaluated, tmp_path):
    evaluated.write_bytes(b"")
    with pytest.raises(InputError, match="1.jpg is broken: the file is empty; replace the file"):
        look.look(str(tmp_path), "resnet50")


def test_a_link_to_an_image_that_is_not_there_is_named(evaluated, tmp_path):
    evaluated.unlink()
    evaluated.symlink_to("nowhere.jpg")
    pattern = "1.jpg is a link to nowhere.jpg, which is not there; mend the link"
    with pytest.raises(InputError, match=pattern):
        look.look(str(tmp_path), "resnet50")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("reviews.csv", "review;stars\ngood, very;5\n"),
        ("reviews.jsonl", '{"review": "good", "stars": 5}\n'),
    ],
)
@pytest.mark.parametrize("script", ["glue", ""])
def test_a_file_of_own_sentences_shows_its_columns(script, name, content, tmp_path):
    file = tmp_path / name
    file.write_text(content)
    said = "sentences of your own, in the columns review, stars; .*--text COLUMN --label COLUMN"
    assert re.search(said, look.look(str(file), script))
    with pytest.raises(InputError, match="is a file; expected the folder"):
        look.look(str(file), "glue", "sst2")


def test_a_table_of_own_sentences_shows_its_columns(tmp_path, cache):
    datasets.Dataset.from_dict({"a": ["x"], "b": [1]}).to_parquet(tmp_path / "mine.parquet")
    assert "in the columns a, b;" in look.look(str(tmp_path / "mine.parquet"), "glue")


@pytest.mark.parametrize("content", ["", "one sentence\nanother one\n"])
def test_a_file_without_columns_is_no_data(content, tmp_path):
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(InputError, match="no header of several columns"):
        look.look(str(tmp_path / "mine.csv"), "glue")


starts_a_process = pytest.mark.slow


@pytest.fixture
def check_opened(here, tmp_path) -> Callable[..., None]:
    """check_opened("glue", "fix", "RTE has no dev.tsv", data="glue", task="rte"): asserts the line
    about this folder or file of the test's folder."""
    here.use_real_python()

    def check(script: str, state: str, *texts: str, data: str = "images", task: str = "") -> None:
        path = str(tmp_path / data)
        line = doctor.check_data(path, False, script, task)
        assert_line(line, state, f"data: {path}: ", *texts)

    return check


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder of images with a split that is left out."""
    write_pictures(tmp_path / "images" / "train", 3)
    write_pictures(tmp_path / "images" / "valid", 3)
    (tmp_path / "images" / "test").mkdir()
    return tmp_path / "images"


OPENED = "3 images of 1 classes (trained on train/, evaluated on valid/; left out: test/)"


@starts_a_process
@pytest.mark.parametrize(
    ("script", "said"), [("resnet50", OPENED), ("", f": resnet50: {OPENED}")], ids=["own", "any"]
)
def test_images_are_opened_as_their_script_would(script, said, images, check_opened):
    check_opened(script, "ok", said)


@starts_a_process
def test_images_without_a_split_to_evaluate_on_are_divided(tmp_path, check_opened):
    write_pictures(tmp_path / "images" / "train", 3)
    said = "2 images of 1 classes (trained on 2 of the 3 pictures of train/, evaluated on the other"
    check_opened("resnet50", "ok", said)


@starts_a_process
def test_a_broken_image_is_named(images, check_opened):
    (images / "valid" / "cat" / "1.jpg").write_bytes(b"")
    check_opened("resnet50", "fix", "valid/cat/1.jpg is broken: the file is empty")


@starts_a_process
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("dlrm", "images has none of prepared.json (made by make data)"),
        ("pretrain", "images has no report.json, found test, train, valid"),
        ("transformer", "images has no train.<source>-<target>.<source>.idx"),
    ],
)
def test_images_are_no_data_of_other_scripts(script, reason, images, check_opened):
    check_opened(script, "fix", reason)


@starts_a_process
def test_a_file_is_no_folder_of_clicks(tmp_path, check_opened):
    (tmp_path / "clicks.csv").write_text("1,2,3\n")
    reason = "clicks.csv is a file; expected a folder"
    check_opened("dlrm", "fix", reason, data="clicks.csv")


@pytest.fixture
def rte(tmp_path) -> Path:
    """The folder of a task of GLUE that has a training split only."""
    folder = tmp_path / "glue" / "RTE"
    folder.mkdir(parents=True)
    text = "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n"
    (folder / "train.tsv").write_text(text)
    return folder


@starts_a_process
def test_a_task_without_a_split_to_evaluate_on_is_named(rte, check_opened):
    check_opened("glue", "fix", "RTE has no dev.tsv", data="glue", task="rte")


@starts_a_process
def test_tasks_of_glue_are_opened(rte, check_opened):
    shutil.copy(rte / "train.tsv", rte / "val.tsv")
    said = "1 examples of rte (trained on RTE/train.tsv, evaluated on RTE/val.tsv)"
    check_opened("glue", "ok", said, data="glue", task="rte")
    check_opened("glue", "ok", "tasks rte; TASK= chooses one", data="glue")


# ---- data that is not opened ---------------------------------------------------------------------
@pytest.fixture
def folder(here, tmp_path) -> Path:
    """A folder of data with one empty file."""
    path = tmp_path / "it's data"
    path.mkdir()
    (path / "file").touch()
    return path


def test_an_empty_folder_is_no_data(folder):
    (folder / "file").unlink()
    assert_line(doctor.check_data(str(folder), False), "fix", f"data: {folder} is empty")


def test_data_that_is_not_there_is_named(folder):
    line = doctor.check_data(f"{folder}/missing", False)
    assert_line(line, "fix", "No such file or directory: give the right path")


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=refused))
    line = doctor.check_data(str(folder), False)
    assert_line(line, "fix", "Permission denied", "chmod -R u+rX")


def test_without_an_environment_a_folder_is_only_read(folder, here):
    here.python.unlink()
    line = doctor.check_data(str(folder), False)
    assert_line(line, "none", f"data: {folder} can be read; whether a script", "install")


def test_a_folder_that_no_script_can_open_is_named(folder, here):
    here.use_real_python()
    scripts = "resnet50, dlrm, transformer, pretrain, glue, squad, tagging"
    line = doctor.check_data(str(folder), False)
    assert_line(line, "fix", f"data: {folder}: none of {scripts} can open it; MODEL=")


def test_a_bucket_is_listed_by_the_environment(folder, here):
    here.use_real_python()
    line = doctor.check_data(f"file://{folder}", True)
    assert_line(line, "ok", "1 files, 0.0 GB, can be read; whether the workers")


NO_BUCKET = "memory://bucket/none"


def test_a_bucket_that_is_not_there_is_named(here):
    here.use_real_python()
    line = doctor.check_data(NO_BUCKET, False)
    assert_line(line, "fix", "there is no memory:///bucket/none; is the name right")


def test_without_an_environment_no_bucket_is_listed(here):
    here.python.unlink()
    line = doctor.check_data(NO_BUCKET, False)
    assert_line(line, "none", f"data: {NO_BUCKET} cannot be tried without an environment")


def test_a_folder_of_the_workers_is_not_looked_for_here(here):
    line = doctor.check_data("/data", True)
    assert_line(line, "none", "data: /data: read on the workers")


@pytest.mark.parametrize("remote", [False, True])
def test_a_name_of_the_hub_needs_a_token_where_it_is_private(remote, here, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    if remote:  # a folder of this name is here, not on the workers
        (here.project / "nyu-mll/glue").mkdir(parents=True)

    monkeypatch.delenv("HF_TOKEN", raising=False)
    line = doctor.check_data("nyu-mll/glue", remote)
    assert_line(line, "none", f"kept in {tmp_path / 'hub'}", "export HF_TOKEN=")

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    line = doctor.check_data("nyu-mll/glue", remote)
    assert_line(line, "ok", "HF_TOKEN is set")


# ---- the folder of runs --------------------------------------------------------------------------
def test_a_folder_of_runs_is_tried_and_not_made(here):
    before = sorted(here.project.rglob("*"))
    assert doctor.check_runs("runs", False) == "ok    runs: runs can be written"
    assert sorted(here.project.rglob("*")) == before


def test_a_folder_of_runs_that_cannot_be_written_is_named(here):
    (here.project / "runs").touch()
    assert_line(doctor.check_runs("runs", False), "fix", "runs: runs: Not a directory: ")
    assert_line(doctor.check_runs("/proc/x", False), "fix", "runs: /proc: ")


def test_a_folder_of_runs_on_a_tpu_goes_with_it(here):
    line = doctor.check_runs("runs", True)
    assert_line(line, "none", "runs: runs is on the TPU and goes with it")


def test_a_bucket_of_runs_is_tried_by_the_environments_fsspec(here):
    here.use_real_python()
    url = "memory://bucket/runs"
    assert doctor.check_runs(url, False) == f"ok    runs: {url}: can be written and read"
    assert doctor.check_runs(url, True).endswith("their service account decides")


GS_RUNS = "gs://bucket/runs"


def test_a_bucket_of_runs_that_cannot_be_written_is_named(here):
    here.command(here.python, "echo 'OSError: Forbidden' >&2; exit 1")
    line = doctor.check_runs(GS_RUNS, False)
    assert_line(line, "fix", f"runs: {GS_RUNS}: OSError: Forbidden", "application-default login")


def test_without_an_environment_no_bucket_of_runs_is_tried(here):
    here.python.unlink()
    assert_line(doctor.check_runs(GS_RUNS, False), "none", "runs: ")


# ---- all checks together -------------------------------------------------------------------------
OF_DOCTOR = (
    "tpu/doctor.py",
    "tpu/libpython.py",
    "tpu/launch/hosts.py",
    "tpu/launch/messages.py",
    "errors.py",
)


@pytest.fixture
def run_doctor(here) -> Callable[..., subprocess.CompletedProcess]:
    """run_doctor("--tpu", "my-tpu"): runs the doctor of a project without an environment."""
    for name in OF_DOCTOR:
        (here.project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, here.project / name)
    shutil.rmtree(here.project / ".venv")
    here.command("python3.11", "echo CPython 3.11.7")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", "-S", str(here.project / "tpu/doctor.py"), *arguments]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)

    return run


def test_it_goes_through_without_an_environment(run_doctor):
    result = run_doctor("--python", "python3.11", "--runs", "file:///proc/none", "--data", "tpu")

    assert result.returncode == 1
    assert not result.stderr
    lines = result.stdout.splitlines()
    data, runs = lines[-2:]
    assert data.startswith("none  data: tpu can be read; whether")
    assert runs.startswith("fix   runs: /proc: ")
    assert "none  environment: .venv/bin/python" in result.stdout
    for line in lines:
        assert line[:6] in ("ok    ", "none  ", "fix   ")


def test_a_name_that_no_tpu_vm_has_ends_it_with_an_exit_code(run_doctor):
    result = run_doctor("--tpu", "My_Tpu")
    assert result.returncode == 1
    assert "fix   TPU VM: TPU=My_Tpu is not the name of a TPU VM" in result.stdout


@pytest.fixture
def options(here) -> argparse.Namespace:
    """The options of a doctor on a machine with two chips."""
    here.meminfo(99)
    (here.root / "dev/vfio").mkdir()
    for name in ("accel0", "accel_x", "vfio/7", "vfio/vfio"):
        (here.root / "dev" / name).touch()
    here.command(here.python, "echo '2 devices, TPU'")

    names = ("tpu", "zone", "project", "data", "script", "task", "devices")
    return argparse.Namespace(**dict.fromkeys(names, ""), python="none", runs="runs")


def test_examine_finds_the_chips_of_this_machine(options):
    text = "\n".join(doctor.examine(options))
    assert "TPU: 2 chips (/dev/accel0, /dev/vfio/7)" in text
    assert "\nok    runs: runs can be written" in text
    assert "\nnone  for TPU=: no git" in text


def test_examine_does_not_look_here_for_what_is_on_a_tpu(options):
    options.tpu = "my-tpu"
    text = "\n".join(doctor.examine(options))
    assert "\nfix   for TPU=: no git" in text
    assert text.splitlines()[-1].startswith("none  runs: ")
    assert not re.search("^(fix|ok)  .*disk.*runs", text, re.MULTILINE)
