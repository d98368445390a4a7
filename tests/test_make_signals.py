"""A signal to make alone, as `timeout`, systemd or `kill` send it: what make runs must get it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_make import NOT_HANDED_ON, ROOT

# In place of the environment's Python: says its number and waits as a training does.
WAITS = """#!{python}
import os, signal, sys, time
def end(*_):
    open("{folder}/ended", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
with open("{folder}/begun.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("{folder}/begun.part", "{folder}/begun")
time.sleep(60)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} within 30 s"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "MODEL=dlrm", "DATA=/my data", "NAME=a run"),
        ("data", "DATASET=clicks", "DATA=/my data"),
        ("predict", "MODEL_DIR=an export", "DATA=new.csv"),
        ("translate", "MODEL_DIR=an export"),
    ],
    ids=lambda words: words[0],
)
def test_sigterm_to_make_alone_reaches_the_program(words, tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(WAITS.format(python=sys.executable, folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    stamp = time.time() + 1000  # newer than the requirements: nothing is installed
    os.utime(tmp_path / ".installed", (stamp, stamp))
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}

    process = subprocess.Popen(
        ["make", f"VENV={tmp_path}", *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(tmp_path / "begun")
        process.terminate()
        wait_for(tmp_path / "ended")
        assert process.wait(30) != 0
    finally:
        if (tmp_path / "begun").exists() and not (tmp_path / "ended").exists():
            os.kill(int((tmp_path / "begun").read_text()), signal.SIGKILL)
