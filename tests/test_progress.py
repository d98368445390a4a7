"""What a person who waits is told: the remaining time, a compilation, and the bar on a terminal, on
clocks and terminals that the tests make."""

import dataclasses
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import watched_script
from helpers import losses
from terminal import Terminal, shown
from watched_script import STEPS

from train.common import cli, device, hooks, progress
from train.common.watch import bar


class Clock:
    """The time that time.monotonic returns."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


# ---- the remaining time ------------------------------------------------------------------------


def test_nothing_is_said_before_the_speed_is_known():
    remaining = progress.Remaining(101)
    assert remaining.text(1) == ""
    remaining.line(1, 90.0)  # compiled
    assert remaining.text(1) == ""
    remaining.line(11, 92.0)
    assert remaining.seconds(11) == pytest.approx(18)
    assert remaining.text(11) == "about 20 s left"


def test_nothing_is_said_after_the_last_step():
    remaining = progress.Remaining(3)
    for step in (1, 2, 3):
        remaining.line(step, float(step))
    assert remaining.text(3) == ""


def test_a_training_that_may_end_early_says_at_most():
    remaining = progress.Remaining(602, may_end_early=True)
    remaining.line(1, 1.0)
    remaining.line(2, 2.0)
    assert remaining.text(2) == "at most 10 min left"


def pause(remaining: progress.Remaining, clock: Clock, of: str, seconds: float) -> None:
    with remaining.pausing(of):
        clock.now += seconds


def test_pauses_are_taken_to_come_as_often_as_so_far(clock):
    remaining = progress.Remaining(100)
    for step in range(1, 60):
        remaining.line(step, float(step))  # a second each
        remaining.step = step
        if step % 10 == 0:
            pause(remaining, clock, "checkpoints", 2)
        if step % 20 == 0:
            pause(remaining, clock, "evaluation", 30)

    # After 59 steps: 5 checkpoints and 3 evaluations, the next of both after step 60.
    assert remaining.seconds(59) == pytest.approx(41 + 5 * 2 + 3 * 30)


def test_a_pause_in_a_pause_counts_once(clock):
    remaining = progress.Remaining(100)
    remaining.line(49, 49.0)
    remaining.line(50, 50.0)
    remaining.step = 50
    with remaining.pausing("evaluation"):
        pause(remaining, clock, "evaluation", 7)
    assert remaining.seconds(50) == pytest.approx(50 + 7)


def test_what_a_pause_compiles_does_not_come_again(clock):
    compiled = [0.0]
    remaining = progress.Remaining(100, compile_seconds=lambda: compiled[0])
    remaining.line(49, 49.0)
    remaining.line(50, 50.0)
    remaining.step = 50
    with remaining.pausing("evaluation"):
        clock.now += 60
        compiled[0] = 55.0
    assert remaining.seconds(50) == pytest.approx(50 + 5)


def test_a_laptop_that_slept_does_not_spoil_the_estimate():
    remaining = progress.Remaining(1000)
    seconds = 0.0
    for step in range(1, 11):
        seconds += 3600.0 if step == 8 else 1.0
        remaining.line(step, seconds)
    assert remaining.seconds(10) == pytest.approx(990)


def test_old_lines_are_forgotten():
    remaining = progress.Remaining(1000)
    for step in range(1, 101):
        slow, quick = min(step, 80), max(step - 80, 0)
        remaining.line(step, 10.0 * slow + 1.0 * quick)
    assert remaining.seconds(100) == pytest.approx(900)


def test_lines_that_were_read_together_are_one():
    remaining = progress.Remaining(100)
    remaining.line(1, 5.0)
    remaining.line(10, 8.0)
    remaining.line(19, 8.0)
    remaining.line(29, 12.0)
    assert remaining.seconds(29) == pytest.approx(71 * (3 / 18 + 4 / 10) / 2)


def test_after_a_resume_the_estimate_is_of_this_start(clock):
    remaining = progress.Remaining(100, start=50)
    pause(remaining, clock, "evaluation", 500)  # that the last start has left out
    remaining.line(51, 1000.0)
    assert remaining.text(51) == ""
    remaining.line(60, 1009.0)
    assert remaining.seconds(60) == pytest.approx(40)

    remaining.step = 60
    pause(remaining, clock, "evaluation", 3)
    assert remaining.seconds(60) == pytest.approx(40 + 4 * 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01, "1 s"),
        (8.4, "8 s"),
        (12, "10 s"),
        (57, "55 s"),
        (58, "1 min"),
        (3560, "59 min"),
        (3580, "1 h 00 min"),
        (7900, "2 h 10 min"),
        (86_300, "1 d 0 h"),
        (273_000, "3 d 4 h"),
    ],
)
def test_an_estimate_is_rounded(seconds, text):
    assert progress.rounded(seconds) == text


# ---- compilations ------------------------------------------------------------------------------


class Compilation:
    """The end of a compilation of so many seconds, for which nobody really waits."""

    def __init__(self, clock: Clock, seconds: float):
        self._clock = clock
        self._end = clock.now + seconds

    def wait(self, seconds: float) -> bool:
        self._clock.now += seconds
        return self._clock.now >= self._end


def test_a_log_has_a_line_at_growing_intervals(clock, capsys):
    progress._tell("train_step", Compilation(clock, 200))
    assert capsys.readouterr().err.splitlines() == [
        "compiling the train step, 20 s so far",
        "compiling the train step, 40 s so far",
        "compiling the train step, 80 s so far",
        progress.ABOUT_ALARM,
        "compiling the train step, 160 s so far",
    ]


def test_a_short_compilation_is_not_worth_a_line(clock, capsys):
    progress._tell("train_step", Compilation(clock, 20))
    assert capsys.readouterr().err == ""


def test_a_terminal_counts_the_seconds_in_place(clock, capsys):
    notices = []
    with progress.shown_by(notices.append):
        progress._tell("eval_step", Compilation(clock, 118))
    assert notices[0] == "compiling the eval step, 1 s so far"
    assert notices[-2:] == ["compiling the eval step, 117 s so far", ""]
    assert capsys.readouterr().err == f"{progress.ABOUT_ALARM}\n"


@pytest.mark.parametrize("host", [0, 1])
def test_the_main_host_alone_tells_that_a_step_compiles(host, mesh, capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.02)
    monkeypatch.setattr(progress, "LOOK_EVERY", 0.01)

    def doubling_step(x):
        time.sleep(0.2)
        return 2 * x

    step = device.compiled(doubling_step, dataclasses.replace(mesh, process_index=host))
    step(torch.ones(4, 7 + host).to(mesh.device))
    said = "compiling the doubling step, 0 s so far\n" in capsys.readouterr().err
    assert said == (host == 0)


# ---- the bar -----------------------------------------------------------------------------------


@pytest.fixture
def terminals(monkeypatch) -> Iterator:
    """Makes a Terminal the standard output and error of the test: terminals(columns)."""
    made = []
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as patch:

        def make(columns: int) -> Terminal:
            terminal = Terminal(columns)
            made.append(terminal)
            patch.setattr(sys, "stdout", terminal.stream)
            patch.setattr(sys, "stderr", terminal.errors)
            return terminal

        yield make
    for terminal in made:
        terminal.content()


def run_of(main_process: bool = True, total_steps: int = 100) -> SimpleNamespace:
    """Returns what the bar sees of a Run."""
    return SimpleNamespace(
        start=0,
        total_steps=total_steps,
        mesh=SimpleNamespace(main_process=main_process),
        remaining=progress.Remaining(total_steps),
    )


def make_bar(run: SimpleNamespace) -> hooks.Watcher:
    make = bar.watcher(bar.Flags())
    assert make is not None
    return make(run)


def train(watcher: hooks.Watcher, run: SimpleNamespace, steps: int = 100) -> list[str]:
    """Trains with lines of metrics on both streams; returns these."""
    lines = []
    for step in range(1, steps + 1):
        watcher.step(step)
        if step % 10 == 0:
            run.remaining.line(step, 6.0 * step)
            lines.append(f"step {step} of {steps}")
            print(lines[-1], file=sys.stderr if step % 20 == 0 else sys.stdout, flush=True)
            watcher.line(step, {"loss": 1.0}, {})
    return lines


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_stay_whole_beside_the_bar(columns, terminals, monkeypatch):
    monkeypatch.setattr(bar, "DRAW_EVERY", 0.0)
    terminal = terminals(columns)
    run = run_of()
    with make_bar(run) as watcher:
        lines = train(watcher, run)
    print("after it")

    content = terminal.content()
    drawn = [row for row in re.split(r"[\r\n]|\x1b\[K", content) if "%|" in row]
    assert len(drawn) > 100
    assert max(map(len, drawn)) < columns
    assert shown(content, columns) == [*lines, "after it"]


def test_the_bar_says_how_far_and_how_long(terminals):
    terminal = terminals(80)
    run = run_of()
    with make_bar(run) as watcher:
        train(watcher, run, steps=50)
    drawn = terminal.content()
    assert re.search(r" 50%\|█+[▉-▏]? +\| 50/100  about 5 min left", drawn)


def test_a_terminal_without_unicode_has_a_bar_of_its_own_signs(terminals):
    terminal = terminals(80)
    terminal.stream.reconfigure(encoding="ascii")
    run = run_of()
    with make_bar(run) as watcher:
        train(watcher, run, steps=50)
    assert re.search(r" 50%\|#+\d? +\| 50/100", terminal.content())


def test_the_bar_says_what_the_training_waits_for(terminals):
    terminal = terminals(80)
    run = run_of()
    with make_bar(run) as watcher:
        watcher.pause("evaluation")
        progress._show("compiling the eval step, 3 s so far")
        progress._show("")
        watcher.resume()
        watcher.pause("checkpoints")
    drawn = re.findall(r"0/100  ([^\r]+)\r", terminal.content())
    expected = ["evaluation", "compiling the eval step, 3 s so far", "evaluation", "checkpoint"]
    assert drawn == expected
    assert progress._show is None


def test_what_other_code_writes_replaces_the_bar(terminals):
    terminal = terminals(60)
    run = run_of()
    alarm = "E slow_operation_alarm.cc:73] Very slow compile? " + 40 * "*"
    with make_bar(run) as watcher:
        watcher.step(1)
        os.write(terminal.stream.fileno(), f"{alarm}\n".encode())  # as XLA's C++ does
        watcher.pause("evaluation")
    assert terminal.lines() == [alarm[:60], alarm[60:]]


def test_a_line_that_is_begun_waits_for_its_end(terminals):
    terminal = terminals(80)
    run = run_of()
    with make_bar(run) as watcher:
        print("half", end="", flush=True)
        watcher.pause("evaluation")
        print(" a line")
        print("no end", end="")
    assert terminal.lines() == ["half a line", "no end"]


def test_a_shell_that_has_the_terminal_sees_no_bar(terminals, monkeypatch):
    """After Ctrl-Z and `bg`, or with `&`."""
    terminal = terminals(80)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    run = run_of()
    with make_bar(run) as watcher:
        lines = train(watcher, run)
    content = terminal.content()
    assert "|" not in content
    assert shown(content, 80) == lines


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hung up", "closed"])
def test_a_terminal_that_is_gone_does_not_end_the_training(hangs_up, terminals, monkeypatch):
    monkeypatch.setattr(bar, "DRAW_EVERY", 0.0)
    terminal = terminals(80)
    run = run_of()
    with make_bar(run) as watcher:
        watcher.step(1)
        if hangs_up:
            terminal.hang_up()
        else:
            terminal.stream.close()
        for step in range(2, 10):
            watcher.step(step)
        watcher.pause("evaluation")
        watcher.resume()


def test_other_hosts_have_no_bar(terminals):
    terminal = terminals(80)
    run = run_of(main_process=False)
    with make_bar(run) as watcher:
        lines = train(watcher, run)
    content = terminal.content()
    assert "|" not in content
    assert shown(content, 80) == lines


@pytest.mark.parametrize("kind", ["file", "pipe", "memory", "closed", "none"])
def test_what_is_no_terminal_has_no_bar(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    read_end, write_end = os.pipe()
    with open(tmp_path / "log", "w") as file, os.fdopen(write_end, "w") as pipe:
        closed = open(tmp_path / "closed", "w")
        closed.close()
        streams = {"file": file, "pipe": pipe, "memory": io.StringIO(), "closed": closed}
        monkeypatch.setattr(sys, "stdout", streams.get(kind))
        assert bar.watcher(bar.Flags()) is None
    os.close(read_end)


@pytest.mark.parametrize(
    ("columns", "term"),
    [(80, "dumb"), (30, "xterm"), (0, "xterm")],
    ids=["dumb", "narrow", "of unknown size"],
)
def test_a_terminal_without_room_has_no_bar(columns, term, terminals, monkeypatch):
    terminals(columns)
    monkeypatch.setenv("TERM", term)
    assert bar.watcher(bar.Flags()) is None


def run_script(folder: os.PathLike) -> None:
    """Trains the small script in this process, as its command line does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", "tiny", "--runs", str(folder)])
        cli.run(watched_script.main, watched_script.PRESETS)


def test_a_script_on_a_terminal_says_the_same_as_in_a_log(mesh, terminals, tmp_path, monkeypatch):
    terminal = terminals(200)
    run_script(tmp_path / "terminal")
    content = terminal.content()

    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        monkeypatch.setattr(sys, "stderr", log)
        run_script(tmp_path / "file")
    in_log = (tmp_path / "log").read_text()

    assert "12/12" in content
    assert not re.search(r"[\r\x1b█▏]|%\|", in_log)
    assert losses(tmp_path / "terminal/run") == losses(tmp_path / "file/run")
    on_terminal = shown(content, 200)
    assert len(on_terminal) == len(in_log.splitlines())
    steps = re.findall(rf"^step +(\d+)/{STEPS}  loss ", "\n".join(on_terminal), re.MULTILINE)
    assert steps == [str(step) for step in range(1, STEPS + 1)]
