"""Goodput, and --price: where the wall time of all starts of a run went, in
runs/<name>/goodput.json and summary.json.

    steps         train steps that the result is made of: their share is the goodput
    input_wait    the training loop waited for a batch
    start         from the start of the process to the loop: imports, data, model, checkpoint
    compile       calls of compiled steps that compiled
    evaluation, checkpoints    pauses of the training
    end           after the last step: the last evaluation, export
    lost          training that a later start repeated, since it was after the checkpoint

MFU is model flops a second over the peak (Chowdhery et al. 2022, PaLM, section 4.1), in the
training of the last start without what was compiled in it.

Of a start that was killed, what came after the last note is missing, at most a minute. The time
between two starts counts apart: whether the chips were paid for then, only their owner knows.
"""

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InputError
from train.common import device
from train.common.hooks import Watcher
from train.common.mesh import Mesh
from train.common.run_folder import to_json
from train.common.watch import _flops

NOTE_EVERY = 60.0  # seconds between two writings of goodput.json, besides those after pauses
FILE = "goodput.json"
PARTS = ("steps", "input_wait", "start", "compile", "evaluation", "checkpoints", "end", "lost")


@dataclass(frozen=True)
class Flags:
    """What a chip costs."""

    price: float = 0.0  # of a chip-hour, in any currency: adds the cost to summary.json; 0: unknown


def watcher(flags: Flags) -> Callable[[Any], "Goodput"]:
    """Returns what makes the clock of a Run.

    Raises InputError where the price is negative, infinite or NaN.
    """
    if not 0 <= flags.price < float("inf"):
        raise InputError(
            f"--price is {flags.price}; it must be at least 0, the price of a chip for an hour"
        )
    return lambda run: Goodput(run, flags.price)


class Goodput(Watcher):
    """The clock of one start of a run, and what earlier starts noted.

    Args:
        price: of a chip-hour; 0 if unknown.
    """

    counted = -math.inf  # until when the runs before this one in the process have counted its time

    def __init__(self, run: Any, price: float):
        self._run = run
        self._price = price
        self._chips = _chips(run.mesh)
        self._starts = _earlier(run) if run.mesh.main_process else []
        self._step = run.start

        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._phase = "start"  # the part that the time since `_read_at` belongs to
        self._read_at = max(_process_started(), Goodput.counted)
        self._waited = 0.0  # seconds for batches, since `_read_at`
        self._compiled = _compile_seconds()  # of the process, at `_read_at`
        self._begun = time.time() - (time.monotonic() - self._read_at)
        self._noted_at = time.monotonic()
        self._flops = _flops.Flops(run.mesh)

    def __enter__(self) -> "Goodput":
        self._enter("steps")
        return self

    def __exit__(self, *_: Any) -> None:
        Goodput.counted = time.monotonic()
        self._note()

    def step(self, number: int) -> None:
        self._step = number
        if number >= self._run.total_steps:
            self._enter("end")
        elif time.monotonic() - self._noted_at > NOTE_EVERY:
            self._note()

    def pause(self, of: str) -> None:
        self._enter(of)

    def resume(self) -> None:
        self._enter("end" if self._step >= self._run.total_steps else "steps")
        self._note()

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def traced(self, graph: bytes, module: Callable[[], bytes]) -> None:
        self._flops.traced(graph, module)

    def started(self, graph: bytes) -> None:
        if self._phase == "steps":
            self._flops.started(graph)

    def summary(self) -> dict[str, Any]:
        """Returns {"goodput": share of steps (0 to 1) in the time of all starts, seconds of each
        part, starts, seconds between starts, this start's chips, chip-hours of all, cost; of this
        start's training model flops a second, of all devices, and on TPUs MFU: their share of the
        peak in bfloat16}, and prints it."""
        self._note()  # for a remote run the last time
        starts = [*self._starts, self._record()]
        seconds, between = _sums(starts)
        total = sum(seconds.values())
        found = {
            "share": seconds["steps"] / total,
            "seconds": seconds,
            "starts": len(starts),
            "between_starts": between,
        }
        chip_seconds = 0.0
        for start in starts:
            chip_seconds += start["chips"] * sum(start["seconds"].values())
        found |= {"chips": self._chips, "chip_hours": chip_seconds / 3600}

        shares = []
        for name, part in sorted(seconds.items(), key=lambda part: -part[1]):
            if part:
                shares.append(f"{name.replace('_', ' ')} {100 * part / total:.0f} %")
        message = f"goodput {100 * found['share']:.0f} %"
        message += f" (what the train steps had of {total:.0f} s in {len(starts)} start(s))"
        message += f": {', '.join(shares)}"
        if self._price:
            found["cost"] = found["chip_hours"] * self._price
            message += (
                f"; {found['chip_hours']:.2f} chip-hours at {self._price:g}: {found['cost']:.2f}"
            )

        done = self._flops.done
        spent = self._seconds["steps"] + self._seconds["input_wait"]
        if done and spent:
            rate = done / spent
            peak = _flops.peak(self._run.mesh)
            found |= {"model_flops_per_second": rate, "mfu": peak and rate / peak}
            message += f"; {rate / 1e12:.3g} TFLOP/s"
            if peak:
                message += f", MFU {100 * rate / peak:.1f} %"
        self._run.message(message)
        return {"goodput": found}

    def _enter(self, phase: str) -> None:
        """Counts the time since the last call to the phase that ends; what was compiled or waited
        for in it counts apart."""
        now = time.monotonic()
        compiled = _compile_seconds()
        spent = now - self._read_at
        compiling = max(0.0, compiled - self._compiled)
        waited = 0.0
        if self._phase == "steps":
            waited = min(self._waited, spent - compiling)

        self._seconds[self._phase] += spent - compiling - waited
        self._seconds["compile"] += compiling
        self._seconds["input_wait"] += waited

        self._phase = phase
        self._read_at = now
        self._compiled = compiled
        self._waited = 0.0

    def _record(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "noted": time.time(),
            "from": self._run.start,
            "to": self._step,
            "chips": self._chips,  # a later start may have others
            "seconds": {name: round(seconds, 3) for name, seconds in self._seconds.items()},
        }

    def _note(self) -> None:
        self._enter(self._phase)
        self._noted_at = time.monotonic()
        # `summary` was the last time for a remote run: what was uploaded is removed here.
        is_gone = self._run.folder.remote and self._run.finished
        if self._run.mesh.main_process and not is_gone:
            try:
                self._run.folder.write(FILE, to_json([*self._starts, self._record()], indent=2))
            except InputError as error:
                # A run is not lost for its clock: what it needs is refused elsewhere.
                self._run.message("warning: " + str(error).partition(";")[0])


def _earlier(run: Any) -> list[dict[str, Any]]:
    """Returns what earlier starts of a run noted, their training after its checkpoint as lost."""
    content = run.folder.read(FILE) if run.resumed else None
    try:
        starts = json.loads(content or b"[]")
        for start in starts:
            start["chips"] = float(start.get("chips", _chips(run.mesh)))  # older notes have none
            done = start["to"] - start["from"]  # steps
            useful = min(start["to"], run.start) - start["from"]
            if useful < done:
                seconds = start["seconds"]
                share = 1 - max(0, useful) / done
                for part in ("steps", "input_wait"):
                    seconds["lost"] += share * seconds[part]
                    seconds[part] *= 1 - share
                start["to"] = max(start["from"], run.start)
        _sums(starts)
    except (ValueError, KeyError, TypeError, AttributeError):
        run.message(f"warning: {run.path}/{FILE} is damaged: the goodput counts from this start on")
        return []
    return starts


def _chips(mesh: Mesh) -> float:
    """A device is a chip from v4 on, and one of two cores of a chip before."""
    return mesh.num_devices / (2 if mesh.kind.startswith(("TPU v2", "TPU v3")) else 1)


def _compile_seconds() -> float:
    return device.graph_report().get("compile_seconds", 0.0)


def _sums(starts: list[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """Returns the seconds of each part, and those between the last note of each start and the
    beginning of the next."""
    between = 0.0
    for before, after in itertools.pairwise(starts):
        between += max(0.0, after["begun"] - before["noted"])
    seconds = {}
    for name in PARTS:
        seconds[name] = round(sum(start["seconds"][name] for start in starts), 3)
    return seconds, between


def _process_started() -> float:
    """Returns when this process began, by the clock of time.monotonic; now, where the system does
    not say."""
    with contextlib.suppress(OSError, AttributeError):
        # proc(5): the fields after the name in parentheses begin with the 3rd; starttime is the
        # 22nd.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        return time.monotonic() - age
    return time.monotonic()
