"""Write the step as one function

XLA compiles what runs between two reads of a value; a function from batch to loss, gradients
cleared at its end, makes that one step, and `device.compiled` holds it to one graph and starts it
again without running its Python.

A bare loop that reads its loss in steps 1, 3 and 6 compiles {WRONG} graphs, of one, two and three
steps; the step above is one graph.
"""

import torch
import torch.nn.functional as F
from torch import nn

from train.common import device

X = torch.linspace(-1, 1, 96).view(6, 4, 4)
WRONG = 3
OURS = [("train/resnet50.py", "eval_fn = device.compiled(eval_step, mesh)")]


def build():
    """Returns a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def eager():
    model, optimizer = build()
    losses = []
    for x in X:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_step(model, optimizer, x):
    """Updates once; returns the loss."""
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def xla(mesh):
    model, optimizer = build()
    device.to_device(model, mesh)
    step = device.compiled(train_step, mesh)  # the loop's body
    losses = []
    for x in X:
        x = device.upload(x, mesh)
        losses.append(step(model, optimizer, x))
    return device.fetch(losses)


def wrong(mesh):
    model, optimizer = build()
    device.to_device(model, mesh)
    device.run_pending()
    before = device.graph_report()["graphs"]
    for number, x in enumerate(X, 1):
        loss = train_step(model, optimizer, device.upload(x, mesh))
        if number in (1, 3, 6):
            loss.item()
    return device.graph_report()["graphs"] - before
