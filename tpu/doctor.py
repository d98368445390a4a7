"""Says what this machine has and lacks for training here, or for starting runs on a TPU from here.

`make doctor` calls it before anything is installed. It prints one line per check:

    ok    as it should be
    none  absent, and no error: a laptop has no TPU
    fix   what is wrong and what to do about it; the exit code is 1 then

    --data              folder, URL or hub id that is read
    --runs              folder or URL that runs go to (default: runs)
    --script, --task    of train/, and GLUE's task: what is to open the data; default: whichever
                        can
    --tpu               name of a TPU VM (--zone, --project: default gcloud's); ssh:host1,host2;
                        local
    --devices           asks torch_xla for its devices also without a TPU
    --python            interpreter of the environment (default: $PYTHON, python3.11; make gives its
                        own)

It installs and changes nothing; in the runs folder it writes a file and removes it. What only the
environment knows, it asks .venv/bin/python. Every command has a time limit. Only the standard
library, Python 3.9 or later, Linux.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python3 tpu/doctor.py`

from errors import InputError
from tpu.launch import hosts, messages

ROOT = Path("/")
PROJECT = Path(__file__).resolve().parent.parent
PYTHON = Path(".venv/bin/python")
STAMP = Path(".venv/.installed")
LIBTPU_CHOICE = Path(".venv/.libtpu_version")  # what LIBTPU_VERSION= of make has asked for
LIBPYTHON = Path(__file__).with_name("libpython.py").resolve()
REQUIREMENTS = [Path(f"requirements{kind}.txt") for kind in ("", "-torchrec", "-tpu")]

SECONDS = 60  # per command, on a cold disk
DEVICE_SECONDS = 180  # for torch_xla to open the devices
DATA_SECONDS = 300  # to list a million images
SSH_PORT = 22
SSH_SECONDS = 5
TUNNEL = "LAUNCH_ARGS=--gcloud-flag=--tunnel-through-iap"

GB = 1e9
# Memory of a run: the process that trains (1.1 GB in ResNet-50's trial), and each loader process:
# itself (0.2 GB there) and the three batches that it keeps in /dev/shm (ResNet-50's recipe on one
# host: 1024 x 224 x 224 x 3 bytes each).
MAIN_GB = 2.0
LOADER_GB = 0.25
SHARED_GB = 0.5

WORKERS_DECIDE = "; whether the workers can, their service account decides"
# Programs for other interpreters.
ABOUT_PYTHON = """
import ensurepip, platform, venv
print(platform.python_implementation(), platform.python_version())
"""
DEVICES = """
import torch_xla.runtime as r
print(r.global_runtime_device_count(), 'devices,', r.device_type())
"""
WRITE_URL = """
import fsspec, os, sys
fs, path = fsspec.core.url_to_fs(f"{sys.argv[1].rstrip('/')}/.doctor-{os.getpid()}")
fs.pipe_file(path, b"written by make doctor")
fs.cat_file(path)
fs.rm_file(path)
"""
READ_URL = """
import sys
sys.path.insert(0, sys.argv[2])
from data.remote import InputError, find_files
try:
    sizes = [file.size for file in find_files(sys.argv[1]).values()]
except InputError as error:
    sys.exit(str(error))
print(f"{len(sizes)} files, {sum(sizes) / 1e9:.1f} GB, can be read")
"""
OPEN_DATA = "import sys; sys.path.insert(0, sys.argv.pop(1)); from data.look import main; main()"
# On another host, which has no file of the project.
FIND_PYTHON = (
    "for python in python3.11 python3.12 python3.13; do"
    " $python -c 'import ensurepip' 2>/dev/null"
    f" && $python -c {shlex.quote(LIBPYTHON.read_text())} && exit;"
    " done; exit 1"
)


# ---- lines and commands --------------------------------------------------------------------------


def ok(text: str) -> str:
    """Returns the line of a check that has found everything as it should be."""
    return f"ok    {text}"


def fix(text: str, remedy: str) -> str:
    """Returns the line of a check that has found an error."""
    return f"fix   {text}: {remedy}"


def none(text: str, remedy: str) -> str:
    """Returns the line of a check that has found nothing, which is no error."""
    return f"none  {text}: {remedy}"


def line(good: object, text: str, remedy: str, lack: str = "fix") -> str:
    """Returns the line of a check, whether or not it is good.

    Args:
        lack: what a check that is not good is: "fix", or "none" where it is no error.
    """
    if good:
        return ok(text)
    if lack == "none":
        return none(text, remedy)
    return fix(text, remedy)


def run(*command: str | Path, seconds: float = SECONDS) -> tuple[bool, str]:
    """Runs a command without input. Returns whether it succeeded, and its output or why it
    failed."""
    words = [str(word) for word in command]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return False, f"{words[0]}: {error.strerror}"

    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"{words[0]} did not answer in {seconds:.0f} s"
    finally:
        if process.poll() is None:  # also after Ctrl-C, which does not reach it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    output = out.decode(errors="replace").strip()
    errors = err.decode(errors="replace").strip()
    if process.returncode:
        return False, messages.last_line(errors or output)
    return True, output


def has_environment() -> bool:
    """Returns whether the environment's interpreter can be asked."""
    return os.access(PYTHON, os.X_OK)


# ---- what is installed ---------------------------------------------------------------------------


def check_library(python: str | Path, *arguments: str) -> str:
    """Checks that an interpreter has the library that torch_xla is linked to.

    Args:
        arguments: of libpython.py.
    """
    found, said = run(python, LIBPYTHON, *arguments)
    if found:
        return ok(f"libpython: {python} has it")
    problem, _, remedy = said.removeprefix("error: ").partition(": ")
    return fix(f"libpython: {problem}", remedy or messages.GET_PYTHON)


def check_programs(python: str, lack: str) -> Iterator[str]:
    """Checks the interpreter that the environment is made with, and the programs that the launcher
    needs.

    Args:
        lack: "fix" where a run is to be launched, else "none".
    """
    works, about = run(python, "-c", ABOUT_PYTHON)
    good = works and re.match(r"CPython 3\.1[123]\.", about)
    yield line(good, f"Python: {python}: {about}", messages.GET_PYTHON)
    if good:
        yield check_library(python)

    absent = []
    for name in ("git", "ssh"):
        if shutil.which(name) is None:
            absent.append(f"no {name}")
    listed = ", ".join(absent) or "git, ssh"
    yield line(not absent, f"for TPU=: {listed}", "install git and openssh-client", lack)


def check_environment(chips: list[str]) -> Iterator[str]:
    """Checks the packages of .venv against the pins, with libtpu's where chips are, and that it is
    complete."""
    works, message = run(PYTHON, "-c", "")
    if not works:
        text = f"environment: {message}"
        if os.path.lexists(PYTHON):
            yield fix(text, "make clean, then make install")
        else:
            yield none(text, "make install creates it (8 GB)")
        return

    versions = installed_versions()
    yield check_packages(versions, REQUIREMENTS if chips else REQUIREMENTS[:2])
    if "torch_xla" in versions:
        yield check_library(PYTHON, "environment")

    newer = []
    for file in REQUIREMENTS:
        if not STAMP.exists() or file.stat().st_mtime > STAMP.stat().st_mtime:
            newer.append(str(file))
    if newer:
        yield fix(f"installation: cut off, or older than {' and '.join(newer)}", "make install")
    else:
        yield ok("installation: complete")


def normalized(package: str) -> str:
    """Returns the name of a package as `installed_versions` has it."""
    return package.replace("-", "_").lower()


def installed_versions() -> dict[str, str]:
    """Returns the version of each package in .venv."""
    folders = glob.glob(".venv/lib/python*/site-packages")
    versions = {}
    for package in importlib.metadata.distributions(path=folders):
        versions[normalized(str(package.metadata["Name"]))] = package.version
    return versions


def check_packages(versions: dict[str, str], files: list[Path]) -> str:
    """Checks versions of packages against the pins in files of requirements.

    The version of libtpu that LIBTPU_VERSION= has asked for is as good as the pinned one.
    """
    pins = []
    for file in files:
        pins += re.findall(r"^([\w-]+)==([\w.]+)", file.read_text(), re.MULTILINE)
    chosen = ""
    if LIBTPU_CHOICE.exists():
        chosen = LIBTPU_CHOICE.read_text().strip()

    note = ""
    strays = []
    for name, pin in pins:
        version = versions.get(normalized(name), "missing")
        wanted = pin
        why = f"pinned: {pin}"
        if name == "libtpu" and chosen not in ("", pin):
            wanted = chosen
            why = f"LIBTPU_VERSION={chosen}; {why}"
            note = f", but libtpu {version} ({why}): not run on a TPU"
        if version.partition("+")[0] != wanted:  # without +cpu
            strays.append(f"{name} {version} ({why})")

    if not strays:
        return ok(f"packages: all {len(pins)} as pinned{note}")
    listed = ", ".join(strays)
    if re.search(r"\btorch(_xla|vision)? ", " ".join(strays)):  # they need each other's versions
        return fix(f"packages: {listed}", "make clean, then make install")
    return fix(f"packages: {listed}", "touch requirements.txt && make install")


# ---- this machine --------------------------------------------------------------------------------


def check_devices(chips: list[str], wanted: bool, asked: bool) -> Iterator[str]:
    """Checks this machine's chips, who holds them, and what torch_xla sees.

    Args:
        wanted: TPU=local.
        asked: --devices.
    """
    if chips:
        text = f"TPU: {len(chips)} chips ({', '.join(chips)})"
        holders = processes_with(chips)
        if holders:
            pids = " ".join(sorted(holders))
            yield fix(
                f"{text}, held by process {pids}",
                "a second run cannot start: make stop TPU=…, where it was started, "
                f"or ps -fp {pids} and kill {pids}",
            )
            return
        unseen = ""
        if os.geteuid():
            unseen = " that you may see; sudo lsof -w /dev/accel* /dev/vfio/* shows all"
        yield ok(f"{text}, held by no process{unseen}")
    elif wanted:
        yield fix(
            "TPU: TPU=local, but no chip (/dev/accel0, /dev/vfio/0)",
            "give TPU=name, or no TPU=",
        )
    else:
        yield none("TPU: this machine has no chip", "training here uses XLA's CPU backend")

    if (chips or asked) and has_environment():
        yield check_torch_xla(chips)


def processes_with(chips: list[str]) -> set[str]:
    """Returns the numbers of the processes that have one of these devices open."""
    holders = set()
    for link in glob.iglob(f"{ROOT}/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.readlink(link) in chips:
                holders.add(link.split("/")[-3])
    return holders


def check_torch_xla(chips: list[str]) -> str:
    """Checks that torch_xla opens its devices, and TPUs where there are chips."""
    works, answer = run(PYTHON, "-c", DEVICES, seconds=DEVICE_SECONDS)
    text = f"torch_xla: {messages.last_line(answer)}"
    if not works:
        return fix(
            text,
            "a slice of several hosts answers only when all of them ask at once, "
            "as make train TPU= does; if this is the only host, restart the VM",
        )
    if chips and not answer.endswith("TPU"):
        return fix(text, "unset PJRT_DEVICE; the TPU needs libtpu as pinned, see above")
    return ok(text)


def check_memory(cores: int) -> str:
    """Checks memory and /dev/shm against what the recipes take with one loader process per core,
    the default."""
    available = available_memory()
    shm = ROOT / "dev/shm"
    shared = 0
    if shm.is_dir():
        shared = shutil.disk_usage(shm).free / GB

    in_memory = (available - MAIN_GB) / (LOADER_GB + SHARED_GB)
    workers = max(0, int(min(in_memory, shared / SHARED_GB)))
    text = (
        f"memory: {available:.1f} GB available, {shared:.1f} GB in /dev/shm;"
        f" a recipe takes {MAIN_GB:.0f} GB, and for each of {cores} loader processes"
        f" {LOADER_GB} GB and {SHARED_GB} GB in /dev/shm"
    )
    if workers >= cores:
        return ok(text)
    if available < MAIN_GB:
        return fix(text, "end other programs, even a trial does not fit")
    return fix(
        text,
        f'give ARGS="--workers {workers}"; in Docker --shm-size=16g makes /dev/shm larger',
    )


def available_memory() -> float:
    """Returns the GB that a program may use, within the limit of a container."""
    meminfo = (ROOT / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 / GB

    group = ROOT / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # no container, or "max"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        available = min(available, (limit - used) / GB)
    return available


def existing(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists."""
    return path if path.exists() else existing(path.absolute().parent)


@dataclass
class DiskNeed:
    """Something that is written."""

    what: str
    folder: Path
    gigabytes: int


def disk_needs(runs: str) -> list[DiskNeed]:
    """Returns what is written on this machine: by an installation that is due, else by a run."""
    temporary = Path(tempfile.gettempdir())
    if STAMP.exists():
        needs = [DiskNeed("temporary files", temporary, 1)]
    else:
        cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache/pip")
        needs = [
            DiskNeed("environment", Path(), 8),
            DiskNeed("downloads", temporary, 4),
            DiskNeed("pip's cache", cache, 4),
        ]
    if runs and "://" not in runs:
        # BERT-base: two checkpoints and the one being written (1.3 GB each: weights, two moments),
        # the export.
        needs.append(DiskNeed("runs", Path(runs).expanduser(), 5))
    return needs


def check_disk(runs: str) -> Iterator[str]:
    """Checks free disk where something is written, summed over folders that share one.

    Args:
        runs: "" where they are on other machines.
    """
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in disk_needs(runs):
        disk = existing(need.folder).stat().st_dev
        by_disk.setdefault(disk, []).append(need)

    for needs in by_disk.values():
        free = shutil.disk_usage(existing(needs[0].folder)).free / GB
        needed = sum(need.gigabytes for need in needs)
        listed = ", ".join(f"{need.what} {need.gigabytes} GB in {need.folder}" for need in needs)
        yield line(
            free >= needed,
            f"disk: {free:.1f} GB free, {needed} GB needed ({listed})",
            'make room, or put files elsewhere: ARGS="--runs PATH", TMPDIR=',
        )


# ---- a TPU from here -----------------------------------------------------------------------------


def check_tpu(tpu: str, zone: str, project: str) -> Iterator[str]:
    """Checks how the TPU is reached: that each host lets us in, or gcloud's account, project, zone
    and the TPU VM.

    Args:
        tpu: "" where no run is to be launched: gcloud's settings are then only shown.
    """
    try:
        if not tpu:
            yield from check_gcloud(None, zone, project)
            return
        host = hosts.choose(tpu, zone, project, [])
        if isinstance(host, hosts.SshHosts):
            for worker, name in enumerate(host.hosts):
                yield from check_host(host, worker, name)
        else:
            yield from check_gcloud(host, zone, project)
    except (InputError, hosts.Transient) as error:
        yield fix("TPU VM", str(error))


def check_host(host: hosts.SshHosts, worker: int, name: str) -> Iterator[str]:
    """Checks that a host can be reached by ssh, and that it has a Python for the environment."""
    works, text = run(*host.ssh(worker, "python3 --version && systemctl --version"))
    yield line(
        works,
        f"worker {worker}: {name}: {text.splitlines()[0]}",
        f"{messages.explain_ssh(text, name)[1]}; "
        "the launcher needs ssh, python3 3.8 and systemd there",
    )
    if not works:
        return

    has_python, said = run(*host.ssh(worker, FIND_PYTHON))
    if not has_python:
        problem = "no Python 3.11 to 3.13 with venv"
        if "libpython" in said:
            problem = said.removeprefix("error: ")
        yield fix(f"worker {worker}: {name}: {problem}", messages.GET_PYTHON)


def check_gcloud(host: hosts.TpuVm | None, zone: str, project: str) -> Iterator[str]:
    """Checks gcloud's account, project and zone, and the TPU VM.

    Args:
        host: the TPU VM; None where no run is to be launched.
    """
    lack = "fix" if host else "none"
    works, text = run("gcloud", "config", "list", "--format=json", "--quiet")
    if not works:
        yield line(
            False,
            f"gcloud: TPU=name needs it: {text}",
            "https://cloud.google.com/sdk/docs/install",
            lack,
        )
        return

    settings = json.loads(text)
    core = settings.get("core", {})
    compute = settings.get("compute", {})
    account = core.get("account")
    project = project or core.get("project")
    zone = zone or compute.get("zone")
    good = account and project and zone
    yield line(
        good,
        f"gcloud: account {account}, project {project}, zone {zone}",
        "gcloud auth login; "
        "give PROJECT= and ZONE=, or gcloud config set project (compute/zone) NAME",
        lack,
    )

    if host and good:
        machine = host.describe()
        yield line(not machine.problem, f"TPU VM: {machine.line}", machine.problem)
        if machine.state in ("ready", "sick"):
            yield from check_ssh_port(machine.addresses)


def check_ssh_port(addresses: tuple[str, ...]) -> Iterator[str]:
    """Checks that each worker of a TPU VM can be reached by ssh from here: a firewall drops packets
    without a word."""
    for worker, address in enumerate(addresses):
        if not address:
            yield fix(
                f"worker {worker}: no external address",
                "from inside of its network LAUNCH_ARGS=--gcloud-flag=--internal-ip, "
                f"else {TUNNEL}",
            )
            continue

        port = f"worker {worker}: {address} port {SSH_PORT}"
        try:
            socket.create_connection((address, SSH_PORT), timeout=SSH_SECONDS).close()
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
            yield fix(
                f"{port}: {reason}",
                f"a firewall rule of the TPU's network must allow tcp:{SSH_PORT}; or {TUNNEL}",
            )
        else:
            yield ok(f"{port} is open")


# ---- data and runs -------------------------------------------------------------------------------


def check_data(data: str, remote: bool, script: str = "", task: str = "") -> str:
    """Checks that the data can be opened as the script would.

    Args:
        remote: it is read by the workers of a TPU, not by this machine.
    """
    path = Path(data).expanduser()
    if "://" in data:
        return check_data_url(data, remote)
    looks_like_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", data)
    if looks_like_id and (remote or not path.exists()):
        return check_hub_id(data)
    if remote:
        return none(f"data: {data}", "read on the workers, and not looked for here")

    try:
        empty = is_empty(path)
    except OSError as error:
        return fix(f"data: {data}: {error.strerror}", "give the right path, or chmod -R u+rX")
    if empty:
        return fix(f"data: {data} is empty", "give the folder that has the files")
    if not has_environment():
        return none(
            f"data: {data} can be read; whether a script can open it, only the environment knows",
            "make install",
        )
    works, text = run(PYTHON, "-c", OPEN_DATA, PROJECT, data, script, task, seconds=DATA_SECONDS)
    return line(works, f"data: {data}: {text}", "docs/data.md says what each script reads")


def check_data_url(data: str, remote: bool) -> str:
    """Checks that the environment can list the files at a URL."""
    if not has_environment():
        return none(f"data: {data} cannot be tried without an environment", "make install")
    project = Path(__file__).resolve().parent.parent
    works, text = run(PYTHON, "-c", READ_URL, data, project)
    if works and remote:
        text += WORKERS_DECIDE
    return line(works, f"data: {data}: {text}", "docs/data.md has a section From a bucket")


def check_hub_id(data: str) -> str:
    """Says where a data set of the hub is kept, and whether it can be a private one."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    free = shutil.disk_usage(existing(home)).free / GB
    text = (
        f"data: {data} is taken for an id on the hub, kept in {home} (HF_HOME, {free:.0f} GB free)"
    )
    if os.environ.get("HF_TOKEN"):
        return ok(f"{text}; HF_TOKEN is set")
    return none(f"{text}; HF_TOKEN is not set", "export HF_TOKEN=… if it is private or gated")


def is_empty(path: Path) -> bool:
    """Returns whether a folder or a file has nothing in it. Raises OSError where it cannot be
    read."""
    if path.is_dir():
        return next(path.iterdir(), None) is None
    with path.open("rb") as file:
        return file.read(1) == b""


def check_runs(runs: str, remote: bool) -> str:
    """Checks that a run's folder can be written.

    Args:
        remote: it is written by the workers of a TPU, not by this machine.
    """
    if "://" in runs:
        return check_runs_url(runs, remote)
    if remote:
        return none(
            f"runs: {runs} is on the TPU and goes with it",
            'ARGS="--runs gs://bucket/runs" stays',
        )

    folder = existing(Path(runs).expanduser())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return ok(f"runs: {runs} can be written")
    except OSError as error:
        return fix(f"runs: {folder}: {error.strerror}", 'fix that, or give ARGS="--runs PATH"')


def check_runs_url(runs: str, remote: bool) -> str:
    """Checks that the environment can write and read at a URL."""
    if not has_environment():
        return none(f"runs: {runs} cannot be tried without an environment", "make install")
    works, text = run(PYTHON, "-c", WRITE_URL, runs)
    if works:
        text = "can be written and read"
        if remote:
            text += WORKERS_DECIDE
    return line(
        works,
        f"runs: {runs}: {text[:200]}",
        "is the name right, and may you use it? "
        "gcloud auth application-default login logs libraries in",
    )


# ---- the command line ----------------------------------------------------------------------------


def chips_here() -> list[str]:
    """Returns the device files of this machine's chips."""
    found = sorted((ROOT / "dev").glob("accel[0-9]*"))
    found += sorted((ROOT / "dev/vfio").glob("[0-9]*"))
    return [f"/{path.relative_to(ROOT)}" for path in found]


def examine(options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of all checks, in the order in which one would fix them."""
    local = options.tpu == "local"
    remote = options.tpu not in ("", "local")
    chips = chips_here()
    cores = len(os.sched_getaffinity(0))

    yield from check_programs(options.python, lack="fix" if remote else "none")
    yield from check_environment(chips)
    yield from check_devices(chips, wanted=local, asked=options.devices)
    yield check_memory(cores)
    if remote:
        yield from check_disk(runs="")
        yield from check_tpu(options.tpu, options.zone, options.project)
    else:
        yield from check_disk(options.runs)
        yield from check_tpu("", options.zone, options.project)
    if options.data:
        yield check_data(options.data, remote, options.script, options.task)
    yield check_runs(options.runs, remote)


def main() -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "tpu.doctor",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    for name in ("data", "script", "task", "tpu", "zone", "project"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--python", default=os.environ.get("PYTHON") or "python3.11")
    parser.add_argument("--devices", action="store_true")
    options = parser.parse_args()
    options.data = options.data.removeprefix("file://")
    options.runs = options.runs.removeprefix("file://")
    os.chdir(PROJECT)

    failed = False
    for finding in examine(options):
        print(finding, flush=True)
        failed |= finding.startswith("fix")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `make doctor | head` has seen enough
        os._exit(1)
