"""Tries on a new kind of TPU, or here, what the project promises, and writes accept-<date>.json and
accept-<date>.md.

    python3 -m tpu.accept --tpu my-tpu --zone us-east5-b --runs gs://my-bucket/accept
    python3 -m tpu.accept --only resnet50 stop
        on this machine, only what begins with these words
    python3 -m tpu.accept --tpu my-tpu --recipe bert-mrpc --data nyu-mll/glue \\
        --runs gs://my-bucket/runs
    python3 -m tpu.accept --table docs/accepted/*.json
        the tables of README.md and docs/results.md, from such files, from grid.json of make grid
        and from summary.json of runs

`make accept TPU=…` calls it. It trains, kills, resumes and stops runs under names of their own, and
leaves none running, also after Ctrl-C. Exit codes: 0: nothing failed (what is not there, or was not
run, is listed); 1: something failed; 2: what you can fix; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

from errors import InputError
from tpu.accept import page, results
from tpu.accept.checks import Acceptance, Options
from tpu.accept.children import Limits, catch_signals, say
from tpu.accept.expected import RECIPES

PROGRAM_LIMIT = 1800  # seconds that a program may take; a recipe: no limit


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tpu.accept",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument

    # Where.
    add(
        "--tpu",
        default="",
        help="name of a TPU VM, or ssh:host1,host2; default, and local: this machine",
    )
    add("--zone", default="", help="default: gcloud's")
    add("--project", default="", help="default: gcloud's")
    add(
        "--runs",
        default="",
        help="folder or URL of the runs that it makes; several workers must share it (here: runs)",
    )
    add(
        "--out",
        default="",
        help="what it writes: <out>.json, <out>.md, logs in <out>/ (default: accept-<date>)",
    )

    # What.
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="checks whose name begins so; a wrong one lists them",
    )
    add(
        "--python",
        default="",
        help="interpreter of the environment, for make (default: make's choice)",
    )
    add(
        "--recipe",
        default="",
        choices=["", *RECIPES],
        metavar="RECIPE",
        help=f"one of: {', '.join(RECIPES)}; see --data",
    )
    add("--data", default="", help="what the recipe reads")
    add(
        "--name",
        default="",
        help="of the recipe's run: the same one resumes it (default: date and recipe)",
    )
    add("--train-args", default="", help='flags of all runs: --train-args="--safe-forms"')
    add(
        "--words",
        default="",
        help='further words of make train: --words "LIBTPU_VERSION=0.0.51"',
    )
    add(
        "--launch-args",
        default="",
        help='flags of python3 -m tpu.launch: --launch-args="--lost-after 600"',
    )

    # For how long.
    add(
        "--limit",
        type=float,
        help="seconds that a program may take (default: 1800; with --recipe 0, no limit)",
    )
    add(
        "--silent",
        type=float,
        default=420,
        help="seconds without a line that a run may take; 0: no limit (default 420)",
    )
    add(
        "--ending",
        type=float,
        default=300,
        help="seconds that a run may take to save and end (default 300)",
    )
    add(
        "--slow",
        type=float,
        default=0,
        help="how many times its estimate a step may take (default: 2; 4 of the roofline)",
    )
    add(
        "--table",
        nargs="*",
        metavar="FILE",
        help="write the tables of README.md and docs/results.md from these files, and do nothing "
        "else",
    )
    return parser.parse_args(arguments)


def write_table(names: list[str]) -> None:
    """Writes the tables of README.md and docs/results.md from files that commands have written."""
    files = list(dict.fromkeys(Path(name) for name in names))  # each once
    if len(files) == 1 and "*" in names[0]:  # the shell found none
        files = []
    for file in files:
        if file.is_absolute() or ".." in file.parts:
            raise InputError(
                f"{file} cannot be linked to from {results.RESULTS}; give files in docs/accepted, "
                f"from {Path.cwd()}"
            )
    found = results.read_all(files)
    texts = {}
    for path in results.PAGES:
        texts[path] = results.with_table(path.read_text(encoding="utf-8"), found, path)
    for path, text in texts.items():
        page.write(path, text)
    pages = " and ".join(map(str, results.PAGES))
    print(f"{pages} have {len(found)} results of {len(files)} files")


def to_options(given: argparse.Namespace) -> Options:
    """Returns the options of an acceptance; raises InputError for what cannot be used."""
    if given.recipe and not given.data:
        raise InputError(f"--recipe {given.recipe} needs --data: what it reads (docs/data.md)")
    for flag, value in (("--data", given.data), ("--name", given.name)):
        if value and not given.recipe:
            remedy = "give --recipe RECIPE, too"
            raise InputError(f"{flag} is {value}, but trials take none; {remedy}")
    remote = given.tpu not in ("", "local")
    needed = ["Makefile"]
    if remote:
        needed.append(".git")  # the workers get what git knows
    for name in needed:
        if not Path(name).exists():
            remedy = "start it from the project's folder, a clone"
            raise InputError(f"{Path.cwd()} has no {name}; {remedy}")

    limit = given.limit
    if limit is None:
        limit = 0 if given.recipe else PROGRAM_LIMIT
    runs_here = "" if remote else "runs"
    return Options(
        tpu=given.tpu,
        zone=given.zone,
        project=given.project,
        runs=given.runs or runs_here,
        out=Path(given.out or time.strftime("accept-%Y%m%d-%H%M%S")),
        only=given.only,
        python=given.python,
        recipe=given.recipe,
        data=given.data,
        name=given.name,
        train_args=given.train_args,
        words=given.words,
        launch_args=given.launch_args,
        limits=Limits(whole=limit, silent=given.silent, ending=given.ending),
        slow=given.slow,
        command=shlex.join(["python3", "-m", "tpu.accept", *sys.argv[1:]]),
    )


def accept(options: Options) -> int:
    """Runs the checks, and writes the files after each. Returns the exit code."""
    file = options.out.with_name(f"{options.out.name}.json")
    sheet = options.out.with_name(f"{options.out.name}.md")

    def written(acceptance: Acceptance) -> None:
        found = acceptance.found()
        try:
            page.write(file, json.dumps(found, indent=1) + "\n")
            page.write(sheet, page.page(found))
        except OSError as error:  # what follows is tried all the same
            failed = f"cannot write {error.filename}: {error.strerror}"
            print(f"warning: {failed}; make room or access", file=sys.stderr)

    acceptance = Acceptance(options, Path.cwd(), written)
    names = [planned.name for planned in acceptance.plan()]
    check_only(options, names)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failed = f"cannot write {options.out}: {error.strerror}"
        raise InputError(f"{failed}; give another --out") from None

    where = f"{acceptance.target.name}; logs in {options.out}"
    say(f"{len(names)} checks on {where}; Ctrl-C ends what runs")
    code = acceptance.run()
    say(f"{sheet} is the page, {file} the figures")
    for left in acceptance.left:
        print(f"may still run: {left}", file=sys.stderr, flush=True)
    return code


def check_only(options: Options, names: list[str]) -> None:
    """Checks that each word of --only begins the name of a check. InputError, with the names of all
    checks: one does not."""
    for word in options.only:
        if any(name.startswith(word) for name in names):
            continue
        without_only = dataclasses.replace(options, only=[])
        everything = Acceptance(without_only, Path.cwd(), written=lambda _: None)
        known = ", ".join(planned.name for planned in everything.plan())
        raise InputError(f"--only {word} begins no check; the checks are: {known}")


def main() -> int:
    """Runs the command line. Returns the exit code."""
    given = read_options(sys.argv[1:])
    try:
        if given.table is not None:
            write_table(given.table)
            return 0
        options = to_options(given)
        catch_signals()
        return accept(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
