"""The XLA backend of device.py: a 1-D mesh named "data" over all devices, on which batches are sharded and parameters
replicated, so that XLA inserts the gradient all-reduce; and a step is one compiled graph."""

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
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla import backends

from train.common import hooks
from train.common.mesh import GraphError, Mesh
from train.common.xla import replay

set_seed = xm.set_rng_state
after_next_step = xm.add_step_closure
run_pending = torch_xla.sync
wait_for_steps = xm.wait_device_ops
read = torch_xla._XLAC._xla_get_cpu_tensors

# libtpu compiles on fibers whose stack has 64 KiB by default. Before 0.0.51 it recurses deeper than that in some of our
# programs, and the process dies. How much each program needs stands in docs/tpu/versions.md.
STACK = "--fibers_default_thread_stack_size=524288"
# Fusions that make nearly all our steps cheaper by libtpu's estimate (docs/tpu/findings.md); 0.0.21 knows them, too.
DEEP_FUSION = "--xla_tpu_enable_multi_level_output_dot_dot_fusion=true"  # of some programs it needs STACK
SHALLOW_FUSIONS = "--xla_tpu_input_conv_multi_users=true --xla_jf_enable_advanced_multi_output_fusion=true"
FUSIONS = f"{SHALLOW_FUSIONS} {DEEP_FUSION}"
_asked: set[str] = set()  # flags that this process has put into LIBTPU_INIT_ARGS; the others there are the user's
_loaded_with: str | None = None  # LIBTPU_INIT_ARGS when a set-up of this process had libtpu loaded
ROWS = {("data",): "data", ("copies", "data", "model"): ("copies", "data")}  # what cuts a batch, by the mesh's axes


def ask_compiler(flags: str, vmem_kib: int = 0) -> None:
    """Gives libtpu, before it is loaded, flags that LIBTPU_INIT_ARGS does not set. `vmem_kib`: see device.setup."""
    flags += f" --xla_tpu_scoped_vmem_limit_kib={vmem_kib}" if vmem_kib else ""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    names = {word.lstrip("-").partition("=")[0] for word in given.split()}
    missing = []
    for flag in flags.split():
        name = flag.lstrip("-").partition("=")[0]
        if name not in names and f"no{name}" not in names:
            missing.append(flag)
    _asked.update(missing)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([given, *missing]).strip()


def ask_for_forms(vmem_kib: int, safe_forms: bool) -> None:
    """Gives libtpu, before it is loaded, the flags that our steps are written for; `make compile` calls it, too.

    With `safe_forms` it gets none that a step needs in order to compile, and not the fusion that needs a larger stack.
    What an earlier call of this process has asked for is taken back: it was not the user's.
    """
    given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    ours = _asked & {STACK, DEEP_FUSION}
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(flag for flag in given if flag not in ours)
    ask_compiler(SHALLOW_FUSIONS if safe_forms else f"{STACK} {FUSIONS}", vmem_kib)


def compiler() -> str:
    """Returns which libtpu compiles for this process' TPU: "libtpu 0.0.21", or the path of another."""
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
    """Says which libtpu compiles, before it is loaded, since it may end the process; and where it was loaded already,
    that it does not have the flags. Every host does: its own libtpu is what may die."""
    global _loaded_with
    print(about_compiler(safe_forms), file=sys.stderr, flush=True)
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if not torch_xla._XLAC._xla_runtime_is_initialized():
        _loaded_with = flags
    elif _loaded_with is None:
        told = "libtpu was loaded before device.setup, maybe without these flags: call device.setup before any device"
        print(f"warning: {told} is used", file=sys.stderr, flush=True)
    elif sorted(_loaded_with.split()) != sorted(flags.split()):
        told = f"libtpu was loaded earlier in this process, and keeps LIBTPU_INIT_ARGS={_loaded_with!r}: start a new"
        print(f"warning: {told} process for other flags", file=sys.stderr, flush=True)


def about_compiler(safe_forms: bool) -> str:
    """Returns what a log must say before libtpu compiles for the first time: a crash in it says nothing itself."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    about = f"{compiler()} compiles, in {'safe' if safe_forms else 'the usual'} forms, with LIBTPU_INIT_ARGS={flags!r}"
    if safe_forms:
        return about
    return f"{about}; if the process dies of a flag, or while it compiles, add --safe-forms (docs/tpu.md)"


def setup(precision: str, strict: bool, kind: str, vmem_kib: int, safe_forms: bool) -> Mesh:
    """Turns SPMD on and returns the mesh of all devices. Programs are not kept on disk, see docs/tpu.md."""
    ask_for_forms(vmem_kib, safe_forms)
    hardware = xr.device_type() or "CPU"
    if hardware == "TPU":
        announce_compiler(safe_forms)
    set_products(precision if hardware == "TPU" else "fast_float32")  # a CPU's are float32 in any case
    if not xr.is_spmd():
        xr.use_spmd()
    num_devices, hosts = xr.global_runtime_device_count(), xr.process_count()
    names = xr.global_runtime_device_attributes()[0] if hardware == "TPU" else {}
    local = torch_xla._XLAC._xla_get_runtime_devices()  # in torch_xla's order; "TPU:4" is the fifth device of the mesh
    mesh = Mesh(
        device=torch_xla.device(),
        spmd=xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)),
        num_devices=num_devices,
        process_index=xr.process_index(),
        process_count=hosts,
        kind=str(names.get("device_kind", hardware)),
        precision=precision,
        strict=strict,
        safe_forms=safe_forms,
        places=tuple(int(name.split(":")[1]) for name in local) if hosts > 1 else (),
    )
    if hosts > 1:
        _check_places(mesh)
    return mesh


def _check_places(mesh: Mesh) -> None:
    """Checks on the device that `Mesh.rows` fill the mesh in order; otherwise predictions would be taken for those of
    other examples, so it raises RuntimeError."""
    rows = upload(torch.from_numpy(mesh.rows(mesh.num_devices)), mesh)
    if fetch([(rows - torch.arange(mesh.num_devices).to(mesh.device)).abs().max()]) != [0.0]:
        raise RuntimeError(f"host {mesh.process_index} fills other rows of a batch than {mesh.places}")


def set_products(precision: str) -> None:
    """Chooses how a TPU multiplies float32 matrices in the graphs to come. By default it rounds them to bfloat16, 8
    bits; "highest" takes six passes. torch_xla 2.9 asks for it neither in einsum, which models/products.py therefore
    replaces, nor in the backward pass of convolutions, which stays at one pass."""
    exact = precision == "float32"
    torch.backends.cuda.matmul.fp32_precision = "ieee" if exact else "none"  # what models/products.py looks at
    wanted = "highest" if exact else "default"
    if backends.get_mat_mul_precision() != wanted:  # it warns of a second call
        backends.set_mat_mul_precision(wanted)


def annotate(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> None:
    if tensor.is_meta:  # for tpu/compiler/staging.py
        tensor.sharding = spmd, spec
    else:
        xs.mark_sharding(tensor, spmd, spec)


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    sharding = row_sharding(mesh.spmd, tensor.dim(), mesh.process_count > 1)
    return xm.send_cpu_data_to_device(tensor, mesh.device, sharding)[0]


@functools.cache
def row_sharding(spmd: xs.Mesh, rank: int, hosts: bool) -> xs.ShardingSpec:
    """Returns what cuts a tensor by its first dimension; a spec fits tensors of one rank only. A vector is whole where
    there are more axes: torch_xla 2.9 cannot upload one that is cut over some of them."""
    axis = ROWS[spmd.axis_names] if rank > 1 or len(spmd.axis_names) == 1 else None
    return xs.ShardingSpec(spmd, (axis,) + (None,) * (rank - 1), minibatch=hosts)


def fetch(values: list[Tensor]) -> list[float]:
    torch_xla._XLAC._xla_sync_multi(values, devices=[], wait=True, sync_xla_data=False)
    return [float(value) for value in read(values)]


def prepare_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], mesh: Mesh) -> list[Tensor]:
    """Puts Adam's learning rate and count of steps on the device; returns the parameters that it has computed anew,
    whose annotations the caller makes again.

    As Python floats, Adam's bias corrections and lr * weight_decay round to the constants 0.0 and 1.0 in the middle of
    a run (with beta2 = 0.98 after 823 steps), and the step would be compiled again.
    """
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return []

    group["capturable"] = True
    group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32).to(mesh.device)

    # From its first addcdiv_ on, torch_xla 2.9 traces the views of a tensor in another way (an embedding's step 2 would
    # be another graph): do one that adds 0, now.
    with torch.no_grad():
        for parameter in group["params"]:
            parameter.addcdiv_(torch.zeros_like(parameter), torch.ones_like(parameter))
    return list(group["params"])


def compilations() -> int:
    """Returns how many graphs this process has compiled."""
    return met.counter_value("UncachedCompile") or 0


def host_reads() -> int:
    """Returns how many transfers to the host this process made, without looks at a new program's constants."""
    data = met.metric_data("TransferFromDeviceTime")
    return (data[0] if data else 0) - replay.Trace.host_reads


@dataclass
class GraphReport:
    """What the steps of a process have compiled, as `summary` lists it."""

    compile_seconds: float = 0.0  # of the calls that compiled
    traced: int = 0  # calls
    repeated: int = 0  # calls
    recompilations: list[str] = field(default_factory=list)  # a sentence each
    fallbacks: list[str] = field(default_factory=list)  # operations that ran on the host

    def summary(self, reset: bool = False) -> dict[str, Any]:
        """Returns these, `graphs` and `host_reads`, which are of the process; `reset` lets the others start again."""
        found = asdict(self) | {"graphs": compilations(), "host_reads": host_reads()}
        if reset:
            self.__init__()
        return found


_compiling_since: float | None = None  # by time.monotonic(): a step traces and compiles a new program


def compiling_since() -> float | None:
    return _compiling_since


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Says, to other threads too, that what is done inside may take as long as a compiler does."""
    global _compiling_since
    _compiling_since = time.monotonic()
    try:
        yield
    finally:
        _compiling_since = None


_report = GraphReport()  # one per process, since torch_xla counts compilations and transfers of the process
graph_report = _report.summary


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int) -> "CompiledStep":
    says = compiler() if mesh.main_process and xr.device_type() == "TPU" else ""
    return CompiledStep(step_fn, mesh.strict, _report, max_graphs, compiler=says)


@dataclass
class _Calls:
    """The calls with one set of input shapes and numbers."""

    count: int = 0
    program: replay.Program | None = None  # of the last trace
    confirmed: bool = False  # two traces gave this program: it starts without a trace


class CompiledStep:
    """A step that is one XLA graph per call, held to its contract by a GraphError.

    The first call with new input shapes or numbers traces and compiles; the second must trace the same program, which
    from then on starts at once, without running `step_fn` (replay.py): as under `jax.jit`, what its Python does besides
    is not repeated. Every `check_every`-th call traces it again, and so does each call with other modules or optimizers
    among its arguments. What breaks the contract stops a strict step, because each makes a TPU crawl unnoticed:

    * more than `max_graphs` (1, or the number of length buckets) different input shapes or numbers;
    * another graph although these are known;
    * a value read in the middle of the step (`.item()`, `if tensor:`), or an operation that falls back to the host;
    * a program that cannot be started again: the step reads or changes tensors that are not among its arguments, or
      computes with a Python number that differs from call to call.

    A step that is not strict warns instead. It may read values in its middle, so it is traced in every call.

    Args:
        step_fn: takes modules, optimizers, tensors, dicts of tensors and numbers; returns tensors or a dict of them.
            Gradients must not outlive it (`zero_grad(set_to_none=True)`): live tensors are outputs of the graph.
        compiler: what compiles, for the line that each new program prints before; "": no line. A compiler that dies
            takes the process with it, and the log must say in what.
    """

    def __init__(
        self, step_fn: Callable, strict: bool, report: GraphReport, max_graphs=1, check_every=1000, compiler=""
    ):
        self.name = getattr(step_fn, "__name__", "step")
        self._step_fn, self._strict, self._report = step_fn, strict, report
        self._max_graphs, self._check_every = max_graphs, check_every
        self._compiler = compiler
        self._known: dict[tuple, _Calls] = {}
        self._strays = 0  # calls in a row before which something else was compiled

    def __call__(self, *args: Any) -> Any:
        with hooks.span(hooks.START):
            return self._call(args)

    def _call(self, args: Sequence[Any]) -> Any:
        """Starts the known program of these arguments, or traces, compiles and starts theirs."""
        self._sync_pending()
        arguments = replay.Arguments(args)
        inputs = tuple(arguments.inputs.items())
        calls = self._known.get(inputs) or self._new_calls(arguments.inputs)
        calls.count += 1
        if calls.confirmed and calls.program.facts == arguments.facts and (calls.count - 1) % self._check_every:
            self._report.repeated += 1
            return calls.program(arguments)
        self._report.traced += 1
        if calls.count > 2 or calls.confirmed:
            return self._traced_call(args, arguments, calls)
        with _compiling():
            return self._traced_call(args, arguments, calls)

    def _traced_call(self, args: Sequence[Any], arguments: replay.Arguments, calls: _Calls) -> Any:
        """Traces a step and runs its program, which is compiled where it is new."""
        inputs = tuple(arguments.inputs.items())
        is_new = inputs not in self._known
        if is_new and self._compiler:
            print(f"compiling {self.name} with {self._compiler}", file=sys.stderr, flush=True)
        graphs, started = compilations(), time.perf_counter()
        result = self._trace(args, arguments, calls) if self._strict else self._run(args)
        torch_xla.sync()
        if compilations() > graphs:
            seconds = time.perf_counter() - started
            self._report.compile_seconds += seconds
            if is_new and self._compiler:
                print(f"compiled {self.name} in {seconds:.0f} s", file=sys.stderr, flush=True)
            if inputs in self._known:
                self._recompiled(
                    f"{self.name} was compiled again for known input shapes: a Python value or branch inside it "
                    "changed, or it made state in its first call (device.init_optimizer_state makes it before) or kept "
                    "gradients alive (zero_grad), or a module (device.to_device) or an input was not uploaded"
                )
        self._known[inputs] = calls
        return result

    def _sync_pending(self) -> None:
        """Runs pending operations, which must not become part of the step's graph."""
        graphs = compilations()
        torch_xla.sync()
        self._strays = self._strays + 1 if self._known and compilations() > graphs else 0
        if self._strays == 3:
            self._recompiled(
                f"operations outside of {self.name} were compiled before three calls in a row: move them into it, or "
                "give them inputs of a constant shape"
            )

    def _new_calls(self, inputs: dict[str, Any]) -> _Calls:
        if len(self._known) >= self._max_graphs:
            known = _difference(inputs, [dict(inputs) for inputs in self._known])
            self._recompiled(f"{self.name} would be compiled again: {known}")
        if not self._strict and not self._known:
            reason = "--no-strict lets it read values in its middle, which a repeated program would not do"
            print(f"note: {self.name} is traced in every call: {reason}", flush=True)
        return _Calls()

    def _recompiled(self, message: str) -> None:
        self._report.recompilations.append(message)
        if self._strict:
            raise GraphError(message + "; --no-strict makes this a warning")
        print(f"warning: {message}", flush=True)

    def _run(self, args: Sequence[Any]) -> Any:
        """Runs the step's Python, which makes the graph."""
        fallbacks = fallback_counts()
        torch_xla._XLAC._set_allow_execution(not self._strict)
        try:
            # Autograd's own thread may hold tensors a moment longer than `backward`: alive, they would be results.
            with torch.autograd.set_multithreading_enabled(False):
                return self._step_fn(*args)
        except RuntimeError as error:
            if "Unexpected execution" not in str(error):
                raise
            raise GraphError(
                f"{self.name} reads a device value before its end (.item(), float(), print, `if` on a tensor), in the "
                "line of the step that the traceback above ends with; keep the value a tensor, or return it"
            ) from error
        finally:
            torch_xla._XLAC._set_allow_execution(True)
            self._check_fallbacks(fallbacks)

    def _check_fallbacks(self, before: dict[str, int]) -> None:
        names = sorted(name for name, count in fallback_counts().items() if count > before.get(name, 0))
        if names := [name for name in names if self._strict or name not in self._report.fallbacks]:
            self._report.fallbacks.extend(names)
            message = f"{self.name} runs {', '.join(names)} on the host, since XLA has no lowering for it"
            if self._strict:
                raise GraphError(message + ": replace it, or use --no-strict")
            print(f"warning: {message}", flush=True)

    def _trace(self, args: Sequence[Any], arguments: replay.Arguments, calls: _Calls) -> Any:
        """Traces the step and runs its program, which a second trace confirms."""
        try:
            program, result = replay.Trace(args, arguments, calls.count).start(self._run)
            known = calls.program
            calls.confirmed = known is not None and (known.graph, known.facts) == (program.graph, program.facts)
            if calls.confirmed and not known.same_as(program):
                raise replay.NotRepeatable("a number or tensor that it makes differs from call to call")
        except replay.NotRepeatable as reason:
            raise GraphError(
                f"call {calls.count} of {self.name} cannot be repeated: {reason}; change that (of a learning rate by "
                "device.set_lr), or use --no-strict, which traces every call"
            ) from reason
        calls.program = program
        return result


def fallback_counts() -> dict[str, int]:
    """Returns how often each operation has run on the host, torchvision's too, without .item(), which is a read."""
    names = [name for name in met.executed_fallback_ops() if name != "aten::_local_scalar_dense"]
    return {name: met.counter_value(name) for name in names}


def _difference(inputs: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """Names the inputs that no known call had, and what the most similar call had in their place."""
    nearest = max(known, key=lambda other: sum(other.get(name) == value for name, value in inputs.items()))
    changes = [
        f"{name} is {value}, compiled for {nearest.get(name)}"
        + (" (give a changing number as a tensor on the device)" if isinstance(value, int | float) else "")
        for name, value in inputs.items()
        if nearest.get(name) != value
    ]
    return "; ".join(changes[:3]) or "an input is missing: " + ", ".join(sorted(set(nearest) - set(inputs)))
