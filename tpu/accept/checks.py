"""What is tried, one after the other, and what came of it. A check that fails ends none of the others."""

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
from pathlib import Path
from typing import Any

from tpu.accept import expected
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

OK, FAILED, NOT_THERE, NOT_RUN = "ok", "failed", "not there", "not run"
KILLED, STOPPED, GONE, COMPILER_DIED = 137, 143, 75, 3  # exit codes; the last is that of make compile
DIED = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 139: "SIGSEGV"}
SAFE_FORMS = 'repeat it with --train-args="--safe-forms" (docs/tpu.md, "When the compiler dies")'
# What a log says, what that is, and what to do: the first that is found counts.
SIGNS = (
    (
        r"No space left on device|Disk quota exceeded",
        "a disk is full",
        "make room there (--runs, /tmp, and the environment's disk of each worker), then repeat the command",
    ),
    (
        r"the training diverged|is not finite",
        "a wrong number: a value is not finite",
        "repeat the command; if it is so again, send the page, and try --precision float32 in --train-args",
    ),
    (
        r"no progress for \d+ s",
        "a step hangs: the run's own watchdog has ended it",
        "the log has the stacks of all threads; look at the TPU's health with make status, and repeat the command",
    ),
    (
        r"RESOURCE_EXHAUSTED|Ran out of memory in memory space hbm|Out of memory while trying to allocate",
        "the program does not fit into the chip's memory",
        "make compile says how large it is; send the page",
    ),
    (
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
    step: dict[str, Any] = field(default_factory=dict)  # seconds of a step: least, median, most, share of input wait
    chip_bytes: int | None = None  # most memory in use on a chip
    host_bytes: int | None = None
    estimate: dict[str, Any] = field(default_factory=dict)  # by make compile
    notes: list[str] = field(default_factory=list)
    recipe: str = ""  # of docs/results.md
    last_lines: list[str] = field(default_factory=list)  # where it failed

    def fail(self, why: str) -> None:
        self.outcome, self.why = FAILED, why


class Failed(Exception):
    """Ends a check; the message says why it failed."""


class NotRun(Exception):
    """Ends a check that cannot be tried here; the message says why."""


class NotThere(Exception):
    """Ends a check for which something is missing; the message names it and how to get it."""


def lines_of_steps(child: Child) -> dict[tuple, dict]:
    """Returns the values of each line of metrics, by step and names: an evaluation has the step of a training line."""
    found = {}
    for record in child.records():
        key = (record["step"], *sorted(record["values"]))
        found[key] = record["values"]
    return found


def step_seconds(records: list[dict]) -> dict[str, Any]:
    """Returns least, median and most seconds of a step between two lines of metrics, and the share of input wait.

    The first two lines are left out: what is compiled lies between them.
    """
    training = [record for record in records if "input_wait" in record["timing"]]
    found = []
    for number in range(2, len(training)):
        before, after = training[number - 1], training[number]
        steps = after["step"] - before["step"]
        if steps > 0:
            found.append((after["timing"]["training"] - before["timing"]["training"]) / steps)
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
    """Returns the first difference of `other` from `one`, both by `lines_of_steps`, "" if there is none."""
    for key in sorted(one, key=lambda key: (key[0], str(key))):
        if key not in other:
            return f"step {key[0]} has no line with {', '.join(key[1:])}"
        for name, value in one[key].items():
            if other[key][name] != value:
                apart = abs(other[key][name] - value) / max(abs(value), 1e-30)
                return f"{name} of step {key[0]} is {other[key][name]!r}, not {value!r} ({apart:.1e} of it apart)"
    return ""


def diagnosis(child: Child) -> str:
    """Returns what ended a child that failed, and the remedy, in a sentence."""
    if child.hung:
        return f"a step hangs, or takes too long: {child.hung}. It was stopped; repeat the command to see it again"
    code, text = child.code(), child.text()
    for pattern, what, remedy in SIGNS:
        found = re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
        if found:
            return f"{what} ({found[0].strip()[:200]}): {remedy}"
    signal_name = DIED.get(code, "")
    told = re.search(r"\*\*\* (SIG(?:SEGV|BUS|ILL|ABRT))", text)
    if signal_name or told:
        signal_name = signal_name or told[1]
        if child.compiling:
            return f"the compiler died of {child.compiling} ({signal_name}, exit code {code}): {SAFE_FORMS}"
        return f"the process died without a traceback ({signal_name}, exit code {code}): {SAFE_FORMS}"
    if code == KILLED:
        return "the process was killed from outside (exit code 137): most likely memory; `sudo dmesg | grep -i oom`"
    if code == GONE:
        return f"the TPU is gone (exit code 75): recreate it and repeat the command. {last_line(child.lines)[:300]}"
    return f"exit code {code}: {last_line(child.lines)[:300]}"


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
        self.options, self.folder, self.written = options, folder, written
        self.target: Here | Tpu = Here(folder, options.python)
        if options.tpu not in ("", "local"):
            self.target = Tpu(folder, options.tpu, options.zone, options.project, options.launch_args)
        self.began = time.time()
        self.stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.began))
        self.checks: list[Check] = []
        self.hardware: dict[str, Any] = {}  # of the first run that started
        self.versions: dict[str, str] = {}
        self.git: dict[str, Any] = {}
        self.unbroken: dict[str, Child] = {}  # the trials that ended well, by script
        self.resumed: dict[str, Child] = {}
        self.left: list[str] = []  # what may still run
        self.gone = ""  # why nothing more is tried

    def plan(self) -> list[tuple[str, Callable[[Check], None]]]:
        """Returns name and function of each check that was asked for, in their order."""
        if self.options.recipe:
            name = self.options.recipe
            return [("doctor", self.doctor), (f"recipe {name}", lambda check: self.recipe(check, name))]
        planned: list[tuple[str, Callable[[Check], None]]] = [("doctor", self.doctor)]
        for script in SCRIPTS:
            planned.append((f"{script.name}: trial", lambda check, one=script: self.trial(check, one)))
            planned.append((f"{script.name}: kill and resume", lambda check, one=script: self.resume(check, one)))
        planned.append(("checkpoint of all hosts", self.hosts))
        planned.append(("stop and saved", self.stop))
        planned.append(("step time and memory", self.speed))
        planned.append(("predict", self.predict))
        only = self.options.only
        return [one for one in planned if not only or any(one[0].startswith(word) for word in only)]

    def run(self) -> int:
        """Runs all checks. Returns the exit code: 0 if none failed, 1 if one did, 130 after Ctrl-C."""
        planned = self.plan()
        self.checks = [Check(name) for name, _ in planned]
        interrupted = False
        for number, (name, function) in enumerate(planned):
            check = self.checks[number]
            if interrupted or self.gone:
                check.why = "Ctrl-C" if interrupted else self.gone
                continue
            log = re.sub(r"\W+", "-", name)
            check.log = f"{self.options.out.name}/{log}.log"
            say(f"{name} …")
            began = time.monotonic()
            try:
                function(check)
                check.outcome = OK
            except Failed as error:
                check.fail(str(error))
            except NotRun as error:
                check.outcome, check.why = NOT_RUN, str(error)
            except NotThere as error:
                check.outcome, check.why = NOT_THERE, str(error)
            except Interrupted:
                interrupted = True
                check.why = "Ctrl-C"
            except OSError as error:
                check.fail(f"this machine: {error}: make room or access, then repeat it")
            check.seconds = round(time.monotonic() - began, 1)
            if not check.commands:
                check.log = ""
            say(f"    {check.outcome}{': ' if check.why else ''}{check.why}")
            self.written(self)
        self.written(self)
        if interrupted:
            return 130
        return int(any(check.outcome == FAILED for check in self.checks))

    # The programs that checks run.

    def start(self, check: Check, command: list[str]) -> Child:
        child = Child(command, self.options.out / Path(check.log).name)
        check.commands.append(child.shown())
        child.start(self.folder)
        return child

    def train(
        self, check: Check, run: str, words: str, flags: str, then: Callable[[Child], None] | None = None
    ) -> Child:
        """Trains to the end of the run, or until `then` has dealt with it. Leaves nothing running."""
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
            log = child.log
            if child.hung or self.target.left(child):
                say(f"    ending {run}, at most {options.limits.ending:.0f} s …")
                left = self.target.end(child, run, log, options.limits)
                self.left += [left] if left else []
            child.close()
            check.exit_codes.append(child.code())
            self.learn(child)
        if child.code() == GONE and not child.hung and "no progress for" not in child.text():
            self.gone = "the TPU is gone: recreate it, then repeat the command"
        return child

    def learn(self, child: Child) -> None:
        """Remembers what hardware and software a run was on."""
        start = child.event("start")
        if start and not self.hardware:
            self.hardware = {name: start[name] for name in ("kind", "devices", "hosts")}
            self.versions = start["started"].get("versions", {})
            self.git = start["started"].get("git") or {}

    def failed(self, check: Check, child: Child, why: str = "") -> Failed:
        """Returns the failure of a child, with its last lines."""
        check.last_lines = child.lines[-TAIL:]
        return Failed(why or diagnosis(child))

    def measure(self, check: Check, child: Child) -> None:
        """Takes over what a run has reported of itself."""
        end = child.event("end")
        check.step = step_seconds(child.records())
        check.metrics = end.get("summary", {}).get("metrics", {})
        check.chip_bytes, check.host_bytes = end.get("chip_bytes"), end.get("host_bytes")
        unknown = end.get("chip_bytes_unknown", "")
        if unknown and self.on_tpu():
            check.notes.append(f"the memory of the chips is not known: {unknown}")

    def finished(self, check: Check, child: Child) -> None:
        """Checks that a run has ended well: exit code, result, finite numbers, graph contract, export."""
        self.measure(check, child)
        if child.hung or child.code() != 0:
            raise self.failed(check, child)
        if not child.event("end"):
            raise self.failed(check, child, "it ended with 0, but did not report a result; look at its log")
        for record in child.records():
            wrong = not_finite(record["values"])
            if wrong:
                raise self.failed(check, child, f"a wrong number: {wrong} at step {record['step']}")
        wrong = not_finite(check.metrics)
        if wrong:
            raise self.failed(check, child, f"a wrong number: {wrong} in the final metrics")
        report = child.event("end")["summary"].get("report", {})
        for name in ("recompilations", "fallbacks"):
            if report.get(name):
                raise self.failed(check, child, f"{len(report[name])} {name}, expected none: {report[name][0]}")
        files = child.event("end")["files"]
        if not any(name.startswith("export/") and size for name, size in files.items()):
            raise self.failed(check, child, f"there is no export; the run's folder has {', '.join(files) or 'nothing'}")

    def on_tpu(self) -> bool:
        return self.hardware.get("kind", "").startswith("TPU")

    # What is tried.

    def doctor(self, check: Check) -> None:
        """What is missing here, by make doctor."""
        options = self.options
        given = {"PYTHON": options.python, "TPU": options.tpu, "ZONE": options.zone, "PROJECT": options.project}
        given["DATA"] = options.data
        given["ARGS"] = f"--runs {shlex.quote(options.runs)}" if options.runs else ""
        words = [f"{name}={value}" for name, value in given.items() if value]
        child = self.start(check, ["make", "doctor", *words])
        try:
            child.follow(options.limits)
        finally:
            end_group(child)
            child.close()
            check.exit_codes.append(child.code())
        lacks = [line for line in child.lines if line.startswith("fix")]
        check.notes += [line for line in child.lines if line.startswith("none")]
        if child.hung or child.code() not in (0, 1):
            raise self.failed(check, child)
        if child.code() or lacks:
            raise self.failed(check, child, " | ".join(" ".join(line.split()[1:]) for line in lacks))

    def trial(self, check: Check, script: Script) -> None:
        """The trial of a script, with evaluation and export: it reaches what convergence tests ask of it."""
        check.recipe = f"trial {script.name}"
        ranges = expected.LEARNED[script.name]
        check.expected = {name: list(bounds) for name, bounds in ranges.items()}
        child = self.train(check, f"{self.stamp}-{script.name}", script.words, "")
        self.finished(check, child)
        self.unbroken[script.name] = child  # also one with a wrong metric: what resumes is to be the same
        wrong = out_of_range(check.metrics, ranges)
        if wrong:
            raise self.failed(check, child, f"a wrong number: {wrong}")
        if not any(name.startswith("eval/") for record in child.records() for name in record["values"]):
            raise self.failed(check, child, "it was never evaluated: no line of metrics has eval/…")

    def resume(self, check: Check, script: Script) -> None:
        """The same trial, killed between two checkpoints and resumed: its numbers are those of the unbroken one."""
        unbroken = self.unbroken.get(script.name)
        if unbroken is None:
            raise NotRun(f"there is no trial of {script.name} that ended, to compare it with")
        run = f"{self.stamp}-{script.name}-killed"
        killed = self.train(check, run, script.words, f"--kill-at {script.kill_at}")
        if killed.hung or killed.code() != KILLED:
            why = "" if killed.hung or killed.code() else f"it was not killed after step {script.kill_at}, but ended"
            raise self.failed(check, killed, why)
        resumed = self.train(check, run, script.words, "")
        self.resumed[script.name] = resumed
        self.finished(check, resumed)
        start = resumed.event("start")["step"]
        if not start:
            files = ", ".join(resumed.event("start")["files"])
            raise self.failed(check, resumed, f"it did not resume, but began again; the run's folder had {files}")
        check.notes.append(f"killed after step {script.kill_at}, resumed after step {start}")
        again = lines_of_steps(killed)
        again.update(lines_of_steps(resumed))
        apart = difference(lines_of_steps(unbroken), again)
        if apart:
            raise self.failed(check, resumed, f"a wrong number: {apart} in the run without a break")
        metrics = unbroken.event("end")["summary"]["metrics"]
        if metrics != check.metrics:
            told = f"the final metrics are {check.metrics}, and {metrics} without a break"
            raise self.failed(check, resumed, f"a wrong number: {told}")

    def hosts(self, check: Check) -> None:
        """A checkpoint that several hosts have written together, from which they resumed: DLRM's, of sharded tables."""
        hosts = self.hardware.get("hosts", 0)
        if hosts == 1:
            raise NotRun("there is one host")
        resumed = self.resumed.get("dlrm")
        if resumed is None or not resumed.event("start"):
            raise NotRun("it looks at what dlrm: kill and resume left, which was not run")
        start = resumed.event("start")
        folder = f"checkpoints/step_{start['step']:08d}/"
        names = [name[len(folder) :] for name in start["files"] if name.startswith(folder)]
        parts = [f"tables-{host:05d}.json" for host in range(hosts)]
        missing = [name for name in ["COMPLETE", *parts] if name not in names]
        if missing:
            raise Failed(f"{folder} lacks {', '.join(missing)}; it has {', '.join(names) or 'nothing'}")
        check.notes.append(f"{folder} has the parts of {hosts} hosts")

    def stop(self, check: Check) -> None:
        """A run that is asked to stop saves, ends with 143, and resumes."""
        tried = [check.name for check in self.checks]
        chosen = [one for one in SCRIPTS if f"{one.name}: trial" in tried] or SCRIPTS
        script = chosen[0]
        run = f"{self.stamp}-{script.name}-stopped"
        limits = self.options.limits

        def stop_after_two_lines(child: Child) -> None:
            if child.follow(limits, lambda: len(child.records()) >= 2):
                wrong = self.target.stop(child, run, child.log, limits)
                if wrong:
                    raise self.failed(check, child, wrong)
                asked = time.monotonic()
                if child.follow(limits, lambda: time.monotonic() - asked > limits.ending):
                    child.hung = f"it did not end within {limits.ending:.0f} s after it was asked to stop"

        def stopped(child: Child) -> None:
            if child.hung or child.code() != STOPPED:
                what = f"it ended with {child.code()} when it was asked to stop, expected {STOPPED}"
                raise self.failed(check, child, "" if child.hung or child.code() else what)

        first = self.train(check, run, script.words, script.long, stop_after_two_lines)
        stopped(first)
        second = self.train(check, run, script.words, script.long, stop_after_two_lines)
        start = second.event("start").get("step", 0)
        last = max(record["step"] for record in first.records())
        if second.event("start") and start < last:
            why = f"it resumed after step {start}, though it was stopped after step {last}: nothing was saved"
            raise self.failed(check, second, why)
        stopped(second)
        files = second.event("start")["files"]
        if f"checkpoints/step_{start:08d}/COMPLETE" not in files:
            raise self.failed(check, second, f"there is no whole checkpoint of step {start} among {', '.join(files)}")
        check.notes.append(f"{script.name}, stopped after step {start}, saved, resumed there")

    def speed(self, check: Check) -> None:
        """A step of ResNet-50's own size beside what make compile estimates of it: time and memory."""
        kind, devices = self.hardware.get("kind", ""), self.hardware.get("devices", 0)
        if not kind:
            raise NotRun("no run has told on what hardware it is; it needs the trial of a script")
        if not self.on_tpu():
            raise NotRun(f"no estimate for a {kind}")
        where = expected.topology(kind, devices)
        if not where:
            raise NotRun(f"make compile knows no topology of {devices} devices of {kind}")

        batch = min(expected.SPEED_BATCH, expected.SPEED_IMAGES // devices)
        epochs = max(2, math.ceil(expected.SPEED_STEPS * batch * devices / expected.SPEED_IMAGES))
        flags = f"--batch-size {batch * devices} --epochs {epochs} --eval-every {epochs} --warmup-epochs 1"
        flags += " --save-every 1000000 --log-every 5"
        child = self.train(check, f"{self.stamp}-speed", expected.SPEED_WORDS, flags)
        self.finished(check, child)
        if not check.step:
            raise self.failed(check, child, "it reported no time of a step")
        check.estimate = self.estimate(check, where, batch)
        self.compare(check, child)

    def estimate(self, check: Check, where: str, batch: int) -> dict[str, Any]:
        """Returns what make compile says of the step; raises NotThere where its compiler is not installed."""
        libtpu = self.versions.get("libtpu", "")
        file = self.options.out / "estimate.json"
        words = [*expected.SPEED_WORDS.split()[:2], f"TOPOLOGY={where}", f"BATCH={batch}", "EFFORT=full"]
        words += [f"OUT={os.path.abspath(file)}"]
        words += [f"LIBTPU_VERSION={libtpu}"] if libtpu else []
        words += [f"PYTHON={self.options.python}"] if self.options.python else []
        command = ["make", "compile", *words]
        installed = [path.parent.name for path in self.folder.glob(".libtpu/*/.installed")]
        if libtpu not in installed if libtpu else not installed:
            lack = f"the compiler that estimates, libtpu {libtpu}, is not installed here"
            median = 1000 * check.step["median"]
            raise NotThere(f"{lack}; measured: {median:.1f} ms a step. It comes with: {shlex.join(command)}")
        child = self.start(check, command)
        try:
            child.follow(self.options.limits)
        finally:
            end_group(child)
            child.close()
            check.exit_codes.append(child.code())
        if child.code() == COMPILER_DIED:
            told = last_line([line for line in child.lines if line.startswith("error: ")])
            raise self.failed(check, child, f"the compiler died on this machine: {told[:300]}")
        if child.hung or child.code():
            raise self.failed(check, child)
        found = json.loads(file.read_text())
        names = ("estimated_seconds", "roofline_seconds", "memory", "cycles")
        return {"topology": where, "batch": batch, "libtpu": libtpu, **{name: found.get(name) for name in names}}

    def compare(self, check: Check, child: Child) -> None:
        """Compares the step with its estimate: a slow chip takes far longer."""
        estimate, step = check.estimate, check.step
        seconds, most = estimate["estimated_seconds"], self.options.slow or expected.SLOW_ESTIMATE
        of = "the compiler's estimate"
        if seconds is None:
            seconds = max(estimate["roofline_seconds"].values())
            most, of = self.options.slow or expected.SLOW_ROOFLINE, "the roofline (the clock is not published)"
        factor = step["median"] / seconds
        estimate.update({"factor": factor, "most": most, "of": of})
        told = f"a step takes {1000 * step['median']:.1f} ms, {factor:.2f} times {of}, {1000 * seconds:.1f} ms"
        spread = f"least {1000 * step['least']:.1f}, most {1000 * step['most']:.1f} ms"
        check.notes.append(f"{told} ({spread})")
        if check.chip_bytes:
            needed = estimate["memory"]["needed"]
            check.notes.append(f"memory of a chip: {check.chip_bytes / 2**30:.2f} GiB, estimated {needed / 2**30:.2f}")
        if factor <= most:
            return
        if step["input_wait"] > expected.INPUT_BOUND:
            share = f"{100 * step['input_wait']:.0f} % of it waits for a batch"
            raise self.failed(check, child, f"{told}, but {share}: the host is slow, and the chip is not known to be")
        why = f"{told}, more than {most:g} times: a slow chip ({spread})"
        raise self.failed(check, child, f"{why}; create the TPU again, and if it is so again, send the page")

    def predict(self, check: Check) -> None:
        """Prediction with an export, once there is such a target of make."""
        makefile = (self.folder / "Makefile").read_text()
        if re.search(r"^predict\b[^=\n]*:", makefile, re.MULTILINE) is None:
            raise NotThere("there is no make predict")
        raise NotRun("make predict is there, but tpu/accept does not call it yet: Acceptance.predict is its place")

    def recipe(self, check: Check, name: str) -> None:
        """A published recipe, for docs/results.md."""
        recipe = RECIPES[name]
        check.recipe = name
        check.expected = {"published": recipe.target} if recipe.target else {}
        words = f"{recipe.words} {shlex.quote(f'DATA={self.options.data}')}"
        child = self.train(check, self.options.name or f"{self.stamp}-{name}", words, "")
        self.finished(check, child)

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
