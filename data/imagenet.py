"""ImageNet, or any labelled images: class folders, a CSV of file names, a `datasets` data set; and
a synthetic twin.

Every example is {"image": uint8 [S, S, 3], RGB, "label": int64}. The device normalises by mean and
deviation below, and moves channels first: uint8 is a quarter of the bytes, and moving channels
would be a seventh of a host's time. Augmentation and crops are torchvision's reference recipe's
(https://github.com/pytorch/vision/tree/main/references/classification). With the strong
augmentation (augmentation.py) a training example also has "erased", "pasted" and "share".
"""

import io
import itertools
import json
import math
import os
import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

import optional
from data import augmentation, labelled_files, splits, targets
from data.leftovers import is_leftover
from errors import InputError

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # RGB, for pixels 0..255
IMAGENET_STD = (58.395, 57.12, 57.375)

MAX_SKIPPED = 100  # broken files drawn in a row: then the whole data set is broken

Split = Literal["train", "eval"]

# Of training images. crop: crop and mirror; strong: also what data/augmentation.py has.
AUGMENTATIONS = ("crop", "strong")

# Pillow's modes of 8 bits and less; its `convert("RGB")` takes them as they are meant.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")

# Tags of a TIFF, and values of the last two.
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
SAMPLE_FORMAT = 339
MIN_IS_WHITE = 0
SIGNED = 2


class BrokenImage(Exception):
    """Bytes that are no whole image, or pixels of unknown range; the message says why."""


class DanglingLink(InputError):
    """A link to a file that is not there: as good as a broken image."""


def decode(encoded: bytes) -> torch.Tensor:
    """Decodes an image file to uint8 [3, H, W] in channels-last memory, or raises BrokenImage.

    The pixels are those of Pillow's `convert("RGB")`: grey, CMYK, palette and alpha included, EXIF
    orientation ignored. Of 16 bits the upper 8 are taken, in grey (where Pillow would cut at 255)
    as in colour.
    """
    if not encoded:
        raise BrokenImage("the file is empty")
    if encoded.startswith(b"\xff\xd8\xff"):
        # Equal to Pillow to the bit: the same libjpeg-turbo, without Pillow's copies. Decoding at a
        # reduced scale would be faster for large photographs, but changes pixels (by up to 64 of
        # 255, and 1 to 3 on average).
        try:
            content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            return decode_jpeg(content, mode=ImageReadMode.RGB)
        except RuntimeError:
            pass  # Pillow may read what torchvision refuses, and says better what is wrong

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return torch.from_numpy(_rgb(image)).permute(2, 0, 1)
    except (MemoryError, BrokenImage):
        raise
    except Image.UnidentifiedImageError as error:
        raise BrokenImage("it is not an image in a known format") from error
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, struct.error and more
        raise BrokenImage(str(error) or repr(error)) from error


def _rgb(image: Image.Image) -> np.ndarray:
    """Returns the pixels of an open image, uint8 [H, W, 3].

    Raises BrokenImage where it is not known which values are black and white.
    """
    tags = getattr(image, "tag_v2", {})
    sample_format = tags.get(SAMPLE_FORMAT, (1,))[0]
    is_signed = sample_format == SIGNED  # Pillow takes 8 signed bits for unsigned ones
    if image.mode in EIGHT_BITS and not is_signed:
        return np.array(image.convert("RGB"))

    # Pillow's reader of PGM stretches what it finds to 16 bits.
    is_stretched = image.mode == "I" and image.format in ("PNG", "PPM")
    if is_signed or not (image.mode in SIXTEEN_BITS or is_stretched):
        kinds = {"F": "floats (mode F)", "I": "32-bit numbers (mode I)"}
        kind = kinds.get(image.mode, f"of mode {image.mode}")
        if is_signed:
            kind = "signed numbers"
        raise BrokenImage(
            f"its pixels are {kind}, of which black and white are not known; "
            "save it with 8 or 16 bits"
        )

    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]  # of a TIFF also 12
    grey = np.array(image, np.int64)
    if bits == 16 and 0 < grey.max() < 256:  # 8 bits in a file of 16: nothing would be left of them
        raise BrokenImage(
            f"its pixels have 16 bits and go from {grey.min()} to {grey.max()}, "
            "which would be one shade; save it scaled to all of 8 or 16 bits"
        )
    grey >>= bits - 8
    if tags.get(PHOTOMETRIC) == MIN_IS_WHITE:
        grey = 255 - grey
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def random_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws torchvision's RandomResizedCrop: area 0.08 to 1 and ratio 3/4 to 4/3.

    Returns top, left, height and width.
    """
    narrowest = 3 / 4
    widest = 4 / 3
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(height - crop_height + 1))
            left = int(rng.integers(width - crop_width + 1))
            return top, left, crop_height, crop_width

    # No crop fits a very long image: its middle, at the nearest allowed ratio.
    crop_width = width
    crop_height = height
    if width / height > widest:
        crop_width = round(height * widest)
    if width / height < narrowest:
        crop_height = round(width / narrowest)
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def train_crop(image: torch.Tensor, size: int, rng: np.random.Generator) -> np.ndarray:
    """Crops [3, H, W] at random to [size, size, 3], and mirrors every second one."""
    top, left, height, width = random_crop(*image.shape[1:], rng)
    # The slice and the resize are torchvision's resized_crop.
    crop = image[None, :, top : top + height, left : left + width]
    # Only of contiguous memory the result keeps its channels last, without a second pass.
    crop = crop.contiguous(memory_format=torch.channels_last)
    crop = interpolate(crop, size=(size, size), mode="bilinear", antialias=True)[0]

    crop = crop.permute(1, 2, 0)
    if rng.random() < 0.5:
        crop = crop.flip(1)
    return crop.contiguous().numpy()


def eval_crop(image: torch.Tensor, size: int, resize: int = 0) -> np.ndarray:
    """Resizes [3, H, W] to a shorter side of `resize` pixels, 0: size * 256 / 224; returns its
    middle square, uint8 [size, size, 3]."""
    resized = F.resize(image, [resize or shorter_side(size)])
    middle = F.center_crop(resized, [size, size])
    return middle.permute(1, 2, 0).contiguous().numpy()


def shorter_side(size: int) -> int:
    """Returns the pixels of an image's shorter side before its middle of `size` pixels is taken."""
    return round(size * 256 / 224)


def preparation(size: int, resize: int = 0) -> dict[str, str]:
    """Returns how an image is evaluated, as an export's metadata says it.

    "resize" is the pixels of the shorter side, "image_size" those of the middle's side, "mean" and
    "std" are lists in JSON, for each channel between 0 and 1. The arguments are `eval_crop`'s.
    """
    mean = [value / 255 for value in IMAGENET_MEAN]
    std = [value / 255 for value in IMAGENET_STD]
    return {
        "resize": str(resize or shorter_side(size)),
        "image_size": str(size),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
    }


def as_label(
    label: Any, classes: Sequence[str], name: str
) -> np.ndarray | np.integer | np.floating:
    """Returns an image's label as a batch has it.

    A class, or another whole number, becomes int64, another number float32; a vector likewise.

    Args:
        label: the number of one of `classes`, if there are any; or, for a task of your own, floats
            or a vector, which stay what they are.
        name: the image's, for messages.
    Raises:
        InputError: the label is none of these, is not finite, or is no class.
    """
    if isinstance(label, torch.Tensor):
        label = label.detach()  # NumPy takes no tensor that has a gradient
        if label.is_floating_point():
            label = label.float()  # NumPy has no bfloat16
    values = _as_array(label)
    if values.dtype.kind not in "biuf" or values.size == 0:
        raise InputError(
            f"{name} has the label {str(label)[:60]!r} ({type(label).__name__}); "
            "expected the number of a class, or floats, or a vector of numbers"
        )

    if values.dtype.kind == "f":
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise InputError(
                f"{name} has the label {str(label)[:60]}, which is not finite; "
                "correct it or leave it out"
            )
        return values[()]

    values = values.astype(np.int64)
    if values.ndim == 0 and len(classes) and not 0 <= values < len(classes):
        raise InputError(
            f"{name} has the label {label}; "
            f"expected 0 to {len(classes) - 1}, one of the {len(classes)} classes "
            "(a number that is no class is a float)"
        )
    return values[()]


def _as_array(label: Any) -> np.ndarray:
    """Returns a label as an array; an empty one where it is missing or of no one shape."""
    if np.ma.is_masked(label):
        return np.empty(0)
    try:
        return np.asarray(label)
    except ValueError:  # lists of unequal length
        return np.empty(0)


class Images:
    """What the data sets of images share.

    A real one has `classes`, `__len__`, and `_read(index)`, which returns the bytes of a file, its
    label, and how to name the file to the user. A label is the number of a class; a subclass for
    another task may give floats or a vector, see `as_label`.

    Args:
        skip_broken: pass over broken files, see `example`.
    Attributes:
        augmentation: one of AUGMENTATIONS, of the training split.
        resize: of the evaluation split, see `eval_crop`.
        source, left_out: of real images, see data/splits.py.
        notes: what else the user should know of them.
        label_columns: of a CSV that has the labels, if one has.
    """

    label_columns: tuple[str, ...] = ()

    def __init__(self, split: Split, image_size: int, skip_broken: bool = False):
        self.split = split
        self.image_size = image_size
        self.skip_broken = skip_broken
        self.augmentation = "crop"
        self.resize = 0
        self.source = ""
        self.left_out = []
        self.notes = []
        self._numbers: np.ndarray | None = None  # of each own class among others, see `renumber`

    def renumber(self, classes: Sequence[str]) -> None:
        """Makes the labels of examples numbers of other classes, by their names.

        The Unicode form of a name does not count. Raises InputError for a class of the images that
        is not among them.
        """
        number_of = {}
        for number, name in enumerate(classes):
            number_of[unicodedata.normalize("NFC", name)] = number
        numbers = []
        unknown = []
        for name in self.classes:
            number = number_of.get(unicodedata.normalize("NFC", name))
            numbers.append(number)
            if number is None:
                unknown.append(name)
        if unknown:
            raise InputError(
                f"{self.source} has classes that the run does not have: {targets.listed(unknown)}; "
                f"it has {targets.listed(classes)}"
            )
        self._numbers = np.array(numbers, np.int64)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.number]:
        """Returns {"image": uint8 [S, S, 3], "label": int64}; a broken file raises InputError.

        With the strong augmentation a training example has more, see augmentation.draw. With
        skip_broken every example also has "skipped" (int64), the number of broken files met
        while making it. In training an image drawn from `rng` takes the broken one's place; in
        evaluation the image is black and its label is -1, which the script masks out.
        """
        is_training = self.split == "train"
        skipped = 0
        pixels = None
        while pixels is None:
            label = np.int64(-1)
            try:
                encoded, own_label, name = self._read(index)
                label = as_label(own_label, getattr(self, "classes", ()), name)
                if self._numbers is not None:
                    label = self._numbers[label]
                pixels = decode(encoded)
            except (BrokenImage, DanglingLink) as error:
                broken = str(error)
                if isinstance(error, BrokenImage):
                    broken = f"{name} is broken: {error}; replace the file"
                skipped += 1
                self._refuse(broken, skipped, error)
                warnings.warn(f"skipped, {broken}", stacklevel=2)  # shown once per file and process
                if is_training:
                    index = int(rng.integers(len(self)))
                else:
                    pixels = torch.zeros(3, 1, 1, dtype=torch.uint8)
                    label = self._unknown(label)

        if is_training:
            image = train_crop(pixels, self.image_size, rng)
        else:
            image = eval_crop(pixels, self.image_size, self.resize)
        example = self._augmented({"image": image, "label": label}, rng)
        if self.skip_broken:
            example["skipped"] = np.int64(skipped)
        return example

    def _augmented(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns an example whose image is cropped and mirrored already, with the strong
        augmentation where it is to have that."""
        if self.augmentation != "strong" or self.split != "train":
            return example
        image = augmentation.trivial_augment(example["image"], rng)
        return example | {"image": image} | augmentation.draw(self.image_size, rng)

    def _unknown(self, label: Any) -> Any:
        """Returns the label of an image in evaluation that cannot be decoded.

        Args:
            label: its own, or an int64 where that could not be read.
        """
        return np.full_like(label, -1)[()]

    def _refuse(self, broken: str, skipped: int, error: Exception) -> None:
        """Raises InputError where a broken file may not be skipped, or too many were in a row."""
        if not self.skip_broken:
            raise InputError(f"{broken}, or pass --skip-broken to skip such files") from error
        if skipped == MAX_SKIPPED:
            raise InputError(
                f"{skipped} images drawn in a row are broken, the last: {broken}"
            ) from error


class ImageFolder(Images):
    """Images in ROOT/train/<class>/**/*.jpg and ROOT/val/<class>/**/*.jpg.

    The names of the splits are those of data/splits.py; ROOT/test is evaluated on where nothing is
    for validation, and a tenth of the training images (data/targets.py) where neither is there.
    ROOT/<class>/*.jpg is taken for the training images, too, where no folder says a split. Files,
    labels and order are those of torchvision.datasets.ImageFolder, except that hidden class folders
    and files, and what systems leave in any folder (data/leftovers.py), are passed over. A class
    may have its name in another Unicode form in another split: its folders are one.
    """

    def __init__(self, root: str | Path, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        found, files = _listed(root)
        train, evaluation = choose_splits(found, str(root))
        is_root = train is None and evaluation is None and _are_classes(root, found)
        if train is None and not is_root:
            raise InputError(_no_classes(root, found, files))
        self.folder = str(root) if is_root else os.path.join(root, train)
        self.classes = _class_folders(self.folder)
        self._folders = self.classes
        if split == "eval" and evaluation is not None:
            self.folder = os.path.join(root, evaluation)
            self._folders = in_order(self.folder, _class_folders(self.folder), self.classes)
        self.source = os.path.basename(os.path.abspath(self.folder)) + "/"
        used = self.classes if is_root else (train, evaluation)
        self.left_out = [f"{name}/" for name in found if name not in used]
        if os.path.isfile(os.path.join(root, labelled_files.NAME)):
            self.left_out.append(f"{labelled_files.NAME} (--label reads it)")

        files = self._find_files()
        if evaluation is None:
            self._hold_out(files)

    def _find_files(self) -> list[list[bytes]]:
        """Finds the images in the class folders; returns their names, of each class folder."""
        # A million names in one buffer: cheap to send to a worker, and a long one does not widen
        # the others.
        files = []
        others = []
        for name in self._folders:
            found = _image_files(os.path.join(self.folder, name))
            files.append(found.images)
            others += [f"{name}/{other}" for other in found.others]
        if others:
            folder = os.path.basename(os.path.abspath(self.folder))
            self.left_out.append(
                f"{len(others):,} files of {folder}/ that are no pictures ({splits.shown(others)})"
            )
        sizes = [len(names) for names in files]
        self._names = pa.array(itertools.chain(*files), pa.large_binary())
        self._labels = np.repeat(np.arange(len(files), dtype=np.int32), sizes)
        return files

    def _hold_out(self, files: list[list[bytes]]) -> None:
        """Keeps of the images of all classes those of this split: a tenth is evaluated on.

        Args:
            files: the names of the images in each class folder.
        """
        keys = []
        for class_folder, names in zip(self.classes, files, strict=True):
            for name in names:
                path = f"{class_folder}/{os.fsdecode(name)}"
                keys.append(unicodedata.normalize("NFC", path))
        target = targets.Target("classes", tuple(self.classes))
        held = targets.held_out(keys, self._labels, target)

        train_source, evaluation_source = labelled_files.held_out_sources(self.source, held)
        self.notes = labelled_files.notes_of_held_out(held, self._labels, target)
        if self.split == "train":
            taken = ~held
            self.source = train_source
        else:
            taken = held
            self.source = evaluation_source
        self._names = self._names.filter(pa.array(taken))
        self._labels = self._labels[taken]

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> str:
        """Returns the path of a file."""
        class_folder = self._folders[self._labels[index]]
        name = os.fsdecode(self._names[index].as_py())
        return os.path.join(self.folder, class_folder, name)

    def _read(self, index: int) -> tuple[bytes, int, str]:
        path = self.path(index)
        return read_file(path), int(self._labels[index]), path


class EvaluatedFolder(ImageFolder):
    """All images in FOLDER/<class>/**/*.jpg, to evaluate on, with the classes that it has itself.

    What of them are images, and their order, says ImageFolder.
    """

    def __init__(self, folder: str, image_size: int, skip_broken: bool = False):
        Images.__init__(self, "eval", image_size, skip_broken)
        self.folder = folder
        self.classes = _class_folders(folder)
        self._folders = self.classes
        self.source = os.path.basename(os.path.abspath(folder)) + "/"
        self._find_files()


class ListedImages(Images):
    """Images that a CSV names, with its labels: see data/labelled_files.py.

    Attributes:
        target: what the labels are.
        labels: as an example has them: the number of a class; in multilabel a vector of 0 and 1; in
            a regression a number in the unit of `scale`.
    """

    UNKNOWN = np.float32(-1e30)  # no number of a regression, in the unit of their deviation

    def __init__(
        self,
        tables: labelled_files.Tables,
        split: Split,
        image_size: int,
        skip_broken: bool = False,
        columns: labelled_files.Columns | None = None,
    ):
        super().__init__(split, image_size, skip_broken)
        columns = columns or labelled_files.Columns()
        self._take(labelled_files.open_split(tables, split, columns))

    def _take(self, listed: labelled_files.Labelled) -> None:
        """Takes the images of a split."""
        self.target = listed.target
        self.classes = list(listed.target.names)
        self.label_columns = listed.columns
        self.labels = listed.labels
        self.scale = listed.scale
        self.source = listed.source
        self.left_out = listed.left_out
        self.notes = listed.notes
        paths = [os.fsencode(path) for path in listed.paths]
        self._paths = pa.array(paths, pa.large_binary())

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Returns the path of a file."""
        return os.fsdecode(self._paths[index].as_py())

    def _read(self, index: int) -> tuple[bytes, Any, str]:
        path = self.path(index)
        return read_file(path), self.labels[index], path

    def _unknown(self, label: Any) -> Any:
        if self.target.objective == "classes":
            return np.int64(-1)
        return np.full_like(self.labels[0], self.UNKNOWN)[()]


class EvaluatedList(ListedImages):
    """Images that a CSV names, to evaluate on: see `labelled_files.open_evaluation`."""

    def __init__(self, listed: labelled_files.Labelled, image_size: int, skip_broken: bool = False):
        Images.__init__(self, "eval", image_size, skip_broken)
        self._take(listed)


class SyntheticImages(Images):
    """Images that can be learned, with the keys, shapes and types of the real ones.

    The class of an image is `index % num_classes`. A class is a texture: three waves of fixed
    frequency, with fixed strengths and phases in red, green and blue. An example shifts it by any
    amount (around the edges), mirrors it or not, varies contrast and brightness, and adds noise.
    The mean over the shifts is grey for every class: neither templates nor a linear classifier of
    pixels can tell them apart. Training draws from `rng`; evaluation from (seed, index), so that
    every evaluation sees the same images.
    """

    WAVES = 3

    def __init__(
        self, size: int, image_size: int, num_classes: int, seed: int, split: Split = "train"
    ):
        super().__init__(split, image_size)
        self.size = size
        self.seed = seed
        self.classes = [f"texture {label}" for label in range(num_classes)]
        rng = np.random.default_rng(seed)
        frequencies = (num_classes, 2, self.WAVES)  # along y and x
        colours = (num_classes, 3, 1, self.WAVES)
        self._cycles = rng.integers(1, 5, frequencies) * rng.choice([-1, 1], frequencies)
        self._strength = rng.uniform(0.2, 1.0, colours).astype(np.float32)
        self._phase = rng.uniform(0, 2 * np.pi, colours).astype(np.float32)

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.integer]:
        """Returns {"image": uint8 [S, S, 3], "label": int64}."""
        if self.split == "eval":
            # Four numbers, the last not 0: no training example, which is seeded from (seed, epoch,
            # index), has the same stream.
            rng = np.random.default_rng((self.seed, 0, index, 1))
        label = index % len(self.classes)
        shift_y, shift_x, contrast, brightness, mirror = rng.random(5)

        image = self._texture(label, shift_y, shift_x, mirrored=mirror >= 0.5)
        image *= 10 + 30 * contrast
        image += 70 + 50 * brightness
        image += rng.integers(0, 64, image.shape, dtype=np.uint8)
        pixels = np.clip(image, 0, 255).transpose(1, 2, 0).astype(np.uint8, "C")
        return self._augmented({"image": pixels, "label": np.int64(label)}, rng)

    def _texture(self, label: int, shift_y: float, shift_x: float, mirrored: bool) -> np.ndarray:
        """Returns the texture of a class as float32 [3, S, S], shifted by shares of the image."""
        size = self.image_size
        angle = np.arange(size, dtype=np.float32)[:, None] * (2 * np.pi / size)
        cycles_y, cycles_x = self._cycles[label]
        if mirrored:
            cycles_x = -cycles_x
        y = (angle + 2 * np.pi * shift_y) * cycles_y + self._phase[label]  # [3, S, waves]
        x = (angle + 2 * np.pi * shift_x) * cycles_x  # [S, waves]

        # The sum over the waves of cos(y + x) = cos y cos x - sin y sin x is one matrix product.
        rows = np.concatenate([np.cos(y), -np.sin(y)], -1) * np.tile(self._strength[label], 2)
        columns = np.concatenate([np.cos(x), np.sin(x)], -1)
        return rows.astype(np.float32) @ columns.T.astype(np.float32)


def open_imagenet(
    data: str,
    split: Split,
    image_size: int,
    skip_broken: bool = False,
    columns: labelled_files.Columns | None = None,
) -> Images:
    """Opens a split of labelled images.

    Args:
        data: a folder with train/<class>/*.jpg and val/<class>/*.jpg, or with a labels.csv; a CSV;
            a folder of parquet or arrow files, an id on the Hugging Face hub ("owner/name"), or a
            folder or URL of shards.
        columns: what of a CSV is learned. Where it asks for something, a CSV comes before class
            folders.
    Raises:
        InputError: `data` is none of these, or is damaged, or has no CSV that `columns` asks for.
    """
    path = Path(data).expanduser()
    asked_for = columns is not None and columns.asked_for
    tables = labelled_files.find_tables(data)
    if tables is not None and (asked_for or not _has_other_images(path, data)):
        return ListedImages(tables, split, image_size, skip_broken, columns)
    if asked_for:
        raise InputError(
            f"--label, --objective and --separator are for a {labelled_files.NAME}, "
            f"which {data} does not have"
        )

    if "://" in data or (path / "shards.json").is_file():
        shards = optional.load("shards", asked=data)
        return shards.Shards(data, split, image_size, skip_broken)
    if path.is_dir():
        if _has_class_folders(path, data) or not _has_tables(path):
            return ImageFolder(path, split, image_size, skip_broken)
        data = str(path)
    else:
        _check_hub_id(path, data)
    hub_images = optional.load("hub_images", asked=data)
    return hub_images.HubImages(data, split, image_size, skip_broken)


def _check_hub_id(path: Path, data: str) -> None:
    """Raises InputError for data that is no folder and cannot be an id on the hub."""
    if path.is_file():
        raise InputError(
            f"{data} is a file; expected a folder with train/ and val/ (unpack an archive first)"
        )
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", data):
        raise InputError(
            f"there is no folder {data}; "
            "expected one with train/ and val/, or an id on the Hugging Face hub"
        )


@dataclass(frozen=True)
class Learned:
    """What a finished run tells: classes, labels or a number, and the unit of the number.

    Attributes:
        columns: of the CSV that had the labels; (): it had none, or is not known.
    """

    target: targets.Target
    scale: labelled_files.Scale
    columns: tuple[str, ...] = ()


def open_evaluation(
    data: str,
    split: str,
    is_own: bool,
    image_size: int,
    skip_broken: bool,
    columns: labelled_files.Columns,
    learned: Learned,
) -> Images:
    """Opens the images on which a finished run is evaluated.

    Args:
        data: as in `open_imagenet`; a folder may also have class folders alone, of no split.
        split: train, valid or test; "": what a training is evaluated on, or all images of another
            folder than the run's whose names say no split.
        is_own: the run was trained on this data.
        columns: of a CSV, those of the training.
    Raises:
        InputError: as `open_imagenet`; no such split; a class that the run does not have.
    """
    has_names = learned.target.objective == "classes"
    listed = bool(labelled_files.find_evaluated(data))
    if listed and (columns.asked_for or not _has_other_images(Path(data).expanduser(), data)):
        labelled = labelled_files.open_evaluation(
            data, split, is_own, columns, learned.target, learned.scale, learned.columns
        )
        return EvaluatedList(labelled, image_size, skip_broken)
    if not has_names:
        raise InputError(
            f"the run has learned {learned.target.objective} of a {labelled_files.NAME}, "
            f"which {data} does not have"
        )

    images = _open_classes(data, split, is_own, image_size, skip_broken)
    images.split = "eval"  # the middle of each image, also of those to train on
    images.renumber(learned.target.names)
    return images


def _open_classes(
    data: str, split: str, is_own: bool, image_size: int, skip_broken: bool
) -> Images:
    """Opens the images of classes of a split, see `open_evaluation`."""
    path = Path(data).expanduser()
    is_one_of_training = split in ("", "train", "valid")
    of_training = "train" if split == "train" else "eval"
    if is_own and is_one_of_training:
        return open_imagenet(data, of_training, image_size, skip_broken)
    if "://" in data or (path / "shards.json").is_file():
        if not is_one_of_training:
            raise InputError(f"{data} has shards of the splits train and val; --split is {split}")
        return open_imagenet(data, of_training, image_size, skip_broken)

    if path.is_dir() and (_has_class_folders(path, data) or not _has_tables(path)):
        return _open_class_folders(path, split, image_size, skip_broken)
    if path.is_dir():
        data = str(path)
    else:
        _check_hub_id(path, data)
    hub_images = optional.load("hub_images", asked=data)
    return hub_images.EvaluatedHubImages(data, split, image_size, skip_broken)


def _open_class_folders(root: Path, split: str, image_size: int, skip_broken: bool) -> ImageFolder:
    """Opens the class folders of a split; of a folder that says no splits all, or a training's."""
    found, _ = _listed(root)
    _, evaluation = choose_splits(found, str(root))
    name = splits.named(found, split, str(root)) if split else evaluation
    if name is not None:
        return EvaluatedFolder(str(root / name), image_size, skip_broken)

    if split == "test" or any(splits.says_split(Path(name)) for name in found):
        raise InputError(
            f"{root} has no folder of the split {split or 'valid'}, "
            f"found {', '.join(found[:10]) or 'nothing'}; give one that it has by --split"
        )
    if not split:
        return EvaluatedFolder(str(root), image_size, skip_broken)
    return ImageFolder(root, "train" if split == "train" else "eval", image_size, skip_broken)


def _has_other_images(path: Path, data: str) -> bool:
    """Returns whether a folder has images besides those of a labels.csv: of classes, or tables."""
    if not path.is_dir():
        return False
    if (path / "shards.json").is_file():
        return True
    return _has_class_folders(path, data) or _has_tables(path)


def _has_class_folders(path: Path, data: str) -> bool:
    """Returns whether a folder has one for training, with folders in it."""
    names, _ = _listed(path)
    train = splits.named(names, "train", data)
    if train is None:
        return False
    classes, _ = _listed(path / train)
    return len(classes) > 0


def _no_classes(root: str | Path, folders: list[str], files: list[str]) -> str:
    """Returns the sentence on a folder of pictures that does not say their classes."""
    listed = folders[:10]
    pictures = sum(map(_is_image, files))
    if pictures:
        listed.append(f"{pictures:,} pictures without a class")
    return (
        f"{root} has no train/ folder; expected train/<class>/*.jpg and val/<class>/*.jpg, "
        "<class>/*.jpg of two classes or more, or a labels.csv with the columns file and label; "
        f"found {', '.join(listed) or 'nothing'}"
    )


def _are_classes(root: str | Path, names: list[str]) -> bool:
    """Returns whether the subfolders of a folder, of which none says a split, are class folders.

    They are if there are two or more and each has images in it: one with other folders in it may be
    a part of a data set.
    """
    for name in names:
        _, files = _listed(os.path.join(root, name))
        if not any(map(_is_image, files)):
            return False
    return len(names) > 1


def _has_tables(folder: Path) -> bool:
    """Returns whether a folder has parquet or arrow files, or those of save_to_disk."""
    tables = ("*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow")
    for pattern in (*tables, "state.json", "dataset_dict.json"):
        if any(folder.glob(pattern)):
            return True
    return False


def choose_splits(names: Iterable[str], where: str) -> tuple[str | None, str | None]:
    """Returns the names of the folders or splits to train on and to evaluate on, or None.

    Test images are evaluated on only where there are none for validation. Raises InputError where
    two names are as good; `where` has these names, for messages.
    """
    names = list(names)
    evaluation = splits.named(names, "valid", where) or splits.named(names, "test", where)
    train = splits.named(names, "train", where)
    return train, evaluation


def in_order(where: str, found: list[str], classes: list[str]) -> list[str]:
    """Returns the names of the classes found, in the order of those of the training images.

    The Unicode form of a name does not count. Raises InputError where the classes are not the same;
    `where` says where they were found.
    """
    found_name = {}  # of each normal form
    for name in found:
        found_name[unicodedata.normalize("NFC", name)] = name
    expected = [unicodedata.normalize("NFC", name) for name in classes]

    lacking = set(expected) - found_name.keys()
    added = found_name.keys() - set(expected)
    _refuse_classes(where, "lacks", lacking)
    _refuse_classes(where, "adds", added)
    return [found_name[form] for form in expected]


def _refuse_classes(where: str, what: str, names: set[str]) -> None:
    """Raises InputError for classes that a split "lacks" or "adds", if there are any."""
    if not names:
        return
    listed = ", ".join(sorted(names)[:10])
    if len(names) > 10:
        listed += f" and {len(names) - 10} more"
    raise InputError(f"{where} {what} classes; it must have those of train ({what}: {listed})")


def check_classes(where: str, found: list[str], classes: list[str]) -> None:
    """Raises InputError where the classes found are not the training images', in their order."""
    if found != in_order(where, found, classes):
        raise InputError(f"{where} has the classes of train in another order")


def read_file(path: str, size: int = -1) -> bytes:
    """Returns the content of an image file, or its first `size` bytes.

    Raises DanglingLink for a link to a file that is not there, else InputError where it cannot be
    read: no BrokenImage, since a file system that fails must stop the run, with --skip-broken too.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(size)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            raise DanglingLink(
                f"{path} is a link to {os.readlink(path)}, which is not there; mend the link"
            ) from error
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".")


def _unreadable(error: OSError) -> NoReturn:
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}") from error


def _listed(folder: str | Path) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's subfolders and of its files.

    Subfolders are sorted, without hidden ones and those that systems leave; files are neither.
    """
    _, folders, files = next(os.walk(folder, onerror=_unreadable))
    wanted = [name for name in folders if not name.startswith(".") and not is_leftover(name)]
    return sorted(wanted), files


def _refuse_lost_folders(folder: str, files: list[str]) -> None:
    """Raises InputError where a link that may have led to a folder of images leads nowhere.

    os.walk takes it for a file, and a class, or some of its images, would be missing without a
    word.
    """
    for name in files:
        if _is_image(name) or name.startswith("."):
            continue
        path = os.path.join(folder, name)
        if os.path.islink(path) and not os.path.exists(path):
            raise InputError(
                f"{path} is a link to {os.readlink(path)}, which is not there; "
                "mend or remove the link"
            )


def _class_folders(folder: str) -> list[str]:
    """Returns the names of the class folders, sorted; raises InputError where there are none.

    So it does where two names differ in their Unicode form alone.
    """
    classes, files = _listed(folder)
    _refuse_lost_folders(folder, files)
    if not classes:
        images = "images but " if any(map(_is_image, files)) else ""
        raise InputError(f"{folder} has {images}no class folders; expected {folder}/<class>/*.jpg")

    name_of_form: dict[str, str] = {}
    for name in classes:
        other = name_of_form.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise InputError(
                f"{folder} has two folders {name} whose names differ in their Unicode form alone "
                "(NFC and NFD); move the images of both into one"
            )
    return classes


@dataclass(frozen=True)
class _ClassFiles:
    """The files below a class folder, by their paths relative to it, in torchvision's order.

    Attributes:
        others: what is no image, but for hidden files and what systems leave.
    """

    images: list[bytes]
    others: list[str]


def _image_files(folder: str) -> _ClassFiles:
    """Returns the files below a class folder; raises InputError where no image is among them."""
    walked = []
    for parent, inner, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        # os.walk enters what is left in its own list.
        inner[:] = [name for name in inner if not is_leftover(name)]
        _refuse_lost_folders(parent, names)
        walked.append((parent, names))

    start = len(os.path.join(folder, ""))
    paths = []
    others = []
    for parent, names in sorted(walked):
        for name in sorted(names):
            path = os.path.join(parent, name)[start:]
            if _is_image(name):
                paths.append(os.fsencode(path))
            elif not (name.startswith(".") or is_leftover(name)):
                others.append(path)
    if not paths:
        raise InputError(
            f"class folder {folder} has no images ({' '.join(IMG_EXTENSIONS)}); "
            "fill it or remove it"
        )
    return _ClassFiles(paths, others)
