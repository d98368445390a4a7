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

    points: dict[str, tuple[list[int], list[float]]] = {}  # steps and values
    for record in records:
        for key, value in record.items():
            if value is not None and (key in ("loss", "lr") or key.startswith("eval/")):
                steps, values = points.setdefault(key, ([], []))
                steps.append(record["step"])
                values.append(value)
    size = {key: max(map(abs, points[key][1])) for key in points if key not in ("loss", "lr", "eval/loss")}
    # Accuracy and F1 share a panel; accuracy and perplexity do not.
    near = [key for key in size if 0.1 * next(iter(size.values())) <= size[key] <= 10 * next(iter(size.values()))]
    groups = [group for group in (near, [key for key in size if key not in near]) if group]

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    columns = [["loss"] * 6 + ["lr" if "lr" in points else "loss"] * 2]
    columns += [["0"] * 4 + [str(len(groups) - 1)] * 4] if groups else []
    panels = figure.subplot_mosaic([list(row) for row in zip(*columns, strict=True)], sharex=True)
    loss, few = panels["loss"], len(points.get("loss", ((), ()))[0]) <= 10
    if "loss" in points:
        steps, values = points["loss"]
        if not few:  # a running mean, narrow where the loss falls fast
            loss.plot(steps, values, color="tab:blue", alpha=0.4, linewidth=1)
            widths = [min(i, len(values) // 30) for i in range(len(values))]
            values = [statistics.fmean(values[i - width : i + width + 1]) for i, width in enumerate(widths)]
        loss.plot(steps, values, color="tab:blue", linewidth=2, label="training", **(DOTS if few else {}))
    if "eval/loss" in points:
        loss.plot(*points["eval/loss"], color="tab:orange", label="evaluation", **DOTS)
    if "lr" in points:
        panels["lr"].plot(*points["lr"], color="tab:gray", **(DOTS if few else {}))
        panels["lr"].ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
        panels["lr"].set_ylim(bottom=0)
    colors = itertools.cycle(["tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown", "tab:cyan"])
    for number, group in enumerate(groups):
        for key in group:
            label = f"{key.removeprefix('eval/').replace('_', ' ')} {format_number(points[key][1][-1])}"
            panels[str(number)].plot(*points[key], color=next(colors), linewidth=2, label=label, **DOTS)
            if len(points[key][0]) == 1:  # one value fills no axis: show it against zero
                panels[str(number)].set_ylim(bottom=0)
    loss.xaxis.get_major_locator().set_params(integer=True)
    for name, panel in panels.items():
        lowest = name in [column[-1] for column in columns]
        panel.set(ylabel={"loss": "loss", "lr": "learning rate"}.get(name, "evaluation"), xlabel="step" * lowest)
        panel.tick_params(labelbottom=lowest)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.lines and name != "lr":
            panel.legend(frameon=False)
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
