"""Runs trials of a script on plain PyTorch in a process where torch_xla cannot be imported; tests/test_eager.py starts
it: python eager_runs.py SCRIPT FOLDER RUN..., whose last line is the runs' metrics in JSON."""

import json
import os
import sys
import time
from dataclasses import replace


def without_dropout(encoders) -> None:
    """Makes the small encoders of a trial have none: its random numbers differ from device to device."""
    configuration = encoders.configuration

    def plain(*args):
        made = configuration(*args)
        made.hidden_dropout_prob = made.attention_probs_dropout_prob = 0.0
        return made

    encoders.configuration = plain


def main(name: str, folder: str, runs: list[str]) -> None:
    sys.modules["torch_xla"] = sys.modules["libtpu"] = None  # as if they were not installed
    from helpers import crash, stop_at, terminate
    from trials import TRIALS

    from models import encoders

    trial, found = TRIALS[name], {}

    def die() -> None:
        while not os.path.exists(f"{folder}/stopped/run/checkpoints/step_{trial.kill.saved:08d}/COMPLETE"):
            time.sleep(0.02)  # another thread writes it
        os.kill(os.getpid(), trial.kill.number)

    # The steps of the run "stopped" at which something ends it; the first one is before its first checkpoint.
    stops = {"a crash": (2, crash), "kill": (trial.kill.step, die), "terminate": (trial.terminate, terminate)}
    configs = {
        # From seed 0 the Transformer's updates are too few here: BLEU 9 where XLA's rounding gives 42; from 1 it is 74.
        "learns": replace(trial.learns, seed=int(name == "transformer")),
        "still": replace(trial.learns, **trial.still, lr=0.0),
        "alike": trial.alike or trial.short,
        "short": trial.short,
        "stopped": trial.short,
    }
    for run in runs:
        if run == "no dropout":
            without_dropout(encoders)
            continue
        run, _, stop = run.partition(" by ")
        config = replace(configs[run], device=os.environ.get("DEVICE") or "cpu", runs=f"{folder}/{run}", name="run")
        if run == "alike" and trial.alike_with:
            trial.alike_with()
        if stop:
            stop_at(*stops[stop], trial.script.main, config)
        else:
            found[run] = trial.script.main(config)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
