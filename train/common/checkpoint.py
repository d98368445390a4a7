"""Checkpoints: exact resume, written off the training loop, to a folder or any fsspec URL.

    checkpoints/step_00001200/
        state.safetensors   every parameter, buffer and optimizer tensor, by name
        state.json          the step, what of the optimizer is not a tensor, and whether an
                            evaluation of this state follows
        COMPLETE            size and CRC-32 of both, written last
        metrics.json        that evaluation's metrics, added when it has ended

A checkpoint without a COMPLETE that fits is torn: `restore` warns, skips it and takes the one
before it. Nothing is ever unpickled. Embedding tables that are sharded over hosts add files of
their own, see embedding/storage.py.
"""

import contextlib
import json
import os
import re
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import nn

from errors import InputError
from train.common import device, files

STATE = "state.safetensors"
NUMBERS = "state.json"
COMPLETE = "COMPLETE"
METRICS = "metrics.json"

UNREADABLE = "cannot read the checkpoints in {}: {}; resume when they can be read"
OTHER_MODEL = (
    "the checkpoint {} is of another model or optimizer: {}. "
    "Use the settings it was made with, or another --name"
)


def to_host(values: dict[str, Any], layers: Any = None, is_needed: bool = True) -> dict[str, Any]:
    """Returns `values` with the tensors among them copied to the host, in one transfer.

    It waits for the steps that compute them.

    Args:
        layers: `Mesh.layers`, the LayerSharding of a model that is split over devices. All hosts of
            a pod must then call this together.
        is_needed: whether this host needs the values; else it gets {}.
    """
    tensors = {}
    for name, value in values.items():
        if torch.is_tensor(value):
            tensors[name] = value.detach()

    copies = []
    if layers is not None:
        copies = layers.to_host(list(tensors.values()), is_needed)
    elif is_needed:
        copies = device.read(list(tensors.values()))

    if not is_needed:
        return {}
    return {**values, **dict(zip(tensors, copies, strict=True))}


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what a step changes, tensors and numbers, by name.

    Names are "model.<parameter or buffer>" and "optimizer.<parameter>.<state>". Parameters are
    taken as they are, not as a `state_dict` hook shows them.
    """
    state = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"model.{name}"] = tensor

    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            state[f"optimizer.{names[parameter]}.{key}"] = value
    return state


def load_state(
    saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any
) -> None:
    """Copies a `named_state` into a model and an optimizer, whose state exists.

    It removes each tensor from `saved` once it is copied, so that the host holds few of them twice.

    Raises:
        InputError: names or shapes differ; it names the first that do, and nothing is copied.
    """
    state = named_state(model, optimizer)
    _check_same_shapes(_shapes(saved), _shapes(state))

    with torch.no_grad():
        for name, tensor in state.items():
            if torch.is_tensor(tensor):
                tensor.copy_(saved.pop(name))
                # Without an annotation the values would stay on the host until the first step. A
                # count of steps is there anyway.
                if tensor.device.type != "cpu":
                    device.annotate_placement(tensor, mesh)

    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not torch.is_tensor(value):
                optimizer.state[parameter][key] = saved[f"optimizer.{name}.{key}"]


def _shapes(state: dict[str, Any]) -> dict[str, list[int] | str]:
    """Returns the shape of each tensor of a state, and "a number" for anything else."""
    shapes: dict[str, list[int] | str] = {}
    for name, value in state.items():
        shapes[name] = list(value.shape) if torch.is_tensor(value) else "a number"
    return shapes


def _check_same_shapes(
    found: dict[str, list[int] | str], expected: dict[str, list[int] | str]
) -> None:
    """Raises InputError with the first three names whose shapes differ."""
    differences = []
    for name in sorted(expected | found):
        found_shape = found.get(name, "missing")
        expected_shape = expected.get(name, "missing")
        if found_shape != expected_shape:
            differences.append(f"{name} is {found_shape}, not {expected_shape}")
    if differences:
        raise InputError(f"{'; '.join(differences[:3])}; {len(differences)} in all")


def _pack_whole(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """Returns a safetensors file in one part."""
    return [safetensors.torch.save(tensors)]


def _checksum(parts: Sequence[Any]) -> dict[str, int]:
    """Returns the size and the CRC-32 of a file that consists of these bytes-like parts."""
    size = 0
    crc32 = 0
    for part in parts:
        size += len(part)
        crc32 = zlib.crc32(part, crc32)
    return {"bytes": size, "crc32": crc32}


@dataclass(frozen=True)
class _Saved:
    """What is read of a checkpoint.

    Attributes:
        state: a `named_state`.
        evaluation_follows: whether an evaluation of it was to follow. False for checkpoints of
            older versions, which evaluated before they saved.
    """

    state: dict[str, Any]
    evaluation_follows: bool


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores the training state below `path`, a folder or fsspec URL.

    Args:
        keep: how many complete checkpoints stay.
        main_process: whether this host writes the state and COMPLETE. The other hosts of a pod
            write their part of the tables, if there are any.
        tables: an `embedding.TableStorage`, where sharded tables belong to the state; every host
            writes its part.
        every: `keep` counts only checkpoints whose step is a multiple of it. The others, saved
            since an evaluation followed or a signal came, are deleted at the next save: which
            checkpoints train/transformer.py averages must not depend on when a run was stopped.
        layers: `Mesh.layers`, the LayerSharding of a model that is split over devices. It copies,
            packs and loads its state so that no host holds it twice.

    Attributes:
        evaluation_follows: whether an evaluation of the restored state was to follow its save.
    """

    def __init__(
        self,
        path: str,
        keep: int = 3,
        main_process: bool = True,
        tables: Any = None,
        every: int = 1,
        layers: Any = None,
    ):
        self.path = path.removeprefix("file://").rstrip("/")
        self.keep = keep
        self.main_process = main_process
        self.tables = tables
        self.every = every
        self.layers = layers
        self.evaluation_follows = False
        self._fs = fsspec.core.url_to_fs(self.path)[0]
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        # The write under way, or one that has ended and that `wait` has not checked yet.
        self._last: Future | None = None

    def __exit__(self, error_type: type | None, *_) -> None:
        """Waits for the last save; an error that ends the run already is the one to show."""
        if error_type is None:
            self.wait()
            return
        with contextlib.suppress(Exception):
            self.wait()

    # ---- saving ----------------------------------------------------------------------------------
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluates: bool = False,
        best: int = 0,
    ) -> None:
        """Copies the state to the host and starts writing it in the background.

        The training loop waits for the save before this one, if it is still being written, and for
        the copy.

        Args:
            evaluates: an evaluation of this state follows, whose metrics `add_metrics` adds.
            best: the step of a checkpoint that stays beside the last `keep`; 0: there is none. What
                says that it is the best one must be on disk before this call, which deletes the one
                that was the best before.

        Raises:
            InputError: the save before this one failed; it names the checkpoint that is safe.
        """
        self.wait()
        state = to_host(named_state(model, optimizer), self.layers, self.main_process)
        pieces = self.tables.copy() if self.tables is not None else None
        if self.main_process or self.tables is not None:
            self._last = self._writer.submit(self._write, step, state, pieces, evaluates, best)

    def add_metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        """Adds an evaluation's metrics to its step's checkpoint, in the background, when that is
        written."""
        if self.main_process:
            self._last = self._writer.submit(self._write_metrics, step, metrics, self._last)

    def wait(self) -> None:
        """Waits until the last save is on disk; raises its error, if it failed."""
        last = self._last
        self._last = None
        if last is not None:
            last.result()

    def raise_failure(self) -> None:
        """Raises the error of the last save, if it failed. It costs nothing: call it each step."""
        if self._last is not None and self._last.done():
            self.wait()

    def _write(
        self, step: int, state: dict[str, Any], pieces: Any, evaluates: bool, best: int
    ) -> None:
        """Writes one checkpoint and deletes those that `keep` no longer covers, but for the best.

        Args:
            pieces: of the sharded tables on this host, by name; None: there are none.
        """
        values = dict(state)
        if pieces is not None:
            values.update(pieces)
        self._check_finite(step, values)

        contents = self._contents(step, state, evaluates)
        checksums = {name: _checksum(parts) for name, parts in contents.items()}
        hosts_with_tables = self.tables.hosts if self.tables is not None else 0
        complete = {**checksums, "hosts": hosts_with_tables}
        contents[COMPLETE] = [json.dumps(complete).encode()]

        try:
            self._write_files(self.folder(step), contents, pieces)
            if self.main_process:
                self._delete_old(step, best)
        except (InputError, TypeError, AttributeError):  # the last two are bugs
            raise
        except Exception as error:  # every store has exceptions of its own
            raise InputError(
                f"cannot write the checkpoint of step {step} to {self.path}: "
                f"{files.reason(error)}; {self._what_is_safe()}; make room or access, "
                "then the same command resumes from the newest complete one, if any"
            ) from error

    def _check_finite(self, step: int, values: dict[str, Any]) -> None:
        """Raises InputError where a tensor has a number that is not finite."""
        for name, value in values.items():
            if torch.is_tensor(value) and not value.isfinite().all():
                raise InputError(
                    f"{name} is not finite at step {step}: the training diverged, "
                    f"so nothing is saved; {self._what_is_safe()}; "
                    "start a run of another --name with a lower --lr"
                )

    def _contents(self, step: int, state: dict[str, Any], evaluates: bool) -> dict[str, list[Any]]:
        """Returns the files of a checkpoint by name, each in parts, without COMPLETE."""
        tensors = {}
        numbers = {}
        for name, value in state.items():
            if torch.is_tensor(value):
                tensors[name] = value.contiguous()
            else:
                numbers[name] = value

        pack = self.layers.pack if self.layers is not None else _pack_whole
        record = {"step": step, "numbers": numbers, "evaluates": evaluates}
        return {STATE: pack(tensors), NUMBERS: [json.dumps(record).encode()]}

    def _write_files(self, folder: str, contents: dict[str, list[Any]], pieces: Any) -> None:
        """Writes a checkpoint's files, COMPLETE last, and waits until they are on the disk."""
        self._fs.makedirs(folder, exist_ok=True)
        if self.tables is not None:
            self.tables.write(self._fs, folder, pieces)
            if not self.main_process:
                return
            self.tables.wait(self._fs, folder)

        for name, parts in contents.items():
            files.write_synced(self._fs, f"{folder}/{name}", parts)
        if files.is_local(self._fs):
            files.fsync(folder)
            files.fsync(self.path)

    def _delete_old(self, step: int, best: int) -> None:
        """Deletes checkpoints before `step`, torn ones as well, but for the last `keep` and the one
        of the step `best`."""
        # Checkpoints of later steps are torn, or `restore` would have taken one of them. Such a
        # torn one may have a COMPLETE, which `complete_steps` does not compare with its files. So
        # later steps are left out here: none may be kept in place of this step's.
        regular = []
        for other in self.complete_steps():
            if other <= step and other % self.every == 0:
                regular.append(other)
        kept = [*regular[-self.keep :], best]

        for old in self._steps():
            if old < step and old not in kept:
                # COMPLETE goes first: a checkpoint that is only half deleted then counts as torn.
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(f"{self.folder(old)}/{COMPLETE}")
                self._fs.rm(self.folder(old), recursive=True)

    def _write_metrics(
        self, step: int, metrics: dict[str, float | None], before: Future | None
    ) -> None:
        """Writes metrics.json; warns where it cannot.

        Args:
            before: the write before this one. It has ended, since one thread writes; its error is
                raised again, so that the next `wait` raises it.
        """
        if before is not None:
            before.result()

        path = f"{self.folder(step)}/{METRICS}"
        record = {"step": step, "metrics": metrics}
        try:
            files.write_synced(self._fs, path, [json.dumps(record).encode()])
        except Exception as error:  # every store has exceptions of its own
            _warn(
                f"cannot write {path}: {files.reason(error)}; metrics.jsonl has them, "
                "and a resume from this checkpoint adds them again"
            )

    def _what_is_safe(self) -> str:
        """Returns which checkpoint is safe, for an error's sentence."""
        try:
            steps = self.complete_steps()
        except Exception:
            return "which earlier ones are complete cannot be read"
        if not steps:
            return "there is no complete one yet"
        return f"the one of step {steps[-1]} is complete and safe"

    # ---- which checkpoints there are -------------------------------------------------------------
    def folder(self, step: int) -> str:
        """Returns the path or URL of a step's checkpoint."""
        return f"{self.path}/step_{step:08d}"

    def complete_steps(self) -> list[int]:
        """Returns the steps whose checkpoint has its COMPLETE now, in rising order."""
        self._fs.invalidate_cache()
        return [step for step in self._steps() if COMPLETE in self._names(self.folder(step))]

    def _steps(self) -> list[int]:
        """Returns the steps of all checkpoints, torn ones as well, in rising order."""
        steps = []
        for name in self._names(self.path):
            match = re.fullmatch(r"step_(\d+)", name)
            if match:
                steps.append(int(match[1]))
        return sorted(steps)

    def _names(self, folder: str) -> list[str]:
        """Returns the names in a folder; [] where there is none.

        Not by `exists`, which takes any error of a store for a no.
        """
        try:
            entries = self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise InputError(UNREADABLE.format(self.path, files.reason(error))) from error
        return [os.path.basename(entry.rstrip("/")) for entry in entries]

    # ---- restoring -------------------------------------------------------------------------------
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> int:
        """Loads the newest complete checkpoint into a model and an optimizer, whose state exists.

        Returns:
            The step after which it was saved; 0 when there is none.

        Raises:
            InputError: it is of another model or optimizer; or no checkpoint is whole, and one of
                them has damaged tables.
        """
        damaged_tables = ""
        for step in reversed(self._steps()):
            saved = self._read(step)
            if saved is not None:
                damaged_tables = self._load(step, saved.state, model, optimizer, mesh)
                if not damaged_tables:
                    self.evaluation_follows = saved.evaluation_follows
                    return step
                self._warn_torn(step, damaged_tables)

            if self.main_process and self.tables is not None:
                # This step's checkpoint may be written again. The marks by which hosts say that
                # their tables are complete (embedding/storage.py) must not count then.
                self.tables.drop_marks(self._fs, self.folder(step))

        if damaged_tables:  # the model may have some of their numbers, so it cannot begin anew
            raise InputError(
                f"no checkpoint in {self.path} has whole tables; remove the folder to start again"
            )
        return 0

    def load(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any
    ) -> None:
        """Loads the checkpoint of a step, as `restore` does the newest one.

        On a pod all hosts call it together, after the main process has written the checkpoint.

        Raises:
            InputError: it is damaged, or not there; or it is of another model or optimizer.
        """
        device.wait_for_hosts(mesh)  # the main process has now written it
        self._fs.invalidate_cache()
        saved = self._read(step)
        is_whole = device.over_hosts(mesh, int(saved is not None)).low > 0
        damaged_tables = ""
        if is_whole:
            damaged_tables = self._load(step, saved.state, model, optimizer, mesh)
        if not is_whole or damaged_tables:
            raise InputError(self._best_is_lost(step, damaged_tables))

    def expect_best(self, step: int, mesh: Any) -> None:
        """Raises InputError where the checkpoint of a step, the best one, is not there or was cut,
        which its files' sizes show: `load` at the end of the training would find it.

        All hosts call it together.
        """
        is_there = not self.main_process or self._has_its_size(step)
        if device.over_hosts(mesh, int(is_there)).low == 0:
            raise InputError(self._best_is_lost(step))

    def _has_its_size(self, step: int) -> bool:
        """Returns whether a checkpoint is complete and its files are as long as COMPLETE says."""
        folder = self.folder(step)
        try:
            complete = json.loads(self._fs.cat_file(f"{folder}/{COMPLETE}"))
            for name in (STATE, NUMBERS):
                if self._fs.size(f"{folder}/{name}") != complete[name]["bytes"]:
                    return False
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
        except Exception as error:  # every store has exceptions of its own
            raise InputError(UNREADABLE.format(self.path, files.reason(error))) from error
        return True

    def _best_is_lost(self, step: int, reason: str = "") -> str:
        """Returns what is said where the best checkpoint cannot be loaded."""
        because = f" ({reason})" if reason else ""
        return (
            f"the checkpoint of step {step} in {self.path}, the best one, is damaged or "
            f"missing{because}; remove it and those of later steps: "
            "the same command then trains again from what is left"
        )

    def _load(
        self,
        step: int,
        saved: dict[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Any,
    ) -> str:
        """Loads sharded tables and a `named_state`; returns what is damaged in the tables."""
        folder = self.folder(step)
        try:
            if self.tables is not None:
                damage = self.tables.load(self._fs, folder, mesh)
                if damage:
                    return damage
            load_state(saved, model, optimizer, mesh)
            return ""
        except InputError as error:
            # Only errors of the store have another error as their cause (`_store_errors` of
            # embedding/storage.py). They say nothing about the model that the checkpoint is of.
            is_of_the_store = error.__cause__ is not None
            if is_of_the_store:
                raise
            raise InputError(OTHER_MODEL.format(folder, error)) from None

    def read(self, step: int) -> dict[str, Any] | None:
        """Returns a checkpoint's `named_state`; None, with a warning, where it is torn."""
        saved = self._read(step)
        return None if saved is None else saved.state

    def _read(self, step: int) -> _Saved | None:
        """Reads a checkpoint; returns None, with a warning, where it is torn."""
        folder = self.folder(step)
        try:
            complete = json.loads(self._fs.cat_file(f"{folder}/{COMPLETE}"))
            record = json.loads(self._read_checked(folder, NUMBERS, complete))
            if self.layers is not None:
                tensors = self.layers.load(self._fs, f"{folder}/{STATE}", complete[STATE])
            else:
                tensors = safetensors.torch.load(self._read_checked(folder, STATE, complete))
            evaluation_follows = record.get("evaluates", False)
            saved = _Saved(record["numbers"] | tensors, evaluation_follows)
        except FileNotFoundError:
            self._warn_torn(step, "it was never finished")
            return None
        except (ValueError, KeyError, TypeError) as error:
            self._warn_torn(step, str(error))
            return None
        except Exception as error:
            raise InputError(UNREADABLE.format(self.path, files.reason(error))) from error

        if self.tables is None and complete.get("hosts"):
            raise InputError(
                OTHER_MODEL.format(folder, "it has embedding tables, this model has none")
            )
        return saved

    def _read_checked(self, folder: str, name: str, complete: dict[str, Any]) -> bytes:
        """Returns a file of a checkpoint; raises ValueError where it is not what was written."""
        content = self._fs.cat_file(f"{folder}/{name}")
        if _checksum([content]) != complete[name]:
            raise ValueError(f"{name} has {len(content)} bytes that do not match its checksum")
        return content

    def _warn_torn(self, step: int, reason: str) -> None:
        _warn(f"skipping the torn checkpoint {self.folder(step)}: {reason}")


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)
