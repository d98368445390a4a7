"""What a worker of a TPU does for the launcher: keeps the copy of the project, starts a run, streams its log, stops it.

The launcher sends this file over ssh's standard input with every command, followed by the command's own input, so a
worker never has an old or a damaged one. Only the standard library, Python 3.8 or later; systemd; root, or sudo without
a password.

A run is the unit xla-zoo.service, whose main process is tpu/launch/keeper.py. A machine has one unit of this name, so
systemd itself refuses a second run, kills whatever is left of one that has ended, and knows how it ended.

Below ~/xla-zoo/<tpu>/worker-<i>/, a folder for each TPU and worker, since several may share one home:

    bundle          the working tree as it was sent
    tree/           the working tree, with its .venv and runs/. A new bundle replaces the files that differ and removes
                    those that are gone; what else is there stays, so a run can be resumed, and make installs again only
                    when a requirements file differs
    jobs/<run>/log  output of all starts of the run, the newest part; log.<bytes before it>: its parts

/run/xla-zoo-<uid>/ is in memory, for its owner alone: keeper.py; start.json: the start that is alive, with its
variables; ended.json: how the newest ones ended; stopped: its time is that of the last stop; lock: one start at a time.

Every start has a token, the same on all workers: with the same token it is done once, however often it is asked for.
A start that was asked for before a stop is refused after it (epoch), by this program and, should the stop come later,
by the keeper before it trains: so a stop waits for no start. Answers are lines `@xla-zoo {json}`, the last one with a
`state`; without that the launcher tries again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
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
PATIENCE = 60  # seconds for systemd's programs and for sudo
RECENT = 60  # seconds in which a run that has ended is one that a stop has ended, too
ON_ITS_WAY = 3  # seconds in which a stop looks for the run of a start that is under way
MADE_FOR_SAVING = 15  # seconds that systemd waits longer than the trainer's time to save
PARTS = "log." + "[0-9]" * 15  # as in keeper.py
SPEAKING = threading.Lock()
# What runs, where its record cannot be read.
NOBODY = {
    "run": "a run of another user",
    "token": "",
    "words": [],
    "started": 0,
    "grace": 60,
    "worker": 0,
    "workers": 0,
    "unreadable": True,
}
NEEDRESTART = Path("/etc/needrestart/conf.d")
LEFT_ALONE = r"""# Written by xla-zoo: a training run is not restarted after an upgrade, which would end it.
$nrconf{override_rc}{qr(^xla-zoo\.service$)} = 0;
"""
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


def system(*words: object, needed: str = NEEDED) -> None:
    """Runs a command as root. Failure: it failed, with what it said in the sentence `needed`, or did not answer."""
    command = [*ROOT, *(str(word) for word in words)]
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        result = subprocess.run(command, timeout=PATIENCE, **streams)
    except subprocess.TimeoutExpired:
        raise Failure(f"{words[0]} did not answer in {PATIENCE} s; restart the machine") from None
    if result.returncode:
        raise Failure(needed.format((result.stderr.strip() or f"{words[0]} failed").splitlines()[-1]))


def running() -> dict:
    """Returns the start that is alive on this machine: start.json without the variables. {}: none is."""
    command = ["systemctl", "show", UNIT, "--property=ActiveState"]
    for _ in range(20):
        try:
            streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            shown = subprocess.run(command, timeout=PATIENCE, **streams)
        except FileNotFoundError:
            raise Failure(NEEDED.format("no systemctl")) from None
        except subprocess.TimeoutExpired:
            sys.exit(f"systemctl did not answer in {PATIENCE} s")
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


def starting() -> bool:
    """Returns whether a start is under way. Waits for nothing."""
    with (RUNTIME / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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


def local_name(name: str) -> str:
    """Returns a name of the bundle, which is UTF-8 there, as this machine's own functions take it."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def unpack(content: bytes, tree: Path, manifest: Path) -> None:
    """Makes the files of `tree` those of the bundle. Equal files keep their time, which make compares."""
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8", errors="surrogateescape") as archive:
        members = {local_name(member.name): member for member in archive}
        for name in set(read_json(manifest)) - set(members):
            with contextlib.suppress(OSError):
                (tree / name).unlink()
                os.removedirs((tree / name).parent)  # up to one that is not empty
        # Before the files: an unpacking that is cut off leaves no file that nobody knows.
        write(manifest, json.dumps(list(members)))
        for name, member in members.items():
            put(archive, member, tree / name)


def put(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Makes one file or link that of the bundle."""
    in_the_way = [folder for folder in path.parents if os.path.lexists(folder) and not folder.is_dir()]
    if path.is_dir() and not path.is_symlink():
        in_the_way.append(path)
    for other in in_the_way:  # of the user's own
        os.replace(other, f"{other}.old-{time.time():.0f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.symlink(local_name(member.linkname), path)
        return
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
    if epoch() != request["epoch"]:
        raise Failure("the run was stopped while it was being started")
    folder = home / "jobs" / request["run"]
    offset = open_log(folder)
    keeper = RUNTIME / "keeper.py"
    keeper.write_text(request.pop("keeper"))
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "LC_ALL": "C.UTF-8",  # one language in all logs, whatever the machine's is
        "NEEDRESTART_SUSPEND": "1",  # apt of the installation would have services restarted, and the run is one
        **request["environment"],
    }
    facts = {"environment": environment, "folder": str(folder), "offset": offset, "started": time.time()}
    if "address" not in request:
        facts["address"] = own_address()
    write(RUNTIME / "start.json", json.dumps({**request, **facts}))
    spare_from_needrestart()

    properties = {
        "Type": "exec",
        "KillMode": "mixed",  # SIGTERM to the keeper, which passes it on; SIGKILL to all that is left
        "TimeoutStopSec": f"{request['grace'] + MADE_FOR_SAVING:.0f}s",
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


def open_log(folder: Path) -> int:
    """Makes a run's log, if it has none. Returns how many bytes it has."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "log"
    parts = sorted(folder.glob(PARTS))
    first = folder / f"log.{0:015d}"
    if link.is_file() and not link.is_symlink():  # of an older version, or an editor's
        os.replace(link, f"{link}.old-{time.time():.0f}" if parts else first)
    if not parts:
        first.touch()
    newest = parts[-1] if parts else first
    if not os.path.lexists(link) or os.readlink(link) != newest.name:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(newest.name)
    return int(newest.suffix[1:]) + newest.stat().st_size


def own_address() -> str:
    """Returns the address at which the other workers reach this machine: the one at which ssh has reached it.

    That of a VM in a cloud is the internal one, also where ssh goes to an external one.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    if len(reached) == 4:
        return reached[2].partition("%")[0]
    raise Failure(
        "the address at which the other workers reach this one is not known: its sshd sets no SSH_CONNECTION; use one"
        " that does, as OpenSSH's"
    )


def spare_from_needrestart() -> None:
    """Keeps needrestart, which Ubuntu's upgrades start, from restarting the run. Where it fails that is said."""
    rule = NEEDRESTART / "xla-zoo.conf"
    with contextlib.suppress(OSError):  # not there, or not for this user to read
        if not NEEDRESTART.is_dir() or rule.read_bytes() == LEFT_ALONE.encode():
            return
    wanted = RUNTIME / "needrestart.conf"
    write(wanted, LEFT_ALONE)
    try:
        system("install", "-m", "644", wanted, rule, needed="{}")
    except Failure as error:
        emit(note=f"needrestart may restart the run after an upgrade, which stops it: {error}")


def parts_from(folder: Path, at: int) -> list[Path]:
    """Returns the files of a log that have something from byte `at` on, in order."""
    parts = sorted(folder.glob(PARTS))
    return [part for part in parts if int(part.suffix[1:]) + part.stat().st_size > at]


def size_of(folder: Path) -> int:
    """Returns how many bytes a log has, with what was rotated away."""
    parts = sorted(folder.glob(PARTS))
    return int(parts[-1].suffix[1:]) + parts[-1].stat().st_size if parts else 0


def end_of(folder: Path, wanted: int, offset: int) -> int:
    """Returns where the last `wanted` bytes of a log begin, at the begin of a line and not before `offset`."""
    at = max(offset, size_of(folder) - wanted)
    if at == offset:
        return at
    for part in parts_from(folder, at)[:1]:
        with part.open("rb") as file:
            file.seek(max(at - int(part.suffix[1:]), 0))
            line = file.readline(wanted)
            at += len(line) if line.endswith(b"\n") else 0  # one line is longer, a progress bar's
    return at


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
        with contextlib.suppress(FileNotFoundError):  # somebody may have removed it
            folder = Path(start["folder"])
            if at < 0:
                at = end_of(folder, -at, start["offset"])
            for part in parts_from(folder, at):
                at = stream(part, at)
        if record:
            return {**record, "state": "ended"}
        time.sleep(POLL)


def stream(part: Path, at: int) -> int:
    """Emits what a file of the log has from byte `at` of the log on. Returns where it ends."""
    base = int(part.suffix[1:])
    if at < base:
        missing = f"\n[xla-zoo] {base - at} bytes of the log before this were rotated away\n"
        emit(at=base, data=missing)
        at = base
    with part.open("rb") as file:
        file.seek(at - base)
        while data := file.read(CHUNK):
            at += len(data)
            emit(at=at, data=data.decode(errors="surrogateescape"))
    return at


def stop(home: Path, run: str, grace: float | None, force: bool) -> dict:
    """Stops what runs, and every start that is on its way. Returns when all is gone.

    Args:
        run: stop only the run of this name, or the start of this token; "": whatever runs.
        grace: seconds to save; None: the run's own.
        force: also kills a run whose record, with its time to save, cannot be read: another user's.
    """
    holder = running()
    if holder and run not in ("", holder["run"], holder["token"]):
        return {"state": "other", "run": holder["run"]}
    make_runtime()
    (RUNTIME / "stopped").touch()  # no start that was asked for before trains after this
    if not holder and starting():
        end = time.monotonic() + ON_ITS_WAY
        while not (holder := running()) and starting() and time.monotonic() < end:
            time.sleep(POLL)
    if not holder:
        for record in history()[-1:]:
            recent = abs(time.time() - record["ended"]) < RECENT  # abs: the clock may have been set back
            if recent and run in ("", record["run"], record["token"]):
                return {**record, "state": "stopped"}
        return {"state": "idle"}
    begun = time.monotonic()
    ask, kill = ("stop", "--no-block"), ("kill", "--signal=SIGKILL")
    if holder.get("unreadable") and not force:
        emit(note="a run of another user saves, for as long as its owner gave it; --force kills it")
        steps = [(ask, float("inf"))]
    else:
        time_to_save = holder["grace"] if grace is None else grace
        steps = [(ask, time_to_save), (kill, time_to_save + 30)]
    for words, seconds in steps:
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
    """Does what tpu/launch/workers.py asks for: an action, the worker's folder, and the action's arguments as JSON."""
    action, folder, arguments = sys.argv[1:]
    os.umask(0o077)
    threading.Thread(target=heartbeats, args=(action,), daemon=True).start()
    actions = {"start": start, "follow": follow, "stop": stop, "status": status, "receive": receive}
    try:
        answer = actions[action](Path.home() / "xla-zoo" / folder, **json.loads(arguments))
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
