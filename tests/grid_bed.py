"""What the tests of a grid stand on: a project whose script is tests/fake_script.py.

train/grid is the real one, and so are the files of train/common that it needs to check a command
line. train/common/files.py, which imports torch, is replaced: nothing is written by it here.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COMMON = ("cli.py", "interrupt.py", "run_folder.py")
PREFIX = "bert-tiny-"  # of the names of runs
NAME = "bert-tiny-lr-seed"  # of the grid of WORDS
WORDS = "glue tiny --model bert --lr 1e-5 3e-5 --seed 0 1 2"


@dataclass
class Ended:
    """A grid that has ended."""

    code: int
    out: str
    err: str


# Reads from the folder `bucket` for gs://.
GCLOUD = """#!/bin/sh
[ "$1 $2" = "storage cat" ] || exit 3
exec cat "bucket/${3#gs://}"
"""


class Bed:
    """A project in a folder, and the command line of its grid."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        common = folder / "train/common"
        common.mkdir(parents=True)
        for name in ("errors.py", "optional.py"):
            (folder / name).symlink_to(ROOT / name)
        for name in COMMON:
            (common / name).symlink_to(ROOT / "train/common" / name)
        (common / "files.py").write_text("write_synced = None\n")
        (common / "__init__.py").touch()
        (folder / "train/__init__.py").touch()
        (folder / "train/grid").symlink_to(ROOT / "train/grid")
        (folder / "train/glue.py").write_text((TESTS / "fake_script.py").read_text())

        (folder / "tpu").mkdir()
        (folder / "tpu/launch.py").write_text((TESTS / "fake_launch.py").read_text())
        (folder / "bin").mkdir()
        (folder / "bin/gcloud").write_text(GCLOUD)
        (folder / "bin/gcloud").chmod(0o755)
        (folder / "bin/python3").symlink_to(sys.executable)

    def start(self, words: str = WORDS, *options: str) -> subprocess.Popen:
        """Starts a grid. Its output goes to the files out and err."""
        out = (self.folder / "out").open("w")
        err = (self.folder / "err").open("w")
        with out, err:
            process = subprocess.Popen(
                [sys.executable, "-m", "train.grid", *options, *words.split()],
                cwd=self.folder,
                stdout=out,
                stderr=err,
                env=os.environ | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"},
            )
        self.processes.append(process)
        return process

    def ended(self, process: subprocess.Popen, seconds: float = 60) -> Ended:
        """Waits for the end of a grid."""
        code = process.wait(seconds)
        out = (self.folder / "out").read_text(errors="replace")
        return Ended(code, out, (self.folder / "err").read_text(errors="replace"))

    def run(self, words: str = WORDS, *options: str) -> Ended:
        """Runs a grid to its end."""
        return self.ended(self.start(words, *options))

    def faults(self, **fault_of: str) -> None:
        """Lets runs go wrong: by the ends of their names, with _ for -."""
        named = {end.replace("_", "-"): fault for end, fault in fault_of.items()}
        (self.folder / "faults.json").write_text(json.dumps(named))

    def starts(self) -> list[str]:
        """Returns the runs that were started, in order, by the ends of their names."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[0].removeprefix(PREFIX) for line in lines]

    def grid(self, name: str = NAME) -> dict:
        """Returns grid.json."""
        return json.loads((self.folder / "runs" / name / "grid.json").read_text())

    def page(self, name: str = NAME) -> str:
        """Returns grid.md."""
        return (self.folder / "runs" / name / "grid.md").read_text()

    def states(self) -> dict[str, str]:
        """Returns the states of all runs, by the ends of their names: lr-1e-5-seed-0."""
        found = {}
        for run in self.grid()["runs"]:
            found[run["name"].removeprefix(PREFIX)] = run["state"]
        return found

    def close(self) -> None:
        """Ends what a test has left running."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(20)


def wait(condition: Callable[[], object], seconds: float = 30) -> None:
    """Waits until the condition holds; fails if it does not in so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
