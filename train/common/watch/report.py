"""--report: prints what a program reads of a run, `report {…}`, a line of JSON on stdout for each
event.

    start    the run's folder and its files, the first step, devices, versions, commit
    line     a line of metrics.jsonl, with every digit:
             {"step": 120, "values": {"loss": …}, "timing": {…}}
    end      summary.json of a finished run, the memory that it took, its files and their bytes

of predictions (train/predict.py), on stderr

    start    devices
    end      how many inputs, the seconds that those after the first batch took, what was compiled

`make accept` reads them (tpu/accept). A run on a TPU has its folder elsewhere; its stdout is what
reaches every client.

--kill-at 120: sends SIGKILL to the process of the last host after step 120, when its checkpoints so
far are written. It tries a resume where nobody can reach the process.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errors import InputError
from train.common import hooks
from train.common.hooks import Watcher

MARK = "report "  # what each line begins with
LOOK_EVERY = 1.0  # seconds between two looks at the memory of the chips
MEMORY = "hbm_capacity_usage"  # of libtpu's monitoring: bytes in use, a string per chip of a host


@dataclass(frozen=True)
class Flags:
    """What `make accept` asks for."""

    report: bool = False  # prints start, metrics and result as lines of JSON, too
    kill_at: int = 0  # kills the last host's process after this step, to try a resume; 0: none


def watcher(flags: Flags) -> Callable[[Any], "Report"] | None:
    """Returns what makes the reporter of a Run, None where nothing is asked.

    Raises InputError for a negative step.
    """
    if flags.kill_at < 0:
        raise InputError(f"--kill-at is {flags.kill_at}; it must be a step, or 0 for none")
    if not flags.report and not flags.kill_at:
        return None
    return lambda run: Report(run, flags)


def listener(flags: Flags) -> hooks.Listener | None:
    """Returns what reports an event without a Run, None where nothing is asked."""
    return print_event if flags.report else None


def print_event(event: str, facts: dict[str, Any]) -> None:
    """Prints the report of an event."""
    print(line_of(event, facts), flush=True)


def line_of(event: str, facts: dict[str, Any]) -> str:
    """Returns the report of an event."""
    return MARK + json.dumps({"event": event, **facts}, default=str)


class Report(Watcher):
    """The reporter of one run."""

    def __init__(self, run: Any, flags: Flags):
        self._run = run
        self._flags = flags
        self._chips = ChipMemory(run.mesh.kind) if flags.report else None

    def __enter__(self) -> "Report":
        if self._flags.report:
            self._chips.start()
            self._say(
                "start",
                path=self._run.path,
                pid=os.getpid(),
                step=self._run.start,
                total_steps=self._run.total_steps,
                kind=self._run.mesh.kind,
                devices=self._run.mesh.num_devices,
                hosts=self._run.mesh.process_count,
                started=self._started(),
                files=self._files(),
            )
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._flags.report:
            return
        self._chips.stop()
        if self._run.finished:
            host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._say(
                "end",
                summary=self._run.summary,
                chip_bytes=self._chips.most,
                chip_bytes_unknown=self._chips.why,
                host_bytes=host_bytes,
                files=self._files(),
            )

    def step(self, number: int) -> None:
        # Several steps of one program (--steps-a-call) are notified once, with the last number.
        if 0 < self._flags.kill_at <= number and self._run.start < self._flags.kill_at:
            mesh = self._run.mesh
            if mesh.process_index == mesh.process_count - 1:
                self._run.checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        if self._flags.report:
            self._say("line", step=step, values=values, timing=timing)

    def _say(self, event: str, **facts: Any) -> None:
        self._run.message(line_of(event, facts))

    def _started(self) -> dict[str, Any]:
        """Returns what config.json has of this start: versions, commit, command, time."""
        if not self._run.mesh.main_process:
            return {}
        config = json.loads(self._run.folder.read("config.json"))
        return config["starts"][-1]

    def _files(self) -> dict[str, int]:
        """Returns the files of the run's folder, by their names below it, with their bytes."""
        if not self._run.mesh.main_process:
            return {}
        fs = self._run.folder.fs
        with contextlib.suppress(AttributeError):
            fs.invalidate_cache()
        root = fs._strip_protocol(self._run.path).rstrip("/") + "/"
        found = fs.find(root, detail=True)
        return {name.removeprefix(root): entry["size"] for name, entry in sorted(found.items())}


class ChipMemory:
    """The most memory in use on any chip of this host, as libtpu's monitoring tells it.

    torch_xla 2.9 does not tell: its get_memory_info refuses the virtual device of SPMD.

    Attributes:
        most: bytes; None where nobody tells.
        why: why nobody does.
    """

    def __init__(self, kind: str):
        self.most: int | None = None
        self.why = "" if kind.startswith("TPU") else f"no chip: {kind}"
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if not self.why:
            self._thread = threading.Thread(target=self._watch, name="chip memory", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(LOOK_EVERY)

    def _watch(self) -> None:
        try:
            monitoring = importlib.import_module("libtpu.sdk").tpumonitoring
            while not self._over.wait(LOOK_EVERY):
                used = [int(float(chip)) for chip in monitoring.get_metric(MEMORY).data()]
                self.most = max([*used, self.most or 0]) or None
        except Exception as error:  # a run does not end for it
            self.why = f"{type(error).__name__}: {error}"
