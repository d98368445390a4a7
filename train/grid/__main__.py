"""Trains all combinations of some flags' values, one run after the other, and writes a table with
the median and the deviation over the seeds.

    python -m train.grid glue tiny --lr 1e-3 2e-3 --seed 0 1 2

`make grid` calls it. A flag of one value that is given several is an axis; a run is the script's
ordinary command, which is printed. The same command goes on where it was stopped: a finished run
is not trained again, an unfinished one resumes, a failed one is tried again.

Flags of its own that follow the preset:

    --name NAME      of the grid's folder, and of its runs (default: what is trained, and the axes)
    --runs FOLDER    folder or URL that the grid's folder is in (default: runs)
    --metric NAME    what the table is about (default: the first of a run); -NAME: lower is better

Exit codes: 0: all runs are finished; 1: one has failed, or is missing; 2: what you can fix; 143:
stopped by SIGTERM or Ctrl-C, as the run that was stopped; 75: no TPU is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading

from errors import InputError
from train.grid.axes import Grid, plan
from train.grid.places import STOPPED, Here, NoResult, Tpu, say
from train.grid.records import FINISHED, RUNNING, STATES, GridFolder, Record, record_of
from train.grid.table import report, unknown_metric
from train.grid.work import LOOK, Work, catch_signals


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.grid",
        usage="%(prog)s [option ...] SCRIPT PRESET [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--check", action="store_true", help="only check the command line, and start nothing")
    add("--tpu", default="", help='names of TPUs, each of which takes the next run: "tpu1 tpu2"')
    add("--zone", default="", help="of the TPUs (default: gcloud's)")
    add("--project", default="", help="of the TPUs (default: gcloud's)")
    add("--launch-args", default="", help='flags of tpu.launch: --launch-args="--retries 2"')
    add("--word", action="append", default=[], help="a further word of make train on a TPU")
    add("--python", default="", help="with --tpu: an interpreter that can import the script")
    add("words", nargs=argparse.REMAINDER, help="the script, its preset, and its flags")
    options = parser.parse_args(arguments)
    if "--help" in options.words:
        if not options.check:
            parser.print_help()
        sys.exit(0)
    return options


def check_one_process() -> None:
    """Raises InputError inside torchrun: each of its processes would start all runs, and each run
    would wait for others of the same number."""
    count = os.environ.get("WORLD_SIZE", "")
    if count not in ("", "1"):
        raise InputError(
            f"WORLD_SIZE is {count}, as torchrun sets it, but a grid starts its runs by itself, "
            "each in one process: start it without torchrun, or unset WORLD_SIZE"
        )


def places_of(options: argparse.Namespace, grid: Grid) -> list[Here | Tpu]:
    """Returns where the runs run; InputError where TPUs could not share them."""
    names = options.tpu.split()
    if not names:
        return [Here()]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"TPU={options.tpu} has {name} twice; each takes one run at a time")
        if name == "local":
            raise InputError(f"TPU={options.tpu} has local, this machine; give TPUs, or it alone")
    if not grid.runs_root.startswith("gs://"):
        raise InputError(
            f"the runs would be in {grid.runs_root} of each TPU; give a bucket that all of them "
            "and this machine can read: ARGS='--runs gs://my-bucket/runs …'"
        )

    launch = []
    for flag, value in (("--zone", options.zone), ("--project", options.project)):
        if value:
            launch += [flag, value]
    launch += shlex.split(options.launch_args)
    return [Tpu(name, launch, options.word, options.project) for name in names]


def run(options: argparse.Namespace) -> int:
    """Runs the grid of a command line; returns the exit code."""
    check_one_process()
    grid = plan(options.words)
    places = places_of(options, grid)
    if options.check:
        return 0

    received = catch_signals()
    folder = GridFolder(grid)
    check_places(folder, places)
    if isinstance(places[0], Here):
        records = [record_of(grid, planned) for planned in grid.runs]
        states = check_runs(grid, sys.executable, look=True, received=received)
        take_states(grid, records, states, places[0])
    else:
        records = records_on_tpus(grid, folder)
        if options.python:
            check_runs(grid, options.python, look=False, received=received)
        else:
            say(
                "note: this machine has no environment, so only the names of the flags were "
                "checked; each run checks their values when it starts"
            )
    wrong_metric = unknown_metric(grid, records)
    if wrong_metric:
        raise InputError(wrong_metric)

    announce(grid, records)
    work = Work(grid, records, folder, places, received)
    code = work.do()
    say(f"\n{report(grid, records)[1]}")
    if code == STOPPED:
        say("stopped; the same command goes on")
    board = f"make board RUNS={shlex.quote(grid.runs_root)}"
    say(f"this table is {folder.path}/grid.md; curves of all: {board}")
    return code


def announce(grid: Grid, records: list[Record]) -> None:
    """Says what is to be done."""
    counts = [f"{len(values)} of --{axis}" for axis, values in grid.axes.items()]
    states = []
    for state in STATES:
        count = sum(record.state == state for record in records)
        if count:
            states.append(f"{count} {state}")
    say(
        f"grid {grid.folder}: {len(records)} runs, {' x '.join(counts)}; {', '.join(states)}; "
        "Ctrl-C stops it, and the same command goes on"
    )


# ---- before the first run ------------------------------------------------------------------------


def check_places(folder: GridFolder, places: list[Here | Tpu]) -> None:
    """Raises InputError where a run may still be running on a TPU that is not among these."""
    names = {place.name for place in places}
    for entry in folder.earlier.get("runs", []):
        place = entry["place"]
        if place and place not in names and entry["state"] == RUNNING:
            raise InputError(
                f"{entry['name']} was started on {place} and may still run there; add {place} to "
                f"TPU=, which watches it again; or end it by make stop TPU={place}, or delete that "
                f"TPU, and remove {folder.path}/grid.json"
            )


def check_runs(grid: Grid, python: str, look: bool, received: list[int]) -> list[str]:
    """Returns how far each run has come, as the script itself says, by its own checks.

    Args:
        python: an interpreter that can import the script.
        look: whether to look at the runs' folders. Without it all are new.
        received: signals that have come; they end it.
    Raises:
        InputError: a run's values cannot be used, or its folder has a run of others.
    """
    runs = []
    for planned in grid.runs:
        place = ["--runs", grid.runs_root, "--name", planned.name]
        runs.append([grid.preset, *planned.flags, *place])
    question = json.dumps({"script": grid.script, "look": look, "runs": runs})
    answers = json.loads(ask([python, "-m", "train.grid.check"], question, received))

    refused: dict[str, Record] = {}
    for planned, answer in zip(grid.runs, answers):  # noqa: B905 - of python3.10 on
        if "error" in answer:
            refused.setdefault(answer["error"], record_of(grid, planned))
    if refused:
        sentence, record = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} other reasons)" if len(refused) > 1 else ""
        raise InputError(
            f"{sentence}{more}; this is said of the run {record.shown()}, and none was started"
        )
    return [answer["state"] for answer in answers]


def ask(command: list[str], question: str, received: list[int]) -> str:
    """Returns the last line that a program answers to a question on its standard input. A signal
    ends it, and this process."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    answered: list[str] = []
    thread = threading.Thread(
        target=lambda: answered.append(process.communicate(question)[0]), daemon=True
    )
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
        if received:
            process.kill()
            thread.join()
            say("stopped before the first run")
            sys.exit(STOPPED)
    if process.returncode:
        raise InputError(
            f"{shlex.join(command)} ended with exit code {process.returncode}, see above; it "
            "checks the runs, and none was started"
        )
    return answered[0].splitlines()[-1]


def take_states(grid: Grid, records: list[Record], states: list[str], here: Here) -> None:
    """Notes how far the runs on this machine have come, and the results of those that are
    finished."""
    for record, state in zip(records, states):  # noqa: B905 - of python3.10 on
        record.state = state
        record.command = shlex.join(here.command(grid, record))
        if state == FINISHED:
            try:
                record.finish(here.read_summary(record))
            except NoResult as error:
                raise InputError(str(error)) from None


def records_on_tpus(grid: Grid, folder: GridFolder) -> list[Record]:
    """Returns what grid.json says of the runs. One that had other flags is new: if it is finished,
    its start says that it was trained with others."""
    earlier = {entry["name"]: entry for entry in folder.earlier.get("runs", [])}
    records = []
    for planned in grid.runs:
        record = record_of(grid, planned)
        entry = earlier.get(planned.name)
        if entry is not None:
            same = entry["flags"] == planned.flags and folder.earlier["preset"] == grid.preset
            if same or entry["state"] == RUNNING:
                record = Record(**{**entry, "flags": planned.flags})
        records.append(record)
    return records


def main() -> int:
    """Runs the command line; returns the exit code."""
    options = read_options(sys.argv[1:])
    try:
        return run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
