"""data/prepare/sources.py: what a plan notes of the data, and which changes are noticed.

That all preparations notice them is in test_prepare.py and test_shards.py.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from click_tables import write

from data.prepare import clicks, sources
from errors import InputError

LOG = {"clicked": [0, 1] * 10, "user": list("abcdefghij") * 2}
FLAGS = {"label": "clicked", "categorical": "user"}
NANOSECONDS = 1_700_000_000_123_456_789


@pytest.fixture
def large(monkeypatch) -> None:
    """Makes any file one whose content is not read for its mark."""
    monkeypatch.setattr(sources, "CHECKSUM_BYTES", 0)


def noted(folder: Path) -> list[dict]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return sources.note_files(sources.files_in(folder, paths))


# ---- files -------------------------------------------------------------------------------------
def test_files_go_by_their_place_in_the_folder(tmp_path):
    for name in ("a/log.csv", "b/log.csv"):
        write(tmp_path / name, LOG)

    assert [source["name"] for source in noted(tmp_path)] == ["a/log.csv", "b/log.csv"]


def test_a_large_file_of_another_time_is_another(tmp_path, monkeypatch, large):
    """And the sentence says how a mere copy gets its time again: as it says, it is the same."""
    path = write(tmp_path / "log.csv", LOG)
    os.utime(path, ns=(NANOSECONDS, NANOSECONDS))
    report = clicks.prepare(path, **FLAGS)
    os.utime(path, (1, 1))

    message = r"from other data: log.csv was last changed at 1970-01-01 .*, and what was prepared "
    message += (
        r"at 2023-11-1[45] .*.123457 \(if .*: touch -d @1700000000.123456789 log.csv\); choose"
    )
    with pytest.raises(InputError, match=message) as refused:
        clicks.prepare(path, **FLAGS)
    command = re.search(r"touch [^)]*", str(refused.value))[0]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert path.stat().st_mtime_ns == NANOSECONDS
    assert clicks.prepare(path, **FLAGS) == report


def test_large_and_small_data_have_marks_of_their_own(tmp_path, monkeypatch):
    write(tmp_path / "a.csv", LOG)
    size = write(tmp_path / "b.csv", LOG).stat().st_size

    monkeypatch.setattr(sources, "CHECKSUM_BYTES", 2 * size)
    assert [set(source) for source in noted(tmp_path)] == [{"name", "bytes", "sha256"}] * 2
    monkeypatch.setattr(sources, "CHECKSUM_BYTES", 2 * size - 1)
    assert [set(source) for source in noted(tmp_path)] == [{"name", "bytes", "mtime_ns"}] * 2


def test_all_changes_are_named_and_the_first_are_shown(tmp_path):
    for name in "abcdefgh":
        write(tmp_path / name, LOG)
    before = noted(tmp_path)
    (tmp_path / "a").unlink()
    for name in "bcdef":
        (tmp_path / name).write_text("x")
    write(tmp_path / "i", LOG)

    changes = sources.changes(before, noted(tmp_path))

    size = before[0]["bytes"]
    assert changes[0] == f"a ({size} bytes) is no longer read"
    assert changes[1:6] == [f"{name} had {size} bytes, now 1" for name in "bcdef"]
    assert changes[6] == f"i ({size} bytes) is new"
    assert sources.shown(changes).endswith("; e had 93 bytes, now 1; and 2 more")


def test_files_in_another_order_are_another_plan(tmp_path):
    for name in "ab":
        write(tmp_path / name, LOG)
    first, second = noted(tmp_path)

    assert sources.changes([first, second], [first, second]) == []
    (change,) = sources.changes([first, second], [second, first])
    assert change.startswith("the order was a (93 bytes), b (93 bytes), now b (93")


def test_a_file_for_another_split_is_another():
    train = {"name": "a.csv", "bytes": 5, "split": "train", "sha256": "1"}
    evaluation = {**train, "split": "eval"}

    assert sources.changes([train], [evaluation]) == [
        "a.csv (5 bytes of train) is no longer read",
        "a.csv (5 bytes of eval) is new",
    ]


def test_marks_of_two_kinds_compare_sizes_alone():
    """As of data that was at a URL first, and on the disk then."""
    at_url = {"name": "a.csv", "bytes": 5, "tag": "abc"}
    local = {"name": "a.csv", "bytes": 5, "mtime_ns": 1}

    assert sources.changes([at_url], [local]) == []
    assert not sources.all_compared([at_url], [local])
    assert sources.all_compared([at_url], [at_url])
    assert sources.changes([at_url], [{**local, "bytes": 6}]) == ["a.csv had 5 bytes, now 6"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="gone.csv cannot be read: No such file"):
        sources.note_files([sources.SourceFile(tmp_path / "gone.csv", "gone.csv")])


# ---- many files, and data sets -----------------------------------------------------------------
def mark(folder: Path) -> dict:
    paths = sorted(folder.iterdir())
    return sources.note_many(len(paths), paths.__getitem__)


@pytest.mark.parametrize("is_large", [False, True])
def test_many_files_have_one_mark(tmp_path, monkeypatch, is_large):
    if is_large:
        monkeypatch.setattr(sources, "CHECKSUM_BYTES", 0)
    for name in "ab":
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    before = mark(tmp_path)
    assert set(before) == {"bytes", "stamps" if is_large else "sha256"}

    (tmp_path / "b").write_text("c")
    if not is_large:
        os.utime(tmp_path / "b", (1, 1))

    now = mark(tmp_path)
    assert now["bytes"] == before["bytes"] == 2
    assert now != before
    name = {"name": "train", "rows": 2}
    (change,) = sources.changes([name | before], [name | now])
    assert change.startswith("train has ")


def test_many_files_of_one_time_may_be_copies(tmp_path):
    (tmp_path / "a").write_text("a")
    before = mark(tmp_path)
    os.utime(tmp_path / "a", (1, 1))

    assert mark(tmp_path) == before
