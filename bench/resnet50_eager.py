"""ResNet on real images: `train.resnet50` against the same recipe in plain eager PyTorch.

    compared  top-1 on the evaluation split, for each seed, and seconds of the whole process (start,
              compilation, training, one evaluation)
    ours      python -m train.resnet50 tiny …, the command that is printed
    eager     torchvision's model, ImageFolder, transforms and DataLoader, and torch's SGD on the
              CPU; the same schedule, batch, epochs, label smoothing and weight decay groups, in
              float32
    modern    --augmentation strong --average 0.04: torchvision's TrivialAugmentWide, RandomErasing,
              MixUp and CutMix (once per batch, ours once per image), and torch's AveragedModel
    how       one process per run; ours and eager alternate, seed by seed. The seeds start both, but
              give them different numbers: compare means, not seeds
    run       python -m bench.resnet50_eager --data FOLDER --seeds 0 1 2

Both use the batch-norm statistics of the whole batch, as an eager model on one device does;
--norm-groups changes ours.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import torchvision.transforms as T
import tyro
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.transforms import v2

from data.imagenet import choose_splits
from models.resnet import LAYERS
from train.resnet50 import TINY, Averaging, Config, averaging, learning_rate


@dataclass(frozen=True)
class Options:
    data: str  # folder with train/ and val/ of class folders
    seeds: tuple[int, ...] = (0,)  # one run of each side for every seed
    ours: bool = True  # --no-ours: the eager twin alone, in this process
    model: Literal["resnet50", "resnet101", "resnet152", "resnet_tiny"] = "resnet_tiny"  # network
    image_size: int = 32  # pixels, square
    epochs: int = 30  # passes over the training data
    batch_size: int = 64  # examples per step
    lr: float = 0.8  # peak learning rate per 256 examples
    warmup_epochs: float = 1.0  # linear from 0
    augmentation: Literal["crop", "strong"] = "crop"  # of training images
    average: float = 0.0  # moving average of weights: share of the steps that it spans; 0: none
    norm_groups: int = 1  # of ours: slices of the batch with their own batch-norm statistics
    workers: int = 2  # processes that decode images
    out: str = "runs/bench/resnet50_eager.json"  # where the figures go


# What both sides take from the options: they are fields of train.resnet50's Config, too.
FIELDS = (
    "data",
    "model",
    "image_size",
    "epochs",
    "batch_size",
    "lr",
    "warmup_epochs",
    "augmentation",
    "average",
    "norm_groups",
    "workers",
)


def eager_model(name: str, num_classes: int) -> nn.Module:
    """Returns torchvision's ResNet with the recipe's zero-initialised last norms.

    Its state_dict has the keys of models/resnet.py.
    """
    if name != "resnet_tiny":
        return ResNet(Bottleneck, list(LAYERS[name]), num_classes, zero_init_residual=True)

    # torchvision's class cannot have 16 channels, so its blocks are put together here.
    width = 16
    modules: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for stage in range(4):
        planes = width * 2**stage
        stride = 1 if stage == 0 else 2
        out = planes * Bottleneck.expansion
        projection = nn.Conv2d(channels, out, 1, stride, bias=False)
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(out))
        block = Bottleneck(channels, planes, stride, shortcut)
        modules[f"layer{stage + 1}"] = nn.Sequential(block)
        channels = out
    modules["avgpool"] = nn.AdaptiveAvgPool2d(1)
    modules["flatten"] = nn.Flatten()
    modules["fc"] = nn.Linear(channels, num_classes)

    model = nn.Sequential(modules)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
    return model


def transforms(train: bool, image_size: int, strong: bool = False) -> T.Compose:
    """Returns those of torchvision's reference recipe, at any image size."""
    if train:
        crop = [T.RandomResizedCrop(image_size), T.RandomHorizontalFlip()]
    else:
        crop = [T.Resize(round(image_size * 256 / 224)), T.CenterCrop(image_size)]
    normalize = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    as_tensor = [T.PILToTensor(), T.ConvertImageDtype(torch.float), normalize]
    if train and strong:
        crop.append(T.TrivialAugmentWide(interpolation=T.InterpolationMode.BILINEAR))
        as_tensor.append(T.RandomErasing(p=0.1))
    return T.Compose([*crop, *as_tensor])


class Mixed:
    """Collates a batch and mixes it by mixup or cutmix: images, and soft labels [B, classes]."""

    def __init__(self, classes: int):
        mixup = v2.MixUp(alpha=0.2, num_classes=classes)
        cutmix = v2.CutMix(alpha=1.0, num_classes=classes)
        self.choice = v2.RandomChoice([mixup, cutmix])

    def __call__(self, examples: list) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = default_collate(examples)
        return self.choice(images, labels)


def average_of(model: nn.Module, moving: Averaging) -> AveragedModel:
    """Returns the moving average of a model's weights and buffers; its first update copies."""

    def mean(average, newest, _):
        return (1 - moving.weight) * average + moving.weight * newest

    return AveragedModel(model, avg_fn=mean, use_buffers=True)


def train_eager(config: Config) -> dict[str, float]:
    """Trains with one seed; returns top1, top5 and loss of the evaluation split."""
    torch.manual_seed(config.seed)
    folders = [entry.name for entry in os.scandir(config.data) if entry.is_dir()]
    train, evaluation = choose_splits(folders, config.data)
    strong = config.augmentation == "strong"
    train_set = ImageFolder(
        os.path.join(config.data, train), transforms(True, config.image_size, strong)
    )
    eval_set = ImageFolder(
        os.path.join(config.data, evaluation), transforms(False, config.image_size)
    )
    workers = {"num_workers": config.workers, "persistent_workers": config.workers > 0}
    loader = DataLoader(
        train_set,
        config.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=Mixed(len(train_set.classes)) if strong else None,
        **workers,
    )

    model = eager_model(config.model, len(train_set.classes))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)

    if config.average:
        moving = averaging(config, config.epochs * len(loader), len(loader))
        average = average_of(model, moving)

    step = 0
    for epoch in range(config.epochs):
        losses = []
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, len(loader))
            logits = model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if config.average and step % moving.every == 0:
                if step <= moving.copied_until:
                    average.n_averaged.fill_(0)  # so it copies
                average.update_parameters(model)
        mean_loss = statistics.fmean(losses)
        print(
            f"eager, seed {config.seed}: epoch {epoch + 1}, training loss {mean_loss:.3f}",
            flush=True,
        )

    if config.average:
        model = average.module
    model.eval()
    top1 = 0.0
    top5 = 0.0
    loss = 0.0
    with torch.no_grad():
        for images, labels in DataLoader(eval_set, config.batch_size, **workers):
            logits = model(images)
            hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            top1 += hits[:, 0].sum().item()
            top5 += hits.sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
    examples = len(eval_set)
    return {"top1": top1 / examples, "top5": top5 / examples, "loss": loss / examples}


def flags_of(options: Options) -> list[str]:
    """Returns --name value for each of FIELDS."""
    flags = []
    for field in FIELDS:
        flags += [f"--{field.replace('_', '-')}", str(getattr(options, field))]
    return flags


def timed(command: list[str]) -> float:
    """Prints a command and runs it; returns the seconds that it took."""
    print(f"python {shlex.join(command[1:])}", flush=True)
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def run_ours(options: Options, seed: int, runs: str) -> dict[str, float]:
    """Runs `train.resnet50` with one seed in a process of its own.

    Returns its metrics, and seconds of the process.
    """
    name = f"bench-seed{seed}"
    command = [sys.executable, "-m", "train.resnet50", "tiny", *flags_of(options)]
    # Neither side evaluates or saves before its end.
    command += ["--seed", str(seed), "--eval-every", str(options.epochs), "--save-every", "1000000"]
    command += ["--runs", runs, "--name", name]
    seconds = timed(command)
    summary = json.loads(Path(runs, name, "summary.json").read_text())
    compile_seconds = summary["report"]["compile_seconds"]
    return {**summary["metrics"], "seconds": seconds, "compile_seconds": compile_seconds}


def run_eager(options: Options, seed: int, runs: str) -> dict[str, float]:
    """Runs the eager twin with one seed in a process of its own.

    Returns its metrics, and seconds of the process.
    """
    out = os.path.join(runs, f"eager-seed{seed}.json")
    command = [sys.executable, "-m", "bench.resnet50_eager", "--no-ours"]
    command += ["--seeds", str(seed), "--out", out, *flags_of(options)]
    seconds = timed(command)
    metrics = json.loads(Path(out).read_text())["eager"][0]
    return {**metrics, "seconds": seconds}


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Returns Markdown: mean, standard deviation and each seed's top-1 in percent, and seconds."""
    lines = [
        "| | top-1 %, mean ± sd | of each seed | top-5 % | loss | seconds, median (min to max) |",
        "|---|---|---|---|---|---|",
    ]
    mean = {}
    error = {}
    for side, runs in results.items():
        top1 = [100 * run["top1"] for run in runs]
        seconds = [run["seconds"] for run in runs]
        spread = statistics.stdev(top1) if len(top1) > 1 else math.nan
        mean[side] = statistics.fmean(top1)
        error[side] = spread / math.sqrt(len(top1))

        of_each_seed = ", ".join(f"{value:.1f}" for value in top1)
        top5 = 100 * statistics.fmean(run["top5"] for run in runs)
        loss = statistics.fmean(run["loss"] for run in runs)
        median = statistics.median(seconds)
        lines.append(
            f"| {side} | {mean[side]:.2f} ± {spread:.2f} | {of_each_seed} | {top5:.2f} "
            f"| {loss:.3f} | {median:.0f} ({min(seconds):.0f} to {max(seconds):.0f}) |"
        )
    if len(results) == 2:
        difference = mean["ours"] - mean["eager"]
        its_error = math.hypot(*error.values())
        lines.append("")
        lines.append(f"ours - eager: {difference:+.2f} points, standard error {its_error:.2f}")
    return "\n".join(lines)


def compare(options: Options) -> dict[str, list[dict[str, float]]]:
    """Runs both sides for every seed; returns the metrics of each run."""
    results: dict[str, list[dict[str, float]]] = {"ours": [], "eager": []}
    sides = [("ours", run_ours), ("eager", run_eager)]
    with tempfile.TemporaryDirectory(prefix="bench-resnet50-") as runs:
        for number, seed in enumerate(options.seeds):
            # Neither side always has the machine first.
            for side, run in sides if number % 2 == 0 else sides[::-1]:
                results[side].append({"seed": seed, **run(options, seed, runs)})
    return results


def eager_alone(options: Options) -> dict[str, list[dict[str, float]]]:
    """Trains the eager twin in this process for every seed; returns the metrics of each run."""
    runs = []
    shared = {field: getattr(options, field) for field in FIELDS}
    for seed in options.seeds:
        started = time.perf_counter()
        metrics = train_eager(replace(TINY, seed=seed, **shared))
        runs.append({"seed": seed, **metrics, "seconds": time.perf_counter() - started})
    return {"eager": runs}


def main(options: Options) -> dict[str, list[dict[str, float]]]:
    """Runs all seeds, prints the table and writes --out; returns the metrics of each run."""
    results = compare(options) if options.ours else eager_alone(options)
    print(f"\n{table(results)}")
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    record = {"options": vars(options), **results}
    Path(options.out).write_text(json.dumps(record, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
