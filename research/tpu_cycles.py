"""Estimated cycles of the scripts' train steps beside the usual ones of bench/stock.py, by the TPU's own compiler.

    python -m research.tpu_cycles                  every row: 1.5 hours on two cores; libtpu: `make guards` installs it
    python -m research.tpu_cycles bert --missing   rows with "bert" in their name that results/stock.json does not have
    python -m research.tpu_cycles --only ours      our steps (or: usual); of the others the figures that are there
    python -m research.tpu_cycles --print          only the tables, of what is there
    python -m research.tpu_cycles --generation v6e the networks' on one chip of v6e (or v5p, v4) instead of v5e
    python -m research.tpu_cycles --on-tpu-vms     our steps by the libtpu that TPU VMs run, for docs/tpu/versions.md
    python -m research.tpu_cycles --stale          which rows are older than the code; compiles nothing

Each row is two compiles with effort full, of the same Config and batch: ours (tpu/compiler/compile.py) and the usual
step (bench/stock.py), by the newest libtpu. The figures are kept in results/stock.json, the tables in
docs/tpu/stock.md; those of other generations in generations.json and generations.md. Cycles are estimates.
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

ONE, EIGHT = "v5e:1x1", "v5e:2x4"
CHIPS = {"v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "v4": "v4:1x1x1"}
LARGE = ("--size", "large", "--predictions", "79")
WHOLE = ("--update-every", "1")
STEPS = (
    (Row("ResNet-50, 224 px", "resnet50", "full", 128), ONE),
    (Row("BERT-base pretraining, 512 tokens", "bert", "full", 32, "pretrain", ("--predictions", "79")), ONE),
    (Row("the same, 64 rows", "bert", "full", 64, "pretrain", ("--predictions", "79")), ONE),
    (Row("BERT-large pretraining, 512 tokens", "bert", "full", 8, "pretrain", LARGE), ONE),
    (Row("BERT-base on GLUE, 128 tokens", "bert", "full", 128, "mrpc"), ONE),
    (Row("RoBERTa-base pretraining, 512 tokens", "roberta", "full", 32, "pretrain", WHOLE), ONE),
    (Row("DistilBERT pretraining, 512 tokens", "distilbert", "full", 32, "pretrain", WHOLE), ONE),
    (Row("XLNet-base pretraining, 512 tokens", "xlnet", "full", 32, "pretrain", WHOLE), ONE),
    (Row("Transformer base, 64 tokens", "transformer", "tpu", 256), ONE),
    (Row("Transformer big, packed, 256 tokens", "transformer", "big", 32, "", WHOLE), ONE),
)
# What the pages read of a report; jax.md (jax_peers.py) also reads what stock.json has of random numbers.
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
MILLION = ("--hash-rows", "1000000")
TABLES = (
    (Row("Kaggle, 1 chip, at most 1M rows a table", "dlrm", "kaggle", 128, "", MILLION), ONE),
    (Row("Kaggle, 1 chip, up to 10.1M", "dlrm", "kaggle", 128), ONE),
    (Row("Kaggle, 8 chips, at most 1M", "dlrm", "kaggle", 16, "", MILLION), EIGHT),
    (Row("Kaggle, 8 chips, up to 10.1M", "dlrm", "kaggle", 16), EIGHT),
    (Row("Terabyte, 1 chip, at most 1M", "dlrm", "mlperf_v1", 2048, "", MILLION), ONE),
    (Row("Terabyte, 1 chip, at most 3M", "dlrm", "mlperf_v1", 2048, "", ("--hash-rows", "3000000")), ONE),
    (Row("Terabyte, 8 chips, at most 1M", "dlrm", "mlperf_v1", 256, "", MILLION), EIGHT),
    (Row("Terabyte, 8 chips, up to 40M", "dlrm", "mlperf_v1", 256), EIGHT),
)


MODULES = {"ours": "tpu.compiler.compile", "usual": "bench.stock"}


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


def age(row: Row, topology: str, report: dict) -> str:
    """Whether the code still makes the program that a report is of."""
    if "fingerprint" not in report:
        return "not known: it is from before reports had a fingerprint"
    command = [*row.command(topology, "full", os.devnull), "--stage"]
    if "--" in command:  # the script's flags stay the last
        command.remove("--stage")
        command.insert(command.index("--"), "--stage")
    result = subprocess.run(command, cwd=ROOT, env=environment_of_figures(), capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {result.returncode}"
        return f"not known: it cannot be staged: {reason}"
    now = result.stdout.split()[-1]
    return "as the code" if now == report["fingerprint"] else "OLDER than the code"


def cycles(report: dict) -> str:
    """In millions, or why there are none."""
    if "cycles" not in report:
        return f"{memory(report)} GiB" if "needed" in report else memory(report)
    return f"{report['cycles'] / 1e6:.{1 if report['cycles'] > 1e7 else 3}f}M"


HEADER = ["step", "batch per chip", "usual, cycles", "ours", "ours / usual", "usual, bundles besides", "ours"]
HEADER += ["usual, GiB", "ours", "usual, GB moved", "ours", "ours, ms", "by flops", "by bytes"]


def times(report: dict) -> list[str]:
    """The estimate in ms, and what no step is shorter than: by its flops, by its bytes in HBM."""
    limits = report.get("roofline_seconds", {})
    seconds = report.get("estimated_seconds"), limits.get("flops"), limits.get("bytes")
    return ["" if each is None else f"{each * 1e3:.{1 if each > 0.01 else 2}f}" for each in seconds]


def cells(row: Row, figures: dict) -> list[str]:
    """A line of the table."""
    ours, usual = figures["ours"], figures["usual"]
    amounts = [f"{report['memory']['needed'] / GIB:.2f}" if "memory" in report else "" for report in (usual, ours)]
    moved = [f"{report['bytes_accessed'] / 1e9:.1f}" if "memory" in report else "" for report in (usual, ours)]
    besides = [bundle_count(usual), bundle_count(ours)]
    counted = [cycles(usual), cycles(ours), ratio(ours, usual), *besides]
    return [row.name, f"{row.batch:,}", *counted, *amounts, *moved, *times(ours)]


def page(figures: dict) -> str:
    """docs/tpu/stock.md."""
    version = next(report["libtpu"] for pair in figures.values() for report in pair.values() if "libtpu" in report)
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
    """docs/tpu/generations.md. `figures`: {generation: {row: {"ours": report, "usual": report}}}."""
    parts = [
        """# The networks' steps on other generations

Written by `python -m research.tpu_cycles --generation`; do not edit. As [stock.md](stock.md), which has v5e's and says
what is compared and what the cycles leave out. Of v5p and v4 a chip's two TensorCores work as one.
"""
    ]
    for name, pairs in figures.items():
        rows = [cells(row, pairs[row.name]) for row, _ in STEPS if row.name in pairs]
        parts.append(f"\n## {name}, one chip\n\n{table(HEADER, rows)}\n")
    return "".join(parts)


def names_of(rows: Iterable[tuple[Row, str]]) -> list[str]:
    """The names of (row, topology), in the order of the tables."""
    return [row.name for row, _ in rows]


def whole_file(kept: dict, generation: str | None, figures: dict) -> dict:
    """The figures of a file, in order; those of a generation are new. v5e has a file of its own (None)."""
    if generation is None:
        return figures
    return results.in_order(kept | {generation: figures}, CHIPS)


def on_tpu_vms(name: str, missing: bool) -> None:
    """Writes stock_tpu_vm.json, and the page that shows it."""
    path = results.FOLDER / "stock_tpu_vm.json"
    figures = results.load(path)
    rows = [(row, topology) for row, topology in STEPS + TABLES if name.lower() in row.name.lower()]
    if missing:
        rows = [(row, topology) for row, topology in rows if row.name not in figures]
    with two_at_a_time() as pool:
        for (row, _), result in zip(rows, pool.map(lambda job: measure_on_tpu_vms(*job), rows), strict=True):
            figures[row.name] = result
            figures = results.in_order(figures, names_of(STEPS + TABLES))
            results.save(path, figures)
            print(row.name, cycles(result), flush=True)
    versions.write_page()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="part of the rows' names (default: all)")
    parser.add_argument("--missing", action="store_true", help="keep the figures that are there")
    parser.add_argument("--only", choices=("ours", "usual"), help="compile these steps; keep the others' figures")
    parser.add_argument("--generation", choices=[*CHIPS], help="instead of v5e")
    parser.add_argument("--on-tpu-vms", action="store_true", help="our steps by the libtpu of TPU VMs")
    parser.add_argument("--stale", action="store_true", help="compile nothing; say which rows are older than the code")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    options = parser.parse_args()
    if options.on_tpu_vms:
        on_tpu_vms(options.name, options.missing)
        return
    if options.generation:
        name = "generations"
        every = [(row, CHIPS[options.generation]) for row, _ in STEPS]
        fields = READ
    else:
        name = "stock"
        every = STEPS + TABLES
        fields = READ_OF_STOCK
    path = results.FOLDER / f"{name}.json"
    kept = results.load(path)
    figures = kept.get(options.generation, {}) if options.generation else kept
    rows = [(row, topology) for row, topology in every if options.name.lower() in row.name.lower()]
    if not rows:
        parser.error(f"no row has {options.name!r} in its name; there are {', '.join(row.name for row, _ in every)}")
    if options.missing:
        rows = [(row, topology) for row, topology in rows if row.name not in figures]
    if options.stale:
        for row, topology in rows:
            if row.name in figures:
                print(f"{row.name}: {age(row, topology, figures[row.name]['ours'])}", flush=True)
        return
    if options.print:
        rows = []
    if rows:
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
        for (row, _), result in zip(rows, pool.map(one, rows), strict=True):
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
