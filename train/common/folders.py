"""Whole folders at local paths and at fsspec URLs: what transformers and others read and write as one."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import safetensors

from errors import InputError
from train.common.files import is_local, write_file

CHUNK_BYTES = 16 * 2**20


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """Has `write` fill a temporary local folder, and copies that to `folder`, a path or URL; raises InputError."""
    try:
        with tempfile.TemporaryDirectory() as local:
            write(local)
            for path in filter(Path.is_file, sorted(Path(local).rglob("*"))):
                with path.open("rb") as file:
                    chunks = iter(lambda file=file: file.read(CHUNK_BYTES), b"")
                    write_file(f"{folder.rstrip('/')}/{path.relative_to(local)}", chunks)
    except (OSError, safetensors.SafetensorError) as error:
        failed = f"cannot write {folder}, which is made in a temporary folder: {error}"
        raise InputError(f"{failed}; make room there, or set TMPDIR to a folder with room") from error


def local_folder(folder: str) -> str:
    """Returns a local path to a folder: the path itself, or a temporary copy of a URL's files.

    Raises:
        InputError: the URL cannot be read.
    """
    try:
        fs, root = fsspec.core.url_to_fs(folder)
        if is_local(fs):
            return os.path.expanduser(folder.removeprefix("file://"))
        copy = tempfile.mkdtemp()
        fs.get(f"{root.rstrip('/')}/", copy, recursive=True)
    except FileNotFoundError:
        raise InputError(f"there is no folder {folder}") from None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"cannot read the folder {folder}: {error}") from error
    return copy
