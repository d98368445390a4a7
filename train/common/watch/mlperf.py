"""--log mlperf: writes runs/<name>/mlperf.log, the lines of MLPerf Training's logs.

mlperf-logging's compliance checker reads them, by the rule set RULES (docs/tracking.md). A script
says what its run is as a benchmark, see train/common/benchmark.py; the rest comes from the hooks.

    run_start      the training begins; what comes before is init, from the start of the program
    block          the steps between two evaluations
    eval_accuracy  the benchmark's metric
    run_stop       "success" where the metric has reached the target, and the log ends, though the
                   run goes on; "aborted" where the run has ended without

A resumed run continues the log; lines of steps that it repeats are dropped. Its clock runs on while
it is down.

The lines say what this run does, not that it is a submission: caches are not cleared, and the first
and last examples of the evaluation are read before run_start.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from errors import InputError
from train.common.hooks import Watcher
from train.common.metrics import EVALUATION, finite
from train.common.metrics import FILE as METRICS

FILE = "mlperf.log"
RULES = "4.0.0"  # the last rule set that has resnet, bert and dlrm_dcnv2
TOKEN = ":::MLLOG "  # what each line begins with
POINT, START, END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"


@dataclass(frozen=True)
class Flags:
    """Which log is written besides metrics.jsonl."""

    log: Literal["none", "mlperf"] = "none"  # mlperf: also mlperf.log, see docs/tracking.md
    mlperf_org: str = "none, not submitted"  # submission_org of that log


def watcher(flags: Flags) -> Callable[[Any], Watcher] | None:
    """Returns what makes the log of a Run, None where none is asked for."""
    if flags.log == "none":
        return None
    began = _now()
    return lambda run: Log(run, began, flags.mlperf_org)


class Log(Watcher):
    """The log of one run.

    Args:
        began: when the program started, in milliseconds.
        org: who trains.

    Raises:
        InputError: the run is no benchmark; or it is resumed, and has no whole log of the steps
            before.
    """

    def __init__(self, run: Any, began: int, org: str):
        if run.benchmark is None:
            raise InputError(
                "--log mlperf is for benchmarks of MLPerf Training: train.resnet50 with "
                "--objective classes, train.pretrain of bert, train.dlrm with --interaction dcn; "
                "this run is none of them"
            )
        self._run = run
        self._benchmark = run.benchmark
        self._began = began
        self._org = org
        self._step = run.start
        self._lines: list[dict[str, Any]] = []
        self._in_block = False
        self._in_evaluation = False
        self._stopped = False

    def __enter__(self) -> "Log":
        earlier = self._run.folder.read(FILE) if self._run.resumed else None
        if earlier is not None:
            self._resume(earlier)
        elif self._run.start:
            raise InputError(
                f"--log mlperf: {self._run.path} is resumed after step {self._run.start}, and has "
                f"no {FILE} of the steps before; leave the flag out, or give another --name"
            )
        else:
            self._begin()
        if not self._run.evaluation_due:
            self._start_block()
        self._write()
        return self

    def step(self, number: int) -> None:
        self._step = number

    def pause(self, of: str) -> None:
        # An evaluation pauses the training twice: while it computes, and while it is recorded.
        if of != "evaluation" or self._in_evaluation or self._stopped:
            return
        self._stop_block()
        self._say("eval_start", START, **self._place())
        self._in_evaluation = True
        self._write()

    def line(self, step: int, values: dict[str, float], timing: dict[str, float]) -> None:
        name = f"{EVALUATION}{self._benchmark.metric}"
        if name not in values or self._stopped:
            return
        self._end_evaluation(finite(values)[name])
        self._write()

    def resume(self) -> None:
        trains_on = self._step < self._run.total_steps and not self._run.evaluation_due
        if trains_on and not (self._in_evaluation or self._in_block or self._stopped):
            self._start_block()
            self._write()

    def summary(self) -> dict[str, Any]:
        if not self._stopped:
            self._stop_block()
            self._stop("aborted")
            self._write()
        return {}

    def _begin(self) -> None:
        """Adds what comes before the training, and its start."""
        mesh = self._run.mesh
        benchmark = self._benchmark
        self._say("cache_clear", POINT, False, time_ms=self._began)
        self._say("init_start", START, time_ms=self._began)
        facts = {
            "submission_benchmark": benchmark.name,
            "submission_org": self._org,
            "submission_division": "closed",
            "submission_status": "research",
            "submission_platform": f"{mesh.num_devices} x {mesh.kind}",
            "global_batch_size": benchmark.batch_size,
            "train_samples": benchmark.train_samples,
            "eval_samples": benchmark.eval_samples,
            **benchmark.hyperparameters,
        }
        for key, value in facts.items():
            self._say(key, POINT, value)
        self._say("init_stop", END)
        self._say("run_start", START)

    def _resume(self, content: bytes) -> None:
        """Takes the lines of an earlier start that are not of steps which this one repeats."""
        try:
            for line in content.decode().splitlines():
                record = json.loads(line.removeprefix(TOKEN))
                if record["metadata"].get("step_num", 0) <= self._run.start:
                    self._lines.append(record)
            keys = [record["key"] for record in self._lines]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self._run.path}/{FILE} is damaged ({error}); leave --log out, or give another "
                "--name"
            ) from error

        if keys.count("eval_start") > keys.count("eval_stop"):  # killed in an evaluation
            while self._lines.pop()["key"] != "eval_start":
                pass
        keys = [record["key"] for record in self._lines]
        self._in_block = keys.count("block_start") > keys.count("block_stop")
        self._stopped = "run_stop" in keys
        if not self._stopped:
            self._add_missing()

    def _add_missing(self) -> None:
        """Adds the evaluation of the step that the run is resumed after, where metrics.jsonl has it
        and the log does not: the process was killed in between.

        Raises:
            InputError: evaluations before it are missing.
        """
        missing = self._recorded()
        for record in self._lines:
            if record["key"] == "eval_accuracy":
                missing.pop(record["metadata"]["step_num"], None)

        step = self._run.start
        earlier = [number for number in missing if number < step]
        if earlier:
            raise InputError(
                f"--log mlperf: {self._run.path}/{FILE} lacks the evaluation of step {earlier[0]}, "
                "which a start without the flag has made; leave it out, or give another --name"
            )
        if step in missing:
            self._stop_block()
            self._say("eval_start", START, **self._place())
            self._end_evaluation(missing[step])

    def _recorded(self) -> dict[int, float | None]:
        """Returns the metric of each evaluation in metrics.jsonl up to the step that the run is
        resumed after, by their steps."""
        recorded = {}
        name = f"{EVALUATION}{self._benchmark.metric}"
        for line in (self._run.folder.read(METRICS) or b"").splitlines(keepends=True):
            if not line.endswith(b"\n"):  # torn by a kill
                break
            record = json.loads(line)
            if name in record and record["step"] <= self._run.start:
                recorded[record["step"]] = record[name]
        return recorded

    def _start_block(self) -> None:
        if not self._in_block and not self._stopped:
            self._say("block_start", START, **self._place())
            self._in_block = True

    def _stop_block(self) -> None:
        if self._in_block:
            self._say("block_stop", END, **self._place())
            self._in_block = False

    def _end_evaluation(self, value: float | None) -> None:
        """Adds an evaluation's metric and its end; and the end of the log at the target."""
        self._say("eval_accuracy", POINT, value, **self._place())
        self._say("eval_stop", END, **self._place())
        self._in_evaluation = False
        if value is not None and value >= self._benchmark.target:
            self._stop("success")

    def _stop(self, status: str) -> None:
        self._say("run_stop", END, status=status, **self._place())
        self._stopped = True

    def _place(self) -> dict[str, float]:
        """Returns where in the training a line is."""
        return {
            "epoch_num": self._benchmark.epoch(self._step),
            "samples_count": self._step * self._benchmark.batch_size,
            "step_num": self._step,
        }

    def _say(
        self, key: str, kind: str, value: Any = None, time_ms: int | None = None, **metadata: Any
    ) -> None:
        """Adds a line.

        Args:
            kind: its event_type.
            time_ms: None: now.
        """
        record = {
            "namespace": "",
            "time_ms": _now() if time_ms is None else time_ms,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        self._lines.append(record)

    def _write(self) -> None:
        """Writes the file; there are some lines for each evaluation."""
        if self._run.mesh.main_process:
            lines = [f"{TOKEN}{json.dumps(record)}\n" for record in self._lines]
            self._run.folder.write(FILE, "".join(lines).encode())


def _now() -> int:
    """Returns the time in milliseconds since 1970."""
    return int(time.time() * 1000)
