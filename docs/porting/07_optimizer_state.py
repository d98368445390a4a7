"""Make the optimizer's state before step 1

`optimizer.step()` makes momentum and moments in its first call, so that step 2 has more inputs than
step 1: another graph. `device.init_optimizer_state` makes them beforehand, as zeros.

The same loop without that line: {WRONG}.
"""

import torch
from torch import nn

from train.common import device

X = torch.linspace(-1, 1, 32).view(8, 4)
WRONG = (
    "GraphError: call 1 of train_step cannot be repeated: it leaves gradients, makes state, or changes a Python value "
    "among its arguments (device.init_optimizer_state, zero_grad)"
)
OURS = [("train/resnet50.py", "device.init_optimizer_state(optimizer, mesh)")]


def train_step(model, optimizer, x):
    """Updates once; returns the loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def build():
    """Returns a model."""
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def eager():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = train_step
    return [step(model, optimizer, X).item() for _ in range(3)]


def xla(mesh):
    model = device.to_device(build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    device.init_optimizer_state(optimizer, mesh)
    step, x = device.compiled(train_step, mesh), device.upload(X, mesh)
    return device.fetch([step(model, optimizer, x) for _ in range(3)])


def wrong(mesh):
    model = device.to_device(build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step, x = device.compiled(train_step, mesh), device.upload(X, mesh)
    return device.fetch([step(model, optimizer, x) for _ in range(3)])
