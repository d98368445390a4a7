"""Estimated cycles of the scripts' train steps beside the usual ones, by the TPU's own compiler.

    python -m research.tpu_cycles                  every row: 1.5 hours on two cores
    python -m research.tpu_cycles bert --missing   those with "bert" in their name, if new
    python -m research.tpu_cycles --only ours      our steps (or: usual) alone
    python -m research.tpu_cycles --print          only the tables, of what is there
    python -m research.tpu_cycles --generation v6e the networks on one chip of v6e, v5p or v4
    python -m research.tpu_cycles --on-tpu-vms     our steps by the libtpu that TPU VMs run
    python -m research.tpu_cycles --stale          which rows are older than the code (also of
                                                   --on-tpu-vms)

`make guards` installs libtpu. Each row is two compiles with effort full, of the same Config and
batch: ours (tpu/compiler/compile.py) and the usual step (bench/stock.py), by the newest libtpu, for
v5e. Cycles are estimates. The figures are kept in research/results, the tables in docs/tpu:

    stock.json           stock.md         v5e
    generations.json     generations.md   --generation
    stock_tpu_vm.json    versions.md      --on-tpu-vms (tpu/compiler/versions.py writes the page)
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable

from errors import InputError
from tpu.compiler import libtpu, results, versions
from tpu.compiler.libtpu import GIB
from tpu.compiler.pages import (
    DOCS,
    ROOT,
    Row,
    bundle_count,
    compiled,
    environment_of_figures,
    memory,
    ratio,
    table,
    two_at_a_time,
)

ONE = "v5e:1x1"
EIGHT = "v5e:2x4"
CHIPS = {"v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "v4": "v4:1x1x1"}
PLACES = ("--predictions", "79")
LARGE = ("--size", "large", *PLACES)
WHOLE = ("--update-every", "1")
MILLION = ("--hash-rows", "1000000")
THREE_MILLION = ("--hash-rows", "3000000")


def pretraining(name: str, model: str, batch: int, flags: tuple[str, ...]) -> Row:
    """Returns a row of the encoders' pretraining."""
    return Row(f"{name}, 512 tokens", model, "full", batch, task="pretrain", flags=flags)


def tables(name: str, preset: str, batch: int, flags: tuple[str, ...] = ()) -> Row:
    """Returns a row of DLRM."""
    return Row(name, "dlrm", preset, batch, flags=flags)


NETWORKS = (
    Row("ResNet-50, 224 px", "resnet50", "full", batch=128),
    pretraining("BERT-base pretraining", "bert", batch=32, flags=PLACES),
    Row("the same, 64 rows", "bert", "full", batch=64, task="pretrain", flags=PLACES),
    pretraining("BERT-large pretraining", "bert", batch=8, flags=LARGE),
    Row("BERT-base on GLUE, 128 tokens", "bert", "full", batch=128, task="mrpc"),
    pretraining("RoBERTa-base pretraining", "roberta", batch=32, flags=WHOLE),
    pretraining("DistilBERT pretraining", "distilbert", batch=32, flags=WHOLE),
    pretraining("XLNet-base pretraining", "xlnet", batch=32, flags=WHOLE),
    Row("Transformer base, 64 tokens", "transformer", "tpu", batch=256),
    Row("Transformer big, packed, 256 tokens", "transformer", "big", batch=32, flags=WHOLE),
)
# Rows of the tables, each with the TPU that it is compiled for.
STEPS = tuple((row, ONE) for row in NETWORKS)
TABLES = (
    (tables("Kaggle, 1 chip, at most 1M rows a table", "kaggle", batch=128, flags=MILLION), ONE),
    (tables("Kaggle, 1 chip, up to 10.1M", "kaggle", batch=128), ONE),
    (tables("Kaggle, 8 chips, at most 1M", "kaggle", batch=16, flags=MILLION), EIGHT),
    (tables("Kaggle, 8 chips, up to 10.1M", "kaggle", batch=16), EIGHT),
    (tables("Terabyte, 1 chip, at most 1M", "mlperf_v1", batch=2048, flags=MILLION), ONE),
    (tables("Terabyte, 1 chip, at most 3M", "mlperf_v1", batch=2048, flags=THREE_MILLION), ONE),
    (tables("Terabyte, 8 chips, at most 1M", "mlperf_v1", batch=256, flags=MILLION), EIGHT),
    (tables("Terabyte, 8 chips, up to 40M", "mlperf_v1", batch=256), EIGHT),
)

# What the pages read of a report. jax.md (jax_peers.py) also reads random_bytes of stock.json.
READ = (
    *results.IDENTITY,
    *results.SHORTAGE,
    *results.MEMORY,
    "bytes_accessed",
    "estimated_seconds",
    "roofline_seconds.flops",
    "roofline_seconds.bytes",
    *results.CYCLES,
)
READ_OF_STOCK = (*READ, "random_bytes")
READ_OF_TPU_VMS = (*results.IDENTITY, *results.SHORTAGE, *results.MEMORY, "cycles")
MODULES = {"ours": "tpu.compiler.compile", "usual": "bench.stock"}  # the program of each side


def measure(row: Row, topology: str, known: dict, fields: tuple[str, ...]) -> dict:
    """Compiles both steps of a row; returns {"ours": record, "usual": record}.

    Args:
        known: those of the two records that are not to be compiled.
        fields: of a report, those that the records have.
    """
    found = {}
    for side, module in MODULES.items():
        if side in known:
            found[side] = known[side]
        else:
            report = compiled(row, topology, "full", module)
            found[side] = results.record(report, fields)
    return found


def measure_on_tpu_vms(row: Row, topology: str) -> dict:
    """Compiles our step by the libtpu that TPU VMs run; returns its record."""
    library = str(libtpu.installed(libtpu.ON_TPU_VMS))
    report = compiled(row, topology, "full", variables={"TPU_LIBRARY_PATH": library})
    return results.record(report, READ_OF_TPU_VMS)


def age(row: Row, topology: str, record: dict) -> str:
    """Returns whether the code still makes the program that a record is of, in words."""
    if "fingerprint" not in record:
        return "not known: it is from before reports had a fingerprint"

    command = row.command(topology, "full", os.devnull)
    # The script's flags stay the last.
    end = command.index("--") if "--" in command else len(command)
    command.insert(end, "--stage")
    environment = environment_of_figures()
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {result.returncode}"
        return f"not known: it cannot be staged: {reason}"

    now = result.stdout.split()[-1]
    return "as the code" if now == record["fingerprint"] else "OLDER than the code"


def cycles(record: dict) -> str:
    """Returns the cycles in millions, or why there are none."""
    if "cycles" in record:
        digits = 1 if record["cycles"] > 1e7 else 3
        return f"{record['cycles'] / 1e6:.{digits}f}M"
    if "needed" in record:
        return f"{memory(record)} GiB"
    return memory(record)


HEADER = [
    "step",
    "batch per chip",
    "usual, cycles",
    "ours",
    "ours / usual",
    "usual, bundles besides",
    "ours",
    "usual, GiB",
    "ours",
    "usual, GB moved",
    "ours",
    "ours, ms",
    "by flops",
    "by bytes",
]


def milliseconds(seconds: float | None) -> str:
    """Returns a time for a cell; "" where there is none."""
    if seconds is None:
        return ""
    digits = 1 if seconds > 0.01 else 2
    return f"{seconds * 1e3:.{digits}f}"


def cells(row: Row, figures: dict) -> list[str]:
    """Returns a line of the table, see HEADER."""
    ours = figures["ours"]
    usual = figures["usual"]

    gib = []
    moved = []
    for record in (usual, ours):
        fits = "memory" in record
        gib.append(f"{record['memory']['needed'] / GIB:.2f}" if fits else "")
        moved.append(f"{record['bytes_accessed'] / 1e9:.1f}" if fits else "")

    # No step is shorter than its flops and its bytes in HBM take.
    limits = ours.get("roofline_seconds", {})
    times = [ours.get("estimated_seconds"), limits.get("flops"), limits.get("bytes")]
    return [
        row.name,
        f"{row.batch:,}",
        cycles(usual),
        cycles(ours),
        ratio(ours, usual),
        bundle_count(usual),
        bundle_count(ours),
        *gib,
        *moved,
        *[milliseconds(each) for each in times],
    ]


def page(figures: dict) -> str:
    """Returns docs/tpu/stock.md, of {row: {"ours": record, "usual": record}}."""
    versions_of_records = []
    for pair in figures.values():
        versions_of_records += [record["libtpu"] for record in pair.values() if "libtpu" in record]
    version = versions_of_records[0]

    parts = [
        f"""# The scripts' steps beside the usual ones

Written by `python -m research.tpu_cycles`; do not edit. Estimates of libtpu {version} (effort full) for v5e, for whole
train steps: bf16 autocast, float32 parameters and optimizer state, dropout on, update included. "Usual" means
torchvision's ResNet, transformers' models, torch's `nn.Transformer`, and tables as parameters with a dense gradient
(bench/stock.py), with the same Config, optimizer and batch, as libtpu compiles them by default; ours ask it for
fusions, and some for vector memory (findings.md). Cycles leave out asynchronous copies, custom calls,
waiting for other chips, and the drawing of random numbers: the usual steps draw one per value that dropout may drop,
ours draw a seed. Gathers, scatters and sorts carry no cycles either: "bundles besides" counts their code, a cycle or
more a bundle (tpu/compiler/bundles.py); empty where it was not counted. "Ours / usual" is of their sum where both
were, else of the cycles. "GB moved" is what operations read and write, in on-chip memory as well as in HBM. Beside the
estimate in ms stands what no step is shorter than, by the chip's published peak: its flops, and its bytes in HBM.
DLRM's estimate, which leaves out gathers and scatters, may be below it.
"""
    ]
    for title, steps in (("Networks, one chip", STEPS), ("DLRM", TABLES)):
        rows = [cells(row, figures[row.name]) for row, _ in steps if row.name in figures]
        if rows:
            parts.append(f"\n## {title}\n\n{table(HEADER, rows)}\n")
    return "".join(parts)


def generations_page(figures: dict) -> str:
    """Returns docs/tpu/generations.md, of {generation: {row: {"ours": record, …}}}."""
    parts = [
        """# The networks' steps on other generations

Written by `python -m research.tpu_cycles --generation`; do not edit. As [stock.md](stock.md), which has v5e's and says
what is compared and what the cycles leave out. Of v5p and v4 a chip's two TensorCores work as one.
"""
    ]
    for name, pairs in figures.items():
        rows = [cells(row, pairs[row.name]) for row in NETWORKS if row.name in pairs]
        parts.append(f"\n## {name}, one chip\n\n{table(HEADER, rows)}\n")
    return "".join(parts)


def names_of(rows: Iterable[tuple[Row, str]]) -> list[str]:
    """Returns the rows' names, in the order of the tables."""
    return [row.name for row, _ in rows]


def whole_file(kept: dict, generation: str | None, figures: dict) -> dict:
    """Returns the figures of a file, those of a generation replaced by `figures`.

    Args:
        generation: None: v5e, which has a file of its own.
    """
    if generation is None:
        return figures
    return results.in_order(kept | {generation: figures}, CHIPS)


def print_ages(jobs: Iterable[tuple[Row, str]], records: dict) -> None:
    """Prints of each row whether its record is older than the code.

    Args:
        records: of our steps, {row: record}.
    """
    for row, topology in jobs:
        said = "no figures yet"
        if row.name in records:
            said = age(row, topology, records[row.name])
        print(f"{row.name}: {said}", flush=True)


def on_tpu_vms(jobs: list[tuple[Row, str]], options: argparse.Namespace) -> None:
    """Writes stock_tpu_vm.json, and the page that shows it.

    Args:
        jobs: those that the command line names.
    """
    path = results.FOLDER / "stock_tpu_vm.json"
    figures = results.load(path)
    if options.missing:
        jobs = [(row, topology) for row, topology in jobs if row.name not in figures]
    if options.stale:
        print_ages(jobs, figures)
        return

    if options.print:
        jobs = []
    with two_at_a_time() as pool:
        records = pool.map(lambda job: measure_on_tpu_vms(*job), jobs)
        for (row, _), record in zip(jobs, records, strict=True):
            figures[row.name] = record
            figures = results.in_order(figures, names_of(STEPS + TABLES))
            results.save(path, figures)
            print(row.name, cycles(record), flush=True)
    versions.write_page()


def named(jobs: Iterable[tuple[Row, str]], part: str) -> list[tuple[Row, str]]:
    """Returns those jobs that have `part` in the row's name."""
    return [(row, topology) for row, topology in jobs if part.lower() in row.name.lower()]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="", help="part of the rows' names (all)")
    parser.add_argument("--missing", action="store_true", help="keep the figures that are there")
    parser.add_argument("--only", choices=("ours", "usual"), help="compile these alone")
    parser.add_argument("--generation", choices=[*CHIPS], help="instead of v5e")
    parser.add_argument("--on-tpu-vms", action="store_true", help="our steps by their libtpu")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="compile nothing; say which rows are older than the code",
    )
    parser.add_argument("--print", action="store_true", help="compile nothing")
    options = parser.parse_args()
    if options.on_tpu_vms and (options.generation or options.only):
        parser.error("--on-tpu-vms is of our steps on v5e: leave --generation and --only out")

    if options.generation:
        name = "generations"
        every = [(row, CHIPS[options.generation]) for row in NETWORKS]
        fields = READ
    else:
        name = "stock"
        every = STEPS + TABLES
        fields = READ_OF_STOCK

    jobs = named(every, options.name)
    if not jobs:
        known = ", ".join(names_of(every))
        parser.error(f"no row has {options.name!r} in its name; there are {known}")
    if options.on_tpu_vms:
        on_tpu_vms(jobs, options)
        return

    path = results.FOLDER / f"{name}.json"
    kept = results.load(path)
    figures = kept.get(options.generation, {}) if options.generation else kept
    if options.missing:
        jobs = [(row, topology) for row, topology in jobs if row.name not in figures]
    if options.stale:
        print_ages(jobs, {row: pair["ours"] for row, pair in figures.items()})
        return

    if options.print:
        jobs = []
    if jobs:
        libtpu.installed(libtpu.NEWEST)  # rather than an error of each
    elif not figures:
        raise InputError(f"{path} has no figures yet: leave --print out")

    other = {"ours": "usual", "usual": "ours"}.get(options.only)
    known = {}
    if other:
        known = {row: {other: pair[other]} for row, pair in figures.items()}

    def one(job: tuple[Row, str]) -> dict:
        row, topology = job
        return measure(row, topology, known.get(row.name, {}), fields)

    with two_at_a_time() as pool:
        for (row, _), result in zip(jobs, pool.map(one, jobs), strict=True):
            figures[row.name] = result
            figures = results.in_order(figures, names_of(every))
            kept = whole_file(kept, options.generation, figures)
            results.save(path, kept)
            print(" | ".join(cells(row, result)), flush=True)

    text = generations_page(kept) if options.generation else page(kept)
    (DOCS / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
