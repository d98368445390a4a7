"""Click logs to train on: Criteo's, prepared or in torchrec's arrays, and a synthetic one with a known answer.

A click log has `table_rows`, `lookups`, `features` and `num_dense`, and `batch(indices)` instead of `example`:
{"dense": float32 [n, num_dense], "ids": int32 [n, S], "label": float32 [n]} with S = sum(lookups), the columns of "ids"
in the order of the features; and, where bags are not always full, "present": float32 [n, S], 0 at padded places.

Criteo's text files are turned into such arrays before training, by data/prepare/criteo.py (make data DATASET=criteo).
"""

import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from data import movielens, splits
from data.prepare.files import read_json
from data.remote import FINISHED, local_copy
from errors import InputError

NUM_DENSE = 13

# The tables of MLPerf's DLRM-DCNv2, for its multi-hot arrays:
# https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
MLPERF_MAX_ROWS = 40_000_000
# fmt: off
MLPERF_ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
               2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
# fmt: on

# What is copied of a URL: not text, nor the words of the vocabulary.
FILES = ("*prepared.json", "*complete", "*.npy", "*.npz", "!*vocabulary_*", *FINISHED, *movielens.FILES)

Split = Literal["train", "eval"]


class ClickLog:
    """A click log in memory-mapped arrays: a prepared folder, or one in torchrec's layout.

    torchrec's layout (torchrec.datasets.criteo.BinaryCriteoUtils) is day_K_dense.npy, day_K_sparse.npy [N, 26] and
    day_K_labels.npy [N, 1] for each day K; the ids are hashes of 32 bits, taken modulo the table's rows, or small
    already. Instead of the sparse arrays there may be MLPerf's day_K_sparse_multi_hot.npz, whose
    members "0", "1", … [N, lookups] hold rows of tables, which must be in range. The last day is for evaluation, all of
    it (torchrec validates on its first half and tests on its second).

    Args:
        rows: of torchrec's tables, one for all or one per feature; 40,000,000 by default, MLPerf's with multi-hot.
    """

    table_rows: tuple[int, ...]
    lookups: tuple[int, ...]
    features: tuple[str, ...]
    num_dense: int
    source: str  # and left_out: see data/splits.py
    left_out: Sequence[str]

    def __init__(self, folder: str | Path, split: Split, rows: int | Sequence[int] | None = None):
        self.folder, self.split = Path(folder).expanduser(), split
        self._arrays: dict[int, tuple] = {}  # day or 0 -> memory maps of this process
        self._modulo, self._multi_hot = None, False
        if (self.folder / "prepared.json").exists():
            self._open_prepared(rows)
        else:
            self._open_torchrec(rows)

    def _open_prepared(self, rows) -> None:
        if rows is not None:
            raise InputError(f"{self.folder} has tables of its own; their rows are chosen when it is prepared")
        if not (self.folder / "COMPLETE").exists():
            raise InputError(f"{self.folder} is not prepared to its end; give the same `make data` command again")
        report = read_json(self.folder / "prepared.json")
        splits.set_source(self, report, evaluation=self.split == "eval")
        self.table_rows = tuple(report["table_rows"])
        self._names = [(f"{self.split}_dense.npy", f"{self.split}_sparse.npy", f"{self.split}_labels.npy")]
        self._read_shapes()

    def _open_torchrec(self, rows) -> None:
        labels = [re.fullmatch(r"day_(\d+)_labels\.npy", path.name) for path in self.folder.glob("day_*_labels.npy")]
        days = sorted(int(match[1]) for match in labels if match)
        if len(days) < 2:
            expected = "expected two days or more (day_0_labels.npy, …), of which the last is for evaluation"
            raise InputError(f"{self.folder} has the labels of {len(days)} days; {expected}")
        self._multi_hot = all((self.folder / f"day_{day}_sparse_multi_hot.npz").exists() for day in days)
        days = days[:-1] if self.split == "train" else days[-1:]
        self.source, self.left_out = splits.shown(f"day {day}" for day in days), []
        sparse = "sparse_multi_hot.npz" if self._multi_hot else "sparse.npy"
        self._names = [(f"day_{day}_dense.npy", f"day_{day}_{sparse}", f"day_{day}_labels.npy") for day in days]
        self._read_shapes()
        if rows is None:
            rows = MLPERF_ROWS if self._multi_hot else MLPERF_MAX_ROWS
        self.table_rows = (rows,) * len(self.lookups) if isinstance(rows, int) else tuple(rows)
        if len(self.table_rows) != len(self.lookups):
            given = f"{len(self.table_rows)} table sizes are given"
            raise InputError(f"{self.folder} has {len(self.lookups)} categorical features, but {given}; give one each")
        if not all(0 < number < 2**31 for number in self.table_rows):
            raise InputError(f"table sizes {self.table_rows} are out of range; expected 1 to 2147483647 rows")
        self._modulo = None if self._multi_hot else np.array(self.table_rows, np.uint32)

    def _read_shapes(self) -> None:
        """Sets lookups, num_dense and the row numbers at which days end; opens every file once to check its shape."""
        shapes, ends = set(), []
        for part, names in enumerate(self._names):
            dense, sparse, labels = self._open(part)
            if {len(array) for array in (dense, *sparse, labels)} != {len(labels)} or dense.ndim != 2:
                raise InputError(f"{self.folder}: {', '.join(names)} have different numbers of rows")
            lookups = tuple(array.shape[1] for array in sparse) if self._multi_hot else (1,) * sparse[0].shape[1]
            shapes.add((dense.shape[1], lookups))
            ends.append(len(labels))
        if len(shapes) > 1:
            raise InputError(f"{self.folder}: the days have different numbers of columns: {sorted(shapes)}")
        self.num_dense, self.lookups = shapes.pop()
        self.features = tuple(f"C{feature + 1}" for feature in range(len(self.lookups)))
        self._ends = np.cumsum(ends)
        self._arrays = {}

    def _open(self, part: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Memory-maps a day: dense, [sparse] or one array per feature, labels."""
        if part not in self._arrays:
            dense, sparse, labels = (self.folder / name for name in self._names[part])
            if self._multi_hot:
                members = map_npz(sparse)
                if sorted(members) != sorted(str(feature) for feature in range(len(members))):
                    raise InputError(f'{sparse} has the members {", ".join(sorted(members))}; expected "0", "1", …')
                of_features = [members[str(feature)] for feature in range(len(members))]
            else:
                of_features = [_map_npy(sparse)]
            if any(array.ndim != 2 or array.dtype not in (np.int32, np.int64) for array in of_features):
                raise InputError(f"{sparse} is not made of integers [rows, columns]; expected int32 or int64")
            numbers = {path: _map_npy(path) for path in (dense, labels)}
            for path, array in numbers.items():
                if array.dtype.kind not in "biuf":
                    raise InputError(f"{path} is made of {array.dtype}; expected numbers such as float32")
            self._arrays[part] = numbers[dense], of_features, numbers[labels].reshape(-1)
        return self._arrays[part]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_arrays": {}}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {"dense": float32 [n, num_dense], "ids": int32 [n, S], "label": float32 [n]} of these rows.

        Neighbouring rows in order are read as one piece. Raises InputError for a row that cannot be trained on.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of a click log of {len(self)} rows")
        part = np.searchsorted(self._ends, indices, side="right")
        if len(indices) and (part == part[0]).all():
            return self._rows(int(part[0]), indices)
        batch = {
            "dense": np.empty((len(indices), self.num_dense), np.float32),
            "ids": np.empty((len(indices), sum(self.lookups)), np.int32),
            "label": np.empty(len(indices), np.float32),
        }
        for number in np.unique(part):
            here = part == number
            for key, values in self._rows(int(number), indices[here]).items():
                batch[key][here] = values
        return batch

    def _rows(self, part: int, indices: np.ndarray) -> dict[str, np.ndarray]:
        dense, sparse, labels = self._open(part)
        indices = indices - (self._ends[part - 1] if part else 0)
        if (np.diff(indices) == 1).all():
            indices = slice(indices[0], indices[-1] + 1)
        ids = np.concatenate([array[indices] for array in sparse], axis=1)
        if self._modulo is not None:
            # Hashes beyond 2^31 are negative in int32; they mean the unsigned number.
            ids = ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint32)
            ids %= self._modulo
            ids = ids.view(np.int32)
        elif self._multi_hot:
            self._check_range(ids, self._names[part][1])
        with np.errstate(over="ignore"):  # float64 that float32 cannot hold: named below
            values = dense[indices].astype(np.float32)
        batch = {
            "dense": values,
            "ids": ids.astype(np.int32, copy=False),
            "label": labels[indices].astype(np.float32),
        }
        rows = np.arange(indices.start, indices.stop) if isinstance(indices, slice) else indices
        strange = np.argwhere(~np.isfinite(values))
        if len(strange):
            row, column = strange[0]
            found = dense[rows[row], column]
            what = f"has {found} in row {rows[row]}, column {column} (both from 0)"
            remedy = "expected finite numbers of float32: fix or remove that row"
            raise InputError(f"{self.folder / self._names[part][0]} {what}; {remedy}")
        strange = np.flatnonzero((batch["label"] != 0) & (batch["label"] != 1))
        if len(strange):
            what = f"has the label {batch['label'][strange[0]]:g} in row {rows[strange[0]]} (from 0)"
            raise InputError(f"{self.folder / self._names[part][2]} {what}; expected 0 or 1")
        return batch

    def _check_range(self, ids: np.ndarray, name: str) -> None:
        rows = np.repeat(self.table_rows, self.lookups)
        if ids.min() < 0 or (ids >= rows).any():
            row, column = np.argwhere((ids < 0) | (ids >= rows))[0]
            feature = int(np.searchsorted(np.cumsum(self.lookups), column, side="right"))
            raise InputError(
                f"{self.folder / name} has the id {ids[row, column]} for {self.features[feature]}, whose table has "
                f"{self.table_rows[feature]} rows; give the table sizes that these arrays were made for"
            )


def _map_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}; expected dense, sparse and labels for every day") from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an .npy file: {error}") from error


def map_npz(path: Path) -> dict[str, np.ndarray]:
    """Memory-maps the arrays of an uncompressed .npz file (np.savez) where they lie in it: nothing is copied.

    Raises InputError if the file is damaged or compressed.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise InputError(f"{path} is compressed; write it with np.savez, so that it can be memory-mapped")
                file.seek(member.header_offset + 26)
                name_length, extra_length = np.frombuffer(file.read(4), "<u2")
                file.seek(int(name_length) + int(extra_length), os.SEEK_CUR)
                version = np.lib.format.read_magic(file)
                read_header = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read_header = np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read_header(file)
                name, order = member.filename.removesuffix(".npy"), "F" if fortran else "C"
                if 0 in shape:
                    arrays[name] = np.zeros(shape, dtype)
                else:
                    arrays[name] = np.memmap(path, dtype, "r", file.tell(), shape, order).view(np.ndarray)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as an .npz file: {error}") from error
    return arrays


class SyntheticClicks:
    """A click log whose best possible score is known.

    The logit of a click is the sum of a bias, a linear function of the dense features (standard normal), an effect of
    each id, and for the first and second feature, and the third and fourth, the product of hidden vectors of 2 numbers,
    one vector an id. A bag's effect and vector are the sums over its ids. Effects and vectors are hashes of (seed,
    feature, id): shared by training and evaluation, and no table is needed, however many rows there are. Small ids are
    frequent, more so than by Zipf's law; a bag of a feature with L > 1 lookups has 0 to L ids.

    With the defaults the perfect AUC of evaluation is 0.82 to 0.86, that of a linear model of the dense features
    about 0.64, and that of a linear model of all features 0.74 to 0.80.

    Args:
        size: examples; 16,384 for training and 4,096 for evaluation by default.
    """

    def __init__(
        self,
        split: Split,
        size: int | None = None,
        seed: int = 0,
        table_rows: Sequence[int] = (20, 20, 50, 50, 100, 200, 500, 2000),
        lookups: Sequence[int] = (1, 1, 1, 3, 1, 1, 1, 1),
        num_dense: int = NUM_DENSE,
    ):
        if len(table_rows) != len(lookups) or min(*table_rows, *lookups, num_dense) < 1:
            raise InputError(f"{len(table_rows)} tables and {len(lookups)} lookups; expected one each, and at least 1")
        self._arguments = (split, size, seed, tuple(table_rows), tuple(lookups), num_dense)
        self.split, self.seed = split, seed
        self.table_rows, self.lookups, self.num_dense = tuple(table_rows), tuple(lookups), num_dense
        self.features = tuple(f"C{feature + 1}" for feature in range(len(lookups)))
        size = size or (16_384 if split == "train" else 4_096)

        weights = np.random.default_rng((seed, 0)).normal(0, 1, num_dense)
        weights *= 0.7 / np.linalg.norm(weights)
        rng = np.random.default_rng((seed, 1 if split == "train" else 2))
        self._dense = rng.standard_normal((size, num_dense), np.float32)
        logits = -1.0 + self._dense @ weights
        ids, present, vectors = [], [], []
        for feature, (rows, most) in enumerate(zip(table_rows, lookups, strict=True)):
            column = np.floor((rows + 1.0) ** rng.random((size, most)) ** 2).astype(np.int64) - 1
            column = np.minimum(column, rows - 1)  # rounding
            there = np.ones((size, most))
            if most > 1:
                there[:] = np.arange(most) < rng.integers(0, most + 1, (size, 1))
            logits += 1.2 / np.sqrt(len(lookups)) * (_hidden(seed, feature, 0, column) * there).sum(1)
            vectors.append([(_hidden(seed, feature, part, column) * there).sum(1) for part in (1, 2)])
            ids.append(np.where(there, column, 0))
            present.append(there)
        pairs = list(zip(vectors[:4:2], vectors[1:4:2], strict=False))
        for one, other in pairs:
            logits += 0.9 / np.sqrt(2 * len(pairs)) * (one[0] * other[0] + one[1] * other[1])
        self._ids = np.concatenate(ids, axis=1).astype(np.int32)
        self._present = np.concatenate(present, axis=1).astype(np.float32)
        self.probability = 1 / (1 + np.exp(-logits))  # of a click, [size]: what a perfect model predicts
        self._label = (rng.random(size) < self.probability).astype(np.float32)

    def __reduce__(self):
        return SyntheticClicks, self._arguments  # the worker makes the same numbers again

    def __len__(self) -> int:
        return len(self._label)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {"dense", "ids", "label"}, and "present" if a feature has several lookups, for these examples."""
        batch = {"dense": self._dense[indices], "ids": self._ids[indices], "label": self._label[indices]}
        if max(self.lookups) > 1:
            batch["present"] = self._present[indices]
        return batch

    def perfect_auc(self) -> float:
        """Returns the AUC of the true probabilities on this split's labels: no model does better, but for luck."""
        from sklearn.metrics import roc_auc_score  # a second to import

        return float(roc_auc_score(self._label, self.probability))


def _hidden(seed: int, feature: int, part: int, ids: np.ndarray) -> np.ndarray:
    """Returns uniform numbers of mean 0 and variance 1, by SplitMix64's finaliser of (seed, feature, part, id)."""
    key = np.random.SeedSequence((seed, feature, part)).generate_state(1, np.uint64)[0]
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)) / 2**53 - 0.5) * np.sqrt(12)


def open_clicks(data: str, split: Split, rows: int | Sequence[int] | None = None) -> "ClickLog | movielens.MovieLens":
    """Opens the click log in a folder or at a URL: a prepared one (or Criteo's text with the default output `prepared`
    in it), arrays in torchrec's layout (`rows`: of its tables, see ClickLog), or MovieLens. Raises InputError."""
    folder = Path(local_copy(data, *FILES)).expanduser()
    command = f"make data DATASET=criteo DATA={data}"
    if folder.is_file():
        raise InputError(f"{data} is a file; expected a folder. If it is Criteo's text, prepare it first: {command}")
    if not folder.is_dir():
        raise InputError(f"there is no folder {data}; expected one made by make data, torchrec's arrays, or MovieLens")
    for prepared in (folder, folder / "prepared"):
        if (prepared / "prepared.json").exists():
            return ClickLog(prepared, split, rows)
        if (prepared / "parts").exists():
            raise InputError(f"{prepared} is not prepared to its end; give the same `make data` command again")
    if any(folder.glob("day_*_labels.npy")):
        return ClickLog(folder, split, rows)
    if any((folder / name).exists() for name in movielens.RATING_FILES):
        return movielens.MovieLens(folder, split)
    if text_files(folder, ("train.txt", *(f"day_{day}" for day in range(24)))):
        raise InputError(f"{data} holds Criteo's text files; turn them into arrays first: {command}")
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise InputError(
        f"{data} has none of prepared.json (made by make data), day_0_labels.npy (torchrec's arrays), train.txt or "
        f"day_0 (Criteo's text), {' or '.join(movielens.RATING_FILES)} (MovieLens); found {found}"
    )


def text_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files of these names that are there, plain rather than .gz."""
    candidates = ((folder / name, folder / f"{name}.gz") for name in names)
    return [next(path for path in pair if path.is_file()) for pair in candidates if any(map(Path.is_file, pair))]


def click_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns AUC (exact), log loss in nats, and normalised entropy: log loss divided by that of always predicting the
    mean click rate (He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 2.1)."""
    from sklearn.metrics import roc_auc_score  # a second to import

    rate = labels.mean()
    if not 0 < rate < 1:
        raise InputError(f"all {len(labels)} labels of the evaluation split are {labels[0]:.0f}: there is no AUC")
    if not np.isfinite(logits).all():
        raise InputError("a logit is not finite: training diverged; use a smaller --lr or more --warmup-steps")
    logits = logits.astype(np.float64)
    # log(1 + exp(x)) - y x, without overflow.
    loss = float((np.logaddexp(0, logits) - labels * logits).mean())
    entropy = -float(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return {"auc": float(roc_auc_score(labels, logits)), "loss": loss, "ne": loss / entropy}
