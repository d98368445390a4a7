"""What runs on each worker of a TPU: starts a run detached, streams its log, stops it.

tpu/launch/launcher.py copies it there.

Only the standard library, Python 3.8 or later, Linux: the worker's own python3 starts it. The file lies in
~/xla-zoo/worker-<i>/files, and everything is kept in ~/xla-zoo/worker-<i> (readable by its owner alone):

    files/           bundles of the working tree, by hash, and this program
    tree/            the working tree, with its .venv and its runs/. A new bundle replaces the files of the old one that
                     differ and removes those that are gone; what else is there stays, so a run can be resumed, and make
                     installs again only when a requirements file differs
    lock             locked while a run is alive; says which
    jobs/<run>/log   output of all starts of the run; job.json, exit.json: its newest start

A chip can be used by one process, so a worker has at most one run at a time. The lock is an flock of the supervisor,
which is detached from the connection, and of the processes that it starts: it vanishes with them, whatever ends them.
Every start has a token, made by the launcher and the same on all workers. gcloud repeats a command when its connection
drops; with the same token `start` is done once, however often it is asked for.

Answers are lines `@xla-zoo {json}`. A line that was cut off by a dropped connection is not valid, so it is ignored; log
data carries its offset, so a repeated part is recognized.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

MARK = b"@xla-zoo "
CHUNK = 48 * 1024  # bytes of log in an answer
TAIL = 64 * 1024  # bytes of log that come with the exit code: what went wrong is looked for there
HEARTBEAT = 5  # seconds; the launcher takes a long silence for a dead connection
POLL = 0.1  # seconds
SHUTDOWN_GRACE = 60  # seconds that the run has to save when the machine is shut down
KEEP_BUNDLES = 3
PR_SET_CHILD_SUBREAPER = 36  # prctl: orphaned descendants become children of this process
SIGNAL_CODES = {b"Killed": 137, b"Terminated": 143, b"Segmentation fault": 139, b"Aborted": 134}


def emit(**answer: object) -> None:
    """Writes one answer, a line of its own even after half a line."""
    sys.stdout.buffer.write(b"\n" + MARK + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def read_json(path: Path) -> dict:
    """Returns the object in a file, {} if there is none. Files are replaced as a whole: nobody sees half an object."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def write_json(path: Path, value: dict) -> None:
    """Replaces a file as a whole, also for processes that read it at this moment."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)


def take_lock(home: Path) -> int | None:
    """Returns the file descriptor of the lock, or None when a run is alive."""
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(20):  # `running` holds it for a moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValueError):
                holder = json.loads(os.pread(descriptor, 1 << 20, 0))
                if born(holder["pid"]) == holder["born"]:
                    break
            time.sleep(0.05)
        else:
            return descriptor
    os.close(descriptor)
    return None


def write_holder(lock: int, **holder: object) -> None:
    """Writes into the lock who holds it."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(dict(holder, pid=os.getpid(), born=born(os.getpid()))).encode(), 0)


def running(home: Path) -> dict:
    """Returns who holds the lock: run, token, words, bundle, started, pid, born. {}: nobody does."""
    try:
        descriptor = os.open(home / "lock", os.O_RDWR)
    except FileNotFoundError:
        return {}
    try:
        for _ in range(20):  # the holder may be about to write
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return {}
            except BlockingIOError:
                with contextlib.suppress(ValueError):
                    return json.loads(os.pread(descriptor, 1 << 20, 0))
            time.sleep(0.05)
        return {"run": "?", "token": "?", "words": [], "bundle": "?", "started": 0, "pid": 0, "born": ""}
    finally:
        os.close(descriptor)


def stat_fields(pid: int | str) -> list[str]:
    """Returns the fields of /proc/<pid>/stat after the name: state, parent, …, the 20th: birth. []: it is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def born(pid: int) -> str:
    """Returns what tells a process from a later one with the same number. "": it is gone."""
    return (stat_fields(pid)[19:20] or [""])[0]


def descendants() -> list[int]:
    """Returns the living processes below this one, also those that left their parent's group or session."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = stat_fields(entry)
            if fields:
                below.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    new = [os.getpid()]
    while new:
        new = [child for parent in new for child in below.get(parent, [])]
        found += new
    return [pid for pid in found if stat_fields(pid)[:1] not in ([], ["Z"])]


def unpack(bundle: Path, tree: Path, manifest_path: Path) -> None:
    """Makes the files of `tree` those of the bundle. Equal files keep their time, which make compares."""
    tree.mkdir(exist_ok=True)
    with tarfile.open(bundle) as archive:
        members = archive.getmembers()
        names = [member.name for member in members]
        for name in names:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{name} in {bundle} is outside the tree")
        for name in set(read_json(manifest_path).get("files", [])) - set(names):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (tree / name).unlink()
                for folder in list((tree / name).parents)[: name.count("/")]:
                    folder.rmdir()  # ends at the first that is not empty
        # Before the files: an unpacking that is cut off leaves no file that nobody knows.
        write_json(manifest_path, {"files": names})
        for member in members:
            path = tree / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(path.name + ".new")
            if os.path.lexists(new):
                new.unlink()
            if member.issym():
                if path.is_symlink() and os.readlink(path) == member.linkname:
                    continue
                os.symlink(member.linkname, new)
            else:
                content = archive.extractfile(member).read()
                if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
                    path.chmod(member.mode)
                    continue
                new.write_bytes(content)
                new.chmod(member.mode)
            os.replace(new, path)


def exit_code(status: int, log: Path) -> int:
    """Returns the run's exit code. make's own is 2 for any failure; the log says what the program's was."""
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code == 2:
        pattern = rb"^make(?:\[\d+\])?: \*\*\* \[.*\] (?:Error (\d+)|(Killed|Terminated|Segmentation fault|Aborted))"
        found = re.findall(pattern, tail(log, 0, 4096), re.MULTILINE)
        if found:
            number, name = found[-1]
            code = int(number) if number else SIGNAL_CODES[name]
    return code


def tail(log: Path, start: int, size: int) -> bytes:
    """Returns the last `size` bytes of the log, none before `start`."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - size))
        return file.read()


def supervise(home: Path, lock: int, job: dict, command: list[str], environment: dict[str, str], ready: int) -> None:
    """Runs the command, in a session of its own, to its end or until it is told to stop; then nothing of it is left.

    ready: descriptor of a pipe, which gets the sentence of an error, or "" once the command runs.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = home / "jobs" / job["run"]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    # ssh waits for whoever holds its pipes. What this process itself has to say, a bug's traceback, goes to the log.
    for number, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, number)
    write_holder(lock, **{key: job[key] for key in ("run", "token", "words", "bundle", "started")})
    shutdown: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: shutdown.append(1))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    write_json(folder / "job.json", job)
    try:
        # The lock is inherited: should this process be killed, the run still holds it, and no second one can start.
        process = subprocess.Popen(
            command,
            cwd=home / "tree",
            env=environment,
            stdin=nothing,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock],
            preexec_fn=lambda: [
                signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
            ],
        )
    except OSError as error:
        sentence = f"{command[0]} could not be started on the worker: {error.strerror}"
        write_json(folder / "exit.json", {"token": job["token"], "code": 127, "stopped": "", "ended": time.time()})
        os.write(ready, sentence.encode())
        return
    write_json(folder / "job.json", dict(job, group=process.pid))
    os.close(ready)
    status, asked, killed = wait_for_end(process.pid, folder / f"stop-{job['token']}", shutdown)
    code = 137 if killed else exit_code(status, folder / "log")
    stopped = "shutdown" if shutdown else "asked" if asked else ""
    result = {"token": job["token"], "code": code, "stopped": stopped, "ended": time.time()}
    write_json(folder / "exit.json", result)


def wait_for_end(leader: int, stop: Path, shutdown: list[int]) -> tuple[int, bool, bool]:
    """Waits until no descendant is left. The file `stop` or an entry in `shutdown` asks the leader's group to end.

    Returns the leader's wait status, whether it was asked to end, and whether some of its group had to be killed.
    """
    status, asked_at, grace, killed, alive = None, 0.0, 0.0, False, True
    while alive:
        time.sleep(POLL)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, ended = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == leader:
                    status = ended
        if shutdown or stop.exists():
            seconds = SHUTDOWN_GRACE if shutdown else float(stop.read_text() or 0)
            grace = min(grace or seconds, seconds)
            if not asked_at:
                asked_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(leader, signal.SIGTERM)  # to the whole group: a shell does not pass it on
        if status is None and not asked_at:
            continue
        # make may end before the program that it has started, which is saving. What has left the group saves nothing,
        # nor does what is left when the program has ended by itself.
        left = descendants()
        alive = status is None or bool(left)
        saving = asked_at and any(stat_fields(pid)[2:3] == [str(leader)] for pid in left)
        if alive and not (saving and time.monotonic() < asked_at + grace):
            killed = killed or bool(saving)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return status, bool(asked_at), killed


def start(home: Path, run: str, token: str, bundle: str) -> None:
    """Starts the run, unless this start of it was done before. Reads {"words", "environment"} from standard input."""
    lock = take_lock(home)
    if lock is None:
        holder = running(home)
        if holder and holder["token"] == token:
            emit(state="attached")
        else:
            emit(state="busy", holder=holder)
        return
    folder = home / "jobs" / run
    folder.mkdir(parents=True, exist_ok=True)
    if read_json(folder / "job.json").get("token") == token:
        emit(state="attached")
        return
    if (folder / f"stop-{token}").exists():  # the launcher was interrupted, and its `stop` overtook this
        emit(state="stopped")
        return
    try:
        request = json.loads(sys.stdin.buffer.read())
    except ValueError:  # gcloud repeats a command whose connection dropped, but not its input
        emit(state="incomplete")
        return
    started = time.time()
    identity = {"run": run, "token": token, "words": request["words"], "bundle": bundle, "started": started}
    write_holder(lock, **identity)
    if not install_bundle(home, folder, bundle):
        emit(state="failed", message=f"No space left on device: {home} is full on this worker")
        return
    log = folder / "log"
    job = dict(identity, offset=log.stat().st_size if log.exists() else 0)
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **request["environment"])
    message = detach(home, lock, job, ["make", "train", *request["words"]], environment)
    if message:
        emit(state="failed", message=message)
    else:
        emit(state="started")


def install_bundle(home: Path, folder: Path, bundle: str) -> bool:
    """Unpacks a bundle, and removes what is old: bundles, and orders to stop in the run's folder. False: disk full."""
    archive = home / "files" / f"{bundle}.tar.gz"
    try:
        unpack(archive, home / "tree", home / "manifest.json")
        for stale in folder.glob("stop-*"):
            if stale.stat().st_mtime < time.time() - 86400:
                stale.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    os.utime(archive)
    bundles = sorted((home / "files").glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    for old in bundles[:-KEEP_BUNDLES]:
        old.unlink()
    return True


def detach(home: Path, lock: int, job: dict, command: list[str], environment: dict[str, str]) -> str:
    """Starts the supervisor in a session of its own. Returns "" once the command runs, or why it does not."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        # Detached: a session of its own, and no child of who was started by sshd.
        os.close(reader)
        os.setsid()
        if os.fork() == 0:
            failed = 1
            try:
                supervise(home, lock, job, command, environment, writer)
                failed = 0
            except Exception:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(failed)
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as pipe:
        return pipe.read()


def follow(home: Path, run: str, token: str, at: int, last: bool) -> None:
    """Streams the log of a start from byte `at`, then its exit code. -1: all of it; -n: its last n bytes.

    last: no log, only its end together with the exit code.
    """
    folder = home / "jobs" / run
    job = read_json(folder / "job.json")
    while job.get("token") != token:  # its bundle is being unpacked, or it was never here
        alive = running(home).get("token") == token
        job = read_json(folder / "job.json")
        if not alive and job.get("token") != token:
            emit(state="unknown")
            return
        emit(alive=True)
        time.sleep(POLL)
    log = folder / "log"
    if at < 0:
        recent = log.stat().st_size + at if at < -1 else 0
        at = max(job["offset"], recent)
        if at > job["offset"]:
            at += log.read_bytes()[at:].find(b"\n") + 1  # not half a line
    sent = 0.0
    while True:
        # In this order: what was written before the end is read after it is known.
        alive = running(home).get("token") == token
        result = read_json(folder / "exit.json")
        ended = result.get("token") == token
        while not last:
            with log.open("rb") as file:
                file.seek(at)
                data = file.read(CHUNK)
            if not data:
                break
            emit(at=at, data=base64.b64encode(data).decode())
            at += len(data)
            sent = time.monotonic()
        if ended or not alive:
            code = result["code"] if ended else None
            end = base64.b64encode(tail(log, job["offset"], TAIL)).decode()
            emit(state="ended", code=code, stopped=result["stopped"] if ended else "", tail=end)
            return
        if time.monotonic() > sent + HEARTBEAT:
            emit(alive=True)
            sent = time.monotonic()
        time.sleep(POLL)


def stop(home: Path, run: str, token: str, grace: float) -> None:
    """Ends a start of a run ("": whatever runs): SIGTERM, after `grace` seconds SIGKILL. Returns when all is gone."""
    holder = running(home)
    if token and holder.get("token") != token:
        # A start that is still on its way finds this.
        (home / "jobs" / run).mkdir(parents=True, exist_ok=True)
        (home / "jobs" / run / f"stop-{token}").write_text(str(grace))
        time.sleep(2 * POLL)
        holder = running(home)
    if not holder or (token and holder["token"] != token):
        emit(state="idle")
        return
    folder = home / "jobs" / holder["run"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"stop-{holder['token']}").write_text(str(grace))
    begun = time.monotonic()
    sent = 0.0
    while running(home).get("token") == holder["token"]:
        seconds = time.monotonic() - begun
        now = running(home) or holder
        if born(now["pid"]) != now["born"]:
            # The supervisor was killed. What it started is in one session, whose first process is the group's leader.
            job = read_json(folder / "job.json")
            for entry in os.listdir("/proc"):
                fields = stat_fields(entry) if entry.isdigit() else []
                if fields and int(fields[3]) == job.get("group"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(entry), signal.SIGTERM if seconds < grace else signal.SIGKILL)
            time.sleep(1)
        if seconds > grace + 30:
            emit(state="stuck", holder=holder)
            return
        if time.monotonic() > sent + HEARTBEAT:
            emit(alive=True)
            sent = time.monotonic()
        time.sleep(POLL)
    result = read_json(folder / "exit.json")
    emit(
        state="stopped", run=holder["run"], code=result.get("code") if result.get("token") == holder["token"] else None
    )


def status(home: Path) -> None:
    """Answers what runs, how the newest runs ended, and how much disk is free."""
    jobs = []
    folders = [folder for folder in (home / "jobs").glob("*") if (folder / "job.json").exists()]
    for folder in sorted(folders, key=lambda folder: (folder / "job.json").stat().st_mtime)[-5:]:
        job, result = read_json(folder / "job.json"), read_json(folder / "exit.json")
        ended = result.get("token") == job["token"]
        jobs.append(dict(job, ended=ended, code=result["code"] if ended else None))
    emit(state="status", running=running(home), jobs=jobs, free=shutil.disk_usage(str(home)).free)


def main() -> None:
    """Runs the command line, for tpu/launch/fleet.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "follow", "stop", "status"))
    parser.add_argument("--run", default="")
    parser.add_argument("--token", default="")
    parser.add_argument("--bundle", default="")
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--grace", type=float, default=60)
    options = parser.parse_args()
    home = Path(__file__).resolve().parent.parent
    if options.action == "start":
        start(home, options.run, options.token, options.bundle)
    elif options.action == "follow":
        follow(home, options.run, options.token, options.at, options.last)
    elif options.action == "stop":
        stop(home, options.run, options.token, options.grace)
    else:
        status(home)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the connection is gone; the launcher makes another one
        os._exit(1)
