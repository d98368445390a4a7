"""Compute in bfloat16 by autocast, keep parameters float32

bfloat16 has float32's exponents: no GradScaler and no loss scale. Parameters, gradients, optimizer
state and losses stay float32, since 8 bits of mantissa lose small updates. (A TPU multiplies
float32 matrices in bfloat16, too; `device.setup(seed, "float32")` asks it for float32. Not run.)

`model.to(torch.bfloat16)`, what XLA_USE_BF16 once did: ten updates of 0.001 leave a weight of 1.0
at {WRONG} in place of {RIGHT}.
"""

from dataclasses import replace

import torch
from torch import nn

from train.common import device

X = torch.ones(8, 4)
RIGHT = 0.99
WRONG = 1.0
OURS = [
    ("train/resnet50.py", "with mesh.autocast():"),
    ("train/resnet50.py", "return logits.float()"),
    ("train/common/xla/backend.py", "def set_matmul_precision("),
]


def build():
    """Returns a model whose gradient is 1."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def eager():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(X)  # float16 would need a GradScaler
        y.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight[0, 0].item()


def xla(mesh):
    mesh = replace(mesh, precision="bfloat16")  # of device.setup
    model, x = device.to_device(build(), mesh), device.upload(X, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        with mesh.autocast():
            y = model(x)
        y.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return device.fetch([model.weight[0, 0].detach()])[0]


def wrong(mesh):
    model = device.to_device(build().to(torch.bfloat16), mesh)
    x = device.upload(X.bfloat16(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        model(x).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return device.fetch([model.weight[0, 0].detach()])[0]
