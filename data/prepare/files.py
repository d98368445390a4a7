"""Reads and writes the files of prepared folders, each of which is whole or not there."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a full disk


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing under another name; renames it when it is finished.

    Raises InputError for a full disk.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
    except OSError as error:
        if error.errno not in FULL:
            raise
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(
            f"{path} cannot be written: {error.strerror}; "
            "make room, and give the same command again"
        ) from error
    os.replace(partial, path)


def write_json(path: Path, contents: dict) -> None:
    """Writes a JSON file, whole or not at all."""
    with whole(path) as file:
        file.write(json.dumps(contents, indent=1).encode())


def read_json(path: Path) -> dict:
    """Reads a JSON file. Raises InputError where that fails."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: {error}; delete the folder and prepare it again"
        ) from error
