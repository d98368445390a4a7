"""What all scripts must do, each with its trial run (trials.py): learn, resume exactly, give
the same numbers on other devices, keep the graph contract, write a run folder, refuse bad values.
"""

import functools
import glob
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
    within,
)
from smooth import SMOOTH_UNITS
from trials import TRIALS, Trial

from data.glue import TASKS
from errors import InputError
from train import glue

every_script = pytest.mark.parametrize("name", TRIALS)

# Where a test trains anew, which takes up to half a minute of a core, two scripts show what holds
# for all; the others' are slow.
QUICK = ("dlrm", "glue")


def slow_but_for(quick: tuple[str, ...]) -> list:
    """Returns the scripts as parameters of a test: all but the quick ones are slow."""
    parameters = []
    for name in TRIALS:
        marks = () if name in quick else pytest.mark.slow
        parameters.append(pytest.param(name, marks=marks))
    return parameters


quick_scripts = pytest.mark.parametrize("name", slow_but_for(QUICK))
# DLRM has tables, which are exchanged by four devices and not by one, and stands for all.
quick_dlrm = pytest.mark.parametrize("name", slow_but_for(("dlrm",)))


# ---- a trial and its folder ----------------------------------------------------------------------
@every_script
def test_a_trial_learns(name, run_of):
    _, metrics, _ = run_of(name)
    assert within(metrics, TRIALS[name].learned), metrics


@every_script
def test_without_a_learning_rate_it_does_not_learn(name, tmp_path):
    trial = TRIALS[name]

    config = replace(trial.learns, **trial.still, lr=0.0, runs=str(tmp_path))
    metrics = trial.script.main(config)

    assert within(metrics, trial.untrained), metrics
    for metric in trial.untrained:
        assert not within(metrics, {metric: trial.learned[metric]}), metric


@every_script
def test_a_trial_keeps_the_graph_contract(name, run_of):
    path, _, _ = run_of(name)
    assert_graph_contract(path)


@every_script
def test_the_folder_of_a_trial_has_its_metrics_and_its_config(name, run_of):
    path, metrics, config = run_of(name)

    found = summary(path)
    assert found["metrics"] == metrics
    assert found["training_seconds"] > 0
    assert found.get("examples_per_second", found.get("tokens_per_second")) > 0
    assert json.load(open(f"{path}/config.json"))["config"]["lr"] == config.lr
    if name != "transformer":  # whose last evaluation is of the mean of checkpoints
        evaluated = {f"eval/{metric}": value for metric, value in metrics.items()}
        assert evaluated.items() <= records(path)[-1].items()


@every_script
def test_a_run_logs_every_step_and_keeps_its_checkpoints(name, run_of):
    path, _, _ = run_of(name, "short")

    assert len(losses(path)) == summary(path)["steps"]
    checkpoints = [f"step_{step:08d}" for step in TRIALS[name].checkpoints]
    assert sorted(os.listdir(f"{path}/checkpoints")) == checkpoints


@every_script
def test_a_checkpoint_has_the_metrics_of_its_evaluation(name, run_of):
    """The Transformer's last evaluation but one: the last is of the mean of checkpoints."""
    path, _, _ = run_of(name, "short")

    evaluations = []
    for record in records(path):
        metrics = {}
        for key, value in record.items():
            if key.startswith("eval/"):
                metrics[key.removeprefix("eval/")] = value
        if metrics:
            evaluations.append({"step": record["step"], "metrics": metrics})

    last_step = TRIALS[name].checkpoints[-1]
    found = json.load(open(f"{path}/checkpoints/step_{last_step:08d}/metrics.json"))
    assert found == evaluations[-1]


def modified(path: str) -> dict[str, int]:
    """Returns when each file of a run's folder was written, without its lock."""
    times = {}
    for entry in os.scandir(path):
        if entry.name != ".lock":
            times[entry.path] = entry.stat().st_mtime_ns
    return times


@every_script
def test_a_finished_run_is_not_trained_again(name, run_of, capsys):
    path, metrics, config = run_of(name)
    before = modified(path)

    assert TRIALS[name].script.main(config) == metrics

    assert "is finished" in capsys.readouterr().out
    assert modified(path) == before


@every_script
def test_a_finished_run_is_refused_with_other_values(name, run_of, refused):
    path, _, config = run_of(name)
    before = modified(path)
    script = TRIALS[name].script

    arguments = ["tiny", *flags(replace(config, lr=0.123), script.TINY)]
    refused(script, arguments, f"lr was {config.lr}, now 0.123.*another --name")

    assert modified(path) == before


# ---- other devices -------------------------------------------------------------------------------
@dataclass(frozen=True)
class DevicePair:
    """The same training on one device and on four."""

    trial: Trial
    one: str  # folder of the run
    four: str
    metrics: dict[str, float]  # on four devices


@pytest.fixture(scope="module")
def on_one_and_four(run_of, tmp_path_factory) -> Callable[[str], DevicePair]:
    """on_one_and_four("glue"): the two runs of a script, made once."""

    @functools.cache
    def get(name: str) -> DevicePair:
        trial = TRIALS[name]
        four, metrics, config = run_of(name, "alike" if trial.alike else "short")
        folder = tmp_path_factory.mktemp("one")
        config = replace(config, runs=str(folder), name="one")
        before = SMOOTH_UNITS if trial.alike_with else ""

        code, output = start(trial.script, config, devices=1, before=before)

        assert code == 0, output
        assert "on 1 CPU device(s)" in output, output
        return DevicePair(trial, f"{folder}/one", four, metrics)

    return get


@quick_dlrm
def test_one_device_gives_the_losses_of_four(name, on_one_and_four):
    pair = on_one_and_four(name)
    one = losses(pair.one)
    four = losses(pair.four)

    assert len(one) == len(four)
    for count, tolerance in pair.trial.close.items():
        assert len(four) >= count
        assert one[:count] == pytest.approx(four[:count], rel=tolerance)

    compared = four[:count]
    assert max(compared) - min(compared) > pair.trial.moved
    if count == len(four):  # as close to the end
        assert summary(pair.one)["metrics"] == pytest.approx(pair.metrics, rel=tolerance)


@quick_dlrm
def test_a_run_on_one_device_keeps_its_graph_contract(name, on_one_and_four):
    pair = on_one_and_four(name)

    assert_graph_contract(pair.one, pair.trial.graphs)
    # Beside losses, the host reads evaluations, checkpoints, numbers that hosts compare, and the
    # export.
    host_reads = summary(pair.one)["report"]["host_reads"]
    assert host_reads <= len(losses(pair.one)) + pair.trial.reads


# ---- resume --------------------------------------------------------------------------------------
def crash_in_evaluation(script: ModuleType, config: Any) -> None:
    """Trains until the next evaluation raises an exception."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(script, "evaluate", lambda *_: 1 / 0)
        script.main(config)


@quick_scripts
def test_resume_is_exact_after_sigkill_sigterm_and_crash(name, run_of, tmp_path, capsys):
    """DLRM, which has tables besides, stands for all that crash before the first checkpoint: what
    they leave is Run's business."""
    trial = TRIALS[name]
    main = trial.script.main
    path, metrics, config = run_of(name, "short")
    config = replace(config, runs=str(tmp_path), name="stopped")
    folder = f"{tmp_path}/stopped"

    if name == "dlrm":
        stop_at(2, crash, main, config)

    code, output = start(trial.script, config, stop=trial.kill)
    assert code == -trial.kill.number, output
    assert f"step {trial.kill.saved:>5}/" in output, output

    capsys.readouterr()
    stop_at(trial.terminate, terminate, main, replace(config, workers=1))

    # A crash in an evaluation leaves the checkpoint before it, and none of its metrics.
    crash_in_evaluation(trial.script, config)
    checkpoint = max(glob.glob(f"{folder}/checkpoints/*"))
    evaluated = int(checkpoint[-8:])
    assert os.path.exists(f"{checkpoint}/COMPLETE")
    assert evaluated > trial.terminate
    for record in records(folder):
        assert record["step"] != evaluated or "loss" in record

    assert main(config) == metrics
    output = capsys.readouterr().out
    for step in (trial.kill.saved, trial.terminate, evaluated):
        assert f"resuming after step {step}\n" in output, output
    assert records(folder) == records(path)  # every loss, learning rate and metric, bit for bit
    assert equal(exported(folder), exported(path))


# ---- bad input -----------------------------------------------------------------------------------
def test_help_shows_every_flag(capsys):
    shown = set()
    for config in (glue.TINY, glue.TINY.layout):
        shown |= {field.name for field in fields(config)}
    shown.remove("layout")

    code, text, _ = command("tiny --help", glue.main, glue.PRESETS, capsys)

    assert code == 0
    assert [name for name in shown if f"--{name.replace('_', '-')}" not in text] == []


@pytest.mark.parametrize(
    ("words", "suggested"),
    [("--logevery 8", ["--log-every"]), ("--task sst3", ["sst3", *TASKS])],
    ids=["flag", "value"],
)
def test_what_is_not_known_suggests_the_right_word(words, suggested, capsys):
    code, _, error = command(f"tiny {words}", glue.main, glue.PRESETS, capsys)

    assert code == 2
    assert [word for word in suggested if word not in error] == []
    assert "Traceback" not in error


@every_script
def test_numbers_outside_of_their_range_are_refused(name):
    trial = TRIALS[name]
    validate = trial.script.validate
    config = validate(trial.script.TINY)  # every field has a value
    numbers = []
    for field in fields(config):
        if type(getattr(config, field.name)) in (int, float):
            numbers.append(field.name)

    def accepted(value: float) -> list[str]:
        """Returns the fields that may have this value."""
        found = []
        for number in numbers:
            flag = f"--{number.replace('_', '-')}"
            try:
                validate(replace(config, **{number: value}))
                found.append(number)
            except InputError as error:
                assert re.match(f"{flag} is {value}; it must be (at least|above) ", str(error))
        return found

    assert accepted(-2) == []
    assert accepted(math.nan) == []
    assert accepted(0) == trial.may_be_0.split()


@every_script
def test_no_data_is_refused(name):
    script = TRIALS[name].script
    config = script.validate(script.TINY)
    with pytest.raises(InputError, match="--data is missing.*synthetic"):
        script.validate(replace(config, data=""))


FINITE = "loss is (nan|inf) at step .*the training diverged.*lower --lr"
SAVED = r"is not finite at step \d+: .*nothing is saved; .*lower --lr"


@quick_dlrm
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [({}, FINITE), ({"log_every": 10**6, "save_every": 1}, SAVED)],
    ids=["loss", "weights"],
)
def test_what_is_not_finite_stops_the_run_and_is_never_saved(
    name, changes, pattern, refused, tmp_path
):
    trial = TRIALS[name]
    config = replace(trial.short, **trial.diverges, **changes, runs=str(tmp_path), name="run")

    refused(trial.script, ["tiny", *flags(config, trial.script.TINY)], pattern)

    for path in tmp_path.glob("run/checkpoints/*/*.safetensors"):
        for tensor in safetensors.torch.load_file(path).values():
            assert tensor.isfinite().all(), path
