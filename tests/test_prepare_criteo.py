"""data/prepare/criteo.py on small files that the tests make; plain Python loops are the
reference."""

import dataclasses
import math
import re

import numpy as np
import pytest
from corpora import contents
from criteo_text import everything, random_rows, row, write

from data import criteo as cr
from data import splits
from data.prepare import criteo as pre
from errors import InputError

SPLITS = ("train", "eval")


def joined(lines: list[bytes], end: bytes = b"\n") -> bytes:
    """Returns a text whose last line has an end, too."""
    return end.join(lines) + end


# ---- values ------------------------------------------------------------------------------------
TRAIN = [
    row(1, {0: "0", 1: "-2", 2: "7"}, {0: "0000000b", 25: "ffffffff"}),
    row(0, {2: "1"}, {0: "0000000a", 25: "ffffffff"}),
    row(0, {}, {0: "0000000b"}),
    row(1, {12: "999999"}, {0: "0000000c", 25: "00000000"}),
    row(0, {}, {0: "0000000B"}),
    row(1, {}, {0: "c", 25: "80000000"}),
]
EVALUATION = [
    row(1, {}, {0: "0000000d", 25: "00000000"}),
    row(0, {3: "3"}, {0: "0000000a"}),
]


def test_a_hand_written_file_gives_values_worked_out_by_hand(tmp_path):
    write(tmp_path / "train.txt", TRAIN)
    write(tmp_path / "train.txt.gz", [])  # the plain file is read
    write(tmp_path / "valid.txt", EVALUATION)

    report = pre.prepare(tmp_path)

    assert report["rows"] == {"train": 6, "eval": 2}
    assert report["values_seen"] == [3, *[0] * 24, 3]
    log = cr.ClickLog(tmp_path / "prepared", "train")
    assert log.num_dense == 13
    assert log.lookups == (1,) * 26
    assert log.features[0] == "C1"
    assert log.features[-1] == "C26"
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
    dense = np.zeros((6, 13))
    dense[0, 2] = math.log(8)
    dense[1, 2] = math.log(2)
    dense[3, 12] = math.log(1e6)
    assert np.allclose(batch["dense"], dense, atol=1e-6)

    batch = everything(cr.ClickLog(tmp_path / "prepared", "eval"))
    assert batch["ids"][:, [0, 25]].tolist() == [[1, 3], [4, 0]]  # d was not seen in training: rare
    assert batch["label"].tolist() == [1, 0]
    assert batch["dense"][1, 3] == pytest.approx(math.log(4))


def test_parsing_agrees_with_a_plain_loop():
    lines = random_rows(200)

    rows = pre.parse(b"\n".join(lines))

    assert rows.lines == 200
    assert rows.bad == 0
    for number, line in enumerate(lines):
        label, *fields = line.decode().split("\t")
        dense = [math.log(max(int(field or 0), 0) + 1) for field in fields[:13]]
        sparse = [int(field or "0", 16) for field in fields[13:]]
        missing = 0  # a bit for each feature
        for feature, field in enumerate(fields[13:]):
            if not field:
                missing |= 1 << feature

        assert rows.label[number] == int(label)
        assert np.allclose(rows.dense[number], dense, atol=1e-6)
        assert rows.sparse[:, number].tolist() == sparse
        assert rows.missing[number] == missing


# ---- malformed and unusual lines ---------------------------------------------------------------
GOOD = row(1, {0: "5"}, {3: "0badcafe"})


def without_label(line: bytes) -> bytes:
    return line.split(b"\t", 1)[1]


LINES = random_rows(20)
WITHOUT_LABELS = [without_label(line) for line in LINES]
WITH_COMMAS = [line.replace(b"\t", b",") for line in LINES]


# By the reason that is given.
MALFORMED = {
    "label is '2'": row(2),
    "label is ''": row(""),
    "label is '01'": row("01"),
    "39 columns instead of 40: is the label missing": without_label(row()),
    "41 columns instead of 40": row() + b"\t",
    "1 columns instead of 40": b"",
    "column 6 is '1.5', expected an integer": row(0, {4: "1.5"}),
    "column 6 is '0x1F'": row(0, {4: "0x1F"}),
    "column 14 is ' 7'": row(0, {12: " 7"}),
    r"column 2 is '\+7'": row(0, {0: "+7"}),
    "column 2 is '-'": row(0, {0: "-"}),
    "column 2 is '99999999999999999999…'": row(0, {0: "9" * 30}),
    "column 2 is 'NULL'": row(0, {0: "NULL"}),
    "column 15 is '0000000g', expected up to 8": row(0, {}, {0: "0000000g"}),
    "column 40 is '123456789'": row(0, {}, {25: "123456789"}),
    "column 16 is '\"ab\"'": row(0, {}, {1: '"ab"'}),
    "not UTF-8": row(0, {}, {1: "1234"}) + b"\xff",
    "column 3 is '٣'": row(0, {1: "٣"}),
    "carriage return": row(0).replace(b"\t", b"\r\t", 1),
    r"label is '\\ufeff0'": b"\xef\xbb\xbf" + row(0),
    "column 2 is": row(0, {0: "\0"}),
}


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("reason", MALFORMED)
def test_a_malformed_line_is_left_out_and_explained(reason, position):
    lines = [GOOD, GOOD]
    lines.insert(position, MALFORMED[reason])

    rows = pre.parse(joined(lines))

    assert rows.lines == 3
    assert rows.bad == 1
    assert rows.first_bad == position
    assert re.search(reason, rows.why), rows.why
    assert rows.label.tolist() == [1, 1]
    assert np.allclose(rows.dense[:, 0], math.log(6))
    assert rows.sparse[3].tolist() == [0x0BADCAFE] * 2


def test_unusual_but_good_lines_are_kept():
    unusual = [
        row(0, {0: "-0"}),
        row(1, {1: "007"}),
        row(1, {}, {0: "F"}),
        row(0, {2: "9" * 18}),
        *random_rows(20),
    ]
    for line in unusual:
        assert pre.malformed(line) is None, line

    expected = pre.parse(joined(unusual))
    assert expected.bad == 0
    assert len(expected.label) == 24

    as_windows_has_it = joined(unusual, end=b"\r\n")
    last_line_without_end = b"\n".join(unusual)
    for text in (as_windows_has_it, last_line_without_end):
        rows = pre.parse(text)
        assert rows.bad == 0
        assert (rows.sparse == expected.sparse).all()
        assert (rows.dense == expected.dense).all()


def test_a_malformed_line_of_a_later_piece_has_its_number(tmp_path):
    good = random_rows(5)
    pieces = [joined(good[:3]), joined([*good[3:], row(3)])]

    pre._save_chunk(iter(pieces), tmp_path / "chunk.npz")

    chunk = cr.map_npz(tmp_path / "chunk.npz")
    assert chunk["lines"] == 6
    assert chunk["bad"] == 1
    assert chunk["first_bad"] == 5


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_malformed_lines_are_counted_and_the_first_is_named(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(pre, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(pre, "BLOCK_BYTES", 1500)
    good = random_rows(100)
    lines = [*good[:77], row(3), *good[77:90], row(0, {0: "x"}), *good[90:]]
    data = write(tmp_path / name, lines)
    write(tmp_path / "dev.txt", random_rows(9))
    out = tmp_path / "out"

    first = rf"{name}\S* line 78: its label is '3'"
    too_many = rf"2 of 111 lines are malformed, .*--bad-rows.*{first}"
    with pytest.raises(InputError, match=too_many):
        pre.prepare(data, out)

    allowed = ["--bad-rows", "0.02"]
    pre.main(["--data", str(data), "--out", str(out), *allowed, "--workers", "1"])
    printed = capsys.readouterr().out
    assert "resuming" in printed
    left_out = f"2 malformed lines of 111 were left out, the first: .*{first}"
    assert re.search(left_out, printed)

    with pytest.raises(InputError, match="2 of 111 lines are malformed"):
        pre.prepare(data, out)  # which is finished

    write(data, good)
    monkeypatch.undo()  # values are counted over all chunks, however large
    pre.prepare(data, tmp_path / "without")
    without = contents(tmp_path / "without")
    found = contents(out)
    assert found.pop("prepared.json")["malformed"]["count"] == 2
    assert without.pop("prepared.json")
    assert found == without


def test_a_malformed_line_for_evaluation_is_named(tmp_path):
    data = write(tmp_path / "train.txt", random_rows(100))
    write(tmp_path / "dev.txt", [*random_rows(3), b"1\t2"])

    message = r"1 of 104 lines .*dev\.txt line 4: it has 2 columns"
    with pytest.raises(InputError, match=message):
        pre.prepare(data, tmp_path / "eval")


# ---- splits ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "more"), [(28, 0), (5, -1), (5, 0), (5, 1)])
def test_the_last_seventh_is_for_evaluation_and_not_counted(tmp_path, monkeypatch, rows, more):
    lines = [row(0, {}, {0: "a"})] * 24 + [row(1, {}, {0: "b"})] * 4
    # Of 5 rows: the last chunk has only evaluation rows. A line that begins at a chunk's last byte
    # belongs to it.
    line_bytes = len(lines[0]) + 1
    monkeypatch.setattr(pre, "CHUNK_BYTES", rows * line_bytes + more)

    pre.prepare(write(tmp_path / "clicks.tsv", lines), tmp_path / "out")

    train = everything(cr.ClickLog(tmp_path / "out", "train"))
    evaluation = everything(cr.ClickLog(tmp_path / "out", "eval"))
    assert train["ids"][:, 0].tolist() == [2] * 24
    assert evaluation["ids"][:, 0].tolist() == [1] * 4
    assert evaluation["label"].tolist() == [1] * 4


@pytest.mark.parametrize(
    "name",
    [
        "val.txt",
        "Validation.txt.gz",
        "dev.txt",
        "eval.txt",
        "my_valid_rows.txt",
        "Val.TXT",
    ],
)
def test_with_a_file_for_validation_all_of_train_is_trained_on(tmp_path, capsys, name):
    write(tmp_path / "train.txt", random_rows(20))
    write(tmp_path / name, random_rows(9, 1))
    write(tmp_path / "test.txt", [without_label(line) for line in random_rows(5)])

    report = pre.prepare(tmp_path)

    assert report["rows"] == {"train": 20, "eval": 9}
    sentence = f"trained on train.txt, evaluated on {name}; left out: test.txt"
    assert sentence in capsys.readouterr().out
    logs = [cr.open_clicks(str(tmp_path), split) for split in SPLITS]
    assert splits.said(*logs) == f" ({sentence})"


def test_a_labelled_test_file_is_evaluated_on(tmp_path, capsys):
    """As a file for validation is, number by number."""
    reports = {}
    for name in ("test", "val"):
        folder = tmp_path / name
        write(folder / "train.txt", random_rows(20))
        write(folder / f"{name}.txt.gz", random_rows(9, 1))
        reports[name] = pre.prepare(folder)

    made = {name: contents(tmp_path / name / "prepared") for name in reports}
    for of_name in made.values():
        del of_name["prepared.json"]
    assert made["test"] == made["val"]
    assert reports["test"]["rows"] == {"train": 20, "eval": 9}
    assert "trained on train.txt, evaluated on test.txt.gz\n" in capsys.readouterr().out


def test_a_test_file_without_labels_is_left_out(tmp_path):
    write(tmp_path / "train.txt", LINES)
    no_label = [row("") for _ in range(3)]
    unknown_label = [row("-1") for _ in range(3)]

    for lines in (WITHOUT_LABELS, no_label, unknown_label, WITH_COMMAS, []):
        write(tmp_path / "test.txt", lines)
        found = pre.find_sources(tmp_path)
        assert found.evaluation == []
        assert found.left_out == ["test.txt"]
        assert found.read_from()["evaluation"] == "the last seventh of train.txt"


def test_a_file_for_validation_comes_before_a_test_file(tmp_path):
    for name in ("train.txt", "val.txt", "test.txt"):
        write(tmp_path / name, LINES)

    found = pre.find_sources(tmp_path)

    assert found.evaluation == [tmp_path / "val.txt"]
    assert found.left_out == ["test.txt"]


def test_with_a_labelled_test_file_all_days_are_trained_on(tmp_path):
    for name in ("day_0", "day_1", "test.txt"):
        write(tmp_path / name, LINES)

    found = pre.find_sources(tmp_path)

    assert found.train == [tmp_path / "day_0", tmp_path / "day_1"]
    assert found.evaluation == [tmp_path / "test.txt"]


def test_of_two_test_files_only_a_labelled_one_counts(tmp_path):
    write(tmp_path / "train.txt", LINES)
    write(tmp_path / "test.txt", WITHOUT_LABELS)
    write(tmp_path / "testing.txt", LINES)

    found = pre.find_sources(tmp_path)
    assert found.evaluation == [tmp_path / "testing.txt"]
    assert found.left_out == ["test.txt"]

    write(tmp_path / "test.txt", LINES)
    with pytest.raises(InputError, match="has test, testing, which all say the test split; keep"):
        pre.find_sources(tmp_path)


def test_the_last_seventh_is_said(tmp_path, capsys):
    pre.prepare(write(tmp_path / "clicks.tsv", random_rows(14)), tmp_path / "out")

    said = "trained on clicks.tsv but its last seventh, evaluated on the last seventh of"
    assert said in capsys.readouterr().out


def test_what_says_a_split_and_is_not_read_is_named(tmp_path):
    for name in ("train.txt", "val.csv", "day.txt", "notes.csv"):
        (tmp_path / name).write_text("x")
    (tmp_path / "val").mkdir()

    assert pre.find_sources(tmp_path).left_out == ["day.txt", "val", "val.csv"]


# ---- tables ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Tables:
    """The values of C1, and what becomes of them."""

    values: list[str]
    flags: dict
    rows: list[int]  # of the 26 tables
    seen: int | None  # different values; None: they are not counted
    ids: list[int]


def many_values() -> list[str]:
    """Returns 0 to 9, 20 to 11 times each."""
    values = []
    for value in range(10):
        values += [f"{value:x}"] * (20 - value)
    return values


def equal_counts() -> list[str]:
    """Returns 0 to 99, odd numbers twice and even ones once."""
    values = []
    for value in range(100):
        values += [f"{value:x}"] * (1 + value % 2)
    return values


ODD_FIRST = [*range(1, 100, 2), *range(0, 100, 2)]  # twice, and once
TABLES = {
    "rare values share an id": Tables(
        values=["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d", "", ""],
        flags={"threshold": 3},
        rows=[4, *[2] * 25],
        seen=4,
        ids=[2] * 5 + [3] * 3 + [1] * 3 + [0] * 2,
    ),
    "larger tables are folded": Tables(
        values=many_values(),
        flags={"max_rows": 6},
        rows=[6, *[2] * 25],
        seen=10,
        ids=[2 + int(value, 16) % 4 for value in many_values()],
    ),
    "equal counts": Tables(
        values=equal_counts(),
        flags={},
        rows=[102, *[2] * 25],
        seen=100,
        ids=[2 + ODD_FIRST.index(int(value, 16)) for value in equal_counts()],
    ),
    "hashing needs no vocabulary": Tables(
        values=["0", "9", "a", "ffffffff", ""],
        flags={"hash_rows": 10},
        rows=[10] * 26,
        seen=None,
        ids=[1, 1, 2, 1 + (2**32 - 1) % 9, 0],
    ),
}


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_values_become_rows_of_tables(tmp_path, tables):
    lines = [row(0, {}, {0: value}) for value in tables.values]
    write(tmp_path / "dev.txt", lines)

    report = pre.prepare(write(tmp_path / "train.txt", lines), **tables.flags)

    assert report["table_rows"] == tables.rows
    vocabularies = list((tmp_path / "prepared").glob("vocabulary*"))
    if tables.seen is None:
        assert report["values_seen"] is None
        assert len(vocabularies) == 0
    else:
        assert report["values_seen"] == [tables.seen, *[0] * 25]
        assert len(vocabularies) == 26
    batch = everything(cr.ClickLog(tmp_path / "prepared", "train"))
    assert batch["ids"][:, 0].tolist() == tables.ids


# ---- input that cannot be prepared -------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"notes.md": []},
            "neither train.txt nor day_0 to day_23 .*found notes.md",
        ),
        ({"train.txt": []}, "train.txt is empty"),
        (
            {"train.txt": WITH_COMMAS},
            "not Criteo's text: 20 of its first 20 lines",
        ),
        ({"train.txt": [b"x" * 2**20]}, "has a line of more than 1048576 bytes"),
        ({"train.txt": LINES[:6]}, "6 rows; expected at least 7"),
        (
            {"train.txt": LINES, "val.txt": LINES, "valid.txt": LINES},
            "has val, valid, which all say the valid split; keep",
        ),
        ({"train.txt": LINES, "day_0": LINES}, "train.txt as well as day_0"),
    ],
)
def test_a_folder_that_cannot_be_prepared_is_explained(tmp_path, files, message):
    for name, lines in files.items():
        write(tmp_path / name, lines)

    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path, tmp_path / "out")


def test_a_file_without_labels_is_explained(tmp_path):
    data = write(tmp_path / "train.txt", WITHOUT_LABELS)

    with pytest.raises(InputError, match="line 1: it has 39 columns.*label missing"):
        pre.prepare(data, tmp_path / "out")
