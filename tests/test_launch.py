"""tpu/launch over tests/fake_gcloud.py and tests/fake_systemd.py: see tests/launch_bed.py.

Over the same stand-ins: test_launch_bundle.py (what is sent), test_launch_end.py (how runs end),
test_launch_log.py, test_launch_client.py (the user's machine), test_launch_network.py, and
test_launch_gcloud.py, which has the real gcloud. tests/test_pods.py has workers with a real systemd
and sshd.
"""

import ast
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import launch_scenarios as scenarios
import pytest
from launch_bed import (
    FOREVER,
    KEEPER,
    PYTHON,
    ROOT,
    Bed,
    one_worker,
    wait,
    write_files,
    write_programs,
)

from tpu.launch import keeper, launcher, messages, workers

# ---- what arrives on a worker ------------------------------------------------------------------


@one_worker
def test_values_arrive_whole(bed):
    path = """/my data/it's $HOME; touch /tmp/x"""
    setting = "a 'b' \"c\" $d;"
    with (bed.project / "train.py").open("a") as program:
        names = ("PYTHONUNBUFFERED", "LC_ALL")
        program.write(f"print({{name: os.environ[name] for name in {names}}})\n")

    for_make = f"DATA={path}".replace("$", "\\$")
    assignments = f"SETTING={shlex.quote(setting)} B=1 PYTHONUNBUFFERED=yes"
    code, out, err = bed.run(
        "train",
        "--env-from",
        "ENV",
        words=(for_make, "PRESET="),
        env={"OTHER": "x", "ENV": assignments},
    )
    assert code == 0, err
    assert f"with {path!r} and {setting!r}" in out, err
    assert "{'PYTHONUNBUFFERED': 'yes', 'LC_ALL': 'C.UTF-8'}" in out


@one_worker
def test_secrets_arrive_and_leave_no_trace(bed):
    secrets = {
        "HF_TOKEN": "hf_verysecret",
        "WANDB_API_KEY": "wandbverysecret",
        "MINE": "mineverysecret",
    }
    with (bed.project / "train.py").open("a") as program:
        names = (*secrets, "GET_PYTHON")
        program.write(f"print({{name: len(os.environ.get(name, '')) for name in {names}}})\n")

    environment = {**secrets, "OTHER": "x", "ENV": "B=1"}
    code, out, err = bed.run("train", "--secret", "MINE", "--env-from", "ENV", env=environment)
    assert code == 0, err
    of_a_tpu_vm = "'GET_PYTHON': 1"
    assert f"{{'HF_TOKEN': 13, 'WANDB_API_KEY': 15, 'MINE': 14, {of_a_tpu_vm}}}" in out

    assert "verysecret" not in json.dumps(bed.calls()) + out + err
    files = [path for path in bed.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"verysecret" in path.read_bytes()]
    for call in bed.calls():
        assert "--worker=all" not in call
        assert not any("strict-host" in word for word in call)


# ---- what the user can fix ---------------------------------------------------------------------


SHARE = "error: my-tpu has 2 workers, and "


MISTAKES = [
    ("train -- --lr", "--lr after -- is not an argument of make train"),
    ("train -- ZONE=a", "ZONE= is for this machine"),
    ("train --run a/b", "RUN=a/b is not the name of one folder"),
    ("train --run " + 101 * "x", "use up to 100 letters"),
    ("train --run a -- NAME=b", "two names"),
    ("train --env A", 'A in ENV is not an assignment; write ENV="A=b'),
    ("train --env 'A=\"b'", "cannot be read"),
    (
        "train --env HF_TOKEN=x",
        "HF_TOKEN in ENV would stand in this machine's list of processes: export it",
    ),
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
    (
        "train -- MODEL=tiny",
        SHARE + "ARGS has no --runs; give a folder that all of them share",
    ),
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
        assert code == 2, arguments
        assert last.startswith("error: "), arguments
        assert message in last, arguments
        assert not any(bed.starts()), arguments
        if "logs" not in arguments:
            assert not bed.calls("ssh"), arguments


# ---- a TPU that cannot be used, or not yet -----------------------------------------------------


RECREATE = (
    "gcloud compute tpus tpu-vm delete my-tpu --zone=us-east5-b &&"
    " gcloud compute tpus tpu-vm create my-tpu"
    " --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
)
QUEUED = {"queuedResource": "projects/p/locations/z/queuedResources/wish"}


# What the TPU is, and the remedy that is named.
STATES = [
    (
        {"state": "PREEMPTED", "spot": True},
        f"the cloud took it back; recreate it: {RECREATE} --spot",
    ),
    ({"state": "PREEMPTED", "node": QUEUED}, "queued-resources delete wish --force"),
    ({"state": "TERMINATED"}, RECREATE),
    (
        {"state": "STOPPED"},
        "start it: gcloud compute tpus tpu-vm start my-tpu --zone=us-east5-b",
    ),
    (
        {"health": "UNHEALTHY_TPU", "node": {"healthDescription": "chip 3"}},
        "UNHEALTHY_TPU .chip 3.",
    ),
    (
        {"state": "DELETED"},
        "there is no TPU VM my-tpu .*create my-tpu"
        " .*queued-resources create my-tpu --node-id=my-tpu",
    ),
]


def test_a_tpu_that_cannot_be_used_is_explained(bed, here):
    """By the command that helps; nothing is begun."""
    for changes, remedy in STATES:
        bed.set(**{"state": "READY", "health": "HEALTHY", "spot": False, "node": {}})
        bed.set(**changes)
        code, _, err = here("train")
        last = err.splitlines()[-1]
        assert code == 75, err
        assert last.startswith("error: "), err
        assert re.search(remedy, last), err
    assert len(bed.calls()) == len(STATES)


ERROR = "ERROR: (gcloud.compute.tpus.tpu-vm.describe) "
LACKS = (
    "Error parsing [tpu].\nThe [tpu] resource is not properly specified.\nFailed to find attribute "
)
CHOICES = ". The attribute can be set in the following ways: \n- provide"


# What gcloud says, and what it means.
LASTING = [
    (
        "You do not currently have an active account selected.\nPlease run:\n\n  $ x\n",
        "not logged in: gcloud auth login",
    ),
    (
        "There was a problem refreshing your current auth tokens: Reauthentication failed.",
        "not logged in: gcloud",
    ),
    (
        "PERMISSION_DENIED: Cloud TPU API has not been used in project 1",
        "services enable tpu.googleapis.com",
    ),
    (
        "PERMISSION_DENIED: Permission denied on 'locations/us-x' (or it may not exist).",
        "zone's name",
    ),
    (f"{LACKS}[zone]{CHOICES}", "give ZONE="),
    (f"{LACKS}[project]{CHOICES}", "give PROJECT="),
]


def test_an_error_of_gcloud_that_lasts_is_explained(bed, here):
    """By what it means, beside its own line; nothing is begun."""
    warning = "WARNING: Your active project does not match the quota project.\n"
    for says, meaning in LASTING:
        bed.wrong(verb="describe", message=f"{warning}{ERROR}{says}")
        code, _, err = here("train")
        last = err.splitlines()[-1]
        assert code == 2, err
        assert last.startswith("error: "), err
        assert re.search(meaning, last), err
        own_line = (ERROR + says).splitlines()[0]
        assert own_line in last, err
    assert len(bed.calls()) == len(LASTING)


def test_a_machine_without_gcloud_is_told_where_it_is(bed, here):
    (bed.bin / "gcloud").unlink()

    code, _, err = here("train")
    assert code == 2
    assert "needs gcloud: https" in err


@one_worker
def test_a_tpu_that_will_be_ready_is_waited_for(bed, here, monkeypatch):
    states = [
        {"state": "REPAIRING"},
        {"state": "READY", "health": "UNHEALTHY_MAINTENANCE"},
        {"health": "HEALTHY"},
    ]

    def sleep(seconds: float) -> None:
        if seconds == launcher.ASK_AGAIN:
            bed.set(**states.pop(0))

    monkeypatch.setattr(launcher.time, "sleep", sleep)
    bed.set(state="CREATING")
    code, _, err = here("train")
    assert code == 0
    describe = "gcloud compute tpus tpu-vm describe my-tpu"
    assert f"CREATING, not READY yet: wait until {describe}" in err
    assert "in repair: wait" in err
    assert "in a maintenance event: wait" in err
    assert err.count("Ctrl-C gives up") == 3


# ---- errors that may pass ----------------------------------------------------------------------


UNAVAILABLE = {"message": ERROR + "HttpError 503: The service is currently unavailable."}
TRANSIENT = [
    {"message": ERROR + "There was a problem connecting: [Errno 8]"},
    UNAVAILABLE,
    {
        "message": f"{ERROR}429 RESOURCE_EXHAUSTED: Quota exceeded"
        " for quota metric 'Read requests' per minute"
    },
    {
        "message": f"{ERROR}There was a problem refreshing your current auth tokens:"
        " ('Connection aborted.', …)"
    },
    {"message": ERROR + "Something new."},
    {"out": ""},
    {"out": "<html>502</html>"},
]
NO_KEY = {"message": "me@34.0.0.0: Permission denied (publickey)."}
NO_NAME = {
    "message": "ssh: Could not resolve hostname x: Temporary failure in name resolution",
}


@pytest.fixture
def without_pauses(monkeypatch) -> None:
    """Lets the launcher try again at once."""
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: None)


@one_worker
def test_an_error_that_may_pass_is_asked_again(bed, here, without_pauses):
    bed.set(attempts=1)
    for wrong in TRANSIENT:
        bed.wrong(verb="describe", **wrong)
    bed.wrong(times=2, **NO_KEY)
    bed.wrong(times=2, **NO_NAME)
    # A machine that has just been started.
    real = (bed.remote / "systemctl").rename(bed.remote / "real")
    fails_once = (
        "[ -e $HOME/busy ] ||"
        " { touch $HOME/busy; echo Failed to connect to bus: Broken pipe >&2; exit 1; }"
    )
    write_programs(bed.remote, systemctl=f"{fails_once}; exec {real}")

    code, out, err = here("train")
    assert code == 0, err
    assert out.endswith("end\n"), err
    for text in (
        "503",
        "429",
        "Errno 8",
        "Something new",
        "'<html>",
        "not accept your ssh key",
        "is not a name that",
        "Failed to connect to bus",
    ):
        assert text in err, err
    assert err.count("trying again") == len(TRANSIENT) + 3


@one_worker
def test_an_error_that_does_not_pass_ends_with_what_to_do(bed, here, without_pauses):
    bed.set(attempts=1)
    bed.wrong(times=0, **NO_KEY)
    code, _, err = here("train", "--lost-after", "0.5")
    assert code == 1
    no_key = "worker 0 does not accept your ssh key"
    assert f"worker 0 cannot be reached: {no_key}" in err

    bed.wrong(verb="describe", times=0, **UNAVAILABLE)
    code, _, err = here("status", "--lost-after", "0.2")
    assert code == 1
    assert "503" in err.splitlines()[-1]


def test_a_dropped_connection_continues_and_a_start_is_done_once(bed):
    bed.set(attempts=1)  # gcloud itself does not repeat them
    dropped = "Connection closed by 34.0.0.1 port 22"
    for worker in range(2):
        bed.wrong(worker=worker, match=" status ", message=dropped)
    for number in (1, 50_000, 300_000):
        bed.wrong(worker=0, match=" follow ", bytes=number)
    bed.wrong(worker=0, match=" start ", input=-1)
    for cut in (0, workers.PROGRAM.index(b"\ndef main"), len(workers.PROGRAM) + 99):
        bed.wrong(worker=1, match=" start ", input=cut)

    code, out, err = bed.run("train", "--run", "one", args="burst=1 steps=20")
    assert code == 0, err
    assert out == bed.log(0), err
    assert bed.starts() == [1, 1], err
    assert "connected again" in err, err
    assert out.count("line 0") == 20000
    assert "step 20\nend\n" in out


# ---- a worker that will never work is not tried again ------------------------------------------


def assert_refused(here: scenarios.Here, sentence: str) -> None:
    """Asserts that a start ends at once, with a sentence as its last."""
    code, _, err = here("train")
    assert code == 2, err
    assert sentence in err.splitlines()[-1], err


def leave_only_stand_ins(bed: Bed) -> None:
    """Takes this machine's programs from the worker, make among them, but for three."""
    write_programs(bed.remote, sh="", install="", rm="")
    (bed.remote / "system").unlink()


@one_worker
def test_a_systemd_that_starts_no_unit_is_named(bed, here):
    (bed.remote / "systemd-run").unlink()
    write_programs(bed.remote, **{"systemd-run": "echo It is too old. >&2; exit 1"})

    assert_refused(here, "this host says: It is too old.")
    assert not (bed.home(0) / "run/start.json").exists(), "it has the secrets"
    assert bed.idle()


@one_worker
def test_a_unit_of_nobody_known_is_busy_until_it_ends(bed, here):
    """For a moment that is a run that ends."""
    unit = bed.home(0) / "unit"
    unit.mkdir()
    assert_refused(here, "my-tpu is busy: a run of another user")

    threading.Timer(1, unit.rmdir).start()
    assert here("train")[0] == 0
    assert bed.idle()


@one_worker
def test_a_host_key_that_is_not_accepted_is_named(bed, here):
    bed.wrong(times=4, message="Host key verification failed.")
    assert_refused(here, "shows another host key than before")

    code, out, _ = here("status")
    assert code == 1
    assert "worker 0: worker 0 is unknown to ssh" in out


SYSTEMD_NEEDED = (
    "a run is a systemd unit, started as root or through sudo without a password; this host says: "
)


@one_worker
def test_a_host_that_systemd_has_not_booted_is_named(bed, here):
    (bed.remote / "systemctl").unlink()
    not_booted = "echo System has not been booted with systemd >&2; exit 1"
    write_programs(bed.remote, systemctl=not_booted)

    assert_refused(here, SYSTEMD_NEEDED + "System has not been booted")
    assert bed.idle()


@one_worker
def test_a_host_without_systemd_is_named(bed, here):
    leave_only_stand_ins(bed)
    (bed.remote / "systemctl").unlink()

    assert_refused(here, SYSTEMD_NEEDED + "no systemctl")
    assert bed.idle()


@one_worker
def test_a_host_without_python_is_named(bed, here):
    leave_only_stand_ins(bed)
    (bed.remote / "python3").unlink()

    assert_refused(here, "worker 0 has no python3")
    assert bed.idle()


@one_worker
def test_a_host_without_make_is_named(bed, here):
    leave_only_stand_ins(bed)

    code, out, err = here("train")
    assert code == 127, err
    assert "make could not be started on the worker: No such file" in out, err
    assert bed.idle()


@one_worker
def test_a_bundle_that_cannot_be_read_is_named(bed, here):
    assert here("train")[0] == 0
    (bed.zoo(0) / "bundle").unlink()
    (bed.zoo(0) / "bundle").mkdir()

    assert_refused(here, "worker 0: Is a directory: ")
    assert bed.idle()


# ---- a worker that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("bed", [3], indirect=True)
def test_a_failed_worker_restarts_all_without_a_client(bed):
    """It fails at step 20, and resumed from there at step 40. The exit code is found later."""
    (bed.project / "message").write_text("it broke\nFailed to get global TPU topology")
    args = "burst=1 fails=2 every=20 steps=100000 pause=0.05"
    client = bed.start("train", "--run", "one", "--retries", "1", args=args)
    wait(lambda: all(bed.starts()))
    client.kill()
    once = "the key of a fresh home is made once"
    assert "cannot be reached" not in client.err.read_text(), once
    wait(bed.idle)

    code, out, err = bed.run("logs")
    assert code == 3
    assert "starting again, retry 1 of 1" in bed.log(0)
    assert bed.starts() == [2, 2, 2]
    assert "start one at 20 with" in bed.log(2)
    assert min(bed.steps()) >= 20
    # The owner's log has the last lines of the worker that failed, and of no other.
    assert bed.log(0).count("[worker 2] ") == 2 * keeper.LAST_LINES
    assert bed.log(0).count("[worker ") == 2 * keeper.LAST_LINES
    assert "[worker 2] it broke" in out.splitlines()
    assert "worker 2 failed with exit code 3" in err
    assert "what this means: libtpu did not find the chips" in err


@pytest.mark.parametrize(
    "message, sentence",
    [
        (
            "RuntimeError: Failed to get global TPU topology.",
            "must be started on all workers",
        ),
        (
            "ABORTED: The TPU is already in use by process with pid 2718466.",
            "another process on this worker holds",
        ),
        (
            "open(/dev/vfio/0): Device or resource busy: Device or resource busy",
            "sudo lsof",
        ),
        (
            "FAILED: Couldn't open /dev/vfio/0: Device or resource busy",
            "another process on this worker holds",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33G of 15G",
            "a smaller --batch-size",
        ),
        (
            "error: CPython 3.11, 3.12 or 3.13 is needed, python3 is not it",
            "python3.11 python3.11-venv libpython3.11",
        ),
        (
            "ImportError: libpython3.12.so.1.0: cannot open shared object file",
            "install -y python3.12-venv libpython3.12`",
        ),
        (
            "ImportError: libpython3.11.so.1.0: Kann die Shared-Object-Datei nicht öffnen",
            "python3.11-venv libpython3.11`",
        ),
        (
            "INVALID_ARGUMENT: Invalid TPU external name: TPU7x",
            "TPU7x, which needs LIBTPU_VERSION=0.0.51",
        ),
        (
            "OSError: [Errno 28] No space left on device",
            "the disk of this worker is full",
        ),
        (
            "If you still get this message, run $ sudo rm /tmp/libtpu_lockfile",
            "perhaps another user's",
        ),
    ],
)
def test_a_known_message_is_explained(message, sentence):
    (said,) = messages.explain_log(f"a\n{message}\nb", 1)
    assert sentence in said


def test_a_known_exit_code_is_explained():
    (said,) = messages.explain_log("a\n137\nb", 137)
    assert "ran out of memory (not the TPU's)" in said


# ---- the keeper that owns a run decides --------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a worker's keeper tells the owner."""

    worker: int
    running: bool = False
    code: int | None = None  # the trainer's exit code
    stopped: bool = False  # the worker was told to stop


@dataclass(frozen=True)
class Decision:
    """What the owner orders in the end."""

    do: str
    code: int  # of the run
    grace: float  # seconds to save
    over: bool  # whether nothing more is waited for


JOINED = [Report(worker) for worker in range(3)]
RUNNING = [Report(worker, running=True) for worker in range(3)]
SAVED_0 = Report(0, code=143)
SAVED_2 = Report(2, code=143)
STOPPED_0 = Report(0, running=True, stopped=True)
STOPPED_1 = Report(1, running=True, stopped=True)
FAILED_1 = [*JOINED, *RUNNING, Report(1, code=3)]


@pytest.mark.parametrize(
    "events, decision",
    [
        pytest.param(
            [JOINED[0], JOINED[1], 310, JOINED[0]],
            Decision("leave", code=1, grace=10, over=False),
            id="one never joined",
        ),
        # There is no retry: its keeper is gone.
        pytest.param(
            [*JOINED, *RUNNING, 30, RUNNING[0], RUNNING[1], 15, RUNNING[0]],
            Decision("leave", code=1, grace=10, over=False),
            id="one is silent",
        ),
        pytest.param(
            [*JOINED, *RUNNING, Report(1, code=143)],
            Decision("leave", code=143, grace=60, over=False),
            id="a trainer itself was told to stop",
        ),
        pytest.param(
            [*JOINED, *RUNNING, STOPPED_1, 30, SAVED_0, SAVED_2, 15, SAVED_0],
            Decision("leave", code=143, grace=60, over=True),
            id="a machine shuts down and is never heard again",
        ),
        pytest.param(
            [*FAILED_1, SAVED_0, SAVED_2],
            Decision("run", code=0, grace=60, over=False),
            id="one failed: all start again",
        ),
        pytest.param(
            [*JOINED, *RUNNING, Report(1, code=2), SAVED_0, SAVED_2],
            Decision("leave", code=2, grace=10, over=True),
            id="an input to fix",
        ),
        # In the next two there is no retry any more.
        pytest.param(
            [*FAILED_1, STOPPED_0, Report(0, code=143, stopped=True), SAVED_2],
            Decision("leave", code=3, grace=10, over=True),
            id="a stop while the others are being ended for a retry",
        ),
        pytest.param(
            [*FAILED_1, 45, SAVED_0, SAVED_2],
            Decision("leave", code=3, grace=10, over=True),
            id="a silent worker while the others are being ended for a retry",
        ),
    ],
)
def test_the_owner_decides(monkeypatch, events, decision):
    """events: reports of three workers, or seconds that pass."""
    now = [0.0]
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    owner = keeper.Owner(3, 1, 60, "10.0.0.1 port 1", lambda *_: None)

    for event in events:
        if not isinstance(event, Report):
            now[0] += event
            continue
        report = {
            "attempt": owner.order["attempt"],
            "running": event.running,
            "code": event.code,
            "stopped": event.stopped,
            "tail": "",
            "incarnation": "",
        }
        owner.report(event.worker, report)

    order = owner.order
    assert Decision(order["do"], owner.code, order["grace"], owner.over) == decision


# ---- a TPU that is taken back, stops, Ctrl-C ---------------------------------------------------


def test_a_tpu_taken_back_ends_the_watch_and_the_run_saves(bed):
    client = bed.begin("--retries", "3")
    bed.set(state="PREEMPTED")
    # What the shutdown of worker 1 does; worker 0 is told.
    bed.kill(1, KEEPER, number=signal.SIGTERM)
    wait(bed.idle)
    bed.drop_connections(0)

    code, _, err = bed.ended(client)
    assert bed.saved(), err
    assert bed.starts() == [1, 1], err
    assert code in (75, 143)
    assert (RECREATE in err) == (code == 75)


def test_stop_reaches_each_worker_and_no_start_follows(bed, here):
    """One worker cannot be reached, the TPU's health is bad, and a client with RETRIES looks on."""
    client = bed.begin("--retries", "3")
    timed_out = "ssh: connect to host 34.0.0.1 port 22: Connection timed out"
    bed.wrong(worker=1, times=0, message=timed_out)
    bed.set(health="UNHEALTHY_MAINTENANCE")
    looks_on = bed.start("logs")  # from a client that cannot reach worker 1 either
    wait(lambda: "step" in looks_on.out.read_text())
    bed.interrupt(looks_on)

    bed.set(health="UNHEALTHY_TPU")
    code, _, err = here("stop", "--lost-after", "0.3")
    assert code == 1
    assert "worker 0: stopped and saved: one" in err
    not_reached = "worker 1 cannot be reached: ssh: connect to host 34.0.0.1 port 22"
    assert f"worker 1: not reached: {not_reached}" in err

    # Worker 0 told the other one, which had its whole time to save.
    wait(bed.idle)
    assert bed.saved()
    assert bed.starts() == [1, 1]

    bed.heal()
    code, _, err = bed.ended(client)
    assert code == 143
    assert "the run was stopped on worker 0" in err
    again = here("stop")[2]
    assert again.count("stopped and saved: one, exit code 143") == 2, "a moment ago"
    assert here("stop", "--run", "two")[2].count("nothing ran") == 2


@pytest.mark.parametrize("how", ["on its way", "unpacking"])
def test_a_start_is_refused_after_a_stop(bed, how):
    """The client is killed while worker 1 is being started, is slow, and a stop overtakes it: then
    nothing starts."""
    if how == "on its way":
        begun = bed.wrong(worker=1, match=" start ", late=2)
    else:
        begun = bed.zoo(1) / "tree/data/0"  # the first; the others take longer than to see it
        write_files({bed.project / f"data/{number}": str(number) for number in range(4000)})
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(begun.exists)
    unpacking = bed.kill(1, "\0start\0", number=signal.SIGSTOP)
    client.kill()

    stop = bed.start("stop")
    time.sleep(2.5)
    assert bool(unpacking) == (how == "unpacking")
    if unpacking:
        assert stop.poll() is None
    bed.kill(1, "\0start\0", number=signal.SIGCONT)

    code, _, err = bed.ended(stop)
    assert code == 0
    assert "worker 0: stopped before it trained: one" in err
    assert "worker 1: nothing ran" in err
    bed.check_idle(5, stays=1)
    assert bed.starts() == [0, 0], "worker 0 had waited for worker 1"


def test_ctrl_c_before_the_start_stops_no_other_run(bed):
    bed.begin()
    asking = bed.wrong(match=" status ", late=30)
    other = bed.start("train", args="steps=3")
    wait(asking.exists)

    assert "left; nothing was started" in bed.interrupt(other)
    assert bed.starts() == [1, 1]
    assert not bed.idle()
    bed.stop()


def test_a_second_ctrl_c_leaves_at_once_and_stop_kills_the_deaf(bed, here):
    client = bed.begin(args="deaf=1")
    client.send_signal(signal.SIGINT)
    wait(lambda: all((bed.home(worker) / "unit/stop").exists() for worker in range(2)))

    begun = time.monotonic()
    err = bed.interrupt(client)
    assert time.monotonic() - begun < 3
    assert "the run may go on: make stop TPU=my-tpu ZONE=us-east5-b ends it" in err

    begun = time.monotonic()
    code, _, err = here("stop", "--grace", "1")
    assert code == 0
    assert "worker 1: stopped unsaved: one, exit code 137" in err
    asked_for = "not the 20 s that the first Ctrl-C had asked for"
    assert time.monotonic() - begun < 12, asked_for
    wait(bed.idle)


# ---- what tests/test_pods.py has, too ----------------------------------------------------------


@one_worker
def test_a_detached_run_is_watched(bed, here):
    scenarios.check_a_detached_run_is_watched(bed, here)


@one_worker
def test_the_same_command_attaches(bed, here):
    scenarios.check_the_same_command_attaches(bed, here)


@one_worker
def test_a_killed_keeper_takes_its_trainer_with_it(bed, here):
    scenarios.check_a_killed_keeper_takes_its_trainer_with_it(bed, here)


def test_launchers_killed_while_they_start_are_one_run(bed):
    scenarios.check_launchers_killed_while_they_start_are_one_run(bed)


def test_launchers_at_once_are_one_run(bed):
    scenarios.check_launchers_at_once_are_one_run(bed)


def test_ssh_hosts_are_a_tpu(bed):
    scenarios.check_ssh_hosts_are_a_tpu(bed)


def test_ssh_hosts_resume(bed):
    scenarios.check_ssh_hosts_resume(bed)


# ---- the project's own Makefile and programs ---------------------------------------------------


@pytest.mark.slow
@one_worker
def test_a_model_of_this_repository_is_trained(bed):
    """The real bundle, `make train` with its real Makefile, on XLA's CPU. What is installed here
    serves for it."""
    if not (ROOT / ".venv/.installed").exists():
        pytest.skip("needs the environment that make install makes")
    bed.project = ROOT
    tree = bed.zoo(0) / "tree"
    (tree / ".venv").mkdir(parents=True)
    for path in (ROOT / ".venv").iterdir():
        if path.name != ".installed":
            (tree / ".venv" / path.name).symlink_to(path)
    # Equal files are not written again, so the stamp stays newer than they are, and make installs
    # nothing.
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tree)
    (tree / ".venv/.installed").touch()

    settings = "OMP_NUM_THREADS=1 CPU_NUM_DEVICES=1 PIP_NO_INDEX=1"
    words = ("--run", "trial", "--env", settings, "--", "MODEL=dlrm", "PRESET=tiny")
    code, out, err = bed.ended(bed.start("train", *words), 600)
    assert code == 0, out[-3000:] + err
    assert "pip install" not in out
    assert out.count("trial")
    assert bed.idle()
    assert (tree / "runs/trial/export").is_dir()
    assert json.loads((tree / "runs/trial/summary.json").read_text())

    again = "finished: the same command trains nothing more"
    assert bed.run("train", *words)[0] == 0, again


PROGRAMS = [*sorted((ROOT / "tpu/launch").glob("*.py")), ROOT / "tpu/doctor.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_need_no_newer_python_and_no_package(path):
    """The workers' own Python may be 3.8, this machine's 3.9; doctor runs before anything is
    installed."""
    on_workers = path.name in ("worker.py", "keeper.py")
    tree = ast.parse(path.read_text(), feature_version=(3, 8) if on_workers else (3, 9))

    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            packages.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)

    ours = set() if on_workers else {"errors", "tpu"}
    assert packages - ours <= {"__future__", *sys.stdlib_module_names}


@pytest.mark.parametrize("program", ["tpu.launch", "tpu.doctor"])
def test_the_programs_start_without_any_package(program):
    command = [PYTHON, "-S", "-m", program, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--tpu" in result.stdout, result.stderr
