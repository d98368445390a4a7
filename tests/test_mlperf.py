"""--log mlperf: MLPerf's own compliance checker reads the logs of small trials.

The checker is in requirements.txt; where it is not installed its tests are skipped, and the others
still compare the lines with what its rules ask for.
"""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from criteo_text import random_rows, write
from helpers import assert_refused, stop_at, terminate

from data.prepare import criteo
from errors import InputError
from train import dlrm, pretrain, resnet50
from train.common import hooks
from train.common.benchmark import Benchmark
from train.common.watch import mlperf

RULES = f"training_{mlperf.RULES}/common.yaml"
# What the rules ask for besides what all benchmarks have, by mlperf-logging 4.1.68.
OF_ALL = """submission_benchmark submission_org submission_division submission_status
    submission_platform cache_clear init_start init_stop run_start run_stop block_start block_stop
    eval_start eval_stop eval_accuracy train_samples eval_samples global_batch_size seed
    gradient_accumulation_steps"""
OF_LARS = """lars_opt_base_learning_rate lars_opt_end_learning_rate lars_epsilon
    lars_opt_learning_rate_decay_poly_power lars_opt_learning_rate_decay_steps
    lars_opt_learning_rate_warmup_epochs lars_opt_momentum lars_opt_weight_decay"""
OF_SGD = """sgd_opt_base_learning_rate sgd_opt_end_learning_rate sgd_opt_weight_decay
    sgd_opt_learning_rate_decay_poly_power sgd_opt_learning_rate_decay_steps sgd_opt_momentum
    model_bn_span opt_learning_rate_warmup_epochs"""
OF_BERT = """opt_base_learning_rate opt_lamb_epsilon opt_learning_rate_training_steps
    opt_learning_rate_warmup_steps num_warmup_steps start_warmup_step opt_lamb_beta_1
    opt_lamb_beta_2 opt_lamb_weight_decay_rate"""
OF_DLRM = """opt_name opt_base_learning_rate opt_adagrad_learning_rate_decay opt_weight_decay
    opt_adagrad_initial_accumulator_value opt_adagrad_epsilon opt_learning_rate_warmup_steps
    opt_learning_rate_decay_start_step opt_learning_rate_decay_steps"""


@contextlib.contextmanager
def logged(org: str = "a test"):
    """Inside, runs write their log, as with --log mlperf; --device cpu, which compiles nothing,
    needs no devices of XLA."""
    flags = mlperf.Flags(log="mlperf", mlperf_org=org)
    with hooks.made_by([mlperf.watcher(flags)]), pytest.MonkeyPatch.context() as patch:
        patch.delenv("CPU_NUM_DEVICES", raising=False)
        yield


def records_of(folder: Path) -> list[dict]:
    """Returns the lines of a run's log."""
    lines = (folder / mlperf.FILE).read_text().splitlines()
    return [json.loads(line.removeprefix(mlperf.TOKEN)) for line in lines]


def values_of(folder: Path) -> dict:
    """Returns the last value of each key of a run's log."""
    return {record["key"]: record["value"] for record in records_of(folder)}


def failures(folder: Path) -> list[str]:
    """Returns the complaints of MLPerf's checker, warnings too, about a run's log."""
    pytest.importorskip("mlperf_logging", reason="needs mlperf-logging of requirements.txt")
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", mlperf.RULES, quiet=False, werror=True)
    passes = checker.check_file(str(folder / mlperf.FILE), RULES)
    found = [*checker.overwritable.values(), *checker.not_overwritable]
    assert passes == (not found)
    return found


def assert_only_quality_fails(folder: Path, *others: str) -> None:
    """Asserts that the checker has only complaints about the metric, and those of `others`."""
    found = failures(folder)
    wanted = ["Failed checks for eval_accuracy", *others]
    assert len(found) == len(wanted), found
    for start in wanted:
        assert any(text.startswith(start) for text in found), found


# ---- trials of the three scripts ---------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def resnet_config(runs: Path, name: str, **flags) -> resnet50.Config:
    return replace(
        resnet50.TINY,
        device="cpu",
        epochs=1,
        warmup_epochs=0.5,
        decay="polynomial",
        runs=str(runs),
        name=name,
        **flags,
    )


@pytest.fixture(scope="module", params=["lars", "sgd"])
def resnet_run(runs, request) -> Path:
    config = resnet_config(runs, request.param, optimizer=request.param)
    with logged(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet50, "SYNTHETIC_TRAIN", 128)
        patch.setattr(resnet50, "SYNTHETIC_EVAL", 64)
        resnet50.main(config)
    return runs / request.param


@pytest.fixture(scope="module")
def bert_run(runs) -> Path:
    config = replace(
        pretrain.TINY,
        device="cpu",
        optimizer="lamb",
        batch_size=8,
        steps=4,
        warmup_steps=2,
        eval_every=2,
        runs=str(runs),
        name="bert",
    )
    with logged():
        pretrain.main(config)
    return runs / "bert"


@pytest.fixture(scope="module")
def dlrm_config(runs, tmp_path_factory) -> dlrm.Config:
    """MLPerf's recipe with a small network, on text prepared for it."""
    folder = tmp_path_factory.mktemp("criteo")
    for day in range(2):
        write(folder / f"day_{day}", random_rows(64, day))
    criteo.prepare(folder, form="mlperf_v2", max_rows=50)
    return replace(
        dlrm.MLPERF_V2,
        data=str(folder),
        device="cpu",
        precision="float32",
        bottom=(8, 4),
        top=(8, 1),
        cross=(1, 4),
        batch_size=8,
        eval_every=4,
        log_every=1,
        workers=0,
        runs=str(runs),
        name="dlrm",
    )


@pytest.fixture(scope="module")
def dlrm_run(dlrm_config) -> Path:
    with logged():
        dlrm.main(dlrm_config)
    return Path(dlrm_config.runs, "dlrm")


def test_the_log_of_resnet_passes_but_for_quality(resnet_run):
    values = values_of(resnet_run)
    of_optimizer = OF_LARS if values["opt_name"] == "lars" else OF_SGD
    assert set(values) >= {*OF_ALL.split(), *of_optimizer.split()}
    assert values["global_batch_size"] == 64
    assert values["train_samples"] == 128
    assert values["eval_samples"] == 64
    assert values["model_bn_span"] == 8
    metrics = json.loads((resnet_run / "summary.json").read_text())["metrics"]
    assert values["eval_accuracy"] == metrics["top1"]

    assert_only_quality_fails(resnet_run)


def test_the_log_of_bert_passes_but_for_quality(bert_run):
    values = values_of(bert_run)
    assert set(values) >= {*OF_ALL.split(), *OF_BERT.split()}
    evaluations = [r["metadata"] for r in records_of(bert_run) if r["key"] == "eval_accuracy"]
    assert [place["epoch_num"] for place in evaluations] == [16, 32]  # rows, as MLPerf counts

    assert_only_quality_fails(bert_run)


def test_the_log_of_dlrm_passes_but_for_quality_and_counts(dlrm_run):
    values = values_of(dlrm_run)
    assert set(values) >= {*OF_ALL.split(), *OF_DLRM.split()}
    assert values["submission_org"] == "a test"
    assert values["eval_samples"] == 32  # half of the last day
    evaluations = [r["metadata"] for r in records_of(dlrm_run) if r["key"] == "eval_accuracy"]
    assert [place["epoch_num"] for place in evaluations] == [0.5, 1.0]

    assert_only_quality_fails(dlrm_run, "CHECK for 'eval_samples' failed")


def test_the_checker_refuses_a_log_without_a_value(dlrm_run, tmp_path):
    lines = (dlrm_run / mlperf.FILE).read_text().splitlines(keepends=True)
    kept = [line for line in lines if "opt_adagrad_epsilon" not in line]
    (tmp_path / mlperf.FILE).write_text("".join(kept))

    missing = "Required EXACTLY_ONE occurrence of 'opt_adagrad_epsilon'"
    assert_only_quality_fails(tmp_path, "CHECK for 'eval_samples' failed", missing)


def test_evaluations_stand_between_blocks_in_the_order_of_time(dlrm_run):
    records = records_of(dlrm_run)

    keys = [record["key"] for record in records]
    assert keys[:2] == ["cache_clear", "init_start"]
    evaluation = ["block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    block = ["block_start", *evaluation]
    after_start = keys[keys.index("run_start") + 1 :]
    assert after_start == [*block, *block, "run_stop"]
    assert records[-1]["metadata"]["status"] == "aborted"
    times = [record["time_ms"] for record in records]
    assert times == sorted(times)


def test_a_stopped_run_continues_its_log(dlrm_config, dlrm_run):
    config = replace(dlrm_config, name="stopped", save_every=2)
    with logged():
        stop_at(6, terminate, dlrm.main, config)
    folder = Path(config.runs, "stopped")
    first_start = records_of(folder)
    assert "run_stop" not in [record["key"] for record in first_start]

    with logged():
        dlrm.main(config)

    records = records_of(folder)
    assert records[: len(first_start)] == first_start
    assert [record["key"] for record in records] == [r["key"] for r in records_of(dlrm_run)]
    assert values_of(folder)["eval_accuracy"] == values_of(dlrm_run)["eval_accuracy"]


def test_a_run_does_not_change_to_other_ids_when_it_resumes(dlrm_config):
    """--multi-hot is no difference by itself: runs of older versions have no such field."""
    config = replace(dlrm_config, name="changed", save_every=2)
    with logged():
        stop_at(6, terminate, dlrm.main, config)
        with pytest.raises(InputError, match="the first half of day_1; now on day_0, and on day_1"):
            dlrm.main(replace(config, multi_hot=False))


# ---- the log alone -----------------------------------------------------------------------------
class Folder:
    """A run's folder in memory."""

    def __init__(self):
        self.content = None
        self.metrics = b""  # metrics.jsonl

    def read(self, name: str) -> bytes | None:
        return self.metrics if name == "metrics.jsonl" else self.content

    def write(self, name: str, content: bytes) -> None:
        self.content = content

    def keys(self) -> list[str]:
        """Returns the keys of the log's lines since run_start."""
        lines = self.content.decode().splitlines()
        keys = [json.loads(line.removeprefix(mlperf.TOKEN))["key"] for line in lines]
        return keys[keys.index("run_start") + 1 :]


BENCHMARK = Benchmark("resnet", "top1", 0.759, 100, 50, 10, 100, {})


def run_of(folder: Folder, start: int = 0, **facts) -> SimpleNamespace:
    """Returns what a log asks of a run of 20 steps."""
    mesh = SimpleNamespace(num_devices=1, kind="CPU", main_process=True)
    run = SimpleNamespace(folder=folder, path="runs/x", mesh=mesh, benchmark=BENCHMARK, start=start)
    run.total_steps = 20
    run.resumed = folder.content is not None
    run.evaluation_due = False
    for name, value in facts.items():
        setattr(run, name, value)
    return run


def evaluate(log: mlperf.Log, step: int, top1: float) -> None:
    """Notifies a log of an evaluation, as Run does."""
    log.step(step)
    log.pause("checkpoints")
    log.resume()
    log.pause("evaluation")
    log.resume()
    log.pause("evaluation")
    log.line(step, {"eval/top1": top1, "eval/loss": 1.0}, {})
    log.resume()


EVALUATED = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]


def test_the_target_ends_the_log_with_success():
    folder = Folder()
    log = mlperf.Log(run_of(folder), 0, "")
    with log:
        evaluate(log, 10, 0.759)
        evaluate(log, 20, 0.8)
        log.summary()

    assert folder.keys() == [*EVALUATED, "run_stop"]
    assert b'"status": "success"' in folder.content
    assert b'"aborted"' not in folder.content


def test_lines_of_repeated_steps_are_dropped():
    folder = Folder()
    log = mlperf.Log(run_of(folder), 0, "")
    with log:
        evaluate(log, 10, 0.1)
        evaluate(log, 15, 0.2)

    again = mlperf.Log(run_of(folder, start=10), 0, "")
    with again:
        assert folder.keys() == [*EVALUATED, "block_start"]
        evaluate(again, 20, 0.3)
        again.summary()

    assert folder.keys() == [*EVALUATED, *EVALUATED, "run_stop"]


def test_an_evaluation_that_was_killed_begins_anew():
    folder = Folder()
    log = mlperf.Log(run_of(folder), 0, "")
    with log:
        log.step(10)
        log.pause("evaluation")
    assert folder.keys() == EVALUATED[:3]

    run = run_of(folder, start=10, evaluation_due=True)
    again = mlperf.Log(run, 0, "")
    with again:
        assert folder.keys() == EVALUATED[:2]
        again.pause("evaluation")
        again.resume()
        again.pause("evaluation")
        again.line(10, {"eval/top1": 0.1}, {})
        run.evaluation_due = False
        again.resume()

    assert folder.keys() == [*EVALUATED, "block_start"]


def logged_until_10() -> Folder:
    """Returns a folder with a log up to the evaluation of step 10, which metrics.jsonl has, too."""
    folder = Folder()
    with mlperf.Log(run_of(folder), 0, "") as log:
        evaluate(log, 10, 0.1)
    folder.metrics = b'{"step": 5, "loss": 1.0}\n{"step": 10, "eval/top1": 0.1}\n'
    return folder


def test_an_evaluation_that_only_metrics_have_is_added():
    folder = logged_until_10()
    folder.metrics += b'{"step": 20, "eval/top1": 0.8}\n{"step": 30, "ev'

    with mlperf.Log(run_of(folder, start=20), 0, ""):
        pass

    assert folder.keys() == [*EVALUATED, *EVALUATED, "run_stop"]
    assert b'"status": "success"' in folder.content


def test_a_log_with_a_gap_is_not_continued():
    folder = logged_until_10()
    folder.metrics += b'{"step": 12, "eval/top1": 0.8}\n'

    with pytest.raises(InputError, match="lacks the evaluation of step 12, .*without the flag"):
        mlperf.Log(run_of(folder, start=15), 0, "").__enter__()


def test_a_damaged_log_is_named():
    folder = logged_until_10()
    folder.content = folder.content[:-20]

    with pytest.raises(InputError, match="runs/x/mlperf.log is damaged .* another --name"):
        mlperf.Log(run_of(folder, start=10), 0, "").__enter__()


def test_a_run_that_is_no_benchmark_is_refused(runs, monkeypatch, capsys):
    monkeypatch.delenv("CPU_NUM_DEVICES")
    flags = f"tiny --device cpu --runs {runs} --name dot --log mlperf"
    pattern = "--log mlperf is for benchmarks of MLPerf .* train.dlrm with --interaction dcn"
    assert_refused(flags, pattern, dlrm, capsys)


def test_a_resumed_run_without_a_log_is_refused():
    with pytest.raises(InputError, match="resumed after step 10, and has no mlperf.log"):
        mlperf.Log(run_of(Folder(), start=10, resumed=True), 0, "").__enter__()


def test_only_runs_of_the_rules_models_are_benchmarks():
    images = SimpleNamespace(objective="multilabel")
    assert resnet50.benchmark(images, None, None, 1) is None
    assert pretrain.benchmark(SimpleNamespace(model="roberta"), None) is None
    assert dlrm.benchmark(dlrm.MLPERF_V1, None, 1) is None
