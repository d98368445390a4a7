"""Files at local paths and at fsspec URLs (gs://…): exports, weights, and what a checkpoint is written with."""

import contextlib
import json
import os

import fsspec
import safetensors
import safetensors.torch
from torch import Tensor

from errors import InputError


def write_file(path: str, content: bytes) -> None:
    """Writes a file to a path or URL. On a local disk it is written aside and renamed, so no half file is ever seen.

    Raises:
        InputError: the disk is full, or there is no access.
    """
    fs, root = fsspec.core.url_to_fs(path)
    # Not fsspec's transaction: it writes to the temporary folder, which may be on another disk, and it would hold back
    # what another thread writes in the meantime.
    aside = f"{root}.writing" if is_local(fs) else root
    try:
        fs.makedirs(os.path.dirname(root), exist_ok=True)
        with fs.open(aside, "wb") as file:
            file.write(content)
        if aside != root:
            os.replace(aside, root)
    except OSError as error:
        if aside != root:
            with contextlib.suppress(OSError):
                os.remove(aside)
        raise InputError(f"cannot write {path}: {error.strerror or error}; make room or access") from None


def read_file(path: str) -> bytes:
    """Returns the content of a weights file at a path or URL.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"there is no weights file {path}") from None
    except OSError as error:
        raise InputError(f"cannot read the weights file {path}: {error.strerror or error}") from None


def save_weights(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes one safetensors file to a path or URL; raises InputError as `write_file` does."""
    write_file(path, safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def load_weights(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a safetensors file at a path or URL and returns (tensors by name, metadata).

    Raises:
        InputError: there is no such file, or it is not a safetensors file.
    """
    content = read_file(path)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file ({error}); pickles are not loaded: convert it") from None
    header_bytes = int.from_bytes(content[:8], "little")
    return tensors, json.loads(content[8 : 8 + header_bytes]).get("__metadata__", {})


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Returns whether a file system is the local disk."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def write_synced(fs: fsspec.AbstractFileSystem, path: str, *contents: bytes | memoryview) -> None:
    """Writes `contents` one after the other into a file; on a local disk returns only when they are on the disk."""
    with fs.open(path, "wb") as file:
        for content in contents:
            file.write(content)
        if is_local(fs):
            file.flush()
            os.fsync(file.fileno())


def fsync(folder: str) -> None:
    """Waits until a local folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
