"""How a script's layers lie on the devices: its three flags, and the mesh that they ask for."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from tyro.conf import OmitArgPrefixes

from errors import InputError
from train.common import device

AXES = ("data", "model")


@dataclass(frozen=True)
class Layout:
    """Flags that change memory and speed, but no number beyond rounding: a resumed run may have others."""

    mesh: str = ""  # devices by axis, such as data=4,model=2: model cuts the layers themselves; "": all for data
    shard_state: Literal["none", "optimizer", "full"] = (
        "none"  # cut over data: the optimizer's state; full: weights too
    )
    remat: bool = False  # keeps of each layer its input only and computes it again in the backward pass


WHOLE = Layout()  # everything on every device
Flags = OmitArgPrefixes[Layout]  # for a script's Config: --mesh, not --layout.mesh


@dataclass(frozen=True)
class LayerMesh(device.Mesh):
    """A mesh over which layers, too, are spread. `spmd` stays the mesh with the one axis on which batches come."""

    layout: Layout = WHOLE
    axes: dict[str, int] = dataclasses.field(default_factory=dict)  # devices by axis
    layers: Any = None  # torch_xla's mesh with AXES

    @property
    def spreads(self) -> bool:
        """True where a parameter or its state may be cut."""
        return self.axes["model"] > 1 or (self.axes["data"] > 1 and self.layout.shard_state != "none")


def arranged(mesh: device.Mesh, layout: Layout) -> device.Mesh:
    """Returns the mesh for a layout: `mesh` itself where no flag is given.

    Raises:
        InputError: the flags do not fit the devices, or each other.
    """
    if layout == WHOLE:
        return mesh
    if mesh.spmd is None:
        for flag, given in (("--mesh", layout.mesh), ("--shard-state", layout.shard_state.replace("none", ""))):
            if given:
                raise InputError(
                    f"{flag} is {given}, but --device {mesh.device.type} runs on one device: leave it out, or use "
                    "--device xla"
                )
    axes = parse(layout.mesh, mesh.num_devices)
    if mesh.process_count > 1 and (axes["model"] > 1 or layout.shard_state != "none"):
        raise InputError(
            f"--mesh {layout.mesh or 'data'} with --shard-state {layout.shard_state} is for the devices of one host, "
            f"not of {mesh.process_count}: a checkpoint would need parts of the others; leave both out, or take a TPU "
            "with one host (v5e and v6e: up to 8 chips)"
        )
    fields = {field.name: getattr(mesh, field.name) for field in dataclasses.fields(device.Mesh)}
    layers = None if mesh.spmd is None else type(mesh.spmd)(mesh.spmd.device_ids, tuple(axes.values()), AXES)
    return LayerMesh(**fields, layout=layout, axes=axes, layers=layers)


def parse(text: str, devices: int) -> dict[str, int]:
    """Returns the devices of each axis of AXES, for such as "data=4,model=2"; "" gives all to data.

    Raises:
        InputError: it cannot be read, or is of another number of devices.
    """
    axes: dict[str, int] = {}
    example = f"give such as data={devices // 2},model=2" if devices % 2 == 0 else "leave it out"
    for part in text.split(",") if text else [f"data={devices}"]:
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in axes:
            raise InputError(
                f"--mesh {text} has {part.strip()!r}; its axes are {' and '.join(AXES)}, each once: {example}"
            )
        if not size.isdecimal() or int(size) < 1:
            raise InputError(
                f"--mesh {text} has {name}={size}; the size of an axis is a number of at least 1: {example}"
            )
        axes[name] = int(size)
    if math.prod(axes.values()) != devices:
        raise InputError(
            f"--mesh {text} is for {math.prod(axes.values())} devices, and there are {devices}; sizes multiply to "
            f"their number: {example}"
        )
    return {name: axes.get(name, 1) for name in AXES}
