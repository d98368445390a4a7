"""docs/porting.md: halves of a pair give the same numbers, wrong variants what the page says; a
ported script."""

import re
from pathlib import Path

import pytest
import torch

from docs.porting import own_model_after, own_model_before, page
from train.common import device

ROOT = Path(__file__).parent.parent
PAIRS = page.pairs()
LISTING_LINES = 15
LISTING_COLUMNS = 72
PAGE_LINES = 410
DIFF_LINES = 25

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)


def numbers(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def close(found, expected, tolerance=1e-6) -> bool:
    """Returns whether two results are the same.

    Text and counts are compared exactly, numbers within float32's rounding.
    """
    if not isinstance(expected, float | list):
        return found == expected
    return torch.allclose(numbers(found), numbers(expected), rtol=tolerance, atol=tolerance)


# The pairs


@pytest.mark.filterwarnings("ignore")
@each_pair
def test_both_halves_give_the_same(pair, mesh):
    right = pair.eager()
    assert close(pair.xla(mesh), right)
    if hasattr(pair, "RIGHT"):
        assert close(right, pair.RIGHT)


@pytest.mark.filterwarnings("ignore")
@each_pair
def test_wrong_variants_give_what_the_page_says(pair, mesh):
    for name, function in page.wrongs(pair).items():
        if hasattr(pair, "FRESH"):
            found = page.fresh_outcome(pair)
        else:
            found = page.outcome(function, mesh)

        expected = getattr(pair, name)
        if isinstance(expected, str):
            assert found.startswith(expected), found
        else:
            assert close(found, expected, 1e-4), found
            assert getattr(pair, "RIGHT", None) != expected, found


@each_pair
def test_the_lines_of_a_pair_stand_in_our_scripts(pair):
    for file, line in pair.OURS:
        assert line in (ROOT / file).read_text(), (file, line)


@each_pair
def test_the_listings_of_a_pair_are_short(pair):
    for function in (pair.eager, pair.xla):
        lines = page.listing(function).splitlines()
        assert len(lines) <= LISTING_LINES, lines
        assert max(map(len, lines)) <= LISTING_COLUMNS, lines


# A script of one's own


def test_a_script_of_ones_own_trains_the_same_after_the_port(mesh):
    losses, accuracy = own_model_before.main()
    graphs = device.graph_report(reset=True)["graphs"]
    ported, ported_accuracy = own_model_after.main()
    report = device.graph_report()

    # In float32 sums of another order, through 64 updates of AdamW: 7e-6 apart when this was
    # written.
    assert len(losses) == 64
    assert close(ported, losses, 5e-5)
    on_page = re.findall(r"epoch \d  loss ([\d.]+)", page.OWN_MODEL.read_text())
    printed = [float(loss) for loss in on_page]
    assert close(printed, losses[15::16], 1e-3)  # other processors round otherwise
    assert ported_accuracy == accuracy
    assert accuracy > 0.9

    assert report["recompilations"] == []
    assert report["fallbacks"] == []
    # Step and evaluation are traced twice, to one graph each; the third one prepares AdamW.
    assert report["traced"] == 4
    assert report["repeated"] == 64 + 5 * 4 - 4
    assert report["graphs"] - graphs <= 3


def test_the_port_changes_few_lines():
    signs = [line[0] for line in page.own_model_diff()]
    assert 0 < signs.count("-") <= DIFF_LINES
    assert 0 < signs.count("+") <= DIFF_LINES
    assert f"differs in {signs.count('+')} lines" in (ROOT / "README.md").read_text()


def test_the_pages_are_what_the_command_writes():
    assert page.PAGE.read_text() == page.page()
    assert page.OWN_MODEL.read_text() == page.own_model_page()
    assert len(page.page().splitlines()) <= PAGE_LINES
