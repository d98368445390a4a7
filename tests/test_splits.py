"""data/splits.py: which split a name means, beside the rules of `datasets`."""

import json
from pathlib import Path

import pytest
from datasets import data_files

from data import splits
from errors import InputError

SPLIT_OF = {
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


# ---- names -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SPLIT_OF)
def test_whole_words_of_a_name_decide_in_any_case(name):
    assert splits.split_of(name) == SPLIT_OF[name]


@pytest.mark.parametrize("name", ["train_test.txt", "dev-train", "test.valid"])
def test_a_name_of_two_splits_is_refused(name):
    message = f"the name {name} says more than one split: .* and .*; rename it"
    with pytest.raises(InputError, match=message):
        splits.split_of(name)


def test_two_words_of_one_split_are_one():
    assert splits.split_of("dev_eval.txt") == "valid"


def test_a_folder_decides_before_the_file():
    assert splits.split_of_path(Path("train/a_test_of_time.txt")) == "train"
    assert splits.split_of_path(Path("books/val2017/1.txt")) == "valid"
    assert splits.split_of_path(Path("books/1.test.txt")) == "test"


def test_folders_of_two_splits_are_refused():
    message = "folders of train/test/1.txt say more than one split: train and test"
    with pytest.raises(InputError, match=message):
        splits.split_of_path(Path("train/test/1.txt"))


def test_the_one_name_that_is_clearly_meant_is_chosen():
    assert splits.named(["val", "val_old", "x"], "valid", "data") == "val"
    assert splits.named(["train2017", "train_extra"], "train", "data") == "train2017"
    assert splits.named(["my_test", "x"], "test", "data") == "my_test"
    assert splits.named(["x"], "test", "data") is None


@pytest.mark.parametrize(
    "names", [("val", "valid"), ("train2014", "train2017"), ("a_test", "b_test")]
)
def test_names_of_which_none_is_clearly_meant_are_refused(names):
    one, other = names
    split = splits.split_of(one)

    message = f"data has {one}, {other}, which all say the {split} split; keep"
    with pytest.raises(InputError, match=message):
        splits.named(list(names), split, "data")


# ---- files -------------------------------------------------------------------------------------
# Layouts in which `datasets` means the same, as train, valid and left out. Paths, and what each is
# for.
LAYOUTS = {
    "files": {
        "train.txt": "train",
        "valid.txt": "valid",
        "test.txt": "left out",
        "README.txt": "left out",
    },
    "shards": {
        "train-00000-of-00002.txt": "train",
        "train-00001-of-00002.txt": "train",
        "validation-00000-of-00001.txt": "valid",
    },
    "folders": {
        "train/a.txt": "train",
        "train/b/c.txt": "train",
        "val/a.txt": "valid",
        "test/a_train.txt": "left out",
    },
    "folders below": {
        "data/training/a.txt": "train",
        "data/dev-1/a.txt": "valid",
        "notes.txt": "left out",
    },
    "words inside": {
        "wiki.train.txt": "train",
        "wiki.valid.txt": "valid",
        "wiki.test.txt": "left out",
    },
    "no split": {
        "devotions.txt": "train",
        "testament.txt": "train",
        "sub/a.txt": "train",
    },
}


def write(folder: Path, *names: str) -> Path:
    """Writes files of a word; returns the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("word\n")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_sorted_by_their_split(tmp_path, layout):
    write(tmp_path, *LAYOUTS[layout])
    paths = [tmp_path / name for name in LAYOUTS[layout]]

    files = splits.sort_files(paths, tmp_path)

    found = {}
    uses = {"train": files.train, "valid": files.valid, "left out": files.left_out}
    for use, used in uses.items():
        for path in used:
            found[str(path.relative_to(tmp_path))] = use
    assert found == LAYOUTS[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_datasets_sorts_files_in_the_same_way(tmp_path, layout):
    write(tmp_path, *LAYOUTS[layout])
    use_of_split = {"train": "train", "validation": "valid", "test": "left out"}

    found = {name: "left out" for name in LAYOUTS[layout]}
    patterns = data_files.get_data_patterns(str(tmp_path))
    for split, of_split in patterns.items():
        for path in data_files.DataFilesList.from_patterns(of_split, str(tmp_path)):
            found[str(Path(path).relative_to(tmp_path))] = use_of_split[str(split)]

    assert found == LAYOUTS[layout]


def test_a_title_with_the_word_train_leaves_no_other_books_out(tmp_path):
    books = [tmp_path / "the_train_to_paris.txt", tmp_path / "devotions.txt"]

    assert splits.sort_files(books, tmp_path).train == books


def test_a_folder_that_make_made_is_known_by_its_report(tmp_path):
    report = tmp_path / "report.json"
    assert not splits.made_by_make(tmp_path)

    report.write_text("my own report")
    assert not splits.made_by_make(tmp_path)

    of_others = [
        {"accuracy": 1},
        {"flags": {"lr": 1}},
        {"sources": []},
        {"flags": [], "sources": []},
    ]
    for content in of_others:
        report.write_text(json.dumps(content))
        assert not splits.made_by_make(tmp_path), content

    report.write_text(json.dumps({"flags": {}, "sources": []}))
    assert splits.made_by_make(tmp_path)


# ---- links -------------------------------------------------------------------------------------
def found_below(folder: Path) -> list[str]:
    """Returns the texts below a folder, plain and packed."""
    paths = splits.below(folder, "*.txt", "*.txt.gz")
    return [str(path.relative_to(folder)) for path in paths]


def test_links_are_followed_and_endings_are_of_any_case(tmp_path):
    elsewhere = write(tmp_path / "elsewhere", "1.txt")
    data = write(tmp_path / "data", "A.TXT", "b.Txt.GZ", "c.tex")
    (data / "train").symlink_to(elsewhere)

    assert found_below(data) == ["A.TXT", "b.Txt.GZ", "train/1.txt"]


def test_a_link_that_stays_in_the_data_adds_nothing(tmp_path):
    data = write(tmp_path / "data", "2024/1.txt")
    (data / "latest").symlink_to(data / "2024")
    (data / "2024" / "up").symlink_to(tmp_path)

    assert found_below(data) == ["2024/1.txt"]


def test_a_link_that_stays_in_the_data_may_say_no_split(tmp_path):
    data = write(tmp_path / "data", "2024/1.txt")
    (data / "val").symlink_to("2024")

    message = "val says the valid split and is a link to .*2024, whose"
    with pytest.raises(InputError, match=message):
        splits.below(data, "*.txt")


def test_a_link_to_a_file_that_is_not_there_is_refused(tmp_path):
    data = write(tmp_path / "data", "1.txt")
    (data / "train.txt").symlink_to("lost.txt")

    message = "train.txt is a link to lost.txt, which is not there; mend or remove it"
    with pytest.raises(InputError, match=message):
        splits.below(data, "*.txt")


# ---- what is said ------------------------------------------------------------------------------
class Rows:
    """A data set that says where it is from."""

    def __init__(self, source: str, left_out: list[str]):
        self.source = source
        self.left_out = left_out


def test_a_start_says_what_each_split_is_and_what_is_left_out():
    train = Rows("train/", ["x"])
    valid = Rows("valid/", ["x"])
    test = Rows("test/", [])

    used = "trained on train/, evaluated on valid/, test/"
    assert splits.said(train, valid, test) == f" ({used}; left out: x)"


def test_a_start_says_nothing_of_what_is_not_left_out():
    said = splits.said(Rows("a.txt", []), Rows("b.txt", []))

    assert said == " (trained on a.txt, evaluated on b.txt)"


def test_a_start_says_nothing_of_synthetic_sets():
    assert splits.said(object(), object()) == ""


def test_a_long_list_is_shown_in_part():
    many = splits.shown([f"{number}.txt" for number in range(8)])

    assert many == "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more"
