"""What a worker of a TPU does for the launcher: keeps the copy of the project, starts a run,
streams its log, stops it.

The launcher sends this file over ssh's standard input with every command, followed by the command's
own input, so a worker never has an old or a damaged one. Only the standard library, Python 3.8 or
later; systemd; root, or sudo without a password.

A run is the unit xla-zoo.service, whose main process is tpu/launch/keeper.py. A machine has one
unit of this name, so systemd itself refuses a second run, kills whatever is left of one that has
ended, and knows how it ended.

Below ~/xla-zoo/<tpu>/worker-<i>/, a folder for each TPU and worker, since several may share one
home:

    bundle          the working tree as it was sent
    tree/           the working tree, with its .venv and runs/. A new bundle replaces the files that
                    differ and removes those that are gone; what else is there stays, so a run can
                    be resumed, and make installs again only when a requirements file differs
    jobs/<run>/log  output of all starts of the run, the newest segment; log.<bytes before it>: its
                    segments

/run/xla-zoo-<uid>/ is in memory, for its owner alone:

    keeper.py       as it was sent
    start.json      the start that is alive, with its variables
    ended.json      how the newest ones ended
    stopped         its time is that of the last stop
    lock            one start at a time

Every start has a token, the same on all workers: with the same token it is done once, however often
it is asked for. A start that was asked for before a stop is refused after it (epoch), by this
program and, should the stop come later, by the keeper before it trains: so a stop waits for no
start. Answers are lines `@xla-zoo {json}`, the last one with a `state`; without that the launcher
tries again.
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
# Tests alone set XLA_ZOO_RUNTIME.
RUNTIME = Path(os.environ.get("XLA_ZOO_RUNTIME", f"/run/xla-zoo-{os.geteuid()}"))
ROOT = [] if os.geteuid() == 0 else ["sudo", "-n"]
CHUNK = 48 * 1024  # bytes of log in an answer
SEGMENT_NAMES = "log." + "[0-9]" * 15  # as in keeper.py

# Times, in seconds.
HEARTBEAT = 5  # the launcher takes a long silence for a dead connection
POLL = 0.1
PATIENCE = 60  # for systemd's programs and for sudo
RECENT = 60  # in which a run that has ended is one that a stop has ended, too
ON_ITS_WAY = 3  # in which a stop looks for the run of a start that is under way
MADE_FOR_SAVING = 15  # that systemd waits longer than the trainer's time to save
BEFORE_GIVING_UP = 30  # after a kill until the machine is said to need a restart

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
LEFT_ALONE = (
    "# Written by xla-zoo: a training run is not restarted after an upgrade, which would end it.\n"
    r"$nrconf{override_rc}{qr(^xla-zoo\.service$)} = 0;"
    "\n"
)
NEEDED = (
    "a run is a systemd unit, started as root or through sudo without a password; this host says:"
    " {}. Use a machine with both, or run make train there by hand"
)
SPEAKING = threading.Lock()


class Failure(Exception):
    """What keeps a command from being done; the message is one sentence."""


# ---- answers, files, programs ------------------------------------------------------------------


def emit(**answer: object) -> None:
    """Writes one answer, a line of its own even after half a line."""
    line = b"\n@xla-zoo " + json.dumps(answer).encode() + b"\n"
    with SPEAKING:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def read_json(path: Path) -> Any:
    """Returns what a file holds, {} without one, or for one that a power cut has left empty."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write(path: Path, content: bytes | str) -> None:
    """Replaces a file as a whole, also for those who read or replace it at this moment."""
    if isinstance(content, str):
        content = content.encode()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        os.replace(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # the disk may be full
            new.unlink()


def run_program(command: list[str]) -> subprocess.CompletedProcess:
    """Runs a program that asks nothing. Returns its exit code and what it said, as text."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


def system(*words: object, needed: str = NEEDED) -> None:
    """Runs a command as root. Failure: it failed, with what it said in the sentence `needed`, or
    did not answer."""
    try:
        result = run_program([*ROOT, *(str(word) for word in words)])
    except subprocess.TimeoutExpired:
        silent = f"{words[0]} did not answer in {PATIENCE} s"
        raise Failure(f"{silent}; restart the machine") from None
    if result.returncode:
        said = result.stderr.strip() or f"{words[0]} failed"
        raise Failure(needed.format(said.splitlines()[-1]))


# ---- what is alive, and what has ended ---------------------------------------------------------


def running() -> dict:
    """Returns the start that is alive on this machine: start.json without the variables. {}: none
    is."""
    for _ in range(20):
        try:
            shown = run_program(["systemctl", "show", UNIT, "--property=ActiveState"])
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
        start = read_json(RUNTIME / "start.json")
        if start:
            return {**start, "environment": {}}
        time.sleep(POLL)  # the record of its end is written, and it is gone in a moment
    return NOBODY


def make_runtime() -> None:
    """Makes the folder in memory, which only root can."""
    if not RUNTIME.exists():
        owner = ["-o", os.geteuid(), "-g", os.getegid()]
        system("install", "-d", "-m", "700", *owner, RUNTIME)


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
    last_stop = stopped.stat().st_mtime_ns if stopped.exists() else 0
    return f"{boot} {last_stop}"


def history() -> list[dict]:
    """Returns how the newest starts ended, the last one last."""
    return read_json(RUNTIME / "ended.json") or []


def ended(token: str) -> dict:
    """Returns how a start ended, {} if nothing is known of it."""
    for record in history():
        if record["token"] == token:
            return record
    return {}


# ---- the working tree --------------------------------------------------------------------------


def bundle(home: Path, name: str) -> bytes:
    """Returns the working tree as it was sent, b"" if it is not here, or not whole."""
    with contextlib.suppress(FileNotFoundError):
        content = (home / "bundle").read_bytes()
        if hashlib.sha256(content).hexdigest() == name:
            return content
    return b""


def local_name(name: str) -> str:
    """Returns a name of the bundle, which is UTF-8 there, as this machine's own functions take
    it."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def unpack(content: bytes, tree: Path, manifest: Path) -> None:
    """Makes the files of `tree` those of the bundle. Equal files keep their time, which make
    compares."""
    packed = io.BytesIO(content)
    with tarfile.open(fileobj=packed, encoding="utf-8", errors="surrogateescape") as archive:
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
    make_room(path)
    if member.issym():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.symlink(local_name(member.linkname), path)
        return

    new = archive.extractfile(member).read()
    if path.is_symlink() or not path.is_file() or path.read_bytes() != new:
        write(path, new)
    path.chmod(member.mode)


def make_room(path: Path) -> None:
    """Makes the folders above a file, and sets aside what of the user's own is in the way."""
    in_the_way = []
    for folder in path.parents:
        if os.path.lexists(folder) and not folder.is_dir():
            in_the_way.append(folder)
    if path.is_dir() and not path.is_symlink():
        in_the_way.append(path)
    for other in in_the_way:
        os.replace(other, f"{other}.old-{time.time():.0f}")
    path.parent.mkdir(parents=True, exist_ok=True)


def receive(home: Path, name: str) -> dict:
    """Stores the bundle that follows on standard input, if it is whole."""
    content = sys.stdin.buffer.read()
    if hashlib.sha256(content).hexdigest() != name:
        sys.exit("the working tree has not come whole")
    home.mkdir(parents=True, exist_ok=True)
    write(home / "bundle", content)
    return {"state": "received"}


# ---- start -------------------------------------------------------------------------------------


def start(home: Path) -> dict:
    """Starts the run that standard input describes, unless something is alive or this start has
    been done.

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
        raise Failure(
            "the working tree was replaced or damaged while the run was being started; try again"
        )
    unpack(content, home / "tree", home / "manifest.json")
    if epoch() != request["epoch"]:
        raise Failure("the run was stopped while it was being started")

    folder = home / "jobs" / request["run"]
    offset = open_log(folder)
    (RUNTIME / "keeper.py").write_text(request.pop("keeper"))
    facts = {
        "environment": run_environment(request["environment"]),
        "folder": str(folder),
        "offset": offset,
        "started": time.time(),
    }
    if "address" not in request:
        facts["address"] = own_address()
    write(RUNTIME / "start.json", json.dumps({**request, **facts}))

    spare_from_needrestart()
    start_unit(home / "tree", request["grace"])
    while running() and "ready" not in read_json(RUNTIME / "start.json"):
        time.sleep(POLL)


def run_environment(own: dict[str, str]) -> dict[str, str]:
    """Returns the variables of the run's processes; its own win."""
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "LC_ALL": "C.UTF-8",  # one language in all logs, whatever the machine's is
        # apt of the installation would have services restarted, and the run is one.
        "NEEDRESTART_SUSPEND": "1",
        **own,
    }


def start_unit(tree: Path, grace: float) -> None:
    """Starts the keeper as the unit. grace: seconds that the trainer has to save. Failure: systemd
    or sudo refused."""
    keeper = RUNTIME / "keeper.py"
    properties = {
        "Type": "exec",
        "KillMode": "mixed",  # SIGTERM to the keeper, which passes it on; SIGKILL to all the rest
        "TimeoutStopSec": f"{grace + MADE_FOR_SAVING:.0f}s",
        "SuccessExitStatus": "143",
        "ExecStopPost": f"{sys.executable} {keeper} ended",
        "OOMPolicy": "continue",  # a process killed for memory is the trainer's failure, no stop
        "LimitMEMLOCK": "infinity",  # a chip's driver pins memory
        "WorkingDirectory": tree,
        # At a shutdown the network is needed for the checkpoint, and to report it to the others.
        "After": "network.target",
    }
    words = [f"--property={name}={value}" for name, value in properties.items()]
    words += [f"--uid={os.geteuid()}", f"--gid={os.getegid()}", f"--unit={UNIT}", "--quiet"]

    with contextlib.suppress(Failure):
        system("systemctl", "reset-failed", UNIT)  # a start of before that failed
    try:
        system("systemd-run", *words, "--", sys.executable, keeper, "keep")
    except Failure:
        (RUNTIME / "start.json").unlink()  # it has the run's variables
        raise


def own_address() -> str:
    """Returns the address at which the other workers reach this machine: the one at which ssh has
    reached it.

    That of a VM in a cloud is the internal one, also where ssh goes to an external one.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    if len(reached) == 4:
        return reached[2].partition("%")[0]
    raise Failure(
        "the address at which the other workers reach this one is not known: its sshd sets no"
        " SSH_CONNECTION; use one that does, as OpenSSH's"
    )


def spare_from_needrestart() -> None:
    """Keeps needrestart, which Ubuntu's upgrades start, from restarting the run. Where it fails
    that is said."""
    rule = NEEDRESTART / "xla-zoo.conf"
    with contextlib.suppress(OSError):  # not there, or not for this user to read
        if not NEEDRESTART.is_dir() or rule.read_bytes() == LEFT_ALONE.encode():
            return
    wanted = RUNTIME / "needrestart.conf"
    write(wanted, LEFT_ALONE)
    try:
        system("install", "-m", "644", wanted, rule, needed="{}")
    except Failure as error:
        effect = "needrestart may restart the run after an upgrade, which stops it"
        emit(note=f"{effect}: {error}")


# ---- the log -----------------------------------------------------------------------------------


def open_log(folder: Path) -> int:
    """Makes a run's log, if it has none. Returns how many bytes it has."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "log"
    segments = sorted(folder.glob(SEGMENT_NAMES))
    first = folder / f"log.{0:015d}"
    if link.is_file() and not link.is_symlink():  # of an older version, or an editor's
        aside = f"{link}.old-{time.time():.0f}"
        os.replace(link, aside if segments else first)
    if not segments:
        first.touch()
        segments = [first]

    newest = segments[-1]
    if not os.path.lexists(link) or os.readlink(link) != newest.name:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(newest.name)
    return end_offset(newest)


def offset_of(segment: Path) -> int:
    """Returns how many bytes of the log are before a segment: its name says so."""
    return int(segment.suffix[1:])


def end_offset(segment: Path) -> int:
    """Returns how many bytes the log has up to the end of a segment."""
    return offset_of(segment) + segment.stat().st_size


def segments_from(folder: Path, at: int) -> list[Path]:
    """Returns the segments of a log that have something from byte `at` on, in order."""
    segments = sorted(folder.glob(SEGMENT_NAMES))
    return [segment for segment in segments if end_offset(segment) > at]


def size_of(folder: Path) -> int:
    """Returns how many bytes a log has, with what was rotated away."""
    segments = sorted(folder.glob(SEGMENT_NAMES))
    return end_offset(segments[-1]) if segments else 0


def end_of(folder: Path, wanted: int, offset: int) -> int:
    """Returns where the last `wanted` bytes of a log begin, at the begin of a line and not before
    `offset`."""
    at = max(offset, size_of(folder) - wanted)
    if at == offset:
        return at
    segments = segments_from(folder, at)
    if not segments:
        return at

    with segments[0].open("rb") as file:
        file.seek(max(at - offset_of(segments[0]), 0))
        rest_of_line = file.readline(wanted)
    # Else one line is longer than all that is wanted, a progress bar's.
    if rest_of_line.endswith(b"\n"):
        at += len(rest_of_line)
    return at


def follow(home: Path, token: str, at: int) -> dict:
    """Streams the log of a start from byte `at` (-n: its last n bytes), then how it ended."""
    looked = 0.0
    while True:
        start = read_json(RUNTIME / "start.json")
        # After start.json, which is removed later; before the log, to see what was written last.
        record = ended(token)
        start = record or start
        if not record and time.monotonic() > looked + 1:
            looked = time.monotonic()
            if start.get("token") != token or not (running() or ended(token)):
                return {"state": "unknown"}

        with contextlib.suppress(FileNotFoundError):  # somebody may have removed it
            folder = Path(start["folder"])
            if at < 0:
                at = end_of(folder, -at, start["offset"])
            for segment in segments_from(folder, at):
                at = stream(segment, at)
        if record:
            return {**record, "state": "ended"}
        time.sleep(POLL)


def stream(segment: Path, at: int) -> int:
    """Emits what a segment has from byte `at` of the log on. Returns where it ends."""
    base = offset_of(segment)
    if at < base:
        missing = f"{base - at} bytes of the log before this were rotated away"
        emit(at=base, data=f"\n[xla-zoo] {missing}\n")
        at = base
    with segment.open("rb") as file:
        file.seek(at - base)
        while data := file.read(CHUNK):
            at += len(data)
            emit(at=at, data=data.decode(errors="surrogateescape"))
    return at


# ---- stop and status ---------------------------------------------------------------------------


def stop(home: Path, run: str, grace: float | None, force: bool) -> dict:
    """Stops what runs, and every start that is on its way. Returns when all is gone.

    Args:
        run: stop only the run of this name, or the start of this token; "": whatever runs.
        grace: seconds to save; None: the run's own.
        force: also kills a run whose record, with its time to save, cannot be read: another
            user's.
    """
    holder = running()
    if holder and run not in ("", holder["run"], holder["token"]):
        return {"state": "other", "run": holder["run"]}
    make_runtime()
    (RUNTIME / "stopped").touch()  # no start that was asked for before trains after this
    if not holder and starting():
        holder = wait_for_start()
    if not holder:
        record = just_ended(run)
        return {**record, "state": "stopped"} if record else {"state": "idle"}

    begun = time.monotonic()
    ask = ("stop", "--no-block")
    if holder.get("unreadable") and not force:
        saves = "a run of another user saves, for as long as its owner gave it"
        emit(note=f"{saves}; --force kills it")
        gone = end_unit(ask, until=float("inf"))
    else:
        save_until = begun + (holder["grace"] if grace is None else grace)
        gone = end_unit(ask, until=save_until)
        if not gone:
            kill = ("kill", "--signal=SIGKILL")
            gone = end_unit(kill, until=save_until + BEFORE_GIVING_UP)
    if not gone:
        raise Failure(f"the processes of {holder['run']} do not end; restart the machine")
    return {"run": holder["run"], **ended(holder["token"]), "state": "stopped"}


def wait_for_start() -> dict:
    """Waits a little for the run of a start that is under way. Returns it, {} if none came."""
    end = time.monotonic() + ON_ITS_WAY
    holder = running()
    while not holder and starting() and time.monotonic() < end:
        time.sleep(POLL)
        holder = running()
    return holder


def just_ended(run: str) -> dict:
    """Returns how the last start ended, if that was a moment ago and it is `run`, see `stop`; else
    {}."""
    records = history()
    if not records:
        return {}
    record = records[-1]
    age = abs(time.time() - record["ended"])  # abs: the clock may have been set back
    if age < RECENT and run in ("", record["run"], record["token"]):
        return record
    return {}


def end_unit(words: tuple[str, ...], until: float) -> bool:
    """Runs systemctl, and waits until nothing runs, at the latest until this monotonic time.
    Returns whether nothing runs."""
    try:
        system("systemctl", *words, UNIT)
    except Failure:
        if running():  # else it has ended by itself
            raise
    while time.monotonic() < until:
        if not running():
            return True
        time.sleep(POLL)
    return False


def status(home: Path, name: str) -> dict:
    """Returns what runs, how the newest runs ended, how much disk is free, and whether the bundle
    is here and whole."""
    holder = running()
    return {
        "state": "status",
        "free": shutil.disk_usage(str(Path.home())).free,
        "running": holder,
        "ended": history()[-5:],
        "whole": bool(bundle(home, name)),
        "epoch": epoch(),
    }


# ---- the command line --------------------------------------------------------------------------


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
    """Does what tpu/launch/workers.py asks for: an action, the worker's folder, and the action's
    arguments as JSON."""
    action, folder, arguments = sys.argv[1:]
    os.umask(0o077)
    threading.Thread(target=heartbeats, args=(action,), daemon=True).start()

    actions = {
        "start": start,
        "follow": follow,
        "stop": stop,
        "status": status,
        "receive": receive,
    }
    home = Path.home() / "xla-zoo" / folder
    try:
        answer = actions[action](home, **json.loads(arguments))
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
