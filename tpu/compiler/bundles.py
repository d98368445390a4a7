"""Counts the code of operations; to gathers, scatters, sorts and reshapes the compiler gives no
estimate.

libtpu writes the code of each operation into a folder, if it is told so before it is loaded. Its
unit is the bundle, what a core issues at once: a cycle, or more where it waits. A bundle of a loop
counts as often as the loop runs, which stands in the loop's exit test, or as often as it runs at
most: a scatter's inner loop over 16 rows at a time ends early in the last round of the outer one.
The count is no bound: it knows nothing of waiting (for memory, for other chips), takes all code
that a branch may skip, and counts a loop once if how often it runs is not in the code.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

PASSES = "final_bundles|deduplication-map"  # of the compiler, whose code is written
FLAGS = f"--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={PASSES}"

# A line of the code, such as:
# " 0x2 LB: > { %s1 = sadd.s32 …, %p8 = scmp.ge.s32 %s1, 33 /* loop exit test */ }"
BUNDLE = re.compile(r" *(?:0x[0-9a-f]+|0) +(?:\w\w)? *: [> ]*\{")
REGION = re.compile(r"Start region (\d+)")
EXIT = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
BRANCH = re.compile(r"sbr\.rel \(!?(%p\w+)\) target = \$region(\d+)")
# What an exit test compares with is min(number, constant), written as a conditional move, and may
# be spilled.
TEST = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder %\w+, (%s\w+)")
BELOW = re.compile(r"(%p\w+) = scmp\.lt\.s32\.totalorder (%s\w+), (\d+)")
MOVE = re.compile(r"(%s\w+) = smov\.u32 \(!(%p\w+), (%s\w+)\), (\d+)")
SPILL = re.compile(r"sst \[smem:\[(#\w+_spill)\]\] (%s\w+)")
RELOAD = re.compile(r"(%s\w+) = sld \[smem:\[(#\w+_spill)\]\]")

FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
EQUAL = re.compile(r"key:(.+)\nordinal:\d+\nequivalent_hlos\[size=\d+\]:\n((?: .+\n)*)")


@dataclass(frozen=True)
class Bundles:
    """Bundles of one run of an operation.

    Attributes:
        unknown_loops: how many of its loops were counted once.
    """

    count: int
    unknown_loops: int


@dataclass(frozen=True)
class Loop:
    """A loop in the code of an operation.

    Attributes:
        first: number of its first bundle.
        end: number of the bundle after its last one.
        runs: how often it runs; None where the code does not say.
    """

    first: int
    end: int
    runs: int | None


def folder() -> tempfile.TemporaryDirectory:
    """Returns a temporary folder for `dump_to`."""
    has_space = " " in tempfile.gettempdir()
    return tempfile.TemporaryDirectory(dir="/tmp" if has_space else None)


def dump_to(folder: str) -> None:
    """Has libtpu write the code of what it compiles into a folder.

    Its name has no space: libtpu would take it for two flags. Call it before libtpu is loaded.
    """
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} --xla_jf_dump_to={folder} {FLAGS}".strip()


def read(folder: str) -> dict[str, Bundles]:
    """Returns {name of an instruction of the optimized module: its Bundles} of the last program
    compiled; raises RuntimeError where libtpu has written none."""
    files = {}  # by the name of an instruction; the last one is that of the last program
    for path in sorted(Path(folder).iterdir()):
        match = FILE.fullmatch(path.name)
        if match:
            files[match[1]] = path
    if not files:
        raise RuntimeError(
            f"libtpu wrote no code into {folder}: has the name a space, or the disk no room?"
        )

    found = {}
    for name, path in files.items():
        found[name] = count(path.read_text(errors="replace"))
    for path in sorted(Path(folder).glob("*-deduplication-map.txt")):
        for name, equal in EQUAL.findall(path.read_text()):  # equal operations have one code
            if name in found:
                found |= dict.fromkeys(equal.split(), found[name])
    return found


def count(code: str) -> Bundles:
    """Counts the bundles of an operation's code."""
    bundles = 0
    starts: dict[str, int] = {}  # region -> its first bundle
    runs = _at_most(code)  # predicate of an exit test -> how often its loop runs
    loops = []
    for line in code.splitlines():
        if BUNDLE.match(line):
            bundles += 1
        for region in REGION.findall(line):
            starts[region] = bundles - 1
        for predicate, times in EXIT.findall(line):
            runs[predicate] = int(times)
        for predicate, region in BRANCH.findall(line):
            if region in starts:  # backwards: the end of a loop
                loops.append(Loop(starts[region], bundles, runs.get(predicate)))

    times = [1] * bundles  # that each bundle runs
    unknown_loops = 0
    for loop in loops:
        if loop.runs is None:
            unknown_loops += 1
        body = times[loop.first : loop.end]
        times[loop.first : loop.end] = [each * (loop.runs or 1) for each in body]
    return Bundles(sum(times), unknown_loops)


def _at_most(code: str) -> dict[str, int]:
    """Returns {predicate of an exit test: how often its loop runs at most} where the code limits it
    to a constant."""
    below = {}  # predicate -> (register, what it is below)
    for predicate, register, most in BELOW.findall(code):
        below[predicate] = (register, most)

    limits = {}  # register -> its largest value
    for target, predicate, register, most in MOVE.findall(code):
        if below.get(predicate) == (register, most):
            limits[target] = int(most)

    spilled = dict(SPILL.findall(code))  # memory -> register
    reloaded = {}
    for target, memory in RELOAD.findall(code):
        if spilled.get(memory) in limits:
            reloaded[target] = limits[spilled[memory]]
    limits |= reloaded

    tests = {}
    for predicate, register in TEST.findall(code):
        if register in limits:
            tests[predicate] = limits[register]
    return tests
