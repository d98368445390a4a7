"""data/prepare/text.py on small texts that the tests make."""

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from corpora import contents, documents, text_corpus, written
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data import splits
from data.prepare import text as pre
from data.text import SyntheticText, open_text
from data.vocabulary import KINDS
from errors import InputError

LOWERS = ("bert", "distilbert")  # kinds whose normalizer lowers letters
PAIRS = ("bert", "xlnet")  # kinds that are prepared here with rows for pairs


def prepare(data: Path, out: Path, **flags) -> dict:
    """Prepares short rows with a small vocabulary; returns the report."""
    return pre.prepare(data, out, **({"length": 32, "vocab_size": 300} | flags))


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pre, "PIECE_BYTES", 1500)
        yield


def lines_of(texts: list[list[str]]) -> list[str]:
    """Returns the lines of all documents."""
    return list(itertools.chain.from_iterable(texts))


def without_spaces(texts: list[list[str]], lower: bool) -> str:
    """Returns all text of some documents without spaces."""
    text = "".join(lines_of(texts)).replace(" ", "")
    return text.lower() if lower else text


def all_tokens(text) -> np.ndarray:
    """Returns the tokens of all rows, one after another."""
    return np.concatenate([text.row(index)[0] for index in range(len(text))])


def decoded(text) -> str:
    """Returns all text of the rows without spaces and separators."""
    tokens = all_tokens(text)
    tokens = tokens[tokens != text.tokenizer.sep_token_id]
    names = text.tokenizer.convert_ids_to_tokens(tokens)
    letters = [name.removeprefix("##").replace("Ġ", "").replace("▁", "") for name in names]
    return "".join(letters)


# ---- rows --------------------------------------------------------------------------------------
SPECIALS = "A [SEP] b [MASK] <s> c </s> <mask> <sep> <cls> [PAD]."
LONG = "balo " * 100  # longer than a row
ODD = [[SPECIALS, "\x01\x02"], ["\x01"], [SPECIALS], ["Hi there.", LONG, "Hi again."]]

TEXTS = {
    "train": [*documents(60), *documents(60, seed=1)],
    "valid": documents(8, seed=2),
}
TEXTS_WITH_ODD = {"train": [*TEXTS["train"], *ODD], "valid": TEXTS["valid"]}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def text_folder(kind, tmp_path_factory) -> Path:
    """A folder of text, one of whose files has odd documents."""
    folder = text_corpus(tmp_path_factory.mktemp(kind))
    with_two_empty_lines = written(ODD).replace(b"\n\n", b"\n\n\n")
    (folder / "c.txt").write_bytes(with_two_empty_lines)
    return folder


@pytest.fixture(scope="module")
def report(kind, text_folder) -> dict:
    """The report of the preparation of `text_folder`."""
    return prepare(text_folder, text_folder / "prepared", kind=kind, pairs=kind == "bert")


@pytest.fixture(scope="module")
def prepared(text_folder, report) -> Path:
    """The prepared folder."""
    return text_folder / "prepared"


@pytest.mark.parametrize("split", TEXTS)
def test_rows_have_all_words_of_the_text(kind, prepared, split):
    text = open_text(prepared, split)

    assert text.kind == kind
    assert text.length == 32
    assert text.pairs == (kind in PAIRS)
    found = decoded(text)
    assert found.startswith(without_spaces(TEXTS[split], lower=kind in LOWERS))
    if split == "train":
        assert "there." + "balo" * 100 in found


@pytest.mark.parametrize("split", TEXTS)
def test_the_report_counts_documents_and_sentences(kind, prepared, report, split):
    text = open_text(prepared, split)
    texts = TEXTS_WITH_ODD[split]
    counts = report[split]

    sentences = sum(len(pre.split_sentences(line)) for line in lines_of(texts))
    dropped_sentences = 0
    dropped_documents = 0
    if split == "train" and kind in LOWERS:
        dropped_sentences = 2
        dropped_documents = 1
    why = "the normalizer of BERT leaves out control characters"
    assert counts["dropped_empty_sentences"] == dropped_sentences, why
    assert counts["documents"] == len(texts) - dropped_documents
    assert counts["sentences"] == sentences - dropped_sentences

    cut = 0
    if split == "train":
        cut = 1 if kind == "distilbert" else 3  # LONG; SPECIALS just fit distilbert
    starts = sum(len(text.row(index)[1]) for index in range(len(text)))
    assert counts["cut_sentences"] == cut
    assert (starts == counts["sentences"]) == (cut == 0)


@pytest.mark.parametrize("split", TEXTS)
def test_the_report_counts_rows_tokens_and_padding(prepared, report, split):
    text = open_text(prepared, split)
    sizes = [len(text.row(index)[0]) for index in range(len(text))]
    room = 29 if text.pairs else 30

    assert report[split]["rows"] == len(sizes)
    assert report[split]["tokens"] == sum(sizes)
    assert max(sizes) <= room
    padding = 1 - sum(sizes) / (room * len(sizes))
    assert report[split]["padding"] == pytest.approx(padding, abs=1e-4)


def test_a_prepared_folder_has_its_files(prepared, report):
    expected = {"tokenizer", "report.json"}
    for split in TEXTS:
        expected |= {f"{split}.{name}.npy" for name in pre.ARRAYS}

    assert {path.name for path in prepared.iterdir()} == expected
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert report["vocabulary"] == len(tokenizer)
    assert len(tokenizer) <= 300


@pytest.mark.parametrize("kind", ["roberta"], indirect=True)
def test_rows_of_roberta_keep_spaces(prepared):
    text = open_text(prepared, "valid")

    rows = [text.tokenizer.decode(text.row(index)[0]) for index in range(len(text))]

    without_separators = "".join(rows).replace("</s>", "")
    assert without_separators == "".join(lines_of(TEXTS["valid"]))


# ---- special symbols ---------------------------------------------------------------------------
def test_special_symbols_in_text_are_text(kind, prepared, report):
    text = open_text(prepared, "train")
    tokenizer = text.tokenizer
    tokens = all_tokens(text)

    may_occur = {tokenizer.unk_token_id, tokenizer.sep_token_id}
    specials = set(tokenizer.all_special_ids) - may_occur
    assert not specials & set(tokens.tolist())

    separators = np.count_nonzero(tokens == tokenizer.sep_token_id)
    assert separators < report["train"]["documents"]
    assert (separators == 0) == text.pairs
    if kind == "bert":
        assert "[sep]b[mask]<s>c" in decoded(text)
    unknown_share = np.mean(tokens == tokenizer.unk_token_id)
    assert report["train"]["unknown_share"] == round(unknown_share, 6)


def test_unknown_characters_spell_no_special_symbol_of_xlnet(tmp_path):
    """Characters unknown to a Unigram vocabulary must not become the special token that they
    spell."""
    prepare(text_corpus(tmp_path, count=20), tmp_path / "plain", kind="xlnet")
    tokenizer = str(tmp_path / "plain/tokenizer")
    (tmp_path / "c.txt").write_text(f"{SPECIALS}\n")

    prepare(tmp_path, tmp_path / "used", kind="xlnet", tokenizer=tokenizer)

    text = open_text(tmp_path / "used", "train")
    tokens = set(all_tokens(text).tolist())
    assert text.tokenizer.unk_token_id in tokens
    specials = set(text.tokenizer.all_special_ids) - {text.tokenizer.unk_token_id}
    assert not specials & tokens


# ---- a tokenizer of the user's -----------------------------------------------------------------
@pytest.fixture
def given_tokenizer():
    return SyntheticText("valid", "bert", 64, rows=5).tokenizer


def test_a_tokenizer_of_the_users_is_taken(tmp_path, given_tokenizer):
    data = text_corpus(tmp_path / "text")
    (data / "c.txt").write_text("Q Y " * 500)
    given_tokenizer.save_pretrained(tmp_path / "given")

    report = prepare(data, tmp_path / "out", tokenizer=str(tmp_path / "given"))

    tokenizer = open_text(tmp_path / "out", "train").tokenizer
    assert tokenizer.get_vocab() == given_tokenizer.get_vocab()
    assert report["vocabulary"] == len(given_tokenizer)
    assert report["train"]["unknown_share"] > 0.05


def test_a_tokenizer_that_does_not_fit_is_explained(tmp_path, given_tokenizer):
    data = text_corpus(tmp_path / "text")

    def refused(name: str, message: str, kind: str = "bert") -> None:
        tokenizer = str(tmp_path / name)
        with pytest.raises(InputError, match=f"{name} {message}"):
            prepare(data, tmp_path / f"not-{name}", tokenizer=tokenizer, kind=kind)

    given_tokenizer.save_pretrained(tmp_path / "given")
    refused(
        "given",
        "is a BertTokenizer, which pads on the right; expected .* the left",
        kind="xlnet",
    )

    plain = PreTrainedTokenizerFast(
        tokenizer_object=given_tokenizer.backend_tokenizer,
        sep_token="[SEP]",
        unk_token="[UNK]",
    )
    plain.save_pretrained(tmp_path / "plain")
    refused("plain", "has no cls_token, pad_token, mask_token; expected one of a bert model")

    (tmp_path / "empty").mkdir()
    refused("empty", "cannot be opened: .*; expected a folder of save_pretrained")


# ---- sentences and documents -------------------------------------------------------------------
SENTENCES = """It ends here.| And goes on.
Does it?| Yes!| 3 times.
He said "no."| "Yes", she said.
(It ends.)| [Here.
Mr. Smith and Dr. J. Miller vs. Prof. Low met.
Mrs. Low, Ms. Hill, St. Mary etc. All met.
It is 3.5 m, e.g. long ... and on, i.e. here.
Homarus , a lobster .| It is closely related to H. americanus .
Ünder.| Über, nach. über
これは文です。|これも。」|そう
No end
One…| Two?!| Three"""


@pytest.mark.parametrize("line", SENTENCES.splitlines())
def test_lines_are_cut_where_sentences_end(line):
    sentences = line.split("|")
    with_more_spaces = "  " + "  ".join(sentences) + " "

    assert pre.split_sentences("".join(sentences)) == sentences
    assert pre.split_sentences(with_more_spaces)[0].strip() == sentences[0]


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1000, 10**9])
def test_pieces_end_where_documents_end(tmp_path, piece_bytes):
    texts = documents(30)
    byte_order_mark = b"\xef\xbb\xbf"
    as_windows_has_it = written(texts).replace(b"\n", b"\r\n")
    (tmp_path / "a").write_bytes(byte_order_mark + as_windows_has_it)
    with_more_empty_lines = b"\n \t\n\n" + written(texts).replace(b"\n\n", b"\n \n\t\n\n")
    (tmp_path / "b").write_bytes(with_more_empty_lines.rstrip())

    pieces = pre.cut([(tmp_path / "a", "a"), (tmp_path / "b", "b")], piece_bytes)

    found = []
    for stretch in itertools.chain.from_iterable(pieces):
        found.extend(stretch.documents())
    assert found == texts + texts
    if piece_bytes == 1:
        assert len(pieces) >= 60
    if piece_bytes == 10**9:
        assert [len(piece) for piece in pieces] == [2]


@pytest.mark.parametrize("border", range((1 << 20) - 4, (1 << 20) + 2))
def test_the_end_of_a_document_is_found_where_blocks_meet(border):
    file = io.BytesIO(b"x" * border + b"\n  \ny" + b"z" * 100)

    assert pre._document_end(file, 3) == border + 4
    assert pre._document_end(file, border + 5) == border + 105


# ---- held-out documents ------------------------------------------------------------------------
def test_held_out_documents_are_the_same_for_each_cut(tmp_path, monkeypatch):
    texts = documents(100)
    (tmp_path / "a.txt").write_bytes(written([*texts, *texts]))

    report = prepare(tmp_path / "a.txt", "", valid_share=0.3)

    # Twins stay together.
    held_out = [document for document in texts if pre.is_for_validation(document, 0.3)]
    assert 20 < len(held_out) < 40
    assert report["valid"]["documents"] == 2 * len(held_out)
    assert report["train"]["documents"] == 200 - 2 * len(held_out)
    found = decoded(open_text(tmp_path, "valid"))
    assert found == without_spaces([*held_out, *held_out], lower=True)

    monkeypatch.setattr(pre, "PIECE_BYTES", 8000)
    prepare(tmp_path, tmp_path / "two", valid_share=0.3)
    for split in ("train", "valid"):
        other_cut = open_text(tmp_path / "two", split)
        assert decoded(other_cut) == decoded(open_text(tmp_path, split))


def test_spaces_and_line_ends_do_not_part_copies_of_a_document():
    lines = [f"one two {number} three four" for number in range(200)]

    held_out = [pre.is_for_validation([line], 0.3) for line in lines]

    assert 30 < sum(held_out) < 90
    with_more_spaces = [line.replace(" ", "  \t") for line in lines]
    assert [pre.is_for_validation([line], 0.3) for line in with_more_spaces] == held_out
    a_word_per_line = [line.split() for line in lines]
    assert [pre.is_for_validation(document, 0.3) for document in a_word_per_line] == held_out


# ---- what the vocabulary is learnt from --------------------------------------------------------
@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """The lines that vocabularies are learnt from."""
    learn = pre.learn
    lines_seen = []

    def recorded(lines, *rest):
        lines_seen.extend(lines)
        return learn(iter(lines_seen), *rest)

    monkeypatch.setattr(pre, "learn", recorded)
    return lines_seen


def test_the_vocabulary_is_learnt_from_all_training_text(tmp_path, seen):
    data = text_corpus(tmp_path / "text", count=100)

    prepare(data, tmp_path / "all")

    assert seen == lines_of([*documents(100), *documents(100, seed=1)])


def test_a_sample_of_the_training_text_is_evenly_spaced(tmp_path, seen):
    data = text_corpus(tmp_path / "text", count=100)
    lines = lines_of([*documents(100), *documents(100, seed=1)])

    prepare(data, tmp_path / "some", sample=6000)

    assert 3000 < sum(map(len, seen)) <= 6000
    assert set(seen) < set(lines)
    numbers = [lines.index(line) for line in seen]
    assert min(numbers) < len(lines) / 5
    assert max(numbers) > len(lines) * 3 / 5


def test_the_vocabulary_is_not_learnt_from_held_out_documents(tmp_path, seen):
    data = text_corpus(tmp_path / "text", count=100)

    prepare(data / "a.txt", tmp_path / "held", valid_share=0.1)

    trained_on = [text for text in documents(100) if not pre.is_for_validation(text, 0.1)]
    assert seen == lines_of(trained_on)
    assert len(seen) < len(lines_of(documents(100)))


# ---- which files are read ----------------------------------------------------------------------
def write_files(folder: Path, *names: str, content: str = "x") -> None:
    """Writes the same content to several files."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)


def relative(paths: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


def test_files_are_found_by_their_names(tmp_path):
    write_files(
        tmp_path,
        "b.txt",
        "a.txt.gz",
        "a.txt",
        "sub/c.txt",
        "valid.txt",
        "sub/dev-1.txt.gz",
        "test.txt",
        "x.csv",
    )

    found = pre.find_files(tmp_path)

    assert relative(found.train, tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert relative(found.valid, tmp_path) == ["sub/dev-1.txt.gz", "valid.txt"]
    assert relative(found.left_out, tmp_path) == ["test.txt"]
    assert pre.find_files(tmp_path / "x.csv").train == [tmp_path / "x.csv"]


BOOKS = [
    "a_room.txt",
    "devils_dictionary.txt",
    "devotions.txt",
    "testament_of_youth.txt",
    "validity.txt",
]


def test_books_whose_titles_begin_like_a_split_are_trained_on(tmp_path):
    write_files(tmp_path, *BOOKS)

    found = pre.find_files(tmp_path)

    assert relative(found.train, tmp_path) == BOOKS
    assert not found.valid
    assert not found.left_out


def test_folders_of_splits_are_known_and_said(tmp_path, capsys):
    text = tmp_path / "text"
    sizes = {"train": 60, "valid": 35, "test": 10}
    for seed, (split, size) in enumerate(sizes.items()):
        (text / split).mkdir(parents=True)
        (text / split / "one.txt").write_bytes(written(documents(size, seed)))
    (text / "LICENSE.txt").write_text("Not a word of it is trained on.")

    report = prepare(text, tmp_path / "out")

    assert report["train"]["documents"] == 60
    assert report["valid"]["documents"] == 35
    used = "trained on train/one.txt, evaluated on valid/one.txt"
    sentence = f"{used}; left out: LICENSE.txt, test/one.txt"
    assert sentence in capsys.readouterr().out
    train = open_text(tmp_path / "out", "train")
    valid = open_text(tmp_path / "out", "valid")
    assert splits.said(train, valid) == f" ({sentence})"


def test_only_what_make_made_is_passed_over_by_any_name(tmp_path):
    text = tmp_path / "text"
    (text / "prepared").mkdir(parents=True)
    (text / "prepared/mine.txt").write_bytes(written(documents(40, seed=1)))
    (text / "a.txt").write_bytes(written(documents(40)))
    prepare(text, text / "rows", valid_share=0.1)
    (text / "rows/tokenizer/vocab.txt").write_text("[PAD]")  # as older tokenizers have it
    write_files(text, ".notes/x.txt", content="hidden")
    write_files(text, "__MACOSX/a.txt", content="of the system")

    assert relative(pre.find_files(text).train, text) == ["a.txt", "prepared/mine.txt"]


def test_files_of_other_endings_that_say_a_split_are_named(tmp_path):
    write_files(
        tmp_path,
        "train.txt",
        "valid.tokens",
        "README.md",
        "test/1.html",
        content="A sentence.\n",
    )

    found = pre.find_files(tmp_path)

    assert [path.name for path in found.train] == ["train.txt"]
    assert not found.left_out
    assert [path.name for path in found.unread] == ["1.html", "valid.tokens"]

    (tmp_path / "train.txt").rename(tmp_path / "validation.txt")
    message = "only validation text; .*; not read: test/1.html, valid.tokens"
    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path, tmp_path / "out")


# ---- data sets ---------------------------------------------------------------------------------
def write_data_set(folder: Path, form: str) -> None:
    """Writes the documents of `text_corpus` as a data set, and two documents without text."""
    import datasets

    tables = datasets.DatasetDict()
    for split, texts in {"train": TEXTS["train"], "validation": TEXTS["valid"]}.items():
        cells = ["\n\n".join(lines) for lines in texts]
        tables[split] = datasets.Dataset.from_dict({"text": [*cells, "", "\n"]})

    if form == "save_to_disk":
        tables.save_to_disk(folder)
    else:
        for split, table in tables.items():
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("form", ["parquet", "save_to_disk"])
def test_data_sets_give_the_same_as_text(tmp_path, cache, form):
    hub = tmp_path / "hub"
    write_data_set(hub, form)

    first = pre.prepare(hub, length=32, vocab_size=300)
    prepare(text_corpus(tmp_path / "text"), tmp_path / "out")

    assert contents(hub / "prepared") == contents(tmp_path / "out")
    again = pre.prepare(hub, length=32, vocab_size=300)
    assert again == first, "the result in the folder of parquet files is no text"
    message = "split train, has the columns text; expected a column body, or choose"
    with pytest.raises(InputError, match=message):
        prepare(hub, tmp_path / "other", column="body")


# ---- input that cannot be prepared -------------------------------------------------------------
WITH_A_BYTE_OF_LATIN_1 = b"\nStra\xdfe"


def not_utf8() -> bytes:
    """Returns documents whose line 101 is not UTF-8."""
    in_100_lines = written(documents(60, seed=1)).replace(b"\n", WITH_A_BYTE_OF_LATIN_1, 100)
    return in_100_lines.replace(WITH_A_BYTE_OF_LATIN_1, b"\n", 99)


# By the message: the files.
UNUSABLE = {
    "neither text files .* nor parquet files; found notes.md": {"notes.md": b"x"},
    r"has only test text \(.*test.txt\); expected text to train on": {"test.txt": b"x\n"},
    r"has text \(.*a.txt\) as well as parquet files \(.*rows.parquet\); .*move": {
        "a.txt": b"x\n",
        "rows.parquet": b"",
    },
    "the name train_test.txt says more than one split: train and test; rename it": {
        "train_test.txt": b"x\n",
    },
    "has only validation text; expected other": {"valid.txt": b"x\n"},
    r"a\.txt is empty; expected a sentence or a paragraph per line": {
        "a.txt": b"",
        "valid.txt": b"x\n",
    },
    "no documents for the valid split with --valid-share 0.01; .*more text": {
        "a.txt": b"One document.\n",
    },
    "no documents for the valid split at all": {
        "a.txt": b"One document.\n",
        "valid.txt": b"\n\n",
    },
    r"b\.txt line 101 is not UTF-8 \(byte 0xdf: invalid .*\); convert .* or fix": {
        "b.txt": not_utf8(),
    },
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_input_that_cannot_be_prepared_is_explained(tmp_path, message):
    for file, content in UNUSABLE[message].items():
        (tmp_path / file).write_bytes(content)

    with pytest.raises(InputError, match=message):
        prepare(tmp_path, tmp_path / "out")
