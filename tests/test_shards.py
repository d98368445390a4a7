"""Images in shards: data/prepare/images.py writes them, data/shards.py reads them.

From a folder or from a server.
"""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from loading_helpers import equal, take
from PIL import Image

from bench.bucket import Bucket
from data import remote, shards
from data.imagenet import open_imagenet
from data.prepare import images
from errors import InputError
from train.common import loading
from train.common.batches import training_keys

TRAIN_ROWS = 75
EVAL_ROWS = 9
TRAIN_SHARDS = 8  # and one for evaluation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of 75 images to train on and 9 to evaluate on, of three classes, all different; the
    images are beside them, in `tree`."""
    tree = tmp_path_factory.mktemp("images") / "tree"
    for number in range(TRAIN_ROWS + EVAL_ROWS):
        split = "train" if number < TRAIN_ROWS else "val"
        path = tree / split / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(number)
        Image.fromarray(rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)).save(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "SHARD_BYTES", 2750)
        images.prepare(tree, tree.parent / "shards")
        yield tree.parent / "shards"


@pytest.fixture
def tree(folder) -> Path:
    return folder.parent / "tree"


@pytest.fixture
def bucket(folder, tmp_path, monkeypatch):
    """A server of the shards."""
    monkeypatch.setattr(remote, "PAUSES", (0, 0))
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    with Bucket(content).open() as bucket:
        yield bucket


@pytest.fixture
def train_names(folder) -> list[str]:
    """The names of the training shards."""
    return sorted(path.name for path in folder.glob("train*.parquet"))


def contents(source: object, split: str) -> list[tuple[bytes, int]]:
    """Returns the encoded image and the label of each row."""
    data = open_imagenet(str(source), split, 16)
    return [data._read(index)[:2] for index in range(len(data))]


def prepared_files(folder: Path) -> dict[str, bytes]:
    """Returns the shards, and what is left of unfinished ones, by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.p*")}


# ---- preparation -------------------------------------------------------------------------------
def test_a_stopped_preparation_resumes(folder, tree, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_table = images.pq.ParquetWriter.write_table
    written = 0

    def write_and_stop(*arguments) -> None:
        """Stops in the third shard."""
        nonlocal written
        write_table(*arguments)
        written += 1
        if written == 8:
            raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(images.pq.ParquetWriter, "write_table", write_and_stop)
        images.prepare(tree, out)
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert len(done) == 2
    assert list(out.glob("*.partial"))

    message = "is not prepared to its end; give the same `make data` command again"
    with pytest.raises(InputError, match=message):
        contents(out, "train")
    with pytest.raises(InputError, match="other --seed: 0, now 1"):
        images.prepare(tree, out, seed=1)

    images.prepare(tree, out)
    for path, time in done.items():
        assert path.stat().st_mtime_ns == time
    assert prepared_files(out) == prepared_files(folder)
    assert len(prepared_files(out)) == TRAIN_SHARDS + 1


def test_an_image_that_changed_is_noticed(tree, tmp_path):
    """Of the same name, size and label; and a copy of all with other times is the same."""
    data = Path(shutil.copytree(tree, tmp_path / "tree", copy_function=shutil.copyfile))
    report = images.prepare(data, tmp_path / "out")
    for path in data.rglob("*.png"):
        os.utime(path, (1, 1))
    assert images.prepare(data, tmp_path / "out") == report

    changed = next(data.glob("train/*/*"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")

    message = r"out was prepared from other data: train, \w{8} has other content of the same size"
    with pytest.raises(InputError, match=message):
        images.prepare(data, tmp_path / "out")


def test_a_parquet_file_that_changed_is_noticed(folder, tmp_path):
    """Two images of one class have changed places: names, rows and labels stay."""
    hub = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "hub"))
    hub.save_to_disk(tmp_path / "data")
    images.prepare(tmp_path / "data", tmp_path / "out")
    labels = hub["train"]["label"][:]
    order = list(range(len(labels)))
    other = labels.index(labels[0], 1)
    order[0] = other
    order[other] = 0
    hub["train"] = hub["train"].select(order)

    shutil.rmtree(tmp_path / "data")
    hub.save_to_disk(tmp_path / "data")

    message = r"out was prepared from other data: train, \w{8} ha(s other content|d \d+ bytes, now)"
    with pytest.raises(InputError, match=message):
        images.prepare(tmp_path / "data", tmp_path / "out")


def test_shards_have_the_images_of_any_source(folder, tree, tmp_path):
    hub = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "hub"))
    assert hub["train"].features["label"].names == ["a", "b", "c"]
    assert hub["validation"][0]["image"].size == (9, 8)

    hub.save_to_disk(tmp_path / "saved")
    images.prepare(tmp_path / "saved", tmp_path / "again")

    for source in (folder, tmp_path / "again"):
        train = contents(source, "train")
        assert sorted(train) == sorted(contents(tree, "train"))
        assert train != sorted(contents(tree, "train"))
        assert contents(source, "eval") == contents(tree, "eval")


# ---- order and batches -------------------------------------------------------------------------
@pytest.mark.parametrize(("batch", "lanes"), [(25, 1), (16, 16), (8, 8), (12, 4)])
def test_an_epoch_has_each_image_once(folder, batch, lanes):
    data = open_imagenet(str(folder), "train", 16)

    order = data.order(3, 5, batch)

    full_batches = TRAIN_ROWS // batch
    assert len(order) == full_batches * batch
    assert len(set(order)) == full_batches * batch
    assert set(order) <= set(range(TRAIN_ROWS))
    first_lane = order.reshape(-1, lanes, batch // lanes)[:, 0].ravel()
    shards_of_lane = set(np.searchsorted(data._ends, first_lane, "right"))
    assert len(shards_of_lane) <= 1 + -(-TRAIN_SHARDS // lanes)


@pytest.mark.parametrize("batch", [25, 16, 8, 12])
def test_the_order_is_of_seed_and_epoch(folder, batch):
    data = open_imagenet(str(folder), "train", 16)

    order = data.order(3, 5, batch)

    assert (order == data.order(3, 5, batch)).all()
    assert (order != data.order(3, 6, batch)).any()
    assert (order != data.order(4, 5, batch)).any()


def test_training_takes_the_order_of_the_data_set(folder):
    data = open_imagenet(str(folder), "train", 16)

    keys = training_keys(data, 12, 3, 4, 12)
    second_epoch = np.concatenate([indices for epoch, indices in keys if epoch == 1])

    np.testing.assert_array_equal(second_epoch, data.order(3, 1, 12))


@pytest.fixture
def batches(mesh):
    """A function that returns the batches of 14 steps, or of an evaluation."""

    def of(source, start=0, workers=0, train=True) -> list[dict[str, np.ndarray]]:
        data = open_imagenet(str(source), "train" if train else "eval", 16)
        loader = loading.parallel_loader(
            data, 12, mesh, train=train, seed=3, start=start, stop=14, workers=workers
        )
        return take(loader)

    return of


def test_batches_come_in_the_order_of_the_data_set(folder, batches):
    rows = contents(folder, "train")
    order = open_imagenet(str(folder), "train", 16).order(3, 0, 12)

    first_epoch = batches(folder)[:6]

    labels = np.concatenate([batch["label"] for batch in first_epoch])
    assert labels.tolist() == [rows[index][1] for index in order]


def test_bucket_and_worker_batches_are_those_of_a_folder(folder, bucket, batches, monkeypatch):
    expected = batches(folder)
    fetched_ahead = set()  # in this process
    fetch = shards.Cache.fetch

    def recorded_fetch(cache, shard, *rest):
        fetched_ahead.add(shard["name"])
        return fetch(cache, shard, *rest)

    monkeypatch.setattr(shards.Cache, "fetch", recorded_fetch)

    assert equal(batches(bucket.url, start=8, workers=2), expected[8:])
    assert len(fetched_ahead) == TRAIN_SHARDS
    assert equal(batches(bucket.url), expected)
    assert equal(batches(bucket.url, train=False), batches(folder, train=False))

    # One cache for all: each opening reads the index, and each shard comes once.
    paths = [path for _, path, _ in bucket.requests]
    all_shards = TRAIN_SHARDS + 1
    assert paths.count("shards.json") == 3
    assert len(set(paths)) == 1 + all_shards
    assert len(paths) == 3 + all_shards
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join(5)
            assert not thread.is_alive()


# ---- faults of a network -----------------------------------------------------------------------
def test_an_index_that_a_bucket_does_not_give_is_named(bucket):
    bucket.trouble["shards.json"] = [503, 503, 503, 404]

    with pytest.raises(InputError, match="shards.json: 503"):
        open_imagenet(bucket.url, "train", 16)
    message = "there is no .*shards.json.* make data DATASET=images"
    with pytest.raises(InputError, match=message):
        open_imagenet(bucket.url, "train", 16)


def assert_shard_is_refused(bucket: Bucket, name: str, message: str) -> None:
    """Asserts that reading the fourth training shard ends in one sentence that names it."""
    data = open_imagenet(bucket.url, "train", 16)
    first_row = int(data._ends[2])
    with pytest.raises(InputError, match=f"{bucket.url}/{name}{message}") as error:
        data._read(first_row)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fault", "message", "attempts"),
    [("drop", ": ", 3), (503, ": 503", 3), (404, ";", 1), (403, ": 403", 1)],
)
def test_a_shard_that_cannot_be_fetched_is_named(
    bucket, train_names, tmp_path, fault, message, attempts
):
    name = train_names[3]
    bucket.trouble[name] = [fault] * 3

    assert_shard_is_refused(bucket, name, message)

    assert len(bucket.trouble[name]) == 3 - attempts
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:-9], " has .* bytes;"),
        (lambda content: bytes(len(content)), " has the SHA"),
        (lambda content: b"<html>", " has 6 bytes;"),
    ],
)
def test_a_shard_with_other_content_is_named(bucket, train_names, tmp_path, spoil, message):
    name = train_names[3]
    bucket.files[name] = spoil(bucket.files[name])

    assert_shard_is_refused(bucket, name, message)

    assert not list(tmp_path.rglob("*.partial"))


def test_passing_faults_are_retried_and_threads_share_a_cache(folder, bucket, train_names):
    expected = contents(folder, "train")
    bucket.trouble = {
        train_names[0]: [503],
        train_names[1]: ["drop"],
        train_names[2]: ["drop", 429],
    }

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(contents, [bucket.url] * 3, ["train"] * 3))

    assert found == [expected] * 3
    requested = [path for _, path, _ in bucket.requests]
    assert [requested.count(name) for name in train_names] == [2, 2, 3, 1, 1, 1, 1, 1]


# ---- the cache ---------------------------------------------------------------------------------
@pytest.fixture
def copies(bucket, train_names, tmp_path) -> list[Path]:
    """The copies of the training shards, all of them in the cache."""
    contents(bucket.url, "train")
    return [next(tmp_path.rglob(name)) for name in train_names]


def test_a_spoilt_or_partial_copy_is_fetched_again(folder, bucket, copies):
    expected = contents(folder, "train")
    data = open_imagenet(bucket.url, "train", 16)
    whole = copies[0].read_bytes()
    copies[0].write_bytes(whole[:300] + b"!!" + whole[302:])
    copies[1].rename(f"{copies[1]}.partial")  # as a killed process leaves it

    first_of_second = int(data._ends[0])
    assert data._read(0)[:2] == expected[0]
    assert data._read(first_of_second)[:2] == expected[first_of_second]


def disk_with_nothing_to_spare(path) -> tuple:
    """Has LEFT_FREE bytes left, in place of shutil.disk_usage."""
    return shutil._ntuple_diskusage(0, 0, shards.LEFT_FREE)


def test_the_copy_unused_for_longest_makes_room(bucket, copies, monkeypatch):
    data = open_imagenet(bucket.url, "train", 16)
    monkeypatch.setattr(shards.shutil, "disk_usage", disk_with_nothing_to_spare)
    os.utime(copies[5], (1, 1))

    data._cache.remove(data._shards[7])
    data._cache.fetch(data._shards[7])

    removed = [number for number, copy in enumerate(copies) if not copy.exists()]
    assert removed == [5]


def test_a_disk_without_room_for_the_cache_is_explained(bucket, copies, monkeypatch):
    copies[5].unlink()
    monkeypatch.setattr(shards.shutil, "disk_usage", disk_with_nothing_to_spare)
    monkeypatch.setattr(shards, "LEFT_FREE", 1 << 40)

    message = r"GB for it; expected 1099.5, .*; make room, or set DATA_CACHE"
    with pytest.raises(InputError, match=message):
        open_imagenet(bucket.url, "train", 16)


# ---- files that do not fit the index -----------------------------------------------------------
def test_a_local_shard_that_is_not_what_the_index_says_is_named(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    name = "train-00001-of-00008.parquet"
    content = (folder / name).read_bytes()
    index = (folder / "shards.json").read_text()
    rows = json.loads(index)["splits"]["train"][1]["rows"]

    def refused(message: str, shard: bytes = content, index: str = index) -> None:
        (copy / name).write_bytes(shard)
        (copy / "shards.json").write_text(index)
        with pytest.raises(InputError, match=message):
            contents(copy, "train")

    refused(
        f"{name} has 9 bytes; shards.json says {len(content)}; copy it again",
        shard=b"too short",
    )
    refused(f"{name} is broken: .*CRC", shard=content[:200] + b"!!" + content[202:])
    refused(
        f" has {rows} rows; shards.json says 99",
        index=index.replace(f'"rows": {rows}', '"rows": 99'),
    )
    refused(
        "shards.json is no index of shards: KeyError",
        index=index.replace("classes", "names"),
    )
    refused(
        "shards.json is no index of shards of this version",
        index=index.replace(f'"{name}', f'"../{name}'),
    )


def test_missing_local_shards_and_a_missing_index_are_named(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.glob("*[1-9]-of-*"):
        path.unlink()
    message = "train-00001-of-00008.parquet is missing; copy it again"
    with pytest.raises(InputError, match=message):
        open_imagenet(str(copy), "train", 16)

    (copy / "shards.json").unlink()
    message = "not their index shards.json; copy shards.json there"
    with pytest.raises(InputError, match=message):
        open_imagenet(str(copy), "train", 16)


@pytest.fixture
def eval_shard(folder) -> Path:
    (shard,) = folder.glob("val-*.parquet")
    return shard


@pytest.fixture
def memory_bucket(folder, eval_shard, tmp_path, monkeypatch):
    """A function that copies the shards to a bucket, and returns its URL.

    The shard for evaluation gets the content given, or is not copied.
    """
    monkeypatch.setattr(remote, "PAUSES", (0, 0))
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path))
    bucket = fsspec.filesystem("memory")

    def copy(eval_content: bytes | None) -> str:
        for path in folder.iterdir():
            if path.is_file() and path != eval_shard:
                bucket.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
        if eval_content is not None:
            bucket.pipe_file(f"/{tmp_path.name}/{eval_shard.name}", eval_content)
        return f"memory://{tmp_path.name}"

    return copy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"short", "has 5 bytes; shards.json says"),
        (b"", "has 0 bytes"),
    ],
)
def test_a_shard_that_a_bucket_lacks_is_named_at_opening(
    memory_bucket, eval_shard, content, message
):
    url = memory_bucket(content)

    assert len(open_imagenet(url, "train", 16)) == TRAIN_ROWS
    with pytest.raises(InputError, match=f"{url}/{eval_shard.name} {message}"):
        open_imagenet(url, "eval", 16)


def test_a_bucket_that_cannot_list_is_opened_unchecked(memory_bucket, monkeypatch):
    url = memory_bucket(b"")

    def cannot_list(*_, **__):
        raise IndexError

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", cannot_list)

    assert len(open_imagenet(url, "eval", 16)) == EVAL_ROWS
