"""tpu/entry.py, a container's first process: it hands signals on and ends as the trainer does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_bed import ROOT, send, wait

from tpu.launch.keeper import STOPPED
from train.common.watch.stall import EXIT_CODE as HUNG

INPUT = 2  # the exit code of an input to fix
ENTRY = [sys.executable, "-m", "tpu.entry"]
# Without what the make that runs these tests says to others.
FROM_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")
BARE = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
ENVIRONMENT = BARE | {"PYTHONPATH": str(ROOT)}


# ---- exit codes --------------------------------------------------------------------------------


SAVES = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print("saved"), sys.exit(143)))
print("step", flush=True)
time.sleep(9)
"""
# Killed, while a process that it has started, in a session of its own, holds its standard error
# open.
KILLED = "sh -c 'setsid sleep 60 & kill -9 $$$$'"


def start(folder: Path, trainer: str) -> subprocess.Popen:
    """Starts the entry over a Makefile with this command line for a trainer.

    Its output goes to the files `out` and `err`.
    """
    recipe = f"echo $(MODEL) >&2; sh {ROOT}/tpu/exit_code.sh {trainer}"
    (folder / "Makefile").write_text(f"train:\n\t@{recipe}\n")
    with (folder / "out").open("w") as stdout, (folder / "err").open("w") as stderr:
        return subprocess.Popen(
            [*ENTRY, "MODEL=a b"], cwd=folder, env=ENVIRONMENT, stdout=stdout, stderr=stderr
        )


@pytest.mark.parametrize("code", [0, INPUT, HUNG, 137])
def test_the_entry_ends_as_the_trainer_does(code, tmp_path):
    trainer = KILLED if code == 137 else f"sh -c 'exit {code}'"
    entry = start(tmp_path, trainer)

    assert entry.wait(timeout=30) == code
    assert (tmp_path / "err").read_text().startswith("a b\n")
    assert "saved\n" not in (tmp_path / "out").read_text()


def test_the_entry_hands_sigterm_to_a_trainer_which_saves(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    entry = start(tmp_path, f"{sys.executable} saves.py")
    out = tmp_path / "out"
    wait(lambda: out.read_text() == "step\n")
    entry.terminate()

    assert entry.wait(timeout=30) == STOPPED
    assert (tmp_path / "err").read_text().startswith("a b\n")
    assert "saved\n" in out.read_text()


SIGTERM_AS_MAKE_STARTS = """
import os, subprocess
from tpu import entry

start = subprocess.Popen


def start_and_terminate(*arguments, **options):
    process = start(*arguments, **options)
    os.kill(os.getpid(), 15)
    return process


subprocess.Popen = start_and_terminate
raise SystemExit(entry.main())
"""


def test_a_sigterm_as_make_starts_is_not_lost(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    program = f"sh {ROOT}/tpu/exit_code.sh {sys.executable} saves.py"
    (tmp_path / "Makefile").write_text(f"train:\n\t@echo $(MODEL) >&2; {program}\n")

    command = [sys.executable, "-c", SIGTERM_AS_MAKE_STARTS]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=8)
    assert result.returncode == STOPPED


def test_an_entry_without_make_is_an_input_to_fix(tmp_path):
    """A crash would be started again a thousand times."""
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}

    command = [*ENTRY, "MODEL=bert"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2, result
    cause = "error: make cannot be started: No such file"
    assert result.stderr.startswith(cause), result


# ---- as process 1 ------------------------------------------------------------------------------


SAVES_SLOWLY = """import os, signal, sys, time
def save(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("step", flush=True)
time.sleep(20)
"""


def children(pid: int, thread: int) -> set[int]:
    """Returns the processes that a thread of a process has started."""
    return set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))


def descendants(processes: set[int]) -> set[int]:
    """Returns these processes and all that they have started, directly or not."""
    found = set(processes)
    while True:
        more = set()
        for pid in found:
            more |= children(pid, pid)
        if more <= found:
            return found
        found |= more


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of processes")
@pytest.mark.parametrize("shell", ["sh {root}/tpu/exit_code.sh ", "true; "])
def test_as_process_1_a_signal_to_all_lets_the_trainer_save(shell, tmp_path):
    """As `kill -TERM -1` in the container, twice."""
    (tmp_path / "saves.py").write_text(SAVES_SLOWLY)
    trainer = f"{shell.format(root=ROOT)}{sys.executable} -I -S saves.py"
    (tmp_path / "Makefile").write_text(f"train:\n\t@{trainer}\n")
    out = tmp_path / "out"
    command = ["unshare", "--pid", "--fork", "--mount-proc", *ENTRY, "MODEL=bert"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with out.open("w") as stdout:
        entry = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=stdout)
    wait(lambda: out.read_text() == "step\n")

    (thread,) = map(int, os.listdir(f"/proc/{entry.pid}/task"))
    process_1 = children(entry.pid, thread)
    send(signal.SIGTERM, descendants(process_1))
    time.sleep(0.3)
    send(signal.SIGTERM, process_1)

    code = entry.wait(timeout=20)
    assert "saved" in out.read_text()
    if shell != "true; ":  # there no program says how the trainer ended
        assert code == 143
