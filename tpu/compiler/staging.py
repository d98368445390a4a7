"""Traces a train step for TPUs that are not there, on this machine's CPU; it neither compiles nor runs the program.

The script's own `build` and `train_step` make the step, with a mesh of as many devices as the TPU has:

    mesh = staging.setup(8, "TPU v5 lite", "bfloat16")
    state = script.build(config, data, mesh)                       # on the meta device: shapes, no numbers
    batch = staging.inputs({"image": ((1024, 224, 224, 3), torch.uint8)}, mesh)
    program = staging.stage(script.train_step, state, batch, config, mesh)

A process stages for one number of devices, and trains nothing.
"""

import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from train.common.device import GraphError, Mesh, annotate, choose_backend
from train.common.xla.backend import row_sharding

MOST_DEVICES = 64  # autograd counts them in 8 bits: with 128 and more, no backward pass begins
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Staged:
    """A step before any optimisation, for all devices.

    Attributes:
        module: the serialised HloModuleProto; each device runs its part of it.
        parameters: the name of each parameter of the entry computation, by its number: where the tensor is in the
            step's arguments, such as "state.model.fc.weight". A Python number, or a constant of the host, has "".
        donated: the numbers of the parameters that the step updates in place: its results take their memory.
        shardings: for each parameter, (axis names or None by dimension, {axis: size} of the mesh).
        outputs: how many tensors the step returns, updated ones included.
        kept: bytes of a device that hold tensors which the arguments have, and the program does not take.
    """

    module: bytes
    parameters: dict[int, str]
    donated: list[int]
    shardings: dict[int, tuple[tuple, dict[str, int]]]
    outputs: int
    kept: int


def setup(num_devices: int, kind: str, precision: str, safe_forms: bool = False) -> Mesh:
    """Returns a mesh of `num_devices` of this kind, on which `stage` traces. The arguments are those of device.setup.

    Its device is meta, where models, optimizers and tables are created: memory and time do not depend on their size.

    Raises:
        RuntimeError: this process has devices already.
    """
    if xr.is_spmd():
        raise RuntimeError("a process stages for one number of devices, before anything else uses a device")
    there = min(num_devices, MOST_DEVICES)
    os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"] = "CPU", str(there)
    xr.use_spmd()
    torch_xla.device()
    if xr.global_runtime_device_count() != there:
        raise RuntimeError(f"{there} devices were asked for, {xr.global_runtime_device_count()} are there")
    # Annotations are checked against the number of devices; nothing runs on those that are missing.
    xr.global_runtime_device_count = lambda: num_devices
    # The client is one for the CPU; from here on operations are lowered as they are for a TPU.
    os.environ["PJRT_DEVICE"] = "TPU"
    torch.manual_seed(0)
    choose_backend("xla").set_products(precision)
    return Mesh(
        device=torch.device("meta"),
        spmd=xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)),
        num_devices=num_devices,
        process_index=0,
        process_count=1,
        kind=kind,
        precision=precision,
        strict=True,
        safe_forms=safe_forms,
    )


def inputs(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], mesh: Mesh) -> dict[str, Tensor]:
    """Returns a batch of these (shape, type), sharded by the first dimension as the loader uploads it."""
    batch = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    for tensor in batch.values() if mesh.spmd else ():  # None: plain PyTorch, in bench/usual_step.py
        annotate(tensor, mesh.spmd, row_sharding(mesh.spmd, tensor.dim(), False).partition_spec)
    return batch


def stage(step_fn: Callable, *args: Any) -> Staged:
    """Traces one call of `step_fn`, which must be a whole step: its updates of tensors are results of the program.

    Args:
        args: modules, optimizers, dicts of tensors, tensors and anything else that the step takes. Their tensors on the
            meta device become placeholders on the XLA device, in place.
    Raises:
        GraphError: the step reads a value of the device; the message names the line that does.
    """
    try:
        return _stage(step_fn, args)
    finally:  # or tables that are made later would have it computed, on placeholders: a segmentation fault
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))


def _stage(step_fn: Callable, args: Sequence[Any]) -> Staged:
    """Does what `stage` says, and leaves the step's operations pending."""
    held = dict(_held(dict(zip(inspect.signature(step_fn).parameters, args, strict=True))))
    placeholders = {}
    for name, tensor in held.items():
        if name.endswith(".grad"):  # held twice, a tensor could not be replaced
            held[name.removesuffix(".grad")].grad = None
        placeholders[name] = _to_placeholder(tensor)
    for name, tensor in held.items():
        if name.endswith(".grad"):
            held[name.removesuffix(".grad")].grad = tensor
    before = {name: (tensor._version, _graph(tensor)) for name, tensor in held.items()}
    torch_xla._XLAC._set_allow_execution(False)
    try:
        result = step_fn(*args)
    except RuntimeError as error:
        if "Unexpected execution" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename][-1]
        raise GraphError(
            f"{step_fn.__name__} reads a value of the device in the middle of the step, which makes it two programs: "
            f"{own.filename.removeprefix(f'{ROOT}/')}:{own.lineno}: {own.line}"
        ) from error
    finally:
        torch_xla._XLAC._set_allow_execution(True)

    # Most updates count the version up (and a whole step's graph is long to look at); native batch norm's do not.
    updated = [n for n, t in held.items() if t._version != before[n][0] or _graph(t) != before[n][1]]
    results = [tensor for _, tensor in _named(result)]
    outputs = {torch_xla._XLAC._xla_get_tensor_id(t): t for t in [*(held[name] for name in updated), *results]}
    context = torch_xla._XLAC.lowering.LoweringContext(step_fn.__name__)
    context.build(list(outputs.values()))
    mapping = context.device_parameter_id_tensor_mapping()
    numbers = sorted(mapping)
    handles = torch_xla._XLAC._get_tensors_handle([mapping[number] for number in numbers])
    names = {handle: name for name, (handle, _) in placeholders.items()}
    parameters = {number: names.get(handle, "") for number, handle in zip(numbers, handles, strict=True)}
    others = {name: tensor for name, tensor in held.items() if name not in parameters.values()}
    return Staged(
        module=context.hlo(),
        parameters=parameters,
        donated=[number for number, name in parameters.items() if name in updated],
        shardings={number: placeholders[name][1] if name else ((), {}) for number, name in parameters.items()},
        outputs=len(outputs),
        kept=sum(_bytes(tensor, *placeholders[name][1]) for name, tensor in others.items()),
    )


def _bytes(tensor: Tensor, spec: tuple, sizes: dict[str, int]) -> int:
    """Returns the bytes of a device's part of a tensor."""
    axes = [name for axis in spec if axis for name in ((axis,) if isinstance(axis, str) else axis)]
    return tensor.numel() * tensor.element_size() // math.prod(sizes[name] for name in axes)


def _graph(tensor: Tensor) -> bytes:
    """Returns a hash of the graph that computes the tensor, or b"" for a sharded one, whose annotation steps repeat."""
    return b"" if torch_xla._XLAC._get_xla_sharding_spec(tensor) else torch_xla._XLAC._get_graph_hash([tensor])


def _to_placeholder(tensor: Tensor) -> tuple[int, tuple[tuple, dict[str, int]]]:
    """Turns a tensor of the meta device, in place, into a view of a placeholder without data; returns the placeholder's
    handle and its sharding."""
    spmd, spec = getattr(tensor, "placement", getattr(tensor, "sharding", (None, (None,) * tensor.dim())))
    placeholder = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    handle = torch_xla._XLAC._get_tensors_handle([placeholder])[0]
    # A tensor without data cannot be annotated, but the result of an operation can, and this one costs nothing.
    value = placeholder.view(tensor.shape)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    if spmd is not None and any(spec):
        xs.mark_sharding(value.data, spmd, spec)
    kept, hooks = tensor.__dict__, tensor._backward_hooks  # of a parameter that is cut over devices
    torch.utils.swap_tensors(tensor, value)
    tensor.__dict__.update(kept)
    tensor._backward_hooks = None
    for hook in (hooks or {}).values():
        tensor.register_hook(hook)
    return handle, (spec, dict(spmd.shape()) if spmd is not None else {})


def _held(args: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for every tensor on the meta device that a step can reach, each once."""
    seen: set[int] = set()
    for name, tensor in _named(args):
        if tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _named(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for every tensor in the arguments or the result of a step."""
    inside = path + "." if path else ""
    if isinstance(value, Tensor):
        yield path, value
    elif hasattr(type(value), "on_device"):  # ShardedEmbeddingBags
        yield from _named(value.on_device(), path)
    elif isinstance(value, nn.Module):
        yield from _named(dict([*value.named_parameters(), *value.named_buffers()]), path)
        gradients = {f"{name}.grad": parameter.grad for name, parameter in value.named_parameters()}
        yield from _named({name: grad for name, grad in gradients.items() if grad is not None}, path)
    elif isinstance(value, torch.optim.Optimizer):
        for g, group in enumerate(value.param_groups):
            yield from _named(group["lr"], f"{inside}{g}.lr")
            for p, parameter in enumerate(group["params"]):
                yield from _named(value.state.get(parameter, {}), f"{inside}{g}.{p}")
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        yield from _named(value._asdict(), path)
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named(item, f"{inside}{key}")
