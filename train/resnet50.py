"""ResNet-50 on ImageNet.

paper     Deep Residual Learning, He et al. 2015 (arXiv:1512.03385); v1.5 as in torchvision
recipe    Goyal et al. 2017 (arXiv:1706.02677): 90 epochs, learning rate 0.1 per 256 examples,
          5 epochs of warm-up, momentum 0.9, weight decay 1e-4, statistics of batch norm per worker,
          the weight of each block's last batch norm starts at zero: 76.4 % top-1 at a batch of
          256, 76.3 % at 8,192 (table 1).
          On top, from He et al. 2018 (arXiv:1812.01187, sections 3.1, 5.1, 5.2): no weight decay on
          norms and biases, cosine decay, label smoothing 0.1.
data      ImageNet (1,281,167 images, 1,000 classes) as a tree of class folders, any images that
          Hugging Face's `datasets` opens, or shards in a folder or a bucket
          (make data DATASET=images)
run       python -m train.resnet50 tiny                          synthetic data: half a minute on
                                                                 two CPU cores
          python -m train.resnet50 full --data /data/imagenet    on a TPU VM
result    full recipe: not run yet; tiny: README.md
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.resnet50 tiny"
    )

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import imagenet, splits
from errors import InputError
from models import heads
from models.resnet import Normalize, decide_head, load_weights, resnet
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # class folders, shards, or saved by HF datasets; URL; HF hub id; "synthetic"
    model: Literal["resnet50", "resnet101", "resnet152", "resnet_tiny"] = "resnet50"  # network
    weights: str = ""  # safetensors file to fine-tune; for other classes the head is new
    labels: str = ""  # classes in the order of --weights' head: a,b,…; where the file names none
    image_size: int = 224  # pixels, square
    epochs: int = 90  # passes over the training data
    batch_size: int = 1024  # examples per update, over all devices
    update_every: int = 1  # gradient-accumulation steps: micro-batches that a batch is cut into
    optimizer: Literal["sgd", "lars"] = "sgd"  # lars (You et al. 2017): for batches above 8,192
    lr: float = 0.1  # peak learning rate per 256 examples: scaled by batch_size / 256
    warmup_epochs: float = 5.0  # linear from 0
    momentum: float = 0.9  # of SGD and LARS
    weight_decay: float = 1e-4  # not on norms and biases
    label_smoothing: float = 0.1  # of the training loss
    norm_groups: int = 0  # batch-norm groups per micro-batch; 0: one per device
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA on CPUs; else plain PyTorch
    layout: Layout = WHOLE  # only --shard-state (docs/large_models.md) fits this model
    seed: int = 0  # of the initial weights, the order of the data and the augmentation
    workers: int = -1  # processes per host that decode images; -1: one per core, 0: none
    skip_broken: bool = False  # replace images that cannot be decoded, and count them; else stop
    log_every: int = 50  # steps between lines of metrics
    save_every: int = 1000  # steps between checkpoints; there is one at each evaluation, too
    eval_every: int = 1  # epochs between evaluations
    keep: int = 3  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


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

# Fields that a resumed run may change: these do not change the trained weights.
MAY_CHANGE = ("workers", "log_every", "save_every", "keep", "strict", "layout", "safe_forms")
# The vector memory of a TPU core that one fusion may use. libtpu's default is less, which costs
# cycles: docs/tpu/findings.md.
VMEM_KIB = 40_960
SYNTHETIC_CLASSES = 10
SYNTHETIC_TRAIN = 2048  # images
SYNTHETIC_EVAL = 500


class Data(NamedTuple):
    """What a run reads."""

    train: imagenet.Images
    eval: imagenet.Images


class State(NamedTuple):
    """What a step works on."""

    model: nn.Module
    normalize: Normalize
    optimizer: torch.optim.Optimizer


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then half a cosine to 0 (He et al. 2018,
    section 5.1)."""
    peak = config.lr * config.batch_size / 256
    warmup_steps = config.warmup_epochs * steps_per_epoch
    total_steps = config.epochs * steps_per_epoch
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps

    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def validate(config: Config) -> Config:
    """Returns the config; raises InputError where flags are missing, out of range or do not fit
    together."""
    cli.at_least(config, 1, "epochs", "batch_size", "update_every", "keep")
    cli.at_least(config, 1, "log_every", "save_every", "eval_every")
    cli.at_least(config, 0, "lr", "warmup_epochs", "momentum", "weight_decay")
    cli.at_least(config, 0, "norm_groups", "seed")
    cli.at_least(config, 32, "image_size")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "label_smoothing", below=1)

    if config.warmup_epochs >= config.epochs:
        raise InputError(
            f"--warmup-epochs is {config.warmup_epochs}; it must be below --epochs, {config.epochs}"
        )
    check_norm_groups(config)
    if config.labels and not config.weights:
        raise InputError(
            f"--labels is {config.labels}; it is for the head of --weights, which are not given"
        )
    cli.need_data(config, "a folder of images or a data set id")
    return config


def check_norm_groups(config: Config) -> None:
    """Raises InputError where the images of a micro-batch do not divide into --norm-groups."""
    micro_batch = config.batch_size // config.update_every  # steps_per_epoch refuses a remainder
    groups = config.norm_groups or 1  # 0 is one group per device, and there is at least one device
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


def open_data(config: Config) -> Data:
    """Opens the training and the evaluation images."""
    if config.data == "synthetic":
        return Data(
            train=_synthetic(config, "train", SYNTHETIC_TRAIN),
            eval=_synthetic(config, "eval", SYNTHETIC_EVAL),
        )
    size = config.image_size
    return Data(
        train=imagenet.open_imagenet(config.data, "train", size, config.skip_broken),
        eval=imagenet.open_imagenet(config.data, "eval", size, config.skip_broken),
    )


def _synthetic(config: Config, split: str, count: int) -> imagenet.SyntheticImages:
    return imagenet.SyntheticImages(count, config.image_size, SYNTHETIC_CLASSES, config.seed, split)


def open_weights(
    config: Config, classes: list[str]
) -> tuple[dict[str, Tensor], heads.HeadDecision]:
    """Returns the tensors of --weights, and what becomes of their head.

    Raises:
        InputError: the file cannot be read; or, with --lr 0, which trains nothing, the classes of
            its head are unknown or not the data's.
    """
    weights, metadata = files.load_with_metadata(config.weights)
    stated = heads.parse_labels(config.labels, classes) if config.labels else ()
    head = decide_head(weights, metadata, classes, config.weights, stated)
    if config.lr == 0 and head.refusal_at_lr_0:
        raise InputError(head.refusal_at_lr_0)
    return weights, head


def build(config: Config, data: Data, mesh: Mesh) -> State:
    """Makes model, normalization and optimizer on the device.

    The optimizer's state exists from the start: made in the first step, it would make the second
    step another graph.

    Raises:
        InputError: --norm-groups does not fit the devices; or see `open_weights`.
    """
    norm_groups = config.norm_groups or mesh.num_devices
    if norm_groups > 1 and norm_groups % mesh.num_devices:
        raise InputError(
            f"--norm-groups is {norm_groups}; "
            f"it must be 1 or a multiple of {mesh.num_devices} devices"
        )

    model = resnet(config.model, len(data.train.classes), norm_groups=norm_groups)
    if config.weights:
        weights, head = open_weights(config, data.train.classes)
        load_weights(model, weights, config.weights, head)
        if head.message and mesh.main_process:
            print(head.message, flush=True)

    model = device.to_device(model, mesh)
    normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
    normalize = device.to_device(normalize, mesh)

    optimizer = make_optimizer(config, model)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, normalize, optimizer)


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD or LARS; norms and biases, which are vectors, have no weight decay (He et al.
    2018, section 3.1)."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    # XLA has no foreach kernels.
    options = {"lr": config.lr, "momentum": config.momentum, "foreach": False}
    if config.optimizer == "lars":
        from timm.optim import Lars

        return Lars(groups, **options)
    return torch.optim.SGD(groups, **options)


def compute_logits(state: State, batch: dict[str, Tensor], mesh: Mesh) -> Tensor:
    """Returns logits [B, classes], float32, of batch["image"] [B, H, W, 3] uint8."""
    with mesh.autocast():
        logits = state.model(state.normalize(batch["image"]))
    return logits.float()


def forward(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns mean loss and accuracy over a batch or micro-batch of B examples.

    Args:
        batch: "image" [B, H, W, 3] uint8 and "label" [B], the number of the class.
    """
    logits = compute_logits(state, batch, mesh)
    labels = batch["label"]

    losses = F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=config.label_smoothing
    )
    # The mean is outside: inside, torch_xla counts the labels of all devices, a collective before
    # the backward pass.
    loss = losses.mean()
    correct = logits.detach().argmax(1) == labels
    return {"loss": loss, "accuracy": correct.float().mean()}


def train_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and accuracy."""
    means = forward(state, batch, config, mesh)
    means["loss"].backward()
    update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return {name: mean.detach() for name, mean in means.items()}


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients; has no metrics of its own."""
    state.optimizer.step()
    return {}


def eval_step(
    state: State, batch: dict[str, Tensor], config: Config, mesh: Mesh
) -> dict[str, Tensor]:
    """Returns sums over the examples of a batch, without padding (mask 0) and images that could not
    be decoded (label -1)."""
    with torch.no_grad():
        logits = compute_logits(state, batch, mesh)

    is_counted = batch["mask"] * (batch["label"] >= 0)
    label = batch["label"].clamp(min=0)
    label_logit = logits.gather(1, label[:, None])

    # The rank of the right class. Equal logits (bfloat16 has many) rank in the order of the
    # classes, as argmax and top-k take them.
    classes = torch.arange(logits.shape[1], device=logits.device)
    ties_ahead = (logits == label_logit) & (classes < label[:, None])
    rank = ((logits > label_logit) | ties_ahead).sum(1)
    # No logit is larger than NaN, so it would rank first: put it behind the top 5, also where there
    # are fewer than 5 classes.
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
        split=config.update_every,  # micro-batches, as in training
        workers=config.workers,
    )
    decoded = 0
    for batch in batches:
        labels = batch["label"]
        # A data set may have other labels than numbers of classes.
        if labels.dim() != 1 or labels.is_floating_point():
            dtype = str(labels.dtype).removeprefix("torch.")
            raise InputError(
                f"a label of the images is {dtype} of shape {list(labels.shape[1:])}; "
                "this script's loss and metrics are for the number of a class: "
                "change forward and eval_step, and this check"
            )
        decoded += int((batch["mask"] * (labels >= 0)).sum())

    if not device.over_hosts(mesh, decoded).total:
        raise InputError(
            f"none of the first and last images of the evaluation split of {config.data} "
            "can be decoded"
        )


def evaluate(
    eval_fn: Callable, state: State, images: loading.Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Returns top-1 and top-5 accuracy and the mean loss over every image once.

    Args:
        eval_fn: the compiled eval_step.
    """
    state.model.eval()
    loader = loading.parallel_loader(
        images,
        config.batch_size,
        mesh,
        train=False,
        split=config.update_every,  # micro-batches, as in training
        workers=config.workers,
    )
    with loader:
        sums = [eval_fn(state, batch, config, mesh) for batch in loader]
        totals = device.fetch_sums(sums)
    state.model.train()

    count = totals["count"]
    if not count:
        raise InputError(f"no image of the evaluation split of {config.data} can be decoded")
    if count < len(images) and mesh.main_process:
        print(
            f"evaluated {count:.0f} of {len(images)} images: the others cannot be decoded",
            flush=True,
        )
    return {name: totals[name] / count for name in ("top1", "top5", "loss")}


def export(folder: str, state: State, data: Data, config: Config, mesh: Mesh) -> None:
    """Writes model.safetensors for `load_state_dict` of torchvision's model; its metadata names the
    classes and how an image is prepared (docs/exports.md)."""
    # state_dict() converts parameters to torchvision's shapes. On the device that would compile a
    # program, so the parameters are fetched as they are, and a model on the host converts them.
    tensors = dict(state.model.named_parameters())
    tensors |= dict(state.model.named_buffers())
    weights = checkpoint.to_host(tensors, mesh.layers, mesh.main_process)
    if not mesh.main_process:
        return

    classes = data.train.classes
    on_host = resnet(config.model, len(classes))
    on_host.load_state_dict(weights)
    metadata = {"model": config.model, "classes": json.dumps(classes)}
    metadata |= imagenet.preparation(config.image_size)
    files.save_weights(f"{folder}/model.safetensors", on_host.state_dict(), metadata)


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports; returns the final metrics: top1, top5 and loss of the
    evaluation split."""
    config = validate(config)
    mesh = device.setup(
        config.seed,
        config.precision,
        config.strict,
        config.device,
        config.layout,
        vmem_kib=VMEM_KIB,
        safe_forms=config.safe_forms,
    )
    data = open_data(config)
    images = len(data.train)
    steps_per_epoch = loading.steps_per_epoch(
        data.train, config.batch_size, mesh, micro_batches=config.update_every
    )
    total_steps = config.epochs * steps_per_epoch

    kind = "synthetic" if config.data == "synthetic" else "images"
    sources = splits.said(*data)
    headline = (
        f"{config.model} on {config.data}: {images} images of {len(data.train.classes)} classes, "
        f"{config.epochs} epochs of {steps_per_epoch} steps of {config.batch_size}{sources}"
    )
    check_evaluation(data, config, mesh)
    run = Run(
        config,
        mesh,
        name=f"{config.model}-{kind}",
        headline=headline,
        may_differ=MAY_CHANGE,
        total_steps=total_steps,
    )
    if run.finished:
        return run.print_summary()

    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=images, keep=config.keep)
    if config.update_every > 1:
        means = ("loss", "accuracy")
        train_fn = accumulate.AccumulatedStep(forward, update, state, means, mesh)
    else:
        train_fn = accumulate.SeededStep(train_step, mesh)
    eval_fn = device.compiled(eval_step, mesh)
    state.model.train()

    def evaluation(step: int) -> dict[str, float]:
        """Evaluates the state after `step`, and records it."""
        with run.pause():
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        run.evaluation(step, **metrics)
        return metrics

    loader = loading.parallel_loader(
        data.train,
        config.batch_size,
        mesh,
        train=True,
        seed=config.seed,
        start=start,
        stop=total_steps,
        split=config.update_every,  # cuts a batch into micro-batches
        update_every=config.update_every,  # yields those of an update together
        workers=config.workers,
    )
    eval_every = config.eval_every * steps_per_epoch
    # All hosts of a pod agree on a stop signal, about every ten micro-batches.
    stop_every = max(10 // config.update_every, 1)
    with run.training(loader, stop_every=stop_every):
        metrics = {}
        if run.evaluation_due:  # the run ended between a checkpoint and its evaluation
            metrics = evaluation(start)

        for step, micro_batches in enumerate(loader, start + 1):
            lr = learning_rate(config, step - 1, steps_per_epoch)
            device.set_lr(state.optimizer, lr)
            step_metrics = train_fn(state, micro_batches, config, mesh)

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

        run.checkpoints.wait()
        if not metrics:  # the run ended after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        skipped = device.over_hosts(mesh, loader.skipped).total
        if skipped:
            run.message(f"{skipped} training images could not be decoded and were replaced")
        export(f"{run.path}/export", state, data, config, mesh)
        run.finish(metrics)
    return metrics


PRESETS = {
    "full": ("the published recipe; needs --data and accelerators", Config()),
    "tiny": ("a small network on small synthetic images: half a minute on a CPU", TINY),
}

if __name__ == "__main__":
    cli.run(main, PRESETS)
