"""Trains, saves and restores embedding tables on plain PyTorch, in several processes.

tests/test_embedding_processes.py starts it: python embedding_processes.py FOLDER JOB...

    2:train          two processes train each of CASES and of SHORTAGES; process 0 writes what it
                     has found to FOLDER/<case>-2-0.pt, process 1 to FOLDER/<case>-2-1.pt
    2:restore:a:b    two processes restore the checkpoint FOLDER/a, and save it as FOLDER/b
    2:dlrm:run       two processes train a small DLRM, FOLDER/runs/run, or resume it; its metrics
                     are in FOLDER/run-2-0.pt and FOLDER/run-2-1.pt
    2:stop:run       the same until a crash in step STOP
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import forks
import torch
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
from helpers import crash, stop_at

from errors import InputError
from train import dlrm
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
STEPS = 16  # of DLRM
STOP = 10


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


def train_dlrm(folder: str, name: str, stops: bool) -> dict | None:
    """Trains a run, or resumes it; returns its metrics, None where it stops."""
    dlrm.SYNTHETIC_TRAIN = STEPS * dlrm.TINY.batch_size
    dlrm.SYNTHETIC_EVAL = 1000
    # Four of its tables are copied, four exchanged.
    config = replace(dlrm.TINY, device="cpu", runs=f"{folder}/runs", name=name)
    config = replace(config, log_every=1, save_every=4)
    if stops:
        stop_at(STOP, crash, dlrm.main, config)
        return None
    return dlrm.main(config)


def restore_and_save(mesh: Mesh, folder: str, before: str, after: str) -> None:
    """Restores a checkpoint into tables that hold other numbers, and saves them."""
    embeddings = make(mesh, "mixed", "rowwise_adagrad", seed=1)
    step = restore(f"{folder}/{before}", embeddings, mesh)
    save(f"{folder}/{after}", embeddings, mesh, step)


def work(mesh: Mesh, folder: str, job: str, *names: str) -> None:
    """Does a job in this process."""
    if job == "restore":
        restore_and_save(mesh, folder, *names)
        return

    results = {}
    if job in ("dlrm", "stop"):
        (name,) = names
        results[name] = partial(train_dlrm, folder, name, stops=job == "stop")
    else:
        results = training(mesh)
    for name, result in results.items():
        torch.save(result(), f"{folder}/{name}-{mesh.num_devices}-{mesh.process_index}.pt")


def training(mesh: Mesh) -> dict[str, Callable]:
    """Returns what gives each result of "train"."""
    results = {}
    for name, case in {**CASES, **GROUPS}.items():
        if name in CASES or mesh.num_devices != 2:
            results[name] = partial(train, mesh, case)
    for name, shortage in SHORTAGES.items():
        results[name] = partial(overflow, mesh, shortage.room)
    results["enough"] = partial(overflow, mesh, (1.0, 1.0))
    return results


def be_process(number: int, folder: str, job: str, names: list[str]) -> None:
    """Does a job as one of the processes."""
    work(device.setup(0, "float32", kind="cpu"), folder, job, *names)


def main(folder: str, jobs: list[str]) -> None:
    """Does the jobs one after the other, each in new processes."""
    sys.modules["torch_xla"] = None  # as if it were not installed
    if any("dlrm" in job for job in jobs):  # so that its processes need not import them
        importlib.import_module("sklearn.metrics")
        importlib.import_module("torchrec")
    for job in jobs:
        count, name, *names = job.split(":")
        statuses = forks.run(int(count), partial(be_process, folder=folder, job=name, names=names))
        assert not any(statuses), f"a process of {job} failed"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
