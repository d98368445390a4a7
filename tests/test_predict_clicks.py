"""Predicts a user's own clicks by train/predict.py: torchrec's probabilities, and broken rows."""

import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from click_tables import FLAGS, draw, part, write
from helpers import exported
from predicting import answers_before, answers_of, precision_of, without_precision

from bench import dlrm_torchrec
from data import clicks
from data.clicks import Columns
from data.prepare.clicks import prepare
from errors import InputError
from train import dlrm, predict

CLOSE = 1e-5  # of a probability, in float32
DRAWN = draw(3000)


@pytest.fixture(scope="module")
def config(tmp_path_factory, mesh) -> dlrm.Config:
    """A short run on own clicks, which is over."""
    folder = tmp_path_factory.mktemp("own")
    prepare(write(folder / "log.csv", DRAWN.columns), **FLAGS)
    config = replace(
        dlrm.TINY, data=str(folder / "prepared"), batch_size=128, runs=str(folder), name="run"
    )
    dlrm.main(config)
    return config


@pytest.fixture
def export(config) -> Path:
    return Path(config.runs, "run/export")


@pytest.fixture(autouse=True)
def one_device(config, monkeypatch):
    """Lets tests run on plain PyTorch in this process, whose XLA has four devices."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")


def by_torchrec(config: dlrm.Config, export: Path, frame: pd.DataFrame) -> list[float]:
    """Returns the probability of a click in each row of a table, by torchrec's DLRM."""
    log = dlrm.open_data(config).eval
    theirs = dlrm_torchrec.build(config, log)
    theirs.load_state_dict(exported(export.parent))
    batch = Columns.load(export / "clicks").encode(frame)
    with torch.no_grad():
        dense = torch.from_numpy(batch["dense"])
        return theirs(dense, dlrm_torchrec.keyed(batch, log)).squeeze(1).sigmoid().tolist()


def new_rows(count: int) -> dict[str, list]:
    """Returns rows that the training has not seen, without the label."""
    columns = dict(draw(count, seed=5).columns)
    del columns["clicked"]
    return columns


@pytest.mark.parametrize("kind", ["cpu", "xla"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_rows_have_torchrecs_probabilities(kind, ending, config, export, tmp_path):
    rows = new_rows(300)
    data = write(tmp_path / f"new.{ending}", rows)

    found = answers_of(export, data, device=kind, batch_size=128)

    assert [answer["input"] for answer in found] == list(range(1, 301))
    probabilities = [answer["probability"] for answer in found]
    expected = by_torchrec(config, export, pd.DataFrame(rows))
    assert probabilities == pytest.approx(expected, abs=CLOSE)
    assert max(probabilities) - min(probabilities) > 0.2


def test_clicks_are_predicted_in_the_precision_of_the_run(export, tmp_path, capsys):
    data = write(tmp_path / "new.csv", new_rows(5))
    old = without_precision(export, tmp_path / "old")

    assert precision_of(export, data) == "float32"  # of the trial
    assert "precision" not in capsys.readouterr().err
    assert precision_of(export, data, precision="fast_float32") == "fast_float32"
    assert precision_of(old, data) == "bfloat16"
    assert f"{old} does not say in which precision" in capsys.readouterr().err


def test_several_files_are_one_after_the_other(export, tmp_path):
    rows = new_rows(20)
    write(tmp_path / "new/2.csv", part(rows, 12, 20))
    write(tmp_path / "new/1.csv.gz", part(rows, 0, 12), ";")
    whole = write(tmp_path / "whole.csv", rows)

    assert answers_of(export, tmp_path / "new/*.csv*") == answers_of(export, whole)


def test_a_row_that_cannot_be_used_is_named_and_passed_over(export, tmp_path):
    rows = new_rows(10)
    expected = answers_of(export, write(tmp_path / "whole.csv", rows))
    rows["price"][3] = "cheap"
    rows["views"][7] = -1
    data = write(tmp_path / "new.csv", rows)

    with pytest.raises(InputError, match="new.csv row 4: the column price has 'cheap'.*--skip-br"):
        answers_of(export, data)
    found = answers_of(export, data, skip_broken=True)

    assert "the column price has 'cheap'" in found[3].pop("error")
    assert "views" in found[7].pop("error")
    for index, answer in enumerate(found):
        if index in (3, 7):
            assert answer == {"input": index + 1}
        else:
            assert answer["probability"] == pytest.approx(expected[index]["probability"], abs=CLOSE)


@pytest.mark.parametrize("at", [0, 5])
def test_answers_before_an_unreadable_row_come_out(at, export, tmp_path):
    data = write(tmp_path / "new.csv", new_rows(10))
    expected = answers_of(export, data)
    lines = data.read_text().splitlines()
    lines[1 + at] += ",1"
    data.write_text("\n".join(lines))

    found, error = answers_before(export, data)

    assert f"new.csv row {at + 1}: it has " in error
    assert "columns instead of" in error
    assert [answer["input"] for answer in found] == list(range(1, at + 1))
    for answer, whole in zip(found, expected, strict=False):
        assert answer["probability"] == pytest.approx(whole["probability"], abs=CLOSE)


def test_answers_before_a_row_without_end_come_out(export, tmp_path, monkeypatch):
    monkeypatch.setattr(clicks, "BLOCK_BYTES", 2_000)
    data = write(tmp_path / "new.csv", new_rows(1500))
    lines = data.read_text().splitlines()
    lines[1001] = f'"{lines[1001]}'
    data.write_text("\n".join(lines))

    found, error = answers_before(export, data, batch_size=64)

    assert [answer["input"] for answer in found] == list(range(1, 1001))
    assert "has a row of more than 2000 bytes" in error


def test_rows_that_an_open_quote_swallows_have_no_answer(export, tmp_path):
    rows = new_rows(10)
    columns = {name: values for name, values in rows.items() if name != "user"}
    data = write(tmp_path / "new.csv", columns | {"user": rows["user"]})
    lines = data.read_text().splitlines()
    start, _, user = lines[6].rpartition(",")
    lines[6] = f'{start},"{user}'
    data.write_text("\n".join(lines))

    found, error = answers_before(export, data)

    assert [answer["input"] for answer in found] == [1, 2, 3, 4, 5]
    assert 'new.csv has a quote (") that is not closed' in error


def test_what_training_has_not_seen_is_said(export, tmp_path, capsys):
    rows = new_rows(5)
    rows["user"][0] = "somebody else"
    data = write(tmp_path / "new.csv", rows)

    predict.main(predict.Config(model_dir=str(export), data=str(data), device="cpu"))

    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 5
    assert "values without an id of their own, which share 0: user 1" in error


def test_what_cannot_be_predicted_is_refused(export, tmp_path):
    rows = new_rows(5)
    data = write(tmp_path / "new.csv", rows)
    without = dict(rows)
    del without["item"]
    of_criteo = tmp_path / "criteo"
    shutil.copytree(export, of_criteo)
    shutil.rmtree(of_criteo / "clicks")

    with pytest.raises(InputError, match="has no folder clicks, .*DATASET=clicks"):
        answers_of(of_criteo, data)
    with pytest.raises(InputError, match="has no column item"):
        answers_of(export, write(tmp_path / "without.csv", without))
    with pytest.raises(InputError, match="is a folder; give its files"):
        answers_of(export, tmp_path)
    with pytest.raises(InputError, match="there is no file"):
        answers_of(export, tmp_path / "none.csv")
    with pytest.raises(InputError, match="--data is missing"):
        answers_of(export, "-")
