"""The log of a run of tpu/launch: its segments, what others do to them, and the journal."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_bed import one_worker

from tpu.launch import keeper, worker


def make_log(folder: Path) -> keeper.Log:
    """Opens the log in a run's folder as a keeper does."""
    worker.open_log(folder)
    return keeper.Log(folder)


# ---- segments ----------------------------------------------------------------------------------


@dataclass
class Rotated:
    """A log whose first segments were rotated away."""

    folder: Path
    lines: list[bytes]  # all that was written
    segments: list[Path]  # those that are left


@pytest.fixture
def rotated(tmp_path, monkeypatch) -> Rotated:
    monkeypatch.setattr(keeper, "SEGMENT", 1000)
    folder = tmp_path / "one"
    log = make_log(folder)
    lines = [f"line {number:04d}\n".encode() for number in range(1000)]
    for line in lines:
        log.write(line)
    return Rotated(folder, lines, sorted(folder.glob("log.[0-9]*")))


def test_a_log_is_rotated_in_segments(rotated):
    segments = rotated.segments
    assert len(segments) == keeper.SEGMENTS
    assert all(segment.stat().st_size <= 1010 for segment in segments)
    assert os.readlink(rotated.folder / "log") == segments[-1].name

    written = sum(len(line) for line in rotated.lines)
    assert worker.size_of(rotated.folder) == written
    assert worker.open_log(rotated.folder) == written


@pytest.fixture
def read(rotated, capfdbinary):
    """Returns what a client gets of the rotated log from an offset on, through all segments."""

    def read_from(at: int) -> bytes:
        for segment in worker.segments_from(rotated.folder, at):
            at = worker.stream(segment, at)
        assert at == worker.size_of(rotated.folder)

        text = ""
        for line in capfdbinary.readouterr().out.splitlines():
            if line:
                text += json.loads(line[9:])["data"]
        return text.encode()

    return read_from


def test_a_log_is_followed_through_its_segments(rotated, read):
    five_and_a_half_lines = 55
    middle = int(rotated.segments[1].suffix[1:]) - five_and_a_half_lines
    assert read(middle) == b"".join(rotated.lines)[middle:]


def test_a_reader_learns_that_lines_were_rotated_away(rotated, read):
    text = read(0)
    assert text.startswith(b"\n[xla-zoo] ")
    assert b"were rotated away\n" in text
    assert text.endswith(rotated.lines[-1])


def test_the_end_of_a_log_is_of_whole_lines(rotated, read):
    at = worker.end_of(rotated.folder, 95, 0)
    assert read(at) == b"".join(rotated.lines[-9:])


def test_the_end_of_a_log_of_one_long_line_is_shown(tmp_path):
    """A progress bar ends its lines by \\r."""
    folder = tmp_path / "one"
    make_log(folder).write(b"x" * 100_000)
    assert worker.end_of(folder, 1000, 0) == 99_000


def test_the_keepers_line_is_a_line_of_its_own(tmp_path):
    log = make_log(tmp_path / "one")
    log.line("[xla-zoo] first")
    log.write(b"epoch 1: 50%")
    log.line("[xla-zoo] worker 1 failed")

    text = (tmp_path / "one/log").read_text()
    assert text == "[xla-zoo] first\nepoch 1: 50%\n[xla-zoo] worker 1 failed\n"


# ---- a full disk, and other hands --------------------------------------------------------------


def test_a_full_disk_costs_bytes_of_the_log_and_not_the_run(tmp_path, monkeypatch):
    log = make_log(tmp_path / "one")
    log.write(b"before\n")
    real_write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 4:
            return real_write(file, data[:4])  # the last that finds room
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(keeper.os, "write", full)
        log.write(b"lost\n")
        log.write(b"lost, too\n")
    needs_no_disk = "what a failed worker shows of its end needs no disk"
    assert log.recent.endswith(b"lost, too\n"), needs_no_disk

    log.write(b"after\n")
    text = (tmp_path / "one/log").read_text()
    assert text.startswith("before\n")
    assert text.endswith("bytes are not here\nafter\n")


def test_other_files_beside_the_log_are_no_segments(tmp_path):
    """Somebody compresses a segment, or logrotate does."""
    folder = tmp_path / "one"
    make_log(folder).write(b"text\n")
    for name in ("log.000000000000000.gz", "log.1", "log.2026-01-01"):
        (folder / name).write_bytes(b"other")

    make_log(folder).write(b"more\n")
    assert worker.size_of(folder) == 10
    assert (folder / "log").read_text() == "text\nmore\n"
    segments = [path.name for path in worker.segments_from(folder, 0)]
    assert segments == ["log.000000000000000"]


def test_a_log_that_an_editor_has_replaced_loses_nothing(tmp_path, monkeypatch):
    """`sed -i` makes a file of the link."""
    monkeypatch.setattr(keeper, "SEGMENT", 10)
    folder = tmp_path / "one"
    log = make_log(folder)
    log.write(b"0123456789")
    log.write(b"more\n")
    (folder / "log").unlink()
    (folder / "log").write_text("edited")

    assert worker.open_log(folder) == 15
    assert (folder / f"log.{0:015d}").read_bytes() == b"0123456789"
    assert (folder / "log").read_bytes() == b"more\n"
    assert [path.read_text() for path in folder.glob("log.old-*")] == ["edited"]


@pytest.mark.parametrize("how", ["removed", "emptied", "with its folder"])
def test_a_log_that_is_taken_away_begins_again(how, tmp_path):
    folder = tmp_path / "one"
    log = make_log(folder)
    log.write(b"before\n")
    at = worker.size_of(folder)
    (segment,) = folder.glob("log.[0-9]*")
    if how == "emptied":
        os.truncate(segment, 0)
    else:
        segment.unlink()
    if how == "with its folder":
        (folder / "log").unlink()
        folder.rmdir()

    log.write(b"after\n")
    (newest,) = worker.segments_from(folder, at)
    assert newest.read_bytes() == b"after\n"
    assert int(newest.suffix[1:]) == at
    assert (folder / "log").read_bytes() == b"after\n"


# ---- the journal -------------------------------------------------------------------------------


@one_worker
def test_the_journal_has_only_the_keepers_own_lines(bed):
    """Others may read it."""
    (bed.project / "message").write_text("a secret of the data set")
    code, out, _ = bed.run("train", "--run", "one", args="fails=0 every=2")
    assert code == 3
    assert "a secret of the data set" in out

    journal = (bed.home(0) / "journal").read_text()
    assert "worker 0 failed with exit code 3" in journal
    assert "secret" not in journal
    assert "step" not in journal


class RecordedLog:
    """A log that only remembers what it is given."""

    def __init__(self) -> None:
        self.said: list[str | bytes] = []

    def line(self, text: str) -> None:
        self.said.append(text)

    def write(self, data: bytes) -> None:
        self.said.append(data)


def test_a_journal_that_is_gone_does_not_end_the_decisions(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", broken)
    own = keeper.Keeper.__new__(keeper.Keeper)
    own.log = RecordedLog()
    own.say("worker 0 failed")
    assert len(own.log.said) == 1
