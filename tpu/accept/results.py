"""The tables of results in README.md and docs/results.md, made of what commands have written: the
files of make accept, grid.json of make grid, summary.json of a run.

A row is what a file says, and a recipe of which no file is given was never run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InputError
from tpu.accept.checks import OK
from tpu.accept.expected import RECIPES, SCRIPTS
from tpu.accept.page import cell, duration, machine, numbers, version_of

BEGIN = "<!-- made by: python3 -m tpu.accept --table docs/accepted/*.json -->"
END = "<!-- end of the table -->"
NEVER = "**never run**"
# The pages with a table, from the project's folder. That of README.md has the published recipes,
# and of everything else only what was run.
README = Path("README.md")
RESULTS = Path("docs/results.md")
PAGES = (README, RESULTS)
HEADER = ("recipe (published)", "hardware", "time", "metric", "log")

# Flags that make no other recipe of a recipe: where a run is, what it reads, how it is watched.
NEUTRAL = (
    "data",
    "device",
    "log-every",
    "name",
    "no-strict",
    "report",
    "runs",
    "safe-forms",
    "save-every",
    "seed",
    "workers",
)
# What flags are that a command leaves out, by script and preset.
USUAL = {
    ("glue", "tiny"): {"model": "bert", "task": "sst2"},
    ("glue", "full"): {"model": "bert", "task": "mrpc"},
    ("squad", "tiny"): {"model": "bert"},
    ("squad", "full"): {"model": "bert"},
    ("pretrain", "tiny"): {"model": "bert"},
    ("pretrain", "full"): {"model": "bert"},
    ("tagging", "tiny"): {"model": "bert"},
    ("tagging", "full"): {"model": "bert"},
}
WHAT_TO_GIVE = "give a file of make accept, grid.json of make grid, or summary.json of a run"


@dataclass(frozen=True)
class Trained:
    """What a command trains.

    Attributes:
        script: in train/.
        preset: "": the script chooses it by the data.
        flags: by their names without the dashes before them, without those in NEUTRAL.
        data: the last part of what it reads; "": its own synthetic data.
    """

    script: str
    preset: str
    flags: dict[str, str]
    data: str = ""

    def shown(self) -> str:
        """Returns the command in words, without what does not matter."""
        words = [f"train.{self.script}", self.preset]
        for name, value in self.flags.items():
            words += [f"--{name}", value]
        on_data = f" on {self.data}" if self.data else ""
        return f"`{' '.join(filter(None, words))}`{on_data}"


@dataclass(frozen=True)
class Result:
    """A row of the tables.

    Attributes:
        recipe: of which it is, a key of `labels`; "": of none.
        label: what was trained.
        hardware, time, metric: in words.
        path: of the file that says it, from the project's folder.
        version: of the project; "": the file does not say it.
    """

    recipe: str
    label: str
    hardware: str
    time: str
    metric: str
    path: Path
    version: str


# ---- recipes -----------------------------------------------------------------------------------


def labels() -> dict[str, str]:
    """Returns what the rows of all recipes are called, by name: trials, predictions, and published
    ones with what was published."""
    found = {f"trial {script.name}": f"trial: {script.label}" for script in SCRIPTS}
    for script in SCRIPTS:
        if script.predicts:
            found[f"predict {script.name}"] = f"predict: {script.label}"
    for name, recipe in RECIPES.items():
        published = f" ({recipe.target})" if recipe.target else ""
        found[name] = f"{recipe.label}{published}"
    return found


def of_make(words: str) -> Trained:
    """Returns what `make train` of these words trains."""
    given = dict(word.split("=", 1) for word in words.split())
    model = given["MODEL"]
    task = given.get("TASK", "")
    preset = given.get("PRESET", "tiny")
    if model in ("resnet50", "dlrm", "transformer"):
        return Trained(model, preset, {})
    if task in ("pretrain", "squad"):
        return Trained(task, preset, {"model": model})
    if task == "ner":
        return Trained("tagging", preset, {"model": model})
    return Trained("glue", preset, {"model": model, "task": task})


def recipe_of(trained: Trained) -> str:
    """Returns the name of the recipe that a command trains, "trial dlrm" say; "": of none, since a
    flag differs."""
    known = {name: of_make(recipe.words) for name, recipe in RECIPES.items()}
    if not trained.data:
        known = {f"trial {script.name}": of_make(script.words) for script in SCRIPTS}
    usual = USUAL.get((trained.script, trained.preset), {})
    flags = {**usual, **trained.flags}
    for name, recipe in known.items():
        same = (recipe.script, recipe.preset, recipe.flags)
        if same == (trained.script, trained.preset, flags):
            return name
    return ""


def read_command(script: str, preset: str, words: list[str]) -> Trained:
    """Returns what a script trains with these words after its preset."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = value
        elif name:
            flags[name] = f"{flags[name]} {word}".strip()

    data = flags.get("data", "")
    if data == "synthetic":
        data = ""
    last_part = data.rstrip("/").rpartition("/")[2]
    kept = {name: value for name, value in flags.items() if name not in NEUTRAL}
    return Trained(script, preset, kept, last_part)


def label_of(trained: Trained) -> tuple[str, str]:
    """Returns the name of the recipe that was trained, or "", and what its row is called."""
    recipe = recipe_of(trained)
    if not recipe:
        return "", trained.shown()
    on_data = f", on {trained.data}" if trained.data else ""
    return recipe, f"{labels()[recipe]}{on_data}"


# ---- files -------------------------------------------------------------------------------------


def read(path: Path) -> list[Result]:
    """Returns the results that a file has.

    Raises:
        InputError: it has none, or is another file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is not there; {WHAT_TO_GIVE}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; {WHAT_TO_GIVE}") from None

    if not isinstance(found, dict):
        found = {}
    read_one = reader_of(found)
    if read_one is None:
        raise InputError(
            f"{path} was not written by make accept, make grid or make train, or by another "
            "version; leave it out"
        )
    try:
        return read_one(found, path)
    except InputError:  # a ValueError, too
        raise
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise InputError(
            f"{path} is not whole, or of another version ({error!r}); leave it out"
        ) from None


def reader_of(found: dict[str, Any]) -> Callable[[dict[str, Any], Path], list[Result]] | None:
    """Returns what reads a file of this content; None where no command writes such a file."""
    if found.get("written_by") == "tpu.accept" and found.get("format") == 1:
        return of_acceptance
    if "configurations" in found:
        return of_grid
    if "elapsed_seconds" in found:
        return of_run
    return None


def of_acceptance(found: dict[str, Any], path: Path) -> list[Result]:
    """Returns what an acceptance has measured."""
    results = []
    known = labels()
    for check in found["checks"]:
        name = check["recipe"]
        if check["outcome"] != OK or name not in known:
            continue
        result = Result(
            recipe=name,
            label=known[name],
            hardware=machine(found["hardware"]),
            time=duration(check["seconds"]),
            metric=numbers(check["metrics"]),
            path=path,
            version=version_of(found),
        )
        results.append(result)
    return results


def of_grid(found: dict[str, Any], path: Path) -> list[Result]:
    """Returns the best configuration of a grid, with its deviation.

    Raises:
        InputError: there is none of which all runs are finished.
    """
    if not found["best"]:
        raise InputError(
            f"{path} has no configuration of which all runs are finished; repeat the command of "
            "the grid, or leave the file out"
        )
    values = found["best"]["values"]
    configurations = found["configurations"]
    best = next(one for one in configurations if one["values"] == values)
    runs = []
    for run in found["runs"]:
        of_axes = {axis: value for axis, value in run["values"].items() if axis != "seed"}
        if of_axes == values:
            runs.append(run)

    name = found["metric"]
    if best["n"] == 1:
        metric = f"{name} {best['mean']:.4g}, one run"
    else:
        metric = (
            f"{name} {best['mean']:.4g} ± {best['standard_deviation']:.2g}, "
            f"median {best['median']:.4g}, {best['n']} runs"
        )
    if len(configurations) > 1:
        metric += f"; the best of {len(configurations)} configurations, on the same data"

    recipe, label = label_of(read_command(found["script"], found["preset"], runs[0]["flags"]))
    seconds = best["seconds"]
    result = Result(
        recipe=recipe,
        label=label,
        hardware=" and ".join(distinct(hardware_of(run.get("devices")) for run in runs)),
        time=f"{duration(seconds)} a run",
        metric=metric,
        path=path,
        version=" and ".join(distinct(run.get("version") or "" for run in runs)),
    )
    return [result]


def of_run(found: dict[str, Any], path: Path) -> list[Result]:
    """Returns what summary.json of a run says."""
    words = shlex.split(found["command"])
    recipe = ""
    label = found["name"]
    for position, word in enumerate(words[:-1]):
        if word == "-m" and words[position + 1].startswith("train."):
            script = words[position + 1][len("train.") :]
            rest = words[position + 2 :]
            preset = ""
            if rest and not rest[0].startswith("--"):
                preset, *rest = rest
            recipe, label = label_of(read_command(script, preset, rest))
            break
    result = Result(
        recipe=recipe,
        label=label,
        hardware=hardware_of(found["devices"]),
        time=duration(found["elapsed_seconds"]),
        metric=f"{numbers(found['metrics'])}; one run",
        path=path,
        version=found["version"] or "",
    )
    return [result]


def hardware_of(devices: dict[str, Any] | None) -> str:
    """Returns what a run ran on, in words."""
    return machine(devices) if devices else "unknown"


def distinct(words: Iterable[str]) -> list[str]:
    """Returns different words once each, in their order, without empty ones."""
    return list(dict.fromkeys(filter(None, words)))


# ---- the tables --------------------------------------------------------------------------------


def read_all(files: list[Path]) -> list[Result]:
    """Returns the results of files, by their names."""
    results = []
    for path in sorted(files, key=lambda path: path.name):
        results += read(path)
    return results


def row(result: Result, page: Path) -> str:
    """Returns a result's row in the table of a page."""
    log = f"[{result.path.stem}]({os.path.relpath(result.path, page.parent)})"
    if result.version:
        log += f", {result.version}"
    cells = [result.label, result.hardware, result.time, result.metric, log]
    return f"| {' | '.join(map(cell, cells))} |"


def table(results: list[Result], page: Path) -> str:
    """Returns the table of a page: a row for each result, and "never run" for a recipe without
    one."""
    lines = [f"| {' | '.join(HEADER)} |", "|---|---|---|---|---|"]
    for name, label in labels().items():
        found = [row(result, page) for result in results if result.recipe == name]
        if not found and (page != README or name in RECIPES):
            found = [f"| {cell(label)} | {NEVER} | | | |"]
        lines += found
    lines += [row(result, page) for result in results if not result.recipe]
    return "\n".join(lines)


def with_table(text: str, results: list[Result], page: Path) -> str:
    """Returns a page's text with the table between its two marks; raises InputError where they are
    missing."""
    pattern = f"{re.escape(BEGIN)}\n.*?{re.escape(END)}"
    if len(re.findall(pattern, text, re.DOTALL)) != 1:
        remedy = "put both back, around the table"
        raise InputError(f"{page} has not once {BEGIN} and {END}; {remedy}")
    made = f"{BEGIN}\n{table(results, page)}\n{END}"
    return re.sub(pattern, lambda _: made, text, flags=re.DOTALL)
