"""HloModuleProto messages by hand, small ones, for the tests of tpu/compiler/hlo.py and tpu/compiler/libtpu.py.

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto.
"""

from errors import InputError
from tpu.compiler import libtpu

PRED, S32, U32, F32, TUPLE, BF16 = 1, 4, 8, 11, 13, 16


def installed() -> bool:
    """Whether libtpu is there."""
    try:
        libtpu.find()
    except InputError:
        return False
    return True


def varint(number: int) -> bytes:
    number %= 2**64
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *content: bytes) -> bytes:
    joined = b"".join(content)
    return varint(field << 3 | 2) + varint(len(joined)) + joined


def packed(field: int, values) -> bytes:
    return message(field, *(varint(value) for value in values)) if values else b""


def array(kind: int, *dimensions: int, memory_space: int = 0) -> bytes:
    """ShapeProto, the last dimension minor."""
    layout = packed(1, list(reversed(range(len(dimensions))))) + (number(8, memory_space) if memory_space else b"")
    return number(2, kind) + packed(3, dimensions) + message(5, layout)


def tuple_of(*shapes: bytes) -> bytes:
    return number(2, TUPLE) + b"".join(message(4, shape) for shape in shapes)


def instruction(identifier: int, opcode: str, shape: bytes, operands=(), extra=b"", called=(), named=True) -> bytes:
    """HloInstructionProto, called "<opcode>.<identifier>", of line <identifier> of model.py."""
    metadata = message(7, message(2, f"step/{opcode}".encode()), message(3, b"model.py"), number(4, identifier))
    return b"".join(
        (
            message(1, f"{opcode}.{identifier}".encode()),
            message(2, opcode.encode()),
            message(3, shape),
            metadata if named else b"",
            number(35, identifier),
            packed(36, operands),
            packed(38, called),
            extra,
        )
    )


def parameter(identifier: int, index: int, shape: bytes, extra: bytes = b"") -> bytes:
    # As protobuf does: a zero is not written.
    return instruction(identifier, "parameter", shape, extra=(number(9, index) if index else b"") + extra)


def backend_config(text: str) -> bytes:
    return message(43, text.encode())


def cycles(count: int) -> bytes:
    return backend_config(f'{{"window_config":{{"estimated_cycles":"{count}"}}}}')


def computation(identifier: int, instructions: list[bytes], root: int, program_shape: bytes = b"") -> bytes:
    return b"".join(
        (
            message(1, f"computation.{identifier}".encode()),
            *(message(2, each) for each in instructions),
            message(4, program_shape),
            number(5, identifier),
            number(6, root),
        )
    )


def module(computations: list[bytes], entry: int = 1, extra: bytes = b"", program_shape: bytes = b"") -> bytes:
    """HloModuleProto; the computation whose identifier is `entry` is its entry."""
    return b"".join(
        (
            message(1, b"test"),
            message(2, f"computation.{entry}".encode()),
            *(message(3, each) for each in computations),
            message(4, program_shape),
            number(6, entry),
            extra,
        )
    )


def program(instructions: list[bytes], parameters: list[bytes], result: bytes) -> bytes:
    """A module of one computation that a compiler takes: with the shapes of its parameters and of its result."""
    names = b"".join(message(3, f"p{index}".encode()) for index in range(len(parameters)))
    shape = b"".join(message(1, each) for each in parameters) + message(2, result) + names
    return module([computation(1, instructions, len(instructions), shape)], program_shape=shape)


def contracting(left: int, right: int) -> bytes:
    """DotDimensionNumbers of a matmul."""
    return message(30, packed(1, [left]), packed(2, [right]))


def matmul(rows: int, inner: int, columns: int, kind: int = BF16, result: int | None = None) -> bytes:
    left, right = array(kind, rows, inner), array(kind, inner, columns)
    product = array(result or kind, rows, columns)
    instructions = [parameter(1, 0, left), parameter(2, 1, right)]
    instructions.append(instruction(3, "dot", product, (1, 2), contracting(1, 0)))
    return program(instructions, [left, right], product)


def train_step(batch: int = 256, inputs: int = 256, outputs: int = 256) -> bytes:
    """Parameters x [batch, inputs] bf16, w [inputs, outputs] f32; results w - x^T (x w), and x w."""
    x, w = array(BF16, batch, inputs), array(F32, inputs, outputs)
    low, y = array(BF16, inputs, outputs), array(BF16, batch, outputs)
    result = tuple_of(w, y)
    instructions = [
        parameter(1, 0, x),
        parameter(2, 1, w),
        instruction(3, "convert", low, (2,)),
        instruction(4, "dot", y, (1, 3), contracting(1, 0)),
        instruction(5, "dot", low, (1, 4), contracting(0, 0)),
        instruction(6, "convert", w, (5,)),
        instruction(7, "subtract", w, (2, 6)),
        instruction(8, "tuple", result, (7, 4)),
    ]
    return program(instructions, [x, w], result)
