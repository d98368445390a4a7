"""data/text.py: packing against a plain loop, the made-up language, and folders that are not what they should be."""

import itertools
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.prepare.text import prepare
from data.text import SyntheticText, open_text, pack_rows
from data.vocabulary import KINDS, continues_word
from errors import InputError

SEPARATOR = 999


def plain_rows(documents: list[list[list[int]]], room: int, separator: int | None) -> tuple[list, int]:
    """The definition, sentence by sentence: rows of (tokens, sentence starts), and sentences that were cut."""
    rows, cut = [([], [])], 0
    for document in documents:
        if separator is None:
            rows.append(([], []))
        before = [separator] if separator is not None else []
        for sentence in document:
            cut += len(sentence) > room
            for part in (sentence[start : start + room] for start in range(0, len(sentence), room)):
                tokens, starts = rows[-1]
                before = before if starts else []
                if len(tokens) + len(before) + len(part) > room:
                    tokens, starts = [], []
                    rows.append((tokens, starts))
                    before = []
                tokens += before
                starts.append(len(tokens))
                tokens += part
                before = []
    return [row for row in rows if row[1]], cut


def packed_rows(documents, room, separator):
    sentences = list(itertools.chain(*documents))
    tokens = np.array(list(itertools.chain(*sentences)), np.uint16)
    sizes, counts = (np.array(list(map(len, parts)), int) for parts in (sentences, documents))
    packed, cut = pack_rows(tokens, sizes, counts, room, separator)
    assert (packed.tokens.dtype, packed.sentences.dtype, packed.rows.dtype) == (np.uint16, np.int32, np.int64)
    return [tuple(part.tolist() for part in packed.row(index)) for index in range(len(packed))], cut


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_rows_agree_with_a_plain_loop(separator):
    rng = np.random.default_rng(0)
    for _ in range(300):
        room, longest = rng.integers(1, 30).item(), rng.integers(2, 40)
        sizes = [rng.integers(1, longest, rng.integers(1, 6)) for _ in range(rng.integers(1, 12))]
        documents = [[rng.integers(0, 900, size).tolist() for size in document] for document in sizes]
        assert packed_rows(documents, room, separator) == plain_rows(documents, room, separator)
    assert packed_rows([], 7, separator) == ([], 0)
    packed, _ = pack_rows(np.arange(10), np.array([3, 3, 4]), np.array([1, 2]), 4, separator)
    assert (len(packed), len(packed.upto(2)), len(packed.upto(2).tokens)) == (3, 2, 6)
    assert [part.tolist() for part in packed.upto(2).row(1)] == [[3, 4, 5], [0]]


@pytest.mark.parametrize(("kind", "pairs"), [*((kind, False) for kind in KINDS), ("bert", True)])
def test_synthetic_rows_are_full_each_word_follows_from_the_one_before_and_half_have_two_tokens(kind, pairs):
    text = SyntheticText("train", kind, 64, pairs, rows=200)
    pairs = pairs or kind == "xlnet"
    tokenizer, room, continues = text.tokenizer, 61 if pairs else 62, continues_word(text.tokenizer)
    assert (len(text), text.kind, text.length, text.pairs) == (200, kind, 64, pairs)
    assert 90 < len(tokenizer) < 400
    sizes, counts, continued, follows = [], [], 0, []
    for index in range(200):
        tokens, starts = text.row(index)
        sizes.append(len(tokens))
        assert 0 < len(tokens) <= room and tokens.dtype == np.uint16
        assert starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] < len(tokens)
        if kind == "bert" and pairs:  # what the tokenizer makes of the text
            assert tokenizer(tokenizer.decode(tokens), add_special_tokens=False).input_ids == tokens.tolist()
        previous = None
        for sentence in np.split(tokens, starts[1:]):
            names = "".join(tokenizer.convert_ids_to_tokens(sentence))
            letters = re.fullmatch(r"([a-z]+)\.(</s>|\[SEP\])?", re.sub("##|Ġ|▁", "", names))[1]
            words = [letters[at : at + 4] for at in range(0, len(letters), 4)]
            assert 4 <= len(words) <= 12 and len({word[:2] for word in words}) == 1
            numbers = [SyntheticText.NUMBERS.index(word[2:]) for word in words]
            assert all((b - a) % 12 == 1 for a, b in itertools.pairwise(numbers))
            topic = words[0][:2]
            follows += [(topic, (numbers[0] - 1) % 12) == previous] if previous else []
            previous = (topic, numbers[-1])
            counts.append(len(words))
            continued += continues[sentence].sum() - continues[tokenizer.convert_tokens_to_ids(".")]
    assert np.mean(sizes) > (0.6 if pairs else 0.85) * room
    assert 0.45 < continued / sum(counts) < 0.55
    # Sentences go on where the one before ended, but for those that begin a document.
    assert np.mean(follows) > (0.99 if text.pairs else 0.85)


def test_synthetic_text_is_the_same_in_another_process_and_not_with_another_seed():
    def rows(text: SyntheticText) -> list[list[int]]:
        return [text.row(index)[0].tolist() for index in range(60)]

    for kind in KINDS:
        text = SyntheticText("train", kind, 64, rows=60)
        state = pickle.dumps(text)
        again = pickle.loads(state)
        assert len(state) < 200 and rows(again) == rows(text)
        assert again.tokenizer.get_vocab() == text.tokenizer.get_vocab()
        for other in (SyntheticText("train", kind, 64, seed=1, rows=60), SyntheticText("valid", kind, 64, rows=60)):
            assert rows(other)[:5] != rows(text)[:5]
    assert (len(SyntheticText("train", "bert", 32)), len(SyntheticText("valid", "bert", 32))) == (2048, 256)
    with pytest.raises(InputError, match="length is 7; expected 8 or more"):
        SyntheticText("train", "bert", 7)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = [f"Sentence {n} goes on. It ends here, at {n * 7}.{chr(10) * (1 + (n % 3 == 0))}" for n in range(400)]
    (folder / "a.txt").write_text("\n".join(lines))
    prepare(folder, kind="bert", length=32, vocab_size=200, valid_share=0.1)
    return folder / "prepared"


def test_a_folder_travels_without_its_files(made):
    text = open_text(made, "train")
    tokens, state = text.row(3)[0], pickle.dumps(text)
    assert len(state) < 1000, "memory maps or the tokenizer travel along"
    again = pickle.loads(state)
    assert again.row(3)[0].tolist() == tokens.tolist() and tokens.dtype == np.uint16
    assert len(again.tokenizer) == len(text.tokenizer)
    assert len(open_text(str(made.parent), "valid")) > 0  # the folder of the text


def test_folders_that_cannot_be_opened_are_explained(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "prepared"))

    def refused(message: str, path: Path = folder):
        with pytest.raises(InputError, match=message):
            len(open_text(path, "train").tokenizer)

    tokenizer = SyntheticText("valid", "bert", 64, rows=5).tokenizer.backend_tokenizer.to_str().encode()
    rows, sentences = (folder / "train.rows.npy").read_bytes(), (folder / "valid.sentences.npy").read_bytes()
    other = r"train\.tokens\.npy and the files beside it have \d+ tokens in \d+ rows; expected \d+ in \d+"
    report = json.loads((folder / "report.json").read_text())
    for name, content, message in (
        ("tokenizer/tokenizer.json", tokenizer, r"tokenizer has \d+ tokens, and the text was prepared with \d+"),
        ("tokenizer/tokenizer.json", b"{", "has no tokenizer that transformers can read"),
        ("train.rows.npy", rows[:-3], r"train\.rows\.npy cannot be read: .*; delete the folder and prepare it again"),
        ("train.rows.npy", rows[:60], r"train\.rows\.npy cannot be read"),
        ("train.rows.npy", None, r"train\.rows\.npy cannot be read"),
        ("train.rows.npy", (folder / "valid.rows.npy").read_bytes(), other),
        ("train.sentences.npy", sentences, other),
        ("report.json", json.dumps({"flags": report["flags"]}).encode(), "report.json has no 'vocabulary'"),
        ("report.json", b"{", "report.json cannot be read"),
        (
            "report.json",
            None,
            "has no report.json, found .*; expected a folder made by `make data DATASET=text DATA=…`",
        ),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content) if content is not None else (folder / name).unlink()
        refused(message)
        (folder / name).write_bytes(whole)
    refused("there is no folder .*nowhere", tmp_path / "nowhere")
    (tmp_path / "file").write_text("a")
    refused("file is a file", tmp_path / "file")
