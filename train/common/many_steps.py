"""Several train steps in one call, for steps that a chip takes in less time than its host needs to start them.

    step_fn = many_steps.compiled(train_step, mesh, 8)
    for step, batches, due in many_steps.calls(loader, start, 8):    # step: the last of the call
        metrics = step_fn(state, batches, config, mesh)         # of its last step

The numbers are those of single steps, and do not depend on how many a call has.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from errors import InputError
from train.common import device

MOST = 1000  # so many batches lie on the device at once


def compiled(step_fn: Callable, mesh: device.Mesh, most: int) -> Callable:
    """Returns `step_fn(state, batch, *rest)` as a function of several batches in place of one: as many as `most` are
    one program on XLA, a loop on the device; fewer are single steps. It returns what the last step returns.

    Args:
        step_fn: a step as `device.compiled` takes it, which draws no random numbers.
    Raises:
        InputError: `most` is larger than MOST.
    """
    if most > MOST:
        raise InputError(f"--steps-a-call is {most}; at most {MOST}, since all batches of a call lie on the device")
    single = looped = device.compiled(step_fn, mesh)
    if mesh.spmd is not None and most > 1:
        from train.common.xla.step_loop import StepLoop

        looped = device.compiled(StepLoop(step_fn, mesh), mesh)

    def call(state: Any, batches: Sequence[dict[str, Tensor]], *rest: Any) -> Any:
        if len(batches) == most and looped is not single:
            return looped(state, batches, *rest)
        for batch in batches:
            result = single(state, batch, *rest)
        return result

    return call


def calls(
    loader: Iterable[dict[str, Tensor]], start: int, most: int, single: int = 0
) -> Iterator[tuple[int, list[dict[str, Tensor]], Callable[[int], bool]]]:
    """Yields, for each call of the steps after `start`: its last step; its batches; and a function that tells whether
    one of its steps is a multiple of a number, so that what is to happen after that step happens now.

    Calls end at multiples of `most`, wherever a run resumes, and with the loader. The first `single` steps of a run are
    calls of their own: a call has one learning rate, and they have one each.
    """
    step, batches = start, []

    def due(every: int) -> bool:
        return step // every > (step - len(batches)) // every

    for step, batch in enumerate(loader, start + 1):
        batches.append(batch)
        if step % most == 0 or step <= single:
            yield step, batches, due
            batches = []
    if batches:
        yield step, batches, due
