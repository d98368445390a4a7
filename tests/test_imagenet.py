"""data/imagenet.py on small files that the tests make.

torchvision's own transforms and folder are the reference.
"""

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
from image_files import (
    CLASSES,
    FLAT,
    encoded,
    generator,
    image_table,
    picture,
    save,
    skipping,
    write_tables,
    write_tree,
)
from PIL import Image
from torchvision import transforms

from data import imagenet as im
from data import splits
from data.prepare import images
from errors import InputError


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "tree")


def refused(message: str, data: object, split: str = "train") -> None:
    """Asserts that a data set is refused in one sentence."""
    with pytest.raises(InputError, match=message) as error:
        im.open_imagenet(str(data), split, 16)
    assert "\n" not in str(error.value)


def open_both(data: object, size: int = 16) -> list[im.Images]:
    """Returns the training and the evaluation split."""
    return [im.open_imagenet(str(data), split, size) for split in ("train", "eval")]


def channels_first(image: Image.Image) -> torch.Tensor:
    """Returns a picture as `decode` does, uint8 [3, height, width]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# ---- decoding ----------------------------------------------------------------------------------
EXIF = Image.Exif()
EXIF[0x0112] = 6  # orientation: turn by 90 degrees to show it


def ycck_jpeg() -> bytes:
    """Returns a JPEG of four channels whose marker says YCCK."""
    cmyk = encoded("CMYK", "JPEG")
    return cmyk.replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2")


DECODED_WITHOUT_PILLOW = {
    "rgb jpeg": lambda: encoded("RGB", "JPEG"),
    "progressive jpeg": lambda: encoded("RGB", "JPEG", progressive=True),
    "grey jpeg": lambda: encoded("L", "JPEG"),
    "cmyk jpeg": lambda: encoded("CMYK", "JPEG"),
}
FILES = DECODED_WITHOUT_PILLOW | {
    "ycck jpeg": ycck_jpeg,
    "jpeg with exif orientation": lambda: encoded("RGB", "JPEG", exif=EXIF),
    "jpeg with bytes after its end": lambda: encoded("RGB", "JPEG") + b"more",
    "png": lambda: encoded("RGB", "PNG"),
    "png with palette": lambda: encoded("P", "PNG"),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_of_file_decodes_to_pillows_pixels(kind, monkeypatch):
    data = FILES[kind]()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    expected = np.asarray(image).transpose(2, 0, 1)
    if kind in DECODED_WITHOUT_PILLOW:
        monkeypatch.setattr(im.Image, "open", lambda *_: pytest.fail("decoded by Pillow"))

    pixels = im.decode(data)

    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 33, 47)
    difference = np.abs(pixels.numpy().astype(int) - expected)
    assert difference.max() <= 2  # equal on the libraries pinned; others may round


@pytest.mark.parametrize("kind", [*DECODED_WITHOUT_PILLOW, "png"])
def test_a_truncated_file_is_noticed(kind):
    data = FILES[kind]()
    last = len(data) - 2 if kind == "rgb jpeg" else 100

    for size in (0.3 * len(data), 0.6 * len(data), 0.95 * len(data), last):
        with pytest.raises(im.BrokenImage, match=r"truncated|Truncated"):
            im.decode(data[: int(size)])


# ---- crops -------------------------------------------------------------------------------------
@pytest.mark.parametrize("height,width", [(150, 200), (64, 64), (30, 200), (400, 10), (1, 50)])
def test_crops_are_those_torchvision_draws_with_equal_numbers(height, width):
    """Of a very long picture both take the middle, since no draw fits."""
    drawn = SimpleNamespace(
        uniform=lambda low, high: torch.empty(1).uniform_(low, high).item(),
        integers=lambda high: torch.randint(high, (1,)).item(),
    )
    image = torch.zeros(1, height, width)

    for seed in range(100):
        torch.manual_seed(seed)
        theirs = transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        torch.manual_seed(seed)
        assert im.random_crop(height, width, drawn) == theirs, seed


def assert_same_but_for_rounding(ours: np.ndarray, theirs: Image.Image, size: int) -> None:
    difference = np.abs(ours.astype(int) - np.asarray(theirs))
    assert difference.max() <= 1
    assert difference.mean() < 0.05
    assert ours.flags.c_contiguous
    assert ours.dtype == np.uint8
    assert ours.shape == (size, size, 3)


@pytest.mark.parametrize("height,width", [(300, 400), (411, 260), (64, 64), (23, 31), (30, 200)])
def test_a_training_crop_is_torchvisions_of_equal_parameters(height, width):
    image = picture(height, width)
    pixels = channels_first(image)
    flips = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        top, left, crop_height, crop_width = im.random_crop(height, width, rng)
        expected = transforms.functional.resized_crop(
            image, top, left, crop_height, crop_width, [64, 64]
        )
        if rng.random() < 0.5:
            expected = transforms.functional.hflip(expected)
            flips += 1

        found = im.train_crop(pixels, 64, np.random.default_rng(seed))

        assert_same_but_for_rounding(found, expected, 64)
    assert 4 <= flips <= 16


@pytest.mark.parametrize(
    "height,width", [(300, 400), (411, 260), (256, 256), (256, 301), (70, 90), (100, 487)]
)
@pytest.mark.parametrize("size", [224, 32])
def test_evaluation_equals_torchvision_on_pillow_images(height, width, size):
    image = picture(height, width)
    resize = transforms.Resize(round(size * 256 / 224))
    reference = transforms.Compose([resize, transforms.CenterCrop(size)])

    found = im.eval_crop(channels_first(image), size)

    assert_same_but_for_rounding(found, reference(image), size)


def test_mean_and_standard_deviation_are_torchvisions_times_255():
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()

    np.testing.assert_allclose(im.IMAGENET_MEAN, np.array(weights.mean) * 255, rtol=1e-6)
    np.testing.assert_allclose(im.IMAGENET_STD, np.array(weights.std) * 255, rtol=1e-6)


# ---- examples of a tree ------------------------------------------------------------------------
def assert_examples_repeat(dataset: im.Images, labels: list[int], epochs_differ: bool) -> None:
    """Asserts that seed, epoch and index decide an example's bytes, in another process too."""
    copy = pickle.loads(pickle.dumps(dataset))
    for index, label in enumerate(labels):
        first = dataset.example(index, generator(3, index))
        again = copy.example(index, generator(3, index))
        np.testing.assert_equal(first, again)

        other_epoch = dataset.example(index, generator(4, index))
        changed = first["image"] != other_epoch["image"]
        if epochs_differ:
            assert changed.mean() > 0.5
        else:
            assert not changed.any()

        assert set(first) == {"image", "label"}
        assert first["image"].flags.c_contiguous
        assert first["image"].dtype == np.uint8
        assert first["image"].shape == (32, 32, 3)
        assert isinstance(first["label"], np.int64)
        assert first["label"] == label


@pytest.mark.parametrize(
    ("split", "labels"), [("train", [0, 0, 0, 1, 1, 1]), ("eval", [0, 0, 1, 1])]
)
def test_seed_epoch_and_index_decide_a_trees_examples(tree, split, labels):
    dataset = im.open_imagenet(str(tree), split, 32)

    assert isinstance(dataset, im.ImageFolder)
    assert len(dataset) == len(labels)
    assert dataset.classes == ["cat", "dog"]
    assert dataset.image_size == 32
    assert_examples_repeat(dataset, labels, epochs_differ=split == "train")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_seed_epoch_and_index_decide_synthetic_examples(split):
    dataset = im.SyntheticImages(20, 32, 10, 0, split)

    assert len(dataset) == 20
    assert len(dataset.classes) == 10
    assert dataset.image_size == 32
    assert_examples_repeat(dataset, [0, 1, 2, 3], epochs_differ=split == "train")


def test_a_trees_files_and_order_are_torchvisions_without_hidden(tmp_path):
    names = [
        "b/2.JPEG",
        "b/1.jpg",
        "b/deep/er/3.Png",
        "b/deep/0.webp",
        "b/a b é ü 日本.jpg",
        "b/note.txt",
        "A/x.bmp",
        "ü ber/1.PNG",
        "c/10.jpeg",
        "c/9.jpeg",
        "c/.jpg/9.jpg",
    ]
    train = tmp_path / "train"
    for number, name in enumerate(names):  # one is a PNG named .jpg
        form = "PNG" if name in ("b/note.txt", "b/1.jpg") else None
        save(train / name, picture(20 + number, 30), format=form)
    save(tmp_path / "elsewhere/0.jpg", picture(50, 30))
    (train / "d").symlink_to(tmp_path / "elsewhere")  # a class
    (train / "A/more").symlink_to(tmp_path / "elsewhere")  # a folder below one
    reference = torchvision.datasets.ImageFolder(train)
    (tmp_path / "val").mkdir()  # or a tenth of the training images would be held out
    (train / ".ipynb_checkpoints").mkdir()
    (train / "b/._1.jpg").write_bytes(b"what macOS leaves beside 1.jpg")

    dataset = im.open_imagenet(str(tmp_path), "train", 16)

    found = []
    pictures = set()
    for index in range(len(dataset)):
        _, label, path = dataset._read(index)
        found.append((path, label))
        pictures.add(dataset.example(index, generator(0, index))["image"].tobytes())
    assert dataset.classes == reference.classes
    assert found == reference.samples
    assert len(found) == 12
    assert len(pictures) == 12


# ---- splits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["val", "valid", "Validation", "dev", "my_val_set", "val2017"])
def test_test_images_are_evaluated_on_only_without_validation(tree, name):
    shutil.copytree(tree / "train", tree / "test")
    (tree / "val").rename(tree / name)
    (tree / "lists").mkdir()
    (tree / "train").rename(tree / "Training")

    opened = open_both(tree)
    assert [Path(dataset.folder).name for dataset in opened] == ["Training", name]
    used = f"trained on Training/, evaluated on {name}/"
    assert splits.said(*opened) == f" ({used}; left out: lists/, test/)"

    shutil.rmtree(tree / name)
    used = "trained on Training/, evaluated on test/"
    assert splits.said(*open_both(tree)) == f" ({used}; left out: lists/)"


def test_two_folders_for_validation_are_refused(tree):
    shutil.copytree(tree / "val", tree / "valid")
    refused(
        "tree has val, valid, which all say the valid split; keep one, or rename",
        tree,
    )


def test_shards_beside_their_images_are_not_read_twice(tmp_path, cache, capsys):
    data = write_tables(tmp_path / "tables", FLAT, image_table(4), image_table(2))

    images.prepare(data)

    said = "trained on its split train, evaluated on its split validation"
    assert said in capsys.readouterr().out
    for folder in (data, f"{data}/prepared"):
        opened = open_both(folder, size=32)
        assert [len(dataset) for dataset in opened] == [4, 2]
        said = " (trained on its split train, evaluated on its split valid"
        assert splits.said(*opened).startswith(said)


def test_a_million_names_travel_in_few_bytes(tmp_path):
    folder = tmp_path / "train/n01440764"
    folder.mkdir(parents=True)
    for number in range(1000):
        (folder / f"n01440764_{number}.JPEG").touch()
    one_long_name = "long" * 50 + ".jpg"  # must not widen the others
    (folder / one_long_name).touch()

    dataset = im.open_imagenet(str(tmp_path), "train", 224)

    assert len(pickle.dumps(dataset)) / len(dataset) < 40


# ---- broken files ------------------------------------------------------------------------------
BREAK = {
    "the file is empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "not an image in a known format": lambda path: path.write_text("<html>404 not found</html>"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_file_is_named_with_what_to_do(tree, how):
    BREAK[how](tree / "train/cat/1.jpg")
    dataset = im.open_imagenet(str(tree), "train", 16)

    dataset.example(0, generator(0, 0))
    with pytest.raises(InputError, match=f"train/cat/1.jpg is broken: .*{how}.*--skip-broken"):
        dataset.example(1, generator(0, 1))


def test_skipping_replaces_broken_files_and_counts_them(tree):
    before = skipping(tree)
    for path in (tree / "train/cat").iterdir():
        BREAK["truncated"](path)

    with pytest.warns(UserWarning, match=r"train/cat/\d.jpg is broken"):
        after = skipping(tree, epochs=range(20))
        again = skipping(tree, epochs=range(20))

    np.testing.assert_equal(after, again)
    np.testing.assert_equal(after[3:6], before[3:])  # the dogs
    for example in before:
        assert example["skipped"] == 0
    for number, example in enumerate(after):
        is_cat = number % 6 < 3
        assert (example["skipped"] > 0) == is_cat, number
    for example in before + after:
        assert example.keys() == {"image", "label", "skipped"}
        assert isinstance(example["skipped"], np.int64)
    for old, new in zip(before[:3], after[:3], strict=True):
        assert new["label"] == 1
        assert new["image"].any()
        assert (old["image"] != new["image"]).any()
    # Each broken file that a draw met is counted.
    counts = {int(example["skipped"]) for example in after[::6]}
    assert min(counts) == 1
    assert max(counts) > 1


def test_a_broken_file_in_evaluation_is_masked_by_its_label(tree):
    (tree / "val/dog/0.jpg").write_bytes(b"")

    with pytest.warns(UserWarning, match="val/dog/0.jpg"):
        examples = skipping(tree, "eval", range(4))

    assert [int(example["label"]) for example in examples] == [0, 0, -1, 1]
    assert [int(example["skipped"]) for example in examples] == [0, 0, 1, 0]
    broken = examples[2]
    assert isinstance(broken["label"], np.int64)
    assert broken["image"].shape == (16, 16, 3)
    assert broken["image"].flags.c_contiguous


@pytest.mark.filterwarnings("ignore:skipped")
def test_skipping_ends_where_all_is_broken_or_unreadable(tree):
    dataset = im.open_imagenet(str(tree), "train", 16, skip_broken=True)
    for path in (tree / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="100 images drawn in a row are broken"):
        dataset.example(0, generator(0, 0))

    (tree / "train/cat/0.jpg").unlink()
    with pytest.raises(InputError, match=r"train/cat/0.jpg cannot be read: No such file"):
        dataset.example(0, generator(0, 0))


# ---- what cannot be opened ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("split", "removed", "added", "message"),
    [
        ("train", "train", None, "tree has no train/ folder; expected .*found val"),
        ("train", "train", "train/.hidden/1.jpg", "tree/train has no class folders"),
        ("train", "train", "train/1.jpg", "tree/train has images but no class folders"),
        ("train", None, "train/eel/.1.jpg", "tree/train/eel has no images"),
        ("eval", "val/dog", None, "tree/val lacks classes.*dog"),
        ("eval", None, "val/eel/1.jpg", "tree/val adds classes.*eel"),
    ],
)
def test_a_wrong_tree_gives_one_clear_sentence(tree, split, removed, added, message):
    for dataset in open_both(tree):
        assert len(dataset) > 0
    if removed:
        shutil.rmtree(tree / removed)
    if added:
        save(tree / added)

    refused(message, tree, split)


def test_a_path_that_is_no_folder_is_named_without_the_hub(tree, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the hub"))

    for folder in (tree, ".", "~"):
        refused("there is no folder .*nothing here; expected", f"{folder}/nothing here")
    refused("0.jpg is a file; expected a folder", tree / "val/cat/0.jpg")


@pytest.mark.parametrize("unreadable", ["", "train", "train/cat", "train/cat/nested"])
def test_a_folder_without_permission_is_named(tree, monkeypatch, unreadable):
    # By a patch, since root may read everything; os.walk lists folders with os.scandir too.
    save(tree / "train/cat/nested/4.jpg")
    closed = tree / unreadable
    scandir = im.os.scandir

    def guarded(path="."):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(im.os, "scandir", guarded)

    refused(f"folder {closed} cannot be read: Permission denied", tree)


# ---- tables ------------------------------------------------------------------------------------
def write_tree_of(table: datasets.Dataset, folder: Path) -> None:
    """Writes the pictures of a table to folders of their classes."""
    with_bytes = table.cast_column("image", datasets.Image(decode=False))
    for number, row in enumerate(with_bytes):
        path = folder / CLASSES[row["label"]] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row["image"]["bytes"])


@pytest.mark.parametrize("form", [FLAT, "{}/0.parquet", "save_to_disk"])
def test_tables_give_the_same_examples_as_a_tree(tmp_path, cache, form):
    train = image_table(4)
    evaluation = image_table(2)
    write_tree_of(train, tmp_path / "tree/train")
    write_tree_of(evaluation, tmp_path / "tree/val")
    data = write_tables(tmp_path / "tables", form, train.sort("label"), evaluation.sort("label"))

    for split, length in (("train", 4), ("eval", 2)):
        dataset = im.open_imagenet(data, split, 32)
        tree = im.open_imagenet(str(tmp_path / "tree"), split, 32)
        assert type(dataset).__name__ == "HubImages"
        assert isinstance(tree, im.ImageFolder)
        assert len(dataset) == length
        assert dataset.classes == ["cat", "dog"]
        assert dataset.image_size == 32

        pickled = pickle.dumps(dataset)
        content = sum(len(dataset._read(index)[0]) for index in range(length))
        assert len(pickled) < content, "tables travel along"

        for index in range(length):
            found = dataset.example(index, generator(0, index))
            copied = pickle.loads(pickled).example(index, generator(0, index))
            expected = tree.example(index, generator(0, index))
            assert set(found) == {"image", "label"}
            assert isinstance(found["label"], np.int64)
            np.testing.assert_equal(found, expected)
            np.testing.assert_equal(copied, expected)


def test_integer_labels_and_other_column_names_are_found(tmp_path, cache):
    names = {"image": "photo", "label": "fine_label", "kind": datasets.Value("int32")}
    train = image_table(6, [0, 4, 2, 2, 0, 1], **names).add_column("width", [80] * 6)
    evaluation = image_table(3, [2, 1, 1], **names)
    data = write_tables(tmp_path / "tables", "save_to_disk", train, evaluation, "test")

    dataset = im.open_imagenet(data, "eval", 16)

    # The classes are those of train, though evaluation has fewer.
    assert dataset.classes == ["0", "1", "2", "3", "4"]
    labels = [dataset.example(index, generator(0, 0))["label"] for index in range(3)]
    assert labels == [2, 1, 1]


def test_of_several_label_columns_the_usual_name_is_taken(tmp_path, cache):
    animals = datasets.ClassLabel(names=["animal"])
    table = image_table(4, label="fine_label").add_column("coarse", [0] * 4, feature=animals)
    table = table.select_columns(["coarse", "image", "fine_label"])
    data = write_tables(tmp_path / "several", "save_to_disk", table, table)

    assert im.open_imagenet(data, "train", 16).classes == ["cat", "dog"]


def test_a_broken_row_is_named_or_skipped(tmp_path, cache):
    train = image_table(4, cut=[2])
    data = write_tables(tmp_path / "tables", "save_to_disk", train, image_table(2))

    message = r"row 2 of .*tables, split train is broken: .*truncated.*--skip-broken"
    with pytest.raises(InputError, match=message):
        im.open_imagenet(data, "train", 16).example(2, generator(0, 2))
    with pytest.warns(UserWarning, match="row 2 of"):
        (example,) = skipping(data, indices=[2])
    assert example["skipped"] >= 1


def test_unusable_tables_give_one_clear_sentence(tmp_path, cache):
    def check(message: str, train=None, test=None, form="save_to_disk", split="eval") -> None:
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        if train is None:
            train = image_table(4)
        if test is None:
            test = image_table(4)
        refused(message, write_tables(folder, form, train, test, "test"), split)

    text = image_table(4).remove_columns("image").add_column("text", ["a"] * 4)
    check(
        "split train has no image column .*label .int64., text .string.",
        train=text,
        split="train",
    )
    other_name = image_table(4, label="kind", kind=datasets.Value("int64"))
    check(
        "split train has no label column .*image .*kind .int64.",
        train=other_name,
        split="train",
    )
    check(
        "split test has the label -1; expected labels 0 to 1",
        test=image_table(4, [-1] * 4),
    )
    check(
        "cannot be read by datasets: .*test.* no data",
        test=image_table(4).select([]),
        form=FLAT,  # save_to_disk does not keep an empty split
    )
    eels = datasets.ClassLabel(names=["cat", "eel"])
    check("split test lacks classes.*dog", test=image_table(4, kind=eels))
    dogs_first = datasets.ClassLabel(names=["dog", "cat"])
    check("split test has .* in another order", test=image_table(4, kind=dogs_first))


def test_unusable_folders_of_tables_give_one_clear_sentence(tmp_path, cache):
    table = image_table(2)
    extra = write_tables(tmp_path / "extra", "save_to_disk", table, table, "extra")
    refused(
        "has the splits train, extra; expected train, and one of val, valid",
        extra,
        "eval",
    )

    table.save_to_disk(tmp_path / "single")
    refused("single is a single split", tmp_path / "single", "eval")

    damaged = write_tables(tmp_path / "damaged", FLAT, table, table)
    Path(damaged, FLAT.format("train")).write_bytes(b"PAR1 and nothing else")
    refused("damaged cannot be read by datasets: ", damaged, "eval")


def test_a_hub_id_is_loaded_or_refused_in_one_sentence(monkeypatch):
    asked = []

    def load(name):
        asked.append(name)
        if name == "owner/away":
            raise ConnectionError("Couldn't reach 'owner/away' on the Hub\nand a second line")
        return datasets.DatasetDict(train=image_table(4), test=image_table(2))

    monkeypatch.setattr(datasets, "load_dataset", load)

    assert len(im.open_imagenet("cifar10", "eval", 16)) == 2
    assert len(im.open_imagenet("owner/set-1.0", "train", 16)) == 4
    assert asked == ["cifar10", "owner/set-1.0"]
    refused(
        "owner/away is neither a folder nor a data set of the hub: .*reach",
        "owner/away",
    )


# ---- synthetic images --------------------------------------------------------------------------
def synthetic(count: int, seed: int, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Returns images [count, 32, 32, 3] and labels [count] of ten classes."""
    dataset = im.SyntheticImages(2000, 32, 10, seed, split)
    examples = [dataset.example(index, generator(0, index)) for index in range(count)]
    pixels = np.stack([example["image"] for example in examples])
    labels = np.array([example["label"] for example in examples])
    return pixels, labels


def test_synthetic_images_of_another_seed_or_split_are_others():
    trained, _ = synthetic(8, seed=0)
    other_split, _ = synthetic(8, seed=0, split="eval")
    other_seed, _ = synthetic(8, seed=1)

    assert (trained != other_split).mean() > 0.9
    assert (trained != other_seed).mean() > 0.9


def test_raw_pixels_do_not_tell_synthetic_classes_apart():
    trained, labels = synthetic(1000, seed=0)
    evaluated, classes = synthetic(300, seed=0, split="eval")
    assert np.bincount(labels).tolist() == [100] * 10

    means = np.stack([trained[labels == label].mean(0) for label in range(10)])
    difference = evaluated[:, None].astype(np.float32) - means
    distance = (difference**2).sum((2, 3, 4))

    nearest = distance.argmin(1)
    assert (nearest == classes).mean() < 0.3  # chance 0.1; without the shifts above 0.9
