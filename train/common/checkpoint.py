"""Checkpoints: exact resume, written off the training loop, to a folder or any fsspec URL (gs://…).

    checkpoints/step_00001200/state.safetensors   every parameter, buffer and optimizer tensor, by name
                              state.json          the step, and what of the optimizer is not a tensor
                              COMPLETE            size and CRC-32 of both, written last

A checkpoint without a COMPLETE that fits is torn: it is skipped with a warning and the one before it is used. On a
local disk the folder is written aside and renamed as well. Nothing is ever unpickled.

Sharded embedding tables are in no host's memory as a whole: each host writes what its devices hold,

                              tables-00000.safetensors   the pieces of host 0, see ShardedEmbeddingBags.pieces
                              tables-00000.json          its size, and the CRC-32 of each piece; written after it

and the main process waits for all hosts' before it writes COMPLETE, which then has their number. Any number of devices,
under any plan, reads them back. On a pod the folder must be one that all hosts see.
"""

import contextlib
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import safetensors
import safetensors.torch
import torch
import torch_xla
from torch import Tensor, nn

from errors import InputError
from train.common.device import over_hosts, replicate, same_on_all_hosts
from train.common.embedding.bags import ShardedEmbeddingBags

STATE, NUMBERS, COMPLETE = "state.safetensors", "state.json", "COMPLETE"
HOSTS_SECONDS = 1800  # that the main process waits for the other hosts' tables


def to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the host, those on the XLA device in one transfer; waits for the steps that make them."""
    on_device = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
    copies = torch_xla._XLAC._xla_get_cpu_tensors([tensors[name].detach() for name in on_device])
    host = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.device.type != "xla"}
    return host | dict(zip(on_device, copies, strict=True))


def named_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor that a step changes, by name ("model.…", "optimizer.<parameter>.<state>"), and the optimizer's
    numbers that are no tensors. Parameters are taken as they are held, not as a `state_dict` hook would show them."""
    tensors = {f"model.{name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    numbers: dict[str, Any] = {}
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                (tensors if torch.is_tensor(value) else numbers)[f"optimizer.{names[parameter]}.{key}"] = value
    return tensors, numbers


class Checkpointer:
    """Saves and restores the training state below `path`.

    Args:
        path: folder or fsspec URL; made when needed.
        keep: how many complete checkpoints stay.
        main_process: False on the hosts of a pod that only read.
        tables: sharded embeddings that belong to the state; every host writes its part of them.
        every: `keep` counts the steps that divide by it; others (of an evaluation, of a signal) go when the next is
            there, so that what `average` takes does not depend on when a run was stopped.
    """

    def __init__(
        self,
        path: str,
        keep: int = 3,
        main_process: bool = True,
        tables: ShardedEmbeddingBags | None = None,
        every: int = 1,
    ):
        self.path = path.rstrip("/")
        self.keep, self.main_process, self.tables, self.every = keep, main_process, tables, every
        self._fs, self._root = fsspec.core.url_to_fs(self.path)
        self._local = _is_local(self._fs)
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        if main_process and self._local:
            for name in self._names():
                if name.startswith(".writing-"):  # left by a killed process
                    self._fs.rm(f"{self._root}/{name}", recursive=True)

    # ---- saving ----

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        if error_type is None:
            self.wait()
        elif self._writer is not None:  # the error that ends the run is the one to show
            self._writer.join()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copies the state to the host (the training loop waits for that alone) and writes it in the background.

        Raises:
            InputError: the save before this one failed (disk full, no permission), with the checkpoint that is safe.
        """
        if not self.main_process and self.tables is None:
            return
        self.wait()
        tensors, numbers = named_state(model, optimizer) if self.main_process else ({}, {})
        pieces = self.tables.pieces() if self.tables is not None else {}
        arguments = (step, to_host(tensors), numbers, pieces)
        self._writer = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=False)
        self._writer.start()

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what kept it from getting there."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what kept the last save from the disk, if anything; costs nothing, so call it in every step."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], pieces: dict[str, Tensor]) -> None:
        name = f"step_{step:08d}"
        target = f"{self._root}/{name}"
        # Only a local rename is atomic; elsewhere the marker alone, written last, makes a checkpoint one.
        folder = f"{self._root}/.writing-{name}" if self._local else target
        try:
            self._fs.makedirs(folder, exist_ok=True)
            if self.tables is not None:
                self._write_tables(folder, pieces)
                if not self.main_process:
                    return
                self._await_tables(folder)
            files = {
                STATE: safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}),
                NUMBERS: json.dumps({"step": step, "numbers": numbers}).encode(),
            }
            for file, content in files.items():
                self._write_file(f"{folder}/{file}", content)
            marks = {file: {"bytes": len(content), "crc32": zlib.crc32(content)} for file, content in files.items()}
            marks["hosts"] = self.tables.mesh.process_count if self.tables is not None else 0
            self._write_file(f"{folder}/{COMPLETE}", json.dumps(marks).encode())
            if self._local:
                if os.path.isdir(target):  # a torn one of an earlier attempt
                    self._fs.rm(target, recursive=True)
                os.rename(folder, target)
                _fsync(self._root)
            # A torn one of a later step has its marker perhaps, but must not push this one out.
            known = [other for other in self.complete_steps() if other <= step]
            regular = [other for other in known if other % self.every == 0][-self.keep :]
            for old in set(known) - {step, *regular}:
                # Without its marker a half-deleted checkpoint is torn, not wrong.
                self._fs.rm(f"{self._root}/step_{old:08d}/{COMPLETE}")
                self._fs.rm(f"{self._root}/step_{old:08d}", recursive=True)
        except OSError as error:
            try:
                safe = self.complete_steps()
                known = f"the one of step {safe[-1]} is complete and safe" if safe else "there is no complete one yet"
            except OSError:
                known = "nor can the folder be listed"
            self._failure = InputError(
                f"cannot write the checkpoint of step {step} to {self.path}: {error.strerror or error}; {known}"
                + "; make room or access, and the same command goes on from there"
            )
        except Exception as error:
            self._failure = error

    def _write_file(self, path: str, *contents: bytes | memoryview) -> None:
        with self._fs.open(path, "wb") as file:
            for content in contents:
                file.write(content)
            if self._local:
                file.flush()
                os.fsync(file.fileno())

    def _write_tables(self, folder: str, pieces: dict[str, Tensor]) -> None:
        """A safetensors file, piece by piece: as bytes, all of them together would take the memory a second time."""
        name = f"{folder}/tables-{self.tables.mesh.process_index:05d}"
        header, end = {}, 0
        for key, piece in pieces.items():
            size = piece.numel() * piece.element_size()
            header[key] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [end, end + size]}
            end += size
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        contents = {key: memoryview(p.contiguous().reshape(-1).numpy()).cast("B") for key, p in pieces.items()}
        self._write_file(f"{name}.safetensors", len(head).to_bytes(8, "little") + head, *contents.values())
        sums = {key: zlib.crc32(content) for key, content in contents.items()}
        self._write_file(f"{name}.json", json.dumps({"bytes": 8 + len(head) + end, "crc32": sums}).encode())

    def _await_tables(self, folder: str) -> None:
        hosts = range(self.tables.mesh.process_count)
        deadline = time.monotonic() + HOSTS_SECONDS
        while missing := [host for host in hosts if not self._fs.exists(f"{folder}/tables-{host:05d}.json")]:
            if time.monotonic() > deadline:
                raise InputError(
                    f"host {missing[0]} and {len(missing) - 1} more have not written their tables to {self.path} in "
                    f"{HOSTS_SECONDS // 60} minutes; all hosts must write to one folder: use --runs gs://bucket/runs"
                )
            time.sleep(1)
            self._fs.invalidate_cache()

    # ---- restoring ----

    def _names(self) -> list[str]:
        if not self._fs.exists(self._root):
            return []
        return sorted(os.path.basename(entry.rstrip("/")) for entry in self._fs.ls(self._root, detail=False))

    def _steps(self) -> list[int]:
        return sorted(int(match[1]) for name in self._names() if (match := re.fullmatch(r"step_(\d+)", name)))

    def complete_steps(self) -> list[int]:
        """Steps whose checkpoint has its marker, in rising order."""
        return [step for step in self._steps() if self._fs.exists(f"{self._root}/step_{step:08d}/{COMPLETE}")]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> int:
        """Loads the newest complete checkpoint into a model and an optimizer (whose state exists) on the device.

        Returns:
            The step after which it was saved; 0 when there is none.
        Raises:
            InputError: the checkpoint is of another model or optimizer, with the names that differ; or the tables of
                every checkpoint are damaged.
        """
        damaged = False
        for step in reversed(self._steps()):
            files = self._read(step)
            if files is None:
                self._drop_marks(step)
                continue
            if self.tables is not None:
                whole = True
                try:
                    self._load_tables(step)
                except ValueError as error:
                    if isinstance(error, InputError):
                        raise
                    whole = False
                    self._warn(step, str(error))
                if not over_hosts(mesh, int(whole)).low:  # each host reads other pieces; all take the same checkpoint
                    damaged = True
                    self._drop_marks(step)
                    continue
            elif self._hosts(step):
                raise InputError(
                    f"the checkpoint {self.path}/step_{step:08d} has embedding tables, this model has none"
                )
            loaded = safetensors.torch.load(files[STATE])
            numbers = json.loads(files[NUMBERS])["numbers"]
            self._load(step, loaded, numbers, model, optimizer, mesh)
            return step
        if damaged:
            raise InputError(f"no checkpoint in {self.path} has whole tables; remove the folder to start anew")
        return 0

    def average(self, model: nn.Module, mesh: Any) -> list[int]:
        """Gives a model on the device the mean of the weights in the last `keep` checkpoints of steps that divide by
        `every`, the last step among them in any case (Vaswani et al. 2017, section 6.1).

        Returns:
            The steps.
        Raises:
            InputError: one of them is damaged, or the hosts of a pod see different ones.
        """
        self._fs.invalidate_cache()
        known = self.complete_steps()
        steps = sorted({*[step for step in known if step % self.every == 0], known[-1]})[-self.keep :]
        same_on_all_hosts(mesh, "the checkpoints to average (the sum of their steps)", sum(steps))
        sums: dict[str, Tensor] = {}
        for step in steps:
            files = self._read(step)
            if files is None:
                raise InputError(f"the checkpoint of step {step} in {self.path}, one of those to average, is damaged")
            loaded = safetensors.torch.load(files[STATE])
            for name, _ in model.named_parameters():
                weight = loaded[f"model.{name}"]
                sums[name] = sums[name] + weight.double() if name in sums else weight.double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(sums[name] / len(steps))
                if parameter.device.type == "xla":
                    replicate(parameter, mesh)
        return steps

    def _drop_marks(self, step: int) -> None:
        """A torn checkpoint may be written again: a host's mark in it must not pass for a new one. (The scripts compare
        the step to resume from on all hosts next, so no host saves before this is done.)"""
        if self.main_process and self.tables is not None:
            for path in self._fs.glob(f"{self._root}/step_{step:08d}/tables-*.json"):
                self._fs.rm(path)

    def table(self, step: int, name: str) -> Tensor:
        """Weight of one embedding table out of a checkpoint, [rows, dim], on the host; for exports.

        Raises:
            KeyError: there is no such table.
            ValueError: a file is damaged.
        """
        index = self._table_index(step)
        pieces = {key: shape for key, (_, _, shape, _) in index.items() if key.startswith(f"{name}/weight/")}
        if not pieces:
            raise KeyError(f"the checkpoint of step {step} has no table {name!r}")
        places = {key: [int(part) for part in key.split("/")[-2:]] for key in pieces}
        rows = max(places[key][0] + shape[0] for key, shape in pieces.items())
        columns = max(places[key][1] + shape[1] for key, shape in pieces.items())
        table = torch.full((rows, columns), float("nan"))
        for key, shape in pieces.items():
            row, column = places[key]
            table[row : row + shape[0], column : column + shape[1]] = self._read_piece(index, key)
        return table

    def _load_tables(self, step: int) -> None:
        index = self._table_index(step)
        try:
            self.tables.load_pieces(
                {key: shape for key, (_, _, shape, _) in index.items()}, lambda key: self._read_piece(index, key)
            )
        except InputError as error:
            raise InputError(
                f"the checkpoint {self.path}/step_{step:08d} is of another model: {error}. "
                "Use the settings that it was made with, or another --name"
            ) from None

    def _hosts(self, step: int) -> int:
        """How many hosts have written tables into a checkpoint; 0 where the model has none."""
        return json.loads(self._fs.cat_file(f"{self._root}/step_{step:08d}/{COMPLETE}")).get("hosts", 0)

    def _table_index(self, step: int) -> dict[str, tuple[str, int, list[int], int]]:
        """Piece -> (file, offset in it, shape, CRC-32), of all hosts' files."""
        folder = f"{self._root}/step_{step:08d}"
        index = {}
        for host in range(self._hosts(step)):
            name = f"{folder}/tables-{host:05d}"
            try:
                mark = json.loads(self._fs.cat_file(f"{name}.json"))
                with self._fs.open(f"{name}.safetensors", "rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(length)) if length < mark["bytes"] else {}
                if self._fs.size(f"{name}.safetensors") != mark["bytes"]:
                    raise ValueError("its size is not the one that was written")
                if header.keys() != mark["crc32"].keys():
                    raise ValueError("its header is not the one that was written")
                for key, entry in header.items():
                    index[key] = (
                        f"{name}.safetensors",
                        8 + length + entry["data_offsets"][0],
                        entry["shape"],
                        mark["crc32"][key],
                    )
            except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{os.path.basename(name)} is not whole: {error}") from None
        return index

    def _read_piece(self, index: dict[str, tuple[str, int, list[int], int]], key: str) -> Tensor:
        path, offset, shape, crc = index[key]
        with self._fs.open(path, "rb") as file:
            file.seek(offset)
            content = bytearray(file.read(4 * math.prod(shape)))
        if zlib.crc32(content) != crc:
            raise ValueError(f"{key} in {os.path.basename(path)} does not match its checksum")
        return torch.frombuffer(content, dtype=torch.float32).reshape(shape)

    def _read(self, step: int) -> dict[str, bytes] | None:
        folder = f"{self._root}/step_{step:08d}"
        try:
            marks = json.loads(self._fs.cat_file(f"{folder}/{COMPLETE}"))
            files = {}
            for name in (STATE, NUMBERS):
                mark = marks[name]
                content = self._fs.cat_file(f"{folder}/{name}")
                if len(content) != mark["bytes"] or zlib.crc32(content) != mark["crc32"]:
                    raise ValueError(f"{name} has {len(content)} bytes that do not match its checksum")
                files[name] = content
            return files
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            self._warn(step, "it was never finished" if isinstance(error, FileNotFoundError) else str(error))
            return None

    def _warn(self, step: int, reason: str) -> None:
        print(
            f"warning: skipping the torn checkpoint {self.path}/step_{step:08d}: {reason}", file=sys.stderr, flush=True
        )

    def _load(self, step, loaded, numbers, model, optimizer, mesh) -> None:
        tensors, expected_numbers = named_state(model, optimizer)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        found = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
        if shapes != found or numbers.keys() != expected_numbers.keys():
            lacking = sorted(shapes.keys() - found.keys() | expected_numbers.keys() - numbers.keys())
            extra = sorted(found.keys() - shapes.keys() | numbers.keys() - expected_numbers.keys())
            differing = [
                f"{n} {list(found[n])} instead of {list(shapes[n])}"
                for n in sorted(found)
                if shapes.get(n, found[n]) != found[n]
            ]
            kinds = {"it lacks": lacking, "it has besides": extra, "of another shape:": differing}
            parts = [f"{kind} {names[0]} and {len(names) - 1} more" for kind, names in kinds.items() if names]
            raise InputError(
                f"the checkpoint {self.path}/step_{step:08d} is of another model or optimizer: {'; '.join(parts)}. "
                "Use the settings that it was made with, or another --name"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[name])
                if tensor.device.type == "xla":
                    replicate(tensor, mesh)
        for parameter_name, parameter in model.named_parameters():
            for key in optimizer.state.get(parameter, {}):
                if f"optimizer.{parameter_name}.{key}" in numbers:
                    optimizer.state[parameter][key] = numbers[f"optimizer.{parameter_name}.{key}"]


def save_weights(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes one safetensors file to a path or URL, see `write_file`.

    Raises:
        InputError: the disk is full, or there is no access.
    """
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    write_file(path, content)


def write_file(path: str, content: bytes) -> None:
    """Writes a file to a path or URL, aside and renamed where the disk is local.

    Raises:
        InputError: the disk is full, or there is no access.
    """
    fs, root = fsspec.core.url_to_fs(path)
    # Not fsspec's transaction: it writes to the temporary folder, which may be another disk, and it would hold back
    # what another thread writes in the meantime.
    aside = f"{root}.writing" if _is_local(fs) else root
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
    """A weights file from a path or URL.

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


def write_folder(folder: str, write: Callable[[str], None]) -> None:
    """What `write` writes into a local folder, at a path or URL."""
    with tempfile.TemporaryDirectory() as local:
        write(local)
        for file in sorted(Path(local).rglob("*")):
            if file.is_file():
                write_file(f"{folder.rstrip('/')}/{file.relative_to(local)}", file.read_bytes())


def local_folder(folder: str) -> str:
    """The path itself; of a URL's files, a copy in a temporary folder."""
    fs, root = fsspec.core.url_to_fs(folder)
    if _is_local(fs):
        return folder
    copy = tempfile.mkdtemp()
    fs.get(f"{root.rstrip('/')}/", copy, recursive=True)
    return copy


def load_weights(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a safetensors file from a path or URL: (tensors by name, metadata).

    Raises:
        InputError: there is no such file, or it is not a safetensors file.
    """
    content = read_file(path)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{path} is not a safetensors file ({error}); pickled weights are not loaded: convert them"
        ) from None
    header_bytes = int.from_bytes(content[:8], "little")
    return tensors, json.loads(content[8 : 8 + header_bytes]).get("__metadata__", {})


def _is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _fsync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
