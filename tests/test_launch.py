"""tpu/launch over tests/fake_gcloud.py and tests/fake_systemd.py: see tests/launch_bed.py.

tests/test_pods.py has workers with a real systemd and sshd.
"""

import ast
import getpass
import http.server
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from launch_bed import FOREVER, KEEPER, PYTHON, ROOT, git, wait, write_programs

from errors import InputError
from tpu.launch import keeper, launcher, messages, request, workers

one_worker = pytest.mark.parametrize("bed", [1], indirect=True)


def write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_bundle_has_what_git_knows_or_does_not_ignore(bed):
    project = bed.project
    write({project / name: "text" for name in ("new file's.py", "a.tmp", "tool")})
    (project / "link").symlink_to("train.py")
    (project / "tool").chmod(0o700)
    git(project, "add", "tool")
    (project / "message").unlink()
    bundle = request.make_bundle(project)
    with tarfile.open(fileobj=io.BytesIO(bundle.content)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    expected = [".gitignore", "Makefile", "exit_code.sh", "link", "new file's.py", "tool", "train.py"]
    assert sorted(members) == expected and bundle.files == 7
    assert members["tool"].mode == 0o755 and members["train.py"].mode == 0o644
    assert members["link"].issym() and members["link"].linkname == "train.py"
    os.utime(project / "train.py", (1, 1))
    assert request.make_bundle(project) == bundle
    (project / "train.py").write_text("other")
    assert request.make_bundle(project).name != bundle.name


def test_a_tree_that_cannot_be_copied_is_refused(bed, tmp_path, monkeypatch):
    def refused(message: str, folder: Path = bed.project) -> None:
        with pytest.raises(InputError, match=message):
            request.make_bundle(folder)

    refused("has no Makefile", tmp_path)
    (tmp_path / "Makefile").touch()
    refused("git cannot list the files", tmp_path)
    git(bed.project, "init", "-q", "inner")
    write({bed.project / "inner/file": "", bed.project / "out/deep/weights": "x" * (3 << 20)})
    refused("inner/ is neither a file nor a link")
    shutil.rmtree(bed.project / "inner")
    monkeypatch.setattr(request, "BUNDLE_MEGABYTES", 2)
    refused(r"has 3 MB, more than 2 MB: 3 MB in out/, .*\.gitignore")


@one_worker
def test_a_changed_tree_replaces_what_differs_and_keeps_what_is_not_its_own(bed):
    project, tree = bed.project, bed.zoo(0) / "tree"
    write({project / name: name for name in ("old/deep/file.py", "kept/a.py", "kept/b.py", "turns/file.py", "plain")})

    def trained(args: str, place: str, copies: int) -> str:
        """Trains. One worker needs no shared folder, and the place of its results is named."""
        before = len(bed.calls("ssh", " receive "))
        code, out, err = bed.run("train", "--run", "one", "--", "MODEL=tiny", f"ARGS={args}")
        assert code == 0 and place in err, err
        assert len(bed.calls("ssh", " receive ")) - before == copies and out.count("start one at") == 1
        return out

    # gcloud repeats both with the rest of the input.
    bed.wrong(match=" status ", input=workers.PROGRAM.index(b"\ndef main"))
    bed.wrong(match=" receive ", input=len(workers.PROGRAM) + 99)
    out = trained("", "scp --recurse my-tpu:xla-zoo/my-tpu/worker-0/tree/runs/one runs/ --worker=0", 2)
    assert out == "start one at 0 with '' and None\nstep 1\nstep 2\nstep 3\nend\n"
    assert (tree / "old/deep/file.py").exists()
    times = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    trained("--runs=mine", "my-tpu:xla-zoo/my-tpu/worker-0/tree/mine/one runs/", 0)
    for folder in ("old", "turns"):
        shutil.rmtree(project / folder)
    for name in ("kept/a.py", "plain"):  # the first from a folder that keeps others
        (project / name).unlink()
    new = {"turns": "now a file", "plain/file": "now a folder", "train.py": (project / "train.py").read_text() + "\n"}
    write({project / name: text for name, text in new.items()} | {tree / "turns/result": "of the user's own"})
    trained("--runs=gs://bucket/runs", "its results: gs://bucket/runs/one", 1)
    assert not (tree / "old").exists() and (tree / "runs/one").exists()
    assert [path.name for path in (tree / "kept").iterdir()] == ["b.py"]
    assert (tree / "turns").read_text() == "now a file" and (tree / "plain/file").read_text() == "now a folder"
    assert [path.read_text() for path in tree.glob("turns.old-*/*")] == ["of the user's own"]
    # make goes by the time: it would install again if requirements.txt looked new.
    now = [(tree / name).stat().st_mtime_ns for name in ("Makefile", "train.py")]
    assert now[0] == times[0] and now[1] > times[1]
    os.truncate(bed.zoo(0) / "bundle", 100)
    os.truncate(bed.zoo(0) / "manifest.json", 0)
    trained("--runs=gs://bucket/runs", "its results", 1)  # a damaged one is sent again
    assert [path.stat().st_mode & 0o777 for path in (bed.home(0) / "xla-zoo", bed.zoo(0))] == [0o700, 0o700]


@pytest.mark.parametrize("language", ["C.UTF-8", "de_DE.UTF-8"])
@pytest.mark.parametrize(
    "ends, code",
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ("kill -BUS $$$$", 135),
        ("kill -SEGV $$$$", 139),
        ("kill -KILL $$$$", 137),
    ],
)
def test_how_a_program_ended_is_what_it_wrote_and_not_what_make_says(ends, code, language, tmp_path):
    program = ROOT / "tpu/exit_code.sh"
    (tmp_path / "Makefile").write_text(f"train:\n\t@sh {program} sh -c '{ends}'\n")
    recorded = tmp_path / "code"
    environment = {"PATH": os.environ["PATH"], "LC_ALL": language, "XLA_ZOO_EXIT_CODE": str(recorded)}
    result = subprocess.run(["make"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == (2 if code else 0)
    assert keeper.exit_code(result.returncode, recorded) == code


def test_make_that_fails_before_the_trainer_began_is_no_input_to_fix(tmp_path):
    """pip's own exit code is 2, too, and so is make's for every failure."""
    none = tmp_path / "none"
    assert keeper.exit_code(2, none) == keeper.UNKNOWN == 1
    assert keeper.exit_code(-9, none) == 137 and keeper.exit_code(0, none) == 0


@one_worker
def test_values_arrive_whole_and_secrets_leave_no_trace(bed):
    path, setting = """/my data/it's $HOME; touch /tmp/x""", "a 'b' \"c\" $d;"
    words = (f"DATA={path}".replace("$", "\\$"), "PRESET=")
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "wandbverysecret", "MINE": "mineverysecret"}
    with (bed.project / "train.py").open("a") as program:
        program.write(f"print({{name: len(os.environ.get(name, '')) for name in {(*secrets, 'GET_PYTHON')}}})\n")
        program.write("print({name: os.environ[name] for name in ('PYTHONUNBUFFERED', 'LC_ALL')})\n")
    setting_words = f"SETTING={shlex.quote(setting)} B=1 PYTHONUNBUFFERED=yes"
    environment = {**secrets, "OTHER": "x", "ENV": setting_words}
    code, out, err = bed.run("train", "--secret", "MINE", "--env-from", "ENV", words=words, env=environment)
    assert code == 0 and f"with {path!r} and {setting!r}" in out, err
    assert "{'HF_TOKEN': 13, 'WANDB_API_KEY': 15, 'MINE': 14, 'GET_PYTHON': 1}" in out  # of a TPU VM
    assert "{'PYTHONUNBUFFERED': 'yes', 'LC_ALL': 'C.UTF-8'}" in out
    assert "verysecret" not in json.dumps(bed.calls()) + out + err
    files = [path for path in bed.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if b"verysecret" in path.read_bytes()]
    assert not any("--worker=all" in call or any("strict-host" in word for word in call) for call in bed.calls())


SHARE = "error: my-tpu has 2 workers, and "


MISTAKES = [
    ("train -- --lr", "--lr after -- is not an argument of make train"),
    ("train -- ZONE=a", "ZONE= is for this machine"),
    ("train --run a/b", "RUN=a/b is not the name of one folder"),
    ("train --run " + 101 * "x", "use up to 100 letters"),
    ("train --run a -- NAME=b", "two names"),
    ("train --env A", 'A in ENV is not an assignment; write ENV="A=b'),
    ("train --env 'A=\"b'", "cannot be read"),
    ("train --env HF_TOKEN=x", "HF_TOKEN in ENV would stand in this machine's list of processes: export it"),
    ("train --env MY_KEY=x", "give --secret MY_KEY"),
    ("train --secret NOT_SET", "--secret NOT_SET: this variable is not set here"),
    ("train --grace nan", "--grace nan is not a time to save: give 0 to 86400 seconds"),
    ("stop --grace=-5", "--grace -5 is not a time to save"),
    ("train --tpu My_Tpu", "is not the name of a TPU VM"),
    ("train --tpu local", "TPU=local is this machine"),
    ("train --tpu ssh:a,-oProxyCommand=x", "is not a list of hosts"),
    ("train --tpu ssh:a,a", "names a host twice"),
    ("train --port 70000", "--port 70000 is not a port: give 1024 to 65535"),
    ("train -- 'ARGS=--lr 1\n--epochs 2'", "has more than one line"),
    # Workers that share no folder for the runs.
    ("train -- MODEL=tiny", SHARE + "ARGS has no --runs; give a folder that all of them share"),
    ("train -- 'ARGS=--lr 0.1'", "or an absolute path"),
    ("train -- 'ARGS=--runs gs://b/runs --runs other'", SHARE + "--runs other in ARGS is on each"),
    ("train -- ARGS=--runs=~/runs", "--runs ~/runs in ARGS is on each worker's own disk"),
    ("train -- \"ARGS=--lr 1 --runs='a b/'\"", "--runs a b in ARGS"),
    ('train -- "ARGS=--runs \'/a"', "--runs '/a in ARGS"),
    ("train -- 'ARGS=--runs $USER'", "--runs $USER in ARGS"),
    ("train -- 'ARGS=--runs-of x'", "ARGS has no --runs"),
    ("logs", "does not know of a run"),
    ("logs --run x", "does not know of RUN=x"),
]


def test_what_the_user_can_fix_is_one_sentence(bed, here):
    for arguments, message in MISTAKES:
        code, _, err = here(*shlex.split(arguments))
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("error: ") and message in last, arguments
        assert not any(bed.starts()) and ("logs" in arguments or not bed.calls("ssh")), arguments


RECREATE = (
    "gcloud compute tpus tpu-vm delete my-tpu --zone=us-east5-b && gcloud compute tpus tpu-vm create my-tpu"
    " --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
)
QUEUED = {"queuedResource": "projects/p/locations/z/queuedResources/wish"}


ERROR = "ERROR: (gcloud.compute.tpus.tpu-vm.describe) "
LACKS = "Error parsing [tpu].\nThe [tpu] resource is not properly specified.\nFailed to find attribute "
WAYS = ". The attribute can be set in the following ways: \n- provide"
FINAL = [
    ({"state": "PREEMPTED", "spot": True}, f"the cloud took it back; recreate it: {RECREATE} --spot"),
    ({"state": "PREEMPTED", "node": QUEUED}, "queued-resources delete wish --force"),
    ({"state": "TERMINATED"}, RECREATE),
    ({"state": "STOPPED"}, "start it: gcloud compute tpus tpu-vm start my-tpu --zone=us-east5-b"),
    ({"health": "UNHEALTHY_TPU", "node": {"healthDescription": "chip 3"}}, "UNHEALTHY_TPU .chip 3."),
    (
        {"state": "DELETED"},
        "there is no TPU VM my-tpu .*create my-tpu .*queued-resources create my-tpu --node-id=my-tpu",
    ),
    (
        "You do not currently have an active account selected.\nPlease run:\n\n  $ x\n",
        "not logged in: gcloud auth login",
    ),
    ("There was a problem refreshing your current auth tokens: Reauthentication failed.", "not logged in: gcloud"),
    ("PERMISSION_DENIED: Cloud TPU API has not been used in project 1", "services enable tpu.googleapis.com"),
    ("PERMISSION_DENIED: Permission denied on 'locations/us-x' (or it may not exist).", "zone's name"),
    (f"{LACKS}[zone]{WAYS}", "give ZONE="),
    (f"{LACKS}[project]{WAYS}", "give PROJECT="),
]


def test_a_tpu_that_cannot_be_used_is_explained_and_nothing_is_begun(bed, here):
    """By the command that helps, or by what gcloud's error means, beside its own line."""
    for says, message in FINAL:
        bed.set(**{"state": "READY", "health": "HEALTHY", "spot": False, "node": {}})
        if isinstance(says, dict):
            bed.set(**says)
        else:
            warning = "WARNING: Your active project does not match the quota project.\n"
            bed.wrong(verb="describe", message=f"{warning}{ERROR}{says}")
        code, _, err = here("train")
        last = err.splitlines()[-1]
        assert code == (75 if isinstance(says, dict) else 2) and last.startswith("error: "), err
        assert re.search(message, last) and (isinstance(says, dict) or (ERROR + says).splitlines()[0] in last), err
    assert len(bed.calls()) == len(FINAL)
    (bed.bin / "gcloud").unlink()
    code, _, err = here("train")
    assert code == 2 and "needs gcloud: https" in err


@one_worker
def test_a_tpu_that_will_be_ready_is_waited_for(bed, here, monkeypatch):
    states = [{"state": "REPAIRING"}, {"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}, {"health": "HEALTHY"}]

    def sleep(seconds: float) -> None:
        if seconds == launcher.ASK_AGAIN:
            bed.set(**states.pop(0))

    monkeypatch.setattr(launcher.time, "sleep", sleep)
    bed.set(state="CREATING")
    code, _, err = here("train")
    assert code == 0 and "CREATING, not READY yet: wait until gcloud compute tpus tpu-vm describe my-tpu" in err
    assert "in repair: wait" in err and "in a maintenance event: wait" in err and err.count("Ctrl-C gives up") == 3


TRANSIENT = [
    {"message": ERROR + "There was a problem connecting: [Errno 8]"},
    {"message": ERROR + "HttpError 503: The service is currently unavailable."},
    {"message": ERROR + "429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests' per minute"},
    {"message": ERROR + "There was a problem refreshing your current auth tokens: ('Connection aborted.', …)"},
    {"message": ERROR + "Something new."},
    {"out": ""},
    {"out": "<html>502</html>"},
]


@one_worker
def test_an_error_that_may_pass_is_asked_again(bed, here, monkeypatch):
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: None)
    refused = {"message": "me@34.0.0.0: Permission denied (publickey)."}
    bed.set(attempts=1)
    for wrong in TRANSIENT:
        bed.wrong(verb="describe", **wrong)
    bed.wrong(times=2, **refused)
    bed.wrong(times=2, message="ssh: Could not resolve hostname x: Temporary failure in name resolution")
    real = (bed.remote / "systemctl").rename(bed.remote / "real")  # a machine that has just been started
    busy = "[ -e $HOME/busy ] || { touch $HOME/busy; echo Failed to connect to bus: Broken pipe >&2; exit 1; }"
    write_programs(bed.remote, systemctl=f"{busy}; exec {real}")
    code, out, err = here("train")
    assert code == 0 and out.endswith("end\n"), err
    said = ("503", "429", "Errno 8", "Something new", "'<html>", "not accept your ssh key", "is not a name that")
    assert all(text in err for text in (*said, "Failed to connect to bus")), err
    assert err.count("trying again") == len(TRANSIENT) + 3
    # Not for ever, and then with what to do.
    bed.wrong(times=0, **refused)
    code, _, err = here("train", "--lost-after", "0.5")
    assert code == 1 and "worker 0 cannot be reached: worker 0 does not accept your ssh key" in err
    bed.wrong(verb="describe", times=0, **TRANSIENT[1])
    code, _, err = here("status", "--lost-after", "0.2")
    assert code == 1 and "503" in err.splitlines()[-1]


@one_worker
def test_a_worker_that_will_never_work_is_not_tried_again(bed, here):
    write_programs(bed.remote, sh="", install="", rm="")  # no make

    def refused(sentence: str, code: int = 2) -> None:
        found, out, err = here("train")
        assert found == code and sentence in (out if code == 127 else err.splitlines()[-1]), err

    systemd = (bed.remote / "systemd-run").rename(bed.remote / "real")
    write_programs(bed.remote, **{"systemd-run": "echo It is too old. >&2; exit 1"})
    refused("this host says: It is too old.")
    assert not (bed.home(0) / "run/start.json").exists(), "it has the secrets"
    systemd.rename(bed.remote / "systemd-run")
    unit = bed.home(0) / "unit"  # alive, of nobody known: for a moment that is a run that ends
    unit.mkdir()
    refused("my-tpu is busy: a run of another user")
    threading.Timer(1, unit.rmdir).start()
    assert here("train")[0] == 0
    bed.wrong(times=4, message="Host key verification failed.")
    refused("shows another host key than before")
    code, out, _ = here("status")
    assert code == 1 and "worker 0: worker 0 is unknown to ssh" in out
    systemctl = bed.remote / "systemctl"
    systemctl.rename(bed.remote / "real")
    write_programs(bed.remote, systemctl="echo System has not been booted with systemd >&2; exit 1")
    needed = "a run is a systemd unit, started as root or through sudo without a password; this host says: "
    refused(needed + "System has not been booted")
    (bed.remote / "system").unlink()
    systemctl.unlink()
    refused(needed + "no systemctl")
    (bed.remote / "real").rename(systemctl)
    (bed.remote / "python3").rename(bed.remote / "hidden")
    refused("worker 0 has no python3")
    (bed.remote / "hidden").rename(bed.remote / "python3")
    refused("make could not be started on the worker: No such file", 127)
    (bed.zoo(0) / "bundle").unlink()
    (bed.zoo(0) / "bundle").mkdir()
    refused("worker 0: Is a directory: ")
    assert bed.idle()


@pytest.mark.parametrize("bed", [3], indirect=True)
def test_a_worker_that_fails_ends_all_and_all_start_again_with_no_client(bed):
    """It fails at step 20, and resumed from there at step 40. The exit code is found later."""
    (bed.project / "message").write_text("it broke\nFailed to get global TPU topology")
    args = "burst=1 fails=2 every=20 steps=100000 pause=0.05"
    client = bed.start("train", "--run", "one", "--retries", "1", args=args)
    wait(lambda: all(bed.starts()))
    client.kill()
    assert "cannot be reached" not in client.err.read_text(), "the key of a fresh home is made once"
    wait(bed.idle)
    code, out, err = bed.run("logs")
    assert code == 3 and "starting again, retry 1 of 1" in bed.log(0)
    assert bed.starts() == [2, 2, 2] and "start one at 20 with" in bed.log(2) and min(bed.steps()) >= 20
    assert bed.log(0).count("[worker ") == bed.log(0).count("[worker 2] ") == 2 * keeper.LAST_LINES
    assert "[worker 2] it broke" in out.splitlines()
    assert "worker 2 failed with exit code 3" in err and "what this means: libtpu did not find the chips" in err


def test_known_messages_are_explained():
    for message, sentence in (
        ("RuntimeError: Failed to get global TPU topology.", "must be started on all workers"),
        ("ABORTED: The TPU is already in use by process with pid 2718466.", "another process on this worker holds"),
        ("open(/dev/vfio/0): Device or resource busy: Device or resource busy", "sudo lsof"),
        ("FAILED: Couldn't open /dev/vfio/0: Device or resource busy", "another process on this worker holds"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33G of 15G", "a smaller --batch-size"),
        ("error: CPython 3.11, 3.12 or 3.13 is needed, python3 is not it", "python3.11 python3.11-venv libpython3.11"),
        (
            "ImportError: libpython3.12.so.1.0: cannot open shared object file",
            "install -y python3.12-venv libpython3.12`",
        ),
        (
            "ImportError: libpython3.11.so.1.0: Kann die Shared-Object-Datei nicht öffnen",
            "python3.11-venv libpython3.11`",
        ),
        ("INVALID_ARGUMENT: Invalid TPU external name: TPU7x", "TPU7x, which needs LIBTPU_VERSION=0.0.51"),
        ("OSError: [Errno 28] No space left on device", "the disk of this worker is full"),
        ("If you still get this message, run $ sudo rm /tmp/libtpu_lockfile", "perhaps another user's"),
        (137, "ran out of memory (not the TPU's)"),
    ):
        (said,) = messages.explain_log(f"a\n{message}\nb", message if isinstance(message, int) else 1)
        assert sentence in said


ALL = [(worker, False, None, False) for worker in range(3)]
RUN = [(worker, True, None, False) for worker in range(3)]
SAVED = [(0, False, 143, False), (2, False, 143, False)]
FAILED = [*ALL, *RUN, (1, False, 3, False)]


@pytest.mark.parametrize(
    "events, order, code, grace, over",
    [
        ([*ALL[:2], 310, ALL[0]], "leave", 1, 10, False),  # one never joined
        ([*ALL, *RUN, 30, *RUN[:2], 15, RUN[0]], "leave", 1, 10, False),  # one is silent: no retry, its keeper is gone
        ([*ALL, *RUN, (1, False, 143, False)], "leave", 143, 60, False),  # the trainer itself was told to stop
        # A machine that shuts down and is never heard again.
        ([*ALL, *RUN, (1, True, None, True), 30, *SAVED, 15, SAVED[0]], "leave", 143, 60, True),
        ([*FAILED, *SAVED], "run", 0, 60, False),
        ([*ALL, *RUN, (1, False, 2, False), *SAVED], "leave", 2, 10, True),
        # A stop, or a silent worker, while the others are being ended for a retry: there is none.
        ([*FAILED, (0, True, None, True), (0, False, 143, True), SAVED[1]], "leave", 3, 10, True),
        ([*FAILED, 45, *SAVED], "leave", 3, 10, True),
    ],
)
def test_the_owner_decides(monkeypatch, events, order, code, grace, over):
    """events: reports of three workers (worker, running, code, stopped), or seconds that pass."""
    now = [0.0]
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    owner = keeper.Owner(3, 1, 60, "10.0.0.1 port 1", lambda *_: None)
    for event in events:
        if isinstance(event, tuple):
            worker, running, ended, stopped = event
            report = {"running": running, "code": ended, "stopped": stopped, "tail": "", "incarnation": ""}
            owner.report(worker, report | {"attempt": owner.order["attempt"]})
        else:
            now[0] += event
    assert (owner.order["do"], owner.code, owner.order["grace"], owner.over) == (order, code, grace, over)


def test_a_tpu_that_is_taken_back_ends_the_watch_and_the_run_saves(bed):
    client = bed.begin("--retries", "3")
    bed.set(state="PREEMPTED")
    bed.kill(1, KEEPER, number=signal.SIGTERM)  # what the shutdown of worker 1 does; worker 0 is told
    wait(bed.idle)
    bed.drop_connections(0)
    code, _, err = bed.ended(client)
    assert bed.saved() and bed.starts() == [1, 1], err
    assert code in (75, 143) and (RECREATE in err) == (code == 75)


def test_a_dropped_connection_continues_where_it_was_and_a_start_is_done_once(bed):
    bed.set(attempts=1)  # gcloud itself does not repeat them
    for worker in range(2):
        bed.wrong(worker=worker, match=" status ", message="Connection closed by 34.0.0.1 port 22")
    for number in (1, 50_000, 300_000):
        bed.wrong(worker=0, match=" follow ", bytes=number)
    bed.wrong(worker=0, match=" start ", input=-1)
    for cut in (0, workers.PROGRAM.index(b"\ndef main"), len(workers.PROGRAM) + 99):
        bed.wrong(worker=1, match=" start ", input=cut)
    code, out, err = bed.run("train", "--run", "one", args="burst=1 steps=20")
    assert code == 0 and out == bed.log(0) and bed.starts() == [1, 1] and "connected again" in err, err
    assert out.count("line 0") == 20000 and "step 20\nend\n" in out


def test_stop_reaches_each_worker_by_itself_and_no_start_follows(bed, here):
    """One worker cannot be reached, the TPU's health is bad, and a client with RETRIES looks on."""
    client = bed.begin("--retries", "3")
    bed.wrong(worker=1, times=0, message="ssh: connect to host 34.0.0.1 port 22: Connection timed out")
    bed.set(health="UNHEALTHY_MAINTENANCE")
    looks_on = bed.start("logs")  # from a client that cannot reach worker 1 either
    wait(lambda: "step" in looks_on.out.read_text())
    bed.interrupt(looks_on)
    bed.set(health="UNHEALTHY_TPU")
    code, _, err = here("stop", "--lost-after", "0.3")
    assert code == 1 and "worker 0: stopped and saved: one" in err
    assert "worker 1: not reached: worker 1 cannot be reached: ssh: connect to host 34.0.0.1 port 22" in err
    # Worker 0 told the other one, which had its whole time to save.
    wait(bed.idle)
    assert bed.saved() and bed.starts() == [1, 1]
    bed.heal()
    code, _, err = bed.ended(client)
    assert code == 143 and "the run was stopped on worker 0" in err
    assert here("stop")[2].count("stopped and saved: one, exit code 143") == 2, "a moment ago"
    assert here("stop", "--run", "two")[2].count("nothing ran") == 2


def test_a_deaf_trainer_is_killed_and_a_second_ctrl_c_leaves_at_once(bed, here):
    client = bed.begin(args="deaf=1")
    # Ctrl-C before the start stops no other run.
    begun = bed.wrong(match=" status ", late=30)
    other = bed.start("train", args="steps=3")
    wait(begun.exists)
    assert "left; nothing was started" in bed.interrupt(other) and bed.starts() == [1, 1] and not bed.idle()
    client.send_signal(signal.SIGINT)
    wait(lambda: all((bed.home(worker) / "unit/stop").exists() for worker in range(2)))
    begun = time.monotonic()
    err = bed.interrupt(client)
    assert time.monotonic() - begun < 3
    assert "the run may go on: make stop TPU=my-tpu ZONE=us-east5-b ends it" in err
    begun = time.monotonic()
    code, _, err = here("stop", "--grace", "1")
    assert code == 0 and "worker 1: stopped unsaved: one, exit code 137" in err
    assert time.monotonic() - begun < 12, "not the 20 s that the first Ctrl-C had asked for"
    wait(bed.idle)


@pytest.mark.parametrize("how", ["on its way", "unpacking"])
def test_a_start_is_refused_after_a_stop(bed, how):
    """The client is killed while worker 1 is being started, is slow, and a stop overtakes it: then nothing starts."""
    if how == "on its way":
        begun = bed.wrong(worker=1, match=" start ", late=2)
    else:
        begun = bed.zoo(1) / "tree/data/0"  # the first; the others take longer than to see it
        write({bed.project / f"data/{number}": str(number) for number in range(4000)})
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(begun.exists)
    slow = bed.kill(1, "\0start\0", number=signal.SIGSTOP)
    client.kill()
    stop = bed.start("stop")
    time.sleep(2.5)
    assert bool(slow) == (how == "unpacking") and (not slow or stop.poll() is None)
    bed.kill(1, "\0start\0", number=signal.SIGCONT)
    code, _, err = bed.ended(stop)
    assert code == 0 and "worker 0: stopped before it trained: one" in err and "worker 1: nothing ran" in err
    bed.check_idle(5, stays=1)
    assert bed.starts() == [0, 0], "worker 0 had waited for worker 1"


@one_worker
def test_detach_logs_status_stop(bed, here):
    args = f"{FOREVER} kind=0"
    code, _, err = bed.run("train", "--run", "one", "--detach", args=args)
    assert code == 0 and "make logs TPU=my-tpu ZONE=us-east5-b" in err
    assert re.search(rf"runs one \(MODEL=tiny 'ARGS=--runs={bed.runs} .*{args}'\), since", here("status")[1])
    viewer = bed.start("logs")
    wait(lambda: "step 2\n" in viewer.out.read_text())
    assert viewer.out.read_text().startswith("start one at 0")
    assert "one continues" in bed.interrupt(viewer) and not bed.idle()
    head = bed.start("logs", pipe=True, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})  # `make logs | head`
    head.stdout.readline()
    head.stdout.close()
    assert head.wait(20) == 0 and "Traceback" not in head.err.read_text()
    # The same command attaches; another one is refused.
    client = bed.start("train", args=args)
    for flags, other in ((("--detach",), "steps=5"), (("--detach", "--run", "two"), args)):
        code, _, err = here("train", *flags, args=other)
        assert code == 2 and "my-tpu is busy: one (MODEL=tiny" in err
    wait(lambda: "step 9\n" in client.out.read_text())
    (bed.zoo(0) / "jobs/one/log").unlink()  # nothing more is seen; the run and its end do not need it
    code, _, err = here("stop", "--run", "two")
    assert code == 1 and "left alone, since RUN=two does not run there, but one" in err
    assert here("stop")[0] == 0
    code, _, err = bed.ended(client)
    assert "runs already; attaching to it" in err and code == 143
    assert bed.starts() == [1] and bed.idle() and bed.saved()
    assert bed.run("logs")[0] == 143 and "one exit code 143" in here("status")[1]
    # With its keeper the trainer is killed.
    bed.begin("--detach")
    assert bed.kill(0, KEEPER) == 1
    wait(bed.idle)
    code, out, err = here("logs")
    assert code == 137 and "the run ended with exit code 137 (signal)" in err and "start one at" in out
    bed.restart(0)
    code, _, err = here("logs", "--run", "one")
    assert code == 2 and "does not know of RUN=one" in err


def test_launchers_at_once_and_killed_while_they_start_are_one_run(bed):
    """The run continues or has not begun; the next launcher attaches to it; never two trainers (see `bed`)."""
    for seconds in (0.2, 0.6, 1.3):
        client = bed.start("train", "--run", "one", args=FOREVER)
        time.sleep(seconds)
        client.kill()
        assert max(bed.starts()) <= 1, seconds
    bed.stop()
    before = bed.starts()
    overtaken = bed.wrong(match=" start ", late=4)
    clients = [bed.start("train", args=FOREVER)]  # names no run, and attaches to the other's
    wait(overtaken.exists)
    clients.append(bed.start("train", "--run", "one", args=FOREVER))
    wait(lambda: min(bed.starts()) > max(before) and all("step" in client.out.read_text() for client in clients))
    err = bed.interrupt(clients[0])
    assert bed.starts() == [count + 1 for count in before] and err.count("stopped and saved") == 2
    assert "runs already" in err and bed.ended(clients[1])[0] == 143
    assert bed.idle()  # what it asked the workers has ended, too


def test_ssh_hosts(bed):
    """A connection that breaks, Ctrl-C, a part of the hosts, which is not the same TPU."""
    place = ("--tpu", "ssh:worker-0,worker-1")
    client = bed.begin(*place, args="stray=1")
    wait(lambda: "step" in client.out.read_text())
    bed.drop_connections(0)
    wait(lambda: "connected again" in client.err.read_text())
    # A machine has one run, whatever it is called.
    for name in ("one", "two"):  # alone it would take itself for worker 0
        code, _, err = bed.run("train", "--tpu", "ssh:worker-1", "--run", name, args=f"{FOREVER} stray=1")
        assert code == 2 and "ssh:worker-1 is busy: one" in err and "worker 1 of 2, since" in err
    stopped = bed.interrupt(client)
    assert stopped.count("stopped and saved: one, exit code 143") == 2 and bed.idle(), "also none of another session"
    assert "no process of the run is left" in stopped and "RUN=one" in stopped and "worker 1 (worker-1): " in stopped
    saved = bed.steps()[0]
    assert bed.saved()
    client = bed.begin(*place)
    assert f"start one at {saved} with" in bed.log(0), "resumed"
    assert "stopped and saved: one" in bed.stop(0, "--tpu", "ssh:worker-1") and bed.ended(client)[0] == 143
    code, _, err = bed.run("train", "--run", "one", *place, args="steps=3")
    assert code == 0 and f"scp -r worker-0:{bed.runs}/one runs/" in err
    assert bed.calls() == [] and bed.starts() == [3, 3]


class Api(http.server.BaseHTTPRequestHandler):
    """What gcloud asks of the TPU API (a node, its guest attributes) and of the compute API (the project)."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        bed, me = self.server.bed, getpass.getuser()
        if "getGuestAttributes" in self.path:
            answer = {"guestAttributes": [{"queryValue": {"items": []}}]}
        elif "/nodes/" in self.path:
            answer = {"name": "projects/mine/locations/us-east5-b/nodes/my-tpu", "id": "77", "apiVersion": "V2"}
            answer |= {"acceleratorType": "v5litepod-8", "health": "HEALTHY", "state": bed.tpu["state"]}
            ends = [{"ipAddress": ip, "accessConfig": {"externalIp": ip}} for ip in ("127.0.0.10", "127.0.0.11")]
            answer["networkEndpoints"] = ends
        else:  # the key is in the project already, so gcloud does not bring it to the VM
            key = bed.client_home / ".ssh/google_compute_engine.pub"
            public = " ".join(key.read_text().split()[:2]) if key.exists() else ""
            items = [{"key": "ssh-keys", "value": f"{me}:{public} {me}"}]
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
def test_the_real_gcloud_over_a_local_api(bed, request):
    """What tests/fake_gcloud.py imitates. The API is a server in this process, which takes any token for an account."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("needs gcloud")
    (bed.bin / "gcloud").unlink()
    (bed.bin / "gcloud").symlink_to(os.path.realpath(gcloud))
    (bed.client_home / ".ssh").mkdir(mode=0o700)
    (bed.folder / "token").write_text("none")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.bed = bed
    request.addfinalizer(server.shutdown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    api = f"http://127.0.0.1:{server.server_port}/"
    environment = {
        "PATH": f"{bed.bin}:/usr/bin:/bin",
        "CLOUDSDK_CONFIG": f"{bed.folder}/config",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": api,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": api + "compute/v1/",
    }
    place = {"env": environment | {"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": f"{bed.folder}/token"}}
    flags = ("--project", "mine", "--gcloud-flag=--ssh-flag=-v")
    code, _, err = bed.run("status", *flags, env=environment)
    assert code == 2 and "do not currently have an active account" in err and "gcloud auth login" in err
    data = "/my data/it's"
    args = {"args": "steps=300 pause=0.05 burst=1", "words": (f"DATA={data}",)}
    client = bed.start("train", "--run", "one", *flags, **args, **place)
    wait(lambda: all(bed.starts()) and bed.processes(0, "\0follow\0"), 120)
    bed.drop_connections(0)
    code, out, err = bed.ended(client, 120)
    assert code == 0 and out == bed.log(0) and bed.starts() == [1, 1] and out.count("line 0") == 20000, err
    assert f"with {data!r}" in out and "connected again" in err
    assert "no process of the run is left" in bed.interrupt(bed.begin(*flags, **place))
    assert bed.idle() and bed.saved() and "start one at 300 with" in bed.log(0), "resumed"
    bed.set(state="PREEMPTED")
    code, _, err = bed.run("status", *flags, **place)
    assert code == 75 and "my-tpu is PREEMPTED" in err


@pytest.mark.slow
@one_worker
def test_a_model_of_this_repository_is_trained(bed):
    """The real bundle, `make train` with its real Makefile, on XLA's CPU. What is installed here serves for it."""
    if not (ROOT / ".venv/.installed").exists():
        pytest.skip("needs the environment that make install makes")
    bed.project, tree = ROOT, bed.zoo(0) / "tree"
    (tree / ".venv").mkdir(parents=True)
    for path in (ROOT / ".venv").iterdir():
        if path.name != ".installed":
            (tree / ".venv" / path.name).symlink_to(path)
    # Equal files are not written again, so the stamp stays newer than they are, and make installs nothing.
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tree)
    (tree / ".venv/.installed").touch()
    words = ("--run", "trial", "--env", "OMP_NUM_THREADS=1 CPU_NUM_DEVICES=1 PIP_NO_INDEX=1")
    words += ("--", "MODEL=dlrm", "PRESET=tiny")
    code, out, err = bed.ended(bed.start("train", *words), 600)
    assert code == 0, out[-3000:] + err
    assert "pip install" not in out and out.count("trial") and bed.idle()
    assert (tree / "runs/trial/export").is_dir() and json.loads((tree / "runs/trial/summary.json").read_text())
    assert bed.run("train", *words)[0] == 0, "finished: the same command trains nothing more"


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
    for program in ("tpu.launch", "tpu.doctor"):
        result = subprocess.run([PYTHON, "-S", "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0 and "--tpu" in result.stdout, result.stderr
