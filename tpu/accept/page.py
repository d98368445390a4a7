"""What an acceptance leaves: a JSON file, a page beside it that a person can send, and the table in docs/results.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from errors import InputError
from tpu.accept.checks import FAILED, OK
from tpu.accept.expected import RECIPES, SCRIPTS

BEGIN = "<!-- made by: python3 -m tpu.accept --table docs/accepted/*.json -->"
END = "<!-- end of the table -->"
NEVER = "**never run**"
RESULTS = Path("docs/results.md")  # from the project's folder; it has the table


def write(path: Path, content: str) -> None:
    """Writes a file, whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(content)
    os.replace(new, path)


def cell(text: str) -> str:
    """Returns a text that does not break a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def numbers(metrics: dict[str, float]) -> str:
    parts = []
    for name, value in metrics.items():
        finite = isinstance(value, (int, float))  # summary.json has null where it is not
        parts.append(f"{name} {value:.4g}" if finite else f"{name} {value}")
    return ", ".join(parts)


def machine(hardware: dict[str, Any]) -> str:
    """Returns the hardware in words: 8 x TPU v6 lite, 2 hosts."""
    if not hardware:
        return "unknown: no run started"
    hosts = hardware["hosts"]
    return f"{hardware['devices']} x {hardware['kind']}, {hosts} host{'s' if hosts > 1 else ''}"


def measured(check: dict[str, Any]) -> str:
    """Returns what a check has measured, in words."""
    parts = [numbers(check["metrics"])] if check["metrics"] else []
    step = check["step"]
    if step:
        least, median, most = (1000 * step[name] for name in ("least", "median", "most"))
        parts.append(f"a step {median:.1f} ms ({least:.1f} to {most:.1f}; {100 * step['input_wait']:.0f} % input wait)")
    for name, place in (("chip_bytes", "a chip"), ("host_bytes", "the host")):
        if check[name]:
            parts.append(f"{check[name] / 2**30:.2f} GiB of {place}")
    return "; ".join(parts)


def page(found: dict[str, Any]) -> str:
    """Returns the page: hardware, software, what was tried, what failed and its last lines, how to send it."""
    checks = found["checks"]
    count = {}
    for check in checks:
        count[check["outcome"]] = count.get(check["outcome"], 0) + 1
    counted = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
    commit = found["git"].get("commit", "unknown")
    changed = ", with changed files" if found["git"].get("dirty") else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# Acceptance of {found['target']}: {counted}",
        "",
        f"* date: {found['date']}, {found['seconds']} s",
        f"* hardware: {machine(found['hardware'])}",
        f"* software: {versions or 'unknown'}",
        f"* commit: {commit}{changed}",
        f"* command: `{found['command']}`",
        "",
        "| what was tried | outcome | seconds | measured |",
        "| --- | --- | --- | --- |",
    ]
    for check in checks:
        outcome = check["outcome"] if check["outcome"] != FAILED else f"**{FAILED}**"
        said = [measured(check), *(check["notes"] if check["outcome"] == OK and check["name"] != "doctor" else [])]
        if check["why"]:
            said.append(check["why"])
        words = cell("; ".join(filter(None, said)))
        lines.append(f"| {check['name']} | {outcome} | {check['seconds']:.0f} | {words} |")
    if found["left_running"]:
        lines += ["", "**Something may still run**: " + "; ".join(found["left_running"])]
    for check in checks:
        if check["outcome"] == FAILED:
            lines += ["", f"## {check['name']} failed", "", check["why"], "", "To repeat it:", ""]
            lines += [f"    {command}" for command in check["commands"]]
            lines += ["", f"Exit codes {check['exit_codes']}; the end of {check['log']}:", ""]
            lines += [f"    {line}" for line in check["last_lines"]]
    lines += [
        "",
        "## How to send it",
        "",
        "Send this page and the JSON file of the same name; of what failed its log, too. They name the TPU, the folder"
        " of the runs and paths of this machine: read them first. For the table of docs/results.md put the JSON file"
        " into docs/accepted and run `python3 -m tpu.accept --table docs/accepted/*.json`.",
        "",
    ]
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    """Reads the JSON file of an acceptance; raises InputError where it is none."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is not there; give the JSON files that make accept has written") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; give a JSON file that make accept has written") from None
    if not isinstance(found, dict) or found.get("written_by") != "tpu.accept" or found.get("format") != 1:
        raise InputError(f"{path} was not written by make accept, or by another version; leave it out")
    return found


def table(files: list[Path]) -> str:
    """Returns the table of results: a row per recipe and file that has it, "never run" where none has."""
    rows = {f"trial {script.name}": (f"trial: {script.label}", "") for script in SCRIPTS}
    rows.update({name: (recipe.label, recipe.target) for name, recipe in RECIPES.items()})
    results: dict[str, list[str]] = {name: [] for name in rows}
    for path in sorted(files, key=lambda path: path.name):
        found = read(path)
        for check in found["checks"]:
            if check["outcome"] != OK or check["recipe"] not in rows:
                continue
            label, target = rows[check["recipe"]]
            metric = numbers(check["metrics"]) + (f" ({target})" if target else "")
            minutes = (
                f"{check['seconds'] / 60:.1f} min" if check["seconds"] < 6000 else f"{check['seconds'] / 3600:.1f} h"
            )
            link = f"[{path.stem}]({os.path.relpath(path, RESULTS.parent)})"
            cells = [label, machine(found["hardware"]), minutes, metric, link]
            results[check["recipe"]].append(f"| {' | '.join(cell(each) for each in cells)} |")
    lines = ["| recipe (published) | hardware | time | metric | log |", "|---|---|---|---|---|"]
    for name, (label, target) in rows.items():
        published = f" ({target})" if target else ""
        lines += results[name] or [f"| {label}{published} | {NEVER} | | | |"]
    return "\n".join(lines)


def with_table(text: str, files: list[Path]) -> str:
    """Returns the page's text with the table between its two marks; raises InputError where they are missing."""
    pattern = f"{re.escape(BEGIN)}\n.*?{re.escape(END)}"
    if len(re.findall(pattern, text, re.DOTALL)) != 1:
        raise InputError(f"{RESULTS} has not once {BEGIN} and {END}; put both back, around the table")
    made = f"{BEGIN}\n{table(files)}\n{END}"
    return re.sub(pattern, lambda _: made, text, flags=re.DOTALL)
