"""Every script on a simulated pod of 2 and 4 hosts: the data that each host reads, the points at
which hosts wait for each other, the files that they write. simulated_pod.py says what is real.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
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
from checkpoints import damage, flip
from fsspec.implementations.memory import MemoryFileSystem
from helpers import equal, fewer_sentences, records, summary
from loading_helpers import Numbers, Sentences
from simulated_pod import DEVICES, TRAINING, Meeting, Pod, this_host

from data import tagging as tagging_data
from data import text, vocabulary, wmt
from data.batching import Buckets
from train import dlrm, glue, pretrain, resnet50, tagging, transformer, translate
from train.common import checkpoint, device, files, loading
from train.common.mesh import Layout, Mesh
from train.common.run_folder import RunFolder
from train.common.sharding import gather
from train.common.xla import backend as xla

HOSTS = 4  # of a whole training; 2 are tested where a run is stopped


# ---- stand-ins for the models --------------------------------------------------------------------
# They give numbers that differ between examples and do not depend on the hosts.

# In the order of the numbers that `of_step` gives them: each is less than the one before.
STEP_METRICS = ("loss", "accuracy", "gradient_norm", "nll", "words", "top1", "top5")
STEP_COUNTS = ("count", "tokens", "predicted")


def rows_of(batch: dict) -> slice | torch.Tensor:
    """Returns the rows that are examples; what the others hold is of no account."""
    mask = batch.get("mask")
    if mask is None or mask.dim() != 1:
        return slice(None)
    return mask > 0


def fewer_tagged(monkeypatch, sizes: tuple[int, int]) -> None:
    """Gives so many sentences with tags for training and for evaluation."""
    open_splits = tagging_data.open_splits

    def some(sentences: tagging_data.Sentences, size: int) -> tagging_data.Sentences:
        return replace(sentences, words=sentences.words[:size], tags=sentences.tags[:size])

    def open_some(*arguments) -> tagging_data.Splits:
        opened = open_splits(*arguments)
        evaluated = {name: some(one, sizes[1]) for name, one in opened.eval.items()}
        return replace(opened, train=some(opened.train, sizes[0]), eval=evaluated)

    monkeypatch.setattr(tagging_data, "open_splits", open_some)


def digest(batch: dict) -> torch.Tensor:
    """Returns a number between 0 and 1 of all of a batch's examples, in their order."""
    rows = rows_of(batch)
    content = b""
    for key in sorted(batch):
        content += batch[key][rows].contiguous().numpy().tobytes()
    return torch.tensor(zlib.crc32(content) / 2**32)


def of_step(name: str, batch: dict | None) -> dict | None:
    """Stands for a step of training, or for one of evaluation that returns sums over a batch."""
    if name == "gradient_step":
        return None

    number = digest(batch or {})
    sums = {}
    for divisor, metric in enumerate(STEP_METRICS, 1):
        sums[metric] = number / divisor
    for count in STEP_COUNTS:
        sums[count] = torch.tensor(1.0)
    return sums


def of_resnet50(name: str, batch: dict) -> dict:
    sums = of_step(name, batch)
    if name == "eval_step":
        decoded = batch["label"] >= 0
        sums["count"] = (batch["mask"] * decoded).sum()
    return sums


def of_glue(name: str, batch: dict) -> dict | torch.Tensor:
    """Gives logits of MNLI's three labels in evaluation."""
    if name != "eval_step":
        return of_step(name, batch)
    positions = torch.arange(1, batch["input_ids"].shape[1] + 1)
    sums = (batch["input_ids"] * batch["attention_mask"] * positions).sum(1)
    return torch.sin(0.37 * sums[:, None] * torch.arange(1, 4))


def of_tagging(name: str, batch: dict) -> dict | torch.Tensor:
    """Gives each token a class by its number in evaluation."""
    if name != "eval_step":
        return of_step(name, batch)
    classes = batch["input_ids"] % 7
    return {"classes": classes.int(), "loss": torch.sin(batch["input_ids"].sum(1))}


def of_transformer(name: str, batch: dict | None) -> dict | None:
    if name != "translate_step":
        return of_step(name, batch)
    wrong = batch["source"].sum(1, keepdim=True) % 3 == 0  # every third sentence
    return {"tokens": torch.where(wrong, batch["source"], batch["target"])}


# ---- the scripts ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Script:
    """A script with a small configuration."""

    module: object
    config: object
    results: Callable | None  # see Pod
    sizes: tuple[int, int]  # examples for training and evaluation; 7 or 13 more than whole batches
    patch: Callable  # makes the data sets of these sizes
    # Batches after which two resumed runs are stopped, both within the second epoch.
    first_stop: int
    second_stop: int


def synthetic(script, **changes) -> Callable:
    """Returns a patch for a script that makes its own examples."""

    def patch(monkeypatch, sizes) -> None:
        constants = {"SYNTHETIC_TRAIN": sizes[0], "SYNTHETIC_EVAL": sizes[1], **changes}
        for name, value in constants.items():
            monkeypatch.setattr(script, name, value)

    return patch


def sentence_pairs(monkeypatch, sizes) -> None:
    synthetic_pairs = wmt.SyntheticPairs

    def of_size(split, seed):
        size = sizes[0] if split == "train" else sizes[1]
        return synthetic_pairs(split, size, seed)

    monkeypatch.setattr(wmt, "SyntheticPairs", of_size)


def rows_of_text(monkeypatch, sizes) -> None:
    synthetic_text = text.SyntheticText

    def of_size(split, *rest):
        size = sizes[0] if split == "train" else sizes[1]
        return synthetic_text(split, *rest, rows=size)

    monkeypatch.setattr(text, "SyntheticText", of_size)


RESNET50 = replace(resnet50.TINY, batch_size=16, epochs=3, log_every=1, save_every=2)
DLRM = replace(
    dlrm.TINY,
    plan="exchange",
    shuffle="batches",
    batch_size=16,
    epochs=3,
    log_every=1,
    save_every=2,
)
GLUE = replace(
    glue.TINY,
    task="mnli",
    batch_size=8,
    lengths=(24, 32),
    epochs=3,
    group_by_length=True,
    log_every=1,
    eval_every=5,
)
TAGGING = replace(
    tagging.TINY,
    batch_size=8,
    lengths=(16,),
    epochs=3,
    group_by_length=True,
    log_every=1,
    eval_every=5,
)
TRANSFORMER = replace(
    transformer.TINY,
    batch_tokens=128,
    updates=21,
    warmup_updates=5,
    log_every=1,
    eval_every=10,
    save_every=2,
)
PACKED = replace(TRANSFORMER, pack=True, lengths=(16,), update_every=2, updates=12)
PRETRAIN = replace(
    pretrain.TINY,
    model="xlnet",
    update_every=2,
    batch_size=16,
    steps=12,
    warmup_steps=3,
    log_every=1,
    eval_every=5,
)

CLICKS = synthetic(dlrm, SYNTHETIC_ROWS=(20, 50, 100, 400, 60, 60, 80, 300), EVAL_BATCH=16)

SCRIPTS = {
    "resnet50": Script(
        module=resnet50,
        config=RESNET50,
        results=of_resnet50,
        sizes=(61, 23),
        patch=synthetic(resnet50),
        first_stop=4,
        second_stop=5,
    ),
    "dlrm": Script(
        module=dlrm,
        config=DLRM,
        results=None,
        sizes=(61, 23),
        patch=CLICKS,
        first_stop=4,
        second_stop=5,
    ),
    "glue": Script(
        module=glue,
        config=GLUE,
        results=of_glue,
        sizes=(61, 45),
        patch=fewer_sentences,
        first_stop=10,
        second_stop=13,
    ),
    "tagging": Script(
        module=tagging,
        config=TAGGING,
        results=of_tagging,
        sizes=(61, 45),
        patch=fewer_tagged,
        first_stop=10,
        second_stop=13,
    ),
    "transformer": Script(
        module=transformer,
        config=TRANSFORMER,
        results=of_transformer,
        sizes=(77, 29),
        patch=sentence_pairs,
        first_stop=10,
        second_stop=12,
    ),
    "transformer-packed": Script(
        module=transformer,
        config=PACKED,
        results=of_transformer,
        sizes=(77, 29),
        patch=sentence_pairs,
        first_stop=8,
        second_stop=10,
    ),
    "pretrain": Script(
        module=pretrain,
        config=PRETRAIN,
        results=of_step,
        sizes=(55, 29),
        patch=rows_of_text,
        first_stop=8,
        second_stop=10,
    ),
}


def train(
    name: str,
    hosts: int,
    folder,
    /,
    stop_after: dict[int, int] | None = None,
    agree_every: int | None = 1,
    devices: int = DEVICES,
    patch: Callable | None = None,
    **changes,
) -> Pod:
    """Trains a script on so many hosts; returns the pod, whatever became of it.

    Args:
        stop_after: host -> training batches after which it gets SIGTERM.
        patch: called with a MonkeyPatch and the pod before the hosts start.
        changes: of the script's config; one that is a function is called on each host.
    """
    script = SCRIPTS[name]
    pod = Pod(hosts, folder, script.results, devices, stop_after, agree_every)

    def patches(monkeypatch) -> None:
        script.patch(monkeypatch, script.sizes)
        if patch is not None:
            patch(monkeypatch, pod)

    def work():
        values = {"runs": f"{folder}/runs"}
        for key, value in changes.items():
            values[key] = value() if callable(value) else value
        return script.module.main(replace(script.config, **values))

    return pod.run(work, patches)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., Pod]:
    """trained("glue", hosts=1): a whole training, made once."""

    @functools.cache
    def get(name: str, hosts: int = HOSTS) -> Pod:
        return train(name, hosts, tmp_path_factory.mktemp("pod")).succeeded()

    return get


# What is evaluated per token reaches the hosts as GLUE's logits do.
MARKED = []
for script_name in SCRIPTS:
    is_slow = script_name == "tagging"
    MARKED.append(pytest.param(script_name, marks=pytest.mark.slow if is_slow else ()))
every_script = pytest.mark.parametrize("name", MARKED)


def run_folder(pod: Pod) -> str:
    (name,) = os.listdir(f"{pod.folder}/runs")
    return f"{pod.folder}/runs/{name}"


def training(pod: Pod) -> list[dict]:
    """Returns the batches that a pod has trained on."""
    return [step.batch for step in pod.steps if step.name in TRAINING]


def assert_equal(batches: list[dict], others: list[dict]) -> None:
    """Asserts that both have the same examples at the same positions."""
    for step, (batch, other) in enumerate(zip(batches, others, strict=True)):
        assert batch.keys() == other.keys(), step
        for key in batch:
            rows = slice(None) if key == "mask" else rows_of(batch)
            assert torch.equal(batch[key][rows], other[key][rows]), (step, key)


# ---- what the hosts read -------------------------------------------------------------------------
@every_script
def test_hosts_together_have_the_batches_of_one_host(trained, name):
    """Where one host is missing, or comes with another shape, the pod fails before."""
    alone = trained(name, 1)
    pod = trained(name)

    assert [step.name for step in pod.steps] == [step.name for step in alone.steps]
    assert_equal([step.batch for step in pod.steps], [step.batch for step in alone.steps])
    batches = training(alone)
    assert len({digest(batch) for batch in batches}) == len(batches), "all batches are alike"


@every_script
def test_all_hosts_wait_at_the_same_points(trained, name):
    pod = trained(name)

    assert all(meetings == pod.meetings[0] for meetings in pod.meetings)
    training_steps = {meeting for meeting in pod.meetings[0] if meeting.name in TRAINING}
    shapes = 2 if name in ("glue", "transformer") else 1
    assert len(training_steps) == shapes


@every_script
def test_every_host_has_the_metrics_of_one_host(trained, name):
    alone = trained(name, 1)
    pod = trained(name)

    assert pod.outcomes == alone.outcomes * HOSTS
    assert records(run_folder(pod)) == records(run_folder(alone))
    metrics = alone.outcomes[0]
    assert len(set(metrics.values())) > 1, "metrics that differ, of both splits of MNLI"
    for one in (alone, pod):
        assert summary(run_folder(one))["metrics"] == metrics


@every_script
def test_resume_is_exact_on_any_number_of_hosts(trained, name, tmp_path):
    """1 host, stopped in the second epoch; from there 2 hosts, both stopped by a signal to one of
    them; 4 hosts to the end."""
    script = SCRIPTS[name]
    whole = trained(name, 1)
    second_batches = script.second_stop - script.first_stop

    first = train(name, 1, tmp_path, stop_after={0: script.first_stop}).stopped()
    second = train(name, 2, tmp_path, stop_after={1: second_batches}).stopped()
    third = train(name, 4, tmp_path).succeeded()

    assert second.trained == [second_batches] * 2
    assert second.meetings[0] == second.meetings[1]
    assert len(training(first)) == script.first_stop
    assert len(training(second)) == second_batches
    assert len(training(third)) == len(training(whole)) - script.second_stop
    assert_equal(training(first) + training(second) + training(third), training(whole))
    assert records(run_folder(third)) == records(run_folder(whole))
    assert third.outcomes == whole.outcomes * 4


# ---- what the host computes metrics from ---------------------------------------------------------
# Each host must have the predictions of all: a result that is sharded is not whole on any.


class Answer(torch.nn.Module):
    """Stands for a model."""

    config = SimpleNamespace(model_type="roberta")
    arch = SimpleNamespace(max_positions=8)

    def forward(self, *_, **inputs):
        if inputs:
            return SimpleNamespace(logits=torch.ones(4, 2))
        return torch.ones(4)


@pytest.fixture
def replicated(monkeypatch) -> list[torch.Tensor]:
    """Records the tensors that a step makes whole on every device; the step is not compiled."""
    found = []
    monkeypatch.setattr(device, "replicate", lambda tensor, mesh: found.append(tensor))
    monkeypatch.setattr(device, "compiled", lambda step, mesh, max_graphs=1: step)
    return found


@pytest.fixture
def pod_mesh() -> Mesh:
    """The mesh of a host of a simulated pod."""
    return Pod(1, "", of_step).mesh(0)


def assert_same_objects(results: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert list(map(id, results)) == list(map(id, others))


def test_logits_of_glues_evaluation_are_on_every_device(replicated, pod_mesh):
    ones = torch.ones(4)
    batch = {"input_ids": ones, "attention_mask": ones}

    logits = glue.eval_step(glue.State(Answer(), None), batch, GLUE, pod_mesh)

    assert_same_objects([logits], replicated)


def test_tags_of_an_evaluation_are_on_every_device(replicated, pod_mesh):
    batch = dict.fromkeys(("input_ids", "attention_mask", "labels"), torch.ones(4, 3).long())
    model = Answer()
    model.forward = lambda **_: SimpleNamespace(logits=torch.ones(4, 3, 5))

    found = tagging.eval_step(tagging.State(model, None), batch, TAGGING, pod_mesh)

    assert_same_objects(found.values(), replicated)


def test_clicks_of_dlrms_evaluation_are_on_every_device(replicated, pod_mesh):
    ones = torch.ones(4)
    batch = dict.fromkeys(("dense", "ids", "label", "mask"), ones)
    state = dlrm.State(Answer(), lambda *_: ones, None)

    predictions = dlrm.eval_step(state, batch, DLRM, pod_mesh)

    assert_same_objects([predictions], replicated)


def test_translated_tokens_are_on_every_device(replicated, pod_mesh, monkeypatch):
    searched = (torch.ones(4, 2, 8), torch.ones(4, 2))
    monkeypatch.setattr(translate.beam_search, "search", lambda *_: searched)
    translator = translate.Translator(Answer(), pod_mesh, TRANSFORMER)

    results = translator.translate_step(Answer(), {"source": torch.ones(4, 8)})

    assert len(results) == 2
    assert_same_objects(list(results.values()), replicated)


# ---- files ---------------------------------------------------------------------------------------

# Files of a run that there is one of.
ONCE = ("config.json", "metrics.jsonl", "summary.json")


@every_script
def test_only_the_main_process_writes_except_dlrms_tables(trained, name):
    pod = trained(name)

    by_others = [write for write in pod.written if write.host != 0]
    for write in by_others:
        is_table = f"tables-{write.host:05d}." in write.path
        is_folder = write.event == "os.mkdir" and "checkpoints" in write.path
        assert is_table or is_folder, (write.host, write.path)
    assert bool(by_others) == (name == "dlrm")

    # Every write was seen, and by whom: each file was written by somebody.
    writers = {}
    for write in pod.written:
        file = os.path.basename(write.path).removesuffix(".tmp")
        writers[file] = write.host
    for file in (*ONCE, "COMPLETE", "state.safetensors"):
        assert writers[file] == 0, file

    config = json.load(open(f"{run_folder(pod)}/config.json"))
    (start,) = config["starts"]
    assert start["devices"]["hosts"] == HOSTS
    assert os.listdir(f"{run_folder(pod)}/export")


@pytest.mark.parametrize("name", ["pretrain", "transformer"])
def test_a_state_cut_over_hosts_is_made_whole_by_all(trained, name, tmp_path):
    """Its shards are not here: where the hosts would run the program that joins them, they meet."""

    def patch(patched, pod):
        def on_every_device(tensor):
            pod.meet(Meeting("whole", tuple(tensor.shape)))
            return tensor

        patched.setattr(gather, "on_every_device", on_every_device)

    def newest_state(pod) -> Path:
        checkpoints = Path(run_folder(pod), "checkpoints")
        return max(checkpoints.iterdir()) / "state.safetensors"

    options = {"devices": 4, "patch": patch, "layout": Layout("data=2,model=2", "full")}
    stopped = train(name, 2, tmp_path, stop_after={1: 4}, **options).stopped()
    saved = newest_state(stopped).read_bytes()
    pod = train(name, 4, tmp_path, **options).succeeded()
    alone = trained(name, 1)

    assert {write.host for write in [*stopped.written, *pod.written]} == {0}
    assert records(run_folder(pod)) == records(run_folder(alone))
    assert pod.meetings[3] == pod.meetings[0]
    assert newest_state(pod).read_bytes() == saved, "steps are stand-ins, which change no weight"
    joined = sum(meeting.name == "whole" for meeting in pod.meetings[0])
    assert joined > len(safetensors.torch.load(saved)), "checkpoints and an export"


def test_all_hosts_skip_a_checkpoint_that_one_host_finds_damaged(trained, tmp_path):
    stopped = train("dlrm", 2, tmp_path, stop_after={0: 5, 1: 5}).stopped()
    checkpoints = f"{run_folder(stopped)}/checkpoints"
    damage(checkpoints, 5, "tables-00001.safetensors", lambda content: flip(content, -1))

    again = train("dlrm", 2, tmp_path).succeeded()

    whole = trained("dlrm", 1)
    assert_equal(training(again), training(whole)[4:])
    assert again.outcomes == whole.outcomes * 2


def test_ids_without_a_slot_stop_every_host_before_a_checkpoint(tmp_path):
    pod = train("dlrm", 2, tmp_path, exchange_room=(0.1, 1.0))

    pod.refused("ids found no slot in the exchange")
    assert pod.trained[0] == pod.trained[1]
    assert pod.trained[0] > 0
    assert not [write for write in pod.written if write.path.endswith("COMPLETE")]


@dataclass
class BucketRun:
    """A run of DLRM on two hosts whose folder is in a bucket."""

    url: str
    pod: Pod
    files: set[tuple[int, str]]  # (host, name) of those in the bucket


def train_in_bucket(url: str) -> Pod:
    """Trains DLRM, or continues; the pod has what is written to any temporary folder."""
    runs, _, name = url.rpartition("/")
    return train("dlrm", 2, tempfile.gettempdir(), runs=runs, name=name).succeeded()


@pytest.fixture(scope="module")
def bucket_run() -> BucketRun:
    files_in_bucket = set()
    real_open = MemoryFileSystem._open

    def recorded(self, path, mode="rb", **options):
        if "r" not in mode:
            files_in_bucket.add((this_host(), os.path.basename(path)))
        return real_open(self, path, mode, **options)

    url = "memory://multi-host/run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", recorded)
        pod = train_in_bucket(url)
    return BucketRun(url, pod, files_in_bucket)


def test_only_the_main_process_writes_to_a_bucket(bucket_run, trained):
    """Other hosts leave their shards of tables there, and nothing on their disks."""
    by_others = {name for host, name in bucket_run.files if host != 0}
    assert by_others == {"tables-00001.safetensors", "tables-00001.json"}
    assert {(0, name) for name in (*ONCE, "COMPLETE")} < bucket_run.files
    assert {write.host for write in bucket_run.pod.written} <= {0, None}

    alone = trained("dlrm", 1)
    assert bucket_run.pod.outcomes == alone.outcomes * 2
    table = "export/tables/C4.safetensors"
    exported = files.load_weights(f"{bucket_run.url}/{table}")
    assert equal(exported, files.load_weights(f"{run_folder(alone)}/{table}"))


def test_a_finished_run_in_a_bucket_is_not_trained_again(bucket_run):
    again = train_in_bucket(bucket_run.url)

    assert again.outcomes == bucket_run.pod.outcomes
    assert again.trained == [0, 0]


def test_the_mean_of_checkpoints_waits_for_the_last_one(tmp_path):
    write = checkpoint.Checkpointer._write

    def patch(patched, pod):
        def slow(self, step, *state):
            with pod.turn:
                if step == TRANSFORMER.updates:
                    pod.wait_for_others()
            write(self, step, *state)

        patched.setattr(checkpoint.Checkpointer, "_write", slow)

    train("transformer", 2, tmp_path, patch=patch).succeeded()


def test_a_host_behind_the_others_makes_no_mean_of_its_own(tmp_path):
    """A listing of a network file system may be a minute old."""
    average = transformer.average_checkpoints

    def behind(checkpoints, *arguments):
        known = checkpoints.complete_steps()
        if this_host() != 0:
            known = known[:-1]
        checkpoints.complete_steps = lambda: known
        return average(checkpoints, *arguments)

    def patch(patched, _):
        patched.setattr(transformer, "average_checkpoints", behind)

    pod = train("transformer", 2, tmp_path, patch=patch)

    pod.refused("disagree about the checkpoints to average")


# ---- signals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [2, None])
@pytest.mark.parametrize(("name", "updates"), [("transformer", 10), ("transformer-packed", 5)])
def test_hosts_agree_about_a_signal_as_rarely_as_the_script_says(name, updates, late, tmp_path):
    """Each time waits for the device. A packed update is two batches.

    late: batches after which the other host gets the signal, too.
    """
    stop_after = {1: 3}
    if late is not None:
        stop_after[0] = 3 + late

    pod = train(name, 2, tmp_path, stop_after=stop_after, agree_every=None).stopped()

    assert pod.trained == [10, 10]
    assert pod.meetings[0] == pod.meetings[1]
    assert os.path.exists(f"{run_folder(pod)}/checkpoints/step_{updates:08d}/COMPLETE")


# ---- rows and seeds ------------------------------------------------------------------------------

# Global numbers of the devices that each host of a 4x4 slice (v5litepod-16, v6e-16) has: they
# follow the rows of the slice, and a host has a square of it. As libtpu describes v5e:4x4 and
# v6e:4x4 (PJRT_DeviceDescription_ProcessIndex).
HOSTS_OF_4X4 = [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]


@pytest.fixture
def set_up_on_host(monkeypatch) -> Callable[[int], Mesh]:
    """set_up_on_host(2): what device.setup returns on this host of a 4x4 slice."""
    checked = []
    monkeypatch.setattr(xla.xr, "global_runtime_device_count", lambda: 16)
    monkeypatch.setattr(xla.xr, "process_count", lambda: len(HOSTS_OF_4X4))
    monkeypatch.setattr(xla, "_check_places", checked.append)

    def set_up(host: int) -> Mesh:
        names = [f"TPU:{number}" for number in HOSTS_OF_4X4[host]]
        monkeypatch.setattr(xla.xr, "process_index", lambda: host)
        monkeypatch.setattr(xla.torch_xla._XLAC, "_xla_get_runtime_devices", lambda: names)
        mesh = device.setup(5, "float32")
        assert checked[-1] is mesh
        assert mesh.process_index == host
        assert mesh.process_count == 4
        assert mesh.main_process == (host == 0)
        return mesh

    return set_up


ROWS_AND_BATCHES = [
    pytest.param(Numbers(32), 16, id="examples"),
    pytest.param(Sentences(32), Buckets([4] * 32, [(16, 4)]), id="plan"),
]


@pytest.mark.parametrize(("dataset", "batches"), ROWS_AND_BATCHES)
def test_rows_are_in_the_order_of_the_devices(set_up_on_host, dataset, batches, monkeypatch):
    """Each host's share of a batch is cut in equal pieces for its devices in the order of their
    numbers (torch_xla's GetShardIndicesForMinibatchTensor), and the batch on all devices has them
    in the order of the mesh."""
    monkeypatch.setattr(loading.Loader, "_upload", lambda self, batch: batch)

    rows = {}
    for host, devices in enumerate(HOSTS_OF_4X4):
        mesh = set_up_on_host(host)
        with loading.parallel_loader(dataset, batches, mesh, train=False) as loader:
            loaded = next(loader)["index"].tolist()
        rows.update(zip(devices, loaded, strict=True))

    assert [rows[number] for number in mesh.spmd.device_ids] == list(range(16))


def test_new_weights_and_dropout_are_the_same_on_every_host(set_up_on_host):
    draws = []
    for host in range(len(HOSTS_OF_4X4)):
        set_up_on_host(host)
        draws.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), xla.xm.get_rng_state()))

    assert all(draw == draws[0] for draw in draws)


def test_batches_of_sentences_divide_by_the_devices(tmp_path):
    """384 tokens are 24 rows of length 16."""
    train("transformer", 4, tmp_path, devices=16, batch_tokens=384, updates=4).succeeded()


# ---- what hosts compare --------------------------------------------------------------------------
def test_distilberts_trial_waits_for_the_teacher_that_it_trains(tmp_path, capsys):
    export = pretrain.export

    def patch(patched, pod):
        def slow(*arguments):
            if this_host() == 0:
                pod.wait_for_others()
            export(*arguments)

        patched.setattr(pretrain, "export", slow)

    def config_of(run: str) -> dict:
        return json.load(open(f"{tmp_path}/runs/{run}/config.json"))["config"]

    changes = {"model": "distilbert", "steps": 3, "warmup_steps": 1, "name": "run"}
    metrics = train("pretrain", 2, tmp_path, patch=patch, **changes).succeeded().outcomes

    (teachers_run,) = set(os.listdir(tmp_path / "runs")) - {"run"}
    assert config_of(teachers_run)["model"] == "bert"
    assert config_of("run")["teacher"] == f"{tmp_path}/runs/{teachers_run}/export"

    assert train("pretrain", 2, tmp_path, **changes).succeeded().outcomes == metrics
    assert capsys.readouterr().out.count("is finished") == 2


def write_images(folder: Path) -> None:
    """Writes images of two classes; every fifth is broken."""
    rng = np.random.default_rng(0)
    for split, size in (("train", 39), ("val", 29)):
        for number in range(size):
            path = folder / split / f"class {number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
            PIL.Image.fromarray(pixels).save(path)
            if number % 5 == 0:
                path.write_bytes(b"no picture")


@pytest.mark.filterwarnings("ignore:skipped, ")
def test_broken_images_of_all_hosts_are_counted(tmp_path, capsys):
    write_images(tmp_path / "images")
    changes = {
        "data": f"{tmp_path}/images",
        "epochs": 1,
        "warmup_epochs": 0.0,
        "skip_broken": True,
    }

    said = []
    for hosts in (1, 4):
        train("resnet50", hosts, tmp_path / str(hosts), **changes).succeeded()
        lines = capsys.readouterr().out.splitlines()
        said.append([line for line in lines if "decoded" in line])

    assert len(said[0]) > 1
    assert said[0] == said[1]


@pytest.fixture
def own_runs(tmp_path) -> Callable[[], str]:
    """Returns another folder of runs on each host."""
    return lambda: f"{tmp_path}/{this_host()}"


def test_hosts_with_their_own_folders_are_refused_before_a_step(own_runs, tmp_path):
    pod = train("resnet50", 2, tmp_path, runs=own_runs, name="new")

    pod.refused(f"{tmp_path}/[01]/new.*--runs gs://bucket/runs")
    assert pod.trained == [0, 0]


def test_hosts_with_their_own_folders_are_refused_if_one_is_done(own_runs, tmp_path):
    train("resnet50", 1, tmp_path, runs=own_runs, name="done").succeeded()
    train("resnet50", 2, tmp_path, runs=own_runs, name="done").refused("hosts share")

    # And where the other host has all but the end.
    no_summary = shutil.ignore_patterns("summary.json")
    shutil.copytree(tmp_path / "0", tmp_path / "1", ignore=no_summary)
    train("resnet50", 2, tmp_path, runs=own_runs, name="done").refused("hosts share")


def test_a_host_that_sees_the_folder_late_waits_for_it(tmp_path, monkeypatch):
    """A network file system may remember for a while that there was no such file."""
    looks = []
    read = RunFolder.read

    def late(self, name):
        if this_host() == 1 and name == "config.json":
            looks.append(name)
            if len(looks) < 5:
                return None
        return read(self, name)

    monkeypatch.setattr(RunFolder, "read", late)
    train("resnet50", 2, tmp_path, name="mine").succeeded()

    assert len(looks) >= 5


def test_the_trial_of_xlnet_runs_on_several_hosts(tmp_path):
    """Each host learns the words; they are the same."""
    train("glue", 2, tmp_path, model="xlnet", epochs=1).succeeded()


def test_hosts_that_learn_different_words_are_refused(tmp_path):
    learn = vocabulary.learn

    def learn_from_fewer(lines, *rest, **options):
        if this_host() == 1:
            lines = lines[:20]
        return learn(lines, *rest, **options)

    def patch(monkeypatch, pod):
        monkeypatch.setattr(vocabulary, "learn", learn_from_fewer)

    train("glue", 2, tmp_path, patch=patch).refused("hosts disagree about the words")


@pytest.mark.parametrize("others", [b"", b"\xff\n"])
def test_translate_refuses_hosts_with_other_lines(tmp_path, others):
    def read() -> bytes:
        return b"w1 w2 w3\n" if this_host() == 0 else others

    stdin = SimpleNamespace(buffer=SimpleNamespace(read=read))

    def patch(monkeypatch):
        export = SimpleNamespace(settings={"precision": "float32"})
        monkeypatch.setattr(translate, "read_export", lambda _: export)
        monkeypatch.setattr(translate, "restore", lambda *_: (None, SimpleNamespace(pieces="")))
        monkeypatch.setattr(translate, "sys", SimpleNamespace(stdin=stdin, stdout=sys.stdout))

    config = translate.Config(model_dir="export")
    pod = Pod(2, tmp_path, of_step).run(lambda: translate.main(config), patch)

    pod.refused("translation is for one host")
