"""A run: its folder, exact resume, the order of upload, save and exit, values read without waiting for the device."""

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
    """Starts runs under tmp_path, `at` a step that a checkpoint was saved after; closes them at the end."""
    runs = []

    def start(host=0, at=None, total_steps=500, headline="net", unit="examples", **fields):
        config = Config(**{"runs": str(tmp_path / "runs"), **fields})
        there = dataclasses.replace(mesh, process_index=host)
        options = {"headline": headline, "free": ("workers",), "total_steps": total_steps, "unit": unit}
        runs.append(tracking.Run(config, there, name="net", **options))
        if at is not None:
            with monkeypatch.context() as patch:
                patch.setattr(tracking.Checkpointer, "restore", lambda *_: at)
                model = torch.nn.Linear(1, 1)
                runs[-1].resume(model, torch.optim.SGD(model.parameters(), 0.1), examples=9, keep=2)
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def clock(monkeypatch):
    """The time, in clock[0]."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def no_space(*_) -> None:
    raise OSError(28, "No space left on device")


def lines(run) -> list[dict]:
    return [json.loads(line) for line in open(f"{run.path}/metrics.jsonl")]


def numbers(run) -> list[dict]:
    """The lines without what depends on the clock."""
    return [{key: value for key, value in line.items() if key != "timing"} for line in records(run.path)]


def scalars(run, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(f"{run.path}/tb")
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


# ---- names -----------------------------------------------------------------------------------------------------------
def test_a_new_run_says_what_it_does_and_without_a_name_the_right_one_is_resumed(start, tmp_path, capsys):
    run = start(headline="net: small", data="synthetic")
    assert (run.name, run.path) == ("net", str(tmp_path / "runs/net")) and not run.resumed and not run.finished
    trial = "net: small on 4 CPU device(s); this is a trial, for real training see --help"
    assert capsys.readouterr().out.splitlines() == [trial, f"new run {run.path}"]
    run.close()
    run = start(data="synthetic", workers=7)  # a free field may differ
    assert run.resumed and run.name == "net"
    assert f"resuming the unfinished run {run.path}" in capsys.readouterr().out
    run.finish({})
    run = start(data="synthetic")
    assert run.name == "net-2" and not run.resumed
    assert "net-2 (net is finished)" in capsys.readouterr().out
    run.close()
    assert start(data="synthetic", lr=0.2).name == "net-3"
    assert "net-3 (net-2 was trained with another lr)" in capsys.readouterr().out


def test_a_given_name_with_other_values_is_refused_with_both_values(start, tmp_path):
    start(name="mine").close()
    file = tmp_path / "runs/mine/config.json"
    for content in (file.read_text(), file.read_text().replace('"lr": 0.1,', "")):  # an older version had no such field
        file.write_text(content)
        with pytest.raises(InputError, match=r"mine .*\(lr was 0.1, now 0.2\).*another --name or the old values"):
            start(name="mine", lr=0.2, workers=9)
    assert "lr" not in json.loads(content)["config"] and start(name="mine").resumed
    for name in ("a/b", "..", "."):
        with pytest.raises(InputError, match=f"--name {re.escape(name)} is not the name of one folder.*--runs"):
            start(name=name)


# ---- files -----------------------------------------------------------------------------------------------------------
def test_config_json_says_what_each_start_ran_where_and_at_which_commit(start, tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(run_folder, "__file__", str(code / "run_folder.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))

    def git(*arguments):
        command = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    start().close()  # outside git
    git("init")
    (code / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    start().close()
    (code / "file").write_text("two")
    stored, commit = json.load(open(f"{start().path}/config.json")), git("rev-parse", "HEAD")
    assert stored["config"]["betas"] == [0.9, 0.999] and stored["config"]["lr"] == 0.1
    starts = [None, {"commit": commit, "dirty": False}, {"commit": commit, "dirty": True}]
    assert [each["git"] for each in stored["starts"]] == starts
    first = stored["starts"][0]
    assert first["devices"] == {"kind": "CPU", "devices": 4, "hosts": 1}
    assert "python" in first["command"] and first["time"].startswith("20")
    assert first["versions"]["torch"] == torch.__version__.split("+")[0] and "python" in first["versions"]


def test_tensorflow_is_not_imported_even_where_it_is_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = f"""
import dataclasses
from train.common import device, run
Config = dataclasses.make_dataclass("Config", [(name, str, "x") for name in ("data", "runs", "name")])
run = run.Run(Config(runs="{tmp_path}"), device.setup(0, kind="cpu"), name="", headline="", total_steps=1)
run.log(1, loss=1.0)
run.close()"""
    variables = environment(1, PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


REPORT = {"compile_seconds": 75.0, "graphs": 2, "recompilations": [], "fallbacks": ["aten::nonzero"]}


def test_finish_writes_summary_last_and_prints_the_table_as_a_later_start_does(start, capsys, monkeypatch, clock):
    monkeypatch.setattr(device, "graph_report", lambda: dict(REPORT))
    run = start(total_steps=2, unit="tokens")
    run.log(1, examples=10, input_wait=0.1, loss=2.0)
    clock[0] = 0.5
    run.log(2, examples=20, input_wait=0.3, loss=1.0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(run, "watchers", [Mock(summary=lambda: 1 / 0)])
        run.finish({})
    assert not os.path.exists(f"{run.path}/summary.json")
    capsys.readouterr()
    run.finish({"top1": 0.953125, "loss": math.inf})
    summary, table = json.load(open(f"{run.path}/summary.json")), capsys.readouterr().out
    assert summary == run.summary and run.finished
    assert summary["metrics"] == {"top1": 0.953125, "loss": None} and summary["steps"] == 2
    assert summary["report"] == REPORT and summary["input_wait"] == pytest.approx(0.2)
    title, *rows = table.splitlines()
    assert title.startswith(f"{run.path} finished in ")
    cells = {row[:19].strip(): row[19:].strip() for row in rows}
    expected = {"top1": "0.9531", "compile time": "1 min 15 s", "input wait": "20 %"}
    expected |= {"graphs compiled": "2", "recompilations": "0", "fall-backs": "1; aten::nonzero"}
    assert expected.items() <= cells.items() and next(iter(cells)) == "top1", cells
    assert cells["training time"] == "0.5 s" and float(cells["tokens/s"]) == summary["tokens_per_second"] == 20
    start(name="net", unit="tokens").print_summary()
    assert capsys.readouterr().out.endswith(table)


def test_files_are_replaced_whole_or_not_at_all(start, monkeypatch):
    start().close()
    error = "cannot write .*config.json: No space left"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=error) as failed:
        patch.setattr(os, "fsync", no_space)
        start()
    run = start()  # though a notebook keeps the last traceback, and with it the start that had taken the lock
    assert failed.tb
    assert len(json.load(open(f"{run.path}/config.json"))["starts"]) == 2  # the failed start had not touched the file
    assert not [name for name in os.listdir(run.path) if name.endswith(".writing")]


# ---- checkpoints and resume ------------------------------------------------------------------------------------------
def test_metrics_are_uploaded_before_the_save_and_a_stopped_run_exits_after_it(start, monkeypatch, capsys):
    run, order = start(at=0, total_steps=9), []
    for owner, name in ((run, "upload"), (run.checkpoints, "save"), (run.checkpoints, "wait")):
        monkeypatch.setattr(owner, name, lambda *step, name=name: order.append((name, *step[:1])))
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
    assert "stopped by a signal at step 3: saved; the same command resumes" in capsys.readouterr().out


def saved_before_evaluation(start, stopped: bool = False, **fields):
    """Starts a run whose checkpoint of step 1 is saved before an evaluation; returns it, and what it trains."""
    run, model = start(total_steps=9, **fields), torch.nn.Linear(1, 1)
    trained = model, torch.optim.SGD(model.parameters(), 0.1)
    run.resume(*trained, examples=9, keep=2)
    with contextlib.suppress(SystemExit), run.training(contextlib.nullcontext()):
        run.log(1, loss=0.5)
        if stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(1, due=False, evaluates=True)
        run.checkpoints.wait()
        yield run
    yield trained


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_ended_between_a_save_and_its_evaluation_evaluates_again(start, stopped):
    *_, trained = saved_before_evaluation(start, stopped)
    run = start(total_steps=9)
    assert run.resume(*trained, examples=9, keep=2) == 1 and run.evaluation_due
    run.evaluation(1, accuracy=0.5)
    assert not run.evaluation_due and numbers(run)[1:] == [{"step": 1, "eval/accuracy": 0.5}]
    run.checkpoints.wait()
    assert json.load(open(f"{run.checkpoints.folder(1)}/metrics.json")) == {"step": 1, "metrics": {"accuracy": 0.5}}


def test_a_recorded_evaluation_is_not_repeated_and_its_checkpoint_has_the_metrics_again(start):
    steps = saved_before_evaluation(start)
    run = next(steps)
    run.evaluation(1, accuracy=0.5, f1=math.nan)
    run.checkpoints.wait()
    file = Path(run.checkpoints.folder(1), "metrics.json")
    file.unlink()  # as if the process had ended before it was written
    trained, before = next(steps), numbers(run)
    run = start(total_steps=9)
    run.resume(*trained, examples=9, keep=2)
    run.checkpoints.wait()
    assert not run.evaluation_due and numbers(run) == before
    assert json.loads(file.read_text()) == {"step": 1, "metrics": {"accuracy": 0.5, "f1": None}}


def test_metrics_that_cannot_be_added_to_a_checkpoint_are_a_warning(start, monkeypatch, capsys):
    run = next(saved_before_evaluation(start))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        run.checkpoints.add_metrics(1, {"accuracy": 0.5})
        run.checkpoints.wait()
    assert "warning: cannot write" in capsys.readouterr().err


def test_an_older_checkpoint_had_its_evaluation_before(start):
    *_, trained = saved_before_evaluation(start)
    file = Path(start(total_steps=9).path, "checkpoints/step_00000001/state.json")
    content = json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "evaluates"})
    file.write_text(content)
    complete = file.with_name("COMPLETE")
    marks = json.loads(complete.read_text())
    marks["state.json"] = {"bytes": len(content), "crc32": zlib.crc32(content.encode())}
    complete.write_text(json.dumps(marks))
    run = start(total_steps=9)
    assert run.resume(*trained, examples=9, keep=2) == 1 and not run.evaluation_due


def test_a_signal_in_the_last_step_lets_the_run_finish_and_a_failed_save_ends_it(start, monkeypatch):
    run, closed = start(at=0, total_steps=9), contextlib.closing(io.StringIO())
    monkeypatch.setattr(run.checkpoints, "save", lambda *_: None)
    with pytest.raises(ZeroDivisionError), run.training(closed):
        os.kill(os.getpid(), signal.SIGTERM)
        run.checkpoint(9, due=True)
        monkeypatch.setattr(run.checkpoints, "raise_failure", lambda: 1 / 0)
        run.checkpoint(4, due=False)
    assert closed.thing.closed and run._closed


def test_resume_drops_later_lines_and_a_torn_one_counts_the_time_before_and_names_damage(start, clock, monkeypatch):
    run = start(at=0)
    for step in (1, 2, 3):
        clock[0] += 30
        run.log(step, examples=240 * step, loss=float(step))
        with run.pause():
            clock[0] += 10
        run.evaluation(step, accuracy=step / 10)
    before, file = lines(run), Path(run.path, "metrics.jsonl")
    run.close()
    file.write_bytes(file.read_bytes() + b'{"step": 2, "loss": 7')
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 2)  # event files are ordered by their second
    clock[0] = 1000.0
    run = start(at=2)
    assert lines(run) == before[:4]
    clock[0] = 1005.0
    run.log(3, loss=5.0)
    assert lines(run) == [*before[:4], {"step": 3, "loss": 5.0, "timing": {"elapsed": 85.0, "training": 65.0}}]
    run.finish({})
    assert (run.summary["elapsed_seconds"], run.summary["training_seconds"]) == (85, 65)
    assert run.summary["examples_per_second"] == 8
    assert scalars(run, "loss") == [(1, 1.0), (2, 2.0), (3, 5.0)]  # TensorBoard, too
    assert scalars(run, "eval/accuracy")[0] == (1, pytest.approx(0.1))
    os.remove(f"{run.path}/summary.json")
    file.write_text(f"garbage\n{file.read_text()}")
    with pytest.raises(InputError, match="line 1 of .*metrics.jsonl is damaged.*--name"):
        start(at=1)


# ---- numbers, progress -----------------------------------------------------------------------------------------------
def test_lines_have_every_digit_and_the_speed_without_pauses_and_the_first_step(start, capsys, clock):
    run, loss = start(unit="tokens"), 1.2 + 1 / 3
    clock[0] = 50.0  # the compilation of the first step
    run.log(1, examples=1000, input_wait=0.5, loss=2.0, lr=2e-5)
    clock[0] = 52.0
    with run.pause():
        clock[0] = 60.0
        with run.pause():  # evaluation() pauses too
            clock[0] = 61.0
        clock[0] = 62.0
    clock[0] = 65.0
    run.log(120, examples=11_000, input_wait=0.031, lr=0.05, loss=torch.tensor(loss, dtype=torch.float64), correct=3)
    run.evaluation(120, bleu=0.1 + 0.2)
    clock[0] = 67.0
    run.log(130, examples=15_000, loss=1.0)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "step     1/500  loss 2.0000  lr 2.00e-05  input wait 50 %",
        "step   120/500  loss 1.5333  lr 0.0500  correct 3  2000 tokens/s  input wait 3 %",
        "step   120/500  evaluation: bleu 0.3000",
        "step   130/500  loss 1.0000  2000 tokens/s",
    ]
    assert numbers(run)[1:3] == [
        {"step": 120, "lr": 0.05, "loss": loss, "correct": 3},
        {"step": 120, "eval/bleu": 0.1 + 0.2},
    ]
    first, second, _, third = (line["timing"] for line in lines(run))
    assert first == {"elapsed": 50.0, "training": 50.0, "input_wait": 0.5}
    assert second == {"elapsed": 65.0, "training": 55.0, "tokens_per_second": 2000.0, "input_wait": 0.031}
    assert third == {"elapsed": 67.0, "training": 57.0, "tokens_per_second": 2000.0}


@pytest.mark.parametrize("loss", [math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_valid_json(start, loss):
    run = start()
    run.log(1, loss=1.0)
    with pytest.raises(InputError, match=r"loss is (nan|inf) at step 2: .* lower --lr"):
        run.log(2, loss=loss)
    with pytest.raises(InputError, match="eval/loss is nan at step 2"):
        run.evaluation(2, loss=math.nan)
    with pytest.raises(InputError, match="loss is"):  # all hosts must stop together
        start(host=1).log(2, loss=loss)
    run.log(3, loss=1.0, grad_norm=math.inf)
    assert numbers(run) == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 1.0, "grad_norm": None}]
    run.close()


# ---- curves ----------------------------------------------------------------------------------------------------------
def test_curves_have_a_panel_for_every_metric_and_few_points_are_enough(monkeypatch):
    made, figure, evaluated = [], matplotlib.figure.Figure, {"step": 50, "eval/accuracy": 0.1, "eval/loss": 2.0}
    monkeypatch.setattr(matplotlib.figure, "Figure", lambda **options: made.append(figure(**options)) or made[-1])
    points = [{"step": n, "loss": float(n % 2), "lr": 0.1} for n in range(1, 100)]
    curves.draw_curves([*points, evaluated, {"step": 90, "eval/accuracy": 0.4, "eval/perplexity": 9.0}], "my run")
    panels = {axes.get_ylabel(): axes for axes in made[0].axes}
    assert list(panels["learning rate"].lines[0].get_ydata()) == [0.1] * 99
    found = {name: [text.get_text() for text in getattr(axes.legend_, "texts", ())] for name, axes in panels.items()}
    expected = {"loss": ["training", "evaluation"], "accuracy": ["0.4000"], "perplexity": ["9.0000"]}
    assert found == {**expected, "learning rate": []} and made[0].get_suptitle() == "my run"
    raw, smooth = (line.get_ydata() for line in panels["loss"].lines[:2])
    assert list(raw) == [float(n % 2) for n in range(1, 100)] and max(smooth[5:]) < 0.7 and len(smooth) == 99
    one, nothing = (
        {"step": 9, "loss": 1.0, "lr": 0.0, "other": None},
        {"step": 9, "eval/accuracy": 0.0, "eval/f1": None},
    )
    for few in ([{"step": n, "loss": 1 / n} for n in range(1, 4)], [one], [nothing]):
        image = PIL.Image.open(io.BytesIO(curves.draw_curves(few, "a run")))
        assert image.size == (1000, 460) and (np.asarray(image.convert("L")) < 250).mean() > 0.01, few


def test_an_evaluation_draws_at_most_once_a_minute_and_so_does_the_end(start, monkeypatch, clock, memory):
    drawn = []
    monkeypatch.setattr(curves, "draw_curves", lambda records, title: drawn.append(len(records)) or b"png")
    run = start(runs="memory://bucket/runs")
    with curves.Curves(run) as drawer:
        run.watchers = [drawer]
        for clock[0] in (0.0, 59.0, 61.0):
            run.evaluation(1, accuracy=0.5)
            run.log(1, loss=1.0)
        assert drawn == [1, 5]
    run.close()
    assert drawn == [1, 5, 6] and memory.cat_file("/bucket/runs/net/curves.png") == b"png"


# ---- what can go wrong with the folder -------------------------------------------------------------------------------
def test_a_folder_that_cannot_be_used_is_reported(start, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot use --runs nonsense://bucket: "):
        start(runs="nonsense://bucket")
    run = start(runs=f"file://{tmp_path}/runs/")  # a local folder
    assert run.path == str(tmp_path / "runs/net")
    run.close()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "cat_file", refuse)
    with pytest.raises(InputError, match="cannot read .*config.json: .*Permission denied"):
        start()


def test_a_damaged_config_is_reported_and_metrics_without_one_are_not_appended_to(start, tmp_path):
    run, config = start(), tmp_path / "runs/net/config.json"
    run.log(1, loss=1.0)
    run.close()
    for content in ('{"config": {"lr"', "[]", '{"config": 3}'):
        config.write_text(content)
        with pytest.raises(InputError, match=r"net/config.json is damaged; remove .*/net to .*, or use another --name"):
            start()
    config.unlink()
    with pytest.raises(InputError, match="cannot write .*metrics.jsonl: File exists"):
        start().log(1, loss=1.0)
    assert len(lines(run)) == 1


@pytest.mark.parametrize("full", ["metrics", "events"])
def test_a_full_disk_names_the_file_says_what_to_do_and_lets_the_run_close(start, monkeypatch, full):
    run = start()
    run.log(7, loss=1.0)
    message = "metrics.jsonl: No space left on device; make room .* from the newest complete checkpoint, if any"
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
    with open(f"{run.path}/.lock", "r+") as lock:  # as another process has it, until it ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=f"is being trained by process {os.getpid()}; use another --name"):
            start()
    assert "resuming" not in capsys.readouterr().out
    assert start().resumed


# ---- remote roots ----------------------------------------------------------------------------------------------------
@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed upload keeps
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_remote_run_is_uploaded_whole_and_resumed_from_there(start, memory, monkeypatch, tmp_path):
    root = {"runs": "memory://bucket/runs"}
    run = start(**root, at=0)
    assert run.path == "memory://bucket/runs/net" and memory.exists("/bucket/runs/net/config.json")
    run.log(1, loss=1.0)
    run.evaluation(1, accuracy=0.5)
    run.log(2, loss=0.9)
    assert memory.cat_file("/bucket/runs/net/metrics.jsonl").count(b"\n") == 2
    run.upload()
    assert memory.cat_file("/bucket/runs/net/metrics.jsonl").count(b"\n") == 3
    (events,) = memory.glob("/bucket/runs/net/tb/events*")
    assert memory.cat_file(events).count(b"loss") == 2
    run.close()
    assert not list(tmp_path.glob("net-*"))

    run = start(**root, at=1)
    assert run.resumed
    run.log(2, loss=0.8)
    order, real = [], type(memory).put_file
    monkeypatch.setattr(type(memory), "put_file", lambda self, a, b, **k: (order.append(b), real(self, a, b, **k))[1])
    run.finish({"accuracy": 0.5})
    found = map(json.loads, memory.cat_file("/bucket/runs/net/metrics.jsonl").decode().splitlines())
    assert [(record["step"], record.get("loss")) for record in found] == [(1, 1.0), (1, None), (2, 0.8)]
    assert order[-1].endswith("/summary.json")
    assert len(memory.glob("/bucket/runs/net/tb/events*")) == 2
    assert not list(tmp_path.glob("net-*"))
    finished = start(**root, name="net")
    assert finished.finished and finished.summary["metrics"] == {"accuracy": 0.5}


def test_an_unwritable_store_stops_a_new_run_but_only_warns_in_training(start, memory, monkeypatch, capsys, tmp_path):
    def refuse(*_, **__):
        raise RuntimeError("403 forbidden")

    run = start(runs="memory://bucket/runs")
    run.log(1, loss=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", refuse)
        with pytest.raises(InputError, match="cannot write to memory://.*/other: 403 forbidden; the files are in /"):
            start(runs="memory://bucket/runs", name="other")
        run.evaluation(1, accuracy=0.5)
        assert "warning: cannot write to memory://bucket/runs/net: 403 forbidden" in capsys.readouterr().out
        for end in (lambda: run.finish({}), run.close):
            with pytest.raises(InputError, match="403"):
                end()
    assert list(tmp_path.glob("net-*/metrics.jsonl"))  # nothing is lost


# ---- XLA -------------------------------------------------------------------------------------------------------------
def test_xla_values_are_read_by_a_step_closure_in_one_transfer(start, monkeypatch):
    values = torch.arange(8.0, device=torch_xla.device())
    loss, accuracy = values.mean() / 3, values.max()
    run = start()
    reads = xla.host_reads()
    run.log(1, loss=loss, accuracy=accuracy, lr=0.1)
    run.log(2, loss=0.5)  # waits behind the first, so the lines stay in order
    assert xla.host_reads() == reads and not os.path.exists(f"{run.path}/metrics.jsonl")
    torch_xla.sync()
    assert xla.host_reads() == reads + 1
    third = float(torch.tensor(3.5) / 3)
    assert numbers(run) == [{"step": 1, "loss": third, "accuracy": 7.0, "lr": 0.1}, {"step": 2, "loss": 0.5}]

    graphs = xla.compilations()
    run.log(3, loss=loss)
    run.evaluation(3, accuracy=0.5)  # flushes what is pending, and compiles nothing for it
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 3]
    run.log(4, loss=loss)
    waited = []
    with monkeypatch.context() as patch:
        patch.setattr(device, "wait_for_steps", lambda: waited.append(len(numbers(run))))
        with run.pause():
            pass
    assert waited == [5]  # line 4 was read, and the device has finished, before the pause begins
    run.log(5, loss=loss)
    run.close()
    assert numbers(run)[-1] == {"step": 5, "loss": third}
    assert xla.compilations() == graphs
