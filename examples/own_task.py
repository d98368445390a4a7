"""Learns to read handwritten digits: your own data, your own network and your own task.

    python -m examples.own_task                      accuracy 0.90 on 297 held-out digits
    CPU_NUM_DEVICES=4 python -m examples.own_task    the same on four virtual devices of the CPU

The 1,797 digits of 8 by 8 pixels come with scikit-learn (Alpaydin and Kaynak 1998).
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from train.common import device, loading


class Digits:
    """Your data: how many examples there are, and how one is made."""

    def __init__(self, rows: slice):
        digits = load_digits()
        self.images = digits.images[rows].astype("float32") / 16
        self.labels = digits.target[rows]

    def __len__(self):
        return len(self.labels)

    def example(self, index, rng):  # rng: a seeded numpy Generator, for augmentation
        return {"image": self.images[index], "label": self.labels[index]}


def train_step(model, optimizer, batch):
    """Your task: what the device computes in one step."""
    loss = F.cross_entropy(model(batch["image"]), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def count_correct(model, batch):
    """Returns how many rows of a batch are right, over all devices.

    The last batch is filled up to its full size: `mask` is 0 in rows that are no examples.
    """
    correct = model(batch["image"]).argmax(1) == batch["label"]
    return (correct * batch["mask"]).sum()


def main(lr: float = 0.003, epochs: int = 10, batch_size: int = 64) -> float:
    """Returns the accuracy on the held-out digits."""
    mesh = device.setup(seed=0, precision="float32")  # all devices that are there
    train = Digits(slice(0, 1500))
    held_out = Digits(slice(1500, None))

    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = device.to_device(network, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr, foreach=False)  # no foreach kernels on XLA
    device.init_optimizer_state(optimizer, mesh)  # else step 2 would be compiled once more

    step = device.compiled(train_step, mesh)
    # Needs the mesh: a batch that its devices do not divide is refused.
    steps = epochs * loading.steps_per_epoch(train, batch_size, mesh)
    # Each epoch is another permutation, by the loader's argument `seed`, which is 0 by default.
    for batch in loading.parallel_loader(train, batch_size, mesh, train=True, stop=steps):
        loss = step(model, optimizer, batch)

    count_fn = device.compiled(count_correct, mesh)
    batches = loading.parallel_loader(held_out, batch_size, mesh, train=False)  # each example once
    counts = device.fetch([count_fn(model, batch) for batch in batches])  # one read from the device

    accuracy = sum(counts) / len(held_out)
    (last_loss,) = device.fetch([loss])
    print(f"loss {last_loss:.4f}  accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
