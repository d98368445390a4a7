"""Layers that are spread over the devices: `--mesh`, `--shard-state` and `--remat` of a script (docs/large_models.md).

A script says `mesh = arranged(device.setup(…), config.layout)`, moves its model with `to_device`, makes the optimizer's
state with `init_optimizer_state`, and takes a batch into its steps with `rows`. The model stays plain PyTorch: which
axis cuts which parameter stands in models/partition.py. Without the three flags all of this is device.py's.
"""

from train.common.sharding.layout import WHOLE, Flags, LayerMesh, Layout, arranged
from train.common.sharding.placement import init_optimizer_state, rows, table, to_device

__all__ = ["WHOLE", "Flags", "LayerMesh", "Layout", "arranged", "init_optimizer_state", "rows", "table", "to_device"]
