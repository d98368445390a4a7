"""The workers of one TPU: asks them, copies files to them, starts a run on all of them and stops it.

Only the standard library, Python 3.9 or later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from tpu.launch import hosts
from tpu.launch.connections import Connections, Patience, Result, WorkerLost, parallel

PROGRAM = Path(__file__).with_name("worker.py")
ASK_SECONDS = 300  # gcloud may have to bring a new ssh key to all workers first
COPY_SECONDS = 1800
FAILED_GRACE = 10  # seconds for the others when a worker has failed: without it they have nothing to save
PRINTING = threading.Lock()


def say(*lines: str) -> None:
    """Prints the launcher's own lines to standard error; standard output is the log of worker 0, as it is."""
    with PRINTING:
        sys.stdout.flush()
        for line in lines:
            print(f"[launch] {line}", file=sys.stderr, flush=True)


class TpuGone(Exception):
    """A TPU that cannot be used any more; the message says why and what to do."""


class Start(NamedTuple):
    """One start of a run. token: new for every start, the same on all workers ("": whatever runs there)."""

    run: str = ""
    token: str = ""


class Fleet:
    """All workers of a TPU. words: TPU=, ZONE= and PROJECT= as make takes them; lost_after: see `Patience`."""

    def __init__(self, host: hosts.TpuVm | hosts.SshHosts, words: list[str], lost_after: float) -> None:
        self.host, self.words, self.lost_after = host, words, lost_after
        self.workers = range(0)
        self.connections, self.starting = Connections(), Connections()
        self.program = f"worker-{hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:16]}.py"
        self.describing = threading.Lock()
        self.described: tuple[float, hosts.Machine | None] = (0.0, None)

    def make(self, target: str) -> str:
        """Returns the command of make to show, for this TPU."""
        return shlex.join(["make", target, *self.words])

    def label(self, worker: int) -> str:
        """Returns the name of a worker in a sentence."""
        host = self.host
        return f"worker {worker} ({host.hosts[worker]})" if isinstance(host, hosts.SshHosts) else f"worker {worker}"

    def busy(self, holder: dict) -> str:
        """Returns one sentence about another run that is alive."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder.get("started", 0)))
        words = shlex.join(holder.get("words", []))
        return (
            f"{holder.get('run', 'a run')} ({words}) runs there since {since}: watch it with {self.make('logs')},"
            f" end it with {self.make('stop')}"
        )

    def describe(self) -> None:
        """Says what the TPU is. InputError, TpuGone: it cannot be used now."""
        machine = self.host.describe()
        self.described = (time.monotonic(), machine)
        say(machine.line)
        if machine.problem:
            raise TpuGone(machine.problem) if machine.lost else InputError(machine.problem)
        self.workers = range(machine.workers)

    def machine(self) -> hosts.Machine | None:
        """Returns the TPU's state, at most 3 s old. None: the cloud cannot be asked; this machine may be offline."""
        with self.describing:
            at, machine = self.described
            if time.monotonic() > at + 3:
                machine = None
                with contextlib.suppress(InputError):
                    machine = self.host.describe()
                self.described = (time.monotonic(), machine)
            return machine

    def check(self, worker: int, result: Result) -> bool:
        """Raises after a broken connection if another attempt is useless. False: the cloud could not be asked."""
        sentence = hosts.final_ssh_error(result.errors, self.label(worker))
        if sentence:
            raise InputError(sentence)
        if "Traceback" in result.errors and "xla-zoo/worker-" in result.errors:
            raise RuntimeError(f"tpu/launch/worker.py on worker {worker}:\n{result.errors}")
        machine = self.machine()
        if machine is not None and machine.problem:
            raise TpuGone(machine.problem)
        return machine is not None

    def retry(self, worker: int, result: Result, patience: Patience) -> None:
        """Sleeps until the next attempt after a broken connection, or raises because it would be useless."""
        if not self.check(worker, result):
            patience.renew()
        patience.wait(worker, hosts.why_broken(result.errors))

    def command(self, worker: int, action: str, start: Start | None = None, *arguments: str) -> str:
        """Returns the shell words that run tpu/launch/worker.py on the worker."""
        words = ["--run", start.run, "--token", start.token] if start else []
        return shlex.join(["python3", f"xla-zoo/worker-{worker}/files/{self.program}", action, *words, *arguments])

    def ask(self, worker: int, script: str, data: bytes = b"", connections: Connections | None = None) -> dict:
        """Runs a shell script on a worker until it answers: connections that break are made again.

        InputError, TpuGone: another attempt is useless. WorkerLost: none has worked for `lost_after` seconds.
        """
        patience = Patience(self.lost_after)
        heard: dict[str, Any] = {}
        while True:
            command = self.host.ssh(worker, f"sh -c {shlex.quote(script)}")
            result = (connections or self.connections).run(command, data, heard.update, ASK_SECONDS)
            if result.answer and result.answer["state"] != "incomplete":
                return {**heard, **result.answer}
            if result.answer:
                patience.wait(worker, hosts.why_broken(result.errors))
            else:
                self.retry(worker, result, patience)

    def copy(self, worker: int, sources: list[str], folder: str) -> None:
        """Copies files to a worker; a copy that breaks is repeated, as in `ask`."""
        patience = Patience(self.lost_after)
        while True:
            result = self.connections.run(self.host.scp(worker, sources, folder), silence=COPY_SECONDS)
            if result.code == 0:
                return
            self.retry(worker, result, patience)

    def prepare(self, worker: int, files: dict[str, bytes]) -> dict:
        """Copies the files that the worker does not have. Returns its status: what runs there."""
        folder = f"xla-zoo/worker-{worker}/files"
        status = self.command(worker, "status")
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
            sources = []
            for name in missing:
                sources.append(str(Path(temporary, f"{name}.{part}")))
                Path(sources[-1]).write_bytes(files[name])
            self.copy(worker, sources, folder)
        moves = f"""for new in *.{part}; do if [ -e "$new" ]; then mv "$new" "${{new%.{part}}}"; fi; done"""
        old = "find . -name '*.part-*' -mmin +1440 -exec rm {} +"
        return self.ask(worker, f"cd {folder} && {moves}; {old}; cd && {status}")

    def prepare_all(self, files: dict[str, bytes]) -> dict[int, dict]:
        """Calls `prepare` for all workers at once. Returns their statuses."""
        files = {self.program: PROGRAM.read_bytes(), **files}
        return parallel(lambda worker: self.prepare(worker, files), self.workers)

    def start_all(self, start: Start, words: list[str], environment: dict[str, str], bundle: str) -> None:
        """Starts the run on worker 0 and then on the others. InputError: it cannot be started; then it runs nowhere."""
        request = json.dumps({"words": [*words, f"NAME={start.run}"], "environment": environment}).encode()

        def start_one(worker: int) -> None:
            answer = self.ask(worker, self.command(worker, "start", start, "--bundle", bundle), request, self.starting)
            if answer["state"] == "busy":
                raise InputError(f"{self.label(worker)} is busy: {self.busy(answer['holder'])}")
            if answer["state"] not in ("started", "attached"):
                raise InputError(f"{self.label(worker)}: {answer.get('message', answer['state'])}")

        try:
            start_one(0)  # of two launchers at the same time one is first here, and the other ends without harm
            parallel(start_one, self.workers[1:])
        except (InputError, WorkerLost):
            self.stop_all(start, FAILED_GRACE)
            raise

    def stop_all(self, start: Start, grace: float) -> list[int]:
        """Ends a start of the run on all workers. Returns the workers that did not confirm it."""
        connections = Connections()

        def stop(worker: int) -> dict | None:
            try:
                for _ in range(3):
                    command = self.command(worker, "stop", start, "--grace", str(grace))
                    result = connections.run(self.host.ssh(worker, command))
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
            if answer and answer["state"] == "stopped" and not start.token:
                code = "" if answer["code"] is None else f", exit code {answer['code']}"
                say(f"{self.label(worker)}: stopped {answer['run']}{code}")
        unsure = sorted(worker for worker, answer in answers.items() if not answer or answer["state"] == "stuck")
        for worker in unsure:
            say(f"{self.label(worker)} did not confirm that it stopped; it may still hold the TPU")
        return unsure
