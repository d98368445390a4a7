"""Tests what is particular to train/dlrm.py: it resumes on other devices and with another plan,
agrees with torchrec, and refuses tables and ids that do not fit.

What it shares with the other scripts is in test_scripts.py.
"""

import json
import re
import signal
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from criteo_text import random_rows, write
from helpers import Stop, exported, page_code, records, start, stop_at, terminate
from sklearn.metrics import roc_auc_score
from smooth import SMOOTH_UNITS, smooth_units
from trials import TRIALS

from bench import dlrm_torchrec
from data import criteo
from data.prepare.criteo import prepare
from errors import InputError
from train import dlrm
from train.common import checkpoint, device, embedding, loading
from train.common.embedding import memory

LEARNS = TRIALS["dlrm"].learns


@pytest.mark.slow  # test_dlrm_model.py compares it with torchrec's, test_scripts.py learns
def test_the_cross_network_learns(tmp_path):
    config = replace(
        LEARNS,
        interaction="dcn",
        cross=(2, 16),
        precision="bfloat16",
        shuffle="batches",
        runs=str(tmp_path),
    )

    metrics = dlrm.main(config)

    assert metrics["auc"] > 0.77


# Resuming


def stop_in_process(config: dlrm.Config, devices: int, last: int) -> str:
    """Trains in a process of its own until SIGTERM ends it at step `last`; returns its output.

    As when a VM is shut down, the worker processes get the signal, too.
    """
    stop = Stop(last, number=signal.SIGTERM)
    code, output = start(dlrm, config, devices, stop, SMOOTH_UNITS)
    assert code == 143, output
    return output


def losses_by_step(path) -> dict[int, float]:
    """Returns the training losses of a run."""
    return {line["step"]: line["loss"] for line in records(path) if "loss" in line}


@pytest.mark.slow
def test_a_terminated_run_resumes_on_other_devices(run_of, tmp_path, capsys, monkeypatch):
    """On eight, four and eight devices with plan exchange, beside a run on four devices with plan
    auto. With SGD: Adam makes rounding grow."""
    smooth_units(monkeypatch.setattr)
    path, _, config = run_of("dlrm", "alike")
    config = replace(
        config,
        runs=str(tmp_path),
        name="moved",
        plan="exchange",
        steps_a_call=8,
        log_every=16,
    )

    on_eight = stop_in_process(config, devices=8, last=32)
    stop_at(64, terminate, dlrm.main, config)
    on_four = capsys.readouterr().out
    on_eight_again = stop_in_process(config, devices=8, last=96)

    for output, last in ((on_eight, 32), (on_four, 64), (on_eight_again, 96)):
        assert f"stopped by a signal at step {last}: saved" in output, output
        assert "tables: 8 exchange" in output, output
    assert "resuming after step 0" not in on_eight, on_eight
    assert "resuming after step 32" in on_four, on_four
    assert "resuming after step 64" in on_eight_again, on_eight_again
    expected = losses_by_step(path)
    logged = {step: expected[step] for step in (8, 16, 32, 48, 64, 80, 96)}
    assert losses_by_step(tmp_path / "moved") == pytest.approx(logged, rel=2e-5)


def test_an_older_run_on_movielens_keeps_its_split(tmp_path):
    """It read a tenth by a hash, and recorded no split: with the official one it is refused."""
    for name, users in {
        "u.data": range(60),
        "ua.base": range(50),
        "ua.test": range(50, 60),
    }.items():
        lines = [f"{user}\t{user % 7}\t{user % 5 + 1}\t0\n" for user in users]
        (tmp_path / name).write_text("".join(lines))
    config = replace(LEARNS, data=str(tmp_path), batch_size=32, runs=str(tmp_path), name="old")
    stored = {"config": asdict(config), "starts": []}
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text(json.dumps(stored))

    message = (
        r"old was started with other values \(trained on u.data but a tenth by a hash, evaluated "
        r"on a tenth of u.data by a hash; now on ua.base, and on ua.test\); use another --name"
    )
    with pytest.raises(InputError, match=message):
        dlrm.main(config)


@pytest.mark.parametrize(
    ("split", "batch_size", "room"),
    [
        ("training", 256, 0.2),
        pytest.param("evaluation", 16, 0.3, marks=pytest.mark.slow),
    ],
)
def test_dropped_ids_stop_the_run_and_name_the_room(tmp_path, monkeypatch, split, batch_size, room):
    """Ids that training drops stop the run at the first line of metrics, before a checkpoint; those
    that an evaluation drops, before it has a line, but after its checkpoint.

    With the room that the message names, the run resumes and ends.
    """
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 3 * batch_size)
    monkeypatch.setattr(dlrm, "SYNTHETIC_EVAL", 2048)
    monkeypatch.setattr(dlrm, "SYNTHETIC_ROWS", (100_000,) * 8)
    path = tmp_path / "run"
    config = replace(
        LEARNS,
        batch_size=batch_size,
        runs=str(tmp_path),
        name="run",
        plan="exchange",
        log_every=1000,
    )
    message = (
        "ids found no slot in the exchange.*"
        rf"--exchange-room (\S+) (\S+) or more instead of {room} 1"
    )

    with pytest.raises(InputError, match=message) as raised:
        dlrm.main(replace(config, exchange_room=(room, 1.0)))

    checkpoints = list(path.glob("checkpoints/*/COMPLETE"))
    has_dropped = [line["dropped"] > 0 for line in records(path)]
    if split == "training":
        assert checkpoints == []
        assert has_dropped == [True]
    else:
        assert len(checkpoints) == 1
        assert has_dropped == [False, False]

    named = re.search(message, str(raised.value)).groups()
    enough = tuple(float(factor) for factor in named)
    metrics = dlrm.main(replace(config, exchange_room=enough))

    assert "auc" in metrics
    for line in records(path):
        if "loss" in line:
            assert line["dropped"] == 0
            assert 0 < line["pair_load"] <= 1


# Data


def test_a_click_that_is_not_finite_is_named(tmp_path, refused):
    """As an error of the data, not as divergence of the training."""
    data = tmp_path / "arrays"
    prepare(write(tmp_path / "train.txt", random_rows(140)), data)
    path = data / "train_dense.npy"
    dense = np.load(path)
    dense[77, 5] = -np.inf
    np.save(path, dense)
    flags = f"tiny --data {data} --batch-size 20 --epochs 1 --log-every 1"
    position = r"row 77, column 5 \(both from 0\)"

    refused(dlrm, flags, f"train_dense.npy has -inf in {position}; expected finite numbers")


def test_a_start_says_what_it_trains_on(tmp_path, capsys):
    write(tmp_path / "test.txt", random_rows(3))
    write(tmp_path / "val.txt", random_rows(20, 1))
    train = write(tmp_path / "train.txt", random_rows(20))
    prepare(train.parent)
    config = replace(
        LEARNS, data=str(tmp_path), batch_size=20, epochs=1, runs=str(tmp_path / "runs")
    )

    dlrm.main(config)

    said = "steps of 20 (trained on train.txt, evaluated on val.txt; left out: test.txt) on"
    assert said in capsys.readouterr().out


class RareClicks(criteo.SyntheticClicks):
    """Examples of an evaluation split of which only those in `clicked` were clicked."""

    clicked = ()

    def batch(self, indices):
        batch = super().batch(indices)
        return batch | {"label": np.isin(indices, self.clicked).astype(np.float32)}


@pytest.fixture
def rare_clicks(monkeypatch) -> RareClicks:
    """Gives the trial an evaluation split of 40,000 examples without a click."""
    data = dlrm.open_data(LEARNS)
    clicks = RareClicks(
        "eval",
        40_000,
        0,
        table_rows=dlrm.SYNTHETIC_ROWS,
        lookups=dlrm.SYNTHETIC_LOOKUPS,
    )
    monkeypatch.setattr(dlrm, "open_data", lambda config: data._replace(eval=clicks))
    return clicks


def test_an_evaluation_of_one_class_is_refused_before_step_1(rare_clicks, tmp_path):
    config = replace(LEARNS, runs=str(tmp_path), name="run")
    message = "all 40000 labels of the evaluation split of synthetic are 0.*no AUC.*give"

    with pytest.raises(InputError, match=message):
        dlrm.main(config)

    assert not (tmp_path / "run").exists()


def test_one_click_makes_two_classes(rare_clicks, tmp_path, monkeypatch):
    rare_clicks.clicked = (20_000,)  # neither in the first batch nor in the last
    monkeypatch.setattr(dlrm, "build", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        dlrm.main(replace(LEARNS, runs=str(tmp_path), name="run"))


def test_torchrecs_arrays_train_with_tables_of_the_given_rows(tmp_path):
    rng = np.random.default_rng(0)
    for day, rows in enumerate((256, 64)):
        dense = rng.random((rows, 13), np.float32)
        sparse = rng.integers(-(2**31), 2**31, (rows, 26)).astype(np.int32)
        labels = rng.integers(0, 2, (rows, 1)).astype(np.int32)
        np.save(tmp_path / f"day_{day}_dense.npy", dense)
        np.save(tmp_path / f"day_{day}_sparse.npy", sparse)
        np.save(tmp_path / f"day_{day}_labels.npy", labels)
    config = replace(
        LEARNS,
        data=str(tmp_path),
        hash_rows=100,
        batch_size=64,
        runs=str(tmp_path / "runs"),
        name="run",
    )
    assert dlrm.open_data(config).train.table_rows == (100,) * 26

    dlrm.main(config)

    table = exported(tmp_path / "runs/run")[dlrm.TABLE_KEY.format("C26")]
    assert table.shape[0] == 100


# Against torchrec


def test_the_page_gives_the_probability_of_a_click(trained, capsys):
    path, _, config = trained
    clicks = dlrm.open_data(config).eval
    batch = clicks.batch(np.arange(1))
    rows = {}
    first = 0
    for name, lookups in zip(clicks.features, clicks.lookups, strict=True):
        columns = slice(first, first + lookups)
        present = batch["present"][0, columns] > 0
        rows[name] = batch["ids"][0, columns][present].tolist()
        first += lookups
    replaced = {
        "runs/<name>": path,
        'rows = {name: [0] for name in about["features"]}': f"rows = {rows}",
        'dense = [0.0] * about["num_dense"]': f"dense = {batch['dense'][0].tolist()}",
    }

    exec(page_code("exports.md", "DLRM in torchrec", **replaced), {})

    theirs = dlrm_torchrec.build(config, clicks)
    theirs.load_state_dict(exported(path))
    with torch.no_grad():
        logit = theirs(torch.from_numpy(batch["dense"]), dlrm_torchrec.keyed(batch, clicks))
    probability = float(capsys.readouterr().out)
    assert probability == pytest.approx(logit.sigmoid().item(), rel=1e-5)


def test_torchrec_loads_the_export_and_gives_the_same_auc(trained):
    path, metrics, config = trained
    dataset = dlrm.open_data(config).eval
    theirs = dlrm_torchrec.build(config, dataset)
    theirs.load_state_dict(exported(path))
    batch = dataset.batch(np.arange(len(dataset)))

    with torch.no_grad():
        logits = theirs(torch.from_numpy(batch["dense"]), dlrm_torchrec.keyed(batch, dataset))

    found = criteo.click_metrics(logits.squeeze(1).numpy(), batch["label"])
    assert found == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize(("interaction", "optimizer"), [("dot", "adagrad"), ("dcn", "sgd")])
def test_ten_steps_give_torchrecs_losses(mesh, tmp_path, monkeypatch, interaction, optimizer):
    """On four devices with sharded tables, against torchrec's DLRM and torch's optimizers on the
    CPU."""
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 10 * 128)
    monkeypatch.setattr(memory, "COPIED_BYTES", 100_000)
    lr = 0.2 if optimizer == "sgd" else 0.02
    config = replace(LEARNS, interaction=interaction, cross=(2, 8), optimizer=optimizer, lr=lr)
    data = dlrm.open_data(config)
    dataset = data.train
    state = dlrm.build(config, data, mesh)
    tables = state.embeddings
    assert set(tables.plans) == {"exchange", "data"}, tables.plans

    # Theirs begins with our weights.
    storage = embedding.TableStorage(tables)
    with checkpoint.Checkpointer(str(tmp_path), tables=storage) as checkpoints:
        checkpoints.save(1, state.model, state.optimizer)
    dlrm.export(f"{tmp_path}/export", state, data, config, mesh, checkpoints.folder(1))
    theirs = dlrm_torchrec.build(config, dataset)
    theirs.load_state_dict(exported(tmp_path))
    their_optimizers = dlrm_torchrec.optimizers(theirs, config)

    step = device.compiled(dlrm.train_step, mesh)
    ours = []
    expected = []
    loader = loading.parallel_loader(dataset, 128, mesh, train=True, stop=10, shuffle="batches")
    with loader as batches:
        for batch in batches:
            on_host = {name: value.cpu().numpy() for name, value in batch.items()}
            ours.append(step(state, batch, config, mesh)["loss"].item())

            dense = torch.from_numpy(on_host["dense"])
            labels = torch.from_numpy(on_host["label"])
            logits = theirs(dense, dlrm_torchrec.keyed(on_host, dataset)).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, labels)
            theirs.zero_grad()
            loss.backward()
            for their_optimizer in their_optimizers:
                their_optimizer.step()
            expected.append(loss.item())

    assert abs(expected[0] - expected[-1]) > 0.01  # it does train
    # float32, sums in another order, over ten updates
    assert ours == pytest.approx(expected, rel=2e-5)


# Metrics and evaluation


def random_predictions() -> tuple[np.ndarray, np.ndarray]:
    """Returns logits and labels of 1,000 examples, 30 % of them clicked."""
    rng = np.random.default_rng(0)
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    logits = rng.normal(0, 2, 1000).astype(np.float32)
    return logits, labels


def test_auc_is_scikit_learns():
    logits, labels = random_predictions()

    metrics = criteo.click_metrics(logits, labels)

    assert metrics["auc"] == roc_auc_score(labels, logits)


def test_log_loss_is_torchs_in_float64():
    logits, labels = random_predictions()

    metrics = criteo.click_metrics(logits, labels)

    logits_f64 = torch.from_numpy(logits).double()
    labels_f64 = torch.from_numpy(labels).double()
    expected = F.binary_cross_entropy_with_logits(logits_f64, labels_f64)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)


def test_always_predicting_the_mean_rate_has_an_entropy_of_1():
    _, labels = random_predictions()
    rate = labels.mean(dtype=np.float64)
    logit = np.log(rate / (1 - rate))

    metrics = criteo.click_metrics(np.full(1000, logit), labels)

    assert metrics["ne"] == pytest.approx(1, abs=1e-6)
    assert metrics["auc"] == 0.5


def test_log_loss_of_wrong_and_certain_predictions_is_finite():
    metrics = criteo.click_metrics(np.array([1e4, -1e4]), np.array([0.0, 1.0]))

    assert np.isfinite(metrics["loss"])


def test_labels_of_one_class_have_no_metrics():
    with pytest.raises(InputError, match="all 3 labels"):
        criteo.click_metrics(np.zeros(3), np.ones(3))


def test_predictions_that_are_not_finite_have_no_metrics():
    with pytest.raises(InputError, match="not finite"):
        criteo.click_metrics(np.array([np.nan, 0]), np.array([0.0, 1.0]))


def test_evaluation_has_every_example_once_whatever_the_batch(mesh, monkeypatch):
    config = replace(LEARNS, optimizer="sgd")
    dataset = criteo.SyntheticClicks("eval", 203, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    state = dlrm.build(config, dlrm.Data(dataset, dataset), mesh)

    results = []
    for batch_size in (16, 16_384):
        monkeypatch.setattr(dlrm, "EVAL_BATCH", batch_size)
        step = device.compiled(dlrm.eval_step, mesh)
        results.append(dlrm.evaluate(step, state, dataset, config, mesh))

    small, large = results
    assert large == pytest.approx(small, rel=1e-6)
    assert state.embeddings._forward_passes == []


def test_the_schedule_reaches_tables_and_network(tmp_path, monkeypatch):
    """That a rate of 0.02 moves them shows in all other tests."""
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 1024)
    config = replace(LEARNS, runs=str(tmp_path))

    dlrm.main(replace(config, lr=0.0, warmup_steps=0, name="still"))
    dlrm.main(replace(config, lr=0.02, warmup_steps=10**9, name="slow"))

    still = exported(tmp_path / "still")
    slow = exported(tmp_path / "slow")
    torch.testing.assert_close(slow, still, rtol=0, atol=1e-6)


# What is refused


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
        (
            "--plan row",
            "--plan row was removed: use --plan auto, exchange or data, "
            "which also restore its checkpoints",
        ),
        ("--plan column", "--plan column was removed: use --plan auto, exchange or data"),
        ("--plan rows", "--plan is rows; it must be one of: auto, exchange, data"),
        ("--data /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_values_that_are_refused(refused, flags, pattern):
    refused(dlrm, f"tiny {flags}", pattern)


def test_an_id_outside_of_its_table_is_refused(monkeypatch, refused):
    """Before it trains another row."""
    clicks = criteo.SyntheticClicks("train", 1024, table_rows=(9, 50), lookups=(1, 1))
    made = clicks.batch(np.arange(256))
    made["ids"][3, 1] = 50

    def first_rows(indices):
        return {name: values[: len(indices)] for name, values in made.items()}

    monkeypatch.setattr(clicks, "batch", first_rows)
    monkeypatch.setattr(dlrm, "open_data", lambda config: dlrm.Data(clicks, clicks))

    refused(dlrm, "tiny", "id 50 of table 'C2'.*50 rows.*0 to 49")
