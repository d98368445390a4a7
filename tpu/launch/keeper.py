"""The main process of a run's unit on each worker: keeps the trainer, and ends and repeats it
together with the others.

The keeper of worker 0 is the owner: it alone decides, and it lives as long as the run, whatever
becomes of the client. Every keeper reports to it each second, over the workers' internal network,
what its trainer does, and gets an order back. (Not through the object store: what fails first is
often the installation, without which no worker could write there. The workers of a slice must reach
each other anyway.)

The trainers start when all workers have joined. The first that fails ends all of them, within a
minute; so does a worker that is silent or that comes back with another keeper, and the owner's own
silence. RETRIES are starts of all trainers; after a stop, an exit code of 2 (an input to fix) or a
lost worker there are none.

The trainer's exit code is what `make train` writes into the file that $XLA_ZOO_EXIT_CODE names: see
tpu/exit_code.sh. make's own is 2 for any failure, and what it says of one depends on the language.

What the trainer prints goes through this process into the log, so that neither a full disk nor a
removed file ends it.

systemd starts it as `keeper.py keep`, and when it has ended `keeper.py ended`, with $SERVICE_RESULT
and the like. Only the standard library, Python 3.8 or later.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

RUNTIME = Path(__file__).resolve().parent

# Times, in seconds.
PULSE = 1.0  # between two reports
LOST = 40  # of silence after which a worker is lost; for the other workers also worker 0
JOIN = 300  # until all workers must have joined
HINT = 20  # after which the log says who has not joined
FAILED_GRACE = 10  # for the others when one has failed: they wait for it, and have nothing to save
NOT_STOPPED = 30  # after the time to save; by then systemd has killed a unit that it stops itself

# The log.
SEGMENT = 64 << 20  # bytes of one of its files
SEGMENTS = 4  # files that are kept
SEGMENT_NAMES = "log." + "[0-9]" * 15  # and not those of segments that somebody has compressed
LAST_LINES = 25  # of a failed worker's log, in worker 0's
LAST_BYTES = 16 << 10  # where those lines are looked for

# The owner's server.
LONGEST_MESSAGE = 256 << 10  # bytes of a report: its last lines, escaped
MOST_CONNECTIONS = 256  # at the same time; a slice has at most as many workers
MOST_OF_ONE = 16  # of these from one address: a worker has one, and nobody else may hold them all

# Exit codes of a trainer.
INPUT = 2  # an input to fix
STOPPED = 143  # after SIGTERM, its checkpoint saved
UNKNOWN = 1  # a failure before or beside the trainer: of the installation, or of make itself

KEPT = 20  # starts whose end is known
LOOPBACK = ("127.", "::1 ", "localhost")  # how addresses begin that mean a machine itself
SHELLS = ("make", "sh", "dash", "bash")


def write_json(path: Path, value: object) -> None:
    """Replaces a file as a whole, also for processes that read it at this moment."""
    new = path.with_name(path.name + ".new")
    text = json.dumps(value)
    try:
        new.write_text(text)
        os.replace(new, path)
    except OSError:  # no room for both: the old file's room is used
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        path.write_text(text)


def epoch() -> str:
    """Returns what changes with every stop and every restart of the machine; as in worker.py."""
    stopped = RUNTIME / "stopped"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    last_stop = stopped.stat().st_mtime_ns if stopped.exists() else 0
    return f"{boot} {last_stop}"


def members(group: int) -> list[int]:
    """Returns the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # pid (name) state parent group …; the name itself may contain ") ".
            after_name = (entry / "stat").read_text().rpartition(") ")[2]
            state, _, its_group = after_name.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(entry.name))
    return found


def trainers(group: int) -> list[int]:
    """Returns the processes of make's group, except make and its shells: these would report their
    own end in place of the trainer's."""
    found = []
    for pid in members(group):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name not in SHELLS:
                found.append(pid)
    return found


def send_signal(pids: list[int], number: int) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ask_to_end(make: int, number: int) -> bool:
    """Sends a signal to the trainer, which saves, and to make, which then begins nothing else: it
    may continue after a step of the installation has failed.

    Returns whether a trainer was there. If not, only make and shells got the signal, and one of
    them may be about to start the trainer: ask again.
    """
    found = trainers(make)
    asked = members(make)
    if found:
        asked = [pid for pid in asked if pid == make or pid in found]
    send_signal(asked, number)
    return bool(found)


def kill_group(group: int) -> None:
    """Kills what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def read_code(recorded: Path) -> int | None:
    """Returns the exit code that a trainer's shell wrote, None if it is not there or not whole."""
    with contextlib.suppress(OSError, ValueError):
        return int(recorded.read_text())
    return None


def exit_code(status: int, recorded: Path) -> int:
    """Returns the trainer's exit code.

    Args:
        status: make's, as of subprocess: below 0 for a signal.
        recorded: the file in which the trainer's is, where there was one.
    """
    code = read_code(recorded)
    if code is not None:
        return code
    if status < 0:
        return 128 - status
    return UNKNOWN if status else 0


def memory_kills(unit: Path) -> int:
    """Returns how many processes of a unit the kernel has killed for want of memory, since the unit
    was started."""
    with contextlib.suppress(OSError):
        events = (unit / "memory.events").read_text()
        found = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


class Log:
    """A run's log: segments, files whose names are the number of bytes before them, and the link
    `log` to the newest.

    Writing never fails: what finds no room is left out, and that is said as soon as there is room
    again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recent = b""  # the end of what has come, also of what found no room
        self.missing = 0  # bytes that found no room
        self.guard = threading.Lock()
        newest = sorted(folder.glob(SEGMENT_NAMES))[-1]
        self.open(newest)

    def open(self, path: Path) -> None:
        """Continues with this segment."""
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.base = int(path.suffix[1:])
        self.size = os.fstat(self.file).st_size

    def rotate(self) -> None:
        """Begins a new segment, and removes those that are too old."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"log.{self.base + self.size:015d}"
        before = self.file
        self.open(path)
        os.close(before)

        link = self.folder / "log.new"
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(path.name)
        os.replace(link, self.folder / "log")

        for old in sorted(self.folder.glob(SEGMENT_NAMES))[:-SEGMENTS]:
            old.unlink()

    def write(self, data: bytes) -> None:
        """Adds to the log as much as there is room for."""
        with self.guard:
            self.recent = (self.recent + data)[-LAST_BYTES:]
            self.renew()
            if self.missing:
                lack = f"the log's disk was full: {self.missing} bytes are not here"
                if not self.put(f"\n[xla-zoo] {lack}\n".encode()):
                    self.missing += len(data)
                    return
                self.missing = 0

            written = self.put(data)
            self.missing += len(data) - written
            if self.size >= SEGMENT:
                with contextlib.suppress(OSError):
                    self.rotate()

    def line(self, text: str) -> None:
        """Adds a line, a line of its own even after half a line."""
        half_a_line = self.recent and not self.recent.endswith(b"\n")
        begin = "\n" if half_a_line else ""
        self.write(f"{begin}{text}\n".encode())

    def renew(self) -> None:
        """Begins a new segment if somebody has removed or emptied this one: nobody would see what
        comes."""
        status = os.fstat(self.file)
        removed = not status.st_nlink
        emptied = status.st_size < self.size
        if removed or emptied:
            with contextlib.suppress(OSError):
                self.rotate()

    def put(self, data: bytes) -> int:
        """Writes to the segment, and returns how many bytes found room."""
        written = 0
        with contextlib.suppress(OSError):
            while written < len(data):
                written += os.write(self.file, data[written:])
        self.size += written
        return written


class Owner:
    """Decides for all workers of a run.

    A report: attempt, running, code (of that attempt), stopped, tail, incarnation.
    An order: do (wait, run, end: a retry may follow, or leave), attempt, grace.
    """

    def __init__(
        self, workers: int, retries: int, grace: float, address: str, say: Callable[..., None]
    ) -> None:
        """Takes the number of workers and of retries, the seconds that a trainer has to save, where
        the workers reach this one ("10.0.0.2 port 4711"), and what writes a line into the log."""
        self.workers = workers
        self.retries = retries
        self.grace = grace
        self.address = address
        self.say = say

        self.reports: dict[int, dict] = {}  # the newest of each worker
        self.heard: dict[int, float] = {}  # when that was
        self.incarnations: dict[int, str] = {}
        self.restarted: set[int] = set()
        self.begun = time.monotonic()
        self.hinted = False

        self.order = {"do": "wait", "attempt": 0, "grace": grace}
        self.code = 0  # the run's exit code
        self.why = ""
        self.over = False
        self.guard = threading.Lock()

    def report(self, worker: int, report: dict) -> dict:
        """Takes a worker's report. Returns the order for it."""
        with self.guard:
            known = self.incarnations.setdefault(worker, report["incarnation"])
            if known != report["incarnation"]:
                # A machine that was switched off and started again: its trainer is gone, and its
                # peers wait for it.
                self.restarted.add(worker)
                return {"do": "leave", "attempt": 0, "grace": self.grace}

            self.reports[worker] = report
            self.heard[worker] = time.monotonic()
            self.decide()
            return dict(self.order)

    def end(self, code: int, why: str, grace: float, again: bool) -> None:
        """Orders the end of this attempt. again: another follows, if retries are left."""
        self.code = code
        self.why = why
        others = "; ending the run on the others" if self.workers > 1 else ""
        self.say(why + others)

        retries = again and self.order["attempt"] <= self.retries
        self.order.update(do="end" if retries else "leave", grace=grace)

    def run(self) -> None:
        """Orders the next attempt."""
        self.code = 0
        self.why = ""
        self.order.update(do="run", attempt=self.order["attempt"] + 1, grace=self.grace)

    def decide(self) -> None:
        """Moves the run on: wait -> run -> end -> run or leave."""
        do = self.order["do"]
        now = time.monotonic()
        codes = self.codes()
        failed = [worker for worker, code in codes.items() if code]
        stopped = self.stopped(codes)
        silent = [worker for worker in self.reports if now > self.heard[worker] + LOST]
        lost = sorted({*silent, *self.restarted})

        if do in ("end", "leave"):
            self.decide_end(codes, stopped, lost)
        elif stopped:
            why = f"the run was stopped on worker {stopped[0]}"
            self.end(STOPPED, why, self.grace, again=False)
        elif failed:
            self.end_failed(failed[0], codes[failed[0]])
        elif self.restarted:
            why = f"worker {lost[0]} was restarted: what it trained is gone"
            self.end(1, why, FAILED_GRACE, again=False)
        elif lost:
            why = f"worker {lost[0]} was not heard for {LOST} s"
            self.end(1, why, FAILED_GRACE, again=False)
        elif do == "run" and len(codes) == self.workers:
            self.order.update(do="leave")
        elif do == "wait" and len(self.reports) == self.workers:
            self.run()
        elif do == "wait":
            self.wait_for_all(now)

    def codes(self) -> dict[int, int | None]:
        """Returns the exit codes of the workers whose trainer has ended in this attempt."""
        found = {}
        for worker, report in self.reports.items():
            if report["attempt"] == self.order["attempt"] and not report["running"]:
                found[worker] = report["code"]
        return found

    def stopped(self, codes: dict[int, int | None]) -> list[int]:
        """Returns the workers that SIGTERM has reached, or whose trainer it has ended."""
        found = []
        for worker, report in self.reports.items():
            saved = self.order["do"] == "run" and codes.get(worker) == STOPPED
            if report["stopped"] or saved:
                found.append(worker)
        return found

    def end_failed(self, worker: int, code: int) -> None:
        """Ends the attempt since a worker has failed, and shows the end of its log."""
        if worker:
            for line in self.reports[worker]["tail"].splitlines():
                self.say(line, f"[worker {worker}]")
        apart = self.reports[worker].get("apart")
        about = " before its trainer began, or beside it" if apart else ""
        why = f"worker {worker} failed{about} with exit code {code}"
        self.end(code, why, FAILED_GRACE, again=code != INPUT)

    def decide_end(self, codes: dict[int, int | None], stopped: list[int], lost: list[int]) -> None:
        """Waits until all trainers have ended; then another attempt begins, or the run is over."""
        if stopped or lost:
            self.order["do"] = "leave"
        for worker, report in self.reports.items():
            if report["running"] and worker not in lost:
                return

        if self.order["do"] == "leave":
            if not self.over and self.code == STOPPED:
                self.check_saved(codes)
            self.over = True
            return
        retry = f"retry {self.order['attempt']} of {self.retries}"
        self.say(f"starting again, {retry}; it resumes from its checkpoint")
        self.run()

    def check_saved(self, codes: dict[int, int | None]) -> None:
        """Makes a stop after which a worker has not saved a failure, with that worker's exit
        code."""
        for worker, code in sorted(codes.items()):
            apart = self.reports[worker].get("apart")
            if code not in (0, STOPPED, None) and not apart:
                unsaved = f"worker {worker} did not save: exit code {code}"
                self.code = code
                self.why = f"{self.why}; {unsaved}"
                self.say(unsaved)
                return

    def wait_for_all(self, now: float) -> None:
        """Says who has not joined yet, and gives up in the end."""
        missing = [str(worker) for worker in range(self.workers) if worker not in self.reports]
        absent = ", ".join(missing)
        if now > self.begun + JOIN:
            why = f"worker {absent} did not join in {JOIN} s"
            self.end(1, why, FAILED_GRACE, again=False)
        elif now > self.begun + HINT and not self.hinted:
            self.hinted = True
            remedy = (
                "are the workers allowed to reach each other there (a firewall rule for internal"
                " traffic)? LAUNCH_ARGS='--port N' chooses the port"
            )
            if self.address.startswith(LOOPBACK):
                remedy = (
                    "only worker 0 itself has this address, at which ssh has reached it, perhaps"
                    " through a tunnel: give TPU=ssh: the addresses that the workers have in their"
                    " own network"
                )
            unreached = f"worker {absent} has not reached worker 0 at {self.address} yet"
            self.say(f"{unreached}: {remedy}")


class Server(socketserver.ThreadingTCPServer):
    """Answers the keepers of the other workers, on one address, and never more than some of them at
    a time."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, owner: Owner, address: str, port: int, key: str) -> None:
        self.owner = owner
        self.key = key.encode()
        self.held: Counter[str] = Counter()  # connections by address
        self.counting = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)

    def process_request(self, request, client_address) -> None:
        """Takes a connection, or drops it where there are too many."""
        address = client_address[0]
        with self.counting:
            room_for_all = sum(self.held.values()) < MOST_CONNECTIONS
            has_room = room_for_all and self.held[address] < MOST_OF_ONE
            if has_room:
                self.held[address] += 1

        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Answers one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.counting:
                self.held[client_address[0]] -= 1

    def handle_error(self, request, client_address) -> None:
        """Keeps silent: a broken connection, or somebody who does not speak this."""


class Handler(socketserver.StreamRequestHandler):
    """One report. Nothing of it is read before its key."""

    timeout = 10

    def handle(self) -> None:
        """Answers a report with an order."""
        key = self.rfile.read(len(self.server.key))
        if not hmac.compare_digest(key, self.server.key):
            return
        line = self.rfile.readline(LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            return
        message = json.loads(line)
        order = self.server.owner.report(message["worker"], message["report"])
        self.wfile.write(json.dumps(order).encode() + b"\n")


class Keeper:
    """The trainer of one worker, and what was ordered for it."""

    def __init__(self, start: dict) -> None:
        """Takes what start.json says of this start."""
        self.start = start
        self.worker = start["worker"]
        self.log = Log(Path(start["folder"]))
        self.recorded = RUNTIME / "exit-code"
        cgroup = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        self.unit = Path("/sys/fs/cgroup" + cgroup)
        self.memory_kills = memory_kills(self.unit)  # those of the attempts before
        self.incarnation = secrets.token_hex(8)

        # The trainer of this attempt.
        self.process: subprocess.Popen | None = None
        self.pump: threading.Thread | None = None  # copies what it prints into the log
        self.attempt = 0
        self.code: int | None = None
        self.tail = ""  # the end of its log, if it failed
        self.apart = False  # whether the code is not the trainer's own

        # Its end.
        self.stopped = False  # SIGTERM has come: make stop, or the machine's shutdown
        self.killed_at = 0.0  # when the trainer's time to save is over
        self.asked = False  # whether it has been asked to save

        self.order = {"do": "wait", "attempt": 0, "grace": start["grace"]}
        self.heard = time.monotonic()  # the last order
        self.owner: Owner | None = None
        if self.worker == 0:
            self.owner = Owner(
                workers=start["workers"],
                retries=start["retries"],
                grace=start["grace"],
                address=self.owner_address(),
                say=self.say,
            )
        self.talking = threading.Lock()

    def owner_address(self) -> str:
        """Returns where the workers reach worker 0, for a message."""
        return f"{self.start['address']} port {self.start['port']}"

    def say(self, text: str, prefix: str = "[xla-zoo]") -> None:
        """Writes a line into the worker's log, and the keeper's own also into the journal, which
        others may read."""
        if prefix == "[xla-zoo]":
            with contextlib.suppress(OSError):  # the journal was killed
                print(prefix, text, flush=True)
        self.log.line(f"{prefix} {text}")

    def report(self) -> None:
        """Reports to the owner how things stand, and takes its order."""
        with self.talking:
            report = {
                "incarnation": self.incarnation,
                "attempt": self.attempt,
                "running": self.process is not None,
                "code": self.code,
                "apart": self.apart,
                "stopped": self.stopped,
                "tail": self.tail,
            }
            if self.owner:
                order = self.owner.report(self.worker, report)
            else:
                order = self.ask(report)
            if order:
                self.order = order
                self.heard = time.monotonic()

    def ask(self, report: dict) -> dict:
        """Returns the order of worker 0's keeper, {} if it cannot be reached."""
        message = json.dumps({"worker": self.worker, "report": report}).encode() + b"\n"
        address = (self.start["address"], self.start["port"])
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(self.start["key"].encode() + message)
                return json.loads(connection.makefile().readline(LONGEST_MESSAGE))
        except (OSError, ValueError):
            return {}

    def run(self) -> None:
        """Starts the trainer, in a session of its own."""
        self.killed_at = 0.0
        self.asked = False
        if epoch() != self.start["epoch"]:
            self.stopped = True  # a stop has overtaken this start
            return

        with contextlib.suppress(FileNotFoundError):
            self.recorded.unlink()
        environment = {**self.start["environment"], "XLA_ZOO_EXIT_CODE": str(self.recorded)}
        reading, writing = os.pipe()
        with self.talking:  # no report between these two
            self.attempt = self.order["attempt"]
            self.code = None
            self.tail = ""
            self.apart = False
            try:
                self.process = subprocess.Popen(
                    self.start["command"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    start_new_session=True,
                )
            except OSError as error:
                self.code = 127
                self.tail = f"make could not be started on the worker: {error.strerror}"
                self.apart = True
                self.say(self.tail)
            finally:
                os.close(writing)

        self.pump = threading.Thread(target=self.copy, args=(reading,), daemon=True)
        self.pump.start()

    def copy(self, reading: int) -> None:
        """Copies what the trainer and its processes print into the log, until none of them is
        left."""
        while data := os.read(reading, 1 << 16):
            self.log.write(data)
        os.close(reading)

    def end(self) -> None:
        """Asks the trainer to save and end, and kills it when its time is over.

        In a stop by systemd, systemd kills it first. But SIGTERM may have come from elsewhere.
        """
        make = self.process.pid
        if not self.killed_at:
            self.killed_at = time.monotonic() + self.order["grace"]
        if not self.asked:
            self.asked = ask_to_end(make, signal.SIGTERM)
        time_for_systemd = NOT_STOPPED if self.stopped else 0
        if time.monotonic() > self.killed_at + time_for_systemd:
            kill_group(make)

    def ended(self, status: int) -> None:
        """Notes how the trainer ended, and kills what is left of it."""
        kill_group(self.process.pid)
        self.kill_strays()
        kills = memory_kills(self.unit)
        killed_for_memory = kills > self.memory_kills
        self.memory_kills = kills

        self.pump.join(timeout=5)
        self.code = exit_code(status, self.recorded)
        self.apart = status != 0 and read_code(self.recorded) is None
        if self.code and killed_for_memory:
            killed = "the kernel killed a process of the run"
            self.say(f"the machine ran out of memory (not the TPU's): {killed}")

        lines = self.log.recent.decode(errors="replace").splitlines()[-LAST_LINES:]
        self.tail = "\n".join(lines) if self.code else ""
        self.process = None

    def kill_strays(self) -> None:
        """Kills what has left the group. Needs cgroup v2, as TPU VMs have it; elsewhere systemd
        does it at the end."""
        if self.unit.name != "xla-zoo.service":
            return
        with contextlib.suppress(OSError):
            strays = []
            for word in (self.unit / "cgroup.procs").read_text().split():
                if int(word) != os.getpid():
                    strays.append(int(word))
            send_signal(strays, signal.SIGKILL)

    def step(self) -> bool:
        """Does what is to be done now. Returns whether the keeper is needed any longer."""
        self.look_for_end()
        if not self.owner and self.order["do"] != "leave":
            self.leave_without_owner()

        do = self.order["do"]
        new = self.order["attempt"] > self.attempt
        if self.process:
            if self.stopped or new or do in ("end", "leave"):
                self.end()
            return True
        if self.stopped:
            return False
        over = self.owner.over if self.owner else do == "leave"
        if over:
            return False
        if new and do == "run":
            self.run()
        return True

    def leave_without_owner(self) -> None:
        """Orders itself to leave once worker 0 has been silent for too long."""
        if time.monotonic() <= self.heard + LOST:
            return
        firewall = f"is {self.owner_address()} open to internal traffic?"
        self.say(f"worker 0 was not heard for {LOST} s ({firewall}); ending")
        self.order = {"do": "leave", "attempt": self.attempt, "grace": self.start["grace"]}

    def look_for_end(self) -> None:
        """Notes the end of the trainer, once make and what it has started are over."""
        if not self.process:
            return
        status = self.process.poll()
        # make may end before the program that it has started, which is saving: SIGTERM may have
        # reached make as well.
        ending = self.stopped or self.killed_at
        saving = ending and members(self.process.pid)
        if status is not None and not saving:
            self.ended(status)


def keep() -> int:
    """Runs until the run has ended on this worker. Returns the exit code, on worker 0 the run's."""
    path = RUNTIME / "start.json"
    start = json.loads(path.read_text()) if path.exists() else {}
    if not start or "code" in start:
        # `systemctl restart`, as needrestart does it: the run was stopped and has saved; nobody has
        # started another.
        remedy = "that was a stop; the same make train resumes the run"
        print(f"[xla-zoo] restarted by the system: {remedy}", flush=True)
        return 0

    keeper = Keeper(start)
    take_signals(keeper)
    owner = keeper.owner
    if owner and start["workers"] > 1:
        try:
            server = Server(owner, start["address"], start["port"], start["key"])
        except OSError as error:
            refuse_port(keeper, path, error)
            return INPUT
        start["port"] = server.server_address[1]  # a free one, where 0 was asked for
        owner.address = keeper.owner_address()
        threading.Thread(target=server.serve_forever, daemon=True).start()
    write_json(path, {**start, "ready": True})

    threading.Thread(target=pulse, args=(keeper,), daemon=True).start()
    while keeper.step():
        time.sleep(0.1)
    keeper.report()
    if owner and start["workers"] > 1:
        # The others hear of it, and their units have ended when the next run starts.
        time.sleep(2 * PULSE)

    why = ""
    if owner:
        code = owner.code
        why = owner.why
    elif keeper.code is None:
        code = 1
    else:
        code = keeper.code
    end = {"code": code, "why": why, "trainer": keeper.code, "apart": keeper.apart}
    write_json(path, {**start, **end})
    return code


def take_signals(keeper: Keeper) -> None:
    """Makes SIGTERM a stop of the run; SIGHUP and SIGINT do nothing."""

    def stop(*_: object) -> None:
        keeper.stopped = True

    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def refuse_port(keeper: Keeper, path: Path, error: OSError) -> None:
    """Says, and records in start.json, that the owner's server cannot use its address."""
    start = keeper.start
    port = f"port {start['port']} of worker 0 ({start['address']})"
    why = f"{port} cannot be used: {error.strerror}"
    keeper.say(why)

    remedy = "give another: LAUNCH_ARGS='--port N'"
    if error.errno not in (errno.EADDRINUSE, errno.EACCES):
        own_network = "give TPU=ssh: addresses of the workers' own network"
        remedy = f"that is where ssh has reached it; {own_network}"
    write_json(path, {**start, "code": INPUT, "why": f"{why}; {remedy}"})


def pulse(keeper: Keeper) -> None:
    """Reports to the owner for as long as this process lives."""
    while True:
        keeper.report()
        time.sleep(0.1 if keeper.owner else PULSE)


def ended() -> None:
    """Notes how the unit ended: the keeper's own record, or systemd's if it was killed."""
    path = RUNTIME / "start.json"
    records = RUNTIME / "ended.json"
    if not path.exists():
        return
    record = {"code": 1, "why": "", **json.loads(path.read_text())}
    record["result"] = os.environ.get("SERVICE_RESULT", "")
    record["ended"] = time.time()
    record["environment"] = {}
    if os.environ.get("EXIT_CODE") in ("killed", "dumped"):
        number = getattr(signal, f"SIG{os.environ['EXIT_STATUS']}", 9)
        record["code"] = 128 + number
        record["trainer"] = 128 + number

    before = []
    with contextlib.suppress(OSError, ValueError):  # none yet, or one that found no room
        before = json.loads(records.read_text())
    kept = [*before, record][-KEPT:]
    try:
        write_json(records, kept)
    except OSError:  # no room; start.json's is enough
        path.unlink()
        write_json(records, kept)
    if path.exists():
        path.unlink()  # it has the run's variables


if __name__ == "__main__":
    sys.exit(keep() if sys.argv[1:] == ["keep"] else ended())
