"""tpu/launch/launcher.py and tpu/launch/worker.py, over tests/fake_gcloud.py and over a real sshd.

The programs are the real ones; the workers are processes of this machine with a home folder each. The project they
train is a Makefile and a script of forty lines that takes a lock as a chip would, so that two trainers are noticed;
one test trains a model of this repository.
"""

import ast
import contextlib
import getpass
import http.server
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from errors import InputError
from tpu.launch import bundle as bundles
from tpu.launch import hosts, launcher, request, watch

ROOT = Path(__file__).parent.parent
OURS = ("bundle", "connections", "fleet", "hosts", "launcher", "request", "watch")
FAKE = Path(__file__).with_name("fake_gcloud.py")
PYTHON = os.path.realpath(sys.executable)

MAKEFILE = 'train:\n\t@python3 -I -S train.py "$(NAME)" "$(DATA)" $(ARGS)\n'

# What a trainer does: takes the chip, goes on from its checkpoint, saves on SIGTERM and leaves with 143.
TRAINER = r"""
import fcntl, os, signal, subprocess, sys, time
name, data, *arguments = sys.argv[1:]
home = os.environ["HOME"]
worker = int(home.rpartition("-")[2])
options = dict(argument.split("=") for argument in arguments)
with open(home + "/starts", "a") as starts:
    starts.write(f"{os.getpid()}\n")
chip = open(home + "/chip", "w")
try:
    fcntl.flock(chip, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(home + "/two-trainers", "w")
    sys.exit("The TPU is already in use by process with pid 1")
os.makedirs(f"runs/{name}", exist_ok=True)
checkpoint = f"runs/{name}/step"
step = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
print(f"start {name} at {step} with {data!r} and {os.environ.get('SETTING')!r}", flush=True)
stopped = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in options else lambda *_: stopped.append(1))
if "stray" in options:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "burst" in options:
    for line in range(20000):
        print(f"line {line:06d} " + "x" * 40)
if str(worker) == options.get("silent"):
    print("HF_TOKEN is", len(os.environ.get("HF_TOKEN", "")), "letters")
while step < int(options.get("steps", 3)):
    step += 1
    print("step", step, flush=True)
    time.sleep(float(options.get("pause", 0.02)))
    if stopped:
        open(checkpoint, "w").write(str(step))
        print("saved", flush=True)
        sys.exit(143)
    if str(worker) == options.get("fails") and step == int(options.get("at", 2)):
        open(checkpoint, "w").write(str(step))
        print(open("message").read(), file=sys.stderr)
        sys.exit(int(options.get("code", 3)))
print("end", flush=True)
"""


class Cloud:
    """A TPU that is not there, a project, and the launcher's command line."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.project = folder / "cloud", folder / "project"
        self.bin, self.remote_bin = folder / "bin", folder / "remote"
        for path in (self.folder, self.bin, self.remote_bin, self.project):
            path.mkdir()
        gcloud = self.bin / "gcloud"
        gcloud.write_text(f'#!/bin/sh\nFAKE_CLOUD={self.folder} exec {PYTHON} -I -S {FAKE} "$@"\n')
        gcloud.chmod(0o755)
        (self.remote_bin / "python3").write_text(f'#!/bin/sh\nexec {PYTHON} -I -S "$@"\n')  # without site: it is slow
        (self.remote_bin / "python3").chmod(0o755)
        for name in ("git", "ssh", "scp"):  # and no gcloud that may be installed here
            (self.bin / name).symlink_to(shutil.which(name) or "/missing")
        self.processes: list[subprocess.Popen] = []
        self.tpu: dict = {
            "name": "my-tpu",
            "zone": "us-east5-b",
            "project": "mine",
            "workers": workers,
            "state": "READY",
            "health": "HEALTHY",
            "path": f"{self.remote_bin}:/usr/bin:/bin",
        }
        self.set()
        for worker in range(workers):
            self.home(worker).mkdir()
        (self.project / "Makefile").write_text(MAKEFILE)
        (self.project / "train.py").write_text(TRAINER)
        (self.project / "message").write_text("it broke")
        (self.project / ".gitignore").write_text("runs/\n*.tmp\n")
        git(self.project, "init", "-q")
        git(self.project, "add", ".")

    def set(self, **changes: object) -> None:
        self.tpu.update(changes)
        new = self.folder / "tpu.json.new"
        new.write_text(json.dumps(self.tpu))
        os.replace(new, self.folder / "tpu.json")

    def home(self, worker: int) -> Path:
        return self.folder / f"home-{worker}"

    def tree(self, worker: int) -> Path:
        return self.home(worker) / f"xla-zoo/worker-{worker}/tree"

    def start(self, action: str, *arguments: str, **environment: str) -> subprocess.Popen:
        command = [
            PYTHON,
            "-I",
            "-S",
            str(ROOT / "tpu/launch/launcher.py"),
            action,
            "--tpu",
            "my-tpu",
            "--zone",
            "us-east5-b",
        ]
        command += ["--grace", "20", *arguments]
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **environment}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=self.project, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self.processes.append(process)
        return process

    def run(self, action: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(action, *arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [json.loads(line)[3:] for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, worker: int) -> int:
        path = self.home(worker) / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    def alive(self, connections: bool = False) -> list[int]:
        """Processes on the workers, in whatever group or session: they have the worker's home in their environment.

        connections: also those that only look on, and end when they notice that their connection has.
        """
        mark = f"HOME={self.folder}/home-".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    looks_on = re.search(rb"worker-\w+\.py\W+(follow|stop|status)", (entry / "cmdline").read_bytes())
                    if mark in (entry / "environ").read_bytes() and (connections or not looks_on):
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for pid in self.alive(connections=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def read_until(process: subprocess.Popen, line: str) -> str:
    """What the launcher prints up to this line of worker 0's log. Some of what follows may be lost to `communicate`."""
    read = []
    while not read or read[-1] != line + "\n":
        read.append(process.stdout.readline())
        assert read[-1], "the launcher has ended"
    return "".join(read)


@pytest.fixture
def cloud(tmp_path, request):
    cloud = Cloud(tmp_path, getattr(request, "param", 2))
    yield cloud
    cloud.close()
    assert not list(cloud.folder.glob("home-*/two-trainers"))


@pytest.fixture
def here(cloud, monkeypatch, capsys):
    """The launcher's command line in this process, which is quicker: (exit code, standard output, standard error)."""

    def call(action: str, *arguments: str) -> tuple[int, str, str]:
        place = ["--tpu", "my-tpu", "--zone", "us-east5-b"]
        monkeypatch.setattr(sys, "argv", ["launch", action, *place, *arguments])
        monkeypatch.setenv("PATH", str(cloud.bin))
        monkeypatch.chdir(cloud.project)
        return launcher.main(), *capsys.readouterr()

    return call


def train(*flags: str, args: str = "", words: tuple[str, ...] = ()) -> tuple[str, ...]:
    return ("train", *flags, "--", "MODEL=tiny", *words, f"ARGS=--runs=/shared {args}")


def test_a_run_goes_through_on_all_workers(cloud):
    result = cloud.run(*train("--run", "one"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "start one at 0 with '' and None\nstep 1\nstep 2\nstep 3\nend\n"
    assert [cloud.starts(worker) for worker in range(2)] == [1, 1]
    wait_for(lambda: not cloud.alive())


# --- the working tree -----------------------------------------------------------------------------------------------


def test_the_bundle_has_what_git_knows_or_does_not_ignore(cloud):
    project = cloud.project
    (project / "new file's.py").write_text("new")
    (project / "a.tmp").write_text("ignored")
    (project / "link").symlink_to("train.py")
    (project / "tool").write_text("#!/bin/sh\n")
    (project / "tool").chmod(0o700)
    git(project, "add", "tool")
    (project / "message").unlink()
    name, content, count = bundles.make_bundle(project)
    with tarfile_of(content) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert sorted(members) == [".gitignore", "Makefile", "link", "new file's.py", "tool", "train.py"] and count == 6
    assert members["tool"].mode == 0o755 and members["train.py"].mode == 0o644
    assert members["link"].issym() and members["link"].linkname == "train.py"
    os.utime(project / "train.py", (1, 1))
    assert bundles.make_bundle(project) == (name, content, count)
    (project / "train.py").write_text("other")
    assert bundles.make_bundle(project)[0] != name


def tarfile_of(content: bytes):
    import io
    import tarfile

    return tarfile.open(fileobj=io.BytesIO(content))


def test_a_tree_that_cannot_be_copied_is_refused(cloud, tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    with pytest.raises(InputError, match="has no Makefile"):
        bundles.make_bundle(tmp_path / "plain")
    (tmp_path / "plain/Makefile").touch()
    with pytest.raises(InputError, match="git cannot list the files"):
        bundles.make_bundle(tmp_path / "plain")
    with (cloud.project / "weights").open("wb") as file:
        file.truncate(3 << 20)
    monkeypatch.setattr(bundles, "BUNDLE_MEGABYTES", 2)
    with pytest.raises(InputError, match=r"has 3 MB, more than 2 MB, most of all weights \(3 MB\).*\.gitignore"):
        bundles.make_bundle(cloud.project)
    monkeypatch.setattr(bundles, "BUNDLE_MEGABYTES", 512)
    (cloud.project / "inner").mkdir()
    git(cloud.project / "inner", "init", "-q")
    (cloud.project / "inner/file").touch()
    with pytest.raises(InputError, match="inner/ is neither a file nor a link"):
        bundles.make_bundle(cloud.project)


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_what_is_there_is_not_copied_again_and_what_is_gone_is_removed(cloud):
    folder = cloud.project / "old" / "deep"
    folder.mkdir(parents=True)
    (folder / "file.py").touch()
    assert cloud.run(*train("--run", "one")).returncode == 0
    tree = cloud.tree(0)
    assert (tree / "old/deep/file.py").exists()
    times = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    copies = [call for call in cloud.calls() if call[0] == "scp"]
    assert len(copies) == 1 and len([word for word in copies[0] if "part-" in word]) == 2
    assert cloud.run(*train("--run", "one")).returncode == 0
    assert len([call for call in cloud.calls() if call[0] == "scp"]) == 1
    shutil.rmtree(cloud.project / "old")
    (cloud.project / "train.py").write_text(TRAINER + "\n")
    (tree / "runs/other").mkdir()
    assert cloud.run(*train("--run", "one")).returncode == 0
    copies = [call for call in cloud.calls() if call[0] == "scp"]
    assert len(copies) == 2 and len([word for word in copies[1] if "part-" in word]) == 1, "the program is there"
    assert not (tree / "old").exists() and (tree / "runs/other").exists()
    # make goes by the time: it would install again if requirements.txt looked new.
    now = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    assert now[0] == times[0] and now[1] > times[1]
    home = tree.parent
    assert (home.parent.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o700, 0o700)


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_a_copy_that_was_cut_off_is_not_taken_for_a_whole_one(cloud):
    cloud.set(mishaps=[{"worker": 0, "match": "scp"}])
    result = cloud.run(*train())
    assert result.returncode == 0, result.stderr
    assert len([call for call in cloud.calls() if call[0] == "scp"]) == 2


# --- what is passed on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_values_arrive_whole_and_secrets_leave_no_trace(cloud):
    path = """/my data/it's $HOME; touch /tmp/x"""
    words = (f"DATA={path}".replace("$", "\\$"), "PRESET=")
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "wandbverysecret", "MINE": "mineverysecret"}
    seen = "import os; print({name: len(os.environ.get(name, '')) for name in ('HF_TOKEN', 'WANDB_API_KEY', 'MINE')})"
    (cloud.project / "train.py").write_text(TRAINER + f"\n{seen}\n")
    setting = "a 'b' \"c\" $d;"
    arguments = train("--secret", "MINE", "--env", f"SETTING={shlex.quote(setting)} B=1", words=words)
    result = cloud.run(*arguments, **secrets, OTHER="x")
    assert result.returncode == 0, result.stderr
    assert f"with {path!r} and {setting!r}" in result.stdout
    assert "{'HF_TOKEN': 13, 'WANDB_API_KEY': 15, 'MINE': 14}" in result.stdout
    assert "verysecret" not in json.dumps(cloud.calls()) + result.stdout + result.stderr
    files = [path for path in cloud.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if b"verysecret" in path.read_bytes()]
    assert not any("--worker=all" in call or any("strict-host" in word for word in call) for call in cloud.calls())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("train", "--", "--lr"), "--lr after -- is not an argument of make train"),
        (("train", "--", "ZONE=a"), "ZONE= is for this machine"),
        (("train", "--run", "a/b"), "RUN=a/b is not the name of one folder"),
        (("train", "--run", "a", "--", "NAME=b"), "two names"),
        (("train", "--env", "A"), 'A in ENV is not an assignment; write ENV="A=b'),
        (("train", "--env", "A='b"), "cannot be read"),
        (("train", "--secret", "NOT_SET"), "--secret NOT_SET: this variable is not set here"),
        (("train", "--tpu", "My_Tpu"), "is not the name of a TPU VM"),
        (("train", "--tpu", "local"), "TPU=local is this machine"),
        (("train", "--tpu", "ssh:a,-oProxyCommand=x"), "is not a list of hosts"),
        (("train", "--tpu", "ssh:a,a"), "names a host twice"),
        (("logs",), "does not know of a run"),
        (("logs", "--run", "x"), "does not know of RUN=x"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(cloud, here, arguments, message):
    code, _, err = here(*arguments)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and message in last
    assert not cloud.starts(0)


@pytest.mark.parametrize(
    "words, what",
    [
        ((), "ARGS has no --runs, so the run's folder is on each worker's own disk"),
        (("ARGS=--lr 0.1",), "ARGS has no --runs"),
        (("ARGS=--runs gs://bucket/runs --runs other",), "--runs other in ARGS is a folder of each worker's own disk"),
        (("ARGS=--runs=~/runs",), "--runs ~/runs in ARGS"),
    ],
)
def test_workers_without_a_folder_that_they_share_are_refused_before_anything_is_copied(cloud, here, words, what):
    code, _, err = here("train", "--run", "one", "--", "MODEL=tiny", *words)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith(f"error: my-tpu has 2 workers, and {what}")
    assert "ARGS='--runs gs://bucket/runs'" in last and "absolute path" in last
    assert [call[0] for call in cloud.calls()] == ["describe"]


@pytest.mark.parametrize(
    "arguments, folder",
    [
        ("--runs gs://a/b --lr 0.1", "gs://a/b"),
        ("--lr 0.1 --runs='/my disk/runs/'", "/my disk/runs"),
        ("--runs=a --runs memory://b", "memory://b"),
        ("--runs", ""),
        ("--runs '/not closed", "'/not"),
        ("--runs-of-another-kind x", ""),
        ("--runs /mnt/$$USER", "/mnt/$USER"),
    ],
)
def test_the_folder_of_the_runs_is_read_from_the_arguments(arguments, folder):
    assert request.runs_folder(["MODEL=tiny", f"ARGS={arguments}"]) == folder


@pytest.mark.parametrize("cloud", [1], indirect=True)
@pytest.mark.parametrize(
    "words, place",
    [
        ((), "scp --recurse my-tpu:xla-zoo/worker-0/tree/runs/one runs/ --worker=0"),
        (("ARGS=--runs=mine",), "my-tpu:xla-zoo/worker-0/tree/mine/one runs/"),
        (("ARGS=--runs=gs://bucket/runs",), "its results are in gs://bucket/runs/one"),
    ],
)
def test_one_worker_needs_no_shared_folder_and_its_results_are_named(cloud, words, place):
    result = cloud.run("train", "--run", "one", "--", "MODEL=tiny", *words)
    assert result.returncode == 0 and place in result.stderr, result.stderr


# --- the state of the TPU -------------------------------------------------------------------------------------------

RECREATE = (
    "gcloud compute tpus tpu-vm delete my-tpu --zone=us-east5-b && gcloud compute tpus tpu-vm create my-tpu"
    " --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
)


@pytest.mark.parametrize(
    "state, code, message",
    [
        ({"state": "PREEMPTED", "spot": True}, 75, f"the cloud took it back; recreate it: {RECREATE} --spot"),
        ({"state": "TERMINATED"}, 75, RECREATE),
        ({"state": "STOPPED"}, 75, "start it: gcloud compute tpus tpu-vm start my-tpu --zone=us-east5-b"),
        ({"state": "CREATING"}, 2, "not READY yet: wait, and look with gcloud compute tpus tpu-vm describe my-tpu"),
        ({"state": "REPAIRING"}, 75, f"or recreate it: {RECREATE}"),
        ({"health": "UNHEALTHY_MAINTENANCE"}, 75, f"in a maintenance event: wait until .* or recreate it: {RECREATE}"),
        ({"health": "UNHEALTHY_TPU", "node": {"healthDescription": "chip 3"}}, 75, "UNHEALTHY_TPU .chip 3."),
        ({"state": "DELETED"}, 75, "there is no TPU VM my-tpu .*create my-tpu .*NOT_FOUND: Resource"),
        (
            {"state": "PREEMPTED", "node": {"queuedResource": "projects/p/locations/z/queuedResources/wish"}},
            75,
            "queued-resources delete wish --force",
        ),
    ],
)
def test_a_tpu_that_is_not_ready_is_explained_with_the_command(cloud, monkeypatch, state, code, message):
    cloud.set(**state)
    monkeypatch.setenv("PATH", str(cloud.bin))
    machine = hosts.TpuVm("my-tpu", "us-east5-b").describe()
    assert re.search(message, machine.problem), machine.problem
    assert machine.lost == (code == launcher.GONE)


@pytest.mark.parametrize("state, code", [("PREEMPTED", 75), ("CREATING", 2)])
def test_nothing_is_begun_on_a_tpu_that_is_not_ready(cloud, state, code):
    cloud.set(state=state)
    result = cloud.run("train")
    assert result.returncode == code and len(cloud.calls()) == 1, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"error: my-tpu is {state}")


ERROR = "ERROR: (gcloud.compute.tpus.tpu-vm.describe) "


@pytest.mark.parametrize(
    "text, message",
    [
        (
            ERROR + "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login\n",
            "not logged in: gcloud auth login",
        ),
        (
            ERROR + "There was a problem refreshing your current auth tokens: Reauthentication failed. cannot prompt"
            " during non-interactive execution.",
            "not logged in: gcloud auth login",
        ),
        (
            ERROR + "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled. Enable",
            "gcloud services enable tpu.googleapis.com",
        ),
        (ERROR + "PERMISSION_DENIED: Permission denied on 'locations/us-x' (or it may not exist).", "zone's name"),
        (
            ERROR + "Error parsing [tpu].\nThe [tpu] resource is not properly specified.\n"
            "Failed to find attribute [zone]. The attribute can be set in the following ways: \n",
            "give ZONE=",
        ),
        (
            ERROR + "Error parsing [tpu].\nThe [tpu] resource is not properly specified.\n"
            "Failed to find attribute [project]. The attribute can be set in the following ways: \n"
            "- provide the argument `--project` on the command line\n",
            "give PROJECT=",
        ),
        (
            ERROR + "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZone' has been exceeded. Limit: 0 in zone x.",
            "quota of this TPU type",
        ),
        (
            ERROR + '{\n  "code": 8,\n  "message": "There is no more capacity in the zone \\"us-central1-b\\"; you can'
            ' try in another zone"\n}',
            "no free TPUs of this type now: .*There is no more capacity",
        ),
        (
            "WARNING: Your active project does not match the quota project in your local file.\n"
            + ERROR
            + "There was a problem connecting: [Errno 8]",
            "cannot be reached",
        ),
        (ERROR + "Something new.", "gcloud failed: .*Something new"),
    ],
)
def test_an_error_of_gcloud_is_explained_and_its_own_line_kept(cloud, monkeypatch, text, message):
    cloud.set(describe_error=text)
    monkeypatch.setenv("PATH", str(cloud.bin))
    with pytest.raises(InputError, match=message) as error:
        hosts.TpuVm("my-tpu", "us-east5-b").describe()
    last = next(line for line in text.splitlines() if line.startswith("ERROR"))
    assert last in str(error.value) and "\n" not in str(error.value)


def test_without_gcloud(cloud):
    (cloud.bin / "gcloud").unlink()
    result = cloud.run("train")
    assert result.returncode == 2 and "needs gcloud, which is not installed here" in result.stderr


def test_workers_with_several_networks_are_counted_once(cloud, monkeypatch):
    cloud.set(networks=3)
    monkeypatch.setenv("PATH", str(cloud.bin))
    assert "READY, HEALTHY, 2 workers" in hosts.TpuVm("my-tpu").describe().line


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", [3], indirect=True)
def test_the_first_worker_that_fails_ends_all(cloud):
    (cloud.project / "message").write_text("it broke\nFailed to get global TPU topology")
    begun = time.monotonic()
    result = cloud.run(*train("--run", "one", args="fails=2 steps=100000 pause=0.1"))
    assert result.returncode == 3
    assert time.monotonic() - begun < 20
    assert "[worker 2] it broke" in result.stdout.splitlines()
    assert "[worker 2] make: *** [Makefile:2: train] Error 3" in result.stdout
    assert "[worker 1]" not in result.stdout
    assert "worker 2 failed with exit code 3" in result.stderr
    assert "what this means: libtpu did not find the chips" in result.stderr
    assert "the same command with RUN=one" in result.stderr
    assert not cloud.alive()


@pytest.mark.parametrize(
    "message, sentence",
    [
        ("RuntimeError: Failed to get global TPU topology.", "must be started on all workers"),
        ("ABORTED: The TPU is already in use by process with pid 2718466.", "another process on this worker holds"),
        ("open(/dev/vfio/0): Device or resource busy: Device or resource busy", "make stop TPU=my-tpu ZONE=us-east5-b"),
        ("FAILED: Couldn't open /dev/vfio/0: Device or resource busy", "another process on this worker holds"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33G of 15G", "a smaller --batch-size"),
        ("error: CPython 3.11 is needed, python3.11 is not it", "CPython 3.11 with venv and ensurepip is needed"),
        ("OSError: [Errno 28] No space left on device", "the disk of this worker is full"),
        ("make: *** [Makefile:2: train] Killed", "ran out of memory (not the TPU's)"),
    ],
)
def test_known_messages_are_explained(message, sentence):
    said = [text for pattern, text in watch.KNOWN_MESSAGES if re.search(pattern, f"a\n{message}\nb", 8)]
    assert len(said) == 1 and sentence in said[0].format(stop="make stop TPU=my-tpu ZONE=us-east5-b")


def test_a_worker_that_fails_is_started_again_from_its_checkpoint(cloud):
    # It fails at step 2 of all, and with it gone on from there it does not come to step 2 again.
    result = cloud.run(*train("--run", "one", "--retries", "2", args="fails=1 steps=30 pause=0.05"))
    assert result.returncode == 0, result.stderr
    assert "starting one again, retry 1 of 2" in result.stderr and "retry 2 of" not in result.stderr
    assert (cloud.starts(0), cloud.starts(1)) == (2, 2)
    log = (cloud.home(1) / "xla-zoo/worker-1/jobs/one/log").read_text()
    assert "start one at 2 with" in log
    # The log of the second start follows that of the first, without repeating it.
    lines = result.stdout.splitlines()
    assert sum(line.startswith("start one at ") for line in lines) == 2 and lines[-1] == "end"
    assert lines.count("step 30") == 1


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_what_the_user_must_mend_is_not_tried_again(cloud):
    result = cloud.run(*train("--retries", "2", args="fails=0 code=2"))
    assert result.returncode == 2 and cloud.starts(0) == 1


@pytest.mark.slow  # the launcher looks at most every 3 s; test_the_shutdown_of_the_machine_lets_the_run_save is quick
def test_a_preempted_tpu_is_not_tried_again(cloud):
    process = cloud.start(*train("--run", "one", "--retries", "3", args="steps=100000 pause=0.1"))
    wait_for(lambda: cloud.starts(1))
    cloud.set(state="PREEMPTED")
    for pid in cloud.alive(connections=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 75, err
    assert "my-tpu is PREEMPTED" in err and RECREATE in err and "resumes from its newest checkpoint" in err
    assert (cloud.starts(0), cloud.starts(1)) == (1, 1)


@pytest.mark.slow
def test_a_worker_that_cannot_be_reached_any_more_counts_as_dead(cloud):
    process = cloud.start(*train("--lost-after", "1", args="steps=100000 pause=0.1"))
    wait_for(lambda: cloud.starts(1) and sum("follow" in str(call) for call in cloud.calls()) == 2)
    wait_for(lambda: set(cloud.alive(connections=True)) - set(cloud.alive()))
    time.sleep(0.3)
    cloud.set(unreachable=[1])
    for pid in cloud.alive(connections=True):
        with contextlib.suppress(OSError):
            if (
                b"\0follow\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
                and b"worker-1" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ):
                os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "worker 1 cannot be reached: ssh: connect to host 34.0.0.1 port 22: Connection timed out" in err
    assert "worker 1 did not confirm that it stopped" in err
    assert not [pid for pid in cloud.alive() if f"HOME={cloud.home(0)}\0".encode() in environ(pid)]


def environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("cloud", [1], indirect=True)
@pytest.mark.parametrize(
    "message, sentence",
    [
        ("me@34.0.0.0: Permission denied (publickey).", "does not accept your ssh key"),
        ("Host key verification failed.", "shows another host key than before"),
        ("scp: /home/me/x: No space left on device", "the disk of worker 0 is full"),
    ],
)
def test_a_connection_that_will_never_work_is_not_tried_again(cloud, message, sentence):
    cloud.set(mishaps=[{"worker": 0, "match": "scp", "message": message}])
    result = cloud.run(*train())
    assert result.returncode == 2 and sentence in result.stderr and message in result.stderr


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_a_worker_without_python_or_make(cloud):
    (cloud.remote_bin / "python3").unlink()
    cloud.set(path=str(cloud.remote_bin))
    for name in ("sh", "mkdir", "ls", "tr", "mv", "find", "rm"):
        (cloud.remote_bin / name).symlink_to(shutil.which(name))
    result = cloud.run(*train())
    assert result.returncode == 2 and "worker 0 has no python3" in result.stderr
    (cloud.remote_bin / "python3").symlink_to(PYTHON)
    result = cloud.run(*train())
    assert result.returncode == 2 and "make could not be started on the worker: No such file" in result.stderr
    assert not cloud.alive()


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_dropped_connection_goes_on_where_it_was(cloud, attempts):
    """attempts 9: gcloud itself repeats the command; 1: it gives up."""
    generator = random.Random(attempts)
    mishaps = [{"worker": 0, "match": " follow ", "bytes": generator.randrange(1, 300_000)} for _ in range(3)]
    mishaps += [{"worker": 1, "match": " follow ", "bytes": 10}]
    mishaps += [{"worker": worker, "match": "status", "how": "before"} for worker in range(2)]
    cloud.set(mishaps=mishaps, attempts=attempts, pause=0.05)
    result = cloud.run(*train("--run", "one", args="burst=1 steps=20"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == (cloud.home(0) / "xla-zoo/worker-0/jobs/one/log").read_text()
    assert result.stdout.count("line 0") == 20000 and "step 20\nend\n" in result.stdout
    assert (cloud.starts(0), cloud.starts(1)) == (1, 1)
    assert ("connection broke" in result.stderr) == (attempts == 1)


@pytest.mark.parametrize(
    "how, attempts",
    [
        ("answer lost", 2),
        ("before", 1),
        pytest.param("answer lost", 1, marks=pytest.mark.slow),
        pytest.param("before", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_a_start_whose_connection_drops_is_done_once(cloud, how, attempts):
    """Also when the run is over before the command is repeated."""
    cloud.set(mishaps=[{"worker": 0, "match": " start ", "how": how}], attempts=attempts)
    result = cloud.run(*train(args="steps=1"))
    assert result.returncode == 0, result.stderr
    assert cloud.starts(0) == 1
    assert result.stdout.count("start ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("cloud", [16], indirect=True)
def test_sixteen_workers(cloud):
    cloud.set(latency=0.1)
    begun = time.monotonic()
    result = cloud.run(*train(args="burst=1 fails=15 at=1 steps=1000 pause=0.2"))
    assert result.returncode == 3 and "worker 15 failed with exit code 3" in result.stderr
    assert result.stdout.count("[worker 15]") == watch.LAST_LINES
    assert time.monotonic() - begun < 40 and not cloud.alive()


# --- stop, attach ---------------------------------------------------------------------------------------------------


def test_ctrl_c_saves_and_leaves_no_process(cloud):
    process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.05 stray=1"))
    wait_for(lambda: cloud.starts(0) and cloud.starts(1))
    read_until(process, "step 10")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "no process of the run is left" in err and "RUN=one" in err
    assert "saved" in out.splitlines()[-2:]
    assert not cloud.alive(), "also none that had left its session"
    steps = [int((cloud.tree(worker) / "runs/one/step").read_text()) for worker in range(2)]
    assert min(steps) > 1
    result = cloud.run(*train("--run", "one", args=f"steps={steps[0] + 3}"))
    assert result.returncode == 0 and f"start one at {steps[0]} with" in result.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(cloud):
    process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.1 deaf=1"))
    wait_for(lambda: cloud.starts(0) and cloud.starts(1))
    read_until(process, "step 1")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all(list(cloud.home(worker).glob("xla-zoo/*/jobs/one/stop-*")) for worker in range(2)))
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - begun < 3
    assert "the run may go on: make stop TPU=my-tpu ZONE=us-east5-b ends it" in err
    assert cloud.alive()
    # SIGTERM is ignored by the trainer, so after the grace period it is killed.
    begun = time.monotonic()
    result = cloud.run("stop", "--grace", "1")
    assert result.returncode == 0 and "worker 1: stopped one, exit code 137" in result.stderr
    assert time.monotonic() - begun < 12, "not the 20 s that the first Ctrl-C had asked for"
    assert not cloud.alive()


@pytest.mark.slow  # test_a_start_has_one_token_and_a_worker_one_run has a stop that overtakes its start
def test_ctrl_c_before_the_start_leaves_nothing(cloud):
    cloud.set(latency=0.2)
    process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.1"))
    wait_for(lambda: any(" start " in word for call in cloud.calls() for word in call))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    time.sleep(0.8)  # a start that was on its way
    assert not cloud.alive()


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_detach_logs_status_stop(cloud, here):
    result = cloud.run(*train("--run", "one", "--detach", args="steps=100000 pause=0.05 deaf=0"))
    assert result.returncode == 0 and "make logs TPU=my-tpu ZONE=us-east5-b" in result.stderr
    assert (
        here("status")[1].count(
            "one (MODEL=tiny 'ARGS=--runs=/shared steps=100000 pause=0.05 deaf=0' NAME=one) runs since"
        )
        == 1
    )
    process = cloud.start("logs")
    out = read_until(process, "step 2")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "one continues" in err and out.startswith("start one at 0")
    assert cloud.alive()
    # The same command attaches; another one is refused.
    process = cloud.start(*train(args="steps=100000 pause=0.05 deaf=0"))
    same = "steps=100000 pause=0.05 deaf=0"
    for arguments in (train("--detach", args="steps=5"), train("--detach", "--run", "two", args=same)):
        code, _, err = here(*arguments)
        assert code == 2 and "my-tpu is busy: one (MODEL=tiny" in err
    result = cloud.run("stop", "--grace", "1")
    assert result.returncode == 0 and "worker 0: stopped one" in result.stderr
    _, err = process.communicate(timeout=20)
    assert "one runs already, since" in err and "the run was stopped on worker" in err
    assert process.returncode == 137
    assert cloud.starts(0) == 1 and not cloud.alive()
    result = cloud.run("logs")
    assert result.returncode == 137 and "start one at 0" in result.stdout
    assert "one exit code 137" in here("status")[1]
    assert "no run of ours is alive there" in here("stop")[2]


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_the_launcher_is_killed_at_random_moments(cloud, times):
    """The run goes on or has not begun; the next launcher attaches to it; never two trainers (see `cloud`)."""
    generator = random.Random(times)
    for number in range(times):
        process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.05"))
        time.sleep(generator.uniform(0.05, 1.5))
        process.kill()
        process.communicate()
        before = [cloud.starts(worker) for worker in range(2)]
        assert max(before) <= 1, number
    process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.05"))
    wait_for(lambda: cloud.starts(0) and cloud.starts(1))
    process.kill()
    process.communicate()
    process = cloud.start(*train("--run", "one", args="steps=100000 pause=0.05"))
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "one runs already" in err
    assert [cloud.starts(worker) for worker in range(2)] == [1, 1]
    assert "saved" in out.splitlines()[-2:]
    assert not cloud.alive()


def test_two_launchers_at_once(cloud):
    processes = [cloud.start(*train("--run", "one", args="steps=20 pause=0.05")) for _ in range(2)]
    results = [process.communicate(timeout=40) for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes in ([0, 0], [0, 2]), results
    assert [cloud.starts(worker) for worker in range(2)] == [1, 1]


@pytest.mark.slow  # test_a_start_has_one_token_and_a_worker_one_run has it without the launcher
@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_a_trainer_whose_supervisor_was_killed_holds_the_lock(cloud):
    assert cloud.run(*train("--run", "one", "--detach", args="steps=100000 pause=0.05")).returncode == 0
    lock = json.loads((cloud.home(0) / "xla-zoo/worker-0/lock").read_text())
    os.kill(lock["pid"], signal.SIGKILL)
    time.sleep(0.3)
    assert cloud.alive()
    result = cloud.run(*train("--run", "two"))
    assert result.returncode == 2 and "is busy: one" in result.stderr
    assert cloud.run("stop").returncode == 0
    assert not cloud.alive()
    assert "saved" in (cloud.home(0) / "xla-zoo/worker-0/jobs/one/log").read_text()
    # The lock went with the last process; nobody wrote an exit code.
    result = cloud.run("logs")
    assert result.returncode == 1 and "the run vanished from worker 0" in result.stderr
    assert cloud.run(*train("--run", "two")).returncode == 0


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_the_shutdown_of_the_machine_lets_the_run_save(cloud):
    process = cloud.start(*train("--run", "one", "--retries", "3", args="steps=100000 pause=0.05"))
    read_until(process, "step 2")
    cloud.set(state="PREEMPTED")
    os.kill(json.loads((cloud.home(0) / "xla-zoo/worker-0/lock").read_text())["pid"], signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75 and "saved" in out and RECREATE.replace("-8", "-4") in err
    assert "RUN=one resumes from its newest checkpoint" in err and cloud.starts(0) == 1, "and it is not tried again"


@pytest.mark.parametrize("cloud", [1], indirect=True)
def test_a_start_has_one_token_and_a_worker_one_run(cloud):
    """What tpu/launch/worker.py answers, in orders that connections bring about rarely."""
    bundle, content, _ = bundles.make_bundle(cloud.project)
    files = cloud.home(0) / "xla-zoo/worker-0/files"
    files.mkdir(parents=True)
    (files / f"{bundle}.tar.gz").write_bytes(content)
    shutil.copy(ROOT / "tpu/launch/worker.py", files / "worker-x.py")
    request = json.dumps({"words": ["ARGS=steps=100000", "NAME=one"], "environment": {}})

    def ask(action: str, token: str, data: str = request) -> dict:
        command = [PYTHON, str(files / "worker-x.py"), action, "--run", "one", "--token", token, "--bundle", bundle]
        environment = {"HOME": str(cloud.home(0)), "PATH": cloud.tpu["path"]}
        result = subprocess.run(command, input=data, env=environment, capture_output=True, text=True, timeout=30)
        return json.loads(result.stdout.splitlines()[-1].removeprefix("@xla-zoo "))

    assert ask("start", "a", "") == ask("start", "a", request[:-5]) == {"state": "incomplete"}
    assert ask("follow", "a") == {"state": "unknown"}
    assert ask("stop", "a") == {"state": "idle"}
    assert ask("start", "a") == {"state": "stopped"}, "its stop has overtaken it"
    assert ask("start", "b") == {"state": "started"}
    assert ask("start", "b") == ask("start", "b", "") == {"state": "attached"}
    answer = ask("start", "c")
    assert answer["state"] == "busy" and answer["holder"]["token"] == "b"
    assert ask("stop", "c") == {"state": "idle"} and cloud.alive()
    wait_for(lambda: cloud.starts(0))
    assert ask("stop", "b")["state"] == "stopped" and not cloud.alive()
    assert ask("start", "b") == {"state": "attached"}, "it is over, and not begun again"
    assert cloud.starts(0) == 1
    # The supervisor is killed: the trainer holds the lock itself, and the lock goes with it.
    assert ask("start", "d") == {"state": "started"}
    wait_for(lambda: cloud.starts(0) == 2)
    os.kill(json.loads((cloud.home(0) / "xla-zoo/worker-0/lock").read_text())["pid"], signal.SIGKILL)
    assert ask("start", "e")["state"] == "busy" and cloud.alive()
    assert ask("stop", "d")["state"] == "stopped" and not cloud.alive()
    answer = ask("follow", "d")
    assert answer["state"] == "ended" and answer["code"] is None


# --- other backends and programs ------------------------------------------------------------------------------------


@pytest.fixture
def sshd(cloud):
    """An sshd for each of two hosts, with the homes of the fake workers: the folder with ssh's config and keys."""
    folder = cloud.folder
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/usr/local/sbin")
    sftp = next((path for path in Path("/usr").glob("lib*/*/sftp-server")), None)
    if program is None or sftp is None or not shutil.which("ssh"):
        pytest.skip("needs openssh-server")
    for name in ("key", "host"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True)
    servers, config, known = [], [], []
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    cloud.port = port
    for worker in range(2):
        home = cloud.home(worker)
        force = f'cd {home} && exec env -i HOME={home} PATH={cloud.tpu["path"]} /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
        settings = {
            "ListenAddress": f"127.0.0.{worker + 1}:{port}",
            "HostKey": folder / "host",
            "AuthorizedKeysFile": f"{folder}/key.pub {folder}/.ssh/google_compute_engine.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "Subsystem": f"sftp {sftp}",
            "ForceCommand": force,
        }
        (folder / f"sshd{worker}").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        log = (folder / f"sshd{worker}.log").open("w")
        command = [program, "-D", "-e", "-f", str(folder / f"sshd{worker}")]
        servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log))
        config.append(f"Host host{worker}\n HostName 127.0.0.{worker + 1}\n Port {port}\n")
        known.append(f"[127.0.0.{worker + 1}]:{port} {' '.join((folder / 'host.pub').read_text().split()[:2])}\n")
    config.append(
        f"Host *\n IdentityFile {folder}/key\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known_hosts\n"
        f" GlobalKnownHostsFile /dev/null\n User {getpass.getuser()}\n"
    )
    (folder / "config").write_text("".join(config))
    (folder / "known").write_text("".join(known))
    cloud.servers = servers
    try:
        wait_for(lambda: all("listening" in (folder / f"sshd{i}.log").read_text() for i in range(2)), 10)
    except AssertionError:
        pytest.skip(f"sshd does not start: {(folder / 'sshd0.log').read_text()}")
    yield folder
    for server in servers:
        server.kill()
        server.wait()


def test_ssh_hosts_over_a_real_sshd(cloud, sshd):
    """In one run: an unknown host, a connection that breaks, the end of the run."""
    place = ("--tpu", "ssh:host0,host1", "--ssh-config", str(sshd / "config"))
    result = cloud.run("status", *place)
    assert result.returncode == 2 and "Host key verification failed" in result.stderr, result.stderr
    assert "(host0) is unknown to ssh" in result.stderr or "(host1) is unknown to ssh" in result.stderr
    os.replace(sshd / "known", sshd / "known_hosts")
    data = "/my data/it's"
    arguments = train("--run", "one", *place, args="steps=40 pause=0.05 burst=1", words=(f"DATA={data}",))
    process = cloud.start(*arguments)
    wait_for(lambda: cloud.starts(0) and cloud.starts(1))
    wait_for(lambda: len(set(cloud.alive(connections=True)) - set(cloud.alive())) >= 2)  # now it is followed
    # The connection breaks: the processes of sshd for it end.
    for server in cloud.servers:
        children = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
        assert children
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert "connection broke" in err and "connected again" in err and "scp -r host0:/shared/one runs/" in err
    assert out == (cloud.home(0) / "xla-zoo/worker-0/jobs/one/log").read_text()
    assert f"with {data!r}" in out and out.count("line 0") == 20000 and out.endswith("end\n")
    assert [cloud.starts(worker) for worker in range(2)] == [1, 1]
    assert cloud.calls() == []


@pytest.mark.slow
def test_ctrl_c_over_a_real_sshd(cloud, sshd):
    os.replace(sshd / "known", sshd / "known_hosts")
    place = ("--tpu", "ssh:host0,host1", "--ssh-config", str(sshd / "config"))
    process = cloud.start(*train("--run", "two", *place, args="steps=100000 pause=0.05"))
    wait_for(lambda: cloud.starts(0) and cloud.starts(1))
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "saved" in out and not cloud.alive(), err
    assert cloud.calls() == []


@pytest.mark.slow
def test_the_real_gcloud_knows_the_arguments(tmp_path):
    """Without an account it goes no further than reading them."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("needs gcloud")
    host = hosts.choose("my-tpu", "us-east5-b", "mine", ["--internal-ip"], "")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
    }
    describe = [*host._command("describe", "my-tpu"), "--format=json"]
    commands = [describe, host.ssh(0, "true"), host.scp(0, [__file__], "a")]
    for command in commands:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert "do not currently have an active account" in result.stderr, result.stderr
        assert "not logged in" in hosts.explain_gcloud(result.stderr, host)


class Api(http.server.BaseHTTPRequestHandler):
    """What gcloud asks of the TPU API (a node, its guest attributes) and of the compute API (the project)."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        cloud = self.server.cloud
        key = cloud.folder / ".ssh/google_compute_engine.pub"
        if "getGuestAttributes" in self.path:
            answer = {"guestAttributes": [{"queryValue": {"items": []}}]}
        elif "/nodes/" in self.path:
            addresses = [f"127.0.0.{worker + 1}" for worker in range(2)]
            answer = {
                "name": "projects/mine/locations/us-east5-b/nodes/my-tpu",
                "id": "77",
                "apiVersion": "V2",
                "acceleratorType": "v5litepod-8",
                "runtimeVersion": "v2-alpha-tpuv5-lite",
                "networkEndpoints": [{"ipAddress": ip, "accessConfig": {"externalIp": ip}} for ip in addresses],
                "state": cloud.tpu["state"],
                "health": "HEALTHY",
            }
        else:  # the key is in the project already, so gcloud does not bring it to the VM
            public = " ".join(key.read_text().split()[:2]) if key.exists() else ""
            user = getpass.getuser()
            items = [{"key": "ssh-keys", "value": f"{user}:{public} {user}"}]
            answer = {"kind": "compute#project", "name": "mine", "commonInstanceMetadata": {"items": items}}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_GET

    def log_message(self, *_) -> None:
        pass


@pytest.mark.slow
def test_the_real_gcloud_over_a_local_api_and_a_real_sshd(cloud, sshd, tmp_path):
    """What tests/fake_gcloud.py imitates: no account is needed, since the API is a server in this process."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("needs gcloud")
    (cloud.bin / "gcloud").unlink()
    (cloud.bin / "gcloud").symlink_to(os.path.realpath(gcloud))
    (sshd / ".ssh").mkdir(mode=0o700)
    (tmp_path / "token").write_text("none")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.cloud = cloud
    threading.Thread(target=server.serve_forever, daemon=True).start()
    api = f"http://127.0.0.1:{server.server_port}/"
    environment = {
        "PATH": f"{cloud.bin}:/usr/bin:/bin",
        "CLOUDSDK_CONFIG": str(tmp_path / "config"),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(tmp_path / "token"),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": api,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": api + "compute/v1/",
    }
    place = (
        "--project",
        "mine",
        f"--gcloud-flag=--ssh-flag=-p{cloud.port}",
        f"--gcloud-flag=--scp-flag=-P{cloud.port}",
    )
    data = "/my data/it's"
    try:
        words = (f"DATA={data}",)
        process = cloud.start(
            *train("--run", "one", *place, args="steps=300 pause=0.05 burst=1", words=words), **environment
        )
        wait_for(lambda: cloud.starts(0) and cloud.starts(1), 120)
        time.sleep(6)  # now it is followed
        for server_process in cloud.servers:
            command = ["pgrep", "-P", str(server_process.pid)]
            for pid in subprocess.run(command, capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == (cloud.home(0) / "xla-zoo/worker-0/jobs/one/log").read_text()
        assert out.startswith(f"start one at 0 with {data!r} and None\n") and out.endswith("step 300\nend\n")
        assert [cloud.starts(worker) for worker in range(2)] == [1, 1]
        # Each worker's key was kept when it was seen first, by the name of the worker.
        known = (sshd / ".ssh/google_compute_known_hosts").read_text()
        assert "tpu.77-0" in known and "tpu.77-1" in known
        process = cloud.start(*train("--run", "two", *place, args="steps=100000 pause=0.05"), **environment)
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "saved" in out and not cloud.alive(), err
        cloud.set(state="PREEMPTED")
        process = cloud.start("status", *place, **environment)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75 and "my-tpu is PREEMPTED" in err
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_model_of_this_repository_is_trained_on_two_workers(tmp_path):
    """The real bundle, `make train` with its real Makefile, on XLA's CPU. What is installed here serves for both."""
    if not (ROOT / ".venv/.installed").exists():
        pytest.skip("needs the environment that make install makes")
    cloud = Cloud(tmp_path, 2)
    cloud.project = ROOT
    cloud.set(worker_environment={"OMP_NUM_THREADS": "1", "CPU_NUM_DEVICES": "1", "PIP_NO_INDEX": "1"})
    for worker in range(2):
        venv = cloud.tree(worker) / ".venv"
        venv.mkdir(parents=True)
        for path in (ROOT / ".venv").iterdir():
            if path.name != ".installed":
                (venv / path.name).symlink_to(path)
        # Equal files are not written again, so the stamp stays newer than they are, and make installs nothing.
        for path in ROOT.glob("requirements*.txt"):
            shutil.copy(path, cloud.tree(worker) / path.name)
        (venv / ".installed").touch()
    try:
        # They are no pod: each has a folder of its own below the shared one.
        words = ("MODEL=dlrm", "PRESET=tiny", f"ARGS=--runs={tmp_path}/runs$HOME")
        process = cloud.start("train", "--run", "trial", "--", *words)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out[-3000:] + err
        assert "pip install" not in out
        summaries = []
        for worker in range(2):
            run = tmp_path / f"runs{cloud.home(worker)}/trial"
            assert (run / "export").is_dir()
            summaries.append(json.loads((run / "summary.json").read_text()))
        assert summaries and out.count("trial") and not cloud.alive()
        # Finished: the same command trains nothing more.
        assert cloud.run("train", "--run", "trial", "--", *words).returncode == 0
    finally:
        cloud.close()


@pytest.mark.parametrize("path", ["launch/worker.py", *(f"launch/{name}.py" for name in OURS), "doctor.py"])
def test_the_programs_need_no_newer_python_and_no_package(path):
    """The workers' own Python may be 3.8, this machine's 3.9; doctor runs before anything is installed."""
    tree = ast.parse((ROOT / "tpu" / path).read_text(), feature_version=(3, 8) if "worker" in path else (3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = set() if "worker" in path else {"errors", "tpu"}
    assert {module.partition(".")[0] for module in modules} - ours <= {"__future__", *sys.stdlib_module_names}


@pytest.mark.parametrize("program", [["-m", "tpu.launch"], ["tpu/launch/launcher.py"], ["-m", "tpu.doctor"]])
def test_they_start_without_any_package(program):
    command = [PYTHON, "-S", *program, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and ("--grace" in result.stdout) == ("doctor" not in program[-1]), result.stderr
