"""Somebody's own pictures, few of them: the preset finetune of train/resnet50.py, weights as
torchvision has them, and labels in a CSV (data/labelled_files.py)."""

import io
import json
import pickle
import re
import shutil
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import own_pictures
import pytest
import safetensors.torch
import torch
import torchvision
from helpers import assert_graph_contract, crash, equal, exported, records, stop_at
from own_pictures import COLOURS, make_picture, write_classes, write_csv, write_listed
from sklearn import metrics as sklearn_metrics

from data import imagenet, labelled_files, splits, targets
from data.labelled_files import Columns, Scale
from errors import InputError
from models import resnet
from train import resnet50
from train.common import device, files

SMALL = {
    "model": "resnet_tiny",
    "image_size": 32,
    "precision": "float32",
    "workers": 0,
}


@pytest.fixture(scope="module", autouse=True)
def two_stages():
    """Makes the small network smaller: each test compiles its steps anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.LAYERS, "resnet_tiny", (1, 1))
        yield


@pytest.fixture(scope="module")
def torchvision_file(two_stages, tmp_path_factory) -> str:
    """A state dict of a network with ImageNet's head, as torchvision's older files are: without
    the number of batches that each norm has seen."""
    torch.manual_seed(0)
    weights = resnet.resnet("resnet_tiny", 1000).state_dict()
    old = {name: value for name, value in weights.items() if "num_batches" not in name}
    path = tmp_path_factory.mktemp("weights") / "resnet-0676ba61.pth"
    torch.save(old, path)
    return str(path)


@pytest.fixture(scope="module")
def listed(tmp_path_factory) -> Path:
    """A folder of 120 pictures with a labels.csv."""
    return write_listed(tmp_path_factory.mktemp("listed"), 120)


# The preset


@pytest.mark.parametrize(
    ("images", "batch_size", "epochs", "eval_every", "lr"),
    [
        (100, 16, 84, 8, 0.12),
        (720, 32, 23, 2, 0.085),
        (5_120, 256, 25, 2, 0.03),
        (100_000, 256, 10, 1, 0.03),
    ],
)
def test_the_number_of_images_chooses(images, batch_size, epochs, eval_every, lr):
    config = resnet50.fit(resnet50.FINETUNE, images, devices=4)

    assert config.batch_size == batch_size
    assert config.epochs == epochs
    assert epochs * (images // batch_size) >= 500
    assert config.eval_every == eval_every
    assert config.warmup_epochs == epochs / 10
    assert config.lr == lr


def test_what_the_user_gives_counts_and_the_rest_fits_it():
    given = replace(resnet50.FINETUNE, batch_size=64, lr=0.5)

    config = resnet50.fit(given, 720, devices=1)

    assert config.batch_size == 64
    assert config.lr == 0.5
    assert config.epochs == 46  # 11 updates in each
    why = resnet50.explain_fit(given, config, 720)
    assert why.startswith("chosen for 720 training images: --epochs 46 (at least 500 updates")
    assert "--batch-size" not in why
    assert "--lr" not in why


def test_a_batch_is_one_that_the_devices_can_share():
    config = resnet50.fit(replace(resnet50.FINETUNE, update_every=3), 100, devices=8)

    assert config.batch_size == 24


def test_a_recipe_without_gaps_stays_as_it_is():
    for config in (resnet50.Config(), resnet50.TINY):
        fitted = resnet50.fit(config, 720, devices=4)
        assert fitted == config
        assert resnet50.explain_fit(config, fitted, 720) == ""


@pytest.mark.slow  # other numbers of updates are learned from in test_labels_of_a_csv_are_learned
def test_the_preset_learns_from_torchvisions_file(torchvision_file, tmp_path, capsys):
    """Class folders without a split to evaluate on; all that the preset chooses is its own."""
    data = write_classes(tmp_path / "pictures", 150)
    config = replace(
        resnet50.FINETUNE, **SMALL, data=str(data), weights=torchvision_file, runs=str(tmp_path)
    )

    metrics = resnet50.main(config)

    assert metrics["top1"] > 0.9
    (run,) = tmp_path.glob("resnet_tiny*")
    assert_graph_contract(run)
    stored = json.loads((run / "config.json").read_text())["config"]
    assert stored["batch_size"] == 16
    assert stored["epochs"] * (135 // 16) >= 500
    output = capsys.readouterr().out
    held_out = "trained on 135 of the 150 pictures of pictures/, evaluated on the other 15, held"
    assert held_out in output
    assert "chosen for 135 training images: --batch-size 16 (" in output
    assert re.search(r"the head is new: .*0676ba61.pth has a head for 1000 classes", output)
    assert "of 2 classes" in output


def test_the_preset_needs_weights(refused):
    refused(resnet50, "finetune --data /pictures", "--weights is missing: .*torchvision.*export")


@pytest.mark.parametrize("preset", ["full", "finetune"])
def test_too_few_pictures_get_the_numbers_that_fit(preset, refused, tmp_path, torchvision_file):
    data = write_classes(tmp_path / "pictures", 100)
    batch = "1024" if preset == "full" else "92"
    flags = [preset, "--data", data, "--batch-size", batch, "--weights", torchvision_file]
    pattern = (
        f"batch_size is {batch}, but the data set has 90 examples: --batch-size 88 makes one "
        "update per epoch, --batch-size 4 makes 22; the preset finetune chooses one"
    )

    refused(resnet50, flags, pattern)


# Weights


class Exploit:
    """Is executed by a reader that unpickles anything."""

    def __reduce__(self):
        return exec, ("raise KeyboardInterrupt",)


def saved(content: object) -> bytes:
    """Returns what torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


NO_STATE_DICTS = {
    "a pickle": (lambda: saved({"fc.bias": Exploit()}), "is no state dict .Weights only load"),
    "another file": (lambda: b"<html>404</html>", "is no state dict .*safetensors file"),
    "nothing": (lambda: b"", "is no state dict .*safetensors file"),
    "a checkpoint": (
        lambda: saved({"model": {"fc.bias": torch.zeros(2)}, "epoch": 3}),
        "is no state dict, but a dict of model, epoch; give what torch.save",
    ),
    "a list": (lambda: saved([torch.zeros(2)]), "is no state dict, but a list"),
    "an empty dict": (lambda: saved({}), "is no state dict, but a dict of nothing"),
}


@pytest.mark.parametrize("kind", NO_STATE_DICTS)
def test_what_is_no_state_dict_is_refused_and_not_executed(kind, tmp_path):
    make, pattern = NO_STATE_DICTS[kind]
    path = tmp_path / "weights.pth"
    path.write_bytes(make())

    with pytest.raises(InputError, match=pattern) as error:
        files.load_model(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_a_state_dict_is_that_of_torch_save(tmp_path):
    weights = torchvision.models.resnet18(num_classes=3).state_dict()
    for name, options in (("a.pth", {}), ("b.PT", {"_use_new_zipfile_serialization": False})):
        torch.save(weights, tmp_path / name, **options)

        found, metadata = files.load_model(str(tmp_path / name))

        assert equal(found, weights)
        assert metadata == {}


def test_a_head_for_another_objective_is_new():
    weights = resnet.resnet("resnet_tiny", 2).state_dict()
    metadata = {"classes": '["a", "b"]', "objective": "multilabel"}

    same = resnet.decide_head(weights, metadata, ["a", "b"], "file", objective="multilabel")
    other = resnet.decide_head(weights, metadata, ["a", "b"], "file")
    older = resnet.decide_head(weights, {"classes": '["a", "b"]'}, ["a", "b"], "file")

    assert same.rows == older.rows == [0, 1]
    assert "has a head for --objective multilabel, this run has classes" in other.message
    assert "without training (--lr 0)" in other.refusal_at_lr_0


def test_a_regressions_head_goes_to_the_units_of_other_data():
    theirs = resnet.resnet("resnet_tiny", 1).eval()
    ours = resnet.resnet("resnet_tiny", 1).eval()
    metadata = {"label_mean": "5.0", "label_std": "2.0"}
    scale = Scale(mean=-3.0, deviation=0.5)

    ours.load_state_dict(resnet50.convert_head_unit(theirs.state_dict(), metadata, scale))

    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = theirs(images) * 2.0 + 5.0
        torch.testing.assert_close(ours(images) * 0.5 - 3.0, expected)


# Labels in a CSV: what a run makes of them


def own(listed: Path, runs: Path, **changes) -> resnet50.Config:
    """Returns a short run on pictures of a CSV."""
    config = replace(
        resnet50.TINY,
        **SMALL,
        data=str(listed),
        batch_size=16,
        norm_groups=4,
        epochs=12,
        eval_every=6,
        lr=0.5,
        runs=str(runs),
        name="run",
    )
    return replace(config, **changes)


LEARNED = {
    "classes": ({"label": ("kind",)}, {"top1": 0.9}),
    "multilabel": (
        {"label": ("tags",), "separator": " "},
        {"f1_micro": 0.9, "f1_macro": 0.9, "average_precision": 0.95},
    ),
    "regression": ({"label": ("weight",)}, {"pearson": 0.9, "spearman": 0.85}),
}


slow = pytest.mark.slow  # other tests here learn these, with other flags


@pytest.mark.parametrize(
    "objective",
    [pytest.param("classes", marks=slow), pytest.param("multilabel", marks=slow), "regression"],
)
def test_labels_of_a_csv_are_learned(objective, listed, tmp_path):
    flags, least = LEARNED[objective]
    config = own(listed, tmp_path, objective=objective, **flags)

    metrics = resnet50.main(config)

    for name, value in least.items():
        assert metrics[name] > value, metrics
    assert_graph_contract(tmp_path / "run")
    with safetensors.safe_open(tmp_path / "run/export/model.safetensors", "pt") as file:
        about = file.metadata()
    assert about["objective"] == objective
    names = {"classes": ["dark", "red"], "multilabel": sorted(COLOURS), "regression": ["weight"]}
    assert json.loads(about["classes"]) == names[objective]
    if objective == "regression":
        assert 1000 < float(about["label_mean"]) < 1250
        assert metrics["mse"] < float(about["label_std"]) ** 2 / 4
    assert resnet50.main(resnet50.Config(evaluate=str(tmp_path / "run"))) == metrics


@pytest.mark.slow
def test_resume_is_exact_with_what_the_preset_chose(listed, torchvision_file, tmp_path, capsys):
    """On several columns of 0 and 1, by accumulated micro-batches. It learns them, too."""
    config = replace(
        resnet50.FINETUNE,
        **SMALL,
        data=str(listed),
        label=COLOURS,
        objective="multilabel",
        weights=torchvision_file,
        epochs=8,
        lr=0.5,
        update_every=2,
        log_every=1,
        save_every=4,
        runs=str(tmp_path),
        name="whole",
    )
    metrics = resnet50.main(config)
    assert metrics["f1_macro"] > 0.8, metrics
    stopped = replace(config, name="stopped")

    stop_at(11, crash, resnet50.main, stopped)
    assert resnet50.main(stopped) == metrics

    assert "resuming after step 8" in capsys.readouterr().out
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert equal(exported(tmp_path / "stopped"), exported(tmp_path / "whole"))


# Labels in a CSV: evaluation


class ByLevel(torch.nn.Module):
    """Takes the mean of each colour for its logit, as if 128 were as likely as not."""

    def __init__(self, outputs: int):
        super().__init__()
        self.outputs = outputs

    def forward(self, images):
        return images.float().mean((1, 2))[:, : self.outputs] / 128 - 1


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("objective", ["multilabel", "regression"])
def test_an_evaluation_counts_each_readable_picture_once(objective, tmp_path, mesh, capsys):
    """Against scikit-learn and SciPy on the pictures one by one; micro-batches, padding and broken
    files change nothing."""
    label = ("weight",) if objective == "regression" else COLOURS
    tables = labelled_files.find_tables(str(write_listed(tmp_path, 13)))
    images = imagenet.ListedImages(
        tables, "train", 32, skip_broken=True, columns=Columns(label, objective)
    )
    images.split = "eval"  # of the larger split
    Path(images.path(4)).write_bytes(b"")
    state = resnet50.State(ByLevel(len(images.classes)), torch.nn.Identity(), None)
    config = replace(resnet50.TINY, objective=objective, batch_size=8, update_every=2)

    step = device.compiled(resnet50.eval_step, mesh)
    found = resnet50.evaluate(step, state, images, config, mesh)
    assert list(found) == resnet50.metric_names(config)

    readable = [index for index in range(len(images)) if index != 4]
    logits = []
    for index in readable:
        pixels = images.example(index, np.random.default_rng(0))["image"]
        logits.append(pixels.mean((0, 1))[: len(images.classes)] / 128 - 1)
    logits = np.array(logits)
    labels = images.labels[readable]
    if objective == "multilabel":
        micro = sklearn_metrics.f1_score(labels, logits > 0, average="micro")
        assert found["f1_micro"] == pytest.approx(micro)
        likelihood = labels * np.log1p(np.exp(-logits)) + (1 - labels) * np.log1p(np.exp(logits))
        assert found["loss"] == pytest.approx(likelihood.mean(), rel=1e-5)
    else:
        predicted = images.scale.mean + images.scale.deviation * logits[:, 0]
        true = images.scale.mean + images.scale.deviation * labels
        assert found["pearson"] == pytest.approx(np.corrcoef(predicted, true)[0, 1], rel=1e-5)
        assert found["mse"] == pytest.approx(((predicted - true) ** 2).mean(), rel=1e-4)
        assert found["loss"] == pytest.approx(((logits[:, 0] - labels) ** 2).mean(), rel=1e-5)
    assert f"evaluated {len(readable)} of {len(images)} images" in capsys.readouterr().out


def test_losses_are_torchs():
    logits = torch.randn(5, 3)
    labels = (torch.rand(5, 3) < 0.5).float()
    config = replace(resnet50.Config(), objective="multilabel")
    expected = torch.nn.BCEWithLogitsLoss()(logits, labels)
    torch.testing.assert_close(resnet50.compute_losses(logits, labels, config).mean(), expected)

    config = replace(config, objective="regression")
    found = resnet50.compute_losses(logits[:, :1], labels[:, 0], config)
    torch.testing.assert_close(found.mean(), torch.nn.MSELoss()(logits[:, 0], labels[:, 0]))


def test_an_export_of_labels_loads_in_torchvision(listed, tmp_path, mesh):
    """Its names and its outputs are the run's."""
    images = imagenet.open_imagenet(
        str(listed), "eval", 32, False, Columns(("tags",), "multilabel", " ")
    )
    model = resnet.resnet("resnet50", 3)
    config = replace(resnet50.Config(), objective="multilabel", image_size=32)
    normalize = resnet.Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    state = resnet50.State(model, normalize, None)
    resnet50.export(str(tmp_path), state, resnet50.Data(images, images), config, mesh)

    file = tmp_path / "model.safetensors"
    theirs = torchvision.models.resnet50(num_classes=3)
    theirs.load_state_dict(safetensors.torch.load_file(file))
    _, about = files.load_with_metadata(str(file))
    assert about["objective"] == "multilabel"
    assert json.loads(about["classes"]) == ["blue", "green", "red"]

    pixels = torch.from_numpy(images.example(0, np.random.default_rng(0))["image"])[None]
    model.eval()
    with torch.no_grad():
        ours = resnet50.compute_logits(state, {"image": pixels}, mesh)
        expected = theirs.eval()(normalize(pixels))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# Labels in a CSV: reading


def open_both(data, columns: Columns | None = None) -> list[imagenet.Images]:
    """Opens both splits of pictures."""
    return [
        imagenet.open_imagenet(str(data), split, 32, False, columns) for split in ("train", "eval")
    ]


def names(images: imagenet.Images) -> list[str]:
    """Returns the names of the files of a data set."""
    return [Path(images.path(index)).name for index in range(len(images))]


def touch(folder: Path, *files: str) -> None:
    """Makes files with a picture."""
    for file in files:
        own_pictures.save_picture(make_picture(0), folder / file)


def numbered(count: int) -> list[str]:
    """Returns names of files."""
    return [f"{number}.png" for number in range(count)]


def test_a_tenth_is_held_out_by_name_whatever_the_order(listed, tmp_path):
    columns = Columns(("kind",))
    train, evaluation = open_both(listed, columns)

    assert len(train) == 108
    assert len(evaluation) == 12
    assert not set(names(train)) & set(names(evaluation))
    assert set(evaluation.labels) == {0, 1}

    turned = shutil.copytree(listed, tmp_path / "turned") / "mine.csv"
    header, *lines = (listed / "labels.csv").read_text().splitlines()
    turned.write_text("\n".join([header, *reversed(lines)]))
    _, again = open_both(turned, columns)
    assert sorted(names(again)) == sorted(names(evaluation))


def test_labels_are_those_of_their_files(listed):
    for split in open_both(listed, Columns(("kind",))):
        for index in range(len(split)):
            picture = make_picture(int(Path(split.path(index)).stem))
            assert split.classes[split.labels[index]] == picture.kind
            example = split.example(index, np.random.default_rng(0))
            assert example["label"] == split.labels[index]
            assert isinstance(example["label"], np.int64)

    for columns in (Columns(("tags",), "multilabel", " "), Columns(COLOURS, "multilabel")):
        for split in open_both(listed, columns):
            for index in range(len(split)):
                tags = make_picture(int(Path(split.path(index)).stem)).tags
                found = [split.classes[label] for label in np.flatnonzero(split.labels[index])]
                assert sorted(found) == sorted(tags)

    train, evaluation = open_both(listed, Columns(("weight",), "regression"))
    assert train.labels.mean() == pytest.approx(0, abs=1e-4)
    assert train.labels.std() == pytest.approx(1, abs=1e-4)
    for split in (train, evaluation):
        for index in range(len(split)):
            number = train.scale.to_labels(split.labels[index])
            expected = make_picture(int(Path(split.path(index)).stem)).weight
            assert number == pytest.approx(expected, rel=1e-5)


SPLITS = {
    "a column": (
        ["filename", "label", "split"],
        [
            ["a.png", "x", "train"],
            ["b.png", "y", "Training"],
            ["c.png", "x", "val"],
            ["d.png", "y", "test"],
        ],
        (["a.png", "b.png"], ["c.png"]),
        "trained on the split train of labels.csv, evaluated on its split for validation; "
        "left out: 1 rows of its split test",
    ),
    "a column without validation": (
        ["file", "label", "split"],
        [["a.png", "x", "train"], ["b.png", "y", "train"], ["d.png", "y", "test"]],
        (["a.png", "b.png"], ["d.png"]),
        "evaluated on its split test; left out: 1 pictures that labels.csv does not name",
    ),
    "folders": (
        ["file_name", "label"],
        [["train/a.png", "x"], ["train/b.png", "y"], ["valid/c.png", "x"]],
        (["a.png", "b.png"], ["c.png"]),
        "trained on the split train of labels.csv, evaluated on its split for validation",
    ),
}


@pytest.mark.parametrize("how", SPLITS)
def test_splits_are_a_columns_or_those_of_folders(how, tmp_path):
    header, rows, expected, said = SPLITS[how]
    touch(tmp_path, "a.png", "b.png", "c.png", "d.png")
    touch(tmp_path, "train/a.png", "train/b.png", "valid/c.png")
    write_csv(tmp_path / "labels.csv", header, rows)

    opened = open_both(tmp_path, Columns(("label",)))

    assert tuple(map(names, opened)) == expected
    assert said in splits.said(*opened)


def test_each_folder_may_have_a_csv_of_its_own(tmp_path):
    touch(tmp_path, "train/a.png", "train/b.png", "dev/a.png", "dev/more.png", "test/x.png")
    write_csv(tmp_path / "train/labels.csv", ["file", "label"], [["a.png", "1"], ["b.png", "10"]])
    write_csv(tmp_path / "dev/labels.csv", ["label", "file"], [["10", "a.png"]])

    train, evaluation = open_both(tmp_path)

    assert train.classes == ["1", "10"]
    assert evaluation.labels.tolist() == [1]
    said = splits.said(train, evaluation)
    assert "trained on train/labels.csv, evaluated on dev/labels.csv; left out: test/, " in said
    assert "1 pictures that labels.csv does not name" in said


def test_class_folders_come_before_a_csv_that_is_not_asked_for(tmp_path):
    write_classes(tmp_path / "train", 30)
    rows = [[f"train/{make_picture(n).kind}/{n:03d}.png", n] for n in range(30)]
    write_csv(tmp_path / "labels.csv", ["file", "number"], rows)

    folders = open_both(tmp_path)
    asked = open_both(tmp_path, Columns(("number",), "regression"))

    assert isinstance(folders[0], imagenet.ImageFolder)
    assert "left out: labels.csv (--label reads it)" in splits.said(*folders)
    assert isinstance(asked[0], imagenet.ListedImages)


def test_files_that_are_no_pictures_are_counted_and_named(tmp_path):
    """Of formats that are not read, or something else; not what systems leave, or hidden files."""
    write_classes(tmp_path / "train", 12)
    write_classes(tmp_path / "val", 12)
    for name in ("train/red/a.gif", "train/dark/in/b.heic", "val/red/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("train/red/Thumbs.db", "train/red/.hidden"):
        (tmp_path / name).touch()

    said = splits.said(*open_both(tmp_path))

    assert "left out: 2 files of train/ that are no pictures (dark/in/b.heic, red/a.gif)" in said
    assert "1 files of val/ that are no pictures (red/notes.txt)" in said


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_may_have_semicolons_or_tabs(separator, tmp_path):
    touch(tmp_path, "a.png", "b.png", "c.png")
    rows = ["file,label,split", "a.png,x,train", "b.png,y,train", "c.png,x,val"]
    text = "\n".join(rows).replace(",", separator)
    (tmp_path / "labels.csv").write_text(text)

    train, evaluation = open_both(tmp_path)

    assert train.classes == ["x", "y"]
    assert names(evaluation) == ["c.png"]


def test_names_are_found_in_another_unicode_form(tmp_path):
    touch(tmp_path, unicodedata.normalize("NFD", "é.png"), "b.png")
    name = unicodedata.normalize("NFC", "é.png")
    rows = [[name, "x", "train"], ["b.png", "y", "train"], ["./sub/../b2.png", "y", "val"]]
    touch(tmp_path, "b2.png")
    write_csv(tmp_path / "labels.csv", ["file", "label", "split"], rows)

    train, evaluation = open_both(tmp_path)

    assert train.example(0, np.random.default_rng(0))["label"] == 0
    assert names(evaluation) == ["b2.png"]


def test_a_class_of_one_picture_is_in_training_and_named(tmp_path):
    touch(tmp_path, *numbered(21))
    rows = [[name, "rare" if name == "7.png" else "usual"] for name in numbered(21)]
    write_csv(tmp_path / "labels.csv", ["file", "label"], rows)

    train, evaluation = open_both(tmp_path)

    assert "7.png" in names(train)
    assert evaluation.notes == train.notes
    assert train.notes == ["too few examples to be evaluated, in training only: rare"]


def test_a_data_set_of_a_csv_goes_to_workers(listed):
    train, _ = open_both(listed, Columns(("kind",)))

    copy = pickle.loads(pickle.dumps(train))

    np.testing.assert_equal(
        copy.example(3, np.random.default_rng(1)), train.example(3, np.random.default_rng(1))
    )


TWO = [["a.png", "x"], ["b.png", "y"]]
CLEAR = Columns()
LABELS = {"classes": Columns(("label",)), "regression": Columns(("label",), "regression")}
REFUSED = {
    "no column of files": (
        ["picture", "label"],
        TWO,
        CLEAR,
        "has no column of file names; expected",
    ),
    "other separators": (["file|label"], [["a.png|x"]], CLEAR, r"its header is file\|label"),
    "two columns of files": (
        ["file", "filename"],
        [["a.png", "a.png"]],
        CLEAR,
        "has 2 columns of file names",
    ),
    "a column twice": (["file", "x", "x"], [["a.png", "1", "2"]], CLEAR, "has 2 columns 'x'"),
    "no rows": (["file", "label"], [], CLEAR, "has no rows"),
    "a short row": (
        ["file", "label"],
        [*TWO, ["c.png"]],
        CLEAR,
        "line 4 has 1 cells; expected the 2",
    ),
    "files that are missing": (
        ["file", "label"],
        [*TWO, ["c.png", "x"], ["sub/d", "y"]],
        CLEAR,
        r"names 2 files that are not there, of 4: c.png, sub/d \(line 4\); names are relative to",
    ),
    "backslashes": (
        ["file", "label"],
        [*TWO, ["train\\a.png", "x"]],
        CLEAR,
        r"train\\a.png \(line 4\); .*; write / for \\ between folders",
    ),
    "a file twice": (
        ["file", "label"],
        [*TWO, ["./a.png", "y"]],
        CLEAR,
        "line 4 names ./a.png again, after line 2",
    ),
    "an empty name": (["file", "label"], [["", "x"]], CLEAR, "line 2 has no name in file"),
    "several columns": (
        ["file", "label", "price"],
        [["a.png", "x", "1"]],
        CLEAR,
        "has the columns file, label, price; name the one of the labels by --label",
    ),
    "no such column": (
        ["file", "label"],
        TWO,
        Columns(("price",)),
        "--label price is no column of labels in .*labels.csv; expected one of label",
    ),
    "the files as labels": (
        ["file", "label"],
        TWO,
        Columns(("file",)),
        "--label file is no column",
    ),
    "two columns of classes": (
        ["file", "x", "y"],
        [["a.png", "1", "0"]],
        Columns(("x", "y")),
        "--label names 2 columns; --objective classes takes one",
    ),
    "no truth": (
        ["file", "x", "y"],
        [["a.png", "1", "0"], ["b.png", "1", "2"]],
        Columns(("x", "y"), "multilabel"),
        "line 3 has '2' in y; expected 0 or 1",
    ),
    "one class": (["file", "label"], [["a.png", "x"], ["b.png", "x"]], CLEAR, "one class in label"),
    "an empty label": (["file", "label"], [*TWO[:1], ["b.png", ""]], CLEAR, "line 3 has no label"),
    "no separator": (
        ["file", "label"],
        TWO,
        Columns(("label",), "multilabel"),
        "line 2 has the text 'x' as its labels; .*--separator",
    ),
    "text as a number": (["file", "label"], TWO, LABELS["regression"], "line 2 has the label 'x'"),
    "one number": (
        ["file", "label", "split"],
        [["a.png", "3", "train"], ["b.png", "3", "train"], ["c.png", "4", "val"]],
        LABELS["regression"],
        "one value as label, 3",
    ),
    "a split that is none": (
        ["file", "label", "split"],
        [["a.png", "x", "train"], ["b.png", "y", "fold 3"]],
        CLEAR,
        "line 3 says no split in its column split; expected train, val or test",
    ),
    "a folder that is none": (
        ["file", "label"],
        [["train/a.png", "x"], ["b.png", "y"]],
        CLEAR,
        "line 3 says no split in the folders of its file, as others do",
    ),
    "no training": (
        ["file", "label", "split"],
        [["a.png", "x", "val"], ["b.png", "y", "test"]],
        CLEAR,
        "has no row of the split train; its rows say valid, test",
    ),
    "a class that training has not": (
        ["file", "label", "split"],
        [["a.png", "x", "train"], ["b.png", "y", "train"], ["train/a.png", "z", "val"]],
        CLEAR,
        "line 4 has the class 'z', which the training split does not have",
    ),
    "each picture a class": (["file", "label"], TWO, CLEAR, "cannot be split into training and"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_csv_that_cannot_be_used_is_refused(what, tmp_path):
    header, rows, columns, pattern = REFUSED[what]
    touch(tmp_path, "a.png", "b.png", "train/a.png")
    if "c.png" in str(rows) and "missing" not in what:
        touch(tmp_path, "c.png")
    write_csv(tmp_path / "labels.csv", header, rows)

    with pytest.raises(InputError, match=pattern) as error:
        imagenet.open_imagenet(str(tmp_path), "train", 32, False, columns)
    assert len(str(error.value).splitlines()) == 1


def test_a_csv_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "labels.csv").write_bytes("file,label\né.png,x\n".encode("latin-1"))

    with pytest.raises(InputError, match="labels.csv is not text in UTF-8 .*save it so"):
        open_both(tmp_path)


def test_two_places_of_csvs_are_refused(tmp_path):
    for path in (tmp_path / "labels.csv", tmp_path / "train/labels.csv"):
        write_csv(path, ["file", "label"], TWO)

    with pytest.raises(InputError, match="has labels.csv and train/labels.csv; keep one"):
        open_both(tmp_path)

    (tmp_path / "labels.csv").unlink()
    (tmp_path / "val").mkdir()
    with pytest.raises(InputError, match="has train/labels.csv, but no val/labels.csv; add it"):
        open_both(tmp_path)


@pytest.mark.parametrize("flags", ["--label kind", "--objective multilabel", "--separator ,"])
def test_flags_of_a_csv_need_one(flags, refused, tmp_path):
    data = write_classes(tmp_path / "pictures", 30)

    refused(resnet50, f"tiny --data {data} {flags}", "are for a labels.csv, which .* does not have")
    refused(resnet50, f"tiny {flags}", "are for a labels.csv; the images of --data synthetic")


def test_shards_are_not_made_of_a_csv(listed, tmp_path):
    from data.prepare import images

    touch(tmp_path, *numbered(20))
    rows = [[name, index % 2] for index, name in enumerate(numbered(20))]
    write_csv(tmp_path / "labels.csv", ["file", "label"], rows)

    with pytest.raises(InputError, match="has its labels in a CSV: train with it as it is"):
        images.prepare(tmp_path, tmp_path / "out")


def test_labels_to_evaluate_on_must_have_one(tmp_path, mesh):
    touch(tmp_path, *numbered(12))
    rows = []
    for index, name in enumerate(numbered(12)):
        rows.append([name, int(index < 6), 0 if index > 9 else 1, "val" if index > 9 else "train"])
    write_csv(tmp_path / "labels.csv", ["file", "x", "y", "split"], rows)
    config = own(tmp_path, tmp_path, label=("x", "y"), objective="multilabel", batch_size=8)

    with pytest.raises(InputError, match="no image of the evaluation split of .* has a label"):
        resnet50.main(config)


# Class folders without a split to evaluate on


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    for kind, count in (("cat", 40), ("dog", 20), ("eel", 2), ("fox", 1)):
        touch(tmp_path / "train" / kind, *numbered(count))
    touch(tmp_path, "lists/x.png")

    train, evaluation = open_both(tmp_path)

    assert train.classes == evaluation.classes == ["cat", "dog", "eel", "fox"]
    counts = np.bincount(evaluation._labels, minlength=4).tolist()
    assert counts == [4, 2, 1, 0]
    assert len(train) == 63 - 7
    paths = {train.path(index) for index in range(len(train))}
    paths |= {evaluation.path(index) for index in range(len(evaluation))}
    assert len(paths) == 63
    said = splits.said(train, evaluation)
    assert "trained on 56 of the 63 pictures of train/, evaluated on the other 7, held out" in said
    assert "left out: lists/" in said
    assert train.notes == ["too few examples to be evaluated, in training only: fox"]

    # One more changes no other picture's side.
    before = {evaluation.path(index) for index in range(len(evaluation))}
    touch(tmp_path / "train/cat", "new.png")
    _, after = open_both(tmp_path)
    assert len(before - {after.path(index) for index in range(len(after))}) <= 1


def test_class_folders_alone_are_the_training_images(tmp_path):
    write_classes(tmp_path / "pictures", 40)

    train, evaluation = open_both(tmp_path / "pictures")

    assert train.classes == ["dark", "red"]
    assert len(train) + len(evaluation) == 40
    for split in (train, evaluation):
        for index in range(len(split)):
            picture = make_picture(int(Path(split.path(index)).stem))
            assert split.classes[split._labels[index]] == picture.kind
            assert split.example(index, np.random.default_rng(0))["image"].any()


def test_pictures_without_folders_get_both_ways_to_name_classes(tmp_path):
    write_classes(tmp_path / "pictures", 4)
    for path in (tmp_path / "pictures").glob("*/*"):
        path.rename(tmp_path / path.name)
    shutil.rmtree(tmp_path / "pictures")

    with pytest.raises(InputError, match=r"or a labels.csv .* found 4 pictures without a class"):
        open_both(tmp_path)


def test_folders_of_folders_are_not_taken_for_classes(tmp_path):
    write_classes(tmp_path / "one", 10)
    write_classes(tmp_path / "two", 10, first=10)

    with pytest.raises(InputError, match="has no train/ folder; .*found one, two"):
        open_both(tmp_path)


def test_targets_are_what_a_csv_holds(listed):
    columns = Columns(("tags",), "multilabel", " ")
    tables = labelled_files.find_tables(str(listed))

    found = labelled_files.open_split(tables, "train", columns)

    assert found.target == targets.Target("multilabel", ("blue", "green", "red"))
    assert found.labels.dtype == np.float32
    assert found.labels.shape == (len(found.paths), 3)


# A finished run on other pictures


CLASSES = imagenet.Learned(targets.Target("classes", ("blue", "dark", "red")), Scale())


def opened_for(
    data: Path,
    split: str = "",
    is_own: bool = False,
    learned: imagenet.Learned = CLASSES,
    columns: Columns | None = None,
) -> imagenet.Images:
    """Returns the pictures that are evaluated."""
    return imagenet.open_evaluation(
        str(data), split, is_own, 32, False, columns or Columns(), learned
    )


def labels_of(images: imagenet.Images) -> dict[str, float]:
    """Returns the label of each picture, by its name; of a picture that is prepared for it."""
    rng = np.random.default_rng(0)
    found = {}
    for index in range(len(images)):
        found[Path(images.path(index)).stem] = images.example(index, rng)["label"].tolist()
        again = images.example(index, np.random.default_rng(1))["image"]
        assert (images.example(index, rng)["image"] == again).all()  # nothing is random
    return found


def kinds_of(first: int, count: int) -> dict[str, int]:
    """Returns the numbers of pictures' classes in CLASSES, by their names."""
    numbers = range(first, first + count)
    return {f"{n:03d}": {"dark": 1, "red": 2}[make_picture(n).kind] for n in numbers}


def test_class_folders_are_evaluated_by_the_names_of_classes(tmp_path):
    write_classes(tmp_path / "train", 8)
    write_classes(tmp_path / "val", 8, first=8)
    write_classes(tmp_path / "test", 8, first=16)
    write_classes(tmp_path / "new/mine", 8, first=24)

    assert labels_of(opened_for(tmp_path, is_own=True)) == kinds_of(8, 8)
    assert labels_of(opened_for(tmp_path)) == kinds_of(8, 8)
    assert labels_of(opened_for(tmp_path, "test", is_own=True)) == kinds_of(16, 8)
    assert labels_of(opened_for(tmp_path, "train", is_own=True)) == kinds_of(0, 8)
    assert labels_of(opened_for(tmp_path, "train")) == kinds_of(0, 8)
    assert labels_of(opened_for(tmp_path / "new/mine")) == kinds_of(24, 8)


def test_a_class_that_is_absent_is_fine_and_an_unknown_one_not(tmp_path):
    write_classes(tmp_path / "test", 8)
    shutil.rmtree(tmp_path / "test/red")
    assert set(labels_of(opened_for(tmp_path, "test")).values()) == {1}

    touch(tmp_path / "test/purple", "0.png")
    with pytest.raises(InputError, match="does not have: purple; it has blue, dark, red"):
        opened_for(tmp_path, "test")


def test_folders_without_the_split_are_refused(tmp_path):
    write_classes(tmp_path / "train", 8)
    with pytest.raises(InputError, match="no folder of the split valid, found train; .*--split"):
        opened_for(tmp_path)
    with pytest.raises(InputError, match="no folder of the split test"):
        opened_for(tmp_path, "test", is_own=True)
    with pytest.raises(InputError, match="has learned multilabel of a labels.csv"):
        learned = imagenet.Learned(targets.Target("multilabel", ("a",)), Scale())
        opened_for(tmp_path, learned=learned)


def test_the_splits_of_a_csv_are_those_of_a_training(listed):
    columns = Columns(("weight",), "regression")
    train, held = open_both(listed, columns)
    learned = imagenet.Learned(train.target, Scale(mean=1000.0, deviation=10.0))

    def names_of(split: str, is_own: bool) -> list[str]:
        return names(opened_for(listed, split, is_own, learned, columns))

    again = opened_for(listed, "train", True, learned, columns)
    weights = train.scale.to_labels(train.labels)
    np.testing.assert_allclose(learned.scale.to_labels(again.labels), weights, rtol=1e-5)
    assert names_of("", True) == names(held)
    assert names_of("valid", False) == names(held)
    assert names_of("train", True) == names(train)
    assert sorted(names_of("", False)) == sorted(names(train) + names(held))
    with pytest.raises(InputError, match="no row of the split test; its rows say no splits"):
        names_of("test", True)


def test_a_lone_csv_of_train_is_evaluated_on_its_tenth(listed, tmp_path):
    shutil.copytree(listed, tmp_path / "train")
    columns = Columns(("kind",))
    train, held = open_both(tmp_path, columns)
    learned = imagenet.Learned(train.target, train.scale)

    def names_of(split: str, is_own: bool = True) -> list[str]:
        return names(opened_for(tmp_path, split, is_own, learned, columns))

    assert (len(train), len(held)) == (108, 12)
    assert names_of("") == names_of("valid") == names_of("valid", is_own=False) == names(held)
    assert names_of("train") == names(train)
    with pytest.raises(InputError, match="no row of the split test"):
        names_of("test")
    with pytest.raises(InputError, match="of the split valid, only of train; give --split train"):
        names_of("", is_own=False)


def test_rows_of_a_csv_go_by_their_split(tmp_path):
    touch(tmp_path, *numbered(6))
    rows = [[name, "red", split] for name, split in zip(numbered(6), "ttvvee", strict=True)]
    words = {"t": "train", "v": "val", "e": "test"}
    rows = [[name, label, words[split]] for name, label, split in rows]
    write_csv(tmp_path / "labels.csv", ["file", "kind", "split"], rows)

    assert names(opened_for(tmp_path)) == ["2.png", "3.png"]
    assert names(opened_for(tmp_path, "train")) == ["0.png", "1.png"]
    assert names(opened_for(tmp_path, "test")) == ["4.png", "5.png"]


def write_run(run: Path, network: resnet.ResNet, images: imagenet.Images, mesh, **flags) -> None:
    """Writes a finished run, as far as an evaluation needs it."""
    state = resnet50.State(network, None, None)
    config = replace(resnet50.TINY, **SMALL, batch_size=8, norm_groups=4, **flags)
    resnet50.export(f"{run}/export", state, resnet50.Data(images, images), config, mesh)
    stored = {"config": json.loads(json.dumps(asdict(config)))}
    (run / "config.json").write_text(json.dumps(stored))
    (run / "summary.json").write_text("{}")


@pytest.mark.parametrize("objective", ["classes", "regression"])
def test_labels_of_another_column_are_not_evaluated(objective, tmp_path, mesh):
    """Nor where the classes have the same names, or where one other column is there."""
    for number, name in enumerate(numbered(16)):
        own_pictures.save_picture(make_picture(number), tmp_path / name)
    rows = [[name, index % 4] for index, name in enumerate(numbered(16))]
    trained = write_csv(tmp_path / "labels.csv", ["file", "stars"], rows)
    copied = write_csv(tmp_path / "copied.csv", ["file", "stars"], rows)
    other = write_csv(tmp_path / "other.csv", ["file", "price"], rows)
    rows = [[name, 99, index % 4] for index, name in enumerate(numbered(16))]
    both = write_csv(tmp_path / "both.csv", ["file", "price", "stars"], rows)
    columns = Columns((), objective)
    images, _ = open_both(trained, columns)
    run = tmp_path / "run"
    network = resnet.resnet("resnet_tiny", len(images.classes))
    write_run(run, network, images, mesh, data=str(trained), objective=objective)

    with pytest.raises(InputError, match="has no column stars, .* it has file, price: rename"):
        resnet50.main(resnet50.Config(evaluate=str(run), data=str(other)))
    expected = resnet50.main(resnet50.Config(evaluate=str(run), data=str(copied)))
    assert resnet50.main(resnet50.Config(evaluate=str(run), data=str(both))) == expected


def test_another_folder_is_evaluated_by_a_finished_run(tmp_path, mesh, capsys):
    """Each class is told by its colour: wrong are those of which the folder says another."""
    data = write_classes(tmp_path / "mine/test", 16)
    network = resnet.resnet("resnet_tiny", 3)
    images = imagenet.SyntheticImages(1, 32, 3, 0, "train")
    images.classes = list(CLASSES.target.names)
    run = tmp_path / "run"
    write_run(run, network, images, mesh)
    network.eval()

    flags = {"evaluate": str(run), "data": str(data.parent), "split": "test"}
    found = resnet50.main(resnet50.Config(**flags))

    opened = opened_for(data.parent, "test")
    rng = np.random.default_rng(0)
    examples = [opened.example(index, rng) for index in range(16)]
    pixels = torch.stack([torch.from_numpy(example["image"]) for example in examples])
    labels = torch.tensor([int(example["label"]) for example in examples])
    normalize = resnet.Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    with torch.no_grad():
        logits = network(normalize(pixels))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["top1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert "test/" in capsys.readouterr().out
