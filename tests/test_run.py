"""tracking: the run folder, exact resume of metrics.jsonl, values read by step closures only, remote roots."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time

import fsspec
import pytest
import torch

from errors import InputError
from train.common import run as tracking


@dataclasses.dataclass(frozen=True)
class Config:
    runs: str = "runs"
    name: str = ""
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    workers: int = 2


@pytest.fixture
def start(tmp_path):
    """Starts runs under tmp_path, and closes them at the end."""
    runs = []

    def start(main_process=True, total_steps=None, headline="", **fields):
        config = Config(**{"runs": str(tmp_path / "runs"), **fields})
        free = ("workers",)
        run = tracking.Run(config, "net", headline, {"kind": "CPU"}, main_process, free, total_steps)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.close()


def lines(run):
    with open(f"{run.path}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def numbers(run):
    """The lines without what depends on the clock."""
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines(run)]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_new_run_gets_the_default_name_and_says_what_it_does(start, tmp_path, capsys):
    run = start(headline="net: tiny preset")
    assert (run.name, run.path) == ("net", str(tmp_path / "runs/net"))
    assert not run.resumed and not run.finished
    assert capsys.readouterr().out.splitlines() == ["net: tiny preset", f"new run {run.path}"]


def test_an_unfinished_run_with_the_same_config_is_resumed(start, capsys):
    start().close()
    run = start(workers=7)  # a free field may differ
    assert run.resumed and run.name == "net"
    assert f"resuming the unfinished run {run.path}" in capsys.readouterr().out


def test_without_a_name_finished_and_other_runs_are_passed_over_and_the_reason_is_said(start, capsys):
    start().finish({}, {})
    run = start()
    assert run.name == "net-2" and not run.resumed
    assert "net-2 (net is finished)" in capsys.readouterr().out
    run.close()
    other = start(lr=0.2)
    assert other.name == "net-3"
    assert "net-3 (net-2 was trained with another lr)" in capsys.readouterr().out


def test_a_given_name_with_other_values_is_refused_with_both_values(start):
    start(name="mine").close()
    with pytest.raises(InputError, match=r"mine was started with other values \(lr was 0.1, now 0.2\)") as caught:
        start(name="mine", lr=0.2, workers=9)
    assert "workers" not in str(caught.value) and "betas" not in str(caught.value)
    assert "use another --name or the old values" in str(caught.value)


def test_a_finished_run_given_by_name_is_not_trained_again(start, capsys):
    start(name="mine").finish({"accuracy": 0.75}, {"graphs": 2})
    run = start(name="mine")
    assert run.finished and not run.resumed and run.summary["metrics"] == {"accuracy": 0.75}
    capsys.readouterr()
    run.print_summary()
    assert "accuracy         0.7500" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_a_name_that_is_a_path_is_refused(start, name):
    with pytest.raises(InputError, match="not the name of one folder"):
        start(name=name)


def test_other_hosts_choose_the_same_run_but_write_and_print_nothing(start, tmp_path, capsys):
    other = start(main_process=False)
    other.log(1, loss=1.0)
    other.evaluation(1, accuracy=0.5)
    other.message("hello")
    other.finish({"accuracy": 0.5}, {})
    assert other.name == "net" and not (tmp_path / "runs").exists() and capsys.readouterr().out == ""
    start().finish({}, {})
    assert start(main_process=False).name == "net-2"
    with pytest.raises(InputError, match="loss is nan"):  # all hosts must stop together
        start(main_process=False).log(1, loss=math.nan)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_config_json_says_what_ran_where_and_each_start_adds_to_it(start):
    start().close()
    run = start()
    with open(f"{run.path}/config.json") as file:
        stored = json.load(file)
    assert stored["config"]["betas"] == [0.9, 0.999] and stored["config"]["lr"] == 0.1
    assert len(stored["starts"]) == 2
    first = stored["starts"][0]
    assert first["devices"] == {"kind": "CPU"} and "python" in first["command"] and first["time"].startswith("20")
    assert first["versions"]["torch"] == torch.__version__.split("+")[0] and "python" in first["versions"]


def test_git_commit_and_changes_are_recorded_and_null_outside_git(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "tracking.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tracking._start_record(None)["git"] is None

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    assert tracking._start_record(None)["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("two")
    assert tracking._start_record(None)["git"]["dirty"] is True


def test_metrics_are_written_at_once_with_every_digit_and_timings_apart(start):
    run = start()
    loss = 1 / 3
    run.log(1, examples=32, input_wait=0.25, loss=torch.tensor(loss, dtype=torch.float64), lr=1e-5, correct=3)
    assert numbers(run) == [{"step": 1, "loss": loss, "lr": 1e-5, "correct": 3}]
    run.evaluation(1, accuracy=0.1 + 0.2)
    assert numbers(run)[1] == {"step": 1, "eval/accuracy": 0.1 + 0.2}
    assert set(lines(run)[0]["timing"]) == {"elapsed", "training", "input_wait"}


def test_tensorboard_gets_the_same_numbers(start):
    run = start()
    run.log(3, loss=0.5)
    run.evaluation(3, accuracy=0.25)
    run.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run.path}/tb")
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(3, 0.25)]


def test_tensorflow_is_not_imported_even_where_it_is_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "from train.common import run as tracking; import tests.test_run as t, sys; "
        f"run = tracking.Run(t.Config(runs={str(tmp_path / 'runs')!r}), 'net'); run.log(1, loss=1.0); run.close()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_finish_writes_summary_and_prints_the_table(start, capsys):
    run = start(total_steps=2)
    run.log(1, examples=10, input_wait=0.1, loss=2.0)
    time.sleep(0.02)
    run.log(2, examples=20, input_wait=0.3, loss=1.0)
    capsys.readouterr()
    report = {"compile_seconds": 75.0, "graphs": 2, "recompilations": [], "fallbacks": ["aten::nonzero"]}
    run.finish({"top1": 0.953125, "loss": math.inf}, report)
    with open(f"{run.path}/summary.json") as file:
        summary = json.load(file)
    assert summary == run.summary and run.finished
    assert summary["metrics"] == {"top1": 0.953125, "loss": None} and summary["steps"] == 2
    assert summary["report"] == report and summary["input_wait"] == pytest.approx(0.2)
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith(f"{run.path} finished in ")
    cells = {line[:19].strip(): line[19:].strip() for line in table[1:]}
    assert next(iter(cells)) == "top1" and cells["top1"] == "0.9531"
    assert cells["compile time"] == "1 min 15 s" and cells["input wait"] == "20 %"
    assert (
        cells["graphs compiled"] == "2" and cells["recompilations"] == "0" and cells["fall-backs"] == "1; aten::nonzero"
    )
    assert float(cells["examples/s"]) == pytest.approx(summary["examples_per_second"], rel=0.01)
    assert cells["training time"].endswith(" s")


def test_summary_json_is_the_last_file_written(start, monkeypatch):
    run = start()
    run.log(1, loss=1.0)
    monkeypatch.setattr(tracking, "draw_curves", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.finish({}, {})
    assert not os.path.exists(f"{run.path}/summary.json")
    monkeypatch.undo()


def test_files_are_replaced_whole_or_not_at_all(start, monkeypatch):
    start().close()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match="cannot write .*config.json: No space left on device"):
        start()
    monkeypatch.undo()
    run = start()
    with open(f"{run.path}/config.json") as file:
        assert len(json.load(file)["starts"]) == 2  # the failed start had not touched the file
    assert not [name for name in os.listdir(run.path) if name.endswith(".tmp")]


def test_a_closed_run_takes_no_more_lines_and_close_may_be_repeated(start):
    run = start()
    run.log(1, loss=1.0)
    run.close()
    run.close()
    for late in (lambda: run.log(2, loss=1.0), lambda: run.finish({}, {})):
        with pytest.raises(RuntimeError, match="close"):
            late()
    assert len(lines(run)) == 1 and not os.path.exists(f"{run.path}/summary.json")


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_resume_drops_later_lines_and_a_torn_last_one(start):
    run = start()
    for step in (1, 2, 3):
        run.log(step, loss=float(step))
        run.evaluation(step, accuracy=step / 10)
    before = numbers(run)
    run.close()
    with open(f"{run.path}/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "loss": 7')
    run = start()
    run.resume_at(2)
    assert numbers(run) == before[:4]
    run.log(3, loss=3.0)
    run.evaluation(3, accuracy=0.3)
    assert numbers(run) == before


def test_a_damaged_line_in_the_middle_is_named(start):
    run = start()
    run.log(1, loss=1.0)
    run.close()
    with open(f"{run.path}/metrics.jsonl", "r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(b"garbage\n" + content)
    run = start()
    with pytest.raises(InputError, match="line 1 of .*metrics.jsonl is damaged"):
        run.resume_at(1)


def test_a_resumed_run_must_say_where_it_goes_on(start):
    start().close()
    with pytest.raises(RuntimeError, match="resume_at"):
        start().log(1, loss=1.0)


def test_tensorboard_forgets_the_steps_that_are_trained_again(start):
    run = start()
    for step in (1, 2, 3):
        run.log(step, loss=1.0)
    run.close()
    time.sleep(1.1)  # event files are ordered by the second in their name
    run = start()
    run.resume_at(2)
    run.log(3, loss=5.0)
    run.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run.path}/tb")
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 5.0)]


def test_times_of_a_resumed_run_include_its_earlier_parts(start):
    run = start()
    run.log(1, loss=1.0)
    run.close()
    line = lines(run)[0] | {"timing": {"elapsed": 100.0, "training": 60.0, "examples_per_second": 8.0}}
    with open(f"{run.path}/metrics.jsonl", "w") as file:
        file.write(json.dumps(line) + "\n")
    run = start()
    run.resume_at(1)
    run.log(2, loss=1.0)
    assert 100 < lines(run)[1]["timing"]["elapsed"] < 160 and 60 < lines(run)[1]["timing"]["training"] < 99
    run.finish({}, {})
    assert run.summary["elapsed_seconds"] > 100 and run.summary["training_seconds"] > 60
    assert run.summary["examples_per_second"] == 8.0


# ---- numbers, progress -----------------------------------------------------------------------------------------------


def test_speed_is_measured_between_log_calls_without_pauses_and_without_the_first_step(start, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = start()
    now[0] = 50.0  # the compilation of the first step
    run.log(1, examples=8, loss=1.0)
    assert "examples_per_second" not in lines(run)[0]["timing"]
    now[0] = 52.0
    with run.pause():
        now[0] = 60.0
        with run.pause():  # evaluation() pauses too
            now[0] = 61.0
    now[0] = 64.0
    run.log(11, examples=88, loss=1.0)
    assert lines(run)[1]["timing"] == {"elapsed": 64.0, "training": 55.0, "examples_per_second": 80 / 5}


def test_plain_lines_without_a_terminal(start, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = start(total_steps=500)
    run.log(1, examples=10, input_wait=0.5, loss=2.0, lr=2e-5)
    now[0] = 1.0
    run.log(120, examples=822, input_wait=0.031, lr=0.05, loss=1.23456)
    run.evaluation(120, accuracy=0.5)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "step     1/500  loss 2.0000  lr 2.00e-05  input wait 50 %",
        "step   120/500  loss 1.2346  lr 0.0500  812 examples/s  input wait 3 %",
        "step   120/500  evaluation: accuracy 0.5000",
    ]


def test_a_progress_bar_on_a_terminal(start, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = start(total_steps=10)
    for step in (1, 4):
        run.log(step, examples=step, input_wait=0.1, loss=0.5, lr=0.1, noise=3.0)
    before = capsys.readouterr().err
    run.message("a message")
    out, err = capsys.readouterr()
    assert err.startswith("\r   ") and "4/10" in err  # the bar is cleared for the message, and drawn again
    err = before
    assert "a message" in out.splitlines() and "step     4/10" not in out
    assert "4/10" in err and "loss=0.5000, lr=0.1000, examples/s=" in err and "wait=10 %" in err and "noise" not in err


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_valid_json(start, loss):
    run = start()
    run.log(1, loss=1.0)
    with pytest.raises(InputError, match=r"loss is (nan|inf) at step 2: .* lower --lr"):
        run.log(2, loss=loss)
    with pytest.raises(InputError, match="eval/loss is nan at step 2"):
        run.evaluation(2, loss=math.nan)
    run.log(3, loss=1.0, grad_norm=math.inf)
    assert numbers(run) == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 1.0, "grad_norm": None}]
    run.close()
    assert os.path.exists(f"{run.path}/curves.png")


# ---- curves ----------------------------------------------------------------------------------------------------------

EVALUATED = [
    {"step": 50, "eval/accuracy": 0.1, "eval/loss": 2.0},
    {"step": 90, "eval/accuracy": 0.4, "eval/perplexity": 9.0},
]


@pytest.mark.parametrize(
    "records",
    [
        [{"step": n, "loss": 1 / n, "lr": 0.1} for n in range(1, 100)] + EVALUATED,
        [{"step": n, "loss": 1 / n} for n in range(1, 4)],
        [{"step": 9, "eval/accuracy": 0.0, "eval/f1": None}],
        [{"step": 9, "loss": 1.0, "lr": 0.0, "other": None}],
    ],
    ids=["all", "few points", "one evaluation only", "one step"],
)
def test_curves_are_drawn_from_whatever_points_there_are(records):
    from io import BytesIO

    import numpy as np
    from PIL import Image

    image = Image.open(BytesIO(tracking.draw_curves(records, "a run")))
    assert image.size == (1000, 460)
    assert (np.asarray(image.convert("L")) < 250).mean() > 0.01


def test_a_loss_curve_shows_every_panel(monkeypatch):
    from matplotlib.figure import Figure

    made = []
    real = Figure.__init__
    monkeypatch.setattr(Figure, "__init__", lambda self, **options: (real(self, **options), made.append(self))[0])
    records = [{"step": n, "loss": float(n % 2), "lr": 0.1} for n in range(1, 100)]
    tracking.draw_curves(records + EVALUATED, "my run")
    panels = {
        (axes.get_ylabel(), tuple(text.get_text() for text in axes.get_legend().get_texts()))
        for axes in made[0].axes
        if axes.get_legend()
    }
    assert panels == {
        ("loss", ("training", "evaluation")),
        ("evaluation", ("accuracy 0.4000",)),
        ("evaluation", ("perplexity 9.0000",)),
    }
    loss, rate = made[0].axes[:2]
    assert rate.get_ylabel() == "learning rate" and list(rate.lines[0].get_ydata()) == [0.1] * 99
    assert made[0].get_suptitle() == "my run"
    raw, smooth = (line.get_ydata() for line in loss.lines[:2])
    assert list(raw) == [float(n % 2) for n in range(1, 100)] and max(smooth[5:]) < 0.7 and len(smooth) == 99


def test_evaluation_draws_at_most_once_a_minute_and_close_draws(start, monkeypatch):
    drawn, now = [], [0.0]
    monkeypatch.setattr(tracking, "draw_curves", lambda records, title: drawn.append(len(records)) or b"png")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = start()
    for now[0] in (0.0, 59.0, 61.0):
        run.evaluation(1, accuracy=0.5)
    assert drawn == [1, 3]
    run.close()
    assert drawn == [1, 3, 3]
    with open(f"{run.path}/curves.png", "rb") as file:
        assert file.read() == b"png"


# ---- what can go wrong with the folder -------------------------------------------------------------------------------


def test_a_file_in_the_way_is_reported(start, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="cannot write .*runs/net: .*; use another folder with --runs"):
        start()


def test_a_folder_that_cannot_be_made_is_reported(start):
    with pytest.raises(InputError, match="cannot write /proc/runs/net: "):
        start(runs="/proc/runs")


def test_an_unreadable_folder_is_reported(start, monkeypatch):
    run = start()
    run.close()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(run._files), "cat_file", refuse)
    with pytest.raises(InputError, match="cannot read .*config.json: .*Permission denied"):
        start()


@pytest.mark.parametrize("content", ['{"config": {"lr"', "[]", '{"config": 3}'])
def test_a_damaged_config_is_reported_with_the_way_out(start, tmp_path, content):
    start().close()
    (tmp_path / "runs/net/config.json").write_text(content)
    with pytest.raises(
        InputError, match=r"net/config.json is damaged; remove .*/net to begin again, or use another --name"
    ):
        start()


def test_metrics_without_a_config_are_not_appended_to(start, tmp_path):
    run = start()
    run.log(1, loss=1.0)
    run.close()
    os.remove(tmp_path / "runs/net/config.json")
    with pytest.raises(InputError, match="cannot write .*metrics.jsonl: File exists"):
        start().log(1, loss=1.0)
    assert len(lines(run)) == 1


class FullDisk:
    """A metrics.jsonl that takes no more."""

    def __init__(self, file):
        self.name, self.close = file.name, file.close

    def write(self, data):
        raise OSError(28, "No space left on device")


def test_a_full_disk_names_the_file_and_says_what_is_safe(start, monkeypatch):
    run = start()
    run.log(7, loss=1.0)
    run._metrics = FullDisk(run._metrics)
    monkeypatch.setattr(os, "fsync", run._metrics.write)
    with pytest.raises(InputError, match="metrics.jsonl: No space left on device; all up to step 7 is safe"):
        run.log(8, loss=1.0)
    run.close()  # must not hide the message by an error of its own
    monkeypatch.undo()
    run = start()
    run.resume_at(7)
    assert numbers(run) == [{"step": 7, "loss": 1.0}]


def test_a_full_disk_under_tensorboard_does_not_keep_the_run_from_closing(start, monkeypatch):
    run = start()
    run.log(7, loss=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(run._tensorboard, "add_scalar", lambda *_: FullDisk(run._metrics).write(b""))
        patch.setattr(run._tensorboard, "close", lambda: FullDisk(run._metrics).write(b""))
        with pytest.raises(InputError, match="No space left on device"):
            run.log(8, loss=1.0)
        run.close()
    assert start().resumed  # the lock is free again


def test_a_partly_written_line_is_completed_or_an_error(start):
    run = start()
    run.log(1, loss=1.0)

    class Slow:
        name, written = run._metrics.name, b""

        def write(self, data):
            self.written += data[:5]
            return len(data[:5])

        def close(self):
            pass

    run._metrics = slow = Slow()
    run.log(2, loss=0.5)
    assert json.loads(slow.written)["loss"] == 0.5 and slow.written.endswith(b"\n")


def test_the_same_run_in_two_processes_is_refused_until_the_first_is_killed(start, tmp_path):
    code = (
        "from train.common import run as tracking; import tests.test_run as t, time; "
        f"run = tracking.Run(t.Config(runs={str(tmp_path / 'runs')!r}), 'net'); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        process.stdout.readline()
        for _ in range(100):
            if (tmp_path / "runs/net/config.json").exists():
                break
            time.sleep(0.1)
        with pytest.raises(InputError, match=f"is being trained by process {process.pid}; use another --name"):
            start()
    finally:
        process.kill()
        process.wait()
    assert start().resumed


# ---- remote roots ----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed upload keeps
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_remote_run_is_uploaded_whole_and_resumed_from_there(start, memory, monkeypatch):
    run = start(runs="memory://bucket/runs")
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
    assert not os.path.exists(run._folder)
    local = run._folder

    run = start(runs="memory://bucket/runs")
    assert run.resumed and run._folder != local
    run.resume_at(1)
    run.log(2, loss=0.8)
    order, real = [], type(memory).put_file
    monkeypatch.setattr(type(memory), "put_file", lambda self, a, b, **k: (order.append(b), real(self, a, b, **k))[1])
    run.finish({"accuracy": 0.5}, {})
    content = memory.cat_file("/bucket/runs/net/metrics.jsonl").decode()
    records = [json.loads(line) for line in content.splitlines()]
    assert [(record["step"], record.get("loss")) for record in records] == [(1, 1.0), (1, None), (2, 0.8)]
    assert order[-1].endswith("/summary.json") and memory.exists("/bucket/runs/net/curves.png")
    assert len(memory.glob("/bucket/runs/net/tb/events*")) == 2
    assert not os.path.exists(run._folder)
    finished = start(runs="memory://bucket/runs", name="net")
    assert finished.finished and finished.summary["metrics"] == {"accuracy": 0.5}


def test_an_unwritable_store_stops_a_new_run_but_only_warns_during_training(start, memory, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("403 forbidden")

    run = start(runs="memory://bucket/runs")
    run.log(1, loss=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", refuse)
        with pytest.raises(
            InputError, match="cannot write to memory://bucket/runs/other: 403 forbidden; the files are in /"
        ):
            start(runs="memory://bucket/runs", name="other")
        run.evaluation(1, accuracy=0.5)
        assert "warning: cannot write to memory://bucket/runs/net: 403 forbidden" in capsys.readouterr().out
        with pytest.raises(InputError, match="403"):
            run.finish({}, {})
        with pytest.raises(InputError, match="403"):
            run.close()
    assert os.path.exists(f"{run._folder}/metrics.jsonl")  # nothing is lost


def test_an_unknown_protocol_is_reported(start):
    with pytest.raises(InputError, match="cannot use --runs nonsense://bucket: "):
        start(runs="nonsense://bucket")


def test_a_file_url_is_a_local_root(start, tmp_path):
    run = start(runs=f"file://{tmp_path}/runs/")
    assert run.path == str(tmp_path / "runs/net")


# ---- XLA -------------------------------------------------------------------------------------------------------------


def test_xla_values_are_read_by_a_step_closure_in_one_transfer(start, monkeypatch):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    def transfers():
        data = met.metric_data("TransferFromDeviceTime")
        return data[0] if data else 0

    values = torch.arange(8.0, device=torch_xla.device())
    loss, accuracy = values.mean() / 3, values.max()
    run = start()
    before = transfers()
    run.log(1, loss=loss, accuracy=accuracy, lr=0.1)
    run.log(2, loss=0.5)  # waits behind the first, so the lines stay in order
    assert transfers() == before and not os.path.exists(f"{run.path}/metrics.jsonl")
    torch_xla.sync()
    assert transfers() == before + 1
    third = float(torch.tensor(3.5) / 3)
    assert numbers(run) == [{"step": 1, "loss": third, "accuracy": 7.0, "lr": 0.1}, {"step": 2, "loss": 0.5}]

    compiled = met.counter_value("UncachedCompile")
    run.log(3, loss=loss)
    run.evaluation(3, accuracy=0.5)  # flushes what is pending, and compiles nothing for it
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 3]
    run.log(4, loss=loss)
    waited = []
    with monkeypatch.context() as patch:
        patch.setattr(xm, "wait_device_ops", lambda: waited.append(len(numbers(run))))
        with run.pause():
            pass
    assert waited == [5]  # line 4 was read, and the device has finished, before the pause begins
    run.log(5, loss=loss)
    run.close()
    assert numbers(run)[-1] == {"step": 5, "loss": third}
    assert met.counter_value("UncachedCompile") == compiled


def test_a_loss_on_the_device_that_is_not_finite_stops_at_the_next_sync(start):
    import torch_xla

    run = start()
    run.log(5, loss=torch.tensor(0.0, device=torch_xla.device()) / 0)
    with pytest.raises(InputError, match="loss is nan at step 5"):
        torch_xla.sync()
    torch_xla.sync()
    run.close()


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_the_unit_of_speed_is_named_in_lines_summary_and_table(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    config = Config(runs=str(tmp_path))
    run = tracking.Run(config, "net", unit="tokens")
    run.log(1, examples=1000, loss=2.0)
    now[0] = 2.0
    run.log(2, examples=9000, loss=1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    now[0] = 3.0
    run.log(3, examples=13_000, loss=1.0)
    run.finish({"bleu": 30.0}, {})
    assert [set(line["timing"]) for line in lines(run)] == [
        {"elapsed", "training"},
        {"elapsed", "training", "tokens_per_second"},
        {"elapsed", "training", "tokens_per_second"},
    ]
    assert [line["timing"].get("tokens_per_second") for line in lines(run)] == [None, 4000, 4000]
    assert run.summary["tokens_per_second"] == 4000 and "examples_per_second" not in run.summary
    out, err = capsys.readouterr()
    assert "step     2  loss 1.0000  4000 tokens/s" in out.splitlines() and "tokens/s=4000" in err
    assert re.search(r"^  tokens/s +4000$", out, re.MULTILINE) and "examples" not in out + err
    again = tracking.Run(dataclasses.replace(config, name="net"), "net", unit="tokens")
    again.print_summary()
    assert re.search(r"^  tokens/s +4000$", capsys.readouterr().out, re.MULTILINE)
