"""Speed of predictions on this CPU or GPU: ours, transformers' pipeline's and a plain loop's.

ours      answers of train/predict.py, from files to names and probabilities: on plain PyTorch
          (--device cpu or cuda), and compiled by XLA
pipeline  transformers' pipeline, with batches of --batch-size, from the same files
loop      what people write: batches of --batch-size in their order, padded to their longest, the
          model, softmax, in one process; pictures by torchvision's transforms
how       the same random weights (a ResNet-50, or a BERT of --size), float32, the same cores;
          rounds in rotating order; ratios within a round. A first round, which compiles, does not
          count. The start of our processes that decode pictures counts in each round
data      pictures of --pixels that it makes; sentences of GLUE's synthetic twins
run       make bench BENCH=predict ARGS="--kind sentences"

Run it on a machine that does nothing else.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from data import glue, imagenet, text_rows, vocabulary
from errors import InputError
from models import classification, encoder_files, encoders
from models.resnet import resnet
from train import predict, resnet50
from train.common import device
from train.prediction import pictures, sentences
from train.prediction.pieces import in_order


@dataclass(frozen=True)
class Options:
    kind: Literal["pictures", "sentences"] = "sentences"  # what is predicted
    count: int = 0  # inputs; 0: 512 pictures, 1024 sentences
    size: Literal["tiny", "mini", "base"] = "mini"  # of the BERT
    pixels: int = 500  # of a picture's longer side
    batch_size: int = 32  # of every side
    xla: bool = True  # --no-xla: without our side on XLA
    device: Literal["cpu", "cuda"] = "cpu"  # of the others
    threads: int = 2  # cores
    rounds: int = 5  # counted rounds
    out: str = "runs/bench/predict.json"  # where the figures go


# Returns answers one by one.
Side = Callable[[], Iterator[Any]]


def write_pictures(folder: Path, options: Options) -> list[str]:
    """Writes JPEG files of coarse colours under noise; returns their paths."""
    import PIL.Image

    rng = np.random.default_rng(0)
    size = (options.pixels, options.pixels * 3 // 4)
    paths = []
    for number in range(options.count):
        coarse = PIL.Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        path = folder / f"{number:05d}.jpg"
        coarse.resize(size, PIL.Image.BICUBIC).save(path, quality=90)
        paths.append(str(path))
    return paths


def write_network(folder: str, mesh: device.Mesh) -> None:
    """Writes the export of a ResNet-50 with random weights for ten classes."""
    images = imagenet.SyntheticImages(1, 224, 10, 0, "train")
    config = replace(resnet50.Config(), data="synthetic")
    state = resnet50.State(resnet("resnet50", 10), None, None)
    resnet50.export(folder, state, resnet50.Data(images, images), config, mesh)


def write_classifier(folder: str, size: str) -> None:
    """Writes the export of a BERT with random weights for two classes."""
    text = glue.read("synthetic", "sst2", "train").first
    tokenizer = vocabulary.learn(text, "bert", 400)
    settings = encoders.new_configuration("bert", size, tokenizer, 128)
    model = classification.classifier(settings, ("negative", "positive"), None).model
    encoder_files.save(folder, model, model.state_dict(), tokenizer)


def texts(count: int) -> list[str]:
    """Returns sentences of 4 to 25 words."""
    found = []
    seed = 0
    while len(found) < count:
        found += glue.read("synthetic", "sst2", "train", seed).first
        seed += 1
    return found[:count]


# ---- our side ------------------------------------------------------------------------------------


def ours(folder: str, data: str, options: Options, kind: str) -> Side:
    """Returns train/predict.py's answers on a device; the model is on it from the first call on."""
    config = predict.Config(
        model_dir=folder,
        data=data,
        precision="float32",
        device=kind,
        batch_size=options.batch_size,
    )
    mesh = device.setup(0, "float32", kind=kind)
    part = pictures if options.kind == "pictures" else sentences
    model = part.open_model(folder, config)

    def run() -> Iterator[dict]:
        device.choose_backend(kind)  # the sides take turns in this process
        if options.kind == "sentences":
            model.rows = text_rows.lines(data)
        return in_order(model.pieces(mesh), model.to_answers, skip_broken=False)

    return run


# ---- the others ----------------------------------------------------------------------------------


def pipeline_of_sentences(folder: str, data: str, options: Options) -> Side:
    """Returns transformers' pipeline over the lines of a file."""
    import transformers

    classify = transformers.pipeline("text-classification", folder, device=options.device)

    def run() -> Iterator[dict]:
        lines = (line for line in Path(data).read_text("utf-8").splitlines())
        return classify(lines, batch_size=options.batch_size, truncation=True, top_k=None)

    return run


def loop_of_sentences(folder: str, data: str, options: Options) -> Side:
    """Returns a loop over batches of lines."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def run() -> Iterator[dict]:
        lines = Path(data).read_text("utf-8").splitlines()
        for first in range(0, len(lines), options.batch_size):
            batch = lines[first : first + options.batch_size]
            inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            with torch.inference_mode():
                shares = model(**inputs.to(options.device)).logits.softmax(1)
            yield from named(shares, model.config.id2label)

    return run


def pipeline_of_pictures(folder: str, data: str, options: Options) -> Side:
    """Returns transformers' pipeline with its own ResNet-50, whose weights are random, too."""
    import transformers

    config = transformers.ResNetConfig(num_labels=10)
    model = transformers.ResNetForImageClassification(config)
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=0.875)
    classify = transformers.pipeline(
        "image-classification", model, image_processor=processor, device=options.device
    )

    def run() -> Iterator[dict]:
        paths = (str(path) for path in sorted(Path(data).iterdir()))
        return classify(paths, batch_size=options.batch_size)

    return run


def loop_of_pictures(folder: str, data: str, options: Options) -> Side:
    """Returns a loop over batches of pictures with torchvision's model and transforms."""
    import safetensors.torch
    import torchvision
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(safetensors.torch.load_file(f"{folder}/model.safetensors"))
    model = model.to(options.device).eval()
    prepare = v2.Compose(
        [
            v2.Resize(256),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    names = {number: str(number) for number in range(10)}

    def run() -> Iterator[dict]:
        paths = sorted(Path(data).iterdir())
        for first in range(0, len(paths), options.batch_size):
            images = []
            for path in paths[first : first + options.batch_size]:
                images.append(prepare(decode_image(str(path), ImageReadMode.RGB)))
            with torch.inference_mode():
                shares = model(torch.stack(images).to(options.device)).softmax(1)
            yield from named(shares, names)

    return run


def named(shares: torch.Tensor, names: dict[int, str]) -> Iterator[dict]:
    """Yields the class of each row, and its probability."""
    best = shares.max(1)
    for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        yield {"label": names[index], "probability": probability}


# ---- measuring -----------------------------------------------------------------------------------


def rate(side: Side) -> float:
    """Returns the answers a second of a side."""
    started = time.perf_counter()
    count = sum(1 for _ in side())
    return count / (time.perf_counter() - started)


def contenders(folder: str, data: str, options: Options) -> dict[str, Side]:
    """Returns the sides by name; the plain loop is the reference."""
    sides = {f"ours, --device {options.device}": ours(folder, data, options, options.device)}
    if options.xla:
        sides["ours, --device xla"] = ours(folder, data, options, "xla")
    if options.kind == "sentences":
        sides["pipeline"] = pipeline_of_sentences(folder, data, options)
        sides["loop"] = loop_of_sentences(folder, data, options)
    else:
        sides["pipeline"] = pipeline_of_pictures(folder, data, options)
        sides["loop"] = loop_of_pictures(folder, data, options)
    return sides


def main(options: Options) -> None:
    """Measures, prints a table and writes the figures."""
    if not options.count:
        options = replace(options, count=512 if options.kind == "pictures" else 1024)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["CPU_NUM_DEVICES"] = "1"
    torch.set_num_threads(options.threads)

    with tempfile.TemporaryDirectory() as made:
        folder = f"{made}/export"
        data = f"{made}/new"
        mesh = device.setup(0, "float32", kind="xla" if options.xla else options.device)
        if options.kind == "pictures":
            Path(data).mkdir()
            write_pictures(Path(data), options)
            write_network(folder, mesh)
        else:
            lines = "".join(f"{text}\n" for text in texts(options.count))
            Path(data).write_text(lines, "utf-8")
            write_classifier(folder, options.size)
        sides = contenders(folder, data, options)

        rates: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(-1, options.rounds):  # the first is a warm-up
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found = rate(sides[name])
                if number >= 0:
                    rates[name].append(found)

    print(f"\n| {options.kind} a second | median (min to max) | / the loop's |\n|---|---|---|")
    for name, values in rates.items():
        ratios = [own / loop for own, loop in zip(values, rates["loop"], strict=True)]
        print(
            f"| {name} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps({"options": vars(options), "rates": rates}, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__.split("\n")[0]))
    except InputError as error:
        sys.exit(f"error: {error}")
