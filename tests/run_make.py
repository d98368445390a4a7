"""Runs the project's make for tests."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What the make that runs these tests hands on, and what would choose for the make that is tested.
NOT_HANDED_ON = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "PYTHON"}


def make(*arguments: str, python: str = "python3") -> subprocess.CompletedProcess:
    """Runs make with these arguments.

    python: "" lets make look for one, which takes a second where these are pyenv's.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    if python:
        environment["PYTHON"] = python
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment
    )
