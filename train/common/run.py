"""The record of a run: its folder, its lines on the terminal, its curves.

runs/<name>/ (a local folder, or a URL such as gs://bucket/runs) holds
    config.json    the script's Config; for each start: versions, devices, git commit, command line, time
    metrics.jsonl  one JSON object a line: {"step": 120, "loss": 1.25, "lr": 0.05, "timing": {...}}; an evaluation's
                   metrics are named eval/...; what a resumed run repeats bit for bit is outside "timing"
    tb/            the same numbers as TensorBoard events
    curves.png     loss, learning rate and evaluation metrics over the steps
    summary.json   written last: a run is finished when, and only when, it has one
"""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import torch

from errors import InputError
from train.common.curves import draw_curves, format_number

PACKAGES = ("torch", "torch_xla", "torchvision", "libtpu", "numpy", "timm", "datasets", "transformers", "safetensors")
DRAW_EVERY = 60  # seconds between two drawings of curves.png
SEEN_SECONDS = 60  # in which other hosts see what the main process writes: NFS may remember that there was nothing


class Run:
    """One training run: finds or chooses its folder, and writes everything that is kept about it.

    config: a dataclass with the fields `runs` (root folder or fsspec URL) and `name` ("" = the first of default_name,
        default_name-2, … that is new, or unfinished with the same config).
    free: fields that do not change the numbers, so a resumed run may differ in them.
    main_process: False on the other hosts of a pod: nothing is printed or written, but values are read and checked at
        the same points, so that all hosts run the same graphs and stop together.
    total_steps: for the progress display; may be set later.

    `path` is the run's folder or URL. `resumed`: an unfinished run with this config is there, so `resume_at` must be
    called. `finished`: nothing is left to train, `summary` holds the results. InputError: the folder cannot be used.
    """

    def __init__(
        self,
        config: Any,
        default_name: str,
        headline: str = "",
        devices: dict[str, Any] | None = None,
        main_process: bool = True,
        free: Sequence[str] = (),
        total_steps: int | None = None,
        unit: str = "examples",
    ) -> None:
        self.total_steps, self._main, self._unit = total_steps, main_process, unit
        self._bar = self._metrics = self._tensorboard = self._lock = None
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._uses_xla = self._failed = self._uploaded = False
        self._step, self._drawn = 0, -math.inf
        self._started, self._pause_started, self._paused = time.monotonic(), None, 0.0
        self._elapsed_before = self._training_before = 0.0  # seconds in earlier parts of a resumed run
        self._rate_start: tuple[float, float] | None = None  # examples and training seconds at the last log call
        self._root = os.path.expanduser(config.runs.removeprefix("file://")).rstrip("/") or "/"
        self._remote = "://" in self._root
        try:
            self._files = fsspec.core.url_to_fs(self._root)[0]
        except (ImportError, ValueError) as error:
            raise InputError(f"cannot use --runs {config.runs}: {error}") from error
        self._files.invalidate_cache()

        if headline:
            self.message(headline)
        fields = json.loads(_json(dataclasses.asdict(config)))
        self.name, stored, self.summary, reason = self._choose(fields, default_name, {"runs", "name", *free})
        self.path = os.path.join(self._root, self.name)
        self.finished = self._closed = self.summary is not None
        self.resumed = stored is not None and not self.finished
        if self.finished:
            self.message(f"{self.path} is finished, nothing to train; another --name trains again")
            return
        self.message(f"{'resuming the unfinished run' if self.resumed else 'new run'} {self.path}{reason}")
        if main_process:
            self._open(stored or {"config": fields, "starts": []}, devices)

    def _choose(self, fields: dict, default_name: str, free: set[str]) -> tuple[str, dict | None, dict | None, str]:
        """Name, config.json, summary.json (None where absent), and why a number was added to the name."""
        if "/" in fields["name"] or fields["name"] in (".", ".."):
            raise InputError(f"--name {fields['name']} is not the name of one folder; use --runs for the root folder")
        reason = ""
        for number in itertools.count(1):
            name = fields["name"] or (default_name if number == 1 else f"{default_name}-{number}")
            path = os.path.join(self._root, name)
            stored, summary = self._read_json(f"{path}/config.json", "config"), None
            changed = []
            if stored is not None:
                old, summary = stored["config"], self._read_json(f"{path}/summary.json", "metrics")
                both = {key: (old.get(key, "absent"), fields.get(key, "absent")) for key in [*fields, *old]}
                changed = [key for key, (was, now) in both.items() if was != now and key not in free]
            if fields["name"] and changed:
                values = ", ".join(f"{key} was {both[key][0]}, now {both[key][1]}" for key in changed)
                raise InputError(
                    f"{path} was started with other values ({values}); use another --name or the old values"
                )
            if fields["name"] or not (changed or summary):
                return name, stored, summary, reason
            reason = f" ({name} {'was trained with another ' + ', '.join(changed) if changed else 'is finished'})"

    def _open(self, stored: dict, devices: dict[str, Any] | None) -> None:
        """Creates and locks the run's folder (for a URL: a folder of this machine), and writes config.json."""
        self._folder = self.path
        try:
            if self._remote:
                self._folder = tempfile.mkdtemp(prefix=f"{self.name}-")
            else:
                os.makedirs(self._folder, exist_ok=True)
                self._lock = open(os.path.join(self._folder, ".lock"), "a+")  # noqa: SIM115 - held as long as the run
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it, even after kill -9
                self._lock.truncate(0)
                self._lock.write(str(os.getpid()))
                self._lock.flush()
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read()
            raise InputError(f"{self.path} is being trained by process {owner}; use another --name") from error
        except OSError as error:
            raise self._unwritable(self._folder, error) from error
        starts = [*stored.get("starts", []), _start_record(devices)]
        self._write("config.json", _json({**stored, "starts": starts}, indent=2))
        self.upload()

    def check_hosts(self, mesh: Any) -> None:
        """Makes sure that all hosts of a pod have the same run before they train: each must see the config.json that
        the main process has just written. Call it on every host, first of all; with one host it does nothing.

        Raises:
            InputError: on every host; they have folders of their own, or chose different ones.
        """
        if mesh.process_count == 1:
            return
        from train.common.device import over_hosts

        expected = over_hosts(mesh, self._mark() if self._main else 0).high
        deadline = time.monotonic() + SEEN_SECONDS
        while self._mark() != expected and time.monotonic() < deadline:
            time.sleep(1)
            self._files.invalidate_cache()
        if not over_hosts(mesh, int(self._mark() == expected)).low:
            raise InputError(
                f"the {mesh.process_count} hosts do not see the same run in {self.path}: what the main process wrote "
                "there is not there on all of them; give a folder that all hosts share, such as --runs gs://bucket/runs"
            )

    def _mark(self) -> int:
        """Of config.json as this host sees it, and of whether the run is finished."""
        with contextlib.suppress(InputError):  # a host that failed here alone would leave the others waiting
            return 2 * zlib.crc32(self._read(f"{self.path}/config.json") or b"") + self.finished
        return -1

    def resume_at(self, step: int) -> None:
        """Goes on after `step`: drops what metrics.jsonl says of later steps, and a last line torn by a kill."""
        self._step, kept = step, []
        if not self._main:
            return
        file = f"{self.path}/metrics.jsonl"
        for number, line in enumerate((self._read(file) or b"").splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["step"] <= step:
                    kept.append(line)
                    timing = record["timing"]
                    self._elapsed_before, self._training_before = timing["elapsed"], timing["training"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"line {number} of {file} is damaged; remove it or use another --name") from error
        self._write("metrics.jsonl", b"".join(kept))
        self._open_metrics(purge_step=step + 1)
        self.message(f"resuming after step {step}")

    def log(self, step: int, *, examples: float | None = None, input_wait: float | None = None, **metrics: Any) -> None:
        """Records training metrics: numbers, or 0-d tensors on any device, which this call does not read.

        XLA tensors are read by a step closure, all in one transfer, right after the next torch_xla.sync(); until then
        they must not be changed in place. A loss that is not finite raises an InputError there, which stops the run.

        examples: examples (or what `unit` names) trained so far, in all. Their growth between two calls over the time
            between them, without pauses, is the speed. A process's first call only starts that clock: make it after the
            first step, and the compilation is not counted.
        input_wait: share of the time, 0 to 1, that the loop waited for input.
        """
        values = {"examples": examples, "input_wait": input_wait, **metrics}
        self._pending.append((step, {key: value for key, value in values.items() if value is not None}))
        if any(_is_xla(value) for value in values.values()):
            import torch_xla.core.xla_model as xm

            self._uses_xla = True
            xm.add_step_closure(self._write_pending)
        elif len(self._pending) == 1:  # else it waits behind an earlier line
            self._write_pending()

    def evaluation(self, step: int, **metrics: float) -> None:
        """Records and prints evaluation metrics, which are numbers already. The time this takes is a pause."""
        with self.pause():
            elapsed, training = self._clock()
            values = {f"eval/{key}": float(value) for key, value in metrics.items()}
            self._write_line(step, values, {"elapsed": elapsed, "training": training})
            words = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
            self.message(f"{self._step_text(step)}  evaluation: {words}")
            if time.monotonic() - self._drawn > DRAW_EVERY:
                self._draw()
            try:
                self.upload()
            except InputError as error:  # storage that is away for a moment must not end a long run
                self.message(f"warning: {error}; the next evaluation tries again")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside (evaluation, checkpoints) counts neither as training nor for examples per second."""
        if self._pause_started is not None:
            yield
            return
        self.flush()
        if self._uses_xla:
            import torch_xla.core.xla_model as xm

            xm.wait_device_ops()  # steps still running on the device are training, not pause
        self._pause_started = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - self._pause_started
            self._pause_started = None

    def flush(self) -> None:
        """Reads and writes what earlier `log` calls left to a step closure."""
        if self._pending:
            import torch_xla

            torch_xla.sync()

    def message(self, text: str) -> None:
        """One line on the terminal that leaves the progress bar whole."""
        if self._main and self._bar is not None:
            self._bar.write(text)
        elif self._main:
            print(text, flush=True)

    def finish(self, metrics: dict[str, float], report: dict[str, Any]) -> None:
        """Ends the run: curves.png, summary.json, the table on the terminal; a remote run is uploaded.

        metrics: the final metrics in the order of the table. report: what device.graph_report() says, such as
        compile_seconds, graphs, recompilations and fallbacks (lists, or counts).
        """
        if self._closed:
            raise RuntimeError("finish() after close(): the run's folder is no longer this process's")
        self.flush()
        elapsed, training = self._clock()
        timings = [record["timing"] for record in self._records()]
        per_second = f"{self._unit}_per_second"
        rates = [timing[per_second] for timing in timings if per_second in timing]
        waits = [timing["input_wait"] for timing in timings if "input_wait" in timing]
        self.summary = {
            "name": self.name,
            "finished_at": _now(),
            "steps": self._step,
            "metrics": {key: _finite(value) for key, value in metrics.items()},
            "elapsed_seconds": elapsed,
            "training_seconds": training,
            per_second: statistics.median(rates) if rates else None,
            "input_wait": statistics.fmean(waits) if waits else None,
            "report": report,
        }
        if self._main:
            self._draw()
            self._write("summary.json", _json(self.summary, indent=2))
            self.print_summary()
            self.upload()
        self.finished = True
        self._release()

    def print_summary(self) -> None:
        """Prints the table of a finished run."""
        summary, report = self.summary, dict(self.summary["report"])
        rows = {key.replace("_", " "): format_number(value) for key, value in summary["metrics"].items()}
        rows["training time"] = _duration(summary["training_seconds"])
        if "compile_seconds" in report:
            rows["compile time"] = _duration(report.pop("compile_seconds"))
        rate = summary[f"{self._unit}_per_second"]
        if rate is not None:
            rows[f"{self._unit}/s"] = format_number(rate)
        for key in ("traced", "repeated"):
            report.pop(key, None)
        if not report.get("not_repeatable", True):  # a step that is traced in every call costs time: say so
            del report["not_repeatable"]
        wait = report.pop("input_wait", summary["input_wait"])
        if wait is not None:
            rows["input wait"] = f"{100 * wait:.0f} %"
        for key, value in report.items():
            label = {"graphs": "graphs compiled", "fallbacks": "fall-backs"}.get(key, key.replace("_", " "))
            rows[label] = "; ".join([str(len(value)), *value]) if isinstance(value, list) else str(value)
        lines = [f"{self.path} finished in {_duration(summary['elapsed_seconds'])}"]
        width = max(map(len, rows))
        self.message("\n".join([*lines, *(f"  {label:<{width}}  {value}" for label, value in rows.items())]))

    def close(self) -> None:
        """Ends this process's part of an unfinished run (SIGTERM, an error): the next start resumes. Idempotent."""
        if self._closed:
            return
        try:
            if not self._failed:  # after a failed write, more of them would only hide its message
                self.flush()
                self._draw()
                self.upload()
        finally:
            self._release()

    def upload(self) -> None:
        """Copies all files to a remote run's URL, whole (object stores cannot append), summary.json last."""
        if not (self._remote and self._main):
            return
        self._uploaded = False
        try:
            if self._tensorboard is not None:
                self._tensorboard.flush()
            files = [os.path.join(folder, file) for folder, _, names in os.walk(self._folder) for file in names]
            for file in sorted(files, key=lambda file: file.endswith("summary.json")):
                self._files.put_file(file, f"{self.path}/{os.path.relpath(file, self._folder)}")
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot write to {self.path}: {error}; the files are in {self._folder}") from error
        self._uploaded = True

    # Scripts use nothing below.

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        tensors = [value for _, values in pending for value in values.values() if _is_xla(value)]
        if tensors:
            import torch_xla

            host = iter(torch_xla._XLAC._xla_get_cpu_tensors(tensors))  # one transfer for all, and no new graph
        elapsed, training = self._clock()  # after the read, which waits for the device
        for step, values in pending:
            values = {key: next(host) if _is_xla(value) else value for key, value in values.items()}
            values = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
            timing = {"elapsed": elapsed, "training": training}
            examples = values.pop("examples", None)
            if examples is not None:
                if self._rate_start is not None and training > self._rate_start[1]:
                    seconds = training - self._rate_start[1]
                    timing[f"{self._unit}_per_second"] = (examples - self._rate_start[0]) / seconds
                self._rate_start = (examples, training)
            if "input_wait" in values:
                timing["input_wait"] = values.pop("input_wait")
            self._write_line(step, values, timing)
            self._show(step, values, timing)

    def _write_line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        for key, value in values.items():
            if key.endswith("loss") and not math.isfinite(value):
                raise InputError(
                    f"{key} is {value} at step {step}: the training diverged; start a run of another --name with a "
                    "lower --lr or a longer warm-up, and look for bad values in the data"
                )
        if not self._main:
            return
        if self._closed:
            raise RuntimeError("log() or evaluation() of a run that is closed or finished")
        if self._metrics is None:
            if self.resumed:
                raise RuntimeError("a resumed run logs only after resume_at(step); resume_at(0) begins again")
            self._open_metrics()
        values = {key: _finite(value) for key, value in values.items()}
        try:
            line = _json({"step": step, **values, "timing": timing}) + b"\n"
            while line:  # a disk that fills up first writes a part, then fails
                line = line[self._metrics.write(line) :]
            for key, value in [*values.items(), *((f"timing/{key}", value) for key, value in timing.items())]:
                if value is not None:
                    self._tensorboard.add_scalar(key, value, step)
        except OSError as error:
            raise self._unwritable(self._metrics.name, error) from error
        self._step = step

    def _open_metrics(self, purge_step: int | None = None) -> None:
        # TensorBoard imports tensorflow where it finds one (Colab, Kaggle): slow, and it may take the TPU. An empty
        # module of this name is TensorBoard's own switch to do without.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        file = os.path.join(self._folder, "metrics.jsonl")
        try:
            self._metrics = open(file, "ab" if self.resumed else "xb", buffering=0)  # noqa: SIM115
            self._tensorboard = SummaryWriter(os.path.join(self._folder, "tb"), purge_step=purge_step)
        except OSError as error:
            raise self._unwritable(file, error) from error

    def _release(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # flushing what a full disk has refused, and reported, before
            if self._tensorboard is not None:
                self._tensorboard.close()
        for resource in (self._metrics, self._bar, self._lock):
            if resource is not None:
                resource.close()
        self._bar = None
        if self._uploaded:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _show(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        shown = {key: format_number(values[key]) for key in sorted(values, key=lambda key: key != "loss")}
        rate, wait = timing.get(f"{self._unit}_per_second"), timing.get("input_wait")
        wait = None if wait is None else f"{100 * wait:.0f} %"
        if self._main and sys.stderr.isatty():
            from tqdm import tqdm

            if self._bar is None:
                form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
                self._bar = tqdm(total=self.total_steps, initial=step, bar_format=form, dynamic_ncols=True)
            shown = {key: shown[key] for key in ("loss", "lr") if key in shown}
            shown |= {} if rate is None else {f"{self._unit}/s": format_number(rate)}
            self._bar.set_postfix(shown | ({} if wait is None else {"wait": wait}), refresh=False)
            self._bar.n = step
            self._bar.refresh()
        else:
            words = [f"{key} {value}" for key, value in shown.items()]
            words += [] if rate is None else [f"{format_number(rate)} {self._unit}/s"]
            words += [] if wait is None else [f"input wait {wait}"]
            self.message("  ".join([self._step_text(step), *words]))

    def _step_text(self, step: int) -> str:
        return f"step {step:>5}/{self.total_steps}" if self.total_steps else f"step {step:>5}"

    def _clock(self) -> tuple[float, float]:
        """Seconds of this run up to now, earlier parts included: in all, and without pauses."""
        now = time.monotonic()
        pause = self._paused + (now - self._pause_started if self._pause_started is not None else 0.0)
        elapsed = now - self._started
        return round(self._elapsed_before + elapsed, 4), round(self._training_before + elapsed - pause, 4)

    def _draw(self) -> None:
        records = self._records()
        if records:
            self._tensorboard.flush()
            self._write("curves.png", draw_curves(records, self.name))
        self._drawn = time.monotonic()

    def _records(self) -> list[dict[str, Any]]:
        if self._metrics is None:
            return []
        with open(self._metrics.name) as file:
            return [json.loads(line) for line in file]

    def _read(self, path: str) -> bytes | None:
        try:
            return self._files.cat_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every store has exceptions of its own
            raise InputError(f"cannot read {path}: {error}") from error

    def _read_json(self, path: str, key: str) -> dict[str, Any] | None:
        content = self._read(path)
        try:
            parsed = None if content is None else json.loads(content)
            if parsed is None or isinstance(parsed[key], dict):
                return parsed
        except (ValueError, KeyError, TypeError):
            pass
        raise InputError(f"{path} is damaged; remove {os.path.dirname(path)} to begin again, or use another --name")

    def _write(self, name: str, content: bytes) -> None:
        """Writes aside and renames, so that a kill leaves the old file or the new one, never a part."""
        target = os.path.join(self._folder, name)
        try:
            with open(f"{target}.tmp", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{target}.tmp", target)
        except OSError as error:
            raise self._unwritable(target, error) from error

    def _unwritable(self, target: str, error: OSError) -> InputError:
        self._failed = True
        advice = "use another folder with --runs"
        if self._step:
            advice = f"all up to step {self._step} is safe, the same command goes on from the last checkpoint"
        return InputError(f"cannot write {target}: {error.strerror or error}; {advice}")


def _is_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    return value if math.isfinite(value) else None


def _json(content: Any, indent: int | None = None) -> bytes:
    return json.dumps(content, indent=indent, allow_nan=False, default=str).encode()


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _start_record(devices: dict[str, Any] | None) -> dict[str, Any]:
    """What config.json keeps of each start; git is null where this file is in no git repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        commit = None
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = shlex.join(sys.orig_argv)
    return {"time": _now(), "command": command, "devices": devices, "versions": versions, "git": commit}
