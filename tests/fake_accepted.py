"""Trains nothing, as the project of tests/test_accept.py: `MODEL TASK NAME [--flag value …]`.

It prints, saves, is killed and stops as the scripts in train/ do, with what disturbs a reader of its log: lines on
stderr between its own, other JSON, a loader process that a SIGKILL leaves behind. On several workers it waits at every
tenth step for the others, as a collective does. settings.json in the folder of the runs says what hardware it tells of
and what goes wrong in a run whose name ends with `run`:

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

model, task, name, *arguments = sys.argv[1:]
flags = {}
for place, word in enumerate(arguments):
    if word.startswith("--"):
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        flags[word[2:]] = "" if following.startswith("--") else following
script = {"resnet50": "resnet50", "dlrm": "dlrm", "transformer": "transformer"}.get(model)
script = script or ("pretrain" if task == "pretrain" else "glue")
runs = Path(flags["runs"])
settings = {"kind": "CPU", "devices": 1, "hosts": 1, "seconds": 0.01, "wait": 0.0, "fault": "", "run": ""}
if (runs / "settings.json").exists():
    settings.update(json.loads((runs / "settings.json").read_text()))
fault = settings["fault"] if name.endswith(settings["run"]) else ""
hosts = settings["hosts"]
me = int(Path.cwd().parent.name.rpartition("-")[2]) if hosts > 1 else 0  # …/worker-<i>/tree
folder = runs / name
checkpoints = folder / "checkpoints"
checkpoints.mkdir(parents=True, exist_ok=True)
began = time.time()
long = any(int(flags.get(flag, 0)) > 50_000 for flag in ("epochs", "updates", "steps"))
total = 10_000_000 if long else 400
METRICS = {
    "resnet50": {"top1": 0.97, "top5": 1.0, "loss": 0.25},
    "dlrm": {"auc": 0.806, "loss": 0.5, "ne": 0.78},
    "glue": {"accuracy": 0.998, "loss": 0.01},
    "transformer": {"bleu": 99.0, "ppl": 1.2},
    "pretrain": {"accuracy": 0.46, "loss": 1.4},
}
metrics = METRICS[script]


def say(text: str, file=None) -> None:
    if me == 0:
        print(text, file=file, flush=True)


def report(event: str, **facts: object) -> None:
    if "report" in flags and fault != "mute":
        say("report " + json.dumps({"event": event, **facts}))


def files() -> dict[str, int]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def save(step: int) -> None:
    place = checkpoints / f"step_{step:08d}"
    place.mkdir(exist_ok=True)
    if script == "dlrm" and not (fault == "part" and me == hosts - 1):
        (place / f"tables-{me:05d}.json").write_text("{}")
    if me == 0:
        (place / "state.safetensors").write_text("weights")
        (place / "COMPLETE").write_text("mark")


def loss_of(step: int) -> float:
    found = 2.3 * math.exp(-step / 100) + random.Random(step).random() / 10
    if fault == "drift" and resumed and step > resumed:
        found += 1e-7
    if fault == "nan" and step >= 100:
        found = math.nan
    return found


def line(step: int, values: dict[str, float]) -> None:
    timing = {"elapsed": step * settings["seconds"], "training": step * settings["seconds"]}
    if "lr" in values:
        timing["input_wait"] = settings["wait"]
    words = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
    say(f"step {step:>5}/{total}  {words}")
    report("line", step=step, values=values, timing=timing)


def write(path: Path, value: object) -> None:
    new = path.with_name(f"{path.name}.new-{me}")
    new.write_text(str(value))
    new.rename(path)


def leaving() -> int:
    """Returns the step at which a host was asked to stop, 0 if none was."""
    leave = folder / "leave"
    return int(leave.read_text()) if leave.exists() and leave.stat().st_mtime > began else 0


def wait_for_peers(step: int) -> None:
    write(folder / f"at-{me}", step)
    for peer in range(hosts):
        at = folder / f"at-{peer}"
        while not leaving() and (not at.exists() or int(at.read_text()) < step):
            time.sleep(0.02)


stopped = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "deaf" else lambda *_: stopped.append(1))
say("WARNING:root:Defaulting to PJRT_DEVICE=CPU", sys.stderr)
say('{"event": "start"} is not a report, and neither is "report {": it has no mark')
say("report {this is no JSON")
if fault == "no start":
    time.sleep(1000)
if fault == "full disk":
    message = f"error: cannot write {folder}/config.json: No space left on device; use another folder with --runs"
    sys.exit(print(message, file=sys.stderr, flush=True) or 2)
saved = sorted(path.name for path in checkpoints.glob("step_*") if (path / "COMPLETE").exists())
resumed = int(saved[-1][5:]) if saved and fault not in ("forgets", "unsaved") else 0
loader = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"])
started = {"versions": {"python": "3.11.7", "libtpu": "0.0.21"}, "git": {"commit": "0" * 40, "dirty": False}}
facts = {key: settings[key] for key in ("kind", "devices", "hosts")}
report(
    "start", path=str(folder), pid=os.getpid(), step=resumed, total_steps=total, started=started, files=files(), **facts
)
say("compiling train_step with libtpu 0.0.21", sys.stderr)
if fault.startswith("SIG"):
    say(f"*** {fault} (@0x7f), see gl__________41#s15 received by PID 7 ***", sys.stderr)
    loader.kill()
    signal.signal(getattr(signal, fault), signal.SIG_DFL)
    os.kill(os.getpid(), getattr(signal, fault))
say("compiled train_step in 3 s", sys.stderr)
for step in range(resumed + 1, total + 1):
    if step == 1 or step % 10 == 0:
        wait_for_peers(step)
        line(step, {"lr": 0.1, "loss": loss_of(step)})
        say(f"warning: something at step {step}", sys.stderr)
    if fault == "hangs" and step >= 100:
        time.sleep(1000)
    if fault == "diverges" and step == 100:
        loader.kill()
        message = (
            "error: loss is nan at step 100: the input was finite, so the training diverged; start a run of another"
        )
        sys.exit(print(message, file=sys.stderr, flush=True) or 2)
    if fault == "oom" and step == 100:
        loader.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    if not long and step % 50 == 0 and fault != "unsaved":
        save(step)
        if step % 100 == 0 and fault != "blind":
            line(step, {f"eval/{key}": value for key, value in metrics.items()})
    if step == int(flags.get("kill-at", 0)) and me == hosts - 1 and fault != "immortal":
        os.kill(os.getpid(), signal.SIGKILL)  # the loader stays
    time.sleep(0.02 if long else 0.0005)
    if stopped and step % 10 == 0 and not leaving():  # where the hosts agree
        write(folder / "leave", step)
    if leaving():
        if fault != "unsaved":
            save(leaving())
        say(f"stopped by a signal at step {step}: saved; the same command resumes from here")
        loader.kill()
        sys.exit(0 if fault == "polite" else 143)
if fault == "wrong":
    metrics = {key: value / 3 for key, value in metrics.items()}
if fault == "other result" and resumed:
    metrics = {key: value + 1e-6 for key, value in metrics.items()}
if fault != "no export":
    (folder / "export").mkdir(exist_ok=True)
    (folder / "export/model.safetensors").write_text("weights")
again = ["train_step was compiled again for known input shapes"] if fault == "recompiles" else []
summary = {"metrics": metrics, "report": {"recompilations": again, "fallbacks": []}}
chip = {"chip_bytes": 3 << 30 if settings["kind"] != "CPU" else None, "chip_bytes_unknown": "", "host_bytes": 1 << 30}
report("end", summary=summary, files=files(), **chip)
loader.kill()
