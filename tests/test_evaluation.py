"""Evaluates finished runs again, --evaluate: the run's own metrics, other flags, refusals. Other
data is in the tests of each script.
"""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import assert_refused, start, summary
from trials import TRIALS

from data import splits
from errors import InputError
from train import glue, resnet50
from train.common import cli, device, files
from train.common.evaluation import FinishedRun, resolve_config

every_script = pytest.mark.parametrize("name", TRIALS)
# A test with the name of a script runs in the process that has trained the trial of that script.
of_glue = pytest.mark.parametrize("name", ["glue"])


def recorded(path: str, pattern: str = "synthetic*-usual.json") -> dict:
    """Returns what the last evaluation has written into its run."""
    files = Path(path, "evaluations").glob(pattern)
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text())


# ---- a run's own data ----------------------------------------------------------------------------
@every_script
def test_a_run_evaluated_again_has_its_own_metrics(name, run_of, capsys):
    path, metrics, _ = run_of(name)
    script = TRIALS[name].script
    before = Path(path, "summary.json").read_bytes()

    again = script.main(script.Config(evaluate=path))

    assert again == metrics
    file = recorded(path)
    assert file["metrics"] == summary(path)["metrics"]
    assert file["data"] == "synthetic"
    assert file["changed"] == {}
    assert file["versions"]["torch"]
    assert Path(path, "summary.json").read_bytes() == before
    report = device.graph_report()
    assert report["recompilations"] == report["fallbacks"] == []
    output = capsys.readouterr().out
    assert f"evaluating {path} on synthetic: " in output
    assert "\nevaluation: " in output


@pytest.mark.slow
@every_script
def test_one_device_evaluates_what_four_have_trained(name, run_of):
    path, metrics, _ = run_of(name)
    script = TRIALS[name].script

    code, output = start(script, replace(script.TINY, evaluate=path, workers=0), devices=1)

    assert code == 0, output
    assert "on 1 CPU device(s)" in output
    found = recorded(path)
    assert found["devices"] == {"kind": "CPU", "devices": 1, "hosts": 1}
    assert found["metrics"] == pytest.approx(metrics, rel=1e-3)


@of_glue
def test_the_command_line_takes_the_flags_that_count(name, run_of, capsys, monkeypatch):
    """The values of the preset do not count: it has another batch and another task."""
    path, metrics, _ = run_of(name)
    words = ["full", "--evaluate", path, "--batch-size", "64", "--split", "dev", "--task", "sst2"]
    monkeypatch.setattr("sys.argv", ["glue.py", *words])

    cli.run(glue.main, glue.PRESETS)

    file = recorded(path, "synthetic*-dev.json")
    assert file["metrics"] == pytest.approx(metrics, rel=1e-5)
    assert file["changed"] == {"batch_size": 64}
    assert file["examples"] == 512
    assert cli.given(glue.Config()) == frozenset()


@of_glue
def test_plain_pytorch_evaluates_what_xla_has_trained(name, run_of, monkeypatch):
    path, metrics, _ = run_of(name)
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")

    found = glue.main(glue.Config(evaluate=path, device="cpu", split="train"))

    assert found["accuracy"] > 0.95
    assert found["loss"] != metrics["loss"]
    assert recorded(path, "synthetic*-train.json")["changed"] == {"device": "cpu"}


# ---- settings ------------------------------------------------------------------------------------
@pytest.fixture
def finished(tmp_path) -> Path:
    """A run of train/glue.py as far as its settings go."""
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    config = replace(glue.validate(glue.TINY), lr=0.5, lengths=(8, 24))
    stored = json.loads(json.dumps(cli.flat(config)))
    for name in ("mesh", "shard_state", "remat", "safe_forms"):
        del stored[name]
    stored["layout"] = {"mesh": "data=2", "shard_state": "none", "remat": False}
    command = "python -m train.glue tiny --lr 0.5"
    content = {"config": stored, "starts": [{"command": command}]}
    (run / "config.json").write_text(json.dumps(content))
    (run / "summary.json").write_text("{}")
    return run


def test_the_settings_are_those_of_the_run(finished):
    config = resolve_config(glue.Config(evaluate=f"{finished}/", workers=0, split="test"))

    assert config.evaluate == str(finished)
    assert config.split == "test"
    assert config.lr == 0.5
    assert config.lengths == (8, 24)
    assert config.layout.mesh == "data=2"
    assert config.safe_forms is False  # the old run did not have it
    assert config.data == "synthetic"


def test_a_flag_of_the_layout_counts(finished):
    given = glue.Config(evaluate=str(finished))
    given = replace(given, layout=replace(given.layout, mesh="data=4"))
    assert resolve_config(given).layout.mesh == "data=4"


def test_without_a_run_nothing_changes():
    assert resolve_config(glue.TINY) is glue.TINY


def test_data_is_the_runs_own_by_any_of_its_names(finished, tmp_path, monkeypatch):
    content = json.loads((finished / "config.json").read_text())
    content["config"]["data"] = "mine.csv"
    (finished / "config.json").write_text(json.dumps(content))
    (tmp_path / "mine.csv").touch()
    monkeypatch.chdir(tmp_path)
    run = FinishedRun(str(finished))

    assert run.owns("mine.csv")
    assert run.owns(f"{tmp_path}/mine.csv")
    assert not run.owns("other.csv")


def test_evaluations_of_other_data_have_files_of_their_own(finished, mesh):
    run = FinishedRun(str(finished))
    config = resolve_config(glue.Config(evaluate=str(finished)))
    for data in ("a/new.csv", "b/new.csv", "a/new.csv"):
        run.record(replace(config, data=data), mesh, 3, {"loss": float("nan")})

    written = sorted(path.name for path in (finished / "evaluations").iterdir())
    assert written == ["new.csv-2-usual.json", "new.csv-usual.json"]
    assert recorded(finished, "new.csv-2-usual.json")["data"] == "b/new.csv"
    assert recorded(finished, "new.csv-usual.json")["metrics"] == {"loss": None}


@pytest.mark.parametrize("other", ["a flag", "a metric", "a device"])
def test_no_evaluation_takes_the_place_of_another(other, finished, mesh):
    run = FinishedRun(str(finished))
    config = replace(resolve_config(glue.Config(evaluate=str(finished))), data="new.csv")
    run.record(config, mesh, 3, {"loss": 1.0})
    first = (finished / "evaluations/new.csv-usual.json").read_bytes()

    if other == "a flag":
        run.record(replace(config, batch_size=64), mesh, 3, {"loss": 1.0})
    elif other == "a metric":
        run.record(config, mesh, 3, {"loss": 2.0})
    else:
        run.record(config, replace(mesh, kind="TPU v5e"), 3, {"loss": 1.0})
    run.record(config, mesh, 3, {"loss": 1.0})

    written = sorted(path.name for path in (finished / "evaluations").iterdir())
    assert written == ["new.csv-2-usual.json", "new.csv-usual.json"]
    again = recorded(finished, "new.csv-usual.json")
    assert again["metrics"] == json.loads(first)["metrics"]
    assert again["changed"] == {}


def test_two_evaluations_at_once_have_files_of_their_own(finished, mesh, monkeypatch):
    config = replace(resolve_config(glue.Config(evaluate=str(finished))), data="new.csv")
    write_file = files.write_file

    def evaluate(loss: float) -> None:
        FinishedRun(str(finished)).record(config, mesh, 3, {"loss": loss})

    other = threading.Thread(target=evaluate, args=(2.0,))

    def write_while_the_other_evaluates(path: str, content: bytes) -> None:
        monkeypatch.setattr(files, "write_file", write_file)
        other.start()
        other.join(0.3)  # it waits, or has taken this name
        write_file(path, content)

    monkeypatch.setattr(files, "write_file", write_while_the_other_evaluates)
    evaluate(1.0)
    other.join()

    assert recorded(finished, "new.csv-usual.json")["metrics"] == {"loss": 1.0}
    assert recorded(finished, "new.csv-2-usual.json")["metrics"] == {"loss": 2.0}


def test_words_of_a_split_mean_the_same():
    assert [splits.wanted(word) for word in ("", "dev", "Validation", "train")] == [
        "",
        "valid",
        "valid",
        "train",
    ]
    with pytest.raises(InputError, match="--split is held; expected train, valid or test"):
        splits.wanted("held")


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr 0.1", "--lr is 0.1; .*run was trained with 0.5, which counts.*leave --lr out"),
        ("--lengths 32", r"--lengths is \(32,\); .* was trained with \(8, 24\)"),
        ("--precision bfloat16", "--precision is bfloat16; .* with float32"),
        ("--profile 2:3", "--profile is for a training"),
        ("--batch-size 0", "--batch-size is 0; it must be at least 1"),
    ],
)
def test_flags_that_contradict_the_run_are_refused(flags, message, finished, capsys):
    words = ["full", "--evaluate", finished, *flags.split()]
    assert_refused(words, message, glue, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: shutil.rmtree(run), "is no run: .* such as runs/<name>"),
        (lambda run: (run / "summary.json").unlink(), "not finished.*train.glue tiny --lr 0.5$"),
        (lambda run: (run / "export").rmdir(), "has no export.*copy the whole folder"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is damaged"),
        (lambda run: (run / "config.json").write_text('{"lr": 1}'), "is no run: .*its export"),
    ],
    ids=["none", "unfinished", "no export", "damaged", "another file"],
)
def test_a_folder_that_is_no_finished_run_is_refused(change, message, finished):
    change(finished)
    with pytest.raises(InputError, match=message):
        glue.main(glue.Config(evaluate=str(finished)))


def test_a_run_of_another_script_is_refused(finished):
    with pytest.raises(InputError, match="was trained with checkpoint, clip.*the script"):
        resnet50.main(resnet50.Config(evaluate=str(finished)))


@every_script
def test_a_split_without_a_run_is_refused(name):
    script = TRIALS[name].script
    with pytest.raises(InputError, match="--split is test; it is for --evaluate"):
        script.main(replace(script.TINY, split="test"))
