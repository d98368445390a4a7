"""train/dlrm.py as its users run it: it learns, resumes exactly (on other devices, too), keeps its graph contract,
agrees with torchrec, and refuses bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from data import criteo
from errors import InputError
from train import dlrm
from train.common import checkpoint, cli, device, embedding, files, loading
from train.common.embedding import tables

LEARNS = replace(dlrm.TINY, log_every=16, save_every=48)


def records(path) -> dict[str, dict]:
    """The lines of metrics.jsonl without their timings, by step and kind."""
    lines = [json.loads(line) for line in open(f"{path}/metrics.jsonl")]
    return {f"{line['step']} {'eval' if 'eval/auc' in line else 'train'}": {**line, "timing": None} for line in lines}


def start(config, devices=4) -> subprocess.Popen:
    """The same training in a process group of its own, as the command line starts it, and with a worker process."""
    flags = ["--workers=1"] + [
        f"--{name.replace('_', '-')}={getattr(config, name)}"
        for name in ("runs", "name", "plan", "log_every", "save_every", "optimizer", "lr")
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "train.dlrm", "tiny", *flags],
        env={**os.environ, "CPU_NUM_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output


def wait_for_step(path, step: int, process: subprocess.Popen) -> None:
    """Returns when the process has logged `step`."""
    deadline = time.monotonic() + 300
    while not (os.path.exists(f"{path}/metrics.jsonl") and f'"step": {step},' in open(f"{path}/metrics.jsonl").read()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.02)


def exported(folder) -> dict[str, torch.Tensor]:
    """Everything that an export holds, under torchrec's names."""
    weights = safetensors.torch.load_file(f"{folder}/export/model.safetensors")
    for name in os.listdir(f"{folder}/export/tables"):
        weights |= safetensors.torch.load_file(f"{folder}/export/tables/{name}")
    return weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An uninterrupted run: (its folder, the metrics that main returned, its config)."""
    config = replace(LEARNS, runs=str(tmp_path_factory.mktemp("runs")), name="whole")
    device.reset_graph_report()
    return f"{config.runs}/whole", dlrm.main(config), config


def test_it_learns_more_than_the_dense_features_tell(trained):
    _, metrics, config = trained
    train_set, eval_set = dlrm.open_data(config)
    first, second = (part.batch(np.arange(len(part))) for part in (train_set, eval_set))
    linear = LogisticRegression().fit(first["dense"], first["label"])
    dense_alone = roc_auc_score(second["label"], linear.predict_proba(second["dense"])[:, 1])
    assert 0.6 < dense_alone < 0.7
    assert metrics["auc"] > 0.78
    assert metrics["auc"] < eval_set.perfect_auc() < 0.86
    assert metrics["ne"] < 0.82


def test_without_a_learning_rate_it_does_not(tmp_path):
    metrics = dlrm.main(replace(LEARNS, lr=0.0, runs=str(tmp_path)))
    assert 0.4 < metrics["auc"] < 0.6


def test_the_cross_network_learns(tmp_path):
    config = replace(LEARNS, interaction="dcn", cross=(2, 16), precision="bfloat16", shuffle="batches")
    assert dlrm.main(replace(config, runs=str(tmp_path)))["auc"] > 0.77


def test_run_folder_holds_everything_about_the_run(trained):
    path, metrics, config = trained
    assert {"config.json", "metrics.jsonl", "curves.png", "summary.json", "tb", "checkpoints", "export"} <= set(
        os.listdir(path)
    )
    assert json.load(open(f"{path}/summary.json"))["metrics"] == metrics
    assert len(os.listdir(f"{path}/checkpoints")) == config.keep


def test_graph_contract(trained):
    report = json.load(open(f"{trained[0]}/summary.json"))["report"]
    assert report["recompilations"] == report["fallbacks"] == []


def test_one_device_gives_the_losses_of_four_and_compiles_two_steps(tmp_path):
    # With SGD: adaptive rules turn the last digits of a gradient near 0 into whole steps.
    config = replace(LEARNS, optimizer="sgd", lr=0.5, runs=str(tmp_path), name="four")
    metrics = dlrm.main(config)
    assert "tables: 8 data" in finish(start(replace(config, name="one"), devices=1))
    one, four = records(tmp_path / "one"), records(tmp_path / "four")
    assert one.keys() == four.keys() and len(one) == 18
    for key in one:
        if key.endswith("train"):
            assert one[key]["loss"] == pytest.approx(four[key]["loss"], rel=1e-5), key
    assert abs(four["1 train"]["loss"] - four["256 train"]["loss"]) > 0.05
    summary = json.load(open(tmp_path / "one/summary.json"))
    assert summary["metrics"] == pytest.approx(metrics, rel=1e-5)
    report = summary["report"]
    # The tables' first values, the train step, the evaluation step, and a tiny one, by which hosts compare a number.
    assert report["graphs"] <= 4
    assert report["recompilations"] == report["fallbacks"] == []


def test_killed_and_terminated_it_goes_on_to_the_same_numbers(trained, tmp_path):
    path, _, config = trained
    config = replace(config, runs=str(tmp_path), name="killed")
    folder = tmp_path / "killed"
    for step, number in ((112, signal.SIGKILL), (128, signal.SIGTERM)):
        process = start(config)
        wait_for_step(folder, step, process)
        os.killpg(process.pid, number)
        output = process.communicate(timeout=300)[0]
        if number == signal.SIGTERM:
            assert process.returncode == 143, output
            stopped = int(re.search(r"stopped by a signal at step (\d+): saved", output)[1])
    assert f"resuming after step {stopped}" in finish(start(config))
    assert records(folder) == records(path)  # every loss and metric, bit for bit
    whole, killed = exported(path), exported(folder)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)


def test_a_run_goes_on_on_other_devices_and_with_another_plan(trained, tmp_path):
    path, metrics, config = trained
    config = replace(config, runs=str(tmp_path), name="moved")
    process = start(config)
    wait_for_step(tmp_path / "moved", 112, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    output = finish(start(replace(config, plan="row"), devices=8))
    assert re.search(r"resuming after step (48|96)", output) and "tables: 8 row" in output
    moved, whole = records(tmp_path / "moved"), records(path)
    # Rounding alone differs, and Adam makes it grow: compared soon after the move.
    assert moved["112 train"]["loss"] == pytest.approx(whole["112 train"]["loss"], rel=1e-4)
    assert moved["256 eval"]["eval/auc"] == pytest.approx(metrics["auc"], abs=5e-3)


def test_a_finished_run_is_not_trained_again(trained, capsys):
    _, metrics, config = trained
    assert dlrm.main(config) == metrics
    assert "is finished" in capsys.readouterr().out


def test_remote_run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 4096)
    config = replace(LEARNS, runs="memory://zoo", name="clicks")
    metrics = dlrm.main(config)
    assert dlrm.main(config) == metrics
    table, _ = files.load_weights("memory://zoo/clicks/export/tables/C8.safetensors")
    assert table[dlrm.TABLE_KEY.format("C8")].shape == (30_000, config.dim)


# ---- torchrec is the oracle ----


def jagged(batch: dict[str, np.ndarray], dataset):
    """A batch of ours as torchrec's KeyedJaggedTensor."""
    from torchrec import KeyedJaggedTensor

    values, lengths, first = [], [], 0
    for lookups in dataset.lookups:
        ids, present = (batch[name][:, first : first + lookups] for name in ("ids", "present"))
        values.append(torch.from_numpy(ids[present > 0].astype(np.int64)))
        lengths.append(torch.from_numpy((present > 0).sum(1)))
        first += lookups
    return KeyedJaggedTensor(list(dataset.features), torch.cat(values), lengths=torch.cat(lengths))


def torchrecs_model(config, dataset):
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    configs = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=config.dim, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(dataset.features, dataset.table_rows, strict=True)
    ]
    sizes = (EmbeddingBagCollection(tables=configs), dataset.num_dense, list(config.bottom), list(config.top))
    return DLRM(*sizes) if config.interaction == "dot" else DLRM_DCN(*sizes, *config.cross)


def test_torchrec_loads_the_export_and_gives_the_same_auc(trained):
    path, metrics, config = trained
    _, dataset = dlrm.open_data(config)
    theirs = torchrecs_model(config, dataset)
    theirs.load_state_dict(exported(path))
    batch = dataset.batch(np.arange(len(dataset)))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(batch["dense"]), jagged(batch, dataset)).squeeze(1).numpy()
    assert dlrm.click_metrics(logits, batch["label"]) == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_ten_steps_give_torchrecs_losses(mesh, tmp_path, monkeypatch, interaction, optimizer):
    """On four devices with sharded tables, against torchrec's DLRM and torch's optimizers on the CPU."""
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 10 * 128)
    monkeypatch.setattr(tables, "COPIED_BYTES", 100_000)
    config = replace(
        LEARNS, interaction=interaction, cross=(2, 8), optimizer=optimizer, lr=0.2 if optimizer == "sgd" else 0.02
    )
    dataset, _ = dlrm.open_data(config)
    model, embeddings, own_optimizer = dlrm.build(config, dataset, mesh)
    assert set(embeddings.plan.plans) == {"row", "table", "data"}, embeddings.plan
    with checkpoint.Checkpointer(str(tmp_path), tables=embedding.TableStorage(embeddings)) as checkpoints:
        checkpoints.save(1, model, own_optimizer)
    dlrm.export(f"{tmp_path}/export", model, checkpoints, 1, config, dataset)
    theirs = torchrecs_model(config, dataset)
    theirs.load_state_dict(exported(tmp_path))
    parameters = theirs.parameters()
    if optimizer == "sgd":
        their_optimizer = torch.optim.SGD(parameters, config.lr)
    else:
        their_optimizer = torch.optim.Adagrad(parameters, config.lr, eps=dlrm.ADAGRAD_EPS)
    step = device.compiled(dlrm.train_step, mesh)
    ours, expected = [], []
    with loading.parallel_loader(dataset, 128, mesh, train=True, stop=10, shuffle="batches") as loader:
        for batch in loader:
            on_host = {name: value.cpu().numpy() for name, value in batch.items()}
            ours.append(step(model, embeddings, own_optimizer, batch, mesh)["loss"].item())
            logits = theirs(torch.from_numpy(on_host["dense"]), jagged(on_host, dataset)).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(on_host["label"]))
            their_optimizer.zero_grad()
            loss.backward()
            their_optimizer.step()
            expected.append(loss.item())
    assert abs(expected[0] - expected[-1]) > 0.01  # it does train
    assert ours == pytest.approx(expected, rel=2e-5)  # float32, sums in another order, over ten updates


# ---- evaluation ----


def test_click_metrics():
    rng = np.random.default_rng(0)
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    logits = rng.normal(0, 2, 1000).astype(np.float32)
    metrics = dlrm.click_metrics(logits, labels)
    assert metrics["auc"] == roc_auc_score(labels, logits)
    expected = F.binary_cross_entropy_with_logits(torch.from_numpy(logits).double(), torch.from_numpy(labels).double())
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    rate = labels.mean(dtype=np.float64)
    always = dlrm.click_metrics(np.full(1000, np.log(rate / (1 - rate))), labels)
    assert always["ne"] == pytest.approx(1, abs=1e-6) and always["auc"] == 0.5
    assert np.isfinite(dlrm.click_metrics(np.array([1e4, -1e4]), np.array([0.0, 1.0]))["loss"])
    with pytest.raises(InputError, match="all 3 labels"):
        dlrm.click_metrics(np.zeros(3), np.ones(3))
    with pytest.raises(InputError, match="not finite"):
        dlrm.click_metrics(np.array([np.nan, 0]), np.array([0.0, 1.0]))


def test_evaluation_has_every_example_once_whatever_the_batch(mesh, monkeypatch):
    config = replace(LEARNS, optimizer="sgd")
    dataset = criteo.SyntheticClicks("eval", 203, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    model, embeddings, _ = dlrm.build(config, dataset, mesh)
    results = []
    for batch in (16, 203, 16_384):
        monkeypatch.setattr(dlrm, "EVAL_BATCH", batch)
        step = device.compiled(dlrm.eval_step, mesh)
        results.append(dlrm.evaluate(step, model, embeddings, dataset, config, mesh))
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert results[2] == pytest.approx(results[0], rel=1e-6)
    assert embeddings._pending == []


def test_the_schedule_reaches_tables_and_network(tmp_path, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 1024)
    weights = []
    for name, lr, warmup in (("still", 0.0, 0), ("slow", 0.02, 10**9), ("fast", 0.02, 0)):
        dlrm.main(replace(LEARNS, lr=lr, warmup_steps=warmup, runs=str(tmp_path), name=name))
        weights.append(exported(tmp_path / name))
    still, slow, fast = weights
    for name in still:
        torch.testing.assert_close(slow[name], still[name], rtol=0, atol=1e-6)
        assert (fast[name] - still[name]).abs().max() > 0.01, name


def test_torchrecs_arrays_train_with_tables_of_the_given_rows(tmp_path):
    rng = np.random.default_rng(0)
    for day, rows in enumerate((256, 64)):
        np.save(tmp_path / f"day_{day}_dense.npy", rng.random((rows, 13), np.float32))
        np.save(tmp_path / f"day_{day}_sparse.npy", rng.integers(-(2**31), 2**31, (rows, 26)).astype(np.int32))
        np.save(tmp_path / f"day_{day}_labels.npy", rng.integers(0, 2, (rows, 1)).astype(np.int32))
    config = replace(LEARNS, data=str(tmp_path), hash_rows=100, batch_size=64, runs=str(tmp_path / "runs"), name="run")
    assert dlrm.open_data(config)[0].table_rows == (100,) * 26
    dlrm.main(config)
    assert (
        exported(tmp_path / "runs/run")[dlrm.TABLE_KEY.format(dlrm.open_data(config)[0].features[25])].shape[0] == 100
    )


def test_learning_rate_warms_up_linearly_and_stays():
    config = replace(dlrm.Config(), lr=0.5, warmup_steps=4)
    assert [dlrm.learning_rate(config, step) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert dlrm.learning_rate(replace(config, warmup_steps=0), 0) == 0.5


# ---- what the user can get wrong: one sentence, exit code 2, no traceback ----


def command(monkeypatch, capsys, *flags) -> tuple[int, str]:
    """Exit code and standard error of the script with these flags."""
    monkeypatch.setattr(sys, "argv", ["train/dlrm.py", "tiny", *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        cli.run(dlrm.main, dlrm.PRESETS)
    return exit.value.code, capsys.readouterr().err


def assert_one_sentence(result, *words):
    code, error = result
    assert code == 2
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lr", "-1"), ("--lr is -1.0", "at least 0")),
        (("--epochs", "0"), ("--epochs is 0", "at least 1")),
        (("--dim", "8"), ("--bottom ends with 16", "--dim, 8")),
        (("--top", "4", "2"), ("--top is (4, 2)", "end with 1")),
        (("--cross", "0", "4"), ("--cross is (0, 4)", "at least 1")),
        (("--batch-size", "6"), ("batch_size is 6", "4 devices", "nearest that does is 8")),
        (("--batch-size", "131072"), ("batch_size is 131072", "65536 examples")),
        (("--model-devices", "3"), ("model_devices is 3", "divide the 4 devices")),
        (("--data", ""), ("--data is missing", "synthetic")),
        (("--data", "/nowhere/at/all"), ("/nowhere/at/all",)),
    ],
)
def test_values_out_of_range(monkeypatch, capsys, tmp_path, flags, words):
    assert_one_sentence(command(monkeypatch, capsys, "--runs", tmp_path, *flags), *words)


def test_an_id_outside_of_its_table_is_named_before_it_trains_another_row(monkeypatch, capsys, tmp_path):
    class Wrong(criteo.SyntheticClicks):
        def batch(self, indices):
            batch = super().batch(indices)
            batch["ids"][3, 1] = 50
            return batch

    monkeypatch.setattr(
        dlrm, "open_data", lambda config: [Wrong("train", 1024, table_rows=(9, 50), lookups=(1, 1))] * 2
    )
    result = command(monkeypatch, capsys, "--runs", tmp_path)
    assert_one_sentence(result, "id 50 of table 'C2'", "50 rows", "0 to 49")


def test_tables_that_do_not_fit_say_what_would(monkeypatch, capsys, tmp_path):
    class Huge(criteo.SyntheticClicks):
        def __init__(self):
            super().__init__("train", 1024, table_rows=(9, 50), lookups=(1, 1))
            self.table_rows = (9, 2_000_000_000)

    monkeypatch.setattr(dlrm, "open_data", lambda config: [Huge()] * 2)
    assert_one_sentence(
        command(monkeypatch, capsys, "--runs", tmp_path), "'C2'", "2,000,000,000 rows", "What would fit"
    )


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, capsys, tmp_path):
    result = command(monkeypatch, capsys, "--runs", tmp_path, "--lr", "1e30", "--optimizer", "sgd")
    assert_one_sentence(result, "loss is nan", "the training diverged")


def test_other_values_for_the_same_name(monkeypatch, capsys, trained):
    _, _, config = trained
    flags = ("--runs", config.runs, "--name", config.name)
    assert_one_sentence(command(monkeypatch, capsys, *flags, "--lr", 0.1), "lr", "0.02", "0.1", "another --name")
