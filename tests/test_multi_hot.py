"""data/multi_hot.py and --form mlperf_v2 against MLPerf's reference.

multi_hot_reference.json has what the reference's own script wrote for small days; its "source" says
which, and how it was run. torchrec, which the reference prepares Criteo's text with, runs here.
"""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
from criteo_text import everything, random_rows, write

from data import criteo as cr
from data.multi_hot import MLPERF_LOOKUPS, MLPERF_ROWS, MultiHot, mlperf_rows
from data.prepare import criteo as pre
from errors import InputError

REFERENCE = json.loads(Path(__file__).with_name("multi_hot_reference.json").read_text())
ROWS = REFERENCE["num_embeddings_per_feature"]
DAYS = [int(day) for day in REFERENCE["sha256_of_day_and_feature"]]
SMALL = 40  # rows of a table, at most, where only the form matters


def one_hot_of(day: int) -> np.ndarray:
    """Returns the one-hot ids of a day, as the reference was given them."""
    rows = 5 + day % 4
    return np.random.default_rng(day).integers(0, 60_000_000, (rows, 26)).astype(np.int32)


def save_day(folder: Path, day: int, sparse: np.ndarray) -> None:
    rows = len(sparse)
    np.save(folder / f"day_{day}_dense.npy", np.ones((rows, 13), np.float32))
    np.save(folder / f"day_{day}_sparse.npy", sparse)
    np.save(folder / f"day_{day}_labels.npy", np.arange(rows).reshape(-1, 1) % 2)


@pytest.fixture
def days(tmp_path) -> Path:
    """A folder with the one-hot arrays of the reference's days 0, 1 and 23."""
    for day in DAYS:
        save_day(tmp_path, day, one_hot_of(day))
    return tmp_path


def hashes_of(bags: np.ndarray) -> list[str]:
    """Returns the SHA-256 of each feature's bags, as the reference's file has them."""
    ends = np.cumsum(MLPERF_LOOKUPS)
    features = np.split(bags, ends[:-1], axis=1)
    return [hashlib.sha256(feature.tobytes()).hexdigest() for feature in features]


# ---- MLPerf's ids ------------------------------------------------------------------------------
@pytest.mark.parametrize("day", DAYS)
def test_bags_are_the_references_byte_for_byte(tmp_path, day):
    ids = one_hot_of(day) % ROWS

    bags = MultiHot(tmp_path, ROWS).bags(ids)

    assert bags.dtype == np.int32
    assert hashes_of(bags) == REFERENCE["sha256_of_day_and_feature"][str(day)]
    if day == 0:
        assert bags[:, :3].tolist() == REFERENCE["C1_of_day_0"]


def test_a_click_log_gives_the_references_ids_in_any_order(days):
    log = cr.open_clicks(str(days), "train", rows=ROWS, multi_hot=True)
    assert log.table_rows == tuple(ROWS)
    assert log.lookups == MLPERF_LOOKUPS

    whole = everything(log)["ids"]
    first_day = len(one_hot_of(0))
    assert hashes_of(whole[:first_day]) == REFERENCE["sha256_of_day_and_feature"]["0"]
    assert hashes_of(whole[first_day:]) == REFERENCE["sha256_of_day_and_feature"]["1"]

    in_another_process = pickle.loads(pickle.dumps(log))
    shuffled = np.random.default_rng(0).permutation(len(log))
    for part in (shuffled[:4], shuffled[4:8], shuffled[8:]):  # the last batch has fewer
        assert (in_another_process.batch(part)["ids"] == whole[part]).all()
    assert len(shuffled) % 4


def test_the_first_half_of_the_last_day_is_evaluated(days):
    log = cr.ClickLog(days, "eval", ROWS, multi_hot=True)

    rows = len(one_hot_of(23))
    assert rows == 8
    assert len(log) == 4
    assert log.source == "the first half of day 23"
    assert log.left_out == ["the second half of day 23"]
    bags = MultiHot(days, ROWS).bags(one_hot_of(23) % ROWS)
    assert (everything(log)["ids"] == bags[:4]).all()
    with pytest.raises(IndexError):
        log.batch(np.array([4]))


def test_arrays_that_are_multi_hot_already_give_the_same(days, tmp_path):
    made = everything(cr.ClickLog(days, "eval", ROWS, multi_hot=True))
    for day in DAYS:
        bags = MultiHot(days, ROWS).bags(one_hot_of(day) % ROWS)
        features = np.split(bags, np.cumsum(MLPERF_LOOKUPS)[:-1], axis=1)
        members = {str(feature): bag for feature, bag in enumerate(features)}
        np.savez(days / f"day_{day}_sparse_multi_hot.npz", **members)

    read = everything(cr.ClickLog(days, "eval", ROWS, multi_hot=True))

    np.testing.assert_equal(read, made)


def test_tables_have_mlperfs_sizes():
    assert mlperf_rows() == MLPERF_ROWS
    assert mlperf_rows(100)[:4] == (100, 100, 100, 100)
    assert mlperf_rows(100)[5] == 3
    assert sum(MLPERF_LOOKUPS) == 214
    sizes = zip(MLPERF_ROWS, MLPERF_LOOKUPS, strict=True)
    drawn = [rows * (lookups - 1) for rows, lookups in sizes]
    assert round(4 * sum(drawn) / 1e9, 1) == 23.1  # as the module's docstring says


def test_tables_are_written_once_and_mapped(tmp_path, capsys):
    first = MultiHot(tmp_path, [SMALL] * 26)
    assert "writing MLPerf's multi-hot tables" in capsys.readouterr().out

    again = MultiHot(tmp_path, [SMALL] * 26)
    again.bags(np.zeros((2, 26), np.int32))

    assert again.folder == first.folder
    assert capsys.readouterr().out == ""
    assert isinstance(again._table(0).base, np.memmap)
    assert MultiHot(tmp_path, [SMALL + 1] * 26).folder != first.folder


def test_tables_of_a_killed_process_are_written_anew(tmp_path):
    ids = np.ones((1, 26), np.int32)
    made = MultiHot(tmp_path, [SMALL] * 26)
    expected = made.bags(ids)
    torn = made.folder.with_suffix(".partial")
    made.folder.rename(torn)
    (torn / "C1.npy").write_bytes(b"torn")

    again = MultiHot(tmp_path, [SMALL] * 26)

    assert (again.bags(ids) == expected).all()
    assert not torn.exists()


def test_a_process_that_waits_for_the_tables_says_so(tmp_path, monkeypatch, capsys):
    made = MultiHot(tmp_path, [SMALL] * 26)
    elsewhere = made.folder.rename(tmp_path / "elsewhere")
    holder = open(made.folder.with_suffix(".lock"), "w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    flock = fcntl.flock

    def finish_and_lock(lock, how: int) -> None:
        if not how & fcntl.LOCK_NB:  # it would wait: the other process ends
            elsewhere.rename(made.folder)
            holder.close()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", finish_and_lock)
    capsys.readouterr()

    MultiHot(tmp_path, [SMALL] * 26)

    assert capsys.readouterr().out == f"waiting for the process that writes {made.folder}\n"


# ---- the text's ids ----------------------------------------------------------------------------
def write_days(folder: Path) -> None:
    """Writes the text of three days; the least integer of each is -1.

    By it torchrec 1.4 adds 3, as torchrec 0.3.2, which MLPerf's reference requires, always does.
    """
    for day in range(3):
        lines = [re.sub(rb"\t-\d", b"\t-1", line) for line in random_rows(40, day, values=200)]
        label, _, *others = lines[0].split(b"\t")
        lines[0] = b"\t".join([label, b"-1", *others])
        write(folder / f"day_{day}", lines)


def test_prepared_text_has_torchrecs_values_byte_for_byte(tmp_path):
    """The steps 1 and 2 of MLPerf's process_Criteo_1TB_Click_Logs_dataset.sh, by torchrec."""
    from torchrec.datasets.criteo import BinaryCriteoUtils

    write_days(tmp_path / "text")
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    for day in range(3):
        paths = [str(arrays / f"day_{day}_{part}.npy") for part in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "text" / f"day_{day}"), *paths)
    in_files = [str(arrays / f"day_{day}_sparse.npy") for day in range(3)]
    BinaryCriteoUtils.sparse_to_contiguous(
        in_files, str(arrays), frequency_threshold=0, output_file_suffix=".npy"
    )
    assert np.load(arrays / "day_2_sparse.npy").max() > SMALL  # the remainder counts

    out = tmp_path / "prepared"
    report = pre.prepare(tmp_path / "text", out, form="mlperf_v2", max_rows=SMALL)

    assert report["table_rows"] == list(mlperf_rows(SMALL))
    for split in ("train", "eval"):
        ours = everything(cr.open_clicks(str(out), split, multi_hot=True))
        theirs = everything(cr.open_clicks(str(arrays), split, rows=SMALL, multi_hot=True))
        assert len(ours["ids"]) == {"train": 80, "eval": 20}[split]
        assert ours["ids"].shape[1] == 214
        for key, values in theirs.items():
            assert ours[key].tobytes() == values.tobytes(), key


@pytest.mark.parametrize("chunk_bytes", [2000, 1 << 20])
def test_numbers_do_not_depend_on_chunks(tmp_path, monkeypatch, chunk_bytes):
    write(tmp_path / "train.txt", random_rows(60))
    monkeypatch.setattr(pre, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(pre, "MERGED_AT_LEAST", 4)

    pre.prepare(tmp_path, form="mlperf_v2", max_rows=SMALL)

    seen = {}
    expected = []
    for line in random_rows(60):
        value = int(line.split(b"\t")[14] or b"0", 16)
        expected.append(seen.setdefault(value, 2 + len(seen)) % SMALL)
    ids = [np.load(tmp_path / "prepared" / f"{split}_sparse.npy") for split in ("train", "eval")]
    assert np.concatenate(ids)[:, 0].tolist() == expected


# ---- what cannot be used -----------------------------------------------------------------------
def refused(pattern: str, folder: Path, **arguments) -> None:
    with pytest.raises(InputError, match=pattern):
        everything(cr.open_clicks(str(folder), "train", multi_hot=True, **arguments))


def test_other_data_are_refused_with_the_command(days, tmp_path):
    for day in DAYS:
        save_day(days, day, np.full((4, 26), -5, np.int32))
    refused("the id -5 for C1, a hash; .*--form mlperf_v2", days, rows=SMALL)
    for day in DAYS:
        save_day(days, day, np.full((4, 3), 5, np.int32))
    refused("has 3 categorical features; MLPerf's .*--no-multi-hot", days)

    text = write(tmp_path / "own" / "train.txt", random_rows(20))
    refused("holds Criteo's text files; .*--form mlperf_v2", text.parent)
    pre.prepare(text)
    refused("has other ids than MLPerf's .*--form mlperf_v2", text.parent)

    with pytest.raises(InputError, match="drop --hash-rows and --threshold"):
        pre.prepare(text, tmp_path / "new", form="mlperf_v2", threshold=4)


def test_a_folder_without_room_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="multi-hot tables lie beside the data, 0.0 GB"):
        MultiHot(tmp_path / "file", [SMALL] * 26)


def test_a_full_disk_gets_its_room_back_before_any_draw(tmp_path, monkeypatch):
    def allocate(_descriptor: int, _start: int, size: int) -> None:
        if size == 4 * SMALL * 99:  # C21's, of the last ones
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(np.random, "RandomState", lambda _seed: pytest.fail("it has drawn"))

    with pytest.raises(InputError, match="multi_hot_.* No space left .* tables lie .*, 0.0 GB"):
        MultiHot(tmp_path, [SMALL] * 26)

    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_torn_tables_in_a_bucket_are_not_copied(days, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    torn = days / "multi_hot_0.partial"
    torn.mkdir()
    (torn / "C1.npy").write_bytes(b"torn")
    store = fsspec.filesystem("memory")
    store.put(f"{days}/", "/torn/", recursive=True)

    log = cr.open_clicks("memory://torn", "train", rows=SMALL, multi_hot=True)

    assert not (log.folder / torn.name).exists()
