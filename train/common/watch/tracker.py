"""--tracker wandb: sends a run to Weights & Biases, too, by its own library
(requirements-wandb.txt).

What it gets: the settings, the numbers of metrics.jsonl, summary.json and the picture of curves.py;
from the main process only. A resumed run continues the same one there, by the id in
runs/<name>/wandb.json. Entity, project and mode are that library's environment variables:
docs/tracking.md.

A thread sends. The training waits for it at the end alone, and not long; an error there is a
warning.
"""

import contextlib
import io
import json
import os
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optional
from errors import InputError
from train.common.hooks import Watcher
from train.common.run_folder import to_json

FILE = "wandb.json"
BEGIN = 30.0  # seconds for the first answer of the server
LAST = 15.0  # seconds for what is left to send at the end: a VM that is taken back may have 30


@dataclass(frozen=True)
class Flags:
    """Where a run is shown besides its folder."""

    tracker: Literal["none", "wandb"] = "none"  # also sends the run there, see docs/tracking.md


def watcher(flags: Flags) -> Callable[[Any], Watcher] | None:
    """Returns what makes the sender of a Run. Raises InputError where wandb is not installed."""
    if flags.tracker == "none":
        return None
    optional.load("wandb")
    return lambda run: Tracker(run) if run.mesh.main_process else Watcher()


class Tracker(Watcher):
    """The sender of one run.

    Raises:
        InputError: wandb is to be online, and has no key.
    """

    def __init__(self, run: Any):
        self._run = run
        self._folder = run.folder
        # Functions that are called with wandb's run; None ends the thread.
        self._events: queue.SimpleQueue[Callable[[Any], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="tracker", daemon=True)
        self._given_up = False

    def __enter__(self) -> "Tracker":
        _check_login()
        self._id = self._known_id() or uuid.uuid4().hex[:12]
        try:
            self._folder.write(FILE, to_json({"id": self._id}))
            self._run.upload()  # so that a run that is killed before its first checkpoint keeps it
        except InputError as error:
            self._warn(f"{str(error).partition(';')[0]}; a resumed run will be another one there")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._run.finished:
            self._events.put(lambda tracked: tracked.summary.update(self._run.summary))
        self._events.put(lambda tracked: tracked.finish(exit_code=int(kind is not None)))
        self._events.put(None)
        self._thread.join(LAST + 5)
        if self._thread.is_alive():
            self._given_up = True
            self._warn(f"it has not ended within {LAST + 5:.0f} s")

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        numbers = {"step": step, **values}
        for key, value in timing.items():
            numbers[f"timing/{key}"] = value
        self._events.put(lambda tracked: tracked.log(numbers))

    def summary(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):  # a copy without curves.py
            with open(f"{self._folder.local}/curves.png", "rb") as file:
                content = file.read()  # a remote run's folder here goes before it is sent
            self._events.put(lambda tracked: tracked.log({"curves": _image(content)}))
        return {}

    def _known_id(self) -> str | None:
        """Returns the id that an earlier start of the run has noted."""
        content = self._folder.read(FILE) if self._run.resumed else None
        try:
            return None if content is None else str(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError):
            self._warn(
                f"{self._run.path}/{FILE} is damaged, so this start is a run of its own there"
            )
            return None

    def _send(self) -> None:
        """Does what the training asks for, until it asks for the end."""
        import wandb

        mesh = self._run.mesh
        devices = {
            "devices": mesh.num_devices,
            "device_kind": mesh.kind,
            "hosts": mesh.process_count,
        }
        folder = os.environ.get("WANDB_DIR")
        if not folder and not self._folder.remote:
            folder = self._folder.local
        try:
            tracked = wandb.init(
                id=self._id,
                resume="allow",
                name=self._run.name,
                config=self._folder.config | devices,
                allow_val_change=True,  # a resumed run may have other devices
                reinit="create_new",  # a process may train two models, a teacher and its student
                dir=folder or None,
                settings=wandb.Settings(console="off", init_timeout=BEGIN, finish_timeout=LAST),
            )
            # The step is a column like others: what a resumed run repeats comes a second time, in
            # the same place.
            tracked.define_metric("*", step_metric="step")
            for send in iter(self._events.get, None):
                send(tracked)
        except Exception as error:  # its own, and those of what it is made of
            if not self._given_up:
                self._warn(str(error) or repr(error))

    def _warn(self, reason: str) -> None:
        self._run.message(
            f"warning: --tracker wandb: {' '.join(reason.split())}; the run's folder has all"
        )


def _check_login() -> None:
    """Asks for a key where wandb knows none; raises InputError where there is no terminal."""
    import wandb

    if wandb.setup().settings.mode != "online" or wandb.api.api_key:
        return
    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        raise InputError(
            f"--tracker wandb cannot log in ({' '.join(str(error).split())}); "
            "`wandb login`, export WANDB_API_KEY, or set WANDB_MODE=offline"
        ) from error


def _image(content: bytes) -> Any:
    import PIL.Image
    import wandb

    return wandb.Image(PIL.Image.open(io.BytesIO(content)))
