"""The record of a run: its folder, its lines on the terminal, its curves, its checkpoints.

runs/<name>/ (a local folder, or a URL such as gs://bucket/runs) holds
    config.json    the script's Config; for each start: versions, devices, git commit, command line, time
    metrics.jsonl  one JSON object a line: {"step": 120, "loss": 1.25, "lr": 0.05, "timing": {...}}; an evaluation's
                   metrics are named eval/...; what a resumed run repeats bit for bit is outside "timing"
    tb/            the same numbers as TensorBoard events
    curves.png     loss, learning rate and evaluation metrics over the steps, where train/common/watch is
    checkpoints/   see checkpoint.py; written before the evaluation that belongs to it
    summary.json   written last: a run is finished if, and only if, it has one
"""

import contextlib
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from errors import InputError
from train.common import device
from train.common.checkpoint import Checkpointer
from train.common.run_folder import RunFolder, now, to_json

EVALUATION = "eval/"  # what the names of an evaluation's metrics begin with, in metrics.jsonl
SEEN_SECONDS = 60  # in which other hosts see what the main process writes: NFS may remember that there was nothing
# Of device.graph_report(), in the table of a finished run, with its label where that is another word.
COUNTS = {"graphs": "graphs compiled", "recompilations": "", "fallbacks": "fall-backs", "host_reads": "host reads"}


class Run:
    """One training run: its folder, its metrics, and its checkpoints in the order that makes a resume exact.

    `path` is its folder or URL. `finished`: nothing is left to train, and `summary` holds the results. On other hosts
    than the main one nothing is printed or written, but values are read and checked at the same points, so that all
    hosts run the same graphs and stop together. `evaluation_due`: after `resume`, whether the checkpoint's state is
    still to be evaluated. Raises InputError where hosts see different folders, or it is unusable.

    Args:
        config: a dataclass with the fields `runs` (root folder or fsspec URL), `name` and `data`.
        name: the folder where config.name is "", or the first of name-2, … that is new, or unfinished with this config.
        free: fields of config that do not change the numbers, so a resumed run may differ in them.
        required: fields that a run's config.json must have; others that an older version lacked had Config's default.
        unit: what `log` counts as examples.
    """

    tell = staticmethod(lambda event, *facts: {})  # calls what watches a training
    watch = staticmethod(lambda run: contextlib.nullcontext(run.tell))  # train/common/watch, where it is, replaces it

    def __init__(self, config, mesh, *, name: str, headline: str, total_steps, free=(), required=(), unit="examples"):
        self.mesh, self.total_steps, self._unit, self._main = mesh, total_steps, unit, mesh.main_process
        trial = "; this is a trial, for real training see --help" if config.data == "synthetic" else ""
        self.message(f"{headline} on {mesh.num_devices} {mesh.kind} device(s){trial}")
        self.folder = RunFolder(config, name, free, required)
        self.name, self.path, self.summary = self.folder.name, self.folder.path, self.folder.summary
        self._metrics = _Metrics(self.folder)
        self._seconds = {"elapsed": 0.0, "training": 0.0}  # of earlier starts, too; training is without pauses
        self._running, self._read_at = list(self._seconds), time.monotonic()
        self._pending: list[tuple[int, dict[str, Any], float | None, float | None]] = []  # arguments of `log`
        self._rate_start: tuple[float, float] | None = None  # examples and training seconds at the last line
        self.finished = self._closed = self.summary is not None
        self.resumed = self.folder.stored is not None and not self.finished
        self.evaluation_due, self._saved_step = False, 0
        if self.finished:
            self.message(f"{self.path} is finished, nothing to train; another --name trains again")
        else:
            if self._main:  # before anything is said of it: another process may be training it
                self.folder.open({"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count})
            kind = "resuming the unfinished run" if self.resumed else "new run"
            self.message(f"{kind} {self.path}{self.folder.reason}")
        _check_hosts(mesh, self.folder)

    def resume(self, model, optimizer, *, examples: int, keep: int, every: int = 1, tables: Any = None) -> int:
        """Restores the newest checkpoint into a model and an optimizer on the device, which `checkpoint` saves, and
        returns its step, 0 for a new run; see Checkpointer. Raises InputError where it is of another model, or hosts
        disagree about it or the number of examples."""
        self._saved = model, optimizer
        self.checkpoints = Checkpointer(f"{self.path}/checkpoints", keep, self._main, tables, every, self.mesh.layers)
        start = self.start = self.checkpoints.restore(model, optimizer, self.mesh)
        device.same_on_all_hosts(self.mesh, "the step to resume from", start)
        device.same_on_all_hosts(self.mesh, "the size of the training data", examples)
        self._saved_step = start
        if self.resumed:
            self.folder.last_step = start
            if self._main:
                for name, seconds in self._metrics.resume(start).items():
                    self._seconds[name] += seconds
            self.message(f"resuming after step {start}")
        self._find_evaluation(start)
        return start

    def _find_evaluation(self, step: int) -> None:
        """Finds out whether the evaluation that was to follow the checkpoint of a step has been recorded. Every host
        calls it, in a new run as well: which run is resumed, hosts that look a moment apart see differently."""
        due = self._main and step > 0 and self.checkpoints.evaluates
        if due and (recorded := self._metrics.evaluation(step)):
            self.checkpoints.add_metrics(step, recorded)  # the process may have ended before they were there, too
            due = False
        # The main process tells the others, which may see an older file.
        self.evaluation_due = device.over_hosts(self.mesh, int(due)).high > 0

    @contextlib.contextmanager
    def training(self, loader: contextlib.AbstractContextManager, stop_every: int = 10) -> Iterator[None]:
        """Holds the training loop: closes loader, checkpoints and run, whatever ends it, and turns SIGTERM and Ctrl-C
        into a stop at the next `checkpoint`. The hosts of a pod agree about it in every `stop_every`-th step."""
        stop, watch = device.stop_requested(self.mesh, stop_every), self.watch(self)
        with stop as self._stop_requested, contextlib.closing(self), self.checkpoints, loader, watch as self.tell:
            yield

    def checkpoint(self, step: int, *, due: bool, evaluates: bool = False) -> None:
        """Saves what `resume` restored, if it is due, an evaluation follows, or the run is asked to stop. Call it in
        every step, before the evaluation that belongs to it: nothing is lost when that fails.

        The order makes a resume exact: the upload of metrics comes before the save, the evaluation after it, and a
        process that is asked to stop exits (with 143) only after the save is on disk. A run that ends between a save
        and its evaluation finds `evaluation_due` when it resumes.
        """
        self.tell("step", step)
        stop = self._stop_requested() and step < self.total_steps
        if due or evaluates or stop:
            with self.pause("checkpoints"):
                self.upload()  # what a resumed run keeps must be there before its checkpoint is
                self.checkpoints.save(step, *self._saved, evaluates)
            self._saved_step = step
        self.checkpoints.raise_failure()
        if stop:
            self.tell("pause", "checkpoints")
            self.checkpoints.wait()
            self.message(f"stopped by a signal at step {step}: saved; the same command resumes from here")
            raise SystemExit(143)

    @contextlib.contextmanager
    def pause(self, of: str = "evaluation") -> Iterator[None]:
        """Counts the time inside (evaluation, checkpoints) neither as training nor for examples per second."""
        self._flush()
        device.wait_for_steps()  # steps still running on the device are training, not pause
        self._read_clock()
        before, self._running = self._running, ["elapsed"]
        self.tell("pause", of)
        try:
            yield
        finally:
            self._read_clock()
            self._running = before
            self.tell("resume")

    def _read_clock(self) -> dict[str, float]:
        now = time.monotonic()
        for name in self._running:
            self._seconds[name] += now - self._read_at
        self._read_at = now
        return {name: round(seconds, 4) for name, seconds in self._seconds.items()}

    def log(self, step: int, *, examples: float | None = None, input_wait: float | None = None, **metrics: Any) -> None:
        """Records training metrics: numbers, or 0-d tensors on any device, which this call does not read.

        Tensors on the device are read all in one transfer after the next step has been started; until then they must
        not be changed in place. A loss that is not finite raises an InputError there, which stops the run. `examples`
        counts all so far: their growth over the time without pauses is the speed.
        """
        self._pending.append((step, metrics, examples, input_wait))
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in metrics.values()):
            device.after_next_step(self._write_pending)
        elif len(self._pending) == 1:  # else it waits behind an earlier line
            self._write_pending()

    def _flush(self) -> None:
        """Reads and writes what earlier `log` calls left on the device."""
        if self._pending:
            device.run_pending()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        tensors = [value for _, values, *_ in pending for value in values.values() if isinstance(value, torch.Tensor)]
        numbers = iter(device.read(tensors))
        clock = self._read_clock()  # after the read, which waits for the device
        for step, values, examples, input_wait in pending:
            values = {key: next(numbers) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            values = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
            words = [f"{key} {format_number(values[key])}" for key in sorted(values, key=lambda key: key != "loss")]
            timing = dict(clock)
            if examples is not None:
                now = examples, clock["training"]
                before, self._rate_start = self._rate_start or now, now
                if now[1] > before[1]:
                    rate = timing[f"{self._unit}_per_second"] = (now[0] - before[0]) / (now[1] - before[1])
                    words.append(f"{format_number(rate)} {self._unit}/s")
            if input_wait is not None:
                timing["input_wait"] = input_wait
                words.append(f"input wait {100 * input_wait:.0f} %")
            self._write(step, values, timing, words)

    def _write(self, step: int, values: dict[str, float], timing: dict[str, float], words: list[str]) -> None:
        """Checks the values of a line of metrics.jsonl, on every host, and writes and prints it on the main one."""
        for key, value in values.items():
            if key.endswith("loss") and not math.isfinite(value):
                # Not the data: the loader refuses what is not finite in a batch.
                remedy = "a lower --lr or a longer warm-up, and look for huge values in the data"
                diverged = f"{key} is {value} at step {step}: the input was finite, so the training diverged"
                raise InputError(f"{diverged}; start a run of another --name with {remedy}")
        if self._main:
            self._metrics.write(step, values, timing)
            self.message("  ".join([f"step {step:>5}/{self.total_steps}", *words]))
        self.tell("line", step, values, timing)

    def evaluation(self, step: int, **metrics: float) -> None:
        """Records and prints evaluation metrics, which are numbers already, and adds them to the checkpoint of their
        step. The time this takes is a pause."""
        with self.pause():
            values = {f"{EVALUATION}{key}": float(value) for key, value in metrics.items()}
            words = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
            self._write(step, values, self._read_clock(), [f"evaluation: {words}"])
            if step == self._saved_step:
                self.checkpoints.add_metrics(step, _for_json(dict(metrics)))
            self.evaluation_due = False
            try:
                self.upload()
            except InputError as error:  # storage that is away for a moment must not end a long run
                self.message(f"warning: {error}; the next evaluation tries again")

    def message(self, text: str) -> None:
        """Prints one line on the terminal of the main process."""
        if self._main:
            print(text, flush=True)

    def finish(self, metrics: dict[str, float]) -> None:
        """Ends the run: writes summary.json with the final metrics, prints the table, uploads."""
        if self._closed:
            raise RuntimeError("finish() after close(): the run's folder is no longer this process's")
        self._flush()
        per_second, clock = f"{self._unit}_per_second", self._read_clock()
        timings = [record["timing"] for record in self._metrics.records()]
        rates, waits = ([t[key] for t in timings if key in t] for key in (per_second, "input_wait"))
        self.summary = {
            "name": self.name,
            "finished_at": now(),
            "steps": self.folder.last_step,
            "metrics": {key: value if math.isfinite(value) else None for key, value in metrics.items()},
            "elapsed_seconds": clock["elapsed"],
            "training_seconds": clock["training"],
            per_second: statistics.median(rates) if rates else None,
            "input_wait": statistics.fmean(waits) if waits else None,
            "report": device.graph_report(),
        }
        self.summary |= self.tell("summary")
        if self._main:
            self.folder.write("summary.json", to_json(self.summary, indent=2))
            self.print_summary()
            self.upload()
        self.finished = True
        self._release()

    def print_summary(self) -> dict[str, float]:
        """Prints the table of a finished run; returns its final metrics."""
        self.message(f"{self.path} finished in {_duration(self.summary['elapsed_seconds'])}")
        rows = _table(self.summary, self._unit)
        self.message("\n".join(f"  {label:<{max(map(len, rows))}}  {value}" for label, value in rows.items()))
        return self.summary["metrics"]

    def close(self) -> None:
        """Ends this process's part of an unfinished run (SIGTERM, an error): the next start resumes. Idempotent."""
        if self._closed:
            return
        ended = (InputError, OSError) if isinstance(sys.exc_info()[1], Exception) else ()
        try:
            with contextlib.suppress(*ended):  # the error that ends the run, such as a checkpoint's, is the one to show
                self._flush()
                self.upload()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._metrics.close()
        self.folder.release()

    def upload(self) -> None:
        """Copies all files of a remote run to its URL."""
        if self._main:
            self._metrics.flush()
            self.folder.upload()


def _check_hosts(mesh: device.Mesh, folder: RunFolder) -> None:
    """Raises InputError, on every host, where the hosts of a pod do not see the config.json just written."""
    if mesh.process_count == 1:
        return
    expected = device.over_hosts(mesh, folder.fingerprint() if mesh.main_process else 0).high
    deadline = time.monotonic() + SEEN_SECONDS
    while folder.fingerprint() != expected and time.monotonic() < deadline:
        time.sleep(1)
        folder.files.invalidate_cache()
    if not device.over_hosts(mesh, int(folder.fingerprint() == expected)).low:
        unseen = f"the {mesh.process_count} hosts do not see the same run in {folder.path}: they lack what the main one"
        raise InputError(f"{unseen} wrote there; give a folder that all hosts share, such as --runs gs://bucket/runs")


class _Metrics:
    """What the main process writes of the numbers: metrics.jsonl, TensorBoard events."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._file = self._events = None  # until the first line

    def resume(self, last: int) -> dict[str, float]:
        """Drops what metrics.jsonl says of steps after `last`, and a last line torn by a kill; returns the seconds so
        far, as Run counts them."""
        kept, seconds = [], {"elapsed": 0.0, "training": 0.0}
        for number, line in enumerate((self.folder.read("metrics.jsonl") or b"").splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["step"] <= last:
                    kept.append(line)
                    seconds = {key: float(record["timing"][key]) for key in seconds}
            except (ValueError, KeyError, TypeError) as error:
                file = f"{self.folder.path}/metrics.jsonl"
                raise InputError(f"line {number} of {file} is damaged; remove it or use another --name") from error
        self.folder.write("metrics.jsonl", b"".join(kept))
        self._open("ab", purge_step=last + 1)
        return seconds

    def _open(self, mode: str, purge_step: int | None = None) -> None:
        # TensorBoard imports tensorflow where it finds one (Colab, Kaggle): slow, and it may take the TPU. An empty
        # module of this name is TensorBoard's own switch to do without.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        with self.folder.writing("metrics.jsonl") as path:
            self._file = open(path, mode)  # noqa: SIM115
            self._events = SummaryWriter(f"{self.folder.local}/tb", purge_step=purge_step)

    def write(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        if self._file is None:
            self._open("xb")
        values = _for_json(values)
        with self.folder.writing("metrics.jsonl"):
            self._file.write(to_json({"step": step, **values, "timing": timing}) + b"\n")
            self._file.flush()
            for key, value in [*values.items(), *((f"timing/{key}", value) for key, value in timing.items())]:
                if value is not None:
                    self._events.add_scalar(key, value, step)
        self.folder.last_step = step

    def records(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        with open(f"{self.folder.local}/metrics.jsonl") as file:
            return [json.loads(line) for line in file]

    def evaluation(self, step: int) -> dict[str, float | None]:
        """Returns the metrics of the evaluation of a step; {} where there is none."""
        found = {}
        for record in self.records():
            if record["step"] == step:
                found |= {k.removeprefix(EVALUATION): v for k, v in record.items() if k.startswith(EVALUATION)}
        return found

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        for file in filter(None, (self._file, self._events)):
            with contextlib.suppress(OSError):  # flushing what a full disk has refused, and reported, before
                file.close()


def _for_json(values: dict[str, float]) -> dict[str, float | None]:
    """Returns the values with None for those that JSON does not have: NaN and infinity."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _table(summary: dict[str, Any], unit: str) -> dict[str, str]:
    report, rate, wait = summary["report"], summary[f"{unit}_per_second"], summary["input_wait"]
    rows = {key.replace("_", " "): format_number(value) for key, value in summary["metrics"].items()}
    rows["training time"] = _duration(summary["training_seconds"])
    if "compile_seconds" in report:
        rows["compile time"] = _duration(report["compile_seconds"])
    if rate is not None:
        rows[f"{unit}/s"] = format_number(rate)
    if wait is not None:
        rows["input wait"] = f"{100 * wait:.0f} %"
    counts = {label or key: report[key] for key, label in COUNTS.items() if key in report}
    return rows | {key: "; ".join([str(len(n)), *n]) if isinstance(n, list) else str(n) for key, n in counts.items()}


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None) -> str:
    """Returns a number as the terminal, legends and the final table show it."""
    if value is None or isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.2e}"
