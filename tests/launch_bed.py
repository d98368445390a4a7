"""What the launcher's tests stand on: a project, a TPU that is not there, and the command line.

The launcher is the real one, and so are its programs on the workers. Those are processes of this
machine with a home folder each and tests/fake_systemd.py (Processes), or containers with a real
systemd and sshd (tests/pods.py). Between them is tests/fake_gcloud.py. What is trained is
tests/fake_trainer.py.
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

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PYTHON = os.path.realpath(sys.executable)
FOREVER = "steps=100000 pause=0.05"

# Parts of command lines. That of the shell between make and the trainer has the trainer's, too.
TRAINER = "\0train.py\0"
KEEPER = "keeper.py\0keep\0"
SHELL = "sh\0exit_code.sh\0"

# As the project's: a shell stands between make and the trainer, and writes its exit code where that
# is wanted.
RECORD = "$(if $(XLA_ZOO_EXIT_CODE),exec sh exit_code.sh )"
MAKEFILE = f"""train:
\t@{RECORD}python3 -I -S train.py "$(NAME)" "$(DATA)" $(ARGS)
"""

# The number at the end of a host's name, or the last digit of an address, is the worker. No
# variable from here arrives.
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

# The remedy for a TPU of two workers that the cloud has taken back.
RECREATE = (
    "gcloud compute tpus tpu-vm delete my-tpu --zone=us-east5-b &&"
    " gcloud compute tpus tpu-vm create my-tpu"
    " --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
)

one_worker = pytest.mark.parametrize("bed", [1], indirect=True)


def git(folder: Path, *arguments: object) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def processes(mark: str, *words: str, without: str = "", file: str = "environ") -> list[int]:
    """Returns the processes that have `mark` in their environment and all `words` in their command
    line.

    without: a pattern; a process whose command line has it is left out
    file: the file below /proc/<pid> in which `mark` is looked for
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() not in (entry / file).read_bytes():
                continue
            command_line = (entry / "cmdline").read_text(errors="replace")
            if without and re.search(without, command_line):
                continue
            if all(word in command_line for word in words):
                found.append(int(entry.name))
    return found


def send(number: int, pids: Iterable[int]) -> None:
    """Sends a signal to the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait(condition: Callable[[], object], seconds: float = 30) -> None:
    """Waits until the condition holds; fails if it does not in so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def write_files(texts: dict[Path, str]) -> None:
    """Writes text files and makes their folders."""
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_programs(folder: Path, **lines: str) -> None:
    """Writes shell scripts of one line each, which add their arguments to it.

    A name without a line becomes a link to this machine's program of that name.
    """
    folder.mkdir(exist_ok=True)
    for name, line in lines.items():
        program = folder / name
        if line:
            program.write_text(f'#!/bin/sh\n{line} "$@"\n')
            program.chmod(0o755)
        else:
            program.symlink_to(shutil.which(name) or "/missing")


class Bed:
    """A project, a client's home and a TPU, whatever its workers are.

    A subclass makes `bin`/ssh, which reaches worker-<i>, and has these methods:

    home(worker)                   its home folder
    processes(worker, *words)      those on it with all these words in their command lines
    idle()                         whether nothing of a run is left on any worker
    drop_connections(worker)       ends what follows its log
    restart(worker)                restarts it without asking its processes to end
    """

    grace = "20"  # seconds to save, as the flag --grace
    options = ""  # of all trainers
    launcher = ROOT  # the folder that has tpu/launch

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.shared = folder / "shared"
        self.runs = f"{folder}/shared"
        self.project = folder / "project"
        self.client_home = folder / "client"
        self.clients: list[subprocess.Popen] = []
        self.numbers = itertools.count()  # of mishaps
        self.tpu: dict = {}

        self.client_home.mkdir()
        self.shared.mkdir(exist_ok=True)
        gcloud = f"FAKE_CLOUD={folder} exec {PYTHON} -I -S {TESTS}/fake_gcloud.py"
        write_programs(self.bin, gcloud=gcloud, git="")  # and no gcloud that may be installed here
        self.make_project()
        self.set(name="my-tpu", zone="us-east5-b", project="mine", workers=workers)
        self.heal()

    def make_project(self) -> None:
        """Makes a git repository with a Makefile and the tests' own trainer."""
        git(self.folder, "init", "-q", self.project)
        files = {
            "Makefile": MAKEFILE,
            "train.py": (TESTS / "fake_trainer.py").read_text(),
            "exit_code.sh": (ROOT / "tpu/exit_code.sh").read_text(),
            "message": "it broke",
            ".gitignore": "runs/\n*.tmp\n",
        }
        for name, text in files.items():
            (self.project / name).write_text(text)
        git(self.project, "add", ".")

    def set(self, **changes: object) -> None:
        """Changes the TPU and what goes wrong with it: see tests/fake_gcloud.py."""
        self.tpu.update(changes)
        new = self.folder / "tpu.json.new"
        new.write_text(json.dumps(self.tpu))
        os.replace(new, self.folder / "tpu.json")

    def heal(self) -> None:
        """Makes the TPU ready and lets nothing go wrong any more."""
        self.set(state="READY", health="HEALTHY", mishaps=[])

    def wrong(self, **mishap: object) -> Path:
        """Lets a call of gcloud go wrong. Returns the file that is there when it has."""
        number = next(self.numbers)
        self.set(mishaps=[*self.tpu["mishaps"], {"id": number, **mishap}])
        return self.folder / f"mishap-{number}-0"

    def arguments(
        self, action: str, *flags: str, args: str = "", words: tuple[str, ...] = ()
    ) -> list[str]:
        """Returns the launcher's arguments for an action.

        `train` without -- among the flags is one of the tests' own trainer, with the options `args`
        and further `words` for make.
        """
        common = ["--tpu", "my-tpu", "--zone", "us-east5-b", "--lost-after", "25"]
        if action != "train":
            return [action, *common, *flags]

        common += ["--grace", self.grace]
        if "--" in flags:
            return [action, *common, *flags]

        trainer_args = f"ARGS=--runs={self.runs} {self.options} {args}"
        one_space_each = " ".join(trainer_args.split())
        return [action, *common, *flags, "--", "MODEL=tiny", *words, one_space_each]

    def start(
        self, action: str, *flags: str, env: dict | None = None, pipe: bool = False, **own
    ) -> subprocess.Popen:
        """Starts the launcher. Its output goes to the files `out` and `err`.

        pipe: its standard output is a pipe instead
        own: see `arguments`
        """
        command = [PYTHON, "-I", "-S", f"{self.launcher}/tpu/launch/launcher.py"]
        command += self.arguments(action, *flags, **own)
        environment = {"PATH": str(self.bin), "HOME": str(self.client_home), **(env or {})}
        out = self.folder / f"out-{len(self.clients)}"
        err = self.folder / f"err-{len(self.clients)}"

        with out.open("w") as stdout, err.open("w") as stderr:
            client = subprocess.Popen(
                command,
                cwd=self.project,
                env=environment,
                stdout=subprocess.PIPE if pipe else stdout,
                stderr=stderr,
                start_new_session=True,
            )
        client.out = out
        client.err = err
        self.clients.append(client)
        return client

    def ended(self, client: subprocess.Popen, seconds: float = 60) -> tuple[int, str, str]:
        """Waits for the end of a client: exit code, standard output, standard error."""
        code = client.wait(seconds)
        err = client.err.read_text()
        assert "Traceback" not in err, err
        return code, client.out.read_text(), err

    def run(self, *arguments: str, **options) -> tuple[int, str, str]:
        """Runs the launcher to its end: exit code, standard output, standard error."""
        return self.ended(self.start(*arguments, **options), 120)

    def begin(self, *flags: str, args: str = "", **options) -> subprocess.Popen:
        """Starts the run `one`, which does not end by itself.

        Returns its client when all workers have done some steps.
        """
        goal = max(self.steps("at-worker")) + 3
        client = self.start("train", "--run", "one", *flags, args=f"{FOREVER} {args}", **options)
        try:
            wait(lambda: client.poll() or min(self.steps("at-worker")) > goal, 60)
        except AssertionError:
            logs = [self.log(worker)[-2000:] for worker in range(self.tpu["workers"])]
            steps = f"steps {self.steps('at-worker')}"
            raise AssertionError([steps, client.err.read_text(), *logs]) from None
        assert not client.poll(), client.err.read_text()
        return client

    def stop(self, code: int = 0, *flags: str) -> str:
        """Stops, and asserts the exit code. Returns standard error."""
        found, _, err = self.run("stop", *flags)
        assert found == code, err
        return err

    def interrupt(self, client: subprocess.Popen) -> str:
        """Presses Ctrl-C in a client, and asserts its exit code. Returns standard error."""
        client.send_signal(signal.SIGINT)
        code, _, err = self.ended(client)
        assert code == 130, err
        return err

    def kill(self, worker: int, *words: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the processes on a worker with these words in their command lines.

        Returns how many there were.
        """
        found = self.processes(worker, *words)
        send(number, found)
        return len(found)

    def calls(self, verb: str = "", text: str = "") -> list[list[str]]:
        """Returns gcloud's arguments, from the verb on, of the calls so far.

        verb, text: only calls of this verb, and with this text among their arguments
        """
        path = self.folder / "calls"
        if not path.exists():
            return []

        found = []
        for line in path.read_text().splitlines():
            call = json.loads(line)[3:]  # without compute tpus tpu-vm
            if verb in ("", call[0]) and text in " ".join(call):
                found.append(call)
        return found

    def zoo(self, worker: int, tpu: str = "my-tpu") -> Path:
        """Returns the launcher's folder of a TPU in a worker's home."""
        return self.home(worker) / f"xla-zoo/{tpu}/worker-{worker}"

    def log(self, worker: int) -> str:
        """Returns the log of the run `one` on a worker."""
        (folder,) = self.home(worker).glob(f"xla-zoo/*/worker-{worker}/jobs/one")
        return "".join(segment.read_text() for segment in sorted(folder.glob("log.[0-9]*")))

    def starts(self) -> list[int]:
        """Returns how often a trainer was started, for each worker."""
        counts = []
        for worker in range(self.tpu["workers"]):
            path = self.home(worker) / "starts"
            count = 0
            if path.exists():
                count = len(path.read_text().split())
            counts.append(count)
        return counts

    def steps(self, name: str = "worker") -> list[int]:
        """Returns the checkpoint step of each worker, 0 if it has none.

        Args:
            name: "at-worker" for the steps that are done.
        """
        steps = []
        for worker in range(self.tpu["workers"]):
            path = self.shared / f"one/{name}-{worker}"
            step = 0
            if path.exists():
                step = int(path.read_text().split()[0])
            steps.append(step)
        return steps

    def saved(self) -> bool:
        """Returns whether all checkpoints are those of the last step."""
        return min(self.steps()) > 0 and self.steps() == self.steps("at-worker")

    def check_idle(self, seconds: float = 0, stays: float = 0) -> None:
        """Asserts that nothing runs, and that there never were two trainers.

        seconds: how long what runs may take to end
        stays: seconds after which nothing must run, either
        """
        wait(self.idle, seconds)
        time.sleep(stays)
        assert self.idle()
        assert not list(self.shared.rglob("two-trainers"))

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
        programs = {
            "python3": f"exec {PYTHON} -I -S",  # without site, which is slow
            "systemctl": f"{systemd} systemctl",
            "systemd-run": f"{systemd} systemd-run",
        }
        write_programs(self.remote, **programs)
        (self.remote / "system").symlink_to("/usr/bin")

        ssh = self.bin / "ssh"
        ssh.write_text(SSH.format(folder=folder, remote=self.remote))
        ssh.chmod(0o755)
        for worker in range(workers):
            self.home(worker).mkdir()

    def home(self, worker: int) -> Path:
        return self.folder / f"home-{worker}"

    def processes(self, worker: int, *words: str) -> list[int]:
        """Returns those of a worker, in whatever group or session."""
        return processes(f"HOME={self.home(worker)}\0", *words, without="fake_systemd.py")

    def idle(self) -> bool:
        """Returns whether only those are left that look on, and end when they notice that their
        connection has."""
        lookers_on = "\0(follow|stop|status)\0[0-9]"
        return not processes(f"HOME={self.folder}/home-", without=lookers_on)

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
