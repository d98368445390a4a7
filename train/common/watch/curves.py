"""The picture of a run, curves.png: drawn after an evaluation, at most once a minute, and at the end."""

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
        if (
            any(key.startswith("eval/") for key in values)
            and time.monotonic() - self._drawn > DRAW_EVERY
        ):
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
            if lines := records(self._run):
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
    beside = [
        key
        for key in sorted(points, key=lambda key: key != "lr")
        if key not in ("loss", "eval/loss")
    ]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(
        [["loss", "loss", key] for key in beside] or [["loss"]], sharex=True
    )
    for key, (steps, values) in points.items():
        panel, few = panels.get(key, panels["loss"]), len(steps) <= 10
        label = {"loss": "training", "eval/loss": "evaluation"}.get(key, format_number(values[-1]))
        if key == "loss" and not few:  # a running mean, narrow where the loss falls fast
            panel.plot(steps, values, color="tab:blue", alpha=0.4, linewidth=1)
            widths = [min(i, len(values) // 30) for i in range(len(values))]
            values = [
                statistics.fmean(values[i - width : i + width + 1])
                for i, width in enumerate(widths)
            ]
        color = "tab:blue" if key == "loss" else "tab:gray" if key == "lr" else "tab:orange"
        dots = {"marker": "o", "markersize": 4} if few or key.startswith("eval/") else {}
        panel.plot(steps, values, color=color, linewidth=2, label=label, **dots)
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
        if (
            key == "lr" or len(points.get(key, ((), ()))[0]) == 1
        ):  # one value fills no axis: show it against zero
            panel.set_ylim(bottom=0)
    panels["loss"].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()
