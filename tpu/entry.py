"""The first process of a container: runs `make train`, and is to the outside what the trainer inside of it is.

    python3.11 -m tpu.entry MODEL=bert TASK=mrpc NAME=bert1 ARGS="--runs gs://my-bucket/runs"

make itself would not do. It ends with 2 for every failure, while a Pod's failure policy must tell an input to fix (2)
from a run to start again (75, 143). And it passes SIGTERM, what `docker stop` and Kubernetes send, to its shell alone:
as process 1 it survives that, and the trainer trains on until it is killed. Here SIGTERM and Ctrl-C reach the trainer,
which saves. Standard library only, Python 3.11.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tpu.launch.keeper import exit_code, members

STDERR = 2  # the file descriptor
LAST_BYTES = 16384  # of the standard error: make's last line says how the trainer ended


def trainers(group: int) -> list[int]:
    """Returns the processes of make's group but make and its shells, which would report their own end in place of the
    trainer's; all of them while nothing else runs."""
    found = {pid: "" for pid in members(group)}
    for pid in found:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return [pid for pid, name in found.items() if name not in ("make", "sh")] or list(found)


def main() -> int:
    """Returns the trainer's exit code, once nothing of it is left."""
    make, early, end = None, [], b""

    def copy() -> None:
        nonlocal end
        while piece := os.read(make.stderr.fileno(), 65536):
            end = (end + piece)[-LAST_BYTES:]
            while piece:  # a pipe takes a part
                piece = piece[os.write(STDERR, piece) :]

    def forward(number: int, _frame: Any) -> None:
        if make is None:
            early.append(number)
            return
        for pid in trainers(make.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    make = subprocess.Popen(["make", "train", *sys.argv[1:]], stderr=subprocess.PIPE, start_new_session=True)
    for number in early:
        forward(number, None)
    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    status = make.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(make.pid, signal.SIGKILL)  # a loader's process whose trainer was killed would hold the pipe open
    copying.join()
    return exit_code(status, end.decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
