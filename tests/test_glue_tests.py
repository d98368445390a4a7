"""Tests data/glue_tests.py and `make predict TASK=`: GLUE's test sets, in the files that the
benchmark's server takes."""

from pathlib import Path

import datasets
import pytest
import safetensors.torch
import torch
import transformers
from predicting import TEXTS, random_texts, write_classifier

from data import glue, glue_tests
from errors import InputError
from train import predict

# The header of each task's own test file, without labels (github.com/nyu-mll/GLUE-baselines,
# download_glue_data.py, and the files that it fetches).
HEADERS = {
    "cola": "index\tsentence",
    "sst2": "index\tsentence",
    "mrpc": "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
    "qqp": "id\tquestion1\tquestion2",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2",
    "qnli": "index\tquestion\tsentence",
    "rte": "index\tsentence1\tsentence2",
    "wnli": "index\tsentence1\tsentence2",
}
PAIR = ("the dog", "a cat")


def write_tsv(path: Path, header: str, pairs: list[tuple[str, str]], first_index: int = 0) -> None:
    """Writes a test file of GLUE: the last columns are the sentences, the first is the index."""
    names = header.split("\t")
    is_pair = "sentence" not in names or "question" in names
    lines = [header]
    for number, pair in enumerate(pairs, first_index):
        sentences = pair if is_pair else pair[:1]
        others = ["x"] * (len(names) - 1 - len(sentences))
        lines.append("\t".join([str(number), *others, *sentences]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """GLUE's folder with the test files of all tasks, two examples each."""
    root = tmp_path / "glue"
    pairs = [PAIR, ('one, "two', "x\u2028y")]
    for task, header in HEADERS.items():
        names = ["test_matched", "test_mismatched"] if task == "mnli" else ["test"]
        for name in names:
            write_tsv(root / glue.TASKS[task].folder / f"{name}.tsv", header, pairs)
    write_tsv(root / "diagnostic/diagnostic.tsv", "index\tsentence1\tsentence2", pairs)
    return root


# By file: the predictions 1 and 0, or the score 7 and 2.5, as the server takes them.
WRITTEN = {
    "CoLA.tsv": ("1", "0"),
    "SST-2.tsv": ("1", "0"),
    "MRPC.tsv": ("1", "0"),
    "STS-B.tsv": ("5.000", "2.500"),
    "QQP.tsv": ("1", "0"),
    "MNLI-m.tsv": ("neutral", "entailment"),
    "MNLI-mm.tsv": ("neutral", "entailment"),
    "AX.tsv": ("neutral", "entailment"),
    "QNLI.tsv": ("not_entailment", "entailment"),
    "RTE.tsv": ("not_entailment", "entailment"),
    "WNLI.tsv": ("1", "0"),
}


def test_the_files_are_those_of_the_benchmarks_authors(folder):
    found = {}
    for task in glue.TASKS:
        for test_set in glue_tests.read(str(folder), task):
            predictions = (7.0, 2.5) if task == "stsb" else (1, 0)
            found[test_set.file] = glue_tests.content(test_set, predictions)

    assert set(found) == set(WRITTEN)
    for name, (first, second) in WRITTEN.items():
        assert found[name] == f"index\tprediction\n0\t{first}\n1\t{second}\n", name


def test_scores_are_clipped_to_those_of_the_task(folder):
    (test_set,) = glue_tests.read(str(folder), "stsb")
    content = glue_tests.content(test_set, (-0.3, 4.99951))
    assert content == "index\tprediction\n0\t0.000\n1\t5.000\n"


@pytest.mark.parametrize("task", glue.TASKS)
def test_sentences_are_taken_as_they_stand(task, folder):
    test_set = glue_tests.read(str(folder), task)[0]

    assert test_set.indices == ["0", "1"]
    assert test_set.first == ["the dog", 'one, "two']
    assert test_set.second == (None if task in ("cola", "sst2") else ["a cat", "x\u2028y"])


@pytest.mark.parametrize("layout", ["parquet", "save_to_disk"])
def test_tables_of_datasets_have_the_same_test_sets(layout, tmp_path, cache):
    rows = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [-1, -1], "idx": [0, 1]}
    table = datasets.Dataset.from_dict(rows)
    splits = {"test_matched": table, "test_mismatched": table.select([1]), "train": table}
    if layout == "save_to_disk":
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "mnli")
        datasets.DatasetDict(test=table).save_to_disk(tmp_path / "ax")
    else:
        (tmp_path / "mnli").mkdir()
        (tmp_path / "ax").mkdir()
        for name, split in splits.items():
            split.to_parquet(tmp_path / f"mnli/{name}-00000-of-00001.parquet")
        table.to_parquet(tmp_path / "ax/test-00000-of-00001.parquet")

    found = {each.file: each for each in glue_tests.read(str(tmp_path), "mnli")}

    assert list(found) == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
    assert found["MNLI-m.tsv"].first == ["a", "b"]
    assert found["MNLI-mm.tsv"].indices == ["1"]
    assert found["AX.tsv"].second == ["c", "d"]


# The task, its test file, and the sentence.
REFUSED = [
    ("rte", "index\tsentence1\tsentence2\n0\ta\n", "line 2 has 2 fields.*expected 3"),
    ("rte", "index\tsentence1\tsentence2\n0\ta\t \n", "line 2 has an empty sentence2"),
    ("rte", "index\tsentence1\n0\ta\n", "line 1 has the columns .*expected sentence2"),
    ("rte", "index\tsentence1\tsentence2\n0\ta\tb\n0\ta\tb\n", "has the index 0 twice"),
    ("rte", "index\tsentence1\tsentence2\n", "has no examples"),
    ("rte", None, "has no RTE/test.tsv and no parquet files"),
]


@pytest.mark.parametrize(("task", "content", "sentence"), REFUSED)
def test_a_file_that_is_not_glues_is_refused(task, content, sentence, tmp_path):
    if content is not None:
        path = tmp_path / glue.TASKS[task].folder / "test.tsv"
        path.parent.mkdir()
        path.write_text(content)
    with pytest.raises(InputError, match=sentence):
        glue_tests.read(str(tmp_path), task)


def test_an_empty_question_of_qqp_is_predicted_too(tmp_path):
    path = tmp_path / "QQP/test.tsv"
    path.parent.mkdir()
    path.write_text("id\tquestion1\tquestion2\n0\twhy?\t\n")
    (test_set,) = glue_tests.read(str(tmp_path), "qqp")
    assert test_set.second == [""]


def test_another_tasks_folder_is_refused(folder):
    with pytest.raises(InputError, match="is the folder of cola, and the task is sst2"):
        glue_tests.read(str(folder / "CoLA"), "sst2")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Lets tests run on plain PyTorch in this process, whose XLA has four devices."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")


# ---- predictions ---------------------------------------------------------------------------------
REVERSED = ("contradiction", "neutral", "entailment")


@pytest.fixture
def mnli(tmp_path) -> Path:
    """Test sets of MNLI: 20, 12 and 7 pairs."""
    texts = random_texts(40)
    root = tmp_path / "glue"
    pairs = list(zip(texts, reversed(texts), strict=True))
    write_tsv(root / "MNLI/test_matched.tsv", HEADERS["mnli"], pairs[:20])
    write_tsv(root / "MNLI/test_mismatched.tsv", HEADERS["mnli"], pairs[20:32])
    diagnostic = list(zip(TEXTS, reversed(TEXTS), strict=True))
    write_tsv(root / "diagnostic/diagnostic.tsv", HEADERS["rte"], diagnostic)
    return root


def predicted(model: Path, data: Path, out: Path, **flags) -> dict[str, list[str]]:
    """Returns the lines of the files of a submission, by name."""
    options = {"device": "cpu", "precision": "float32", "batch_size": 8, **flags}
    config = predict.Config(model_dir=str(model), data=str(data), out=str(out), **options)
    predict.main(config)
    return {path.name: path.read_text().splitlines() for path in out.iterdir()}


def test_classes_go_by_their_names_and_not_their_order(mnli, tmp_path, capsys):
    torch.manual_seed(0)
    write_classifier(tmp_path / "export", REVERSED)

    found = predicted(tmp_path / "export", mnli, tmp_path / "out", task="mnli")

    output, error = capsys.readouterr()
    assert output == ""
    assert "the server expects 9,796" in error
    classify = transformers.pipeline(
        "text-classification", model=str(tmp_path / "export"), device="cpu"
    )
    labels = set()
    for test_set in glue_tests.read(str(mnli), "mnli"):
        expected = ["index\tprediction"]
        rows = zip(test_set.indices, test_set.first, test_set.second, strict=True)
        for index, first, second in rows:
            (answer,) = classify([{"text": first, "text_pair": second}], truncation=True)
            expected.append(f"{index}\t{answer['label']}")
            labels.add(answer["label"])
        assert found[test_set.file] == expected
    assert len(labels) > 1


def test_mnli_without_its_diagnostic_set_says_so(mnli, tmp_path, capsys):
    write_classifier(tmp_path / "export", REVERSED)

    found = predicted(tmp_path / "export", mnli / "MNLI", tmp_path / "out", task="mnli")

    assert set(found) == {"MNLI-m.tsv", "MNLI-mm.tsv"}
    assert "has no diagnostic set" in capsys.readouterr().err


def test_names_that_are_not_the_tasks_need_an_order(folder, tmp_path):
    write_classifier(tmp_path / "other", ("yes", "no"))
    write_classifier(tmp_path / "unnamed", ("LABEL_0", "LABEL_1"))

    with pytest.raises(InputError, match="has a head for the classes yes, no.*--labels"):
        predicted(tmp_path / "other", folder, tmp_path / "out", task="mrpc")
    with pytest.raises(InputError, match="does not name the classes .*--labels not_equivalent,"):
        predicted(tmp_path / "unnamed", folder, tmp_path / "out", task="mrpc")
    with pytest.raises(InputError, match="head for 2|one of 2 outputs, and 3 are needed"):
        predicted(tmp_path / "unnamed", folder, tmp_path / "out", task="mnli")

    orders = ("not_equivalent,equivalent", "equivalent,not_equivalent")
    one, other = (
        predicted(tmp_path / "unnamed", folder, tmp_path / labels, task="mrpc", labels=labels)
        for labels in orders
    )
    swapped = [line.translate(str.maketrans("01", "10"))[-1] for line in one["MRPC.tsv"][1:]]
    assert [line[-1] for line in other["MRPC.tsv"][1:]] == swapped


def test_a_model_of_single_texts_predicts_no_pairs(folder, tmp_path):
    labels = ("not_equivalent", "equivalent")
    write_classifier(tmp_path / "export", labels, columns=("text",))

    with pytest.raises(InputError, match=r"mrpc has pairs .* was trained on single texts \(text\)"):
        predicted(tmp_path / "export", folder, tmp_path / "out", task="mrpc")


def test_a_broken_prediction_of_a_submission_is_not_skipped(folder, tmp_path):
    write_classifier(tmp_path / "export", ("not_equivalent", "equivalent"))
    path = tmp_path / "export/model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["classifier.weight"].fill_(3e38)  # finite, but no sum of products is
    safetensors.torch.save_file(weights, path, {"format": "pt"})

    with pytest.raises(InputError, match=r"MRPC/test.tsv, index 0: .* is not finite$"):
        predicted(tmp_path / "export", folder, tmp_path / "out", task="mrpc")


def test_a_regression_predicts_scores(folder, tmp_path):
    write_classifier(tmp_path / "export", ())

    found = predicted(tmp_path / "export", folder, tmp_path / "out", task="stsb")

    header, *lines = found["STS-B.tsv"]
    assert header == "index\tprediction"
    for number, line in enumerate(lines):
        index, score = line.split("\t")
        assert index == str(number)
        assert 0 <= float(score) <= 5
        assert len(score) == len("0.000")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"task": "mnli"}, "--out is missing"),
        ({"task": "mnli", "out": __file__}, "--out is the file .*; with --task give a folder"),
        ({"task": "mnli", "skip_broken": True}, "--skip-broken is not for --task"),
        ({"task": "mnli", "text": ("a", "b")}, "--text is a b; leave it out"),
        ({"task": "mnl", "out": "x"}, "task is 'mnl'; expected one of cola"),
        ({"task": "mnli", "out": "x", "data": ""}, "--data is missing: give GLUE's folder"),
    ],
)
def test_what_a_submission_lacks_is_refused(flags, sentence, tmp_path):
    write_classifier(tmp_path / "export", REVERSED)
    options = {"device": "cpu", "data": str(tmp_path), **flags}
    config = predict.Config(model_dir=str(tmp_path / "export"), **options)
    with pytest.raises(InputError, match=sentence):
        predict.main(config)
