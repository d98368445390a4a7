"""TorchTPU for eager.py: `--device tpu`, a TPU chip in plain PyTorch, operation by operation.

It has never been run on a TPU. What stands here follows the code of torch-tpu 0.2.0, and programs
that were lowered without a chip: docs/torch_tpu.md.
"""

import importlib.metadata

import torch
from torch import Tensor

from errors import InputError
from train.common.mesh import Mesh

# TorchTPU's names of the chips -> those that `Mesh.kind` has, which are torch_xla's.
KINDS = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "TPU v7": "TPU7x",
}
OTHERS = "use --device xla (torch_xla) on a TPU, or cpu"


def set_up(precision: str) -> str:
    """Loads TorchTPU, and makes it multiply float32 as exactly as `precision` says.

    Returns:
        The kind of the chip, such as "TPU v6 lite".
    Raises:
        InputError: TorchTPU is not installed, does not load, or finds no chip.
    """
    _load()
    # A TPU multiplies float32 in one pass of bfloat16 unless it is asked for more.
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "medium")
    name = torch.tpu.get_device_name()
    return KINDS.get(name, name)


def _load() -> None:
    """Does what `import torch` would have done with this backend, see train/__init__.py."""
    found = importlib.metadata.entry_points(group="torch.backends", name="torch_tpu")
    if not found:
        raise InputError(
            "--device is tpu, but TorchTPU is not installed here; make train DEVICE=tpu installs "
            f"it into an environment of its own (docs/torch_tpu.md); or {OTHERS}"
        )
    try:
        for backend in found:
            load = backend.load()
            load()
        accelerator = torch.accelerator.current_accelerator()
    except Exception as error:  # of any type: it is another's library
        reason = " ".join(str(error).split())
        raise InputError(
            f"--device is tpu, but TorchTPU does not load here ({type(error).__name__}: {reason}); "
            f"it needs a TPU chip; or {OTHERS}"
        ) from error
    if accelerator is None or accelerator.type != "tpu":
        raise InputError(
            f"--device is tpu, but TorchTPU finds no TPU chip on this machine; {OTHERS}"
        )


def prepare_group(group: dict, mesh: Mesh) -> None:
    """Puts the learning rate of a group with fused kernels on the device.

    A rate that is a Python float is part of the key under which TorchTPU looks up a kernel that it
    has compiled: each new one would be compiled again. The fused kernels of Adam and SGD take a
    tensor, too.
    """
    rate = torch.tensor(float(group["lr"]), dtype=torch.float32)
    group["lr"] = rate.to(mesh.device)


def fetch(values: list[Tensor]) -> list[float]:
    """Does what device.fetch says: one by one, since a TPU has no float64, and stacking another
    number of them would compile another program."""
    return [float(value.to("cpu")) for value in values]


def wait_for_steps() -> None:
    """Does what device.wait_for_steps says."""
    torch.accelerator.synchronize()
