"""Starts a training run on all workers of a TPU from another machine, streams its log, stops it.

    python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b --run bert1 -- MODEL=bert DATA=nyu-mll/glue
    python3 -m tpu.launch logs|stop|status --tpu my-tpu --zone us-east5-b

make train|logs|stop|status TPU=… calls it. It needs python3 (3.9 or later, only the standard library), git, and gcloud
or, for TPU=ssh:host1,host2, ssh. On every worker it puts the working tree (tracked and untracked files, not the ignored
ones) into ~/xla-zoo/worker-<i>/tree and starts `make train` there with the words after `--`; that installs first, into
an environment that stays.

The run is detached: it survives the launcher and the connection, and the same command, or `logs`, attaches to it again.
There is one connection for each worker (never --worker=all), a dropped one continues where it was, and a start is done
once however often it is repeated. The first worker that fails ends the run on all, since the others would wait for it
in a collective. Ctrl-C stops the run on all workers; it saves a checkpoint first. What happens on the workers is in
tpu/launch/worker.py, how they are reached and what is done about host keys in tpu/launch/hosts.py.

HF_TOKEN, WANDB_API_KEY and what --secret names travel from this environment over ssh's standard input to the process
that they are for; they are in no command line, no file and no log. --env travels in the same way.

Exit codes: that of the first worker that failed; 1 when it had none (it was lost); 2 for what you can mend; 75 when the
TPU is gone (preempted, in maintenance): recreate it and run the same command; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import queue
import re
import secrets
import select
import shlex
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python3 tpu/launch/launcher.py`

from errors import InputError
from tpu.launch import hosts

MARK = b"@xla-zoo "  # see tpu/launch/worker.py
PROGRAM = Path(__file__).with_name("worker.py")
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
BUNDLE_MEGABYTES = 512
AT_ONCE = 16  # connections that are being made
ASK_SECONDS = 300  # gcloud may have to bring a new ssh key to all workers first
COPY_SECONDS = 1800
SILENCE = 60  # seconds without a sign of life, which comes every 5 s, after which a connection is given up
FAILED_GRACE = 10  # seconds for the others when a worker has failed: without it they have nothing to save
LAST_LINES = 25
RECENT = 32 * 1024  # bytes of the log so far that are shown when attaching
GONE = 75  # exit code: the TPU is gone; EX_TEMPFAIL of sysexits.h

# What the log of a failed worker contains -> what it means and what to do.
KNOWN_MESSAGES = (
    (
        r"Failed to get global TPU topology",
        "libtpu did not find the chips of the other workers: the run must be started on all workers of the slice (do"
        " not set TPU_PROCESS_BOUNDS and the like), and the VM's software version must be the one for its TPU type"
        " (v6e: v2-alpha-tpuv6e); if both are so, recreate the TPU",
    ),
    (
        r"TPU is already in use by process|/dev/vfio/\d+\)?: Device or resource busy|/dev/accel\d+.*(?:busy|in use)",
        "another process on this worker holds the TPU: {stop} ends a run of ours; else find it there with"
        " `sudo lsof -w /dev/accel* /dev/vfio/*` and end it, it may be another user's",
    ),
    (
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space hbm|Out of memory while trying to allocate",
        "the program does not fit into the TPU's memory (HBM): a smaller --batch-size in ARGS, or more chips",
    ),
    (
        r"CPython 3\.11 is needed|python3\.11: (?:command )?not found|ensurepip is not available",
        "there is no complete Python 3.11 on this worker: install python3.11 and python3.11-venv on all workers, on"
        " Ubuntu with `sudo add-apt-repository -y ppa:deadsnakes/ppa && sudo apt-get install -y python3.11"
        " python3.11-venv`, or pass PYTHON=/path/to/python3.11",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk of this worker is full: remove what is not needed there",
    ),
    (
        r"^make: \*\*\* \[.*\] Killed",
        "a process was killed from outside, most likely since the worker ran out of memory (not the TPU's): fewer"
        " --workers in ARGS; `sudo dmesg | grep -i oom` there tells",
    ),
)


class WorkerLost(Exception):
    """A worker cannot be reached any more."""

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(f"worker {worker} cannot be reached: {why}")
        self.worker = worker


class TpuGone(Exception):
    """The TPU is not usable any more; the message says why and what to do."""


class Aborted(Exception):
    """The connections were ended on purpose."""


@dataclass
class Result:
    """What a finished connection has left: the last answer with a `state` ({} = it broke before), standard error."""

    answer: dict[str, Any]
    errors: str
    code: int


@dataclass
class Connections:
    """The ssh and gcloud processes that are under way, each in a session of its own: Ctrl-C does not reach them."""

    live: set[subprocess.Popen] = field(default_factory=set)
    guard: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def run(
        self,
        command: list[str],
        data: bytes = b"",
        on_answer: Callable[[dict[str, Any]], None] = lambda answer: None,
        silence: float = SILENCE,
    ) -> Result:
        """Runs a command to its end, or until it has been silent too long. Aborted: `abort` was called."""
        with self.guard:
            if self.closed:
                raise Aborted
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            self.live.add(process)
        errors: list[bytes] = []

        def feed() -> None:
            with contextlib.suppress(OSError):
                process.stdin.write(data)
            with contextlib.suppress(OSError):
                process.stdin.close()

        def collect() -> None:
            for line in process.stderr:
                errors[:] = [*errors[-50:], line]

        threads = [threading.Thread(target=work, daemon=True) for work in (feed, collect)]
        for thread in threads:
            thread.start()
        answer: dict[str, Any] = {}
        rest = b""
        try:
            while True:
                if not select.select([process.stdout], [], [], silence)[0]:
                    errors.append(f"nothing heard for {silence:.0f} s\n".encode())
                    kill(process)
                    break
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(MARK):
                        with contextlib.suppress(ValueError):  # cut off by a dropped connection
                            found = json.loads(line[len(MARK) :])
                            answer = found if "state" in found else {}
                            on_answer(found)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            kill(process)
            code = process.wait()
            threads[1].join(2)
            process.stdout.close()
            with self.guard:
                self.live.discard(process)
        if self.closed:
            raise Aborted
        return Result(answer, b"".join(errors).decode(errors="replace"), code)

    def abort(self) -> None:
        """Ends all that are under way, and lets no new one begin."""
        with self.guard:
            self.closed = True
            for process in self.live:
                kill(process)


def kill(process: subprocess.Popen) -> None:
    """Ends a process and its children, gcloud and its ssh."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def parallel(function: Callable[[int], Any], workers: Iterable[int]) -> dict[int, Any]:
    """Calls a function for each worker, 16 at once. The first exception is raised at once; Ctrl-C interrupts it."""
    workers = list(workers)
    done: queue.Queue = queue.Queue()
    places = threading.Semaphore(AT_ONCE)

    def work(worker: int) -> None:
        with places:
            try:
                done.put((worker, function(worker), None))
            except BaseException as error:
                done.put((worker, None, error))

    for worker in workers:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    results = {}
    for _ in workers:
        worker, result, error = done.get()
        if error is not None:
            raise error
        results[worker] = result
    return results


def say(*lines: str) -> None:
    """The launcher's own lines go to standard error; the log of worker 0 is standard output, as it is."""
    with PRINTING:
        sys.stdout.flush()
        for line in lines:
            print(f"[launch] {line}", file=sys.stderr, flush=True)


PRINTING = threading.Lock()


def make_bundle(folder: Path) -> tuple[str, bytes, int]:
    """Packs the working tree: tracked files and those that are neither tracked nor ignored, deleted ones left out.

    Returns the hash, which is the bundle's name, the tar.gz and the number of files; the same tree, the same bytes.
    InputError: not a git repository with a Makefile, a submodule, too large.
    """
    if not (folder / "Makefile").exists():
        raise InputError(f"{folder} has no Makefile; start a run from the project's folder")
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=folder, capture_output=True)
    if listed.returncode:
        raise InputError(
            f"git cannot list the files of {folder}, and only what git knows or does not ignore is copied"
            f" ({listed.stderr.decode(errors='replace').strip()})"
        )
    names = sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
    names = [name for name in names if os.path.lexists(folder / name)]
    sizes = {name: (folder / name).lstat().st_size for name in names}
    if sum(sizes.values()) > BUNDLE_MEGABYTES << 20:
        largest = max(names, key=sizes.__getitem__)
        raise InputError(
            f"the working tree has {sum(sizes.values()) >> 20} MB, more than {BUNDLE_MEGABYTES} MB, most of all"
            f" {largest} ({sizes[largest] >> 20} MB): put data and outputs into .gitignore"
        )
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            add_file(archive, folder / name, name)
    content = packed.getvalue()
    return hashlib.sha256(content).hexdigest()[:32], content, len(names)


def add_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Adds a file or a symbolic link without what differs from machine to machine: owner, time, mode but for x."""
    info = tarfile.TarInfo(name)
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(info)
    elif stat.S_ISREG(mode):
        content = path.read_bytes()
        info.size, info.mode = len(content), 0o755 if mode & 0o100 else 0o644
        archive.addfile(info, io.BytesIO(content))
    else:
        raise InputError(
            f"{name} is neither a file nor a link; submodules and other repositories inside are not copied"
        )


def read_words(words: list[str], run: str) -> tuple[list[str], str]:
    """The arguments of `make train` on the workers, without NAME=, and the run's name, "" if none was given.

    They are taken as they are: make there would expand a `$`, so it is doubled. InputError: not NAME=value.
    """
    kept = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{word} after -- is not an argument of make train; write NAME=value")
        if name in ("TPU", "ZONE", "PROJECT", "ENV", "RUN", "RETRIES"):
            raise InputError(f"{name}= is for this machine, not for the workers; give --{name.lower()}")
        if name == "NAME":
            if run and value and run != value:
                raise InputError(f"the run has two names, RUN={run} and NAME={value}; give one")
            run = run or value
        elif value:
            kept.append(f"{name}={value}".replace("$", "$$"))
    if run and not re.fullmatch(r"\w[\w.-]*", run, re.ASCII):
        raise InputError(f"RUN={run} is not the name of one folder; use letters, digits, points, hyphens, underscores")
    return kept, run


def runs_folder(words: list[str]) -> str:
    """Where `make train` with these arguments puts its runs: --runs in ARGS, "" if there is none."""
    arguments = next((word[5:] for word in words if word.startswith("ARGS=")), "")
    try:
        parts = shlex.split(arguments)
    except ValueError:  # the shell on the worker will say so
        parts = arguments.split()
    folder = ""
    for part, value in zip(parts, [*parts[1:], ""]):  # noqa: B905 - strict= needs Python 3.10
        name, equals, own = part.partition("=")
        if name == "--runs":
            folder = own if equals else value
    return folder.rstrip("/").replace("$$", "$")  # see read_words


def read_environment(assignments: str, names: list[str]) -> dict[str, str]:
    """Variables for the run: those of ENV="A=b C='d e'", and the secrets that are set here.

    InputError: not assignments; a secret asked for by name is not set here.
    """
    try:
        parts = shlex.split(assignments)
    except ValueError as error:
        raise InputError(f"ENV={assignments} cannot be read ({error}); write ENV=\"A=b C='d e'\"") from None
    environment = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    for name in names:
        if name not in os.environ:
            raise InputError(f"--secret {name}: this variable is not set here; export it first")
        environment[name] = os.environ[name]
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"{part} in ENV is not an assignment; write ENV=\"A=b C='d e'\"")
        environment[name] = value
    return environment


@dataclass
class Outcome:
    """How a start of the run ended. final: starting it again would not help."""

    code: int
    final: bool = False


class Launcher:
    """One TPU, and what can be done with it: `train`, `logs`, `stop`, `status`. Each returns an exit code."""

    def __init__(self, host: hosts.TpuVm | hosts.SshHosts, options: argparse.Namespace) -> None:
        self.host, self.options = host, options
        self.workers = range(0)
        self.connections, self.starting = Connections(), Connections()
        self.program = f"worker-{hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:16]}.py"
        self.run = self.token = ""
        self.describing = threading.Lock()
        self.described: tuple[float, hosts.Machine | None] = (0.0, None)

    # --- one worker -------------------------------------------------------------------------------------------------

    def label(self, worker: int) -> str:
        """Names a worker in a sentence."""
        host = self.host
        return f"worker {worker} ({host.hosts[worker]})" if isinstance(host, hosts.SshHosts) else f"worker {worker}"

    def program_command(self, worker: int, *arguments: str) -> str:
        """Shell words that run tpu/launch/worker.py on the worker."""
        return shlex.join(["python3", f"xla-zoo/worker-{worker}/files/{self.program}", *arguments])

    def check(self, worker: int, result: Result) -> bool:
        """After a broken connection: raises when another attempt is useless. False: the cloud could not be asked."""
        sentence = hosts.final_ssh_error(result.errors, self.label(worker))
        if sentence:
            raise InputError(sentence)
        if "Traceback" in result.errors and "xla-zoo/worker-" in result.errors:
            raise RuntimeError(f"tpu/launch/worker.py on worker {worker}:\n{result.errors}")
        machine = self.machine()
        if machine is not None and machine.problem:
            raise TpuGone(machine.problem)
        return machine is not None

    def machine(self) -> hosts.Machine | None:
        """The TPU's state, at most 3 s old. None: the cloud cannot be asked, perhaps this machine is offline."""
        with self.describing:
            at, machine = self.described
            if time.monotonic() > at + 3:
                machine = None
                with contextlib.suppress(InputError):
                    machine = self.host.describe()
                self.described = (time.monotonic(), machine)
            return machine

    def ask(self, worker: int, script: str, data: bytes = b"", connections: Connections | None = None) -> dict:
        """Runs a shell script on a worker until it gives an answer: connections that break are made again.

        InputError, TpuGone: another attempt is useless. WorkerLost: none has worked for --lost-after seconds.
        """
        begun, pause = time.monotonic(), 0.25
        heard: dict[str, Any] = {}
        while True:
            command = self.host.ssh(worker, f"sh -c {shlex.quote(script)}")
            result = (connections or self.connections).run(command, data, heard.update, ASK_SECONDS)
            if result.answer and result.answer["state"] != "incomplete":
                return {**heard, **result.answer}
            if not result.answer and not self.check(worker, result):
                begun = time.monotonic()
            if time.monotonic() > begun + self.options.lost_after:
                raise WorkerLost(worker, hosts.why_broken(result.errors))
            time.sleep(pause)
            pause = min(2 * pause, 15)

    def prepare(self, worker: int, files: dict[str, bytes]) -> dict:
        """Copies the files that the worker does not have, and asks what runs there."""
        folder = f"xla-zoo/worker-{worker}/files"
        status = self.program_command(worker, "status")
        answer = self.ask(
            worker,
            f"umask 077; mkdir -p {folder} && cd {folder} &&"
            """ printf '\\n@xla-zoo {"files": "%s"}\\n' "$(ls | tr '\\n' ' ')" &&"""
            f" if [ -e {self.program} ]; then cd && {status};"
            """ else printf '\\n@xla-zoo {"state": "new"}\\n'; fi""",
        )
        missing = sorted(set(files) - set(answer["files"].split()))
        if not missing:
            return answer
        # A copy that is cut off must not have the name of a whole one.
        part = f"part-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory() as temporary:
            sources = [str(Path(temporary, f"{name}.{part}")) for name in missing]
            for source, name in zip(sources, missing):  # noqa: B905 - strict= needs Python 3.10
                Path(source).write_bytes(files[name])
            self.copy(worker, sources, folder)
        moves = f"""for new in *.{part}; do if [ -e "$new" ]; then mv "$new" "${{new%.{part}}}"; fi; done"""
        old = "find . -name '*.part-*' -mmin +1440 -exec rm {} +"
        return self.ask(worker, f"cd {folder} && {moves}; {old}; cd && {status}")

    def copy(self, worker: int, sources: list[str], folder: str) -> None:
        """Copies files to a worker; a copy that breaks is done again, as in `ask`."""
        begun, pause = time.monotonic(), 0.25
        while True:
            result = self.connections.run(self.host.scp(worker, sources, folder), silence=COPY_SECONDS)
            if result.code == 0:
                return
            if not self.check(worker, result):
                begun = time.monotonic()
            if time.monotonic() > begun + self.options.lost_after:
                raise WorkerLost(worker, hosts.why_broken(result.errors))
            time.sleep(pause)
            pause = min(2 * pause, 15)

    # --- all workers ------------------------------------------------------------------------------------------------

    def make(self, target: str, *words: str) -> str:
        """The command of make to show, for this TPU."""
        place = [f"{name.upper()}={value}" for name, value in (("zone", self.options.zone),) if value]
        place += [f"PROJECT={self.options.project}"] if self.options.project else []
        return shlex.join(["make", target, f"TPU={self.host.name}", *place, *words])

    def describe(self) -> None:
        """Says what the TPU is. InputError, TpuGone: it cannot be used now."""
        machine = self.host.describe()
        self.described = (time.monotonic(), machine)
        say(machine.line)
        if machine.problem:
            raise TpuGone(machine.problem) if machine.lost else InputError(machine.problem)
        self.workers = range(machine.workers)

    def prepare_all(self, files: dict[str, bytes]) -> dict[int, dict]:
        """`prepare` on all workers at once."""
        files = {self.program: PROGRAM.read_bytes(), **files}
        return parallel(lambda worker: self.prepare(worker, files), self.workers)

    def stop_all(self, token: str, grace: float) -> list[int]:
        """Ends a start of the run on all workers ("" = whatever runs there). Returns those that did not confirm it."""
        connections = Connections()

        def stop(worker: int) -> dict | None:
            arguments = ["--run", self.run, "--token", token, "--grace", str(grace)]
            try:
                for _ in range(3):
                    command = self.host.ssh(worker, self.program_command(worker, "stop", *arguments))
                    result = connections.run(command)
                    if result.answer:
                        return result.answer
                    self.check(worker, result)
            except (InputError, TpuGone) as error:
                say(f"{self.label(worker)}: {error}")
            return None

        try:
            answers = parallel(stop, self.workers)
        finally:
            connections.abort()
        for worker, answer in sorted(answers.items()):
            if answer and answer["state"] == "stopped" and not token:
                code = "" if answer["code"] is None else f", exit code {answer['code']}"
                say(f"{self.label(worker)}: stopped {answer['run']}{code}")
        unsure = sorted(worker for worker, answer in answers.items() if not answer or answer["state"] == "stuck")
        for worker in unsure:
            say(f"{self.label(worker)} did not confirm that it stopped; it may still hold the TPU")
        return unsure

    def start_all(self, words: list[str], environment: dict[str, str], bundle: str) -> None:
        """Starts the run on worker 0 and then on the others. InputError: it cannot be started; then it is nowhere."""
        request = json.dumps({"words": [*words, f"NAME={self.run}"], "environment": environment}).encode()

        def start(worker: int) -> None:
            arguments = ["--run", self.run, "--token", self.token, "--bundle", bundle]
            answer = self.ask(worker, self.program_command(worker, "start", *arguments), request, self.starting)
            if answer["state"] == "busy":
                raise InputError(f"{self.label(worker)} is busy: {self.busy(answer['holder'])}")
            if answer["state"] not in ("started", "attached"):
                raise InputError(f"{self.label(worker)}: {answer.get('message', answer['state'])}")

        try:
            start(0)  # of two launchers at the same time one is first here, and the other ends without harm
            parallel(start, self.workers[1:])
        except (InputError, WorkerLost):
            self.stop_all(self.token, FAILED_GRACE)
            raise

    def busy(self, holder: dict) -> str:
        """One sentence about another run that is alive."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder.get("started", 0)))
        words = shlex.join(holder.get("words", []))
        return (
            f"{holder.get('run', 'a run')} ({words}) runs there since {since}: watch it with {self.make('logs')},"
            f" end it with {self.make('stop')}"
        )

    def attach(self, statuses: dict[int, dict], words: list[str], bundle: str) -> bool:
        """Whether this run is alive already; then takes its token. InputError: another one is."""
        alive = [status["running"] for status in statuses.values() if status["running"]]
        if not alive:
            return False
        holder = alive[0]
        if {other["token"] for other in alive} != {holder["token"]}:
            runs = ", ".join(sorted({other["run"] for other in alive}))
            raise InputError(
                f"the workers of {self.host.name} run different starts ({runs}); end them: {self.make('stop')}"
            )
        theirs = [word for word in holder["words"] if not word.startswith("NAME=")]
        if (self.run and self.run != holder["run"]) or sorted(theirs) != sorted(words):
            raise InputError(f"{self.host.name} is busy: {self.busy(holder)}")
        self.run, self.token = holder["run"], holder["token"]
        changed = "" if holder["bundle"] == bundle else ", with the files of that time: what changed since is not in it"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder["started"]))
        say(f"{self.run} runs already, since {since}{changed}; attaching to it")
        return True

    def watch(self, at: int) -> Outcome:
        """Streams the log of worker 0 until all workers have ended, or one has failed; then none runs any more."""
        events: queue.Queue = queue.Queue()
        for worker in self.workers:
            threading.Thread(target=self.follow, args=(worker, at, events), daemon=True).start()
        left = set(self.workers)
        while left:
            worker, event = events.get()
            if isinstance(event, TpuGone):
                raise event
            if isinstance(event, (InputError, WorkerLost)):
                say(f"{event}; stopping the run on the others")
                self.stop_all(self.token, FAILED_GRACE)
                return Outcome(1, isinstance(event, InputError))
            if isinstance(event, BaseException):
                raise event
            if event["code"] == 0:
                left.discard(worker)
                continue
            if event["stopped"]:
                say(f"the run was stopped on {self.label(worker)}, exit code {event['code']}")
                self.stop_all(self.token, self.options.grace)
                return Outcome(event["code"], event["stopped"] == "asked")
            return self.failed(worker, event)
        return Outcome(0)

    def failed(self, worker: int, event: dict) -> Outcome:
        """Says why a worker failed, and stops the others."""
        code = event["code"]
        end = base64.b64decode(event["tail"]).decode(errors="replace")
        if worker:
            with PRINTING:
                for line in end.splitlines()[-LAST_LINES:]:
                    print(f"[worker {worker}] {line}", flush=True)
        if code is None:
            say(f"the run vanished from {self.label(worker)}: the machine was restarted, or its processes were killed")
        else:
            say(f"{self.label(worker)} failed with exit code {code}")
        for pattern, sentence in KNOWN_MESSAGES:
            if re.search(pattern, end, re.MULTILINE):
                say(f"what this means: {sentence.format(stop=self.make('stop'))}")
        if len(self.workers) > 1:
            say("stopping the run on the others")
        self.stop_all(self.token, FAILED_GRACE)
        # 2 is what a script gives for an input that the user must mend.
        return Outcome(1 if code is None else code, code == 2)

    def follow(self, worker: int, at: int, events: queue.Queue) -> None:
        """Streams the log of worker 0, and waits for the end of any other; the end is an event."""
        heard = time.monotonic()
        broken = False
        pause = 0.25

        def on_answer(answer: dict[str, Any]) -> None:
            nonlocal at, heard, broken, pause
            heard, pause = time.monotonic(), 0.25
            if broken:
                say(f"{self.label(worker)}: connected again")
                broken = False
            if "data" in answer:
                data = base64.b64decode(answer["data"])
                if at >= 0:  # a repeated command repeats what is known
                    data = data[max(0, at - answer["at"]) :]
                at = max(at, answer["at"] + len(base64.b64decode(answer["data"])))
                with PRINTING:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()

        try:
            while True:
                arguments = ["--run", self.run, "--token", self.token, "--at", str(at), *(["--last"] if worker else [])]
                command = self.host.ssh(worker, self.program_command(worker, "follow", *arguments))
                result = self.connections.run(command, on_answer=on_answer)
                if result.answer.get("state") == "ended":
                    events.put((worker, result.answer))
                    return
                if result.answer.get("state") == "unknown":
                    raise WorkerLost(worker, "it does not have this run; was the machine replaced?")
                why = hosts.why_broken(result.errors)
                if not broken:
                    say(f"{self.label(worker)}: the connection broke ({why}); the run goes on, connecting again")
                    broken = True
                if not self.check(worker, result):
                    heard = time.monotonic()
                if time.monotonic() > heard + self.options.lost_after:
                    raise WorkerLost(worker, why)
                time.sleep(pause)
                pause = min(2 * pause, 15)
        except Aborted:
            pass
        except Exception as error:
            events.put((worker, error))

    # --- the commands -----------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Starts the run, or attaches to it, and watches it to its end; starts it again when a worker fails."""
        options = self.options
        words, self.run = read_words(options.words, options.run)
        environment = read_environment(options.env, options.secret)
        bundle, content, files = make_bundle(Path.cwd())
        self.describe()
        self.check_runs(words)
        say(f"working tree: {files} files, {len(content) / 1e6:.1f} MB, {bundle[:12]}")
        statuses = self.prepare_all({f"{bundle}.tar.gz": content})
        attached = self.attach(statuses, words, bundle)
        if not attached:
            model = next((word[6:] for word in words if word.startswith("MODEL=")), "run")
            self.run = self.run or time.strftime(f"{model}-%Y%m%d-%H%M%S")
            self.token = secrets.token_hex(8)
        for attempt in range(options.retries + 1):
            if attempt:
                self.prepare_all({f"{bundle}.tar.gz": content})
                self.token = secrets.token_hex(8)
                say(f"starting {self.run} again, retry {attempt} of {options.retries}; it resumes from its checkpoint")
            try:
                # On all workers also when attaching: the launcher may have died before it had started them all.
                self.start_all(words, environment, bundle)
                if options.detach:
                    say(f"{self.run} runs; {self.make('logs')} watches it, {self.make('stop')} ends it")
                    return 0
                if not attached and not attempt:
                    say(f"{self.run} runs on {len(self.workers)} workers; Ctrl-C stops it everywhere")
                outcome = self.watch(-RECENT if attached and not attempt else -1)
            except KeyboardInterrupt:
                return self.interrupted()
            except WorkerLost as lost:
                say(str(lost))
                outcome = Outcome(1)
            if outcome.code == 0:
                self.finished(words)
                return 0
            if outcome.final:
                break
            self.describe()  # is it the TPU itself?
        say(f"to resume from the newest checkpoint: the same command with RUN={self.run}")
        return outcome.code

    def check_runs(self, words: list[str]) -> None:
        """InputError: the run's folder would be another one on each worker, where no checkpoint is ever whole."""
        folder = runs_folder(words)
        if len(self.workers) == 1 or "://" in folder or folder.startswith("/"):
            return
        what = f"--runs {folder} in ARGS is a folder of" if folder else "ARGS has no --runs, so the run's folder is on"
        raise InputError(
            f"{self.host.name} has {len(self.workers)} workers, and {what} each worker's own disk; give one that all"
            " of them share, ARGS='--runs gs://bucket/runs', or the absolute path of a shared folder"
        )

    def finished(self, words: list[str]) -> None:
        """Says where the results are."""
        folder = f"{runs_folder(words) or 'runs'}/{self.run}"
        if "://" in folder:
            say(f"{self.run} has ended; its results are in {folder}")
            return
        folder = folder if folder.startswith("/") else f"xla-zoo/worker-0/tree/{folder}"
        if isinstance(self.host, hosts.TpuVm):
            get = self.host.text("scp", "--recurse", f"{self.host.name}:{folder}", "runs/", "--worker=0")
        else:
            get = shlex.join(["scp", "-r", f"{self.host.hosts[0]}:{folder}", "runs/"])
        say(f"{self.run} has ended; its results are on worker 0: {get}")

    def interrupted(self) -> int:
        """Ctrl-C: stops the run on all workers. A second one leaves at once."""
        self.starting.abort()  # what is still on its way finds that its token was stopped
        say(
            f"stopping {self.run} on all workers; it has {self.options.grace:.0f} s to save a checkpoint."
            " Ctrl-C again leaves at once"
        )
        try:
            unsure = self.stop_all(self.token, self.options.grace)
        except KeyboardInterrupt:
            say(f"left before all workers had answered, so the run may go on: {self.make('stop')} ends it")
            return 130
        time.sleep(0.5)  # the last lines of the log
        if not unsure:
            say(f"stopped; no process of the run is left. To resume: the same command with RUN={self.run}")
        else:
            say(f"end it with {self.make('stop')}")
        return 130

    def logs(self) -> int:
        """Attaches to the run, or shows the end of one that is over. Ctrl-C leaves, and the run goes on."""
        self.describe()
        statuses = self.prepare_all({})
        alive = [status["running"] for status in statuses.values() if status["running"]]
        jobs = alive + sorted(
            (job for status in statuses.values() for job in status["jobs"]), key=lambda job: -job["started"]
        )
        jobs = [job for job in jobs if self.options.run in ("", job["run"])]
        if not jobs:
            wanted = f"RUN={self.options.run}" if self.options.run else "a run"
            raise InputError(f"{self.host.name} does not know of {wanted}; {self.make('status')} lists what it knows")
        self.run, self.token = jobs[0]["run"], jobs[0]["token"]
        say(f"{self.run}, the newest part of its log; all of it is on worker 0, xla-zoo/worker-0/jobs/{self.run}/log")
        try:
            return self.watch(-RECENT).code
        except KeyboardInterrupt:
            say(f"left; {self.run} goes on, {self.make('stop')} ends it")
            return 130

    def stop(self) -> int:
        """Ends whatever runs on the workers."""
        self.describe()
        statuses = self.prepare_all({})
        if self.options.run:
            other = [s["running"]["run"] for s in statuses.values() if s["running"]]
            if any(run != self.options.run for run in other):
                raise InputError(
                    f"RUN={self.options.run} does not run on {self.host.name}, but {', '.join(set(other))}"
                )
        if not any(status["running"] for status in statuses.values()):
            say("no run of ours is alive there")
            return 0
        say(f"it has {self.options.grace:.0f} s to save a checkpoint")
        return 1 if self.stop_all("", self.options.grace) else 0

    def status(self) -> int:
        """Prints what the TPU is, what runs there and how the newest runs ended."""
        self.describe()
        for worker, status in sorted(self.prepare_all({}).items()):
            holder = status["running"]
            now = self.busy(holder).partition(":")[0].replace("runs there", "runs") if holder else "idle"
            ended = [
                f"{job['run']} {'vanished' if job['code'] is None else 'exit code ' + str(job['code'])}"
                for job in status["jobs"]
                if job["token"] != holder.get("token")
            ]
            print(
                f"{self.label(worker)}: {now}; {status['free'] / 1e9:.0f} GB free; ended: {', '.join(ended) or 'none'}"
            )
        return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tpu.launch",
        usage="%(prog)s {train,logs,stop,status} --tpu TPU [option ...] [-- NAME=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("train", "logs", "stop", "status"))
    parser.add_argument("--tpu", required=True, help="name of a TPU VM, or ssh:host1,host2")
    parser.add_argument("--zone", default="", help="default: gcloud's")
    parser.add_argument("--project", default="", help="default: gcloud's")
    parser.add_argument("--run", default="", help="name of the run; the same name resumes it (default: model and time)")
    parser.add_argument("--env", default="", help="variables for the run: --env \"A=b C='d e'\"")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME", help="a variable of this environment")
    parser.add_argument("--retries", type=int, default=0, help="starts again when a worker fails and the TPU is READY")
    parser.add_argument(
        "--detach", action="store_true", help="leave when it runs; nobody stops the others if one fails"
    )
    parser.add_argument(
        "--grace", type=float, default=60, help="seconds to save a checkpoint when stopped (default: 60)"
    )
    parser.add_argument(
        "--lost-after", type=float, default=180, help="seconds after which a worker without connection is lost"
    )
    parser.add_argument("--gcloud-flag", action="append", default=[], help="for gcloud's ssh and scp, as --internal-ip")
    parser.add_argument("--ssh-config", default="", help="for ssh: hosts, a file for ssh's -F (default: your own)")
    # Split here: argparse does not take positional arguments after options.
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.words = arguments[end + 1 :]
    launcher = None
    try:
        host = hosts.choose(options.tpu, options.zone, options.project, options.gcloud_flag, options.ssh_config)
        launcher = Launcher(host, options)
        return getattr(launcher, options.action)()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except TpuGone as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if launcher.run:
            say(
                f"then the same command with RUN={launcher.run} resumes from its newest checkpoint, if that is in a"
                " bucket (--runs gs://bucket/runs in ARGS): the disks of a deleted TPU are gone"
            )
        return GONE
    except WorkerLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        say("left; nothing was started")
        return 130
    finally:
        if launcher is not None:
            launcher.connections.abort()
            launcher.starting.abort()


if __name__ == "__main__":
    sys.exit(main())
