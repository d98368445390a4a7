"""data/imagenet.py on small files that the tests make; torchvision's own transforms and folder are the reference."""

import io
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from data import imagenet as im
from data import splits
from data.prepare import images
from errors import InputError


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Coarse random colours under fine noise: edges and detail, as in a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return Image.fromarray(np.asarray(coarse) // 2 + rng.integers(0, 100, (height, width, 3), dtype=np.uint8))


def save(path: Path, image: Image.Image | None = None, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(40, 50, len(path.name))).save(path, **options)
    return path


def generator(epoch: int, index: int) -> np.random.Generator:
    return np.random.default_rng((0, epoch, index))


def refused(message: str, data: object, split: str = "train") -> None:
    """Asserts that a data set is refused in one sentence."""
    with pytest.raises(InputError, match=message) as error:
        im.open_imagenet(str(data), split, 16)
    assert "\n" not in str(error.value)


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two classes, three pictures each for training and two each for evaluation."""
    for split, count, seed in (("train", 3, 0), ("val", 2, 50)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                image = picture(60, 80, seed + 10 * label + number)
                save(tmp_path / "tree" / split / name / f"{number}.jpg", image)
    return tmp_path / "tree"


def encoded(mode: str, form: str, image: Image.Image | None = None, **options) -> bytes:
    file = io.BytesIO()
    (image or picture(33, 47)).convert(mode).save(file, form, **options)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6  # orientation: turn by 90 degrees to show it


FAST = {
    "rgb jpeg": lambda: encoded("RGB", "JPEG"),
    "progressive jpeg": lambda: encoded("RGB", "JPEG", progressive=True),
    "grey jpeg": lambda: encoded("L", "JPEG"),
    "cmyk jpeg": lambda: encoded("CMYK", "JPEG"),
}
FILES = FAST | {
    "ycck jpeg": lambda: encoded("CMYK", "JPEG").replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2"),
    "jpeg with exif orientation": lambda: encoded("RGB", "JPEG", exif=EXIF),
    "jpeg with bytes after its end": lambda: encoded("RGB", "JPEG") + b"more",
    "png": lambda: encoded("RGB", "PNG"),
    "png with palette": lambda: encoded("P", "PNG"),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_decodes_to_the_pixels_of_pillow_and_most_jpegs_without_it(kind, monkeypatch):
    data = FILES[kind]()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    if kind in FAST:
        monkeypatch.setattr(im.Image, "open", lambda *_: pytest.fail("decoded by Pillow"))
    pixels = im.decode(data)
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 33, 47)
    assert np.abs(pixels.numpy().astype(int) - expected).max() <= 2  # equal on the libraries pinned; others may round


@pytest.mark.parametrize("kind", [*FAST, "png"])
def test_a_truncated_file_is_noticed(kind):
    data = FILES[kind]()
    for size in (0.3 * len(data), 0.6 * len(data), 0.95 * len(data), len(data) - 2 if kind == "rgb jpeg" else 100):
        with pytest.raises(im.BrokenImage, match=r"truncated|Truncated"):
            im.decode(data[: int(size)])


@pytest.mark.parametrize("height,width", [(150, 200), (64, 64), (30, 200), (400, 10), (1, 50)])
def test_crops_are_those_that_torchvision_draws_with_the_same_random_numbers(height, width):
    """Of a very long picture both take the middle, since no draw fits."""
    drawn = SimpleNamespace(
        uniform=lambda low, high: torch.empty(1).uniform_(low, high).item(),
        integers=lambda high: torch.randint(high, (1,)).item(),
    )
    for seed in range(100):
        torch.manual_seed(seed)
        theirs = transforms.RandomResizedCrop.get_params(torch.zeros(1, height, width), (0.08, 1.0), (3 / 4, 4 / 3))
        torch.manual_seed(seed)
        assert im.random_crop(height, width, drawn) == theirs, seed


def assert_same_but_for_rounding(ours: np.ndarray, theirs: Image.Image, size: int) -> None:
    difference = np.abs(ours.astype(int) - np.asarray(theirs))
    assert difference.max() <= 1 and difference.mean() < 0.05
    assert ours.flags.c_contiguous and ours.dtype == np.uint8 and ours.shape == (size, size, 3)


@pytest.mark.parametrize("height,width", [(300, 400), (411, 260), (64, 64), (23, 31), (30, 200)])
def test_a_training_crop_is_what_torchvision_makes_of_the_same_parameters(height, width):
    image = picture(height, width)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    flips = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        top, left, h, w = im.random_crop(height, width, rng)
        expected = transforms.functional.resized_crop(image, top, left, h, w, [64, 64])
        if rng.random() < 0.5:
            expected, flips = transforms.functional.hflip(expected), flips + 1
        assert_same_but_for_rounding(im.train_crop(pixels, 64, np.random.default_rng(seed)), expected, 64)
    assert 4 <= flips <= 16


@pytest.mark.parametrize("height,width", [(300, 400), (411, 260), (256, 256), (256, 301), (70, 90), (100, 487)])
@pytest.mark.parametrize("size", [224, 32])
def test_evaluation_equals_torchvision_on_pillow_images(height, width, size):
    image = picture(height, width)
    reference = transforms.Compose([transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)])
    ours = im.eval_crop(torch.from_numpy(np.array(image)).permute(2, 0, 1), size)
    assert_same_but_for_rounding(ours, reference(image), size)


def test_the_mean_and_standard_deviation_are_those_of_torchvision_times_255():
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    np.testing.assert_allclose(im.IMAGENET_MEAN, np.array(weights.mean) * 255, rtol=1e-6)
    np.testing.assert_allclose(im.IMAGENET_STD, np.array(weights.std) * 255, rtol=1e-6)


@pytest.mark.parametrize(("split", "length"), [("train", 6), ("eval", 4)])
def test_equal_seed_epoch_and_index_give_equal_bytes_and_another_epoch_other_ones_in_training_only(tree, split, length):
    real, twin = im.open_imagenet(str(tree), split, 32), im.SyntheticImages(20, 32, 10, 0, split)
    assert isinstance(real, im.ImageFolder) and (len(real), real.classes) == (length, ["cat", "dog"])
    assert (len(twin), len(twin.classes)) == (20, 10) and twin.image_size == real.image_size == 32
    for dataset, labels in ((real, [0] * (length // 2) + [1] * (length // 2)), (twin, [0, 1, 2, 3])):
        copy = pickle.loads(pickle.dumps(dataset))
        for index, label in enumerate(labels):
            first, again = (one.example(index, generator(3, index)) for one in (dataset, copy))
            np.testing.assert_equal(first, again)
            changed = first["image"] != dataset.example(index, generator(4, index))["image"]
            assert changed.mean() > 0.5 if split == "train" else not changed.any()
            assert set(first) == {"image", "label"} and first["image"].flags.c_contiguous
            assert (first["image"].dtype, first["image"].shape) == (np.uint8, (32, 32, 3))
            assert isinstance(first["label"], np.int64) and first["label"] == label


def test_files_labels_and_order_are_those_of_torchvision_without_hidden_ones(tmp_path):
    names = ["b/2.JPEG", "b/1.jpg", "b/deep/er/3.Png", "b/deep/0.webp", "b/a b é ü 日本.jpg", "b/note.txt"]
    names += ["A/x.bmp", "ü ber/1.PNG", "c/10.jpeg", "c/9.jpeg", "c/.jpg/9.jpg"]
    for number, name in enumerate(names):  # one is a PNG named .jpg
        form = "PNG" if name in ("b/note.txt", "b/1.jpg") else None
        save(tmp_path / "train" / name, picture(20 + number, 30), format=form)
    save(tmp_path / "elsewhere/0.jpg", picture(50, 30))
    for link in ("d", "A/more"):  # a class, and a folder below one
        (tmp_path / "train" / link).symlink_to(tmp_path / "elsewhere")
    reference = torchvision.datasets.ImageFolder(tmp_path / "train")
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    (tmp_path / "train/b/._1.jpg").write_bytes(b"what macOS leaves beside 1.jpg")
    dataset = im.open_imagenet(str(tmp_path), "train", 16)
    assert dataset.classes == reference.classes
    ours = [dataset._read(index)[:0:-1] for index in range(len(dataset))]
    assert ours == [(path, label) for path, label in reference.samples] and len(ours) == 12
    assert len({dataset.example(i, generator(0, i))["image"].tobytes() for i in range(len(dataset))}) == len(dataset)


@pytest.mark.parametrize("name", ["val", "valid", "Validation", "dev", "my_val_set", "val2017"])
def test_test_images_are_evaluated_on_only_where_there_are_none_for_validation(tree, name):
    shutil.copytree(tree / "train", tree / "test")
    (tree / "val").rename(tree / name)
    (tree / "lists").mkdir()
    (tree / "train").rename(tree / "Training")
    opened = [im.open_imagenet(str(tree), split, 16) for split in ("train", "eval")]
    assert [Path(one.folder).name for one in opened] == ["Training", name]
    assert splits.said(*opened) == f" (trained on Training/, evaluated on {name}/; left out: lists/, test/)"
    shutil.rmtree(tree / name)
    opened = [im.open_imagenet(str(tree), split, 16) for split in ("train", "eval")]
    assert splits.said(*opened) == " (trained on Training/, evaluated on test/; left out: lists/)"


def test_two_folders_for_validation_are_refused(tree):
    shutil.copytree(tree / "val", tree / "valid")
    refused("tree has val, valid, which all say the valid split; keep one, or rename", tree)


def test_shards_in_the_folder_of_their_images_are_not_read_a_second_time(tmp_path, cache, capsys):
    data = write(tmp_path / "tables", FLAT, rows(4), rows(2))
    images.prepare(data)
    said = " (trained on its split train, evaluated on its split validation)"
    assert said.strip(" ()") in capsys.readouterr().out
    for place in (data, f"{data}/prepared"):
        opened = [im.open_imagenet(place, split, 32) for split in ("train", "eval")]
        assert [len(one) for one in opened] == [4, 2]
        assert splits.said(*opened).startswith(" (trained on its split train, evaluated on its split valid")


def test_a_million_names_travel_in_few_bytes(tmp_path):
    (tmp_path / "train/n01440764").mkdir(parents=True)
    # One long name must not widen the others.
    for name in [f"n01440764_{number}.JPEG" for number in range(1000)] + ["long" * 50 + ".jpg"]:
        (tmp_path / "train/n01440764" / name).touch()
    dataset = im.open_imagenet(str(tmp_path), "train", 224)
    assert len(pickle.dumps(dataset)) / len(dataset) < 40


BREAK = {
    "the file is empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "not an image in a known format": lambda path: path.write_text("<html>404 not found</html>"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_file_is_named_with_what_is_wrong_and_what_to_do(tree, how):
    BREAK[how](tree / "train/cat/1.jpg")
    dataset = im.open_imagenet(str(tree), "train", 16)
    dataset.example(0, generator(0, 0))
    with pytest.raises(InputError, match=f"train/cat/1.jpg is broken: .*{how}.*--skip-broken"):
        dataset.example(1, generator(0, 1))


def skipping(tree, split: str = "train", indices=range(6), epochs=(0,)) -> list[dict]:
    dataset = im.open_imagenet(str(tree), split, 16, skip_broken=True)
    return [dataset.example(index, generator(epoch, index)) for epoch in epochs for index in indices]


def test_skipping_replaces_broken_files_counts_them_and_leaves_all_other_examples_as_they_were(tree):
    before = skipping(tree)
    for path in (tree / "train" / "cat").iterdir():
        BREAK["truncated"](path)
    with pytest.warns(UserWarning, match=r"train/cat/\d.jpg is broken"):
        after, again = (skipping(tree, epochs=range(20)) for _ in range(2))
    np.testing.assert_equal(after, again)
    np.testing.assert_equal(after[3:6], before[3:])
    for index, example in enumerate(before + after):
        assert example.keys() == {"image", "label", "skipped"} and isinstance(example["skipped"], np.int64)
        assert (example["skipped"] > 0) == (index >= 6 and index % 6 < 3), index
    for old, new in zip(before[:3], after[:3], strict=True):
        assert new["label"] == 1 and new["image"].any() and (old["image"] != new["image"]).any()
    counts = {int(example["skipped"]) for example in after[::6]}  # every broken file that was met
    assert min(counts) == 1 < max(counts)


def test_a_broken_file_in_evaluation_is_masked_by_its_label(tree):
    (tree / "val" / "dog" / "0.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match="val/dog/0.jpg"):
        examples = skipping(tree, "eval", range(4))
    found = [(int(example["label"]), int(example["skipped"])) for example in examples]
    assert found == [(0, 0), (0, 0), (-1, 1), (1, 0)] and isinstance(examples[2]["label"], np.int64)
    assert examples[2]["image"].shape == (16, 16, 3) and examples[2]["image"].flags.c_contiguous


@pytest.mark.filterwarnings("ignore:skipped")
def test_skipping_ends_where_everything_is_broken_or_a_file_cannot_be_read(tree):
    dataset = im.open_imagenet(str(tree), "train", 16, skip_broken=True)
    for path in (tree / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="100 images drawn in a row are broken"):
        dataset.example(0, generator(0, 0))
    (tree / "train" / "cat" / "0.jpg").unlink()
    with pytest.raises(InputError, match=r"train/cat/0.jpg cannot be read: No such file"):
        dataset.example(0, generator(0, 0))


# The split, what is lost, what is put, and the message.
WRONG = [
    ("train", ["train"], [], "tree has no train/ folder; expected .*found val"),
    ("eval", ["val"], [], "no folder to evaluate on; expected one of val, validation, test"),
    ("train", ["train"], ["train/.hidden/1.jpg"], "tree/train has no class folders"),
    ("train", ["train"], ["train/1.jpg"], "tree/train has images but no class folders"),
    ("train", [], ["train/eel/.1.jpg"], "tree/train/eel has no images"),
    ("eval", ["val/dog"], [], "tree/val lacks classes.*dog"),
    ("eval", [], ["val/eel/1.jpg"], "tree/val adds classes.*eel"),
]


@pytest.mark.parametrize("split, lost, added, message", WRONG)
def test_a_wrong_tree_gives_one_clear_sentence(tree, split, lost, added, message):
    assert all(len(im.open_imagenet(str(tree), one, 16)) > 0 for one in ("train", "eval"))
    for name in lost:
        shutil.rmtree(tree / name)
    for name in added:
        save(tree / name)
    refused(message, tree, split)


def test_what_cannot_be_opened_is_named_without_asking_the_hub(tree, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the hub"))
    for folder in (tree, ".", "~"):
        refused("there is no folder .*nothing here; expected", f"{folder}/nothing here")
    refused("0.jpg is a file; expected a folder", tree / "val/cat/0.jpg")


@pytest.mark.parametrize("unreadable", ["", "train", "train/cat", "train/cat/nested"])
def test_a_folder_without_permission_is_named(tree, monkeypatch, unreadable):
    # by a patch, since root may read everything; os.walk lists folders with os.scandir too
    save(tree / "train" / "cat" / "nested" / "4.jpg")
    scandir, closed = im.os.scandir, tree / unreadable

    def guarded(path="."):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(im.os, "scandir", guarded)
    refused(f"folder {closed} cannot be read: Permission denied", tree)


def rows(count: int, labels: list | None = None, image="image", label="label", kind=None, cut=()) -> datasets.Dataset:
    """Pictures with labels 0, 1, 0, … in a table; those of the rows `cut` are truncated."""
    files = [encoded("RGB", "JPEG", picture(60, 80, number)) for number in range(count)]
    files = [{"bytes": file[:-100] if row in cut else file, "path": None} for row, file in enumerate(files)]
    labels = labels or [number % 2 for number in range(count)]
    features = datasets.Features({image: datasets.Image(), label: kind or datasets.ClassLabel(names=["cat", "dog"])})
    return datasets.Dataset.from_dict({image: files, label: labels}, features=features)


def write(folder: Path, form: str, train: datasets.Dataset, evaluation: datasets.Dataset, name="validation") -> str:
    folder.mkdir()
    if form == "save_to_disk":
        datasets.DatasetDict({"train": train, name: evaluation}).save_to_disk(folder)
    else:
        for split, table in (("train", train), (name, evaluation)):
            path = folder / form.format(split)
            path.parent.mkdir(exist_ok=True)
            table.to_parquet(path)
    return str(folder)


FLAT = "{}-00000-of-00001.parquet"


@pytest.mark.parametrize("form", [FLAT, "{}/0.parquet", "save_to_disk"])
def test_tables_give_the_same_examples_as_a_tree_of_the_same_files(tmp_path, cache, form):
    train, evaluation = rows(4), rows(2)
    for split, table in (("train", train), ("val", evaluation)):
        for number, row in enumerate(table.cast_column("image", datasets.Image(decode=False))):
            path = tmp_path / "tree" / split / ("cat", "dog")[row["label"]] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["image"]["bytes"])
    data = write(tmp_path / "tables", form, train.sort("label"), evaluation.sort("label"))
    for split, length in (("train", 4), ("eval", 2)):
        dataset, tree = (im.open_imagenet(path, split, 32) for path in (data, str(tmp_path / "tree")))
        assert type(dataset).__name__ == "HubImages" and isinstance(tree, im.ImageFolder)
        assert len(dataset) == length and dataset.classes == ["cat", "dog"] and dataset.image_size == 32
        pickled = pickle.dumps(dataset)
        assert len(pickled) < sum(len(dataset._read(index)[0]) for index in range(length)), "tables travel along"
        for index in range(length):
            ours, copied, theirs = (
                one.example(index, generator(0, index)) for one in (dataset, pickle.loads(pickled), tree)
            )
            assert set(ours) == {"image", "label"} and isinstance(ours["label"], np.int64)
            np.testing.assert_equal([ours, copied], [theirs, theirs])


def test_integer_labels_and_other_column_names_are_found(tmp_path, cache):
    names = {"image": "photo", "label": "fine_label", "kind": datasets.Value("int32")}
    train, evaluation = rows(6, [0, 4, 2, 2, 0, 1], **names).add_column("width", [80] * 6), rows(3, [2, 1, 1], **names)
    dataset = im.open_imagenet(write(tmp_path / "tables", "save_to_disk", train, evaluation, "test"), "eval", 16)
    assert dataset.classes == ["0", "1", "2", "3", "4"]  # those of train, though evaluation has fewer
    assert [dataset.example(index, generator(0, 0))["label"] for index in range(3)] == [2, 1, 1]
    # Of several the usual name is taken.
    table = rows(4, label="fine_label").add_column("coarse", [0] * 4, feature=datasets.ClassLabel(names=["animal"]))
    table = table.select_columns(["coarse", "image", "fine_label"])
    data = write(tmp_path / "several", "save_to_disk", table, table)
    assert im.open_imagenet(data, "train", 16).classes == ["cat", "dog"]


def test_a_broken_row_is_named_or_skipped(tmp_path, cache):
    data = write(tmp_path / "tables", "save_to_disk", rows(4, cut=[2]), rows(2))
    with pytest.raises(InputError, match=r"row 2 of .*tables, split train is broken: .*truncated.*--skip-broken"):
        im.open_imagenet(data, "train", 16).example(2, generator(0, 2))
    with pytest.warns(UserWarning, match="row 2 of"):
        assert skipping(data, indices=[2])[0]["skipped"] >= 1


def test_unusable_tables_give_one_clear_sentence(tmp_path, cache):
    def check(message: str, train=None, test=None, form="save_to_disk", split="eval") -> None:
        tables = [rows(4) if table is None else table for table in (train, test)]
        refused(message, write(tmp_path / str(len(os.listdir(tmp_path))), form, *tables, "test"), split)

    text = rows(4).remove_columns("image").add_column("text", ["a"] * 4)
    check("split train has no image column .*label .int64., text .string.", text, split="train")
    kind = rows(4, label="kind", kind=datasets.Value("int64"))
    check("split train has no label column .*image .*kind .int64.", kind, split="train")
    check("split test has the label -1; expected labels 0 to 1", test=rows(4, [-1] * 4))
    check("cannot be read by datasets: .*test.* no data", test=rows(4).select([]), form=FLAT)  # not kept by the other
    for names, message in ((["cat", "eel"], "lacks classes.*dog"), (["dog", "cat"], "has .* in another order")):
        check(f"split test {message}", test=rows(4, kind=datasets.ClassLabel(names=names)))
    extra = write(tmp_path / "extra", "save_to_disk", rows(2), rows(2), "extra")
    refused("has the splits train, extra; expected train, and one of val, valid", extra, "eval")
    rows(2).save_to_disk(tmp_path / "single")
    refused("single is a single split", tmp_path / "single", "eval")
    damaged = write(tmp_path / "damaged", FLAT, rows(2), rows(2))
    Path(damaged, FLAT.format("train")).write_bytes(b"PAR1 and nothing else")
    refused("damaged cannot be read by datasets: ", damaged, "eval")


def test_a_hub_id_is_loaded_and_one_out_of_reach_gives_one_clear_sentence(monkeypatch):
    asked = []

    def load(name):
        asked.append(name)
        if name == "owner/away":
            raise ConnectionError("Couldn't reach 'owner/away' on the Hub\nand a second line")
        return datasets.DatasetDict(train=rows(4), test=rows(2))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(im.open_imagenet("cifar10", "eval", 16)) == 2
    assert len(im.open_imagenet("owner/set-1.0", "train", 16)) == 4 and asked == ["cifar10", "owner/set-1.0"]
    refused("owner/away is neither a folder nor a data set of the hub: .*reach", "owner/away")


def batch(count: int, *arguments) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of synthetic data."""
    dataset = im.SyntheticImages(2000, 32, 10, *arguments)
    examples = [dataset.example(index, generator(0, index)) for index in range(count)]
    return np.stack([example["image"] for example in examples]), np.array([example["label"] for example in examples])


def test_twins_of_another_seed_or_split_are_others_and_raw_pixels_do_not_tell_their_classes_apart():
    images, labels = batch(1000, 0)
    assert np.bincount(labels).tolist() == [100] * 10
    evaluated, classes = batch(300, 0, "eval")
    for other in (evaluated[:8], batch(8, 1)[0]):
        assert (images[:8] != other).mean() > 0.9
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    distance = ((evaluated[:, None].astype(np.float32) - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == classes).mean() < 0.3  # chance 0.1; without the shifts above 0.9
