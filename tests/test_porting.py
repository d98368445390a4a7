"""docs/porting.md: both halves of a pair give the same numbers, the wrong variant what the page says."""

from pathlib import Path

import pytest
import torch

from docs.porting import page

ROOT = Path(__file__).parent.parent
PAIRS = page.pairs()
LISTING_LINES, LISTING_COLUMNS, PAGE_LINES = 15, 72, 410

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)


def numbers(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def close(found, expected, tolerance=1e-6) -> bool:
    """Tells whether two results are the same: text and counts exactly, numbers within float32 rounding."""
    if not isinstance(expected, float | list):
        return found == expected
    return torch.allclose(numbers(found), numbers(expected), rtol=tolerance, atol=tolerance)


@each_pair
def test_both_halves_give_the_same(pair, mesh):
    right = pair.eager()
    assert close(pair.xla(mesh), right)
    assert not hasattr(pair, "RIGHT") or close(right, pair.RIGHT)


@pytest.mark.filterwarnings("ignore")
@each_pair
def test_the_wrong_variants_fail_as_the_page_says(pair, mesh):
    for name, function in page.wrongs(pair).items():
        found = page.fresh_outcome(pair) if hasattr(pair, "FRESH") else page.outcome(function, mesh)
        expected = getattr(pair, name)
        if isinstance(expected, str):
            assert found.startswith(expected), found
        else:
            assert close(found, expected, 1e-4) and getattr(pair, "RIGHT", None) != expected, found


@each_pair
def test_its_lines_stand_in_our_scripts_and_its_listings_are_short(pair):
    for file, line in pair.OURS:
        assert line in (ROOT / file).read_text(), (file, line)
    for function in (pair.eager, pair.xla):
        lines = page.listing(function).splitlines()
        assert len(lines) <= LISTING_LINES and max(map(len, lines)) <= LISTING_COLUMNS, lines


def test_the_page_is_what_the_command_writes():
    assert page.PAGE.read_text() == page.page()
    assert len(page.page().splitlines()) <= PAGE_LINES
