"""data/clicks.py: reading tables, and what their values become; pandas and scikit-learn are the
reference."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click_tables import FLAGS, draw, part, text_of, write

from data import clicks
from data import criteo as cr
from data.clicks import BadRow, Columns, Names, Notes
from data.prepare.clicks import prepare
from errors import InputError

NAMES = Names(dense=("price",), log=("views",), categorical=("user", "item"), multi=("tags",))
DRAWN = draw(300)


def raw(path: Path, columns=NAMES.inputs) -> pa.Table:
    """Returns all rows of a file as they stand in it."""
    return pa.concat_tables(clicks.read_tables(path, columns, rows=7))


def values(path: Path, name: str) -> list[str]:
    """Returns a CSV file's column as text."""
    return [value.decode() for value in raw(path, [name])[name].to_pylist()]


# ---- encoding ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The drawn log, prepared from CSV; of 300 rows about 30 are for evaluation."""
    folder = tmp_path_factory.mktemp("clicks")
    prepare(write(folder / "log.csv", DRAWN.columns), folder / "prepared", **FLAGS)
    return folder / "prepared"


def assert_encoded(encoded: dict[str, np.ndarray], folder: Path) -> None:
    """Asserts that encoded rows are those of the prepared arrays, bit for bit."""
    batches = []
    for split in ("train", "eval"):
        log = cr.ClickLog(folder, split)
        batches.append(log.batch(np.arange(len(log))))
    assert set(encoded) == {"dense", "ids", "present"}
    for key, array in encoded.items():
        expected = np.concatenate([batch[key] for batch in batches])
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype


@pytest.mark.parametrize(
    ("name", "separator"),
    [("log.csv", ","), ("log.csv", ";"), ("log.tsv.gz", "\t"), ("log.parquet", "")],
)
def test_encoding_rows_gives_the_prepared_arrays(tmp_path, prepared, name, separator):
    path = write(tmp_path / name, DRAWN.columns, separator)

    assert_encoded(Columns.load(prepared / "columns").encode(raw(path)), prepared)


def test_encoding_a_frame_of_pandas_gives_the_same(prepared, tmp_path):
    path = write(tmp_path / "log.csv", DRAWN.columns)
    columns = Columns.load(prepared / "columns")

    frame = pd.DataFrame(DRAWN.columns)
    text = pd.read_csv(path, dtype=str, keep_default_na=False)

    assert_encoded(columns.encode(frame), prepared)
    assert_encoded(columns.encode(text), prepared)


def test_columns_have_the_sizes_of_the_click_log(prepared):
    columns = Columns.load(prepared / "columns")
    log = cr.ClickLog(prepared, "train")

    assert columns.features == log.features == ("user", "item", "tags")
    assert columns.table_rows == log.table_rows
    assert columns.lookups == log.lookups
    assert columns.num_dense == log.num_dense == 2
    assert columns.names.inputs == ("price", "views", "user", "item", "tags")
    assert log.columns_folder == prepared / "columns"


def test_strange_values_are_counted(prepared):
    columns = Columns.load(prepared / "columns")
    most = columns.lookups[2]
    table = pa.table(
        {
            "price": ["", "NaN", "3"],
            "views": ["1", "2", "3"],
            "user": ["user 1", "nobody", ""],
            "item": ["i00", "i01", "i02"],
            "tags": ["t1|" * (most + 1), "", "t0| new |t1"],
        }
    )
    notes = Notes()

    encoded = columns.encode(table, notes)

    assert notes.counts() == {
        "missing": {"price": 2},
        "unknown": {"user": 2, "tags": 1},
        "cut": {"tags": 1},
    }
    assert "become 0 (the mean): price 2; " in notes.sentence()
    assert encoded["dense"][:2, 0].tolist() == [0, 0]
    assert encoded["ids"][1:, 0].tolist() == [0, 0]
    assert encoded["present"][:, 2:].sum(1).tolist() == [most, 0, 3]
    assert encoded["ids"][1, 2:].tolist() == [0] * most


def test_a_bag_that_is_too_long_keeps_its_frequent_values():
    vocabulary = pa.array(["often", "sometimes", "seldom"])
    feature = clicks.Category("tags", vocabulary, lookups=2, several=True)
    bags = pa.array(
        [
            ["new", "seldom", "often", "sometimes"],
            ["new", "seldom"],
            ["seldom", "new", "seldom", "seldom"],
            [],
        ]
    )

    ids, present = clicks._encode_bags(feature, bags, Notes())

    assert ids.tolist() == [[1, 2], [0, 3], [3, 3], [0, 0]]
    assert present.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_without_numbers_a_constant_is_the_dense_feature(tmp_path):
    log = part(DRAWN.columns, 0, 100)
    path = write(tmp_path / "log.csv", log)
    prepare(path, tmp_path / "out", label="clicked", categorical="user")

    encoded = Columns.load(tmp_path / "out/columns").encode(pd.DataFrame(log))

    assert encoded["dense"].tolist() == [[0]] * 100
    assert set(encoded) == {"dense", "ids"}
    assert cr.ClickLog(tmp_path / "out", "train").num_dense == 1


# ---- values ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([5, None, -1]), ["5", "", "-1"]),
        (pa.array([5.0, None, 0.5, float("nan"), -0.0]), ["5", "", "0.5", "", "0"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array(["a", None, "a"]).dictionary_encode(), ["a", "", "a"]),
        (pa.array(["NA", " b "], pa.large_string()), ["NA", " b "]),
        (pa.array([None, None]), ["", ""]),
        (pa.array(["ä".encode()]), ["ä"]),
        (pa.array([2**53 + 1, -(2**63)]), ["9007199254740993", "-9223372036854775808"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([2**53 + 1]).dictionary_encode(), ["9007199254740993"]),
    ],
)
def test_a_category_is_the_text_of_its_value(column, text):
    table = pa.table({"user": column})

    found = clicks.typed(table, Names(categorical=("user",)))

    assert found["user"].to_pylist() == text


@pytest.mark.parametrize(
    "column",
    [
        ["1", " 2.5", "-3e1", "", "NaN", "null", "N/A"],
        [1, 2.5, -30, None, float("nan"), None, None],
        pa.array([1, 2.5, -30, None, None, None, None], pa.float32()),
        pa.array(["1", "2.5", "-30", None, None, "", "na"]).dictionary_encode(),
    ],
)
def test_numbers_are_read_from_text_and_from_numbers(column):
    found = clicks.typed(pa.table({"price": column}), Names(dense=("price",)))

    expected = [1, 2.5, -30, *[np.nan] * 4]
    np.testing.assert_array_equal(found["price"].to_numpy(), expected)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**53 + 1, -(2**63), None]),
        pa.array([2**53 + 1, 2**64 - 1, None], pa.uint64()),
    ],
)
def test_large_integers_become_the_nearest_number(column):
    whole = clicks.typed(pa.table({"a": column}), Names(dense=("a",)))
    as_text = clicks.typed(pa.table({"a": column.cast(pa.string())}), Names(dense=("a",)))

    assert whole["a"][:2].to_pylist() == [float(value) for value in column[:2].to_pylist()]
    np.testing.assert_array_equal(whole["a"].to_numpy(), as_text["a"].to_numpy())


def test_ids_of_64_bits_stay_apart_in_every_kind_of_file(tmp_path):
    """Three ids that a float64 would make one; lists of them, too."""
    ids = [2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2]
    log = {"clicked": [0, 1] * 10, "user": ids * 5, "tags": [[number] for number in ids] * 5}
    flags = {"label": "clicked", "categorical": "user", "multi": "tags"}
    packed = {**log, "tags": [list(map(str, tags)) for tags in log["tags"]]}
    found = []
    for name, columns in (("log.csv", packed), ("log.parquet", log)):
        out = tmp_path / f"{name} prepared"
        prepare(write(tmp_path / name, columns), out, **flags)
        categories = Columns.load(out / "columns").categories
        found += [category.values.to_pylist() for category in categories]

    assert found == [sorted(map(str, ids), key=found[0].index)] * 4
    assert set(found[0]) == set(map(str, ids))


@pytest.mark.parametrize(
    "column",
    [
        ["b|a", " a || c|", "", "|"],
        [["b", "a"], ["a", "", "c "], [], None],
        pa.array([["b", "a"], ["a", None, "c"], None, []], pa.large_list(pa.string())),
    ],
)
def test_several_values_are_read_from_text_and_from_lists(column):
    found = clicks.typed(pa.table({"tags": column}), Names(multi=("tags",)))

    assert found["tags"].to_pylist() == [["b", "a"], ["a", "c"], [], []]


def test_lists_of_numbers_and_another_separator():
    table = pa.table({"films": [[3, 10], [7]], "tags": ["a b", "c"]})

    found = clicks.typed(table, Names(multi=("films", "tags"), separator=" "))

    assert found["films"].to_pylist() == [["3", "10"], ["7"]]
    assert found["tags"].to_pylist() == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    "column",
    [["0", "1", "TRUE", "false", "1.0"], [0, 1, 1, 0, 1], [0.0, 1.0, 1.0, 0.0, 1.0]],
)
def test_labels_are_0_and_1(column):
    found = clicks.labels(pa.chunked_array([column]), "clicked")

    assert found.tolist() == [0, 1, 1, 0, 1]


TIMES = {
    "whole numbers": (["3", "20"], "a number"),
    "numbers": (["1e3", "2000.5"], "a number"),
    "integers": ([3, 20], "a number"),
    "days": (["2026-01-31", "2026-02-01"], "a date"),
    "seconds": (["2026-01-31 23:59:59", "2026-02-01T00:00:00"], "a date"),
    "zones": (["2026-01-31T23:59:59Z", "2026-02-01T03:00:00+02:00"], "a date with a time zone"),
    "dates": (pa.array([20484, 20485], pa.date32()), "a date"),
    "timestamps": (pa.array([10**9, 2 * 10**9], pa.timestamp("us")), "a date"),
}


@pytest.mark.parametrize(("column", "kind"), TIMES.values(), ids=TIMES)
def test_times_are_numbers_that_rise(column, kind):
    column = pa.chunked_array([column])

    assert clicks.time_kind(column, "ts") == kind
    first, second = clicks.times(column, "ts", kind)
    assert first < second


def test_nanoseconds_of_whole_numbers_stay_apart():
    column = pa.chunked_array([["1700000000000000001", "1700000000000000002"]])

    first, second = clicks.times(column, "ts", "a number")

    assert second - first == 1


BAD = {
    "price": ("1,5", r"row 3: the column price has '1,5'; expected a number"),
    "views": ("-2", r"row 3: the column views has -2; --log is for counts"),
    "user": (b"\xff", r"row 3: the column user has text that is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_cannot_be_used_is_named(name):
    value, message = BAD[name]
    table = pa.table({column: ["1"] * 5 for column in NAMES.inputs})
    column = pa.array([b"1", b"2", value if isinstance(value, bytes) else value.encode()])
    bad = table.slice(0, 3).set_column(table.column_names.index(name), name, column)

    with pytest.raises(BadRow, match=message) as raised:
        clicks.typed(bad, NAMES)

    assert raised.value.row == 2
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_an_infinite_number_is_named():
    with pytest.raises(BadRow, match="row 2: the column price has inf; expected finite"):
        clicks.typed(pa.table({"price": ["1", "inf"]}), Names(dense=("price",)))


def test_columns_that_do_not_fit_are_named(prepared):
    columns = Columns.load(prepared / "columns")
    lists = pa.table({"user": [["a"]]})

    with pytest.raises(InputError, match="no column item in the table; it has .*user, tags, and"):
        columns.encode(pd.DataFrame(DRAWN.columns).drop(columns="item"))
    with pytest.raises(InputError, match="user has several values in a row; name it in --multi"):
        clicks.typed(lists, Names(categorical=("user",)))
    with pytest.raises(InputError, match=r"no .*nowhere/columns.json; expected the folder clicks"):
        Columns.load("/nowhere")


# ---- reading -----------------------------------------------------------------------------------
QUOTED = '\ufeff"a, b",c\r\n"1, ""2""",x\r\n\r\n"line\nline",5" y\r\n'


def test_quotes_line_ends_and_marks_are_those_of_csv(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(QUOTED.encode())

    assert values(path, "a, b") == ['1, "2"', "line\nline"]
    assert values(path, "c") == ["x", '5" y']
    assert values(path, "c") == pd.read_csv(path)["c"].tolist()


def test_lines_that_a_carriage_return_ends_are_refused(tmp_path):
    path = tmp_path / "mac.csv"
    path.write_bytes(b"user,clicked\ra,1\rb,0\r")
    with pytest.raises(InputError, match="mac.csv has a header that cannot be read.*end its lines"):
        clicks.read_header(path, ["user"])


READABLE = {
    "a byte order mark and an empty line": b"\xef\xbb\xbf\r\n\nuser,b\n1,2\n",
    "a name in quotes with a line break": b'"a\nb",user\n2,1\n',
    "a quote within a name": b'5" wide,user\n2,1\n',
    "a quote within a value, and one of several lines at the end": b'user,b\n1,"5"" x"\n3,5" y\n',
    "columns without names": b",user,\n2,1,\n",
    "a name twice that is not needed": b"b,b,user\n2,2,1\n",
    "no line end at the end of the file": b"user,b\r\n1,2",
    "a quote that closes at the end": b'user,b\n1,"2\n3"',
}


@pytest.mark.parametrize("name", READABLE)
def test_unusual_files_are_read(tmp_path, name):
    path = tmp_path / "log.csv"
    path.write_bytes(READABLE[name])

    assert values(path, "user")[0] == "1"


def test_an_odd_number_of_quotes_may_be_right(tmp_path):
    """A last value of several lines, whose quotes close, has swallowed no row."""
    path = tmp_path / "log.csv"
    path.write_bytes(b'user,b\n1,5" y\n2,"3\n4"\n')

    assert values(path, "b") == ['5" y', "3\n4"]


@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
@pytest.mark.parametrize("name", ["log.csv.gz", "log.parquet"])
def test_tables_have_the_rows_asked_for(tmp_path, monkeypatch, name, rows):
    monkeypatch.setattr(clicks, "BLOCK_BYTES", 500)
    path = write(tmp_path / name, DRAWN.columns)

    tables = list(clicks.read_tables(path, ["user"], rows))

    assert [table.num_rows for table in tables[:-1]] == [rows] * (len(tables) - 1)
    assert sum(table.num_rows for table in tables) == 300
    found = clicks.typed(pa.concat_tables(tables), Names(categorical=("user",)))
    assert found["user"].to_pylist() == DRAWN.columns["user"]


FILES = {
    "log.csv is empty": b"",
    "log.csv has no column user; its columns are a, b; name one": b"a,b\n1,2\n",
    "log.csv has 2 columns user; rename": b"user,user\n1,2\n",
    r"log.csv row 2: it has 3 columns instead of 2: '4,5,6'": b"user,b\n1,2\n4,5,6\n",
    r"log.csv row 1: it has 1 columns instead of 2: '1'": b"user,b\n1\n4,5\n",
    r"row of more than 400 bytes; is there a quote": b'user,b\n1,"2\n' + b"3,4\n" * 300,
    r"header that is not UTF-8": b"user,\xff\n1,2\n",
    r"no names of columns in its first line, '\\t\\t'; expected a header": b"\t\t\nuser\tb\n1\t2\n",
    r"no names of columns in its first line, '  '; expected a header": b"  \r\nuser,b\r\n1,2\r\n",
    r"no names of columns in its first line, ',,'; expected a header": b",,\n1,2,3\n",
    r"its columns are  user, b; remove the spaces around user$": b" user,b\n1,2\n",
    r"is not UTF-8 but UTF-16, or no text": "user,b\n1,2\n".encode("utf-16"),
    r"not UTF-8 but UTF-16, or no text; convert": "user,b\n1,2\n".encode("utf-16-be"),
    r"log.csv is empty; expected a header": b"\xef\xbb\xbf\n\r\n",
    r"log.csv has a header and no rows; expected at least": b"user,b",
    r"columns are b, user 1,2 3,4 ; is there a quote": b'b,"user\n1,2\n3,4\n',
    r"row 1: it has 3 columns instead of 2: '1,2,'; fix": b"user,b\n1,2,\n",
    r"row 1: it has 2 columns instead of 3: '1,2'; fix": b"user,b,\n1,2\n",
    r"row 2: it has 1 columns instead of 2: '   '; fix": b"user,b\n1,2\n   \n3,4\n",
    r"a quote \(\"\) that is not closed: the last row would go on": b'user,b\n1,2\n3,"4\n5,6\n7,8',
    r"a quote \(\"\) that is not closed: the last row would": b'user,b\n1,2\n3,"4\n',
}


@pytest.mark.parametrize("message", FILES)
def test_a_file_that_cannot_be_read_is_explained(tmp_path, monkeypatch, message):
    monkeypatch.setattr(clicks, "BLOCK_BYTES", 400)
    path = tmp_path / "log.csv"
    path.write_bytes(FILES[message])

    with pytest.raises(InputError, match=message):
        raw(path, ["user"])


def test_a_file_that_is_no_parquet_is_explained(tmp_path):
    path = tmp_path / "log.parquet"
    path.write_text("user,b\n")

    with pytest.raises(InputError, match="log.parquet cannot be read as a parquet file: "):
        raw(path, ["user"])


def test_a_packed_file_that_ends_early_is_explained(tmp_path):
    path = tmp_path / "log.csv.gz"
    noise = np.random.default_rng(0).integers(0, 10**9, 50_000)
    content = gzip.compress(text_of({"user": noise.tolist()}).encode())
    path.write_bytes(content[: len(content) // 2])

    with pytest.raises(InputError, match=r"log.csv.gz cannot be decompressed: .*ended before"):
        raw(path, ["user"])
