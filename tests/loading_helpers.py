"""Data sets whose examples say which they are, and batches read back to the host, for tests of
what is loaded."""

import numpy as np

from train.common.batches import PADDING

Batches = list[dict[str, np.ndarray]]


class Numbers:
    """Examples that have their index and one draw of their generator; every third is of a file
    that was skipped. Counts the `calls` in this process."""

    def __init__(self, size: int):
        self.size = size
        self.calls = []

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict:
        self.calls.append(index)
        return {"index": np.int64(index), "draw": rng.random(), "skipped": index % 3 == 0}


class Sentences(Numbers):
    """Sentence i is 1 to 20 tokens, all of them i."""

    def __init__(self, size: int):
        super().__init__(size)
        self.lengths = np.random.default_rng(0).integers(1, 21, size)

    def batch(self, indices, lengths):
        self.calls += indices.tolist()
        positions = np.arange(*lengths)
        is_token = positions < self.lengths[indices][..., None]
        tokens = np.where(is_token, indices[..., None], PADDING)
        return {"tokens": tokens.astype(np.int32), "index": indices}


def take(loader) -> Batches:
    """Reads all batches back to the host, and closes the loader."""
    batches = []
    with loader:
        for batch in loader:
            batches.append({key: value.cpu().numpy() for key, value in batch.items()})
    return batches


def equal(batches: Batches, others: Batches) -> bool:
    """Returns whether both have the same entries with the same values."""
    if len(batches) != len(others):
        return False
    for batch, other in zip(batches, others, strict=True):
        if batch.keys() != other.keys():
            return False
        if not all(np.array_equal(batch[key], other[key]) for key in batch):
            return False
    return True
