"""Compiles every program of every script with the libtpu that TPU VMs run and with the newest one,
side by side.

    python -m tpu.compiler.versions             every case of CASES: about two hours of one core
    python -m tpu.compiler.versions bert        those with "bert" in their name
    python -m tpu.compiler.versions --missing   those that research/results/versions.json does not
                                                have
    python -m tpu.compiler.versions --print     compiles nothing: writes the page again

A case is a configuration and the programs of it. A process of its own stages each program once, and
compiles it (effort fast) with each version of libtpu.VERSIONS; with that of TPU VMs also with
smaller stacks, to find the least that it needs, and those that need a larger one than libtpu's own
also in the safe forms, without a flag. The figures are kept in research/results/versions.json, the
page is docs/tpu/versions.md; the cycles in it are those of stock.json and stock_tpu_vm.json there,
see research/tpu_cycles.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from errors import InputError
from tpu.compiler import apart, libtpu, results, staging
from tpu.compiler import compile as compiling
from tpu.compiler.libtpu import GIB
from tpu.compiler.pages import DOCS, ROOT, Row, environment_of_figures, table, two_at_a_time
from train.common.xla import backend

FIGURES = results.FOLDER / "versions.json"
PAGE = DOCS / "versions.md"
RUNTIME, NEWEST = libtpu.VERSIONS
# Bytes; libtpu's own is the first.
STACKS = (65_536, 81_920, 98_304, 114_688, 131_072, 163_840, 196_608, 262_144)
STACK_FLAG, _, _default_stack = backend.STACK.partition("=")
DEFAULT_STACK = int(_default_stack)
SAFE = "safe forms"  # the key of what RUNTIME makes of them, beside those of VERSIONS


@dataclass(frozen=True)
class Case:
    """A configuration, the topology that it is compiled for, and its programs, of compile.PROGRAMS.

    Attributes:
        safe: whether the safe forms of the programs that need a larger stack are compiled, too.
    """

    row: Row
    topology: str
    programs: tuple[str, ...] = ("train", "evaluate")
    safe: bool = True

    def named(self, program: str) -> str:
        """Returns the name of a program in the figures."""
        return f"{self.row.name}, {program}, {self.topology}"


# ---- the cases -----------------------------------------------------------------------------------

ONE = "v5e:1x1"
EIGHT = "v5e:2x4"
# A chip and several of the other generations.
OTHERS = (
    ("v6e:1x1", "v6e:2x4"),
    ("v5p:1x1x1", "v5p:2x2x1"),
    ("v4:1x1x1", "v4:2x2x1"),
)

TRAIN = ("train",)
BOTH = ("train", "evaluate")
ALL = ("train", "evaluate", "translate")

WHOLE = ("--update-every", "1")
LARGE = ("--size", "large")
MINI = ("--size", "mini")
MESH = ("--mesh", "data=4,model=2")
SMALL_IMAGES = ("--model", "resnet_tiny", "--image-size", "64")
# The trial, in what a TPU computes in.
SMALL_TRANSLATION = ("--dropout", "0.1", "--precision", "bfloat16")

# The same on every generation.
SMALL_RESNET = Row("resnet_tiny", "resnet50", "full", batch=32, flags=SMALL_IMAGES)
SMALL_TRANSFORMER = Row(
    "transformer tiny",
    "transformer",
    "tiny",
    batch=32,
    flags=SMALL_TRANSLATION,
)
MINI_BERT = Row("bert mini pretraining", "bert", "full", batch=8, task="pretrain", flags=MINI)
MINI_XLNET = Row("xlnet mini pretraining", "xlnet", "full", batch=8, task="pretrain", flags=MINI)
KAGGLE = Row("DLRM kaggle", "dlrm", "kaggle", batch=128)


def _published() -> Iterator[Case]:
    """Yields each model at the published size, on the smallest TPU that it fits."""
    # fairseq-roberta's programs are roberta's.
    yield Case(Row("bert on MRPC, 128 tokens", "bert", "full", batch=32, task="mrpc"), ONE)
    google = Row("Transformer base, Google's shape", "transformer", "tpu", batch=256)
    yield Case(google, ONE, ALL)
    for tokens in ("32", "64"):
        name = f"bert on MRPC, {tokens} tokens"
        lengths = ("--lengths", tokens)
        row = Row(name, "bert", "full", batch=32, task="mrpc", flags=lengths)
        yield Case(row, ONE, safe=False)
    for model in ("roberta", "distilbert", "xlnet"):
        row = Row(f"{model} on MRPC, 128 tokens", model, "full", batch=32, task="mrpc")
        yield Case(row, ONE, safe=False)
    # roberta and distilbert have bert's layers
    row = Row("bert on SQuAD, 384 tokens", "bert", "full", batch=32, task="squad")
    yield Case(row, ONE)
    row = Row("xlnet on SQuAD, 512 tokens", "xlnet", "full", batch=32, task="squad")
    yield Case(row, ONE, safe=False)
    row = Row("bert on CoNLL-2003, 128 tokens", "bert", "full", batch=32, task="ner")
    yield Case(row, ONE, safe=False)

    base = Row("Transformer base, packed", "transformer", "base", batch=13)
    yield Case(base, ONE, ALL, safe=False)
    big = Row("Transformer big", "transformer", "big", batch=32, flags=WHOLE)
    yield Case(big, ONE, ALL, safe=False)

    for model in ("bert", "roberta", "distilbert", "xlnet"):
        name = f"{model} pretraining"
        row = Row(name, model, "full", batch=32, task="pretrain", flags=WHOLE)
        yield Case(row, ONE, safe=False)

    yield Case(Row("ResNet-50", "resnet50", "full", batch=128), ONE)
    yield Case(Row("ResNet-50, modern recipe", "resnet50", "modern", batch=128), ONE, safe=False)
    lars = Row("ResNet-50, LARS", "resnet50", "mlperf", batch=128)
    yield Case(lars, ONE, TRAIN, safe=False)

    yield Case(KAGGLE, ONE)
    yield Case(Row("DLRM mlperf_v1", "dlrm", "mlperf_v1", batch=256), EIGHT)
    yield Case(Row("DLRM mlperf_v2", "dlrm", "mlperf_v2", batch=8192), "v5p:2x2x1")


def _flags() -> Iterator[Case]:
    """Yields each flag of each script, on eight chips where it shards something; the networks are
    small, except for GLUE's."""
    scripts = (
        SMALL_RESNET,
        SMALL_TRANSFORMER,
        MINI_BERT,
        Row("bert on MRPC", "bert", "full", batch=8, task="mrpc"),
    )
    settings = (
        (ONE, ("--remat",)),
        (ONE, ("--update-every", "4")),
        (ONE, ("--precision", "float32")),
        (EIGHT, ("--shard-state", "optimizer")),
        (EIGHT, ("--shard-state", "full")),
        (EIGHT, MESH),
        (EIGHT, (*MESH, "--remat")),
        (EIGHT, ("--shard-state", "full", "--remat")),
    )
    for row in scripts:
        for topology, flags in settings:
            if row.model == "resnet50" and ("--mesh" in flags or "--remat" in flags):
                continue  # what these change are layers of one kind

            if "--remat" in flags or "--update-every" in flags:
                programs = TRAIN  # other programs have neither
            elif row.model == "transformer":
                programs = ALL
            else:
                programs = BOTH
            yield Case(_with_flags(row, flags), topology, programs)

    yield Case(_with_flags(MINI_BERT, ("--moments", "bfloat16")), ONE, TRAIN)
    yield Case(_with_flags(MINI_BERT, ("--optimizer", "lamb")), ONE, TRAIN)
    yield Case(_with_flags(KAGGLE, ("--precision", "float32")), ONE)
    yield Case(_with_flags(KAGGLE, ("--steps-a-call", "8")), ONE, TRAIN)


def _with_flags(row: Row, flags: tuple[str, ...]) -> Row:
    """Returns a row with these flags besides its own, and with them in its name."""
    return replace(row, name=f"{row.name} {' '.join(flags)}", flags=_merged(row.flags, flags))


def _merged(flags: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Returns both; of a flag that both give, the others' value. Each of `flags` has a value."""
    kept = []
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        if name not in others:
            kept += [name, value]
    return (*kept, *others)


def _generations() -> Iterator[Case]:
    """Yields a row of each kind on the other generations."""
    for one, several in OTHERS:
        mesh = MESH if several == "v6e:2x4" else ("--mesh", "data=2,model=2")
        yield Case(SMALL_RESNET, one)
        yield Case(SMALL_TRANSFORMER, one, ALL)
        yield Case(MINI_BERT, one)
        yield Case(_with_flags(MINI_BERT, ("--remat",)), one, TRAIN)
        yield Case(_with_flags(MINI_BERT, ("--shard-state", "full")), several, TRAIN)
        yield Case(_with_flags(MINI_BERT, mesh), several, TRAIN)
        yield Case(MINI_XLNET, one)
        yield Case(KAGGLE, one)


def _large() -> Iterator[Case]:
    """Yields the large models, which take longest."""
    for model in ("bert", "roberta", "xlnet"):
        name = f"{model}-large pretraining"
        flags = (*LARGE, *WHOLE, "--remat")
        yield Case(Row(name, model, "full", batch=8, task="pretrain", flags=flags), ONE)


CASES = (*_published(), *_flags(), *_generations(), *_large())


def _names() -> list[str]:
    names = []
    for case in CASES:
        for program in case.programs:
            names.append(case.named(program))
    return names


NAMES = _names()  # of the figures, in the page's order


# ---- one case, in a process of its own -----------------------------------------------------------


def attempt(module: bytes, kept: int, topology: str, version: str, flags: str) -> dict:
    """Compiles a module with a version of libtpu.

    Returns {"needed": bytes per device}, {"too_large": bytes per device}, {"died": how} or
    {"error": why}.

    Args:
        kept: bytes per device that stay beside the program.
        flags: for LIBTPU_INIT_ARGS.
    """
    library = libtpu.installed(version)
    variables = {"LIBTPU_INIT_ARGS": flags}
    try:
        compiled = apart.compile(module, topology, "fast", library, variables)
    except apart.CompilerDied as error:
        if not re.search("SIGSEGV|SIGBUS", error.how):
            raise  # no fault of the stack: killed for memory, a flag that is not known
        return {"died": error.how}
    except libtpu.OutOfMemory as error:
        return {"too_large": error.needed + kept}
    except (libtpu.CompilerError, InputError) as error:
        first_line, _, _ = str(error).partition("\n")
        return {"error": first_line[:300]}
    return {"needed": compiled.memory.needed + kept}


def with_stack(flags: str, stack: int) -> str:
    """Returns the flags with another size of the stack, in bytes."""
    return flags.replace(backend.STACK, f"{STACK_FLAG}={stack}")


def asked(job: compiling.Job) -> str:
    """Returns what a run of the job has in LIBTPU_INIT_ARGS, where the user has set nothing."""
    os.environ["LIBTPU_INIT_ARGS"] = ""
    compiling.ask_compiler(job, job.script)
    return os.environ["LIBTPU_INIT_ARGS"]


def compile_case(case: Case) -> dict[str, dict]:
    """Returns, by the program, what each version makes of it, and the safe forms.

    This process must not have staged anything before.
    """
    row = case.row
    job = compiling.Job(row.model, row.preset, row.task, row.flags, row.batch)
    safe_job = replace(job, flags=(*row.flags, "--safe-forms"))
    os.environ["TPU_LIBRARY_PATH"] = str(libtpu.installed(RUNTIME))  # for the topology

    with libtpu.Topology(case.topology) as topology:
        precision = job.config(topology.num_devices).precision
        mesh = staging.setup(topology.num_devices, topology.kind, precision)

    found = {}
    for program in case.programs:
        _, staged = compiling.stage(replace(job, program=program), mesh, job.script)
        flags = asked(job)
        module = staged.module
        kept = staged.kept
        figures = {NEWEST: attempt(module, kept, case.topology, NEWEST, flags)}

        figures["least_stack"] = None
        for stack in STACKS:
            result = attempt(module, kept, case.topology, RUNTIME, with_stack(flags, stack))
            if "died" not in result:
                figures["least_stack"] = stack if "needed" in result else None
                break
        figures[RUNTIME] = result  # what a small stack is enough for, a larger one is, too

        if case.safe and figures["least_stack"] != STACKS[0]:
            safe_mesh = replace(mesh, safe_forms=True)
            _, safe = compiling.stage(replace(safe_job, program=program), safe_mesh, job.script)
            safe_flags = asked(safe_job)
            figures[SAFE] = attempt(safe.module, safe.kept, case.topology, RUNTIME, safe_flags)
        found[program] = figures
        print(case.named(program), json.dumps(figures), file=sys.stderr, flush=True)
    return found


# ---- the page ------------------------------------------------------------------------------------


def cell(result: dict | None) -> str:
    """Returns GiB per device, or why there are none."""
    if result is None:
        return "not run"
    if "needed" in result:
        return f"{result['needed'] / GIB:.2f}"
    if "too_large" in result:
        return f"does not fit: {result['too_large'] / GIB:.2f}"
    if "died" in result:
        return f"**dies** ({result['died']})"
    return f"refused: {result['error']}"


def stack_cell(figures: dict | None) -> str:
    """Returns the least stack that a program needs, in KiB."""
    if figures is None:
        return "not run"
    least = figures["least_stack"]
    if least is None:
        return f"more than {STACKS[-1] // 1024}"
    if least > STACKS[0]:
        return f"{least // 1024}"
    return f"at most {least // 1024}"


def safe_cell(figures: dict | None) -> str:
    """Returns what RUNTIME makes of a program's safe forms."""
    if figures is None:
        return "not run"
    if figures["least_stack"] == STACKS[0]:
        return "needs none"
    return cell(figures.get(SAFE))


def matrix(figures: dict) -> str:
    """Returns the table of all programs."""
    header = [
        "configuration",
        "program",
        "TPU",
        "batch per chip",
        f"{RUNTIME}, GiB",
        f"{NEWEST}, GiB",
        f"{RUNTIME} with `--safe-forms`, no flag for the stack",
        f"least stack of {RUNTIME}, KiB",
    ]
    rows = []
    for case in CASES:
        for program in case.programs:
            found = figures.get(case.named(program))
            cells = [case.row.name, program, case.topology, f"{case.row.batch:,}"]
            for version in libtpu.VERSIONS:
                cells.append(cell(found and found[version]))
            cells += [safe_cell(found), stack_cell(found)]
            rows.append(cells)
    return table(header, rows)


def cycles_table(newest: dict, runtime: dict) -> str:
    """Returns the table of estimated cycles of both versions. Arguments: stock.json,
    stock_tpu_vm.json."""
    rows = []
    for name, pair in newest.items():
        ours = pair["ours"]
        theirs = runtime.get(name)
        old_cycles = "not run"
        old_memory = "not run"
        if theirs:
            old_cycles = f"{theirs['cycles'] / 1e6:.3f}M"
            old_memory = f"{theirs['memory']['needed'] / GIB:.2f}"
        new_cycles = f"{ours['cycles'] / 1e6:.3f}M"
        new_memory = f"{ours['memory']['needed'] / GIB:.2f}"
        rows.append([name, old_cycles, new_cycles, old_memory, new_memory])
    header = ["step", f"{RUNTIME}, cycles", NEWEST, f"{RUNTIME}, GiB", NEWEST]
    return table(header, rows)


# A backslash joins two lines of this file to one of the page, whose lines are longer.
TEXT = """\
# What a TPU VM's compiler makes of every program

Written by `python -m tpu.compiler.versions`; do not edit. No TPU ran any of this. \
A TPU VM compiles with libtpu
{runtime}, which torch_xla 2.9.0 names as its own; {newest} is the newest. \
Memory is what the program needs per device,
with what stays beside it, such as the optimizer's state in an evaluation; effort fast.

libtpu compiles on fibers whose stack has 64 KiB by default. \
{runtime} needs more for some of these programs, and dies
(SIGSEGV, "STACK OVERFLOW"). The largest need among them is {largest} KiB; \
runs and `make compile` ask for
{asked} KiB, {margin:.1f} times as much (`STACK` in train/common/xla/backend.py). \
No TPU has confirmed
yet that its runtime honours the flag. `--safe-forms` asks for less: \
of the programs that need the flag, the column
before the last is of these forms, with no flag for the stack. \
Of {tried} that were tried {compiled}
compile; {dead} die, all of them with `--remat`. \
{runtime}'s memory is that of the compilation with the least stack that
was enough; it does not depend on it. Near the edge the need differs from run to run: \
BERT's evaluation on MRPC, 80 KiB
in this table, has also compiled with 64. \
"At most 64" and "needs none" say that one compilation with 64 KiB went well.

{matrix}

## Estimated cycles

Effort full, the rows of [stock.md](stock.md), our steps; v5e.

{cycles}
"""


def page(figures: dict) -> str:
    """Returns docs/tpu/versions.md."""
    stacks = [found["least_stack"] for found in figures.values()]
    largest = max(filter(None, stacks), default=STACKS[0])
    forms = [found[SAFE] for found in figures.values() if SAFE in found]
    dead = sum("died" in each for each in forms)
    newest = results.load(results.FOLDER / "stock.json")
    runtime = results.load(results.FOLDER / "stock_tpu_vm.json")
    return TEXT.format(
        runtime=RUNTIME,
        newest=NEWEST,
        largest=largest // 1024,
        asked=DEFAULT_STACK // 1024,
        margin=DEFAULT_STACK / largest,
        tried=len(forms),
        compiled=len(forms) - dead,
        dead=dead,
        matrix=matrix(figures),
        cycles=cycles_table(newest, runtime),
    )


def write_page() -> None:
    """Writes docs/tpu/versions.md from the figures that are there."""
    PAGE.write_text(page(results.load(FIGURES)))


# ---- the command line ----------------------------------------------------------------------------


def in_a_process(case: Case) -> dict[str, dict]:
    """Compiles a case in a process of its own. Raises RuntimeError with what it has said where it
    fails."""
    command = [sys.executable, "-m", "tpu.compiler.versions", "--case", str(CASES.index(case))]
    environment = environment_of_figures()
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{case.row.name} on {case.topology} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def chosen(name: str, figures: dict, missing: bool) -> list[Case]:
    """Returns the cases with `name` in their name; with `missing` those that the figures lack.

    Raises:
        InputError: no case has it.
    """
    cases = []
    for case in CASES:
        if name.lower() in f"{case.row.name} {case.topology}".lower():
            cases.append(case)
    if not cases:
        known = ", ".join(case.row.name for case in CASES)
        raise InputError(f"no case has {name!r} in its name; there are {known}")
    if not missing:
        return cases

    lacking = []
    for case in cases:
        if not all(case.named(program) in figures for program in case.programs):
            lacking.append(case)
    return lacking


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        help="part of the cases' names (default: all)",
    )
    parser.add_argument("--missing", action="store_true", help="keep the figures that are there")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(compile_case(CASES[options.case])))
        return

    figures = results.load(FIGURES)
    cases = chosen(options.name, figures, options.missing)
    if options.print:
        cases = []
    if cases:
        for version in libtpu.VERSIONS:
            libtpu.installed(version)  # rather than an error of each

    failed = []

    def try_case(case: Case) -> tuple[Case, dict]:
        try:
            return case, in_a_process(case)
        except RuntimeError as error:
            failed.append(str(error))
            return case, {}

    with two_at_a_time() as pool:
        for case, found in pool.map(try_case, cases):
            for program, result in found.items():
                figures[case.named(program)] = result
                cells = [cell(result[RUNTIME]), cell(result[NEWEST]), stack_cell(result)]
                print(case.named(program), *cells, flush=True)
            figures = results.in_order(figures, NAMES)
            results.save(FIGURES, figures)
    write_page()
    if failed:
        raise InputError("\n".join(failed))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
