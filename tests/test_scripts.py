"""What all five scripts must do, each with its trial run (trials.py): learn, resume exactly, give the same numbers on
other devices, keep the graph contract, write a run folder, refuse bad values."""

import json
import os
from dataclasses import fields, is_dataclass, replace

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
from trials import TRIALS

every_script = pytest.mark.parametrize("name", TRIALS)


def within(metrics: dict[str, float], ranges: dict[str, tuple[float, float]]) -> bool:
    return all(low <= metrics[name] <= high for name, (low, high) in ranges.items())


@every_script
def test_a_trial_learns(name, run_of):
    _, metrics, _ = run_of(name)
    assert within(metrics, TRIALS[name].learned), metrics


@every_script
def test_without_a_learning_rate_it_does_not(name, tmp_path):
    trial = TRIALS[name]
    metrics = trial.script.main(replace(trial.learns, **trial.still, lr=0.0, runs=str(tmp_path)))
    assert within(metrics, trial.untrained), metrics
    assert not any(within(metrics, {name: trial.learned[name]}) for name in trial.untrained)


@every_script
def test_run_folder_tells_about_the_run_and_that_it_kept_the_graph_contract(name, run_of):
    path, metrics, config = run_of(name)
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
def test_a_finished_run_is_not_trained_again(name, run_of, capsys):
    path, metrics, config = run_of(name)
    before = {entry.path: entry.stat().st_mtime_ns for entry in os.scandir(path) if entry.name != ".lock"}
    assert TRIALS[name].script.main(config) == metrics
    assert "is finished" in capsys.readouterr().out
    assert before == {entry.path: entry.stat().st_mtime_ns for entry in os.scandir(path) if entry.name != ".lock"}


@every_script
def test_one_device_gives_the_losses_of_four_within_its_graphs(name, run_of, tmp_path):
    trial = TRIALS[name]
    path, metrics, config = run_of(name, "alike" if trial.alike else "short")
    config = replace(config, runs=str(tmp_path), name="one")
    code, output = start(trial.script, config, devices=1)
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
def test_crashed_killed_and_terminated_it_resumes_to_the_same_numbers(name, run_of, tmp_path, capsys):
    trial = TRIALS[name]
    path, metrics, config = run_of(name, "short")
    config = replace(config, runs=str(tmp_path), name="stopped")
    folder = f"{tmp_path}/stopped"
    stop_at(trial.crash, crash, trial.script.main, config)  # before the first checkpoint
    code, output = start(trial.script, config, stop=trial.kill)
    assert code == -trial.kill.number and f"step {trial.kill.saved:>5}/" in output, output
    capsys.readouterr()
    stop_at(trial.terminate, terminate, trial.script.main, config)
    assert trial.script.main(config) == metrics
    output = capsys.readouterr().out
    assert f"resuming after step {trial.kill.saved}" in output, output
    assert f"resuming after step {trial.terminate}" in output, output
    assert records(folder) == records(path)  # every loss, learning rate and metric, bit for bit
    assert equal(exported(folder), exported(path))


@every_script
def test_help_shows_every_flag_and_an_unknown_one_suggests_the_right_one(name, capsys):
    script = TRIALS[name].script
    code, text, _ = command("tiny --help", script.main, script.PRESETS, capsys)
    nested = [value for value in vars(script.TINY).values() if is_dataclass(value)]
    names = [one.name for each in (script.TINY, *nested) for one in fields(each)]
    flags = {f"--{name.replace('_', '-')}" for name in names if not is_dataclass(getattr(script.TINY, name, None))}
    assert code == 0 and {flag for flag in flags if flag not in text} == set()
    code, _, error = command("tiny --logevery 8", script.main, script.PRESETS, capsys)
    assert code == 2 and "--log-every" in error and "Traceback" not in error


COMMON = [
    ("--lr -1", "--lr is -1.0.*at least 0"),
    ("--lr nan", "--lr is nan.*at least 0"),
    ("--seed -1", "--seed is -1.*at least 0"),
    ("--keep 0", "--keep is 0.*at least 1"),
    ("--log-every 0", "--log-every is 0.*at least 1"),
    ("--workers -2", "--workers is -2.*at least -1"),
    ("--name a/b", "--name a/b.*not the name of one folder.*--runs"),
    ("--data=", "--data is missing.*synthetic"),
]


@pytest.mark.parametrize(("flag", "pattern"), COMMON)
@every_script
def test_values_that_every_script_refuses(name, flag, pattern, refused):
    refused(TRIALS[name].script, f"tiny {flag}", pattern)


@every_script
def test_a_run_folder_that_cannot_be_made_and_other_values_for_the_same_name(name, run_of, refused, tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused(TRIALS[name].script, ["tiny", "--runs", tmp_path / "file"], f"cannot write {tmp_path}/file.*--runs")
    script, config = TRIALS[name].script, run_of(name)[2]
    arguments = ["tiny", *flags(replace(config, lr=0.123), script.TINY)]
    refused(script, arguments, f"lr was {config.lr}, now 0.123.*another --name")


@every_script
@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("loss is (nan|inf) at step .*the training diverged.*lower --lr", {}),
        (r"is not finite at step \d+: .*nothing is saved; .*lower --lr", {"log_every": 10**6, "save_every": 1}),
    ],
    ids=["loss", "weights"],
)
def test_what_is_not_finite_stops_the_run_and_is_never_saved(name, pattern, changes, refused, tmp_path):
    trial = TRIALS[name]
    config = replace(trial.short, **trial.diverges, **changes, runs=str(tmp_path), name="run")
    refused(trial.script, ["tiny", *flags(config, trial.script.TINY)], pattern)
    for weights in tmp_path.glob("run/checkpoints/*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in safetensors.torch.load_file(weights).values()), weights
