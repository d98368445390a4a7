"""What TensorBoard (`make board`) shows of a run besides its curves: its settings as HParams, its
picture under IMAGES.

Both are in event files of their own in runs/<name>/tb: the settings in one before that of the
metrics, the picture in one after it, since TensorBoard does not return to an earlier file.
"""

import io
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from errors import InputError
from train.common.hooks import Watcher
from train.common.watch.curves import draw_curves, records


@dataclass(frozen=True)
class Flags:
    """None: it costs nothing."""


def watcher(flags: Flags) -> Callable[[Any], "Board"]:
    """Returns what makes the writer of a Run."""
    return Board


class Board(Watcher):
    """Writes the settings of a new run, and its picture when it has finished."""

    def __init__(self, run: Any):
        self._run = run
        self._folder = run.folder

    def __enter__(self) -> "Board":
        if self._run.mesh.main_process and not self._run.resumed:
            config = self._folder.config.items()
            settings = {
                key: value if isinstance(value, bool | int | float | str) else str(value)
                for key, value in config
            }
            with self._folder.writing("tb") as path, _writer(path) as writer:
                from torch.utils.tensorboard.summary import hparams

                for part in hparams(settings, {})[
                    1:
                ]:  # the first would name the metrics, which nobody knows yet
                    writer.file_writer.add_summary(part)
        return self

    def summary(self) -> dict[str, Any]:
        if self._run.mesh.main_process:
            try:
                with self._folder.writing("tb") as path, _writer(path) as writer:
                    picture = PIL.Image.open(
                        io.BytesIO(draw_curves(records(self._run), self._run.name))
                    ).convert("RGB")
                    writer.add_image(
                        "curves", np.asarray(picture), self._run.total_steps, dataformats="HWC"
                    )
            except (InputError, ValueError) as error:  # as in curves.py
                self._run.message("warning: " + str(error).partition(";")[0])
        return {}


def _writer(path: str) -> Any:
    # Without tensorflow, as in train/common/metrics.py.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(path)
