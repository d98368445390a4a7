"""Data from buckets: a web server that fails as networks do, memory://, kills, full disks, and every data set."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fsspec
import pytest

from bench.bucket import Bucket
from data import remote
from data.remote import local_copy
from errors import InputError

BIG = bytes(range(250)) * 100  # 25 blocks of 1,000
FILES = {"my data/MRPC/train.tsv": b"one", "my data/MRPC/a b%20c.txt": b"two", "my data/big": BIG, "my data/DONE": b""}
PROGRAM = "import sys; from data import remote as r; r.BLOCK, r.AHEAD = 1000, 2; print(r.local_copy(sys.argv[1]))"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(remote, "BLOCK", 1000)
    return tmp_path / "cache"


@pytest.fixture
def bucket():
    with Bucket(dict(FILES)).open() as server:
        yield server


def copied(url: str, *patterns: str) -> dict[str, bytes]:
    """Copies as a new run does; returns the files by their paths below the copy, "." for the copy itself."""
    local_copy.cache_clear()
    top = Path(local_copy(url, *patterns))
    return {str(path.relative_to(top)): path.read_bytes() for path in [top, *top.rglob("*")] if path.is_file()}


def assert_refused(url: str, pattern: str, *patterns: str) -> None:
    local_copy.cache_clear()
    with pytest.raises(InputError, match=pattern) as error:
        local_copy(url, *patterns)
    assert "\n" not in str(error.value)


def test_files_are_those_of_the_bucket(bucket, cache, tmp_path):
    below = {name.removeprefix("my data/"): content for name, content in FILES.items()}
    for name, content in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/remote/{name}", content)
    for url in (f"{bucket.url}/my data", f"{bucket.url}/my%20data/", "memory://remote/my data/"):
        assert copied(url) == below and local_copy(url).startswith(str(cache))
        assert copied(url, "*.tsv") == {"MRPC/train.tsv": b"one"}
        assert set(copied(url, "*", "!mrpc/*")) == {"big", "DONE"}
    for url in (f"{bucket.url}/my data/MRPC/a%20b%2520c.txt", "memory://remote/my data/MRPC/a b%20c.txt"):
        assert copied(url) == {".": b"two"}
    assert local_copy(f"file://{tmp_path}") == str(tmp_path) and local_copy("nyu-mll/glue") == "nyu-mll/glue"


def test_only_what_changed_is_copied_again_and_an_old_copy_stays(bucket):
    path = "my data/MRPC/train.tsv"
    copied(bucket.url)
    old, asked = Path(local_copy(bucket.url)), len(bucket.requests)
    copied(bucket.url)
    bucket.files[path] = b"new"  # as long as before
    assert copied(bucket.url)[path] == b"new" and (old / path).read_bytes() == b"one"
    assert [at for method, at, _ in bucket.requests[asked:] if method == "GET" and at in bucket.files] == [path]


@pytest.mark.parametrize("trouble", [[503, 429], ["drop"], ["drop", 500]], ids=str)
def test_a_failing_network_is_asked_again(trouble, bucket):
    for path in ("my data/big", "my data/MRPC/train.tsv", "my data"):
        bucket.trouble[path] = list(trouble)
    assert copied(f"{bucket.url}/my data")["big"] == BIG


def test_what_cannot_be_copied_is_named(bucket, cache, monkeypatch):
    url, change = f"{bucket.url}/my data", lambda: bucket.files.update({"my data/MRPC/train.tsv": b"six"})
    for at, trouble, message in (
        (f"{bucket.url}/none", [], "there is no http.*/none; is the name right"),
        ("memory://remote/none", [], "there is no memory:///remote/none;"),
        (url, [503] * 99, "/my data/big: 503.*; give the same command again"),
        (url, ["drop"] * 99, "/my data/big: .*not completed.*again"),
        (url, [403], "/my data/big: 403.*ask for access"),
        (url, [400], "/my data/big: 400"),
        (url, ["whole"], "/my data/big comes whole where a part was asked for; .*range requests"),
        (url, [change], "/my data changed while it was copied"),
        ("oci://bucket/x", [], "oci://bucket/x needs a package that is not installed: .*ocifs"),
        ("gss://bucket/x", [], "gss://bucket/x cannot be opened: .*gs://bucket/folder"),
    ):
        shutil.rmtree(cache, ignore_errors=True)
        bucket.trouble["my data/big"] = trouble
        assert_refused(at, message)
    assert_refused(
        url, r"no file that is needed; expected \*.npy, found .*DONE, MRPC/.*; text is prepared first", "*.npy"
    )
    bucket.files["my data/MRPC/train.tsv"] = b"one"
    shutil.rmtree(cache)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 25_005))
        assert_refused(url, "needs 25,006 bytes on the disk of .*, and 25,005 are free; .*DATA_CACHE_DIR")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: exec("raise OSError(28, os.strerror(28))"))
        assert_refused(url, "cannot be written: No space left on device; .*DATA_CACHE_DIR")
    assert copied(url)["big"] == BIG


def test_a_killed_copy_resumes_and_two_at_once_copy_once(bucket, cache):
    def start() -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, bucket.url], stdout=subprocess.PIPE, text=True))
        return started[-1]

    started = []
    bucket.trouble["my data/big"] = [None] * 12 + [lambda: started[0].send_signal(signal.SIGKILL)]
    assert start().wait(20) == -signal.SIGKILL
    (part,) = cache.rglob("*.part")
    have, asked = part.stat().st_size, len(bucket.requests)
    assert BIG.startswith(part.read_bytes()) and 5000 <= have < len(BIG)
    one, other = (process.communicate(timeout=20)[0] for process in (start(), start()))
    assert one == other and (Path(one.strip()) / "my data/big").read_bytes() == BIG
    spans = Counter(span for _, path, span in bucket.requests[asked:] if path == "my data/big" and span)
    assert set(spans.values()) == {1} and min(int(span[6:].split("-")[0]) for span in spans) == have
