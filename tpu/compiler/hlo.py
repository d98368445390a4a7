"""Reads and edits an HloModuleProto, as torch_xla makes it or as the compiler leaves it; without protobuf or torch.

    from tpu.compiler import hlo
    module = hlo.parse(program.optimized)             # Module; ValueError if the bytes are not a whole HloModuleProto
    hlo.entry_cycles(module).total                    # the compiler's own estimate of a step, cycles
    hlo.collectives(module)                           # [Collective(kind, bytes, group_size, times, op_name, ...)]

Reading
    parse(data) -> Module              .name .computations .entry .parameters .input_output_alias .buffer_donors
                                       .num_partitions
    entry_cycles(module) -> Cycles     .total, .unknown_loops (loops counted once, their trip count is not known)
    longest(module, count)             [Timed(instruction, cycles, times)]: the longest operations of a step
    collectives(module)                [Collective], wherever they are; asynchronous pairs once
    dots(module)                       [Dot]: every matmul and convolution, with the types of its operands
    copies(module) -> Copies           copies and transposes of the entry computation: .instructions .bytes .cycles
    largest_buffers(module, count)     [Instruction] of the entry computation with the largest results in HBM
    custom_calls(module)               {target: number of calls in the module}
    host_transfers(module)             [Instruction] that move data to or from the host
    with_result(module, shape, n)      [Instruction] whose result, divided among n devices, may have this shape
    donated(module)                    {numbers of the parameters whose memory the program may reuse}
Writing (all take and return bytes of an HloModuleProto)
    with_buffer_donors(data, parameters), with_parameter_shardings(data, {number: sharding})
    op_sharding(spec, mesh_shape)      bytes of an OpSharding: op_sharding(("data", None), {"data": 8})
    describe_sharding(sharding)        "replicated", "devices=[8,1]<=[8]"

The format is xla/service/hlo.proto and xla/xla_data.proto of github.com/openxla/xla; numbers of fields are named below.
Sizes are of the logical shape: what the layout pads is not counted. In a module before SPMD partitioning shapes are
those of all devices together; in an optimised one those of one device.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

# xla_data.proto, PrimitiveType: name and bits.
ELEMENT_TYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    14: ("opaque", 0),
    15: ("c64", 64),
    16: ("bf16", 16),
    17: ("token", 0),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
}
TUPLE = 13
HOST_MEMORY = 5  # memory space of a layout that is the host's memory; 0 is HBM, the others are on the chip

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Instructions that give another instruction's buffer another name.
VIEWS = frozenset({"tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "optimization-barrier"})
GAVE_UP = 2**50  # the cost model writes 2**63 - 1 where it has no estimate


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes. `bytes` is that of the logical shape, of a tuple the sum."""

    element_type: str
    dimensions: tuple[int, ...]
    elements: tuple[Shape, ...]
    bytes: int
    memory_space: int

    @property
    def text(self) -> str:
        if self.element_type == "tuple":
            return "(" + ", ".join(element.text for element in self.elements) + ")"
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"

    def __str__(self) -> str:
        return self.text

    @property
    def hbm_bytes(self) -> int:
        if self.element_type == "tuple":
            return sum(element.hbm_bytes for element in self.elements)
        return 0 if self.memory_space else self.bytes


@dataclass(slots=True)
class Instruction:
    """An instruction. Fields that its opcode does not have are empty or None.

    operands, called: ids of instructions of the same computation, and of computations. source: "file:line" or "".
    A fusion without a name or source of its own has those of its root. estimated_cycles: None where the compiler has
    none. trip_count: of a while loop, where the compiler knows it. group_size: devices of a group of a collective; None
    where the module does not say, which means all. precision: of the operands of a dot or convolution, "default",
    "high" (three passes in bf16) or "highest" (six). is_async_part: a collective that is one of several parts of an
    asynchronous one, see `collectives`.
    """

    name: str = ""
    id: int = 0
    opcode: str = ""
    shape: Shape | None = None
    operands: list[int] = field(default_factory=list)
    called: list[int] = field(default_factory=list)
    op_name: str = ""
    source: str = ""
    parameter_number: int | None = None
    tuple_index: int | None = None
    custom_call_target: str = ""
    sharding: bytes | None = None
    estimated_cycles: int | None = None
    trip_count: int | None = None
    is_host_transfer: bool = False
    channel_id: int = 0
    group_size: int | None = None
    is_async_part: bool = False
    precision: tuple[str, ...] = ()
    dimension_numbers: bytes = b""
    window: bytes = b""
    feature_group_count: int = 1
    batch_group_count: int = 1

    @property
    def bytes(self) -> int:
        return self.shape.bytes

    @property
    def hbm_bytes(self) -> int:
        """Of the result, what lies in HBM and not in on-chip or the host's memory."""
        return self.shape.hbm_bytes


@dataclass(slots=True)
class Computation:
    name: str
    id: int
    root_id: int
    by_id: dict[int, Instruction]

    @property
    def instructions(self) -> Collection[Instruction]:
        """In an order in which they can run; of a compiled entry computation not necessarily the one they do run in."""
        return self.by_id.values()

    @property
    def root(self) -> Instruction:
        return self.by_id[self.root_id]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results an instruction of this computation takes."""
        return [self.by_id[operand] for operand in instruction.operands]


@dataclass(slots=True)
class Module:
    """input_output_alias: (index of the output, number of the parameter that shares its memory). buffer_donors: numbers
    of the parameters whose memory any output may take. A compiled module has only the former. num_partitions: devices
    that it was compiled for; None before."""

    name: str
    computations: dict[int, Computation]
    entry: Computation
    input_output_alias: list[tuple[int, int]]
    buffer_donors: list[int]
    num_partitions: int | None

    @property
    def parameters(self) -> list[Instruction]:
        """The entry computation's parameters by number; a parameter's `sharding` is None where it has none."""
        found = [each for each in self.entry.instructions if each.opcode == "parameter"]
        return sorted(found, key=lambda each: each.parameter_number)


# ---- protocol buffers ------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes(encoded) + bytes([number])


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """(number of the field, value, where it begins, where it ends) of each field of a message, in order."""
    position, end = 0, len(data)
    while position < end:
        begin = position
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == 0:
            value, position = _read_varint(data, position)
        else:
            if kind == 2:
                size, position = _read_varint(data, position)
            elif kind == 1:
                size = 8
            elif kind == 5:
                size = 4
            else:
                raise ValueError(f"a field has the unknown wire type {kind}")
            if position + size > end:
                raise ValueError("a field is longer than the message it is in")
            value = data[position : position + size]
            position += size
        if tag < 8:
            raise ValueError("a field has the number 0")
        yield tag >> 3, value, begin, position


def _signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number


def _numbers(values: list[int | bytes]) -> list[int]:
    """A repeated integer field: one by one, packed, or both."""
    numbers = []
    for value in values:
        if isinstance(value, int):
            numbers.append(_signed(value))
        else:
            position = 0
            while position < len(value):
                number, position = _read_varint(value, position)
                numbers.append(_signed(number))
    return numbers


def _grouped(data: bytes) -> dict[int, list[int | bytes]]:
    """The values of a message by the number of the field."""
    found: dict[int, list[int | bytes]] = {}
    for number, value, _, _ in _fields(data):
        found.setdefault(number, []).append(value)
    return found


# ---- reading ---------------------------------------------------------------------------------------------------------


def parse(data: bytes) -> Module:
    """An HloModuleProto. Takes about a second for 8 MB. Raises ValueError if `data` is cut off or something else."""
    try:
        return _parse_module(data)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"these {len(data)} bytes are not a whole HloModuleProto ({error}): the file is cut off, or of another kind"
        ) from error


def _parse_module(data: bytes) -> Module:
    name, entry_id, aliases, donors, num_partitions = "", None, b"", b"", None
    computations, shardings = {}, []
    for number, value, _, _ in _fields(data):
        if number == 1:
            name = value.decode()
        elif number == 3:
            computation = _parse_computation(value)
            computations[computation.id] = computation
        elif number == 6:
            entry_id = value
        elif number == 8:
            aliases += value
        elif number == 14:
            shardings.append(value)
        elif number == 15:  # DeviceAssignmentProto
            num_partitions = _grouped(value).get(2, [1])[0]
        elif number == 18:
            donors += value
    if entry_id not in computations:
        raise ValueError("it has no entry computation")
    entry = computations[entry_id]
    module = Module(name, computations, entry, _parse_aliases(aliases), _parse_donors(donors), num_partitions)
    _name_fusions(module)
    # libtpu 0.0.51 keeps the shardings of parameters only here.
    if len(shardings) == len(module.parameters):
        for parameter, sharding in zip(module.parameters, shardings, strict=True):
            parameter.sharding = parameter.sharding or sharding
    return module


def _parse_aliases(data: bytes) -> list[tuple[int, int]]:
    """HloInputOutputAliasProto. Only whole parameters and outputs one level deep, as torch_xla and libtpu have them."""
    pairs = []
    for number, entry, _, _ in _fields(data):
        if number == 1:
            fields = _grouped(entry)
            output = _numbers(fields.get(1, []))
            pairs.append((output[0] if output else 0, fields.get(2, [0])[0]))
    return pairs


def _parse_donors(data: bytes) -> list[int]:
    """HloBufferDonorProto."""
    return [_grouped(entry).get(1, [0])[0] for number, entry, _, _ in _fields(data) if number == 1]


def _parse_computation(data: bytes) -> Computation:
    name, identifier, root, instructions = "", 0, 0, {}
    for number, value, _, _ in _fields(data):
        if number == 1:
            name = value.decode()
        elif number == 2:
            instruction = _parse_instruction(value)
            instructions[instruction.id] = instruction
        elif number == 5:
            identifier = value
        elif number == 6:
            root = value
    return Computation(name, identifier, root, instructions)


def _parse_instruction(data: bytes) -> Instruction:
    """HloInstructionProto."""
    found = Instruction()
    operands, called, groups = [], [], []
    for number, value, _, _ in _fields(data):
        if number == 1:
            found.name = value.decode()
        elif number == 2:
            found.opcode = value.decode()
        elif number == 3:
            found.shape = _parse_shape(value)
        elif number == 7:
            found.op_name, found.source = _parse_metadata(value)
        elif number == 9:
            found.parameter_number = value
        elif number == 13:
            found.tuple_index = value
        elif number == 15:
            found.window = value
        elif number in (16, 30):  # of a convolution, of a dot
            found.dimension_numbers = value
        elif number == 26:
            found.channel_id = _signed(value)
        elif number == 28:
            found.custom_call_target = value.decode(errors="replace")
        elif number == 35:
            found.id = value
        elif number == 36:
            operands.append(value)
        elif number == 38:
            called.append(value)
        elif number == 40:
            found.sharding = value
        elif number == 43:
            found.estimated_cycles, found.trip_count = _parse_backend_config(value)
            found.is_async_part = b'"async_collective_fusion_config"' in value
        elif number == 47:
            found.is_host_transfer = bool(value)
        elif number == 49:
            groups.append(value)
        elif number == 50:
            found.feature_group_count = value
        elif number == 51:
            found.precision = _parse_precision(value)
        elif number == 52:
            groups.append(value)
        elif number == 58:
            found.batch_group_count = value
        elif number in (87, 92, 93):
            found.group_size = _parse_group_size(number, value)
    found.operands, found.called = _numbers(operands), _numbers(called)
    if found.opcode == "parameter" and found.parameter_number is None:
        found.parameter_number = 0  # zeros are not written
    if groups and found.group_size is None:
        if found.opcode.startswith("collective-permute"):
            found.group_size = len({number for pair in groups for number in _pair(pair)})
        else:
            found.group_size = len(_numbers(_grouped(groups[0]).get(1, []))) or None
    if found.shape is None or not found.opcode:
        raise ValueError(f"instruction {found.name!r} has no shape or no opcode")
    return found


def _pair(data: bytes) -> tuple[int, int]:
    fields = _grouped(data)
    return fields.get(1, [0])[0], fields.get(2, [0])[0]


@functools.lru_cache(maxsize=10_000)
def _parse_shape(data: bytes) -> Shape:
    """ShapeProto."""
    fields = _grouped(data)
    kind = fields.get(2, [0])[0]
    if kind == TUPLE:
        elements = tuple(_parse_shape(element) for element in fields.get(4, []))
        return Shape("tuple", (), elements, sum(element.bytes for element in elements), 0)
    name, bits = ELEMENT_TYPES.get(kind, (f"type{kind}", 0))
    dimensions = tuple(_numbers(fields.get(3, [])))
    layout = _grouped(fields[5][0]) if 5 in fields else {}
    return Shape(name, dimensions, (), -(-math.prod(dimensions) * bits // 8), layout.get(8, [0])[0])


@functools.lru_cache(maxsize=10_000)
def _parse_metadata(data: bytes) -> tuple[str, str]:
    """OpMetadata: (op_name, "file:line")."""
    fields = _grouped(data)
    op_name = fields.get(2, [b""])[0].decode(errors="replace")
    file = fields.get(3, [b""])[0].decode(errors="replace")
    return op_name, f"{file}:{fields.get(4, [0])[0]}" if file else ""


def _parse_backend_config(data: bytes) -> tuple[int | None, int | None]:
    """(estimated cycles, trip count) of libtpu's JSON."""
    cycles = re.search(rb'"estimated_cycles":\s*"?(\d+)', data)
    trips = re.search(rb'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', data)
    estimate = int(cycles[1]) if cycles else None
    if estimate is not None and estimate > GAVE_UP:
        estimate = None
    return estimate, int(trips[1]) if trips else None


def _parse_precision(data: bytes) -> tuple[str, ...]:
    """PrecisionConfig: of each operand."""
    names = {0: "default", 1: "high", 2: "highest"}
    return tuple(names.get(value, str(value)) for value in _numbers(_grouped(data).get(1, [])))


def _parse_group_size(number: int, data: bytes) -> int | None:
    """Devices of a group: of a CollectiveDeviceListProto (87), an IotaReplicaGroupListProto (92) or, as libtpu 0.0.51
    writes it, a MeshAxesReplicaGroupListProto (93)."""
    fields = _grouped(data)
    if number == 93:
        sizes = [_grouped(axis).get(2, [1])[0] for axis in _grouped(fields[1][0]).get(1, [])]
        group = 1
        for axis in map(_grouped, fields.get(2, [])):
            part = _grouped(axis[2][0]).get(2) if 2 in axis else None  # a group may span a part of an axis
            group *= part[0] if part else sizes[axis.get(1, [0])[0]]
        return group
    if number == 92:
        return fields.get(2, [None])[0]
    if 1 in fields:  # the groups, one by one
        return len(_numbers(_grouped(fields[1][0]).get(1, []))) or None
    return _grouped(fields[2][0]).get(2, [None])[0] if 2 in fields else None  # an IotaReplicaGroupListProto


def _name_fusions(module: Module) -> None:
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode != "fusion" or not instruction.called:
                continue
            if instruction.op_name and instruction.source:
                continue
            root = module.computations[instruction.called[0]].root
            instruction.op_name = instruction.op_name or root.op_name
            instruction.source = instruction.source or root.source


# ---- walking ---------------------------------------------------------------------------------------------------------


def _steps(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    """(computation, instruction, times it runs in a step) of what the TensorCore runs one after the other: the entry
    computation and, from there, loops, branches and calls; not the insides of fusions. A loop whose trip count is not
    known counts once, and all branches of a conditional count."""
    pending = [(module.entry, 1)]
    while pending:
        computation, times = pending.pop()
        for instruction in computation.instructions:
            yield computation, instruction, times
            if instruction.opcode in ("while", "conditional", "call"):
                inner = times * (instruction.trip_count or 1) if instruction.opcode == "while" else times
                pending.extend((module.computations[called], inner) for called in instruction.called)


def _everything(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    """As _steps, and the insides of fusions and of asynchronous operations."""
    pending = [(module.entry, 1)]
    while pending:
        computation, times = pending.pop()
        for instruction in computation.instructions:
            yield computation, instruction, times
            # The update and the end of an asynchronous operation name the computation of its start again.
            if instruction.opcode in ("while", "conditional", "call", "fusion", "async-start"):
                inner = times * (instruction.trip_count or 1) if instruction.opcode == "while" else times
                pending.extend((module.computations[called], inner) for called in instruction.called)


# ---- what a step costs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycles:
    """total: the compiler's estimate of one step. unknown_loops: names of the loops that were counted once, because
    their trip count is not known; where there are any, the total is too low."""

    total: int
    unknown_loops: tuple[str, ...]


@dataclass(frozen=True)
class Timed:
    """cycles: of one run; times: runs in a step."""

    instruction: Instruction
    cycles: int
    times: int


def entry_cycles(module: Module) -> Cycles:
    """The compiler's own estimate, summed over what runs one after the other. Asynchronous copies, custom calls and
    collectives carry none, so they count as nothing. Means something only in a module compiled at full effort."""
    total, unknown = 0, []
    for _, instruction, times in _steps(module):
        total += (instruction.estimated_cycles or 0) * times
        if instruction.opcode == "while" and instruction.trip_count is None:
            unknown.append(instruction.name)
    return Cycles(total, tuple(unknown))


def longest(module: Module, count: int = 10) -> list[Timed]:
    """The operations with the most cycles a step, the longest first."""
    found = [
        Timed(instruction, instruction.estimated_cycles, times)
        for _, instruction, times in _steps(module)
        if instruction.estimated_cycles
    ]
    return sorted(found, key=lambda each: -each.cycles * each.times)[:count]


@dataclass(frozen=True)
class Collective:
    """kind: of COLLECTIVES. bytes: of the operands on one device, all of them where several were combined.

    result_bytes: of the results (an all-gather's are group_size times its operands'). operands: their number.
    group_size: devices of a group; None before compilation, where it means all. times: runs in a step.
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
    """Every collective, also in loops, fusions and asynchronous operations; a start and its end count once.

    Two forms are libtpu's own. A reduce-scatter is a fusion of an all-reduce and the slice of it that is kept: it
    counts as reduce-scatter. A collective that goes on during other fusions stands in each of them, between a fusion
    that calls "AsyncCollectiveStart" and one that calls "AsyncCollectiveDone": only the first is counted.
    """
    callers = {
        called: instruction
        for computation in module.computations.values()
        for instruction in computation.instructions
        for called in instruction.called
    }
    found = []
    for computation, instruction, times in _everything(module):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or (instruction.is_async_part and not _begins(computation, instruction)):
            continue
        operands = computation.operands(instruction)
        result = instruction.shape
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            result = result.elements[1]  # the first element is the operands
        root = computation.root
        if kind == "all-reduce" and root.opcode == "dynamic-slice" and root.operands[0] == instruction.id:
            kind, result = "reduce-scatter", root.shape
        caller = callers.get(computation.id, instruction)
        found.append(
            Collective(
                kind=kind,
                bytes=sum(operand.bytes for operand in operands),
                result_bytes=result.bytes,
                operands=len(operands),
                group_size=instruction.group_size or module.num_partitions,
                times=times,
                op_name=instruction.op_name or caller.op_name,
                source=instruction.source or caller.source,
                name=instruction.name,
            )
        )
    return found


def _begins(computation: Computation, part: Instruction) -> bool:
    """Whether this part of an asynchronous collective is its first."""
    return any(
        user.custom_call_target == "AsyncCollectiveStart" and part.id in user.operands
        for user in computation.instructions
    )


@dataclass(frozen=True)
class Dot:
    """A matmul or convolution. lhs, rhs, result: element types; an operand that was widened for it has the type it had
    before. flops: 2 a multiply-add, on one device in an optimised module; None where the shape of a convolution is too
    involved to count. times: runs in a step."""

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
    """Every matmul and convolution, also in fusions. The compiler makes convolutions of dots, and keeps the types of
    their operands and the precision.

    A TPU multiplies in bf16. At "default" precision f32 operands are rounded on the way into the matrix unit: no more
    cycles there (a matmul of 4096 on v5e: 1.11M with f32, 1.08M with bf16 operands), but twice the memory and traffic.
    "high" takes three passes (3.34M) and "highest" six (6.39M).
    """
    found = []
    for computation, instruction, times in _everything(module):
        if instruction.opcode not in ("dot", "convolution"):
            continue
        operands = computation.operands(instruction)[:2]
        left, right = (operand.shape for operand in operands)
        left_type, right_type = (_narrowest(computation, operand) for operand in operands)
        count = _dot_flops if instruction.opcode == "dot" else _convolution_flops
        found.append(
            Dot(
                opcode=instruction.opcode,
                lhs=left_type,
                rhs=right_type,
                result=instruction.shape.element_type,
                precision=instruction.precision or ("default", "default"),
                flops=count(instruction, left, right),
                times=times,
                op_name=instruction.op_name,
                source=instruction.source,
                name=instruction.name,
            )
        )
    return found


def _narrowest(computation: Computation, value: Instruction) -> str:
    """The element type of a value before it was widened, where nothing but that and moves was done to it."""
    found = value.shape.element_type
    while value.opcode in ("convert", "transpose", "reshape", "bitcast", "broadcast", "copy"):
        (value,) = computation.operands(value)
        if value.shape.element_type in ("bf16", "f16"):
            return value.shape.element_type
    return found


def _dot_flops(instruction: Instruction, left: Shape, right: Shape) -> int:
    """DotDimensionNumbers: lhs_contracting_dimensions is field 1."""
    contracting = _numbers(_grouped(instruction.dimension_numbers).get(1, []))
    return 2 * math.prod(instruction.shape.dimensions) * math.prod(left.dimensions[number] for number in contracting)


def _convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> int | None:
    """As XLA's HloCostAnalysis: only multiplications with elements of the input, not with padding or dilation.

    ConvolutionDimensionNumbers: 3 kernel_input_feature, 4 kernel_output_feature, 7 input_batch, 11 input_spatial,
    12 output_spatial. Window: 1 dimensions {1 size, 2 stride, 3 padding_low, 5 window_dilation, 6 base_dilation}.
    """
    numbers = {number: _numbers(values) for number, values in _grouped(instruction.dimension_numbers).items()}
    windows = _grouped(instruction.window).get(1, [])

    def dimension(shape: Shape, number: int) -> int:
        return shape.dimensions[numbers.get(number, [0])[0]]

    positions = 1
    spatial = zip(numbers.get(11, []), numbers.get(12, []), windows, strict=True)
    for input_dimension, output_dimension, window in spatial:
        counted = _valid_positions(
            left.dimensions[input_dimension], instruction.shape.dimensions[output_dimension], _grouped(window)
        )
        if counted is None:
            return None
        positions *= counted
    batch = dimension(left, 7) // instruction.batch_group_count
    return 2 * positions * batch * dimension(right, 3) * dimension(right, 4)


def _valid_positions(size: int, outputs: int, window: dict[int, list[int | bytes]]) -> int | None:
    """Pairs of an output and an element of the kernel, along one dimension, that meet an element of the input."""

    def value(number: int, default: int) -> int:
        return _signed(window.get(number, [default])[0])

    kernel, stride, padding = value(1, 1), value(2, 1), value(3, 0)
    kernel_dilation, input_dilation = value(5, 1), value(6, 1)
    if kernel * outputs > 10**8:
        return None
    starts = np.arange(outputs, dtype=np.int64)[:, None] * stride - padding
    places = starts + np.arange(kernel, dtype=np.int64)[None] * kernel_dilation
    inside = (places >= 0) & (places <= (size - 1) * input_dilation) & (places % input_dilation == 0)
    return int(inside.sum())


# ---- memory and data movement ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Instructions of a step that only move data within HBM; bytes are those of their results."""

    instructions: tuple[Instruction, ...]
    bytes: int
    cycles: int


MOVES = frozenset({"copy", "transpose", "parameter", "bitcast", "reshape", "tuple", "get-tuple-element", "fusion"})


def copies(module: Module) -> Copies:
    """Copies and transposes of the entry computation, also as fusions of nothing else. Asynchronous copies
    (copy-start), which mostly fetch into on-chip memory while something else runs, are not among them."""
    found = [each for each in module.entry.instructions if _moves_only(module, each)]
    return Copies(tuple(found), sum(each.bytes for each in found), sum(each.estimated_cycles or 0 for each in found))


def _moves_only(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in ("copy", "transpose"):
        return True
    if instruction.opcode != "fusion":
        return False
    inside = [each for called in instruction.called for each in module.computations[called].instructions]
    moves = [each for each in inside if each.opcode in ("copy", "transpose", "fusion")]
    rest_is_views = all(each.opcode in MOVES for each in inside)
    return rest_is_views and any(_moves_only(module, each) for each in moves)


def largest_buffers(module: Module, count: int = 10) -> list[Instruction]:
    """The entry computation's instructions with the largest results in HBM (`hbm_bytes`), the largest first.

    Parameters are among them. Not among them: instructions that only rename a buffer, and starts of asynchronous
    operations, whose result is that of their end.
    """
    found = [
        instruction
        for instruction in module.entry.instructions
        if instruction.opcode not in VIEWS and not instruction.opcode.endswith(("-start", "-update"))
    ]
    return sorted(found, key=lambda each: -each.hbm_bytes)[:count]


def custom_calls(module: Module) -> dict[str, int]:
    """Number of custom calls by target, the most frequent first, also in loops and fusions; runs are not multiplied."""
    found = Counter(each.custom_call_target for _, each, _ in _everything(module) if each.opcode == "custom-call")
    return dict(found.most_common())


def host_transfers(module: Module) -> list[Instruction]:
    """Infeed, outfeed, sends and receives to the host, and results that lie in the host's memory."""
    found = []
    for _, instruction, _ in _everything(module):
        feeds = instruction.opcode in ("infeed", "outfeed")
        if feeds or instruction.is_host_transfer or _in_host_memory(instruction.shape):
            found.append(instruction)
    return found


def random_bytes(module: Module) -> int:
    """Of all random numbers that are drawn, in a module before optimisation. SPMD divides none of these draws: each
    device makes the numbers of all."""
    drawn = [i for _, i, _ in _everything(module) if i.opcode in ("rng-bit-generator", "rng")]
    return sum(instruction.shape.bytes for instruction in drawn)


def _in_host_memory(shape: Shape) -> bool:
    return shape.memory_space == HOST_MEMORY or any(_in_host_memory(element) for element in shape.elements)


def with_result(module: Module, shape: str, devices: int = 1) -> list[Instruction]:
    """Instructions of the entry computation that give a result of this shape ("bf16[128,1024]"), whole or, one
    dimension divided, on each of `devices`. To find in the module before compilation what the compiler names only by
    its shape. Parameters, constants and instructions that only rename or reshape are left out."""
    match = re.match(r"(?:\d+×)?(\w+)\[([\d,]*)\]", shape)
    if not match:
        return []
    wanted = tuple(int(size) for size in match[2].split(",") if size)
    skipped = VIEWS | {"parameter", "constant", "broadcast", "iota", "reshape", "custom-call"}
    found = []
    for instruction in module.entry.instructions:
        result = instruction.shape
        if instruction.opcode in skipped or result.element_type != match[1] or len(result.dimensions) != len(wanted):
            continue
        ratios = [whole / part for whole, part in zip(result.dimensions, wanted, strict=True) if whole != part]
        if ratios in ([], [devices]):
            found.append(instruction)
    return found


def donated(module: Module) -> set[int]:
    """Numbers of the parameters whose memory the program takes over: donors before compilation, aliases after."""
    return set(module.buffer_donors) | {parameter for _, parameter in module.input_output_alias}


# ---- writing ---------------------------------------------------------------------------------------------------------


def with_buffer_donors(data: bytes, parameters: list[int]) -> bytes:
    """The module with these parameters, by number, as donors beside those it has already."""
    module = parse(data)
    _check_parameters(module, parameters)
    donors = sorted({*module.buffer_donors, *parameters})
    # HloModuleProto.buffer_donor {entries {parameter_number}}. The old one goes: a message that comes twice is merged.
    kept = b"".join(data[begin:end] for number, _, begin, end in _fields(data) if number != 18)
    entries = b"".join(_message(1, b"\x08" + _varint(parameter)) for parameter in donors)
    return kept + _message(18, entries) if entries else kept


def with_parameter_shardings(data: bytes, shardings: dict[int, bytes]) -> bytes:
    """The module with these shardings (of op_sharding) for the entry computation's parameters, by number. The others
    keep theirs, and are replicated where they have none."""
    module = parse(data)
    _check_parameters(module, list(shardings))
    written = bytearray()
    for number, value, begin, end in _fields(data):
        if number == 3 and _parse_computation_id(value) == module.entry.id:
            written += _message(3, _shard_parameters(value, shardings))
        else:
            written += data[begin:end]
    return bytes(written)


def _parse_computation_id(data: bytes) -> int:
    return next((value for number, value, _, _ in _fields(data) if number == 5), 0)


def _shard_parameters(computation: bytes, shardings: dict[int, bytes]) -> bytes:
    written = bytearray()
    for number, value, begin, end in _fields(computation):
        instruction = _parse_instruction(value) if number == 2 else None
        if instruction is None or instruction.opcode != "parameter":
            written += computation[begin:end]
            continue
        sharding = shardings.get(instruction.parameter_number, instruction.sharding) or REPLICATED
        kept = b"".join(value[start:stop] for field_number, _, start, stop in _fields(value) if field_number != 40)
        written += _message(2, kept + _message(40, sharding))
    return bytes(written)


def _check_parameters(module: Module, numbers: list[int]) -> None:
    unknown = sorted(set(numbers) - {each.parameter_number for each in module.parameters})
    if unknown:
        raise ValueError(f"module {module.name!r} has no parameters {unknown}: it has {len(module.parameters)}")


REPLICATED = b"\x08\x00"  # OpSharding {type: REPLICATED}


def op_sharding(spec: tuple[str | None, ...], mesh_shape: dict[str, int]) -> bytes:
    """OpSharding bytes. `spec` names for each dimension of the tensor the axis of the mesh that divides it, or None;
    `mesh_shape` is {axis: size}, devices row by row. Axes that divide nothing hold copies."""
    used = [axis for axis in spec if axis is not None]
    if len(set(used)) < len(used) or not set(used) <= set(mesh_shape):
        raise ValueError(f"spec {spec} must name each axis of the mesh {mesh_shape} at most once, and no other")
    if not used or all(mesh_shape[axis] == 1 for axis in used):
        return REPLICATED
    axes = list(mesh_shape)
    copied = [axis for axis in axes if axis not in used]
    devices = np.arange(math.prod(mesh_shape.values())).reshape(list(mesh_shape.values()))
    order = devices.transpose([axes.index(axis) for axis in used + copied]).reshape(-1)
    tiles = [1 if axis is None else mesh_shape[axis] for axis in spec]
    copies_per_tile = math.prod(mesh_shape[axis] for axis in copied)
    if copies_per_tile > 1:
        tiles.append(copies_per_tile)
    sharding = b"\x08\x03"  # type: OTHER
    sharding += _message(3, b"".join(map(_varint, tiles)))  # tile_assignment_dimensions
    sharding += _message(4, b"".join(_varint(int(device)) for device in order))  # tile_assignment_devices
    return sharding + (b"\x30\x01" if copies_per_tile > 1 else b"")  # replicate_on_last_tile_dim


def describe_sharding(sharding: bytes | None) -> str:
    """An OpSharding in the notation of HLO text: "replicated", "devices=[8,1]0,1,2,3,4,5,6,7", "maximal", "tuple"."""
    fields = _grouped(sharding or b"")
    kind = fields.get(1, [0])[0]
    if kind != 3:
        return {0: "replicated", 1: "maximal", 2: "tuple", 4: "manual"}.get(kind, f"type {kind}")
    tiles = ",".join(map(str, _numbers(fields.get(3, []))))
    devices = _numbers(fields.get(4, []))
    order = ",".join(map(str, devices)) if devices else f"<={_numbers(fields.get(9, []))}"
    last = " last_tile_dim_replicate" if fields.get(6, [0])[0] else ""
    return f"devices=[{tiles}]{order}{last}"
