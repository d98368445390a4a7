"""data/prepare/clicks.py: which rows are for evaluation, figures and vocabularies of the training
rows, refusals. pandas and scikit-learn are the reference.

What it shares with other preparations (resume, workers, URLs) is in test_prepare.py.
"""

import datetime
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click_tables import FLAGS, draw, part, write
from sklearn.preprocessing import StandardScaler

from data import clicks, splits
from data import criteo as cr
from data.prepare import clicks as pre
from errors import InputError

DRAWN = draw(400)
COLUMNS = DRAWN.columns
SIMPLE = {"label": "clicked", "categorical": "user"}
NAMES = {"clicked": [0, 1] * 10, "user": list("abcdefghij") * 2, "ts": list(range(20))}


def everything(folder: Path, split: str) -> dict[str, np.ndarray]:
    """Returns all rows of a prepared split as one batch."""
    log = cr.ClickLog(folder, split)
    return log.batch(np.arange(len(log)))


def users(folder: Path, split: str) -> list[str]:
    """Returns the user of each row of a prepared split; "?" for one without an id."""
    columns = clicks.Columns.load(folder / "columns")
    known = ["?", *columns.categories[0].values.to_pylist()]
    return [known[number] for number in everything(folder, split)["ids"][:, 0]]


# ---- values ------------------------------------------------------------------------------------
def test_a_hand_written_file_gives_values_worked_out_by_hand(tmp_path, capsys):
    log = {
        "price": [1, 3, None, 5, 100],
        "user": ["b", "a", "b", "c", "new"],
        "tags": ["x|y", "", "y", "z|y|x", "y|new"],
        "clicked": ["true", "false", "true", "false", "true"],
        "unused": list("vwxyz"),
    }
    more = {name: [values[3], values[4]] for name, values in log.items()}
    write(tmp_path / "train.csv", part(log, 0, 4), ";")
    write(tmp_path / "valid.csv.gz", more, "\t")
    flags = {"label": "clicked", "dense": "price", "categorical": "user", "multi": "tags"}

    report = pre.prepare(tmp_path, threshold=1, most=2, **flags)

    deviation = np.std([1, 3, 5])
    train = everything(tmp_path / "prepared", "train")
    assert train["label"].tolist() == [1, 0, 1, 0]
    expected = [-2 / deviation, 0, 0, 2 / deviation]
    assert train["dense"][:, 0].tolist() == pytest.approx(expected)
    # Users: b 1, a 2, c 3. Tags: y 1, x 2, z 3.
    assert train["ids"].tolist() == [[1, 2, 1], [2, 0, 0], [1, 1, 0], [3, 1, 2]]
    assert train["present"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    evaluation = everything(tmp_path / "prepared", "eval")
    assert evaluation["ids"].tolist() == [[3, 1, 2], [0, 1, 0]]
    assert evaluation["present"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert evaluation["dense"][1, 0] == pytest.approx(97 / deviation)
    assert report["rows"] == {"train": 4, "eval": 2}
    assert report["clicks"] == {"train": 2, "eval": 1}
    assert report["notes"]["train"] == {"missing": {"price": 1}, "unknown": {}, "cut": {"tags": 1}}
    assert "trained on train.csv, evaluated on valid.csv.gz\n" in capsys.readouterr().out


def test_numbers_are_standardised_by_the_training_rows(tmp_path):
    path = write(tmp_path / "log.parquet", COLUMNS)
    pre.prepare(path, **FLAGS)

    train = everything(tmp_path / "prepared", "train")["dense"]
    evaluation = everything(tmp_path / "prepared", "eval")["dense"]

    frame = pd.DataFrame(COLUMNS)
    raw = np.stack([frame["price"], np.log1p(frame["views"])], 1)
    scaler = StandardScaler().fit(raw[: len(train)])
    expected = np.nan_to_num(scaler.transform(raw))
    np.testing.assert_allclose(np.concatenate([train, evaluation]), expected, atol=1e-5)
    missing = frame["price"].isna()[: len(train)]
    assert missing.sum() > 5
    assert not train[missing, 0].any()


def test_ids_come_by_the_counts_of_pandas(tmp_path):
    path = write(tmp_path / "log.csv", COLUMNS)
    report = pre.prepare(path, threshold=12, **FLAGS)
    frame = pd.DataFrame(COLUMNS)[: report["rows"]["train"]]

    columns = clicks.Columns.load(tmp_path / "prepared/columns")

    series = {"user": frame["user"], "item": frame["item"], "tags": frame["tags"].explode()}
    for category in columns.categories:
        counts = series[category.name].value_counts()
        ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        expected = [value for value, count in ranked if count >= 12]
        assert category.values.to_pylist() == expected
        assert len(expected) > 0
    assert report["table_rows"][1] < report["values_seen"][1] + 1
    assert report["lookups"][2] == frame["tags"].str.len().max()


def test_values_of_many_chunks_are_counted_once(tmp_path, monkeypatch):
    path = write(tmp_path / "log.csv", COLUMNS)
    whole = pre.prepare(path, tmp_path / "whole", **FLAGS)
    monkeypatch.setattr(pre, "CHUNK_ROWS", 9)
    monkeypatch.setattr(pre, "MERGED_AT_LEAST", 5)

    chunked = pre.prepare(path, tmp_path / "chunked", **FLAGS)

    assert chunked == whole
    for split in ("train", "eval"):
        one = everything(tmp_path / "whole", split)
        other = everything(tmp_path / "chunked", split)
        np.testing.assert_allclose(one.pop("dense"), other.pop("dense"), atol=1e-6)
        np.testing.assert_equal(one, other)


def test_an_empty_value_is_a_value(tmp_path):
    log = {**NAMES, "user": ["", "a"] * 9 + ["", ""]}

    pre.prepare(write(tmp_path / "log.csv", log), time="ts", **SIMPLE)

    assert users(tmp_path / "prepared", "train") == ["", "a"] * 9
    assert users(tmp_path / "prepared", "eval") == ["", ""]


def test_a_number_that_never_changes_is_said(tmp_path, capsys):
    path = write(tmp_path / "log.csv", {**NAMES, "price": [0.1] * 20})

    pre.main(
        [
            "--data",
            str(path),
            "--label=clicked",
            "--categorical=user",
            "--dense=price",
            "--workers=1",
        ]
    )

    printed = capsys.readouterr().out
    assert "price has no two values in the training rows, and becomes 0\n" in printed
    assert not everything(tmp_path / "prepared", "train")["dense"].any()


def test_a_table_has_no_more_rows_than_asked_for(tmp_path, capsys):
    path = write(tmp_path / "log.csv", COLUMNS)
    whole = pre.prepare(path, tmp_path / "whole", **FLAGS)

    report = pre.prepare(path, tmp_path / "cut", max_rows=10, **FLAGS)

    assert whole["table_rows"] == [41, 26, 9]
    assert report["table_rows"] == [10, 10, 9]
    ours = clicks.Columns.load(tmp_path / "cut/columns").categories
    theirs = clicks.Columns.load(tmp_path / "whole/columns").categories
    for category, uncut in zip(ours, theirs, strict=True):
        assert category.values.to_pylist() == uncut.values.to_pylist()[:9]
    ids = everything(tmp_path / "whole", "train")["ids"]
    ids[:, :2][ids[:, :2] >= 10] = 0
    np.testing.assert_array_equal(everything(tmp_path / "cut", "train")["ids"], ids)
    pre._summary(report)
    assert "table rows: user 10 of 40 values, item 10 of 25 values, tags 9 (" in (
        capsys.readouterr().out
    )


# ---- rows that are left out ---------------------------------------------------------------------
def broken_log(path: Path) -> str:
    """Writes 60 rows, of which the 3rd, 4th, 11th, 29th, 60th cannot be used, and 7th and 30th are
    malformed; returns the text of the others."""
    good = ["clicked,user,ts,price"]
    for number in range(60):
        good.append(f"{number % 2},u{number % 7},{number},{number / 2}")
    broken = list(good)
    broken[3] = "2,u,2,0"
    broken[4] = "0,\udcff,3,0"
    broken[7] = "0,u,6"
    broken[11] = "0,u,tomorrow,0"
    broken[29] = "0,u,28,1;5"
    broken[30] = "0,u,29,1,5"
    broken[60] = ",u,59,0"
    path.write_bytes("\n".join([*broken, ""]).encode(errors="surrogateescape"))
    kept = [line for number, line in enumerate(good) if broken[number] == line]
    return "\n".join([*kept, ""])


BROKEN_FLAGS = {"dense": "price", "time": "ts", **SIMPLE}


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_rows_that_cannot_be_used_are_left_out(tmp_path, monkeypatch, chunk_rows, capsys):
    """In chunks of any size, some of them empty; counted, and the first one is named."""
    monkeypatch.setattr(pre, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(clicks, "BLOCK_BYTES", 300)
    kept = broken_log(tmp_path / "log.csv")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/log.csv").write_text(kept)

    report = pre.prepare(tmp_path / "log.csv", tmp_path / "out", bad_rows=0.2, **BROKEN_FLAGS)

    first = f"{tmp_path}/log.csv row 3: the label clicked is '2'; expected 0 or 1 (or false, true)"
    assert report["malformed"] == {"rows": 60, "count": 7, "first": first}
    expected = pre.prepare(tmp_path / "kept", **BROKEN_FLAGS)
    assert report["rows"] == expected["rows"]
    assert report["rows"]["train"] + report["rows"]["eval"] == 53
    for split in ("train", "eval"):
        np.testing.assert_equal(
            everything(tmp_path / "out", split), everything(tmp_path / "kept/prepared", split)
        )
    capsys.readouterr()
    pre._summary(report)
    said = f"7 rows of 60 were left out, as they cannot be used; the first: {first}\n"
    assert said in capsys.readouterr().out


def test_a_malformed_row_may_be_the_first(tmp_path):
    kept = broken_log(tmp_path / "log.csv").splitlines()
    lines = [kept[0], "1,2", *kept[1:]]
    (tmp_path / "log.csv").write_text("\n".join(lines))

    report = pre.prepare(tmp_path / "log.csv", bad_rows=0.1, **BROKEN_FLAGS)

    first = f"{tmp_path}/log.csv row 1: it has 2 columns instead of 4: '1,2'"
    assert report["malformed"] == {"rows": 54, "count": 1, "first": first}


def test_rows_are_numbered_as_they_stand_in_the_file(tmp_path, monkeypatch):
    """Malformed rows before one count, too."""
    monkeypatch.setattr(pre, "CHUNK_ROWS", 10)
    lines = ["clicked,user", "1"]
    for number in range(40):
        lines.append(f"{number % 2},u")
    lines[20:20] = ["1,2,3", "1"]
    lines[33] = "7,u"
    (tmp_path / "log.csv").write_text("\n".join(lines))
    parts = tmp_path / "parts"
    parts.mkdir()
    names = pre._check_flags(pre.Flags("", **SIMPLE))

    pre._parse_file(tmp_path / "log.csv", names, "", 10, 0.5, parts, 0, parts / "count.json")

    chunk = pre.Parsed(pre._chunk_path(parts, 0, 2), 0).read()
    assert pre._left_out(chunk)["row"] == 32
    assert pre.read_json(parts / "count.json")["bad"]["count"] == 4


def test_too_many_rows_that_cannot_be_used_are_refused(tmp_path):
    """Also where a finished folder has more than are allowed now."""
    broken_log(tmp_path / "log.csv")
    message = r"7 of 60 rows cannot be used, more than the share 0.05 .*first is \S*log.csv row 3: "

    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path / "log.csv", bad_rows=0.05, **BROKEN_FLAGS)
    report = pre.prepare(tmp_path / "log.csv", bad_rows=0.2, **BROKEN_FLAGS)
    assert pre.prepare(tmp_path / "log.csv", bad_rows=0.3, **BROKEN_FLAGS) == report
    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path / "log.csv", bad_rows=0.05, **BROKEN_FLAGS)


OTHER_TABLES = {
    "20 of the first 20 rows of .*log.csv cannot be used, the first is .*row 1: the label": (
        "clicked,user,ts\n" + "no,u,1\n" * 20
    ),
    "15 of the first 25 rows of .* the first is .*log.csv row 1: it has 2 columns instead of 3": (
        "clicked,user,ts\n" + "0,u\n" * 15 + "1,u,1\n" * 10
    ),
    "log.csv has no row that can be used; .*log.csv row 1: it has 2 columns instead of 3": (
        "clicked,user,ts\n" + "0,u\n" * 15
    ),
    "log.csv row 3: the time ts is 'c'; expected a number, or": (
        "clicked,user,ts\n0,u,a\n1,u,b\n0,u,c\n"
    ),
}


@pytest.mark.parametrize("message", OTHER_TABLES)
def test_another_table_is_refused_before_it_is_parsed(tmp_path, message):
    (tmp_path / "log.csv").write_text(OTHER_TABLES[message])

    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path / "log.csv", bad_rows=0.9, time="ts", **SIMPLE)
    assert not (tmp_path / "prepared").exists()


def test_a_stopped_preparation_counts_what_it_left_out(tmp_path, monkeypatch):
    """Once, although the chunks that are there are not parsed again."""
    monkeypatch.setattr(pre, "CHUNK_ROWS", 10)
    broken_log(tmp_path / "log.csv")
    whole = pre.prepare(tmp_path / "log.csv", tmp_path / "whole", bad_rows=0.2, **BROKEN_FLAGS)
    parse = pre._parse
    chunks = 0

    def parse_three(*arguments):
        nonlocal chunks
        chunks += 1
        if chunks == 4:  # the first was that of the file's first rows
            raise KeyboardInterrupt
        return parse(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pre, "_parse", parse_three)
        pre.prepare(tmp_path / "log.csv", tmp_path / "out", bad_rows=0.2, **BROKEN_FLAGS)
    assert len(list((tmp_path / "out/parts").glob("*.arrow"))) == 2

    resumed = pre.prepare(tmp_path / "log.csv", tmp_path / "out", bad_rows=0.2, **BROKEN_FLAGS)

    assert resumed == whole


def test_bad_rows_given_after_a_refusal_lose_no_row(tmp_path):
    """The first command ends within a chunk, at a row with too few columns."""
    kept = broken_log(tmp_path / "log.csv").splitlines()
    lines = [*kept[:31], "1,2", *kept[31:]]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    sentence = "row 31: it has 2 columns instead of 4: .*leave out a share .* with --bad-rows 0.001"
    with pytest.raises(InputError, match=sentence):
        pre.prepare(tmp_path / "log.csv", tmp_path / "out", **BROKEN_FLAGS)

    report = pre.prepare(tmp_path / "log.csv", tmp_path / "out", bad_rows=0.1, **BROKEN_FLAGS)

    assert report["rows"]["train"] + report["rows"]["eval"] == 53
    assert report["malformed"]["rows"] == 54
    assert report["malformed"]["count"] == 1


def test_a_folder_of_an_older_version_has_the_flags_that_it_had(tmp_path):
    path = write(tmp_path / "log.csv", NAMES)
    pre.prepare(path, **SIMPLE)
    report = tmp_path / "prepared/prepared.json"
    content = pre.read_json(report)
    del content["flags"]["max_rows"]
    del content["malformed"]
    pre.write_json(report, content)

    assert pre.prepare(path, **SIMPLE) == content
    with pytest.raises(InputError, match="prepared with other --max-rows: 0, now 5; choose"):
        pre.prepare(path, max_rows=5, **SIMPLE)


# ---- splits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["whole", "float", "day", "second", "timestamp"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_last_rows_by_time_are_for_evaluation(tmp_path, capsys, kind, ending):
    """Wherever they stand; those of one time stay together."""
    day = datetime.datetime(2026, 1, 1)
    times = {
        "whole": lambda number: number,
        "float": lambda number: number + 0.5,
        "day": lambda number: (day + datetime.timedelta(days=number)).date().isoformat(),
        "second": lambda number: (day + datetime.timedelta(hours=number)).isoformat(" "),
        "timestamp": lambda number: day + datetime.timedelta(days=number),
    }[kind]
    shuffled = np.random.default_rng(0).permutation(len(DRAWN))
    log = {name: [values[row] for row in shuffled] for name, values in COLUMNS.items()}
    log["ts"] = [times(number) for number in log["ts"]]
    path = write(tmp_path / f"log.{ending}", log)

    report = pre.prepare(path, **FLAGS)

    # Of 400 rows 40; the time of the 360th belongs to the nearer side.
    numbers = np.array([COLUMNS["ts"][row] for row in shuffled])
    first = np.sort(numbers)[360]
    rows_from = {first: (numbers >= first).sum(), first + 1: (numbers > first).sum()}
    cut = min(rows_from, key=lambda time: abs(rows_from[time] - 40))
    is_train = numbers < cut
    assert report["rows"] == {"train": is_train.sum(), "eval": (~is_train).sum()}
    expected = np.array(log["clicked"])
    for split, rows in (("train", is_train), ("eval", ~is_train)):
        found = everything(tmp_path / "prepared", split)["label"]
        np.testing.assert_array_equal(found, expected[rows])
    later = min(time for number, time in zip(numbers, log["ts"], strict=True) if number >= cut)
    assert f"evaluated on log.{ending} from ts {str(later).removesuffix(' 00:00:00')}" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("times", "evaluated"),
    [
        ([1] * 10 + [2] * 10, 10),  # the only cut
        ([1] * 17 + [2] * 3, 3),
        ([1] * 16 + [2] * 4, 4),
        ([1] * 14 + [2] * 5 + [3], 1),  # 1 is nearer to 2 than 6
        ([1] * 14 + [2] * 2 + [3] * 4, 4),
        ([3] * 5 + [1] * 15, 5),
    ],
)
def test_rows_of_one_time_stay_on_one_side(tmp_path, times, evaluated):
    log = {**NAMES, "ts": times}
    twice = {name: values * 2 for name, values in log.items()}
    twice["clicked"] = [0, 1] * 10 + [1, 0] * 10

    report = pre.prepare(write(tmp_path / "log.csv", twice), time="ts", **SIMPLE)

    assert report["rows"]["eval"] == 2 * evaluated


def test_without_a_time_the_last_rows_of_the_files_count(tmp_path, capsys):
    for day in (0, 1, 2, 10):
        write(tmp_path / f"day_{day}.csv", {**NAMES, "user": [f"of {day}"] * 20})

    pre.prepare(tmp_path, eval_share=0.2, **SIMPLE)

    expected = ["of 0"] * 20 + ["of 1"] * 20 + ["of 2"] * 20 + ["of 10"] * 4
    assert users(tmp_path / "prepared", "train") == expected
    assert users(tmp_path / "prepared", "eval") == ["of 10"] * 16
    said = "evaluated on the last 20 % of the rows of day_0.csv, day_1.csv, day_2.csv, day_10.csv"
    assert said in capsys.readouterr().out


def test_files_that_say_their_split_are_taken_for_it(tmp_path, capsys):
    write(tmp_path / "train-1.csv", {**NAMES, "user": ["a"] * 20})
    write(tmp_path / "train-2.parquet", {**NAMES, "user": ["b"] * 20})
    write(tmp_path / "validation.csv", {**NAMES, "user": ["a", "c"] * 10})
    write(tmp_path / "validation.csv.gz", NAMES)  # beside its plain twin
    write(tmp_path / "test.csv", NAMES)

    pre.prepare(tmp_path, **SIMPLE)

    assert users(tmp_path / "prepared", "train") == ["a"] * 20 + ["b"] * 20
    assert users(tmp_path / "prepared", "eval") == ["a", "?"] * 10
    said = (
        "trained on train-1.csv, train-2.parquet, evaluated on validation.csv; "
        "left out: test.csv, validation.csv.gz"
    )
    assert said in capsys.readouterr().out
    logs = [cr.open_clicks(str(tmp_path), split) for split in ("train", "eval")]
    assert splits.said(*logs) == f" ({said})"


def test_what_was_prepared_before_is_no_data(tmp_path):
    write(tmp_path / "log.csv", NAMES)
    pre.prepare(tmp_path, **SIMPLE)

    found = pre.find_sources(tmp_path, pre.Flags(str(tmp_path)))

    assert [path.name for path in found.paths] == ["log.csv"]


# ---- pages -------------------------------------------------------------------------------------
def page_flags() -> list[str]:
    """Returns the ARGS of each command of the pages that prepares own clicks."""
    found = []
    for page in ("README.md", "docs/data.md"):
        text = (Path(__file__).parent.parent / page).read_text()
        found += re.findall(r'make data +DATASET=clicks .*ARGS="(.*?)"', text)
    return found


def test_the_commands_of_the_pages_prepare_such_a_file(tmp_path):
    path = write(tmp_path / "log.csv", COLUMNS)
    commands = page_flags()
    assert len(commands) == 2

    for number, flags in enumerate(commands):
        out = tmp_path / f"out{number}"
        pre.main(["--data", str(path), "--out", str(out), "--workers=1", *flags.split()])
        assert cr.ClickLog(out, "train").features == ("user", "item")


# ---- what is refused ---------------------------------------------------------------------------
REFUSED = {
    "--label is missing; name the column of clicks": {"label": ""},
    "--categorical and --multi are missing; name a column": {"categorical": ""},
    "the column user is named twice": {"multi": "user"},
    "the column ts is named twice": {"time": "ts", "dense": "ts"},
    "--dense is 'a,,b'; expected names of columns": {"dense": "a,,b"},
    "the column 'a.b' cannot be a feature": {"categorical": "a.b"},
    "--separator is ; expected a text": {"separator": ""},
    "--eval-share is 1.0; expected a share": {"eval_share": 1.0},
    "--max-rows is 1; expected 0 .no limit., or 2 to": {"max_rows": 1},
    "--bad-rows is 1.0; expected a share from 0 to below 1": {"bad_rows": 1.0},
    "row 1: the column user has 'a'.*leave out a share of such rows with --bad-rows": {
        "dense": "user",
        "categorical": "ts",
    },
    "log.csv has no column age; its columns are clicked, user, ts; name": {"dense": "age"},
    "log.csv row 3: the label user is 'c'; expected 0 or 1": {"label": "user", "categorical": "ts"},
    "log.csv row 1: the time user is 'a'; expected a number, or a date": {
        "time": "user",
        "categorical": "ts",
    },
    "log.csv row 1: the column user has 'a'; expected a number": {
        "dense": "user",
        "categorical": "ts",
    },
    "has 20 rows, of which --eval-share 0.01 leaves 20 for training and 0": {"eval_share": 0.01},
}


@pytest.mark.parametrize("message", REFUSED)
def test_flags_that_do_not_fit_the_file_are_explained(tmp_path, message):
    log = {**NAMES, "user": ["a", "b", "c", "d"] * 5}
    if "label user" in message:
        log["user"] = ["0", "1", "c", "0"] * 5
    path = write(tmp_path / "log.csv", log)

    with pytest.raises(InputError, match=message):
        pre.prepare(path, **SIMPLE | REFUSED[message])


BAD_ROWS = {
    "log.csv row 18: the label clicked is '2'; expected 0 or 1": ("clicked", 17, 2),
    "log.csv row 18: the label clicked is ''; expected 0 or 1": ("clicked", 17, None),
    "log.csv row 13: the time ts is ''; expected a number": ("ts", 12, None),
    "log.csv row 13: the time ts is '2026-01-01'; expected a number": ("ts", 12, "2026-01-01"),
    "log.csv row 20: the column price has 'x'; expected a number": ("price", 19, "x"),
    "log.csv row 20: the column price has inf; expected finite": ("price", 19, "inf"),
    "all 20 rows of .*log.csv have the same ts; name another": ("ts", slice(None), 3),
    "the 18 rows for training have no click in clicked": ("clicked", slice(0, 18), 0),
    "the 18 rows for training have nothing but clicks": ("clicked", slice(0, 18), 1),
    "the 2 rows for evaluation have no click": ("clicked", slice(18, 20), 0),
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_rows_that_cannot_be_used_are_named(tmp_path, monkeypatch, message):
    """Also those of a later chunk."""
    name, rows, value = BAD_ROWS[message]
    log = {**NAMES, "price": [1.5] * 20}
    changed = np.array(log[name], object)
    changed[rows] = value
    log[name] = changed.tolist()
    monkeypatch.setattr(pre, "CHUNK_ROWS", 4)
    monkeypatch.setattr(pre, "HEAD_ROWS", 4)  # a look at all rows would find them
    path = write(tmp_path / "log.csv", log)

    with pytest.raises(InputError, match=message):
        pre.prepare(path, tmp_path / "out", time="ts", dense="price", **SIMPLE)


@pytest.mark.slow
def test_a_bad_row_in_another_process_is_named(tmp_path):
    bad = {**NAMES, "clicked": [0, 1] * 10 + [1] * 200 + [7]}
    for name in ("user", "ts"):
        bad[name] = bad[name] + [1] * 201
    write(tmp_path / "a.csv", NAMES)
    write(tmp_path / "b.csv", bad)

    with pytest.raises(InputError, match=r"b.csv row 221: the label clicked is '7'"):
        pre.prepare(tmp_path, workers=2, **SIMPLE)


FOLDERS = {
    "has no training rows; expected a CSV file .*found notes.md": {"notes.md": "x"},
    "has no training rows": {"test.csv": NAMES},
    "a.csv has a header and no rows": {"a.csv": {name: [] for name in NAMES}},
    "the time ts is a number in .*a.csv and a date in .*b.csv; write": {
        "a.csv": NAMES,
        "b.csv": {**NAMES, "ts": ["2026-01-01"] * 20},
    },
    "has val.csv for evaluation, and --time ts would choose": {
        "train.csv": NAMES,
        "val.csv": NAMES,
    },
    "b.csv has no column ts; its columns are clicked, user": {
        "a.csv": NAMES,
        "b.csv": {"clicked": [1], "user": ["a"]},
    },
}


@pytest.mark.parametrize("message", FOLDERS)
def test_a_folder_that_cannot_be_prepared_is_explained(tmp_path, message):
    for name, content in FOLDERS[message].items():
        if isinstance(content, dict):
            write(tmp_path / name, content)
        else:
            (tmp_path / name).write_text(content)

    with pytest.raises(InputError, match=message):
        pre.prepare(tmp_path, tmp_path / "out", time="ts", **SIMPLE)


def test_training_says_how_to_prepare_a_table(tmp_path):
    path = write(tmp_path / "log.csv", NAMES)

    for data in (path, tmp_path):
        with pytest.raises(InputError, match="make data DATASET=clicks DATA=.*--label clicked"):
            cr.open_clicks(str(data), "train")


@pytest.mark.parametrize("missing", ["columns.json", "vocabulary_user.parquet"])
def test_a_prepared_folder_without_its_maps_is_refused(tmp_path, missing):
    pre.prepare(write(tmp_path / "log.csv", NAMES), **SIMPLE)
    (tmp_path / "prepared/columns" / missing).unlink()

    with pytest.raises(InputError, match="columns is not whole: expected columns.json and"):
        cr.open_clicks(str(tmp_path), "train")
