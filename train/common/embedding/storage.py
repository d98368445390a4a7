"""Sharded tables in a checkpoint: no host has a whole table in its memory, so each writes what its
devices hold.

    checkpoints/step_00001200/
        tables-00000.safetensors   the pieces of host 0, see pieces.py
        tables-00000.json          its mark, written after it: size, and CRC-32 of each piece

The main process waits for the marks of all hosts before it writes COMPLETE, which then has the
number of hosts. Any number of devices, under any plan, reads the pieces back. On a pod the folder
must be one that all hosts see.
"""

import contextlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fsspec
import torch
from torch import Tensor

from errors import InputError
from train.common import files
from train.common.checkpoint import COMPLETE, UNREADABLE
from train.common.device import over_hosts
from train.common.embedding.bags import ShardedEmbeddingBags
from train.common.embedding.owners import TableRun
from train.common.mesh import Mesh

HOSTS_SECONDS = 1800  # how long the main process waits for the other hosts' tables
LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece lies in a store, and what it must be."""

    path: str  # of its file
    offset: int  # in the file, bytes
    shape: Sequence[int]
    crc32: int


class TableStorage:
    """The tables of a model as a Checkpointer takes them: `Checkpointer(path,
    tables=TableStorage(embeddings))`."""

    def __init__(self, embeddings: ShardedEmbeddingBags):
        self.embeddings = embeddings

    @property
    def hosts(self) -> int:
        """How many hosts write pieces."""
        return self.embeddings.mesh.process_count

    def copy(self) -> dict[str, Tensor]:
        """Copies this host's pieces to its memory."""
        return self.embeddings.pieces()

    def write(self, fs: fsspec.AbstractFileSystem, folder: str, pieces: dict[str, Tensor]) -> None:
        """Writes this host's pieces and then its mark.

        The safetensors file is written piece by piece. To make its bytes first, as the library
        does, would take the memory of all pieces twice.
        """
        name = f"{folder}/tables-{self.embeddings.mesh.process_index:05d}"
        header = {}
        contents = []
        checksums = {}
        end = 0
        for key, piece in pieces.items():
            content = memoryview(piece.contiguous().reshape(-1).numpy()).cast("B")
            begin = end
            end = begin + len(content)
            header[key] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [begin, end]}
            contents.append(content)
            checksums[key] = zlib.crc32(content)

        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the first piece begins at a multiple of 8 bytes
        length = len(text).to_bytes(LENGTH_BYTES, "little")
        files.write_synced(fs, f"{name}.safetensors", [length + text, *contents])

        mark = {"bytes": len(length) + len(text) + end, "crc32": checksums}
        files.write_synced(fs, f"{name}.json", [json.dumps(mark).encode()])

    def wait(self, fs: fsspec.AbstractFileSystem, folder: str) -> None:
        """Waits for the marks of all hosts.

        Raises:
            InputError: a mark is still missing after HOSTS_SECONDS.
        """
        deadline = time.monotonic() + HOSTS_SECONDS
        while True:
            missing = []
            for host in range(self.hosts):
                if not fs.exists(f"{folder}/tables-{host:05d}.json"):
                    missing.append(host)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise InputError(
                    f"host {missing[0]} and {len(missing) - 1} more have not written their tables "
                    f"to {folder} in {HOSTS_SECONDS // 60} minutes; all hosts must write to one "
                    "folder: use --runs gs://bucket/runs"
                )
            time.sleep(1)
            fs.invalidate_cache()

    def load(self, fs: fsspec.AbstractFileSystem, folder: str, mesh: Mesh) -> str:
        """Fills the tables and their optimizer state from a checkpoint's folder.

        Returns:
            What is damaged on this or another host, else "". Some numbers may be in the tables
            already.
        Raises:
            InputError: the pieces are those of other tables or of another optimizer, or the store
                cannot be read.
        """
        damage = ""
        try:
            with _store_errors(folder):
                index = _index(fs, folder)

            def read(key: str) -> Tensor:
                with _store_errors(folder):
                    return _read_piece(fs, index, key)

            shapes = {key: stored.shape for key, stored in index.items()}
            self.embeddings.load_pieces(shapes, read)
        except InputError:  # no damage; caught here, since it is a ValueError
            raise
        except ValueError as error:
            damage = str(error)

        # Each host reads other pieces, but all must take the same checkpoint.
        all_whole = over_hosts(mesh, int(not damage)).low
        if not damage and not all_whole:
            damage = "the tables of another host are damaged"
        return damage

    def drop_marks(self, fs: fsspec.AbstractFileSystem, folder: str) -> None:
        """Removes the marks of all hosts from a torn checkpoint, before it is written anew.

        Otherwise they would pass for those of the new attempt. After this `Run.resume` compares the
        step to resume from over all hosts, which waits for them. So no host saves before the marks
        are gone.
        """
        with _store_errors(folder):
            for path in fs.glob(f"{folder}/tables-*.json"):
                fs.rm(path)


def read_table(folder: str, name: str) -> Tensor:
    """Returns the weight of one embedding table, [rows, dim], on the host; for exports.

    Args:
        folder: path or URL of a complete checkpoint, `checkpoints.folder(step)`.
        name: of the table.
    Raises:
        KeyError: there is no such table.
        ValueError: a file is damaged, or (InputError) the store cannot be read.
    """
    fs, root = fsspec.core.url_to_fs(folder)
    with _store_errors(folder):
        index = _index(fs, root)
    keys = [key for key in index if key.startswith(f"{name}/weight/")]
    if not keys:
        raise KeyError(f"the checkpoint {folder} has no table {name!r}")

    rows = 0
    dim = 0
    table_rows = {}
    first_columns = {}
    for key in keys:
        piece_rows, piece_columns = index[key].shape
        table_rows[key] = TableRun.of_piece(key).table_rows(0, piece_rows)
        # "<table>/weight/<run>/<first column>", see pieces.py.
        first_columns[key] = int(key.rsplit("/", 1)[1])
        rows = max(rows, int(table_rows[key][-1]) + 1)
        dim = max(dim, first_columns[key] + piece_columns)

    table = torch.full((rows, dim), float("nan"))  # what no piece has stays NaN
    for key in keys:
        first = first_columns[key]
        with _store_errors(folder):
            piece = _read_piece(fs, index, key)
        table[table_rows[key], first : first + piece.shape[1]] = piece
    return table


@contextlib.contextmanager
def _store_errors(folder: str) -> Iterator[None]:
    """Raises InputError where the store of a checkpoint's folder fails while the context lasts."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError):  # damage, or bugs
        raise
    except Exception as error:  # every kind of store has exceptions of its own
        raise InputError(UNREADABLE.format(folder, files.reason(error))) from error


def _index(fs: fsspec.AbstractFileSystem, folder: str) -> dict[str, StoredPiece]:
    """Returns where each piece of a complete checkpoint lies, those of all hosts, by name.

    Raises:
        ValueError: a host's file is damaged.
    """
    hosts = json.loads(fs.cat_file(f"{folder}/{COMPLETE}")).get("hosts", 0)
    index = {}
    for host in range(hosts):
        name = f"{folder}/tables-{host:05d}"
        try:
            index.update(_index_of_host(fs, name))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.path.basename(name)} is not whole: {error}") from None
    return index


def _index_of_host(fs: fsspec.AbstractFileSystem, name: str) -> dict[str, StoredPiece]:
    """Returns where each piece of one host lies.

    Args:
        name: of the host's files, without .json and .safetensors.
    Raises:
        FileNotFoundError, ValueError, KeyError or TypeError: the files are damaged.
    """
    mark = json.loads(fs.cat_file(f"{name}.json"))
    path = f"{name}.safetensors"
    with fs.open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = {}
        if length < mark["bytes"]:  # a damaged length may ask for more than there is memory
            header = json.loads(file.read(length))
    if fs.size(path) != mark["bytes"]:
        raise ValueError("its size is not the one that was written")
    if header.keys() != mark["crc32"].keys():
        raise ValueError("its header is not the one that was written")

    index = {}
    for key, entry in header.items():
        first, end = entry["data_offsets"]
        if 4 * math.prod(entry["shape"]) != end - first:
            raise ValueError(f"{key} has another shape than the one that was written")
        offset = LENGTH_BYTES + length + first
        index[key] = StoredPiece(path, offset, entry["shape"], mark["crc32"][key])
    return index


def _read_piece(fs: fsspec.AbstractFileSystem, index: dict[str, StoredPiece], key: str) -> Tensor:
    """Returns a piece; raises ValueError where its file is damaged."""
    stored = index[key]
    with fs.open(stored.path, "rb") as file:
        file.seek(stored.offset)
        content = bytearray(file.read(4 * math.prod(stored.shape)))
    if zlib.crc32(content) != stored.crc32:
        raise ValueError(f"{key} in {os.path.basename(stored.path)} does not match its checksum")
    return torch.frombuffer(content, dtype=torch.float32).reshape(stored.shape)
