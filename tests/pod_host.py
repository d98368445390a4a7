"""A host of a pod for tests: a process that runs a script's own `main` and meets the other hosts.

What a host does for itself is real: its module state, its random numbers, its signals, its files.
What needs devices of several hosts is replaced in the backend of XLA. A compiled step waits for all
hosts, as the collectives in it would, and gives a simple function of the whole batch; an upload to
all devices waits likewise. The hosts meet in a collective of gloo's, which fails where a host has
ended, waits at another point, or does not come.

Where a Job has no such function, as DLRM's, nothing of that is replaced: the hosts are processes of
plain PyTorch with one device each, whose steps and collectives are real.
"""

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs

from train.common import device, eager, loading, processes
from train.common import run as tracking
from train.common.embedding import storage
from train.common.mesh import Mesh
from train.common.xla import backend as xla

DEVICES = 8  # of all hosts together, however many hosts there are; in plain PyTorch one of each
TRAINING = ("train_step", "gradient_step")  # steps that take a batch of the training loader
SECONDS = 60  # that a host waits for another one
LIMIT = 300  # seconds after which the system ends a host by SIGALRM
ENDED = 2**62  # meetings of a host that comes to none any more
# Of torch.distributed, in which hosts of plain PyTorch meet.
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single")

WRITING_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Deadlock(Exception):
    """Hosts that would wait for each other forever."""


class Batch(dict):
    """What the loader gives, so that a step's batch is told from its other arguments."""


@dataclass(frozen=True)
class Meeting:
    """A point at which a host waits for the others."""

    name: str  # of a compiled step, or "upload", "seed", …
    detail: tuple  # must be the same on all hosts, as the shapes of a batch


@dataclass(frozen=True)
class StepCall:
    """A call of a compiled step by all hosts."""

    name: str
    batch: dict[str, np.ndarray]  # the whole batch, in the order of the hosts


@dataclass(frozen=True)
class Write:
    """Something that a host has written below a pod's folder."""

    host: int
    event: str  # Python's name of it, such as "open" or "os.rename"
    path: str  # relative to the folder


@dataclass(frozen=True)
class Job:
    """What the hosts of a pod are to do.

    Attributes:
        work: called with each Host; a function of a module, or a `partial` of one.
        folder: in which writes are watched.
        results: (name of a step, whole batch) -> what the step gives; None: real steps.
        devices: of all hosts, where steps are not real.
        stop_after: host -> training batches after which it gets SIGTERM.
        agree_every: calls in which hosts agree about a signal, if one gets it; None: as many as the
            script says.
        seconds: that a host waits for another one.
    """

    hosts: int
    work: Callable
    folder: str
    results: Callable | None
    devices: int = DEVICES
    stop_after: dict[int, int] = field(default_factory=dict)
    agree_every: int | None = 1
    seconds: float = SECONDS


@dataclass
class Report:
    """What a host has done.

    Attributes:
        outcome: what its work returned or raised.
        steps: the calls of compiled steps that took a batch; of the main host only.
        meetings: the points at which it waited for the others, in order.
        trained: the training batches that it took.
        written: what it has written below the pod's folder.
        notes: what else a test wants to know.
    """

    outcome: Any = None
    steps: list[StepCall] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    trained: int = 0
    written: list[Write] = field(default_factory=list)
    notes: list = field(default_factory=list)


class Host:
    """This process as a host.

    Args:
        index: of the host.
        arrivals: of each host, to how many meetings it has come; all hosts share its memory.

    Attributes:
        patch: for further changes, which last as long as the process.
    """

    def __init__(self, index: int, job: Job, arrivals: np.ndarray):
        self.index = index
        self.job = job
        self.patch = pytest.MonkeyPatch()
        self.report = Report()
        self._arrivals = arrivals
        self._closures: list[Callable] = []  # for after the next step
        self._watches = True

    def join(self) -> None:
        """Meets the other hosts for the first time, and makes the changes of a pod."""
        self.patch.setattr(processes, "TIMEOUT", timedelta(seconds=self.job.seconds))
        if self.job.hosts > 1:
            processes.join("cpu")

        fast_clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
        self.patch.setattr(tracking, "SEEN_SECONDS", 1)
        self.patch.setattr(tracking, "time", fast_clock)
        self.patch.setattr(storage, "HOSTS_SECONDS", self.job.seconds)
        self.patch.setattr(storage, "time", fast_clock)
        if self.job.stop_after and self.job.agree_every is not None:
            stop_requested = partial(device.stop_requested, every=self.job.agree_every)
            self.patch.setattr(device, "stop_requested", lambda mesh, *_: stop_requested(mesh))
        if self.job.results is None:
            self._record_collectives()
            upload = loading.Loader._upload
            self.patch.setattr(loading.Loader, "_upload", lambda *given: Batch(upload(*given)))
            self._watch_steps(eager)
        else:
            self._replace_devices()

    # ---- meetings --------------------------------------------------------------------------------
    def meet(self, meeting: Meeting, value: Any = None) -> list:
        """Waits until all hosts are at this meeting.

        Returns the values that they have brought, in the order of the hosts.
        """
        self.report.meetings.append(meeting)
        self._arrivals[self.index] += 1
        if self.job.hosts == 1:
            return [value]

        met = [None] * self.job.hosts
        try:
            dist.all_gather_object(met, (meeting, value))
        except RuntimeError as error:
            raise Deadlock(
                f"host {self.index} waits at {meeting} for another one, which has ended or has not "
                f"come in {self.job.seconds} s ({str(error).splitlines()[0]})"
            ) from error
        meetings = [other for other, _ in met]
        if len(set(meetings)) > 1:
            raise Deadlock(f"the hosts wait at different points: {meetings}")
        return [brought for _, brought in met]

    def pass_by(self, meeting: Meeting) -> None:
        """Records a meeting that all hosts must come to, without waiting for them."""
        self.report.meetings.append(meeting)

    def wait_for_others(self) -> None:
        """Lets the caller be late: returns when another host waits for this one, or has ended."""
        deadline = time.monotonic() + self.job.seconds
        while self._arrivals.max() <= self._arrivals[self.index]:
            assert time.monotonic() < deadline, "no other host waits for this one"
            time.sleep(0.01)

    def _record_collectives(self) -> None:
        """Makes each collective of plain PyTorch one of the report's meetings."""

        def recorded(name: str, collective: Callable) -> Callable:
            def call(*arguments, **options):
                shapes = [tuple(each.shape) for each in arguments if torch.is_tensor(each)]
                self.report.meetings.append(Meeting(name, tuple(shapes)))
                self._arrivals[self.index] += 1
                return collective(*arguments, **options)

            return call

        for name in COLLECTIVES:
            self.patch.setattr(dist, name, recorded(name, getattr(dist, name)))

    # ---- steps -----------------------------------------------------------------------------------
    def _watch_steps(self, backend) -> None:
        """Makes every step of a backend wait for all hosts, and records it."""
        real = backend.compiled

        def compiled(step_fn: Callable, *options) -> Callable:
            name = step_fn.__name__
            step = real(step_fn, *options)

            def call(*arguments):
                self._run_closures()
                whole = self._gather(name, arguments)
                if self.index == 0 and whole:
                    self.report.steps.append(StepCall(name, whole))
                if name in TRAINING:
                    self._count_batch()
                if self.job.results is None:
                    return step(*arguments)
                tensors = {key: torch.from_numpy(value) for key, value in whole.items()}
                return self.job.results(name, tensors)

            return call

        self.patch.setattr(backend, "compiled", compiled)

    def _gather(self, name: str, arguments: Sequence) -> dict[str, np.ndarray]:
        """Waits for the other hosts in a step; returns the whole batch, {} if it takes none."""
        batches = [argument for argument in arguments if isinstance(argument, Batch)]
        batch = {}
        for key, value in (batches[0] if batches else {}).items():
            batch[key] = value.numpy()
        fields = [(key, value.shape, str(value.dtype)) for key, value in batch.items()]

        pieces = self.meet(Meeting(name, tuple(fields)), batch)
        return {key: np.concatenate([piece[key] for piece in pieces]) for key in batch}

    def _count_batch(self) -> None:
        """Counts a training batch, and sends this process SIGTERM if that was the last."""
        self.report.trained += 1
        if self.report.trained == self.job.stop_after.get(self.index):
            signal.raise_signal(signal.SIGTERM)

    # ---- what stands for the devices -------------------------------------------------------------
    def mesh(self, precision: str = "float32", strict: bool = True, *_) -> Mesh:
        """Returns the mesh of all devices as this host sees it."""
        count = self.job.devices
        return Mesh(
            device=torch.device("cpu"),
            spmd=xs.Mesh(np.arange(count), (count,), ("data",)),
            num_devices=count,
            process_index=self.index,
            process_count=self.job.hosts,
            kind="CPU",
            precision=precision,
            strict=strict,
        )

    def _replace_devices(self) -> None:
        """Replaces what XLA's backend does on devices."""
        stand_ins = {
            "setup": self.mesh,
            "compiled": lambda step_fn, *_: step_fn,
            "upload": self._upload,
            "fetch": lambda values: [float(value) for value in values],
            "after_next_step": self._closures.append,
            "run_pending": self._run_closures,
            "set_seed": lambda seed: self.pass_by(Meeting("seed", (seed,))),
            "annotate": lambda *_: None,
            "wait_for_steps": lambda: None,
        }
        for name, stand_in in stand_ins.items():
            self.patch.setattr(xla, name, stand_in)
        # A mesh has all devices that there are.
        self.patch.setattr(xla.xr, "global_runtime_device_count", lambda: self.job.devices)
        self.patch.setattr(loading.Loader, "_upload", lambda loader, batch: Batch(batch))
        device.choose_backend("xla")
        self._watch_steps(xla)

    def _upload(self, local: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        pieces = self.meet(Meeting("upload", tuple(local.shape)), local.numpy())
        return torch.from_numpy(np.concatenate(pieces))

    def _run_closures(self) -> None:
        waiting = [*self._closures]
        self._closures.clear()
        for closure in waiting:
            closure()

    # ---- who writes ------------------------------------------------------------------------------
    def watch_writes(self) -> None:
        """Records what this process writes below the folder from now on."""
        sys.addaudithook(self._audit)  # which cannot be removed

    def _audit(self, event: str, arguments: tuple) -> None:
        """Is told by Python of every open, rename and so on."""
        if not self._watches or event not in WRITING_EVENTS:
            return
        if event == "open" and not arguments[2] & WRITING_FLAGS:
            return
        path = arguments[1] if event == "os.rename" else arguments[0]
        if isinstance(path, str) and path.startswith(self.job.folder):
            relative = os.path.relpath(path, self.job.folder)
            self.report.written.append(Write(self.index, event, relative))

    def end(self) -> None:
        """Watches no more writes, and tells the other hosts that this one comes no more."""
        self._watches = False
        self._arrivals[self.index] = ENDED


def be_host(index: int, job: Job, arrivals: np.ndarray, place: str) -> None:
    """Does a job as one of its hosts.

    Args:
        place: of the files with the report and with what is printed, without .pickle and .txt.
    """
    signal.alarm(LIMIT)
    printed = os.open(f"{place}{index}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    host = Host(index, job, arrivals)
    try:
        host.join()
        host.watch_writes()
        host.report.outcome = job.work(host)
    except BaseException as error:
        traceback.print_exc()
        host.report.outcome = error
    finally:
        host.end()
        with open(f"{place}{index}.pickle", "wb") as file:
            pickle.dump(host.report, file)
