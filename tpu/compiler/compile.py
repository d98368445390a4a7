"""Compiles a script's step for a TPU that is not there, and prints what the TPU's own compiler says
about it.

    python -m tpu.compiler.compile resnet50 full --topology v5e:2x4
                                      does it fit, memory, collectives: half a minute
    python -m tpu.compiler.compile bert full --task pretrain --batch 32 --effort full
                                      and estimated cycles: minutes
    python -m tpu.compiler.compile dlrm mlperf_v1 --topology v6e:4x8 -- --lr 0.5
                                      flags of the script after --
    python -m tpu.compiler.compile transformer big --program translate
                                      beam search instead of the train step

This needs neither a TPU nor a network nor data, only the package libtpu: the version that a TPU VM
runs, or another by --libtpu. The script builds its step (steps.py); tpu/compiler/staging.py traces
it without numbers; libtpu compiles it (libtpu.py) in a process of its own (apart.py), since it may
die of a program. Every time, cycle and rate printed is an estimate; memory is what the program will
ask for.
"""

import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

if __name__ == "__main__":
    # So that operations know the lines of Python that they come from; read when torch_xla is
    # imported.
    os.environ["XLA_IR_DEBUG"] = "1"
    os.environ["XLA_HLO_DEBUG"] = "1"

import tyro

from errors import InputError
from models import encoders
from tpu.compiler import analysis, apart, bundles, hlo, libtpu, report, staging, steps
from tpu.compiler.libtpu import GIB
from train import dlrm, glue, pretrain, resnet50, squad, tagging, transformer
from train.common import cli, device, files, interrupt, sharding
from train.common.mesh import WHOLE, GraphError
from train.common.xla import backend

MODELS = ("resnet50", "transformer", "dlrm", *encoders.PRETRAINED)
EFFORTS = ("fast", "full")
PROGRAMS = ("train", "evaluate", "translate")
DIED = 3  # exit code: the compiler died; 1: it does not fit, 2: input
FIRST_PRESET = {
    resnet50: "full",
    transformer: "base",
    dlrm: "kaggle",
    glue: "full",
    pretrain: "full",
    squad: "full",
    tagging: "full",
}
MAKERS = {
    resnet50: steps.images,
    transformer: steps.translation,
    dlrm: steps.clicks,
    glue: steps.sentences,
    pretrain: steps.text,
    squad: steps.questions,
    tagging: steps.tags,
}

OF_ENCODERS = (glue, pretrain, squad, tagging)


@dataclass(frozen=True)
class Job:
    """What to compile: a preset of a script, with some of its flags, a batch per device, and which
    of its programs."""

    model: str
    preset: str
    task: str
    flags: tuple[str, ...]
    batch: int  # examples per device; 0: the preset's, shared out
    program: str = "train"  # one of PROGRAMS

    @property
    def script(self) -> Any:
        """The module in train/."""
        scripts = {"resnet50": resnet50, "transformer": transformer, "dlrm": dlrm}
        if self.model in scripts:
            return scripts[self.model]
        of_tasks = {"pretrain": pretrain, "squad": squad, "ner": tagging}
        return of_tasks.get(self.task, glue)

    def config(self, devices: int) -> Any:
        """Returns the script's Config, with the batch of all devices."""
        flags = list(self.flags)
        if self.script in OF_ENCODERS:
            flags = ["--model", self.model, *flags]
        if self.script is glue and self.task:
            flags = ["--task", self.task, *flags]
        arguments = [self.preset, *flags]
        config = tyro.extras.overridable_config_cli(self.script.PRESETS, args=arguments)
        if hasattr(config, "update_every"):
            cli.at_least(config, 1, "update_every")
        if self.script in OF_ENCODERS:
            config = self.script.with_recipe(config)
        if self.script is resnet50:
            config = resnet50.fit(config, steps.FINETUNED_IMAGES, devices)

        if not self.batch:
            return config
        examples = self.batch * devices
        if self.script is transformer:
            return replace(config, batch_tokens=examples * steps.longest_row(config))
        return replace(config, batch_size=examples * getattr(config, "update_every", 1))


# ---- one step ------------------------------------------------------------------------------------


def stage(job: Job, mesh: device.Mesh, script: Any) -> tuple[steps.Step, staging.Staged]:
    """Returns the step of `script`'s functions, and its program before optimization.

    Raises:
        InputError: the devices cannot share its batch equally.
    """
    config = job.config(mesh.num_devices)
    mesh = sharding.arranged(mesh, getattr(config, "layout", WHOLE))
    make_step = MAKERS[job.script]
    if job.program == "train":
        step = make_step(config, mesh, script)
    else:
        one_batch = steps.of_one_batch(config, mesh.num_devices, job.batch)
        step = make_step(one_batch, mesh, script)
        step = steps.evaluation(step, script, getattr(config, "update_every", 1))
    if job.program == "translate":
        step = steps.beam_search(step)

    if step.examples % mesh.num_devices:
        raise InputError(
            f"{mesh.num_devices} devices cannot share a step of "
            f"{step.examples:,} {step.unit} equally; give --batch, the number per device"
        )

    staged = staging.stage(step.function, *step.arguments)
    shardings = {}
    for number, (spec, sizes) in staged.shardings.items():
        shardings[number] = hlo.op_sharding(spec, sizes)
    module = hlo.with_buffer_donors(staged.module, staged.donated)
    module = hlo.with_parameter_shardings(module, shardings)
    return step, replace(staged, module=module)


@contextlib.contextmanager
def _counting(kept: int) -> Iterator[None]:
    """Adds what stays beside a program to the memory that it lacks."""
    try:
        yield
    except libtpu.OutOfMemory as error:
        if kept:
            what = "of what the program does not take, as the optimizer's state"
            error.needed += kept
            error.allocations.append(libtpu.Allocation(kept, what))
            error.allocations.sort(key=lambda each: -each.bytes)
        raise


def occupied(found: dict) -> int:
    """Returns the bytes of a device that a report's program needs, with what stays beside it."""
    return found["memory"]["needed"] + found["kept_bytes"]


def compile_step(
    job: Job,
    topology: libtpu.Topology,
    mesh: device.Mesh,
    effort: str,
    script: Any,
    code: str = "",
    besides: str = "",
) -> tuple[dict, bytes]:
    """Returns the report of the compiled step of `script`'s functions, and its optimized module.

    Args:
        code: the folder into which libtpu writes the code of operations; "": it does not.
        besides: a version of libtpu that compiles the same program, too; the report then has what
            it makes of it.
    Raises:
        libtpu.OutOfMemory: it does not fit into a device's memory.
        apart.CompilerDied: the compiler died of it.
    """
    step, staged = stage(job, mesh, script)
    started = time.perf_counter()
    # Compiling may take minutes, and what the other process writes is shown only if it dies.
    print(
        f"libtpu {libtpu.version()} compiles for {topology.name}, effort {effort}",
        file=sys.stderr,
        flush=True,
    )

    with _counting(staged.kept):
        program = apart.compile(staged.module, topology.name, effort, libtpu.find())
        seconds = time.perf_counter() - started
        identity = _identity(job, topology, effort, step, staged)
        identity["compile_seconds"] = round(seconds, 1)
        identity["hbm_bytes"] = topology.hbm_bytes
        if getattr(job.config(topology.num_devices), "layout", WHOLE) != WHOLE:
            identity["placement"] = sharding.placement_table(_state(step).model)

        counted = bundles.read(code) if code else None
        gradients = 0
        if job.program == "train" and topology.slices > 1:
            gradients = _gradient_bytes(step, mesh.precision)
        figures = report.figures(staged, program, topology, effort, counted, gradients)
        if occupied(figures) > topology.hbm_bytes:
            needed = figures["memory"]["needed"]
            raise libtpu.OutOfMemory(topology.name, needed, topology.hbm_bytes, [], "")

    if besides:
        other = _compiled_by(besides, job, staged.module, topology.name, effort)
        identity["besides"] = {"libtpu": besides, "needed": other.memory.needed}
        if effort == "full":
            cycles = analysis.entry_cycles(hlo.parse(other.optimized))
            identity["besides"]["cycles"] = cycles.total
    return identity | figures, program.optimized


def _identity(
    job: Job,
    topology: libtpu.Topology,
    effort: str,
    step: steps.Step,
    staged: staging.Staged,
) -> dict:
    """Returns the entries of a report that say what was compiled."""
    return {
        "model": job.model,
        "program": job.program,
        "task": job.task,
        "preset": job.preset,
        "flags": list(job.flags),
        "what": step.what,
        "unit": step.unit,
        "topology": topology.name,
        "kind": topology.kind,
        "devices": topology.num_devices,
        "batch": step.examples // topology.num_devices,
        "effort": effort,
        "libtpu": libtpu.version(),
        "fingerprint": hlo.fingerprint(staged.module),
    }


def _state(step: steps.Step) -> Any:
    """Returns the state among a step's arguments."""
    for argument in step.arguments:
        if hasattr(argument, "model") and hasattr(argument, "optimizer"):
            return argument
    raise ValueError("the step has no state")


def _gradient_bytes(step: steps.Step, precision: str) -> int:
    """Returns the bytes of all gradients of a step's layers, in the type that products compute in.

    Tables have none: the rows that a step reads are exchanged.
    """
    element_bytes = 2 if precision == "bfloat16" else 4
    trained = [each for each in _state(step).model.parameters() if each.requires_grad]
    return sum(parameter.numel() for parameter in trained) * element_bytes


def _compiled_by(
    version: str,
    job: Job,
    module: bytes,
    topology: str,
    effort: str,
) -> apart.Compiled:
    """Returns what the version of libtpu that --besides names makes of a step.

    Raises:
        InputError: this version refuses it, or it does not fit. It is not an OutOfMemory, for
            which a smaller batch would be searched.
    """
    try:
        return apart.compile(module, topology, effort, libtpu.installed(version))
    except libtpu.OutOfMemory as error:
        raise InputError(f"by libtpu {version}, asked for by --besides, {error}") from error
    except libtpu.CompilerError as error:
        raise InputError(what_was_refused(error, version, job, topology)) from error


# ---- the largest batch ---------------------------------------------------------------------------


def largest_batch(
    job: Job,
    topology: libtpu.Topology,
    mesh: device.Mesh,
    script: Any,
    too_large: int,
) -> tuple[int, dict | None]:
    """Returns (the most examples per device that fit, within a sixteenth; the report of that step).

    Returns (0, None) where not even one fits.

    Args:
        too_large: examples per device that do not fit.
    """
    fits: dict[int, dict] = {}
    high = too_large
    # A device's batch is a multiple of its batch-norm groups.
    norm_groups = getattr(job.config(mesh.num_devices), "norm_groups", 0)
    multiple = norm_groups // mesh.num_devices or 1

    while True:
        low = max(fits, default=0)
        if high - low <= max(multiple, high // 16):
            return low, fits.get(low)

        batch = _guess(fits, low, high, topology.hbm_bytes)
        batch = max(batch // multiple * multiple, low + multiple)
        try:
            found, _ = compile_step(replace(job, batch=batch), topology, mesh, "fast", script)
            fits[batch] = found
            print(f"  {batch} per device: {occupied(found) / GIB:.2f} GiB, fits", flush=True)
        except libtpu.OutOfMemory as error:
            high = batch
            print(f"  {batch} per device: {error.needed / GIB:.2f} GiB, does not fit", flush=True)


def _guess(fits: dict[int, dict], low: int, high: int, capacity: int) -> int:
    """Returns a batch to try between one that fits and one that does not: the middle, and from two
    that fit on where the line through their memory reaches the capacity.

    Args:
        fits: reports by the examples per device.
    """
    if len(fits) < 2:
        return (low + high) // 2

    smaller, larger = sorted(fits)[-2:]
    growth = occupied(fits[larger]) - occupied(fits[smaller])
    slope = growth / (larger - smaller)
    room = capacity - occupied(fits[larger])
    guess = larger + int(room / max(slope, 1.0))
    # Kept away from the ends, so that both of them approach the guess.
    margin = max(1, high // 32)
    return min(max(guess, low + margin), high - margin)


# ---- the command line ----------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Job]:
    """Parses the command line; what follows `--` belongs to the script."""
    own = list(sys.argv[1:] if arguments is None else arguments)
    flags = []
    if "--" in own:
        end = own.index("--")
        flags = own[end + 1 :]
        own = own[:end]
    options = _parser().parse_args(own)

    script = Job(options.model, "", options.task, (), 0).script
    preset = options.preset or FIRST_PRESET[script]
    if preset not in script.PRESETS:
        known = ", ".join(script.PRESETS)
        raise InputError(
            f"the preset {preset!r} of {options.model} is not known; it is one of {known}"
        )
    if options.batch < 0:
        raise InputError(
            f"--batch is {options.batch}; it must be at least 1, or 0 for the recipe's"
        )
    if options.program == "translate" and script is not transformer:
        raise InputError(
            f"--program is translate, which {options.model} does not do; give train or evaluate"
        )
    if options.task and script not in OF_ENCODERS:
        raise InputError(
            f"--task is {options.task}, of which {options.model} has none: leave it out"
        )

    job = Job(options.model, preset, options.task, tuple(flags), options.batch, options.program)
    options.json = options.json or _report_path(options, job)
    return options, job


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu.compiler.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", choices=MODELS)
    add("preset", nargs="?", default="", help="of the script (default: its recipe)")
    add("--task", default="", help="of the encoders: a task of GLUE, squad, or pretrain")
    add("--topology", default="v5e:2x4", help="such as v5e:1x1, v5e:16x16, v4:2x2x1, v6e:2x4")
    add(
        "--batch",
        type=int,
        default=0,
        help="examples of a train step per device (default: the recipe's)",
    )
    add("--program", choices=PROGRAMS, default="train", help="the step that is compiled")
    add(
        "--effort",
        choices=EFFORTS,
        default="fast",
        help="of the compiler; full estimates cycles",
    )
    add(
        "--libtpu",
        default="",
        help="version that compiles "
        f"(default: $TPU_LIBRARY_PATH, or {libtpu.ON_TPU_VMS}, which TPU VMs run)",
    )
    add(
        "--stage",
        action="store_true",
        help="compile nothing; print the program's fingerprint only",
    )
    add("--besides", default="", help="another version that has to compile the same program")
    add(
        "--no-search",
        action="store_true",
        help="where it does not fit, do not look for what does",
    )
    add("--json", default="", help="where the figures go (default: a file in runs/compile)")
    add("--dump", default="", help="file for the optimized module (HloModuleProto)")
    return parser


def _report_path(options: argparse.Namespace, job: Job) -> str:
    """Returns the file for the figures where --json is not given."""
    words = [job.model, job.task, job.preset]
    if job.program != "train":
        words.append(job.program)
    words.append(re.sub("[:/]", "_", options.topology.lower()))
    words.append(options.libtpu or "libtpu")
    words.append(options.effort)
    name = "-".join(word for word in words if word)
    return f"runs/compile/{name}.json"


def main(arguments: list[str] | None = None, functions: Mapping = MappingProxyType({})) -> dict:
    """Compiles, prints and writes the report; returns it. Where the step does not fit: {"needed",
    "capacity", …}.

    Args:
        functions: by script, an object whose `build` and `train_step` are taken instead of the
            script's.
    """
    options, job = parse(arguments)
    for path in (options.json, options.dump):
        if path:
            _check_writable(Path(path))  # before the minutes of a compile

    script = functions.get(job.script, job.script)
    if script is not job.script and job.program != "train":
        raise InputError(
            f"--program is {job.program}; of other functions than the script's there is train only"
        )

    options.given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if options.besides:
        libtpu.installed(options.besides)
    if options.libtpu:
        os.environ["TPU_LIBRARY_PATH"] = str(libtpu.installed(options.libtpu))

    # libtpu 0.0.51 does not finish writing the code of the Transformer's published sizes within 18
    # minutes of a core. A version that is not in VERSIONS may not know the flags.
    endless = job.script is transformer and job.preset != "tiny"
    if options.effort != "full" or endless or libtpu.version() not in libtpu.VERSIONS:
        return compile_job(options, job, script, "")
    with bundles.folder() as code:
        bundles.dump_to(code)
        return compile_job(options, job, script, code)


def _check_writable(path: Path) -> None:
    """Makes the folder of a file. Raises InputError where the file cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: give a file in a folder that can be written")


def compile_job(options: argparse.Namespace, job: Job, script: Any, code: str) -> dict:
    """Compiles, prints and writes the report of a job; returns it.

    Args:
        code: see compile_step.
    """
    ask_compiler(job, script)
    with open_topology(options.topology) as topology:
        devices = topology.num_devices
        config = job.config(devices)
        safe_forms = device.wants_safe_forms(config.safe_forms)
        mesh = staging.setup(devices, topology.kind, config.precision, safe_forms, topology.slices)
        if options.stage:
            _, staged = stage(job, mesh, script)
            fingerprint = hlo.fingerprint(staged.module)
            print(fingerprint, flush=True)
            return {"fingerprint": fingerprint}

        try:
            found, optimized = compile_or_search(options, job, topology, mesh, script, code)
        except apart.CompilerDied as error:
            said = what_died(error, job, topology.name, mesh.safe_forms)
            raise DeadCompiler(said) from error
        except libtpu.CompilerError as error:
            said = what_was_refused(error, libtpu.version(), job, topology.name)
            raise InputError(said) from error

    if options.given:  # the figures depend on it, as on the batch
        found["libtpu_init_args"] = options.given
        print(f"flags        LIBTPU_INIT_ARGS={options.given}", flush=True)
    if safe_forms:  # by the flag or the environment
        found["safe_forms"] = True
        print("forms        safe, as of --safe-forms", flush=True)
    write(options.json, json.dumps(found, indent=1).encode() + b"\n")
    if options.dump and optimized:
        write(options.dump, optimized)
    return found


def open_topology(name: str) -> libtpu.Topology:
    """Returns a topology, without the flags: a library that does not know one would end this
    process."""
    flags = os.environ.pop("LIBTPU_INIT_ARGS", "")
    try:
        return libtpu.Topology(name)
    finally:
        os.environ["LIBTPU_INIT_ARGS"] = flags


def compile_or_search(
    options: argparse.Namespace,
    job: Job,
    topology: libtpu.Topology,
    mesh: device.Mesh,
    script: Any,
    code: str,
) -> tuple[dict, bytes]:
    """Returns the report of a job and its optimized module, b"" where it does not fit."""
    effort = options.effort
    besides = options.besides
    try:
        found, optimized = compile_step(job, topology, mesh, effort, script, code, besides)
        print(report.describe(found), flush=True)
        return found, optimized
    except libtpu.OutOfMemory as error:
        print(f"{job.model} {job.preset} on {topology.name}")
        print(report.describe_shortage(error), flush=True)
        found = {
            "fits": False,
            "needed": error.needed,
            "capacity": error.capacity,
            "topology": topology.name,
        }

    write(options.json, json.dumps(found, indent=1).encode())
    if not options.no_search:
        found |= search(job, topology, mesh, script)
    return found, b""


def ask_compiler(job: Job, script: Any) -> None:
    """Puts into LIBTPU_INIT_ARGS what a run of the job has there; call it before libtpu is loaded.

    Another implementation's step is compared without what ours asks for, except for the stack:
    without it the compiler may die.
    """
    config = job.config(1)
    layout = getattr(config, "layout", WHOLE)
    if script is job.script:
        vmem_kib = getattr(script, "VMEM_KIB", 0)
        backend.ask_for_forms(vmem_kib, device.wants_safe_forms(config.safe_forms))
    else:
        backend.ask_compiler(backend.STACK)
    sharding.ask_for_reduce_scatters(layout, backend)


class DeadCompiler(RuntimeError):
    """The compiler died; the message says of what, and what to do."""


def what_died(error: apart.CompilerDied, job: Job, topology: str, safe_forms: bool) -> str:
    """Returns which libtpu died on which step, and what to do about it."""
    about = f"{error}: {described(job, topology)}"
    if "Unknown command line flag" in error.output:
        return f"{about}; this version does not know a flag of it\n{apart.last_words(error)}"
    if error.how == "SIGKILL":
        return (
            f"{about}; it was killed from outside, most likely for memory: "
            "give it a machine with more"
        )

    remedies = []
    if not safe_forms:
        remedies.append("add --safe-forms to ARGS, whose forms ask less of the compiler")
    if "--remat" in job.flags:
        remedies.append("leave --remat out")
    remedies.append(another_version(error.version))
    return f"{about}; {', or '.join(remedies)}\n{apart.last_words(error)}"


def what_was_refused(error: libtpu.CompilerError, version: str, job: Job, topology: str) -> str:
    """Returns which libtpu refused which step and why, in the compiler's own first lines, and what
    to do about it."""
    first_lines, _, _ = str(error).partition("\n\n")
    reason = " ".join(first_lines.split())
    return (
        f"libtpu {version} refuses to compile {described(job, topology)}: {reason}; "
        f"{another_version(version)}"
    )


def described(job: Job, topology: str) -> str:
    """Returns what is compiled, and with which flags."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    words = [job.model, job.task, job.preset, *job.flags]
    step = " ".join(word for word in words if word)
    return f"{step}, program {job.program}, for {topology}, with LIBTPU_INIT_ARGS={flags!r}"


def another_version(version: str) -> str:
    """Returns the advice to compile with another libtpu than this one."""
    other = next(known for known in reversed(libtpu.VERSIONS) if known != version)
    return f"try another version, LIBTPU_VERSION={other}, to see whether it compiles at all"


def write(path: str, content: bytes) -> None:
    """Writes a file, whole or not at all; raises InputError where it cannot."""
    if Path(path).is_file() or not Path(path).exists():
        files.write_file(os.path.realpath(path), content)
        return
    try:  # what is no regular file, such as /dev/stdout, would be replaced by one
        Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room or access") from None


def search(job: Job, topology: libtpu.Topology, mesh: device.Mesh, script: Any) -> dict:
    """Prints and returns {"largest_batch": the most examples per device that fit, "report": that of
    their step}."""
    asked = per_device(job, topology.num_devices)
    print(f"looking for the largest batch that fits, below {asked} per device:", flush=True)
    batch, best = largest_batch(job, topology, mesh, script, asked)
    print(f"the largest batch that fits: {batch} per device", flush=True)
    if best is None:
        return {"largest_batch": batch}
    print(report.describe_buffers(best), flush=True)
    return {"largest_batch": batch, "report": best}


def per_device(job: Job, devices: int) -> int:
    """Returns the examples per device of a step."""
    if job.batch:
        return job.batch
    config = job.config(devices)
    if job.program != "train":
        config = steps.of_one_batch(config, devices, job.batch)
    if job.script is transformer:
        return math.ceil(config.batch_tokens / steps.longest_row(config) / devices)
    return math.ceil(config.batch_size / getattr(config, "update_every", 1) / devices)


def command(arguments: list[str]) -> int:
    """Does what the command line says; returns the exit code."""
    try:
        found = main(arguments)
    except (InputError, GraphError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DeadCompiler as error:
        print(f"error: {error}", file=sys.stderr)
        return DIED
    except KeyboardInterrupt:
        print("ended by Ctrl-C", file=sys.stderr)
        return interrupt.CODE
    return 0 if found.get("fits", True) else 1


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
