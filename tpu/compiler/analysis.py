"""Answers questions about a module of tpu/compiler/hlo.py: cycles, collectives, products, memory,
data movement.

entry_cycles(module) -> Cycles     .total, .unknown_loops (counted once: trip count not known)
longest(module, count)             [Timed(instruction, cycles, times)]: the longest operations
uncounted(module)                  [Timed] of the operations without an estimate; cycles are 0
with_code(module, names)           [Timed] of the operations of these names; cycles are 0
collectives(module)                [Collective], wherever they are; asynchronous pairs once
between_slices(module)             [Transfer]: what a device hands over for those of other slices
dots(module)                       [Dot]: every matmul and convolution, with its operands' types
product_flops(module, devices)     [int | None]: flops of each of them in a step before compilation,
                                   on all devices
on_chip_bytes(module)              bytes that a step reads from on-chip memory and writes to it
copies(module) -> Copies           copies and transposes of the entry computation: .instructions
                                   .bytes .cycles
largest_buffers(module, count)     [Instruction] of the entry computation with the largest results
                                   in HBM
custom_calls(module)               {target: number of calls in the module}
host_transfers(module)             [Instruction] that move data to or from the host
random_bytes(module)               bytes of the random numbers that a step draws
with_result(module, shape, n)      [Instruction] whose result, divided among n devices, may have
                                   this shape
donated(module)                    {numbers of the parameters whose memory the program may reuse}
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from tpu.compiler.hlo import HOST_MEMORY, Computation, Instruction, Module, Shape
from tpu.compiler.hlo_pb2 import WindowDimension

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Instructions that give another instruction's buffer another name.
VIEWS = frozenset(
    {
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
    }
)
CALLS = ("while", "conditional", "call")  # run what they call, one operation after the other
# The update and the end of an asynchronous operation name the computation of its start again.
HOLDERS = (*CALLS, "fusion", "async-start")
# What an operation is named after where a fusion holds several: the hardest first.
HARDEST_FIRST = (
    *COLLECTIVES,
    "scatter",
    "sort",
    "gather",
    "rng-bit-generator",
    "dynamic-update-slice",
    "dynamic-slice",
)
# What a fusion that only moves data may consist of.
MOVES = frozenset(
    {
        "copy",
        "transpose",
        "parameter",
        "bitcast",
        "reshape",
        "tuple",
        "get-tuple-element",
        "fusion",
    }
)
MEGASCALE = "xla_megascale_runtime"  # what libtpu names its runtime between slices
MOST_POSITIONS = 10**8  # of a convolution along one dimension: more are not counted


def _walk(
    module: Module,
    entered: tuple[str, ...],
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yields (computation, instruction, how often it runs in a step) from the entry computation on.

    A loop of unknown trip count counts once, and all branches of a conditional count.

    Args:
        entered: opcodes whose computations are walked, too: CALLS for what the TensorCore runs one
            after the other, HOLDERS for everything.
    """
    pending = [(module.entry, 1)]
    while pending:
        computation, times = pending.pop()
        for instruction in computation.instructions:
            yield computation, instruction, times
            if instruction.opcode not in entered:
                continue

            inner = times
            if instruction.opcode == "while":
                inner *= instruction.trip_count or 1
            for called in instruction.called:
                pending.append((module.computations[called], inner))


# ---- cycles --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycles:
    """An estimate of one step.

    Attributes:
        unknown_loops: names of the loops that were counted once because their trip count is not
            known; where there are any, `total` is too low.
    """

    total: int
    unknown_loops: tuple[str, ...]


@dataclass(frozen=True)
class Timed:
    """An operation, the cycles of one run, and how often it runs in a step."""

    instruction: Instruction
    cycles: int
    times: int


def entry_cycles(module: Module) -> Cycles:
    """Returns the compiler's own estimate, summed over what runs one after the other.

    Asynchronous copies, custom calls and collectives carry no estimate and count as nothing. The
    sum is meaningful only for a module that was compiled at full effort.
    """
    total = 0
    unknown = []
    for _, instruction, times in _walk(module, CALLS):
        total += (instruction.estimated_cycles or 0) * times
        if instruction.opcode == "while" and instruction.trip_count is None:
            unknown.append(instruction.name)
    return Cycles(total, tuple(unknown))


def longest(module: Module, count: int = 10) -> list[Timed]:
    """Returns the operations with the most cycles in a step, the longest first."""
    found = []
    for _, instruction, times in _walk(module, CALLS):
        if instruction.estimated_cycles:
            found.append(Timed(instruction, instruction.estimated_cycles, times))
    return sorted(found, key=lambda each: -each.cycles * each.times)[:count]


def with_code(module: Module, code: Collection[str]) -> list[Timed]:
    """Returns the operations that run one after the other whose names are in `code`, with or
    without an estimate."""
    found = []
    for _, instruction, times in _walk(module, CALLS):
        if instruction.name in code:
            found.append(Timed(instruction, 0, times))
    return found


def uncounted(module: Module) -> list[Timed]:
    """Returns the operations that run one after the other and have no estimate, but for
    collectives."""
    found = []
    for _, instruction, times in _walk(module, CALLS):
        if instruction.estimated_cycles:
            continue
        if kind(module, instruction) not in COLLECTIVES:
            found.append(Timed(instruction, 0, times))
    return found


def kind(module: Module, instruction: Instruction) -> str:
    """Returns the opcode of an operation; of a fusion, that of what is hardest in it."""
    if instruction.opcode != "fusion":
        return instruction.opcode

    inside = set()
    pending = list(instruction.called)
    while pending:
        for each in module.computations[pending.pop()].instructions:
            inside.add(each.opcode)
            pending.extend(each.called)

    for opcode in HARDEST_FIRST:
        if opcode in inside:
            return opcode
    return instruction.opcode


# ---- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Attributes:
        kind: one of COLLECTIVES.
        bytes: of the operands on one device; of all of them where several were combined.
        result_bytes: of the results; an all-gather's are `group_size` times its operands'.
        operands: how many there are.
        group_size: devices per group; None before compilation, where it means all.
        times: runs in a step.
    """

    kind: str
    bytes: int
    result_bytes: int
    operands: int
    group_size: int | None
    times: int
    op_name: str
    source: str
    name: str


def collectives(module: Module) -> list[Collective]:
    """Returns every collective, also in loops, fusions and asynchronous operations; a start and its
    end count once.

    Two forms are libtpu's own. A fusion of an all-reduce and the slice of it that is kept counts as
    a reduce-scatter. A collective that runs during other fusions stands in each of them, between a
    fusion that calls "AsyncCollectiveStart" and one that calls "AsyncCollectiveDone": only the
    first is counted.
    """
    callers = _callers(module)
    found = []
    for computation, instruction, times in _walk(module, HOLDERS):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or not _is_first(computation, instruction):
            continue

        operands = computation.operands(instruction)
        result = instruction.shape
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            result = result.elements[1]  # the first element is the operands

        root = computation.root
        root_slices_it = root.opcode == "dynamic-slice" and root.operands[0] == instruction.id
        if kind == "all-reduce" and root_slices_it:
            kind = "reduce-scatter"
            result = root.shape

        caller = callers.get(computation.id, instruction)
        found.append(
            Collective(
                kind=kind,
                bytes=sum(operand.bytes for operand in operands),
                result_bytes=result.bytes,
                operands=len(operands),
                group_size=_group_size(instruction) or module.num_partitions,
                times=times,
                op_name=instruction.op_name or caller.op_name,
                source=instruction.source or caller.source,
                name=instruction.name,
            )
        )
    return found


def _callers(module: Module) -> dict[int, Instruction]:
    """Returns by the id of a computation the last instruction that calls it."""
    callers = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for called in instruction.called:
                callers[called] = instruction
    return callers


def _is_first(computation: Computation, instruction: Instruction) -> bool:
    """Returns False for the later parts of a collective that runs during several fusions."""
    if b'"async_collective_fusion_config"' not in instruction.proto.backend_config:
        return True
    for user in computation.instructions:
        starts = user.custom_call_target == "AsyncCollectiveStart"
        if starts and instruction.id in user.operands:
            return True
    return False


def _group_size(instruction: Instruction) -> int | None:
    """Returns the devices per group of a collective; None where the instruction does not say, which
    means all."""
    proto = instruction.proto
    if proto.HasField("mesh_axes_replica_group_list"):  # as libtpu 0.0.51 writes it
        groups = proto.mesh_axes_replica_group_list
        devices = 1
        for axis in groups.axes:
            whole = groups.mesh.axes[axis.mesh_axis_index].size
            devices *= axis.sub_axis_info.size or whole  # a group may have a part of an axis
        return devices

    if instruction.opcode.startswith("collective-permute"):
        members = set()
        for pair in proto.source_target_pairs:
            members.add(pair.source)
            members.add(pair.target)
        return len(members) or None

    listed = proto.collective_device_list
    for iota in (proto.iota_replica_group_list, listed.iota_replica_group_list):
        if iota.num_devices_per_group:
            return iota.num_devices_per_group

    one_by_one = listed.replica_groups or proto.replica_groups
    if not one_by_one:
        return None
    return len(one_by_one[0].replica_ids) or None


@dataclass(frozen=True)
class Transfer:
    """A device's part in a collective between slices, over the data-centre network.

    Attributes:
        kind: one of COLLECTIVES, or "one-to-one".
        bytes: that a device hands over to its host: its operand of the collective.
        times: runs in a step.
        name: of the collective.
    """

    kind: str
    bytes: int
    times: int
    name: str

    def least_sent(self, slices: int) -> float:
        """Returns the bytes that must leave a device's slice for it, all runs together.

        A ring over the slices sends as little: of an all-reduce each part twice but for one slice's
        own, of a reduce-scatter and an all-to-all all parts but the own one, of an all-gather the
        operand to each other slice.
        """
        others = slices - 1
        shares = {
            "all-reduce": 2 * others / slices,
            "reduce-scatter": others / slices,
            "all-to-all": others / slices,
            "all-gather": others,
        }
        return self.bytes * self.times * shares.get(self.kind, 1)


def between_slices(module: Module) -> list[Transfer]:
    """Returns what a device sends to other slices in a module that was compiled for several.

    Such a module is that of one slice's devices, and the groups of its collectives are within a
    slice. libtpu has taken each collective of several slices apart: what remains between them is
    handed over to the host ("send"), whose runtime, MegaScale, does the rest and hands the result
    back.
    """
    found = []
    for computation, instruction, times in _walk(module, HOLDERS):
        attributes = instruction.attributes
        handler = attributes.get("_xla_host_transfer_handler_name")
        if instruction.opcode != "send" or handler != MEGASCALE:
            continue
        operand = computation.operands(instruction)[0]
        found.append(
            Transfer(
                kind=attributes["_xla_megascale_transfer_type"].lower().replace("_", "-"),
                bytes=operand.bytes,
                times=times,
                name=attributes.get("_xla_host_transfer_rendezvous", instruction.name),
            )
        )
    return found


# ---- products ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A matmul or convolution.

    Attributes:
        lhs, rhs, result: element types; an operand that was widened for the product has the type it
            had before.
        flops: two per multiply-add, on one device in an optimized module; None for a convolution
            too involved to count.
        times: runs in a step.
    """

    opcode: str
    lhs: str
    rhs: str
    result: str
    precision: tuple[str, ...]
    flops: int | None
    times: int
    op_name: str
    source: str
    name: str


def dots(module: Module) -> list[Dot]:
    """Returns every matmul and convolution, also in fusions.

    The compiler turns dots into convolutions, and keeps the types of their operands and the
    precision.

    A TPU multiplies in bf16. At "default" precision f32 operands are rounded on the way into the
    matrix unit: no more cycles there (a matmul of 4096 on v5e: 1.11M with f32, 1.08M with bf16
    operands), but twice the memory and traffic. "high" takes three passes (3.34M) and "highest" six
    (6.39M).
    """
    found = []
    for computation, instruction, times in _walk(module, HOLDERS):
        if instruction.opcode not in ("dot", "convolution"):
            continue

        left, right = computation.operands(instruction)[:2]
        if instruction.opcode == "dot":
            flops = _dot_flops(instruction, left.shape)
        else:
            flops = _convolution_flops(instruction, left.shape, right.shape)
        found.append(
            Dot(
                opcode=instruction.opcode,
                lhs=_narrowest(computation, left),
                rhs=_narrowest(computation, right),
                result=instruction.shape.element_type,
                precision=instruction.precision or ("default", "default"),
                flops=flops,
                times=times,
                op_name=instruction.op_name,
                source=instruction.source,
                name=instruction.name,
            )
        )
    return found


def in_regions(module: Module) -> set[str]:
    """Returns the names of the entry computation's instructions in per-device regions, before
    compilation: their shapes are those of one device's part."""
    names: set[str] = set()
    found: set[int] = set()
    for instruction in module.entry.instructions:
        entered = instruction.custom_call_target == "SPMDFullToShardShape"
        left = instruction.custom_call_target == "SPMDShardToFullShape"
        follows = not found.isdisjoint(instruction.operands)
        if entered or (follows and not left):
            found.add(instruction.id)
            names.add(instruction.name)
    return names


def product_flops(module: Module, devices: int) -> list[int | None]:
    """Returns the flops of each matmul and convolution in a step, before compilation, on all
    devices together; None where they are too involved to count."""
    regions = in_regions(module)
    counts = []
    for dot in dots(module):
        flops = dot.flops
        if flops:
            flops *= dot.times
            if dot.name in regions:
                flops *= devices
        counts.append(flops)
    return counts


def _narrowest(computation: Computation, value: Instruction) -> str:
    """Returns the element type of a value before it was widened, if it was only widened and
    moved."""
    found = value.shape.element_type
    while value.opcode in ("convert", "transpose", "reshape", "bitcast", "broadcast", "copy"):
        (value,) = computation.operands(value)
        if value.shape.element_type in ("bf16", "f16"):
            return value.shape.element_type
    return found


def _dot_flops(instruction: Instruction, left: Shape) -> int:
    contracting = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
    terms = math.prod(left.dimensions[number] for number in contracting)
    return 2 * math.prod(instruction.shape.dimensions) * terms


def _convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> int | None:
    """Counts as XLA's HloCostAnalysis: only products with elements of the input, not with padding
    or dilation."""
    numbers = instruction.proto.convolution_dimension_numbers
    result = instruction.shape
    spatial = zip(
        numbers.input_spatial_dimensions,
        numbers.output_spatial_dimensions,
        instruction.proto.window.dimensions,
        strict=True,
    )
    positions = 1
    for source, target, window in spatial:
        counted = _valid_positions(left.dimensions[source], result.dimensions[target], window)
        if counted is None:
            return None
        positions *= counted

    batch_groups = instruction.proto.batch_group_count or 1
    batch = left.dimensions[numbers.input_batch_dimension] // batch_groups
    inputs = right.dimensions[numbers.kernel_input_feature_dimension]
    outputs = right.dimensions[numbers.kernel_output_feature_dimension]
    return 2 * positions * batch * inputs * outputs


def _valid_positions(size: int, outputs: int, window: WindowDimension) -> int | None:
    """Counts pairs of output and kernel element, along one dimension, that meet an element of the
    input."""
    kernel = window.size or 1
    stride = window.stride or 1
    base_dilation = window.base_dilation or 1
    window_dilation = window.window_dilation or 1
    if kernel * outputs > MOST_POSITIONS:
        return None

    starts = np.arange(outputs, dtype=np.int64)[:, None] * stride - window.padding_low
    offsets = np.arange(kernel, dtype=np.int64)[None] * window_dilation
    positions = starts + offsets  # (outputs, kernel), in the dilated input
    last = (size - 1) * base_dilation
    meets = (positions >= 0) & (positions <= last) & (positions % base_dilation == 0)
    return int(meets.sum())


# ---- memory and data movement --------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Instructions of a step that only move data within HBM; `bytes` are those of their results."""

    instructions: tuple[Instruction, ...]
    bytes: int
    cycles: int


def on_chip_bytes(module: Module) -> int:
    """Returns the bytes that operations read from on-chip memory and write to it, the ends of
    copies in it included.

    An operand is counted whole. The compiler's `bytes_accessed` does the same, except for operands
    that are known to be read in part.
    """
    total = 0
    for computation, instruction, times in _walk(module, CALLS):
        opcode = instruction.opcode
        if opcode in VIEWS or opcode.endswith(("-done", "-update")):
            continue

        result = instruction.shape
        if result.element_type == "tuple":  # the other elements are operands and a context
            if opcode == "copy-start":
                result = result.elements[0]
            elif opcode == "async-start":
                result = result.elements[1]

        read = {}  # an operand that is given twice is read once
        for operand in computation.operands(instruction):
            read[operand.id] = operand.shape.on_chip_bytes
        total += times * (result.on_chip_bytes + sum(read.values()))
    return total


def copies(module: Module) -> Copies:
    """Returns copies and transposes of the entry computation, also as fusions of nothing else.

    Asynchronous copies (copy-start) are left out: they mostly fetch into on-chip memory while
    something else runs.
    """
    found = []
    moved = 0
    cycles = 0
    for instruction in module.entry.instructions:
        if _moves_only(module, instruction):
            found.append(instruction)
            moved += instruction.bytes
            cycles += instruction.estimated_cycles or 0
    return Copies(tuple(found), bytes=moved, cycles=cycles)


def _moves_only(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction copies or transposes, or is a fusion that does nothing
    else."""
    if instruction.opcode in ("copy", "transpose"):
        return True
    if instruction.opcode != "fusion":
        return False

    inside = []
    for called in instruction.called:
        inside += module.computations[called].instructions
    if not all(each.opcode in MOVES for each in inside):
        return False
    for each in inside:
        if each.opcode in ("copy", "transpose", "fusion") and _moves_only(module, each):
            return True
    return False


def largest_buffers(module: Module, count: int = 10) -> list[Instruction]:
    """Returns the entry computation's instructions with the largest results in HBM (`hbm_bytes`),
    the largest first.

    Parameters are among them. Left out are instructions that only rename a buffer, and starts of
    asynchronous operations, whose result is that of their end.
    """
    found = []
    for instruction in module.entry.instructions:
        begun = instruction.opcode.endswith(("-start", "-update"))
        if instruction.opcode not in VIEWS and not begun:
            found.append(instruction)
    return sorted(found, key=lambda each: -each.hbm_bytes)[:count]


def custom_calls(module: Module) -> dict[str, int]:
    """Returns the number of custom calls by target, the most frequent first.

    Calls in loops and fusions count, too, each once however often it runs.
    """
    calls = Counter()
    for _, instruction, _ in _walk(module, HOLDERS):
        if instruction.opcode == "custom-call":
            calls[instruction.custom_call_target] += 1
    return dict(calls.most_common())


def host_transfers(module: Module) -> list[Instruction]:
    """Returns infeeds, outfeeds, sends and receives to the host, and results that lie in the host's
    memory.

    What goes through the host to other slices is not among them, see `between_slices`.
    """
    found = []
    for computation, instruction, _ in _walk(module, HOLDERS):
        feeds = instruction.opcode in ("infeed", "outfeed")
        sends = instruction.proto.is_host_transfer and not _is_megascale(computation, instruction)
        if feeds or sends or _in_host_memory(instruction.shape):
            found.append(instruction)
    return found


def _is_megascale(computation: Computation, instruction: Instruction) -> bool:
    """Returns whether a send or receive, or the end of one, is for other slices."""
    if instruction.opcode in ("send-done", "recv-done"):
        (instruction,) = computation.operands(instruction)
    return instruction.attributes.get("_xla_host_transfer_handler_name") == MEGASCALE


def _in_host_memory(shape: Shape) -> bool:
    if shape.memory_space == HOST_MEMORY:
        return True
    return any(_in_host_memory(element) for element in shape.elements)


def random_bytes(module: Module) -> int:
    """Returns the size of all random numbers that a module draws, before optimization.

    SPMD divides none of these draws: each device makes the numbers of all.
    """
    total = 0
    for _, instruction, _ in _walk(module, HOLDERS):
        if instruction.opcode in ("rng-bit-generator", "rng"):
            total += instruction.bytes
    return total


def with_result(module: Module, shape: str, devices: int = 1) -> list[Instruction]:
    """Returns the entry computation's instructions whose result may have this shape
    ("bf16[128,1024]").

    The result has it whole or, with one dimension divided, on each of `devices`. This finds, in the
    module before compilation, what the compiler names only by its shape. Parameters, constants and
    instructions that only rename or reshape are left out.
    """
    match = re.match(r"(?:\d+×)?(\w+)\[([\d,]*)\]", shape)
    if not match:
        return []
    element_type = match[1]
    wanted = tuple(int(size) for size in match[2].split(",") if size)
    skipped = VIEWS | {"parameter", "constant", "broadcast", "iota", "reshape", "custom-call"}

    found = []
    for instruction in module.entry.instructions:
        result = instruction.shape
        if instruction.opcode in skipped or result.element_type != element_type:
            continue
        if len(result.dimensions) != len(wanted):
            continue

        ratios = []
        for whole, part in zip(result.dimensions, wanted, strict=True):
            if whole != part:
                ratios.append(whole / part)
        if ratios in ([], [devices]):
            found.append(instruction)
    return found


def donated(module: Module) -> set[int]:
    """Returns the numbers of the parameters whose memory is taken over: donors before compilation,
    aliases after."""
    aliased = {parameter for _, parameter in module.input_output_alias}
    return aliased | set(module.buffer_donors)
