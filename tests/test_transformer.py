"""What is particular to train/transformer.py and train/translate.py: several batches an update, of packed rows, give
the numbers of one batch, the export is a mean of checkpoints, and it translates. The rest is in test_scripts.py."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import safetensors.torch
import torch
from helpers import SEED, crash, environment, equal, exported, losses, records, stop_at, terminate
from model_helpers import transformer_of
from trials import TRIALS

from data import wmt
from errors import InputError
from models import fairseq
from models.transformer import ARCHITECTURES, label_smoothed_loss
from train import transformer, translate
from train.common import checkpoint, loading

SHORT = TRIALS["transformer"].short


@pytest.fixture
def quick(monkeypatch):
    """No evaluation, and one layer a stack: graphs that compile in half the time."""
    monkeypatch.setattr(transformer, "evaluate", lambda *_: {"bleu": 0.0, "loss": 0.0, "ppl": 1.0})
    small = replace(ARCHITECTURES["transformer_tiny"], encoder_layers=1, decoder_layers=1)
    monkeypatch.setitem(ARCHITECTURES, "transformer_tiny", small)


@pytest.fixture
def few_pairs(monkeypatch):
    """64 training pairs: an epoch can be one batch, or two batches that make one update."""
    pairs = transformer.Data(wmt.SyntheticPairs("train", 64), {"valid": wmt.SyntheticPairs("valid", 16)})
    monkeypatch.setattr(transformer, "open_data", lambda config: pairs)
    return pairs


def test_the_export_is_the_mean_of_the_last_checkpoints(run_of):
    path, *_ = run_of("transformer", "short")
    states = [safetensors.torch.load_file(f"{path}/checkpoints/step_{n:08d}/state.safetensors") for n in (20, 24, 26)]
    weights = exported(path)
    for name in states[0]:
        if name.startswith("model.") and not name.endswith("positions"):
            mean = sum(state[name].double() for state in states) / 3
            assert torch.equal(weights[name.removeprefix("model.")], mean.float()), name
    assert not torch.equal(weights["encoder.embed_tokens.weight"], states[2]["model.encoder.embed_tokens.weight"])


def test_an_update_of_two_packed_batches_gives_the_numbers_of_one_batch(few_pairs, quick, tmp_path):
    """The 64 pairs are one batch; or two of packed rows, with unequal numbers of tokens."""
    config = replace(SHORT, lengths=(16,), batch_tokens=1024, updates=10, lr=2e-3, warmup_updates=5, runs=str(tmp_path))
    packs = replace(config, lengths=(32,), batch_tokens=512, pack=True, update_every=2)
    for settings, shape in ((config, (64, 16, 16)), (packs, (16, 32, 32))):
        assert translate.training_plan(few_pairs.train, settings).shapes == [shape]
    transformer.main(replace(config, name="one"))
    transformer.main(replace(packs, name="two"))
    one = losses(tmp_path / "one")
    assert one[1] == pytest.approx(one[0], rel=1e-4)  # the warm-up begins at 1e-7
    assert one[0] - one[9] > 0.5
    assert losses(tmp_path / "two") == pytest.approx(one, rel=3e-6)
    # A weight moves by up to 1e-2 here; where its gradient is rounding alone, Adam makes steps of that.
    torch.testing.assert_close(exported(tmp_path / "two"), exported(tmp_path / "one"), rtol=0, atol=2e-3)


def test_a_crash_and_a_signal_within_an_update_change_nothing(quick, tmp_path, capsys):
    config = replace(SHORT, lengths=(8, 16), update_every=3, batch_tokens=512, updates=9, save_every=3, keep=2)
    config = replace(config, dropout=0.1, runs=str(tmp_path), name="stopped")
    transformer.main(replace(config, name="whole"))
    stop_at(17, crash, transformer.main, config, SEED)  # the second batch of update 6
    stop_at(22, terminate, transformer.main, config, SEED)  # the first batch of update 8
    transformer.main(config)
    output = capsys.readouterr().out
    assert "resuming after step 3" in output and "resuming after step 8" in output
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert equal(exported(tmp_path / "stopped"), exported(tmp_path / "whole"))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_language_without_a_tokenizer_for_bleu_is_refused_before_step_1(split, few_pairs, monkeypatch, tmp_path):
    """As a target of Japanese without MeCab."""
    few_pairs.eval["test"] = wmt.SyntheticPairs("valid", 16)
    few_pairs.eval[split].target_language = "ja"
    monkeypatch.setitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", None)
    with pytest.raises(InputError, match="BLEU of the target language ja cannot be computed: .*mecab"):
        transformer.main(replace(SHORT, lengths=(16,), batch_tokens=1024, runs=str(tmp_path), name="run"))
    assert not (tmp_path / "run").exists()


def test_the_export_read_back_has_the_loss_of_the_run(trained):
    path, metrics, config = trained
    name = f"{path}/export/model.pt"
    settings, weights = fairseq.read_checkpoint(Path(name).read_bytes(), name)
    model = transformer_of(settings, weights, (84, 84), name)
    pairs = transformer.open_data(config).eval["valid"]
    batch = loading.as_tensors(pairs.batch(np.arange(len(pairs)), (16, 16)))
    with torch.no_grad():
        logits = model(batch["source"], batch["previous"])
        sums = label_smoothed_loss(logits, batch["target"], config.label_smoothing)
    assert (sums["loss"] / sums["tokens"]).item() == pytest.approx(metrics["loss"], rel=1e-5)


def test_training_goes_on_from_an_export_and_after_an_evaluation(trained, few_pairs, mesh):
    config = replace(trained[2], weights=f"{trained[0]}/export/model.pt")
    state = transformer.build(config, few_pairs, mesh)
    found, weights = state.model.state_dict(), exported(trained[0])
    assert equal(checkpoint.to_host(found), {name: weights[name] for name in found})
    transformer.evaluate(None, None, state, {}, config, mesh)
    assert state.model.training


def test_weights_whose_words_have_another_order_are_refused_and_without_a_dictionary_it_is_said(
    trained, few_pairs, mesh, tmp_path, capsys
):
    """As many words, so that all shapes fit; counts may differ."""
    folder = tmp_path / "theirs"
    shutil.copytree(f"{trained[0]}/export", folder)
    config = replace(trained[2], weights=f"{folder}/model.pt")
    lines = (folder / "dict.v.txt").read_text().splitlines()
    (folder / "dict.v.txt").write_text("".join(f"{line.rpartition(' ')[0]} 7\n" for line in lines))
    transformer.build(config, few_pairs, mesh)
    assert capsys.readouterr().out == ""
    (folder / "dict.v.txt").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    message = r"a different dictionary: line 1 of .*dict.v.txt is .*; give weights or data of"
    with pytest.raises(InputError, match=message):
        transformer.build(config, few_pairs, mesh)
    for path in folder.glob("dict.*"):
        path.unlink()
    transformer.build(config, few_pairs, mesh)
    assert "no dict.w.txt nor dict.v.txt beside --weights" in capsys.readouterr().out


def translated(monkeypatch, capsys, folder, text: bytes, **settings) -> list[str]:
    """What train/translate.py writes for this standard input, by line."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    made = {"lengths": (8, 16), "batch_tokens": 2048, "beam": 2, "precision": "float32", **settings}
    translate.main(translate.Config(model_dir=str(folder), **made))
    output = capsys.readouterr().out
    assert output.endswith("\n") or not output
    return output.split("\n")[:-1]


def test_translations_have_the_bleu_of_the_run_and_the_order_of_the_lines_whatever_is_in_them(
    trained, monkeypatch, capsys
):
    path, metrics, config = trained
    folder, pairs = f"{path}/export", transformer.open_data(config).eval["valid"]
    words = pairs.source_dictionary.symbols
    rows = pairs.batch(np.arange(len(pairs)), (16, 16))["source"].tolist()
    lines = ["w1 w2 w3", "", "w7 w7 w9 w30 w31 w1 w4 w22 w0", "w5 zebra w6", "w12 w13 w14 w15", "ü w3 w3 \u2028 w4"]
    text = [*lines, *(" ".join(words[token] for token in row if token > wmt.UNK) for row in rows)]
    forward = translated(monkeypatch, capsys, folder, "\n".join(text).encode())
    backward = translated(monkeypatch, capsys, folder, ("\n".join(text[::-1]) + "\n").encode())
    assert len(forward) == len(text) and forward == backward[::-1]
    assert len(set(forward[: len(lines)])) == len(lines)
    assert sacrebleu.corpus_bleu(forward[len(lines) :], [pairs.references()]).score == metrics["bleu"]
    assert translated(monkeypatch, capsys, folder, b"") == []
    # As its users start it, on plain PyTorch.
    flags = "--device cpu --precision float32 --beam 2 --lengths 16 --model-dir"
    command = [sys.executable, "-m", "train.translate", "text", *flags.split(), folder]
    variables = environment(1)
    process = subprocess.run(command, input="\n".join(lines).encode(), capture_output=True, env=variables)
    assert process.returncode == 0, process.stderr
    assert process.stdout.decode().split("\n") == [*forward[: len(lines)], ""]


BLANK = ["", " ", "\t \t", "\u3000", "\u200b", "\xa0\u2009", "\ufeff", "\x0b\x0c"]


def test_an_empty_line_has_an_empty_translation_and_changes_no_other(trained, monkeypatch, capsys):
    folder = f"{trained[0]}/export"
    lines = [f"w{number} w{number + 2} w{number + 5}" + " w7" * (number % 9) for number in range(11)]
    alone = translated(monkeypatch, capsys, folder, "\n".join(lines).encode())
    assert all(alone)
    mixed = [line for pair in zip(lines, BLANK, strict=False) for line in pair] + lines[len(BLANK) :]
    expected = [line for pair in zip(alone, [""] * len(BLANK), strict=False) for line in pair] + alone[len(BLANK) :]
    for text in ("\n".join(mixed), "\r\n".join([*mixed, ""]), "\ufeff" + "\n".join([*mixed, ""])):
        assert translated(monkeypatch, capsys, folder, text.encode()) == expected
    assert translated(monkeypatch, capsys, folder, "\n".join([*BLANK, ""]).encode()) == [""] * len(BLANK)
    assert translated(monkeypatch, capsys, folder, b"\n") == [""]


def test_input_that_is_not_split_as_the_dictionary_is_is_said(trained, monkeypatch, capsys):
    folder = f"{trained[0]}/export"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 w2.\nw1, w3; w4!\n")))
    translate.main(translate.Config(folder, lengths=(8,), beam=2, precision="float32"))
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2
    assert "80% of the words of the input are not in the dictionary: the folder has no tokenizer" in output.err
    assert translated(monkeypatch, capsys, folder, b"w1 w2\n") and "dictionary" not in capsys.readouterr().err


def test_an_empty_sentence_of_an_evaluation_has_an_empty_translation_and_changes_no_other(trained, mesh, tmp_path):
    path, _, config = trained
    model, text = translate.load(f"{path}/export", mesh)
    sources = [[4 + number, 6, 9 + number] for number in range(5)]
    for name, ids in (("whole", sources), ("gaps", [[], *sources[:2], [], *sources[2:], []])):
        (tmp_path / name).mkdir()
        for language in ("w", "v"):
            text.source_dictionary.save(tmp_path / name / f"dict.{language}.txt")
            ended = [[*sentence, wmt.EOS] for sentence in ids]
            for split in ("train", "valid"):
                prefix = f"{tmp_path}/{name}/{split}.w-v.{language}"
                wmt.write_mmap(prefix, np.concatenate(ended), list(map(len, ended)), 84)
    translator = translate.Translator(model, mesh, config)
    whole, gaps = (wmt.open_pairs(tmp_path / name, "valid") for name in ("whole", "gaps"))
    lines = translator(whole)
    assert all(lines) and translator(gaps) == ["", *lines[:2], "", *lines[2:], ""]
    metrics = transformer.evaluate(
        lambda state, batch, *rest: transformer.eval_step(state, batch, *rest),
        translator,
        transformer.State(model, None),
        {"valid": gaps},
        replace(config, data=str(tmp_path / "gaps")),
        mesh,
    )
    assert all(np.isfinite(list(metrics.values())))


def test_rows_of_padding_change_neither_sums_nor_gradients(trained):
    """A last batch is filled up with them."""
    name = f"{trained[0]}/export/model.pt"
    settings, weights = fairseq.read_checkpoint(Path(name).read_bytes(), name)
    pairs, found = wmt.SyntheticPairs("valid", 6), []
    for indices in (np.arange(6), np.array([*range(6), -1, -1])):
        model = transformer_of(settings, weights, (84, 84), name)
        batch = loading.as_tensors(pairs.batch(indices, (16, 16)))
        sums = label_smoothed_loss(model(batch["source"], batch["previous"]), batch["target"], 0.1)
        sums["loss"].backward()
        found.append([*sums.values(), *(parameter.grad for parameter in model.parameters())])
    assert all(tensor.isfinite().all() for tensor in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_the_export_says_how_its_bleu_is_computed_and_what_its_symbols_are(trained, tmp_path, mesh):
    path, _, config = trained
    signatures = json.loads(Path(f"{path}/export/bleu.json").read_text())["signatures"]
    metric = sacrebleu.metrics.BLEU(tokenize="13a")
    metric.corpus_score(["a"], [["a"]])
    assert signatures == {"valid": str(metric.get_signature())}
    data = transformer.open_data(config)
    state = transformer.build(config, data, mesh)
    for pieces, expected in (("", "words"), ("subword_nmt", "subword_nmt")):
        transformer.export(str(tmp_path), state, data, replace(config, pieces=pieces), mesh)
        assert translate.load(str(tmp_path), mesh)[1].pieces == expected
    assert translate.load(str(tmp_path), mesh, "words")[1].pieces == "words"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--dropout 1", "--dropout is 1.0.*below 1"),
        ("--label-smoothing 1", "--label-smoothing is 1.0.*below 1"),
        ("--lengths 8 8", r"--lengths are \(8, 8\).*must rise"),
        ("--lengths 1 8", r"--lengths are \(1, 8\).*between 2 and 1024"),
        ("--lengths 8 2000", r"--lengths are \(8, 2000\).*between 2 and 1024"),
        ("--lengths 3", "16384.* 3"),
        ("--data /nowhere/at/all", "/nowhere/at/all.*make data"),
        ("--weights /nowhere/model.pt", "/nowhere/model.pt"),
    ],
)
def test_values_that_training_refuses(refused, flags, pattern):
    refused(transformer, f"tiny {flags}", pattern)


def test_a_folder_of_two_dictionaries_is_refused(refused, tmp_path):
    for language, words in (("en", 20), ("de", 30)):
        dictionary = wmt.Dictionary([f"word{number}" for number in range(words)])
        dictionary.save(f"{tmp_path}/dict.{language}.txt")
        for split in ("train", "valid"):
            tokens = np.tile([4, 5, wmt.EOS], 12)
            wmt.write_mmap(f"{tmp_path}/{split}.en-de.{language}", tokens, np.full(12, 3), len(dictionary))
    refused(transformer, f"tiny --data {tmp_path}", "two dictionaries.*--share-embeddings decoder")


@pytest.mark.parametrize(
    ("sentence", "pattern"),
    [
        ([4] * 1030, "sentence 31 of the split valid has 1031 tokens; the model takes 1024: cut it"),
        ([4, 24], r"valid\.en-de\.\w+\.bin has the token 24, and its dictionary 24 symbols"),
    ],
)
@pytest.mark.parametrize("side", ["en", "de"])
def test_what_an_evaluation_cannot_index_is_refused_before_step_1(refused, tmp_path, side, sentence, pattern):
    """In the middle of the split: the first and the last batch do not have it."""
    dictionary = wmt.Dictionary([f"word{number}" for number in range(20)])
    for language in ("en", "de"):
        dictionary.save(f"{tmp_path}/dict.{language}.txt")
        for split in ("train", "valid"):
            sentences = [[4, 5, wmt.EOS]] * 100
            if (split, language) == ("valid", side):
                sentences[30] = [*sentence, wmt.EOS]
            sizes = [len(one) for one in sentences]
            wmt.write_mmap(f"{tmp_path}/{split}.en-de.{language}", np.concatenate(sentences), sizes, len(dictionary))
    refused(transformer, f"tiny --batch-tokens 64 --data {tmp_path}", pattern)


@pytest.mark.parametrize(
    ("text", "flags", "pattern"),
    [
        (b"w1 w2\n" + b"w3 " * 1030, "", "sentence 2.*1031 tokens.*1024.*cut it"),
        (b"w1 w2\nw3 \xff w4\n", "", "not UTF-8.*byte 9.*convert it"),
        *((b"w1\n", f"--{name} 0", f"--{name} is 0.*at least 1") for name in ("beam", "batch-tokens")),
        (b"w1\n", "--lengths 0", r"--lengths are \(0,\).*at least 2"),
        (b"w1\n", "--lengths 64 16", r"--lengths are \(64, 16\).*must rise"),
        (b"w1\n", "--model-dir=", "--model-dir is missing.*export"),
        (b"w1\n", "--model-dir /nowhere/export", "/nowhere/export/model.pt"),
    ],
)
def test_values_that_translation_refuses(monkeypatch, refused, trained, text, flags, pattern):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    config = translate.Config(precision="float32", model_dir=f"{trained[0]}/export")
    refused(translate, f"text {flags}", pattern, {"text": ("", config)})
