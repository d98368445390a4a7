"""What is particular to train/dlrm.py: it resumes on other devices and with another plan, agrees with torchrec, and
refuses tables and ids that do not fit. What it shares with the other scripts is in test_scripts.py."""

import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from criteo_text import random_rows, write
from helpers import Stop, exported, page_code, records, start, stop_at, terminate
from sklearn.metrics import roc_auc_score
from trials import SMOOTH_UNITS, TRIALS, smooth_units

from bench import dlrm_torchrec
from data import criteo
from data.prepare.criteo import prepare
from errors import InputError
from train import dlrm
from train.common import checkpoint, device, embedding, loading
from train.common.embedding import memory

LEARNS = TRIALS["dlrm"].learns


def test_the_cross_network_learns(tmp_path):
    config = replace(LEARNS, interaction="dcn", cross=(2, 16), precision="bfloat16", shuffle="batches")
    assert dlrm.main(replace(config, runs=str(tmp_path)))["auc"] > 0.77


@pytest.mark.slow
def test_terminated_with_its_workers_it_goes_from_eight_devices_to_four_and_back(run_of, tmp_path, capsys, monkeypatch):
    """With plan exchange, beside a run on four devices with plan auto. With SGD: Adam makes rounding grow."""
    smooth_units(monkeypatch.setattr)
    path, _, config = run_of("dlrm", "alike")
    config = replace(config, runs=str(tmp_path), name="moved", plan="exchange", steps_a_call=8, log_every=16)
    for devices, before, last in ((8, 0, 32), (4, 32, 64), (8, 64, 96)):
        if devices == 4:  # as here
            stop_at(last, terminate, dlrm.main, config)
            output = capsys.readouterr().out
        else:  # a VM that is shut down signals the worker processes, too
            code, output = start(dlrm, config, devices, Stop(last, number=signal.SIGTERM), SMOOTH_UNITS)
            assert code == 143, output
        assert f"stopped by a signal at step {last}: saved" in output and "tables: 8 exchange" in output, output
        assert (f"resuming after step {before}" in output) == bool(before), output
    folders = tmp_path / "moved", path
    moved, expected = ({line["step"]: line["loss"] for line in records(one) if "loss" in line} for one in folders)
    assert moved == pytest.approx({step: expected[step] for step in (8, 16, 32, 48, 64, 80, 96)}, rel=2e-5)


def test_a_click_that_is_not_finite_is_named_and_not_called_divergence(tmp_path, refused, capsys):
    prepare(write(tmp_path / "train.txt", random_rows(140)), tmp_path / "arrays")
    path = tmp_path / "arrays" / "train_dense.npy"
    dense = np.load(path)
    dense[77, 5] = -np.inf
    np.save(path, dense)
    words = ["tiny", "--data", tmp_path / "arrays", "--batch-size", "20", "--epochs", "1", "--log-every", "1"]
    refused(dlrm, words, r"train_dense.npy has -inf in row 77, column 5 \(both from 0\); expected finite numbers")


def test_a_start_says_what_it_trains_on(tmp_path, capsys):
    write(tmp_path / "test.txt", random_rows(3))
    write(tmp_path / "val.txt", random_rows(20, 1))
    prepare(write(tmp_path / "train.txt", random_rows(20)).parent)
    dlrm.main(replace(LEARNS, data=str(tmp_path), batch_size=20, epochs=1, runs=str(tmp_path / "runs")))
    said = "steps of 20 (trained on train.txt, evaluated on val.txt; left out: test.txt) on"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("where", "batch", "room"), [("training", 256, 0.2), ("evaluation", 16, 0.3)])
def test_a_run_that_drops_ids_stops_and_resumes_with_the_room_it_names(tmp_path, monkeypatch, where, batch, room):
    """At the first line of metrics, before a checkpoint; or, where training has dropped none, before there is a line of
    the evaluation, whose checkpoint is there."""
    for name, value in (("TRAIN", 3 * batch), ("EVAL", 2048), ("ROWS", (100_000,) * 8)):
        monkeypatch.setattr(dlrm, f"SYNTHETIC_{name}", value)
    config = replace(LEARNS, batch_size=batch, runs=str(tmp_path), name="run", plan="exchange", log_every=1000)
    message = rf"ids found no slot in the exchange.*--exchange-room (\S+) (\S+) or more instead of {room} 1"
    with pytest.raises(InputError, match=message) as raised:
        dlrm.main(replace(config, exchange_room=(room, 1.0)))
    assert len(list(tmp_path.glob("run/checkpoints/*/COMPLETE"))) == (where == "evaluation")
    logged = records(tmp_path / "run")
    assert [line["dropped"] > 0 for line in logged] == ([True] if where == "training" else [False, False])
    named = re.search(message, str(raised.value)).groups()
    assert "auc" in dlrm.main(replace(config, exchange_room=tuple(map(float, named))))
    assert all(line["dropped"] == 0 < line["pair_load"] <= 1 for line in records(tmp_path / "run") if "loss" in line)


class OneClass(criteo.SyntheticClicks):
    """Clicks of an evaluation split without a single click, or with one in the middle."""

    clicked = ()

    def batch(self, indices):
        batch = super().batch(indices)
        return batch | {"label": np.isin(indices, self.clicked).astype(np.float32)}


def test_an_evaluation_of_one_class_is_refused_before_step_1(tmp_path, monkeypatch):
    config = replace(LEARNS, runs=str(tmp_path), name="run")
    data = dlrm.open_data(config)
    clicks = OneClass("eval", 40_000, 0, table_rows=dlrm.SYNTHETIC_ROWS, lookups=dlrm.SYNTHETIC_LOOKUPS)
    monkeypatch.setattr(dlrm, "open_data", lambda config: data._replace(eval=clicks))
    with pytest.raises(InputError, match="all 40000 labels of the evaluation split of synthetic are 0.*no AUC.*give"):
        dlrm.main(config)
    assert not (tmp_path / "run").exists()
    clicks.clicked = (20_000,)  # neither in the first batch nor in the last
    monkeypatch.setattr(dlrm, "build", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dlrm.main(config)


def test_the_page_gives_the_probability_of_a_click_with_an_export(trained, capsys):
    path, _, config = trained
    clicks = dlrm.open_data(config).eval
    batch = clicks.batch(np.arange(1))
    first, rows = 0, {}
    for name, lookups in zip(clicks.features, clicks.lookups, strict=True):
        places = slice(first, first + lookups)
        rows[name] = batch["ids"][0, places][batch["present"][0, places] > 0].tolist()
        first += lookups
    code = page_code(
        "exports.md",
        "DLRM in torchrec",
        **{
            "runs/<name>": path,
            'rows = {name: [0] for name in about["features"]}': f"rows = {rows}",
            'dense = [0.0] * about["num_dense"]': f"dense = {batch['dense'][0].tolist()}",
        },
    )
    exec(code, {})
    theirs = dlrm_torchrec.build(config, clicks)
    theirs.load_state_dict(exported(path))
    with torch.no_grad():
        logit = theirs(torch.from_numpy(batch["dense"]), dlrm_torchrec.keyed(batch, clicks))
    assert float(capsys.readouterr().out) == pytest.approx(logit.sigmoid().item(), rel=1e-5)


def test_torchrec_loads_the_export_and_gives_the_same_auc(trained):
    path, metrics, config = trained
    dataset = dlrm.open_data(config).eval
    theirs = dlrm_torchrec.build(config, dataset)
    theirs.load_state_dict(exported(path))
    batch = dataset.batch(np.arange(len(dataset)))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(batch["dense"]), dlrm_torchrec.keyed(batch, dataset)).squeeze(1).numpy()
    assert criteo.click_metrics(logits, batch["label"]) == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize(("interaction", "optimizer"), [("dot", "adagrad"), ("dcn", "sgd")])
def test_ten_steps_give_torchrecs_losses(mesh, tmp_path, monkeypatch, interaction, optimizer):
    """On four devices with sharded tables, against torchrec's DLRM and torch's optimizers on the CPU."""
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 10 * 128)
    monkeypatch.setattr(memory, "COPIED_BYTES", 100_000)
    lr = 0.2 if optimizer == "sgd" else 0.02
    config = replace(LEARNS, interaction=interaction, cross=(2, 8), optimizer=optimizer, lr=lr)
    data = dlrm.open_data(config)
    dataset, state = data.train, dlrm.build(config, data, mesh)
    model, embeddings, own_optimizer = state
    assert set(embeddings.plans) == {"exchange", "data"}, embeddings.plans
    with checkpoint.Checkpointer(str(tmp_path), tables=embedding.TableStorage(embeddings)) as checkpoints:
        checkpoints.save(1, model, own_optimizer)
    dlrm.export(f"{tmp_path}/export", state, data, config, checkpoints.folder(1))
    theirs = dlrm_torchrec.build(config, dataset)
    theirs.load_state_dict(exported(tmp_path))
    their_optimizers = dlrm_torchrec.optimizers(theirs, config)
    step = device.compiled(dlrm.train_step, mesh)
    ours, expected = [], []
    with loading.parallel_loader(dataset, 128, mesh, train=True, stop=10, shuffle="batches") as loader:
        for batch in loader:
            on_host = {name: value.cpu().numpy() for name, value in batch.items()}
            ours.append(step(state, batch, config, mesh)["loss"].item())
            logits = theirs(torch.from_numpy(on_host["dense"]), dlrm_torchrec.keyed(on_host, dataset)).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(on_host["label"]))
            theirs.zero_grad()
            loss.backward()
            for their_optimizer in their_optimizers:
                their_optimizer.step()
            expected.append(loss.item())
    assert abs(expected[0] - expected[-1]) > 0.01  # it does train
    assert ours == pytest.approx(expected, rel=2e-5)  # float32, sums in another order, over ten updates


def test_click_metrics():
    rng = np.random.default_rng(0)
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    logits = rng.normal(0, 2, 1000).astype(np.float32)
    metrics = criteo.click_metrics(logits, labels)
    assert metrics["auc"] == roc_auc_score(labels, logits)
    expected = F.binary_cross_entropy_with_logits(torch.from_numpy(logits).double(), torch.from_numpy(labels).double())
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    rate = labels.mean(dtype=np.float64)
    always = criteo.click_metrics(np.full(1000, np.log(rate / (1 - rate))), labels)
    assert always["ne"] == pytest.approx(1, abs=1e-6) and always["auc"] == 0.5
    assert np.isfinite(criteo.click_metrics(np.array([1e4, -1e4]), np.array([0.0, 1.0]))["loss"])
    with pytest.raises(InputError, match="all 3 labels"):
        criteo.click_metrics(np.zeros(3), np.ones(3))
    with pytest.raises(InputError, match="not finite"):
        criteo.click_metrics(np.array([np.nan, 0]), np.array([0.0, 1.0]))


def test_evaluation_has_every_example_once_whatever_the_batch(mesh, monkeypatch):
    config = replace(LEARNS, optimizer="sgd")
    dataset = criteo.SyntheticClicks("eval", 203, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    state = dlrm.build(config, dlrm.Data(dataset, dataset), mesh)
    results = []
    for batch in (16, 16_384):
        monkeypatch.setattr(dlrm, "EVAL_BATCH", batch)
        step = device.compiled(dlrm.eval_step, mesh)
        results.append(dlrm.evaluate(step, state, dataset, config, mesh))
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert state.embeddings._forward_passes == []


def test_the_schedule_reaches_tables_and_network(tmp_path, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 1024)
    for name, lr, warmup in (("still", 0.0, 0), ("slow", 0.02, 10**9)):  # that 0.02 moves them shows in all others
        dlrm.main(replace(LEARNS, lr=lr, warmup_steps=warmup, runs=str(tmp_path), name=name))
    torch.testing.assert_close(exported(tmp_path / "slow"), exported(tmp_path / "still"), rtol=0, atol=1e-6)


def test_torchrecs_arrays_train_with_tables_of_the_given_rows(tmp_path):
    rng = np.random.default_rng(0)
    for day, rows in enumerate((256, 64)):
        np.save(tmp_path / f"day_{day}_dense.npy", rng.random((rows, 13), np.float32))
        np.save(tmp_path / f"day_{day}_sparse.npy", rng.integers(-(2**31), 2**31, (rows, 26)).astype(np.int32))
        np.save(tmp_path / f"day_{day}_labels.npy", rng.integers(0, 2, (rows, 1)).astype(np.int32))
    config = replace(LEARNS, data=str(tmp_path), hash_rows=100, batch_size=64, runs=str(tmp_path / "runs"), name="run")
    assert dlrm.open_data(config).train.table_rows == (100,) * 26
    dlrm.main(config)
    assert exported(tmp_path / "runs/run")[dlrm.TABLE_KEY.format("C26")].shape[0] == 100


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--epochs 0", "--epochs is 0.*at least 1"),
        ("--bottom", r"--bottom is \(\); it needs sizes of at least 1"),
        ("--exchange-room 1 0", r"--exchange-room is \(1.0, 0.0\).*above 0"),
        ("--exchange-room nan 1", r"--exchange-room is \(nan, 1.0\).*above 0"),
        ("--top 4 2", r"--top is \(4, 2\).*end with 1"),
        ("--cross 0 4", r"--cross is \(0, 4\).*at least 1"),
        ("--batch-size 6", "batch_size is 6.*4 devices.*nearest multiple is 8"),
        ("--batch-size 131072", "batch_size is 131072.*65536 examples"),
        ("--model-devices 3", "model_devices is 3.*divide the 4 devices"),
        ("--plan row", "--plan row was removed: use --plan auto, exchange or data, which also restore its checkpoints"),
        ("--plan column", "--plan column was removed: use --plan auto, exchange or data"),
        ("--plan rows", "--plan is rows; it must be one of: auto, exchange, data"),
        ("--data /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_values_that_are_refused(refused, flags, pattern):
    refused(dlrm, f"tiny {flags}", pattern)


def test_an_id_outside_of_its_table_is_refused_before_it_trains_another_row(monkeypatch, refused):
    clicks = criteo.SyntheticClicks("train", 1024, table_rows=(9, 50), lookups=(1, 1))
    batch = clicks.batch(np.arange(256))
    batch["ids"][3, 1] = 50
    monkeypatch.setattr(clicks, "batch", lambda indices: {name: each[: len(indices)] for name, each in batch.items()})
    monkeypatch.setattr(dlrm, "open_data", lambda config: dlrm.Data(clicks, clicks))
    refused(dlrm, "tiny", "id 50 of table 'C2'.*50 rows.*0 to 49")
