"""data/vocabulary.py: what is learnt from a page of text, saved, and opened again by transformers."""

import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from data.vocabulary import KINDS, continues_word, learn
from errors import InputError

WORDS = "walk talk jump play look call turn open wait help show move learn start clean paint cross watch visit answer"
ENDINGS = ("", "s", "ed", "ing", "er")
BERT_SPECIALS, XLNET_SPECIALS = "[PAD] [UNK] [CLS] [SEP] [MASK]", "<unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop>"
PUZZLE = "Walking, the  CAFÉ's players jumped <sep> [SEP] </s> over 東京 & 17 dogs."


def text(lines: int = 400, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    words = [word + ending for word in WORDS.split() for ending in ENDINGS]
    return [" ".join(rng.choice(words, rng.integers(3, 12))).capitalize() + ".\n" for _ in range(lines)]


@pytest.fixture(scope="module")
def learnt() -> dict:
    return {kind: learn(text(), kind, 400) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [False, True])
def test_transformers_opens_what_is_saved(learnt, tmp_path, monkeypatch, kind, config):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = learnt[kind]
    tokenizer.save_pretrained(tmp_path)
    if config:
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer) and again.get_vocab() == tokenizer.get_vocab()
    assert (again.model_max_length, again.padding_side) == (512, "left" if kind == "xlnet" else "right")
    for texts in ((PUZZLE,), (PUZZLE, "Played."), *((line,) for line in text(20, seed=1))):
        assert again(*texts).input_ids == tokenizer(*texts).input_ids
    assert again.mask_token_id == tokenizer.mask_token_id


@pytest.mark.parametrize(
    ("kind", "first", "expected", "types"),
    [
        *((kind, BERT_SPECIALS, "[CLS] walked [SEP] talks [SEP]", [0, 0, 0, 1, 1]) for kind in ("bert", "distilbert")),
        ("roberta", "<s> <pad> </s> <unk>", "<s> Ġwalked </s> </s> Ġtalks </s>", [0, 0, 0, 0, 0, 0]),
        ("xlnet", XLNET_SPECIALS, "▁walked <sep> ▁talks <sep> <cls>", [0, 0, 1, 1, 2]),
    ],
)
def test_special_tokens_stand_where_the_model_has_them_with_its_ids(learnt, kind, first, expected, types):
    specials, tokenizer = first.split(), learnt[kind]
    assert tokenizer.convert_ids_to_tokens(list(range(len(specials)))) == specials
    assert (tokenizer.convert_ids_to_tokens(len(tokenizer) - 1) == "<mask>") == (kind == "roberta")
    assert set(tokenizer.all_special_tokens) == {*specials, *(["<mask>"] if kind == "roberta" else [])}
    tokenizer = learn([" walked talks"] * 50 + [line.lower() for line in text()], kind, 500)
    pair = tokenizer(" walked", " talks", return_token_type_ids=True)
    assert " ".join(tokenizer.convert_ids_to_tokens(pair.input_ids)) == expected
    assert pair.token_type_ids == types


def test_text_keeps_its_words(learnt):
    for kind, tokenizer in learnt.items():
        for line in text(50, seed=1):
            ids = tokenizer(line, add_special_tokens=False).input_ids
            assert tokenizer.unk_token_id not in ids
            # Splitting is not spelling: most words are one or two pieces.
            assert len(ids) <= 3 * len(line.split()) + 1, (kind, line)
            expected = line.strip().lower() if "bert" in kind and kind != "roberta" else line.strip()
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False).replace(" .", ".").strip() == expected
    assert learnt["bert"].tokenize("WÁLKING") == learnt["bert"].tokenize("walking")
    assert learnt["bert"].tokenize("東") == ["[UNK]"] and "<unk>" not in learnt["roberta"].tokenize("東")
    ids = learnt["roberta"]("a <mask>.", add_special_tokens=False).input_ids
    assert learnt["roberta"].convert_ids_to_tokens(ids) == ["a", "<mask>", "."], "the mask takes the space before it"
    assert "." in learnt["bert"].get_vocab() and "##." not in learnt["bert"].get_vocab(), "never within a word"


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_as_large_as_asked_for_or_as_the_text_allows(kind):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(3, 9))) for _ in range(2000)]
    lines = [" ".join(rng.choice(words, 10)) for _ in range(1000)]
    learnt = learn(lines, kind, 300)
    assert len(learnt) == 300
    # Hash maps of tokenizers differ; XLNet's Unigram is as its docstring says.
    assert kind == "xlnet" or learn(lines, kind, 300).get_vocab() == learnt.get_vocab()
    few = learn(["one two one two"], kind, 30_000)
    assert len(few) < 300
    assert few.unk_token_id not in few("two one", add_special_tokens=False).input_ids
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 200)))  # more characters than places
    if kind == "bert":
        tokenizer = learn([rare, *text(200)], kind, 100)
        assert len(tokenizer) == 100 and tokenizer.unk_token_id not in tokenizer("walking").input_ids
        assert sum(tokenizer.unk_token_id not in tokenizer(character).input_ids for character in rare) < 50
    if kind == "xlnet":
        with pytest.raises(InputError, match="size is 100, and the text has more different characters"):
            learn([rare, *text(200)], kind, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("long", ["".join(np.random.default_rng(0).choice(list("qxz"), 80_000)), "=" * 2000])
def test_a_word_without_end_is_not_learnt_from(kind, long, capsys):
    lines = text()
    before = time.monotonic()
    learnt = learn([*lines, f"walk {long} talk", *lines], kind, 300).get_vocab()
    assert "1 words of more than 1,000 characters are not learnt from" in capsys.readouterr().out
    assert time.monotonic() - before < 5  # 12 s where it is learnt from
    expected = learn([*lines, "walk  talk", *lines], kind, 300).get_vocab()
    assert capsys.readouterr().out == ""
    assert set(learnt) == set(expected) and (kind == "xlnet" or learnt == expected)


def test_what_wordpiece_takes_for_unknown_is_not_learnt_from():
    """Chinese has no spaces: WordPiece divides it, and it is learnt from."""
    long, lines = "qx" * 51, [*text(), "\u4eca\u5929" * 600]
    expected = learn(lines, "bert", 300)
    learnt = learn([*lines, *[long] * 9], "bert", 300)
    assert learnt.get_vocab() == expected.get_vocab()
    assert expected.tokenize(long) == ["[UNK]"] and expected.tokenize("\u4eca") == ["\u4eca"]


def test_continuations_of_words(learnt):
    line = " talks walking jumped lookers"
    for kind, tokenizer in learnt.items():
        continues = continues_word(tokenizer)
        assert continues.dtype == bool and continues.shape == (len(tokenizer),)
        assert not continues[tokenizer.all_special_ids].any()
        ids = np.array(tokenizer(line, add_special_tokens=False).input_ids)
        # The beginnings found are those of the text's words.
        words = np.split(ids, np.flatnonzero(~continues[ids])[1:])
        assert [tokenizer.decode(word).strip() for word in words] == line.split() and len(ids) > len(words), kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], "gpt2", 300), "kind is gpt2; expected one of bert, distilbert, roberta, xlnet"),
        ((["a"], "roberta", 260), "vocabulary size is 260; expected 261 or more for roberta"),
        ((["a"], "bert", 5), "vocabulary size is 5; expected 64 or more"),
        (([], "bert", 300), "no text"),
        (([" \n", ""], "xlnet", 300), "no text"),
    ],
)
def test_what_cannot_be_learnt_is_explained(arguments, message):
    with pytest.raises(InputError, match=message):
        learn(*arguments)
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(InputError, match="marks neither beginnings nor continuations"):
        continues_word(PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="a"))
