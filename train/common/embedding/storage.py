"""Sharded tables in a checkpoint: no host has a whole table in its memory, so each writes what its
devices hold.

    checkpoints/step_00001200/
        tables-00000.safetensors   the pieces of host 0, see pieces.py
        tables-00000.json          its mark, written after it: size, and CRC-32 of each piece

The main process waits for the marks of all hosts before it writes COMPLETE, which then has their
number. Any number of devices, under any plan, reads the pieces back. On a pod the folder must be
one that all hosts see.
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
from train.common.embedding.owners import Rows
from train.common.mesh import Mesh

HOSTS_SECONDS = 1800  # how long the main process waits for the other hosts' tables


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece lies: its file, the offset in it in bytes, its shape and its CRC-32."""

    path: str
    offset: int
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

        The safetensors file is written piece by piece: as bytes, all of them together would take
        the memory twice.
        """
        name = f"{folder}/tables-{self.embeddings.mesh.process_index:05d}"
        header = {}
        contents = {}
        sums = {}
        end = 0
        for key, piece in pieces.items():
            content = memoryview(piece.contiguous().reshape(-1).numpy()).cast("B")
            begin = end
            end = begin + len(content)
            header[key] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [begin, end]}
            contents[key] = content
            sums[key] = zlib.crc32(content)
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        length = len(head).to_bytes(8, "little")
        files.write_synced(fs, f"{name}.safetensors", [length + head, *contents.values()])

        mark = {"bytes": len(length) + len(head) + end, "crc32": sums}
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
            with _store(folder):
                index = _index(fs, folder)

            def read(key: str) -> Tensor:
                with _store(folder):
                    return _read_piece(fs, index, key)

            shapes = {key: piece.shape for key, piece in index.items()}
            self.embeddings.load_pieces(shapes, read)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            damage = str(error)
        # Each host reads other pieces; all take the same checkpoint.
        whole = over_hosts(mesh, int(not damage)).low
        return damage or ("" if whole else "the tables of another host are damaged")

    def drop_marks(self, fs: fsspec.AbstractFileSystem, folder: str) -> None:
        """Removes the marks of all hosts from a torn checkpoint, so that they cannot pass for those
        of a new attempt.

        The scripts compare the step to resume from on all hosts next, so no host saves before this
        is done.
        """
        with _store(folder):
            for path in fs.glob(f"{folder}/tables-*.json"):
                fs.rm(path)


def read_table(folder: str, name: str) -> Tensor:
    """Returns the weight of one embedding table, [rows, dim], on the host; for exports.

    Args:
        folder: of a complete checkpoint, a path or URL: `checkpoints.folder(step)`.
    Raises:
        KeyError: there is no such table.
        ValueError: a file is damaged, or (InputError) the store cannot be read.
    """
    fs, root = fsspec.core.url_to_fs(folder)
    with _store(folder):
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
        table_rows[key] = Rows.of_piece(key).table_rows(0, piece_rows)
        first_columns[key] = int(key.rsplit("/", 1)[1])
        rows = max(rows, int(table_rows[key][-1]) + 1)
        dim = max(dim, first_columns[key] + piece_columns)

    table = torch.full((rows, dim), float("nan"))
    for key in keys:
        first = first_columns[key]
        with _store(folder):
            piece = _read_piece(fs, index, key)
        table[table_rows[key], first : first + piece.shape[1]] = piece
    return table


@contextlib.contextmanager
def _store(folder: str) -> Iterator[None]:
    """Raises InputError where the store of a checkpoint's folder fails."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError):  # damage, or bugs
        raise
    except Exception as error:  # every store has exceptions of its own
        raise InputError(UNREADABLE.format(folder, files.reason(error))) from error


def _index(fs: fsspec.AbstractFileSystem, folder: str) -> dict[str, StoredPiece]:
    """Returns where each piece of a complete checkpoint lies, those of all hosts."""
    hosts = json.loads(fs.cat_file(f"{folder}/{COMPLETE}")).get("hosts", 0)
    index = {}
    for host in range(hosts):
        name = f"{folder}/tables-{host:05d}"
        try:
            mark = json.loads(fs.cat_file(f"{name}.json"))
            with fs.open(f"{name}.safetensors", "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length < mark["bytes"] else {}
            if fs.size(f"{name}.safetensors") != mark["bytes"]:
                raise ValueError("its size is not the one that was written")
            if header.keys() != mark["crc32"].keys():
                raise ValueError("its header is not the one that was written")
            for key, entry in header.items():
                first, end = entry["data_offsets"]
                if 4 * math.prod(entry["shape"]) != end - first:
                    raise ValueError(f"{key} has another shape than the one that was written")
                offset = 8 + length + first
                path = f"{name}.safetensors"
                index[key] = StoredPiece(path, offset, entry["shape"], mark["crc32"][key])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.path.basename(name)} is not whole: {error}") from None
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
