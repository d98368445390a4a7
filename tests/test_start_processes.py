"""train/common/start_processes.py, with small programs for the scripts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.common import start_processes

ROOT = Path(__file__).parent.parent
# Notes its place and what it gets. Of the last process: ends by sys.argv[1], if that is a number.
PROGRAM = """
import os, signal, sys, time

rank = os.environ.get("RANK", "alone")
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
open(f"{os.environ['FOLDER']}/{rank}", "w").write(os.environ.get("WORLD_SIZE", "none"))
if sys.argv[1] == "wait":
    while not received:
        time.sleep(0.05)
    time.sleep(1)  # it saves
    open(f"{os.environ['FOLDER']}/{rank}", "w").write(f"saved after {len(received)}")
    sys.exit(143)
if sys.argv[1] == "full":
    while not received:
        time.sleep(0.05)
    if rank == "1":
        sys.exit(2)  # it cannot save
    while True:  # for the other one's part
        time.sleep(1)
if rank in ("alone", "2"):
    sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    while not received:  # for the other one, as in a collective
        time.sleep(0.05)
    sys.exit(1)
"""
# The same with fewer seconds, after which it kills.
STARTER = """
import sys
from train.common import start_processes

start_processes.SECONDS_TO_END = int(sys.argv[1])
start_processes.main(sys.argv[2:])
"""


@pytest.fixture
def begin(tmp_path):
    """begin("3", "wait") starts the program in 3 processes; those that still run are ended."""
    (tmp_path / "small_program.py").write_text(PROGRAM)
    begun = []

    def start(count: str, argument: str, seconds: int = 0) -> subprocess.Popen:
        environment = {**os.environ, "FOLDER": str(tmp_path)}
        environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"
        command = ["-m", start_processes.__name__, count, "small_program", argument]
        if seconds:
            command[:2] = ["-c", STARTER, str(seconds)]
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()


def wait_for(folder: Path, ranks: str) -> None:
    """Waits until these processes have noted their places: they answer signals then."""
    deadline = time.monotonic() + 60
    while not all((folder / rank).exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def noted(folder: Path, *ranks: str) -> list[str]:
    return [(folder / rank).read_text() for rank in ranks]


def test_each_process_has_its_place(begin, tmp_path):
    process = begin("3", "0")
    assert process.wait(60) == 0
    assert noted(tmp_path, "0", "1", "2") == ["3", "3", "3"]
    assert process.stderr.read() == ""


def test_one_process_is_the_script_itself(begin, tmp_path):
    assert begin("1", "5").wait(60) == 5
    assert noted(tmp_path, "alone") == ["none"]


def test_the_first_that_fails_ends_the_others_and_gives_its_code(begin):
    assert begin("3", "7").wait(60) == 7


def test_a_signal_reaches_all_and_they_may_take_time(begin, tmp_path, monkeypatch):
    process = begin("3", "wait")
    wait_for(tmp_path, "012")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert all(text.startswith("saved after") for text in noted(tmp_path, "0", "1", "2"))


def test_one_that_cannot_save_ends_those_that_wait_for_it(begin, tmp_path):
    process = begin("2", "full", seconds=1)
    wait_for(tmp_path, "01")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 2


@pytest.mark.parametrize("count", ["0", "two", "-1"])
def test_a_number_that_is_none_is_refused(count, begin):
    process = begin(count, "0")
    assert process.wait(60) != 0
    assert process.stderr.read() == (
        f"error: PROCESSES is {count}; give a number of at least 1, or gpus\n"
    )
