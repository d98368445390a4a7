"""Every script on a simulated pod of 2 and 4 hosts: the data that each host reads, the points at which hosts wait for
each other, the files that they write.

A host is a thread that runs the script's own `main` with its own place in the mesh; what it does on the host is real.
What needs devices of several hosts is replaced: a compiled step waits for all hosts, as the collectives in it would,
and gives a simple function of the whole batch; an upload to all devices waits likewise. A host that waits for one that
has ended, or is somewhere else, fails instead of waiting forever.

DLRM's steps are real, too: its tables, exchanged all-to-all, lie on the four devices of this process. Each host has its
share of these, and saves and restores nothing else. What this does not show is a collective between processes, which
torch_xla 2.9's CPU backend does not have.
"""

import copy
import functools
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
import torch
import torch_xla.distributed.spmd as xs
from checkpoints import damage, flip
from fsspec.implementations.memory import MemoryFileSystem
from helpers import equal, fewer_sentences, records, summary
from test_loading import Numbers, Sentences

from data import text, wmt
from data.batching import Buckets
from errors import InputError
from train import dlrm, glue, pretrain, resnet50, transformer, translate
from train.common import checkpoint, device, files, interrupt, loading, sharding
from train.common import run as tracking
from train.common.embedding import storage
from train.common.mesh import WHOLE, Layout
from train.common.run_folder import RunFolder
from train.common.sharding import gather
from train.common.xla import backend as xla

DEVICES = 8  # of all hosts together, however many hosts there are; 4 where steps are real
HOSTS = 4  # of a whole training; 2 are tested where a run is stopped
TRAINING = ("train_step", "gradient_step")  # steps that take a batch of the training loader


class Apart(Exception):
    """Hosts that would wait for each other forever."""


class Batch(dict):
    """What the loader gives, so that a step's batch is told from its other arguments."""


def this_host() -> int | None:
    return getattr(threading.current_thread(), "host", None)


# ---- who writes ------------------------------------------------------------------------------------------------------
# Python reports every open, rename and so on; a hook cannot be removed, so it is told where to look.

_watched: list = []  # of (folder, list of (host, event, path))


def _audit(event: str, arguments: tuple) -> None:
    if not _watched or event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    for folder, written in _watched:
        if isinstance(path, str) and path.startswith(folder):
            written.append((this_host(), event, os.path.relpath(path, folder)))


sys.addaudithook(_audit)


# ---- the pod ---------------------------------------------------------------------------------------------------------
class Pod:
    """Hosts as threads that take turns: one runs until it waits for the others.

    results: (name of a step, whole batch) -> what the step gives; None: real steps, on this process's devices.
    """

    def __init__(self, hosts: int, folder, results: Callable | None, devices=DEVICES, stop=None, every: int | None = 1):
        self.real = device.setup(0, "float32") if results is None else None
        self.devices = self.real.num_devices if self.real else devices
        self.hosts, self.folder, self.results = hosts, str(folder), results
        self.stop = stop or {}  # host -> SIGTERM comes after so many training batches
        self.every = every  # calls in which hosts agree about a signal; None: as many as the script says
        self.turn = threading.Condition(threading.Lock())
        self.round, self.arrived, self.met, self.gone = 0, {}, [], set()
        self.steps = []  # (name, the whole batch) of every compiled step that took one
        self.written = []  # (host, event, path) of everything that was written below `folder`
        self.meetings = [[] for _ in range(hosts)]  # of each host, what it waited for the others at
        self.trained, self.handlers = [0] * hosts, [{} for _ in range(hosts)]
        self.outcomes: list = [None] * hosts  # of each host, what its work returned or raised
        self.state, self.computed = None, (0, None)  # of real steps: all hosts', and (round, what it gave)
        self.closures = [[] for _ in range(hosts)]  # of each host, for after its next step

    def mesh(self, host: int) -> device.Mesh:
        if self.real:
            return replace(self.real, process_index=host, process_count=self.hosts)
        with pytest.MonkeyPatch.context() as monkeypatch:  # a mesh has all devices that there are
            monkeypatch.setattr(xla.xr, "global_runtime_device_count", lambda: self.devices)
            spmd = xs.Mesh(np.arange(self.devices), (self.devices,), ("data",))
        return device.Mesh(torch.device("cpu"), spmd, self.devices, host, self.hosts, "CPU", "float32", True)

    def meet(self, what, value=None) -> list:
        """Waits until all hosts are at the same place; what they have brought, in the order of the hosts."""
        host = this_host()
        self.meetings[host].append(what)
        self.arrived[host] = what, value
        if len(self.arrived) == self.hosts:
            self.met, self.arrived = [self.arrived[i] for i in range(self.hosts)], {}
            self.round += 1
            self.turn.notify_all()
        else:
            before = self.round
            self.turn.notify_all()
            while self.round == before:
                if self.gone:
                    raise Apart(f"host {host} waits at {what} for host {sorted(self.gone)[0]}, which has ended")
                self.turn.wait(60)
        if len({met for met, _ in self.met}) > 1:
            raise Apart(f"the hosts are at different places: {[met for met, _ in self.met]}")
        return [value for _, value in self.met]

    def wait_for_others(self) -> None:
        """Lets the caller be late: waits until another host waits for the rest, or has failed."""
        self.turn.wait_for(lambda: self.arrived or self.gone, timeout=10)

    def run(self, work: Callable, patch: Callable = lambda monkeypatch: None) -> "Pod":
        """Does `work` on every host; returns itself."""

        def of_host(host: int) -> None:
            with self.turn:
                try:
                    self.outcomes[host] = work()
                except BaseException as error:
                    self.outcomes[host] = error
                finally:
                    self.gone.add(host)
                    self.turn.notify_all()

        watched = self.folder, self.written
        with pytest.MonkeyPatch.context() as monkeypatch:
            self._replace_devices(monkeypatch)
            patch(monkeypatch)
            _watched.append(watched)
            try:
                threads = [threading.Thread(target=of_host, args=(host,)) for host in range(self.hosts)]
                for host, thread in enumerate(threads):
                    thread.host = host
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                _watched.remove(watched)
                self.state = self.computed = None  # tables that live at the same time have other sizes, see bags.py
                gc.collect()
        return self

    def succeeded(self) -> "Pod":
        """Itself; raises what a host raised, and if several did, not the consequence."""
        errors = [outcome for outcome in self.outcomes if isinstance(outcome, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, Apart)):
            raise error
        return self

    def refused(self, pattern: str) -> "Pod":
        """Itself, after bad input: each host has ended in a sentence that the pattern finds."""
        found = [isinstance(outcome, InputError) and re.search(pattern, str(outcome)) for outcome in self.outcomes]
        assert all(found), self.outcomes
        return self

    def stopped(self) -> "Pod":
        """Itself, after a signal: every host has ended with its exit code."""
        assert [getattr(outcome, "code", None) for outcome in self.outcomes] == [143] * self.hosts, self.outcomes
        return self

    def _replace_devices(self, monkeypatch) -> None:
        pod = self
        real_compiled, real_upload, real_annotate = device.compiled, device.upload, device.annotate

        def compiled(step_fn, mesh, max_graphs=1):
            real_step = real_compiled(step_fn, pod.real) if pod.real else None

            def call(*args):
                run_closures()
                batch = next((argument for argument in args if isinstance(argument, Batch)), None)
                shapes = tuple((k, tuple(v.shape), v.dtype) for k, v in (batch or {}).items())
                parts = pod.meet((step_fn.__name__, shapes), batch)
                whole = batch and Batch({key: torch.cat([part[key] for part in parts]) for key in batch})
                host = this_host()
                if host == 0 and whole:
                    pod.steps.append((step_fn.__name__, whole))
                if step_fn.__name__ in TRAINING:
                    pod.trained[host] += 1
                    if pod.trained[host] == pod.stop.get(host):
                        pod.handlers[host][signal.SIGTERM](signal.SIGTERM, None)
                if pod.real and pod.computed[0] != pod.round:  # the first of the hosts that have met
                    uploaded = {key: real_upload(value, pod.real) for key, value in whole.items()}
                    result = real_step(pod.state, uploaded, args[2], pod.real)
                    own = checkpoint.to_host(result if isinstance(result, dict) else {"": result})
                    pod.computed = pod.round, own.get("", own)
                if pod.real:
                    return pod.computed[1]
                return pod.results(step_fn.__name__, whole)

            return call

        def build(config, data, mesh):  # of one state every host has its part
            if pod.state is None:
                torch.manual_seed(config.seed)
                pod.state = real_build(config, data, pod.real)
            embeddings = copy.copy(pod.state.embeddings)
            embeddings.mesh = mesh
            embeddings.devices = Share(embeddings.devices, mesh)
            embeddings.arrays = [shared(array, embeddings.devices) for array in embeddings.arrays]
            embeddings._forward_passes = []
            return pod.state._replace(embeddings=embeddings)

        def run_closures():
            waiting, pod.closures[this_host()] = pod.closures[this_host()], []
            for closure in waiting:
                closure()

        def upload(local, mesh):
            return torch.cat(pod.meet(("upload", tuple(local.shape)), local))

        def setup(seed, precision, strict, kind, layout=WHOLE, vmem_kib=0, safe_forms=False):
            return sharding.arranged(pod.mesh(this_host()), layout)

        def stop_requested(mesh, *every):
            return real_stop(mesh, *([pod.every] if pod.every else every))

        def handle(number, handler):
            previous = pod.handlers[this_host()].get(number, signal.SIG_DFL)
            pod.handlers[this_host()][number] = handler
            return previous

        real_stop, real_build = device.stop_requested, dlrm.build
        real_start, real_wait = threading.Thread.start, checkpoint.Checkpointer.wait

        def start(thread):  # the upload thread and the checkpoints' belong to the host that starts them
            thread.host = getattr(thread, "host", this_host())
            real_start(thread)

        def wait(checkpoints):  # the others must go on, or their parts of a checkpoint never come
            pod.turn.release()
            try:
                real_wait(checkpoints)
            finally:
                pod.turn.acquire()

        signals = SimpleNamespace(signal=handle, SIGTERM=signal.SIGTERM, SIGINT=signal.SIGINT)
        replacements = [
            (device, "setup", setup),
            (device, "compiled", compiled),
            (device, "annotate", real_annotate if pod.real else lambda tensor, spmd, spec: None),
            (device, "after_next_step", lambda closure: pod.closures[this_host()].append(closure)),
            (device, "run_pending", run_closures),
            (dlrm, "build", build),
            (device, "fetch", lambda values: [float(value) for value in values]),
            (device, "upload", upload),
            (device, "seed_step", lambda *seed: pod.meetings[this_host()].append(("seed", *seed))),
            (interrupt, "signal", signals),
            (device, "stop_requested", stop_requested),
            (tracking, "SEEN_SECONDS", 0.3),
            (tracking, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))),
            (loading.Loader, "_upload", lambda self, batch: Batch(batch)),
            (threading.Thread, "start", start),
            (checkpoint.Checkpointer, "wait", wait),
            (storage, "HOSTS_SECONDS", 2),
            (storage, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))),
        ]
        for target, name, value in replacements:
            monkeypatch.setattr(target, name, value)


class Share:
    """The devices that share tables, as one host has them: it sees and fills the parts on its own devices."""

    def __init__(self, devices, mesh: device.Mesh):
        count = mesh.num_devices // mesh.process_count
        self.devices = devices
        self.own = slice(mesh.process_index * count, (mesh.process_index + 1) * count)

    def __getattr__(self, name: str):
        return getattr(self.devices, name)

    def local_parts(self, tensor) -> list:
        return self.devices.local_parts(tensor)[self.own]

    def read_parts(self, tensor) -> list:
        return self.devices.read_parts(tensor)[self.own]

    def load_parts(self, tensor, parts, numbers) -> None:
        every = self.devices.read_parts(tensor)
        every[self.own] = parts
        self.devices.load_parts(tensor, every, numbers)


def shared(plan, devices: Share):
    """Returns the tables of a plan as one host has them."""
    own = copy.copy(plan)
    own.devices = devices
    return own


# ---- the scripts -----------------------------------------------------------------------------------------------------
# `results` stands for the model: numbers that differ between examples and do not depend on the hosts.


def rows_of(batch: dict) -> slice | torch.Tensor:
    """Returns the rows that are examples; what stands in the others is of no account."""
    return batch["mask"] > 0 if batch.get("mask", torch.ones(1, 1)).dim() == 1 else slice(None)


def digest(batch: dict) -> torch.Tensor:
    """Between 0 and 1, of every number of the batch's examples in its order."""
    content = b"".join(batch[key][rows_of(batch)].contiguous().numpy().tobytes() for key in sorted(batch))
    return torch.tensor(zlib.crc32(content) / 2**32)


def of_step(name: str, batch: dict | None) -> dict | None:
    """Stands for a step of training, or for one of evaluation that returns sums over a batch."""
    if name == "gradient_step":
        return None
    names, number = ("loss", "accuracy", "gradient_norm", "nll", "words", "top1", "top5"), digest(batch or {})
    sums = {name: number / place for place, name in enumerate(names, 1)}
    return sums | dict.fromkeys(("count", "tokens", "predicted"), torch.tensor(1.0))


def of_resnet50(name: str, batch: dict) -> dict:
    sums = of_step(name, batch)
    if name == "eval_step":
        sums["count"] = (batch["mask"] * (batch["label"] >= 0)).sum()
    return sums


def of_glue(name: str, batch: dict) -> dict | torch.Tensor:
    """Logits of MNLI's three labels."""
    if name != "eval_step":
        return of_step(name, batch)
    places = torch.arange(1, batch["input_ids"].shape[1] + 1)
    sums = (batch["input_ids"] * batch["attention_mask"] * places).sum(1)
    return torch.sin(0.37 * sums[:, None] * torch.arange(1, 4))


def of_transformer(name: str, batch: dict | None) -> dict | None:
    if name != "translate_step":
        return of_step(name, batch)
    wrong = batch["source"].sum(1, keepdim=True) % 3 == 0  # every third sentence
    return {"tokens": torch.where(wrong, batch["source"], batch["target"])}


@dataclass(frozen=True)
class Script:
    """A script with a small configuration."""

    module: object
    config: object
    results: Callable | None  # see Pod
    sizes: tuple[int, int]  # examples for training and evaluation; 7 or 13 more than whole batches
    patch: Callable  # makes the data sets of these sizes
    stops: tuple[int, int]  # batches after which two resumed runs are stopped; both within the second epoch


def synthetic(script, **changes) -> Callable:
    """A patch for a script that makes its own examples."""

    def patch(monkeypatch, sizes) -> None:
        for name, value in {"SYNTHETIC_TRAIN": sizes[0], "SYNTHETIC_EVAL": sizes[1], **changes}.items():
            monkeypatch.setattr(script, name, value)

    return patch


def sentence_pairs(monkeypatch, sizes) -> None:
    made = wmt.SyntheticPairs
    monkeypatch.setattr(wmt, "SyntheticPairs", lambda split, seed: made(split, sizes[split != "train"], seed))


def rows_of_text(monkeypatch, sizes) -> None:
    made = text.SyntheticText
    monkeypatch.setattr(text, "SyntheticText", lambda split, *rest: made(split, *rest, rows=sizes[split != "train"]))


RESNET50 = replace(resnet50.TINY, batch_size=16, epochs=3, log_every=1, save_every=2)
DLRM = replace(dlrm.TINY, plan="exchange", shuffle="batches", batch_size=16, epochs=3, log_every=1, save_every=2)
GLUE = replace(glue.TINY, task="mnli", batch_size=8, lengths=(24, 32), epochs=3, group_by_length=True)
GLUE = replace(GLUE, log_every=1, eval_every=5)
TRANSFORMER = replace(transformer.TINY, batch_tokens=128, updates=21, warmup_updates=5)
TRANSFORMER = replace(TRANSFORMER, log_every=1, eval_every=10, save_every=2)
PACKED = replace(TRANSFORMER, pack=True, lengths=(16,), update_every=2, updates=12)
PRETRAIN = replace(pretrain.TINY, model="xlnet", update_every=2, batch_size=16, steps=12, warmup_steps=3)
PRETRAIN = replace(PRETRAIN, log_every=1, eval_every=5)

CLICKS = synthetic(dlrm, SYNTHETIC_ROWS=(20, 50, 100, 400, 60, 60, 80, 300), EVAL_BATCH=16)

SCRIPTS = {
    "resnet50": Script(resnet50, RESNET50, of_resnet50, (61, 23), synthetic(resnet50), (4, 5)),
    "dlrm": Script(dlrm, DLRM, None, (61, 23), CLICKS, (4, 5)),
    "glue": Script(glue, GLUE, of_glue, (61, 45), fewer_sentences, (10, 13)),
    "transformer": Script(transformer, TRANSFORMER, of_transformer, (77, 29), sentence_pairs, (10, 12)),
    "transformer-packed": Script(transformer, PACKED, of_transformer, (77, 29), sentence_pairs, (8, 10)),
    "pretrain": Script(pretrain, PRETRAIN, of_step, (55, 29), rows_of_text, (8, 10)),
}


def train(name, hosts: int, folder, /, stop=None, every=1, devices=DEVICES, patch=lambda *_: None, **changes) -> Pod:
    """Trains a script on so many hosts. `stop`: host -> training batches after which it gets SIGTERM. A change that is
    a function is called on each host."""
    script = SCRIPTS[name]
    pod = Pod(hosts, folder, script.results, devices, stop, every)

    def patches(monkeypatch) -> None:
        script.patch(monkeypatch, script.sizes)
        patch(monkeypatch, pod)

    def work():
        made = {key: value() if callable(value) else value for key, value in changes.items()}
        return script.module.main(replace(script.config, **{"runs": f"{folder}/runs", **made}))

    return pod.run(work, patches)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., Pod]:
    """A whole training on HOSTS or so many hosts, made once."""
    return functools.cache(lambda name, hosts=HOSTS: train(name, hosts, tmp_path_factory.mktemp("pod")).succeeded())


every_script = pytest.mark.parametrize("name", SCRIPTS)


def run_folder(pod: Pod) -> str:
    (name,) = os.listdir(f"{pod.folder}/runs")
    return f"{pod.folder}/runs/{name}"


def training(pod: Pod) -> list[dict]:
    return [batch for name, batch in pod.steps if name in TRAINING]


def assert_equal(batches: list[dict], others: list[dict]) -> None:
    """The same examples at the same places."""
    for step, (batch, other) in enumerate(zip(batches, others, strict=True)):
        assert batch.keys() == other.keys(), step
        for key in batch:
            rows = slice(None) if key == "mask" else rows_of(batch)
            assert torch.equal(batch[key][rows], other[key][rows]), (step, key)


# ---- what the hosts read ---------------------------------------------------------------------------------------------
@every_script
def test_the_hosts_together_have_the_batches_of_one_host_and_each_has_its_metrics(trained, name):
    """Where one host is missing, or comes with another shape, the pod fails before."""
    alone, pod = trained(name, 1), trained(name)
    assert [name for name, _ in pod.steps] == [name for name, _ in alone.steps]
    assert_equal([batch for _, batch in pod.steps], [batch for _, batch in alone.steps])
    assert len({digest(batch) for batch in training(alone)}) == len(training(alone)), "all batches are alike"
    assert all(meetings == pod.meetings[0] for meetings in pod.meetings)
    shapes = {what for what in pod.meetings[0] if what[0] in TRAINING}
    assert len(shapes) == (2 if name in ("glue", "transformer") else 1)
    assert pod.outcomes == alone.outcomes * HOSTS
    assert records(run_folder(pod)) == records(run_folder(alone))
    assert len(set(alone.outcomes[0].values())) > 1, "metrics that differ, of both splits of MNLI"
    assert all(summary(run_folder(one))["metrics"] == alone.outcomes[0] for one in (alone, pod))


@every_script
def test_a_resumed_run_goes_on_with_the_rest_on_any_number_of_hosts(trained, name, tmp_path):
    """1 host, stopped in the second epoch; 2 hosts from there, both stopped by a signal to one; 4 to the end."""
    whole = trained(name, 1)
    first, second = SCRIPTS[name].stops
    parts = [
        train(name, 1, tmp_path, {0: first}).stopped(),
        train(name, 2, tmp_path, {1: second - first}).stopped(),
        train(name, 4, tmp_path).succeeded(),
    ]
    assert parts[1].trained == [second - first] * 2 and parts[1].meetings[0] == parts[1].meetings[1]
    assert [len(training(part)) for part in parts] == [first, second - first, len(training(whole)) - second]
    assert_equal([batch for part in parts for batch in training(part)], training(whole))
    assert records(run_folder(parts[2])) == records(run_folder(whole))
    assert parts[2].outcomes == whole.outcomes * 4


class Answer(torch.nn.Module):
    """Stands for a model."""

    config = SimpleNamespace(model_type="roberta")
    arch = SimpleNamespace(max_positions=8)

    def forward(self, *_, **inputs):
        return SimpleNamespace(logits=torch.ones(4, 2)) if inputs else torch.ones(4)


def test_what_the_host_reads_of_an_evaluation_is_on_every_device(monkeypatch):
    """The host computes metrics from these, so each host must have the predictions of all: a result that is sharded is
    not whole on any."""
    replicated = []
    monkeypatch.setattr(device, "replicate", lambda tensor, mesh: replicated.append(tensor))
    monkeypatch.setattr(device, "compiled", lambda step, mesh, graphs=1: step)
    mesh, ones = Pod(1, "", of_step).mesh(0), torch.ones(4)
    searched = torch.ones(4, 2, 8), torch.ones(4, 2)
    monkeypatch.setattr(translate.beam_search, "search", lambda *_: searched)
    clicks, translator = dlrm.State(Answer(), lambda *_: ones, None), translate.Translator(Answer(), mesh, TRANSFORMER)
    results = [
        glue.eval_step(glue.State(Answer(), None), {"input_ids": ones, "attention_mask": ones}, GLUE, mesh),
        dlrm.eval_step(clicks, dict.fromkeys(("dense", "ids", "label", "mask"), ones), DLRM, mesh),
        *translator.translate_step(Answer(), {"source": torch.ones(4, 8)}).values(),
    ]
    assert list(map(id, results)) == list(map(id, replicated)) and len(results) == 4


# ---- files -----------------------------------------------------------------------------------------------------------

# Files of a run that there is one of.
ONCE = ("config.json", "metrics.jsonl", "summary.json")


@every_script
def test_the_main_process_alone_writes(trained, name):
    pod = trained(name)
    others = [written for written in pod.written if written[0] != 0]
    for host, event, path in others:
        assert f"tables-{host:05d}." in path or (event == "os.mkdir" and "checkpoints" in path), (host, path)
    assert bool(others) == (name == "dlrm")
    # Every write was seen, and by whom: each file was written by somebody.
    writers = {os.path.basename(path).removesuffix(".tmp"): host for host, event, path in pod.written}
    assert all(writers[name] == 0 for name in (*ONCE, "COMPLETE", "state.safetensors"))
    (start,) = json.load(open(f"{run_folder(pod)}/config.json"))["starts"]
    assert start["devices"]["hosts"] == HOSTS
    assert os.listdir(f"{run_folder(pod)}/export")


@pytest.mark.parametrize("name", ["pretrain", "transformer"])
def test_a_state_that_is_cut_over_hosts_is_made_whole_by_all_of_them(trained, name, tmp_path):
    """Its parts are not here: where the hosts would run the program that joins them, they meet."""

    def patch(patched, pod):
        def on_every_device(tensor):
            pod.meet(("whole", tuple(tensor.shape)))
            return tensor

        patched.setattr(gather, "on_every_device", on_every_device)

    def newest(pod):
        return max(Path(run_folder(pod), "checkpoints").iterdir()) / "state.safetensors"

    options = {"devices": 4, "patch": patch, "layout": Layout("data=2,model=2", "full")}
    stopped = train(name, 2, tmp_path, {1: 4}, **options).stopped()
    saved = newest(stopped).read_bytes()
    pod, alone = train(name, 4, tmp_path, **options).succeeded(), trained(name, 1)
    assert {host for host, *_ in [*stopped.written, *pod.written]} == {0}
    assert records(run_folder(pod)) == records(run_folder(alone)) and pod.meetings[3] == pod.meetings[0]
    assert newest(pod).read_bytes() == saved, "steps are stand-ins, which change no weight"
    joined = sum(what[0] == "whole" for what in pod.meetings[0])
    assert joined > len(safetensors.torch.load(saved)), "checkpoints and an export"


def test_a_damaged_piece_of_one_host_makes_all_hosts_take_the_checkpoint_before(trained, tmp_path):
    stopped = train("dlrm", 2, tmp_path, {0: 5, 1: 5}).stopped()
    damage(f"{run_folder(stopped)}/checkpoints", 5, "tables-00001.safetensors", lambda content: flip(content, -1))
    again, whole = train("dlrm", 2, tmp_path).succeeded(), trained("dlrm", 1)
    assert_equal(training(again), training(whole)[4:])
    assert again.outcomes == whole.outcomes * 2


def test_ids_without_a_place_stop_every_host_before_a_checkpoint(tmp_path):
    pod = train("dlrm", 2, tmp_path, exchange_room=(0.1, 1.0)).refused("ids found no place in the exchange")
    assert pod.trained[0] == pod.trained[1] > 0
    assert not [path for _, _, path in pod.written if path.endswith("COMPLETE")]


def test_the_main_process_alone_writes_to_a_bucket(monkeypatch, trained):
    """Other hosts leave their pieces of tables there, and nothing on their disks."""
    written, opened = [], MemoryFileSystem._open

    def recorded(self, path, mode="rb", **options):
        if "r" not in mode:
            written.append((this_host(), path))
        return opened(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", recorded)
    pod = train("dlrm", 2, tempfile.gettempdir(), runs="memory://multi-host", name="run").succeeded()
    alone = run_folder(trained("dlrm", 1))
    assert pod.outcomes == trained("dlrm", 1).outcomes * 2
    names = {(host, os.path.basename(path)) for host, path in written}
    assert {name for host, name in names if host != 0} == {"tables-00001.safetensors", "tables-00001.json"}
    assert {(0, name) for name in (*ONCE, "COMPLETE")} < names
    assert {host for host, _, _ in pod.written} <= {0, None}
    tables = [files.load_weights(f"{run}/export/tables/C4.safetensors") for run in ("memory://multi-host/run", alone)]
    assert equal(*tables)
    again = train("dlrm", 2, tempfile.gettempdir(), runs="memory://multi-host", name="run").succeeded()
    assert again.outcomes == pod.outcomes and again.trained == [0, 0]


def test_the_mean_of_checkpoints_waits_for_the_last_of_the_main_process(tmp_path):
    write = checkpoint.Checkpointer._write

    def patch(patched, pod):
        def slow(self, step, *state):
            with pod.turn:
                if step == TRANSFORMER.updates:
                    pod.wait_for_others()
            write(self, step, *state)

        patched.setattr(checkpoint.Checkpointer, "_write", slow)

    train("transformer", 2, tmp_path, patch=patch).succeeded()


def test_a_host_that_does_not_see_the_last_checkpoint_yet_has_no_mean_of_its_own(tmp_path):
    """A listing of a network file system may be a minute old."""
    average = transformer.average_checkpoints

    def behind(checkpoints, *arguments):
        known = checkpoints.complete_steps()[: -1 if this_host() else None]
        checkpoints.complete_steps = lambda: known
        return average(checkpoints, *arguments)

    def patch(patched, _):
        patched.setattr(transformer, "average_checkpoints", behind)

    pod = train("transformer", 2, tmp_path, patch=patch)
    pod.refused("disagree about the checkpoints to average")


# ---- signals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [2, None])
@pytest.mark.parametrize("name, every", [("transformer", 10), ("transformer-packed", 5)])
def test_hosts_agree_about_a_signal_as_rarely_as_the_script_says(name, every, late, tmp_path):
    """Each time waits for the device. A packed update is two batches. late: batches after which the other host gets
    the signal, too."""
    pod = train(name, 2, tmp_path, {1: 3} | ({0: 3 + late} if late else {}), every=None).stopped()
    assert pod.trained == [10, 10] and pod.meetings[0] == pod.meetings[1]
    assert os.path.exists(f"{run_folder(pod)}/checkpoints/step_{every:08d}/COMPLETE")


# ---- rows, and what hosts compare ------------------------------------------------------------------------------------

# Global numbers of the devices that each host of a 4x4 slice (v5litepod-16, v6e-16) has: they follow the rows of the
# slice, and a host has a square of it. As libtpu describes v5e:4x4 and v6e:4x4 (PJRT_DeviceDescription_ProcessIndex).
HOSTS_OF_4X4 = [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]


@pytest.mark.parametrize("dataset, batches", [(Numbers(32), 16), (Sentences(32), Buckets([4] * 32, [(16, 4)]))])
def test_rows_are_in_the_order_of_the_devices_and_seeds_do_not_depend_on_the_host(monkeypatch, dataset, batches):
    """Each host's part of a batch is cut in equal pieces for its devices in the order of their numbers (torch_xla's
    GetShardIndicesForMinibatchTensor), and the batch on all devices has them in the order of the mesh."""
    rows, draws, checked = {}, [], []
    monkeypatch.setattr(xla.xr, "global_runtime_device_count", lambda: 16)
    monkeypatch.setattr(xla.xr, "process_count", lambda: len(HOSTS_OF_4X4))
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)
    monkeypatch.setattr(xla, "_check_places", checked.append)
    for host, devices in enumerate(HOSTS_OF_4X4):
        names = [f"TPU:{number}" for number in devices]
        monkeypatch.setattr(xla.xr, "process_index", lambda host=host: host)
        monkeypatch.setattr(xla.torch_xla._XLAC, "_xla_get_runtime_devices", lambda names=names: names)
        mesh = device.setup(5, "float32")
        assert checked[-1] is mesh
        assert (mesh.process_index, mesh.process_count, mesh.main_process) == (host, 4, host == 0)
        draws.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), xla.xm.get_rng_state()))
        with loading.parallel_loader(dataset, batches, mesh, train=False) as loader:
            rows |= zip(devices, next(loader)["index"].tolist(), strict=True)
    assert [rows[number] for number in mesh.spmd.device_ids] == list(range(16))
    assert all(draw == draws[0] for draw in draws), "new weights and dropout are the same everywhere"


def test_batches_of_sentences_divide_by_the_devices(tmp_path):
    """384 tokens are 24 rows of length 16."""
    train("transformer", 4, tmp_path, devices=16, batch_tokens=384, updates=4).succeeded()


def test_a_trial_of_distilbert_makes_its_teacher_and_waits_for_it(tmp_path, capsys):
    export = pretrain.export

    def patch(patched, pod):
        def slow(*arguments):
            if this_host() == 0:
                pod.wait_for_others()
            export(*arguments)

        patched.setattr(pretrain, "export", slow)

    changes = {"model": "distilbert", "steps": 3, "warmup_steps": 1, "name": "run"}
    metrics = train("pretrain", 2, tmp_path, patch=patch, **changes).succeeded().outcomes
    (made,) = set(os.listdir(tmp_path / "runs")) - {"run"}
    student, teacher = (json.load(open(f"{tmp_path}/runs/{name}/config.json"))["config"] for name in ("run", made))
    assert teacher["model"] == "bert" and student["teacher"] == f"{tmp_path}/runs/{made}/export"
    assert train("pretrain", 2, tmp_path, **changes).succeeded().outcomes == metrics
    assert capsys.readouterr().out.count("is finished") == 2


@pytest.mark.filterwarnings("ignore:skipped, ")
def test_broken_images_of_all_hosts_are_counted(tmp_path, capsys):
    rng, said = np.random.default_rng(0), []
    for split, size in (("train", 39), ("val", 29)):
        for number in range(size):
            path = tmp_path / "images" / split / f"class {number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(path)
            if number % 5 == 0:
                path.write_bytes(b"no picture")
    options = {"data": f"{tmp_path}/images", "epochs": 1, "warmup_epochs": 0.0, "skip_broken": True}
    for hosts in (1, 4):
        train("resnet50", hosts, tmp_path / str(hosts), **options).succeeded()
        said.append([line for line in capsys.readouterr().out.splitlines() if "decoded" in line])
    assert len(said[0]) > 1 and said[0] == said[1]


def test_hosts_with_folders_of_their_own_are_refused_before_the_first_step(tmp_path):
    own = {"runs": lambda: f"{tmp_path}/{this_host()}"}
    pod = train("resnet50", 2, tmp_path, **own, name="new").refused(f"{tmp_path}/[01]/new.*--runs gs://bucket/runs")
    assert pod.trained == [0, 0]
    train("resnet50", 1, tmp_path, **own, name="done").succeeded()  # or if one of them has finished it
    train("resnet50", 2, tmp_path, **own, name="done").refused("hosts share")
    shutil.copytree(tmp_path / "0", tmp_path / "1", ignore=shutil.ignore_patterns("summary.json"))
    train("resnet50", 2, tmp_path, **own, name="done").refused("hosts share")


def test_a_host_that_sees_the_folder_late_waits_for_it(tmp_path, monkeypatch):
    """A network file system may remember for a while that there was no such file."""
    looks, read = [], RunFolder.read

    def late(self, name):
        if late := this_host() == 1 and name == "config.json":
            looks.append(name)
        return None if late and len(looks) < 5 else read(self, name)

    monkeypatch.setattr(RunFolder, "read", late)
    train("resnet50", 2, tmp_path, name="mine").succeeded()
    assert len(looks) >= 5


def test_the_trial_of_xlnet_is_refused_on_several_hosts(tmp_path):
    """Its vocabulary is another one whenever it is learnt."""
    train("glue", 2, tmp_path, model="xlnet").refused("--model xlnet is for one host, not 2")


@pytest.mark.parametrize("others", [b"", b"\xff\n"])
def test_translate_refuses_hosts_with_other_lines(tmp_path, others):
    given = SimpleNamespace(buffer=SimpleNamespace(read=lambda: b"w1 w2 w3\n" if this_host() == 0 else others))

    def patch(monkeypatch):
        monkeypatch.setattr(translate, "load", lambda *_: (None, SimpleNamespace(pieces="")))
        monkeypatch.setattr(translate, "sys", SimpleNamespace(stdin=given, stdout=sys.stdout))

    pod = Pod(2, tmp_path, of_step).run(lambda: translate.main(translate.Config(model_dir="export")), patch)
    pod.refused("translation is for one host")
