"""Stands in for `python3 -m tpu.launch train --tpu TPU … --run NAME -- NAME=value …`.

As tpu/launch.py of the project of tests/grid_bed.py. A run writes its summary.json into the folder
`bucket`, for gs://. tpus.json says what is wrong with a TPU:

    busy     another run is on it: exit code 2
    gone     it is gone after the run's first step: 75
    lost     it cannot be reached any more, and the run may go on: 1
    fails    the run's own error: 2
    waits    the run does not end before Ctrl-C, which stops it: 130
    leaves   the same, but a worker does not answer
"""

import json
import signal
import sys
import time
from pathlib import Path

flags, words = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
tpu = flags[flags.index("--tpu") + 1]
name = flags[flags.index("--run") + 1]
given = dict(word.split("=", 1) for word in words)
arguments = given["ARGS"].split()
lr = float(arguments[arguments.index("--lr") + 1])
runs = arguments[arguments.index("--runs") + 1]
faults = json.loads(Path("tpus.json").read_text()) if Path("tpus.json").exists() else {}
fault = faults.get(tpu, "")


def say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


def end(code: int, error: str = "") -> None:
    if error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(code)


def interrupt(*_: object) -> None:
    say(f"stopping {name} on all workers, which first save a checkpoint")
    say("not all workers have stopped" if fault == "leaves" else "no process of the run is left")
    sys.exit(130)


signal.signal(signal.SIGINT, interrupt)
if fault == "busy":
    end(2, f"{tpu} is busy: other (MODEL=dlrm)")
with Path("starts").open("a") as starts:
    starts.write(f"{name} {tpu}\n")
print("step 1", flush=True)
time.sleep(0.2)
if fault == "gone":
    time.sleep(2)  # the other TPU has done all other runs by then
    end(75, f"{tpu} is gone: it was preempted")
if fault == "lost":
    end(1, f"worker 0 of {tpu} was not reached for 180 s")
if fault == "fails":
    print("error: --data is missing", flush=True)
    say("the run ended with exit code 2")
    end(2)
while fault in ("waits", "leaves"):
    time.sleep(0.02)

folder = Path("bucket", runs.partition("://")[2], name)
folder.mkdir(parents=True, exist_ok=True)
summary = {"metrics": {"accuracy": 0.5 + 1000 * lr}, "elapsed_seconds": 60.0}
(folder / "summary.json").write_text(json.dumps(summary))
