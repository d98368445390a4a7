"""The first process of a container: runs `make train`, and is to the outside what the trainer
inside of it is.

    python3.11 -m tpu.entry MODEL=bert TASK=mrpc NAME=bert1 ARGS="--runs gs://my-bucket/runs"

make itself would not do. It ends with 2 for every failure, while a Pod's failure policy must tell
an input to fix (2) from a run to start again (75, 143). And it passes SIGTERM, what `docker stop`
and Kubernetes send, to its shell alone: as process 1 it survives that, and the trainer trains on
until it is killed. Here SIGTERM and Ctrl-C reach the trainer, which saves; and as process 1 this
one takes in the processes whose parents have ended. Standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tpu.launch.keeper import INPUT, ask_to_end, exit_code, kill_group, members

PAUSE = 0.1  # seconds between two looks at the processes that are left


def main() -> int:
    """Returns the trainer's exit code, once nothing of make's process group is left."""
    asked = []  # signals that are still to be handed on
    stopping = False

    def hand_on(number: int, _frame) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder, "exit-code")
        environment = {**os.environ, "XLA_ZOO_EXIT_CODE": str(recorded)}
        command = ["make", "train", *sys.argv[1:]]
        try:
            make = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            failed = f"make cannot be started: {error.strerror}"
            print(f"error: {failed}; install it in this image", file=sys.stderr)
            return INPUT

        status = None
        # A signal to all processes ends make before the trainer, which saves.
        while status is None or (stopping and members(make.pid)):
            time.sleep(PAUSE)
            if asked:
                stopping = True
                if ask_to_end(make.pid, asked[0]):
                    asked.pop(0)
            status = reap().get(make.pid, status)

        kill_group(make.pid)  # a loader's process whose trainer was killed
        return exit_code(status, recorded)


def reap() -> dict[int, int]:
    """Takes in the processes that have ended, orphans among them.

    Returns the exit code of each by its id: below 0 for a signal.
    """
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


if __name__ == "__main__":
    sys.exit(main())
