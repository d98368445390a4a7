"""data/languages.py: codes of languages, and BLEU's tokenizer for each; train/translate.py's Bleu
beside sacrebleu."""

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


# ---- codes of languages ------------------------------------------------------------------------
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
        assert found.language == language, code
        assert found.tokenizer == tokenizer, code
        assert found.note == "", code
        assert base_language(code) == language


def test_no_code_is_two_languages():
    codes = CODES.replace("|", " ").split()

    assert len(codes) == len(set(codes))
    assert len(codes) == len(BASES)
    for code in codes:
        assert 2 <= len(code) <= 3


@pytest.mark.parametrize("code", ["th", "tha_Thai", "my_MM", "km", "lo", "bod"])
def test_a_language_written_without_spaces_has_a_note(code):
    assert scoring(code).tokenizer == "13a"
    assert "written without spaces" in scoring(code).note


def test_an_unknown_code_has_a_note():
    assert "no code that is known here" in scoring("klingon").note
    assert scoring("KLINGON_Latn").language == "klingon"


def test_a_script_of_its_own_has_a_note():
    assert "Javanese in its own script" in scoring("jv_Java").note
    assert not scoring("jv_Latn").note


def test_a_tokenizer_that_is_given_is_taken_without_a_note():
    found = scoring("th", "flores200")

    assert found.tokenizer == "flores200"
    assert found.note == ""


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        ("jp", "ja-mecab"),
        ("cn", "zh"),
        ("kr", "ko-mecab"),
        ("jp_JP", "ja-mecab"),
        ("CN-Hans", "zh"),
    ],
)
def test_the_code_of_a_country_is_refused_without_a_tokenizer(code, meant):
    message = f"target language is {code}, .*--bleu-tokenizer {meant}"
    with pytest.raises(InputError, match=message):
        scoring(code)

    assert scoring(code, "13a").tokenizer == "13a"


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(InputError, match="--bleu-tokenizer is moses; expected one of 13a"):
        scoring("de", "moses")


@pytest.mark.parametrize("target", ["zh-Hans", "pt-BR", "zh_CN", "en-GB"])
def test_codes_with_a_hyphen_are_languages_of_a_folder(target, tmp_path):
    pairs = write_pairs(tmp_path, [[4, 5]], WORDS, target=target)

    assert pairs.source_language == "en"
    assert pairs.target_language == target
    assert len(pairs) == 1


# ---- BLEU --------------------------------------------------------------------------------------
class References:
    """References of a split, as they stand in text."""

    split = "valid"

    def __init__(self, lines: list[str], language: str):
        self.lines = lines
        self.target_language = language

    def references(self, unknown: str) -> list[str]:
        return self.lines


@pytest.mark.parametrize(
    ("code", "tokenizer", "sacrebleus"),
    [
        ("zh_CN", "", "zh"),
        ("zho", "", "zh"),
        ("de", "", "13a"),
        ("ja", "char", "char"),
    ],
)
def test_bleu_is_that_of_sacrebleus_command(code, tokenizer, sacrebleus, mesh, tmp_path, capsys):
    references = tmp_path / "references"
    references.write_text("\n".join(CHINESE) + "\n")
    command = [sys.executable, "-m", "sacrebleu", references, "-b", "-w", "6"]
    command += ["--tokenize", sacrebleus]
    hypotheses = "\n".join(SPOKEN) + "\n"
    ended = subprocess.run(command, input=hypotheses, capture_output=True, text=True, check=True)
    expected = float(ended.stdout)

    bleu = translate.Bleu(References(CHINESE, code), tokenizer)

    assert bleu(SPOKEN, mesh) == pytest.approx(expected, abs=1e-6)
    assert f"tok:{sacrebleus}" in bleu.signature
    assert bleu.signature in capsys.readouterr().out
    assert (expected > 20) == (code != "de")


@pytest.mark.parametrize("language", ["ja_JP", "jpn", "ko", "kor"])
def test_a_tokenizer_that_is_not_installed_costs_a_sentence(language, monkeypatch):
    for name in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("ja", "ko"):
        module = f"sacrebleu.tokenizers.tokenizer_{name}_mecab"
        monkeypatch.delitem(sys.modules, module, raising=False)

    remedy = "pip install sacrebleu.*--bleu-tokenizer char"
    with pytest.raises(InputError, match=f"target language {language} .*{remedy}"):
        translate.Bleu(References(CHINESE, language))


def write_pairs(folder, ids: list[list[int]], symbols: list[str], target: str = "de"):
    """Writes a folder as fairseq-preprocess leaves it, and opens its split valid.

    Splits and languages are all the same.
    """
    ended = [[*sentence, wmt.EOS] for sentence in ids]
    sizes = [len(sentence) for sentence in ended]
    for language in ("en", target):
        wmt.Dictionary(symbols).save(folder / f"dict.{language}.txt")
        for split in ("train", "valid"):
            prefix = folder / f"{split}.en-{target}.{language}"
            wmt.write_mmap(prefix, np.concatenate(ended), sizes, len(symbols) + 4)
    return wmt.open_pairs(folder, "valid")


WORDS = [f"word{number}" for number in range(20)]


def half_unknown(row: int) -> list[int]:
    """Returns a sentence of twelve words; the first, the third, … are unknown."""
    ids = []
    for position in range(12):
        known = 4 + (3 * row + position) % 20
        ids.append(known if position % 2 else wmt.UNK)
    return ids


@pytest.mark.parametrize("tokenizer", ["13a", "char", "intl"])
def test_unknown_words_of_a_reference_match_nothing(tokenizer, mesh, tmp_path):
    """As in fairseq's training; a system that says only <unk>, and one that has it where the
    reference has."""
    ids = [half_unknown(row) for row in range(8)]
    pairs = write_pairs(tmp_path, ids, WORDS)
    bleu = translate.Bleu(pairs, tokenizer)
    note = "8 of 8 references of the split valid have unknown words"
    assert note in bleu.notes[0]

    systems = {
        "only": [[wmt.UNK] * 12] * 8,
        "where": ids,
        "half": [sentence[1:] for sentence in ids],
    }
    found = {}
    for name, system in systems.items():
        hypotheses = [pairs.decode(sentence, bleu.unknown_word) for sentence in system]
        found[name] = bleu(hypotheses, mesh)

        # The strings of fairseq's _inference_with_bleu, where sacrebleu's tokenizer keeps them
        # whole.
        if tokenizer != "char":
            theirs = [pairs.decode(sentence, "UNKNOWNTOKENINHYP") for sentence in system]
            references = pairs.references("UNKNOWNTOKENINREF")
            expected = sacrebleu.corpus_bleu(theirs, [references], tokenize=tokenizer)
            assert found[name] == expected.score

    assert found["only"] == pytest.approx(0, abs=1e-9)
    # The characters of every second word are right.
    assert found["where"] < (70 if tokenizer == "char" else 10)


@pytest.mark.parametrize("tokenizer", ["13a", "char", "intl"])
def test_references_without_unknown_words_have_no_note(tokenizer, mesh, tmp_path):
    pairs = write_pairs(tmp_path, [[4, 5, 6, 7]] * 3, WORDS)

    bleu = translate.Bleu(pairs, tokenizer)

    assert bleu(["word0 word1 word2 word3"] * 3, mesh) == pytest.approx(100)
    assert not bleu.notes


def test_a_byte_order_mark_is_no_part_of_a_reference(tmp_path):
    (tmp_path / "valid.de").write_bytes("\ufeffein\u2028Haus\r\n\n".encode())

    assert wmt.read_lines(tmp_path / "valid.de") == ["ein\u2028Haus\r", ""]


# ---- pieces of words ---------------------------------------------------------------------------
ENDS = [f"end{number}" for number in range(50)]
BPE = [f"w{number}@@" for number in range(30)] + ENDS
SENTENCEPIECE = [f"▁w{number}" for number in range(30)] + ENDS


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


def test_a_dictionary_of_both_kinds_is_refused_without_pieces(tmp_path):
    pairs = write_pairs(tmp_path, [[4, 40]], [*BPE, *SENTENCEPIECE[:28]])

    counts = "28 that begin with ▁ and 30 that end with @@"
    message = rf"dict\.de\.txt has 108 symbols, {counts}.*--pieces"
    with pytest.raises(InputError, match=message):
        translate.Bleu(pairs)
    assert wmt.open_pairs(tmp_path, "valid", "subword_nmt").references() == ["w0end6"]


def test_few_pieces_among_many_words_are_refused():
    symbols = [f"plain{number}" for number in range(97)]
    symbols += ["▁a", "▁b", "▁c"]

    with pytest.raises(InputError, match=r"has 100 symbols, 3 that begin with ▁ and 0"):
        wmt.Dictionary(symbols).pieces("dict.txt")


def test_references_that_are_split_into_pieces_are_joined(tmp_path):
    """fairseq-preprocess' input beside its output; other text stays as it is."""
    pairs = write_pairs(tmp_path, [[4, 40, wmt.UNK], [41], []], BPE)
    text = tmp_path / "valid.de"

    text.write_text("w0@@ end6 Kindl\nend7\n\n")
    assert pairs.references("UNKNOWN") == ["w0end6 Kindl", "end7", ""]

    for other in ("w0end6 Kindl\nend7\n\n", "w0@@ end6 @@ Kindl\nend7\n\n"):
        text.write_text(other)
        assert pairs.references() == other.split("\n")[:-1]


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
    remedy = "--pieces words takes each symbol for a word"
    with pytest.raises(InputError, match=f"dict.de.txt has .*{kind}.*; {remedy}"):
        Dictionary(symbols).pieces("dict.de.txt")


@pytest.mark.parametrize(
    "symbols",
    [
        ["##", "a", "b", "Ġ"],
        [*map(str, range(999))],
        ["Ġa", *"bcdefgh"],
    ],
)
def test_single_marks_and_few_numbers_are_words(symbols):
    assert Dictionary(symbols).pieces("dict.de.txt") == "words"


# ---- long sentences ----------------------------------------------------------------------------
def test_a_long_sentence_has_its_number_among_the_empty_lines():
    mesh = SimpleNamespace(num_devices=1)
    lengths = np.array([[3], [51]])

    with pytest.raises(InputError, match="^sentence 8 has 51 tokens; the model takes 50"):
        translate.evaluation_plan(lengths, (16,), 64, 50, mesh, numbers=np.array([4, 7]))
    with pytest.raises(InputError, match="^sentence 2 of the split valid has 51"):
        translate.evaluation_plan(lengths, (16,), 64, 50, mesh, "valid")
