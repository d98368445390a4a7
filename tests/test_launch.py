"""tpu/launch over tests/fake_gcloud.py and over a real sshd.

The programs are the real ones; the workers are processes of this machine with a home folder each. The project they
train is a Makefile and a script of thirty lines that takes a lock as a chip would, so that two trainers are noticed;
one test trains a model of this repository.
"""

import ast
import contextlib
import functools
import getpass
import http.server
import io
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
import tarfile
import threading
import time
from pathlib import Path

import pytest

from errors import InputError
from tpu.launch import bundle as bundles
from tpu.launch import hosts, launcher, request, watch

ROOT = Path(__file__).parent.parent
FAKE = Path(__file__).with_name("fake_gcloud.py")
PYTHON = os.path.realpath(sys.executable)
FOREVER = "steps=100000 pause=0.05"

MAKEFILE = 'train:\n\t@python3 -I -S train.py "$(NAME)" "$(DATA)" $(ARGS)\n'

# What a trainer does: takes the chip, resumes from its checkpoint, saves on SIGTERM and leaves with 143.
TRAINER = r"""
import fcntl, os, signal, subprocess, sys, time
name, data, *arguments = sys.argv[1:]
home = os.environ["HOME"]
options = dict(argument.split("=") for argument in arguments)
fails = home.rpartition("-")[2] == options.get("fails")
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
while step < int(options.get("steps", 3)):
    step += 1
    print("step", step, flush=True)
    time.sleep(float(options.get("pause", 0.02)))
    if stopped or fails and step == int(options.get("at", 2)):
        open(checkpoint, "w").write(str(step))
        print("saved" if stopped else open("message").read(), file=sys.stdout if stopped else sys.stderr, flush=True)
        sys.exit(143 if stopped else int(options.get("code", 3)))
print("end", flush=True)
"""


class Cloud:
    """A TPU that is not there, a project, and the launcher's command line."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.project = folder / "cloud", folder / "project"
        self.bin, self.remote_bin = folder / "bin", folder / "remote"
        for path in (self.folder, self.bin, self.remote_bin, self.project, *map(self.home, range(workers))):
            path.mkdir()
        # Without site, which is slow.
        for path, line in (
            (self.bin / "gcloud", f"FAKE_CLOUD={self.folder} exec {PYTHON} -I -S {FAKE}"),
            (self.remote_bin / "python3", f"exec {PYTHON} -I -S"),
        ):
            path.write_text(f'#!/bin/sh\n{line} "$@"\n')
            path.chmod(0o755)
        for name in ("git", "ssh", "scp"):  # and no gcloud that may be installed here
            (self.bin / name).symlink_to(shutil.which(name) or "/missing")
        self.processes: list[subprocess.Popen] = []
        self.tpu = {"name": "my-tpu", "zone": "us-east5-b", "project": "mine", "workers": workers}
        self.set(state="READY", health="HEALTHY", path=f"{self.remote_bin}:/usr/bin:/bin")
        files = {"Makefile": MAKEFILE, "train.py": TRAINER, "message": "it broke", ".gitignore": "runs/\n*.tmp\n"}
        for name, text in files.items():
            (self.project / name).write_text(text)
        git(self.project, "init", "-q")
        git(self.project, "add", ".")

    def set(self, **changes: object) -> None:
        self.tpu.update(changes)
        new = self.folder / "tpu.json.new"
        new.write_text(json.dumps(self.tpu))
        os.replace(new, self.folder / "tpu.json")

    def home(self, worker: int) -> Path:
        return self.folder / f"home-{worker}"

    def zoo(self, worker: int) -> Path:
        return self.home(worker) / f"xla-zoo/worker-{worker}"

    def log(self, worker: int) -> str:
        return (self.zoo(worker) / "jobs/one/log").read_text()

    def supervisor(self, worker: int) -> int:
        return json.loads((self.zoo(worker) / "lock").read_text())["pid"]

    def start(self, action: str, *arguments: str, **environment: str) -> subprocess.Popen:
        place = ["--tpu", "my-tpu", "--zone", "us-east5-b", "--grace", "20"]
        command = [PYTHON, "-I", "-S", str(ROOT / "tpu/launch/launcher.py"), action, *place, *arguments]
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=self.project, env=environment, start_new_session=True, **pipes)
        self.processes.append(process)
        return process

    def run(self, action: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(action, *arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, verb: str = "") -> list[list[str]]:
        path = self.folder / "calls"
        calls = [json.loads(line)[3:] for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if verb in ("", call[0])]

    def starts(self) -> list[int]:
        """How often a trainer was started, for each worker."""
        paths = [self.home(worker) / "starts" for worker in range(self.tpu["workers"])]
        return [len(path.read_text().split()) if path.exists() else 0 for path in paths]

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

    def kill(self, *words: bytes) -> None:
        """Kills the processes on the workers that have all these words in their command line."""
        for pid in self.alive(connections=True):
            with contextlib.suppress(OSError):
                if all(word in Path(f"/proc/{pid}/cmdline").read_bytes() for word in words):
                    os.kill(pid, signal.SIGKILL)

    def wait_followed(self) -> None:
        """Waits until all workers train and the launcher follows each."""
        wait_for(lambda: all(self.starts()))
        wait_for(lambda: len(set(self.alive(connections=True)) - set(self.alive())) >= self.tpu["workers"])

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.kill()


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


def ctrl_c(process: subprocess.Popen) -> tuple[str, str]:
    """Interrupts the launcher: standard output and error."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    return out, err


def train(*flags: str, args: str = "", words: tuple[str, ...] = ()) -> tuple[str, ...]:
    return ("train", *flags, "--", "MODEL=tiny", *words, f"ARGS=--runs=/shared {args}")


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
one_worker = pytest.mark.parametrize("cloud", [1], indirect=True)


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
        monkeypatch.setattr(sys, "argv", ["launch", action, "--tpu", "my-tpu", "--zone", "us-east5-b", *arguments])
        monkeypatch.setenv("PATH", str(cloud.bin))
        monkeypatch.chdir(cloud.project)
        return launcher.main(), *capsys.readouterr()

    return call


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
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert sorted(members) == [".gitignore", "Makefile", "link", "new file's.py", "tool", "train.py"] and count == 6
    assert members["tool"].mode == 0o755 and members["train.py"].mode == 0o644
    assert members["link"].issym() and members["link"].linkname == "train.py"
    os.utime(project / "train.py", (1, 1))
    assert bundles.make_bundle(project) == (name, content, count)
    (project / "train.py").write_text("other")
    assert bundles.make_bundle(project)[0] != name


def test_a_tree_that_cannot_be_copied_is_refused(cloud, tmp_path, monkeypatch):
    def refused(message: str, folder: Path = cloud.project) -> None:
        with pytest.raises(InputError, match=message):
            bundles.make_bundle(folder)

    (tmp_path / "plain").mkdir()
    refused("has no Makefile", tmp_path / "plain")
    (tmp_path / "plain/Makefile").touch()
    refused("git cannot list the files", tmp_path / "plain")
    with (cloud.project / "weights").open("wb") as file:
        file.truncate(3 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "BUNDLE_MEGABYTES", 2)
        refused(r"has 3 MB, more than 2 MB, most of all weights \(3 MB\).*\.gitignore")
    (cloud.project / "inner").mkdir()
    git(cloud.project / "inner", "init", "-q")
    (cloud.project / "inner/file").touch()
    refused("inner/ is neither a file nor a link")


@one_worker
def test_what_is_there_is_not_copied_again_and_what_is_gone_is_removed(cloud):
    folder, tree = cloud.project / "old" / "deep", cloud.zoo(0) / "tree"
    folder.mkdir(parents=True)
    (folder / "file.py").touch()
    # A copy that was cut off is not taken for a whole one.
    cloud.set(mishaps=[{"worker": 0, "match": "scp"}])

    def trained(args: str, place: str) -> str:
        """Trains. One worker needs no shared folder, and the place of its results is named."""
        result = cloud.run("train", "--run", "one", "--", "MODEL=tiny", f"ARGS={args}")
        assert result.returncode == 0 and place in result.stderr, result.stderr
        return result.stdout

    out = trained("", "scp --recurse my-tpu:xla-zoo/worker-0/tree/runs/one runs/ --worker=0")
    assert out == "start one at 0 with '' and None\nstep 1\nstep 2\nstep 3\nend\n"
    wait_for(lambda: not cloud.alive())
    assert (tree / "old/deep/file.py").exists()
    times = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    assert [len([word for word in copy if "part-" in word]) for copy in cloud.calls("scp")] == [2, 2]
    trained("--runs=mine", "my-tpu:xla-zoo/worker-0/tree/mine/one runs/")
    assert len(cloud.calls("scp")) == 2
    shutil.rmtree(cloud.project / "old")
    (cloud.project / "train.py").write_text(TRAINER + "\n")
    (tree / "runs/other").mkdir()
    trained("--runs=gs://bucket/runs", "its results are in gs://bucket/runs/one")
    copies = cloud.calls("scp")
    assert len(copies) == 3 and len([word for word in copies[2] if "part-" in word]) == 1, "the program is there"
    assert not (tree / "old").exists() and (tree / "runs/other").exists()
    # make goes by the time: it would install again if requirements.txt looked new.
    now = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    assert now[0] == times[0] and now[1] > times[1]
    assert [path.stat().st_mode & 0o777 for path in (cloud.home(0) / "xla-zoo", cloud.zoo(0))] == [0o700, 0o700]


@one_worker
def test_values_arrive_whole_and_secrets_leave_no_trace(cloud):
    path, setting = """/my data/it's $HOME; touch /tmp/x""", "a 'b' \"c\" $d;"
    words = (f"DATA={path}".replace("$", "\\$"), "PRESET=")
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "wandbverysecret", "MINE": "mineverysecret"}
    seen = "import os; print({name: len(os.environ.get(name, '')) for name in ('HF_TOKEN', 'WANDB_API_KEY', 'MINE')})"
    (cloud.project / "train.py").write_text(TRAINER + f"\n{seen}\n")
    arguments = train("--secret", "MINE", "--env", f"SETTING={shlex.quote(setting)} B=1", words=words)
    result = cloud.run(*arguments, **secrets, OTHER="x")
    assert result.returncode == 0, result.stderr
    assert f"with {path!r} and {setting!r}" in result.stdout
    assert "{'HF_TOKEN': 13, 'WANDB_API_KEY': 15, 'MINE': 14}" in result.stdout
    assert "verysecret" not in json.dumps(cloud.calls()) + result.stdout + result.stderr
    files = [path for path in cloud.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if b"verysecret" in path.read_bytes()]
    assert not any("--worker=all" in call or any("strict-host" in word for word in call) for call in cloud.calls())


SHARE = "error: my-tpu has 2 workers, and "


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("train -- --lr", "--lr after -- is not an argument of make train"),
        ("train -- ZONE=a", "ZONE= is for this machine"),
        ("train --run a/b", "RUN=a/b is not the name of one folder"),
        ("train --run a -- NAME=b", "two names"),
        ("train --env A", 'A in ENV is not an assignment; write ENV="A=b'),
        ("train --env 'A=\"b'", "cannot be read"),
        ("train --secret NOT_SET", "--secret NOT_SET: this variable is not set here"),
        ("train --tpu My_Tpu", "is not the name of a TPU VM"),
        ("train --tpu local", "TPU=local is this machine"),
        ("train --tpu ssh:a,-oProxyCommand=x", "is not a list of hosts"),
        ("train --tpu ssh:a,a", "names a host twice"),
        ("logs", "does not know of a run"),
        ("logs --run x", "does not know of RUN=x"),
        # Workers that share no folder for the runs.
        ("train -- MODEL=tiny", SHARE + "ARGS has no --runs, so the run's folder is on each worker's own disk"),
        ("train -- 'ARGS=--lr 0.1'", "the absolute path of a shared folder"),
        ("train -- 'ARGS=--runs gs://b/runs --runs other'", SHARE + "--runs other in ARGS is a folder of each"),
        ("train -- ARGS=--runs=~/runs", "--runs ~/runs in ARGS is a folder of each worker's own disk"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence(cloud, here, arguments, message):
    code, _, err = here(*shlex.split(arguments))
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and message in last
    assert not any(cloud.starts()) and ("logs" in arguments or not cloud.calls("ssh") + cloud.calls("scp"))


def test_the_folder_of_the_runs_is_read_from_the_arguments():
    folders = {
        "--runs gs://a/b --lr 0.1": "gs://a/b",
        "--lr 0.1 --runs='/my disk/runs/'": "/my disk/runs",
        "--runs=a --runs memory://b": "memory://b",
        "--runs '/not closed": "'/not",
        "--runs /mnt/$$USER": "/mnt/$USER",
        **dict.fromkeys(("", "--runs", "--runs-of-another-kind x"), ""),
    }
    assert {arguments: request.runs_folder(["MODEL=tiny", f"ARGS={arguments}"]) for arguments in folders} == folders


RECREATE = (
    "gcloud compute tpus tpu-vm delete my-tpu --zone=us-east5-b && gcloud compute tpus tpu-vm create my-tpu"
    " --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
)
QUEUED = {"queuedResource": "projects/p/locations/z/queuedResources/wish"}


@pytest.mark.parametrize(
    "state, lost, message",
    [
        ({"state": "PREEMPTED", "spot": True}, True, f"the cloud took it back; recreate it: {RECREATE} --spot"),
        ({"state": "PREEMPTED", "node": QUEUED}, True, "queued-resources delete wish --force"),
        ({"state": "TERMINATED"}, True, RECREATE),
        ({"state": "STOPPED"}, True, "start it: gcloud compute tpus tpu-vm start my-tpu --zone=us-east5-b"),
        ({"state": "CREATING"}, False, "not READY yet: wait, and look with gcloud compute tpus tpu-vm describe my-tpu"),
        ({"state": "REPAIRING"}, True, f"or recreate it: {RECREATE}"),
        ({"health": "UNHEALTHY_MAINTENANCE"}, True, f"a maintenance event: wait until .* or recreate it: {RECREATE}"),
        ({"health": "UNHEALTHY_TPU", "node": {"healthDescription": "chip 3"}}, True, "UNHEALTHY_TPU .chip 3."),
        ({"state": "DELETED"}, True, "there is no TPU VM my-tpu .*create my-tpu .*NOT_FOUND: Resource"),
    ],
)
def test_a_tpu_that_is_not_ready_is_explained_with_the_command_and_nothing_is_begun(cloud, here, state, lost, message):
    cloud.set(**state)
    code, _, err = here("train")
    last = err.splitlines()[-1]
    assert code == (75 if lost else 2) and last.startswith("error: ") and re.search(message, last), err
    assert len(cloud.calls()) == 1


def test_a_worker_with_several_networks_counts_once_and_gcloud_is_needed(cloud, here):
    cloud.set(networks=3)
    assert "my-tpu: v5litepod-8, READY, HEALTHY, 2 workers" in here("status")[2]
    (cloud.bin / "gcloud").unlink()
    code, _, err = here("train")
    assert code == 2 and "needs gcloud, which is not installed here" in err


ERROR = "ERROR: (gcloud.compute.tpus.tpu-vm.describe) "
LACKS = "Error parsing [tpu].\nThe [tpu] resource is not properly specified.\nFailed to find attribute "
WAYS = ". The attribute can be set in the following ways: \n- provide"
NO_MORE = 'There is no more capacity in the zone \\"us-central1-b\\"'


@pytest.mark.parametrize(
    "text, message",
    [
        ("You do not currently have an active account selected.\nPlease run:\n\n  $ x\n", "not logged in: gcloud auth"),
        ("There was a problem refreshing your current auth tokens: Reauthentication failed.", "not logged in: gcloud"),
        ("PERMISSION_DENIED: Cloud TPU API has not been used in project 1", "services enable tpu.googleapis.com"),
        ("PERMISSION_DENIED: Permission denied on 'locations/us-x' (or it may not exist).", "zone's name"),
        (f"{LACKS}[zone]{WAYS}", "give ZONE="),
        (f"{LACKS}[project]{WAYS}", "give PROJECT="),
        ("RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZone' has been exceeded. Limit: 0.", "quota of this TPU"),
        (f'{{\n  "code": 8,\n  "message": "{NO_MORE}"\n}}', "no free TPUs of this type now: .*no more capacity"),
        ("There was a problem connecting: [Errno 8]", "cannot be reached"),
        ("Something new.", "gcloud failed: .*Something new"),
    ],
)
def test_an_error_of_gcloud_is_explained_and_its_own_line_kept(cloud, here, text, message):
    cloud.set(describe_error=f"WARNING: Your active project does not match the quota project.\n{ERROR}{text}")
    code, _, err = here("train")
    last = err.splitlines()[-1]
    assert code == 2 and re.search(message, last) and f"{ERROR}{text}".splitlines()[0] in last


@pytest.mark.parametrize("cloud", [3], indirect=True)
def test_the_first_worker_that_fails_ends_all(cloud):
    (cloud.project / "message").write_text("it broke\nFailed to get global TPU topology")
    cloud.set(latency=0.1)
    begun = time.monotonic()
    result = cloud.run(*train("--run", "one", args="burst=1 fails=2 steps=100000 pause=0.1"))
    assert result.returncode == 3 and time.monotonic() - begun < 20
    assert result.stdout.count("[worker ") == result.stdout.count("[worker 2] ") == watch.LAST_LINES
    assert {"[worker 2] it broke", "[worker 2] make: *** [Makefile:2: train] Error 3"} < {*result.stdout.splitlines()}
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
        ("error: CPython 3.11 is needed, python3.11 is not it", "apt-get install -y python3.11 python3.11-venv"),
        ("OSError: [Errno 28] No space left on device", "the disk of this worker is full"),
        ("make: *** [Makefile:2: train] Killed", "ran out of memory (not the TPU's)"),
    ],
)
def test_known_messages_are_explained(message, sentence):
    said = [text for pattern, text in watch.KNOWN_MESSAGES if re.search(pattern, f"a\n{message}\nb", 8)]
    assert len(said) == 1 and sentence in said[0].format(stop="make stop TPU=my-tpu ZONE=us-east5-b")


def test_a_worker_that_fails_is_started_again_from_its_checkpoint(cloud):
    # It fails at step 2 of all, and resumed from there it does not come to step 2 again.
    result = cloud.run(*train("--run", "one", "--retries", "2", args="fails=1 steps=30 pause=0.05"))
    assert result.returncode == 0, result.stderr
    assert "starting one again, retry 1 of 2" in result.stderr and "retry 2 of" not in result.stderr
    assert cloud.starts() == [2, 2] and "start one at 2 with" in cloud.log(1)
    # The log of the second start follows that of the first, without repeating it.
    lines = result.stdout.splitlines()
    assert sum(line.startswith("start one at ") for line in lines) == 2 and lines[-1] == "end"
    assert lines.count("step 30") == 1
    # What the user must fix is not tried again.
    result = cloud.run(*train("--run", "two", "--retries", "2", args="fails=1 code=2 steps=1000"))
    assert result.returncode == 2 and cloud.starts() == [3, 3]


@pytest.mark.slow  # the launcher looks at most every 3 s; test_the_shutdown_of_the_machine_lets_the_run_save is quick
@pytest.mark.parametrize("lost", [True, False], ids=["preempted", "unreachable"])
def test_a_tpu_or_a_worker_that_is_gone_is_not_tried_again(cloud, lost):
    flags = ("--retries", "3") if lost else ("--lost-after", "1")
    process = cloud.start(*train("--run", "one", *flags, args=FOREVER))
    cloud.wait_followed()
    cloud.set(**{"state": "PREEMPTED"} if lost else {"unreachable": [1]})
    cloud.kill(*() if lost else (b"\0follow\0", b"worker-1"))
    _, err = process.communicate(timeout=40)
    assert process.returncode == (75 if lost else 1) and cloud.starts() == [1, 1], err
    if lost:
        assert "my-tpu is PREEMPTED" in err and RECREATE in err and "resumes from its newest checkpoint" in err
        return
    assert "worker 1 cannot be reached: ssh: connect to host 34.0.0.1 port 22: Connection timed out" in err
    assert "worker 1 did not confirm that it stopped" in err
    home = f"HOME={cloud.home(0)}\0".encode()
    assert not [pid for pid in cloud.alive() if home in Path(f"/proc/{pid}/environ").read_bytes()]


@one_worker
def test_a_worker_that_will_never_work_is_not_tried_again(cloud, here):
    cases = {
        "me@34.0.0.0: Permission denied (publickey).": "does not accept your ssh key",
        "Host key verification failed.": "shows another host key than before",
        "scp: /home/me/x: No space left on device": "the disk of worker 0 is full",
    }
    cloud.set(mishaps=[{"worker": 0, "match": "scp", "message": message} for message in cases])
    for name in ("sh", "mkdir", "ls", "tr", "mv", "find", "rm"):  # no make
        (cloud.remote_bin / name).symlink_to(shutil.which(name))
    for message, sentence in cases.items():
        code, _, err = here(*train())
        assert code == 2 and sentence in err and message in err
    (cloud.remote_bin / "python3").unlink()
    cloud.set(path=str(cloud.remote_bin))
    code, _, err = here(*train())
    assert code == 2 and "worker 0 has no python3" in err
    (cloud.remote_bin / "python3").symlink_to(PYTHON)
    code, _, err = here(*train())
    assert code == 2 and "make could not be started on the worker: No such file" in err
    assert not cloud.alive()


@pytest.mark.parametrize("attempts", [1, slow(9)])
def test_a_dropped_connection_continues_where_it_was_and_a_start_is_done_once(cloud, attempts):
    """attempts 9: gcloud itself repeats the command, without its input; 1: it gives up."""
    generator = random.Random(attempts)
    mishaps = [{"worker": 0, "match": " follow ", "bytes": generator.randrange(1, 300_000)} for _ in range(3)]
    mishaps += [{"worker": 1, "match": " follow ", "bytes": 10}]
    mishaps += [{"worker": worker, "match": "status", "how": "before"} for worker in range(2)]
    mishaps += [
        {"worker": 0, "match": " start ", "how": "answer lost"},
        {"worker": 1, "match": " start ", "how": "before"},
    ]
    cloud.set(mishaps=mishaps, attempts=attempts, pause=0.05)
    result = cloud.run(*train("--run", "one", args="burst=1 steps=20"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == cloud.log(0) and cloud.starts() == [1, 1]
    assert result.stdout.count("line 0") == 20000 and "step 20\nend\n" in result.stdout
    assert ("connection broke" in result.stderr) == (attempts == 1)


def test_ctrl_c_saves_and_leaves_no_process(cloud):
    process = cloud.start(*train("--run", "one", args=f"{FOREVER} stray=1"))
    wait_for(lambda: all(cloud.starts()))
    read_until(process, "step 10")
    out, err = ctrl_c(process)
    assert "no process of the run is left" in err and "RUN=one" in err
    assert "saved" in out.splitlines()[-2:]
    assert not cloud.alive(), "also none that had left its session"
    steps = [int((cloud.zoo(worker) / "tree/runs/one/step").read_text()) for worker in range(2)]
    assert min(steps) > 1
    result = cloud.run(*train("--run", "one", args=f"steps={steps[0] + 3}"))
    assert result.returncode == 0 and f"start one at {steps[0]} with" in result.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(cloud):
    process = cloud.start(*train("--run", "one", args=f"{FOREVER} deaf=1"))
    wait_for(lambda: all(cloud.starts()))
    read_until(process, "step 1")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all(list(cloud.zoo(worker).glob("jobs/one/stop-*")) for worker in range(2)))
    begun = time.monotonic()
    _, err = ctrl_c(process)
    assert time.monotonic() - begun < 3
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
    process = cloud.start(*train("--run", "one", args=FOREVER))
    wait_for(lambda: any(" start " in word for call in cloud.calls() for word in call))
    ctrl_c(process)
    time.sleep(0.8)  # a start that was on its way
    assert not cloud.alive()


@one_worker
def test_detach_logs_status_stop(cloud, here):
    same = f"{FOREVER} deaf=0"
    result = cloud.run(*train("--run", "one", "--detach", args=same))
    assert result.returncode == 0 and "make logs TPU=my-tpu ZONE=us-east5-b" in result.stderr
    assert here("status")[1].count(f"one (MODEL=tiny 'ARGS=--runs=/shared {same}' NAME=one) runs since") == 1
    process = cloud.start("logs")
    assert read_until(process, "step 2").startswith("start one at 0")
    _, err = ctrl_c(process)
    assert "one continues" in err and cloud.alive()
    # The same command attaches; another one is refused.
    process = cloud.start(*train(args=same))
    for arguments in (train("--detach", args="steps=5"), train("--detach", "--run", "two", args=same)):
        code, _, err = here(*arguments)
        assert code == 2 and "my-tpu is busy: one (MODEL=tiny" in err
    result = cloud.run("stop", "--grace", "1")
    assert result.returncode == 0 and "worker 0: stopped one" in result.stderr
    _, err = process.communicate(timeout=20)
    assert "one runs already, since" in err and "the run was stopped on worker" in err
    assert process.returncode == 137
    assert cloud.starts() == [1] and not cloud.alive()
    result = cloud.run("logs")
    assert result.returncode == 137 and "start one at 0" in result.stdout
    assert "one exit code 137" in here("status")[1]
    assert "no run of ours is alive there" in here("stop")[2]
    # A trainer whose supervisor was killed holds the lock, which goes with it; nobody writes an exit code.
    assert cloud.run(*train("--run", "one", "--detach", args=FOREVER)).returncode == 0
    wait_for(lambda: cloud.starts() == [2] and "saved" not in cloud.log(0))
    os.kill(cloud.supervisor(0), signal.SIGKILL)
    assert "is busy: one" in here(*train("--run", "two"))[2] and cloud.alive()
    assert here("stop")[0] == 0 and not cloud.alive() and cloud.log(0).splitlines()[-1] == "saved"
    code, _, err = here("logs")
    assert code == 1 and "the run vanished from worker 0" in err
    assert cloud.run(*train("--run", "two")).returncode == 0


@pytest.mark.parametrize("times", [3, slow(20)])
def test_the_launcher_is_killed_at_random_moments(cloud, times):
    """The run continues or has not begun; the next launcher attaches to it; never two trainers (see `cloud`)."""
    generator = random.Random(times)
    for number in range(times + 1):
        process = cloud.start(*train("--run", "one", args=FOREVER))
        if number < times:
            time.sleep(generator.uniform(0.05, 1.5))
        else:
            wait_for(lambda: all(cloud.starts()))
        process.kill()
        process.communicate()
        assert max(cloud.starts()) <= 1, number
    process = cloud.start(*train("--run", "one", args=FOREVER))
    assert process.stdout.readline()
    out, err = ctrl_c(process)
    assert "one runs already" in err and cloud.starts() == [1, 1]
    assert "saved" in out.splitlines()[-2:]
    assert not cloud.alive()


def test_two_launchers_at_once(cloud):
    processes = [cloud.start(*train("--run", "one", args="steps=20 pause=0.05")) for _ in range(2)]
    results = [process.communicate(timeout=40) for process in processes]
    assert sorted(process.returncode for process in processes) in ([0, 0], [0, 2]), results
    assert cloud.starts() == [1, 1]


@one_worker
def test_the_shutdown_of_the_machine_lets_the_run_save(cloud):
    process = cloud.start(*train("--run", "one", "--retries", "3", args=FOREVER))
    read_until(process, "step 2")
    cloud.set(state="PREEMPTED")
    os.kill(cloud.supervisor(0), signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75 and "saved" in out and RECREATE.replace("-8", "-4") in err
    assert "RUN=one resumes from its newest checkpoint" in err and cloud.starts() == [1], "and it is not tried again"


@one_worker
def test_a_start_has_one_token_and_a_worker_one_run(cloud):
    """What tpu/launch/worker.py answers, in orders that connections bring about rarely."""
    bundle, content, _ = bundles.make_bundle(cloud.project)
    files = cloud.zoo(0) / "files"
    files.mkdir(parents=True)
    (files / f"{bundle}.tar.gz").write_bytes(content)
    shutil.copy(ROOT / "tpu/launch/worker.py", files / "worker-x.py")
    whole = json.dumps({"words": ["ARGS=steps=100000", "NAME=one"], "environment": {}})

    def ask(action: str, token: str, data: str = whole) -> dict:
        command = [PYTHON, str(files / "worker-x.py"), action, "--run", "one", "--token", token, "--bundle", bundle]
        environment = {"HOME": str(cloud.home(0)), "PATH": cloud.tpu["path"]}
        result = subprocess.run(command, input=data, env=environment, capture_output=True, text=True, timeout=30)
        return json.loads(result.stdout.splitlines()[-1].removeprefix("@xla-zoo "))

    assert ask("start", "a", "") == ask("start", "a", whole[:-5]) == {"state": "incomplete"}
    assert ask("follow", "a") == {"state": "unknown"}
    assert ask("stop", "a") == {"state": "idle"}
    assert ask("start", "a") == {"state": "stopped"}, "its stop has overtaken it"
    assert ask("start", "b") == {"state": "started"}
    assert ask("start", "b") == ask("start", "b", "") == {"state": "attached"}
    answer = ask("start", "c")
    assert answer["state"] == "busy" and answer["holder"]["token"] == "b"
    assert ask("stop", "c") == {"state": "idle"} and cloud.alive()
    wait_for(lambda: cloud.starts() == [1])
    assert ask("stop", "b")["state"] == "stopped" and not cloud.alive()
    assert ask("start", "b") == {"state": "attached"}, "it is over, and not begun again"
    assert cloud.starts() == [1]


@pytest.fixture
def sshd(cloud):
    """An sshd for two hosts, with the homes of the fake workers: the folder with ssh's config and keys."""
    folder = cloud.folder
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/usr/local/sbin")
    sftp = next((path for path in Path("/usr").glob("lib*/*/sftp-server")), None)
    if program is None or sftp is None or not shutil.which("ssh"):
        pytest.skip("needs openssh-server")
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        cloud.port = port = free.getsockname()[1]
    # 127.0.0.1 is worker 0, 127.0.0.2 is worker 1.
    (folder / "force").write_text(
        f"set -- $SSH_CONNECTION; home={folder}/home-$((${{3##*.}} - 1)); cd $home\n"
        f'exec env -i HOME=$home PATH={cloud.tpu["path"]} /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    (folder / "sshd").write_text(
        f"ListenAddress 127.0.0.1:{port}\nListenAddress 127.0.0.2:{port}\nHostKey {folder}/host\nPidFile none\n"
        f"StrictModes no\nUsePAM no\nAuthorizedKeysFile {folder}/key.pub {folder}/.ssh/google_compute_engine.pub\n"
        f"Subsystem sftp {sftp}\nForceCommand . {folder}/force\n"
    )
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}\n[127.0.0.2]:{port} {key}\n")
    (folder / "config").write_text(
        f"Host host0\n HostName 127.0.0.1\nHost host1\n HostName 127.0.0.2\nHost *\n Port {port}\n"
        f" IdentityFile {folder}/key\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known_hosts\n"
        f" GlobalKnownHostsFile /dev/null\n User {getpass.getuser()}\n"
    )
    command = [program, "-D", "-e", "-f", str(folder / "sshd")]
    cloud.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=(folder / "sshd.log").open("w"))
    try:
        wait_for(lambda: (folder / "sshd.log").read_text().count("listening") == 2, 10)
    except AssertionError:
        pytest.skip(f"sshd does not start: {(folder / 'sshd.log').read_text()}")
    yield folder
    cloud.server.kill()
    cloud.server.wait()


def check_break_and_ctrl_c(cloud: Cloud, steps: int, *place: str, **environment: str) -> str:
    """A run whose connections break, to its end; then one that Ctrl-C stops. Returns the first one's standard error."""
    data = "/my data/it's"
    arguments = train("--run", "one", *place, args=f"steps={steps} pause=0.05 burst=1", words=(f"DATA={data}",))
    process = cloud.start(*arguments, **environment)
    wait_for(lambda: all(cloud.starts()), 120)
    cloud.wait_followed()
    command = ["pgrep", "-P", str(cloud.server.pid)]  # the processes of sshd for the connections that are open
    children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert len(children) >= 2
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == cloud.log(0) and cloud.starts() == [1, 1] and out.count("line 0") == 20000
    assert out.startswith(f"start one at 0 with {data!r} and None\n") and out.endswith(f"step {steps}\nend\n")
    process = cloud.start(*train("--run", "two", *place, args=FOREVER), **environment)
    wait_for(lambda: cloud.starts() == [2, 2], 120)
    assert process.stdout.readline()
    out, stopped = ctrl_c(process)
    assert "saved" in out and not cloud.alive(), stopped
    return err


def test_ssh_hosts_over_a_real_sshd(cloud, sshd):
    """An unknown host, a connection that breaks, the end of the run; then Ctrl-C."""
    place = ("--tpu", "ssh:host0,host1", "--ssh-config", str(sshd / "config"))
    result = cloud.run("status", *place)
    assert result.returncode == 2 and "Host key verification failed" in result.stderr, result.stderr
    assert re.search(r"\(host[01]\) is unknown to ssh", result.stderr)
    os.replace(sshd / "known", sshd / "known_hosts")
    err = check_break_and_ctrl_c(cloud, 40, *place)
    assert "connection broke" in err and "connected again" in err and "scp -r host0:/shared/one runs/" in err
    assert cloud.calls() == []


@pytest.mark.slow
def test_the_real_gcloud_knows_the_arguments(tmp_path):
    """Without an account it goes no further than reading them."""
    if shutil.which("gcloud") is None:
        pytest.skip("needs gcloud")
    host = hosts.choose("my-tpu", "us-east5-b", "mine", ["--internal-ip"], "")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
    environment["CLOUDSDK_CORE_CHECK_GCE_METADATA"] = "false"
    describe = [*host._command("describe", "my-tpu"), "--format=json"]
    for command in (describe, host.ssh(0, "true"), host.scp(0, [__file__], "a")):
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
            answer = {"name": "projects/mine/locations/us-east5-b/nodes/my-tpu", "id": "77", "apiVersion": "V2"}
            answer |= {"acceleratorType": "v5litepod-8", "runtimeVersion": "v2-alpha-tpuv5-lite", "health": "HEALTHY"}
            ends = [{"ipAddress": ip, "accessConfig": {"externalIp": ip}} for ip in ("127.0.0.1", "127.0.0.2")]
            answer |= {"networkEndpoints": ends, "state": cloud.tpu["state"]}
        else:  # the key is in the project already, so gcloud does not bring it to the VM
            public = " ".join(key.read_text().split()[:2]) if key.exists() else ""
            items = [{"key": "ssh-keys", "value": f"{getpass.getuser()}:{public} {getpass.getuser()}"}]
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
def test_the_real_gcloud_over_a_local_api_and_a_real_sshd(cloud, sshd, tmp_path, request):
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
    request.addfinalizer(server.server_close)
    request.addfinalizer(server.shutdown)
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
    ports = (f"--gcloud-flag=--ssh-flag=-p{cloud.port}", f"--gcloud-flag=--scp-flag=-P{cloud.port}")
    place = ("--project", "mine", *ports)
    check_break_and_ctrl_c(cloud, 300, *place, **environment)
    # Each worker's key was kept when it was seen first, by the name of the worker.
    known = (sshd / ".ssh/google_compute_known_hosts").read_text()
    assert "tpu.77-0" in known and "tpu.77-1" in known
    cloud.set(state="PREEMPTED")
    result = cloud.run("status", *place, **environment)
    assert result.returncode == 75 and "my-tpu is PREEMPTED" in result.stderr


@pytest.mark.slow
def test_a_model_of_this_repository_is_trained_on_two_workers(cloud, tmp_path):
    """The real bundle, `make train` with its real Makefile, on XLA's CPU. What is installed here serves for both."""
    if not (ROOT / ".venv/.installed").exists():
        pytest.skip("needs the environment that make install makes")
    cloud.project = ROOT
    cloud.set(worker_environment={"OMP_NUM_THREADS": "1", "CPU_NUM_DEVICES": "1", "PIP_NO_INDEX": "1"})
    for worker in range(2):
        venv = cloud.zoo(worker) / "tree/.venv"
        venv.mkdir(parents=True)
        for path in (ROOT / ".venv").iterdir():
            if path.name != ".installed":
                (venv / path.name).symlink_to(path)
        # Equal files are not written again, so the stamp stays newer than they are, and make installs nothing.
        for path in ROOT.glob("requirements*.txt"):
            shutil.copy(path, venv.parent / path.name)
        (venv / ".installed").touch()
    # They are no pod: each has a folder of its own below the shared one.
    words = ("MODEL=dlrm", "PRESET=tiny", f"ARGS=--runs={tmp_path}/runs$HOME")
    process = cloud.start("train", "--run", "trial", "--", *words)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out[-3000:] + err
    assert "pip install" not in out and out.count("trial") and not cloud.alive()
    for worker in range(2):
        run = tmp_path / f"runs{cloud.home(worker)}/trial"
        assert (run / "export").is_dir() and json.loads((run / "summary.json").read_text())
    # Finished: the same command trains nothing more.
    assert cloud.run("train", "--run", "trial", "--", *words).returncode == 0


PROGRAMS = [*sorted((ROOT / "tpu/launch").glob("*.py")), ROOT / "tpu/doctor.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_need_no_newer_python_and_no_package(path):
    """The workers' own Python may be 3.8, this machine's 3.9; doctor runs before anything is installed."""
    tree = ast.parse(path.read_text(), feature_version=(3, 8) if path.name == "worker.py" else (3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = set() if path.name == "worker.py" else {"errors", "tpu"}
    assert {module.partition(".")[0] for module in modules} - ours <= {"__future__", *sys.stdlib_module_names}


def test_they_start_without_any_package():
    for program in (["-m", "tpu.launch"], ["tpu/launch/launcher.py"], ["-m", "tpu.doctor"]):
        command = [PYTHON, "-S", *program, "--help"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0 and "--tpu" in result.stdout, result.stderr
