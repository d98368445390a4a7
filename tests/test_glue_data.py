"""data/glue.py on small files that the tests write.

Plain loops and transformers' own padding are the reference.
"""

import copy
import dataclasses
import pickle
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from data import glue, sentences
from data.glue import TASKS, Encoded, Examples, read, score
from data.splits import said
from data.vocabulary import learn
from errors import InputError


@dataclasses.dataclass(frozen=True)
class OfficialFile:
    """A file as GLUE has it, with two examples."""

    folder: str
    text: str
    columns: list[list[str]]  # the first sentences and, of a task of pairs, the second ones


def write(path: Path, text: str | bytes) -> Path:
    """Writes a file and the folders above it; returns its path."""
    if isinstance(text, str):
        text = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def tsv(*rows: str) -> str:
    """Returns a line for each row, its words separated by tabs."""
    return "".join(row.replace(" ", "\t") + "\n" for row in rows)


PAIR_HEADER = tsv("index sentence1 sentence2 label")
SCORE_HEADER = tsv("sentence1 sentence2 score")
STSB_HEADER = tsv(
    "index genre filename year old_index source1 source2 sentence1 sentence2 score",
)
QQP_HEADER = tsv("id qid1 qid2 question1 question2 is_duplicate")
MNLI_HEADER = tsv(
    "index promptID pairID genre sentence1_binary_parse sentence1_parse sentence1 sentence2"
    " label1 gold_label",
)

TWO_PAIRS = [["A", "C"], ["B", "D"]]  # A with B, C with D
FILES = {
    "cola": OfficialFile(
        "CoLA",
        'gj04\t1\t\tHe came.\ngj04\t0\t*\tCame he today "\n',
        [["He came.", 'Came he today "']],
    ),
    "sst2": OfficialFile(
        "SST-2",
        "sentence\tlabel\na fine film \t0\nwell-conceived\t1\n",
        [["a fine film ", "well-conceived"]],
    ),
    "mrpc": OfficialFile(
        "MRPC",
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
        '0\t1\t2\t"The pie business.\tHe said "fair".\r\n'
        "1\t3\t4\tA\u2028b\x85c\tB\r\n",
        [['"The pie business.', "A\u2028b\x85c"], ['He said "fair".', "B"]],
    ),
    "stsb": OfficialFile(
        "STS-B",
        STSB_HEADER + tsv("0 g f 2012 1 none none A B 0.000", "1 g f 2012 4 none none C D 3.800"),
        TWO_PAIRS,
    ),
    "qqp": OfficialFile("QQP", QQP_HEADER + tsv("1 2 3 A B 0", "4 5 6 C D 1"), TWO_PAIRS),
    "mnli": OfficialFile(
        "MNLI",
        MNLI_HEADER + tsv("0 1 1n g ( ( A B neutral entailment", "1 2 2e g ( ( C D x neutral"),
        TWO_PAIRS,
    ),
    "qnli": OfficialFile(
        "QNLI",
        tsv("index question sentence label", "0 A B entailment", "1 C D not_entailment"),
        TWO_PAIRS,
    ),
    "rte": OfficialFile(
        "RTE",
        PAIR_HEADER + tsv("0 A B entailment", "1 C D not_entailment"),
        TWO_PAIRS,
    ),
    "wnli": OfficialFile("WNLI", PAIR_HEADER + tsv("0 A B 0", "1 C D 1") + "\n", TWO_PAIRS),
}


def refused(message: str, data, task="sst2", split="train"):
    """Asserts that reading ends in an InputError whose text `message` finds."""
    with pytest.raises(InputError, match=message):
        read(data, task, split)


def read_both(data, task: str) -> tuple[Examples, Examples]:
    """Returns the training and the validation examples of a task with one validation split."""
    return read(data, task, "train"), read(data, task, "validation")


def test_at_a_url_other_tasks_are_left_out(tmp_path, monkeypatch):
    cache_folder = tmp_path / "cache"
    monkeypatch.setenv("DATA_CACHE_DIR", str(cache_folder))
    bucket = fsspec.filesystem("memory")
    for file in FILES.values():
        write(tmp_path / file.folder / "train.tsv", file.text)
        bucket.pipe_file(f"/{tmp_path.name}/{file.folder}/train.tsv", file.text.encode())
    root = f"memory://{tmp_path.name}/"

    for task in ("sst2", "stsb"):
        expected = read(tmp_path, task, "train").first
        assert read(root, task, "train").first == expected
        assert read(root + FILES[task].folder, task, "train").first == expected

    assert list(cache_folder.rglob("SST-2"))
    assert not list(cache_folder.rglob("QQP"))
    refused("STS-B is the folder of stsb, and the task is rte", root + "STS-B", "rte")


def test_rte_and_wnli_order_their_labels_differently():
    assert TASKS["rte"].labels == ("entailment", "not_entailment")
    assert TASKS["wnli"].labels == ("not_entailment", "entailment")


FILE_NAMES = {
    "train": "train.tsv",
    "validation": "dev.tsv",
    "validation_matched": "dev_matched.tsv",
    "validation_mismatched": "dev_mismatched.tsv",
}


@pytest.mark.parametrize("task", TASKS)
def test_official_files_are_read_as_they_stand(tmp_path, task):
    file = FILES[task]
    expected_labels = {"stsb": [0, np.float32(3.8)], "cola": [1, 0]}.get(task, [0, 1])
    expected_dtype = np.float32 if task == "stsb" else np.int64

    for split in ("train", *TASKS[task].evaluation):
        write(tmp_path / file.folder / FILE_NAMES[split], file.text)
        for data in (str(tmp_path), tmp_path / file.folder):
            examples = read(data, task, split)

            columns = [examples.first]
            if examples.second:
                columns.append(examples.second)
            assert columns == file.columns
            assert examples.labels.tolist() == expected_labels
            assert examples.labels.dtype == expected_dtype
            assert len(examples) == 2
            assert examples.skipped == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_may_have_the_tasks_own_name(tmp_path, task):
    write(tmp_path / task / "train.tsv", FILES[task].text)

    assert len(read(tmp_path, task, "train")) == 2


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        (
            "cola",
            "gj04\t1\t\tFine.\ngj04\t1\tFine.\n",
            r"train\.tsv line 2 has 3 fields, .*expected 4: .*without",
        ),
        (
            "cola",
            "a\tlabel\tc\tsentence\n",
            "line 1 has the label 'label'; expected one of 0 .unacceptable., 1",
        ),
        (
            "sst2",
            "sentence\nx\n",
            r"train\.tsv line 1 has the columns sentence; expected label among them",
        ),
        ("sst2", "", "line 1 has the columns nothing; expected sentence, label"),
        ("sst2", "sentence\tlabel\n", r"train\.tsv has no examples"),
        (
            "sst2",
            "sentence\tlabel\nfine\t1\nfine\t2\n",
            "line 3 has the label '2'; expected one of 0 .negative., 1",
        ),
        (
            "sst2",
            "sentence\tlabel\nfine\t1\n\nfine\t1\n",
            "line 3 has 1 fields, separated by tabs; expected 2",
        ),
        (
            "sst2",
            "sentence,label\nfine,1\n",
            r"train\.tsv line 1 has no tab, but commas: .*separated by tabs",
        ),
        (
            "rte",
            'index;sentence1;sentence2;label\n0;"a";"b";x\n',
            "line 1 has no tab, but semicolons: .* by tabs",
        ),
        (
            "cola",
            "gj04,1,,He came.\n",
            "line 1 has no tab, but commas: 'gj04,1,,He came.'; .*separated by tabs",
        ),
        (
            "sst2",
            "sentence label\nfine 1\n",
            "line 1 has the columns sentence label; .*separated by tabs",
        ),
        (
            "sst2",
            b"sentence\tlabel\nStra\xdfe\t1\n",
            r"train\.tsv is not UTF-8 \(byte 19\)",
        ),
        (
            "rte",
            PAIR_HEADER + '0\t"A\tb"\tB\tentailment\n',
            'line 2 has 5 fields.*begins with ".*QUOTE_NONE',
        ),
        (
            "rte",
            PAIR_HEADER + "0\tA\t \tentailment\n",
            "line 2 has an empty sentence2; expected a sentence",
        ),
        ("qqp", FILES["qqp"].text + "7\t8\t9\tA\n", "line 4 has 4 fields"),
        (
            "stsb",
            SCORE_HEADER + "A\tB\t5.2\n",
            "line 2 has the score '5.2'; expected a number from 0 to",
        ),
        ("stsb", SCORE_HEADER + "A\tB\tnan\n", "line 2 has the score 'nan'"),
        ("stsb", SCORE_HEADER + "A\tB\tfive\n", "line 2 has the score 'five'"),
    ],
)
def test_a_damaged_file_is_explained_with_its_line(tmp_path, task, text, message):
    write(tmp_path / "train.tsv", text)
    refused(message, tmp_path, task)


def test_qqps_few_broken_rows_are_left_out_with_a_warning(tmp_path):
    rows = [f"{number}\t1\t2\tWho is {number}?\tWhat?\t1" for number in range(4000)]
    rows[1000] = '1000\t1\t2\t"A line\nbreak?"\tWhat?\t1'
    rows[2000] = "2000\t1\t2\tA question?\t\t0"
    write(tmp_path / "train.tsv", QQP_HEADER + "\n".join(rows))
    warning = r"3 broken rows are left out, the first: .* line 1002 has 4 fields"

    with pytest.warns(UserWarning, match=warning):
        examples = read(tmp_path, "qqp", "train")

    assert len(examples) == 3998
    assert len(examples.second) == 3998
    assert len(examples.labels) == 3998
    assert examples.skipped == 3
    assert examples.first[999:1001] == ["Who is 999?", "Who is 1001?"]


def test_an_unknown_task_or_split_is_explained(tmp_path):
    refused(
        "task is 'sst'; expected one of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli",
        tmp_path,
        task="sst",
    )
    refused(
        "split is 'test'; expected one of train, validation for sst2; .*GLUE's test",
        tmp_path,
        split="test",
    )
    refused(
        "expected one of train, validation_matched, validation_mismatched",
        tmp_path,
        task="mnli",
        split="validation",
    )


def test_a_missing_file_or_folder_is_explained(tmp_path):
    refused(
        r"has no train\.tsv .* found nothing; expected GLUE's SST-2/train\.tsv",
        tmp_path,
    )
    refused("there is no folder .*nowhere", tmp_path / "nowhere")

    path = write(tmp_path / "SST-2/dev.tsv", FILES["sst2"].text)
    refused(r"SST-2 has no train\.tsv .* found dev\.tsv", tmp_path)
    refused(r"dev\.tsv is a file", path)


def test_the_folder_of_another_task_is_refused(tmp_path):
    write(tmp_path / "RTE/train.tsv", FILES["rte"].text)
    refused("RTE is the folder of rte, and the task is wnli", tmp_path / "RTE", "wnli")

    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / f"MNLI/{name}.tsv", FILES["mnli"].text)
    refused(
        "MNLI is the folder of mnli, and the task is rte; give one of both",
        tmp_path / "MNLI",
        "rte",
        "validation",
    )


@pytest.mark.parametrize("name", ["dev", "validation", "Val", "valid_set", "sst2-dev"])
def test_a_split_goes_by_any_of_its_usual_names(tmp_path, name):
    folder = tmp_path / "SST-2"
    write(folder / "Training.tsv", FILES["sst2"].text)
    write(folder / f"{name}.tsv", FILES["sst2"].text)
    write(folder / "test.tsv", "index\tsentence\n0\thidden\n")

    train, valid = read_both(tmp_path, "sst2")

    used = f"trained on SST-2/Training.tsv, evaluated on SST-2/{name}.tsv"
    assert said(train, valid) == f" ({used}; left out: test.tsv)"

    write(folder / "train.tsv", FILES["sst2"].text)
    refused("SST-2 has Training, train, which all say the train split; keep one", tmp_path)


def test_mnlis_two_splits_go_by_all_of_their_names(tmp_path):
    first_labels = {
        "dev_matched": "neutral",
        "dev-mismatched": "contradiction",
        "train": "entailment",
    }
    for name, label in first_labels.items():
        text = FILES["mnli"].text.replace("entailment", label)
        write(tmp_path / f"MNLI/{name}.tsv", text)

    assert read(tmp_path, "mnli", "train").labels[0] == 0
    assert read(tmp_path, "mnli", "validation_matched").labels[0] == 1
    assert read(tmp_path, "mnli", "validation_mismatched").labels[0] == 2


def table(task: str, names=None, labels=(0, 1, 0), **columns) -> datasets.Dataset:
    """Returns rows as the hub has them: sentences "sentence1 0", "sentence1 1", …

    Args:
        names: of the classes; those of the task by default.
        columns: values that take the place of the sentences.
    """
    chosen = TASKS[task]
    count = len(labels)
    values = {}
    for column in chosen.columns:
        values[column] = [f"{column} {number}" for number in range(count)]
    values["label"] = list(labels)
    values["idx"] = list(range(count))
    values.update(columns)

    rows = datasets.Dataset.from_dict(values)
    if chosen.labels:
        classes = datasets.ClassLabel(names=list(names or chosen.labels))
        rows = rows.cast_column("label", classes)
    return rows


def save_train(rows: datasets.Dataset, folder: Path) -> None:
    """Saves rows as the training split of a data set on disk."""
    datasets.DatasetDict({"train": rows}).save_to_disk(folder)


def write_parquet(rows: datasets.Dataset, path: Path) -> None:
    """Writes rows to a parquet file, and makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(path)


@pytest.mark.parametrize(
    "form",
    [
        "{}.parquet",
        "{}-00000-of-00001.parquet",
        "data/{}-00000-of-00001.parquet",
        "{}/0.parquet",
    ],
)
def test_parquet_files_of_any_of_the_names_are_read(tmp_path, cache, form):
    for name, labels in (("training", (0, 1, 0)), ("dev", (0, 1)), ("test", (0,))):
        write_parquet(table("sst2", labels=labels), tmp_path / "sst2" / form.format(name))

    train, valid = read_both(tmp_path, "sst2")

    assert len(train) == 3
    assert len(valid) == 2
    used = f"trained on {form.format('training')}, evaluated on {form.format('dev')}"
    assert said(train, valid) == f" ({used}; left out: {form.format('test')})"


@pytest.mark.parametrize("form", ["parquet", "parquet in folders", "disk"])
@pytest.mark.parametrize("folder", ["sst2", "SST-2"])
def test_tables_of_another_task_with_equal_columns_are_refused(tmp_path, cache, form, folder):
    # With names, the labels alone would show that the table is not CoLA's.
    rows = table("sst2").cast_column("label", datasets.Value("int64"))
    data = tmp_path / folder
    if form == "disk":
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(data)
    elif form == "parquet":
        for split in ("train", "validation"):
            write_parquet(rows, data / f"{split}.parquet")
    else:
        for split in ("train", "validation"):
            write_parquet(rows, data / split / "0.parquet")
    message = f"{folder} is the folder of sst2, and the task is cola; give one of both"

    for split in ("train", "validation"):
        assert len(read(data, "sst2", split)) == 3
        refused(message, data, "cola", split)


@pytest.mark.parametrize("score", ["nan", "inf", "-inf", "NaN"])
def test_a_score_that_is_not_finite_is_named_with_its_line(tmp_path, score):
    write(tmp_path / "STS-B/train.tsv", SCORE_HEADER + tsv("A B 1.0", f"C D {score}"))
    refused(
        f"train.tsv line 3 has the score '{score}'; expected a number from 0 to 5",
        tmp_path,
        "stsb",
    )


@pytest.mark.parametrize("layout", ["parquet", "disk, task", "arrow"])
@pytest.mark.parametrize("task", ["sst2", "mnli", "stsb"])
def test_a_local_folder_of_datasets_is_read(tmp_path, cache, layout, task):
    # The splits have different labels, so that one cannot be taken for another.
    labels = (0.5, 5.0, 2.25) if task == "stsb" else (0, 1, 0)
    splits = {"train": labels}
    for number, split in enumerate(TASKS[task].evaluation):
        splits[split] = labels[::-1][number:]
    tables = datasets.DatasetDict()
    for split, values in splits.items():
        tables[split] = table(task, labels=values)

    data = tmp_path / "data"
    folder = data / task if layout == "disk, task" else data
    if layout == "parquet":
        for split, rows in tables.items():
            write_parquet(rows, folder / f"{split}-00000-of-00001.parquet")
    else:
        tables.save_to_disk(folder)
    if layout == "arrow":
        (folder / "dataset_dict.json").unlink()

    for split, values in splits.items():
        examples = read(data, task, split)

        column = TASKS[task].columns[0]
        assert examples.labels.tolist() == list(values)
        assert examples.first == [f"{column} {number}" for number in range(len(values))]
        assert (examples.second is None) == (task == "sst2")


def with_label_3() -> datasets.Dataset:
    """Returns a table whose labels are numbers without names, all of them 3."""
    rows = table("rte").cast_column("label", datasets.Value("int64"))
    return rows.map(lambda _: {"label": 3})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda: table("rte", labels=(0, -1)),
            "train, row 1 has the label -1, which stands for a hidden one",
        ),
        (
            lambda: table("rte", ("yes", "no")),
            "has the labels yes, no; expected entailment, not_entailment",
        ),
        (
            lambda: table("rte").remove_columns("label"),
            "has the columns sentence1, sentence2, idx; expected label for",
        ),
        (
            lambda: table("rte").remove_columns("sentence2"),
            "expected sentence2 for rte",
        ),
        (
            lambda: table("rte", sentence1=["a", "", "b"]),
            "row 1 has '' as its sentence1; expected a sentence",
        ),
        (
            lambda: table("rte", sentence2=["a", "b", None]),
            "row 2 has None as its sentence2",
        ),
        (with_label_3, "label '3'"),
        (lambda: table("rte").filter(lambda _: False), "has no examples"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_explained(tmp_path, cache, rows, message):
    save_train(rows(), tmp_path / "rte")
    refused(message, tmp_path, "rte")


def test_labels_of_tables_go_by_their_names_in_any_case(tmp_path, cache):
    save_train(table("rte", ("not_entailment", "entailment")), tmp_path / "rte")
    assert read(tmp_path, "rte", "train").labels.tolist() == [1, 0, 1]

    any_case = tmp_path / "any case"
    save_train(table("rte", ("Not_Entailment", "ENTAILMENT ")), any_case / "rte")
    assert read(any_case, "rte", "train").labels.tolist() == [1, 0, 1]


def test_labels_of_tsv_files_go_by_their_names_in_any_case(tmp_path):
    rows = tsv("0 A B Not_Entailment", "1 C D ENTAILMENT")
    write(tmp_path / "RTE/train.tsv", PAIR_HEADER + rows)

    assert read(tmp_path, "rte", "train").labels.tolist() == [1, 0]


def test_folders_of_datasets_that_do_not_fit_are_explained(tmp_path, cache):
    table("rte").save_to_disk(tmp_path / "one")
    refused("is a single split written by save_to_disk", tmp_path / "one", "rte")

    rows = table("rte", ("not_entailment", "entailment"))
    folder = tmp_path / "rte"
    save_train(rows, folder)
    message = "has the splits train; expected validation for rte"
    refused(message, folder, "rte", "validation")

    write(tmp_path / "three/train.parquet", b"PAR1, but no more")
    refused("three cannot be read by datasets", tmp_path / "three", "rte")


def test_a_hub_id_is_given_to_datasets_with_the_task(monkeypatch):
    def load(data, config, split):
        if data == "some/where":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/where' doesn't exist")
        assert (data, config, split) == ("nyu-mll/glue", "mnli", "validation_matched")
        return table("mnli", labels=(2, 1))

    monkeypatch.setattr(datasets, "load_dataset", load)

    examples = read("nyu-mll/glue", "mnli", "validation_matched")
    assert examples.labels.tolist() == [2, 1]
    refused(
        "some/where is neither a folder nor a data set of the hub .*doesn't exist",
        "some/where",
        "rte",
    )


def words_of(sentence: str) -> list[str]:
    """Returns the words of a synthetic sentence without punctuation."""
    return sentence.replace(",", "").removesuffix(".").split()


def numbers_of(words: list[str]) -> list[int]:
    """Returns the values of the number words among `words`."""
    return [glue._NUMBERS.index(word) for word in words if word in glue._NUMBERS]


SYNTHETIC_TASKS = ["sst2", "mrpc", "qqp", "mnli", "stsb", "wnli"]


@pytest.mark.parametrize("task", SYNTHETIC_TASKS)
def test_synthetic_labels_follow_their_rule(task):
    kind = TASKS[task]
    for split in ("train", *kind.evaluation):
        examples = read("synthetic", task, split)
        first_sides = examples.first
        second_sides = examples.second or examples.first

        cases = zip(examples.labels.tolist(), first_sides, second_sides, strict=True)
        for label, first_sentence, second_sentence in cases:
            name = kind.labels[label] if kind.labels else ""
            first = numbers_of(words_of(first_sentence))
            second = numbers_of(words_of(second_sentence))
            assert len(first) == 1
            assert len(second) == (name != "neutral")

            if not examples.second:
                assert (first[0] >= 5) == (label == 1)
            elif not name:
                assert label == pytest.approx(2.5 + 2.5 * (first[0] - second[0]) / 9)
            elif name != "neutral":
                assert abs(first[0] - second[0]) >= 2
                is_larger = name in ("entailment", "equivalent", "duplicate")
                assert (first > second) == is_larger


@pytest.mark.parametrize("task", SYNTHETIC_TASKS)
def test_synthetic_examples_have_their_sizes_and_words(task):
    kind = TASKS[task]
    for split in ("train", *kind.evaluation):
        examples = read("synthetic", task, split)

        count = 2048 if split == "train" else 512
        assert len(examples) == count
        assert len(examples.labels) == count
        if kind.labels:
            per_class = np.bincount(examples.labels)
            assert len(per_class) == len(kind.labels)
            assert np.ptp(per_class) <= 1

        sides = [examples.first]
        if examples.second:
            sides.append(examples.second)
        assert len(sides) == len(kind.columns)
        vocabulary = set()
        for side in sides:
            for sentence in side:
                vocabulary.update(words_of(sentence))
        assert vocabulary == {*glue._FILLERS, *glue._NUMBERS}

        lengths = [len(sentence.split()) for sentence in examples.first]
        assert min(lengths) == 4
        assert max(lengths) == 25
        assert 7 < np.mean(lengths) < 13


@pytest.mark.parametrize("task", SYNTHETIC_TASKS)
def test_synthetic_splits_and_seeds_differ_and_repeat(task):
    train = read("synthetic", task, "train").first
    last_split = TASKS[task].evaluation[-1]
    evaluated = read("synthetic", task, last_split).first
    again = read("synthetic", task, last_split, seed=0).first
    other = read("synthetic", task, last_split, seed=1).first

    assert again == evaluated
    assert other != evaluated
    assert not set(train) & set(again)


def test_a_bag_of_words_does_not_solve_a_task_of_pairs():
    train, valid = read_both("synthetic", "mrpc")
    texts = {}
    for name, examples in (("train", train), ("valid", valid)):
        pairs = zip(examples.first, examples.second, strict=True)
        texts[name] = [f"{first} {second}" for first, second in pairs]

    words = CountVectorizer()
    counts = words.fit_transform(texts["train"])
    model = LogisticRegression(max_iter=1000).fit(counts, train.labels)

    accuracy = model.score(words.transform(texts["valid"]), valid.labels)
    assert abs(accuracy - 0.5) < 0.15


@pytest.fixture(scope="module", params=["bert", "distilbert", "roberta", "xlnet"])
def tokenizer(request):
    """A tokenizer whose vocabulary has all words of the synthetic sentences."""
    return learn(read("synthetic", "mrpc", "train").first, request.param, 400)


def random_sentences(rng: np.random.Generator) -> list[str]:
    """Returns 250 sentences of 1 to 29 words."""
    sizes = rng.integers(1, 30, 250)
    return [" ".join(rng.choice(glue._FILLERS, size)) for size in sizes]


def random_examples(pairs: bool) -> Examples:
    """Returns 250 examples; with `pairs` they have second sentences."""
    rng = np.random.default_rng(0)
    first = random_sentences(rng)
    second = random_sentences(rng)
    return Examples(first, second if pairs else None, rng.integers(0, 2, 250))


@pytest.mark.parametrize("pairs", [False, True])
def test_encoded_lengths_are_the_tokenizers_cut_to_the_limit(tokenizer, pairs, monkeypatch):
    monkeypatch.setattr(sentences, "CHUNK", 100)
    examples = random_examples(pairs)

    encoded = Encoded(examples, tokenizer, 32)

    whole_ids = tokenizer(examples.first, examples.second)["input_ids"]
    whole = np.array([len(ids) for ids in whole_ids])
    assert len(encoded) == 250
    assert encoded.lengths.dtype == np.int32
    assert encoded.lengths.tolist() == np.minimum(whole, 32).tolist()
    assert encoded.tokens == np.minimum(whole, 32).sum()
    assert encoded.truncated == (whole > 32).sum()
    assert (encoded.truncated > 10) == pairs


@pytest.mark.parametrize("pairs", [False, True])
def test_examples_travel_without_the_tokenizer(tokenizer, pairs, monkeypatch):
    monkeypatch.setattr(sentences, "CHUNK", 100)
    encoded = Encoded(random_examples(pairs), tokenizer, 32)

    size = len(pickle.dumps(encoded))

    assert size < encoded.tokens * 5 + 250 * 20 + 1000, "more than the arrays travels"


@pytest.mark.parametrize("pairs", [False, True])
def test_batches_are_what_transformers_pads(tokenizer, pairs, monkeypatch):
    monkeypatch.setattr(sentences, "CHUNK", 100)
    examples = random_examples(pairs)
    encoded = Encoded(examples, tokenizer, 32)
    travelled = pickle.loads(pickle.dumps(encoded))
    indices = np.array([0, 99, 100, 249, 7, 7])
    pads_left = tokenizer.padding_side == "left"

    # XLNet's token types are 3 in padding; transformers 5 leaves them out, and would pad with 0.
    type_padding = 3 if pads_left else 0
    chosen = [[examples.first[index] for index in indices]]
    if pairs:
        chosen.append([examples.second[index] for index in indices])
    short = tokenizer(
        *chosen,
        max_length=32,
        truncation="longest_first",
        return_token_type_ids=True if pads_left else None,
    )
    expected = tokenizer.pad(short, padding="max_length", max_length=40, return_tensors="np")
    types = expected.setdefault("token_type_ids", np.zeros((6, 40), int))
    types[expected["attention_mask"] == 0] = type_padding
    expected["labels"] = examples.labels[indices]
    paddings = {
        "input_ids": tokenizer.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": type_padding,
        "labels": 0,
    }

    with_empty_row = np.insert(indices, 2, -1)
    batch = travelled.batch(with_empty_row, (40,))

    assert batch.keys() == paddings.keys()
    # A row without an example attends to one position, where another row has a token: a mean over
    # none is not finite.
    attended = batch["attention_mask"][2]
    assert attended.sum() == 1
    assert attended[-1 if pads_left else 0] == 1
    batch["attention_mask"][2] = 0
    for name, padding in paddings.items():
        rows = np.insert(expected[name], 2, padding, axis=0)
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], rows, err_msg=name)


ONE_PAIR = Examples(["the dog then"], ["tree"], np.array([1]))


def test_a_length_that_does_not_fit_is_explained(tokenizer):
    special = tokenizer.num_special_tokens_to_add(pair=True)

    message = f"max_length is {special + 1}; expected {special + 2} .* to 512"
    with pytest.raises(InputError, match=message):
        Encoded(ONE_PAIR, tokenizer, special + 1)
    with pytest.raises(InputError, match="max_length is 513"):
        Encoded(ONE_PAIR, tokenizer, 513)

    encoded = Encoded(ONE_PAIR, tokenizer, special + 2)
    assert encoded.truncated == 1
    assert encoded.lengths.tolist() == [special + 2]
    message = f"example 0 has {special + 2} tokens, and the shape has {special + 1} places"
    with pytest.raises(ValueError, match=message):
        encoded.batch(np.array([0]), (special + 1,))


def test_a_tokenizer_that_does_not_fit_is_explained(tokenizer):
    with pytest.raises(InputError, match="object is not a fast tokenizer"):
        Encoded(ONE_PAIR, object(), 16)

    without_padding = copy.deepcopy(tokenizer)
    without_padding.pad_token = None
    with pytest.raises(InputError, match="has no padding token"):
        Encoded(ONE_PAIR, without_padding, 16)


def test_scores_are_those_of_the_definitions():
    # 3 true positives, 1 false, 1 missed, 3 true negatives
    labels = np.array([1, 1, 1, 0, 0, 1, 0, 0])
    found = np.array([1, 0, 1, 0, 1, 1, 0, 0])

    mcc = pytest.approx((3 * 3 - 1) / (4 * 4))
    assert score("cola", found, labels) == {"mcc": mcc, "accuracy": 0.75}
    assert score("mrpc", found, labels) == {"accuracy": 0.75, "f1": pytest.approx(0.75)}
    assert score("qqp", 1 - found, labels) == {"accuracy": 0.25, "f1": pytest.approx(0.25)}
    for task in ("sst2", "mnli", "qnli", "rte", "wnli"):
        assert score(task, found.tolist(), labels) == {"accuracy": 0.75}

    scores = np.array([0, 1, 2, 5], np.float32)
    pearson = np.corrcoef(scores, scores**2)[0, 1]
    expected = {"pearson": pytest.approx(pearson), "spearman": 1.0}
    assert score("stsb", scores**2, scores) == expected


def test_constant_predictions_score_nothing():
    labels = np.array([0, 1, 1, 0])

    assert score("cola", [1, 1, 1, 1], labels) == {"mcc": 0, "accuracy": 0.5}
    assert score("mrpc", [0, 0, 0, 0], labels) == {"accuracy": 0.5, "f1": 0}
    constant = np.full(4, 2.5, np.float32)
    expected = {"pearson": 0, "spearman": 0}
    assert score("stsb", constant, labels.astype(np.float32)) == expected


def test_a_score_of_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        score("stsb", [1, float("nan")], [1, 2])
