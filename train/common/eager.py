"""The backend of device.py without XLA: plain PyTorch on a CPU or GPU, operation by operation.

`--device tpu` is the same through TorchTPU, see torchtpu.py; it has never been run.

A debugger stops inside a step, `print` and `.item()` work there, and the first step starts at once.
Started by torchrun, each process has one device, see processes.py. Functions without more words do
what those of the same names in device.py say.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import optional
from errors import InputError
from train.common import processes
from train.common.mesh import Mesh

gather_rows = processes.gather_rows
mean_over_processes = processes.mean
shared_mean = processes.SharedMean.apply
accumulating = processes.paused

_waiting: list[Callable[[], None]] = []  # what `after_next_step` was given
_torchtpu: Any = None  # train/common/torchtpu.py, where --device is tpu


def setup(precision: str, strict: bool, kind: str, _vmem_kib: int, _safe_forms: bool) -> Mesh:
    """Returns the mesh of one device for each process, and joins this process to the others.

    Raises:
        InputError: the device is not there; or the environment asks for several in one process, or
            for processes that torchrun has not started.
    """
    _check_one_device(kind)
    place = processes.place()
    hardware = "CPU"
    if kind == "cuda":
        _set_up_cuda(precision, place)
        hardware = torch.cuda.get_device_name()
    elif kind == "tpu":
        hardware = _set_up_tpu(precision, place)

    device = torch.device(kind)  # "tpu" is TorchTPU's, from its set-up on
    if place.count > 1:
        processes.join(kind)
        if kind == "cuda":
            device = torch.device(kind, place.device)

    return Mesh(
        device=device,
        spmd=None,
        num_devices=place.count,
        process_index=place.index,
        process_count=place.count,
        kind=hardware,
        precision=precision,
        strict=strict,
    )


def _check_one_device(kind: str) -> None:
    """Raises InputError where the environment asks for several devices of XLA's CPU backend."""
    value = os.environ.get("CPU_NUM_DEVICES", "1")
    if value not in ("", "1"):
        raise InputError(
            f"CPU_NUM_DEVICES is {value}, but --device {kind} runs on one device per process: "
            "unset it, and start several processes (docs/processes.md), or use --device xla"
        )


def _set_up_cuda(precision: str, place: processes.Place) -> None:
    """Makes this process's GPU compute the same in every run, and as exactly as `precision`
    says."""
    if not torch.cuda.is_available():
        raise InputError(
            "--device is cuda, but PyTorch finds no GPU here (nvidia-smi lists them); "
            "use cpu or xla"
        )
    if place.device >= torch.cuda.device_count():
        raise InputError(
            f"there are {torch.cuda.device_count()} GPUs here, too few for {place.count} "
            "processes, which take one each: start fewer"
        )
    torch.cuda.set_device(place.device)

    # By default convolutions take TF32, 10 bits, products do not, and some sums differ between
    # runs.
    products = "tf32" if precision == "fast_float32" else "ieee"
    torch.backends.cudnn.conv.fp32_precision = products
    torch.backends.cuda.matmul.fp32_precision = products
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def _set_up_tpu(precision: str, place: processes.Place) -> str:
    """Sets TorchTPU up for this process; returns the kind of its chip."""
    global _torchtpu
    if place.count > 1:
        raise InputError(
            f"WORLD_SIZE is {place.count}, but --device tpu runs on one chip: TorchTPU's "
            "collectives (tpu_dist) have not been tried here; start one process"
        )
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
    """Does nothing: a device holds every tensor whole."""


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    if mesh.device.type == "cpu":
        return tensor.clone()  # the loader's worker uses its shared memory again
    if mesh.device.type == "tpu":
        return tensor.to(mesh.device)
    return tensor.pin_memory().to(mesh.device, non_blocking=True)


def train_together(model: nn.Module, mesh: Mesh) -> None:
    """Makes a backward pass average the gradients of a model on the device over the processes."""
    if mesh.process_count > 1:
        processes.GradientMean(model)


def bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.view(dtype)


def barrier() -> None:
    return None


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


def own_seed() -> tuple[int, ...]:
    """Returns what a process adds to the seed of a step: each draws for its own rows."""
    if processes.count() == 1:
        return ()
    return (processes.index(),)


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
