"""Layers that are split over the devices: --mesh, --shard-state and --remat of a script.

Only `device.setup` imports it, where one of the three is given (docs/large_models.md). From then on
the mesh has a `LayerSharding`, to which `device.to_device` and `device.init_optimizer_state` hand
over: a script does not see it. The model stays plain PyTorch. Its own file says which axis splits
which parameter, see models/partition.py.
"""

from train.common.sharding.layout import arranged, ask_for_reduce_scatters
from train.common.sharding.placement import LayerSharding, placement_table

__all__ = ["LayerSharding", "arranged", "ask_for_reduce_scatters", "placement_table"]
