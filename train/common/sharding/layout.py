"""The mesh that a script's --mesh, --shard-state and --remat ask for."""

import math
import re
import sys
from dataclasses import replace
from typing import Any

from errors import InputError
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.sharding.placement import LayerSharding
from train.common.sharding.shares import StateShares

AXES = ("copies", "data", "model")

# The most shards of a state by default: among more devices libtpu makes all-reduces, of the full
# size.
MOST_SHARDS = 32

# Without these flags the TPU's compiler sums split gradients in rings of permutes while it
# multiplies matrices, which takes more memory, more cycles and more bytes (docs/large_models.md).
# libtpu 0.0.21 and 0.0.51 know both.
REDUCE_SCATTERS = "--xla_tpu_enable_windowed_einsum_for_reduce_scatter=false"
REDUCE_SCATTERS += " --xla_tpu_enable_reduce_scatter_legalizer=true"


def ask_for_reduce_scatters(layout: Layout, backend: Any) -> None:
    """Makes the TPU's compiler reduce-scatter the gradients of a sharded state.

    Call it before libtpu is loaded.

    Args:
        backend: train/common/xla/backend.py, or that of plain PyTorch, which has no such compiler.
    """
    if layout.shard_state != "none" and hasattr(backend, "ask_compiler"):
        backend.ask_compiler(REDUCE_SCATTERS)


def arranged(mesh: Mesh, layout: Layout) -> Mesh:
    """Returns the mesh with a layout's `LayerSharding`, and with its axes where a batch needs them.

    A batch is split over all axes but "model". Where "model" has one device, that is over all
    devices, as the mesh's own axis "data" splits it: the mesh keeps this one axis. With more of
    "model", the mesh gets the axes of the layout, but not on a pod. Where nothing is split (--remat
    alone, or on one device), it keeps its axis, too.

    On several slices a state that is split has a copy for each, so that slices send each other
    gradients only.

    Raises:
        InputError: the flags do not fit the devices, or each other.
    """
    if layout == WHOLE:
        return mesh
    if not mesh.compiles:
        _check_processes(mesh, layout)

    axes = parse(layout.mesh or _default(mesh, layout), mesh.num_devices)
    _check_shards(mesh, layout, axes)
    _check_slices(mesh, layout, axes)
    if mesh.parts > 1 and layout.shard_state == "optimizer":
        return replace(mesh, layers=StateShares(layout, axes, mesh.spmd))
    layers = LayerSharding(layout, axes, mesh.spmd)
    if not layers.spreads:
        return replace(mesh, layers=layers)

    torch_xla_mesh = type(mesh.spmd)  # this file works without torch_xla, too
    spmd = torch_xla_mesh(mesh.spmd.device_ids, tuple(axes.values()), AXES)
    layers = replace(layers, spmd=spmd)
    if axes["model"] > 1 and mesh.process_count == 1:
        return replace(mesh, spmd=spmd, layers=layers)

    # On a pod a batch is uploaded split over all devices, those of "model" included: the upload of
    # a host's own rows (torch_xla's ShardingSpec with minibatch) takes a mesh of one axis only.
    # The first layers' activations are then pinned without "model".
    return replace(mesh, layers=layers)


def _check_processes(mesh: Mesh, layout: Layout) -> None:
    """Raises InputError where a layout cuts a model in plain PyTorch."""
    each_is_whole = f"but with --device {mesh.device.type} each process has the whole model"
    if layout.mesh:
        raise InputError(
            f"--mesh is {layout.mesh}, {each_is_whole}: leave it out, or use --device xla"
        )
    if layout.shard_state == "full":
        raise InputError(
            f"--shard-state is full, {each_is_whole}: FSDP gathers weights when a model is called, "
            "and steps here also call its parts; give --shard-state optimizer, by which several "
            "processes share out the optimizer's state, or use --device xla"
        )


def _check_shards(mesh: Mesh, layout: Layout, axes: dict[str, int]) -> None:
    """Raises InputError where there is one device of "data", over which --shard-state cuts."""
    cuts_state = layout.shard_state != "none"
    if cuts_state and axes["data"] == 1 and mesh.num_devices > 1:
        what = f"--mesh {layout.mesh}" if layout.mesh else "each slice"
        raise InputError(
            f"--shard-state {layout.shard_state} cuts a state over data, of which {what} has one: "
            "give more of data, or leave --shard-state out"
        )


def _check_slices(mesh: Mesh, layout: Layout, axes: dict[str, int]) -> None:
    """Looks at what --mesh makes several slices send each other in every layer.

    Neighbours of "model" follow each other in the list of devices, then those of "data", and slices
    do, too. So a group of either lies within a slice where its size divides the slice's.

    Raises:
        InputError: devices of different slices would share a layer.
    """
    per_slice = mesh.devices_per_slice
    if per_slice % axes["model"]:
        raise InputError(
            f"--mesh {layout.mesh} has model={axes['model']}, and a slice has {per_slice} devices: "
            "the activations of every layer would travel over the data-centre network; "
            f"give model=n for an n that divides {per_slice}"
        )

    of_a_state = axes["data"] * axes["model"]
    if per_slice % of_a_state and layout.shard_state != "none" and mesh.main_process:
        print(
            f"warning: --mesh {layout.mesh} cuts a state over {of_a_state} devices, "
            f"and a slice has {per_slice}: every step gathers it over the data-centre network; "
            "with a copy for each slice (copies, the default) only gradients travel there",
            file=sys.stderr,
            flush=True,
        )


def _default(mesh: Mesh, layout: Layout) -> str:
    """Returns the --mesh of a layout that gives none: without "model", in the form of the flag.

    A state is split within a slice, over MOST_SHARDS devices at most. Of more devices, each such
    group of "data" holds a copy of it: hybrid sharding (Zhao et al. 2023, section 3.2.2).
    """
    shards = mesh.num_devices
    if layout.shard_state != "none":
        shards = mesh.devices_per_slice
        if shards > MOST_SHARDS:
            shards = math.gcd(shards, MOST_SHARDS)
    return f"copies={mesh.num_devices // shards},data={shards}"


def parse(text: str, devices: int) -> dict[str, int]:
    """Returns the devices along each axis of AXES, given a --mesh such as "data=4,model=2".

    Raises:
        InputError: the text cannot be read, or is for another number of devices.
    """
    remedy = f"give such as data={devices // 2},model=2" if devices % 2 == 0 else "leave it out"
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        name = name.strip()
        size = size.strip()
        if name not in AXES or name in axes:
            raise InputError(
                f"--mesh {text} has {item.strip()!r}; "
                f"its axes are copies, data and model, each once: {remedy}"
            )

        is_number = re.fullmatch("[0-9]{1,9}", size)  # int() takes other alphabets' digits, too
        if not is_number or int(size) < 1:
            raise InputError(
                f"--mesh {text} has {name}={size}; "
                f"the size of an axis is a number of at least 1: {remedy}"
            )
        axes[name] = int(size)

    product = math.prod(axes.values())
    if product != devices:
        if "model" not in axes:  # not every model can be split over it
            remedy = f"leave it out for data={devices}"
        raise InputError(
            f"--mesh {text} is for {product} devices, and there are {devices}; sizes multiply to "
            f"their number: {remedy}"
        )
    return {name: axes.get(name, 1) for name in AXES}
