"""data/splits.py: which split a name means, beside the rules of `datasets`."""

import json
from pathlib import Path

import pytest
from datasets import data_files

from data import splits
from errors import InputError

SAID = {
    "train-00000-of-00008.parquet": "train",
    "wiki.train.tokens": "train",
    "TRAINING set.txt": "train",
    "train2017": "train",
    "News.2018.valid.txt": "valid",
    "my_val-set": "valid",
    "Validation": "valid",
    "newsdev2019.dev.en": "valid",
    "eval.txt": "valid",
    "development.txt": "valid",
    "test_b.csv": "test",
    "testing": "test",
    "testament_of_youth.txt": None,
    "devils_dictionary.txt": None,
    "devotions.txt": None,
    "validity.txt": None,
    "newstest2014.en": None,
    "trainspotting.txt": None,
    "latest.txt": None,
    "evaluations.txt": None,
    "train(1).txt": "train",
    "wiki+valid.txt": "valid",
    "TestSet": "test",
    "trainset.txt": "train",
    "don't-test’s.txt": None,
    "pre\u0301test.txt": None,
    "pr\u00e9-test.txt": "test",
}


@pytest.mark.parametrize("name", SAID)
def test_whole_words_of_a_name_decide_in_any_case(name):
    assert splits.split_of(name) == SAID[name]


@pytest.mark.parametrize("name", ["train_test.txt", "dev-train", "test.valid"])
def test_a_name_of_two_splits_is_refused(name):
    with pytest.raises(InputError, match=f"the name {name} says more than one split: .* and .*; rename it"):
        splits.split_of(name)


def test_two_words_of_one_split_are_one():
    assert splits.split_of("dev_eval.txt") == "valid"


def test_a_folder_decides_before_the_file_and_two_that_differ_are_refused():
    assert splits.split_of_path(Path("train/a_test_of_time.txt")) == "train"
    assert splits.split_of_path(Path("books/val2017/1.txt")) == "valid"
    assert splits.split_of_path(Path("books/1.test.txt")) == "test"
    with pytest.raises(InputError, match="folders of train/test/1.txt say more than one split: train and test"):
        splits.split_of_path(Path("train/test/1.txt"))


def test_one_of_several_names_is_chosen_only_where_one_is_clearly_meant():
    assert splits.named(["val", "val_old", "x"], "valid", "data") == "val"
    assert splits.named(["train2017", "train_extra"], "train", "data") == "train2017"
    assert splits.named(["my_test", "x"], "test", "data") == "my_test"
    assert splits.named(["x"], "test", "data") is None
    for names in (["val", "valid"], ["train2014", "train2017"], ["a_test", "b_test"]):
        split = splits.split_of(names[0])
        with pytest.raises(InputError, match=f"data has {names[0]}, {names[1]}, which all say the {split} split; keep"):
            splits.named(names, split, "data")


# Layouts in which `datasets` means the same, as train, valid and left out. Paths, and what each is for.
LAYOUTS = {
    "files": {"train.txt": "train", "valid.txt": "valid", "test.txt": "left out", "README.txt": "left out"},
    "shards": {
        "train-00000-of-00002.txt": "train",
        "train-00001-of-00002.txt": "train",
        "validation-00000-of-00001.txt": "valid",
    },
    "folders": {"train/a.txt": "train", "train/b/c.txt": "train", "val/a.txt": "valid", "test/a_train.txt": "left out"},
    "folders below": {"data/training/a.txt": "train", "data/dev-1/a.txt": "valid", "notes.txt": "left out"},
    "words inside": {"wiki.train.txt": "train", "wiki.valid.txt": "valid", "wiki.test.txt": "left out"},
    "no split": {"devotions.txt": "train", "testament.txt": "train", "sub/a.txt": "train"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_sorted_as_datasets_sorts_them(tmp_path, layout):
    for name in LAYOUTS[layout]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    paths = [tmp_path / name for name in LAYOUTS[layout]]
    files = splits.sort_files(paths, tmp_path)
    found = {}
    for use, of in (("train", files.train), ("valid", files.valid), ("left out", files.left_out)):
        found |= {str(path.relative_to(tmp_path)): use for path in of}
    assert found == LAYOUTS[layout]

    patterns = data_files.get_data_patterns(str(tmp_path))
    theirs = {name: "left out" for name in LAYOUTS[layout]}
    for split, of_split in patterns.items():
        use = {"train": "train", "validation": "valid", "test": "left out"}[str(split)]
        for path in data_files.DataFilesList.from_patterns(of_split, str(tmp_path)):
            theirs[str(Path(path).relative_to(tmp_path))] = use
    assert theirs == LAYOUTS[layout]


def test_a_title_with_the_word_train_does_not_leave_other_books_out(tmp_path):
    books = [tmp_path / name for name in ("the_train_to_paris.txt", "devotions.txt")]
    assert splits.sort_files(books, tmp_path).train == books


def test_what_make_made_is_known_by_its_mark(tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    assert not splits.made_by_make(folder)
    (folder / "report.json").write_text("my own report")
    assert not splits.made_by_make(folder)
    for own in ({"accuracy": 1}, {"flags": {"lr": 1}}, {"sources": []}, {"flags": [], "sources": []}):
        (folder / "report.json").write_text(json.dumps(own))
        assert not splits.made_by_make(folder), own
    (folder / "report.json").write_text(json.dumps({"flags": {}, "sources": []}))
    assert splits.made_by_make(folder)


def write(folder: Path, *names: str) -> Path:
    """Makes files of a word, and returns the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("word\n")
    return folder


def found_below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in splits.below(folder, "*.txt", "*.txt.gz")]


def test_links_to_folders_are_followed_and_endings_are_of_any_case(tmp_path):
    elsewhere = write(tmp_path / "elsewhere", "1.txt")
    data = write(tmp_path / "data", "A.TXT", "b.Txt.GZ", "c.tex")
    (data / "train").symlink_to(elsewhere)
    assert found_below(data) == ["A.TXT", "b.Txt.GZ", "train/1.txt"]


def test_a_link_that_stays_in_the_data_adds_nothing_and_may_say_no_split(tmp_path):
    data = write(tmp_path / "data", "2024/1.txt")
    (data / "latest").symlink_to(data / "2024")
    (data / "2024" / "up").symlink_to(tmp_path)
    assert found_below(data) == ["2024/1.txt"]
    (data / "val").symlink_to("2024")
    with pytest.raises(InputError, match="val says the valid split and is a link to .*2024, whose"):
        splits.below(data, "*.txt")


def test_a_link_to_a_file_that_is_not_there_is_refused(tmp_path):
    data = write(tmp_path / "data", "1.txt")
    (data / "train.txt").symlink_to("lost.txt")
    with pytest.raises(InputError, match="train.txt is a link to lost.txt, which is not there; mend or remove it"):
        splits.below(data, "*.txt")


class Rows:
    """A data set that says where it is from."""

    def __init__(self, source: str, left_out: list[str]):
        self.source, self.left_out = source, left_out


def test_a_start_says_what_is_trained_on_evaluated_on_and_left_out():
    train, valid, test = Rows("train/", ["x"]), Rows("valid/", ["x"]), Rows("test/", [])
    assert splits.said(train, valid, test) == " (trained on train/, evaluated on valid/, test/; left out: x)"
    assert splits.said(Rows("a.txt", []), Rows("b.txt", [])) == " (trained on a.txt, evaluated on b.txt)"
    assert splits.said(object(), object()) == "", "a synthetic set"
    many = splits.shown([f"{number}.txt" for number in range(8)])
    assert many == "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more"
