"""Tests what train/tagging.py reads: files of columns, rows and data sets; and their tokens, in
windows."""

import gzip
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from transformers import AutoTokenizer

from data import look, tagging, vocabulary, windows
from data.tagging import Columns, Sentences
from data.windows import NO_LABEL
from errors import InputError

# As the original files have it: IOB1, four columns.
CONLL = """-DOCSTART- -X- -X- O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
German JJ I-NP I-MISC
. . O O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
Ben NNP I-NP B-PER

"""
WORDS = [["EU", "rejects", "German", "."], ["Peter", "Blackburn", "Ben"]]
TAGS = [["B-ORG", "O", "B-MISC", "O"], ["B-PER", "I-PER", "B-PER"]]
DEV = "Berlin NN O I-ORG\n"
TEST = "Anna NN O I-PER\n"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, newline="")
    return path


@pytest.fixture
def conll(tmp_path) -> Path:
    """A folder with the names of CoNLL-2003's own files."""
    written(tmp_path / "conll2003/eng.train", CONLL)
    written(tmp_path / "conll2003/eng.testa", DEV)
    written(tmp_path / "conll2003/eng.testb", TEST)
    written(tmp_path / "conll2003/README.md", "# no data")
    return tmp_path / "conll2003"


# ---- files of columns ----------------------------------------------------------------------------
def test_the_files_of_conll2003_are_read(conll):
    opened = tagging.open_splits(str(conll), Columns())

    assert opened.train.words == WORDS
    assert opened.train.tags == TAGS
    assert opened.eval["validation"].words == [["Berlin"]]
    assert opened.task.types == ("MISC", "ORG", "PER")
    assert opened.task.labels[:3] == ("O", "B-MISC", "I-MISC")
    assert opened.task.name == "conll2003"
    assert opened.train.source == "eng.train"
    assert opened.train.left_out == ["eng.testb"]
    assert opened.train.notes == ("eng.train: its tags are IOB1 and are converted to IOB2",)


def test_the_test_split_is_evaluated_where_it_is_asked_for(conll):
    types = ("MISC", "ORG", "PER")
    opened = tagging.open_evaluation(str(conll), Columns(), types, split="test")
    assert opened.eval["test"].words == [["Anna"]]
    assert opened.train is None


COLUMN_FILES = {
    "blanks": "EU  ORG B-ORG\r\nsays O O\r\n\r\n# O O\r\n",
    "tabs": "EU\tx y\tB-ORG\nsays\t\tO\n \t\n#\t\tO\n",
    "comments": "# id = 1\nEU x B-ORG\nsays x O\n\n# id = 2\n# x O\n",
    "comments with tabs": "#\thttp://a\nEU\tx\tB-ORG\nsays\tx\tO\n\n#\t[2009]\n#\tx\tO\n",
}


@pytest.mark.parametrize("name", COLUMN_FILES)
def test_fields_are_separated_by_tabs_or_blanks(name, tmp_path):
    path = written(tmp_path / "own.txt", COLUMN_FILES[name])
    split = tagging.find(str(path), Columns()).read["train"]()
    assert split.sentences().words == [["EU", "says"], ["#"]]
    assert split.sentences().tags == [["B-ORG", "O"], ["O"]]


def test_columns_are_chosen_by_their_numbers(tmp_path):
    path = written(tmp_path / "own.bio.gz", "")
    path.write_bytes(gzip.compress(b"1\tEU\tB-ORG\tO\n2\tsays\tO\tB-X\n"))
    columns = Columns(word_column=2, tag_column=3)
    split = tagging.find(str(path), columns).read["train"]()
    assert split.sentences().words == [["EU", "says"]]
    assert split.types == {"ORG"}


REFUSED_LINES = {
    "EU B-ORG\nsays\n": "own.txt line 2 has 1 fields, and the lines before it 2",
    "EU B-ORG\nsays NN O\n": "own.txt line 2 has 3 fields, and the lines before it 2",
    "EU\n": "own.txt line 1 has 1 fields, 'EU'; expected a word and its tag",
    "EU B-ORG\n\nit\tO\n": "own.txt line 3 has 1 fields",
    "EU B-ORG\n\nsays VBZ\n": "own.txt line 3 has the tag 'VBZ'; expected O, or a type with B-",
    "EU\tB-ORG\nsays\t\n": "own.txt line 2 has the tag ''; expected O",
    "\tB-ORG\tO\n": "own.txt line 1 has an empty word",
    "EU B-ORG\rsays O\r\rit O\r": r"own.txt line 1 has \\r as ends of lines",
    "\n\n": "own.txt has no sentences",
    "EU O\n": "own.txt .* has no entities: all tags are O",
    "EU B-ORG\nS\xe3o O\n": "own.txt line 2 is not UTF-8",
}


@pytest.mark.parametrize("text", REFUSED_LINES)
def test_a_bad_line_is_named(text, tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=REFUSED_LINES[text]):
        tagging.open_splits(str(path), Columns())


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        (Columns(tag_column=5), "line 3 has 4 fields, and --tag-column is 5"),
        (Columns(word_column=6), "and --word-column is 6"),
        (Columns(words="tokens"), "--words is for rows .* has a word a line"),
        (Columns(tag_names=("O",)), "--tag-names is for rows"),
    ],
)
def test_columns_that_files_do_not_have_are_refused(columns, pattern, conll):
    with pytest.raises(InputError, match=pattern):
        tagging.open_splits(str(conll), columns)


def test_a_type_of_the_evaluation_alone_is_refused(conll):
    written(conll / "eng.testa", "in NN O O\nBerlin NN O I-LOC\n")
    pattern = "eng.testa line 2 has an entity of the type LOC, and .* it has MISC, ORG, PER"
    with pytest.raises(InputError, match=pattern):
        tagging.open_splits(str(conll), Columns())


def test_entities_that_break_their_scheme_are_said(tmp_path):
    lines = "A B-X\nB I-X\n\nC B-X\n\nD O\nE I-X\n"
    path = written(tmp_path / "own.conll", lines)
    split = tagging.find(str(path), Columns()).read["train"]()
    (note,) = split.sentences().notes
    assert re.search("1 of 3 entities do not begin as IOB2 .*own.conll line 7.*seqeval", note)
    assert split.sentences().tags[2] == ["O", "B-X"]


# ---- rows ----------------------------------------------------------------------------------------
NAMES = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-MISC", "I-MISC"]
NUMBERS = [[NAMES.index(tag) for tag in tags] for tags in TAGS]


def json_lines(path: Path, rows: list[dict]) -> Path:
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_json_lines_have_lists_of_words_and_tags(tmp_path):
    rows = [{"w": words, "t": tags} for words, tags in zip(WORDS, TAGS, strict=True)]
    path = json_lines(tmp_path / "train.jsonl", [*rows, {"w": [], "t": []}])
    json_lines(tmp_path / "dev.jsonl", rows[:1])
    opened = tagging.open_splits(str(path.parent), Columns(words="w", tags="t"))
    assert opened.train.words == WORDS
    assert opened.train.tags == TAGS
    assert opened.train.notes == ("train.jsonl: 1 sentences without words are left out",)


def test_numbers_of_json_are_named_by_a_flag(tmp_path):
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in zip(WORDS, NUMBERS, strict=True)]
    path = json_lines(tmp_path / "own.json", rows)
    split = tagging.find(str(path), Columns(tag_names=tuple(NAMES))).read["train"]()
    assert split.sentences().tags == TAGS
    with pytest.raises(InputError, match=r"line 1 has the tag 3, a number .* by --tag-names"):
        tagging.open_splits(str(path), Columns())
    with pytest.raises(InputError, match="line 1 has the tag 5; there are names of 0 to 4"):
        tagging.open_splits(str(path), Columns(tag_names=tuple(NAMES[:5])))


REFUSED_ROWS = [
    ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "line 1 has 2 words and 1 tags"),
    ({"tokens": "a b", "ner_tags": ["O"]}, "line 1 has 'a b' as its words; expected a list"),
    ({"tokens": ["a", 1], "ner_tags": ["O", "O"]}, "expected a list of texts"),
    ({"tokens": ["a"], "ner_tags": "O"}, "line 1 has 'O' as its tags; expected a list"),
    ({"tokens": ["a"], "ner_tags": [None]}, "line 1 has the tag None; expected O"),
    ({"tokens": ["a"], "ner_tags": ["X"]}, "line 1, word 1 has the tag 'X'; expected O"),
    ({"tokens": ["a"], "ner_tags": [1]}, "by --tag-names, such as --tag-names O B-PER I-PER"),
    ({"tokens": ["a\ud83d"], "ner_tags": ["O"]}, "half of a character"),
    ({"tokens": ["a"], "ner_tags": ["B-\ud83d"]}, "has a tag with .* half of a character"),
    ({"words": ["a"], "ner_tags": ["O"]}, "columns words, ner_tags, and no tokens; .* --words"),
    ({"tokens": ["a"], "tags": ["O"]}, "columns tokens, tags, and no ner_tags; .* --tags"),
]


@pytest.mark.parametrize(("row", "pattern"), REFUSED_ROWS)
def test_a_bad_row_is_named(row, pattern, tmp_path):
    path = json_lines(tmp_path / "own.jsonl", [row])
    with pytest.raises(InputError, match=pattern):
        tagging.open_splits(str(path), Columns())


def test_rows_have_no_numbers_of_columns(tmp_path):
    path = json_lines(tmp_path / "own.jsonl", [{"tokens": ["a"], "ner_tags": ["B-X"]}])
    with pytest.raises(InputError, match="--tag-column is for files with a word a line"):
        tagging.open_splits(str(path), Columns(tag_column=2))


def dataset(names: list[str] | None = None) -> Dataset:
    """Returns a table with the tags' numbers, and with their names where they are given."""
    tag = ClassLabel(names=names) if names else Value("int64")
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(tag)})
    return Dataset.from_dict({"tokens": WORDS, "ner_tags": NUMBERS}, features=features)


def test_a_saved_data_set_has_the_names_of_its_tags(tmp_path, cache):
    names = [*NAMES, "B-LOC", "I-LOC"]
    saved = DatasetDict({"train": dataset(names), "validation": dataset(names)})
    saved.save_to_disk(str(tmp_path / "saved"))
    opened = tagging.open_splits(str(tmp_path / "saved"), Columns())
    assert opened.train.tags == TAGS
    assert opened.eval["validation"].words == WORDS
    assert opened.task.types == ("LOC", "MISC", "ORG", "PER")  # LOC is declared
    with pytest.raises(InputError, match="--tag-names is O; the tags of .* have names"):
        tagging.open_splits(str(tmp_path / "saved"), Columns(tag_names=("O",)))


def test_parquet_keeps_the_names_of_tags(tmp_path, cache):
    dataset(NAMES).to_parquet(tmp_path / "train.parquet")
    split = tagging.find(str(tmp_path / "train.parquet"), Columns()).read["train"]()
    assert split.sentences().tags == TAGS


def test_a_data_set_of_the_hub_is_opened_by_its_id(monkeypatch):
    loaded = DatasetDict({"train": dataset(NAMES), "test": dataset(NAMES)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: loaded)
    found = tagging.find("somebody/entities", Columns())
    assert list(found.read) == ["train", "test"]
    assert found.read["train"]().sentences().words == WORDS


def test_numbers_of_a_data_set_without_names_are_refused(tmp_path, cache):
    dataset().to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match="row 1 has the tag 3, a number without a name"):
        tagging.open_splits(str(tmp_path / "train.parquet"), Columns())


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        ({"eng.testa": DEV}, "no file to train on, only eng.testa"),
        ({"notes.md": "x"}, "has notes.md; expected a word and its tag a line"),
        ({"train.txt": DEV, "train.jsonl": "{}"}, "train.jsonl and train.txt for one split"),
    ],
)
def test_folders_that_are_refused(files, pattern, tmp_path):
    for name, text in files.items():
        written(tmp_path / name, text)
    with pytest.raises(InputError, match=pattern):
        tagging.open_splits(str(tmp_path), Columns())


def test_a_path_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="there is no file or folder /nowhere/at/all"):
        tagging.open_splits("/nowhere/at/all", Columns())


# ---- held-out sentences --------------------------------------------------------------------------
@pytest.fixture
def one_file(tmp_path) -> Path:
    """Sixty sentences of two types, in one file without a split."""
    lines = []
    for number in range(60):
        kind = "PER" if number % 3 else "LOC"
        lines.append(f"w{number} B-{kind}\nsaid O\n\n")
    return written(tmp_path / "own.conll", "".join(lines))


def test_a_tenth_is_held_out_of_one_file(one_file):
    opened = tagging.open_splits(str(one_file), Columns())
    held = opened.eval["validation"]
    assert (len(opened.train), len(held)) == (54, 6)
    assert {tag for tags in held.tags for tag in tags} == {"O", "B-PER", "B-LOC"}
    assert held.source == "that tenth, 6 sentences, by a hash of the words"
    assert not {words[0] for words in held.words} & {words[0] for words in opened.train.words}


def test_an_evaluation_finds_the_same_tenth(one_file):
    held = tagging.open_splits(str(one_file), Columns()).eval["validation"]
    types = ("LOC", "PER")

    again = tagging.open_evaluation(str(one_file), Columns(), types)
    whole = tagging.open_evaluation(str(one_file), Columns(), types, is_own=False)
    train = tagging.open_evaluation(str(one_file), Columns(), types, split="train")

    assert again.eval["valid"].words == held.words
    assert len(whole.eval["all"]) == 60
    assert len(train.eval["train"]) == 54
    with pytest.raises(InputError, match="is one file, without a test split"):
        tagging.open_evaluation(str(one_file), Columns(), types, split="test")
    with pytest.raises(InputError, match="own.conll line 1 has an entity of the type LOC"):
        tagging.open_evaluation(str(one_file), Columns(), ("PER",), is_own=False)


def test_doctor_says_what_there_is(conll):
    said = look.look(str(conll), "tagging")
    assert said.startswith("2 sentences with entities of MISC, ORG, PER (trained on eng.train")


# ---- windows -------------------------------------------------------------------------------------
TEXT = ["anna stone said the old bank works in a field", "U.S. (field) bank, 1996-08-22 ¿qué?"]
KINDS = ("bert", "roberta", "xlnet")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    """A tokenizer that knows few words."""
    made = vocabulary.learn(TEXT * 20, request.param, 400)
    windows.separate_words(made)
    return made


def of(words: list[list[str]], tags: list[list[str]] | None = None) -> Sentences:
    return Sentences(words, tags or [["O"] * len(one) for one in words])


def rows_of(encoded: windows.Encoded) -> list[dict[str, np.ndarray]]:
    """Returns each window as a batch of one row that is as long as it."""
    return [encoded.batch([index], (int(encoded.lengths[index]),)) for index in range(len(encoded))]


def test_tokens_are_those_of_the_tokenizer_itself(tokenizer):
    words = [text.split() for text in TEXT]
    labels = ("O", "B-X", "I-X")
    tags = [[labels[number % 3] for number in range(len(one))] for one in words]
    encoded = windows.Encoded(of(words, tags), tokenizer, 100, labels)

    for row, one in zip(rows_of(encoded), words, strict=True):
        expected = tokenizer(one, is_split_into_words=True)
        assert row["input_ids"][0].tolist() == expected["input_ids"]
        before = None
        for label, word in zip(row["labels"][0].tolist(), expected.word_ids(), strict=True):
            is_first = word is not None and word != before
            assert label == (word % 3 if is_first else NO_LABEL)
            before = word


def test_a_long_sentence_goes_on_in_another_window(tokenizer):
    words = " ".join(TEXT).split()
    encoded = windows.Encoded(of([words, words[:1]]), tokenizer, 16)

    assert encoded.split == 1
    assert encoded.sentence.tolist() == [0] * (len(encoded) - 1) + [1]
    assert encoded.words.sum() == len(words) + 1
    assert encoded.lengths.max() <= 16
    (note,) = encoded.notes
    assert "1 sentences are longer than 16 tokens and are split into windows" in note
    # Every word once, in its order: its first token is that of the word by itself.
    firsts = []
    for number, row in enumerate(rows_of(encoded)):
        firsts.append(encoded.of_words(number, row["input_ids"][0]))
    found = encoded.of_sentences(firsts)
    alone = [
        tokenizer([word], is_split_into_words=True, add_special_tokens=False) for word in words
    ]
    assert found[0].tolist() == [one["input_ids"][0] for one in alone]
    assert len(found[1]) == 1


def test_a_padded_row_finds_its_words_on_either_side(tokenizer):
    encoded = windows.Encoded(of([TEXT[0].split()[:3]]), tokenizer, 100)
    batch = encoded.batch([-1, 0], (40,))
    (exact,) = rows_of(encoded)

    words = encoded.of_words(0, batch["input_ids"][1])
    assert words.tolist() == encoded.of_words(0, exact["input_ids"][0]).tolist()
    assert (batch["labels"][0] == NO_LABEL).all()
    assert batch["attention_mask"].sum(1).tolist() == [1, encoded.lengths[0]]
    assert (batch["input_ids"][0] == tokenizer.pad_token_id).all()
    with pytest.raises(ValueError, match="example 0 has"):
        encoded.batch([0], (3,))
    with pytest.raises(IndexError):
        encoded.batch([1], (40,))


def test_a_word_longer_than_a_window_keeps_its_label(tokenizer):
    giant = "1996-08-22" * 9
    given = of([["a", giant, "bank"]], [["O", "B-X", "O"]])
    encoded = windows.Encoded(given, tokenizer, 16, ("O", "B-X", "I-X"))
    labels = []
    for number, row in enumerate(rows_of(encoded)):
        labels.append(encoded.of_words(number, row["labels"][0]))
    assert encoded.of_sentences(labels)[0].tolist() == [0, 1, 0]
    assert "1 words are longer than 16 tokens" in " ".join(encoded.notes)


def test_a_word_without_a_token_becomes_the_unknown_one(tokenizer):
    given = of([["a", "", "bank"], ["", "a"]], [["O", "B-X", "I-X"], ["O", "B-X"]])
    encoded = windows.Encoded(given, tokenizer, 40, ("O", "B-X", "I-X"))
    first, second = rows_of(encoded)
    assert encoded.of_words(0, first["labels"][0]).tolist() == [0, 1, 2]
    assert encoded.of_words(0, first["input_ids"][0])[1] == tokenizer.unk_token_id
    assert encoded.of_words(1, second["labels"][0]).tolist() == [0, 1]
    assert "2 words have no token, such as ''" in " ".join(encoded.notes)


def test_a_character_of_no_width_is_a_word_to_bert():
    bert = vocabulary.learn(TEXT * 20, "bert", 400)
    encoded = windows.Encoded(of([["a", "\u200b", "bank"]]), bert, 40)
    assert encoded.words.tolist() == [3]
    assert "such as '\\u200b'" in encoded.notes[0]


def test_words_of_a_list_begin_as_within_a_text(tmp_path):
    """RoBERTa's, also when it has been saved."""
    roberta = vocabulary.learn(TEXT * 20, "roberta", 400)
    plain = roberta(" a bank", add_special_tokens=False)["input_ids"]
    assert roberta(["a", "bank"], is_split_into_words=True)["input_ids"][1:-1] != plain

    windows.separate_words(roberta)
    roberta.save_pretrained(tmp_path)

    for one in (roberta, AutoTokenizer.from_pretrained(tmp_path)):
        assert one(["a", "bank"], is_split_into_words=True)["input_ids"][1:-1] == plain
