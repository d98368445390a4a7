"""The picture of a run, curves.png.

It is drawn after an evaluation, at most once a minute, and at the end.
"""

import io
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errors import InputError
from train.common.hooks import Watcher
from train.common.metrics import format_number

DRAW_EVERY = 60  # seconds
LABELS = {"loss": "training", "eval/loss": "evaluation"}  # of a curve; others show their last value
COLORS = {"loss": "tab:blue", "lr": "tab:gray"}  # others are orange


@dataclass(frozen=True)
class Flags:
    """None: it costs little."""


def watcher(flags: Flags) -> Callable[[Any], "Curves"]:
    """Returns what makes the drawer of a Run."""
    return Curves


class Curves(Watcher):
    """Draws curves.png in the folder of a run."""

    def __init__(self, run: Any):
        self._run = run
        self._drawn = -math.inf  # when, by time.monotonic()

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        is_evaluation = any(key.startswith("eval/") for key in values)
        if is_evaluation and time.monotonic() - self._drawn > DRAW_EVERY:
            self._draw()

    def summary(self) -> dict[str, Any]:
        self._draw()
        return {}

    def __exit__(self, *_: Any) -> None:
        if not self._run.finished:
            self._draw()

    def _draw(self) -> None:
        if not self._run.mesh.main_process:
            return
        self._drawn = time.monotonic()
        try:
            lines = records(self._run)
            if lines:
                self._run.folder.write("curves.png", draw_curves(lines, self._run.name))
        except (InputError, ValueError, ImportError) as error:
            # A full disk, a line that it tore, or a copy without matplotlib: no reason to end a
            # run.
            self._run.message("warning: no picture: " + str(error).partition(";")[0])


def records(run: Any) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl of a run that trains."""
    try:
        with open(f"{run.folder.local}/metrics.jsonl") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:  # before the first line
        return []


def draw_curves(records: list[dict[str, Any]], title: str) -> bytes:
    """Returns a PNG of 1000 x 460 pixels from the lines of metrics.jsonl: the loss, and beside it
    learning rate and evaluation metrics, each in a panel of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, tuple[list[int], list[float]]] = {}  # steps and values
    for record in records:
        for key, value in record.items():
            if value is not None and (key in ("loss", "lr") or key.startswith("eval/")):
                steps, values = points.setdefault(key, ([], []))
                steps.append(record["step"])
                values.append(value)
    # The loss has a panel of two thirds of the width, each other number one to its right.
    right = [key for key in points if key not in ("loss", "eval/loss", "lr")]
    if "lr" in points:
        right.insert(0, "lr")
    rows = [["loss", "loss", key] for key in right] or [["loss"]]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(rows, sharex=True)
    for key, (steps, values) in points.items():
        panel = panels.get(key, panels["loss"])
        few = len(steps) <= 10
        label = LABELS.get(key, format_number(values[-1]))
        if key == "loss" and not few:
            panel.plot(steps, values, color="tab:blue", alpha=0.4, linewidth=1)
            values = _running_mean(values)
        dots = {"marker": "o", "markersize": 4} if few or key.startswith("eval/") else {}
        panel.plot(
            steps, values, color=COLORS.get(key, "tab:orange"), linewidth=2, label=label, **dots
        )

    for key, panel in panels.items():
        lowest = panel.get_subplotspec().is_last_row()
        name = {"lr": "learning rate"}.get(key, key.removeprefix("eval/").replace("_", " "))
        panel.set(ylabel=name, xlabel="step" * lowest)
        panel.tick_params(labelbottom=lowest)
        panel.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.lines and key != "lr":
            panel.legend(frameon=False)
        steps, _ = points.get(key, ([], []))
        if key == "lr" or len(steps) == 1:  # one value fills no axis: show it against zero
            panel.set_ylim(bottom=0)
    panels["loss"].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def _running_mean(values: list[float]) -> list[float]:
    """Returns the mean around each value; its window is narrow at the beginning, where a loss falls
    fast."""
    means = []
    for index in range(len(values)):
        width = min(index, len(values) // 30)
        means.append(statistics.fmean(values[index - width : index + width + 1]))
    return means
