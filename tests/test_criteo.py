"""data/criteo.py on small files that the tests make; torchrec's own arrays are the reference."""

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


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder prepared from 80 rows of text; 69 are to train on."""
    prepare(write(tmp_path / "train.txt", random_rows(80)))
    return tmp_path / "prepared"


# ---- prepared text -----------------------------------------------------------------------------
def test_a_log_travels_without_its_memory_maps(prepared):
    log = cr.ClickLog(prepared, "train")

    pickled = pickle.dumps(log)

    assert len(pickled) < 5000, "memory maps travel along"
    np.testing.assert_equal(everything(pickle.loads(pickled)), everything(log))


@pytest.mark.parametrize("rows", [[3, 1, 1, 68], [5, 6, 7], [9], []])
def test_rows_come_in_the_order_asked_for(prepared, rows):
    log = cr.ClickLog(prepared, "train")
    whole = everything(log)
    in_another_process = pickle.loads(pickle.dumps(log))
    expected = {key: values[rows] for key, values in whole.items()}

    for one in (log, in_another_process):
        batch = one.batch(np.array(rows, np.int64))
        np.testing.assert_equal(batch, expected)
        for key, values in batch.items():
            assert values.dtype == whole[key].dtype
            assert values.flags.writeable


# ---- torchrec's arrays -------------------------------------------------------------------------
def torchrec_days(folder: Path, days: int, rows: int = 12) -> list[list[bytes]]:
    """Writes arrays of some days with torchrec; returns the lines of each day."""
    from torchrec.datasets.criteo import BinaryCriteoUtils

    lines_of_days = []
    for day in range(days):
        lines = [line.replace(b"\t-", b"\t") for line in random_rows(rows, day)]
        text = write(folder / "text" / f"day_{day}", lines)
        dense = folder / f"day_{day}_dense.npy"
        sparse = folder / f"day_{day}_sparse.npy"
        labels = folder / f"day_{day}_labels.npy"
        BinaryCriteoUtils.tsv_to_npys(str(text), str(dense), str(sparse), str(labels))
        if day % 2:  # older versions wrote 32 bits
            np.save(sparse, np.load(sparse).astype(np.uint32).view(np.int32))
        lines_of_days.append(lines)
    return lines_of_days


def hashes_of(fields: list[list[str]]) -> np.ndarray:
    """Returns the values of the 26 features, int64 [rows, 26]; 0 where they are missing."""
    rows = []
    for row in fields:
        rows.append([int(value or "0", 16) for value in row[14:]])
    return np.array(rows)


def integers_of(fields: list[list[str]]) -> np.ndarray:
    """Returns the dense values, int64 [rows, 13]; 0 where they are missing."""
    rows = []
    for row in fields:
        rows.append([int(value or 0) for value in row[1:14]])
    return np.array(rows)


def test_arrays_of_torchrec_open_and_agree(tmp_path):
    days = torchrec_days(tmp_path, 3)
    table_rows = range(1000, 1026)

    for split, lines in (("train", days[0] + days[1]), ("eval", days[2])):
        log = cr.open_clicks(str(tmp_path), split, rows=table_rows)
        assert log.table_rows == tuple(table_rows)
        assert log.lookups == (1,) * 26
        assert log.num_dense == 13
        assert cr.open_clicks(str(tmp_path), split).table_rows == (40_000_000,) * 26

        batch = everything(log)
        fields = [line.decode().split("\t") for line in lines]
        assert batch["label"].tolist() == [int(row[0]) for row in fields]
        hashes = hashes_of(fields)
        assert (batch["ids"] == hashes % table_rows).all()
        assert hashes.max() >= 2**31  # in 32 bits it is negative

        across_days = np.random.default_rng(0).permutation(len(log))
        shuffled = log.batch(across_days)
        for key, values in batch.items():
            assert (shuffled[key] == values[across_days]).all()

    dense = integers_of(fields)
    assert np.allclose(batch["dense"], np.log(dense - dense.min() + 2), atol=1e-6)


def save_days(folder: Path, sparse: np.ndarray) -> None:
    """Writes two days of arrays with equal features."""
    rows = len(sparse)
    for day in range(2):
        np.save(folder / f"day_{day}_dense.npy", np.ones((rows, 4), np.float32))
        np.save(folder / f"day_{day}_sparse.npy", sparse)
        np.save(folder / f"day_{day}_labels.npy", np.ones((rows, 1), np.int32))


def save_multi_hot_days(folder: Path, highest: int = 2, save=np.savez) -> list[np.ndarray]:
    """Writes two days of nine rows whose bags have ids up to `highest`; returns the bags."""
    rng = np.random.default_rng(0)
    save_days(folder, np.zeros((9, 26), np.int32))
    bags = []
    for lookups in (3, 2, 1, *[1] * 22, 5):
        bags.append(rng.integers(0, highest + 1, (9, lookups)).astype(np.int32))
    arrays = {str(feature): bag for feature, bag in enumerate(bags)}
    for day in range(2):
        save(folder / f"day_{day}_sparse_multi_hot.npz", **arrays)
    return bags


def test_multi_hot_arrays_are_memory_mapped_inside_their_zip(tmp_path):
    bags = save_multi_hot_days(tmp_path)

    members = cr.map_npz(tmp_path / "day_0_sparse_multi_hot.npz")
    for feature, bag in enumerate(bags):
        assert (members[str(feature)] == bag).all()
    for member in members.values():
        assert isinstance(member.base, np.memmap)

    log = cr.ClickLog(tmp_path, "train")
    assert log.lookups == (3, 2, *[1] * 23, 5)
    assert log.table_rows == cr.MLPERF_ROWS
    batch = everything(log)
    assert (batch["ids"] == np.concatenate(bags, axis=1)).all()
    assert "present" not in batch


# ---- damaged arrays ----------------------------------------------------------------------------
def eval_refused(folder: Path, message: str, **arguments) -> None:
    """Asserts that reading the evaluation split, which is day 1, ends in an InputError."""
    with pytest.raises(InputError, match=message):
        everything(cr.ClickLog(folder, "eval", **arguments))


def test_an_id_beyond_its_table_is_named(tmp_path):
    save_multi_hot_days(tmp_path, highest=50)

    message = r"day_1_sparse_multi_hot.npz has the id \d+ for C6, whose table has 3 rows"
    eval_refused(tmp_path, message)
    assert everything(cr.ClickLog(tmp_path, "eval", rows=51))["ids"].max() == 50


def test_damaged_multi_hot_arrays_are_named(tmp_path):
    save_multi_hot_days(tmp_path, save=np.savez_compressed)
    eval_refused(tmp_path, "day_1_sparse_multi_hot.npz is compressed")

    (tmp_path / "day_1_sparse_multi_hot.npz").write_bytes(b"PK")
    eval_refused(tmp_path, "day_1_sparse_multi_hot.npz cannot be read")


def test_damaged_arrays_are_named(tmp_path):
    save_multi_hot_days(tmp_path)
    (tmp_path / "day_1_sparse_multi_hot.npz").unlink()  # so that day_1_sparse.npy is read
    labels = tmp_path / "day_1_labels.npy"
    sparse = tmp_path / "day_1_sparse.npy"
    message = "26 categorical features, but 3 table sizes"
    eval_refused(tmp_path, message, rows=(1, 2, 3))
    eval_refused(tmp_path, "out of range", rows=0)

    np.save(labels, np.full((9, 1), -1, np.int32))
    eval_refused(tmp_path, "day_1_labels.npy has the label -1")
    np.save(labels, np.ones((8, 1), np.int32))
    eval_refused(tmp_path, "different numbers of rows")

    sparse.write_bytes(sparse.read_bytes()[:-10])
    eval_refused(tmp_path, "day_1_sparse.npy cannot be read")
    sparse.unlink()
    eval_refused(tmp_path, "there is no .*day_1_sparse.npy")
    labels.unlink()
    eval_refused(tmp_path, "labels of 1 days")


@pytest.mark.parametrize("value", [-np.inf, np.nan, 1e300])
def test_a_value_that_is_not_finite_is_named_with_its_row(prepared, value):
    path = prepared / "train_dense.npy"
    dense = np.load(path).astype(np.float64)
    dense[41, 3] = value
    np.save(path, dense)
    log = cr.ClickLog(prepared, "train")

    assert np.isfinite(log.batch(np.arange(41))["dense"]).all()
    position = r"in row 41, column 3 \(both from 0\)"
    message = rf"train_dense.npy has {re.escape(str(value))} {position}; expected finite"
    for rows in (np.arange(40, 50), np.array([3, 41, 5])):
        with pytest.raises(InputError, match=message):
            log.batch(rows)


def test_a_label_that_is_not_finite_is_named_with_its_days_file(tmp_path):
    torchrec_days(tmp_path, 3)
    labels = np.load(tmp_path / "day_1_labels.npy").astype(np.float32)
    labels[7] = np.nan
    np.save(tmp_path / "day_1_labels.npy", labels)

    message = r"day_1_labels.npy has the label nan in row 7 \(from 0\); expected 0 or 1"
    with pytest.raises(InputError, match=message):
        cr.ClickLog(tmp_path, "train").batch(np.arange(10, 24))


@pytest.mark.parametrize("name", ["dense", "labels"])
def test_numbers_of_a_type_that_is_none_are_refused(tmp_path, name):
    arrays = {
        "dense": np.ones((4, 13)),
        "labels": np.array([[0], [1], [0], [1]]),
        "sparse": np.ones((4, 26), int),
    }
    arrays[name] = arrays[name] + 1j
    for day in range(2):
        for kind, array in arrays.items():
            np.save(tmp_path / f"day_{day}_{kind}.npy", array)

    message = f"day_0_{name}.npy is made of complex128; expected numbers such as float32"
    with pytest.raises(InputError, match=message):
        cr.open_clicks(str(tmp_path), "train")


# ---- the synthetic log -------------------------------------------------------------------------
def test_the_synthetic_log_repeats_and_its_splits_differ():
    train = cr.SyntheticClicks("train")
    evaluation = cr.SyntheticClicks("eval")
    assert len(train) == 16_384
    assert len(evaluation) == 4_096
    assert len(pickle.dumps(train)) < 1000

    batch = everything(train)
    np.testing.assert_equal(everything(cr.SyntheticClicks("train")), batch)
    np.testing.assert_equal(everything(pickle.loads(pickle.dumps(train))), batch)

    other_seed = everything(cr.SyntheticClicks("train", seed=1))
    assert (other_seed["ids"] != batch["ids"]).any()
    train_rows = {row.tobytes() for row in batch["dense"]}
    evaluation_rows = {row.tobytes() for row in everything(evaluation)["dense"]}
    assert not train_rows & evaluation_rows


def test_the_synthetic_log_keeps_to_the_interface():
    log = cr.SyntheticClicks("eval", 1000, table_rows=(7, 30), lookups=(1, 4), num_dense=3)

    assert log.table_rows == (7, 30)
    assert log.lookups == (1, 4)
    assert log.num_dense == 3
    batch = log.batch(np.arange(999, -1, -1))
    assert {key: (array.dtype, array.shape) for key, array in batch.items()} == {
        "dense": (np.float32, (1000, 3)),
        "ids": (np.int32, (1000, 5)),
        "label": (np.float32, (1000,)),
        "present": (np.float32, (1000, 5)),
    }

    ids = batch["ids"]
    present = batch["present"]
    assert set(np.unique(batch["label"])) == {0, 1}
    assert set(np.unique(present)) == {0, 1}
    assert set(np.unique(ids[:, 0])) == set(range(7))
    assert ids.min() >= 0
    assert (ids.max(0) < [7, 30, 30, 30, 30]).all()
    assert not ids[present == 0].any()
    assert set(present[:, 1:].sum(1)) == {0, 1, 2, 3, 4}
    counts = np.bincount(ids[:, 0])
    assert counts[0] > 2 * counts[3], "ids are not skewed"


def test_a_synthetic_log_of_single_lookups_has_all_ids_present():
    one_hot = cr.SyntheticClicks("eval", 10, table_rows=(2**31 - 1,), lookups=(1,))

    assert "present" not in everything(one_hot)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_score_of_the_synthetic_log_is_known(seed):
    evaluation = cr.SyntheticClicks("eval", seed=seed)
    train_batch = everything(cr.SyntheticClicks("train", seed=seed))
    eval_batch = everything(evaluation)
    labels = eval_batch["label"]
    probability = evaluation.probability

    assert 0.80 < evaluation.perfect_auc() < 0.86
    dense_alone = LogisticRegression().fit(train_batch["dense"], train_batch["label"])
    predicted = dense_alone.predict_proba(eval_batch["dense"])[:, 1]
    assert 0.6 < roc_auc_score(labels, predicted) < 0.7, "a model must learn its tables"
    assert abs(labels.mean() - probability.mean()) < 0.03

    # The probabilities are those by which the labels were drawn.
    for quarter in np.array_split(np.argsort(probability), 4):
        assert abs(labels[quarter].mean() - probability[quarter].mean()) < 0.06


# ---- which folder it is ------------------------------------------------------------------------
def clicks_refused(message: str, folder: Path, split: str = "train", **arguments) -> None:
    with pytest.raises(InputError, match=message):
        cr.open_clicks(str(folder), split, **arguments)


def test_text_that_is_not_prepared_is_explained(tmp_path):
    raw = tmp_path / "raw"
    write(raw / "train.txt", random_rows(20))

    clicks_refused(f"Criteo's text files.* make data DATASET=criteo DATA={raw}", raw)
    clicks_refused("is a file.*make data DATASET=criteo", raw / "train.txt")


def test_a_prepared_folder_opens_by_itself_and_by_its_text(tmp_path):
    write(tmp_path / "train.txt", random_rows(20))
    prepare(tmp_path)

    for folder in (tmp_path, tmp_path / "prepared"):
        assert len(cr.open_clicks(str(folder), "eval")) == 2
    clicks_refused("tables of its own", tmp_path, "eval", rows=10)


def test_a_folder_that_is_not_whole_is_explained(prepared):
    (prepared / "train_sparse.npy").unlink()
    clicks_refused("there is no .*train_sparse.npy", prepared)

    (prepared / "COMPLETE").unlink()
    clicks_refused("not prepared to its end", prepared)


def test_a_folder_of_something_else_is_explained(tmp_path):
    (tmp_path / "notes.md").touch()

    clicks_refused("there is no folder", tmp_path / "nowhere")
    expected = "none of prepared.json .*day_0_labels.npy .*u.data"
    clicks_refused(f"{expected}.*found notes.md", tmp_path)
