"""Trains nothing, as the project of tests/launch_bed.py: `NAME DATA [--runs=FOLDER] [option=value ...]`.

It takes a lock as a chip would, so that two trainers are noticed, resumes from its checkpoint, saves every ten steps
and on SIGTERM, which it leaves with 143. As real ones do, it dies of its own print where that fails, and waits for ever
for a peer that was started again.

    steps, pause       how many steps, and seconds for each; a file `finish` ends them early
    workers            waits at every step for so many peers, as a collective does; they agree on the last step
    fails, every        the worker that fails, and after how many steps, also when it has resumed: exit code 3
    saving             seconds that it takes to save when it is stopped
    unsaveable         fails at saving: exit code 1
    burst, deaf, stray    prints much first; ignores SIGTERM; starts a process in a session of its own
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

name, data, *arguments = sys.argv[1:]
options = {"runs": "runs", **dict(argument.lstrip("-").split("=") for argument in arguments)}
home, me, began = Path.home(), Path.cwd().parent.name, time.time()  # …/worker-<i>/tree
folder = Path(options["runs"], name)
folder.mkdir(parents=True, exist_ok=True)
peers = [folder / f"at-worker-{number}" for number in range(int(options.get("workers", 0)))]
leave = folder / ("leave" if peers else f"leave-{me}")


def say(*words: object) -> None:
    print(*words, flush=True)


def write(path: Path, value: object) -> None:
    path.with_suffix(f".new-{me}").write_text(str(value))
    path.with_suffix(f".new-{me}").rename(path)


def leaving() -> bool:
    with contextlib.suppress(FileNotFoundError):
        return leave.stat().st_mtime > began
    return False


def behind() -> bool:
    """Returns whether a peer has not done the step before; one that was started again never will have."""
    for at in peers:
        if not at.exists() or at.stat().st_mtime < began:  # of an attempt before
            return True
        done, pid = at.read_text().split()
        if known.setdefault(at, pid) != pid or int(done) < step - 1:
            return True
    return False


def finished() -> bool:
    return step >= int(options.get("steps", 3)) or (folder / "finish").exists()


with contextlib.suppress(OSError), (home / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\n")
chip = (home / "chip").open("w")
try:
    fcntl.flock(chip, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "two-trainers").touch()
    sys.exit("The TPU is already in use by process with pid 1")
stopped, known = [], {}
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in options else lambda *_: stopped.append(1))
checkpoint = folder / me
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
say(f"start {name} at {step} with {data!r} and {os.environ.get('SETTING')!r}")
if "stray" in options:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "burst" in options:
    for line in range(20000):
        print(f"line {line:06d} " + "x" * 40)
while not finished():
    step += 1
    write(folder / f"at-{me}", f"{step} {os.getpid()}")
    say("step", step)
    time.sleep(float(options.get("pause", 0.02)))
    if stopped:
        write(leave, step)
    while not leaving() and not finished() and behind():
        time.sleep(0.05)  # in a collective: a signal's handler does not run there
        os.utime(folder / f"at-{me}")  # for peers that begin later: it is of this attempt
    if leaving():
        time.sleep(float(options.get("saving", 0)))
        if "unsaveable" in options:
            raise OSError(28, "No space left on device")
        write(checkpoint, step)
        say("saved")
        sys.exit(143)
    if step % 10 == 0:
        write(checkpoint, step)
    if me == f"worker-{options.get('fails')}" and step % int(options["every"]) == 0:
        print(Path("message").read_text(), file=sys.stderr, flush=True)
        sys.exit(3)
write(checkpoint, step)
say("end")
