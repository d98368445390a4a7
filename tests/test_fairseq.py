"""fairseq's golden files (tests/fairseq_reference) are what fairseq computes.
Live, where there is .venv-fairseq: fairseq itself loads and reads what we write, and finds what we find.

`make fairseq-golden` rewrites them. It is called for when record.py or requirements-fairseq.txt changes, not when a
comparison with our own code fails.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import GOLDEN, PYTHON, ROOT, arrays, checkpoint, golden_transformer, live, with_fairseq

from data import wmt
from models import fairseq
from models.transformer import ARCHITECTURES


def numbers(folder: Path = GOLDEN) -> dict:
    return json.loads((folder / "numbers.json").read_text())


@live
def test_fairseq_computes_the_recorded_numbers(tmp_path):
    with_fairseq(PYTHON, ROOT / "tests/fairseq_reference/record.py", "--out", tmp_path, "--trained", GOLDEN)
    names = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == names
    for name in names:
        if "/" in name:  # text, dictionaries and binarised data
            assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    ours, theirs = checkpoint("initial.pt", tmp_path)["model"], checkpoint("initial.pt")["model"]
    assert list(ours) == list(theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for name in ("arrays.npz", "roberta_bpe.npz"):
        found, expected = arrays(name, tmp_path), arrays(name)
        assert set(found) == set(expected)
        for key, value in expected.items():
            if value.dtype.kind == "U":
                assert found[key].tolist() == value.tolist()
            else:
                np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=1e-5, err_msg=key)
    found, expected = numbers(tmp_path), numbers()
    torch.testing.assert_close(found["ten_steps"], expected["ten_steps"], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["searches"], expected["searches"], rtol=0, atol=1e-5)


@live
def test_fairseq_generate_finds_the_recorded_hypotheses_with_our_checkpoint(tmp_path):
    model, search = golden_transformer("trained.pt"), numbers()["searches"][1]
    content = fairseq.write_checkpoint(model, model.state_dict(), 400, source_lang="en", target_lang="de")
    (tmp_path / "model.pt").write_bytes(content)
    flags = "--gen-subset test --beam {beam} --nbest {beam} --lenpen {lenpen} --max-len-a {max_len_a} "
    flags += "--max-len-b {max_len_b} --batch-size 12 --required-batch-size-multiple 1 --cpu --num-workers 0"
    program = [PYTHON.parent / "fairseq-generate", GOLDEN / "joint", "--path", tmp_path / "model.pt"]
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", with_fairseq(*program, *flags.format(**search).split()), re.MULTILINE)
    assert len(lines) == 12 * search["beam"]
    decode = wmt.open_pairs(GOLDEN / "joint", "test").decode
    for index, hypotheses in zip(arrays()["search.index"].tolist(), search["sentences"], strict=True):
        _, scores, sentences = zip(*(line for line in lines if int(line[0]) == index), strict=True)
        assert list(sentences) == [decode(one["tokens"]) for one in hypotheses]
        expected = [one["score"] / math.log(2) for one in hypotheses]
        assert list(map(float, scores)) == pytest.approx(expected, abs=1e-4)


THEIR_ARCHITECTURES = """
import argparse, json, sys
from fairseq.models import ARCH_CONFIG_REGISTRY
found = {}
for name in sys.argv[2:]:
    args = argparse.Namespace(arch=name, share_all_embeddings=True)
    ARCH_CONFIG_REGISTRY[name](args)
    found[name] = {key: value for key, value in vars(args).items() if isinstance(value, int | float | str | None)}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


@live
def test_architectures_are_fairseqs_of_the_same_names(tmp_path):
    """Their numbers of parameters are in test_transformer_model.py, and their tensors' names in fairseq's own files."""
    names = [name for name in ARCHITECTURES if name not in ("transformer_small", "transformer_tiny")]
    with_fairseq("-c", THEIR_ARCHITECTURES, tmp_path / "found.json", *names)
    found = json.loads((tmp_path / "found.json").read_text())
    weights = {"encoder.layer_norm.weight": None}  # as those have that normalise before their layers
    assert {name: fairseq.architecture(settings, weights, name) for name, settings in found.items()} == {
        name: ARCHITECTURES[name] for name in names
    }
