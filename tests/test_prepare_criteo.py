"""data/prepare/criteo.py on small files that the tests make; plain Python loops are the reference."""

import itertools
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
    write(tmp_path / "train.txt.gz", [])  # the plain file is read
    write(tmp_path / "valid.txt", evaluation)
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
STRANGE = [
    (row(2), "label is '2'"),
    (row(""), "label is ''"),
    (row("01"), "label is '01'"),
    (row().split(b"\t", 1)[1], "39 columns instead of 40: is the label missing"),
    (row() + b"\t", "41 columns instead of 40"),
    (b"", "1 columns instead of 40"),
    (row(0, {4: "1.5"}), "column 6 is '1.5', expected an integer"),
    (row(0, {4: "0x1F"}), "column 6 is '0x1F'"),
    (row(0, {12: " 7"}), "column 14 is ' 7'"),
    (row(0, {0: "+7"}), "column 2 is '\\+7'"),
    (row(0, {0: "-"}), "column 2 is '-'"),
    (row(0, {0: "9" * 30}), "column 2 is '99999999999999999999…'"),
    (row(0, {0: "NULL"}), "column 2 is 'NULL'"),
    (row(0, {}, {0: "0000000g"}), "column 15 is '0000000g', expected up to 8"),
    (row(0, {}, {25: "123456789"}), "column 40 is '123456789'"),
    (row(0, {}, {1: '"ab"'}), "column 16 is '\"ab\"'"),
    (row(0, {}, {1: "1234"}) + b"\xff", "not UTF-8"),
    (row(0, {1: "٣"}), "column 3 is '٣'"),
    (row(0).replace(b"\t", b"\r\t", 1), "carriage return"),
    (b"\xef\xbb\xbf" + row(0), r"label is '\\ufeff0'"),
    (row(0, {0: "\0"}), "column 2 is"),
]


def test_a_malformed_line_is_left_out_and_explained():
    for (line, reason), place in itertools.product(STRANGE, range(3)):
        rows = pre.parse(b"\n".join([*[GOOD] * place, line, *[GOOD] * (2 - place)]) + b"\n")
        assert (rows.lines, rows.bad, rows.first_bad) == (3, 1, place), line
        assert re.search(reason, rows.why), rows.why
        assert rows.label.tolist() == [1, 1] and np.allclose(rows.dense[:, 0], math.log(6))
        assert rows.sparse[3].tolist() == [0x0BADCAFE] * 2


def test_unusual_but_good_lines_are_kept():
    unusual = [row(0, {0: "-0"}), row(1, {1: "007"}), row(1, {}, {0: "F"}), row(0, {2: "9" * 18}), *random_rows(20)]
    assert set(map(pre.malformed, unusual)) == {None}
    expected = pre.parse(b"\n".join(unusual) + b"\n")
    assert (expected.bad, len(expected.label)) == (0, 24)
    for text in (b"\r\n".join(unusual) + b"\r\n", b"\n".join(unusual)):  # as Windows has it; no end of the last line
        rows = pre.parse(text)
        assert rows.bad == 0 and (rows.sparse == expected.sparse).all() and (rows.dense == expected.dense).all()


@pytest.mark.parametrize(("rows", "more"), [(28, 0), (5, -1), (5, 0), (5, 1)])
def test_the_last_seventh_is_for_evaluation_and_its_values_are_not_counted(tmp_path, monkeypatch, rows, more):
    lines = [row(0, {}, {0: "a"})] * 24 + [row(1, {}, {0: "b"})] * 4
    # Of 5 rows: the last chunk has only evaluation rows. A line that begins at a chunk's last byte belongs to it.
    monkeypatch.setattr(pre, "CHUNK_BYTES", rows * (len(lines[0]) + 1) + more)
    pre.prepare(write(tmp_path / "clicks.tsv", lines), tmp_path / "out")
    train, evaluation = (everything(cr.ClickLog(tmp_path / "out", split)) for split in ("train", "eval"))
    assert train["ids"][:, 0].tolist() == [2] * 24
    assert evaluation["ids"][:, 0].tolist() == [1] * 4 and evaluation["label"].tolist() == [1] * 4


@pytest.mark.parametrize(
    "name", ["val.txt", "Validation.txt.gz", "dev.txt", "eval.txt", "my_valid_rows.txt", "Val.TXT"]
)
def test_a_file_for_validation_is_evaluated_on_and_all_of_train_is_trained_on(tmp_path, capsys, name):
    write(tmp_path / "train.txt", random_rows(20))
    write(tmp_path / name, random_rows(9, 1))
    write(tmp_path / "test.txt", [line.split(b"\t", 1)[1] for line in random_rows(5)])
    assert pre.prepare(tmp_path)["rows"] == {"train": 20, "eval": 9}
    sentence = f"trained on train.txt, evaluated on {name}; left out: test.txt"
    assert sentence in capsys.readouterr().out
    logs = [cr.open_clicks(str(tmp_path), split) for split in ("train", "eval")]
    assert splits.said(*logs) == f" ({sentence})"


def test_the_last_seventh_is_said(tmp_path, capsys):
    pre.prepare(write(tmp_path / "clicks.tsv", random_rows(14)), tmp_path / "out")
    assert "trained on clicks.tsv but its last seventh, evaluated on the last seventh of" in capsys.readouterr().out


def test_a_malformed_line_of_a_later_piece_has_its_number(tmp_path):
    good = [line + b"\n" for line in random_rows(5)]
    pieces = [b"".join(good[:3]), b"".join([*good[3:], row(3) + b"\n"])]
    pre._save_chunk(iter(pieces), tmp_path / "chunk.npz")
    chunk = cr.map_npz(tmp_path / "chunk.npz")
    assert (chunk["lines"], chunk["bad"], chunk["first_bad"]) == (6, 1, 5)


RARE = ["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d", "", ""]
EQUAL = [f"{value:x}" for value in range(100) for _ in range(1 + value % 2)]
ODD_FIRST = [*range(1, 100, 2), *range(0, 100, 2)]  # twice, and once
MANY = [f"{value:x}" for value in range(10) for _ in range(20 - value)]


@pytest.mark.parametrize(
    ("values", "flags", "rows", "seen", "ids"),
    [
        (RARE, {"threshold": 3}, [4, *[2] * 25], 4, [2] * 5 + [3] * 3 + [1] * 3 + [0] * 2),
        (MANY, {"max_rows": 6}, [6, *[2] * 25], 10, [2 + value % 4 for value in range(10) for _ in range(20 - value)]),
        (EQUAL, {}, [102, *[2] * 25], 100, [2 + ODD_FIRST.index(int(value, 16)) for value in EQUAL]),
        (["0", "9", "a", "ffffffff", ""], {"hash_rows": 10}, [10] * 26, None, [1, 1, 2, 1 + (2**32 - 1) % 9, 0]),
    ],
    ids=["rare values share an id", "larger tables are folded", "equal counts", "hashing needs no vocabulary"],
)
def test_values_become_rows_of_tables(tmp_path, values, flags, rows, seen, ids):
    lines = [row(0, {}, {0: value}) for value in values]
    write(tmp_path / "dev.txt", lines)
    prepared = pre.prepare(write(tmp_path / "train.txt", lines), **flags)
    assert prepared["table_rows"] == rows
    assert prepared["values_seen"] == (seen and [seen, *[0] * 25])
    assert everything(cr.ClickLog(tmp_path / "prepared", "train"))["ids"][:, 0].tolist() == ids
    assert len(list((tmp_path / "prepared").glob("vocabulary*"))) == (26 if seen else 0)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_malformed_lines_are_counted_and_the_first_is_named(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(pre, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(pre, "PIECE_BYTES", 1500)
    good = random_rows(100)
    lines = [*good[:77], row(3), *good[77:90], row(0, {0: "x"}), *good[90:]]
    data = write(tmp_path / name, lines)
    write(tmp_path / "dev.txt", random_rows(9))
    first = rf"{name}\S* line 78: its label is '3'"
    with pytest.raises(InputError, match=rf"2 of 111 lines are malformed, .*--bad-rows.*{first}"):
        pre.prepare(data, tmp_path / "out")
    pre.main(["--data", str(data), "--out", str(tmp_path / "out"), "--bad-rows", "0.02", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "resuming" in printed and re.search(f"2 malformed lines of 111 were left out, the first: .*{first}", printed)
    with pytest.raises(InputError, match="2 of 111 lines are malformed"):
        pre.prepare(data, tmp_path / "out")  # which is finished
    write(data, good)
    monkeypatch.undo()  # values are counted over all chunks, however large
    pre.prepare(data, tmp_path / "without")
    without, found = contents(tmp_path / "without"), contents(tmp_path / "out")
    assert found.pop("prepared.json")["malformed"]["count"] == 2 and without.pop("prepared.json")
    assert found == without
    write(tmp_path / "dev.txt", [*random_rows(3), b"1\t2"])
    with pytest.raises(InputError, match=r"1 of 104 lines .*dev\.txt line 4: it has 2 columns"):
        pre.prepare(data, tmp_path / "eval")


LINES = random_rows(20)
WITHOUT_LABELS = [line.split(b"\t", 1)[1] for line in LINES]
COMMAS = [line.replace(b"\t", b",") for line in LINES]
TWO_VALIDATIONS = {"train.txt": LINES, "val.txt": LINES, "valid.txt": LINES}
UNUSABLE = {
    "neither train.txt nor day_0 to day_23 .*found notes.md": ("", {"notes.md": []}),
    "train.txt is empty": ("", {"train.txt": []}),
    "line 1: it has 39 columns.*label missing": ("train.txt", {"train.txt": WITHOUT_LABELS}),
    "not Criteo's text: 20 of its first 20 lines": ("", {"train.txt": COMMAS}),
    "has a line of more than 1048576 bytes": ("", {"train.txt": [b"x" * 2**20]}),
    "6 rows; expected at least 7": ("", {"train.txt": LINES[:6]}),
    "has val, valid, which all say the valid split; keep": (
        "",
        dict.fromkeys(("train.txt", "val.txt", "valid.txt"), LINES),
    ),
    "train.txt as well as day_0": ("", {"train.txt": LINES, "day_0": LINES}),
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_input_that_cannot_be_prepared_is_explained(tmp_path, message):
    name, files = UNUSABLE[message]
    for file, lines in files.items():
        write(tmp_path / file, lines)
    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path / name, tmp_path / "out")


def test_what_says_a_split_and_is_not_read_is_named(tmp_path):
    for name in ("train.txt", "val.csv", "day.txt", "notes.csv"):
        (tmp_path / name).write_text("x")
    (tmp_path / "val").mkdir()
    assert pre.find_sources(tmp_path).left_out == ["day.txt", "val", "val.csv"]
