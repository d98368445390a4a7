"""Starts a training run on all workers of a TPU from another machine, streams its log, stops it.

    python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b --run bert1 -- MODEL=bert DATA=nyu-mll/glue
    python3 -m tpu.launch logs|stop|status --tpu my-tpu --zone us-east5-b

make train|logs|stop|status TPU=… calls it. It needs python3 (3.9 or later, only the standard library), git, and gcloud
or, for TPU=ssh:host1,host2, ssh. On every worker it puts the working tree (tracked and untracked files, not the ignored
ones) into ~/xla-zoo/worker-<i>/tree and starts `make train` there with the words after `--`; that installs first, into
an environment that stays.

The run is a systemd unit on each worker: it survives the launcher and the connection, and the same command, or `logs`,
attaches to it again. The workers end and repeat it together, whether a launcher looks on or not: see keeper.py. Three
verbs that share no path: start (all workers, or none), watch (only reads, tries for ever), stop (each worker by itself,
whatever the others and the TPU's health say). Ctrl-C in `train` is `stop`.

HF_TOKEN, WANDB_API_KEY and what --secret names travel from this environment over ssh's standard input to the memory of
the workers: they are in no command line, on no disk and in no log. --env travels in the same way.

Exit codes: the run's own, that of the first worker that failed; 1 when a worker was lost or cannot be reached; 2 for
what you can fix; 75 when the TPU is gone (preempted, stopped): recreate it and run the same command; 143 when the run
was stopped; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python3 tpu/launch/launcher.py`

from errors import InputError
from tpu.launch import hosts, messages, queued
from tpu.launch.request import make_bundle, read_environment, read_words, runs_folder
from tpu.launch.workers import PRINTING, TpuGone, WorkerLost, Workers, parallel, say

GONE = 75  # exit code: the TPU is gone; EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # exit code after Ctrl-C
RECENT, ALL = 32 << 10, 1 << 60  # bytes of the log so far: shown when attaching, and looked through at the end; all
LONGEST_GRACE = 86400  # seconds
ASK_AGAIN = 15  # seconds between two looks at a TPU that is not ready
KEEPER = Path(__file__).with_name("keeper.py")


def watch(workers: Workers, run: str, token: str, recent: int) -> int:
    """Streams the log of worker 0, where the workers also say what ends the run, until it has ended.

    recent: how many bytes of what there is already. Returns the run's exit code.
    """
    end = b""

    def hear(answer: dict[str, Any]) -> dict:
        """Prints what an answer brings of the log. Returns where another connection goes on."""
        nonlocal end
        if "data" not in answer:
            return {}
        data = answer["data"].encode(errors="surrogateescape")
        end = (end + data)[-RECENT:]
        with PRINTING:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return {"at": answer["at"]}

    answer = workers.call(0, "follow", hear=hear, forever=True, token=token, at=-recent)
    if answer["state"] == "unknown":
        say(f"{workers.label(0)} knows no {run} any more: the machine was restarted or replaced")
        return 1
    code = answer["code"]
    if code:
        say(answer["why"] or f"the run ended with exit code {code} ({answer['result']})")
        meanings = messages.explain_log(end.decode(errors="replace"))
        say(*(f"what this means: {sentence}" for sentence in meanings))
    return code


class Launcher:
    """The commands `train`, `logs`, `stop` and `status` for one TPU. Each returns an exit code."""

    def __init__(self, options: argparse.Namespace) -> None:
        host = hosts.choose(options.tpu, options.zone, options.project, options.gcloud_flag)
        self.options, self.host, self.workers = options, host, Workers(host, options.lost_after)
        if options.grace is not None and not 0 <= options.grace <= LONGEST_GRACE:
            raise InputError(f"--grace {options.grace:g} is not a time to save: give 0 to {LONGEST_GRACE} seconds")
        self.run, self.begun = "", False  # begun: something was started that Ctrl-C must stop

    def make(self, target: str) -> str:
        """Returns the command of make to show, for this TPU."""
        place = {"TPU": self.host.name, "ZONE": self.options.zone, "PROJECT": self.options.project}
        return shlex.join(["make", target, *(f"{name}={value}" for name, value in place.items() if value)])

    def describe_run(self, holder: dict) -> str:
        """Returns what runs, in half a sentence."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder["started"]))
        place = f", worker {holder['worker']} of {holder['workers']}" if holder["workers"] > 1 else ""
        return f"{holder['run']} ({shlex.join(holder['words'])}){place}, since {since}"

    def ready(self) -> None:
        """Waits until the TPU is ready, and says what it is. TpuGone: it never will be."""
        said = ""
        while True:
            machine = self.workers.describe()
            if machine.state == "sick":
                raise TpuGone(machine.problem)
            if said != (machine.problem or machine.line):
                said = machine.problem or machine.line
                say(f"{said}; Ctrl-C gives up" if machine.problem else said)
            if not machine.problem:
                return
            time.sleep(ASK_AGAIN)

    def train(self) -> int:
        """Starts the run, or attaches to it, and watches it to its end."""
        options = self.options
        words, self.wanted = read_words(options.words, options.run)
        self.run = self.wanted
        environment = read_environment(options.env or os.environ.get(options.env_from, ""), options.secret)
        bundle, content, files = make_bundle(Path.cwd())
        request = queued.Request(self.workers, options) if options.create else None
        if request:
            request.make(runs_folder(words))
        self.ready()
        self.check_runs(words)
        say(f"working tree: {files} files, {len(content) / 1e6:.1f} MB, {bundle[:12]}")
        ended = False
        try:
            token, attached = self.start(words, environment, bundle, content)
            if options.detach:
                say(f"{self.run} runs; {self.make('logs')} watches it, {self.make('stop')} ends it")
                return 0
            if not attached:
                say(f"{self.run} runs on {self.workers.count} workers; Ctrl-C stops it everywhere")
            code, ended = watch(self.workers, self.run, token, RECENT if attached else ALL), True
        except KeyboardInterrupt:
            if not self.begun:
                raise
            code, ended = INTERRUPTED, self.interrupted()
        finally:
            if request:
                request.finish(ended)
        if code == 0:
            self.finished(words)
        elif ended:
            say(f"to resume from the newest checkpoint: the same command with RUN={self.run}")
        return code

    def start(self, words: list[str], environment: dict, bundle: str, content: bytes) -> tuple[str, bool]:
        """Starts the run on all workers, or finds it there. Returns its token, and whether it ran already."""
        call, options = self.workers.call, self.options

        def prepare(worker: int) -> dict[str, Any]:
            while not (status := call(worker, "status", name=bundle))["whole"]:
                say(f"{self.workers.label(worker)}: copying the working tree")
                call(worker, "receive", name=bundle, data=content)
            if status["running"]:
                self.check_holder(worker, status["running"], words)
            return status

        statuses = {0: prepare(0)}  # the first connection of a fresh home makes a key: not several at once
        statuses.update(parallel(prepare, range(1, self.workers.count)))
        model = next((word[6:] for word in words if word.startswith("MODEL=")), "run")
        run = self.run = self.run or time.strftime(f"{model}-%Y%m%d-%H%M%S")
        token, count = secrets.token_hex(8), self.workers.count
        request = {"run": run, "token": token, "bundle": bundle, "words": words, "environment": environment}
        python = ["GET_PYTHON=1"] if isinstance(self.host, hosts.TpuVm) else []  # of its Ubuntu 22.04: 3.10
        request |= {"command": ["make", "train", *python, *words, f"NAME={run}"], "retries": max(options.retries, 0)}
        request |= {"workers": count, "keeper": KEEPER.read_text(), "key": secrets.token_hex(16)}
        request |= {"grace": 60 if options.grace is None else options.grace}

        def start_one(worker: int) -> dict[str, Any]:
            own = {"worker": worker, "epoch": statuses[worker]["epoch"]}
            holder = call(worker, "start", data=json.dumps({**request, **own}).encode())["holder"]
            self.check_holder(worker, holder, words, request["token"] if worker else "")
            return holder

        self.begun, holder = True, None
        try:
            # Of two launchers at the same time one is first on worker 0, and the other attaches.
            holder = start_one(0)
            if holder["token"] != token:
                changed = "" if holder["bundle"] == bundle else ", with the files of that time, not with today's"
                say(f"{self.describe_run(holder)} runs already{changed}; attaching to it")
            request |= {name: holder[name] for name in ("token", "key", "addresses", "port")}
            # On all workers also when attaching: the launcher may have died before it had started them all.
            parallel(start_one, range(1, count))
        except Exception as error:
            if request["token"] == token and (holder or isinstance(error, WorkerLost)):
                say(f"{error}; stopping it on the others")
                self.stop_all(token)
            raise
        return request["token"], request["token"] != token

    def check_holder(self, worker: int, holder: dict, words: list[str], token: str = "") -> None:
        """Checks that what is alive on a worker is this run (token: this start), and takes its name. InputError."""
        same = (holder["worker"], holder["workers"]) == (worker, self.workers.count)
        same = same and self.wanted in ("", holder["run"]) and sorted(holder["words"]) == sorted(words)
        if not same or token not in ("", holder["token"]):
            ways = f"watch it with {self.make('logs')}, end it with {self.make('stop')}"
            raise InputError(f"{self.host.name} is busy: {self.describe_run(holder)}: {ways}")
        self.run = holder["run"]

    def check_runs(self, words: list[str]) -> None:
        """Checks that all workers share the run's folder. InputError: no checkpoint would ever be whole."""
        folder = runs_folder(words)
        if self.workers.count == 1 or "://" in folder or folder.startswith("/"):
            return
        what = f"--runs {folder} in ARGS is on each worker's own disk" if folder else "ARGS has no --runs"
        raise InputError(
            f"{self.host.name} has {self.workers.count} workers, and {what}; give a folder that all of them share,"
            " ARGS='--runs gs://bucket/runs', or an absolute path"
        )

    def finished(self, words: list[str]) -> None:
        """Says where the results are."""
        folder = f"{runs_folder(words) or 'runs'}/{self.run}"
        if "://" not in folder:
            folder = self.host.fetch(folder if folder.startswith("/") else f"xla-zoo/worker-0/tree/{folder}")
        say(f"{self.run} has ended; its results: {folder}")

    def logs(self) -> int:
        """Attaches to the run, or shows the end of one that is over. Ctrl-C leaves, and the run continues."""
        self.workers.describe()
        status = self.workers.call(0, "status", name="", forever=True)
        runs = [run for run in (*status["ended"], status["running"]) if run and self.options.run in ("", run["run"])]
        if not runs:
            wanted = f"RUN={self.options.run}" if self.options.run else "a run"
            raise InputError(f"{self.host.name} does not know of {wanted}; {self.make('status')} lists what it knows")
        self.run = runs[-1]["run"]
        say(f"{self.run}, the newest part of its log; all of it is on worker 0, xla-zoo/worker-0/jobs/{self.run}/log")
        try:
            return watch(self.workers, self.run, runs[-1]["token"], RECENT)
        except KeyboardInterrupt:
            say(f"left; {self.run} continues, {self.make('stop')} ends it")
            return INTERRUPTED

    def status(self) -> int:
        """Prints what the TPU is, what runs there and how the newest runs ended."""
        say(self.workers.describe().line)
        lost = 0
        for worker in range(self.workers.count):
            try:
                status = self.workers.call(worker, "status", name="")
                now = f"runs {self.describe_run(status['running'])}" if status["running"] else "idle"
                ended = ", ".join(f"{record['run']} exit code {record['code']}" for record in status["ended"])
                line = f"{now}; {status['free'] / 1e9:.0f} GB free; ended: {ended or 'none'}"
            except (InputError, WorkerLost) as error:
                line, lost = error, 1
            print(f"{self.workers.label(worker)}: {line}", flush=True)
        return lost

    def stop(self) -> int:
        """Ends whatever runs on the workers."""
        say(self.workers.describe().line)
        return self.stop_all(self.options.run)

    def stop_all(self, run: str) -> int:
        """Stops every worker by itself, and lists how it went. Returns 1 if one may still run something."""

        def stop_one(worker: int) -> tuple[int, str]:
            try:
                answer = self.workers.call(worker, "stop", run=run, grace=self.options.grace)
            except Exception as error:
                return 1, f"not reached: {error}"
            if answer["state"] == "other":
                return 1, f"left alone, since RUN={run} does not run there, but {answer['run']}"
            if answer["state"] == "idle":
                return 0, "nothing ran"
            code = answer.get("trainer", "unknown")
            how = {143: "stopped and saved", 0: "had just ended", None: "stopped before it trained"}
            return 0, f"{how.get(code, 'stopped unsaved')}: {answer['run']}, exit code {code}"

        answers = parallel(stop_one, range(self.workers.count))
        for worker, (_, text) in sorted(answers.items()):
            say(f"{self.workers.label(worker)}: {text}")
        left = max((code for code, _ in answers.values()), default=0)
        if left:
            say(f"not all workers have stopped; the same again: {self.make('stop')}")
        return left

    def interrupted(self) -> bool:
        """Stops the run on all workers after Ctrl-C. A second one leaves at once. Returns whether nothing is left."""
        self.workers.abort()
        say(f"stopping {self.run} on all workers, which first save a checkpoint; Ctrl-C again leaves at once")
        try:
            left = self.stop_all(self.run)
        except KeyboardInterrupt:
            say(f"left before all workers had answered, so the run may go on: {self.make('stop')} ends it")
            return False
        if not left:
            say("no process of the run is left")
        return not left


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line. words: what follows --, which argparse does not take after options."""
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
    add("--run", default="", help="name of the run; the same name resumes it (default: model and time)")
    add("--env", default="", help="variables for the run: --env \"A=b C='d e'\"")
    add("--env-from", default="", metavar="NAME", help="the variable of this environment that has them (make's ENV)")
    add("--secret", action="append", default=[], metavar="NAME", help="a variable of this environment")
    add("--retries", type=int, default=0, help="starts all trainers again when one fails; the workers do, not you")
    add("--detach", action="store_true", help="leave when it runs")
    add("--grace", type=float, help="seconds to save a checkpoint when stopped (train: 60; stop: at most the run's)")
    add("--lost-after", type=float, default=180, help="seconds after which a worker that is never reached is given up")
    add("--create", default="", metavar="TYPE", help="ask for the TPU (v6e-8, …) as a queued resource; delete it after")
    add("--spot", action="store_true", help="with --create: a spot TPU")
    add("--keep", action="store_true", help="with --create: do not delete it")
    add("--runtime-version", default="", help="with --create: the VM's software (default: the one for its type)")
    add("--gcloud-flag", action="append", default=[], help="for gcloud's ssh, as --internal-ip")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.words = arguments[end + 1 :]
    return options


def main() -> int:
    """Runs the command line. Returns the exit code."""
    options, launcher = read_options(sys.argv[1:]), None
    sys.stderr.reconfigure(errors="backslashreplace")  # a terminal that has only ASCII
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        launcher = Launcher(options)
        return getattr(launcher, options.action)()
    except (InputError, TpuGone, WorkerLost) as error:
        with contextlib.suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            if isinstance(error, TpuGone) and launcher.run:
                say(f"then the same command with RUN={launcher.run} resumes from its newest checkpoint in a bucket")
        return {InputError: 2, TpuGone: GONE, WorkerLost: 1}[type(error)]
    except KeyboardInterrupt:
        say("left; nothing was started" if options.action == "train" else "left")
        return INTERRUPTED
    except BrokenPipeError:  # `make logs | head` has seen enough; the run continues
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    finally:
        if launcher is not None:
            launcher.workers.abort()


if __name__ == "__main__":
    sys.exit(main())
