"""What a run sends (train/common/watch/tracker.py, by wandb itself, offline), and what an export says of itself."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import test_watch
from helpers import assert_refused, environment, losses, summary

from errors import InputError
from train.common import cli
from train.common.files import write_file
from train.common.run import Run
from train.common.watch import card, tracker

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


class Fake(SimpleNamespace):
    """A wandb whose `broken` part raises, or waits."""

    Error = ValueError

    def __init__(self, broken: str):
        self.waits, self.broken, self.api = threading.Event(), broken, SimpleNamespace(api_key=broken != "login")
        self.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="online"))
        self.Settings = self.define_metric = self.Image = lambda *_, **__: None
        self.summary = {}
        for name in ("init", "login", "log", "finish"):
            setattr(self, name, lambda *_, of=name, **__: self.does(of))

    def does(self, name: str) -> "Fake":
        if name == self.broken and (name != "finish" or self.waits.wait()):
            raise ValueError(f"{name}\nfails")
        return self


@pytest.mark.parametrize("broken", ["init", "log", "finish", "disk"])
def test_a_tracker_that_fails_is_one_warning(broken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracker, "LAST", -4.9)
    monkeypatch.setitem(sys.modules, "wandb", fake := Fake(broken))
    monkeypatch.setattr(sys, "argv", ["script.py", "tiny", "--runs", str(tmp_path), "--tracker", "wandb"])
    if broken == "disk":
        (tmp_path / "run" / f"{tracker.FILE}.writing").mkdir(parents=True)
    cli.run(test_watch.main, test_watch.PRESETS)
    fake.waits.set()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    reason = {"finish": "it has not ended", "disk": "cannot write "}.get(broken, f"{broken} fails")
    assert len(warnings) == 1 and warnings[0].startswith(f"warning: --tracker wandb: {reason}"), warnings
    assert len(losses(tmp_path / "run")) == test_watch.STEPS and summary(tmp_path / "run")["steps"]


def test_refusals(tmp_path, monkeypatch, capsys):
    for module, pattern in (
        (SimpleNamespace(), "--tracker is wandb, but .*pip install -r requirements-wandb.txt"),
        (Fake("login"), "--tracker wandb cannot log in .*export WANDB_API_KEY, or set WANDB_MODE=offline"),
    ):
        monkeypatch.setitem(sys.modules, "wandb", module)
        assert_refused(f"tiny --runs {tmp_path} --tracker wandb", pattern, test_watch, capsys)


FIELDS = {"data": "nyu-mll/glue", "task": "mrpc", "checkpoint": "google-bert/bert-base-uncased", "runs": "", "name": ""}
Config = make_dataclass("Config", [(name, str, value) for name, value in FIELDS.items()])


def test_the_card_of_an_export(place, mesh, monkeypatch, capsys):
    """On a disk and at a URL; an export of another format has none, and one on a full disk a warning."""
    full = Mock(side_effect=InputError("cannot write README.md: No space left on device; make room"))
    whole = ["README.md", "config.json", "curves.png"]
    for kind, names in (("transformers", whole), ("other", ["config.json"]), ("full", ["config.json"])):
        run = Run(Config(runs=place, name=kind), mesh, name="run", headline="a step", total_steps=1)
        model = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
        write_file(f"{run.path}/export/config.json", json.dumps({} if kind == "other" else model).encode())
        monkeypatch.setattr(card, "write_file", full if kind == "full" else write_file)
        run.log(1, loss=0.5)
        run.tell = lambda event, run=run: card.Card(run).summary() if event == "summary" else {}
        run.finish({"accuracy": 0.123456789, "f1": float("nan")})
        files = [os.path.basename(file) for file in run.folder.files.ls(f"{run.path}/export", detail=False)]
        assert sorted(files) == names
        if kind == "transformers":
            page = huggingface_hub.ModelCard(run.folder.read("export/README.md").decode())
    assert run.finished and "warning: no model card: cannot write README.md: No space" in capsys.readouterr().out
    data = page.data
    assert (data.datasets, data.base_model) == (["nyu-mll/glue"], FIELDS["checkpoint"])
    assert [(each.metric_type, each.metric_value) for each in data.eval_results] == [("accuracy", 0.123456789)]
    assert data.pipeline_tag == "text-classification" and data.license is None and "## License" in page.text
    for word in ("(curves.png)", "| torch | 2.9.0 |", "| `--task` | `mrpc` |", "| f1 | None |", sys.orig_argv[0]):
        assert word in page.text, page.text
