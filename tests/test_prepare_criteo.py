"""data/prepare/criteo.py on small files that the tests make; plain Python loops are the reference."""

import gzip
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from criteo_text import everything, random_rows, row, write

from data import criteo as cr
from data.prepare import criteo as pre
from errors import InputError

ROOT = Path(__file__).parent.parent


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but its description."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name != "prepared.json"}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(pre, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(pre, "PIECE_BYTES", 1500)


# Parsing


def test_a_hand_written_file_gives_the_values_worked_out_by_hand(tmp_path):
    lines = [
        row(1, {0: "0", 1: "-2", 2: "7"}, {0: "0000000b", 25: "ffffffff"}),
        row(0, {2: "1"}, {0: "0000000a", 25: "ffffffff"}),
        row(0, {}, {0: "0000000b"}),
        row(1, {12: "999999"}, {0: "0000000c", 25: "00000000"}),
        row(0, {}, {0: "0000000B"}),
        row(1, {}, {0: "c", 25: "80000000"}),
    ]
    evaluation = [row(1, {}, {0: "0000000d", 25: "00000000"}), row(0, {3: "3"}, {0: "0000000a"})]
    write(tmp_path / "train.txt", lines)
    write(tmp_path / "dev.txt", evaluation)
    prepared = pre.prepare(tmp_path)

    log = cr.ClickLog(tmp_path / "prepared", "train")
    assert (log.num_dense, log.lookups, log.features[0], log.features[-1]) == (13, (1,) * 26, "C1", "C26")
    # C1: b 3 times, c twice, a once. C26: ffffffff twice, then 00000000 before 80000000, once each.
    assert log.table_rows == (5, *(2,) * 24, 5)
    batch = everything(log)
    assert {key: (array.dtype, array.shape) for key, array in batch.items()} == {
        "dense": (np.float32, (6, 13)),
        "ids": (np.int32, (6, 26)),
        "label": (np.float32, (6,)),
    }
    assert batch["label"].tolist() == [1, 0, 0, 1, 0, 1]
    assert batch["ids"][:, 0].tolist() == [2, 4, 2, 3, 2, 3]
    assert batch["ids"][:, 25].tolist() == [2, 2, 0, 3, 0, 4]
    assert not batch["ids"][:, 1:25].any()
    expected = np.zeros((6, 13))
    expected[0, 2], expected[1, 2], expected[3, 12] = math.log(8), math.log(2), math.log(1e6)
    assert np.allclose(batch["dense"], expected, atol=1e-6)

    batch = everything(cr.ClickLog(tmp_path / "prepared", "eval"))
    assert batch["ids"][:, [0, 25]].tolist() == [[1, 3], [4, 0]]  # d was not seen in training: rare
    assert batch["label"].tolist() == [1, 0]
    assert batch["dense"][1, 3] == pytest.approx(math.log(4))
    assert prepared["rows"] == {"train": 6, "eval": 2}
    assert prepared["values_seen"] == [3, *[0] * 24, 3]


def test_parsing_agrees_with_a_plain_loop():
    lines = random_rows(200)
    rows = pre.parse(b"\n".join(lines))
    assert rows.lines == 200 and rows.bad == 0
    for number, line in enumerate(lines):
        fields = line.decode().split("\t")
        assert rows.label[number] == int(fields[0])
        expected = [math.log(max(int(field or 0), 0) + 1) for field in fields[1:14]]
        assert np.allclose(rows.dense[number], expected, atol=1e-6)
        assert rows.sparse[:, number].tolist() == [int(field or "0", 16) for field in fields[14:]]
        assert rows.missing[number] == sum(1 << t for t, field in enumerate(fields[14:]) if not field)


GOOD = row(1, {0: "5"}, {3: "0badcafe"})
STRANGE = {
    "label 2": (row(2), "label is '2'"),
    "no label": (row(""), "label is ''"),
    "label 01": (row("01"), "label is '01'"),
    "39 columns": (row().split(b"\t", 1)[1], "39 columns instead of 40: is the label missing"),
    "41 columns": (row() + b"\t", "41 columns instead of 40"),
    "empty line": (b"", "1 columns instead of 40"),
    "float": (row(0, {4: "1.5"}), "column 6 is '1.5', expected an integer"),
    "hexadecimal integer": (row(0, {4: "0x1F"}), "column 6 is '0x1F'"),
    "spaces": (row(0, {12: " 7"}), "column 14 is ' 7'"),
    "plus": (row(0, {0: "+7"}), "column 2 is '\\+7'"),
    "minus alone": (row(0, {0: "-"}), "column 2 is '-'"),
    "huge": (row(0, {0: "9" * 30}), "column 2 is '99999999999999999999…'"),
    "NULL": (row(0, {0: "NULL"}), "column 2 is 'NULL'"),
    "not hexadecimal": (row(0, {}, {0: "0000000g"}), "column 15 is '0000000g', expected up to 8"),
    "too long": (row(0, {}, {25: "123456789"}), "column 40 is '123456789'"),
    "quotes": (row(0, {}, {1: '"ab"'}), "column 16 is '\"ab\"'"),
    "not UTF-8": (row(0, {}, {1: "1234"}) + b"\xff", "not UTF-8"),
    "other characters": (row(0, {1: "٣"}), "column 3 is '٣'"),
    "carriage return": (row(0).replace(b"\t", b"\r\t", 1), "carriage return"),
    "byte order mark": (b"\xef\xbb\xbf" + row(0), r"label is '\\ufeff0'"),
    "nul": (row(0, {0: "\0"}), "column 2 is"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_malformed_line_is_left_out_and_explained(kind, place):
    line, reason = STRANGE[kind]
    lines = [GOOD, GOOD]
    lines.insert(place, line)
    rows = pre.parse(b"\n".join(lines) + b"\n")
    assert (rows.lines, rows.bad, rows.first_bad) == (3, 1, place)
    assert re.search(reason, rows.why), rows.why
    assert rows.label.tolist() == [1, 1]
    assert np.allclose(rows.dense[:, 0], math.log(6))
    assert rows.sparse[3].tolist() == [0x0BADCAFE] * 2


@pytest.mark.parametrize("line", [row(0, {0: "-0"}), row(1, {1: "007"}), row(1, {}, {0: "F"}), row(0, {2: "9" * 18})])
def test_unusual_but_good_lines_are_kept(line):
    assert pre.malformed(line) is None
    rows = pre.parse(b"\n".join([line, GOOD]))
    assert (rows.bad, len(rows.label)) == (0, 2)


def test_line_ends_of_windows_and_a_last_line_without_end():
    expected = pre.parse(b"\n".join(random_rows(20)) + b"\n")
    for text in (b"\r\n".join(random_rows(20)) + b"\r\n", b"\n".join(random_rows(20))):
        rows = pre.parse(text)
        assert rows.bad == 0 and (rows.sparse == expected.sparse).all() and (rows.dense == expected.dense).all()


# Preparing


@pytest.mark.parametrize("names", [("train.txt", "dev.txt"), ("train.txt",), ("day_0", "day_1", "day_2")])
def test_gz_and_plain_files_give_the_same_arrays(tmp_path, small_chunks, names):
    for number, name in enumerate(names):
        lines = random_rows(70, number)
        write(tmp_path / "plain" / name, lines)
        write(tmp_path / "gz" / f"{name}.gz", lines)
    pre.prepare(tmp_path / "gz", threshold=2)
    plain = pre.prepare(tmp_path / "plain", threshold=2)
    expected = {1: (60, 10), 2: (70, 70), 3: (140, 70)}[len(names)]
    assert (plain["rows"]["train"], plain["rows"]["eval"]) == expected
    assert contents(tmp_path / "plain" / "prepared") == contents(tmp_path / "gz" / "prepared")


@pytest.mark.parametrize("rows", [28, 5])
def test_the_last_seventh_is_for_evaluation_and_its_values_are_not_counted(tmp_path, monkeypatch, rows):
    lines = [row(0, {}, {0: "a"})] * 24 + [row(1, {}, {0: "b"})] * 4
    monkeypatch.setattr(pre, "CHUNK_BYTES", rows * (len(lines[0]) + 1))  # of 5: the last has only evaluation rows
    pre.prepare(write(tmp_path / "clicks.tsv", lines), tmp_path / "out")
    train, evaluation = (everything(cr.ClickLog(tmp_path / "out", split)) for split in ("train", "eval"))
    assert train["ids"][:, 0].tolist() == [2] * 24
    assert evaluation["ids"][:, 0].tolist() == [1] * 4 and evaluation["label"].tolist() == [1] * 4


@pytest.mark.parametrize("piece", [1, 60, 4 << 20])
@pytest.mark.parametrize("more", [-30, -1, 0, 1, 30])
def test_no_line_is_lost_or_read_twice_where_chunks_meet(tmp_path, monkeypatch, more, piece):
    monkeypatch.setattr(pre, "PIECE_BYTES", piece)
    lines = [row(0, {0: f"{number:02d}"}) for number in range(12)]  # of equal length
    data = write(tmp_path / "train.txt", lines)
    size = len(lines[0]) + 1 + more
    found = []
    for start in range(0, data.stat().st_size, size):
        pre._parse_range(data, start, start + size, tmp_path / "chunk.npz")
        found += np.expm1(cr.map_npz(tmp_path / "chunk.npz")["dense"][:, 0]).round().astype(int).tolist()
    assert found == list(range(12))


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_neither_workers_nor_the_size_of_chunks_change_the_arrays(tmp_path, monkeypatch, name):
    data = write(tmp_path / name, random_rows(300))
    write(tmp_path / "dev.txt", random_rows(30, 1))
    pre.prepare(data, tmp_path / "whole")
    monkeypatch.setattr(pre, "CHUNK_BYTES", 7001)
    pre.prepare(data, tmp_path / "one", workers=1)
    pre.prepare(data, tmp_path / "two", workers=2)
    assert contents(tmp_path / "whole") == contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("function", ["_save_chunk", "_count", "_write"])
@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_a_killed_preparation_goes_on(tmp_path, small_chunks, monkeypatch, capsys, function, name):
    data = write(tmp_path / name, random_rows(100))
    calls, killed_at = 0, 0
    original = getattr(pre, function)

    def kill(*arguments):
        nonlocal calls
        calls += 1
        if calls == killed_at:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(pre, function, kill)
    pre.prepare(data, tmp_path / "expected")
    needed, calls, killed_at = calls, 0, 3
    assert needed > 4
    with pytest.raises(KeyboardInterrupt):
        pre.prepare(data, tmp_path / "out")
    with pytest.raises(InputError, match="not prepared to its end"):
        cr.open_clicks(str(tmp_path / "out"), "train")
    calls, killed_at = 0, 0
    monkeypatch.setattr(pre, "CHUNK_BYTES", 3000)  # the chunks that are there still fit
    pre.prepare(data, tmp_path / "out")
    assert "going on" in capsys.readouterr().out
    assert calls == needed - 2, "what was finished is done again, or what was not is left out"
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_finished_preparation_is_not_done_again(tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "train.txt", random_rows(20))
    first = pre.prepare(data)
    monkeypatch.setattr(pre, "parse", lambda text: pytest.fail("parsed again"))
    assert pre.prepare(data) == first
    assert "already prepared: 18 training and 2 evaluation rows" in capsys.readouterr().out


def test_other_flags_or_files_than_before_are_refused(tmp_path):
    data = write(tmp_path / "train.txt", random_rows(20))
    pre.prepare(data, threshold=2)
    with pytest.raises(InputError, match="prepared with other flag threshold: 2, now 3"):
        pre.prepare(data, threshold=3)
    write(data, random_rows(21))
    with pytest.raises(InputError, match="prepared with other source files: train.txt"):
        pre.prepare(data, threshold=2)


def test_rare_values_share_an_id(tmp_path):
    lines = [row(0, {}, {0: value}) for value in ["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d", "", ""]]
    write(tmp_path / "dev.txt", lines)
    prepared = pre.prepare(write(tmp_path / "train.txt", lines), threshold=3)
    assert prepared["table_rows"][0] == 4 and prepared["values_seen"][0] == 4
    ids = everything(cr.ClickLog(tmp_path / "prepared", "train"))["ids"][:, 0]
    assert ids.tolist() == [2] * 5 + [3] * 3 + [1] * 3 + [0] * 2


def test_larger_tables_are_folded(tmp_path):
    lines = [row(0, {}, {0: f"{value:x}"}) for value in range(10) for _ in range(20 - value)] + [row()]
    write(tmp_path / "dev.txt", lines)
    prepared = pre.prepare(write(tmp_path / "train.txt", lines), max_rows=6)
    assert prepared["table_rows"][:2] == [6, 2] and prepared["values_seen"][0] == 10
    ids = everything(cr.ClickLog(tmp_path / "prepared", "train"))["ids"][:, 0]
    assert list(dict.fromkeys(ids.tolist())) == [2, 3, 4, 5, 0]
    assert ids[-2] == 2 + 9 % 4, "the rarest value, number 9"


def test_hashing_needs_no_vocabulary(tmp_path):
    lines = [row(0, {}, {0: value}) for value in ("0", "9", "a", "ffffffff", "")]
    write(tmp_path / "dev.txt", lines)
    prepared = pre.prepare(write(tmp_path / "train.txt", lines), hash_rows=10)
    assert prepared["table_rows"] == [10] * 26
    ids = everything(cr.ClickLog(tmp_path / "prepared", "train"))["ids"][:, 0]
    assert ids.tolist() == [1, 1, 2, 1 + (2**32 - 1) % 9, 0]
    assert not list((tmp_path / "prepared").glob("vocabulary*"))


def test_counting_merges_many_chunks(tmp_path):
    rng = np.random.default_rng(0)
    chunks, columns = [], []
    for number in range(7):
        sparse = rng.integers(0, 200, (26, 50)).astype(np.uint32)
        path = tmp_path / f"{number}.npz"
        np.savez(path, sparse=sparse, missing=np.zeros(50, np.uint32))
        chunks.append((path, 50 if number < 6 else 20))
        columns.append(sparse[3, : chunks[-1][1]])
    pre._count(3, chunks, 2, 0, tmp_path / "vocabulary.npz")
    values, counts = np.unique(np.concatenate(columns), return_counts=True)
    ranked = sorted(((-count, value) for value, count in zip(values, counts, strict=True) if count >= 2))
    vocabulary = cr.map_npz(tmp_path / "vocabulary.npz")
    found = dict(zip(vocabulary["values"].tolist(), vocabulary["ids"].tolist(), strict=True))
    assert found == {value: number for number, (_, value) in enumerate(ranked, start=2)}


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_malformed_lines_are_counted_and_the_first_is_named(tmp_path, small_chunks, name):
    good = random_rows(100)
    lines = [*good[:77], row(3), *good[77:90], row(0, {0: "x"}), *good[90:]]
    data = write(tmp_path / name, lines)
    with pytest.raises(InputError, match=r"2 of 102 lines are malformed.*train\.txt\S* line 78: its label is '3'"):
        pre.prepare(data, tmp_path / "out")
    prepared = pre.prepare(data, tmp_path / "out", bad_rows=0.02)  # goes on
    assert prepared["malformed"]["count"] == 2
    write(data, good)
    pre.prepare(data, tmp_path / "without")
    assert contents(tmp_path / "out") == contents(tmp_path / "without")


def test_a_malformed_line_of_the_evaluation_file_is_named_too(tmp_path):
    write(tmp_path / "train.txt", random_rows(50))
    write(tmp_path / "dev.txt", [*random_rows(3), b"1\t2"])
    with pytest.raises(InputError, match=r"1 of 54 lines .*dev\.txt line 4: it has 2 columns"):
        pre.prepare(tmp_path)


def test_input_that_cannot_be_prepared_is_explained(tmp_path):
    def refused(message: str, data: Path, **flags):
        with pytest.raises(InputError, match=message):
            pre.prepare(data, **flags)

    refused("there is no file or folder", tmp_path / "nowhere")
    folder = tmp_path / "empty"
    folder.mkdir()
    refused("neither train.txt nor day_0 to day_23 .*found nothing", folder)
    refused("train.txt is empty", write(folder / "train.txt", []))
    write(folder / "train.txt", [line.split(b"\t", 1)[1] for line in random_rows(20)])
    refused("line 1: it has 39 columns.*label missing", folder)
    write(folder / "train.txt", [line.replace(b"\t", b",") for line in random_rows(20)])
    refused("not Criteo's text: 20 of its first 20 lines", folder)
    write(folder / "train.txt", random_rows(6))
    refused("6 rows; expected at least 7", folder)
    write(folder / "day_0", random_rows(6))
    refused("train.txt as well as day_0", folder)
    zipped = tmp_path / "broken.gz"
    zipped.write_bytes(gzip.compress(b"\n".join(random_rows(500)))[:-2000])
    refused("broken.gz cannot be decompressed", zipped, out=tmp_path / "out")
    zipped.write_bytes(b"text")
    refused("broken.gz cannot be read: Not a gzipped file", zipped, out=tmp_path / "out")
    data = write(tmp_path / "train.txt", random_rows(20))
    (tmp_path / "file").touch()
    refused("file cannot be written|file/parts cannot be written", data, out=tmp_path / "file")
    for flags in ({"threshold": 0}, {"max_rows": 2}, {"hash_rows": -1}, {"bad_rows": 1.0}, {"workers": 0}):
        name, value = next(iter(flags.items()))
        refused(f"{name} {value} is out of range", data, **flags)
    refused("threshold 5 needs a vocabulary", data, threshold=5, hash_rows=100)


def test_the_command_prepares_and_its_errors_are_one_line(tmp_path, capsys):
    write(tmp_path / "train.txt", [*random_rows(20), b"broken"])
    pre.main(["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--bad-rows", "0.1", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "18 training and 2 evaluation rows" in printed
    assert "1 malformed lines of 21" in printed and "train.txt line 21: it has 1 columns" in printed
    command = [sys.executable, "-m", "data.prepare.criteo", "--data", str(tmp_path / "nowhere")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: there is no file or folder") and result.stderr.count("\n") == 1
