"""Starts a training run on all workers of a TPU from another machine, streams its log, stops it.

    python3 -m tpu.launch train --tpu my-tpu --zone us-east5-b --run bert1 -- MODEL=bert DATA=nyu-mll/glue
    python3 -m tpu.launch logs|stop|status --tpu my-tpu --zone us-east5-b

make train|logs|stop|status TPU=… calls it. It needs python3 (3.9 or later, only the standard library), git, and gcloud
or, for TPU=ssh:host1,host2, ssh. On every worker it puts the working tree (tracked and untracked files, not the ignored
ones) into ~/xla-zoo/worker-<i>/tree and starts `make train` there with the words after `--`; that installs first, into
an environment that stays.

The run is detached: it survives the launcher and the connection, and the same command, or `logs`, attaches to it again.
There is one connection for each worker (never --worker=all), a dropped one continues where it was, and a start is done
once however often it is repeated. The first worker that fails ends the run on all, since the others would wait for it
in a collective. Ctrl-C stops the run on all workers; it saves a checkpoint first.

    launcher.py      the commands
    request.py       what the user asks of a run        bundle.py   the copy of the working tree
    fleet.py         all workers of a TPU               watch.py    a start of a run, followed to its end
    connections.py   ssh and gcloud processes           hosts.py    how workers are reached; host keys
    worker.py        what runs on each worker

HF_TOKEN, WANDB_API_KEY and what --secret names travel from this environment over ssh's standard input to the process
that they are for; they are in no command line, no file and no log. --env travels in the same way.

Exit codes: that of the first worker that failed; 1 when it had none (it was lost); 2 for what you can fix; 75 when the
TPU is gone (preempted, in maintenance): recreate it and run the same command; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python3 tpu/launch/launcher.py`

from errors import InputError
from tpu.launch import hosts
from tpu.launch.bundle import make_bundle
from tpu.launch.connections import WorkerLost
from tpu.launch.fleet import Fleet, Start, TpuGone, say
from tpu.launch.request import read_environment, read_words, runs_folder
from tpu.launch.watch import RECENT, Outcome, watch

GONE = 75  # exit code: the TPU is gone; EX_TEMPFAIL of sysexits.h


class Launcher:
    """The commands `train`, `logs`, `stop` and `status` for one TPU. Each returns an exit code."""

    def __init__(self, options: argparse.Namespace) -> None:
        host = hosts.choose(options.tpu, options.zone, options.project, options.gcloud_flag, options.ssh_config)
        place = {"TPU": host.name, "ZONE": options.zone, "PROJECT": options.project}
        words = [f"{name}={value}" for name, value in place.items() if value]
        self.options, self.fleet = options, Fleet(host, words, options.lost_after)
        self.start = Start()

    def attach(self, statuses: dict[int, dict], words: list[str], bundle: str) -> bool:
        """Tells whether this run is alive already, and takes over its token. InputError: another run is alive."""
        alive = [status["running"] for status in statuses.values() if status["running"]]
        if not alive:
            return False
        holder, run, name = alive[0], self.start.run, self.fleet.host.name
        if {other["token"] for other in alive} != {holder["token"]}:
            runs = ", ".join(sorted({other["run"] for other in alive}))
            raise InputError(
                f"the workers of {name} run different starts ({runs}); end them: {self.fleet.make('stop')}"
            )
        theirs = [word for word in holder["words"] if not word.startswith("NAME=")]
        if (run and run != holder["run"]) or sorted(theirs) != sorted(words):
            raise InputError(f"{name} is busy: {self.fleet.busy(holder)}")
        self.start = Start(holder["run"], holder["token"])
        changed = "" if holder["bundle"] == bundle else ", with the files of that time: what changed since is not in it"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(holder["started"]))
        say(f"{self.start.run} runs already, since {since}{changed}; attaching to it")
        return True

    def train(self) -> int:
        """Starts the run, or attaches to it, and watches it to its end; starts it again when a worker fails."""
        fleet, options = self.fleet, self.options
        words, run = read_words(options.words, options.run)
        self.start = Start(run)
        environment = read_environment(options.env, options.secret)
        bundle, content, files = make_bundle(Path.cwd())
        fleet.describe()
        self.check_runs(words)
        say(f"working tree: {files} files, {len(content) / 1e6:.1f} MB, {bundle[:12]}")
        statuses = fleet.prepare_all({f"{bundle}.tar.gz": content})
        attached = self.attach(statuses, words, bundle)
        if not attached:
            model = next((word[6:] for word in words if word.startswith("MODEL=")), "run")
            self.start = Start(run or time.strftime(f"{model}-%Y%m%d-%H%M%S"), secrets.token_hex(8))
        run = self.start.run
        for attempt in range(options.retries + 1):
            if attempt:
                fleet.prepare_all({f"{bundle}.tar.gz": content})
                self.start = Start(run, secrets.token_hex(8))
                say(f"starting {run} again, retry {attempt} of {options.retries}; it resumes from its checkpoint")
            try:
                # On all workers also when attaching: the launcher may have died before it had started them all.
                fleet.start_all(self.start, words, environment, bundle)
                if options.detach:
                    say(f"{run} runs; {fleet.make('logs')} watches it, {fleet.make('stop')} ends it")
                    return 0
                if not attached and not attempt:
                    say(f"{run} runs on {len(fleet.workers)} workers; Ctrl-C stops it everywhere")
                outcome = watch(fleet, self.start, -RECENT if attached and not attempt else -1, options.grace)
            except KeyboardInterrupt:
                return self.interrupted()
            except WorkerLost as lost:
                say(str(lost))
                outcome = Outcome(1)
            if outcome.code == 0:
                self.finished(words)
                return 0
            if outcome.final:
                break
            fleet.describe()  # is it the TPU itself?
        say(f"to resume from the newest checkpoint: the same command with RUN={run}")
        return outcome.code

    def check_runs(self, words: list[str]) -> None:
        """Checks that all workers share the run's folder. InputError: no checkpoint would ever be whole."""
        folder = runs_folder(words)
        workers = len(self.fleet.workers)
        if workers == 1 or "://" in folder or folder.startswith("/"):
            return
        what = f"--runs {folder} in ARGS is a folder of" if folder else "ARGS has no --runs, so the run's folder is on"
        raise InputError(
            f"{self.fleet.host.name} has {workers} workers, and {what} each worker's own disk; give one that all"
            " of them share, ARGS='--runs gs://bucket/runs', or the absolute path of a shared folder"
        )

    def finished(self, words: list[str]) -> None:
        """Says where the results are."""
        run, host = self.start.run, self.fleet.host
        folder = f"{runs_folder(words) or 'runs'}/{run}"
        if "://" in folder:
            say(f"{run} has ended; its results are in {folder}")
            return
        folder = folder if folder.startswith("/") else f"xla-zoo/worker-0/tree/{folder}"
        if isinstance(host, hosts.TpuVm):
            get = host.text("scp", "--recurse", f"{host.name}:{folder}", "runs/", "--worker=0")
        else:
            get = shlex.join(["scp", "-r", f"{host.hosts[0]}:{folder}", "runs/"])
        say(f"{run} has ended; its results are on worker 0: {get}")

    def interrupted(self) -> int:
        """Stops the run on all workers after Ctrl-C. A second one leaves at once."""
        self.fleet.starting.abort()  # what is still on its way finds that its token was stopped
        say(
            f"stopping {self.start.run} on all workers; it has {self.options.grace:.0f} s to save a checkpoint."
            " Ctrl-C again leaves at once"
        )
        try:
            unsure = self.fleet.stop_all(self.start, self.options.grace)
        except KeyboardInterrupt:
            say(f"left before all workers had answered, so the run may go on: {self.fleet.make('stop')} ends it")
            return 130
        time.sleep(0.5)  # the last lines of the log
        if not unsure:
            say(f"stopped; no process of the run is left. To resume: the same command with RUN={self.start.run}")
        else:
            say(f"end it with {self.fleet.make('stop')}")
        return 130

    def logs(self) -> int:
        """Attaches to the run, or shows the end of one that is over. Ctrl-C leaves, and the run continues."""
        self.fleet.describe()
        statuses = self.fleet.prepare_all({})
        alive = [status["running"] for status in statuses.values() if status["running"]]
        jobs = alive + sorted(
            (job for status in statuses.values() for job in status["jobs"]), key=lambda job: -job["started"]
        )
        jobs = [job for job in jobs if self.options.run in ("", job["run"])]
        if not jobs:
            wanted = f"RUN={self.options.run}" if self.options.run else "a run"
            raise InputError(
                f"{self.fleet.host.name} does not know of {wanted}; {self.fleet.make('status')} lists what it knows"
            )
        self.start = Start(jobs[0]["run"], jobs[0]["token"])
        run = self.start.run
        say(f"{run}, the newest part of its log; all of it is on worker 0, xla-zoo/worker-0/jobs/{run}/log")
        try:
            return watch(self.fleet, self.start, -RECENT, self.options.grace).code
        except KeyboardInterrupt:
            say(f"left; {run} continues, {self.fleet.make('stop')} ends it")
            return 130

    def stop(self) -> int:
        """Ends whatever runs on the workers."""
        self.fleet.describe()
        statuses = self.fleet.prepare_all({})
        if self.options.run:
            other = [s["running"]["run"] for s in statuses.values() if s["running"]]
            if any(run != self.options.run for run in other):
                raise InputError(
                    f"RUN={self.options.run} does not run on {self.fleet.host.name}, but {', '.join(set(other))}"
                )
        if not any(status["running"] for status in statuses.values()):
            say("no run of ours is alive there")
            return 0
        say(f"it has {self.options.grace:.0f} s to save a checkpoint")
        return 1 if self.fleet.stop_all(Start(), self.options.grace) else 0

    def status(self) -> int:
        """Prints what the TPU is, what runs there and how the newest runs ended."""
        self.fleet.describe()
        for worker, status in sorted(self.fleet.prepare_all({}).items()):
            holder = status["running"]
            now = self.fleet.busy(holder).partition(":")[0].replace("runs there", "runs") if holder else "idle"
            ended = [
                f"{job['run']} {'vanished' if job['code'] is None else 'exit code ' + str(job['code'])}"
                for job in status["jobs"]
                if job["token"] != holder.get("token")
            ]
            free = f"{status['free'] / 1e9:.0f} GB free"
            print(f"{self.fleet.label(worker)}: {now}; {free}; ended: {', '.join(ended) or 'none'}")
        return 0


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line. words: what follows --, which argparse does not take after options."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tpu.launch",
        usage="%(prog)s {train,logs,stop,status} --tpu TPU [option ...] [-- NAME=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("train", "logs", "stop", "status"))
    parser.add_argument("--tpu", required=True, help="name of a TPU VM, or ssh:host1,host2")
    parser.add_argument("--zone", default="", help="default: gcloud's")
    parser.add_argument("--project", default="", help="default: gcloud's")
    parser.add_argument("--run", default="", help="name of the run; the same name resumes it (default: model and time)")
    parser.add_argument("--env", default="", help="variables for the run: --env \"A=b C='d e'\"")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME", help="a variable of this environment")
    parser.add_argument("--retries", type=int, default=0, help="starts again when a worker fails and the TPU is READY")
    parser.add_argument(
        "--detach", action="store_true", help="leave when it runs; nobody stops the others if one fails"
    )
    parser.add_argument(
        "--grace", type=float, default=60, help="seconds to save a checkpoint when stopped (default: 60)"
    )
    parser.add_argument(
        "--lost-after", type=float, default=180, help="seconds after which a worker without connection is lost"
    )
    parser.add_argument("--gcloud-flag", action="append", default=[], help="for gcloud's ssh and scp, as --internal-ip")
    parser.add_argument("--ssh-config", default="", help="for ssh: hosts, a file for ssh's -F (default: your own)")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.words = arguments[end + 1 :]
    return options


def main() -> int:
    """Runs the command line. Returns the exit code."""
    options, launcher = read_options(sys.argv[1:]), None
    try:
        launcher = Launcher(options)
        return getattr(launcher, options.action)()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except TpuGone as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if launcher.start.run:
            say(
                f"then the same command with RUN={launcher.start.run} resumes from its newest checkpoint, if that is in"
                " a bucket (--runs gs://bucket/runs in ARGS): the disks of a deleted TPU are gone"
            )
        return GONE
    except WorkerLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        say("left; nothing was started")
        return 130
    finally:
        if launcher is not None:
            launcher.fleet.connections.abort()
            launcher.fleet.starting.abort()


if __name__ == "__main__":
    sys.exit(main())
