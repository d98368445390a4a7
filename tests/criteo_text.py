"""Small text files of Criteo's form, for the tests of data/criteo.py and data/prepare/criteo.py."""

import gzip
from pathlib import Path

import numpy as np

NUM_DENSE = 13
NUM_SPARSE = 26


def row(
    label: int = 0, dense: dict[int, str] | None = None, sparse: dict[int, str] | None = None
) -> bytes:
    """Returns a line without its end; dense columns and sparse features that are not given are
    missing."""
    dense = dense or {}
    sparse = sparse or {}
    fields = [str(label)]
    fields += [dense.get(column, "") for column in range(NUM_DENSE)]
    fields += [sparse.get(feature, "") for feature in range(NUM_SPARSE)]
    return "\t".join(fields).encode()


def random_rows(count: int, seed: int = 0, values: int = 30) -> list[bytes]:
    """Returns lines with a fifth of the dense columns and a tenth of the sparse features missing;
    a feature has up to `values` different values."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        dense = {}
        for column in range(NUM_DENSE):
            if rng.random() < 0.8:
                dense[column] = str(rng.integers(-3, 5000))
        sparse = {}
        for feature in range(NUM_SPARSE):
            if rng.random() < 0.9:
                value = rng.integers(values) ** 2 * 5000011 % 2**32
                sparse[feature] = f"{value:08x}"
        lines.append(row(rng.integers(2), dense, sparse))
    return lines


def write(path: Path, lines: list[bytes]) -> Path:
    """Writes lines to a file, packed if it is a .gz; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    return path


def everything(log) -> dict[str, np.ndarray]:
    """Returns all rows of a click log as one batch."""
    return log.batch(np.arange(len(log)))
