"""Median, mean and deviation over the seeds, and which configuration is best."""

from __future__ import annotations

import math
import shlex
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from train.grid.axes import SEED, Grid, as_flags
from train.grid.records import FINISHED, NEW, Record, contents

# The last word of a metric's name where lower is better, as in train/common/best.py, which a
# machine without the environment cannot import. Of all others higher is better.
LOWER_IS_BETTER = ("loss", "ppl", "ne", "mse")
# What the choice is worth, in the words of the page.
CHOSEN = (
    "What is best here was chosen on the evaluation data itself, as in most papers: the best of "
    "many is better there than on new data. So report a test set's number, or the median and the "
    "deviation."
)
SEEDS = "add --seed 0 1 2"


@dataclass(frozen=True)
class Metric:
    """What the runs are compared by."""

    name: str
    lower_is_better: bool

    def better(self, value: float) -> float:
        """Returns a number by which the best value is the largest."""
        return -value if self.lower_is_better else value

    def described(self) -> str:
        """Returns its name and its direction."""
        direction = "lower" if self.lower_is_better else "higher"
        return f"{self.name} ({direction} is better)"


@dataclass
class Configuration:
    """The runs that differ in their seed alone.

    Attributes:
        values: of the axes, without the seed.
        runs: how many there are to be.
        numbers: the metric of each finished run, by its seed ("": it does not vary).
        missing: the others by their seeds, and why.
        seconds: that a finished run took, on average.
    """

    values: dict[str, str]
    runs: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def median(self) -> float | None:
        """The median of its numbers; None without one."""
        return statistics.median(self.numbers.values()) if self.numbers else None

    @property
    def mean(self) -> float | None:
        """The mean of its numbers; None without one."""
        return statistics.fmean(self.numbers.values()) if self.numbers else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None where one number shows no spread."""
        return statistics.stdev(self.numbers.values()) if len(self.numbers) > 1 else None

    def shown(self) -> str:
        """Returns its values, in words."""
        return as_flags(self.values) or "the one configuration"

    def as_json(self) -> dict[str, Any]:
        """Returns what grid.json has of it."""
        numbers = self.numbers.values()
        return {
            **asdict(self),
            "n": len(numbers),
            "median": self.median,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "min": min(numbers, default=None),
            "max": max(numbers, default=None),
        }


def choose_metric(grid: Grid, records: list[Record]) -> Metric | None:
    """Returns what the runs are compared by: --metric, or the first of a finished run; None without
    either."""
    name = grid.metric
    if not name:
        for record in records:
            if record.metrics:
                name = next(iter(record.metrics))
                break
    if not name:
        return None
    if name.startswith("-"):
        return Metric(name[1:], lower_is_better=True)
    return Metric(name, lower_is_better=name.rpartition("_")[2] in LOWER_IS_BETTER)


def unknown_metric(grid: Grid, records: list[Record]) -> str:
    """Returns what is wrong with --metric, in a sentence; "" where a finished run has it, or none
    is finished."""
    metric = choose_metric(grid, records)
    finished = [record for record in records if record.state == FINISHED]
    if metric is None or not finished:
        return ""
    if any(metric.name in record.metrics for record in finished):
        return ""
    return f"--metric is {grid.metric}; the runs have {', '.join(finished[0].metrics)}"


def configurations(grid: Grid, records: list[Record], metric: Metric | None) -> list[Configuration]:
    """Returns all configurations, the best median first, those without a number last."""
    found: dict[tuple[str, ...], Configuration] = {}
    seconds: dict[tuple[str, ...], list[float]] = {}
    for record in records:
        key = grid.configuration(record.values)
        if key not in found:
            values = {axis: value for axis, value in record.values.items() if axis != SEED}
            found[key] = Configuration(values)
            seconds[key] = []
        configuration = found[key]
        configuration.runs += 1
        seed = record.values.get(SEED, "")
        missing = why_missing(record, metric)
        if missing:
            configuration.missing[seed] = missing
        else:
            configuration.numbers[seed] = record.metrics[metric.name]
        if record.state == FINISHED and record.seconds is not None:
            seconds[key].append(record.seconds)

    for key, configuration in found.items():
        if seconds[key]:
            configuration.seconds = statistics.fmean(seconds[key])

    def rank(configuration: Configuration) -> float:
        if configuration.median is None:
            return -math.inf
        return metric.better(configuration.median)

    return sorted(found.values(), key=rank, reverse=True)


def why_missing(record: Record, metric: Metric | None) -> str:
    """Returns why a run has no number in the table; "" where it has one."""
    if record.state == NEW:
        return "not run yet"
    if record.state != FINISHED:
        return f"{record.state}: {record.why}" if record.why else record.state
    if metric is None or metric.name not in record.metrics:
        name = metric.name if metric else "metric"
        return f"it has no {name}, but {', '.join(record.metrics) or 'none'}"
    if record.metrics[metric.name] is None:
        return f"its {metric.name} is not a finite number"
    return ""


def report(grid: Grid, records: list[Record]) -> tuple[dict[str, Any], str]:
    """Returns what grid.json has, and the text of grid.md."""
    metric = choose_metric(grid, records)
    found = configurations(grid, records, metric)
    best = [one for one in found if not one.missing][:1]

    content = contents(grid, records)
    content["metric"] = metric.name if metric else None
    content["lower_is_better"] = metric.lower_is_better if metric else None
    content["configurations"] = [one.as_json() for one in found]
    content["best"] = None
    if best:
        seed = best_seed(best[0], metric)
        content["best"] = {"values": best[0].values, "seed": seed}

    parts = [
        f"# {grid.name}",
        headline(grid, metric),
        "\n".join(rows(found, grid)),
        *missing_runs(records, metric),
        *(choice(best[0], found, records, metric, grid) if best else []),
        "grid.json has the command and the folder of each run, logs/ what it has printed.",
    ]
    return content, "\n\n".join(parts) + "\n"


def headline(grid: Grid, metric: Metric | None) -> str:
    """Returns what was varied, and what is fixed."""
    axes = ", ".join(f"--{axis} {shlex.join(values)}" for axis, values in grid.axes.items())
    fixed = shlex.join(grid.fixed) or "no other flag"
    shown = metric.described() if metric else "no metric yet"
    return f"train.{grid.script} {grid.preset}, {fixed}; varied: {axes}. Compared by {shown}."


def rows(found: list[Configuration], grid: Grid) -> list[str]:
    """Returns the lines of the table, in columns that also a terminal shows as such."""
    axes = [axis for axis in grid.axes if axis != SEED]
    titles = [*axes, "n", "median", "mean ± deviation", "min", "max", "time per run"]
    cells = [titles]
    for one in found:
        numbers = one.numbers.values()
        row = [shlex.quote(one.values[axis]) for axis in axes]
        row.append(f"{len(numbers)} of {one.runs}" if one.missing else str(one.runs))
        row.append(number(one.median))
        row.append(f"{number(one.mean)} ± {number(one.deviation)}" if numbers else "-")
        row.append(number(min(numbers, default=None)))
        row.append(number(max(numbers, default=None)))
        row.append(duration(one.seconds))
        cells.append([cell.replace("|", "\\|") for cell in row])

    widths = [max(map(len, column)) for column in zip(*cells)]  # noqa: B905 - of python3.10 on
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]  # noqa: B905
        lines.append(f"| {' | '.join(padded)} |")
    rule = "|".join("-" * (width + 2) for width in widths)
    return [lines[0], f"|{rule}|", *lines[1:]]


def missing_runs(records: list[Record], metric: Metric | None) -> list[str]:
    """Returns a list of the runs that have no number, and why; [] where all have one."""
    lines = []
    for record in records:
        why = why_missing(record, metric)
        if why:
            lines.append(f"* {record.shown()}: {why}")
    if not lines:
        return []
    total = len(records)
    return [f"Missing, {len(lines)} of {total} runs:", "\n".join(lines)]


def choice(
    best: Configuration,
    found: list[Configuration],
    records: list[Record],
    metric: Metric,
    grid: Grid,
) -> list[str]:
    """Returns paragraphs that say which configuration is best, which of its runs, and what that is
    worth."""
    seed = best_seed(best, metric)
    (folder,) = [
        record.folder
        for record in records
        if grid.configuration(record.values) == tuple(best.values.values())
        and record.values.get(SEED, "") == seed
    ]
    median = f"{metric.name} {number(best.median)}"
    run = f"{folder}, {metric.name} {number(best.numbers[seed])}"
    if best.runs == 1:
        chosen = f"Best: {best.shown()}, {median}, in {folder}. One run shows no spread: {SEEDS}."
    elif len(found) == 1:
        chosen = f"Median of {best.runs} runs: {median}. The best of them: {run}."
    else:
        chosen = (
            f"Best by its median of {best.runs} runs: {best.shown()}, {median}. "
            f"Its best run: {run}."
        )
    lines = [chosen]
    equal = [one.shown() for one in found if one is not best and ties(one, best)]
    if equal:
        lines.append(f"The median of {' and of '.join(equal)} is the same: the first is named.")
    for one in found:
        if one.missing and is_ahead(one, best, metric):
            lines.append(
                f"Not compared, since runs of it are missing: {one.shown()}, with a median of "
                f"{number(one.median)} so far."
            )
    return [*lines, CHOSEN]


def ties(one: Configuration, other: Configuration) -> bool:
    """Returns whether all runs of a configuration are there, and have the median of another."""
    return not one.missing and one.median == other.median


def is_ahead(one: Configuration, other: Configuration, metric: Metric) -> bool:
    """Returns whether the median of one configuration so far is better than that of another."""
    return one.median is not None and metric.better(one.median) > metric.better(other.median)


def best_seed(configuration: Configuration, metric: Metric) -> str:
    """Returns the seed of the best run of a configuration."""
    numbers = configuration.numbers
    return max(numbers, key=lambda seed: metric.better(numbers[seed]))


def number(value: float | None) -> str:
    """Returns a metric as the table shows it; "-" for one that is not there."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Returns 12.3 s, 4 min 05 s or 2 h 09 min; "-" where it is not known."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
