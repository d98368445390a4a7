"""Says what this machine has and lacks for training here, or for starting runs on a TPU from here.

`make doctor` calls it before anything is installed. It prints one line per check:

    ok    as it should be
    none  absent, and no error: a laptop has no TPU
    fix   what is wrong and what to do about it; the exit code is 1 then

    --data, --runs      folder, URL or hub id that is read; folder or URL that runs go to (default: runs)
    --script, --task    of train/, and GLUE's task: what is to open the data; default: whichever can
    --tpu               name of a TPU VM (--zone, --project: default gcloud's); ssh:host1,host2; local
    --devices           asks torch_xla for its devices also without a TPU
    --python            interpreter of the environment (default: $PYTHON, python3.11; make gives its own)

It installs and changes nothing; in the runs folder it writes a file and removes it. What only the environment knows, it
asks .venv/bin/python. Every command has a time limit. Only the standard library, Python 3.9 or later, Linux.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python3 tpu/doctor.py`

from errors import InputError
from tpu.launch import hosts, messages

ROOT, PROJECT = Path("/"), Path(__file__).resolve().parent.parent
PYTHON, STAMP = Path(".venv/bin/python"), Path(".venv/.installed")
LIBTPU_CHOICE = Path(".venv/.libtpu_version")  # what LIBTPU_VERSION= of make has asked for
LIBPYTHON = Path(__file__).with_name("libpython.py").resolve()
REQUIREMENTS = [Path(f"requirements{kind}.txt") for kind in ("", "-torchrec", "-tpu")]
SECONDS, DEVICE_SECONDS = 60, 180  # per command, on a cold disk; for torch_xla to open the devices
DATA_SECONDS = 300  # to list a million images
SSH_PORT, SSH_SECONDS = 22, 5
TUNNEL = "LAUNCH_ARGS=--gcloud-flag=--tunnel-through-iap"
# Memory of a run: the process that trains (1.1 GB in ResNet-50's trial), and each loader process: itself (0.2 GB there)
# and the three batches that it keeps in /dev/shm (ResNet-50's recipe on one host: 1024 x 224 x 224 x 3 bytes each).
MAIN_GB, LOADER_GB, SHARED_GB, GB = 2.0, 0.25, 0.5, 1e9
ABOUT_PYTHON = "import ensurepip, platform, venv; print(platform.python_implementation(), platform.python_version())"
DEVICES = "import torch_xla.runtime as r; print(r.global_runtime_device_count(), 'devices,', r.device_type())"
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
    sizes = [size for _, size, _ in find_files(sys.argv[1]).values()]
except InputError as error:
    sys.exit(str(error))
print(f"{len(sizes)} files, {sum(sizes) / 1e9:.1f} GB, can be read")
"""
OPEN_DATA = "import sys; sys.path.insert(0, sys.argv.pop(1)); from data.look import main; main()"
# On another host, which has no file of the project.
FIND_PYTHON = (
    "for python in python3.11 python3.12 python3.13; do"
    f" $python -c 'import ensurepip' 2>/dev/null && $python -c {shlex.quote(LIBPYTHON.read_text())} && exit;"
    " done; exit 1"
)


def line(good: object, text: str, remedy: str, lack: str = "fix") -> str:
    """Returns the line of a check. lack: "none" where it is no error."""
    return f"ok    {text}" if good else f"{lack:<4}  {text}: {remedy}"


def run(*command: str | Path, seconds: float = SECONDS) -> tuple[bool, str]:
    """Runs a command without input. Returns whether it succeeded, and its output or why it failed."""
    pipe, words = subprocess.PIPE, [str(word) for word in command]
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        return False, f"{words[0]}: {error.strerror}"
    try:
        out, err = (text.decode(errors="replace").strip() for text in process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        return False, f"{words[0]} did not answer in {seconds:.0f} s"
    finally:
        if process.poll() is None:  # also after Ctrl-C, which does not reach it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode == 0, messages.last_line(err or out) if process.returncode else out


def check_library(python: str | Path, *arguments: str) -> str:
    """Checks that an interpreter has the library that torch_xla is linked to. arguments: see libpython.py."""
    has, said = run(python, LIBPYTHON, *arguments)
    if has:
        return line(True, f"libpython: {python} has it", "")
    lack, _, remedy = said.removeprefix("error: ").partition(": ")
    return line(False, f"libpython: {lack}", remedy or messages.GET_PYTHON)


def check_programs(python: str, lack: str) -> Iterator[str]:
    """Checks the interpreter that the environment is made with, and the programs that the launcher needs."""
    works, about = run(python, "-c", ABOUT_PYTHON)
    good = works and re.match(r"CPython 3\.1[123]\.", about)
    yield line(good, f"Python: {python}: {about}", messages.GET_PYTHON)
    if good:
        yield check_library(python)
    absent = [f"no {name}" for name in ("git", "ssh") if shutil.which(name) is None]
    yield line(not absent, f"for TPU=: {', '.join(absent) or 'git, ssh'}", "install git and openssh-client", lack)


def check_environment(chips: list[str]) -> Iterator[str]:
    """Checks the packages of .venv against the pins, with libtpu's where chips are, and that it is complete.

    Of libtpu the version that LIBTPU_VERSION= has asked for is as good as the pinned one.
    """
    works, message = run(PYTHON, "-c", "")
    if not works:
        absent = not os.path.lexists(PYTHON)
        remedy = "make install creates it (8 GB)" if absent else "make clean, then make install"
        yield line(False, f"environment: {message}", remedy, "none" if absent else "fix")
        return
    files = REQUIREMENTS if chips else REQUIREMENTS[:2]
    pins = [pin for file in files for pin in re.findall(r"^([\w-]+)==([\w.]+)", file.read_text(), re.MULTILINE)]
    installed = importlib.metadata.distributions(path=glob.glob(".venv/lib/python*/site-packages"))
    versions = {str(package.metadata["Name"]).replace("-", "_").lower(): package.version for package in installed}
    chosen = LIBTPU_CHOICE.read_text().strip() if LIBTPU_CHOICE.exists() else ""
    note = ""
    strays = []
    for name, pin in pins:
        version = versions.get(name.replace("-", "_").lower(), "missing")
        wanted, why = pin, f"pinned: {pin}"
        if name == "libtpu" and chosen not in ("", pin):
            wanted, why = chosen, f"LIBTPU_VERSION={chosen}; {why}"
            note = f", but libtpu {version} ({why}): not run on a TPU"
        if version.partition("+")[0] != wanted:  # without +cpu
            strays.append(f"{name} {version} ({why})")
    anew = re.search(r"\btorch(_xla|vision)? ", " ".join(strays))  # they need each other's versions
    remedy = "make clean, then make install" if anew else "touch requirements.txt && make install"
    yield line(not strays, f"packages: {', '.join(strays) or f'all {len(pins)} as pinned{note}'}", remedy)
    if "torch_xla" in versions:
        yield check_library(PYTHON, "environment")
    newer = [str(file) for file in REQUIREMENTS if not STAMP.exists() or file.stat().st_mtime > STAMP.stat().st_mtime]
    text = f"cut off, or older than {' and '.join(newer)}" if newer else "complete"
    yield line(not newer, f"installation: {text}", "make install")


def check_devices(chips: list[str], wanted: bool, asked: bool) -> Iterator[str]:
    """Checks this machine's chips, who holds them, and what torch_xla sees. wanted: TPU=local; asked: --devices."""
    if not chips and wanted:
        yield line(False, "TPU: TPU=local, but no chip (/dev/accel0, /dev/vfio/0)", "give TPU=name, or no TPU=")
    elif not chips:
        yield line(False, "TPU: this machine has no chip", "training here uses XLA's CPU backend", "none")
    else:
        holders = set()
        for link in glob.iglob(f"{ROOT}/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.readlink(link) in chips:
                    holders.add(link.split("/")[-3])
        text = f"TPU: {len(chips)} chips ({', '.join(chips)})"
        if holders:
            pids = " ".join(sorted(holders))
            stop = f"a second run cannot start: make stop TPU=…, where it was started, or ps -fp {pids} and kill {pids}"
            yield line(False, f"{text}, held by process {pids}", stop)
            return
        unseen = " that you may see; sudo lsof -w /dev/accel* /dev/vfio/* shows all" if os.geteuid() else ""
        yield line(True, f"{text}, held by no process{unseen}", "")
    if not (chips or asked) or not os.access(PYTHON, os.X_OK):
        return
    works, answer = run(PYTHON, "-c", DEVICES, seconds=DEVICE_SECONDS)
    remedy = "unset PJRT_DEVICE; the TPU needs libtpu as pinned, see above"
    if not works:
        remedy = (
            "a slice of several hosts answers only when all of them ask at once, as make train TPU= does; if this is"
            " the only host, restart the VM"
        )
    yield line(works and (answer.endswith("TPU") or not chips), f"torch_xla: {messages.last_line(answer)}", remedy)


def check_memory(cores: int) -> str:
    """Checks memory and /dev/shm against what the recipes take with one loader process per core, the default."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (ROOT / "proc/meminfo").read_text(), re.MULTILINE)
    available = int(found[1]) * 1024 / GB
    with suppress(OSError, ValueError):  # no container, or "max"
        limit, used = (int((ROOT / "sys/fs/cgroup" / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, (limit - used) / GB)
    shm = ROOT / "dev/shm"
    shared = shutil.disk_usage(shm).free / GB if shm.is_dir() else 0
    workers = max(0, int(min((available - MAIN_GB) / (LOADER_GB + SHARED_GB), shared / SHARED_GB)))
    text = (
        f"memory: {available:.1f} GB available, {shared:.1f} GB in /dev/shm; a recipe takes {MAIN_GB:.0f} GB, and for"
        f" each of {cores} loader processes {LOADER_GB} GB and {SHARED_GB} GB in /dev/shm"
    )
    remedy = f'give ARGS="--workers {workers}"; in Docker --shm-size=16g makes /dev/shm larger'
    if available < MAIN_GB:
        remedy = "end other programs, even a trial does not fit"
    return line(workers >= cores, text, remedy)


def existing(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists."""
    return path if path.exists() else existing(path.absolute().parent)


def check_disk(runs: str) -> Iterator[str]:
    """Checks free disk where something is written, summed over folders that share one. runs: "" = on other machines."""
    needs = [("temporary files", Path(tempfile.gettempdir()), 1)]
    if not STAMP.exists():
        cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache/pip")
        needs = [("environment", Path(), 8), ("downloads", Path(tempfile.gettempdir()), 4), ("pip's cache", cache, 4)]
    if runs and "://" not in runs:
        # BERT-base: two checkpoints and the one being written (1.3 GB each: weights, two moments), the export.
        needs.append(("runs", Path(runs).expanduser(), 5))
    for device in {existing(path).stat().st_dev: None for _, path, _ in needs}:
        parts = [part for part in needs if existing(part[1]).stat().st_dev == device]
        free, need = shutil.disk_usage(existing(parts[0][1])).free / GB, sum(part[2] for part in parts)
        listed = ", ".join(f"{what} {gigabytes} GB in {path}" for what, path, gigabytes in parts)
        text = f"disk: {free:.1f} GB free, {need} GB needed ({listed})"
        yield line(free >= need, text, 'make room, or put files elsewhere: ARGS="--runs PATH", TMPDIR=')


def check_tpu(tpu: str, zone: str, project: str) -> Iterator[str]:
    """Checks how the TPU is reached: that each host lets us in, or gcloud's account, project, zone and the TPU VM."""
    try:
        host = hosts.choose(tpu, zone, project, []) if tpu else None
        if isinstance(host, hosts.SshHosts):
            for worker, name in enumerate(host.hosts):
                works, text = run(*host.ssh(worker, "python3 --version && systemctl --version"))
                remedy = f"{messages.explain_ssh(text, name)[1]}; the launcher needs ssh, python3 3.8 and systemd there"
                yield line(works, f"worker {worker}: {name}: {text.splitlines()[0]}", remedy)
                if not works:
                    continue
                has_python, said = run(*host.ssh(worker, FIND_PYTHON))
                if not has_python:
                    lack = said.removeprefix("error: ") if "libpython" in said else "no Python 3.11 to 3.13 with venv"
                    yield line(False, f"worker {worker}: {name}: {lack}", messages.GET_PYTHON)
            return
        lack = "fix" if tpu else "none"
        works, text = run("gcloud", "config", "list", "--format=json", "--quiet")
        if not works:
            yield line(False, f"gcloud: TPU=name needs it: {text}", "https://cloud.google.com/sdk/docs/install", lack)
            return
        core, compute = (json.loads(text).get(section, {}) for section in ("core", "compute"))
        account, project, zone = core.get("account"), project or core.get("project"), zone or compute.get("zone")
        good = account and project and zone
        remedy = "gcloud auth login; give PROJECT= and ZONE=, or gcloud config set project (compute/zone) NAME"
        yield line(good, f"gcloud: account {account}, project {project}, zone {zone}", remedy, lack)
        if host and good:
            machine = host.describe()
            yield line(not machine.problem, f"TPU VM: {machine.line}", machine.problem)
            if machine.state in ("ready", "sick"):
                yield from check_ssh_port(machine.addresses)
    except (InputError, hosts.Transient) as error:
        yield line(False, "TPU VM", str(error))


def check_ssh_port(addresses: tuple[str, ...]) -> Iterator[str]:
    """Checks that each worker of a TPU VM can be reached by ssh from here: a firewall drops packets without a word."""
    for worker, address in enumerate(addresses):
        if not address:
            text = f"worker {worker}: no external address"
            yield line(
                False, text, f"from inside of its network LAUNCH_ARGS=--gcloud-flag=--internal-ip, else {TUNNEL}"
            )
            continue
        try:
            socket.create_connection((address, SSH_PORT), timeout=SSH_SECONDS).close()
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
            text = f"worker {worker}: {address} port {SSH_PORT}: {reason}"
            yield line(False, text, f"a firewall rule of the TPU's network must allow tcp:{SSH_PORT}; or {TUNNEL}")
        else:
            yield line(True, f"worker {worker}: {address} port {SSH_PORT} is open", "")


def check_data(data: str, remote: bool, script: str = "", task: str = "") -> str:
    """Checks that the data can be opened as the script would. remote: by the workers of a TPU, not by this machine."""
    path = Path(data).expanduser()
    if "://" in data:
        if not os.access(PYTHON, os.X_OK):
            return line(False, f"data: {data} cannot be tried without an environment", "make install", "none")
        works, text = run(PYTHON, "-c", READ_URL, data, Path(__file__).resolve().parent.parent)
        text += "; whether the workers can, their service account decides" * (works and remote)
        return line(works, f"data: {data}: {text}", "docs/data.md has a section From a bucket")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", data) and (remote or not path.exists()):
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
        token = os.environ.get("HF_TOKEN")
        kept = f"kept in {home} (HF_HOME, {shutil.disk_usage(existing(home)).free / GB:.0f} GB free)"
        text = f"data: {data} is taken for an id on the hub, {kept}; HF_TOKEN is {'' if token else 'not '}set"
        return line(token, text, "export HF_TOKEN=… if it is private or gated", "none")
    if remote:
        return line(False, f"data: {data}", "read on the workers, and not looked for here", "none")
    try:
        empty = next(path.iterdir(), None) is None if path.is_dir() else path.open("rb").read(1) == b""
    except OSError as error:
        return line(False, f"data: {data}: {error.strerror}", "give the right path, or chmod -R u+rX")
    if empty:
        return line(False, f"data: {data} is empty", "give the folder that has the files")
    if not os.access(PYTHON, os.X_OK):
        text = f"data: {data} can be read; whether a script can open it, only the environment knows"
        return line(False, text, "make install", "none")
    works, text = run(PYTHON, "-c", OPEN_DATA, PROJECT, data, script, task, seconds=DATA_SECONDS)
    return line(works, f"data: {data}: {text}", "docs/data.md says what each script reads")


def check_runs(runs: str, remote: bool) -> str:
    """Checks that a run's folder can be written."""
    if "://" in runs:
        if not os.access(PYTHON, os.X_OK):
            return line(False, f"runs: {runs} cannot be tried without an environment", "make install", "none")
        works, text = run(PYTHON, "-c", WRITE_URL, runs)
        if works:
            text = "can be written and read" + "; whether the workers can, their service account decides" * remote
        login = "is the name right, and may you use it? gcloud auth application-default login logs libraries in"
        return line(works, f"runs: {runs}: {text[:200]}", login)
    if remote:
        return line(
            False, f"runs: {runs} is on the TPU and goes with it", 'ARGS="--runs gs://bucket/runs" stays', "none"
        )
    folder = existing(Path(runs).expanduser())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return line(True, f"runs: {runs} can be written", "")
    except OSError as error:
        return line(False, f"runs: {folder}: {error.strerror}", 'fix that, or give ARGS="--runs PATH"')


def examine(options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of all checks, in the order in which one would fix them."""
    remote = options.tpu not in ("", "local")
    chips = [f"/{path.relative_to(ROOT)}" for path in sorted((ROOT / "dev").glob("accel[0-9]*"))]
    chips += [f"/{path.relative_to(ROOT)}" for path in sorted((ROOT / "dev/vfio").glob("[0-9]*"))]
    yield from check_programs(options.python, "fix" if remote else "none")
    yield from check_environment(chips)
    yield from check_devices(chips, options.tpu == "local", options.devices)
    yield check_memory(len(os.sched_getaffinity(0)))
    yield from check_disk("" if remote else options.runs)
    yield from check_tpu(options.tpu if remote else "", options.zone, options.project)
    if options.data:
        yield check_data(options.data, remote, options.script, options.task)
    yield check_runs(options.runs, remote)


def main() -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser("tpu.doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("data", "script", "task", "tpu", "zone", "project"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--python", default=os.environ.get("PYTHON") or "python3.11")
    parser.add_argument("--devices", action="store_true")
    options = parser.parse_args()
    options.data, options.runs = options.data.removeprefix("file://"), options.runs.removeprefix("file://")
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
