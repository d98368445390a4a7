"""XLA devices: set-up, mesh, precision, moving a model, the compiled step and its contract.

One program serves one core and a pod (SPMD): `setup` makes a 1-D mesh named "data" over all devices; batches are
sharded on it, parameters are replicated, and XLA inserts the gradient all-reduce. This package is the only place that
imports torch_xla.
"""

import contextlib
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from errors import InputError
from train.common.xla import replay

PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Mesh:
    """All devices of the run, and this host's place among them.

    Attributes:
        device: the virtual XLA device that holds every tensor.
        spmd: 1-D `torch_xla.distributed.spmd.Mesh` with the axis "data".
        num_devices: devices of all hosts.
        process_index, process_count: this host, and how many there are.
        places: where this host's devices are on the mesh, in the order in which torch_xla fills them; (): after those
            of the hosts before it.
        kind: hardware, such as "TPU v5 lite" or "CPU".
        precision: what `autocast` computes in, "bfloat16" or "float32".
        strict: a recompilation after warm-up or a host fall-back is an error; otherwise a warning.
    """

    device: torch.device
    spmd: xs.Mesh
    num_devices: int
    process_index: int
    process_count: int
    kind: str
    precision: str
    strict: bool
    places: tuple[int, ...] = ()

    @property
    def main_process(self) -> bool:
        """True on the one host that prints and writes."""
        return self.process_index == 0

    def rows(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this host loads, in the order in which it uploads them.

        torch_xla cuts what a host uploads (`minibatch=True`) into equal parts and gives the i-th to the i-th of the
        host's devices (GetShardIndicesForMinibatchTensor in torch_xla/csrc/xla_sharding_util.cpp); in the batch on the
        mesh, the rows of device 0 come first, then those of device 1. These need not be on one host: on a 4x4 slice the
        devices are counted along its lines, and a host has a square of it, such as 0, 1, 4 and 5.
        """
        local = self.num_devices // self.process_count
        places = self.places or range(self.process_index * local, (self.process_index + 1) * local)
        size = batch_size // self.num_devices
        return np.concatenate([np.arange(place * size, (place + 1) * size) for place in places])

    def autocast(self) -> torch.autocast:
        """Context for the forward pass; parameters, gradients and optimizer state stay float32."""
        # torch_xla.amp.autocast crashes on the CPU backend (torch_xla 2.9); torch's own knows "xla".
        return torch.autocast("xla", dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


def setup(seed: int, precision: str = "bfloat16", strict: bool = True) -> Mesh:
    """Turns SPMD on, seeds every generator and makes the mesh. Call it before anything else touches a device:
    a CPU `backward()` before it makes later XLA backward passes fail inside autograd.

    `CPU_NUM_DEVICES=4` gives four virtual devices on the CPU backend. On TPU, compiled programs are cached on disk in
    $XLA_CACHE_DIR (default ~/.cache/xla-zoo); the CPU backend cannot read such a cache back, so it has none.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if not xr.is_spmd():
        if xr.device_type() == "TPU":
            xr.initialize_cache(os.environ.get("XLA_CACHE_DIR", os.path.expanduser("~/.cache/xla-zoo")))
        xr.use_spmd()
    device = torch_xla.device()
    num_devices = xr.global_runtime_device_count()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    xm.set_rng_state(seed)
    hardware = xr.device_type() or "CPU"
    kind = str(xr.global_runtime_device_attributes()[0].get("device_kind", hardware)) if hardware == "TPU" else hardware
    mesh = Mesh(
        device=device,
        spmd=xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)),
        num_devices=num_devices,
        process_index=xr.process_index(),
        process_count=xr.process_count(),
        kind=kind,
        precision=precision,
        strict=strict,
        places=_places() if xr.process_count() > 1 else (),
    )
    if mesh.process_count > 1:
        _check_places(mesh)
    return mesh


def _places() -> tuple[int, ...]:
    """The numbers of this host's devices in torch_xla's order: "TPU:4" is the fifth of all hosts' devices, which the
    mesh has in the order of their numbers."""
    return tuple(int(name.split(":")[1]) for name in torch_xla._XLAC._xla_get_runtime_devices())


def _check_places(mesh: Mesh) -> None:
    """Uploads what `Mesh.rows` says, and looks on the device whether each row has its number: otherwise predictions
    would be taken for those of other examples.

    Raises:
        RuntimeError: torch_xla fills the devices in another order.
    """
    rows = _from_hosts(torch.from_numpy(mesh.rows(mesh.num_devices)), mesh)
    expected = torch.arange(mesh.num_devices).to(mesh.device)
    if fetch([(rows - expected).abs().max()]) != [0.0]:
        raise RuntimeError(f"host {mesh.process_index} fills other rows of a batch than {mesh.places}")


def to_device(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Moves a model to the mesh, replicated; returns the same object, with the same Parameter objects.

    Plain `module.to(xla)` makes new parameters, and with them silently unties shared ones (tied embeddings become two
    that train apart). Here each tensor is swapped in place, so ties, and optimizers made before, stay valid.
    """
    before = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(mesh.device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    if before != [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]:
        raise RuntimeError("moving the model to the device replaced parameters: tied weights would be untied")
    for tensor in [*model.parameters(), *model.buffers()]:
        replicate(tensor, mesh)
    return model


def replicate(tensor: Tensor, mesh: Mesh) -> None:
    """Annotates a tensor on the device as held whole by every device of the mesh.

    A tensor without annotation is replicated too, but what the first step returns carries one, so that the second step
    would be another graph: the whole step would be compiled twice.
    """
    annotate(tensor.data, mesh.spmd, (None,) * tensor.dim())


def annotate(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> None:
    """Annotates a tensor on the device with the axis of `spmd` over which each of its dimensions is split, or None. A
    tensor on the meta device remembers it, as `sharding`, for staging.py."""
    if tensor.is_meta:
        tensor.sharding = spmd, spec
    else:
        xs.mark_sharding(tensor, spmd, spec)


def init_optimizer_state(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Creates the state that `optimizer.step()` would create in step 1 (momentum, moments), as zeros on the device.

    Without it step 2 has more inputs than step 1, and XLA compiles the whole train step twice. The state's names and
    shapes come from one step of the same optimizer on zeros on the CPU; any optimizer whose fresh state is zero will
    do.

    Adam and AdamW become `capturable`, with the learning rate as a tensor on the device. As Python floats, their bias
    corrections and lr * weight_decay round to the constants 0.0 and 1.0 in the middle of a run (with beta2 = 0.98 after
    823 steps), and the step would be compiled again.

    Raises:
        RuntimeError: the optimizer's state does not start at zero, or it corrects bias by a count of its own in Python.
    """
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            raise RuntimeError(
                "dampening does not apply to the first step, so momentum cannot start at zero: use dampening=0"
            )
        shadows = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for p in group["params"]]
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        # A float learning rate and no `capturable`: the shadow runs on the CPU.
        options = {k: v for k, v in group.items() if k != "params"} | {"lr": 0.1}
        if "capturable" in options:
            options["capturable"] = False
        shadow_optimizer = type(optimizer)([{"params": shadows, **options}])
        shadow_optimizer.step()
        if "step" in shadow_optimizer.param_groups[0] and group.get("bias_correction", True):
            raise RuntimeError(
                f"{type(optimizer).__name__} corrects bias by a Python count of steps, which compiles the step again "
                "and is in no checkpoint: use bias_correction=False"
            )
        for name in shadow_optimizer.param_groups[0].keys() - group.keys():  # timm's count of steps, on the host
            group[name] = shadow_optimizer.param_groups[0][name] * 0
        if isinstance(optimizer, torch.optim.Adam):  # and AdamW
            group["capturable"] = True
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32).to(mesh.device)
            # From its first addcdiv_ on, torch_xla 2.9 traces the views of a tensor in another way (an embedding's step
            # 2 would be another graph): do one that adds 0, now.
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.addcdiv_(torch.zeros_like(parameter), torch.ones_like(parameter))
                    replicate(parameter, mesh)
        for parameter, shadow in zip(group["params"], shadows, strict=True):
            state = {}
            for name, value in shadow_optimizer.state[shadow].items():
                if not torch.is_tensor(value):
                    state[name] = 0 if name == "step" else value
                    continue
                if name != "step" and value.any():
                    raise RuntimeError(
                        f"{type(optimizer).__name__} starts its state {name!r} at {value.flatten()[0]}, not 0"
                    )
                # torch keeps the step counter on the CPU, unless the optimizer is capturable.
                on_device = (value.shape == shadow.shape and name != "step") or group.get("capturable", False)
                state[name] = torch.zeros_like(value).to(mesh.device if on_device else "cpu")
                if on_device:
                    replicate(state[name], mesh)
            if state:
                optimizer.state[parameter] = state


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every parameter group the learning rate of this step, without compiling the step again.

    torch_xla sends a Python float to the device as an input of the graph, except 0.0 and 1.0, which it builds in as
    constants: a warm-up from 0 would compile the step twice. So these two are replaced by neighbours that give the same
    float32 update. (A tensor on the device will not do: torch's and timm's SGD and LARS read it back in each step.)
    Where `init_optimizer_state` put it on the device, it is replaced by a new tensor there; again not by 0, since
    capturable Adam divides by it: a parameter whose gradient has always been 0 would become NaN.
    """
    number = lr
    if lr == 0.0:
        number = 1e-30
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(number, dtype=torch.float32).to(group["lr"].device)
        else:
            group["lr"] = math.nextafter(1.0, 0.0) if number == 1.0 else number


def seed_step(seed: int, step: int) -> None:
    """Makes the random numbers of the next step on the device (dropout) depend on (seed, step) alone, so that a resumed
    run draws what an uninterrupted one drew, however many graphs ran before."""
    xm.set_rng_state(int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint32)[0]))


def fetch(values: Sequence[Tensor]) -> list[float]:
    """Reads 0-d device tensors, all in one transfer; it waits for what computes them. Not for the training loop."""
    values = list(values)
    torch_xla._XLAC._xla_sync_multi(values, devices=[], wait=True, sync_xla_data=False)
    return [float(value) for value in torch_xla._XLAC._xla_get_cpu_tensors(values)]


def fetch_sums(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Adds up what an evaluation step returned for each batch, in one transfer and in Python's double precision."""
    names = list(batches[0])
    values = fetch([batch[name] for batch in batches for name in names])
    return {name: math.fsum(values[i :: len(names)]) for i, name in enumerate(names)}


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies computed device tensors to the host, all in one transfer, and compiles nothing."""
    return torch_xla._XLAC._xla_get_cpu_tensors(list(tensors)) if tensors else []


def after_next_step(function: Callable[[], None]) -> None:
    """Calls `function` when the next step has been started: it may read what was computed before."""
    xm.add_step_closure(function)


def run_pending() -> None:
    """Starts what the device has not been asked to compute yet, and calls what waits for a step."""
    torch_xla.sync()


def wait_for_steps() -> None:
    """Returns when the device has computed all that was started."""
    xm.wait_device_ops()


def _from_hosts(local: Tensor, mesh: Mesh) -> Tensor:
    """A tensor on the mesh, of the parts that the hosts have, a row a device."""
    sharding = xs.ShardingSpec(mesh.spmd, ("data",), minibatch=mesh.process_count > 1)
    return xm.send_cpu_data_to_device(local, mesh.device, sharding)[0]


class OverHosts(NamedTuple):
    """Of a number that each host has: the smallest, the largest, and the sum."""

    low: int
    high: int
    total: int


def over_hosts(mesh: Mesh, value: int) -> OverHosts:
    """Compares a number of each host, exact up to 2**53. On a pod it waits for all hosts and for the device, so every
    host must call it at the same point, and not in every step."""
    if mesh.process_count == 1:
        return OverHosts(value, value, value)
    devices = mesh.num_devices // mesh.process_count
    numbers = _from_hosts(torch.full((devices,), value, dtype=torch.int64), mesh)
    low, high, total = (int(number) for number in fetch([numbers.min(), numbers.max(), numbers.sum()]))
    return OverHosts(low, high, total // devices)


def same_on_all_hosts(mesh: Mesh, name: str, value: int) -> None:
    """Makes sure that every host of a pod has the same number, such as the step to resume from or the size of the data:
    hosts that disagree would wait for each other forever.

    Raises:
        InputError: with the smallest and the largest value.
    """
    low, high, _ = over_hosts(mesh, value)
    if low != high:
        raise InputError(
            f"the hosts disagree about {name}: from {low} to {high}; they must see the same files (use gs://)"
        )


# ---- the compiled step -----------------------------------------------------------------------------------------------


class GraphError(RuntimeError):
    """A step broke the graph contract: it recompiled after warm-up, or left the device in the middle."""


@dataclass
class _Report:
    compile_seconds: float = 0.0
    recompilations: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    traced: int = 0
    repeated: int = 0
    not_repeatable: list[str] = field(default_factory=list)


_report = _Report()
_constant_reads = 0


def compilations() -> int:
    """Graphs that this process has compiled so far."""
    return met.counter_value("UncachedCompile") or 0


def host_reads() -> int:
    """Transfers from the device to the host so far, without those that look at a new program's constants."""
    data = met.metric_data("TransferFromDeviceTime")
    return (data[0] if data else 0) - _constant_reads


def graph_report() -> dict[str, Any]:
    """What the run has compiled: `graphs` (all), `compile_seconds` (of the steps' first calls),
    `recompilations` and `fallbacks` (a sentence each), `host_reads`; calls `traced` and `repeated`, and why a step is
    `not_repeatable` (a sentence each)."""
    return {
        "graphs": compilations(),
        "compile_seconds": _report.compile_seconds,
        "recompilations": list(_report.recompilations),
        "fallbacks": list(_report.fallbacks),
        "host_reads": host_reads(),
        "traced": _report.traced,
        "repeated": _report.repeated,
        "not_repeatable": list(_report.not_repeatable),
    }


def reset_graph_report() -> None:
    """Starts a new report; for tests and for scripts that train twice in one process. The count of graphs goes on."""
    global _report
    _report = _Report()


CHECK_EVERY = 1000  # calls: every so often a step is traced again, to see that it still is the same program


@dataclass
class _Known:
    """What may be started without tracing."""

    program: replay.Program
    confirmed: bool = False  # by a second trace
    calls: int = 0


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int = 1) -> Callable:
    """Makes one XLA graph of each call of `step_fn` and holds it to its contract.

    The first call with new input shapes traces and compiles; the second must trace the same program. From then on the
    program is started at once, without running `step_fn` (replay.py): as under `jax.jit`, what its Python does besides
    is not done again. Every CHECK_EVERY-th call, and each with other modules, optimizers or numbers among the
    arguments, traces it again. What breaks the contract stops a strict run (a warning otherwise, and every call is
    traced), because each makes a TPU crawl and nobody notices:

    * more than `max_graphs` different input shapes: stops before it compiles, and names the input and both shapes;
    * another graph although the shapes are known: names what can cause it;
    * a value read in the middle of the step (`.item()`, `if tensor:`), or an operation that falls back to the host.

    Args:
        step_fn: takes modules, optimizers, tensors, dicts of tensors and numbers; returns tensors or a dict of them.
            Gradients must not outlive it (`zero_grad(set_to_none=True)`): live tensors are outputs of the graph. A step
            that reads or changes tensors of something else is traced in every call, with a note that says so.
        max_graphs: how many different input shapes are expected: 1, or the number of length buckets.
    Raises:
        GraphError: the contract is broken.
    """
    name = getattr(step_fn, "__name__", "step")
    seen: dict[tuple, dict[str, Any]] = {}
    programs: dict[tuple, _Known] = {}
    repeatable = mesh.strict  # what a step reads in its middle would not be read again
    strays = 0

    def problem(kind: list[str], message: str) -> None:
        kind.append(message)
        if mesh.strict:
            raise GraphError(message + "; --no-strict makes this a warning")
        print(f"warning: {message}", flush=True)

    def traced(args: Sequence[Any], trace: replay.Trace | None) -> Any:
        """Runs the step's Python."""
        fallbacks = _fallback_counts()
        error = None
        torch_xla._XLAC._set_allow_execution(not mesh.strict)
        try:
            with trace or contextlib.nullcontext():
                result = step_fn(*args)
        except RuntimeError as raised:
            error = raised
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        new_fallbacks = sorted(name for name, count in _fallback_counts().items() if count > fallbacks.get(name, 0))
        new_fallbacks = [name for name in new_fallbacks if mesh.strict or name not in _report.fallbacks]
        _report.fallbacks.extend(new_fallbacks)
        if new_fallbacks:
            message = f"{name} runs {', '.join(new_fallbacks)} on the host, since XLA has no lowering for it"
            if mesh.strict:
                raise GraphError(message + ": replace it, or use --no-strict") from error
            print(f"warning: {message}", flush=True)
        if error is not None:
            if "Unexpected execution" in str(error):
                raise GraphError(
                    f"{name} reads a device value before its end (.item(), float(), print, `if` on a tensor), in the "
                    "line of the step that the traceback above ends with; keep the value a tensor, or return it"
                ) from error
            raise error
        return result

    def call(*args: Any) -> Any:
        nonlocal strays, repeatable
        global _constant_reads
        before = compilations()
        torch_xla.sync()  # whatever is pending must not become part of this graph
        strays = strays + 1 if len(seen) and compilations() > before else 0
        if strays == 3:
            problem(
                _report.recompilations,
                f"operations outside of {name} were compiled before three calls in a row: move them into it, "
                "or give them inputs of a constant shape",
            )

        inputs = dict(_describe(args))
        shapes = tuple((key, value) for key, value in inputs.items() if not isinstance(value, float))
        if shapes not in seen and len(seen) >= max_graphs:
            problem(_report.recompilations, f"{name} would be compiled again: {_difference(inputs, seen)}")

        known, trace = programs.get(shapes), None
        if repeatable:
            arguments = replay.Arguments(args)
            if known is not None:
                known.calls += 1
                if known.confirmed and known.calls % CHECK_EVERY and known.program.fits(arguments):
                    _report.repeated += 1
                    return known.program(arguments)
            trace = replay.Trace(arguments, known.calls if known else 0)

        _report.traced += 1
        before, started = compilations(), time.perf_counter()
        result = traced(args, trace)
        gave_up = False
        if trace is not None:
            reads = host_reads()
            try:
                program = trace.program(args, result)
                same = known is not None and known.program.graph == program.graph
                if same and not known.program.same_as(program):
                    raise replay.NotRepeatable("a number or tensor that it makes differs from call to call")
                programs[shapes] = _Known(program, same, known.calls if known else 0)
                trace.run(program)
            except replay.NotRepeatable as reason:
                gave_up, repeatable = known is not None, False
                message = f"{name} is traced in every call: {reason}"
                _report.not_repeatable.append(message)
                print(f"note: {message}", flush=True)
                if known is not None and known.confirmed:
                    problem(_report.recompilations, message + f"; it was not in the {known.calls} calls before")
                if arguments.groups:  # it was traced with other learning rates
                    if not reason.can_undo:
                        raise GraphError(
                            f"{name} cannot be traced with a learning rate that is a Python number: {reason}; pass "
                            "what holds them to it, or use --no-strict"
                        ) from reason
                    trace.undo()
                    result = traced(args, None)
            finally:
                _constant_reads += host_reads() - reads
        torch_xla.sync()

        new_graphs = compilations() - before
        if new_graphs:
            _report.compile_seconds += time.perf_counter() - started
        if shapes in seen and new_graphs and not gave_up:
            changed = [
                f"{key} from {seen[shapes][key]} to {value}"
                for key, value in inputs.items()
                if seen[shapes][key] != value
            ]
            cause = (
                f"the Python number {', '.join(changed)} changed (give a tensor on the device)"
                if changed
                else "a Python value or branch inside it changed, or the step itself created state in its first call "
                "(device.init_optimizer_state creates the optimizer's beforehand) or left gradients alive (zero_grad), "
                "or an input was not uploaded by the loader"
            )
            problem(_report.recompilations, f"{name} was compiled again for known input shapes: {cause}")
        seen.setdefault(shapes, inputs)
        return result

    return call


class WhileLoop:
    """`while state["running"]: state = body(state, reads)` as one program on the device, which decides when it ends.

    Called inside a compiled step it becomes a part of the step's graph: however many rounds a loop takes, the host
    traces its body once for each set of shapes, starts one program and reads nothing in between. It works on tensors
    sharded over the mesh, too; `body` must not draw random numbers.

    Args:
        body: takes two dicts of tensors, returns the next state: the same names, shapes and types, "running" a bool
            scalar among them.
        model: what else the body reads, its parameters and buffers.
    Raises:
        ValueError: body changes the state's names, shapes or types.
    """

    def __init__(self, body: Callable[[dict, dict], dict], model: nn.Module):
        self.body, self.model = body, model
        self._built: dict[tuple, tuple[Any, list[Tensor]]] = {}

    def __call__(self, state: dict[str, Tensor], reads: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in [*state.items(), *reads.items()])
        # What is traced depends on the type of autocast and on the mode of the model.
        key += (torch.is_autocast_enabled("xla"), self.model.training)
        if key not in self._built:
            self._built[key] = self._build(state, reads, weights)
        computation, constants = self._built[key]
        operands = [*state.values(), *reads.values(), *weights.values(), *constants]
        results = torch_xla._XLAC._xla_user_computation("xla::while_loop", operands, computation)
        return dict(zip(state, results, strict=True))

    def _build(self, state: dict[str, Tensor], reads: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple:
        """(the loop as a computation of all operands, the numbers in the body that became operands)."""

        def stand_ins(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            # The lowering takes as operands what has been uploaded, not what is still to be computed; and what it takes
            # is no longer updated in place by the next step, which would be another graph.
            return {k: xb.create_placeholder_tensor(v.shape, v.dtype) for k, v in tensors.items()}

        state_in, reads_in, weights_in = stand_ins(state), stand_ins(reads), stand_ins(weights)
        operands = [*state_in.values(), *reads_in.values(), *weights_in.values()]
        place = {handle: index for index, handle in enumerate(torch_xla._XLAC._get_tensors_handle(operands))}
        with torch.no_grad(), _replaced(self.model, {id(weights[name]): weights_in[name] for name in weights}):
            state_out = self.body(dict(state_in), dict(reads_in))
        described = [{k: (tuple(v.shape), v.dtype) for k, v in each.items()} for each in (state_in, state_out)]
        if described[0] != described[1]:
            changed = {k for k in described[0] | described[1] if described[0].get(k) != described[1].get(k)}
            before, after = ({k: each.get(k) for k in sorted(changed)} for each in described)
            raise ValueError(f"the body of a loop must keep names, shapes and types: {before} became {after}")

        context = torch_xla._XLAC.lowering.LoweringContext("while_loop")
        context.build([state_out[name] for name in state])
        parameters = context.device_parameter_id_tensor_mapping()
        arguments, constants = [], []
        for number in sorted(parameters):
            handle = torch_xla._XLAC._get_tensors_handle([parameters[number]])[0]
            if handle not in place:  # torch_xla makes operands of Python numbers
                place[handle] = len(operands) + len(constants)
                constants.append(parameters[number])
            arguments.append(place[handle])
        if constants:
            replay.fix(constants)
        body = xb.computation_from_module_proto("body", context.hlo())

        everything = [*operands, *constants]
        builder = xb.create_builder("while_loop")
        shapes = xb.tensor_shape(tuple(everything))
        initial = xb.Op.tuple(tuple(xb.mkparam(builder, i, shape) for i, shape in enumerate(shapes)))
        condition_builder, body_builder = xb.create_builder("condition"), xb.create_builder("round")
        running = list(state).index("running")
        condition = xb.mkparam(condition_builder, 0, initial.shape()).get_tuple_element(running).build("condition")
        carried = xb.mkparam(body_builder, 0, initial.shape())
        elements = [carried.get_tuple_element(i) for i in range(len(everything))]
        result = xb.Op.call(body, [elements[argument] for argument in arguments])
        updated = [result.get_tuple_element(i) for i in range(len(state))]
        body = xb.Op.tuple(tuple(updated + elements[len(state) :])).build("round")
        loop = xb.mkop("While", (initial.op,), condition_computation=condition, body_computation=body)
        return xb.Op.tuple(tuple(loop.get_tuple_element(i) for i in range(len(state)))).build("while_loop"), constants


@contextlib.contextmanager
def _replaced(model: nn.Module, others: dict[int, Tensor]) -> Iterator[None]:
    """The model with other tensors (by the id of its own) in place of its parameters and buffers.
    (`torch.func.functional_call` would leave tied parameters untied.)"""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: others[id(own)] for name, own in table.items() if own is not None})
        yield
    finally:
        for table, own in zip(tables, kept, strict=True):
            table.update(own)


def _fallback_counts() -> dict[str, int]:
    """How often each operation has run on the host so far; without .item(), which is a read, not a missing lowering."""
    names = [name for name in met.counter_names() if name.startswith("aten::") and name != "aten::_local_scalar_dense"]
    return {name: met.counter_value(name) for name in names}


def _describe(args: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name, what a graph depends on) for everything in the arguments of a step."""
    if isinstance(args, Tensor):
        yield path, (tuple(args.shape), str(args.dtype).removeprefix("torch."))
    elif isinstance(args, nn.Module):
        yield path, ("training" if args.training else "evaluation")
    elif isinstance(args, Mapping):
        for key, value in args.items():
            yield from _describe(value, f"{path}[{key!r}]")
    elif isinstance(args, tuple | list):
        for position, value in enumerate(args):
            yield from _describe(value, f"{path}[{position}]" if path else f"argument {position}")
    elif isinstance(args, bool | int | float | str):
        yield path, args


def _difference(inputs: dict[str, Any], seen: dict[tuple, dict[str, Any]]) -> str:
    """The input that no known call had, and what the most similar call had in its place."""
    known = max(seen.values(), key=lambda other: sum(other.get(k) == v for k, v in inputs.items()))
    changes = [
        f"{key} is {value}, compiled for {known.get(key)}" for key, value in inputs.items() if known.get(key) != value
    ]
    return "; ".join(changes[:3]) or "an input is missing: " + ", ".join(sorted(set(known) - set(inputs)))


@contextlib.contextmanager
def stop_requested(mesh: Mesh, every: int = 10) -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM (what a preempted VM gets) and Ctrl-C into a flag, so that a loop can save and leave.

    Yields a function that tells whether one has come; call it once in each step. A second Ctrl-C interrupts at once.

    The hosts of a pod leave in the same step, also when the signal comes to them in different ones, or to one host
    alone: those that stay would wait for it forever. They agree in every `every`-th call, each of which waits for the
    device; until then the answer is no. One host alone reacts in the next call, and reads nothing.
    """
    received: list[int] = []
    calls = itertools.count(1)  # alike on all hosts, since they take the same steps

    def handle(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    def stopped() -> bool:
        if mesh.process_count == 1:
            return bool(received)
        return next(calls) % every == 0 and over_hosts(mesh, len(received)).high > 0

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
