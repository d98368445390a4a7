"""The XLA backend of device.py: one program serves one core and a pod (SPMD).

`setup` makes a 1-D mesh named "data" over all devices; batches are sharded on it, parameters are replicated, and XLA
inserts the gradient all-reduce.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla import backends

from train.common.device import Mesh, replicate
from train.common.xla.compiled import CompiledStep, GraphReport, compilations  # noqa: F401 - for tests and benches

_report = GraphReport()  # one per process, since torch_xla counts compilations and transfers of the process
graph_report, reset_graph_report, host_reads = _report.summary, _report.reset, _report.host_reads

set_seed = xm.set_rng_state
after_next_step = xm.add_step_closure
run_pending = torch_xla.sync
wait_for_steps = xm.wait_device_ops
read = torch_xla._XLAC._xla_get_cpu_tensors


def setup(precision: str, strict: bool, kind: str) -> Mesh:
    """Turns SPMD on and returns the mesh of all devices. On TPU, compiled programs are cached on disk in
    $XLA_CACHE_DIR (default ~/.cache/xla-zoo); the CPU backend cannot read such a cache back, so it has none."""
    hardware = xr.device_type() or "CPU"
    set_products(precision if hardware == "TPU" else "fast_float32")  # a CPU's are float32 in any case
    if not xr.is_spmd():
        if hardware == "TPU":
            xr.initialize_cache(os.environ.get("XLA_CACHE_DIR", os.path.expanduser("~/.cache/xla-zoo")))
        xr.use_spmd()
    num_devices = xr.global_runtime_device_count()
    names = xr.global_runtime_device_attributes()[0] if hardware == "TPU" else {}
    mesh = Mesh(
        device=torch_xla.device(),
        spmd=xs.Mesh(np.arange(num_devices), (num_devices,), ("data",)),
        num_devices=num_devices,
        process_index=xr.process_index(),
        process_count=xr.process_count(),
        kind=str(names.get("device_kind", hardware)),
        precision=precision,
        strict=strict,
        places=_places() if xr.process_count() > 1 else (),
    )
    if mesh.process_count > 1:
        _check_places(mesh)
    return mesh


def _places() -> tuple[int, ...]:
    """Returns the numbers of this host's devices in torch_xla's order; "TPU:4" is the fifth device of the mesh."""
    return tuple(int(name.split(":")[1]) for name in torch_xla._XLAC._xla_get_runtime_devices())


def _check_places(mesh: Mesh) -> None:
    """Checks on the device that `Mesh.rows` fill the mesh in order; otherwise predictions would be taken for those of
    other examples, so it raises RuntimeError."""
    rows = upload(torch.from_numpy(mesh.rows(mesh.num_devices)), mesh)
    expected = torch.arange(mesh.num_devices).to(mesh.device)
    if fetch([(rows - expected).abs().max()]) != [0.0]:
        raise RuntimeError(f"host {mesh.process_index} fills other rows of a batch than {mesh.places}")


def set_products(precision: str) -> None:
    """Chooses how a TPU multiplies float32 matrices in the graphs to come. By default it rounds them to bfloat16, 8
    bits; "highest" takes six passes. torch_xla 2.9 asks for it neither in einsum, which models/products.py therefore
    replaces, nor in the backward pass of convolutions, which stays at one pass."""
    exact = precision == "float32"
    torch.backends.cuda.matmul.fp32_precision = "ieee" if exact else "none"  # what models/products.py looks at
    wanted = "highest" if exact else "default"
    if backends.get_mat_mul_precision() != wanted:  # it warns of a second call
        backends.set_mat_mul_precision(wanted)


def compiled(step_fn: Callable, mesh: Mesh, max_graphs: int, torch_compile: bool) -> CompiledStep:
    return CompiledStep(step_fn, mesh.strict, _report, max_graphs)


def annotate(tensor: Tensor, spmd: xs.Mesh, spec: tuple) -> None:
    if tensor.is_meta:
        tensor.sharding = spmd, spec
    else:
        xs.mark_sharding(tensor, spmd, spec)


def upload(tensor: Tensor, mesh: Mesh) -> Tensor:
    sharding = _row_sharding(mesh.spmd, tensor.dim(), mesh.process_count > 1)
    return xm.send_cpu_data_to_device(tensor, mesh.device, sharding)[0]


@functools.cache
def _row_sharding(spmd: xs.Mesh, rank: int, hosts: bool) -> xs.ShardingSpec:
    """Returns what cuts a tensor by its first dimension; a spec fits tensors of one rank only."""
    return xs.ShardingSpec(spmd, ("data",) + (None,) * (rank - 1), minibatch=hosts)


def fetch(values: list[Tensor]) -> list[float]:
    torch_xla._XLAC._xla_sync_multi(values, devices=[], wait=True, sync_xla_data=False)
    return [float(value) for value in read(values)]


def prepare_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], mesh: Mesh) -> None:
    """Puts Adam's learning rate and count of steps on the device. As Python floats, its bias corrections and
    lr * weight_decay round to the constants 0.0 and 1.0 in the middle of a run (with beta2 = 0.98 after 823 steps), and
    the step would be compiled again."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return
    group["capturable"] = True
    group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32).to(mesh.device)
    # From its first addcdiv_ on, torch_xla 2.9 traces the views of a tensor in another way (an embedding's step 2 would
    # be another graph): do one that adds 0, now.
    with torch.no_grad():
        for parameter in group["params"]:
            parameter.addcdiv_(torch.zeros_like(parameter), torch.ones_like(parameter))
            replicate(parameter, mesh)
