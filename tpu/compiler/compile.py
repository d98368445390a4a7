"""Compiles a script's train step for a TPU that is not there, and says what the TPU's own compiler says about it.

    python -m tpu.compiler.compile resnet50 full --topology v5e:2x4              fits or not, memory, collectives: 30 s
    python -m tpu.compiler.compile bert full --task pretrain --batch 32 --effort full   and estimated cycles: minutes
    python -m tpu.compiler.compile dlrm mlperf_v1 --topology v6e:4x8 -- --plan row       flags of the script after --

Neither a TPU nor a network nor data is needed: only the package libtpu (requirements-compile.txt). The step is traced
without numbers (train/common/xla/staging.py), as the script makes it (tpu/compiler/steps.py), and compiled by libtpu
(tpu/compiler/libtpu.py). Every time, cycle and rate printed is an estimate; memory is what the program will ask for.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

if __name__ == "__main__":
    # So that operations know the lines of Python that they come from; read when torch_xla is imported.
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"

import tyro

from errors import InputError
from tpu.compiler import hlo, libtpu, steps
from tpu.compiler.libtpu import GIB
from train import dlrm, glue, pretrain, resnet50, transformer
from train.common import device
from train.common.xla import staging

ENCODERS = tuple(name for name in glue.RECIPES if name != "auto")
MODELS = ("resnet50", "transformer", "dlrm", *ENCODERS)
EFFORTS = ("fast", "full")
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
    """What to compile: a preset of a script, with some of its flags, and a batch a device."""

    model: str
    preset: str
    task: str
    flags: tuple[str, ...]
    batch: int  # examples a device; 0: the preset's, shared out

    @property
    def script(self) -> Any:
        """The module in train/."""
        scripts = {"resnet50": resnet50, "transformer": transformer, "dlrm": dlrm}
        return scripts.get(self.model) or (pretrain if self.task == "pretrain" else glue)

    def config(self, devices: int) -> Any:
        """The script's Config, with the batch of all devices."""
        flags = list(self.flags)
        if self.script in (glue, pretrain):
            flags = ["--model", self.model, *flags]
        if self.script is glue and self.task:
            flags = ["--task", self.task, *flags]
        config = tyro.extras.overridable_config_cli(self.script.PRESETS, args=[self.preset, *flags])
        if self.script is pretrain and config.batch_size is None:
            config = replace(config, batch_size=pretrain.RECIPES[self.model].batch_size)
        if not self.batch:
            return config
        if self.script is transformer:
            tokens = config.lengths[-1] if config.lengths else steps.LONGEST
            return replace(config, batch_tokens=self.batch * devices * tokens)
        return replace(config, batch_size=self.batch * devices * getattr(config, "update_every", 1))


def stage(job: Job, mesh: device.Mesh, script: Any) -> tuple[steps.Step, staging.Staged]:
    """The step of `script`'s functions, and the program that it is before optimisation.

    Raises:
        InputError: its batch cannot be shared out among the devices.
    """
    step = MAKERS[job.script](job.config(mesh.num_devices), mesh, script)
    if step.examples % mesh.num_devices:
        raise InputError(
            f"a step of {step.examples:,} {step.unit} cannot be shared out among {mesh.num_devices} devices; give "
            "--batch, the number of each"
        )
    staged = staging.stage(step.function, *step.arguments)
    shardings = {number: hlo.op_sharding(spec, sizes) for number, (spec, sizes) in staged.shardings.items()}
    module = hlo.with_parameter_shardings(hlo.with_buffer_donors(staged.module, staged.donated), shardings)
    return step, replace(staged, module=module)


def compile_step(
    job: Job, topology: libtpu.Topology, mesh: device.Mesh, effort: str, script: Any
) -> tuple[dict, bytes]:
    """(what is known of the compiled step of `script`'s functions, its optimised module).

    Raises:
        libtpu.OutOfMemory: it does not fit into a device's memory.
    """
    step, staged = stage(job, mesh, script)
    started = time.perf_counter()
    with topology.compile(staged.module, effort) as program:
        seconds = time.perf_counter() - started
        memory, cost, optimized = program.memory, program.cost, program.optimized
    module, before = hlo.parse(optimized), hlo.parse(staged.module)
    copies, products = hlo.copies(module), hlo.dots(before)
    generation = libtpu.GENERATIONS[topology.generation]
    moved, computed = cost.bytes_accessed / generation.hbm_bytes_per_second, cost.flops / generation.peak_flops
    devices = topology.num_devices
    report = {
        "model": job.model,
        "task": job.task,
        "preset": job.preset,
        "flags": list(job.flags),
        "what": step.what,
        "unit": step.unit,
        "topology": topology.name,
        "kind": topology.kind,
        "devices": devices,
        "batch": step.examples // devices,
        "effort": effort,
        "libtpu": libtpu.version(),
        "compile_seconds": round(seconds, 1),
        "hbm_bytes": topology.hbm_bytes,
        "memory": {name: getattr(memory, name) for name in ("needed", "peak", "argument", "output", "alias", "temp")},
        "flops": cost.flops,
        "bytes_accessed": cost.bytes_accessed,
        "roofline_seconds": {"flops": computed, "bytes": moved},
        "parameters": len(staged.parameters),
        "to_donate": len(staged.donated),
        "donated": len(hlo.donated(module)),
        "collectives": _collectives(module),
        "custom_calls": hlo.custom_calls(module),
        "copies": {"count": len(copies.instructions), "bytes": copies.bytes},
        "largest_buffers": _largest(module),
        "random_bytes": hlo.random_bytes(before),
        "host_transfers": len(hlo.host_transfers(module)),
        "float32_products": len([dot for dot in products if "f32" in (dot.lhs, dot.rhs)]),
        "products": len(products),
    }
    if effort == "full":
        cycles = hlo.entry_cycles(module)
        report["cycles"] = cycles.total
        report["loops_counted_once"] = len(cycles.unknown_loops)
        report["estimated_seconds"] = cycles.total / generation.clock_hz if generation.clock_hz else None
        report["longest"] = _longest(module)
    return report, optimized


def _longest(module: hlo.Module) -> list[dict]:
    """The operations that take most of the step, those of the same line and shape together."""
    found: dict[tuple, dict] = {}
    for timed in hlo.longest(module, 10_000):
        each = timed.instruction
        key = each.opcode, each.shape.text, each.op_name.rsplit("/", 1)[-1], _line(each.source)
        names = dict(zip(("operation", "shape", "name", "source"), key, strict=True))
        entry = found.setdefault(key, {"cycles": 0, "count": 0} | names)
        entry["cycles"] += timed.cycles * timed.times
        entry["count"] += timed.times
    return sorted(found.values(), key=lambda entry: -entry["cycles"])[:12]


def _largest(module: hlo.Module) -> list[dict]:
    """The largest results of single operations, those of the same line and shape together."""
    found: dict[tuple, dict] = {}
    for each in hlo.largest_buffers(module, 1_000):
        key = each.shape.text, _line(each.source)
        entry = found.setdefault(key, {"bytes": each.shape.bytes, "count": 0, "shape": key[0], "source": key[1]})
        entry["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["bytes"] * entry["count"])[:12]


def _line(source: str) -> str:
    """file:line, from the repository on, or from the package."""
    return source.removeprefix(f"{staging.ROOT}/").rpartition("site-packages/")[2]


def _collectives(module: hlo.Module) -> dict[str, dict]:
    """{kind: {"count", "bytes" a device, "largest": bytes of its largest result, "lines" that they come from}}."""
    found: dict[str, dict] = {}
    for each in hlo.collectives(module):
        entry = found.setdefault(each.kind, {"count": 0, "bytes": 0, "largest": 0, "lines": []})
        entry["count"] += each.times
        entry["bytes"] += each.bytes * each.times
        entry["largest"] = max(entry["largest"], each.result_bytes)
        line = _line(each.source) or each.op_name.rsplit("/", 1)[-1]
        if line not in entry["lines"]:
            entry["lines"].append(line)
    return found


def largest_batch(
    job: Job, topology: libtpu.Topology, mesh: device.Mesh, script: Any, too_large: int
) -> tuple[int, dict | None]:
    """(the most examples a device that fit, within a sixteenth; the report of that step). (0, None): not even one."""
    fits: dict[int, dict] = {}
    high = too_large
    while True:
        low = max(fits, default=0)
        if high - low <= max(1, high // 16):
            return (low, fits[low]) if fits else (0, None)
        middle = (low + high) // 2
        if len(fits) >= 2:  # memory grows with the batch along a line
            a, b = sorted(fits)[-2:]
            slope = (fits[b]["memory"]["needed"] - fits[a]["memory"]["needed"]) / (b - a)
            room = topology.hbm_bytes - fits[b]["memory"]["needed"]
            # On either side of the guess, so that both ends of the interval come near it.
            guess = b + int(room / max(slope, 1.0))
            middle = min(max(guess, low + max(1, high // 32)), high - max(1, high // 32))
        try:
            fits[middle], _ = compile_step(replace(job, batch=middle), topology, mesh, "fast", script)
            print(f"  {middle} a device: {fits[middle]['memory']['peak'] / GIB:.2f} GiB, fits", flush=True)
        except libtpu.OutOfMemory as error:
            high = middle
            print(f"  {middle} a device: {error.needed / GIB:.2f} GiB, does not fit", flush=True)


def describe(report: dict) -> str:
    """The report for people."""
    devices, batch, unit = report["devices"], report["batch"], report["unit"]
    memory, roofline = report["memory"], report["roofline_seconds"]
    lines = [
        f"{report['what']}: {batch:,} {unit} a device, {batch * devices:,} a step",
        f"{report['topology']}, {devices} x {report['kind']}; libtpu {report['libtpu']}, effort {report['effort']}, "
        f"compiled in {report['compile_seconds']:.0f} s",
        f"memory       fits: {memory['needed'] / GIB:.2f} of {report['hbm_bytes'] / GIB:.2f} GiB a device "
        f"(arguments {memory['argument'] / GIB:.2f}, temporaries {memory['temp'] / GIB:.2f}; live at once "
        f"{memory['peak'] / GIB:.2f})",
        f"donated      {report['donated']} of {report['to_donate']} tensors that the step updates",
        f"work         {report['flops'] / 1e12:.2f} TFLOP and {report['bytes_accessed'] / 1e9:.1f} GB a device",
        f"roofline     {1e3 * roofline['flops']:.1f} ms by its flops, {1e3 * roofline['bytes']:.1f} ms by its bytes; "
        "no step is shorter than either",
    ]
    if report["effort"] == "full":
        line = f"estimate     {report['cycles'] / 1e6:.1f}M cycles"
        if report["estimated_seconds"]:
            seconds = report["estimated_seconds"]
            line += f", {1e3 * seconds:.1f} ms a step, {batch / seconds:,.0f} {unit} a second and device"
        lines.append(line + "; without asynchronous copies, custom calls and waiting for other devices")
        if report["loops_counted_once"]:
            lines.append(f"             {report['loops_counted_once']} loops of unknown length are counted once")
    for kind, entry in sorted(report["collectives"].items()):
        amount = f"{entry['count']}, {entry['bytes'] / 1e6:.1f} MB a device"
        # A combined one names one of its lines only.
        lines.append(f"{kind:<12} {amount}: {', '.join(entry['lines'][:4])}")
    if not report["collectives"]:
        lines.append("collectives  none")
    calls = ", ".join(f"{name} {count}" for name, count in sorted(report["custom_calls"].items()))
    lines.append(f"custom calls {calls or 'none'}; transfers to the host {report['host_transfers']}")
    lines.append(f"copies       {report['copies']['count']}, {report['copies']['bytes'] / 1e6:.1f} MB")
    lines.append(f"random       {report['random_bytes'] / 1e6:.1f} MB of numbers drawn, by each device for all")
    lines.append(f"products     {report['products']}, {report['float32_products']} of them of float32")
    if "longest" in report:
        lines.append("longest operations, of one line together:")
    for entry in report.get("longest", []):
        share = f"{entry['cycles'] / 1e6:7.2f}M {entry['cycles'] / report['cycles']:6.1%}  {entry['count']:3} x"
        lines.append(
            f"{share} {entry['operation']:<12} {entry['shape'][:50]:<50} {entry['name'][:30]} {entry['source']}"
        )
    return "\n".join(lines)


def describe_buffers(report: dict) -> str:
    """The largest results of operations, for people."""
    lines = ["largest results of operations, of one line together (not all are there at once):"]
    for entry in report["largest_buffers"]:
        lines.append(
            f"  {entry['count']:4} x {entry['bytes'] / 2**20:8.1f} MiB  {entry['shape'][:60]:<60} {entry['source']}"
        )
    return "\n".join(lines)


def describe_shortage(error: libtpu.OutOfMemory) -> str:
    """What takes the memory, for people."""
    amounts = f"{error.needed / GIB:.2f} of {error.capacity / GIB:.2f} GiB a device"
    lines = [f"memory       does NOT fit: {amounts}; largest:"]
    for entry in error.allocations[:10]:
        places = [_line(entry.source)] if entry.source else [_line(source) for _, source in entry.candidates]
        lines.append(
            f"  {entry.bytes / 2**20:8.0f} MiB  {entry.shape[:70]:<70} {', '.join(dict.fromkeys(places))}".rstrip()
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Job]:
    """The command line; what follows `--` belongs to the script."""
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
    parser.add_argument("--batch", type=int, default=0, help="examples a device (default: the recipe's, shared out)")
    parser.add_argument("--effort", choices=EFFORTS, default="fast", help="of the compiler; full estimates cycles")
    parser.add_argument("--no-search", action="store_true", help="where it does not fit, do not look for what does")
    parser.add_argument("--json", default="", help="where the figures go (default: a file in runs/compile)")
    parser.add_argument("--dump", default="", help="file for the optimised module (HloModuleProto)")
    options = parser.parse_args(own)
    script = Job(options.model, "", options.task, (), 0).script
    preset = options.preset or FIRST_PRESET[script]
    if preset not in script.PRESETS:
        known = ", ".join(script.PRESETS)
        raise InputError(f"the preset {preset!r} of {options.model} is not known; it is one of {known}")
    if options.batch < 0:
        raise InputError(f"--batch is {options.batch}; it must be at least 1, or 0 for the recipe's")
    return options, Job(options.model, preset, options.task, tuple(flags), options.batch)


def main(arguments: list[str] | None = None, functions: Mapping = MappingProxyType({})) -> dict:
    """Compiles, prints and writes the report; returns it. Where the step does not fit: {"needed", "capacity", …}.

    `functions`: by script, an object whose `build` and `train_step` are taken instead of the script's.
    """
    options, job = parse(arguments)
    script = functions.get(job.script, job.script)
    with libtpu.Topology(options.topology) as topology:
        mesh = staging.setup(topology.num_devices, topology.kind, job.config(topology.num_devices).precision)
        try:
            report, optimized = compile_step(job, topology, mesh, options.effort, script)
            print(describe(report), flush=True)
        except libtpu.OutOfMemory as error:
            print(f"{job.model} {job.preset} on {topology.name}", describe_shortage(error), sep="\n", flush=True)
            optimized = b""
            report = {"fits": False, "needed": error.needed, "capacity": error.capacity, "topology": topology.name}
            if not options.no_search:
                asked = a_device(job, topology.num_devices)
                print(f"looking for the largest batch that fits, below {asked} a device:", flush=True)
                report["largest_batch"], best = largest_batch(job, topology, mesh, script, asked)
                print(f"the largest batch that fits: {report['largest_batch']} a device", flush=True)
                if best:
                    print(describe_buffers(best), flush=True)
                    report["report"] = best
        name = "-".join([job.model, *([job.task] if job.task else []), job.preset, topology.name.replace(":", "_")])
        path = Path(options.json or f"runs/compile/{name}-{options.effort}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        if options.dump and optimized:
            Path(options.dump).write_bytes(optimized)
    return report


def a_device(job: Job, devices: int) -> int:
    """Examples a device of a step."""
    if job.batch:
        return job.batch
    config = job.config(devices)
    if job.script is transformer:
        tokens = config.lengths[-1] if config.lengths else steps.LONGEST
        return math.ceil(config.batch_tokens / tokens / devices)
    return math.ceil(config.batch_size / getattr(config, "update_every", 1) / devices)


if __name__ == "__main__":
    try:
        sys.exit(0 if main().get("fits", True) else 1)
    except (InputError, device.GraphError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
