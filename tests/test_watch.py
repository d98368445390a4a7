"""What watches a run (train/common/watch): the trace of --profile, the end of a run that hangs,
goodput's clock, what wandb itself, offline, has of a run, the card of an export."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import watched_script
from helpers import assert_refused, environment, losses, summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watched_script import STEPS

from errors import InputError
from train.common import cli, device, hooks
from train.common.embedding.memory import USABLE_GIB
from train.common.files import write_file
from train.common.run import Run
from train.common.run_folder import RunFolder
from train.common.watch import _flops, card, goodput, profile, stall, tracker

TESTS = Path(__file__).parent


def run_script(*flags: Any) -> None:
    """Trains the small script in this process, as its command line does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", "tiny", *map(str, flags)])
        cli.run(watched_script.main, watched_script.PRESETS)


def run_from(
    start: int, folder: Any = None, messages: list | None = None, devices: int = 4
) -> SimpleNamespace:
    """Returns what a watcher sees of a run on TPUs that begins after step `start` of 100."""
    mesh = SimpleNamespace(
        main_process=True,
        process_count=1,
        process_index=0,
        num_devices=devices,
        kind="TPU v3",
        compiles=False,
    )
    return SimpleNamespace(
        start=start,
        total_steps=100,
        mesh=mesh,
        path="runs/x",
        resumed=start > 0,
        folder=folder,
        message=([] if messages is None else messages).append,
    )


class Clock:
    """The time that time.monotonic and time.time return."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that a test moves; this process started five seconds ago."""
    clock = Clock()
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    monkeypatch.setattr(goodput, "_process_started", lambda: clock.now - 5)
    monkeypatch.setattr(goodput.Goodput, "counted", 0.0)
    return clock


# A run with a profile, and one without


@dataclass(frozen=True)
class Outputs:
    """What two runs of the script have printed."""

    folder: Path  # of the runs "traced" and "plain"
    traced: str
    plain: str


@pytest.fixture(scope="module")
def outputs(mesh, tmp_path_factory) -> Outputs:
    """A run whose steps 3 to 5, with a checkpoint in their middle, are traced; and one without."""
    folder = tmp_path_factory.mktemp("profile")

    def printed(*flags: str) -> str:
        device.graph_report(reset=True)
        path = folder / "output"
        with path.open("w") as file, contextlib.redirect_stdout(file):
            run_script("--runs", folder, *flags)
        return path.read_text()

    traced = printed("--name", "traced", "--profile", "3:5")
    plain = printed("--name", "plain")
    return Outputs(folder, traced, plain)


def test_a_profile_changes_no_number(outputs):
    assert "traced steps 3 to 5" in outputs.traced
    assert "traced steps 3 to 5" not in outputs.plain
    assert len(losses(outputs.folder / "plain")) == STEPS
    assert losses(outputs.folder / "plain") == losses(outputs.folder / "traced")


def test_nothing_is_traced_after_a_profile(outputs):
    assert hooks.span("upload") is hooks.span("start the program")
    assert not (outputs.folder / "plain/profile").exists()


def test_a_profile_has_steps_spans_of_the_host_and_operations(outputs):
    folder = outputs.folder / "traced/profile/plugins/profile"
    (file,) = folder.glob("*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]

    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert steps == ["3", "4", "5"]
    names = {event.get("name", "") for event in events}
    assert {"wait for a batch", "start the program", "upload", "checkpoints"} <= names
    of_program = ("dot", "fusion", "reduce", "all-reduce")
    assert [name for name in names if name.startswith(of_program)]
    assert list(file.parent.glob("*.xplane.pb"))  # which TensorBoard's plugin reads


def test_tensorboard_has_curves_losses_and_settings(outputs):
    board = EventAccumulator(str(outputs.folder / "plain/tb")).Reload()
    assert board.Tags()["images"] == ["curves"]
    assert len(board.Scalars("loss")) == STEPS
    settings = set(board.PluginTagToContent("hparams"))
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= settings


def test_goodput_counts_the_operations_of_the_model(outputs):
    found = summary(outputs.folder / "plain")["goodput"]
    seconds = found["seconds"]["steps"] + found["seconds"]["input_wait"]
    operations = found["model_flops_per_second"] * seconds
    per_step = 2 * (2 * 8 * 4)  # forward, and gradients
    assert operations == pytest.approx(STEPS * per_step, rel=0.05)
    assert found["mfu"] is None


@pytest.mark.parametrize("torn", [False, True])
def test_a_profile_of_calls_of_four_steps(torn, mesh, tmp_path):
    (tmp_path / "profile").mkdir()
    if torn:  # what torch leaves on a full disk
        (tmp_path / f"profile/vm_{os.getpid()}.1.pt.trace.json.tmp").write_text("{")

    messages = []
    run = run_from(8, SimpleNamespace(local=tmp_path), messages)
    with profile.Profile(run, 18, 19) as watch:
        for step in (12, 16, 20, 24):
            watch.step(step)

    expected = "traced steps 17 to 20 to"
    if torn:
        expected = "the trace of steps 17 to 20 could not be written"
    assert len(messages) == 1
    assert expected in messages[0]
    assert not list((tmp_path / "profile").glob("*.tmp"))


# Runs that hang


def running_in_group(group: int) -> list[str]:
    """Returns the processes of a group that have not ended, each with its state."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(f"{path} {state}")
    return found


def wait_for_group(group: int) -> None:
    """Waits until all processes of a group have ended: ten seconds for each that runs now."""
    for _ in range(100 * len(running_in_group(group))):
        time.sleep(0.1)
        if not running_in_group(group):
            break
    assert not running_in_group(group)


# Watched by a clock that runs 100 times as fast: a busy machine lets a step wait for a second.
HURRIED = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}]
import watched_script
from train.common import cli
from train.common.watch import stall
stall.LEAST, stall.ELSEWHERE, stall.LINGER = 3.0, 12.0, 2.0
cli.run(watched_script.main, watched_script.PRESETS)
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended, with all of its children."""

    code: int
    output: str
    errors: str


class Hurried:
    """Runs of the script under a watchdog that is in a hurry.

    A pipe that is full, and that nobody reads, may take the place of the file of errors.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, *flags: str, errors_are_read: bool = True) -> Ended:
        command = [sys.executable, "-c", HURRIED, "tiny", "--device", "cpu"]
        command += ["--runs", str(self.folder), "--workers", "1", *flags]
        output = self.folder / "out"
        errors = self.folder / "err"
        read_end, full_pipe = os.pipe()
        fcntl.fcntl(full_pipe, fcntl.F_SETPIPE_SZ, 4096)
        os.write(full_pipe, bytes(4096))

        with output.open("w") as output_file, errors.open("w") as errors_file:
            log = errors_file if errors_are_read else full_pipe
            process = subprocess.Popen(command, stdout=output_file, stderr=log, process_group=0)
            try:
                code = process.wait(timeout=120)
                # multiprocessing's resource tracker waits for the pipe, too.
                os.close(read_end)
                os.close(full_pipe)
                wait_for_group(process.pid)  # the loader's worker ends, too
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return Ended(code, output.read_text(), errors.read_text())

    def stacks(self) -> str:
        """Returns the stacks that the watchdog has written."""
        return (self.folder / "run/stacks/host-0.txt").read_text()


@pytest.fixture
def hurried(tmp_path, monkeypatch) -> Hurried:
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    return Hurried(tmp_path)


def assert_names_the_stall(stacks: str, function: str) -> None:
    """Asserts that the stacks say where the script hangs, and what has ended it."""
    assert "watched_script.py" in stacks
    assert f"in {function}" in stacks
    assert "error: no progress for" in stacks
    assert "--stall-after 20" in stacks
    assert "thread MainThread" in stacks


@pytest.mark.slow
def test_a_loader_that_hangs_ends_a_run_whose_log_is_stuck(hurried):
    ended = hurried.start("--hang", "loader", errors_are_read=False)
    assert ended.code == 75, ended.errors
    assert_names_the_stall(hurried.stacks(), "__next__")


def test_a_step_that_hangs_ends_a_run_which_then_resumes(hurried):
    ended = hurried.start("--hang", "step")
    assert ended.code == 75, ended.errors
    assert_names_the_stall(hurried.stacks(), "main")
    assert ended.errors.startswith(hurried.stacks())

    resumed = hurried.start("--profile", "11:12")
    assert resumed.code == 0, resumed.errors
    assert "resuming after step" in resumed.output, resumed.errors
    run = hurried.folder / "run"
    assert summary(run)["goodput"]["starts"] == 2
    (file,) = (run / "profile").glob("*.pt.trace.json")
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"train 11", "train 12", "wait for a batch", "aten::addmm"} <= names


@pytest.mark.slow
def test_a_step_that_keeps_pythons_lock_ends_a_run(hurried):
    ended = hurried.start("--hang", "lock")
    assert ended.code == 1, ended.errors
    assert "watched_script.py" in ended.errors
    assert "in main" in ended.errors


class Watchdog:
    """A watchdog on a clock that the test moves; its run has steps of 30 seconds."""

    def __init__(self, clock: Clock, monkeypatch):
        self.stall = stall.Stall(run_from(0), times=20.0)
        self._clock = clock
        self._ended = []
        monkeypatch.setattr(self.stall, "_end", self._ended.append)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._clock.now += 30
            self.stall.step(step)

    def ends_after(self, seconds: float) -> bool:
        """Returns whether so long a silence, from now on, ends the run."""
        self.stall._seen_at = self._clock.now
        self._clock.now += seconds
        self.stall._look()
        ended = bool(self._ended)
        self._ended.clear()
        return ended


@pytest.fixture
def watchdog(clock, monkeypatch) -> Watchdog:
    monkeypatch.setattr(device, "compiling_since", lambda: None)
    return Watchdog(clock, monkeypatch)


def test_the_first_batch_and_compilation_have_an_hour(watchdog):
    assert not watchdog.ends_after(3599)
    assert watchdog.ends_after(3601)


def test_a_step_has_twenty_times_the_usual_time(watchdog):
    watchdog.train(1, 7)
    assert watchdog.stall.limit() == 600
    assert not watchdog.ends_after(599)
    assert watchdog.ends_after(601)


def test_an_evaluation_has_an_hour_of_silence(watchdog):
    watchdog.train(1, 7)
    watchdog.stall.pause("evaluation")
    assert not watchdog.ends_after(3599)
    assert watchdog.ends_after(3601)


def test_a_pause_does_not_count_as_a_step(watchdog, clock):
    watchdog.train(1, 7)
    for step in range(8, 40):
        watchdog.stall.pause("checkpoints")
        clock.now += 3000
        watchdog.stall.resume()
        watchdog.train(step, step)
    assert watchdog.stall.limit() == 600


def test_a_call_of_a_compiled_step_is_progress(watchdog, monkeypatch):
    watchdog.train(1, 7)
    # Another batch of an evaluation.
    monkeypatch.setattr(device, "graph_report", lambda: {"traced": 1, "repeated": 5})
    assert not watchdog.ends_after(601)
    assert watchdog.ends_after(601)


def test_a_compilation_has_no_limit(watchdog, clock, monkeypatch):
    watchdog.train(1, 7)
    since = clock.now
    monkeypatch.setattr(device, "compiling_since", lambda: since)
    assert not watchdog.ends_after(10_000)


def test_the_export_has_an_hour(watchdog):
    watchdog.train(1, 7)
    watchdog.stall.step(100)
    assert watchdog.stall.limit() == 3600


def test_an_evaluation_on_plain_pytorch_has_a_day(clock, monkeypatch):
    monkeypatch.setattr(device, "graph_report", lambda: {})  # nobody counts its batches
    watchdog = stall.Stall(run_from(0), times=20.0)
    watchdog.pause("evaluation")
    assert watchdog.limit() == 86400


# Stops itself under a watchdog, and ends when it is continued.
STOPPED = """import os, signal, sys, time
from types import SimpleNamespace
from train.common import device
from train.common.watch import stall
device.choose_backend("cpu")
stall.LEAST = stall.ELSEWHERE = 0.8
mesh = SimpleNamespace(process_index=0, process_count=1)
run = SimpleNamespace(total_steps=9, path="/dev/null", mesh=mesh)
with stall.Stall(run, 1.0):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("number", "seconds"),
    [("SIGTSTP", 2.0), pytest.param("SIGSTOP", 1.0, marks=pytest.mark.slow)],
)
def test_a_stopped_process_has_not_stalled(number, seconds):
    command = [sys.executable, "-c", STOPPED, number]
    with subprocess.Popen(command, cwd=TESTS.parent, stderr=-1, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0, process.stderr.read()


def test_a_full_disk_costs_a_run_picture_and_clock_only(tmp_path, monkeypatch, capsys):
    write = RunFolder.write

    def write_some(folder: RunFolder, name: str, content: bytes) -> None:
        with folder.writing(name):
            if name in ("curves.png", goodput.FILE):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, name, content)

    monkeypatch.setattr(RunFolder, "write", write_some)
    run_script("--runs", tmp_path)

    assert summary(tmp_path / "run")["goodput"]["starts"] == 1
    warning = r"warning: .*cannot write .*/(curves.png|goodput.json): No space left"
    assert set(re.findall(warning, capsys.readouterr().out)) == {"curves.png", "goodput.json"}


def test_a_compiled_step_says_while_it_compiles(mesh, monkeypatch):
    compiling = []
    before = time.monotonic()

    def note_compiling() -> None:
        """Asks from another thread, as the watchdog does."""
        with ThreadPoolExecutor() as other:
            since = other.submit(device.compiling_since).result()
        assert since is None or before <= since <= time.monotonic()
        compiling.append(since is not None)

    def step(x):
        note_compiling()
        return x + 1

    compiled = device.compiled(step, mesh)
    compiled._check_every = 2
    sync = compiled._sync_pending  # it may wait for a device that hangs

    def sync_and_note() -> None:
        sync()
        note_compiling()

    monkeypatch.setattr(compiled, "_sync_pending", sync_and_note)
    for _ in range(4):
        compiled(torch.ones(4).to(mesh.device))
    # Traced, confirmed, started, looked at again.
    assert compiling == [False, True, False, True, False, False, False]
    assert device.compiling_since() is None


def test_a_step_that_fails_is_not_compiling_any_more(mesh):
    def step(x):
        raise ValueError("of a step")

    with pytest.raises(ValueError, match="of a step"):
        device.compiled(step, mesh)(torch.ones(4).to(mesh.device))
    assert device.compiling_since() is None


# Goodput


def peak_of_eight(kind: str) -> float | None:
    return _flops.peak(SimpleNamespace(kind=kind, num_devices=8))


def test_every_generation_has_a_peak():
    assert peak_of_eight("CPU") is None
    assert peak_of_eight("TPU v5 lite") == 8 * 197e12
    assert all(peak_of_eight(kind) for kind in USABLE_GIB)


class Folder:
    """Holds the files of a run in memory."""

    remote = False

    def __init__(self):
        self.files = {}
        self.read = self.files.get
        self.write = self.files.__setitem__


def test_goodput_counts_every_second_once_over_all_starts(clock, monkeypatch):
    folder = Folder()
    messages = []
    report = {"compile_seconds": 0.0}
    monkeypatch.setattr(device, "graph_report", lambda: report)

    def spend(seconds: float, watch: goodput.Goodput, step: int, compiling: float = 0.0) -> None:
        """Takes a step of so many seconds, after two of waiting for its batch."""
        clock.now += 2
        watch.waited(2)
        clock.now += seconds
        report["compile_seconds"] += compiling
        watch.step(step)

    # The first start saves step 2, and is killed after step 5.
    with goodput.Goodput(run_from(0, folder), 3.6) as first:
        spend(48, first, 1, compiling=30)
        first.pause("checkpoints")
        clock.now += 3
        first.resume()
        spend(8, first, 2)
        spend(58, first, 5)  # over a minute since the last note
        clock.now += 40
        first._note = lambda: None  # killed
    clock.now += 100  # nobody trained

    # The second one resumes after step 2, on twice the devices.
    with goodput.Goodput(run_from(2, folder, messages, devices=8), 3.6) as second:
        for step in (3, 99, 100):
            spend(10, second, step)
        second.pause("evaluation")
        clock.now += 4
        second.resume()
        clock.now += 1
        found = second.summary()["goodput"]
        assert json.loads(folder.files[goodput.FILE])[-1]["seconds"]["end"] == 1
    # The next run in this process counts from here on.
    assert goodput.Goodput(run_from(0), 0.0)._read_at == clock.now

    first_steps = 18 + 8 + 58
    first_waits = 6
    lost = 3 / 5  # steps 3 to 5 of 1 to 5
    expected = {
        "steps": first_steps * (1 - lost) + 30,
        "input_wait": first_waits * (1 - lost) + 6,
        "start": 10,
        "compile": 30,
        "checkpoints": 3,
        "evaluation": 4,
        "end": 1,
        "lost": lost * (first_steps + first_waits),
    }
    first_seconds = 5 + 50 + 3 + 10 + 60
    second_seconds = 5 + 36 + 4 + 1
    all_seconds = first_seconds + second_seconds
    chip_seconds = 2 * first_seconds + 4 * second_seconds  # two cores a chip
    assert found["seconds"] == pytest.approx(expected)
    assert found["share"] == pytest.approx(expected["steps"] / all_seconds)
    assert found["starts"] == 2
    assert found["between_starts"] == 40 + 100 - 5  # since the last note
    assert found["chips"] == 4
    assert found["cost"] == pytest.approx(chip_seconds / 3600 * 3.6)
    message = r"goodput \d+ % .* of 174 s in 2 start\(s\)\): steps .* chip-hours at 3.6: 0.44"
    assert re.search(message, messages[-1])


def test_a_finished_remote_run_is_noted_before_its_upload(clock):
    """Then its local folder is gone."""
    folder = Folder()
    folder.remote = True
    run = run_from(0, folder)
    run.finished = False
    with goodput.Goodput(run, 0.0) as watch:
        clock.now += 5
        watch.summary()
        noted = dict(folder.files)
        run.finished = True
        folder.write = None

    assert json.loads(noted[goodput.FILE])[0]["seconds"]["steps"] == 5


def test_a_damaged_goodput_file_is_a_warning(clock):
    folder = Folder()
    folder.files[goodput.FILE] = b'[{"from": 0, "to": 1, "seconds": {"steps": "1"}}]'
    messages = []
    assert goodput.Goodput(run_from(2, folder, messages), 0.0)._starts == []
    assert "is damaged" in messages[-1]


# Flags


@pytest.mark.parametrize(
    ("flag", "pattern"),
    [
        ("--profile 5", "--profile is 5; it must be two steps such as 20:25"),
        ("--profile 5:3", "--profile is 5:3; "),
        ("--profile 1:999", "--profile is 1:999; .*at most 100 steps"),
        ("--profile 5:13", "--profile is 5:13, but the run has 12 steps"),
        ("--stall-after 0.5", "--stall-after is 0.5; it must be at least 1, or 0"),
        ("--stall-after nan", "--stall-after is nan; "),
        ("--price -1", "--price is -1.0; it must be at least 0"),
        ("--price nan", "--price is nan; "),
    ],
)
def test_refusals(flag, pattern, tmp_path, capsys):
    assert_refused(f"tiny --runs {tmp_path} {flag}", pattern, watched_script, capsys)


# Trackers

# Trains the named runs one after the other. The second is killed in step 7 of its first start.
TWO_RUNS = """
import glob, os, signal, sys, time
sys.path[:0] = [{tests!r}]
import watched_script
from train.common import cli
from train.common.run import Run
log = Run.log
def log_and_stop(run, step, **values):
    log(run, step, **values)
    if (run.name, run.start, step) == ("two", 0, 7):
        while not glob.glob(f"{{run.path}}/wandb/*/run-*.wandb"):  # another thread writes it
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
Run.log = log_and_stop
words = sys.argv[1:]
for name in {names!r}:
    sys.argv[1:] = [*words, "--name", name]
    cli.run(watched_script.main, watched_script.PRESETS)
"""


class Sent:
    """What wandb has written of a start, to send it later."""

    def __init__(self, file: Path):
        from wandb.proto.wandb_internal_pb2 import Record
        from wandb.sdk.internal.datastore import DataStore

        self.config = {}
        self.lines = []
        self.summary = {}
        store = DataStore()
        store.open_for_scan(str(file))
        while True:
            data = store.scan_data()
            if not data:
                break
            self._add(Record.FromString(data))

    def _add(self, record) -> None:
        for item in record.run.config.update:
            self.config[item.key] = json.loads(item.value_json)
        line = self._values(record.history.item)
        if line:
            self.lines.append(line)
        self.summary |= self._values(record.summary.update)

    @staticmethod
    def _values(items) -> dict[str, Any]:
        """Returns the values by name; a nested name's parts are joined by a slash."""
        values = {}
        for item in items:
            name = "/".join(item.nested_key) or item.key
            values[name] = json.loads(item.value_json)
        return values

    def training_lines(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]


@dataclass(frozen=True)
class Starts:
    """All starts of a run with --tracker wandb."""

    ids: list[str]  # of wandb's runs
    last: Sent


@dataclass(frozen=True)
class Tracked:
    """Two runs, of which the second was killed and started again."""

    folder: Path
    one: Starts
    two: Starts


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Tracked:
    pytest.importorskip("wandb", reason="needs requirements-wandb.txt")
    folder = tmp_path_factory.mktemp("wandb")
    flags = ["--device", "cpu", "--runs", str(folder), "--tracker", "wandb"]

    def train(names: list[str]) -> subprocess.CompletedProcess:
        program = TWO_RUNS.format(tests=str(TESTS), names=names)
        return subprocess.run(
            [sys.executable, "-c", program, "tiny", *flags],
            env=environment(1, WANDB_MODE="offline", WANDB_DIR=""),
            capture_output=True,
            text=True,
            timeout=200,
        )

    killed = train(["one", "two"])
    assert killed.returncode == -9, killed.stderr
    resumed = train(["two"])
    assert resumed.returncode == 0, resumed.stderr

    def starts(name: str) -> Starts:
        files = sorted((folder / name).glob("wandb/offline-run-*/run-*.wandb"))
        ids = [file.stem.removeprefix("run-") for file in files]
        return Starts(ids, Sent(files[-1]))

    return Tracked(folder, starts("one"), starts("two"))


def test_a_killed_run_continues_as_the_same_in_wandb(tracked):
    stored = json.loads((tracked.folder / "two/wandb.json").read_text())
    assert tracked.two.ids == [stored["id"], stored["id"]]
    assert tracked.one.ids != [stored["id"]]


def test_wandb_has_a_runs_settings(tracked):
    config = tracked.two.last.config
    assert config["workers"] == 0
    assert config["devices"] == 1


def test_wandb_has_a_runs_losses(tracked):
    of_one = [line["loss"] for line in tracked.one.last.training_lines()]
    assert of_one == losses(tracked.folder / "one")

    resumed = tracked.two.last.training_lines()
    assert [line["step"] for line in resumed] == list(range(5, 13))
    assert [line["loss"] for line in resumed] == losses(tracked.folder / "two")[4:]
    assert "timing/training" in resumed[-1]


def test_wandb_has_a_runs_curves_and_summary(tracked):
    last_line = tracked.one.last.lines[-1]
    assert last_line["curves/_type"] == "image-file"
    assert last_line["curves/width"] == 1000
    elapsed = summary(tracked.folder / "one")["elapsed_seconds"]
    assert tracked.one.last.summary["elapsed_seconds"] == elapsed


def wandb_that_fails(broken: str) -> MagicMock:
    """Returns a wandb of which one function raises, "finish" not before the event `ended`."""
    fake = MagicMock(Error=ValueError, ended=threading.Event())
    fake.setup().settings.mode = "online"
    fake.api.api_key = broken != "login"

    def fail(*_, **__):
        if broken == "finish":
            fake.ended.wait()
        raise ValueError(f"{broken}\nfails")

    functions = {
        "login": fake.login,
        "init": fake.init,
        "log": fake.init().log,
        "finish": fake.init().finish,
    }
    if broken in functions:
        functions[broken].side_effect = fail
    return fake


@pytest.mark.parametrize(
    "broken, reason",
    [
        ("init", "init fails"),
        ("log", "log fails"),
        ("finish", "it has not ended"),
        ("disk", "cannot write "),
    ],
)
def test_a_tracker_that_fails_is_one_warning(broken, reason, tmp_path, monkeypatch, capsys):
    fake = wandb_that_fails(broken)
    monkeypatch.setattr(tracker, "LAST", -4.9)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if broken == "disk":
        (tmp_path / "run" / f"{tracker.FILE}.writing").mkdir(parents=True)

    run_script("--runs", tmp_path, "--tracker", "wandb")
    fake.ended.set()

    output = capsys.readouterr().out
    warnings = [line for line in output.splitlines() if "warning" in line]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith(f"warning: --tracker wandb: {reason}"), warnings
    assert len(losses(tmp_path / "run")) == STEPS
    assert summary(tmp_path / "run")["steps"]


@pytest.mark.parametrize(
    "module, pattern",
    [
        (
            SimpleNamespace(),
            "--tracker is wandb, but .*pip install -r requirements-wandb.txt",
        ),
        (
            wandb_that_fails("login"),
            "--tracker wandb cannot log in .*export WANDB_API_KEY, or set WANDB_MODE=offline",
        ),
    ],
    ids=["missing", "without a key"],
)
def test_a_tracker_that_cannot_be_used_is_refused(module, pattern, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert_refused(f"tiny --runs {tmp_path} --tracker wandb", pattern, watched_script, capsys)


# The card of an export

FIELDS = {
    "data": "nyu-mll/glue",
    "task": "mrpc",
    "checkpoint": "google-bert/bert-base-uncased",
    "runs": "",
    "name": "",
}
Exported = make_dataclass("Exported", [(name, str, value) for name, value in FIELDS.items()])
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


def finish_with_card(place: str, mesh, model: dict) -> Run:
    """Finishes a run that has exported a model, and writes its card."""
    config = Exported(runs=place, name="exported")
    run = Run(config, mesh, name="run", headline="a step", total_steps=1)
    write_file(f"{run.path}/export/config.json", json.dumps(model).encode())
    run.log(1, loss=0.5)
    run.watchers = [card.Card(run)]
    run.finish({"accuracy": 0.123456789, "f1": float("nan")})
    return run


def exported_files(run: Run) -> list[str]:
    paths = run.folder.fs.ls(f"{run.path}/export", detail=False)
    return sorted(os.path.basename(path) for path in paths)


def test_an_export_has_a_card(place, mesh):
    from huggingface_hub import ModelCard

    run = finish_with_card(place, mesh, BERT)

    assert exported_files(run) == ["README.md", "config.json", "curves.png"]
    page = ModelCard(run.folder.read("export/README.md").decode())
    assert page.data.datasets == ["nyu-mll/glue"]
    assert page.data.base_model == FIELDS["checkpoint"]
    (result,) = page.data.eval_results
    assert result.metric_type == "accuracy"
    assert result.metric_value == 0.123456789
    assert page.data.pipeline_tag == "text-classification"
    assert page.data.license is None
    assert "## License" in page.text
    words = ["(curves.png)", "| torch | 2.9.0 |", "| `--task` | `mrpc` |", "| f1 | None |"]
    for word in (*words, sys.orig_argv[0]):
        assert word in page.text, page.text


def test_an_export_of_another_format_has_no_card(place, mesh):
    run = finish_with_card(place, mesh, {})
    assert exported_files(run) == ["config.json"]


def test_a_card_on_a_full_disk_is_a_warning(place, mesh, monkeypatch, capsys):
    full = InputError("cannot write README.md: No space left on device; make room")
    monkeypatch.setattr(card, "write_file", Mock(side_effect=full))

    run = finish_with_card(place, mesh, BERT)

    assert exported_files(run) == ["config.json"]
    assert run.finished
    warning = "warning: no model card: cannot write README.md: No space"
    assert warning in capsys.readouterr().out


# make board


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def text_of_page(address: str) -> str:
    """Returns what a browser shows of a page, in lower case."""
    browser = ["chromium", "--headless=new", "--no-sandbox", "--virtual-time-budget=30000"]
    command = [*browser, "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return page.stdout.lower()


@pytest.mark.slow
def test_make_board_shows_all_runs(tmp_path):
    """Their numbers, pictures and settings; in a browser, too, where there is one: apt-get install
    chromium."""
    run_script("--runs", tmp_path / "runs", "--name", "one", "--workers", "0")
    run_script("--runs", tmp_path / "runs", "--name", "two", "--workers", "1")
    port = free_port()
    address = f"http://localhost:{port}"

    def ask(what: str):
        with urllib.request.urlopen(f"{address}/data/{what}") as answer:
            return json.load(answer)

    make = ["make", "board", f"RUNS={tmp_path}/runs", f"PORT={port}"]
    with subprocess.Popen(make, cwd=TESTS.parent, process_group=0) as board:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    if len(ask("runs")) == 2:
                        break
                time.sleep(0.5)
            assert ask("runs") == ["one/tb", "two/tb"]
            plugins = ask("plugins_listing")
            shown = None
            if shutil.which("chromium"):
                shown = text_of_page(f"{address}/#timeseries")
        finally:
            os.killpg(board.pid, signal.SIGTERM)

    for name in ("scalars", "images", "hparams"):
        assert plugins[name]["enabled"]
    if shown is not None:
        for word in ("one/tb", "two/tb", "hparams"):
            assert word in shown
