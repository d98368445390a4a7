"""Files and folders at local paths and at fsspec URLs (gs://…).

Exports, weights, and what checkpoints are written with.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import fsspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from errors import InputError
from train.common import interrupt

CHUNK_BYTES = 16 * 2**20  # of a file that is copied to a store
COPY_PREFIX = "xla-zoo-copy-"  # of the name of a folder's temporary copy
FOLDER_PREFIX = "xla-zoo-folder-"  # of that of a folder that is being made
PICKLED = (".pth", ".pt")  # endings of what torch.save writes


def reason(error: Exception) -> str:
    """Returns what an error says, in a few words."""
    strerror = getattr(error, "strerror", None)
    return strerror or f"{type(error).__name__}: {error}"


def write_file(path: str, content: bytes | Iterable[bytes]) -> None:
    """Writes a file to a path or URL, whole or in parts, see `write_synced`.

    Raises:
        InputError: it cannot be written.
    """
    parts = [content] if isinstance(content, bytes) else content
    try:
        fs, root = fsspec.core.url_to_fs(path)
        fs.makedirs(os.path.dirname(root), exist_ok=True)
        write_synced(fs, root, parts)
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"cannot write {path}: {reason(error)}; make room or access") from None


def write_synced(
    fs: fsspec.AbstractFileSystem, path: str, contents: Iterable[bytes | memoryview]
) -> None:
    """Writes `contents` one after the other into a file.

    On a local disk the file is written aside, and renamed when it is on the disk: a kill or an
    error leaves the old file or the new one, never a part. A store shows a file when it is whole.
    """
    if is_local(fs):
        _write_aside(fs, path, contents)
        return
    with fs.open(path, "wb") as file:
        for content in contents:
            file.write(content)


def _write_aside(
    fs: fsspec.AbstractFileSystem, path: str, contents: Iterable[bytes | memoryview]
) -> None:
    """Writes a local file under another name, and renames it when it is on the disk."""
    # Not by fsspec's transaction: it writes to the temporary folder, which may be on another disk,
    # and it would hold back what another thread writes in the meantime.
    aside = f"{path}.writing"
    try:
        with fs.open(aside, "wb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except Exception:
        with contextlib.suppress(OSError):
            os.remove(aside)
        raise


def read_file(path: str) -> bytes:
    """Returns the content of a weights file at a path or URL.

    Raises:
        InputError: it is not there, or cannot be read.
    """
    try:
        with fsspec.open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"there is no weights file {path}") from None
    except Exception as error:
        raise InputError(f"cannot read the weights file {path}: {reason(error)}") from None


def exists(path: str) -> bool:
    """Returns whether there is a file at a path or URL.

    Raises:
        InputError: the store does not say.
    """
    try:
        fs, root = fsspec.core.url_to_fs(path)
        return fs.exists(root)
    except Exception as error:
        raise InputError(f"cannot look for {path}: {reason(error)}") from None


def save_weights(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file to a path or URL; raises InputError as `write_file` does."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_file(path, safetensors.torch.save(contiguous, metadata))


def load_weights(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file at a path or URL; see `load_with_metadata`."""
    tensors, _ = load_with_metadata(path)
    return tensors


def load_with_metadata(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a safetensors file at a path or URL.

    Raises:
        InputError: there is none, or it is another file.
    """
    content = read_file(path)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{path} is not a safetensors file ({error}); pickles are not loaded: convert it"
        ) from None

    # safetensors returns no metadata of bytes. The first 8 bytes are the length of the header.
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    return tensors, header.get("__metadata__") or {}


def read_metadata(path: str) -> dict[str, str]:
    """Returns the metadata of a safetensors file in a local folder, without reading its tensors.

    Raises:
        InputError: it cannot be read, or is another file.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}; give an export that is whole") from error


def load_model(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a model's file at a path or URL.

    It is a safetensors file, or a state dict that torch.save has written (.pth or .pt, as
    torchvision's), which has no metadata. Of that tensors alone are unpickled.

    Raises:
        InputError: there is none, or it is another file.
    """
    if not path.lower().endswith(PICKLED):
        return load_with_metadata(path)

    content = io.BytesIO(read_file(path))
    remedy = "give what torch.save(model.state_dict(), …) writes, or a safetensors file"
    try:
        weights = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's readers raise many kinds
        first_line = str(error).partition("\n")[0]
        raise InputError(f"{path} is no state dict ({first_line}); {remedy}") from error

    is_state_dict = isinstance(weights, dict) and len(weights) > 0
    for name in weights if is_state_dict else ():
        if not isinstance(weights[name], Tensor):
            is_state_dict = False
    if not is_state_dict:
        has = f"a {type(weights).__name__}"
        if isinstance(weights, dict):
            has = f"a dict of {', '.join(map(str, list(weights)[:5])) or 'nothing'}"
        raise InputError(f"{path} is no state dict, but {has}; {remedy}")
    return dict(weights), {}


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """Makes `write` fill a temporary local folder, and copies its files to `folder`, a path or URL.

    This is for what transformers and others write as a folder.

    Raises:
        InputError: one of the two folders cannot be written.
    """
    try:
        local = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        remove = partial(shutil.rmtree, local, ignore_errors=True)
        interrupt.at_end(remove)  # a signal may end this process meanwhile
        try:
            write(local)
            copy_folder(local, folder)
        finally:
            remove()
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            f"cannot write {folder}, which is made in a temporary folder: {error}; "
            "make room there, or set TMPDIR to a folder with room"
        ) from error


def copy_folder(local: str | Path, folder: str) -> None:
    """Copies all files below a local folder to the same paths below `folder`, a path or URL.

    Raises:
        InputError: one cannot be written.
    """
    for path in sorted(Path(local).rglob("*")):
        if path.is_file():
            copy = f"{folder.rstrip('/')}/{path.relative_to(local)}"
            with path.open("rb") as file:
                write_file(copy, _chunks(file))


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the content of an open file in pieces of CHUNK_BYTES."""
    chunk = file.read(CHUNK_BYTES)
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def local_folder(folder: str) -> str:
    """Returns a local path to a folder: the path itself; or a copy of a URL's files in the
    temporary folder, which is removed when this process ends.

    Raises:
        InputError: the URL cannot be read.
    """
    try:
        fs, root = fsspec.core.url_to_fs(folder)
        if is_local(fs):
            return os.path.expanduser(folder.removeprefix("file://"))

        copy = tempfile.mkdtemp(prefix=COPY_PREFIX)
        interrupt.at_end(partial(shutil.rmtree, copy, ignore_errors=True))
        fs.get(f"{root.rstrip('/')}/", copy, recursive=True)
    except FileNotFoundError:
        raise InputError(f"there is no folder {folder}") from None
    except Exception as error:  # every store has exceptions of its own
        raise InputError(f"cannot read the folder {folder}: {error}") from error
    return copy


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Returns whether a file system is the local disk."""
    protocols = fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)
    return "file" in protocols


def fsync(folder: str) -> None:
    """Waits until a local folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
