"""Images a second from shards behind a server that answers each request late, and from the same
shards on the disk.

    disk     data.shards on the folder, through train.common.loading's worker processes, to batches
             on the CPU
    server   the same by http from a process of this machine that waits 50 ms before each answer,
             into an empty cache

    how      each round reads an epoch from both, in turns, with new worker processes; counted from
             the first batch to the last one; the shards that come before it are in `seconds to the
             first batch`
    run      python -m bench.bucket_images  (--data FOLDER: shards of your own; else noise is made)

Ratios are taken within a round, and their median is printed.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from bench.bucket import Bucket
from data.imagenet import open_imagenet
from data.prepare import images
from train.common import device, loading


@dataclass(frozen=True)
class Options:
    data: str = ""  # folder that make data DATASET=images wrote; "": noise, JPEG files of 105 KB
    count: int = 8000  # of the images that are made, 500 x 375 pixels
    shard_mb: int = 10  # of the shards that are made: a tenth of the usual, 10 times the requests
    latency: float = 0.05  # seconds before each answer
    image_size: int = 224  # pixels, square
    batch_size: int = 64  # images per batch
    rounds: int = 5  # counted ones; one more, before them, is not
    workers: int = -1  # processes that decode; -1: one per core
    out: str = "runs/bench/bucket_images.json"  # where the figures go


def make_shards(folder: Path, options: Options) -> Path:
    """Returns a folder of shards of `count` images, 200 of them different."""
    rng = np.random.default_rng(0)

    def path_of(split: str, number: int) -> Path:
        label = str(number % 10)
        return folder / "files" / split / label / f"{number}.jpg"

    for number in range(options.count):
        split = "train" if number < options.count - 64 else "val"
        path = path_of(split, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        if number < 200:
            colours = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            coarse = Image.fromarray(colours).resize((500, 375))
            noise = rng.integers(0, 36, (375, 500, 3), dtype=np.uint8)
            Image.fromarray(np.asarray(coarse) // 2 + noise).save(path, quality=87)
        else:
            os.link(path_of("train", number % 200), path)
    images.SHARD_BYTES = options.shard_mb * 1_000_000
    images.prepare(folder / "files", folder / "shards", workers=1)
    return folder / "shards"


def serve(folder: str, latency: float, port: Connection) -> None:
    """Serves the files of a folder, in a process of its own; sends the URL to `port`."""
    files = {}
    for path in Path(folder).iterdir():
        if path.is_file():
            files[path.name] = path.read_bytes()
    bucket = Bucket(files, latency)
    port.send(bucket.url)
    bucket.serve_forever()


@dataclass(frozen=True)
class Epoch:
    """How long the batches of an epoch took."""

    first: float  # seconds to the first batch
    rate: float  # images a second from there on


def epoch(data: str, options: Options, mesh: device.Mesh, seed: int) -> Epoch:
    """Loads all batches of an epoch, with new worker processes."""
    begun = time.perf_counter()
    dataset = open_imagenet(data, "train", options.image_size)
    steps = loading.steps_per_epoch(dataset, options.batch_size, mesh)
    with loading.parallel_loader(
        dataset,
        options.batch_size,
        mesh,
        train=True,
        seed=seed,
        stop=steps,
        workers=options.workers,
    ) as loader:
        next(loader)
        started = time.perf_counter()
        images_after_the_first = sum(len(batch["label"]) for batch in loader)
    seconds = time.perf_counter() - started
    return Epoch(first=started - begun, rate=images_after_the_first / seconds)


def measure(options: Options, mesh: device.Mesh) -> dict[str, list[float]]:
    """Returns "first" and "rate" of each source in each counted round."""
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or str(make_shards(Path(temporary), options))
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        server = spawn.Process(target=serve, args=(folder, options.latency, theirs), daemon=True)
        server.start()
        sources = {"disk": folder, "server": ours.recv()}
        for number in range(options.rounds + 1):  # the first is a warm-up
            order = ("disk", "server") if number % 2 else ("server", "disk")
            for name in order:
                cache = f"{temporary}/cache{number}"
                os.environ["DATA_CACHE_DIR"] = cache
                found = epoch(sources[name], options, mesh, seed=number)
                shutil.rmtree(cache, ignore_errors=True)
                if number > 0:
                    figures.setdefault(f"{name}, first", []).append(found.first)
                    figures.setdefault(f"{name}, rate", []).append(found.rate)
                print(
                    f"round {number}, {name}: {found.rate:.0f} images/s, "
                    f"first after {found.first:.1f} s",
                    flush=True,
                )
        server.terminate()
    return figures


def main(options: Options) -> dict[str, list[float]]:
    """Measures, prints and writes --out; returns the figures of each round."""
    mesh = device.setup(seed=0, precision="float32", kind="cpu")
    figures = measure(options, mesh)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    rates = zip(figures["server, rate"], figures["disk, rate"], strict=True)
    ratios = [server / disk for server, disk in rates]
    print(
        f"\nimages/s, medians: server {medians['server, rate']:.0f}, "
        f"disk {medians['disk, rate']:.0f}"
    )
    print(
        f"seconds to the first batch: server {medians['server, first']:.1f}, "
        f"disk {medians['disk, first']:.1f}"
    )
    print(
        f"server / disk: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), goal 0.95"
    )
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    record = {"options": vars(options), "figures": figures}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
