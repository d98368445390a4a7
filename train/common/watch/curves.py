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
from typing import Any, NamedTuple

from errors import InputError
from train.common.hooks import Watcher
from train.common.metrics import EVALUATION, format_number

DRAW_EVERY = 60  # seconds
TRAINING = ("loss", "lr", "accuracy")  # of the training, whatever the evaluation has
LABELS = {"lr": "learning rate"}  # of a panel, where its name is another
FEW = 10  # points, up to which a curve has dots


@dataclass
class Curve:
    """The values of one key of metrics.jsonl."""

    panel: str  # what it is called, without eval/
    is_evaluation: bool
    steps: list[int]
    values: list[float]

    @property
    def label(self) -> str:
        return "evaluation" if self.is_evaluation else "training"

    @property
    def color(self) -> str:
        if self.panel == "lr":
            return "tab:gray"
        return "tab:orange" if self.is_evaluation else "tab:blue"


class Range(NamedTuple):
    """The values that a panel shows."""

    low: float
    high: float


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
    the learning rate and metrics, each in a panel of its own.

    Training is blue, evaluation orange. An arrow names what is above a panel, see `_range`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = _curves(records)
    names = []  # of the panels to the right of the loss
    for curve in curves:
        if curve.panel != "loss" and curve.panel not in names:
            names.append(curve.panel)
    names.sort(key=lambda name: name != "lr")
    # The loss has a panel of two thirds of the width, each other number one to its right.
    rows = [["loss", "loss", name] for name in names] or [["loss"]]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(rows, sharex=True)
    for name, panel in panels.items():
        of_panel = [curve for curve in curves if curve.panel == name]
        for curve in of_panel:
            _draw_curve(panel, curve)
        _dress(panel, name, of_panel)
    panels["loss"].xaxis.get_major_locator().set_params(integer=True)

    figure.suptitle(title, fontsize=12, fontweight="bold")
    colors = {}  # of training and evaluation, in all panels
    for name, panel in panels.items():
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            if name != "lr":
                colors.setdefault(label, handle)
    # Outside of the panels, where it hides no line.
    figure.legend(
        list(colors.values()), list(colors), loc="outside upper left", ncols=2, frameon=False
    )
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def _curves(records: list[dict[str, Any]]) -> list[Curve]:
    """Returns what is drawn of the lines of metrics.jsonl: of the training the loss, the learning
    rate, the accuracy and what the evaluation has by the same name; all of the evaluation."""
    evaluated = set()
    for record in records:
        for key in record:
            if key.startswith(EVALUATION):
                evaluated.add(key.removeprefix(EVALUATION))

    curves: dict[str, Curve] = {}
    for record in records:
        for key, value in record.items():
            panel = key.removeprefix(EVALUATION)
            is_evaluation = panel != key
            is_drawn = is_evaluation or key in TRAINING or key in evaluated
            if not is_drawn or not isinstance(value, int | float):
                continue
            curve = curves.setdefault(key, Curve(panel, is_evaluation, [], []))
            curve.steps.append(record["step"])
            curve.values.append(value)
    return list(curves.values())


def _draw_curve(panel: Any, curve: Curve) -> None:
    """Draws a curve; of a long one of the training each value faintly, and a smooth one."""
    few = len(curve.steps) <= FEW
    values = curve.values
    is_noisy = not curve.is_evaluation and curve.panel != "lr"
    if is_noisy and not few:
        panel.plot(curve.steps, values, color=curve.color, alpha=0.4, linewidth=1)
        values = _running_mean(values)
    dots = {"marker": "o", "markersize": 4} if few or curve.is_evaluation else {}
    panel.plot(curve.steps, values, color=curve.color, linewidth=2, label=curve.label, **dots)


def _dress(panel: Any, name: str, curves: list[Curve]) -> None:
    """Gives a panel its axes, its range, the last value and what is outside."""
    lowest = panel.get_subplotspec().is_last_row()
    panel.set(ylabel=LABELS.get(name, name.replace("_", " ")), xlabel="step" * lowest)
    panel.tick_params(labelbottom=lowest)
    panel.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if name not in ("loss", "lr"):
        last = max(curves, key=lambda curve: curve.is_evaluation)
        panel.set_title(format_number(last.values[-1]), loc="right", fontsize=10, color=last.color)

    if name == "lr":
        panel.set_ylim(bottom=0)
        return
    shown = _range(curves)
    margin = 0.05 * (shown.high - shown.low)
    if margin:
        panel.set_ylim(shown.low - margin, shown.high + margin)
    panel.set_title("  ".join(_outside(curves, shown)), loc="left", fontsize=9, color="dimgray")


def _range(curves: list[Curve]) -> Range:
    """Returns the range that a panel shows: all values, but those far above the later ones.

    An untrained network's loss of 17, where later ones are near 0.3, would flatten everything else.
    So nothing higher is shown than three times the range of the later values, which are those after
    the first quarter of each curve, without their outermost fiftieth at either end.
    """
    values = []
    later = []
    for curve in curves:
        values += curve.values
        later += curve.values[max(1, len(curve.values) // 4) :]
    if not values:
        return Range(0, 0)
    if len(values) == 1:  # it fills no axis: show it against zero
        values.append(0)

    whole = Range(min(values), max(values))
    if len(later) < 3:
        return whole
    later.sort()
    outermost = len(later) // 50
    low = later[outermost]
    high = later[-1 - outermost]
    # Of values that hardly differ: not their noise alone.
    span = max(high - low, (whole.high - whole.low) / 50)
    return Range(whole.low, max(value for value in values if value <= low + 3 * span))


def _outside(curves: list[Curve], shown: Range) -> list[str]:
    """Returns a text for each curve that leaves the range."""
    texts = []
    for curve in curves:
        points = zip(curve.values, curve.steps, strict=True)
        outside = [point for point in points if point[0] > shown.high]
        if not outside:
            continue
        value, step = max(outside)
        text = f"↑ {format_number(value)} at step {step}"
        if len(curves) > 1:
            text += f" ({curve.label})"
        if len(outside) > 1:
            text += f" and {len(outside) - 1} more"
        texts.append(text)
    return texts


def _running_mean(values: list[float]) -> list[float]:
    """Returns the mean around each value; its window is narrow at the beginning, where a loss falls
    fast."""
    means = []
    for index in range(len(values)):
        width = min(index, len(values) // 30)
        means.append(statistics.fmean(values[index - width : index + width + 1]))
    return means
