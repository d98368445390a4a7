"""The report of a compiled step: figures of its program, and the same for people."""

from tpu.compiler import analysis, bundles, hlo, libtpu, staging
from tpu.compiler.libtpu import GIB


def figures(
    staged: staging.Staged,
    program: libtpu.Program,
    generation: libtpu.Generation,
    effort: str,
    code: dict[str, bundles.Bundles] | None,
) -> dict:
    """Returns what the compiler says of a step; cycles only where they are meaningful, at effort "full".

    Args:
        code: the bundles of each operation by its name; None: they were not counted.
    """
    module, before = hlo.parse(program.optimized), hlo.parse(staged.module)
    memory, cost = program.memory, program.cost
    copies, products = analysis.copies(module), analysis.dots(before)
    on_chip = analysis.on_chip_bytes(module)
    roofline = {
        "flops": cost.flops / generation.peak_flops,
        "bytes": max(0, cost.bytes_accessed - on_chip) / generation.hbm_bytes_per_second,
    }
    found = {
        "memory": {name: getattr(memory, name) for name in ("needed", "peak", "argument", "output", "alias", "temp")},
        "kept_bytes": staged.kept,
        "flops": cost.flops,
        "bytes_accessed": cost.bytes_accessed,
        "on_chip_bytes": on_chip,
        "roofline_seconds": roofline,
        "parameters": len(staged.parameters),
        "to_donate": len(staged.donated),
        "donated": len(analysis.donated(module)),
        "collectives": _collectives(module),
        "custom_calls": analysis.custom_calls(module),
        "copies": {"count": len(copies.instructions), "bytes": copies.bytes},
        "largest_buffers": _largest(module),
        "random_bytes": analysis.random_bytes(before),
        "host_transfers": len(analysis.host_transfers(module)),
        "float32_products": len([dot for dot in products if "f32" in (dot.lhs, dot.rhs)]),
        "products": len(products),
        "product_flops": sum(filter(None, analysis.product_flops(before, module.num_partitions or 1))),
    }
    if effort == "full":
        cycles = analysis.entry_cycles(module)
        found["cycles"] = cycles.total
        found["loops_counted_once"] = len(cycles.unknown_loops)
        found["estimated_seconds"] = cycles.total / generation.clock_hz if generation.clock_hz else None
        found["longest"] = _longest(module, code or {})
    if code is not None:
        written = analysis.with_code(module, code)
        found["bundles"] = sum(code[timed.instruction.name].count * timed.times for timed in written)
        found["uncounted"] = _uncounted(module, code)
    return found


def _uncounted(module: hlo.Module, code: dict[str, bundles.Bundles]) -> dict:
    """Returns the bundles of the operations that have no estimate, in all, by kind, and of the longest lines.

    Collectives are left out, which mostly wait: their bytes stand elsewhere. So are asynchronous copies.
    """
    kinds: dict[str, int] = {}
    lines: dict[tuple, dict] = {}
    loops = 0
    for timed in analysis.uncounted(module):
        each, found = timed.instruction, code.get(timed.instruction.name)
        if found is None:  # it has no code of its own
            continue
        kind = analysis.kind(module, each)
        count = found.count * timed.times
        kinds[kind] = kinds.get(kind, 0) + count
        loops += found.unknown_loops
        key = kind, each.shape.text, _line(each.source)
        names = dict(zip(("operation", "shape", "source"), key, strict=True))
        entry = lines.setdefault(key, {"bundles": 0, "count": 0} | names)
        entry["bundles"] += count
        entry["count"] += timed.times
    longest = sorted(lines.values(), key=lambda entry: -entry["bundles"])[:6]
    return {"bundles": sum(kinds.values()), "unknown_loops": loops, "kinds": kinds, "longest": longest}


def _longest(module: hlo.Module, code: dict[str, bundles.Bundles]) -> list[dict]:
    """Returns the operations that take most of the step, those of the same line and shape together."""
    found: dict[tuple, dict] = {}
    for timed in analysis.longest(module, 10_000):
        each = timed.instruction
        key = each.opcode, each.shape.text, each.op_name.rsplit("/", 1)[-1], _line(each.source)
        names = dict(zip(("operation", "shape", "name", "source"), key, strict=True))
        entry = found.setdefault(key, {"cycles": 0, "bundles": 0, "count": 0} | names)
        entry["cycles"] += timed.cycles * timed.times
        entry["bundles"] += code[each.name].count * timed.times if each.name in code else 0
        entry["count"] += timed.times
    return sorted(found.values(), key=lambda entry: -entry["cycles"])[:12]


def _largest(module: hlo.Module) -> list[dict]:
    """Returns the largest results of single operations, those of the same line and shape together."""
    found: dict[tuple, dict] = {}
    for each in analysis.largest_buffers(module, 1_000):
        key = each.shape.text, _line(each.source)
        entry = found.setdefault(key, {"bytes": each.shape.bytes, "count": 0, "shape": key[0], "source": key[1]})
        entry["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["bytes"] * entry["count"])[:12]


def _line(source: str) -> str:
    """Returns "file:line" without the path to the repository or to the package."""
    return source.removeprefix(f"{staging.ROOT}/").rpartition("site-packages/")[2]


def _collectives(module: hlo.Module) -> dict[str, dict]:
    """Returns {kind: {"count", "bytes" per device, "largest": bytes of its largest result, "groups": {devices that take
    part: bytes}, "lines" of origin}}."""
    found: dict[str, dict] = {}
    for each in analysis.collectives(module):
        entry = found.setdefault(each.kind, {"count": 0, "bytes": 0, "largest": 0, "groups": {}, "lines": []})
        entry["count"] += each.times
        entry["bytes"] += each.bytes * each.times
        entry["groups"][each.group_size] = entry["groups"].get(each.group_size, 0) + each.bytes * each.times
        entry["largest"] = max(entry["largest"], each.result_bytes)
        line = _line(each.source) or each.op_name.rsplit("/", 1)[-1]
        if line not in entry["lines"]:
            entry["lines"].append(line)
    return found


def describe(report: dict) -> str:
    """Returns the report for people."""
    devices, batch, unit = report["devices"], report["batch"], report["unit"]
    memory, roofline = report["memory"], report["roofline_seconds"]
    lines = [
        f"{report['what']}: {batch:,} {unit} per device, {batch * devices:,} per step",
        f"{report['topology']}, {devices} x {report['kind']}; libtpu {report['libtpu']}, effort {report['effort']}, "
        f"compiled in {report['compile_seconds']:.0f} s",
        f"memory       fits: {memory['needed'] / GIB:.2f} of {report['hbm_bytes'] / GIB:.2f} GiB per device "
        f"(arguments {memory['argument'] / GIB:.2f}, temporaries {memory['temp'] / GIB:.2f}; live at once "
        f"{memory['peak'] / GIB:.2f})",
        f"donated      {report['donated']} of {report['to_donate']} tensors that the step updates",
        f"work         {report['flops'] / 1e12:.2f} TFLOP and {report['bytes_accessed'] / 1e9:.1f} GB per device, "
        f"up to {report['on_chip_bytes'] / 1e9:.1f} of them in on-chip memory",
        f"roofline     {1e3 * roofline['flops']:.1f} ms by its flops, {1e3 * roofline['bytes']:.1f} ms by the bytes in "
        "HBM; no step is shorter, unless its bytes are counted too high (docs/tpu/findings.md)",
    ]
    if report["kept_bytes"] > GIB / 200:
        kept = f"{report['kept_bytes'] / GIB:.2f} GiB of what the program does not take, such as the optimizer's state"
        lines.insert(3, f"             and {kept}")
    if report["effort"] == "full":
        line = f"estimate     {report['cycles'] / 1e6:.1f}M cycles"
        if report["estimated_seconds"]:
            seconds = report["estimated_seconds"]
            line += f", {1e3 * seconds:.1f} ms per step, {batch / seconds:,.0f} {unit} per second and device"
            peak = libtpu.GENERATIONS[report["topology"].split(":")[0]].peak_flops * devices
            line += f", MFU {report['product_flops'] / seconds / peak:.1%}"
        lines.append(line + "; without asynchronous copies, custom calls and waiting for other devices")
        if "bundles" in report:
            lines.append(f"code         {report['bundles'] / 1e6:.1f}M bundles in all, of a cycle or more each")
            lines += _describe_uncounted(report["uncounted"])
        if report["loops_counted_once"]:
            lines.append(f"             {report['loops_counted_once']} loops of unknown length are counted once")
    for kind, entry in sorted(report["collectives"].items()):
        amount = f"{entry['count']}, {entry['bytes'] / 1e6:.1f} MB per device"
        if "placement" in report:
            parts = (f"{size / 1e6:.1f} among {group}" for group, size in sorted(entry["groups"].items()))
            amount += f" ({', '.join(parts)})"
        # A combined one names only one of its lines.
        lines.append(f"{kind:<12} {amount}: {', '.join(entry['lines'][:4])}")
    if not report["collectives"]:
        lines.append("collectives  none")
    calls = ", ".join(f"{name} {count}" for name, count in sorted(report["custom_calls"].items()))
    lines.append(f"custom calls {calls or 'none'}; transfers to the host {report['host_transfers']}")
    lines.append(f"copies       {report['copies']['count']}, {report['copies']['bytes'] / 1e6:.1f} MB")
    lines.append(f"random       {report['random_bytes'] / 1e6:.1f} MB of numbers drawn, by each device for all")
    lines.append(f"products     {report['products']}, {report['float32_products']} of them of float32")
    if "placement" in report:
        lines += ["parameters, the axis that cuts each dimension, and their optimizer's state:", *report["placement"]]
    if "longest" in report:
        lines.append("longest operations, of one line together: cycles by estimate, bundles of code")
    for entry in report.get("longest", []):
        share = f"{entry['cycles'] / 1e6:7.2f}M {entry['cycles'] / report['cycles']:6.1%}"
        share += f" {entry.get('bundles', 0) / 1e6:7.2f}M  {entry['count']:3} x"
        lines.append(
            f"{share} {entry['operation']:<12} {entry['shape'][:50]:<50} {entry['name'][:30]} {entry['source']}"
        )
    return "\n".join(lines)


def _describe_uncounted(found: dict) -> list[str]:
    """Returns the bundles of what the estimate leaves out, for people; see tpu/compiler/bundles.py."""
    kinds = sorted(found["kinds"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {count / 1e6:.3f}M" for kind, count in kinds[:6])
    total = f"{found['bundles'] / 1e6:.3f}M bundles of code, a cycle or more each, which the cycles leave out"
    lines = [f"no estimate  {total}: {shares}"]
    if found["unknown_loops"]:
        lines.append(f"             {found['unknown_loops']} loops of unknown length are counted once")
    for entry in found["longest"]:
        what = f"{entry['operation']:<12} {entry['shape'][:50]:<50} {entry['source']}"
        lines.append(f"{entry['bundles'] / 1e6:9.3f}M  {entry['count']:3} x {what}")
    return lines


def describe_buffers(report: dict) -> str:
    """Returns the largest results of operations, for people."""
    lines = ["largest results of operations, of one line together (not all exist at once):"]
    for entry in report["largest_buffers"]:
        lines.append(
            f"  {entry['count']:4} x {entry['bytes'] / 2**20:8.1f} MiB  {entry['shape'][:60]:<60} {entry['source']}"
        )
    return "\n".join(lines)


def describe_shortage(error: libtpu.OutOfMemory) -> str:
    """Returns what takes the memory, for people."""
    amounts = f"{error.needed / GIB:.2f} of {error.capacity / GIB:.2f} GiB per device"
    lines = [f"memory       does NOT fit: {amounts}; largest:"]
    for entry in error.allocations[:10]:
        places = [_line(entry.source)] if entry.source else [_line(source) for _, source in entry.candidates]
        lines.append(
            f"  {entry.bytes / 2**20:8.0f} MiB  {entry.shape[:70]:<70} {', '.join(dict.fromkeys(places))}".rstrip()
        )
    return "\n".join(lines)
