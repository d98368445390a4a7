"""Trains nothing, as train/glue.py of the project of tests/grid_bed.py.

It has the Config, the folder and the exit codes of a script in train/, and their bad habits.
faults.json in the project's folder says what goes wrong, by the end of a run's name:

    fails       a traceback, exit code 1
    diverges    an error in one line, exit code 2
    memory      XLA's error where a program does not fit, exit code 1
    killed      SIGKILL, which leaves a process behind that holds its standard output
    torn        half of summary.json, exit code 0
    nothing     no summary.json, exit code 0
    nan         a metric that is not finite
    stopped     SIGTERM from somewhere, and a checkpoint: 143
    burst       prints much, also what is no UTF-8, and no line end at its end
    waits       does not end until it is asked to
    deaf        the same, and it takes a second to save

A run that is asked to stop saves, and ends with 143; the next start resumes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from errors import InputError


@dataclass(frozen=True)
class Layout:
    remat: bool = False  # as that of train/common/mesh.py


@dataclass(frozen=True)
class Config:
    model: Literal["bert", "roberta"] = "bert"  # the encoder
    task: str = ""  # of GLUE
    data: str = ""  # what is read
    evaluate: str = ""  # a finished run
    split: str = ""  # of it
    lengths: tuple[int, ...] = (32, 64)  # tokens
    batch_size: int = 32  # examples
    epochs: float | None = None  # passes; None: chosen when the data is open
    lr: float | None = None  # peak
    optimizer: Literal["sgd", "lazy_adam"] = "sgd"  # rule
    seed: int = 0  # of all
    workers: int = 0  # changes no number
    runs: str = "runs"  # folder
    name: str = ""  # of the run
    strict: bool = True  # stops
    layout: Layout = field(default_factory=Layout)


TINY = Config(data="synthetic")
MAY_CHANGE = ("workers", "strict", "layout")
REQUIRED = ("lengths",)
PRESETS = {
    "full": ("all", Config()),
    "tiny": ("a trial", TINY),
}


def validate(config: Config) -> Config:
    """Returns the config with the recipe's rate; raises InputError where a value is wrong."""
    if config.lr is None:
        config = replace(config, lr=1e-3)
    if not config.lr >= 0:
        raise InputError(f"--lr is {config.lr}; it must be at least 0")
    if not config.data:
        raise InputError("--data is missing")
    return config


def read_arguments(preset: str, words: list[str]) -> Config:
    """Returns the validated Config, as tyro does, without its import."""
    config = PRESETS[preset][1]
    kinds = {one.name: one.type for one in fields(Config)}
    values = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            values[name] = [value] if equals else []
        else:
            values[name].append(word)
    changes = {}
    for name, given in values.items():
        if name == "lengths":
            changes[name] = tuple(map(int, given))
        elif name.startswith("no_"):
            changes[name[3:]] = False
        elif not given:
            changes[name] = True
        elif kinds[name] is int:
            changes[name] = int(given[0])
        elif "float" in str(kinds[name]):
            changes[name] = float(given[0])
        else:
            changes[name] = given[0]
    return validate(replace(config, **changes))


class Run:
    """A run of the stand-in: its folder, and how it ends."""

    def __init__(self, config: Config):
        self.config = config
        self.folder = Path(config.runs, config.name)
        self.stopped: list[int] = []  # a signal's handler appends
        self.fault = ""
        faults = Path("faults.json")
        if faults.exists():
            for end, fault in json.loads(faults.read_text()).items():
                if config.name.endswith(end):
                    self.fault = fault

    def write(self, name: str, content: object) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(json.dumps(content))
        new.rename(self.folder / name)

    def say(self, *words: object) -> None:
        print(*words, flush=True)

    def start(self) -> int:
        """Notes the start; returns the step to resume from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path("starts").open("a") as starts:
            starts.write(f"{self.config.name} {os.getpid()}\n")
        chosen = replace(self.config, epochs=self.config.epochs or 3.0)
        self.write("config.json", {"config": asdict(chosen), "starts": []})
        checkpoint = self.folder / "checkpoint"
        return int(checkpoint.read_text()) if checkpoint.exists() else 0

    def save_and_leave(self, step: int) -> None:
        if self.fault == "deaf":
            time.sleep(1)
        self.write("checkpoint", step)
        self.say(f"stopped by a signal at step {step}: saved; signals: {len(self.stopped)}")
        sys.exit(143)

    def go_wrong(self) -> None:
        """Ends the run as its fault wants it."""
        if self.fault == "fails":
            raise RuntimeError("a bug")
        if self.fault == "diverges":
            print("error: loss is nan at step 3: the training diverged", file=sys.stderr)
            sys.exit(2)
        if self.fault == "memory":
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")
        if self.fault == "killed":
            child = subprocess.Popen(["sleep", "1000"])
            Path("left-behind").write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stopped":
            self.save_and_leave(2)
        if self.fault == "burst":
            for number in range(5000):
                print(f"line {number:06d} " + "x" * 60)
                print(f"warning {number:06d}", file=sys.stderr)
            sys.stdout.buffer.write(b"\xff\xfe no line end")
            sys.stdout.flush()

    def finish(self) -> None:
        config = self.config
        metrics = {
            "accuracy": round(0.8 - abs(config.lr - 3e-5) * 1000 + 0.01 * config.seed, 6),
            "f1": 0.9,
            "loss": round(0.5 + 0.01 * config.seed, 6),
        }
        if self.fault == "nan":
            metrics["accuracy"] = None
        summary = {
            "metrics": metrics,
            "elapsed_seconds": 61.0 + config.seed,
            "devices": {"kind": "CPU", "devices": 1, "hosts": 1},
            "version": "v1.2",
        }
        if self.fault == "nothing":
            return
        if self.fault == "torn":
            (self.folder / "summary.json").write_text(json.dumps(summary)[:20])
            return
        self.write("summary.json", summary)
        self.say(f"{self.folder} finished")

    def train(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.stopped.append(1))
        signal.signal(signal.SIGINT, lambda *_: self.stopped.append(1))
        first = self.start()
        self.say(f"resuming after step {first}" if first else "new run")
        self.go_wrong()
        waits = self.fault in ("waits", "deaf")
        while waits and not Path("finish").exists():
            time.sleep(0.02)
            if self.stopped:
                self.save_and_leave(first + 1)
        self.finish()


if __name__ == "__main__":
    try:
        Run(read_arguments(sys.argv[1], sys.argv[2:])).train()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
