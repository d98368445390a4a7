"""The PJRT C API by ctypes: its structs, and a library that is loaded and called.

Library(path)              loads and initializes a libtpu.so; .call(name, struct), .api_version,
                           .log()
CompilerError              .code, .status ("INVALID_ARGUMENT"), and the library's text; a bug, not
                           an input error
decode(address, size)      a string of the library
encode_options(options)    options as the library takes them
numbers(values, count)     {name: number} of named values of the library

The API is xla/pjrt/c/pjrt_c_api.h of github.com/openxla/xla, version 0.72. Function pointers and
the fields of argument structs are only ever appended, so later libraries serve it, too (libtpu
0.0.21: 0.75, 0.0.51: 0.116).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import struct
import tempfile
from pathlib import Path

from errors import InputError

# absl::StatusCode, in order.
STATUS = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]


class CompilerError(RuntimeError):
    """A refusal for another reason than memory.

    Attributes:
        code: the absl status code.
        status: its name.
        text: what the library says.
    """

    def __init__(self, code: int, text: str):
        self.code = code
        self.status = STATUS[code] if 0 <= code < len(STATUS) else str(code)
        self.text = text
        super().__init__(f"{self.status}: {text}")


# The functions of PJRT_Api in order, without their prefix PJRT_, up to the last one that is called.
FUNCTIONS = [
    "Error_Destroy",
    "Error_Message",
    "Error_GetCode",
    "Plugin_Initialize",
    "Plugin_Attributes",
    "Event_Destroy",
    "Event_IsReady",
    "Event_Error",
    "Event_Await",
    "Event_OnReady",
    "Client_Create",
    "Client_Destroy",
    "Client_PlatformName",
    "Client_ProcessIndex",
    "Client_PlatformVersion",
    "Client_Devices",
    "Client_AddressableDevices",
    "Client_LookupDevice",
    "Client_LookupAddressableDevice",
    "Client_AddressableMemories",
    "Client_Compile",
    "Client_DefaultDeviceAssignment",
    "Client_BufferFromHostBuffer",
    "DeviceDescription_Id",
    "DeviceDescription_ProcessIndex",
    "DeviceDescription_Attributes",
    "DeviceDescription_Kind",
    "DeviceDescription_DebugString",
    "DeviceDescription_ToString",
    "Device_GetDescription",
    "Device_IsAddressable",
    "Device_LocalHardwareId",
    "Device_AddressableMemories",
    "Device_DefaultMemory",
    "Device_MemoryStats",
    "Memory_Id",
    "Memory_Kind",
    "Memory_DebugString",
    "Memory_ToString",
    "Memory_AddressableByDevices",
    "Executable_Destroy",
    "Executable_Name",
    "Executable_NumReplicas",
    "Executable_NumPartitions",
    "Executable_NumOutputs",
    "Executable_SizeOfGeneratedCodeInBytes",
    "Executable_GetCostAnalysis",
    "Executable_OutputMemoryKinds",
    "Executable_OptimizedProgram",
    "Executable_Serialize",
    "LoadedExecutable_Destroy",
    "LoadedExecutable_GetExecutable",
    "LoadedExecutable_AddressableDevices",
    "LoadedExecutable_Delete",
    "LoadedExecutable_IsDeleted",
    "LoadedExecutable_Execute",
    "Executable_DeserializeAndLoad",
    "LoadedExecutable_Fingerprint",
    "Buffer_Destroy",
    "Buffer_ElementType",
    "Buffer_Dimensions",
    "Buffer_UnpaddedDimensions",
    "Buffer_DynamicDimensionIndices",
    "Buffer_GetMemoryLayout",
    "Buffer_OnDeviceSizeInBytes",
    "Buffer_Device",
    "Buffer_Memory",
    "Buffer_Delete",
    "Buffer_IsDeleted",
    "Buffer_CopyToDevice",
    "Buffer_ToHostBuffer",
    "Buffer_IsOnCpu",
    "Buffer_ReadyEvent",
    "Buffer_UnsafePointer",
    "Buffer_IncreaseExternalReferenceCount",
    "Buffer_DecreaseExternalReferenceCount",
    "Buffer_OpaqueDeviceMemoryDataPointer",
    "CopyToDeviceStream_Destroy",
    "CopyToDeviceStream_AddChunk",
    "CopyToDeviceStream_TotalBytes",
    "CopyToDeviceStream_GranuleSize",
    "CopyToDeviceStream_CurrentBytes",
    "TopologyDescription_Create",
    "TopologyDescription_Destroy",
    "TopologyDescription_PlatformName",
    "TopologyDescription_PlatformVersion",
    "TopologyDescription_GetDeviceDescriptions",
    "TopologyDescription_Serialize",
    "TopologyDescription_Attributes",
    "Compile",
    "Executable_OutputElementTypes",
    "Executable_OutputDimensions",
    "Buffer_CopyToMemory",
    "Client_CreateViewOfDeviceBuffer",
    "Executable_Fingerprint",
    "Client_TopologyDescription",
    "Executable_GetCompiledMemoryStats",
]

pointer = ctypes.c_void_p
size_t = ctypes.c_size_t
int64 = ctypes.c_int64


class Struct(ctypes.Structure):
    """What every argument struct begins with: its own size, and a list of extensions that stays
    empty here."""

    _fields_ = (("struct_size", size_t), ("extension_start", pointer))

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class ApiVersion(Struct):
    _fields_ = (("major_version", ctypes.c_int), ("minor_version", ctypes.c_int))


class ApiHeader(Struct):
    """The head of PJRT_Api; the function pointers follow."""

    _fields_ = (("version", ApiVersion),)


class PluginInitialize(Struct):
    _fields_ = ()


class ErrorDestroy(Struct):
    _fields_ = (("error", pointer),)


class ErrorMessage(Struct):
    _fields_ = (("error", pointer), ("message", pointer), ("message_size", size_t))


class ErrorGetCode(Struct):
    _fields_ = (("error", pointer), ("code", ctypes.c_int))


class NamedValueContent(ctypes.Union):
    _fields_ = (
        ("string_value", pointer),
        ("int64_value", int64),
        ("int64_array_value", pointer),
        ("float_value", ctypes.c_float),
        ("bool_value", ctypes.c_bool),
    )


# The types of a NamedValue.
STRING = 0
INT64 = 1
INT64_LIST = 2
FLOAT = 3
BOOL = 4


class NamedValue(Struct):
    _fields_ = (
        ("name", pointer),
        ("name_size", size_t),
        ("type", ctypes.c_int),
        ("content", NamedValueContent),
        ("value_size", size_t),
    )


class TopologyCreate(Struct):
    _fields_ = (
        ("topology_name", ctypes.c_char_p),
        ("topology_name_size", size_t),
        ("create_options", pointer),
        ("num_options", size_t),
        ("topology", pointer),
    )


class TopologyDestroy(Struct):
    _fields_ = (("topology", pointer),)


class TopologyPlatformVersion(Struct):
    _fields_ = (
        ("topology", pointer),
        ("platform_version", pointer),
        ("platform_version_size", size_t),
    )


class TopologyGetDeviceDescriptions(Struct):
    _fields_ = (
        ("topology", pointer),
        ("descriptions", ctypes.POINTER(pointer)),
        ("num_descriptions", size_t),
    )


class DeviceDescriptionId(Struct):
    _fields_ = (("device_description", pointer), ("id", ctypes.c_int))


class DeviceDescriptionKind(Struct):
    _fields_ = (
        ("device_description", pointer),
        ("device_kind", pointer),
        ("device_kind_size", size_t),
    )


class DeviceDescriptionAttributes(Struct):
    _fields_ = (
        ("device_description", pointer),
        ("num_attributes", size_t),
        ("attributes", ctypes.POINTER(NamedValue)),
    )


class ProgramCode(Struct):
    """PJRT_Program: code in a format, "hlo" for an HloModuleProto."""

    _fields_ = (
        ("code", pointer),
        ("code_size", size_t),
        ("format", pointer),
        ("format_size", size_t),
    )


class Compile(Struct):
    _fields_ = (
        ("topology", pointer),
        ("program", ctypes.POINTER(ProgramCode)),
        ("compile_options", ctypes.c_char_p),
        ("compile_options_size", size_t),
        ("client", pointer),
        ("executable", pointer),
    )


class ExecutableDestroy(Struct):
    _fields_ = (("executable", pointer),)


class ExecutableGetCostAnalysis(Struct):
    _fields_ = (
        ("executable", pointer),
        ("num_properties", size_t),
        ("properties", ctypes.POINTER(NamedValue)),
    )


class ExecutableOptimizedProgram(Struct):
    _fields_ = (("executable", pointer), ("program", ctypes.POINTER(ProgramCode)))


class ExecutableGetCompiledMemoryStats(Struct):
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
    """A loaded and initialized libtpu.so.

    Attributes:
        api_version: (major, minor) of its C API.
        functions: those of FUNCTIONS, by name.
    """

    def __init__(self, path: Path):
        self.log_folder = Path(tempfile.mkdtemp(prefix="libtpu-log-"))
        atexit.register(shutil.rmtree, self.log_folder, ignore_errors=True)
        self._set_environment()
        try:
            _check_whole(path)
            library = ctypes.CDLL(str(path))
            library.GetPjrtApi.restype = pointer
        except (OSError, AttributeError) as error:
            raise InputError(
                f"{path} is not a libtpu.so that this machine can load: {error}"
            ) from None

        address = library.GetPjrtApi()
        header = ApiHeader.from_address(address)
        self.api_version = (header.version.major_version, header.version.minor_version)
        self.functions = {}
        for number, name in enumerate(FUNCTIONS):
            offset = ctypes.sizeof(ApiHeader) + number * ctypes.sizeof(pointer)
            if offset >= header.struct_size:
                raise InputError(
                    f"{path} is too old: its C API is {self.api_version}, "
                    "at least (0, 72) is needed"
                )
            function = pointer.from_address(address + offset).value
            self.functions[name] = ctypes.CFUNCTYPE(pointer, pointer)(function)
        self.call("Plugin_Initialize", PluginInitialize())

    def _set_environment(self) -> None:
        """Sets what libtpu reads when it is loaded."""
        os.environ.update(
            # It asks no metadata server whether this machine is a TPU VM.
            TPU_SKIP_MDS_QUERY="1",
            # Else a second process fails on a lock file, since it would share the chips.
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            # 0.0.51 prints the largest allocations of a program that does not fit only to its log.
            TPU_LOG_DIR=str(self.log_folder),
            TPU_MIN_LOG_LEVEL="2",  # errors
            TPU_STDERR_LOG_LEVEL="3",  # fatal errors only: the others are raised as exceptions
        )
        # The topology's name decides; these two only silence the warnings about their absence.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

    def call(self, name: str, arguments: Struct) -> Struct:
        """Calls a function, which writes its results into `arguments`; returns them. Raises
        CompilerError."""
        error = self.functions[name](ctypes.addressof(arguments))
        if not error:
            return arguments

        # These three return nothing; what ctypes takes for their result is meaningless.
        message = ErrorMessage(error=error)
        self.functions["Error_Message"](ctypes.addressof(message))
        text = decode(message.message, message.message_size)
        code = ErrorGetCode(error=error)
        self.functions["Error_GetCode"](ctypes.addressof(code))
        self.functions["Error_Destroy"](ctypes.addressof(ErrorDestroy(error=error)))
        raise CompilerError(code.code, text)

    def log(self) -> str:
        """Returns all errors that the library has logged so far."""
        files = sorted(self.log_folder.glob("*.log.ERROR.*"))
        return "".join(file.read_text(errors="replace") for file in files)


def _check_whole(path: Path) -> None:
    """Raises InputError for a library that was cut off, as by a full disk: it would load, and end
    the process (SIGBUS) where it is used first."""
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return  # no library at all: the error of loading it says so

    # An ELF file ends with the table of its sections.
    (table,) = struct.unpack_from("<Q", header, 0x28)
    section_size, sections = struct.unpack_from("<HH", header, 0x3A)
    whole = table + section_size * sections
    found = path.stat().st_size
    if found < whole:
        raise InputError(
            f"{path} was cut off: it has {found:,} of {whole:,} bytes; "
            "remove its version's folder, such as .libtpu/0.0.21, and install it again"
        )


def decode(address: int | None, size: int) -> str:
    """Returns the string at an address; "" where there is none."""
    if not address:
        return ""
    return ctypes.string_at(address, size).decode(errors="replace")


def encode_options(options: dict[str, str | int | list[int]]) -> tuple[ctypes.Array, list]:
    """Returns options as NamedValues, and the buffers that they point to: keep these until the call
    is over."""
    values = (NamedValue * len(options))()
    buffers = []
    for value, (name, content) in zip(values, options.items(), strict=True):
        name_buffer = ctypes.create_string_buffer(name.encode())
        buffers.append(name_buffer)
        value.struct_size = ctypes.sizeof(NamedValue)
        value.name = ctypes.addressof(name_buffer)
        value.name_size = len(name)

        if isinstance(content, int):
            value.type = INT64
            value.value_size = 1
            value.content.int64_value = content
            continue

        value.value_size = len(content)
        if isinstance(content, str):
            buffer = ctypes.create_string_buffer(content.encode())
            value.type = STRING
            value.content.string_value = ctypes.addressof(buffer)
        else:
            buffer = (int64 * len(content))(*content)
            value.type = INT64_LIST
            value.content.int64_array_value = ctypes.addressof(buffer)
        buffers.append(buffer)
    return values, buffers


def numbers(values: ctypes._Pointer[NamedValue], count: int) -> dict[str, float]:
    """Returns the named values that are numbers."""
    found = {}
    for value in values[:count]:
        name = decode(value.name, value.name_size)
        if value.type == INT64:
            found[name] = value.content.int64_value
        elif value.type == FLOAT:
            found[name] = value.content.float_value
    return found
