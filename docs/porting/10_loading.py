"""Load by a loader that shards, and swallows nothing

`parallel_loader` gives each host its rows and every host the same number of steps, uploads in the
background, and raises what a worker raised; the order depends on (seed, epoch, index), never on
hosts or workers.

torch_xla's `MpDeviceLoader` lets its thread print the error, and the loop ends: {WRONG}.
`split_dataset_by_node` of `datasets` gives three hosts {WRONG_SHARDS} of 80 rows: hosts with more
steps wait for the others forever (not run).
"""

import torch
from torch.utils.data import DataLoader
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from train.common import loading

WRONG = "4 images, no error"
WRONG_SHARDS = [27, 27, 26]
OURS = [
    ("train/resnet50.py", "loader = loading.parallel_loader("),
    ("train/common/loading.py", "except BaseException as error:"),
]


class Images:
    """Twelve images, one of them broken."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("image 5 is broken")
        return torch.tensor([float(index)])

    def example(self, index, rng):
        """Returns an image as parallel_loader takes it."""
        return {"image": self[index].numpy()}


def count(batches):
    """Returns how many images an epoch has, and the error that ends it."""
    images = 0
    try:
        for _ in batches:
            images += 4
    except ValueError as error:
        return f"{images} images, then: {error}"
    return f"{images} images, no error"


def eager():
    loader = DataLoader(Images(), batch_size=4)
    return count(loader)


def xla(mesh):
    loader = loading.parallel_loader(Images(), 4, mesh, train=False)
    with loader:  # closes its thread and worker processes
        return count(loader)


def wrong(mesh):
    return count(MpDeviceLoader(DataLoader(Images(), batch_size=4), mesh.device))


def wrong_shards(mesh):
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rows = Dataset.from_dict({"row": list(range(80))})
    return [len(split_dataset_by_node(rows, host, world_size=3)) for host in range(3)]
