"""What decides which class is which, and what an image's pixels and label are.

Names decide, not shapes and not orders. On small files that the tests make; Pillow, TIFF's layout
by hand, torchvision and transformers are the reference.
"""

import io
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import (
    encoded,
    generator,
    image_table,
    save,
    skipping,
    write_tables,
    write_tree,
)
from PIL import Image

from data import imagenet as im
from data import splits
from data.leftovers import is_leftover
from data.prepare import images as prepare
from errors import InputError


@pytest.fixture
def tree(tmp_path) -> Path:
    return write_tree(tmp_path / "tree")


# ---- pixels ------------------------------------------------------------------------------------
def grey(height: int = 33, width: int = 47) -> np.ndarray:
    """Returns random 16-bit values, uint16 [height, width], bright and dark alike."""
    values = np.random.default_rng(0).integers(0, 65536, (height, width))
    return values.astype(np.uint16)


def packed_12_bits(values: np.ndarray) -> bytes:
    """Returns two values in three bytes each time."""
    pairs = values.reshape(-1, 2).astype(np.uint32)
    packed = (pairs[:, 0] << 12) | pairs[:, 1]
    return b"".join(int(value).to_bytes(3, "big") for value in packed)


def tiff(
    values: np.ndarray, bits: int, photometric: int = 1, order: str = "<", kind: int = 1
) -> bytes:
    """Returns a TIFF of one strip, as a scanner or a microscope writes it.

    Args:
        bits: per value; 12 are packed.
        photometric: 1 if black is 0, 0 if white is.
        order: of a number's bytes, < or >.
        kind: of the numbers, 1 unsigned and 2 signed.
    """
    height, width = values.shape
    if bits == 12:
        body = packed_12_bits(values)
    else:
        body = values.astype(values.dtype.newbyteorder(order)).tobytes()

    tags = {
        256: width,
        257: height,
        258: bits,
        259: 1,  # not compressed
        262: photometric,
        273: 8,  # where the strip begins
        277: 1,  # values per pixel
        278: height,  # rows of the strip
        279: len(body),
        339: kind,
    }
    entries = b""
    for tag, value in sorted(tags.items()):
        entries += struct.pack(f"{order}HHII", tag, 4, 1, value)
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    magic = {"<": b"II", ">": b"MM"}[order]
    header = magic + struct.pack(f"{order}HI", 42, 8 + len(body))
    return header + body + directory


def saved(image: Image.Image, form: str) -> bytes:
    """Returns what Pillow writes for an image."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def saved_values(values: np.ndarray, form: str) -> bytes:
    """Returns what Pillow writes for an array."""
    return saved(Image.fromarray(values), form)


SIXTEEN_BITS = {
    "png": lambda values: saved_values(values, "PNG"),
    "tiff": lambda values: saved_values(values, "TIFF"),
    "big-endian tiff": lambda values: tiff(values, 16, order=">"),
    "pgm": lambda values: saved_values(values, "PPM"),
    "jpeg 2000": lambda values: saved_values(values, "JPEG2000"),
}


def png(values: np.ndarray) -> bytes:
    """Returns a PNG of 16-bit grey values."""
    return SIXTEEN_BITS["png"](values)


@pytest.mark.parametrize("form", SIXTEEN_BITS)
def test_sixteen_bits_of_grey_are_scaled(form):
    """Pillow's convert, and so torchvision's loader, cut them at 255: such a picture was 99 %
    white."""
    values = grey()

    pixels = im.decode(SIXTEEN_BITS[form](values)).numpy()

    assert pixels.dtype == np.uint8
    assert pixels.shape == (3, 33, 47)
    assert np.abs(pixels - values[None] / 257).max() <= 1
    assert (pixels == 255).mean() < 0.02


def test_twelve_bits_of_grey_are_scaled():
    values = grey(20, 20) >> 4

    pixels = im.decode(tiff(values, 12)).numpy()

    assert np.abs(pixels - values[None] / 16.06).max() <= 1


def test_white_below_black_is_inverted():
    values = grey(20, 20)

    pixels = im.decode(tiff(values, 16, photometric=0)).numpy()

    inverted = 65535 - values[None].astype(int)
    assert np.abs(pixels - inverted / 257).max() <= 1


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def colour_png(pixels: np.ndarray) -> bytes:
    """Returns a PNG of 16 bits per channel; pixels are [height, width, 3]."""
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    without_filter = b"\0"
    rows = b"".join(without_filter + row.tobytes() for row in pixels.astype(">u2"))
    chunks = [
        png_chunk(b"IHDR", header),
        png_chunk(b"IDAT", zlib.compress(rows)),
        png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_sixteen_bits_of_grey_and_of_colour_are_one_picture():
    values = grey()
    colours = np.repeat(values[..., None], 3, 2)

    assert torch.equal(im.decode(colour_png(colours)), im.decode(png(values)))


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (
            "floats .mode F",
            lambda: saved_values(grey().astype(np.float32) / 65535, "TIFF"),
        ),
        ("floats .mode F", lambda: saved_values(grey().astype(np.float32), "TIFF")),
        ("signed numbers", lambda: saved_values(grey().astype(np.int32), "TIFF")),
        ("32-bit numbers .mode I", lambda: tiff(grey().astype(np.uint32), 32)),
        (
            "signed",
            lambda: tiff((grey().astype(np.int32) - 32768).astype(np.int16), 16, kind=2),
        ),
        ("signed", lambda: tiff(grey().astype(np.int8), 8, kind=2)),
        ("of mode LAB", lambda: saved(Image.new("LAB", (9, 8)), "TIFF")),
        (
            "16 bits and go from 0 to 255, which would be one shade",
            lambda: png(grey() >> 8),
        ),
        (
            "16 bits and go from 0 to 255",
            lambda: tiff(grey() >> 8, 16, photometric=0),
        ),
    ],
)
def test_pixels_of_unknown_range_are_refused_by_the_files_name(kind, content, tree):
    path = tree / "train/cat/1.tif"
    (tree / "train/cat/1.jpg").rename(path)
    path.write_bytes(content())
    dataset = im.open_imagenet(str(tree), "train", 16)
    names = [Path(dataset._read(index)[2]).name for index in range(6)]

    message = f"train/cat/1.tif is broken: .*{kind}.*8 or 16 bits"
    with pytest.raises(InputError, match=message) as error:
        dataset.example(names.index("1.tif"), generator(0, 1))
    assert "\n" not in str(error.value)


def test_a_black_picture_of_sixteen_bits_is_black():
    black = np.zeros((9, 8), np.uint16)
    almost_black = np.full((9, 8), 256, np.uint16)

    assert not im.decode(png(black)).any()
    assert (im.decode(png(almost_black)) == 1).all()


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "1", "L"])
def test_other_kinds_of_png_have_the_pixels_of_pillow(mode):
    data = encoded(mode, "PNG")
    image = Image.open(io.BytesIO(data)).convert("RGB")

    expected = np.asarray(image).transpose(2, 0, 1)
    np.testing.assert_array_equal(im.decode(data).numpy(), expected)


def test_tables_and_shards_scale_sixteen_bits_too(tree, tmp_path, cache):
    content = png(grey(40, 40))
    for split in ("train", "val"):
        for path in (tree / split).rglob("*.jpg"):
            path.unlink()
            path.with_suffix(".png").write_bytes(content)
    prepare.prepare(tree, tmp_path / "shards")

    table = image_table(2)
    cells = [{"bytes": content, "path": None}] * 2
    table = table.remove_columns("image").add_column("image", cells).cast(table.features)
    hub = write_tables(tmp_path / "tables", "save_to_disk", table, table)

    def first_image(data: object) -> np.ndarray:
        dataset = im.open_imagenet(str(data), "eval", 32)
        return dataset.example(0, generator(0, 0))["image"]

    expected = first_image(tree)
    assert 100 < expected.mean() < 150
    np.testing.assert_array_equal(first_image(tmp_path / "shards"), expected)
    np.testing.assert_array_equal(first_image(hub), expected)


# ---- labels of images --------------------------------------------------------------------------
class OwnImages(im.Images):
    """Somebody's own task: pictures with any label."""

    def __init__(
        self,
        label: object,
        split: str = "train",
        classes: tuple[str, ...] = ("cat", "dog"),
        **options,
    ):
        super().__init__(split, 16, **options)
        self.label = label
        self.classes = list(classes)
        self.encoded = encoded("RGB", "PNG")

    def __len__(self) -> int:
        return 4

    def _read(self, index: int) -> tuple[bytes, object, str]:
        return self.encoded, self.label, f"picture {index}"


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (0.73, np.float32(0.73)),
        (np.float64(0.73), np.float32(0.73)),
        (1.0, np.float32(1)),
        ([0.25, 0.75], np.array([0.25, 0.75], np.float32)),
        (np.array([3, 0, 7]), np.array([3, 0, 7], np.int64)),
        (torch.tensor([0.5, 2.0]), np.array([0.5, 2.0], np.float32)),
        (torch.tensor(1), np.int64(1)),
        (torch.tensor(0.5, dtype=torch.bfloat16), np.float32(0.5)),
        (torch.tensor([0.5, 2.0], requires_grad=True), np.array([0.5, 2.0], np.float32)),
        (1, np.int64(1)),
        (np.uint8(1), np.int64(1)),
        (True, np.int64(1)),
    ],
)
def test_a_label_stays_what_a_data_set_gives(label, expected):
    found = OwnImages(label).example(0, generator(0, 0))["label"]

    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    is_class_number = expected.shape == () and expected.dtype == np.int64
    assert isinstance(found, np.int64) == is_class_number


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            None,
            "picture 2 has the label 'None' .NoneType.; expected the number of a class, or floats",
        ),
        ("1", "picture 2 has the label '1' .str."),
        ([], "expected the number of a class"),
        ([[1], [1, 2]], "expected the number of a class"),
        (1j, "expected the number of a class"),
        (
            np.ma.masked,
            "picture 2 has the label '--' .MaskedConstant.; expected the number of a class",
        ),
        (float("nan"), "label nan, which is not finite"),
        (np.array([1, np.inf]), "which is not finite"),
        (2, "label 2; expected 0 to 1, one of the 2 classes"),
        (-1, "label -1; expected 0 to 1"),
    ],
)
def test_a_label_without_meaning_is_refused_by_its_picture(label, message):
    with pytest.raises(InputError, match=message):
        OwnImages(label).example(2, generator(0, 0))


def test_without_classes_integers_are_counts():
    assert OwnImages(23, classes=()).example(2, generator(0, 0))["label"] == 23


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("label", [1, 0.73, [0.25, 0.75]])
def test_a_broken_pictures_label_has_the_kind_of_the_others(label):
    whole = OwnImages(label, "eval", skip_broken=True)
    broken = OwnImages(label, "eval", skip_broken=True)
    broken.encoded = b""

    expected = whole.example(0, generator(0, 0))["label"]
    found = broken.example(0, generator(0, 0))["label"]

    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert (found == -1).all()


# ---- links -------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:skipped")
def test_a_dangling_link_is_a_broken_file(tree, tmp_path):
    for split in ("train", "val"):
        path = tree / split / "cat/0.jpg"
        path.unlink()
        path.symlink_to(tmp_path / "gone.jpg")
    message = r"cat/0.jpg is a link to .*gone.jpg, which is not there"

    dataset = im.open_imagenet(str(tree), "train", 16)
    with pytest.raises(InputError, match=rf"train/{message}.*--skip-broken"):
        dataset.example(0, generator(0, 0))

    (first,) = skipping(tree, indices=[0])
    assert first["skipped"] >= 1
    assert first["image"].any()
    evaluated = skipping(tree, "eval", range(4))
    assert [int(example["label"]) for example in evaluated] == [-1, 0, 1, 1]

    with pytest.raises(InputError, match=message):
        prepare.prepare(tree, tmp_path / "shards")


@pytest.mark.parametrize("where", ["train/eel", "train/cat/more"])
def test_a_dangling_link_in_a_folders_place_is_named(tree, tmp_path, where):
    """os.walk takes it for a file: the class, or a part of it, would be missing without a word."""
    (tree / where).symlink_to(tmp_path / "gone")

    with pytest.raises(InputError, match=f"{where} is a link to .*gone, which is not there"):
        im.open_imagenet(str(tree), "train", 16)


# ---- what systems leave behind -----------------------------------------------------------------
LEFT = [
    "__MACOSX",
    "@eaDir",
    "lost+found",
    ".ipynb_checkpoints",
    "System Volume Information",
    "$RECYCLE.BIN",
    "#recycle",
    ".Trash-1000",
    "found.000",
    "__pycache__",
    "@Recycle",
    ".@__thumb",
    "Temporary Items",
]


def labels_and_paths(dataset: im.Images) -> list[tuple[int, str]]:
    """Returns the label and the path of each picture."""
    found = []
    for index in range(len(dataset)):
        _, label, path = dataset._read(index)
        found.append((label, path))
    return found


@pytest.mark.parametrize("name", LEFT)
def test_what_systems_leave_is_no_class_and_no_picture(tree, name):
    before = {split: im.open_imagenet(str(tree), split, 16) for split in ("train", "eval")}
    for folder in (tree, tree / "train", tree / "val", tree / "train/cat", tree / "val/dog"):
        save(folder / name / "0.jpg")
        save(folder / name / "cat/0.jpg/SYNOPHOTO_THUMB_M.jpg")
    for file in ("Thumbs.db", ".DS_Store", "._0.jpg", "desktop.ini"):
        (tree / "train/cat" / file).write_bytes(b"a system's")

    for split, old in before.items():
        new = im.open_imagenet(str(tree), split, 16)
        assert new.classes == old.classes
        assert len(new) == len(old)
        assert labels_and_paths(new) == labels_and_paths(old)


SYSTEM_FOLDERS = ["@eaDir", "lost+found", "__MACOSX", "$RECYCLE.BIN"]


@pytest.mark.parametrize("name", SYSTEM_FOLDERS)
def test_what_systems_leave_is_no_table(name, tmp_path, cache):
    """Beside parquet files it would make a tree of class folders of their folder."""
    data = tmp_path / "tables"
    write_tables(data, "{}/0.parquet", image_table(4), image_table(2))
    for folder in (data, data / "train"):
        (folder / name).mkdir()
        (folder / name / "0.parquet").write_bytes(b"a system's")

    assert len(im.open_imagenet(str(data), "train", 16)) == 4


@pytest.mark.parametrize("name", SYSTEM_FOLDERS)
def test_what_systems_leave_is_no_text(name, tmp_path):
    (tmp_path / name).mkdir()
    for path in ("all.txt", f"{name}/all.txt", "._all.txt"):
        (tmp_path / path).write_text("a text")

    assert splits.below(tmp_path, "*.txt") == [tmp_path / "all.txt"]


@pytest.mark.parametrize("name", [*LEFT, "THUMBS.DB", "._a.jpg", ".DS_Store", "ehthumbs.db"])
def test_names_that_systems_leave_are_leftovers(name):
    assert is_leftover(name)


@pytest.mark.parametrize(
    "name",
    [
        "cat",
        "found.footage",
        "recycle",
        "macosx",
        "lost",
        "train",
        ".jpg",
        "_cat",
        "system",
        "thumbs.jpg",
        "found.0001",
        ".trash-1000-kept",
    ],
)
def test_names_of_the_users_own_are_no_leftovers(name):
    assert not is_leftover(name)


# ---- forms of names ----------------------------------------------------------------------------
NFC = unicodedata.normalize("NFC", "café")
NFD = unicodedata.normalize("NFD", "café")


@pytest.mark.parametrize("forms", [(NFC, NFD), (NFD, NFC)])
def test_a_class_is_one_in_both_unicode_forms(tmp_path, forms):
    """Between the two, in the order of bytes: cafz."""
    for split, name in zip(("train", "val"), forms, strict=True):
        for label, folder in enumerate((name, "cafz", "dog")):
            save(tmp_path / split / folder / f"{label}.jpg")

    train = im.open_imagenet(str(tmp_path), "train", 16)
    evaluated = im.open_imagenet(str(tmp_path), "eval", 16)

    classes = sorted((forms[0], "cafz", "dog"))
    assert train.classes == classes
    assert evaluated.classes == classes
    for dataset in (train, evaluated):
        for label, path in labels_and_paths(dataset):
            folder = unicodedata.normalize("NFC", Path(path).parent.name)
            assert folder == unicodedata.normalize("NFC", classes[label])


def test_two_folders_of_one_name_are_explained(tree):
    for name in (NFC, NFD):
        save(tree / "train" / name / "0.jpg")

    message = "two folders .*differ in their Unicode form alone .NFC and NFD.; move"
    with pytest.raises(InputError, match=message):
        im.open_imagenet(str(tree), "train", 16)
