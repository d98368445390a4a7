"""AdamW and LAMB that keep their two moments in bfloat16: 4 bytes a parameter instead of 8.

A step computes in float32, and rounds what it keeps stochastically: a number between two of
bfloat16 becomes the upper one with the probability of its distance from the lower one, so that it
stays what it was on average. Rounded to nearest, the second moment would stick: with beta2 = 0.999
a step changes it by a thousandth, and neighbours in bfloat16 are 1/256 to 1/128 apart (Zamirai et
al. 2020, "Revisiting BFloat16 Training", arXiv:2010.06192, of weights that stick so; torchao's
low-bit optimizers round theirs so).

The random bits come from one draw for each parameter and from a hash of each number's place. So
they depend on the seed and the step (device.seed_step) alone, not on how a parameter is cut, and
none of them is written to memory. As dropout's, they are others on another kind of device.
"""

from typing import Any

import timm.optim
import torch
from timm.optim.lamb import lamb
from torch import Tensor, nn
from torch.optim.adamw import adamw

from train.common import device
from train.common.hashing import hash32, shift_right

MOMENTS = ("exp_avg", "exp_avg_sq")  # their names in the state of both optimizers
Tensors = tuple[list[Tensor], ...]  # see `_RoundedMoments._update`


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, up or down by chance.

    bfloat16 is the upper half of float32: adding `bits` to the lower half carries into the upper
    one with the right probability. What bfloat16 has exactly, infinities and NaN stay.

    Args:
        bits: int32 of x's shape, uniform from 0 to 2**16 - 1.
    """
    carried = device.bitcast(x, torch.int32) + bits
    rounded = device.bitcast(carried & -(2**16), torch.float32)
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def random_bits(shape: torch.Size, salt: Tensor) -> Tensor:
    """Returns int32 of this shape, a hash of each number's place and of `salt`, an int32."""
    place = torch.zeros((), device=salt.device, dtype=torch.int32)
    for size in shape:
        index = torch.arange(size, device=salt.device, dtype=torch.int32)
        place = (place * size)[..., None] + index
    return hash32(place ^ salt)


class _RoundedMoments:
    """The step of both optimizers: float32 moments of one parameter at a time."""

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters that have a gradient."""
        parameters = []
        for group in self.param_groups:
            for parameter in group["params"]:
                parameters.append((group, parameter))

        # A salt for each parameter. All are drawn at once: on a TPU each draw is a program's loop.
        on = parameters[0][1].device
        drawn = torch.rand(len(parameters), device=on, dtype=torch.float32)
        # Processes of plain PyTorch draw for themselves; their weights must stay the same.
        drawn = device.mean_over_processes(drawn)
        salts = hash32((drawn * 2**24).to(torch.int32))

        for number, (group, parameter) in enumerate(parameters):
            if parameter.grad is not None:
                self._step_of(group, parameter, salts[number])

    def _step_of(self, group: dict[str, Any], parameter: nn.Parameter, salt: Tensor) -> None:
        """Updates a parameter and its state."""
        state = self.state[parameter]
        if not state:
            self._begin(state, parameter)
        moments = [state[name].float() for name in MOMENTS]
        exp_avg, exp_avg_sq = moments
        self._update(group, state, ([parameter], [parameter.grad], [exp_avg], [exp_avg_sq]))

        bits = random_bits(parameter.shape, salt)
        halves = (bits & 0xFFFF, shift_right(bits, 16))
        for name, moment, half in zip(MOMENTS, moments, halves, strict=True):
            state[name].copy_(round_stochastically(moment, half))

    def _begin(self, state: dict[str, Any], parameter: nn.Parameter) -> None:
        """Makes the state of a parameter before its first step."""
        for name in MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)

    def _update(self, group: dict[str, Any], state: dict[str, Any], tensors: Tensors) -> None:
        """Updates a parameter and its moments in place, as the library does.

        Args:
            tensors: lists of one: the parameter, its gradient and its float32 moments, as both
                libraries' functions take them.
        """
        raise NotImplementedError


class AdamW(_RoundedMoments, torch.optim.AdamW):
    """torch.optim.AdamW without AMSGrad, its moments in bfloat16."""

    def _begin(self, state: dict[str, Any], parameter: nn.Parameter) -> None:
        super()._begin(state, parameter)
        state["step"] = torch.zeros((), dtype=torch.float32)

    def _update(self, group: dict[str, Any], state: dict[str, Any], tensors: Tensors) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            *tensors,
            [],
            [state["step"]],
            foreach=False,
            capturable=group["capturable"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class Lamb(_RoundedMoments, timm.optim.Lamb):
    """timm's Lamb without bias correction and without a clipping of its own, its moments in
    bfloat16."""

    def _update(self, group: dict[str, Any], state: dict[str, Any], tensors: Tensors) -> None:
        beta1, beta2 = group["betas"]
        lamb(
            *tensors,
            foreach=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            beta3=1 - beta1,
            bias_correction1=1.0,
            bias_correction2=1.0,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_decay=False,
            max_lr=None,
            trust_clip=group["trust_clip"],
            always_adapt=group["always_adapt"],
            caution=False,
        )
