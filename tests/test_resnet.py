"""models/resnet.py against torchvision and against torch's own batch norm, in plain PyTorch and on XLA."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import update
from torch import nn

from models import resnet
from models.resnet import BatchNorm, ResNet, batch_statistics_norm
from train.common import checkpoint, device


def torchvision_model() -> nn.Module:
    model = torchvision.models.resnet.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=7)
    for module in model.modules():  # statistics as after training, so that evaluation tests them
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnet152"])
def test_state_dict_has_torchvisions_keys_and_shapes(name):
    with torch.device("meta"):
        models = resnet.resnet(name), getattr(torchvision.models, name)()
    ours, theirs = ([(k, v.shape, v.dtype) for k, v in model.state_dict().items()] for model in models)
    assert ours == theirs


def test_initial_weights_have_torchvisions_distribution_and_the_last_norms_are_zero():
    ours = resnet.resnet("resnet50")
    theirs = torchvision.models.resnet50(zero_init_residual=True).state_dict()
    for name, weight in ours.state_dict().items():
        if weight.dim() == 4 and weight.numel() > 10_000:
            torch.testing.assert_close(weight.std(), theirs[name].std(), rtol=0.05, atol=0)
        if name.endswith(("bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")):
            assert torch.equal(weight, theirs[name]), name


def sgd_step(model, optimizer, images, labels):
    return update(F.cross_entropy(model(images), labels), optimizer)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.usefixtures("compiled")
def test_evaluation_and_a_step_of_training_equal_torchvisions_in_float64():
    """The next test compares the form of PyTorch's own kernels with XLA's."""
    theirs = torchvision_model().double()
    ours = ResNet((1, 1, 1, 1), 7).double()
    ours.load_state_dict(theirs.state_dict())
    images, labels = torch.randn(8, 3, 32, 32, dtype=torch.double), torch.arange(8) % 7
    for _ in range(2):  # with the statistics of the step, too
        outputs = [model.eval()(images).detach() for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
        found, expected = (sgd_step(model.train(), sgd(model), images, labels) for model in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-7, atol=1e-8)


def test_a_step_and_evaluation_on_xla_equal_the_cpus(mesh):
    host = ResNet((1, 1), 7, width=16).train()
    for module in host.modules():  # no block is the identity
        if isinstance(module, BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model, images, labels = device.to_device(copy.deepcopy(host), mesh), torch.randn(8, 3, 32, 32), torch.arange(8) % 7
    expected, optimizer = sgd_step(host, sgd(host), images, labels), sgd(model)
    device.init_optimizer_state(optimizer, mesh)
    loss = device.compiled(sgd_step, mesh)(model, optimizer, images.to(mesh.device), labels.to(mesh.device))
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(checkpoint.to_host(model.state_dict()), dict(host.state_dict()), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        got = device.compiled(lambda model, x: model(x), mesh)(model.eval(), images.to(mesh.device)).cpu()
        torch.testing.assert_close(got, host.eval()(images), rtol=1e-4, atol=1e-4)


def test_norm_of_groups_is_torchs_batch_norm_of_each_with_the_mean_of_their_statistics():
    """In float64, with all gradients. The tests above have one group."""
    norm = BatchNorm(5).double()
    norm.groups = 3
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = (2 * torch.randn(6, 5, 4, 3, dtype=torch.double) + 1).requires_grad_()
    means, variances = torch.zeros(3, 5, dtype=torch.double), torch.ones(3, 5, dtype=torch.double)
    parts = zip(x.chunk(3), means, variances, strict=True)
    expected = torch.cat([F.batch_norm(*part, norm.weight, norm.bias, training=True) for part in parts])
    y, gradient = norm(x), torch.randn_like(x)
    found, wanted = (torch.autograd.grad(each, (x, *norm.parameters()), gradient) for each in (y, expected))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    norm.groups = 4
    for shape, message in (((6, 5, 2, 2), "does not divide into 4"), ((4, 5, 1, 1), "at least 2 values per channel")):
        with pytest.raises(ValueError, match=message):
            norm(torch.randn(shape))


def test_norm_in_bfloat16_is_no_further_from_float64_than_torchs():
    x64 = torch.randn(32, 16, 7, 7, dtype=torch.double) * 3 + 5
    x = x64.bfloat16()
    weight, bias = torch.rand(16) + 0.5, torch.randn(16)
    exact = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    stock = F.batch_norm(x, None, None, weight, bias, training=True).double()
    ours = batch_statistics_norm(x, weight, bias, 1e-5, 1)[0].double()
    assert (ours - exact).abs().mean() <= (stock - exact).abs().mean() * 1.01
    assert ours.sub(exact).abs().max() < 0.04  # half a unit in the last place of bfloat16 at 8


def test_normalize_equals_torchvisions():
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    images = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)
    of_one = ([value / 255 for value in values] for values in (mean, std))
    expected = torchvision.transforms.functional.normalize(images.permute(0, 3, 1, 2) / 255, *of_one)
    torch.testing.assert_close(resnet.Normalize(mean, std)(images), expected, rtol=1e-5, atol=1e-5)
