"""The record of a run: its folder, its lines on the terminal, its curves, its checkpoints.

runs/<name>/ (a local folder, or a URL such as gs://bucket/runs) holds

    config.json    the script's Config; what of the data is trained and evaluated on; for each
                   start: versions, devices, commit, command, time
    metrics.jsonl  one JSON object a line: {"step": 120, "loss": 1.25, "lr": 0.05, "timing": {...}}.
                   Names of an evaluation's metrics begin with eval/. All but "timing" is the same,
                   bit for bit, when a resumed run repeats it
    tb/            the same numbers as TensorBoard events
    curves.png     loss, learning rate and evaluation metrics over the steps, by train/common/watch
    checkpoints/   see checkpoint.py; written before the evaluation that belongs to it
    summary.json   written last: a run is finished if, and only if, it has one

--best and --patience: see best.py. `checkpoint` keeps the checkpoint of the best evaluation so far,
`batches` ends early, `load_best` brings the best state back for the export.
"""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common import best, device, hooks, progress
from train.common.benchmark import Benchmark
from train.common.checkpoint import Checkpointer
from train.common.mesh import Mesh
from train.common.metrics import (
    EVALUATION,
    Metrics,
    finite,
    format_duration,
    format_number,
    summary_table,
)
from train.common.run_folder import RunFolder, now, to_json

# Within this time other hosts see what the main process writes: NFS remembers for a while that a
# file was missing.
SEEN_SECONDS = 60


@dataclass
class _Line:
    """A call of `Run.log`, of which the values may still be on the device."""

    step: int
    values: dict[str, Any]
    examples: float | None
    input_wait: float | None


class Run:
    """One training run: its folder, its metrics, and its checkpoints in the order that makes a
    resume exact.

    Only the main host prints and writes. The others read and check values at the same points, so
    that all hosts run the same graphs and stop together.

    Args:
        config: a dataclass with the fields `runs` (root folder or fsspec URL), `name` and `data`.
        mesh: the devices of the run.
        name: taken where config.name is "": the first of name, name-2, name-3, … whose folder is
            new, or has an unfinished run of this config.
        headline: what is trained, the first line on the terminal.
        total_steps: of the whole training.
        may_differ: fields of config that do not change the numbers, so a resumed run may have other
            values of them.
        required: fields that a stored config.json must have. Any other that it lacks is taken as
            Config's default: the run is of an older version, without that field.
        sources: which part of the data is for "train" and which for "evaluation", in words; a
            resumed run must have the same. None: nothing is recorded.
        older_sources: what an unfinished run read whose version recorded none. None: the same.
        unit: what `log` counts as examples.
        metrics: the names of what `evaluation` records, of which config.best is one; (): config has
            no fields `best` and `patience`.
        benchmark: what the run is in MLPerf Training; None: nothing.

    Attributes:
        path: its folder or URL.
        finished: nothing is left to train.
        summary: the results of a finished run, as in summary.json.
        evaluation_due: after `resume`, whether the checkpoint's state is still to be evaluated.
        best: with --best, the best evaluation so far; only the main process has its metrics before
            `load_best`.
        stopped_early: --patience has ended the training.
        saved_step: of the last checkpoint that was saved or loaded.
        remaining: estimates how long the training will still take.
        watchers: those of its training, which are notified of what happens; see hooks.py.

    Raises:
        InputError: --best or --patience is unusable; the run's folder is, or the hosts see
            different ones.
    """

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        *,
        name: str,
        headline: str,
        total_steps: int,
        may_differ: Sequence[str] = (),
        required: Sequence[str] = (),
        sources: dict[str, str] | None = None,
        older_sources: dict[str, str] | None = None,
        unit: str = "examples",
        metrics: Sequence[str] = (),
        benchmark: Benchmark | None = None,
    ):
        self.benchmark = benchmark
        self.criterion = best.Criterion()
        if metrics:
            self.criterion = best.criterion(config.best, config.patience, metrics)
        self.best = best.Best()
        self.stopped_early = False
        self.mesh = mesh
        self.total_steps = total_steps
        self.watchers: Sequence[hooks.Watcher] = ()
        self._unit = unit
        self._main = mesh.main_process
        trial = ""
        if config.data == "synthetic":
            trial = "; this is a trial, for real training see --help"
        self.message(f"{headline} on {mesh.num_devices} {mesh.kind} device(s){trial}")

        self.folder = RunFolder(config, name, may_differ, required, sources, older_sources)
        self.name = self.folder.name
        self.path = self.folder.path
        self.summary = self.folder.summary
        self.finished = self.summary is not None
        self.resumed = self.folder.stored is not None and not self.finished
        self.evaluation_due = False
        self._closed = self.finished
        self.saved_step = 0
        self.remaining = self._estimate(start=0)

        self._metrics = Metrics(self.folder)
        self._pending: list[_Line] = []
        # Seconds of this start and all earlier ones; "training" does not count pauses.
        self._seconds = {"elapsed": 0.0, "training": 0.0}
        self._running_clocks = list(self._seconds)
        self._read_at = time.monotonic()
        # Examples and training seconds at the last line.
        self._rate_start: tuple[float, float] | None = None

        if self.finished:
            self.message(f"{self.path} is finished, nothing to train; another --name trains again")
        else:
            if self._main:
                # Before the message: it takes the folder's lock, which another process may hold.
                self.folder.open(
                    {"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count}
                )
            kind = "resuming the unfinished run" if self.resumed else "new run"
            self.message(f"{kind} {self.path}{self.folder.reason}")
            if self.criterion.metric:
                self.message(self.criterion.describe())
        _check_hosts(mesh, self.folder)

    def resume(
        self, model, optimizer, *, examples: int, keep: int, every: int = 1, tables: Any = None
    ) -> int:
        """Restores the newest checkpoint into a model and an optimizer on the device, and returns
        its step; 0 for a new run. `checkpoint` will save these two.

        Args:
            examples: of the training data; all hosts must have as many.
            keep, every, tables: see Checkpointer.

        Raises:
            InputError: the checkpoint is of another model, or hosts disagree about it or about
                `examples`; or the best checkpoint is lost.
        """
        self._saved = (model, optimizer)
        self.checkpoints = Checkpointer(
            f"{self.path}/checkpoints", keep, self._main, tables, every, self.mesh.layers
        )
        start = self.start = self.checkpoints.restore(model, optimizer, self.mesh)
        device.same_on_all_hosts(self.mesh, "the step to resume from", start)
        device.same_on_all_hosts(self.mesh, "the size of the training data", examples)
        self.saved_step = start
        self.remaining = self._estimate(start)
        if self.resumed:
            self.folder.last_step = start
            if self._main:
                # Drops the lines of later steps from metrics.jsonl, too.
                earlier_seconds = self._metrics.resume(start)
                for name, seconds in earlier_seconds.items():
                    self._seconds[name] += seconds
            self.message(f"resuming after step {start}")
        self._set_evaluation_due(start)
        self._find_best(start)
        if self.best.step not in (0, start):  # that of `start` has been loaded
            self.checkpoints.expect_best(self.best.step, self.mesh)
        return start

    def _estimate(self, start: int) -> progress.Remaining:
        """Returns what estimates the remaining time of a training that begins after a step."""
        return progress.Remaining(
            self.total_steps,
            start,
            compile_seconds=lambda: device.graph_report().get("compile_seconds", 0.0),
            may_end_early=self.criterion.patience > 0,
        )

    def _set_evaluation_due(self, step: int) -> None:
        """Sets `evaluation_due`: whether metrics.jsonl lacks the evaluation that was to follow the
        checkpoint of a step.

        Every host calls it, in a new run as well: hosts that look at the folder at different
        moments may disagree about whether a run is resumed.
        """
        main_says_due = self._main and step > 0 and self.checkpoints.evaluation_follows
        recorded = self._metrics.evaluations.get(step) if main_says_due else None
        if recorded:
            # Metrics that metrics.jsonl has, the checkpoint may lack: the process may have ended in
            # between.
            self.checkpoints.add_metrics(step, recorded)
            main_says_due = False
        # The other hosts, which may see an older file, say 0: the maximum is the main host's.
        self.evaluation_due = device.over_hosts(self.mesh, int(main_says_due)).high > 0

    def _find_best(self, step: int) -> None:
        """Sets `best` and `stopped_early` by the evaluations up to a step.

        The main process, which alone has them, tells the others: every host calls it.
        """
        if not self.criterion.metric:
            return
        found = self.criterion.find(self._metrics.evaluations)
        self.best = replace(
            found,
            step=device.over_hosts(self.mesh, found.step).high,
            evaluations_since=device.over_hosts(self.mesh, found.evaluations_since).high,
        )
        # After the last step nothing is left to be stopped.
        self.stopped_early = step < self.total_steps and self.criterion.ends_training(self.best)

    @contextlib.contextmanager
    def training(
        self, loader: contextlib.AbstractContextManager, stop_every: int = 10
    ) -> Iterator[None]:
        """Holds the training loop: closes loader, checkpoints and run, whatever ends it.

        It turns SIGTERM and Ctrl-C into a stop at the next `checkpoint`. The hosts of a pod agree
        about a stop at every `stop_every`-th step.
        """
        signals = device.stop_requested(self.mesh, stop_every)
        watching = hooks.watching(self)
        # Left in the opposite order: watchers, loader, checkpoints, run, signals.
        with (
            signals as self._stop_requested,
            contextlib.closing(self),
            self.checkpoints,
            loader,
            watching as self.watchers,
        ):
            yield

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of the training loader, until --patience ends the training."""
        if not self.stopped_early:  # a resumed run may have nothing left to train
            for batch in loader:
                yield batch
                if self.stopped_early:
                    break

        if self.stopped_early:
            self.message(
                f"stopped early at step {self.saved_step} of {self.total_steps}: "
                f"{self.best.evaluations_since} evaluation(s) without a better "
                f"{self.criterion.name} (--patience {self.criterion.patience})"
            )

    def checkpoint(self, step: int, *, due: bool, evaluates: bool = False) -> None:
        """Ends a step: notifies the watchers, and saves the model and the optimizer given to
        `resume` if a save is due, an evaluation follows, or the run is asked to stop.

        Call it once in every step, before the evaluation of that step: nothing is lost when the
        evaluation fails.

        The order makes a resume exact: the upload of metrics comes before the save, the evaluation
        after it, and a process that is asked to stop exits (with 143) only after the save is on
        disk. A run that ends between a save and its evaluation finds `evaluation_due` when it
        resumes.
        """
        for watcher in self.watchers:
            watcher.step(step)

        # Asked in every step, on every host: the hosts answer together, and wait for each other.
        stop_requested = self._stop_requested()
        # After the last step the run ends by itself, and nothing is left to resume.
        stop = stop_requested and step < self.total_steps
        if due or evaluates or stop:
            self.remaining.step = step
            with self.pause("checkpoints"):
                self.upload()  # what a resumed run keeps must be there before its checkpoint is
                self.checkpoints.save(step, *self._saved, evaluates, self.best.step)
            self.saved_step = step
        self.checkpoints.raise_failure()

        if stop:
            # A pause that nothing ends: the process exits.
            for watcher in self.watchers:
                watcher.pause("checkpoints")
            self.checkpoints.wait()
            self.message(
                f"stopped by a signal at step {step}: saved; the same command resumes from here"
            )
            raise SystemExit(143)

    @contextlib.contextmanager
    def pause(self, of: str = "evaluation") -> Iterator[None]:
        """Counts the time inside (evaluation, checkpoints) neither as training nor for the examples
        per second."""
        self._flush()
        device.wait_for_steps()  # steps still running on the device are training, not pause
        self._read_clock()
        before = self._running_clocks
        self._running_clocks = ["elapsed"]
        for watcher in self.watchers:
            watcher.pause(of)
        try:
            with self.remaining.pausing(of):
                yield
        finally:
            self._read_clock()
            self._running_clocks = before
            for watcher in self.watchers:
                watcher.resume()

    def _read_clock(self) -> dict[str, float]:
        """Counts the time since the last call; returns the seconds of all starts so far."""
        read_at = time.monotonic()
        for name in self._running_clocks:
            self._seconds[name] += read_at - self._read_at
        self._read_at = read_at
        return {name: round(seconds, 4) for name, seconds in self._seconds.items()}

    def log(
        self,
        step: int,
        *,
        examples: float | None = None,
        input_wait: float | None = None,
        **metrics: Any,
    ) -> None:
        """Records training metrics: numbers, or 0-d tensors on any device, which this call does not
        read.

        Tensors on the device are read all in one transfer after the next step has been started;
        until then they must not be changed in place. A loss that is not finite raises an InputError
        then, which stops the run.

        Args:
            examples: all so far, of all starts; their growth over the time without pauses is the
                speed.
            input_wait: share of the time that the loop waited for batches.
        """
        self._pending.append(_Line(step, metrics, examples, input_wait))
        tensors = [value for value in metrics.values() if isinstance(value, Tensor)]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        no_earlier_line = len(self._pending) == 1
        if on_device:
            device.after_next_step(self._write_pending)
        elif no_earlier_line:  # or it would overtake one whose values are still on the device
            self._write_pending()

    def _flush(self) -> None:
        """Reads and writes what earlier `log` calls left on the device: runs `_write_pending`,
        which `log` has registered."""
        if self._pending:
            device.run_pending()

    def _write_pending(self) -> None:
        """Reads the values of the pending lines in one transfer, and writes the lines."""
        lines = self._pending
        self._pending = []
        tensors = []
        for line in lines:
            for value in line.values.values():
                if isinstance(value, Tensor):
                    tensors.append(value)
        on_host = iter(self._over_processes(device.read(tensors)))
        clock = self._read_clock()  # after the read, which waits for the device

        for line in lines:
            values = {}
            for key, value in line.values.items():
                if isinstance(value, Tensor):
                    value = next(on_host)
                values[key] = value.item() if hasattr(value, "item") else value
            self._write_line(line, values, clock)

    def _over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the means over processes of 0-d tensors on the host, each of its own type."""
        if self.mesh.parts == 1 or not tensors:
            return tensors
        numbers = torch.stack([tensor.double() for tensor in tensors])
        means = device.mean_over_processes(numbers)
        return [mean.to(tensor.dtype) for mean, tensor in zip(means, tensors, strict=True)]

    def _write_line(self, line: _Line, values: dict[str, float], clock: dict[str, float]) -> None:
        """Writes a line of training metrics; `values` are its own, on the host."""
        words = []
        for key in sorted(values, key=lambda key: key != "loss"):  # the loss first
            words.append(f"{key} {format_number(values[key])}")

        timing = dict(clock)
        rate = self._rate(line.examples, clock["training"])
        if rate is not None:
            timing[f"{self._unit}_per_second"] = rate
            words.append(f"{format_number(rate)} {self._unit}/s")
        if line.input_wait is not None:
            timing["input_wait"] = line.input_wait
            words.append(f"input wait {100 * line.input_wait:.0f} %")

        self.remaining.line(line.step, clock["training"])
        time_left = self.remaining.text(line.step)
        if time_left:
            words.append(time_left)
        self._write(line.step, values, timing, words)

    def _rate(self, examples: float | None, seconds: float) -> float | None:
        """Returns the examples per second of training since the last line that counted them; None
        where that is not known."""
        if examples is None:
            return None
        last = self._rate_start
        self._rate_start = (examples, seconds)
        if last is None:
            return None
        last_examples, last_seconds = last
        if seconds <= last_seconds:
            return None
        return (examples - last_examples) / (seconds - last_seconds)

    def _write(
        self, step: int, values: dict[str, float], timing: dict[str, float], words: list[str]
    ) -> None:
        """Checks the values of a line of metrics.jsonl, on every host; writes and prints the line
        on the main one."""
        for key, value in values.items():
            if key.endswith("loss") and not math.isfinite(value):
                # Not the data: the loader refuses what is not finite in a batch.
                raise InputError(
                    f"{key} is {value} at step {step}: "
                    "the input was finite, so the training diverged; start a run of another --name "
                    "with a lower --lr or a longer warm-up, and look for huge values in the data"
                )
        if self._main:
            self._metrics.write(step, values, timing)
            self.message("  ".join([f"step {step:>5}/{self.total_steps}", *words]))
        for watcher in self.watchers:
            watcher.line(step, values, timing)

    def evaluation(self, step: int, **metrics: float) -> None:
        """Records and prints evaluation metrics, which are numbers already, and adds them to the
        checkpoint of their step. The time this takes is a pause.

        Every host calls it. With --best it decides on all of them which checkpoint is the best now.
        """
        self._check_metrics(step, metrics)
        with self.pause():
            values = {f"{EVALUATION}{key}": float(value) for key, value in metrics.items()}
            text = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
            if self._would_be_best(step, metrics):
                text += "  best so far"
            self._write(step, values, self._read_clock(), [f"evaluation: {text}"])
            if step == self.saved_step:
                self.checkpoints.add_metrics(step, finite(metrics))
            self.evaluation_due = False
            self._find_best(step)
            try:
                self.upload()
            except InputError as error:  # storage that is away for a moment must not end a long run
                self.message(f"warning: {error}; the next evaluation tries again")

    def _check_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Raises RuntimeError where --best cannot go by an evaluation: the script has a bug."""
        if not self.criterion.metric:
            return
        if list(metrics) != list(self.criterion.metrics):
            raise RuntimeError(
                f"the evaluation has {', '.join(metrics)}; "
                f"Run was told {', '.join(self.criterion.metrics)}"
            )
        if step != self.saved_step:
            raise RuntimeError(
                f"step {step} is evaluated, and its checkpoint was not saved: "
                "call checkpoint(step, evaluates=True) first"
            )

    def _would_be_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Returns whether an evaluation that is not recorded yet is better than those before it."""
        if not self.criterion.metric:
            return False
        evaluations = {**self._metrics.evaluations, step: finite(metrics)}
        return self.criterion.find(evaluations).step == step

    def load_best(self) -> dict[str, float]:
        """Loads the checkpoint of the best evaluation into what was given to `resume`.

        Call it on every host, after the last step, inside of `training` and before the export.

        Returns:
            The metrics of that evaluation; {} without --best, or where its metric was never
            finite: the state stays that of the last step then.
        Raises:
            InputError: the checkpoint is damaged.
        """
        if not self.criterion.metric:
            return {}
        self.checkpoints.wait()
        if not self.best.step:
            self.message(
                f"no evaluation had a finite {self.criterion.name}: the newest state is exported"
            )
            return {}

        # Only the main process has the numbers.
        values = []
        for name in self.criterion.metrics:
            value = self.best.metrics.get(name)
            values.append(math.nan if value is None else value)
        values = device.from_main_process(self.mesh, values)
        metrics = dict(zip(self.criterion.metrics, values, strict=True))
        self.best = replace(self.best, metrics=metrics)

        step = self.best.step
        if step != self.saved_step:
            self.checkpoints.load(step, *self._saved, self.mesh)
            self.saved_step = step
        value = format_number(metrics[self.criterion.name])
        self.message(f"the best checkpoint is that of step {step}: {self.criterion.name} {value}")
        return metrics

    def message(self, text: str) -> None:
        """Prints one line on the terminal of the main process."""
        if self._main:
            print(text, flush=True)

    def finish(self, metrics: dict[str, float]) -> None:
        """Ends the run: writes summary.json with the final metrics, prints the table, uploads.

        Call it at the end of `with run.training(…)`, inside, after `checkpoints.wait()`: a run that
        says that it is finished must have its last checkpoint on disk.
        """
        if self._closed:
            raise RuntimeError(
                "finish() after close(): the run's folder is no longer this process's"
            )
        if self.best.step not in (0, self.saved_step):
            raise RuntimeError("finish() before load_best(): the state is not the best one")
        self._flush()
        clock = self._read_clock()
        per_second = f"{self._unit}_per_second"
        rates = []
        waits = []
        for record in self._metrics.records():
            timing = record["timing"]
            if per_second in timing:
                rates.append(timing[per_second])
            if "input_wait" in timing:
                waits.append(timing["input_wait"])

        start = self.folder.start  # {} on all hosts but the main one, which alone writes
        git = start.get("git") or {}
        self.summary = {
            "name": self.name,
            "version": git.get("version"),  # None outside of git
            "command": start.get("command"),
            "devices": start.get("devices"),
            "finished_at": now(),
            "steps": self.folder.last_step,
            "metrics": finite(metrics),
            "elapsed_seconds": clock["elapsed"],
            "training_seconds": clock["training"],
            per_second: statistics.median(rates) if rates else None,
            "input_wait": statistics.fmean(waits) if waits else None,
            "report": device.graph_report(),
        }
        self.summary |= self._summarize_best()
        # Merged at the end: a watcher may read `summary`, and must not see what another one adds.
        of_watchers = {}
        for watcher in self.watchers:
            of_watchers |= watcher.summary()
        self.summary |= of_watchers

        if self._main:
            self.folder.write("summary.json", to_json(self.summary, indent=2))
            self.print_summary()
            self.upload()
        self.finished = True
        self._release()

    def _summarize_best(self) -> dict[str, Any]:
        """Returns what summary.json says of --best and --patience."""
        summary = {}
        if self.criterion.metric:
            found = self.best
            summary["best"] = {
                "metric": self.criterion.metric,
                "step": found.step or None,
                "value": found.metrics.get(self.criterion.name),
            }
        if self.stopped_early:
            summary["stopped_early"] = {
                "step": self.folder.last_step,
                "total_steps": self.total_steps,
                "patience": self.criterion.patience,
            }
        return summary

    def print_summary(self) -> dict[str, float]:
        """Prints the table of a finished run; returns its final metrics."""
        elapsed = format_duration(self.summary["elapsed_seconds"])
        self.message(f"{self.path} finished in {elapsed}, all starts together")
        rows = summary_table(self.summary, self._unit)
        width = max(len(label) for label in rows)
        self.message("\n".join(f"  {label:<{width}}  {value}" for label, value in rows.items()))
        return self.summary["metrics"]

    def close(self) -> None:
        """Ends this process's part of an unfinished run (SIGTERM, an error): the next start
        resumes.

        Idempotent.
        """
        if self._closed:
            return
        # The error that ends the run, such as a checkpoint's, is the one to show. SystemExit, with
        # which a run leaves that is asked to stop, is none: an upload that then fails is shown.
        already_failing = isinstance(sys.exc_info()[1], Exception)
        if already_failing and self.mesh.parts > 1:
            self._pending = []  # the other processes do not come to average these lines
        hidden = (InputError, OSError) if already_failing else ()
        try:
            with contextlib.suppress(*hidden):
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


def _check_hosts(mesh: Mesh, folder: RunFolder) -> None:
    """Raises InputError, on every host, where one of them does not see the config.json that the
    main one has just written."""
    if mesh.process_count == 1:
        return
    # The main host's: the others give 0.
    fingerprint = folder.fingerprint() if mesh.main_process else 0
    expected = device.over_hosts(mesh, fingerprint).high
    deadline = time.monotonic() + SEEN_SECONDS
    while folder.fingerprint() != expected and time.monotonic() < deadline:
        time.sleep(1)
        folder.fs.invalidate_cache()
    sees_it = int(folder.fingerprint() == expected)
    if not device.over_hosts(mesh, sees_it).low:
        raise InputError(
            f"the {mesh.process_count} hosts do not see the same run in {folder.path}: they lack "
            "what the main one wrote there; give a folder that all hosts share, such as --runs "
            "gs://bucket/runs"
        )
