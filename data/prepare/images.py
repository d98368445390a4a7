"""Writes labelled images as shards: a few large parquet files, to train from a folder or a bucket.

    make data DATASET=images DATA=IMAGES OUT=DIR
    python -m data.prepare.images --data IMAGES [--out DIR]

IMAGES is what train/resnet50.py reads: a folder of class folders, a folder of parquet files, or an
id on the hub. The files go into the shards byte for byte. Those of training are in a random order,
so that each shard is a fair sample. Besides train-00000-of-01380.parquet … and
val-00000-of-00064.parquet … there is the index shards.json, see data/shards.py.
"""

import copy
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data import splits
from data.imagenet import ImageFolder, Images, ListedImages, open_imagenet
from data.prepare import pipeline
from data.prepare.files import read_json, whole, write_json
from data.prepare.pipeline import Preparation, expect
from data.prepare.sources import note_many, note_rows
from data.shards import INDEX, SPLITS, Shards
from errors import InputError

SHARD_BYTES = 100_000_000  # what training reads at once, and the most work that a kill costs
# Images read and checked together. Reading one at random costs 0.25 ms, decoding it 6 ms.
ROW_GROUP = 4
SAMPLED = 1000  # images whose size is measured


@dataclasses.dataclass(frozen=True)
class Flags:
    """Writes labelled images as shards for training.

    The same command resumes a killed one. The result depends neither on that nor on --workers.
    """

    data: str  # folder with train/<class>/*.jpg and val/<class>/*.jpg, of parquet files, or hub id
    out: str = ""  # folder of the shards; default: a folder `prepared` in that of the images
    seed: int = 0  # of the order of the training images
    workers: int = os.cpu_count() or 1  # processes


# Shards


def _select(images: Images, rows: np.ndarray) -> Images:
    """Returns a data set of these images alone: so a worker process is sent no others."""
    selected = copy.copy(images)
    if isinstance(images, ImageFolder):
        selected._names = images._names.take(pa.array(rows))
        selected._labels = images._labels[rows]
    else:
        selected._rows = images._rows.select(rows)
    return selected


def _write_shard(images: Images, rows: np.ndarray, path: Path, note: Path) -> None:
    """Writes images as a shard, and the index's entry for it as the file `note`.

    Args:
        images: those of the shard alone.
        rows: their numbers in the data set.
    """
    try:
        with whole(path) as file:
            _write_parquet(images, rows, file)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entry = {
            "name": path.name,
            "rows": len(rows),
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
        write_json(note, entry)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; "
            "make room, and give the same command again"
        ) from error


def _write_parquet(images: Images, rows: np.ndarray, file: BinaryIO) -> None:
    """Writes images, whose numbers in the data set are `rows`, as a parquet file."""
    # `datasets` reads the features from the schema's metadata.
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=images.classes)}
    schema = datasets.Features(features).arrow_schema
    options = {
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": False,
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(file, schema, **options) as writer:
        for start in range(0, len(rows), ROW_GROUP):
            cells = []
            labels = []
            for index in range(start, min(start + ROW_GROUP, len(rows))):
                encoded, label, path = images._read(index)
                name = f"row {rows[index]}"
                if isinstance(images, ImageFolder):
                    name = os.path.relpath(path, images.folder)
                cells.append({"bytes": encoded, "path": name})
                labels.append(label)
            table = pa.Table.from_pydict({"image": cells, "label": labels}, schema)
            writer.write_table(table)


# The command


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes the shards that data.shards.Shards reads; the arguments are those of Flags.

    Disk: the size of the images. Memory: little, but for the names of all files.

    Returns: the contents of shards.json.
    Raises InputError: there are no such images, or `out` holds something prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    expect(flags, "seed", flags.seed >= 0, "0 or more")
    opened = {}
    for split, name in SPLITS.items():
        opened[name] = open_imagenet(flags.data, split, image_size=1)
    train = opened["train"]
    if isinstance(train, Shards):
        raise InputError(f"{data} has shards already: train with it, or copy the folder as it is")
    if isinstance(train, ListedImages):
        raise InputError(f"{data} has its labels in a CSV: train with it as it is")
    read_from = splits.read_from(train.source, opened["val"].source, train.left_out)
    print(splits.sentence(read_from), flush=True)

    noted = []
    for name, images in opened.items():
        noted.append(_noted(flags.data, images) | {"name": f"{name}, {_checksum(images)}"})
    job = Preparation(flags, rows=noted, report=INDEX, version=1)
    report = job.finished_report()
    if report:
        return report

    shard_bytes = job.begin_with_piece_size("shard_bytes", SHARD_BYTES)
    notes = {}
    tasks = []
    for name, images in opened.items():
        shards = _divide(images, name, flags.seed, shard_bytes)
        notes[name] = []
        for number, rows in enumerate(shards):
            stem = f"{name}-{number:05d}-of-{len(shards):05d}"
            note = job.parts / f"{stem}.json"
            notes[name].append(note)
            tasks.append((_select(images, rows), rows, job.out / f"{stem}.parquet", note))
    job.run(_write_shard, tasks, "shards")

    entries = {}
    for name in opened:
        entries[name] = [read_json(note) for note in notes[name]]
    figures = {
        "classes": train.classes,
        "splits": entries,
        "read_from": read_from,
        "seconds": job.seconds,
    }
    return job.finish(figures)


def _divide(images: Images, name: str, seed: int, shard_bytes: int) -> list[np.ndarray]:
    """Returns the rows of each shard of about `shard_bytes`; those of "train" in random order.

    The number of shards follows from the mean size of SAMPLED images.
    """
    order = np.random.default_rng(seed).permutation(len(images))
    sizes = []
    for index in order[:SAMPLED].tolist():
        encoded, _, _ = images._read(index)
        sizes.append(len(encoded))
    total_bytes = len(images) * np.mean(sizes)
    shards = max(1, round(total_bytes / shard_bytes))

    if name != "train":
        order = np.arange(len(images))
    return np.array_split(order, min(shards, len(images)))


def _checksum(images: Images) -> str:
    """Returns a hash of the labels and, in a folder, the names of images in their order."""
    if isinstance(images, ImageFolder):
        labels = images._labels
        name_buffers = images._names.buffers()[1:]  # offsets and characters
    else:
        labels = np.array(images._rows[images._label])
        name_buffers = []

    content = hashlib.sha256(np.ascontiguousarray(labels))
    for buffer in name_buffers:
        content.update(buffer)
    return content.hexdigest()[:8]


def _noted(data: str, images: Images) -> dict:
    """Returns what a plan notes of the images of a split, see sources.py."""
    if isinstance(images, ImageFolder):
        return {"rows": len(images), **note_many(len(images), images.path)}
    return note_rows(data, images._rows)


def _summary(report: dict) -> None:
    """Prints the size of each split."""
    for name, shards in report["splits"].items():
        rows = sum(shard["rows"] for shard in shards)
        size = sum(shard["bytes"] for shard in shards)
        print(f"{name}: {rows} images in {len(shards)} shards, {size / 1e9:.2f} GB")
    print(f"{len(report['classes'])} classes; {report['seconds']} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
