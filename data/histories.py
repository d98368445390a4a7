"""What users have seen, in order: MovieLens' films by the time of their ratings, and a twin.

A history is an int32 array of distinct films, numbered from 1: 0 stands for none. A user's last
film is held out, and `Histories.recall` measures how well it is found. The twin is synthetic.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import movielens
from data.remote import local_copy
from errors import InputError

SHORTEST = 3  # films of a history: one to look back at, one to train on, one that is held out
GENRES = 10  # of synthetic films
LIKED = 50  # how much more often a synthetic user takes a film of the genre that it likes


def open_histories(data: str, last: int) -> "Histories":
    """Opens a MovieLens folder or URL, or the twin if `data` is "synthetic"; see Histories."""
    if data == "synthetic":
        histories, films = synthetic_histories(users=2_000, films=500, length=20)
    else:
        histories, films = read_histories(data)
    return Histories(histories, films, last)


def read_histories(
    folder: str | Path, max_bad_share: float = 0.0001
) -> tuple[list[np.ndarray], int]:
    """Reads each user's films by time, those of one second in random order.

    Users with fewer than SHORTEST films are left out.

    Returns: the histories, and the number of films.
    Raises InputError: see data/movielens.py; or no user is left.
    """
    path = movielens.single_rating_file(local_copy(str(folder), *movielens.FILES))
    ratings = movielens.read_ratings(path, max_bad_share)
    user = ratings[:, movielens.USER]
    time = ratings[:, movielens.TIME]
    films, film = np.unique(ratings[:, movielens.FILM], return_inverse=True)

    # Not in the file's order: the 100k set has films by their numbers, which a model would learn.
    ties = np.random.default_rng(0).permutation(len(user))
    order = np.lexsort((ties, time, user))
    of_next_user = np.flatnonzero(np.diff(user[order])) + 1
    of_users = np.split(film[order].astype(np.int32) + 1, of_next_user)
    histories = [history for history in of_users if len(history) >= SHORTEST]
    if not histories:
        raise InputError(
            f"{path} has {len(of_users)} users, none of them with {SHORTEST} ratings; it needs more"
        )
    return histories, len(films)


def synthetic_histories(
    users: int, films: int, length: int, seed: int = 0
) -> tuple[list[np.ndarray], int]:
    """Draws histories by popularity (Zipf), most films of the genre that the user likes.

    Film i has genre i % GENRES.

    Returns: the histories, and the number of films.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(1, films + 1, dtype=np.int32)
    histories = []
    for genre in rng.integers(GENRES, size=users):
        weight = np.where(numbers % GENRES == genre, LIKED, 1) / numbers
        share = weight / weight.sum()
        histories.append(rng.choice(numbers, length, replace=False, p=share))
    return histories, films


class Histories:
    """Windows of histories as data sets.

    A window is a film and the `last` ones before it.

    Attributes:
        users, films: how many there are.
        train: the windows that end with each film of a history, but its first and its last.
        held_out: the windows that end with each user's last film; then one for each film, 0 too,
            with nothing before.
    """

    def __init__(self, histories: Sequence[np.ndarray], films: int, last: int):
        self._histories = histories
        self.users = len(histories)
        self.films = films
        seen = np.concatenate([history[:-1] for history in histories])
        self._counts = np.bincount(seen, minlength=films + 1)

        train = []
        held_out = []
        for history in histories:
            padded = np.concatenate([np.zeros(last, np.int32), history])
            windows = np.lib.stride_tricks.sliding_window_view(padded, last + 1)
            train.append(windows[1:-1])
            held_out.append(windows[-1:])
        alone = np.zeros((films + 1, last + 1), np.int32)
        alone[:, -1] = np.arange(films + 1)
        held_out.append(alone)

        train = np.concatenate(train)
        drawn = np.bincount(train[:, -1], minlength=films + 1)
        log_share = np.log(np.maximum(drawn, 1) / len(train)).astype(np.float32)
        self.train = Windows(train, log_share)
        self.held_out = Windows(np.concatenate(held_out), log_share)

    def recall(self, users: np.ndarray, films: np.ndarray, top: int = 10) -> dict[str, float]:
        """Returns the share of users whose last film is among the `top` of those not seen before.

        Films are ranked by the user's scores, "recall@10", and by how often they are seen in
        training, "popularity@10".

        Args:
            users, films: [users, dim] and [films + 1, dim]; a score is their product.
        """
        recalled = 0
        popular = 0
        for user, history in zip(users, self._histories, strict=True):
            recalled += _is_found(films @ user, history, top)
            popular += _is_found(self._counts.astype(np.float32), history, top)
        return {f"recall@{top}": recalled / self.users, f"popularity@{top}": popular / self.users}


def _is_found(scores: np.ndarray, history: np.ndarray, top: int) -> bool:
    """Returns whether the last film of a history is among the `top` films not seen before.

    Args:
        scores: float32 [films + 1]; those of seen films are overwritten.
    """
    scores[0] = -np.inf
    scores[history[:-1]] = -np.inf
    return history[-1] in np.argpartition(-scores, top)[:top]


@dataclasses.dataclass(eq=False)
class Windows:
    """A data set of windows."""

    ids: np.ndarray  # int32 [n, last + 1], 0 before a history begins
    log_share: np.ndarray  # float32 [films + 1]: logarithm of a film's share of training windows

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {"ids": int32 [n, last + 1], "log_share": float32 [n] of the last films}."""
        ids = self.ids[indices]
        return {"ids": ids, "log_share": self.log_share[ids[:, -1]]}
