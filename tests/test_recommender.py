"""examples/recommender.py learns, on any number of devices; data/histories.py gives the windows worked out by hand."""

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


def test_windows_are_those_of_the_ratings_in_time(tmp_path):
    # Film: number. User 4 has too few ratings; two of user 9 have one time.
    ratings = ["9 70 5", "9 20 2", "9 30 2", "9 20000 1", "4 70 1", "4 20 2", "2 30 3", "2 20 4", "2 70 5"]
    (tmp_path / "u.data").write_text("".join("{}\t{}\t3\t{}\n".format(*rating.split()) for rating in ratings))
    data = histories.open_histories(str(tmp_path), last=2)
    assert (data.users, data.films) == (2, 4)
    first, *middle, last = data.held_out.ids[1].tolist(), *data.train.ids[1:].tolist(), data.held_out.ids[0].tolist()
    assert last == [2, 1, 3] and data.train.ids[0].tolist() == [0, 2, 1]
    assert sorted([first[0], first[1]]) == [1, 2] and first[2] == 3
    assert middle == [[0, 4, first[0]], [4, first[0], first[1]]]
    assert data.held_out.ids[2:].tolist() == [[0, 0, film] for film in range(5)]
    batch = data.train.batch(np.array([0, 0]))
    assert batch["ids"].dtype == np.int32 and batch["log_share"] == pytest.approx(np.log([2 / 3, 2 / 3]))
    # Two of four films are unseen by user 2 before his last one, 3 and 4; one by user 9. Seen ones score higher here.
    scores = np.array([[9, 9, 9, 1, 2], [9, 9, 9, 1, 9]], np.float32)
    assert data.recall(scores, np.eye(5, dtype=np.float32), top=1) == {"recall@1": 0.5, "popularity@1": 0.5}
    assert data.recall(scores, np.eye(5, dtype=np.float32), top=2)["recall@2"] == 1
    (tmp_path / "u.data").write_text("1\t1\t3\t0\n1\t2\t3\t1\n")
    with pytest.raises(InputError, match="u.data has 1 users, none of them with 3 ratings"):
        histories.open_histories(str(tmp_path), last=2)


@pytest.mark.parametrize(("lr", "epochs"), [(0.003, 3), (0.0, 1)])
def test_it_finds_more_than_popularity_if_it_learns(lr, epochs, capsys):
    found = recommender.main(recommender.Config("synthetic", epochs=epochs, lr=lr))
    assert found["popularity@10"] == pytest.approx(0.1315)
    assert (found["recall@10"] > 2 * found["popularity@10"]) == (lr > 0), found
    assert re.search(r"loss \d+\.\d{4} recall@10 0\.\d{4} popularity@10 0\.1315", capsys.readouterr().out)


@pytest.mark.slow
def test_eight_devices_and_another_plan_give_the_same_numbers(capsys):
    recommender.main(recommender.Config("synthetic", epochs=1))
    command = [sys.executable, "-m", "examples.recommender", "tiny", "--epochs", "1", "--plan", "exchange"]
    run = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True)
    outputs = capsys.readouterr().out, run.stdout or run.stderr
    expected, found = ([*map(float, re.findall(r"\d+\.\d{4}", text.splitlines()[-1]))] for text in outputs)
    assert len(expected) == 3 and found == pytest.approx(expected, abs=6e-4), outputs  # float32; a user is 0.0005
