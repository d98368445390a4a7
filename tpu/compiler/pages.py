"""Writes docs/tpu/README.md and the figures of guards: every recipe compiled for several TPUs, and
how it scales.

    make compile-all                        everything: three quarters of an hour on two cores
    make compile-all ARGS=recipes           memory and collectives of every recipe on four TPUs
    make compile-all ARGS=scaling           three recipes on 8, 32 and 256 chips, with the picture
    make compile-all ARGS=mlperf            DLRM with the batch of a published run, on 64 chips of
                                            two TPUs
    make compile-all ARGS=guards            the small configurations that `make guards` compares:
                                            accepts a change
    make compile-all ARGS="recipes --missing"   only what the files do not have yet
    make compile-all ARGS=page              compiles nothing: writes the page again

tpu/compiler/compile.py compiles each step in a process of its own, two at a time. The figures are
kept in research/results, and docs/tpu/README.md is written from them. Estimated cycles on one chip:
research/tpu_cycles.py.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from errors import InputError
from tpu.compiler import libtpu, results
from tpu.compiler.libtpu import GENERATIONS, GIB

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/tpu"
_SCALING = (
    *results.IDENTITY,
    "devices",
    "batch",
    *results.MEMORY,
    *results.CYCLES,
    *results.COLLECTIVES,
)
# The parts, and what the page and the guards (tests/test_compile.py) read of their reports.
FIELDS = {
    "recipes": (
        *results.IDENTITY,
        *results.SHORTAGE,
        "batch",
        *results.MEMORY,
        *results.COLLECTIVES,
    ),
    "scaling": _SCALING,
    "mlperf": _SCALING,
    "guards": (
        *results.IDENTITY,
        "program",
        "besides.libtpu",
        "besides.needed",
        "besides.cycles",
        *results.MEMORY,
        "kept_bytes",
        "bytes_accessed",
        "copies.count",
        "copies.bytes",
        "donated",
        *results.CYCLES,
        *results.COLLECTIVES,
    ),
}
PARTS = tuple(FIELDS)


@dataclass(frozen=True)
class Row:
    """A line of a table: the arguments of tpu/compiler/compile.py.

    Attributes:
        batch: examples per device of a train step.
        besides: another version of libtpu that has to compile it; "": none.
    """

    name: str
    model: str
    preset: str
    batch: int
    task: str = ""
    flags: tuple[str, ...] = ()
    program: str = "train"
    besides: str = ""

    def command(
        self,
        topology: str,
        effort: str,
        output: str,
        module: str = "tpu.compiler.compile",
    ) -> list[str]:
        """Returns the command, which does not search for a batch that fits."""
        command = [sys.executable, "-m", module, self.model, self.preset]
        if self.task:
            command += ["--task", self.task]
        command += ["--topology", topology, "--batch", str(self.batch), "--effort", effort]
        command += ["--json", output]
        if self.program != "train":  # research/jax_peers.py has no other, and no flag for it
            command += ["--program", self.program]
        if self.besides:
            command += ["--besides", self.besides]
        command.append("--no-search")
        if self.flags:
            command += ["--", *self.flags]
        return command


# ---- what is compiled ----------------------------------------------------------------------------

RESNET = Row("ResNet-50", "resnet50", "full", batch=128)
BERT_PRETRAINING = Row("BERT-base pretraining", "bert", "full", batch=32, task="pretrain")
MLPERF_V1 = Row("DLRM, MLPerf v1 (Criteo Terabyte)", "dlrm", "mlperf_v1", batch=256)

# A chip's share of the published batch on eight chips. Where that does not fit, an update is made
# of micro-batches of 32 rows a chip: the step is of one micro-batch.
RECIPES = (
    RESNET,
    Row("Transformer base, packed", "transformer", "base", batch=13),
    Row("Transformer base, Google's shape", "transformer", "tpu", batch=256),
    Row("Transformer big, 1/8 of an update", "transformer", "big", batch=32),
    Row("BERT-base on MRPC", "bert", "full", batch=4, task="mrpc"),
    BERT_PRETRAINING,
    Row(
        "RoBERTa-base pretraining, 1/32 of an update",
        "roberta",
        "full",
        batch=32,
        task="pretrain",
        flags=("--update-every", "32"),
    ),
    Row(
        "DistilBERT pretraining, 1/16 of an update",
        "distilbert",
        "full",
        batch=32,
        task="pretrain",
        flags=("--update-every", "16"),
    ),
    Row(
        "XLNet-base pretraining, 1/32 of an update",
        "xlnet",
        "full",
        batch=32,
        task="pretrain",
        flags=("--update-every", "32"),
    ),
    Row("DLRM, Criteo Kaggle", "dlrm", "kaggle", batch=16),
    MLPERF_V1,
    Row("DLRM, MLPerf v2 (multi-hot, DCN-v2)", "dlrm", "mlperf_v2", batch=8192),
)
TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x1", "v4:2x2x1")

# A chip's share of 55,296 on 64 chips: Google's batch in MLPerf Training 1.0 (tpu-v4-128-TF).
MLPERF = Row("DLRM, MLPerf v1, 864 examples a chip", "dlrm", "mlperf_v1", batch=864)
PODS = ("v4:4x4x4", "v5p:4x4x4")
# Examples a second and chip, mlcommons/training_results_v1.0,
# Google/results/tpu-v4-128-TF/dlrm/result_0.txt: there 15 blocks of 3,794 steps take 37.94 s
# (time_ms from the block_start of epoch 1.2 to that of 1.95), evaluations included.
PUBLISHED = {"v4:4x4x4": 1.30e6}

# Three recipes whose batch grows with the chips; the tables of MLPerf v1 do not fit one chip, and
# need not be on all.
COPIES = Row(
    "DLRM, a copy of the tables on every 8 chips",
    "dlrm",
    "mlperf_v1",
    batch=256,
    flags=("--model-devices", "8"),
)
SCALED = (RESNET, BERT_PRETRAINING, MLPERF_V1, MLPERF, COPIES)
SCALES = ("v5e:2x4", "v5e:4x8", "v5e:16x16")

TRANSLATES = ("--dropout", "0.1", "--precision", "bfloat16")
MINI = ("--size", "mini")
TWO_CHIPS_A_LAYER = ("--mesh", "data=4,model=2")
CUT_STATE = ("--shard-state", "full")

RESNET_STEP = Row(
    "resnet50",
    "resnet50",
    "full",
    batch=32,
    flags=("--model", "resnet_tiny", "--image-size", "64"),
)
TRANSFORMER_STEP = Row("transformer", "transformer", "tiny", batch=32, flags=TRANSLATES)
STEPS = (
    RESNET_STEP,
    TRANSFORMER_STEP,
    Row(
        "transformer, two chips a layer",
        "transformer",
        "tiny",
        batch=32,
        flags=(*TRANSLATES, *TWO_CHIPS_A_LAYER),
    ),
    Row("bert on mrpc", "bert", "full", batch=8, task="mrpc", flags=("--lengths", "64")),
    Row("bert", "bert", "full", batch=8, task="pretrain", flags=MINI),
    Row(
        "bert, two chips a layer",
        "bert",
        "full",
        batch=8,
        task="pretrain",
        flags=(*MINI, *TWO_CHIPS_A_LAYER),
    ),
    Row(
        "bert, a state in parts",
        "bert",
        "full",
        batch=8,
        task="pretrain",
        flags=(*MINI, *CUT_STATE),
    ),
    Row("roberta", "roberta", "full", batch=8, task="pretrain", flags=MINI),
    Row("distilbert", "distilbert", "full", batch=8, task="pretrain", flags=MINI),
    Row("xlnet", "xlnet", "full", batch=8, task="pretrain", flags=MINI),
    Row("dlrm", "dlrm", "mlperf_v1", batch=256),
    Row("dlrm, 8 steps a call", "dlrm", "mlperf_v1", batch=256, flags=("--steps-a-call", "8")),
)


def another(program: str, name: str) -> Row:
    """Returns the guarded row of that name with another program of its script."""
    row = next(row for row in STEPS if row.name == name)
    return replace(row, name=f"{name}, {program}", program=program)


REMAT = Row(
    "bert, recomputed",
    "bert",
    "full",
    batch=8,
    task="pretrain",
    flags=(*MINI, "--remat"),
)
GUARDED = (
    *STEPS,
    another("translate", "transformer"),
    another("translate", "transformer, two chips a layer"),
    Row(
        "transformer, cut state",
        "transformer",
        "tiny",
        batch=32,
        flags=(*TRANSLATES, *CUT_STATE),
        program="translate",
    ),
    another("evaluate", "resnet50"),
    another("evaluate", "transformer"),
    another("evaluate", "bert on mrpc"),
    another("evaluate", "bert, a state in parts"),
    another("evaluate", "dlrm"),
    REMAT,
)
# The version that TPU VMs run has to compile a row of each kind, too: what is seen on another only
# is not proven for users. The other rows have the layers of these, or need no larger stack (XLNet,
# which takes 0.0.21 three minutes); versions.md has all programs on both.
KINDS = (
    "resnet50",
    "transformer",
    "transformer, two chips a layer",
    "bert on mrpc",
    "bert",
    "bert, two chips a layer",
    "bert, a state in parts",
    "distilbert",  # whose teacher drops nothing
    "dlrm",
    "transformer, translate",
    "transformer, cut state",
    "resnet50, evaluate",
    "transformer, evaluate",
    "bert on mrpc, evaluate",
    "bert, a state in parts, evaluate",
    "dlrm, evaluate",
    "bert, recomputed",
)


def _guards() -> tuple[Row, ...]:
    """Returns the guarded rows; those of KINDS have to compile on the version of TPU VMs, too."""
    rows = []
    for row in GUARDED:
        if row.name in KINDS:
            row = replace(row, besides=libtpu.ON_TPU_VMS)
        rows.append(row)
    return tuple(rows)


GUARDS = _guards()
# What `make guards` leaves to `make test-all`, so that it takes minutes: (row, TPU). Their layers,
# or their program on another TPU, are in rows that it keeps, except for XLNet's, which compile on
# every version that was tried.
LONG = (
    ("roberta", "v5e:2x4"),
    ("distilbert", "v5e:2x4"),
    ("xlnet", "v5e:2x4"),
    ("dlrm, 8 steps a call", "v5e:2x4"),
    ("transformer, two chips a layer, translate", "v5e:2x4"),
    ("bert, a state in parts", "v5e:4x4"),
    ("bert, a state in parts", "v5e:8x8"),
    ("xlnet, tiny", "v5e:1x1"),
)


def safe(row: Row) -> Row:
    """Returns a row with the safe forms of its program."""
    return replace(row, name=f"{row.name}, safe forms", flags=(*row.flags, "--safe-forms"))


# Without dropout, or with --remat, that version needs a larger stack; these compile with its own.
# See versions.md.
SAFE = (
    safe(TRANSFORMER_STEP),
    safe(another("evaluate", "bert on mrpc")),
    safe(REMAT),
)
# On one chip at full effort, which alone estimates cycles, by both versions: a form that gains on
# one may lose on the other. Half of the steps: the others share their layers.
_ESTIMATED = (
    RESNET_STEP,
    TRANSFORMER_STEP,
    Row("bert, tiny", "bert", "full", batch=8, task="pretrain", flags=("--size", "tiny")),
    Row("xlnet, tiny", "xlnet", "full", batch=8, task="pretrain", flags=("--size", "tiny")),
    Row("dlrm, 1M rows", "dlrm", "mlperf_v1", batch=256, flags=("--hash-rows", "1000000")),
)
CYCLES = tuple(replace(row, besides=libtpu.ON_TPU_VMS) for row in _ESTIMATED)


# ---- compiling -----------------------------------------------------------------------------------


def compiled(
    row: Row,
    topology: str,
    effort: str,
    module: str = "tpu.compiler.compile",
    variables: dict[str, str] | None = None,
) -> dict:
    """Runs tpu/compiler/compile.py and returns its report.

    A step that does not fit has {"fits": False, …}: with "needed", in bytes, if it was compiled,
    and with "reason" if the script refuses it because tables of embeddings are too large for these
    chips.

    Args:
        module: another program with the command line of compile.py.
        variables: of the environment, besides those of environment_of_figures.
    Raises:
        RuntimeError: it failed for another reason; with the last lines of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = row.command(topology, effort, str(path), module)
        environment = environment_of_figures() | (variables or {})
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if result.returncode == 2 and "What would fit:" in result.stderr:
            _, _, reason = result.stderr.rpartition("error: ")
            return {"fits": False, "reason": reason.strip()}
        if not path.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        return json.loads(path.read_text())


def environment_of_figures() -> dict[str, str]:
    """Returns the environment for figures. Raises InputError where the compiler that they are of is
    not installed.

    What a shell has of LIBTPU_INIT_ARGS or XLA_ZOO_SAFE_FORMS would be in them, unseen. A process
    that has devices has set the other three, with which another one cannot stage. The figures are
    of libtpu.NEWEST, unless TPU_LIBRARY_PATH names another.
    """
    environment = dict(os.environ)
    unseen = ("LIBTPU_INIT_ARGS", "XLA_ZOO_SAFE_FORMS")
    of_devices = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_USE_SPMD")
    for name in (*unseen, *of_devices):
        environment.pop(name, None)
    if not environment.get("TPU_LIBRARY_PATH"):
        environment["TPU_LIBRARY_PATH"] = str(libtpu.installed(libtpu.NEWEST))
    return environment


@contextlib.contextmanager
def two_at_a_time() -> Iterator[ThreadPoolExecutor]:
    """Yields two threads. After an error they begin nothing more: a compile takes minutes."""
    with ThreadPoolExecutor(2) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _product(
    rows: tuple[Row, ...],
    topologies: tuple[str, ...],
    effort: str,
) -> list[tuple[Row, str, str]]:
    """Returns (row, topology, effort) of every row on every topology."""
    jobs = []
    for row in rows:
        for topology in topologies:
            jobs.append((row, topology, effort))
    return jobs


def wanted(part: str) -> list[tuple[Row, str, str]]:
    """Returns (row, topology, effort) of everything in a part."""
    if part == "recipes":
        return _product(RECIPES, TOPOLOGIES, "fast")
    if part == "scaling":
        return _product(SCALED, SCALES, "full")
    if part == "mlperf":
        return _product((MLPERF,), PODS, "full")

    jobs = _product(GUARDS, ("v5e:2x4",), "fast")
    # 0.0.21 refuses this program for 64 chips: "asynchronous collective-permute must satisfy
    # routing limitations".
    cut_state = next(row for row in GUARDED if row.name == "bert, a state in parts")
    jobs += _product((cut_state,), ("v5e:4x4", "v5e:8x8"), "fast")
    jobs += _product(CYCLES, ("v5e:1x1",), "full")
    return jobs


def make(part: str, missing: bool) -> None:
    """Compiles a part and writes its file after every step, so that an interrupted run keeps what
    it has.

    Args:
        missing: whether what the file has is kept.
    """
    path = results.FOLDER / f"{part}.json"
    figures = results.load(path) if missing else {}
    jobs = []
    for row, topology, effort in wanted(part):
        if topology not in figures.get(row.name, {}):
            jobs.append((row, topology, effort))

    def compile_job(job: tuple[Row, str, str]) -> tuple[str, str, dict]:
        row, topology, effort = job
        return row.name, topology, compiled(row, topology, effort)

    with two_at_a_time() as pool:
        for name, topology, report in pool.map(compile_job, jobs):
            record = results.record(report, FIELDS[part])
            figures.setdefault(name, {})[topology] = record
            figures = arranged(part, figures)
            results.save(path, figures)
            print(f"{name} on {topology}: {memory(report)}", flush=True)


def arranged(part: str, figures: dict) -> dict:
    """Returns the figures of a part in the order of its table; those of rows that are gone are left
    out."""
    topologies: dict[str, list[str]] = {}
    for row, topology, _ in wanted(part):
        topologies.setdefault(row.name, []).append(topology)

    found = {}
    for name, wanted_topologies in topologies.items():
        if name in figures:
            found[name] = results.in_order(figures[name], wanted_topologies)
    return found


# ---- cells and tables ----------------------------------------------------------------------------


def memory(record: dict) -> str:
    """Returns the GiB that a chip needs, and whether it has them."""
    if "memory" in record:
        return f"{record['memory']['needed'] / GIB:.2f}"
    if "needed" in record:
        return f"does not fit: {record['needed'] / GIB:.2f}"
    return "does not fit: the tables"


def bundle_count(record: dict) -> str:
    """Returns the bundles of operations without an estimate, in millions; "" if they were not
    counted."""
    if "uncounted" not in record:
        return ""
    return f"{record['uncounted']['bundles'] / 1e6:.2f}M"


def ratio(ours: dict, other: dict) -> str:
    """Returns ours / other for a cell; "" where one has no cycles.

    It is of the cycles, and with them of the bundles of what has none, where both were counted.
    """
    if "cycles" not in ours or "cycles" not in other:
        return ""
    own = ours["cycles"]
    theirs = other["cycles"]
    if "uncounted" in ours and "uncounted" in other:
        own += ours["uncounted"]["bundles"]
        theirs += other["uncounted"]["bundles"]
    return f"{own / theirs:.2g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    ruled = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)


def collectives(record: dict) -> str:
    """Returns the collectives for a cell: "2 all-reduce 51.4 MB, …"."""
    found = []
    for kind, entry in sorted(record["collectives"].items()):
        found.append(f"{entry['count']} {kind} {entry['bytes'] / 1e6:,.1f} MB")
    return ", ".join(found) or "none"


def examples(record: dict) -> str:
    """Returns the examples of a step of all chips, for a cell."""
    return f"{record['batch'] * record['devices']:,}"


def recipes_table(figures: dict) -> str:
    """Returns the table of every recipe's memory on every TPU, and its collectives on the first."""
    header = ["step", "batch per chip"]
    header += [f"{topology}, GiB" for topology in TOPOLOGIES]
    header.append(f"collectives on {TOPOLOGIES[0]}, bytes per chip")

    rows = []
    for name, by_topology in figures.items():
        # A record of a step that does not fit has no batch.
        batch = max(record.get("batch", 0) for record in by_topology.values())
        cells = [name]
        cells.append(f"{batch:,}" if batch else "")

        for topology in TOPOLOGIES:
            if topology in by_topology:
                cells.append(memory(by_topology[topology]))
            else:
                cells.append("not run")

        first = by_topology.get(TOPOLOGIES[0], {})
        cells.append(collectives(first) if "memory" in first else "")
        rows.append(cells)
    return table(header, rows)


def scaling_table(figures: dict) -> str:
    """Returns the table of the growth with the number of chips."""
    header = [
        "step",
        "chips",
        "batch",
        "memory, GiB per chip",
        "collectives, bytes per chip",
        "cycles",
        "/ those of 8 chips",
        "bundles besides",
    ]
    rows = []
    for name, by_topology in figures.items():
        first = next(iter(by_topology.values()))
        for record in by_topology.values():
            cycles = record["cycles"]
            digits = 1 if cycles > 1e7 else 3
            cells = [
                name,
                str(record["devices"]),
                examples(record),
                memory(record),
                collectives(record),
                f"{cycles / 1e6:.{digits}f}M",
                f"{cycles / first['cycles']:.2f}",
                bundle_count(record),
            ]
            rows.append(cells)
    return table(header, rows)


def mlperf_table(figures: dict) -> str:
    """Returns the table of estimated examples a second and chip, beside the published ones."""
    header = [
        "TPU",
        "batch",
        "memory, GiB per chip",
        "collectives, bytes per chip",
        "cycles",
        "bundles besides",
        "examples a second and chip, by the cycles",
        "by cycles and bundles",
        "published, MLPerf Training 1.0",
    ]
    rows = []
    for topology, record in figures[MLPERF.name].items():
        generation, _, _ = topology.partition(":")
        in_a_second = GENERATIONS[generation].clock_hz * record["batch"]
        cycles = record["cycles"]
        both = cycles + record["uncounted"]["bundles"]
        published = ""
        if topology in PUBLISHED:
            published = f"{PUBLISHED[topology] / 1e6:.2f}M"
        cells = [
            topology,
            examples(record),
            memory(record),
            collectives(record),
            f"{cycles / 1e6:.2f}M",
            bundle_count(record),
            f"{in_a_second / cycles / 1e6:.2f}M",
            f"{in_a_second / both / 1e6:.2f}M",
            published,
        ]
        rows.append(cells)
    return table(header, rows)


def draw(figures: dict) -> None:
    """Draws docs/tpu/scaling.png: memory, bytes of collectives and cycles against the number of
    chips."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for name, by_topology in figures.items():
        first = next(iter(by_topology.values()))
        chips = []
        needed = []
        moved = []
        growth = []
        for record in by_topology.values():
            chips.append(record["devices"])
            needed.append(record["memory"]["needed"] / GIB)
            sent = sum(entry["bytes"] for entry in record["collectives"].values())
            moved.append(sent / 1e6)
            growth.append(record["cycles"] / first["cycles"])
        for axis, values in zip(axes, (needed, moved, growth), strict=True):
            axis.plot(chips, values, marker="o", label=name)

    titles = (
        "memory, GiB per chip",
        "collectives, MB per chip and step",
        "estimated cycles / those of 8 chips",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="chips of v5e", xscale="log", ylim=(0, None))
        axis.set_xticks([8, 32, 256], ["8", "32", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    # Outside of the panels, where it hides no line.
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(DOCS / "scaling.png", dpi=110)


# ---- the page ------------------------------------------------------------------------------------


def write_page(redraw: bool) -> None:
    """Writes docs/tpu/README.md from the parts that are there."""
    page = text_of_page()
    figures = results.load(results.FOLDER / "scaling.json")
    if redraw and figures:
        draw(figures)
    (DOCS / "README.md").write_text(page)


# A backslash joins two lines of this file to one of the page, whose lines are longer.
INTRODUCTION = """\
# What the TPU's compiler says about every recipe

Written by `make compile-all`; do not edit. No TPU ran any of this: libtpu {version} \
compiled the train step of each
script on a CPU. Memory is what the program asks for. \
Cycles, times and rates are the compiler's estimates: they leave
out random numbers, asynchronous copies, custom calls and waiting for other chips. \
"Bundles besides" are the code of
operations that the compiler gives no cycles, gathers and scatters above all: \
a bundle takes a cycle or more. `make
compile MODEL=… TOPOLOGY=…` shows more of each. \
Estimated cycles on one chip, beside the usual steps:
[stock.md](stock.md). Findings: [findings.md](findings.md).

Rows of BERT, RoBERTa and DistilBERT are from before the last layer \
was computed for used tokens only (models/last_layer.py),
and before pretraining asked for more vector memory (train/pretrain.py), \
here, in generations.md, in forms.md and, but for
`--moments` and `--optimizer`, in the first table of versions.md: these steps \
take less now, BERT-base pretraining 141.0
million cycles on one v5e chip instead of 158.8, \
as stock.md, jax.md and the cycles of versions.md say.
"""


def text_of_page() -> str:
    """Returns docs/tpu/README.md from the parts that are there."""
    parts = {}
    for part in PARTS:
        figures = results.load(results.FOLDER / f"{part}.json")
        if figures:
            parts[part] = figures

    page = INTRODUCTION.format(version=_first_version(parts))
    if "recipes" in parts:
        page += "\n## Does it fit?\n\n"
        page += "Memory that the step needs per chip; quick compile (effort fast).\n\n"
        page += recipes_table(parts["recipes"]) + "\n"
    if "scaling" in parts:
        page += "\n## More chips\n\n"
        page += "The batch per chip stays the same; effort full.\n\n"
        page += scaling_table(parts["scaling"]) + "\n\n"
        page += "![growth with the number of chips](scaling.png)\n"
    if "mlperf" in parts:
        page += "\n## DLRM with the batch of a published run\n\n"
        page += "64 chips; effort full.\n\n"
        page += mlperf_table(parts["mlperf"]) + "\n"
    return page


def _first_version(parts: dict[str, dict]) -> str:
    """Returns the version of libtpu that the first record which has one is of."""
    for figures in parts.values():
        for by_topology in figures.values():
            for record in by_topology.values():
                if "libtpu" in record:
                    return record["libtpu"]
    raise IndexError("no record has a version of libtpu")


def main() -> None:
    """Runs the command line."""
    known = ", ".join(PARTS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"of {known}, or page: only write it again (default: all)",
    )
    parser.add_argument("--missing", action="store_true", help="keep what the files have")
    options = parser.parse_args()
    unknown = set(options.parts) - {*PARTS, "page"}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: it is one of {known}, page")

    for part in options.parts or PARTS:
        if part != "page":
            make(part, options.missing)
    write_page(redraw=not options.parts or "scaling" in options.parts)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
