"""The picture of a run: curves.png."""

import io
import statistics
from typing import Any


def draw_curves(records: list[dict[str, Any]], title: str) -> bytes:
    """Returns a PNG of 1000 x 460 pixels from the lines of metrics.jsonl: the loss, and beside it learning rate and
    evaluation metrics, each in a panel of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, tuple[list[int], list[float]]] = {}  # steps and values
    for record in records:
        for key, value in record.items():
            if value is not None and (key in ("loss", "lr") or key.startswith("eval/")):
                steps, values = points.setdefault(key, ([], []))
                steps.append(record["step"])
                values.append(value)
    beside = [key for key in sorted(points, key=lambda key: key != "lr") if key not in ("loss", "eval/loss")]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic([["loss", "loss", key] for key in beside] or [["loss"]], sharex=True)
    for key, (steps, values) in points.items():
        panel, few = panels.get(key, panels["loss"]), len(steps) <= 10
        label = {"loss": "training", "eval/loss": "evaluation"}.get(key, format_number(values[-1]))
        if key == "loss" and not few:  # a running mean, narrow where the loss falls fast
            panel.plot(steps, values, color="tab:blue", alpha=0.4, linewidth=1)
            widths = [min(i, len(values) // 30) for i in range(len(values))]
            values = [statistics.fmean(values[i - width : i + width + 1]) for i, width in enumerate(widths)]
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
        if key == "lr" or len(points.get(key, ((), ()))[0]) == 1:  # one value fills no axis: show it against zero
            panel.set_ylim(bottom=0)
    panels["loss"].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def format_number(value: float | None) -> str:
    """Returns a number as the terminal, the legend and the final table show it."""
    if value is None or isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.2e}"
