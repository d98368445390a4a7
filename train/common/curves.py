"""The picture of a run: curves.png."""

import io
import itertools
import statistics
from typing import Any

DOTS = {"marker": "o", "markersize": 4}


def draw_curves(records: list[dict[str, Any]], title: str) -> bytes:
    """Returns a PNG of 1000 x 460 pixels from the lines of metrics.jsonl: loss, learning rate, evaluation metrics."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = dict.fromkeys(key for record in records for key in record if key.startswith("eval/") and key != "eval/loss")
    series = {key: _points(records, key) for key in ["loss", "lr", "eval/loss", *keys]}
    keys = [key for key in keys if series[key][0]]
    size = {key: max(map(abs, series[key][1])) for key in keys}
    # Accuracy and F1 share a panel; accuracy and perplexity do not.
    near = [key for key in keys if 0.1 * size[keys[0]] <= size[key] <= 10 * size[keys[0]]]
    groups = [group for group in (near, [key for key in keys if key not in near]) if group]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    columns = figure.add_gridspec(1, 2 if groups else 1, wspace=0.06)
    heights = [3, 1] if series["lr"][0] else [1]
    left = columns[0].subgridspec(len(heights), 1, height_ratios=heights)
    right = columns[-1].subgridspec(max(len(groups), 1), 1)
    loss = figure.add_subplot(left[0], ylabel="loss")
    rates = [figure.add_subplot(left[1], ylabel="learning rate", sharex=loss)] if series["lr"][0] else []
    panels = [figure.add_subplot(right[row], ylabel="evaluation", sharex=loss) for row in range(len(groups))]

    _draw_loss(loss, *series["loss"])
    if series["eval/loss"][0]:
        loss.plot(*series["eval/loss"], color="tab:orange", label="evaluation", **DOTS)
    for rate in rates:
        rate.plot(*series["lr"], color="tab:gray", **(DOTS if len(series["loss"][0]) <= 10 else {}))
        rate.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
        rate.set_ylim(bottom=0)
    colors = itertools.cycle(["tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown", "tab:cyan"])
    for panel, group in zip(panels, groups, strict=True):
        for key in group:
            label = f"{key.removeprefix('eval/').replace('_', ' ')} {format_number(series[key][1][-1])}"
            panel.plot(*series[key], color=next(colors), linewidth=2, label=label, **DOTS)
            if len(series[key][0]) == 1:  # one value fills no axis: show it against zero
                panel.set_ylim(bottom=0)
    loss.xaxis.get_major_locator().set_params(integer=True)
    for column in ([loss, *rates], panels):
        for panel in column:
            if panel.lines and panel not in rates:
                panel.legend(frameon=False)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelbottom=panel is column[-1])
            panel.set_xlabel("step" if panel is column[-1] else "")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def _points(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of the records that have a key."""
    pairs = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _draw_loss(panel: Any, steps: list[int], values: list[float]) -> None:
    """Draws a running mean over the training loss, narrow where it falls fast; a few values as dots."""
    few = len(values) <= 10
    if not few:
        panel.plot(steps, values, color="tab:blue", alpha=0.4, linewidth=1)
        widths = [min(i, len(values) // 30) for i in range(len(values))]
        values = [statistics.fmean(values[i - width : i + width + 1]) for i, width in enumerate(widths)]
    if steps:
        panel.plot(steps, values, color="tab:blue", linewidth=2, label="training", **(DOTS if few else {}))


def format_number(value: float | None) -> str:
    """Returns a number as the terminal, the legend and the final table show it."""
    if value is None or isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.2e}"
