"""The client of tpu/launch on a machine where something is missing, full, slow, or ends it.

Over the stand-ins of tests/launch_bed.py.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
from launch_bed import FOREVER, ROOT, one_worker, wait

from tpu.launch import hosts, launcher, workers

LAUNCHER = [sys.executable, "-I", "-S", f"{ROOT}/tpu/launch/launcher.py"]


# ---- a client that ends ------------------------------------------------------------------------


@one_worker
def test_a_client_whose_terminal_is_gone_leaves_the_run_alone(bed):
    client = bed.begin()
    client.send_signal(signal.SIGHUP)
    code, _, _ = bed.ended(client)
    assert code == 129
    assert not bed.idle()

    attached = bed.start("train", "--run", "one", args=FOREVER)
    said = "attached; Ctrl-C stops one on all workers (make logs TPU=my-tpu"
    wait(lambda: said in attached.err.read_text())
    attached.send_signal(signal.SIGHUP)
    attached.wait(60)
    assert not bed.idle()
    bed.stop()


@one_worker
def test_a_client_without_room_for_the_log_leaves_the_run_alone(bed):
    bed.begin("--detach")
    environment = {"PATH": str(bed.bin), "HOME": str(bed.client_home)}

    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*LAUNCHER, *bed.arguments("logs")],
            cwd=bed.project,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    full_disk = "standard output takes nothing more: No space left on device"
    assert f"{full_disk}; one continues" in result.stderr
    assert not bed.idle()
    bed.stop()


@one_worker
def test_sigterm_ends_the_client_with_a_word_and_not_the_run(bed):
    """143 would say that the run was stopped."""
    client = bed.begin()
    wait(lambda: "step" in client.out.read_text())  # it watches; trainers may be quicker
    client.terminate()

    code, _, err = bed.ended(client)
    assert code == 129
    assert "one continues on the TPU; make logs TPU=my-tpu" in err
    assert not bed.idle()
    bed.stop()


def test_a_third_ctrl_c_does_not_say_that_nothing_was_started(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "train", "--tpu", "my-tpu"])

    def train(launch: launcher.Launcher) -> int:
        launch.run = "one"
        launch.begun = True
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.Launcher, "train", train)
    assert launcher.main() == 130
    err = capsys.readouterr().err
    assert "nothing was started" not in err
    assert "make stop TPU=my-tpu ends it" in err


# ---- a machine that lacks something ------------------------------------------------------------


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&-", ">&-"])
@one_worker
def test_a_client_without_its_streams_does_what_it_is_asked(streams, bed):
    """As cron and some supervisors start programs."""
    words = shlex.join([*LAUNCHER, *bed.arguments("train")])
    result = subprocess.run(
        ["/bin/sh", "-c", f"exec {words} {streams}"],
        cwd=bed.project,
        env={"PATH": f"{bed.bin}", "HOME": str(bed.client_home)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert bed.starts() == [1]


@pytest.mark.parametrize(
    "program, arguments", [("git", ["train"]), ("ssh", ["status", "--tpu", "ssh:worker-0"])]
)
def test_a_program_that_is_missing_here_is_named(program, arguments, bed, here):
    (bed.bin / program).unlink()

    code, out, err = here(*arguments)
    assert code != 0, err
    assert f"{program} is not installed here" in out + err, err
    assert "Traceback" not in err, err


# ---- what takes long ---------------------------------------------------------------------------


def test_workers_that_take_long_are_named_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(workers, "PROGRESS_EVERY", 0.1)
    ready = threading.Event()
    threading.Timer(0.5, ready.set).start()

    def copy(number: int) -> bool:
        return number == 7 or ready.wait(5)

    workers.parallel(copy, range(8), "copying", 0, progress=lambda: ", 3 MB")
    err = capsys.readouterr().err
    assert "[launch] copying: workers 0, 1, 2, 3, 4 and 2 others, " in err
    assert ", 3 MB" in err


def test_a_question_that_takes_long_is_said_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(workers, "PROGRESS_EVERY", 0.1)

    workers.patient(lambda: time.sleep(0.4), "asking about my-tpu")
    assert "[launch] asking about my-tpu, 0 s" in capsys.readouterr().err


def test_input_is_sent_without_a_copy_for_each_worker(tmp_path):
    data = bytes(32 << 20)
    three = workers.Workers(hosts.TpuVm("my-tpu"), 1)

    tracemalloc.start()
    for number in range(3):
        with open(os.devnull, "wb") as sink:
            process = type("Process", (), {"stdin": sink})
            three.feed(number, process, data)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    assert three.sent == dict.fromkeys(range(3), len(data))
    tracemalloc.stop()


# ---- commands to repeat ------------------------------------------------------------------------


def test_commands_to_repeat_carry_the_flags_for_gcloud(bed, here):
    internal_ip = "--gcloud-flag=--internal-ip"
    ssh_flag = "--gcloud-flag=--ssh-flag=-oA=b"
    code, _, err = here("logs", internal_ip)
    assert code == 2
    assert f"make status TPU=my-tpu ZONE=us-east5-b LAUNCH_ARGS={internal_ip}" in err

    options = launcher.read_options(["logs", "--tpu", "my-tpu", internal_ip, ssh_flag])
    launch = launcher.Launcher(options)
    assert f"{internal_ip} {ssh_flag}" in launch.make("logs")
    assert launch.host.fetch("runs/one").endswith("--worker=0 --internal-ip --scp-flag=-oA=b")
