"""Click logs to train on: Criteo's and your own, prepared; torchrec's arrays; a synthetic one.

A click log has `table_rows`, `lookups`, `features` and `num_dense`, and `columns`: the folder with
the maps of own clicks (see data/clicks.py), or None. In place of `example` it has
`batch(indices)`, which returns

    "dense"    float32 [n, num_dense]
    "ids"      int32 [n, S] with S = sum(lookups), the columns in the order of the features
    "label"    float32 [n]
    "present"  float32 [n, S], 0 at padded places; only where bags are not always full

Criteo's text files are turned into such arrays before training, by data/prepare/criteo.py (make
data DATASET=criteo), and tables of your own by data/prepare/clicks.py (DATASET=clicks). The best
possible score of the synthetic click log is known.
"""

import dataclasses
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from data import movielens, splits
from data.multi_hot import MLPERF_ROWS, MultiHot, mlperf_rows
from data.prepare.files import read_json
from data.remote import FINISHED, local_copy
from errors import InputError

NUM_DENSE = 13

MLPERF_MAX_ROWS = 40_000_000
# Prepares Criteo's text for MLPerf's multi-hot ids.
MLPERF_COMMAND = 'make data DATASET=criteo DATA=… OUT=… ARGS="--form mlperf_v2"'

# What is copied of a URL. Of vocabularies only those in columns/, which an export has.
FILES = (
    "*prepared.json",
    "*complete",
    "*.npy",
    "*.npz",
    "!*vocabulary_*",
    "!*.partial/*",  # tables of data/multi_hot.py whose writing was killed
    "*columns/*",
    *FINISHED,
    *movielens.FILES,
)

TABLE = re.compile(r"\.(csv|tsv|parquet|pq)(\.gz)?$", re.IGNORECASE)  # how names of tables end

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True)
class Files:
    """The names of the files with the rows of a day, or of a prepared split."""

    dense: str
    sparse: str
    labels: str
    present: str = ""  # of prepared bags


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The memory-mapped rows of a day, or of a prepared split."""

    dense: np.ndarray  # [n, num_dense]
    sparse: list[np.ndarray]  # one [n, features]; or, with multi-hot, [n, lookups] of each feature
    labels: np.ndarray  # [n]
    present: np.ndarray | None = None  # [n, lookups]; None: all ids are there


class ClickLog:
    """A click log in memory-mapped arrays: a prepared folder, or one in torchrec's layout.

    torchrec's layout (torchrec.datasets.criteo.BinaryCriteoUtils) is day_K_dense.npy,
    day_K_sparse.npy [N, 26] and day_K_labels.npy [N, 1] for each day K. The ids are hashes of 32
    bits, taken modulo the table's rows, or small already. Instead of the sparse arrays there may be
    MLPerf's day_K_sparse_multi_hot.npz, whose members "0", "1", … [N, lookups] hold rows of tables,
    which must be in range. The last day is for evaluation, all of it (torchrec validates on its
    first half and tests on its second).

    With `multi_hot`, one-hot ids become MLPerf's multi-hot ones (data/multi_hot.py), and the first
    half of the last day is for evaluation, on which MLPerf validates. The one-hot ids must be those
    of MLPerf's reference: torchrec's arrays after its contiguous_preproc_criteo, or a prepared
    folder of --form mlperf_v2.

    Args:
        rows: of torchrec's tables, one for all or one per feature; 40,000,000 by default, MLPerf's
            with multi-hot. With `multi_hot`: the most of one of MLPerf's tables.
        multi_hot: see above; arrays that are multi-hot already stay as they are.
    """

    table_rows: tuple[int, ...]
    lookups: tuple[int, ...]
    features: tuple[str, ...]
    num_dense: int
    columns_folder: Path | None  # folder with the maps of own clicks, see data/clicks.py
    source: str  # and left_out: see data/splits.py
    left_out: Sequence[str]

    def __init__(
        self,
        folder: str | Path,
        split: Split,
        rows: int | Sequence[int] | None = None,
        multi_hot: bool = False,
    ):
        self.folder = Path(folder).expanduser()
        self.split = split
        self._files: list[Files] = []  # of each day; a prepared split is one day
        self._arrays: dict[int, Arrays] = {}  # of the days that this process has opened
        self._ends = np.empty(0, np.int64)  # the number of the row after each day's last
        self._modulo: np.ndarray | None = None  # uint32 [features]; None: ids are rows of tables
        self._multi_hot = False  # the arrays are
        self._bags: MultiHot | None = None  # makes one-hot arrays multi-hot
        self._prepared_lookups: tuple[int, ...] | None = None  # None: one per column
        self.columns_folder = None
        if (self.folder / "prepared.json").exists():
            self._open_prepared(rows, multi_hot)
        else:
            self._open_torchrec(rows, multi_hot)
        if multi_hot:
            self._open_multi_hot()

    def _open_multi_hot(self) -> None:
        """Makes one-hot arrays multi-hot, and leaves MLPerf's half of the last day to evaluate."""
        if not self._multi_hot:
            self._bags = MultiHot(self.folder, self.table_rows)
            self.lookups = self._bags.lookups
        if self.split == "eval":
            # As torchrec halves a day: an odd row is of the first half.
            half = -(-len(self) // 2)
            self._ends = np.array([half])
            self.older_source = self.source  # all of the day, before there was this half
            self.left_out = [*self.left_out, f"the second half of {self.source}"]
            self.source = f"the first half of {self.source}"

    def _open_prepared(self, rows: int | Sequence[int] | None, multi_hot: bool) -> None:
        if rows is not None:
            raise InputError(
                f"{self.folder} has tables of its own; their rows are chosen when it is prepared"
            )
        if not (self.folder / "COMPLETE").exists():
            raise InputError(
                f"{self.folder} is not prepared to its end; give the same `make data` command again"
            )

        report = read_json(self.folder / "prepared.json")
        if multi_hot and report.get("form") != "mlperf_v2":
            raise InputError(
                f"{self.folder} has other ids than MLPerf's multi-hot ones are made of; prepare "
                f"the text to another folder: {MLPERF_COMMAND}; or give --no-multi-hot"
            )
        splits.set_source(self, report, evaluation=self.split == "eval")
        self.table_rows = tuple(report["table_rows"])
        files = Files(
            dense=f"{self.split}_dense.npy",
            sparse=f"{self.split}_sparse.npy",
            labels=f"{self.split}_labels.npy",
            present=f"{self.split}_present.npy" if report.get("bags") else "",
        )
        self._files = [files]
        if "features" not in report:  # Criteo's columns have no names
            self._read_shapes()
            return
        self._prepared_lookups = tuple(report["lookups"])
        self._read_shapes()
        self.features = tuple(report["features"])
        self.columns_folder = self.folder / "columns"
        self._check_columns()

    def _check_columns(self) -> None:
        """Raises InputError where the maps of own clicks, which an export has, are not there."""
        width = self._open(0).sparse[0].shape[1]
        if width != sum(self.lookups) or len(self.features) != len(self.lookups):
            raise InputError(
                f"{self.folder} has {width} columns of ids, and its prepared.json tells of others; "
                "delete the folder and prepare it again"
            )
        vocabularies = list(self.columns_folder.glob("vocabulary_*.parquet"))
        is_described = (self.columns_folder / "columns.json").exists()
        if not is_described or len(vocabularies) != len(self.features):
            raise InputError(
                f"{self.columns_folder} is not whole: expected columns.json and a vocabulary of "
                f"each of {len(self.features)} features; copy the whole folder, or prepare it again"
            )

    def _open_torchrec(self, rows: int | Sequence[int] | None, multi_hot: bool) -> None:
        days = self._days()
        if len(days) < 2:
            raise InputError(
                f"{self.folder} has the labels of {len(days)} days; "
                "expected two days or more (day_0_labels.npy, …), "
                "of which the last is for evaluation"
            )
        sparse = "sparse.npy"
        if all((self.folder / f"day_{day}_sparse_multi_hot.npz").exists() for day in days):
            sparse = "sparse_multi_hot.npz"
            self._multi_hot = True

        days = days[:-1] if self.split == "train" else days[-1:]
        self.source = splits.shown(f"day {day}" for day in days)
        self.left_out = []
        for day in days:
            self._files.append(
                Files(
                    dense=f"day_{day}_dense.npy",
                    sparse=f"day_{day}_{sparse}",
                    labels=f"day_{day}_labels.npy",
                )
            )
        self._read_shapes()
        if multi_hot:
            self._check_features()
            if rows is None or isinstance(rows, int):
                rows = mlperf_rows(rows)
        self._set_table_rows(rows)

    def _check_features(self) -> None:
        """Raises InputError where the arrays have other features than MLPerf's."""
        if len(self.lookups) != len(MLPERF_ROWS):
            raise InputError(
                f"{self.folder} has {len(self.lookups)} categorical features; MLPerf's multi-hot "
                f"ids are made of Criteo's {len(MLPERF_ROWS)}; give --no-multi-hot"
            )

    def _days(self) -> list[int]:
        """Returns the numbers of the days that have labels, rising."""
        days = []
        for path in self.folder.glob("day_*_labels.npy"):
            match = re.fullmatch(r"day_(\d+)_labels\.npy", path.name)
            if match:
                days.append(int(match[1]))
        return sorted(days)

    def _set_table_rows(self, rows: int | Sequence[int] | None) -> None:
        """Sets the rows of torchrec's tables, the given ones or the default."""
        if rows is None:
            rows = MLPERF_ROWS if self._multi_hot else MLPERF_MAX_ROWS
        if isinstance(rows, int):
            rows = (rows,) * len(self.lookups)
        self.table_rows = tuple(rows)

        if len(self.table_rows) != len(self.lookups):
            raise InputError(
                f"{self.folder} has {len(self.lookups)} categorical features, "
                f"but {len(self.table_rows)} table sizes are given; give one each"
            )
        if not all(0 < number < 2**31 for number in self.table_rows):
            raise InputError(
                f"table sizes {self.table_rows} are out of range; expected 1 to 2147483647 rows"
            )
        if not self._multi_hot:
            self._modulo = np.array(self.table_rows, np.uint32)

    def _read_shapes(self) -> None:
        """Sets lookups, num_dense, features and the row numbers at which days end.

        Opens every file once, to check its shape.
        """
        shapes = set()
        rows = []
        for day, files in enumerate(self._files):
            arrays = self._open(day)
            lengths = {len(array) for array in (arrays.dense, *arrays.sparse, arrays.labels)}
            if arrays.present is not None:
                lengths.add(len(arrays.present))
            if len(lengths) > 1 or arrays.dense.ndim != 2:
                raise InputError(
                    f"{self.folder}: {files.dense}, {files.sparse}, {files.labels} "
                    "have different numbers of rows"
                )
            if self._multi_hot:
                lookups = tuple(array.shape[1] for array in arrays.sparse)
            elif self._prepared_lookups is not None:
                lookups = self._prepared_lookups
            else:
                lookups = (1,) * arrays.sparse[0].shape[1]
            shapes.add((arrays.dense.shape[1], lookups))
            rows.append(len(arrays.labels))
        if len(shapes) > 1:
            raise InputError(
                f"{self.folder}: the days have different numbers of columns: {sorted(shapes)}"
            )

        self.num_dense, self.lookups = shapes.pop()
        self.features = tuple(f"C{feature + 1}" for feature in range(len(self.lookups)))
        self._ends = np.cumsum(rows)
        self._arrays = {}

    def _open(self, day: int) -> Arrays:
        """Returns the memory-mapped arrays of a day; raises InputError for other types."""
        if day not in self._arrays:
            files = self._files[day]
            sparse = self._map_sparse(self.folder / files.sparse)
            dense = _map_npy(self.folder / files.dense)
            labels = _map_npy(self.folder / files.labels)
            for name, array in ((files.dense, dense), (files.labels, labels)):
                if array.dtype.kind not in "biuf":
                    raise InputError(
                        f"{self.folder / name} is made of {array.dtype}; "
                        "expected numbers such as float32"
                    )
            present = _map_npy(self.folder / files.present) if files.present else None
            self._arrays[day] = Arrays(dense, sparse, labels.reshape(-1), present)
        return self._arrays[day]

    def _map_sparse(self, path: Path) -> list[np.ndarray]:
        """Returns the categories of a day as Arrays has them; raises InputError for other types."""
        if self._multi_hot:
            members = map_npz(path)
            names = [str(feature) for feature in range(len(members))]
            if sorted(members) != sorted(names):
                found = ", ".join(sorted(members))
                raise InputError(f'{path} has the members {found}; expected "0", "1", …')
            sparse = [members[name] for name in names]
        else:
            sparse = [_map_npy(path)]
        for array in sparse:
            if array.ndim != 2 or array.dtype not in (np.int32, np.int64):
                raise InputError(
                    f"{path} is not made of integers [rows, columns]; expected int32 or int64"
                )
        return sparse

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_arrays": {}}  # maps stay with their process

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns "dense", "ids", "label" and maybe "present", see the module's docstring.

        Neighbouring rows in order are read as one piece. Raises InputError for a row that cannot be
        trained on.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices):
            first = indices.min()
            last = indices.max()
            if not 0 <= first <= last < len(self):
                raise IndexError(f"rows {first} to {last} of a click log of {len(self)} rows")

        days = np.searchsorted(self._ends, indices, side="right")
        if len(indices) and (days == days[0]).all():
            return self._rows(int(days[0]), indices)
        batch = {
            "dense": np.empty((len(indices), self.num_dense), np.float32),
            "ids": np.empty((len(indices), sum(self.lookups)), np.int32),
            "label": np.empty(len(indices), np.float32),
        }
        if self._files[0].present:
            batch["present"] = np.empty(batch["ids"].shape, np.float32)
        for day in np.unique(days):
            of_day = days == day
            for key, values in self._rows(int(day), indices[of_day]).items():
                batch[key][of_day] = values
        return batch

    def _rows(self, day: int, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch of these rows, which are all of one day."""
        arrays = self._open(day)
        first_of_day = self._ends[day - 1] if day else 0
        rows = indices - first_of_day
        selection = rows
        if (np.diff(rows) == 1).all():
            selection = slice(rows[0], rows[-1] + 1)

        ids = np.concatenate([array[selection] for array in arrays.sparse], axis=1)
        if self._modulo is not None:
            if self._bags is not None:
                self._check_contiguous(ids, day)
            # Hashes beyond 2^31 are negative in int32; they mean the unsigned number.
            ids = ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint32)
            ids %= self._modulo
            ids = ids.view(np.int32)
        elif self._multi_hot:
            self._check_ids(ids, day)
        if self._bags is not None:
            ids = self._bags.bags(ids)

        # A float64 that float32 cannot hold becomes infinite, which is refused below.
        with np.errstate(over="ignore"):
            dense = arrays.dense[selection].astype(np.float32)
        label = arrays.labels[selection].astype(np.float32)
        self._check_dense(dense, day, rows)
        self._check_label(label, day, rows)
        batch = {"dense": dense, "ids": ids.astype(np.int32, copy=False), "label": label}
        if arrays.present is not None:
            batch["present"] = arrays.present[selection].astype(np.float32)
        return batch

    def _check_dense(self, dense: np.ndarray, day: int, rows: np.ndarray) -> None:
        """Raises InputError for a number that is not finite; `rows` are those of the day."""
        strange = np.argwhere(~np.isfinite(dense))
        if not len(strange):
            return
        number, column = strange[0]
        row = rows[number]
        found = self._open(day).dense[row, column]
        path = self.folder / self._files[day].dense
        raise InputError(
            f"{path} has {found} in row {row}, column {column} (both from 0); "
            "expected finite numbers of float32: fix or remove that row"
        )

    def _check_label(self, label: np.ndarray, day: int, rows: np.ndarray) -> None:
        """Raises InputError for a label that is neither 0 nor 1; `rows` are those of the day."""
        strange = np.flatnonzero((label != 0) & (label != 1))
        if not len(strange):
            return
        number = strange[0]
        path = self.folder / self._files[day].labels
        raise InputError(
            f"{path} has the label {label[number]:g} in row {rows[number]} (from 0); "
            "expected 0 or 1"
        )

    def _check_contiguous(self, ids: np.ndarray, day: int) -> None:
        """Raises InputError for an id that is a hash: MLPerf's are numbered, at most some 10^8."""
        strange = (ids < 0) | (ids >= 2**31)
        if not strange.any():
            return
        row, column = np.argwhere(strange)[0]
        path = self.folder / self._files[day].sparse
        raise InputError(
            f"{path} has the id {ids[row, column]} for {self.features[column]}, a hash; MLPerf's "
            "multi-hot ids are made of numbered ones: run torchrec's contiguous_preproc_criteo on "
            f"these arrays, or prepare the text: {MLPERF_COMMAND}"
        )

    def _check_ids(self, ids: np.ndarray, day: int) -> None:
        """Raises InputError for an id that is no row of its table."""
        table_rows = np.repeat(self.table_rows, self.lookups)
        if ids.min() >= 0 and not (ids >= table_rows).any():
            return
        row, column = np.argwhere((ids < 0) | (ids >= table_rows))[0]
        feature = int(np.searchsorted(np.cumsum(self.lookups), column, side="right"))
        path = self.folder / self._files[day].sparse
        raise InputError(
            f"{path} has the id {ids[row, column]} for {self.features[feature]}, whose table has "
            f"{self.table_rows[feature]} rows; give the table sizes that these arrays were made for"
        )


def _map_npy(path: Path) -> np.ndarray:
    """Memory-maps an .npy file. Raises InputError where that fails."""
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)
    except FileNotFoundError as error:
        raise InputError(
            f"there is no {path}; expected dense, sparse and labels for every day"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an .npy file: {error}") from error


def map_npz(path: Path) -> dict[str, np.ndarray]:
    """Memory-maps the arrays of an uncompressed .npz file (np.savez) where they lie in it.

    Nothing is copied. Raises InputError if the file is damaged or compressed.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                arrays[name] = _map_member(path, file, member)
    except InputError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as an .npz file: {error}") from error
    return arrays


def _map_member(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> np.ndarray:
    """Memory-maps an array of an .npz file, which is open as `file`."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise InputError(
            f"{path} is compressed; write it with np.savez, so that it can be memory-mapped"
        )

    # The zip archive's header: 26 bytes, the lengths of a name and of an extra field, and these.
    file.seek(member.header_offset + 26)
    name_length, extra_length = np.frombuffer(file.read(4), "<u2")
    file.seek(int(name_length) + int(extra_length), os.SEEK_CUR)

    # The header of NumPy's format.
    read_header = np.lib.format.read_array_header_2_0
    if np.lib.format.read_magic(file) == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read_header(file)
    if 0 in shape:  # which cannot be mapped
        return np.zeros(shape, dtype)
    order = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order).view(np.ndarray)


class SyntheticClicks:
    """A click log whose best possible score is known.

    The logit of a click is the sum of a bias, a linear function of the dense features (standard
    normal), an effect of each id, and for the first and second feature, and the third and fourth,
    the product of hidden vectors of 2 numbers, one vector per id. A bag's effect and vector are the
    sums over its ids. Effects and vectors are hashes of (seed, feature, id): they are shared by
    training and evaluation, and no table is needed, however many rows there are. Small ids are
    frequent, more so than by Zipf's law. A bag of a feature with L > 1 lookups has 0 to L ids.

    With the defaults the perfect AUC of evaluation is 0.82 to 0.86, that of a linear model of the
    dense features about 0.64, and that of a linear model of all features 0.74 to 0.80.

    Args:
        size: examples; 16,384 for training and 4,096 for evaluation by default.
        table_rows, lookups: of each feature.

    Attributes:
        probability: of a click, [size]: what a perfect model predicts.
    """

    columns_folder = None  # it has no maps

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
            raise InputError(
                f"{len(table_rows)} tables and {len(lookups)} lookups; "
                "expected one each, and at least 1"
            )
        self._arguments = (split, size, seed, tuple(table_rows), tuple(lookups), num_dense)
        self.split = split
        self.seed = seed
        self.table_rows = tuple(table_rows)
        self.lookups = tuple(lookups)
        self.num_dense = num_dense
        self.features = tuple(f"C{feature + 1}" for feature in range(len(lookups)))
        is_train = split == "train"
        if not size:
            size = 16_384 if is_train else 4_096

        weights = np.random.default_rng((seed, 0)).normal(0, 1, num_dense)
        weights *= 0.7 / np.linalg.norm(weights)
        rng = np.random.default_rng((seed, 1 if is_train else 2))
        self._dense = rng.standard_normal((size, num_dense), np.float32)
        logits = -1.0 + self._dense @ weights

        ids = []
        present = []
        vectors = []
        for feature, (rows, most) in enumerate(zip(table_rows, lookups, strict=True)):
            column, there = _draw_bags(rng, size, rows, most)
            effect = _bag_sum(seed, feature, 0, column, there)
            logits += 1.2 / np.sqrt(len(lookups)) * effect
            first = _bag_sum(seed, feature, 1, column, there)
            second = _bag_sum(seed, feature, 2, column, there)
            vectors.append((first, second))
            ids.append(np.where(there, column, 0))
            present.append(there)

        pairs = list(zip(vectors[:4:2], vectors[1:4:2], strict=False))
        for one, other in pairs:
            product = one[0] * other[0] + one[1] * other[1]
            logits += 0.9 / np.sqrt(2 * len(pairs)) * product
        self._ids = np.concatenate(ids, axis=1).astype(np.int32)
        self._present = np.concatenate(present, axis=1).astype(np.float32)
        self.probability = 1 / (1 + np.exp(-logits))
        self._label = (rng.random(size) < self.probability).astype(np.float32)

    def __reduce__(self):
        return SyntheticClicks, self._arguments  # the worker makes the same numbers again

    def __len__(self) -> int:
        return len(self._label)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns "dense", "ids" and "label", and "present" if a feature has several lookups."""
        batch = {
            "dense": self._dense[indices],
            "ids": self._ids[indices],
            "label": self._label[indices],
        }
        if max(self.lookups) > 1:
            batch["present"] = self._present[indices]
        return batch

    def perfect_auc(self) -> float:
        """Returns the AUC of the true probabilities on this split's labels.

        No model does better, but for luck.
        """
        from sklearn.metrics import roc_auc_score  # a second to import

        return float(roc_auc_score(self._label, self.probability))


def _draw_bags(
    rng: np.random.Generator, size: int, rows: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the ids of a feature, int64 [size, most], and which of them are there, 0 or 1."""
    ids = np.floor((rows + 1.0) ** rng.random((size, most)) ** 2).astype(np.int64) - 1
    ids = np.minimum(ids, rows - 1)  # rounding
    there = np.ones((size, most))
    if most > 1:
        there[:] = np.arange(most) < rng.integers(0, most + 1, (size, 1))
    return ids, there


def _bag_sum(seed: int, feature: int, part: int, ids: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Returns the sums of the hidden numbers of each bag's ids, [size]."""
    return (_hidden(seed, feature, part, ids) * there).sum(1)


def _hidden(seed: int, feature: int, part: int, ids: np.ndarray) -> np.ndarray:
    """Returns uniform numbers of mean 0 and variance 1, one for each id.

    They are SplitMix64's finaliser of (seed, feature, part, id). Part 0 is an id's effect, 1 and 2
    are its vector.
    """
    key = np.random.SeedSequence((seed, feature, part)).generate_state(1, np.uint64)[0]
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)) / 2**53 - 0.5) * np.sqrt(12)


def open_clicks(
    data: str,
    split: Split,
    rows: int | Sequence[int] | None = None,
    multi_hot: bool = False,
) -> "ClickLog | movielens.MovieLens":
    """Opens the click log in a folder or at a URL.

    That is a prepared one (or Criteo's text with the default output `prepared` in it), arrays in
    torchrec's layout, or MovieLens. Raises InputError.

    Args:
        rows: of the tables of torchrec's layout, see ClickLog.
        multi_hot: makes MLPerf's multi-hot ids of one-hot ones, see ClickLog.
    """
    folder = Path(local_copy(data, *FILES)).expanduser()
    command = f"make data DATASET=criteo DATA={data}"
    if multi_hot:
        command += ' ARGS="--form mlperf_v2"'
    own = f'make data DATASET=clicks DATA={data} ARGS="--label clicked --categorical user,item"'
    if folder.is_file():
        raise InputError(
            f"{data} is a file; expected a folder. "
            f"If it is Criteo's text, prepare it first: {command}; if a table of your own: {own}"
        )
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {data}; "
            "expected one made by make data, torchrec's arrays, or MovieLens"
        )

    for prepared in (folder, folder / "prepared"):
        if (prepared / "prepared.json").exists():
            return ClickLog(prepared, split, rows, multi_hot)
        if (prepared / "parts").exists():
            raise InputError(
                f"{prepared} is not prepared to its end; give the same `make data` command again"
            )
    if any(folder.glob("day_*_labels.npy")):
        return ClickLog(folder, split, rows, multi_hot)
    if movielens.has_ratings(folder):
        if multi_hot:
            raise InputError(
                f"{data} is MovieLens; MLPerf's multi-hot ids are made of Criteo's: "
                "give --no-multi-hot"
            )
        return movielens.MovieLens(folder, split)

    days = [f"day_{day}" for day in range(24)]
    if text_files(folder, ["train.txt", *days]):
        raise InputError(
            f"{data} holds Criteo's text files; turn them into arrays first: {command}"
        )
    if any(TABLE.search(path.name) for path in folder.iterdir()):
        raise InputError(
            f"{data} holds tables; turn them into arrays first, by the names of columns: {own}"
        )
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise InputError(
        f"{data} has none of prepared.json (made by make data), day_0_labels.npy (torchrec's "
        f"arrays), train.txt or day_0 (Criteo's text), {' or '.join(movielens.RATING_FILES)} "
        f"(MovieLens); found {found}"
    )


def is_own_log(data: str) -> bool:
    """Returns whether a folder, or one at a URL, has clicks of the user's own, prepared."""
    folder = Path(local_copy(data, *FILES)).expanduser()
    for prepared in (folder, folder / "prepared"):
        report = prepared / "prepared.json"
        if report.is_file():
            return "features" in read_json(report)
    return False


def text_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files of these names that are there, plain rather than .gz."""
    found = []
    for name in names:
        plain = folder / name
        packed = folder / f"{name}.gz"
        if plain.is_file():
            found.append(plain)
        elif packed.is_file():
            found.append(packed)
    return found


def click_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns "auc" (exact), "loss" (log loss in nats), and "ne", the normalised entropy.

    The latter is the log loss divided by that of always predicting the mean click rate (He et al.
    2014, "Practical lessons from predicting clicks on ads at Facebook", section 2.1).
    """
    from sklearn.metrics import roc_auc_score  # a second to import

    rate = labels.mean()
    if not 0 < rate < 1:
        raise InputError(
            f"all {len(labels)} labels of the evaluation split are {labels[0]:.0f}: there is no AUC"
        )
    if not np.isfinite(logits).all():
        raise InputError(
            "a logit is not finite: training diverged; use a smaller --lr or more --warmup-steps"
        )

    logits = logits.astype(np.float64)
    # log(1 + exp(x)) - y x, without overflow.
    loss = float((np.logaddexp(0, logits) - labels * logits).mean())
    entropy = -float(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    auc = float(roc_auc_score(labels, logits))
    return {"auc": auc, "loss": loss, "ne": loss / entropy}
