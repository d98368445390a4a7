"""ResNet-50 on ImageNet.

paper     Deep Residual Learning, He et al. 2015 (arXiv:1512.03385); v1.5 as in torchvision
recipe    Goyal et al. 2017 (arXiv:1706.02677): 90 epochs, learning rate 0.1 per 256 examples, 5 epochs of warm-up,
          momentum 0.9, weight decay 1e-4, statistics of batch norm per worker, each block's last norm at zero:
          76.4 % top-1 at a batch of 256, 76.3 % at 8,192 (table 1). On top, from He et al. 2018 (arXiv:1812.01187,
          sections 3.1, 5.1, 5.2): no weight decay on norms and biases, cosine decay, label smoothing 0.1.
data      ImageNet (1,281,167 images, 1,000 classes) as a tree of class folders, any `datasets` set of images,
          or shards in a folder or a bucket (make data DATASET=images)
run       python -m train.resnet50 tiny                          half a minute on two CPU cores, synthetic data
          python -m train.resnet50 full --data /data/imagenet    on a TPU VM
result    full recipe: not run yet; tiny: README.md
"""

if __name__ == "__main__" and not __package__:  # by its path, from which the imports below are not found
    raise SystemExit("error: in the project's folder run it as a module: python -m train.resnet50 tiny")

import json
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from data import imagenet, splits
from errors import InputError
from models import heads
from models.resnet import Normalize, head_order, load_weights, resnet
from train.common import accumulate, checkpoint, cli, device, files, loading
from train.common.mesh import WHOLE, Layout
from train.common.run import Run


@dataclass(frozen=True)
class Config:
    data: str = ""  # folder of class folders, of shards (or URL), of `datasets`, or hub id; or "synthetic"
    model: Literal["resnet50", "resnet101", "resnet152", "resnet_tiny"] = "resnet50"  # see models/resnet.py
    weights: str = ""  # safetensors file to start from (fine-tuning); for other classes the head is new
    labels: str = ""  # classes of --weights in the order of its head, a,b,…, where the file does not name them
    image_size: int = 224  # pixels, square
    epochs: int = 90  # passes over the training data
    batch_size: int = 1024  # examples an update, over all devices
    update_every: int = 1  # parts that a batch comes in, where it does not fit into memory
    optimizer: Literal["sgd", "lars"] = "sgd"  # lars (You et al. 2017) for batches above 8,192, with its own --lr
    lr: float = 0.1  # peak learning rate per 256 examples: scaled by batch_size / 256
    warmup_epochs: float = 5.0  # linear from 0
    momentum: float = 0.9  # of SGD and LARS
    weight_decay: float = 1e-4  # not on norms and biases
    label_smoothing: float = 0.1  # of the training loss
    norm_groups: int = 0  # slices of a batch, or of its part, with their own batch-norm statistics; 0: one a device
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # of the passes, see train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA's CPU backend; cpu, cuda: PyTorch on one device
    layout: Layout = WHOLE  # --shard-state, docs/large_models.md; its other flags are for models with layers
    seed: int = 0  # of the initial weights, the order of the data and the augmentation
    workers: int = -1  # processes a host that decode images; -1: one a core, 0: none
    skip_broken: bool = False  # replace images that cannot be decoded, and count them, instead of stopping
    log_every: int = 50  # steps between lines of metrics
    save_every: int = 1000  # steps between checkpoints; there is one at each evaluation, too
    eval_every: int = 1  # epochs between evaluations
    keep: int = 3  # checkpoints that stay
    runs: str = "runs"  # folder or URL (gs://bucket/runs) of all runs
    name: str = ""  # folder of this run below it; "": chosen
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes on the usual ones: docs/tpu.md


SMALL = {"model": "resnet_tiny", "image_size": 32, "norm_groups": 8}
TINY = Config(**cli.TRIAL, **SMALL, epochs=8, batch_size=64, lr=0.8, warmup_epochs=1.0, log_every=10, save_every=50)

# Fields that a resumed run may change: none of these touches a number.
FREE = ("workers", "log_every", "save_every", "keep", "strict", "layout", "safe_forms")
VMEM_KIB = 40_960  # of a TPU core for one fusion; libtpu gives less: docs/tpu/findings.md
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_EVAL = 10, 2048, 500

Data = namedtuple("Data", "train eval")  # what a run reads: images of data/imagenet.py
State = namedtuple("State", "model normalize optimizer")  # what a step works on


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """Returns the rate at 0-based `step`: linear warm-up, then half a cosine to 0 (He et al. 2018, section 5.1)."""
    peak = config.lr * config.batch_size / 256
    warmup, total = config.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def validate(config: Config) -> Config:
    """Returns the config; refuses values outside their range."""
    cli.at_least(config, 1, "epochs", "batch_size", "update_every", "log_every", "save_every", "eval_every", "keep")
    cli.at_least(config, 0, "lr", "warmup_epochs", "momentum", "weight_decay", "norm_groups", "seed")
    cli.at_least(config, 32, "image_size")
    cli.at_least(config, -1, "workers")
    cli.at_least(config, 0, "label_smoothing", below=1)
    if config.warmup_epochs >= config.epochs:
        raise InputError(f"--warmup-epochs is {config.warmup_epochs}; it must be below --epochs, {config.epochs}")
    part, groups = config.batch_size // config.update_every, config.norm_groups or 1  # 0: at least 1
    if part % groups or (part == groups and config.image_size == 32):  # 32 pixels end as one: no statistics of an image
        sizes = f"--batch-size {config.batch_size}, in --update-every {config.update_every}, does not divide into"
        raise InputError(f"{sizes} {groups} --norm-groups of at least 2 images; raise the first, or lower the others")
    if config.labels and not config.weights:
        raise InputError(f"--labels is {config.labels}; it is for the head of --weights, which are not given")
    cli.need_data(config, "a folder of images or a data set id")
    return config


def open_data(config: Config) -> Data:
    """Opens the training and the evaluation images."""
    size = config.image_size
    if config.data == "synthetic":
        counts = {"train": SYNTHETIC_TRAIN, "eval": SYNTHETIC_EVAL}
        sets = [imagenet.SyntheticImages(n, size, SYNTHETIC_CLASSES, config.seed, split) for split, n in counts.items()]
    else:
        sets = [imagenet.open_imagenet(config.data, split, size, config.skip_broken) for split in ("train", "eval")]
    return Data(*sets)


def open_weights(config: Config, classes: list[str]) -> tuple[dict[str, Tensor], heads.Order]:
    """Returns the tensors of --weights, and what becomes of their head. Raises InputError where they cannot be read,
    and where a head whose classes are not known, or other ones, would be evaluated without training."""
    weights, metadata = files.load_with_metadata(config.weights)
    stated = heads.given(config.labels, classes) if config.labels else ()
    head = head_order(weights, metadata, classes, config.weights, stated)
    if config.lr == 0 and head.untrained:
        raise InputError(head.untrained)
    return weights, head


def build(config: Config, data: Data, mesh: device.Mesh) -> State:
    """Makes model, normalisation and optimizer on the device; the optimizer's state exists from the start."""
    norm_groups = config.norm_groups or mesh.num_devices
    if norm_groups > 1 and norm_groups % mesh.num_devices:
        raise InputError(f"--norm-groups is {norm_groups}; it must be 1 or a multiple of {mesh.num_devices} devices")
    model = resnet(config.model, len(data.train.classes), norm_groups=norm_groups)
    if config.weights:
        weights, head = open_weights(config, data.train.classes)
        load_weights(model, weights, config.weights, head)
        if head.said and mesh.main_process:
            print(head.said, flush=True)
    device.to_device(model, mesh)
    normalize = device.to_device(Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD), mesh)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optimizer == "lars":
        from timm.optim import Lars as Optimizer
    else:
        from torch.optim import SGD as Optimizer
    optimizer = Optimizer(groups, lr=config.lr, momentum=config.momentum, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return State(model, normalize, optimizer)


def forward(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
    """Returns mean loss and accuracy of batch["image"] [B, H, W, 3] uint8 and batch["label"] [B], or of their part."""
    with mesh.autocast():
        logits = state.model(state.normalize(batch["image"]))
    logits = logits.float()
    # The mean outside: inside, torch_xla counts the labels of all devices, a collective before the backward pass.
    loss = F.cross_entropy(logits, batch["label"], reduction="none", label_smoothing=config.label_smoothing).mean()
    return {"loss": loss, "accuracy": (logits.detach().argmax(1) == batch["label"]).float().mean()}


def train_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
    """Updates once on a batch; returns the mean loss and accuracy."""
    means = forward(state, batch, config, mesh)
    means["loss"].backward()
    update(state, config)
    state.optimizer.zero_grad(set_to_none=True)
    return {name: mean.detach() for name, mean in means.items()}


def update(state: State, config: Config) -> dict[str, Tensor]:
    """Updates the parameters from their gradients."""
    state.optimizer.step()
    return {}


def eval_step(state: State, batch: dict[str, Tensor], config: Config, mesh: device.Mesh) -> dict[str, Tensor]:
    """Returns sums over the examples of a batch, without padding (mask 0) and unreadable images (label -1)."""
    with torch.no_grad(), mesh.autocast():
        logits = state.model(state.normalize(batch["image"]))
    logits, label = logits.float(), batch["label"]
    counts, label = batch["mask"] * (label >= 0), label.clamp(min=0)
    own = logits.gather(1, label[:, None])
    # The rank of the right class; equal logits (bfloat16 has many) are taken in order, as argmax and top-k do.
    ties_ahead = (logits == own) & (torch.arange(logits.shape[1], device=logits.device) < label[:, None])
    rank = ((logits > own) | ties_ahead).sum(1)
    rank = torch.where(own.isnan()[:, 0], logits.shape[1] + 5, rank)
    loss = F.cross_entropy(logits, label, reduction="none")
    loss = torch.where(counts > 0, loss, torch.zeros_like(loss))  # 0 times what is not finite would be NaN
    return {
        "loss": loss.sum(),
        "top1": ((rank < 1) * counts).sum(),
        "top5": ((rank < 5) * counts).sum(),
        "count": counts.sum(),
    }


def check_evaluation(data: Data, config: Config, mesh: device.Mesh) -> None:
    """Reads the first and the last images that are evaluated; raises InputError where an evaluation would."""
    options = {"split": config.update_every, "workers": config.workers}
    batches = loading.first_and_last(data.eval, config.batch_size, mesh, **options)
    for batch in batches:
        labels = batch["label"]
        if labels.dim() != 1 or labels.is_floating_point():  # kept by the data, but no classes
            kind = f"{str(labels.dtype).removeprefix('torch.')} of shape {list(labels.shape[1:])}"
            expected = "this script's loss and metrics are for the number of a class"
            raise InputError(
                f"a label of the images is {kind}; {expected}: change forward and eval_step, and this check"
            )
    decoded = sum(int((batch["mask"] * (batch["label"] >= 0)).sum()) for batch in batches)
    if not device.over_hosts(mesh, decoded).total:
        raise InputError(f"none of the first and last images of the evaluation split of {config.data} can be decoded")


def evaluate(step, state: State, images: loading.Dataset, config: Config, mesh: device.Mesh) -> dict[str, float]:
    """Returns top-1 and top-5 accuracy and mean loss over every image once; `step` is the compiled eval_step."""
    state.model.eval()
    options = {"split": config.update_every, "workers": config.workers}
    with loading.parallel_loader(images, config.batch_size, mesh, train=False, **options) as loader:
        totals = device.fetch_sums([step(state, batch, config, mesh) for batch in loader])
    state.model.train()
    if not totals["count"]:
        raise InputError(f"no image of the evaluation split of {config.data} can be decoded")
    if totals["count"] < len(images) and mesh.main_process:
        print(f"evaluated {totals['count']:.0f} of {len(images)} images: the others cannot be decoded", flush=True)
    return {name: totals[name] / totals["count"] for name in ("top1", "top5", "loss")}


def export(folder: str, state: State, data: Data, config: Config, mesh: device.Mesh) -> None:
    """Writes model.safetensors for `load_state_dict` of torchvision's model; its metadata names the classes and how an
    image is prepared (docs/exports.md)."""
    model, classes, host = state.model, data.train.classes, (mesh.layers, mesh.main_process)
    if values := checkpoint.to_host(dict([*model.named_parameters(), *model.named_buffers()]), *host):
        on_host = resnet(config.model, len(classes))
        on_host.load_state_dict(values)
        metadata = {"model": config.model, "classes": json.dumps(classes), **imagenet.preparation(config.image_size)}
        files.save_weights(f"{folder}/model.safetensors", on_host.state_dict(), metadata)


def main(config: Config) -> dict[str, float]:
    """Trains, evaluates and exports; returns the final metrics: top1, top5 and loss of the evaluation split."""
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
    per_epoch = loading.steps_per_epoch(data.train, config.batch_size, mesh, micro_batches=config.update_every)
    total = config.epochs * per_epoch
    name = f"{config.model}-{'synthetic' if config.data == 'synthetic' else 'images'}"
    headline = f"{config.model} on {config.data}: {len(data.train)} images of {len(data.train.classes)} classes, "
    headline += f"{config.epochs} epochs of {per_epoch} steps of {config.batch_size}{splits.said(*data)}"
    check_evaluation(data, config, mesh)
    run = Run(config, mesh, name=name, headline=headline, free=FREE, total_steps=total)
    if run.finished:
        return run.print_summary()

    state = build(config, data, mesh)
    start = run.resume(state.model, state.optimizer, examples=len(data.train), keep=config.keep)
    train = accumulate.SeededStep(train_step, mesh)
    if config.update_every > 1:
        train = accumulate.AccumulatedStep(forward, update, state, ("loss", "accuracy"), mesh)
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
        stop=total,
        split=config.update_every,
        update_every=config.update_every,
        workers=config.workers,
    )
    with run.training(loader, stop_every=max(10 // config.update_every, 1)):
        metrics = evaluation(start) if run.evaluation_due else {}  # its checkpoint is there, the run ended in it
        for step, batch in enumerate(loader, start + 1):
            lr = learning_rate(config, step - 1, per_epoch)
            device.set_lr(state.optimizer, lr)
            step_metrics = train(state, batch, config, mesh)
            if step == 1 or step % config.log_every == 0 or step == total:
                run.log(step, examples=step * config.batch_size, input_wait=loader.input_wait(), lr=lr, **step_metrics)
            evaluates = step % (per_epoch * config.eval_every) == 0 or step == total
            run.checkpoint(step, due=step % config.save_every == 0, evaluates=evaluates)
            if evaluates:
                metrics = evaluation(step)
        run.checkpoints.wait()
        if not metrics:  # killed after the last step, before the export
            metrics = evaluate(eval_fn, state, data.eval, config, mesh)
        if skipped := device.over_hosts(mesh, loader.skipped).total:
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
