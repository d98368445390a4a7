"""Your own sentences: what data/own_text.py reads, and what train/glue.py makes of it."""

import contextlib
import csv
import gzip
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from helpers import equal, exported, losses, records
from run_make import ROOT, make
from scipy import special
from sklearn import metrics as reference

from data import own_text, targets
from data.own_text import Columns
from errors import InputError
from models import classification
from train import glue
from train.common import cli
from train.common.run import Run

STARS = Columns(("review",), "stars")
FILLERS = ["the", "a", "film", "plot", "cast", "was", "with", "and", "of", "it", "this", "scene"]
WORDS = {"1": "dreadful", "3": "decent", "5": "superb"}  # the word that says how many stars


def sentences(number: int, seed: int = 0) -> list[str]:
    """Returns different sentences that say nothing."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        words = rng.choice(FILLERS, rng.integers(8, 12))
        made.append(" ".join(words))
    return made


def reviews(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns rows whose stars one word of the review says."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, sentence in enumerate(sentences(number, seed)):
        stars = ("1", "3", "5")[index % 3]
        words = sentence.split()
        words.insert(int(rng.integers(len(words))), WORDS[stars])
        rows.append({"id": str(index), "review": " ".join(words), "stars": stars})
    return rows


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",", bom: bool = False):
    """Writes rows as CSV; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def contents(opened) -> list[tuple]:
    """Returns the texts and labels of all rows, those for training first."""
    found = []
    for examples in (opened.train, *opened.eval.values()):
        found += zip(examples.first, examples.labels.tolist(), strict=True)
    return found


# ---- files ---------------------------------------------------------------------------------------
ROWS = [
    {"review": 'He said "no", then, left;\nit was good', "stars": "5"},
    {"review": "as good\tas ever", "stars": "5"},
    {"review": "not good", "stars": "1"},
    {"review": "so bad it hurts — übel", "stars": "1"},
]
EXPECTED = {(row["review"], ("1", "5").index(row["stars"])) for row in ROWS}


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_is_read_as_it_was_written(delimiter, bom, tmp_path):
    path = write_csv(tmp_path / "reviews.csv", ROWS, delimiter, bom)
    opened = own_text.open_splits(str(path), STARS)
    assert set(contents(opened)) == EXPECTED
    assert opened.task.name == "reviews"
    assert opened.task.labels == ("1", "5")


def as_table(path: Path, save) -> None:
    features = datasets.Features(
        {"review": datasets.Value("string"), "stars": datasets.ClassLabel(names=["5", "1"])}
    )
    save(datasets.Dataset.from_list(ROWS, features=features), path)


def as_json(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")


def as_json_gz(path: Path) -> None:
    lines = "".join(json.dumps(row | {"stars": int(row["stars"])}) + "\n" for row in ROWS)
    path.write_bytes(gzip.compress(lines.encode()))


def as_csv_gz(path: Path) -> None:
    plain = write_csv(path.with_name("plain"), ROWS)
    path.write_bytes(gzip.compress(plain.read_bytes()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("r.jsonl", as_json),
        ("r.jsonl.gz", as_json_gz),
        ("r.CSV.gz", as_csv_gz),
        ("r.parquet", lambda path: as_table(path, datasets.Dataset.to_parquet)),
        ("saved", lambda path: as_table(path, datasets.Dataset.save_to_disk)),
    ],
)
def test_other_files_have_the_same_rows(name, write, tmp_path, cache):
    write(tmp_path / name)
    opened = own_text.open_splits(str(tmp_path / name), STARS)
    assert set(contents(opened)) == EXPECTED
    assert opened.task.name == name.partition(".")[0]


def test_a_folder_has_splits_of_several_files(tmp_path):
    rows = reviews(30)
    write_csv(tmp_path / "train/one.csv", rows[:9])
    write_csv(tmp_path / "train/two.csv", rows[9:18])
    write_csv(tmp_path / "valid.csv", rows[18:24])
    write_csv(tmp_path / "test.csv", rows[24:])

    opened = own_text.open_splits(str(tmp_path), STARS)

    assert opened.train.first == [row["review"] for row in rows[:18]]
    assert opened.eval["validation"].first == [row["review"] for row in rows[18:24]]
    assert opened.train.source == "train/one.csv, train/two.csv"
    assert opened.eval["validation"].source == "valid.csv"
    assert opened.train.left_out == ["test.csv"]


def test_a_url_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    path = write_csv(tmp_path / "my reviews.csv", ROWS)
    opened = own_text.open_splits(f"file://{path}", STARS)
    assert set(contents(opened)) == EXPECTED
    assert opened.task.name == "my-reviews"


def test_a_data_set_of_the_hub_is_read(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list(reviews(12))
    parts = {"train": rows.select(range(9)), "dev": rows.select(range(9, 12)), "extra": rows}
    asked = []

    def load(name):
        asked.append(name)
        return datasets.DatasetDict(parts)

    monkeypatch.setattr(datasets, "load_dataset", load)
    opened = own_text.open_splits("me/reviews", STARS)
    assert asked == ["me/reviews"]
    assert (len(opened.train), len(opened.eval["validation"])) == (9, 3)
    assert opened.train.left_out == ["its split extra"]
    assert opened.task.name == "reviews"


def test_the_same_rows_are_held_out_in_any_order(tmp_path):
    rows = reviews(300)
    shuffled = [rows[index] for index in np.random.default_rng(3).permutation(300)]
    held = []
    for name, some in (("one", rows), ("other", shuffled)):
        path = write_csv(tmp_path / f"{name}.csv", some)
        opened = own_text.open_splits(str(path), STARS)
        held.append(set(opened.eval["validation"].first))
        assert len(opened.train) == 270
        assert held[-1].isdisjoint(opened.train.first)
        assert np.bincount(opened.eval["validation"].labels).tolist() == [10, 10, 10]
    assert held[0] == held[1]


def test_a_class_of_one_row_is_named(tmp_path):
    rows = [*reviews(30), {"id": "", "review": "a rare one", "stars": "2"}]
    opened = own_text.open_splits(str(write_csv(tmp_path / "r.csv", rows)), STARS)
    assert opened.task.found == "4 classes of stars (1, 2, 3, 5; in training only: 2), "
    assert "a rare one" in opened.train.first


REFUSED_FILES = {
    "no_column.csv": ("id,text\n1,a\n", r"has the columns id, text; there is no review and no st"),
    "no_header.csv": ("good film\n", r"has the columns 'good film', without a comma"),
    "empty.csv": ("", r"empty.csv is empty"),
    "no_rows.csv": ("review,stars\n", r"has no rows"),
    "short.csv": ("review,stars\na,1\n\nb\n", r"short.csv line 4 has 1 fields; expected 2"),
    "blank.csv": ('review,stars\n"a\nb",1\n" ",2\n', r"blank.csv line 4 has an empty review"),
    "quote.csv": ('review,stars\na,1\n"b,2\nc,3\n', r"quote.csv line 3 cannot be read as CSV"),
    "inner.csv": ('review,stars\n"a" b,1\n', r"inner.csv line 2 .*written twice"),
    "twice.csv": ("review,stars,stars\na,1,2\n", r"has 2 columns stars"),
    "label.csv": ("review,stars\na,1\nb,\nc,2\n", r"label.csv line 3 has no label"),
    "one.csv": ("review,stars\na,1\nb,1\n", r"one.csv has one class in stars, '1'"),
    "lonely.csv": ("review,stars\na,1\nb,2\n", r"2 examples cannot be split"),
    "bad.jsonl": ('{"review": "a", "stars": 1}\n{"review"\n', r"bad.jsonl line 2 is not JSON"),
    "list.jsonl": ("[1]\n", r"list.jsonl line 1 is not a JSON object"),
    "keys.jsonl": ('{"text": "a"}\n', r"line 1 has the columns text; there is no review and no s"),
    "number.jsonl": ('{"review": 5, "stars": 1}\n', r"line 1 has 5 as its review; expected text"),
    "null.jsonl": ('{"review": null, "stars": 1}\n', r"line 1 has an empty review"),
    "words.txt": ("review,stars\na,1\n", r"words.txt has an ending that is not known"),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_a_file_is_refused_with_its_line(name, tmp_path):
    content, message = REFUSED_FILES[name]
    path = write_text(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as refusal:
        own_text.open_splits(str(path), STARS)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_header_whose_quote_does_not_end_is_refused(tmp_path):
    path = write_text(tmp_path / "long.csv", '"review,stars\n' + "good,5\n" * 30_000)
    with pytest.raises(InputError, match="long.csv.* there is no review"):
        own_text.open_splits(str(path), STARS)


def test_what_is_not_utf8_or_gzip_is_refused(tmp_path):
    latin = tmp_path / "latin.csv"
    latin.write_bytes("review,stars\nübel,1\n".encode("latin-1"))
    packed = write_text(tmp_path / "plain.csv.gz", "review,stars\n")
    with pytest.raises(InputError, match="latin.csv line 2 is not UTF-8"):
        own_text.open_splits(str(latin), STARS)
    with pytest.raises(InputError, match="plain.csv.gz cannot be read"):
        own_text.open_splits(str(packed), STARS)


def test_a_class_that_training_lacks_is_refused(tmp_path):
    write_csv(tmp_path / "train.csv", ROWS)
    write_csv(tmp_path / "dev.csv", [{"review": "a", "stars": "1"}, {"review": "b", "stars": "4"}])
    with pytest.raises(InputError, match="dev.csv line 3 has the class '4', .* it has 1, 5"):
        own_text.open_splits(str(tmp_path), STARS)


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="no file or folder nowhere"):
        own_text.open_splits("nowhere", STARS)
    write_text(tmp_path / "notes.txt", "a")
    with pytest.raises(InputError, match="has notes.txt; expected CSV"):
        own_text.open_splits(str(tmp_path), STARS)
    write_csv(tmp_path / "test.csv", ROWS)
    with pytest.raises(InputError, match="no file to train on, only test.csv"):
        own_text.open_splits(str(tmp_path), STARS)
    write_csv(tmp_path / "a.csv", ROWS)
    as_json(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="a.csv and a.jsonl for one split"):
        own_text.open_splits(str(tmp_path), STARS)


# ---- flags ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("full --data FILE --label stars", "--label is stars; it is for data of your own"),
        ("full --data FILE --objective regression", "--objective is regression; it is for data"),
        ("full --data FILE --text review", "--text is review, and --label is missing"),
        ("full --data FILE --text a b c --label stars", "expected one column of sentences, or"),
        ("full --data FILE --text stars --label stars", "expected different columns"),
        ("full --data FILE --text review --label stars --task sst2", "but --task is sst2"),
        ("tiny --text review --label stars", "but --data is synthetic; leave one out"),
        ("full --data FILE --text review --label stars --separator ;", "for --objective multil"),
        ("full --data FILE --text plot --label stars", "columns id, review, stars; .* no plot"),
        ("full --data FILE", "reviews.csv is a file; .* by --text and --label"),
        (
            "full --data FILE --text review --label stars --objective multilabel",
            "reviews.csv line 2 has the text '1' as its labels; .* by --separator",
        ),
        (
            "full --data FILE --text review --label stars --checkpoint new --labels a,b",
            "--labels is a,b; it is for the head of a --checkpoint",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, refused, tmp_path):
    path = write_csv(tmp_path / "reviews.csv", reviews(6))
    refused(glue, f"{flags.replace('FILE', str(path))} --precision float32", message)


def test_what_is_not_glue_gets_the_advice(refused, tmp_path):
    write_csv(tmp_path / "train.tsv", reviews(6), "\t")
    flags = f"full --data {tmp_path} --precision float32"
    refused(glue, flags, "expected .* as in GLUE's MRPC; .* --text and --label")


def test_new_weights_have_a_recipe_of_their_own():
    own = glue.Config(data="r.csv", text=("review",), label="stars", checkpoint="new", epochs=2)
    found = glue.validate(own)
    assert (found.epochs, found.lr) == (2, glue.NEW_RECIPE.lr)
    assert found.lr > 10 * glue.validate(replace(own, checkpoint="a/b")).lr
    assert (found.task, found.objective) == (None, "classes")
    assert glue.validate(glue.Config(data="x/y")).task == "mrpc"


def commands_of_the_page() -> list[str]:
    """Returns the commands of docs/data.md on own sentences."""
    text = (ROOT / "docs/data.md").read_text()
    section = text.split("## Your own sentences\n")[1].split("\n## ")[0]
    lines = [line.partition("#")[0].strip() for line in section.splitlines()]
    return [line for line in lines if line.startswith("make train")]


def write_data_of_the_page(folder: Path) -> None:
    """Writes the data that these commands name."""
    write_csv(folder / "reviews.csv", reviews(30))
    columns = {"first": "question", "second": "answer", "answer": "relevant"}
    renamed = [{columns[name]: value for name, value in row.items()} for row in pairs(20)]
    write_csv(folder / "data/pairs/train.csv", renamed)
    tickets = [{"subject": text, "topics": "food,service"} for text in sentences(20)]
    lines = "".join(json.dumps(ticket) + "\n" for ticket in tickets)
    (folder / "tickets.jsonl").write_text(lines)
    essays = [{"essay": text, "score": index / 2} for index, text in enumerate(sentences(20))]
    datasets.Dataset.from_list(essays).to_parquet(folder / "essays.parquet")


@pytest.mark.parametrize("command", commands_of_the_page())
def test_a_command_of_the_page_opens_its_data(command, tmp_path, cache):
    write_data_of_the_page(tmp_path)
    words = shlex.split(command)
    line = make("-n", *words[1:]).stdout.replace("\\\n", "").splitlines()[-1]
    (data,) = [word for word in words if word.startswith("DATA=")]
    line = line.replace("$DATA", data.removeprefix("DATA="))
    arguments = shlex.split(line.partition(" -m train.glue ")[2])

    config = glue.validate(cli.parse(glue.PRESETS, "train.glue", arguments))

    assert config.text
    columns = Columns(config.text, config.label, config.objective, config.separator)
    opened = own_text.open_splits(str(tmp_path / config.data.lstrip("/")), columns)
    count = len(opened.train) + len(opened.eval["validation"])
    assert count == (30 if "reviews.csv" in command else 20)
    assert arguments[0] == "full"


# ---- runs ----------------------------------------------------------------------------------------
OWN = glue.Config(
    text=("review",),
    label="stars",
    checkpoint="new",
    lengths=(16,),
    epochs=6,
    lr=3e-3,
    precision="float32",
    workers=0,
    eval_every=10_000,
)


@pytest.fixture(scope="module")
def run(mesh, tmp_path_factory):
    """A run on 600 reviews: (its folder, its metrics, what it printed, the rows held out)."""
    folder = tmp_path_factory.mktemp("own")
    path = write_csv(folder / "my reviews.csv", reviews(600))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        metrics = glue.main(replace(OWN, data=str(path), runs=str(folder)))
    held = own_text.open_splits(str(path), STARS).eval["validation"]
    return folder / "bert-my-reviews", metrics, output.getvalue(), held


def test_a_file_of_reviews_is_learnt_from_nothing(run):
    _, metrics, _, _ = run
    assert set(metrics) == {"accuracy", "f1_macro", "loss"}
    assert metrics["accuracy"] > 0.95
    assert metrics["f1_macro"] > 0.95


def test_the_first_lines_say_what_was_found(run):
    _, _, output, _ = run
    first = output.splitlines()[0]
    assert "bert on my-reviews: 3 classes of stars (1, 3, 5), 540 examples" in first
    assert "trained on my reviews.csv without a tenth" in first
    assert "evaluated on that tenth, 60 rows, of each stars, by a hash of the text" in first
    assert "new weights: 2 layers of width 64, and" in output
    assert "--epochs 6 and --lr 0.003, since new weights need" in output


def test_transformers_pipeline_names_the_classes(run):
    path, metrics, _, held = run
    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    answers = classify(held.first, batch_size=60)
    expected = [("1", "3", "5")[label] for label in held.labels]
    right = [answer["label"] == name for answer, name in zip(answers, expected, strict=True)]
    assert np.mean(right) == metrics["accuracy"]


def test_the_export_has_its_columns(run):
    path, *_ = run
    columns = json.loads((path / "export/columns.json").read_text())
    assert columns == {
        "text": ["review"],
        "label": "stars",
        "objective": "classes",
        "separator": "",
        "max_length": 16,
        "precision": "float32",
    }
    settings = json.loads((path / "export/config.json").read_text())
    assert settings["problem_type"] == "single_label_classification"
    assert settings["id2label"] == {"0": "1", "1": "3", "2": "5"}


def test_an_export_is_trained_on_and_evaluated(run, tmp_path):
    path, metrics, _, _ = run
    data = path.parent / "my reviews.csv"
    checkpoint = str(path / "export")
    again = replace(OWN, data=str(data), checkpoint=checkpoint, lr=0.0, epochs=0.1)
    assert glue.main(replace(again, runs=str(tmp_path)))["accuracy"] == metrics["accuracy"]


@pytest.fixture
def plain(monkeypatch):
    """A config for plain PyTorch, where nothing is compiled. Other tests here run on XLA."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    return replace(OWN, device="cpu")


# ---- a finished run on other rows ----------------------------------------------------------------
def evaluated(run: Path, **flags) -> tuple[dict[str, float], dict]:
    """Evaluates a run: its metrics, and the file that has them."""
    metrics = glue.main(glue.Config(evaluate=str(run), **flags))
    newest = max((run / "evaluations").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return metrics, json.loads(newest.read_text())


def test_a_run_on_its_own_file_has_its_metrics_again(run):
    path, metrics, _, held = run
    found, file = evaluated(path)
    assert found == metrics
    assert file["examples"] == len(held)
    assert file["source"].startswith("that tenth, 60 rows, of each stars")


def test_another_file_is_evaluated_by_the_runs_classes(run, tmp_path):
    """The file has two of the three classes; transformers' pipeline is as often right."""
    path, *_ = run
    rows = [row for row in reviews(90, seed=1) if row["stars"] != "3"]
    for row in rows[::4]:
        row["stars"] = "3"  # wrong
    for row in rows[1::4]:
        row["stars"] = "5"
    other = write_csv(tmp_path / "other.csv", rows)

    found, file = evaluated(path, data=str(other))

    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    answers = classify([row["review"] for row in rows], batch_size=60)
    right = [answer["label"] == row["stars"] for answer, row in zip(answers, rows, strict=True)]
    assert 0.2 < np.mean(right) < 0.9
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert file["examples"] == 60
    assert file["split"] == "usual"


@pytest.mark.parametrize(
    ("stars", "flags", "message"),
    [
        ("4", {}, "line 2 has the class '4', which the training split does not.*1, 3, 5"),
        ("5", {"split": "test"}, "is one file, without a test split; leave --split test out"),
        ("5", {"split": "held"}, "--split is held; expected train, valid or test"),
    ],
)
def test_rows_that_a_run_cannot_be_evaluated_on(stars, flags, message, run, tmp_path):
    path, *_ = run
    other = write_csv(tmp_path / "other.csv", [{"review": "superb", "stars": stars}])
    with pytest.raises(InputError, match=message):
        evaluated(path, data=str(other), **flags)


def opened_for(data: Path, split: str = "", is_own: bool = False) -> dict[str, set[str]]:
    """Returns the texts that are evaluated, by the name of their split."""
    opened = own_text.open_evaluation(str(data), STARS, ("1", "3", "5"), split, is_own)
    assert opened.task.labels == ("1", "3", "5")
    return {name: set(examples.first) for name, examples in opened.eval.items()}


def test_the_splits_of_a_file_are_those_of_a_training(tmp_path):
    path = write_csv(tmp_path / "reviews.csv", reviews(60))
    trained = own_text.open_splits(str(path), STARS)
    train = set(trained.train.first)
    held = set(trained.eval["validation"].first)

    assert opened_for(path) == {"all": train | held}
    assert opened_for(path, is_own=True) == {"valid": held}
    for is_own in (False, True):
        assert opened_for(path, "valid", is_own) == {"valid": held}
        assert opened_for(path, "train", is_own) == {"train": train}


def test_the_splits_of_a_folder_go_by_their_names(tmp_path):
    rows = reviews(9)
    texts = [row["review"] for row in rows]
    for number, name in enumerate(("train", "dev", "test")):
        write_csv(tmp_path / f"{name}.csv", rows[3 * number : 3 * number + 3])

    assert opened_for(tmp_path) == {"valid": set(texts[3:6])}
    assert opened_for(tmp_path, "train") == {"train": set(texts[:3])}
    assert opened_for(tmp_path, "test") == {"test": set(texts[6:])}

    (tmp_path / "train.csv").unlink()
    (tmp_path / "dev.csv").unlink()
    assert opened_for(tmp_path, "test") == {"test": set(texts[6:])}
    with pytest.raises(InputError, match="no valid split, only test; give --split test"):
        opened_for(tmp_path)


def test_the_splits_of_a_data_set_go_by_their_names(tmp_path, cache):
    rows = reviews(9)
    saved = {}
    for number, name in enumerate(("train", "validation", "test")):
        saved[name] = datasets.Dataset.from_list(rows[3 * number : 3 * number + 3])
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "saved"))

    found = opened_for(tmp_path / "saved", "test")

    assert found == {"test": {row["review"] for row in rows[6:]}}
    assert opened_for(tmp_path / "saved") == {"valid": {row["review"] for row in rows[3:6]}}


class Crash(Exception):
    pass


def test_a_resume_is_exact(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "r.csv", reviews(200))
    config = replace(OWN, data=str(path), runs=str(tmp_path), epochs=2, log_every=1, save_every=3)
    whole = glue.main(replace(config, name="whole"))
    train_log = Run.log

    def log_and_crash(self, step, **values):
        train_log(self, step, **values)
        if step == 8:
            self.checkpoints.wait()
            raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Run, "log", log_and_crash)
        glue.main(replace(config, name="cut"))
    # The vocabulary, the held-out rows and the classes are found again.
    cut = glue.main(replace(config, name="cut"))

    assert cut == whole
    assert len(losses(tmp_path / "whole")) == 12
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert equal(exported(tmp_path / "cut"), exported(tmp_path / "whole"))


def pairs(number: int) -> list[dict[str, str]]:
    """Returns rows of pairs; both have such a word, and that of the second says the answer."""
    rows = []
    for index, sentence in enumerate(sentences(number)):
        first = ("dreadful", "superb")[index % 2]
        second = ("dreadful", "superb")[index // 2 % 2]
        answer = "yes" if second == "superb" else "no"
        row = {"first": f"{first} {sentence}", "second": f"{second} {sentence}", "answer": answer}
        rows.append(row)
    return rows


def test_pairs_are_learnt(plain, tmp_path):
    rows = pairs(800)
    write_csv(tmp_path / "data/train.csv", rows[:720])
    write_csv(tmp_path / "data/dev.csv", rows[720:])
    config = replace(
        plain,
        data=str(tmp_path / "data"),
        text=("first", "second"),
        label="answer",
        lengths=(32,),
        epochs=5,
        runs=str(tmp_path),
        name="pairs",
    )

    metrics = glue.main(config)

    assert metrics["accuracy"] > 0.9
    classify = transformers.pipeline("text-classification", model=f"{tmp_path}/pairs/export")
    inputs = [{"text": row["first"], "text_pair": row["second"]} for row in rows[720:]]
    found = [answer["label"] for answer in classify(inputs)]
    right = [name == row["answer"] for name, row in zip(found, rows[720:], strict=True)]
    assert np.mean(right) == pytest.approx(metrics["accuracy"])


TAGS = {"angry": "dreadful", "calm": "decent", "happy": "superb"}


def tagged(number: int) -> list[dict[str, str]]:
    """Returns rows with any number of tags; a word says each."""
    rng = np.random.default_rng(5)
    rows = []
    for sentence in sentences(number):
        tags = [tag for tag in TAGS if rng.random() < 0.4]
        words = [TAGS[tag] for tag in tags]
        rows.append({"review": " ".join([*words, sentence]), "tags": "| ".join(tags)})
    return rows


@pytest.mark.parametrize("on", ["plain", pytest.param("xla", marks=pytest.mark.slow)])
def test_several_labels_are_learnt(on, request, tmp_path):
    base = request.getfixturevalue("plain") if on == "plain" else OWN
    path = write_csv(tmp_path / "tags.csv", tagged(600))
    config = replace(
        base,
        data=str(path),
        label="tags",
        objective="multilabel",
        separator="|",
        runs=str(tmp_path),
        name="tags",
    )

    metrics = glue.main(config)

    assert set(metrics) == {"f1_micro", "f1_macro", "average_precision", "loss"}
    assert metrics["f1_micro"] > 0.95
    export = f"{tmp_path}/tags/export"
    classify = transformers.pipeline("text-classification", model=export, top_k=None)
    columns = Columns(("review",), "tags", "multilabel", "|")
    held = own_text.open_splits(str(path), columns).eval["validation"]
    scores = np.zeros(held.labels.shape)
    for row, answers in enumerate(classify(held.first)):
        for answer in answers:
            scores[row, tuple(TAGS).index(answer["label"])] = answer["score"]
    f1 = reference.f1_score(held.labels, scores > 0.5, average="micro")
    assert metrics["f1_micro"] == pytest.approx(f1)
    loss = reference.log_loss(held.labels.reshape(-1), scores.reshape(-1))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_a_number_is_learnt(plain, tmp_path):
    rows = reviews(600)
    path = write_csv(tmp_path / "numbers.csv", rows)
    config = replace(
        plain,
        data=str(path),
        objective="regression",
        epochs=10,
        runs=str(tmp_path),
        name="numbers",
    )

    metrics = glue.main(config)

    assert set(metrics) == {"pearson", "spearman", "mse", "loss"}
    assert metrics["pearson"] > 0.9
    assert metrics["loss"] == pytest.approx(metrics["mse"], rel=1e-5)
    classify = transformers.pipeline("text-classification", model=f"{tmp_path}/numbers/export")
    columns = Columns(("review",), "stars", "regression")
    held = own_text.open_splits(str(path), columns).eval["validation"]
    answers = classify(held.first)
    assert {answer["label"] for answer in answers} == {"stars"}
    errors = np.array([answer["score"] for answer in answers]) - held.labels
    assert metrics["mse"] == pytest.approx(np.mean(errors**2), rel=1e-3)


@pytest.mark.parametrize(("factor", "is_said"), [(1, False), (1e6, True)])
def test_numbers_far_from_0_are_said(plain, tmp_path, factor, is_said):
    rows = []
    for row in reviews(60):
        rows.append({**row, "stars": float(row["stars"]) * factor})
    path = write_csv(tmp_path / "numbers.csv", rows)
    config = glue.validate(replace(plain, data=str(path), objective="regression"))

    message = glue.open_data(config).head_message

    assert ("learns slowly what is far from it" in message) == is_said
    assert ("go from 1e+06 to 5e+06" in message) == is_said


def test_losses_of_several_labels_are_a_mean_of_them():
    logits = torch.tensor([[0.5, -2.0, 3.0], [0.0, 1.0, -1.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    found = classification.compute_losses(logits, labels)
    probabilities = special.expit(logits.numpy())
    expected = []
    for row, share in zip(labels.numpy(), probabilities, strict=True):
        expected.append(reference.log_loss(row, share))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_head_for_classes_is_no_head_for_labels(run):
    path, *_ = run
    data = glue.validate(
        replace(OWN, data="x.csv", checkpoint=str(path / "export"), objective="multilabel")
    )
    encoder = glue._open_encoder(data, None)
    found = classification.classifier(
        encoder.settings, ("1", "3", "5"), encoder.source, (), "multilabel"
    )
    assert "a head for single_label_classification" in found.head.why_new
    assert tuple(classification.PROBLEM_TYPES) == targets.OBJECTIVES


@pytest.mark.parametrize("column", ["review", "stars"])
def test_half_of_a_character_is_named_with_its_line(tmp_path, column):
    """As JSON of a text that was cut in the middle of an emoji."""
    rows = reviews(6)
    rows[3][column] = "good \ud83d"
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "reviews.jsonl"
    path.write_text("\n".join(lines))

    with pytest.raises(InputError, match=rf"line 4 has a {column} with '.ud83d', which is half"):
        own_text.open_splits(str(path), STARS)
