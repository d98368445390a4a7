"""The command line of a script: one sentence for what cannot be used, with the nearest that can."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from errors import InputError, LostProcess
from train.common import cli
from train.common.mesh import Layout

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Config:
    data: str = ""  # a folder
    lr: float = 0.1  # learning rate
    optimizer: Literal["sgd", "adagrad"] = "sgd"  # rule
    sizes: tuple[int, ...] = (1, 2)  # of layers
    pair: tuple[float, float] = (1.0, 1.0)  # two factors
    log_every: int = 5  # steps
    strict: bool = True  # an error, or a warning
    layout: Layout = field(default_factory=Layout)


PRESETS = {
    "full": ("all", Config()),
    "tiny": ("a trial", Config(lr=0.2)),
    "terabyte": ("more", Config()),
}


def parse(line: str) -> Config:
    return cli.parse(PRESETS, "python -m train.net", line.split())


def test_a_preset_alone_is_its_config():
    assert parse("tiny") == Config(lr=0.2)


def test_flags_change_the_config_of_a_preset():
    config = parse("full --log-every 8 --optimizer adagrad --no-strict --sizes 3 4 --remat")

    assert config == Config(
        log_every=8,
        optimizer="adagrad",
        strict=False,
        sizes=(3, 4),
        layout=Layout(remat=True),
    )


@pytest.mark.parametrize("line", ["tiny --data -loss --remat", "tiny --data=-loss --remat"])
def test_a_word_with_one_minus_is_a_value(line):
    config = parse(line)
    assert config.data == "-loss"
    assert config.layout.remat


PRESET_FIRST = "the preset comes first"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tiny --logevery 8", ["--logevery is no flag", "is it --log-every?"]),
        ("tiny --log_evry=8", ["--log_evry=8 is no flag", "is it --log-every?"]),
        ("tiny --shard-stat full", ["is it --shard-state?"]),
        ("tiny --no-strikt", ["--no-strikt is no flag", "is it --no-strict?"]),
        ("tiny --lr 0.3 --zzz", ["--zzz is no flag; python -m train.net tiny --help"]),
        ("tiny 5", ["5 is no flag"]),
        ("tiny --lr x", ["--lr cannot be used", "'x'", "expected FLOAT"]),
        ("tiny --lr", ["--lr needs FLOAT"]),
        ("tiny --sizes 3 x", ["--sizes cannot be used", "'x'"]),
        ("tiny --pair 3", ["--pair needs FLOAT FLOAT"]),
        (
            "tiny --optimizer sdg",
            ["--optimizer is sdg", "is it sgd?", "one of: sgd, adagrad"],
        ),
        (
            "",
            [f"{PRESET_FIRST}: python -m train.net PRESET", "one of: full, tiny, terabyte"],
        ),
        ("--lr 1 tiny", [f"{PRESET_FIRST}, not --lr: python -m train.net PRESET"]),
        ("tinny --lr 1", ["not tinny (is it tiny?)"]),
    ],
)
def test_what_cannot_be_used_is_one_sentence_with_the_nearest(line, expected):
    with pytest.raises(InputError) as refused:
        parse(line)

    sentence = str(refused.value)
    assert [part for part in expected if part not in sentence] == [], sentence
    assert "\n" not in sentence


def test_help_names_the_program_as_it_is_started(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("tiny --help")

    assert ended.value.code == 0
    assert "python -m train.net" in capsys.readouterr().out


# ---- a preset that is chosen -------------------------------------------------------------------
def chosen(line: str, capsys) -> tuple[Config, str]:
    """Returns the Config of a command line of a script that chooses its preset by --data, and what
    it prints."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["net", *line.split()])
        cli.run(found.append, PRESETS, lambda data: "tiny" if data == "small" else "full")
    (config,) = found
    return config, capsys.readouterr().out


@pytest.fixture
def without_watch(monkeypatch):
    """Presets without the flags of watchers, which this Config has not."""
    monkeypatch.setattr(cli.optional, "is_here", lambda part: False)


@pytest.mark.usefixtures("without_watch")
@pytest.mark.parametrize(
    ("line", "lr", "said"),
    [
        ("--data small", 0.2, "preset tiny, chosen by what small holds\n"),
        ("--log-every 5 --data=large", 0.1, "preset full, chosen by what large holds\n"),
        ("--data small --lr 0.5", 0.5, "preset tiny, chosen by what small holds\n"),
        ("full --data small", 0.1, ""),
        ("--lr 0.3", 0.3, ""),
    ],
)
def test_without_a_preset_the_data_choose_one(capsys, line, lr, said):
    config, printed = chosen(line, capsys)

    assert config.lr == lr
    assert printed == said


@pytest.mark.usefixtures("without_watch")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr 1 tiny", "the preset comes first, not --lr"),
        ("--lr x", "--lr cannot be used"),
        ("", "the preset comes first: "),
        ("small", "the preset comes first, not small"),
    ],
)
def test_a_command_that_cannot_be_used_chooses_none(capsys, line, message):
    with pytest.raises(SystemExit):
        chosen(line, capsys)

    assert message in capsys.readouterr().err


SCRIPTS = ["resnet50", "dlrm", "glue", "pretrain", "squad", "tagging", "transformer", "translate"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_run_by_its_path_says_in_one_line_how(script):
    command = [sys.executable, f"train/{script}.py", "tiny"]
    environment = {"PATH": os.environ["PATH"]}

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)

    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert f"python -m train.{script} " in line


# Prints lines until it is ended; "worker": the pipe of something else breaks.
PRINTS = """
import dataclasses
from train.common import cli


@dataclasses.dataclass(frozen=True)
class Config:
    worker: bool = False


def main(config):
    print("first", flush=True)
    if config.worker:
        raise BrokenPipeError("of a worker")
    while True:
        print("more", flush=True)


cli.run(main, {"tiny": ("a trial", Config())})
"""


def read_first_line(*flags: str) -> tuple[int, str]:
    """Reads the first line that PRINTS prints, as `| head -1` does; returns its exit code, and
    what it says on the standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS, "tiny", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "first\n"
    if not flags:
        process.stdout.close()
    with process:
        return process.wait(timeout=60), process.stderr.read()


def test_a_reader_that_leaves_ends_a_run_with_a_sentence():
    code, error = read_first_line()
    assert code == 141
    assert error.splitlines()[-1].startswith("error: ended, since the program that read the output")
    assert "Traceback" not in error
    assert "Exception ignored" not in error


def test_a_broken_pipe_of_something_else_keeps_its_traceback():
    code, error = read_first_line("--worker")
    assert code == 1
    assert "BrokenPipeError: of a worker" in error


def test_the_exit_code_of_a_lost_process_comes_first(monkeypatch, capsys):
    """start_processes.py and torchrun report that of the process which ends first."""
    steps = []
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: steps.append((seconds, said())))
    monkeypatch.setattr(cli.sys, "argv", ["train.net", "tiny"])

    def said() -> str:
        return capsys.readouterr().err

    def main(config):
        raise LostProcess("another one has ended")

    with pytest.raises(SystemExit) as ended:
        cli.run(main, PRESETS)
    assert ended.value.code == 1
    assert steps == [(cli.LOST_LINGERS, "error: another one has ended\n")]
