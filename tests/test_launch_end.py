"""How a run of tpu/launch ends, how stop ends it, and what is said of its end.

Over the stand-ins of tests/launch_bed.py; what a real systemd does stands in tests/test_pods.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_bed import FOREVER, MAKEFILE, ROOT, one_worker, wait, write_programs

from tpu.launch import keeper, launcher, worker, workers

# ---- saved or not ------------------------------------------------------------------------------


@one_worker
def test_a_failed_save_is_not_called_saved(bed, here):
    client = bed.begin(args="unsaveable=1")

    code, _, err = here("stop")
    assert code == 0
    assert "worker 0: stopped unsaved: one, exit code 1" in err

    code, _, err = bed.ended(client)
    assert code == 1
    assert "worker 0 did not save: exit code 1" in err


@one_worker
def test_sigterm_to_the_whole_unit_tells_of_the_save_as_it_was(bed):
    """`systemctl kill` sends it to make and its shells, too, which then do not say how the trainer
    ended."""
    client = bed.begin(args="unsaveable=1 saving=1")
    bed.kill(0, number=signal.SIGTERM)
    code, _, err = bed.ended(client)
    assert code == 1
    assert "worker 0 did not save: exit code 1" in err
    wait(bed.idle)

    bed.begin(args="saving=1")
    bed.kill(0, number=signal.SIGTERM)
    wait(bed.idle)
    assert bed.saved()


@one_worker
def test_a_trainer_killed_after_its_grace_was_not_out_of_memory(bed):
    client = bed.begin(args="deaf=1")
    bed.stop(0, "--grace", "1")

    code, _, err = bed.ended(client)
    assert code == 137
    assert "it did not end in its time to save, and was killed" in err
    assert "out of memory" not in err


def test_memory_of_an_earlier_attempt_is_not_said_again(tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert keeper.memory_kills(tmp_path) == 2

    events.write_text("low 0\noom_kill 0\n")
    assert keeper.memory_kills(tmp_path) == 0
    assert keeper.memory_kills(tmp_path / "none") == 0


def test_a_keeper_that_nothing_stops_ends_a_deaf_trainer_itself(monkeypatch):
    """SIGTERM came by `systemctl kill`, or from anybody."""
    monkeypatch.setattr(keeper, "NOT_STOPPED", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-I", "-S", "-c", deaf]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()

    own = keeper.Keeper.__new__(keeper.Keeper)
    own.process = process
    own.stopped = True
    own.asked = False
    own.killed_at = 0.0
    own.order = {"grace": 0}

    def ended() -> bool:
        own.end()
        return process.poll() is not None

    wait(ended, 5)
    process.stdout.close()


# ---- before the trainer began ------------------------------------------------------------------


INSTALLING = "python3 -I -S -c 'import time; time.sleep(100)'"


@one_worker
def test_a_stop_during_the_installation_saves_nothing(bed, here):
    (bed.project / "Makefile").write_text(f"train:\n\t@{INSTALLING}\n")
    client = bed.start("train", "--run", "one")
    wait(lambda: bed.processes(0, "time.sleep(100)"))

    err = here("stop")[2]
    assert "worker 0: stopped before it trained: one" in err
    assert "saved" not in err
    assert bed.ended(client)[0] == 143
    assert bed.idle()


@one_worker
def test_no_training_follows_a_step_of_make_that_a_stop_ended(bed, here):
    """make ignores the failure of such a step, as the look for a Python is one."""
    ignored = f"train:\n\t@{INSTALLING} || true\n"
    (bed.project / "Makefile").write_text(MAKEFILE.replace("train:\n", ignored))
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(lambda: bed.processes(0, "time.sleep(100)"))

    begun = time.monotonic()
    err = here("stop")[2]
    assert "worker 0: stopped before it trained: one" in err, err
    assert time.monotonic() - begun < 10, err
    assert bed.ended(client)[0] == 143
    assert bed.starts() == [0]


@one_worker
def test_a_failed_installation_is_tried_again(bed):
    """pip ends with 2 after a stalled download, as make does after every failure: that is no input
    to fix."""
    fails_once = "\t@[ -e $$HOME/tried ] || { touch $$HOME/tried; exit 2; }\n"
    (bed.project / "Makefile").write_text(MAKEFILE.replace("train:\n", "train:\n" + fails_once))

    code, out, err = bed.run("train", "--run", "one", "--retries", "1")
    assert code == 0, err
    failed = "worker 0 failed before its trainer began, or beside it with exit code 1"
    assert failed in out, err
    assert "starting again, retry 1 of 1" in out
    assert bed.starts() == [1]


@one_worker
def test_an_input_to_fix_is_not_tried_again(bed):
    (bed.project / "train.py").write_text("raise SystemExit(2)")

    code, out, _ = bed.run("train", "--run", "one", "--retries", "5")
    assert code == 2
    assert "retry" not in out


# ---- the exit code that the trainer's shell records --------------------------------------------


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
def test_the_exit_code_is_the_programs_and_not_makes(ends, code, language, tmp_path):
    program = ROOT / "tpu/exit_code.sh"
    (tmp_path / "Makefile").write_text(f"train:\n\t@sh {program} sh -c '{ends}'\n")
    recorded = tmp_path / "code"
    environment = {
        "PATH": os.environ["PATH"],
        "LC_ALL": language,
        "XLA_ZOO_EXIT_CODE": str(recorded),
    }

    result = subprocess.run(["make"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == (2 if code else 0)
    assert keeper.exit_code(result.returncode, recorded) == code


def test_a_failure_before_the_trainer_is_no_input_to_fix(tmp_path):
    """pip's own exit code is 2, too, and so is make's for every failure."""
    none = tmp_path / "none"
    assert keeper.UNKNOWN == 1
    assert keeper.exit_code(2, none) == keeper.UNKNOWN
    assert keeper.exit_code(-9, none) == 137
    assert keeper.exit_code(0, none) == 0


@pytest.mark.parametrize("content", [b"", b"rubbish\n", b"\xff\xfe"])
def test_an_exit_code_that_cannot_be_read_is_not_the_trainers(content, tmp_path):
    """As a full /run leaves it."""
    recorded = tmp_path / "code"
    recorded.write_bytes(content)

    assert keeper.read_code(recorded) is None
    assert keeper.exit_code(2, recorded) == keeper.UNKNOWN


@one_worker
def test_an_exit_code_that_cannot_be_written_is_no_failed_save(bed, here):
    makefile = MAKEFILE.replace("\t@", "\t@mkdir $(XLA_ZOO_EXIT_CODE); ")
    (bed.project / "Makefile").write_text(makefile)
    client = bed.begin()

    err = here("stop")[2]
    assert "unsaved" not in err
    assert "or its Makefile records no exit code" in err
    assert bed.ended(client)[0] == 143
    assert bed.saved()


@one_worker
def test_a_makefile_that_records_no_exit_code_is_named(bed, here):
    """It is not said to have trained nothing. Users copy the project's Makefile."""
    (bed.project / "Makefile").write_text(MAKEFILE.replace("exec sh exit_code.sh ", ""))
    client = bed.begin()

    err = here("stop")[2]
    no_code = "its Makefile records no exit code (tpu/exit_code.sh)"
    assert f"stopped before it trained: one, or {no_code}" in err, err
    assert bed.ended(client)[0] == 143
    assert bed.saved()


# ---- restarts ----------------------------------------------------------------------------------


@one_worker
def test_a_unit_that_is_restarted_has_stopped_and_saved(bed, here):
    """As needrestart restarts services after an upgrade."""
    client = bed.begin("--retries", "3")
    (bed.home(0) / "unit/restart").touch()

    code, _, err = bed.ended(client)
    assert code == 143
    assert "the run was stopped on worker 0" in err
    wait(bed.idle)
    assert bed.saved()
    assert bed.starts() == [1]
    assert not (bed.home(0) / "failed").exists()
    assert here("status")[1].count("one exit code 143") == 1

    bed.begin()


def test_a_worker_that_comes_back_is_lost_to_the_attempt(bed):
    """It reboots faster than silence is noticed, and a client that attaches starts it again
    there."""
    client = bed.begin(args="workers=2")
    bed.restart(1)
    attached = bed.start("train", "--run", "one", args=f"{FOREVER} workers=2")

    code, _, err = bed.ended(client)
    assert code == 1
    assert "worker 1 was restarted: what it trained is gone" in err
    assert bed.ended(attached)[0] != 0
    bed.check_idle(20)


def test_an_owner_tells_a_new_keeper_of_a_worker_to_leave():
    owner = keeper.Owner(2, 3, 60, "10.0.0.1 port 1", lambda *_: None)
    report = {"attempt": 0, "running": False, "code": None, "stopped": False, "tail": ""}
    owner.report(0, {**report, "incarnation": "a"})
    owner.report(1, {**report, "incarnation": "b"})

    assert owner.report(1, {**report, "incarnation": "c"})["do"] == "leave"
    assert owner.report(0, {**report, "incarnation": "a"})["do"] == "leave"
    assert owner.code == 1


@pytest.mark.parametrize("rule", ["a folder", "read-only"])
def test_a_rule_for_needrestart_that_cannot_be_written_is_a_note(
    rule, tmp_path, monkeypatch, capfd
):
    """It keeps no run from starting."""
    monkeypatch.setattr(worker, "NEEDRESTART", tmp_path / "conf.d")
    monkeypatch.setattr(worker, "RUNTIME", tmp_path)
    monkeypatch.setattr(worker, "ROOT", [])
    (tmp_path / "conf.d").mkdir()
    if rule == "a folder":
        (tmp_path / "conf.d/xla-zoo.conf").mkdir()
    fails = "echo 'install: cannot create: Read-only file system' >&2; exit 1;"
    write_programs(tmp_path / "bin", install=fails)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    worker.spare_from_needrestart()
    (answer,) = [line for line in capfd.readouterr().out.splitlines() if line]
    note = json.loads(answer[9:])["note"]
    assert note.startswith("needrestart may restart the run"), note
    assert "systemd unit" not in note, note


# ---- stop waits for nothing --------------------------------------------------------------------


@one_worker
def test_a_start_that_hangs_does_not_hold_up_a_stop(bed, here):
    real = (bed.remote / "systemd-run").rename(bed.remote / "real-run")
    # It comes through in the end: the run must not train, since a stop was there before.
    hangs = f"while [ -e {bed.folder}/hangs ]; do sleep 0.2; done; {real}"
    write_programs(bed.remote, **{"systemd-run": hangs})
    (bed.folder / "hangs").touch()
    client = bed.start("train", "--run", "one", args=FOREVER)
    wait(lambda: bed.processes(0, "systemd-run"))

    begun = time.monotonic()
    code, _, err = here("stop")
    assert code == 0, err
    assert "nothing ran" in err, err
    assert time.monotonic() - begun < 15, err

    (bed.folder / "hangs").unlink()
    assert bed.ended(client)[0] in (1, 143)
    bed.check_idle(20)
    assert bed.starts() == [0]


def test_sixteen_dead_workers_do_not_hold_up_a_stop(monkeypatch, capsys):
    launch = launcher.Launcher(launcher.read_options(["stop", "--tpu", "my-tpu"]))
    launch.workers.count = 20
    dead = threading.Event()
    answered = []

    def call(number: int, action: str, **arguments: object) -> dict:
        if number < 16:
            dead.wait(20)
            raise workers.WorkerLost("dead")
        answered.append(number)
        return {"state": "idle"}

    monkeypatch.setattr(launch.workers, "call", call)
    stopping = threading.Thread(target=launch.stop_all, args=("",))
    stopping.start()
    wait(lambda: len(answered) == 4, 5)

    dead.set()
    stopping.join()
    assert capsys.readouterr().err.count("not reached: dead") == 16


def test_ctrl_c_in_a_stop_still_lists_what_it_knows(monkeypatch, capsys):
    launch = launcher.Launcher(launcher.read_options(["stop", "--tpu", "my-tpu"]))
    launch.workers.count = 2
    never = threading.Event()

    def call(number: int, action: str, **arguments: object) -> dict:
        if number:
            never.wait(20)
        return {"state": "idle"}

    monkeypatch.setattr(launch.workers, "call", call)
    ctrl_c = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        launch.stop_all("")
    never.set()

    err = capsys.readouterr().err
    assert "worker 0: nothing ran" in err
    assert "no answer yet from worker 1" in err


# ---- stop and the runs of others ---------------------------------------------------------------


@one_worker
def test_another_users_run_has_its_whole_time_to_save(bed, here):
    """Its record, where its time to save stands, cannot be read by others."""
    bed.begin("--detach", args="saving=4")
    record = bed.home(0) / "run/start.json"
    record.rename(record.with_name("theirs"))

    code, _, err = here("stop", "--grace", "0.1")
    assert code == 0, err
    unknown = "a run of another user; what its trainer did is not known"
    assert f"stopped: {unknown}" in err, err
    assert "--force kills it" in err, err
    assert bed.saved(), "killed while it saved"


@one_worker
def test_force_kills_another_users_run(bed, here):
    bed.begin("--detach", args="deaf=1")
    record = bed.home(0) / "run/start.json"
    record.rename(record.with_name("theirs"))

    begun = time.monotonic()
    assert here("stop", "--grace", "0.1", "--force")[0] == 0
    assert time.monotonic() - begun < 15
    bed.check_idle(20)


@one_worker
def test_a_run_of_an_older_launcher_is_named(bed, here):
    """Its record has no folder and no address; it is stopped as any other."""
    client = bed.begin("--detach")
    assert bed.ended(client)[0] == 0
    record = bed.home(0) / "run/start.json"
    start = json.loads(record.read_text())
    del start["address"]
    del start["folder"]
    record.write_text(json.dumps(start))

    for action, args in ((("train", "--run", "one"), FOREVER), (("logs",), "")):
        code, _, err = here(*action, args=args)
        assert code == 2, err
        assert "was started by another version of the launcher" in err, err
        assert "make stop" in err, err
    assert here("stop")[0] == 0


# ---- records of what has ended -----------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch) -> Path:
    """The keeper's folder in memory."""
    monkeypatch.setattr(keeper, "RUNTIME", tmp_path)
    return tmp_path


def test_a_full_run_folder_leaves_a_record_and_no_variables(runtime, monkeypatch):
    start = {
        "token": "t",
        "run": "one",
        "environment": {"HF_TOKEN": "x"},
        "code": 143,
        "trainer": 143,
        "apart": False,
    }
    (runtime / "start.json").write_text(json.dumps(start))
    real = keeper.write_json

    def full(path: Path, value: object) -> None:
        if (runtime / "start.json").exists():
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(keeper, "write_json", full)
    keeper.ended()

    assert not (runtime / "start.json").exists()
    (record,) = json.loads((runtime / "ended.json").read_text())
    assert record["code"] == 143
    assert not record["environment"]


def test_a_damaged_record_of_ends_costs_only_itself(runtime):
    """It found no room."""
    start = {"token": "t", "run": "one", "environment": {"HF_TOKEN": "x"}}
    (runtime / "start.json").write_text(json.dumps(start))
    (runtime / "ended.json").write_text('[{"tok')

    keeper.ended()
    (record,) = json.loads((runtime / "ended.json").read_text())
    assert record["run"] == "one"
    assert not (runtime / "start.json").exists()


@one_worker
def test_a_clock_that_is_set_back_makes_no_old_end_a_new_one(bed, here):
    client = bed.begin()
    assert "stopped and saved" in here("stop")[2]
    bed.ended(client)

    path = bed.home(0) / "run/ended.json"
    (record,) = json.loads(path.read_text())
    record["ended"] += 86400
    path.write_text(json.dumps([record]))
    assert "worker 0: nothing ran" in here("stop")[2]
