"""MLPerf's multi-hot ids of DLRM-DCNv2, made from one-hot ids as batches are read.

In mlcommons/training, recommendation_v2/torchrec_dlrm (commit aa344c7f), multi_hot.py and
scripts/materialize_synthetic_multihot_dataset.py make them once, as files of 3.8 TB. Here a batch's
ids are made when it is read. They are the same, byte for byte: tests/test_multi_hot.py compares
them with what that script wrote, --multi_hot_distribution_type uniform.

The id i of a feature with L lookups becomes the bag i, r[i, 0], …, r[i, L - 2]. The table r of
random rows is drawn once for each feature, one feature after the other, by NumPy's MT19937 with the
seed 0. It rejects numbers that are too large, so no place of its sequence can be computed without
those before it: the tables lie in files, in the folder of the data. They have 23.1 GB for MLPerf's
rows. All processes of a host map the same pages, where each of the reference's has a copy of its
own in memory; a host whose page cache holds them all reads each page once.
"""

import fcntl
import mmap
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from data.prepare.files import create_array, write_rows
from errors import InputError

# Of the README of MLPerf's reference: --num_embeddings_per_feature and --multi_hot_sizes.
# fmt: off
MLPERF_ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63,
               40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976,
               14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
MLPERF_LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1,
                  6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on

SEED = 0  # the reference's
DRAWN = 4 << 20  # random numbers that are drawn, and written, at once


def mlperf_rows(most: int | None = None) -> tuple[int, ...]:
    """Returns MLPerf's rows of each table, at most `most` of one; None: no limit."""
    if most is None:
        return MLPERF_ROWS
    return tuple(min(rows, most) for rows in MLPERF_ROWS)


class MultiHot:
    """Makes bags of ids from single ones.

    Writes its tables where they are not there yet; other processes wait for the first one.

    Args:
        folder: in which the folder of the tables is, or will be.
        rows: of the embedding table of each feature.
        lookups: ids that each feature's bag has.

    Raises:
        InputError: the tables are not there, and cannot be written.
    """

    def __init__(self, folder: Path, rows: Sequence[int], lookups: Sequence[int] = MLPERF_LOOKUPS):
        self.rows = tuple(rows)
        self.lookups = tuple(lookups)
        # Each table depends on the sizes of those before it.
        sizes = repr((self.rows, self.lookups)).encode()
        self.folder = folder / f"multi_hot_{zlib.crc32(sizes):08x}"
        self._tables: dict[int, np.ndarray] = {}  # that this process has mapped
        if not self.folder.is_dir():
            self._write()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}  # maps stay with their process

    def bags(self, ids: np.ndarray) -> np.ndarray:
        """Returns the bags of ids, int32 [n, sum(lookups)], the features side by side.

        Args:
            ids: integers [n, features], rows of the tables.
        """
        bags = np.empty((len(ids), sum(self.lookups)), np.int32)
        first = 0
        for feature, lookups in enumerate(self.lookups):
            column = ids[:, feature]
            end = first + lookups
            bags[:, first] = column
            if lookups > 1:
                bags[:, first + 1 : end] = self._table(feature)[column]
            first = end
        return bags

    def _table(self, feature: int) -> np.ndarray:
        """Returns the memory-mapped table of a feature, int32 [rows, lookups - 1]."""
        if feature not in self._tables:
            path = _path(self.folder, feature)
            try:
                mapped = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise InputError(
                    f"{path} cannot be read: {error}; delete its folder, it is made again"
                ) from error
            # Bags are rows at random: reading 128 KB ahead of each would cost 13 times the time.
            mapped.base.madvise(mmap.MADV_RANDOM)
            self._tables[feature] = mapped.view(np.ndarray)
        return self._tables[feature]

    def _write(self) -> None:
        """Writes all tables, unless another process has done so meanwhile."""
        lock_path = self.folder.with_suffix(".lock")
        try:
            with open(lock_path, "w") as lock:
                self._take(lock)
                if self.folder.is_dir():
                    return
                partial = self.folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                partial.mkdir()
                try:
                    self._write_tables(partial)
                except BaseException:  # a full disk gets its room back
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                os.rename(partial, self.folder)
                lock_path.unlink()  # a process that waits for it finds the folder
        except (OSError, InputError) as error:
            cause = error.__cause__ or error  # of a full disk; the InputError names one table only
            why = getattr(cause, "strerror", None) or cause
            raise InputError(
                f"{self.folder} cannot be written: {why}; MLPerf's multi-hot "
                f"tables lie beside the data, {self._bytes() / 1e9:.1f} GB: "
                "make room or access there"
            ) from error

    def _take(self, lock: TextIO) -> None:
        """Takes the lock, and says so where another process has it: that may take minutes."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the process that writes {self.folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)

    def _write_tables(self, folder: Path) -> None:
        """Writes the tables into a folder; all have their room on the disk before one is drawn."""
        print(
            f"writing MLPerf's multi-hot tables, {self._bytes() / 1e9:.1f} GB, to {self.folder}",
            flush=True,
        )
        for feature, (rows, lookups) in enumerate(zip(self.rows, self.lookups, strict=True)):
            if lookups > 1:
                create_array(_path(folder, feature), np.int32, (rows, lookups - 1))

        # The legacy generator, whose sequence NumPy never changes. The reference draws int64; the
        # numbers are the same, 32 bits are drawn for both.
        random = np.random.RandomState(SEED)
        for feature, (rows, lookups) in enumerate(zip(self.rows, self.lookups, strict=True)):
            columns = lookups - 1
            if not columns:
                continue
            path = _path(folder, feature)
            rows_at_once = max(DRAWN // columns, 1)
            for first in range(0, rows, rows_at_once):
                count = min(rows_at_once, rows - first)
                drawn = random.randint(0, rows, size=(count, columns), dtype=np.int32)
                write_rows(path, first, drawn)

    def _bytes(self) -> int:
        """Returns the size of all tables."""
        sizes = zip(self.rows, self.lookups, strict=True)
        return sum(4 * rows * (lookups - 1) for rows, lookups in sizes)


def _path(folder: Path, feature: int) -> Path:
    """Returns the file of a feature's table; Criteo calls its features C1 to C26."""
    return folder / f"C{feature + 1}.npy"
