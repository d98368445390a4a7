"""data/movielens.py on small folders that the tests make, in the three forms that MovieLens has had."""

import pickle
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data import criteo as cr
from data import histories as hs
from data import movielens as ml
from data import splits
from errors import InputError

RATINGS = [(user, item, 1 + (user * item) % 5) for user in (1, 2, 5) for item in range(1, 41)]
# 0: none, else comedy, drama or both; film 3 has no date but a year in its title
FILMS = {item: (1960 + item if item != 3 else 1995, ((), (1,), (2,), (1, 2))[item % 4]) for item in range(1, 41)}
USERS = {1: (24, "M", "artist"), 2: (53, "F", "doctor")}  # 5 is not known


def write(path: Path, lines: list[str], encoding: str = "utf-8") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """The 100k set's form."""
    write(tmp_path / "u.data", [f"{u}\t{i}\t{stars}\t880000000" for u, i, stars in RATINGS])
    films = []
    for item, (year, genres) in FILMS.items():
        date = f"01-Jan-{year}" if item != 3 else ""
        flags = "|".join(str(int(place in genres)) for place in range(3))
        films.append(f"{item}|Amélie ({year})|{date}||http://x|{flags}")
    write(tmp_path / "u.item", films, "latin-1")
    write(tmp_path / "u.user", [f"{u}|{age}|{gender}|{job}|12345" for u, (age, gender, job) in USERS.items()])
    return tmp_path


def both(folder: Path) -> dict[str, np.ndarray]:
    """All examples of the two splits, training first."""
    logs = [ml.MovieLens(folder, split) for split in ("train", "eval")]
    batches = [log.batch(np.arange(len(log))) for log in logs]
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def test_a_url_reads_as_its_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    url, bucket = f"memory://{tmp_path.name}", fsspec.filesystem("memory")
    for path in (*folder.glob("u.*"), write(folder / "u1.base", ["not needed"])):
        bucket.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    for split in ("train", "eval"):
        logs = [cr.open_clicks(data, split) for data in (url, str(folder))]
        np.testing.assert_equal(*(log.batch(np.arange(len(log))) for log in logs))
    np.testing.assert_equal(*(hs.read_histories(data) for data in (url, folder)))
    assert not [*(tmp_path / "cache").rglob("u1.base")]


def test_values_are_those_worked_out_by_hand(folder):
    log = ml.MovieLens(folder, "train")
    assert log.features == ("user", "item", "age", "gender", "occupation", "genres")
    assert log.table_rows == (4, 41, 8, 3, 3, 3) and log.lookups == (1, 1, 1, 1, 1, 2) and log.num_dense == 2
    chosen = {key: values[[5, 2, 2]] for key, values in log.batch(np.arange(len(log))).items()}
    for one in (log, pickle.loads(pickle.dumps(log))):
        np.testing.assert_equal(one.batch(np.array([5, 2, 2])), chosen)
    batch = both(folder)
    assert {key: (array.dtype, array.shape) for key, array in batch.items()} == {
        "dense": (np.float32, (120, 2)),
        "ids": (np.int32, (120, 7)),
        "label": (np.float32, (120,)),
        "present": (np.float32, (120, 7)),
    }
    assert (batch["ids"] >= 0).all() and (batch["ids"] < np.repeat(log.table_rows, log.lookups)).all()
    users = {1: (1, 2, 2, 1), 2: (2, 6, 1, 2), 5: (3, 0, 0, 0)}  # ids of user, age, gender, occupation
    places = {tuple(ids[:2]): number for number, ids in enumerate(batch["ids"].tolist())}
    assert len(places) == 120
    for user, item, stars in RATINGS:
        number = places[users[user][0], item]
        year, genres = FILMS[item]
        padded = [*genres, 0, 0][:2]
        assert batch["ids"][number].tolist() == [users[user][0], item, *users[user][1:], *padded]
        assert batch["present"][number].tolist() == [1] * 5 + [int(genre > 0) for genre in padded]
        assert batch["label"][number] == (stars >= 4)
        age = (USERS[user][0] - 35) / 15 if user in USERS else 0
        assert batch["dense"][number].tolist() == pytest.approx([(year - 1985) / 15, age])


def test_a_tenth_is_for_evaluation_whatever_else_is_rated(folder, tmp_path):
    pairs = {}
    for name, more in (("one", 0), ("two", 3000)):
        ratings = [*RATINGS, *((user, 1, 3) for user in range(10_000, 10_000 + more))]
        write(tmp_path / name / "ua.base", [f"{u}\t{i}\t{stars}\t0" for u, i, stars in ratings])
        log = ml.MovieLens(tmp_path / name, "eval")
        batch = log.batch(np.arange(len(log)))
        assert len(log) + len(ml.MovieLens(tmp_path / name, "train")) == len(ratings)
        pairs[name] = {tuple(ids) for ids in batch["ids"].tolist() if ids[0] <= 3}
        assert 0.07 < len(log) / len(ratings) < 0.13 or not more
    assert pairs["one"] == pairs["two"] and len(pairs["one"]) > 3


def test_the_other_forms_give_the_same_examples(folder, tmp_path):
    expected = both(folder)
    genres = {(): "(no genres listed)", (1,): "Comedy", (2,): "Drama", (1, 2): "Comedy|Drama"}
    films = [(item, f"Amélie, ou ({year})", genres[of]) for item, (year, of) in FILMS.items()]
    write(tmp_path / "1m" / "ratings.dat", [f"{u}::{i}::{stars}::0" for u, i, stars in RATINGS])
    write(tmp_path / "1m" / "movies.dat", ["::".join(map(str, film)) for film in films], "latin-1")
    write(tmp_path / "1m" / "users.dat", [f"{u}::{g}::{age}::{job}::1" for u, (age, g, job) in USERS.items()])
    np.testing.assert_equal(both(tmp_path / "1m"), expected)

    ratings = [f"{u},{i},{0.5 if stars == 1 else float(stars)},0" for u, i, stars in RATINGS]
    write(tmp_path / "csv" / "ratings.csv", ["userId,movieId,rating,timestamp", *ratings])
    write(tmp_path / "csv" / "movies.csv", ["movieId,title,genres", *(f'{i},"{t}",{g}' for i, t, g in films)])
    log = ml.MovieLens(tmp_path / "csv", "train")
    assert log.features == ("user", "item", "genres") and log.num_dense == 1
    batch = both(tmp_path / "csv")
    assert (batch["ids"] == expected["ids"][:, [0, 1, 5, 6]]).all()
    assert (batch["present"] == expected["present"][:, [0, 1, 5, 6]]).all()
    assert (batch["dense"] == expected["dense"][:, :1]).all() and (batch["label"] == expected["label"]).all()


HEADERS = {
    "as published": ["userId", "movieId", "rating", "timestamp"],
    "films first": ["movieId", "userId", "rating", "timestamp"],
    "all turned, other case, one more": ["Timestamp", "tag", "RATING", "movie_id", "USER_ID"],
    "with a byte order mark": ["\ufeffuserId", "movieId", "rating", "timestamp"],
}


@pytest.mark.parametrize("order", HEADERS)
def test_columns_of_a_csv_go_by_their_names(tmp_path, order):
    columns = HEADERS[order]
    places = {"userid": 0, "movieid": 1, "rating": 2, "timestamp": 3, "tag": 4}
    lines = [",".join(columns)]
    expected = []
    for user, item, stars in RATINGS:
        values = (user, item, stars, 880000000 + item, '"so, so"')
        lines.append(",".join(str(values[places[name.strip("\ufeff").lower().replace("_", "")]]) for name in columns))
        expected.append(values[:4])
    path = write(tmp_path / "ratings.csv", lines)
    assert ml.read_ratings(path, 0).tolist() == [list(map(float, row)) for row in expected]
    write(tmp_path / "movies.csv", ["genres,movieId,title", *(f'Comedy,{item},"A, B (1990)"' for item in FILMS)])
    log = ml.MovieLens(tmp_path, "train")
    assert log.table_rows == (4, 41, 2) and hs.read_histories(tmp_path)[1] == 40


@pytest.mark.parametrize(
    "header, found",
    [
        ("1,2,3.5,880000000", "'1, 2, 3.5, 880000000', which names the column userId 0 times"),
        ("userId,movieId,rating", "which names the column timestamp 0 times"),
        ("userId,movieId,rating,timestamp,user_id", "which names the column userId 2 times"),
        ("userId;movieId;rating;timestamp", "which names the column userId 0 times"),
        ("", "'nothing', which names"),
    ],
)
def test_a_csv_without_the_names_of_its_columns_is_refused(tmp_path, header, found):
    write(tmp_path / "ratings.csv", [header, *(f"{u},{i},{stars},0" for u, i, stars in RATINGS)])
    message = rf"ratings.csv line 1 is .*{found}.*expected a header with userId, movieId, rating, timestamp, once each"
    with pytest.raises(InputError, match=message):
        ml.MovieLens(tmp_path, "train")
    write(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp", *(f"{u},{i},{s},0" for u, i, s in RATINGS)])
    write(tmp_path / "movies.csv", ['1,"A (1990)",Comedy'])
    with pytest.raises(InputError, match="movies.csv line 1 is .*expected a header with movieId, title, genres"):
        ml.MovieLens(tmp_path, "train")


def test_a_start_says_which_ratings_are_for_what(folder):
    write(folder / "ua.base", ["1\t1\t3\t0"])
    write(folder / "ua.test", ["1\t1\t3\t0"])
    logs = [ml.MovieLens(folder, split) for split in ("train", "eval")]
    said = (
        "trained on u.data but a tenth by a hash, evaluated on a tenth of u.data by a hash; left out: ua.base, ua.test"
    )
    assert splits.said(*logs) == f" ({said})"


def test_ratings_alone_are_enough(tmp_path):
    write(tmp_path / "u.data", [f"{u}\t{i}\t{stars}\t0" for u, i, stars in RATINGS])
    log = cr.open_clicks(str(tmp_path), "train")
    assert (log.features, log.table_rows, log.lookups) == (("user", "item"), (4, 41), (1, 1))
    batch = log.batch(np.arange(len(log)))
    assert set(batch) == {"dense", "ids", "label"}
    assert log.num_dense == 1 and batch["dense"].shape == (len(log), 1) and not batch["dense"].any()


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("u.data", "1\t2\t3", "3 columns instead of 4"),
        ("u.data", "1\t2\t6\t0", "rating is '6'"),
        ("u.data", "1\t2\t\t0", "rating is ''"),
        ("u.data", "1\t2\tnan\t0", "rating is 'nan'"),
        ("u.data", "a\t2\t3\t0", "user is 'a'"),
        ("u.data", "1\t-2\t3\t0", "film is '-2'"),
        ("u.data", "1\t2\t3\tnoon", "time is 'noon'"),
        ("u.data", "", "1 columns instead of 4"),
        ("u.data", "1\t2\t3\udcff\t0", "not UTF-8"),
        ("u.item", "7|Title", "too few columns"),
        ("u.item", "7|Title|01-Jan-1990||x|0|2|1", "genres are not"),
        ("u.user", "7|24|M|artist", "4 columns instead of 5"),
        ("u.user", "7|old|M|artist|1", "age is 'old'"),
    ],
)
def test_malformed_lines_are_left_out_and_the_first_is_named(folder, name, line, reason):
    expected, (first, *lines) = both(folder), (folder / name).read_bytes().splitlines(keepends=True)
    strange = f"{line}\n".encode(errors="surrogateescape")
    (folder / name).write_bytes(b"".join([first, strange, *lines, b"broken\n"]))
    message = rf"2 of {len(lines) + 3} lines of {name} are malformed.*{name} line 2: .*{reason}"
    with pytest.raises(InputError, match=message):
        ml.MovieLens(folder, "train")
    with pytest.warns(UserWarning, match=f"2 malformed lines of {len(lines) + 3} were left out, the first: .*line 2: "):
        log = ml.MovieLens(folder, "train", bad_rows=2.1 / (len(lines) + 3))
    assert (log.batch(np.arange(len(log)))["ids"] == expected["ids"][: len(log)]).all()


def test_folders_without_ratings_are_refused(tmp_path):
    with pytest.raises(InputError, match="no ratings; expected u.data or ua.base"):
        ml.MovieLens(tmp_path, "train")
    (tmp_path / "u.data").touch()
    with pytest.raises(InputError, match="u.data is empty"):
        ml.MovieLens(tmp_path, "train")
    write(tmp_path / "u.data", ["1\t1\t3\t0"])
    assert len(ml.MovieLens(tmp_path, "train")) == 1
    with pytest.raises(InputError, match="none of them in the eval split"):  # one rating cannot be in both
        ml.MovieLens(tmp_path, "eval")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"userId,movieId,rating,timestamp\r1,2,3.0,4\r", "line 1 is no line of CSV: .* not with .r alone"),
        ("userId,movieId,rating,timestamp\n1,2,3.0,4\n".encode("utf-16"), "line 1 is not UTF-8 .byte 0."),
        (b"userId;movieId;rating;timestamp\n1;2;3.0;4\n", "names the column userId 0 times; .*separated by commas"),
        (b"userId,movieId,rating,timestamp\n1,2\r,3.0,4\n", "line 2: new-line character seen in unquoted field"),
    ],
)
def test_tables_of_other_forms_are_refused_in_a_sentence(tmp_path, content, said):
    (tmp_path / "ratings.csv").write_bytes(content)
    with pytest.raises(InputError, match=said):
        ml.MovieLens(tmp_path, "train")
