"""A training with --best and --patience as the scripts do it, of a weight that is the number of its
step: for tests/test_best.py, and for the hosts of a pod (pod_runs.py)."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from helpers import records

from train.common import run as tracking


@dataclasses.dataclass(frozen=True)
class Config:
    runs: str = "runs"
    data: str = "numbers"
    name: str = "mine"
    best: str = "accuracy"
    patience: int = 0
    keep: int = 1


@dataclasses.dataclass
class Trained:
    """What a finished training leaves.

    Attributes:
        summary: what summary.json says of the result.
        lines: of metrics.jsonl, without times.
        weight: that was exported.
    """

    summary: dict
    lines: list[dict]
    weight: float


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def train(config: Config, mesh, evaluations: Mapping[int, float], total_steps: int = 6) -> dict:
    """Trains as the scripts do, a weight that is the number of its step, and returns what `main`
    does.

    Args:
        evaluations: step -> the accuracy that its evaluation has.
    """
    run = tracking.Run(
        config,
        mesh,
        name="net",
        headline="net",
        total_steps=total_steps,
        metrics=("accuracy", "f1"),
    )
    if run.finished:
        return run.summary["metrics"]
    model = torch.nn.Linear(1, 1, bias=False)
    fill(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = run.resume(model, optimizer, examples=9, keep=config.keep)
    assert model.weight.item() == start

    def evaluation(step: int) -> None:
        assert model.weight.item() == step
        run.evaluation(step, accuracy=evaluations[step], f1=step / 3)

    with run.training(contextlib.nullcontext()):
        if run.evaluation_due:
            evaluation(start)
        for step, batch in enumerate(run.batches(range(start, total_steps)), start + 1):
            assert batch == step - 1
            fill(model, step)
            run.log(step, loss=1 / step)
            evaluates = step in evaluations
            run.checkpoint(step, due=True, evaluates=evaluates)
            if evaluates:
                evaluation(step)

        run.checkpoints.wait()
        metrics = run.load_best()
        if mesh.main_process:
            Path(run.path, "export").write_text(str(model.weight.item()))
        run.finish(metrics or {"accuracy": math.nan})
    return metrics


def result(config: Config) -> Trained:
    """Returns what a training that has ended has left."""
    path = Path(config.runs, config.name)
    summary = json.loads((path / "summary.json").read_text())
    kept = {key: summary[key] for key in ("metrics", "steps", "best")}
    kept["stopped_early"] = summary.get("stopped_early")
    return Trained(kept, records(path), float((path / "export").read_text()))


# Step 2 is the best, 5 equals it; with a patience of 2 the training ends with 5 of 6.
EVALUATIONS = {1: 0.5, 2: 0.7, 4: 0.6, 5: 0.7, 6: 0.8}


def stopping_at(step: int, monkeypatch) -> None:
    """Makes a training end with an error when the checkpoint of a step is complete."""
    checkpoint = tracking.Run.checkpoint

    def stop(run, number: int, **options) -> None:
        checkpoint(run, number, **options)
        if number == step:
            run.checkpoints.wait()
            raise ZeroDivisionError

    monkeypatch.setattr(tracking.Run, "checkpoint", stop)
