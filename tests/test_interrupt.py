"""Ctrl-C and SIGTERM while the main thread is in a call that does not return to Python, as a compilation is."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A mutex that is locked twice: the call releases Python's lock, and no signal ends it.
STUCK = """
import ctypes, signal, sys
from train.common import interrupt

interrupt.LINGER = 0.2
with interrupt.caught(says=True) as received:
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
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
import ctypes, dataclasses, signal, sys, time
from train.common import cli, interrupt

interrupt.LINGER = 0.2
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

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
def begun():
    """Starts a program in a process that can be sent signals, and waits until it is ready."""
    processes = []

    def begin(program: str) -> subprocess.Popen:
        command = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def answer(process: subprocess.Popen, number: int) -> str:
    process.send_signal(number)
    assert process.stdout.readline() == "\n"
    return process.stdout.readline()


def test_the_first_is_answered_and_the_second_ends_the_process_whatever_its_main_thread_does(begun):
    process = begun(STUCK)
    assert answer(process, signal.SIGINT) == "stops after this step; Ctrl-C again ends now\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_sigterm_is_answered_without_a_word_about_the_keyboard(begun):
    assert answer(begun(STUCK), signal.SIGTERM) == "stops after this step\n"


def test_a_main_thread_that_comes_to_it_ends_by_itself(begun):
    process = begun(STEPS)
    process.send_signal(signal.SIGINT)
    # The thread that answers and the loop that sees the signal write in either order.
    lines = [process.stdout.readline() for _ in range(3)]
    assert sorted(lines) == ["\n", "seen\n", "stops after this step; Ctrl-C again ends now\n"]
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n" and process.wait(timeout=60) == 0


@pytest.mark.parametrize("seconds", ["0.0", "60.0"], ids=["in a call", "in Python"])
def test_before_the_training_the_first_ends_the_process(begun, seconds):
    process = begun(BEFORE.replace("0.0", seconds))
    time.sleep(0.2)  # mostly, the call has begun then
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().splitlines()[-1] == "ended by Ctrl-C"


def test_a_shells_ignored_ctrl_c_stays_ignored(begun):
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    process = begun(ignored + BEFORE.replace("0.0", "1.0"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
