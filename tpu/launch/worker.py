"""What a worker of a TPU does for the launcher: keeps the copy of the project, starts a run, streams its log, stops it.

The launcher sends this file over ssh's standard input with every command, followed by the command's own input, so a
worker never has an old or a damaged one. Only the standard library, Python 3.8 or later; systemd; root, or sudo without
a password.

A run is the transient unit xla-zoo.service, whose main process is tpu/launch/keeper.py. A machine has one unit of this
name, so systemd itself refuses a second run, kills whatever is left of one that has ended, and knows how it ended.

    ~/xla-zoo/worker-<i>/bundle     the working tree as it was sent
    ~/xla-zoo/worker-<i>/tree/      the working tree, with its .venv and runs/. A new bundle replaces the files that
                                    differ and removes those that are gone; what else is there stays, so a run can be
                                    resumed, and make installs again only when a requirements file differs
    ~/xla-zoo/worker-<i>/jobs/<run>/log    output of all starts of the run
    /run/xla-zoo/                   in memory, for its owner alone: keeper.py; start.json: the newest start with its
                                    variables; ended.json: how the newest ones ended; epoch: changes with every stop

Every start has a token, the same on all workers: with the same token it is done once, however often it is asked for.
A start that was asked for before a stop is refused after it (epoch). Answers are lines `@xla-zoo {json}`; log data
carries its offset, so a repeated part is recognized.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNIT = "xla-zoo.service"
RUNTIME = Path(os.environ.get("XLA_ZOO_RUNTIME", "/run/xla-zoo"))  # set by tests alone
ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
CHUNK = 48 * 1024  # bytes of log in an answer
TAIL = 64 * 1024  # bytes of log that come with the end: what went wrong is looked for there
HEARTBEAT = 5  # seconds; the launcher takes a long silence for a dead connection
POLL = 0.1  # seconds
SPEAKING = threading.Lock()
NOBODY = {"run": "a run that ends, or is another user's", "token": "", "words": [], "bundle": "", "started": 0}
NOBODY.update(grace=60, worker=0, workers=0)
NEEDED = (
    "a run is a systemd unit, started as root or through sudo without a password; this host says: {}. Use a machine"
    " with both, or run make train there by hand"
)


class Failure(Exception):
    """What keeps a command from being done; the message is one sentence."""


class Passing(Exception):
    """What keeps a command from being done now; the launcher tries again."""


def emit(**answer: object) -> None:
    """Writes one answer, a line of its own even after half a line."""
    with SPEAKING:
        sys.stdout.buffer.write(b"\n@xla-zoo " + json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def read_json(path: Path, other: Any = None) -> Any:
    """Returns what a file holds, else `other`: no file, another user's, or one that a power cut has left empty."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {} if other is None else other


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
    """Returns the start that is alive on this machine: run, token, words, bundle, started, …. {}: none is."""
    try:
        command = ["systemctl", "show", UNIT, "--property=ActiveState"]
        shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise Failure(NEEDED.format("no systemctl")) from None
    if "not been booted with systemd" in shown.stderr:
        raise Failure(NEEDED.format(shown.stderr.strip()))
    if shown.returncode:  # the machine shuts down, or has just been started
        raise Passing(shown.stderr.strip() or "systemctl failed")
    if shown.stdout.strip() in ("ActiveState=inactive", "ActiveState=failed"):
        return {}
    start = {**NOBODY, **read_json(RUNTIME / "start.json")}
    return {name: start[name] for name in NOBODY}


def own_runtime(holder: dict) -> bool:
    """Makes /run/xla-zoo ours. Returns False where it belongs to another user, and so does what runs."""
    stranger = RUNTIME.exists() and RUNTIME.stat().st_uid != os.geteuid()
    if stranger and holder:
        return False
    if stranger:
        system("rm", "-rf", RUNTIME)
    if stranger or not RUNTIME.exists():  # of two commands at once both may find nothing: only make it
        system("install", "-d", "-m", "700", "-o", os.geteuid(), "-g", os.getegid(), RUNTIME)
    return True


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Lets one start at a time come here."""
    with (RUNTIME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def epoch() -> str:
    """Returns what changes with every stop and every restart of the machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {read_json(RUNTIME / 'epoch', '')}"


def history() -> list[dict]:
    """Returns how the newest starts ended, the last one last."""
    return read_json(RUNTIME / "ended.json", [])


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


def move_aside(path: Path) -> None:
    """Keeps what stands in the way of a file or a folder of the bundle, under another name."""
    os.replace(path, f"{path}.old-{time.time():.0f}")


def unpack(content: bytes, tree: Path, manifest: Path) -> None:
    """Makes the files of `tree` those of the bundle. Equal files keep their time, which make compares."""
    tree.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
        names = [member.name for member in members]
        for name in set(read_json(manifest, [])) - set(names):
            with contextlib.suppress(OSError):
                (tree / name).unlink()
            for folder in list((tree / name).parents)[: name.count("/")]:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if it is empty
        # Before the files: an unpacking that is cut off leaves no file that nobody knows.
        write(manifest, json.dumps(names))
        for member in members:
            path = tree / member.name
            for folder in list(path.parents)[: member.name.count("/")]:
                if os.path.lexists(folder) and not folder.is_dir():
                    move_aside(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                move_aside(path)
            if member.issym():
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                os.symlink(member.linkname, path)
                continue
            new = archive.extractfile(member).read()
            if path.is_symlink() or not path.is_file() or path.read_bytes() != new:
                write(path, new)
            path.chmod(member.mode)


def receive(home: Path, options: argparse.Namespace) -> dict:
    """Stores the bundle that follows on standard input, if it is whole."""
    content = sys.stdin.buffer.read()
    if hashlib.sha256(content).hexdigest() != options.bundle:  # gcloud repeats a broken command without its input
        return {"state": "incomplete"}
    home.mkdir(parents=True, exist_ok=True)
    write(home / "bundle", content)
    return {"state": "received"}


def start(home: Path, options: argparse.Namespace) -> dict:
    """Starts the run, unless this start was done before. Standard input: {"words", "environment", "keeper", …}."""
    try:
        request = json.loads(sys.stdin.buffer.read())
    except ValueError:
        return {"state": "incomplete"}
    holder = running()
    if not own_runtime(holder):
        return {"state": "busy", "holder": holder}
    with locked():
        holder = running()
        if options.token == holder.get("token") or ended(options.token):
            return {"state": "attached", **meeting_place()}
        if holder:
            return {"state": "busy", "holder": holder}
        check_epoch(options.epoch)
        content = bundle(home, options.bundle)
        if not content:
            raise Failure("the working tree was replaced or damaged while the run was being started; try again")
        unpack(content, home / "tree", home / "manifest.json")
        log = home / "jobs" / options.run / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        (RUNTIME / "keeper.py").write_text(request.pop("keeper"))
        request["environment"] = dict(os.environ, PYTHONUNBUFFERED="1", **request["environment"])
        request.update(run=options.run, token=options.token, bundle=options.bundle, started=time.time())
        request.update(log=str(log), offset=log.stat().st_size)
        write(RUNTIME / "start.json", json.dumps(request))
        check_epoch(options.epoch)  # a stop has waited for this lock
        start_unit(home / "tree", options.token, request["grace"])
        return {"state": "started", **meeting_place()}


def check_epoch(expected: str) -> None:
    """Checks that no stop has come since the launcher asked. Failure: one has."""
    if epoch() != expected:
        raise Failure("the run was stopped while it was being started")


def start_unit(tree: Path, token: str, grace: float) -> None:
    """Starts the unit, and waits until its keeper is ready. Failure: it ended before."""
    keeper = RUNTIME / "keeper.py"
    properties = {
        "Type": "exec",
        "KillMode": "mixed",  # SIGTERM to the keeper, which passes it on; SIGKILL to all that is left
        "TimeoutStopSec": f"{grace + 15:.0f}s",
        "SuccessExitStatus": "143",
        "ExecStopPost": f"{sys.executable} {keeper} ended",
        "OOMPolicy": "continue",  # a process that was killed for memory is the trainer's failure, no stop
        "LimitMEMLOCK": "infinity",  # a chip's driver pins memory
        "WorkingDirectory": tree,
    }
    with contextlib.suppress(Failure):
        system("systemctl", "reset-failed", UNIT)  # a start of before that failed
    words = [f"--property={name}={value}" for name, value in properties.items()]
    words += [f"--uid={os.geteuid()}", f"--gid={os.getegid()}", f"--unit={UNIT}", "--quiet"]
    system("systemd-run", *words, "--", sys.executable, keeper, "keep")
    while read_json(RUNTIME / "port.json").get("token") != token:
        if not running():
            raise Failure(f"the run ended at once: journalctl -u {UNIT} on the worker says why")
        time.sleep(POLL)


def meeting_place() -> dict:
    """Returns where and with which key this machine's keeper hears those of the other workers."""
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text()))
    addresses = sorted(found, key=lambda address: address.startswith("127."))
    port = read_json(RUNTIME / "port.json").get("port", 0)
    return {"addresses": addresses, "port": port, "key": read_json(RUNTIME / "start.json").get("key", "")}


def follow(home: Path, options: argparse.Namespace) -> dict:
    """Streams the log of a start from byte `at`, then how it ended. -1: all of it; -n: its last n bytes."""
    at, looked = options.at, 0.0
    while True:
        record = ended(options.token)  # first: what was written before the end is read after it is known
        start = record or read_json(RUNTIME / "start.json")
        known = start.get("token") == options.token
        if not record and (not known or time.monotonic() > looked + 1):
            looked = time.monotonic()
            if running().get("token") != options.token and not ended(options.token):
                return {"state": "unknown"}
            if not known:  # it has ended at this moment
                continue
        offset = start["offset"]
        try:
            file = open(start["log"], "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:  # somebody has removed it; the keeper knows how the run ends without it
            file = io.BytesIO()
        with file:
            if at < 0:
                at = max(offset, file.seek(0, os.SEEK_END) + at if at < -1 else 0)
                file.seek(at)
                at += len(file.readline()) if at > offset else 0  # not half a line
            file.seek(at)
            while data := file.read(CHUNK):
                emit(at=at, data=base64.b64encode(data).decode())
                at += len(data)
            if record:
                file.seek(max(offset, at - TAIL))
                return dict(record, state="ended", tail=base64.b64encode(file.read()).decode())
        time.sleep(POLL)


def stop(home: Path, options: argparse.Namespace) -> dict:
    """Stops what runs ("" or --run: only this run), and every start that is on its way. Returns when all is gone."""
    holder = running()
    if holder and options.run not in ("", holder["run"]):
        return {"state": "other", "holder": holder}
    if own_runtime(holder):
        write(RUNTIME / "epoch", json.dumps(secrets.token_hex(8)))
        with locked():  # a start that is under way sees the new epoch
            holder = running()
    if not holder:
        for record in history()[-1:]:
            if time.time() < record["ended"] + 60 and options.run in ("", record["run"]):
                return dict(record, state="stopped")
        return {"state": "idle"}
    begun, grace = time.monotonic(), holder["grace"] if options.grace is None else options.grace
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


def status(home: Path, options: argparse.Namespace) -> dict:
    """Returns what runs, how the newest runs ended, how much disk is free, and whether the bundle is here and whole."""
    free, whole = shutil.disk_usage(str(Path.home())).free, bool(bundle(home, options.bundle))
    return dict(state="status", running=running(), ended=history()[-5:], free=free, whole=whole, epoch=epoch())


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
    """Runs the command line, for tpu/launch/workers.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = {"start": start, "follow": follow, "stop": stop, "status": status, "receive": receive}
    parser.add_argument("action", choices=actions)
    for name in ("run", "token", "bundle", "epoch"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--grace", type=float)
    options = parser.parse_args()
    os.umask(0o077)
    threading.Thread(target=heartbeats, args=(options.action,), daemon=True).start()
    try:
        answer = actions[options.action](Path.home() / f"xla-zoo/worker-{options.worker}", options)
    except Failure as error:
        answer = {"state": "failed", "message": str(error)}
    except Passing as error:
        print(error, file=sys.stderr)
        answer = {"state": "incomplete"}
    except OSError as error:
        answer = {"state": "failed", "message": f"{error.strerror}: {error.filename}"}
    emit(**answer)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the connection is gone; the launcher makes another one
        os._exit(1)
