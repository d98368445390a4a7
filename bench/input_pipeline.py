"""Images a second from JPEG files to training batches: our loading, torchvision's, and the limit.

    ours, host     data.imagenet in the worker processes of train.common.loading: batches of uint8
                   in host memory
    ours, strong   as the first, with the strong augmentation of data/augmentation.py
    ours, device   the same through the upload thread, to the XLA device
    reference      torchvision's references/classification: ImageFolder, RandomResizedCrop, flip,
                   PILToTensor, ConvertImageDtype, Normalize, DataLoader: batches of float32 in host
                   memory
    limit          processes that only decode bytes in memory and resize the whole picture, one file
                   after the other, no crop, no batch, nothing sent: with data.imagenet's decode and
                   resize, and with Pillow's

    how            equal numbers of processes, one thread in each, started and warmed before; every
                   round runs each of them over the same number of batches, from the first request
                   to the last batch, in rotating order
    run            python -m bench.input_pipeline --data FOLDER

Ratios are taken within a round, and their median is printed. Run it on a machine that does nothing
else.
"""

import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as T
import tyro
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2.functional import resize

from data import imagenet
from errors import InputError
from train.common import batches, device, loading


@dataclass(frozen=True)
class Options:
    data: str  # folder with train/ of class folders
    enlarge: int = 0  # first writes pictures with this longer side, pixels, JPEG 95; 0: as they are
    image_size: int = 224  # pixels, square
    batch_size: int = 64  # images per batch
    batches: int = 40  # per round; a multiple of the workers keeps all of them busy to the end
    rounds: int = 7  # counted ones; one more, before them, is not
    workers: int = -1  # processes of each contender; -1: one per core
    out: str = "runs/bench/input_pipeline.json"  # where the figures go


def enlarged(data: str, pixels: int, folder: str) -> str:
    """Writes the training pictures to `folder`; their longer side becomes `pixels` long.

    Those of ImageNet are about 500 long. Returns `folder`.
    """
    train = Path(data, "train")
    for path in filter(Path.is_file, train.rglob("*.jpg")):
        out = Path(folder, "train", path.relative_to(train))
        out.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            size = [round(side * pixels / max(image.size)) for side in image.size]
            resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
            resized.save(out, quality=95)
    return folder


def one_thread(_: int = 0) -> None:
    """Limits PyTorch to one thread; a worker's number is not used."""
    torch.set_num_threads(1)


def our_loader(options: Options, workers: int, augmentation: str = "crop") -> DataLoader:
    """Returns the DataLoader inside `loading.parallel_loader`, for one host.

    Its workers stay between the rounds.
    """
    dataset = imagenet.open_imagenet(options.data, "train", options.image_size)
    dataset.augmentation = augmentation
    keys = batches.training_keys(dataset, options.batch_size, seed=0, start=0, stop=options.batches)
    maker = batches.BatchMaker(dataset, seed=0, masked=False, collate=batches.as_tensors)
    return batches.data_loader(maker, list(keys), workers, persistent_workers=True)


def reference_loader(options: Options, workers: int) -> DataLoader:
    """Returns the loader of torchvision's references/classification/train.py.

    It has the transforms of its presets.py.
    """
    transform = T.Compose(
        [
            T.RandomResizedCrop(options.image_size),
            T.RandomHorizontalFlip(0.5),
            T.PILToTensor(),
            T.ConvertImageDtype(torch.float),
            T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = ImageFolder(os.path.join(options.data, "train"), transform)
    return DataLoader(
        dataset,
        options.batch_size,
        sampler=RandomSampler(dataset, num_samples=options.batches * options.batch_size),
        num_workers=workers,
        worker_init_fn=one_thread,
        # As ours: a fork of this process would copy the threads of its XLA client. The speed does
        # not depend on it.
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )


FILES: dict[int, bytes] = {}  # contents by index, in the limit's worker processes


def start_limit(files: dict[int, bytes]) -> None:
    """Prepares a worker process of the limit."""
    one_thread()
    FILES.update(files)


def decode_and_resize(indices: list[int], size: int, pillow: bool) -> int:
    """Does the work of the limit, in a worker process; returns the number of images."""
    for index in indices:
        encoded = FILES[index]
        if pillow:
            with Image.open(io.BytesIO(encoded)) as image:
                resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
                np.asarray(resized)
        else:
            resize(imagenet.decode(encoded), [size, size])
    return len(indices)


def consume(batches: Any) -> int:
    """Takes every batch; returns the number of images."""
    images = 0
    for batch in batches:
        labels = batch[1] if isinstance(batch, list) else batch["label"]
        images += len(labels)
    return images


def measure(passes: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Returns images a second of each pass in each round, after a round that is not counted.

    Args:
        passes: by contender a function that loads all batches and returns the number of images.
    """
    rates: dict[str, list[float]] = {name: [] for name in passes}
    names = list(passes)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            images = passes[name]()
            rate = images / (time.perf_counter() - started)
            if number > 0:
                rates[name].append(rate)
        warm_up = " (warm-up)" if number == 0 else ""
        print(f"round {number} of {rounds}{warm_up}", flush=True)
    return rates


def table(rates: dict[str, list[float]]) -> str:
    """Returns Markdown: median and range of images/s, and of the ratios of `ours` to the others."""
    lines = [
        "| | images/s, median (min to max) | ours, host / this | ours, device / this |",
        "|---|---|---|---|",
    ]
    for name, values in rates.items():
        cells = [f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"]
        for own in ("ours, host", "ours, device"):
            ratios = [ours / this for ours, this in zip(rates[own], values, strict=True)]
            median = statistics.median(ratios)
            cells.append(f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(options: Options) -> dict[str, list[float]]:
    """Measures, prints the table and writes --out.

    Returns:
        Images/s of each contender and round.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = options.data
        if options.enlarge:
            data = enlarged(options.data, options.enlarge, folder)
        rates = compare(replace(options, data=data))
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    record = {"options": vars(options), "images_per_second": rates}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    return rates


def compare(options: Options) -> dict[str, list[float]]:
    """Measures and prints the table; returns images/s of each contender and round."""
    if min(options.rounds, options.batches) < 1:
        raise InputError(
            f"--rounds is {options.rounds}, --batches {options.batches}; each must be at least 1"
        )

    mesh = device.setup(seed=0, precision="float32")
    workers = options.workers if options.workers > 0 else len(os.sched_getaffinity(0))
    ours = our_loader(options, workers)
    strong = our_loader(options, workers, "strong")
    reference = reference_loader(options, workers)

    # The limit has the files of our batches, in its processes' memory before the clock starts.
    dataset = ours.dataset.dataset
    indices_of_batches = [indices.tolist() for _, indices in ours.sampler]
    contents = {}
    for indices in indices_of_batches:
        for index in indices:
            contents[index] = dataset._read(index)[0]  # the bytes of the file
    forkserver = multiprocessing.get_context("forkserver")
    pool = forkserver.Pool(workers, start_limit, (contents,))

    def limit(pillow: bool) -> int:
        work = [(indices, options.image_size, pillow) for indices in indices_of_batches]
        return sum(pool.starmap(decode_and_resize, work, chunksize=1))

    def to_host() -> int:
        return consume(map(ours.dataset.opened, ours))

    def strong_to_host() -> int:
        return consume(map(strong.dataset.opened, strong))

    def to_device() -> int:
        with loading.Loader(ours, mesh) as loader:
            return consume(loader)

    with pool:
        rates = measure(
            {
                "ours, host": to_host,
                "ours, strong": strong_to_host,
                "ours, device": to_device,
                "reference": lambda: consume(reference),
                "limit, our decode and resize": lambda: limit(pillow=False),
                "limit, Pillow": lambda: limit(pillow=True),
            },
            options.rounds,
        )

    limits = (rates["limit, our decode and resize"], rates["limit, Pillow"])
    faster_limit = max(limits, key=statistics.median)
    to_reference = paired(rates["ours, host"], rates["reference"])
    to_limit = paired(rates["ours, host"], faster_limit)
    of_strong = paired(rates["ours, strong"], rates["ours, host"])
    print(
        f"\n{len(contents)} files, {options.image_size} px, {workers} processes, "
        f"batches of {options.batch_size}\n"
    )
    print(table(rates))
    print(
        f"\nours, host: {to_reference:.2f} x the reference (goal 1.30), "
        f"{to_limit:.2f} of the faster limit (goal 0.85); "
        f"ours, strong: {of_strong:.2f} of ours, host (goal 0.8)"
    )
    return rates


def paired(one: list[float], other: list[float]) -> float:
    """Returns the median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
