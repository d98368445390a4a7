"""libtpu's compiler without a TPU: ctypes on the PJRT C API. Knows nothing of torch.

    from tpu.compiler import libtpu
    with libtpu.Topology("v5e:2x4") as topology:
        with topology.compile(module, effort="full") as program:  # bytes of an HloModuleProto
            program.memory.peak, program.cost.flops, program.optimized

find() -> Path             libtpu.so: $TPU_LIBRARY_PATH, else of the installed package `libtpu`; InputError if neither
version() -> str           its version, and api_version() -> (major, minor) of its C API
GENERATIONS                {"v5e": Generation(shapes, usable HBM, peak FLOP/s, bytes/s, clock), ...}, all a device
TOPOLOGIES                 the names that Topology takes: "v5e:1x1", "v5e:2x4", ..., "v4:2x2x1", "TPU7x:2x2x1"
Topology(name)             .name .generation .kind .device_ids .num_devices .hbm_bytes, .compile(); InputError for
                           another name; a context manager (.close())
Topology.compile(module, effort) -> Program
Program                    .memory, .cost, .optimized (bytes of the optimised HloModuleProto), .close()
OutOfMemory(InputError)    .needed, .capacity (bytes a device), .allocations (the largest first), .report (the text)
CompilerError              .code, .status ("INVALID_ARGUMENT"), and the compiler's text; a bug, not an input error

"A device" is what JAX and torch_xla see as one: a TensorCore on v2, v3 and TPU7x (two a chip), a chip on the others.
The library is loaded at the first use. It opens no device and no connection, and several processes may use it at once.

The C API is xla/pjrt/c/pjrt_c_api.h of github.com/openxla/xla, version 0.72. Function pointers and the fields of
argument structs are only ever appended, so it serves later libraries too (libtpu 0.0.21: 0.75, 0.0.51: 0.116).
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from tpu.compiler import hlo

GIB = 2**30
INSTALLED = Path(__file__).resolve().parents[2] / ".libtpu/libtpu/libtpu.so"  # by `make compile`


@dataclass(frozen=True)
class Generation:
    """What is known of a generation of TPUs; amounts are those of one device.

    hbm_bytes: usable by a program: what libtpu 0.0.51 gives as the device's `device_memory_bytes_limit`, which is also
        the capacity in its out-of-memory messages.
    peak_flops, hbm_bytes_per_second: bf16, of Google's documentation, docs.cloud.google.com/tpu/docs/{v3, v4, v5e, v5p,
        v6e, tpu7x}, divided by the devices of a chip. No page for v2 was found: v2's are those of Jouppi
        et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks", CACM 63(7), 2020.
    clock_hz: of the TensorCore, to turn the compiler's cycles into seconds; None where nothing published says it.
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
SHAPES_3D = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

# Clocks. v2 and v3: the paper above. v4: Jouppi et al., "TPU v4: An Optically Reconfigurable
# Supercomputer", ISCA 2023. v5e and v5p: the peak divided by what the documented matrix units, 4 and 8 of 128 x 128, do
# in a cycle: 1.503 and 1.751 GHz; the same division gives 0.70, 0.94 and 1.05 GHz for v2 to v4. It fails for v6e: its
# two documented units of 256 x 256 would have to run at 3.5 GHz, and in libtpu's estimate a large matmul does more
# flops a cycle (369,000) than they can (262,144). The cost model of libtpu 0.0.51 itself has v5p at 394 TFLOP/s
# (1.5 GHz) and a device of TPU7x at 996 TFLOP/s; v5e and v6e are there as here.
GENERATIONS = {
    "v2": Generation(SHAPES_V2, 2, 8_034_172_928, 46e12 / 2, 700e9 / 2, 0.7e9),
    "v3": Generation((*SHAPES_V2, "16x32", "32x32"), 2, 16_624_107_520, 123e12 / 2, 900e9 / 2, 0.94e9),
    # Without this configuration the two TensorCores of a v4 chip are two devices; on Cloud TPU they are one.
    "v4": Generation(SHAPES_3D, 1, 33_014_413_312, 275e12, 1200e9, 1.05e9, chip_config="megacore"),
    "v5e": Generation(SHAPES_2D, 1, 16_909_336_064, 197e12, 819e9, 1.5e9),
    "v5p": Generation(SHAPES_3D, 1, 102_786_660_352, 459e12, 2765e9, 1.75e9),
    "v6e": Generation(SHAPES_2D, 1, 33_546_042_880, 918e12, 1638e9, None),
    "TPU7x": Generation(SHAPES_3D, 2, 101_724_453_888, 2307e12 / 2, 7380e9 / 2, None),
}
TOPOLOGIES = tuple(f"{name}:{shape}" for name, generation in GENERATIONS.items() for shape in generation.shapes)

# xla.proto, ExecutionOptions.EffortLevel. Level 0 compiles several times faster; its cycles mean nothing.
EFFORTS = {"fast": 9, "full": None}

# absl::StatusCode, in order.
STATUS = re.findall(
    r"\w+",
    """OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED
    RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS
    UNAUTHENTICATED""",
)


class CompilerError(RuntimeError):
    """The compiler refused, for another reason than memory. `code` is the absl status code, `status` its name."""

    def __init__(self, code: int, text: str):
        self.code = code
        self.status = STATUS[code] if 0 <= code < len(STATUS) else str(code)
        self.text = text
        super().__init__(f"{self.status}: {text}")


@dataclass(frozen=True)
class Allocation:
    """One buffer of a program that does not fit; its size is rounded where the compiler rounds.

    op_name, source ("file:line"): "" where the compiler does not print them. libtpu 0.0.21 prints both, 0.0.51 only
    size and shape ("2×bf16[60000,60000]" for two that share memory). candidates: then, (op_name, source) of up to five
    operations of the module as it was given whose result has this shape, whole or divided among the devices.
    """

    bytes: int
    shape: str
    op_name: str = ""
    source: str = ""
    candidates: tuple[tuple[str, str], ...] = ()


class OutOfMemory(InputError):
    """The program needs more memory than a device has.

    needed, capacity: bytes a device (`needed` is a lower bound where a single buffer is larger than the memory).
    allocations: the largest buffers, largest first. report: all that the compiler printed.
    """

    def __init__(self, topology: str, needed: int, capacity: int, allocations: list[Allocation], report: str):
        self.needed, self.capacity, self.allocations, self.report = needed, capacity, allocations, report
        super().__init__(
            f"out of memory: the program needs {needed / GIB:.2f} GiB a device, a device of {topology} has"
            f" {capacity / GIB:.2f} GiB; use a smaller batch, more devices or a TPU with more memory"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes a device. argument, output, temp: with the padding of their layouts. alias: of outputs that take over the
    memory of an argument. temp: the one region that holds all temporaries of HBM.

    peak: the compiler's own figure, the sum of live buffers at the worst moment, without the code. It can lie below
    what must fit, since it knows no gaps between buffers, and above it, since it counts what lies in on-chip memory.
    Where the compiler reports none, `peak_reported` is False and it is argument + output - alias + temp.
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
        """What the program occupies while it runs, and so what must fit: arguments, outputs, temporaries and code."""
        return self.argument + self.output - self.alias + self.temp + self.generated_code


@dataclass(frozen=True)
class Cost:
    """The compiler's count for one device and one execution. Custom calls and loop bodies count as it counts them."""

    flops: float
    bytes_accessed: float
    transcendentals: float


# ---- the library -----------------------------------------------------------------------------------------------------


def find() -> Path:
    """libtpu.so. Raises InputError that says how to install it."""
    named = os.environ.get("TPU_LIBRARY_PATH")
    if not named and INSTALLED.is_file():
        return INSTALLED
    if named:
        if not Path(named).is_file():
            raise InputError(f"TPU_LIBRARY_PATH={named} is not a file; it must be a libtpu.so, or be unset")
        return Path(named)
    package = importlib.util.find_spec("libtpu")
    if package is not None and package.origin:
        library = Path(package.origin).parent / "libtpu.so"
        if library.is_file():
            return library
    raise InputError(
        "libtpu is not installed: it holds the TPU compiler; `make compile` installs it, or set TPU_LIBRARY_PATH to a"
        " libtpu.so"
    )


def version() -> str:
    """Of the package that the library lies in, "0.0.21"; of a library on its own, what it says of itself."""
    library = find().resolve()
    for distribution in importlib.metadata.distributions(path=[str(library.parent.parent)]):
        if (distribution.metadata["Name"] or "").lower() == "libtpu":
            return distribution.version
    with Topology("v5e:2x2") as topology:
        return " ".join(topology.platform_version().split())


def api_version() -> tuple[int, int]:
    """(major, minor) of the library's C API."""
    return _library().api_version


# The functions of PJRT_Api in order, each without its prefix PJRT_, as far as the last one that is called.
FUNCTIONS = re.findall(
    r"\w+",
    """
    Error_Destroy Error_Message Error_GetCode Plugin_Initialize Plugin_Attributes Event_Destroy Event_IsReady
    Event_Error Event_Await Event_OnReady Client_Create Client_Destroy Client_PlatformName Client_ProcessIndex
    Client_PlatformVersion Client_Devices Client_AddressableDevices Client_LookupDevice
    Client_LookupAddressableDevice Client_AddressableMemories Client_Compile Client_DefaultDeviceAssignment
    Client_BufferFromHostBuffer DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes
    DeviceDescription_Kind DeviceDescription_DebugString DeviceDescription_ToString Device_GetDescription
    Device_IsAddressable Device_LocalHardwareId Device_AddressableMemories Device_DefaultMemory Device_MemoryStats
    Memory_Id Memory_Kind Memory_DebugString Memory_ToString Memory_AddressableByDevices Executable_Destroy
    Executable_Name Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs
    Executable_SizeOfGeneratedCodeInBytes Executable_GetCostAnalysis Executable_OutputMemoryKinds
    Executable_OptimizedProgram Executable_Serialize LoadedExecutable_Destroy LoadedExecutable_GetExecutable
    LoadedExecutable_AddressableDevices LoadedExecutable_Delete LoadedExecutable_IsDeleted LoadedExecutable_Execute
    Executable_DeserializeAndLoad LoadedExecutable_Fingerprint Buffer_Destroy Buffer_ElementType Buffer_Dimensions
    Buffer_UnpaddedDimensions Buffer_DynamicDimensionIndices Buffer_GetMemoryLayout Buffer_OnDeviceSizeInBytes
    Buffer_Device Buffer_Memory Buffer_Delete Buffer_IsDeleted Buffer_CopyToDevice Buffer_ToHostBuffer Buffer_IsOnCpu
    Buffer_ReadyEvent Buffer_UnsafePointer Buffer_IncreaseExternalReferenceCount
    Buffer_DecreaseExternalReferenceCount Buffer_OpaqueDeviceMemoryDataPointer CopyToDeviceStream_Destroy
    CopyToDeviceStream_AddChunk CopyToDeviceStream_TotalBytes CopyToDeviceStream_GranuleSize
    CopyToDeviceStream_CurrentBytes TopologyDescription_Create TopologyDescription_Destroy
    TopologyDescription_PlatformName TopologyDescription_PlatformVersion TopologyDescription_GetDeviceDescriptions
    TopologyDescription_Serialize TopologyDescription_Attributes Compile Executable_OutputElementTypes
    Executable_OutputDimensions Buffer_CopyToMemory Client_CreateViewOfDeviceBuffer Executable_Fingerprint
    Client_TopologyDescription Executable_GetCompiledMemoryStats
    """,
)

pointer, size_t, int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class Arguments(ctypes.Structure):
    """Every argument struct begins with its own size and a list of extensions, here always empty."""

    _fields_ = (("struct_size", size_t), ("extension_start", pointer))

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class ApiVersion(Arguments):
    _fields_ = (("major_version", ctypes.c_int), ("minor_version", ctypes.c_int))


class ApiHeader(Arguments):
    """The head of PJRT_Api; the function pointers follow."""

    _fields_ = (("version", ApiVersion),)


class PluginInitialize(Arguments):
    _fields_ = ()


class ErrorDestroy(Arguments):
    _fields_ = (("error", pointer),)


class ErrorMessage(Arguments):
    _fields_ = (("error", pointer), ("message", pointer), ("message_size", size_t))


class ErrorGetCode(Arguments):
    _fields_ = (("error", pointer), ("code", ctypes.c_int))


class NamedValueContent(ctypes.Union):
    _fields_ = (
        ("string_value", pointer),
        ("int64_value", int64),
        ("int64_array_value", pointer),
        ("float_value", ctypes.c_float),
        ("bool_value", ctypes.c_bool),
    )


STRING, INT64, INT64_LIST, FLOAT, BOOL = range(5)


class NamedValue(Arguments):
    _fields_ = (
        ("name", pointer),
        ("name_size", size_t),
        ("type", ctypes.c_int),
        ("content", NamedValueContent),
        ("value_size", size_t),
    )


class TopologyCreate(Arguments):
    _fields_ = (
        ("topology_name", ctypes.c_char_p),
        ("topology_name_size", size_t),
        ("create_options", pointer),
        ("num_options", size_t),
        ("topology", pointer),
    )


class TopologyDestroy(Arguments):
    _fields_ = (("topology", pointer),)


class TopologyPlatformVersion(Arguments):
    _fields_ = (("topology", pointer), ("platform_version", pointer), ("platform_version_size", size_t))


class TopologyGetDeviceDescriptions(Arguments):
    _fields_ = (("topology", pointer), ("descriptions", ctypes.POINTER(pointer)), ("num_descriptions", size_t))


class DeviceDescriptionId(Arguments):
    _fields_ = (("device_description", pointer), ("id", ctypes.c_int))


class DeviceDescriptionKind(Arguments):
    _fields_ = (("device_description", pointer), ("device_kind", pointer), ("device_kind_size", size_t))


class DeviceDescriptionAttributes(Arguments):
    _fields_ = (
        ("device_description", pointer),
        ("num_attributes", size_t),
        ("attributes", ctypes.POINTER(NamedValue)),
    )


class ProgramCode(Arguments):
    """PJRT_Program: code in a format, "hlo" for an HloModuleProto."""

    _fields_ = (("code", pointer), ("code_size", size_t), ("format", pointer), ("format_size", size_t))


class Compile(Arguments):
    _fields_ = (
        ("topology", pointer),
        ("program", ctypes.POINTER(ProgramCode)),
        ("compile_options", ctypes.c_char_p),
        ("compile_options_size", size_t),
        ("client", pointer),
        ("executable", pointer),
    )


class ExecutableDestroy(Arguments):
    _fields_ = (("executable", pointer),)


class ExecutableGetCostAnalysis(Arguments):
    _fields_ = (
        ("executable", pointer),
        ("num_properties", size_t),
        ("properties", ctypes.POINTER(NamedValue)),
    )


class ExecutableOptimizedProgram(Arguments):
    _fields_ = (("executable", pointer), ("program", ctypes.POINTER(ProgramCode)))


class ExecutableGetCompiledMemoryStats(Arguments):
    _fields_ = (
        ("executable", pointer),
        ("generated_code_size_in_bytes", int64),
        ("argument_size_in_bytes", int64),
        ("output_size_in_bytes", int64),
        ("alias_size_in_bytes", int64),
        ("temp_size_in_bytes", int64),
        ("host_generated_code_size_in_bytes", int64),
        ("host_argument_size_in_bytes", int64),
        ("host_output_size_in_bytes", int64),
        ("host_alias_size_in_bytes", int64),
        ("host_temp_size_in_bytes", int64),
        ("peak_memory_in_bytes", int64),
    )


class Library:
    """libtpu.so, loaded and initialised."""

    def __init__(self, path: Path):
        self.log_folder = Path(tempfile.mkdtemp(prefix="libtpu-log-"))
        atexit.register(shutil.rmtree, self.log_folder, ignore_errors=True)
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",  # asks no metadata server whether this machine is a TPU VM
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else a second process fails on a lock file: it would share the chips
            # 0.0.51 prints the largest allocations of a program that does not fit only to its log.
            TPU_LOG_DIR=str(self.log_folder),
            TPU_MIN_LOG_LEVEL="2",  # errors
            TPU_STDERR_LOG_LEVEL="3",  # fatal ones only: the others are raised as exceptions
        )
        # The name of the topology decides; these two only silence warnings that they are not set.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        try:
            library = ctypes.CDLL(str(path))
            library.GetPjrtApi.restype = pointer
        except (OSError, AttributeError) as error:
            raise InputError(f"{path} is not a libtpu.so that this machine can load: {error}") from None
        address = library.GetPjrtApi()
        header = ApiHeader.from_address(address)
        self.api_version = (header.version.major_version, header.version.minor_version)
        self.functions = {}
        for number, name in enumerate(FUNCTIONS):
            offset = ctypes.sizeof(ApiHeader) + number * ctypes.sizeof(pointer)
            if offset >= header.struct_size:
                raise InputError(f"{path} is too old: its C API is {self.api_version}, at least (0, 72) is needed")
            function = pointer.from_address(address + offset).value
            self.functions[name] = ctypes.CFUNCTYPE(pointer, pointer)(function)
        self.call("Plugin_Initialize", PluginInitialize())

    def call(self, name: str, arguments: Arguments) -> Arguments:
        """Calls a function; results are in `arguments`, which is returned. Raises CompilerError."""
        error = self.functions[name](ctypes.addressof(arguments))
        if not error:
            return arguments
        # These three return nothing, so what ctypes takes for their result means nothing.
        message = ErrorMessage(error=error)
        self.functions["Error_Message"](ctypes.addressof(message))
        text = _text(message.message, message.message_size)
        code = ErrorGetCode(error=error)
        self.functions["Error_GetCode"](ctypes.addressof(code))
        self.functions["Error_Destroy"](ctypes.addressof(ErrorDestroy(error=error)))
        raise CompilerError(code.code, text)

    def log(self) -> str:
        """All errors that the library has logged so far."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.log_folder.glob("*.log.ERROR.*")))


@functools.cache
def _library() -> Library:
    return Library(find())


def _text(address: int | None, size: int) -> str:
    return ctypes.string_at(address, size).decode(errors="replace") if address else ""


# ---- topologies ------------------------------------------------------------------------------------------------------


class Topology:
    """Chips that need not be there. `name` is one of TOPOLOGIES, its generation in any case ("tpu7x:2x2x1").

    generation: of GENERATIONS, "v5e". kind: the library's name for a device, "TPU v5 lite". device_ids: ascending,
    which is the order of torch_xla's meshes. num_devices. hbm_bytes: usable memory of a device.
    """

    def __init__(self, name: str):
        canonical = {known.lower(): known for known in TOPOLOGIES}.get(name.lower())
        if canonical is None:
            raise InputError(f"topology {name!r} is not known; the known ones are: {_known_topologies()}")
        self.name = canonical
        self.generation, shape = canonical.split(":")
        self.specification = GENERATIONS[self.generation]
        self.library = _library()
        self.handle = self._create(shape)
        listed = self.library.call(
            "TopologyDescription_GetDeviceDescriptions", TopologyGetDeviceDescriptions(topology=self.handle)
        )
        descriptions = [listed.descriptions[number] for number in range(listed.num_descriptions)]
        self.device_ids = sorted(
            self.library.call("DeviceDescription_Id", DeviceDescriptionId(device_description=description)).id
            for description in descriptions
        )
        self.num_devices = len(self.device_ids)
        kind = self.library.call("DeviceDescription_Kind", DeviceDescriptionKind(device_description=descriptions[0]))
        self.kind = _text(kind.device_kind, kind.device_kind_size)
        self.hbm_bytes = self._memory_limit(descriptions[0]) or self.specification.hbm_bytes

    def _create(self, shape: str) -> int:
        options: dict[str, str | list[int]] = {}
        if set(shape.split("x")) == {"1"}:
            options["chips_per_host_bounds"] = [1, 1, 1]  # else a host has 2x2x1 chips, more than there are
        if self.specification.chip_config:
            options["chip_config_name"] = self.specification.chip_config
        values, buffers = _named_values(options)
        name = self.name.encode()
        arguments = TopologyCreate(
            topology_name=name,
            topology_name_size=len(name),
            create_options=ctypes.addressof(values),
            num_options=len(values),
        )
        try:
            return self.library.call("TopologyDescription_Create", arguments).topology
        except CompilerError as error:
            raise InputError(
                f"topology {self.name} is not known to libtpu {version()} ({error.text}); use a newer libtpu"
                " or another topology"
            ) from error
        finally:
            del buffers  # the call is over: nothing reads them any more

    def _memory_limit(self, description: int) -> int | None:
        """The library's own figure; 0.0.21 gives none."""
        found = self.library.call(
            "DeviceDescription_Attributes", DeviceDescriptionAttributes(device_description=description)
        )
        for number in range(found.num_attributes):
            attribute = found.attributes[number]
            if _text(attribute.name, attribute.name_size) == "device_memory_bytes_limit":
                return attribute.content.int64_value
        return None

    def platform_version(self) -> str:
        """The library's description of itself: several words, with the date it was built."""
        found = self.library.call("TopologyDescription_PlatformVersion", TopologyPlatformVersion(topology=self.handle))
        return _text(found.platform_version, found.platform_version_size)

    def compile(self, module: bytes, effort: str = "full") -> Program:
        """Compiles an HloModuleProto for all devices: SPMD, one replica, a partition a device.

        effort: "fast" (level 0: memory and collectives are near those of "full", cycles are not) or "full".
        Raises OutOfMemory, also when the compiler is content but the program needs more than a device has (0.0.21 does
        not count arguments and outputs); CompilerError for all else.
        """
        if self.handle is None:
            raise ValueError("this Topology is closed")
        if effort not in EFFORTS:
            raise InputError(f"effort {effort!r} is not known; use one of: {', '.join(EFFORTS)}")
        options = compile_options(self.device_ids, EFFORTS[effort])
        code = ctypes.create_string_buffer(module, len(module))
        format_name = ctypes.create_string_buffer(b"hlo", 3)
        program = ProgramCode(
            code=ctypes.addressof(code), code_size=len(module), format=ctypes.addressof(format_name), format_size=3
        )
        arguments = Compile(
            topology=self.handle,
            program=ctypes.pointer(program),
            compile_options=options,
            compile_options_size=len(options),
        )
        logged = len(self.library.log())
        try:
            executable = self.library.call("Compile", arguments).executable
        except CompilerError as error:
            # 0.0.21 tells all in its message, and again in the log.
            detailed = "Largest program allocations" in error.text
            report = error.text if detailed else error.text + "\n\n" + self.library.log()[logged:]
            found = parse_out_of_memory(report) if error.status == "RESOURCE_EXHAUSTED" else None
            if found is None:
                raise
            needed, allocations = found
            allocations = self._with_candidates(allocations, module)
            raise OutOfMemory(self.name, needed, self.hbm_bytes, allocations, report) from error
        compiled = Program(self, executable)
        memory = compiled.memory
        if memory.needed > self.hbm_bytes:
            with compiled:
                buffers = hlo.largest_buffers(hlo.parse(compiled.optimized))
            allocations = [Allocation(each.hbm_bytes, str(each.shape), each.op_name, each.source) for each in buffers]
            raise OutOfMemory(self.name, memory.needed, self.hbm_bytes, allocations, str(memory))
        return compiled

    def _with_candidates(self, allocations: list[Allocation], module: bytes) -> list[Allocation]:
        parsed = hlo.parse(module)
        named = []
        for allocation in allocations:
            if not allocation.op_name:
                same = hlo.with_result(parsed, allocation.shape, self.num_devices)
                names = dict.fromkeys((each.op_name, each.source) for each in same)  # each once, in order
                allocation = dataclasses.replace(allocation, candidates=tuple(names)[:5])
            named.append(allocation)
        return named

    def close(self) -> None:
        if self.handle is not None:
            self.library.call("TopologyDescription_Destroy", TopologyDestroy(topology=self.handle))
            self.handle = None

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Topology({self.name!r})"


def _named_values(options: dict[str, str | list[int]]) -> tuple[ctypes.Array, list]:
    """Options as the C API takes them, and the buffers they point to: to be kept until the call is over."""
    values, buffers = (NamedValue * len(options))(), []
    for value, (name, content) in zip(values, options.items(), strict=True):
        name_buffer = ctypes.create_string_buffer(name.encode())
        value.struct_size = ctypes.sizeof(NamedValue)
        value.name, value.name_size = ctypes.addressof(name_buffer), len(name)
        value.value_size = len(content)
        if isinstance(content, str):
            buffer = ctypes.create_string_buffer(content.encode())
            value.type, value.content.string_value = STRING, ctypes.addressof(buffer)
        else:
            buffer = (int64 * len(content))(*content)
            value.type, value.content.int64_array_value = INT64_LIST, ctypes.addressof(buffer)
        buffers += [name_buffer, buffer]
    return values, buffers


def _known_topologies() -> str:
    return "; ".join(f"{name}: {', '.join(known.shapes)}" for name, known in GENERATIONS.items())


# ---- programs --------------------------------------------------------------------------------------------------------


class Program:
    """A compiled program. A context manager; after close() only what was read before can be read."""

    def __init__(self, topology: Topology, handle: int):
        self.topology = topology
        self.library = topology.library
        self.handle = handle

    @functools.cached_property
    def memory(self) -> Memory:
        # A library too old to know a peak leaves the field as it is.
        arguments = ExecutableGetCompiledMemoryStats(executable=self._open(), peak_memory_in_bytes=-1)
        found = self.library.call("Executable_GetCompiledMemoryStats", arguments)
        argument, output = found.argument_size_in_bytes, found.output_size_in_bytes
        alias, temp = found.alias_size_in_bytes, found.temp_size_in_bytes
        reported = found.peak_memory_in_bytes > 0
        peak = found.peak_memory_in_bytes if reported else argument + output - alias + temp
        return Memory(argument, output, alias, temp, found.generated_code_size_in_bytes, peak, reported)

    @functools.cached_property
    def cost(self) -> Cost:
        found = self.library.call("Executable_GetCostAnalysis", ExecutableGetCostAnalysis(executable=self._open()))
        properties = {}
        for number in range(found.num_properties):
            value = found.properties[number]
            content = value.content.float_value if value.type == FLOAT else value.content.int64_value
            properties[_text(value.name, value.name_size)] = float(content)
        # The compiler leaves out what it counts none of.
        return Cost(
            properties.get("flops", 0.0), properties.get("bytes accessed", 0.0), properties.get("transcendentals", 0.0)
        )

    @functools.cached_property
    def optimized(self) -> bytes:
        """The HloModuleProto that the compiler ended with, for tpu.compiler.hlo.parse."""
        program = ProgramCode()
        arguments = ExecutableOptimizedProgram(executable=self._open(), program=ctypes.pointer(program))
        self.library.call("Executable_OptimizedProgram", arguments)  # without a buffer it tells the size
        buffer = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.addressof(buffer)
        self.library.call("Executable_OptimizedProgram", arguments)
        format_name = _text(program.format, program.format_size)
        if format_name == "hlo":
            return buffer.raw
        if format_name == "hlo_with_config":
            return _first_field(buffer.raw)
        raise CompilerError(
            STATUS.index("UNIMPLEMENTED"), f"the optimised program has the unknown format {format_name!r}"
        )

    def _open(self) -> int:
        if self.handle is None:
            raise ValueError("this Program is closed")
        return self.handle

    def close(self) -> None:
        if self.handle is not None:
            self.library.call("Executable_Destroy", ExecutableDestroy(executable=self.handle))
            self.handle = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


# ---- protocol buffers ------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # a negative number is written as its 64-bit complement
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes(encoded) + bytes([number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def compile_options(device_ids: list[int], effort_level: int | None) -> bytes:
    """CompileOptionsProto (xla/pjrt/proto/compile_options.proto): what torch_xla asks for under SPMD."""
    columns = b"".join(_message(3, _message(1, _varint(device))) for device in device_ids)
    assignment = _number(1, 1) + _number(2, len(device_ids)) + columns
    build_options = (
        _number(1, -1)  # device_ordinal: none
        + _number(4, 1)  # num_replicas
        + _number(5, len(device_ids))  # num_partitions
        + _number(6, 1)  # use_spmd_partitioning
        + _message(9, assignment)  # device_assignment
        + _message(12, b"\x01")  # allow_spmd_sharding_propagation_to_output
    )
    if effort_level is not None:
        build_options += _number(24, effort_level)  # optimization_level
    return _message(3, build_options)  # executable_build_options


def _first_field(message: bytes) -> bytes:
    """The HloModuleProto in an HloModuleProtoWithConfig: its field 1."""
    if message[:1] != b"\x0a":
        raise ValueError("the optimised program is not an HloModuleProtoWithConfig")
    size, shift, position = 0, 0, 1
    while True:
        byte = message[position]
        position += 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return message[position : position + size]


# ---- out of memory ---------------------------------------------------------------------------------------------------

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)(?:iB|B)?"


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def parse_out_of_memory(report: str) -> tuple[int, list[Allocation]] | None:
    """(bytes needed a device, the largest allocations) of the compiler's message and log; None if it is about another
    memory than HBM. The forms, all with the code RESOURCE_EXHAUSTED:

    0.0.21: "Ran out of memory in memory space hbm. Used 33.54G of 15.75G hbm.", then numbered allocations with operator
    0.0.21: "Allocation (size=28815360000) would exceed memory (size=17179869184) :: ... shape = 'bf16[...]', space=hbm"
    0.0.51: "Ran out of memory on HBM, the total memory required for HLO temporaries (26.92G) exceeds available HBM",
        and in the log "Used 26.92G of 15.75G hbm.", "Total bytes: 28907520000" and a table of sizes and shapes
    """
    single = re.search(r"Allocation \(size=(\d+)\) would exceed memory.*?shape = '([^']*)', space=hbm", report)
    if single:
        return int(single[1]), [Allocation(int(single[1]), single[2])]
    used = re.search(rf"Used {SIZE} of {SIZE} hbm", report) or re.search(
        rf"Ran out of memory on HBM.*?\({SIZE}\) exceeds available HBM", report
    )
    if not used:
        return None
    needed = _bytes(used[1], used[2])
    allocations = []
    for block in re.split(r"\n +\d+\. Size: ", report.partition("Largest program allocations in hbm:")[2])[1:]:
        operator = re.search(r'op_name="([^"]*)"', block)
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', block)
        shape = re.search(r"Shape: (\S+)", block)
        allocations.append(
            Allocation(
                _bytes(*re.match(SIZE, block).groups()),
                shape[1] if shape else "",
                operator[1] if operator else "",
                f"{source[1]}:{source[2]}" if source else "",
            )
        )
    table = re.search(r"Memory Space: default .*?\nTotal bytes: (\d+)(.*?)(?=\nMemory Space:|\Z)", report, re.DOTALL)
    if table:
        needed = int(table[1])
        rows = re.findall(rf"^ *[^;\n]+; *{SIZE}; *\d+; *\d+; (.+)$", table[2], re.MULTILINE)
        allocations = [Allocation(_bytes(number, unit), shape) for number, unit, shape in rows]
    return needed, sorted(allocations, key=lambda allocation: -allocation.bytes)
