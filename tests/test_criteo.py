"""data/criteo.py on small files that the tests make; torchrec's own arrays are the reference."""

import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from criteo_text import everything, random_rows, write
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from data import criteo as cr
from data.prepare.criteo import prepare
from errors import InputError


def test_rows_come_in_the_order_asked_for_and_in_another_process(tmp_path):
    prepare(write(tmp_path / "train.txt", random_rows(80)))
    log = cr.ClickLog(tmp_path / "prepared", "train")
    whole = everything(log)
    assert len(pickle.dumps(log)) < 5000, "memory maps travel along"
    other = pickle.loads(pickle.dumps(log))
    for one, indices in itertools.product((log, other), ([3, 1, 1, 68], [5, 6, 7], [9], [])):
        batch = one.batch(np.array(indices, np.int64))
        np.testing.assert_equal(batch, {key: values[indices] for key, values in whole.items()})
        assert all(batch[key].dtype == whole[key].dtype and batch[key].flags.writeable for key in whole)


def torchrec_days(folder: Path, days: int, rows: int = 12) -> list[list[bytes]]:
    from torchrec.datasets.criteo import BinaryCriteoUtils

    lines = [[line.replace(b"\t-", b"\t") for line in random_rows(rows, day)] for day in range(days)]
    for day in range(days):
        text = write(folder / "text" / f"day_{day}", lines[day])
        names = [str(folder / f"day_{day}_{kind}.npy") for kind in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(text), *names)
        if day % 2:  # older versions wrote 32 bits
            np.save(names[1], np.load(names[1]).astype(np.uint32).view(np.int32))
    return lines


def test_arrays_of_torchrec_open_and_agree(tmp_path):
    lines, sizes = torchrec_days(tmp_path, 3), range(1000, 1026)
    for split, expected_lines in (("train", lines[0] + lines[1]), ("eval", lines[2])):
        log = cr.open_clicks(str(tmp_path), split, rows=sizes)
        assert (log.table_rows, log.lookups, log.num_dense) == (tuple(sizes), (1,) * 26, 13)
        assert cr.open_clicks(str(tmp_path), split).table_rows == (40_000_000,) * 26
        batch = everything(log)
        fields = [line.decode().split("\t") for line in expected_lines]
        assert batch["label"].tolist() == [int(one[0]) for one in fields]
        hashes = np.array([[int(value or "0", 16) for value in one[14:]] for one in fields])
        assert (batch["ids"] == hashes % sizes).all() and hashes.max() >= 2**31  # in 32 bits it is negative
        shuffled = np.random.default_rng(0).permutation(len(log))  # across days
        again = log.batch(shuffled)
        assert all((again[key] == batch[key][shuffled]).all() for key in batch)
    dense = np.array([[int(value or 0) for value in one[1:14]] for one in fields])
    assert np.allclose(batch["dense"], np.log(dense - dense.min() + 2), atol=1e-6)


def made_days(folder: Path, sparse: np.ndarray) -> None:
    for day in range(2):
        np.save(folder / f"day_{day}_dense.npy", np.ones((len(sparse), 4), np.float32))
        np.save(folder / f"day_{day}_sparse.npy", sparse)
        np.save(folder / f"day_{day}_labels.npy", np.ones((len(sparse), 1), np.int32))


def multi_hot(folder: Path, highest: int = 2, save=np.savez) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made_days(folder, np.zeros((9, 26), np.int32))
    bags = [rng.integers(0, highest + 1, (9, lookups)).astype(np.int32) for lookups in [3, 2, 1, *[1] * 22, 5]]
    for day in range(2):
        save(folder / f"day_{day}_sparse_multi_hot.npz", **{str(t): bag for t, bag in enumerate(bags)})
    return bags


def test_multi_hot_arrays_are_memory_mapped_inside_their_zip(tmp_path):
    bags = multi_hot(tmp_path)
    members = cr.map_npz(tmp_path / "day_0_sparse_multi_hot.npz")
    assert all((members[str(t)] == bag).all() for t, bag in enumerate(bags))
    assert all(isinstance(member.base, np.memmap) for member in members.values())
    log = cr.ClickLog(tmp_path, "train")
    assert log.lookups == (3, 2, *[1] * 23, 5) and log.table_rows == cr.MLPERF_ROWS
    batch = everything(log)
    assert (batch["ids"] == np.concatenate(bags, axis=1)).all() and "present" not in batch


def test_ids_beyond_their_table_and_damaged_arrays_are_named(tmp_path):
    def refused(message: str, **arguments):
        with pytest.raises(InputError, match=message):
            everything(cr.ClickLog(tmp_path, "eval", **arguments))

    multi_hot(tmp_path, 50)
    refused(r"day_1_sparse_multi_hot.npz has the id \d+ for C6, whose table has 3 rows")
    assert everything(cr.ClickLog(tmp_path, "eval", rows=51))["ids"].max() == 50
    multi_hot(tmp_path, save=np.savez_compressed)
    refused("day_1_sparse_multi_hot.npz is compressed")
    (tmp_path / "day_1_sparse_multi_hot.npz").write_bytes(b"PK")
    refused("day_1_sparse_multi_hot.npz cannot be read")
    (tmp_path / "day_1_sparse_multi_hot.npz").unlink()
    refused("26 categorical features, but 3 table sizes", rows=(1, 2, 3))
    refused("out of range", rows=0)
    np.save(tmp_path / "day_1_labels.npy", np.full((9, 1), -1, np.int32))
    refused("day_1_labels.npy has the label -1")
    np.save(tmp_path / "day_1_labels.npy", np.ones((8, 1), np.int32))
    refused("different numbers of rows")
    sparse = (tmp_path / "day_1_sparse.npy").read_bytes()
    (tmp_path / "day_1_sparse.npy").write_bytes(sparse[:-10])
    refused("day_1_sparse.npy cannot be read")
    (tmp_path / "day_1_sparse.npy").unlink()
    refused("there is no .*day_1_sparse.npy")
    (tmp_path / "day_1_labels.npy").unlink()
    refused("labels of 1 days")


@pytest.mark.parametrize("value", [-np.inf, np.nan, 1e300])
def test_what_is_not_finite_is_named_with_its_file_row_and_column(tmp_path, value):
    prepare(write(tmp_path / "train.txt", random_rows(80)))
    path = tmp_path / "prepared" / "train_dense.npy"
    dense = np.load(path).astype(np.float64)
    dense[41, 3] = value
    np.save(path, dense)
    log = cr.ClickLog(tmp_path / "prepared", "train")
    assert np.isfinite(log.batch(np.arange(41))["dense"]).all()
    message = rf"train_dense.npy has {re.escape(str(value))} in row 41, column 3 \(both from 0\); expected finite"
    for rows in (np.arange(40, 50), np.array([3, 41, 5])):
        with pytest.raises(InputError, match=message):
            log.batch(rows)


def test_a_label_that_is_not_finite_is_named_with_its_row_in_its_days_file(tmp_path):
    torchrec_days(tmp_path, 3)
    labels = np.load(tmp_path / "day_1_labels.npy").astype(np.float32)
    labels[7] = np.nan
    np.save(tmp_path / "day_1_labels.npy", labels)
    with pytest.raises(InputError, match=r"day_1_labels.npy has the label nan in row 7 \(from 0\); expected 0 or 1"):
        cr.ClickLog(tmp_path, "train").batch(np.arange(10, 24))


def test_the_synthetic_log_is_the_same_twice_and_its_splits_differ():
    train, evaluation = (cr.SyntheticClicks(split) for split in ("train", "eval"))
    assert (len(train), len(evaluation)) == (16_384, 4_096) and len(pickle.dumps(train)) < 1000
    batch = everything(train)
    for twin in (cr.SyntheticClicks("train"), pickle.loads(pickle.dumps(train))):
        np.testing.assert_equal(everything(twin), batch)
    assert (everything(cr.SyntheticClicks("train", seed=1))["ids"] != batch["ids"]).any()
    assert not {*map(bytes, batch["dense"])} & {*map(bytes, everything(evaluation)["dense"])}


def test_the_synthetic_log_keeps_to_the_interface():
    log = cr.SyntheticClicks("eval", 1000, table_rows=(7, 30), lookups=(1, 4), num_dense=3)
    assert (log.table_rows, log.lookups, log.num_dense) == ((7, 30), (1, 4), 3)
    batch = log.batch(np.arange(999, -1, -1))
    assert {key: (array.dtype, array.shape) for key, array in batch.items()} == {
        "dense": (np.float32, (1000, 3)),
        "ids": (np.int32, (1000, 5)),
        "label": (np.float32, (1000,)),
        "present": (np.float32, (1000, 5)),
    }
    assert set(np.unique(batch["label"])) == set(np.unique(batch["present"])) == {0, 1}
    assert set(np.unique(batch["ids"][:, 0])) == set(range(7))
    assert batch["ids"].min() >= 0 and (batch["ids"].max(0) < [7, 30, 30, 30, 30]).all()
    assert not batch["ids"][batch["present"] == 0].any()
    assert set(batch["present"][:, 1:].sum(1)) == {0, 1, 2, 3, 4}
    counts = np.bincount(batch["ids"][:, 0])
    assert counts[0] > 2 * counts[3], "ids are not skewed"
    one_hot = cr.SyntheticClicks("eval", 10, table_rows=(2**31 - 1,), lookups=(1,))
    assert "present" not in everything(one_hot)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_score_of_the_synthetic_log_is_known(seed):
    evaluation = cr.SyntheticClicks("eval", seed=seed)
    first, second = everything(cr.SyntheticClicks("train", seed=seed)), everything(evaluation)
    labels = second["label"]
    assert 0.80 < evaluation.perfect_auc() < 0.86
    dense_alone = LogisticRegression().fit(first["dense"], first["label"]).predict_proba(second["dense"])[:, 1]
    assert 0.6 < roc_auc_score(labels, dense_alone) < 0.7, "a model must learn its tables"
    assert abs(labels.mean() - evaluation.probability.mean()) < 0.03
    # The probabilities are those by which the labels were drawn.
    order = np.argsort(evaluation.probability)
    for part in np.array_split(order, 4):
        assert abs(labels[part].mean() - evaluation.probability[part].mean()) < 0.06


def test_open_clicks_finds_what_is_there(tmp_path):
    def refused(message: str, folder: Path, split: str = "train", **arguments):
        with pytest.raises(InputError, match=message):
            cr.open_clicks(str(folder), split, **arguments)

    raw = tmp_path / "raw"
    write(raw / "train.txt", random_rows(20))
    refused(f"Criteo's text files.* make data DATASET=criteo DATA={raw}", raw)
    refused("is a file.*make data DATASET=criteo", raw / "train.txt")
    prepare(raw)
    for folder in (raw, raw / "prepared"):
        assert len(cr.open_clicks(str(folder), "eval")) == 2
    refused("tables of its own", raw, "eval", rows=10)
    refused("there is no folder", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").touch()
    refused(r"none of prepared.json .*day_0_labels.npy .*u.data.*found notes.md", tmp_path / "other")
    out = raw / "prepared"
    (out / "train_sparse.npy").unlink()
    refused("there is no .*train_sparse.npy", out)
    (out / "COMPLETE").unlink()
    refused("not prepared to its end", out)


@pytest.mark.parametrize("name", ["dense", "labels"])
def test_what_is_no_number_is_refused(tmp_path, name):
    for day in range(2):
        arrays = {"dense": np.ones((4, 13)), "labels": np.array([[0], [1], [0], [1]]), "sparse": np.ones((4, 26), int)}
        for kind, array in arrays.items():
            np.save(tmp_path / f"day_{day}_{kind}.npy", array + 1j if kind == name else array)
    with pytest.raises(InputError, match=f"day_0_{name}.npy is made of complex128; expected numbers such as float32"):
        cr.open_clicks(str(tmp_path), "train")
