"""Reads and writes the files of prepared folders.

Each is whole or not there; but for the arrays that several processes fill, see `create_array`.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a full disk
# What a file system says that cannot allocate space ahead of what is written.
NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
ZEROS = 1 << 20  # bytes written at once where it cannot


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


# Arrays that several processes fill


def create_array(path: Path, dtype: type, shape: tuple[int, ...]) -> None:
    """Creates an .npy file of this type and shape, of zeros, with all its space on the disk.

    So a full disk is an error now, and not in the midst of `write_rows`.

    Raises InputError: the disk has no room.
    """
    dtype = np.dtype(dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    needed = dtype.itemsize * math.prod(shape)
    try:
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            _allocate(file, needed)
    except OSError as error:
        if error.errno not in FULL:
            raise
        path.unlink()
        free = shutil.disk_usage(path.parent).free
        raise InputError(
            f"{path} cannot be written: {error.strerror}; it needs {needed:,} bytes, and {free:,} "
            "are free; make room, and give the same command again"
        ) from error


def _allocate(file: BinaryIO, size: int) -> None:
    """Gives a file so many bytes of zeros more, for which the disk then has room."""
    if not size:
        return
    start = file.tell()
    if hasattr(os, "posix_fallocate"):  # not on a Mac
        try:
            os.posix_fallocate(file.fileno(), start, size)
            return
        except OSError as error:
            if error.errno not in NO_ALLOCATION:
                raise
    for written in range(0, size, ZEROS):
        file.write(bytes(min(ZEROS, size - written)))


def write_rows(path: Path, first: int, rows: np.ndarray) -> None:
    """Writes rows into an .npy file that is there, from row `first` on.

    Not through a memory map: there a full disk, of a file without its space, kills the process.

    Raises InputError: the disk is full.
    """
    if not len(rows):
        return
    try:
        with open(path, "r+b") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            rows = np.ascontiguousarray(rows, dtype)
            if rows.shape[1:] != shape[1:] or first + len(rows) > shape[0]:
                raise ValueError(f"rows {rows.shape} from {first} on are not in {path}, {shape}")
            file.seek(first * rows[0].nbytes, os.SEEK_CUR)
            file.write(rows)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise InputError(
            f"{path} cannot be written: {error.strerror}; "
            "make room, and give the same command again"
        ) from error
