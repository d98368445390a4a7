"""fairseq's golden files (tests/fairseq_reference) are what fairseq computes.

Live, where there is .venv-fairseq: fairseq itself loads and reads what we write, and finds what we
find.

`make fairseq-golden` rewrites them. It is called for when record.py or requirements-fairseq.txt
changes, not when a comparison with our own code fails.
"""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import (
    GOLDEN,
    PYTHON,
    ROOT,
    arrays,
    checkpoint,
    golden_transformer,
    live,
    with_fairseq,
)

from data import wmt
from models import fairseq
from models.transformer import ARCHITECTURES


def numbers(folder: Path = GOLDEN) -> dict:
    """Returns the losses and hypotheses of a recording."""
    return json.loads((folder / "numbers.json").read_text())


def files_below(folder: Path) -> set[str]:
    """Returns the relative paths of all files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A new recording that takes the trained models of the golden one."""
    folder = tmp_path_factory.mktemp("recorded")
    program = ROOT / "tests/fairseq_reference/record.py"
    with_fairseq(PYTHON, program, "--out", folder, "--trained", GOLDEN)
    return folder


@live
def test_fairseq_writes_the_recorded_files(recorded):
    names = files_below(GOLDEN)

    assert files_below(recorded) == names
    for name in names:
        if "/" in name:  # text, dictionaries and binarised data
            assert (recorded / name).read_bytes() == (GOLDEN / name).read_bytes(), name


@live
def test_fairseq_initializes_the_recorded_weights(recorded):
    found = checkpoint("initial.pt", recorded)["model"]
    expected = checkpoint("initial.pt")["model"]

    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@live
@pytest.mark.parametrize("name", ["arrays.npz", "roberta_bpe.npz"])
def test_fairseq_computes_the_recorded_arrays(recorded, name):
    found = arrays(name, recorded)
    expected = arrays(name)

    assert set(found) == set(expected)
    for key, value in expected.items():
        if value.dtype.kind == "U":
            assert found[key].tolist() == value.tolist()
        else:
            np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=1e-5, err_msg=key)


@live
def test_fairseq_computes_the_recorded_numbers(recorded):
    found = numbers(recorded)
    expected = numbers()

    torch.testing.assert_close(found["ten_steps"], expected["ten_steps"], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["searches"], expected["searches"], rtol=0, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A line H-… of fairseq-generate."""

    row: int  # of the test set
    score: float  # mean of the logarithms to base 2
    sentence: str


def printed_hypotheses(output: str) -> list[Hypothesis]:
    found = []
    for line in re.finditer(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE):
        row, score, sentence = line.groups()
        found.append(Hypothesis(int(row), float(score), sentence))
    return found


@live
def test_fairseq_generate_finds_the_recorded_hypotheses(tmp_path):
    model = golden_transformer("trained.pt")
    search = numbers()["searches"][1]
    content = fairseq.write_checkpoint(
        model, model.state_dict(), 400, source_lang="en", target_lang="de"
    )
    (tmp_path / "model.pt").write_bytes(content)

    flags = (
        "--gen-subset test --beam {beam} --nbest {beam} --lenpen {lenpen}"
        " --max-len-a {max_len_a} --max-len-b {max_len_b}"
        " --batch-size 12 --required-batch-size-multiple 1 --cpu --num-workers 0"
    ).format(**search)
    program = [PYTHON.parent / "fairseq-generate", GOLDEN / "joint"]
    output = with_fairseq(*program, "--path", tmp_path / "model.pt", *flags.split())

    printed = printed_hypotheses(output)
    assert len(printed) == 12 * search["beam"]
    decode = wmt.open_pairs(GOLDEN / "joint", "test").decode
    rows = arrays()["search.index"].tolist()
    for row, recorded in zip(rows, search["sentences"], strict=True):
        of_row = [hypothesis for hypothesis in printed if hypothesis.row == row]
        sentences = [hypothesis.sentence for hypothesis in of_row]
        assert sentences == [decode(one["tokens"]) for one in recorded]
        scores = [hypothesis.score for hypothesis in of_row]
        expected = [one["score"] / math.log(2) for one in recorded]
        assert scores == pytest.approx(expected, abs=1e-4)


THEIR_ARCHITECTURES = """
import argparse, json, sys
from fairseq.models import ARCH_CONFIG_REGISTRY
found = {}
for name in sys.argv[2:]:
    args = argparse.Namespace(arch=name, share_all_embeddings=True)
    ARCH_CONFIG_REGISTRY[name](args)
    found[name] = {}
    for key, value in vars(args).items():
        if isinstance(value, int | float | str | None):
            found[name][key] = value
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


@live
def test_architectures_are_fairseqs_of_the_same_names(tmp_path):
    """Their numbers of parameters are in test_transformer_model.py, and their tensors' names in
    fairseq's own files."""
    own = ("transformer_small", "transformer_tiny")
    names = [name for name in ARCHITECTURES if name not in own]

    with_fairseq("-c", THEIR_ARCHITECTURES, tmp_path / "found.json", *names)

    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == set(names)
    # As those have that normalise before their layers.
    weights = {"encoder.layer_norm.weight": None}
    for name, settings in found.items():
        assert fairseq.architecture(settings, weights, name) == ARCHITECTURES[name], name
