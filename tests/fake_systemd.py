"""Stands in for systemd on a worker of tests/fake_gcloud.py: one transient unit.

It is `systemd-run` and `systemctl`. What is imitated: the unit's name can be taken once; SIGTERM
goes to the main process, after TimeoutStopSec SIGKILL to all that is left of the unit, also when
the main process has ended by itself; ExecStopPost gets $SERVICE_RESULT, $EXIT_CODE and
$EXIT_STATUS; a unit that has failed keeps its name until it is reset; one that is restarted is
stopped and its command run again. tests/test_pods.py runs the real one.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# The folder that stands for the unit, since making a folder is atomic. Files in it say what was
# asked of the unit: kill, stop, restart.
UNIT = Path(os.environ["XLA_ZOO_RUNTIME"]).parent / "unit"
FAILED = UNIT.with_name("failed")
INHERITED = ("HOME", "PATH", "XLA_ZOO_RUNTIME")
PR_SET_CHILD_SUBREAPER = 36


def kill_children() -> None:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            after_name = path.read_text().rpartition(") ")[2].split()
            parent = int(after_name[1])
            if parent == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def end_children() -> None:
    """Kills children, and the orphans that they leave, until none is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_children()
            os.wait()


def watch(main: subprocess.Popen, grace: float) -> str:
    """Waits for the main process, and ends it when that is asked for.

    Returns "timeout" or "signal" where it was killed, else "".
    """
    deadline = 0.0
    killed = ""
    while main.poll() is None:
        late = deadline and time.monotonic() > deadline
        if late or (UNIT / "kill").exists():
            killed = "timeout" if deadline else "signal"
            main.kill()
        elif not deadline and ((UNIT / "stop").exists() or (UNIT / "restart").exists()):
            deadline = time.monotonic() + grace
            main.terminate()
        time.sleep(0.02)
    return killed


def result_variables(code: int, killed: str) -> dict[str, str]:
    """Returns what ExecStopPost learns of the main process's end.

    code: of Popen, negative for a signal
    killed: see `watch`
    """
    if code in (0, 143):
        result = "success"
    elif killed:
        result = killed
    else:
        result = "exit-code" if code > 0 else "signal"

    if code >= 0:
        return {"SERVICE_RESULT": result, "EXIT_CODE": "exited", "EXIT_STATUS": str(code)}
    name = signal.Signals(-code).name.removeprefix("SIG")
    return {"SERVICE_RESULT": result, "EXIT_CODE": "killed", "EXIT_STATUS": name}


def manage(properties: dict[str, str], command: list[str]) -> None:
    """Lives the unit's life, in a process of its own."""
    # Orphans, of whatever session, become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    environment = {name: os.environ[name] for name in INHERITED}
    journal = (UNIT.parent / "journal").open("ab")
    streams = {"stdin": subprocess.DEVNULL, "stdout": journal, "stderr": journal}
    folder = properties["WorkingDirectory"]
    main = subprocess.Popen(command, cwd=folder, env=environment, **streams)
    grace = float(properties["TimeoutStopSec"].rstrip("s"))
    killed = watch(main, grace)
    end_children()

    code = main.returncode
    environment |= result_variables(code, killed)
    subprocess.run(properties["ExecStopPost"].split(), env=environment, **streams)

    if (UNIT / "restart").exists():
        (UNIT / "restart").unlink()
        manage(properties, command)
        return
    os.rename(UNIT, UNIT.with_name(f"ended-{time.time_ns()}"))
    if code not in (0, 143):
        FAILED.mkdir(exist_ok=True)


def take_name() -> bool:
    """Takes the unit's name. Returns False where a unit has it, be it one that has failed."""
    if FAILED.exists():
        return False
    try:
        UNIT.mkdir()
    except FileExistsError:
        return False
    return True


def run(words: list[str]) -> int:
    """Starts the unit, as systemd-run. Returns the exit code."""
    end = words.index("--")
    command = words[end + 1 :]
    properties = {}
    for word in words[:end]:
        flag, _, assignment = word.partition("=")
        if flag == "--property":
            name, _, value = assignment.partition("=")
            properties[name] = value

    if not take_name():
        loaded = "Unit xla-zoo.service was already loaded."
        print(f"Failed to start transient service unit: {loaded}", file=sys.stderr)
        return 1

    if os.fork() == 0:
        os.setsid()
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        manage(properties, command)
        os._exit(0)
    return 0


def control(verb: str) -> int:
    """Asks something of the unit, as systemctl. Returns the exit code."""
    if verb == "show":
        print("ActiveState=active" if UNIT.exists() else "ActiveState=inactive")
    elif verb == "reset-failed":
        FAILED.rmdir()
    else:
        try:
            (UNIT / verb).touch()
        except FileNotFoundError:
            return 5  # not loaded
    return 0


def main() -> int:
    program, *words = sys.argv[1:]
    if program == "systemd-run":
        return run(words)
    return control(words[0])


if __name__ == "__main__":
    sys.exit(main())
