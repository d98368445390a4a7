"""A grid of runs: which runs it has, that it goes on and ends as it should, what its table says.

Most tests train with the stand-in of tests/fake_script.py.
"""

import ast
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from grid_bed import NAME, ROOT, WORDS, Bed, wait
from run_make import NOT_HANDED_ON, make

from errors import InputError
from tpu.accept import results
from tpu.launch import request
from train.common import best, cli
from train.grid import axes, flags, places, records, table


@pytest.fixture
def bed(tmp_path):
    """The project of the stand-in."""
    bed = Bed(tmp_path)
    yield bed
    bed.close()


# ---- which runs it has ---------------------------------------------------------------------------
MRPC = "--model bert --task mrpc --data /glue"


def plan(words: str) -> axes.Grid:
    return axes.plan(shlex.split(words))


def names(words: str) -> list[str]:
    return [run.name for run in plan(words).runs]


@pytest.mark.parametrize("script", flags.SCRIPTS)
def test_the_flags_of_a_script_are_those_of_its_parser(script):
    from importlib import import_module

    from train.common import watch

    _, presets = watch.watched(lambda config: None, import_module(f"train.{script}").PRESETS)
    _, given = next(iter(presets.values()))

    found = flags.read_flags(script)

    assert found.presets == tuple(presets)
    values = cli.flat(given)
    assert {name.replace("-", "_") for name in found.kinds} == values.keys()
    for name, kind in found.kinds.items():
        value = values[name.replace("-", "_")]
        assert (kind == flags.SWITCH) == isinstance(value, bool), name
        assert (kind == flags.SEVERAL) == isinstance(value, tuple), name
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert kind == flags.NUMBER, name
        if isinstance(value, str):
            assert kind == flags.TEXT, name


def test_a_grid_has_a_run_for_each_combination():
    grid = plan(f"glue full {MRPC} --lr 2e-5 3e-5 5e-5 --seed 0 1 2")

    assert grid.name == "bert-mrpc-lr-seed"
    assert grid.axes == {"lr": ["2e-5", "3e-5", "5e-5"], "seed": ["0", "1", "2"]}
    assert len({run.name for run in grid.runs}) == 9
    run = grid.runs[1]
    assert run.name == "bert-mrpc-lr-3e-5-seed-0"
    assert run.flags == shlex.split(f"{MRPC} --lr 3e-5 --seed 0")


def test_all_configurations_get_their_first_seed_first():
    found = names("glue tiny --seed 0 1 --lr 1 2")
    assert [name.removeprefix("glue-tiny-") for name in found] == [
        "lr-1-seed-0",
        "lr-2-seed-0",
        "lr-1-seed-1",
        "lr-2-seed-1",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--seed 0 1 --lr 2e-5 3e-5 --batch-size 16 32",
        "--lr=0.00002 0.00003 --batch_size 32 16 --seed 0 1",
        "--batch-size 16 32 --lr 2E-05 .3e-4 --seed 0 1",
    ],
)
def test_names_do_not_depend_on_how_flags_are_written(words):
    expected = names("glue full --name x --lr 2e-5 3e-5 --seed 0 1 --batch-size 16 32")
    assert expected[0] == "x-batch-size-16-lr-2e-5-seed-0"
    assert sorted(names(f"glue full --name x {words}")) == sorted(expected)


def test_the_name_of_a_grid_has_its_axes_in_one_order():
    words = ["--seed 0 1 --lr 1 2 --batch-size 1 2", "--batch-size 1 2 --lr 1 2 --seed 0 1"]
    assert {plan(f"glue full {one}").name for one in words} == {"glue-batch-size-lr-seed"}


def test_names_are_those_of_files_and_of_runs_on_tpus():
    words = f"glue full --checkpoint /a/b /a-b gs://b/{'x' * 90} --weight-decay -1 0 --clip 1 2"
    found = names(words)

    assert len(set(found)) == 12
    for name in found:
        assert request.read_words([], name) == ([], name)


@pytest.mark.parametrize("several", ["--lengths 32 64", "--text a b --label c", "--mesh data=2"])
def test_flags_of_several_values_are_no_axes(several):
    grid = plan(f"glue full {several} --seed 0 1")
    assert list(grid.axes) == ["seed"]
    assert grid.runs[0].flags == [*several.split(), "--seed", "0"]


def test_switches_and_negative_values_stay_as_they_are():
    grid = plan("glue tiny --no-strict --remat --workers -1 0 --eval-every=-3 --checkpoint ''")
    assert grid.runs[0].flags == [
        *("--no-strict", "--remat", "--eval-every=-3", "--checkpoint", "", "--workers=-1")
    ]


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("", "the script is missing"),
        ("bert tiny", "bert is no script of train/; give one of: resnet50"),
        ("glue", "the preset follows the script; PRESET is one of: full, tiny"),
        ("glue tinny --seed 0 1", "the preset follows the script, not tinny"),
        ("glue tiny", "nothing varies: give a flag more than one value"),
        ("glue tiny --lr 1 --seed 0", "nothing varies"),
        ("glue tiny --lengths 32 64", "nothing varies.*--lengths, is one setting"),
        ("glue tiny --lrr 1 2", r"--lrr is no flag of train.glue \(is it --lr\?\)"),
        ("glue tiny 5 --lr 1 2", "5 is no flag"),
        ("glue tiny --lr 1 2 --lr 3", "--lr is given twice"),
        ("glue tiny --batch-size 1 2 --batch_size 3", "--batch_size is given twice"),
        ("glue tiny --strict --no-strict --lr 1 2", "--no-strict is given twice"),
        ("glue tiny --lr 2e-5 0.00002", "same value twice: 2e-5 and 0.00002"),
        ("glue tiny --model bert bert", "same value twice"),
        ("glue tiny --strict 1 2", "--strict takes no value, and is followed by 1"),
        ("glue tiny --seed 0 1 --lr", "--lr needs a value"),
        ("glue tiny --seed 0 1 --evaluate runs/x", "--evaluate trains nothing"),
        ("glue tiny --seed 0 1 --kill-at 3", "--kill-at ends a run"),
        ("glue tiny --seed 0 1 --name a b", "--name is a b; it takes one value"),
        ("glue tiny --seed 0 1 --name ../a", "name is ../a"),
        ("glue tiny --seed 0 1 --metric", "--metric is empty"),
        ("glue tiny --data 'a\nb' c", "--data is 'a.nb', which has a line break"),
    ],
)
def test_what_is_no_grid_is_refused_in_one_sentence(words, pattern):
    with pytest.raises(InputError) as refused:
        plan(words)
    assert re.search(pattern, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


# ---- its table -----------------------------------------------------------------------------------
def finished(grid: axes.Grid, metrics_of: dict[str, dict]) -> list[records.Record]:
    """Returns records of a grid, finished with the metrics that are given by the ends of names."""
    found = []
    for run in grid.runs:
        record = records.record_of(grid, run)
        for end, metrics in metrics_of.items():
            if run.name.endswith(end):
                record.finish({"metrics": metrics, "elapsed_seconds": 100.0})
        found.append(record)
    return found


NUMBERS = {
    "lr-1-seed-0": {"accuracy": 0.5, "loss": 0.9},
    "lr-1-seed-1": {"accuracy": 0.9, "loss": 0.1},
    "lr-1-seed-2": {"accuracy": 0.6, "loss": 0.8},
    "lr-2-seed-0": {"accuracy": 0.7, "loss": 0.7},
    "lr-2-seed-1": {"accuracy": 0.65, "loss": 0.6},
    "lr-2-seed-2": {"accuracy": 0.7, "loss": 0.5},
}
TWO_BY_THREE = "glue tiny --lr 1 2 --seed 0 1 2"


def tabled(words: str, metrics_of: dict[str, dict]) -> tuple[dict, str]:
    """Returns what grid.json and grid.md of these results say."""
    grid = plan(words)
    return table.report(grid, finished(grid, metrics_of))


def test_the_table_has_median_mean_and_deviation():
    content, page = tabled(TWO_BY_THREE, NUMBERS)

    first, other = content["configurations"]
    assert first["values"] == {"lr": "2"}
    assert (first["n"], first["median"], first["min"], first["max"]) == (3, 0.7, 0.65, 0.7)
    assert first["mean"] == pytest.approx(2.05 / 3)
    assert first["standard_deviation"] == pytest.approx(statistics.stdev([0.7, 0.65, 0.7]))
    assert other["median"] == 0.6
    assert re.search(r"\| 2 +\| 3 \| 0.7000 \| 0.6833 ± 0.0289 +\| 0.6500 \| 0.7000 \| 1 min", page)


def test_the_best_median_wins_and_not_the_best_run():
    content, page = tabled(TWO_BY_THREE, NUMBERS)

    assert content["best"] == {"values": {"lr": "2"}, "seed": "0"}
    assert "Best by its median of 3 runs: --lr 2, accuracy 0.7000" in page
    assert "Its best run: runs/glue-tiny-lr-seed/glue-tiny-lr-2-seed-0" in page


def test_the_page_says_what_a_choice_is_worth():
    _, page = tabled(TWO_BY_THREE, NUMBERS)
    assert "chosen on the evaluation data itself" in page
    assert "report a test set's number, or the median" in page


@pytest.mark.parametrize("metric", ["loss", "-loss", "-accuracy"])
def test_of_some_metrics_the_lower_is_better(metric):
    content, page = tabled(f"{TWO_BY_THREE} --metric {metric}", NUMBERS)

    assert content["lower_is_better"]
    medians = [one["median"] for one in content["configurations"]]
    assert medians == sorted(medians)
    assert f"{metric.lstrip('-')} (lower is better)" in page


@pytest.mark.parametrize("name", ["test_ppl", "mismatched_loss", "ne", "mse"])
def test_metrics_of_other_splits_have_the_same_direction(name):
    metric = table.choose_metric(plan(f"{TWO_BY_THREE} --metric {name}"), [])
    assert metric.lower_is_better


def test_the_best_checkpoint_has_the_same_directions():
    assert table.LOWER_IS_BETTER == best.LOWER_IS_BETTER


def test_one_seed_shows_no_spread():
    content, page = tabled("glue tiny --lr 1 2", {"lr-1": {"accuracy": 0.5}, "lr-2": {}})
    assert content["configurations"][0]["standard_deviation"] is None
    assert "| 0.5000 ± - " in page
    assert "One run shows no spread: add --seed" in page


def test_seeds_alone_are_one_configuration():
    metrics_of = {"seed-0": {"accuracy": 0.5}, "seed-1": {"accuracy": 0.7}}
    content, page = tabled("glue tiny --seed 0 1", metrics_of)
    (only,) = content["configurations"]
    assert (only["values"], only["n"], only["median"]) == ({}, 2, pytest.approx(0.6))
    assert "Median of 2 runs: accuracy 0.6000. The best of them: runs/" in page


def test_values_with_spaces_and_empty_ones_are_shown_as_such():
    words = "glue tiny --best '' accuracy --data 'a b' c --checkpoint 'x y'"
    content, page = tabled(words, {"data-c": {"accuracy": 0.5}})

    assert content["axes"] == {"best": ["", "accuracy"], "data": ["a b", "c"]}
    assert "--checkpoint 'x y'; varied: --best '' accuracy, --data 'a b' c." in page
    assert re.search(r"^\| '' +\| c +\| 1 ", page, re.MULTILINE)
    assert "* --best '' --data 'a b': not run yet" in page
    assert "Best: --best '' --data c, accuracy 0.5000" in page


def test_a_tie_of_the_best_medians_is_said():
    numbers = {**NUMBERS, "lr-1-seed-2": {"accuracy": 0.7}}
    _, page = tabled(TWO_BY_THREE, numbers)
    assert "--lr 1, accuracy 0.7000." in page
    assert "The median of --lr 2 is the same" in page

    _, page = tabled(TWO_BY_THREE, NUMBERS)
    assert "is the same" not in page


def test_a_configuration_with_a_missing_run_is_not_chosen():
    numbers = {end: values for end, values in NUMBERS.items() if end != "lr-2-seed-1"}
    content, page = tabled(TWO_BY_THREE, numbers)

    assert content["best"]["values"] == {"lr": "1"}
    assert "2 of 3" in page
    assert "Not compared, since runs of it are missing: --lr 2, with a median of 0.7000" in page
    assert "Missing, 1 of 6 runs:\n\n* --lr 2 --seed 1: not run yet" in page


def test_without_results_there_is_no_choice():
    content, page = tabled(TWO_BY_THREE, {})
    assert content["best"] is None
    assert "Best" not in page
    assert "Missing, 6 of 6 runs" in page


# ---- its runs ------------------------------------------------------------------------------------
def test_a_grid_trains_its_runs_once_and_writes_a_table(bed):
    first = bed.run()

    assert first.code == 0, first.out + first.err
    assert bed.starts() == [
        "lr-1e-5-seed-0",
        "lr-3e-5-seed-0",
        "lr-1e-5-seed-1",
        "lr-3e-5-seed-1",
        "lr-1e-5-seed-2",
        "lr-3e-5-seed-2",
    ]
    assert bed.page() in first.out
    found = bed.grid()
    assert found["best"] == {"values": {"lr": "3e-5"}, "seed": "2"}
    assert [one["median"] for one in found["configurations"]] == [0.81, 0.79]
    assert [one["seconds"] for one in found["configurations"]] == [62.0, 62.0]

    again = bed.run()

    assert again.code == 0, again.err
    assert len(bed.starts()) == 6, "finished runs are not repeated"
    assert "6 finished" in again.out
    assert bed.grid()["configurations"] == found["configurations"]
    for run in bed.grid()["runs"]:
        assert run["command"] in first.out


def test_a_grid_gives_a_row_of_the_tables_of_results(bed):
    bed.run()
    (row,) = results.read(bed.folder / "runs" / NAME / "grid.json")

    assert row.label == "`train.glue tiny --model bert --lr 3e-5`"
    assert row.metric == (
        "accuracy 0.81 ± 0.01, median 0.81, 3 runs; the best of 2 configurations, on the same data"
    )
    assert (row.hardware, row.time, row.version) == ("1 x CPU, 1 host", "1.0 min a run", "v1.2")


def test_the_command_of_a_run_can_be_repeated_as_it_is(bed):
    bed.run("glue tiny --model bert --seed 3 4 --lengths 8 16 --no-strict")
    command = bed.grid("bert-tiny-seed")["runs"][0]["command"]

    result = subprocess.run(command, shell=True, cwd=bed.folder, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert bed.starts() == ["seed-3", "seed-4", "seed-3"]
    assert "--lengths 8 16 --no-strict --seed 3 --runs runs/bert-tiny-seed --name" in command


def test_more_values_of_an_axis_are_more_runs(bed):
    bed.run("glue tiny --model bert --seed 0 1")
    bed.run("glue tiny --model bert --seed 0 1 2 --workers 1")
    assert bed.starts() == ["seed-0", "seed-1", "seed-2"]


def test_another_metric_costs_no_run(bed):
    bed.run()
    ended = bed.run(f"{WORDS} --metric -loss")
    assert ended.code == 0
    assert len(bed.starts()) == 6
    assert bed.grid()["configurations"][0]["median"] == 0.51


WRONG = {
    "seed_0": "fails",
    "seed_1": "diverges",
    "seed_2": "memory",
    "seed_3": "killed",
    "seed_4": "nothing",
    "seed_5": "nan",
    "seed_6": "stopped",
    "seed_7": "burst",
}
SEEDS = f"glue tiny --model bert --seed {' '.join(map(str, range(9)))}"


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> Bed:
    """A grid of nine runs of which seven go wrong."""
    bed = Bed(tmp_path_factory.mktemp("failed"))
    bed.faults(**WRONG)
    ended = bed.run(SEEDS)
    assert ended.code == 1, ended.out + ended.err
    bed.out = ended.out
    bed.err = ended.err
    return bed


def test_a_run_that_fails_is_named_and_the_grid_goes_on(failed):
    page = failed.page("bert-tiny-seed")

    assert len(failed.starts()) == 9
    assert "Missing, 7 of 9 runs" in page
    assert "* --seed 0: failed: exit code 1: RuntimeError: a bug" in page
    assert "* --seed 1: failed: exit code 2: loss is nan at step 3: the training diverged" in page
    assert "* --seed 2: failed: exit code 1: out of memory: RuntimeError: RESOURCE_EXH" in page
    assert "* --seed 3: failed: exit code 137: killed from outside by SIGKILL" in page
    assert "* --seed 4: failed: it ended with exit code 0, but it has no summary.json" in page
    assert "* --seed 5: its accuracy is not a finite number" in page
    assert "* --seed 6: unfinished: stopped" in page
    (only,) = failed.grid("bert-tiny-seed")["configurations"]
    assert only["numbers"].keys() == {"7", "8"}
    assert "Best" not in page


def test_what_a_run_prints_is_in_its_log_and_on_the_terminal(failed):
    log = failed.folder / "runs/bert-tiny-seed/logs/bert-tiny-seed-7.log"
    content = log.read_bytes()

    assert content.startswith(b"$ ")
    assert b"line 004999" in content
    assert b"warning 004999" in content
    assert b"\xff\xfe no line end" in content
    assert failed.out.count("line 00") == 5000
    assert failed.err.count("warning 00") == 5000


def test_what_a_killed_run_leaves_behind_is_ended(failed):
    pid = int((failed.folder / "left-behind").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_same_command_tries_what_failed_again(bed):
    bed.faults(seed_0="fails", seed_1="stopped")
    words = "glue tiny --model bert --seed 0 1 2"
    assert bed.run(words).code == 1
    bed.faults()

    ended = bed.run(words)

    assert ended.code == 0
    assert bed.starts() == ["seed-0", "seed-1", "seed-2", "seed-0", "seed-1"]
    assert "resuming after step 2" in ended.out, "the one that was stopped had saved"


def test_a_torn_summary_is_a_failure_and_then_refused(bed):
    bed.faults(seed_0="torn")
    ended = bed.run("glue tiny --model bert --seed 0 1")
    assert ended.code == 1
    torn = "runs/bert-tiny-seed/bert-tiny-seed-0/summary.json is damaged"
    assert torn in bed.page("bert-tiny-seed")

    again = bed.run("glue tiny --model bert --seed 0 1")

    assert again.code == 2
    assert torn in again.err
    assert "remove" in again.err
    assert bed.starts() == ["seed-0", "seed-1"]


# ---- its stop ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGTERM, "waits"),
        (signal.SIGTERM, "deaf"),
        (signal.SIGINT, "waits"),
        (signal.SIGHUP, "waits"),
    ],
)
def test_a_stopped_grid_saves_and_goes_on(number, fault, bed):
    bed.faults(lr_3e_5_seed_0=fault)
    process = bed.start()
    wait(lambda: len(bed.starts()) == 2)
    assert bed.states()["lr-3e-5-seed-0"] == "running"
    process.send_signal(number)

    ended = bed.ended(process)

    assert ended.code == 143, ended.out + ended.err
    assert "stopped by a signal at step 1: saved" in ended.out
    assert "stopped; the same command goes on" in ended.out
    assert bed.states()["lr-1e-5-seed-0"] == "finished"
    assert bed.states()["lr-3e-5-seed-0"] == "unfinished"

    bed.faults()
    again = bed.run()

    assert again.code == 0
    assert "1 finished, 1 unfinished, 4 new" in again.out
    assert "resuming after step 1" in again.out
    assert len(bed.starts()) == 7


def test_a_run_gets_each_signal_once(bed):
    """A second Ctrl-C would end it unsaved."""
    bed.faults(seed_0="waits")
    process = bed.start()
    wait(bed.starts)
    process.send_signal(signal.SIGINT)
    ended = bed.ended(process)
    assert "signals: 1" in ended.out


def test_a_grid_that_is_stopped_in_its_checks_starts_nothing(bed):
    process = bed.start()
    wait(lambda: (bed.folder / "runs" / NAME / ".lock").exists())
    process.send_signal(signal.SIGTERM)

    ended = bed.ended(process)

    assert ended.code == 143
    assert "stopped before the first run" in ended.out
    assert bed.starts() == []


def test_two_grids_of_one_name_do_not_run_together(bed):
    bed.faults(seed_0="waits")
    process = bed.start()
    wait(bed.starts)
    command = [sys.executable, "-m", "train.grid", *WORDS.split()]
    second = subprocess.run(command, cwd=bed.folder, capture_output=True, text=True, timeout=30)
    assert second.returncode == 2
    assert "is the folder of a grid that runs now" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert bed.ended(process).code == 143


def test_a_reader_that_has_left_ends_nothing(bed):
    """As `make grid | head` leaves."""
    bed.faults(seed_0="burst")
    command = f"{sys.executable} -m train.grid {WORDS}; echo $? >code"
    subprocess.run(f"({command}) | head -1", shell=True, cwd=bed.folder, capture_output=True)
    wait(lambda: (bed.folder / "code").exists())
    assert (bed.folder / "code").read_text().strip() == "0"
    assert set(bed.states().values()) == {"finished"}


# ---- what is refused before the first run --------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("--lr 1e-3 -1 --seed 0 1", r"--lr is -1.0; it must be at least 0; .*run --lr -1 --seed 0"),
        ("--lr 1e-3 x --seed 0 1", "--lr cannot be used: .*'x'.* expected"),
        ("--optimizer sgd sdg --seed 0 1", r"--optimizer is sdg \(is it sgd\?\)"),
        ("--data= --seed 0 1", "--data is missing"),
    ],
)
def test_every_combination_is_checked_by_the_script_first(words, pattern, bed):
    ended = bed.run(f"glue tiny {words}")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert re.search(f"^error: .*{pattern}", line), line
    assert bed.starts() == []


def test_runs_of_other_settings_are_refused_and_not_tabled(bed):
    """Of what the script chooses later, as its epochs, anything will do."""
    bed.run("glue tiny --model bert --seed 0 1")

    ended = bed.run("glue tiny --model bert --seed 0 1 --batch-size 16")

    assert ended.code == 2
    assert "batch_size was 32, now 16" in ended.err
    assert len(bed.starts()) == 2
    ended = bed.run("glue tiny --model bert --seed 0 1 --batch-size 16 --name other")
    assert ended.code == 0
    assert len(bed.starts()) == 4


def test_a_metric_that_finished_runs_lack_is_refused(bed):
    bed.run("glue tiny --model bert --seed 0 1")
    ended = bed.run("glue tiny --model bert --seed 0 1 2 --metric auc")
    assert ended.code == 2
    assert "--metric is auc; the runs have accuracy, f1, loss" in ended.err
    assert len(bed.starts()) == 2


def test_a_name_of_another_grid_or_of_a_run_is_refused(bed):
    bed.run("glue tiny --seed 0 1 --name mine")
    ended = bed.run("glue tiny --lr 1 2 --name mine")
    assert ended.code == 2
    assert "has a grid of seed, and this one is of lr" in ended.err

    (bed.folder / "runs/single").mkdir()
    (bed.folder / "runs/single/config.json").write_text("{}")
    ended = bed.run("glue tiny --seed 0 1 --name single")
    assert ended.code == 2
    assert "is the folder of a run" in ended.err


@pytest.mark.parametrize("content", ["", "[1]", '{"runs": '])
def test_a_grid_json_that_is_none_is_refused(content, bed):
    folder = bed.folder / "runs/mine"
    folder.mkdir(parents=True)
    (folder / "grid.json").write_text(content)
    ended = bed.run("glue tiny --seed 0 1 --name mine")
    assert ended.code == 2
    assert "remove it" in ended.err


def test_a_check_that_dies_is_said_and_nothing_is_started(bed):
    (bed.folder / "train/common/cli.py").unlink()
    ended = bed.run()
    assert ended.code == 2
    assert "train.grid.check ended with exit code 1, see above" in ended.err
    assert bed.starts() == []


def test_results_are_read_from_a_bucket():
    grid = plan("glue tiny --seed 0 1 --runs memory://bucket/runs")
    record = records.record_of(grid, grid.runs[0])
    assert record.folder == "memory://bucket/runs/glue-tiny-seed/glue-tiny-seed-0"
    assert grid.folder == Path("runs/glue-tiny-seed"), "the grid's own files are here"

    with pytest.raises(places.NoResult, match=r"has no summary\.json"):
        places.Here().read_summary(record)
    summary = {"metrics": {"accuracy": 0.5}, "elapsed_seconds": 3.0}
    with fsspec.open(f"{record.folder}/summary.json", "w") as file:
        json.dump(summary, file)
    assert places.Here().read_summary(record) == summary


# ---- TPUs ----------------------------------------------------------------------------------------
ON_TPUS = "glue tiny --model bert --lr 1e-5 2e-5 3e-5 4e-5 --runs gs://b/runs"
TWO = ("--tpu", "tpu1 tpu2")


def on_tpus(bed: Bed, *options: str, **fault_of: str):
    """Starts a grid on two TPUs, with what is wrong with these."""
    (bed.folder / "tpus.json").write_text(json.dumps(fault_of))
    return bed.start(ON_TPUS, *TWO, *options)


def tpus_of_starts(bed: Bed) -> list[str]:
    lines = (bed.folder / "starts").read_text().splitlines()
    return [line.split()[1] for line in lines]


def test_each_tpu_takes_the_next_run(bed):
    ended = bed.ended(on_tpus(bed))

    assert ended.code == 0, ended.out + ended.err
    assert sorted(bed.starts()) == ["lr-1e-5", "lr-2e-5", "lr-3e-5", "lr-4e-5"]
    assert set(tpus_of_starts(bed)) == {"tpu1", "tpu2"}
    assert "tpu1| step 1\n" in ended.out
    assert "only the names of the flags were checked" in ended.out
    assert bed.grid("bert-tiny-lr")["best"] == {"values": {"lr": "4e-5"}, "seed": ""}

    again = bed.ended(on_tpus(bed))
    assert again.code == 0
    assert len(bed.starts()) == 4


def test_the_words_for_a_tpu_are_those_that_the_launcher_takes():
    grid = plan("glue full --model bert --task mrpc --data '/a b' --lr 1 2 --runs gs://b/$x")
    tpu = places.Tpu("tpu1", ["--zone", "z"], ["PYTHON=python3.12"])

    command = tpu.command(grid, records.record_of(grid, grid.runs[0]))

    launch = ["python3", "-m", "tpu.launch", "train", "--tpu", "tpu1", "--zone", "z"]
    assert command[: command.index("--")] == [*launch, "--run", "bert-mrpc-lr-1"]
    words = command[command.index("--") + 1 :]
    assert words == [
        "MODEL=bert",
        "TASK=mrpc",
        "PRESET=full",
        "DATA=/a b",
        "PYTHON=python3.12",
        "ARGS=--lr 1 --runs 'gs://b/$x/bert-mrpc-lr'",
    ]
    sent, _ = request.read_words(words, "bert-mrpc-lr-1")
    assert request.runs_folder(sent) == "gs://b/$x/bert-mrpc-lr"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pretrain tiny --model roberta --seed 0 1", ["MODEL=roberta", "TASK=pretrain"]),
        ("resnet50 tiny --model resnet101 --seed 0 1", ["MODEL=resnet50", "PRESET=tiny"]),
        ("glue tiny --seed 0 1", ["MODEL=bert", "PRESET=tiny"]),
        ("glue tiny --model bert roberta", ["MODEL=bert", "PRESET=tiny"]),
    ],
)
def test_a_tpu_gets_the_model_by_its_name_of_make(words, expected):
    grid = plan(f"{words} --runs gs://b")
    command = places.Tpu("tpu1").command(grid, records.record_of(grid, grid.runs[0]))
    assert command[command.index("--") + 1 :][:2] == expected


@pytest.mark.parametrize("fault", ["busy", "gone"])
def test_what_one_tpu_cannot_do_another_does(fault, bed):
    ended = bed.ended(on_tpus(bed, tpu1=fault))
    assert ended.code == 0, ended.out + ended.err
    assert f"tpu1 gets no further run: tpu1 is {fault}" in ended.out
    assert {run["place"] for run in bed.grid("bert-tiny-lr")["runs"]} == {"tpu2"}


def test_without_a_tpu_left_the_grid_ends_with_75(bed):
    ended = bed.ended(on_tpus(bed, tpu1="busy", tpu2="gone"))
    assert ended.code == 75
    assert "Missing, 4 of 4 runs" in ended.out


def test_a_runs_own_error_is_not_its_tpus(bed):
    ended = bed.ended(on_tpus(bed, tpu1="fails", tpu2="busy"))
    assert ended.code == 1
    assert len(bed.starts()) == 4
    assert ended.out.count("failed: exit code 2: --data is missing") == 4


def test_a_run_that_may_go_on_is_for_its_tpu_alone(bed):
    ended = bed.ended(on_tpus(bed, tpu1="lost"))
    assert ended.code == 1
    lost = [run for run in bed.grid("bert-tiny-lr")["runs"] if run["state"] == "running"]
    assert [run["place"] for run in lost] == ["tpu1"]

    other = bed.run(ON_TPUS, "--tpu", "tpu2")
    assert other.code == 2
    assert "was started on tpu1 and may still run there; add tpu1 to TPU=" in other.err

    (bed.folder / "starts").unlink()
    (bed.folder / "tpus.json").unlink()
    again = bed.run(ON_TPUS, "--tpu", "tpu2 tpu1")  # tpu2 takes its first run before tpu1
    assert again.code == 0
    assert (bed.starts(), tpus_of_starts(bed)) == (["lr-1e-5"], ["tpu1"])


@pytest.mark.parametrize(
    ("fault", "state"), [("waits", "unfinished"), ("leaves", "running")], ids=["all", "not all"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_runs_on_all_tpus(number, fault, state, bed):
    process = on_tpus(bed, tpu1=fault, tpu2=fault)
    wait(lambda: (bed.folder / "starts").exists() and len(bed.starts()) == 2)
    process.send_signal(number)
    ended = bed.ended(process)
    assert ended.code == 143, ended.out + ended.err
    assert sorted(run["state"] for run in bed.grid("bert-tiny-lr")["runs"]) == sorted(
        ["new", "new", state, state]
    )


def test_the_launcher_says_what_the_grid_looks_for():
    text = (ROOT / "tpu/launch/launcher.py").read_text()
    for sentence in places.NOTHING_RUNS:
        assert f'"{sentence}"' in text or sentence in text, sentence
    assert 'print(f"error: {error}", file=sys.stderr' in text


def test_with_an_environment_the_values_are_checked_here(bed):
    words = ON_TPUS.replace("1e-5", "-1")
    ended = bed.run(words, *TWO, "--python", sys.executable)
    assert ended.code == 2
    assert "--lr is -1.0" in ended.err
    assert bed.starts() == []


def test_a_grid_inside_of_torchrun_is_refused(bed, monkeypatch):
    """Each process would start all runs, and each run would wait for a second process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = bed.run()
    assert ended.code == 2
    assert ended.err.startswith("error: WORLD_SIZE is 2, as torchrun sets it, but a grid")
    assert bed.starts() == []


@pytest.mark.parametrize(
    ("tpu", "words", "pattern"),
    [
        ("tpu1", "--seed 0 1", "the runs would be in runs/.* of each TPU; give a bucket"),
        ("tpu1 tpu1", "--seed 0 1 --runs gs://b", "has tpu1 twice"),
        ("tpu1 local", "--seed 0 1 --runs gs://b", "has local, this machine"),
    ],
)
def test_tpus_that_cannot_share_the_runs_are_refused(tpu, words, pattern, bed):
    ended = bed.run(f"glue tiny {words}", "--check", "--tpu", tpu)
    assert ended.code == 2
    assert re.search(pattern, ended.err)


# ---- make grid, and what it needs ----------------------------------------------------------------
def grid_of_make(*given: str) -> str:
    """Returns the last command of `make grid MODEL=bert`."""
    printed = make("-n", "grid", "MODEL=bert", *given).stdout
    return " ".join(printed.replace("\\\n", " ").splitlines()[-1].split())


def test_make_grid_hands_over_what_make_train_does():
    given = ["TASK=mrpc", "DATA=/a b", "NAME=x", "DEVICE=cpu", "ARGS=--lr 1 2"]
    words = (
        'full --model bert --task mrpc --data "$DATA" --name "$NAME" --device "$DEVICE" --lr 1 2'
    )
    assert grid_of_make(*given).endswith(f"/python -m train.grid glue {words}")
    trains = make("-n", "train", "MODEL=bert", *given).stdout.splitlines()[-1]
    assert trains.endswith(f"-m train.glue {words}")


def test_make_grid_hands_tpus_and_their_arguments_over():
    given = ["TPU=tpu1 tpu2", "ZONE=z", "ENV=A=b", "RETRIES=2", "LAUNCH_ARGS=--port 1"]
    command = grid_of_make(*given, "ARGS=--lr 1 2")
    assert command.startswith('exec python3 -m train.grid --tpu "$TPU" --zone "$ZONE"')
    assert '--launch-args="--env-from ENV --retries $RETRIES $LAUNCH_ARGS"' in command
    assert '--word "PYTHON=$PYTHON"' in command
    assert command.endswith("glue tiny --model bert --lr 1 2")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "nothing varies"),
        (["ARGS=--lrr 1 2"], "is it --lr?"),
        (["ARGS=--lr 1 2", "ENGINE=sky"], "ENGINE=sky is for make train"),
        (["ARGS=--lr 1 2", "TPU=my-tpu"], "give a bucket"),
    ],
)
def test_make_grid_refuses_before_anything_is_installed(arguments, reason, tmp_path):
    result = make("grid", "MODEL=bert", f"VENV={tmp_path}/new", *arguments)
    assert result.returncode == 2
    assert reason in result.stderr
    assert not (tmp_path / "new").exists()


ON_A_BARE_MACHINE = [ROOT / "optional.py"]
ON_A_BARE_MACHINE += [path for path in ROOT.glob("train/grid/*.py") if path.name != "check.py"]


@pytest.mark.parametrize("path", sorted(ON_A_BARE_MACHINE), ids=lambda path: path.name)
def test_a_machine_that_starts_runs_needs_python3_alone(path):
    modules = set()
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}

    of_the_project = {m for m in modules if m.startswith(("train", "errors", "optional"))}
    others = {module for module in of_the_project if not module.startswith("train.grid.")}
    assert others <= {"errors", "optional"}
    packages = {module.partition(".")[0] for module in modules - of_the_project}
    # fsspec reads a bucket for runs on this machine, which have the environment.
    assert packages <= {"__future__", "fsspec", *sys.stdlib_module_names}


@pytest.mark.slow
def test_a_grid_of_a_real_script_is_stopped_and_goes_on(tmp_path):
    """By make, which hands SIGTERM on."""
    left_out = {"CPU_NUM_DEVICES", *NOT_HANDED_ON}  # --device cpu is one device
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    flags_given = f"--batch-size 512 --log-every 1 --seed 0 1 --runs {tmp_path}"
    command = ["make", "grid", "MODEL=dlrm", "DEVICE=cpu", "PYTHON=python3", f"ARGS={flags_given}"]
    folder = tmp_path / "dlrm-tiny-seed"
    first = folder / "dlrm-tiny-seed-0"

    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        wait(lambda: (first / "metrics.jsonl").exists() or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert "saved; the same command resumes from here" in (tmp_path / "out").read_text()
    states = [run["state"] for run in json.loads((folder / "grid.json").read_text())["runs"]]
    assert states == ["unfinished", "new"]

    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming the unfinished run" in again.stdout
    assert "Compared by auc (higher is better)" in again.stdout
    (only,) = json.loads((folder / "grid.json").read_text())["configurations"]
    assert only["n"] == 2
    assert only["standard_deviation"] > 0
    summaries = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    aucs = [summary["metrics"]["auc"] for summary in summaries]
    assert only["median"] == pytest.approx(statistics.median(aucs))
