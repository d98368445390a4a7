"""--profile 20:25: a trace of these steps in runs/<name>/profile, for TensorBoard's profile plugin
and for Perfetto.

On XLA it is torch_xla's own profiler. The trace has the device's operations by the names of the
compiled program, and the host's threads beside them:

    train                      a step
    wait for a batch           the loop waits for the loader
    start the program          the call of the compiled step
    evaluation, checkpoints    pauses of the training
    upload                     the thread that copies batches to the device

With --device cpu or cuda it is torch.profiler. On a pod the main process is traced.
docs/profiling.md shows how to read a trace.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from errors import InputError
from train.common import device, hooks
from train.common.hooks import Watcher

STEPS = 100  # most to trace: a trace grows by megabytes a step, and TensorBoard reads it whole


@dataclass(frozen=True)
class Flags:
    """Which steps are traced."""

    profile: str = ""  # trace these steps, first:last (20:25), both included; "": none


def watcher(flags: Flags) -> Callable[[Any], "Profile"] | None:
    """Returns what makes the profiler of a Run; None where nothing is traced.

    Raises InputError where the flag is not first:last.
    """
    if not flags.profile:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,11}):([1-9][0-9]{0,11})", flags.profile)
    first = int(match[1]) if match else 0
    last = int(match[2]) if match else -1
    if not first <= last < first + STEPS:
        raise InputError(
            f"--profile is {flags.profile}; "
            f"it must be two steps such as 20:25, from 1 up, at most {STEPS} steps"
        )
    return lambda run: Profile(run, first, last)


class Profile(Watcher):
    """The trace of the steps `first` to `last` of a run.

    Raises:
        InputError: the run has not that many steps.
    """

    def __init__(self, run: Any, first: int, last: int):
        if last > run.total_steps:
            raise InputError(
                f"--profile is {first}:{last}, but the run has {run.total_steps} steps; "
                "give earlier ones"
            )
        self._run = run
        self._first = first
        self._last = last
        self._next = run.start  # step
        self._first_traced = run.start  # step
        self._waits_for_first = run.mesh.main_process
        self._trace = contextlib.ExitStack()
        self._step_name = contextlib.ExitStack()  # names the step that runs in the trace
        self._pause_name = contextlib.ExitStack()  # names the pause in the trace
        # Names what this thread does, while it traces.
        self._name: Callable[..., contextlib.AbstractContextManager] | None = None

    def __enter__(self) -> "Profile":
        self._begin(self._run.start + 1)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def step(self, number: int) -> None:
        self._begin(number + 1)

    def pause(self, of: str) -> None:
        if self._name:
            self._pause_name.enter_context(self._name(of))

    def resume(self) -> None:
        self._pause_name.close()

    def _begin(self, number: int) -> None:
        """Starts or ends the trace where step `number` is the next."""
        # A call of the compiled step has several steps with DLRM's --steps-a-call. The next call
        # has as many as the last.
        steps_a_call = number - self._next
        self._next = number
        self._step_name.close()
        if self._name and number > self._last:
            self._stop()

        if self._waits_for_first and number + steps_a_call > self._first:
            self._waits_for_first = False
            if number > self._last:
                self._run.message(
                    f"--profile {self._first}:{self._last} traces nothing: "
                    f"the next step is {number}"
                )
                return
            self._first_traced = number
            self._start()
        if self._name:
            self._step_name.enter_context(self._name("train", step=number))

    def _start(self) -> None:
        profiler = _Xla() if self._run.mesh.compiles else _Eager()
        self._trace.enter_context(profiler.tracing(f"{self._run.folder.local}/profile"))
        self._trace.enter_context(hooks.spans_by(profiler.name))
        self._name = profiler.name

    def _stop(self) -> None:
        self._pause_name.close()
        self._step_name.close()
        if not self._name:
            return
        self._name = None
        last = max(self._first_traced, self._next - 1)
        steps = f"steps {self._first_traced} to {last}"
        try:
            self._trace.close()
            self._run.message(
                f"traced {steps} to {self._run.path}/profile; docs/profiling.md says how to read it"
            )
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            self._run.message(f"warning: the trace of {steps} could not be written: {error}")


class _Xla:
    """torch_xla's profiler: .xplane.pb for TensorBoard's plugin, .trace.json.gz for Perfetto."""

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.debug.profiler as xp

        self._xp = xp
        self._trace_me = torch_xla._XLAC.profiler.TraceMe

    @contextlib.contextmanager
    def tracing(self, folder: str) -> Iterator[None]:
        """Traces into <folder>/plugins/profile/<time>/, until the device has computed all steps
        that were started."""
        self._xp.start_trace(folder)
        try:
            yield
            device.wait_for_steps()
        finally:
            self._xp.stop_trace()

    def name(self, name: str, step: int | None = None) -> contextlib.AbstractContextManager:
        """Returns a context that names what this thread does in it. The plugin's overview groups by
        `step`."""
        # Not torch_xla's Trace and StepTrace: they name the operations of the graph, too, and end
        # with a sync.
        if step is None:
            return self._trace_me(name)
        return self._trace_me(name, step_num=step, _r=1)


class _Eager:
    """torch.profiler: .pt.trace.json for TensorBoard's plugin of torch and for Perfetto."""

    @contextlib.contextmanager
    def tracing(self, folder: str) -> Iterator[None]:
        write = torch.profiler.tensorboard_trace_handler(folder)
        with torch.profiler.profile(on_trace_ready=write):
            yield
            device.wait_for_steps()
        for torn in Path(folder).glob(f"*_{os.getpid()}.*.tmp"):  # only torch's log tells
            torn.unlink()
            raise OSError(f"{folder} has no room, or no access")

    def name(self, name: str, step: int | None = None) -> contextlib.AbstractContextManager:
        return torch.profiler.record_function(name if step is None else f"{name} {step}")
