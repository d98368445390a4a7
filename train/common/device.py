"""The device of a run: one surface over two backends, of which `setup` chooses one for the process.

    xla          xla/backend.py: one program serves one core and a pod (SPMD); a step is one
                 compiled graph
    cpu, cuda    eager.py: plain PyTorch on one device per process, operation by operation;
                 torch_xla need not be installed
    tpu          the same on one chip through TorchTPU, see torchtpu.py; never run

Nothing else asks which one it is. train/common/xla and train/common/embedding/xla_devices.py alone
import torch_xla.
"""

import contextlib
import itertools
import math
import os
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import optional
from errors import InputError
from train.common import interrupt
from train.common.mesh import DEVICES, PRECISIONS, WHOLE, Layout, Mesh

MOST_LR = 1e30  # Adam's lr / (1 - beta1) must be a float32

_backend: Any = None  # the module that `choose_backend` has chosen


# ---- set-up --------------------------------------------------------------------------------------
def setup(
    seed: int,
    precision: str = "bfloat16",
    strict: bool = True,
    kind: str = "xla",
    layout: Layout = WHOLE,
    vmem_kib: int = 0,
    safe_forms: bool = False,
) -> Mesh:
    """Chooses the backend, seeds every generator and returns the mesh.

    Call it before anything else touches a device: a CPU `backward()` makes XLA's backward passes
    fail inside autograd.

    Args:
        precision: what `Mesh.autocast` computes in. "bfloat16"; "float32", whose products are those
            of float32 on every hardware (but for the backward pass of convolutions on a TPU, see
            xla/backend.py); or "fast_float32", with the hardware's own products: one pass of
            bfloat16 on a TPU, TF32 on a GPU.
        kind: "xla": a TPU where there is one, else XLA's CPU backend (`CPU_NUM_DEVICES=4` gives it
            four virtual devices); "cpu" or "cuda": plain PyTorch on one device, or on one of each
            process that torchrun has started; "tpu": the same on one chip by TorchTPU, never run.
        vmem_kib: KiB of a TPU core's vector memory that one fusion may use, unless LIBTPU_INIT_ARGS
            says how many; 0: libtpu's own.
        safe_forms: asks the TPU's compiler for nothing that it may die of, and tells `build` so by
            `Mesh.safe_forms`. XLA_ZOO_SAFE_FORMS=1 in the environment asks for the same. Elsewhere
            than on a TPU it changes no number.
    Raises:
        InputError: there is no such device, or a value is not one of those above.
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed is {seed}; it must be at least 0 and below 2**63")
    for name, value, known in (("precision", precision, PRECISIONS), ("device", kind, DEVICES)):
        if value not in known:
            raise InputError(f"{name} is {value!r}; it must be one of {', '.join(known)}")

    backend = choose_backend(kind)
    sharding = None
    if layout != WHOLE:
        sharding = optional.load("sharding")
        sharding.ask_for_reduce_scatters(layout, backend)
    mesh = backend.setup(precision, strict, kind, vmem_kib, wants_safe_forms(safe_forms))

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    _backend.set_seed(seed)
    return sharding.arranged(mesh, layout) if sharding else mesh


def wants_safe_forms(given: bool) -> bool:
    """Returns whether the flag or XLA_ZOO_SAFE_FORMS in the environment asks for safe forms.

    Raises:
        InputError: the variable is neither 0, 1 nor empty.
    """
    variable = os.environ.get("XLA_ZOO_SAFE_FORMS", "")
    if variable not in ("", "0", "1"):
        raise InputError(
            f"XLA_ZOO_SAFE_FORMS is {variable!r}; "
            "set it to 1 for the forms of --safe-forms, or to 0"
        )
    return given or variable == "1"


def choose_backend(kind: str) -> ModuleType:
    """Makes every function below work on this kind of device; returns the backend, for `setup`."""
    global _backend
    _backend = optional.load("xla" if kind == "xla" else "eager", asked=kind)
    return _backend


# ---- steps ---------------------------------------------------------------------------------------
def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int = 1) -> Callable:
    """Returns `step_fn` as one XLA graph per call.

    What it must keep to stands in `CompiledStep` (xla/backend.py). On plain PyTorch it runs as it
    is, and may be a `torch.compile(step_fn)`.
    """
    return _backend.compiled(step_fn, mesh, max_graphs)


def graph_report(reset: bool = False) -> dict[str, Any]:
    """Returns `GraphReport.summary` of the steps since the last `reset`; {} on plain PyTorch."""
    return _backend.graph_report(reset)


def compiling_since() -> float | None:
    """Returns since when, by time.monotonic(), a compiled step traces and compiles a new program.

    None where none does, and on plain PyTorch. Another thread than that of the steps may ask.
    """
    return _backend.compiling_since()


# ---- models and tensors --------------------------------------------------------------------------
def to_device(model: nn.Module, mesh: Mesh, rules: Callable | None = None) -> nn.Module:
    """Moves a model to the mesh, replicated, or as a Layout and its `rules` say.

    Plain `module.to(xla)` makes new Parameters, and unties tied embeddings.

    Args:
        rules: see models/partition.py.
    Returns:
        The same model with the same Parameter objects.
    Raises:
        InputError: a weight is not finite. A damaged checkpoint must not be called a diverged
            training.
    """
    _check_finite(model)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(mesh.device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)

    if mesh.layers:
        mesh.layers.arrange(model, rules)
    for tensor in [*model.parameters(), *model.buffers()]:
        annotate_placement(tensor, mesh)
    _backend.train_together(model, mesh)
    return model


def _check_finite(model: nn.Module) -> None:
    """Raises InputError where a weight on the host is not finite."""
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu" or not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            raise InputError(
                f"the weight {name} is not finite before the first step; expected finite numbers: "
                "the checkpoint that it is from is damaged, give another"
            )


def replicate(tensor: Tensor, mesh: Mesh) -> None:
    """Annotates a tensor as whole on every device.

    Without an annotation, what a first step returns would be the input of another graph.
    """
    annotate(tensor.data, mesh.spmd, (None,) * tensor.dim())


def whole_batch(rows: Tensor, mesh: Mesh) -> Tensor:
    """Returns a tensor [B, ...] of the whole batch, which every host can read, in the order of the
    batch.

    Args:
        rows: on XLA the tensor itself, which is annotated as whole on every device. In plain
            PyTorch the rows that this process has of it, [B / processes, ...].
    """
    replicate(rows, mesh)
    return _backend.gather_rows(rows)


def mean_over_processes(value: Tensor) -> Tensor:
    """Returns the mean over processes of a tensor that each computes of its own rows of a batch;
    without its gradient. On XLA, where a step has the whole batch, it is the tensor itself.

    A loss that is a sum over examples, tokens or words is divided by the mean of their counts. The
    mean of such losses over the processes, which their gradients are those of, is the sum of the
    whole batch divided by its count.
    """
    return _backend.mean_over_processes(value)


def shared_mean(value: Tensor) -> Tensor:
    """Returns the mean over the processes of plain PyTorch, as `mean_over_processes` does, with its
    gradient: that of the mean of all processes' losses."""
    return _backend.shared_mean(value)


def accumulating(is_accumulating: bool) -> contextlib.AbstractContextManager:
    """Returns a context in which backward passes do not average gradients over processes, if
    another one of the same update will follow, which averages the sums of all."""
    return _backend.accumulating(is_accumulating)


def annotate_placement(tensor: Tensor, mesh: Mesh, of: Tensor | None = None) -> None:
    """Annotates a parameter, a gradient or an optimizer's state as it lies on the devices.

    That is its `placement`, which sharding/ has given it; without one, whole on every device.

    Args:
        of: the parameter whose gradient or state the tensor is. The tensor gets the parameter's
            `state_placement` as its own, if both have one shape.
    """
    if hasattr(of, "state_placement") and tensor.shape == of.shape:
        tensor.placement = of.state_placement

    placement = getattr(tensor, "placement", None)
    if placement is None:
        replicate(tensor, mesh)
    else:
        annotate(tensor.data, placement.spmd, placement.spec)


def annotate(tensor: Tensor, spmd: Any, spec: tuple) -> None:
    """Annotates a tensor on the device: `spec` has the axis that splits each dimension, or None."""
    _backend.annotate(tensor, spmd, spec)


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Copies a host's rows of a batch, or of anything with rows for each device, to the mesh.

    It is split by its first dimension. The host's memory may be used again at once.
    """
    return _backend.upload(tensor, mesh)


def bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads a tensor's bits as numbers of another type of the same size."""
    if tensor.device.type == "cpu":
        return tensor.view(dtype)
    return _backend.bitcast(tensor, dtype)


def barrier() -> Callable[[list[Tensor]], None] | None:
    """Returns what marks tensors, in place, as to be computed before anything that reads them.

    XLA otherwise joins operations of both sides, or computes one of them again. None on plain
    PyTorch, which computes in the order of the program.
    """
    return _backend.barrier()


# ---- optimizers ----------------------------------------------------------------------------------
def init_optimizer_state(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Creates the state that `optimizer.step()` would create in step 1, as zeros on the device.

    Without it step 2 has more inputs than step 1, and XLA compiles the whole train step twice.
    Names and shapes come from one step of the same optimizer on zeros on the CPU. A backend may
    change a group, see its `prepare_group`: on XLA Adam becomes capturable.

    Raises:
        RuntimeError: the optimizer's state does not start at zero.
    """
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            # One parameter at a time, for the host's memory.
            stepped = _stepped_on_zeros(optimizer, group, parameter)
            if number == 0:
                _prepare_group(optimizer, group, stepped, mesh)
            values = next(iter(stepped.state.values()), {})
            state = _initial_state(optimizer, group, parameter, values, mesh)
            if state:
                optimizer.state[parameter] = state
    if mesh.layers:
        mesh.layers.keep_placements(optimizer, mesh)


def _prepare_group(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    stepped: torch.optim.Optimizer,
    mesh: Mesh,
) -> None:
    """Adds what a step adds to a group, at zero, and lets the backend change it."""
    after = stepped.param_groups[0]
    for name in after.keys() - group.keys():  # timm's count of steps, on the host
        group[name] = after[name] * 0
    for changed in _backend.prepare_group(optimizer, group, mesh):
        annotate_placement(changed, mesh)


def _initial_state(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    stepped: dict[str, Any],
    mesh: Mesh,
) -> dict[str, Any]:
    """Returns the state of a parameter before step 1, given its state after a step on zeros."""
    state = {}
    for name, value in stepped.items():
        is_count = name == "step"
        if not torch.is_tensor(value):
            state[name] = 0 if is_count else value
            continue
        if not is_count and value.any():
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"{kind} starts its state {name!r} at {value.flatten()[0]}, not 0: "
                "take another, such as AdamW"
            )

        count_on_device = group.get("capturable") or group.get("fused")
        if count_on_device or (value.shape == parameter.shape and not is_count):
            state[name] = torch.zeros_like(value).to(mesh.device)
            annotate_placement(state[name], mesh, of=parameter)
        else:  # torch keeps the count of steps on the CPU
            state[name] = torch.zeros_like(value)
    return state


def _stepped_on_zeros(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], of: nn.Parameter
) -> torch.optim.Optimizer:
    """Returns an optimizer like this one after a step on zeros, like a parameter, on the CPU."""
    if group.get("momentum") and group.get("dampening"):
        raise RuntimeError(
            "dampening leaves out the first step, so momentum cannot start at zero: use dampening=0"
        )

    shadow = nn.Parameter(torch.zeros(of.shape, dtype=of.dtype))
    shadow.grad = torch.zeros_like(shadow)
    options = dict(group)
    options["params"] = [shadow]
    options["lr"] = 0.1  # a float: this one runs on the CPU
    if "capturable" in group:
        options["capturable"] = False
    stepped = type(optimizer)([options])
    stepped.step()

    if "step" in stepped.param_groups[0] and group.get("bias_correction", True):
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind} corrects bias by a Python count of steps, which is in no checkpoint: "
            "use bias_correction=False"
        )
    return stepped


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every parameter group the learning rate of this step, without compiling the step again.

    A rate that `init_optimizer_state` put on the device is replaced by a new tensor. It is never 0:
    capturable Adam divides by it, 0 / 0 where a gradient is always 0.

    A rate that is a Python float is sent to the device as an input of the graph, except 0.0 and
    1.0, which torch_xla builds in as constants: a warm-up from 0 would compile the step twice. So
    these two are replaced by neighbours that give the same float32 update. (SGD and LARS would read
    a rate on the device back in each step.)

    Raises:
        InputError: the rate is above 1e30, and Adam's lr / (1 - beta1) would not be a float32.
    """
    if not lr <= MOST_LR:
        raise InputError(
            f"the learning rate of this step is {lr:g}; "
            "float32 takes at most 1e30: give a lower --lr"
        )

    number = 1e-30 if lr == 0.0 else lr
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(number, dtype=torch.float32).to(group["lr"].device)
        elif number == 1.0:
            group["lr"] = math.nextafter(1.0, 0.0)
        else:
            group["lr"] = number


def seed_step(seed: int, step: int) -> None:
    """Makes the next step's random numbers (dropout) depend on (seed, step) alone; in plain PyTorch
    on several processes also on the process, which draws for its own rows."""
    sequence = np.random.SeedSequence((seed, step, *_backend.own_seed()))
    _backend.set_seed(int(sequence.generate_state(1, np.uint32)[0]))


# ---- reading from the device ---------------------------------------------------------------------
def fetch(values: Sequence[Tensor]) -> list[float]:
    """Reads 0-d device tensors in one transfer.

    It waits for what computes them, so it is not for the training loop.
    """
    return _backend.fetch(list(values))


def fetch_sums(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Sums the 0-d tensors of an evaluation step over its batches, by name; over those of all
    processes, where each has computed them of its own rows.

    They are read in one transfer and added in Python's double precision.
    """
    names = list(batches[0])
    tensors = []
    for batch in batches:
        for name in names:
            tensors.append(batch[name])
    numbers = torch.tensor(fetch(tensors), dtype=torch.float64)
    values = _backend.gather_rows(numbers).tolist()
    return {name: math.fsum(values[i :: len(names)]) for i, name in enumerate(names)}


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies computed tensors to the host in one transfer; compiles nothing."""
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copies = iter(_backend.read(on_device) if on_device else ())
    found = []
    for tensor in tensors:
        found.append(tensor.clone() if tensor.device.type == "cpu" else next(copies))
    return found


# ---- waiting -------------------------------------------------------------------------------------
def after_next_step(function: Callable[[], None]) -> None:
    """Calls `function` when the next step has started: it may read what was computed before."""
    _backend.after_next_step(function)


def run_pending() -> None:
    """Starts what the device has not been asked to compute yet, and calls what waits for a step."""
    _backend.run_pending()


def wait_for_steps() -> None:
    """Returns when the device has computed all that was started."""
    _backend.wait_for_steps()


# ---- hosts of a pod, processes of plain PyTorch --------------------------------------------------
class OverHosts(NamedTuple):
    """A number of each host."""

    low: int  # the smallest
    high: int
    total: int


def over_hosts(mesh: Mesh, value: int) -> OverHosts:
    """Compares a number of each host, exact up to 2**53.

    On a pod it waits for all hosts and for the device, so every host must call it at the same
    point, and not in every step.
    """
    if mesh.process_count == 1:
        return OverHosts(value, value, value)

    devices_per_host = mesh.num_devices // mesh.process_count
    if mesh.compiles:
        rows = torch.full((devices_per_host,), value, dtype=torch.int64)
        numbers = upload(rows, mesh)
    else:
        numbers = _backend.gather_rows(torch.tensor([value]))  # on the host, not the device
    low, high, total = fetch([numbers.min(), numbers.max(), numbers.sum()])
    return OverHosts(int(low), int(high), int(total) // devices_per_host)


def wait_for_hosts(mesh: Mesh) -> None:
    """Returns when all hosts of a pod have called it."""
    over_hosts(mesh, 0)


def from_main_process(mesh: Mesh, values: Sequence[float]) -> list[float]:
    """Returns the numbers that the main process gives, bit for bit, on every host.

    Every host calls it at the same point, with as many numbers; those of the others do not count.
    """
    if mesh.process_count == 1:
        return list(values)

    shared = []
    for value in values:
        # A float's 64 bits as two integers that `over_hosts` compares exactly. The others give 0.
        halves = struct.unpack("<2I", struct.pack("<d", value if mesh.main_process else 0.0))
        low, high = (over_hosts(mesh, half).high for half in halves)
        shared.append(struct.unpack("<d", struct.pack("<2I", low, high))[0])
    return shared


def same_on_all_hosts(mesh: Mesh, name: str, value: int) -> None:
    """Checks that every host of a pod has the same number, such as the step to resume from.

    Raises:
        InputError: they do not; such hosts would wait for each other forever.
    """
    low, high, _ = over_hosts(mesh, value)
    if low != high:
        raise InputError(
            f"hosts disagree about {name}: from {low} to {high}; "
            "they must see the same files (use gs://)"
        )


@contextlib.contextmanager
def stop_requested(mesh: Mesh, every: int = 10) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGTERM or Ctrl-C has come; call it once in each step.

    A preempted VM gets SIGTERM. The first signal is answered at once, a second Ctrl-C ends at once,
    see interrupt.py.

    The hosts of a pod must leave in the same step, or those that stay would wait forever. They
    agree in every `every`-th call, which waits for the device; until then the answer is no.
    """
    calls = itertools.count(1)  # alike on all hosts, since they take the same steps

    with interrupt.caught(says=mesh.main_process) as received:

        def stopped() -> bool:
            if mesh.process_count == 1:
                return received() > 0
            if next(calls) % every != 0:
                return False
            return over_hosts(mesh, received()).high > 0

        yield stopped
