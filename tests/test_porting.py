"""docs/porting.md: halves of a pair give the same numbers, wrong variants what the page says; a ported script."""

import re
from pathlib import Path

import pytest
import torch

from docs.porting import own_model_after, own_model_before, page
from train.common import device

ROOT = Path(__file__).parent.parent
PAIRS = page.pairs()
LISTING_LINES, LISTING_COLUMNS, PAGE_LINES = 15, 72, 410
DIFF_LINES = 25

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)


def numbers(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def close(found, expected, tolerance=1e-6) -> bool:
    """Tells whether two results are the same: text and counts exactly, numbers within float32 rounding."""
    if not isinstance(expected, float | list):
        return found == expected
    return torch.allclose(numbers(found), numbers(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
@each_pair
def test_both_halves_give_the_same_and_the_wrong_variants_what_the_page_says(pair, mesh):
    right = pair.eager()
    assert close(pair.xla(mesh), right)
    assert not hasattr(pair, "RIGHT") or close(right, pair.RIGHT)
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


def test_a_script_of_ones_own_trains_the_same_after_the_port(mesh):
    losses, accuracy = own_model_before.main()
    graphs = device.graph_report(reset=True)["graphs"]
    ported, ported_accuracy = own_model_after.main()
    report = device.graph_report()
    # In float32 sums of another order, through 64 updates of AdamW: 7e-6 apart when this was written.
    assert len(losses) == 64 and close(ported, losses, 5e-5)
    on_page = re.findall(r"epoch \d  loss ([\d.]+)", page.OWN_MODEL.read_text())
    assert close(list(map(float, on_page)), losses[15::16], 1e-3)  # other processors round otherwise
    assert ported_accuracy == accuracy > 0.9
    assert report["recompilations"] == report["fallbacks"] == []
    # Step and evaluation are traced twice, to one graph each; the third one prepares AdamW.
    assert (report["traced"], report["repeated"]) == (4, 64 + 5 * 4 - 4) and report["graphs"] - graphs <= 3


def test_the_pages_are_what_the_command_writes_and_the_port_changes_few_lines():
    signs = [line[0] for line in page.own_model_diff()]
    assert 0 < signs.count("-") <= DIFF_LINES and 0 < signs.count("+") <= DIFF_LINES
    assert f"differs in {signs.count('+')} lines" in (ROOT / "README.md").read_text()
    assert page.PAGE.read_text() == page.page() and page.OWN_MODEL.read_text() == page.own_model_page()
    assert len(page.page().splitlines()) <= PAGE_LINES
