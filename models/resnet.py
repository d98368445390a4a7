"""ResNet v1.5 (He et al. 2015, arXiv:1512.03385) in the forms that the TPU's compiler rewards.

v1.5 means that a bottleneck's stride is in its 3x3 convolution. The numbers and the `state_dict`
are torchvision's: the same keys, the same shapes, the same initial distribution, so that weights
move in both directions.

Inside, `BatchNorm` and `PointwiseConv2d` differ; each docstring says why. They reduce ResNet-50's
training step (batch 128, one v5e chip, estimate of libtpu 0.0.51's compiler) from 121.8 to 107.6
million cycles, without any flag.
"""

import json
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import InputError
from models import heads

# PyTorch runs operation by operation here, and its own kernel is the fastest.
NATIVE_NORM_DEVICES = ("cpu", "cuda")


def batch_statistics_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    groups: int,
    shared_mean: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes `groups` equal slices of a batch, each by its own statistics.

    Source: Ioffe and Szegedy 2015, algorithm 1.

    PyTorch's native batch norm keeps a float32 copy of the activations for its backward pass. These
    plain operations, fused by XLA, keep the input as it is (bfloat16): 121.8 -> 112.6 million
    cycles, 54.3 -> 50.5 GB of traffic.

    With `groups` a multiple of the number of cores, and the batch sharded over them, every sum
    stays within one core: no collective in the forward or the backward pass. With one group the
    statistics are those of the global batch.

    Args:
        x: [B, C, H, W].
        weight, bias: [C].
        eps: added to the variance.
        groups: divides B.
        shared_mean: returns the mean of a tensor over the processes that share the one group, with
            its gradient. None: the group is within one process.

    Returns:
        y [B, C, H, W] of x's type; and mean and (biased) variance [groups, C], float32, detached.
    """
    batch, channels, height, width = x.shape
    if groups > 1:
        shape = (groups, batch // groups, channels, height, width)
        reduced = (1, 3, 4)
    else:
        # One group needs no fifth dimension, and the compiler lays out four dimensions better.
        shape = x.shape
        reduced = (0, 2, 3)

    # In float32; but a float64 input stays float64, since tests compare gradients there.
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).view(shape)
    mean = wide.mean(reduced)
    mean_of_squares = (wide * wide).mean(reduced)
    if shared_mean is not None:
        mean, mean_of_squares = shared_mean(torch.stack([mean, mean_of_squares])).unbind()
    # E[x^2] - E[x]^2 reads x once, where the two-pass form reads it twice. Rounding may take it
    # just below zero.
    variance = (mean_of_squares - mean * mean).clamp(min=0)

    scale = weight * torch.rsqrt(variance + eps)
    shift = bias - mean * scale
    if groups > 1:
        y = wide * scale[:, None, :, None, None] + shift[:, None, :, None, None]
    else:
        y = wide * scale[:, None, None] + shift[:, None, None]
    y = y.to(x.dtype).view(x.shape)
    mean = mean.detach().view(groups, channels)
    variance = variance.detach().view(groups, channels)
    return y, mean, variance


class BatchNorm(nn.BatchNorm2d):
    """Batch norm with separate statistics for `groups` slices of the batch.

    The published recipe has one group per worker. The running statistics are the mean over the
    groups (of the variance that is unbiased within its group): one small all-reduce under SPMD.
    Parameters, buffers and evaluation are `nn.BatchNorm2d`'s.

    One group on NATIVE_NORM_DEVICES takes the native kernel. More groups, one that several
    processes share, and other devices (XLA), take `batch_statistics_norm`.
    """

    groups = 1
    processes = 1  # that share one group; see `share_statistics`
    shared_mean: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        is_shared = self.training and self.shared_mean is not None
        if self.groups == 1 and not is_shared and x.device.type in NATIVE_NORM_DEVICES:
            return super().forward(x)
        if self.training:
            return self._by_batch(x)
        return self._by_running_statistics(x)

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        """Normalizes x [B, C, H, W] for evaluation."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        y = x.to(scale.dtype) * scale[:, None, None] + shift[:, None, None]
        return y.to(x.dtype)

    def _by_batch(self, x: Tensor) -> Tensor:
        """Normalizes x [B, C, H, W] by its own statistics, and updates the running ones.

        Raises:
            InputError: x does not divide into the groups.
        """
        values = x.numel() // (x.shape[1] * self.groups)  # per channel and group
        if x.shape[0] % self.groups or values < 2:
            raise InputError(
                f"batch norm: an input {list(x.shape)} does not divide into "
                f"{self.groups} groups of at least 2 values per channel; raise --batch-size"
            )

        values *= self.processes
        y, mean, variance = batch_statistics_norm(
            x, self.weight, self.bias, self.eps, self.groups, self.shared_mean
        )
        with torch.no_grad():
            unbiased = variance.mean(0) * (values / (values - 1))
            self.running_mean.lerp_(mean.mean(0), self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
            self.num_batches_tracked.add_(1)
        return y


class PointwiseConv2d(nn.Module):
    """A 1x1 convolution that keeps its weight as a matrix [out, in].

    A `state_dict` shows it as [out, in, 1, 1], as torchvision does. The TPU stores [out, in, 1, 1]
    in tiles of one row, and each step copies weight, gradient and momentum to tiles of 8 x 128 and
    back. A matrix needs no copy: 112.6 -> 107.6 million cycles for ResNet-50.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))
        self.register_state_dict_post_hook(self._to_torchvision)
        self.register_load_state_dict_pre_hook(self._from_torchvision)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight[:, :, None, None], stride=self.stride)

    @staticmethod
    def _to_torchvision(module: nn.Module, state: dict, prefix: str, local_metadata: dict) -> None:
        """Changes this module's weight in a `state_dict` to [out, in, 1, 1]."""
        key = prefix + "weight"
        state[key] = state[key][:, :, None, None]

    @staticmethod
    def _from_torchvision(module: nn.Module, state: dict, prefix: str, *_) -> None:
        """Changes this module's weight in a `state_dict` to [out, in], if it is [out, in, 1, 1]."""
        key = prefix + "weight"
        weight = state.get(key)
        if weight is not None and weight.dim() == 4 and weight.shape[2:] == (1, 1):
            state[key] = weight[:, :, 0, 0]


class Bottleneck(nn.Module):
    """A block of three convolutions and a shortcut (He et al., figure 5).

    They are 1x1 to `channels`, 3x3 with the stride (v1.5), and 1x1 to 4 * `channels`.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = PointwiseConv2d(in_channels, channels)
        self.bn1 = BatchNorm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = BatchNorm(channels)
        self.conv3 = PointwiseConv2d(channels, out_channels)
        self.bn3 = BatchNorm(out_channels)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                PointwiseConv2d(in_channels, out_channels, stride),
                BatchNorm(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """Maps images [B, 3, H, W] to logits [B, num_classes] (He et al. 2015, table 1)."""

    def __init__(
        self,
        layers: tuple[int, ...],
        num_classes: int = 1000,
        width: int = 64,
        norm_groups: int = 1,
    ):
        """Initializes the parameters as `reset_parameters` says.

        Args:
            layers: for each stage its number of blocks.
            num_classes: outputs of the head.
            width: channels of the stem and of the first stage's blocks; each stage doubles it.
            norm_groups: see `BatchNorm`.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = BatchNorm(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

        channels = width
        for stage, blocks in enumerate(layers):
            block_channels = width * 2**stage
            stride = 1 if stage == 0 else 2
            modules = [Bottleneck(channels, block_channels, stride)]
            channels = block_channels * Bottleneck.expansion
            for _ in range(blocks - 1):
                modules.append(Bottleneck(channels, block_channels, stride=1))
            self.add_module(f"layer{stage + 1}", nn.Sequential(*modules))
        self.stages = len(layers)
        self.fc = nn.Linear(channels, num_classes)

        self.reset_parameters()
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.groups = norm_groups

    def reset_parameters(self) -> None:
        """Initializes convolutions Kaiming-normal (fan out), and each block's last norm with 0.

        So a block starts as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d | PointwiseConv2d):
                # [out, in] counts `out` as fan_out, like [out, in, 1, 1].
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)

        # In float32: the sums over 7 x 7 would lose in bfloat16 what the head reads.
        wide = torch.promote_types(x.dtype, torch.float32)
        features = x.mean((2, 3), dtype=wide)
        return self.fc(features)


# Blocks of each stage.
LAYERS = {
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnet_tiny": (1, 1, 1, 1),
}


def resnet(name: str, num_classes: int = 1000, norm_groups: int = 1) -> ResNet:
    """Returns a model of `LAYERS`.

    `resnet_tiny` has one block per stage and 16 channels, for small images on a CPU.
    """
    width = 16 if name == "resnet_tiny" else 64
    return ResNet(LAYERS[name], num_classes, width, norm_groups)


def share_statistics(
    model: nn.Module, processes: int, shared_mean: Callable[[Tensor], Tensor]
) -> None:
    """Makes the batch norms of a model, of one group, take their statistics of the rows of several
    processes together; `shared_mean`: see `batch_statistics_norm`."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.processes = processes
            module.shared_mean = shared_mean


class Normalize(nn.Module):
    """Maps uint8 images [B, H, W, 3] to float32 [B, 3, H, W].

    The mean and the standard deviation of each channel are of 0..255. They are buffers: a tensor
    that is created in the step would be sent to the device in every step.
    """

    def __init__(self, mean: tuple[float, float, float], std: tuple[float, float, float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        images = images.permute(0, 3, 1, 2).float()
        return (images - self.mean) / self.std


def load_weights(
    model: ResNet, weights: dict[str, Tensor], path: str, head: heads.HeadDecision | None = None
) -> None:
    """Loads torchvision's weights, or those that we exported.

    A head for another number of classes stays as it was initialized.

    Args:
        model: gets the weights.
        weights: of the file, by name.
        path: the file, for messages.
        head: what becomes of the head, see `decide_head`; None: its rows stay in their order.

    Raises:
        InputError: they are another model's weights.
    """
    weights = dict(weights)
    own = model.state_dict()
    for name in own:
        # Torchvision's older files lack it; the norms' momentum is fixed, so nothing reads it.
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, own[name])
    for name in ("fc.weight", "fc.bias"):
        if name not in weights:
            continue
        is_new = head is not None and head.rows is None
        if is_new or weights[name].shape[0] != own[name].shape[0]:
            weights[name] = own[name]
        elif head is not None and head.moved:
            weights[name] = weights[name][head.rows]

    wrong = []
    for name in sorted(own.keys() | weights.keys()):
        missing = name not in own or name not in weights
        if missing or own[name].shape != weights[name].shape:
            wrong.append(name)
    if wrong:
        raise InputError(
            f"--weights {path} does not fit --model: "
            f"{wrong[0]} and {len(wrong) - 1} more tensors differ"
        )
    model.load_state_dict(weights)


def decide_head(
    weights: dict[str, Tensor],
    metadata: dict[str, str],
    classes: Sequence[str],
    path: str,
    stated: Sequence[str] = (),
    objective: str = "classes",
) -> heads.HeadDecision:
    """Decides by the names of the classes what becomes of the head in a weights file.

    models/heads.py says how. An export's metadata names its classes. torchvision's files name none:
    a head of 1,000 rows is taken for ImageNet's where the data has these classes, in the order of
    their WordNet ids, as folders have it.

    Args:
        weights: of the file, by name.
        metadata: of the file.
        classes: the names of the data's.
        path: the file, for messages.
        stated: the names of the head's rows as the user states them; () where not stated.
        objective: of data/targets.py, that the head is to have; of another one it is new.

    Raises:
        InputError: the metadata is no list of as many names as the head has rows, or an order is
            stated for a head of another number of classes.
    """
    where = f"--weights {path}"
    bias = weights.get("fc.bias")
    if bias is None:
        return heads.HeadDecision()  # another model's weights, which load_weights refuses

    theirs = None
    if "classes" in metadata:
        theirs = _names_of_rows(metadata["classes"], len(bias), where)
    their_objective = metadata.get("objective", "classes")
    if their_objective != objective:
        what = f"a head for --objective {their_objective}, this run has {objective}"
        return heads.new_head(where, what)

    if len(bias) != len(classes):
        named = f" ({heads.listed(theirs)})" if theirs else ""
        counts = f"a head for {len(bias)} classes{named}, the data has {len(classes)}"
        if stated:
            raise InputError(
                f"--labels states the order of a head's classes, but {where} has {counts}"
            )
        return heads.new_head(where, counts)

    if theirs is None and not stated and is_imagenet(classes):
        return heads.HeadDecision(
            rows=list(range(len(classes))),
            note=(
                f"{where} does not name its 1,000 classes: "
                "they are taken for ImageNet's, in the order of the WordNet ids"
            ),
        )
    return heads.decide(where, theirs, classes, stated)


def _names_of_rows(text: str, rows: int, where: str) -> list[str]:
    """Returns the names of a head's classes in an export's metadata.

    Raises:
        InputError: it is no JSON list of so many.
    """
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or len(names) != rows:
        raise InputError(
            f"{where} has a head of {rows} classes and, in its metadata, not the names of so many; "
            "export it again, or leave its metadata out and state them in --labels"
        )
    return names


def is_imagenet(classes: Sequence[str]) -> bool:
    """Returns whether these are ImageNet's 1,000 classes in their usual order.

    Their names are WordNet's ids, as of folders; or at least nine of ten begin as torchvision's do
    ("tench, Tinca tinca").
    """
    if len(classes) != 1000:
        return False
    if all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return list(classes) == sorted(classes)

    from torchvision.models import ResNet50_Weights

    usual = ResNet50_Weights.IMAGENET1K_V1.meta["categories"]
    equal = 0
    for name, usual_name in zip(classes, usual, strict=True):
        first = name.partition(",")[0].strip()
        if first.lower() == usual_name.lower():
            equal += 1
    return equal >= 900
