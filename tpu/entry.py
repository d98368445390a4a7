"""The first process of a container: runs `make train`, and is to the outside what the trainer inside of it is.

    python3.11 -m tpu.entry MODEL=bert TASK=mrpc NAME=bert1 ARGS="--runs gs://my-bucket/runs"

make itself would not do. It ends with 2 for every failure, while a Pod's failure policy must tell an input to fix (2)
from a run to start again (75, 143). And it passes SIGTERM, what `docker stop` and Kubernetes send, to its shell alone:
as process 1 it survives that, and the trainer trains on until it is killed. Here SIGTERM and Ctrl-C reach the trainer,
which saves; and as process 1 this one takes in the processes whose parents have ended. Standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tpu.launch.keeper import exit_code, kill_group, tell, trainers


def main() -> int:
    """Returns the trainer's exit code, once nothing of make's process group is left."""
    make = None
    early = []  # signals that came before make was there

    def forward(number: int, _frame: Any) -> None:
        if make is None:
            early.append(number)
        else:
            tell(trainers(make.pid), number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder, "exit-code")
        environment = {**os.environ, "XLA_ZOO_EXIT_CODE": str(recorded)}
        make = subprocess.Popen(["make", "train", *sys.argv[1:]], env=environment, start_new_session=True)
        for number in early:
            forward(number, None)
        status = wait(make.pid)
        kill_group(make.pid)  # a loader's process whose trainer was killed
        return exit_code(status, recorded)


def wait(pid: int) -> int:
    """Waits for a process, and takes in all others that end before it, orphans among them. Returns how it ended, as of
    subprocess: below 0 for a signal."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            break
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
