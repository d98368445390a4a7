"""The main process of a run's unit on each worker: keeps the trainer, and ends and repeats it together with the others.

The keeper of worker 0 is the owner: it alone decides, and it lives as long as the run, whatever becomes of the client.
Every keeper tells it each second over the workers' internal network what its trainer does, and gets an order back. (Not
through the object store: what fails first is often the installation, without which no worker could write there. The
workers of a slice must reach each other anyway.) The trainers start when all workers have joined. The first that fails
ends all of them, within a minute; so does a worker that is silent, and the owner's own silence. RETRIES are starts of
all trainers; after a stop, an exit code of 2 (an input to fix) or a lost worker there are none.

systemd starts it as `keeper.py keep`, and when it has ended `keeper.py ended`, with $SERVICE_RESULT and the like. Only
the standard library, Python 3.8 or later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

RUNTIME = Path(__file__).resolve().parent
PULSE = 1.0  # seconds between two reports
LOST = 40  # seconds of silence after which a worker is lost, for the others also worker 0
JOIN = 300  # seconds until all workers must have joined
FAILED_GRACE = 10  # seconds for the others when one has failed: they wait for it, and have nothing to save
KEPT = 20  # starts whose end is known
LAST_LINES = 25  # of a failed worker's log, in worker 0's
STOPPED = 143  # a trainer's exit code after SIGTERM, its checkpoint saved
SIGNALS = {  # as make names them
    "Illegal instruction": 132,
    "Aborted": 134,
    "Bus error": 135,
    "Killed": 137,
    "Segmentation fault": 139,
    "Terminated": 143,
}


def write_json(path: Path, value: object) -> None:
    """Replaces a file as a whole, also for processes that read it at this moment."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)


def exit_code(status: int, end: str) -> int:
    """Returns the trainer's exit code. make's own is 2 for any failure; the log's end says what the program's was."""
    if status < 0:
        return 128 - status
    pattern = rf"^make(?:\[\d+\])?: \*\*\* \[.*\] (?:Error (\d+)|({'|'.join(SIGNALS)}))"
    found = re.findall(pattern, end, re.MULTILINE)
    if status != 2 or not found:
        return status
    number, name = found[-1]
    return int(number) if number else SIGNALS[name]


def members(group: int) -> list[int]:
    """Returns the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, its_group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def kill_group(group: int) -> None:
    """Kills what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Owner:
    """Decides for all workers of a run. A report: attempt, running, code (of that attempt), stopped, tail."""

    def __init__(self, workers: int, retries: int, grace: float, say: Callable[..., None]) -> None:
        self.workers, self.retries, self.grace, self.say = workers, retries, grace, say
        self.reports: dict[int, dict] = {}
        self.heard: dict[int, float] = {}
        self.code, self.why, self.over = 0, "", False
        self.order = {"do": "wait", "attempt": 0, "grace": grace}  # do: wait, run, end (a retry may follow) or leave
        self.begun = time.monotonic()
        self.guard = threading.Lock()

    def report(self, worker: int, report: dict) -> dict:
        """Takes a worker's report. Returns the order for it."""
        with self.guard:
            self.reports[worker], self.heard[worker] = report, time.monotonic()
            self.decide()
            return dict(self.order)

    def end(self, code: int, why: str, grace: float, again: bool) -> None:
        """Orders the end of this attempt. again: another follows, if retries are left."""
        self.code, self.why = code, why
        self.say(why + ("; ending the run on the others" if self.workers > 1 else ""))
        self.order.update(do="end" if again and self.order["attempt"] <= self.retries else "leave", grace=grace)

    def run(self) -> None:
        """Orders the next attempt."""
        self.code, self.why = 0, ""
        self.order.update(do="run", attempt=self.order["attempt"] + 1, grace=self.grace)

    def decide(self) -> None:
        """Moves the run on: wait -> run -> end -> run or leave."""
        do, attempt, reports = self.order["do"], self.order["attempt"], self.reports
        codes = {w: r["code"] for w, r in reports.items() if r["attempt"] == attempt and not r["running"]}
        failed = [worker for worker, code in codes.items() if code]
        stopped = [w for w, r in reports.items() if r["stopped"] or (do == "run" and codes.get(w) == STOPPED)]
        lost = [worker for worker in reports if time.monotonic() > self.heard[worker] + LOST]
        if do in ("end", "leave"):
            if stopped or lost:
                self.order["do"] = do = "leave"
            if all(worker in lost or not report["running"] for worker, report in reports.items()):
                self.over = do == "leave"
                if not self.over:
                    self.say(f"starting again, retry {attempt} of {self.retries}; it resumes from its checkpoint")
                    self.run()
        elif stopped:
            self.end(STOPPED, f"the run was stopped on worker {stopped[0]}", self.grace, again=False)
        elif failed:
            worker, code = failed[0], codes[failed[0]]
            for line in reports[worker]["tail"].splitlines() if worker else ():
                self.say(line, f"[worker {worker}]")
            self.end(code, f"worker {worker} failed with exit code {code}", FAILED_GRACE, again=code != 2)
        elif lost:
            self.end(1, f"worker {lost[0]} was not heard for {LOST} s", FAILED_GRACE, again=False)
        elif do == "run" and len(codes) == self.workers:
            self.order.update(do="leave")
        elif do == "wait" and len(reports) == self.workers:
            self.run()
        elif do == "wait" and time.monotonic() > self.begun + JOIN:
            absent = ", ".join(str(worker) for worker in range(self.workers) if worker not in reports)
            self.end(1, f"worker {absent} did not join in {JOIN} s", FAILED_GRACE, again=False)

    def serve(self, key: str) -> int:
        """Answers the other workers in the background. Returns the port."""

        class Handler(socketserver.StreamRequestHandler):
            timeout = 10

            def handle(handler) -> None:
                message = json.loads(handler.rfile.readline())
                if message["key"] == key:
                    order = self.report(message["worker"], message["report"])
                    handler.wfile.write(json.dumps(order).encode() + b"\n")

        server = socketserver.ThreadingTCPServer(("", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # a broken connection, or somebody who does not speak this
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address[1]


class Keeper:
    """The trainer of one worker, and what was ordered for it."""

    def __init__(self, start: dict) -> None:
        self.start, self.worker = start, start["worker"]
        self.log = open(start["log"], "a+b", buffering=0)  # noqa: SIM115 - kept, should the file be removed
        self.process: subprocess.Popen | None = None
        self.attempt, self.code, self.tail, self.began = 0, None, "", 0
        self.stopped = False  # SIGTERM has come: make stop, or the machine's shutdown
        self.killed_at = 0.0  # when the trainer's time to save is over
        self.order = {"do": "wait", "attempt": 0, "grace": start["grace"]}
        self.heard = time.monotonic()  # the last order
        self.owner = None if self.worker else Owner(start["workers"], start["retries"], start["grace"], self.say)
        self.talking = threading.Lock()

    def say(self, text: str, mark: str = "[xla-zoo]") -> None:
        """Writes a line into the worker's log and the journal."""
        print(mark, text, flush=True)
        with contextlib.suppress(OSError):  # the disk may be full
            self.log.write(f"{mark} {text}\n".encode())

    def report(self) -> None:
        """Tells the owner how things stand, and takes its order."""
        with self.talking:
            report = {"attempt": self.attempt, "running": self.process is not None, "code": self.code}
            report.update(stopped=self.stopped, tail=self.tail)
            order = self.owner.report(self.worker, report) if self.owner else self.ask(report)
            if order:
                self.order, self.heard = order, time.monotonic()

    def ask(self, report: dict) -> dict:
        """Returns the order of worker 0's keeper, {} if it cannot be reached."""
        message = json.dumps({"key": self.start["key"], "worker": self.worker, "report": report}).encode() + b"\n"
        addresses = self.start["addresses"]
        for number, address in enumerate(addresses):
            try:
                with socket.create_connection((address, self.start["port"]), timeout=5) as connection:
                    connection.sendall(message)
                    order = json.loads(connection.makefile().readline())
            except (OSError, ValueError):
                continue
            addresses.insert(0, addresses.pop(number))
            return order
        return {}

    def run(self) -> None:
        """Starts the trainer, in a session of its own."""
        self.killed_at, self.began = 0.0, self.log.seek(0, os.SEEK_END)
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log, "start_new_session": True}
        with self.talking:  # no report between these two
            self.attempt, self.code, self.tail = self.order["attempt"], None, ""
            try:
                self.process = subprocess.Popen(self.start["command"], env=self.start["environment"], **streams)
            except OSError as error:
                self.code, self.tail = 127, f"make could not be started on the worker: {error.strerror}"
                self.say(self.tail)

    def end(self) -> None:
        """Asks the trainer to save and end, and kills it when its time is over. Of a stop systemd keeps the time."""
        make = self.process.pid
        if not self.killed_at:
            self.killed_at = time.monotonic() + self.order["grace"]
            # Not to make, which would report its own end instead of the trainer's; a shell does not pass it on.
            for pid in [pid for pid in members(make) if pid != make] or [make]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif not self.stopped and time.monotonic() > self.killed_at:
            kill_group(make)

    def ended(self, status: int) -> None:
        """Notes how the trainer ended, and kills what is left of it."""
        size = os.fstat(self.log.fileno()).st_size
        at = max(self.began, size - 16384)
        end = os.pread(self.log.fileno(), size - at, at).decode(errors="replace")
        lines = end.splitlines()[-LAST_LINES:]
        self.code = exit_code(status, end)
        self.tail = "\n".join(lines) if self.code else ""
        print(*lines, sep="\n", flush=True)  # the journal has the end, too
        kill_group(self.process.pid)
        unit = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2])
        if unit.name == "xla-zoo.service":
            with contextlib.suppress(OSError):  # also what has left the group; cgroup v2
                for pid in map(int, (unit / "cgroup.procs").read_text().split()):
                    if pid != os.getpid():
                        os.kill(pid, signal.SIGKILL)
                if self.code and re.search(r"^oom_kill [1-9]", (unit / "memory.events").read_text(), re.MULTILINE):
                    self.say("the machine ran out of memory (not the TPU's): the kernel killed a process of the run")
        self.process = None

    def step(self) -> bool:
        """Does what is to be done now. Returns whether the keeper is needed any longer."""
        status = self.process.poll() if self.process else None
        # make may end before the program that it has started, which is saving.
        if status is not None and not (self.killed_at and members(self.process.pid)):
            self.ended(status)
        if not self.owner and self.order["do"] != "leave" and time.monotonic() > self.heard + LOST:
            self.say(f"worker 0 was not heard for {LOST} s (its keeper's port is open to internal traffic?); ending")
            self.order = {"do": "leave", "attempt": self.attempt, "grace": self.start["grace"]}
        do, new = self.order["do"], self.order["attempt"] > self.attempt
        if self.process:
            if self.stopped or new or do in ("end", "leave"):
                self.end()
        elif self.stopped or (self.owner.over if self.owner else do == "leave"):
            return False
        elif new and do == "run":
            self.run()
        return True


def keep() -> int:
    """Runs until the run has ended on this worker. Returns the exit code, on worker 0 the run's."""
    start = json.loads((RUNTIME / "start.json").read_text())
    keeper = Keeper(start)
    signal.signal(signal.SIGTERM, lambda *_: setattr(keeper, "stopped", True))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    owner = keeper.owner
    if owner:
        start["port"] = owner.serve(start["key"])
    write_json(RUNTIME / "start.json", {**start, "ready": True})

    def pulse() -> None:
        while True:
            keeper.report()
            time.sleep(0.1 if owner else PULSE)

    threading.Thread(target=pulse, daemon=True).start()
    while keeper.step():
        time.sleep(0.1)
    keeper.report()
    if owner and start["workers"] > 1:
        time.sleep(2 * PULSE)  # the others hear of it, and their units have ended when the next run starts
    code, why = (owner.code, owner.why) if owner else (1 if keeper.code is None else keeper.code, "")
    write_json(RUNTIME / "start.json", {**start, "code": code, "why": why, "trainer": keeper.code})
    return code


def ended() -> None:
    """Notes how the unit ended: the keeper's own word, or systemd's if it was killed."""
    path, records = RUNTIME / "start.json", RUNTIME / "ended.json"
    record = {"code": 1, "why": "", **json.loads(path.read_text()), "result": os.environ.get("SERVICE_RESULT", "")}
    record.update(ended=time.time(), environment={})
    if os.environ.get("EXIT_CODE") in ("killed", "dumped"):
        record["code"] = record["trainer"] = 128 + getattr(signal, f"SIG{os.environ['EXIT_STATUS']}", 9)
    before = json.loads(records.read_text()) if records.exists() else []
    write_json(records, [*before, record][-KEPT:])
    path.unlink()  # it has the run's variables


if __name__ == "__main__":
    sys.exit(keep() if sys.argv[1:] == ["keep"] else ended())
