"""tpu/launch over tests/fake_gcloud.py and tests/fake_systemd.py: see tests/launch_bed.py.

Over the same stand-ins: test_launch_bundle.py (what is sent), test_launch_refusals.py,
test_launch_end.py (how runs end), test_launch_log.py, test_launch_client.py (the user's machine),
test_launch_network.py, and test_launch_gcloud.py, which has the real gcloud. tests/test_pods.py has
workers with a real systemd and sshd.
"""

import ast
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import launch_scenarios as scenarios
import pytest
from launch_bed import (
    FOREVER,
    KEEPER,
    PYTHON,
    RECREATE,
    ROOT,
    git,
    one_worker,
    wait,
    write_files,
)

from tpu.launch import keeper, messages, workers

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
def test_a_run_is_told_of_which_version_its_files_are(bed):
    """Its worker has no repository."""
    program = bed.project / "train.py"
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(bed.project, *user, "commit", "--allow-empty", "-m", "first")
    git(bed.project, "tag", "v1.2")
    with program.open("a") as file:
        file.write("print('git is', os.environ.get('XLA_ZOO_GIT'))\n")

    code, out, err = bed.run("train")

    assert code == 0, err
    (said,) = re.findall(r"git is (\{.*\})", out)
    told = json.loads(said)
    assert told["version"] == "v1.2-dirty"
    assert told["dirty"] is True
    assert len(told["commit"]) == 40


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


# ---- a TPU that is taken back, lost connections, stops, Ctrl-C -----------------------------------


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


def test_stop_reaches_each_worker_and_no_start_follows(bed, here):
    """One worker cannot be reached, the TPU's health is bad, and a client with RETRIES watches."""
    client = bed.begin("--retries", "3")
    timed_out = "ssh: connect to host 34.0.0.1 port 22: Connection timed out"
    bed.wrong(worker=1, times=0, message=timed_out)
    bed.set(health="UNHEALTHY_MAINTENANCE")
    onlooker = bed.start("logs")  # from a client that cannot reach worker 1 either
    wait(lambda: "step" in onlooker.out.read_text())
    bed.interrupt(onlooker)

    bed.set(health="UNHEALTHY_TPU")
    code, _, err = here("stop", "--lost-after", "0.3")
    assert code == 1
    assert "worker 0: stopped and saved: one" in err
    reason = timed_out.removesuffix(": Connection timed out")
    assert f"worker 1: not reached: worker 1 cannot be reached: {reason}" in err

    # Worker 0 told the other one, which had its whole time to save.
    wait(bed.idle)
    assert bed.saved()
    assert bed.starts() == [1, 1]

    bed.heal()
    code, _, err = bed.ended(client)
    assert code == 143
    assert "the run was stopped on worker 0" in err

    # A second stop says what the first one did.
    _, _, err = here("stop")
    assert err.count("stopped and saved: one, exit code 143") == 2
    _, _, err = here("stop", "--run", "two")
    assert err.count("nothing ran") == 2


@pytest.mark.parametrize("how", [pytest.param("on its way", marks=pytest.mark.slow), "unpacking"])
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
    bed.check_idle(20, stays=1)
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


@pytest.mark.slow  # so does a TPU of gcloud's, and test_ssh_hosts_are_a_tpu has these
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
