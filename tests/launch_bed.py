"""What the launcher's tests stand on: a project, a TPU that is not there, the launcher's command line.

The launcher is the real one, and so are its programs on the workers. Those are processes of this machine with a home
folder each and tests/fake_systemd.py (Processes), or containers with a real systemd and sshd (tests/test_pods.py).
Between them is tests/fake_gcloud.py. What is trained is tests/fake_trainer.py.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PYTHON = os.path.realpath(sys.executable)
FOREVER = "steps=100000 pause=0.05"
MAKEFILE = 'train:\n\t@python3 -I -S train.py "$(NAME)" "$(DATA)" $(ARGS)\n'


def git(folder: Path, *arguments: object) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def processes(mark: str) -> list[tuple[int, bytes]]:
    """Process ids and command lines of those that have this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def write_programs(folder: Path, **lines: str) -> None:
    """Writes shell scripts of one line; `name` without a line is a link to the program of this machine."""
    folder.mkdir(exist_ok=True)
    for name, line in lines.items():
        if line:
            (folder / name).write_text(f'#!/bin/sh\n{line} "$@"\n')
            (folder / name).chmod(0o755)
        else:
            (folder / name).symlink_to(shutil.which(name) or "/missing")


class Bed:
    """What is the same for all kinds of workers. A subclass has home(worker) and idle()."""

    grace = "20"

    def __init__(self, folder: Path, cloud: Path, shared: Path, workers: int, **tpu: object) -> None:
        self.folder, self.cloud, self.shared, self.launcher = folder, cloud, shared, ROOT
        self.project, self.client_home, self.runs = folder / "project", folder / "client", str(shared)
        write_programs(cloud / "bin", gcloud=f"FAKE_CLOUD={cloud} exec {PYTHON} -I -S {TESTS}/fake_gcloud.py")
        self.client_home.mkdir()
        git(folder, "init", "-q", self.project)
        files = {"Makefile": MAKEFILE, "train.py": (TESTS / "fake_trainer.py").read_text()}
        for name, text in {**files, "message": "it broke", ".gitignore": "runs/\n*.tmp\n"}.items():
            (self.project / name).write_text(text)
        git(self.project, "add", ".")
        self.clients: list[subprocess.Popen] = []
        self.numbers = itertools.count()
        self.tpu: dict = {}
        self.set(name="my-tpu", zone="us-east5-b", project="mine", workers=workers, **tpu)
        self.heal()

    def set(self, **changes: object) -> None:
        """Changes the TPU and what goes wrong with it: see tests/fake_gcloud.py."""
        self.tpu.update(changes)
        new = self.cloud / "tpu.json.new"
        new.write_text(json.dumps(self.tpu))
        os.replace(new, self.cloud / "tpu.json")

    def heal(self) -> None:
        self.set(state="READY", health="HEALTHY", mishaps=[], id=next(self.numbers))

    def wrong(self, **mishap: object) -> str:
        """Lets a call of gcloud go wrong. Returns the name of the file that is there when it has."""
        self.set(mishaps=[*self.tpu["mishaps"], {"id": next(self.numbers), **mishap}])
        return f"mishap-{self.tpu['mishaps'][-1]['id']}-0"

    def arguments(self, action: str, *flags: str, args: str = "", words: tuple[str, ...] = ()) -> list[str]:
        """The launcher's arguments. `train` without -- among the flags is one of the tests' own trainer."""
        place = ["--tpu", "my-tpu", "--zone", "us-east5-b", "--lost-after", "25"]
        if action == "train":
            place += ["--grace", self.grace]
            if "--" not in flags:
                flags += ("--", "MODEL=tiny", *words, f"ARGS=--runs={self.runs} {args}".strip())
        return [action, *place, *flags]

    def start(self, action: str, *flags: str, env: dict | None = None, pipe: bool = False, **own) -> subprocess.Popen:
        """Starts the launcher. Its output goes to the files `out` and `err`."""
        command = [PYTHON, "-I", "-S", f"{self.launcher}/tpu/launch/launcher.py"]
        command += self.arguments(action, *flags, **own)
        environment = {"PATH": str(self.cloud / "bin"), "HOME": str(self.client_home), **(env or {})}
        out, err = (self.folder / f"{name}-{len(self.clients)}" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            streams = {"stdout": subprocess.PIPE if pipe else stdout, "stderr": stderr, "start_new_session": True}
            client = subprocess.Popen(command, cwd=self.project, env=environment, **streams)
        client.out, client.err = out, err
        self.clients.append(client)
        return client

    def ended(self, client: subprocess.Popen, seconds: float = 60) -> tuple[int, str, str]:
        """Waits for the end of a client: exit code, standard output, standard error."""
        code, err = client.wait(seconds), client.err.read_text()
        assert "Traceback" not in err, err
        return code, client.out.read_text(), err

    def run(self, *arguments: str, **options) -> tuple[int, str, str]:
        return self.ended(self.start(*arguments, **options), 120)

    def begin(self, *flags: str, args: str = "", **options) -> subprocess.Popen:
        """Starts the run `one`, for ever. Returns its client when all workers have done some steps."""
        goal = max(self.steps("at-worker")) + 3
        client = self.start("train", "--run", "one", *flags, args=f"{FOREVER} {args}".strip(), **options)
        self.wait(lambda: client.poll() or min(self.steps("at-worker")) > goal, 60)
        assert not client.poll(), client.err.read_text()
        return client

    def stop(self, code: int = 0, *flags: str) -> str:
        """Stops, and asserts the exit code. Returns standard error."""
        found, _, err = self.run("stop", *flags)
        assert found == code, err
        return err

    def interrupt(self, client: subprocess.Popen) -> str:
        """Ctrl-C. Returns standard error."""
        client.send_signal(signal.SIGINT)
        code, _, err = self.ended(client)
        assert code == 130, err
        return err

    wait = staticmethod(wait)

    def wait_printed(self, client: subprocess.Popen, text: str) -> None:
        wait(lambda: text in client.out.read_text())

    def calls(self, verb: str = "", text: str = "") -> list[list[str]]:
        path = self.cloud / "calls"
        calls = [json.loads(line)[3:] for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if verb in ("", call[0]) and text in " ".join(call)]

    def zoo(self, worker: int) -> Path:
        return self.home(worker) / f"xla-zoo/worker-{worker}"

    def log(self, worker: int) -> str:
        return (self.zoo(worker) / "jobs/one/log").read_text()

    def starts(self) -> list[int]:
        """How often a trainer was started, for each worker."""
        paths = [self.home(worker) / "starts" for worker in range(self.tpu["workers"])]
        return [len(path.read_text().split()) if path.exists() else 0 for path in paths]

    def steps(self, name: str = "worker") -> list[int]:
        """The checkpoint of each worker, 0 if it has none; name="at-worker": the steps that are done."""
        paths = [self.shared / f"one/{name}-{worker}" for worker in range(self.tpu["workers"])]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def saved(self) -> bool:
        """Whether all checkpoints are those of the last step."""
        return min(self.steps()) > 0 and self.steps() == self.steps("at-worker")

    def check_idle(self, seconds: float = 0, stays: float = 0) -> None:
        """Asserts that nothing runs, at the latest after some seconds, and that there never were two trainers."""
        self.wait(self.idle, seconds)
        time.sleep(stays)
        assert self.idle() and not list(self.shared.rglob("two-trainers"))

    def close(self) -> None:
        """Ends the clients, and the calls of gcloud that outlive those that were killed."""
        for client in self.clients:
            client.kill()
            client.wait()
        kill([pid for pid, _ in processes(f"FAKE_CLOUD={self.cloud}\0")])


class Processes(Bed):
    """Workers that are processes of this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        cloud, remote = folder / "cloud", folder / "remote"
        for path in (cloud, folder / "shared", *(cloud / f"home-{worker}" for worker in range(workers))):
            path.mkdir()
        systemd = f"exec {PYTHON} -I -S {TESTS}/fake_systemd.py"
        programs = {"systemctl": f"{systemd} systemctl", "systemd-run": f"{systemd} systemd-run"}
        write_programs(remote, python3=f"exec {PYTHON} -I -S", **programs)  # without site, which is slow
        super().__init__(folder, cloud, folder / "shared", workers, path=f"{remote}:/usr/bin:/bin")
        write_programs(cloud / "bin", git="", ssh="", scp="")  # and no gcloud that may be installed here
        self.remote = remote

    def home(self, worker: int) -> Path:
        return self.cloud / f"home-{worker}"

    def keeper(self, worker: int) -> int:
        return int((self.home(worker) / "unit/main").read_text())

    def idle(self) -> bool:
        return not self.alive()

    def alive(self, connections: bool = False) -> list[int]:
        """Processes on the workers, in whatever group or session: they have the worker's home in their environment.

        connections: also those that only look on, and end when they notice that their connection has.
        """
        found = processes(f"HOME={self.cloud}/home-")
        return [pid for pid, line in found if connections or not re.search(rb"\0(follow|stop|status)\0--worker", line)]

    def close(self) -> None:
        super().close()
        kill(self.alive(connections=True))
        assert not list(self.shared.rglob("two-trainers"))
