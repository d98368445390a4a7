"""fairseq's golden files (tests/fairseq_reference) are whole, agree with each other, and are what fairseq computes.
Live, where there is .venv-fairseq: fairseq itself loads and reads what we write, and finds what we find.

`make fairseq-golden` rewrites them. It is called for when record.py or requirements-fairseq.txt changes, not when a
comparison with our own code fails.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

from data import wmt
from data.prepare import wmt as prepare_wmt
from models import beam_search, fairseq
from models.transformer import ARCHITECTURES, Architecture, Transformer

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


# fairseq from now on on what we write. Its loader unpickles what a checkpoint holds.
ENVIRONMENT = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "OMP_NUM_THREADS": "1"}


def with_fairseq(code: str, *arguments: str | Path) -> None:
    """Run Python code where fairseq can be imported."""
    command = [PYTHON, "-W", "ignore", "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr


def data_of(words: tuple[int, int], folder: Path) -> None:
    """Dictionaries of these sizes."""
    folder.mkdir()
    for language, count in zip(("en", "de"), words, strict=True):
        wmt.Dictionary([f"w{number}" for number in range(count - 4)]).save(folder / f"dict.{language}.txt")


THEIR_LOGITS = """
import sys
import numpy as np, torch
from fairseq import checkpoint_utils
path, data, arrays, out = sys.argv[1:]
(model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": data})
with np.load(arrays) as file:
    source, previous = (torch.from_numpy(file[name]).long() for name in ("source", "previous"))
with torch.no_grad():
    logits, _ = model.eval()(source, (source != 1).sum(1), previous)
np.save(out, logits.numpy())
"""


@live
@pytest.mark.slow
@pytest.mark.parametrize(("share", "pre_norm"), [("all", False), ("decoder", True), ("none", True)])
def test_fairseq_loads_what_we_write_and_has_the_same_logits(tmp_path, share, pre_norm):
    arch = Architecture(24, 40, 3, 1, 2, pre_norm=pre_norm, share_embeddings=share, max_positions=50)
    count = (30, 30) if share == "all" else (30, 20)
    torch.manual_seed(0)
    model = Transformer(arch, *count).eval()
    for parameter in model.parameters():  # norms and biases that are not 1 and 0
        torch.nn.init.normal_(parameter, std=0.3)
    data_of(count, tmp_path / "data")
    path = tmp_path / "model.pt"
    path.write_bytes(fairseq.write_checkpoint(model, model.state_dict(), 5, source_lang="en", target_lang="de"))
    source = torch.tensor([[5, 29, 7, 3, EOS], [PAD, PAD, 6, 9, EOS]])
    previous = torch.tensor([[EOS, 4, 19], [EOS, 8, PAD]])
    np.savez(tmp_path / "batch.npz", source=source.numpy(), previous=previous.numpy())
    with_fairseq(THEIR_LOGITS, path, tmp_path / "data", tmp_path / "batch.npz", tmp_path / "logits.npy")
    theirs, real = torch.from_numpy(np.load(tmp_path / "logits.npy")), previous != PAD
    torch.testing.assert_close(model(source, previous)[real], theirs[real], rtol=1e-5, atol=1e-5)


@live
@pytest.mark.slow
def test_fairseq_generate_finds_our_hypotheses_with_our_checkpoint(tmp_path):
    settings, weights = fairseq.read_checkpoint((GOLDEN / "trained.pt").read_bytes(), "trained.pt")
    model = Transformer(fairseq.architecture(settings, weights, "trained.pt"), 64, 64).eval()
    fairseq.load_weights(model, weights, "trained.pt")
    torch.manual_seed(0)
    with torch.no_grad():  # other weights than the golden ones
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    content = fairseq.write_checkpoint(model, model.state_dict(), 400, source_lang="en", target_lang="de")
    (tmp_path / "model.pt").write_bytes(content)
    shutil.copytree(GOLDEN / "joint", tmp_path / "joint")
    beam, penalty = 4, 0.6
    flags = f"--gen-subset test --beam {beam} --nbest {beam} --lenpen {penalty} --max-len-a 1.2 --max-len-b 10 "
    flags += "--batch-size 12 --required-batch-size-multiple 1 --cpu --num-workers 0 --no-progress-bar"
    command = [PYTHON.parent / "fairseq-generate", tmp_path / "joint", "--path", tmp_path / "model.pt", *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    theirs: dict[int, list[tuple[float, str]]] = {}
    for kind, score, sentence in re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", result.stdout, re.MULTILINE):
        theirs.setdefault(int(kind), []).append((float(score), sentence))

    pairs = wmt.open_pairs(GOLDEN / "joint", "test")
    width = int(pairs.lengths[:, 0].max())
    source = torch.from_numpy(pairs.batch(np.arange(len(pairs)), (width, 30))["source"])
    most = int(1.2 * width + 10)  # one limit for all, as fairseq has it
    limit = torch.full((len(pairs),), most, dtype=torch.int32)
    tokens, scores = beam_search.search(model, source, limit, beam, most + 1, penalty)
    assert len(theirs) == len(pairs) == 12
    for index in range(len(pairs)):
        assert [sentence for _, sentence in theirs[index]] == [pairs.decode(one) for one in tokens[index].tolist()]
        for (theirs_score, _), score in zip(theirs[index], scores[index].tolist(), strict=True):
            assert theirs_score == pytest.approx(score / math.log(2), abs=1e-4)
    recorded = {index: row[1] for index, row in printed("H").items()}
    assert any(theirs[index][0][1] != recorded[index] for index in recorded), "the weights are others"


THEIR_IDS = """
import sys
import numpy as np
from fairseq.tasks.translation import TranslationConfig, TranslationTask
folder, out = sys.argv[1:]
config = TranslationConfig(data=folder, source_lang="en", target_lang="de", dataset_impl=None, train_subset="train")
config.required_seq_len_multiple = 1
task = TranslationTask.setup_task(config)
arrays = {}
for split in ("train", "valid", "test"):
    task.load_dataset(split)
    data = task.dataset(split)
    for name, side in (("source", data.src), ("target", data.tgt)):
        arrays[f"{split}.{name}"] = np.concatenate([side[index].numpy() for index in range(len(side))])
    arrays[f"{split}.sizes"] = np.stack([data.src_sizes, data.tgt_sizes], 1)
arrays["symbols"] = np.array(task.source_dictionary.symbols)
arrays["target_symbols"] = np.array(task.target_dictionary.symbols)
sentence = task.target_dictionary.string(data.tgt[0], "sentencepiece")
arrays["decoded"] = np.array(sentence)
np.savez(out, **arrays)
"""


@live
@pytest.mark.slow
def test_fairseq_reads_what_make_data_prepares(tmp_path):
    prepare_wmt.prepare(GOLDEN / "text", tmp_path / "prepared", vocabulary=160, ratio=0, workers=1)
    with_fairseq(THEIR_IDS, tmp_path / "prepared", tmp_path / "ids.npz")
    with np.load(tmp_path / "ids.npz") as file:
        theirs = dict(file)
    for split in ("train", "valid", "test"):
        pairs = wmt.open_pairs(tmp_path / "prepared", split)
        assert len(pairs) == {"train": 200, "valid": 20, "test": 12}[split]
        np.testing.assert_array_equal(theirs[f"{split}.sizes"], pairs.lengths)
        longest = pairs.lengths.max(0)
        batch = pairs.batch(np.arange(len(pairs)), tuple(longest.tolist()))
        for name in ("source", "target"):
            np.testing.assert_array_equal(batch[name][batch[name] != PAD], theirs[f"{split}.{name}"])
    for name, dictionary in (("symbols", pairs.source_dictionary), ("target_symbols", pairs.target_dictionary)):
        assert theirs[name].tolist() == dictionary.symbols
    assert str(theirs["decoded"]) == pairs.decode(batch["target"][0]) == lines("text/test.de")[0]


THEIR_ARCHITECTURES = """
import argparse, json, sys
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
words = Dictionary()
for number in range(32768 - 4):
    words.add_symbol(f"w{number}")
found = {}
for name in sys.argv[2:]:
    args = argparse.Namespace(arch=name, share_all_embeddings=True)
    ARCH_CONFIG_REGISTRY[name](args)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[name].build_model(args, task)
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int | float | str | None)}
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    found[name] = {"settings": settings, "shapes": shapes, "count": sum(p.numel() for p in model.parameters())}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


@live
@pytest.mark.slow
def test_architectures_are_fairseqs_of_the_same_names(tmp_path):
    names = [name for name in ARCHITECTURES if name not in ("transformer_small", "transformer_tiny")]
    with_fairseq(THEIR_ARCHITECTURES, tmp_path / "found.json", *names)
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == set(names)
    for name, theirs in found.items():
        assert fairseq.architecture(theirs["settings"], theirs["shapes"], name) == ARCHITECTURES[name]
        with torch.device("meta"):
            model = Transformer(ARCHITECTURES[name], 32_768, 32_768)
        assert sum(parameter.numel() for parameter in model.parameters()) == theirs["count"]
        no_weights = re.compile(r"\.version$|_float_tensor$")
        shapes = {key: shape for key, shape in theirs["shapes"].items() if not no_weights.search(key)}
        assert {key: list(value.shape) for key, value in model.state_dict().items()} == shapes
