"""Pictures without labels, to predict: which files there are, and how one is prepared.

paths, left_out = find("/data/new")
pictures = Pictures(paths, resize=256, image_size=224)
pictures.example(0, rng)                   # {"image": uint8 [224, 224, 3], "broken": 0.0}
"""

import codecs
import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as F

from data import imagenet
from data.leftovers import is_leftover
from data.remote import local_copy
from errors import InputError

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Found:
    """The pictures of a file, a folder, a pattern or a list.

    Attributes:
        paths: in order.
        left_out: files of a folder that are no pictures by their names.
    """

    paths: list[str]
    left_out: int = 0


def find(data: str) -> Found:
    """Finds pictures.

    Args:
        data: a file; a folder, all of which is searched, in sorted order; a pattern with * or ?; a
            URL of one of the first two; or "-", the standard input, with a path a line.
    Raises:
        InputError: nothing is there, or a folder cannot be read.
    """
    if data == STANDARD_INPUT:
        return Found(_listed_paths())

    patterns = [f"*{ending}" for ending in IMG_EXTENSIONS]
    root = os.path.expanduser(local_copy(data, *patterns))
    if os.path.isdir(root):
        found = _below(root)
        where = f"folder {data} and those in it"
    elif os.path.exists(root):
        return Found([root])
    else:
        paths = [path for path in glob.glob(root, recursive=True) if not os.path.isdir(path)]
        found = Found(sorted(paths))
        where = data
    if not found.paths:
        raise InputError(
            f"there are no pictures in {where}; "
            f"expected a picture, or a folder of them ({' '.join(IMG_EXTENSIONS)})"
        )
    return found


def _listed_paths() -> list[str]:
    """Returns the paths that the lines of the standard input are."""
    content = sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8)  # Windows begins with it
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    paths = [os.fsdecode(line.removesuffix(b"\r")) for line in lines]
    for number, path in enumerate(paths, 1):
        if not path.strip():
            raise InputError(f"line {number} of the standard input is empty; expected a path")
    return paths


def _below(root: str) -> Found:
    """Returns the pictures in a folder and the folders in it.

    Hidden files and what systems leave (data/leftovers.py) are passed over. A link to a folder is
    followed, unless it leads to one that has it.
    """
    paths = []
    left_out = 0
    for parent, folders, names in os.walk(root, followlinks=True, onerror=_refuse):
        above = os.path.join(os.path.realpath(parent), "")
        kept = []
        for name in folders:
            inner = os.path.join(os.path.realpath(os.path.join(parent, name)), "")
            is_hidden = name.startswith(".") or is_leftover(name)
            if not is_hidden and not above.startswith(inner):
                kept.append(name)
        folders[:] = kept

        for name in names:
            if name.startswith(".") or is_leftover(name):
                continue
            if name.lower().endswith(IMG_EXTENSIONS):
                paths.append(os.path.join(parent, name))
            else:
                left_out += 1
    return Found(sorted(paths, key=_parts), left_out)


def _parts(path: str) -> list[str]:
    return path.split(os.sep)


def _refuse(error: OSError) -> None:
    """Raises InputError for a folder that cannot be read."""
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}") from error


class Pictures:
    """Pictures as an evaluation sees them: a data set for `parallel_loader`.

    Args:
        paths: of the files.
        resize: pixels of the shorter side, of which then the middle is taken.
        image_size: pixels of the middle's side.
    """

    def __init__(self, paths: Sequence[str], resize: int, image_size: int):
        self.paths = paths
        self.resize = resize
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.paths)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray | np.floating]:
        """Returns {"image": uint8 [S, S, 3], "broken": float32 0 or 1}.

        A file that is no whole picture is black, and its "broken" is 1. An exception would end the
        batch, and with it the answers for the pictures before this one.
        """
        try:
            return {"image": self._read(index), "broken": np.float32(0)}
        except InputError:
            black = np.zeros((self.image_size, self.image_size, 3), np.uint8)
            return {"image": black, "broken": np.float32(1)}

    def why_broken(self, index: int) -> str:
        """Returns why a file cannot be read, which is read once more for that."""
        try:
            self._read(index)
        except InputError as error:
            return str(error)
        return f"{self.paths[index]} could not be read before, and can be now; give it again"

    def _read(self, index: int) -> np.ndarray:
        """Returns a picture, uint8 [S, S, 3]; raises InputError where it is broken."""
        path = self.paths[index]
        encoded = imagenet.read_file(path)  # raises InputError
        try:
            pixels = imagenet.decode(encoded)
        except imagenet.BrokenImage as error:
            raise InputError(f"{path} is broken: {error}") from error
        return crop(pixels, self.resize, self.image_size)


def crop(pixels: torch.Tensor, resize: int, image_size: int) -> np.ndarray:
    """Resizes [3, H, W] to a shorter side of `resize` pixels; returns its middle square, uint8
    [image_size, image_size, 3]."""
    resized = F.resize(pixels, [resize])
    middle = F.center_crop(resized, [image_size, image_size])
    return middle.permute(1, 2, 0).contiguous().numpy()
