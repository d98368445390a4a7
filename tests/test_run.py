"""A run: its folder, exact resume, the order of upload, save and exit, values read without waiting
for the device."""

import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import fsspec
import matplotlib.figure
import numpy as np
import PIL.Image
import pytest
import torch
import torch_xla
from helpers import environment, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from errors import InputError
from train.common import device, run_folder
from train.common import run as tracking
from train.common.watch import curves
from train.common.xla import backend as xla


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = "images"
    runs: str = "runs"
    name: str = ""
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    workers: int = 2


@pytest.fixture
def start(mesh, tmp_path, monkeypatch):
    """Starts runs under tmp_path, `at` a step that a checkpoint was saved after; closes them at the
    end."""
    runs = []

    def start(
        host=0,
        at=None,
        total_steps=500,
        headline="net",
        unit="examples",
        sources=None,
        older_sources=None,
        **fields,
    ):
        config = Config(**{"runs": str(tmp_path / "runs"), **fields})
        run = tracking.Run(
            config,
            dataclasses.replace(mesh, process_index=host),
            name="net",
            headline=headline,
            may_differ=("workers",),
            total_steps=total_steps,
            sources=sources,
            older_sources=older_sources,
            unit=unit,
        )
        runs.append(run)
        if at is not None:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with monkeypatch.context() as patch:
                patch.setattr(tracking.Checkpointer, "restore", lambda *_: at)
                run.resume(model, optimizer, examples=9, keep=2)
        return run

    yield start
    for run in runs:
        run.close()


class Clock:
    """The time that time.monotonic returns."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def no_space(*_) -> None:
    raise OSError(28, "No space left on device")


def read_json(path) -> dict:
    return json.loads(Path(path).read_text())


def lines(run) -> list[dict]:
    """Returns the lines of metrics.jsonl."""
    return [json.loads(line) for line in Path(run.path, "metrics.jsonl").read_text().splitlines()]


def numbers(run) -> list[dict]:
    """Returns the lines without what depends on the clock."""
    found = records(run.path)
    for line in found:
        del line["timing"]
    return found


def scalars(run, name: str) -> list[tuple[int, float]]:
    """Returns TensorBoard's steps and values of a metric."""
    events = EventAccumulator(f"{run.path}/tb")
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


# Names


def test_a_new_run_says_what_it_does(start, tmp_path, capsys):
    run = start(headline="net: small", data="synthetic")

    assert run.name == "net"
    assert run.path == str(tmp_path / "runs/net")
    assert not run.resumed
    assert not run.finished
    trial = "net: small on 4 CPU device(s); this is a trial, for real training see --help"
    assert capsys.readouterr().out.splitlines() == [trial, f"new run {run.path}"]


def test_without_a_name_an_unfinished_run_is_resumed(start, capsys):
    start().close()
    capsys.readouterr()

    run = start(workers=7)  # a field that may differ

    assert run.resumed
    assert run.name == "net"
    assert f"resuming the unfinished run {run.path}" in capsys.readouterr().out


def test_without_a_name_a_finished_run_is_not_resumed(start, capsys):
    start().finish({})

    run = start()

    assert run.name == "net-2"
    assert not run.resumed
    assert "net-2 (net is finished)" in capsys.readouterr().out


def test_without_a_name_a_run_of_other_values_is_not_resumed(start, capsys):
    start().finish({})
    start().close()

    assert start(lr=0.2).name == "net-3"
    assert "net-3 (net-2 was trained with another lr)" in capsys.readouterr().out


OTHER_LR = r"mine .*\(lr was 0.1, now 0.2\).*another --name or the old values"


def test_a_given_name_with_another_value_is_refused_with_both(start):
    start(name="mine").close()
    with pytest.raises(InputError, match=OTHER_LR):
        start(name="mine", lr=0.2, workers=9)
    assert start(name="mine").resumed


def test_a_field_that_an_older_version_lacked_had_its_default(start, tmp_path):
    start(name="mine").close()
    file = tmp_path / "runs/mine/config.json"
    content = file.read_text().replace('"lr": 0.1,', "")
    assert "lr" not in json.loads(content)["config"]
    file.write_text(content)

    with pytest.raises(InputError, match=OTHER_LR):
        start(name="mine", lr=0.2, workers=9)
    assert start(name="mine").resumed


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_a_name_that_is_no_folder_is_refused(start, name):
    sentence = f"--name {re.escape(name)} is not the name of one folder.*--runs"
    with pytest.raises(InputError, match=sentence):
        start(name=name)


# The split of the data


BY_HASH = {"train": "u.data but a tenth", "evaluation": "a tenth of u.data"}
OFFICIAL = {"train": "ua.base", "evaluation": "ua.test"}
OTHER_SPLIT = (
    r"mine .*\(trained on u.data but a tenth, evaluated on a tenth of u.data; "
    r"now on ua.base, and on ua.test\).*another --name or the old values"
)


def test_a_run_of_another_split_of_the_data_is_not_resumed(start, capsys):
    run = start(sources=BY_HASH)
    run.close()
    assert read_json(f"{run.path}/config.json")["sources"] == BY_HASH

    assert start(sources=OFFICIAL).name == "net-2"
    said = "net-2 (net was trained with another split of the data)"
    assert said in capsys.readouterr().out
    assert start(sources=BY_HASH).name == "net"


def test_a_given_name_with_another_split_is_refused_with_both(start):
    start(name="mine", sources=BY_HASH).close()

    with pytest.raises(InputError, match=OTHER_SPLIT):
        start(name="mine", sources=OFFICIAL)
    assert start(name="mine", sources=BY_HASH).resumed


def without_sources(run) -> None:
    """Makes the folder of a run one of an older version, which recorded no split."""
    run.close()
    file = f"{run.path}/config.json"
    content = read_json(file)
    del content["sources"]
    Path(file).write_text(json.dumps(content))


def test_a_run_that_recorded_no_split_gets_that_of_its_resume(start):
    without_sources(start(name="mine"))

    run = start(name="mine", sources=OFFICIAL)

    assert run.resumed
    assert read_json(f"{run.path}/config.json")["sources"] == OFFICIAL


def test_a_split_that_older_versions_took_is_not_another_one(start):
    """Of a run that recorded none."""
    without_sources(start(name="mine"))

    with pytest.raises(InputError, match=OTHER_SPLIT):
        start(name="mine", sources=OFFICIAL, older_sources=BY_HASH)
    assert start(name="mine", sources=BY_HASH, older_sources=BY_HASH).resumed


def test_a_finished_run_that_recorded_no_split_stays_finished(start):
    run = start(name="mine")
    run.finish({})
    without_sources(run)

    assert start(name="mine", sources=OFFICIAL, older_sources=BY_HASH).finished


# Files


def test_config_json_has_the_commit_of_each_start(start, tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(run_folder, "__file__", str(code / "run_folder.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))

    def git(*arguments) -> str:
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(code), *user, *arguments]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        return process.stdout.strip()

    start().close()  # outside git
    git("init")
    (code / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    start().close()
    (code / "file").write_text("two")
    run = start()

    commit = git("rev-parse", "HEAD")
    stored = read_json(f"{run.path}/config.json")
    assert [each["git"] for each in stored["starts"]] == [
        None,
        {"commit": commit, "dirty": False},
        {"commit": commit, "dirty": True},
    ]


def test_config_json_says_what_a_start_ran_and_where(start):
    stored = read_json(f"{start().path}/config.json")

    assert stored["config"]["betas"] == [0.9, 0.999]
    assert stored["config"]["lr"] == 0.1
    first = stored["starts"][0]
    assert first["devices"] == {"kind": "CPU", "devices": 4, "hosts": 1}
    assert "python" in first["command"]
    assert first["time"].startswith("20")
    assert first["versions"]["torch"] == torch.__version__.split("+")[0]
    assert "python" in first["versions"]


def test_tensorflow_is_not_imported_even_where_it_is_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = f"""
import dataclasses
from train.common import device, run
fields = [(name, str, "x") for name in ("data", "runs", "name")]
Config = dataclasses.make_dataclass("Config", fields)
mesh = device.setup(0, kind="cpu")
run = run.Run(Config(runs="{tmp_path}"), mesh, name="", headline="", total_steps=1)
run.log(1, loss=1.0)
run.close()"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(1, PYTHONPATH=f"{tmp_path}:{os.getcwd()}"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


REPORT = {
    "compile_seconds": 75.0,
    "graphs": 2,
    "recompilations": [],
    "fallbacks": ["aten::nonzero"],
}


@pytest.fixture
def run_to_finish(start, monkeypatch, clock):
    """A run that has trained its two steps."""
    monkeypatch.setattr(device, "graph_report", lambda: dict(REPORT))
    run = start(total_steps=2, unit="tokens")
    run.log(1, examples=10, input_wait=0.1, loss=2.0)
    clock.now = 0.5
    run.log(2, examples=20, input_wait=0.3, loss=1.0)
    return run


def test_summary_json_is_written_last(run_to_finish, monkeypatch):
    run = run_to_finish
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(run, "watchers", [Mock(summary=lambda: 1 / 0)])
        run.finish({})
    assert not os.path.exists(f"{run.path}/summary.json")

    run.finish({"top1": 0.953125, "loss": math.inf})
    summary = read_json(f"{run.path}/summary.json")
    assert run.finished
    assert summary == run.summary
    assert summary["metrics"] == {"top1": 0.953125, "loss": None}
    assert summary["steps"] == 2
    assert summary["report"] == REPORT
    assert summary["input_wait"] == pytest.approx(0.2)
    assert summary["tokens_per_second"] == 20


def test_finish_prints_the_table_as_a_later_start_does(run_to_finish, start, capsys):
    capsys.readouterr()
    run_to_finish.finish({"top1": 0.953125, "loss": math.inf})

    table = capsys.readouterr().out
    title, *rows = table.splitlines()
    assert title.startswith(f"{run_to_finish.path} finished in ")
    cells = {row[:19].strip(): row[19:].strip() for row in rows}
    expected = {
        "top1": "0.9531",
        "compile time": "1 min 15 s",
        "input wait": "20 %",
        "graphs compiled": "2",
        "recompilations": "0",
        "fall-backs": "1; aten::nonzero",
    }
    assert expected.items() <= cells.items(), cells
    assert next(iter(cells)) == "top1", cells
    assert cells["training time"] == "0.5 s"
    assert float(cells["tokens/s"]) == 20

    start(name="net", unit="tokens").print_summary()
    assert capsys.readouterr().out.endswith(table)


def test_files_are_replaced_whole_or_not_at_all(start, monkeypatch):
    start().close()
    error = "cannot write .*config.json: No space left"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=error) as failed:
        patch.setattr(os, "fsync", no_space)
        start()

    # Though a notebook keeps the last traceback, and with it the start that had taken the lock.
    run = start()
    assert failed.tb
    # The failed start had not touched the file.
    assert len(read_json(f"{run.path}/config.json")["starts"]) == 2
    assert not [name for name in os.listdir(run.path) if name.endswith(".writing")]


# Checkpoints and resume


def test_metrics_are_uploaded_before_a_save_and_exit_follows_it(start, monkeypatch, capsys):
    run = start(at=0, total_steps=9)
    order = []

    def record(owner, name: str) -> None:
        monkeypatch.setattr(owner, name, lambda *step: order.append((name, *step[:1])))

    record(run, "upload")
    record(run.checkpoints, "save")
    record(run.checkpoints, "wait")
    monkeypatch.setattr(device, "wait_for_steps", lambda: order.append(("steps",)))

    with pytest.raises(SystemExit, match="143"), run.training(contextlib.nullcontext()):
        run.checkpoint(1, due=False)
        assert order == []

        run.checkpoint(2, due=True)
        assert order == [("steps",), ("upload",), ("save", 2)]

        order.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(3, due=False)
    assert order[:4] == [("steps",), ("upload",), ("save", 3), ("wait",)]
    stopped = "stopped by a signal at step 3: saved; the same command resumes"
    assert stopped in capsys.readouterr().out


@dataclasses.dataclass
class Trained:
    """A run that has ended, and what it has trained."""

    run: tracking.Run
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


def train_a_step(start, stopped: bool = False, evaluate: Callable | None = None) -> Trained:
    """Trains step 1, whose checkpoint is saved before an evaluation.

    Args:
        stopped: a signal ends the training with that checkpoint.
        evaluate: gets the run in place of the evaluation; without it the training ends there.
    """
    run = start(total_steps=9)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.resume(model, optimizer, examples=9, keep=2)
    with contextlib.suppress(SystemExit), run.training(contextlib.nullcontext()):
        run.log(1, loss=0.5)
        if stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(1, due=False, evaluates=True)
        run.checkpoints.wait()
        if evaluate is not None:
            evaluate(run)
    return Trained(run, model, optimizer)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_ended_before_its_evaluation_evaluates_again(start, stopped):
    trained = train_a_step(start, stopped)

    run = start(total_steps=9)
    assert run.resume(trained.model, trained.optimizer, examples=9, keep=2) == 1
    assert run.evaluation_due

    run.evaluation(1, accuracy=0.5)
    assert not run.evaluation_due
    assert numbers(run)[1:] == [{"step": 1, "eval/accuracy": 0.5}]
    run.checkpoints.wait()
    stored = read_json(f"{run.checkpoints.folder(1)}/metrics.json")
    assert stored == {"step": 1, "metrics": {"accuracy": 0.5}}


def test_a_recorded_evaluation_is_not_repeated(start):
    """And its checkpoint has the metrics again."""

    def metrics_file(run) -> Path:
        return Path(run.checkpoints.folder(1), "metrics.json")

    def evaluate(run):
        run.evaluation(1, accuracy=0.5, f1=math.nan)
        run.checkpoints.wait()
        metrics_file(run).unlink()  # as if the process had ended before it was written

    trained = train_a_step(start, evaluate=evaluate)
    before = numbers(trained.run)

    run = start(total_steps=9)
    run.resume(trained.model, trained.optimizer, examples=9, keep=2)
    run.checkpoints.wait()

    assert not run.evaluation_due
    assert numbers(run) == before
    stored = read_json(metrics_file(run))
    assert stored == {"step": 1, "metrics": {"accuracy": 0.5, "f1": None}}


def test_metrics_that_a_checkpoint_cannot_get_are_a_warning(start, monkeypatch, capsys):
    def evaluate(run):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            run.checkpoints.add_metrics(1, {"accuracy": 0.5})
            run.checkpoints.wait()

    train_a_step(start, evaluate=evaluate)
    assert "warning: cannot write" in capsys.readouterr().err


def test_an_older_checkpoint_had_its_evaluation_before(start):
    trained = train_a_step(start)
    checkpoint = Path(start(total_steps=9).path, "checkpoints/step_00000001")

    # Older versions did not write this entry.
    stored = read_json(checkpoint / "state.json")
    del stored["evaluates"]
    content = json.dumps(stored)
    (checkpoint / "state.json").write_text(content)
    complete = read_json(checkpoint / "COMPLETE")
    complete["state.json"] = {"bytes": len(content), "crc32": zlib.crc32(content.encode())}
    (checkpoint / "COMPLETE").write_text(json.dumps(complete))

    run = start(total_steps=9)
    assert run.resume(trained.model, trained.optimizer, examples=9, keep=2) == 1
    assert not run.evaluation_due


def test_a_signal_in_the_last_step_lets_a_run_finish(start, monkeypatch):
    """And a failed save ends it."""
    run = start(at=0, total_steps=9)
    monkeypatch.setattr(run.checkpoints, "save", lambda *_: None)
    loader = io.StringIO()
    with pytest.raises(ZeroDivisionError), run.training(contextlib.closing(loader)):
        os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(9, due=True)

        monkeypatch.setattr(run.checkpoints, "raise_failure", lambda: 1 / 0)
        run.checkpoint(4, due=False)
    assert loader.closed
    assert run._closed


def train_three_steps(start, clock):
    """Trains and evaluates steps 1 to 3, 40 seconds each; returns the run, which is closed, and its
    lines."""
    run = start(at=0)
    for step in (1, 2, 3):
        clock.now += 30
        run.log(step, examples=240 * step, loss=float(step))
        with run.pause():
            clock.now += 10
        run.evaluation(step, accuracy=step / 10)
    written = lines(run)
    run.close()
    return run, written


def test_resume_drops_later_lines_and_counts_the_time_before(start, clock, monkeypatch):
    run, before = train_three_steps(start, clock)
    file = Path(run.path, "metrics.jsonl")
    file.write_bytes(file.read_bytes() + b'{"step": 2, "loss": 7')  # a torn line

    # Event files are ordered by their second.
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 2)
    clock.now = 1000.0
    run = start(at=2)
    assert lines(run) == before[:4]

    clock.now = 1005.0
    run.log(3, loss=5.0)
    third = {"step": 3, "loss": 5.0, "timing": {"elapsed": 85.0, "training": 65.0}}
    assert lines(run) == [*before[:4], third]

    run.finish({})
    assert run.summary["elapsed_seconds"] == 85
    assert run.summary["training_seconds"] == 65
    assert run.summary["examples_per_second"] == 8
    # TensorBoard, too.
    assert scalars(run, "loss") == [(1, 1.0), (2, 2.0), (3, 5.0)]
    assert scalars(run, "eval/accuracy")[0] == (1, pytest.approx(0.1))


def test_resume_names_damaged_metrics(start, clock):
    run, _ = train_three_steps(start, clock)
    file = Path(run.path, "metrics.jsonl")
    file.write_text(f"garbage\n{file.read_text()}")
    with pytest.raises(InputError, match="line 1 of .*metrics.jsonl is damaged.*--name"):
        start(at=1)


# Numbers, progress

LOSS = 1.2 + 1 / 3
BLEU = 0.1 + 0.2


def log_three_lines(start, clock):
    """Returns a run that has logged steps 1, 120 and 130, and paused and evaluated between."""
    run = start(unit="tokens")
    clock.now = 50.0  # the compilation of the first step
    run.log(1, examples=1000, input_wait=0.5, loss=2.0, lr=2e-5)

    clock.now = 52.0
    with run.pause():
        clock.now = 60.0
        with run.pause():  # evaluation() pauses too
            clock.now = 61.0
        clock.now = 62.0

    clock.now = 65.0
    loss = torch.tensor(LOSS, dtype=torch.float64)
    run.log(120, examples=11_000, input_wait=0.031, lr=0.05, loss=loss, correct=3)
    run.evaluation(120, bleu=BLEU)

    clock.now = 67.0
    run.log(130, examples=15_000, loss=1.0)
    return run


def test_lines_on_the_terminal_are_rounded(start, capsys, clock):
    log_three_lines(start, clock)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "step     1/500  loss 2.0000  lr 2.00e-05  input wait 50 %",
        "step   120/500  loss 1.5333  lr 0.0500  correct 3  2000 tokens/s  input wait 3 %",
        "step   120/500  evaluation: bleu 0.3000",
        "step   130/500  loss 1.0000  2000 tokens/s",
    ]


def test_lines_in_the_folder_have_every_digit(start, clock):
    run = log_three_lines(start, clock)
    assert numbers(run)[1:3] == [
        {"step": 120, "lr": 0.05, "loss": LOSS, "correct": 3},
        {"step": 120, "eval/bleu": BLEU},
    ]


def test_the_speed_is_without_pauses_and_the_first_step(start, clock):
    run = log_three_lines(start, clock)
    first, second, _, third = (line["timing"] for line in lines(run))
    assert first == {"elapsed": 50.0, "training": 50.0, "input_wait": 0.5}
    assert second == {
        "elapsed": 65.0,
        "training": 55.0,
        "tokens_per_second": 2000.0,
        "input_wait": 0.031,
    }
    assert third == {"elapsed": 67.0, "training": 57.0, "tokens_per_second": 2000.0}


@pytest.mark.parametrize("loss", [math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_stops_all_hosts(start, loss):
    run = start()
    run.log(1, loss=1.0)
    with pytest.raises(InputError, match=r"loss is (nan|inf) at step 2: .* lower --lr"):
        run.log(2, loss=loss)
    with pytest.raises(InputError, match="eval/loss is nan at step 2"):
        run.evaluation(2, loss=math.nan)
    with pytest.raises(InputError, match="loss is"):  # all hosts must stop together
        start(host=1).log(2, loss=loss)

    # What is written is valid JSON.
    run.log(3, loss=1.0, grad_norm=math.inf)
    assert numbers(run) == [
        {"step": 1, "loss": 1.0},
        {"step": 3, "loss": 1.0, "grad_norm": None},
    ]
    run.close()


# Curves


@pytest.fixture
def figures(monkeypatch) -> list[matplotlib.figure.Figure]:
    """The figures that are made."""
    made = []
    make_figure = matplotlib.figure.Figure

    def make(**options):
        made.append(make_figure(**options))
        return made[-1]

    monkeypatch.setattr(matplotlib.figure, "Figure", make)
    return made


def draw_a_hundred_steps() -> None:
    """Draws a loss that is 0 and 1 in turns, and two evaluations."""
    points = [{"step": step, "loss": float(step % 2), "lr": 0.1} for step in range(1, 100)]
    points.append({"step": 50, "eval/accuracy": 0.1, "eval/loss": 2.0})
    points.append({"step": 90, "eval/accuracy": 0.4, "eval/perplexity": 9.0})
    curves.draw_curves(points, "my run")


def test_curves_have_a_panel_for_every_metric(figures):
    draw_a_hundred_steps()

    legends = {}
    for axes in figures[0].axes:
        texts = [] if axes.legend_ is None else axes.legend_.texts
        legends[axes.get_ylabel()] = [text.get_text() for text in texts]
    assert legends == {
        "loss": ["training", "evaluation"],
        "accuracy": ["0.4000"],
        "perplexity": ["9.0000"],
        "learning rate": [],
    }
    assert figures[0].get_suptitle() == "my run"


def test_curves_show_each_value_and_a_smooth_loss(figures):
    draw_a_hundred_steps()

    panels = {axes.get_ylabel(): axes for axes in figures[0].axes}
    assert list(panels["learning rate"].lines[0].get_ydata()) == [0.1] * 99
    raw, smooth = (line.get_ydata() for line in panels["loss"].lines[:2])
    assert list(raw) == [float(step % 2) for step in range(1, 100)]
    assert len(smooth) == 99
    assert max(smooth[5:]) < 0.7


FEW_POINTS = {
    "three": [{"step": step, "loss": 1 / step} for step in range(1, 4)],
    "one": [{"step": 9, "loss": 1.0, "lr": 0.0, "other": None}],
    "an evaluation": [{"step": 9, "eval/accuracy": 0.0, "eval/f1": None}],
}


@pytest.mark.parametrize("points", FEW_POINTS.values(), ids=FEW_POINTS)
def test_few_points_are_enough_for_curves(points):
    image = PIL.Image.open(io.BytesIO(curves.draw_curves(points, "a run")))
    assert image.size == (1000, 460)
    dark = np.asarray(image.convert("L")) < 250
    assert dark.mean() > 0.01


def test_evaluations_draw_once_a_minute_and_so_does_the_end(start, monkeypatch, clock, memory):
    drawn = []

    def draw_curves(records, title):
        drawn.append(len(records))
        return b"png"

    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    run = start(runs="memory://bucket/runs")
    with curves.Curves(run) as drawer:
        run.watchers = [drawer]
        for moment in (0.0, 59.0, 61.0):
            clock.now = moment
            run.evaluation(1, accuracy=0.5)
            run.log(1, loss=1.0)
        assert drawn == [1, 5]
    run.close()
    assert drawn == [1, 5, 6]
    assert memory.cat_file("/bucket/runs/net/curves.png") == b"png"


# What can go wrong with the folder


def test_runs_of_an_unknown_kind_are_refused(start):
    with pytest.raises(InputError, match="cannot use --runs nonsense://bucket: "):
        start(runs="nonsense://bucket")


def test_a_file_url_is_a_local_folder(start, tmp_path):
    run = start(runs=f"file://{tmp_path}/runs/")
    assert run.path == str(tmp_path / "runs/net")


def test_a_config_that_may_not_be_read_is_refused(start, monkeypatch):
    start().close()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "cat_file", refuse)
    with pytest.raises(InputError, match="cannot read .*config.json: .*Permission denied"):
        start()


@pytest.mark.parametrize("content", ['{"config": {"lr"', "[]", "null", '{"config": 3}'])
def test_a_damaged_config_is_refused(start, tmp_path, content):
    start().close()
    (tmp_path / "runs/net/config.json").write_text(content)
    sentence = r"net/config.json is damaged; remove .*/net to .*, or use another --name"
    with pytest.raises(InputError, match=sentence):
        start()


def test_metrics_without_a_config_are_not_appended_to(start, tmp_path):
    run = start()
    run.log(1, loss=1.0)
    run.close()
    (tmp_path / "runs/net/config.json").unlink()

    with pytest.raises(InputError, match="cannot write .*metrics.jsonl: File exists"):
        start().log(1, loss=1.0)
    assert len(lines(run)) == 1


@pytest.mark.parametrize("full", ["metrics", "events"])
def test_a_full_disk_names_the_file_and_lets_the_run_close(start, monkeypatch, full):
    run = start()
    run.log(7, loss=1.0)

    file_and_remedy = "metrics.jsonl: No space left on device; make room .*"
    message = f"{file_and_remedy} from the newest complete checkpoint, if any"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=message):
        patch.setattr(os, "fsync", no_space)
        if full == "metrics":
            run._metrics._file = open("/dev/full", "wb")
        else:  # TensorBoard's
            for name in ("add_scalar", "flush", "close"):
                patch.setattr(run._metrics._events, name, no_space)
        with contextlib.closing(run):  # which must not hide the message by an error of its own
            run.log(8, loss=1.0)

    assert numbers(start(at=7)) == [{"step": 7, "loss": 1.0}]


def test_a_run_that_another_process_trains_is_refused(start, capsys):
    run = start()
    run.close()
    capsys.readouterr()

    sentence = f"is being trained by process {os.getpid()}; use another --name"
    with open(f"{run.path}/.lock", "r+") as lock:  # as another process has it, until it ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=sentence):
            start()
    assert "resuming" not in capsys.readouterr().out
    assert start().resumed


# Remote roots

REMOTE = "memory://bucket/runs"
METRICS = "/bucket/runs/net/metrics.jsonl"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The file system memory://, which is empty before and after."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed upload keeps
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def train_two_remote_steps(start):
    run = start(runs=REMOTE, at=0)
    run.log(1, loss=1.0)
    run.evaluation(1, accuracy=0.5)
    run.log(2, loss=0.9)
    return run


def test_a_remote_run_is_uploaded_whole(start, memory, tmp_path):
    run = train_two_remote_steps(start)
    assert run.path == f"{REMOTE}/net"
    assert memory.exists("/bucket/runs/net/config.json")
    assert memory.cat_file(METRICS).count(b"\n") == 2  # an evaluation uploads

    run.upload()
    assert memory.cat_file(METRICS).count(b"\n") == 3
    (events,) = memory.glob("/bucket/runs/net/tb/events*")
    assert memory.cat_file(events).count(b"loss") == 2

    run.close()
    assert not list(tmp_path.glob("net-*"))


def test_a_remote_run_is_resumed_from_its_store(start, memory, monkeypatch, tmp_path):
    run = train_two_remote_steps(start)
    run.upload()
    run.close()

    run = start(runs=REMOTE, at=1)
    assert run.resumed
    run.log(2, loss=0.8)

    uploaded = []
    put_file = type(memory).put_file

    def record(self, local, remote, **options):
        uploaded.append(remote)
        return put_file(self, local, remote, **options)

    monkeypatch.setattr(type(memory), "put_file", record)
    run.finish({"accuracy": 0.5})

    metrics = map(json.loads, memory.cat_file(METRICS).decode().splitlines())
    losses = [(line["step"], line.get("loss")) for line in metrics]
    assert losses == [(1, 1.0), (1, None), (2, 0.8)]
    assert uploaded[-1].endswith("/summary.json")
    assert len(memory.glob("/bucket/runs/net/tb/events*")) == 2
    assert not list(tmp_path.glob("net-*"))
    finished = start(runs=REMOTE, name="net")
    assert finished.finished
    assert finished.summary["metrics"] == {"accuracy": 0.5}


@pytest.fixture
def unwritable(memory, monkeypatch):
    """A function that makes memory:// refuse all uploads."""

    def refuse(*_, **__):
        raise RuntimeError("403 forbidden")

    return lambda: monkeypatch.setattr(type(memory), "put_file", refuse)


def test_an_unwritable_store_stops_a_new_run(start, unwritable):
    unwritable()
    sentence = "cannot write to memory://.*/other: 403 forbidden; the files are in /"
    with pytest.raises(InputError, match=sentence):
        start(runs=REMOTE, name="other")


def test_an_unwritable_store_only_warns_in_training(start, unwritable, capsys, tmp_path):
    run = start(runs=REMOTE)
    run.log(1, loss=1.0)

    unwritable()
    run.evaluation(1, accuracy=0.5)
    warning = "warning: cannot write to memory://bucket/runs/net: 403 forbidden"
    assert warning in capsys.readouterr().out
    with pytest.raises(InputError, match="403"):
        run.finish({})
    with pytest.raises(InputError, match="403"):
        run.close()
    assert list(tmp_path.glob("net-*/metrics.jsonl"))  # nothing is lost


# Values on XLA's devices


def test_xla_values_are_read_by_a_step_closure_in_one_transfer(start):
    values = torch.arange(8.0, device=torch_xla.device())
    loss = values.mean() / 3
    accuracy = values.max()
    run = start()
    torch_xla.sync()  # runs what other tests have left to the next step

    reads = xla.host_reads()
    run.log(1, loss=loss, accuracy=accuracy, lr=0.1)
    run.log(2, loss=0.5)  # waits behind the first, so the lines stay in order
    assert xla.host_reads() == reads
    assert not os.path.exists(f"{run.path}/metrics.jsonl")

    torch_xla.sync()
    assert xla.host_reads() == reads + 1
    assert numbers(run) == [
        {"step": 1, "loss": float(torch.tensor(3.5) / 3), "accuracy": 7.0, "lr": 0.1},
        {"step": 2, "loss": 0.5},
    ]


def test_evaluation_pause_and_close_read_pending_values(start, monkeypatch):
    values = torch.arange(8.0, device=torch_xla.device())
    loss = values.mean() / 3
    torch_xla.sync()
    run = start()
    graphs = xla.compilations()

    run.log(1, loss=loss)
    run.evaluation(1, accuracy=0.5)  # flushes what is pending, and compiles nothing for it
    assert [line["step"] for line in numbers(run)] == [1, 1]

    run.log(2, loss=loss)
    lines_at_pause = []
    with monkeypatch.context() as patch:
        patch.setattr(device, "wait_for_steps", lambda: lines_at_pause.append(len(numbers(run))))
        with run.pause():
            pass
    # Line 2 was read, and the device has finished, before the pause begins.
    assert lines_at_pause == [3]

    run.log(3, loss=loss)
    run.close()
    assert numbers(run)[-1] == {"step": 3, "loss": float(torch.tensor(3.5) / 3)}
    assert xla.compilations() == graphs
