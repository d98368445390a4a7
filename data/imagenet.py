"""ImageNet, or any labelled images: a tree of class folders or a `datasets` data set, and a synthetic twin.

Every example is {"image": uint8 [S, S, 3], RGB, "label": int64}. The device normalises by mean and deviation below, and
moves channels first: uint8 is a quarter of the bytes, and [3, S, S] a seventh of a host's time. Augmentation and crops
are torchvision's reference recipe's (https://github.com/pytorch/vision/tree/main/references/classification).
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
from data import splits
from data.leftovers import is_leftover
from errors import InputError

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # RGB, for pixels 0..255
IMAGENET_STD = (58.395, 57.12, 57.375)

MAX_SKIPPED = 100  # broken files in a row that say the whole data set is broken

Split = Literal["train", "eval"]


# Pillow's modes of 8 bits and less, which its `convert("RGB")` takes as they are meant.
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
# Tags of a TIFF, and their values.
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339
MIN_IS_WHITE, SIGNED = 0, 2


class BrokenImage(Exception):
    """Bytes that are not a whole image, or none of known black and white; the message says why."""


class DanglingLink(InputError):
    """A link to a file that is not there: as good as a broken image."""


def decode(encoded: bytes) -> torch.Tensor:
    """Decodes an image file to uint8 [3, H, W] in channels-last memory, or raises BrokenImage. The pixels are those of
    Pillow's `convert("RGB")`: grey, CMYK, palette and alpha included, EXIF orientation ignored. Of 16 bits the upper 8
    are taken, in grey (where Pillow would cut at 255) as in colour."""
    if not encoded:
        raise BrokenImage("the file is empty")
    if encoded.startswith(b"\xff\xd8\xff"):
        # The libjpeg-turbo of Pillow without its copies, equal to the bit. Decoding at a reduced scale would be faster
        # for large photographs, but changes pixels (by up to 64 of 255, and 1 to 3 on average).
        try:
            return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode=ImageReadMode.RGB)
        except RuntimeError:
            pass  # Pillow may read what torchvision refuses, and says better what is wrong
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return torch.from_numpy(_rgb(image)).permute(2, 0, 1)
    except (MemoryError, BrokenImage):
        raise
    except Exception as error:  # on bad bytes Pillow's readers raise OSError, SyntaxError, struct.error and more
        unknown = isinstance(error, Image.UnidentifiedImageError)
        raise BrokenImage("it is not an image in a known format" if unknown else str(error) or repr(error)) from error


def _rgb(image: Image.Image) -> np.ndarray:
    """Returns the pixels of an open image, uint8 [H, W, 3]; raises BrokenImage where their range is not known."""
    tags = getattr(image, "tag_v2", {})
    signed = tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED  # 8 bits of it Pillow takes for unsigned
    if image.mode in EIGHT_BITS and not signed:
        return np.array(image.convert("RGB"))

    # Pillow's reader of PGM stretches what it finds to 16 bits.
    sixteen = image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if signed or not sixteen:
        kinds = {"F": "floats (mode F)", "I": "32-bit numbers (mode I)"}
        kind = "signed numbers" if signed else kinds.get(image.mode, f"of mode {image.mode}")
        raise BrokenImage(f"its pixels are {kind}, of which black and white are not known; save it with 8 or 16 bits")
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]  # of a TIFF also 12
    grey = np.array(image, np.int64)
    if bits == 16 and 0 < grey.max() < 256:  # 8 bits in a file of 16: nothing would be left of them
        found = f"its pixels have 16 bits and go from {grey.min()} to {grey.max()}, which would be one shade"
        raise BrokenImage(f"{found}; save it scaled to all of 8 or 16 bits")
    grey >>= bits - 8
    if tags.get(PHOTOMETRIC) == MIN_IS_WHITE:
        grey = 255 - grey
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def random_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws torchvision's RandomResizedCrop, area 0.08 to 1 and ratio 3/4 to 4/3; returns top, left, height, width."""
    low, high = 3 / 4, 4 / 3
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    # No crop fits a very long picture: its middle, at the nearest allowed ratio.
    w = round(height * high) if width / height > high else width
    h = round(width / low) if width / height < low else height
    return (height - h) // 2, (width - w) // 2, h, w


def train_crop(image: torch.Tensor, size: int, rng: np.random.Generator) -> np.ndarray:
    """Crops [3, H, W] at random to [size, size, 3], and mirrors every second one."""
    top, left, height, width = random_crop(*image.shape[1:], rng)
    # torchvision's resized_crop; only of contiguous memory the result keeps its channels last, without a second pass.
    image = image[None, :, top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)
    image = interpolate(image, size=(size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    return (image.flip(1) if rng.random() < 0.5 else image).contiguous().numpy()


def eval_crop(image: torch.Tensor, size: int) -> np.ndarray:
    """Resizes [3, H, W] to a shorter side of size * 256 / 224 and returns the middle, [size, size, 3]."""
    middle = F.center_crop(F.resize(image, [shorter_side(size)]), [size, size])
    return middle.permute(1, 2, 0).contiguous().numpy()


def shorter_side(size: int) -> int:
    """Returns the pixels of an image's shorter side before its middle of `size` pixels is taken."""
    return round(size * 256 / 224)


def preparation(size: int) -> dict[str, str]:
    """Returns how an image is evaluated, for an export's metadata: pixels of "resize" (its shorter side) and of
    "image_size" (the square of its middle), "mean" and "std" of each channel between 0 and 1, as JSON."""
    mean, std = ([value / 255 for value in values] for values in (IMAGENET_MEAN, IMAGENET_STD))
    numbers = {"resize": str(shorter_side(size)), "image_size": str(size)}
    return numbers | {"mean": json.dumps(mean), "std": json.dumps(std)}


def as_label(label: Any, classes: Sequence[str], name: str) -> np.ndarray | np.integer | np.floating:
    """Returns an image's label as a batch has it: a class as int64, another number as float32, a vector likewise.

    Args:
        label: the number of one of `classes`, if there are any; or, for a task of your own, floats or a vector, which
            stay what they are.
        name: the image's, for messages.

    Raises InputError for what is none of them, a number that is not finite, and a class that is not there.
    """
    if isinstance(label, torch.Tensor):  # NumPy has no bfloat16, and takes no tensor that has a gradient
        label = label.detach()
        label = label.float() if label.is_floating_point() else label
    try:
        values = np.empty(0) if np.ma.is_masked(label) else np.asarray(label)
    except ValueError:  # lists of unequal length
        values = np.empty(0)
    if values.dtype.kind not in "biuf" or values.size == 0:
        what = f"{name} has the label {str(label)[:60]!r} ({type(label).__name__})"
        raise InputError(f"{what}; expected the number of a class, or floats, or a vector of numbers")
    if values.dtype.kind == "f":
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise InputError(f"{name} has the label {str(label)[:60]}, which is not finite; correct it or leave it out")
    else:
        values = values.astype(np.int64)
        if values.ndim == 0 and len(classes) and not 0 <= values < len(classes):
            expected = f"expected 0 to {len(classes) - 1}, one of the {len(classes)} classes"
            raise InputError(f"{name} has the label {label}; {expected} (a number that is no class is a float)")
    return values[()]


class Images:
    """What the data sets share. A real one has `classes`, `__len__`, and `_read(index)`, which returns the bytes of a
    file, its label, and how to name the file to the user. A label is the number of a class; a subclass for another task
    may give floats or a vector, see `as_label`."""

    def __init__(self, split: Split, image_size: int, skip_broken: bool = False):
        self.split, self.image_size, self.skip_broken = split, image_size, skip_broken
        self.source, self.left_out = "", []  # of real images, see data/splits.py

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.number]:
        """Returns {"image": uint8 [S, S, 3], "label": int64}; a broken file raises InputError.

        With skip_broken every example also has "skipped" (int64), the number of broken files met while making it. In
        training an image drawn from `rng` takes the broken one's place; in evaluation the image is black and its label
        is -1, which the script masks out.
        """
        train, skipped, pixels = self.split == "train", 0, None
        while pixels is None:
            label = np.int64(-1)
            try:
                encoded, found, name = self._read(index)
                label = as_label(found, getattr(self, "classes", ()), name)
                pixels = decode(encoded)
            except (BrokenImage, DanglingLink) as error:
                skipped += 1
                broken = (
                    str(error) if isinstance(error, DanglingLink) else f"{name} is broken: {error}; replace the file"
                )
                if not self.skip_broken:
                    raise InputError(f"{broken}, or pass --skip-broken to skip such files") from error
                if skipped == MAX_SKIPPED:
                    raise InputError(f"{skipped} images drawn in a row are broken, the last: {broken}") from error
                warnings.warn(f"skipped, {broken}", stacklevel=2)  # shown once per file and process
                if train:
                    index = int(rng.integers(len(self)))
                else:
                    pixels, label = torch.zeros(3, 1, 1, dtype=torch.uint8), np.full_like(label, -1)[()]
        image = train_crop(pixels, self.image_size, rng) if train else eval_crop(pixels, self.image_size)
        example = {"image": image, "label": label}
        return example | {"skipped": np.int64(skipped)} if self.skip_broken else example


class ImageFolder(Images):
    """Images in ROOT/train/<class>/**/*.jpg, and in ROOT/val or, where nothing is for validation, ROOT/test alike; by
    the names in data/splits.py.

    Files, labels and order are those of torchvision.datasets.ImageFolder, except that hidden class folders and files,
    and what systems leave in any folder (data/leftovers.py), are passed over. A class may have its name in another
    Unicode form in another split: its folders are one.
    """

    def __init__(self, root: str | Path, split: Split, image_size: int, skip_broken: bool = False):
        super().__init__(split, image_size, skip_broken)
        found, _ = _listed(root)
        train, evaluation = choose_splits(found, str(root))
        if train is None:
            what = f"expected train/<class>/*.jpg and val/<class>/*.jpg, found {', '.join(found[:10]) or 'nothing'}"
            raise InputError(f"{root} has no train/ folder; {what}")
        self.folder = os.path.join(root, train)
        self.classes = _class_folders(self.folder)
        if split == "eval":
            if evaluation is None:
                raise InputError(f"{root} has no folder to evaluate on; expected one of val, validation, test")
            self.folder = os.path.join(root, evaluation)
        self._folders = _class_folders(self.folder)
        if split == "eval":
            self._folders = in_order(self.folder, self._folders, self.classes)
        self.source = os.path.basename(self.folder) + "/"
        self.left_out = [f"{name}/" for name in found if name not in (train, evaluation)]

        # A million names in one buffer: cheap to send to a worker, and a long one does not widen the others.
        files = [_image_files(os.path.join(self.folder, name)) for name in self._folders]
        self._names = pa.array(itertools.chain(*files), pa.large_binary())
        self._labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(names) for names in files])

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> str:
        """Returns the path of a file."""
        return os.path.join(self.folder, self._folders[self._labels[index]], os.fsdecode(self._names[index].as_py()))

    def _read(self, index: int) -> tuple[bytes, int, str]:
        path = self.path(index)
        return read_file(path), int(self._labels[index]), path


class SyntheticImages(Images):
    """Images that can be learned, with the keys, shapes and types of the real ones; the class is `index % num_classes`.

    A class is a texture: three waves of fixed frequency, with fixed strengths and phases in red, green and blue. An
    example shifts it by any amount (around the edges), mirrors it or not, varies contrast and brightness, adds noise.
    The mean over the shifts is grey for every class: neither templates nor a linear classifier of pixels can tell them
    apart. Training draws from `rng`; evaluation from (seed, index), so that every evaluation sees the same images.
    """

    def __init__(self, size: int, image_size: int, num_classes: int, seed: int, split: Split = "train"):
        super().__init__(split, image_size)
        self.size, self.seed = size, seed
        self.classes = [f"texture {label}" for label in range(num_classes)]
        rng = np.random.default_rng(seed)
        waves = 3
        self._cycles = rng.integers(1, 5, (num_classes, 2, waves)) * rng.choice([-1, 1], (num_classes, 2, waves))
        self._strength = rng.uniform(0.2, 1.0, (num_classes, 3, 1, waves)).astype(np.float32)
        self._phase = rng.uniform(0, 2 * np.pi, (num_classes, 3, 1, waves)).astype(np.float32)

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.integer]:
        """Returns {"image": uint8 [S, S, 3], "label": int64}."""
        if self.split == "eval":
            # four numbers, the last not 0: no training example, seeded from (seed, epoch, index), has the same stream
            rng = np.random.default_rng((self.seed, 0, index, 1))
        label, size = index % len(self.classes), self.image_size
        angle = np.arange(size, dtype=np.float32)[:, None] * (2 * np.pi / size)
        shift_y, shift_x, contrast, brightness, mirror = rng.random(5)
        cycles_y, cycles_x = self._cycles[label]
        y = (angle + 2 * np.pi * shift_y) * cycles_y + self._phase[label]  # [3, S, waves]
        x = (angle + 2 * np.pi * shift_x) * (cycles_x if mirror < 0.5 else -cycles_x)  # [S, waves]
        # cos(y + x) = cos y cos x - sin y sin x, so that the sum over the waves is one matrix product
        rows = np.concatenate([np.cos(y), -np.sin(y)], -1) * np.tile(self._strength[label], 2)
        image = rows.astype(np.float32) @ np.concatenate([np.cos(x), np.sin(x)], -1).T.astype(np.float32)
        image *= 10 + 30 * contrast
        image += 70 + 50 * brightness
        image += rng.integers(0, 64, image.shape, dtype=np.uint8)
        return {"image": np.clip(image, 0, 255).transpose(1, 2, 0).astype(np.uint8, "C"), "label": np.int64(label)}


def open_imagenet(data: str, split: Split, image_size: int, skip_broken: bool = False) -> Images:
    """Opens a folder with train/<class>/*.jpg and val/<class>/*.jpg, a folder of parquet or arrow files, an id on the
    Hugging Face hub ("owner/name"), or a folder or URL of shards. Raises InputError."""
    path = Path(data).expanduser()
    if "://" in data or (path / "shards.json").is_file():
        shards = optional.load("shards", asked=data)
        return shards.Shards(data, split, image_size, skip_broken)
    if path.is_file():
        raise InputError(f"{data} is a file; expected a folder with train/ and val/ (unpack an archive first)")
    if path.is_dir():
        tables = ("*.parquet", "*.arrow", "*/*.parquet", "*/*.arrow", "state.json", "dataset_dict.json")
        folders, _ = _listed(path)
        train = splits.named(folders, "train", data)
        tree = train is not None and bool(_listed(path / train)[0])
        if tree or not any(any(path.glob(pattern)) for pattern in tables):
            return ImageFolder(path, split, image_size, skip_broken)
        data = str(path)
    elif not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", data):
        expected = "expected one with train/ and val/, or an id on the Hugging Face hub"
        raise InputError(f"there is no folder {data}; {expected}")
    hub_images = optional.load("hub_images", asked=data)
    return hub_images.HubImages(data, split, image_size, skip_broken)


def choose_splits(names: Iterable[str], where: str) -> tuple[str | None, str | None]:
    """Returns the names of the folders or splits to train on and to evaluate on, or None. Test images are evaluated on
    only where there are none for validation. Raises InputError where two are as good."""
    names = list(names)
    evaluation = splits.named(names, "valid", where) or splits.named(names, "test", where)
    return splits.named(names, "train", where), evaluation


def in_order(where: str, found: list[str], classes: list[str]) -> list[str]:
    """Returns the names of the classes found in the order of those of the training images; the Unicode form of a name
    does not count. Raises InputError where they are not the same."""
    theirs = {unicodedata.normalize("NFC", name): name for name in found}
    ours = [unicodedata.normalize("NFC", name) for name in classes]
    for what, names in (("lacks", set(ours) - theirs.keys()), ("adds", theirs.keys() - set(ours))):
        if names:
            listed = ", ".join(sorted(names)[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise InputError(f"{where} {what} classes; it must have those of train ({what}: {listed})")
    return [theirs[name] for name in ours]


def check_classes(where: str, found: list[str], classes: list[str]) -> None:
    """Raises InputError where the classes found are not those of the training images, in their order."""
    if found != in_order(where, found, classes):
        raise InputError(f"{where} has the classes of train in another order")


def read_file(path: str, size: int = -1) -> bytes:
    """Returns the content of an image file, or its first bytes; raises InputError where it cannot be read."""
    try:  # not a broken image: a file system that fails must stop the run, with --skip-broken too
        with open(path, "rb", buffering=0) as file:
            return file.read(size)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise DanglingLink(f"{path} is a link to {os.readlink(path)}, which is not there; mend the link") from error
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".")


def _unreadable(error: OSError) -> NoReturn:
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}") from error


def _listed(folder: str | Path) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the files in a folder, without hidden ones and a system's."""
    _, folders, files = next(os.walk(folder, onerror=_unreadable))
    return sorted(name for name in folders if not name.startswith(".") and not is_leftover(name)), files


def _lost_folder(folder: str, files: list[str]) -> None:
    """Raises InputError where a link that may have led to a folder of images leads nowhere: os.walk takes it for a
    file, and a class, or a part of one, would be missing without a word."""
    for name in files:
        path = os.path.join(folder, name)
        if not _is_image(name) and not name.startswith(".") and os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{path} is a link to {os.readlink(path)}, which is not there; mend or remove the link")


def _class_folders(folder: str) -> list[str]:
    classes, files = _listed(folder)
    _lost_folder(folder, files)
    if not classes:
        images = "images but " if any(map(_is_image, files)) else ""
        raise InputError(f"{folder} has {images}no class folders; expected {folder}/<class>/*.jpg")

    forms: dict[str, str] = {}
    for name in classes:
        other = forms.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            both = f"{folder} has two folders {name} whose names differ in their Unicode form alone (NFC and NFD)"
            raise InputError(f"{both}; move the images of both into one")
    return classes


def _image_files(folder: str) -> list[bytes]:
    """Returns the paths below a class folder, relative to it, in torchvision's order; at least one."""
    start = len(os.path.join(folder, ""))
    walked = []
    for parent, inner, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        inner[:] = [name for name in inner if not is_leftover(name)]  # which os.walk then does not enter
        _lost_folder(parent, names)
        walked.append((parent, names))
    paths = [
        os.path.join(parent, name) for parent, names in sorted(walked) for name in sorted(names) if _is_image(name)
    ]
    if not paths:
        raise InputError(f"class folder {folder} has no images ({' '.join(IMG_EXTENSIONS)}); fill it or remove it")
    return [os.fsencode(path[start:]) for path in paths]
