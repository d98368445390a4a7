"""Estimated cycles of our train steps beside JAX's and the usual PyTorch/XLA ones.

    make jax                                the environment of JAX, .venv-jax
    python -m research.jax_peers            every row: an hour on two cores
    python -m research.jax_peers GLUE       rows with "glue" in their name
    python -m research.jax_peers --missing  rows and settings that have no figures
    python -m research.jax_peers --print    only the table, of what is there

`make guards` installs libtpu. JAX's steps (research/jax/steps.py) have the shapes, batch,
optimizer, dropout and clipping of ours; JAX lowers them, and libtpu compiles them for one chip of
v5e with effort full, by the code that compiles ours. A step with dropout is compiled with JAX's
default random numbers and with "rbg", BERT's also with the masks of attention that its example
shares among rows and heads. What ours asks libtpu for, fusions (train/common/xla/backend.py) and
but for GLUE and DLRM the vector memory of one (their VMEM_KIB), is tried on the settings that PEERS
names, not on all. The quickest is in the table. The figures are kept in
research/results/jax.json, the table in docs/tpu/jax.md; its other two columns are stock.json's
there (research/tpu_cycles.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from tpu.compiler import bundles, libtpu, report, results
from tpu.compiler.libtpu import GIB
from tpu.compiler.pages import (
    DOCS,
    ROOT,
    bundle_count,
    environment_of_figures,
    ratio,
    table,
    two_at_a_time,
)
from tpu.compiler.staging import Staged
from train import pretrain, resnet50, transformer
from train.common.xla import backend

JAX = ROOT / ".venv-jax/bin/python"
TOPOLOGY = "v5e:1x1"
# A setting is a kind of random numbers, then what is added to it.
DEFAULT = "threefry2x32"
RBG = "rbg"
SHARED = ", shared masks"
FUSIONS = ", fusions"
VMEM = ", vmem"
SIDES = ("usual", "JAX", "ours")
# Ours, by the step that has a setting with VMEM.
SCRIPTS = {
    "resnet50": resnet50,
    "bert": pretrain,
    "bert-large": pretrain,
    "transformer": transformer,
    "transformer-big": transformer,
}
# What the page reads of a report.
READ = (
    "libtpu",
    "rng",
    *results.SHORTAGE,
    *results.MEMORY,
    "bytes_accessed",
    "random_bytes",
    *results.CYCLES,
)


@dataclass(frozen=True)
class Peer:
    """A row: its name in stock.json, a step of research/jax/steps.py, and the settings to try."""

    name: str
    step: str
    batch: int
    settings: tuple[str, ...] = (DEFAULT, RBG, RBG + FUSIONS, RBG + SHARED)  # GLUE's


PEERS = (
    Peer(
        "ResNet-50, 224 px",
        "resnet50",
        batch=128,
        settings=(DEFAULT, DEFAULT + FUSIONS, DEFAULT + FUSIONS + VMEM),
    ),
    Peer(
        "BERT-base pretraining, 512 tokens",
        "bert",
        batch=32,
        settings=(*Peer.settings, RBG + SHARED + FUSIONS, RBG + SHARED + VMEM),
    ),
    Peer(
        "the same, 64 rows",
        "bert",
        batch=64,
        settings=(DEFAULT, RBG, DEFAULT + FUSIONS, RBG + SHARED, RBG + SHARED + VMEM),
    ),
    Peer(
        "BERT-large pretraining, 512 tokens",
        "bert-large",
        batch=8,
        settings=(*Peer.settings, RBG + SHARED + VMEM),
    ),
    Peer("BERT-base on GLUE, 128 tokens", "bert-glue", batch=128),
    Peer(
        "Transformer base, 64 tokens",
        "transformer",
        batch=256,
        settings=(DEFAULT, RBG, RBG + VMEM),
    ),
    Peer(
        "Transformer big, packed, 256 tokens",
        "transformer-big",
        batch=32,
        settings=(DEFAULT, RBG, RBG + FUSIONS, RBG + VMEM),
    ),
    Peer(
        "Terabyte, 1 chip, at most 1M",
        "dlrm",
        batch=2048,
        settings=(DEFAULT, DEFAULT + FUSIONS),
    ),
)


def environment() -> None:
    """Raises InputError where JAX's environment is not there, or not whole."""
    if not (JAX.parents[1] / ".installed").exists():
        missing = f"{JAX.relative_to(ROOT)} is not there, or not whole"
        raise InputError(f"{missing}: make JAX's environment by `make jax`")


def lowered(step: str, batch: int, setting: str) -> bytes:
    """Returns the HloModuleProto of one of JAX's steps.

    Raises:
        InputError: JAX's environment is not there.
    """
    environment()
    random_numbers, _, _ = setting.partition(",")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.pb")
        command = [JAX, "research/jax/steps.py", step, "--batch", str(batch)]
        command += ["--rng", random_numbers, "--out", path]
        if SHARED in setting:
            command.append("--shared-masks")
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        return path.read_bytes()


def compile_one(step: str, batch: int, setting: str) -> dict:
    """Returns the record of one of JAX's steps; of one that does not fit, what it needs."""
    module = lowered(step, batch, setting)
    backend.ask_compiler(
        backend.FUSIONS if FUSIONS in setting else "",
        SCRIPTS[step].VMEM_KIB if VMEM in setting else 0,
    )
    # As of our Transformer's, the writing of its code does not end.
    endless = step == "transformer" and "," in setting
    found = {"rng": setting, "libtpu": libtpu.version()}
    with bundles.folder() as code:
        if not endless:
            bundles.dump_to(code)
        with libtpu.Topology(TOPOLOGY) as topology:
            try:
                with topology.compile(module, "full") as program:
                    counted = None if endless else bundles.read(code)
                    staged = Staged(module, {}, [], {}, outputs=0, kept=0)
                    found |= report.figures(staged, program, topology, "full", counted)
                    found["fits"] = True
            except libtpu.OutOfMemory as error:
                found["needed"] = error.needed
                found["fits"] = False
    return results.record(found, READ)


def measured(step: str, batch: int, setting: str) -> dict:
    """Does `compile_one` in a process of its own: libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [
            sys.executable,
            "-m",
            "research.jax_peers",
            "--one",
            step,
            str(batch),
            setting,
            str(path),
        ]
        subprocess.run(command, cwd=ROOT, check=True, env=environment_of_figures())
        return json.loads(path.read_text())


def quickest(records: dict[str, dict]) -> dict:
    """Returns the record with the fewest cycles; where none fits, the one that needs least."""
    fitting = [each for each in records.values() if each["fits"]]
    if fitting:
        return min(fitting, key=lambda each: each["cycles"])
    return min(records.values(), key=lambda each: each["needed"])


def cells(peer: Peer, jax: dict, pair: dict) -> list[str]:
    """Returns a line of the table."""
    cycles = []
    besides = []
    drawn = []
    gib = []
    moved = []
    for side in (pair["usual"], jax, pair["ours"]):
        fits = "cycles" in side
        cycles.append(f"{side['cycles'] / 1e6:.1f}M" if fits else "does not fit")
        moved.append(f"{side['bytes_accessed'] / 1e9:.1f}" if fits else "")
        drawn.append(f"{side['random_bytes'] / 1e9:.2f}" if "random_bytes" in side else "")
        besides.append(bundle_count(side))
        needed = side.get("memory", side)["needed"]
        gib.append(f"{needed / GIB:.2f}")

    shown = [peer.name, str(peer.batch), jax["rng"]]
    return [*shown, *cycles, ratio(pair["ours"], jax), *besides, *drawn, *gib, *moved]


def page(figures: dict, stock: dict) -> str:
    """Returns docs/tpu/jax.md, of the records of jax.json and of stock.json."""
    header = ["step", "batch", "JAX's setting", "usual, cycles", "JAX", "ours", "ours / JAX"]
    for what in ("bundles", "GB drawn", "GiB", "GB moved"):
        header += [f"{side}, {what}" for side in SIDES]

    rows = []
    for peer in PEERS:
        if peer.name in figures and peer.name in stock:
            rows.append(cells(peer, quickest(figures[peer.name]), stock[peer.name]))

    first = next(iter(figures.values()))
    version = next(iter(first.values()))["libtpu"]
    jax = ", ".join(f"{package} {pinned(package)}" for package in ("jax", "flax", "optax"))
    return f"""# The scripts' steps beside JAX's

Written by `python -m research.jax_peers`; do not edit. Estimates of libtpu {version} (effort full) for one chip of v5e,
for whole train steps: bfloat16 with float32 parameters and optimizer state, dropout on, update included, state donated.
JAX: {jax}; research/jax/steps.py says which examples its steps follow. All sides have the same shapes, batch, optimizer
and dropout, but for two things: the usual pretraining steps score all places of a row, not only the predicted ones; and
with "shared masks" BERT's attention drops the same weights in all rows and heads of JAX's batch, as transformers'
example has it, where ours and its other settings draw for each. Of JAX's settings (these, its two kinds of random
numbers, and with some of them what ours asks libtpu for: fusions, and but for GLUE and DLRM more vector memory for
one; all that were compiled are below the table) the quickest is shown. Usual steps are as libtpu compiles them by
default.

What the cycles leave out: gathers, scatters, sorts and the max pool's gradient, whose code is counted as "bundles"
(tpu/compiler/bundles.py; empty: not counted); the drawing of random numbers by the hardware, of which "GB drawn" is the
size (JAX's default numbers are arithmetic, which has cycles; ours are a hash of a few); waiting, and asynchronous
copies. "Ours / JAX" is of cycles and bundles together where both were counted: our tables' updates in DLRM are a loop
over rows, so bundles are most of its step. "GB moved" is what operations read and write, in on-chip memory and in HBM.

{table(header, rows)}

JAX's settings, million cycles: {both(figures)}.
"""


def arranged(figures: dict) -> dict:
    """Returns the figures in the order of PEERS and of their settings."""
    figures = results.in_order(figures, [peer.name for peer in PEERS])
    for peer in PEERS:
        if peer.name in figures:
            figures[peer.name] = results.in_order(figures[peer.name], peer.settings)
    return figures


def both(figures: dict) -> str:
    """Returns what each setting of random numbers costs, in a sentence."""
    found = []
    for peer in PEERS:
        records = figures.get(peer.name, {})
        if len(records) < 2:
            continue
        costs = []
        for setting in peer.settings:
            record = records.get(setting)
            if record is None:
                costs.append(f"{setting} not compiled")
            elif record["fits"]:
                costs.append(f"{setting} {record['cycles'] / 1e6:.1f}")
            else:
                costs.append(f"{setting} {record['needed'] / GIB:.2f} GiB")
        found.append(f"{peer.name} {', '.join(costs)}")
    return "; ".join(found)


def pinned(package: str) -> str:
    """Returns a package's version in requirements-jax.txt."""
    for line in (ROOT / "requirements-jax.txt").read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.removeprefix(f"{package}==").split()[0]
    raise KeyError(package)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="", help="part of the rows' names (all)")
    parser.add_argument("--missing", action="store_true", help="keep the figures that are there")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    parser.add_argument(
        "--one",
        nargs=4,
        metavar=("STEP", "BATCH", "RNG", "JSON"),
        help="compile one step",
    )
    options = parser.parse_args()
    if options.one:
        step, batch, setting, path = options.one
        Path(path).write_text(json.dumps(compile_one(step, int(batch), setting)))
        return

    file = results.FOLDER / "jax.json"
    figures = results.load(file)
    if not any(options.name.lower() in peer.name.lower() for peer in PEERS):
        names = ", ".join(peer.name for peer in PEERS)
        parser.error(f"no row has {options.name!r} in its name; there are {names}")

    jobs = []
    for peer in PEERS:
        known = figures.get(peer.name, {}) if options.missing else {}
        if options.name.lower() in peer.name.lower():
            jobs += [(peer, setting) for setting in peer.settings if setting not in known]
    if options.print:
        jobs = []
    if jobs:  # rather than an error of each
        libtpu.installed(libtpu.NEWEST)
        environment()
    elif not figures:
        raise InputError(f"{file} has no figures yet: leave --print out")

    stock = results.load(results.FOLDER / "stock.json")
    with two_at_a_time() as pool:
        found = pool.map(lambda job: measured(job[0].step, job[0].batch, job[1]), jobs)
        for (peer, setting), record in zip(jobs, found, strict=True):
            figures.setdefault(peer.name, {})[setting] = record
            figures = arranged(figures)
            results.save(file, figures)
            print(peer.name, setting, record.get("cycles", "does not fit"), flush=True)

    text = page(figures, stock)
    (DOCS / "jax.md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
