"""Trains a small network on images of ten patterns under noise."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from train.common import device, loading

SEED, EPOCHS, STEPS, BATCH, LR = 0, 4, 16, 64, 3e-3  # STEPS: in an epoch


class Patterns(Dataset):
    def __init__(self, size, seed):
        patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.images = patterns[self.labels] + 1.5 * torch.randn(size, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.labels)

    def example(self, index, rng):
        return {"x": self.images[index].numpy(), "y": self.labels[index].numpy()}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.convolution(x)))
        return self.head(F.max_pool2d(x, 2).flatten(1))


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def count_correct(model, x, y, mask):
    return ((model(x).argmax(1) == y) * mask).sum()


def evaluate(step, model, data, mesh):
    model.eval()
    correct = [step(model, *batch.values()) for batch in loading.parallel_loader(data, BATCH, mesh, train=False)]
    model.train()
    return sum(device.fetch(correct)) / len(data)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / (EPOCHS * STEPS)))


def main():
    mesh = device.setup(SEED, "float32")
    train, test = Patterns(STEPS * BATCH, seed=1), Patterns(250, seed=2)
    model = device.to_device(Network(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    step_fn, eval_fn = device.compiled(train_step, mesh), device.compiled(count_correct, mesh)
    loader = loading.parallel_loader(train, BATCH, mesh, train=True, seed=SEED, stop=EPOCHS * STEPS)
    losses = []
    for epoch in range(EPOCHS):
        for batch in itertools.islice(loader, STEPS):
            device.set_lr(optimizer, LR * cosine(len(losses)))
            losses.append(step_fn(model, optimizer, batch["x"], batch["y"]))
        print(f"epoch {epoch + 1}  loss {losses[-1]:.4f}  accuracy {evaluate(eval_fn, model, test, mesh):.4f}")
    return device.fetch(losses), evaluate(eval_fn, model, test, mesh)


if __name__ == "__main__":
    main()
