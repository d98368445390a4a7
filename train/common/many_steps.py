"""Several train steps in one call, for steps that a chip takes in less time than its host needs to
start them.

    train_fn = many_steps.compiled(train_step, mesh, 8)
    batches = []
    for step, batch in enumerate(loader, start + 1):
        batches.append(batch)
        if many_steps.ends_call(step, 8, total):
            metrics = train_fn(state, batches, config, mesh)  # of its last step
            batches = []

The numbers are those of single steps, and do not depend on how many a call has.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from errors import InputError
from train.common import device
from train.common.mesh import Mesh

MAX_STEPS_PER_CALL = 1000  # all batches of a call are in the device's memory at once


def compiled(step_fn: Callable, mesh: Mesh, steps_per_call: int) -> Callable:
    """Returns `step_fn(state, batch, *rest)` as a function of a list of batches in place of one.

    On XLA `steps_per_call` batches are one program, a loop on the device; fewer are single steps.
    The function returns what the last step returns.

    Args:
        step_fn: a step as `device.compiled` takes it, which draws no random numbers.

    Raises:
        InputError: `steps_per_call` is larger than MAX_STEPS_PER_CALL.
    """
    if steps_per_call > MAX_STEPS_PER_CALL:
        raise InputError(
            f"--steps-a-call is {steps_per_call}; at most {MAX_STEPS_PER_CALL}, "
            "since all batches of a call lie on the device"
        )
    single = device.compiled(step_fn, mesh)
    looped = None
    if mesh.compiles and steps_per_call > 1:
        from train.common.xla.step_loop import StepLoop

        looped = device.compiled(StepLoop(step_fn, mesh), mesh)

    def call(state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        if looped is not None and len(batches) == steps_per_call:
            return looped(state, batches, *rest)
        for batch in batches:
            result = single(state, batch, *rest)
        return result

    return call


def ends_call(step: int, steps_per_call: int, total: int, single_steps: int = 0) -> bool:
    """Returns whether a call ends with this step.

    That is so at multiples of `steps_per_call`, wherever a run resumes, and at the last step.

    Args:
        total: steps of the training.
        single_steps: how many steps at the start of a training are a call each. A warm-up needs
            this: its learning rate changes with each step, and a call has one rate for all steps.
    """
    return step % steps_per_call == 0 or step == total or step <= single_steps


def is_due(interval: int, step: int, steps: int) -> bool:
    """Returns whether a multiple of `interval` is among the steps of a call.

    What is to happen after that multiple happens after the call.

    Args:
        step: the last step of the call.
        steps: how many steps the call has.
    """
    step_before_call = step - steps
    return step // interval > step_before_call // interval
