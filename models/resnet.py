"""ResNet v1.5 (He et al. 2015, arXiv:1512.03385) in the forms that the TPU's compiler rewards.

The numbers and the `state_dict` are torchvision's: the same keys, the same shapes, the same initial distribution, so
that weights move in both directions. v1.5 means that a bottleneck's stride is in its 3x3 convolution. Inside,
`BatchNorm` and `PointwiseConv2d` differ: they reduce ResNet-50's training step (batch 128, one v5e chip, estimate of
libtpu 0.0.51's compiler) from 121.8 to 107.6 million cycles, without any flag; each docstring says why.
"""

import json
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import InputError
from models import heads

NATIVE_NORM_DEVICES = ("cpu", "cuda")  # PyTorch runs operation by operation here, and its kernel is the fastest


def batch_statistics_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes `groups` equal slices of x [B, C, H, W], each by its own statistics (Ioffe and Szegedy 2015, alg. 1).

    Returns y [B, C, H, W] of x's type, and mean and (biased) variance [groups, C], float32, detached.

    PyTorch's native batch norm keeps a float32 copy of the activations for its backward pass. These plain operations,
    fused by XLA, keep the input as it is (bfloat16): 121.8 -> 112.6 million cycles, 54.3 -> 50.5 GB of traffic.
    With `groups` a multiple of the number of cores and the batch sharded over them, every sum stays within one core:
    no collective in the forward or the backward pass. With groups=1 the statistics are those of the global batch.
    """
    batch, channels, height, width = x.shape
    # One group needs no fifth dimension; the compiler lays out four dimensions better.
    shape, dims = x.shape, (0, 2, 3)
    if groups > 1:
        shape, dims = (groups, batch // groups, channels, height, width), (1, 3, 4)
    # float32 inside, but a float64 input stays float64: tests compare gradients there.
    x32 = x.to(torch.promote_types(x.dtype, torch.float32)).view(shape)
    mean = x32.mean(dims)
    # E[x^2] - E[x]^2 reads x once where the two-pass form reads it twice; rounding may take it just below zero.
    variance = ((x32 * x32).mean(dims) - mean * mean).clamp(min=0)
    scale = weight * torch.rsqrt(variance + eps)
    shift = bias - mean * scale
    if groups > 1:
        y = x32 * scale[:, None, :, None, None] + shift[:, None, :, None, None]
    else:
        y = x32 * scale[:, None, None] + shift[:, None, None]
    return y.to(x.dtype).view(x.shape), mean.detach().view(groups, channels), variance.detach().view(groups, channels)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm with separate statistics for `groups` slices of the batch; the published recipe has one per worker.

    The running statistics are the mean over the groups (the variance unbiased within its group), one small all-reduce
    under SPMD. Parameters, buffers and evaluation are `nn.BatchNorm2d`'s. One group on NATIVE_NORM_DEVICES takes the
    native kernel; more groups, and other devices (XLA), take `batch_statistics_norm`.
    """

    groups = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1 and x.device.type in NATIVE_NORM_DEVICES:
            return super().forward(x)
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            shift = self.bias - self.running_mean * scale
            return (x.to(scale.dtype) * scale[:, None, None] + shift[:, None, None]).to(x.dtype)
        count = x.numel() // (x.shape[1] * self.groups)
        if x.shape[0] % self.groups or count < 2:
            sliced = f"{self.groups} groups of at least 2 values per channel; raise --batch-size"
            raise InputError(f"batch norm: an input {list(x.shape)} does not divide into {sliced}")
        y, mean, variance = batch_statistics_norm(x, self.weight, self.bias, self.eps, self.groups)
        with torch.no_grad():
            self.running_mean.lerp_(mean.mean(0), self.momentum)
            self.running_var.lerp_(variance.mean(0) * (count / (count - 1)), self.momentum)
            self.num_batches_tracked.add_(1)
        return y


class PointwiseConv2d(nn.Module):
    """A 1x1 convolution that keeps its weight as a matrix [out, in]; a `state_dict` shows it as [out, in, 1, 1].

    The TPU stores [out, in, 1, 1] in tiles of one row, and each step copies weight, gradient and momentum to tiles of
    8 x 128 and back. A matrix needs no copy: 112.6 -> 107.6 million cycles for ResNet-50.
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
        state[prefix + "weight"] = state[prefix + "weight"][:, :, None, None]

    @staticmethod
    def _from_torchvision(module: nn.Module, state: dict, prefix: str, *_) -> None:
        weight = state.get(prefix + "weight")
        if weight is not None and weight.dim() == 4 and weight.shape[2:] == (1, 1):
            state[prefix + "weight"] = weight[:, :, 0, 0]


class Bottleneck(nn.Module):
    """A block: 1x1 to `channels`, 3x3 with the stride (v1.5), 1x1 to 4 * `channels`, shortcut (He et al., fig. 5)."""

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
            self.downsample = nn.Sequential(PointwiseConv2d(in_channels, out_channels, stride), BatchNorm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """Maps images [B, 3, H, W] to logits [B, num_classes] with stages of `layers` blocks (He et al. 2015, table 1);
    `width` is the number of channels of the stem and the first stage, `norm_groups` that of `BatchNorm`."""

    def __init__(self, layers: tuple[int, ...], num_classes: int = 1000, width: int = 64, norm_groups: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = BatchNorm(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        for stage, blocks in enumerate(layers):
            planes = width * 2**stage
            first = Bottleneck(channels, planes, stride=2 if stage else 1)
            channels = planes * Bottleneck.expansion
            rest = [Bottleneck(channels, planes, stride=1) for _ in range(blocks - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *rest))
        self.fc = nn.Linear(channels, num_classes)
        self.stages = len(layers)
        self.reset_parameters()
        for module in self.modules():
            if isinstance(module, BatchNorm):
                module.groups = norm_groups

    def reset_parameters(self) -> None:
        """Initializes convolutions Kaiming-normal (fan out), and each block's last norm with 0: a block starts as the
        identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1)."""
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
        # The mean over 7 x 7 is float32: sums in bfloat16 would lose what the head reads.
        return self.fc(x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32)))


LAYERS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3), "resnet_tiny": (1, 1, 1, 1)}


def resnet(name: str, num_classes: int = 1000, norm_groups: int = 1) -> ResNet:
    """Returns a model of `LAYERS`; `resnet_tiny` has one block per stage and 16 channels, for small images on a CPU."""
    return ResNet(LAYERS[name], num_classes, width=16 if name == "resnet_tiny" else 64, norm_groups=norm_groups)


class Normalize(nn.Module):
    """Maps uint8 images [B, H, W, 3] to float32 [B, 3, H, W], with the mean and standard deviation of each channel
    (0..255). Its constants are buffers: a tensor created in the step would be sent to the device in every step."""

    def __init__(self, mean: tuple[float, float, float], std: tuple[float, float, float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images.permute(0, 3, 1, 2).float() - self.mean) / self.std


def load_weights(model: ResNet, weights: dict[str, Tensor], path: str, head: heads.Order | None = None) -> None:
    """Loads torchvision's or our exported weights; a head for another number of classes stays as it was initialised.
    Raises InputError where they are of another model; `path` is where they come from, `head` what `head_order` says."""
    own, weights = model.state_dict(), dict(weights)
    for name in ("fc.weight", "fc.bias"):
        if name not in weights:
            continue
        if weights[name].shape[0] != own[name].shape[0] or (head is not None and head.rows is None):
            weights[name] = own[name]
        elif head is not None and head.moved:
            weights[name] = weights[name][head.rows]
    shapes, found = ({name: tensor.shape for name, tensor in each.items()} for each in (own, weights))
    wrong = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))
    if wrong:
        raise InputError(f"--weights {path} does not fit --model: {wrong[0]} and {len(wrong) - 1} more tensors differ")
    model.load_state_dict(weights)


def head_order(
    weights: dict[str, Tensor], metadata: dict[str, str], classes: Sequence[str], path: str, stated: Sequence[str] = ()
) -> heads.Order:
    """Decides by the names of the classes what becomes of the head in a weights file, see models/heads.py.

    An export's metadata names its classes. torchvision's files name none: one of 1,000 is taken for ImageNet's where
    the data has these, in the order of their WordNet ids, as folders have it.

    Raises InputError where the metadata is no list of as many names as the head has rows, and where an order is stated
    of a head for another number of classes.
    """
    where, bias = f"--weights {path}", weights.get("fc.bias")
    if bias is None:
        return heads.Order()  # another model's, which load_weights refuses
    theirs = None
    if "classes" in metadata:
        try:
            theirs = json.loads(metadata["classes"])
        except ValueError:
            theirs = ()
        if not isinstance(theirs, list) or len(theirs) != len(bias):
            what = f"{where} has a head of {len(bias)} classes and, in its metadata, not the names of so many"
            raise InputError(f"{what}; export it again, or leave its metadata out and state them in --labels")
    if len(bias) != len(classes):
        named = f" ({heads.listed(theirs)})" if theirs else ""
        counts = f"a head for {len(bias)} classes{named}, the data has {len(classes)}"
        if stated:
            raise InputError(f"--labels states the order of a head's classes, but {where} has {counts}")
        return heads.other(where, counts)
    if theirs is None and not stated and is_imagenet(classes):
        said = (
            f"{where} does not name its 1,000 classes: they are taken for ImageNet's, in the order of the WordNet ids"
        )
        return heads.Order(list(range(len(classes))), said)
    return heads.order(where, theirs, classes, stated)


def is_imagenet(classes: Sequence[str]) -> bool:
    """Returns whether these are ImageNet's 1,000 classes in their usual order: folders named after WordNet's ids, or
    names that begin as torchvision's do ("tench, Tinca tinca"), nine of ten at least."""
    if len(classes) != 1000:
        return False
    if all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return list(classes) == sorted(classes)
    from torchvision.models import ResNet50_Weights

    usual = ResNet50_Weights.IMAGENET1K_V1.meta["categories"]
    firsts = [name.partition(",")[0].strip().lower() for name in classes]
    equal = sum(first == name.lower() for first, name in zip(firsts, usual, strict=True))
    return equal >= 900
