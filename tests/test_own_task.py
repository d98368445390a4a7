"""examples/own_task.py learns, the same on several devices, and README shows what stands in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment

from examples import own_task

ROOT = Path(__file__).parent.parent


def test_it_reads_digits_that_it_has_not_seen():
    assert own_task.main() > 0.85  # 0.899 when this was written; chance is 0.1


def test_it_reads_nothing_where_it_cannot_learn():
    assert own_task.main(lr=0.0) < 0.3


@pytest.mark.slow
def test_four_devices_give_the_accuracy_of_one():
    accuracy = own_task.main()

    process = subprocess.run(
        [sys.executable, "-m", "examples.own_task"],
        cwd=ROOT,
        env=environment(4),
        capture_output=True,
        text=True,
        check=True,
    )

    (found,) = re.findall(r"accuracy ([\d.]+)", process.stdout)
    assert float(found) == pytest.approx(accuracy, abs=1e-4)


def test_readme_shows_lines_of_the_example_in_their_order():
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Your own task")[1].split("\n## ")[0]
    shown = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    assert len(shown) > 15

    example = (ROOT / "examples/own_task.py").read_text()
    lines = iter(line.strip() for line in example.splitlines())
    for line in shown:
        if line:
            # `in` reads on in the iterator: each line is looked for after the one before.
            assert line in lines, line
