"""What users have seen, in order: MovieLens' films by the time of their ratings, a synthetic twin, and the metric.

A history is an int32 array of distinct films, numbered from 1: 0 stands for none. A user's last film is held out.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import movielens
from data.remote import local_copy
from errors import InputError

SHORTEST = 3  # films of a history: one to look back at, one to train on, one that is held out
GENRES, LIKED = 10, 50  # of synthetic films; how much more often a user takes those of one genre


def open_histories(data: str, last: int) -> "Histories":
    """Opens a MovieLens folder or URL, or the twin if `data` is "synthetic"; see Histories."""
    made = synthetic_histories(users=2_000, films=500, length=20) if data == "synthetic" else read_histories(data)
    return Histories(*made, last)


def read_histories(folder: str | Path, bad_rows: float = 0.0001) -> tuple[list[np.ndarray], int]:
    """Reads each user's films by time, those of one second in random order; returns them and the number of films.

    Users with fewer than SHORTEST films are left out. Raises InputError: see data/movielens.py; or no user is left.
    """
    path = movielens.rating_file(local_copy(str(folder), *movielens.FILES))
    ratings = movielens.read_ratings(path, bad_rows)
    user, time = ratings[:, 0], ratings[:, 3]
    films, film = np.unique(ratings[:, 1], return_inverse=True)
    # Not as they stand in the file: the 100k set has them by number there, which a model would learn.
    order = np.lexsort((np.random.default_rng(0).permutation(len(user)), time, user))
    begins = np.flatnonzero(np.diff(user[order])) + 1
    every = np.split(film[order].astype(np.int32) + 1, begins)
    histories = [history for history in every if len(history) >= SHORTEST]
    if not histories:
        raise InputError(f"{path} has {len(every)} users, none of them with {SHORTEST} ratings; it needs more")
    return histories, len(films)


def synthetic_histories(users: int, films: int, length: int, seed: int = 0) -> tuple[list[np.ndarray], int]:
    """Draws histories by popularity (Zipf), most films of the genre that the user likes; film i has genre i % GENRES.
    Returns them and the number of films."""
    rng = np.random.default_rng(seed)
    numbers, histories = np.arange(1, films + 1, dtype=np.int32), []
    for genre in rng.integers(GENRES, size=users):
        weight = np.where(numbers % GENRES == genre, LIKED, 1) / numbers
        histories.append(rng.choice(numbers, length, replace=False, p=weight / weight.sum()))
    return histories, films


class Histories:
    """Windows of histories as data sets.

    Attributes:
        users, films: how many there are.
        train: the windows that end with each film of a history, but its first and its last.
        held_out: the windows that end with each user's last film; then one for each film, 0 too, with nothing before.
    """

    def __init__(self, histories: Sequence[np.ndarray], films: int, last: int):
        self._histories, self.users, self.films = histories, len(histories), films
        padded = [np.concatenate([np.zeros(last, np.int32), history]) for history in histories]
        windows = [np.lib.stride_tricks.sliding_window_view(history, last + 1) for history in padded]
        train = np.concatenate([of_one[1:-1] for of_one in windows])
        every_film = np.zeros((films + 1, last + 1), np.int32)
        every_film[:, -1] = np.arange(films + 1)
        self._counts = np.bincount(np.concatenate([history[:-1] for history in histories]), minlength=films + 1)
        drawn = np.bincount(train[:, -1], minlength=films + 1)
        log_share = np.log(np.maximum(drawn, 1) / len(train)).astype(np.float32)
        self.train = Windows(train, log_share)
        self.held_out = Windows(np.concatenate([*(of_one[-1:] for of_one in windows), every_film]), log_share)

    def recall(self, users: np.ndarray, films: np.ndarray, top: int = 10) -> dict[str, float]:
        """Returns the share of users whose last film is among the `top` of those that they have not seen: by their
        scores, "recall@10", and by how often they are seen in training, "popularity@10".

        Args:
            users: [users, dim] and films [films + 1, dim]; a score is their product.
        """
        found = {f"recall@{top}": 0, f"popularity@{top}": 0}
        for user, history in zip(users, self._histories, strict=True):
            for name, scores in zip(found, (films @ user, self._counts.astype(np.float32)), strict=True):
                scores[0] = scores[history[:-1]] = -np.inf
                found[name] += history[-1] in np.argpartition(-scores, top)[:top]
        return {name: hits / self.users for name, hits in found.items()}


class Windows:
    """A data set of ids [n, last + 1] int32, 0 before a history begins, and log_share [films + 1]: the logarithm of
    each film's share of the training windows."""

    def __init__(self, ids: np.ndarray, log_share: np.ndarray):
        self.ids, self.log_share = ids, log_share

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {"ids": int32 [n, last + 1], "log_share": float32 [n] of the last films}."""
        ids = self.ids[indices]
        return {"ids": ids, "log_share": self.log_share[ids[:, -1]]}
