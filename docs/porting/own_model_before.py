"""Trains a small network on images of ten patterns under noise."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED, EPOCHS, STEPS, BATCH, LR = 0, 4, 16, 64, 3e-3  # STEPS: in an epoch


class Patterns(Dataset):
    def __init__(self, size, seed):
        patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.images = patterns[self.labels] + 1.5 * torch.randn(size, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


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
    return loss.item()


@torch.no_grad()
def count_correct(model, x, y):
    return (model(x).argmax(1) == y).sum().item()


def evaluate(model, data):
    model.eval()
    correct = [count_correct(model, x.to(DEVICE), y.to(DEVICE)) for x, y in DataLoader(data, BATCH)]
    model.train()
    return sum(correct) / len(data)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / (EPOCHS * STEPS)))


def main():
    torch.manual_seed(SEED)
    train, test = Patterns(STEPS * BATCH, seed=1), Patterns(250, seed=2)
    model = Network().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    losses = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((SEED, epoch)).permutation(len(train))
        for x, y in DataLoader(Subset(train, order), BATCH):
            losses.append(train_step(model, optimizer, x.to(DEVICE), y.to(DEVICE)))
            schedule.step()
        print(f"epoch {epoch + 1}  loss {losses[-1]:.4f}  accuracy {evaluate(model, test):.4f}")
    return losses, evaluate(model, test)


if __name__ == "__main__":
    main()
