"""Give the learning rate, and every other changing number, as data

A Python number becomes part of the graph where torch_xla takes it for a constant (0.0 and 1.0
always): `device.set_lr` sends the rate to the device as an input, and what else changes by step
belongs in a tensor.

Rates 0, 0.1, 0.2 and 1 by `group["lr"] = lr` and by `device.set_lr`, each step ended by
`torch_xla.sync()`, compile {WRONG} graphs. A Python number among a step's arguments:
{WRONG_NUMBER}.
"""

import torch
from torch import nn

from train.common import device

X = torch.linspace(-1, 1, 32).view(8, 4)
RATES = [0.0, 0.1, 0.2, 1.0]
WRONG = [3, 1]
WRONG_NUMBER = (
    "GraphError: scaled would be compiled again: argument 1 is 0.25, compiled for 0.0 (give a changing number as a "
    "tensor on the device)"
)
OURS = [("train/resnet50.py", "device.set_lr(state.optimizer, lr)"), ("train/common/device.py", "def set_lr(")]


def build():
    """Returns a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model, optimizer, x):
    """Updates once; returns the loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def eager():
    model, optimizer = build()
    losses = []
    for lr in RATES:
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses.append(train_step(model, optimizer, X).item())
    return losses


def xla(mesh):
    model, optimizer = build()
    device.to_device(model, mesh)
    step, x = device.compiled(train_step, mesh), device.upload(X, mesh)
    losses = []
    for lr in RATES:
        device.set_lr(optimizer, lr)
        losses.append(step(model, optimizer, x))
    return device.fetch(losses)


def wrong(mesh):
    import torch_xla

    def graphs(set_lr, width):  # another width, since a graph is compiled once
        model = device.to_device(nn.Linear(width, 1), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device.run_pending()
        x, before = device.upload(torch.ones(8, width), mesh), device.graph_report()["graphs"]
        for lr in RATES:
            set_lr(optimizer, lr)
            train_step(model, optimizer, x)
            torch_xla.sync()
        return device.graph_report()["graphs"] - before

    def assign(optimizer, lr):
        optimizer.param_groups[0]["lr"] = lr

    return [graphs(assign, width=5), graphs(device.set_lr, width=6)]


def wrong_number(mesh):
    def scaled(x, share):
        return (x * share).sum()

    step, x = device.compiled(scaled, mesh), device.upload(X, mesh)
    return device.fetch([step(x, number / 4) for number in range(5)])
