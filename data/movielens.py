"""MovieLens as a click log: does a user like a film, that is, rate it 4 or higher?

The files are those of https://grouplens.org/datasets/movielens: of the 100k set u.data (or
ua.base), u.item and u.user; of the 1M set ratings.dat, movies.dat and users.dat; of the later ones
ratings.csv and movies.csv, whose columns go by the names in their header, in any order. Only the
ratings are needed.

The 100k set has official splits, of two files each. The first of ua, ub, u1 to u5 that is whole is
taken: trained on its .base file, evaluated on its .test file. Without one, a tenth of the ratings,
by a hash of user and film, is for evaluation.

The features are the user, the film ("item"), the user's age, gender and occupation (where known),
and the film's genres: a bag with as many lookups as any film has genres. Users, films and words
have one vocabulary for both splits; id 0 is unknown.

Ratings are read line by line in Python, a second or two per million, and kept in memory: this is
for sets of up to some millions.
"""

import contextlib
import csv
import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from errors import InputError

RATING_FILES = ("u.data", "ua.base", "ratings.dat", "ratings.csv")
OFFICIAL_SPLITS = ("ua", "ub", "u1", "u2", "u3", "u4", "u5")  # in the order of preference
SPLIT_PATTERNS = ("u?.base", "u?.test")  # of their files
OTHER_FILES = ("u.item", "u.user", "movies.dat", "users.dat", "movies.csv")
FILES = (*RATING_FILES, *SPLIT_PATTERNS, *OTHER_FILES)  # names, and patterns of names
RATING_COLUMNS = ("userId", "movieId", "rating", "timestamp")  # of ratings.csv
FILM_COLUMNS = ("movieId", "title", "genres")  # of movies.csv
USER, FILM, STARS, TIME = range(4)  # columns of what `read_ratings` returns
LIKED = 4  # stars
AGES = (18, 25, 35, 45, 50, 56)  # where the age groups of the 1M set begin
YEAR = re.compile(r"\((\d{4})\)\s*$")  # at the end of a title

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True)
class Film:
    """What is known of a film."""

    year: int | None  # of release
    genres: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class User:
    """What is known of a user."""

    age: int  # in years; of the 1M set, where the age group begins
    gender: str  # M or F
    occupation: str


@dataclasses.dataclass(frozen=True)
class Feature:
    """A categorical feature of all users, or of all films."""

    name: str
    table_rows: int
    ids: np.ndarray  # int32 [users or films, lookups], 0 for unknown and for padding


@dataclasses.dataclass(frozen=True)
class RatingFiles:
    """The files of a folder's ratings."""

    train: Path
    test: Path | None = None  # of an official split; None: a tenth of `train`, by a hash

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are there, `train` first."""
        return (self.train,) if self.test is None else (self.train, self.test)


class MovieLens:
    """A folder with MovieLens' ratings, as a click log (see data/criteo.py for the interface).

    The dense features are the film's year and the user's age, each about -2 to 2 and 0 where it is
    unknown; one that is unknown for all is left out. If both are, a constant 0 is in their place.
    Malformed lines are left out with a warning that names the first.

    Raises InputError: there are no ratings, a file has a larger share of malformed lines than
    `max_bad_share`, or the two files of an official split share a rating.
    """

    columns_folder = None  # no maps, see data/criteo.py
    older_source = ""  # what versions read that knew no official split, where they read another one

    def __init__(self, folder: str | Path, split: Split, max_bad_share: float = 0.0001):
        folder = Path(folder).expanduser()
        files = find_ratings(folder)
        of_files = []
        for path in files.paths:
            of_files.append(read_ratings(path, max_bad_share))
        ratings = np.concatenate(of_files)
        known_films = _read_films(folder, max_bad_share)
        known_users = _read_users(folder, max_bad_share)
        self.split = split
        self._set_source(files)

        # Users and films are indexed by the order of their numbers in the files.
        rating_users = ratings[:, USER].astype(np.int64)
        rating_films = ratings[:, FILM].astype(np.int64)
        user_numbers, user_index = np.unique(rating_users, return_inverse=True)
        film_numbers, film_index = np.unique(rating_films, return_inverse=True)

        if files.test is None:
            in_evaluation = _in_evaluation(rating_users, rating_films)
        else:
            train, test = of_files
            _check_apart(files, train, test)
            in_evaluation = np.arange(len(ratings)) >= len(train)  # those of `test` come last
        wants_evaluation = split == "eval"
        kept = in_evaluation == wants_evaluation
        if not kept.any():
            raise InputError(
                f"{files.train} has {len(ratings)} ratings, none of them in the {split} split; "
                "it needs more"
            )
        self._user = user_index[kept].astype(np.int32)  # [ratings], index of the user
        self._film = film_index[kept].astype(np.int32)
        self._label = (ratings[kept, STARS] >= LIKED).astype(np.float32)

        # What is known of each user and of each film that has a rating; None: nothing.
        users = [known_users.get(number) for number in user_numbers.tolist()]
        films = [known_films.get(number) for number in film_numbers.tolist()]
        self._set_features(users, films, users_are_known=bool(known_users))
        self._set_dense(users, films)

    def _set_source(self, files: RatingFiles) -> None:
        """Sets `source` and `left_out`, see data/splits.py."""
        folder = files.train.parent
        if files.test is None:
            self.source = self._tenth(files.train)
        else:
            self.source = files.train.name if self.split == "train" else files.test.name
            with contextlib.suppress(InputError):  # a folder that those versions did not read
                self.older_source = self._tenth(single_rating_file(folder))

        of_splits = []
        for pattern in SPLIT_PATTERNS:
            of_splits += [path.name for path in folder.glob(pattern)]
        self.left_out = []
        for name in dict.fromkeys((*RATING_FILES, *sorted(of_splits))):  # ua.base is in both
            path = folder / name
            if path not in files.paths and path.is_file():
                self.left_out.append(name)

    def _tenth(self, path: Path) -> str:
        """Returns in words what of a file is read where a tenth of it is evaluated on."""
        if self.split == "train":
            return f"{path.name} but a tenth by a hash"
        return f"a tenth of {path.name} by a hash"

    def _set_features(
        self, users: list[User | None], films: list[Film | None], users_are_known: bool
    ) -> None:
        """Sets the names and sizes of the categorical features, and the ids of users and films.

        `batch` has the columns of "ids" in the same order: user, item, what is known of the user,
        genres.
        """
        user = _numbered("user", len(users))
        film = _numbered("item", len(films))
        attributes = _user_attributes(users) if users_are_known else []
        genres = _genres(films)

        # [users, columns]: the user, age, gender and occupation.
        columns = [feature.ids for feature in (user, *attributes)]
        self._user_columns = np.concatenate(columns, axis=1)
        self._film_ids = film.ids  # [films, 1]

        features = [user, film, *attributes]
        self._genres = None
        if genres is not None:
            features.append(genres)
            self._genres = genres.ids  # [films, most genres]
        self.features = tuple(feature.name for feature in features)
        self.table_rows = tuple(feature.table_rows for feature in features)
        self.lookups = tuple(feature.ids.shape[1] for feature in features)

    def _set_dense(self, users: list[User | None], films: list[Film | None]) -> None:
        """Sets the dense features, float32 [users] and [films]; None for one that is unknown."""
        ages = np.zeros(len(users), np.float32)
        for index, user in enumerate(users):
            if user is not None:
                ages[index] = (user.age - 35) / 15
        years = np.zeros(len(films), np.float32)
        for index, film in enumerate(films):
            if film is not None and film.year is not None:
                years[index] = (film.year - 1985) / 15

        # All 0 are left out: they are unknown, or as good as that, the same for all.
        self._age = ages if ages.any() else None
        self._year = years if years.any() else None
        known = [column for column in (self._year, self._age) if column is not None]
        self.num_dense = max(1, len(known))

    def __len__(self) -> int:
        return len(self._label)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns "dense", "ids" and "label" of ratings, and "present" where films have genres.

        See data/criteo.py for their shapes.
        """
        user = self._user[indices]
        film = self._film[indices]
        dense = []
        if self._year is not None:
            dense.append(self._year[film])
        if self._age is not None:
            dense.append(self._age[user])
        if not dense:
            dense.append(np.zeros(len(user), np.float32))

        # In the order of `features`.
        user_columns = self._user_columns[user]
        ids = [user_columns[:, :1], self._film_ids[film], user_columns[:, 1:]]
        if self._genres is not None:
            ids.append(self._genres[film])
        batch = {
            "dense": np.stack(dense, axis=1),
            "ids": np.concatenate(ids, axis=1, dtype=np.int32),
            "label": self._label[indices],
        }
        if self._genres is not None:
            most = self._genres.shape[1]
            present = np.ones(batch["ids"].shape, np.float32)
            present[:, -most:] = batch["ids"][:, -most:] > 0
            batch["present"] = present
        return batch


def _check_apart(files: RatingFiles, train: np.ndarray, test: np.ndarray) -> None:
    """Raises InputError where a rating to evaluate on is one to train on, too."""
    user_and_film = [USER, FILM]
    trained = set(map(tuple, train[:, user_and_film].tolist()))
    for user, film in test[:, user_and_film].tolist():
        if (user, film) in trained:
            raise InputError(
                f"{files.train.name} and {files.test.name} both have the rating of film {film:.0f} "
                f"by user {user:.0f}, so they are no split of one set; "
                "unpack MovieLens again, or remove one of the two"
            )


def _in_evaluation(users: np.ndarray, films: np.ndarray) -> np.ndarray:
    """Returns which pairs are in the tenth for evaluation, bool [n].

    SplitMix64's finaliser of the two numbers decides, so a pair is always on the same side,
    whatever else a file holds.
    """
    x = (users.astype(np.uint64) << np.uint64(32)) ^ films.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) % np.uint64(10) == 0


# Features


def _numbered(name: str, count: int) -> Feature:
    """Returns the feature that is the user or the film itself: ids 1, 2, … in their order."""
    ids = np.arange(1, count + 1, dtype=np.int32)[:, None]
    return Feature(name, count + 1, ids)


def _user_attributes(users: list[User | None]) -> list[Feature]:
    """Returns the users' age group, gender and occupation."""
    ages = np.zeros((len(users), 1), np.int32)
    genders = []
    occupations = []
    for index, user in enumerate(users):
        if user is None:
            genders.append(())
            occupations.append(())
            continue
        ages[index] = 1 + np.searchsorted(AGES, user.age, side="right")
        genders.append((user.gender,))
        occupations.append((user.occupation,))

    # Below the first of AGES is an age group, too; and 0 is unknown.
    age = Feature("age", len(AGES) + 2, ages)
    return [age, _bags("gender", genders), _bags("occupation", occupations)]


def _genres(films: list[Film | None]) -> Feature | None:
    """Returns the genres of all films, or None if there are none."""
    genres = [() if film is None else film.genres for film in films]
    return _bags("genres", genres) if any(genres) else None


def _bags(name: str, bags: Sequence[Sequence[str]]) -> Feature:
    """Returns a feature whose values are bags of words; words get ids from 1 on, in their order."""
    words = set()
    for bag in bags:
        words.update(bag)
    id_of = {word: number for number, word in enumerate(sorted(words), start=1)}

    lookups = max(1, max(len(bag) for bag in bags))
    ids = np.zeros((len(bags), lookups), np.int32)
    for index, bag in enumerate(bags):
        ids[index, : len(bag)] = [id_of[word] for word in bag]
    return Feature(name, len(words) + 1, ids)


# Reading


def _read(
    path: Path,
    separator: str,
    parse: Callable,
    max_bad_share: float,
    encoding: str = "utf-8",
    columns: Sequence[str] = (),
) -> list:
    """Returns what `parse(*fields)` returns for each line that is not malformed.

    Args:
        parse: raises ValueError with the reason for a malformed line.
        max_bad_share: share of malformed lines that may be left out.
        columns: names in the file's first line, in the order in which `parse` takes them; none:
            there is no such line.
    """
    results = []
    bad = 0
    first_bad = ""
    lines = 0
    with open(path, "rb") as file:
        header = None
        if columns:
            header = _Header(path, file.readline(), separator, columns)
        for number, line in enumerate(file, start=2 if columns else 1):
            lines += 1
            reason = None
            try:
                fields = _split(line.decode(encoding).rstrip("\r\n"), separator)
                if header is not None:
                    fields = header.chosen(fields)
                results.append(parse(*fields))
            except UnicodeDecodeError:  # of UTF-8: Latin-1 has no bytes that cannot be decoded
                reason = "it is not UTF-8"
            except (ValueError, csv.Error) as error:
                reason = str(error)
            if reason is not None:
                bad += 1
                first_bad = first_bad or f"{path} line {number}: {reason}"

    if not lines:
        raise InputError(f"{path} is empty; expected lines of columns separated by {separator!r}")
    if bad > max_bad_share * lines:
        raise InputError(
            f"{bad} of {lines} lines of {path.name} are malformed, more than the share of "
            f"{max_bad_share} that is left out in good faith; fix them. The first is {first_bad}"
        )
    if bad:
        warnings.warn(
            f"{bad} malformed lines of {lines} were left out, the first: {first_bad}",
            stacklevel=4,  # the line that calls MovieLens or read_histories
        )
    return results


class _Header:
    """The first line of a file with named columns.

    Raises InputError where it does not name those that are needed.
    """

    def __init__(self, path: Path, line: bytes, separator: str, columns: Sequence[str]):
        try:
            self._names = _split(line.decode("utf-8-sig").rstrip("\r\n"), separator)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} line 1 is not UTF-8 (byte {error.start}); convert the file"
            ) from error
        except csv.Error as error:
            raise InputError(
                f"{path} line 1 is no line of CSV: {error}; "
                "expected lines that end with \\n, and not with \\r alone"
            ) from error

        keys = [_column_key(name) for name in self._names]
        for name in columns:
            count = keys.count(_column_key(name))
            if count != 1:
                found = ", ".join(self._names)[:100] or "nothing"
                raise InputError(
                    f"{path} line 1 is {found!r}, which names the column {name} {count} times; "
                    f"expected a header with {', '.join(columns)}, "
                    "once each, in any order, separated by commas"
                )
        self._positions = [keys.index(_column_key(name)) for name in columns]

    def chosen(self, fields: list[str]) -> list[str]:
        """Returns a line's fields of the needed columns; raises ValueError for a malformed line."""
        if len(fields) != len(self._names):
            raise ValueError(
                f"it has {len(fields)} columns instead of {len(self._names)}: "
                f"{', '.join(self._names)}"
            )
        return [fields[position] for position in self._positions]


def _column_key(name: str) -> str:
    """Returns a column's name in small letters and without signs: userId and user_id are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _split(line: str, separator: str) -> list[str]:
    """Returns the fields of a line; commas separate as in CSV, where fields may be quoted."""
    if separator == ",":
        return next(csv.reader([line]), [])
    return line.split(separator)


def find_ratings(folder: str | Path) -> RatingFiles:
    """Finds an official split or, without one, a file of ratings.

    Raises InputError where there is neither.
    """
    folder = Path(folder).expanduser()
    for name in OFFICIAL_SPLITS:
        train = folder / f"{name}.base"
        test = folder / f"{name}.test"
        if train.is_file() and test.is_file():
            return RatingFiles(train, test)
    return RatingFiles(single_rating_file(folder))


def has_ratings(folder: Path) -> bool:
    """Returns whether `find_ratings` finds any."""
    try:
        find_ratings(folder)
    except InputError:
        return False
    return True


def single_rating_file(folder: str | Path) -> Path:
    """Finds one file of ratings in a folder, whatever official splits it has; raises InputError
    where there is none."""
    for name in RATING_FILES:
        path = Path(folder).expanduser() / name
        if path.is_file():
            return path
    raise InputError(f"{folder} has no ratings; expected {' or '.join(RATING_FILES)}")


def read_ratings(path: Path, max_bad_share: float) -> np.ndarray:
    """Reads user, film, stars and time in seconds, float64 [N, 4]: all are exact in it."""
    if path.suffix == ".csv":
        rows = _read(path, ",", _rating, max_bad_share, columns=RATING_COLUMNS)
    elif path.suffix == ".dat":
        rows = _read(path, "::", _rating, max_bad_share)
    else:
        rows = _read(path, "\t", _rating, max_bad_share)
    return np.array(rows, np.float64).reshape(-1, 4)


def _rating(*fields: str) -> tuple[int, int, float, int]:
    """Parses a line of any of the files of ratings."""
    if len(fields) != 4:
        raise ValueError(f"it has {len(fields)} columns instead of 4: user, film, rating, time")
    user = _parse_number(fields[0], "user")
    film = _parse_number(fields[1], "film")
    stars = fields[2]
    if not re.fullmatch(r"[0-5](\.\d+)?", stars) or float(stars) > 5:
        raise ValueError(f"its rating is {stars[:20]!r}, expected 0 to 5 stars")
    time = _parse_number(fields[3], "time", digits=10)
    return user, film, float(stars), time


def _parse_number(text: str, what: str, digits: int = 9) -> int:
    """Returns a whole number; raises ValueError where the text is none, or has more digits."""
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", text):
        raise ValueError(
            f"its {what} is {text[:20]!r}, expected a whole number of up to {digits} digits"
        )
    return int(text)


def _read_films(folder: Path, max_bad_share: float) -> dict[int, Film]:
    """Reads the films by their numbers; none if there is no file of them."""
    path = folder / "u.item"
    if path.is_file():
        return dict(_read(path, "|", _film_100k, max_bad_share, "latin-1"))
    path = folder / "movies.dat"
    if path.is_file():
        return dict(_read(path, "::", _film, max_bad_share, "latin-1"))
    path = folder / "movies.csv"
    if path.is_file():
        return dict(_read(path, ",", _film, max_bad_share, columns=FILM_COLUMNS))
    return {}


def _film_100k(*fields: str) -> tuple[int, Film]:
    """Parses a line of u.item: number, title, date, video date, address, and a flag per genre."""
    if len(fields) < 3:
        raise ValueError("it has too few columns")
    number, title, date = fields[:3]
    flags = fields[5:]
    if not flags or not set(flags) <= {"0", "1"}:
        raise ValueError("its genres are not a row of 0 and 1")

    match = re.search(r"(\d{4})$", date) or YEAR.search(title)
    year = int(match[1]) if match else None
    genres = []
    for column, flag in enumerate(flags):
        if flag == "1":
            genres.append(f"genre {column:02d}")
    return _parse_number(number, "film"), Film(year, tuple(genres))


def _film(*fields: str) -> tuple[int, Film]:
    """Parses a line of movies.dat or movies.csv."""
    if len(fields) != 3:
        raise ValueError(f"it has {len(fields)} columns instead of 3: film, title, genres")
    number, title, words = fields
    match = YEAR.search(title)
    year = int(match[1]) if match else None

    genres = ()
    if words != "(no genres listed)":
        genres = tuple(dict.fromkeys(filter(None, words.split("|"))))  # each once
    return _parse_number(number, "film"), Film(year, genres)


def _read_users(folder: Path, max_bad_share: float) -> dict[int, User]:
    """Reads the users by their numbers; none if there is no file of them."""
    path = folder / "u.user"
    if path.is_file():
        return dict(_read(path, "|", _user_100k, max_bad_share, "latin-1"))
    path = folder / "users.dat"
    if path.is_file():
        return dict(_read(path, "::", _user_1m, max_bad_share, "latin-1"))
    return {}


def _user_100k(*fields: str) -> tuple[int, User]:
    """Parses a line of u.user."""
    if len(fields) != 5:
        raise ValueError(
            f"it has {len(fields)} columns instead of 5: user, age, gender, occupation, zip code"
        )
    number, age, gender, occupation, _ = fields
    return _parse_number(number, "user"), User(_parse_number(age, "age"), gender, occupation)


def _user_1m(*fields: str) -> tuple[int, User]:
    """Parses a line of users.dat."""
    if len(fields) != 5:
        raise ValueError(
            f"it has {len(fields)} columns instead of 5: user, gender, age, occupation, zip code"
        )
    number, gender, age, occupation, _ = fields
    return _parse_number(number, "user"), User(_parse_number(age, "age"), gender, occupation)
