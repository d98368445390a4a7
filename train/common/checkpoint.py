"""Checkpoints: exact resume, written off the training loop, to a folder or any fsspec URL (gs://…).

    checkpoints/step_00001200/state.safetensors   every parameter, buffer and optimizer tensor, by name
                              state.json          the step, what of the optimizer is not a tensor, and whether an
                                                  evaluation of this state follows
                              COMPLETE            size and CRC-32 of both, written last
                              metrics.json        that evaluation's metrics, added when it has ended

A checkpoint without a COMPLETE that fits is torn: `restore` warns, skips it and takes the one before it. Nothing is
ever unpickled. Embedding tables that are sharded over hosts add files of their own, see embedding/storage.py.
"""

import contextlib
import functools
import json
import os
import re
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import nn

from errors import InputError
from train.common import device, files

STATE, NUMBERS, COMPLETE, METRICS = "state.safetensors", "state.json", "COMPLETE", "metrics.json"
UNREADABLE = "cannot read the checkpoints in {}: {}; resume when they can be read"
OTHER = "the checkpoint {} is of another model or optimizer: {}. Use the settings it was made with, or another --name"


def to_host(values: dict[str, Any], layers: Any = None, keep: bool = True) -> dict[str, Any]:
    """Copies the tensors among `values` to the host in one transfer; waits for the steps that compute them. `layers`: a
    mesh's. Where it has them, all hosts of a pod call this together, and those that do not `keep` the values get {}."""
    tensors = {name: value.detach() for name, value in values.items() if torch.is_tensor(value)}
    read = layers.read([*tensors.values()], keep) if layers else device.read([*tensors.values()]) if keep else []
    return {**values, **dict(zip(tensors, read, strict=True))} if keep else {}


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what a step changes, tensors and numbers, by name ("model.…", "optimizer.<parameter>.<state>").
    Parameters are taken as they are, not as a `state_dict` hook shows them."""
    state = {f"model.{name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        state |= {f"optimizer.{names[parameter]}.{key}": value for key, value in values.items()}
    return state


def _mark(*parts: Any) -> dict[str, int]:
    return {"bytes": sum(map(len, parts)), "crc32": functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)}


def load_state(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    """Copies a `named_state` into a model and an optimizer; raises InputError with the first that differ."""
    state = named_state(model, optimizer)
    expected, found = (
        {name: list(value.shape) if torch.is_tensor(value) else "a number" for name, value in each.items()}
        for each in (state, saved)
    )
    differing = [name for name in sorted(expected | found) if expected.get(name) != found.get(name)]
    if differing:
        first = [f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'missing')}" for name in differing]
        raise InputError(f"{'; '.join(first[:3])}; {len(differing)} in all")
    with torch.no_grad():
        for name, tensor in state.items():
            if torch.is_tensor(tensor):
                tensor.copy_(saved.pop(name))  # which the host then holds no longer
                if tensor.device.type != "cpu":
                    device.replicate(tensor, mesh)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not torch.is_tensor(value):
                optimizer.state[parameter][key] = saved[f"optimizer.{name}.{key}"]


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores the training state below `path`, a folder or fsspec URL.

    Args:
        keep: how many complete checkpoints stay.
        main_process: False on the hosts of a pod that only read.
        tables: an `embedding.TableStorage`, where sharded tables belong to the state; every host writes its part.
        every: `keep` counts only steps that are multiples of it. Others (saved after an evaluation or by a signal) go
            with the next one, so that which ones train/transformer.py averages does not depend on when a run was
            stopped.
        layers: of a mesh over which the state is cut: no host then holds it twice.
    `evaluates` tells of the checkpoint that was restored whether an evaluation of its state was to follow. One of an
    older version says no: its evaluation came first.
    """

    def __init__(self, path: str, keep=3, main_process=True, tables: Any = None, every: int = 1, layers: Any = None):
        self.path, self.layers = path.removeprefix("file://").rstrip("/"), layers
        self.keep, self.main_process, self.tables, self.every = keep, main_process, tables, every
        self._fs = fsspec.core.url_to_fs(self.path)[0]
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self.evaluates = False
        self._last: Future | None = None  # the last save, until somebody has seen how it ended

    def __exit__(self, error_type: type | None, *_) -> None:
        with contextlib.suppress(*(() if error_type is None else (Exception,))):  # the first error is the one to show
            self.wait()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, evaluates: bool = False) -> None:
        """Copies the state to the host, which is all that the training loop waits for, and writes it in the background.
        Raises the InputError of the save before this one, which names the checkpoint that is safe.

        `evaluates`: an evaluation of this state follows, whose metrics `add_metrics` adds.
        """
        self.wait()
        state = to_host(named_state(model, optimizer), self.layers, self.main_process)
        pieces = self.tables.copy() if self.tables is not None else None
        if self.main_process or self.tables is not None:
            self._last = self._writer.submit(self._write, step, state, pieces, evaluates)

    def add_metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        """Adds the metrics of an evaluation to the checkpoint of its step, in the background, once that is written."""
        if self.main_process:
            self._last = self._writer.submit(self._write_metrics, step, metrics, self._last)

    def _write_metrics(self, step: int, metrics: dict[str, float | None], saving: Future | None) -> None:
        if saving is not None:
            saving.result()  # whose error is to be seen by the next `wait`
        path = f"{self.folder(step)}/{METRICS}"
        try:
            files.write_synced(self._fs, path, [json.dumps({"step": step, "metrics": metrics}).encode()])
        except Exception as error:  # every store has exceptions of its own
            again = "metrics.jsonl has them, and a resume from this checkpoint adds them again"
            print(f"warning: cannot write {path}: {files.reason(error)}; {again}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Returns when the last save is on disk; raises the error that kept it from getting there."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def raise_failure(self) -> None:
        """Raises the error of the last save, if it failed; costs nothing, so call it in every step."""
        if self._last is not None and self._last.done():
            self.wait()

    def _write(self, step: int, state: dict[str, Any], pieces: Any, evaluates: bool = False) -> None:
        """Writes one checkpoint and removes those that `keep` no longer covers, the torn ones before it too."""
        folder = self.folder(step)
        for name, value in (state | (pieces or {})).items():
            if torch.is_tensor(value) and not value.isfinite().all():
                diverged = f"{name} is not finite at step {step}: the training diverged, so nothing is saved"
                raise InputError(f"{diverged}; {self._known()}; start a run of another --name with a lower --lr")
        tensors = {name: value.contiguous() for name, value in state.items() if torch.is_tensor(value)}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        parts = self.layers.pack(tensors) if self.layers else [safetensors.torch.save(tensors)]
        record = {"step": step, "numbers": numbers, "evaluates": evaluates}
        contents = {STATE: parts, NUMBERS: [json.dumps(record).encode()]}
        marks = {file: _mark(*parts) for file, parts in contents.items()}
        marks |= {"hosts": self.tables.hosts if self.tables else 0}
        try:
            self._fs.makedirs(folder, exist_ok=True)
            if self.tables is not None:
                self.tables.write(self._fs, folder, pieces)
                if not self.main_process:
                    return
                self.tables.wait(self._fs, folder)
            for file, parts in (contents | {COMPLETE: [json.dumps(marks).encode()]}).items():
                files.write_synced(self._fs, f"{folder}/{file}", parts)
            for place in (folder, self.path) if files.is_local(self._fs) else ():
                files.fsync(place)
            # A torn checkpoint of a later step may have its marker, but must not push this one out.
            regular = [other for other in self.complete_steps() if other <= step and other % self.every == 0]
            for old in self._steps():
                if old < step and old not in regular[-self.keep :]:
                    with contextlib.suppress(FileNotFoundError):  # without its marker a half-deleted one is torn
                        self._fs.rm(f"{self.folder(old)}/{COMPLETE}")
                    self._fs.rm(self.folder(old), recursive=True)
        except (InputError, TypeError, AttributeError):  # the last two are bugs
            raise
        except Exception as error:  # every store has exceptions of its own
            failed = f"cannot write the checkpoint of step {step} to {self.path}: {files.reason(error)}"
            remedy = "make room or access, then the same command resumes from the newest complete one, if any"
            raise InputError(f"{failed}; {self._known()}; {remedy}") from error

    def _known(self) -> str:
        with contextlib.suppress(Exception):
            steps = self.complete_steps()
            return f"the one of step {steps[-1]} is complete and safe" if steps else "there is no complete one yet"
        return "which earlier ones are complete cannot be read"

    def folder(self, step: int) -> str:
        """Returns the path or URL of a step's checkpoint."""
        return f"{self.path}/step_{step:08d}"

    def _names(self, folder: str) -> list[str]:
        try:  # not `exists`, which takes any error for a no
            return [os.path.basename(entry.rstrip("/")) for entry in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:
            raise InputError(UNREADABLE.format(self.path, files.reason(error))) from error

    def _steps(self) -> list[int]:
        matches = [re.fullmatch(r"step_(\d+)", name) for name in self._names(self.path)]
        return sorted(int(match[1]) for match in matches if match)

    def complete_steps(self) -> list[int]:
        """Returns the steps whose checkpoint has its marker now, in rising order."""
        self._fs.invalidate_cache()
        return [step for step in self._steps() if COMPLETE in self._names(self.folder(step))]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> int:
        """Loads the newest complete checkpoint into a model and an optimizer (whose state exists) on the device, and
        returns the step after which it was saved; 0 when there is none. Raises InputError where it is of another model
        or optimizer, or the tables of every checkpoint are damaged."""
        damage = ""
        for step in reversed(self._steps()):
            folder, saved = self.folder(step), self.read(step)
            try:
                if saved is not None:
                    damage = self.tables.load(self._fs, folder, mesh) if self.tables is not None else ""
                    if not damage:
                        load_state(saved, model, optimizer, mesh)
                        return step
                    self._warn(step, damage)
            except InputError as error:
                if error.__cause__ is not None:  # the store's, which says nothing of what it holds
                    raise
                raise InputError(OTHER.format(folder, error)) from None
            if self.main_process and self.tables is not None:  # the checkpoint may be written again
                self.tables.drop_marks(self._fs, folder)
        if damage:
            raise InputError(f"no checkpoint in {self.path} has whole tables; remove the folder to start again")
        return 0

    def read(self, step: int) -> dict[str, Any] | None:
        """Reads a checkpoint's `named_state`; returns None, with a warning, where it is torn."""
        try:
            marks = json.loads(self._fs.cat_file(f"{self.folder(step)}/{COMPLETE}"))
            contents, path, load = {}, f"{self.folder(step)}/", self.layers and self.layers.load
            for name in (NUMBERS,) if load else (NUMBERS, STATE):
                contents[name] = self._fs.cat_file(path + name)
                if _mark(contents[name]) != marks[name]:
                    raise ValueError(f"{name} has {len(contents[name])} bytes that do not match its checksum")
            record = json.loads(contents[NUMBERS])
            self.evaluates, state = record.get("evaluates", False), record["numbers"]
            state |= load(self._fs, path + STATE, marks[STATE]) if load else safetensors.torch.load(contents[STATE])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            self._warn(step, "it was never finished" if isinstance(error, FileNotFoundError) else str(error))
            return None
        except Exception as error:
            raise InputError(UNREADABLE.format(self.path, files.reason(error))) from error
        if self.tables is None and marks.get("hosts"):
            raise InputError(OTHER.format(self.folder(step), "it has embedding tables, this model has none"))
        return state

    def _warn(self, step: int, reason: str) -> None:
        print(f"warning: skipping the torn checkpoint {self.folder(step)}: {reason}", file=sys.stderr, flush=True)
