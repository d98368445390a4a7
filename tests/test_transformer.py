"""Tests what is particular to train/transformer.py and train/translate.py.

Several batches per update, of packed rows, give the numbers of one batch; the export is a mean of
checkpoints; and it translates. The rest is in test_scripts.py.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import safetensors.torch
import torch
from helpers import (
    SEED,
    crash,
    environment_of_plain_pytorch,
    equal,
    exported,
    losses,
    records,
    stop_at,
    terminate,
)
from model_helpers import GOLDEN, transformer_of
from torch import Tensor
from trials import TRIALS

from data import wmt
from errors import InputError
from models import fairseq
from models.transformer import ARCHITECTURES, Transformer, label_smoothed_loss
from train import transformer, translate
from train.common import checkpoint, loading

SHORT = TRIALS["transformer"].short


@pytest.fixture
def quick(monkeypatch):
    """No evaluation, and one layer per stack: graphs that compile in half the time."""
    monkeypatch.setattr(transformer, "evaluate", lambda *_: {"bleu": 0.0, "loss": 0.0, "ppl": 1.0})
    small = replace(ARCHITECTURES["transformer_tiny"], encoder_layers=1, decoder_layers=1)
    monkeypatch.setitem(ARCHITECTURES, "transformer_tiny", small)


@pytest.fixture
def few_pairs(monkeypatch):
    """64 training pairs: an epoch can be one batch, or two batches that make one update."""
    train = wmt.SyntheticPairs("train", 64)
    valid = wmt.SyntheticPairs("valid", 16)
    pairs = transformer.Data(train, {"valid": valid})
    monkeypatch.setattr(transformer, "open_data", lambda config: pairs)
    return pairs


def read_export(path: str) -> Transformer:
    """Returns the model of a run's export, in evaluation mode."""
    name = f"{path}/export/model.pt"
    settings, weights = fairseq.read_checkpoint(Path(name).read_bytes(), name)
    return transformer_of(settings, weights, (84, 84), name)


# Training


@pytest.mark.slow
def test_an_update_of_two_packed_batches_equals_one_batch(few_pairs, quick, tmp_path):
    """The 64 pairs are one batch; or two of packed rows, with unequal numbers of tokens."""
    one_batch = replace(
        SHORT,
        name="one",
        lengths=(16,),
        batch_tokens=1024,
        updates=10,
        lr=2e-3,
        warmup_updates=5,
        runs=str(tmp_path),
    )
    two_batches = replace(
        one_batch,
        name="two",
        lengths=(32,),
        batch_tokens=512,
        pack=True,
        update_every=2,
    )
    assert translate.training_plan(few_pairs.train, one_batch).shapes == [(64, 16, 16)]
    assert translate.training_plan(few_pairs.train, two_batches).shapes == [(16, 32, 32)]

    transformer.main(one_batch)
    transformer.main(two_batches)

    one = losses(tmp_path / "one")
    assert one[1] == pytest.approx(one[0], rel=1e-4)  # the warm-up begins at 1e-7
    assert one[0] - one[9] > 0.5
    assert losses(tmp_path / "two") == pytest.approx(one, rel=3e-6)

    # A weight moves by up to 1e-2 here; where its gradient is rounding alone, Adam makes steps of
    # that.
    weights_of_one = exported(tmp_path / "one")
    weights_of_two = exported(tmp_path / "two")
    torch.testing.assert_close(weights_of_two, weights_of_one, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_a_crash_and_a_signal_within_an_update_change_nothing(quick, tmp_path, capsys):
    config = replace(
        SHORT,
        lengths=(8, 16),
        update_every=3,
        batch_tokens=512,
        updates=9,
        save_every=3,
        keep=2,
        dropout=0.1,
        runs=str(tmp_path),
        name="stopped",
    )
    transformer.main(replace(config, name="whole"))

    stop_at(17, crash, transformer.main, config, SEED)  # the second batch of update 6
    stop_at(22, terminate, transformer.main, config, SEED)  # the first batch of update 8
    transformer.main(config)

    output = capsys.readouterr().out
    assert "resuming after step 3" in output
    assert "resuming after step 8" in output
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert equal(exported(tmp_path / "stopped"), exported(tmp_path / "whole"))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_language_that_bleu_cannot_split_is_refused(split, few_pairs, monkeypatch, tmp_path):
    """It is refused before step 1, as a target of Japanese is without MeCab."""
    few_pairs.eval["test"] = wmt.SyntheticPairs("valid", 16)
    few_pairs.eval[split].target_language = "ja"
    monkeypatch.setitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", None)
    config = replace(SHORT, lengths=(16,), batch_tokens=1024, runs=str(tmp_path), name="run")

    message = "BLEU of the target language ja cannot be computed: .*mecab"
    with pytest.raises(InputError, match=message):
        transformer.main(config)

    assert not (tmp_path / "run").exists()


def sums_and_gradients(path: str, indices: np.ndarray) -> list[Tensor]:
    """Returns the sums of the loss of six pairs with an export, then its parameters' gradients."""
    model = read_export(path)
    pairs = wmt.SyntheticPairs("valid", 6)
    batch = loading.as_tensors(pairs.batch(indices, (16, 16)))

    logits = model(batch["source"], batch["previous"])
    sums = label_smoothed_loss(logits, batch["target"], 0.1)
    sums["loss"].backward()

    gradients = [parameter.grad for parameter in model.parameters()]
    return [*sums.values(), *gradients]


def test_rows_of_padding_change_neither_sums_nor_gradients(trained):
    """A last batch is filled up with them."""
    path, *_ = trained

    expected = sums_and_gradients(path, np.arange(6))
    found = sums_and_gradients(path, np.array([*range(6), -1, -1]))

    assert all(tensor.isfinite().all() for tensor in found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Exports


def test_the_export_is_the_mean_of_the_last_checkpoints(run_of):
    path, *_ = run_of("transformer", "short")
    weights = exported(path)
    states = []
    for step in (20, 24, 26):
        file = f"{path}/checkpoints/step_{step:08d}/state.safetensors"
        states.append(safetensors.torch.load_file(file))

    for name in states[0]:
        if name.startswith("model.") and not name.endswith("positions"):
            mean = sum(state[name].double() for state in states) / 3
            assert torch.equal(weights[name.removeprefix("model.")], mean.float()), name

    embedding = "encoder.embed_tokens.weight"
    assert not torch.equal(weights[embedding], states[2][f"model.{embedding}"])


def test_the_export_read_back_has_the_loss_of_the_run(trained):
    path, metrics, config = trained
    model = read_export(path)
    pairs = transformer.open_data(config).eval["valid"]
    batch = loading.as_tensors(pairs.batch(np.arange(len(pairs)), (16, 16)))

    with torch.no_grad():
        logits = model(batch["source"], batch["previous"])
        sums = label_smoothed_loss(logits, batch["target"], config.label_smoothing)

    loss = (sums["loss"] / sums["tokens"]).item()
    assert loss == pytest.approx(metrics["loss"], rel=1e-5)


def test_training_starts_from_the_weights_of_an_export(trained, few_pairs, mesh):
    path, _, config = trained
    config = replace(config, weights=f"{path}/export/model.pt")

    state = transformer.build(config, few_pairs, mesh)

    weights = exported(path)
    found = state.model.state_dict()
    expected = {name: weights[name] for name in found}
    assert equal(checkpoint.to_host(found), expected)


def test_a_model_is_in_training_mode_after_an_evaluation(trained, few_pairs, mesh):
    path, _, config = trained
    config = replace(config, weights=f"{path}/export/model.pt")
    state = transformer.build(config, few_pairs, mesh)

    transformer.evaluate(None, None, state, {}, config, mesh)

    assert state.model.training


@pytest.fixture
def theirs(trained, tmp_path) -> transformer.Config:
    """Training from a copy of the export, of which a test may change files."""
    path, _, config = trained
    folder = tmp_path / "theirs"
    shutil.copytree(f"{path}/export", folder)
    return replace(config, weights=f"{folder}/model.pt")


def test_weights_may_have_a_dictionary_of_other_counts(theirs, few_pairs, mesh, capsys):
    dictionary = Path(theirs.weights).with_name("dict.v.txt")
    lines = []
    for line in dictionary.read_text().splitlines():
        word = line.rpartition(" ")[0]
        lines.append(f"{word} 7\n")
    dictionary.write_text("".join(lines))

    transformer.build(theirs, few_pairs, mesh)

    assert capsys.readouterr().out == ""


def test_weights_whose_words_have_another_order_are_refused(theirs, few_pairs, mesh):
    """There are as many words, so that all shapes fit."""
    dictionary = Path(theirs.weights).with_name("dict.v.txt")
    first, second, *rest = dictionary.read_text().splitlines()
    dictionary.write_text("\n".join([second, first, *rest]) + "\n")

    message = "a different dictionary: line 1 of .*dict.v.txt is .*; give weights or data of"
    with pytest.raises(InputError, match=message):
        transformer.build(theirs, few_pairs, mesh)


def test_weights_without_a_dictionary_are_reported(theirs, few_pairs, mesh, capsys):
    for dictionary in Path(theirs.weights).parent.glob("dict.*"):
        dictionary.unlink()

    transformer.build(theirs, few_pairs, mesh)

    assert "no dict.w.txt nor dict.v.txt beside --weights" in capsys.readouterr().out


def test_an_export_says_how_its_bleu_is_computed(trained):
    path, *_ = trained
    metric = sacrebleu.metrics.BLEU(tokenize="13a")
    metric.corpus_score(["a"], [["a"]])

    signatures = json.loads(Path(f"{path}/export/bleu.json").read_text())["signatures"]

    assert signatures == {"valid": str(metric.get_signature())}


def test_an_export_says_what_its_symbols_are(trained, tmp_path, mesh):
    _, _, config = trained
    data = transformer.open_data(config)
    state = transformer.build(config, data, mesh)

    transformer.export(str(tmp_path), state, data, replace(config, pieces=""), mesh, updates=1)
    _, codec = translate.load(str(tmp_path), mesh)
    assert codec.pieces == "words"

    joined = replace(config, pieces="subword_nmt")
    transformer.export(str(tmp_path), state, data, joined, mesh, updates=1)
    _, codec = translate.load(str(tmp_path), mesh)
    assert codec.pieces == "subword_nmt"

    _, codec = translate.load(str(tmp_path), mesh, "words")  # as a flag says
    assert codec.pieces == "words"


# Translation of lines


def translated(folder: str, text: bytes, **settings) -> list[str]:
    """Returns the lines that train/translate.py writes for this standard input."""
    options = {"lengths": (8, 16), "batch_tokens": 2048, "beam": 2}
    config = translate.Config(model_dir=folder, **options | settings)

    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        translate.main(config)

    output = written.getvalue()
    assert output.endswith("\n") or not output
    return output.split("\n")[:-1]


# What a line may have: no word, unknown words, and signs that other programs end a line at.
SPECIAL_LINES = [
    "w1 w2 w3",
    "",
    "w7 w7 w9 w30 w31 w1 w4 w22 w0",
    "w5 zebra w6",
    "w12 w13 w14 w15",
    "ü w3 w3 \u2028 w4",
]


@dataclass
class Translations:
    """Lines that were translated together: the special ones, then the sources of a split."""

    pairs: wmt.TranslationPairs  # of the split
    lines: list[str]
    results: list[str]  # a translation of each line


@pytest.fixture(scope="module")
def translations(run_of) -> Translations:
    path, _, config = run_of("transformer")
    pairs = transformer.open_data(config).eval["valid"]
    symbols = pairs.source_dictionary.symbols

    lines = list(SPECIAL_LINES)
    for row in pairs.batch(np.arange(len(pairs)), (16, 16))["source"].tolist():
        words = [symbols[token] for token in row if token > wmt.UNK]
        lines.append(" ".join(words))

    found = translated(f"{path}/export", "\n".join(lines).encode())
    return Translations(pairs=pairs, lines=lines, results=found)


def test_translations_have_the_bleu_of_the_run(trained, translations):
    _, metrics, _ = trained
    of_split = translations.results[len(SPECIAL_LINES) :]

    bleu = sacrebleu.corpus_bleu(of_split, [translations.pairs.references()])

    assert bleu.score == metrics["bleu"]


@dataclass
class SetUp(Exception):
    """Ends a translation where its precision is known."""

    precision: str


@pytest.fixture
def precision_of(monkeypatch) -> Callable[..., str]:
    """precision_of(folder, precision=""): returns the precision in which train/translate.py
    computes."""

    def setup(seed: int, precision: str, *_, **__) -> None:
        raise SetUp(precision)

    def call(folder: str, **flags) -> str:
        with pytest.raises(SetUp) as chosen:
            translate.main(translate.Config(model_dir=str(folder), **flags))
        return chosen.value.precision

    monkeypatch.setattr(translate.device, "setup", setup)
    return call


def test_the_precision_of_a_translation_is_the_runs(mesh, tmp_path, trained, precision_of, capsys):
    _, _, config = trained
    data = transformer.open_data(config)
    state = transformer.build(config, data, mesh)
    for precision in ("float32", "bfloat16"):
        changed = replace(config, precision=precision)
        transformer.export(str(tmp_path), state, data, changed, mesh, updates=1)

        assert precision_of(tmp_path) == precision
        assert precision_of(tmp_path, precision="fast_float32") == "fast_float32"
    assert capsys.readouterr().err == ""


def test_a_checkpoint_without_a_precision_keeps_bfloat16(tmp_path, precision_of, capsys):
    """One of an older version, or of fairseq."""
    shutil.copy(GOLDEN / "trained.pt", tmp_path / "model.pt")

    assert precision_of(tmp_path) == "bfloat16"
    assert f"{tmp_path} does not say in which precision its run" in capsys.readouterr().err


def test_translations_have_the_order_of_the_lines(trained, translations):
    path, *_ = trained
    forward = translations.results
    assert len(forward) == len(translations.lines)
    assert len(set(forward[: len(SPECIAL_LINES)])) == len(SPECIAL_LINES)

    reversed_lines = translations.lines[::-1]
    backward = translated(f"{path}/export", ("\n".join(reversed_lines) + "\n").encode())

    assert forward == backward[::-1]


def test_an_empty_input_has_no_translations(trained):
    assert translated(f"{trained[0]}/export", b"") == []


def test_the_command_translates_on_plain_pytorch(trained, translations):
    """It runs as its users start it."""
    flags = "--device cpu --beam 2 --lengths 16 --model-dir"
    folder = f"{trained[0]}/export"
    command = [sys.executable, "-m", "train.translate", "text", *flags.split(), folder]

    process = subprocess.run(
        command,
        input="\n".join(SPECIAL_LINES).encode(),
        capture_output=True,
        env=environment_of_plain_pytorch(),
    )

    assert process.returncode == 0, process.stderr
    expected = translations.results[: len(SPECIAL_LINES)]
    assert process.stdout.decode().split("\n") == [*expected, ""]


BLANK = ["", " ", "\t \t", "\u3000", "\u200b", "\xa0\u2009", "\ufeff", "\x0b\x0c"]


def with_blank(lines: Sequence[str], blank: Sequence[str]) -> list[str]:
    """Returns lines with one of `blank` after each of the first."""
    mixed = []
    for line, blank_line in zip(lines, blank, strict=False):
        mixed += [line, blank_line]
    return mixed + list(lines[len(blank) :])


def test_an_empty_line_has_an_empty_translation_beside_others(trained):
    """It changes none of them."""
    folder = f"{trained[0]}/export"
    lines = []
    for number in range(11):
        lines.append(f"w{number} w{number + 2} w{number + 5}" + " w7" * (number % 9))
    alone = translated(folder, "\n".join(lines).encode())
    assert all(alone)

    mixed = with_blank(lines, BLANK)
    expected = with_blank(alone, [""] * len(BLANK))
    without_end = "\n".join(mixed)
    of_windows = "\r\n".join([*mixed, ""])
    with_byte_order_mark = "\ufeff" + "\n".join([*mixed, ""])

    for text in (without_end, of_windows, with_byte_order_mark):
        assert translated(folder, text.encode()) == expected


def test_lines_that_are_all_empty_have_empty_translations(trained):
    folder = f"{trained[0]}/export"
    text = "\n".join([*BLANK, ""])

    assert translated(folder, text.encode()) == [""] * len(BLANK)
    assert translated(folder, b"\n") == [""]


def test_input_of_words_that_the_dictionary_lacks_is_reported(trained, capsys):
    """It is not split as the text of the dictionary was."""
    lines = translated(f"{trained[0]}/export", b"w1 w2.\nw1, w3; w4!\n", lengths=(8,))

    assert len(lines) == 2
    share = "80% of the words of the input are not in the dictionary"
    assert f"{share}: the folder has no tokenizer" in capsys.readouterr().err


def test_input_of_words_of_the_dictionary_is_not_reported(trained, capsys):
    lines = translated(f"{trained[0]}/export", b"w1 w2\n")

    assert lines
    assert "dictionary" not in capsys.readouterr().err


# Evaluation of empty sentences


def write_sentences(prefix: str | Path, sentences: Sequence[list[int]], words: int) -> None:
    """Writes one language of a split; each sentence has an EOS at its end already."""
    sizes = [len(sentence) for sentence in sentences]
    wmt.write_mmap(str(prefix), np.concatenate(sentences), sizes, words)


def write_data(folder: Path, sentences: Sequence[list[int]], codec: wmt.Codec) -> None:
    """Writes a folder of data whose splits have these sentences in both languages."""
    folder.mkdir()
    ended = [[*sentence, wmt.EOS] for sentence in sentences]
    for language in ("w", "v"):
        codec.source_dictionary.save(folder / f"dict.{language}.txt")
        for split in ("train", "valid"):
            write_sentences(folder / f"{split}.w-v.{language}", ended, 84)


@dataclass
class EmptySentences:
    """A split, and the same with empty sentences, for one translator."""

    translator: translate.Translator
    model: Transformer
    whole: wmt.TranslationPairs
    gaps: wmt.TranslationPairs
    gaps_folder: Path


@pytest.fixture(scope="module")
def empty_sentences(run_of, mesh, tmp_path_factory) -> EmptySentences:
    path, _, config = run_of("transformer")
    model, codec = translate.load(f"{path}/export", mesh)

    sentences = [[4 + number, 6, 9 + number] for number in range(5)]
    folder = tmp_path_factory.mktemp("sentences")
    write_data(folder / "whole", sentences, codec)
    write_data(folder / "gaps", [[], *sentences[:2], [], *sentences[2:], []], codec)

    return EmptySentences(
        translator=translate.Translator(model, mesh, config),
        model=model,
        whole=wmt.open_pairs(folder / "whole", "valid"),
        gaps=wmt.open_pairs(folder / "gaps", "valid"),
        gaps_folder=folder / "gaps",
    )


def test_an_empty_sentence_has_an_empty_translation(empty_sentences):
    """It changes no other."""
    empty_sentences.model.eval()  # an evaluation of another test leaves it in training mode

    lines = empty_sentences.translator(empty_sentences.whole)
    with_gaps = empty_sentences.translator(empty_sentences.gaps)

    assert all(lines)
    assert with_gaps == ["", *lines[:2], "", *lines[2:], ""]


def test_metrics_of_empty_sentences_are_finite(trained, mesh, empty_sentences):
    _, _, config = trained

    metrics = transformer.evaluate(
        lambda state, batch, *rest: transformer.eval_step(state, batch, *rest),
        empty_sentences.translator,
        transformer.State(empty_sentences.model, None),
        {"valid": empty_sentences.gaps},
        replace(config, data=str(empty_sentences.gaps_folder)),
        mesh,
    )

    assert all(np.isfinite(list(metrics.values())))


# A finished run on other sentences


@pytest.fixture
def other(trained, mesh, tmp_path) -> Path:
    """A folder of data whose training split has other sentences than its validation split."""
    path, *_ = trained
    _, codec = translate.load(f"{path}/export", mesh)
    write_data(tmp_path / "other", [[4, 6, 9 + number] for number in range(6)], codec)
    ended = [[9, 4 + number, wmt.EOS] for number in range(4)]
    for language in ("w", "v"):
        write_sentences(tmp_path / f"other/train.w-v.{language}", ended, 84)
    return tmp_path / "other"


def test_a_split_of_another_folder_is_evaluated(trained, other):
    path, _, config = trained
    flags = {"data": str(other), "split": "train", "beam": 1}

    found = transformer.main(transformer.Config(evaluate=path, **flags))

    model = read_export(path)
    batch = loading.as_tensors(wmt.open_pairs(other, "train").batch(np.arange(4), (8, 8)))
    with torch.no_grad():
        logits = model(batch["source"], batch["previous"])
        sums = label_smoothed_loss(logits, batch["target"], config.label_smoothing)
    loss = (sums["loss"] / sums["tokens"]).item()
    assert found["train_loss"] == pytest.approx(loss, rel=1e-4)
    assert set(found) == {"train_bleu", "train_loss", "train_ppl"}
    file = json.loads(Path(path, "evaluations/other-train.json").read_text())
    assert file["changed"] == {"beam": 1}
    assert file["examples"] == 4


def test_sentences_of_other_words_or_languages_are_refused(trained, other):
    path, *_ = trained
    config = transformer.Config(evaluate=path, data=str(other), split="test")
    with pytest.raises(InputError, match="has no test split, only train, valid"):
        transformer.main(config)

    dictionary = other / "dict.v.txt"
    first, second, *rest = dictionary.read_text().splitlines()
    dictionary.write_text("\n".join([second, first, *rest]) + "\n")
    with pytest.raises(InputError, match="a different dictionary: line 1 of"):
        transformer.main(replace(config, split="train"))

    for file in [*other.glob("train.w-v.v.*"), dictionary]:
        file.rename(file.with_name(file.name.replace("w-v.v", "w-z.z").replace("dict.v", "dict.z")))
    for file in other.glob("train.w-v.w.*"):
        file.rename(file.with_name(file.name.replace("w-v", "w-z")))
    with pytest.raises(InputError, match="no dict.z.txt in its export.*other languages"):
        transformer.main(replace(config, split="train"))


# Refusals


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


def dictionary_of(words: int) -> wmt.Dictionary:
    return wmt.Dictionary([f"word{number}" for number in range(words)])


def test_a_folder_of_two_dictionaries_is_refused(refused, tmp_path):
    for language, words in (("en", 20), ("de", 30)):
        dictionary = dictionary_of(words)
        dictionary.save(f"{tmp_path}/dict.{language}.txt")
        for split in ("train", "valid"):
            prefix = tmp_path / f"{split}.en-de.{language}"
            write_sentences(prefix, [[4, 5, wmt.EOS]] * 12, len(dictionary))

    pattern = "two dictionaries.*--share-embeddings decoder"
    refused(transformer, f"tiny --data {tmp_path}", pattern)


TOO_LONG = "sentence 31 of the split valid has 1031 tokens; the model takes 1024: cut it"
NO_SYMBOL = r"valid\.en-de\.\w+\.bin has the token 24, and its dictionary 24 symbols"


@pytest.mark.parametrize(("sentence", "pattern"), [([4] * 1030, TOO_LONG), ([4, 24], NO_SYMBOL)])
@pytest.mark.parametrize("side", ["en", "de"])
def test_an_evaluations_bad_sentence_is_refused_before_step_1(
    refused, tmp_path, side, sentence, pattern
):
    """It stands in the middle of the split: the first and the last batch do not have it."""
    dictionary = dictionary_of(20)
    for language in ("en", "de"):
        dictionary.save(f"{tmp_path}/dict.{language}.txt")
        for split in ("train", "valid"):
            sentences = [[4, 5, wmt.EOS]] * 100
            if (split, language) == ("valid", side):
                sentences[30] = [*sentence, wmt.EOS]
            prefix = tmp_path / f"{split}.en-de.{language}"
            write_sentences(prefix, sentences, len(dictionary))

    refused(transformer, f"tiny --batch-tokens 64 --data {tmp_path}", pattern)


@pytest.mark.parametrize(
    ("text", "flags", "pattern"),
    [
        (b"w1 w2\n" + b"w3 " * 1030, "", "sentence 2.*1031 tokens.*1024.*cut it"),
        (b"w1 w2\nw3 \xff w4\n", "", "not UTF-8.*byte 9.*convert it"),
        (b"w1\n", "--beam 0", "--beam is 0.*at least 1"),
        (b"w1\n", "--batch-tokens 0", "--batch-tokens is 0.*at least 1"),
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
