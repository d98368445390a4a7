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


def prepare(data: Path, out: Path, **flags) -> dict:
    return pre.prepare(data, out, **({"length": 32, "vocab_size": 300} | flags))


def words(texts: list[list[str]], lower: bool) -> str:
    """All text without spaces."""
    text = "".join(itertools.chain.from_iterable(texts)).replace(" ", "")
    return text.lower() if lower else text


def all_tokens(text) -> np.ndarray:
    return np.concatenate([text.row(index)[0] for index in range(len(text))])


def decoded(text) -> str:
    """All text of the rows without spaces and separators."""
    tokens = all_tokens(text)
    names = text.tokenizer.convert_ids_to_tokens(tokens[tokens != text.tokenizer.sep_token_id])
    return "".join(name.removeprefix("##").replace("Ġ", "").replace("▁", "") for name in names)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pre, "PIECE_BYTES", 1500)
        yield


SPECIALS = "A [SEP] b [MASK] <s> c </s> <mask> <sep> <cls> [PAD]."
LONG = "balo " * 100  # longer than a row
ODD = [[SPECIALS, "\x01\x02"], ["\x01"], [SPECIALS], ["Hi there.", LONG, "Hi again."]]


@pytest.fixture(scope="module", params=KINDS)
def prepared(request, tmp_path_factory) -> tuple[str, Path, dict]:
    """A kind, a prepared folder with a file of odd documents, and its report; bert's rows are pairs, as xlnet's are."""
    folder = text_corpus(tmp_path_factory.mktemp(request.param))
    (folder / "c.txt").write_bytes(written(ODD).replace(b"\n\n", b"\n\n\n"))
    report = prepare(folder, folder / "prepared", kind=request.param, pairs=request.param == "bert")
    return request.param, folder / "prepared", report


def test_text_becomes_rows_with_all_its_words(prepared):
    kind, out, report = prepared
    expected = {"train": [*documents(60), *documents(60, 1)], "valid": documents(8, 2)}
    for split, texts in expected.items():
        text, part = open_text(out, split), report[split]
        assert (text.kind, text.length, text.pairs) == (kind, 32, kind in ("bert", "xlnet"))
        assert decoded(text).startswith(words(texts, lower="bert" in kind and kind != "roberta"))
        texts = [*texts, *(ODD if split == "train" else [])]
        sentences = sum(len(pre.split_sentences(line)) for lines in texts for line in lines)
        dropped, empty = (2, 1) if split == "train" and "bert" in kind and kind != "roberta" else (0, 0)
        assert part["dropped_empty_sentences"] == dropped, "the normalizer of BERT leaves out control characters"
        assert (part["documents"], part["sentences"]) == (len(texts) - empty, sentences - dropped)
        sizes = [len(text.row(index)[0]) for index in range(len(text))]
        room = 29 if text.pairs else 30
        assert (part["rows"], part["tokens"]) == (len(sizes), sum(sizes)) and max(sizes) <= room
        assert part["padding"] == pytest.approx(1 - sum(sizes) / (room * len(sizes)), abs=1e-4)
        starts = sum(len(text.row(index)[1]) for index in range(len(text)))
        cut = 0 if split == "valid" else 1 if kind == "distilbert" else 3  # LONG; SPECIALS just fit distilbert
        assert part["cut_sentences"] == cut and (starts == part["sentences"]) == (cut == 0)
        assert split == "valid" or "there." + "balo" * 100 in decoded(text)
    names = {f"{split}.{name}.npy" for split in ("train", "valid") for name in pre.ARRAYS}
    assert {path.name for path in out.iterdir()} == names | {"tokenizer", "report.json"}
    assert report["vocabulary"] == len(AutoTokenizer.from_pretrained(out / "tokenizer")) <= 300
    if kind == "roberta":
        rows = "".join(text.tokenizer.decode(text.row(index)[0]) for index in range(len(text)))
        assert rows.replace("</s>", "") == "".join(itertools.chain.from_iterable(documents(8, 2))), "spaces are kept"


def test_special_symbols_in_text_are_text(tmp_path, prepared):
    kind, out, report = prepared
    text = open_text(out, "train")
    tokens = all_tokens(text)
    specials = set(text.tokenizer.all_special_ids) - {text.tokenizer.unk_token_id}
    assert not (specials - {text.tokenizer.sep_token_id}) & set(tokens.tolist())
    separators = np.count_nonzero(tokens == text.tokenizer.sep_token_id)
    assert separators < report["train"]["documents"] and (separators == 0) == text.pairs
    assert kind != "bert" or "[sep]b[mask]<s>c" in decoded(text)
    assert report["train"]["unknown_share"] == round(np.mean(tokens == text.tokenizer.unk_token_id), 6)
    if kind == "xlnet":  # characters unknown to a Unigram vocabulary must not become the special token that they spell
        prepare(text_corpus(tmp_path, count=20), tmp_path / "plain", kind=kind)
        (tmp_path / "c.txt").write_text(f"{SPECIALS}\n")
        prepare(tmp_path, tmp_path / "used", kind=kind, tokenizer=str(tmp_path / "plain" / "tokenizer"))
        text = open_text(tmp_path / "used", "train")
        assert text.tokenizer.unk_token_id in all_tokens(text) and not specials & set(all_tokens(text).tolist())


def test_a_tokenizer_of_the_users_is_taken(tmp_path):
    data = text_corpus(tmp_path / "text")
    (data / "c.txt").write_text("Q Y " * 500)
    given = SyntheticText("valid", "bert", 64, rows=5).tokenizer
    given.save_pretrained(tmp_path / "given")
    report = prepare(data, tmp_path / "out", tokenizer=str(tmp_path / "given"))
    assert open_text(tmp_path / "out", "train").tokenizer.get_vocab() == given.get_vocab()
    assert report["vocabulary"] == len(given) and report["train"]["unknown_share"] > 0.05
    plain = PreTrainedTokenizerFast(tokenizer_object=given.backend_tokenizer, sep_token="[SEP]", unk_token="[UNK]")
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    for name, kind, message in (
        ("given", "xlnet", "is a BertTokenizer, which pads on the right; expected .* the left"),
        ("plain", "bert", "has no cls_token, pad_token, mask_token; expected one of a bert model"),
        ("empty", "bert", "cannot be opened: .*; expected a folder of save_pretrained"),
    ):
        with pytest.raises(InputError, match=f"{name} {message}"):
            prepare(data, tmp_path / f"not-{name}", tokenizer=str(tmp_path / name), kind=kind)


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
    assert pre.split_sentences("".join(sentences)) == sentences
    assert pre.split_sentences("  " + "  ".join(sentences) + " ")[0].strip() == sentences[0]


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1000, 10**9])
def test_pieces_end_where_documents_end(tmp_path, piece_bytes):
    texts = documents(30)
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + written(texts).replace(b"\n", b"\r\n"))
    (tmp_path / "b").write_bytes(b"\n \t\n\n" + written(texts).replace(b"\n\n", b"\n \n\t\n\n").rstrip())
    pieces = pre.cut([(tmp_path / name, name) for name in "ab"], piece_bytes)
    stretches = [stretch for piece in pieces for stretch in piece]
    assert [document for stretch in stretches for document in stretch.documents()] == texts + texts
    assert piece_bytes > 1 or len(pieces) >= 60
    assert piece_bytes < 10**9 or [len(piece) for piece in pieces] == [2]


def test_the_end_of_a_document_is_found_where_blocks_meet():
    for border in range((1 << 20) - 4, (1 << 20) + 2):
        file = io.BytesIO(b"x" * border + b"\n  \ny" + b"z" * 100)
        assert pre._document_end(file, 3) == border + 4
        assert pre._document_end(file, border + 5) == border + 105


def test_held_out_documents_are_the_same_for_every_cut_and_twins_stay_together(tmp_path, monkeypatch):
    texts = documents(100)
    (tmp_path / "a.txt").write_bytes(written([*texts, *texts]))
    report = prepare(tmp_path / "a.txt", "", valid_share=0.3)
    held = [document for document in texts if pre.is_valid(document, 0.3)]
    assert 20 < len(held) < 40 and report["valid"]["documents"] == 2 * len(held)
    assert report["train"]["documents"] == 200 - 2 * len(held)
    assert decoded(open_text(tmp_path, "valid")) == words([*held, *held], lower=True)
    monkeypatch.setattr(pre, "PIECE_BYTES", 8000)
    prepare(tmp_path, tmp_path / "two", valid_share=0.3)
    for split in ("train", "valid"):
        assert decoded(open_text(tmp_path / "two", split)) == decoded(open_text(tmp_path, split))


def test_spaces_and_line_ends_do_not_part_copies_of_a_document():
    text = [f"one two {number} three four" for number in range(200)]
    held = [pre.is_valid([line], 0.3) for line in text]
    assert 30 < sum(held) < 90
    assert held == [pre.is_valid([line.replace(" ", "  \t")], 0.3) for line in text]
    assert held == [pre.is_valid(line.split(), 0.3) for line in text]


def test_the_vocabulary_is_learnt_from_training_text_evenly_spaced(tmp_path, monkeypatch):
    seen, learn = [], pre.learn
    monkeypatch.setattr(pre, "learn", lambda lines, *rest: learn(seen.extend(lines) or iter(seen), *rest))
    data = text_corpus(tmp_path / "text", count=100)
    lines = [line for text in (*documents(100), *documents(100, 1)) for line in text]
    prepare(data, tmp_path / "all")
    assert seen == lines
    seen.clear()
    prepare(data, tmp_path / "some", sample=6000)
    assert 3000 < sum(map(len, seen)) <= 6000 and set(seen) < set(lines)
    places = [lines.index(line) for line in seen]
    assert min(places) < len(lines) / 5 and max(places) > len(lines) * 3 / 5
    seen.clear()
    prepare(data / "a.txt", tmp_path / "held", valid_share=0.1)
    assert seen == [line for text in documents(100) if not pre.is_valid(text, 0.1) for line in text]
    assert len(seen) < sum(map(len, documents(100)))


def test_files_are_found_by_their_names(tmp_path):
    for name in ("b.txt", "a.txt.gz", "a.txt", "sub/c.txt", "valid.txt", "sub/dev-1.txt.gz", "test.txt", "x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = pre.find_files(tmp_path)
    assert named(found.train, tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert named(found.valid, tmp_path) == ["sub/dev-1.txt.gz", "valid.txt"]
    assert named(found.left_out, tmp_path) == ["test.txt"]
    assert pre.find_files(tmp_path / "x.csv").train == [tmp_path / "x.csv"]


def named(paths: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


BOOKS = ["a_room.txt", "devils_dictionary.txt", "devotions.txt", "testament_of_youth.txt", "validity.txt"]


def test_books_whose_titles_begin_like_a_split_are_trained_on(tmp_path):
    for name in BOOKS:
        (tmp_path / name).write_text("x")
    found = pre.find_files(tmp_path)
    assert named(found.train, tmp_path) == BOOKS and not found.valid and not found.left_out


def test_folders_of_splits_are_known_and_what_is_trained_on_is_said(tmp_path, capsys):
    text = tmp_path / "text"
    for number, split in enumerate(("train", "valid", "test")):
        (text / split).mkdir(parents=True)
        (text / split / "one.txt").write_bytes(written(documents(60 - 25 * number, number)))
    (text / "LICENSE.txt").write_text("Not a word of it is trained on.")
    report = prepare(text, tmp_path / "out")
    assert report["train"]["documents"] == 60 and report["valid"]["documents"] == 35
    printed = capsys.readouterr().out
    sentence = "trained on train/one.txt, evaluated on valid/one.txt; left out: LICENSE.txt, test/one.txt"
    assert sentence in printed
    assert splits.said(*(open_text(tmp_path / "out", split) for split in ("train", "valid"))) == f" ({sentence})"


def test_only_what_make_made_is_passed_over_whatever_its_name(tmp_path):
    text = tmp_path / "text"
    (text / "prepared").mkdir(parents=True)
    (text / "prepared" / "mine.txt").write_bytes(written(documents(40, 1)))
    (text / "a.txt").write_bytes(written(documents(40)))
    prepare(text, text / "rows", valid_share=0.1)
    (text / "rows" / "tokenizer" / "vocab.txt").write_text("[PAD]")  # as older tokenizers have it
    (text / ".notes").mkdir()
    (text / ".notes" / "x.txt").write_text("hidden")
    (text / "__MACOSX").mkdir()
    (text / "__MACOSX" / "a.txt").write_text("of the system")
    assert named(pre.find_files(text).train, text) == ["a.txt", "prepared/mine.txt"]


@pytest.mark.parametrize("saved", ["parquet", "save_to_disk"])
def test_data_sets_give_the_same_as_text(tmp_path, cache, saved):
    import datasets

    found, hub = datasets.DatasetDict(), tmp_path / "hub"
    for split, part in {"train": [*documents(60), *documents(60, 1)], "validation": documents(8, 2)}.items():
        found[split] = datasets.Dataset.from_dict({"text": [*("\n\n".join(lines) for lines in part), "", "\n"]})
        if saved == "parquet":
            found[split].to_parquet(hub / f"{split}-00000-of-00001.parquet")
    if saved == "save_to_disk":
        found.save_to_disk(hub)
    first = pre.prepare(hub, length=32, vocab_size=300)
    prepare(text_corpus(tmp_path / "text"), tmp_path / "out")
    assert contents(hub / "prepared") == contents(tmp_path / "out")
    assert pre.prepare(hub, length=32, vocab_size=300) == first, "the result in the folder of parquet files is no text"
    with pytest.raises(InputError, match="split train, has the columns text; expected a column body, or choose"):
        prepare(hub, tmp_path / "other", column="body")


NOT_UTF8 = written(documents(60, 1)).replace(b"\n", b"\nStra\xdfe", 100).replace(b"\nStra\xdfe", b"\n", 99)
UNUSABLE = {
    "neither text files .* nor parquet files; found notes.md": {"notes.md": b"x"},
    r"has only test text \(.*test.txt\); expected text to train on": {"test.txt": b"x\n"},
    r"has text \(.*a.txt\) as well as parquet files \(.*rows.parquet\); .*move": {"a.txt": b"x\n", "rows.parquet": b""},
    "the name train_test.txt says more than one split: train and test; rename it": {"train_test.txt": b"x\n"},
    "has only validation text; expected other": {"valid.txt": b"x\n"},
    r"a\.txt is empty; expected a sentence or a paragraph per line": {"a.txt": b"", "valid.txt": b"x\n"},
    "no documents for the valid split with --valid-share 0.01; .*more text": {"a.txt": b"One document.\n"},
    "no documents for the valid split at all": {"a.txt": b"One document.\n", "valid.txt": b"\n\n"},
    r"b\.txt line 101 is not UTF-8 \(byte 0xdf: invalid .*\); convert .* or fix": {"b.txt": NOT_UTF8},
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_input_that_cannot_be_prepared_is_explained(tmp_path, message):
    for file, data in UNUSABLE[message].items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, tmp_path / "out")


def test_files_of_other_endings_that_say_a_split_are_named(tmp_path):
    for name in ("train.txt", "valid.tokens", "README.md", "test/1.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A sentence.\n")
    found = pre.find_files(tmp_path)
    assert [path.name for path in found.train] == ["train.txt"] and not found.left_out
    assert [path.name for path in found.unread] == ["1.html", "valid.tokens"]
    (tmp_path / "train.txt").rename(tmp_path / "validation.txt")
    with pytest.raises(InputError, match="only validation text; .*; not read: test/1.html, valid.tokens"):
        pre.prepare(tmp_path, tmp_path / "out")
