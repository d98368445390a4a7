"""tpu/compiler/hlo.py and analysis.py, on small modules that hlo_modules.py writes by hand."""

from dataclasses import dataclass

import hlo_modules as m
import pytest

from tpu.compiler import analysis, hlo

SCALAR = "f32[]"
X = "f32[8]"
ROWS = hlo.op_sharding(("data", None), {"data": 8})


def entry(
    *instructions: bytes, others: list[bytes] = (), extra: bytes = b"", root: int = 1
) -> hlo.Module:
    """Returns a module whose entry has these instructions, beside other computations."""
    computations = [*others, m.computation(1, list(instructions), root)]
    return hlo.parse(m.module(computations, extra=extra))


def names(instructions) -> list[str]:
    return [each.name for each in instructions]


# Reading


def test_instructions_of_a_module_are_read():
    found = hlo.parse(m.matmul(4, 8, 16))

    assert found.name == "test"
    assert found.entry.name == "computation.1"
    assert found.num_partitions is None
    opcodes = [each.opcode for each in found.entry.instructions]
    assert opcodes == ["parameter", "parameter", "dot"]
    dot = found.entry.root
    assert dot.name == "dot.3"
    assert dot.op_name == "step/dot"
    assert dot.source == "model.py:3"
    assert names(found.entry.operands(dot)) == ["parameter.1", "parameter.2"]
    shapes = [(each.parameter_number, each.shape.text) for each in found.parameters]
    assert shapes == [(0, "bf16[4,8]"), (1, "bf16[8,16]")]


def test_aliases_and_donors_of_a_module_are_read():
    output_3_is_parameter_1 = m.message(1, m.packed(1, [3]), m.number(2, 1))
    output_0_is_parameter_0 = m.message(1, m.number(2, 0))
    aliases = m.message(8, output_3_is_parameter_1, output_0_is_parameter_0)
    donors = m.message(18, m.message(1, m.number(1, 2)), m.message(1))

    found = hlo.parse(m.matmul(4, 8, 16) + aliases + donors)

    assert found.input_output_alias == [(3, 1), (0, 0)]
    assert found.buffer_donors == [2, 0]
    assert analysis.donated(found) == {0, 1, 2}


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]", 30),
        ("pred[7]", 7),
        ("f32[0,4]", 0),
        ("token[]", 0),
        ("type99[2]", 0),
        ("s4[3]", 2),  # two per byte
        ("(f32[2], (s32[]))", 12),
    ],
)
def test_bytes_of_a_shape(shape, size):
    found = entry(m.op(1, "custom-call", shape)).entry.root
    assert found.shape.text == shape
    assert str(found.shape) == shape
    assert found.bytes == size
    assert found.hbm_bytes == size


def test_bytes_of_a_shape_on_the_chip_are_not_in_hbm():
    found = entry(m.op(1, "custom-call", "(f32[2], f32[100]@1)")).entry.root
    assert found.shape.text == "(f32[2], f32[100])"
    assert str(found.shape) == "(f32[2], f32[100])"
    assert found.bytes == 408
    assert found.hbm_bytes == 8


def assert_not_a_module(content: bytes) -> None:
    message = f"these {len(content)} bytes are not a whole HloModuleProto"
    with pytest.raises(ValueError, match=message):
        hlo.parse(content)


def test_a_module_that_is_cut_off_is_refused():
    data = m.matmul(4, 8, 16)
    donated = hlo.with_buffer_donors(data, [0, 1])
    whole = data.rindex(m.number(6, 1))  # from here on there is only the entry computation's id

    for size in range(whole):
        assert_not_a_module(data[:size])
    for size in range(whole + 3, len(donated)):
        assert_not_a_module(donated[:size])


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 an archive",
        b'{"json": 1}',
        b"HloModule test, entry",
        bytes(1000),
        b"\xff" * 1000,
    ],
    ids=["archive", "json", "text", "zeros", "ones"],
)
def test_another_file_is_refused(content):
    assert_not_a_module(content)


@pytest.mark.parametrize(
    "instruction",
    [
        m.message(1, b"without opcode") + m.message(3, m.shape_proto("f32[]")),
        m.message(2, b"without-shape"),
    ],
    ids=["opcode", "shape"],
)
def test_an_instruction_that_lacks_a_field_is_refused(instruction):
    assert_not_a_module(m.module([m.computation(1, [instruction], 1)]))


# Cycles


def loop(identifier: int, body: int, condition: int, times: int = 0) -> bytes:
    """Returns a loop over instruction 1; 0: it is not known how often it runs."""
    config = "{}"
    if times:
        config = f'{{"known_trip_count":{{"n":"{times}"}}}}'
    called = (body, condition)
    return m.op(identifier, "while", SCALAR, (1,), m.backend_config(config), called=called)


def work(identifier: int, count: int) -> bytes:
    """Returns a fusion of so many cycles."""
    return m.op(identifier, "fusion", SCALAR, extra=m.cycles(count))


def test_cycles_are_summed_and_loops_multiplied():
    """Loops of unknown length count once.

    What has no estimate and the inside of a fusion do not count at all.
    """
    inner = m.computation(2, [work(21, 7)], 21)
    condition = m.computation(3, [work(31, 1)], 31)
    outer = m.computation(4, [m.arg(1, 0, SCALAR), work(41, 101), loop(42, 2, 3, 5)], 41)
    fused = m.computation(5, [work(51, 50)], 51)
    found = entry(
        m.arg(1, 0, SCALAR),
        work(2, 1000),
        loop(3, 4, 3, 10),
        loop(4, 2, 2),
        m.op(5, "fusion", SCALAR, extra=m.cycles(9), called=(5,)),
        work(6, 2**63 - 1),
        others=[inner, condition, outer, fused],
        root=6,
    )

    assert found.entry.root.estimated_cycles is None
    total = 1000 + 10 * (1 + 101 + 5 * (7 + 1)) + 2 * 7 + 9
    assert analysis.entry_cycles(found) == analysis.Cycles(total, ("while.4",))
    longest = []
    for each in analysis.longest(found, 3):
        longest.append((each.instruction.name, each.cycles, each.times))
    assert longest == [("fusion.41", 101, 10), ("fusion.2", 1000, 1), ("fusion.21", 7, 50)]


# Collectives

MESH = m.message(  # {"a": 2, "b": 4}
    1,
    m.message(1, m.message(1, b"a"), m.number(2, 2)),
    m.message(1, m.message(1, b"b"), m.number(2, 4)),
)
FIRST = m.packed(1, [0, 1, 2, 3])
SECOND = m.packed(1, [4, 5, 6, 7])
GROUPS = {  # two groups of four, as XLA writes them
    "one by one": m.message(49, FIRST) + m.message(49, SECOND),
    "list": m.message(87, m.message(1, FIRST), m.message(1, SECOND)),
    "iota in a list": m.message(87, m.message(2, m.number(1, 2), m.number(2, 4))),
    "iota": m.message(92, m.number(1, 2), m.number(2, 4)),
    "axis of a mesh": m.message(93, MESH, m.message(2, m.number(1, 1))),
    "part of an axis": m.message(
        93, MESH, m.message(2, m.message(2, m.number(1, 2), m.number(2, 4)))
    ),
}


def all_reduce(groups: bytes, partitions: int | None) -> hlo.Module:
    extra = b""
    if partitions is not None:
        extra = m.message(15, m.number(1, 1), m.number(2, partitions))
    reduce = m.op(2, "all-reduce", X, (1,), groups)
    return entry(m.arg(1, 0, X), reduce, extra=extra)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("partitions", [None, 16])
def test_the_size_of_a_group(groups, partitions):
    found = all_reduce(groups, partitions)
    assert found.num_partitions == partitions
    assert analysis.collectives(found)[0].group_size == 4


@pytest.mark.parametrize("partitions", [None, 16])
def test_without_groups_all_devices_are_one(partitions):
    found = all_reduce(b"", partitions)
    assert found.num_partitions == partitions
    assert analysis.collectives(found)[0].group_size == partitions


def test_a_collective_in_several_instructions_counts_once():
    """A combined all-reduce, a start and its end, and a wrapped collective."""
    shard = "f32[2]"
    waiting = f"(({X}), {X}, u32[])"
    found = entry(
        m.arg(1, 0, shard),
        m.op(2, "all-gather-start", f"({shard}, {X})", (1,)),
        m.op(3, "all-gather-done", X, (2,)),
        m.op(4, "all-reduce-start", shard, (1,)),
        m.op(5, "all-reduce-done", shard, (4,)),
        m.op(6, "async-start", waiting, (3,), called=(2,)),
        m.op(7, "async-update", waiting, (6,), called=(2,)),
        m.op(8, "async-done", X, (7,), called=(2,)),
        m.arg(9, 1, "bf16[3]"),
        m.op(10, "all-reduce", f"({X}, bf16[3])", (8, 9)),
        others=[m.computation(2, [m.arg(21, 0, X), m.op(22, "all-to-all", X, (21,))], 22)],
    )

    collectives = analysis.collectives(found)

    moved = [(one.kind, one.bytes, one.result_bytes, one.operands) for one in collectives]
    assert moved == [
        ("all-gather", 8, 32, 1),
        ("all-reduce", 8, 8, 1),
        ("all-reduce", 38, 38, 2),
        ("all-to-all", 32, 32, 1),
    ]
    assert collectives[2].op_name == "step/all-reduce"
    assert collectives[2].source == "model.py:10"


def test_a_collective_in_a_loop_runs_as_often_as_the_loop():
    from_0_to_1 = m.message(52, m.number(1, 0), m.number(2, 1))
    from_1_to_0 = m.message(52, m.number(1, 1), m.number(2, 0))
    permute = m.op(22, "collective-permute", X, (21,), from_0_to_1 + from_1_to_0)
    body = m.computation(2, [m.arg(21, 0, X), permute], 22)
    condition = m.computation(3, [work(31, 1)], 31)
    found = entry(m.arg(1, 0, X), loop(2, 2, 3, 6), others=[body, condition])

    (only,) = analysis.collectives(found)

    assert only.kind == "collective-permute"
    assert only.times == 6
    assert only.group_size == 2


def test_an_all_reduce_that_keeps_a_slice_is_a_reduce_scatter():
    """Where its fusion keeps the slice."""
    whole = "bf16[1024]"
    shard = "bf16[128]"
    inside = [
        m.arg(21, 0, whole),
        m.op(22, "all-reduce", whole, (21,), named=False),
        m.op(23, "partition-id", "u32[]"),
        m.op(24, "dynamic-slice", shard, (22, 23)),
    ]
    fusion = m.op(2, "fusion", shard, (1,), called=(2,), named=False)
    found = entry(m.arg(1, 0, whole), fusion, others=[m.computation(2, inside, 24)])

    (only,) = analysis.collectives(found)

    assert only.kind == "reduce-scatter"
    assert only.bytes == 2048
    assert only.result_bytes == 256
    # It has no name of its own, nor has the fusion, which has that of its root.
    assert only.op_name == "step/dynamic-slice"
    assert only.source == "model.py:24"


def test_a_collective_that_runs_during_other_fusions_is_one():
    shard = "f32[2]"
    state = "s32[]"
    part = m.backend_config('{"async_collective_fusion_config":{"flag_start":"2"}}')

    def piece(identifier: int, *more: bytes, root: int) -> bytes:
        first = identifier * 10
        gather = m.op(first + 1, "all-gather", X, (first,), part, named=False)
        return m.computation(identifier, [m.arg(first, 0, shard), gather, *more], root)

    started = f"({shard}, {X}, {state})"
    start = m.op(22, "custom-call", started, (21,), m.target("AsyncCollectiveStart"))
    end = m.op(42, "custom-call", X, (40, 41), m.target("AsyncCollectiveDone"))
    found = entry(
        m.arg(1, 0, shard),
        m.op(2, "fusion", started, (1,), called=(2,)),
        m.op(3, "get-tuple-element", shard, (2,)),
        m.op(4, "fusion", f"({SCALAR}, {X})", (3,), called=(3,)),
        m.op(5, "fusion", X, (3,), called=(4,)),
        m.op(6, "all-gather", X, (1,)),
        others=[piece(2, start, root=22), piece(3, root=31), piece(4, end, root=42)],
    )

    gathers = []
    for each in analysis.collectives(found):
        gathers.append((each.name, each.source, each.bytes, each.result_bytes))

    assert sorted(gathers) == [
        ("all-gather.21", "model.py:2", 8, 32),
        ("all-gather.6", "model.py:6", 8, 32),
    ]


# Products


def test_a_dot_has_types_precision_and_flops():
    (only,) = analysis.dots(hlo.parse(m.matmul(4, 8, 16, result="f32")))
    assert only.lhs == "bf16"
    assert only.rhs == "bf16"
    assert only.result == "f32"
    assert only.precision == ("default", "default")
    assert only.flops == 2 * 4 * 8 * 16


def test_flops_of_a_dot_that_contracts_the_first_dimension():
    """x^T y contracts the batch, which is the left operand's first dimension."""
    found = analysis.dots(hlo.parse(m.train_step(100, 3, 5)))
    assert [each.flops for each in found] == [2 * 100 * 3 * 5] * 2


def test_a_dot_with_a_batch_in_a_fusion_at_highest_precision():
    left = "f32[3,4,8]"
    right = "f32[3,8,5]"
    product = "f32[3,4,5]"
    details = m.dot_dimensions(2, 1, left_batch=[0], right_batch=[0])
    highest_and_high = m.message(51, m.packed(1, [2, 1]))
    inside = [
        m.arg(21, 0, left),
        m.arg(22, 1, right),
        m.op(23, "dot", product, (21, 22), details + highest_and_high),
    ]
    fusion = m.op(3, "fusion", product, (1, 2), called=(2,))
    fused = m.computation(2, inside, 23)
    found = entry(m.arg(1, 0, left), m.arg(2, 1, right), fusion, others=[fused])

    (only,) = analysis.dots(found)

    assert only.lhs == "f32"
    assert only.precision == ("highest", "high")
    assert only.flops == 2 * 3 * 4 * 8 * 5


def test_an_operand_widened_for_a_dot_has_the_type_it_had():
    found = entry(
        m.arg(1, 0, "bf16[4,8]"),
        m.op(2, "convert", "f32[4,8]", (1,)),
        m.op(3, "transpose", "f32[8,4]", (2,)),
        m.arg(4, 1, "bf16[4,8]"),
        m.op(5, "convert", "f32[4,8]", (4,)),
        m.op(6, "add", "f32[4,8]", (5, 5)),  # has numbers that bfloat16 has not
        m.op(7, "dot", "f32[4,4]", (6, 3), m.dot_dimensions(1, 0)),
    )
    (only,) = analysis.dots(found)
    assert only.lhs == "f32"
    assert only.rhs == "bf16"


@dataclass(frozen=True)
class Convolution:
    """Of one dimension: two rows of 4 channels to 8 channels."""

    size: int  # of the input
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    kernel_dilation: int = 1
    input_dilation: int = 1

    @property
    def dimensions(self) -> bytes:
        """ConvolutionDimensionNumbers of b0f_0io->b0f; the batch is dimension 0, which is not
        written."""
        features = m.number(3, 1), m.number(4, 2), m.number(8, 2), m.number(10, 2)
        spatial = m.packed(6, [0]), m.packed(11, [1]), m.packed(12, [1])
        return m.message(16, *features, *spatial)

    @property
    def window(self) -> bytes:
        fields = (
            m.number(1, self.kernel),
            m.number(2, self.stride),
            m.number(3, self.padding),
            m.number(5, self.kernel_dilation),
            m.number(6, self.input_dilation),
        )
        return m.message(15, m.message(1, *fields))

    def products(self) -> int:
        """Counts pairs of output and kernel element that meet an input element, one by one."""
        inputs = range(0, (self.size - 1) * self.input_dilation + 1, self.input_dilation)
        met = 0
        for output in range(self.outputs):
            first = output * self.stride - self.padding
            for element in range(self.kernel):
                if first + element * self.kernel_dilation in inputs:
                    met += 1
        return met


@pytest.mark.parametrize(
    "convolution",
    [
        Convolution(9, 9, 3, padding=1),
        Convolution(9, 5, 3, stride=2, padding=1),
        Convolution(9, 5, 3, kernel_dilation=2),
        Convolution(5, 11, 3, padding=2, input_dilation=2),
        Convolution(6, 4, 5, padding=-1),
    ],
    ids=["padding", "stride", "kernel dilation", "input dilation", "negative padding"],
)
def test_flops_of_a_convolution_are_without_padding(convolution):
    """And without dilation."""
    left = f"bf16[2,{convolution.size},4]"
    right = f"bf16[{convolution.kernel},4,8]"
    result = f"bf16[2,{convolution.outputs},8]"
    details = convolution.dimensions + convolution.window
    instruction = m.op(3, "convolution", result, (1, 2), details)
    found = entry(m.arg(1, 0, left), m.arg(2, 1, right), instruction)

    (only,) = analysis.dots(found)

    assert only.flops == 2 * 2 * 4 * 8 * convolution.products()


# Copies, buffers, calls


def test_copies_are_those_that_do_nothing_else():
    x = "f32[4,2]"

    def fused(identifier: int, *opcodes: str) -> bytes:
        last = identifier * 10
        inside = [m.arg(last, 0, x)]
        for opcode in opcodes:
            inside.append(m.op(last + 1, opcode, x, (last,)))
            last += 1
        return m.computation(identifier, inside, last)

    found = entry(
        m.arg(1, 0, x),
        m.op(2, "copy", x, (1,), m.cycles(11)),
        m.op(3, "fusion", x, (2,), m.cycles(20), called=(2,)),
        m.op(4, "fusion", x, (3,), m.cycles(40), called=(3,)),
        m.op(5, "fusion", x, (4,), called=(4,)),
        m.op(6, "copy-start", f"({x}, {x}, u32[])", (5,)),
        m.op(7, "copy-done", x, (6,)),
        others=[
            fused(2, "transpose", "bitcast"),
            fused(3, "copy", "exponential"),
            fused(4, "bitcast"),
        ],
    )

    copies = analysis.copies(found)

    assert names(copies.instructions) == ["copy.2", "fusion.3"]
    assert copies.bytes == 64
    assert copies.cycles == 31


def test_largest_buffers_are_named_once():
    """And bytes on the chip are counted apart."""
    big = "f32[100]"
    small = "f32[10]"
    chip = "f32[1000]@1"
    found = entry(
        m.arg(1, 0, small),
        m.op(2, "fusion", big, (1,)),
        m.op(3, "bitcast", big, (2,)),
        m.op(4, "tuple", f"({big}, {big})", (2, 3)),
        m.op(5, "copy-start", f"({chip}, {big}, u32[])", (2,)),
        m.op(6, "copy-done", chip, (5,)),
        m.op(7, "fusion", small, (6, 1)),
    )

    assert analysis.on_chip_bytes(found) == 2 * 4000  # written by the copy, read by the fusion
    largest = []
    for each in analysis.largest_buffers(found, 2):
        largest.append((each.name, each.hbm_bytes, each.source))
    assert largest == [("fusion.2", 400, "model.py:2"), ("parameter.1", 40, "model.py:1")]


def test_custom_calls_host_transfers_and_random_bytes():
    is_host_transfer = m.number(47, 1)
    found = entry(
        m.op(1, "infeed", SCALAR),
        m.op(2, "send", SCALAR, extra=is_host_transfer),
        m.op(3, "send", SCALAR),  # to another device
        m.op(4, "copy-start", "(f32[2]@5, f32[2], u32[])"),
        m.op(5, "fusion", "f32[2]@1", called=(2,)),  # on the chip
        m.op(6, "rng-bit-generator", "(u32[4], u32[8,16])"),
        m.op(7, "custom-call", SCALAR, extra=m.target("Sharding")),
        m.op(8, "custom-call", SCALAR, extra=m.target("TopK")),
        others=[m.computation(2, [m.op(21, "custom-call", SCALAR, extra=m.target("TopK"))], 21)],
    )

    assert analysis.custom_calls(found) == {"TopK": 2, "Sharding": 1}
    assert names(analysis.host_transfers(found)) == ["infeed.1", "send.2", "copy-start.4"]
    assert analysis.random_bytes(found) == 4 * 4 + 8 * 16 * 4


def between(kind: str, name: str, handler: str = "xla_megascale_runtime") -> bytes:
    """Returns the fields of a send or receive for other slices, as libtpu writes them."""
    attributes = m.frontend_attributes(
        _xla_host_transfer_handler_name=handler,
        _xla_host_transfer_rendezvous=name,
        _xla_megascale_transfer_type=kind,
        _xla_megascale_target="{1,2}x{0:7}",
    )
    return attributes + m.number(47, 1)  # is_host_transfer


def test_what_is_sent_to_other_slices_is_no_transfer_to_the_host():
    part = "(f32[8], u32[], token[])"
    in_loop = m.computation(
        2,
        [
            m.op(20, "parameter", "bf16[8]"),
            m.op(21, "send", part, (20,), extra=between("ALL_GATHER", "all-gather_0")),
        ],
        21,
    )
    found = entry(
        loop(1, body=2, condition=3, times=3),
        m.op(2, "parameter", "f32[8]"),
        m.op(3, "send", part, (2,), extra=between("ALL_REDUCE", "all-reduce_1")),
        m.op(4, "send-done", "token[]", (3,), extra=m.number(47, 1)),
        m.op(5, "recv", part, extra=between("ALL_REDUCE", "all-reduce_1")),
        m.op(6, "recv-done", part, (5,), extra=m.number(47, 1)),
        m.op(7, "send", part, (2,), extra=between("ALL_REDUCE", "other", handler="other")),
        others=[in_loop, m.computation(3, [m.op(30, "parameter", SCALAR)], 30)],
    )

    transfers = sorted(analysis.between_slices(found), key=lambda each: each.name)

    assert transfers == [
        analysis.Transfer("all-gather", bytes=16, times=3, name="all-gather_0"),
        analysis.Transfer("all-reduce", bytes=32, times=1, name="all-reduce_1"),
    ]
    assert names(analysis.host_transfers(found)) == ["send.7"]


@pytest.mark.parametrize(
    ("kind", "sent"),  # of 12 bytes a run, by a device to the three other slices
    [
        ("all-reduce", 18),
        ("reduce-scatter", 9),
        ("all-to-all", 9),
        ("all-gather", 36),
        ("one-to-one", 12),
    ],
)
def test_least_bytes_that_leave_a_slice(kind, sent):
    transfer = analysis.Transfer(kind, bytes=12, times=2, name="")
    assert transfer.least_sent(slices=4) == 2 * sent


@pytest.mark.parametrize(
    ("shape", "devices", "expected"),
    [
        ("bf16[256,32]", 1, ["dot.4"]),
        ("2×bf16[32,32]{1,0:T(8,128)}", 8, ["dot.4"]),
        ("bf16[128,16]", 2, []),  # two dimensions divided
        ("bf16[32,32]", 4, []),
        ("f32[64,32]", 1, ["convert.6", "subtract.7"]),  # not the parameter
        ("nonsense", 1, []),
    ],
)
def test_a_result_is_found_by_its_shape_whole_or_divided(shape, devices, expected):
    module = hlo.parse(m.train_step(batch=256, inputs=64, outputs=32))
    assert names(analysis.with_result(module, shape, devices)) == expected


# Writing


def shardings(module: hlo.Module) -> list:
    return [each.sharding for each in module.parameters]


def test_donors_are_written():
    once = hlo.with_buffer_donors(m.train_step(), [1])
    twice = hlo.with_buffer_donors(once, [0, 1])
    assert hlo.parse(once).buffer_donors == [1]
    assert sorted(hlo.parse(twice).buffer_donors) == [0, 1]


def test_shardings_are_written_and_the_rest_stays():
    data = m.train_step()
    written = hlo.with_parameter_shardings(data, {0: ROWS})

    before = hlo.parse(data)
    after = hlo.parse(written)
    assert shardings(before) == [None, None]
    assert shardings(after) == [ROWS, hlo.OpSharding()]  # the other is replicated
    assert list(before.entry.instructions)[2:] == list(after.entry.instructions)[2:]


def test_shardings_that_are_written_again_replace_the_first():
    """And the others keep theirs."""
    written = hlo.with_parameter_shardings(m.train_step(), {0: ROWS})
    assert hlo.with_parameter_shardings(written, {0: ROWS}) == written

    columns = hlo.op_sharding((None, "data"), {"data": 8})
    again = hlo.parse(hlo.with_parameter_shardings(written, {1: columns}))
    assert shardings(again) == [ROWS, columns]


def shard(data: bytes, numbers: list[int]) -> bytes:
    return hlo.with_parameter_shardings(data, dict.fromkeys(numbers, ROWS))


@pytest.mark.parametrize("write", [hlo.with_buffer_donors, shard])
def test_fields_that_are_not_read_survive_writing(write):
    kept = m.message(3000, b"kept")
    shape = m.shape_proto("f32[8]") + m.message(5, kept) + kept
    instructions = [
        m.arg(1, 0, shape, kept + m.message(7, kept)),
        m.op(2, "copy", shape, (1,), kept),
    ]
    data = m.module([m.computation(1, instructions, 2) + kept], extra=kept)

    assert write(data, [0]).count(kept) == 9
    assert data.count(kept) == 9
    assert hlo.parse(write(data, [])).entry.root == hlo.parse(data).entry.root


@pytest.mark.parametrize("write", [hlo.with_buffer_donors, shard])
def test_a_parameter_that_is_not_there_is_refused(write):
    with pytest.raises(ValueError, match=r"module 'test' has no parameters \[2\]: it has 2"):
        write(m.train_step(), [0, 2])


def test_only_the_entry_computation_is_sharded():
    other = m.computation(2, [m.arg(21, 0, X)], 21)
    data = m.module([other, m.computation(1, [m.arg(1, 0, X)], 1)])
    found = hlo.parse(hlo.with_parameter_shardings(data, {0: ROWS}))
    assert found.computations[2].root.sharding is None
    assert found.entry.root.sharding == ROWS


def test_shardings_that_only_the_module_keeps_are_read():
    of_parameters = m.message(14, ROWS.SerializeToString()) + m.message(14)
    found = hlo.parse(m.train_step() + of_parameters)
    assert shardings(found) == [ROWS, hlo.OpSharding()]


# Shardings

TWO_BY_TWO = {"data": 2, "model": 2}
COPIES = {"copies": 2, "data": 2, "model": 1}


@pytest.mark.parametrize(
    ("spec", "mesh", "expected"),
    [
        ((None, None), {"data": 4}, "replicated"),
        (("data",), {"data": 1}, "replicated"),
        (("data", None), {"data": 4}, "devices=[4,1]0,1,2,3"),
        ((None, "data", None), {"data": 2}, "devices=[1,2,1]0,1"),
        (("data", None), TWO_BY_TWO, "devices=[2,1,2]0,1,2,3 last_tile_dim_replicate"),
        ((None, "model"), TWO_BY_TWO, "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"),
        (("model", "data"), TWO_BY_TWO, "devices=[2,2]0,2,1,3"),
        (("data",), {"data": 2, "model": 1}, "devices=[2]0,1"),
        ((("copies", "data"), None), COPIES, "devices=[4,1]0,1,2,3"),
        ((None, "data"), COPIES, "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"),
    ],
)
def test_a_sharding_is_that_of_its_axes(spec, mesh, expected):
    assert hlo.describe_sharding(hlo.op_sharding(spec, mesh)) == expected


def test_a_sharding_over_more_devices_than_a_byte_counts():
    found = hlo.op_sharding(("data",), {"data": 300}).SerializeToString()
    is_other = m.number(1, 3)
    tile_assignment_dimensions = m.packed(3, [300])
    tile_assignment_devices = m.packed(4, range(300))
    assert found == is_other + tile_assignment_dimensions + tile_assignment_devices


@pytest.mark.parametrize("spec", [("rows", None), ("data", "data")])
def test_a_sharding_names_each_axis_of_the_mesh_once(spec):
    with pytest.raises(ValueError, match="must name each axis of the mesh"):
        hlo.op_sharding(spec, {"data": 4})


# Fingerprints


def copying(rows: int, file: bytes) -> bytes:
    """Returns a program whose copy comes from a file."""
    source = m.message(7, m.message(3, file))
    copy = m.op(2, "copy", f"f32[{rows}]", (1,), source, named=False)
    return m.program([m.arg(1, 0, X), copy], [X], X)


def test_a_fingerprint_is_of_the_program_alone():
    """Not of the lines that it comes from."""
    first = hlo.fingerprint(copying(8, b"a.py"))
    assert hlo.fingerprint(copying(8, b"b.py")) == first
    assert hlo.fingerprint(copying(9, b"a.py")) != first

    number_in_the_process = m.number(5, 77)
    index_of_files_and_lines = m.message(17, m.message(1, b"/a/folder/b.py"))
    other = copying(8, b"a.py") + number_in_the_process + index_of_files_and_lines
    assert hlo.fingerprint(other) == first
