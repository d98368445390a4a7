"""Losses of small models whose layers and state are spread over virtual devices, against those of one device.

what      20 updates of pretraining and of the Transformer on synthetic data, dropout on, float32: the largest relative
          difference of a loss from that of the same command on one device. Between layouts sums are of other parts, and
          Adam divides by small numbers: a difference of 1e-6 is rounding, a mistake in a gradient is a thousand times
          that. But the input of a ReLU that is 0 within rounding may get either sign: with --seed 0 the Transformer has
          such a one in update 4, and differs by 2e-5 from then on, as on one device if its weights are moved by 1e-7
export    whether its weights are those of the first row with these devices and this --mesh, bit for bit
run       python -m bench.layouts        prints the table of docs/large_models.md in Markdown
"""

import json
import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import tyro

from models import encoders
from models.encoders.record import Size
from train import pretrain, transformer

# Flags of what is trained, of how it is spread, and devices.
ROWS = [
    ("bert", "--mesh data=1,model=2", 2),
    ("bert", "--shard-state full", 2),
    ("bert", "", 4),
    ("bert", "--shard-state optimizer", 4),
    ("bert", "--shard-state full --remat", 4),
    ("bert", "--mesh data=2,model=2", 4),
    ("bert", "--mesh data=2,model=2 --shard-state optimizer", 4),
    ("bert", "--mesh data=2,model=2 --shard-state full --remat", 4),
    ("bert", "--shard-state full", 8),
    ("bert", "--mesh copies=2,data=4 --shard-state full", 8),
    ("bert", "--mesh copies=2,data=2,model=2 --shard-state full --remat", 8),
    ("bert", "--mesh data=1,model=8", 8),
    ("bert --next-sentence --update-every 2 --optimizer lamb", "--shard-state full", 2),
    ("bert --next-sentence --update-every 2 --optimizer lamb", "--mesh data=4,model=2 --shard-state full --remat", 8),
    ("roberta", "--mesh data=1,model=4 --remat", 4),
    ("roberta", "--mesh data=4,model=2 --shard-state optimizer", 8),
    ("roberta", "--shard-state optimizer", 8),
    ("distilbert", "--mesh data=2,model=2 --shard-state optimizer", 4),
    ("distilbert", "--shard-state full --remat", 8),
    ("xlnet --update-every 2", "--shard-state full", 4),
    ("xlnet", "--mesh data=2,model=4 --shard-state full --remat", 8),
    ("xlnet", "--mesh copies=4,data=2 --shard-state optimizer", 8),
    ("roberta", "--mesh copies=2,data=2 --shard-state full", 4),
    ("distilbert", "--mesh copies=2,data=2 --shard-state full", 4),
    ("xlnet", "--mesh copies=2,data=2 --shard-state full --remat", 4),
    ("transformer --seed 1", "", 4),
    ("transformer --seed 1", "--shard-state optimizer", 4),
    ("transformer --seed 1", "--shard-state full --remat", 4),
    ("transformer --seed 1", "--mesh copies=2,data=2 --shard-state full", 4),
    ("transformer --seed 1", "--mesh data=1,model=4", 4),
    ("transformer --seed 1", "--mesh data=2,model=2 --shard-state full --remat", 4),
    ("transformer --seed 1", "--mesh data=4,model=2 --shard-state full --remat", 8),
]
SIZE = Size(layers=2, width=32, heads=8)


def trained(what: str, how: str, runs: str, teacher: str) -> dict:
    """Trains in this process; returns the losses, and a checksum of the weights of the export."""
    name = f"{what} {how}".replace(" ", "_").replace("--", "")
    kind, *flags = what.split()
    flags = ["tiny", *flags, *how.split(), "--runs", runs, "--name", name]
    if kind == "transformer":
        script, of_script = transformer, {"updates": 20, "warmup_updates": 5, "dropout": 0.1}
    else:
        script, of_script = pretrain, {"steps": 20, "warmup_steps": 5, "batch_size": 16, "teacher": teacher}
        flags += ["--model", kind]
    config = tyro.extras.overridable_config_cli(script.PRESETS, args=flags)
    script.main(replace(config, log_every=1, eval_every=20, **of_script))
    lines = map(json.loads, Path(runs, name, "metrics.jsonl").read_text().splitlines())
    (export,) = (path.read_bytes() for path in Path(runs, name, "export").glob("model.*"))
    return {"losses": [line["loss"] for line in lines if "loss" in line], "export": zlib.crc32(export)}


def on(devices: int, jobs: list, folder: str) -> list[dict]:
    """Returns what `trained` gives for each (what, how), all in a process with so many devices."""
    folders = f"{folder}/{devices}", f"{folder}/1/bert_/export"
    command = [sys.executable, "-m", "bench.layouts", json.dumps(jobs), *folders]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table."""
    kinds = list(dict.fromkeys(what for what, *_ in ROWS))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        one = dict(zip(kinds, on(1, [(what, "") for what in kinds], folder), strict=True))
        for devices in sorted({devices for *_, devices in ROWS}):
            rows = [row for row in ROWS if row[2] == devices]
            found |= zip(rows, on(devices, [row[:2] for row in rows], folder), strict=True)
    print("| model | flags | devices | largest relative difference | export |\n|---|---|---|---|---|")
    first: dict[tuple, int] = {}
    for (what, how, devices), result in found.items():
        pairs = zip(result["losses"], one[what]["losses"], strict=True)
        worst = max(abs(loss - other) / other for loss, other in pairs)
        mesh = how.split()[1] if how.startswith("--mesh") else ""
        export = "" if (what, mesh, devices) not in first else "differs"
        if first.setdefault((what, mesh, devices), result["export"]) == result["export"]:
            export = export and "the same"
        print(f"| {what} | {f'`{how}`' if how else ''} | {devices} | {worst:.1e} | {export} |")


if __name__ == "__main__":
    if len(sys.argv) == 4:  # from `on`
        encoders.SIZES["tiny"] = SIZE
        print(json.dumps([trained(*job, *sys.argv[2:]) for job in json.loads(sys.argv[1])]))
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        main()
