"""The compiler's figures that pages, guards and benches read: files below research/results.

A file is a JSON object of records, in groups: {step: {topology: record}}, or {generation: {step:
{side: record}}}. Each record is one line, so that a diff shows which ones have changed. It has
those entries of a report (tpu/compiler/report.py) that something reads, and the fingerprint of its
program; `make compile` shows the others.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.common import files

FOLDER = Path(__file__).resolve().parents[2] / "research/results"

# Entries of a report by their paths; "*" stands for every name.
IDENTITY = ("libtpu", "fingerprint")
SHORTAGE = ("fits", "needed")  # of a step that does not fit, which has little else
MEMORY = ("memory.needed",)
CYCLES = ("cycles", "uncounted.bundles")
COLLECTIVES = ("collectives.*.count", "collectives.*.bytes")


def load(path: Path) -> dict:
    """Returns the figures that `save` wrote; {} where there are none."""
    if not path.exists():
        return {}
    return json.loads(path.read_text())


def save(path: Path, figures: dict) -> None:
    """Writes figures, whole or not at all: they took minutes each.

    Groups keep their order, which is that of the tables; entries of a record are sorted by name.

    Raises:
        InputError: the file cannot be written.
    """
    files.write_file(str(path), f"{_written(figures)}\n".encode())


def _written(figures: dict, indent: str = "") -> str:
    """Returns figures as JSON: a record in one line, a group with a line for each entry."""
    is_group = bool(figures) and all(isinstance(entry, dict) for entry in figures.values())
    if not is_group:
        return json.dumps(figures, sort_keys=True, ensure_ascii=False)

    lines = []
    for name, entry in figures.items():
        written = _written(entry, f"{indent} ")
        lines.append(f"{indent} {json.dumps(name, ensure_ascii=False)}: {written}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def record(report: dict, fields: Iterable[str]) -> dict:
    """Returns the entries of a report that `fields` name; those that it lacks are left out.

    Args:
        fields: paths, such as "memory.needed" or "collectives.*.bytes".
    """
    kept: dict[str, Any] = {}
    for field in fields:
        _copy(report, field.split("."), kept)
    return kept


def _copy(report: Mapping, path: list[str], kept: dict) -> None:
    """Copies the entry at `path` of a report into `kept`, if it is there."""
    first, *rest = path
    names = list(report) if first == "*" else [first]
    for name in names:
        if name not in report:
            continue
        if rest:
            _copy(report[name], rest, kept.setdefault(name, {}))
        else:
            kept[name] = report[name]


def in_order(group: dict, names: Iterable[str]) -> dict:
    """Returns a group with its entries in this order; those that `names` lacks come last."""
    known = [name for name in names if name in group]
    others = sorted(set(group) - set(known))
    return {name: group[name] for name in [*known, *others]}
