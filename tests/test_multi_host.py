"""Every script on a pod of 2 and 4 hosts: the data that each host reads, the points at which hosts
wait for each other, the files that they write. The hosts are processes; pod_host.py says what of
them is real.
"""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import best_runs
import numpy as np
import PIL.Image
import pod_runs
import pytest
import safetensors.torch
import torch
from checkpoints import damage, flip
from helpers import equal, records, summary
from loading_helpers import Numbers, Sentences
from pod_host import DEVICES, TRAINING, Deadlock, Job
from pod_processes import Pod, Pods
from pod_runs import DLRM, GLUE, SCRIPTS, TAGGING, TRANSFORMER, digest, of_step, rows_of

from data.batching import Buckets
from errors import LostProcess
from train import dlrm, glue, tagging, translate
from train.common import device, files, loading
from train.common.mesh import Layout, Mesh
from train.common.xla import backend as xla

HOSTS = 4  # of a whole training; 2 are tested where a run is stopped


@pytest.fixture(scope="module")
def pods(tmp_path_factory) -> Iterator[Pods]:
    """Runs pods, by one process for all tests of this file that has the imports."""
    with Pods(tmp_path_factory.mktemp("hosts")) as pods:
        yield pods


@pytest.fixture(scope="module")
def train(pods) -> Callable[..., Pod]:
    """train("glue", 2, folder) trains a script on two hosts; it returns the pod, whatever became of
    it."""

    def on_hosts(
        name: str,
        hosts: int,
        folder,
        /,
        goes_wrong: Callable | None = None,
        stop_after: dict[int, int] | None = None,
        agree_every: int | None = 1,
        devices: int = DEVICES,
        **changes,
    ) -> Pod:
        work = partial(pod_runs.train, name=name, goes_wrong=goes_wrong, changes=changes)
        results = SCRIPTS[name].results
        job = Job(hosts, work, str(folder), results, devices, stop_after or {}, agree_every)
        return pods.run(job)

    return on_hosts


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> Callable[..., Pod]:
    """trained("glue", hosts=1): a whole training, made once."""

    @functools.cache
    def get(name: str, hosts: int = HOSTS) -> Pod:
        return train(name, hosts, tmp_path_factory.mktemp("pod")).succeeded()

    return get


# What is evaluated per token reaches the hosts as GLUE's logits do, and an update of two batches as
# those of pretraining.
MARKED = []
for script_name in SCRIPTS:
    is_slow = script_name in ("tagging", "transformer-packed")
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
            assert np.array_equal(batch[key][rows], other[key][rows]), (step, key)


# Of DLRM's records, where each host is one device: how full the slots of the exchange are depends
# on the number of devices. `records` leaves no "timing".
NOT_COMPARED = ("dropped", "pair_load", "update_load", "timing")
ROUNDING = 2e-5  # relative, after updates of Adam, which divides by numbers near 0


def assert_same_results(pod: Pod, alone: Pod) -> None:
    """Asserts that all hosts of a pod have the metrics and the records of one host.

    DLRM's steps are real: gradients of several processes are added up in another order.
    """
    lines = records(run_folder(pod))
    expected = records(run_folder(alone))
    if not alone.has_real_steps:
        assert pod.outcomes == alone.outcomes * pod.hosts
        assert lines == expected
        return

    assert pod.outcomes == pod.outcomes[:1] * pod.hosts
    assert pod.outcomes[0] == pytest.approx(alone.outcomes[0], rel=ROUNDING)
    for record in (*lines, *expected):
        for name in NOT_COMPARED:
            record.pop(name, None)
    for record, other in zip(lines, expected, strict=True):
        assert record == pytest.approx(other, rel=ROUNDING)


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

    assert_same_results(pod, alone)
    metrics = alone.outcomes[0]
    assert len(set(metrics.values())) > 1, "metrics that differ, of both splits of MNLI"
    for one in (alone, pod):
        assert summary(run_folder(one))["metrics"] == one.outcomes[0]


@every_script
def test_resume_is_exact_on_any_number_of_hosts(train, trained, name, tmp_path):
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
    assert_same_results(third, whole)


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


def assert_same_objects(results: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert list(map(id, results)) == list(map(id, others))


def test_logits_of_glues_evaluation_are_on_every_device(replicated, mesh):
    ones = torch.ones(4)
    batch = {"input_ids": ones, "attention_mask": ones}

    logits = glue.eval_step(glue.State(Answer(), None), batch, GLUE, mesh)

    assert_same_objects([logits], replicated)


def test_tags_of_an_evaluation_are_on_every_device(replicated, mesh):
    batch = dict.fromkeys(("input_ids", "attention_mask", "labels"), torch.ones(4, 3).long())
    model = Answer()
    model.forward = lambda **_: SimpleNamespace(logits=torch.ones(4, 3, 5))

    found = tagging.eval_step(tagging.State(model, None), batch, TAGGING, mesh)

    assert_same_objects(found.values(), replicated)


def test_clicks_of_dlrms_evaluation_are_on_every_device(replicated, mesh):
    ones = torch.ones(4)
    batch = dict.fromkeys(("dense", "ids", "label", "mask"), ones)
    state = dlrm.State(Answer(), lambda *_: ones, None)

    predictions = dlrm.eval_step(state, batch, DLRM, mesh)

    assert_same_objects([predictions], replicated)


def test_translated_tokens_are_on_every_device(replicated, mesh, monkeypatch):
    searched = (torch.ones(4, 2, 8), torch.ones(4, 2))
    monkeypatch.setattr(translate.beam_search, "search", lambda *_: searched)
    translator = translate.Translator(Answer(), mesh, TRANSFORMER)

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
def test_a_state_cut_over_hosts_is_made_whole_by_all(train, trained, name, tmp_path):
    """Its shards are not here: where the hosts would run the program that joins them, each says
    so."""

    def newest_state(pod) -> Path:
        checkpoints = Path(run_folder(pod), "checkpoints")
        return max(checkpoints.iterdir()) / "state.safetensors"

    cut = pod_runs.weights_are_cut_over_hosts
    options = {"devices": 4, "goes_wrong": cut, "layout": Layout("data=2,model=2", "full")}
    stopped = train(name, 2, tmp_path, stop_after={1: 4}, **options).stopped()
    saved = newest_state(stopped).read_bytes()
    pod = train(name, 4, tmp_path, **options).succeeded()
    alone = trained(name, 1)

    assert {write.host for write in [*stopped.written, *pod.written]} == {0}
    assert records(run_folder(pod)) == records(run_folder(alone))
    assert stopped.meetings[1] == stopped.meetings[0]
    assert all(meetings == pod.meetings[0] for meetings in pod.meetings)
    assert newest_state(pod).read_bytes() == saved, "steps are stand-ins, which change no weight"
    joined = sum(meeting.name == "whole" for meeting in pod.meetings[0])
    assert joined > len(safetensors.torch.load(saved)), "checkpoints and an export"


def test_all_hosts_skip_a_checkpoint_that_one_host_finds_damaged(train, trained, tmp_path):
    stopped = train("dlrm", 2, tmp_path, stop_after={0: 5, 1: 5}).stopped()
    checkpoints = f"{run_folder(stopped)}/checkpoints"
    damage(checkpoints, 5, "tables-00001.safetensors", lambda content: flip(content, -1))

    again = train("dlrm", 2, tmp_path).succeeded()

    whole = trained("dlrm", 2)
    assert_equal(training(again), training(whole)[4:])
    assert again.outcomes == whole.outcomes


def test_ids_without_a_slot_stop_every_host_before_a_checkpoint(train, tmp_path):
    pod = train("dlrm", 2, tmp_path, exchange_room=(0.1, 1.0))

    pod.refused("ids found no slot in the exchange")
    assert pod.trained[0] == pod.trained[1]
    assert pod.trained[0] > 0
    assert not [write for write in pod.written if write.path.endswith("COMPLETE")]


def train_in_bucket(train, url: str) -> Pod:
    """Trains DLRM, or continues; the pod has what is written to any temporary folder."""
    runs, _, name = url.rpartition("/")
    return train("dlrm", 2, tempfile.gettempdir(), runs=runs, name=name).succeeded()


@pytest.fixture(scope="module")
def bucket_run(train, tmp_path_factory) -> tuple[str, Pod]:
    """The URL of a run in a bucket, and the pod that has trained it."""
    url = f"bucket://{tmp_path_factory.mktemp('bucket')}/runs/run"
    return url, train_in_bucket(train, url)


def test_only_the_main_process_writes_to_a_bucket(bucket_run, trained):
    """Other hosts leave their shards of tables there, and nothing on their disks."""
    url, pod = bucket_run
    bucket = os.path.relpath(url.removeprefix("bucket://"), pod.folder)
    in_bucket = set()
    elsewhere = set()
    for write in pod.written:
        if not write.path.startswith(bucket):
            elsewhere.add(write.host)
        elif write.event == "open":
            in_bucket.add((write.host, os.path.basename(write.path)))

    assert {name for host, name in in_bucket if host != 0} == {
        "tables-00001.safetensors",
        "tables-00001.json",
    }
    assert {(0, name) for name in (*ONCE, "COMPLETE")} < in_bucket
    assert elsewhere == {0}

    shared = trained("dlrm", 2)
    assert pod.outcomes == shared.outcomes
    table = "export/tables/C4.safetensors"
    exported = files.load_weights(f"{url}/{table}")
    assert equal(exported, files.load_weights(f"{run_folder(shared)}/{table}"))


def test_a_finished_run_in_a_bucket_is_not_trained_again(train, bucket_run):
    url, pod = bucket_run
    again = train_in_bucket(train, url)

    assert again.outcomes == pod.outcomes
    assert again.trained == [0, 0]


def test_the_mean_of_checkpoints_waits_for_the_last_one(train, tmp_path):
    train("transformer", 2, tmp_path, pod_runs.last_checkpoint_is_late).succeeded()


def test_a_host_behind_the_others_makes_no_mean_of_its_own(train, tmp_path):
    pod = train("transformer", 2, tmp_path, pod_runs.others_do_not_see_the_last_checkpoint)

    pod.refused("disagree about the checkpoints to average")


# ---- signals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "updates", "late"),
    [
        ("transformer", 10, 2),
        ("transformer-packed", 5, None),
        pytest.param("transformer", 10, None, marks=pytest.mark.slow),
        pytest.param("transformer-packed", 5, 2, marks=pytest.mark.slow),
    ],
)
def test_hosts_agree_about_a_signal_as_rarely_as_the_script_says(
    train, name, updates, late, tmp_path
):
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


def test_batches_of_sentences_divide_by_the_devices(train, tmp_path):
    """384 tokens are 24 rows of length 16."""
    train("transformer", 4, tmp_path, devices=16, batch_tokens=384, updates=4).succeeded()


# ---- what hosts compare --------------------------------------------------------------------------
def test_distilberts_trial_waits_for_the_teacher_that_it_trains(train, tmp_path):
    def config_of(run: str) -> dict:
        return json.load(open(f"{tmp_path}/runs/{run}/config.json"))["config"]

    changes = {"model": "distilbert", "steps": 3, "warmup_steps": 1, "name": "run"}
    pod = train("pretrain", 2, tmp_path, pod_runs.export_is_late, **changes).succeeded()

    (teachers_run,) = set(os.listdir(tmp_path / "runs")) - {"run"}
    assert config_of(teachers_run)["model"] == "bert"
    assert config_of("run")["teacher"] == f"{tmp_path}/runs/{teachers_run}/export"

    again = train("pretrain", 2, tmp_path, **changes).succeeded()
    assert again.outcomes == pod.outcomes
    assert again.printed.count("is finished") == 2


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


def test_broken_images_of_all_hosts_are_counted(train, tmp_path):
    write_images(tmp_path / "images")
    changes = {
        "data": f"{tmp_path}/images",
        "epochs": 1,
        "warmup_epochs": 0.0,
        "skip_broken": True,
    }

    said = []
    for hosts in (1, 4):
        pod = train("resnet50", hosts, tmp_path / str(hosts), **changes).succeeded()
        said.append([line for line in pod.printed.splitlines() if "decoded" in line])

    assert len(said[0]) > 1
    assert said[0] == said[1]


def test_hosts_with_their_own_folders_are_refused_before_a_step(train, tmp_path):
    pod = train("resnet50", 2, tmp_path, runs=f"{tmp_path}/{{host}}", name="new")

    pod.refused(f"{tmp_path}/[01]/new.*--runs gs://bucket/runs")
    assert pod.trained == [0, 0]


def test_hosts_with_their_own_folders_are_refused_if_one_is_done(train, tmp_path):
    done = {"runs": f"{tmp_path}/{{host}}", "name": "done"}
    train("resnet50", 1, tmp_path, **done).succeeded()
    train("resnet50", 2, tmp_path, **done).refused("hosts share")

    # And where the other host has all but the end.
    no_summary = shutil.ignore_patterns("summary.json")
    shutil.copytree(tmp_path / "0", tmp_path / "1", ignore=no_summary)
    train("resnet50", 2, tmp_path, **done).refused("hosts share")


def test_a_host_that_sees_the_folder_late_waits_for_it(train, tmp_path):
    pod = train("resnet50", 2, tmp_path, pod_runs.config_is_seen_late, name="mine").succeeded()

    assert len(pod.notes[1]) >= 5


def test_the_trial_of_xlnet_runs_on_several_hosts(train, tmp_path):
    """Each host learns the words; they are the same."""
    train("glue", 2, tmp_path, model="xlnet", epochs=1).succeeded()


def test_hosts_that_learn_different_words_are_refused(train, tmp_path):
    pod = train("glue", 2, tmp_path, pod_runs.words_are_learnt_from_fewer_lines)

    pod.refused("hosts disagree about the words")


@pytest.mark.parametrize("others", [b"", b"\xff\n"])
def test_translate_refuses_hosts_with_other_lines(pods, tmp_path, others):
    work = partial(pod_runs.translate_lines, lines=[b"w1 w2 w3\n", others])
    pod = pods.run(Job(2, work, str(tmp_path), of_step))

    pod.refused("translation is for one host")


# ---- the best checkpoint -------------------------------------------------------------------------
def test_the_main_process_decides_for_all_hosts(pods, mesh, tmp_path):
    """Also in a resumed run, where it alone has the evaluations before."""
    alone = best_runs.Config(f"{tmp_path}/alone", patience=2)
    expected = best_runs.train(alone, mesh, best_runs.EVALUATIONS)
    config = best_runs.Config(f"{tmp_path}/pod", patience=2)

    def train_on_hosts(stops_at: int) -> Pod:
        work = partial(pod_runs.train_with_patience, config=config, stops_at=stops_at)
        return pods.run(Job(2, work, str(tmp_path), of_step))

    stopped = train_on_hosts(stops_at=4)
    assert [type(outcome) for outcome in stopped.outcomes] == [ZeroDivisionError] * 2
    pod = train_on_hosts(stops_at=0).succeeded()

    assert pod.outcomes == [expected, expected]
    assert best_runs.result(config) == best_runs.result(alone)
    assert {write.host for write in pod.written} == {0}


# ---- the pod itself ------------------------------------------------------------------------------
def test_a_host_that_does_not_come_ends_the_others(pods, tmp_path):
    """In a sentence, and not after half an hour."""
    late = pod_runs.host_comes_too_late
    work = partial(pod_runs.train, name="resnet50", goes_wrong=late, changes={})
    pod = pods.run(Job(2, work, str(tmp_path), of_step, seconds=1))

    for outcome in pod.outcomes:
        assert isinstance(outcome, Deadlock | LostProcess), pod.printed
        assert "for another one" in str(outcome)
    assert pod.trained == [0, 0]
