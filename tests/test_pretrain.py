"""train/pretrain.py as its users run it: every objective is learned; it gives the same numbers on other devices, after
a kill and from parts of a batch; keeps its graph contract; its export loads in transformers and in train.glue, all the
way from a text file to a pipeline; and bad input is refused."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, BertConfig, pipeline

from data.prepare import text as prepare_text
from errors import InputError
from models import distilbert, encoders, fairseq_roberta
from train import glue, pretrain
from train.common import cli, device, loading

LEARNS = replace(pretrain.TINY, steps=160, warmup_steps=40, eval_every=1000)
# Checkpoints after 4 and 8 of 10 updates.
SHORT = replace(pretrain.TINY, steps=10, warmup_steps=5, log_every=1, eval_every=4, keep=3)


def records(path) -> list[dict]:
    """The lines of metrics.jsonl without their timings."""
    return [{**json.loads(line), "timing": None} for line in open(f"{path}/metrics.jsonl")]


def losses(path) -> list[float]:
    return [record["loss"] for record in records(path) if "loss" in record]


def report(path) -> dict:
    return json.load(open(f"{path}/summary.json"))["report"]


def exported(path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(f"{path}/export/model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flags(config) -> list[str]:
    """The command line that makes this config of the tiny preset."""
    made = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(pretrain.TINY, field.name):
            name = field.name.replace("_", "-")
            made += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return made


# A training on the command line that sends itself and its workers a signal before it begins a batch.
KILLED = """
import glob, os, signal, time
from train import pretrain
from train.common import cli, device

seed_step = device.seed_step

def seed_or_die(seed, number):
    if number == {batch}:
        while not glob.glob("{runs}/*/checkpoints/step_00000004/COMPLETE"):  # another thread writes it
            time.sleep(0.02)
        os.killpg(os.getpgrp(), signal.SIGKILL)
    seed_step(seed, number)

device.seed_step = seed_or_die
cli.run(pretrain.main, pretrain.PRESETS)
"""


def run(config, program: tuple[str, ...] = ("-m", "train.pretrain"), devices: int = 4) -> tuple[int, str]:
    """Trains in a process of its own, with a worker process: (exit code, output)."""
    process = subprocess.run(
        [sys.executable, *program, "tiny", *flags(replace(config, workers=1))],
        env={**os.environ, "CPU_NUM_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        start_new_session=True,
    )
    return process.returncode, process.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BERT that has learned something: (its folder, the metrics that main returned, its config)."""
    config = replace(LEARNS, runs=str(tmp_path_factory.mktemp("runs")), name="learns")
    return f"{config.runs}/learns", pretrain.main(config), config


@pytest.fixture(scope="module")
def short(trained):
    """A shorter one, for comparisons bit for bit: (its folder, its config)."""
    config = replace(SHORT, runs=trained[2].runs, name="short")
    pretrain.main(config)
    return f"{config.runs}/short", config


@pytest.fixture(scope="module")
def fairseq(tmp_path_factory):
    """A RoBERTa in fairseq's format that has learned something; as `trained`."""
    config = replace(LEARNS, model="fairseq-roberta", steps=60, runs=str(tmp_path_factory.mktemp("runs")), name="run")
    return f"{config.runs}/run", pretrain.main(config), config


def guess(config) -> float:
    """Accuracy of always naming the commonest token."""
    valid_set = pretrain.open_data(pretrain.completed(config))[1]
    examples = [valid_set.example(row, np.random.default_rng(row)) for row in range(len(valid_set))]
    labels = np.concatenate([example["labels"][example["weights"] > 0] for example in examples])
    return np.bincount(labels).max() / len(labels)


# ---- it learns -------------------------------------------------------------------------------------------------------


def test_masked_words_are_learned(trained):
    _, metrics, config = trained
    assert 0.05 < guess(config) < 0.15
    assert metrics["accuracy"] > 0.33
    assert metrics["loss"] < 2.3


def test_without_a_learning_rate_they_are_not(tmp_path):
    # Weights that do not move are the same after 2 updates and after all.
    metrics = pretrain.main(replace(LEARNS, lr=0.0, steps=2, runs=str(tmp_path)))
    assert metrics["accuracy"] < 0.1
    assert metrics["loss"] > 4.5


def test_fairseqs_roberta_learns(fairseq):
    path, metrics, _ = fairseq
    assert losses(path)[0] > 5.5
    assert metrics["loss"] < 3.8 and metrics["accuracy"] > 0.15


def test_roberta_and_its_twin_learn_the_same(fairseq, tmp_path):
    config = replace(fairseq[2], model="roberta", runs=str(tmp_path))
    assert pretrain.main(config) == fairseq[1]
    assert not os.path.exists(tmp_path / "run/export/fairseq") and equal(
        exported(tmp_path / "run"), exported(fairseq[0])
    )


def test_a_permutation_is_learned(tmp_path):
    config = replace(LEARNS, model="xlnet", steps=60, warmup_steps=20, precision="bfloat16")
    config = replace(config, runs=str(tmp_path), name="run")
    before = device.compilations()
    metrics = pretrain.main(config)
    assert losses(tmp_path / "run")[0] > 4.5
    assert metrics["loss"] < 3.6 and metrics["accuracy"] > 1.5 * guess(config)
    contract = report(tmp_path / "run")
    assert contract["recompilations"] == contract["fallbacks"] == [] and device.compilations() - before <= 4
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "run/export")
    assert type(model).__name__ == "XLNetLMHeadModel"


def test_a_student_learns_of_the_teacher_that_another_run_exported(trained, tmp_path):
    config = replace(LEARNS, model="distilbert", teacher=f"{trained[0]}/export", steps=30, warmup_steps=5, lr=1e-3)
    metrics = pretrain.main(replace(config, runs=str(tmp_path), name="run"))
    still = pretrain.main(replace(config, steps=2, lr=0.0, runs=str(tmp_path), name="still"))
    # It begins with a layer of its teacher, which is worth something.
    assert trained[1]["loss"] < metrics["loss"] < still["loss"] - 0.2 < 4.2
    lines = [record for record in records(tmp_path / "run") if "soft" in record]
    assert lines[-1]["soft"] < 0.6 * lines[0]["soft"] and lines[-1]["cosine"] < 0.8 * lines[0]["cosine"]
    contract = report(tmp_path / "run")
    assert contract["recompilations"] == contract["fallbacks"] == []
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run/export")
    assert type(model).__name__ == "DistilBertForMaskedLM" and model.config.n_layers == 1


def test_a_trial_of_a_student_makes_its_teacher(trained, tmp_path, capsys):
    config = replace(LEARNS, model="distilbert", steps=2, eval_every=2, precision="bfloat16")
    config = replace(config, runs=str(tmp_path), name="run")
    metrics = pretrain.main(config)
    (made,) = set(os.listdir(tmp_path)) - {"run"}
    student, teacher = (json.load(open(f"{tmp_path}/{name}/config.json"))["config"] for name in ("run", made))
    assert teacher["model"] == "bert" and student["teacher"] == f"{tmp_path}/{made}/export"
    assert pretrain.main(config) == metrics
    assert capsys.readouterr().out.count("is finished") == 2


def test_the_next_sentence_whole_words_lamb_and_parts_of_a_batch_together(tmp_path):
    config = replace(SHORT, next_sentence=True, whole_words=True, optimizer="lamb", update_every=2, lr=0.02, steps=12)
    config = replace(config, precision="bfloat16")
    metrics = pretrain.main(replace(config, runs=str(tmp_path), name="run"))
    assert 0.3 < metrics["next_sentence_accuracy"] < 1
    found = losses(tmp_path / "run")
    assert found[0] > 5.3 and found[-1] < found[0] - 0.5  # log(116 words) + log(2)
    contract = report(tmp_path / "run")
    assert contract["recompilations"] == contract["fallbacks"] == []
    weights = exported(tmp_path / "run")
    _, loaded = AutoModelForPreTraining.from_pretrained(tmp_path / "run/export", output_loading_info=True)
    assert "cls.seq_relationship.weight" in weights and not loaded["missing_keys"]


def test_lamb_moves_each_weight_as_far_as_it_is_long(mesh):
    """You et al. 2020, algorithm 2: the first update of every matrix is lr times its own norm."""
    config = replace(pretrain.TINY, optimizer="lamb", lr=0.01)
    rows, _ = pretrain.open_data(config)
    model = pretrain.open_model(config, rows.text)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = pretrain.build(config, model, mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, value in model.state_dict().items():
        if name.endswith("query.weight"):
            moved = (value.cpu() - before[name]).norm() / before[name].norm()
            assert moved.item() == pytest.approx(0.01, rel=1e-3), name


@pytest.mark.parametrize("clip", [0.125, float("inf")])
def test_an_update_is_the_mean_of_its_parts_clipped(clip, mesh):
    """On the host, with plain gradient descent; two parts are the same batch twice."""
    train_set, _ = pretrain.open_data(pretrain.TINY)
    batch = loading.stack([train_set.example(row, np.random.default_rng(row)) for row in range(8)])
    new = pretrain.open_model(pretrain.TINY, train_set.text).eval()  # no dropout
    one, two = copy.deepcopy(new), copy.deepcopy(new)
    whole = pretrain.train_step(one, None, torch.optim.SGD(one.parameters(), 1.0), batch, clip, mesh)
    totals = {"loss": torch.zeros(()), "words": torch.zeros(())}
    for _ in range(2):
        pretrain.gradient_step(two, None, batch, totals, 2, mesh)
    parts = pretrain.update_step(two, torch.optim.SGD(two.parameters(), 1.0), totals, clip)
    torch.testing.assert_close(parts, whole)
    assert whole["loss"] == whole["words"] > 4
    assert totals["loss"] == 0 and not any(parameter.grad.any() for parameter in two.parameters())
    moved = {name: new.state_dict()[name] - value for name, value in one.state_dict().items()}
    for name, value in two.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name] - value, moved[name], rtol=1e-4, atol=1e-6)
    norm = torch.stack([moved[name].norm() for name, _ in new.named_parameters()]).norm().item()
    assert norm == pytest.approx(0.125, rel=1e-4) if clip < 1 else norm > 0.5


def test_learning_rate_rises_and_falls_linearly():
    config = replace(pretrain.TINY, lr=0.4, warmup_steps=4, steps=8)
    rates = [pretrain.learning_rate(config, step) for step in range(9)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1, 0])
    assert pretrain.learning_rate(replace(config, warmup_steps=0, steps=1), 0) == 0.4


def test_a_models_recipe_fills_what_is_not_given():
    config = pretrain.completed(pretrain.Config(model="roberta", data="somewhere", lr=1.0))
    assert (config.batch_size, config.steps, config.lr, config.warmup_steps) == (8192, 500_000, 1.0, 24_000)
    assert pretrain.completed(pretrain.Config(data="somewhere")).batch_size == 256


def test_the_optimizer_has_its_recipe_and_spares_biases_and_norms(mesh):
    for name, recipe in pretrain.RECIPES.items():
        config = replace(pretrain.TINY, model=name)
        model = pretrain.open_model(config, pretrain.open_data(config)[0].text)
        optimizer = pretrain.build(config, model, mesh)
        decayed, spared = optimizer.param_groups
        assert (decayed["weight_decay"], spared["weight_decay"]) == (recipe.weight_decay, 0.0)
        assert decayed["betas"] == (0.9, recipe.beta2) and decayed["eps"] == 1e-6
        assert all(parameter.dim() == 1 for parameter in spared["params"] if name != "xlnet")
        assert all(parameter.dim() > 1 for parameter in decayed["params"])


@pytest.mark.parametrize(("model", "length", "expected"), [("bert", 128, 21), ("bert", 512, 82), ("xlnet", 512, 88)])
def test_places_for_predictions(model, length, expected, monkeypatch):
    monkeypatch.setattr(pretrain, "SYNTHETIC_LENGTH", length)
    train_set, valid_set = pretrain.open_data(replace(pretrain.TINY, model=model))
    assert train_set.predictions == valid_set.predictions == expected
    assert pretrain.open_data(replace(pretrain.TINY, model=model, predictions=7))[0].predictions == 7


def test_run_folder_holds_everything_about_the_run(trained, short):
    path, metrics, _ = trained
    names = {"config.json", "metrics.jsonl", "curves.png", "summary.json", "tb", "checkpoints", "export"}
    assert names <= set(os.listdir(path))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(f"{path}/export"))
    summary = json.load(open(f"{path}/summary.json"))
    assert summary["metrics"] == metrics and summary["examples_per_second"] > 0
    assert sorted(os.listdir(f"{short[0]}/checkpoints")) == ["step_00000004", "step_00000008", "step_00000010"]


def test_a_finished_run_is_not_trained_again(trained, capsys):
    _, metrics, config = trained
    assert pretrain.main(config) == metrics
    assert "is finished" in capsys.readouterr().out


def test_graph_contract(trained):
    contract = report(trained[0])
    assert contract["recompilations"] == contract["fallbacks"] == []


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_one_device_gives_the_losses_of_four_and_compiles_two_steps(short, tmp_path):
    path, config = short
    code, output = run(replace(config, runs=str(tmp_path), name="one"), devices=1)
    assert code == 0 and "on 1 CPU device(s)" in output, output
    one, four = losses(tmp_path / "one"), losses(path)
    assert one == pytest.approx(four, rel=1e-5)
    assert four[0] - four[-1] > 0.5
    contract = report(tmp_path / "one")
    assert contract["recompilations"] == contract["fallbacks"] == []
    # Training and evaluation; and tiny ones: Adam's, a number that hosts compare.
    assert contract["graphs"] <= 2 + 2


def at_batch(monkeypatch, wanted: int, act: Callable) -> None:
    """Acts before that batch begins."""
    seed_step = device.seed_step

    def seed_or_act(seed, number):
        if number == wanted:
            act()
        seed_step(seed, number)

    monkeypatch.setattr(device, "seed_step", seed_or_act)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_killed_and_terminated_it_goes_on_to_the_same_numbers(short, tmp_path, monkeypatch, capsys):
    path, config = short
    config = replace(config, runs=str(tmp_path), name="killed")
    code, output = run(config, ("-c", KILLED.format(batch=7, runs=tmp_path)))
    assert code == -signal.SIGKILL and "step     5/10" in output, output
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        at_batch(patch, 7, terminate)
        pretrain.main(config)
    pretrain.main(config)
    output = capsys.readouterr().out
    assert "resuming after step 4" in output and "resuming after step 7" in output
    assert records(tmp_path / "killed") == records(path)  # every loss and metric, bit for bit
    assert equal(exported(tmp_path / "killed"), exported(path))


@pytest.fixture
def no_dropout(monkeypatch):
    configuration = encoders.configuration

    def without(*arguments):
        settings = configuration(*arguments)
        settings.hidden_dropout_prob = settings.attention_probs_dropout_prob = 0.0
        return settings

    monkeypatch.setattr(encoders, "configuration", without)


def test_parts_of_a_batch_give_the_numbers_of_all_of_it_also_after_a_crash(no_dropout, tmp_path, monkeypatch, capsys):
    # One prediction a row: parts of equal weight, so that the mean of their means is that of the batch.
    config = replace(SHORT, predictions=1, steps=6, eval_every=2, runs=str(tmp_path))
    whole = pretrain.main(replace(config, name="one"))
    config = replace(config, name="two", update_every=2)

    def crash():
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_batch(patch, 6, crash)  # the second part of update 3
        pretrain.main(config)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        at_batch(patch, 7, terminate)  # the first part of update 4
        pretrain.main(config)
    parts = pretrain.main(config)
    output = capsys.readouterr().out
    assert "resuming after step 2" in output and "resuming after step 4" in output
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-5) and max(one) - min(one) > 0.05
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    moved = exported(tmp_path / "two")
    for name, weight in exported(tmp_path / "one").items():
        # A weight moves by up to 1e-2 here; where its gradient is rounding alone, Adam makes steps of that.
        torch.testing.assert_close(moved[name], weight, rtol=0, atol=2e-3)


# ---- the export ------------------------------------------------------------------------------------------------------


def test_transformers_loads_the_export_and_finds_the_metrics_of_the_run(trained, mesh):
    path, metrics, config = trained
    model = AutoModelForMaskedLM.from_pretrained(f"{path}/export").eval()
    _, valid_set = pretrain.open_data(config)
    nll, right, count = 0.0, 0, 0
    with loading.parallel_loader(valid_set, 32, mesh, train=False, seed=config.seed, workers=0) as loader:
        batches = [{name: value.cpu() for name, value in batch.items()} for batch in loader]
    for batch in batches:
        assert batch["mask"].all()
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        rows, places = torch.nonzero(batch["weights"], as_tuple=True)
        logits = logits[rows, batch["positions"][rows, places].long()]
        labels = batch["labels"][rows, places].long()
        nll += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    assert {"loss": nll / count, "accuracy": right / count} == pytest.approx(metrics, rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(f"{path}/export")
    assert tokenizer.get_vocab() == valid_set.text.tokenizer.get_vocab()
    # A word has the number after that of the word before it, see data/text.py.
    fill = pipeline("fill-mask", model=f"{path}/export", tokenizer=f"{path}/export")
    assert {"token_str", "score"} <= set(fill("bano [MASK] bara base.")[0])


def test_fairseqs_export_is_read_back_with_the_same_weights_and_tokens(fairseq):
    path, _, _ = fairseq
    settings, weights, tokenizer = fairseq_roberta.read_folder(f"{path}/export/fairseq")
    model = AutoModelForMaskedLM.from_pretrained(f"{path}/export")
    expected = model.state_dict()
    # fairseq has no types of tokens: what the only one adds to every token is in the positions.
    kind, places = (f"roberta.embeddings.{name}_embeddings.weight" for name in ("token_type", "position"))
    assert expected[kind].any() and not weights[kind].any()
    expected[places][2:] += expected[kind]
    expected[kind] = weights[kind]
    assert equal(weights, expected) and settings.vocab_size == model.config.vocab_size
    made = AutoTokenizer.from_pretrained(f"{path}/export")
    assert tokenizer.get_vocab() == made.get_vocab()
    line = "bano bapu bara dewu."
    assert tokenizer(line).input_ids == made(line).input_ids


@pytest.mark.parametrize("of", ["trained", "fairseq"])
def test_pretraining_goes_on_from_an_export(of, tmp_path, request):
    path, metrics, config = request.getfixturevalue(of)
    folder = f"{path}/export" + ("/fairseq" if of == "fairseq" else "")
    config = replace(config, checkpoint=folder, lr=0.0, steps=2, runs=str(tmp_path), name="on")
    assert pretrain.main(config) == pytest.approx(metrics, rel=1e-5)
    assert losses(tmp_path / "on")[0] < metrics["loss"] + 0.5
    if of == "trained":
        assert equal(exported(tmp_path / "on"), exported(path))


# ---- the whole way ---------------------------------------------------------------------------------------------------

GOOD, BAD = ("fine", "lovely", "great", "bright"), ("awful", "dull", "poor", "grim")
THINGS = ("film", "plot", "cast", "song", "scene", "book")


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """(a judgement of one thing, 1 where it is good)."""
    rng = np.random.default_rng(seed)
    made = []
    for label in rng.integers(0, 2, count).tolist():
        words = (GOOD, BAD)[1 - label]
        first, second, thing = rng.choice(words), rng.choice(words), rng.choice(THINGS)
        made.append((f"The {thing} was {first} and also {second}.", label))
    return made


def write_text(path: Path, documents: int = 150) -> str:
    lines = [line for line, _ in sentences(5 * documents, seed=0)]
    path.write_text("\n\n".join("\n".join(lines[i : i + 5]) for i in range(0, len(lines), 5)) + "\n")
    return str(path)


def prepared(folder: Path, **options) -> str:
    """A folder of rows, of text that is made for it."""
    options = {"kind": "bert", "length": 32, "vocab_size": 120, "valid_share": 0.2} | options
    folder.mkdir()
    prepare_text.prepare(write_text(folder / "all.txt"), folder / "rows", **options)
    return str(folder / "rows")


def test_the_whole_way_from_a_text_file_to_a_pipeline(tmp_path):
    data = str(tmp_path / "rows")
    options = ("--kind", "bert", "--length", "32", "--vocab-size", "120", "--valid-share", "0.2", "--workers", "1")
    prepare_text.main(["--data", write_text(tmp_path / "all.txt"), "--out", data, *options])
    config = replace(LEARNS, data=data, steps=40, warmup_steps=10, runs=str(tmp_path / "runs"), name="pretrain")
    metrics = pretrain.main(config)
    assert losses(tmp_path / "runs/pretrain")[0] > 3.5 > 2.5 > metrics["loss"]
    (tmp_path / "glue/SST-2").mkdir(parents=True)
    for split, count in (("train", 320), ("dev", 64)):
        rows = "".join(f"{line}\t{label}\n" for line, label in sentences(count, seed=len(split)))
        (tmp_path / f"glue/SST-2/{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    fine = replace(glue.TINY, data=str(tmp_path / "glue"), task="sst2", lengths=(24,), epochs=5)
    export = f"{tmp_path}/runs/pretrain/export"
    metrics = glue.main(replace(fine, checkpoint=export, runs=str(tmp_path / "runs"), name="glue"))
    assert metrics["accuracy"] > 0.9
    classify = pipeline("text-classification", model=f"{tmp_path}/runs/glue/export")
    fresh = sentences(20, seed=7)
    found = classify([line for line, _ in fresh])
    names = [glue.glue.TASKS["sst2"].labels[label] for _, label in fresh]
    assert np.mean([result["label"] == name for result, name in zip(found, names, strict=True)]) > 0.8
    assert all(0.5 <= result["score"] <= 1 for result in found)


# ---- what the user can get wrong: one sentence, exit code 2, no traceback --------------------------------------------


def command(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    """Exit code and standard error of the script with these arguments."""
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "tiny", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.run(pretrain.main, pretrain.PRESETS)
    return exit.value.code, capsys.readouterr().err


def assert_one_sentence(result, *words):
    code, error = result
    assert code == 2, error
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lr", "-1"), ("--lr is -1.0", "at least 0")),
        (("--lr", "nan"), ("--lr is nan", "at least 0")),
        (("--steps", "0"), ("--steps is 0", "at least 1")),
        (("--update-every", "0"), ("--update-every is 0", "at least 1")),
        (("--keep", "0"), ("--keep is 0", "at least 1")),
        (("--workers", "-2"), ("--workers is -2", "at least -1")),
        (("--predictions", "-1"), ("--predictions is -1", "at least 0")),
        (("--predictions", "33"), ("predictions is 33", "1 to 32")),
        (("--batch-size", "10", "--update-every", "4"), ("--batch-size 10", "--update-every 4")),
        (("--batch-size", "12", "--update-every", "2"), ("is 6", "4 devices")),
        (("--batch-size", "4096"), ("batch_size is 4096", "2048 examples")),
        (("--data", ""), ("--data is missing", "make data", "synthetic")),
        (("--data", "/nowhere/at/all"), ("/nowhere/at/all", "make data")),
        (("--model", "roberta", "--next-sentence"), ("--next-sentence", "bert", "roberta")),
        (("--model", "distilbert", "--data", "/some/text"), ("--teacher is missing", "bert-base-uncased")),
        (("--model", "distilbert", "--teacher", "/nowhere/bert"), ("/nowhere/bert", "cannot be read")),
        (("--checkpoint", "/nowhere/bert"), ("/nowhere/bert", "cannot be read")),
        (("--name", "a/b"), ("--name a/b", "--runs")),
    ],
)
def test_values_that_are_refused(monkeypatch, capsys, tmp_path, arguments, words):
    assert_one_sentence(command(monkeypatch, capsys, "--runs", tmp_path, *arguments), *words)


def test_text_that_is_not_prepared_or_otherwise(monkeypatch, capsys, tmp_path):
    def refused(*arguments):
        return command(monkeypatch, capsys, "--runs", tmp_path, *arguments)

    (tmp_path / "text").mkdir()
    write_text(tmp_path / "text/all.txt")
    assert_one_sentence(refused("--data", tmp_path / "text"), "text has no report.json", "all.txt", "make data")
    data = prepared(tmp_path / "made")
    assert_one_sentence(refused("--data", data, "--next-sentence"), "next-sentence prediction", "--pairs")
    assert_one_sentence(refused("--data", data, "--model", "xlnet"), "--kind bert", "needs xlnet")


def test_a_checkpoint_of_another_architecture_or_vocabulary(monkeypatch, capsys, tmp_path, trained, fairseq):
    ours, theirs, data = f"{trained[0]}/export", f"{fairseq[0]}/export", prepared(tmp_path / "made")

    def refused(*arguments):
        return command(monkeypatch, capsys, "--runs", tmp_path, *arguments)

    assert_one_sentence(refused("--checkpoint", theirs), theirs, "is a roberta, not a bert")
    result = refused("--model", "roberta", "--checkpoint", ours)
    assert_one_sentence(result, ours, "is a bert, not a roberta")
    result = refused("--model", "fairseq-roberta", "--checkpoint", theirs)
    assert_one_sentence(result, theirs, "model.pt")
    result = refused("--checkpoint", ours, "--data", data)
    assert_one_sentence(result, ours, "other tokens", data)
    result = refused("--model", "distilbert", "--teacher", ours, "--data", data)
    assert_one_sentence(result, ours, "other tokens", data)
    assert_one_sentence(refused("--model", "distilbert", "--teacher", theirs), theirs, "is a roberta, not a bert")


def test_rows_longer_than_the_positions(monkeypatch, capsys, tmp_path, trained):
    monkeypatch.setattr(pretrain, "SYNTHETIC_LENGTH", 40)
    result = command(monkeypatch, capsys, "--runs", tmp_path, "--checkpoint", f"{trained[0]}/export")
    assert_one_sentence(result, "rows have 40 tokens", "32 positions")
    arguments = ("--runs", tmp_path, "--model", "distilbert", "--teacher", f"{trained[0]}/export")
    result = command(monkeypatch, capsys, *arguments)
    assert_one_sentence(result, f"teacher {trained[0]}/export", "32 positions", "40")


def write_teacher(folder: Path, trained, **settings) -> str:
    """A new BERT with the tokens of the small language."""
    made = BertConfig.from_pretrained(f"{trained[0]}/export", **settings)
    shutil.copytree(f"{trained[0]}/export", folder)
    AutoModelForMaskedLM.from_config(made).save_pretrained(folder)
    return str(folder)


def test_a_teacher_of_another_size(monkeypatch, capsys, tmp_path, trained):
    def refused(teacher: str):
        return command(monkeypatch, capsys, "--runs", tmp_path, "--model", "distilbert", "--teacher", teacher)

    wide = write_teacher(tmp_path / "wide", trained, hidden_size=96)
    assert_one_sentence(refused(wide), wide, "width of 96", "64")
    flat = write_teacher(tmp_path / "flat", trained, num_hidden_layers=0)
    assert_one_sentence(refused(flat), flat, "0 layers", "has 1")
    padded = write_teacher(tmp_path / "padded", trained, vocab_size=128)
    assert_one_sentence(refused(padded), padded, "vocabulary of 128", "one of 116")


def test_a_teacher_may_have_more_positions_than_rows_have_tokens(trained, tmp_path, mesh):
    teacher = write_teacher(tmp_path / "long", trained, max_position_embeddings=50)
    config = replace(pretrain.TINY, model="distilbert", teacher=teacher)
    rows = pretrain.open_data(config)[0].text
    student = pretrain.open_model(config, rows)
    taught = distilbert.open_teacher(teacher, student, rows.tokenizer, config.data, True)
    theirs, ours = (model.base_model.embeddings.position_embeddings.weight for model in (taught, student))
    assert len(theirs) == 50 and torch.equal(ours, theirs[:32])


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(InputError, match="loss is (nan|inf) at step .*the training diverged"):
        pretrain.main(replace(SHORT, lr=1e30, warmup_steps=1, runs=str(tmp_path)))


def test_other_values_for_the_same_name(monkeypatch, capsys, trained):
    result = command(monkeypatch, capsys, *flags(replace(trained[2], lr=0.1)))
    assert_one_sentence(result, "lr was 0.003, now 0.1", "another --name")
