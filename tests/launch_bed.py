"""What the launcher's tests stand on: a project, a TPU that is not there, the launcher's command line.

The launcher is the real one, and so are its programs on the workers. Those are processes of this machine with a home
folder each and tests/fake_systemd.py (Processes), or containers with a real systemd and sshd (tests/pods.py). Between
them is tests/fake_gcloud.py. What is trained is tests/fake_trainer.py.
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
TRAINER, KEEPER = "\0train.py\0", "keeper.py\0keep\0"  # parts of their command lines
SHELL = "sh\0exit_code.sh\0"  # of the shell between make and the trainer, whose command line has the trainer's, too
# As the project's: a shell stands between make and the trainer, and writes its exit code where that is wanted.
MAKEFILE = """train:
\t@$(if $(XLA_ZOO_EXIT_CODE),exec sh exit_code.sh )python3 -I -S train.py "$(NAME)" "$(DATA)" $(ARGS)
"""
# The number at the end of a host's name, or the last digit of an address, is the worker. No variable from here arrives.
SSH = """#!/bin/sh
until case $1 in *worker-[0-9]*|*127.0.0.1?) ;; *) false;; esac; do shift; done
case $1 in *worker-*) number=${{1##*worker-}};; *) number=${{1#"${{1%?}}"}};; esac
home={folder}/home-$number
shift
[ "$1" != -- ] || shift
cd $home
connection="127.0.0.1 40000 127.0.0.1 22"
exec /usr/bin/env -i HOME=$home PATH={remote}:{remote}/system USER=me SSH_CONNECTION="$connection" \
    XLA_ZOO_RUNTIME=$home/run LANG=de_DE.UTF-8 /bin/sh -c "$*"
"""


def git(folder: Path, *arguments: object) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def processes(mark: str, *words: str, without: str = "", file: str = "environ") -> list[int]:
    """Returns those with `mark` in their environment, or another file of theirs, and all `words` in their command line.

    without: a pattern; a process whose command line has it is left out.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / file).read_bytes():
                line = (entry / "cmdline").read_text(errors="replace")
                if all(word in line for word in words) and not (without and re.search(without, line)):
                    found.append(int(entry.name))
    return found


def send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
    """What is the same for all kinds of workers. A subclass makes `bin`/ssh, which reaches worker-<i>, and has methods:

    home(worker), processes(worker, *words), idle(): whether nothing of a run is left on any worker,
    drop_connections(worker), restart(worker): without asking its processes to end.
    """

    grace, options, launcher = "20", "", ROOT  # options: those of all trainers

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.bin, self.shared, self.runs = folder, folder / "bin", folder / "shared", f"{folder}/shared"
        self.project, self.client_home = folder / "project", folder / "client"
        self.client_home.mkdir()
        self.shared.mkdir(exist_ok=True)
        gcloud = f"FAKE_CLOUD={folder} exec {PYTHON} -I -S {TESTS}/fake_gcloud.py"
        write_programs(self.bin, gcloud=gcloud, git="")  # and no gcloud that may be installed here
        git(folder, "init", "-q", self.project)
        files = {"Makefile": MAKEFILE, "train.py": (TESTS / "fake_trainer.py").read_text()}
        files["exit_code.sh"] = (ROOT / "tpu/exit_code.sh").read_text()
        for name, text in {**files, "message": "it broke", ".gitignore": "runs/\n*.tmp\n"}.items():
            (self.project / name).write_text(text)
        git(self.project, "add", ".")
        self.clients: list[subprocess.Popen] = []
        self.numbers = itertools.count()
        self.tpu: dict = {}
        self.set(name="my-tpu", zone="us-east5-b", project="mine", workers=workers)
        self.heal()

    def set(self, **changes: object) -> None:
        """Changes the TPU and what goes wrong with it: see tests/fake_gcloud.py."""
        self.tpu.update(changes)
        new = self.folder / "tpu.json.new"
        new.write_text(json.dumps(self.tpu))
        os.replace(new, self.folder / "tpu.json")

    def heal(self) -> None:
        self.set(state="READY", health="HEALTHY", mishaps=[])

    def wrong(self, **mishap: object) -> Path:
        """Lets a call of gcloud go wrong. Returns the file that is there when it has."""
        number = next(self.numbers)
        self.set(mishaps=[*self.tpu["mishaps"], {"id": number, **mishap}])
        return self.folder / f"mishap-{number}-0"

    def arguments(self, action: str, *flags: str, args: str = "", words: tuple[str, ...] = ()) -> list[str]:
        """The launcher's arguments. `train` without -- among the flags is one of the tests' own trainer."""
        place = ["--tpu", "my-tpu", "--zone", "us-east5-b", "--lost-after", "25"]
        if action == "train":
            place += ["--grace", self.grace]
            if "--" not in flags:
                args = f"ARGS=--runs={self.runs} {self.options} {args}"
                flags += ("--", "MODEL=tiny", *words, " ".join(args.split()))
        return [action, *place, *flags]

    def start(self, action: str, *flags: str, env: dict | None = None, pipe: bool = False, **own) -> subprocess.Popen:
        """Starts the launcher. Its output goes to the files `out` and `err`."""
        command = [PYTHON, "-I", "-S", f"{self.launcher}/tpu/launch/launcher.py"]
        command += self.arguments(action, *flags, **own)
        environment = {"PATH": str(self.bin), "HOME": str(self.client_home), **(env or {})}
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
        client = self.start("train", "--run", "one", *flags, args=f"{FOREVER} {args}", **options)
        try:
            wait(lambda: client.poll() or min(self.steps("at-worker")) > goal, 60)
        except AssertionError:
            logs = [self.log(worker)[-2000:] for worker in range(self.tpu["workers"])]
            raise AssertionError([f"steps {self.steps('at-worker')}", client.err.read_text(), *logs]) from None
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

    def kill(self, worker: int, *words: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the processes on a worker with these words. Returns how many there were."""
        found = self.processes(worker, *words)
        send(number, found)
        return len(found)

    def calls(self, verb: str = "", text: str = "") -> list[list[str]]:
        path = self.folder / "calls"
        calls = [json.loads(line)[3:] for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if verb in ("", call[0]) and text in " ".join(call)]

    def zoo(self, worker: int, tpu: str = "my-tpu") -> Path:
        return self.home(worker) / f"xla-zoo/{tpu}/worker-{worker}"

    def log(self, worker: int) -> str:
        (folder,) = self.home(worker).glob(f"xla-zoo/*/worker-{worker}/jobs/one")
        return "".join(part.read_text() for part in sorted(folder.glob("log.[0-9]*")))

    def starts(self) -> list[int]:
        """How often a trainer was started, for each worker."""
        paths = [self.home(worker) / "starts" for worker in range(self.tpu["workers"])]
        return [len(path.read_text().split()) if path.exists() else 0 for path in paths]

    def steps(self, name: str = "worker") -> list[int]:
        """The checkpoint of each worker, 0 if it has none; name="at-worker": the steps that are done."""
        paths = [self.shared / f"one/{name}-{worker}" for worker in range(self.tpu["workers"])]
        return [int(path.read_text().split()[0]) if path.exists() else 0 for path in paths]

    def saved(self) -> bool:
        """Whether all checkpoints are those of the last step."""
        return min(self.steps()) > 0 and self.steps() == self.steps("at-worker")

    def check_idle(self, seconds: float = 0, stays: float = 0) -> None:
        """Asserts that nothing runs, at the latest after some seconds, and that there never were two trainers."""
        wait(self.idle, seconds)
        time.sleep(stays)
        assert self.idle() and not list(self.shared.rglob("two-trainers"))

    def close(self) -> None:
        """Ends the clients, and the calls of gcloud that outlive those that were killed."""
        for client in self.clients:
            client.kill()
            client.wait()
        send(signal.SIGKILL, processes(f"FAKE_CLOUD={self.folder}\0"))


class Processes(Bed):
    """Workers that are processes of this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder, workers)
        self.remote = folder / "remote"
        systemd = f"exec {PYTHON} -I -S {TESTS}/fake_systemd.py"
        programs = {"systemctl": f"{systemd} systemctl", "systemd-run": f"{systemd} systemd-run"}
        write_programs(self.remote, python3=f"exec {PYTHON} -I -S", **programs)  # without site, which is slow
        (self.remote / "system").symlink_to("/usr/bin")
        (self.bin / "ssh").write_text(SSH.format(folder=folder, remote=self.remote))
        (self.bin / "ssh").chmod(0o755)
        for worker in range(workers):
            self.home(worker).mkdir()

    def home(self, worker: int) -> Path:
        return self.folder / f"home-{worker}"

    def processes(self, worker: int, *words: str) -> list[int]:
        """In whatever group or session."""
        return processes(f"HOME={self.home(worker)}\0", *words, without="fake_systemd.py")

    def idle(self) -> bool:
        """Whether only those are left that look on, and end when they notice that their connection has."""
        return not processes(f"HOME={self.folder}/home-", without="\0(follow|stop|status)\0[0-9]")

    def drop_connections(self, worker: int) -> None:
        self.kill(worker, "\0follow\0")

    def restart(self, worker: int) -> None:
        send(signal.SIGKILL, processes(f"HOME={self.home(worker)}\0"))
        for name in ("run", "unit", "failed"):  # in memory
            shutil.rmtree(self.home(worker) / name, ignore_errors=True)

    def close(self) -> None:
        super().close()
        send(signal.SIGKILL, processes(f"HOME={self.folder}/home-"))
        assert not list(self.shared.rglob("two-trainers"))
