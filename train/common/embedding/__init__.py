"""Embedding tables sharded over the devices of the mesh: `ShardedEmbeddingBags` (bags.py) over `Table`s (tables.py)."""

from train.common.embedding.bags import ShardedEmbeddingBags
from train.common.embedding.tables import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    LazyAdam,
    RowWiseAdagrad,
    Table,
    check_ids,
)

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "LazyAdam",
    "RowWiseAdagrad",
    "ShardedEmbeddingBags",
    "Table",
    "check_ids",
]
