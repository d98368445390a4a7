"""--best and --patience: which checkpoint is the best, when the training ends, and that a kill at
any moment changes neither."""

import dataclasses
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import kills
import pytest
import torch
from best_runs import EVALUATIONS, Config, result, stopping_at, train
from checkpoints import damage, flip, names
from helpers import command, crash, equal, exported, stop_at, summary
from trials import TRIALS

from errors import InputError
from train.common import best, checkpoint
from train.common import run as tracking
from train.common.best import Best
from train.common.evaluation import FinishedRun
from train.common.mesh import WHOLE, Layout

METRICS = ("accuracy", "loss", "mismatched_accuracy")


# ---- the decision --------------------------------------------------------------------------------
def found(metric: str, *values: float | None) -> tuple[int, int]:
    """Returns the step of the best of the evaluations at steps 10, 20, …, and how many came after
    it."""
    evaluations = {}
    for number, value in enumerate(values, 1):
        evaluations[10 * number] = {metric.removeprefix("-"): value, "other": number}
    result = best.criterion(metric, 0, METRICS).find(evaluations)
    assert result.metrics == evaluations.get(result.step, {})
    return result.step, result.evaluations_since


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("accuracy", [0.1, 0.3, 0.2], (20, 1)),
        ("-loss", [3.0, 1.0, 2.0, 1.5], (20, 2)),
        ("accuracy", [-0.5, -0.7], (10, 1)),
        ("accuracy", [0.4], (10, 0)),
        ("accuracy", [], (0, 0)),
    ],
)
def test_the_best_evaluation_is_found(metric, values, expected):
    assert found(metric, *values) == expected


@pytest.mark.parametrize("metric", ["accuracy", "-loss"])
def test_of_equal_evaluations_the_first_is_the_best(metric):
    assert found(metric, 0.5, 0.5, 0.5) == (10, 2)


def test_a_value_that_is_not_finite_is_never_the_best():
    assert found("accuracy", None, 0.2, None) == (20, 1)
    assert found("accuracy", None, None) == (0, 2)


def test_patience_counts_evaluations_without_a_better_one():
    three = best.criterion("accuracy", 3, METRICS)

    assert not three.ends_training(Best(step=10, evaluations_since=2))
    assert three.ends_training(Best(step=10, evaluations_since=3))
    assert three.ends_training(Best(step=0, evaluations_since=3))  # none was finite
    never = best.criterion("accuracy", 0, METRICS)
    assert not never.ends_training(Best(step=10, evaluations_since=99))


# The flags, and the sentence.
REFUSED = [
    ("acuracy", 0, r"--best is acuracy \(is it accuracy\?\); .* accuracy, -loss, mismatched_acc"),
    ("-los", 0, r"--best is -los \(is it -loss\?\)"),
    ("xyz", 0, r"--best is xyz; the evaluation has accuracy, -loss"),
    ("loss", 0, r"--best is loss, of which lower is better; give --best -loss"),
    ("", 3, r"--patience is 3, and there is no --best; .* accuracy, -loss"),
    ("accuracy", -1, r"--patience is -1; it must be at least 0"),
]


@pytest.mark.parametrize(("metric", "patience", "sentence"), REFUSED)
def test_what_cannot_be_the_best_is_refused(metric, patience, sentence):
    with pytest.raises(InputError, match=sentence):
        best.criterion(metric, patience, METRICS)


# ---- a training that is killed -------------------------------------------------------------------
def test_the_best_checkpoint_is_kept_and_exported(mesh, tmp_path, capsys):
    config = Config(str(tmp_path))
    metrics = train(config, mesh, {1: 0.5, 2: 0.7, 4: 0.6, 6: 0.1})

    trained = result(config)
    assert metrics == trained.summary["metrics"] == {"accuracy": 0.7, "f1": 2 / 3}
    assert trained.weight == 2
    assert trained.summary["steps"] == 6
    assert trained.summary["best"] == {"metric": "accuracy", "step": 2, "value": 0.7}
    assert trained.summary["stopped_early"] is None
    assert names(f"{tmp_path}/mine/checkpoints") == {"step_00000002", "step_00000006"}
    printed = capsys.readouterr().out
    assert "the checkpoint with the highest accuracy is kept and exported\n" in printed
    lines = [line for line in printed.splitlines() if "evaluation:" in line]
    assert [line.endswith("best so far") for line in lines] == [True, True, False, False]
    assert table_of(printed)["best checkpoint"] == "step 2, by --best accuracy (0.7000)"


def table_of(printed: str) -> dict[str, str]:
    """Returns the rows of the table that a finished run prints."""
    rows = {}
    for line in printed.splitlines():
        label, _, value = line.strip().partition("  ")
        rows[label] = value.strip()
    return rows


def test_patience_ends_the_training_which_is_then_finished(mesh, tmp_path, capsys):
    config = Config(str(tmp_path), patience=2)
    train(config, mesh, EVALUATIONS)

    trained = result(config)
    assert trained.weight == 2
    assert trained.summary["steps"] == 5
    assert trained.summary["stopped_early"] == {"step": 5, "total_steps": 6, "patience": 2}
    printed = capsys.readouterr().out
    assert "stopped early at step 5 of 6: 2 evaluation(s) without a better accuracy" in printed
    assert table_of(printed)["stopped early"].startswith("at step 5 of 6, after 2 evaluation(s)")

    assert train(config, mesh, {}) == trained.summary["metrics"], "nothing is left to train"


def test_patience_that_ends_with_the_last_step_is_no_early_stop(mesh, tmp_path):
    config = Config(str(tmp_path), patience=2)
    train(config, mesh, {2: 0.7, 4: 0.6, 6: 0.6})
    assert result(config).summary["stopped_early"] is None


def test_without_a_finite_metric_the_newest_state_is_exported(mesh, tmp_path, capsys):
    config = Config(str(tmp_path))
    train(config, mesh, {2: math.nan, 6: math.nan})

    assert result(config).weight == 6
    assert result(config).summary["best"] == {"metric": "accuracy", "step": None, "value": None}
    assert "no evaluation had a finite accuracy: the newest state" in capsys.readouterr().out


def test_a_kill_at_any_moment_changes_nothing(mesh, tmp_path):
    """Neither the result nor metrics.jsonl: in a save, between it and its evaluation, after that,
    after the decision to end, before and in the export."""
    whole = Config(f"{tmp_path}/whole", patience=2)
    with kills.before(None, tmp_path) as moments:
        train(whole, mesh, EVALUATIONS)
    expected = result(whole)
    assert moments.seen > 50

    for number in range(1, moments.seen + 1):
        config = Config(f"{tmp_path}/{number}", patience=2)
        with kills.before(number, tmp_path), pytest.raises(kills.Killed):
            train(config, mesh, EVALUATIONS)
        train(config, mesh, EVALUATIONS)
        assert result(config) == expected, f"killed before write {number}"


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("newest", [3, 4, 5, 6])
def test_a_torn_newest_checkpoint_changes_nothing(newest, keep, mesh, tmp_path):
    """The run trains on from the one before it, and the best of what is left is still there."""
    whole = Config(f"{tmp_path}/whole", keep=keep)
    train(whole, mesh, EVALUATIONS)
    config = Config(f"{tmp_path}/torn", keep=keep)
    folder = stop_at_checkpoint(config, mesh, newest)
    damage(str(folder), newest, "state.safetensors", lambda content: flip(content, -1))

    train(config, mesh, EVALUATIONS)
    assert result(config) == result(whole)


def stop_at_checkpoint(config: Config, mesh, step: int) -> Path:
    """Trains until the checkpoint of a step is complete; returns the folder of the checkpoints."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        stopping_at(step, patch)
        train(config, mesh, EVALUATIONS)
    return Path(config.runs, config.name, "checkpoints")


def test_a_damaged_best_checkpoint_is_refused_with_a_way_out(mesh, tmp_path):
    whole = Config(f"{tmp_path}/whole", keep=9)
    train(whole, mesh, EVALUATIONS | {6: 0.1})
    config = Config(f"{tmp_path}/damaged", keep=9)
    folder = stop_at_checkpoint(config, mesh, 6)
    damage(str(folder), 2, "state.safetensors", lambda content: flip(content, -1))

    sentence = "the checkpoint of step 2 in .*, the best one, is damaged or missing; remove it and"
    with pytest.raises(InputError, match=sentence):
        train(config, mesh, EVALUATIONS | {6: 0.1})

    for step in range(2, 7):
        shutil.rmtree(folder / f"step_{step:08d}")
    train(config, mesh, EVALUATIONS | {6: 0.1})
    assert result(config) == result(whole)


@pytest.mark.parametrize("edit", [None, lambda content: content[:-8]])
def test_a_lost_best_checkpoint_is_seen_before_step_1(edit, mesh, tmp_path, capsys):
    """Not at the end of a training whose last state nobody can then export."""
    config = Config(str(tmp_path))
    folder = stop_at_checkpoint(config, mesh, 5)
    damage(str(folder), 2, "state.safetensors", edit)
    capsys.readouterr()

    with pytest.raises(InputError, match=r"step 2 in .*, the best one, is damaged or missing"):
        train(config, mesh, {5: 0.1, 6: 0.9})
    assert "step     " not in capsys.readouterr().out, "nothing was trained or evaluated"


def test_a_script_that_forgets_a_step_is_told(mesh, tmp_path):
    config = Config(str(tmp_path))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match="before load_best"),
    ):
        patch.setattr(tracking.Run, "load_best", lambda run: {})
        train(config, mesh, EVALUATIONS | {6: 0.1})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="was not saved"):
        patch.setattr(tracking.Run, "checkpoint", lambda *_, **options: None)
        train(replace(config, name="other"), mesh, EVALUATIONS)


# ---- older runs, and infinity -------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class ByRecipe:
    """A Config whose --best is the recipe's where it is None, as GLUE's."""

    runs: str = "runs"
    data: str = "numbers"
    name: str = "mine"
    best: str | None = None
    patience: int = 0
    clip: float | None = None
    evaluate: str = ""
    split: str = ""


def begin(config: ByRecipe, mesh) -> None:
    """Begins a run, or resumes it, and trains nothing."""
    tracking.Run(config, mesh, name="net", headline="net", total_steps=9, metrics=METRICS).close()


def test_a_run_without_the_flag_had_no_best(mesh, tmp_path):
    begin(ByRecipe(str(tmp_path), best=""), mesh)
    file = tmp_path / "mine/config.json"
    content = json.loads(file.read_text())
    for name in ("best", "patience"):
        del content["config"][name]
    file.write_text(json.dumps(content))

    begin(ByRecipe(str(tmp_path), best=""), mesh)
    with pytest.raises(InputError, match='best was "", now accuracy'):
        begin(ByRecipe(str(tmp_path), best="accuracy"), mesh)


def test_a_run_that_does_not_clip_resumes_and_is_read_again(mesh, tmp_path):
    """JSON has no infinity."""
    config = ByRecipe(str(tmp_path), best="-loss", clip=math.inf)
    begin(config, mesh)
    begin(config, mesh)
    with pytest.raises(InputError, match=r"clip was inf, now 1\.0"):
        begin(replace(config, clip=1.0), mesh)

    run = tmp_path / "mine"
    assert json.loads((run / "config.json").read_text())["config"]["clip"] == "inf"
    (run / "summary.json").write_text("{}")
    (run / "export").mkdir()
    assert FinishedRun(str(run)).config(ByRecipe) == replace(config, evaluate=str(run))


# ---- the scripts ---------------------------------------------------------------------------------
# A short run of each that is evaluated a few times, and the step at which it crashes once.
SHORT = {
    "dlrm": replace(
        TRIALS["dlrm"].short,
        bottom=(16, 4),
        top=(16, 1),
        warmup_steps=0,
        eval_every=1,
        save_every=100,
        keep=1,
        plan="exchange",
        best="auc",
    ),
    "glue": replace(TRIALS["glue"].short, best="accuracy"),
    "pretrain": replace(TRIALS["pretrain"].short, keep=1, best="accuracy"),
    "squad": replace(TRIALS["squad"].short, best="f1"),
    "resnet50": replace(TRIALS["resnet50"].short, keep=1, best="top1"),
    "tagging": replace(TRIALS["tagging"].short, best="f1"),
    "transformer": replace(TRIALS["transformer"].short, eval_every=8, keep=1, best="bleu"),
}
CRASHES_AT = {"dlrm": 3, "glue": 12, "pretrain": 7, "resnet50": 40, "squad": 12, "tagging": 12}
CRASHES_AT["transformer"] = 20

SCRIPTS = []
for script_name in SHORT:
    is_slow = script_name != "dlrm"
    SCRIPTS.append(pytest.param(script_name, marks=pytest.mark.slow if is_slow else ()))


def snapshot(state) -> dict[str, torch.Tensor]:
    """Returns the weights of a script's state, of tables too, on the host."""
    tensors = dict(state.model.named_parameters()) | dict(state.model.named_buffers())
    weights = checkpoint.to_host(tensors)
    if hasattr(state, "embeddings"):
        weights |= state.embeddings.pieces()
    return weights


def watch(script, monkeypatch) -> tuple[list, list]:
    """Makes each evaluation of a script worse than the one before it, and free of cost; returns the
    weights that were evaluated, and those that were exported."""
    evaluated = []
    exported_weights = []
    export = script.export
    evaluation = tracking.Run.evaluation

    def evaluate(*arguments) -> dict[str, float]:
        (state,) = [argument for argument in arguments if isinstance(argument, script.State)]
        evaluated.append(snapshot(state))
        return {}

    def record(run, step: int) -> None:
        evaluation(run, step, **{name: 1 / step for name in run.criterion.metrics})

    def watched_export(folder: str, state, *arguments, **options) -> None:
        exported_weights.append(snapshot(state))
        export(folder, state, *arguments, **options)

    monkeypatch.setattr(script, "evaluate", evaluate)
    monkeypatch.setattr(script, "export", watched_export)
    monkeypatch.setattr(tracking.Run, "evaluation", record)
    return evaluated, exported_weights


# Constants of train/dlrm.py: two small tables, and four steps.
FEW_CLICKS = {
    "SYNTHETIC_ROWS": (60, 300),
    "SYNTHETIC_LOOKUPS": (1, 2),
    "SYNTHETIC_TRAIN": 1024,
    "SYNTHETIC_EVAL": 256,
}


def few_clicks(name: str, monkeypatch) -> None:
    """Gives DLRM small data."""
    if name == "dlrm":
        for constant, value in FEW_CLICKS.items():
            monkeypatch.setattr(TRIALS[name].script, constant, value)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_exports_its_best_state(name, tmp_path, monkeypatch):
    """Its weights and its tables, of which the first evaluation is the best here."""
    script = TRIALS[name].script
    few_clicks(name, monkeypatch)
    evaluated, exported_weights = watch(script, monkeypatch)

    script.main(replace(SHORT[name], runs=str(tmp_path)))

    assert equal(exported_weights[0], evaluated[0])
    assert not equal(exported_weights[0], evaluated[1])


@pytest.mark.slow
def test_cut_layers_export_their_best_state(tmp_path, monkeypatch):
    """With --mesh and --shard-state, whole and after a crash, and as without them."""
    script = TRIALS["glue"].script
    cut = replace(SHORT["glue"], runs=str(tmp_path), layout=Layout("data=2,model=2", "full"))
    evaluated, exported_weights = watch(script, monkeypatch)

    script.main(replace(cut, name="whole"))
    assert equal(exported_weights[0], evaluated[0])
    assert not equal(exported_weights[0], evaluated[1])

    crashed = replace(cut, name="crashed")
    stop_at(CRASHES_AT["glue"], crash, script.main, crashed)
    script.main(crashed)
    script.main(replace(cut, name="plain", layout=WHOLE))

    whole = exported(tmp_path / "whole")
    assert equal(exported(tmp_path / "crashed"), whole)
    plain = exported(tmp_path / "plain")
    assert plain.keys() == whole.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_script_that_crashes_exports_the_same_state(name, tmp_path, monkeypatch):
    script = TRIALS[name].script
    few_clicks(name, monkeypatch)
    watch(script, monkeypatch)
    whole = replace(SHORT[name], runs=str(tmp_path), name="whole")
    crashed = replace(whole, name="crashed")

    script.main(whole)
    stop_at(CRASHES_AT[name], crash, script.main, crashed)
    script.main(crashed)

    assert equal(exported(tmp_path / "crashed"), exported(tmp_path / "whole"))
    assert summary(tmp_path / "crashed")["best"] == summary(tmp_path / "whole")["best"]


@pytest.mark.parametrize("name", TRIALS)
def test_a_script_refuses_an_unknown_metric_before_step_1(name, tmp_path, capsys):
    script = TRIALS[name].script
    code, _, error = command(
        ["tiny", "--best", "-los", "--runs", tmp_path], script.main, script.PRESETS, capsys
    )
    assert code == 2
    assert "--best is -los (is it -loss?); the evaluation has " in error
    assert not list(tmp_path.iterdir())
