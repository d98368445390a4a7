"""data/movielens.py on small folders that the tests make, in the three forms that MovieLens has
had."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Rating:
    """A user's rating of a film."""

    user: int
    item: int
    stars: int


@dataclasses.dataclass(frozen=True)
class Film:
    """A film."""

    year: int
    has_date: bool  # otherwise its year is in its title alone
    genres: tuple[int, ...]  # numbers of comedy (1) and drama (2)


@dataclasses.dataclass(frozen=True)
class User:
    """What is known of a user."""

    age: int
    gender: str
    job: str


def make_ratings() -> list[Rating]:
    """Returns ratings of all films by three users."""
    made = []
    for user in (1, 2, 5):
        for item in range(1, 41):
            made.append(Rating(user, item, 1 + (user * item) % 5))
    return made


def make_films() -> dict[int, Film]:
    """Returns films without a genre, comedies, dramas, and films that are both, in turn."""
    genres = ((), (1,), (2,), (1, 2))
    films = {item: Film(1960 + item, True, genres[item % 4]) for item in range(1, 41)}
    films[3] = Film(1995, False, films[3].genres)
    return films


RATINGS = make_ratings()
FILMS = make_films()
USERS = {1: User(24, "M", "artist"), 2: User(53, "F", "doctor")}  # 5 is not known


# ---- files -------------------------------------------------------------------------------------
def write(path: Path, lines: list[str], encoding: str = "utf-8") -> Path:
    """Writes lines to a file; returns its path."""
    path.parent.mkdir(exist_ok=True)
    text = "".join(line + "\n" for line in lines)
    path.write_bytes(text.encode(encoding))
    return path


def rating_lines(separator: str, time: int = 0, ratings: list[Rating] = RATINGS) -> list[str]:
    """Returns ratings as user, film, stars and time."""
    lines = []
    for rating in ratings:
        fields = (rating.user, rating.item, rating.stars, time)
        lines.append(separator.join(map(str, fields)))
    return lines


def write_100k(folder: Path) -> None:
    """Writes the form of the 100k set."""
    write(folder / "u.data", rating_lines("\t", time=880000000))
    films = []
    for item, film in FILMS.items():
        date = f"01-Jan-{film.year}" if film.has_date else ""
        flags = "|".join(str(int(genre in film.genres)) for genre in range(3))
        films.append(f"{item}|Amélie ({film.year})|{date}||http://x|{flags}")
    write(folder / "u.item", films, "latin-1")
    users = []
    for number, user in USERS.items():
        users.append(f"{number}|{user.age}|{user.gender}|{user.job}|12345")
    write(folder / "u.user", users)


GENRE_NAMES = {(): "(no genres listed)", (1,): "Comedy", (2,): "Drama", (1, 2): "Comedy|Drama"}


def write_1m(folder: Path) -> None:
    """Writes the form of the 1M set."""
    write(folder / "ratings.dat", rating_lines("::"))
    films = []
    for item, film in FILMS.items():
        films.append(f"{item}::Amélie, ou ({film.year})::{GENRE_NAMES[film.genres]}")
    write(folder / "movies.dat", films, "latin-1")
    users = []
    for number, user in USERS.items():
        users.append(f"{number}::{user.gender}::{user.age}::{user.job}::1")
    write(folder / "users.dat", users)


def write_csv(folder: Path) -> None:
    """Writes the form of later sets, which have half stars and know nothing of users."""
    ratings = ["userId,movieId,rating,timestamp"]
    for rating in RATINGS:
        stars = 0.5 if rating.stars == 1 else float(rating.stars)
        ratings.append(f"{rating.user},{rating.item},{stars},0")
    write(folder / "ratings.csv", ratings)
    films = ["movieId,title,genres"]
    for item, film in FILMS.items():
        films.append(f'{item},"Amélie, ou ({film.year})",{GENRE_NAMES[film.genres]}')
    write(folder / "movies.csv", films)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The form of the 100k set."""
    write_100k(tmp_path)
    return tmp_path


# ---- reading -----------------------------------------------------------------------------------
def open_both(folder: object) -> list[ml.MovieLens]:
    """Returns the training and the evaluation split."""
    return [ml.MovieLens(folder, split) for split in ("train", "eval")]


def everything(log) -> dict[str, np.ndarray]:
    """Returns all examples of a log."""
    return log.batch(np.arange(len(log)))


def all_examples(folder: Path) -> dict[str, np.ndarray]:
    """Returns all examples of the two splits, training first."""
    train, evaluation = (everything(log) for log in open_both(folder))
    return {key: np.concatenate([train[key], evaluation[key]]) for key in train}


def refused(message: str, folder: Path, split: str = "train") -> None:
    with pytest.raises(InputError, match=message):
        ml.MovieLens(folder, split)


@pytest.fixture
def url(folder, tmp_path, monkeypatch) -> str:
    """The folder in a bucket, with a file that is not needed."""
    monkeypatch.setenv("DATA_CACHE_DIR", str(tmp_path / "cache"))
    bucket = fsspec.filesystem("memory")
    write(folder / "README", ["not needed"])
    for path in (*folder.glob("u*.*"), folder / "README"):
        bucket.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    return f"memory://{tmp_path.name}"


def test_a_url_reads_as_its_folder(folder, url, tmp_path):
    for split in ("train", "eval"):
        from_url = everything(cr.open_clicks(url, split))
        from_folder = everything(cr.open_clicks(str(folder), split))
        np.testing.assert_equal(from_url, from_folder)

    np.testing.assert_equal(hs.read_histories(url), hs.read_histories(folder))
    assert not list((tmp_path / "cache").rglob("README"))


def test_rows_come_in_the_order_asked_for(folder):
    log = ml.MovieLens(folder, "train")
    in_another_process = pickle.loads(pickle.dumps(log))
    rows = [5, 2, 2]
    expected = {key: values[rows] for key, values in everything(log).items()}

    for one in (log, in_another_process):
        np.testing.assert_equal(one.batch(np.array(rows)), expected)


def test_features_and_shapes_are_those_of_the_files(folder):
    log = ml.MovieLens(folder, "train")

    assert log.features == ("user", "item", "age", "gender", "occupation", "genres")
    assert log.table_rows == (4, 41, 8, 3, 3, 3)
    assert log.lookups == (1, 1, 1, 1, 1, 2)
    assert log.num_dense == 2
    batch = all_examples(folder)
    assert {key: (array.dtype, array.shape) for key, array in batch.items()} == {
        "dense": (np.float32, (120, 2)),
        "ids": (np.int32, (120, 7)),
        "label": (np.float32, (120,)),
        "present": (np.float32, (120, 7)),
    }
    assert (batch["ids"] >= 0).all()
    assert (batch["ids"] < np.repeat(log.table_rows, log.lookups)).all()


def test_values_are_those_worked_out_by_hand(folder):
    batch = all_examples(folder)
    user_ids = {1: 1, 2: 2, 5: 3}
    ids_of_what_is_known = {1: (2, 2, 1), 2: (6, 1, 2), 5: (0, 0, 0)}  # age, gender, occupation
    row_of = {}  # by the ids of user and film
    for row, ids in enumerate(batch["ids"].tolist()):
        row_of[ids[0], ids[1]] = row
    assert len(row_of) == 120

    for rating in RATINGS:
        row = row_of[user_ids[rating.user], rating.item]
        film = FILMS[rating.item]
        genres = [*film.genres, 0, 0][:2]
        age = 0
        if rating.user in USERS:
            age = (USERS[rating.user].age - 35) / 15

        user = (user_ids[rating.user], rating.item, *ids_of_what_is_known[rating.user])
        assert batch["ids"][row].tolist() == [*user, *genres]
        has_genre = [int(genre > 0) for genre in genres]
        assert batch["present"][row].tolist() == [1] * 5 + has_genre
        assert batch["label"][row] == (rating.stars >= 4)
        dense = [(film.year - 1985) / 15, age]
        assert batch["dense"][row].tolist() == pytest.approx(dense)


def test_a_tenth_is_for_evaluation_whatever_else_is_rated(tmp_path):
    more = [Rating(user, 1, 3) for user in range(10_000, 13_000)]
    pairs = {}
    for name, ratings in (("one", RATINGS), ("two", RATINGS + more)):
        write(tmp_path / name / "ua.base", rating_lines("\t", ratings=ratings))
        train, evaluation = open_both(tmp_path / name)

        assert len(evaluation) + len(train) == len(ratings)
        if name == "two":
            assert 0.07 < len(evaluation) / len(ratings) < 0.13
        ids = everything(evaluation)["ids"].tolist()
        pairs[name] = {tuple(row) for row in ids if row[0] <= 3}

    assert pairs["one"] == pairs["two"]
    assert len(pairs["one"]) > 3


def test_the_form_of_the_1m_set_gives_the_same_examples(folder, tmp_path):
    write_1m(tmp_path / "1m")

    np.testing.assert_equal(all_examples(tmp_path / "1m"), all_examples(folder))


def test_the_csv_form_gives_the_same_without_what_users_are(folder, tmp_path):
    expected = all_examples(folder)
    write_csv(tmp_path / "csv")

    log = ml.MovieLens(tmp_path / "csv", "train")
    batch = all_examples(tmp_path / "csv")

    assert log.features == ("user", "item", "genres")
    assert log.num_dense == 1
    columns = [0, 1, 5, 6]
    assert (batch["ids"] == expected["ids"][:, columns]).all()
    assert (batch["present"] == expected["present"][:, columns]).all()
    assert (batch["dense"] == expected["dense"][:, :1]).all()
    assert (batch["label"] == expected["label"]).all()


def test_ratings_alone_are_enough(tmp_path):
    write(tmp_path / "u.data", rating_lines("\t"))

    log = cr.open_clicks(str(tmp_path), "train")

    assert log.features == ("user", "item")
    assert log.table_rows == (4, 41)
    assert log.lookups == (1, 1)
    assert log.num_dense == 1
    batch = everything(log)
    assert set(batch) == {"dense", "ids", "label"}
    assert batch["dense"].shape == (len(log), 1)
    assert not batch["dense"].any()


def test_a_start_says_which_ratings_are_for_what(folder):
    write(folder / "ua.base", ["1\t1\t3\t0"])
    write(folder / "u1.test", ["1\t1\t3\t0"])

    trained = "trained on u.data but a tenth by a hash"
    evaluated = "evaluated on a tenth of u.data by a hash"
    said = f"{trained}, {evaluated}; left out: ua.base, u1.test"
    assert splits.said(*open_both(folder)) == f" ({said})"


# ---- official splits ---------------------------------------------------------------------------
# Every fourth rating is a test rating.
BASE = [rating for number, rating in enumerate(RATINGS) if number % 4]
TEST = RATINGS[::4]


def write_split(folder: Path, name: str, base: list[Rating], test: list[Rating]) -> None:
    """Writes the two files of an official split."""
    write(folder / f"{name}.base", rating_lines("\t", ratings=base))
    write(folder / f"{name}.test", rating_lines("\t", ratings=test))


def said_of(folder: object) -> str:
    """Returns what the first line of a run says of its data."""
    return splits.said(*(cr.open_clicks(str(folder), split) for split in ("train", "eval")))


def test_an_official_split_has_the_ratings_of_its_two_files(folder):
    by_pair = {}
    by_hash = all_examples(folder)
    for row, ids in enumerate(by_hash["ids"].tolist()):
        by_pair[ids[0], ids[1]] = row
    write_split(folder, "ua", BASE, TEST)
    user_ids = {1: 1, 2: 2, 5: 3}

    for log, ratings in zip(open_both(folder), (BASE, TEST), strict=True):
        assert log.table_rows == (4, 41, 8, 3, 3, 3)  # one vocabulary for both
        rows = [by_pair[user_ids[rating.user], rating.item] for rating in ratings]
        expected = {key: values[rows] for key, values in by_hash.items()}
        np.testing.assert_equal(everything(log), expected)


TAKEN = {  # by the files beside u.data
    ("ua.base", "ua.test", "ub.base", "ub.test", "u1.base", "u1.test"): "ua",
    ("ub.base", "ub.test", "u1.base", "u1.test"): "ub",
    ("u1.base", "u1.test", "u2.base", "u2.test"): "u1",
    ("ua.base", "u2.base", "u2.test"): "u2",
    ("ua.test", "u5.base", "u5.test"): "u5",
    ("ua.base", "ub.test"): "",
}


@pytest.mark.parametrize("files", TAKEN, ids=" ".join)
def test_the_first_whole_official_split_is_taken_and_said(folder, files):
    for name in files:
        ratings = BASE if name.endswith(".base") else TEST
        write(folder / name, rating_lines("\t", ratings=ratings))
    name = TAKEN[files]
    taken = (f"{name}.base", f"{name}.test") if name else ("u.data",)

    said = said_of(folder)

    if name:
        assert f" (trained on {name}.base, evaluated on {name}.test; left out: u.data" in said
    else:
        assert "trained on u.data but a tenth by a hash" in said
    for other in ("u.data", *files):
        assert (other in said.partition("left out: ")[2]) == (other not in taken)


def test_a_run_records_the_split_and_what_older_versions_read(folder, tmp_path):
    older = splits.sources_of(*open_both(folder))
    write_split(folder, "ua", BASE, TEST)
    logs = open_both(folder)
    (tmp_path / "alone").mkdir()
    write_split(tmp_path / "alone", "ub", BASE, TEST)  # which older versions refused

    assert older == {
        "train": "u.data but a tenth by a hash",
        "evaluation": "a tenth of u.data by a hash",
    }
    assert splits.sources_of(*logs) == {"train": "ua.base", "evaluation": "ua.test"}
    assert splits.sources_of(*logs, of="older_source") == older
    alone = open_both(tmp_path / "alone")
    expected = {"train": "ub.base", "evaluation": "ub.test"}
    assert splits.sources_of(*alone, of="older_source") == splits.sources_of(*alone) == expected


def test_an_official_split_is_copied_from_a_url(folder, request):
    write_split(folder, "u1", BASE, TEST)
    url = request.getfixturevalue("url")

    assert said_of(url) == said_of(folder)
    assert "evaluated on u1.test" in said_of(url)


def test_an_official_split_without_all_ratings_is_enough(tmp_path):
    write_split(tmp_path, "u3", BASE, TEST)

    assert said_of(tmp_path) == " (trained on u3.base, evaluated on u3.test)"


def test_ratings_in_both_files_of_a_split_are_refused(folder):
    write_split(folder, "ua", BASE, [*TEST, BASE[5]])

    shared = f"film {BASE[5].item} by user {BASE[5].user},"
    refused(f"ua.base and ua.test both have the rating of {shared}", folder)


def test_an_empty_test_file_is_refused(folder):
    write_split(folder, "ua", BASE, [])

    refused("ua.test is empty", folder)


# ---- columns of a CSV --------------------------------------------------------------------------
HEADERS = {
    "as published": ["userId", "movieId", "rating", "timestamp"],
    "films first": ["movieId", "userId", "rating", "timestamp"],
    "all turned, other case, one more": ["Timestamp", "tag", "RATING", "movie_id", "USER_ID"],
    "with a byte order mark": ["\ufeffuserId", "movieId", "rating", "timestamp"],
}


@pytest.mark.parametrize("order", HEADERS)
def test_columns_of_a_csv_go_by_their_names(tmp_path, order):
    columns = HEADERS[order]
    lines = [",".join(columns)]
    expected = []
    for rating in RATINGS:
        time = 880000000 + rating.item
        values = {
            "userid": str(rating.user),
            "movieid": str(rating.item),
            "rating": str(rating.stars),
            "timestamp": str(time),
            "tag": '"so, so"',
        }
        fields = []
        for column in columns:
            name = column.strip("\ufeff").lower().replace("_", "")
            fields.append(values[name])
        lines.append(",".join(fields))
        expected.append([float(rating.user), float(rating.item), float(rating.stars), float(time)])
    path = write(tmp_path / "ratings.csv", lines)
    films = [f'Comedy,{item},"A, B (1990)"' for item in FILMS]
    write(tmp_path / "movies.csv", ["genres,movieId,title", *films])

    assert ml.read_ratings(path, 0).tolist() == expected
    assert ml.MovieLens(tmp_path, "train").table_rows == (4, 41, 2)
    assert hs.read_histories(tmp_path)[1] == 40


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (
            "1,2,3.5,880000000",
            "'1, 2, 3.5, 880000000', which names the column userId 0 times",
        ),
        ("userId,movieId,rating", "which names the column timestamp 0 times"),
        (
            "userId,movieId,rating,timestamp,user_id",
            "which names the column userId 2 times",
        ),
        (
            "userId;movieId;rating;timestamp",
            "which names the column userId 0 times",
        ),
        ("", "'nothing', which names"),
    ],
)
def test_ratings_without_the_names_of_their_columns_are_refused(tmp_path, header, found):
    write(tmp_path / "ratings.csv", [header, *rating_lines(",")])

    expected = "expected a header with userId, movieId, rating, timestamp, once each"
    refused(rf"ratings.csv line 1 is .*{found}.*{expected}", tmp_path)


def test_films_without_the_names_of_their_columns_are_refused(tmp_path):
    header = "userId,movieId,rating,timestamp"
    write(tmp_path / "ratings.csv", [header, *rating_lines(",")])
    write(tmp_path / "movies.csv", ['1,"A (1990)",Comedy'])

    expected = "expected a header with movieId, title, genres"
    refused(f"movies.csv line 1 is .*{expected}", tmp_path)


# ---- what cannot be read -----------------------------------------------------------------------
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
    expected = all_examples(folder)
    good_lines = (folder / name).read_bytes().splitlines(keepends=True)
    malformed = f"{line}\n".encode(errors="surrogateescape")
    lines = [good_lines[0], malformed, *good_lines[1:], b"broken\n"]
    (folder / name).write_bytes(b"".join(lines))

    first = rf"{name} line 2: .*{reason}"
    refused(rf"2 of {len(lines)} lines of {name} are malformed.*{first}", folder)

    left_out = f"2 malformed lines of {len(lines)} were left out, the first: .*line 2: "
    with pytest.warns(UserWarning, match=left_out):
        log = ml.MovieLens(folder, "train", max_bad_share=2.1 / len(lines))
    assert (everything(log)["ids"] == expected["ids"][: len(log)]).all()


def test_folders_without_ratings_are_refused(tmp_path):
    refused("no ratings; expected u.data or ua.base", tmp_path)

    (tmp_path / "u.data").touch()
    refused("u.data is empty", tmp_path)


def test_one_rating_cannot_be_in_both_splits(tmp_path):
    write(tmp_path / "u.data", ["1\t1\t3\t0"])

    assert len(ml.MovieLens(tmp_path, "train")) == 1
    refused("none of them in the eval split", tmp_path, "eval")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"userId,movieId,rating,timestamp\r1,2,3.0,4\r",
            "line 1 is no line of CSV: .* not with .r alone",
        ),
        (
            "userId,movieId,rating,timestamp\n1,2,3.0,4\n".encode("utf-16"),
            "line 1 is not UTF-8 .byte 0.",
        ),
        (
            b"userId;movieId;rating;timestamp\n1;2;3.0;4\n",
            "names the column userId 0 times; .*separated by commas",
        ),
        (
            b"userId,movieId,rating,timestamp\n1,2\r,3.0,4\n",
            "line 2: new-line character seen in unquoted field",
        ),
    ],
)
def test_tables_of_other_forms_are_refused_in_a_sentence(tmp_path, content, message):
    (tmp_path / "ratings.csv").write_bytes(content)

    refused(message, tmp_path)
