"""MovieLens as a click log: does a user like a film, that is, rate it 4 or higher?

The files are those of https://grouplens.org/datasets/movielens: of the 100k set u.data (or ua.base), u.item and u.user;
of the 1M set ratings.dat, movies.dat and users.dat; of the later ones ratings.csv and movies.csv, whose columns go by
the names in their header, in any order. Only the ratings are needed. A tenth of them, by a hash of user and film,
is for evaluation. The features are the user, the film, the user's age, gender and occupation (where known), and the
film's genres, a bag as long as the most genres a film has. Users, films and words have one vocabulary for both splits;
id 0 is unknown. Ratings are read line by line in Python, a second or two a million, and kept in memory: meant for sets
up to some millions.
"""

import csv
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from errors import InputError

RATING_FILES = ("u.data", "ua.base", "ratings.dat", "ratings.csv")
FILES = (*RATING_FILES, "u.item", "u.user", "movies.dat", "users.dat", "movies.csv")
RATING_COLUMNS = ("userId", "movieId", "rating", "timestamp")  # of ratings.csv
ITEM_COLUMNS = ("movieId", "title", "genres")  # of movies.csv
LIKED = 4  # stars
AGES = (18, 25, 35, 45, 50, 56)  # where the age groups of the 1M set begin
YEAR = re.compile(r"\((\d{4})\)\s*$")  # at the end of a title

Split = Literal["train", "eval"]


class Item(NamedTuple):
    """A film: year of release, or None, and genres."""

    year: int | None
    genres: tuple[str, ...]


class User(NamedTuple):
    """A user: age in years (of the 1M set: where the age group begins), M or F, occupation."""

    age: int
    gender: str
    occupation: str


class MovieLens:
    """A folder with MovieLens' ratings, as a click log (see data/criteo.py for the interface).

    Dense are the film's year, the user's age, each about -2 to 2 and 0 where it is unknown, or a constant 0 if neither
    is known of anything. Malformed lines are left out with a warning that names the first. Raises InputError: no
    ratings, or a file has a larger share of malformed lines than `bad_rows`.
    """

    def __init__(self, folder: str | Path, split: Split, bad_rows: float = 0.0001):
        folder, path = Path(folder).expanduser(), rating_file(folder)
        ratings = read_ratings(path, bad_rows)
        items, users = _read_items(folder, bad_rows), _read_users(folder, bad_rows)

        # A tenth, by a hash: see _in_evaluation.
        self.source = f"{path.name} but a tenth by a hash" if split == "train" else f"a tenth of {path.name} by a hash"
        others = [*RATING_FILES, *sorted(one.name for one in folder.glob("u?.test"))]  # ua.test belongs to ua.base
        self.left_out = [name for name in others if name != path.name and (folder / name).is_file()]
        user_ids, user = np.unique(ratings[:, 0].astype(np.int64), return_inverse=True)
        item_ids, item = np.unique(ratings[:, 1].astype(np.int64), return_inverse=True)
        kept = _in_evaluation(user_ids[user], item_ids[item]) == (split == "eval")
        if not kept.any():
            raise InputError(f"{path} has {len(ratings)} ratings, none of them in the {split} split; it needs more")
        self.split = split
        self._user, self._item = user[kept].astype(np.int32), item[kept].astype(np.int32)
        self._label = (ratings[kept, 2] >= LIKED).astype(np.float32)

        of_users = [users.get(number) for number in user_ids.tolist()]
        of_items = [items.get(number) for number in item_ids.tolist()]
        features, table_rows, lookups = ["user", "item"], [len(user_ids) + 1, len(item_ids) + 1], [1, 1]
        user_columns = [np.arange(1, len(user_ids) + 1)]
        if users:
            ages = [0 if one is None else 1 + int(np.searchsorted(AGES, one.age, side="right")) for one in of_users]
            user_columns.append(np.array(ages))
            features, table_rows, lookups = [*features, "age"], [*table_rows, len(AGES) + 2], [*lookups, 1]
            for name in ("gender", "occupation"):
                words = sorted({getattr(one, name) for one in of_users if one is not None})
                ids = {word: number for number, word in enumerate(words, start=1)}
                user_columns.append(np.array([0 if one is None else ids[getattr(one, name)] for one in of_users]))
                features, table_rows, lookups = [*features, name], [*table_rows, len(words) + 1], [*lookups, 1]
        self._user_ids = np.stack(user_columns, axis=1).astype(np.int32)  # [users, user, age, gender, occupation]

        genres = sorted({genre for one in of_items if one is not None for genre in one.genres})
        self._genres = None  # [films, most genres], 0 at padded places
        if genres:
            ids = {genre: number for number, genre in enumerate(genres, start=1)}
            self._genres = np.zeros((len(of_items), max(len(one.genres) for one in of_items if one)), np.int32)
            for row, one in zip(self._genres, of_items, strict=True):
                if one is not None:
                    row[: len(one.genres)] = [ids[genre] for genre in one.genres]
            features, table_rows = [*features, "genres"], [*table_rows, len(genres) + 1]
            lookups = [*lookups, self._genres.shape[1]]
        self.features, self.table_rows, self.lookups = tuple(features), tuple(table_rows), tuple(lookups)

        years = [0 if one is None or one.year is None else (one.year - 1985) / 15 for one in of_items]
        self._year = np.array(years, np.float32) if any(years) else None
        ages = [0 if one is None else (one.age - 35) / 15 for one in of_users]
        self._age = np.array(ages, np.float32) if any(ages) else None
        self.num_dense = max(1, (self._year is not None) + (self._age is not None))

    def __len__(self) -> int:
        return len(self._label)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {"dense": float32 [n, num_dense], "ids": int32 [n, S], "label": float32 [n]} of ratings, and where
        films have genres "present": float32 [n, S]."""
        user, item = self._user[indices], self._item[indices]
        of_user = self._user_ids[user]
        dense = [column[rows] for column, rows in ((self._year, item), (self._age, user)) if column is not None]
        ids = [of_user[:, :1], item[:, None] + 1, of_user[:, 1:]]
        if self._genres is not None:
            ids.append(self._genres[item])
        batch = {
            "dense": np.stack(dense or [np.zeros(len(user), np.float32)], axis=1),
            "ids": np.concatenate(ids, axis=1, dtype=np.int32),
            "label": self._label[indices],
        }
        if self._genres is not None:
            batch["present"] = np.ones(batch["ids"].shape, np.float32)
            most = self._genres.shape[1]
            batch["present"][:, -most:] = batch["ids"][:, -most:] > 0
        return batch


def _in_evaluation(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Picks a tenth of the pairs, by SplitMix64's finaliser: the same whatever else the file holds."""
    x = user.astype(np.uint64) << np.uint64(32) ^ item.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) % np.uint64(10) == 0


def _read(
    path: Path,
    separator: str,
    parse: Callable,
    bad_rows: float,
    encoding: str = "utf-8",
    columns: Sequence[str] = (),
):
    """Returns `parse(*fields)` of each line; it raises ValueError with the reason for a malformed one.

    Args:
        columns: names in the file's first line, in the order in which `parse` takes them; none: there is no such line.
    """
    results, bad, lines, first = [], 0, 0, ""
    with open(path, "rb") as file:
        header = _Header(path, file.readline(), separator, columns) if columns else None
        for number, line in enumerate(file, start=2 if columns else 1):
            lines += 1
            try:
                fields = _split(line.decode(encoding).rstrip("\r\n"), separator)
                results.append(parse(*(header.chosen(fields) if header else fields)))
            except UnicodeDecodeError:
                reason = "it is not UTF-8"
            except TypeError:
                reason = "it has too few columns"
            except (ValueError, csv.Error) as error:
                reason = str(error)
            else:
                continue
            bad += 1
            first = first or f"{path} line {number}: {reason}"
    if not lines:
        raise InputError(f"{path} is empty; expected lines of columns separated by {separator!r}")
    if bad > bad_rows * lines:
        raise InputError(
            f"{bad} of {lines} lines of {path.name} are malformed, more than the share of {bad_rows} that is left out "
            f"in good faith; fix them. The first is {first}"
        )
    if bad:
        warnings.warn(f"{bad} malformed lines of {lines} were left out, the first: {first}", stacklevel=4)
    return results


class _Header:
    """The first line of a file with named columns. Raises InputError where it does not name those that are needed."""

    def __init__(self, path: Path, line: bytes, separator: str, columns: Sequence[str]):
        try:
            self._names = _split(line.decode("utf-8-sig").rstrip("\r\n"), separator)
        except UnicodeDecodeError as error:
            raise InputError(f"{path} line 1 is not UTF-8 (byte {error.start}); convert the file") from error
        except csv.Error as error:
            what = f"{path} line 1 is no line of CSV: {error}"
            raise InputError(f"{what}; expected lines that end with \\n, and not with \\r alone") from error
        plain = [_plain(name) for name in self._names]
        for name in columns:
            count = plain.count(_plain(name))
            if count != 1:
                found = ", ".join(self._names)[:100] or "nothing"
                what = f"{path} line 1 is {found!r}, which names the column {name} {count} times"
                expected = f"expected a header with {', '.join(columns)}, once each, in any order, separated by commas"
                raise InputError(f"{what}; {expected}")
        self._places = [plain.index(_plain(name)) for name in columns]

    def chosen(self, fields: list[str]) -> list[str]:
        """Returns the fields of a line that are asked for, in that order; raises ValueError for a malformed one."""
        if len(fields) != len(self._names):
            raise ValueError(f"it has {len(fields)} columns instead of {len(self._names)}: {', '.join(self._names)}")
        return [fields[place] for place in self._places]


def _plain(name: str) -> str:
    """Returns a column's name without case and signs: userId, user_id."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _split(line: str, separator: str) -> list[str]:
    return next(csv.reader([line]), []) if separator == "," else line.split(separator)


def rating_file(folder: str | Path) -> Path:
    """Finds the ratings in a folder; raises InputError where there are none."""
    files = [path for name in RATING_FILES if (path := Path(folder).expanduser() / name).is_file()]
    if not files:
        raise InputError(f"{folder} has no ratings; expected {' or '.join(RATING_FILES)}")
    return files[0]


def read_ratings(path: Path, bad_rows: float) -> np.ndarray:
    """Reads user, film, stars and time in seconds, float64 [N, 4], which holds all of them exactly."""
    separator = {".csv": ",", ".dat": "::"}.get(path.suffix, "\t")
    rows = _read(path, separator, _rating, bad_rows, columns=RATING_COLUMNS if separator == "," else ())
    return np.array(rows, np.float64).reshape(-1, 4)


def _rating(*fields: str) -> tuple[int, int, float, int]:
    if len(fields) != 4:
        raise ValueError(f"it has {len(fields)} columns instead of 4: user, film, rating, time")
    user, item, stars = _number(fields[0], "user"), _number(fields[1], "film"), fields[2]
    if not re.fullmatch(r"[0-5](\.\d+)?", stars) or float(stars) > 5:
        raise ValueError(f"its rating is {stars[:20]!r}, expected 0 to 5 stars")
    return user, item, float(stars), _number(fields[3], "time", digits=10)


def _number(text: str, what: str, digits: int = 9) -> int:
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", text):
        raise ValueError(f"its {what} is {text[:20]!r}, expected a whole number of up to {digits} digits")
    return int(text)


def _read_items(folder: Path, bad_rows: float) -> dict[int, Item]:
    if (folder / "u.item").is_file():
        return dict(_read(folder / "u.item", "|", _item_100k, bad_rows, "latin-1"))
    if (folder / "movies.dat").is_file():
        return dict(_read(folder / "movies.dat", "::", _item, bad_rows, "latin-1"))
    if (folder / "movies.csv").is_file():
        return dict(_read(folder / "movies.csv", ",", _item, bad_rows, columns=ITEM_COLUMNS))
    return {}


def _item_100k(number: str, title: str, date: str, *rest: str) -> tuple[int, Item]:
    flags = rest[2:]  # after the video date and the address
    if not flags or not set(flags) <= {"0", "1"}:
        raise ValueError("its genres are not a row of 0 and 1")
    match = re.search(r"(\d{4})$", date) or YEAR.search(title)
    genres = tuple(f"genre {place:02d}" for place, flag in enumerate(flags) if flag == "1")
    return _number(number, "film"), Item(int(match[1]) if match else None, genres)


def _item(*fields: str) -> tuple[int, Item]:
    if len(fields) != 3:
        raise ValueError(f"it has {len(fields)} columns instead of 3: film, title, genres")
    number, title, genres = fields
    match = YEAR.search(title)
    words = () if genres == "(no genres listed)" else tuple(dict.fromkeys(filter(None, genres.split("|"))))
    return _number(number, "film"), Item(int(match[1]) if match else None, words)


def _read_users(folder: Path, bad_rows: float) -> dict[int, User]:
    if (folder / "u.user").is_file():
        return dict(_read(folder / "u.user", "|", _user_100k, bad_rows, "latin-1"))
    if (folder / "users.dat").is_file():
        return dict(_read(folder / "users.dat", "::", _user_1m, bad_rows, "latin-1"))
    return {}


def _user_100k(*fields: str) -> tuple[int, User]:
    if len(fields) != 5:
        raise ValueError(f"it has {len(fields)} columns instead of 5: user, age, gender, occupation, zip code")
    number, age, gender, occupation, _ = fields
    return _number(number, "user"), User(_number(age, "age"), gender, occupation)


def _user_1m(*fields: str) -> tuple[int, User]:
    if len(fields) != 5:
        raise ValueError(f"it has {len(fields)} columns instead of 5: user, gender, age, occupation, zip code")
    number, gender, age, occupation, _ = fields
    return _number(number, "user"), User(_number(age, "age"), gender, occupation)
