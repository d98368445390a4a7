"""Estimated cycles of the scripts' train steps beside the usual ones of bench/stock.py, by the TPU's own compiler.

    python -m bench.tpu_cycles                  every row: an hour and a half on two cores; libtpu: `make compile`
    python -m bench.tpu_cycles bert --missing   rows with "bert" in their name that docs/tpu/stock.json does not have
    python -m bench.tpu_cycles --only ours      our steps (or: usual); of the others the figures that are there
    python -m bench.tpu_cycles --print          only the tables, of what is there
    python -m bench.tpu_cycles --generation v6e our steps of the networks on a chip of it (or v5p, v4): an hour

Each row is two compiles for v5e with effort full, of the same Config and batch: ours (tpu/compiler/compile.py) and the
usual step (bench/stock.py). The figures are kept in docs/tpu/stock.json, the tables in docs/tpu/stock.md; those of
other generations in docs/tpu/generations.json and generations.md. Cycles are estimates.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from tpu.compiler.libtpu import GIB
from tpu.compiler.pages import DOCS, Row, bundle_count, compiled, memory, table

ONE, EIGHT = "v5e:1x1", "v5e:2x4"
CHIPS = {"v5e": ONE, "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "v4": "v4:1x1x1"}
WHOLE = ("--update-every", "1")
STEPS = (
    (Row("ResNet-50, 224 px", "resnet50", "full", 128), ONE),
    (Row("BERT-base pretraining, 512 tokens", "bert", "full", 32, "pretrain", ("--predictions", "79")), ONE),
    (Row("the same, 64 rows", "bert", "full", 64, "pretrain", ("--predictions", "79")), ONE),
    (Row("BERT-base on GLUE, 128 tokens", "bert", "full", 128, "mrpc"), ONE),
    (Row("RoBERTa-base pretraining, 512 tokens", "roberta", "full", 32, "pretrain", WHOLE), ONE),
    (Row("DistilBERT pretraining, 512 tokens", "distilbert", "full", 32, "pretrain", WHOLE), ONE),
    (Row("XLNet-base pretraining, 512 tokens", "xlnet", "full", 32, "pretrain", WHOLE), ONE),
    (Row("Transformer base, 64 tokens", "transformer", "tpu", 256), ONE),
    (Row("Transformer big, packed, 256 tokens", "transformer", "big", 32, "", WHOLE), ONE),
)
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


def measure(row: Row, topology: str, known: dict) -> dict:
    """{"ours": report, "usual": report}, see tpu/compiler/pages.py's `compiled`; `known`: those of them that are."""
    modules = {"ours": "tpu.compiler.compile", "usual": "bench.stock"}
    return {name: known.get(name) or compiled(row, topology, "full", module) for name, module in modules.items()}


def cycles(report: dict) -> str:
    """In millions, or why there are none."""
    if "cycles" not in report:
        return f"{memory(report)} GiB" if "needed" in report else memory(report)
    return f"{report['cycles'] / 1e6:.{1 if report['cycles'] > 1e7 else 3}f}M"


def cells(row: Row, figures: dict) -> list[str]:
    """A line of the table."""
    ours, usual = figures["ours"], figures["usual"]
    both = "cycles" in ours and "cycles" in usual
    amounts = [f"{report['memory']['needed'] / GIB:.2f}" if "memory" in report else "" for report in (usual, ours)]
    moved = [f"{report['bytes_accessed'] / 1e9:.1f}" if "memory" in report else "" for report in (usual, ours)]
    ratio = f"{ours['cycles'] / usual['cycles']:.2g}" if both else ""
    besides = [bundle_count(usual), bundle_count(ours)]
    return [row.name, f"{row.batch:,}", cycles(usual), cycles(ours), ratio, *besides, *amounts, *moved]


def page(figures: dict) -> str:
    """docs/tpu/stock.md."""
    version = next(report["libtpu"] for pair in figures.values() for report in pair.values() if "libtpu" in report)
    header = ["step", "batch per chip", "usual, cycles", "ours", "ours / usual", "usual, bundles besides", "ours"]
    header += ["usual, GiB", "ours", "usual, GB moved", "ours"]
    parts = [
        f"""# The scripts' steps beside the usual ones

Written by `python -m bench.tpu_cycles`; do not edit. Estimates of libtpu {version} (effort full) for v5e, for whole
train steps: bf16 autocast, float32 parameters and optimizer state, dropout on, update included. "Usual" means
torchvision's ResNet, transformers' models, torch's `nn.Transformer`, and tables as parameters with a dense gradient
(bench/stock.py), with the same Config, optimizer and batch. Cycles leave out asynchronous copies, custom calls,
waiting for other chips, and the drawing of random numbers: the usual steps draw one per value that dropout may drop,
ours draw a seed. Gathers, scatters and sorts carry no cycles either: "bundles besides" counts their code, a cycle or
more a bundle (tpu/compiler/bundles.py); empty where it was not counted.
"""
    ]
    for title, steps in (("Networks, one chip", STEPS), ("DLRM", TABLES)):
        rows = [cells(row, figures[row.name]) for row, _ in steps if row.name in figures]
        if rows:
            parts.append(f"\n## {title}\n\n{table(header, rows)}\n")
    return "".join(parts)


def generation_page(figures: dict, ours: dict) -> str:
    """docs/tpu/generations.md. `figures`: {row: {generation: report}}; `ours`: those of v5e, {row: report}."""
    header = ["step", "batch", *(f"{name}: {what}" for name in CHIPS for what in ("cycles", "GB moved", "GiB"))]
    rows = []
    for row, _ in STEPS:
        reports = {"v5e": ours[row.name]} | figures.get(row.name, {})
        cells = [row.name, f"{row.batch:,}"]
        for name in CHIPS:
            report = reports.get(name)
            moved = f"{report['bytes_accessed'] / 1e9:.1f}" if report and "memory" in report else ""
            cells += [cycles(report), moved, memory(report)] if report else ["not run", "", ""]
        rows.append(cells)
    version = ours[STEPS[0][0].name]["libtpu"]
    return f"""# The scripts' steps on other generations

Written by `python -m bench.tpu_cycles --generation`; do not edit. Estimates of libtpu {version} (effort full) for whole
train steps on one chip, of the same Config and batch as on v5e ([stock.md](stock.md), which says what cycles leave
out). A cycle of v5p and v4 is one of both TensorCores of a chip.

{table(header, rows)}
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="part of the rows' names (default: all)")
    parser.add_argument("--missing", action="store_true", help="keep the figures that are there")
    parser.add_argument("--only", choices=("ours", "usual"), help="compile these steps; keep the others' figures")
    parser.add_argument("--generation", choices=[*CHIPS][1:], help="compile our steps for a chip of it")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    options = parser.parse_args()
    path = DOCS / "stock.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    rows = [(row, topology) for row, topology in STEPS + TABLES if options.name.lower() in row.name.lower()]
    if not rows:
        parser.error(
            f"no row has {options.name!r} in its name; there are {', '.join(row.name for row, _ in STEPS + TABLES)}"
        )
    if options.missing and not options.generation:
        rows = [(row, topology) for row, topology in rows if row.name not in figures]
    if options.print:
        rows = []
    if options.generation:
        found = json.loads((DOCS / "generations.json").read_text()) if (DOCS / "generations.json").exists() else {}
        for row, _ in rows:
            if row in [row for row, _ in STEPS] and not (
                options.missing and options.generation in found.get(row.name, {})
            ):
                found.setdefault(row.name, {})[options.generation] = compiled(row, CHIPS[options.generation], "full")
                (DOCS / "generations.json").write_text(json.dumps(found, indent=1) + "\n")
                text = generation_page(found, {name: pair["ours"] for name, pair in figures.items()})
                (DOCS / "generations.md").write_text(text)
        return
    order = [row.name for row, _ in STEPS + TABLES]
    kept = {"ours": "usual", "usual": "ours"}.get(options.only)
    known = {name: {kept: pair[kept]} for name, pair in figures.items()} if kept else {}
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: measure(*job, known.get(job[0].name, {})), rows)
        for (row, _), result in zip(rows, results, strict=True):
            figures[row.name] = result
            figures = {name: figures[name] for name in order if name in figures}
            path.write_text(json.dumps(figures, indent=1) + "\n")
            print(" | ".join(cells(row, result)), flush=True)
    text = page(figures)
    (DOCS / "stock.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
