"""Starts a training run on all workers of a TPU from another machine, streams its log, stops it.

    python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b --run bert1 -- \\
        MODEL=bert DATA=nyu-mll/glue
    python3 -m tpu.launch logs|stop|status --tpu my-tpu --zone us-east5-b

make train|logs|stop|status TPU=… calls it. It needs python3 (3.9 or later, only the standard
library), git, and gcloud or, for TPU=ssh:host1,host2, ssh. On every worker it puts the working tree
(tracked and untracked files, not the ignored ones, and no file that looks like a secret) into
~/xla-zoo/<tpu>/worker-<i>/tree and starts `make train` there with the words after `--`; that
installs first, into an environment that stays.

The run is a systemd unit on each worker: it survives the launcher and the connection, and the same
command, or `logs`, attaches to it again. The workers end and repeat it together, whether a launcher
looks on or not: see keeper.py. Three verbs that share no path: start (all workers, or none), watch
(only reads, tries for ever), stop (each worker by itself, whatever the others and the TPU's health
say; it waits for no start). Ctrl-C in `train` is `stop`.

HF_TOKEN, WANDB_API_KEY and what --secret names travel from this environment over ssh's standard
input to the memory of the workers: they are in no command line, on no disk and in no log. --env
travels in the same way.

Exit codes: the run's own, that of the first worker that failed; 1 when a worker was lost or cannot
be reached, or when the run failed before its trainer began; 2 for what you can fix; 75 when the TPU
is gone (preempted, stopped): recreate it and run the same command; 143 when the run was stopped;
129 when the terminal is gone, or after SIGTERM; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python3 tpu/launch/launcher.py`

from errors import InputError
from tpu.launch import hosts, messages
from tpu.launch.request import (
    Bundle,
    git_state,
    make_bundle,
    read_environment,
    read_words,
    runs_folder,
)
from tpu.launch.workers import PRINTING, TpuGone, WorkerLost, Workers, names, parallel, say

# Exit codes.
GONE = 75  # the TPU is gone; EX_TEMPFAIL of sysexits.h
HUNG_UP = 129  # the terminal is gone, or SIGTERM has come; 143 would say that the run was stopped
INTERRUPTED = 130  # after Ctrl-C

RECENT = 32 << 10  # bytes of the log so far: shown when attaching, and looked through at the end
ALL = 1 << 60  # bytes of the log so far: more than it has
GRACE = 60  # seconds to save, where --grace gives none
LONGEST_GRACE = 86400  # seconds
HIGHEST_PORT = 65535
ASK_AGAIN = 10  # seconds between two looks at a TPU that is not ready
KEEPER = Path(__file__).with_name("keeper.py")
# How a trainer that was stopped has ended, by its exit code; None: it had not begun.
STOPS = {143: "stopped and saved", 0: "had just ended", None: "stopped before it trained"}


class OutputLost(Exception):
    """Standard output takes nothing more: its disk is full, its terminal is gone."""


@dataclass
class Answer:
    """What came of asking a worker for its status, or to stop."""

    code: int  # 1: it was not reached, or may still run something
    text: str


class Watch:
    """The log of worker 0, where the workers also say what ends the run, until it has ended."""

    def __init__(self, workers: Workers, run: str, token: str) -> None:
        self.workers = workers
        self.run = run
        self.token = token
        self.end = b""  # of the log

    def hear(self, answer: dict[str, Any]) -> dict:
        """Prints what an answer brings of the log. Returns where another connection continues."""
        if "data" not in answer:
            return {}
        data = answer["data"].encode(errors="surrogateescape")
        self.end = (self.end + data)[-RECENT:]
        try:
            with PRINTING:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.strerror) from None
        return {"at": answer["at"]}

    def follow(self, recent: int) -> int:
        """Streams the log, of what there is already the last `recent` bytes. Returns the run's exit
        code."""
        answer = self.workers.call(
            0, "follow", hear=self.hear, forever=True, token=self.token, at=-recent
        )
        if answer["state"] == "unknown":
            label = self.workers.label(0)
            say(f"{label} knows no {self.run} any more: the machine was restarted or replaced")
            return 1
        code = answer["code"]
        if code:
            say(answer["why"] or f"the run ended with exit code {code} ({answer['result']})")
            self.explain(code)
        return code

    def explain(self, code: int) -> None:
        """Says what is known about this exit code, and about the end of the log."""
        text = self.end.decode(errors="replace")
        late = code == messages.KILLED and "[xla-zoo] the run was stopped" in text
        if late:
            meanings = messages.explain_log(text)
            late_save = "it did not end in its time to save, and was killed"
            meanings.append(f"{late_save}; --grace gives it more")
        else:
            meanings = messages.explain_log(text, code)
        say(*(f"what this means: {sentence}" for sentence in meanings))


class Launcher:
    """The commands `train`, `logs`, `stop` and `status` for one TPU. Each returns an exit code."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Checks the options. InputError: they cannot be used."""
        self.options = options
        self.host = hosts.choose(options.tpu, options.zone, options.project, options.gcloud_flag)
        self.workers = Workers(self.host, options.lost_after)
        if options.grace is not None and not 0 <= options.grace <= LONGEST_GRACE:
            raise InputError(
                f"--grace {options.grace:g} is not a time to save: give 0 to {LONGEST_GRACE}"
                " seconds"
            )
        if not 0 <= options.port <= HIGHEST_PORT:
            raise InputError(
                f"--port {options.port} is not a port: give 1024 to {HIGHEST_PORT}, or 0 for any"
            )
        self.run = ""
        self.wanted = ""  # the run's name as it was given
        self.begun = False  # something was started that Ctrl-C must stop
        self.watching = False  # the run continues without this launcher

    # ---- messages ------------------------------------------------------------------------------

    def make(self, target: str) -> str:
        """Returns the command of make to show, for this TPU."""
        options = self.options
        flags = [f"--gcloud-flag={shlex.quote(flag)}" for flag in options.gcloud_flag]
        variables = {
            "TPU": self.host.name,
            "ZONE": options.zone,
            "PROJECT": options.project,
            "LAUNCH_ARGS": " ".join(flags),
        }
        words = [f"{name}={value}" for name, value in variables.items() if value]
        return shlex.join(["make", target, *words])

    def describe_run(self, holder: dict) -> str:
        """Returns what runs, in half a sentence."""
        if not holder["started"]:
            return holder["run"]
        worker = ""
        if holder["workers"] > 1:
            worker = f", worker {holder['worker']} of {holder['workers']}"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder["started"]))
        return f"{holder['run']} ({shlex.join(holder['words'])}){worker}, since {since}"

    def describe_bundle(self, bundle: Bundle) -> None:
        """Says what is sent, and what is not."""
        megabytes = len(bundle.content) / 1e6
        say(f"working tree: {bundle.files} files, {megabytes:.1f} MB, {bundle.name[:12]}")
        if bundle.left_out:
            say(
                f"left out, since they look like secrets: {', '.join(bundle.left_out)}; what a run"
                " needs of them goes through --secret NAME"
            )
        if bundle.links:
            links = ", ".join(bundle.links)
            say(f"links out of the working tree, which are sent as they are: {links}")

    # ---- train ---------------------------------------------------------------------------------

    def train(self) -> int:
        """Starts the run, or attaches to it, and watches it to its end."""
        options = self.options
        words, self.wanted = read_words(options.words, options.run)
        self.run = self.wanted
        assignments = options.env or os.environ.get(options.env_from, "")
        environment = read_environment(assignments, options.secret)
        bundle = make_bundle(Path.cwd())
        environment = {**git_state(Path.cwd()), **environment}

        self.ready()
        self.check_runs(words)
        self.describe_bundle(bundle)
        try:
            token, attached = self.start(words, environment, bundle)
            if options.detach:
                ends = f"{self.make('stop')} ends it"
                say(f"{self.run} runs; {self.make('logs')} watches it, {ends}")
                return 0
            self.say_what_ctrl_c_does(attached)
            self.watching = True
            watch = Watch(self.workers, self.run, token)
            code = watch.follow(RECENT if attached else ALL)
            ended = True
        except KeyboardInterrupt:
            if not self.begun:
                raise
            code = INTERRUPTED
            ended = self.interrupted()

        self.watching = False
        if code == 0:
            self.finished(words)
        elif ended:
            say(f"to resume from the newest checkpoint: the same command with RUN={self.run}")
        return code

    def ready(self) -> None:
        """Waits until the TPU is ready, and says what it is. TpuGone: it never will be."""
        begun = time.monotonic()
        said = ""
        while True:
            machine = self.workers.describe()
            if machine.state == "sick":
                raise TpuGone(machine.problem)
            if not machine.problem:
                say(machine.line)
                return
            if said != machine.problem:
                said = machine.problem
                say(f"{said}; Ctrl-C gives up")
            else:
                say(f"{machine.line}: still waiting, {time.monotonic() - begun:.0f} s")
            time.sleep(ASK_AGAIN)

    def check_runs(self, words: list[str]) -> None:
        """Checks that all workers share the run's folder. InputError: no checkpoint would ever be
        whole."""
        folder = runs_folder(words)
        if self.workers.count == 1 or "://" in folder or folder.startswith("/"):
            return
        problem = "ARGS has no --runs"
        if folder:
            problem = f"--runs {folder} in ARGS is on each worker's own disk"
        raise InputError(
            f"{self.host.name} has {self.workers.count} workers, and {problem}; give a folder that"
            " all of them share, ARGS='--runs gs://bucket/runs', or an absolute path"
        )

    def start(self, words: list[str], environment: dict, bundle: Bundle) -> tuple[str, bool]:
        """Starts the run on all workers, or finds it there. Returns its token, and whether it ran
        already."""
        statuses = self.send(words, bundle)
        if not self.run:
            self.run = name_run(words)
        request = self.request(words, environment, bundle)
        token = request["token"]

        def start_one(worker: int) -> dict[str, Any]:
            own = {"worker": worker, "epoch": statuses[worker]["epoch"]}
            data = json.dumps({**request, **own}).encode()
            holder = self.workers.call(worker, "start", data=data)["holder"]
            of_worker_0 = request["token"] if worker else ""
            self.check_holder(worker, holder, words, of_worker_0)
            return holder

        self.begun = True
        holder = None
        try:
            # Of two launchers at the same time one is first on worker 0, and the other attaches.
            holder = parallel(start_one, [0], f"starting {self.run}")[0]
            if holder["token"] != token:
                changed = ""
                if holder["bundle"] != bundle.name:
                    changed = ", with the files of that time, not with today's"
                say(f"{self.describe_run(holder)} runs already{changed}; attaching to it")
            for name in ("token", "key", "address", "port"):
                request[name] = holder[name]
            if "code" not in holder:  # else it has ended already: alone, or for want of a port
                # On all workers also when attaching: the launcher may have died before it had
                # started them all.
                others = range(1, self.workers.count)
                parallel(start_one, others, f"starting {self.run}")
        except Exception as error:
            ours = request["token"] == token
            if ours and (holder or isinstance(error, WorkerLost)):
                say(f"{error}; stopping it on the others")
                self.stop_all(token)
            raise
        return request["token"], request["token"] != token

    def request(self, words: list[str], environment: dict, bundle: Bundle) -> dict[str, Any]:
        """Returns what worker.py gets of a start, the same on all workers."""
        python = []
        if isinstance(self.host, hosts.TpuVm):
            python = ["GET_PYTHON=1"]  # its Ubuntu 22.04 has 3.10
        request = {
            "run": self.run,
            "token": secrets.token_hex(8),
            "key": secrets.token_hex(16),
            "bundle": bundle.name,
            "words": words,
            "command": ["make", "train", *python, *words, f"NAME={self.run}"],
            "environment": environment,
            "keeper": KEEPER.read_text(),
            "workers": self.workers.count,
            "retries": max(self.options.retries, 0),
            "grace": GRACE if self.options.grace is None else self.options.grace,
            "port": self.options.port,
        }
        if self.workers.count == 1:
            request["address"] = ""  # nobody asks this keeper
        return request

    def send(self, words: list[str], bundle: Bundle) -> dict[int, dict]:
        """Brings the working tree to all workers that do not have it. Returns their statuses."""
        call = self.workers.call
        copying = set()

        def prepare(worker: int) -> dict[str, Any]:
            status = call(worker, "status", name=bundle.name)
            while not status["whole"]:
                copying.add(worker)
                say(f"{self.workers.label(worker)}: copying the working tree")
                call(worker, "receive", name=bundle.name, data=bundle.content)
                status = call(worker, "status", name=bundle.name)
            copying.discard(worker)
            if status["running"]:
                self.check_holder(worker, status["running"], words)
            return status

        def progress() -> str:
            shares = []
            for worker in sorted(copying):
                share = self.workers.sent.get(worker, 0) / max(1, len(bundle.content))
                shares.append(f"{share:.0%} of worker {worker}")
            return f", copied {', '.join(shares)}" if shares else ""

        doing = f"preparing {self.host.name}"
        # The first connection of a fresh home makes a key: not several at once.
        statuses = parallel(prepare, [0], doing, progress=progress)
        others = range(1, self.workers.count)
        statuses.update(parallel(prepare, others, doing, progress=progress))
        return statuses

    def check_holder(self, worker: int, holder: dict, words: list[str], token: str = "") -> None:
        """Checks that what is alive on a worker is this run (token: this start), and takes its
        name. InputError: it is another one."""
        same_worker = holder["worker"] == worker and holder["workers"] == self.workers.count
        same_name = self.wanted in ("", holder["run"])
        same_words = sorted(holder["words"]) == sorted(words)
        same_start = token in ("", holder["token"])
        if not (same_worker and same_name and same_words and same_start):
            running = self.describe_run(holder)
            remedy = f"watch it with {self.make('logs')}, end it with {self.make('stop')}"
            raise InputError(f"{self.host.name} is busy: {running}: {remedy}")
        self.check_version(holder)
        self.run = holder["run"]

    def check_version(self, record: dict) -> None:
        """Checks that a run can be followed. InputError: an older launcher has started it."""
        if "folder" in record and "address" in record:
            return
        raise InputError(
            f"{record['run']} was started by another version of the launcher; watch it with that"
            f" one, or end it with {self.make('stop')}, and the same make train resumes it"
        )

    def say_what_ctrl_c_does(self, attached: bool) -> None:
        """Says that the run is watched, and how it is stopped."""
        if attached:
            logs = self.make("logs")
            say(f"attached; Ctrl-C stops {self.run} on all workers ({logs} only looks on)")
        else:
            say(f"{self.run} runs on {self.workers.count} workers; Ctrl-C stops it everywhere")

    def finished(self, words: list[str]) -> None:
        """Says where the results are."""
        folder = f"{runs_folder(words) or 'runs'}/{self.run}"
        if "://" not in folder:
            if not folder.startswith("/"):
                folder = f"xla-zoo/{self.host.folder(0)}/tree/{folder}"
            folder = self.host.fetch(folder)
        say(f"{self.run} has ended; its results: {folder}")

    def interrupted(self) -> bool:
        """Stops the run on all workers after Ctrl-C. A second one leaves at once. Returns whether
        nothing is left."""
        self.workers.abort()
        saving = "which first save a checkpoint; Ctrl-C again leaves at once"
        say(f"stopping {self.run} on all workers, {saving}")
        try:
            left = self.stop_all(self.run)
        except KeyboardInterrupt:
            may_go_on = "left before all workers had answered, so the run may go on"
            say(f"{may_go_on}: {self.make('stop')} ends it")
            return False
        if not left:
            say("no process of the run is left")
        return not left

    # ---- logs and status -----------------------------------------------------------------------

    def logs(self) -> int:
        """Attaches to the run, or shows the end of one that is over. Ctrl-C leaves, and the run
        continues."""
        self.workers.describe()
        status = self.workers.call(0, "status", name="", forever=True)
        runs = []
        for run in (*status["ended"], status["running"]):
            if run and self.options.run in ("", run["run"]):
                runs.append(run)
        if not runs:
            wanted = f"RUN={self.options.run}" if self.options.run else "a run"
            remedy = f"{self.make('status')} lists what it knows"
            raise InputError(f"{self.host.name} does not know of {wanted}; {remedy}")

        newest = runs[-1]
        self.check_version(newest)
        self.run = newest["run"]
        folder = f"xla-zoo/{self.host.folder(0)}/jobs/{self.run}"
        whole = f"all of it is on worker 0: {folder}/log, and before it log.*"
        say(f"{self.run}, the newest part of its log; {whole}")
        try:
            self.watching = bool(status["running"])
            return Watch(self.workers, self.run, newest["token"]).follow(RECENT)
        except KeyboardInterrupt:
            say(f"left; {self.run} continues, {self.make('stop')} ends it")
            return INTERRUPTED

    def status(self) -> int:
        """Prints what the TPU is, what runs there and how the newest runs ended."""
        say(self.workers.describe().line)

        def ask(worker: int) -> Answer:
            try:
                status = self.workers.call(worker, "status", name="")
                return Answer(0, self.describe_status(status))
            except (InputError, WorkerLost) as error:
                return Answer(1, str(error))

        answers: dict[int, Answer] = {}
        try:
            parallel(ask, range(self.workers.count), "asking", at_once=0, done=answers)
        finally:
            for worker, answer in sorted(answers.items()):
                print(f"{self.workers.label(worker)}: {answer.text}", flush=True)
        return max((answer.code for answer in answers.values()), default=0)

    def describe_status(self, status: dict) -> str:
        """Returns what a worker does, in a line."""
        now = "idle"
        if status["running"]:
            now = f"runs {self.describe_run(status['running'])}"
        ends = [f"{record['run']} exit code {record['code']}" for record in status["ended"]]
        ended = ", ".join(ends) or "none"
        return f"{now}; {status['free'] / 1e9:.0f} GB free; ended: {ended}"

    # ---- stop ----------------------------------------------------------------------------------

    def stop(self) -> int:
        """Ends whatever runs on the workers."""
        say(self.workers.describe().line)
        return self.stop_all(self.options.run)

    def stop_all(self, run: str) -> int:
        """Stops every worker by itself, all at once, and lists how it went, also after Ctrl-C.
        Returns 1 if one may still run something."""

        def stop_one(worker: int) -> Answer:
            options = self.options
            try:
                answer = self.workers.call(
                    worker, "stop", run=run, grace=options.grace, force=options.force
                )
            except Exception as error:
                return Answer(1, f"not reached: {error}")
            return self.describe_stop(answer)

        workers = range(self.workers.count)
        answers: dict[int, Answer] = {}
        try:
            parallel(stop_one, workers, "stopping", at_once=0, done=answers)
        finally:
            for worker, answer in sorted(answers.items()):
                say(f"{self.workers.label(worker)}: {answer.text}")
            silent = [worker for worker in workers if worker not in answers]
            if silent:
                say(f"no answer yet from {names(silent)}")
        left = max((answer.code for answer in answers.values()), default=0)
        if left:
            say(f"not all workers have stopped; the same again: {self.make('stop')}")
        return left

    def describe_stop(self, answer: dict) -> Answer:
        """Returns whether a worker still runs something, and what its answer to a stop means."""
        run = answer.get("run")
        if answer["state"] == "other":
            wanted = f"RUN={self.options.run}"
            return Answer(1, f"left alone, since {wanted} does not run there, but {run}")
        if answer["state"] == "idle":
            return Answer(0, "nothing ran")
        if "trainer" not in answer and "code" not in answer:
            return Answer(0, f"stopped: {run}; what its trainer did is not known")
        if answer.get("apart"):
            unsure = "or its Makefile records no exit code (tpu/exit_code.sh)"
            return Answer(0, f"stopped before it trained: {run}, {unsure}")

        code = answer.get("trainer", "unknown")
        if code is None:
            return Answer(0, f"{STOPS[None]}: {run}")
        return Answer(0, f"{STOPS.get(code, 'stopped unsaved')}: {run}, exit code {code}")


def name_run(words: list[str]) -> str:
    """Returns a name for a run that was given none: its model, and the time."""
    model = "run"
    for word in words:
        if word.startswith("MODEL="):
            model = word[len("MODEL=") :]
            break
    return time.strftime(f"{model}-%Y%m%d-%H%M%S")


# ---- the command line --------------------------------------------------------------------------


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line. words: what follows --, which argparse does not take after
    options."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tpu.launch",
        usage="%(prog)s {train,logs,stop,status} --tpu TPU [option ...] [-- NAME=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=("train", "logs", "stop", "status"))

    add("--tpu", required=True, help="name of a TPU VM, or ssh:host1,host2")
    add("--zone", default="", help="default: gcloud's")
    add("--project", default="", help="default: gcloud's")
    add(
        "--run",
        default="",
        help="name of the run; the same name resumes it (default: model and time)",
    )
    add("--env", default="", help="variables for the run: --env \"A=b C='d e'\"")
    add(
        "--env-from",
        default="",
        metavar="NAME",
        help="the variable of this environment that has them (make's ENV)",
    )
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable of this environment",
    )
    add(
        "--retries",
        type=int,
        default=0,
        help="starts all trainers again when one fails; the workers do, not you",
    )
    add("--detach", action="store_true", help="leave when it runs")
    add(
        "--grace",
        type=float,
        help="seconds to save a checkpoint when stopped (train: 60; stop: at most the run's)",
    )
    add(
        "--force",
        action="store_true",
        help="stop: kills also a run of another user, whose time to save is not known",
    )
    add(
        "--port",
        type=int,
        default=0,
        help="at which worker 0 hears the others, where a firewall is between them",
    )
    add(
        "--lost-after",
        type=float,
        default=180,
        help="seconds after which a worker that is never reached is given up",
    )
    add("--gcloud-flag", action="append", default=[], help="for gcloud's ssh, as --internal-ip")

    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.words = arguments[end + 1 :]
    return options


def hang_up(*_: object) -> None:
    """Leaves when the terminal is gone, or at SIGTERM. What runs on the workers continues."""
    raise SystemExit(HUNG_UP)


def open_streams() -> None:
    """Opens the standard streams that are closed, as cron and the like may start programs."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w")  # noqa: SIM115 - for as long as this process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115


def leave(launcher: Launcher | None) -> None:
    """Says what becomes of the run when this launcher leaves it."""
    if launcher is None or not launcher.run:
        return
    if launcher.watching:
        say(f"{launcher.run} continues on the TPU; {launcher.make('logs')} watches it again")
    elif launcher.begun:
        say(f"{launcher.run} may go on: {launcher.make('stop')} ends it")


def close_output() -> None:
    """Keeps Python from writing, at its end, what standard output did not take."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def report(launcher: Launcher | None, error: Exception) -> int:
    """Says what went wrong and what becomes of the run. Returns the exit code."""
    with contextlib.suppress(OSError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    if isinstance(error, TpuGone) and launcher.run:
        resumes = "resumes from its newest checkpoint in a bucket"
        say(f"then the same command with RUN={launcher.run} {resumes}")
    elif launcher is not None and launcher.watching:
        leave(launcher)
    return {InputError: 2, TpuGone: GONE, WorkerLost: 1}[type(error)]


def main() -> int:
    """Runs the command line. Returns the exit code."""
    open_streams()
    options = read_options(sys.argv[1:])
    sys.stderr.reconfigure(errors="backslashreplace")  # a terminal that has only ASCII
    sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGHUP, hang_up)
        signal.signal(signal.SIGTERM, hang_up)

    launcher = None
    try:
        launcher = Launcher(options)
        return getattr(launcher, options.action)()
    except (InputError, TpuGone, WorkerLost) as error:
        return report(launcher, error)
    except OutputLost as error:
        close_output()
        watches = f"{launcher.make('logs')} watches it"
        say(f"standard output takes nothing more: {error}; {launcher.run} continues, {watches}")
        return 1
    except KeyboardInterrupt:
        begun = launcher is not None and launcher.begun
        nothing_started = options.action == "train" and not begun
        say("left; nothing was started" if nothing_started else "left")
        leave(launcher)
        return INTERRUPTED
    except SystemExit as hung_up:
        leave(launcher)
        return hung_up.code
    except BrokenPipeError:  # `make logs | head` has seen enough; the run continues
        close_output()
        return 0
    finally:
        if launcher is not None:
            launcher.workers.abort()


if __name__ == "__main__":
    sys.exit(main())
