"""Small pictures, trees and tables of pictures, for the tests of data/imagenet.py."""

import io
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from data.imagenet import open_imagenet

CLASSES = ("cat", "dog")
FLAT = "{}-00000-of-00001.parquet"  # the parquet file of a split, as the hub names it


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Returns coarse random colours under fine noise: edges and detail, as in a photograph."""
    rng = np.random.default_rng(seed)
    colours = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    coarse = np.asarray(colours.resize((width, height), Image.BICUBIC))
    noise = rng.integers(0, 100, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(coarse // 2 + noise)


def encoded(mode: str, form: str, image: Image.Image | None = None, **options) -> bytes:
    """Returns the content of a file with a picture, 33 pixels high and 47 wide by default.

    Args:
        mode: of Pillow, for example RGB.
        form: of the file, for example JPEG.
    """
    file = io.BytesIO()
    (image or picture(33, 47)).convert(mode).save(file, form, **options)
    return file.getvalue()


def save(path: Path, image: Image.Image | None = None, **options) -> Path:
    """Writes a picture to a file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(40, 50, len(path.name))).save(path, **options)
    return path


def generator(epoch: int, index: int) -> np.random.Generator:
    """Returns the random numbers of an example, as the loader makes them."""
    return np.random.default_rng((0, epoch, index))


def write_tree(folder: Path) -> Path:
    """Writes two classes, three pictures each for training and two each for evaluation; returns
    the folder."""
    for split, count, first_seed in (("train", 3, 0), ("val", 2, 50)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                image = picture(60, 80, first_seed + 10 * label + number)
                save(folder / split / name / f"{number}.jpg", image)
    return folder


def image_table(
    count: int, labels: list | None = None, image="image", label="label", kind=None, cut=()
) -> datasets.Dataset:
    """Returns pictures with labels 0, 1, 0, … in a table.

    Args:
        image, label: names of the columns.
        kind: of the label; by default, a class by its name.
        cut: rows whose pictures are truncated.
    """
    cells = []
    for row in range(count):
        content = encoded("RGB", "JPEG", picture(60, 80, row))
        if row in cut:
            content = content[:-100]
        cells.append({"bytes": content, "path": None})
    labels = labels or [row % 2 for row in range(count)]
    kind = kind or datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: cells, label: labels}, features=features)


def write_tables(
    folder: Path,
    form: str,
    train: datasets.Dataset,
    evaluation: datasets.Dataset,
    name: str = "validation",
) -> str:
    """Writes a data set with two splits; returns its folder.

    Args:
        form: save_to_disk, or the name of a split's parquet file.
        name: of the split for evaluation.
    """
    folder.mkdir()
    tables = {"train": train, name: evaluation}
    if form == "save_to_disk":
        datasets.DatasetDict(tables).save_to_disk(folder)
    else:
        for split, table in tables.items():
            path = folder / form.format(split)
            path.parent.mkdir(exist_ok=True)
            table.to_parquet(path)
    return str(folder)


def skipping(data, split: str = "train", indices=range(6), epochs=(0,)) -> list[dict]:
    """Returns examples of a data set that replaces broken pictures."""
    dataset = open_imagenet(str(data), split, 16, skip_broken=True)
    examples = []
    for epoch in epochs:
        for index in indices:
            examples.append(dataset.example(index, generator(epoch, index)))
    return examples
