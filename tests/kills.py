"""A process that is killed at any moment of its writing, as far as its files can tell: from then on
nothing below a folder is opened, renamed or removed any more.

    with kills.before(17, folder) as moments:     # the 17th write below the folder does not come
        with pytest.raises(kills.Killed): …
    with kills.before(None, folder) as moments: … # nothing is killed; moments.seen counts them
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from train.common.metrics import Metrics

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """What ends the training in place of SIGKILL; no code handles it."""


@dataclass
class Moments:
    """The writes below a folder, counted.

    Attributes:
        last: the number of the write that does not come; None: all come.
        seen: how many came.
    """

    folder: str
    last: int | None
    seen: int = 0

    def come(self) -> None:
        """Counts a write; raises Killed if the process is dead."""
        self.seen += 1
        if self.last is not None and self.seen >= self.last:
            raise Killed

    def watches(self, path: object) -> bool:
        """Returns whether a write to a path counts: it is below the folder, and neither the lock
        nor TensorBoard's, which decide nothing."""
        if not isinstance(path, str) or not path.startswith(self.folder):
            return False
        return "/tb" not in path and not path.endswith(".lock")


_watching: list[Moments] = []


def _audit(event: str, arguments: tuple) -> None:
    """Gets every opening, renaming and so on from Python; it cannot be taken back."""
    if not _watching or event not in EVENTS:
        return
    if event == "open" and not arguments[2] & WRITING_FLAGS:
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    for moments in _watching:
        if moments.watches(path):
            moments.come()


sys.addaudithook(_audit)


@contextlib.contextmanager
def before(number: int | None, folder: str) -> Iterator[Moments]:
    """Kills this process, as far as the folder can tell, before one of its writes there."""
    moments = Moments(str(folder), number)
    write = Metrics.write

    def counted(*arguments) -> None:
        moments.come()  # to a file that is open, so the audit hook does not see it
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "write", counted)
        _watching.append(moments)
        try:
            yield moments
        finally:
            _watching.remove(moments)
