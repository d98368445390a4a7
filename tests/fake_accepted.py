"""Trains nothing, as the project of tests/test_accept.py: `MODEL TASK NAME [--flag value …]`.

It prints, saves, is killed and stops as the scripts in train/ do, with what disturbs a reader of
its log: lines on stderr between its own, other JSON, a loader process that a SIGKILL leaves behind.
On several workers it waits at every tenth step for the others, as a collective does. settings.json
in the folder of the runs says what hardware it reports and what goes wrong in a run whose name ends
with `run`:

    kind, devices, hosts, seconds    the hardware, and seconds of a step that it reports
    wait                             share of input wait that it reports
    fault                            see the uses of `fault` below
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

METRICS = {
    "resnet50": {"top1": 0.97, "top5": 1.0, "loss": 0.25},
    "dlrm": {"auc": 0.806, "loss": 0.5, "ne": 0.78},
    "glue": {"accuracy": 0.998, "loss": 0.01},
    "squad": {"exact_match": 0.9, "f1": 0.95, "loss": 0.2},
    "transformer": {"bleu": 99.0, "ppl": 1.2},
    "pretrain": {"accuracy": 0.46, "loss": 1.4},
    "tagging": {"f1": 0.99, "accuracy": 0.99, "loss": 0.01},
}
LONG = 50_000  # steps or epochs; a longer run is one that is stopped

model, task, name, *arguments = sys.argv[1:]


# ---- what it is asked for ----------------------------------------------------------------------


def read_flags() -> dict[str, str]:
    """Returns the flags by their names; "" is the value of one that another follows."""
    flags = {}
    for number, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        flags[word[2:]] = "" if following.startswith("--") else following
    return flags


def script_of(model: str, task: str) -> str:
    """Returns the script of train/ that trains a model."""
    if model in ("resnet50", "dlrm", "transformer"):
        return model
    scripts = {"pretrain": "pretrain", "squad": "squad", "ner": "tagging"}
    return scripts.get(task, "glue")


def read_settings(runs: Path) -> dict:
    settings = {
        "kind": "CPU",
        "devices": 1,
        "hosts": 1,
        "seconds": 0.01,
        "wait": 0.0,
        "fault": "",
        "run": "",
    }
    path = runs / "settings.json"
    if path.exists():
        settings.update(json.loads(path.read_text()))
    return settings


flags = read_flags()
runs = Path(flags["runs"])
settings = read_settings(runs)
fault = settings["fault"] if name.endswith(settings["run"]) else ""
hosts = settings["hosts"]
me = 0
if hosts > 1:
    me = int(Path.cwd().parent.name.rpartition("-")[2])  # …/worker-<i>/tree
is_last_host = me == hosts - 1

script = script_of(model, task)
folder = runs / name
checkpoints = folder / "checkpoints"
checkpoints.mkdir(parents=True, exist_ok=True)
began = time.time()
is_long = any(int(flags.get(flag, 0)) > LONG for flag in ("epochs", "updates", "steps"))
total = 10_000_000 if is_long else 400
stopped: list[int] = []  # a signal's handler appends


# ---- what it prints and writes -----------------------------------------------------------------


def say(text: str, file=None) -> None:
    """Prints on the first host, as train/ does."""
    if me == 0:
        print(text, file=file, flush=True)


def report(event: str, **facts: object) -> None:
    if "report" in flags and fault != "mute":
        say("report " + json.dumps({"event": event, **facts}))


def report_line(step: int, values: dict[str, float]) -> None:
    """Prints a line of metrics, and reports it."""
    seconds = step * settings["seconds"]
    timing = {"elapsed": seconds, "training": seconds}
    if "lr" in values:
        timing["input_wait"] = settings["wait"]
    words = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
    say(f"step {step:>5}/{total}  {words}")
    report("line", step=step, values=values, timing=timing)


def fail(message: str) -> None:
    """Ends as an input to fix does."""
    print(message, file=sys.stderr, flush=True)
    sys.exit(2)


def sizes() -> dict[str, int]:
    """Returns the bytes of the files in the run's folder."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def save(step: int) -> None:
    """Writes a checkpoint, or this host's part of one."""
    checkpoint = checkpoints / f"step_{step:08d}"
    checkpoint.mkdir(exist_ok=True)
    lacks_tables = fault == "part" and is_last_host
    if script == "dlrm" and not lacks_tables:
        (checkpoint / f"tables-{me:05d}.json").write_text("{}")
    if me == 0:
        (checkpoint / "state.safetensors").write_text("weights")
        (checkpoint / "COMPLETE").write_text("mark")


def newest_checkpoint() -> int:
    """Returns the step to resume from, 0 without a checkpoint."""
    complete = []
    for path in checkpoints.glob("step_*"):
        if (path / "COMPLETE").exists():
            complete.append(path.name)
    if not complete or fault in ("forgets", "unsaved"):
        return 0
    return int(max(complete).removeprefix("step_"))


def loss_of(step: int, resumed: int) -> float:
    """Returns the loss of a step, of a run that was resumed at another."""
    if fault == "nan" and step >= 100:
        return math.nan
    loss = 2.3 * math.exp(-step / 100) + random.Random(step).random() / 10
    if fault == "drift" and resumed and step > resumed:
        loss += 1e-7
    return loss


# ---- the other hosts ---------------------------------------------------------------------------


def write(path: Path, value: object) -> None:
    new = path.with_name(f"{path.name}.new-{me}")
    new.write_text(str(value))
    new.rename(path)


def leaving() -> int:
    """Returns the step at which a host was asked to stop, 0 if none was."""
    leave = folder / "leave"
    if leave.exists() and leave.stat().st_mtime > began:
        return int(leave.read_text())
    return 0


def wait_for_peers(step: int) -> None:
    write(folder / f"at-{me}", step)
    for peer in range(hosts):
        at = folder / f"at-{peer}"
        while not leaving() and (not at.exists() or int(at.read_text()) < step):
            time.sleep(0.02)


# ---- a run -------------------------------------------------------------------------------------


def start_loader() -> subprocess.Popen:
    """Starts a process that a SIGKILL of this one leaves behind."""
    sleeping = "import time; time.sleep(1000)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", sleeping])


def begin() -> None:
    """Prints the top of a log; hangs or ends there where that is the fault."""
    on_sigterm = signal.SIG_IGN if fault == "deaf" else lambda *_: stopped.append(1)
    signal.signal(signal.SIGTERM, on_sigterm)
    say("WARNING:root:Defaulting to PJRT_DEVICE=CPU", sys.stderr)
    say('{"event": "start"} is not a report, and neither is "report {": it has no mark')
    say("report {this is no JSON")
    if fault == "no start":
        time.sleep(1000)
    if fault == "full disk":
        full = f"cannot write {folder}/config.json: No space left on device"
        fail(f"error: {full}; use another folder with --runs")


def report_start(resumed: int) -> None:
    started = {
        "versions": {"python": "3.11.7", "libtpu": "0.0.21"},
        "git": {"commit": "0" * 40, "dirty": False},
    }
    hardware = {key: settings[key] for key in ("kind", "devices", "hosts")}
    report(
        "start",
        path=str(folder),
        pid=os.getpid(),
        step=resumed,
        total_steps=total,
        started=started,
        files=sizes(),
        **hardware,
    )


def compile_step(loader: subprocess.Popen) -> None:
    """Prints that a step is compiled; dies of a signal where the fault names one."""
    say("compiling train_step with libtpu 0.0.21", sys.stderr)
    if fault.startswith("SIG"):
        say(f"*** {fault} (@0x7f), see gl__________41#s15 received by PID 7 ***", sys.stderr)
        loader.kill()
        number = getattr(signal, fault)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    say("compiled train_step in 3 s", sys.stderr)


def break_down(step: int, loader: subprocess.Popen) -> None:
    """Hangs, diverges or runs out of memory where that is the fault."""
    if fault == "hangs" and step >= 100:
        time.sleep(1000)
    if fault == "diverges" and step == 100:
        loader.kill()
        cause = "the input was finite, so the training diverged"
        fail(f"error: loss is nan at step 100: {cause}; start a run of another")
    if fault == "oom" and step == 100:
        loader.kill()
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_leave(step: int, loader: subprocess.Popen) -> None:
    """Saves at the step on which the hosts have agreed, and ends."""
    if fault != "unsaved":
        save(leaving())
    say(f"stopped by a signal at step {step}: saved; the same command resumes from here")
    loader.kill()
    sys.exit(0 if fault == "polite" else 143)


def train(resumed: int, metrics: dict[str, float], loader: subprocess.Popen) -> None:
    """Trains to the end, unless it is stopped, killed or has a fault that ends it."""
    for step in range(resumed + 1, total + 1):
        if step == 1 or step % 10 == 0:
            wait_for_peers(step)
            report_line(step, {"lr": 0.1, "loss": loss_of(step, resumed)})
            say(f"warning: something at step {step}", sys.stderr)
        break_down(step, loader)

        if not is_long and step % 50 == 0 and fault != "unsaved":
            save(step)
            if step % 100 == 0 and fault != "blind":
                evaluated = {f"eval/{key}": value for key, value in metrics.items()}
                report_line(step, evaluated)
        kill_at = int(flags.get("kill-at", 0))
        if step == kill_at and is_last_host and fault != "immortal":
            os.kill(os.getpid(), signal.SIGKILL)  # the loader stays

        time.sleep(0.02 if is_long else 0.0005)
        if stopped and step % 10 == 0 and not leaving():  # where the hosts agree
            write(folder / "leave", step)
        if leaving():
            save_and_leave(step, loader)


def finish(resumed: int, metrics: dict[str, float]) -> None:
    """Writes the export and reports the end."""
    if fault == "wrong":
        metrics = {key: value / 3 for key, value in metrics.items()}
    if fault == "other result" and resumed:
        metrics = {key: value + 1e-6 for key, value in metrics.items()}
    if fault != "no export":
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export/model.safetensors").write_text("weights")

    recompilations = []
    if fault == "recompiles":
        recompilations = ["train_step was compiled again for known input shapes"]
    graphs = {"recompilations": recompilations, "fallbacks": []}
    report(
        "end",
        summary={"metrics": metrics, "report": graphs},
        files=sizes(),
        chip_bytes=None if settings["kind"] == "CPU" else 3 << 30,
        chip_bytes_unknown="",
        host_bytes=1 << 30,
    )


begin()
resumed = newest_checkpoint()
loader = start_loader()
report_start(resumed)
compile_step(loader)
metrics = METRICS[script]
train(resumed, metrics, loader)
finish(resumed, metrics)
loader.kill()
