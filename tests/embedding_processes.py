"""Trains, saves and restores embedding tables on plain PyTorch, in several processes.

tests/test_embedding_processes.py starts it: python embedding_processes.py FOLDER JOB...

    2:train          two processes train each of CASES and of SHORTAGES; process 0 writes what it
                     has found to FOLDER/<case>-2-0.pt, process 1 to FOLDER/<case>-2-1.pt
    2:restore:a:b    two processes restore the checkpoint FOLDER/a, and save it as FOLDER/b
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from embedding_helpers import (
    EXCHANGED,
    LR,
    RATES,
    SHORTAGES,
    different_ids,
    host_batch,
    in_two_passes,
    loaded_step,
    make,
    pooled,
    put,
    restore,
    save,
    train_step,
    with_room,
)

from errors import InputError
from train.common import device
from train.common.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """How tables are trained; the batches have ids that come again within and across examples, and
    empty bags."""

    plan: str
    optimizer: str
    model_devices: int = 0
    forward: Callable = pooled


CASES = {
    "exchange, SGD": Case("exchange", "sgd"),
    "exchange, row-wise Adagrad": Case("exchange", "rowwise_adagrad"),
    "exchange, Adagrad": Case("exchange", "adagrad"),
    "exchange, lazy Adam": Case("exchange", "lazy_adam"),
    "copied, SGD": Case("data", "sgd"),
    "copied, row-wise Adagrad": Case("data", "rowwise_adagrad"),
    "copied, Adagrad": Case("data", "adagrad"),
    "copied, lazy Adam": Case("data", "lazy_adam"),
    "both, two passes": Case("mixed", "rowwise_adagrad", forward=in_two_passes),
}
# With four processes, in two groups of two.
GROUPS = {
    "groups, row-wise Adagrad": Case("mixed", "rowwise_adagrad", model_devices=2),
    "groups, lazy Adam": Case("exchange", "lazy_adam", model_devices=2),
}


def train(mesh: Mesh, case: Case) -> dict:
    """Trains for some steps.

    Returns:
        What this process has: "before" and "after", its pieces; "pooled", of each step before its
        update; "losses"; "parts", of each tensor: the index of the part, and the part.
    """
    model_devices = 0 if mesh.num_devices == 1 else case.model_devices
    embeddings = make(mesh, case.plan, case.optimizer, model_devices)
    found = {"before": embeddings.pieces(), "pooled": [], "losses": []}
    for number, rate in enumerate(RATES):
        device.set_lr(embeddings, rate * LR[case.optimizer])
        batch = put(mesh, host_batch(number, ids=("power law", "one", "eighth")))
        with torch.no_grad():
            found["pooled"].append(case.forward(embeddings, batch))
        found["losses"].append(train_step(embeddings, batch, case.forward).item())
    embeddings.check()

    found["after"] = embeddings.pieces()
    found["parts"] = {}
    for array in embeddings.arrays:
        for name, tensor in array.tensors():
            (part,) = embeddings.devices.local_parts(tensor, array.spec)
            found["parts"][array.name, name] = (part.index, tensor)
    return found


def overflow(mesh: Mesh, room: tuple[float, float]) -> dict:
    """Takes a step with this room; returns its load, and "error", what a check says then."""
    torch.manual_seed(0)
    batch = host_batch(0, EXCHANGED, ragged=False) | {"ids": different_ids()}
    embeddings = with_room(mesh, room)
    found = loaded_step(embeddings, put(mesh, batch))
    found["error"] = ""
    try:
        embeddings.check()
    except InputError as error:
        found["error"] = str(error)
    return found


def work(mesh: Mesh, folder: str, job: str, *names: str) -> None:
    """Does a job in this process."""
    if job == "restore":
        embeddings = make(mesh, "mixed", "rowwise_adagrad", seed=1)
        step = restore(f"{folder}/{names[0]}", embeddings, mesh)
        save(f"{folder}/{names[1]}", embeddings, mesh, step)
        return

    results = {}
    for name, case in {**CASES, **GROUPS}.items():
        if name in CASES or mesh.num_devices != 2:
            results[name] = partial(train, mesh, case)
    for name, shortage in SHORTAGES.items():
        results[name] = partial(overflow, mesh, shortage.room)
    results["enough"] = partial(overflow, mesh, (1.0, 1.0))
    for name, result in results.items():
        torch.save(result(), f"{folder}/{name}-{mesh.num_devices}-{mesh.process_index}.pt")


def run(folder: str, number: int, count: int, job: str, *names: str) -> None:
    """Is process `number` of `count` that do a job."""
    device.choose_backend("cpu")
    if count > 1:
        meeting = f"file://{folder}/{'-'.join([str(count), job, *names])}"
        dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=count)
    mesh = Mesh(
        device=torch.device("cpu"),
        spmd=None,
        num_devices=count,
        process_index=number,
        process_count=count,
        kind="CPU",
        precision="float32",
        strict=True,
    )
    work(mesh, folder, job, *names)
    if count > 1:
        dist.destroy_process_group()


def main(folder: str, jobs: list[str]) -> None:
    """Does the jobs one after the other, each in new processes."""
    sys.modules["torch_xla"] = None  # as if it were not installed
    for job in jobs:
        count, *names = job.split(":")
        # Forked, since the import of torch takes seconds; nothing has started a thread yet.
        started = []
        for number in range(int(count)):
            child = os.fork()
            if child == 0:
                run(folder, number, int(count), *names)
                sys.exit(0)
            started.append(child)
        for child in started:
            _, status = os.waitpid(child, 0)
            assert status == 0, f"a process of {job} failed"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
