"""The XLA backend of device.py.

A 1-D mesh named "data" goes over all devices. Batches are sharded on it and parameters replicated,
so that XLA inserts the all-reduce of gradients. A step is one compiled graph.
"""

import contextlib
import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch_xla import backends

from errors import InputError
from train.common import hooks, progress
from train.common.mesh import GraphError, Mesh
from train.common.xla import replay

set_seed = xm.set_rng_state
after_next_step = xm.add_step_closure
run_pending = torch_xla.sync
wait_for_steps = xm.wait_device_ops
read = torch_xla._XLAC._xla_get_cpu_tensors

# A form is the way in which a step is written, so that libtpu compiles it. The usual forms need the
# flags below; those of --safe-forms are slower, and compile without STACK and DEEP_FUSION.

# libtpu compiles on fibers whose stack has 64 KiB by default. Before 0.0.51 it recurses deeper than
# that in some of our programs, and the process dies. docs/tpu/versions.md says how much stack each
# program needs.
STACK = "--fibers_default_thread_stack_size=524288"

# Fusions that make nearly all our steps cheaper by libtpu's estimate (docs/tpu/findings.md). 0.0.21
# knows them, too. The deep one needs STACK in some programs.
DEEP_FUSION = "--xla_tpu_enable_multi_level_output_dot_dot_fusion=true"
SHALLOW_FUSIONS = "--xla_tpu_input_conv_multi_users=true"
SHALLOW_FUSIONS += " --xla_jf_enable_advanced_multi_output_fusion=true"
FUSIONS = f"{SHALLOW_FUSIONS} {DEEP_FUSION}"

# The axes that split the rows of a batch, by the axes of the mesh.
ROW_AXES = {
    ("data",): "data",
    ("copies", "data", "model"): ("copies", "data"),
}

# Flags that this process has added to LIBTPU_INIT_ARGS; all others there are the user's.
_added_flags: set[str] = set()
_loaded_with: str | None = None  # LIBTPU_INIT_ARGS when this process's set-up loaded libtpu


def ask_compiler(flags: str, vmem_kib: int = 0) -> None:
    """Adds flags to LIBTPU_INIT_ARGS, which libtpu reads when it is loaded.

    A flag that is set there already stays as it is.

    Args:
        flags: separated by spaces.
        vmem_kib: see device.setup; 0: no flag.
    """
    wanted = flags.split()
    if vmem_kib:
        wanted.append(f"--xla_tpu_scoped_vmem_limit_kib={vmem_kib}")

    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    names = {_flag_name(flag) for flag in given.split()}
    missing = []
    for flag in wanted:
        name = _flag_name(flag)
        if name not in names and f"no{name}" not in names:
            missing.append(flag)

    _added_flags.update(missing)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([given, *missing]).strip()


def _flag_name(flag: str) -> str:
    """Returns "name" of "--name=value"."""
    return flag.lstrip("-").partition("=")[0]


def ask_for_forms(vmem_kib: int, safe_forms: bool) -> None:
    """Adds the flags that our steps are written for to LIBTPU_INIT_ARGS.

    Call it before libtpu is loaded, as `setup` and `make compile` do. It first removes STACK and
    DEEP_FUSION where an earlier call of this process has added them, since they are not the user's.

    Args:
        safe_forms: adds neither STACK, which some steps need in order to compile, nor the fusion
            that needs it.
    """
    to_remove = _added_flags & {STACK, DEEP_FUSION}
    given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(flag for flag in given if flag not in to_remove)

    flags = SHALLOW_FUSIONS if safe_forms else f"{STACK} {FUSIONS}"
    ask_compiler(flags, vmem_kib)


def libtpu_version() -> str:
    """Returns which libtpu compiles: "libtpu 0.0.21", or the path of one that is no package."""
    named = os.environ.get("TPU_LIBRARY_PATH", "")
    try:
        package = importlib.metadata.distribution("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return f"libtpu at {named or 'an unknown place'}"

    # torch_xla itself sets the variable to the package's file, where it is not set.
    if named in ("", str(package.locate_file("libtpu/libtpu.so"))):
        return f"libtpu {package.version}"
    return f"libtpu at {named}"


def announce_compiler(safe_forms: bool) -> None:
    """Prints which libtpu compiles, before it is loaded, since a flag of it may end the process.

    Warns where libtpu is loaded already, with other flags. Every host prints, since it is its own
    libtpu that may die.
    """
    global _loaded_with
    print(about_compiler(safe_forms), file=sys.stderr, flush=True)

    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if not torch_xla._XLAC._xla_runtime_is_initialized():
        _loaded_with = flags
    elif _loaded_with is None:
        print(
            "warning: libtpu was loaded before device.setup, maybe without these flags: "
            "call device.setup before any device is used",
            file=sys.stderr,
            flush=True,
        )
    elif sorted(_loaded_with.split()) != sorted(flags.split()):
        print(
            "warning: libtpu was loaded earlier in this process, "
            f"and keeps LIBTPU_INIT_ARGS={_loaded_with!r}: start a new process for other flags",
            file=sys.stderr,
            flush=True,
        )


def about_compiler(safe_forms: bool) -> str:
    """Returns what a log must say before libtpu compiles: a crash in it says nothing itself."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    forms = "safe" if safe_forms else "the usual"
    about = f"{libtpu_version()} compiles, in {forms} forms, with LIBTPU_INIT_ARGS={flags!r}"
    if safe_forms:
        return about

    return (
        f"{about}; if the process dies of a flag, or while it compiles, "
        "add --safe-forms (docs/tpu.md)"
    )


def setup(precision: str, strict: bool, kind: str, vmem_kib: int, safe_forms: bool) -> Mesh:
    """Turns SPMD on and returns the mesh of all devices; the arguments are device.setup's.

    Programs are not kept on disk, see docs/tpu.md.
    """
    ask_for_forms(vmem_kib, safe_forms)
    hardware = xr.device_type() or "CPU"
    if hardware == "TPU":
        announce_compiler(safe_forms)
    # A CPU multiplies float32 matrices in float32, whatever the precision.
    set_matmul_precision(precision if hardware == "TPU" else "fast_float32")
    if not xr.is_spmd():
        xr.use_spmd()

    num_devices = xr.global_runtime_device_count()
    hosts = xr.process_count()
    attributes = _device_attributes() if hardware == "TPU" else [{}] * num_devices
    mesh = Mesh(
        device=torch_xla.device(),
        spmd=xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)),
        num_devices=num_devices,
        process_index=xr.process_index(),
        process_count=hosts,
        kind=str(attributes[0].get("device_kind", hardware)),
        precision=precision,
        strict=strict,
        safe_forms=safe_forms,
        local_devices=_local_devices() if hosts > 1 else (),
        slices=count_slices(attributes),
    )
    if hosts > 1:
        _check_places(mesh)
    return mesh


def _device_attributes() -> list[dict[str, Any]]:
    """Returns what the runtime says of each device, by the device's index in the mesh."""

    def index(attributes: dict[str, Any]) -> int:
        return int(attributes["name"].split(":")[1])  # "TPU:4" is the fifth device of the mesh

    return sorted(xr.global_runtime_device_attributes(), key=index)


def count_slices(attributes: list[dict[str, Any]]) -> int:
    """Returns how many slices the devices of a mesh make up.

    The runtime gives each device of several slices its "slice_index". What is no TPU pretends to be
    as many slices as MEGASCALE_NUM_SLICES says, which on TPUs libtpu reads.

    Args:
        attributes: of each device, in the mesh's order.
    Raises:
        InputError: MEGASCALE_NUM_SLICES does not divide the devices.
        RuntimeError: devices of a slice do not follow each other, as all that is split assumes.
    """
    indices = [each["slice_index"] for each in attributes if "slice_index" in each]
    if not indices and not attributes[0]:
        return _pretended_slices(len(attributes))

    slices = len(set(indices)) or 1
    per_slice = len(attributes) // slices
    expected = [first for first in indices[::per_slice] for _ in range(per_slice)]
    if indices != expected:
        raise RuntimeError(f"devices are not numbered slice by slice: theirs are {indices}")
    return slices


def _pretended_slices(devices: int) -> int:
    """Returns the slices that devices pretend to be which are no TPUs."""
    given = os.environ.get("MEGASCALE_NUM_SLICES") or "1"
    if not given.isascii() or not given.isdigit() or int(given) < 1 or devices % int(given):
        raise InputError(
            f"MEGASCALE_NUM_SLICES is {given}, and there are {devices} devices: "
            "give a divisor of them, or unset it"
        )
    return int(given)


def _local_devices() -> tuple[int, ...]:
    """Returns this host's devices by their index in the mesh, in torch_xla's order."""
    names = torch_xla._XLAC._xla_get_runtime_devices()  # "TPU:4" is the fifth device of the mesh
    return tuple(int(name.split(":")[1]) for name in names)


def _check_places(mesh: Mesh) -> None:
    """Checks on the device that the rows of all hosts (`Mesh.rows`) fill the mesh in order.

    Raises:
        RuntimeError: they do not, and predictions would be taken for those of other examples.
    """
    rows = upload(torch.from_numpy(mesh.rows(mesh.num_devices)), mesh)
    expected = torch.arange(mesh.num_devices).to(mesh.device)
    difference = (rows - expected).abs().max()
    if fetch([difference]) != [0.0]:
        host = mesh.process_index
        raise RuntimeError(f"host {host} fills other rows of a batch than {mesh.local_devices}")


def set_matmul_precision(precision: str) -> None:
    """Chooses how a TPU multiplies float32 matrices in graphs that are traced from now on.

    By default a TPU rounds them to bfloat16, 8 bits of mantissa, and multiplies in one pass. For
    precision "float32" it takes six passes, "highest". torch_xla 2.9 does not pass "highest" on in
    einsum, which models/products.py therefore replaces, nor in the backward pass of convolutions,
    which stays at one pass.
    """
    exact = precision == "float32"
    # Of CUDA by its name, but models/products.py reads it on every device.
    torch.backends.cuda.matmul.fp32_precision = "ieee" if exact else "none"
    wanted = "highest" if exact else "default"
    if backends.get_mat_mul_precision() != wanted:  # torch_xla warns of a second call
        backends.set_mat_mul_precision(wanted)


def annotate(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> None:
    """Does what device.annotate says."""
    if tensor.is_meta:  # for tpu/compiler/staging.py
        tensor.sharding = spmd, spec
    else:
        xs.mark_sharding(tensor, spmd, spec)


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Does what device.upload says."""
    sharding = row_sharding(mesh.spmd, tensor.dim(), mesh.process_count > 1)
    return xm.send_cpu_data_to_device(tensor, mesh.device, sharding)[0]


def gather_rows(rows: Tensor) -> Tensor:
    """Returns the tensor itself: it has the rows of all hosts."""
    return rows


def mean_over_processes(value: Tensor) -> Tensor:
    """Returns the tensor itself: it is of the whole batch."""
    return value


shared_mean = mean_over_processes


def train_together(model: nn.Module, mesh: Mesh) -> None:
    """Does nothing: XLA adds up the gradients of the devices."""


def accumulating(is_accumulating: bool) -> contextlib.AbstractContextManager:
    """Does nothing, likewise."""
    return contextlib.nullcontext()


def own_seed() -> tuple[int, ...]:
    """Returns (): all devices draw the numbers of one program."""
    return ()


@functools.cache
def row_sharding(spmd: xs.Mesh, rank: int, hosts: bool) -> xs.ShardingSpec:
    """Returns the sharding of a tensor of `rank` dimensions that is split by its first one.

    A vector stays whole on a mesh of several axes: torch_xla 2.9 cannot upload one that is split
    over some of them.

    Args:
        hosts: whether there are several, each of which uploads its own rows.
    """
    axis = ROW_AXES[spmd.axis_names]
    if rank == 1 and len(spmd.axis_names) > 1:
        axis = None
    return xs.ShardingSpec(spmd, (axis,) + (None,) * (rank - 1), minibatch=hosts)


def bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Does what `Tensor.view(dtype)` does, which torch_xla 2.9 leaves to the host."""
    computation = _bitcast(tuple(tensor.shape), tensor.dtype, dtype)
    (result,) = torch_xla._XLAC._xla_user_computation("xla::bitcast", [tensor], computation)
    return result


def barrier() -> Callable[[list[Tensor]], None]:
    """Returns XLA's optimization barrier, which works in place."""
    return torch_xla._XLAC._xla_optimization_barrier_


@functools.cache
def _bitcast(shape: tuple[int, ...], source: torch.dtype, target: torch.dtype) -> Any:
    """Returns the computation of `bitcast` for a shape."""
    types = {torch.float32: xb.Type.F32, torch.int32: xb.Type.S32}
    operand = xb.mkshape(types[source], shape)
    return xb.create_computation("bitcast", lambda x: x.bitcast(types[target]), (operand,))


def fetch(values: list[Tensor]) -> list[float]:
    """Does what device.fetch says."""
    torch_xla._XLAC._xla_sync_multi(values, devices=[], wait=True, sync_xla_data=False)
    return [float(value) for value in read(values)]


def prepare_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], mesh: Mesh
) -> list[Tensor]:
    """Makes Adam capturable, and its learning rate a tensor on the device.

    A capturable Adam has its count of steps on the device, too; device.init_optimizer_state puts it
    there. With both on the host, Adam's bias corrections and lr * weight_decay are Python floats,
    which round to the constants 0.0 and 1.0 in the middle of a run (with beta2 = 0.98 after 823
    steps), and the step would be compiled again.

    Every parameter of an Adam is also recomputed once, by adding 0.

    Returns:
        The recomputed parameters, which have lost their annotations: the caller annotates them.
    """
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return []

    group["capturable"] = True
    group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32).to(mesh.device)

    # From a tensor's first addcdiv_ on, torch_xla 2.9 traces views of it in another way: step 2 of
    # an embedding would be another graph. So the first one is here, and adds 0.
    with torch.no_grad():
        for parameter in group["params"]:
            parameter.addcdiv_(torch.zeros_like(parameter), torch.ones_like(parameter))
    return list(group["params"])


def compilations() -> int:
    """Returns how many graphs this process has compiled."""
    return met.counter_value("UncachedCompile") or 0


def host_reads() -> int:
    """Returns how many transfers to the host this process made, without those of `Trace`."""
    data = met.metric_data("TransferFromDeviceTime")
    transfers = data[0] if data else 0
    return transfers - replay.Trace.constant_reads


@dataclass
class GraphReport:
    """What the steps of a process have compiled, as `summary` lists it."""

    compile_seconds: float = 0.0  # of the calls that compiled
    traced: int = 0  # calls
    repeated: int = 0  # calls that started a program without a trace
    recompilations: list[str] = field(default_factory=list)  # a sentence each
    fallbacks: list[str] = field(default_factory=list)  # operations that ran on the host

    def summary(self, reset: bool = False) -> dict[str, Any]:
        """Returns the fields, and the process's `graphs` and `host_reads`.

        Args:
            reset: sets the fields back to nothing afterwards; the process's counts go on.
        """
        found = asdict(self)
        found["graphs"] = compilations()
        found["host_reads"] = host_reads()
        if reset:
            # Not a new object: all compiled steps of the process report to this one.
            vars(self).update(vars(GraphReport()))
        return found


# Since when, by time.monotonic(), a step traces and compiles a new program; None: none does.
_compiling_since: float | None = None


def compiling_since() -> float | None:
    """Does what device.compiling_since says."""
    return _compiling_since


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Makes `compiling_since` say to other threads that what is done inside may take minutes."""
    global _compiling_since
    _compiling_since = time.monotonic()
    try:
        yield
    finally:
        _compiling_since = None


# One per process, since torch_xla counts compilations and transfers of the process.
_report = GraphReport()
graph_report = _report.summary


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int) -> "CompiledStep":
    """Does what device.compiled says."""
    announces = mesh.main_process and xr.device_type() == "TPU"
    announced = libtpu_version() if announces else ""
    return CompiledStep(
        step_fn,
        mesh.strict,
        _report,
        max_graphs,
        compiler=announced,
        tells_progress=mesh.main_process,
    )


# Calls in a row before which something else was compiled, when this is reported.
FOREIGN_COMPILATIONS = 3


@dataclass
class _Calls:
    """The calls with one signature: one set of input shapes, modes and numbers."""

    count: int = 0
    program: replay.Program | None = None  # of the last trace
    confirmed: bool = False  # two traces gave this program: it starts without a trace


class CompiledStep:
    """A step that is one XLA graph per call; a GraphError says where it is not.

    The first call with new input shapes or numbers traces and compiles. The second must trace the
    same program. From then on the program starts at once, without running `step_fn` (replay.py): as
    under `jax.jit`, what else its Python does is not repeated. Every `check_every`-th call traces
    again, and so does each call with other modules or optimizers among its arguments.

    What breaks the contract stops a strict step, because each makes a TPU crawl unnoticed:

    * more than `max_graphs` (1, or the number of length buckets) different input shapes or numbers;
    * another graph although these are known;
    * a value read in the middle of the step (`.item()`, `if tensor:`), or an operation that falls
      back to the host;
    * a program that cannot be started again: the step reads or changes tensors that are not among
      its arguments, or computes with a Python number that differs from call to call.

    A step that is not strict warns instead. It may read values in its middle, so it is traced in
    every call.

    Args:
        step_fn: takes modules, optimizers, tensors, dicts of tensors and numbers; returns tensors
            or a dict of them. Gradients must not outlive it (`zero_grad(set_to_none=True)`): live
            tensors are outputs of the graph.
        compiler: what compiles, such as "libtpu 0.0.21", for the line that is printed before each
            new program; "": no line. A compiler that dies takes the process with it, and the log
            must say in which program.
        tells_progress: whether a person is told how long a compilation takes already.
    """

    def __init__(
        self,
        step_fn: Callable,
        strict: bool,
        report: GraphReport,
        max_graphs: int = 1,
        check_every: int = 1000,
        compiler: str = "",
        tells_progress: bool = False,
    ):
        self.name = getattr(step_fn, "__name__", "step")
        self._step_fn = step_fn
        self._strict = strict
        self._report = report
        self._max_graphs = max_graphs
        self._check_every = check_every
        self._compiler = compiler
        self._tells_progress = tells_progress
        self._known: dict[tuple, _Calls] = {}
        self._foreign_compilations = 0  # calls in a row before which something else was compiled

    def __call__(self, *args: Any) -> Any:
        with hooks.span(hooks.START):
            return self._call(args)

    def _call(self, args: Sequence[Any]) -> Any:
        """Starts the known program of these arguments, or traces, compiles and starts theirs."""
        self._sync_pending()
        arguments = replay.Arguments(args)
        signature = tuple(arguments.signature.items())
        calls = self._known.get(signature)
        if calls is None:
            calls = self._new_calls(arguments.signature)
        calls.count += 1
        if self._can_repeat(calls, arguments):
            self._report.repeated += 1
            return calls.program(arguments)

        self._report.traced += 1
        may_compile = calls.count <= 2 and not calls.confirmed
        if not may_compile:
            return self._traced_call(args, arguments, calls)
        telling = contextlib.nullcontext()
        if self._tells_progress:
            telling = progress.telling(self.name)
        with _compiling(), telling:
            return self._traced_call(args, arguments, calls)

    def _traced_call(self, args: Sequence[Any], arguments: replay.Arguments, calls: _Calls) -> Any:
        """Traces a step and runs its program, which is compiled where it is new."""
        signature = tuple(arguments.signature.items())
        is_new = signature not in self._known
        if is_new and self._compiler:
            self._print(f"compiling {self.name} with {self._compiler}")
        graphs_before = compilations()
        started = time.perf_counter()
        result = self._trace(args, arguments, calls) if self._strict else self._run(args)
        torch_xla.sync()

        if compilations() > graphs_before:
            seconds = time.perf_counter() - started
            self._report.compile_seconds += seconds
            if is_new and self._compiler:
                self._print(f"compiled {self.name} in {seconds:.0f} s")
            if not is_new:
                self._recompiled(
                    f"{self.name} was compiled again for known input shapes: a Python value or "
                    "branch inside it changed, or it made state in its first call "
                    "(device.init_optimizer_state makes it before) or kept gradients alive "
                    "(zero_grad), or a module (device.to_device) or an input was not uploaded"
                )
        self._known[signature] = calls  # only now: of a trace that failed nothing is known
        return result

    def _can_repeat(self, calls: _Calls, arguments: replay.Arguments) -> bool:
        """Returns whether the known program is to be started without a trace."""
        if not calls.confirmed or calls.program.guards != arguments.guards:
            return False
        is_to_be_checked = (calls.count - 1) % self._check_every == 0
        return not is_to_be_checked

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _sync_pending(self) -> None:
        """Runs pending operations, which must not become part of the step's graph."""
        graphs_before = compilations()
        torch_xla.sync()
        if self._known and compilations() > graphs_before:
            self._foreign_compilations += 1
        else:
            self._foreign_compilations = 0

        # Once, not in each further call.
        if self._foreign_compilations == FOREIGN_COMPILATIONS:
            self._recompiled(
                f"operations outside of {self.name} were compiled before three calls in a row: "
                "move them into it, or give them inputs of a constant shape"
            )

    def _new_calls(self, signature: dict[str, Any]) -> _Calls:
        """Returns the record of calls with a new signature, which is not among the known ones yet.

        Reports a recompilation where there are more signatures than `max_graphs`.
        """
        if len(self._known) >= self._max_graphs:
            known = [dict(each) for each in self._known]
            difference = _difference(signature, known)
            self._recompiled(f"{self.name} would be compiled again: {difference}")
        if not self._strict and not self._known:
            print(
                f"note: {self.name} is traced in every call: --no-strict lets it read values "
                "in its middle, which a repeated program would not do",
                flush=True,
            )
        return _Calls()

    def _recompiled(self, message: str) -> None:
        """Reports a recompilation; raises GraphError in a strict step."""
        self._report.recompilations.append(message)
        if self._strict:
            raise GraphError(message + "; --no-strict makes this a warning")
        print(f"warning: {message}", flush=True)

    def _run(self, args: Sequence[Any]) -> Any:
        """Runs the step's Python, which makes the graph."""
        fallbacks = fallback_counts()
        torch_xla._XLAC._set_allow_execution(not self._strict)
        try:
            # Autograd's own thread may hold tensors a moment longer than `backward`: alive, they
            # would be results of the graph.
            with torch.autograd.set_multithreading_enabled(False):
                return self._step_fn(*args)
        except RuntimeError as error:
            if "Unexpected execution" not in str(error):
                raise
            raise GraphError(
                f"{self.name} reads a device value before its end (.item(), float(), print, `if` "
                "on a tensor), in the line of the step that the traceback above ends with; keep "
                "the value a tensor, or return it"
            ) from error
        finally:
            torch_xla._XLAC._set_allow_execution(True)
            self._check_fallbacks(fallbacks)

    def _check_fallbacks(self, before: dict[str, int]) -> None:
        """Reports operations that ran on the host since `before`; GraphError in a strict step."""
        names = []
        for name, count in sorted(fallback_counts().items()):
            is_known = not self._strict and name in self._report.fallbacks
            if count > before.get(name, 0) and not is_known:
                names.append(name)
        if not names:
            return

        self._report.fallbacks.extend(names)
        operations = ", ".join(names)
        message = f"{self.name} runs {operations} on the host, since XLA has no lowering for it"
        if self._strict:
            raise GraphError(message + ": replace it, or use --no-strict")
        print(f"warning: {message}", flush=True)

    def _trace(self, args: Sequence[Any], arguments: replay.Arguments, calls: _Calls) -> Any:
        """Traces the step and starts its program, which a second trace confirms."""
        try:
            program, result = replay.Trace(args, arguments, calls.count).start(self._run)
            known = calls.program
            calls.confirmed = known is not None and _same_trace(known, program)
            # The graph is the same, so only its constants and the order of its inputs may differ.
            if calls.confirmed and not known.same_as(program):
                raise replay.NotRepeatable(
                    "a number or tensor that it makes differs from call to call"
                )
        except replay.NotRepeatable as reason:
            raise GraphError(
                f"call {calls.count} of {self.name} cannot be repeated: {reason}; "
                "change that (of a learning rate by device.set_lr), "
                "or use --no-strict, which traces every call"
            ) from reason
        calls.program = program
        return result


def _same_trace(known: replay.Program, program: replay.Program) -> bool:
    """Returns whether two traces gave one graph, for arguments with the same guards."""
    return known.graph == program.graph and known.guards == program.guards


def fallback_counts() -> dict[str, int]:
    """Returns how often each operation has run on the host, torchvision's as well.

    `.item()` is not among them: it is a read.
    """
    names = [name for name in met.executed_fallback_ops() if name != "aten::_local_scalar_dense"]
    return {name: met.counter_value(name) for name in names}


def _difference(signature: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """Returns how a call's inputs differ from those of the most similar known one, by name.

    At most three changes are named.
    """

    def similarity(other: dict[str, Any]) -> int:
        return sum(other.get(name) == value for name, value in signature.items())

    nearest = max(known, key=similarity)
    changes = []
    for name, value in signature.items():
        if nearest.get(name) == value:
            continue
        change = f"{name} is {value}, compiled for {nearest.get(name)}"
        if isinstance(value, int | float):
            change += " (give a changing number as a tensor on the device)"
        changes.append(change)
    if changes:
        return "; ".join(changes[:3])

    missing = sorted(set(nearest) - set(signature))
    return "an input is missing: " + ", ".join(missing)
