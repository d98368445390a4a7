"""Embedding tables sharded over the devices of the mesh: `ShardedEmbeddingBags` (bags.py) over `Table`s (tables.py),
and their part of a checkpoint (storage.py)."""

from train.common.embedding.bags import ShardedEmbeddingBags
from train.common.embedding.storage import TableStorage, read_table
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
    "TableStorage",
    "check_ids",
    "read_table",
]
