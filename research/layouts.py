"""Losses of small models that are spread over virtual devices, against those of one device.

what      20 updates of pretraining and of the Transformer on synthetic data, dropout on, float32:
          the largest relative difference of a loss from that of the same command on one device.
          Between layouts sums are of other parts, and Adam divides by small numbers: 1e-6 is
          rounding, a mistake in a gradient is a thousand times that. But the input of a ReLU that
          is 0 within rounding may get either sign: with --seed 0 the Transformer has such a one in
          update 4, and differs by 2e-5 from then on, as on one device if its weights are moved by
          1e-7
export    whether its weights are those of the first row with these devices and this --mesh, bit for
          bit
run       python -m research.layouts        prints the table of docs/large_models.md in Markdown
"""

import json
import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from models import encoders
from models.encoders.record import Size
from train import pretrain, transformer


@dataclass(frozen=True)
class Row:
    """A line of the table: flags of what is trained, and how it is spread over devices."""

    what: str
    how: str
    devices: int

    @property
    def mesh(self) -> str:
        """The value of --mesh; "": the default."""
        if self.how.startswith("--mesh"):
            return self.how.split()[1]
        return ""


LAMB = "bert --next-sentence --update-every 2 --optimizer lamb"
ROWS = [
    Row("bert", "--mesh data=1,model=2", devices=2),
    Row("bert", "--shard-state full", devices=2),
    Row("bert", "", devices=4),
    Row("bert", "--shard-state optimizer", devices=4),
    Row("bert", "--shard-state full --remat", devices=4),
    Row("bert", "--mesh data=2,model=2", devices=4),
    Row("bert", "--mesh data=2,model=2 --shard-state optimizer", devices=4),
    Row("bert", "--mesh data=2,model=2 --shard-state full --remat", devices=4),
    Row("bert", "--shard-state full", devices=8),
    Row("bert", "--mesh copies=2,data=4 --shard-state full", devices=8),
    Row("bert", "--mesh copies=2,data=2,model=2 --shard-state full --remat", devices=8),
    Row("bert", "--mesh data=1,model=8", devices=8),
    Row(LAMB, "--shard-state full", devices=2),
    Row(LAMB, "--mesh data=4,model=2 --shard-state full --remat", devices=8),
    Row("roberta", "--mesh data=1,model=4 --remat", devices=4),
    Row("roberta", "--mesh data=4,model=2 --shard-state optimizer", devices=8),
    Row("roberta", "--shard-state optimizer", devices=8),
    Row("distilbert", "--mesh data=2,model=2 --shard-state optimizer", devices=4),
    Row("distilbert", "--shard-state full --remat", devices=8),
    Row("xlnet --update-every 2", "--shard-state full", devices=4),
    Row("xlnet", "--mesh data=2,model=4 --shard-state full --remat", devices=8),
    Row("xlnet", "--mesh copies=4,data=2 --shard-state optimizer", devices=8),
    Row("roberta", "--mesh copies=2,data=2 --shard-state full", devices=4),
    Row("distilbert", "--mesh copies=2,data=2 --shard-state full", devices=4),
    Row("xlnet", "--mesh copies=2,data=2 --shard-state full --remat", devices=4),
    Row("transformer --seed 1", "", devices=4),
    Row("transformer --seed 1", "--shard-state optimizer", devices=4),
    Row("transformer --seed 1", "--shard-state full --remat", devices=4),
    Row("transformer --seed 1", "--mesh copies=2,data=2 --shard-state full", devices=4),
    Row("transformer --seed 1", "--mesh data=1,model=4", devices=4),
    Row("transformer --seed 1", "--mesh data=2,model=2 --shard-state full --remat", devices=4),
    Row("transformer --seed 1", "--mesh data=4,model=2 --shard-state full --remat", devices=8),
]
SIZE = Size(layers=2, width=32, heads=8)


def trained(what: str, how: str, runs: str, teacher: str) -> dict:
    """Trains in this process; returns the losses, and a checksum of the weights of the export."""
    name = f"{what} {how}".replace(" ", "_").replace("--", "")
    kind, *flags = what.split()
    flags = ["tiny", *flags, *how.split(), "--runs", runs, "--name", name]
    if kind == "transformer":
        script = transformer
        of_script = {"updates": 20, "warmup_updates": 5, "dropout": 0.1}
    else:
        script = pretrain
        of_script = {"steps": 20, "warmup_steps": 5, "batch_size": 16, "teacher": teacher}
        flags += ["--model", kind]
    config = tyro.extras.overridable_config_cli(script.PRESETS, args=flags)
    script.main(replace(config, log_every=1, eval_every=20, **of_script))

    losses = []
    for line in Path(runs, name, "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses.append(record["loss"])
    (export,) = Path(runs, name, "export").glob("model.*")
    return {"losses": losses, "export": zlib.crc32(export.read_bytes())}


def on(devices: int, rows: list[Row], folder: str) -> list[dict]:
    """Returns what `trained` gives for each row, all in a process with so many devices."""
    jobs = json.dumps([(row.what, row.how) for row in rows])
    runs = f"{folder}/{devices}"
    teacher = f"{folder}/1/bert_/export"
    command = [sys.executable, "-m", "research.layouts", jobs, runs, teacher]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table."""
    kinds = list(dict.fromkeys(row.what for row in ROWS))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = [Row(what, "", devices=1) for what in kinds]
        one = dict(zip(kinds, on(1, alone, folder), strict=True))
        for devices in sorted({row.devices for row in ROWS}):
            rows = [row for row in ROWS if row.devices == devices]
            for row, result in zip(rows, on(devices, rows, folder), strict=True):
                found[row] = result

    print("| model | flags | devices | largest relative difference | export |")
    print("|---|---|---|---|---|")
    first: dict[tuple, int] = {}  # checksum of the first export of its kind
    for row, result in found.items():
        pairs = zip(result["losses"], one[row.what]["losses"], strict=True)
        worst = max(abs(loss - other) / other for loss, other in pairs)
        alike = (row.what, row.mesh, row.devices)
        if alike not in first:
            first[alike] = result["export"]
            export = ""
        elif first[alike] == result["export"]:
            export = "the same"
        else:
            export = "differs"
        flags = f"`{row.how}`" if row.how else ""
        print(f"| {row.what} | {flags} | {row.devices} | {worst:.1e} | {export} |")


if __name__ == "__main__":
    if len(sys.argv) == 4:  # from `on`
        encoders.SIZES["tiny"] = SIZE
        jobs, runs, teacher = sys.argv[1:]
        results = [trained(what, how, runs, teacher) for what, how in json.loads(jobs)]
        print(json.dumps(results))
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        main()
