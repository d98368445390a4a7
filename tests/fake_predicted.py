"""Predicts nothing, as make predict of tests/test_accept.py: `MODEL_DIR DATA OUT [--flag value …]`.

It reads inputs and writes answers as train/predict.py does: numbers that depend on the input and,
in the last digits, on device and precision; a sentence has the right label mostly. Its log has what
disturbs a reader, and where it hangs it has a process besides. settings.json in the folder of the
runs says on what hardware it is and what goes wrong, as for tests/fake_accepted.py: see the uses of
`fault`.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CLASSES = {"pictures": [f"texture {number}" for number in range(10)]}
CLASSES["sentences"] = ["negative", "positive"]
NUMBERS = ("six", "seven", "eight", "nine", "ten")

model_dir, data, out, report_flag, *arguments = sys.argv[1:]
assert report_flag == "--report"
if "--safe-forms" in arguments:
    arguments.remove("--safe-forms")
flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
assert set(flags) <= {"--precision", "--top", "--device"}, flags
runs = Path(model_dir).parent.parent
settings = {"kind": "CPU", "devices": 1, "hosts": 1, "fault": ""}
if (runs / "settings.json").exists():
    settings |= json.loads((runs / "settings.json").read_text())

is_plain = flags.get("--device") == "cpu"
precision = flags["--precision"]
fault = settings["fault"]
is_right = is_plain and not fault.endswith("everywhere")
if is_right or (precision == "bfloat16" and fault.endswith("in float32")):
    fault = ""


def report(event: str, **facts: object) -> None:
    if fault != "predicts mute":
        text = json.dumps({"event": event, **facts})
        print(f"report {text}", file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """Ends as an input to fix does."""
    print(message, file=sys.stderr, flush=True)
    sys.exit(2)


def read_inputs() -> tuple[str, list[str]]:
    """Returns the kind of the inputs, and their names."""
    if os.path.isdir(data):
        names = sorted(str(path) for path in Path(data).iterdir())
        for name in names:
            assert Path(name).read_bytes().startswith(b"\x89PNG\r\n"), name
        return "pictures", names
    return "sentences", Path(data).read_text().splitlines()


def shares_of(name: str, kind: str) -> dict[str, float]:
    """Returns the probabilities of an input's classes."""
    classes = CLASSES[kind]
    digest = hashlib.sha256(name.encode()).digest()
    logits = [number / 60 for number in digest[: len(classes)]]
    if kind == "sentences":
        above = any(f" {word} " in f" {name[:-1]} " for word in NUMBERS)
        is_wrong = digest[-1] < 8  # of 256
        logits[above != is_wrong] += 4
    if precision == "bfloat16":
        logits = [round(32 * logit) / 32 for logit in logits]
    if not is_plain:
        logits = [logit * (1 + 1e-7) for logit in logits]

    powers = [math.exp(logit) for logit in logits]
    if fault.startswith("predicts alike"):
        powers = list(range(1, 1 + len(classes)))
    shares = [power / sum(powers) for power in powers]
    if fault.startswith("predicts swapped"):
        shares.reverse()
    return dict(zip(classes, shares, strict=True))


def answer(name: str, kind: str) -> dict:
    shares = shares_of(name, kind)
    order = sorted(shares, key=shares.get, reverse=True)[: int(flags["--top"])]
    top = [{"label": label, "probability": shares[label]} for label in order]
    return {"input": name, **top[0], "top": top}


def spoil(answers: list[dict]) -> None:
    """Changes answers where that is the fault."""
    if fault == "predicts apart in float32":
        answers[7]["top"][0]["probability"] -= 0.001
    if fault == "predicts far apart":
        answers[7]["top"][0]["probability"] -= 0.2
    if fault == "predicts nan":
        answers[7]["top"][0]["probability"] = math.nan
    if fault == "predicts in another order":
        answers[7], answers[8] = answers[8], answers[7]
    if fault == "predicts fewer":
        del answers[-3:]
    if fault == "predicts other names":
        answers[7]["top"][-1]["label"] = "LABEL_1"
    if fault == "predicts an error":
        answers[7] = {"input": answers[7]["input"], "error": "it is broken"}


def compile_network(loader: subprocess.Popen) -> None:
    """Prints what the compiler does; ends or hangs where that is the fault."""
    print("compiling eval_step with libtpu 0.0.21", file=sys.stderr, flush=True)
    if fault == "predicts SIGSEGV":
        loader.kill()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    print("compiled eval_step in 3 s", file=sys.stderr, flush=True)
    if fault == "predicts nothing":
        time.sleep(1000)


sleeping = "import time; time.sleep(1000)"
loader = subprocess.Popen([sys.executable, "-I", "-S", "-c", sleeping])
print("WARNING:root:Defaulting to PJRT_DEVICE=CPU", file=sys.stderr)
if not (Path(model_dir) / "model.safetensors").exists() or fault == "predicts refused":
    loader.kill()
    fail(f"error: {model_dir}/model.safetensors names neither classes nor features")

hardware = {"kind": settings["kind"], "devices": settings["devices"]}
if is_plain or fault == "predicts elsewhere":
    hardware = {"kind": "CPU", "devices": 1}
report("start", pid=os.getpid(), hosts=1, **hardware)
compile_network(loader)
kind, names = read_inputs()
answers = [answer(name, kind) for name in names]
spoil(answers)
if fault != "predicts no file":
    Path(out).write_text("".join(f"{json.dumps(one)}\n" for one in answers))

recompilations = []
if fault == "predicts recompiles":
    recompilations = ["eval_step was compiled again for known input shapes"]
graphs = {} if is_plain else {"recompilations": recompilations, "fallbacks": []}
loader.kill()
report("end", count=len(names), broken=0, timed=len(names) - 64, seconds=0.5, graphs=graphs)
