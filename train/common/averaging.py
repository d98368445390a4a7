"""The mean of a run's last checkpoints, with which the Transformer is evaluated and exported."""

from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError
from train.common.checkpoint import Checkpointer
from train.common.device import over_hosts, replicate, same_on_all_hosts


def average(checkpoints: Checkpointer, model: nn.Module, mesh: Any) -> list[int]:
    """Gives a model on the device the mean of the weights in the last `keep` checkpoints of steps that are multiples of
    `every`; the very last step is always among them (Vaswani et al. 2017, section 6.1).

    Returns:
        The steps.
    Raises:
        InputError: one of them is damaged, or the hosts of a pod see different ones.
    """
    over_hosts(mesh, 0)  # all hosts wait: the main process has now written the last one
    known = checkpoints.complete_steps()
    steps = sorted({*[step for step in known if step % checkpoints.every == 0], known[-1]})[-checkpoints.keep :]
    same_on_all_hosts(mesh, "the checkpoints to average (the sum of their steps)", sum(steps))
    sums: dict[str, Tensor] = {}
    for step in steps:
        saved = checkpoints.read(step)
        if saved is None:
            damaged = f"the checkpoint of step {step} in {checkpoints.path}, one of those to average, is damaged"
            remedy = "remove it and those of later steps: the same command then trains again from what is left"
            raise InputError(f"{damaged}; {remedy}")
        for name, _ in model.named_parameters():
            weight = saved[f"model.{name}"]
            sums[name] = sums[name] + weight.double() if name in sums else weight.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(sums[name] / len(steps))
            if parameter.device.type != "cpu":
                replicate(parameter, mesh)
    return steps
