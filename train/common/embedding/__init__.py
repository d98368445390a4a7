"""Embedding tables over the devices of the mesh: `ShardedEmbeddingBags` (bags.py) of `Table`s
(tables.py), and their part of a checkpoint (storage.py).

    bags               the module that a script uses
    tables             what a table is; checks of tables and ids
    plan               the tables of one plan, and the five numbers that tell where a row is
    copied, exchange   the two plans
    memory             which plan a table takes, and what fits
    devices            the devices that share tables: one of plain PyTorch
    process_devices    or one in each of several processes
    xla_devices        or those of an XLA mesh
    optimizers, rows   how rows are updated; taken, pooled and added up
    owners             how rows are spread over devices
    pieces, storage    tables in pieces, and these in checkpoints
"""

from train.common.embedding.bags import ShardedEmbeddingBags
from train.common.embedding.optimizers import OPTIMIZERS, SGD, Adagrad, LazyAdam, RowWiseAdagrad
from train.common.embedding.storage import TableStorage, read_table
from train.common.embedding.tables import Table, check_ids

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
