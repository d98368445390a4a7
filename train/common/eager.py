"""The backend of device.py without XLA: plain PyTorch on one CPU or GPU, operation by operation.

A debugger stops inside a step, `print` and `.item()` work there, and the first step starts at once.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from errors import InputError
from train.common.mesh import Mesh

_waiting: list[Callable[[], None]] = []  # for the next step


def setup(precision: str, strict: bool, kind: str, _vmem_kib: int, _safe_forms: bool) -> Mesh:
    """Returns the mesh of one device; raises InputError where it is not there, or the environment asks for more."""
    for variable in ("CPU_NUM_DEVICES", "WORLD_SIZE"):  # of XLA's CPU backend; of torchrun
        if os.environ.get(variable, "1") not in ("", "1"):
            count = f"{variable} is {os.environ[variable]}"
            raise InputError(f"{count}, but --device {kind} runs on one device: unset it, or use --device xla")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise InputError("--device is cuda, but PyTorch finds no GPU here (nvidia-smi lists them); use cpu or xla")
        # PyTorch's defaults: convolutions take TF32, 10 bits, products do not; some sums differ from run to run.
        products = "tf32" if precision == "fast_float32" else "ieee"
        torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = products
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    return Mesh(torch.device(kind), None, 1, 0, 1, kind=name, precision=precision, strict=strict)


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int) -> Callable:
    def step(*args: Any) -> Any:
        result = step_fn(*args)
        run_pending()
        return result

    return step


def graph_report(reset: bool) -> dict[str, Any]:
    return {}


def compiling_since() -> None:
    """Returns None: nothing is compiled before it runs."""


def annotate(tensor: Tensor, spmd: None, spec: tuple) -> None:
    """Does nothing: one device holds every tensor whole."""


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    if mesh.device.type == "cpu":
        return tensor.clone()  # a worker's shared memory is used again
    return tensor.pin_memory().to(mesh.device, non_blocking=True)


def prepare_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], mesh: Mesh) -> list[Tensor]:
    """Chooses the fused kernel, which updates in one pass; that of single operations was a sixth of a BERT's step.
    Returns the parameters that it has computed anew: none."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD)):  # AdamW is an Adam
        group["fused"] = True
    return []


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)  # the CPU's generator and the GPU's


def fetch(values: list[Tensor]) -> list[float]:
    return torch.stack([value.double() for value in values]).tolist()


def read(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to("cpu") for tensor in tensors]


def after_next_step(function: Callable[[], None]) -> None:
    _waiting.append(function)


def run_pending() -> None:
    while _waiting:
        _waiting.pop(0)()


def wait_for_steps() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
