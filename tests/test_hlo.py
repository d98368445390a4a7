import itertools

import numpy as np
import pytest
from hlo_modules import (
    BF16,
    F32,
    PRED,
    S32,
    U32,
    array,
    backend_config,
    computation,
    contracting,
    cycles,
    instruction,
    matmul,
    message,
    module,
    number,
    packed,
    parameter,
    train_step,
    tuple_of,
)

from tpu.compiler import analysis, hlo

SCALAR = array(F32)


def test_these_tests_write_what_protobuf_writes():
    # The examples of protobuf's own documentation: an integer, a string, a packed list.
    assert number(1, 150) == bytes.fromhex("089601")
    assert message(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert packed(6, [3, 270, 86942]) == bytes.fromhex("3206038e029ea705")


def entry(*instructions: bytes, others: list[bytes] = (), extra: bytes = b"", root: int = 1) -> hlo.Module:
    return hlo.parse(module([*others, computation(1, list(instructions), root)], extra=extra))


# ---- reading


def test_a_module_is_read():
    aliases = message(8, message(1, packed(1, [3]), number(2, 1)), message(1, number(2, 0)))
    donors = message(18, message(1, number(1, 2)), message(1))
    data = matmul(4, 8, 16) + aliases + donors
    found = hlo.parse(data)
    assert found.name == "test"
    assert found.entry.name == "computation.1"
    assert [each.opcode for each in found.entry.instructions] == ["parameter", "parameter", "dot"]
    dot = found.entry.root
    assert (dot.name, dot.op_name, dot.source) == ("dot.3", "step/dot", "model.py:3")
    assert [each.name for each in found.entry.operands(dot)] == ["parameter.1", "parameter.2"]
    assert [(each.parameter_number, each.shape.text) for each in found.parameters] == [
        (0, "bf16[4,8]"),
        (1, "bf16[8,16]"),
    ]
    assert found.input_output_alias == [(3, 1), (0, 0)]
    assert found.buffer_donors == [2, 0]
    assert analysis.donated(found) == {0, 1, 2}
    assert found.num_partitions is None


def test_the_number_of_devices_is_read():
    assert entry(parameter(1, 0, SCALAR), extra=message(15, number(1, 1), number(2, 8))).num_partitions == 8


@pytest.mark.parametrize(
    ("shape", "text", "size"),
    [
        (array(F32), "f32[]", 4),
        (array(BF16, 3, 5), "bf16[3,5]", 30),
        (array(PRED, 7), "pred[7]", 7),
        (array(F32, 0, 4), "f32[0,4]", 0),
        (array(21, 3), "s4[3]", 2),  # two elements a byte
        (tuple_of(array(F32, 2), tuple_of(array(S32))), "(f32[2], (s32[]))", 12),
        (number(2, 17), "token[]", 0),
    ],
)
def test_shapes(shape, text, size):
    found = entry(instruction(1, "custom-call", shape)).entry.root.shape
    assert (found.text, str(found), found.bytes) == (text, text, size)


def test_dimensions_may_be_written_one_by_one():
    shape = number(2, F32) + number(3, 300) + number(3, 2)
    assert entry(instruction(1, "copy", shape)).entry.root.shape.dimensions == (300, 2)


def test_bytes_outside_hbm_are_told_apart():
    shape = tuple_of(array(F32, 2), array(F32, 100, memory_space=1))
    found = entry(instruction(1, "fusion", shape)).entry.root
    assert (found.bytes, found.hbm_bytes) == (408, 8)


def test_a_fusion_without_a_name_has_that_of_its_root():
    fused = computation(2, [parameter(21, 0, SCALAR), instruction(22, "exponential", SCALAR, (21,))], root=22)
    found = entry(
        parameter(1, 0, SCALAR),
        instruction(2, "fusion", SCALAR, (1,), called=(2,), named=False),
        others=[fused],
        root=2,
    )
    assert (found.entry.root.op_name, found.entry.root.source) == ("step/exponential", "model.py:22")


def test_what_is_cut_off_is_refused():
    data = matmul(4, 8, 16)
    whole = data.rindex(number(6, 1))  # from here on there is only the entry computation's id
    for size in range(whole):
        with pytest.raises(ValueError, match=f"these {size} bytes are not a whole HloModuleProto"):
            hlo.parse(data[:size])
    donated = hlo.with_buffer_donors(data, [0, 1])
    for size in range(len(data) + 1, len(donated)):
        with pytest.raises(ValueError, match="not a whole HloModuleProto"):
            hlo.parse(donated[:size])


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04 an archive", b'{"json": 1}', b"HloModule test, entry", bytes(1000), b"\xff" * 1000]
)
def test_another_file_is_refused(data):
    with pytest.raises(ValueError, match="not a whole HloModuleProto"):
        hlo.parse(data)


def test_random_bytes_raise_nothing_else_than_a_value_error():
    rng = np.random.default_rng(0)
    data = bytearray(train_step())
    for _ in range(500):
        changed = data.copy()
        for place in rng.integers(0, len(data), 3):
            changed[place] = rng.integers(0, 256)
        try:
            hlo.parse(bytes(changed))
        except ValueError as error:
            assert "not a whole HloModuleProto" in str(error)


# ---- cycles


def loop(identifier: int, body: int, condition: int, config: str = "{}") -> bytes:
    return instruction(identifier, "while", SCALAR, (1,), backend_config(config), called=(body, condition))


def work(identifier: int, count: int) -> bytes:
    return instruction(identifier, "fusion", SCALAR, extra=cycles(count))


def test_cycles_are_summed_and_loops_multiplied():
    inner = computation(2, [work(21, 7)], 21)
    condition = computation(3, [work(31, 1)], 31)
    outer = computation(
        4, [parameter(1, 0, SCALAR), work(41, 101), loop(42, 2, 3, '{"known_trip_count":{"n":"5"}}')], 41
    )
    found = entry(
        parameter(1, 0, SCALAR),
        work(2, 1000),
        loop(3, 4, 3, '{"known_trip_count":{"n":"10"}}'),
        others=[inner, condition, outer],
    )
    assert analysis.entry_cycles(found) == analysis.Cycles(1000 + 10 * (1 + 101 + 5 * (7 + 1)), ())
    assert [(each.instruction.name, each.cycles, each.times) for each in analysis.longest(found, 3)] == [
        ("fusion.41", 101, 10),
        ("fusion.2", 1000, 1),
        ("fusion.21", 7, 50),
    ]


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    body, condition = computation(2, [work(21, 7)], 21), computation(3, [work(31, 1)], 31)
    found = entry(parameter(1, 0, SCALAR), loop(2, 2, 3), others=[body, condition])
    assert analysis.entry_cycles(found) == analysis.Cycles(8, ("while.2",))


def test_an_estimate_that_the_compiler_gave_up_is_none():
    found = entry(work(1, 2**63 - 1), work(2, 5))
    assert found.entry.root.estimated_cycles is None
    assert analysis.entry_cycles(found).total == 5


def test_the_inside_of_a_fusion_is_not_counted_again():
    fused = computation(2, [work(21, 50)], 21)
    found = entry(instruction(1, "fusion", SCALAR, extra=cycles(9), called=(2,)), others=[fused])
    assert analysis.entry_cycles(found).total == 9


# ---- collectives


GROUPS_OF_4 = {
    "one by one": message(49, packed(1, [0, 1, 2, 3])) + message(49, packed(1, [4, 5, 6, 7])),
    "list": message(87, message(1, packed(1, [0, 1, 2, 3])), message(1, packed(1, [4, 5, 6, 7]))),
    "iota in a list": message(87, message(2, number(1, 2), number(2, 4))),
    "iota": message(92, number(1, 2), number(2, 4)),
    "axis of a mesh": message(
        93, message(1, message(1, message(1, b"a"), number(2, 2)), message(1, message(1, b"b"), number(2, 4))),
        message(2, number(1, 1)),
    ),
    "part of an axis": message(
        93, message(1, message(1, message(1, b"a"), number(2, 8))), message(2, message(2, number(1, 2), number(2, 4)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("groups", GROUPS_OF_4.values(), ids=GROUPS_OF_4)
def test_the_size_of_a_group(groups):
    x = array(F32, 8)
    found = entry(parameter(1, 0, x), instruction(2, "all-reduce", x, (1,), groups))
    assert [each.group_size for each in analysis.collectives(found)] == [4]


def test_without_groups_all_devices_are_one():
    x = array(F32, 8)
    body = (parameter(1, 0, x), instruction(2, "all-reduce", x, (1,)))
    assert analysis.collectives(entry(*body))[0].group_size is None
    assert analysis.collectives(entry(*body, extra=message(15, number(1, 1), number(2, 16))))[0].group_size == 16


def test_a_combined_all_reduce_is_one():
    x, y = array(F32, 8), array(BF16, 3)
    found = entry(parameter(1, 0, x), parameter(2, 1, y), instruction(3, "all-reduce", tuple_of(x, y), (1, 2)))
    (only,) = analysis.collectives(found)
    assert (only.kind, only.bytes, only.result_bytes, only.operands) == ("all-reduce", 38, 38, 2)
    assert (only.op_name, only.source) == ("step/all-reduce", "model.py:3")


def test_a_start_and_its_end_are_one():
    shard, whole = array(F32, 2), array(F32, 8)
    found = entry(
        parameter(1, 0, shard),
        instruction(2, "all-gather-start", tuple_of(shard, whole), (1,)),
        instruction(3, "all-gather-done", whole, (2,)),
        instruction(4, "all-reduce-start", shard, (1,)),
        instruction(5, "all-reduce-done", shard, (4,)),
    )
    assert [(each.kind, each.bytes, each.result_bytes) for each in analysis.collectives(found)] == [
        ("all-gather", 8, 32),
        ("all-reduce", 8, 8),
    ]


def test_a_wrapped_asynchronous_collective_is_one():
    x = array(F32, 4)
    wrapped = computation(2, [parameter(21, 0, x), instruction(22, "all-to-all", x, (21,))], 22)
    found = entry(
        parameter(1, 0, x),
        instruction(2, "async-start", tuple_of(tuple_of(x), x, array(U32)), (1,), called=(2,)),
        instruction(3, "async-update", tuple_of(tuple_of(x), x, array(U32)), (2,), called=(2,)),
        instruction(4, "async-done", x, (3,), called=(2,)),
        others=[wrapped],
    )
    assert [(each.kind, each.bytes) for each in analysis.collectives(found)] == [("all-to-all", 16)]


def test_a_collective_in_a_loop_runs_as_often_as_the_loop():
    x = array(F32, 4)
    body = computation(2, [parameter(21, 0, x), instruction(22, "collective-permute", x, (21,),
        message(52, number(1, 0), number(2, 1)) + message(52, number(1, 1), number(2, 0)))], 22)  # fmt: skip
    condition = computation(3, [work(31, 1)], 31)
    found = entry(parameter(1, 0, x), loop(2, 2, 3, '{"known_trip_count":{"n":"6"}}'), others=[body, condition])
    assert [(each.kind, each.times, each.group_size) for each in analysis.collectives(found)] == [
        ("collective-permute", 6, 2)
    ]


def test_an_all_reduce_whose_fusion_keeps_a_slice_is_a_reduce_scatter():
    whole, shard = array(BF16, 1024), array(BF16, 128)
    fused = computation(2, [
        parameter(21, 0, whole),
        instruction(22, "all-reduce", whole, (21,), named=False),
        instruction(23, "partition-id", array(U32)),
        instruction(24, "dynamic-slice", shard, (22, 23)),
    ], 24)  # fmt: skip
    found = entry(parameter(1, 0, whole), instruction(2, "fusion", shard, (1,), called=(2,)), others=[fused])
    (only,) = analysis.collectives(found)
    assert (only.kind, only.bytes, only.result_bytes) == ("reduce-scatter", 2048, 256)
    assert (only.op_name, only.source) == ("step/fusion", "model.py:2")


def test_a_collective_that_goes_on_during_other_fusions_is_one():
    shard, whole, state = array(F32, 2), array(F32, 8), array(S32)
    part = backend_config('{"async_collective_fusion_config":{"flag_start":"2"}}')

    def piece(identifier: int, *more: bytes, root: int) -> bytes:
        first = identifier * 10
        gather = instruction(first + 1, "all-gather", whole, (first,), part + number(26, 4), named=False)
        return computation(identifier, [parameter(first, 0, shard), gather, *more], root)

    start = instruction(22, "custom-call", tuple_of(shard, whole, state), (21,), message(28, b"AsyncCollectiveStart"))
    end = instruction(42, "custom-call", whole, (40, 41), message(28, b"AsyncCollectiveDone"))
    found = entry(
        parameter(1, 0, shard),
        instruction(2, "fusion", tuple_of(shard, whole, state), (1,), called=(2,)),
        instruction(3, "get-tuple-element", shard, (2,)),
        instruction(4, "fusion", tuple_of(SCALAR, whole), (3,), called=(3,)),
        instruction(5, "fusion", whole, (3,), called=(4,)),
        instruction(6, "all-gather", whole, (1,), number(26, 5)),
        others=[piece(2, start, root=22), piece(3, root=31), piece(4, end, root=42)],
    )
    assert sorted((each.name, each.bytes, each.result_bytes) for each in analysis.collectives(found)) == [
        ("all-gather.21", 8, 32),
        ("all-gather.6", 8, 32),
    ]


# ---- dots


def test_dots_tell_types_precision_and_flops():
    found = hlo.parse(matmul(4, 8, 16, result=F32))
    (only,) = analysis.dots(found)
    assert (only.lhs, only.rhs, only.result) == ("bf16", "bf16", "f32")
    assert only.precision == ("default", "default")
    assert only.flops == 2 * 4 * 8 * 16


def test_a_dot_with_a_batch_in_a_fusion_at_highest_precision():
    left, right, product = array(F32, 3, 4, 8), array(F32, 3, 8, 5), array(F32, 3, 4, 5)
    numbers = message(30, packed(1, [2]), packed(2, [1]), packed(3, [0]), packed(4, [0]))
    precision = message(51, packed(1, [2, 1]))
    fused = computation(2, [
        parameter(21, 0, left), parameter(22, 1, right), instruction(23, "dot", product, (21, 22), numbers + precision),
    ], 23)  # fmt: skip
    found = entry(
        parameter(1, 0, left),
        parameter(2, 1, right),
        instruction(3, "fusion", product, (1, 2), called=(2,)),
        others=[fused],
    )
    (only,) = analysis.dots(found)
    assert (only.lhs, only.precision, only.flops) == ("f32", ("highest", "high"), 2 * 3 * 4 * 8 * 5)


@pytest.mark.parametrize(("given", "expected"), [(BF16, "bf16"), (F32, "f32")])
def test_an_operand_that_was_widened_for_a_dot_has_the_type_it_had(given, expected):
    numbers = message(30, packed(1, [1]), packed(2, [0]))
    found = entry(
        parameter(1, 0, array(given, 4, 8)),
        instruction(2, "convert", array(F32, 4, 8), (1,)),
        instruction(3, "transpose", array(F32, 8, 4), (2,)),
        parameter(4, 1, array(given, 4, 8)),
        instruction(5, "convert", array(F32, 4, 8), (4,)),
        instruction(6, "add", array(F32, 4, 8), (5, 5)),  # has numbers that bfloat16 has not
        instruction(7, "dot", array(F32, 4, 4), (6, 3), numbers),
    )
    assert (analysis.dots(found)[0].lhs, analysis.dots(found)[0].rhs) == ("f32", expected)


def multiplications(size, outputs, kernel, stride, padding, kernel_dilation, input_dilation) -> int:
    """Pairs of output and kernel element that meet an input element, counted one by one."""
    count = 0
    for output, element in itertools.product(range(outputs), range(kernel)):
        place = output * stride - padding + element * kernel_dilation
        count += place in range(0, (size - 1) * input_dilation + 1, input_dilation)
    return count


@pytest.mark.parametrize(
    "window",  # size, outputs, kernel, stride, padding, kernel dilation, input dilation
    [
        (9, 9, 3, 1, 1, 1, 1),
        (9, 5, 3, 2, 1, 1, 1),
        (9, 5, 3, 1, 0, 2, 1),
        (5, 11, 3, 1, 2, 1, 2),
        (6, 4, 5, 1, -1, 1, 1),
    ],
)
def test_flops_of_a_convolution_leave_out_padding_and_dilation(window):
    size, outputs, kernel, stride, padding, kernel_dilation, input_dilation = window
    left, right, result = array(BF16, 2, size, 4), array(BF16, kernel, 4, 8), array(BF16, 2, outputs, 8)
    # b0f_0io->b0f; fields of ConvolutionDimensionNumbers and of Window.
    features = number(3, 1), number(4, 2), number(8, 2), number(10, 2)
    spatial = packed(6, [0]), packed(11, [1]), packed(12, [1])
    numbers = message(16, *features, *spatial)  # the batch is dimension 0, which is not written
    fields = (
        number(1, kernel),
        number(2, stride),
        number(3, padding),
        number(5, kernel_dilation),
        number(6, input_dilation),
    )
    found = entry(
        parameter(1, 0, left),
        parameter(2, 1, right),
        instruction(3, "convolution", result, (1, 2), numbers + message(15, message(1, *fields))),
    )
    assert analysis.dots(found)[0].flops == 2 * 2 * 4 * 8 * multiplications(*window)


# ---- memory and data movement


def test_copies_are_those_that_do_nothing_else():
    x = array(F32, 4, 2)
    inside = [parameter(21, 0, x), instruction(22, "transpose", x, (21,)), instruction(23, "bitcast", x, (22,))]
    only_moves = computation(2, inside, 23)
    inside = [parameter(31, 0, x), instruction(32, "copy", x, (31,)), instruction(33, "exponential", x, (32,))]
    computes = computation(3, inside, 33)
    renames = computation(4, [parameter(41, 0, x), instruction(42, "bitcast", x, (41,))], 42)
    found = entry(
        parameter(1, 0, x),
        instruction(2, "copy", x, (1,), cycles(11)),
        instruction(3, "fusion", x, (2,), cycles(20), called=(2,)),
        instruction(4, "fusion", x, (3,), cycles(40), called=(3,)),
        instruction(5, "fusion", x, (4,), called=(4,)),
        instruction(6, "copy-start", tuple_of(x, x, array(U32)), (5,)),
        instruction(7, "copy-done", x, (6,)),
        others=[only_moves, computes, renames],
    )
    copies = analysis.copies(found)
    assert [each.name for each in copies.instructions] == ["copy.2", "fusion.3"]
    assert (copies.bytes, copies.cycles) == (64, 31)


def test_the_largest_buffers_are_named_once():
    big, small, chip = array(F32, 100), array(F32, 10), array(F32, 1000, memory_space=1)
    found = entry(
        parameter(1, 0, small),
        instruction(2, "fusion", big, (1,)),
        instruction(3, "bitcast", big, (2,)),
        instruction(4, "tuple", tuple_of(big, big), (2, 3)),
        instruction(5, "copy-start", tuple_of(chip, big, array(U32)), (2,)),
        instruction(6, "copy-done", chip, (5,)),
    )
    largest = analysis.largest_buffers(found, 2)
    assert [(each.name, each.hbm_bytes, each.source) for each in largest] == [
        ("fusion.2", 400, "model.py:2"),
        ("parameter.1", 40, "model.py:1"),
    ]


def test_custom_calls_are_counted_by_target():
    fused = computation(2, [instruction(21, "custom-call", SCALAR, extra=message(28, b"TopK"))], 21)
    found = entry(
        instruction(1, "custom-call", SCALAR, extra=message(28, b"Sharding")),
        instruction(2, "custom-call", SCALAR, extra=message(28, b"TopK")),
        instruction(3, "fusion", SCALAR, called=(2,)),
        others=[fused],
    )
    assert analysis.custom_calls(found) == {"TopK": 2, "Sharding": 1}


def test_host_transfers():
    found = entry(
        instruction(1, "infeed", SCALAR),
        instruction(2, "send", SCALAR, extra=number(47, 1)),
        instruction(3, "send", SCALAR),  # to another device
        instruction(4, "copy-start", tuple_of(array(F32, 2, memory_space=5), array(F32, 2), array(U32))),
        instruction(5, "fusion", array(F32, 2, memory_space=1)),  # on the chip
    )
    assert [each.name for each in analysis.host_transfers(found)] == ["infeed.1", "send.2", "copy-start.4"]


def test_random_bytes_are_those_of_the_draws():
    numbers = instruction(1, "rng-bit-generator", tuple_of(array(U32, 4), array(U32, 8, 16)))
    plain = instruction(2, "add", array(U32, 8, 16))
    assert analysis.random_bytes(entry(numbers, plain)) == 4 * 4 + 8 * 16 * 4


def test_a_result_is_found_by_its_shape_whole_or_divided():
    found = hlo.parse(train_step(batch=256, inputs=64, outputs=32))

    def names(shape, devices=1):
        return [each.name for each in analysis.with_result(found, shape, devices)]

    assert names("bf16[256,32]") == ["dot.4"]
    assert names("2×bf16[32,32]{1,0:T(8,128)}", 8) == ["dot.4"]
    assert names("bf16[128,16]", 2) == []  # two dimensions divided
    assert names("bf16[32,32]", 4) == []
    assert names("f32[64,32]") == ["convert.6", "subtract.7"]  # not the parameter
    assert names("nonsense") == []


# ---- writing


def test_donors_are_added_and_the_rest_stays():
    data = train_step()
    once = hlo.with_buffer_donors(data, [1])
    assert hlo.parse(data).buffer_donors == []
    assert hlo.parse(once).buffer_donors == [1]
    assert hlo.parse(hlo.with_buffer_donors(once, [0, 1])).buffer_donors == [1, 0]
    assert hlo.parse(hlo.with_buffer_donors(data, [])) == hlo.parse(data)


@pytest.mark.parametrize(
    "write", [lambda data: hlo.with_buffer_donors(data, [0]), lambda data: hlo.with_parameter_shardings(data, {})]
)
def test_what_is_not_read_survives_writing(write):
    kept = message(3000, b"kept")
    shape = array(F32, 8) + message(5, kept) + kept
    instructions = [parameter(1, 0, shape, kept + message(7, kept)), instruction(2, "copy", shape, (1,), kept)]
    data = module([computation(1, instructions, 2) + kept], extra=kept)
    assert write(data).count(kept) == data.count(kept) == 9


def test_shardings_are_written_and_the_rest_stays():
    data = train_step()
    rows = hlo.op_sharding(("data", None), {"data": 8})
    written = hlo.with_parameter_shardings(data, {0: rows})
    before, after = hlo.parse(data), hlo.parse(written)
    assert [each.sharding for each in before.parameters] == [None, None]
    assert [hlo.describe_sharding(each.sharding) for each in after.parameters] == [
        "devices=[8,1]0,1,2,3,4,5,6,7",
        "replicated",
    ]
    assert hlo.with_parameter_shardings(written, {0: rows}) == written
    # Written again, the second replaces the first, and the others keep theirs.
    columns = hlo.op_sharding((None, "data"), {"data": 8})
    again = hlo.parse(hlo.with_parameter_shardings(written, {1: columns}))
    assert [each.sharding for each in again.parameters] == [rows, columns]
    for one, other in zip(before.entry.instructions, after.entry.instructions, strict=True):
        if one.opcode != "parameter":
            assert one == other


def test_only_the_entry_computation_is_sharded():
    inner = computation(2, [parameter(21, 0, array(F32, 8))], 21)
    data = module([inner, computation(1, [parameter(1, 0, array(F32, 8))], 1)])
    found = hlo.parse(hlo.with_parameter_shardings(data, {0: hlo.op_sharding(("data",), {"data": 8})}))
    assert found.computations[2].root.sharding is None
    assert found.entry.root.sharding is not None


@pytest.mark.parametrize("write", [lambda data: hlo.with_buffer_donors(data, [0, 2]),
                                   lambda data: hlo.with_parameter_shardings(data, {2: hlo.OpSharding()})])  # fmt: skip
def test_a_parameter_that_is_not_there_is_refused(write):
    with pytest.raises(ValueError, match=r"module 'test' has no parameters \[2\]: it has 2"):
        write(train_step())


def test_shardings_kept_only_by_the_module_are_read():
    rows = hlo.op_sharding(("data", None), {"data": 8})
    found = hlo.parse(train_step() + message(14, rows.SerializeToString()) + message(14))
    assert [each.sharding for each in found.parameters] == [rows, hlo.OpSharding()]


@pytest.mark.parametrize(
    ("spec", "mesh", "expected"),
    [
        ((None, None), {"data": 4}, "replicated"),
        (("data",), {"data": 1}, "replicated"),
        (("data", None), {"data": 4}, "devices=[4,1]0,1,2,3"),
        ((None, "data", None), {"data": 2}, "devices=[1,2,1]0,1"),
        (("data", None), {"data": 2, "model": 2}, "devices=[2,1,2]0,1,2,3 last_tile_dim_replicate"),
        ((None, "model"), {"data": 2, "model": 2}, "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"),
        (("model", "data"), {"data": 2, "model": 2}, "devices=[2,2]0,2,1,3"),
        (("data",), {"data": 2, "model": 1}, "devices=[2]0,1"),
    ],
)
def test_shardings(spec, mesh, expected):
    assert hlo.describe_sharding(hlo.op_sharding(spec, mesh)) == expected


def test_the_bytes_of_a_sharding():
    # OpSharding {type: OTHER, tile_assignment_dimensions: [300], tile_assignment_devices: 0..299}
    found = hlo.op_sharding(("data",), {"data": 300})
    assert found.SerializeToString() == number(1, 3) + packed(3, [300]) + packed(4, range(300))


@pytest.mark.parametrize("spec", [("rows", None), ("data", "data")])
def test_a_spec_that_does_not_fit_the_mesh_is_refused(spec):
    with pytest.raises(ValueError, match="must name each axis of the mesh"):
        hlo.op_sharding(spec, {"data": 4})


def test_contracting_dimensions_are_those_of_the_left_operand():
    # x^T y: the batch is contracted.
    found = hlo.parse(train_step(batch=100, inputs=3, outputs=5))
    assert [each.flops for each in analysis.dots(found)] == [2 * 100 * 3 * 5] * 2
    assert contracting(0, 0) in train_step()
