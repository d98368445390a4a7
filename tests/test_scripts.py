"""What all five scripts must do, each with its trial run (trials.py): learn, resume exactly, give the same numbers on
other devices, keep the graph contract, write a run folder, refuse bad values."""

import glob
import json
import math
import os
import re
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
from helpers import (
    assert_graph_contract,
    command,
    crash,
    equal,
    exported,
    flags,
    losses,
    records,
    start,
    stop_at,
    summary,
    terminate,
)
from trials import SMOOTH_UNITS, TRIALS

from data.glue import TASKS
from errors import InputError
from train import glue

every_script = pytest.mark.parametrize("name", TRIALS)
# Where a test trains anew, which takes up to half a minute of a core, two scripts show what holds for all; the others'
# are slow.
QUICK = ("dlrm", "glue")
quick_scripts = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRIALS]
)


def crash_in_evaluation(script: ModuleType, config: Any) -> None:
    """Trains until the next evaluation raises an exception."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(script, "evaluate", lambda *_: 1 / 0)
        script.main(config)


def within(metrics: dict[str, float], ranges: dict[str, tuple[float, float]]) -> bool:
    return all(low <= metrics[name] <= high for name, (low, high) in ranges.items())


@every_script
def test_a_trial_learns_and_its_folder_tells_about_it_and_that_it_kept_the_graph_contract(name, run_of):
    path, metrics, config = run_of(name)
    assert within(metrics, TRIALS[name].learned), metrics
    assert_graph_contract(path)
    found = summary(path)
    assert found["metrics"] == metrics and found["training_seconds"] > 0
    assert found.get("examples_per_second", found.get("tokens_per_second")) > 0
    assert json.load(open(f"{path}/config.json"))["config"]["lr"] == config.lr
    if name != "transformer":  # whose last evaluation is of the mean of checkpoints
        assert {f"eval/{metric}": value for metric, value in metrics.items()}.items() <= records(path)[-1].items()
    path, *_ = run_of(name, "short")
    assert len(losses(path)) == summary(path)["steps"]
    checkpoints = [f"step_{step:08d}" for step in TRIALS[name].checkpoints]
    assert sorted(os.listdir(f"{path}/checkpoints")) == checkpoints


@every_script
def test_a_finished_run_is_not_trained_again_nor_with_other_values(name, run_of, capsys, refused):
    path, metrics, config = run_of(name)
    before = {entry.path: entry.stat().st_mtime_ns for entry in os.scandir(path) if entry.name != ".lock"}
    script = TRIALS[name].script
    assert script.main(config) == metrics
    assert "is finished" in capsys.readouterr().out
    arguments = ["tiny", *flags(replace(config, lr=0.123), script.TINY)]
    refused(script, arguments, f"lr was {config.lr}, now 0.123.*another --name")
    assert before == {entry.path: entry.stat().st_mtime_ns for entry in os.scandir(path) if entry.name != ".lock"}


@every_script
def test_without_a_learning_rate_it_does_not_learn(name, tmp_path):
    trial = TRIALS[name]
    metrics = trial.script.main(replace(trial.learns, **trial.still, lr=0.0, runs=str(tmp_path)))
    assert within(metrics, trial.untrained), metrics
    assert not any(within(metrics, {name: trial.learned[name]}) for name in trial.untrained)


@quick_scripts
def test_one_device_gives_the_losses_of_four_within_its_graphs(name, run_of, tmp_path):
    trial = TRIALS[name]
    path, metrics, config = run_of(name, "alike" if trial.alike else "short")
    config = replace(config, runs=str(tmp_path), name="one")
    code, output = start(trial.script, config, devices=1, before=SMOOTH_UNITS if trial.alike_with else "")
    assert code == 0 and "on 1 CPU device(s)" in output, output
    one, four = losses(tmp_path / "one"), losses(path)
    assert len(one) == len(four)
    for count, tolerance in trial.close.items():
        assert one[:count] == pytest.approx(four[:count], rel=tolerance)
        assert len(four) >= count
    assert max(four[:count]) - min(four[:count]) > trial.moved
    if count == len(four):  # as close to the end
        assert summary(tmp_path / "one")["metrics"] == pytest.approx(metrics, rel=tolerance)
    assert_graph_contract(tmp_path / "one", trial.graphs)
    # Beside losses, the host reads evaluations, checkpoints, numbers that hosts compare, and the export.
    assert summary(tmp_path / "one")["report"]["host_reads"] <= len(one) + trial.reads


@every_script
def test_killed_and_terminated_it_resumes_to_the_same_numbers(name, run_of, tmp_path, capsys):
    """DLRM, which has tables besides, stands for all that crash: what they leave is Run's business."""
    trial = TRIALS[name]
    path, metrics, config = run_of(name, "short")
    config = replace(config, runs=str(tmp_path), name="stopped")
    folder = f"{tmp_path}/stopped"
    if name == "dlrm":
        stop_at(2, crash, trial.script.main, config)  # before the first checkpoint
    code, output = start(trial.script, config, stop=trial.kill)
    assert code == -trial.kill.number and f"step {trial.kill.saved:>5}/" in output, output
    capsys.readouterr()
    stop_at(trial.terminate, terminate, trial.script.main, replace(config, workers=1))
    crash_in_evaluation(trial.script, config)
    checkpoint = max(glob.glob(f"{folder}/checkpoints/*"))
    evaluated = int(checkpoint[-8:])
    assert os.path.exists(f"{checkpoint}/COMPLETE") and evaluated > trial.terminate
    assert not [record for record in records(folder) if record["step"] == evaluated and "loss" not in record]
    assert trial.script.main(config) == metrics
    output = capsys.readouterr().out
    for step in (trial.kill.saved, trial.terminate, evaluated):
        assert f"resuming after step {step}\n" in output, output
    assert records(folder) == records(path)  # every loss, learning rate and metric, bit for bit
    assert equal(exported(folder), exported(path))


@every_script
def test_a_checkpoint_has_the_metrics_of_its_evaluation(name, run_of):
    """The Transformer's last evaluation but one: the last is of the mean of checkpoints."""
    path, *_ = run_of(name, "short")
    last = f"{path}/checkpoints/step_{TRIALS[name].checkpoints[-1]:08d}"
    evaluated = [record for record in records(path) if any(key.startswith("eval/") for key in record)]
    found = json.load(open(f"{last}/metrics.json"))
    metrics = {key.removeprefix("eval/"): value for key, value in evaluated[-1].items() if key.startswith("eval/")}
    assert found == {"step": evaluated[-1]["step"], "metrics": metrics}


def test_help_shows_every_flag_and_what_is_not_known_suggests_the_right_word(capsys):
    code, text, _ = command("tiny --help", glue.main, glue.PRESETS, capsys)
    shown = {field.name for config in (glue.TINY, glue.TINY.layout) for field in fields(config)} - {"layout"}
    assert code == 0 and [name for name in shown if f"--{name.replace('_', '-')}" not in text] == []
    for words, suggested in (("--logevery 8", ["--log-every"]), ("--task sst3", ["sst3", *TASKS])):
        code, _, error = command(f"tiny {words}", glue.main, glue.PRESETS, capsys)
        assert code == 2 and [word for word in suggested if word not in error] == [] and "Traceback" not in error


@every_script
def test_numbers_outside_of_their_range_and_no_data_are_refused(name):
    trial = TRIALS[name]
    config = trial.script.validate(trial.script.TINY)  # every field has a value
    numbers = [one.name for one in fields(config) if type(getattr(config, one.name)) in (int, float)]

    def accepted(value: float) -> list[str]:
        found = []
        for number in numbers:
            try:
                trial.script.validate(replace(config, **{number: value}))
                found.append(number)
            except InputError as error:
                assert re.match(f"--{number.replace('_', '-')} is {value}; it must be (at least|above) ", str(error))
        return found

    assert accepted(-2) == accepted(math.nan) == []
    assert accepted(0) == trial.may_be_0.split()
    with pytest.raises(InputError, match="--data is missing.*synthetic"):
        trial.script.validate(replace(config, data=""))


FINITE = "loss is (nan|inf) at step .*the training diverged.*lower --lr"
SAVED = r"is not finite at step \d+: .*nothing is saved; .*lower --lr"


@quick_scripts
@pytest.mark.parametrize(
    ("changes", "pattern"), [({}, FINITE), ({"log_every": 10**6, "save_every": 1}, SAVED)], ids=["loss", "weights"]
)
def test_what_is_not_finite_stops_the_run_and_is_never_saved(name, changes, pattern, refused, tmp_path):
    trial = TRIALS[name]
    config = replace(trial.short, **trial.diverges, **changes, runs=str(tmp_path), name="run")
    refused(trial.script, ["tiny", *flags(config, trial.script.TINY)], pattern)
    for weights in tmp_path.glob("run/checkpoints/*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in safetensors.torch.load_file(weights).values()), weights
