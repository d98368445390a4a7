"""torch_xla's profiler: traces the host and the device into a folder that TensorBoard's profile plugin reads."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch_xla
import torch_xla.debug.profiler as xp

from train.common.xla import backend


@contextlib.contextmanager
def tracing(folder: str) -> Iterator[None]:
    """Writes what runs inside to <folder>/plugins/profile/<time>/: .xplane.pb for the plugin, .trace.json.gz for
    Perfetto. It ends when the device has computed what was started."""
    xp.start_trace(folder)
    try:
        yield
        backend.wait_for_steps()
    finally:
        xp.stop_trace()


def span(name: str, **facts: Any) -> contextlib.AbstractContextManager:
    """Returns a context that names what this thread does in it; `facts` of a step: step_num, and _r=1."""
    # Not torch_xla's Trace and StepTrace: they name the operations of the graph, too, and end with a sync.
    return torch_xla._XLAC.profiler.TraceMe(name, **facts)


SPANS = {"start the program": (backend.CompiledStep, "__call__")}  # methods whose calls are spans, by name
