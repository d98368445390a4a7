"""Set up the device and its mesh before any tensor

One call chooses XLA, makes one mesh of all chips and seeds every generator; the model and the first
backward pass come after it, because autograd makes its queues, one a device, in the first backward
pass of a process.

A backward pass on the CPU before it, such as a check of the loss, and the first one on XLA dies
inside autograd: {WRONG}.
"""

import torch
from torch import nn

from train.common import device

FRESH = True
WRONG = (
    "RuntimeError: 0 <= device.index() && device.index() < static_cast<c10::DeviceIndex>(device_ready_queues_.size())"
)
OURS = [("train/dlrm.py", "mesh = device.setup(")]


def eager():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    return [loss.item(), *model.weight.grad[0].tolist()]


def xla(mesh):
    mesh = device.setup(0, "float32")  # seeds, too
    model = device.to_device(nn.Linear(4, 1), mesh)
    x = device.upload(torch.ones(8, 4), mesh)
    loss = model(x).square().mean()
    loss.backward()
    return device.fetch([loss.detach(), *model.weight.grad[0]])


def wrong(mesh):
    eager()
    return xla(mesh)
