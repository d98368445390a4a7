"""The report of a compiled step: figures of its program, and the same for people."""

from tpu.compiler import analysis, bundles, hlo, libtpu, staging
from tpu.compiler.libtpu import GIB


def figures(
    staged: staging.Staged,
    program: libtpu.Program,
    topology: libtpu.Topology,
    effort: str,
    code: dict[str, bundles.Bundles] | None,
    gradient_bytes: int = 0,
) -> dict:
    """Returns what the compiler says of a step; cycles only where they are meaningful, at effort
    "full".

    Args:
        code: the bundles of each operation by its name; None: they were not counted.
        gradient_bytes: of all gradients of a train step's layers together, where there are several
            slices; 0: it has none.
    """
    generation = topology.specification
    module = hlo.parse(program.optimized)
    before = hlo.parse(staged.module)
    memory = program.memory
    cost = program.cost
    copies = analysis.copies(module)
    products = analysis.dots(before)
    product_flops = analysis.product_flops(before, topology.num_devices)
    on_chip = analysis.on_chip_bytes(module)
    hbm_traffic = max(0, cost.bytes_accessed - on_chip)

    found = {
        "memory": {
            "needed": memory.needed,
            "peak": memory.peak,
            "argument": memory.argument,
            "output": memory.output,
            "alias": memory.alias,
            "temp": memory.temp,
        },
        "kept_bytes": staged.kept,
        "flops": cost.flops,
        "bytes_accessed": cost.bytes_accessed,
        "on_chip_bytes": on_chip,
        "roofline_seconds": {
            "flops": cost.flops / generation.peak_flops,
            "bytes": hbm_traffic / generation.hbm_bytes_per_second,
        },
        "parameters": len(staged.parameters),
        "to_donate": len(staged.donated),
        "donated": len(analysis.donated(module)),
        "collectives": _collectives(module),
        "custom_calls": analysis.custom_calls(module),
        "copies": {"count": len(copies.instructions), "bytes": copies.bytes},
        "largest_buffers": _largest(module),
        "random_bytes": analysis.random_bytes(before),
        "host_transfers": len(analysis.host_transfers(module)),
        "float32_products": sum("f32" in (dot.lhs, dot.rhs) for dot in products),
        "products": len(products),
        "product_flops": sum(flops or 0 for flops in product_flops),
    }

    if topology.slices > 1:
        found["between_slices"] = _between_slices(module, topology, gradient_bytes)
    if effort == "full":
        cycles = analysis.entry_cycles(module)
        found["cycles"] = cycles.total
        found["loops_counted_once"] = len(cycles.unknown_loops)
        found["estimated_seconds"] = None
        if generation.clock_hz:
            found["estimated_seconds"] = cycles.total / generation.clock_hz
        found["longest"] = _longest(module, code or {})
    if code is not None:
        count = 0
        for timed in analysis.with_code(module, code):
            count += code[timed.instruction.name].count * timed.times
        found["bundles"] = count
        found["uncounted"] = _uncounted(module, code)
    return found


def _uncounted(module: hlo.Module, code: dict[str, bundles.Bundles]) -> dict:
    """Returns the bundles of the operations that have no estimate, in all, by kind, and of the
    longest lines.

    Collectives are left out, which mostly wait: their bytes stand elsewhere. So are asynchronous
    copies.
    """
    kinds: dict[str, int] = {}
    lines: dict[tuple, dict] = {}
    unknown_loops = 0
    for timed in analysis.uncounted(module):
        each = timed.instruction
        if each.name not in code:  # it has no code of its own
            continue

        own = code[each.name]
        kind = analysis.kind(module, each)
        count = own.count * timed.times
        kinds[kind] = kinds.get(kind, 0) + count
        unknown_loops += own.unknown_loops

        shape = each.shape.text
        source = _line(each.source)
        entry = lines.setdefault(
            (kind, shape, source),
            {"bundles": 0, "count": 0, "operation": kind, "shape": shape, "source": source},
        )
        entry["bundles"] += count
        entry["count"] += timed.times

    return {
        "bundles": sum(kinds.values()),
        "unknown_loops": unknown_loops,
        "kinds": kinds,
        "longest": sorted(lines.values(), key=lambda entry: -entry["bundles"])[:6],
    }


def _longest(module: hlo.Module, code: dict[str, bundles.Bundles]) -> list[dict]:
    """Returns the operations that take most of the step, those of the same line and shape
    together."""
    found: dict[tuple, dict] = {}
    for timed in analysis.longest(module, 10_000):
        each = timed.instruction
        shape = each.shape.text
        name = each.op_name.rsplit("/", 1)[-1]
        source = _line(each.source)
        entry = found.setdefault(
            (each.opcode, shape, name, source),
            {
                "cycles": 0,
                "bundles": 0,
                "count": 0,
                "operation": each.opcode,
                "shape": shape,
                "name": name,
                "source": source,
            },
        )
        entry["cycles"] += timed.cycles * timed.times
        if each.name in code:
            entry["bundles"] += code[each.name].count * timed.times
        entry["count"] += timed.times
    return sorted(found.values(), key=lambda entry: -entry["cycles"])[:12]


def _largest(module: hlo.Module) -> list[dict]:
    """Returns the largest results of single operations, those of the same line and shape
    together."""
    found: dict[tuple, dict] = {}
    for each in analysis.largest_buffers(module, 1_000):
        shape = each.shape.text
        source = _line(each.source)
        entry = found.setdefault(
            (shape, source),
            {"bytes": each.shape.bytes, "count": 0, "shape": shape, "source": source},
        )
        entry["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["bytes"] * entry["count"])[:12]


def _line(source: str) -> str:
    """Returns "file:line" without the path to the repository or to the package."""
    return source.removeprefix(f"{staging.ROOT}/").rpartition("site-packages/")[2]


def _collectives(module: hlo.Module) -> dict[str, dict]:
    """Returns {kind: {"count", "bytes" per device, "largest": bytes of its largest result,
    "groups": {devices that take part: bytes}, "lines" of origin}}."""
    found: dict[str, dict] = {}
    for each in analysis.collectives(module):
        entry = found.setdefault(
            each.kind,
            {"count": 0, "bytes": 0, "largest": 0, "groups": {}, "lines": []},
        )
        moved = each.bytes * each.times
        entry["count"] += each.times
        entry["bytes"] += moved
        groups = entry["groups"]
        groups[each.group_size] = groups.get(each.group_size, 0) + moved
        entry["largest"] = max(entry["largest"], each.result_bytes)
        line = _line(each.source) or each.op_name.rsplit("/", 1)[-1]
        if line not in entry["lines"]:
            entry["lines"].append(line)
    return found


def _between_slices(module: hlo.Module, topology: libtpu.Topology, gradient_bytes: int) -> dict:
    """Returns what a device sends to other slices in a step.

    Returns:
        slices
        kinds: {kind: {"count", "bytes" that a device hands over, "largest"}}
        bytes: of all kinds
        least_sent: bytes that must leave the slice for it
        bound: the least bytes of a train step: where the devices of a slice share the sum of their
            gradients, each sends its share, in one all-reduce over the slices
    Raises:
        RuntimeError: the module is not that of one slice, so its groups may cross slices.
    """
    slices = topology.slices
    per_slice = topology.num_devices // slices
    if (module.num_partitions or 1) != per_slice:
        raise RuntimeError(
            f"libtpu made a program for {module.num_partitions} devices, and a slice has "
            f"{per_slice}: which of its collectives are between slices is not known"
        )

    kinds: dict[str, dict] = {}
    least_sent = 0.0
    for each in analysis.between_slices(module):
        entry = kinds.setdefault(each.kind, {"count": 0, "bytes": 0, "largest": 0})
        entry["count"] += each.times
        entry["bytes"] += each.bytes * each.times
        entry["largest"] = max(entry["largest"], each.bytes)
        least_sent += each.least_sent(slices)

    share = gradient_bytes / per_slice
    of_a_share = analysis.Transfer("all-reduce", share, times=1, name="gradients")
    return {
        "slices": slices,
        "kinds": kinds,
        "bytes": sum(entry["bytes"] for entry in kinds.values()),
        "least_sent": round(least_sent),
        "bound": round(of_a_share.least_sent(slices)),
    }


# ---- for people ----------------------------------------------------------------------------------


def describe(report: dict) -> str:
    """Returns the report for people."""
    lines = _describe_step(report)
    if report["effort"] == "full":
        lines += _describe_cycles(report)
    lines += _describe_collectives(report)
    if "between_slices" in report:
        lines += _describe_between_slices(report["between_slices"])

    calls = []
    for name, count in sorted(report["custom_calls"].items()):
        calls.append(f"{name} {count}")
    listed = ", ".join(calls) or "none"
    lines.append(f"custom calls {listed}; transfers to the host {report['host_transfers']}")
    copies = report["copies"]
    lines.append(f"copies       {copies['count']}, {copies['bytes'] / 1e6:.1f} MB")
    lines.append(
        f"random       {report['random_bytes'] / 1e6:.1f} MB of numbers drawn, "
        "by each device for all"
    )
    lines.append(
        f"products     {report['products']}, {report['float32_products']} of them of float32"
    )

    if "placement" in report:
        lines.append("parameters, the axis that cuts each dimension, and their optimizer's state:")
        lines += report["placement"]
    if "longest" in report:
        lines += _describe_longest(report)
    return "\n".join(lines)


def _describe_step(report: dict) -> list[str]:
    """Returns what was compiled, its memory and its work."""
    devices = report["devices"]
    batch = report["batch"]
    lines = [
        (f"{report['what']}: {batch:,} {report['unit']} per device, {batch * devices:,} per step"),
        (
            f"{report['topology']}, {devices} x {report['kind']}; "
            f"libtpu {report['libtpu']}, effort {report['effort']}, "
            f"compiled in {report['compile_seconds']:.0f} s"
        ),
    ]

    memory = report["memory"]
    lines.append(
        f"memory       fits: {memory['needed'] / GIB:.2f} "
        f"of {report['hbm_bytes'] / GIB:.2f} GiB per device "
        f"(arguments {memory['argument'] / GIB:.2f}, "
        f"temporaries {memory['temp'] / GIB:.2f}; "
        f"live at once {memory['peak'] / GIB:.2f})"
    )
    if report["kept_bytes"] > GIB / 200:
        lines.append(
            f"             and {report['kept_bytes'] / GIB:.2f} GiB "
            "of what the program does not take, such as the optimizer's state"
        )

    lines.append(
        f"donated      {report['donated']} of {report['to_donate']} tensors that the step updates"
    )

    lines.append(
        f"work         {report['flops'] / 1e12:.2f} TFLOP "
        f"and {report['bytes_accessed'] / 1e9:.1f} GB per device, "
        f"up to {report['on_chip_bytes'] / 1e9:.1f} of them in on-chip memory"
    )

    roofline = report["roofline_seconds"]
    lines.append(
        f"roofline     {1e3 * roofline['flops']:.1f} ms by its flops, "
        f"{1e3 * roofline['bytes']:.1f} ms by the bytes in HBM; no step is shorter, "
        "unless its bytes are counted too high (docs/tpu/findings.md)"
    )
    return lines


def _describe_cycles(report: dict) -> list[str]:
    """Returns the compiler's estimate of the time, and the code of operations."""
    estimate = f"estimate     {report['cycles'] / 1e6:.1f}M cycles"
    seconds = report["estimated_seconds"]
    if seconds:
        _, slice_name = libtpu.split_name(report["topology"])
        generation, _, _ = slice_name.partition(":")
        peak = libtpu.GENERATIONS[generation].peak_flops * report["devices"]
        mfu = report["product_flops"] / seconds / peak
        estimate += (
            f", {1e3 * seconds:.1f} ms per step, "
            f"{report['batch'] / seconds:,.0f} {report['unit']} per second and device, "
            f"MFU {mfu:.1%}"
        )
    lines = [f"{estimate}; without asynchronous copies, custom calls and waiting for other devices"]

    if "bundles" in report:
        lines.append(
            f"code         {report['bundles'] / 1e6:.1f}M bundles in all, of a cycle or more each"
        )
        lines += _describe_uncounted(report["uncounted"])
    loops = report["loops_counted_once"]
    if loops:
        lines.append(f"             {loops} loops of unknown length are counted once")
    return lines


def _describe_uncounted(found: dict) -> list[str]:
    """Returns the bundles of what the estimate leaves out; see tpu/compiler/bundles.py."""
    kinds = sorted(found["kinds"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {count / 1e6:.3f}M" for kind, count in kinds[:6])
    lines = [
        f"no estimate  {found['bundles'] / 1e6:.3f}M bundles of code, a cycle or more each, "
        f"which the cycles leave out: {shares}"
    ]
    if found["unknown_loops"]:
        loops = found["unknown_loops"]
        lines.append(f"             {loops} loops of unknown length are counted once")
    for entry in found["longest"]:
        amount = f"{entry['bundles'] / 1e6:9.3f}M  {entry['count']:3} x"
        lines.append(f"{amount} {_operation_and_shape(entry)} {entry['source']}")
    return lines


def _describe_collectives(report: dict) -> list[str]:
    """Returns a line for each kind of collective; their groups where parameters are cut."""
    lines = []
    for kind, entry in sorted(report["collectives"].items()):
        amount = f"{entry['count']}, {entry['bytes'] / 1e6:.1f} MB per device"
        if "placement" in report:
            groups = []
            for devices, moved in sorted(entry["groups"].items()):
                groups.append(f"{moved / 1e6:.1f} among {devices}")
            amount += f" ({', '.join(groups)})"
        # A combined one names only one of its lines.
        lines.append(f"{kind:<12} {amount}: {', '.join(entry['lines'][:4])}")
    if not lines:
        lines.append("collectives  none")
    return lines


def _describe_between_slices(found: dict) -> list[str]:
    """Returns a line for each kind of collective between slices, and what must be sent there; the
    lines before are then of collectives within a slice."""
    lines = []
    for kind, entry in sorted(found["kinds"].items()):
        amount = f"{entry['count']}, {entry['bytes'] / 1e6:.2f} MB per device"
        lines.append(f"between {found['slices']} slices: {kind} {amount}")

    total = (
        f"between {found['slices']} slices, over the data-centre network: "
        f"{found['bytes'] / 1e6:.2f} MB per device, handed over to the host, "
        f"for which {found['least_sent'] / 1e6:.2f} MB must leave the slice"
    )
    if found["bound"]:
        total += (
            f"; one all-reduce of a device's share of the layers' gradients: "
            f"{found['bound'] / 1e6:.2f} MB"
        )
    return [*lines, total]


def _describe_longest(report: dict) -> list[str]:
    """Returns the operations that take most of the step."""
    lines = ["longest operations, of one line together: cycles by estimate, bundles of code"]
    for entry in report["longest"]:
        cycles = f"{entry['cycles'] / 1e6:7.2f}M {entry['cycles'] / report['cycles']:6.1%}"
        code = f"{entry.get('bundles', 0) / 1e6:7.2f}M  {entry['count']:3} x"
        name = entry["name"][:30]
        lines.append(f"{cycles} {code} {_operation_and_shape(entry)} {name} {entry['source']}")
    return lines


def _operation_and_shape(entry: dict) -> str:
    """Returns the two columns of a table of operations."""
    return f"{entry['operation']:<12} {entry['shape'][:50]:<50}"


def describe_buffers(report: dict) -> str:
    """Returns the largest results of operations, for people."""
    lines = ["largest results of operations, of one line together (not all exist at once):"]
    for entry in report["largest_buffers"]:
        size = f"{entry['count']:4} x {entry['bytes'] / 2**20:8.1f} MiB"
        lines.append(f"  {size}  {entry['shape'][:60]:<60} {entry['source']}")
    return "\n".join(lines)


def describe_shortage(error: libtpu.OutOfMemory) -> str:
    """Returns what takes the memory, for people."""
    lines = [
        f"memory       does NOT fit: {error.needed / GIB:.2f} "
        f"of {error.capacity / GIB:.2f} GiB per device; largest:"
    ]
    for entry in error.allocations[:10]:
        if entry.source:
            sources = [_line(entry.source)]
        else:
            sources = [_line(source) for _, source in entry.candidates]
        size = f"{entry.bytes / 2**20:8.0f} MiB"
        origin = ", ".join(dict.fromkeys(sources))
        lines.append(f"  {size}  {entry.shape[:70]:<70} {origin}".rstrip())
    return "\n".join(lines)
