"""train/dlrm.py on a user's own clicks: it learns, resumes, and its export has names and maps."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import criteo_text
import fsspec
import numpy as np
import pandas as pd
import pytest
import safetensors
import torch
from click_tables import FLAGS, draw, write
from helpers import equal, exported, page_code, stop_at, terminate
from sklearn.metrics import roc_auc_score

from bench import dlrm_torchrec
from data.clicks import Columns
from data.prepare import criteo
from data.prepare.clicks import prepare
from errors import InputError
from train import dlrm

DRAWN = draw(12_000)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    prepare(write(folder / "log.csv", DRAWN.columns), **FLAGS)
    return folder / "prepared"


@pytest.fixture(scope="module")
def config(prepared, tmp_path_factory) -> dlrm.Config:
    return replace(
        dlrm.TINY,
        data=str(prepared),
        epochs=2,
        batch_size=128,
        workers=0,
        runs=str(tmp_path_factory.mktemp("runs")),
    )


@pytest.fixture(scope="module")
def trained(config) -> tuple[Path, dict[str, float]]:
    metrics = dlrm.main(replace(config, name="run"))
    return Path(config.runs, "run"), metrics


def perfect_auc(rows: int) -> float:
    """Returns the AUC of the true probabilities on the last rows."""
    return roc_auc_score(DRAWN.columns["clicked"][-rows:], DRAWN.probability[-rows:])


@pytest.mark.parametrize("place", ["prepared", ""], ids=["prepared", "beside"])
def test_the_preset_of_own_clicks_is_that_of_the_data(prepared, place):
    """Where the command, as that of make, has none."""
    assert dlrm.preset_of(str(prepared.parent / place)) == "clicks"


def test_the_preset_of_other_data_is_that_of_criteo(tmp_path, monkeypatch):
    rows = tmp_path / "criteo/train.txt"
    criteo_text.write(rows, criteo_text.random_rows(70, 0))
    criteo.prepare(rows.parent)

    for data in (rows.parent, rows.parent / "prepared", tmp_path, tmp_path / "none", "synthetic"):
        assert dlrm.preset_of(str(data)) == "kaggle"


def test_the_preset_of_own_clicks_at_a_url_is_clicks(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/own"
    fsspec.filesystem("memory").put(f"{prepared}/", url, recursive=True)

    assert dlrm.preset_of(url) == "clicks"


def test_the_command_without_a_preset_has_that_of_the_data(prepared, tmp_path, monkeypatch, capsys):
    """And the flags that are given."""
    monkeypatch.setattr(sys, "argv", ["dlrm", "--data", str(prepared), "--batch-size", "64"])
    configs = []

    dlrm.cli.run(configs.append, dlrm.PRESETS, dlrm.preset_of)

    (config,) = configs
    for name in ("bottom", "top", "optimizer", "lr"):
        assert getattr(config, name) == getattr(dlrm.CLICKS, name)
    assert config.batch_size == 64
    assert f"preset clicks, chosen by what {prepared} holds" in capsys.readouterr().out


def test_own_clicks_are_learnt(trained, config):
    _, metrics = trained
    rows = len(dlrm.open_data(config).eval)

    assert 1150 < rows < 1250
    assert 0.75 < perfect_auc(rows) < 0.9
    assert metrics["auc"] > perfect_auc(rows) - 0.03


@pytest.mark.slow
def test_weights_that_do_not_move_learn_nothing(config):
    metrics = dlrm.main(replace(config, name="still", lr=0.0, epochs=1))

    assert 0.4 < metrics["auc"] < 0.6


def test_a_stopped_run_on_own_clicks_resumes_exactly(trained, config):
    path, metrics = trained
    config = replace(config, name="stopped", save_every=20)
    stop_at(96, terminate, dlrm.main, config)

    resumed = dlrm.main(config)

    assert resumed == metrics
    assert equal(exported(Path(config.runs, "stopped")), exported(path))


def test_the_export_has_the_names_and_the_maps(trained, prepared):
    path, _ = trained

    with safetensors.safe_open(path / "export/model.safetensors", "pt") as file:
        about = {name: json.loads(value) for name, value in file.metadata().items()}

    assert about["features"] == ["user", "item", "tags"]
    assert about["num_dense"] == 2
    tables = {file.stem for file in (path / "export/tables").iterdir()}
    assert tables == {"user", "item", "tags"}
    assert dlrm.TABLE_KEY.format("user") in exported(path)
    ours = {file.name: file.read_bytes() for file in (path / "export/clicks").iterdir()}
    theirs = {file.name: file.read_bytes() for file in (prepared / "columns").iterdir()}
    assert ours == theirs
    assert "vocabulary_user.parquet" in ours


def test_torchrec_scores_raw_rows_by_the_export(trained, config):
    """The rows that are evaluated, from pandas by the maps of the export, through torchrec's DLRM:
    the AUC is that of the run."""
    path, metrics = trained
    log = dlrm.open_data(config).eval
    theirs = dlrm_torchrec.build(config, log)
    theirs.load_state_dict(exported(path))
    frame = pd.DataFrame(DRAWN.columns)[-len(log) :]

    batch = Columns.load(path / "export/clicks").encode(frame)
    with torch.no_grad():
        dense = torch.from_numpy(batch["dense"])
        logits = theirs(dense, dlrm_torchrec.keyed(batch, log)).squeeze(1).numpy()

    assert roc_auc_score(frame["clicked"], logits) == pytest.approx(metrics["auc"], rel=1e-5)
    assert np.ptp(logits) > 1


def test_the_page_makes_new_rows_arrays(trained, prepared, capsys):
    path, _ = trained
    replaced = {"runs/<name>": str(path), "new.csv": str(prepared.parent / "log.csv")}

    exec(page_code("exports.md", "New rows of your own clicks", **replaced), {})

    printed = capsys.readouterr().out
    assert printed.startswith("(12000, 2) (12000, ")
    assert "missing numbers, which become 0 (the mean): price" in printed


# ---- a finished run on other clicks --------------------------------------------------------------
def evaluated(run: Path, **flags) -> dict[str, float]:
    return dlrm.main(dlrm.Config(evaluate=str(run), **flags))


def test_a_log_is_evaluated_by_the_maps_of_the_run(trained, config, tmp_path):
    """The rows that the run was evaluated on, as a table of their own, have its metrics."""
    path, metrics = trained
    rows = len(dlrm.open_data(config).eval)
    columns = {name: values[-rows:] for name, values in DRAWN.columns.items()}

    assert evaluated(path) == metrics
    assert evaluated(path, data=str(write(tmp_path / "new.csv.gz", columns))) == metrics

    file = json.loads((path / "evaluations/new.csv.gz-usual.json").read_text())
    assert file["examples"] == rows
    assert file["source"] == "all rows of new.csv.gz"


def test_the_training_rows_are_evaluated(trained, prepared):
    path, metrics = trained
    found = evaluated(path, split="train")
    assert found["auc"] > metrics["auc"]
    file = json.loads((path / f"evaluations/{prepared.name}-train.json").read_text())
    assert file["examples"] > 10_000


def test_clicks_of_other_maps_are_refused(trained, tmp_path):
    path, _ = trained
    prepare(write(tmp_path / "more/log.csv", draw(3_000, seed=1).columns), **FLAGS)
    fewer = FLAGS | {"categorical": "user", "out": str(tmp_path / "fewer")}
    prepare(tmp_path / "more/log.csv", **fewer)
    table = write(tmp_path / "bad.csv", {**draw(5).columns, "clicked": [0, 1, 0, 1, 2]})

    for data, message in (
        (tmp_path / "more/prepared", "other maps than .*run: the dense feature price has another"),
        (
            tmp_path / "fewer",
            "has the features user, tags; .*run was trained with user, item, tags",
        ),
        (table, "bad.csv row 5: the label clicked is '2'"),
    ):
        with pytest.raises(InputError, match=message):
            evaluated(path, data=str(data))
    with pytest.raises(InputError, match="--split is test; expected train or valid"):
        evaluated(path, split="test")
