"""Give batches fixed shapes

Every new shape is a new graph and another compilation: pad to one of a few lengths (or pack several
sentences into a row), fill up the last batch with rows of padding, and leave padding out of every
mean by a mask.

Batches padded to their own longest sentence, as in the eager half: {WRONG}.
"""

import torch
import torch.nn.functional as F
from torch import nn

from train.common import device

# 10 sentences in batches of 4, each as long as its longest: 3, 5 and 4 words, and 2 rows in the
# last batch.
WORDS = torch.arange(1, 9).repeat(5)
BATCHES = [WORDS[:12].view(4, 3), WORDS[:20].view(4, 5), WORDS[:8].view(2, 4)]
ROWS, LENGTH = 4, 8
WRONG = (
    "GraphError: mean_score would be compiled again: argument 1 is ((4, 5), 'int64'), compiled for ((4, 3), 'int64')"
)
OURS = [
    ("data/batching.py", "class Buckets(Plan):"),
    ("data/packing.py", "class Packed(Plan):"),
    ("train/common/batches.py", "yield 0, np.where(indices < size, indices, PADDING)"),
]


def build():
    """Returns scores of 9 words."""
    torch.manual_seed(0)
    return nn.Embedding(9, 1)


def mean_score(table, ids):
    """Returns the mean over the words that are not padding."""
    mask = (ids != 0).float()
    return (table(ids)[..., 0] * mask).sum().detach() / mask.sum()


def eager():
    table, scores = build(), []
    for ids in BATCHES:
        scores.append(mean_score(table, ids).item())
    return scores


def xla(mesh):
    table, scores = device.to_device(build(), mesh), []
    step = device.compiled(mean_score, mesh)
    for ids in BATCHES:
        rows, length = ids.shape
        ids = F.pad(ids, (0, LENGTH - length, 0, ROWS - rows))
        scores.append(step(table, device.upload(ids, mesh)))
    return device.fetch(scores)


def wrong(mesh):
    table, scores = device.to_device(build(), mesh), []
    step = device.compiled(mean_score, mesh)
    for ids in BATCHES:
        scores.append(step(table, device.upload(ids, mesh)))
    return device.fetch(scores)
