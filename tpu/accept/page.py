"""What an acceptance leaves: a JSON file, and a page beside it that a person can send."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tpu.accept.checks import FAILED, OK

HOW_TO_SEND = """
## How to send it

Send this page and the JSON file of the same name; of what failed its log, too. They name the TPU, \
the folder of the runs and paths of this machine: read them first. For the tables of \
README.md and docs/results.md put the JSON file into docs/accepted and run \
`python3 -m tpu.accept --table docs/accepted/*.json`.
"""
GIBIBYTE = 2**30
MINUTES_UP_TO = 6000  # seconds; a longer run is shown in hours


def write(path: Path, content: str) -> None:
    """Writes a file, whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(content)
    os.replace(new, path)


# ---- words -------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Returns a text that does not break a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def numbers(metrics: dict[str, float]) -> str:
    """Returns metrics in words: auc 0.8025, ne 0.79."""
    words = []
    for name, value in metrics.items():
        finite = isinstance(value, (int, float))  # summary.json has null where it is not
        words.append(f"{name} {value:.4g}" if finite else f"{name} not finite")
    return ", ".join(words)


def machine(hardware: dict[str, Any]) -> str:
    """Returns the hardware in words: 8 x TPU v6 lite, 2 hosts."""
    if not hardware:
        return "unknown: no run started"
    noun = "hosts" if hardware["hosts"] > 1 else "host"
    return f"{hardware['devices']} x {hardware['kind']}, {hardware['hosts']} {noun}"


def version_of(found: dict[str, Any]) -> str:
    """Returns the project's version in an acceptance; "" where it is not known."""
    return found.get("git", {}).get("version", "")


def duration(seconds: float) -> str:
    """Returns a time in words: 1.5 min, 2.5 h."""
    if seconds < MINUTES_UP_TO:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def measured(check: dict[str, Any]) -> str:
    """Returns what a check has measured, in words."""
    words = []
    if check["metrics"]:
        words.append(numbers(check["metrics"]))
    step = check["step"]
    if step:
        least, median, most = (1000 * step[name] for name in ("least", "median", "most"))
        input_wait = f"{100 * step['input_wait']:.0f} % input wait"
        words.append(f"a step {median:.1f} ms ({least:.1f} to {most:.1f}; {input_wait})")
    for name, of in (("chip_bytes", "a chip"), ("host_bytes", "the host")):
        if check[name]:
            words.append(f"{check[name] / GIBIBYTE:.2f} GiB of {of}")
    return "; ".join(words)


# ---- the page ----------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """Returns the page: hardware, software, what was tried, what failed and its last lines, how to
    send it."""
    checks = found["checks"]
    lines = head(found)
    lines += [
        "",
        "| what was tried | outcome | seconds | measured |",
        "| --- | --- | --- | --- |",
    ]
    lines += [row(check) for check in checks]
    if found["left_running"]:
        lines += ["", "**Something may still run**: " + "; ".join(found["left_running"])]
    for check in checks:
        if check["outcome"] == FAILED:
            lines += failure(check)
    lines.append(HOW_TO_SEND)
    return "\n".join(lines)


def head(found: dict[str, Any]) -> list[str]:
    """Returns the page's title, and with what hardware and software it was."""
    outcomes = {}
    for check in found["checks"]:
        outcomes[check["outcome"]] = outcomes.get(check["outcome"], 0) + 1
    counted = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
    commit = found["git"].get("commit", "unknown")
    changed = ", with changed files" if found["git"].get("dirty") else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        f"# Acceptance of {found['target']}: {counted}",
        "",
        f"* date: {found['date']}, {found['seconds']} s",
        f"* hardware: {machine(found['hardware'])}",
        f"* software: {versions or 'unknown'}",
        f"* version: {version_of(found) or 'unknown'}, commit {commit}{changed}",
        f"* command: `{found['command']}`",
    ]


def row(check: dict[str, Any]) -> str:
    """Returns a check's row of the page's table."""
    outcome = check["outcome"]
    said = [measured(check)]
    if outcome == OK and check["name"] != "doctor":
        said += check["notes"]
    if check["why"]:
        said.append(check["why"])
    words = cell("; ".join(filter(None, said)))

    shown = f"**{FAILED}**" if outcome == FAILED else outcome
    return f"| {check['name']} | {shown} | {check['seconds']:.0f} | {words} |"


def failure(check: dict[str, Any]) -> list[str]:
    """Returns what the page says of a check that failed."""
    return [
        "",
        f"## {check['name']} failed",
        "",
        check["why"],
        "",
        "To repeat it:",
        "",
        *(f"    {command}" for command in check["commands"]),
        "",
        f"Exit codes {check['exit_codes']}; the end of {check['log']}:",
        "",
        *(f"    {line}" for line in check["last_lines"]),
    ]
