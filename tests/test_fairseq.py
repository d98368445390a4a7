"""fairseq's golden files (tests/fairseq_reference) are whole, agree with each other, and are what fairseq computes.

`make fairseq-golden` rewrites them. It is called for when record.py or requirements-fairseq.txt changes, not when a
comparison with our own code fails.
"""

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "tests/fairseq_reference"
GOLDEN = REFERENCE / "golden"
PYTHON = ROOT / ".venv-fairseq/bin/python"
PAD, EOS, UNK = 1, 2, 3

live = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-fairseq here: `make fairseq` installs it")


def checkpoint(name: str, folder: Path = GOLDEN) -> dict:
    """A checkpoint of fairseq, unpickled with no class allowed but argparse.Namespace."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(folder / name, map_location="cpu", weights_only=True)


def arrays(folder: Path = GOLDEN) -> dict[str, np.ndarray]:
    with np.load(folder / "arrays.npz", allow_pickle=False) as file:
        return dict(file)


def numbers(folder: Path = GOLDEN) -> dict:
    return json.loads((folder / "numbers.json").read_text())


def symbols(path: str) -> list[str]:
    lines = (GOLDEN / path).read_text(encoding="utf-8").splitlines()
    return ["<s>", "<pad>", "</s>", "<unk>", *(line.rsplit(" ", 1)[0] for line in lines)]


def lines(path: str, folder: Path = GOLDEN) -> list[str]:
    return (folder / path).read_text(encoding="utf-8").splitlines()


def words(tokens: list[int]) -> str:
    """The sentence that joint tokens, </s> last, stand for."""
    known = symbols("joint/dict.de.txt")
    return " ".join(known[token] for token in tokens[:-1])


def printed(kind: str, folder: Path = GOLDEN) -> dict[int, list[str]]:
    """Lines of one kind (S, T, H, D or P) that fairseq-generate printed: sentence number -> further columns."""
    rows = [line.split("\t") for line in lines("generate.txt", folder) if line.startswith(f"{kind}-")]
    return {int(row[0][2:]): row[1:] for row in rows}


def test_the_recording_is_small_and_tells_nothing_of_the_machine():
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    for name in ("initial.pt", "trained.pt", "prenorm.pt", "roberta.pt"):
        config = checkpoint(name)["cfg"]
        for value in (config["model"].data, config["task"]["data"], config["checkpoint"]["save_dir"]):
            assert not Path(value).is_absolute()


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("language", ["en", "de"])
def test_the_binarised_data_is_the_text(split, language):
    prefix = GOLDEN / f"joint/{split}.en-de.{language}"
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00" and index[17] == 8, "mmap format, uint16"
    count = int.from_bytes(index[18:26], "little")
    sizes = np.frombuffer(index, np.int32, count, 26)
    tokens = np.fromfile(prefix.with_name(prefix.name + ".bin"), np.uint16)
    number = {symbol: index for index, symbol in enumerate(symbols(f"joint/dict.{language}.txt"))}
    expected = [[*(number.get(word, UNK) for word in line.split()), EOS] for line in lines(f"text/{split}.{language}")]
    assert [len(sentence) for sentence in expected] == sizes.tolist()
    assert [token for sentence in expected for token in sentence] == tokens.tolist()
    if language == "en":
        assert (tokens == UNK).sum() == (split != "train"), "one unknown word in valid and in test"


def test_the_checkpoints_hold_what_they_are_for():
    shared, untied = checkpoint("trained.pt")["model"], checkpoint("prenorm.pt")["model"]
    tables = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    assert [shared[table].data_ptr() for table in tables] == [shared[tables[0]].data_ptr()] * 3
    assert len({untied[table].data_ptr() for table in tables}) == 3
    assert not torch.equal(untied[tables[1]], untied[tables[2]])
    assert len(shared[tables[0]]) == len(symbols("joint/dict.en.txt")) == 64
    assert len(untied[tables[0]]) == len(symbols("separate/dict.en.txt"))
    assert len(untied[tables[1]]) == len(symbols("separate/dict.de.txt")) != len(untied[tables[0]])
    for stack in ("encoder", "decoder"):
        # Trained enough that a layer norm left out, or put elsewhere, is noticed.
        assert (untied[f"{stack}.layer_norm.weight"] - 1).abs().max() > 0.01
    assert "encoder.layer_norm.weight" not in shared
    masks = 1
    table = checkpoint("roberta.pt")["model"]["encoder.sentence_encoder.embed_tokens.weight"]
    assert len(table) == len(symbols("roberta/dict.txt")) + masks


def test_ten_steps_are_a_training_run():
    batches, steps = arrays(), numbers()["ten_steps"]
    assert len(steps) == 10
    for number, step in enumerate(steps):
        source, previous, target = (batches[f"step{number}.{part}"] for part in ("source", "previous", "target"))
        assert step["tokens"] == (target != PAD).sum()
        assert (source[:, -1] == EOS).all() and (source[:, 0] == PAD).any(), "padded at the left"
        assert (previous[:, 0] == EOS).all()
        inside = (previous[:, 1:] != PAD) & (target[:, :-1] != PAD)
        assert (previous[:, 1:] == target[:, :-1])[inside].all() and inside.sum() == step["tokens"] - len(target)
        peak, warmup, start = 5e-3, 4, 1e-7
        rate = start + (peak - start) * number / warmup if number < warmup else peak * math.sqrt(warmup / number)
        assert step["learning_rate"] == pytest.approx(rate, rel=1e-9)
    loss = [step["nll_sum"] / step["tokens"] for step in steps]
    assert loss[0] > math.log(64) and loss[-1] < 0.75 * loss[0]
    assert all(0.1 < step["gradient_norm"] < 10 for step in steps)


@pytest.mark.parametrize("name", ["initial", "trained", "prenorm"])
def test_logits_do_not_depend_on_the_side_of_the_padding(name):
    data = arrays()
    left, right = data[f"{name}.left.source"], data[f"{name}.right.source"]
    assert (left[:, 0] == PAD).any() and (right[:, -1] == PAD).any()
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one[one != PAD], other[other != PAD])
    real = data[f"{name}.previous"] != PAD
    assert not real.all()
    np.testing.assert_allclose(data[f"{name}.left.logits"][real], data[f"{name}.right.logits"][real], atol=1e-4)


def test_masked_logits_of_roberta_are_rows_of_all_logits():
    data = arrays()
    masked, tokens = data["roberta.masked"], data["roberta.tokens"]
    assert 6 < masked.sum() < (tokens != PAD).sum() / 2
    assert set(tokens[masked]) == {len(symbols("roberta/dict.txt"))}, "<mask> comes after the dictionary's symbols"
    np.testing.assert_allclose(data["roberta.logits"], data["roberta.all_logits"][masked], atol=1e-5)


def test_hypotheses_are_sound():
    searches = numbers()["searches"]
    width = arrays()["search.source"].shape[1]
    assert {(search["beam"], search["lenpen"]) for search in searches} == {(4, 1.0), (4, 0.6), (5, 1.0), (5, 0.6)}
    for search in searches:
        longest = int(search["max_len_a"] * width + search["max_len_b"])
        assert len(search["sentences"]) == 12
        for hypotheses in search["sentences"]:
            assert len(hypotheses) == search["beam"]
            assert len({tuple(hypothesis["tokens"]) for hypothesis in hypotheses}) == search["beam"]
            scores = [hypothesis["score"] for hypothesis in hypotheses]
            assert scores == sorted(scores, reverse=True)
            for hypothesis in hypotheses:
                tokens = hypothesis["tokens"]
                assert tokens.index(EOS) == len(tokens) - 1 <= longest and PAD not in tokens
                score = sum(hypothesis["log_probabilities"]) / len(tokens) ** search["lenpen"]
                assert hypothesis["score"] == pytest.approx(score, abs=1e-5)
    cut = searches[-1]["sentences"]
    assert all(len(hypothesis["tokens"]) == 6 for row in cut for hypothesis in row), "the limit of 5 words is reached"


def test_hypotheses_are_translations():
    references, order = lines("text/test.de"), arrays()["search.index"]
    for search in numbers()["searches"][:-1]:
        best = [words(row[0]["tokens"]) for row in search["sentences"]]
        bleu = sacrebleu.corpus_bleu(best, [[references[index] for index in order]], force=True)
        assert bleu.score > 75


def test_hypotheses_agree_with_the_logits():
    # Where the search found the reference itself, its log-probabilities are those of the logits for that reference.
    data = arrays()
    best = {tuple(row[0]["tokens"]): row[0] for row in numbers()["searches"][0]["sentences"]}
    logits = torch.log_softmax(torch.from_numpy(data["trained.left.logits"]), dim=-1).numpy()
    found = 0
    for previous, row in zip(data["trained.previous"], logits, strict=True):
        target = (*previous[1:][previous[1:] != PAD].tolist(), EOS)
        if target in best:
            expected = row[np.arange(len(target)), list(target)]
            np.testing.assert_allclose(best[target]["log_probabilities"], expected, atol=1e-4)
            found += 1
    assert found >= 2


def test_fairseq_generate_prints_the_recorded_hypotheses():
    search = next(
        one for one in numbers()["searches"] if (one["beam"], one["lenpen"], one["max_len_b"]) == (4, 0.6, 10)
    )
    hypotheses = printed("H")
    assert set(hypotheses) == set(range(12)), "fairseq-generate drops the last batch without the right flag"
    for index, row in zip(arrays()["search.index"].tolist(), search["sentences"], strict=True):
        score, sentence = hypotheses[index]
        assert sentence == words(row[0]["tokens"])
        assert float(score) == pytest.approx(row[0]["score"] / math.log(2), abs=1e-4), "it prints base 2"
        assert printed("T")[index] == [lines("text/test.de")[index]]


def record(*arguments: str | Path) -> None:
    result = subprocess.run([PYTHON, REFERENCE / "record.py", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@live
@pytest.mark.slow
def test_fairseq_computes_the_recorded_numbers(tmp_path):
    record("--out", tmp_path, "--trained", GOLDEN)
    names = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == names
    for name in names:
        if "/" in name:  # text, dictionaries and binarised data
            assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    ours, theirs = checkpoint("initial.pt", tmp_path)["model"], checkpoint("initial.pt")["model"]
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-5)
    found, expected = arrays(tmp_path), arrays()
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=1e-5, err_msg=key)
    found, expected = numbers(tmp_path), numbers()
    for one, other in zip(found["ten_steps"], expected["ten_steps"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(found["searches"], expected["searches"], strict=True):
        for row, golden_row in zip(one.pop("sentences"), other.pop("sentences"), strict=True):
            for hypothesis, golden in zip(row, golden_row, strict=True):
                assert hypothesis["tokens"] == golden["tokens"]
                assert hypothesis["score"] == pytest.approx(golden["score"], abs=1e-5)
                assert hypothesis["log_probabilities"] == pytest.approx(golden["log_probabilities"], abs=1e-5)
        assert one == other
    assert [row[1] for row in printed("H", tmp_path).values()] == [row[1] for row in printed("H").values()]


@live
@pytest.mark.slow
def test_fairseq_train_learns_the_toy_language_anew(tmp_path):
    # The weights are the same again only on one kind of processor; what was learned is, everywhere.
    record("--out", tmp_path)
    for name in ("trained.pt", "prenorm.pt", "roberta.pt"):
        ours, theirs = checkpoint(name, tmp_path), checkpoint(name)
        assert {key: value.shape for key, value in ours["model"].items()} == {
            key: value.shape for key, value in theirs["model"].items()
        }
        assert ours["cfg"] == theirs["cfg"]
        assert ours["optimizer_history"] == theirs["optimizer_history"]
    bleu = re.search(r"BLEU = ([\d.]+)", (tmp_path / "generate.txt").read_text(encoding="utf-8"))
    assert float(bleu[1]) > 70
