"""The mesh that the three flags of a script ask for."""

import math
import re
from dataclasses import replace
from typing import Any

from errors import InputError
from train.common.mesh import WHOLE, Layout, Mesh
from train.common.sharding.placement import Layers

AXES = ("copies", "data", "model")
MOST_SHARES = 32  # that the default cuts a state into: of larger groups libtpu makes all-reduces, of full size
# Without them the TPU's compiler sums cut gradients in rings of permutes beside the products, which takes more memory,
# more cycles and more bytes (docs/large_models.md). libtpu 0.0.21 and 0.0.51 know both.
REDUCE_SCATTERS = "--xla_tpu_enable_windowed_einsum_for_reduce_scatter=false"
REDUCE_SCATTERS += " --xla_tpu_enable_reduce_scatter_legalizer=true"


def ask_for_reduce_scatters(layout: Layout, backend: Any) -> None:
    """Has the TPU's compiler reduce-scatter the gradients of a state that is cut; call it before libtpu is loaded.
    `backend`: train/common/xla/backend.py; that of plain PyTorch has no such compiler."""
    if layout.shard_state != "none" and hasattr(backend, "ask_compiler"):
        backend.ask_compiler(REDUCE_SCATTERS)


def arranged(mesh: Mesh, layout: Layout) -> Mesh:
    """Returns the mesh with the axes of a layout, and its `layers`. Batches are cut over all but "model".

    Raises:
        InputError: the flags do not fit the devices, or each other.
    """
    if layout == WHOLE:
        return mesh
    if not mesh.compiles:
        for flag, given in (("--mesh", layout.mesh), ("--shard-state", layout.shard_state.replace("none", ""))):
            if given:
                raise InputError(
                    f"{flag} is {given}, but --device {mesh.device.type} runs on one device: leave it out, or use "
                    "--device xla"
                )
    axes = parse(layout.mesh or _default(mesh.num_devices, layout), mesh.num_devices)
    if layout.mesh and layout.shard_state != "none" and axes["data"] == 1 < mesh.num_devices:
        given = f"--shard-state {layout.shard_state} cuts a state over data, of which --mesh {layout.mesh} has one"
        raise InputError(f"{given}: give more of data, or leave --shard-state out")
    layers = Layers(layout, axes, mesh.spmd)
    if not layers.spreads:
        return replace(mesh, layers=layers)
    spmd = type(mesh.spmd)(mesh.spmd.device_ids, tuple(axes.values()), AXES)
    layers = replace(layers, spmd=spmd)

    # On a pod batches come cut over all devices: the upload of a host's own rows takes no other mesh (torch_xla's
    # ShardingSpec with minibatch). The annotations of the first layers keep "model" out.
    if axes["model"] > 1 and mesh.process_count == 1:
        return replace(mesh, spmd=spmd, layers=layers)
    return replace(mesh, layers=layers)


def _default(devices: int, layout: Layout) -> str:
    """Returns a mesh without "model" in which a state is cut over MOST_SHARES devices at most (hybrid sharding, Zhao et
    al. 2023, section 3.2.2)."""
    shares = devices if layout.shard_state == "none" or devices <= MOST_SHARES else math.gcd(devices, MOST_SHARES)
    return f"copies={devices // shares},data={shares}"


def parse(text: str, devices: int) -> dict[str, int]:
    """Returns the devices of each axis of AXES, for such as "data=4,model=2".

    Raises:
        InputError: it cannot be read, or is of another number of devices.
    """
    axes: dict[str, int] = {}
    example = f"give such as data={devices // 2},model=2" if devices % 2 == 0 else "leave it out"
    for part in text.split(","):
        name, _, size = map(str.strip, part.partition("="))
        if name not in AXES or name in axes:
            raise InputError(
                f"--mesh {text} has {part.strip()!r}; its axes are copies, data and model, each once: {example}"
            )
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) < 1:  # int takes other alphabets' digits as well
            raise InputError(
                f"--mesh {text} has {name}={size}; the size of an axis is a number of at least 1: {example}"
            )
        axes[name] = int(size)
    if math.prod(axes.values()) != devices:
        if "model" not in axes:  # not every model can be cut over it
            example = f"leave it out for data={devices}"
        raise InputError(
            f"--mesh {text} is for {math.prod(axes.values())} devices, and there are {devices}; sizes multiply to "
            f"their number: {example}"
        )
    return {name: axes.get(name, 1) for name in AXES}
