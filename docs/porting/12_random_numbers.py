"""Draw random numbers by (seed, step)

The device has a generator of its own, which no checkpoint of PyTorch's holds; seeded by (seed,
step) before each step, dropout is the same in a resumed run, and there is no state to save.

Seeded once, with PyTorch's state saved and restored as in the eager half: {WRONG} of 1000 places
differ in the dropout mask of the resumed step, in place of {RIGHT}.
"""

import torch
import torch.nn.functional as F

from train.common import device

X = torch.ones(1000)
RIGHT = 0
WRONG = 489
OURS = [("train/common/accumulate.py", "device.seed_step(config.seed, number)")]


def eager():
    torch.manual_seed(0)
    for _ in range(3):
        saved = torch.get_rng_state()  # in a checkpoint
        whole = F.dropout(X)
    torch.set_rng_state(saved)  # resumed before step 3
    return (F.dropout(X) != whole).sum().item()


def xla(mesh):
    x, dropout = device.upload(X, mesh), device.compiled(F.dropout, mesh)
    for step in (1, 2, 3):
        device.seed_step(0, step)
        whole = dropout(x)
    device.seed_step(0, 3)  # resumed before step 3
    return int(device.fetch([(dropout(x) != whole).sum()])[0])


def wrong(mesh):
    x, dropout = device.upload(X, mesh), device.compiled(F.dropout, mesh)
    device.seed_step(0, 1)
    for _ in range(3):
        saved = torch.get_rng_state()
        whole = dropout(x)
    torch.set_rng_state(saved)
    return int(device.fetch([(dropout(x) != whole).sum()])[0])
