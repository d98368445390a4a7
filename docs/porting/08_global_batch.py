"""Think in the global batch; give batch norm its groups

With DDP each process sees its own part of the batch, and batch norm the statistics of that part;
under SPMD the program sees the whole batch, whatever the number of chips, so the parts are named:
`norm_groups` of models/resnet.py.

`nn.BatchNorm2d` on the mesh normalizes by the whole batch: the output's mean after ReLU is {WRONG}
in place of {RIGHT}.
"""

import torch
from torch import nn

from models.resnet import BatchNorm
from train.common import device

X = torch.linspace(-1, 1, 128).pow(3).view(8, 2, 2, 4)
RIGHT = 0.466331
WRONG = 0.353871
OURS = [
    ("train/resnet50.py", "norm_groups = config.norm_groups or mesh.num_devices"),
    ("models/resnet.py", "class BatchNorm("),
]


def eager():
    norm = nn.BatchNorm2d(2)
    parts = X.chunk(4)  # DDP: one in each of 4 processes
    y = torch.cat([norm(part) for part in parts])
    return y.relu().mean().item()


def xla(mesh):
    norm = device.to_device(BatchNorm(2), mesh)
    norm.groups = 4
    y = norm(device.upload(X, mesh))
    return device.fetch([y.relu().mean().detach()])[0]


def wrong(mesh):
    norm = device.to_device(nn.BatchNorm2d(2), mesh)
    y = norm(device.upload(X, mesh))
    return device.fetch([y.relu().mean().detach()])[0]
