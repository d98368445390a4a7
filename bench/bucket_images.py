"""Images a second from shards behind a server that answers each request late, and from the same shards on the disk.

    disk     data.shards on the folder, through train.common.loading's worker processes, to batches on the CPU
    server   the same by http from a process of this machine that waits 50 ms before each answer, into an empty cache

    how      each round reads an epoch from both, in turns, with new worker processes; counted from the first batch to
             the last one; the shards that come before it are in `seconds to the first batch`
    run      python -m bench.bucket_images            (--data FOLDER: shards of your own; without it, noise is made)

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
    data: str = ""  # folder that make data DATASET=images wrote; "": JPEG files of noise, 500 x 375 pixels, 105 KB each
    count: int = 8000  # of the images that are made
    shard_mb: int = (
        10  # of the shards that are made: a tenth of the usual size, so ten times the requests
    )
    latency: float = 0.05  # seconds before each answer
    image_size: int = 224  # pixels, square
    batch_size: int = 64  # images a batch
    rounds: int = 5  # counted ones; one more, before them, is not
    workers: int = -1  # processes that decode; -1: one a core
    out: str = "runs/bench/bucket_images.json"  # where the figures go


def make_shards(folder: Path, options: Options) -> Path:
    """Returns a folder of shards of `count` images, 200 of them different."""
    rng = np.random.default_rng(0)
    for number in range(options.count):
        split, name = ("train", number) if number < options.count - 64 else ("val", number)
        path = folder / "files" / split / str(number % 10) / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number < 200:
            coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
                (500, 375)
            )
            noise = rng.integers(0, 36, (375, 500, 3), dtype=np.uint8)
            Image.fromarray(np.asarray(coarse) // 2 + noise).save(path, quality=87)
        else:
            os.link(
                folder / "files" / "train" / str(number % 200 % 10) / f"{number % 200}.jpg", path
            )
    images.SHARD_BYTES = options.shard_mb * 1_000_000
    images.prepare(folder / "files", folder / "shards", workers=1)
    return folder / "shards"


def serve(folder: str, latency: float, port) -> None:
    """Serves the files of a folder, in a process of its own; tells the URL."""
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    bucket = Bucket(files, latency)
    port.send(bucket.url)
    bucket.serve_forever()


def epoch(data: str, options: Options, mesh: device.Mesh, seed: int) -> dict[str, float]:
    """Returns the seconds to the first batch of an epoch, and images a second from there on."""
    begun = time.perf_counter()
    dataset = open_imagenet(data, "train", options.image_size)
    steps = loading.steps_per_epoch(dataset, options.batch_size, mesh)
    span = {"seed": seed, "stop": steps, "workers": options.workers}
    with loading.parallel_loader(dataset, options.batch_size, mesh, train=True, **span) as loader:
        next(loader)
        started = time.perf_counter()
        rest = sum(len(batch["label"]) for batch in loader)
    return {"first": started - begun, "rate": rest / (time.perf_counter() - started)}


def main(options: Options) -> dict[str, list[float]]:
    """Measures, prints and writes --out; returns the figures of each round."""
    mesh = device.setup(seed=0, precision="float32", kind="cpu")
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or str(make_shards(Path(temporary), options))
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        server = context.Process(target=serve, args=(folder, options.latency, theirs), daemon=True)
        server.start()
        sources = {"disk": folder, "server": ours.recv()}
        for number in range(options.rounds + 1):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                cache = f"{temporary}/cache{number}"
                os.environ["DATA_CACHE_DIR"] = cache
                found = epoch(sources[name], options, mesh, seed=number)
                shutil.rmtree(cache, ignore_errors=True)
                for key, value in found.items() if number else ():
                    figures.setdefault(f"{name}, {key}", []).append(value)
                print(
                    f"round {number}, {name}: {found['rate']:.0f} images/s, first after {found['first']:.1f} s",
                    flush=True,
                )
        server.terminate()
    ratios = [a / b for a, b in zip(figures["server, rate"], figures["disk, rate"], strict=True)]
    rates = {name: statistics.median(figures[f"{name}, rate"]) for name in sources}
    firsts = {name: statistics.median(figures[f"{name}, first"]) for name in sources}
    print(f"\nimages/s, medians: server {rates['server']:.0f}, disk {rates['disk']:.0f}")
    print(f"seconds to the first batch: server {firsts['server']:.1f}, disk {firsts['disk']:.1f}")
    print(
        f"server / disk: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), goal 0.95"
    )
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    Path(options.out).write_text(
        json.dumps({"options": vars(options), "figures": figures}, indent=2) + "\n"
    )
    return figures


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
