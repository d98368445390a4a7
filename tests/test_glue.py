"""train/glue.py as its users run it: every model learns, gives the same numbers on other devices and after a kill,
keeps its graph contract; its export is transformers'; and bad input is refused."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data import glue as glue_data
from data import vocabulary
from errors import InputError
from models import encoders
from train import glue
from train.common import cli, device, loading

LEARNS = replace(glue.TINY, epochs=1.5, log_every=16)
# 16 steps, evaluated and kept after 5, 10, 15 and 16.
SHORT = replace(glue.TINY, lengths=(32,), epochs=0.25, log_every=1, eval_every=5)
CHANCE, LEARNED = 0.6, 0.95  # accuracy on two classes of equal numbers


def records(path) -> list[dict]:
    """The lines of metrics.jsonl without their timings."""
    return [{**json.loads(line), "timing": None} for line in open(f"{path}/metrics.jsonl")]


def losses(path) -> list[float]:
    return [record["loss"] for record in records(path) if "loss" in record]


def exported(path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(f"{path}/export/model.safetensors")


def flags(config) -> list[str]:
    """The command line that makes this config of the preset tiny."""
    made = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(glue.TINY, field.name):
            made += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return made


# A training on the command line that dies before it begins a step.
KILLED = """
import glob, os, time
from train import glue
from train.common import cli, device

seed_step = device.seed_step

def seed_or_die(seed, number):
    if number == {step}:
        while not glob.glob("{runs}/*/checkpoints/step_00000005/COMPLETE"):  # another thread writes it
            time.sleep(0.02)
        os.killpg(os.getpgrp(), {signal})
    seed_step(seed, number)

device.seed_step = seed_or_die
cli.run(glue.main, glue.PRESETS)
"""


def run(config, program: tuple[str, ...] = ("-m", "train.glue"), devices: int = 4) -> tuple[int, str]:
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
    """BERT after it has learned: (its folder, the metrics that main returned, its config)."""
    config = replace(LEARNS, runs=str(tmp_path_factory.mktemp("runs")), name="learns")
    device.reset_graph_report()
    graphs = device.compilations()
    metrics = glue.main(config)
    return f"{config.runs}/learns", metrics, config, device.compilations() - graphs


@pytest.fixture(scope="module")
def short(trained):
    """A shorter run, for comparisons bit for bit: (its folder, its config)."""
    config = replace(SHORT, runs=trained[2].runs, name="short")
    glue.main(config)
    return f"{config.runs}/short", config


def fewer(monkeypatch, train: int, validation: int) -> None:
    """Synthetic tasks of so many examples."""
    read = glue_data.read

    def read_some(data, task, split, seed=0):
        examples, size = read(data, task, split, seed), train if split == "train" else validation
        second = examples.second and examples.second[:size]
        return glue_data.Examples(examples.first[:size], second, examples.labels[:size])

    monkeypatch.setattr(glue_data, "read", read_some)


# ---- it learns -------------------------------------------------------------------------------------------------------


def test_bert_learns(trained):
    path, metrics, config, _ = trained
    assert metrics["accuracy"] > LEARNED and metrics["loss"] < 0.2
    names = {"config.json", "metrics.jsonl", "curves.png", "summary.json", "tb", "checkpoints", "export"}
    assert names <= set(os.listdir(path))
    assert json.load(open(f"{path}/summary.json"))["metrics"] == metrics
    assert len(os.listdir(f"{path}/checkpoints")) == config.keep


def test_without_a_learning_rate_it_does_not(tmp_path):
    # Weights that do not move are the same after 7 steps and after all.
    metrics = glue.main(replace(LEARNS, lengths=(32,), lr=0.0, epochs=0.1, runs=str(tmp_path)))
    assert 1 - CHANCE < metrics["accuracy"] < CHANCE and metrics["loss"] > 0.6


@pytest.mark.parametrize(
    ("model", "task", "metric"),
    [("distilbert", "cola", "mcc"), ("roberta", "sst2", "accuracy"), ("xlnet", "cola", "mcc")],
)
def test_the_other_models_learn(model, task, metric, tmp_path):
    config = replace(LEARNS, model=model, task=task, lengths=(32,), eval_every=10_000, runs=str(tmp_path))
    assert glue.main(replace(config, name="learns"))[metric] > 0.8
    untrained = glue.main(replace(config, lr=0.0, epochs=0.05, name="does-not"))
    assert abs(untrained[metric] - (0.5 if metric == "accuracy" else 0)) < 0.2


def test_the_learning_rate_rises_linearly_and_falls_to_0():
    config = replace(glue.completed(glue.TINY), lr=0.8, warmup=0.4)
    rates = [glue.learning_rate(config, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.16, 0.32, 0.48, 0.64, 0.8, 4 / 6, 3.2 / 6, 0.4, 1.6 / 6, 0.8 / 6])
    assert glue.learning_rate(replace(config, warmup=0.0), 0, 10) == 0.8


def test_what_is_not_given_is_the_models_recipe():
    found = {name: glue.completed(glue.Config(model=name, data="x/y")) for name in ("bert", "roberta", "xlnet")}
    assert [found[name].epochs for name in found] == [3, 10, 3]
    assert [found[name].weight_decay for name in found] == [0.01, 0.1, 0.0]
    assert [found[name].checkpoint for name in found] == [
        "google-bert/bert-base-uncased",
        "FacebookAI/roberta-base",
        "xlnet/xlnet-base-cased",
    ]
    given = glue.completed(glue.Config(model="roberta", data="x/y", lr=0.5, warmup=0.0, checkpoint="a/b"))
    assert (given.lr, given.warmup, given.checkpoint, given.weight_decay) == (0.5, 0.0, "a/b", 0.1)


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_one_device_gives_the_losses_of_four(short, tmp_path):
    code, output = run(replace(short[1], runs=str(tmp_path), name="one"), devices=1)
    assert code == 0 and "on 1 CPU device(s)" in output, output
    one, four = losses(tmp_path / "one"), losses(short[0])
    assert len(four) == 16 and np.ptp(four) > 0.02
    assert one == pytest.approx(four, rel=2e-5)


def test_killed_and_terminated_it_goes_on_to_the_same_numbers(short, tmp_path, monkeypatch, capsys):
    path, config = short
    config = replace(config, runs=str(tmp_path), name="killed")
    code, output = run(config, ("-c", KILLED.format(step=9, signal=int(signal.SIGKILL), runs=tmp_path)))
    assert code == -signal.SIGKILL and "step     5/16" in output and "step    10/16" not in output, output
    seed_step = device.seed_step

    def seed_or_terminate(seed, number):
        if number == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        seed_step(seed, number)

    monkeypatch.setattr(device, "seed_step", seed_or_terminate)
    with pytest.raises(SystemExit, match="143"):
        glue.main(config)
    monkeypatch.setattr(device, "seed_step", seed_step)
    assert glue.main(config) == json.load(open(f"{path}/summary.json"))["metrics"]
    output = capsys.readouterr().out
    assert "resuming after step 5" in output and "resuming after step 12" in output
    assert records(tmp_path / "killed") == records(path)  # every loss and metric, bit for bit
    one, other = exported(tmp_path / "killed"), exported(path)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert glue.main(config) and "is finished" in capsys.readouterr().out


def test_a_step_is_that_of_plain_pytorch_on_the_cpu(mesh, tmp_path):
    """Transformers' own model and loss, without the empty rows; clipped, with decay where it belongs."""
    config = replace(glue.completed(glue.TINY), task="mrpc", lengths=(64,), batch_size=8, lr=1e-3, weight_decay=10.0)
    torch.manual_seed(0)
    model, tokenizer = glue.open_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.eval()  # no dropout
    plain = copy.deepcopy(model)
    examples = glue_data.read("synthetic", "mrpc", "train")
    part = glue_data.Examples(examples.first[:6], examples.second[:6], examples.labels[:6])
    dataset = glue_data.Encoded(part, tokenizer, 64)
    optimizer = glue.build(config, model, mesh)
    plan = glue.batching.Buckets(dataset.lengths, [(8, 64)])
    with loading.parallel_loader(dataset, plan, mesh, train=False, workers=0) as loader:
        (batch,) = list(loader)
    assert batch["mask"].sum().item() == 6 and batch["input_ids"].shape == (8, 64)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    # Adam makes of any gradient a step of lr: its eps must be seen above them, for the clipping to be.
    for group in optimizer.param_groups:
        group["eps"] = 1e-2
    found = device.compiled(glue.train_step, mesh)(model, optimizer, batch, 0.1, mesh)

    rows = {name: torch.from_numpy(value) for name, value in dataset.batch(np.arange(6), (64,)).items()}
    loss = plain(**{**rows, "labels": rows["labels"].long()}).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norms = [module for module in plain.modules() if isinstance(module, nn.LayerNorm)]
    exempt = {id(p) for module in norms for p in module.parameters()}
    exempt |= {id(p) for name, p in plain.named_parameters() if name.endswith("bias")}
    groups = [
        {"params": [p for p in plain.parameters() if id(p) not in exempt], "weight_decay": 10.0},
        {"params": [p for p in plain.parameters() if id(p) in exempt], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, 1e-3, (0.9, 0.999), 1e-2).step()
    assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert found["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-4) and norm > 0.5
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-6, atol=2e-7, msg=name)
    moved = plain.state_dict()["classifier.weight"] - before["classifier.weight"]
    assert moved.abs().max() > 1e-4


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_biases_and_norms_do_not_decay_and_all_else_does(kind):
    model, _ = glue.open_model(replace(glue.completed(replace(glue.TINY, model=kind))))
    decayed, exempt = encoders.parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))
    ids = {id(p) for p in exempt["params"]}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            expected = isinstance(module, nn.LayerNorm) or name in ("bias", "r_w_bias", "r_r_bias", "r_s_bias")
            assert (id(parameter) in ids) == expected, (type(module), name)


# ---- the contract, and the evaluation --------------------------------------------------------------------------------


def test_graph_contract(trained):
    path, _, config, graphs = trained
    report = json.load(open(f"{path}/summary.json"))["report"]
    assert report["recompilations"] == report["fallbacks"] == []
    # Training and evaluation in each shape; and tiny ones: what the hosts compare, Adam's beginning.
    assert 2 * len(config.lengths) <= graphs <= 2 * len(config.lengths) + 3


def plain_metrics(folder: str, task: str, split: str, lengths: int, size: int) -> dict[str, float]:
    """The metrics of an export, by transformers alone, an example at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = glue_data.read("synthetic", task, split)
    predictions, sum_of_losses = [], 0.0
    assert len(examples) == size
    for i in range(size):
        second = examples.second and examples.second[i]
        encoded = tokenizer(examples.first[i], second, truncation=True, max_length=lengths, return_tensors="pt")
        label = torch.tensor([examples.labels[i]])
        with torch.no_grad():
            result = model(**encoded, labels=label.float() if model.num_labels == 1 else label)
        sum_of_losses += result.loss.item()
        predictions.append(result.logits[0, 0] if model.num_labels == 1 else result.logits[0].argmax())
    return glue_data.score(task, torch.stack(predictions).numpy(), examples.labels) | {"loss": sum_of_losses / size}


def test_every_example_of_both_mnli_splits_counts_once_and_long_ones_are_cut(tmp_path, monkeypatch, capsys):
    """77 examples in batches of 32, in two shapes, the longer of which is too short for some of them."""
    fewer(monkeypatch, 64, 77)
    config = replace(
        glue.TINY, model="distilbert", task="mnli", lengths=(24, 40), epochs=1, runs=str(tmp_path), name="mnli"
    )
    metrics = glue.main(config)
    assert set(metrics) == {"accuracy", "loss", "mismatched_accuracy", "mismatched_loss"}
    for split, prefix in (("validation_matched", ""), ("validation_mismatched", "mismatched_")):
        expected = plain_metrics(f"{tmp_path}/mnli/export", "mnli", split, 40, 77)
        found = {name: metrics[prefix + name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4)
    assert metrics["loss"] != metrics["mismatched_loss"]
    examples = glue_data.read("synthetic", "mnli", "train")
    tokenizer = AutoTokenizer.from_pretrained(f"{tmp_path}/mnli/export")
    long = sum(len(row) > 40 for row in tokenizer(examples.first, examples.second)["input_ids"])
    headline = capsys.readouterr().out
    assert 0 < long < 64 and f"64 examples ({long} cut to 40 tokens)" in headline


def test_a_regression_learns_and_counts_every_example_once(tmp_path, monkeypatch):
    fewer(monkeypatch, 2048, 141)
    config = replace(glue.TINY, task="stsb", lengths=(32,), epochs=3, eval_every=10_000, runs=str(tmp_path))
    metrics = glue.main(replace(config, name="stsb"))
    assert metrics["pearson"] > 0.8 and metrics["spearman"] > 0.8
    expected = plain_metrics(f"{tmp_path}/stsb/export", "stsb", "validation", 32, 141)
    assert metrics == pytest.approx(expected, rel=1e-4)
    untrained = glue.main(replace(config, lr=0.0, epochs=0.05, name="does-not"))
    assert abs(untrained["pearson"]) < 0.3


# ---- the export ------------------------------------------------------------------------------------------------------


def test_the_export_is_a_pipeline_with_names_of_labels_and_the_runs_accuracy(trained):
    path, metrics, _, _ = trained
    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    examples = glue_data.read("synthetic", "sst2", "validation")
    names = [answer["label"] for answer in classify(examples.first, batch_size=64)]
    assert set(names) == {"negative", "positive"}
    right = [name == ("negative", "positive")[label] for name, label in zip(names, examples.labels, strict=True)]
    assert np.mean(right) == metrics["accuracy"]
    assert [answer["label"] for answer in classify(["the dog is one of two.", "a dog of ten there."])]


def test_training_goes_on_from_an_export_and_without_its_weights_it_begins_anew(trained, mesh):
    path, _, config, _ = trained
    config = glue.completed(replace(config, checkpoint=f"{path}/export"))
    weights = exported(path)
    model, tokenizer = glue.open_model(config)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
    assert len(weights) >= len(list(model.parameters()))
    text = "the dog, one of six."
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(f"{path}/export")(text)["input_ids"]
    model, _ = glue.open_model(replace(config, pretrained=False, model="auto"))
    assert not torch.equal(model.state_dict()["classifier.weight"], weights["classifier.weight"])
    assert model.config.vocab_size == len(tokenizer)


# ---- what the user can get wrong: one sentence, exit code 2, no traceback --------------------------------------------


def command(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    """Exit code and standard error of the script with these arguments."""
    monkeypatch.setattr(sys, "argv", ["glue.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.run(glue.main, glue.PRESETS)
    return exit.value.code, capsys.readouterr().err


def assert_one_sentence(result, *words):
    code, error = result
    assert code == 2
    assert error.startswith("error: ") and len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lr", "-1"), ("--lr is -1.0", "at least 0")),
        (("--lr", "nan"), ("--lr is nan", "at least 0")),
        (("--epochs", "0"), ("--epochs is 0", "above 0")),
        (("--clip", "0"), ("--clip is 0", "above 0")),
        (("--warmup", "1"), ("--warmup is 1", "below 1")),
        (("--weight-decay", "-0.1"), ("--weight-decay is -0.1", "at least 0")),
        (("--batch-size", "0"), ("--batch-size is 0", "at least 1")),
        (("--batch-size", "6"), ("6", "4")),
        (("--workers", "-2"), ("--workers is -2", "at least -1")),
        (("--keep", "0"), ("--keep is 0", "at least 1")),
        (("--lengths", "32", "16"), ("--lengths are (32, 16)", "must rise")),
        (("--lengths", "4", "16"), ("--lengths are (4, 16)", "at least 8")),
        (("--data", ""), ("--data is missing", "nyu-mll/glue", "synthetic")),
        (("--data", "/nowhere/at/all", "--checkpoint", "EXPORT"), ("/nowhere/at/all", "SST-2")),
        (("--data", "/nowhere/at/all", "--model", "auto"), ("--checkpoint is missing", "auto")),
        (("--checkpoint", "/nowhere/at/all"), ("checkpoint /nowhere/at/all cannot be read",)),
        (("--checkpoint", "EXPORT", "--model", "roberta"), ("is a bert, not a roberta",)),
        (("--checkpoint", "EXPORT", "--lengths", "16", "40"), ("--lengths go up to 40", "32 positions")),
        (("--name", "a/b"), ("--name a/b", "--runs")),
    ],
)
def test_values_that_training_refuses(monkeypatch, capsys, tmp_path, trained, arguments, words):
    arguments = [argument.replace("EXPORT", f"{trained[0]}/export") for argument in arguments]
    assert_one_sentence(command(monkeypatch, capsys, "tiny", "--runs", tmp_path, *arguments), *words)


def test_an_unknown_task_is_refused_with_the_known_ones(monkeypatch, capsys, tmp_path):
    code, error = command(monkeypatch, capsys, "tiny", "--runs", tmp_path, "--task", "sst3")
    assert code == 2 and "sst3" in error and all(task in error for task in glue_data.TASKS) and "Traceback" not in error
    with pytest.raises(InputError, match="task is 'sst3'; expected one of cola, sst2"):
        glue.main(replace(SHORT, task="sst3", runs=str(tmp_path)))


def test_a_checkpoint_whose_tokenizer_is_another_models(monkeypatch, capsys, tmp_path, trained):
    folder = tmp_path / "mixed"
    model = AutoModelForSequenceClassification.from_pretrained(f"{trained[0]}/export")
    model.save_pretrained(folder)
    lines = [f"word{i} other{i}" for i in range(300)]
    vocabulary.learn(lines * 2, "bert", 900).save_pretrained(folder)
    words = len(AutoTokenizer.from_pretrained(folder))
    assert words > model.config.vocab_size
    result = command(monkeypatch, capsys, "tiny", "--runs", tmp_path / "runs", "--checkpoint", folder)
    assert_one_sentence(result, str(folder), f"model of {model.config.vocab_size} tokens", f"tokenizer of {words}")


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        ("sentence\tlabel", "a dog\t2", ("dev.tsv", "line 3", "2")),
        ("sentence\tscore", "a dog\t1", ("dev.tsv", "sentence, score", "label")),
    ],
)
def test_a_damaged_file_is_named_with_its_line(monkeypatch, capsys, tmp_path, trained, header, line, words):
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "a dog\t1\na cat\t0\n" * 20)
    (folder / "dev.tsv").write_text(f"{header}\na cat\t0\n{line}\n")
    arguments = ("--data", tmp_path, "--checkpoint", f"{trained[0]}/export", "--runs", tmp_path / "runs")
    assert_one_sentence(command(monkeypatch, capsys, "tiny", *arguments), *words)


def test_other_values_for_the_same_name(monkeypatch, capsys, trained):
    arguments = ("tiny", *flags(replace(trained[2], lr=0.1)))
    assert_one_sentence(command(monkeypatch, capsys, *arguments), "lr was 0.002, now 0.1", "another --name")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    fewer(monkeypatch, 256, 32)
    with pytest.raises(InputError, match=re.compile("(nan|inf) at step .*the training diverged")):
        glue.main(replace(SHORT, lr=1e30, epochs=1, runs=str(tmp_path)))
