"""Checkpoints: exact resume, written off the training loop, to a folder or any fsspec URL (gs://…).

    checkpoints/step_00001200/state.safetensors   every parameter, buffer and optimizer tensor, by name
                              state.json          the step, and what of the optimizer is not a tensor
                              COMPLETE            size and CRC-32 of both, written last

A checkpoint without a COMPLETE that fits is torn: `restore` warns, skips it and takes the one before it. On a local
disk the folder is also written aside and renamed. Nothing is ever unpickled. Embedding tables that are sharded over
hosts add files of their own, see embedding/storage.py.
"""

import contextlib
import json
import os
import re
import sys
import threading
import zlib
from typing import Any, NamedTuple

import fsspec
import safetensors.torch
import torch
from torch import Tensor, nn

from errors import InputError
from train.common import device, files

STATE, NUMBERS, COMPLETE = "state.safetensors", "state.json", "COMPLETE"


def to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the host, those on a device in one transfer; waits for the steps that compute them."""
    return dict(zip(tensors, device.read([tensor.detach() for tensor in tensors.values()]), strict=True))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns every tensor that a step changes, by name ("model.…", "optimizer.<parameter>.<state>"), and the values of
    the optimizer's state that are not tensors. Parameters are taken as they are, not as a `state_dict` hook shows them.
    """
    tensors = {f"model.{name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    numbers: dict[str, Any] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            (tensors if torch.is_tensor(value) else numbers)[f"optimizer.{names[parameter]}.{key}"] = value
    return tensors, numbers


def _mark(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


class Saved(NamedTuple):
    """A checkpoint as it was read: see `named_state` for the first two; `hosts` counts those that wrote tables."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    hosts: int


def load_state(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    """Copies a checkpoint's dense state into a model and an optimizer; raises InputError with the first names or shapes
    that differ."""
    tensors, numbers = named_state(model, optimizer)
    expected = {name: list(tensor.shape) for name, tensor in tensors.items()} | dict.fromkeys(numbers, "a number")
    found = {name: list(tensor.shape) for name, tensor in saved.tensors.items()}
    found |= dict.fromkeys(saved.numbers, "a number")
    differing = [name for name in sorted(expected | found) if expected.get(name) != found.get(name)]
    if differing:
        first = [f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'missing')}" for name in differing]
        raise InputError(f"{'; '.join(first[:3])}; {len(differing)} in all")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved.tensors[name])
            if tensor.device.type != "cpu":
                device.replicate(tensor, mesh)
    for parameter_name, parameter in model.named_parameters():
        for key in optimizer.state.get(parameter, {}):
            if f"optimizer.{parameter_name}.{key}" in saved.numbers:
                optimizer.state[parameter][key] = saved.numbers[f"optimizer.{parameter_name}.{key}"]


class Checkpointer:
    """Saves and restores the training state below `path`.

    Args:
        path: folder or fsspec URL; created when needed.
        keep: how many complete checkpoints stay.
        main_process: False on the hosts of a pod that only read.
        tables: an `embedding.TableStorage`, where sharded tables belong to the state; every host writes its part.
        every: `keep` counts only steps that are multiples of it. Others (saved after an evaluation or by a signal) are
            removed when the next one is complete, so that what `averaging.average` takes does not depend on when a run
            was stopped.
    """

    def __init__(self, path: str, keep: int = 3, main_process: bool = True, tables: Any = None, every: int = 1):
        self.path = path.removeprefix("file://").rstrip("/")
        self.keep, self.main_process, self.tables, self.every = keep, main_process, tables, every
        self._fs, self._root = fsspec.core.url_to_fs(self.path)
        self._local = files.is_local(self._fs)
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        if main_process and self._local:
            for step in self._steps(".writing-"):  # left by a killed process
                self._fs.rm(self._place(step, ".writing-"), recursive=True)

    # ---- saving ----

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, error_type: type | None, *_) -> None:
        if error_type is None:
            self.wait()
        elif self._writer is not None:  # the error that ends the run is the one to show
            self._writer.join()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copies the state to the host, which is all that the training loop waits for, and writes it in the background.
        Raises the InputError of the save before this one, which names the checkpoint that is safe."""
        if not self.main_process and self.tables is None:
            return
        self.wait()
        tensors, numbers = named_state(model, optimizer) if self.main_process else ({}, {})
        pieces = self.tables.copy() if self.tables is not None else None
        arguments = (step, to_host(tensors), numbers, pieces)
        self._writer = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=False)
        self._writer.start()

    def wait(self) -> None:
        """Returns when the last save is on disk; raises the error that kept it from getting there."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the error of the last save, if it failed; costs nothing, so call it in every step."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], pieces: Any) -> None:
        """Writes one checkpoint and removes those that `keep` no longer covers; leaves an error in `_failure`."""
        # Only a local rename is atomic. Elsewhere the marker alone, written last, makes the files a checkpoint.
        target, folder = self._place(step), self._place(step, ".writing-" if self._local else "")
        try:
            self._fs.makedirs(folder, exist_ok=True)
            if self.tables is not None:
                self.tables.write(self._fs, folder, pieces)
                if not self.main_process:
                    return
                self.tables.wait(self._fs, folder)
            contents = {
                STATE: safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}),
                NUMBERS: json.dumps({"step": step, "numbers": numbers}).encode(),
            }
            marks: dict[str, Any] = {file: _mark(content) for file, content in contents.items()}
            marks["hosts"] = self.tables.hosts if self.tables is not None else 0
            for file, content in (contents | {COMPLETE: json.dumps(marks).encode()}).items():
                files.write_synced(self._fs, f"{folder}/{file}", content)
            if self._local:
                if os.path.isdir(target):  # a torn one of an earlier attempt
                    self._fs.rm(target, recursive=True)
                os.rename(folder, target)
                files.fsync(self._root)
            # A torn checkpoint of a later step may have its marker, but must not push this one out.
            known = [other for other in self.complete_steps() if other <= step]
            regular = [other for other in known if other % self.every == 0][-self.keep :]
            for old in set(known) - {step, *regular}:
                # Without its marker a half-deleted checkpoint is torn, not wrong.
                self._fs.rm(f"{self._place(old)}/{COMPLETE}")
                self._fs.rm(self._place(old), recursive=True)
        except OSError as error:
            known = "there is no complete one yet"
            with contextlib.suppress(OSError, IndexError):
                known = f"the one of step {self.complete_steps()[-1]} is complete and safe"
            self._failure = InputError(
                f"cannot write the checkpoint of step {step} to {self.path}: {error.strerror or error}; {known}"
                "; make room or access, then run the same command again: it resumes from there"
            )
        except Exception as error:
            self._failure = error

    # ---- restoring ----

    def _place(self, step: int, prefix: str = "") -> str:
        return f"{self._root}/{prefix}step_{step:08d}"

    def folder(self, step: int) -> str:
        """Returns the path or URL of a step's checkpoint."""
        return f"{self.path}/step_{step:08d}"

    def _steps(self, prefix: str = "") -> list[int]:
        entries = self._fs.ls(self._root, detail=False) if self._fs.exists(self._root) else []
        matches = [re.fullmatch(rf"{re.escape(prefix)}step_(\d+)", os.path.basename(e.rstrip("/"))) for e in entries]
        return sorted(int(match[1]) for match in matches if match)

    def complete_steps(self) -> list[int]:
        """Returns the steps whose checkpoint has its marker now, in rising order."""
        self._fs.invalidate_cache()
        return [step for step in self._steps() if self._fs.exists(f"{self._place(step)}/{COMPLETE}")]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> int:
        """Loads the newest complete checkpoint into a model and an optimizer (whose state exists) on the device, and
        returns the step after which it was saved; 0 when there is none. Raises InputError where it is of another model
        or optimizer, or the tables of every checkpoint are damaged."""
        damage = ""
        for step in reversed(self._steps()):
            saved, folder = self.read(step), self._place(step)
            try:
                if saved is not None:
                    if self.tables is None and saved.hosts:
                        raise InputError("it has embedding tables, this model has none")
                    damage = self.tables.load(self._fs, folder, mesh) if self.tables is not None else ""
                    if not damage:
                        load_state(saved, model, optimizer, mesh)
                        return step
                    self._warn(step, damage)
            except InputError as error:
                raise InputError(
                    f"the checkpoint {self.folder(step)} is of another model or optimizer: {error}. "
                    "Use the settings that it was made with, or another --name"
                ) from None
            if self.main_process and self.tables is not None:  # the checkpoint may be written again
                self.tables.drop_marks(self._fs, folder)
        if damage:
            raise InputError(f"no checkpoint in {self.path} has whole tables; remove the folder to start again")
        return 0

    def read(self, step: int) -> Saved | None:
        """Reads a checkpoint's dense state; returns None, with a warning, where it is torn."""
        try:
            marks = json.loads(self._fs.cat_file(f"{self._place(step)}/{COMPLETE}"))
            contents = {}
            for name in (STATE, NUMBERS):
                contents[name] = self._fs.cat_file(f"{self._place(step)}/{name}")
                if _mark(contents[name]) != marks[name]:
                    raise ValueError(f"{name} has {len(contents[name])} bytes that do not match its checksum")
            numbers = json.loads(contents[NUMBERS])["numbers"]
            return Saved(safetensors.torch.load(contents[STATE]), numbers, marks.get("hosts", 0))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            self._warn(step, "it was never finished" if isinstance(error, FileNotFoundError) else str(error))
            return None

    def _warn(self, step: int, reason: str) -> None:
        print(f"warning: skipping the torn checkpoint {self.folder(step)}: {reason}", file=sys.stderr, flush=True)
