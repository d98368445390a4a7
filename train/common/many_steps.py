"""Several train steps in one call, for steps that a chip takes in less time than its host needs to
start them.

    train = many_steps.compiled(train_step, mesh, 8)
    batches = []
    for step, batch in enumerate(loader, start + 1):
        batches.append(batch)
        if many_steps.ends_call(step, 8, total):
            metrics = train(state, batches, config, mesh)  # of its last step
            batches = []

The numbers are those of single steps, and do not depend on how many a call has.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from errors import InputError
from train.common import device
from train.common.mesh import Mesh

MOST = 1000  # so many batches lie on the device at once


def compiled(step_fn: Callable, mesh: Mesh, most: int) -> Callable:
    """Returns `step_fn(state, batch, *rest)` as a function of several batches in place of one: as
    many as `most` are one program on XLA, a loop on the device; fewer are single steps. It returns
    what the last step returns.

    Args:
        step_fn: a step as `device.compiled` takes it, which draws no random numbers.
    Raises:
        InputError: `most` is larger than MOST.
    """
    if most > MOST:
        raise InputError(
            f"--steps-a-call is {most}; at most {MOST}, since all batches of a call lie on the device"
        )
    single = looped = device.compiled(step_fn, mesh)
    if mesh.compiles and most > 1:
        from train.common.xla.step_loop import StepLoop

        looped = device.compiled(StepLoop(step_fn, mesh), mesh)

    def call(state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        if len(batches) == most and looped is not single:
            return looped(state, batches, *rest)
        for batch in batches:
            result = single(state, batch, *rest)
        return result

    return call


def ends_call(step: int, most: int, total: int, alone: int = 0) -> bool:
    """Tells whether a call ends with this update: at multiples of `most`, wherever a run resumes,
    and with the last one of `total`. The first `alone` updates of a run are calls of their own: a
    call has one learning rate, and they have one each."""
    return step % most == 0 or step == total or step <= alone


def is_due(every: int, step: int, updates: int) -> bool:
    """Tells whether one of the call's `updates`, of which `step` is the last, is a multiple of
    `every`: what is to happen after that one happens after the call."""
    return step // every > (step - updates) // every
