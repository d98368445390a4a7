"""HloModuleProto messages by hand, small ones, for the tests of tpu/compiler; and the mark of those
that compile.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto, without
tpu/compiler/hlo.proto: a wrong number there fails here.
"""

import re
from collections.abc import Sequence

import pytest

from errors import InputError
from tpu.compiler import libtpu

KINDS = {  # PrimitiveType; the last one does not exist
    "pred": 1,
    "s32": 4,
    "u32": 8,
    "f32": 11,
    "bf16": 16,
    "token": 17,
    "s4": 21,
    "type99": 99,
}
TUPLE = 13


def installed() -> bool:
    """Returns whether both versions of libtpu are there."""
    try:
        return all(libtpu.installed(version) for version in libtpu.VERSIONS)
    except InputError:
        return False


def needs_libtpu(test):
    """Marks a test that compiles: `make guards` runs it, which installs libtpu."""
    skip = pytest.mark.skipif(not installed(), reason="libtpu is not installed: `make guards`")
    return pytest.mark.slow(skip(test))


# The wire format of protobuf


def varint(number: int) -> bytes:
    number %= 2**64
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + varint(number >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *content: bytes) -> bytes:
    joined = b"".join(content)
    return varint(field << 3 | 2) + varint(len(joined)) + joined


def packed(field: int, values: Sequence[int]) -> bytes:
    if not values:
        return b""
    return message(field, *map(varint, values))


# Shapes and instructions


def shape_proto(text: str) -> bytes:
    """Returns ShapeProto of "f32[8,4]", "f32[8]@1" (memory space 1) or "(f32[2], (s32[]))".

    The last dimension is minor.
    """
    if text.startswith("("):
        elements = re.findall(r"\([^()]*\)|\w+\[[\d,]*\](?:@\d)?", text[1:-1])
        return number(2, TUPLE) + b"".join(message(4, shape_proto(each)) for each in elements)

    kind, sizes, space = re.fullmatch(r"(\w+)\[([\d,]*)\](?:@(\d))?", text).groups()
    dimensions = [int(size) for size in sizes.split(",") if size]
    minor_to_major = list(reversed(range(len(dimensions))))
    layout = packed(1, minor_to_major)
    if space:
        layout += number(8, int(space))
    return number(2, KINDS[kind]) + packed(3, dimensions) + message(5, layout)


def op(
    identifier: int,
    opcode: str,
    shape: str | bytes,
    operands: Sequence[int] = (),
    extra: bytes = b"",
    called: Sequence[int] = (),
    named: bool = True,
) -> bytes:
    """Returns HloInstructionProto "<opcode>.<identifier>", of line <identifier> of model.py.

    Args:
        shape: text as `shape_proto` takes it, or a ShapeProto.
        operands: identifiers of instructions.
        extra: more fields.
        called: identifiers of computations.
        named: False leaves the name of its operation and the line out.
    """
    content = message(1, f"{opcode}.{identifier}".encode()) + message(2, opcode.encode())
    if isinstance(shape, str):
        shape = shape_proto(shape)
    content += message(3, shape)
    if named:
        op_name = message(2, f"step/{opcode}".encode())
        content += message(7, op_name, message(3, b"model.py"), number(4, identifier))
    content += number(35, identifier)
    content += packed(36, operands)
    content += packed(38, called)
    return content + extra


def arg(identifier: int, index: int, shape: str | bytes, extra: bytes = b"") -> bytes:
    """Returns the instruction of parameter `index`."""
    if index:  # as protobuf does: a zero is not written
        extra = number(9, index) + extra
    return op(identifier, "parameter", shape, extra=extra)


def backend_config(text: str) -> bytes:
    return message(43, text.encode())


def cycles(count: int) -> bytes:
    return backend_config(f'{{"window_config":{{"estimated_cycles":"{count}"}}}}')


def target(name: str) -> bytes:
    """Returns the field of what a custom call calls."""
    return message(28, name.encode())


def frontend_attributes(**values: str) -> bytes:
    """Returns the field of what libtpu's runtime is told of an instruction."""
    entries = [
        message(1, message(1, k.encode()), message(2, v.encode())) for k, v in values.items()
    ]
    return message(68, *entries)


def dot_dimensions(
    left: int, right: int, left_batch: Sequence[int] = (), right_batch: Sequence[int] = ()
) -> bytes:
    """Returns the field of the dimensions that a dot contracts and of those of its batch."""
    contracted = packed(1, [left]) + packed(2, [right])
    return message(30, contracted, packed(3, left_batch), packed(4, right_batch))


# Modules


def computation(
    identifier: int, instructions: list[bytes], root: int, program_shape: bytes = b""
) -> bytes:
    """Returns HloComputationProto; `root` is the identifier of the instruction that it returns."""
    name = message(1, f"computation.{identifier}".encode())
    inside = b"".join(message(2, each) for each in instructions)
    shape = message(4, program_shape)
    return name + inside + shape + number(5, identifier) + number(6, root)


def module(
    computations: list[bytes], entry: int = 1, extra: bytes = b"", program_shape: bytes = b""
) -> bytes:
    """Returns HloModuleProto; the computation whose identifier is `entry` is its entry."""
    names = message(1, b"test") + message(2, f"computation.{entry}".encode())
    inside = b"".join(message(3, each) for each in computations)
    return names + inside + message(4, program_shape) + number(6, entry) + extra


def program(instructions: list[bytes], parameters: list[str], result: str) -> bytes:
    """Returns a module of one computation that a compiler takes: with the shapes of its parameters
    and of its result."""
    shapes = b"".join(message(1, shape_proto(each)) for each in parameters)
    shapes += message(2, shape_proto(result))
    names = b"".join(message(3, f"p{index}".encode()) for index in range(len(parameters)))
    program_shape = shapes + names
    only = computation(1, instructions, len(instructions), program_shape)
    return module([only], program_shape=program_shape)


def matmul(rows: int, inner: int, columns: int, result: str = "bf16") -> bytes:
    """Returns a program that multiplies bf16[rows, inner] by bf16[inner, columns]."""
    left = f"bf16[{rows},{inner}]"
    right = f"bf16[{inner},{columns}]"
    product = f"{result}[{rows},{columns}]"
    instructions = [
        arg(1, 0, left),
        arg(2, 1, right),
        op(3, "dot", product, (1, 2), dot_dimensions(1, 0)),
    ]
    return program(instructions, [left, right], product)


def train_step(batch: int = 256, inputs: int = 256, outputs: int = 256) -> bytes:
    """Returns a program of a step of training.

    Its parameters are x [batch, inputs] bf16 and w [inputs, outputs] f32, its results
    w - x^T (x w) and x w.
    """
    x = f"bf16[{batch},{inputs}]"
    w = f"f32[{inputs},{outputs}]"
    y = f"bf16[{batch},{outputs}]"
    rounded_w = f"bf16[{inputs},{outputs}]"
    result = f"({w}, {y})"
    instructions = [
        arg(1, 0, x),
        arg(2, 1, w),
        op(3, "convert", rounded_w, (2,)),
        op(4, "dot", y, (1, 3), dot_dimensions(1, 0)),
        op(5, "dot", rounded_w, (1, 4), dot_dimensions(0, 0)),
        op(6, "convert", w, (5,)),
        op(7, "subtract", w, (2, 6)),
        op(8, "tuple", result, (7, 4)),
    ]
    return program(instructions, [x, w], result)
