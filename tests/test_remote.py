"""Data from buckets: a web server that fails as networks do, memory://, kills and full disks."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bench.bucket import Bucket
from data import remote
from data.remote import local_copy
from errors import InputError

BIG = bytes(range(250)) * 100  # 25 blocks of 1,000
FILES = {
    "my data/MRPC/train.tsv": b"one",
    "my data/MRPC/a b%20c.txt": b"two",
    "my data/big": BIG,
    "my data/DONE": b"",
}
PROGRAM = (
    "import sys; from data import remote as r;"
    " r.BLOCK, r.AHEAD = 1000, 2; print(r.local_copy(sys.argv[1]))"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of the copies, which are read in small blocks and without long pauses."""
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(remote, "BLOCK", 1000)
    return tmp_path / "cache"


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket(dict(FILES)).open() as server:
        yield server


def copied(url: str, *patterns: str) -> dict[str, bytes]:
    """Copies as a new run does.

    Returns the files by their paths below the copy, "." for the copy itself.
    """
    local_copy.cache_clear()
    top = Path(local_copy(url, *patterns))
    contents = {}
    for path in [top, *top.rglob("*")]:
        if path.is_file():
            contents[str(path.relative_to(top))] = path.read_bytes()
    return contents


def assert_refused(url: str, message: str, *patterns: str) -> None:
    """Asserts that a copy fails with a message of one line."""
    local_copy.cache_clear()
    with pytest.raises(InputError, match=message) as error:
        local_copy(url, *patterns)
    assert "\n" not in str(error.value)


# ---- what is copied ----------------------------------------------------------------------------


@pytest.fixture
def in_memory() -> None:
    """The same files in fsspec's memory."""
    for name, content in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/remote/{name}", content)


@pytest.mark.parametrize(
    "url", ["{bucket}/my data", "{bucket}/my%20data/", "memory://remote/my data/"]
)
def test_files_are_those_of_the_folder(url, bucket, in_memory, cache):
    url = url.format(bucket=bucket.url)
    below = {name.removeprefix("my data/"): content for name, content in FILES.items()}
    assert copied(url) == below
    assert local_copy(url).startswith(str(cache))


@pytest.mark.parametrize(
    "url", ["{bucket}/my data", "{bucket}/my%20data/", "memory://remote/my data/"]
)
def test_patterns_choose_files(url, bucket, in_memory):
    url = url.format(bucket=bucket.url)
    assert copied(url, "*.tsv") == {"MRPC/train.tsv": b"one"}
    assert set(copied(url, "*", "!mrpc/*")) == {"big", "DONE"}


@pytest.mark.parametrize(
    "url",
    ["{bucket}/my data/MRPC/a%20b%2520c.txt", "memory://remote/my data/MRPC/a b%20c.txt"],
)
def test_one_file_is_copied_by_its_url(url, bucket, in_memory):
    assert copied(url.format(bucket=bucket.url)) == {".": b"two"}


def test_what_is_here_is_not_copied(tmp_path):
    assert local_copy(f"file://{tmp_path}") == str(tmp_path)
    assert local_copy("nyu-mll/glue") == "nyu-mll/glue"


def test_only_what_changed_is_copied_again_and_an_old_copy_stays(bucket):
    changed = "my data/MRPC/train.tsv"
    copied(bucket.url)
    old = Path(local_copy(bucket.url))
    asked = len(bucket.requests)
    copied(bucket.url)

    bucket.files[changed] = b"new"  # as long as before
    assert copied(bucket.url)[changed] == b"new"
    assert (old / changed).read_bytes() == b"one"
    files = []
    for method, path, _ in bucket.requests[asked:]:
        if method == "GET" and path in bucket.files:
            files.append(path)
    assert files == [changed]


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [[503, 429], ["drop"], ["drop", 500]], ids=str)
def test_a_failing_network_is_asked_again(trouble, bucket):
    for path in ("my data/big", "my data/MRPC/train.tsv", "my data"):
        bucket.trouble[path] = list(trouble)
    assert copied(f"{bucket.url}/my data")["big"] == BIG


@pytest.mark.parametrize(
    "trouble, message",
    [
        ([503] * 99, "/my data/big: 503.*; give the same command again"),
        (["drop"] * 99, "/my data/big: .*not completed.*again"),
        ([403], "/my data/big: 403.*ask for access"),
        ([400], "/my data/big: 400"),
        (
            ["whole"],
            "/my data/big comes whole where a part was asked for; .*range requests",
        ),
    ],
)
def test_a_server_that_does_not_give_a_file_is_named(trouble, message, bucket):
    bucket.trouble["my data/big"] = trouble
    assert_refused(f"{bucket.url}/my data", message)

    bucket.trouble["my data/big"] = []
    assert copied(f"{bucket.url}/my data")["big"] == BIG


@pytest.mark.parametrize(
    "url, message",
    [
        ("{bucket}/none", "there is no http.*/none; is the name right"),
        ("memory://remote/none", "there is no memory:///remote/none;"),
        ("oci://bucket/x", "oci://bucket/x needs a package that is not installed: .*ocifs"),
        ("gss://bucket/x", "gss://bucket/x cannot be opened: .*gs://bucket/folder"),
    ],
)
def test_a_url_that_leads_nowhere_is_named(url, message, bucket):
    assert_refused(url.format(bucket=bucket.url), message)


def test_data_that_changes_while_it_is_copied_is_named(bucket):
    def change() -> None:
        bucket.files["my data/MRPC/train.tsv"] = b"six"

    bucket.trouble["my data/big"] = [change]
    assert_refused(f"{bucket.url}/my data", "/my data changed while it was copied")


def test_a_folder_without_a_file_that_is_needed_is_named(bucket):
    expected = r"no file that is needed; expected \*.npy"
    message = f"{expected}, found .*DONE, MRPC/.*; text is prepared first"
    assert_refused(f"{bucket.url}/my data", message, "*.npy")


def test_a_disk_with_too_little_room_is_named(bucket, monkeypatch):
    one_byte_less = shutil._ntuple_diskusage(10**6, 10**6, 25_005)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: one_byte_less)
    message = "needs 25,006 bytes on the disk of .*, and 25,005 are free; .*DATA_CACHE_DIR"
    assert_refused(f"{bucket.url}/my data", message)


def test_a_disk_that_becomes_full_is_named(bucket, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = "cannot be written: No space left on device; .*DATA_CACHE_DIR"
        assert_refused(f"{bucket.url}/my data", message)
    assert copied(f"{bucket.url}/my data")["big"] == BIG


# ---- two copies --------------------------------------------------------------------------------


def start_copy(url: str) -> subprocess.Popen:
    """Copies in a process, which prints where the copy lies."""
    command = [sys.executable, "-c", PROGRAM, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_copy_resumes_and_two_at_once_copy_once(bucket, cache):
    started = []

    def kill() -> None:
        started[0].send_signal(signal.SIGKILL)

    bucket.trouble["my data/big"] = [None] * 12 + [kill]
    started.append(start_copy(bucket.url))
    assert started[0].wait(20) == -signal.SIGKILL
    (part,) = cache.rglob("*.part")
    have = part.stat().st_size
    assert BIG.startswith(part.read_bytes())
    assert 5000 <= have < len(BIG)

    asked = len(bucket.requests)
    one = start_copy(bucket.url)
    other = start_copy(bucket.url)
    copy = one.communicate(timeout=20)[0]
    assert other.communicate(timeout=20)[0] == copy
    assert (Path(copy.strip()) / "my data/big").read_bytes() == BIG

    # Each range is asked for once, from where the first copy ended.
    ranges = Counter()
    for _, path, asked_range in bucket.requests[asked:]:
        if path == "my data/big" and asked_range:
            ranges[asked_range] += 1
    assert set(ranges.values()) == {1}
    starts = [int(asked_range.removeprefix("bytes=").split("-")[0]) for asked_range in ranges]
    assert min(starts) == have
