"""Whole folders at local paths and at fsspec URLs: what transformers and others read and write as one."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec

from errors import InputError
from train.common.files import is_local, write_file


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """Calls `write` with a temporary local folder and copies what it writes there to `folder`, a path or URL."""
    with tempfile.TemporaryDirectory() as local:
        write(local)
        for file in sorted(Path(local).rglob("*")):
            if file.is_file():
                write_file(f"{folder.rstrip('/')}/{file.relative_to(local)}", file.read_bytes())


def local_folder(folder: str) -> str:
    """Returns a local path to a folder: the path itself, or a temporary copy of a URL's files.

    Raises:
        InputError: the URL cannot be read.
    """
    try:
        fs, root = fsspec.core.url_to_fs(folder)
        if is_local(fs):
            return folder
        copy = tempfile.mkdtemp()
        fs.get(f"{root.rstrip('/')}/", copy, recursive=True)
    except FileNotFoundError:
        raise InputError(f"there is no folder {folder}") from None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"cannot read the folder {folder}: {error}") from error
    return copy
