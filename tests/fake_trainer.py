"""Trains nothing, as the project of tests/launch_bed.py.

    train.py NAME DATA [--runs=FOLDER] [option=value ...]

It takes a lock as a chip would, so that two trainers are noticed, resumes from its checkpoint,
saves every ten steps and on SIGTERM, which it leaves with 143. As real ones do, it dies of its own
print where that fails, and waits for ever for a peer that was started again.

    steps, pause       how many steps, and seconds for each; a file `finish` ends them early
    workers            waits at every step for so many peers, as a collective does; they agree on
                       the last step
    fails, every       the worker that fails, and after how many steps, also when it has resumed:
                       exit code 3
    saving             seconds that it takes to save when it is stopped
    unsaveable         fails at saving: exit code 1
    burst              prints much first
    deaf               ignores SIGTERM
    stray              starts a process in a session of its own
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

name, data, *arguments = sys.argv[1:]
options = {"runs": "runs"}
for argument in arguments:
    option, value = argument.lstrip("-").split("=")
    options[option] = value

home = Path.home()
me = Path.cwd().parent.name  # …/worker-<i>/tree
began = time.time()
folder = Path(options["runs"], name)
folder.mkdir(parents=True, exist_ok=True)
checkpoint = folder / me
done = folder / f"at-{me}"  # the step that this worker is at, and its process
peers = [folder / f"at-worker-{number}" for number in range(int(options.get("workers", 0)))]
leave = folder / ("leave" if peers else f"leave-{me}")
stopped: list[int] = []  # a signal's handler appends
pids: dict[Path, str] = {}  # of the peers, as first seen


def say(*words: object) -> None:
    print(*words, flush=True)


def write(path: Path, value: object) -> None:
    new = path.with_suffix(f".new-{me}")
    new.write_text(str(value))
    new.rename(path)


def count_start() -> None:
    with contextlib.suppress(OSError), (home / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")


def take_chip() -> TextIO:
    """Returns the locked file that stands for the chip; ends where another trainer holds it."""
    chip = (home / "chip").open("w")
    try:
        fcntl.flock(chip, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "two-trainers").touch()
        sys.exit("The TPU is already in use by process with pid 1")
    return chip


def leaving() -> bool:
    """Returns whether a worker was asked to stop."""
    with contextlib.suppress(FileNotFoundError):
        return leave.stat().st_mtime > began
    return False


def behind(step: int) -> bool:
    """Returns whether a peer has not done the step before; one that was started again never will
    have."""
    for at in peers:
        if not at.exists() or at.stat().st_mtime < began:  # of an attempt before
            return True
        peers_step, pid = at.read_text().split()
        if pids.setdefault(at, pid) != pid:
            return True
        if int(peers_step) < step - 1:
            return True
    return False


def finished(step: int) -> bool:
    return step >= int(options.get("steps", 3)) or (folder / "finish").exists()


def wait_for_peers(step: int) -> None:
    while not leaving() and not finished(step) and behind(step):
        time.sleep(0.05)  # in a collective: a signal's handler does not run there
        os.utime(done)  # for peers that begin later: it is of this attempt


def save_and_leave(step: int) -> None:
    time.sleep(float(options.get("saving", 0)))
    if "unsaveable" in options:
        raise OSError(28, "No space left on device")
    write(checkpoint, step)
    say("saved")
    sys.exit(143)


def train(step: int) -> int:
    """Trains from a step on. Returns the last step."""
    while not finished(step):
        step += 1
        write(done, f"{step} {os.getpid()}")
        say("step", step)
        time.sleep(float(options.get("pause", 0.02)))
        if stopped:
            write(leave, step)
        wait_for_peers(step)
        if leaving():
            save_and_leave(step)
        if step % 10 == 0:
            write(checkpoint, step)
        if me == f"worker-{options.get('fails')}" and step % int(options["every"]) == 0:
            print(Path("message").read_text(), file=sys.stderr, flush=True)
            sys.exit(3)
    return step


count_start()
chip = take_chip()
on_sigterm = signal.SIG_IGN if "deaf" in options else lambda *_: stopped.append(1)
signal.signal(signal.SIGTERM, on_sigterm)
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
say(f"start {name} at {first} with {data!r} and {os.environ.get('SETTING')!r}")
if "stray" in options:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "burst" in options:
    for line in range(20000):
        print(f"line {line:06d} " + "x" * 40)

last = train(first)
write(checkpoint, last)
say("end")
