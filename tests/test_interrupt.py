"""Ctrl-C and SIGTERM while the main thread is in a call that does not return to Python, as a
compilation is."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A mutex that is locked twice: the call releases Python's lock, and no signal ends it.
STUCK = """
import ctypes

from train.common import interrupt

interrupt.LINGER = 0.2
library = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
with interrupt.caught(says=True):
    library.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)
"""

# A loop of steps, which sees the first signal and is ended by the second.
STEPS = """
import time

from train.common import interrupt

try:
    with interrupt.caught(says=True) as received:
        print("ready", flush=True)
        while not received():
            time.sleep(0.01)
        print("seen", flush=True)
        while True:
            time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

# A script that waits for what comes before the training, in Python or in a call as above.
BEFORE = """
import ctypes
import dataclasses
import sys
import time

from train.common import cli, interrupt

interrupt.LINGER = 0.2
library = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)


@dataclasses.dataclass(frozen=True)
class Config:
    seconds: float = 0.0  # in Python


def main(config):
    library.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    time.sleep(config.seconds)
    if not config.seconds:
        library.pthread_mutex_lock(mutex)


sys.argv[1:] = ["tiny"]
cli.run(main, {"tiny": ("a trial", Config())})
"""


@pytest.fixture
def begin() -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts a program in a process that can be sent signals, and waits until it is ready."""
    processes = []

    def start(program: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


STOPS = "stops after this step; Ctrl-C again ends now\n"


def answer(process: subprocess.Popen, number: int) -> str:
    """Sends a signal; returns the line that follows the one that Ctrl-C is in."""
    process.send_signal(number)
    assert process.stdout.readline() == "\n"
    return process.stdout.readline()


def test_a_second_ctrl_c_ends_a_process_that_is_in_a_call(begin):
    process = begin(STUCK)
    assert answer(process, signal.SIGINT) == STOPS
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_sigterm_is_answered_without_a_word_about_the_keyboard(begin):
    assert answer(begin(STUCK), signal.SIGTERM) == "stops after this step\n"


def test_a_main_thread_that_sees_the_second_ctrl_c_ends_itself(begin):
    process = begin(STEPS)
    process.send_signal(signal.SIGINT)
    # The thread that answers and the loop that sees the signal write in either order.
    lines = [process.stdout.readline() for _ in range(3)]
    assert sorted(lines) == ["\n", "seen\n", STOPS]

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("seconds", ["0.0", "60.0"], ids=["in a call", "in Python"])
def test_before_the_training_the_first_ends_the_process(begin, seconds):
    process = begin(BEFORE.replace("0.0", seconds))
    time.sleep(0.2)  # mostly, the call has begun then
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().splitlines()[-1] == "ended by Ctrl-C"


def test_a_shells_ignored_ctrl_c_stays_ignored(begin):
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    process = begin(ignored + BEFORE.replace("0.0", "1.0"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
