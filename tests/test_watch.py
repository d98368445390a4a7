"""What watches a run (train/common/watch): the trace of --profile, the end of a run that hangs, goodput's clock, what
wandb itself, offline, has of a run, the card of an export."""

import contextlib
import ctypes
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
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from helpers import assert_refused, environment, losses, summary, update
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from errors import InputError
from train.common import cli, device, hooks
from train.common.embedding.memory import USABLE_GIB
from train.common.files import write_file
from train.common.loading import parallel_loader
from train.common.run import Run
from train.common.run_folder import RunFolder
from train.common.watch import _flops, card, goodput, profile, stall, tracker

STEPS = 12


@dataclass(frozen=True)
class Config:
    """Of a script that is small, the one below."""

    data: str = "synthetic"
    device: str = "xla"
    hang: str = ""  # for ever: "loader", "step", or "lock" for a step that keeps Python's lock
    workers: int = 0
    runs: str = "runs"
    name: str = "run"


PRESETS = {"tiny": ("small", Config()), "other": ("the same", Config())}
THIS = sys.modules[__name__]


class Numbers:
    def __init__(self, hang: str):
        self.hang = hang

    def __len__(self) -> int:
        return 8 * STEPS

    def example(self, index: int, rng: np.random.Generator) -> dict:
        if self.hang == "loader" and index == 31:  # of the tenth batch
            time.sleep(3600)
        return {"x": rng.random(4, dtype=np.float32)}


def train_step(model, optimizer, batch):
    return {"loss": update(model(batch["x"]).square().mean(), optimizer)}


def main(config: Config) -> None:
    mesh = device.setup(0, "float32", True, config.device)
    run = Run(config, mesh, name="run", headline="numbers", total_steps=STEPS, free=("hang",))
    model = device.to_device(nn.Linear(4, 1), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    start = run.resume(model, optimizer, examples=8 * STEPS, keep=2)
    numbers, step_fn = Numbers(config.hang), device.compiled(train_step, mesh)
    loader = parallel_loader(numbers, 8, mesh, train=True, start=start, stop=STEPS, workers=config.workers)
    with run.training(loader):
        for step, batch in enumerate(loader, start + 1):
            metrics = step_fn(model, optimizer, batch)
            if step == 9 and config.hang in ("step", "lock"):
                time.sleep(1 if config.hang == "lock" else 3600)  # the watchdog learns that steps are short
                ctypes.PyDLL(None).sleep(3600)
            run.log(step, **metrics)
            run.checkpoint(step, due=step % 4 == 0)
        with run.pause():
            time.sleep(0.01)
        run.finish({})


def test_a_profile_has_the_steps_the_hosts_part_and_the_programs_operations(tmp_path, monkeypatch, capsys):
    """Also with a checkpoint in its middle; and it changes no number."""
    for name in ("traced", "plain"):
        flags = ["--profile", "3:5"] if name == "traced" else []
        monkeypatch.setattr(sys, "argv", ["script.py", "tiny", "--runs", str(tmp_path), "--name", name, *flags])
        cli.run(main, PRESETS)
        assert ("traced steps 3 to 5" in capsys.readouterr().out) == bool(flags)
    assert len(losses(tmp_path / "plain")) == STEPS and losses(tmp_path / "plain") == losses(tmp_path / "traced")
    assert hooks.span("upload") is hooks.span("start the program") and not (tmp_path / "plain/profile").exists()
    (file,) = (tmp_path / "traced/profile/plugins/profile").glob("*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert [event["args"]["step_num"] for event in events if event.get("name") == "train"] == ["3", "4", "5"]
    names = {event.get("name", "") for event in events}
    assert {"wait for a batch", "start the program", "upload", "checkpoints"} <= names
    assert [name for name in names if name.startswith(("dot", "fusion", "reduce", "all-reduce"))]  # of the program
    assert list(file.parent.glob("*.xplane.pb"))  # which TensorBoard's plugin reads
    board = EventAccumulator(str(tmp_path / "plain/tb")).Reload()
    assert board.Tags()["images"] == ["curves"] and len(board.Scalars("loss")) == STEPS
    clock = (found := summary(tmp_path / "plain")["goodput"])["seconds"]
    flops = found["model_flops_per_second"] * (clock["steps"] + clock["input_wait"])
    assert flops == pytest.approx(STEPS * 2 * (2 * 8 * 4), rel=0.05) and found["mfu"] is None  # forward, and gradients
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(board.PluginTagToContent("hparams"))


@pytest.mark.parametrize("torn", [False, True])
def test_a_profile_of_calls_of_four_steps(torn, mesh, tmp_path):
    (tmp_path / "profile").mkdir()
    if torn:  # what torch leaves on a full disk
        (tmp_path / f"profile/vm_{os.getpid()}.1.pt.trace.json.tmp").write_text("{")
    run = run_from(8, SimpleNamespace(local=tmp_path), messages := [])
    with profile.Profile(run, 18, 19) as watch:
        for step in (12, 16, 20, 24):
            watch.step(step)
    expected = "the trace of steps 17 to 20 could not be written" if torn else "traced steps 17 to 20 to"
    assert len(messages) == 1 and expected in messages[0] and not list((tmp_path / "profile").glob("*.tmp"))


def of_group(group: int) -> list[str]:
    """Returns the processes of a group that are not over, each with its state."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [f"{path} {state}"] if int(process_group) == group and state not in "ZX" else []
    return found


# Watched by a clock that runs 100 times as fast: a busy machine lets a step wait for a second.
HURRIED = """
import sys
sys.path[:0] = [{tests!r}]
import test_watch
from train.common import cli
from train.common.watch import stall
stall.LEAST, stall.ELSEWHERE, stall.LINGER = 3.0, 12.0, 2.0
cli.run(test_watch.main, test_watch.PRESETS)
"""


@pytest.mark.parametrize(("hang", "line"), [("loader", "__next__"), ("step", "main"), ("lock", "main")])
def test_a_run_that_hangs_ends_with_its_stacks_and_resumes(hang, line, tmp_path, monkeypatch):
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    program = [sys.executable, "-c", HURRIED.format(tests=str(Path(__file__).parent)), "tiny", "--device", "cpu"]

    def start(*flags: str) -> tuple[int, str, str]:
        words = [*program, "--runs", str(tmp_path), "--workers", "1", *flags]
        with open(tmp_path / "out", "w+") as out, open(tmp_path / "err", "w+") as err:
            end, pipe = os.pipe()  # full, and nobody reads it
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
            os.write(pipe, bytes(4096))
            log = pipe if hang == "loader" else err
            process = subprocess.Popen(words, stdout=out, stderr=log, process_group=0)
            try:
                code = process.wait(timeout=120)
                for each in (end, pipe):  # multiprocessing's tracker waits for it, too
                    os.close(each)
                for _ in range(100 * len(of_group(process.pid))):  # the loader's, too, end
                    time.sleep(0.1)
                    if not of_group(process.pid):
                        break
                assert not of_group(process.pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            return code, *(Path(file.name).read_text() for file in (out, err))

    found, _, err = start("--hang", hang)
    assert found == (1 if hang == "lock" else 75), err
    stacks = err if hang == "lock" else (tmp_path / "run/stacks/host-0.txt").read_text()
    assert "test_watch.py" in stacks and f"in {line}" in stacks
    if hang != "lock":
        assert "error: no progress for" in stacks and "--stall-after 20" in stacks and "thread MainThread" in stacks
        assert hang == "loader" or err.startswith(stacks)
    if hang != "step":
        return
    found, out, err = start("--profile", "11:12")
    assert found == 0 and "resuming after step" in out, err
    assert summary(tmp_path / "run")["goodput"]["starts"] == 2
    (file,) = (tmp_path / "run/profile").glob("*.pt.trace.json")
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"train 11", "train 12", "wait for a batch", "aten::addmm"} <= names


@pytest.fixture
def clock(monkeypatch):
    """The time, in clock[0]."""
    now = [1000.0]
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: now[0])
    monkeypatch.setattr(goodput, "_process_started", lambda: now[0] - 5)
    monkeypatch.setattr(goodput.Goodput, "counted", 0.0)
    return now


class Folder:
    """Holds the files of a run in memory."""

    def __init__(self):
        self.files = {}
        self.read, self.write = self.files.get, self.files.__setitem__


def run_from(start: int, folder: Folder | None = None, messages: list | None = None, devices=4) -> SimpleNamespace:
    mesh = SimpleNamespace(main_process=True, process_count=1, process_index=0, kind="TPU v3", compiles=False)
    mesh.num_devices = devices
    mesh.compiles = False
    run = SimpleNamespace(start=start, total_steps=100, mesh=mesh, path="runs/x", resumed=start > 0, folder=folder)
    run.message = (messages if messages is not None else []).append
    return run


def test_the_watchdog_waits_as_long_as_a_slow_run_needs(clock, monkeypatch):
    ended, compiling = [], [None]
    monkeypatch.setattr(device, "compiling_since", lambda: compiling[0])
    dog = stall.Stall(run_from(0), times=20.0)
    monkeypatch.setattr(dog, "_end", ended.append)

    def silent(seconds: float) -> bool:
        """Tells whether so long a silence, from now on, ends the run."""
        dog._seen_at, clock[0] = clock[0], clock[0] + seconds
        dog._look()
        found = bool(ended)
        ended.clear()
        return found

    assert not silent(3599) and silent(3601)  # the first batch, the first compilation
    for number in range(1, 8):
        clock[0] += 30
        dog.step(number)
    assert dog.limit() == 600 and not silent(599) and silent(601)
    dog.pause("evaluation")
    assert not silent(3599) and silent(3601)
    for number in range(8, 40):
        dog.pause("checkpoints")
        clock[0] += 3000
        dog.resume()
        clock[0] += 30
        dog.step(number)
    assert dog.limit() == 600  # a pause is no step
    monkeypatch.setattr(device, "graph_report", lambda: {"traced": 1, "repeated": 5})  # another batch of an evaluation
    assert not silent(601) and silent(601)
    compiling[0] = clock[0]
    assert not silent(10_000)
    dog.step(100)
    assert dog.limit() == 3600  # the export
    monkeypatch.setattr(device, "graph_report", lambda: {})
    plain = stall.Stall(run_from(0), times=20.0)
    plain.pause("evaluation")
    assert plain.limit() == 86400


STOPPED = """import os, signal, sys, time
from types import SimpleNamespace
from train.common import device
from train.common.watch import stall
device.choose_backend("cpu")
stall.LEAST = stall.ELSEWHERE = 0.8
run = SimpleNamespace(total_steps=9, path="/dev/null", mesh=SimpleNamespace(process_index=0, process_count=1))
with stall.Stall(run, 1.0):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0.2)
"""


@pytest.mark.parametrize(("number", "seconds"), [("SIGSTOP", 1.0), ("SIGTSTP", 2.0)])
def test_a_stopped_process_has_not_stalled(number, seconds):
    command = [sys.executable, "-c", STOPPED, number]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=-1, text=True) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0, process.stderr.read()


def test_a_full_disk_costs_the_picture_and_the_clock_but_no_run(tmp_path, monkeypatch, capsys):
    def full(folder: RunFolder, name: str, content: bytes, write=RunFolder.write) -> None:
        with folder.writing(name):
            if name in ("curves.png", goodput.FILE):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, name, content)

    monkeypatch.setattr(RunFolder, "write", full)
    monkeypatch.setattr(sys, "argv", ["test", "tiny", "--runs", str(tmp_path)])
    cli.run(main, PRESETS)
    assert summary(tmp_path / "run")["goodput"]["starts"] == 1
    warned = re.findall(r"warning: .*cannot write .*/(curves.png|goodput.json): No space left", capsys.readouterr().out)
    assert set(warned) == {"curves.png", "goodput.json"}


def test_a_compiled_step_says_while_it_compiles(mesh, monkeypatch):
    found = []
    before = time.monotonic()

    def note_compiling() -> None:
        """Asks from another thread, as the watchdog does."""
        with ThreadPoolExecutor() as other:
            since = other.submit(device.compiling_since).result()
        assert since is None or before <= since <= time.monotonic()
        found.append(since is not None)

    def step(x):
        note_compiling()
        return x + 1

    compiled = device.compiled(step, mesh)
    compiled._check_every = 2
    sync = compiled._sync_pending  # it may wait for a device that hangs
    monkeypatch.setattr(compiled, "_sync_pending", lambda: (sync(), note_compiling()))
    for _ in range(4):
        compiled(torch.ones(4).to(mesh.device))
    assert found == [False, True, False, True, False, False, False]  # traced, confirmed, started, looked at again
    assert device.compiling_since() is None

    def fails(x):
        raise ValueError("of a step")

    with pytest.raises(ValueError, match="of a step"):
        device.compiled(fails, mesh)(torch.ones(4).to(mesh.device))
    assert device.compiling_since() is None


def test_every_generation_has_a_peak():
    kinds = {kind: _flops.peak(SimpleNamespace(kind=kind, num_devices=8)) for kind in [*USABLE_GIB, "CPU"]}
    assert kinds.pop("CPU") is None and kinds["TPU v5 lite"] == 8 * 197e12 and all(kinds.values())


def test_goodput_counts_every_second_once_over_all_starts(clock, monkeypatch):
    folder, report, messages = Folder(), {"compile_seconds": 0.0}, []
    monkeypatch.setattr(device, "graph_report", lambda: report)

    def spend(seconds: float, watch: goodput.Goodput, step: int, compiling: float = 0.0) -> None:
        clock[0] += 2
        watch.waited(2)  # for a batch
        clock[0] += seconds
        report["compile_seconds"] += compiling
        watch.step(step)

    with goodput.Goodput(run_from(0, folder), 3.6) as first:
        spend(48, first, 1, compiling=30)
        first.pause("checkpoints")
        clock[0] += 3
        first.resume()
        spend(8, first, 2)
        spend(58, first, 5)  # over a minute since the last note
        clock[0] += 40
        first._note = lambda: None  # killed
    clock[0] += 100  # nobody trained
    with goodput.Goodput(run_from(2, folder, messages, devices=8), 3.6) as second:
        for step in (3, 99, 100):
            spend(10, second, step)
        second.pause("evaluation")
        clock[0] += 4
        second.resume()
        clock[0] += 1
        found = second.summary()["goodput"]
        assert json.loads(folder.files[goodput.FILE])[-1]["seconds"]["end"] == 1
    assert goodput.Goodput(run_from(0), 0.0)._read_at == clock[0]  # the next run in this process
    first_steps, first_waits = 18 + 8 + 58, 6
    lost = 3 / 5  # steps 3 to 5 of 1 to 5
    expected = {"steps": first_steps * (1 - lost) + 30, "input_wait": first_waits * (1 - lost) + 6, "start": 10}
    expected |= {"compile": 30, "checkpoints": 3, "evaluation": 4, "end": 1, "lost": lost * (first_steps + first_waits)}
    assert found["seconds"] == pytest.approx(expected)
    before, after = 5 + 50 + 3 + 10 + 60, 5 + 36 + 4 + 1
    assert found["share"] == pytest.approx(expected["steps"] / (before + after)) and found["starts"] == 2
    assert found["between_starts"] == 40 + 100 - 5  # since the last note
    assert found["chips"] == 4  # two cores a chip; the first start had two of them
    assert found["cost"] == pytest.approx((2 * before + 4 * after) / 3600 * 3.6)
    assert re.search(r"goodput \d+ % of 174 s in 2 start\(s\): steps .* chip-hours at 3.6: 0.44", messages[-1])
    folder.files[goodput.FILE] = b'[{"from": 0, "to": 1, "seconds": {"steps": "1"}}]'
    assert goodput.Goodput(run_from(2, folder, messages), 0.0)._starts == [] and "is damaged" in messages[-1]


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
    assert_refused(f"tiny --runs {tmp_path} {flag}", pattern, THIS, capsys)


# Trains the named runs one after the other. The second is killed in step 7 of its first start.
TWO_RUNS = """
import glob, os, signal, sys, time
sys.path[:0] = [{tests!r}]
import test_watch
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
    cli.run(test_watch.main, test_watch.PRESETS)
"""


def sent(file: Path) -> dict:
    """Returns what wandb has written to send it later: settings, lines and summary."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), {"config": {}, "lines": [], "summary": {}}
    store.open_for_scan(str(file))
    while data := store.scan_data():
        record = Record.FromString(data)
        found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        parts = (record.history.item, record.summary.update)
        line, last = ({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in part} for part in parts)
        found["lines"] += [line] * bool(line)
        found["summary"] |= last
    return found


def test_wandb_has_what_the_folder_has_and_a_killed_run_continues_as_the_same(tmp_path):
    """Also with two runs in a process."""
    pytest.importorskip("wandb", reason="needs requirements-wandb.txt")
    words = ["tiny", "--device", "cpu", "--runs", str(tmp_path), "--tracker", "wandb"]
    variables = environment(1, WANDB_MODE="offline", WANDB_DIR="")
    for names, code in ((["one", "two"], -9), (["two"], 0)):
        program = [sys.executable, "-c", TWO_RUNS.format(tests=str(Path(__file__).parent), names=names)]
        done = subprocess.run([*program, *words], env=variables, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, done.stderr
    files = [sorted((tmp_path / name).glob("wandb/offline-run-*/run-*.wandb")) for name in ("one", "two")]
    ids = [[file.stem.removeprefix("run-") for file in starts] for starts in files]
    assert ids[1] == 2 * [json.loads((tmp_path / "two/wandb.json").read_text())["id"]] and [ids[1][0]] != ids[0]
    one, two = (sent(starts[-1]) for starts in files)
    assert two["config"]["workers"] == 0 and two["config"]["devices"] == 1
    lines = [line for line in two["lines"] if "loss" in line]
    assert [line["step"] for line in lines] == list(range(5, 13))
    assert [line["loss"] for line in one["lines"] if "loss" in line] == losses(tmp_path / "one")
    assert [line["loss"] for line in lines] == losses(tmp_path / "two")[4:] and "timing/training" in lines[-1]
    assert one["lines"][-1]["curves/_type"] == "image-file" and one["lines"][-1]["curves/width"] == 1000
    assert one["summary"]["elapsed_seconds"] == summary(tmp_path / "one")["elapsed_seconds"]


def wandb_that_fails(broken: str) -> MagicMock:
    """Returns a wandb of which one function raises, "finish" not before the event `ended`."""
    fake = MagicMock(Error=ValueError, ended=threading.Event())
    fake.setup().settings.mode, fake.api.api_key = "online", broken != "login"
    functions = {"login": fake.login, "init": fake.init, "log": fake.init().log, "finish": fake.init().finish}

    def fails(*_, **__):
        if broken == "finish":
            fake.ended.wait()
        raise ValueError(f"{broken}\nfails")

    functions.get(broken, MagicMock()).side_effect = fails
    return fake


@pytest.mark.parametrize("broken", ["init", "log", "finish", "disk"])
def test_a_tracker_that_fails_is_one_warning(broken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracker, "LAST", -4.9)
    monkeypatch.setitem(sys.modules, "wandb", fake := wandb_that_fails(broken))
    monkeypatch.setattr(sys, "argv", ["script.py", "tiny", "--runs", str(tmp_path), "--tracker", "wandb"])
    if broken == "disk":
        (tmp_path / "run" / f"{tracker.FILE}.writing").mkdir(parents=True)
    cli.run(main, PRESETS)
    fake.ended.set()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    reason = {"finish": "it has not ended", "disk": "cannot write "}.get(broken, f"{broken} fails")
    assert len(warnings) == 1 and warnings[0].startswith(f"warning: --tracker wandb: {reason}"), warnings
    assert len(losses(tmp_path / "run")) == STEPS and summary(tmp_path / "run")["steps"]


def test_a_tracker_that_is_not_there_or_has_no_key_is_refused(tmp_path, monkeypatch, capsys):
    for module, pattern in (
        (SimpleNamespace(), "--tracker is wandb, but .*pip install -r requirements-wandb.txt"),
        (wandb_that_fails("login"), "--tracker wandb cannot log in .*export WANDB_API_KEY, or set WANDB_MODE=offline"),
    ):
        monkeypatch.setitem(sys.modules, "wandb", module)
        assert_refused(f"tiny --runs {tmp_path} --tracker wandb", pattern, THIS, capsys)


FIELDS = {"data": "nyu-mll/glue", "task": "mrpc", "checkpoint": "google-bert/bert-base-uncased", "runs": "", "name": ""}
Exported = make_dataclass("Exported", [(name, str, value) for name, value in FIELDS.items()])


def test_the_card_of_an_export(place, mesh, monkeypatch, capsys):
    """On a disk and at a URL; an export of another format has none, and one on a full disk a warning."""
    from huggingface_hub import ModelCard

    full = Mock(side_effect=InputError("cannot write README.md: No space left on device; make room"))
    whole = ["README.md", "config.json", "curves.png"]
    for kind, names in (("transformers", whole), ("other", ["config.json"]), ("full", ["config.json"])):
        run = Run(Exported(runs=place, name=kind), mesh, name="run", headline="a step", total_steps=1)
        model = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
        write_file(f"{run.path}/export/config.json", json.dumps({} if kind == "other" else model).encode())
        monkeypatch.setattr(card, "write_file", full if kind == "full" else write_file)
        run.log(1, loss=0.5)
        run.watchers = [card.Card(run)]
        run.finish({"accuracy": 0.123456789, "f1": float("nan")})
        files = [os.path.basename(file) for file in run.folder.files.ls(f"{run.path}/export", detail=False)]
        assert sorted(files) == names
        if kind == "transformers":
            page = ModelCard(run.folder.read("export/README.md").decode())
    assert run.finished and "warning: no model card: cannot write README.md: No space" in capsys.readouterr().out
    data = page.data
    assert (data.datasets, data.base_model) == (["nyu-mll/glue"], FIELDS["checkpoint"])
    assert [(each.metric_type, each.metric_value) for each in data.eval_results] == [("accuracy", 0.123456789)]
    assert data.pipeline_tag == "text-classification" and data.license is None and "## License" in page.text
    for word in ("(curves.png)", "| torch | 2.9.0 |", "| `--task` | `mrpc` |", "| f1 | None |", sys.orig_argv[0]):
        assert word in page.text, page.text


@pytest.mark.slow
def test_make_board_shows_the_numbers_pictures_and_settings_of_all_runs(tmp_path, monkeypatch):
    """In a browser, too, where there is one: apt-get install chromium."""
    for name, workers in (("one", "0"), ("two", "1")):
        words = ["script.py", "tiny", "--runs", str(tmp_path / "runs"), "--name", name, "--workers", workers]
        monkeypatch.setattr(sys, "argv", words)
        cli.run(main, PRESETS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"

    def ask(what: str):
        with urllib.request.urlopen(f"{address}/data/{what}") as answer:
            return json.load(answer)

    make = ["make", "board", f"RUNS={tmp_path}/runs", f"PORT={port}"]
    with subprocess.Popen(make, cwd=Path(__file__).parents[1], process_group=0) as board:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    if len(ask("runs")) == 2:
                        break
                time.sleep(0.5)
            assert ask("runs") == ["one/tb", "two/tb"]
            plugins, shown = ask("plugins_listing"), "one/tb two/tb hparams"
            if shutil.which("chromium"):
                browser = ["chromium", "--headless=new", "--no-sandbox", "--virtual-time-budget=30000", "--dump-dom"]
                page = subprocess.run([*browser, f"{address}/#timeseries"], capture_output=True, text=True, timeout=120)
                shown = page.stdout.lower()
        finally:
            os.killpg(board.pid, signal.SIGTERM)
    assert all(plugins[name]["enabled"] for name in ("scalars", "images", "hparams"))
    assert all(word in shown for word in ("one/tb", "two/tb", "hparams"))
