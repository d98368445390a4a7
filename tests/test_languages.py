"""data/languages.py: codes of languages, and BLEU's tokenizer for each; train/translate.py's Bleu beside sacrebleu."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu

from data import wmt
from data.fairseq_format import Dictionary
from data.languages import BASES, CODES, base_language, scoring
from errors import InputError
from train import translate

CHINESE = ["我们今天去北京。", "他昨天没有来这里。", "这本书很有意思，你应该看看。"]
SPOKEN = ["我们明天去北京。", "他昨天没有来这里。", "这本书有意思，你可以看看。"]


@pytest.mark.parametrize(
    ("codes", "language", "tokenizer"),
    [
        ("zh zh_CN zh-cn zh-TW zho chi cmn zh-Hans zho_Hant zh_Hans_CN ZH yue", "zh", "zh"),
        ("ja ja_JP ja-JP jpn jpn_Jpan ja_XX JA", "ja", "ja-mecab"),
        ("ko ko_KR ko-kr kor kor_Hang ko_KR.UTF-8", "ko", "ko-mecab"),
        ("pt pt-BR pt_BR por por_Latn", "pt", "13a"),
        ("de de_DE deu ger de-AT", "de", "13a"),
        ("zh-Latn zh_Latn_CN", "zh", "13a"),  # pinyin
        ("th-Latn tha_Latn", "th", "13a"),  # with spaces
    ],
)
def test_all_codes_of_a_language_have_its_tokenizer(codes, language, tokenizer):
    for code in codes.split():
        found = scoring(code)
        assert (found.language, found.tokenizer, found.note) == (language, tokenizer, ""), code
        assert base_language(code) == language


def test_no_code_is_two_languages():
    codes = CODES.replace("|", " ").split()
    assert len(codes) == len(set(codes)) == len(BASES) and all(2 <= len(code) <= 3 for code in codes)


def test_what_the_tokenizer_does_not_fit_is_said():
    for code in ("th", "tha_Thai", "my_MM", "km", "lo", "bod"):
        assert scoring(code).tokenizer == "13a" and "written without spaces" in scoring(code).note, code
    assert "no code that is known here" in scoring("klingon").note
    assert scoring("KLINGON_Latn").language == "klingon"
    assert "Javanese in its own script" in scoring("jv_Java").note and not scoring("jv_Latn").note
    given = scoring("th", "flores200")
    assert (given.tokenizer, given.note) == ("flores200", "")
    for code, meant in (("jp", "ja-mecab"), ("cn", "zh"), ("kr", "ko-mecab"), ("jp_JP", "ja-mecab"), ("CN-Hans", "zh")):
        with pytest.raises(InputError, match=f"target language is {code}, .*--bleu-tokenizer {meant}"):
            scoring(code)
        assert scoring(code, "13a").tokenizer == "13a"
    with pytest.raises(InputError, match="--bleu-tokenizer is moses; expected one of 13a"):
        scoring("de", "moses")


class References:
    """References of a split, as they stand in text."""

    split = "valid"

    def __init__(self, lines: list[str], language: str):
        self.lines, self.target_language = lines, language

    def references(self, unknown: str) -> list[str]:
        return self.lines


@pytest.mark.parametrize(("code", "tokenizer"), [("zh_CN", ""), ("zho", ""), ("de", ""), ("ja", "char")])
def test_bleu_is_that_of_sacrebleus_command(code, tokenizer, mesh, tmp_path, capsys):
    (tmp_path / "references").write_text("\n".join(CHINESE) + "\n")
    command = [sys.executable, "-m", "sacrebleu", tmp_path / "references", "-b", "-w", "6"]
    command += ["--tokenize", tokenizer or ("zh" if code != "de" else "13a")]
    text = "\n".join(SPOKEN) + "\n"
    expected = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    bleu = translate.Bleu(References(CHINESE, code), tokenizer)
    assert bleu(SPOKEN, mesh) == pytest.approx(float(expected), abs=1e-6)
    assert f"tok:{command[-1]}" in bleu.signature and bleu.signature in capsys.readouterr().out
    assert (float(expected) > 20) == (code != "de")


@pytest.mark.parametrize("language", ["ja_JP", "jpn", "ko", "kor"])
def test_a_tokenizer_that_is_not_installed_costs_a_sentence(language, monkeypatch):
    for name in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("ja", "ko"):
        monkeypatch.delitem(sys.modules, f"sacrebleu.tokenizers.tokenizer_{name}_mecab", raising=False)
    message = f"target language {language} .*pip install sacrebleu.*--bleu-tokenizer char"
    with pytest.raises(InputError, match=message):
        translate.Bleu(References(CHINESE, language))


def write_pairs(folder, ids: list[list[int]], symbols: list[str], source=None, target: str = "de"):
    """A folder as fairseq-preprocess leaves it, whose splits are all the same; source None: the target's tokens."""
    for language, side in (("en", source or ids), (target, ids)):
        wmt.Dictionary(symbols).save(folder / f"dict.{language}.txt")
        ended = [[*sentence, wmt.EOS] for sentence in side]
        for split in ("train", "valid"):
            prefix = folder / f"{split}.en-{target}.{language}"
            wmt.write_mmap(prefix, np.concatenate(ended), list(map(len, ended)), len(symbols) + 4)
    return wmt.open_pairs(folder, "valid")


WORDS = [f"word{number}" for number in range(20)]


@pytest.mark.parametrize("tokenizer", ["13a", "char", "intl"])
def test_unknown_words_of_a_reference_match_nothing(tokenizer, mesh, tmp_path):
    """As in fairseq's training; a system that says only <unk>, and one that has it where the reference has."""
    ids = [[4 + (3 * row + place) % 20 if place % 2 else wmt.UNK for place in range(12)] for row in range(8)]
    pairs = write_pairs(tmp_path, ids, WORDS)
    bleu = translate.Bleu(pairs, tokenizer)
    assert "8 of 8 references of the split valid have unknown words" in bleu.notes[0]
    systems = {"only": [[wmt.UNK] * 12] * 8, "where": ids, "half": [sentence[1:] for sentence in ids]}
    found = {}
    for name, system in systems.items():
        hypotheses = [pairs.decode(sentence, bleu.unknown_word) for sentence in system]
        found[name] = bleu(hypotheses, mesh)
        # The strings of fairseq's _inference_with_bleu, where sacrebleu's tokenizer keeps them whole.
        theirs = [pairs.decode(sentence, "UNKNOWNTOKENINHYP") for sentence in system]
        references = pairs.references("UNKNOWNTOKENINREF")
        if tokenizer != "char":
            assert found[name] == sacrebleu.corpus_bleu(theirs, [references], tokenize=tokenizer).score
    assert found["only"] == pytest.approx(0, abs=1e-9)
    assert found["where"] < (70 if tokenizer == "char" else 10)  # the characters of every second word are right
    whole = translate.Bleu(write_pairs(tmp_path, [[4, 5, 6, 7]] * 3, WORDS), tokenizer)
    assert whole(["word0 word1 word2 word3"] * 3, mesh) == pytest.approx(100) and not whole.notes


BPE = [f"w{number}@@" for number in range(30)] + [f"end{number}" for number in range(50)]
SENTENCEPIECE = [f"▁w{number}" for number in range(30)] + [f"end{number}" for number in range(50)]


@pytest.mark.parametrize(
    ("symbols", "pieces"),
    [
        (BPE, "subword_nmt"),
        (SENTENCEPIECE, "sentencepiece"),
        (WORDS, "words"),
        ([*BPE, "▁odd"], "subword_nmt"),
        ([*BPE, "▁"], "subword_nmt"),
        ([*SENTENCEPIECE, "@@", "a@@"], "sentencepiece"),
        ([*WORDS, "▁odd"], "words"),
        ([*WORDS, "odd@@"], "words"),
        ([*WORDS, "@@", "▁", "madeupword0000"], "words"),
        ([], "words"),
    ],
)
def test_the_majority_says_what_the_symbols_are(symbols, pieces, tmp_path):
    assert wmt.Dictionary(symbols).pieces("dict.de.txt") == pieces
    pairs = write_pairs(tmp_path, [[4]], symbols or ["a"])
    assert pairs.pieces == pieces
    assert wmt.open_pairs(tmp_path, "valid", "words").pieces == "words"


def test_a_dictionary_of_both_sorts_is_refused_until_it_is_said_what_it_is(tmp_path):
    pairs = write_pairs(tmp_path, [[4, 40]], [*BPE, *SENTENCEPIECE[:28]])
    message = r"dict\.de\.txt has 108 symbols, 28 that begin with ▁ and 30 that end with @@.*--pieces"
    with pytest.raises(InputError, match=message):
        translate.Bleu(pairs)
    assert wmt.open_pairs(tmp_path, "valid", "subword_nmt").references() == ["w0end6"]
    few = [*(f"plain{number}" for number in range(97)), "▁a", "▁b", "▁c"]
    with pytest.raises(InputError, match=r"has 100 symbols, 3 that begin with ▁ and 0"):
        wmt.Dictionary(few).pieces("dict.txt")


def test_references_that_are_split_into_pieces_are_joined(tmp_path):
    """fairseq-preprocess' input beside its output; other text stays as it is."""
    ids = [[4, 40, wmt.UNK], [41], []]
    pairs = write_pairs(tmp_path, ids, BPE)
    (tmp_path / "valid.de").write_text("w0@@ end6 Kindl\nend7\n\n")
    assert pairs.references("UNKNOWN") == ["w0end6 Kindl", "end7", ""]
    for text in ("w0end6 Kindl\nend7\n\n", "w0@@ end6 @@ Kindl\nend7\n\n"):
        (tmp_path / "valid.de").write_text(text)
        assert pairs.references() == text.split("\n")[:-1]


@pytest.mark.parametrize("target", ["zh-Hans", "pt-BR", "zh_CN", "en-GB"])
def test_codes_with_a_hyphen_are_languages_of_a_folder(target, tmp_path):
    pairs = write_pairs(tmp_path, [[4, 5]], WORDS, target=target)
    assert (pairs.source_language, pairs.target_language, len(pairs)) == ("en", target, 1)


@pytest.mark.parametrize(
    ("symbols", "kind"),
    [
        (["Ġthe", "Ġcat", "s", "Ġon", "at"], "begin with Ġ, as byte-level"),
        (["the", "##s", "cat", "##ing"], "begin with ##, as WordPiece"),
        (["the</w>", "ca", "t</w>"], "end with </w>"),
        ([*map(str, range(1000))], "numbers alone as symbols, as GPT-2"),
    ],
)
def test_pieces_that_cannot_be_joined_are_not_taken_for_words(symbols, kind):
    with pytest.raises(InputError, match=f"dict.de.txt has .*{kind}.*; --pieces words takes each symbol for a word"):
        Dictionary(symbols).pieces("dict.de.txt")


@pytest.mark.parametrize("symbols", [["##", "a", "b", "Ġ"], [*map(str, range(999))], ["Ġa", *"bcdefgh"]])
def test_single_marks_and_few_numbers_are_words(symbols):
    assert Dictionary(symbols).pieces("dict.de.txt") == "words"


def test_a_byte_order_mark_is_no_part_of_a_reference(tmp_path):
    (tmp_path / "valid.de").write_bytes("\ufeffein\u2028Haus\r\n\n".encode())
    assert wmt.read_lines(tmp_path / "valid.de") == ["ein\u2028Haus\r", ""]


def test_a_sentence_that_is_too_long_has_its_number_among_the_empty_lines():
    mesh = SimpleNamespace(num_devices=1)
    lengths = np.array([[3], [51]])
    with pytest.raises(InputError, match="^sentence 8 has 51 tokens; the model takes 50"):
        translate.evaluation_plan(lengths, (16,), 64, 50, mesh, numbers=np.array([4, 7]))
    with pytest.raises(InputError, match="^sentence 2 of the split valid has 51"):
        translate.evaluation_plan(lengths, (16,), 64, 50, mesh, "valid")
