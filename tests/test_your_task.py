"""docs/your_task.md: its examples fit a fresh copy and train there, and it shows what they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from copies import passed_tests

from docs.your_task import patches

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/your_task.md"

every_example = pytest.mark.parametrize("name", patches.MODELS)


def changed_copy(name: str, folder: Path, device: str = "") -> None:
    """Makes the copy that an example changes, and changes it."""
    patches.make_copy(name, folder, device)
    rejected = patches.apply(name, folder)
    assert not rejected, f"{patches.__doc__}\n{rejected}"


# ---- the examples --------------------------------------------------------------------------------
@every_example
def test_an_example_fits_a_fresh_copy(name, tmp_path):
    changed_copy(name, tmp_path)

    assert not list(tmp_path.rglob("*.rej"))
    settings = ["--config", str(ROOT / "pyproject.toml")]
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, *settings, str(tmp_path)]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@every_example
def test_a_patch_is_what_its_changed_copy_differs_in(name, tmp_path):
    """So `python -m docs.your_task.patches` writes what was there, but for the numbers of lines."""
    before = tmp_path / "before"
    after = tmp_path / "after"
    patches.make_copy(name, before)
    changed_copy(name, after)

    found = patches.difference(before, after)

    numbers = re.compile(r"^@@ .*$", re.MULTILINE)
    stored = patches.patch_of(name).read_text()
    assert numbers.sub("@@", found) == numbers.sub("@@", stored)


# Slow: test_copy.py trains a copy and resumes it as well, and the MobileNet's graph compiles for
# minutes.
TRAINED = [
    pytest.param("similarity", "cpu", marks=pytest.mark.slow),
    pytest.param("similarity", "", marks=pytest.mark.slow),
    pytest.param("mobilenet", "cpu", marks=pytest.mark.slow),
    pytest.param("mobilenet", "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "device"), TRAINED)
def test_an_example_learns_and_resumes_exactly(name, device, tmp_path):
    """By the test of its copy, which the patch gives other ranges."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changed_copy(name, tmp_path / "mine", device)

    assert passed_tests(tmp_path / "mine", scratch, with_xla=device == "") == 4


# ---- the page ------------------------------------------------------------------------------------
@every_example
def test_the_page_names_the_number_of_changed_lines(name):
    added, removed = patches.changed_lines(name)
    row = rf"^\| \[{name}\.patch\].*\| {added} added, {removed} removed \|"
    assert re.search(row, PAGE.read_text(), re.MULTILINE), (added, removed)


def shown_lines(name: str) -> list[str]:
    """Returns the lines of an example's patch that its section of the page shows."""
    section = PAGE.read_text().split(f"<!-- {name} -->\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    ([-+ ].*|)$", section, re.MULTILINE)
    return [line for line in lines if line.strip()]


@every_example
def test_the_page_shows_lines_of_the_patch(name):
    shown = shown_lines(name)
    assert len(shown) >= 15

    changed = patches.patch_of(name).read_text().splitlines()
    assert [line for line in shown if line not in changed] == []


def test_the_page_has_the_places_in_their_order():
    headings = re.findall(r"^### \d\. (\w+)", PAGE.read_text(), re.MULTILINE)
    assert headings == ["The", "open_data", "build", "forward", "eval_step", "export", "The"]
