"""train/common/moments.py: stochastic rounding is right on average, moments in bfloat16 follow
those in float32, and neither devices, nor how a state is cut, nor a resume change a bit."""

from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import timm.optim
import torch
from helpers import Stop, equal, exported, losses, records, start
from torch import nn

from errors import InputError
from train import pretrain
from train.common import checkpoint, device, moments, sharding
from train.common.mesh import WHOLE, Layout

INF = float("inf")
BITS = torch.arange(2**16, dtype=torch.int32)  # all that 16 random bits can be
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "foreach": False}
OF_LAMB = SETTINGS | {"bias_correction": False, "max_grad_norm": None}
OPTIMIZERS = {
    "adamw": (partial(moments.AdamW, **SETTINGS), partial(torch.optim.AdamW, **SETTINGS)),
    "lamb": (partial(moments.Lamb, **OF_LAMB), partial(timm.optim.Lamb, **OF_LAMB)),
}


# ---- rounding ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "x", [1.0, -1.3, 0.1, 3.14159, 0.99999, -1.00001, 255.9, 1e-30, 2.0**-126, 3e-39, 1.7e38]
)
def test_rounding_is_exact_on_average_and_goes_one_step(x):
    number = torch.tensor(x)

    rounded = moments.round_stochastically(number.expand(len(BITS)), BITS)

    # Each of the bits once, so that the mean is the expectation.
    assert rounded.double().mean().item() == pytest.approx(number.double().item(), rel=1e-14)
    neighbours = rounded.unique().float()
    assert len(neighbours) <= 2
    assert neighbours.min() <= number <= neighbours.max()
    below = moments.round_stochastically(number, torch.tensor(0, dtype=torch.int32))
    step = below.view(torch.int16).int() + 1  # the next of bfloat16, away from 0
    above = step.to(torch.int16).view(torch.bfloat16)
    assert set(neighbours.tolist()) <= {below.item(), above.item()}


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.5, 2.0**-133, 3.3895313892515355e38, INF, -INF])
def test_what_bfloat16_has_stays(x):
    rounded = moments.round_stochastically(torch.full(BITS.shape, x), BITS)
    assert (rounded == x).all()
    assert (rounded.signbit() == torch.tensor(x).signbit()).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1])
def test_nan_stays(bits):
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    rounded = moments.round_stochastically(nan.expand(len(BITS)), BITS)
    assert rounded.isnan().all()


def test_random_bits_are_uniform_and_independent():
    salts = moments.hash32(torch.arange(64, dtype=torch.int32))
    drawn = torch.stack([moments.random_bits((40, 50), salt) for salt in salts])

    bits = (drawn[..., None] >> torch.arange(32)) & 1
    signs = (2 * bits - 1).double().flatten(1, 2)  # [salts, places, bits]
    count = signs[..., 0].numel()
    tolerance = 5 / count**0.5  # standard errors of a mean of signs
    assert signs.mean((0, 1)).abs().max() < tolerance
    # Of one place: the bits of the two moments. Of neighbours, and of one place in two steps.
    together = torch.einsum("spi,spj->ij", signs, signs) / count
    assert (together - torch.eye(32)).abs().max() < tolerance
    for other in (signs.roll(1, 1), signs.roll(50, 1), signs.roll(1, 0)):
        assert (signs * other).mean((0, 1)).abs().max() < tolerance


def test_the_devices_round_as_the_host_does(mesh):
    x = torch.randn(8, 6)
    salt = torch.tensor(7, dtype=torch.int32)

    bits = moments.random_bits(x.shape, salt)
    on_device = moments.random_bits(x.shape, salt.to(mesh.device))
    rounded = moments.round_stochastically(x.to(mesh.device), on_device & 0xFFFF)

    assert torch.equal(on_device.cpu(), bits)
    assert torch.equal(rounded.cpu(), moments.round_stochastically(x, bits & 0xFFFF))


# ---- optimizers ----------------------------------------------------------------------------------
def host_step(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    """Updates with these gradients."""
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_moments_follow_float32_where_nearest_would_stick(name):
    """2,000 steps of beta2 = 0.999, in which the second moment rises to 0.86 of the variance."""
    ours, theirs = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.ones(64, 32)) for _ in range(2)]
    optimizer = ours(parameters[:1])
    reference = theirs(parameters[1:])
    nearest = torch.zeros(64, 32, dtype=torch.bfloat16)

    for step in range(2000):
        gradient = torch.randn(64, 32)
        for each in (optimizer, reference):
            host_step(each, [gradient])
        if step == 0:  # from moments of zero, with those of float32 in the update
            assert torch.equal(*parameters)
        nearest = (nearest.float() * 0.999 + 0.001 * gradient**2).to(torch.bfloat16)

    state = optimizer.state[parameters[0]]
    expected = reference.state[parameters[1]]
    for moment in moments.MOMENTS:
        assert state[moment].dtype == torch.bfloat16
    second = expected["exp_avg_sq"]
    relative = state["exp_avg_sq"].float() / second - 1
    assert relative.abs().mean() < 0.05
    assert relative.mean().abs() < 0.005  # no bias: 2,048 numbers of 0.04 each
    assert (nearest.float() / second - 1).mean().abs() > 0.05
    first = expected["exp_avg"]
    torch.testing.assert_close(state["exp_avg"].float(), first, rtol=0.03, atol=0.01)


def uploaded(mesh) -> list[torch.Tensor]:
    """Returns the gradients of `device_steps`: of a weight and a bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((64, 16), (64,))
    return [torch.randn(shape, generator=generator).to(mesh.device) for shape in shapes]


def device_steps(mesh, layout: Layout, make, count: int) -> dict[str, torch.Tensor]:
    """Takes compiled steps on a linear layer; returns its parameters and their state."""
    arranged = sharding.arranged(mesh, layout)
    torch.manual_seed(0)
    model = device.to_device(nn.Linear(16, 64), arranged)
    optimizer = make(model.parameters())
    device.init_optimizer_state(optimizer, arranged)

    def step(model, optimizer, gradients):
        # Sums of one number each: no order of a sum tells devices apart.
        loss = 0
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            loss = loss + (parameter * gradient).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    compiled = device.compiled(step, arranged)
    gradients = uploaded(mesh)
    for number in range(count):
        device.set_lr(optimizer, 0.01)
        device.seed_step(3, number)
        compiled(model, optimizer, gradients)
    report = device.graph_report()
    assert report["recompilations"] == report["fallbacks"] == []

    state = checkpoint.named_state(model, optimizer)
    return checkpoint.to_host(state, arranged.layers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cut_state_is_rounded_as_a_whole_one(name, mesh):
    ours, theirs = OPTIMIZERS[name]

    whole = device_steps(mesh, WHOLE, ours, count=4)  # two traced, two repeated
    cut = device_steps(mesh, Layout(shard_state="full"), ours, count=4)
    reference = device_steps(mesh, WHOLE, theirs, count=4)

    moment = "optimizer.weight.exp_avg_sq"
    assert whole[moment].dtype == cut[moment].dtype == torch.bfloat16
    assert reference[moment].dtype == torch.float32
    for key, value in whole.items():
        if key.startswith("optimizer."):
            assert torch.equal(cut[key], value), key
        torch.testing.assert_close(cut[key], value, rtol=1e-5, atol=1e-7)  # LAMB's norms are sums
        torch.testing.assert_close(value.float(), reference[key].float(), rtol=0.02, atol=1e-3)


def test_moments_come_back_from_a_checkpoint_bit_for_bit(mesh):
    make = OPTIMIZERS["adamw"][0]
    gradients = torch.randn(6, 32, 8)

    def train(parameter, optimizer, steps) -> None:
        for step in steps:
            torch.manual_seed(step)  # as device.seed_step
            host_step(optimizer, [gradients[step]])

    models = [nn.Linear(8, 32, bias=False) for _ in range(2)]
    first, second = ([*model.parameters()] for model in models)
    optimizers = [make(first), make(second)]
    train(first, optimizers[0], range(3))
    content = safetensors.torch.save(checkpoint.named_state(models[0], optimizers[0]))
    train(first, optimizers[0], range(3, 6))

    train(second, optimizers[1], [0])  # so that there is a state
    checkpoint.load_state(safetensors.torch.load(content), models[1], optimizers[1], mesh)
    train(second, optimizers[1], range(3, 6))

    expected = checkpoint.named_state(models[0], optimizers[0])
    assert equal(checkpoint.named_state(models[1], optimizers[1]), expected)


def test_the_default_is_the_libraries_optimizers():
    model = nn.Linear(2, 2)
    for name, (ours, theirs) in OPTIMIZERS.items():
        config = pretrain.validate(replace(pretrain.TINY, optimizer=name))
        made = pretrain.make_optimizer(config, model)
        small = pretrain.make_optimizer(replace(config, moments="bfloat16"), model)
        assert type(made) is theirs.func
        assert type(small) is ours.func
        assert small.defaults == made.defaults


# ---- runs ----------------------------------------------------------------------------------------
@pytest.mark.slow  # most of it is in the quick tests above
@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "lamb", "update_every": 2, "layout": Layout(shard_state="full")}],
    ids=["adamw", "lamb"],
)
def test_a_killed_run_resumes_exactly_on_any_devices(changes, tmp_path, capsys):
    config = replace(
        pretrain.TINY,
        moments="bfloat16",
        steps=8,
        warmup_steps=4,
        log_every=1,
        eval_every=4,
        runs=str(tmp_path),
        name="whole",
        **changes,
    )
    metrics = pretrain.main(config)

    killed = replace(config, name="killed")
    code, output = start(pretrain, killed, stop=Stop(step=6, saved=4))
    assert code == -9, output
    with pytest.raises(InputError, match="moments"):
        pretrain.main(replace(killed, moments="float32"))
    assert pretrain.main(killed) == metrics
    assert "resuming after step 4" in capsys.readouterr().out
    whole = tmp_path / "whole"
    assert records(tmp_path / "killed") == records(whole)
    assert equal(exported(tmp_path / "killed"), exported(whole))

    # A moment that is rounded the other way by a gradient's last digit changes less than this.
    alone = replace(config, name="alone", layout=WHOLE)
    code, output = start(pretrain, alone, devices=1)
    assert code == 0, output
    assert losses(tmp_path / "alone") == pytest.approx(losses(whole), rel=1e-4)
