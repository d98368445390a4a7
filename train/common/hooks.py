"""The hooks of a training: Run, Loader and the compiled step notify watchers of what happens.

    Run             step, pause, resume, line, summary
    Loader          waited; spans WAIT and UPLOAD
    compiled step   traced, started; span START. A watcher may ask `device.compiling_since`
    predictions     `tell`: they have no Run, and listeners are told of them

A watcher overrides the hooks of `Watcher` that it needs. train/common/watch has the project's
watchers, and the order in which they are notified. A copy of a script may come without them, and
then nobody is notified.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Spans: what the host's threads do, by the names that a profile shows.
WAIT = "wait for a batch"  # the loop, in Loader.take
UPLOAD = "upload"  # the loader's thread
START = "start the program"  # the loop, in the call of a compiled step


class Watcher(contextlib.AbstractContextManager):
    """Watches one run; entered before its first step, and left when the training ends, whatever
    ends it.

    Each hook does nothing. All are called in the thread of the training loop.
    """

    def __exit__(self, *_: Any) -> None:
        """Does nothing; see AbstractContextManager."""

    def step(self, number: int) -> None:
        """Follows each call of the train step; a checkpoint of it comes after."""

    def pause(self, of: str) -> None:
        """Comes where the training pauses for its "evaluation" or "checkpoints"."""

    def resume(self) -> None:
        """Comes where that pause ends."""

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        """Follows each line of metrics.jsonl, which consists of the two dicts."""

    def summary(self) -> dict[str, Any]:
        """Returns what it adds to summary.json of a finished run; `run.summary` has the rest."""
        return {}

    def waited(self, seconds: float) -> None:
        """Follows each batch that the loop takes from a loader, also from an evaluation's; the loop
        waited so many seconds for it."""

    def traced(self, graph: bytes, module: Callable[[], bytes]) -> None:
        """Follows a trace of a compiled step, before its program is compiled.

        Args:
            graph: names the program.
            module: returns its serialized HloModuleProto, while this call lasts.
        """

    def started(self, graph: bytes) -> None:
        """Comes where a traced program starts."""


# Each makes one watcher of a Run. They are in the order in which the watchers are notified.
makers: Sequence[Callable[[Any], Watcher]] = ()
# The same as `Run.watchers` of the run that trains now. Loaders and compiled steps, which do not
# know the run, notify these.
watchers: Sequence[Watcher] = ()

# Called with an event's name and facts, see `tell`.
Listener = Callable[[str, dict[str, Any]], None]
listeners: Sequence[Listener] = ()

_NOTHING = contextlib.nullcontext()
_make_span: Callable[[str], contextlib.AbstractContextManager] | None = None


@contextlib.contextmanager
def watching(run: Any) -> Iterator[Sequence[Watcher]]:
    """Yields the watchers of a Run. It makes and enters them in the order of `makers`, and leaves
    them in the opposite order."""
    global watchers
    with contextlib.ExitStack() as stack:
        entered = []
        for make in makers:
            entered.append(stack.enter_context(make(run)))

        before = watchers
        watchers = entered
        try:
            yield entered
        finally:
            watchers = before


@contextlib.contextmanager
def made_by(
    chosen: Sequence[Callable[[Any], Watcher]], told: Sequence[Listener] = ()
) -> Iterator[None]:
    """Inside, every Run that trains is watched by what these make, and `told` are the listeners."""
    global makers, listeners
    before = makers, listeners
    makers = chosen
    listeners = told
    try:
        yield
    finally:
        makers, listeners = before


def tell(event: str, **facts: Any) -> None:
    """Tells the listeners of an event that belongs to no Run."""
    for listen in listeners:
        listen(event, facts)


def span(name: str) -> contextlib.AbstractContextManager:
    """Returns a context that names what this thread does, for a profile. It does nothing where no
    profile is recorded."""
    if _make_span is None:
        return _NOTHING
    return _make_span(name)


@contextlib.contextmanager
def spans_by(make_span: Callable[[str], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Inside, `make_span` makes the context of each span, given its name."""
    global _make_span
    before = _make_span
    _make_span = make_span
    try:
        yield
    finally:
        _make_span = before
