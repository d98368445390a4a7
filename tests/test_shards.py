"""Images in shards: data/prepare/images.py writes them, data/shards.py reads them from a folder or a server."""

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
from PIL import Image
from test_loading import equal, take

from bench.bucket import Bucket
from data import remote, shards
from data.imagenet import open_imagenet
from data.prepare import images
from errors import InputError
from train.common import loading
from train.common.batches import training_keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of 75 images to train on and 9 to evaluate on, of three classes, all different; they are in `tree`."""
    tree = tmp_path_factory.mktemp("images") / "tree"
    for number in range(84):
        path = tree / ("val" if number >= 75 else "train") / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 9, 3), dtype=np.uint8)).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "SHARD_BYTES", 2750)
        images.prepare(tree, tree.parent / "shards")
        yield tree.parent / "shards"


@pytest.fixture
def bucket(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0, 0))
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    with Bucket({path.name: path.read_bytes() for path in folder.iterdir()}).open() as bucket:
        yield bucket


def contents(source: Path, split: str) -> list[tuple[bytes, int]]:
    found = open_imagenet(str(source), split, 16)
    return [found._read(index)[:2] for index in range(len(found))]


def test_shards_have_the_images_of_any_source_and_a_stopped_preparation_resumes(folder, tmp_path, monkeypatch):
    tree, out, writer, steps = folder.parent / "tree", tmp_path / "out", images.pq.ParquetWriter, iter(range(7, -1, -1))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # in the third shard
        patch.setattr(writer, "write_table", lambda *table, write=writer.write_table: write(*table) or 1 / next(steps))
        images.prepare(tree, out)
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert len(done) == 2 and [*out.glob("*.partial")]
    with pytest.raises(InputError, match="is not prepared to its end; give the same `make data` command again"):
        contents(out, "train")
    with pytest.raises(InputError, match="other --seed: 0, now 1"):
        images.prepare(tree, out, seed=1)
    images.prepare(tree, out)
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
    one, other = ({path.name: path.read_bytes() for path in where.glob("*.p*")} for where in (out, folder))
    assert one == other and len(one) == 8 + 1
    hub = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "hub"))
    assert hub["train"].features["label"].names == ["a", "b", "c"] and hub["validation"][0]["image"].size == (9, 8)
    hub.save_to_disk(tmp_path / "saved")
    images.prepare(tmp_path / "saved", tmp_path / "again")
    for source in (folder, tmp_path / "again"):
        assert sorted(contents(source, "train")) == sorted(contents(tree, "train")) != contents(source, "train")
        assert contents(source, "eval") == contents(tree, "eval")


def test_an_epoch_has_every_image_once_in_an_order_of_seed_and_epoch(folder):
    data = open_imagenet(str(folder), "train", 16)
    for batch, lanes in ((25, 1), (16, 16), (8, 8), (12, 4)):
        order = data.order(3, 5, batch)
        assert len(order) == len(set(order)) == 75 // batch * batch and set(order) <= set(range(75))
        assert (order == data.order(3, 5, batch)).all() and (order != data.order(3, 6, batch)).any()
        assert (order != data.order(4, 5, batch)).any()
        lane = order.reshape(-1, lanes, batch // lanes)[:, 0].ravel()  # the first images of all batches
        assert len(set(np.searchsorted(data._ends, lane, "right"))) <= 1 + -(-8 // lanes)
    keys = list(training_keys(data, 12, 3, 4, 12))
    second = np.concatenate([indices for epoch, indices in keys if epoch == 1])
    np.testing.assert_array_equal(second, data.order(3, 1, 12))


def test_batches_and_their_resume_do_not_depend_on_where_shards_are_nor_on_workers(folder, bucket, mesh, monkeypatch):
    def batches(data, start=0, workers=0, train=True) -> list[dict[str, np.ndarray]]:
        data = open_imagenet(str(data), "train" if train else "eval", 16)
        return take(loading.parallel_loader(data, 12, mesh, train=train, seed=3, start=start, stop=14, workers=workers))

    expected = batches(folder)
    order, own = open_imagenet(str(folder), "train", 16).order(3, 0, 12), contents(folder, "train")
    assert [own[index][1] for index in order] == np.concatenate([batch["label"] for batch in expected[:6]]).tolist()
    fetched, fetch = set(), shards.Cache.fetch  # what is fetched ahead, in this process
    monkeypatch.setattr(shards.Cache, "fetch", lambda *who: fetched.add(who[1]["name"]) or fetch(*who))
    assert equal(batches(bucket.url, start=8, workers=2), expected[8:]) and len(fetched) == 8
    assert equal(batches(bucket.url), expected)
    assert equal(batches(bucket.url, train=False), batches(folder, train=False))
    paths = [path for _, path, _ in bucket.requests]  # one cache for all
    assert paths.count("shards.json") == 3 and len(set(paths)) == 1 + 9 and len(paths) == 3 + 9
    assert not any(one.join(5) or one.is_alive() for one in threading.enumerate() if one.name == "shards")


def test_faults_of_a_network_pass_or_name_the_file_and_a_cache_is_shared(folder, bucket, tmp_path, monkeypatch):
    names, whole = sorted(path.name for path in folder.glob("train*.parquet")), dict(bucket.files)
    bucket.trouble["shards.json"] = [503, 503, 503, 404]
    for message in ("shards.json: 503", "there is no .*shards.json.* make data DATASET=images"):
        with pytest.raises(InputError, match=message):
            open_imagenet(bucket.url, "train", 16)
    data, expected = open_imagenet(bucket.url, "train", 16), contents(folder, "train")
    starts, content = [0, *data._ends[:-1].tolist()], whole[names[3]]
    spoilt = {content[:-9]: " has .* bytes;", bytes(len(content)): " has the SHA", b"<html>": " has 6 bytes;"}
    for fault, message in ({"drop": ": ", 503: ": 503", 404: ";", 403: ": 403"} | spoilt).items():
        bucket.trouble[names[3]] = [] if isinstance(fault, bytes) else [fault] * 3
        bucket.files[names[3]] = fault if isinstance(fault, bytes) else content
        with pytest.raises(InputError, match=f"{bucket.url}/{names[3]}{message}") as error:
            data._read(starts[3])
        left = [*bucket.trouble[names[3]], *tmp_path.rglob("*.partial")]
        assert "\n" not in str(error.value) and len(left) == (2 if fault in (404, 403) else 0)
    bucket.trouble = {names[0]: [503], names[1]: ["drop"], names[2]: ["drop", 429]}
    bucket.files, bucket.requests = whole, []
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(contents, [bucket.url] * 3, ["train"] * 3)) == [expected] * 3
    assert [[path for _, path, _ in bucket.requests].count(name) for name in names] == [2, 2, 3, 1, 1, 1, 1, 1]
    copies = [next(tmp_path.rglob(name)) for name in names]
    copies[0].write_bytes(copies[0].read_bytes()[:300] + b"!!" + copies[0].read_bytes()[302:])
    copies[1].rename(f"{copies[1]}.partial")  # as a killed process leaves it
    assert [data._read(starts[number])[:2] for number in (0, 1)] == [expected[starts[number]] for number in (0, 1)]
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, shards.LEFT_FREE))
    os.utime(copies[5], (1, 1))
    data._cache.remove(data._shards[7])
    data._cache.fetch(data._shards[7])
    assert [copy.exists() for copy in copies] == [True, True, True, True, True, False, True, True]
    monkeypatch.setattr(shards, "LEFT_FREE", 1 << 40)
    with pytest.raises(InputError, match=r"GB for it; expected 1099.5, .*; make room, or set DATA_CACHE"):
        open_imagenet(bucket.url, "train", 16)


def test_a_local_shard_that_is_not_what_the_index_says_is_named(folder, tmp_path):
    name, index = "train-00001-of-00008.parquet", (folder / "shards.json").read_text()
    content, rows = (folder / name).read_bytes(), json.loads(index)["splits"]["train"][1]["rows"]
    broken = {
        f"{name} has 9 bytes; shards.json says {len(content)}; copy it again": (b"too short", index),
        f"{name} is broken: .*CRC": (content[:200] + b"!!" + content[202:], index),
        f" has {rows} rows; shards.json says 99": (content, index.replace(f'"rows": {rows}', '"rows": 99')),
        "shards.json is no index of shards: KeyError": (content, index.replace("classes", "names")),
        "shards.json is no index of shards of this version": (content, index.replace(f'"{name}', f'"../{name}')),
    }
    shutil.copytree(folder, tmp_path / "copy")
    for message, (shard, written) in broken.items():
        (tmp_path / "copy" / name).write_bytes(shard)
        (tmp_path / "copy" / "shards.json").write_text(written)
        with pytest.raises(InputError, match=message):
            contents(tmp_path / "copy", "train")
    for path in (tmp_path / "copy").glob("*[1-9]-of-*"):
        path.unlink()
    (tmp_path / "copy" / "shards.json").write_text(index)
    with pytest.raises(InputError, match=f"{name} is missing; copy it again"):
        open_imagenet(str(tmp_path / "copy"), "train", 16)
    (tmp_path / "copy" / "shards.json").unlink()
    with pytest.raises(InputError, match="not their index shards.json; copy shards.json there"):
        open_imagenet(str(tmp_path / "copy"), "train", 16)


def test_a_shard_that_a_bucket_lacks_is_named_at_opening(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0, 0))
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path))
    bucket, name, (shard,) = fsspec.filesystem("memory"), "memory://shards", folder.glob("val-*.parquet")
    for content, message in ((None, "is missing"), (b"short", "has 5 bytes; shards.json says"), (b"", "has 0 bytes")):
        for path in folder.iterdir():
            if path.is_file() and (path != shard or content is not None):
                bucket.pipe_file(f"/shards/{path.name}", content if path == shard else path.read_bytes())
        assert len(open_imagenet(name, "train", 16)) == 75
        with pytest.raises(InputError, match=f"{name}/{shard.name} {message}"):
            open_imagenet(name, "eval", 16)
    monkeypatch.setattr(type(bucket), "ls", lambda *_, **__: [][0])  # a bucket that cannot list
    assert len(open_imagenet(name, "eval", 16)) == 9
