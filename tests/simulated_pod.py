"""A simulated pod: each host is a thread of this process that runs a script's own `main`.

A host has its own place in the mesh, and what it does on the host is real. What needs devices of
several hosts is replaced: a compiled step waits for all hosts, as the collectives in it would, and
gives a simple function of the whole batch; an upload to all devices waits likewise. A host that
waits for one that has ended, or that waits at another point, fails instead of waiting forever.

DLRM's steps are real, too: its tables, exchanged all-to-all, lie on the four devices of this
process. Each host has its share of these, and saves and restores nothing else. What this does not
show is a collective between processes, which torch_xla 2.9's CPU backend does not have.
"""

import copy
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla.distributed.spmd as xs

from errors import InputError
from train import dlrm
from train.common import checkpoint, device, interrupt, loading, sharding
from train.common import run as tracking
from train.common.embedding import storage
from train.common.mesh import WHOLE
from train.common.xla import backend as xla

DEVICES = 8  # of all hosts together, however many hosts there are; 4 where steps are real
TRAINING = ("train_step", "gradient_step")  # steps that take a batch of the training loader

# What a pod replaces.
REAL_BUILD = dlrm.build
REAL_COMPILED = device.compiled
REAL_STOP_REQUESTED = device.stop_requested
REAL_UPLOAD = device.upload
REAL_START = threading.Thread.start
REAL_WAIT = checkpoint.Checkpointer.wait


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
    batch: Batch  # the whole batch, in the order of the hosts


@dataclass(frozen=True)
class Write:
    """Something that was written below a pod's folder."""

    host: int | None  # None: by a thread that belongs to no host
    event: str  # Python's name of it, such as "open" or "os.rename"
    path: str  # relative to the folder


def this_host() -> int | None:
    """Returns the host that the current thread belongs to."""
    return getattr(threading.current_thread(), "host", None)


# ---- who writes ----------------------------------------------------------------------------------
# Python reports every open, rename and so on to a hook. It cannot be removed, so it is told which
# pods run.

WRITING_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_running: list["Pod"] = []


def _audit(event: str, arguments: tuple) -> None:
    """Adds what is written below the folder of a running pod to its `written`."""
    if not _running or event not in WRITING_EVENTS:
        return
    if event == "open" and not arguments[2] & WRITING_FLAGS:
        return

    path = arguments[1] if event == "os.rename" else arguments[0]
    for pod in _running:
        if isinstance(path, str) and path.startswith(pod.folder):
            relative = os.path.relpath(path, pod.folder)
            pod.written.append(Write(this_host(), event, relative))


sys.addaudithook(_audit)


# ---- the pod -------------------------------------------------------------------------------------
class Pod:
    """Hosts as threads that take turns: one runs until it waits for the others.

    Args:
        folder: in which writes are watched.
        results: (name of a step, whole batch) -> what the step gives; None: real steps, on this
            process's devices.
        stop_after: host -> training batches after which it gets SIGTERM.
        agree_every: calls in which hosts agree about a signal; None: as many as the script says.

    Attributes:
        steps: every call of a compiled step that took a batch.
        written: everything that was written below `folder`.
        meetings: of each host, the points at which it waited for the others, in order.
        trained: of each host, the training batches that it took.
        outcomes: of each host, what its work returned or raised.
    """

    def __init__(
        self,
        hosts: int,
        folder,
        results: Callable | None,
        devices: int = DEVICES,
        stop_after: dict[int, int] | None = None,
        agree_every: int | None = 1,
    ):
        self.hosts = hosts
        self.folder = str(folder)
        self.results = results
        self.devices = devices
        self.stop_after = stop_after or {}
        self.agree_every = agree_every
        self.real_mesh = None
        if results is None:
            self.real_mesh = device.setup(0, "float32")
            self.devices = self.real_mesh.num_devices

        self.steps: list[StepCall] = []
        self.written: list[Write] = []
        self.meetings: list[list[Meeting]] = [[] for _ in range(hosts)]
        self.trained = [0] * hosts
        self.outcomes: list = [None] * hosts

        self.turn = threading.Condition(threading.Lock())  # held by the host that runs
        self.round = 0  # meetings of all hosts so far
        self.arrived: dict[int, tuple[Meeting, object]] = {}  # by the hosts that wait
        self.met: list[tuple[Meeting, object]] = []  # what all hosts brought to the last meeting
        self.ended: set[int] = set()
        self.handlers: list[dict] = [{} for _ in range(hosts)]  # of signals
        self.closures: list[list] = [[] for _ in range(hosts)]  # for after a host's next step
        self.state = None  # of real steps: the state of all hosts together
        self.computed = None  # what a real step gave
        self.computed_round = 0  # and in which round

    def mesh(self, host: int) -> device.Mesh:
        """Returns the mesh as a host sees it."""
        if self.real_mesh:
            return replace(self.real_mesh, process_index=host, process_count=self.hosts)

        with pytest.MonkeyPatch.context() as monkeypatch:  # a mesh has all devices that there are
            monkeypatch.setattr(xla.xr, "global_runtime_device_count", lambda: self.devices)
            spmd = xs.Mesh(np.arange(self.devices), (self.devices,), ("data",))
        return device.Mesh(
            device=torch.device("cpu"),
            spmd=spmd,
            num_devices=self.devices,
            process_index=host,
            process_count=self.hosts,
            kind="CPU",
            precision="float32",
            strict=True,
        )

    # ---- running ----
    def run(self, work: Callable, patch: Callable | None = None) -> "Pod":
        """Does `work` on every host; returns itself.

        `patch(monkeypatch)` makes further changes, for as long as the hosts run.
        """
        with pytest.MonkeyPatch.context() as monkeypatch:
            self._replace_devices(monkeypatch)
            if patch is not None:
                patch(monkeypatch)
            _running.append(self)
            try:
                self._run_hosts(work)
            finally:
                _running.remove(self)
                # Tables that live at the same time have other sizes, see bags.py.
                self.state = None
                self.computed = None
                gc.collect()
        return self

    def _run_hosts(self, work: Callable) -> None:
        threads = []
        for host in range(self.hosts):
            thread = threading.Thread(target=self._run_host, args=(host, work))
            thread.host = host
            threads.append(thread)

        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_host(self, host: int, work: Callable) -> None:
        with self.turn:
            try:
                self.outcomes[host] = work()
            except BaseException as error:
                self.outcomes[host] = error
            finally:
                self.ended.add(host)
                self.turn.notify_all()

    def meet(self, meeting: Meeting, value=None) -> list:
        """Waits until all hosts are at this meeting.

        Returns the values that they have brought, in the order of the hosts.
        """
        host = this_host()
        self.meetings[host].append(meeting)
        self.arrived[host] = (meeting, value)
        if len(self.arrived) == self.hosts:
            self.met = [self.arrived[number] for number in range(self.hosts)]
            self.arrived = {}
            self.round += 1
            self.turn.notify_all()
        else:
            self._wait_for_round(host, meeting)

        meetings = [met for met, _ in self.met]
        if len(set(meetings)) > 1:
            raise Deadlock(f"the hosts wait at different points: {meetings}")
        return [brought for _, brought in self.met]

    def _wait_for_round(self, host: int, meeting: Meeting) -> None:
        before = self.round
        self.turn.notify_all()
        while self.round == before:
            if self.ended:
                other = sorted(self.ended)[0]
                raise Deadlock(f"host {host} waits at {meeting} for host {other}, which has ended")
            self.turn.wait(60)

    def wait_for_others(self) -> None:
        """Lets the caller be late: returns when another host waits for the rest, or has ended."""
        self.turn.wait_for(lambda: self.arrived or self.ended, timeout=10)

    # ---- how it ended ----
    def succeeded(self) -> "Pod":
        """Returns itself; raises what a host raised: if several did, not the consequence."""
        errors = [outcome for outcome in self.outcomes if isinstance(outcome, BaseException)]
        errors.sort(key=lambda error: isinstance(error, Deadlock))
        if errors:
            raise errors[0]
        return self

    def refused(self, pattern: str) -> "Pod":
        """Returns itself; asserts that each host has ended in an InputError with the pattern."""
        for outcome in self.outcomes:
            assert isinstance(outcome, InputError), self.outcomes
            assert re.search(pattern, str(outcome)), self.outcomes
        return self

    def stopped(self) -> "Pod":
        """Returns itself; asserts that every host has ended with the exit code of SIGTERM."""
        codes = [getattr(outcome, "code", None) for outcome in self.outcomes]
        assert codes == [143] * self.hosts, self.outcomes
        return self

    # ---- what stands for the devices ----
    def _replace_devices(self, monkeypatch) -> None:
        def wait(checkpoints):
            # The others must continue, or their parts of a checkpoint never come.
            self.turn.release()
            try:
                REAL_WAIT(checkpoints)
            finally:
                self.turn.acquire()

        signals = SimpleNamespace(
            signal=self._handle_signal,
            SIGTERM=signal.SIGTERM,
            SIGINT=signal.SIGINT,
        )
        fast_clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))

        monkeypatch.setattr(device, "setup", self._setup)
        monkeypatch.setattr(device, "compiled", self._compiled)
        monkeypatch.setattr(device, "upload", self._upload)
        monkeypatch.setattr(device, "fetch", lambda values: [float(value) for value in values])
        monkeypatch.setattr(device, "after_next_step", self._after_next_step)
        monkeypatch.setattr(device, "run_pending", self._run_closures)
        monkeypatch.setattr(device, "seed_step", self._seed_step)
        monkeypatch.setattr(device, "stop_requested", self._stop_requested)
        if not self.real_mesh:
            monkeypatch.setattr(device, "annotate", lambda tensor, spmd, spec: None)
        monkeypatch.setattr(dlrm, "build", self._build)
        monkeypatch.setattr(interrupt, "signal", signals)
        monkeypatch.setattr(tracking, "SEEN_SECONDS", 0.3)
        monkeypatch.setattr(tracking, "time", fast_clock)
        monkeypatch.setattr(storage, "HOSTS_SECONDS", 2)
        monkeypatch.setattr(storage, "time", fast_clock)
        monkeypatch.setattr(loading.Loader, "_upload", lambda loader, batch: Batch(batch))
        monkeypatch.setattr(threading.Thread, "start", start_on_this_host)
        monkeypatch.setattr(checkpoint.Checkpointer, "wait", wait)

    def _setup(self, seed, precision, strict, kind, layout=WHOLE, vmem_kib=0, safe_forms=False):
        return sharding.arranged(self.mesh(this_host()), layout)

    def _compiled(self, step_fn, mesh, max_graphs=1):
        name = step_fn.__name__
        real_step = None
        if self.real_mesh:
            real_step = REAL_COMPILED(step_fn, self.real_mesh)

        def call(*arguments):
            self._run_closures()
            whole = self._gather(name, arguments)
            if this_host() == 0 and whole:
                self.steps.append(StepCall(name, whole))
            if name in TRAINING:
                self._count_batch(this_host())

            if real_step is None:
                return self.results(name, whole)
            if self.computed_round != self.round:  # this host is the first that leaves the meeting
                self._compute(real_step, whole, config=arguments[2])
            return self.computed

        return call

    def _gather(self, name: str, arguments: tuple) -> Batch | None:
        """Waits for the other hosts in a step; returns the whole batch, None if it takes none."""
        batch = None
        for argument in arguments:
            if isinstance(argument, Batch):
                batch = argument
                break

        fields = []
        for key, value in (batch or {}).items():
            fields.append((key, tuple(value.shape), value.dtype))
        pieces = self.meet(Meeting(name, tuple(fields)), batch)
        if not batch:
            return batch

        whole = Batch()
        for key in batch:
            whole[key] = torch.cat([piece[key] for piece in pieces])
        return whole

    def _count_batch(self, host: int) -> None:
        """Counts a training batch of a host, and sends it SIGTERM if that was the last."""
        self.trained[host] += 1
        if self.trained[host] == self.stop_after.get(host):
            handler = self.handlers[host][signal.SIGTERM]
            handler(signal.SIGTERM, None)

    def _compute(self, real_step: Callable, whole: Batch, config) -> None:
        """Computes a real step for all hosts."""
        uploaded = {key: REAL_UPLOAD(value, self.real_mesh) for key, value in whole.items()}
        result = real_step(self.state, uploaded, config, self.real_mesh)
        if isinstance(result, dict):
            self.computed = checkpoint.to_host(result)
        else:
            self.computed = checkpoint.to_host({"": result})[""]
        self.computed_round = self.round

    def _build(self, config, data, mesh):
        """Builds DLRM's state once for all hosts; returns it as one host has it."""
        if self.state is None:
            torch.manual_seed(config.seed)
            self.state = REAL_BUILD(config, data, self.real_mesh)

        embeddings = copy.copy(self.state.embeddings)
        embeddings.mesh = mesh
        embeddings.devices = OwnDevices(embeddings.devices, mesh)
        embeddings.arrays = []
        for array in self.state.embeddings.arrays:
            own = copy.copy(array)
            own.devices = embeddings.devices
            embeddings.arrays.append(own)
        embeddings._forward_passes = []
        return self.state._replace(embeddings=embeddings)

    def _upload(self, local, mesh):
        pieces = self.meet(Meeting("upload", tuple(local.shape)), local)
        return torch.cat(pieces)

    def _after_next_step(self, closure: Callable) -> None:
        self.closures[this_host()].append(closure)

    def _run_closures(self) -> None:
        host = this_host()
        waiting = self.closures[host]
        self.closures[host] = []
        for closure in waiting:
            closure()

    def _seed_step(self, *seed) -> None:
        """Records a seed, which must be the same on all hosts; nobody waits."""
        self.meetings[this_host()].append(Meeting("seed", seed))

    def _stop_requested(self, mesh, *script_every):
        if self.agree_every is None:
            return REAL_STOP_REQUESTED(mesh, *script_every)
        return REAL_STOP_REQUESTED(mesh, self.agree_every)

    def _handle_signal(self, number, handler):
        """Stands for signal.signal on one host."""
        handlers = self.handlers[this_host()]
        previous = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return previous


def start_on_this_host(thread: threading.Thread) -> None:
    """Starts a thread, as for uploads and checkpoints; it belongs to the host that starts it."""
    thread.host = getattr(thread, "host", this_host())
    REAL_START(thread)


class OwnDevices:
    """The devices that tables lie on, as one host has them: it sees and fills its own shards."""

    def __init__(self, devices, mesh: device.Mesh):
        count = mesh.num_devices // mesh.process_count
        first = mesh.process_index * count
        self.devices = devices
        self.own = slice(first, first + count)

    def __getattr__(self, name: str):
        return getattr(self.devices, name)

    def local_parts(self, tensor, spec) -> list:
        return self.devices.local_parts(tensor, spec)[self.own]

    def read_parts(self, tensor) -> list:
        return self.devices.read_parts(tensor)[self.own]

    def load_parts(self, tensor, parts, numbers) -> None:
        shards = self.devices.read_parts(tensor)
        shards[self.own] = parts
        self.devices.load_parts(tensor, shards, numbers)
