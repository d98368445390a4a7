"""Reads and edits an HloModuleProto, as torch_xla makes it or as the compiler leaves it; without
torch.

    from tpu.compiler import analysis, hlo
    module = hlo.parse(program.optimized)   # Module; ValueError if the bytes are not a whole one
    analysis.entry_cycles(module).total     # the compiler's own estimate of a step, in cycles

Reading
    parse(data) -> Module              .name .computations .entry .parameters .input_output_alias
                                       .buffer_donors .num_partitions
Writing (take and return bytes of an HloModuleProto)
    with_buffer_donors(data, parameters), with_parameter_shardings(data, {number: sharding})
    fingerprint(data) -> str           of the program alone, whatever lines of Python it comes from
    op_sharding(spec, mesh_shape)      OpSharding: op_sharding(("data", None), {"data": 8})
    describe_sharding(sharding)        "replicated", "devices=[8,1]<=[8]"

The messages are in hlo_pb2.py, generated from hlo.proto. Questions about a module are answered in
analysis.py. Sizes are those of the logical shape, without the padding of its layout. In a module
before SPMD partitioning, a shape covers all devices together; in an optimized module, one device.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from tpu.compiler import hlo_pb2
from tpu.compiler.hlo_pb2 import (
    HloComputationProto,
    HloInstructionProto,
    HloModuleProto,
    OpSharding,
    ShapeProto,
)

HOST_MEMORY = 5  # memory space of a layout


def _bits(name: str) -> int:
    """Returns the size of an element by the name of its type: "BF16" has 16 bits, a token none."""
    if name == "PRED":
        return 8
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0


@dataclass(frozen=True)
class ElementType:
    """A type of elements: its name in HLO text, and the bits of an element."""

    name: str
    bits: int


def _element_types() -> dict[int, ElementType]:
    """Returns the types by their number in a ShapeProto."""
    types = {}
    for name, number in hlo_pb2.PrimitiveType.items():
        types[number] = ElementType(name.lower(), _bits(name))
    return types


ELEMENT_TYPES = _element_types()
PRECISIONS = {number: name.lower() for name, number in hlo_pb2.PrecisionConfig.Precision.items()}
SHARDINGS = {number: name.lower() for name, number in OpSharding.Type.items()}
GAVE_UP = 2**50  # the cost model writes 2**63 - 1 where it has no estimate


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes.

    Attributes:
        bytes: the size of the logical shape; a tuple's is the sum of its elements'.
        memory_space: 0 is HBM, HOST_MEMORY the host's; the others are on the chip.
    """

    element_type: str
    dimensions: tuple[int, ...]
    elements: tuple[Shape, ...]
    bytes: int
    memory_space: int

    @property
    def text(self) -> str:
        """The notation of HLO text: "bf16[128,1024]", "(f32[2], s32[])"."""
        if self.element_type == "tuple":
            return "(" + ", ".join(element.text for element in self.elements) + ")"
        sizes = ",".join(str(size) for size in self.dimensions)
        return f"{self.element_type}[{sizes}]"

    def __str__(self) -> str:
        return self.text

    @property
    def hbm_bytes(self) -> int:
        """The part of `bytes` that lies in HBM."""
        if self.element_type == "tuple":
            return sum(element.hbm_bytes for element in self.elements)
        return 0 if self.memory_space else self.bytes

    @property
    def on_chip_bytes(self) -> int:
        """The part of `bytes` that lies in on-chip memory."""
        if self.element_type == "tuple":
            return sum(element.on_chip_bytes for element in self.elements)
        return 0 if self.memory_space in (0, HOST_MEMORY) else self.bytes


@dataclass(slots=True)
class Instruction:
    """An instruction: what is asked of it often, and its message `proto` for the rest.

    Attributes:
        operands: ids of instructions of the same computation.
        called: ids of computations.
        op_name, source: the operation and "file:line" that it comes from, or "". A fusion that has
            none of its own has those of its root.
        sharding: of a parameter; None where the module does not say.
        estimated_cycles: None where the compiler has no estimate.
        trip_count: of a while loop, where the compiler knows it.
    """

    proto: HloInstructionProto
    name: str
    id: int
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    op_name: str
    source: str
    sharding: OpSharding | None
    estimated_cycles: int | None
    trip_count: int | None

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return self.shape.bytes

    @property
    def hbm_bytes(self) -> int:
        """Size of the part of the result that lies in HBM, not in on-chip or host memory."""
        return self.shape.hbm_bytes

    @property
    def parameter_number(self) -> int:
        """Number of a parameter of its computation; 0 for other instructions."""
        return self.proto.parameter_number

    @property
    def custom_call_target(self) -> str:
        """Name of the function that a custom call calls; "" for other instructions."""
        return self.proto.custom_call_target

    @property
    def attributes(self) -> Mapping[str, str]:
        """What libtpu's runtime is told of an instruction, by name."""
        return self.proto.frontend_attributes.map

    @property
    def precision(self) -> tuple[str, ...]:
        """Precision of the operands of a dot or convolution: "default", "high" (three bf16 passes),
        "highest" (six)."""
        numbers = self.proto.precision_config.operand_precision
        return tuple(PRECISIONS.get(number, str(number)) for number in numbers)


@dataclass(slots=True)
class Computation:
    """A function of the module: its instructions by id."""

    name: str
    id: int
    root_id: int
    by_id: dict[int, Instruction]

    @property
    def instructions(self) -> Collection[Instruction]:
        """The instructions in a valid order; a compiled entry computation may run them in another
        one."""
        return self.by_id.values()

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return self.by_id[self.root_id]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction of this computation takes."""
        return [self.by_id[operand] for operand in instruction.operands]


@dataclass(slots=True)
class Module:
    """A program.

    Attributes:
        input_output_alias: (index of the output, number of the parameter whose memory it takes
            over).
        buffer_donors: numbers of the parameters whose memory any output may take over. A compiled
            module has none.
        num_partitions: devices that it was compiled for; None before compilation.
    """

    name: str
    computations: dict[int, Computation]
    entry: Computation
    input_output_alias: list[tuple[int, int]]
    buffer_donors: list[int]
    num_partitions: int | None

    @property
    def parameters(self) -> list[Instruction]:
        """The entry computation's parameters by number."""
        found = [each for each in self.entry.instructions if each.opcode == "parameter"]
        return sorted(found, key=lambda each: each.parameter_number)


# ---- reading -------------------------------------------------------------------------------------


def parse(data: bytes) -> Module:
    """Reads a serialized HloModuleProto. Raises ValueError if `data` is cut off or something
    else."""
    _, module = _parse(data)
    return module


def _parse(data: bytes) -> tuple[HloModuleProto, Module]:
    """Returns the message and what was read from it; the module's instructions share the
    message's."""
    try:
        proto = HloModuleProto.FromString(data)
        return proto, _read_module(proto)
    except (DecodeError, KeyError, ValueError) as error:
        raise ValueError(
            f"these {len(data)} bytes are not a whole HloModuleProto ({error}): "
            "the file is cut off, or of another kind"
        ) from error


def _read_module(proto: HloModuleProto) -> Module:
    """Raises KeyError or ValueError where something is missing."""
    computations = {each.id: _read_computation(each) for each in proto.computations}
    if proto.entry_computation_id not in computations:
        raise ValueError("it has no entry computation")

    # Only whole parameters and outputs one level deep are aliased by torch_xla and libtpu.
    aliases = []
    for alias in proto.input_output_alias.entries:
        output = alias.output_shape_index[0] if alias.output_shape_index else 0
        aliases.append((output, alias.parameter_number))

    num_partitions = None
    if proto.HasField("device_assignment"):
        num_partitions = proto.device_assignment.computation_count or 1

    module = Module(
        name=proto.name,
        computations=computations,
        entry=computations[proto.entry_computation_id],
        input_output_alias=aliases,
        buffer_donors=[donor.parameter_number for donor in proto.buffer_donor.entries],
        num_partitions=num_partitions,
    )
    _name_fusions(module)

    # libtpu 0.0.51 keeps the shardings of parameters only here.
    shardings = proto.spmd_parameters_shardings
    if len(shardings) == len(module.parameters):
        for parameter, sharding in zip(module.parameters, shardings, strict=True):
            parameter.sharding = parameter.sharding or sharding
    return module


def _read_computation(proto: HloComputationProto) -> Computation:
    return Computation(
        name=proto.name,
        id=proto.id,
        root_id=proto.root_id,
        by_id={each.id: _read_instruction(each) for each in proto.instructions},
    )


def _read_instruction(proto: HloInstructionProto) -> Instruction:
    if not proto.opcode or not proto.HasField("shape"):
        raise ValueError(f"instruction {proto.name!r} has no shape or no opcode")

    metadata = proto.metadata
    source = ""
    if metadata.source_file:
        source = f"{metadata.source_file}:{metadata.source_line}"
    cycles, trip_count = _read_backend_config(proto.backend_config)
    return Instruction(
        proto=proto,
        name=proto.name,
        id=proto.id,
        opcode=proto.opcode,
        shape=_read_shape(proto.shape),
        operands=tuple(proto.operand_ids),
        called=tuple(proto.called_computation_ids),
        op_name=metadata.op_name,
        source=source,
        sharding=proto.sharding if proto.HasField("sharding") else None,
        estimated_cycles=cycles,
        trip_count=trip_count,
    )


def _read_shape(proto: ShapeProto) -> Shape:
    element_type = ELEMENT_TYPES.get(proto.element_type)
    if element_type is None:
        element_type = ElementType(f"type{proto.element_type}", bits=0)
    if element_type.name == "tuple":
        elements = tuple(_read_shape(shape) for shape in proto.tuple_shapes)
        return Shape(
            element_type="tuple",
            dimensions=(),
            elements=elements,
            bytes=sum(element.bytes for element in elements),
            memory_space=0,
        )

    dimensions = tuple(proto.dimensions)
    bits = math.prod(dimensions) * element_type.bits
    return Shape(
        element_type=element_type.name,
        dimensions=dimensions,
        elements=(),
        bytes=-(-bits // 8),  # rounded up
        memory_space=proto.layout.memory_space,
    )


def _read_backend_config(data: bytes) -> tuple[int | None, int | None]:
    """Returns (estimated cycles, trip count) of libtpu's JSON."""
    if not data:
        return None, None

    estimate = None
    cycles = re.search(rb'"estimated_cycles":\s*"?(\d+)', data)
    if cycles and int(cycles[1]) <= GAVE_UP:
        estimate = int(cycles[1])

    trip_count = None
    trips = re.search(rb'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', data)
    if trips:
        trip_count = int(trips[1])
    return estimate, trip_count


def _name_fusions(module: Module) -> None:
    """Gives fusions without an origin of their own that of their root."""
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "fusion" and instruction.called:
                root = module.computations[instruction.called[0]].root
                instruction.op_name = instruction.op_name or root.op_name
                instruction.source = instruction.source or root.source


# ---- writing -------------------------------------------------------------------------------------


def fingerprint(data: bytes) -> str:
    """Returns a hash of a module's program, which names, numbers and the lines that it comes from
    do not change.

    Two equal ones are the same program; a program that is built in another order may have another.
    torch_xla counts on from program to program in its names and numbers, so what is left is each
    operation's index in the list.
    """
    whole, _ = _parse(data)
    proto = _known_fields(whole)

    in_order = []
    for computation in proto.computations:
        in_order += computation.instructions
    computations = {each.id: index for index, each in enumerate(proto.computations)}
    instructions = {each.id: index for index, each in enumerate(in_order)}

    proto.entry_computation_id = computations[proto.entry_computation_id]
    for computation in proto.computations:
        computation.ClearField("name")
        computation.id = computations[computation.id]
        computation.root_id = instructions[computation.root_id]
        for instruction in computation.instructions:
            instruction.ClearField("name")
            instruction.ClearField("metadata")
            instruction.id = instructions[instruction.id]
            operands = [instructions[each] for each in instruction.operand_ids]
            instruction.operand_ids[:] = operands
            called = [computations[each] for each in instruction.called_computation_ids]
            instruction.called_computation_ids[:] = called

    written = proto.SerializeToString(deterministic=True)
    return hashlib.sha256(written).hexdigest()[:16]


def _known_fields(whole: HloModuleProto) -> HloModuleProto:
    """Returns a copy of a module with the fields alone that hlo.proto has, and without its names.

    Another field is the index of the files and lines of its operations.
    """
    proto = HloModuleProto()
    for field, value in whole.ListFields():
        if field.name in ("name", "entry_computation_name"):
            continue
        if isinstance(value, int):
            setattr(proto, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(proto, field.name).CopyFrom(value)
        else:
            getattr(proto, field.name).extend(value)
    return proto


def with_buffer_donors(data: bytes, parameters: list[int]) -> bytes:
    """Returns the module with these parameters, by number, as donors beside those that it already
    has."""
    proto, module = _parse(data)
    _check_parameters(module, parameters)
    for parameter in sorted(set(parameters) - set(module.buffer_donors)):
        proto.buffer_donor.entries.add(parameter_number=parameter)
    return proto.SerializeToString()


def with_parameter_shardings(data: bytes, shardings: dict[int, OpSharding]) -> bytes:
    """Returns the module with these shardings for the entry computation's parameters, by number.

    The other parameters keep theirs, and are replicated where they have none.
    """
    proto, module = _parse(data)
    _check_parameters(module, list(shardings))
    for parameter in module.parameters:
        sharding = shardings.get(parameter.parameter_number, parameter.sharding) or OpSharding()
        parameter.proto.sharding.CopyFrom(sharding)
    return proto.SerializeToString()


def _check_parameters(module: Module, numbers: list[int]) -> None:
    """Raises ValueError where the module has no parameter of one of these numbers."""
    known = {each.parameter_number for each in module.parameters}
    unknown = sorted(set(numbers) - known)
    if unknown:
        raise ValueError(
            f"module {module.name!r} has no parameters {unknown}: it has {len(module.parameters)}"
        )


def op_sharding(
    spec: tuple[str | tuple[str, ...] | None, ...],
    mesh_shape: dict[str, int],
) -> OpSharding:
    """Returns the sharding of a tensor.

    Args:
        spec: for each dimension of the tensor, the axis of the mesh that divides it, several, or
            None.
        mesh_shape: {axis: size}, devices row by row. Axes that divide nothing hold copies.
    Raises:
        ValueError: `spec` names an axis twice, or one that the mesh does not have.
    """
    by_dimension = []  # axes
    used = []
    for axes in spec:
        if not axes:
            axes = ()
        elif not isinstance(axes, tuple):
            axes = (axes,)
        by_dimension.append(axes)
        used += axes
    if len(set(used)) < len(used) or not set(used) <= set(mesh_shape):
        raise ValueError(
            f"spec {spec} must name each axis of the mesh {mesh_shape} at most once, and no other"
        )
    if all(mesh_shape[axis] == 1 for axis in used):
        return OpSharding(type=OpSharding.REPLICATED)

    mesh_axes = list(mesh_shape)
    copied = [axis for axis in mesh_axes if axis not in used]
    devices = np.arange(math.prod(mesh_shape.values())).reshape(list(mesh_shape.values()))
    order = devices.transpose([mesh_axes.index(axis) for axis in used + copied])

    tiles = [math.prod(mesh_shape[axis] for axis in axes) for axes in by_dimension]
    copies_per_tile = math.prod(mesh_shape[axis] for axis in copied)
    if copies_per_tile > 1:
        tiles.append(copies_per_tile)
    return OpSharding(
        type=OpSharding.OTHER,
        tile_assignment_dimensions=tiles,
        tile_assignment_devices=order.reshape(-1).tolist(),
        replicate_on_last_tile_dim=copies_per_tile > 1,
    )


def describe_sharding(sharding: OpSharding | None) -> str:
    """Returns the notation of HLO text: "replicated", "devices=[8,1]0,1,2,3,4,5,6,7", "maximal",
    "tuple"."""
    sharding = sharding or OpSharding()
    if sharding.type != OpSharding.OTHER:
        return SHARDINGS.get(sharding.type, f"type {sharding.type}")

    tiles = ",".join(str(size) for size in sharding.tile_assignment_dimensions)
    devices = ",".join(str(device) for device in sharding.tile_assignment_devices)
    if not devices:
        devices = f"<={list(sharding.iota_reshape_dims)}"
    last = ""
    if sharding.replicate_on_last_tile_dim:
        last = " last_tile_dim_replicate"
    return f"devices=[{tiles}]{devices}{last}"
