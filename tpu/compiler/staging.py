"""Traces a train step for TPUs that are not there, on this machine's CPU.

It neither compiles nor runs the program. The script's own `build` and `train_step` make the step,
with a mesh of as many devices as the TPU has:

    mesh = staging.setup(8, "TPU v5 lite", "bfloat16")
    state = script.build(config, data, mesh)            # on the meta device: shapes, no numbers
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

from train.common.device import annotate, choose_backend
from train.common.mesh import GraphError, Mesh
from train.common.xla.backend import row_sharding

MOST_DEVICES = 64  # autograd counts them in 8 bits: with 128 and more, no backward pass begins
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Staged:
    """A step before any optimisation, for all devices.

    Attributes:
        module: the serialised HloModuleProto; each device runs its part of it.
        parameters: the name of each parameter of the entry computation, by its number: where the
            tensor is in the step's arguments, such as "state.model.fc.weight". A Python number, or
            a constant of the host, has "".
        donated: the numbers of the parameters that the step updates in place; its results take
            their memory.
        shardings: for each parameter, (axis names or None by dimension, {axis: size} of the mesh).
        outputs: how many tensors the step returns, updated ones included.
        kept: bytes per device of tensors that the arguments have and the program does not take.
    """

    module: bytes
    parameters: dict[int, str]
    donated: list[int]
    shardings: dict[int, tuple[tuple, dict[str, int]]]
    outputs: int
    kept: int


def setup(
    num_devices: int, kind: str, precision: str, safe_forms: bool = False, slices: int = 1
) -> Mesh:
    """Returns a mesh of `num_devices` of this kind, on which `stage` traces.

    The arguments are those of device.setup, and the slices that the devices make up. The mesh's
    device is meta, where models, optimizers and tables are created: memory and time do not depend
    on their size.

    Raises:
        RuntimeError: this process has devices already.
    """
    if xr.is_spmd():
        raise RuntimeError(
            "a process stages for one number of devices, before anything else uses a device"
        )
    there = min(num_devices, MOST_DEVICES)
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["CPU_NUM_DEVICES"] = str(there)
    xr.use_spmd()
    torch_xla.device()
    if xr.global_runtime_device_count() != there:
        found = xr.global_runtime_device_count()
        raise RuntimeError(f"{there} devices were asked for, {found} are there")

    # Annotations are checked against the number of devices; nothing runs on those that are missing.
    xr.global_runtime_device_count = lambda: num_devices
    # The client is one for the CPU; from here on operations are lowered as they are for a TPU.
    os.environ["PJRT_DEVICE"] = "TPU"

    torch.manual_seed(0)
    choose_backend("xla").set_matmul_precision(precision)
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
        slices=slices,
    )


def inputs(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    mesh: Mesh,
) -> dict[str, Tensor]:
    """Returns a batch of these (shape, type), sharded by rows as the loader uploads it."""
    batch = {}
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if mesh.spmd is not None:  # None: plain PyTorch, in bench/usual_step.py
            sharding = row_sharding(mesh.spmd, tensor.dim(), False)
            annotate(tensor, mesh.spmd, sharding.partition_spec)
        batch[name] = tensor
    return batch


def stage(step_fn: Callable, *args: Any) -> Staged:
    """Traces one call of `step_fn`, which must be a whole step.

    Its updates of tensors are results of the program.

    Args:
        args: modules, optimizers, dicts of tensors, tensors and anything else that the step takes.
            Their tensors on the meta device become placeholders on the XLA device, in place.
    Raises:
        GraphError: the step reads a value of the device; the message names the line that does.
    """
    try:
        return _stage(step_fn, args)
    finally:
        # Tables that are made later would compute what is pending, on placeholders, and crash.
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))


def _stage(step_fn: Callable, args: Sequence[Any]) -> Staged:
    """Does what `stage` says, and leaves the step's operations pending."""
    arguments = dict(zip(inspect.signature(step_fn).parameters, args, strict=True))
    held = dict(_held(arguments))
    placeholders = _to_placeholders(held)
    before = {}
    for name, tensor in held.items():
        before[name] = _Before(tensor._version, _graph(tensor))
    result = _call(step_fn, args)

    updated = []
    for name, tensor in held.items():
        # Most updates count the version up; native batch norm's do not. A whole step's graph takes
        # long to look at, so the version comes first.
        if tensor._version != before[name].version or _graph(tensor) != before[name].graph:
            updated.append(name)

    outputs = {}  # by the tensor's id: a result may be an updated tensor
    for name in updated:
        outputs[torch_xla._XLAC._xla_get_tensor_id(held[name])] = held[name]
    for _, tensor in _named(result):
        outputs[torch_xla._XLAC._xla_get_tensor_id(tensor)] = tensor

    context = torch_xla._XLAC.lowering.LoweringContext(step_fn.__name__)
    context.build(list(outputs.values()))
    mapping = context.device_parameter_id_tensor_mapping()
    numbers = sorted(mapping)
    handles = torch_xla._XLAC._get_tensors_handle([mapping[number] for number in numbers])

    names = {}
    for name, placeholder in placeholders.items():
        names[placeholder.handle] = name
    parameters = {}
    shardings = {}
    for number, handle in zip(numbers, handles, strict=True):
        name = names.get(handle, "")
        parameters[number] = name
        if name:
            shardings[number] = placeholders[name].sharding
        else:
            shardings[number] = ((), {})

    taken = set(parameters.values())
    kept = 0
    for name, tensor in held.items():
        if name not in taken:
            kept += _bytes(tensor, *placeholders[name].sharding)

    return Staged(
        module=context.hlo(),
        parameters=parameters,
        donated=[number for number, name in parameters.items() if name in updated],
        shardings=shardings,
        outputs=len(outputs),
        kept=kept,
    )


@dataclass(frozen=True)
class _Before:
    """What a tensor is before the step, to see whether the step has updated it."""

    version: int
    graph: bytes


@dataclass(frozen=True)
class _Placeholder:
    """What stands for a tensor of the step's arguments.

    Attributes:
        handle: torch_xla's handle of it.
        sharding: (axis names or None by dimension, {axis: size} of the mesh).
    """

    handle: int
    sharding: tuple[tuple, dict[str, int]]


def _call(step_fn: Callable, args: Sequence[Any]) -> Any:
    """Calls the step; returns its result. Raises GraphError if it reads a value of the device."""
    torch_xla._XLAC._set_allow_execution(False)
    try:
        return step_fn(*args)
    except RuntimeError as error:
        if "Unexpected execution" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename][-1]
        file = own.filename.removeprefix(f"{ROOT}/")
        raise GraphError(
            f"{step_fn.__name__} reads a value of the device in the middle of the step, "
            f"which makes it two programs: {file}:{own.lineno}: {own.line}"
        ) from error
    finally:
        torch_xla._XLAC._set_allow_execution(True)


def _bytes(tensor: Tensor, spec: tuple, sizes: dict[str, int]) -> int:
    """Returns the bytes of a device's part of a tensor."""
    parts = 1
    for axes in spec:
        if axes is None:
            continue
        if isinstance(axes, str):
            axes = (axes,)
        parts *= math.prod(sizes[axis] for axis in axes)
    return tensor.numel() * tensor.element_size() // parts


def _graph(tensor: Tensor) -> bytes:
    """Returns a hash of the graph that computes the tensor.

    Of a sharded one it is b"": steps repeat its annotation, which would be another graph.
    """
    if torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return b""
    return torch_xla._XLAC._get_graph_hash([tensor])


def _to_placeholders(held: dict[str, Tensor]) -> dict[str, _Placeholder]:
    """Turns tensors of the meta device, in place, into placeholders; returns them by name."""
    placeholders = {}
    for name, tensor in held.items():
        if name.endswith(".grad"):  # a parameter that holds it could not be replaced
            held[name.removesuffix(".grad")].grad = None
        placeholders[name] = _to_placeholder(tensor)
    for name, tensor in held.items():
        if name.endswith(".grad"):
            held[name.removesuffix(".grad")].grad = tensor
    return placeholders


def _annotation(tensor: Tensor) -> tuple[Any, tuple]:
    """Returns (mesh, axes by dimension) with which a tensor of the meta device is to lie on the
    devices.

    The mesh is None where every device holds it whole.
    """
    placement = getattr(tensor, "placement", None)  # of train/common/sharding
    if placement is not None:
        return placement.spmd, placement.spec
    annotated = getattr(tensor, "sharding", None)  # by the backend's `annotate`
    if annotated is not None:
        return annotated
    return None, (None,) * tensor.dim()


def _to_placeholder(tensor: Tensor) -> _Placeholder:
    """Turns a tensor of the meta device, in place, into a view of a placeholder without data."""
    spmd, spec = _annotation(tensor)
    placeholder = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    handle = torch_xla._XLAC._get_tensors_handle([placeholder])[0]
    # A tensor without data cannot be annotated, but the result of an operation can, and this one
    # costs nothing.
    value = placeholder.view(tensor.shape)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    if spmd is not None and any(spec):
        xs.mark_sharding(value.data, spmd, spec)

    # What a parameter that is cut over devices has, and its new self needs.
    attributes = tensor.__dict__
    hooks = tensor._backward_hooks or {}
    torch.utils.swap_tensors(tensor, value)
    tensor.__dict__.update(attributes)
    tensor._backward_hooks = None
    for hook in hooks.values():
        tensor.register_hook(hook)

    sizes = {}
    if spmd is not None:
        sizes = dict(spmd.shape())
    return _Placeholder(handle, (spec, sizes))


def _held(args: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for every meta tensor that a step can reach, each once."""
    seen: set[int] = set()
    for name, tensor in _named(args):
        if tensor.is_meta and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _named(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for every tensor in the arguments or the result of a step."""
    inside = f"{path}." if path else ""
    if isinstance(value, Tensor):
        yield path, value
    elif hasattr(type(value), "on_device"):  # ShardedEmbeddingBags
        yield from _named(value.on_device(), path)
    elif isinstance(value, nn.Module):
        yield from _named(dict([*value.named_parameters(), *value.named_buffers()]), path)
        gradients = {}
        for name, parameter in value.named_parameters():
            if parameter.grad is not None:
                gradients[f"{name}.grad"] = parameter.grad
        yield from _named(gradients, path)
    elif isinstance(value, torch.optim.Optimizer):
        for g, group in enumerate(value.param_groups):
            yield from _named(group["lr"], f"{inside}{g}.lr")
            for p, parameter in enumerate(group["params"]):
                yield from _named(value.state.get(parameter, {}), f"{inside}{g}.{p}")
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        yield from _named(value._asdict(), path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{inside}{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named(item, f"{inside}{index}")
