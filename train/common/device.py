"""The device of a run: one surface over two backends, of which `setup` chooses one for the process.

    xla          xla/backend.py: one program serves one core and a pod (SPMD); a step is one compiled graph
    cpu, cuda    eager.py: plain PyTorch on one device, operation by operation; torch_xla need not be installed

Nothing else asks which one it is. train/common/xla and train/common/embedding/xla_devices.py alone import torch_xla.
"""

import contextlib
import itertools
import math
import os
import random
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import optional
from errors import InputError
from train.common import interrupt
from train.common.mesh import DEVICES, PRECISIONS, WHOLE, Layout, Mesh

_backend: Any = None  # the module that `choose_backend` has chosen


def setup(
    seed: int,
    precision: str = "bfloat16",
    strict: bool = True,
    kind: str = "xla",
    layout: Layout = WHOLE,
    vmem_kib: int = 0,
    safe_forms: bool = False,
) -> Mesh:
    """Chooses the backend, seeds every generator and returns the mesh; raises InputError where there is no such device.
    Call it before anything else touches one: a CPU `backward()` makes XLA's backward passes fail inside autograd.

    Args:
        precision: what `Mesh.autocast` computes in: "bfloat16"; "float32", whose products are those of float32 on
            every hardware (but the backward pass of convolutions on a TPU, see xla/backend.py); or "fast_float32", with
            the hardware's own products: one pass of bfloat16 on a TPU, TF32 on a GPU.
        kind: "xla": a TPU where there is one, else XLA's CPU backend (`CPU_NUM_DEVICES=4` gives it four virtual
            devices); "cpu" or "cuda": plain PyTorch on one device.
        vmem_kib: KiB of a TPU core's vector memory that one fusion may use, unless LIBTPU_INIT_ARGS says how many; 0:
            libtpu's own.
        safe_forms: has the TPU's compiler asked for nothing that it may die of, and `Mesh.safe_forms` tell `build` so.
            XLA_ZOO_SAFE_FORMS=1 in the environment asks for the same. Elsewhere than on a TPU it changes no number.
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
    """Returns whether the flag or XLA_ZOO_SAFE_FORMS in the environment asks for safe forms; raises InputError where
    the variable says neither."""
    variable = os.environ.get("XLA_ZOO_SAFE_FORMS", "")
    if variable not in ("", "0", "1"):
        raise InputError(f"XLA_ZOO_SAFE_FORMS is {variable!r}; set it to 1 for the forms of --safe-forms, or to 0")
    return given or variable == "1"


def choose_backend(kind: str) -> ModuleType:
    """Makes every function below work on this kind of device; returns the backend, which only `setup` needs."""
    global _backend
    _backend = optional.load("xla" if kind == "xla" else "eager", asked=kind)
    return _backend


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int = 1) -> Callable:
    """Returns `step_fn` as one XLA graph per call, held to the contract of `CompiledStep` (xla/backend.py). On plain
    PyTorch it runs as it is, and may be a `torch.compile(step_fn)`."""
    return _backend.compiled(step_fn, mesh, max_graphs)


def graph_report(reset: bool = False) -> dict[str, Any]:
    """Returns `GraphReport.summary` of this process's steps since the last `reset`; {} on plain PyTorch."""
    return _backend.graph_report(reset)


def compiling_since() -> float | None:
    """Returns since when, by time.monotonic(), a compiled step traces and compiles a new program; None where none does,
    and on plain PyTorch. Another thread than that of the steps may ask."""
    return _backend.compiling_since()


def to_device(model: nn.Module, mesh: Mesh, rules: Callable | None = None) -> nn.Module:
    """Moves a model to the mesh, replicated, or as a Layout and its `rules` (models/partition.py) say; returns the same
    object and Parameter objects. Plain `module.to(xla)` makes new ones, and unties tied embeddings. Raises InputError
    where a weight is not finite: a damaged checkpoint must not be called a diverged training."""
    for name, tensor in model.named_parameters():
        if tensor.device.type == "cpu" and tensor.is_floating_point() and not tensor.isfinite().all():
            what = f"the weight {name} is not finite before the first step"
            raise InputError(
                f"{what}; expected finite numbers: the checkpoint that it is from is damaged, give another"
            )
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(mesh.device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    if mesh.layers:
        mesh.layers.arrange(model, rules)
    for tensor in [*model.parameters(), *model.buffers()]:
        replicate(tensor, mesh)
    return model


def replicate(tensor: Tensor, mesh: Mesh, of: Tensor | None = None) -> None:
    """Annotates a tensor on the device as held whole by every device of the mesh, or as train/common/sharding has cut
    it or the parameter that it belongs to (`of`); without one, what a first step returns would be another graph's."""
    if hasattr(of, "state_placement") and tensor.shape == of.shape:
        tensor.placement = of.state_placement
    annotate(tensor.data, *getattr(tensor, "placement", (mesh.spmd, (None,) * tensor.dim())))


def annotate(tensor: Tensor, spmd: Any, spec: tuple) -> None:
    """Annotates a tensor on the device with the axis of `spmd` over which each of its dimensions is split, or None."""
    _backend.annotate(tensor, spmd, spec)


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Copies a host's share of a batch, or of anything with a row per device, to the mesh, cut by its first dimension;
    the host's memory may be used again at once."""
    return _backend.upload(tensor, mesh)


def init_optimizer_state(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Creates the state that `optimizer.step()` would create in step 1 (momentum, moments), as zeros on the device.

    Without it step 2 has more inputs than step 1, and XLA compiles the whole train step twice. Names and shapes come
    from one step of the same optimizer on zeros on the CPU; one whose state does not start at zero raises RuntimeError.
    A backend may change a group, see its `prepare_group`: on XLA Adam becomes capturable.
    """
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            stepped = _stepped_on_zeros(optimizer, group, param)  # one by one, for the host's memory
            if number == 0:
                for name in stepped.param_groups[0].keys() - group.keys():  # timm's count of steps, on the host
                    group[name] = stepped.param_groups[0][name] * 0
                for changed in _backend.prepare_group(optimizer, group, mesh):
                    replicate(changed, mesh)
            state = {}
            for name, value in next(iter(stepped.state.values()), {}).items():
                if not torch.is_tensor(value):
                    state[name] = 0 if name == "step" else value
                elif name != "step" and value.any():
                    start = f"its state {name!r} at {value.flatten()[0]}, not 0: take another, such as AdamW"
                    raise RuntimeError(f"{type(optimizer).__name__} starts {start}")
                elif group.get("capturable") or group.get("fused") or (value.shape == param.shape and name != "step"):
                    state[name] = torch.zeros_like(value).to(mesh.device)
                    replicate(state[name], mesh, param)
                else:  # torch keeps the step counter on the CPU
                    state[name] = torch.zeros_like(value)
            if state:
                optimizer.state[param] = state
    if mesh.layers:
        mesh.layers.keep(optimizer, mesh)


def _stepped_on_zeros(optimizer: torch.optim.Optimizer, group: dict, of: nn.Parameter) -> torch.optim.Optimizer:
    """Returns an optimizer like `optimizer` after one step on zeros of the shape of a parameter, on the CPU."""
    if group.get("momentum") and group.get("dampening"):
        raise RuntimeError("dampening leaves out the first step, so momentum cannot start at zero: use dampening=0")
    shadow = nn.Parameter(torch.zeros(of.shape, dtype=of.dtype))
    shadow.grad = torch.zeros_like(shadow)
    # A float learning rate, and not capturable: this one runs on the CPU.
    options = group | {"params": [shadow], "lr": 0.1} | ({"capturable": False} if "capturable" in group else {})
    stepped = type(optimizer)([options])
    stepped.step()
    if "step" in stepped.param_groups[0] and group.get("bias_correction", True):
        count = "a Python count of steps, which is in no checkpoint: use bias_correction=False"
        raise RuntimeError(f"{type(optimizer).__name__} corrects bias by {count}")
    return stepped


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every parameter group the learning rate of this step, without compiling the step again.

    torch_xla sends a Python float to the device as an input of the graph, except 0.0 and 1.0, which it builds in as
    constants: a warm-up from 0 would compile the step twice. So these two are replaced by neighbours that give the same
    float32 update. (On the device SGD and LARS would read it back in each step.) Where `init_optimizer_state` put it
    there, a new tensor replaces it; again not 0, since capturable Adam divides by it, 0 / 0 where a gradient is always
    0. Raises InputError above 1e30, since Adam's lr / (1 - beta1) would not be a float32.
    """
    if not lr <= 1e30:
        raise InputError(f"the learning rate of this step is {lr:g}; float32 takes at most 1e30: give a lower --lr")
    number = 1e-30 if lr == 0.0 else lr
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(number, dtype=torch.float32).to(group["lr"].device)
        else:
            group["lr"] = math.nextafter(1.0, 0.0) if number == 1.0 else number


def seed_step(seed: int, step: int) -> None:
    """Makes the next step's random numbers (dropout) depend on (seed, step) alone, so that a resumed run draws them."""
    _backend.set_seed(int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint32)[0]))


def fetch(values: Sequence[Tensor]) -> list[float]:
    """Reads 0-d device tensors, all in one transfer; it waits for what computes them. Not for the training loop."""
    return _backend.fetch(list(values))


def fetch_sums(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Adds up an evaluation step's 0-d tensors over its batches, in one transfer and in Python's double precision."""
    names = list(batches[0])
    values = fetch([batch[name] for batch in batches for name in names])
    return {name: math.fsum(values[i :: len(names)]) for i, name in enumerate(names)}


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies computed tensors to the host, those on the device all in one transfer, and compiles nothing."""
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copies = iter(_backend.read(on_device) if on_device else ())
    return [tensor.clone() if tensor.device.type == "cpu" else next(copies) for tensor in tensors]


def after_next_step(function: Callable[[], None]) -> None:
    """Calls `function` when the next step has been started: it may read what was computed before."""
    _backend.after_next_step(function)


def run_pending() -> None:
    """Starts what the device has not been asked to compute yet, and calls what waits for a step."""
    _backend.run_pending()


def wait_for_steps() -> None:
    """Returns when the device has computed all that was started."""
    _backend.wait_for_steps()


OverHosts = namedtuple("OverHosts", "low high total")  # the smallest, the largest and the sum of a number of each host


def over_hosts(mesh: Mesh, value: int) -> OverHosts:
    """Compares a number of each host, exact up to 2**53. On a pod it waits for all hosts and for the device, so every
    host must call it at the same point, and not in every step."""
    if mesh.process_count == 1:
        return OverHosts(value, value, value)
    devices = mesh.num_devices // mesh.process_count
    numbers = upload(torch.full((devices,), value, dtype=torch.int64), mesh)
    low, high, total = (int(number) for number in fetch([numbers.min(), numbers.max(), numbers.sum()]))
    return OverHosts(low, high, total // devices)


def same_on_all_hosts(mesh: Mesh, name: str, value: int) -> None:
    """Checks that every host of a pod has the same number, such as the step to resume from or the size of the data;
    raises InputError otherwise. Hosts that disagree would wait for each other forever."""
    low, high, _ = over_hosts(mesh, value)
    if low != high:
        raise InputError(f"hosts disagree about {name}: from {low} to {high}; they must see the same files (use gs://)")


@contextlib.contextmanager
def stop_requested(mesh: Mesh, every: int = 10) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM (what a preempted VM gets) or Ctrl-C has come, to be called once in
    each step. The first is answered at once, a second Ctrl-C ends at once, see interrupt.py. The hosts of a pod must
    leave in the same step, or those that stay would wait forever: they agree in every `every`-th call, which waits for
    the device; until then the answer is no."""
    calls = itertools.count(1)  # alike on all hosts, since they take the same steps

    with interrupt.caught(says=mesh.main_process) as received:

        def stopped() -> bool:
            if mesh.process_count == 1:
                return received() > 0
            return next(calls) % every == 0 and over_hosts(mesh, received()).high > 0

        yield stopped
