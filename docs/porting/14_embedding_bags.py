"""Replace EmbeddingBag and sparse gradients; see every fall-back

XLA has neither: `nn.Embedding` and a sum for small tables, `ShardedEmbeddingBags`
(docs/embeddings.md) for large ones, which reads and writes only the rows looked up. What XLA lacks
runs on the host unseen; `device.compiled` names it.

`nn.EmbeddingBag` in a compiled step: {WRONG}. `nn.Embedding(sparse=True)`: {WRONG_SPARSE}.
"""

import torch
from torch import nn

from train.common import device

IDS = torch.tensor([[0, 1], [1, 2], [3, 3], [0, 1]])
WRONG = "GraphError: train_step runs aten::_embedding_bag on the host, since XLA has no lowering for it: replace it"
WRONG_SPARSE = (
    "NotImplementedError: Could not run 'aten::_sparse_coo_tensor_with_dims_and_tensors' with arguments from the "
    "'SparseXLA' backend"
)
OURS = [("train/dlrm.py", "ShardedEmbeddingBags("), ("train/common/xla/backend.py", "def _check_fallbacks(")]


def train_step(model, optimizer, ids):
    """Updates once; returns the loss."""
    loss = model(ids).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def eager():
    torch.manual_seed(0)
    model = nn.EmbeddingBag(4, 3, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [train_step(model, optimizer, IDS).item() for _ in range(3)]


class Bags(nn.Embedding):
    """An embedding whose rows are summed by bag."""

    def forward(self, ids):
        return super().forward(ids).sum(1)


def xla(mesh):
    torch.manual_seed(0)
    model = device.to_device(Bags(4, 3), mesh)  # forward(ids).sum(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, ids = device.compiled(train_step, mesh), device.upload(IDS, mesh)
    return device.fetch([step(model, optimizer, ids) for _ in range(3)])


def wrong(mesh):
    model = device.to_device(nn.EmbeddingBag(4, 3, mode="sum"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, ids = device.compiled(train_step, mesh), device.upload(IDS, mesh)
    return device.fetch([step(model, optimizer, ids)])


def wrong_sparse(mesh):
    model = device.to_device(nn.Embedding(4, 3, sparse=True), mesh)
    model(device.upload(IDS, mesh)).sum().backward()
