"""Runs what a copy of a script has of its own: `make test` there."""

import os
import subprocess
import sys
from pathlib import Path

from run_make import NOT_HANDED_ON

NO_TORCH_XLA = 'raise ModuleNotFoundError("No module named torch_xla", name="torch_xla")\n'


def passed_tests(folder: Path, scratch: Path, with_xla: bool) -> int:
    """Runs `make test` in a copy, in an environment as its users have it; returns how many of its
    tests have passed, which must be all.

    Args:
        scratch: an empty folder.
        with_xla: otherwise it runs as if torch_xla were not installed.
    """
    environment = {}
    for name, value in os.environ.items():
        if name not in (*NOT_HANDED_ON, "PYTHONPATH", "CPU_NUM_DEVICES", "PJRT_DEVICE"):
            environment[name] = value
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    if not with_xla:
        (scratch / "torch_xla.py").write_text(NO_TORCH_XLA)
        environment["PYTHONPATH"] = str(scratch)

    command = ["make", "test", f"PYTHON={sys.executable}", "ARGS=-q -p no:cacheprovider"]
    result = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = result.stdout.decode()
    assert result.returncode == 0, output[-4000:]
    last_line = output.splitlines()[-1]
    count, said, *_ = last_line.split()
    assert said.startswith("passed"), last_line
    return int(count)
