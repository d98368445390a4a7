"""data/wmt.py and data/fairseq_format.py on fairseq's golden files, and on small files that the
tests write."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_helpers import GOLDEN

from data.fairseq_format import DTYPES, token_dtype, write_index
from data.wmt import EOS, PAD, UNK, Dictionary, MmapTokens, SyntheticPairs, open_pairs, write_mmap
from errors import InputError

SENTENCES = {
    "en": [[4, 5, 6], [7], [], [8, 9, 10, 11], [4, 4]],
    "de": [[12, 13], [14, 15, 16, 17], [5], [6, 7, 8], [9, 3, 9, 10, 11]],
}


def refuses(message: str, function: Callable, *arguments) -> None:
    """Asserts that a call ends in an InputError whose text `message` finds."""
    with pytest.raises(InputError, match=message):
        function(*arguments)


def write_tokens(prefix: Path, sentences: list[list[int]], symbols: int = 18) -> None:
    """Writes sentences in fairseq's binary format."""
    sizes = [len(sentence) for sentence in sentences]
    write_mmap(prefix, np.concatenate(sentences), sizes, symbols)


def write_folder(
    folder: Path, sentences=SENTENCES, splits=("train", "valid"), symbols: int = 18
) -> Path:
    """Writes a folder as fairseq-preprocess leaves it, whose splits are all the same."""
    folder.mkdir(exist_ok=True)
    dictionary = Dictionary([f"s{number}" for number in range(4, symbols)])
    for language, ids in sentences.items():
        dictionary.save(folder / f"dict.{language}.txt")
        ended = [[*sentence, EOS] for sentence in ids]
        for split in splits:
            write_tokens(folder / f"{split}.en-de.{language}", ended, symbols)
    return folder


# ---- token files -------------------------------------------------------------------------------
def test_what_fairseq_wrote_is_written_again_byte_for_byte(tmp_path):
    theirs = GOLDEN / "joint/test.en-de.de"
    ours = tmp_path / "ours"
    tokens = MmapTokens(theirs)

    write_tokens(ours, [tokens[index] for index in range(len(tokens))])

    for end in ("idx", "bin"):
        assert Path(f"{ours}.{end}").read_bytes() == Path(f"{theirs}.{end}").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_tokens_of_each_type_are_read(tmp_path, dtype):
    sentences = [[2], [4, 5, 2], [100, 99, 98, 97, 2]]
    np.concatenate(sentences).astype(dtype).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", [1, 3, 5], np.dtype(dtype))

    tokens = MmapTokens(tmp_path / "a")

    assert len(tokens) == 3
    assert tokens.sizes.tolist() == [1, 3, 5]
    assert tokens.tokens.dtype == dtype
    assert [tokens[index].tolist() for index in range(3)] == sentences
    assert tokens.starts(np.array([2, 0])).tolist() == [4, 0]


def test_a_large_vocabulary_has_the_larger_type(tmp_path):
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32

    write_tokens(tmp_path / "large", [[65_536, 2]], 65_537)
    assert MmapTokens(tmp_path / "large")[0].tolist() == [65_536, 2]


def test_there_may_be_no_sentence(tmp_path):
    write_mmap(tmp_path / "none", np.empty(0, np.int64), [], 18)

    assert len(MmapTokens(tmp_path / "none")) == 0


@pytest.fixture
def tokens_prefix(tmp_path) -> Path:
    """A file of two sentences and its index: 10 bytes and 50."""
    write_tokens(tmp_path / "a", [[4, 5, 2], [6, 2]])
    return tmp_path / "a"


def test_missing_and_truncated_tokens_are_explained(tokens_prefix):
    data = Path(f"{tokens_prefix}.bin")
    whole = data.read_bytes()

    data.write_bytes(whole[:-1])
    refuses(r"a\.bin is truncated: 9 bytes, expected 10", MmapTokens, tokens_prefix)
    data.write_bytes(b"")
    refuses(r"a\.bin is truncated: 0 bytes, expected 10", MmapTokens, tokens_prefix)
    data.unlink()
    refuses(r"there is no .*a\.bin", MmapTokens, tokens_prefix)

    data.write_bytes(whole)
    assert MmapTokens(tokens_prefix)[1].tolist() == [6, 2]


def test_missing_and_damaged_indices_are_explained(tokens_prefix):
    index = Path(f"{tokens_prefix}.idx")
    whole = index.read_bytes()

    def refused(message: str, content: bytes) -> None:
        index.write_bytes(content)
        refuses(message, MmapTokens, tokens_prefix)

    def replaced(start: int, new: bytes) -> bytes:
        """Returns the index with other bytes from `start` on."""
        return whole[:start] + new + whole[start + len(new) :]

    index.unlink()
    refuses(r"there is no .*a\.idx", MmapTokens, tokens_prefix)

    refused(r"a\.idx has 49 bytes; expected 50 for 2 sentences", whole[:-1])
    refused(r"a\.idx is truncated: 20 bytes", whole[:20])
    other_format = b"TNTIDX\x00\x00"
    refused(r"begins with b'TNTIDX.*--dataset-impl mmap", replaced(0, other_format))
    refused(r"version 1 and type 77; expected .*8 uint16", replaced(17, b"\x4d"))
    refused(r"version 2 and type 8", replaced(9, b"\x02"))
    refused("damaged", replaced(26, struct.pack("<i", -3)))  # a size
    refused("damaged", replaced(34, struct.pack("<q", 1)))  # where a sentence begins

    index.write_bytes(whole)
    assert MmapTokens(tokens_prefix)[1].tolist() == [6, 2]


# ---- dictionaries ------------------------------------------------------------------------------
def test_a_dictionary_is_read_and_written_as_fairseq_does(tmp_path):
    lines = [
        "▁the 120",
        ", 90",
        "# 7",
        "madeupword0000 0",
        "<s> 1 #fairseq:overwrite",
        ", 3 #fairseq:overwrite",
    ]
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "dict.txt").write_text(text, encoding="utf-8")

    dictionary = Dictionary.load(tmp_path / "dict.txt")
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    assert dictionary.symbols == [*specials, "▁the", ",", "#", "madeupword0000", "<s>", ","]
    assert dictionary.counts[4:] == [120, 90, 7, 0, 1, 3]
    assert dictionary.index("▁the") == 4
    assert dictionary.index(",") == 9
    assert dictionary.index("<s>") == 8
    assert dictionary.index("</s>") == 2
    assert dictionary.index("nothing") == UNK

    dictionary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1\nb\n", r"dict\.txt line 2 is 'b'; expected a symbol, a space and its count"),
        (b"a 1\nb x\n", "line 2 is 'b x'"),
        (b"a 1\na 2\n", "line 2 has the symbol 'a' a second time"),
        (b"<pad> 1\n", "line 1 has the symbol '<pad>' a second time"),
        (b"a 1\n\xff 2\n", r"not UTF-8 \(byte 4\)"),
    ],
)
def test_a_damaged_dictionary_is_explained(tmp_path, content, message):
    (tmp_path / "dict.txt").write_bytes(content)

    refuses(message, Dictionary.load, tmp_path / "dict.txt")


def test_a_missing_dictionary_is_explained(tmp_path):
    refuses("nowhere cannot be read", Dictionary.load, tmp_path / "nowhere")


def test_pieces_are_joined_as_fairseq_does(tmp_path):
    for symbols in (["▁Haus", "tür", "▁,"], ["Haus@@", "tür", ","]):
        folder = write_folder(tmp_path, {"en": [[4]], "de": [[4]]})
        Dictionary(symbols).save(folder / "dict.de.txt")

        decode = open_pairs(folder, "train").decode

        assert decode([0, 4, 5, 6, 1, EOS, 4]) == "Haustür ,"
        assert decode([]) == ""


# ---- folders -----------------------------------------------------------------------------------
def test_the_pairs_of_a_row_lie_one_after_another(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "train")

    batch = pairs.batch(np.array([[2, 1], [-1, 0], [-1, -1]]), (4, 8))

    assert {name: array.tolist() for name, array in batch.items()} == {
        "source": [
            [2, 7, 2, 1],
            [4, 5, 6, 2],
            [1] * 4,
        ],
        "source_segment": [
            [1, 2, 2, 0],
            [2] * 4,
            [0] * 4,
        ],
        "target": [
            [5, 2, 14, 15, 16, 17, 2, 1],
            [12, 13, 2, *[1] * 5],
            [1] * 8,
        ],
        "previous": [
            [2, 5, 2, 14, 15, 16, 17, 1],
            [2, 12, 13, *[1] * 5],
            [1] * 8,
        ],
        "target_segment": [
            [1, 1, 2, 2, 2, 2, 2, 0],
            [2] * 3 + [0] * 5,
            [0] * 8,
        ],
    }
    for array in batch.values():
        assert array.dtype == np.int32
        assert array.flags.writeable


def test_with_one_pair_a_row_there_are_no_segments(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "train")
    packed = pairs.batch(np.array([[-1, 0], [-1, -1]]), (4, 8))

    batch = pairs.batch(np.array([0, -1]), (4, 8))

    assert batch.keys() == {"source", "target", "previous"}
    for name, array in batch.items():
        assert array.tolist() == packed[name].tolist()


def test_a_batch_may_have_no_rows(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "train")

    batch = pairs.batch(np.zeros((0, 3), int), (7, 11))

    assert batch["target"].shape == (0, 11)


def test_a_folder_of_fairseq_preprocess_opens(tmp_path):
    pairs = open_pairs(str(write_folder(tmp_path)), "valid")

    assert len(pairs) == 5
    assert pairs.source_language == "en"
    assert pairs.target_language == "de"
    assert pairs.tokenizer is None
    assert pairs.lengths.dtype == np.int32
    assert pairs.lengths.tolist() == [[4, 3], [2, 5], [1, 2], [5, 4], [3, 6]]
    assert pairs.source_dictionary is pairs.target_dictionary
    assert len(pairs.source_dictionary) == 18
    encoded = [ids.tolist() for ids in pairs.encode(["s4  s9", "", "s9 other"])]
    assert encoded == [[4, 9, EOS], [EOS], [9, UNK, EOS]]
    assert pairs.decode([4, 5, 3, EOS, 6]) == "s4 s5 <unk>"
    assert pairs.references() == [
        "s12 s13",
        "s14 s15 s16 s17",
        "s5",
        "s6 s7 s8",
        "s9 <unk> s9 s10 s11",
    ]


def test_the_languages_may_have_dictionaries_of_their_own(tmp_path):
    write_folder(tmp_path)
    symbols = ["other", *(f"t{number}" for number in range(5, 30))]
    Dictionary(symbols).save(tmp_path / "dict.de.txt")

    pairs = open_pairs(tmp_path, "valid")

    assert pairs.source_dictionary is not pairs.target_dictionary
    assert len(pairs.target_dictionary) == 30
    assert pairs.references()[0] == "t12 t13"


def test_references_are_the_text_that_is_kept(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "valid")
    text = tmp_path / "valid.de"
    # Line ends only to Python.
    lines = ["Ein  Satz", "mit\u2028Zeichen\x85, die", "", "kein\x0bEnde", "sind."]

    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert pairs.references() == lines

    text.write_text("too\nfew\n")
    refuses(r"valid\.de has 2 lines, and there are 5 pairs", pairs.references)
    text.write_bytes(b"Stra\xdfe\n")
    refuses(r"valid\.de is not UTF-8 \(byte 4\)", pairs.references)


def test_pairs_travel_to_another_process_without_their_files(tmp_path):
    pairs = open_pairs(write_folder(tmp_path, symbols=1000), "train")
    batch = pairs.batch(np.arange(5), (6, 6))

    state = pickle.dumps(pairs)
    again = pickle.loads(state)

    assert len(state) < 1000, "memory maps or dictionaries travel along"
    np.testing.assert_equal(again.batch(np.arange(5), (6, 6)), batch)
    assert (again.lengths == pairs.lengths).all()
    assert again.decode([4]) == pairs.decode([4])


# ---- folders that cannot be used ---------------------------------------------------------------
def folder_refused(message: str, folder: Path, split: str = "train") -> None:
    """Asserts that a folder cannot be opened, or its first batch not be read."""
    refuses(message, lambda: open_pairs(folder, split).batch(np.arange(5), (9, 9)))


def test_a_folder_that_is_not_prepared_is_explained(tmp_path):
    expected = "expected one made by"
    message = f"there is no folder .*nowhere; {expected} `make data DATASET=wmt18"
    folder_refused(message, tmp_path / "nowhere")
    folder_refused(f"found nothing; {expected}", tmp_path)

    (tmp_path / "train.en").write_text("text")
    remedy = "it looks like text: prepare it first, make data DATASET=wmt18 DATA="
    folder_refused(rf"found train\.en; {remedy}", tmp_path)
    folder_refused(r"train\.en is a file; expected", tmp_path / "train.en")


def test_a_missing_split_is_explained(tmp_path):
    write_folder(tmp_path)

    remedy = "make the folder again, with test text"
    folder_refused(f"has no test split, only train, valid; {remedy}", tmp_path, "test")


def test_files_that_do_not_fit_each_other_are_explained(tmp_path):
    write_folder(tmp_path)
    write_tokens(tmp_path / "valid.en-de.de", [[4, 2]] * 4)
    message = r"valid\.en-de\.en\.bin has 5 sentences and .*valid\.en-de\.de\.bin 4"
    folder_refused(message, tmp_path, "valid")

    write_folder(tmp_path, symbols=17)
    sizes = r"train\.en-de\.de\.bin has the token 17, and its dictionary 17 symbols"
    folder_refused(f"{sizes}; they do not belong together", tmp_path)


def test_missing_and_truncated_files_of_a_folder_are_explained(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "dict.de.txt").unlink()
    folder_refused(r"dict\.de\.txt cannot be read", tmp_path)

    write_folder(tmp_path)
    data = tmp_path / "train.en-de.de.bin"
    data.write_bytes(data.read_bytes()[:-4])
    folder_refused(r"train\.en-de\.de\.bin is truncated: 36 bytes, expected 40", tmp_path)


def test_two_language_pairs_in_a_folder_are_explained(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train.en-fr.en.idx").touch()

    remedy = "keep them in folders of their own"
    folder_refused(f"has the language pairs en-de, en-fr; {remedy}", tmp_path)


def test_a_folder_that_is_half_prepared_is_explained(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "parts").mkdir()

    remedy = "give the same `make data` command again"
    folder_refused(f"is not prepared to its end; {remedy}", tmp_path)


# ---- the toy language --------------------------------------------------------------------------
def test_the_toy_language_is_reversed_and_one_to_one():
    pairs = SyntheticPairs("train", 400, 3)
    batch = pairs.batch(np.arange(400), (13, 13))

    sentences = [pairs.decode(row).split() for row in batch["source"]]
    expected = []
    words = set()
    for sentence in sentences:
        words.update(sentence)
        expected.append([f"v{int(word[1:]) * 9 % 40}" for word in reversed(sentence)])

    assert [pairs.decode(row).split() for row in batch["target"]] == expected
    assert len(words) == 40
    last_of_target = batch["target"][np.arange(400), pairs.lengths[:, 1] - 1]
    assert (last_of_target == EOS).all()
    assert pairs.lengths.tolist() == [[len(sentence) + 1] * 2 for sentence in sentences]
    assert set(pairs.lengths[:, 0].tolist()) == set(range(4, 14))
    assert pairs.source_dictionary is pairs.target_dictionary
    assert len(pairs.source_dictionary) == 84


def test_the_toy_language_keeps_to_the_interface():
    pairs = SyntheticPairs("valid", 50)
    assert len(pairs) == 50
    assert len(pairs.references()) == 50
    assert pairs.lengths.dtype == np.int32

    batch = pairs.batch(np.array([7, -1]), (13, 13))
    assert pairs.decode(batch["target"][0]) == pairs.references()[7]
    assert (batch["source"][1] == PAD).all()
    source = batch["source"][0]
    encoded = pairs.encode([pairs.decode(source)])[0]
    assert encoded.tolist() == source[: pairs.lengths[7, 0]].tolist()


def test_the_toy_language_repeats_and_its_splits_differ():
    pairs = SyntheticPairs("valid", 50)
    state = pickle.dumps(pairs)

    assert len(state) < 300
    assert pickle.loads(state).references() == pairs.references()
    assert SyntheticPairs("test", 50).references() != pairs.references()
    assert SyntheticPairs("valid", 50, seed=1).references() != pairs.references()
