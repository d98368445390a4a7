"""What is particular to train/glue.py: every model learns, a step and the evaluation are those of transformers, whose
tools load the export. What it shares with the other scripts is in test_scripts.py."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers import command, exported, fewer_sentences
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trials import TRIALS

from data import glue as glue_data
from data import vocabulary
from models import encoders
from train import glue
from train.common import device, loading

LEARNS = TRIALS["glue"].learns


@pytest.fixture
def trained(run_of):
    return run_of("glue")


@pytest.mark.parametrize(
    ("model", "task", "metric"),
    [("distilbert", "cola", "mcc"), ("roberta", "sst2", "accuracy"), ("xlnet", "cola", "mcc")],
)
def test_the_other_models_learn(model, task, metric, tmp_path):
    config = replace(LEARNS, model=model, task=task, lengths=(32,), epochs=0.75, eval_every=10_000, runs=str(tmp_path))
    assert glue.main(replace(config, name="learns"))[metric] > 0.8
    untrained = glue.main(replace(config, lr=0.0, epochs=0.05, name="does-not"))
    assert abs(untrained[metric] - (0.5 if metric == "accuracy" else 0)) < 0.2


def test_what_is_not_given_is_the_models_recipe():
    for name, recipe in {
        "bert": (3, 0.01, "google-bert/bert-base-uncased"),
        "roberta": (10, 0.1, "FacebookAI/roberta-base"),
        "xlnet": (3, 0.0, "xlnet/xlnet-base-cased"),
    }.items():
        found = glue.validate(glue.Config(model=name, data="x/y"))
        assert (found.epochs, found.weight_decay, found.checkpoint) == recipe
    given = glue.validate(glue.Config(model="roberta", data="x/y", lr=0.5, warmup=0.0, checkpoint="a/b"))
    assert (given.lr, given.warmup, given.checkpoint, given.weight_decay) == (0.5, 0.0, "a/b", 0.1)


def test_a_step_is_that_of_plain_pytorch_on_the_cpu(mesh, monkeypatch):
    """Transformers' own model and loss, without the empty rows; clipped, with decay where it belongs."""
    config = replace(glue.validate(glue.TINY), task="mrpc", lengths=(64,), batch_size=8)
    config = replace(config, lr=1e-3, weight_decay=10.0, clip=0.1)
    torch.manual_seed(0)
    data = glue.open_data(config)
    model = data.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.eval()  # no dropout
    plain = copy.deepcopy(model)
    fewer_sentences(monkeypatch, (6, 0))
    dataset = glue_data.Encoded(glue_data.read("synthetic", "mrpc", "train"), data.tokenizer, 64)
    state = glue.build(config, data, mesh)
    with loading.parallel_loader(
        dataset, glue.batches(config, dataset, mesh, train=False), mesh, train=False, workers=0
    ) as loader:
        (batch,) = list(loader)
    assert batch["mask"].sum().item() == 6 and batch["input_ids"].shape == (8, 64)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    # Adam makes of any gradient a step of lr: its eps must be seen above them, for the clipping to be.
    for group in state.optimizer.param_groups:
        group["eps"] = 1e-2
    found = device.compiled(glue.train_step, mesh)(state, batch, config, mesh)

    rows = {name: torch.from_numpy(value) for name, value in dataset.batch(np.arange(6), (64,)).items()}
    loss = plain(**{**rows, "labels": rows["labels"].long()}).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    of_norms = {p for module in plain.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    groups = [{"params": [], "weight_decay": 10.0}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in plain.named_parameters():
        groups[name.endswith("bias") or parameter in of_norms]["params"].append(parameter)
    torch.optim.AdamW(groups, 1e-3, (0.9, 0.999), 1e-2).step()
    assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert found["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-4) and norm > 0.5
    for name, value in state.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-6, atol=2e-7, msg=name)
    moved = plain.state_dict()["classifier.weight"] - before["classifier.weight"]
    assert moved.abs().max() > 1e-4


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_biases_and_norms_do_not_decay_and_all_else_does(kind):
    model = glue.open_data(glue.validate(replace(glue.TINY, model=kind))).model
    decayed, exempt = encoders.parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))
    ids = {id(p) for p in exempt["params"]}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            expected = isinstance(module, nn.LayerNorm) or name in ("bias", "r_w_bias", "r_r_bias", "r_s_bias")
            assert (id(parameter) in ids) == expected, (type(module), name)


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
    fewer_sentences(monkeypatch, (64, 77))
    config = replace(glue.TINY, model="distilbert", task="mnli", lengths=(24, 40), epochs=1)
    metrics = glue.main(replace(config, runs=str(tmp_path), name="mnli"))
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
    fewer_sentences(monkeypatch, (2048, 141))
    config = replace(glue.TINY, task="stsb", lengths=(32,), epochs=3, eval_every=10_000, runs=str(tmp_path))
    metrics = glue.main(replace(config, name="stsb"))
    assert metrics["pearson"] > 0.8 and metrics["spearman"] > 0.8
    expected = plain_metrics(f"{tmp_path}/stsb/export", "stsb", "validation", 32, 141)
    assert metrics == pytest.approx(expected, rel=1e-4)
    untrained = glue.main(replace(config, lr=0.0, epochs=0.05, name="does-not"))
    assert abs(untrained["pearson"]) < 0.3


def test_the_export_is_a_pipeline_with_names_of_labels_and_the_runs_accuracy(trained):
    path, metrics, _ = trained
    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    examples = glue_data.read("synthetic", "sst2", "validation")
    names = [answer["label"] for answer in classify(examples.first, batch_size=64)]
    assert set(names) == {"negative", "positive"}
    right = [name == ("negative", "positive")[label] for name, label in zip(names, examples.labels, strict=True)]
    assert np.mean(right) == metrics["accuracy"]
    assert [answer["label"] for answer in classify(["the dog is one of two.", "a dog of ten there."])]


def test_training_goes_on_from_an_export_and_without_its_weights_it_begins_anew(trained, mesh):
    path, _, config = trained
    config = glue.validate(replace(config, checkpoint=f"{path}/export"))
    weights = exported(path)
    _, _, model, tokenizer = glue.open_data(config)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
    assert len(weights) >= len(list(model.parameters()))
    text = "the dog, one of six."
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(f"{path}/export")(text)["input_ids"]
    model = glue.open_data(replace(config, pretrained=False, model="auto")).model
    assert not torch.equal(model.state_dict()["classifier.weight"], weights["classifier.weight"])
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--epochs 0", "--epochs is 0.*above 0"),
        ("--epochs inf", "--epochs is inf.*finite"),
        ("--clip 0", "--clip is 0.*above 0"),
        ("--warmup 1", "--warmup is 1.*below 1"),
        ("--weight-decay -0.1", "--weight-decay is -0.1.*at least 0"),
        ("--batch-size 0", "--batch-size is 0.*at least 1"),
        ("--batch-size 6", "6.*4"),
        ("--lengths 32 16", r"--lengths are \(32, 16\).*must rise"),
        ("--lengths 4 16", r"--lengths are \(4, 16\).*at least 8"),
        ("--data /nowhere/at/all --checkpoint EXPORT", "/nowhere/at/all.*SST-2"),
        ("--data /nowhere/at/all --model auto", "--checkpoint is missing.*auto"),
        ("--checkpoint /nowhere/at/all", "checkpoint /nowhere/at/all cannot be read"),
        ("--checkpoint EXPORT --model roberta", "is a bert, not a roberta"),
        ("--checkpoint EXPORT --lengths 16 40", "--lengths go up to 40.*32 positions"),
    ],
)
def test_values_that_are_refused(refused, trained, flags, pattern):
    refused(glue, "tiny " + flags.replace("EXPORT", f"{trained[0]}/export"), pattern)


def test_an_unknown_task_is_refused_with_the_known_ones(capsys):
    code, _, error = command("tiny --task sst3", glue.main, glue.PRESETS, capsys)
    assert code == 2 and "sst3" in error and all(task in error for task in glue_data.TASKS) and "Traceback" not in error


def test_a_checkpoint_whose_tokenizer_is_another_models(refused, tmp_path, trained):
    folder = tmp_path / "mixed"
    model = AutoModelForSequenceClassification.from_pretrained(f"{trained[0]}/export")
    model.save_pretrained(folder)
    lines = [f"word{i} other{i}" for i in range(300)]
    vocabulary.learn(lines * 2, "bert", 900).save_pretrained(folder)
    tokens, words = model.config.vocab_size, len(AutoTokenizer.from_pretrained(folder))
    assert words > tokens
    refused(glue, f"tiny --checkpoint {folder}", f"{folder}.*model of {tokens} tokens.*tokenizer of {words}")
