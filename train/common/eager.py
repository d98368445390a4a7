"""The backend of device.py without XLA: plain PyTorch on one CPU or GPU, operation by operation.

`--device tpu` is the same through TorchTPU, see torchtpu.py; it has never been run.

A debugger stops inside a step, `print` and `.item()` work there, and the first step starts at once.
Functions without more words do what those of the same names in device.py say.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import optional
from errors import InputError
from train.common.mesh import Mesh

_waiting: list[Callable[[], None]] = []  # what `after_next_step` was given
_torchtpu: Any = None  # train/common/torchtpu.py, where --device is tpu


def setup(precision: str, strict: bool, kind: str, _vmem_kib: int, _safe_forms: bool) -> Mesh:
    """Returns the mesh of one device.

    Raises:
        InputError: the device is not there, or the environment asks for several.
    """
    _check_one_device(kind)
    hardware = "CPU"
    if kind == "cuda":
        _set_up_cuda(precision)
        hardware = torch.cuda.get_device_name()
    elif kind == "tpu":
        hardware = _set_up_tpu(precision)

    return Mesh(
        device=torch.device(kind),
        spmd=None,
        num_devices=1,
        process_index=0,
        process_count=1,
        kind=hardware,
        precision=precision,
        strict=strict,
    )


def _check_one_device(kind: str) -> None:
    """Raises InputError where the environment asks for several devices or processes."""
    for variable in ("CPU_NUM_DEVICES", "WORLD_SIZE"):  # of XLA's CPU backend; of torchrun
        value = os.environ.get(variable, "1")
        if value not in ("", "1"):
            raise InputError(
                f"{variable} is {value}, but --device {kind} runs on one device: "
                "unset it, or use --device xla"
            )


def _set_up_cuda(precision: str) -> None:
    """Makes a GPU compute the same in every run, and as exactly as `precision` says."""
    if not torch.cuda.is_available():
        raise InputError(
            "--device is cuda, but PyTorch finds no GPU here (nvidia-smi lists them); "
            "use cpu or xla"
        )

    # By default convolutions take TF32, 10 bits, products do not, and some sums differ between
    # runs.
    products = "tf32" if precision == "fast_float32" else "ieee"
    torch.backends.cudnn.conv.fp32_precision = products
    torch.backends.cuda.matmul.fp32_precision = products
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def _set_up_tpu(precision: str) -> str:
    """Sets TorchTPU up for this process; returns the kind of its chip."""
    global _torchtpu
    _torchtpu = optional.load("torchtpu")
    return _torchtpu.set_up(precision)


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int) -> Callable:
    """Returns `step_fn`, which calls after itself what `after_next_step` was given."""

    def step(*args: Any) -> Any:
        result = step_fn(*args)
        run_pending()
        return result

    return step


def graph_report(reset: bool) -> dict[str, Any]:
    """Returns {}: there are no graphs."""
    return {}


def compiling_since() -> None:
    """Returns None: nothing is compiled before it runs."""


def annotate(tensor: Tensor, spmd: None, spec: tuple) -> None:
    """Does nothing: one device holds every tensor whole."""


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    if mesh.device.type == "cpu":
        return tensor.clone()  # the loader's worker uses its shared memory again
    if mesh.device.type == "tpu":
        return tensor.to(mesh.device)
    return tensor.pin_memory().to(mesh.device, non_blocking=True)


def prepare_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], mesh: Mesh
) -> list[Tensor]:
    """Chooses the fused kernel, which updates in one pass.

    Updates by single operations took a sixth of a BERT's step.

    Returns:
        The parameters that it has computed anew: none.
    """
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):  # AdamW is an Adam
        group["fused"] = True
        if mesh.device.type == "tpu":
            _torchtpu.prepare_group(group, mesh)
    return []


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU's generator and the GPU's


def fetch(values: list[Tensor]) -> list[float]:
    if values[0].device.type == "tpu":
        return _torchtpu.fetch(values)
    return torch.stack([value.double() for value in values]).tolist()


def read(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to("cpu") for tensor in tensors]


def after_next_step(function: Callable[[], None]) -> None:
    _waiting.append(function)


def run_pending() -> None:
    while _waiting:
        function = _waiting.pop(0)
        function()


def wait_for_steps() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if _torchtpu is not None:
        _torchtpu.wait_for_steps()
