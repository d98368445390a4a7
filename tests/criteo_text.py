"""Criteo's text files, small ones that the tests of data/criteo.py and data/prepare/criteo.py make."""

import gzip
from pathlib import Path

import numpy as np


def row(label=0, dense=None, sparse=None) -> bytes:
    """A line without its end; dense {column: text} and sparse {feature: text}, all others missing."""
    dense, sparse = dense or {}, sparse or {}
    fields = [str(label), *(dense.get(i, "") for i in range(13)), *(sparse.get(t, "") for t in range(26))]
    return "\t".join(fields).encode()


def random_rows(count: int, seed: int = 0, values: int = 30) -> list[bytes]:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        dense = {i: str(rng.integers(-3, 5000)) for i in range(13) if rng.random() < 0.8}
        sparse = {t: f"{rng.integers(values) ** 2 * 5000011 % 2**32:08x}" for t in range(26) if rng.random() < 0.9}
        lines.append(row(rng.integers(2), dense, sparse))
    return lines


def write(path: Path, lines: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def everything(log) -> dict[str, np.ndarray]:
    return log.batch(np.arange(len(log)))
