"""tpu/compiler/libtpu.py: what it needs no library for, and with libtpu the compilation of tiny
modules."""

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


# Where the library is


def no_package(monkeypatch) -> None:
    """Hides the package libtpu of this environment."""
    monkeypatch.setattr(libtpu.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def versions(tmp_path, monkeypatch) -> Path:
    """The folder, still empty, of the versions that `make compile` installs."""
    folder = tmp_path / "versions"
    monkeypatch.setattr(libtpu, "FOLDER", folder)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The library of a package libtpu of version 9.8.7."""
    information = tmp_path / "libtpu-9.8.7.dist-info"
    library = tmp_path / "libtpu/libtpu.so"
    for file in (tmp_path / "libtpu/__init__.py", library, information / "METADATA"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    metadata = "Metadata-Version: 2.1\nName: libtpu\nVersion: 9.8.7\n"
    (information / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    return library


def test_a_library_that_is_missing_is_refused(versions, monkeypatch):
    no_package(monkeypatch)
    with pytest.raises(InputError, match=r"`make .libtpu/0.0.21/.installed` installs it"):
        libtpu.find()


def test_the_package_is_found(versions, package):
    assert libtpu.find() == package
    assert libtpu.version() == "9.8.7"


def test_an_installed_version_comes_before_the_package(versions, package):
    """As `make compile` installs it."""
    assert libtpu.find() == package
    ours = versions / "0.0.21/libtpu/libtpu.so"
    ours.parent.mkdir(parents=True)
    ours.touch()
    assert libtpu.find() == ours
    assert libtpu.installed("0.0.21") == ours


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.0.51", "`make .libtpu/0.0.51/.installed` installs it"),
        ("newest", "is no version of"),
    ],
)
def test_a_version_that_is_not_installed_is_refused(version, message, versions, package):
    with pytest.raises(InputError, match=message):
        libtpu.installed(version)


def test_a_library_on_its_own_is_named_by_its_path(versions, package, tmp_path):
    alone = tmp_path / "on/its own/libtpu.so"
    assert libtpu.version(alone) == str(alone)


def test_a_library_is_named_where_no_other_is_installed(versions, monkeypatch, tmp_path):
    no_package(monkeypatch)
    alone = tmp_path / "on/its own/libtpu.so"
    assert libtpu.version(alone) == str(alone)


def test_a_variable_that_names_no_library_is_refused(versions, package, monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(InputError, match=r"TPU_LIBRARY_PATH=.*libtpu.so is not a file"):
        libtpu.find()


@pytest.mark.parametrize(
    ("share", "message"),
    [(0.5, "was cut off: it has"), (1, "undefined symbol: GetPjrtApi")],
)
def test_a_broken_library_is_refused_before_it_ends_the_process(share, message, tmp_path):
    maps = Path("/proc/self/maps").read_text()
    another_library = re.search(r"/\S+/libm[.-]\S*", maps)[0]
    content = Path(another_library).read_bytes()
    (tmp_path / "libtpu.so").write_bytes(content[: int(len(content) * share)])
    code = (
        "import sys; from pathlib import Path; from tpu.compiler import pjrt; "
        "pjrt.Library(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "libtpu.so")]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 1, "no signal"
    last = result.stderr.splitlines()[-1]
    assert last.startswith("errors.InputError")
    assert message in last


# What needs no library


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("v5e:2x4", (1, "v5e:2x4")),
        ("1xv5e:2x4", (1, "v5e:2x4")),
        ("2xv5e:2x4", (2, "v5e:2x4")),
        ("128XTPU7X:2x2x1", (128, "TPU7x:2x2x1")),
    ],
)
def test_a_topology_has_its_number_of_slices_before_it(name, found):
    assert libtpu.split_name(name) == found


@pytest.mark.parametrize(
    "name", ["0xv5e:2x4", "2v5e:2x4", "-1xv5e:2x4", "2x2xv5e:2x4", "٢xv5e:2x4"]
)
def test_a_wrong_number_of_slices_is_refused_with_an_example(name):
    with pytest.raises(InputError, match="is not known.*several slices.* such as 2xv5e:2x4"):
        libtpu.Topology(name)


def test_a_generation_that_is_never_joined_is_refused():
    with pytest.raises(InputError, match="2xv3:2x2.* 2 slices.*v4, v5e.*give v3:2x2"):
        libtpu.Topology("2xv3:2x2")


@pytest.mark.parametrize("name", ["v5e", "v5e:0x0", "v5e:3x5", "v9:2x2", "v5litepod-8", ""])
def test_an_unknown_topology_lists_the_known_ones(name):
    message = r"is not known; the known ones are: .*v5e: 1x1, 2x2.*TPU7x: 1x1x1"
    with pytest.raises(InputError, match=message):
        libtpu.Topology(name)


def test_options_are_those_of_a_program_for_all_devices():
    assignment = [m.number(1, 1), m.number(2, 3)]  # replicas and partitions
    for device in (3, 4, 5):
        assignment.append(m.message(3, m.packed(1, [device])))
    build = [
        m.number(1, -1),
        m.number(4, 1),
        m.number(5, 3),
        m.number(6, 1),
        m.message(9, *assignment),
        m.packed(12, [1]),
    ]
    fast = libtpu.compile_options([3, 4, 5], effort_level=9)
    assert fast == m.message(3, *build, m.number(24, 9))
    full = libtpu.compile_options([3, 4, 5], effort_level=0)
    assert full == m.message(3, *build)


REPORT_21 = """XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 33.54G of 15.75G hbm. Exceeded hbm capacity by 17.80G.

  Largest program allocations in hbm:

  1. Size: 512.50M
     Operator: op_type="dot" op_name="step/y" source_file="/a/model.py" source_line=4
     Shape: bf16[60000,4000]{1,0:T(8,128)(2,1)}
     Unpadded size: 6.71G

  2. Size: 6.71G
     Shape: bf16[60000,60000]{1,0:T(8,128)(2,1)}
"""
REPORT_51 = """E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required \
for HLO temporaries (26.92G) exceeds available HBM (15.75G). HLO module: m.

E1121 18:04:08.080245   12512 deepsea_compiler_base.cc:3563] XLA:TPU compile permanent error. \
Ran out of memory in memory space hbm. Used 26.92G of 15.75G hbm. \
Exceeded hbm capacity by 11.17G. HLO module: m. Memory usage report:

Memory Space: default (color=0)
Total bytes: 28907536384 (26.92GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
       512B(  0%);       512B;            0;                1; \
(bf16[120000,128], bf16[120000,128], u32[])
   26.84GiB(100%);   26.84GiB;        16384;                1; 2×bf16[120000,120000]

Memory Space: vmem (color=1)
Total bytes: 61440000 (58.59MiB)
   29.30MiB( 50%);   29.30MiB;            0;                1; bf16[99,128]
"""
SINGLE = """Allocation (size=28815360000) would exceed memory (size=17179869184) :: #allocation6 \
[shape = 'bf16[120000,120000]{1,0:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, \
tag = 'output of fusion.2@{}']"""
VMEM = (
    "Ran out of memory in memory space vmem. Used 150.00M of 128.00M vmem. "
    "Exceeded vmem capacity by 22.00M."
)
TILES = "{1,0:T(8,128)(2,1)}"


def allocation(size: float, shape: str, op_name: str = "", source: str = "") -> libtpu.Allocation:
    return libtpu.Allocation(round(size), shape, op_name, source)


@pytest.mark.parametrize(
    ("report", "needed", "allocations"),
    [
        (
            REPORT_21,
            33.54 * 2**30,
            [
                allocation(6.71 * 2**30, f"bf16[60000,60000]{TILES}"),
                allocation(
                    512.5 * 2**20, f"bf16[60000,4000]{TILES}", "step/y", source="/a/model.py:4"
                ),
            ],
        ),
        (
            REPORT_51,
            28907536384,
            [
                allocation(26.84 * 2**30, "2×bf16[120000,120000]"),
                allocation(512, "(bf16[120000,128], bf16[120000,128], u32[])"),
            ],
        ),
        (REPORT_51[: REPORT_51.index("E1121")], 26.92 * 2**30, []),
        (SINGLE, 28815360000, [allocation(28815360000, f"bf16[120000,120000]{TILES}")]),
    ],
    ids=["0.0.21", "0.0.51", "0.0.51 without its log", "a single allocation"],
)
def test_an_out_of_memory_report_is_understood(report, needed, allocations):
    assert libtpu.parse_out_of_memory(report) == (round(needed), allocations)


def test_a_report_of_another_memory_is_left_alone():
    assert libtpu.parse_out_of_memory(VMEM) is None


TOPOLOGIES = [  # name, kind, devices
    ("v2:2x2", "TPU v2", 8),
    ("v3:1x1", "TPU v3", 2),
    ("v4:2x2x1", "TPU v4", 4),
    ("v4:1x1x1", "TPU v4", 1),
    ("v5e:1x1", "TPU v5 lite", 1),
    ("v5e:16x16", "TPU v5 lite", 256),
    ("v5p:2x2x1", "TPU v5", 4),
    ("V6E:2x4", "TPU v6 lite", 8),
    ("tpu7x:2x2x1", "TPU7x", 8),
]


def test_embedding_tables_reckon_with_the_compilers_memory():
    kinds = {name.partition(":")[0].lower(): kind for name, kind, _ in TOPOLOGIES}
    given = {}
    for name, generation in libtpu.GENERATIONS.items():
        given[kinds[name.lower()]] = round(generation.hbm_bytes / libtpu.GIB, 2)
    assert given == USABLE_GIB


# What needs libtpu


@m.needs_libtpu
@pytest.mark.parametrize(("name", "kind", "devices"), TOPOLOGIES)
def test_topologies(name, kind, devices):
    assert libtpu.version()
    assert libtpu.api_version() >= (0, 72)
    try:
        topology = libtpu.Topology(name)
    except InputError as error:  # 0.0.21 is too old for the last one
        assert name == "tpu7x:2x2x1"
        assert "is not known to libtpu" in str(error)
        return

    with topology:
        assert topology.kind == kind
        assert topology.num_devices == devices
        assert topology.device_ids == list(range(devices))
        assert topology.name.lower() == name.lower()
        assert topology.name.startswith(topology.generation)
        # The library's own figure; a tenth of a MiB of v5e's is kept for a host of several chips.
        known = libtpu.GENERATIONS[topology.generation].hbm_bytes
        assert topology.hbm_bytes == pytest.approx(known, abs=2**20)


@m.needs_libtpu
@pytest.mark.parametrize(
    ("name", "slices", "per_slice"), [("2xV5E:2x2", 2, 4), ("3xv4:1x1x1", 3, 1)]
)
def test_devices_of_several_slices_follow_each_other(name, slices, per_slice):
    with libtpu.Topology(name) as topology:
        assert topology.name == name.lower()
        assert topology.slices == slices
        assert topology.num_devices == slices * per_slice
        # libtpu numbers those of the first slice from 100,000 on, of the second from 200,000.
        of_slice = [number // 100_000 for number in topology.device_ids]
        assert of_slice == sorted([*range(1, slices + 1)] * per_slice)


@m.needs_libtpu
@pytest.mark.parametrize("effort", ["fast", "full"])
def test_a_matmul_is_compiled(chip, effort):
    with chip.compile(m.matmul(512, 256, 1024), effort) as compiled:
        memory = compiled.memory
        cost = compiled.cost
        found = hlo.parse(compiled.optimized)

    assert memory.argument == 2 * (512 * 256 + 256 * 1024)
    assert memory.output == 2 * 512 * 1024
    assert memory.peak_reported
    assert memory.peak >= memory.argument + memory.output
    assert cost.flops == 2 * 512 * 256 * 1024
    assert cost.bytes_accessed >= memory.argument + memory.output
    assert [(each.lhs, each.flops) for each in analysis.dots(found)] == [("bf16", cost.flops)]
    assert analysis.entry_cycles(found).total > 0
    assert analysis.longest(found, 1)[0].instruction.source == "model.py:3"


@m.needs_libtpu
def test_a_program_outlives_its_topology():
    topology = libtpu.Topology("v5e:1x1")
    compiled = topology.compile(m.matmul(8, 8, 8), "fast")
    topology.close()
    assert compiled.cost.flops == 1024
    compiled.close()


@m.needs_libtpu
def test_what_is_closed_is_freed_once(monkeypatch):
    topology = libtpu.Topology("v5e:1x1")
    compiled = topology.compile(m.matmul(8, 8, 8), "fast")
    topology.close()
    called = []
    call = compiled.library.call

    def recorded(name, arguments):
        called.append(name)
        return call(name, arguments)

    monkeypatch.setattr(compiled.library, "call", recorded)
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
    shardings = {
        0: hlo.op_sharding(("data", None), mesh),
        1: hlo.op_sharding((None, None), mesh),
    }
    step = hlo.with_parameter_shardings(m.train_step(1024, 256, 512), shardings)
    with host.compile(hlo.with_buffer_donors(step, [1]), "fast") as compiled:
        found = hlo.parse(compiled.optimized)
        memory = compiled.memory

    assert found.num_partitions == 8
    parameters = []
    for each in found.parameters:
        parameters.append((each.shape.text, hlo.describe_sharding(each.sharding)))
    assert parameters == [
        ("bf16[128,256]", "devices=[8,1]0,1,2,3,4,5,6,7"),
        ("f32[256,512]", "replicated"),
    ]

    (only,) = analysis.collectives(found)
    assert only.kind == "all-reduce"
    assert only.bytes == 2 * 256 * 512
    assert only.group_size == 8
    assert only.op_name == "step/dot"
    assert only.source == "model.py:5"

    assert analysis.donated(found) == {1}
    assert found.input_output_alias == [(0, 1)]
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
    """Returns a program of [size, 128] x [128, size], squared and so on.

    It has several [size, size] temporaries at once, and small in- and outputs.
    """
    left = f"bf16[{size},128]"
    right = f"bf16[128,{size}]"
    square = f"bf16[{size},{size}]"
    matmul = m.dot_dimensions(1, 0)
    operands = [(1, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 3), (8, 4)]

    instructions = [m.arg(1, 0, left), m.arg(2, 1, right)]
    for number, pair in enumerate(operands, start=3):
        instructions.append(m.op(number, "dot", square, pair, matmul))
    instructions.append(m.op(10, "dot", left, (9, 1), matmul))
    return m.program(instructions, [left, right], left)


@m.needs_libtpu
def test_out_of_memory_says_what_takes_it(chip, capfd):
    sentence = "per device, a device of v5e:1x1 has 15.75 GiB; use a smaller"
    with pytest.raises(libtpu.OutOfMemory, match=sentence) as caught:
        chip.compile(chain(60_000), "fast")

    error = caught.value
    square = 2 * 60_000**2
    assert isinstance(error, InputError)
    assert error.capacity == chip.hbm_bytes
    # 4 where no test of this process has asked for the fusions before libtpu was loaded
    assert error.needed > 3 * square
    largest = error.allocations[0]
    assert largest.bytes == pytest.approx(square, rel=0.01)
    assert "bf16[60000,60000]" in largest.shape
    candidate = ("step/dot", "model.py:3")
    assert largest.source.startswith("model.py:") or candidate in largest.candidates
    assert "Used" in error.report
    assert capfd.readouterr() == ("", "")


@m.needs_libtpu
def test_arguments_and_results_count_in_out_of_memory(chip, capfd):
    with pytest.raises(libtpu.OutOfMemory) as caught:
        chip.compile(m.matmul(100_000, 128, 100_000), "fast")
    assert caught.value.needed >= 2 * 100_000**2
    assert "bf16[100000,100000]" in caught.value.allocations[0].shape
    assert capfd.readouterr() == ("", "")


@m.needs_libtpu
@pytest.mark.parametrize("version", libtpu.VERSIONS)
def test_a_process_apart_compiles_as_this_one_does(version):
    library = libtpu.installed(version)
    compiled = apart.compile(m.matmul(512, 256, 1024), "v5e:1x1", "fast", library)
    assert compiled.cost.flops == 2 * 512 * 256 * 1024
    assert compiled.memory.argument == 2 * (512 * 256 + 256 * 1024)
    assert hlo.parse(compiled.optimized).parameters


@m.needs_libtpu
@pytest.mark.parametrize("version", libtpu.VERSIONS)
def test_a_process_apart_passes_its_errors_on(version):
    library = libtpu.installed(version)

    with pytest.raises(libtpu.OutOfMemory) as caught:
        apart.compile(chain(60_000), "v5e:1x1", "fast", library)
    square = 2 * 60_000**2
    assert caught.value.needed > 3 * square
    assert caught.value.capacity < 2**34
    assert caught.value.allocations[0].bytes == pytest.approx(square, rel=0.01)

    with pytest.raises(libtpu.CompilerError, match="INVALID_ARGUMENT"):
        apart.compile(b"not a module", "v5e:1x1", "fast", library)
    with pytest.raises(InputError, match="topology 'v9:1x1' is not known"):
        apart.compile(m.matmul(512, 256, 1024), "v9:1x1", "fast", library)


@m.needs_libtpu
def test_what_is_not_a_module_is_refused(chip):
    with pytest.raises(libtpu.CompilerError, match="INVALID_ARGUMENT") as caught:
        chip.compile(b"not a module", "fast")
    assert caught.value.code == 3
    assert not isinstance(caught.value, InputError)


@m.needs_libtpu
def test_an_unknown_effort_is_refused(chip):
    with pytest.raises(InputError, match="effort 'high' is not known; use one of: fast, full"):
        chip.compile(m.matmul(8, 8, 8), "high")


COMPILE_AND_WAIT = """
import hlo_modules as m
from tpu.compiler import libtpu

with (
    libtpu.Topology('v5e:1x1') as topology,
    topology.compile(m.matmul(8, 8, 8), 'fast') as compiled,
):
    print(compiled.cost.flops, flush=True)
    input()
"""


@m.needs_libtpu
def test_two_processes_compile_at_once_and_leave_no_files(tmp_path):
    environment = dict(os.environ)
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    environment["TMPDIR"] = str(tmp_path)
    processes = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILE_AND_WAIT],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)

    # Both have compiled before either may go on.
    lines = [process.stdout.readline() for process in processes]
    ends = [process.communicate("\n", timeout=60) for process in processes]

    assert lines == ["1024.0\n"] * 2, ends
    assert ends == [("", "")] * 2
    assert [process.returncode for process in processes] == [0, 0]
    assert list(tmp_path.iterdir()) == []
