"""Pictures of somebody's own, with labels that can be learned: in class folders and in a CSV."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = ("red", "green", "blue")
DARK = 60  # of 255
BRIGHT = 170


@dataclass(frozen=True)
class Picture:
    """A picture, and what can be asked of it.

    Attributes:
        pixels: uint8 [height, width, 3].
        kind: "red" or "dark": whether its red is bright.
        tags: its bright colours.
        weight: a number that grows with its brightness.
    """

    pixels: np.ndarray
    kind: str
    tags: tuple[str, ...]
    weight: float


def make_picture(number: int) -> Picture:
    """Returns a picture of noise with some of the three colours bright."""
    rng = np.random.default_rng(number)
    is_bright = rng.random(3) < 0.5
    levels = np.where(is_bright, BRIGHT, DARK) + rng.integers(0, 40, 3)
    noise = rng.integers(0, 30, (36, 44, 3))
    pixels = (levels + noise).astype(np.uint8)

    tags = tuple(name for name, bright in zip(COLOURS, is_bright, strict=True) if bright)
    kind = "red" if is_bright[0] else "dark"
    return Picture(pixels, kind, tags, weight=round(1000 + levels.sum() / 4, 2))


def save_picture(picture: Picture, path: Path) -> None:
    """Writes a picture to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.pixels).save(path)


def write_classes(folder: Path, count: int, first: int = 0) -> Path:
    """Writes pictures into the folders red/ and dark/ of a folder; returns the folder."""
    for number in range(first, first + count):
        picture = make_picture(number)
        save_picture(picture, folder / picture.kind / f"{number:03d}.png")
    return folder


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """Writes a CSV; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_listed(folder: Path, count: int) -> Path:
    """Writes pictures and a labels.csv that has their kinds, tags, colours and weights; returns the
    folder."""
    rows = []
    for number in range(count):
        picture = make_picture(number)
        name = f"pictures/{number:03d}.png"
        save_picture(picture, folder / name)
        colours = [int(colour in picture.tags) for colour in COLOURS]
        rows.append([name, picture.kind, " ".join(picture.tags), picture.weight, *colours])
    write_csv(folder / "labels.csv", ["file", "kind", "tags", "weight", *COLOURS], rows)
    return folder
