"""tpu/compiler/hlo.py and analysis.py, on small modules that hlo_modules.py writes by hand."""

import itertools

import hlo_modules as m
import pytest

from tpu.compiler import analysis, hlo

SCALAR, X = "f32[]", "f32[8]"
ROWS = hlo.op_sharding(("data", None), {"data": 8})


def entry(*instructions: bytes, others: list[bytes] = (), extra: bytes = b"", root: int = 1) -> hlo.Module:
    return hlo.parse(m.module([*others, m.computation(1, list(instructions), root)], extra=extra))


def test_a_module_is_read():
    aliases = m.message(8, m.message(1, m.packed(1, [3]), m.number(2, 1)), m.message(1, m.number(2, 0)))
    donors = m.message(18, m.message(1, m.number(1, 2)), m.message(1))
    found = hlo.parse(m.matmul(4, 8, 16) + aliases + donors)
    assert (found.name, found.entry.name, found.num_partitions) == ("test", "computation.1", None)
    assert [each.opcode for each in found.entry.instructions] == ["parameter", "parameter", "dot"]
    dot = found.entry.root
    assert (dot.name, dot.op_name, dot.source) == ("dot.3", "step/dot", "model.py:3")
    assert [each.name for each in found.entry.operands(dot)] == ["parameter.1", "parameter.2"]
    shapes = [(each.parameter_number, each.shape.text) for each in found.parameters]
    assert shapes == [(0, "bf16[4,8]"), (1, "bf16[8,16]")]
    assert (found.input_output_alias, found.buffer_donors) == ([(3, 1), (0, 0)], [2, 0])
    assert analysis.donated(found) == {0, 1, 2}


def test_shapes():
    sizes = {"f32[]": 4, "bf16[3,5]": 30, "pred[7]": 7, "f32[0,4]": 0, "token[]": 0, "type99[2]": 0, "s4[3]": 2}
    for shape, size in (sizes | {"(f32[2], (s32[]))": 12, "(f32[2], f32[100]@1)": 408}).items():  # s4: two per byte
        found = entry(m.op(1, "custom-call", shape)).entry.root
        assert found.shape.text == str(found.shape) == shape.replace("@1", "")
        assert (found.bytes, found.hbm_bytes) == (size, 8 if "@1" in shape else size)


def test_what_is_no_whole_module_is_refused():
    data = m.matmul(4, 8, 16)
    donated = hlo.with_buffer_donors(data, [0, 1])
    whole = data.rindex(m.number(6, 1))  # from here on there is only the entry computation's id
    cut = [*(data[:size] for size in range(whole)), *(donated[:size] for size in range(whole + 3, len(donated)))]
    others = [b"PK\x03\x04 an archive", b'{"json": 1}', b"HloModule test, entry", bytes(1000), b"\xff" * 1000]
    opcodeless = m.message(1, b"without opcode") + m.message(3, m.shape_proto("f32[]"))
    lacking = [m.module([m.computation(1, [each], 1)]) for each in (opcodeless, m.message(2, b"without-shape"))]
    for part in [*cut, *others, *lacking]:
        with pytest.raises(ValueError, match=f"these {len(part)} bytes are not a whole HloModuleProto"):
            hlo.parse(part)


def loop(identifier: int, body: int, condition: int, times: int = 0) -> bytes:
    config = m.backend_config(f'{{"known_trip_count":{{"n":"{times}"}}}}' if times else "{}")
    return m.op(identifier, "while", SCALAR, (1,), config, called=(body, condition))


def work(identifier: int, count: int) -> bytes:
    return m.op(identifier, "fusion", SCALAR, extra=m.cycles(count))


def test_cycles_are_summed_and_loops_multiplied():
    """Those of unknown length count once; what has no estimate and the inside of a fusion do not at all."""
    inner, condition = m.computation(2, [work(21, 7)], 21), m.computation(3, [work(31, 1)], 31)
    outer = m.computation(4, [m.arg(1, 0, SCALAR), work(41, 101), loop(42, 2, 3, 5)], 41)
    fused = m.computation(5, [work(51, 50)], 51)
    fusion = m.op(5, "fusion", SCALAR, extra=m.cycles(9), called=(5,))
    loops = loop(3, 4, 3, 10), loop(4, 2, 2)
    instructions = m.arg(1, 0, SCALAR), work(2, 1000), *loops, fusion, work(6, 2**63 - 1)
    found = entry(*instructions, others=[inner, condition, outer, fused], root=6)
    assert found.entry.root.estimated_cycles is None
    total = 1000 + 10 * (1 + 101 + 5 * (7 + 1)) + 2 * 7 + 9
    assert analysis.entry_cycles(found) == analysis.Cycles(total, ("while.4",))
    longest = [(each.instruction.name, each.cycles, each.times) for each in analysis.longest(found, 3)]
    assert longest == [("fusion.41", 101, 10), ("fusion.2", 1000, 1), ("fusion.21", 7, 50)]


AXES = m.message(1, m.message(1, b"a"), m.number(2, 2)), m.message(1, m.message(1, b"b"), m.number(2, 4))
GROUPS = {
    "none": b"",
    "one by one": m.message(49, m.packed(1, [0, 1, 2, 3])) + m.message(49, m.packed(1, [4, 5, 6, 7])),
    "list": m.message(87, m.message(1, m.packed(1, [0, 1, 2, 3])), m.message(1, m.packed(1, [4, 5, 6, 7]))),
    "iota in a list": m.message(87, m.message(2, m.number(1, 2), m.number(2, 4))),
    "iota": m.message(92, m.number(1, 2), m.number(2, 4)),
    "axis of a mesh": m.message(93, m.message(1, *AXES), m.message(2, m.number(1, 1))),
    "part of an axis": m.message(93, m.message(1, *AXES), m.message(2, m.message(2, m.number(1, 2), m.number(2, 4)))),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("partitions", [None, 16])
def test_the_size_of_a_group(groups, partitions):
    extra = m.message(15, m.number(1, 1), m.number(2, partitions)) if partitions else b""
    found = entry(m.arg(1, 0, X), m.op(2, "all-reduce", X, (1,), groups), extra=extra)
    assert found.num_partitions == partitions
    assert analysis.collectives(found)[0].group_size == (4 if groups else partitions), "without groups all are one"


def test_a_combined_all_reduce_a_start_and_its_end_and_a_wrapped_collective_are_one():
    shard, waiting = "f32[2]", f"(({X}), {X}, u32[])"
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
    each = analysis.collectives(found)
    expected = [("all-gather", 8, 32, 1), ("all-reduce", 8, 8, 1), ("all-reduce", 38, 38, 2), ("all-to-all", 32, 32, 1)]
    assert [(one.kind, one.bytes, one.result_bytes, one.operands) for one in each] == expected
    assert (each[2].op_name, each[2].source) == ("step/all-reduce", "model.py:10")


def test_a_collective_in_a_loop_runs_as_often_as_the_loop():
    pairs = m.message(52, m.number(1, 0), m.number(2, 1)) + m.message(52, m.number(1, 1), m.number(2, 0))
    permute = m.op(22, "collective-permute", X, (21,), pairs)
    body, condition = m.computation(2, [m.arg(21, 0, X), permute], 22), m.computation(3, [work(31, 1)], 31)
    (only,) = analysis.collectives(entry(m.arg(1, 0, X), loop(2, 2, 3, 6), others=[body, condition]))
    assert (only.kind, only.times, only.group_size) == ("collective-permute", 6, 2)


def test_an_all_reduce_whose_fusion_keeps_a_slice_is_a_reduce_scatter():
    whole, shard = "bf16[1024]", "bf16[128]"
    reduce = m.op(22, "all-reduce", whole, (21,), named=False)
    kept = m.op(23, "partition-id", "u32[]"), m.op(24, "dynamic-slice", shard, (22, 23))
    fused = m.computation(2, [m.arg(21, 0, whole), reduce, *kept], 24)
    found = entry(m.arg(1, 0, whole), m.op(2, "fusion", shard, (1,), called=(2,), named=False), others=[fused])
    (only,) = analysis.collectives(found)
    assert (only.kind, only.bytes, only.result_bytes) == ("reduce-scatter", 2048, 256)
    # It has no name of its own, nor has the fusion, which has that of its root.
    assert (only.op_name, only.source) == ("step/dynamic-slice", "model.py:24")


def test_a_collective_that_runs_during_other_fusions_is_one():
    shard, state = "f32[2]", "s32[]"
    part = m.backend_config('{"async_collective_fusion_config":{"flag_start":"2"}}')

    def piece(identifier: int, *more: bytes, root: int) -> bytes:
        first = identifier * 10
        gather = m.op(first + 1, "all-gather", X, (first,), part, named=False)
        return m.computation(identifier, [m.arg(first, 0, shard), gather, *more], root)

    start = m.op(22, "custom-call", f"({shard}, {X}, {state})", (21,), m.message(28, b"AsyncCollectiveStart"))
    end = m.op(42, "custom-call", X, (40, 41), m.message(28, b"AsyncCollectiveDone"))
    found = entry(
        m.arg(1, 0, shard),
        m.op(2, "fusion", f"({shard}, {X}, {state})", (1,), called=(2,)),
        m.op(3, "get-tuple-element", shard, (2,)),
        m.op(4, "fusion", f"({SCALAR}, {X})", (3,), called=(3,)),
        m.op(5, "fusion", X, (3,), called=(4,)),
        m.op(6, "all-gather", X, (1,)),
        others=[piece(2, start, root=22), piece(3, root=31), piece(4, end, root=42)],
    )
    gathers = sorted((each.name, each.source, each.bytes, each.result_bytes) for each in analysis.collectives(found))
    assert gathers == [("all-gather.21", "model.py:2", 8, 32), ("all-gather.6", "model.py:6", 8, 32)]


def test_dots_tell_types_precision_and_flops():
    (only,) = analysis.dots(hlo.parse(m.matmul(4, 8, 16, result="f32")))
    assert (only.lhs, only.rhs, only.result, only.precision) == ("bf16", "bf16", "f32", ("default", "default"))
    assert only.flops == 2 * 4 * 8 * 16
    # x^T y contracts the batch, which is the left operand's first dimension.
    assert [each.flops for each in analysis.dots(hlo.parse(m.train_step(100, 3, 5)))] == [2 * 100 * 3 * 5] * 2
    # With a batch, in a fusion, at highest precision.
    left, right, product = "f32[3,4,8]", "f32[3,8,5]", "f32[3,4,5]"
    details = m.message(30, m.packed(1, [2]), m.packed(2, [1]), m.packed(3, [0]), m.packed(4, [0]))
    details += m.message(51, m.packed(1, [2, 1]))
    operands = m.arg(21, 0, left), m.arg(22, 1, right)
    fused = m.computation(2, [*operands, m.op(23, "dot", product, (21, 22), details)], 23)
    fusion = m.op(3, "fusion", product, (1, 2), called=(2,))
    (only,) = analysis.dots(entry(m.arg(1, 0, left), m.arg(2, 1, right), fusion, others=[fused]))
    assert (only.lhs, only.precision, only.flops) == ("f32", ("highest", "high"), 2 * 3 * 4 * 8 * 5)


def test_an_operand_that_was_widened_for_a_dot_has_the_type_it_had():
    (only,) = analysis.dots(
        entry(
            m.arg(1, 0, "bf16[4,8]"),
            m.op(2, "convert", "f32[4,8]", (1,)),
            m.op(3, "transpose", "f32[8,4]", (2,)),
            m.arg(4, 1, "bf16[4,8]"),
            m.op(5, "convert", "f32[4,8]", (4,)),
            m.op(6, "add", "f32[4,8]", (5, 5)),  # has numbers that bfloat16 has not
            m.op(7, "dot", "f32[4,4]", (6, 3), m.message(30, m.packed(1, [1]), m.packed(2, [0]))),
        )
    )
    assert (only.lhs, only.rhs) == ("f32", "bf16")


# Size, outputs, kernel, stride, padding, dilation of the kernel and of the input.
CONVOLUTIONS = [(9, 9, 3, 1, 1, 1, 1), (9, 5, 3, 2, 1, 1, 1), (9, 5, 3, 1, 0, 2, 1), (5, 11, 3, 1, 2, 1, 2)]


@pytest.mark.parametrize("convolution", [*CONVOLUTIONS, (6, 4, 5, 1, -1, 1, 1)])
def test_flops_of_a_convolution_leave_out_padding_and_dilation(convolution):
    size, outputs, kernel, stride, padding, kernel_dilation, input_dilation = convolution
    left, right, result = f"bf16[2,{size},4]", f"bf16[{kernel},4,8]", f"bf16[2,{outputs},8]"
    # b0f_0io->b0f; fields of ConvolutionDimensionNumbers. The batch is dimension 0, which is not written.
    features = m.number(3, 1), m.number(4, 2), m.number(8, 2), m.number(10, 2)
    numbers = m.message(16, *features, m.packed(6, [0]), m.packed(11, [1]), m.packed(12, [1]))
    window = {1: kernel, 2: stride, 3: padding, 5: kernel_dilation, 6: input_dilation}
    details = numbers + m.message(15, m.message(1, *(m.number(field, value) for field, value in window.items())))
    convolution = m.op(3, "convolution", result, (1, 2), details)
    (only,) = analysis.dots(entry(m.arg(1, 0, left), m.arg(2, 1, right), convolution))
    # Pairs of output and kernel element that meet an input element, counted one by one.
    places = [o * stride - padding + k * kernel_dilation for o, k in itertools.product(range(outputs), range(kernel))]
    met = sum(place in range(0, (size - 1) * input_dilation + 1, input_dilation) for place in places)
    assert only.flops == 2 * 2 * 4 * 8 * met


def test_copies_are_those_that_do_nothing_else():
    x = "f32[4,2]"

    def fused(identifier: int, *opcodes: str) -> bytes:
        ids = range(identifier * 10 + 1, identifier * 10 + 1 + len(opcodes))
        inside = [m.op(each, opcode, x, (each - 1,)) for each, opcode in zip(ids, opcodes, strict=True)]
        return m.computation(identifier, [m.arg(identifier * 10, 0, x), *inside], ids[-1])

    found = entry(
        m.arg(1, 0, x),
        m.op(2, "copy", x, (1,), m.cycles(11)),
        m.op(3, "fusion", x, (2,), m.cycles(20), called=(2,)),
        m.op(4, "fusion", x, (3,), m.cycles(40), called=(3,)),
        m.op(5, "fusion", x, (4,), called=(4,)),
        m.op(6, "copy-start", f"({x}, {x}, u32[])", (5,)),
        m.op(7, "copy-done", x, (6,)),
        others=[fused(2, "transpose", "bitcast"), fused(3, "copy", "exponential"), fused(4, "bitcast")],
    )
    copies = analysis.copies(found)
    assert [each.name for each in copies.instructions] == ["copy.2", "fusion.3"]
    assert (copies.bytes, copies.cycles) == (64, 31)


def test_the_largest_buffers_are_named_once_and_bytes_on_the_chip_counted():
    big, small, chip = "f32[100]", "f32[10]", "f32[1000]@1"
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
    largest = [(each.name, each.hbm_bytes, each.source) for each in analysis.largest_buffers(found, 2)]
    assert largest == [("fusion.2", 400, "model.py:2"), ("parameter.1", 40, "model.py:1")]


def test_custom_calls_host_transfers_and_random_bytes():
    top_k = m.message(28, b"TopK")
    found = entry(
        m.op(1, "infeed", SCALAR),
        m.op(2, "send", SCALAR, extra=m.number(47, 1)),
        m.op(3, "send", SCALAR),  # to another device
        m.op(4, "copy-start", "(f32[2]@5, f32[2], u32[])"),
        m.op(5, "fusion", "f32[2]@1", called=(2,)),  # on the chip
        m.op(6, "rng-bit-generator", "(u32[4], u32[8,16])"),
        m.op(7, "custom-call", SCALAR, extra=m.message(28, b"Sharding")),
        m.op(8, "custom-call", SCALAR, extra=top_k),
        others=[m.computation(2, [m.op(21, "custom-call", SCALAR, extra=top_k)], 21)],
    )
    assert analysis.custom_calls(found) == {"TopK": 2, "Sharding": 1}
    assert [each.name for each in analysis.host_transfers(found)] == ["infeed.1", "send.2", "copy-start.4"]
    assert analysis.random_bytes(found) == 4 * 4 + 8 * 16 * 4


def test_a_result_is_found_by_its_shape_whole_or_divided():
    module = hlo.parse(m.train_step(batch=256, inputs=64, outputs=32))
    for shape, devices, names in (
        ("bf16[256,32]", 1, ["dot.4"]),
        ("2×bf16[32,32]{1,0:T(8,128)}", 8, ["dot.4"]),
        ("bf16[128,16]", 2, []),  # two dimensions divided
        ("bf16[32,32]", 4, []),
        ("f32[64,32]", 1, ["convert.6", "subtract.7"]),  # not the parameter
        ("nonsense", 1, []),
    ):
        assert [each.name for each in analysis.with_result(module, shape, devices)] == names


def test_donors_and_shardings_are_written_and_the_rest_stays():
    data = m.train_step()
    once = hlo.with_buffer_donors(data, [1])
    assert hlo.parse(once).buffer_donors == [1]
    assert sorted(hlo.parse(hlo.with_buffer_donors(once, [0, 1])).buffer_donors) == [0, 1]
    written = hlo.with_parameter_shardings(data, {0: ROWS})
    before, after = hlo.parse(data), hlo.parse(written)
    assert [each.sharding for each in before.parameters] == [None, None]
    assert [each.sharding for each in after.parameters] == [ROWS, hlo.OpSharding()]  # the other is replicated
    assert hlo.with_parameter_shardings(written, {0: ROWS}) == written
    # Written again, the second replaces the first, and the others keep theirs.
    columns = hlo.op_sharding((None, "data"), {"data": 8})
    again = hlo.parse(hlo.with_parameter_shardings(written, {1: columns}))
    assert [each.sharding for each in again.parameters] == [ROWS, columns]
    assert list(before.entry.instructions)[2:] == list(after.entry.instructions)[2:]


def shard(data: bytes, numbers: list[int]) -> bytes:
    return hlo.with_parameter_shardings(data, dict.fromkeys(numbers, ROWS))


@pytest.mark.parametrize("write", [hlo.with_buffer_donors, shard])
def test_what_is_not_read_survives_writing_and_a_parameter_that_is_not_there_is_refused(write):
    kept = m.message(3000, b"kept")
    shape = m.shape_proto("f32[8]") + m.message(5, kept) + kept
    instructions = [m.arg(1, 0, shape, kept + m.message(7, kept)), m.op(2, "copy", shape, (1,), kept)]
    data = m.module([m.computation(1, instructions, 2) + kept], extra=kept)
    assert write(data, [0]).count(kept) == data.count(kept) == 9
    assert hlo.parse(write(data, [])).entry.root == hlo.parse(data).entry.root
    with pytest.raises(ValueError, match=r"module 'test' has no parameters \[2\]: it has 2"):
        write(m.train_step(), [0, 2])


def test_only_the_entry_computation_is_sharded_and_shardings_kept_only_by_the_module_are_read():
    data = m.module([m.computation(2, [m.arg(21, 0, X)], 21), m.computation(1, [m.arg(1, 0, X)], 1)])
    found = hlo.parse(hlo.with_parameter_shardings(data, {0: ROWS}))
    assert (found.computations[2].root.sharding, found.entry.root.sharding) == (None, ROWS)
    found = hlo.parse(m.train_step() + m.message(14, ROWS.SerializeToString()) + m.message(14))
    assert [each.sharding for each in found.parameters] == [ROWS, hlo.OpSharding()]


def test_shardings():
    for spec, mesh, expected in (
        ((None, None), {"data": 4}, "replicated"),
        (("data",), {"data": 1}, "replicated"),
        (("data", None), {"data": 4}, "devices=[4,1]0,1,2,3"),
        ((None, "data", None), {"data": 2}, "devices=[1,2,1]0,1"),
        (("data", None), {"data": 2, "model": 2}, "devices=[2,1,2]0,1,2,3 last_tile_dim_replicate"),
        ((None, "model"), {"data": 2, "model": 2}, "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"),
        (("model", "data"), {"data": 2, "model": 2}, "devices=[2,2]0,2,1,3"),
        (("data",), {"data": 2, "model": 1}, "devices=[2]0,1"),
        ((("copies", "data"), None), {"copies": 2, "data": 2, "model": 1}, "devices=[4,1]0,1,2,3"),
        ((None, "data"), {"copies": 2, "data": 2, "model": 1}, "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"),
    ):
        assert hlo.describe_sharding(hlo.op_sharding(spec, mesh)) == expected
    # OpSharding {type: OTHER, tile_assignment_dimensions: [300], tile_assignment_devices: 0..299}
    found = hlo.op_sharding(("data",), {"data": 300}).SerializeToString()
    assert found == m.number(1, 3) + m.packed(3, [300]) + m.packed(4, range(300))
    for spec in (("rows", None), ("data", "data")):
        with pytest.raises(ValueError, match="must name each axis of the mesh"):
            hlo.op_sharding(spec, {"data": 4})


def test_a_fingerprint_is_of_the_program_and_not_of_the_lines_that_it_comes_from():
    def product(rows: int, line: bytes) -> bytes:
        where = m.message(7, m.message(3, line))
        return m.program([m.arg(1, 0, X), m.op(2, "copy", f"f32[{rows}]", (1,), where, named=False)], [X], X)

    first = hlo.fingerprint(product(8, b"a.py"))
    assert hlo.fingerprint(product(8, b"b.py")) == first
    # Its number in the process, and the index of files and lines that its operations refer to.
    another = m.number(5, 77) + m.message(17, m.message(1, b"/a/folder/b.py"))
    assert hlo.fingerprint(product(8, b"a.py") + another) == first
    assert hlo.fingerprint(product(9, b"a.py")) != first
