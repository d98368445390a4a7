"""What decides which class is which, and what an image's pixels and label are: names, not shapes and not orders.

Small files that the tests make; Pillow, tifffile's layouts by hand, torchvision and transformers are the reference."""

import io
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_imagenet import encoded, generator, picture, rows, save, skipping, tree, write  # noqa: F401

from data import imagenet as im
from data import splits
from data.leftovers import is_leftover
from data.prepare import images as prepare
from errors import InputError

# Pixels


def grey(height: int = 33, width: int = 47) -> np.ndarray:
    """All 16-bit values alike, bright and dark."""
    return np.random.default_rng(0).integers(0, 65536, (height, width)).astype(np.uint16)


def tiff(values: np.ndarray, bits: int, photometric: int = 1, order: str = "<", kind: int = 1) -> bytes:
    """A TIFF of one strip, as a scanner or a microscope writes it; 12 bits are packed."""
    height, width = values.shape
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(np.uint32)
        packed = (pairs[:, 0] << 12) | pairs[:, 1]
        body = b"".join(int(value).to_bytes(3, "big") for value in packed)
    else:
        body = values.astype(values.dtype.newbyteorder(order)).tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(body)}
    tags[339] = kind
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    magic = {"<": b"II", ">": b"MM"}[order]
    return magic + struct.pack(f"{order}HI", 42, 8 + len(body)) + body + directory


def saved(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


SIXTEEN = {
    "png": lambda values: saved(Image.fromarray(values), "PNG"),
    "tiff": lambda values: saved(Image.fromarray(values), "TIFF"),
    "big-endian tiff": lambda values: tiff(values, 16, order=">"),
    "pgm": lambda values: saved(Image.fromarray(values), "PPM"),
    "jpeg 2000": lambda values: saved(Image.fromarray(values), "JPEG2000"),
}


@pytest.mark.parametrize("form", SIXTEEN)
def test_sixteen_bits_of_grey_are_scaled(form):
    """Pillow's convert, and so torchvision's loader, cut them at 255: such a picture was 99 % white."""
    values = grey()
    pixels = im.decode(SIXTEEN[form](values)).numpy()
    assert pixels.dtype == np.uint8 and pixels.shape == (3, 33, 47)
    assert np.abs(pixels - values[None] / 257).max() <= 1
    assert (pixels == 255).mean() < 0.02


def test_twelve_bits_and_white_below_black_are_taken_as_the_file_says():
    values = grey(20, 20) >> 4
    assert np.abs(im.decode(tiff(values, 12)).numpy() - values[None] / 16.06).max() <= 1
    values = grey(20, 20)
    inverted = im.decode(tiff(values, 16, photometric=0)).numpy()
    assert np.abs(inverted - (65535 - values[None].astype(int)) / 257).max() <= 1


def test_sixteen_bits_of_grey_and_of_colour_are_the_same_picture():
    values = grey()
    pixels = np.repeat(values[..., None], 3, 2).astype(">u2")
    chunks = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 47, 33, 16, 2, 0, 0, 0)
    colour = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(chunks)) + chunk(b"IEND", b"")
    assert torch.equal(im.decode(colour), im.decode(SIXTEEN["png"](values)))


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("floats .mode F", lambda: saved(Image.fromarray(grey().astype(np.float32) / 65535), "TIFF")),
        ("floats .mode F", lambda: saved(Image.fromarray(grey().astype(np.float32)), "TIFF")),
        ("signed numbers", lambda: saved(Image.fromarray(grey().astype(np.int32)), "TIFF")),
        ("32-bit numbers .mode I", lambda: tiff(grey().astype(np.uint32), 32)),
        ("signed", lambda: tiff((grey().astype(np.int32) - 32768).astype(np.int16), 16, kind=2)),
        ("signed", lambda: tiff(grey().astype(np.int8), 8, kind=2)),
        ("of mode LAB", lambda: saved(Image.new("LAB", (9, 8)), "TIFF")),
        ("16 bits and go from 0 to 255, which would be one shade", lambda: SIXTEEN["png"](grey() >> 8)),
        ("16 bits and go from 0 to 255", lambda: tiff(grey() >> 8, 16, photometric=0)),
    ],
)
def test_pixels_of_unknown_range_are_refused_by_the_files_name(kind, content, tree):  # noqa: F811
    (tree / "train/cat/1.jpg").rename(tree / "train/cat/1.tif")
    (tree / "train/cat/1.tif").write_bytes(content())
    dataset = im.open_imagenet(str(tree), "train", 16)
    (index,) = [index for index in range(6) if dataset._read(index)[2].endswith("1.tif")]
    with pytest.raises(InputError, match=f"train/cat/1.tif is broken: .*{kind}.*8 or 16 bits") as error:
        dataset.example(index, generator(0, 1))
    assert "\n" not in str(error.value)


def test_a_black_picture_of_sixteen_bits_is_black():
    assert not im.decode(SIXTEEN["png"](np.zeros((9, 8), np.uint16))).any()
    almost = np.full((9, 8), 256, np.uint16)
    assert (im.decode(SIXTEEN["png"](almost)) == 1).all()


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "1", "L"])
def test_other_kinds_of_png_have_the_pixels_of_pillow(mode):
    data = encoded(mode, "PNG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(im.decode(data).numpy(), expected)


def test_tables_and_shards_scale_them_too(tree, tmp_path, cache):  # noqa: F811
    values = grey(40, 40)
    for split in ("train", "val"):
        for path in (tree / split).rglob("*.jpg"):
            path.unlink()
            path.with_suffix(".png").write_bytes(SIXTEEN["png"](values))
    prepare.prepare(tree, tmp_path / "shards")
    table = rows(2)
    cells = [{"bytes": SIXTEEN["png"](values), "path": None}] * 2
    table = table.remove_columns("image").add_column("image", cells).cast(table.features)
    hub = write(tmp_path / "tables", "save_to_disk", table, table)
    expected = im.open_imagenet(str(tree), "eval", 32).example(0, generator(0, 0))["image"]
    assert 100 < expected.mean() < 150
    for data in (tmp_path / "shards", hub):
        np.testing.assert_array_equal(
            im.open_imagenet(str(data), "eval", 32).example(0, generator(0, 0))["image"], expected
        )


# Labels of images


class Own(im.Images):
    """Somebody's own task: pictures with any label."""

    def __init__(self, label: object, split: str = "train", classes: tuple[str, ...] = ("cat", "dog"), **options):
        super().__init__(split, 16, **options)
        self.label, self.classes = label, list(classes)
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
    found = Own(label).example(0, generator(0, 0))["label"]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    assert isinstance(found, np.int64) == (expected.shape == () and expected.dtype == np.int64)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "picture 2 has the label 'None' .NoneType.; expected the number of a class, or floats"),
        ("1", "picture 2 has the label '1' .str."),
        ([], "expected the number of a class"),
        ([[1], [1, 2]], "expected the number of a class"),
        (1j, "expected the number of a class"),
        (np.ma.masked, "picture 2 has the label '--' .MaskedConstant.; expected the number of a class"),
        (float("nan"), "label nan, which is not finite"),
        (np.array([1, np.inf]), "which is not finite"),
        (2, "label 2; expected 0 to 1, one of the 2 classes"),
        (-1, "label -1; expected 0 to 1"),
    ],
)
def test_a_label_that_means_nothing_is_refused_with_the_pictures_name(label, message):
    with pytest.raises(InputError, match=message):
        Own(label).example(2, generator(0, 0))


def test_without_classes_integers_are_counts():
    assert Own(23, classes=()).example(2, generator(0, 0))["label"] == 23


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("label", [1, 0.73, [0.25, 0.75]])
def test_a_broken_pictures_label_in_evaluation_has_the_kind_of_the_others(label):
    whole, broken = (Own(label, "eval", skip_broken=True) for _ in range(2))
    broken.encoded = b""
    one, other = (dataset.example(0, generator(0, 0))["label"] for dataset in (whole, broken))
    assert one.dtype == other.dtype and one.shape == other.shape and (other == -1).all()


# Links, leftovers, and the forms of names


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_dangling_link_is_a_broken_file(tree, tmp_path):  # noqa: F811
    for split in ("train", "val"):
        (tree / split / "cat/0.jpg").unlink()
        (tree / split / "cat/0.jpg").symlink_to(tmp_path / "gone.jpg")
    dataset = im.open_imagenet(str(tree), "train", 16)
    with pytest.raises(InputError, match=r"train/cat/0.jpg is a link to .*gone.jpg, which is not there.*--skip-broken"):
        dataset.example(0, generator(0, 0))
    (first,) = skipping(tree, indices=[0])
    assert first["skipped"] >= 1 and first["image"].any()
    evaluated = skipping(tree, "eval", range(4))
    assert [int(example["label"]) for example in evaluated] == [-1, 0, 1, 1]
    with pytest.raises(InputError, match=r"cat/0.jpg is a link to .*gone.jpg, which is not there"):
        prepare.prepare(tree, tmp_path / "shards")


@pytest.mark.parametrize("where", ["train/eel", "train/cat/more"])
def test_a_dangling_link_in_a_folders_place_is_named(tree, tmp_path, where):  # noqa: F811
    """os.walk takes it for a file: the class, or a part of it, would be missing without a word."""
    (tree / where).symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=f"{where} is a link to .*gone, which is not there"):
        im.open_imagenet(str(tree), "train", 16)


LEFT = ["__MACOSX", "@eaDir", "lost+found", ".ipynb_checkpoints", "System Volume Information", "$RECYCLE.BIN"]
LEFT += ["#recycle", ".Trash-1000", "found.000", "__pycache__", "@Recycle", ".@__thumb", "Temporary Items"]


@pytest.mark.parametrize("name", LEFT)
def test_what_systems_leave_is_no_class_and_no_picture(tree, name):  # noqa: F811
    before = [im.open_imagenet(str(tree), split, 16) for split in ("train", "eval")]
    for folder in (tree, tree / "train", tree / "val", tree / "train/cat", tree / "val/dog"):
        save(folder / name / "0.jpg")
        save(folder / name / "cat/0.jpg/SYNOPHOTO_THUMB_M.jpg")
    for file in ("Thumbs.db", ".DS_Store", "._0.jpg", "desktop.ini"):
        (tree / "train/cat" / file).write_bytes(b"a system's")
    for old, split in zip(before, ("train", "eval"), strict=True):
        new = im.open_imagenet(str(tree), split, 16)
        assert new.classes == old.classes and len(new) == len(old)
        assert [new._read(index)[1:] for index in range(len(new))] == [
            old._read(index)[1:] for index in range(len(old))
        ]


@pytest.mark.parametrize("name", ["@eaDir", "lost+found", "__MACOSX", "$RECYCLE.BIN"])
def test_what_systems_leave_is_neither_a_table_nor_a_text(name, tmp_path, cache):
    """Beside parquet files it would make a tree of class folders of their folder."""
    data = write(tmp_path / "tables", "{}/0.parquet", rows(4), rows(2))
    for folder in (tmp_path / "tables", tmp_path / "tables/train"):
        (folder / name).mkdir()
        (folder / name / "0.parquet").write_bytes(b"a system's")
    assert len(im.open_imagenet(data, "train", 16)) == 4
    (tmp_path / "texts" / name).mkdir(parents=True)
    for path in ("all.txt", f"{name}/all.txt", "._all.txt"):
        (tmp_path / "texts" / path).write_text("a text")
    assert splits.below(tmp_path / "texts", "*.txt") == [tmp_path / "texts/all.txt"]


def test_names_of_the_users_own_are_no_leftovers():
    left = [*LEFT, "THUMBS.DB", "._a.jpg", ".DS_Store", "ehthumbs.db"]
    assert all(map(is_leftover, left))
    own = ["cat", "found.footage", "recycle", "macosx", "lost", "train", ".jpg", "_cat", "system", "thumbs.jpg"]
    own += ["found.0001", ".trash-1000-kept"]
    assert not any(map(is_leftover, own))


NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.mark.parametrize("forms", [(NFC, NFD), (NFD, NFC)])
def test_a_class_is_one_in_both_unicode_forms(tmp_path, forms):
    """Between the two, in the order of bytes: cafz."""
    for split, name in zip(("train", "val"), forms, strict=True):
        for label, folder in enumerate((name, "cafz", "dog")):
            save(tmp_path / split / folder / f"{label}.jpg")
    train, evaluated = (im.open_imagenet(str(tmp_path), split, 16) for split in ("train", "eval"))
    assert train.classes == evaluated.classes == sorted((forms[0], "cafz", "dog"))
    for dataset in (train, evaluated):
        for index in range(3):
            _, label, path = dataset._read(index)
            assert unicodedata.normalize("NFC", Path(path).parent.name) == unicodedata.normalize(
                "NFC", train.classes[label]
            )


def test_two_folders_of_one_name_are_explained(tree):  # noqa: F811
    for name in (NFC, NFD):
        save(tree / "train" / name / "0.jpg")
    with pytest.raises(InputError, match="two folders .*differ in their Unicode form alone .NFC and NFD.; move"):
        im.open_imagenet(str(tree), "train", 16)
