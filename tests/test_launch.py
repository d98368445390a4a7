"""tpu/launch over tests/fake_gcloud.py and tests/fake_systemd.py, and over a real sshd.

The programs are the real ones; the workers are processes of this machine with a home folder each. The project they
train is a Makefile and a script of thirty lines that takes a lock as a chip would, so that two trainers are noticed;
one test trains a model of this repository. tests/test_pods.py has workers with a real systemd.
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
from tpu.launch import hosts, keeper, launcher, messages, request, workers

ROOT = Path(__file__).parent.parent
FAKE, SYSTEMD = (Path(__file__).with_name(name) for name in ("fake_gcloud.py", "fake_systemd.py"))
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
            (self.remote_bin / "systemctl", f"exec {PYTHON} -I -S {SYSTEMD} systemctl"),
            (self.remote_bin / "systemd-run", f"exec {PYTHON} -I -S {SYSTEMD} systemd-run"),
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

    def keeper(self, worker: int) -> int:
        return int((self.home(worker) / "unit/main").read_text())

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

    def calls(self, verb: str = "", text: str = "") -> list[list[str]]:
        path = self.folder / "calls"
        calls = [json.loads(line)[3:] for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if verb in ("", call[0]) and text in " ".join(call)]

    def starts(self) -> list[int]:
        """How often a trainer was started, for each worker."""
        paths = [self.home(worker) / "starts" for worker in range(self.tpu["workers"])]
        return [len(path.read_text().split()) if path.exists() else 0 for path in paths]

    def alive(self, connections: bool = False, worker: str = "") -> list[int]:
        """Processes on the workers, in whatever group or session: they have the worker's home in their environment.

        connections: also those that only look on, and end when they notice that their connection has.
        """
        mark = f"HOME={self.folder}/home-{worker}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    looks_on = re.search(rb"\0(follow|stop|status)\0--worker", (entry / "cmdline").read_bytes())
                    if mark in (entry / "environ").read_bytes() and (connections or not looks_on):
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for pid in self.alive(connections=True):
            with contextlib.suppress(OSError):
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
    name, content, count = request.make_bundle(project)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert sorted(members) == [".gitignore", "Makefile", "link", "new file's.py", "tool", "train.py"] and count == 6
    assert members["tool"].mode == 0o755 and members["train.py"].mode == 0o644
    assert members["link"].issym() and members["link"].linkname == "train.py"
    os.utime(project / "train.py", (1, 1))
    assert request.make_bundle(project) == (name, content, count)
    (project / "train.py").write_text("other")
    assert request.make_bundle(project)[0] != name


def test_a_tree_that_cannot_be_copied_is_refused(cloud, tmp_path, monkeypatch):
    def refused(message: str, folder: Path = cloud.project) -> None:
        with pytest.raises(InputError, match=message):
            request.make_bundle(folder)

    (tmp_path / "plain").mkdir()
    refused("has no Makefile", tmp_path / "plain")
    (tmp_path / "plain/Makefile").touch()
    refused("git cannot list the files", tmp_path / "plain")
    with (cloud.project / "weights").open("wb") as file:
        file.truncate(3 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(request, "BUNDLE_MEGABYTES", 2)
        refused(r"has 3 MB, more than 2 MB, most of all weights \(3 MB\).*\.gitignore")
    (cloud.project / "inner").mkdir()
    git(cloud.project / "inner", "init", "-q")
    (cloud.project / "inner/file").touch()
    refused("inner/ is neither a file nor a link")


@one_worker
def test_a_changed_tree_replaces_what_differs_and_keeps_what_is_not_its_own(cloud):
    project, tree = cloud.project, cloud.zoo(0) / "tree"
    for name in ("old/deep/file.py", "kept/a.py", "kept/b.py", "turns/file.py", "plain"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)

    def trained(args: str, place: str, copies: int) -> str:
        """Trains. One worker needs no shared folder, and the place of its results is named."""
        before = len(cloud.calls("ssh", " receive "))
        result = cloud.run("train", "--run", "one", "--", "MODEL=tiny", f"ARGS={args}")
        assert result.returncode == 0 and place in result.stderr, result.stderr
        assert len(cloud.calls("ssh", " receive ")) - before == copies
        return result.stdout

    cloud.set(mishaps=[{"match": " receive ", "how": "before"}])  # and gcloud repeats it without its input
    out = trained("", "scp --recurse my-tpu:xla-zoo/worker-0/tree/runs/one runs/ --worker=0", 2)
    assert (
        out == "start one at 0 with '' and None\nstep 1\nstep 2\nstep 3\nend\n" and (tree / "old/deep/file.py").exists()
    )
    times = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    trained("--runs=mine", "my-tpu:xla-zoo/worker-0/tree/mine/one runs/", 0)
    shutil.rmtree(project / "old")
    (project / "kept/a.py").unlink()  # from a folder that keeps others
    shutil.rmtree(project / "turns")
    (project / "turns").write_text("now a file")
    (tree / "turns/result").write_text("of the user's own")
    (project / "plain").unlink()
    (project / "plain").mkdir()
    (project / "plain/file").write_text("now a folder")
    (project / "train.py").write_text(TRAINER + "\n")
    (tree / "runs/other").mkdir()
    trained("--runs=gs://bucket/runs", "its results are in gs://bucket/runs/one", 1)
    assert not (tree / "old").exists() and (tree / "runs/other").exists()
    assert [path.name for path in (tree / "kept").iterdir()] == ["b.py"]
    assert (tree / "turns").read_text() == "now a file" and (tree / "plain/file").read_text() == "now a folder"
    assert [path.read_text() for path in tree.glob("turns.old-*/*")] == ["of the user's own"]
    # make goes by the time: it would install again if requirements.txt looked new.
    now = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    assert now[0] == times[0] and now[1] > times[1]
    for bundle in (cloud.zoo(0) / "bundles").iterdir():
        os.truncate(bundle, 100)
    os.truncate(cloud.zoo(0) / "manifest.json", 0)
    trained("--runs=gs://bucket/runs", "its results", 1)  # a damaged one is sent again
    assert [path.stat().st_mode & 0o777 for path in (cloud.home(0) / "xla-zoo", cloud.zoo(0))] == [0o700, 0o700]


@one_worker
def test_input_that_is_cut_off_is_not_taken_for_whole(cloud):
    name, content, _ = request.make_bundle(cloud.project)
    whole = json.dumps({"command": ["true"], "environment": {}}).encode()
    for action, data in (("receive", content[:-1]), ("start", whole[:-1])):
        command = [PYTHON, ROOT / "tpu/launch/worker.py", action, "--worker", "0", "--bundle", name, "--run", "one"]
        environment = {"HOME": str(cloud.home(0)), "PATH": cloud.tpu["path"], "XLA_ZOO_RUNTIME": f"{cloud.home(0)}/run"}
        result = subprocess.run(command, input=data, env=environment, capture_output=True, timeout=30)
        assert result.stdout.splitlines()[-1] == b'@xla-zoo {"state": "incomplete"}'
    assert not list(cloud.zoo(0).glob("bundles/*")) and not (cloud.home(0) / "run").exists()


@one_worker
def test_values_arrive_whole_and_secrets_leave_no_trace(cloud):
    path, setting = """/my data/it's $HOME; touch /tmp/x""", "a 'b' \"c\" $d;"
    words = (f"DATA={path}".replace("$", "\\$"), "PRESET=")
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "wandbverysecret", "MINE": "mineverysecret"}
    seen = "import os; print({name: len(os.environ.get(name, '')) for name in ('HF_TOKEN', 'WANDB_API_KEY', 'MINE')})"
    (cloud.project / "train.py").write_text(TRAINER + f"\n{seen}\n")
    arguments = train("--secret", "MINE", "--env-from", "ENV", words=words)
    result = cloud.run(*arguments, **secrets, OTHER="x", ENV=f"SETTING={shlex.quote(setting)} B=1")
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
        ("train --env HF_TOKEN=x", "HF_TOKEN in ENV would stand in this machine's list of processes: export it here"),
        ("train --env MY_KEY=x", "give --secret MY_KEY"),
        ("train --secret NOT_SET", "--secret NOT_SET: this variable is not set here"),
        ("train --tpu My_Tpu", "is not the name of a TPU VM"),
        ("train --tpu local", "TPU=local is this machine"),
        ("train --tpu ssh:a,-oProxyCommand=x", "is not a list of hosts"),
        ("train --tpu ssh:a,a", "names a host twice"),
        ("train --tpu ssh:a --create v6e-8", "CREATE=v6e-8 is for a TPU VM"),
        ("train --create v6e-8", "CREATE=v6e-8 deletes the TPU with its disks when the run has ended"),
        ("train --create v6e-8 --detach -- ARGS=--runs=gs://b", "leaves nobody to delete the TPU: give --keep"),
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
    assert not any(cloud.starts()) and ("logs" in arguments or not cloud.calls("ssh"))


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
    "state, message",
    [
        ({"state": "PREEMPTED", "spot": True}, f"the cloud took it back; recreate it: {RECREATE} --spot"),
        ({"state": "PREEMPTED", "node": QUEUED}, "queued-resources delete wish --force"),
        ({"state": "TERMINATED"}, RECREATE),
        ({"state": "STOPPED"}, "start it: gcloud compute tpus tpu-vm start my-tpu --zone=us-east5-b"),
        ({"health": "UNHEALTHY_TPU", "node": {"healthDescription": "chip 3"}}, "UNHEALTHY_TPU .chip 3."),
        ({"state": "DELETED"}, "there is no TPU VM my-tpu .*create my-tpu .*CREATE=v6e-8"),
    ],
)
def test_a_tpu_that_is_gone_is_explained_with_the_command_and_nothing_is_begun(cloud, here, state, message):
    cloud.set(**state)
    code, _, err = here(*train())
    last = err.splitlines()[-1]
    assert code == 75 and last.startswith("error: ") and re.search(message, last), err
    assert len(cloud.calls()) == 1


@one_worker
@pytest.mark.parametrize(
    "state, message",
    [
        ({"state": "CREATING"}, "CREATING, not READY yet: wait until gcloud compute tpus tpu-vm describe my-tpu"),
        ({"state": "REPAIRING"}, "in repair: wait"),
        ({"health": "UNHEALTHY_MAINTENANCE"}, "in a maintenance event: wait"),
    ],
)
def test_a_tpu_that_will_be_ready_is_waited_for(cloud, here, monkeypatch, state, message):
    cloud.set(**state)
    ready = {"state": "READY", "health": "HEALTHY"}
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: cloud.set(**ready) if seconds == 15 else None)
    code, _, err = here(*train())
    assert code == 0 and message in err and "Ctrl-C gives up" in err


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
FINAL = [
    ("You do not currently have an active account selected.\nPlease run:\n\n  $ x\n", "not logged in: gcloud auth"),
    ("There was a problem refreshing your current auth tokens: Reauthentication failed.", "not logged in: gcloud"),
    ("PERMISSION_DENIED: Cloud TPU API has not been used in project 1", "services enable tpu.googleapis.com"),
    ("PERMISSION_DENIED: Permission denied on 'locations/us-x' (or it may not exist).", "zone's name"),
    (f"{LACKS}[zone]{WAYS}", "give ZONE="),
    (f"{LACKS}[project]{WAYS}", "give PROJECT="),
    ("RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProjectPerZone' has been exceeded. Limit: 0.", "quota of this TPU"),
    (f'{{\n  "code": 8,\n  "message": "{NO_MORE}"\n}}', "no free TPUs of this type now: .*no more capacity"),
]
TRANSIENT = [
    {"message": ERROR + "There was a problem connecting: [Errno 8]"},
    {"message": ERROR + "HttpError 503: The service is currently unavailable."},
    {"message": ERROR + "429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' per minute"},
    {"message": ERROR + "Something new."},
    {"out": ""},
    {"out": "<html>502</html>"},
]


@pytest.mark.parametrize("text, message", FINAL)
def test_an_error_of_gcloud_that_is_final_is_explained_and_its_own_line_kept(cloud, here, text, message):
    cloud.set(describe_error=f"WARNING: Your active project does not match the quota project.\n{ERROR}{text}")
    code, _, err = here("train")
    last = err.splitlines()[-1]
    assert code == 2 and re.search(message, last) and f"{ERROR}{text}".splitlines()[0] in last


@one_worker
def test_an_error_that_may_pass_is_asked_again(cloud, here, monkeypatch):
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: None)
    before = {"match": "", "how": "before", "times": 2}
    refused = [dict(before, message="me@34.0.0.0: Permission denied (publickey).")]
    refused += [dict(before, message="ssh: Could not resolve hostname x: Temporary failure in name resolution")]
    cloud.set(mishaps=[*({"verb": "describe", "match": "", **wrong} for wrong in TRANSIENT), *refused], attempts=1)
    code, out, err = here(*train(args="steps=2"))
    assert code == 0 and out.endswith("end\n"), err
    for text in ("503", "429", "Errno 8", "Something new", "'<html>", "not accept your ssh key", "is not a name that"):
        assert text in err
    assert err.count("asking again") == len(TRANSIENT) and "quota of this TPU" not in err
    # Not for ever, and then with what to do.
    cloud.set(mishaps=[dict(refused[0], times=10_000, match=" ")])
    code, _, err = here(*train("--lost-after", "0.5"))
    assert code == 1 and "worker 0 cannot be reached: worker 0 does not accept your ssh key" in err
    cloud.set(describe_error=TRANSIENT[1]["message"])
    code, _, err = here("status", "--lost-after", "0.2")
    assert code == 1 and "503" in err.splitlines()[-1]


@one_worker
def test_a_worker_that_will_never_work_is_not_tried_again(cloud, here):
    for name in ("sh", "install", "rm"):  # no make
        (cloud.remote_bin / name).symlink_to(shutil.which(name))

    def refused(sentence: str) -> None:
        code, _, err = here(*train())
        assert code == 2 and sentence in err.splitlines()[-1], err

    cloud.set(mishaps=[{"match": "", "how": "before", "message": "Host key verification failed."}])
    refused("shows another host key than before")
    systemctl = (cloud.remote_bin / "systemctl").read_text()
    (cloud.remote_bin / "systemctl").write_text("#!/bin/sh\necho System has not been booted with systemd >&2; exit 1\n")
    refused(
        "a run is a systemd unit, started as root or through sudo without a password; this host says: System has not"
    )
    (cloud.remote_bin / "systemctl").write_text(systemctl)
    (cloud.remote_bin / "python3").rename(cloud.remote_bin / "hidden")
    cloud.set(path=str(cloud.remote_bin))
    refused("worker 0 has no python3")
    (cloud.remote_bin / "hidden").rename(cloud.remote_bin / "python3")
    code, out, _ = here(*train())
    assert code == 127 and "make could not be started on the worker: No such file" in out
    (cloud.zoo(0) / "bundles").rename(cloud.zoo(0) / "hidden")
    (cloud.zoo(0) / "bundles").write_text("in the way")
    refused("worker 0: ")
    assert not cloud.alive()


@pytest.mark.parametrize("cloud", [3], indirect=True)
def test_the_first_worker_that_fails_ends_all(cloud):
    (cloud.project / "message").write_text("it broke\nFailed to get global TPU topology")
    cloud.set(latency=0.1)
    begun = time.monotonic()
    result = cloud.run(*train("--run", "one", args="burst=1 fails=2 steps=100000 pause=0.1"))
    assert result.returncode == 3 and time.monotonic() - begun < 20
    assert result.stdout.count("[worker ") == result.stdout.count("[worker 2] ") == keeper.LAST_LINES
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
        ("open(/dev/vfio/0): Device or resource busy: Device or resource busy", "sudo lsof"),
        ("FAILED: Couldn't open /dev/vfio/0: Device or resource busy", "another process on this worker holds"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33G of 15G", "a smaller --batch-size"),
        ("error: CPython 3.11 is needed, python3.11 is not it", "apt-get install -y python3.11 python3.11-venv"),
        ("OSError: [Errno 28] No space left on device", "the disk of this worker is full"),
        ("make: *** [Makefile:2: train] Killed", "ran out of memory (not the TPU's)"),
        ("[worker 1] make: *** [Makefile:2: train] Error 137", "ran out of memory (not the TPU's)"),  # dash's way
    ],
)
def test_known_messages_are_explained(message, sentence):
    (said,) = messages.explain_log(f"a\n{message}\nb")
    assert sentence in said


def test_a_worker_that_fails_is_started_again_from_its_checkpoint_with_no_client(cloud):
    # It fails at step 40, and resumed from there it does not come to step 40 again.
    process = cloud.start(*train("--run", "one", "--retries", "2", args="fails=1 steps=60 pause=0.05 at=40"))
    read_until(process, "step 3")
    process.kill()
    wait_for(lambda: not cloud.alive())
    result = cloud.run("logs")
    assert (
        result.returncode == 0 and "starting again, retry 1 of 2" in result.stdout and "retry 2 of" not in result.stdout
    )
    assert cloud.starts() == [2, 2] and "start one at 40 with" in cloud.log(1)
    lines = result.stdout.splitlines()
    assert sum(line.startswith("start one at ") for line in lines) == 2 and lines.count("step 60") == 1
    assert lines[-1] == "end"
    # What the user must fix is not tried again.
    result = cloud.run(*train("--run", "two", "--retries", "2", args="fails=1 code=2 steps=1000"))
    assert result.returncode == 2 and cloud.starts()[1] == 3


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def owner_after(monkeypatch, *events, retries: int = 0) -> keeper.Owner:
    """An owner of three workers after their reports: (worker, running, code, stopped), or seconds that pass."""
    monkeypatch.setattr(keeper, "time", clock := Clock())
    owner = keeper.Owner(3, retries, 60, lambda *_: None)
    for event in events:
        if isinstance(event, tuple):
            worker, running, code, stopped = event
            report = {"attempt": owner.attempt, "running": running, "code": code, "stopped": stopped, "tail": ""}
            owner.report(worker, report)
        else:
            clock.now += event
    return owner


ALL = [(worker, False, None, False) for worker in range(3)]
RUN = [(worker, True, None, False) for worker in range(3)]


@pytest.mark.parametrize(
    "events, retries, order, code, grace",
    [
        (ALL[:2], 0, "wait", 0, 60),
        (ALL, 0, "run", 0, 60),
        ([*ALL[:2], 310, ALL[0]], 0, "end", 1, 10),  # one never joined
        ([*ALL, *RUN, 30, *RUN[:2], 15, RUN[0]], 3, "end", 1, 10),  # one is silent: no retry, since its keeper is gone
        ([*ALL, *RUN, (1, False, 3, False)], 0, "end", 3, 10),
        ([*ALL, *RUN, (1, False, 143, False)], 3, "end", 143, 60),  # the trainer itself was told to stop
        ([*ALL, *RUN, (1, True, None, True)], 3, "end", 143, 60),  # make stop, or its machine's shutdown
        ([*ALL, *RUN, (1, True, None, True), *((w, False, 143, w == 1) for w in range(3))], 3, "leave", 143, 0),
        ([*ALL, *RUN, (1, False, 3, False), (0, False, 143, False), (2, False, 143, False)], 0, "leave", 3, 0),
        ([*ALL, *RUN, (1, False, 3, False), (0, False, 143, False), (2, False, 143, False)], 1, "run", 0, 60),
        ([*ALL, *RUN, (1, False, 2, False), (0, False, 143, False), (2, False, 143, False)], 1, "leave", 2, 0),
        # A stop while the others are being ended for a retry: there is none.
        (
            [*ALL, *RUN, (1, False, 3, False), (0, True, None, True), (0, False, 143, True), (2, False, 1, False)],
            1,
            "leave",
            3,
            0,
        ),
        ([*ALL, *RUN, *((worker, False, 0, False) for worker in range(3))], 1, "leave", 0, 0),
    ],
)
def test_the_owner_decides(monkeypatch, events, retries, order, code, grace):
    owner = owner_after(monkeypatch, *events, retries=retries)
    assert (owner.order["do"], owner.code, owner.order["grace"]) == (order, code, grace)


def test_a_tpu_that_is_taken_back_ends_the_watch_and_the_run_saves(cloud):
    process = cloud.start(*train("--run", "one", "--retries", "3", args=FOREVER))
    read_until(process, "step 2")
    cloud.set(state="PREEMPTED")
    os.kill(cloud.keeper(1), signal.SIGTERM)  # what the shutdown of worker 1 does; worker 0 is told
    wait_for(lambda: not cloud.alive())
    for pid in set(cloud.alive(connections=True)):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert all("saved" in cloud.log(worker) for worker in range(2)) and cloud.starts() == [1, 1], err
    assert process.returncode in (75, 143) and (RECREATE in err) == (process.returncode == 75)


@pytest.mark.parametrize("attempts", [1, slow(9)])
def test_a_dropped_connection_continues_where_it_was_and_a_start_is_done_once(cloud, attempts):
    """attempts 9: gcloud itself repeats the command, without its input; 1: it gives up."""
    generator = random.Random(attempts)
    mishaps = [{"worker": 0, "match": " follow ", "bytes": generator.randrange(1, 300_000)} for _ in range(3)]
    mishaps += [{"worker": worker, "match": " status ", "how": "before"} for worker in range(2)]
    mishaps += [{"worker": 0, "match": " start ", "how": "answer lost"}]
    mishaps += [{"worker": 1, "match": " start ", "how": "before"}]
    cloud.set(mishaps=mishaps, attempts=attempts, pause=0.05)
    result = cloud.run(*train("--run", "one", args="burst=1 steps=20"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == cloud.log(0) and cloud.starts() == [1, 1]
    assert result.stdout.count("line 0") == 20000 and "step 20\nend\n" in result.stdout
    assert attempts == 9 or "connected again" in result.stderr


def test_ctrl_c_saves_and_leaves_no_process(cloud):
    process = cloud.start(*train("--run", "one", args=f"{FOREVER} stray=1"))
    wait_for(lambda: all(cloud.starts()))
    read_until(process, "step 10")
    _, err = ctrl_c(process)
    assert "no process of the run is left" in err and "RUN=one" in err
    assert err.count("stopped and saved: one, exit code 143") == 2 and not cloud.alive(), "also none of another session"
    steps = [int((cloud.zoo(worker) / "tree/runs/one/step").read_text()) for worker in range(2)]
    assert min(steps) > 1
    result = cloud.run(*train("--run", "one", args=f"steps={steps[0] + 3}"))
    assert result.returncode == 0 and f"start one at {steps[0]} with" in result.stdout


def test_stop_reaches_each_worker_by_itself_and_no_start_follows(cloud, here):
    """One worker cannot be reached, the TPU's health is bad, and a client with RETRIES looks on."""
    process = cloud.start(*train("--run", "one", "--retries", "3", args=FOREVER))
    wait_for(lambda: all(cloud.starts()))
    read_until(process, "step 3")
    cloud.set(unreachable=[1], health="UNHEALTHY_MAINTENANCE")
    looks_on = cloud.start("logs")  # from a client that cannot reach worker 1 either
    assert looks_on.stdout.readline()
    ctrl_c(looks_on)
    cloud.set(health="UNHEALTHY_TPU")
    code, _, err = here("stop", "--lost-after", "0.3")
    assert code == 1 and "worker 0: stopped and saved: one" in err
    assert "worker 1: not reached: worker 1 cannot be reached: ssh: connect to host 34.0.0.1 port 22" in err
    # Worker 0 told the other one, which had its whole time to save.
    wait_for(lambda: not cloud.alive())
    assert all("saved" in cloud.log(worker) for worker in range(2)) and cloud.starts() == [1, 1]
    cloud.set(unreachable=[])
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "the run was stopped on worker 0" in err
    assert here("stop")[2].count("stopped and saved: one, exit code 143") == 2, "a moment ago"
    assert here("stop", "--run", "two")[2].count("nothing ran") == 2


def test_a_deaf_trainer_is_killed_and_a_second_ctrl_c_leaves_at_once(cloud, here):
    process = cloud.start(*train("--run", "one", args=f"{FOREVER} deaf=1"))
    wait_for(lambda: all(cloud.starts()))
    read_until(process, "step 1")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all((cloud.home(worker) / "unit/stop").exists() for worker in range(2)))
    begun = time.monotonic()
    _, err = ctrl_c(process)
    assert time.monotonic() - begun < 3
    assert "the run may go on: make stop TPU=my-tpu ZONE=us-east5-b ends it" in err
    begun = time.monotonic()
    code, _, err = here("stop", "--grace", "1")
    assert code == 0 and "worker 1: stopped unsaved: one, exit code 137" in err
    assert time.monotonic() - begun < 12, "not the 20 s that the first Ctrl-C had asked for"
    wait_for(lambda: not cloud.alive())


def test_ctrl_c_before_the_start_stops_no_other_run(cloud):
    assert cloud.run(*train("--run", "one", "--detach", args=FOREVER)).returncode == 0
    cloud.set(mishaps=[{"match": " status ", "late": 30}])
    process = cloud.start(*train(args="steps=3"))
    wait_for(lambda: (cloud.folder / "mishap-0-0").exists())
    _, err = ctrl_c(process)
    assert "left; nothing was started" in err and len({*cloud.starts()}) == 1 and cloud.alive()


def test_a_start_on_its_way_is_refused_after_a_stop(cloud, here):
    """The client is killed while worker 1 is being started; then another one stops all."""
    cloud.set(mishaps=[{"worker": 1, "match": " start ", "late": 2}])
    process = cloud.start(*train("--run", "one", args=FOREVER))
    wait_for(lambda: any(" start " in word and "--worker=1" in call for call in cloud.calls() for word in call))
    process.kill()
    code, _, err = here("stop")
    assert code == 0 and "worker 0: stopped before it trained: one" in err and "worker 1: nothing ran" in err
    time.sleep(2.5)
    assert not cloud.alive() and cloud.starts() == [0, 0], "worker 0 had waited for worker 1"


@one_worker
def test_detach_logs_status_stop(cloud, here):
    same = f"{FOREVER} kind=0"
    result = cloud.run(*train("--run", "one", "--detach", args=same))
    assert result.returncode == 0 and "make logs TPU=my-tpu ZONE=us-east5-b" in result.stderr
    assert here("status")[1].count(f"runs one (MODEL=tiny 'ARGS=--runs=/shared {same}'), since") == 1
    process = cloud.start("logs")
    assert read_until(process, "step 2").startswith("start one at 0")
    _, err = ctrl_c(process)
    assert "one continues" in err and cloud.alive()
    head = cloud.start("logs", LC_ALL="C", PYTHONIOENCODING="ascii")  # `make logs | head` in a terminal for ASCII
    head.stdout.readline()
    head.stdout.close()
    assert head.wait(20) == 0 and "Traceback" not in head.stderr.read()
    # The same command attaches; another one is refused.
    process = cloud.start(*train(args=same))
    for arguments in (train("--detach", args="steps=5"), train("--detach", "--run", "two", args=same)):
        code, _, err = here(*arguments)
        assert code == 2 and "my-tpu is busy: one (MODEL=tiny" in err
    read_until(process, "step 9")
    code, _, err = here("stop", "--run", "two")
    assert code == 1 and "left alone, since RUN=two does not run there, but one" in err
    assert here("stop")[0] == 0
    _, err = process.communicate(timeout=20)
    assert "runs already; attaching to it" in err and process.returncode == 143
    assert cloud.starts() == [1] and not cloud.alive() and "saved" in cloud.log(0).splitlines()[-2:]
    result = cloud.run("logs")
    assert result.returncode == 143 and "start one at 0" in result.stdout
    assert "one exit code 143" in here("status")[1]
    # With its keeper the trainer is killed.
    assert cloud.run(*train("--run", "one", "--detach", args=FOREVER)).returncode == 0
    wait_for(lambda: cloud.starts() == [2])
    os.kill(cloud.keeper(0), signal.SIGKILL)
    wait_for(lambda: not cloud.alive())
    code, _, err = here("logs")
    assert code == 137 and "the run ended with exit code 137 (signal)" in err
    shutil.rmtree(cloud.home(0) / "run")  # a machine that was restarted
    code, _, err = here("logs", "--run", "one")
    assert code == 2 and "does not know of RUN=one" in err


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
    _, err = ctrl_c(process)
    assert "runs already" in err and cloud.starts() == [1, 1]
    assert err.count("stopped and saved") == 2 and not cloud.alive()


def test_two_launchers_at_once_are_one_run(cloud):
    processes = [cloud.start(*train("--run", "one", args="steps=20 pause=0.05")) for _ in range(2)]
    results = [process.communicate(timeout=40) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert cloud.starts() == [1, 1]


@one_worker
def test_a_tpu_is_asked_for_and_deleted_after_its_run(cloud, here, monkeypatch):
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: None)
    cloud.set(state="DELETED")
    arguments = ("train", "--create", "v6e-8", "--spot", "--run", "one", "--", "MODEL=tiny", "ARGS=--runs=gs://b/runs")
    code, _, err = here(*arguments)
    assert code == 0 and "the request for my-tpu is WAITING_FOR_RESOURCES" in err and "deleting my-tpu" in err
    create, delete = ([call for call in cloud.calls() if call[0] == verb] for verb in ("create", "delete"))
    flags = {"--node-id=my-tpu", "--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e", "--spot"}
    assert len(create) == len(delete) == 1 and flags < {*create[0]} and "--force" in delete[0]
    assert cloud.starts() == [1] and json.loads((cloud.folder / "tpu.json").read_text())["state"] == "DELETED"
    code, _, err = here("train", "--keep", *arguments[1:])
    stays = "my-tpu stays, and is billed; delete it: gcloud compute tpus queued-resources delete"
    assert code == 0 and stays in err
    cloud.set(mishaps=[{"match": " start ", "how": "before", "message": "Host key verification failed."}])
    code, _, err = here(*arguments)
    assert code == 2 and stays in err, "nothing has run"


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
        f"exec env -i HOME=$home PATH={cloud.tpu['path']} XLA_ZOO_RUNTIME=$home/run"
        ' /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
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
    wait_for(lambda: len(cloud.alive(connections=True)) > len(cloud.alive()))  # the log is followed
    command = ["pgrep", "-P", str(cloud.server.pid)]  # the processes of sshd for the connections that are open
    children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert children
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == cloud.log(0) and cloud.starts() == [1, 1] and out.count("line 0") == 20000
    assert out.endswith(f"step {steps}\nend\n")
    process = cloud.start(*train("--run", "two", *place, args=FOREVER), **environment)
    wait_for(lambda: cloud.starts() == [2, 2], 120)
    assert process.stdout.readline()
    _, stopped = ctrl_c(process)
    assert stopped.count("stopped and saved") == 2 and not cloud.alive(), stopped
    return err


def test_ssh_hosts_over_a_real_sshd(cloud, sshd):
    """An unknown host, a connection that breaks, the end of the run; then Ctrl-C."""
    place = ("--tpu", "ssh:host0,host1", "--ssh-config", str(sshd / "config"))
    result = cloud.run("status", *place)
    assert result.returncode == 1 and "Host key verification failed" in result.stdout, result.stderr
    assert re.search(r"\(host[01]\) is unknown to ssh", result.stdout)
    os.replace(sshd / "known", sshd / "known_hosts")
    err = check_break_and_ctrl_c(cloud, 40, *place)
    assert "connecting again" in err and "connected again" in err and "scp -r host0:/shared/one runs/" in err
    # A machine has one run, whatever it is called.
    both = cloud.start(*train("--run", "three", *place, args=FOREVER))
    wait_for(lambda: cloud.starts() == [3, 3])
    one = ("--tpu", "ssh:host1", *place[2:])
    for name in ("three", "four"):  # alone it would take itself for worker 0
        result = cloud.run(*train("--run", name, *one, args=FOREVER))
        assert result.returncode == 2 and "ssh:host1 is busy: three" in result.stderr
        assert "worker 1 of 2, since" in result.stderr
    assert "stopped and saved: three" in cloud.run("stop", *one).stderr and both.wait(30) == 143
    assert cloud.calls() == [] and cloud.starts() == [3, 3]


@pytest.mark.slow
def test_the_real_gcloud_knows_the_arguments(tmp_path):
    """Without an account it goes no further than reading them."""
    if shutil.which("gcloud") is None:
        pytest.skip("needs gcloud")
    host = hosts.choose("my-tpu", "us-east5-b", "mine", ["--internal-ip"], "")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
    environment["CLOUDSDK_CORE_CHECK_GCE_METADATA"] = "false"
    describe = [*host.command("tpu-vm", "describe", "my-tpu"), "--format=json"]
    for command in (describe, host.ssh(0, "true")):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert "do not currently have an active account" in result.stderr, result.stderr
        assert any(
            re.search(pattern, result.stderr) and "gcloud auth" in text for pattern, _, text in messages.GCLOUD_ERRORS
        )


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
    place = ("--project", "mine", f"--gcloud-flag=--ssh-flag=-p{cloud.port}")
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
    on_workers = path.name in ("worker.py", "keeper.py")
    tree = ast.parse(path.read_text(), feature_version=(3, 8) if on_workers else (3, 9))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = set() if on_workers else {"errors", "tpu"}
    assert {module.partition(".")[0] for module in modules} - ours <= {"__future__", *sys.stdlib_module_names}


def test_they_start_without_any_package():
    for program in (["-m", "tpu.launch"], ["tpu/launch/launcher.py"], ["-m", "tpu.doctor"]):
        command = [PYTHON, "-S", *program, "--help"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0 and "--tpu" in result.stdout, result.stderr
