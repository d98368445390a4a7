"""Stands in for systemd on a worker of tests/fake_gcloud.py: `systemd-run` and `systemctl` for one transient unit.

What is imitated: the unit's name can be taken once; SIGTERM goes to the main process, after TimeoutStopSec SIGKILL to
all that is left of the unit, also when the main process has ended by itself; ExecStopPost gets $SERVICE_RESULT,
$EXIT_CODE and $EXIT_STATUS; a unit that has failed keeps its name until it is reset; one that is restarted is stopped
and its command run again. tests/test_pods.py runs the real one.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

UNIT = Path(os.environ["XLA_ZOO_RUNTIME"]).parent / "unit"  # state; a folder: making it is atomic


def kill_children() -> None:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(") ")[2].split()[1]) == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def manage(properties: dict[str, str], command: list[str]) -> None:
    """The unit's life, in a process of its own."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans, of whatever session, become children of this process
    environment = {name: os.environ[name] for name in ("HOME", "PATH", "XLA_ZOO_RUNTIME")}
    output = (UNIT.parent / "journal").open("ab")
    streams = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    main = subprocess.Popen(command, cwd=properties["WorkingDirectory"], **streams)
    deadline, result = 0.0, ""
    while main.poll() is None:
        if (UNIT / "kill").exists() or (deadline and time.monotonic() > deadline):
            result = "timeout" if deadline else "signal"
            main.kill()
        elif ((UNIT / "stop").exists() or (UNIT / "restart").exists()) and not deadline:
            deadline = time.monotonic() + float(properties["TimeoutStopSec"].rstrip("s"))
            main.terminate()
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):  # until none is left
        while True:
            kill_children()
            os.wait()
    code = main.returncode
    good = code in (0, 143)
    environment["SERVICE_RESULT"] = "success" if good else result or ("exit-code" if code > 0 else "signal")
    environment["EXIT_CODE"] = "exited" if code >= 0 else "killed"
    environment["EXIT_STATUS"] = str(code) if code >= 0 else signal.Signals(-code).name[3:]
    subprocess.run(properties["ExecStopPost"].split(), **streams)
    if (UNIT / "restart").exists():
        (UNIT / "restart").unlink()
        manage(properties, command)
        return
    os.rename(UNIT, UNIT.with_name(f"ended-{time.time_ns()}"))
    if not good:
        UNIT.with_name("failed").mkdir(exist_ok=True)


def run(words: list[str]) -> int:
    end = words.index("--")
    flags = [word.partition("=")[::2] for word in words[:end]]
    properties = dict(value.partition("=")[::2] for name, value in flags if name == "--property")
    try:
        assert not UNIT.with_name("failed").exists()
        UNIT.mkdir()
    except (AssertionError, FileExistsError):
        print("Failed to start transient service unit: Unit xla-zoo.service was already loaded.", file=sys.stderr)
        return 1
    if os.fork() == 0:
        os.setsid()
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        manage(properties, words[end + 1 :])
        os._exit(0)
    return 0


def main() -> int:
    program, *words = sys.argv[1:]
    if program == "systemd-run":
        return run(words)
    if words[0] == "show":
        print("ActiveState=active" if UNIT.exists() else "ActiveState=inactive")
    elif words[0] == "reset-failed":
        UNIT.with_name("failed").rmdir()
    else:
        try:
            (UNIT / words[0]).touch()
        except FileNotFoundError:
            return 5  # not loaded
    return 0


if __name__ == "__main__":
    sys.exit(main())
