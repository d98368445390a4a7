"""The record of a run: its folder, its lines on the terminal, its curves, its checkpoints.

runs/<name>/ (a local folder, or a URL such as gs://bucket/runs) holds
    config.json    the script's Config; for each start: versions, devices, git commit, command line, time
    metrics.jsonl  one JSON object a line: {"step": 120, "loss": 1.25, "lr": 0.05, "timing": {...}}; an evaluation's
                   metrics are named eval/...; what a resumed run repeats bit for bit is outside "timing"
    tb/            the same numbers as TensorBoard events
    curves.png     loss, learning rate and evaluation metrics over the steps
    checkpoints/   see checkpoint.py
    summary.json   written last: a run is finished if, and only if, it has one
"""

import contextlib
import json
import math
import os
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
from train.common.curves import draw_curves, format_number
from train.common.run_folder import RunFolder, now, to_json

DRAW_EVERY = 60  # seconds between two drawings of curves.png
REPORTED = {  # of device.graph_report() in the table of a finished run
    "graphs": "graphs compiled",
    "recompilations": "recompilations",
    "fallbacks": "fall-backs",
    "host_reads": "host reads",
}
SEEN_SECONDS = 60  # in which other hosts see what the main process writes: NFS may remember that there was nothing


class Run:
    """One training run: its folder, its metrics, and its checkpoints in the order that makes a resume exact.

    `path` is its folder or URL. `finished`: nothing is left to train, and `summary` holds the results. `checkpoints` is
    the Checkpointer, after `resume`. On other hosts than the main one nothing is printed or written, but values are
    read and checked at the same points, so that all hosts run the same graphs and stop together.

    Args:
        config: a dataclass with the fields `runs` (root folder or fsspec URL), `name` and `data`.
        name: the folder where config.name is "", or the first of name-2, … that is new, or unfinished with this config.
        free: fields of config that do not change the numbers, so a resumed run may differ in them.
        required: fields that a run's config.json must have; others that an older version lacked had Config's default.
        unit: what `log` counts as examples.
    Raises:
        InputError: the folder cannot be used, or the hosts of a pod do not see the same one.
    """

    def __init__(
        self, config, mesh, *, name: str, headline: str, total_steps: int, free=(), required=(), unit="examples"
    ):
        self.mesh, self.total_steps, self._unit, self._main = mesh, total_steps, unit, mesh.main_process
        trial = "; this is a trial, for real training see --help" if config.data == "synthetic" else ""
        self.message(f"{headline} on {mesh.num_devices} {mesh.kind} device(s){trial}")
        self._folder = RunFolder(config, name, free, required)
        self.name, self.path, self.summary = self._folder.name, self._folder.path, self._folder.summary
        self._clock = _Clock()
        self._metrics = _Metrics(self._folder, self._clock, self._main, f"/{total_steps}", unit)
        self.finished = self._closed = self.summary is not None
        self.resumed = self._folder.stored is not None and not self.finished
        if self.finished:
            self.message(f"{self.path} is finished, nothing to train; another --name trains again")
        else:
            kind = "resuming the unfinished run" if self.resumed else "new run"
            self.message(f"{kind} {self.path}{self._folder.reason}")
            if self._main:
                devices = {"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count}
                self._folder.open(devices)
        self._check_hosts()

    def _check_hosts(self) -> None:
        """Raises InputError, on every host, where the hosts of a pod do not see the config.json just written."""
        if self.mesh.process_count == 1:
            return
        fingerprint = self._folder.fingerprint
        expected = device.over_hosts(self.mesh, fingerprint() if self._main else 0).high
        deadline = time.monotonic() + SEEN_SECONDS
        while fingerprint() != expected and time.monotonic() < deadline:
            time.sleep(1)
            self._folder.files.invalidate_cache()
        if not device.over_hosts(self.mesh, int(fingerprint() == expected)).low:
            raise InputError(
                f"the {self.mesh.process_count} hosts do not see the same run in {self.path}: they lack what the main "
                "process wrote there; give a folder that all hosts share, such as --runs gs://bucket/runs"
            )

    # ---- training ----

    def resume(self, model, optimizer, *, examples: int, keep: int, every: int = 1, tables: Any = None) -> int:
        """Restores the newest checkpoint into a model and an optimizer on the device, which `checkpoint` saves, and
        returns its step, 0 for a new run; see Checkpointer. Raises InputError where it is of another model, or hosts
        disagree about it or the number of examples."""
        self._saved = model, optimizer
        self.checkpoints = Checkpointer(f"{self.path}/checkpoints", keep, self._main, tables, every)
        start = self.checkpoints.restore(model, optimizer, self.mesh)
        device.same_on_all_hosts(self.mesh, "the step to resume from", start)
        device.same_on_all_hosts(self.mesh, "the size of the training data", examples)
        if self.resumed:
            self._folder.safe_step = start
            if self._main:
                self._truncate_metrics(start)
            self.message(f"resuming after step {start}")
        return start

    def _truncate_metrics(self, last: int) -> None:
        """Drops what metrics.jsonl says of steps after `last`, and a last line torn by a kill; continues the file."""
        kept, timing = [], {"elapsed": 0.0, "training": 0.0}
        for number, line in enumerate((self._folder.read("metrics.jsonl") or b"").splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["step"] <= last:
                    kept.append(line)
                    timing = {key: float(record["timing"][key]) for key in timing}
            except (ValueError, KeyError, TypeError) as error:
                file = f"{self.path}/metrics.jsonl"
                raise InputError(f"line {number} of {file} is damaged; remove it or use another --name") from error
        self._clock.elapsed += timing["elapsed"]
        self._clock.training += timing["training"]
        self._folder.write("metrics.jsonl", b"".join(kept))
        self._metrics.open("ab", purge_step=last + 1)

    @contextlib.contextmanager
    def training(self, loader: contextlib.AbstractContextManager, stop_every: int = 10) -> Iterator[None]:
        """Holds the training loop: closes loader, checkpoints and run, whatever ends it, and turns SIGTERM and Ctrl-C
        into a stop at the next `checkpoint`. The hosts of a pod agree about it in every `stop_every`-th step."""
        with (
            device.stop_requested(self.mesh, stop_every) as self._stop_requested,
            contextlib.closing(self),
            self.checkpoints,
            loader,
        ):
            yield

    def checkpoint(self, step: int, *, due: bool) -> None:
        """Saves what `resume` restored, if it is due or the run is asked to stop. Call it at the end of every step.

        The order makes a resume exact: an evaluation comes before the checkpoint of its step, the upload of metrics
        before the save, and a process that is asked to stop exits (with 143) only after the save is on disk. Raises the
        InputError of an earlier save that failed.
        """
        stop = self._stop_requested() and step < self.total_steps
        if due or stop:
            with self.pause():
                self.upload()  # what a resumed run keeps must be there before its checkpoint is
                self.checkpoints.save(step, *self._saved)
        self.checkpoints.raise_failure()
        if stop:
            self.checkpoints.wait()
            self.message(f"stopped by a signal at step {step}: saved; the same command resumes from here")
            raise SystemExit(143)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Counts the time inside (evaluation, checkpoints) neither as training nor for examples per second."""
        self._metrics.flush()
        device.wait_for_steps()  # steps still running on the device are training, not pause
        with self._clock.pause():
            yield

    # ---- metrics ----

    def log(self, step: int, *, examples: float | None = None, input_wait: float | None = None, **metrics: Any) -> None:
        """Records training metrics: numbers, or 0-d tensors on any device, which this call does not read.

        Tensors on the device are read all in one transfer after the next step has been started; until then they must
        not be changed in place. A loss that is not finite raises an InputError there, which stops the run. `examples`
        counts all so far: their growth between two calls, over the time without pauses, is the speed. `input_wait` is
        the share of the time, 0 to 1, that the loop waited for input.
        """
        self._metrics.log(step, metrics, examples, input_wait)

    def evaluation(self, step: int, **metrics: float) -> None:
        """Records and prints evaluation metrics, which are numbers already. The time this takes is a pause."""
        with self.pause():
            values = {f"eval/{key}": float(value) for key, value in metrics.items()}
            self._metrics.write_line(step, values, self._clock.read())
            words = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
            self.message(f"step {step:>5}/{self.total_steps}  evaluation: {words}")
            self._metrics.draw(self.name, DRAW_EVERY)
            try:
                self.upload()
            except InputError as error:  # storage that is away for a moment must not end a long run
                self.message(f"warning: {error}; the next evaluation tries again")

    def message(self, text: str) -> None:
        """Prints one line on the terminal of the main process."""
        if self._main:
            print(text, flush=True)

    def finish(self, metrics: dict[str, float]) -> None:
        """Ends the run: writes curves.png and summary.json with the final metrics, prints the table, uploads."""
        if self._closed:
            raise RuntimeError("finish() after close(): the run's folder is no longer this process's")
        self._metrics.flush()
        per_second, clock = f"{self._unit}_per_second", self._clock.read()
        timings = [record["timing"] for record in self._metrics.records()]
        rates, waits = ([t[key] for t in timings if key in t] for key in (per_second, "input_wait"))
        self.summary = {
            "name": self.name,
            "finished_at": now(),
            "steps": self._folder.safe_step,
            "metrics": {key: _finite(value) for key, value in metrics.items()},
            "elapsed_seconds": clock["elapsed"],
            "training_seconds": clock["training"],
            per_second: statistics.median(rates) if rates else None,
            "input_wait": statistics.fmean(waits) if waits else None,
            "report": device.graph_report(),
        }
        if self._main:
            self._metrics.draw(self.name)
            self._folder.write("summary.json", to_json(self.summary, indent=2))
            self.print_summary()
            self.upload()
        self.finished = True
        self._release()

    def print_summary(self) -> dict[str, float]:
        """Prints the table of a finished run; returns its final metrics."""
        self.message(f"{self.path} {_summary_text(self.summary, self._unit)}")
        return self.summary["metrics"]

    def close(self) -> None:
        """Ends this process's part of an unfinished run (SIGTERM, an error): the next start resumes. Idempotent."""
        if self._closed:
            return
        ended = (InputError,) if isinstance(sys.exc_info()[1], Exception) else ()
        try:
            with contextlib.suppress(*ended):  # the error that ends the run, such as a checkpoint's, is the one to show
                if not self._folder.failed:  # after a failed write, more of them would only hide its message
                    self._metrics.flush()
                    self._metrics.draw(self.name)
                    self.upload()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._metrics.close()
        self._folder.release()

    def upload(self) -> None:
        """Copies all files of a remote run to its URL."""
        if self._main:
            self._metrics.flush_events()
            self._folder.upload()


class _Metrics:
    """The lines of metrics.jsonl, the same numbers as TensorBoard events and on the terminal, and curves.png."""

    def __init__(self, folder: RunFolder, clock: "_Clock", main: bool, of: str, unit: str):
        self._folder, self._clock, self._main, self._of, self._unit = folder, clock, main, of, unit
        self._file, self._events, self._drawn = None, None, -math.inf
        self._pending: list[tuple[int, dict[str, Any], float | None, float | None]] = []
        self._rate_start: tuple[float, float] | None = None  # examples and training seconds at the last line

    def open(self, mode: str, purge_step: int | None = None) -> None:
        # TensorBoard imports tensorflow where it finds one (Colab, Kaggle): slow, and it may take the TPU. An empty
        # module of this name is TensorBoard's own switch to do without.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        path = os.path.join(self._folder.local, "metrics.jsonl")
        try:
            self._file = open(path, mode, buffering=0)  # noqa: SIM115
            self._events = SummaryWriter(os.path.join(self._folder.local, "tb"), purge_step=purge_step)
        except OSError as error:
            raise self._folder.unwritable(path, error) from error

    def log(self, step: int, values: dict[str, Any], examples: float | None, input_wait: float | None) -> None:
        self._pending.append((step, values, examples, input_wait))
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values.values()):
            device.after_next_step(self._write_pending)
        elif len(self._pending) == 1:  # else it waits behind an earlier line
            self._write_pending()

    def flush(self) -> None:
        """Reads and writes what earlier `log` calls left on the device."""
        if self._pending:
            device.run_pending()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        tensors = [value for _, values, *_ in pending for value in values.values() if isinstance(value, torch.Tensor)]
        numbers = iter(device.read(tensors))
        clock = self._clock.read()  # after the read, which waits for the device
        for step, values, examples, input_wait in pending:
            values = {key: next(numbers) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            values = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
            timing = dict(clock)
            if examples is not None:
                now = examples, clock["training"]
                before, self._rate_start = self._rate_start or now, now
                if now[1] > before[1]:
                    timing[f"{self._unit}_per_second"] = (now[0] - before[0]) / (now[1] - before[1])
            if input_wait is not None:
                timing["input_wait"] = input_wait
            self.write_line(step, values, timing)
            if self._main:
                self._print(step, values, timing)

    def write_line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        for key, value in values.items():
            if key.endswith("loss") and not math.isfinite(value):
                raise InputError(
                    f"{key} is {value} at step {step}: the training diverged; start a run of another --name with a "
                    "lower --lr or a longer warm-up, and look for bad values in the data"
                )
        if not self._main:
            return
        if self._file is None:
            self.open("xb")
        values = {key: _finite(value) for key, value in values.items()}
        try:
            line = to_json({"step": step, **values, "timing": timing}) + b"\n"
            while line:  # a disk that fills up first writes a part, then fails
                line = line[self._file.write(line) :]
            for key, value in [*values.items(), *((f"timing/{key}", value) for key, value in timing.items())]:
                if value is not None:
                    self._events.add_scalar(key, value, step)
        except OSError as error:
            raise self._folder.unwritable(self._file.name, error) from error
        self._folder.safe_step = step

    def _print(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        words = [f"step {step:>5}{self._of}"]
        words += [f"{key} {format_number(values[key])}" for key in sorted(values, key=lambda key: key != "loss")]
        if (rate := timing.get(f"{self._unit}_per_second")) is not None:
            words.append(f"{format_number(rate)} {self._unit}/s")
        if (wait := timing.get("input_wait")) is not None:
            words.append(f"input wait {100 * wait:.0f} %")
        print("  ".join(words), flush=True)

    def records(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        with open(self._file.name) as file:
            return [json.loads(line) for line in file]

    def draw(self, title: str, at_most_every: float = 0) -> None:
        if time.monotonic() - self._drawn <= at_most_every:
            return
        if records := self.records():
            self._events.flush()
            self._folder.write("curves.png", draw_curves(records, title))
        self._drawn = time.monotonic()

    def flush_events(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # flushing what a full disk has refused, and reported, before
            if self._events is not None:
                self._events.close()
        if self._file is not None:
            self._file.close()


class _Clock:
    """Seconds of a run, those of earlier starts included: `elapsed` in all, `training` without pauses."""

    def __init__(self) -> None:
        self.elapsed = self.training = 0.0
        self.paused, self._read_at = False, time.monotonic()

    def read(self) -> dict[str, float]:
        now = time.monotonic()
        self.elapsed += now - self._read_at
        self.training += 0.0 if self.paused else now - self._read_at
        self._read_at = now
        return {"elapsed": round(self.elapsed, 4), "training": round(self.training, 4)}

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.read()
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.read()
            self.paused = before


def _summary_text(summary: dict[str, Any], unit: str) -> str:
    """Returns the table of a finished run."""
    report, rate, wait = summary["report"], summary[f"{unit}_per_second"], summary["input_wait"]
    rows = {key.replace("_", " "): format_number(value) for key, value in summary["metrics"].items()}
    rows["training time"] = _duration(summary["training_seconds"])
    if "compile_seconds" in report:
        rows["compile time"] = _duration(report["compile_seconds"])
    if rate is not None:
        rows[f"{unit}/s"] = format_number(rate)
    if wait is not None:
        rows["input wait"] = f"{100 * wait:.0f} %"
    for key, label in REPORTED.items():
        if key in report:
            value = report[key]
            rows[label] = "; ".join([str(len(value)), *value]) if isinstance(value, list) else str(value)
    width = max(map(len, rows))
    lines = [f"finished in {_duration(summary['elapsed_seconds'])}"]
    return "\n".join([*lines, *(f"  {label:<{width}}  {value}" for label, value in rows.items())])


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _finite(value: float) -> float | None:
    """Returns None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
