"""Says what this machine has and lacks for training here, or for starting runs on a TPU from here.

    python3 -m tpu.doctor [--data PATH] [--runs PATH] [--tpu NAME --zone ZONE --project PROJECT] [--devices]

`make doctor` calls it, before anything is installed. A line a check:

    ok    as it should be
    none  not there, which is no error: a laptop has no TPU
    fix   what is wrong, and what to do about it; the exit code is 1 then

Nothing is installed or changed; in the folder of the runs a file is written and removed again. What only the
environment knows is asked from .venv/bin/python. Every command has a time limit.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python3 tpu/doctor.py`

from errors import InputError
from tpu.launch import hosts

SECONDS = 60  # for a command: gcloud takes seconds, and so do imports on a cold disk
DEVICE_SECONDS = 180  # for torch_xla to open the devices
REQUIREMENTS = ("requirements.txt", "requirements-torchrec.txt", "requirements-tpu.txt")
STAMP = ".venv/.installed"
GB = 1e9
# Memory of a run: the process that trains (1.1 GB in ResNet-50's trial), and each loader process: itself (0.2 GB there)
# and the three batches that it keeps in /dev/shm (ResNet-50's recipe on one host: 1024 x 224 x 224 x 3 bytes each).
MAIN_GB, LOADER_GB, SHARED_GB = 2.0, 0.25, 0.5
ENVIRONMENT_GB = 8  # installed
DOWNLOADS_GB = 4  # the wheels, which pip unpacks from the temporary folder and keeps in its cache
RUNS_GB = 5  # BERT-base: two checkpoints and the one being written (1.3 GB each: weights, two moments), the export
TMP_GB = 1
GOOGLE = "0x1ae0"  # PCI vendor


@dataclass(frozen=True)
class Finding:
    """A line: "ok", "none" or "fix", and a sentence."""

    state: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<4}  {self.text}"


def ok(text: str) -> Finding:
    """As it should be."""
    return Finding("ok", text)


def none(text: str) -> Finding:
    """Not there, and no error."""
    return Finding("none", text)


def fix(text: str) -> Finding:
    """To be mended; the text says how."""
    return Finding("fix", text)


def size(number: float) -> str:
    """GB, with a decimal below ten."""
    return f"{number:.1f} GB" if number < 10 else f"{number:.0f} GB"


@dataclass
class Outcome:
    """What became of a command. code: None = it is not installed or did not end in time, which `err` says."""

    code: int | None
    out: str
    err: str

    @property
    def why(self) -> str:
        """The last thing it said."""
        return hosts.last_line(self.err or self.out)


def run(command: list[str], seconds: float = SECONDS, cwd: Path | None = None) -> Outcome:
    """Runs a command that is asked nothing, and ends it and what it has started when the time is up."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(None, "", f"{command[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Outcome(None, "", f"{command[0]} did not answer in {seconds:.0f} s")
    finally:
        if process.poll() is None:  # also after Ctrl-C, which does not reach it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Outcome(process.returncode, out, err)


@dataclass
class Environment:
    """The project's folder with its .venv."""

    project: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.project / ".venv/bin/python"

    @property
    def there(self) -> bool:
        """Whether it has one that starts."""
        return os.access(self.python, os.X_OK)

    def ask(self, program: str, *arguments: str, seconds: float = SECONDS) -> tuple[dict, Outcome]:
        """Runs Python code there, whose last line is a JSON object; {} when it failed."""
        outcome = run([str(self.python), "-c", program, *arguments], seconds, self.project)
        answer = {}
        if outcome.code == 0 and outcome.out.strip():
            try:
                answer = json.loads(outcome.out.strip().splitlines()[-1])
            except ValueError:
                outcome.err = outcome.out
        return answer, outcome

    def pins(self, file: str) -> dict[str, str]:
        """Name -> version of a requirements file."""
        return dict(re.findall(r"^([\w-]+)==([\w.]+)", (self.project / file).read_text(), re.MULTILINE))


# --- programs and environment ---------------------------------------------------------------------------------------

ABOUT_PYTHON = (
    "import importlib.util, json, platform, sys; print(json.dumps({'name': platform.python_implementation(),"
    " 'version': platform.python_version(), 'minor': list(sys.version_info[:2]), 'missing': [m for m in"
    " ('venv', 'ensurepip') if importlib.util.find_spec(m) is None]}))"
)
GET_PYTHON = (
    "on Ubuntu `sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get install -y python3.11 python3.11-venv`,"
    " or give make PYTHON=/path/to/python3.11"
)


def check_python(python: str) -> Iterator[Finding]:
    """The interpreter that the environment is made with."""
    outcome = run([python, "-c", ABOUT_PYTHON])
    if outcome.code is None:
        yield fix(f"Python: {outcome.err}; CPython 3.11 is needed: {GET_PYTHON}")
        return
    try:
        about = json.loads(outcome.out)
    except ValueError:
        yield fix(f"Python: {python} does not work ({outcome.why}); CPython 3.11 is needed: {GET_PYTHON}")
        return
    found = f"{python} is {about['name']} {about['version']}"
    if about["name"] != "CPython" or about["minor"] != [3, 11]:
        yield fix(f"Python: {found}, and CPython 3.11 is needed: {GET_PYTHON}")
    elif about["missing"]:
        lacks = " and ".join(about["missing"])
        yield fix(f"Python: {found}, without {lacks}: install python3.11-venv (sudo apt-get install python3.11-venv)")
    else:
        yield ok(f"Python: {found}, with venv and ensurepip")


def check_git(needed: bool) -> Iterator[Finding]:
    """git lists the files that are copied to a TPU's workers, and a run notes its commit."""
    outcome = run(["git", "--version"])
    if outcome.code == 0:
        yield ok(f"git: {outcome.out.strip().removeprefix('git version ')}")
    elif needed:
        yield fix("git: not installed, and TPU= copies the files that it lists: sudo apt-get install git")
    else:
        yield none("git: not installed; TPU= needs it, and runs note their commit with it")


VERSIONS = """
import importlib.metadata as metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = ""
needs = metadata.requires("torchvision") or [] if versions["torchvision"] else []
print(json.dumps({"versions": versions, "torchvision_needs": [need for need in needs if need.startswith("torch")]}))
"""


def check_environment(environment: Environment) -> Iterator[Finding]:
    """The packages of .venv against the pins, and torch, torch_xla and torchvision against each other."""
    if not environment.there:
        yield none(f"environment: .venv is not there; make install makes it ({ENVIRONMENT_GB} GB)")
        return
    # libtpu has a line of its own, among the devices.
    pins = {**environment.pins(REQUIREMENTS[0]), **environment.pins(REQUIREMENTS[1])}
    found, outcome = environment.ask(VERSIONS, *pins)
    if not found:
        yield fix(f"environment: .venv/bin/python does not work ({outcome.why}): make clean, then make install")
        return
    versions = {name: version.partition("+")[0] for name, version in found["versions"].items()}  # without +cpu
    trio = ("torch", "torch_xla", "torchvision")
    need = re.search(r"[\d.]*\d", "".join(found["torchvision_needs"]))
    shown = ", ".join(f"{name} {versions[name] or 'missing'}" for name in trio)
    wrong = [name for name in pins if versions[name] != pins[name]]
    if not all(versions[name] for name in trio):
        yield fix(f"torch: {shown}: make clean, then make install")
    elif versions["torch_xla"] != versions["torch"]:
        yield fix(
            f"torch: torch_xla {versions['torch_xla']} needs torch {versions['torch_xla']}, and {versions['torch']} is"
            " installed: make clean, then make install"
        )
    elif need and need[0] != versions["torch"]:
        yield fix(
            f"torch: torchvision {versions['torchvision']} needs torch {need[0]}, and {versions['torch']} is installed:"
            " make clean, then make install"
        )
    elif any(name in wrong for name in trio):
        wanted = ", ".join(f"{name} {pins[name]}" for name in trio)
        yield fix(f"torch: {shown}, and {wanted} are pinned: make clean, then make install")
    else:
        yield ok(f"torch: {shown}; they fit each other and are the pinned ones")
    rest = [name for name in pins if name not in trio]
    strays = [f"{name} {versions[name] or 'is missing'} (pinned: {pins[name]})" for name in rest if name in wrong]
    if strays:
        yield fix(f"packages: {', '.join(strays)}: touch requirements.txt && make install")
    else:
        yield ok(f"packages: the other {len(rest)} that are pinned are installed in these versions")
    stamp = environment.project / STAMP
    if not stamp.exists():
        yield fix("installation: it was cut off; make install starts it over")
        return
    made = stamp.stat().st_mtime_ns
    newer = [file for file in REQUIREMENTS if (environment.project / file).stat().st_mtime_ns > made]
    if newer:
        yield fix(f"installation: {' and '.join(newer)} changed after it: make install")
    else:
        yield ok("installation: complete, and newer than the requirements files")


# --- devices --------------------------------------------------------------------------------------------------------


def find_chips(root: Path) -> list[str]:
    """The device files of TPU chips: /dev/accel0 … (v2 to v4), /dev/vfio/0 … (v5e and later; a number is a group)."""
    chips = [path for path in sorted((root / "dev").glob("accel[0-9]*")) if path.name[5:].isdigit()]
    groups = [path for path in (root / "dev/vfio").glob("[0-9]*") if path.name.isdigit()]
    for path in sorted(groups, key=lambda path: int(path.name)):
        # Other cards can be given away in the same manner.
        vendors = list((root / "sys/kernel/iommu_groups" / path.name / "devices").glob("*/vendor"))
        if not vendors or any(file.read_text().strip() == GOOGLE for file in vendors):
            chips.append(path)
    return [f"/{path.relative_to(root)}" for path in chips]


def holders(root: Path, chips: list[str]) -> tuple[dict[int, str], bool]:
    """Processes that have a chip open: number -> command line; and whether all processes could be looked into."""
    found, complete = {}, True
    for process in (root / "proc").glob("[0-9]*"):
        try:
            links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
        except PermissionError:
            complete = False
            continue
        except OSError:  # it has ended meanwhile
            continue
        if any(link in chips for link in links):
            words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            found[int(process.name)] = shlex.join(words)[:80]
    return found, complete


DEVICES = """
import json
import torch_xla.runtime as runtime
print(json.dumps({"type": runtime.device_type(), "count": runtime.global_runtime_device_count()}))
"""


def check_devices(
    root: Path, environment: Environment, wanted: bool, ask: bool, seconds: float = DEVICE_SECONDS
) -> Iterator[Finding]:
    """Chips of this machine, who holds them, and what torch_xla sees. wanted: TPU=local; ask: --devices."""
    chips = find_chips(root)
    held: dict[int, str] = {}
    if chips:
        yield ok(f"TPU: {len(chips)} device files of chips ({', '.join(chips)})")
        held, complete = holders(root, chips)
        for pid, command in sorted(held.items()):
            yield fix(
                f"TPU in use: process {pid} holds it ({command}); a second run cannot start: make stop TPU=…, where it"
                f" was started, or kill {pid}"
            )
        if not held and complete:
            yield ok("TPU in use: no process holds it")
        elif not held:
            yield ok(
                "TPU in use: by no process of yours; others' cannot be seen by this user: sudo lsof -w /dev/accel*"
                " /dev/vfio/*"
            )
    elif wanted:
        yield fix(
            "TPU: TPU=local, but there is no chip here (no /dev/accel0, no /dev/vfio/0): give TPU=name, or no TPU="
        )
    else:
        yield none("TPU: this machine has no chip; training here uses XLA's CPU backend")
    if chips and environment.there:
        pin = environment.pins("requirements-tpu.txt")["libtpu"]
        version = environment.ask(VERSIONS, "libtpu", "torchvision")[0].get("versions", {}).get("libtpu", "")
        if version == pin:
            yield ok(f"libtpu: {version}, as pinned")
        else:
            yield fix(
                f"libtpu: {version or 'missing'}, and {pin} is needed where chips are: .venv/bin/pip install -r"
                " requirements-tpu.txt"
            )
    if not (chips or ask) or not environment.there:
        return
    if held:
        yield none("torch_xla: not asked for its devices, which another process holds")
        return
    answer, outcome = environment.ask(DEVICES, seconds=seconds)
    if outcome.code is None:
        yield fix(
            f"torch_xla: no devices in {seconds:.0f} s; a slice of several hosts answers only when all of them ask at"
            " once, as make train TPU= does; if this is the only host, restart the VM"
        )
    elif not answer:
        yield fix(f"torch_xla: it cannot open the devices ({outcome.why})")
    elif chips and answer["type"] != "TPU":
        yield fix(f"torch_xla: it uses the {answer['type']} and not the TPU: unset PJRT_DEVICE, and see libtpu above")
    else:
        yield ok(f"torch_xla: {answer['count']} devices, {answer['type']}")


# --- memory and disk ------------------------------------------------------------------------------------------------


def available_memory(root: Path) -> float:
    """Bytes that a new process can have: the machine's, or what a container has left."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    available = int(found[1]) * 1024
    limit, used = (root / "sys/fs/cgroup" / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def check_memory(root: Path, cores: int, usage: Callable = shutil.disk_usage) -> Iterator[Finding]:
    """Main memory and /dev/shm against what the recipes take with a loader process for each core, as by default."""
    available = available_memory(root) / GB
    each = LOADER_GB + SHARED_GB
    need = MAIN_GB + each * cores
    takes = f"{size(need)} ({MAIN_GB:.0f} GB, and {each} GB for each of {cores} loader processes)"
    if available >= need:
        yield ok(f"memory: {size(available)} available; a recipe takes up to {takes}")
    elif available < MAIN_GB:
        yield fix(f"memory: {size(available)} available, and even a trial takes {MAIN_GB:.0f} GB: end other programs")
    else:
        workers = int((available - MAIN_GB) / each)
        yield fix(
            f'memory: {size(available)} available, and a recipe takes up to {takes}: give ARGS="--workers {workers}";'
            " a trial run fits"
        )
    shm = root / "dev/shm"
    if not shm.is_dir():
        yield fix('shared memory: there is no /dev/shm, which loader processes need: mount it, or ARGS="--workers 0"')
        return
    free = usage(shm).free / GB
    text = f"shared memory: {size(free)} free in /dev/shm; batches pass through it, {SHARED_GB} GB a loader process"
    if free >= SHARED_GB * cores:
        yield ok(text)
    else:
        yield fix(f'{text}, {cores} of them: give ARGS="--workers {int(free / SHARED_GB)}"; in Docker --shm-size=16g')


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_disk(
    environment: Environment, runs: str, cache: Path, temporary: Path, usage: Callable = shutil.disk_usage
) -> Iterator[Finding]:
    """Free disk where something is written, added up for folders that share one. runs: "" = not on this machine."""
    needs = []
    if (environment.project / STAMP).exists():
        needs.append(("temporary files", temporary, TMP_GB))
    else:
        needs.append(("environment", environment.project, ENVIRONMENT_GB))
        needs.append(("its packages on the way", temporary, DOWNLOADS_GB))
        needs.append(("pip's cache", cache, DOWNLOADS_GB))
    if runs and not is_url(runs):
        needs.append(("runs", environment.project / Path(runs.removeprefix("file://")).expanduser(), RUNS_GB))
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for what, path, gigabytes in needs:
        disks.setdefault(existing(path).stat().st_dev, []).append((what, path, gigabytes))
    for parts in disks.values():
        free = usage(existing(parts[0][1])).free / GB
        need = sum(gigabytes for _, _, gigabytes in parts)
        listed = ", ".join(f"{what} {gigabytes} GB in {path}" for what, path, gigabytes in parts)
        if free >= need:
            yield ok(f"disk: {size(free)} free; needed {need} GB ({listed})")
        else:
            yield fix(
                f"disk: {size(free)} free, and {need} GB are needed ({listed}): make room; runs can go elsewhere with"
                ' ARGS="--runs PATH", temporary files with TMPDIR='
            )


# --- gcloud and the TPU ---------------------------------------------------------------------------------------------


def check_gcloud(tpu: str, zone: str, project: str) -> Iterator[Finding]:
    """Google's client: there, logged in, project and zone. It is an error only where a TPU VM is to be reached."""
    missing = fix if tpu else none
    if shutil.which("gcloud") is None:
        yield missing("gcloud: not installed; TPU=name needs it: https://cloud.google.com/sdk/docs/install")
        return
    needed = "" if tpu else ", which TPU=name needs"
    accounts = run(["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)", "--quiet"])
    if accounts.code != 0:
        yield missing(f"gcloud: it does not work ({accounts.why})")
        return
    if not accounts.out.strip():
        yield missing(f"gcloud: not logged in{needed}: gcloud auth login")
        if not tpu:
            return
    else:
        yield ok(f"gcloud: logged in as {accounts.out.split()[0]}")
    outcome = run(["gcloud", "config", "list", "--format=json", "--quiet"])
    try:
        configured = json.loads(outcome.out)
    except ValueError:
        yield missing(f"gcloud: its configuration cannot be read ({outcome.why})")
        return
    project = project or configured.get("core", {}).get("project", "")
    zone = zone or configured.get("compute", {}).get("zone", "")
    if project:
        yield ok(f"project: {project}")
    else:
        yield missing(f"project: not set{needed}: give PROJECT=, or gcloud config set project NAME")
    if zone:
        yield ok(f"zone: {zone}")
    else:
        yield missing(f"zone: not set{needed}: give ZONE=, or gcloud config set compute/zone NAME")


def check_tpu(host: hosts.TpuVm | hosts.SshHosts) -> Iterator[Finding]:
    """The state of a TPU VM; of plain hosts, whether each lets us in."""
    if not (shutil.which("ssh") and shutil.which("scp")):
        yield fix("ssh: not installed, and TPU= needs ssh and scp: sudo apt-get install openssh-client")
        return
    try:
        machine = host.describe()
    except InputError as error:
        yield fix(f"TPU VM: {error}")
        return
    if isinstance(host, hosts.TpuVm):
        yield fix(f"TPU VM: {machine.problem}") if machine.problem else ok(f"TPU VM: {machine.line}")
        return
    for worker, name in enumerate(host.hosts):
        outcome = run(host.ssh(worker, "python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))'"))
        if outcome.code == 0:
            yield ok(f"worker {worker}: {name} lets us in and has python3")
        elif outcome.code == 1:
            yield fix(f"worker {worker}: the python3 of {name} is older than 3.8, which the launcher needs there")
        else:
            sentence = hosts.final_ssh_error(outcome.err, name) or f"{name} cannot be reached ({outcome.why})"
            yield fix(f"worker {worker}: {sentence}")


# --- data and runs --------------------------------------------------------------------------------------------------

WRITE_URL = """
import json, os, sys
import fsspec
fs, root = fsspec.core.url_to_fs(sys.argv[1])
path = f"{root.rstrip('/')}/.doctor-{os.getpid()}"
fs.pipe_file(path, b"written by make doctor")
whole = fs.cat_file(path) == b"written by make doctor"
fs.rm_file(path)
print(json.dumps({"whole": whole}))
"""


def url_problem(url: str, outcome: Outcome) -> str:
    """Why a URL cannot be used, and what to do."""
    advice = ""
    if url.startswith(("gs://", "gcs://")):
        advice = "; is the name right, and may you use it? gcloud auth application-default login logs libraries in"
    return f"{url}: {outcome.why[:200]}{advice}"


def is_url(path: str) -> bool:
    """Whether fsspec is asked, and not the file system."""
    return "://" in path and not path.startswith("file://")


def check_data(data: str, environment: Environment, remote: bool) -> Iterator[Finding]:
    """That the data can be read. remote: by the workers of a TPU, not by this machine."""
    if is_url(data):
        yield fix(
            f"data: {data} is a URL, and scripts read folders or the id of a data set on the hub: copy it (gcloud"
            f" storage cp -r) or mount it (gcsfuse) where the run is, {'on every worker' if remote else 'here'}"
        )
        return
    path = environment.project / Path(data.removeprefix("file://")).expanduser()
    if remote:
        if data.startswith(("/", "~", ".")):
            yield none(f"data: {data} is read on the workers, and was not looked for here")
        else:
            yield from check_hub(data)
    elif not path.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data) and not data.startswith("."):
        yield none(f"data: there is no folder {data} here, so it is taken for the id of a data set on the hub")
        yield from check_hub(data)
    elif not path.exists():
        yield fix(f"data: {data} does not exist")
    elif not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        yield fix(f"data: {data} cannot be read by this user: chmod -R u+rX, or another user")
    elif path.is_dir() and not any(path.iterdir()):
        yield fix(f"data: {data} is empty")
    else:
        yield ok(f"data: {data} can be read")


def check_hub(data: str) -> Iterator[Finding]:
    """A data set of the Hugging Face hub: the token, and where it is kept."""
    if os.environ.get("HF_TOKEN"):
        yield ok("HF_TOKEN: set, and passed on to TPU=")
    else:
        yield none(f"HF_TOKEN: not set; only if {data} is private or gated: export HF_TOKEN=…")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    free = shutil.disk_usage(existing(home)).free / GB
    yield ok(f"HF_HOME: downloads are kept in {home}, {size(free)} free")


def check_runs(runs: str, environment: Environment, remote: bool) -> Iterator[Finding]:
    """That a run's folder can be written."""
    if is_url(runs):
        if not environment.there:
            yield none(f"runs: {runs} can be asked for when there is an environment: make install")
            return
        answer, outcome = environment.ask(WRITE_URL, runs)
        where = "; that the workers can, too, their service account decides" if remote else ""
        if not answer:
            yield fix(f"runs: {url_problem(runs, outcome)}")
        elif not answer["whole"]:
            yield fix(f"runs: {runs} gave back something else than was written there; choose another place")
        else:
            yield ok(f"runs: {runs} can be written and read{where}")
        return
    if remote:
        yield none(
            f'runs: {runs} is on the workers\' disks, which are gone with the TPU; ARGS="--runs gs://bucket/runs" stays'
        )
        return
    folder = existing(environment.project / Path(runs.removeprefix("file://")).expanduser())
    if not folder.is_dir():
        yield fix(f"runs: {folder} is a file, and a folder is needed: remove it, or give --runs another")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            yield ok(f"runs: {runs} can be written")
    except OSError as error:
        yield fix(f'runs: {folder} cannot be written ({error.strerror}): mend that, or ARGS="--runs PATH"')


def examine(options: argparse.Namespace, project: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """All checks, in the order in which one would mend what they find."""
    environment = Environment(project)
    local = options.tpu in ("", "local")
    yield from check_python(options.python)
    yield from check_git(not local)
    yield from check_environment(environment)
    yield from check_devices(root, environment, options.tpu == "local", options.devices)
    yield from check_memory(root, len(os.sched_getaffinity(0)))
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache/pip")
    yield from check_disk(environment, options.runs if local else "", cache, Path(tempfile.gettempdir()))
    host = None
    if not local:
        try:
            host = hosts.choose(options.tpu, options.zone, options.project, [], options.ssh_config)
        except InputError as error:
            yield fix(f"TPU VM: {error}")
    usable = True
    if not isinstance(host, hosts.SshHosts):
        for finding in check_gcloud(host.name if host else "", options.zone, options.project):
            usable &= finding.state == "ok"
            yield finding
    if host is not None and usable:  # else describe would fail for the same reason
        yield from check_tpu(host)
    if options.data:
        yield from check_data(options.data, environment, not local)
    yield from check_runs(options.runs, environment, not local)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tpu.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="", help="folder, URL or hub id that is to be read")
    parser.add_argument("--runs", default="runs", help="folder or URL that runs go to (default: runs)")
    parser.add_argument("--tpu", default="", help="name of a TPU VM, ssh:host1,host2, or local")
    parser.add_argument("--zone", default="", help="default: gcloud's")
    parser.add_argument("--project", default="", help="default: gcloud's")
    parser.add_argument("--devices", action="store_true", help="ask torch_xla for its devices also without a TPU")
    parser.add_argument("--ssh-config", default="", help="for ssh: hosts, a file for ssh's -F (default: your own)")
    python = os.environ.get("PYTHON") or "python3.11"
    parser.add_argument("--python", default=python, help=f"interpreter of the environment (default: {python})")
    options = parser.parse_args()
    failed = False
    try:
        for finding in examine(options, Path(__file__).resolve().parent.parent):
            print(finding, flush=True)
            failed |= finding.state == "fix"
    except KeyboardInterrupt:
        return 130
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `make doctor | head` has seen enough
        os._exit(1)
