"""What is particular to train/glue.py: every model learns, a step and the evaluation are those of transformers, whose
tools load the export. What it shares with the other scripts is in test_scripts.py."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from eager_runs import without_dropout
from helpers import equal, exported, fewer_sentences, losses, page_code, records, summary
from huggingface_hub import ModelCard
from model_helpers import randomized
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trials import TRIALS

from data import glue as glue_data
from data import vocabulary
from models import architectures, classification, encoders
from train import glue
from train.common import checkpoint, device, loading

LEARNS = TRIALS["glue"].learns


# DistilBERT learns a regression, below.
@pytest.mark.parametrize(
    ("model", "task", "metric"),
    [("roberta", "sst2", "accuracy"), pytest.param("xlnet", "cola", "mcc", marks=pytest.mark.slow)],
)
def test_the_other_models_learn(model, task, metric, tmp_path):
    config = replace(LEARNS, model=model, task=task, lengths=(32,), epochs=0.75, eval_every=10_000, runs=str(tmp_path))
    assert glue.main(config)[metric] > 0.8


def test_what_is_not_given_is_the_models_recipe():
    found = glue.validate(glue.Config(data="x/y"))
    assert (found.epochs, found.weight_decay, found.checkpoint) == (3, 0.01, "google-bert/bert-base-uncased")
    given = glue.validate(glue.Config(model="roberta", data="x/y", lr=0.5, warmup=0.0, checkpoint="a/b"))
    assert (given.lr, given.warmup, given.checkpoint, given.weight_decay) == (0.5, 0.0, "a/b", 0.1)


def test_parts_of_a_batch_give_the_numbers_of_all_of_it(monkeypatch, tmp_path):
    """One parameter is not trained, as sinusoidal positions, such as RoFormer's: parts must not let it decay."""
    positions, classifier = "bert.embeddings.position_embeddings.weight", classification.classifier

    def partly_trained(*args):
        found = classifier(*args)
        found.model.get_parameter(positions).requires_grad_(False)
        return found

    monkeypatch.setattr(classification, "classifier", partly_trained)
    monkeypatch.setattr(encoders, "new_configuration", encoders.new_configuration)  # which is replaced here
    without_dropout(encoders)
    fewer_sentences(monkeypatch, (44, 20))  # 16, 16 and 12 an epoch; a part of the last is half empty
    config = replace(LEARNS, lengths=(32,), batch_size=16, epochs=2, clip=0.1, log_every=1, runs=str(tmp_path))
    whole = glue.main(replace(config, name="one"))
    parts = glue.main(replace(config, name="two", update_every=2))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and two == pytest.approx(one, rel=1e-4) and max(one) - min(one) > 0.02
    assert parts == pytest.approx(whole, rel=1e-4)
    norms = [[line["gradient_norm"] for line in records(tmp_path / name) if "lr" in line] for name in ("one", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and min(norms[0]) > 0.1, "nothing was clipped"
    assert torch.equal(*(exported(tmp_path / name)[positions] for name in ("one", "two")))


def test_a_step_is_that_of_plain_pytorch_on_the_cpu(mesh, monkeypatch):
    """Transformers' own model and loss, without the empty rows; clipped, with decay where it belongs."""
    settings = {"task": "mrpc", "lengths": (64,), "batch_size": 8, "lr": 1e-3, "weight_decay": 10.0, "clip": 0.1}
    config = replace(glue.validate(glue.TINY), **settings)
    torch.manual_seed(0)
    data = glue.open_data(config)
    plain = copy.deepcopy(randomized(data.model))
    fewer_sentences(monkeypatch, (6, 0))
    dataset = glue_data.Encoded(glue_data.read("synthetic", "mrpc", "train"), data.tokenizer, 64)
    state = glue.build(config, data, mesh)
    batches = glue.batch_plan(config, dataset, mesh, train=False)
    with loading.parallel_loader(dataset, batches, mesh, train=False, workers=0) as loader:
        (batch,) = list(loader)
    assert batch["mask"].sum().item() == 6 and batch["input_ids"].shape == (8, 64)
    before = plain.classifier.weight.clone()
    # Adam makes of any gradient a step of lr: its eps must be seen above them, for the clipping to be.
    for group in state.optimizer.param_groups:
        group["eps"] = 1e-2
    found = device.compiled(glue.train_step, mesh)(state, batch, config, mesh)

    rows = loading.as_tensors(dataset.batch(np.arange(6), (64,)))
    loss = plain(**rows | {"labels": rows["labels"].long()}).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.AdamW(architectures.parameter_groups(plain, 10.0), 1e-3, (0.9, 0.999), 1e-2).step()
    assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert found["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-4) and norm > 0.5
    torch.testing.assert_close(checkpoint.to_host(state.model.state_dict()), plain.state_dict(), rtol=1e-6, atol=2e-7)
    assert (plain.classifier.weight - before).abs().max() > 1e-4


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_biases_and_norms_do_not_decay_and_all_else_does(kind):
    model = glue.open_data(glue.validate(replace(glue.TINY, model=kind))).model
    decayed, exempt = architectures.parameter_groups(model, 0.3)
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
    assert len(examples) == size
    logits = []
    for first, second in zip(examples.first, examples.second, strict=True):
        encoded = tokenizer(first, second, truncation=True, max_length=lengths, return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**encoded).logits[0])
    logits, labels = torch.stack(logits), torch.tensor(examples.labels)
    if model.num_labels == 1:
        predictions, loss = logits[:, 0], F.mse_loss(logits[:, 0], labels)
    else:
        predictions, loss = logits.argmax(1), F.cross_entropy(logits, labels)
    return glue_data.score(task, predictions.numpy(), examples.labels) | {"loss": loss.item()}


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
    config = replace(glue.TINY, model="distilbert", task="stsb", lengths=(32,), epochs=3, eval_every=10_000)
    metrics = glue.main(replace(config, runs=str(tmp_path), name="stsb"))
    assert metrics["pearson"] > 0.8 and metrics["spearman"] > 0.8
    expected = plain_metrics(f"{tmp_path}/stsb/export", "stsb", "validation", 32, 141)
    assert metrics == pytest.approx(expected, rel=1e-4)


def test_the_export_is_a_pipeline_with_names_of_labels_and_the_runs_accuracy(trained):
    path, metrics, _ = trained
    classify = transformers.pipeline("text-classification", model=f"{path}/export", device="cpu")
    examples = glue_data.read("synthetic", "sst2", "validation")
    names = [answer["label"] for answer in classify(examples.first, batch_size=64)]
    assert set(names) == {"negative", "positive"}
    right = [name == ("negative", "positive")[label] for name, label in zip(names, examples.labels, strict=True)]
    assert np.mean(right) == metrics["accuracy"]
    page = ModelCard.load(f"{path}/export/README.md").data
    assert {each.metric_type: each.metric_value for each in page.eval_results} == summary(path)["metrics"] == metrics
    assert page.pipeline_tag == "text-classification" and page.base_model is page.datasets is None


def test_the_page_classifies_a_sentence_and_a_pair_with_an_export(trained, capsys):
    path, *_ = trained
    exec(
        page_code("exports.md", "BERT and its kin in transformers", **{"runs/<name>": path}).split("What train")[0], {}
    )
    said = capsys.readouterr().out
    assert len(re.findall(r"'label': '(negative|positive)', 'score': 0\.\d+", said)) == 2, said


def test_training_goes_on_from_an_export_and_without_its_weights_it_begins_anew(trained, mesh):
    path, _, config = trained
    config = glue.validate(replace(config, checkpoint=f"{path}/export"))
    weights = exported(path)
    _, _, model, tokenizer, head = glue.open_data(config)
    assert head == "", "all is as it was"
    assert equal({name: model.state_dict()[name] for name in weights}, weights)
    assert len(weights) >= len(list(model.parameters()))
    text = "the dog, one of six."
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(f"{path}/export")(text)["input_ids"]
    model = glue.open_data(replace(config, pretrained=False, model="auto")).model
    assert not torch.equal(model.state_dict()["classifier.weight"], weights["classifier.weight"])
    assert model.config.vocab_size == len(tokenizer)


def reordered(path: str, to: Path, names: dict[int, str]) -> str:
    """The run's export as another library might have left it: the rows of its head in the other order, and named so."""
    shutil.copytree(f"{path}/export", to)
    model = AutoModelForSequenceClassification.from_pretrained(to)
    with torch.no_grad():
        for parameter in (model.classifier.weight, model.classifier.bias):
            parameter.copy_(parameter.flip(0))
    model.config.id2label, model.config.label2id = names, {name: number for number, name in names.items()}
    model.save_pretrained(to)
    return str(to)


def answers(folder: str, names: dict[str, int]) -> np.ndarray:
    """The classes that transformers' pipeline finds in the synthetic task."""
    classify = transformers.pipeline("text-classification", model=folder, device="cpu")
    found = classify(glue_data.read("synthetic", "sst2", "validation").first, batch_size=64)
    return np.array([names[answer["label"]] for answer in found])


@pytest.mark.parametrize("names", [{0: "positive", 1: "negative"}, {0: "POSITIVE", 1: "Negative"}])
def test_a_checkpoint_whose_classes_have_another_order_is_evaluated_by_their_names(names, trained, tmp_path, capsys):
    path, metrics, config = trained
    labels = glue_data.read("synthetic", "sst2", "validation").labels
    folder = reordered(path, tmp_path / "theirs", names)
    accuracy = (answers(folder, {name: names[0] == name for name in names.values()}) == labels).mean()
    assert accuracy == metrics["accuracy"] > 0.9
    config = replace(config, checkpoint=folder, lr=0.0, epochs=0.1, runs=str(tmp_path), name="run")
    assert glue.main(config)["accuracy"] == accuracy
    assert f"order {names[0]}, {names[1]}, the data negative, positive" in capsys.readouterr().out
    ours = answers(f"{tmp_path}/run/export", {"negative": 0, "positive": 1})
    assert (ours == labels).mean() == accuracy


def test_classes_without_names_are_stated_or_trained_in_an_order_that_is_said(trained, tmp_path, capsys, refused):
    path, metrics, config = trained
    folder = reordered(path, tmp_path / "theirs", {0: "LABEL_0", 1: "LABEL_1"})
    flags = f"tiny --checkpoint {folder} --lr 0 --epochs 0.1"
    refused(glue, flags, "does not name the 2 classes.*without training.*--labels negative,positive")
    refused(glue, f"{flags} --labels good,bad", "--labels is good,bad; expected negative,positive")
    config = replace(config, checkpoint=folder, lr=0.0, epochs=0.1, runs=str(tmp_path), name="stated")
    assert glue.main(replace(config, labels="Positive, negative"))["accuracy"] == metrics["accuracy"]
    assert set(transformers.AutoConfig.from_pretrained(f"{tmp_path}/stated/export").label2id) == {
        "negative",
        "positive",
    }
    capsys.readouterr()
    glue.main(replace(config, lr=1e-9, name="trained"))
    assert "taken to be in the order negative, positive" in capsys.readouterr().out
    names = transformers.AutoConfig.from_pretrained(f"{tmp_path}/trained/export").id2label
    assert names == {0: "negative", 1: "positive"}


def test_a_head_for_other_classes_is_trained_anew_and_not_evaluated(trained, tmp_path, capsys, refused):
    path, _, config = trained
    folder = reordered(path, tmp_path / "theirs", {0: "spam", 1: "ham"})
    refused(glue, f"tiny --checkpoint {folder} --lr 0", "classes spam, ham.*negative, positive.*without training")
    glue.main(replace(config, checkpoint=folder, epochs=0.1, runs=str(tmp_path), name="run"))
    assert re.search("the head is new: .* spam, ham, .* negative, positive", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--labels negative,positive", "--labels is negative,positive; it is for the head of a --checkpoint"),
        ("--labels negative,positive --checkpoint EXPORT --no-pretrained", "for the head of a --checkpoint"),
        ("--labels a,b --task stsb --checkpoint EXPORT", "stsb is a regression and has no classes"),
        ("--epochs inf", "--epochs is inf.*below inf"),
        ("--warmup 1", "--warmup is 1.*below 1"),
        ("--lengths 32 16", r"--lengths are \(32, 16\).*must rise"),
        ("--lengths 4 16", r"--lengths are \(4, 16\).*at least 8"),
        ("--data /nowhere/at/all --checkpoint EXPORT", "/nowhere/at/all.*SST-2"),
        ("--data /nowhere/at/all --model auto", "--checkpoint is missing.*auto"),
        ("--checkpoint EXPORT --model roberta", "is a bert, not a roberta"),
        ("--checkpoint EXPORT --lengths 16 40", "--lengths go up to 40.*32 positions"),
    ],
)
def test_values_that_are_refused(refused, trained, flags, pattern):
    refused(glue, "tiny " + flags.replace("EXPORT", f"{trained[0]}/export"), pattern)
