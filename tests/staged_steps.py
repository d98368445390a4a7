"""Stages steps for 256 chips and prints as JSON what tests/test_compile.py asserts of them.

It runs in a process of its own: the tests' process has devices already.

    products    (operation, type of its left operand, precisions) of each product of a step, by
                precision and model
    donated     names of the tensors that a small step updates in place
    shardings   (axes, sizes of the mesh) of each tensor that it reads, by name
    outputs     how many results its program has
    shapes      shapes of the parameters of its program
    error       the traceback of a step that reads a value of the device
    forms       fingerprints of an evaluation in usual, in safe, and again in usual forms, by model
"""

import dataclasses
import json
import traceback
from typing import NamedTuple

import torch
from torch import nn

from tpu.compiler import analysis, hlo, staging
from tpu.compiler import compile as compiling
from train.common import device, embedding
from train.common.mesh import GraphError, Mesh
from train.common.xla import backend

DEVICES = 256  # more than 8 bits count, as autograd of torch 2.9 does
MODELS = (
    "resnet50 full --batch 8 -- --model resnet_tiny --image-size 32",
    "dlrm tiny --batch 8 --",
    "bert full --batch 8 --task pretrain -- --size tiny",
)
PRECISIONS = {  # and how many of MODELS are staged with it
    "bfloat16": 2,
    "fast_float32": 2,
    "float32": 3,
}
EVALUATED = {
    "bert": "bert full --task pretrain --batch 8 -- --precision float32 --size tiny",
    "dlrm": "dlrm tiny --batch 8 -- --precision float32",
}


class State(NamedTuple):
    """What `train_step` works on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def train_step(state, bags, batches, mesh):
    embedded = bags(batches[0]["ids"])
    loss = state.model(embedded.sum(1)).square().mean()
    loss.backward()
    state.optimizer.step()
    bags.step()
    state.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach()}


def reading_step(model, batch):
    if model(batch["ids"].float().sum(1, keepdim=True).expand(-1, 8)).sum() > 0:
        return batch["ids"] + 1


def small_step(mesh: Mesh) -> dict:
    """Stages `train_step` and `reading_step`, with tied weights, batch norm and two tables."""
    tied = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(tied, nn.BatchNorm1d(8), tied)
    assert tied.weight is model[2].weight, "untied before"
    device.to_device(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    tables = [
        embedding.Table("huge", 30_000_000, 1, plan="exchange"),
        embedding.Table("few", 8, 1, plan="data"),
    ]
    bags = embedding.ShardedEmbeddingBags(tables, 8, mesh, embedding.SGD(), 0.1, 0)
    batch = staging.inputs({"ids": ((256, 2), torch.int32)}, mesh)

    staged = staging.stage(train_step, State(model, optimizer), bags, [batch], mesh)
    names = staged.parameters
    shardings = {}
    for number, sharding in staged.shardings.items():
        if names[number]:
            shardings[names[number]] = sharding

    try:
        staging.stage(reading_step, model, batch)
        error = ""
    except GraphError:
        error = traceback.format_exc()

    return {
        "donated": sorted(names[number] for number in staged.donated),
        "shardings": shardings,
        "outputs": staged.outputs,
        "shapes": [parameter.shape.text for parameter in hlo.parse(staged.module).parameters],
        "error": error,
    }


def products(mesh: Mesh) -> dict[str, list]:
    """Returns the products of the training steps of MODELS in each precision."""
    found = {}
    for precision, count in PRECISIONS.items():
        backend.set_matmul_precision(precision)
        on_mesh = dataclasses.replace(mesh, precision=precision)
        for arguments in MODELS[:count]:
            model, *flags = arguments.split()
            _, job = compiling.parse([model, *flags, "--precision", precision])
            _, staged = compiling.stage(job, on_mesh, job.script)
            dots = []
            for dot in analysis.dots(hlo.parse(staged.module)):
                dots.append([dot.opcode, dot.lhs, sorted(set(dot.precision))])
            found[f"{precision} {model}"] = dots
    return found


def fingerprints(mesh: Mesh) -> dict[str, list[str]]:
    """Returns the fingerprints of each evaluation in usual, in safe, and again in usual forms."""
    backend.set_matmul_precision("float32")
    found = {}
    for name, arguments in EVALUATED.items():
        found[name] = []
        for flags in ([], ["--safe-forms"], []):
            _, job = compiling.parse([*arguments.split(), *flags])
            job = dataclasses.replace(job, program="evaluate")
            on_mesh = dataclasses.replace(mesh, safe_forms=job.config(DEVICES).safe_forms)
            _, step = compiling.stage(job, on_mesh, job.script)
            found[name].append(hlo.fingerprint(step.module))
    return found


def main() -> None:
    mesh = staging.setup(DEVICES, "TPU v5 lite", "float32")
    found = small_step(mesh)
    found["products"] = products(mesh)
    found["forms"] = fingerprints(mesh)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
