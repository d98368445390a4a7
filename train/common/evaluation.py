"""Evaluates a finished run again, on its own data or on other data: --evaluate runs/x.

    def main(config):
        config = validate(resolve_config(config, EVALUATE_FLAGS))    # with --evaluate: the run's
        mesh = device.setup(…)
        if config.evaluate:
            return evaluate_run(config, mesh)    # its metrics, by what its export has

Nothing is trained. The network, the task and all that changes a number are the run's; the result
is a file in runs/x/evaluations, beside those of other evaluations. A script's Config has two fields
for it:

    evaluate    the folder or URL of the run; "": trains
    split       of the data, to evaluate on: train, valid or test; "": as in training
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import fsspec

from errors import InputError
from train.common import cli, files
from train.common.mesh import Layout, Mesh
from train.common.metrics import finite, format_number
from train.common.run_folder import OLDER, now, start_record, to_json

FIELDS = ("evaluate", "split")  # of a Config; a training has their defaults
# Flags that every script may be given with --evaluate: what is evaluated, and where it is computed.
FLAGS = (*FIELDS, "data", "device", "workers", "strict", "safe_forms")
FLAGS += tuple(field.name for field in fields(Layout))
FOLDER = "evaluations"  # in the folder of a run
OF_TIME = ("evaluated_at", "time", "command")  # in the file of an evaluation
USUAL = "usual"  # the split of an evaluation without --split, in the name of its file


def resolve_config(
    config: Any, flags: Sequence[str] = (), removed_fields: Sequence[str] = ()
) -> Any:
    """Returns the config that `main` works with: for a training the given one itself; with
    --evaluate that of its run, changed by the flags that may be given with --evaluate.

    Args:
        flags: of the script, that may be given with --evaluate beside FLAGS.
        removed_fields: that config.json of an old run may have, and that Config has no more.
    Raises:
        InputError: --split without --evaluate; there is no such run, or it is not finished; a flag
            is given with another value than the run's.
    """
    if not config.evaluate:
        if config.split:
            raise InputError(
                f"--split is {config.split}; it is for --evaluate: what a training evaluates on, "
                "the names of files and folders say"
            )
        return config

    run = FinishedRun(config.evaluate)
    own = run.config(type(config), removed_fields)
    own_values = cli.flat(own)
    values = cli.flat(config)
    changes = {}
    # Given on the command line; or, by a caller in Python, with another value than the default.
    for name in sorted(cli.given(config) - {"evaluate"}):
        flag = f"--{name.replace('_', '-')}"
        if name not in values:  # a flag of train/common/watch
            raise InputError(f"{flag} is for a training, and --evaluate trains nothing: drop it")
        if name in FLAGS or name in flags:
            changes[name] = values[name]
        elif values[name] != own_values[name]:
            raise InputError(
                f"{flag} is {values[name]}; {run.path} was trained with {own_values[name]}, "
                f"which counts in an evaluation: leave {flag} out"
            )
    return _changed(own, changes)


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """Returns a dataclass with other values of the fields in it, or in the dataclasses in it."""
    values = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            values[field.name] = _changed(value, changes)
        elif field.name in changes:
            values[field.name] = changes[field.name]
    return replace(config, **values)


class FinishedRun:
    """A finished run, to be evaluated.

    Attributes:
        path: its folder or URL.
        stored: its config as config.json has it.
    Raises:
        InputError: there is none, or it has no export.
    """

    def __init__(self, path: str):
        self._source = ""  # what is evaluated: `announce` sets it, `record` writes it
        self.path = os.path.expanduser(path.removeprefix("file://")).rstrip("/")
        content = self._read("config.json")
        if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
            raise InputError(
                f"{path} is no run: it has no config.json as a run writes it; "
                "give the folder of a finished run, such as runs/<name>, and not its export"
            )
        self.stored = content["config"]
        if self._read("summary.json") is None:
            raise InputError(
                f"{path} is not finished, so it has no export to evaluate; the command that "
                f"started it resumes it to its end: {_last_command(content)}"
            )
        self._export_url = f"{self.path}/export"
        if not files.exists(self._export_url):
            raise InputError(
                f"{path} has no export, which its last step wrote; copy the whole folder of the run"
            )

    def local_export(self) -> str:
        """Returns a local path of the run's export; one at a URL is copied."""
        return files.local_folder(self._export_url)

    def config(self, kind: type, removed_fields: Sequence[str] = ()) -> Any:
        """Returns the run's config as a dataclass `kind`, with `evaluate` set.

        A field that an older version did not have is the default, or as OLDER says. Raises
        InputError for a run of another script.

        Args:
            removed_fields: see `resolve_config`.
        """
        defaults = kind()
        known = {field.name for field in fields(kind)}
        lacking = {name: value for name, value in OLDER.items() if name in known}
        unknown = sorted(self.stored.keys() - known - set(removed_fields))
        if unknown:
            raise InputError(
                f"{self.path} was trained with {', '.join(unknown[:5])}, which this script does "
                "not have; evaluate it with the script, and the version, that trained it"
            )
        restored = _restored(defaults, lacking | self.stored)
        return replace(restored, evaluate=self.path, split="")

    def owns(self, data: str) -> bool:
        """Returns whether this is the data that the run was trained on, by its name."""
        return _place(data) == _place(self.stored.get("data", ""))

    def announce(self, mesh: Mesh, data: str, what: str, *datasets: Any) -> None:
        """Prints the first line: what is evaluated, on which devices. Call it before `record`.

        Args:
            datasets: what is read of the data. The line has the `source` of those that have one;
                `notes` follow.
        """
        sources = [getattr(dataset, "source", "") for dataset in datasets]
        self._source = ", ".join(dict.fromkeys(filter(None, sources)))
        of = f" ({self._source})" if self._source else ""
        lines = [
            f"evaluating {self.path} on {data}{of}: {what}, "
            f"on {mesh.num_devices} {mesh.kind} device(s)"
        ]
        for dataset in datasets:
            lines += getattr(dataset, "notes", [])
        if mesh.main_process:
            print("\n".join(lines), flush=True)

    def record(
        self, config: Any, mesh: Mesh, examples: int, metrics: dict[str, float]
    ) -> dict[str, float]:
        """Prints the metrics and writes them into a file of the run; returns them.

        Args:
            config: see `resolve_config`.
            examples: how many were evaluated.
        """
        if not mesh.main_process:
            return metrics

        split = config.split or USUAL
        words = [f"{name} {format_number(value)}" for name, value in metrics.items()]
        print("  ".join(["evaluation:", *words]), flush=True)
        devices = {"kind": mesh.kind, "devices": mesh.num_devices, "hosts": mesh.process_count}
        content = {
            "data": config.data,
            "split": split,
            "source": self._source,
            "examples": examples,
            "metrics": finite(metrics),
            "changed": self._changes(config),
            "evaluated_at": now(),
            **start_record(devices),
        }
        with self._alone():
            path = self._free_path(content)
            files.write_file(path, to_json(content, indent=2))
        print(path, flush=True)
        return metrics

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, no other process chooses the name of a file of an evaluation of this run. A store
        has no locks, and a folder that cannot be locked is not."""
        fs, root = fsspec.core.url_to_fs(self.path)
        with contextlib.ExitStack() as held:
            if files.is_local(fs):
                with contextlib.suppress(OSError):  # what cannot be written, the writing says
                    os.makedirs(f"{root}/{FOLDER}", exist_ok=True)
                    descriptor = os.open(f"{root}/{FOLDER}", os.O_RDONLY)
                    held.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def _changes(self, config: Any) -> dict[str, Any]:
        """Returns what the flags have changed of the run's own settings."""
        # Whatever fields the run has: `resolve_config` has checked them.
        own = cli.flat(self.config(type(config), removed_fields=tuple(self.stored)))
        changes = {}
        for name, value in cli.flat(config).items():
            if name not in (*FIELDS, "data") and value != own[name]:
                changes[name] = value
        return changes

    def _free_path(self, content: dict[str, Any]) -> str:
        """Returns the path of the file for an evaluation of this content: a new one, or that of an
        evaluation that differs from it in nothing but when it was."""
        last = content["data"].partition("?")[0].rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^\w.-]+", "-", last) or "data"
        wanted = _without_time(json.loads(to_json(content)))
        number = 1
        while True:
            numbered = name if number == 1 else f"{name}-{number}"
            file = f"{FOLDER}/{numbered}-{content['split']}.json"
            found = self._read(file)
            if found is None or _without_time(found) == wanted:
                return f"{self.path}/{file}"
            number += 1

    def _read(self, name: str) -> Any:
        """Returns the content of a JSON file of the run; None where there is none."""
        path = f"{self.path}/{name}"
        try:
            with fsspec.open(path, "rb") as file:
                return json.loads(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}; copy the run again") from error
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot read {path}: {files.reason(error)}") from error


def _without_time(content: Any) -> Any:
    """Returns what is compared of the files of two evaluations: what was measured, of what, how,
    and where."""
    if not isinstance(content, dict):
        return content
    return {name: value for name, value in content.items() if name not in OF_TIME}


def _restored(defaults: Any, stored: dict[str, Any]) -> Any:
    """Returns a dataclass with the values that JSON has brought back; those it lacks are the
    defaults."""
    values = {}
    for field in fields(defaults):
        if field.name not in stored:
            continue
        value = stored[field.name]
        default = getattr(defaults, field.name)
        if is_dataclass(default):
            value = _restored(default, value)
        elif isinstance(value, list):  # no field is one
            value = tuple(value)
        elif isinstance(value, str) and float in (field.type, *get_args(field.type)):
            value = float(value)  # "inf", which JSON has no number for
        values[field.name] = value
    return replace(defaults, **values)


def _place(data: str) -> str:
    """Returns one name for the same data: of a local path the real path."""
    if "://" in data or not os.path.exists(os.path.expanduser(data)):
        return data.rstrip("/")
    return os.path.realpath(os.path.expanduser(data))


def _last_command(content: dict[str, Any]) -> str:
    """Returns the command of a run's last start."""
    starts = content.get("starts") or [{}]
    return starts[-1].get("command", "make train …")
