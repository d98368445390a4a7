"""HloModuleProto messages by hand, small ones, for the tests of tpu/compiler; and the mark of those that compile.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto, without tpu/compiler/hlo.proto: a
wrong number there fails here.
"""

import re

import pytest

from errors import InputError
from tpu.compiler import libtpu

KINDS = {"pred": 1, "s32": 4, "u32": 8, "f32": 11, "bf16": 16, "token": 17, "s4": 21, "type99": 99}


def installed() -> bool:
    """Returns whether both versions of libtpu are there."""
    try:
        return all(libtpu.installed(version) for version in libtpu.VERSIONS)
    except InputError:
        return False


def needs_libtpu(test):
    """Marks a test that compiles: `make guards` runs it, which installs libtpu."""
    return pytest.mark.slow(pytest.mark.skipif(not installed(), reason="libtpu is not installed: `make guards`")(test))


def varint(number: int) -> bytes:
    number %= 2**64
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *content: bytes) -> bytes:
    joined = b"".join(content)
    return varint(field << 3 | 2) + varint(len(joined)) + joined


def packed(field: int, values) -> bytes:
    return message(field, *map(varint, values)) if values else b""


def shape_proto(text: str) -> bytes:
    """ShapeProto of "f32[8,4]", "f32[8]@1" (memory space 1) or "(f32[2], (s32[]))"; the last dimension is minor."""
    if text.startswith("("):
        elements = re.findall(r"\([^()]*\)|\w+\[[\d,]*\](?:@\d)?", text[1:-1])
        return number(2, 13) + b"".join(message(4, shape_proto(element)) for element in elements)
    kind, sizes, space = re.fullmatch(r"(\w+)\[([\d,]*)\](?:@(\d))?", text).groups()
    dimensions = [int(size) for size in sizes.split(",") if size]
    layout = packed(1, list(reversed(range(len(dimensions))))) + (number(8, int(space)) if space else b"")
    return number(2, KINDS[kind]) + packed(3, dimensions) + message(5, layout)


def op(identifier: int, opcode: str, shape: str | bytes, operands=(), extra=b"", called=(), named=True) -> bytes:
    """HloInstructionProto "<opcode>.<identifier>", of line <identifier> of model.py; shape: text or ShapeProto."""
    names = message(1, f"{opcode}.{identifier}".encode()) + message(2, opcode.encode())
    metadata = message(7, message(2, f"step/{opcode}".encode()), message(3, b"model.py"), number(4, identifier))
    numbers = number(35, identifier) + packed(36, operands) + packed(38, called)
    shape = message(3, shape if isinstance(shape, bytes) else shape_proto(shape))
    return names + shape + (metadata if named else b"") + numbers + extra


def arg(identifier: int, index: int, shape: str, extra: bytes = b"") -> bytes:
    # As protobuf does: a zero is not written.
    return op(identifier, "parameter", shape, extra=(number(9, index) if index else b"") + extra)


def backend_config(text: str) -> bytes:
    return message(43, text.encode())


def cycles(count: int) -> bytes:
    return backend_config(f'{{"window_config":{{"estimated_cycles":"{count}"}}}}')


def computation(identifier: int, instructions: list[bytes], root: int, program_shape: bytes = b"") -> bytes:
    inside = b"".join(message(2, each) for each in instructions)
    name = message(1, f"computation.{identifier}".encode())
    return name + inside + message(4, program_shape) + number(5, identifier) + number(6, root)


def module(computations: list[bytes], entry: int = 1, extra: bytes = b"", program_shape: bytes = b"") -> bytes:
    """HloModuleProto; the computation whose identifier is `entry` is its entry."""
    names = message(1, b"test") + message(2, f"computation.{entry}".encode())
    inside = b"".join(message(3, each) for each in computations)
    return names + inside + message(4, program_shape) + number(6, entry) + extra


def program(instructions: list[bytes], parameters: list[str], result: str) -> bytes:
    """A module of one computation that a compiler takes: with the shapes of its parameters and of its result."""
    names = b"".join(message(3, f"p{index}".encode()) for index in range(len(parameters)))
    shapes = b"".join(message(1, shape_proto(each)) for each in parameters) + message(2, shape_proto(result))
    whole = shapes + names
    return module([computation(1, instructions, len(instructions), whole)], program_shape=whole)


def contracting(left: int, right: int) -> bytes:
    """DotDimensionNumbers of a matmul."""
    return message(30, packed(1, [left]), packed(2, [right]))


def matmul(rows: int, inner: int, columns: int, result: str = "bf16") -> bytes:
    left, right, product = f"bf16[{rows},{inner}]", f"bf16[{inner},{columns}]", f"{result}[{rows},{columns}]"
    dot = op(3, "dot", product, (1, 2), contracting(1, 0))
    return program([arg(1, 0, left), arg(2, 1, right), dot], [left, right], product)


def train_step(batch: int = 256, inputs: int = 256, outputs: int = 256) -> bytes:
    """Parameters x [batch, inputs] bf16, w [inputs, outputs] f32; results w - x^T (x w), and x w."""
    x, w, y = f"bf16[{batch},{inputs}]", f"f32[{inputs},{outputs}]", f"bf16[{batch},{outputs}]"
    low, result = f"bf16[{inputs},{outputs}]", f"({w}, {y})"
    instructions = [
        arg(1, 0, x),
        arg(2, 1, w),
        op(3, "convert", low, (2,)),
        op(4, "dot", y, (1, 3), contracting(1, 0)),
        op(5, "dot", low, (1, 4), contracting(0, 0)),
        op(6, "convert", w, (5,)),
        op(7, "subtract", w, (2, 6)),
        op(8, "tuple", result, (7, 4)),
    ]
    return program(instructions, [x, w], result)
