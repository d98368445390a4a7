"""Compiles a script's step for a TPU that is not there, and prints what the TPU's own compiler says about it.

    python -m tpu.compiler.compile resnet50 full --topology v5e:2x4     does it fit, memory, collectives: half a minute
    python -m tpu.compiler.compile bert full --task pretrain --batch 32 --effort full  and estimated cycles: minutes
    python -m tpu.compiler.compile dlrm mlperf_v1 --topology v6e:4x8 -- --lr 0.5    flags of the script after --
    python -m tpu.compiler.compile transformer big --program translate      beam search instead of the train step

This needs neither a TPU nor a network nor data, only the package libtpu: the version that a TPU VM runs, or another by
--libtpu. The script builds its step (steps.py); tpu/compiler/staging.py traces it without numbers; libtpu compiles
it (libtpu.py) in a process of its own (apart.py), since it may die of a program. Every time, cycle and rate printed is
an estimate; memory is what the program will ask for.
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
    # So that operations know the lines of Python that they come from; read when torch_xla is imported.
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"

import tyro

from errors import InputError
from models import encoders
from tpu.compiler import apart, bundles, hlo, libtpu, report, staging, steps
from tpu.compiler.libtpu import GIB
from train import dlrm, glue, pretrain, resnet50, transformer
from train.common import cli, device, files, interrupt, sharding
from train.common.mesh import WHOLE, GraphError
from train.common.xla import backend

MODELS = ("resnet50", "transformer", "dlrm", *encoders.PRETRAINED)
EFFORTS = ("fast", "full")
PROGRAMS = ("train", "evaluate", "translate")
DIED = 3  # exit code: the compiler died; 1: it does not fit, 2: input
FIRST_PRESET = {resnet50: "full", transformer: "base", dlrm: "kaggle", glue: "full", pretrain: "full"}
MAKERS = {
    resnet50: steps.images,
    transformer: steps.translation,
    dlrm: steps.clicks,
    glue: steps.sentences,
    pretrain: steps.text,
}


@dataclass(frozen=True)
class Job:
    """What to compile: a preset of a script, with some of its flags, a batch per device, and which of its programs."""

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
        return scripts.get(self.model) or (pretrain if self.task == "pretrain" else glue)

    def config(self, devices: int) -> Any:
        """Returns the script's Config, with the batch of all devices."""
        flags = list(self.flags)
        if self.script in (glue, pretrain):
            flags = ["--model", self.model, *flags]
        if self.script is glue and self.task:
            flags = ["--task", self.task, *flags]
        config = tyro.extras.overridable_config_cli(self.script.PRESETS, args=[self.preset, *flags])
        if hasattr(config, "update_every"):
            cli.at_least(config, 1, "update_every")
        if self.script is pretrain and config.batch_size is None:
            config = replace(config, batch_size=pretrain.recipe_of(config).batch_size)
        if not self.batch:
            return config
        if self.script is transformer:
            tokens = config.lengths[-1] if config.lengths else steps.LONGEST
            return replace(config, batch_tokens=self.batch * devices * tokens)
        return replace(config, batch_size=self.batch * devices * getattr(config, "update_every", 1))


def stage(job: Job, mesh: device.Mesh, script: Any) -> tuple[steps.Step, staging.Staged]:
    """Returns the step of `script`'s functions, and its program before optimization.

    Raises:
        InputError: the devices cannot share its batch equally.
    """
    config = job.config(mesh.num_devices)
    mesh = sharding.arranged(mesh, getattr(config, "layout", WHOLE))
    if job.program == "train":
        step = MAKERS[job.script](config, mesh, script)
    else:
        step = MAKERS[job.script](steps.of_one_batch(config, mesh.num_devices, job.batch), mesh, script)
        step = steps.evaluation(step, script, getattr(config, "update_every", 1))
        step = steps.beam_search(step) if job.program == "translate" else step
    if step.examples % mesh.num_devices:
        raise InputError(
            f"{mesh.num_devices} devices cannot share a step of {step.examples:,} {step.unit} equally; give --batch, "
            "the number per device"
        )
    staged = staging.stage(step.function, *step.arguments)
    shardings = {number: hlo.op_sharding(spec, sizes) for number, (spec, sizes) in staged.shardings.items()}
    module = hlo.with_parameter_shardings(hlo.with_buffer_donors(staged.module, staged.donated), shardings)
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
        besides: a version of libtpu that compiles the same program, too; the report then has what it needs.
    Raises:
        libtpu.OutOfMemory: it does not fit into a device's memory.
        apart.CompilerDied: the compiler died of it.
    """
    step, staged = stage(job, mesh, script)
    started = time.perf_counter()
    # It may take minutes, and what the other process writes is shown only where it dies.
    print(f"libtpu {libtpu.version()} compiles for {topology.name}, effort {effort}", file=sys.stderr, flush=True)
    with _counting(staged.kept):
        program = apart.compile(staged.module, topology.name, effort, libtpu.find())
        seconds = time.perf_counter() - started
        identity = {
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
            "compile_seconds": round(seconds, 1),
            "hbm_bytes": topology.hbm_bytes,
        }
        if getattr(job.config(topology.num_devices), "layout", WHOLE) != WHOLE:
            state = next(each for each in step.arguments if hasattr(each, "model") and hasattr(each, "optimizer"))
            identity["placement"] = sharding.placement_table(state.model)
        counted = bundles.read(code) if code else None
        figures = report.figures(staged, program, libtpu.GENERATIONS[topology.generation], effort, counted)
        if occupied(figures) > topology.hbm_bytes:
            raise libtpu.OutOfMemory(topology.name, figures["memory"]["needed"], topology.hbm_bytes, [], "")

    if besides:
        try:
            other = apart.compile(staged.module, topology.name, effort, libtpu.installed(besides))
        except libtpu.OutOfMemory as error:  # not of the version that the report is of
            raise InputError(f"by libtpu {besides}, asked for by --besides, {error}") from error
        except libtpu.CompilerError as error:
            raise InputError(what_was_refused(error, besides, job, topology.name)) from error
        identity["besides"] = {"libtpu": besides, "needed": other.memory.needed}
    return identity | figures, program.optimized


def largest_batch(
    job: Job, topology: libtpu.Topology, mesh: device.Mesh, script: Any, too_large: int
) -> tuple[int, dict | None]:
    """Returns (the most examples per device that fit, within a sixteenth; the report of that step).

    Returns (0, None) where not even one fits. `too_large`: examples per device that do not fit.
    """
    fits: dict[int, dict] = {}
    high = too_large
    slices = getattr(job.config(mesh.num_devices), "norm_groups", 0) // mesh.num_devices or 1  # of batch norm
    while True:
        low = max(fits, default=0)
        if high - low <= max(slices, high // 16):
            return (low, fits[low]) if fits else (0, None)
        middle = (low + high) // 2
        if len(fits) >= 2:  # memory grows with the batch along a line
            a, b = sorted(fits)[-2:]
            slope = (occupied(fits[b]) - occupied(fits[a])) / (b - a)
            room = topology.hbm_bytes - occupied(fits[b])
            # Kept away from the ends, so that both of them approach the guess.
            guess = b + int(room / max(slope, 1.0))
            middle = min(max(guess, low + max(1, high // 32)), high - max(1, high // 32))
        middle = max(middle // slices * slices, low + slices)
        try:
            fits[middle], _ = compile_step(replace(job, batch=middle), topology, mesh, "fast", script)
            print(f"  {middle} per device: {occupied(fits[middle]) / GIB:.2f} GiB, fits", flush=True)
        except libtpu.OutOfMemory as error:
            high = middle
            print(f"  {middle} per device: {error.needed / GIB:.2f} GiB, does not fit", flush=True)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Job]:
    """Parses the command line; what follows `--` belongs to the script."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = argparse.ArgumentParser(
        prog="python -m tpu.compiler.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("preset", nargs="?", default="", help="of the script (default: its recipe)")
    parser.add_argument("--task", default="", help="of the encoders: a task of GLUE, or pretrain")
    parser.add_argument("--topology", default="v5e:2x4", help="such as v5e:1x1, v5e:16x16, v4:2x2x1, v6e:2x4")
    parser.add_argument(
        "--batch", type=int, default=0, help="examples of a train step per device (default: the recipe's)"
    )
    parser.add_argument("--program", choices=PROGRAMS, default="train", help="the step that is compiled")
    parser.add_argument("--effort", choices=EFFORTS, default="fast", help="of the compiler; full estimates cycles")
    parser.add_argument(
        "--libtpu",
        default="",
        help=f"version that compiles (default: $TPU_LIBRARY_PATH, or {libtpu.ON_TPU_VMS}, which TPU VMs run)",
    )
    parser.add_argument("--stage", action="store_true", help="compile nothing; print the program's fingerprint only")
    parser.add_argument("--besides", default="", help="another version that has to compile the same program")
    parser.add_argument("--no-search", action="store_true", help="where it does not fit, do not look for what does")
    parser.add_argument("--json", default="", help="where the figures go (default: a file in runs/compile)")
    parser.add_argument("--dump", default="", help="file for the optimized module (HloModuleProto)")
    options = parser.parse_args(own)
    script = Job(options.model, "", options.task, (), 0).script
    preset = options.preset or FIRST_PRESET[script]
    if preset not in script.PRESETS:
        known = ", ".join(script.PRESETS)
        raise InputError(f"the preset {preset!r} of {options.model} is not known; it is one of {known}")
    if options.batch < 0:
        raise InputError(f"--batch is {options.batch}; it must be at least 1, or 0 for the recipe's")
    if options.program == "translate" and script is not transformer:
        raise InputError(f"--program is translate, which {options.model} does not do; give train or evaluate")
    if options.task and script not in (glue, pretrain):
        raise InputError(f"--task is {options.task}, of which {options.model} has none: leave it out")
    words = [options.model, options.task, preset, "" if options.program == "train" else options.program]
    name = "-".join([*filter(None, words), re.sub("[:/]", "_", options.topology.lower()), options.libtpu or "libtpu"])
    options.json = options.json or f"runs/compile/{name}-{options.effort}.json"
    return options, Job(options.model, preset, options.task, tuple(flags), options.batch, options.program)


def main(arguments: list[str] | None = None, functions: Mapping = MappingProxyType({})) -> dict:
    """Compiles, prints and writes the report; returns it. Where the step does not fit: {"needed", "capacity", …}.

    Args:
        functions: by script, an object whose `build` and `train_step` are taken instead of the script's.
    """
    options, job = parse(arguments)
    for path in map(Path, filter(None, (options.json, options.dump))):  # before the minutes of a compile
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise InputError(f"cannot write {path}: give a file in a folder that can be written")
    script = functions.get(job.script, job.script)
    if script is not job.script and job.program != "train":
        raise InputError(f"--program is {job.program}; of other functions than the script's there is train only")
    options.given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if options.besides:
        libtpu.installed(options.besides)
    if options.libtpu:
        os.environ["TPU_LIBRARY_PATH"] = str(libtpu.installed(options.libtpu))
    # Of the Transformer's published sizes libtpu 0.0.51 does not end writing the code, in 18 minutes of a core. Another
    # version may not know the flags.
    endless = job.script is transformer and job.preset != "tiny"
    if options.effort != "full" or endless or libtpu.version() not in libtpu.VERSIONS:
        return compile_job(options, job, script, "")
    with bundles.folder() as code:
        bundles.dump_to(code)
        return compile_job(options, job, script, code)


def compile_job(options: argparse.Namespace, job: Job, script: Any, code: str) -> dict:
    """Compiles, prints and writes the report of a job; returns it. `code`: see compile_step."""
    ask_compiler(job, script)
    with open_topology(options.topology) as topology:
        config = job.config(topology.num_devices)
        safe_forms = device.wants_safe_forms(config.safe_forms)
        mesh = staging.setup(topology.num_devices, topology.kind, config.precision, safe_forms)
        if options.stage:
            _, staged = stage(job, mesh, script)
            found = {"fingerprint": hlo.fingerprint(staged.module)}
            print(found["fingerprint"], flush=True)
            return found
        try:
            found, optimized = compile_or_search(options, job, topology, mesh, script, code)
        except apart.CompilerDied as error:
            raise DeadCompiler(what_died(error, job, topology.name, mesh.safe_forms)) from error
        except libtpu.CompilerError as error:
            raise InputError(what_was_refused(error, libtpu.version(), job, topology.name)) from error
    if options.given:  # of the figures' making, as the batch is
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
    """Returns a topology, without the flags: a library that does not know one would end this process."""
    flags = os.environ.pop("LIBTPU_INIT_ARGS", "")
    try:
        return libtpu.Topology(name)
    finally:
        os.environ["LIBTPU_INIT_ARGS"] = flags


def compile_or_search(
    options: argparse.Namespace, job: Job, topology: libtpu.Topology, mesh: device.Mesh, script: Any, code: str
) -> tuple[dict, bytes]:
    """Returns the report of a job and its optimized module, b"" where it does not fit."""
    try:
        found, optimized = compile_step(job, topology, mesh, options.effort, script, code, options.besides)
        print(report.describe(found), flush=True)
        return found, optimized
    except libtpu.OutOfMemory as error:
        print(f"{job.model} {job.preset} on {topology.name}", report.describe_shortage(error), sep="\n", flush=True)
        found = {"fits": False, "needed": error.needed, "capacity": error.capacity, "topology": topology.name}

    write(options.json, json.dumps(found, indent=1).encode())
    if not options.no_search:
        found |= search(job, topology, mesh, script)
    return found, b""


def ask_compiler(job: Job, script: Any) -> None:
    """Puts into LIBTPU_INIT_ARGS what a run of the job has there; call it before libtpu is loaded.

    Another's step is compared without what ours asks for, but for the stack without which the compiler may die.
    """
    config = job.config(1)
    layout = getattr(config, "layout", WHOLE)
    if script is job.script:
        vmem_kib = getattr(script, "VMEM_KIB", 0)
        if script is pretrain:
            vmem_kib = encoders.record(job.model).vmem_kib
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
        return f"{about}; it was killed from outside, most likely for memory: give it a machine with more"

    remedies = []
    if not safe_forms:
        remedies.append("add --safe-forms to ARGS, whose forms ask less of the compiler")
    if "--remat" in job.flags:
        remedies.append("leave --remat out")
    remedies.append(another_version(error.version))
    return f"{about}; {', or '.join(remedies)}\n{apart.last_words(error)}"


def what_was_refused(error: libtpu.CompilerError, version: str, job: Job, topology: str) -> str:
    """Returns which libtpu refused which step and why, in the compiler's own first lines, and what to do about it."""
    reason = " ".join(str(error).partition("\n\n")[0].split())
    return f"libtpu {version} refuses to compile {described(job, topology)}: {reason}; {another_version(version)}"


def described(job: Job, topology: str) -> str:
    """Returns what is compiled, and with which flags."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    step = " ".join(filter(None, [job.model, job.task, job.preset, *job.flags]))
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
    """Prints and returns {"largest_batch": the most examples per device that fit, "report": that of their step}."""
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
        tokens = config.lengths[-1] if config.lengths else steps.LONGEST
        return math.ceil(config.batch_tokens / tokens / devices)
    return math.ceil(config.batch_size / getattr(config, "update_every", 1) / devices)


def command(arguments: list[str]) -> int:
    """Does what the command line says; returns the exit code."""
    try:
        return 0 if main(arguments).get("fits", True) else 1
    except (InputError, GraphError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DeadCompiler as error:
        print(f"error: {error}", file=sys.stderr)
        return DIED
    except KeyboardInterrupt:
        print("ended by Ctrl-C", file=sys.stderr)
        return interrupt.CODE


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
