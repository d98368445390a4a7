"""Counts the code of operations to which the compiler gives no estimate: gathers, scatters, sorts, reshapes.

libtpu writes the code of each operation into a folder, if it is told so before it is loaded. Its unit is the bundle,
what a core issues at once: a cycle, or more where it waits. A bundle of a loop counts as often as the loop runs, which
stands in the loop's exit test. The count is no bound: it knows nothing of waiting (for memory, for other chips), takes
all code that a branch may skip, and counts a loop once if how often it runs is not in the code.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"

# A line of the code, such as: " 0x2 LB: > { %s1 = sadd.s32 …, %p8 = scmp.ge.s32 %s1, 33 /* loop exit test */ }"
BUNDLE = re.compile(r" *(?:0x[0-9a-f]+|0) +(?:\w\w)? *: [> ]*\{")
REGION = re.compile(r"Start region (\d+)")
EXIT = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
BRANCH = re.compile(r"sbr\.rel \(!?(%p\w+)\) target = \$region(\d+)")
FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


@dataclass(frozen=True)
class Bundles:
    """Bundles of one run of an operation. `unknown_loops`: how many of its loops were counted once."""

    count: int
    unknown_loops: int


def dump_to(folder: str) -> None:
    """Has libtpu write the code of what it compiles into a folder. Call it before libtpu is loaded."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} --xla_jf_dump_to={folder} {FLAGS}".strip()


def read(folder: str) -> dict[str, Bundles]:
    """Returns {name of an instruction of the optimized module: its Bundles} of the last program compiled."""
    files = {match[1]: path for path in sorted(Path(folder).iterdir()) if (match := FILE.fullmatch(path.name))}
    return {name: count(path.read_text(errors="replace")) for name, path in files.items()}


def count(code: str) -> Bundles:
    """Counts the bundles of an operation's code."""
    starts: dict[str, int] = {}  # region -> its first bundle
    runs: dict[str, int] = {}  # predicate of an exit test -> how often its loop runs
    loops: list[tuple[int, int, int | None]] = []  # first bundle, bundle after the last, runs
    bundles = 0
    for line in code.splitlines():
        bundles += bool(BUNDLE.match(line))
        starts |= dict.fromkeys(REGION.findall(line), bundles - 1)
        runs |= {predicate: int(times) for predicate, times in EXIT.findall(line)}
        for predicate, region in BRANCH.findall(line):
            if region in starts:  # backwards: the end of a loop
                loops.append((starts[region], bundles, runs.get(predicate)))
    times = [1] * bundles
    for first, end, often in loops:
        times[first:end] = [each * (often or 1) for each in times[first:end]]
    return Bundles(sum(times), sum(often is None for *_, often in loops))
