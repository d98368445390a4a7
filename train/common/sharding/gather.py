"""Whole tensors on a host, of a model that is cut over devices: for its checkpoints and its export.

No host holds them twice: it reads a few at a time from the devices, writes a file from the memory of the tensors, and
reads one tensor by tensor. The files are those of `safetensors.torch.save`, which makes one of a copy of them all.
"""

import json
import os
import zlib
from collections.abc import Sequence
from typing import Any

import fsspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from train.common import device

READ_BYTES = 256 * 2**20  # of one transfer, if it is not of one tensor: torch_xla holds them twice until it ends
CHUNK_BYTES = 16 * 2**20
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)  # of a header


def read(tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
    """Copies tensors to the host. Those that are cut are made whole on the devices first, by a program for each shape,
    which all hosts of a pod run together: so each calls this with the same tensors. Not to `keep` them returns []."""
    found, part = [], []
    for number, tensor in enumerate(tensors, 1):
        part.append(on_every_device(tensor))
        if number == len(tensors) or sum(each.nbytes for each in part) >= READ_BYTES:
            found += device.read(part) if keep else []
            part = []
    return found


def on_every_device(tensor: Tensor) -> Tensor:
    """Returns a computed tensor itself, or as every device holds it if it is cut; the program for it has run."""
    if tensor.device.type != "xla":
        return tensor
    from train.common.xla import marks

    return marks.computed_whole(tensor)


def pack(tensors: dict[str, Tensor]) -> list[Any]:
    """Returns a safetensors file in parts: its header, and the memory of each tensor."""
    # Without numbers, for the order in which the library has tensors in a file, and the names of their types.
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    header, parts, end = json.loads(safetensors.torch.save(empty)[8:]), [], 0
    for name, entry in header.items():
        entry |= {"shape": [*tensors[name].shape], "data_offsets": [end, end := end + tensors[name].nbytes]}
        parts.append(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little"), head, *parts]


def load(fs: fsspec.AbstractFileSystem, path: str, mark: dict[str, int]) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file; raises ValueError where it has not the size and CRC-32 of `mark`."""
    read = checksum = 0
    found, broken = {}, False

    def take(count: int) -> bytes:
        nonlocal read, checksum
        part = file.read(max(0, min(count, mark["bytes"] + 1 - read)))  # whatever a damaged header says
        read, checksum = read + len(part), zlib.crc32(part, checksum)
        return part

    with fs.open(path, "rb") as file:  # once: it may be a download
        try:
            header = json.loads(take(int.from_bytes(take(8), "little")))
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                head = json.dumps({name: entry | {"data_offsets": [0, size]}}).encode()
                found |= safetensors.torch.load(len(head).to_bytes(8, "little") + head + take(size))
        except (*DAMAGE, safetensors.SafetensorError):
            found, broken = {}, True
        while take(CHUNK_BYTES):
            pass
    if broken or {"bytes": read, "crc32": checksum} != mark:
        raise ValueError(f"{os.path.basename(path)} has {read} bytes that do not match its checksum")
    return found
