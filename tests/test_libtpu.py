"""With libtpu, compiles tiny modules; what needs it is skipped where it is not installed: requirements-compile.txt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hlo_modules import (
    BF16,
    array,
    contracting,
    installed,
    instruction,
    matmul,
    message,
    number,
    packed,
    parameter,
    program,
    train_step,
)

from errors import InputError
from tpu.compiler import analysis, hlo, libtpu

ROOT = Path(__file__).resolve().parent.parent


needs_libtpu = pytest.mark.skipif(not installed(), reason="libtpu is not installed: `make test-all` does that")


@pytest.fixture(scope="module")
def chip():
    with libtpu.Topology("v5e:1x1") as topology:
        yield topology


@pytest.fixture(scope="module")
def host():
    with libtpu.Topology("v5e:2x4") as topology:
        yield topology


def chain(size: int) -> bytes:
    """[size, 128] x [128, size], squared and so on: several [size, size] temporaries at once, small in- and outputs."""
    left, right, square = array(BF16, size, 128), array(BF16, 128, size), array(BF16, size, size)
    pairs = [(1, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 3), (8, 4)]
    squares = [
        instruction(number, "dot", square, pair, contracting(1, 0)) for number, pair in enumerate(pairs, start=3)
    ]
    last = instruction(len(pairs) + 3, "dot", left, (len(pairs) + 2, 1), contracting(1, 0))
    return program([parameter(1, 0, left), parameter(2, 1, right), *squares, last], [left, right], left)


# ---- without the library


def test_a_library_that_is_not_there_is_an_input_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(InputError, match=r"TPU_LIBRARY_PATH=.*libtpu.so is not a file"):
        libtpu.find()


def test_without_libtpu_one_is_told_how_to_install_it(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(libtpu, "INSTALLED", Path("not there"))
    monkeypatch.setattr(libtpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"`make compile` installs it"):
        libtpu.find()


def test_the_package_is_found(monkeypatch, tmp_path):
    package = tmp_path / "libtpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "libtpu.so").touch()
    (tmp_path / "libtpu-9.8.7.dist-info").mkdir()
    (tmp_path / "libtpu-9.8.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: libtpu\nVersion: 9.8.7\n"
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(libtpu, "INSTALLED", tmp_path / "not there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    assert libtpu.find() == package / "libtpu.so"
    assert libtpu.version() == "9.8.7"


@pytest.mark.parametrize("name", ["v5e", "v5e:0x0", "v5e:3x5", "v9:2x2", "v5litepod-8", ""])
def test_an_unknown_topology_lists_the_known_ones(name):
    with pytest.raises(InputError, match=r"is not known; the known ones are: .*v5e: 1x1, 2x2.*TPU7x: 1x1x1"):
        libtpu.Topology(name)


def test_the_options_are_those_of_a_program_for_all_devices():
    assignment = [number(1, 1), number(2, 3), *(message(3, packed(1, [device])) for device in (3, 4, 5))]
    build = [number(1, -1), number(4, 1), number(5, 3), number(6, 1), message(9, *assignment), packed(12, [1])]
    assert libtpu.compile_options([3, 4, 5], effort_level=9) == message(3, *build, number(24, 9))
    assert libtpu.compile_options([3, 4, 5], effort_level=0) == message(3, *build)


def test_what_must_fit_counts_an_output_in_an_argument_once():
    memory = libtpu.Memory(
        argument=1000, output=700, alias=600, temp=50, generated_code=7, peak=1100, peak_reported=True
    )
    assert memory.needed == 1000 + 100 + 50 + 7


REPORT_21 = """XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33.54G of 15.75G hbm. \
Exceeded hbm capacity by 17.80G.

Total hbm usage >= 33.80G:
    reserved        258.00M
    program          33.54G
    arguments            0B

Program hbm requirement 33.54G:
    HLO temp         33.54G (99.9% utilization: Unpadded (33.53G) Padded (33.54G), 0.0% fragmentation (40.0K))

  Largest program allocations in hbm:

  1. Size: 512.50M
     Operator: op_type="dot" op_name="step/y" source_file="/a/model.py" source_line=4
     Shape: bf16[60000,4000]{1,0:T(8,128)(2,1)}
     Unpadded size: 6.71G
     XLA label: fusion.1 = fusion(fusion), kind=kOutput, calls=fused_computation.1
     Allocation type: HLO temp
     ==========================

  2. Size: 6.71G
     Shape: bf16[60000,60000]{1,0:T(8,128)(2,1)}
     Unpadded size: 6.71G
     Allocation type: HLO temp
     ==========================
"""
REPORT_51 = """E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries \
(26.92G) exceeds available HBM (15.75G). HLO module: m.
See https://openxla.org/xla/errors/error_1000 for more details.

E1121 18:04:08.080245   12512 deepsea_compiler_base.cc:3563] XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 26.92G of 15.75G hbm. Exceeded hbm capacity by 11.17G. HLO module: m. Memory usage report:

Memory Space: default (color=0)
Total bytes: 28907536384 (26.92GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       512B(  0%);       512B;            0;                1; (bf16[120000,128], bf16[120000,128], u32[])
   26.84GiB(100%);   26.84GiB;        16384;                1; 2×bf16[120000,120000]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   29.30MiB(100%);   29.30MiB;            0;                1; bf16[120000,128]


Memory Space: vmem (color=1)
Total bytes: 61440000 (58.59MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   29.30MiB( 50%);   29.30MiB;            0;                1; bf16[99,128]
"""


def test_an_out_of_memory_report_of_libtpu_21_is_understood():
    needed, allocations = libtpu.parse_out_of_memory(REPORT_21)
    assert needed == round(33.54 * 2**30)
    assert allocations == [
        libtpu.Allocation(round(6.71 * 2**30), "bf16[60000,60000]{1,0:T(8,128)(2,1)}"),
        libtpu.Allocation(round(512.5 * 2**20), "bf16[60000,4000]{1,0:T(8,128)(2,1)}", "step/y", "/a/model.py:4"),
    ]


def test_an_out_of_memory_report_of_libtpu_51_is_understood():
    needed, allocations = libtpu.parse_out_of_memory(REPORT_51)
    assert needed == 28907536384
    assert [(each.bytes, each.shape) for each in allocations] == [
        (round(26.84 * 2**30), "2×bf16[120000,120000]"),
        (round(29.30 * 2**20), "bf16[120000,128]"),
        (512, "(bf16[120000,128], bf16[120000,128], u32[])"),
    ]


def test_the_report_without_its_log_still_tells_how_much():
    assert libtpu.parse_out_of_memory(REPORT_51[: REPORT_51.index("E1121")]) == (round(26.92 * 2**30), [])


def test_a_single_buffer_larger_than_the_memory_is_understood():
    report = (
        "Allocation (size=28815360000) would exceed memory (size=17179869184) :: #allocation6 [shape = "
        "'bf16[120000,120000]{1,0:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of fusion.2@{}']"
    )
    shape = "bf16[120000,120000]{1,0:T(8,128)(2,1)}"
    assert libtpu.parse_out_of_memory(report) == (28815360000, [libtpu.Allocation(28815360000, shape)])


def test_too_little_of_another_memory_is_not_about_hbm():
    text = "Ran out of memory in memory space vmem. Used 150.00M of 128.00M vmem. Exceeded vmem capacity by 22.00M."
    assert libtpu.parse_out_of_memory(text) is None


# ---- with the library


@needs_libtpu
def test_the_library_tells_its_version():
    assert libtpu.version()
    assert libtpu.api_version() >= (0, 72)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("v2:2x2", "TPU v2", 8),
        ("v3:1x1", "TPU v3", 2),
        ("v4:2x2x1", "TPU v4", 4),
        ("v4:1x1x1", "TPU v4", 1),
        ("v5e:1x1", "TPU v5 lite", 1),
        ("v5e:16x16", "TPU v5 lite", 256),
        ("v5p:2x2x1", "TPU v5", 4),
        ("V6E:2x4", "TPU v6 lite", 8),
    ],
)
def test_topologies(name, kind, devices):
    with libtpu.Topology(name) as topology:
        assert (topology.kind, topology.num_devices) == (kind, devices)
        assert topology.name == name.lower()
        assert topology.generation == name.lower().split(":")[0]
        assert topology.device_ids == list(range(devices))
        # The library's own figure; a tenth of a MiB of v5e's is kept for a host of several chips.
        assert topology.hbm_bytes == pytest.approx(libtpu.GENERATIONS[topology.generation].hbm_bytes, abs=2**20)


@needs_libtpu
def test_tpu7x_or_a_word_that_this_libtpu_is_too_old():
    try:
        with libtpu.Topology("tpu7x:2x2x1") as topology:
            assert (topology.name, topology.kind, topology.num_devices) == ("TPU7x:2x2x1", "TPU7x", 8)
    except InputError as error:
        assert "is not known to libtpu" in str(error)


@needs_libtpu
@pytest.mark.parametrize("effort", ["fast", "full"])
def test_a_matmul_is_compiled(chip, effort):
    with chip.compile(matmul(512, 256, 1024), effort) as compiled:
        memory, cost = compiled.memory, compiled.cost
        module = hlo.parse(compiled.optimized)
    assert memory.argument == 2 * (512 * 256 + 256 * 1024)
    assert memory.output == 2 * 512 * 1024
    assert memory.peak_reported
    assert memory.peak >= memory.argument + memory.output
    assert memory.needed == memory.argument + memory.output + memory.temp + memory.generated_code
    assert cost.flops == 2 * 512 * 256 * 1024
    assert cost.bytes_accessed >= memory.argument + memory.output
    assert [(each.lhs, each.flops) for each in analysis.dots(module)] == [("bf16", cost.flops)]
    assert analysis.entry_cycles(module).total > 0
    assert analysis.longest(module, 1)[0].instruction.source == "model.py:3"


@needs_libtpu
def test_what_is_closed_is_freed_once(monkeypatch):
    topology = libtpu.Topology("v5e:1x1")
    compiled = topology.compile(matmul(8, 8, 8), "fast")
    topology.close()
    assert compiled.cost.flops == 1024  # a program needs its topology no more
    called = []
    call = compiled.library.call
    monkeypatch.setattr(compiled.library, "call", lambda name, arguments: called.append(name) or call(name, arguments))
    compiled.close()
    with pytest.raises(ValueError, match="this Program is closed"):
        _ = compiled.optimized
    with pytest.raises(ValueError, match="this Topology is closed"):
        topology.compile(matmul(8, 8, 8), "fast")
    compiled.close()
    topology.close()
    assert called == ["Executable_Destroy"]


@needs_libtpu
def test_a_sharded_step_has_one_all_reduce_and_keeps_its_donor(host):
    mesh = {"data": host.num_devices}
    shardings = {0: hlo.op_sharding(("data", None), mesh), 1: hlo.op_sharding((None, None), mesh)}
    module = hlo.with_buffer_donors(hlo.with_parameter_shardings(train_step(1024, 256, 512), shardings), [1])
    with host.compile(module, "fast") as compiled:
        found, memory = hlo.parse(compiled.optimized), compiled.memory
    assert found.num_partitions == 8
    assert [each.shape.text for each in found.parameters] == ["bf16[128,256]", "f32[256,512]"]
    assert [hlo.describe_sharding(each.sharding) for each in found.parameters] == [
        "devices=[8,1]0,1,2,3,4,5,6,7",
        "replicated",
    ]
    (only,) = analysis.collectives(found)
    assert (only.kind, only.bytes, only.group_size) == ("all-reduce", 2 * 256 * 512, 8)
    assert (only.op_name, only.source) == ("step/dot", "model.py:5")
    assert analysis.donated(found) == {1}
    assert found.input_output_alias == [(0, 1)]
    assert memory.alias == 4 * 256 * 512


@needs_libtpu
def test_a_step_with_sharded_weights_gathers_and_scatters(host):
    mesh = {"data": host.num_devices}
    shardings = {number: hlo.op_sharding(("data", None), mesh) for number in (0, 1)}
    with host.compile(hlo.with_parameter_shardings(train_step(1024, 256, 512), shardings), "fast") as compiled:
        found = {each.kind: each for each in analysis.collectives(hlo.parse(compiled.optimized))}
    whole = 2 * 256 * 512
    assert set(found) == {"all-gather", "reduce-scatter"}
    assert (found["all-gather"].bytes, found["all-gather"].result_bytes) == (whole // 8, whole)
    assert (found["reduce-scatter"].bytes, found["reduce-scatter"].result_bytes) == (whole, whole // 8)


@needs_libtpu
def test_out_of_memory_tells_what_takes_it(chip, capfd):
    with pytest.raises(libtpu.OutOfMemory) as caught:
        chip.compile(chain(60_000), "fast")
    error = caught.value
    square = 2 * 60_000**2
    assert isinstance(error, InputError)
    assert error.capacity == chip.hbm_bytes
    assert error.needed > 4 * square
    assert "GiB per device, a device of v5e:1x1 has 15.75 GiB" in str(error)
    largest = error.allocations[0]
    assert largest.bytes == pytest.approx(square, rel=0.01)
    assert "bf16[60000,60000]" in largest.shape
    assert largest.source.startswith("model.py:") or ("step/dot", "model.py:3") in largest.candidates
    assert "Used" in error.report
    output = capfd.readouterr()
    assert output.err == "" and output.out == ""


@needs_libtpu
def test_arguments_and_results_count_too(chip):
    with pytest.raises(libtpu.OutOfMemory) as caught:
        chip.compile(matmul(100_000, 128, 100_000), "fast")
    assert caught.value.needed >= 2 * 100_000**2
    assert "bf16[100000,100000]" in caught.value.allocations[0].shape


@needs_libtpu
def test_what_is_not_a_module_is_a_compiler_error(chip):
    with pytest.raises(libtpu.CompilerError, match="INVALID_ARGUMENT") as caught:
        chip.compile(b"not a module", "fast")
    assert caught.value.code == 3
    assert not isinstance(caught.value, InputError)


@needs_libtpu
def test_an_unknown_effort_is_refused(chip):
    with pytest.raises(InputError, match="effort 'high' is not known; use one of: fast, full"):
        chip.compile(matmul(8, 8, 8), "high")


@needs_libtpu
def test_two_processes_compile_at_once():
    script = (
        "from hlo_modules import matmul\nfrom tpu.compiler import libtpu\n"
        "with libtpu.Topology('v5e:1x1') as topology, topology.compile(matmul(8, 8, 8), 'fast') as compiled:\n"
        "    print(compiled.cost.flops)\n"
        "    input()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) for _ in range(2)
    ]
    # Both have compiled before either may go on.
    lines = [process.stdout.readline() for process in processes]
    ends = [process.communicate("\n", timeout=60) for process in processes]
    assert lines == ["1024.0\n"] * 2, ends
    assert [process.returncode for process in processes] == [0, 0]


@needs_libtpu
def test_nothing_is_left_in_the_temporary_folder(tmp_path):
    script = (
        "from tpu.compiler import libtpu\nwith libtpu.Topology('v5e:1x1') as topology:\n    print(topology.num_devices)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout == "1\n" and done.stderr == ""
    assert list(tmp_path.iterdir()) == []
