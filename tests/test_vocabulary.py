"""data/vocabulary.py: what is learnt from a page of text, saved, and opened again by
transformers."""

import os
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from data import vocabulary
from data.vocabulary import KINDS, continues_word, learn
from errors import InputError

STEMS = (
    "walk talk jump play look call turn open wait help show move learn start clean paint cross"
    " watch visit answer"
)
ENDINGS = ("", "s", "ed", "ing", "er")
BERT_SPECIALS = "[PAD] [UNK] [CLS] [SEP] [MASK]"
ROBERTA_SPECIALS = "<s> <pad> </s> <unk>"  # and <mask>, which comes last
XLNET_SPECIALS = "<unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop>"
PUZZLE = "Walking, the  CAFÉ's players jumped <sep> [SEP] </s> over 東京 & 17 dogs."


def text(lines: int = 400, seed: int = 0) -> list[str]:
    """Returns lines of 3 to 11 words, which are stems with endings."""
    rng = np.random.default_rng(seed)
    words = []
    for stem in STEMS.split():
        words += [stem + ending for ending in ENDINGS]

    made = []
    for _ in range(lines):
        sentence = " ".join(rng.choice(words, rng.integers(3, 12)))
        made.append(f"{sentence.capitalize()}.\n")
    return made


@pytest.fixture(scope="module")
def learnt() -> dict:
    """A tokenizer of each kind."""
    return {kind: learn(text(), kind, 400) for kind in KINDS}


def ids_without_specials(tokenizer, line: str) -> list[int]:
    return tokenizer(line, add_special_tokens=False).input_ids


# ---- saved tokenizers --------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [False, True])
def test_transformers_opens_what_is_saved(learnt, tmp_path, monkeypatch, kind, config):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = learnt[kind]
    tokenizer.save_pretrained(tmp_path)
    if config:
        AutoConfig.for_model(kind).save_pretrained(tmp_path)

    again = AutoTokenizer.from_pretrained(tmp_path)

    assert type(again) is type(tokenizer)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.model_max_length == 512
    assert again.padding_side == ("left" if kind == "xlnet" else "right")
    assert again.mask_token_id == tokenizer.mask_token_id
    assert again(PUZZLE, "Played.").input_ids == tokenizer(PUZZLE, "Played.").input_ids
    for line in (PUZZLE, *text(20, seed=1)):
        assert again(line).input_ids == tokenizer(line).input_ids


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("bert", BERT_SPECIALS, []),
        ("distilbert", BERT_SPECIALS, []),
        ("roberta", ROBERTA_SPECIALS, ["<mask>"]),
        ("xlnet", XLNET_SPECIALS, []),
    ],
)
def test_special_tokens_have_the_ids_of_the_models(learnt, kind, first, last):
    tokenizer = learnt[kind]
    specials = first.split()

    assert tokenizer.convert_ids_to_tokens(list(range(len(specials)))) == specials
    last_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    assert (last_token == "<mask>") == (kind == "roberta")
    assert set(tokenizer.all_special_tokens) == {*specials, *last}


@pytest.mark.parametrize(
    ("kind", "expected", "types"),
    [
        ("bert", "[CLS] walked [SEP] talks [SEP]", [0, 0, 0, 1, 1]),
        ("distilbert", "[CLS] walked [SEP] talks [SEP]", [0, 0, 0, 1, 1]),
        ("roberta", "<s> Ġwalked </s> </s> Ġtalks </s>", [0, 0, 0, 0, 0, 0]),
        ("xlnet", "▁walked <sep> ▁talks <sep> <cls>", [0, 0, 1, 1, 2]),
    ],
)
def test_special_tokens_stand_where_the_model_has_them(kind, expected, types):
    lines = [" walked talks"] * 50 + [line.lower() for line in text()]
    tokenizer = learn(lines, kind, 500)

    pair = tokenizer(" walked", " talks", return_token_type_ids=True)

    assert " ".join(tokenizer.convert_ids_to_tokens(pair.input_ids)) == expected
    assert pair.token_type_ids == types


# ---- words and pieces --------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_text_keeps_its_words(learnt, kind):
    tokenizer = learnt[kind]
    for line in text(50, seed=1):
        ids = ids_without_specials(tokenizer, line)
        assert tokenizer.unk_token_id not in ids
        # Splitting is not spelling: most words are one or two pieces.
        assert len(ids) <= 3 * len(line.split()) + 1, line

        expected = line.strip()
        if kind in ("bert", "distilbert"):
            expected = expected.lower()
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert decoded.replace(" .", ".").strip() == expected


def test_bert_lowers_letters_and_drops_accents(learnt):
    assert learnt["bert"].tokenize("WÁLKING") == learnt["bert"].tokenize("walking")


def test_letters_that_were_not_learnt_are_unknown_but_to_bytes(learnt):
    assert learnt["bert"].tokenize("東") == ["[UNK]"]
    assert "<unk>" not in learnt["roberta"].tokenize("東")


def test_robertas_mask_takes_the_space_before_it(learnt):
    tokenizer = learnt["roberta"]

    ids = ids_without_specials(tokenizer, "a <mask>.")

    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<mask>", "."]


def test_a_full_stop_is_never_within_a_word(learnt):
    vocabulary = learnt["bert"].get_vocab()

    assert "." in vocabulary
    assert "##." not in vocabulary


def test_continuations_of_words(learnt):
    line = " talks walking jumped lookers"
    for kind, tokenizer in learnt.items():
        continues = continues_word(tokenizer)
        assert continues.dtype == bool
        assert continues.shape == (len(tokenizer),)
        assert not continues[tokenizer.all_special_ids].any()

        # The beginnings found are those of the text's words.
        ids = np.array(ids_without_specials(tokenizer, line))
        begins = ~continues[ids]
        words = np.split(ids, np.flatnonzero(begins)[1:])
        assert [tokenizer.decode(word).strip() for word in words] == line.split()
        assert len(ids) > len(words), kind


# ---- the size ----------------------------------------------------------------------------------
def random_lines() -> list[str]:
    """Returns 1,000 lines of words of random letters, a to j."""
    rng = np.random.default_rng(0)
    words = []
    for _ in range(2000):
        words.append("".join(rng.choice(list("abcdefghij"), rng.integers(3, 9))))
    return [" ".join(rng.choice(words, 10)) for _ in range(1000)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_as_large_as_asked_for(kind):
    lines = random_lines()

    learnt = learn(lines, kind, 300)

    assert len(learnt) == 300
    if kind != "xlnet":  # its Unigram is as its docstring says
        # Hash maps of tokenizers differ from call to call.
        assert learn(lines, kind, 300).get_vocab() == learnt.get_vocab()


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_as_large_as_the_text_allows(kind):
    few = learn(["one two one two"], kind, 30_000)

    assert len(few) < 300
    assert few.unk_token_id not in ids_without_specials(few, "two one")


RARE = "".join(map(chr, range(0x4E00, 0x4E00 + 200)))  # more characters than the vocabulary holds


def test_bert_leaves_out_the_rarest_characters():
    tokenizer = learn([RARE, *text(200)], "bert", 100)

    assert len(tokenizer) == 100
    assert tokenizer.unk_token_id not in tokenizer("walking").input_ids
    known = sum(tokenizer.unk_token_id not in tokenizer(letter).input_ids for letter in RARE)
    assert known < 50


def test_xlnet_refuses_more_characters_than_its_size():
    message = "size is 100, and the text has more different characters"
    with pytest.raises(InputError, match=message):
        learn([RARE, *text(200)], "xlnet", 100)


# ---- what is not learnt from -------------------------------------------------------------------
RANDOM_LETTERS = "".join(np.random.default_rng(0).choice(list("qxz"), 80_000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "long", [RANDOM_LETTERS, "=" * 2000], ids=["random letters", "equal signs"]
)
def test_a_word_without_end_is_not_learnt_from(kind, long, capsys):
    lines = text()

    before = time.monotonic()
    learnt = learn([*lines, f"walk {long} talk", *lines], kind, 300).get_vocab()
    said = "1 words of more than 1,000 characters are not learnt from"
    assert said in capsys.readouterr().out
    assert time.monotonic() - before < 5  # 12 s where it is learnt from

    expected = learn([*lines, "walk  talk", *lines], kind, 300).get_vocab()
    assert capsys.readouterr().out == ""
    assert set(learnt) == set(expected)
    if kind != "xlnet":
        assert learnt == expected


def test_what_wordpiece_takes_for_unknown_is_not_learnt_from():
    """Chinese has no spaces: WordPiece divides it, and it is learnt from."""
    long = "qx" * 51
    lines = [*text(), "\u4eca\u5929" * 600]

    expected = learn(lines, "bert", 300)
    learnt = learn([*lines, *[long] * 9], "bert", 300)

    assert learnt.get_vocab() == expected.get_vocab()
    assert expected.tokenize(long) == ["[UNK]"]
    assert expected.tokenize("\u4eca") == ["\u4eca"]


# ---- what cannot be learnt ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lines", "kind", "size", "message"),
    [
        (["a"], "gpt2", 300, "kind is gpt2; expected one of bert, distilbert, roberta, xlnet"),
        (["a"], "roberta", 260, "vocabulary size is 260; expected 261 or more for roberta"),
        (["a"], "bert", 5, "vocabulary size is 5; expected 64 or more"),
        ([], "bert", 300, "no text"),
        ([" \n", ""], "xlnet", 300, "no text"),
    ],
)
def test_what_cannot_be_learnt_is_explained(lines, kind, size, message):
    with pytest.raises(InputError, match=message):
        learn(lines, kind, size)


def test_a_tokenizer_without_marks_of_words_is_explained():
    model = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="a")

    with pytest.raises(InputError, match="marks neither beginnings nor continuations"):
        continues_word(plain)


def test_characters_without_a_piece_have_the_same_ids_again():
    """Unigram's trainer gives them scores in the order of a hash map, another one in each call."""
    first = learn(text(), "xlnet", 400, repeatable=True)
    second = learn(text(), "xlnet", 400, repeatable=True)

    assert second.get_vocab() == first.get_vocab()
    spelled = ids_without_specials(first, "gtkw")
    assert len(spelled) >= 4, "the text has no such piece: they are single characters"
    assert ids_without_specials(second, "gtkw") == spelled


def test_a_repeatable_vocabulary_is_learnt_on_one_core(monkeypatch):
    """The order of the Unigram trainer's sums is then the same in each run."""
    learnt_with = []
    learn_pieces = vocabulary._learn

    def watched(*args):
        learnt_with.append(os.environ.get("TOKENIZERS_PARALLELISM"))
        return learn_pieces(*args)

    monkeypatch.setattr(vocabulary, "_learn", watched)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    lines = text(40)
    vocabulary.learn(lines, "xlnet", 64, repeatable=True)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    vocabulary.learn(lines, "xlnet", 64)
    vocabulary.learn(lines, "xlnet", 64, repeatable=True)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert learnt_with == ["false", "true", "false"]
