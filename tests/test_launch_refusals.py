"""What tpu/launch refuses, waits for or asks again, and what it tells the user to do.

Over the stand-ins of tests/launch_bed.py.
"""

import re
import shlex
import threading

import pytest
from launch_bed import RECREATE, Bed, one_worker, write_programs
from launch_scenarios import Here

from tpu.launch import launcher, workers

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
    ("train --env MEGASCALE_NUM_SLICES=2", "MEGASCALE_NUM_SLICES in ENV would be the same on all"),
    ("train --secret NOT_SET", "--secret NOT_SET: this variable is not set here"),
    ("train --grace nan", "--grace nan is not a time to save: give 0 to 86400 seconds"),
    ("stop --grace=-5", "--grace -5 is not a time to save"),
    ("train --tpu My_Tpu", "is not the name of a TPU VM"),
    ("train --tpu local", "TPU=local is this machine"),
    ("train --tpu my-tpu-0,my-tpu-1", "names several TPUs, and a run of the launcher is on one"),
    ("stop --tpu my-tpu-0,my-tpu-1", "several slices train together on GKE, by tpu/jobset.yaml"),
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
        {"node": {"multisliceNode": True, **QUEUED}},
        "my-tpu is one of several slices, .* run of the launcher is on one;"
        " recreate it: .* delete wish --force.* without --node-count, .*tpu/jobset.yaml",
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


# ---- a worker that will never work is not tried again ------------------------------------------


def assert_refused(here: Here, sentence: str) -> None:
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
