"""ResNet-50 on ImageNet.

paper     Deep Residual Learning, He et al. 2015 (arXiv:1512.03385); v1.5 as in torchvision
recipe    Goyal et al. 2017 (arXiv:1706.02677): 90 epochs, learning rate 0.1 per 256 examples,
          5 epochs of warm-up, momentum 0.9, weight decay 1e-4, statistics of batch norm per worker,
          the weight of each block's last batch norm starts at zero: 76.4 % top-1 at a batch of
          256, 76.3 % at 8,192 (table 1).
          On top, from He et al. 2018 (arXiv:1812.01187, sections 3.1, 5.1, 5.2): no weight decay on
          norms and biases, cosine decay, label smoothing 0.1.
          modern: torchvision's recipe of 2021, see `MODERN`.
          Fine-tuning, for 100 to 100,000 images: see `fit`.
data      ImageNet (1,281,167 images, 1,000 classes) as a tree of class folders, any images that
          Hugging Face's `datasets` opens, or shards in a folder or a bucket
          (make data DATASET=images); or pictures with a labels.csv (data/labelled_files.py)
run       python -m train.resnet50 tiny                          synthetic data: half a minute on
                                                                 two CPU cores
          python -m train.resnet50 full --data /data/imagenet    on a TPU VM
          python -m train.resnet50 modern --data /data/imagenet  likewise
          python -m train.resnet50 finetune --data /data/pictures --weights resnet50.pth
result    full and modern recipe: not run yet; tiny: README.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.resnet50 tiny"
    )

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import imagenet, labelled_files, splits, targets
from errors import InputError
from models import heads, mixing
from models.resnet import Normalize, decide_head, load_weights, resnet, share_statistics
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.benchmark import Benchmark
from train.common.evaluation import FinishedRun, resolve_config
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # class folders, shards, or saved by HF datasets; URL; HF hub id; "synthetic"
    model: Literal["resnet50", "resnet101", "resnet152", "resnet_tiny"] = "resnet50"  # network
    weights: str | None = ""  # trained: safetensors or .pth; other classes: new head; None: needed
    labels: str = ""  # of --weights' head: its classes in order, a,b,…; where the file names none
    label: tuple[str, ...] = ()  # columns of a labels.csv; (): the only one beside file and split
    objective: Literal[targets.OBJECTIVES] = "classes"  # what the labels of a labels.csv are
    separator: str = ""  # between the labels of a text, with --objective multilabel
    evaluate: str = ""  # a finished run's folder: nothing is trained, its export is evaluated
    split: str = ""  # of --data, with --evaluate: train, valid, test; "": as in training
    image_size: int = 224  # pixels, square
    eval_size: int = 0  # pixels of evaluated images, square; 0: image_size
    eval_resize: int = 0  # pixels of their shorter side before that; 0: 256/224 of the square's
    augmentation: Literal[imagenet.AUGMENTATIONS] = "crop"  # strong: see data/augmentation.py
    epochs: int | None = 90  # passes over the training data; None: by the number of images
    batch_size: int | None = 1024  # examples per update, over all devices; None: likewise
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    optimizer: Literal["sgd", "lars"] = "sgd"  # lars (You et al. 2017): for batches above 8,192
    lr: float | None = 0.1  # peak learning rate per 256 examples: times batch_size / 256
    warmup_epochs: float | None = 5.0  # linear from 0; None: a tenth of the epochs
    decay: Literal["cosine", "polynomial"] = "cosine"  # after it; polynomial: MLPerf's, of power 2
    momentum: float = 0.9  # of SGD and LARS
    weight_decay: float = 1e-4  # not on norms and biases
    label_smoothing: float = 0.1  # of the training loss of classes
    average: float = 0.0  # moving average of weights: share of the steps that it spans; 0: none
    norm_groups: int = 0  # batch-norm groups per micro-batch; 0: one per device
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    layout: Layout = WHOLE  # only --shard-state (docs/large_models.md) fits this model
    seed: int = 0  # of the initial weights, the order of the data and the augmentation
    workers: int = -1  # processes per host that decode images; -1: one per core, 0: none
    skip_broken: bool = False  # replace images that cannot be decoded, and count them; else stop
    log_every: int = 50  # steps between lines of metrics
    save_every: int = 1000  # steps between checkpoints; there is one at each evaluation, too
    eval_every: int | None = 1  # epochs between evaluations; None: ten in a run
    keep: int = 3  # checkpoints that stay
    best: str = ""  # exports the best checkpoint by top1, -loss, …; "": the last
    patience: int = 0  # evaluations without a better --best that end the training; 0: none do
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


# The recipe of torchvision's ResNet50_Weights.IMAGENET1K_V2: Vryniotis 2021, "How to Train
# State-Of-The-Art Models Using TorchVision's Latest Primitives" (PyTorch's blog): 80.674 % top-1.
# The weights have 80.858 %, by repeated augmentation (pytorch/vision, pull request 5201), which is
# left out here.
# What is not below is Config's: batch 1,024, momentum 0.9, 5 epochs of warm-up, half a cosine,
# label smoothing 0.1. Differences: the warm-up rises per step, not per epoch from 0.01 of the peak;
# the 1,000 biases of the head do not decay, as norms do not; each block's last norm starts at zero;
# mixup and cutmix are drawn per image, not per batch of a device.
MODERN = Config(
    augmentation="strong",  # TrivialAugment, random erasing 0.1, mixup 0.2 or cutmix 1.0
    image_size=176,
    eval_size=224,
    eval_resize=232,
    epochs=600,
    lr=0.125,  # 0.5 at a batch of 1,024
    weight_decay=2e-5,
    average=0.039,  # the decay 0.99998, which it adjusts: 50,000 images an epoch of 1,281,167
)

TINY = Config(
    **cli.TRIAL,
    model="resnet_tiny",
    image_size=32,
    norm_groups=8,
    epochs=8,
    batch_size=64,
    lr=0.8,
    warmup_epochs=1.0,
    log_every=10,
    save_every=50,
)

# mlcommons/logging, rcp_checker/training_4.0.0/rcps_resnet.json, resnet_ref_4096: top-1 of 75.9 %
# after 39 to 42 epochs. 13,137 steps of decay are 42 epochs.
MLPERF = Config(
    epochs=47,
    batch_size=4096,
    optimizer="lars",
    lr=0.625,  # 10 at this batch
    decay="polynomial",
    weight_decay=2e-4,
    norm_groups=64,  # of 64 images
    eval_every=4,
)

# None: the weights have to be given, and `fit` chooses the others.
FINETUNE = Config(
    weights=None,
    epochs=None,
    batch_size=None,
    lr=None,
    warmup_epochs=None,
    eval_every=None,
    norm_groups=1,  # a small batch has too few images per device for statistics of its own
    log_every=10,
)

# Fields that a resumed run may change: these do not change the trained weights.
MAY_CHANGE = ("workers", "log_every", "save_every", "keep", "strict", "layout", "safe_forms")
# Flags that may be given with --evaluate; all others are the run's. They change no number beyond
# rounding.
EVALUATE_FLAGS = ("batch_size", "update_every", "skip_broken")
# The vector memory of a TPU core that one fusion may use. libtpu's default is less, which costs
# cycles: docs/tpu/findings.md.
VMEM_KIB = 40_960
# Of --decay polynomial and of LARS, in the rules of MLPerf Training.
END_LR = 1e-4
DECAY_POWER = 2
LARS_EPS = 0.0
# Bounds of what `fit` chooses, and its rate.
SMALLEST_BATCH = 16
LARGEST_BATCH = 256
FEWEST_EPOCHS = 10  # of a run
FEWEST_UPDATES = 500  # of a run
FINETUNE_LR = 0.03  # at a batch of 256
# Steps after which the moving average of the weights moves; torchvision's --model-ema-steps.
AVERAGE_EVERY = 32
SYNTHETIC_CLASSES = 10
SYNTHETIC_TRAIN = 2048  # images
SYNTHETIC_EVAL = 500


class Data(NamedTuple):
    """What a run reads."""

    train: imagenet.Images | None  # None: a finished run is evaluated
    eval: imagenet.Images


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    normalize: Normalize
    optimizer: torch.optim.Optimizer | None  # None: nothing is trained
    average: nn.Module | None = None  # of the model's weights over steps, with --average

    @property
    def stored(self) -> nn.Module:
        """What a checkpoint has of the networks."""
        if self.average is None:
            return self.model
        return nn.ModuleDict({"trained": self.model, "average": self.average})

    @property
    def evaluated(self) -> "State":
        """What is evaluated and exported: the average, where there is one."""
        if self.average is None:
            return self
        return self._replace(model=self.average, average=None)


@dataclass(frozen=True)
class Averaging:
    """When the moving average of the weights moves, and how far; of `averaging`."""

    every: int  # steps
    weight: float  # of the newest weights
    copied_until: int  # the step up to which the average is a copy of the newest weights

    def weight_at(self, step: int) -> float:
        """Returns the weight of the newest weights after `step`, counted from 1."""
        return 1.0 if step <= self.copied_until else self.weight


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then half a cosine to 0 (He et al. 2018,
    section 5.1); or a parabola to END_LR, as in MLPerf Training."""
    peak = config.lr * config.batch_size / 256
    warmup_steps = config.warmup_epochs * steps_per_epoch
    total_steps = config.epochs * steps_per_epoch
    if step < warmup_steps:
        # A warm-up may end within a step, whose rate would exceed the peak.
        return min(peak * (step + 1) / warmup_steps, peak)

    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if config.decay == "polynomial":
        end = min(END_LR, peak)
        return end + (peak - end) * (1 - progress) ** DECAY_POWER
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def validate(config: Config) -> Config:
    """Returns the config; raises InputError where flags are missing, out of range or do not fit
    together.

    Call it before `fit` and after it: a field that is None passes until it is chosen.
    """
    cli.at_least(config, 1, "epochs", "batch_size", "update_every", "keep")
    cli.at_least(config, 1, "log_every", "save_every", "eval_every")
    cli.at_least(config, 0, "lr", "warmup_epochs", "momentum", "weight_decay")
    cli.at_least(config, 0, "norm_groups", "seed", "patience", "eval_size", "eval_resize")
    cli.at_least(config, 0, "average", below=1)
    cli.at_least(config, 32, "image_size")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "label_smoothing", below=1)

    if config.weights is None:
        raise InputError(
            "--weights is missing: this preset starts from a trained network; "
            "give torchvision's file of --model (.pth) or the model.safetensors of an export"
        )
    are_given = config.warmup_epochs is not None and config.epochs is not None
    if are_given and config.warmup_epochs >= config.epochs:
        raise InputError(
            f"--warmup-epochs is {config.warmup_epochs}; it must be below --epochs, {config.epochs}"
        )
    if 0 < config.eval_resize < evaluated_size(config):
        raise InputError(
            f"--eval-resize is {config.eval_resize}; it must be at least the size of evaluated "
            f"images, {evaluated_size(config)}, which are cut from the resized ones"
        )
    if config.batch_size is not None and not config.evaluate:
        check_norm_groups(config)
        check_pairs(config)
    if config.labels and not config.weights:
        raise InputError(
            f"--labels is {config.labels}; it is for the head of --weights, which are not given"
        )
    cli.need_data(config, "a folder of images or a data set id")
    if config.data == "synthetic" and columns_of(config).asked_for:
        raise InputError(
            "--label, --objective and --separator are for a labels.csv; "
            "the images of --data synthetic have classes"
        )
    return config


def evaluated_size(config: Config) -> int:
    """Returns the pixels of an evaluated image's side."""
    return config.eval_size or config.image_size


def columns_of(config: Config) -> labelled_files.Columns:
    """Returns what of a labels.csv is learned."""
    return labelled_files.Columns(config.label, config.objective, config.separator)


def check_norm_groups(config: Config) -> None:
    """Raises InputError where the images of a micro-batch do not divide into --norm-groups."""
    micro_batch = config.batch_size // config.update_every  # steps_per_epoch refuses a remainder
    # 0 is one group per device. How many devices there are is not known yet: `build` checks them.
    groups = config.norm_groups or 1
    flags = f"--batch-size {config.batch_size}, in --update-every {config.update_every},"
    remedy = "raise the first, or lower the others"
    if micro_batch % groups:
        raise InputError(f"{flags} does not divide into {groups} --norm-groups; {remedy}")

    # 32 pixels are a single one in the last layers: batch norm needs a second image there.
    if micro_batch == groups and config.image_size == 32:
        raise InputError(
            f"{flags} does not divide into {groups} --norm-groups of at least 2 images, "
            f"which --image-size 32 needs; {remedy}"
        )


def check_pairs(config: Config, parts: int = 1) -> None:
    """Raises InputError where the strong augmentation cannot pair the images of a micro-batch, or
    those that each of `parts` processes has of it."""
    micro_batch = config.batch_size // config.update_every
    own = micro_batch // parts  # steps_per_epoch refuses a remainder
    if config.augmentation == "strong" and own % 2:
        of_each = f", {own} in each of {parts} processes" if parts > 1 else ""
        raise InputError(
            f"--batch-size {config.batch_size}, in --update-every {config.update_every}, makes "
            f"micro-batches of {micro_batch}{of_each}; --augmentation strong mixes pairs of "
            "images: give an even number"
        )


def averaging(config: Config, total_steps: int, steps_per_epoch: int) -> Averaging:
    """Returns how the weights are averaged with --average.

    As torchvision's reference does it, the average moves every 32 steps, and until the warm-up ends
    it is a copy. In a run so short that the average spans less than 320 steps, it moves ten times
    in its span.
    """
    span = config.average * total_steps  # steps
    every = min(AVERAGE_EVERY, max(int(span / 10), 1))
    warmup_steps = int(config.warmup_epochs * steps_per_epoch)
    return Averaging(every, min(every / span, 1.0), copied_until=max(warmup_steps, every))


def fit(config: Config, images: int, devices: int) -> Config:
    """Returns the config with values that fit so many training images where a field is None.

    As BiT-HyperRule (Kolesnikov et al. 2020, arXiv:1912.11370) it goes by the number of images
    alone, and makes at least the 500 updates that the rule has for small sets. That rule has
    batches of 512, which some hundred images do not fill: here the batch grows with their number.
    SGD with a momentum of 0.9 and a cosine are those of Kornblith et al. 2019 (arXiv:1805.08974),
    and the peak rate at a batch of 256 lies in their grid, 1e-4 to 0.1.

    The rate of an update goes with the square root of the batch. For new networks it goes with the
    batch; here a batch of 16 gets a quarter of the rate, not a sixteenth, since the few updates of
    a small set have to move the new head far enough. (240 images of CIFAR-10, in batches of 16, on
    a network trained on its other classes: 60.5 % with --lr 0.1, near the 0.12 that is chosen;
    56.3 % with --lr 0.03, which goes with the batch.)
    """
    if config.batch_size is None:
        batch_size = LARGEST_BATCH
        while batch_size > SMALLEST_BATCH and images // batch_size < loading.UPDATES_PER_EPOCH:
            batch_size //= 2
        divisor = config.update_every * devices
        config = replace(config, batch_size=math.ceil(batch_size / divisor) * divisor)

    if config.epochs is None:
        updates_per_epoch = max(images // config.batch_size, 1)
        epochs = math.ceil(FEWEST_UPDATES / updates_per_epoch)
        config = replace(config, epochs=max(epochs, FEWEST_EPOCHS))
    if config.lr is None:
        # Config.lr is per 256 examples: times batch / 256, this is FINETUNE_LR sqrt(batch / 256).
        lr = FINETUNE_LR * math.sqrt(256 / config.batch_size)
        # Two digits, as `explain_fit` says them: with that flag the run is the same.
        config = replace(config, lr=float(f"{lr:.2g}"))
    if config.warmup_epochs is None:
        config = replace(config, warmup_epochs=config.epochs / 10)
    if config.eval_every is None:
        config = replace(config, eval_every=max(config.epochs // 10, 1))
    return config


def explain_fit(given: Config, config: Config, images: int) -> str:
    """Returns a line about what `fit` has chosen, and why; "" where it has chosen nothing.

    Args:
        given: before `fit`.
    """
    reasons = {
        "batch_size": f"about {loading.UPDATES_PER_EPOCH} updates per epoch, "
        f"but {SMALLEST_BATCH} to {LARGEST_BATCH}",
        "epochs": f"at least {FEWEST_UPDATES} updates and {FEWEST_EPOCHS} epochs",
        "lr": f"per 256 images: {FINETUNE_LR:g} by the root of 256 / batch",
        "warmup_epochs": "a tenth",
        "eval_every": "ten evaluations",
    }
    chosen = []
    for name, reason in reasons.items():
        if getattr(given, name) is None:
            flag = name.replace("_", "-")
            chosen.append(f"--{flag} {getattr(config, name):g} ({reason})")
    if not chosen:
        return ""
    return f"chosen for {images:,} training images: {', '.join(chosen)}"


def open_data(config: Config) -> Data:
    """Opens the training and the evaluation images."""
    if config.data == "synthetic":
        return Data(
            train=_synthetic(config, "train", SYNTHETIC_TRAIN),
            eval=_synthetic(config, "eval", SYNTHETIC_EVAL),
        )
    options = (config.skip_broken, columns_of(config))
    train = imagenet.open_imagenet(config.data, "train", config.image_size, *options)
    train.augmentation = config.augmentation
    evaluation = imagenet.open_imagenet(config.data, "eval", evaluated_size(config), *options)
    evaluation.resize = config.eval_resize
    return Data(train, evaluation)


def _synthetic(config: Config, split: str, count: int) -> imagenet.SyntheticImages:
    size = config.image_size if split == "train" else evaluated_size(config)
    images = imagenet.SyntheticImages(count, size, SYNTHETIC_CLASSES, config.seed, split)
    images.augmentation = config.augmentation
    return images


def open_weights(
    config: Config, images: imagenet.Images
) -> tuple[dict[str, Tensor], heads.HeadDecision]:
    """Returns the tensors of --weights, and what becomes of their head.

    Raises:
        InputError: the file cannot be read; or, with --lr 0, which trains nothing, the classes of
            its head are unknown or not the data's.
    """
    tensors, metadata = files.load_model(config.weights)
    classes = images.classes
    stated = heads.parse_labels(config.labels, classes) if config.labels else ()
    head = decide_head(tensors, metadata, classes, config.weights, stated, config.objective)
    if config.lr == 0 and head.refusal_at_lr_0:
        raise InputError(head.refusal_at_lr_0)
    keeps_head = head.rows is not None
    if config.objective == "regression" and keeps_head:
        tensors = convert_head_unit(tensors, metadata, images.scale)
    return tensors, head


def check_weights(config: Config, data: Data) -> None:
    """Fits --weights to a network without numbers; raises InputError where `build` would."""
    with torch.device("meta"):
        model = resnet(config.model, len(data.train.classes))
    tensors, head = open_weights(config, data.train)
    load_weights(model, tensors, config.weights, head)


def convert_head_unit(
    tensors: dict[str, Tensor], metadata: dict[str, str], scale: labelled_files.Scale
) -> dict[str, Tensor]:
    """Returns the tensors of an exported regression with a head that predicts in this run's unit.

    An output z of the exported head means the label mean + deviation z, by the numbers of its own
    training; of the head that is returned it means scale.mean + scale.deviation z.
    """
    mean = float(metadata["label_mean"])
    deviation = float(metadata["label_std"])
    weight = tensors["fc.weight"] * (deviation / scale.deviation)
    bias = (tensors["fc.bias"] * deviation + mean - scale.mean) / scale.deviation
    return tensors | {"fc.weight": weight, "fc.bias": bias}


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Makes model, normalization and optimizer on the device.

    The optimizer's state exists from the start: made in the first step, it would make the second
    step another graph.

    Raises:
        InputError: --norm-groups does not fit the devices; or see `open_weights`.
    """
    norm_groups = config.norm_groups or mesh.num_devices
    # `check_norm_groups` has seen the batch, not yet the devices.
    if norm_groups > 1 and norm_groups % mesh.num_devices:
        raise InputError(
            f"--norm-groups is {norm_groups}; "
            f"it must be 1 or a multiple of {mesh.num_devices} devices"
        )
    if mesh.parts > 1:
        check_norm_groups(replace(config, norm_groups=norm_groups))
        check_pairs(config, mesh.parts)
    is_shared = norm_groups < mesh.parts  # by processes: the one group
    norm_groups = max(norm_groups // mesh.parts, 1)  # those of this process

    model = resnet(config.model, len(data.train.classes), norm_groups=norm_groups)
    if is_shared:
        share_statistics(model, mesh.parts, device.shared_mean)
    if config.weights:
        tensors, head = open_weights(config, data.train)
        load_weights(model, tensors, config.weights, head)
        if head.message and mesh.main_process:
            print(head.message, flush=True)

    average = None
    if config.average:
        average = copy.deepcopy(model).requires_grad_(False)
        average = device.to_device(average, mesh)
    model = device.to_device(model, mesh)
    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    normalize = device.to_device(normalize, mesh)

    optimizer = make_optimizer(config, model)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, normalize, optimizer, average)


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD or LARS; norms and biases, which are vectors, have no weight decay (He et al.
    2018, section 3.1)."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    # device.set_lr sets the rate before each step: --lr scaled. XLA has no foreach kernels.
    options = {"lr": config.lr, "momentum": config.momentum, "foreach": False}
    if config.optimizer == "lars":
        from timm.optim import Lars

        return Lars(groups, eps=LARS_EPS, **options)
    return torch.optim.SGD(groups, **options)


def compute_logits(state: State, batch: dict[str, Tensor], mesh: Mesh) -> Tensor:
    """Returns logits [B, outputs], float32, of batch["image"] [B, H, W, 3] uint8, which are mixed
    before where a training batch says how (data/augmentation.py)."""
    images = state.normalize(batch["image"])
    if "share" in batch:
        images = mixing.erase(images, batch["erased"])
        images = mixing.mix(images, batch["pasted"], batch["share"])
    with mesh.autocast():
        logits = state.model(images)
    return logits.float()


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns the mean loss over a batch or micro-batch of B examples, with --objective classes
    also the accuracy. Means, since all micro-batches have equally many examples.

    Args:
        batch: "image" [B, H, W, 3] uint8 and "label", see `compute_losses`.
    """
    logits = compute_logits(state, batch, mesh)
    labels = batch["label"]
    losses = compute_losses(logits, labels, config)
    if "share" in batch:
        share = mixing.own_shares(batch["pasted"], batch["share"], config.image_size**2)
        partners = mixing.partners(labels)
        losses = share * losses + (1 - share) * compute_losses(logits, partners, config)
        # For the accuracy: of the two the one with the larger share, as in the reference.
        labels = torch.where(share < 0.5, partners, labels) if labels.dim() == 1 else labels
    loss = losses.mean()
    if config.objective != "classes":
        return {"loss": loss}
    correct = logits.detach().argmax(1) == labels
    return {"loss": loss, "accuracy": correct.float().mean()}


def compute_losses(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Returns the loss of each example [B]; that of classes is label-smoothed, so for training
    alone.

    Args:
        logits: [B, outputs], float32.
        labels: [B], numbers of classes; in multilabel [B, labels], 0 or 1; in a regression [B], in
            units of the labels' standard deviation (data/labelled_files.py says why).
    """
    # Not reduction="mean": for that torch_xla counts the labels of all devices, a collective before
    # the backward pass.
    if config.objective == "multilabel":
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return losses.mean(1)
    if config.objective == "regression":
        return (logits[:, 0] - labels).square()
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns what `forward` does."""
    means = forward(state, batch, config, mesh)
    means["loss"].backward()
    update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return {name: mean.detach() for name, mean in means.items()}


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; returns the metrics of this, which
    `AccumulatedStep` adds to those of `forward`: there are none."""
    state.optimizer.step()
    return {}


def average_step(average: nn.Module, model: nn.Module, weight: Tensor, mesh: Mesh) -> None:
    """Moves the average of the weights and of batch norm's statistics towards the model's.

    Args:
        weight: a number on the device, of the model's.
    """
    with torch.no_grad():
        newest = [*model.parameters(), *model.buffers()]
        averages = [*average.parameters(), *average.buffers()]
        for mean, new in zip(averages, newest, strict=True):
            if mean.is_floating_point():  # not the count of batches, which nothing reads
                mean.copy_(mean * (1 - weight) + new * weight)
                device.annotate_placement(mean, mesh)


def eval_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns what an evaluation needs: for classes the sums of `class_sums`; for other objectives,
    of the whole batch, so that every host can read it, "logits" [B, outputs] and "known" [B], 0 for
    an image that could not be decoded."""
    with torch.no_grad():
        logits = compute_logits(state, batch, mesh)
    if config.objective == "classes":
        return class_sums(logits, batch)

    outputs = {"logits": logits, "known": is_known(batch["label"]).float()}
    return {name: device.whole_batch(output, mesh) for name, output in outputs.items()}


def is_known(labels: Tensor) -> Tensor:
    """Returns whether each label [B] or [B, labels] of an evaluation is of an image that could be
    decoded, [B]."""
    if labels.is_floating_point():  # UNKNOWN is -1e30, far below every label
        return labels.reshape(len(labels), -1)[:, 0] > imagenet.ListedImages.UNKNOWN / 2
    return labels >= 0


def class_sums(logits: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns sums over the examples of a batch that count: "loss", "top1" and "top5", and "count",
    their number. Padding (mask 0) and images that could not be decoded (label -1) do not count."""
    is_counted = batch["mask"] * is_known(batch["label"])
    label = batch["label"].clamp(min=0)
    label_logit = logits.gather(1, label[:, None])

    # The rank of the right class. Equal logits (bfloat16 has many) rank in the order of the
    # classes, as argmax and top-k take them.
    classes = torch.arange(logits.shape[1], device=logits.device)
    ties_ahead = (logits == label_logit) & (classes < label[:, None])
    rank = ((logits > label_logit) | ties_ahead).sum(1)
    # No logit is larger than NaN, so a right class whose logit is NaN would rank first: put it
    # behind the top 5, also where there are fewer than 5 classes.
    rank = torch.where(label_logit.isnan()[:, 0], logits.shape[1] + 5, rank)

    loss = F.cross_entropy(logits, label, reduction="none")
    loss = torch.where(is_counted > 0, loss, torch.zeros_like(loss))  # 0 * inf would be NaN
    return {
        "loss": loss.sum(),
        "top1": ((rank < 1) * is_counted).sum(),
        "top5": ((rank < 5) * is_counted).sum(),
        "count": is_counted.sum(),
    }


def check_evaluation(data: Data, config: Config, mesh: Mesh) -> None:
    """Reads the first and the last images that are evaluated; raises InputError where an evaluation
    would."""
    batches = loading.first_and_last(
        data.eval,
        config.batch_size,
        mesh,
        micro_batches=config.update_every,  # of each batch, as in training
        workers=config.workers,
    )
    decoded = 0
    for batch in batches:
        labels = batch["label"]
        # A data set may have other labels than numbers of classes.
        is_class = labels.dim() == 1 and not labels.is_floating_point()
        if config.objective == "classes" and not is_class:
            dtype = str(labels.dtype).removeprefix("torch.")
            raise InputError(
                f"a label of the images is {dtype} of shape {list(labels.shape[1:])}; "
                "this script's loss and metrics are for the number of a class: "
                "change forward and eval_step, and this check"
            )
        decoded += int((batch["mask"] * is_known(labels)).sum())

    if not device.over_hosts(mesh, decoded).total:
        raise InputError(
            f"none of the first and last images of the evaluation split of {config.data} "
            "can be decoded"
        )
    if config.objective == "multilabel" and not data.eval.labels.any():
        raise InputError(
            f"no image of the evaluation split of {config.data} has a label, "
            "so average precision is not defined; give others"
        )


def evaluate(
    eval_fn: Callable, state: State, images: loading.Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the mean loss over every image once, and top-1 and top-5 accuracy of classes, or the
    metrics of another objective (data/targets.py).

    Args:
        eval_fn: the compiled eval_step.
    """
    state.model.eval()
    loader = loading.parallel_loader(
        images,
        config.batch_size,
        mesh,
        train=False,
        micro_batches=config.update_every,  # of each batch, as in training
        workers=config.workers,
    )
    with loader:
        outputs = [eval_fn(state, batch, config, mesh) for batch in loader]
        if config.objective == "classes":
            metrics = class_metrics(outputs, images, config, mesh)
        else:
            metrics = output_metrics(outputs, images, config, mesh)
    state.model.train()
    return metrics


def class_metrics(
    outputs: list[dict[str, Tensor]], images: loading.Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the metrics of classes, from what `eval_step` has returned for all batches."""
    totals = device.fetch_sums(outputs)
    count = totals["count"]
    report_undecoded(count, images, config, mesh)
    return {name: totals[name] / count for name in ("top1", "top5", "loss")}


def output_metrics(
    outputs: list[dict[str, Tensor]], images: imagenet.ListedImages, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns the metrics of multilabel or a regression, from what `eval_step` has returned for all
    batches."""
    logits, known = read_outputs(outputs, len(images))
    report_undecoded(known.sum(), images, config, mesh)
    return score(logits[known], images.labels[known], images, config)


def report_undecoded(count: float, images: loading.Dataset, config: Config, mesh: Mesh) -> None:
    """Says how many images could not be decoded, if any.

    Args:
        count: of the images that could be.
    Raises:
        InputError: it is 0.
    """
    if not count:
        raise InputError(f"no image of the evaluation split of {config.data} can be decoded")
    if count < len(images) and mesh.main_process:
        print(
            f"evaluated {count:.0f} of {len(images)} images: the others cannot be decoded",
            flush=True,
        )


def read_outputs(outputs: list[dict[str, Tensor]], examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits [n, outputs] of n examples, in their order, and which of them could be
    decoded, bool [n]. The padding is after the last example."""
    logits = torch.cat(device.read([output["logits"] for output in outputs]))
    known = torch.cat(device.read([output["known"] for output in outputs]))
    return logits[:examples].numpy(), known[:examples].numpy() > 0


def score(
    logits: np.ndarray, labels: np.ndarray, images: imagenet.ListedImages, config: Config
) -> dict[str, float]:
    """Returns the metrics of multilabel or a regression, and the mean loss.

    Args:
        logits, labels: of n of the images; a regression's are in units of `images.scale`, its
            metrics in those of the CSV.
    """
    losses = compute_losses(torch.from_numpy(logits), torch.from_numpy(labels), config)
    if config.objective == "regression":
        logits = images.scale.to_labels(logits)
        labels = images.scale.to_labels(labels)
    metrics = targets.score(images.target, logits, labels)
    return metrics | {"loss": losses.mean().item()}


def metric_names(config: Config) -> list[str]:
    """Returns the names of what `evaluate` returns, in its order."""
    if config.objective == "classes":
        return ["top1", "top5", "loss"]
    return [*targets.METRICS[config.objective], "loss"]


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes model.safetensors for `load_state_dict` of torchvision's model; its metadata names the
    classes, the objective and how an image is prepared (docs/exports.md)."""
    # state_dict() converts parameters to torchvision's shapes. On the device that would compile a
    # program, so the parameters are fetched as they are, and a model on the host converts them.
    tensors = dict(state.model.named_parameters())
    tensors |= dict(state.model.named_buffers())
    # All hosts call it; the main one gets the weights.
    weights = checkpoint.to_host(tensors, layers=mesh.layers, is_needed=mesh.main_process)
    if not mesh.main_process:
        return

    classes = data.train.classes
    on_host = resnet(config.model, len(classes))
    on_host.load_state_dict(weights)
    metadata = {"model": config.model, "classes": json.dumps(classes)}
    metadata["objective"] = config.objective
    if config.objective == "regression":
        metadata["label_mean"] = str(data.train.scale.mean)
        metadata["label_std"] = str(data.train.scale.deviation)
    if data.train.label_columns:
        metadata["label_columns"] = json.dumps(data.train.label_columns)
    metadata |= imagenet.preparation(evaluated_size(config), config.eval_resize)
    metadata["precision"] = config.precision  # of the evaluation, and so of make predict
    files.save_weights(f"{folder}/model.safetensors", on_host.state_dict(), metadata)


def open_export(config: Config, run: FinishedRun) -> tuple[nn.Module, imagenet.Learned]:
    """Returns the network of a run's export, on the host, and what it tells."""
    path = f"{run.local_export()}/model.safetensors"
    weights, metadata = files.load_with_metadata(path)
    names = tuple(json.loads(metadata["classes"]))
    scale = labelled_files.Scale()
    if config.objective == "regression":
        mean = float(metadata["label_mean"])
        scale = labelled_files.Scale(mean, deviation=float(metadata["label_std"]))
    model = resnet(config.model, len(names))
    load_weights(model, weights, path)
    columns = tuple(json.loads(metadata.get("label_columns", "[]")))  # older exports name none
    return model, imagenet.Learned(targets.Target(config.objective, names), scale, columns)


def open_evaluation(config: Config, run: FinishedRun, learned: imagenet.Learned) -> imagenet.Images:
    """Opens the images of --split."""
    split = splits.wanted(config.split)
    if config.data == "synthetic":
        if split not in ("", "valid"):
            raise InputError(
                f"--split is {config.split}; of --data synthetic only valid can be evaluated: its "
                "training images are drawn anew in each step"
            )
        return _synthetic(config, "eval", SYNTHETIC_EVAL)

    is_own = run.owns(config.data)
    images = imagenet.open_evaluation(
        config.data,
        split,
        is_own,
        evaluated_size(config),
        config.skip_broken,
        columns_of(config),
        learned,
    )
    images.resize = config.eval_resize
    return images


def evaluate_run(config: Config, mesh: Mesh) -> dict[str, float]:
    """Evaluates the run --evaluate by its export; returns the metrics, as `main` does."""
    run = FinishedRun(config.evaluate)
    model, learned = open_export(config, run)
    images = open_evaluation(config, run, learned)
    check_evaluation(Data(train=None, eval=images), config, mesh)
    run.announce(mesh, config.data, f"{len(images):,} images", images)

    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    state = State(device.to_device(model, mesh), device.to_device(normalize, mesh), optimizer=None)
    eval_fn = device.compiled(eval_step, mesh)
    metrics = evaluate(eval_fn, state, images, config, mesh)
    return run.record(config, mesh, len(images), metrics)


def benchmark(config: Config, data: Data, mesh: Mesh, steps_per_epoch: int) -> Benchmark | None:
    """Returns what --log mlperf says of a run: MLPerf Training's ResNet, or None.

    Its rules are for --decay polynomial: a cosine has no power.
    """
    if config.objective != "classes":
        return None
    peak = config.lr * config.batch_size / 256
    decay_epochs = config.epochs - config.warmup_epochs
    of_optimizer = {
        "opt_base_learning_rate": peak,
        "opt_end_learning_rate": 0.0,
        "opt_learning_rate_decay_steps": round(decay_epochs * steps_per_epoch),
        "opt_momentum": config.momentum,
        "opt_weight_decay": config.weight_decay,
    }
    if config.decay == "polynomial":
        of_optimizer["opt_end_learning_rate"] = min(END_LR, peak)
        of_optimizer["opt_learning_rate_decay_poly_power"] = DECAY_POWER

    groups = config.norm_groups or mesh.num_devices
    hyperparameters = {
        "seed": config.seed,
        "gradient_accumulation_steps": config.update_every,
        "opt_name": config.optimizer,
        "model_bn_span": config.batch_size // config.update_every // groups,
    }
    for key, value in of_optimizer.items():
        hyperparameters[f"{config.optimizer}_{key}"] = value
    if config.optimizer == "lars":
        hyperparameters["lars_epsilon"] = LARS_EPS
        hyperparameters["lars_opt_learning_rate_warmup_epochs"] = config.warmup_epochs
    else:
        hyperparameters["opt_learning_rate_warmup_epochs"] = config.warmup_epochs
    return Benchmark(
        name="resnet",
        metric="top1",
        target=0.759,
        train_samples=len(data.train),
        eval_samples=len(data.eval),
        batch_size=config.batch_size,
        samples_per_epoch=steps_per_epoch * config.batch_size,
        hyperparameters=hyperparameters,
    )


def headline(config: Config, data: Data, steps_per_epoch: int) -> str:
    """Returns what a run says first."""
    classes = data.train.classes
    labels_of = {
        "classes": f"of {len(classes)} classes",
        "multilabel": f"with {len(classes)} labels",
        "regression": f"with a number, {classes[0]}",
    }
    sources = splits.said(data.train, data.eval)
    return (
        f"{config.model} on {config.data}: "
        f"{len(data.train)} images {labels_of[config.objective]}, "
        f"{config.epochs} epochs of {steps_per_epoch} steps of {config.batch_size}{sources}"
    )


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports, or evaluates a finished run; returns the final metrics of the
    evaluation split: loss, and for classes top1 and top5."""
    config = validate(resolve_config(config, EVALUATE_FLAGS))
    mesh = device.setup(
        config.seed,
        config.precision,
        config.strict,
        config.device,
        config.layout,
        vmem_kib=VMEM_KIB,
        safe_forms=config.safe_forms,
    )
    if config.evaluate:
        return evaluate_run(config, mesh)

    # ---- the data --------------------------------------------------------------------------------
    data = open_data(config)
    images = len(data.train)
    given = config
    config = fit(given, images, mesh.num_devices)  # chooses what is None
    config = validate(config)  # what it has chosen may not fit the other flags
    steps_per_epoch = loading.steps_per_epoch(
        data.train,
        config.batch_size,
        mesh,
        micro_batches=config.update_every,
        hint="; the preset finetune chooses one, and starts from --weights",
    )
    total_steps = config.epochs * steps_per_epoch
    check_evaluation(data, config, mesh)
    if config.weights:
        check_weights(config, data)

    # ---- the run's folder ------------------------------------------------------------------------
    kind = "synthetic" if config.data == "synthetic" else "images"
    run = Run(
        config,
        mesh,
        name=f"{config.model}-{kind}",
        headline=headline(config, data, steps_per_epoch),
        may_differ=MAY_CHANGE,
        sources=splits.sources_of(*data),
        total_steps=total_steps,
        metrics=metric_names(config),
        benchmark=benchmark(config, data, mesh, steps_per_epoch),
    )
    if run.finished:
        return run.print_summary()
    for line in (explain_fit(given, config, images), *data.train.notes):
        if line:
            run.message(line)

    # ---- the model and its steps -----------------------------------------------------------------
    state = build(config, data, mesh)
    start = run.resume(state.stored, state.optimizer, examples=images, keep=config.keep)
    if config.update_every > 1:
        means = ("loss", "accuracy") if config.objective == "classes" else ("loss",)
        train_fn = accumulate.AccumulatedStep(forward, update, state, means, mesh)
    else:
        train_fn = accumulate.SeededStep(train_step, mesh)
    eval_fn = device.compiled(eval_step, mesh)
    average_fn = device.compiled(average_step, mesh)
    if config.average:
        moving = averaging(config, total_steps, steps_per_epoch)
        span = moving.every / moving.weight
        run.message(f"the mean of the weights over about {span:.0f} steps is evaluated, exported")
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state.evaluated, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    # ---- the loop --------------------------------------------------------------------------------
    loader = loading.parallel_loader(
        data.train,
        config.batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total_steps,
        micro_batches=config.update_every,  # cuts a batch
        update_every=config.update_every,  # yields those of an update together
        workers=config.workers,
    )
    eval_every = config.eval_every * steps_per_epoch
    # All hosts of a pod agree on a stop signal, about every ten micro-batches.
    stop_every = max(10 // config.update_every, 1)  # in updates
    with run.training(loader, stop_every=stop_every):
        metrics = {}  # of the last evaluation in this start
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, micro_batches in enumerate(run.batches(loader), start + 1):
            lr = learning_rate(config, step - 1, steps_per_epoch)
            device.set_lr(state.optimizer, lr)
            step_metrics = train_fn(state, micro_batches, config, mesh)
            if config.average and step % moving.every == 0:
                weight = torch.tensor(moving.weight_at(step)).to(mesh.device)
                average_fn(state.average, state.model, weight, mesh)

            if step == 1 or step % config.log_every == 0 or step == total_steps:
                run.log(
                    step,
                    examples=step * config.batch_size,
                    input_wait=loader.input_wait(),
                    lr=lr,
                    **step_metrics,
                )
            evaluates = step % eval_every == 0 or step == total_steps
            run.checkpoint(step, due=step % config.save_every == 0, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)

        # ---- the end -----------------------------------------------------------------------------
        run.checkpoints.wait()
        metrics = run.load_best() or metrics  # with --best: of the state that it has loaded
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state.evaluated, data.eval, config, mesh)
        skipped = device.over_hosts(mesh, loader.skipped).total
        if skipped:
            run.message(f"{skipped} training images could not be decoded and were replaced")
        export(f"{run.path}/export", state.evaluated, data, config, mesh)
        run.finish(metrics)
    return metrics


PRESETS = {
    "full": ("the published recipe; needs --data and accelerators", Config()),
    "modern": ("torchvision's recipe of 2021, 600 epochs; needs --data and accelerators", MODERN),
    "finetune": ("trained weights on 100 to 100,000 pictures of your own", FINETUNE),
    "mlperf": ("LARS as in MLPerf Training; needs --data and accelerators", MLPERF),
    "tiny": ("a small network on small synthetic images: half a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
