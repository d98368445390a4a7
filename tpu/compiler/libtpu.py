"""Compiles for TPUs without a TPU: libtpu's compiler through its C API (pjrt.py). Knows nothing of
torch.

    from tpu.compiler import libtpu
    with libtpu.Topology("v5e:2x4") as topology:
        with topology.compile(module, effort="full") as program:  # bytes of an HloModuleProto
            program.memory.peak, program.cost.flops, program.optimized

find() -> Path
    libtpu.so: $TPU_LIBRARY_PATH, else of the version ON_TPU_VMS, as `make compile` installs it,
    else of the installed package `libtpu`; InputError if none of them is there
installed(version) -> Path
    the libtpu.so of a version, as `make compile` installs it; InputError if it is not there
version(library) -> str
    a library's version, and api_version() -> (major, minor) of find()'s C API
GENERATIONS
    {"v5e": Generation(shapes, usable HBM, peak FLOP/s, bytes/s, clock), ...}, all per device
TOPOLOGIES
    the names of one slice that Topology takes: "v5e:1x1", "v5e:2x4", ..., "v4:2x2x1", "TPU7x:2x2x1"
split_name(name) -> (slices, the topology of each)
    of a name that Topology takes: "v5e:2x4", or "2xv5e:2x4" for two slices; InputError for another
Topology(name)
    .name .generation .slices .kind .device_ids .num_devices .hbm_bytes, .compile(); InputError for
    another name; a context manager (.close())
Topology.compile(module, effort) -> Program
    .memory, .cost, .optimized (bytes of the optimized HloModuleProto), .close()
OutOfMemory(InputError)
    .needed, .capacity (bytes per device), .allocations (the largest first), .report (the text)
CompilerError
    .code, .status ("INVALID_ARGUMENT"), and the compiler's text; a bug, not an input error

A device is what JAX and torch_xla see as one: a TensorCore on v2, v3 and TPU7x (two per chip), a
chip on the others. The library is loaded on first use. It opens no device and no connection, and
several processes may use it at once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from tpu.compiler import analysis, hlo, pjrt
from tpu.compiler.hlo_pb2 import (
    CompileOptionsProto,
    DeviceAssignmentProto,
    ExecutableBuildOptionsProto,
    HloModuleProtoWithConfig,
)
from tpu.compiler.pjrt import CompilerError

GIB = 2**30
# Into which `make compile` installs, a folder per version.
FOLDER = Path(__file__).resolve().parents[2] / ".libtpu"
# What torch_xla 2.9.0 names as its own, and so what a TPU VM compiles with: requirements-tpu.txt.
ON_TPU_VMS = "0.0.21"
NEWEST = "0.0.51"  # requirements-compile.txt
VERSIONS = (ON_TPU_VMS, NEWEST)  # whose flags and figures are known


@dataclass(frozen=True)
class Generation:
    """What is known of a generation of TPUs; amounts are per device.

    Attributes:
        hbm_bytes: what a program can use: libtpu 0.0.51's `device_memory_bytes_limit` of the
            device, which is also the capacity in its out-of-memory messages.
        peak_flops, hbm_bytes_per_second: for bf16, from Google's documentation,
            docs.cloud.google.com/tpu/docs/{v3, v4, v5e, v5p, v6e, tpu7x}, divided by the devices of
            a chip. No page for v2 was found; its figures are from Jouppi et al., "A Domain-Specific
            Supercomputer for Training Deep Neural Networks", CACM 63(7), 2020.
        clock_hz: clock of the TensorCore, which turns the compiler's cycles into seconds; None
            where it is unpublished.
        chip_config: the name of the configuration of its chips; None for the library's default.
    """

    shapes: tuple[str, ...]
    devices_per_chip: int
    hbm_bytes: int
    peak_flops: float
    hbm_bytes_per_second: float
    clock_hz: float | None
    chip_config: str | None = None


SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SHAPES_V2 = ("1x1", "2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
SHAPES_3D = (
    "1x1x1",
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
)

# Clocks. v2 and v3: the paper above. v4: Jouppi et al., "TPU v4: An Optically Reconfigurable
# Supercomputer", ISCA 2023. v5e and v5p: the peak divided by what the documented matrix units, 4
# and 8 of 128 x 128, do per cycle: 1.503 and 1.751 GHz; the same division gives 0.70, 0.94 and 1.05
# GHz for v2 to v4. It fails for v6e: its two documented units of 256 x 256 would have to run at 3.5
# GHz, and in libtpu's estimate a large matmul does more flops per cycle (369,000) than they can
# (262,144). The cost model of libtpu 0.0.51 has v5p at 394 TFLOP/s (1.5 GHz) and a device of TPU7x
# at 996 TFLOP/s; for v5e and v6e it agrees with this table.
GENERATIONS = {
    "v2": Generation(
        shapes=SHAPES_V2,
        devices_per_chip=2,
        hbm_bytes=8_034_172_928,
        peak_flops=46e12 / 2,
        hbm_bytes_per_second=700e9 / 2,
        clock_hz=0.7e9,
    ),
    "v3": Generation(
        shapes=(*SHAPES_V2, "16x32", "32x32"),
        devices_per_chip=2,
        hbm_bytes=16_624_107_520,
        peak_flops=123e12 / 2,
        hbm_bytes_per_second=900e9 / 2,
        clock_hz=0.94e9,
    ),
    "v4": Generation(
        shapes=SHAPES_3D,
        devices_per_chip=1,
        hbm_bytes=33_014_413_312,
        peak_flops=275e12,
        hbm_bytes_per_second=1200e9,
        clock_hz=1.05e9,
        # Without it the two TensorCores of a v4 chip are two devices; on Cloud TPU they are one.
        chip_config="megacore",
    ),
    "v5e": Generation(
        shapes=SHAPES_2D,
        devices_per_chip=1,
        hbm_bytes=16_909_336_064,
        peak_flops=197e12,
        hbm_bytes_per_second=819e9,
        clock_hz=1.5e9,
    ),
    "v5p": Generation(
        shapes=SHAPES_3D,
        devices_per_chip=1,
        hbm_bytes=102_786_660_352,
        peak_flops=459e12,
        hbm_bytes_per_second=2765e9,
        clock_hz=1.75e9,
    ),
    "v6e": Generation(
        shapes=SHAPES_2D,
        devices_per_chip=1,
        hbm_bytes=33_546_042_880,
        peak_flops=918e12,
        hbm_bytes_per_second=1638e9,
        clock_hz=None,
    ),
    "TPU7x": Generation(
        shapes=SHAPES_3D,
        devices_per_chip=2,
        hbm_bytes=101_724_453_888,
        peak_flops=2307e12 / 2,
        hbm_bytes_per_second=7380e9 / 2,
        clock_hz=None,
    ),
}


def _topology_names() -> tuple[str, ...]:
    names = []
    for name, generation in GENERATIONS.items():
        for shape in generation.shapes:
            names.append(f"{name}:{shape}")
    return tuple(names)


TOPOLOGIES = _topology_names()

# Of which Cloud TPU joins several slices over the data-centre network, "Multislice":
# docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice leaves v3 out, and has no v2.
SEVERAL_SLICES = ("v4", "v5e", "v5p", "v6e", "TPU7x")

# xla.proto, ExecutionOptions.EffortLevel. 9 (level 0) compiles several times faster; its cycles are
# meaningless.
EFFORTS = {"fast": 9, "full": 0}


@dataclass(frozen=True)
class Allocation:
    """One buffer of a program that does not fit; its size is rounded where the compiler rounds.

    Attributes:
        op_name, source: the operation and "file:line"; "" where the compiler does not print them.
            libtpu 0.0.21 prints both, 0.0.51 only size and shape ("2×bf16[60000,60000]" for two
            that share memory).
        candidates: where they are missing, (op_name, source) of up to five operations of the given
            module whose result has this shape, whole or divided among the devices.
    """

    bytes: int
    shape: str
    op_name: str = ""
    source: str = ""
    candidates: tuple[tuple[str, str], ...] = ()


class OutOfMemory(InputError):
    """The program needs more memory than a device has.

    Attributes:
        needed: bytes per device; a lower bound where a single buffer is larger than the memory.
        capacity: bytes per device.
        allocations: the largest buffers, the largest first.
        report: everything that the compiler printed.
    """

    def __init__(
        self,
        topology: str,
        needed: int,
        capacity: int,
        allocations: list[Allocation],
        report: str,
    ):
        self.needed = needed
        self.capacity = capacity
        self.allocations = allocations
        self.report = report
        super().__init__(
            f"out of memory: the program needs {needed / GIB:.2f} GiB per device,"
            f" a device of {topology} has {capacity / GIB:.2f} GiB;"
            " use a smaller batch, more devices or a TPU with more memory"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes per device, with the padding of the layouts.

    Attributes:
        alias: outputs that take over the memory of an argument.
        temp: the one region that holds all temporaries in HBM.
        peak: the compiler's own figure: the sum of live buffers at the worst moment, without the
            code. It can lie below what must fit, since it ignores gaps between buffers, and above
            it, since it counts on-chip memory.
        peak_reported: False where the compiler reports no peak, which then is argument + output -
            alias + temp.
    """

    argument: int
    output: int
    alias: int
    temp: int
    generated_code: int
    peak: int
    peak_reported: bool

    @property
    def needed(self) -> int:
        """What must fit, as the program occupies it while it runs: arguments, outputs, temporaries
        and code."""
        return self.argument + self.output - self.alias + self.temp + self.generated_code


@dataclass(frozen=True)
class Cost:
    """The compiler's count for one device and one run.

    Custom calls and loop bodies are in it as the compiler counts them.
    """

    flops: float
    bytes_accessed: float
    transcendentals: float


# ---- the library ---------------------------------------------------------------------------------


def find() -> Path:
    """Returns the path of libtpu.so. Raises InputError that says how to install it."""
    named = os.environ.get("TPU_LIBRARY_PATH")
    if named:
        if not Path(named).is_file():
            raise InputError(
                f"TPU_LIBRARY_PATH={named} is not a file; it must be a libtpu.so, or be unset"
            )
        return Path(named)

    usual = _install_path(ON_TPU_VMS)
    if usual.is_file():
        return usual

    package = importlib.util.find_spec("libtpu")
    if package is not None and package.origin:
        library = Path(package.origin).parent / "libtpu.so"
        if library.is_file():
            return library

    raise InputError(
        "libtpu is not installed: it holds the TPU compiler;"
        f" `make .libtpu/{ON_TPU_VMS}/.installed` installs it,"
        " or set TPU_LIBRARY_PATH to a libtpu.so"
    )


def _install_path(version: str) -> Path:
    """Returns where `make compile` installs the libtpu.so of a version; it need not be there."""
    return FOLDER / version / "libtpu/libtpu.so"


def installed(version: str) -> Path:
    """Returns the libtpu.so of a version. Raises InputError that says how to install it."""
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise InputError(
            f"{version!r} is no version of libtpu; give one such as {ON_TPU_VMS} or {NEWEST}"
        )
    library = _install_path(version)
    if not library.is_file():
        raise InputError(
            f"libtpu {version} is not installed: `make .libtpu/{version}/.installed` installs it"
        )
    return library


def version(library: Path | None = None) -> str:
    """Returns the version of a library's package, "0.0.21"; for a library on its own, its
    description of itself.

    Args:
        library: default: that of find().
    """
    if library is None:
        library = find()
    library = library.resolve()

    packages = str(library.parent.parent)
    for distribution in importlib.metadata.distributions(path=[packages]):
        name = distribution.metadata["Name"] or ""
        if name.lower() == "libtpu":
            return distribution.version

    try:
        usual = find().resolve()
    except InputError:  # none but this one is there
        usual = None
    if library != usual:
        return str(library)  # a process loads one library only
    with Topology("v5e:2x2") as topology:
        return " ".join(topology.platform_version().split())


def api_version() -> tuple[int, int]:
    """Returns (major, minor) of the library's C API."""
    return _library().api_version


@functools.cache
def _library() -> pjrt.Library:
    return pjrt.Library(find())


# ---- topologies ----------------------------------------------------------------------------------


def split_name(name: str) -> tuple[int, str]:
    """Returns the number of slices of a topology, and the one of TOPOLOGIES that each of them is.

    Args:
        name: "v5e:2x4", "2xv5e:2x4" for two such slices; the generation in upper or lower case
            ("tpu7x:2x2x1").
    Raises:
        InputError: it is no such name.
    """
    count = 1
    slice_name = name
    found = re.fullmatch(r"([1-9][0-9]{0,2})x(\D.*)", name, re.ASCII | re.IGNORECASE)
    if found:
        count = int(found[1])
        slice_name = found[2]

    by_lower_case = {known.lower(): known for known in TOPOLOGIES}
    canonical = by_lower_case.get(slice_name.lower())
    if canonical is None:
        known = _known_topologies()
        raise InputError(
            f"topology {name!r} is not known; the known ones are: {known}; "
            "several slices have their number before it, such as 2xv5e:2x4"
        )
    generation, _, _ = canonical.partition(":")
    if count > 1 and generation not in SEVERAL_SLICES:
        raise InputError(
            f"topology {name!r} has {count} slices, and Cloud TPU joins slices of "
            f"{', '.join(SEVERAL_SLICES)} only; give {canonical}, or another generation"
        )
    return count, canonical


class Topology:
    """Chips that need not be there.

    Attributes:
        name: one of TOPOLOGIES; of several slices their number before it, "2xv5e:2x4".
        slices: how many there are, joined by the data-centre network.
        generation: a key of GENERATIONS, "v5e".
        kind: the library's name for a device, "TPU v5 lite".
        device_ids: ascending, which is the order of torch_xla's meshes, one slice after the other;
            num_devices is their number.
        hbm_bytes: usable memory per device.
    """

    def __init__(self, name: str):
        self.slices, slice_name = split_name(name)
        self.name = slice_name
        if self.slices > 1:
            self.name = f"{self.slices}x{slice_name}"
        self.generation, shape = slice_name.split(":")
        self.specification = GENERATIONS[self.generation]
        self.library = _library()
        self.handle = self._create(slice_name, shape)

        descriptions = self._device_descriptions()
        self.device_ids = sorted(self._device_id(description) for description in descriptions)
        self.num_devices = len(self.device_ids)
        self.kind = self._device_kind(descriptions[0])
        self.hbm_bytes = self._memory_limit(descriptions[0]) or self.specification.hbm_bytes

    def _create(self, slice_name: str, shape: str) -> int:
        """Returns the handle of a new topology."""
        options: dict[str, str | int | list[int]] = {}
        if set(shape.split("x")) == {"1"}:
            # Else a host has 2x2x1 chips, more than there are.
            options["chips_per_host_bounds"] = [1, 1, 1]
        if self.specification.chip_config:
            options["chip_config_name"] = self.specification.chip_config
        if self.slices > 1:
            options["num_slices"] = self.slices
        values, buffers = pjrt.encode_options(options)

        name = slice_name.encode()
        arguments = pjrt.TopologyCreate(
            topology_name=name,
            topology_name_size=len(name),
            create_options=ctypes.addressof(values),
            num_options=len(values),
        )
        try:
            return self.library.call("TopologyDescription_Create", arguments).topology
        except CompilerError as error:
            remedy = "use another topology"
            if version() != NEWEST:
                remedy = f"use LIBTPU_VERSION={NEWEST} (--libtpu {NEWEST}), or another topology"
            raise InputError(
                f"topology {self.name} is not known to libtpu {version()} ({error.text}); {remedy}"
            ) from error
        finally:
            del buffers  # the call is over: nothing reads them any more

    def _device_descriptions(self) -> list[int]:
        """Returns a handle for each device."""
        arguments = pjrt.TopologyGetDeviceDescriptions(topology=self.handle)
        found = self.library.call("TopologyDescription_GetDeviceDescriptions", arguments)
        return [found.descriptions[number] for number in range(found.num_descriptions)]

    def _device_id(self, description: int) -> int:
        arguments = pjrt.DeviceDescriptionId(device_description=description)
        return self.library.call("DeviceDescription_Id", arguments).id

    def _device_kind(self, description: int) -> str:
        arguments = pjrt.DeviceDescriptionKind(device_description=description)
        found = self.library.call("DeviceDescription_Kind", arguments)
        return pjrt.decode(found.device_kind, found.device_kind_size)

    def _memory_limit(self, description: int) -> int | None:
        """Returns the library's own figure; None from 0.0.21."""
        arguments = pjrt.DeviceDescriptionAttributes(device_description=description)
        found = self.library.call("DeviceDescription_Attributes", arguments)
        attributes = pjrt.numbers(found.attributes, found.num_attributes)
        return attributes.get("device_memory_bytes_limit")

    def platform_version(self) -> str:
        """Returns the library's description of itself: several words, with its build date."""
        arguments = pjrt.TopologyPlatformVersion(topology=self.handle)
        found = self.library.call("TopologyDescription_PlatformVersion", arguments)
        return pjrt.decode(found.platform_version, found.platform_version_size)

    def compile(self, module: bytes, effort: str = "full") -> Program:
        """Compiles an HloModuleProto for all devices: SPMD, one replica, one partition per device.

        Args:
            effort: "fast" (memory and collectives are near those of "full", cycles are not) or
                "full".
        Raises:
            OutOfMemory: it does not fit. Also where the compiler accepts a program that needs more
                than a device has: 0.0.21 does not count arguments and outputs.
            CompilerError: anything else.
        """
        if self.handle is None:
            raise ValueError("this Topology is closed")
        if effort not in EFFORTS:
            known = ", ".join(EFFORTS)
            raise InputError(f"effort {effort!r} is not known; use one of: {known}")

        logged = len(self.library.log())
        try:
            program = Program(self, self._compile(module, EFFORTS[effort]))
        except CompilerError as error:
            shortage = self._shortage(error, logged, module)
            if shortage is None:
                raise
            raise shortage from error

        memory = program.memory
        if memory.needed <= self.hbm_bytes:
            return program

        with program:
            buffers = analysis.largest_buffers(hlo.parse(program.optimized))
        allocations = []
        for buffer in buffers:
            shape = str(buffer.shape)
            allocations.append(Allocation(buffer.hbm_bytes, shape, buffer.op_name, buffer.source))
        raise OutOfMemory(self.name, memory.needed, self.hbm_bytes, allocations, str(memory))

    def _shortage(self, error: CompilerError, logged: int, module: bytes) -> OutOfMemory | None:
        """Returns the OutOfMemory that a compiler's refusal means; None where it means something
        else.

        Args:
            logged: length of the log before the compilation.
        """
        if error.status != "RESOURCE_EXHAUSTED":
            return None

        report = error.text
        # 0.0.21 has everything in its message, and again in the log.
        if "Largest program allocations" not in error.text:
            report += "\n\n" + self.library.log()[logged:]
        found = parse_out_of_memory(report)
        if found is None:
            return None

        needed, allocations = found
        allocations = self._with_candidates(allocations, module)
        return OutOfMemory(self.name, needed, self.hbm_bytes, allocations, report)

    def _compile(self, module: bytes, effort_level: int) -> int:
        """Returns the handle of the program."""
        options = compile_options(self.device_ids, effort_level)
        code = ctypes.create_string_buffer(module, len(module))
        format_name = ctypes.create_string_buffer(b"hlo", 3)
        program = pjrt.ProgramCode(
            code=ctypes.addressof(code),
            code_size=len(module),
            format=ctypes.addressof(format_name),
            format_size=3,
        )
        arguments = pjrt.Compile(
            topology=self.handle,
            program=ctypes.pointer(program),
            compile_options=options,
            compile_options_size=len(options),
        )
        return self.library.call("Compile", arguments).executable

    def _with_candidates(self, allocations: list[Allocation], module: bytes) -> list[Allocation]:
        """Returns the allocations; those without an operation have candidates for it."""
        parsed = hlo.parse(module)
        named = []
        for allocation in allocations:
            if not allocation.op_name:
                operations = analysis.with_result(parsed, allocation.shape, self.num_devices)
                # Each once, in order.
                names = dict.fromkeys((each.op_name, each.source) for each in operations)
                allocation = dataclasses.replace(allocation, candidates=tuple(names)[:5])
            named.append(allocation)
        return named

    def close(self) -> None:
        """Frees the library's topology; a second call does nothing."""
        if self.handle is not None:
            arguments = pjrt.TopologyDestroy(topology=self.handle)
            self.library.call("TopologyDescription_Destroy", arguments)
            self.handle = None

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Topology({self.name!r})"


def _known_topologies() -> str:
    lines = []
    for name, known in GENERATIONS.items():
        lines.append(f"{name}: {', '.join(known.shapes)}")
    return "; ".join(lines)


# ---- programs ------------------------------------------------------------------------------------


class Program:
    """A compiled program. A context manager; after close() only what was read before is
    available."""

    def __init__(self, topology: Topology, handle: int):
        self.topology = topology
        self.library = topology.library
        self.handle = handle

    @functools.cached_property
    def memory(self) -> Memory:
        """Returns the compiler's account of the memory."""
        arguments = pjrt.ExecutableGetCompiledMemoryStats(
            executable=self._open(),
            peak_memory_in_bytes=-1,  # left as it is by a library too old to know a peak
        )
        found = self.library.call("Executable_GetCompiledMemoryStats", arguments)
        argument = found.argument_size_in_bytes
        output = found.output_size_in_bytes
        alias = found.alias_size_in_bytes
        temp = found.temp_size_in_bytes

        reported = found.peak_memory_in_bytes > 0
        if reported:
            peak = found.peak_memory_in_bytes
        else:
            peak = argument + output - alias + temp
        return Memory(
            argument=argument,
            output=output,
            alias=alias,
            temp=temp,
            generated_code=found.generated_code_size_in_bytes,
            peak=peak,
            peak_reported=reported,
        )

    @functools.cached_property
    def cost(self) -> Cost:
        """Returns the compiler's count of the work."""
        arguments = pjrt.ExecutableGetCostAnalysis(executable=self._open())
        found = self.library.call("Executable_GetCostAnalysis", arguments)
        counted = pjrt.numbers(found.properties, found.num_properties)
        # The compiler leaves out counts of zero.
        return Cost(
            flops=float(counted.get("flops", 0)),
            bytes_accessed=float(counted.get("bytes accessed", 0)),
            transcendentals=float(counted.get("transcendentals", 0)),
        )

    @functools.cached_property
    def optimized(self) -> bytes:
        """Returns the optimized HloModuleProto, for tpu.compiler.hlo.parse."""
        program = pjrt.ProgramCode()
        arguments = pjrt.ExecutableOptimizedProgram(
            executable=self._open(),
            program=ctypes.pointer(program),
        )
        # Without a buffer the call returns the size, with one it fills it.
        self.library.call("Executable_OptimizedProgram", arguments)
        buffer = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.addressof(buffer)
        self.library.call("Executable_OptimizedProgram", arguments)

        format_name = pjrt.decode(program.format, program.format_size)
        if format_name == "hlo":
            return buffer.raw
        if format_name == "hlo_with_config":
            return HloModuleProtoWithConfig.FromString(buffer.raw).hlo_module
        unimplemented = pjrt.STATUS.index("UNIMPLEMENTED")
        raise CompilerError(
            unimplemented, f"the optimized program has the unknown format {format_name!r}"
        )

    def _open(self) -> int:
        """Returns the handle. Raises ValueError after close()."""
        if self.handle is None:
            raise ValueError("this Program is closed")
        return self.handle

    def close(self) -> None:
        """Frees the library's program; a second call does nothing."""
        if self.handle is not None:
            arguments = pjrt.ExecutableDestroy(executable=self.handle)
            self.library.call("Executable_Destroy", arguments)
            self.handle = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def compile_options(device_ids: list[int], effort_level: int) -> bytes:
    """Returns a serialized CompileOptionsProto: what torch_xla asks for under SPMD.

    Args:
        effort_level: of EFFORTS; 0 is the library's default.
    """
    num_devices = len(device_ids)
    assignment = DeviceAssignmentProto(
        replica_count=1,
        computation_count=num_devices,
        computation_devices=[{"replica_device_ids": [device]} for device in device_ids],
    )
    build_options = ExecutableBuildOptionsProto(
        device_ordinal=-1,  # none
        num_replicas=1,
        num_partitions=num_devices,
        use_spmd_partitioning=True,
        device_assignment=assignment,
        allow_spmd_sharding_propagation_to_output=[True],
        optimization_level=effort_level,
    )
    options = CompileOptionsProto(executable_build_options=build_options)
    return options.SerializeToString()


# ---- out of memory -------------------------------------------------------------------------------

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)(?:iB|B)?"

SINGLE_BUFFER = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory.*?shape = '([^']*)', space=hbm",
)
USED = re.compile(rf"Used {SIZE} of {SIZE} hbm")
EXCEEDED = re.compile(rf"Ran out of memory on HBM.*?\({SIZE}\) exceeds available HBM")
# 0.0.51's table of the memory space "default", which is HBM, up to that of the next one.
HBM_TABLE = re.compile(
    r"Memory Space: default .*?\nTotal bytes: (\d+)(.*?)(?=\nMemory Space:|\Z)",
    re.DOTALL,
)
HBM_TABLE_ROW = re.compile(rf"^ *[^;\n]+; *{SIZE}; *\d+; *\d+; (.+)$", re.MULTILINE)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def parse_out_of_memory(report: str) -> tuple[int, list[Allocation]] | None:
    """Returns (bytes needed per device, the largest allocations) from the compiler's message and
    log.

    Returns None if they are about another memory than HBM. The forms, all with the code
    RESOURCE_EXHAUSTED:

    0.0.21: "Ran out of memory in memory space hbm. Used 33.54G of 15.75G hbm.", then numbered
        allocations with operator
    0.0.21: "Allocation (size=28815360000) would exceed memory (size=17179869184) :: ... shape =
        'bf16[...]', space=hbm"
    0.0.51: "Ran out of memory on HBM, the total memory required for HLO temporaries (26.92G)
        exceeds available HBM", and in the log "Used 26.92G of 15.75G hbm.", "Total bytes:
        28907520000" and a table of sizes and shapes
    """
    single = SINGLE_BUFFER.search(report)
    if single:
        size = int(single[1])
        return size, [Allocation(size, single[2])]

    used = USED.search(report) or EXCEEDED.search(report)
    if not used:
        return None

    table = HBM_TABLE.search(report)
    if table:
        needed = int(table[1])
        allocations = []
        for number, unit, shape in HBM_TABLE_ROW.findall(table[2]):
            allocations.append(Allocation(_bytes(number, unit), shape))
    else:
        needed = _bytes(used[1], used[2])
        allocations = _numbered_allocations(report)
    return needed, sorted(allocations, key=lambda allocation: -allocation.bytes)


def _numbered_allocations(report: str) -> list[Allocation]:
    """Returns the allocations that 0.0.21 lists by number; [] where there is no such list."""
    _, _, listed = report.partition("Largest program allocations in hbm:")
    allocations = []
    for block in re.split(r"\n +\d+\. Size: ", listed)[1:]:
        number, unit = re.match(SIZE, block).groups()
        shape = re.search(r"Shape: (\S+)", block)
        operator = re.search(r'op_name="([^"]*)"', block)
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', block)
        allocations.append(
            Allocation(
                bytes=_bytes(number, unit),
                shape=shape[1] if shape else "",
                op_name=operator[1] if operator else "",
                source=f"{source[1]}:{source[2]}" if source else "",
            )
        )
    return allocations
