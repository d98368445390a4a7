"""Tests models/resnet.py against torchvision and against torch's own batch norm, in plain PyTorch
and on XLA."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import update
from torch import Tensor, nn

from models import resnet
from models.resnet import BatchNorm, ResNet, batch_statistics_norm
from train.common import checkpoint, device


def torchvision_model() -> nn.Module:
    """Returns a ResNet of torchvision with statistics as after training, so that evaluation tests
    them."""
    bottleneck = torchvision.models.resnet.Bottleneck
    model = torchvision.models.resnet.ResNet(bottleneck, [1, 1, 1, 1], num_classes=7)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


# Against torchvision


def layout(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Returns the name, shape and type of each entry of a state dict."""
    return [(name, value.shape, value.dtype) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnet152"])
def test_state_dict_has_torchvisions_keys_and_shapes(name):
    with torch.device("meta"):
        ours = resnet.resnet(name)
        theirs = getattr(torchvision.models, name)()

    assert layout(ours) == layout(theirs)


def test_initial_weights_have_torchvisions_distribution():
    """The last norm of each block is zero."""
    ours = resnet.resnet("resnet50")
    theirs = torchvision.models.resnet50(zero_init_residual=True).state_dict()
    norms = ("bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")

    for name, weight in ours.state_dict().items():
        if weight.dim() == 4 and weight.numel() > 10_000:
            torch.testing.assert_close(weight.std(), theirs[name].std(), rtol=0.05, atol=0)
        if name.endswith(norms):
            assert torch.equal(weight, theirs[name]), name


def sgd_step(model, optimizer, images, labels) -> Tensor:
    """Takes a step of training; returns the loss."""
    loss = F.cross_entropy(model(images), labels)
    return update(loss, optimizer)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.usefixtures("compiled")
def test_evaluation_and_a_step_equal_torchvisions_in_float64():
    """The next test compares the form of PyTorch's own kernels with XLA's."""
    theirs = torchvision_model().double()
    ours = ResNet((1, 1, 1, 1), 7).double()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(8, 3, 32, 32, dtype=torch.double)
    labels = torch.arange(8) % 7

    for _ in range(2):  # with the statistics of the step, too
        our_logits = ours.eval()(images).detach()
        their_logits = theirs.eval()(images).detach()
        torch.testing.assert_close(our_logits, their_logits, rtol=1e-9, atol=1e-9)

        our_loss = sgd_step(ours.train(), sgd(ours), images, labels)
        their_loss = sgd_step(theirs.train(), sgd(theirs), images, labels)
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-7, atol=1e-8)


def test_a_step_and_evaluation_on_xla_equal_the_cpus(mesh):
    host = ResNet((1, 1), 7, width=16).train()
    for module in host.modules():  # no block is the identity
        if isinstance(module, BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model = device.to_device(copy.deepcopy(host), mesh)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.arange(8) % 7

    expected_loss = sgd_step(host, sgd(host), images, labels)
    optimizer = sgd(model)
    device.init_optimizer_state(optimizer, mesh)
    step = device.compiled(sgd_step, mesh)
    loss = step(model, optimizer, images.to(mesh.device), labels.to(mesh.device))

    torch.testing.assert_close(loss.cpu(), expected_loss, rtol=1e-5, atol=1e-6)
    found = checkpoint.to_host(model.state_dict())
    torch.testing.assert_close(found, dict(host.state_dict()), rtol=1e-3, atol=1e-4)
    evaluate = device.compiled(lambda model, x: model(x), mesh)
    with torch.no_grad():
        logits = evaluate(model.eval(), images.to(mesh.device)).cpu()
        torch.testing.assert_close(logits, host.eval()(images), rtol=1e-4, atol=1e-4)


# Batch norm


def test_norm_of_groups_is_torchs_batch_norm_of_each():
    """In float64, with all gradients; the running statistics are the means of the groups'. The
    tests above have one group."""
    norm = BatchNorm(5).double()
    norm.groups = 3
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = (2 * torch.randn(6, 5, 4, 3, dtype=torch.double) + 1).requires_grad_()

    means = torch.zeros(3, 5, dtype=torch.double)
    variances = torch.ones(3, 5, dtype=torch.double)
    groups = []
    for rows, mean, variance in zip(x.chunk(3), means, variances, strict=True):
        groups.append(F.batch_norm(rows, mean, variance, norm.weight, norm.bias, training=True))
    expected = torch.cat(groups)
    y = norm(x)

    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(x)
    inputs = (x, *norm.parameters())
    found_gradients = torch.autograd.grad(y, inputs, gradient)
    expected_gradients = torch.autograd.grad(expected, inputs, gradient)
    torch.testing.assert_close(found_gradients, expected_gradients, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, variances.mean(0))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 5, 2, 2), "does not divide into 4"),
        ((4, 5, 1, 1), "at least 2 values per channel"),
    ],
)
def test_a_batch_that_does_not_fit_the_groups_is_refused(shape, message):
    norm = BatchNorm(5).double()
    norm.groups = 4

    with pytest.raises(ValueError, match=message):
        norm(torch.randn(shape))


def test_norm_in_bfloat16_is_no_further_from_float64_than_torchs():
    x64 = torch.randn(32, 16, 7, 7, dtype=torch.double) * 3 + 5
    x = x64.bfloat16()
    weight = torch.rand(16) + 0.5
    bias = torch.randn(16)
    exact = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)

    theirs = F.batch_norm(x, None, None, weight, bias, training=True)
    ours = batch_statistics_norm(x, weight, bias, 1e-5, 1)[0]

    our_error = (ours.double() - exact).abs()
    their_error = (theirs.double() - exact).abs()
    assert our_error.mean() <= their_error.mean() * 1.01
    assert our_error.max() < 0.04  # half a unit in the last place of bfloat16 at 8


# Preparation of images


def test_normalize_equals_torchvisions():
    mean = (123.675, 116.28, 103.53)
    std = (58.395, 57.12, 57.375)
    images = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)

    found = resnet.Normalize(mean, std)(images)

    # torchvision's has channels first, and pixels from 0 to 1.
    unit_images = images.permute(0, 3, 1, 2) / 255
    unit_mean = [value / 255 for value in mean]
    unit_std = [value / 255 for value in std]
    expected = torchvision.transforms.functional.normalize(unit_images, unit_mean, unit_std)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
