"""Writes labelled images as shards: a few large parquet files, which train from a folder or a bucket.

    python -m data.prepare.images --data IMAGES [--out DIR]  (make data DATASET=images DATA=IMAGES OUT=DIR)

IMAGES is what train/resnet50.py reads: a folder of class folders, a folder of parquet files, or an id on the hub. The
files go into the shards byte for byte; those of training in a random order, so that each shard is a fair sample.
Besides train-00000-of-01380.parquet …, val-00000-of-00064.parquet … there is the index shards.json, see data/shards.py.
"""

import copy
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data import splits
from data.imagenet import ImageFolder, Images, open_imagenet
from data.prepare import pipeline
from data.prepare.files import read_json, whole, write_json
from data.prepare.pipeline import Preparation, expect
from data.shards import INDEX, SPLITS, Shards
from errors import InputError

SHARD_BYTES = 100_000_000  # so much is read at once, and so much a kill costs
ROW_GROUP = 4  # images that are read and checked together: one read at random costs 0.25 ms of 6 for its decoding
SAMPLED = 1000  # images whose size is measured


@dataclasses.dataclass(frozen=True)
class Flags:
    """Writes labelled images as shards for training. The same command resumes a killed one.

    The result depends neither on that nor on --workers.
    """

    data: str  # folder with train/<class>/*.jpg and val/<class>/*.jpg, or of parquet files, or an id on the hub
    out: str = ""  # folder of the shards; default: a folder `prepared` in that of the images
    seed: int = 0  # of the order of the training images
    workers: int = os.cpu_count() or 1  # processes


def _part(images: Images, rows: np.ndarray) -> Images:
    """Returns these images alone: what a worker process is sent."""
    part = copy.copy(images)
    if isinstance(images, ImageFolder):
        part._names, part._labels = images._names.take(pa.array(rows)), images._labels[rows]
    else:
        part._rows = images._rows.select(rows)
    return part


def _write_shard(images: Images, rows: np.ndarray, path: Path, note: Path) -> None:
    """Writes these rows of a data set, which `images` are, as a shard, and what the index says of it."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=images.classes)}
    schema = datasets.Features(features).arrow_schema  # for `datasets`, which reads the features from its metadata
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    try:
        with whole(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            for start in range(0, len(rows), ROW_GROUP):
                found = [images._read(index) for index in range(start, min(start + ROW_GROUP, len(rows)))]
                names = [f"row {row}" for row in rows[start : start + ROW_GROUP]]
                if isinstance(images, ImageFolder):
                    names = [os.path.relpath(name, images.folder) for _, _, name in found]
                cells = [{"bytes": one[0], "path": name} for one, name in zip(found, names, strict=True)]
                labels = [label for _, label, _ in found]
                writer.write_table(pa.Table.from_pydict({"image": cells, "label": labels}, schema))
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        write_json(note, {"name": path.name, "rows": len(rows), "bytes": path.stat().st_size, "sha256": digest})
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        raise InputError(f"{what}; make room, and give the same command again") from error


def prepare(data: str | Path, out: str | Path = "", workers: int = 1, **flags) -> dict:
    """Writes the shards that data.shards.Shards reads; the arguments are those of Flags.

    Disk: the size of the images. Memory: little, but for the names of all files.

    Returns: the contents of shards.json.
    Raises InputError: no such images, or `out` holds something prepared differently.
    """
    flags = Flags(str(data), str(out), workers=workers, **flags)
    expect(flags, "seed", flags.seed >= 0, "0 or more")
    opened = {name: open_imagenet(flags.data, split, image_size=1) for split, name in SPLITS.items()}
    if isinstance(opened["train"], Shards):
        raise InputError(f"{data} has shards already: train with it, or copy the folder as it is")
    read_from = splits.read_from(opened["train"].source, opened["val"].source, opened["train"].left_out)
    print(splits.sentence(read_from), flush=True)
    sources = [{"name": f"{name}, {_checksum(images)}", "rows": len(images)} for name, images in opened.items()]
    job = Preparation(flags, sources, report=INDEX, version=1)
    if report := job.finished():
        return report

    shard_bytes = job.begin("shard_bytes", SHARD_BYTES)
    tasks = []
    for name, images in opened.items():
        order = np.random.default_rng(flags.seed).permutation(len(images))
        sample = [len(images._read(index)[0]) for index in order[:SAMPLED].tolist()]
        count = min(max(1, round(len(images) * np.mean(sample) / shard_bytes)), len(images))
        parts = np.array_split(order if name == "train" else np.arange(len(images)), count)
        for number, rows in enumerate(parts):
            stem = f"{name}-{number:05d}-of-{count:05d}"
            tasks.append((_part(images, rows), rows, job.out / f"{stem}.parquet", job.parts / f"{stem}.json"))
    job.run(_write_shard, tasks, "shards")
    notes = [read_json(note) for *_, note in tasks]
    shards = {name: [note for note in notes if note["name"].startswith(f"{name}-")] for name in opened}
    figures = {"classes": opened["train"].classes, "splits": shards, "read_from": read_from}
    return job.finish(figures | {"seconds": job.seconds})


def _checksum(images: Images) -> str:
    """Returns what changes with the names, the labels and the order of images."""
    named = isinstance(images, ImageFolder)
    labels = images._labels if named else np.array(images._rows[images._label])
    parts = [np.ascontiguousarray(labels), *(images._names.buffers()[1:] if named else ())]
    return hashlib.sha256(b"".join(memoryview(part) for part in parts)).hexdigest()[:8]


def _summary(report: dict) -> None:
    for name, shards in report["splits"].items():
        rows, size = (sum(shard[key] for shard in shards) for key in ("rows", "bytes"))
        print(f"{name}: {rows} images in {len(shards)} shards, {size / 1e9:.2f} GB")
    print(f"{len(report['classes'])} classes; {report['seconds']} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, see `pipeline.main`."""
    pipeline.main(Flags, prepare, _summary, arguments)


if __name__ == "__main__":
    main()
