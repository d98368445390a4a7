"""The numbers of a run: metrics.jsonl, TensorBoard's events, and how a terminal shows them."""

import contextlib
import json
import math
import os
import sys
import types
from typing import Any

from errors import InputError
from train.common.run_folder import RunFolder, to_json

FILE = "metrics.jsonl"
EVALUATION = "eval/"  # what the names of an evaluation's metrics begin with, in metrics.jsonl
# Of device.graph_report(), in the table of a finished run, with its label where that is another
# word.
COUNTS = {
    "graphs": "graphs compiled",
    "recompilations": "",
    "fallbacks": "fall-backs",
    "host_reads": "host reads",
}


class Metrics:
    """What the main process writes of the numbers: metrics.jsonl, TensorBoard events.

    Attributes:
        evaluations: step -> metrics of each evaluation in metrics.jsonl, in the order of the steps;
            None for a value that is not finite.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.evaluations: dict[int, dict[str, float | None]] = {}
        self._file = None  # until the first line
        self._events = None

    def resume(self, last: int) -> dict[str, float]:
        """Drops what metrics.jsonl says of steps after `last`, and a last line torn by a kill.

        Returns:
            The seconds so far, as Run counts them.
        Raises:
            InputError: a line is damaged.
        """
        lines = (self.folder.read(FILE) or b"").splitlines(keepends=True)
        kept = []
        seconds = {"elapsed": 0.0, "training": 0.0}
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["step"] <= last:
                    kept.append(line)
                    seconds = {key: float(record["timing"][key]) for key in seconds}
                    self._remember(record["step"], record)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"line {number} of {self.folder.path}/{FILE} is damaged; "
                    "remove it or use another --name"
                ) from error

        self.folder.write(FILE, b"".join(kept))
        self._open("ab", purge_step=last + 1)
        return seconds

    def _open(self, mode: str, purge_step: int | None = None) -> None:
        # TensorBoard imports tensorflow where it finds one (Colab, Kaggle): slow, and it may take
        # the TPU. An empty module of this name is TensorBoard's own switch to do without.
        sys.modules.setdefault(
            "tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf")
        )
        from torch.utils.tensorboard import SummaryWriter

        with self.folder.writing(FILE) as path:
            self._file = open(path, mode)  # noqa: SIM115
            self._events = SummaryWriter(f"{self.folder.local}/tb", purge_step=purge_step)

    def write(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        """Appends a line of metrics.jsonl, and writes the same numbers for TensorBoard."""
        if self._file is None:
            self._open("xb")
        values = finite(values)
        scalars = dict(values)
        for key, value in timing.items():
            scalars[f"timing/{key}"] = value

        with self.folder.writing(FILE):
            self._file.write(to_json({"step": step, **values, "timing": timing}) + b"\n")
            self._file.flush()
            for key, value in scalars.items():
                if value is not None:
                    self._events.add_scalar(key, value, step)
        self.folder.last_step = step
        self._remember(step, values)

    def _remember(self, step: int, values: dict[str, Any]) -> None:
        """Adds the metrics of an evaluation, if a line has any, to `evaluations`."""
        for key, value in values.items():
            if key.startswith(EVALUATION):
                metrics = self.evaluations.setdefault(step, {})
                metrics[key.removeprefix(EVALUATION)] = value

    def records(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl."""
        if self._file is None:
            return []
        with open(f"{self.folder.local}/{FILE}") as file:
            return [json.loads(line) for line in file]

    def flush(self) -> None:
        """Writes what TensorBoard's writer still holds, and brings metrics.jsonl to the disk: a
        checkpoint that is saved next may delete another by what it says."""
        if self._events is not None:
            self._events.flush()
            with self.folder.writing(FILE):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes both files."""
        for file in (self._file, self._events):
            if file is not None:
                with contextlib.suppress(
                    OSError
                ):  # flushing what a full disk has refused, and reported, before
                    file.close()


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Returns the values with None for those that JSON does not have: NaN and infinity."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def summary_table(summary: dict[str, Any], unit: str) -> dict[str, str]:
    """Returns the table of a finished run, label -> value, from its summary.json.

    Args:
        unit: what its speed counts.
    """
    rows = {}
    for key, value in summary["metrics"].items():
        rows[key.replace("_", " ")] = format_number(value)
    if "best" in summary:
        rows["best checkpoint"] = _format_best(**summary["best"])
    if "stopped_early" in summary:
        stopped = summary["stopped_early"]
        rows["stopped early"] = (
            f"at step {stopped['step']} of {stopped['total_steps']}, "
            f"after {stopped['patience']} evaluation(s) without a better one"
        )

    report = summary["report"]
    training = format_duration(summary["training_seconds"])
    rows["training time"] = f"{training}, without evaluations and checkpoints"
    if "compile_seconds" in report:
        rows["compile time"] = format_duration(report["compile_seconds"])
    rate = summary[f"{unit}_per_second"]
    if rate is not None:
        rows[f"{unit}/s"] = format_number(rate)
    wait = summary["input_wait"]
    if wait is not None:
        rows["input wait"] = f"{100 * wait:.0f} %"

    for key, label in COUNTS.items():
        if key in report:
            rows[label or key] = _format_count(report[key])
    return rows


def _format_best(metric: str, step: int | None, value: float | None) -> str:
    """Returns the row about the exported checkpoint of a run with --best."""
    if step is None:
        return f"none, since --best {metric} was never finite; the newest is exported"
    return f"step {step}, by --best {metric} ({format_number(value)})"


def _format_count(count: int | list[str]) -> str:
    """Returns a count, or the number of sentences and the sentences."""
    if isinstance(count, list):
        return "; ".join([str(len(count)), *count])
    return str(count)


def format_duration(seconds: float) -> str:
    """Returns 12.3 s, 4 min 05 s or 2 h 09 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None) -> str:
    """Returns a number as the terminal, legends and the final table show it."""
    if value is None or isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    if 100 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.2e}"
