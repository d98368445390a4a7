"""What is tried, one after the other, and what came of it. A check that fails ends none of the
others."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tpu.accept import expected, predictions
from tpu.accept.children import (
    TAIL,
    Child,
    Here,
    Interrupted,
    Limits,
    Tpu,
    end_group,
    last_line,
    say,
)
from tpu.accept.expected import RECIPES, SCRIPTS, Script
from tpu.accept.predictions import Inputs, Prediction

# Outcomes.
OK = "ok"
FAILED = "failed"
NOT_THERE = "not there"
NOT_RUN = "not run"

# Exit codes.
KILLED = 137
STOPPED = 143
GONE = 75  # the TPU is gone
COMPILER_DIED = 3  # of make compile
DIED = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 139: "SIGSEGV"}

SAFE_FORMS = 'repeat it with --train-args="--safe-forms" (docs/tpu.md, "When the compiler dies")'
GIBIBYTE = 2**30
LINES_BEFORE_STOP = 2  # of metrics, that a run has printed when it is asked to stop


@dataclass(frozen=True)
class Sign:
    """What a log says of a failure, what that is, and what to do."""

    pattern: str
    meaning: str
    remedy: str


# The first that is found counts.
SIGNS = (
    Sign(
        r"No space left on device|Disk quota exceeded",
        "a disk is full",
        "make room there (--runs, /tmp, and the environment's disk of each worker), then repeat the"
        " command",
    ),
    Sign(
        r"the training diverged|is not finite",
        "a wrong number: a value is not finite",
        "repeat the command; if it is so again, send the page, and try --precision float32 in"
        " --train-args",
    ),
    Sign(
        r"no progress for \d+ s",
        "a step hangs: the run's own watchdog has ended it",
        "the log has the stacks of all threads; look at the TPU's health with make status, and"
        " repeat the command",
    ),
    Sign(
        r"RESOURCE_EXHAUSTED"
        r"|Ran out of memory in memory space hbm"
        r"|Out of memory while trying to allocate",
        "the program does not fit into the chip's memory",
        "make compile says how large it is; send the page",
    ),
    Sign(
        r"Unknown command line flag",
        "this libtpu does not know a flag of LIBTPU_INIT_ARGS",
        SAFE_FORMS,
    ),
)


@dataclass
class Check:
    """What was tried, and what came of it."""

    name: str
    outcome: str = NOT_RUN  # ok, failed, not there, not run
    why: str = ""  # in a sentence, with the remedy where there is one; "" where it is ok
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)  # as a person can repeat them
    exit_codes: list[int] = field(default_factory=list)  # of the programs that make has started
    log: str = ""  # beside the JSON
    metrics: dict[str, float] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)  # ranges, or a published target
    step: dict[str, Any] = field(default_factory=dict)  # see step_seconds
    chip_bytes: int | None = None  # most memory in use on a chip
    host_bytes: int | None = None
    estimate: dict[str, Any] = field(default_factory=dict)  # by make compile
    notes: list[str] = field(default_factory=list)
    recipe: str = ""  # of docs/results.md
    last_lines: list[str] = field(default_factory=list)  # where it failed

    def fail(self, why: str) -> None:
        """Makes it a failure."""
        self.outcome = FAILED
        self.why = why


@dataclass(frozen=True)
class Planned:
    """A check that was asked for."""

    name: str
    function: Callable[[Check], None]


class Failed(Exception):
    """Ends a check; the message says why it failed."""


class NotRun(Exception):
    """Ends a check that cannot be tried here; the message says why."""


class NotThere(Exception):
    """Ends a check for which something is missing; the message names it and how to get it."""


# ---- what a run has reported -------------------------------------------------------------------


def lines_of_steps(child: Child) -> dict[tuple, dict]:
    """Returns the values of each line of metrics, by step and names: an evaluation has the step of
    a training line."""
    found = {}
    for record in child.records():
        key = (record["step"], *sorted(record["values"]))
        found[key] = record["values"]
    return found


def step_seconds(records: list[dict]) -> dict[str, Any]:
    """Returns least, median and most seconds of a step between two lines of metrics, and the share
    of input wait.

    The first two lines are left out: what is compiled lies between them.
    """
    training = [record for record in records if "input_wait" in record["timing"]]
    found = []
    for number in range(2, len(training)):
        before = training[number - 1]
        after = training[number]
        steps = after["step"] - before["step"]
        if steps > 0:
            seconds = after["timing"]["training"] - before["timing"]["training"]
            found.append(seconds / steps)
    if not found:
        return {}
    waits = [record["timing"]["input_wait"] for record in training[2:]]
    return {
        "least": min(found),
        "median": statistics.median(found),
        "most": max(found),
        "intervals": len(found),
        "input_wait": statistics.mean(waits),
    }


def not_finite(values: dict[str, Any]) -> str:
    """Returns what of some values is not a finite number, "" if all are."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{name} is {value}"
    return ""


def out_of_range(metrics: dict[str, float], ranges: dict[str, tuple[float, float]]) -> str:
    """Returns which metric is not what was expected, "" if all are."""
    for name, (low, high) in ranges.items():
        if name not in metrics:
            return f"there is no {name} among {', '.join(metrics) or 'no metrics'}"
        if not low <= metrics[name] <= high:
            return f"{name} is {metrics[name]:.4g}; expected {low:g} to {high:g}"
    return ""


def difference(one: dict[tuple, dict], other: dict[tuple, dict]) -> str:
    """Returns the first difference of `other` from `one`, both by `lines_of_steps`, "" if there is
    none."""
    for key in sorted(one, key=lambda key: (key[0], str(key))):
        step, *names = key
        if key not in other:
            return f"step {step} has no line with {', '.join(names)}"
        for name, value in one[key].items():
            found = other[key][name]
            if found != value:
                apart = abs(found - value) / max(abs(value), 1e-30)
                values = f"{found!r}, not {value!r}"
                return f"{name} of step {step} is {values} ({apart:.1e} of it apart)"
    return ""


def diagnosis(child: Child) -> str:
    """Returns what ended a child that failed, and the remedy, in a sentence."""
    if child.hung:
        hangs = f"a step hangs, or takes too long: {child.hung}"
        return f"{hangs}. It was stopped; repeat the command to see it again"
    text = child.text()
    for sign in SIGNS:
        found = re.search(rf"^.*(?:{sign.pattern}).*$", text, re.MULTILINE)
        if found:
            return f"{sign.meaning} ({found[0].strip()[:200]}): {sign.remedy}"

    code = child.code()
    signal_name = DIED.get(code, "")
    reported = re.search(r"\*\*\* (SIG(?:SEGV|BUS|ILL|ABRT))", text)
    if reported and not signal_name:
        signal_name = reported[1]
    if signal_name:
        died = "the process died without a traceback"
        if child.compiling:
            died = f"the compiler died of {child.compiling}"
        return f"{died} ({signal_name}, exit code {code}): {SAFE_FORMS}"

    if code == KILLED:
        killed = "the process was killed from outside (exit code 137)"
        return f"{killed}: most likely memory; `sudo dmesg | grep -i oom`"
    without_make = [line for line in child.lines if not re.match(r"make(\[\d+\])?: \*\*\*", line)]
    said = last_line(without_make)[:300]
    if code == GONE:
        return f"the TPU is gone (exit code 75): recreate it and repeat the command. {said}"
    return f"exit code {code}: {said}"


@dataclass
class Options:
    """The command line; see __main__.py."""

    tpu: str
    zone: str
    project: str
    runs: str
    out: Path
    only: list[str]
    python: str
    recipe: str
    data: str
    name: str
    train_args: str
    words: str
    launch_args: str
    limits: Limits
    slow: float  # factor of the estimate; 0: that of expected.py
    command: str


class Acceptance:
    """All checks of one command. `checks` grows and is written after each by `written`."""

    def __init__(self, options: Options, folder: Path, written: Callable[[Acceptance], None]):
        self.options = options
        self.folder = folder
        self.written = written
        self.target: Here | Tpu = Here(folder, options.python)
        if options.tpu not in ("", "local"):
            self.target = Tpu(
                folder, options.tpu, options.zone, options.project, options.launch_args
            )
        self.began = time.time()
        self.stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.began))
        self.checks: list[Check] = []

        # Of the first run that started.
        self.hardware: dict[str, Any] = {}
        self.versions: dict[str, str] = {}
        self.git: dict[str, Any] = {}

        self.unbroken: dict[str, Child] = {}  # the trials that ended well, by script
        self.resumed: dict[str, Child] = {}
        self.left: list[str] = []  # what may still run
        self.gone = ""  # why nothing more is tried

    def plan(self) -> list[Planned]:
        """Returns the checks that were asked for, in their order."""
        planned = [Planned("doctor", self.doctor)]
        if self.options.recipe:
            name = self.options.recipe
            planned.append(Planned(f"recipe {name}", partial(self.recipe, name=name)))
            return planned

        for script in SCRIPTS:
            trial = partial(self.trial, script=script)
            resume = partial(self.resume, script=script)
            planned.append(Planned(f"{script.name}: trial", trial))
            planned.append(Planned(f"{script.name}: kill and resume", resume))
            if script.predicts or script.why_not:
                predict = partial(self.predict, script=script)
                planned.append(Planned(f"{script.name}: predict", predict))
        planned.append(Planned("checkpoint of all hosts", self.hosts))
        planned.append(Planned("stop and saved", self.stop))
        planned.append(Planned("step time and memory", self.speed))
        if self.options.only:
            words = tuple(self.options.only)
            planned = [check for check in planned if check.name.startswith(words)]
        return planned

    def run(self) -> int:
        """Runs all checks. Returns the exit code: 0 if none failed, 1 if one did, 130 after
        Ctrl-C."""
        planned = self.plan()
        self.checks = [Check(one.name) for one in planned]
        interrupted = False
        for number, check in enumerate(self.checks):
            if interrupted:
                check.why = "Ctrl-C"
            elif self.gone:
                check.why = self.gone
            else:
                interrupted = self.attempt(check, planned[number].function)
                self.written(self)
        self.written(self)
        if interrupted:
            return 130
        return int(any(check.outcome == FAILED for check in self.checks))

    def attempt(self, check: Check, function: Callable[[Check], None]) -> bool:
        """Runs one check, and notes what came of it. Returns whether it was interrupted."""
        log = re.sub(r"\W+", "-", check.name)
        check.log = f"{self.options.out.name}/{log}.log"
        say(f"{check.name} …")
        interrupted = False
        began = time.monotonic()
        try:
            function(check)
            check.outcome = OK
        except Failed as error:
            check.fail(str(error))
        except NotRun as error:
            check.outcome = NOT_RUN
            check.why = str(error)
        except NotThere as error:
            check.outcome = NOT_THERE
            check.why = str(error)
        except Interrupted:
            interrupted = True
            check.why = "Ctrl-C"
        except OSError as error:
            check.fail(f"this machine: {error}: make room or access, then repeat it")
        check.seconds = round(time.monotonic() - began, 1)
        if not check.commands:
            check.log = ""
        say(f"    {check.outcome}{': ' if check.why else ''}{check.why}")
        return interrupted

    # ---- the programs that checks run ----------------------------------------------------------

    def start(self, check: Check, command: list[str]) -> Child:
        """Starts a program of a check."""
        child = Child(command, self.options.out / Path(check.log).name)
        check.commands.append(child.shown())
        child.start(self.folder)
        return child

    def run_here(self, check: Check, command: list[str]) -> Child:
        """Runs a program on this machine to its end, or to its time limit."""
        child = self.start(check, command)
        try:
            child.follow(self.options.limits)
        finally:
            end_group(child)
            child.close()
            check.exit_codes.append(child.code())
        return child

    def train(
        self,
        check: Check,
        run: str,
        words: str,
        flags: str,
        then: Callable[[Child], None] | None = None,
    ) -> Child:
        """Trains to the end of the run, or until `then` has dealt with it. Leaves nothing running.

        Args:
            run: its name.
            words: of make train.
            flags: in ARGS, besides those of the command line.
        """
        options = self.options
        runs = f"--runs {shlex.quote(options.runs)}" if options.runs else ""
        flags = " ".join(filter(None, [runs, flags, "--report", options.train_args]))
        words = f"{words} {options.words}".strip()
        child = self.start(check, self.target.train(run, words, flags))
        try:
            if then is None:
                child.follow(options.limits)
            else:
                then(child)
        finally:
            if child.hung or self.target.left(child):
                say(f"    ending {run}, at most {options.limits.ending:.0f} s …")
                left = self.target.end(child, run, child.log, options.limits)
                if left:
                    self.left.append(left)
            child.close()
            check.exit_codes.append(child.code())
            self.learn(child)

        watchdog = "no progress for" in child.text()  # it ends a run with the same exit code
        if child.code() == GONE and not child.hung and not watchdog:
            self.gone = "the TPU is gone: recreate it, then repeat the command"
        return child

    def learn(self, child: Child) -> None:
        """Remembers what hardware and software a run was on."""
        start = child.event("start")
        if start and not self.hardware:
            self.hardware = {name: start[name] for name in ("kind", "devices", "hosts")}
            self.versions = start["started"].get("versions", {})
            self.git = start["started"].get("git") or {}

    def on_tpu(self) -> bool:
        """Returns whether the runs were on TPUs."""
        return self.hardware.get("kind", "").startswith("TPU")

    def failed(self, check: Check, child: Child, why: str = "") -> Failed:
        """Returns the failure of a child, with its last lines."""
        check.last_lines = child.lines[-TAIL:]
        return Failed(why or diagnosis(child))

    def measure(self, check: Check, child: Child) -> None:
        """Copies into the check what a run has reported of itself."""
        end = child.event("end")
        check.step = step_seconds(child.records())
        check.metrics = end.get("summary", {}).get("metrics", {})
        check.chip_bytes = end.get("chip_bytes")
        check.host_bytes = end.get("host_bytes")
        unknown = end.get("chip_bytes_unknown", "")
        if unknown and self.on_tpu():
            check.notes.append(f"the memory of the chips is not known: {unknown}")

    def finished(self, check: Check, child: Child) -> None:
        """Checks that a run has ended well: exit code, result, finite numbers, graph contract,
        export."""
        self.measure(check, child)
        if child.hung or child.code() != 0:
            raise self.failed(check, child)
        end = child.event("end")
        if not end:
            why = "it ended with 0, but did not report a result; look at its log"
            raise self.failed(check, child, why)

        for record in child.records():
            wrong = not_finite(record["values"])
            if wrong:
                why = f"a wrong number: {wrong} at step {record['step']}"
                raise self.failed(check, child, why)
        wrong = not_finite(check.metrics)
        if wrong:
            raise self.failed(check, child, f"a wrong number: {wrong} in the final metrics")

        report = end["summary"].get("report", {})
        for name in ("recompilations", "fallbacks"):
            found = report.get(name)
            if found:
                why = f"{len(found)} {name}, expected none: {found[0]}"
                raise self.failed(check, child, why)

        files = end["files"]
        if not any(name.startswith("export/") and size for name, size in files.items()):
            has = ", ".join(files) or "nothing"
            raise self.failed(check, child, f"there is no export; the run's folder has {has}")

    # ---- what is tried -------------------------------------------------------------------------

    def doctor(self, check: Check) -> None:
        """Runs make doctor: what it says is missing here fails the check."""
        options = self.options
        variables = {
            "PYTHON": options.python,
            "TPU": options.tpu,
            "ZONE": options.zone,
            "PROJECT": options.project,
            "DATA": options.data,
            "ARGS": f"--runs {shlex.quote(options.runs)}" if options.runs else "",
        }
        words = [f"{name}={value}" for name, value in variables.items() if value]
        child = self.run_here(check, ["make", "doctor", *words])

        lacks = [line for line in child.lines if line.startswith("fix")]
        check.notes += [line for line in child.lines if line.startswith("none")]
        if child.hung or child.code() not in (0, 1):
            raise self.failed(check, child)
        if child.code() or lacks:
            without_fix = [" ".join(line.split()[1:]) for line in lacks]
            raise self.failed(check, child, " | ".join(without_fix))

    def trial(self, check: Check, script: Script) -> None:
        """Runs the trial of a script, with evaluation and export: it must reach what convergence
        tests ask of it."""
        check.recipe = f"trial {script.name}"
        ranges = expected.LEARNED[script.name]
        check.expected = {name: list(bounds) for name, bounds in ranges.items()}
        child = self.train(check, f"{self.stamp}-{script.name}", script.words, "")
        self.finished(check, child)

        # Also one with a wrong metric: what resumes is to be the same.
        self.unbroken[script.name] = child
        wrong = out_of_range(check.metrics, ranges)
        if wrong:
            raise self.failed(check, child, f"a wrong number: {wrong}")
        for record in child.records():
            if any(name.startswith("eval/") for name in record["values"]):
                return
        why = "it was never evaluated: no line of metrics has eval/…"
        raise self.failed(check, child, why)

    def resume(self, check: Check, script: Script) -> None:
        """Runs the same trial, kills it between two checkpoints and resumes it: its numbers must be
        those of the unbroken one."""
        unbroken = self.unbroken.get(script.name)
        if unbroken is None:
            lack = f"there is no trial of {script.name} that ended"
            raise NotRun(f"{lack}, to compare it with")
        run = f"{self.stamp}-{script.name}-killed"
        killed = self.train(check, run, script.words, f"--kill-at {script.kill_at}")
        if killed.hung or killed.code() != KILLED:
            why = ""
            if not killed.hung and not killed.code():
                why = f"it was not killed after step {script.kill_at}, but ended"
            raise self.failed(check, killed, why)

        resumed = self.train(check, run, script.words, "")
        self.resumed[script.name] = resumed
        self.finished(check, resumed)
        start = resumed.event("start")
        if not start["step"]:
            files = ", ".join(start["files"])
            why = f"it did not resume, but began again; the run's folder had {files}"
            raise self.failed(check, resumed, why)
        resumed_after = f"resumed after step {start['step']}"
        check.notes.append(f"killed after step {script.kill_at}, {resumed_after}")
        self.check_same(check, unbroken, killed, resumed)

    def check_same(self, check: Check, unbroken: Child, killed: Child, resumed: Child) -> None:
        """Checks that a run with a break has the numbers of the one without."""
        both = lines_of_steps(killed)
        both.update(lines_of_steps(resumed))
        apart = difference(lines_of_steps(unbroken), both)
        if apart:
            why = f"a wrong number: {apart} in the run without a break"
            raise self.failed(check, resumed, why)
        metrics = unbroken.event("end")["summary"]["metrics"]
        if metrics != check.metrics:
            final = f"the final metrics are {check.metrics}, and {metrics} without a break"
            raise self.failed(check, resumed, f"a wrong number: {final}")

    def hosts(self, check: Check) -> None:
        """Looks at a checkpoint that several hosts have written together, and from which they have
        resumed: DLRM's, of sharded tables."""
        hosts = self.hardware.get("hosts", 0)
        if hosts == 1:
            raise NotRun("there is one host")
        resumed = self.resumed.get("dlrm")
        if resumed is None or not resumed.event("start"):
            raise NotRun("it looks at what dlrm: kill and resume left, which was not run")

        start = resumed.event("start")
        folder = f"checkpoints/step_{start['step']:08d}/"
        names = [name[len(folder) :] for name in start["files"] if name.startswith(folder)]
        needed = ["COMPLETE", *(f"tables-{host:05d}.json" for host in range(hosts))]
        missing = [name for name in needed if name not in names]
        if missing:
            has = ", ".join(names) or "nothing"
            raise Failed(f"{folder} lacks {', '.join(missing)}; it has {has}")
        check.notes.append(f"{folder} has the parts of {hosts} hosts")

    def stop(self, check: Check) -> None:
        """Asks a run to stop: it must save, end with 143, and resume."""
        tried = [check.name for check in self.checks]
        chosen = [script for script in SCRIPTS if f"{script.name}: trial" in tried]
        script = (chosen or SCRIPTS)[0]
        run = f"{self.stamp}-{script.name}-stopped"
        ask_to_stop = partial(self.ask_to_stop, check, run)

        first = self.train(check, run, script.words, script.long, ask_to_stop)
        self.check_stopped(check, first)
        second = self.train(check, run, script.words, script.long, ask_to_stop)
        start = second.event("start")
        step = start.get("step", 0)
        last = max(record["step"] for record in first.records())
        if start and step < last:
            resumed = f"it resumed after step {step}, though it was stopped after step {last}"
            raise self.failed(check, second, f"{resumed}: nothing was saved")
        self.check_stopped(check, second)

        files = second.event("start")["files"]
        if f"checkpoints/step_{step:08d}/COMPLETE" not in files:
            whole = f"there is no whole checkpoint of step {step}"
            raise self.failed(check, second, f"{whole} among {', '.join(files)}")
        check.notes.append(f"{script.name}, stopped after step {step}, saved, resumed there")

    def ask_to_stop(self, check: Check, run: str, child: Child) -> None:
        """Asks a run to stop once it has printed two lines of metrics, and waits for its end."""
        limits = self.options.limits
        if not child.follow(limits, lambda: len(child.records()) >= LINES_BEFORE_STOP):
            return
        wrong = self.target.stop(child, run, child.log, limits)
        if wrong:
            raise self.failed(check, child, wrong)

        asked = time.monotonic()
        if child.follow(limits, lambda: time.monotonic() - asked > limits.ending):
            end = f"it did not end within {limits.ending:.0f} s"
            child.hung = f"{end} after it was asked to stop"

    def check_stopped(self, check: Check, child: Child) -> None:
        """Checks that a run has ended as one that was stopped."""
        if not child.hung and child.code() == STOPPED:
            return
        why = ""
        if not child.hung and not child.code():
            ended = f"it ended with {child.code()} when it was asked to stop"
            why = f"{ended}, expected {STOPPED}"
        raise self.failed(check, child, why)

    def speed(self, check: Check) -> None:
        """Measures a step of ResNet-50's own size, and compares its time and memory with what make
        compile estimates."""
        kind = self.hardware.get("kind", "")
        devices = self.hardware.get("devices", 0)
        if not kind:
            raise NotRun("no run has told on what hardware it is; it needs the trial of a script")
        if not self.on_tpu():
            raise NotRun(f"no estimate for a {kind}")
        topology = expected.topology(kind, devices)
        if not topology:
            raise NotRun(f"make compile knows no topology of {devices} devices of {kind}")

        per_device = min(expected.SPEED_BATCH, expected.SPEED_IMAGES // devices)
        batch = per_device * devices
        epochs = max(2, math.ceil(expected.SPEED_STEPS * batch / expected.SPEED_IMAGES))
        flags = f"--batch-size {batch} --epochs {epochs} --eval-every {epochs} --warmup-epochs 1"
        flags += " --save-every 1000000 --log-every 5"
        child = self.train(check, f"{self.stamp}-speed", expected.SPEED_WORDS, flags)
        self.finished(check, child)
        if not check.step:
            raise self.failed(check, child, "it reported no time of a step")
        check.estimate = self.estimate(check, topology, per_device)
        self.compare(check, child)

    def estimate(self, check: Check, topology: str, batch: int) -> dict[str, Any]:
        """Returns what make compile says of the step; raises NotThere where its compiler is not
        installed. batch: images per device."""
        libtpu = self.versions.get("libtpu", "")
        file = self.options.out / "estimate.json"
        words = expected.SPEED_WORDS.split()[:2]
        words += [f"TOPOLOGY={topology}", f"BATCH={batch}", "EFFORT=full"]
        words.append(f"OUT={os.path.abspath(file)}")
        if libtpu:
            words.append(f"LIBTPU_VERSION={libtpu}")
        if self.options.python:
            words.append(f"PYTHON={self.options.python}")
        command = ["make", "compile", *words]

        installed = [path.parent.name for path in self.folder.glob(".libtpu/*/.installed")]
        is_installed = libtpu in installed if libtpu else bool(installed)
        if not is_installed:
            lack = f"the compiler that estimates, libtpu {libtpu}, is not installed here"
            milliseconds = f"{1000 * check.step['median']:.1f} ms a step"
            comes_with = f"It comes with: {shlex.join(command)}"
            raise NotThere(f"{lack}; measured: {milliseconds}. {comes_with}")

        child = self.run_here(check, command)
        if child.code() == COMPILER_DIED:
            error = last_line([line for line in child.lines if line.startswith("error: ")])
            why = f"the compiler died on this machine: {error[:300]}"
            raise self.failed(check, child, why)
        if child.hung or child.code():
            raise self.failed(check, child)
        found = json.loads(file.read_text())
        estimate = {"topology": topology, "batch": batch, "libtpu": libtpu}
        for name in ("estimated_seconds", "roofline_seconds", "memory", "cycles"):
            estimate[name] = found.get(name)
        return estimate

    def compare(self, check: Check, child: Child) -> None:
        """Compares the step with its estimate: a slow chip takes far longer."""
        estimate = check.estimate
        seconds = estimate["estimated_seconds"]
        most = self.options.slow or expected.SLOW_ESTIMATE
        of = "the compiler's estimate"
        if seconds is None:
            seconds = max(estimate["roofline_seconds"].values())
            most = self.options.slow or expected.SLOW_ROOFLINE
            of = "the roofline (the clock is not published)"

        step = check.step
        factor = step["median"] / seconds
        estimate.update({"factor": factor, "most": most, "of": of})
        median = f"{1000 * step['median']:.1f} ms"
        takes = f"a step takes {median}, {factor:.2f} times {of}, {1000 * seconds:.1f} ms"
        spread = f"least {1000 * step['least']:.1f}, most {1000 * step['most']:.1f} ms"
        check.notes.append(f"{takes} ({spread})")
        if check.chip_bytes:
            used = check.chip_bytes / GIBIBYTE
            needed = estimate["memory"]["needed"] / GIBIBYTE
            check.notes.append(f"memory of a chip: {used:.2f} GiB, estimated {needed:.2f}")

        if factor <= most:
            return
        if step["input_wait"] > expected.INPUT_BOUND:
            share = f"{100 * step['input_wait']:.0f} % of it waits for a batch"
            slow_host = "the host is slow, and the chip is not known to be"
            raise self.failed(check, child, f"{takes}, but {share}: {slow_host}")
        slow_chip = f"{takes}, more than {most:g} times: a slow chip ({spread})"
        remedy = "create the TPU again, and if it is so again, send the page"
        raise self.failed(check, child, f"{slow_chip}; {remedy}")

    def predict(self, check: Check, script: Script) -> None:
        """Predicts with the export of a script's trial, in each precision: the answers must be
        those of plain PyTorch on the CPU, and the labels of sentences right."""
        if script.why_not:
            raise NotRun(script.why_not)
        if isinstance(self.target, Tpu):
            on_it = f'make accept ARGS="--only {script.name}"'
            raise NotRun(f"the launcher only trains; on the TPU VM itself predicts {on_it}")
        unbroken = self.unbroken.get(script.name)
        if unbroken is None:
            raise NotRun(f"there is no trial of {script.name} that ended, to predict with")

        check.recipe = f"predict {script.name}"
        inputs = predictions.write_inputs(script.predicts, self.options.out)
        export = f"{unbroken.event('start')['path']}/export"
        plain = self.answer(check, inputs, export, "float32", "cpu")
        speeds = []
        for precision, most in expected.APART.items():
            device = self.answer(check, inputs, export, precision, "")
            self.check_alike(check, device, plain, inputs, most)
            speeds.append(f"{device.speed():.0f} in {precision}")
            check.metrics.setdefault(f"{script.predicts}/s", device.speed())
        speeds.append(f"{plain.speed():.0f} by plain PyTorch on the CPU")
        check.notes.append(f"{script.predicts} a second: {', '.join(speeds)}")

    def answer(
        self, check: Check, inputs: Inputs, export: str, precision: str, device: str
    ) -> Prediction:
        """Runs make predict, and returns what it has answered and reported.

        Args:
            device: as its flag --device; "": that of the trial.
        """
        options = self.options
        name = f"{Path(check.log).stem}-{device or 'device'}-{precision}.jsonl"
        path = options.out / name
        path.unlink(missing_ok=True)
        flags = f"--report --precision {precision} --top {len(inputs.names)}"
        if device:
            flags += f" --device {device}"
        if "--safe-forms" in shlex.split(options.train_args):
            flags += " --safe-forms"

        command = ["make", "predict", *shlex.split(options.words), f"MODEL_DIR={export}"]
        command += [f"DATA={inputs.data}", f"OUT={path}", f"ARGS={flags}"]
        if options.python:
            command.append(f"PYTHON={options.python}")
        if device and "CPU_NUM_DEVICES" in os.environ:  # plain PyTorch refuses several
            command = ["env", "-u", "CPU_NUM_DEVICES", *command]
        child = self.run_here(check, command)
        if child.hung or child.code():
            raise self.failed(check, child)

        try:
            predictions.check_report(child, inputs, {} if device else self.hardware)
            answers = predictions.read_answers(path, inputs)
            if inputs.right:
                share = predictions.share_right(answers, inputs, expected.RIGHT)
                check.metrics["right"] = min(share, check.metrics.get("right", 1.0))
        except predictions.Wrong as error:
            raise self.failed(check, child, f"a wrong prediction: {error}") from None
        return Prediction(child, precision, answers)

    def check_alike(
        self, check: Check, device: Prediction, plain: Prediction, inputs: Inputs, most: float
    ) -> None:
        """Checks that no probability is further than `most` from that of plain PyTorch, see
        predictions.distance."""
        precision = device.precision
        check.expected[f"{precision} apart"] = [0.0, most]
        try:
            found = predictions.compare(device.answers, plain.answers, inputs)
        except predictions.Wrong as error:
            raise self.failed(check, device.child, f"a wrong prediction: {error}") from None
        check.metrics[f"{precision} apart"] = found.apart
        check.metrics[f"{precision} same label"] = found.same
        if found.apart > most:
            reference = f"by plain PyTorch on the CPU; expected at most {most:g} apart"
            why = f"a wrong prediction: in {precision} {found.where} {reference}"
            raise self.failed(check, device.child, why)

    def recipe(self, check: Check, name: str) -> None:
        """Runs a published recipe, for docs/results.md."""
        recipe = RECIPES[name]
        check.recipe = name
        if recipe.target:
            check.expected = {"published": recipe.target}
        data = shlex.quote(f"DATA={self.options.data}")
        run = self.options.name or f"{self.stamp}-{name}"
        child = self.train(check, run, f"{recipe.words} {data}", "")
        self.finished(check, child)

    # ---- what came of it -----------------------------------------------------------------------

    def found(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        return {
            "written_by": "tpu.accept",
            "format": 1,
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.began)),
            "seconds": round(time.time() - self.began),
            "command": self.options.command,
            "target": self.target.name,
            "runs": self.options.runs,
            "hardware": self.hardware,
            "versions": self.versions,
            "git": self.git,
            "left_running": self.left,
            "checks": [asdict(check) for check in self.checks],
        }
