"""tpu/compiler/libtpu.py: what it needs no library for, and with libtpu the compilation of tiny modules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import hlo_modules as m
import pytest

from errors import InputError
from tpu.compiler import analysis, apart, hlo, libtpu
from train.common.embedding.memory import USABLE_GIB

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def chip():
    with libtpu.Topology("v5e:1x1") as topology:
        yield topology


@pytest.fixture(scope="module")
def host():
    with libtpu.Topology("v5e:2x4") as topology:
        yield topology


def test_the_package_is_found_or_what_to_do_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(libtpu, "FOLDER", tmp_path / "versions")
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match=r"`make .libtpu/0.0.21/.installed` installs it"),
    ):
        patch.setattr(libtpu.importlib.util, "find_spec", lambda name: None)
        libtpu.find()
    information = tmp_path / "libtpu-9.8.7.dist-info"
    for file in (tmp_path / "libtpu/__init__.py", tmp_path / "libtpu/libtpu.so", information / "METADATA"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    assert libtpu.find() == tmp_path / "libtpu/libtpu.so"
    assert libtpu.version() == "9.8.7"

    # What `make compile` has installed comes before the package.
    ours = tmp_path / "versions/0.0.21/libtpu/libtpu.so"
    ours.parent.mkdir(parents=True)
    ours.touch()
    assert libtpu.find() == libtpu.installed("0.0.21") == ours
    for version, message in (
        ("0.0.51", "`make .libtpu/0.0.51/.installed` installs it"),
        ("newest", "is no version of"),
    ):
        with pytest.raises(InputError, match=message):
            libtpu.installed(version)

    # A library on its own is told by its path, also where no other is installed.
    alone = tmp_path / "on/its own/libtpu.so"
    assert libtpu.version(alone) == str(alone)
    with monkeypatch.context() as patch:
        patch.setattr(libtpu, "FOLDER", tmp_path / "nothing")
        patch.setattr(libtpu.importlib.util, "find_spec", lambda name: None)
        assert libtpu.version(alone) == str(alone)

    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(InputError, match=r"TPU_LIBRARY_PATH=.*libtpu.so is not a file"):
        libtpu.find()


@pytest.mark.parametrize("share, said", [(0.5, "was cut off: it has"), (1, "undefined symbol: GetPjrtApi")])
def test_a_library_that_was_cut_off_is_refused_before_it_ends_the_process(share, said, tmp_path):
    some = Path(re.search(r"/\S+/libm[.-]\S*", Path("/proc/self/maps").read_text())[0]).read_bytes()
    (tmp_path / "libtpu.so").write_bytes(some[: int(len(some) * share)])
    code = "import sys; from pathlib import Path; from tpu.compiler import pjrt; pjrt.Library(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "libtpu.so")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, "no signal"
    last = result.stderr.splitlines()[-1]
    assert last.startswith("errors.InputError") and said in last


def test_an_unknown_topology_lists_the_known_ones():
    for name in ("v5e", "v5e:0x0", "v5e:3x5", "v9:2x2", "v5litepod-8", ""):
        with pytest.raises(InputError, match=r"is not known; the known ones are: .*v5e: 1x1, 2x2.*TPU7x: 1x1x1"):
            libtpu.Topology(name)


def test_the_options_are_those_of_a_program_for_all_devices():
    assignment = [m.number(1, 1), m.number(2, 3), *(m.message(3, m.packed(1, [device])) for device in (3, 4, 5))]
    build = [m.number(1, -1), m.number(4, 1), m.number(5, 3), m.number(6, 1)]
    build += [m.message(9, *assignment), m.packed(12, [1])]
    assert libtpu.compile_options([3, 4, 5], effort_level=9) == m.message(3, *build, m.number(24, 9))
    assert libtpu.compile_options([3, 4, 5], effort_level=0) == m.message(3, *build)


REPORT_21 = """XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33.54G of 15.75G hbm. \
Exceeded hbm capacity by 17.80G.

  Largest program allocations in hbm:

  1. Size: 512.50M
     Operator: op_type="dot" op_name="step/y" source_file="/a/model.py" source_line=4
     Shape: bf16[60000,4000]{1,0:T(8,128)(2,1)}
     Unpadded size: 6.71G

  2. Size: 6.71G
     Shape: bf16[60000,60000]{1,0:T(8,128)(2,1)}
"""
REPORT_51 = """E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries \
(26.92G) exceeds available HBM (15.75G). HLO module: m.

E1121 18:04:08.080245   12512 deepsea_compiler_base.cc:3563] XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 26.92G of 15.75G hbm. Exceeded hbm capacity by 11.17G. HLO module: m. Memory usage report:

Memory Space: default (color=0)
Total bytes: 28907536384 (26.92GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
       512B(  0%);       512B;            0;                1; (bf16[120000,128], bf16[120000,128], u32[])
   26.84GiB(100%);   26.84GiB;        16384;                1; 2×bf16[120000,120000]

Memory Space: vmem (color=1)
Total bytes: 61440000 (58.59MiB)
   29.30MiB( 50%);   29.30MiB;            0;                1; bf16[99,128]
"""
SINGLE = """Allocation (size=28815360000) would exceed memory (size=17179869184) :: #allocation6 [shape = \
'bf16[120000,120000]{1,0:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of fusion.2@{}']"""
VMEM = "Ran out of memory in memory space vmem. Used 150.00M of 128.00M vmem. Exceeded vmem capacity by 22.00M."
TILES = "{1,0:T(8,128)(2,1)}"


def test_an_out_of_memory_report_is_understood():
    largest = (6.71 * 2**30, f"bf16[60000,60000]{TILES}", "", "")
    second = (512.5 * 2**20, f"bf16[60000,4000]{TILES}", "step/y", "/a/model.py:4")
    squares = (26.84 * 2**30, "2×bf16[120000,120000]", "", "")
    small = (512, "(bf16[120000,128], bf16[120000,128], u32[])", "", "")
    for report, needed, allocations in (
        (REPORT_21, 33.54 * 2**30, [largest, second]),
        (REPORT_51, 28907536384, [squares, small]),
        (REPORT_51[: REPORT_51.index("E1121")], 26.92 * 2**30, []),  # without its log
        (SINGLE, 28815360000, [(28815360000, f"bf16[120000,120000]{TILES}", "", "")]),
    ):
        expected = [libtpu.Allocation(round(size), *rest) for size, *rest in allocations]
        assert libtpu.parse_out_of_memory(report) == (round(needed), expected)
    assert libtpu.parse_out_of_memory(VMEM) is None, "of another memory"


TOPOLOGIES = [("v2:2x2", "TPU v2", 8), ("v3:1x1", "TPU v3", 2), ("v4:2x2x1", "TPU v4", 4), ("v4:1x1x1", "TPU v4", 1)]
TOPOLOGIES += [("v5e:1x1", "TPU v5 lite", 1), ("v5e:16x16", "TPU v5 lite", 256), ("v5p:2x2x1", "TPU v5", 4)]
TOPOLOGIES += [("V6E:2x4", "TPU v6 lite", 8), ("tpu7x:2x2x1", "TPU7x", 8)]


def test_embedding_tables_reckon_with_the_memory_that_the_compiler_gives():
    kinds = {name.partition(":")[0].lower(): kind for name, kind, _ in TOPOLOGIES}
    given = {kinds[name.lower()]: generation.hbm_bytes for name, generation in libtpu.GENERATIONS.items()}
    assert {kind: round(size / libtpu.GIB, 2) for kind, size in given.items()} == USABLE_GIB


@m.needs_libtpu
@pytest.mark.parametrize(("name", "kind", "devices"), TOPOLOGIES)
def test_topologies(name, kind, devices):
    assert libtpu.version() and libtpu.api_version() >= (0, 72)
    try:
        topology = libtpu.Topology(name)
    except InputError as error:  # 0.0.21 is too old for the last one
        assert name == "tpu7x:2x2x1" and "is not known to libtpu" in str(error)
        return
    with topology:
        assert (topology.kind, topology.num_devices, topology.device_ids) == (kind, devices, list(range(devices)))
        assert topology.name.lower() == name.lower() and topology.name.startswith(topology.generation)
        # The library's own figure; a tenth of a MiB of v5e's is kept for a host of several chips.
        assert topology.hbm_bytes == pytest.approx(libtpu.GENERATIONS[topology.generation].hbm_bytes, abs=2**20)


@m.needs_libtpu
@pytest.mark.parametrize("effort", ["fast", "full"])
def test_a_matmul_is_compiled(chip, effort):
    with chip.compile(m.matmul(512, 256, 1024), effort) as compiled:
        memory, cost, found = compiled.memory, compiled.cost, hlo.parse(compiled.optimized)
    assert (memory.argument, memory.output) == (2 * (512 * 256 + 256 * 1024), 2 * 512 * 1024)
    assert memory.peak_reported and memory.peak >= memory.argument + memory.output
    assert cost.flops == 2 * 512 * 256 * 1024
    assert cost.bytes_accessed >= memory.argument + memory.output
    assert [(each.lhs, each.flops) for each in analysis.dots(found)] == [("bf16", cost.flops)]
    assert analysis.entry_cycles(found).total > 0
    assert analysis.longest(found, 1)[0].instruction.source == "model.py:3"


@m.needs_libtpu
def test_what_is_closed_is_freed_once(monkeypatch):
    topology = libtpu.Topology("v5e:1x1")
    compiled = topology.compile(m.matmul(8, 8, 8), "fast")
    topology.close()
    assert compiled.cost.flops == 1024  # a program needs its topology no more
    called = []
    call = compiled.library.call
    monkeypatch.setattr(compiled.library, "call", lambda name, arguments: called.append(name) or call(name, arguments))
    compiled.close()
    with pytest.raises(ValueError, match="this Program is closed"):
        _ = compiled.optimized
    with pytest.raises(ValueError, match="this Topology is closed"):
        topology.compile(m.matmul(8, 8, 8), "fast")
    compiled.close()
    topology.close()
    assert called == ["Executable_Destroy"]


@m.needs_libtpu
def test_a_sharded_step_has_one_all_reduce_and_keeps_its_donor(host):
    mesh = {"data": host.num_devices}
    shardings = {0: hlo.op_sharding(("data", None), mesh), 1: hlo.op_sharding((None, None), mesh)}
    step = hlo.with_buffer_donors(hlo.with_parameter_shardings(m.train_step(1024, 256, 512), shardings), [1])
    with host.compile(step, "fast") as compiled:
        found, memory = hlo.parse(compiled.optimized), compiled.memory
    assert found.num_partitions == 8
    parameters = [(each.shape.text, hlo.describe_sharding(each.sharding)) for each in found.parameters]
    assert parameters == [("bf16[128,256]", "devices=[8,1]0,1,2,3,4,5,6,7"), ("f32[256,512]", "replicated")]
    (only,) = analysis.collectives(found)
    assert (only.kind, only.bytes, only.group_size) == ("all-reduce", 2 * 256 * 512, 8)
    assert (only.op_name, only.source) == ("step/dot", "model.py:5")
    assert analysis.donated(found) == {1} and found.input_output_alias == [(0, 1)]
    # An output in the memory of an argument counts once.
    assert memory.alias == 4 * 256 * 512
    held = memory.argument + memory.output - memory.alias
    assert memory.needed == held + memory.temp + memory.generated_code


@m.needs_libtpu
def test_a_step_with_sharded_weights_gathers_and_scatters(host):
    rows = hlo.op_sharding(("data", None), {"data": host.num_devices})
    step = hlo.with_parameter_shardings(m.train_step(1024, 256, 512), {0: rows, 1: rows})
    with host.compile(step, "fast") as compiled:
        collectives = analysis.collectives(hlo.parse(compiled.optimized))
    whole = 2 * 256 * 512
    moved = sorted((each.kind, each.bytes, each.result_bytes) for each in collectives)
    assert moved == [("all-gather", whole // 8, whole), ("reduce-scatter", whole, whole // 8)]


def chain(size: int) -> bytes:
    """[size, 128] x [128, size], squared and so on: several [size, size] temporaries at once, small in- and outputs."""
    left, right, square = f"bf16[{size},128]", f"bf16[128,{size}]", f"bf16[{size},{size}]"
    pairs = enumerate([(1, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 3), (8, 4)], start=3)
    squares = [m.op(number, "dot", square, pair, m.contracting(1, 0)) for number, pair in pairs]
    last = m.op(10, "dot", left, (9, 1), m.contracting(1, 0))
    return m.program([m.arg(1, 0, left), m.arg(2, 1, right), *squares, last], [left, right], left)


@m.needs_libtpu
def test_out_of_memory_tells_what_takes_it(chip, capfd):
    sentence = "per device, a device of v5e:1x1 has 15.75 GiB; use a smaller"
    with pytest.raises(libtpu.OutOfMemory, match=sentence) as caught:
        chip.compile(chain(60_000), "fast")
    error, square = caught.value, 2 * 60_000**2
    assert isinstance(error, InputError)
    # 4 where no test of this process has asked for the fusions before libtpu was loaded
    assert error.capacity == chip.hbm_bytes and error.needed > 3 * square
    largest = error.allocations[0]
    assert largest.bytes == pytest.approx(square, rel=0.01) and "bf16[60000,60000]" in largest.shape
    assert largest.source.startswith("model.py:") or ("step/dot", "model.py:3") in largest.candidates
    assert "Used" in error.report
    with pytest.raises(libtpu.OutOfMemory) as caught:  # arguments and results count, too
        chip.compile(m.matmul(100_000, 128, 100_000), "fast")
    assert caught.value.needed >= 2 * 100_000**2
    assert "bf16[100000,100000]" in caught.value.allocations[0].shape
    assert capfd.readouterr() == ("", "")


@m.needs_libtpu
@pytest.mark.parametrize("version", libtpu.VERSIONS)
def test_a_process_of_its_own_answers_as_this_one_does(version):
    library, module = libtpu.installed(version), m.matmul(512, 256, 1024)
    compiled = apart.compile(module, "v5e:1x1", "fast", library)
    assert compiled.cost.flops == 2 * 512 * 256 * 1024
    assert compiled.memory.argument == 2 * (512 * 256 + 256 * 1024)
    assert hlo.parse(compiled.optimized).parameters

    square = 2 * 60_000**2
    with pytest.raises(libtpu.OutOfMemory) as caught:
        apart.compile(chain(60_000), "v5e:1x1", "fast", library)
    assert caught.value.needed > 3 * square and caught.value.capacity < 2**34
    assert caught.value.allocations[0].bytes == pytest.approx(square, rel=0.01)
    with pytest.raises(libtpu.CompilerError, match="INVALID_ARGUMENT"):
        apart.compile(b"not a module", "v5e:1x1", "fast", library)
    with pytest.raises(InputError, match="topology 'v9:1x1' is not known"):
        apart.compile(module, "v9:1x1", "fast", library)


@m.needs_libtpu
def test_what_cannot_be_compiled_is_refused(chip):
    with pytest.raises(libtpu.CompilerError, match="INVALID_ARGUMENT") as caught:
        chip.compile(b"not a module", "fast")
    assert caught.value.code == 3 and not isinstance(caught.value, InputError)
    with pytest.raises(InputError, match="effort 'high' is not known; use one of: fast, full"):
        chip.compile(m.matmul(8, 8, 8), "high")


@m.needs_libtpu
def test_two_processes_compile_at_once_and_leave_nothing_in_the_temporary_folder(tmp_path):
    script = (
        "import hlo_modules as m\nfrom tpu.compiler import libtpu\n"
        "with libtpu.Topology('v5e:1x1') as topology, topology.compile(m.matmul(8, 8, 8), 'fast') as compiled:\n"
        "    print(compiled.cost.flops, flush=True)\n    input()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(tmp_path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]
    # Both have compiled before either may go on.
    lines = [process.stdout.readline() for process in processes]
    ends = [process.communicate("\n", timeout=60) for process in processes]
    assert lines == ["1024.0\n"] * 2, ends
    assert ends == [("", "")] * 2 and [process.returncode for process in processes] == [0, 0]
    assert list(tmp_path.iterdir()) == []
