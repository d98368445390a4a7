"""Files and folders at local paths and at fsspec URLs (gs://…).

Exports, weights, and what checkpoints are written with.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
import safetensors
import safetensors.torch
from torch import Tensor

from errors import InputError

CHUNK_BYTES = 16 * 2**20  # of a file that is copied to a store


def reason(error: Exception) -> str:
    """Returns what an error says, in a few words."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def write_file(path: str, content: bytes | Iterable[bytes]) -> None:
    """Writes a file to a path or URL, whole or in parts, see `write_synced`; raises InputError where it cannot."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        fs.makedirs(os.path.dirname(root), exist_ok=True)
        write_synced(fs, root, [content] if isinstance(content, bytes) else content)
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"cannot write {path}: {reason(error)}; make room or access") from None


def write_synced(fs: fsspec.AbstractFileSystem, path: str, contents: Iterable[bytes | memoryview]) -> None:
    """Writes `contents` one after the other into a file. On a local disk it is written aside and renamed when it is on
    the disk, so that a kill or an error leaves the old file or the new one, never a part."""
    # Not fsspec's transaction: it writes to the temporary folder, which may be on another disk, and it would hold back
    # what another thread writes in the meantime.
    aside = f"{path}.writing" if is_local(fs) else path
    try:
        with fs.open(aside, "wb") as file:
            for content in contents:
                file.write(content)
            if aside != path:
                file.flush()
                os.fsync(file.fileno())
        if aside != path:
            os.replace(aside, path)
    except Exception:
        if aside != path:
            with contextlib.suppress(OSError):
                os.remove(aside)
        raise


def read_file(path: str) -> bytes:
    """Returns the content of a weights file at a path or URL; raises InputError where it is not there or unreadable."""
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"there is no weights file {path}") from None
    except Exception as error:
        raise InputError(f"cannot read the weights file {path}: {reason(error)}") from None


def exists(path: str) -> bool:
    """Returns whether there is a file at a path or URL; raises InputError where the store does not say."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        return fs.exists(root)
    except Exception as error:
        raise InputError(f"cannot look for {path}: {reason(error)}") from None


def save_weights(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes one safetensors file to a path or URL; raises InputError as `write_file` does."""
    write_file(path, safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def load_weights(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file at a path or URL; raises InputError where there is none."""
    return load_with_metadata(path)[0]


def load_with_metadata(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns what `load_weights` does, and the file's metadata."""
    content = read_file(path)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file ({error}); pickles are not loaded: convert it") from None
    size = int.from_bytes(content[:8], "little")  # of the header, which safetensors does not give of bytes
    return tensors, json.loads(content[8 : 8 + size]).get("__metadata__") or {}


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """Has `write` fill a temporary local folder, and copies its files to `folder`, a path or URL.

    This is for what transformers and others write as one.

    Raises:
        InputError: one of the two folders cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as local:
            write(local)
            for path in sorted(Path(local).rglob("*")):
                if path.is_file():
                    with path.open("rb") as file:
                        write_file(f"{folder.rstrip('/')}/{path.relative_to(local)}", _chunks(file))
    except (OSError, safetensors.SafetensorError) as error:
        failed = f"cannot write {folder}, which is made in a temporary folder: {error}"
        raise InputError(f"{failed}; make room there, or set TMPDIR to a folder with room") from error


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the content of an open file in pieces of CHUNK_BYTES."""
    chunk = file.read(CHUNK_BYTES)
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


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


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Returns whether a file system is the local disk."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def fsync(folder: str) -> None:
    """Waits until a local folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
