"""data/text.py: packing against a plain loop, the made-up language, and folders that are not what
they should be."""

import io
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


# ---- packing -----------------------------------------------------------------------------------
def plain_rows(documents: list[list[list[int]]], room: int, separator: int | None):
    """Packs sentence by sentence, which is the definition.

    Returns rows of (tokens, sentence starts), and how many sentences were cut.
    """
    rows = [([], [])]
    cut = 0
    for document in documents:
        if separator is None:
            rows.append(([], []))
            before = []
        else:
            before = [separator]

        for sentence in document:
            cut += len(sentence) > room
            for start in range(0, len(sentence), room):
                part = sentence[start : start + room]
                tokens, starts = rows[-1]
                if not starts:
                    before = []
                if len(tokens) + len(before) + len(part) > room:
                    tokens = []
                    starts = []
                    rows.append((tokens, starts))
                    before = []
                tokens += before
                starts.append(len(tokens))
                tokens += part
                before = []
    return [row for row in rows if row[1]], cut


def packed_rows(documents: list[list[list[int]]], room: int, separator: int | None):
    """Returns what `plain_rows` returns, by `pack_rows`."""
    sentences = list(itertools.chain(*documents))
    tokens = np.array(list(itertools.chain(*sentences)), np.uint16)
    sizes = np.array([len(sentence) for sentence in sentences], int)
    counts = np.array([len(document) for document in documents], int)

    packed, cut = pack_rows(tokens, sizes, counts, room, separator)

    assert packed.tokens.dtype == np.uint16
    assert packed.sentences.dtype == np.int32
    assert packed.rows.dtype == np.int64
    rows = []
    for index in range(len(packed)):
        row_tokens, starts = packed.row(index)
        rows.append((row_tokens.tolist(), starts.tolist()))
    return rows, cut


def random_documents(rng: np.random.Generator, longest: int) -> list[list[list[int]]]:
    """Returns 1 to 11 documents of 1 to 5 sentences, each shorter than `longest` tokens."""
    sizes_of_documents = []
    for _ in range(rng.integers(1, 12)):
        sizes_of_documents.append(rng.integers(1, longest, rng.integers(1, 6)))

    documents = []
    for sizes in sizes_of_documents:
        documents.append([rng.integers(0, 900, size).tolist() for size in sizes])
    return documents


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_rows_agree_with_a_plain_loop(separator):
    rng = np.random.default_rng(0)
    for _ in range(300):
        room = rng.integers(1, 30).item()
        documents = random_documents(rng, longest=rng.integers(2, 40))

        assert packed_rows(documents, room, separator) == plain_rows(documents, room, separator)


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_no_documents_are_no_rows(separator):
    assert packed_rows([], 7, separator) == ([], 0)


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_the_first_rows_are_a_part_of_their_own(separator):
    packed, _ = pack_rows(np.arange(10), np.array([3, 3, 4]), np.array([1, 2]), 4, separator)

    first_two = packed.upto(2)

    assert len(packed) == 3
    assert len(first_two) == 2
    assert len(first_two.tokens) == 6
    tokens, starts = first_two.row(1)
    assert tokens.tolist() == [3, 4, 5]
    assert starts.tolist() == [0]


# ---- the made-up language ----------------------------------------------------------------------
ROWS = 200
ROWS_OF_KINDS = [*((kind, False) for kind in KINDS), ("bert", True)]


def words_of(text: SyntheticText, sentence: np.ndarray) -> list[str]:
    """Returns the words of a sentence, each four letters: two of a topic, two of a number."""
    names = "".join(text.tokenizer.convert_ids_to_tokens(sentence))
    without_marks = re.sub("##|Ġ|▁", "", names)
    letters = re.fullmatch(r"([a-z]+)\.(</s>|\[SEP\])?", without_marks)[1]
    return [letters[start : start + 4] for start in range(0, len(letters), 4)]


def numbers_of(words: list[str]) -> list[int]:
    return [SyntheticText.NUMBERS.index(word[2:]) for word in words]


@pytest.fixture(scope="module", params=ROWS_OF_KINDS)
def synthetic(request) -> SyntheticText:
    """Made-up text of a kind; rows are pairs where it is asked for, and for XLNet."""
    kind, pairs = request.param
    text = SyntheticText("train", kind, 64, pairs, rows=ROWS)
    assert len(text) == ROWS
    assert text.kind == kind
    assert text.length == 64
    assert text.pairs == (pairs or kind == "xlnet")
    return text


def sentences_of(text: SyntheticText, index: int) -> list[np.ndarray]:
    tokens, starts = text.row(index)
    return np.split(tokens, starts[1:])


def test_synthetic_rows_are_full(synthetic):
    room = 61 if synthetic.pairs else 62
    sizes = []
    for index in range(ROWS):
        tokens, starts = synthetic.row(index)
        sizes.append(len(tokens))
        assert 0 < len(tokens) <= room
        assert tokens.dtype == np.uint16
        assert starts[0] == 0
        assert (np.diff(starts) > 0).all()
        assert starts[-1] < len(tokens)

    assert np.mean(sizes) > (0.6 if synthetic.pairs else 0.85) * room


def test_synthetic_tokens_are_the_tokenizers_of_the_text():
    text = SyntheticText("train", "bert", 64, True, rows=ROWS)
    tokenizer = text.tokenizer

    for index in range(ROWS):
        tokens, _ = text.row(index)
        again = tokenizer(tokenizer.decode(tokens), add_special_tokens=False)
        assert again.input_ids == tokens.tolist()


def test_each_synthetic_word_follows_from_the_one_before(synthetic):
    follows = []
    for index in range(ROWS):
        expected = None  # the topic and the first number of the next sentence
        for sentence in sentences_of(synthetic, index):
            words = words_of(synthetic, sentence)
            assert 4 <= len(words) <= 12
            topics = {word[:2] for word in words}
            assert len(topics) == 1
            numbers = numbers_of(words)
            for number, next_number in itertools.pairwise(numbers):
                assert (next_number - number) % 12 == 1

            (topic,) = topics
            if expected is not None:
                follows.append((topic, numbers[0]) == expected)
            expected = (topic, (numbers[-1] + 1) % 12)

    # A sentence begins where the one before ended, but for those that begin a document.
    assert np.mean(follows) > (0.99 if synthetic.pairs else 0.85)


def test_half_of_the_synthetic_words_have_two_tokens(synthetic):
    tokenizer = synthetic.tokenizer
    continues = continues_word(tokenizer)
    full_stop_continues = continues[tokenizer.convert_tokens_to_ids(".")]
    assert 90 < len(tokenizer) < 400

    words = 0
    continued = 0
    for index in range(ROWS):
        for sentence in sentences_of(synthetic, index):
            words += len(words_of(synthetic, sentence))
            continued += continues[sentence].sum() - full_stop_continues

    assert 0.45 < continued / words < 0.55


def tokens_of(text: SyntheticText) -> list[list[int]]:
    """Returns the tokens of the first 60 rows."""
    return [text.row(index)[0].tolist() for index in range(60)]


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_text_is_the_same_in_another_process(kind):
    text = SyntheticText("train", kind, 64, rows=60)

    state = pickle.dumps(text)
    again = pickle.loads(state)

    assert len(state) < 200
    assert tokens_of(again) == tokens_of(text)
    assert again.tokenizer.get_vocab() == text.tokenizer.get_vocab()


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_text_of_another_seed_or_split_is_other(kind):
    first_rows = tokens_of(SyntheticText("train", kind, 64, rows=60))[:5]
    other_seed = SyntheticText("train", kind, 64, seed=1, rows=60)
    other_split = SyntheticText("valid", kind, 64, rows=60)

    assert tokens_of(other_seed)[:5] != first_rows
    assert tokens_of(other_split)[:5] != first_rows


def test_synthetic_text_has_its_sizes():
    assert len(SyntheticText("train", "bert", 32)) == 2048
    assert len(SyntheticText("valid", "bert", 32)) == 256
    with pytest.raises(InputError, match="length is 7; expected 8 or more"):
        SyntheticText("train", "bert", 7)


# ---- folders -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A prepared folder of 400 documents of a line, with one or two empty lines between them."""
    folder = tmp_path_factory.mktemp("text")
    lines = []
    for number in range(400):
        line_ends = "\n" * (2 if number % 3 == 0 else 1)
        lines.append(f"Sentence {number} goes on. It ends here, at {number * 7}.{line_ends}")
    (folder / "a.txt").write_text("\n".join(lines))
    prepare(folder, kind="bert", length=32, vocab_size=200, valid_share=0.1)
    return folder / "prepared"


def test_a_folder_travels_without_its_files(made):
    text = open_text(made, "train")
    tokens = text.row(3)[0]

    state = pickle.dumps(text)
    again = pickle.loads(state)

    assert len(state) < 1000, "memory maps or the tokenizer travel along"
    assert again.row(3)[0].tolist() == tokens.tolist()
    assert tokens.dtype == np.uint16
    assert len(again.tokenizer) == len(text.tokenizer)


def test_a_folder_opens_by_the_folder_of_its_text(made):
    assert len(open_text(str(made.parent), "valid")) > 0


def test_damaged_files_are_explained(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "prepared"))

    def refused(name: str, content: bytes | None, message: str) -> None:
        """Asserts what is said with other content in a file, or without it; restores the file."""
        path = folder / name
        whole = path.read_bytes()
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            len(open_text(folder, "train").tokenizer)
        path.write_bytes(whole)

    name = "tokenizer/tokenizer.json"
    other_tokenizer = SyntheticText("valid", "bert", 64, rows=5).tokenizer.backend_tokenizer
    message = r"tokenizer has \d+ tokens, and the text was prepared with \d+"
    refused(name, other_tokenizer.to_str().encode(), message)
    refused(name, b"{", "has no tokenizer that transformers can read")

    name = "train.rows.npy"
    rows = (folder / name).read_bytes()
    unreadable = r"train\.rows\.npy cannot be read"
    refused(name, rows[:-3], f"{unreadable}: .*; delete the folder and prepare it again")
    refused(name, rows[:60], unreadable)
    refused(name, None, unreadable)

    counts = r"\d+ tokens in \d+ rows; expected \d+ in \d+"
    do_not_fit = rf"train\.tokens\.npy and the files beside it have {counts}"
    refused(name, (folder / "valid.rows.npy").read_bytes(), do_not_fit)
    sentences = (folder / "valid.sentences.npy").read_bytes()
    refused("train.sentences.npy", sentences, do_not_fit)

    empty = io.BytesIO()
    np.save(empty, np.zeros(0, np.int64))
    refused("train.rows.npy", empty.getvalue(), r"tokens in -1 rows; expected \d+ in \d+")

    name = "report.json"
    flags_alone = {"flags": json.loads((folder / name).read_text())["flags"]}
    refused(name, json.dumps(flags_alone).encode(), "report.json has no 'vocabulary'")
    refused(name, b"{", "report.json cannot be read")
    expected = "expected a folder made by `make data DATASET=text DATA=…`"
    refused(name, None, f"has no report.json, found .*; {expected}")


def test_a_path_that_is_no_folder_is_explained(tmp_path):
    (tmp_path / "file").write_text("a")

    with pytest.raises(InputError, match="there is no folder .*nowhere"):
        open_text(tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="file is a file"):
        open_text(tmp_path / "file", "train")
