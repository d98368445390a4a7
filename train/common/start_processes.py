"""Starts a script in several processes, one for each device of this machine.

    python -m train.common.start_processes 4 train.glue tiny --device cpu
    python -m train.common.start_processes gpus train.glue tiny --device cuda

`make train` does so with PROCESSES= and on several GPUs; torchrun can do it, too. This one hands
SIGTERM and Ctrl-C on and then waits as long as the processes take to save; it ends with the exit
code of the process that failed first; and it adds nothing to what the processes print.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Exit codes of a process that one of these has ended, after saving or before.
STOPPED = (*(128 + number for number in HANDED_ON), *(-number for number in HANDED_ON))
# When one has failed, the others wait for it in a collective. They get so long to end by SIGTERM.
SECONDS_TO_END = 30
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


def count_of(given: str) -> int:
    """Returns how many processes are to be started; "gpus": one for each GPU, and at least one."""
    if given == "gpus":
        import torch

        return max(torch.cuda.device_count(), 1)
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"error: PROCESSES is {given}; give a number of at least 1, or gpus")
    return int(given)


def free_port() -> int:
    """Returns a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def variables(index: int, count: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets for process `index` of `count`, all on this machine.

    Args:
        port: where they find each other.
    """
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(count: int, command: Sequence[str]) -> list[subprocess.Popen]:
    """Starts the processes, with the variables that torchrun sets."""
    port = free_port()
    environment = {"OMP_NUM_THREADS": str(max(os.cpu_count() // count, 1)), **os.environ}
    # A process has its own session: a terminal's Ctrl-C reaches it once, handed on by this one.
    processes = []
    for index in range(count):
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment | variables(index, count, port),
            start_new_session=True,
            preexec_fn=_end_with_this_process,
        )
        processes.append(process)
    return processes


def _end_with_this_process() -> None:
    """Makes a new process get SIGTERM when this one is killed (on Linux)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


def wait(processes: Sequence[subprocess.Popen]) -> int:
    """Waits until all have ended; returns the exit code of the first that failed, or 0."""
    received: list[int] = []

    def hand_on(number: int, _frame: Any) -> None:
        received.append(number)
        _signal(processes, number)

    for number in HANDED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, hand_on)

    failure = 0
    failed_at = None
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        failures = [code for code in codes if code]
        if failures and not failure:
            failure = failures[0]
            failed_at = time.monotonic()
            _signal(processes, signal.SIGTERM)
        # Those that were asked to stop are saving, and end one after the other; but not with one
        # that has failed meanwhile.
        is_saving = received and failure in STOPPED
        if failed_at and not is_saving and time.monotonic() > failed_at + SECONDS_TO_END:
            _signal(processes, signal.SIGKILL)
        time.sleep(0.1)

    for process in processes:  # those that have ended since the last look
        failure = failure or process.returncode
    return 128 - failure if failure < 0 else failure  # as a shell says of a signal


def _signal(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # nothing, where it has ended


def main(arguments: Sequence[str]) -> None:
    """Runs a script in as many processes as the first argument says."""
    if len(arguments) < 2:
        raise SystemExit(f"error: expected a number of processes and a script, see {__file__}")
    count = count_of(arguments[0])
    command = arguments[1:]
    if count == 1:
        os.execv(sys.executable, [sys.executable, "-m", *command])
    sys.exit(wait(start(count, command)))


if __name__ == "__main__":
    main(sys.argv[1:])
