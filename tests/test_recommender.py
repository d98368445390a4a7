"""Tests that examples/recommender.py learns, on any number of devices, and that data/histories.py
gives the windows worked out by hand."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import environment

from data import histories
from errors import InputError
from examples import recommender

ROOT = Path(__file__).parent.parent


# Histories

# User, film, time. User 4 has too few ratings; two of user 9 have one time.
RATINGS = """
9 70 5
9 20 2
9 30 2
9 20000 1
4 70 1
4 20 2
2 30 3
2 20 4
2 70 5
"""
# The films' numbers: 20, 30, 70 and 20000 are 1, 2, 3 and 4.
USER_2 = [2, 1, 3]


@pytest.fixture
def ratings(tmp_path) -> histories.Histories:
    """Opens the histories of RATINGS, with windows of two films and the one after them."""
    lines = []
    for rating in RATINGS.strip().splitlines():
        user, film, time = rating.split()
        lines.append(f"{user}\t{film}\t3\t{time}\n")
    (tmp_path / "u.data").write_text("".join(lines))
    return histories.open_histories(str(tmp_path), last=2)


def test_users_with_too_few_ratings_are_left_out(ratings):
    assert ratings.users == 2
    assert ratings.films == 4


def test_each_users_last_film_is_held_out(ratings):
    of_user_2, of_user_9 = ratings.held_out.ids[:2].tolist()

    assert of_user_2 == USER_2
    assert sorted(of_user_9[:2]) == [1, 2]  # of one time, so in either order
    assert of_user_9[2] == 3


def test_windows_are_those_of_the_ratings_in_time(ratings):
    first, second, _ = ratings.held_out.ids[1].tolist()

    of_user_2, *of_user_9 = ratings.train.ids.tolist()

    assert of_user_2 == [0, 2, 1]
    assert of_user_9 == [[0, 4, first], [4, first, second]]


def test_each_film_has_a_window_of_its_own(ratings):
    alone = ratings.held_out.ids[2:].tolist()

    assert alone == [[0, 0, film] for film in range(5)]


def test_a_batch_has_its_films_shares_of_training(ratings):
    batch = ratings.train.batch(np.array([0, 0]))

    assert batch["ids"].dtype == np.int32
    assert batch["log_share"] == pytest.approx(np.log([2 / 3, 2 / 3]))


def test_recall_is_among_the_unseen_films(ratings):
    """Two of four films are unseen by user 2 before his last one, 3 and 4; one by user 9. Seen ones
    score higher here."""
    scores = np.array([[9, 9, 9, 1, 2], [9, 9, 9, 1, 9]], np.float32)
    films = np.eye(5, dtype=np.float32)

    assert ratings.recall(scores, films, top=1) == {"recall@1": 0.5, "popularity@1": 0.5}
    assert ratings.recall(scores, films, top=2)["recall@2"] == 1


def test_a_file_without_a_long_history_is_refused(tmp_path):
    (tmp_path / "u.data").write_text("1\t1\t3\t0\n1\t2\t3\t1\n")

    with pytest.raises(InputError, match="u.data has 1 users, none of them with 3 ratings"):
        histories.open_histories(str(tmp_path), last=2)


# The example


@pytest.mark.parametrize(("lr", "epochs"), [(0.003, 3), (0.0, 1)])
def test_it_finds_more_than_popularity_if_it_learns(lr, epochs, capsys):
    config = recommender.Config("synthetic", epochs=epochs, lr=lr)

    found = recommender.main(config)

    assert found["popularity@10"] == pytest.approx(0.1315)
    finds_more = found["recall@10"] > 2 * found["popularity@10"]
    assert finds_more == (lr > 0), found
    line = r"loss \d+\.\d{4} recall@10 0\.\d{4} popularity@10 0\.1315"
    assert re.search(line, capsys.readouterr().out)


def last_numbers(output: str) -> list[float]:
    """Returns the loss and the two recalls of an output's last line."""
    return [float(number) for number in re.findall(r"\d+\.\d{4}", output.splitlines()[-1])]


@pytest.mark.slow
def test_eight_devices_and_another_plan_give_the_same_numbers(capsys):
    recommender.main(recommender.Config("synthetic", epochs=1))
    output = capsys.readouterr().out

    flags = ["tiny", "--epochs", "1", "--plan", "exchange"]
    run = subprocess.run(
        [sys.executable, "-m", "examples.recommender", *flags],
        cwd=ROOT,
        env=environment(8),
        capture_output=True,
        text=True,
    )

    assert run.stdout, run.stderr
    expected = last_numbers(output)
    assert len(expected) == 3
    # float32; one user more or less is 0.0005 of a recall.
    assert last_numbers(run.stdout) == pytest.approx(expected, abs=6e-4), (output, run.stdout)
