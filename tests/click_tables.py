"""Small click logs as CSV and parquet files, for the tests of data/clicks.py and
data/prepare/clicks.py."""

import csv
import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FLAGS = {
    "label": "clicked",
    "dense": "price",
    "log": "views",
    "categorical": "user,item",
    "multi": "tags",
    "time": "ts",
}


@dataclass(frozen=True)
class Drawn:
    """A log that is drawn at random."""

    columns: dict[str, list]  # None where a value is missing; lists of tags
    probability: np.ndarray  # of a click, what a perfect model predicts

    def __len__(self) -> int:
        return len(self.probability)


def draw(rows: int, seed: int = 0) -> Drawn:
    """Draws rows in the order of their time, about four to each time.

    The logit of a click is the sum of an effect of the user, of the item and of each tag, and of
    the price and the logarithm of the views. A twentieth of the prices is missing.
    """
    effects = np.random.default_rng(7)  # the same for all seeds
    of_user = effects.normal(0, 1.0, 40)
    of_item = effects.normal(0, 1.0, 25)
    of_tag = effects.normal(0, 0.7, 8)

    rng = np.random.default_rng(seed)
    user = rng.integers(0, 40, rows)
    item = np.minimum(rng.geometric(0.12, rows) - 1, 24)
    price = rng.normal(50, 10, rows)
    views = rng.poisson(20, rows)
    has_tag = rng.random((rows, 8)) < 0.25
    has_price = rng.random(rows) > 0.05

    logit = -0.5 + of_user[user] + of_item[item] + has_tag @ of_tag
    logit += 0.05 * np.where(has_price, price - 50, 0) + np.log1p(views) - 3
    probability = 1 / (1 + np.exp(-logit))
    clicked = rng.random(rows) < probability

    columns = {
        "ts": np.sort(rng.integers(0, max(rows // 4, 1), rows)).tolist(),
        "clicked": clicked.astype(int).tolist(),
        "user": [f"user {number}" for number in user],
        "price": [
            round(x, 2) if there else None for x, there in zip(price, has_price, strict=True)
        ],
        "item": [f"i{number:02d}" for number in item],
        "views": views.tolist(),
        "tags": [[f"t{tag}" for tag in np.flatnonzero(row)] for row in has_tag],
    }
    return Drawn(columns, probability)


def text_of(columns: dict[str, list], separator: str = ",") -> str:
    """Returns columns as CSV; of lists the items stand between |."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerow(columns)
    for values in zip(*columns.values(), strict=True):
        row = []
        for value in values:
            if isinstance(value, list):
                value = "|".join(value)
            row.append("" if value is None else value)
        writer.writerow(row)
    return text.getvalue()


def write(path: Path, columns: dict[str, list], separator: str = ",") -> Path:
    """Writes columns to a file, as its name ends: .parquet, or CSV, packed with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=50)
        return path
    content = text_of(columns, separator).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    return path


def part(columns: dict[str, list], first: int, stop: int) -> dict[str, list]:
    """Returns some rows."""
    return {name: values[first:stop] for name, values in columns.items()}
