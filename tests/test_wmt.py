"""data/wmt.py and data/fairseq_format.py on fairseq's golden files, and on small files that the tests write."""

import itertools
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
    with pytest.raises(InputError, match=message):
        function(*arguments)


def write_tokens(prefix: Path, sentences: list[list[int]], symbols: int = 18) -> None:
    write_mmap(prefix, np.concatenate(sentences), list(map(len, sentences)), symbols)


def write_folder(folder: Path, sentences=SENTENCES, splits=("train", "valid"), symbols: int = 18) -> Path:
    """As fairseq-preprocess leaves it."""
    folder.mkdir(exist_ok=True)
    for language, ids in sentences.items():
        Dictionary([f"s{number}" for number in range(4, symbols)]).save(folder / f"dict.{language}.txt")
        for split in splits:
            write_tokens(folder / f"{split}.en-de.{language}", [[*sentence, EOS] for sentence in ids], symbols)
    return folder


def test_what_fairseq_wrote_is_written_again_byte_for_byte(tmp_path):
    theirs, ours = GOLDEN / "joint/test.en-de.de", tmp_path / "ours"
    tokens = MmapTokens(theirs)
    write_tokens(ours, [tokens[index] for index in range(len(tokens))])
    for end in ("idx", "bin"):
        assert Path(f"{ours}.{end}").read_bytes() == Path(f"{theirs}.{end}").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_tokens_of_every_type_are_read(tmp_path, dtype):
    sentences = [[2], [4, 5, 2], [100, 99, 98, 97, 2]]
    np.concatenate(sentences).astype(dtype).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", [1, 3, 5], np.dtype(dtype))
    tokens = MmapTokens(tmp_path / "a")
    assert (len(tokens), tokens.sizes.tolist(), tokens.tokens.dtype) == (3, [1, 3, 5], dtype)
    assert [tokens[index].tolist() for index in range(3)] == sentences
    assert tokens.starts(np.array([2, 0])).tolist() == [4, 0]


def test_a_large_vocabulary_has_the_larger_type_and_there_may_be_no_sentence(tmp_path):
    assert [token_dtype(vocabulary) for vocabulary in (65_499, 65_500)] == [np.uint16, np.int32]
    write_tokens(tmp_path / "large", [[65_536, 2]], 65_537)
    assert MmapTokens(tmp_path / "large")[0].tolist() == [65_536, 2]
    write_mmap(tmp_path / "none", np.empty(0, np.int64), [], 18)
    assert len(MmapTokens(tmp_path / "none")) == 0


def test_damaged_files_are_explained(tmp_path):
    prefix = tmp_path / "a"
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")

    def refused(message: str, path: Path, contents: bytes | None):
        before = path.read_bytes()
        path.write_bytes(contents) if contents is not None else path.unlink()
        refuses(message, MmapTokens, prefix)
        path.write_bytes(before)

    write_tokens(prefix, [[4, 5, 2], [6, 2]])
    whole = index.read_bytes()
    refused(r"a\.bin is truncated: 9 bytes, expected 10", data, data.read_bytes()[:-1])
    refused(r"a\.bin is truncated: 0 bytes, expected 10", data, b"")
    refused(r"there is no .*a\.bin", data, None)
    refused(r"there is no .*a\.idx", index, None)
    refused(r"a\.idx has 49 bytes; expected 50 for 2 sentences", index, whole[:-1])
    refused(r"a\.idx is truncated: 20 bytes", index, whole[:20])
    refused(r"begins with b'TNTIDX.*--dataset-impl mmap", index, b"TNTIDX\x00\x00" + whole[8:])
    refused(r"version 1 and type 77; expected .*8 uint16", index, whole[:17] + b"\x4d" + whole[18:])
    refused(r"version 2 and type 8", index, whole[:9] + b"\x02" + whole[10:])
    refused("damaged", index, whole[:26] + struct.pack("<i", -3) + whole[30:])
    refused("damaged", index, whole[:34] + struct.pack("<q", 1) + whole[42:])
    assert MmapTokens(prefix)[1].tolist() == [6, 2]


def test_a_dictionary_is_read_and_written_as_fairseq_does(tmp_path):
    path = tmp_path / "dict.txt"
    text = "▁the 120\n, 90\n# 7\nmadeupword0000 0\n<s> 1 #fairseq:overwrite\n, 3 #fairseq:overwrite\n"
    path.write_text(text, encoding="utf-8")
    dictionary = Dictionary.load(path)
    assert dictionary.symbols == ["<s>", "<pad>", "</s>", "<unk>", "▁the", ",", "#", "madeupword0000", "<s>", ","]
    assert dictionary.counts[4:] == [120, 90, 7, 0, 1, 3]
    found = [dictionary.index(symbol) for symbol in ("▁the", ",", "<s>", "</s>", "nothing")]
    assert found == [4, 9, 8, 2, UNK]
    dictionary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text(encoding="utf-8") == text

    strange = {
        b"a 1\nb\n": r"again\.txt line 2 is 'b'; expected a symbol, a space and its count",
        b"a 1\nb x\n": "line 2 is 'b x'",
        b"a 1\na 2\n": "line 2 has the symbol 'a' a second time",
        b"<pad> 1\n": "line 1 has the symbol '<pad>' a second time",
        b"a 1\n\xff 2\n": r"not UTF-8 \(byte 4\)",
    }
    for content, message in strange.items():
        (tmp_path / "again.txt").write_bytes(content)
        refuses(message, Dictionary.load, tmp_path / "again.txt")
    refuses("nowhere cannot be read", Dictionary.load, tmp_path / "nowhere")


def test_the_pairs_of_a_row_lie_one_after_another(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "train")
    batch = pairs.batch(np.array([[2, 1], [-1, 0], [-1, -1]]), (4, 8))
    assert {name: array.tolist() for name, array in batch.items()} == {
        "source": [[2, 7, 2, 1], [4, 5, 6, 2], [1] * 4],
        "source_segment": [[1, 2, 2, 0], [2] * 4, [0] * 4],
        "target": [[5, 2, 14, 15, 16, 17, 2, 1], [12, 13, 2, *[1] * 5], [1] * 8],
        "previous": [[2, 5, 2, 14, 15, 16, 17, 1], [2, 12, 13, *[1] * 5], [1] * 8],
        "target_segment": [[1, 1, 2, 2, 2, 2, 2, 0], [2] * 3 + [0] * 5, [0] * 8],
    }
    assert {(array.dtype, array.flags.writeable) for array in batch.values()} == {(np.dtype(np.int32), True)}
    one_a_row = pairs.batch(np.array([0, -1]), (4, 8))
    assert one_a_row.keys() == {"source", "target", "previous"}
    assert all(array.tolist() == batch[name][1:].tolist() for name, array in one_a_row.items())
    assert pairs.batch(np.zeros((0, 3), int), (7, 11))["target"].shape == (0, 11)


def test_a_folder_of_fairseq_preprocess_opens(tmp_path):
    pairs = open_pairs(str(write_folder(tmp_path)), "valid")
    assert (len(pairs), pairs.source_language, pairs.target_language, pairs.tokenizer) == (5, "en", "de", None)
    assert pairs.lengths.dtype == np.int32
    assert pairs.lengths.tolist() == [[4, 3], [2, 5], [1, 2], [5, 4], [3, 6]]
    assert pairs.source_dictionary is pairs.target_dictionary and len(pairs.source_dictionary) == 18
    assert [ids.tolist() for ids in pairs.encode(["s4  s9", "", "s9 other"])] == [[4, 9, EOS], [EOS], [9, UNK, EOS]]
    assert pairs.decode([4, 5, 3, EOS, 6]) == "s4 s5 <unk>"
    assert pairs.references() == ["s12 s13", "s14 s15 s16 s17", "s5", "s6 s7 s8", "s9 <unk> s9 s10 s11"]
    Dictionary(["other"] * 1 + [f"t{number}" for number in range(5, 30)]).save(tmp_path / "dict.de.txt")
    pairs = open_pairs(tmp_path, "valid")
    assert pairs.source_dictionary is not pairs.target_dictionary
    assert pairs.references()[0] == "t12 t13" and len(pairs.target_dictionary) == 30


def test_references_are_the_text_that_is_kept(tmp_path):
    pairs = open_pairs(write_folder(tmp_path), "valid")
    lines = ["Ein  Satz", "mit\u2028Zeichen\x85, die", "", "kein\x0bEnde", "sind."]  # line ends only to Python
    (tmp_path / "valid.de").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert pairs.references() == lines
    (tmp_path / "valid.de").write_text("too\nfew\n")
    refuses(r"valid\.de has 2 lines, and there are 5 pairs", pairs.references)
    (tmp_path / "valid.de").write_bytes(b"Stra\xdfe\n")
    refuses(r"valid\.de is not UTF-8 \(byte 4\)", pairs.references)


def test_pieces_are_joined_as_fairseq_does(tmp_path):
    for symbols in (["▁Haus", "tür", "▁,"], ["Haus@@", "tür", ","]):
        Dictionary(symbols).save(write_folder(tmp_path, {"en": [[4]], "de": [[4]]}) / "dict.de.txt")
        assert open_pairs(tmp_path, "train").decode([0, 4, 5, 6, 1, EOS, 4]) == "Haustür ,"
        assert open_pairs(tmp_path, "train").decode([]) == ""


def test_pairs_travel_to_another_process_without_their_files(tmp_path):
    pairs = open_pairs(write_folder(tmp_path, symbols=1000), "train")
    batch, text = pairs.batch(np.arange(5), (6, 6)), pickle.dumps(pairs)
    assert len(text) < 1000, "memory maps or dictionaries travel along"
    again = pickle.loads(text)
    np.testing.assert_equal(again.batch(np.arange(5), (6, 6)), batch)
    assert (again.lengths == pairs.lengths).all() and again.decode([4]) == pairs.decode([4])


def test_folders_that_cannot_be_used_are_explained(tmp_path):
    def refused(message: str, split="train", name=""):
        refuses(message, lambda: open_pairs(tmp_path / name, split).batch(np.arange(5), (9, 9)))

    refused("there is no folder .*nowhere; expected one made by `make data DATASET=wmt18", name="nowhere")
    refused("found nothing; expected one made by")
    (tmp_path / "train.en").write_text("text")
    refused(r"found train\.en; it looks like text: prepare it first, make data DATASET=wmt18 DATA=")
    refused(r"train\.en is a file; expected", name="train.en")
    write_folder(tmp_path)
    refused("has no test split, only train, valid; make the folder again, with test text", "test")
    write_tokens(tmp_path / "valid.en-de.de", [[4, 2]] * 4)
    refused(r"valid\.en-de\.en\.bin has 5 sentences and .*valid\.en-de\.de\.bin 4", "valid")
    write_folder(tmp_path, symbols=17)
    refused(r"train\.en-de\.de\.bin has the token 17, and its dictionary 17 symbols; they do not belong together")
    (tmp_path / "dict.de.txt").unlink()
    refused(r"dict\.de\.txt cannot be read")
    write_folder(tmp_path)
    data = tmp_path / "train.en-de.de.bin"
    data.write_bytes(data.read_bytes()[:-4])
    refused(r"train\.en-de\.de\.bin is truncated: 36 bytes, expected 40")
    (tmp_path / "train.en-fr.en.idx").touch()
    refused("has the language pairs en-de, en-fr; keep them in folders of their own")
    (tmp_path / "parts").mkdir()
    refused("is not prepared to its end; give the same `make data` command again")


def test_the_toy_language_is_reversed_and_one_to_one_and_keeps_to_the_interface():
    pairs = SyntheticPairs("train", 400, 3)
    batch = pairs.batch(np.arange(400), (13, 13))
    sentences = [pairs.decode(row).split() for row in batch["source"]]
    translated = [[f"v{int(word[1:]) * 9 % 40}" for word in reversed(words)] for words in sentences]
    assert [pairs.decode(row).split() for row in batch["target"]] == translated
    assert (batch["target"][np.arange(400), pairs.lengths[:, 1] - 1] == EOS).all()
    assert len(set(itertools.chain.from_iterable(sentences))) == 40
    assert pairs.lengths.tolist() == [[len(words) + 1] * 2 for words in sentences]
    assert set(pairs.lengths[:, 0].tolist()) == set(range(4, 14))
    assert pairs.source_dictionary is pairs.target_dictionary and len(pairs.source_dictionary) == 84
    pairs = SyntheticPairs("valid", 50)
    assert len(pairs) == 50 == len(pairs.references()) and pairs.lengths.dtype == np.int32
    batch = pairs.batch(np.array([7, -1]), (13, 13))
    assert pairs.decode(batch["target"][0]) == pairs.references()[7] and (batch["source"][1] == PAD).all()
    source = pairs.decode(batch["source"][0])
    assert pairs.encode([source])[0].tolist() == batch["source"][0, : pairs.lengths[7, 0]].tolist()
    again = pickle.loads(pickle.dumps(pairs))
    assert len(pickle.dumps(pairs)) < 300 and again.references() == pairs.references()
    for other in (SyntheticPairs("test", 50), SyntheticPairs("valid", 50, seed=1)):
        assert other.references() != pairs.references()
