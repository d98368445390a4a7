"""models/resnet.py against torchvision and against torch's own batch norm, in plain PyTorch and on XLA."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from model_helpers import assert_all_close
from torch import nn

from models import resnet
from models.resnet import BatchNorm, ResNet, batch_statistics_norm
from train.common import device


def torchvision_model(layers=(1, 1, 1, 1), num_classes=7) -> nn.Module:
    torch.manual_seed(0)
    block = torchvision.models.resnet.Bottleneck
    model = torchvision.models.resnet.ResNet(block, list(layers), num_classes=num_classes, zero_init_residual=False)
    for module in model.modules():  # statistics as after training, so that evaluation tests them
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model


def our_model(state: dict, layers=(1, 1, 1, 1), num_classes=7, norm_groups=1) -> ResNet:
    model = ResNet(layers, num_classes, norm_groups=norm_groups)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnet152"])
def test_state_dict_has_torchvisions_keys_and_shapes(name):
    with torch.device("meta"):
        models = resnet.resnet(name), getattr(torchvision.models, name)()
    ours, theirs = ([(k, v.shape, v.dtype) for k, v in model.state_dict().items()] for model in models)
    assert ours == theirs


def test_initial_weights_have_torchvisions_distribution_and_the_last_norms_are_zero():
    torch.manual_seed(0)
    ours = resnet.resnet("resnet50")
    theirs = torchvision.models.resnet50(zero_init_residual=True).state_dict()
    for name, weight in ours.state_dict().items():
        if weight.dim() == 4 and weight.numel() > 10_000:
            torch.testing.assert_close(weight.std(), theirs[name].std(), rtol=0.05, atol=0)
        if name.endswith(("bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")):
            assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("training", [True, False])
def test_forward_equals_torchvision_in_float64(form, training):
    theirs = torchvision_model().double().train(training)
    ours = our_model(theirs.state_dict()).double().train(training)
    images = torch.randn(4, 3, 32, 32, dtype=torch.double)
    expected = theirs(images)
    torch.testing.assert_close(ours(images), expected, rtol=1e-9, atol=1e-9)
    assert_all_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, share=0, atol=1e-9)  # running statistics too


def test_resnet50_equals_torchvision_after_an_sgd_step_in_float64(compiled):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(num_classes=10).double().train()
    ours = our_model(theirs.state_dict(), (3, 4, 6, 3), 10).double().train()
    images, labels = torch.randn(8, 3, 32, 32, dtype=torch.double), torch.arange(8)
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert_all_close(ours.state_dict(), theirs.state_dict(), rtol=1e-7, share=0, atol=1e-8)


def test_optimizer_step_on_xla_equals_torchvision_on_the_cpu(mesh):
    theirs = torchvision_model().train()
    ours = device.to_device(our_model(theirs.state_dict()).train(), mesh)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 7

    def step(model, optimizer, images, labels):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    expected = step(theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), images, labels)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    device.init_optimizer_state(optimizer, mesh)
    loss = device.compiled(step, mesh)(ours, optimizer, images.to(mesh.device), labels.to(mesh.device))
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
    on_host = {name: tensor.cpu() for name, tensor in [*ours.named_parameters(), *ours.named_buffers()]}
    ours_cpu = our_model(on_host)
    assert_all_close(ours_cpu.state_dict(), theirs.state_dict(), rtol=1e-3, share=0, atol=1e-4)
    # Evaluation on XLA, on the statistics of that step.
    with torch.no_grad():
        got = device.compiled(lambda model, x: model(x), mesh)(ours.eval(), images.to(mesh.device)).cpu()
        torch.testing.assert_close(got, ours_cpu.eval()(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_norm_and_its_gradients_equal_torchs_batch_norm_of_each_group_in_float64(groups):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4, 3, dtype=torch.double).mul_(2).add_(1).requires_grad_()
    weight, bias = (torch.randn(5, dtype=torch.double, requires_grad=True) for _ in range(2))
    gradient = torch.randn(6, 5, 4, 3, dtype=torch.double)
    y, mean, variance = batch_statistics_norm(x, weight, bias, 1e-5, groups)
    got = torch.autograd.grad((y * gradient).sum(), (x, weight, bias))
    parts = x.chunk(groups)
    expected = torch.cat([F.batch_norm(part, None, None, weight, bias, training=True, eps=1e-5) for part in parts])
    wanted = torch.autograd.grad((expected * gradient).sum(), (x, weight, bias))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mean, torch.stack([part.mean((0, 2, 3)) for part in parts]))
    torch.testing.assert_close(variance, torch.stack([part.var((0, 2, 3), correction=0) for part in parts]))


def test_norm_in_bfloat16_is_no_further_from_float64_than_torchs():
    torch.manual_seed(0)
    x64 = torch.randn(32, 16, 7, 7, dtype=torch.double) * 3 + 5
    x = x64.bfloat16()
    weight, bias = torch.rand(16) + 0.5, torch.randn(16)
    exact = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    stock = F.batch_norm(x, None, None, weight, bias, training=True).double()
    ours = batch_statistics_norm(x, weight, bias, 1e-5, 1)[0].double()
    assert (ours - exact).abs().mean() <= (stock - exact).abs().mean() * 1.01
    assert ours.sub(exact).abs().max() < 0.04  # half a unit in the last place of bfloat16 at 8


def test_running_statistics_are_the_mean_over_the_groups():
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4, 3)
    norm = BatchNorm(5)
    norm.groups = 3
    norm(x)
    each = [nn.BatchNorm2d(5) for _ in range(3)]
    for reference, part in zip(each, x.chunk(3), strict=True):
        reference(part)
    torch.testing.assert_close(norm.running_mean, torch.stack([r.running_mean for r in each]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([r.running_var for r in each]).mean(0))
    assert norm.num_batches_tracked == 1
    norm.groups = 4
    with pytest.raises(ValueError, match="does not divide into 4 groups"):
        norm(torch.randn(6, 5, 2, 2))
    with pytest.raises(ValueError, match="at least 2 values per channel"):
        norm(torch.randn(4, 5, 1, 1))


def test_normalize_equals_torchvisions():
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    of_one = ([value / 255 for value in values] for values in (mean, std))
    expected = torchvision.transforms.functional.normalize(images / 255, *of_one)
    torch.testing.assert_close(resnet.Normalize(mean, std)(images), expected, rtol=1e-5, atol=1e-5)
