"""Whole tensors on a host, of a model that is split over devices: for checkpoints and exports.

No host holds them twice. It copies a few at a time from the devices, writes a file straight from
the tensors' memory, and reads a file tensor by tensor. The files are the same as those of
`safetensors.torch.save`, which needs a copy of all tensors.
"""

import json
import os
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

import fsspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from train.common import device

READ_BYTES = 256 * 2**20  # of one transfer: torch_xla holds its tensors twice meanwhile
CHUNK_BYTES = 16 * 2**20  # of a file that are read at once, for its checksum
LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins

# What a damaged header makes json and safetensors raise.
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    safetensors.SafetensorError,
)


def to_host(tensors: Sequence[Tensor], is_needed: bool) -> list[Tensor]:
    """Copies tensors from the devices to the host.

    Split tensors are gathered on the devices first, by a program for each shape, which all hosts of
    a pod run together: every host must call this with the same tensors.

    Args:
        is_needed: whether this host needs the copies; else it gets [].
    """
    copies = []
    to_read = []
    for tensor in tensors:
        to_read.append(on_every_device(tensor))
        if sum(each.nbytes for each in to_read) >= READ_BYTES:
            if is_needed:
                copies += device.read(to_read)
            to_read = []
    if to_read and is_needed:
        copies += device.read(to_read)
    return copies


def on_every_device(tensor: Tensor) -> Tensor:
    """Returns a computed tensor as every device holds it; the program that gathers it has run."""
    if tensor.device.type != "xla":
        return tensor
    from train.common.xla import pin_sharding

    return pin_sharding.gather(tensor)


def pack(tensors: dict[str, Tensor]) -> list[Any]:
    """Returns a safetensors file as its length, its header, and the memory of each tensor."""
    # The library chooses the order of the tensors and the names of their types.
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header = json.loads(safetensors.torch.save(empty)[LENGTH_BYTES:])

    contents = []
    end = 0
    for name, entry in header.items():
        tensor = tensors[name]
        start = end
        end += tensor.nbytes
        entry["shape"] = [*tensor.shape]
        entry["data_offsets"] = [start, end]
        contents.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(LENGTH_BYTES, "little"), text, *contents]


class _Checked:
    """Reads a file that should have `size` bytes, and computes the checksum of what it has read."""

    def __init__(self, file: BinaryIO, size: int):
        self._file = file
        self._size = size
        self.read = 0  # bytes
        self.crc32 = 0

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes, or fewer at the end, of at most `size` + 1 in all.

        One more than there should be, so that a file that is too long is noticed. And no more,
        whatever count a damaged header asks for.
        """
        left = self._size + 1 - self.read
        content = self._file.read(max(0, min(count, left)))
        self.read += len(content)
        self.crc32 = zlib.crc32(content, self.crc32)
        return content


def load(fs: fsspec.AbstractFileSystem, path: str, expected: dict[str, int]) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, reading it once: it may be a download.

    Args:
        expected: "bytes" and "crc32" of the file.
    Raises:
        ValueError: the file has another size or checksum, or is damaged.
    """
    with fs.open(path, "rb") as file:
        checked = _Checked(file, expected["bytes"])
        try:
            found = _read_tensors(checked)
        except DAMAGE:
            found = None
        while checked.take(CHUNK_BYTES):
            pass

    matches = {"bytes": checked.read, "crc32": checked.crc32} == expected
    if found is None or not matches:
        name = os.path.basename(path)
        raise ValueError(f"{name} has {checked.read} bytes that do not match its checksum")
    return found


def _read_tensors(checked: _Checked) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, in the order in which they lie in it."""
    length = int.from_bytes(checked.take(LENGTH_BYTES), "little")
    header = json.loads(checked.take(length))

    found = {}
    for name, entry in sorted(header.items(), key=_offsets):
        start = entry["data_offsets"][0]
        size = entry["data_offsets"][1] - start
        # A safetensors file with this tensor only, which the library reads.
        own_header = json.dumps({name: entry | {"data_offsets": [0, size]}}).encode()
        own_length = len(own_header).to_bytes(LENGTH_BYTES, "little")
        found |= safetensors.torch.load(own_length + own_header + checked.take(size))
    return found


def _offsets(item: tuple[str, dict[str, Any]]) -> list[int]:
    """Returns the first byte of a header's tensor, and the byte after its last one."""
    _, entry = item
    return entry["data_offsets"]
