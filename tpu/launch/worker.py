"""What a worker of a TPU does for the launcher: keeps the copy of the project, starts a run, streams its log, stops it.

The launcher sends this file over ssh's standard input with every command, followed by the command's own input, so a
worker never has an old or a damaged one. Only the standard library, Python 3.8 or later; systemd; root, or sudo without
a password.

A run is the unit xla-zoo.service, whose main process is tpu/launch/keeper.py. A machine has one unit of this name, so
systemd itself refuses a second run, kills whatever is left of one that has ended, and knows how it ended.

    ~/xla-zoo/worker-<i>/bundle     the working tree as it was sent
    ~/xla-zoo/worker-<i>/tree/      the working tree, with its .venv and runs/. A new bundle replaces the files that
                                    differ and removes those that are gone; what else is there stays, so a run can be
                                    resumed, and make installs again only when a requirements file differs
    ~/xla-zoo/worker-<i>/jobs/<run>/log    output of all starts of the run
    /run/xla-zoo-<uid>/             in memory, for its owner alone: keeper.py; start.json: the start that is alive, with
                                    its variables; ended.json: how the newest ones ended; stopped: its time is that of
                                    the last stop

Every start has a token, the same on all workers: with the same token it is done once, however often it is asked for.
A start that was asked for before a stop is refused after it (epoch). Answers are lines `@xla-zoo {json}`, the last one
with a `state`; without that the launcher tries again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import IO, Any

UNIT = "xla-zoo.service"
RUNTIME = Path(os.environ.get("XLA_ZOO_RUNTIME", f"/run/xla-zoo-{os.geteuid()}"))  # set by tests alone
ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
CHUNK = 48 * 1024  # bytes of log in an answer
HEARTBEAT = 5  # seconds; the launcher takes a long silence for a dead connection
POLL = 0.1  # seconds
SPEAKING = threading.Lock()
NOBODY = dict(run="a run of another user", token="", words=[], started=0, grace=60, worker=0, workers=0)
NEEDED = (
    "a run is a systemd unit, started as root or through sudo without a password; this host says: {}. Use a machine"
    " with both, or run make train there by hand"
)


class Failure(Exception):
    """What keeps a command from being done; the message is one sentence."""


def emit(**answer: object) -> None:
    """Writes one answer, a line of its own even after half a line."""
    with SPEAKING:
        sys.stdout.buffer.write(b"\n@xla-zoo " + json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def read_json(path: Path) -> Any:
    """Returns what a file holds, {} without one, or for one that a power cut has left empty."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write(path: Path, content: bytes | str) -> None:
    """Replaces a file as a whole, also for those who read or replace it at this moment."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # the disk may be full
            new.unlink()


def system(*words: object) -> None:
    """Runs a command as root. Failure: it failed."""
    result = subprocess.run([*ROOT, *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise Failure(NEEDED.format((result.stderr.strip() or f"{words[0]} failed").splitlines()[-1]))


def running() -> dict:
    """Returns the start that is alive on this machine: start.json without the variables. {}: none is."""
    command = ["systemctl", "show", UNIT, "--property=ActiveState"]
    for _ in range(20):
        try:
            shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            raise Failure(NEEDED.format("no systemctl")) from None
        if "not been booted with systemd" in shown.stderr:
            raise Failure(NEEDED.format(shown.stderr.strip()))
        if shown.returncode:  # the machine shuts down, or has just been started
            sys.exit(shown.stderr.strip() or "systemctl failed")
        if shown.stdout.strip() in ("ActiveState=inactive", "ActiveState=failed"):
            return {}
        if start := read_json(RUNTIME / "start.json"):
            return {**start, "environment": {}}
        time.sleep(POLL)  # the record of its end is written, and it is gone in a moment
    return NOBODY


def make_runtime() -> None:
    """Makes the folder in memory, which only root can."""
    if not RUNTIME.exists():
        system("install", "-d", "-m", "700", "-o", os.geteuid(), "-g", os.getegid(), RUNTIME)


def lock() -> IO:
    """Waits for its turn: one start at a time. Returns a file; closing it ends the turn."""
    file = (RUNTIME / "lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def epoch() -> str:
    """Returns what changes with every stop and every restart of the machine."""
    stopped = RUNTIME / "stopped"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {stopped.stat().st_mtime_ns if stopped.exists() else 0}"


def history() -> list[dict]:
    """Returns how the newest starts ended, the last one last."""
    return read_json(RUNTIME / "ended.json") or []


def ended(token: str) -> dict:
    """Returns how a start ended, {} if nothing is known of it."""
    return next((record for record in history() if record["token"] == token), {})


def bundle(home: Path, name: str) -> bytes:
    """Returns the working tree as it was sent, b"" if it is not here, or not whole."""
    with contextlib.suppress(FileNotFoundError):
        content = (home / "bundle").read_bytes()
        if hashlib.sha256(content).hexdigest() == name:
            return content
    return b""


def unpack(content: bytes, tree: Path, manifest: Path) -> None:
    """Makes the files of `tree` those of the bundle. Equal files keep their time, which make compares."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {member.name: member for member in archive}
        for name in set(read_json(manifest)) - set(members):
            with contextlib.suppress(OSError):
                (tree / name).unlink()
                os.removedirs((tree / name).parent)  # up to one that is not empty
        # Before the files: an unpacking that is cut off leaves no file that nobody knows.
        write(manifest, json.dumps(list(members)))
        for name, member in members.items():
            path = tree / name
            in_the_way = [folder for folder in path.parents if os.path.lexists(folder) and not folder.is_dir()]
            in_the_way += [path] if path.is_dir() and not path.is_symlink() else []
            for other in in_the_way:  # of the user's own
                os.replace(other, f"{other}.old-{time.time():.0f}")
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                path.unlink(missing_ok=True)
                os.symlink(member.linkname, path)
                continue
            new = archive.extractfile(member).read()
            if path.is_symlink() or not path.is_file() or path.read_bytes() != new:
                write(path, new)
            path.chmod(member.mode)


def receive(home: Path, name: str) -> dict:
    """Stores the bundle that follows on standard input, if it is whole."""
    content = sys.stdin.buffer.read()
    if hashlib.sha256(content).hexdigest() != name:
        sys.exit("the working tree has not come whole")
    home.mkdir(parents=True, exist_ok=True)
    write(home / "bundle", content)
    return {"state": "received"}


def start(home: Path) -> dict:
    """Starts the run that standard input describes, unless something is alive or this start has been done.

    Returns as `holder` what is alive now, or how this start has ended.
    """
    try:
        request = json.loads(sys.stdin.buffer.read())
    except ValueError:
        sys.exit("the start's input has not come whole")
    make_runtime()
    with lock():
        holder = running() or ended(request["token"])
        if not holder:
            begin(home, request)
            holder = running() or ended(request["token"])
        return {"state": "started", "holder": holder}


def begin(home: Path, request: dict) -> None:
    """Puts the working tree in its place and starts the unit. Returns when its keeper is ready."""
    content = bundle(home, request["bundle"])
    if not content:
        raise Failure("the working tree was replaced or damaged while the run was being started; try again")
    unpack(content, home / "tree", home / "manifest.json")
    if epoch() != request["epoch"]:  # a stop that waits for the lock, too
        raise Failure("the run was stopped while it was being started")
    log = home / "jobs" / request["run"] / "log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    keeper = RUNTIME / "keeper.py"
    keeper.write_text(request.pop("keeper"))
    # Where this machine can be reached by the others.
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text()))
    addresses = sorted(found, key=lambda address: address.startswith("127."))
    # LANGUAGE: how make says that a program has died is read by keeper.py and messages.py.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "LANGUAGE": "C", **request["environment"]}
    facts = {"environment": environment, "log": str(log), "offset": log.stat().st_size, "started": time.time()}
    write(RUNTIME / "start.json", json.dumps({"addresses": addresses, **request, **facts}))
    properties = {
        "Type": "exec",
        "KillMode": "mixed",  # SIGTERM to the keeper, which passes it on; SIGKILL to all that is left
        "TimeoutStopSec": f"{request['grace'] + 15:.0f}s",
        "SuccessExitStatus": "143",
        "ExecStopPost": f"{sys.executable} {keeper} ended",
        "OOMPolicy": "continue",  # a process that was killed for memory is the trainer's failure, no stop
        "LimitMEMLOCK": "infinity",  # a chip's driver pins memory
        "WorkingDirectory": home / "tree",
        "After": "network.target",  # at a shutdown the network is needed for the checkpoint, and to tell the others
    }
    with contextlib.suppress(Failure):
        system("systemctl", "reset-failed", UNIT)  # a start of before that failed
    words = [f"--property={name}={value}" for name, value in properties.items()]
    words += [f"--uid={os.geteuid()}", f"--gid={os.getegid()}", f"--unit={UNIT}", "--quiet"]
    try:
        system("systemd-run", *words, "--", sys.executable, keeper, "keep")
    except Failure:
        (RUNTIME / "start.json").unlink()  # it has the run's variables
        raise
    while running() and "ready" not in read_json(RUNTIME / "start.json"):
        time.sleep(POLL)


def follow(home: Path, token: str, at: int) -> dict:
    """Streams the log of a start from byte `at` (-n: its last n bytes), then how it ended."""
    looked = 0.0
    while True:
        start = read_json(RUNTIME / "start.json")
        record = ended(token)  # after start.json, which is removed later; before the log: see what was written last
        start = record or start
        if not record and time.monotonic() > looked + 1:
            looked = time.monotonic()
            if start.get("token") != token or not (running() or ended(token)):
                return {"state": "unknown"}
        with contextlib.suppress(FileNotFoundError), open(start["log"], "rb") as file:  # somebody may have removed it
            if at < 0:
                at = max(start["offset"], file.seek(0, os.SEEK_END) + at)
                file.seek(at)
                at += len(file.readline()) if at > start["offset"] else 0  # not half a line
            file.seek(at)
            while data := file.read(CHUNK):
                at += len(data)
                emit(at=at, data=data.decode(errors="surrogateescape"))
        if record:
            return dict(record, state="ended")
        time.sleep(POLL)


def stop(home: Path, run: str, grace: float | None) -> dict:
    """Stops what runs, and every start that is on its way. Returns when all is gone.

    run: stop only the run of this name, or the start of this token; "": whatever runs.
    """
    holder = running()
    if holder and run not in ("", holder["run"], holder["token"]):
        return {"state": "other", "run": holder["run"]}
    make_runtime()
    (RUNTIME / "stopped").touch()
    with lock():  # a start that is under way sees it
        holder = running()
    if not holder:
        for record in history()[-1:]:
            if time.time() < record["ended"] + 60 and run in ("", record["run"], record["token"]):
                return dict(record, state="stopped")
        return {"state": "idle"}
    begun, grace = time.monotonic(), holder["grace"] if grace is None else grace
    for words, seconds in ((("stop", "--no-block"), grace), (("kill", "--signal=SIGKILL"), grace + 30)):
        try:
            system("systemctl", *words, UNIT)
        except Failure:
            if running():  # else it has ended by itself
                raise
        while time.monotonic() < begun + seconds:
            if not running():
                return {"run": holder["run"], **ended(holder["token"]), "state": "stopped"}
            time.sleep(POLL)
    raise Failure(f"the processes of {holder['run']} do not end; restart the machine")


def status(home: Path, name: str) -> dict:
    """Returns what runs, how the newest runs ended, how much disk is free, and whether the bundle is here and whole."""
    known = {"running": running(), "ended": history()[-5:], "whole": bool(bundle(home, name)), "epoch": epoch()}
    return {"state": "status", "free": shutil.disk_usage(str(Path.home())).free, **known}


def heartbeats(action: str) -> None:
    """Shows that the connection is alive. Without it, what only looks on has nothing left to do."""
    while True:
        time.sleep(HEARTBEAT)
        try:
            emit(alive=True)
        except OSError:
            if action in ("follow", "status"):
                os._exit(1)


def main() -> None:
    """Does what tpu/launch/workers.py asks for: an action, the worker's number, and the action's arguments as JSON."""
    action, worker, arguments = sys.argv[1:]
    os.umask(0o077)
    threading.Thread(target=heartbeats, args=(action,), daemon=True).start()
    actions = {"start": start, "follow": follow, "stop": stop, "status": status, "receive": receive}
    try:
        answer = actions[action](Path.home() / f"xla-zoo/worker-{worker}", **json.loads(arguments))
    except Failure as error:
        answer = {"state": "failed", "message": str(error)}
    except OSError as error:
        answer = {"state": "failed", "message": f"{error.strerror}: {error.filename}"}
    emit(**answer)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the connection is gone; the launcher makes another one
        os._exit(1)
