"""Tests train/predict.py: the numbers of torchvision and transformers, the order of the inputs, and
broken inputs. GLUE's test sets are in test_glue_tests.py.
"""

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import torchvision
import transformers
from helpers import assert_refused, environment_of_plain_pytorch
from predicting import (
    TEXTS,
    answers_before,
    answers_of,
    command,
    lines_of,
    pixels_of,
    precision_of,
    random_texts,
    small_classifier,
    tokenizer_of_texts,
    without_precision,
    write_classifier,
    write_lines,
    write_network,
    write_pictures,
    write_trial,
)
from run_make import NOT_HANDED_ON, make
from transformers import AutoModelForMaskedLM

from data import glue, own_text, pictures, text_rows
from errors import InputError
from models import encoder_files
from tpu.accept.children import read_report
from train import glue as glue_script
from train import predict

CLOSE = 1e-5  # of a probability, in float32
NAMES = ("negative", "neutral", "positive")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Lets tests run on plain PyTorch in this process, whose XLA has four devices."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")


def in_process(capsys, folder, data, *flags) -> tuple[int, list[dict], str]:
    """Runs the command line: (exit code, answers, standard error)."""
    words = [str(word) for word in command(folder, data, *flags)[3:]]
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["predict.py", *words])
        try:
            predict.cli.run(predict.main, predict.PRESETS)
        except SystemExit as stopped:
            code = stopped.code
    output, error = capsys.readouterr()
    return code, lines_of(output), error


# ---- pictures ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def network(mesh, tmp_path_factory) -> Path:
    """The export of a small network for pictures."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("network")
    write_network(folder, mesh)
    return folder


@pytest.fixture
def folder_of_pictures(tmp_path) -> Path:
    """Five pictures in three folders, and what is none."""
    folder = tmp_path / "new"
    write_pictures(folder, ["b.jpg", "a/2.png", "a/10.jpg", "c/c.jpeg", "a.jpg"])
    (folder / "notes.txt").write_text("none")
    (folder / ".hidden.jpg").write_bytes(b"none")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX/b.jpg").write_bytes(b"none")
    return folder


IN_ORDER = ["a/10.jpg", "a/2.png", "a.jpg", "b.jpg", "c/c.jpeg"]


def test_pictures_have_torchvisions_probabilities(mesh, tmp_path):
    torch.manual_seed(0)
    write_network(tmp_path / "export", mesh, "resnet50", size=64)
    paths = write_pictures(tmp_path / "new", [f"{number}.jpg" for number in range(5)])

    found = answers_of(tmp_path / "export", tmp_path / "new", batch_size=2)

    file = tmp_path / "export/model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        about = opened.metadata()
    theirs = torchvision.models.resnet50(num_classes=12)
    theirs.load_state_dict(safetensors.torch.load_file(file))
    mean = torch.tensor(json.loads(about["mean"]))[:, None, None]
    std = torch.tensor(json.loads(about["std"]))[:, None, None]
    pixels = [pixels_of(path, int(about["resize"]), 64) for path in paths]
    images = (torch.stack(pixels) / 255 - mean) / std
    with torch.no_grad():
        shares = theirs.eval()(images).softmax(1)

    classes = json.loads(about["classes"])
    assert [answer["input"] for answer in found] == paths
    assert len({answer["probability"] for answer in found}) == 5
    for answer, expected in zip(found, shares, strict=True):
        best = expected.topk(5)
        assert [top["label"] for top in answer["top"]] == [classes[i] for i in best.indices]
        probabilities = [top["probability"] for top in answer["top"]]
        assert probabilities == pytest.approx(best.values.tolist(), abs=CLOSE)
        assert answer["label"] == answer["top"][0]["label"]
        assert answer["probability"] == answer["top"][0]["probability"]


def assert_alike(found: list[dict], expected: list[dict]) -> None:
    """Asserts that answers have the same inputs and classes, and probabilities within CLOSE."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one["input"] == other["input"]
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=CLOSE)


def test_xla_gives_the_pictures_of_a_folder_the_same(network, folder_of_pictures):
    plain = answers_of(network, folder_of_pictures)
    on_xla = answers_of(network, folder_of_pictures, device="xla", batch_size=4, workers=1)

    names = [os.path.relpath(answer["input"], folder_of_pictures) for answer in plain]
    assert names == IN_ORDER
    assert_alike(on_xla, plain)


def test_a_folder_says_what_of_it_is_no_picture(network, folder_of_pictures, capsys):
    code, found, error = in_process(capsys, network, folder_of_pictures)

    assert code == 0
    assert len(found) == 5
    assert f"1 files of {folder_of_pictures} are no pictures" in error


def test_pictures_are_a_file_a_pattern_or_lines(network, folder_of_pictures, monkeypatch):
    (one,) = answers_of(network, folder_of_pictures / "b.jpg")
    assert one["input"] == str(folder_of_pictures / "b.jpg")

    pattern = answers_of(network, folder_of_pictures / "a/*.*")
    assert [Path(answer["input"]).name for answer in pattern] == ["10.jpg", "2.png"]

    listed = f"{folder_of_pictures}/b.jpg\n{folder_of_pictures}/a.jpg\n{folder_of_pictures}/b.jpg"
    standard_input(monkeypatch, listed)
    from_lines = answers_of(network, "-")
    assert [answer["input"] for answer in from_lines] == listed.split("\n")


def standard_input(monkeypatch, text: str) -> None:
    """Makes a text the standard input of this process."""
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_the_list_of_pictures_may_begin_with_windows_mark(network, folder_of_pictures, monkeypatch):
    standard_input(monkeypatch, f"\ufeff{folder_of_pictures}/b.jpg\r\n")
    (answer,) = answers_of(network, "-")
    assert answer["input"] == f"{folder_of_pictures}/b.jpg"


def test_a_link_to_a_folder_above_is_not_followed(folder_of_pictures):
    (folder_of_pictures / "a/again").symlink_to(folder_of_pictures)
    elsewhere = folder_of_pictures.parent / "elsewhere"
    write_pictures(elsewhere, ["x.jpg"])
    (folder_of_pictures / "other").symlink_to(elsewhere)

    found = pictures.find(str(folder_of_pictures)).paths

    names = [os.path.relpath(path, folder_of_pictures) for path in found]
    assert names == [*IN_ORDER, "other/x.jpg"]


BROKEN_FILES = ["not a picture", "is broken", "cannot be read"]


@pytest.fixture
def with_broken(tmp_path) -> list[str]:
    """Paths of pictures: whole, text, whole, cut, missing, whole."""
    paths = write_pictures(tmp_path / "new", [f"{number}.jpg" for number in range(6)])
    Path(paths[1]).write_text("not a picture")
    content = Path(paths[3]).read_bytes()
    Path(paths[3]).write_bytes(content[: len(content) // 2])
    Path(paths[4]).unlink()
    return paths


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_broken_pictures_are_named_and_passed_over(device, network, with_broken, monkeypatch):
    whole = [with_broken[index] for index in (0, 2, 5)]
    standard_input(monkeypatch, "\n".join(whole))
    expected = answers_of(network, "-")

    standard_input(monkeypatch, "\n".join(with_broken))
    found = answers_of(network, "-", skip_broken=True, batch_size=4, device=device)

    assert [answer["input"] for answer in found] == with_broken
    assert_alike([found[index] for index in (0, 2, 5)], expected)
    assert "not an image in a known format" in found[1]["error"]
    assert f"{with_broken[3]} is broken: " in found[3]["error"]
    assert "cannot be read: No such file" in found[4]["error"]


def test_a_broken_picture_ends_with_its_name(network, with_broken, monkeypatch, capsys):
    standard_input(monkeypatch, "\n".join(with_broken[2:]))

    code, found, error = in_process(capsys, network, "-", "--batch-size", "1")

    assert code == 2
    assert error.startswith(f"error: {with_broken[3]} is broken: ")
    assert "or pass --skip-broken" in error
    assert [answer["input"] for answer in found] == [with_broken[2]]


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_answers_before_a_broken_picture_come_out(device, network, with_broken, monkeypatch):
    """Those of its own batch, too."""
    standard_input(monkeypatch, "\n".join([with_broken[0], with_broken[2], *with_broken]))

    found, error = answers_before(network, "-", batch_size=4, device=device)

    assert [answer["input"] for answer in found] == [with_broken[index] for index in (0, 2, 0)]
    assert error.startswith(f"{with_broken[1]} is broken: ")
    assert error.endswith("; or pass --skip-broken")


def rewritten(folder: Path, to: Path, **changes: str | None) -> Path:
    """Writes an export with other metadata; None: without this one."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata() | changes
    about = {name: value for name, value in about.items() if value is not None}
    to.mkdir()
    safetensors.torch.save_file(weights, to / "model.safetensors", about)
    return to


def test_an_old_export_needs_the_size_of_its_pictures(network, folder_of_pictures, tmp_path):
    missing = {"resize": None, "image_size": None, "mean": None, "std": None}
    old = rewritten(network, tmp_path / "old", **missing)

    with pytest.raises(InputError, match="does not say how large .* --image-size"):
        answers_of(old, folder_of_pictures)

    found = answers_of(old, folder_of_pictures, image_size=32)
    assert_alike(found, answers_of(network, folder_of_pictures))


def test_labels_of_pictures_have_a_probability_each(network, folder_of_pictures, tmp_path):
    multilabel = rewritten(network, tmp_path / "multilabel", objective="multilabel")

    (found,) = answers_of(multilabel, folder_of_pictures / "a.jpg")

    likely = [name for name, share in found["probabilities"].items() if share >= 0.5]
    assert found["labels"] == likely
    assert 0 < len(likely) < 12
    assert list(found["probabilities"]) == [f"texture {number}" for number in range(12)]


def test_a_number_of_pictures_is_in_the_unit_of_the_labels(network, folder_of_pictures, tmp_path):
    changes = {"objective": "regression", "label_mean": "0.0", "label_std": "1.0"}
    plain = rewritten(network, tmp_path / "plain", **changes)
    changes |= {"label_mean": "40.0", "label_std": "5.0"}
    in_years = rewritten(network, tmp_path / "years", **changes)

    (of_plain,) = answers_of(plain, folder_of_pictures / "a.jpg")
    (of_years,) = answers_of(in_years, folder_of_pictures / "a.jpg")

    expected = {name: 5 * score + 40 for name, score in of_plain["scores"].items()}
    assert of_years["scores"] == pytest.approx(expected, rel=1e-5)


# ---- sentences and pairs -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """The export of a small classifier of three classes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("classifier")
    write_classifier(folder, NAMES, columns=("text",))
    return folder


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory) -> Path:
    """The export of a small classifier of pairs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("of_pairs")
    write_classifier(folder, NAMES, columns=("first", "second"))
    return folder


@pytest.fixture
def old(classifier, tmp_path) -> Path:
    """The export of an older version, which does not say how many texts an example has."""
    folder = tmp_path / "old"
    shutil.copytree(classifier, folder)
    (folder / "columns.json").unlink()
    return folder


def by_pipeline(folder: Path, inputs: list, **options) -> list[dict]:
    """Returns transformers' probability of each class, for each input."""
    classify = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    found = []
    for one in inputs:
        scores = classify(one, top_k=None, truncation=True, **options)
        found.append({score["label"]: score["score"] for score in scores})
    return found


def assert_by_pipeline(found: list[dict], expected: list[dict]) -> None:
    for answer, scores in zip(found, expected, strict=True):
        top = {one["label"]: one["probability"] for one in answer["top"]}
        assert top == pytest.approx(scores, abs=CLOSE)
        assert answer["label"] == max(scores, key=scores.get)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_sentences_have_the_pipelines_probabilities(device, classifier, tmp_path):
    data = write_lines(tmp_path / "new.txt", TEXTS)

    found = answers_of(classifier, data, device=device, lengths=(8, 16))

    assert [answer["input"] for answer in found] == TEXTS
    assert_by_pipeline(found, by_pipeline(classifier, TEXTS))
    assert len({answer["probability"] for answer in found}) == len(TEXTS)


def test_many_sentences_keep_their_order(classifier, tmp_path):
    """Over several chunks, each of which is computed in the order of its lengths."""
    texts = random_texts(100)

    found = answers_of(classifier, write_lines(tmp_path / "new.txt", texts), batch_size=8)

    assert [answer["input"] for answer in found] == texts
    assert_by_pipeline(found, by_pipeline(classifier, texts))


PAIRS = list(zip(TEXTS, reversed(TEXTS), strict=True))


def write_pairs(path: Path) -> Path:
    """Writes PAIRS into a file with columns, of the kind that its name says."""
    names = ("number", "first", "second")
    rows = [dict(zip(names, (number, *pair), strict=True)) for number, pair in enumerate(PAIRS)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        import pandas

        separator = "\t" if path.suffix == ".tsv" else ","
        pandas.DataFrame(rows).to_csv(path, sep=separator)  # the index has no name
    return path


@pytest.mark.parametrize("name", ["new.csv", "new.tsv", "new.jsonl", "new.parquet"])
def test_pairs_have_the_pipelines_probabilities(name, of_pairs, tmp_path):
    data = write_pairs(tmp_path / name)

    found = answers_of(of_pairs, data, text=("first", "second"))

    assert [answer["input"] for answer in found] == [list(pair) for pair in PAIRS]
    inputs = [{"text": first, "text_pair": second} for first, second in PAIRS]
    assert_by_pipeline(found, by_pipeline(of_pairs, inputs))


def test_the_columns_of_the_training_are_the_default(tmp_path):
    write_classifier(tmp_path / "export", NAMES, columns=("second", "first"))
    data = write_pairs(tmp_path / "new.csv")

    found = answers_of(tmp_path / "export", data)

    assert found[0]["input"] == [PAIRS[0][1], PAIRS[0][0]]


def test_one_text_is_no_pair_and_a_pair_not_one_text(classifier, of_pairs, tmp_path):
    data = write_pairs(tmp_path / "new.csv")
    one = r"takes pairs \(first and second\): name 2, as --text first second$"
    with pytest.raises(InputError, match=one):
        answers_of(of_pairs, data, text=("first",))

    two = r"takes single texts \(text\): name 1, as --text text$"
    with pytest.raises(InputError, match=two):
        answers_of(classifier, data, text=("first", "second"))


@pytest.mark.parametrize(
    ("task", "columns"), [("mrpc", ("sentence1", "sentence2")), ("sst2", ("sentence",))]
)
def test_an_export_of_glue_says_what_an_example_is(task, columns, mesh, tmp_path):
    export = write_trial(tmp_path, mesh, task, (16, 32))
    lines = write_lines(tmp_path / "new.txt", TEXTS)
    rows = [dict.fromkeys(("sentence", "sentence1", "sentence2"), text) for text in TEXTS]
    table = write_lines(tmp_path / "new.jsonl", map(json.dumps, rows))

    found = answers_of(export, table)

    inputs = [[text] * len(columns) for text in TEXTS]
    assert [answer["input"] for answer in found] == (inputs if len(columns) == 2 else TEXTS)
    if len(columns) == 2:
        with pytest.raises(InputError, match="takes pairs .* has a text a line; expected a file"):
            answers_of(export, lines)
    else:
        assert_alike(answers_of(export, lines), found)


def test_an_old_export_predicts_with_a_note(old, classifier, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", TEXTS)
    table = write_pairs(tmp_path / "new.csv")

    code, found, error = in_process(capsys, old, data)

    assert code == 0
    assert_alike(found, answers_of(classifier, data))
    assert error.startswith(f"{old} has no columns.json, so it does not say whether it was ")
    _, _, error = in_process(capsys, classifier, data)
    assert error == ""
    _, found, error = in_process(capsys, old, table, "--text", "first", "second")
    assert [answer["input"] for answer in found] == [list(pair) for pair in PAIRS]
    assert "columns.json" not in error
    with pytest.raises(InputError, match="has the columns .*: name one by --text, or two of pairs"):
        answers_of(old, table)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "mac.csv",
            "review,stars\rgood,5\r",
            "mac.csv has a header that cannot be read as CSV.*end its lines",
        ),
        ("half.jsonl", '{"review": "nice \\ud83d"}\n', "its review is not UTF-8"),
    ],
)
def test_files_that_would_be_a_traceback_are_refused(classifier, tmp_path, name, content, message):
    data = tmp_path / name
    data.write_bytes(content.encode())
    with pytest.raises(InputError, match=message):
        answers_of(classifier, data, text=("review",))


def test_a_device_is_not_replaced_by_a_file():
    with pytest.raises(InputError, match="--out is /dev/null, which is no file"):
        predict.validate(predict.Config(model_dir="export", data="new.csv", out="/dev/null"))


def test_a_full_standard_output_is_a_sentence(classifier, tmp_path):
    data = write_lines(tmp_path / "new.txt", TEXTS)
    arguments = ["new", "--model-dir", str(classifier), "--data", str(data), "--device", "cpu"]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "train.predict", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of_plain_pytorch(),
        )
    assert ran.returncode == 2
    assert "error: the standard output cannot be written: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_labels_of_sentences_have_the_pipelines_probabilities(tmp_path):
    write_classifier(tmp_path / "export", NAMES, problem="multi_label_classification")
    data = write_lines(tmp_path / "new.txt", TEXTS)

    found = answers_of(tmp_path / "export", data)

    for answer, scores in zip(found, by_pipeline(tmp_path / "export", TEXTS), strict=True):
        assert answer["probabilities"] == pytest.approx(scores, abs=CLOSE)
        assert answer["labels"] == [name for name in NAMES if scores[name] >= 0.5]
    assert {len(answer["labels"]) for answer in found} != {0}


def test_a_regression_gives_the_pipelines_scores(tmp_path):
    write_classifier(tmp_path / "export", ())
    data = write_lines(tmp_path / "new.txt", TEXTS)

    found = [answer["score"] for answer in answers_of(tmp_path / "export", data)]

    scores = by_pipeline(tmp_path / "export", TEXTS, function_to_apply="none")
    assert found == pytest.approx([next(iter(score.values())) for score in scores], abs=CLOSE)


def test_long_texts_are_cut_and_counted(classifier, tmp_path, capsys):
    texts = ["the dog " * 40, "the cat", "a bird " * 100]
    data = write_lines(tmp_path / "new.txt", texts)

    code, found, error = in_process(capsys, classifier, data)

    assert code == 0
    assert "2 texts were cut to the 32 tokens that the model takes" in error
    assert_by_pipeline(found, by_pipeline(classifier, texts))


def test_texts_are_cut_as_in_the_evaluation_of_the_run(mesh, tmp_path, capsys):
    export = write_trial(tmp_path / "run", mesh, "sst2", (8, 12))
    expected = glue_script.main(glue_script.Config(evaluate=str(tmp_path / "run"), device="cpu"))
    (cut,) = re.findall(r"\((\d+) cut to 12 tokens\)", capsys.readouterr().out)
    examples = glue.read("synthetic", "sst2", "validation")
    data = write_lines(tmp_path / "new.txt", examples.first)
    labels = [glue.TASKS["sst2"].labels[label] for label in examples.labels]

    code, found, error = in_process(capsys, export, data)

    assert code == 0
    assert loss_of(found, labels) == pytest.approx(expected["loss"], abs=1e-5)
    assert f"{cut} texts were cut to 12 tokens, as in the evaluation" in error
    assert "--max-length takes up to 32" in error

    _, shorter, error = in_process(capsys, export, data, "--max-length", 10)
    assert abs(loss_of(shorter, labels) - expected["loss"]) > 1e-3
    assert "texts were cut to 10 tokens, as --max-length says" in error


def loss_of(found: list[dict], labels: list[str]) -> float:
    """Returns the mean cross-entropy of answers."""
    losses = []
    for answer, label in zip(found, labels, strict=True):
        probabilities = {one["label"]: one["probability"] for one in answer["top"]}
        losses.append(-math.log(probabilities[label]))
    return sum(losses) / len(losses)


def test_a_text_is_not_cut_where_the_model_ends_later(tmp_path, classifier):
    write_classifier(tmp_path / "export", NAMES, columns=("text",), max_length=10)
    data = write_lines(tmp_path / "new.txt", TEXTS)
    whole = by_pipeline(tmp_path / "export", TEXTS)

    assert_by_pipeline(answers_of(tmp_path / "export", data, max_length=32), whole)
    cut = by_pipeline(tmp_path / "export", TEXTS, max_length=10)
    assert_by_pipeline(answers_of(tmp_path / "export", data), cut)
    assert cut != whole
    with pytest.raises(InputError, match="--max-length is 33; the model .* takes at most 32 tok"):
        answers_of(tmp_path / "export", data, max_length=33)


def test_the_first_answers_come_before_the_end_of_the_input(classifier, monkeypatch):
    read = []

    def endless(data):
        while True:
            read.append("the dog")
            yield text_rows.Row(("the dog",), "line")

    monkeypatch.setattr(text_rows, "lines", endless)
    config = predict.Config(model_dir=str(classifier), data="-", device="cpu", batch_size=8)

    found = predict.answers(config)
    next(found)

    assert len(read) <= 3 * 8
    found.close()


# ---- the precision -------------------------------------------------------------------------------
@pytest.fixture(params=["pictures", "sentences"])
def export_in(request, mesh, tmp_path) -> Callable[[str], Path]:
    """export_in("float32"): writes the export of a run in this precision."""

    def write(precision: str) -> Path:
        folder = tmp_path / precision
        if request.param == "sentences":
            return write_trial(folder, mesh, "sst2", (8, 12), precision)
        write_network(folder, mesh, precision=precision)
        return folder

    return write


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_precision_is_that_of_the_run(precision, export_in, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", [])  # read by both: it has no path and no text
    export = export_in(precision)

    assert precision_of(export, data) == precision
    assert precision_of(export, data, precision="fast_float32") == "fast_float32"
    assert "precision" not in capsys.readouterr().err


def test_an_export_without_a_precision_keeps_bfloat16(export_in, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", [])
    old = without_precision(export_in("float32"), tmp_path / "old")

    assert precision_of(old, data) == "bfloat16"
    assert f"{old} does not say in which precision its run" in capsys.readouterr().err
    assert precision_of(old, data, precision="float32") == "float32"
    assert capsys.readouterr().err == ""


def test_an_unknown_precision_of_an_export_is_refused(export_in, tmp_path):
    data = write_lines(tmp_path / "new.txt", [])
    export = export_in("float8")
    with pytest.raises(InputError, match="precision 'float8'.* give --precision, one of bfloat16"):
        answers_of(export, data, precision="")


# ---- broken rows ---------------------------------------------------------------------------------
def as_parquet(values: list) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"t": pa.array(values)}), sink)
    return sink.getvalue().to_pybytes()


# A file's name and content, whose second row is broken: where, and why.
BROKEN_ROWS = [
    ("x.txt", b"one\n\ntwo\n", "line 2", "its text is empty"),
    ("x.txt", b"one\n\xff\xfe\ntwo\n", "line 2", "its text is not UTF-8"),
    ("x.csv", b"t,u\none,1\n,2\ntwo,3\n", "line 3", "its t is empty"),
    ("x.csv", b"t,u\none,1\ntwo\nthree,3\n", "line 3", "it has 1 fields, and the header 2"),
    ("x.csv", b't\n"on\ne"\n" "\ntwo\n', "line 4", "its t is empty"),
    ("x.jsonl", b'{"t": "one"}\n{"t": 5}\n{"t": "two"}\n', "line 2", "its t is 5, which is no"),
    ("x.jsonl", b'{"t": "one"}\n{"u": 5}\n{"t": "two"}\n', "line 2", "its t is empty"),
    ("x.jsonl", b'{"t": "one"}\n[1\n{"t": "two"}\n', "line 2", "it is no JSON object"),
    ("x.jsonl", b'{"t": "one"}\n%s\n{"t": "two"}\n' % (b"[" * 100_000), "line 2", "it is no JSON"),
    ("x.parquet", as_parquet(["one", None, "two"]), "row 2", "its t is empty"),
]


@pytest.mark.parametrize(("name", "content", "where", "why"), BROKEN_ROWS)
def test_a_broken_row_is_named_and_passed_over(
    name, content, where, why, classifier, tmp_path, capsys
):
    data = tmp_path / name
    data.write_bytes(content)
    flags = [] if name.endswith("txt") else ["--text", "t"]

    code, found, error = in_process(capsys, classifier, data, *flags)
    assert code == 2
    assert error.startswith(f"error: {data} {where}: {why}")
    assert error.endswith("or pass --skip-broken\n")

    code, found, error = in_process(capsys, classifier, data, *flags, "--skip-broken")
    assert code == 0
    assert "1 of 3 inputs are broken" in error
    assert why in found[1]["error"]
    assert "label" in found[0]
    assert "label" in found[2]


# A file's name and content, the flags, and the sentence.
REFUSED_DATA = [
    ("x.csv", b"review,stars\na,1\n", [], "it has the columns review, stars: name that of the"),
    ("x.csv", b"review,stars\na,1\n", ["--text", "text"], "no column text; it has the columns rev"),
    ("x.csv", b"a,a\n1,2\n", ["--text", "a"], "has 2 columns a; rename"),
    ("x.csv", b't\n"a"b\n', ["--text", "t"], "line 2 cannot be read as CSV"),
    ("x.csv", b't\n"a\nb\n', ["--text", "t"], "line 2 cannot be read as CSV: unexpected end"),
    ("x.jsonl", b"[1]\n", ["--text", "t"], "line 1: it is no JSON object; expected one a line; or"),
    (
        "x.jsonl",
        b'{"u": 1}\n[1]\n{"v": 2}\n',
        ["--text", "t"],
        "no column t; it has the columns u:",
    ),
    ("x.parquet", b"PAR", ["--text", "t"], "cannot be read as parquet"),
    ("x.txt", b"a\n", ["--text", "t"], "has no columns; expected a file whose name ends with .csv"),
    ("x.csv", b"a,b,c\n", ["--text", "a", "b", "c"], "give one column, or two of pairs"),
    ("x.txt.gz", b"none", [], "cannot be read after line 0"),
]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not JSON", "it is no JSON object"),
        (b"[1]", "it is no JSON object"),
        (b'{"t": 5}', "its t is 5, which is no text"),
        (b'{"u": "x"}', "its t is empty"),
    ],
)
def test_a_broken_first_line_of_json_is_passed_over(line, why, classifier, tmp_path):
    data = tmp_path / "x.jsonl"
    data.write_bytes(b"\n" + line + b'\n{"t": "one"}\n{"t": "two"}\n')

    found, error = answers_before(classifier, data, text=("t",))
    assert found == []
    assert error.startswith(f"{data} line 2: {why}")

    broken, *whole = answers_of(classifier, data, text=("t",), skip_broken=True)
    assert broken["error"].startswith(why)
    assert [answer["input"] for answer in whole] == ["one", "two"]
    assert "label" in whole[0]


# A file's name and content, of which the third row cannot be read.
RANDOM = np.random.default_rng(0).bytes(10_000).hex().encode()
UNREADABLE = [
    ("x.csv", b't\none\ntwo\n"three\nfour\n', "line 4 cannot be read as CSV"),
    ("x.csv", b't\none\ntwo\n"three"x\nfour\n', "line 4 cannot be read as CSV"),
    ("x.txt.gz", gzip.compress(b"one\ntwo\n" + RANDOM)[:5_000], "cannot be read after line 2: "),
    (
        "x.jsonl.gz",
        gzip.compress(b'{"t": "one"}\n{"t": "two"}\n' + RANDOM)[:5_000],
        "cannot be read after line 2: ",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    UNREADABLE,
    ids=["open quote", "text after a quote", "cut lines", "cut JSON"],
)
def test_answers_before_an_unreadable_row_come_out(name, content, sentence, classifier, tmp_path):
    (tmp_path / name).write_bytes(content)
    text = () if name.startswith("x.txt") else ("t",)

    found, error = answers_before(classifier, tmp_path / name, text=text)

    assert [answer["input"] for answer in found] == ["one", "two"]
    assert sentence in error


@pytest.mark.parametrize(("name", "content", "flags", "sentence"), REFUSED_DATA)
def test_data_that_cannot_be_read_is_refused(
    name, content, flags, sentence, classifier, tmp_path, capsys
):
    (tmp_path / name).write_bytes(content)

    code, found, error = in_process(capsys, classifier, tmp_path / name, *flags)

    assert code == 2
    assert found == []
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_model_of_pairs_takes_no_lines(tmp_path):
    write_classifier(tmp_path / "export", NAMES, columns=("first", "second"))
    data = write_lines(tmp_path / "new.txt", TEXTS)

    with pytest.raises(InputError, match=r"takes pairs \(first and second\), .* a text a line"):
        answers_of(tmp_path / "export", data)


def test_a_field_with_line_breaks_is_that_of_the_training(classifier, tmp_path):
    data = tmp_path / "windows.csv"
    data.write_bytes(b'\xef\xbb\xbfreview,y\r\n"the dog,\r\nthe ""cat""",1\r\nred bird,0\r\n')
    columns = own_text.Columns(("review",), "y")
    (trained,) = own_text.find(str(data), columns).read["train"]().texts

    found = answers_of(classifier, data, text=("review",))

    assert [answer["input"] for answer in found] == trained
    assert trained[0] == 'the dog,\r\nthe "cat"'


def test_a_semicolon_or_gz_changes_nothing(classifier, tmp_path):
    (tmp_path / "a.csv").write_text("n;review \n1;the dog\n\n2;the cat\n", "utf-8-sig")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"n,review\n1,the dog\n2,the cat\n"))

    for name in ("a.csv", "a.csv.gz"):
        found = answers_of(classifier, tmp_path / name, text=("review",))
        assert [answer["input"] for answer in found] == ["the dog", "the cat"]


# ---- folders that are no export of a kind --------------------------------------------------------
def write_language_model(folder: Path) -> None:
    tokenizer = tokenizer_of_texts()
    settings = small_classifier(NAMES, tokenizer).config
    model = AutoModelForMaskedLM.from_config(settings)
    encoder_files.save(str(folder), model, model.state_dict(), tokenizer)


def write_without_head(folder: Path) -> None:
    write_classifier(folder, NAMES)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["classifier.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_empty(*names: str):
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    return write


def write_weights(folder: Path) -> None:
    weights = torchvision.models.resnet18().state_dict()
    safetensors.torch.save_file({"fc.bias": weights["fc.bias"]}, folder / "model.safetensors")


REFUSED_FOLDERS = {
    "a Transformer": (write_empty("model.pt", "dict.en.txt"), "use make translate MODEL_DIR="),
    "a run": (write_empty("config.json", "export/config.json"), "is a run; give its export, "),
    "unfinished": (write_empty("config.json", "checkpoints/x"), "is a run that is not finished"),
    "nothing": (lambda folder: None, "there is nothing in "),
    "another": (write_empty("weights.bin"), "has neither config.json nor model.safetensors but "),
    "damaged": (write_empty("model.safetensors"), "model.safetensors cannot be read"),
    "bare weights": (write_weights, "names neither classes nor features"),
    "a language model": (write_language_model, "has BertForMaskedLM; expected one ForSequence"),
    "without a head": (write_without_head, "lacks 1 weights of its classifier, such as"),
}


@pytest.mark.parametrize(
    ("kind", "flag"),
    [("clicks", {"text": ("a",)}), ("pictures", {"max_length": 8}), ("clicks", {"image_size": 64})],
)
def test_a_flag_of_another_kind_of_export_is_refused(kind, flag):
    (name,) = flag
    config = predict.Config(model_dir="x", **flag)
    message = rf"--{name.replace('_', '-')} is \w+; it is for .* x is a model of {kind}"
    with pytest.raises(InputError, match=message):
        predict._check_kind(config, kind)


@pytest.mark.parametrize("which", REFUSED_FOLDERS)
def test_a_folder_that_predicts_nothing_is_refused(which, tmp_path):
    write, sentence = REFUSED_FOLDERS[which]
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    data = write_lines(tmp_path / "new.txt", TEXTS)

    with pytest.raises(InputError) as refused:
        answers_of(tmp_path / "model", data)

    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--model-dir is missing"),
        ("--model-dir x --top 0", "--top is 0; it must be at least 1"),
        ("--model-dir x --lengths 64 32", "--lengths are .*must rise"),
        ("--model-dir x --max-length 7", "--max-length is 7; it must be at least 8"),
        ("--model-dir x --data y --labels a,b", "--labels is a,b; it is for --task"),
        ("--model-dir x --data y --out .", "--out is the folder ., give a file|give a file"),
        ("--model-dir x --data y --out /proc/x/y", "/proc/x cannot be written"),
        ("--model-dir x --data y", "there is nothing in x"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_refused(f"new {flags}", sentence, predict, capsys)


def test_a_pod_is_refused(classifier, monkeypatch):
    alone = predict.device.setup

    def of_two_hosts(*args, **options):
        return replace(alone(*args, **options), process_count=2)

    monkeypatch.setattr(predict.device, "setup", of_two_hosts)
    with pytest.raises(InputError, match="made on one host, by one process, not 2"):
        answers_of(classifier, "x.txt")


# ---- the command ---------------------------------------------------------------------------------
def test_a_file_is_written_whole_or_not_at_all(classifier, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", TEXTS)
    out = tmp_path / "made/predictions.jsonl"
    expected = answers_of(classifier, data)

    code, printed, _ = in_process(capsys, classifier, data, "--out", out)
    assert (code, printed) == (0, [])
    assert lines_of(out.read_text("utf-8")) == expected

    write_lines(data, ["two", ""])
    code, *_ = in_process(capsys, classifier, data, "--out", out)
    assert code == 2
    assert lines_of(out.read_text("utf-8")) == expected
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_file_that_is_read_is_not_written(classifier, tmp_path, capsys, monkeypatch):
    data = write_lines(tmp_path / "new.txt", TEXTS)
    before = data.read_bytes()
    link = tmp_path / "link.txt"
    link.symlink_to(data)

    for given, out in [(data, data), (data, link), (tmp_path / "n*.txt", data)]:
        code, found, error = in_process(capsys, classifier, given, "--out", out)
        assert (code, found) == (2, [])
        assert re.match(f"error: --out is {out}, .*; give another\n", error)

    config = predict.Config(model_dir=str(classifier), data="-", out=str(data))
    with open(data) as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        with pytest.raises(InputError, match="a file of --data"):
            predict.main(config)
    with open(data, "a") as opened:  # >> new.txt would never end
        monkeypatch.setattr(sys, "stdout", opened)
        with pytest.raises(InputError, match=f"the standard output is a file of --data, {data}"):
            predict.main(replace(config, data=str(data), out=""))
    assert data.read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "name", "content", "said"),
    [
        ("classifier", "-", "", "the standard input"),
        ("network", "-", "", "the standard input"),
        ("classifier", "new.txt", "", "new.txt"),
        ("classifier", "new.csv", "text\n", "new.csv"),
        ("classifier", "new.jsonl", "\n", "new.jsonl"),
    ],
)
def test_no_inputs_are_said(kind, name, content, said, request, tmp_path, capsys, monkeypatch):
    standard_input(monkeypatch, content)
    data = name
    if name != "-":
        data = tmp_path / name
        data.write_text(content)

    code, found, error = in_process(capsys, request.getfixturevalue(kind), data)

    assert (code, found) == (0, [])
    assert error.endswith(f"{said} has no inputs, so there are no predictions\n")


def test_a_pipe_that_breaks_within_is_no_reader_that_left(classifier, tmp_path, monkeypatch):
    """A worker's connection, say: the command must not end with 0, as with `| head`."""
    data = write_lines(tmp_path / "new.txt", TEXTS)

    def broken(*_, **__):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(text_rows, "chunks", broken)
    monkeypatch.setattr(sys, "argv", ["predict.py", *command(classifier, data)[3:]])
    with pytest.raises(RuntimeError, match="predicting failed"):
        predict.cli.run(predict.main, predict.PRESETS)


def test_cut_texts_are_said_before_an_error_too(classifier, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", ["the dog " * 40, ""])

    code, found, error = in_process(capsys, classifier, data)

    assert (code, len(found)) == (2, 1)
    note, sentence = error.splitlines()
    assert note == "1 texts were cut to the 32 tokens that the model takes"
    assert sentence.startswith(f"error: {data} line 2: its text is empty")


def test_a_report_says_where_and_how_fast_it_was(classifier, tmp_path, capsys):
    data = write_lines(tmp_path / "new.txt", random_texts(20))

    code, found, error = in_process(capsys, classifier, data, "--report", "--batch-size", 8)

    assert (code, len(found)) == (0, 20)
    start, end = (read_report(text)[0] for text in error.splitlines() if "report {" in text)
    assert start["event"] == "start"
    assert (start["kind"], start["devices"]) == ("CPU", 1)
    assert end["event"] == "end"
    assert (end["count"], end["broken"]) == (20, 0)
    assert end["timed"] == 12, "without the first batch"
    assert end["seconds"] > 0

    _, _, error = in_process(capsys, classifier, data)
    assert "report" not in error


def test_a_path_that_is_no_text_is_one_line_of_json(network, tmp_path, capsys):
    (path,) = write_pictures(tmp_path, ["a.jpg"])
    strange = os.fsencode(str(tmp_path)) + b"/\xff.jpg"
    os.rename(path, strange)

    code, (found,), _ = in_process(capsys, network, tmp_path)

    assert code == 0
    assert os.fsencode(found["input"]) == strange


def test_make_predict_ends_quietly_with_its_reader(classifier, tmp_path):
    """`| head` closes the pipe while answers are still written."""
    data = write_lines(tmp_path / "new.txt", random_texts(600))
    arguments = f"MODEL_DIR='{classifier}' DATA='{data}' DEVICE=cpu "
    arguments += "ARGS='--batch-size 8 --precision float32'"
    shell = f"make predict {arguments} | head -n 1; echo ${{PIPESTATUS[0]}}"
    variables = environment_of_plain_pytorch()
    for name in NOT_HANDED_ON:
        variables.pop(name, None)

    ran = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        env=variables,
        cwd=Path(__file__).parent.parent,
    )

    first, code = ran.stdout.splitlines()
    assert json.loads(first)["label"] in NAMES
    assert code == "0"
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "MODEL_DIR is missing"),
        (["MODEL_DIR=x", "DATA=glue", "TASK=mrpc"], "OUT is missing"),
        (["MODEL_DIR=x", "DATA=y", "DEVICE=gpu"], "DEVICE=gpu is not known"),
    ],
)
def test_make_predict_refuses_what_it_cannot_start(arguments, reason):
    result = make("predict", *arguments)
    assert result.returncode == 2
    assert reason in result.stderr


def test_make_predict_hands_its_arguments_over():
    given = ["MODEL_DIR=x", "DATA=/a b", "OUT=/c d", "TASK=mrpc", "DEVICE=cpu", "ARGS=--top 3"]
    command = " ".join(make("-n", "predict", *given).stdout.replace("\\\n", " ").split())
    flags = '--model-dir "$MODEL_DIR" --data "$DATA" --out "$OUT" --task "$TASK"'
    assert command.endswith(f'train.predict new {flags} --device "$DEVICE" --top 3')
